"""What the comparisons in this folder share: files for TRL's script, runs under one budget, and the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_plugins.lab.compare import report
from rl_plugins.lab.compare.plan import Comparison, Variant, make_plan
from rl_plugins.lab.compare.runs import run_all
from rl_plugins.lab.compare.trl import Trl
from rl_plugins.lab.demo.settings import ON_CPU

CONFIG: dict[str, Any] = {**ON_CPU, "learning_rate": 1e-3, "warmup_steps": 5}


def arguments(description: str, out: str) -> argparse.Namespace:
    """The options of a script: steps, seeds and the folder of the results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser.parse_args()


def write_rows(folder: Path, **splits: Sequence[Mapping[str, Any]]) -> None:
    """One file of JSON lines per split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(
    args: argparse.Namespace,
    config: Mapping[str, Any],
    variants: Mapping[str, tuple[Sequence[str], Mapping[str, Mapping[str, Any]]]],
    labels: Mapping[str, str],
    note: str,
) -> None:
    """Runs all variants with all seeds, one at a time, and writes report.md, summary.json and curves.png.

    Args:
        args: of `arguments`.
        config: of every run.
        variants: label -> methods in order, and the parameters of each. The baseline comes first.
        labels: logged value -> what it is called; the first one is the main one.
        note: the first line of the report.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    host = Trl(yaml.safe_dump({**CONFIG, "max_steps": args.steps, **config}, sort_keys=False))
    plans = [
        make_plan(host, [Variant(label, tuple(methods))], range(args.seeds), args.out, params)
        for label, (methods, params) in variants.items()
    ]
    runs = [run for of_seed in zip(*(plan.runs for plan in plans), strict=True) for run in of_seed]
    comparison = Comparison(
        tuple(plan.variants[0] for plan in plans), tuple(range(args.seeds)), tuple(runs), args.out, (note,)
    )
    # The reward functions and parsers are in this folder.
    seconds = run_all(comparison, 1, watch=next(iter(labels)), environment={"PYTHONPATH": str(Path(__file__).parent)})
    summary = report.write(comparison, list(labels), seconds, labels)
    print(report.text(summary))
