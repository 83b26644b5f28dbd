"""Keeps results of the bench in a checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench import figures, summary
from rl_plugins.lab.bench.results import Results, is_current

RAW = "benchmarks/bench"


def publish(out: Path, root: Path) -> None:
    """Keeps raw results, summary and figures in a checkout. Runs with old settings are left out."""
    if not (root / "rl_plugins" / "lab" / "bench").is_dir():
        raise ConfigError(f"{root} is no checkout of rl-plugins. Name the folder of one with --publish.")
    kept, in_verl = _kept(out, root / RAW), _kept(out / "verl", root / RAW / "verl")
    told = summary.write(root / "rl_plugins", kept, in_verl)
    folder = root / "docs" / "figures" / "bench"
    shutil.rmtree(folder, ignore_errors=True)
    figures.draw(kept, told, folder)


def _kept(out: Path, raw: Path) -> Results:
    """The raw results of a checkout with those of a folder, written and returned."""
    kept = Results.read(raw)
    for run in Results.read(out).runs.values():
        kept.add(run)
    kept = Results(run for run in kept.runs.values() if is_current(run))
    if kept.runs:
        kept.write(raw)
    return kept
