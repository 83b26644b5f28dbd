"""What `rl-plugins bench --quality` does: measures, prints, and keeps the results in a checkout."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_plugins.cards.quality import lines_of
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim
from rl_plugins.lab.quality import page
from rl_plugins.lab.quality.measure import SIZES, jobs, read, run
from rl_plugins.lab.quality.summary import summary, write
from rl_plugins.lab.quality.train import TRAINED
from rl_plugins.lab.quality.variants import ABSENT, BASELINE
from rl_plugins.lab.quality.worlds import WORLDS
from rl_plugins.runtime import registry
from rl_plugins.runtime.bars import tracked

RAW = "benchmarks/quality/records.jsonl.gz"
SECONDS = 0.4  # of a core, for a record; runs of many steps take half a minute


def session(
    console: Console,
    methods: Sequence[str],
    worlds: Sequence[str],
    seeds: int,
    at_a_time: int,
    out: Path,
    checkout: Path | None = None,
    dry_run: bool = False,
    sizes: Mapping[int, int] = SIZES,
) -> None:
    """Measures what `out` lacks, and says what was found of the methods, or of all.

    Args:
        worlds: names or paths of pools; all without any.
        checkout: gets records, summary and figures.
        sizes: rollouts of a batch -> batches.

    Raises:
        ConfigError: an unknown world or method, or a method that acts in no world.
    """
    parts = list(registry.select(list(methods)).classes)
    if absent := [name for name in parts if name in ABSENT]:
        raise ConfigError(f"`{absent[0]}` acts in no world. Reason: {ABSENT[absent[0]]}. Leave it out.")
    file, wanted = out / "quality.jsonl", jobs(worlds or [*WORLDS, *TRAINED], parts, range(seeds), sizes)
    done = read(file)
    missing = [job for job in wanted if job.key not in done]
    if dry_run:
        minutes = len(missing) * SECONDS / 60 / at_a_time
        console.print(f"{len(missing)} of {len(wanted)} records to make, about {minutes:.0f} minutes.")
        return
    claim(out, "bench")
    for record in tracked(run(missing, file, at_a_time), "Gradients", console, len(missing)):
        if "refused" in record:
            console.print(f"{record['world']}, {record['variant']}: {record['refused']}", highlight=False)
    keys = {job.key for job in wanted}
    found = [record for key, record in read(file).items() if key in keys]
    told = summary(found)
    for name in parts or sorted({m for p in [*told["places"], *told["trainings"]] for m in p["methods"]}):
        console.print(f"\n{name}", highlight=False)
        for line in lines_of(told, name):
            console.print(f"- {line}", highlight=False)
    console.print(f"\nBeside {BASELINE} with 8 rollouts per prompt. Records: {file}", highlight=False)
    if checkout is not None:
        publish(read(file), checkout)


def publish(records: Mapping[tuple[Any, ...], Mapping[str, Any]], root: Path) -> None:
    """Keeps records, beside those that are there, summary and figures in a checkout."""
    if not (root / "rl_plugins" / "lab" / "quality").is_dir():
        raise ConfigError(f"{root} is no checkout of rl-plugins. Name the folder of one with --publish.")
    raw = root / RAW
    raw.parent.mkdir(parents=True, exist_ok=True)
    records = {**read(raw), **records}
    lines = "".join(json.dumps(record) + "\n" for record in records.values())
    raw.write_bytes(gzip.compress(lines.encode(), mtime=0))
    told = write(root / "rl_plugins", [dict(r) for r in records.values()])
    page.draw(told, root / page.FIGURES)
