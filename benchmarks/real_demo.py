"""What a run of `rl-plugins demo --real` showed, kept, and its table in docs/real.md.

rl-plugins demo --real --out demo-results && python benchmarks/real_demo.py demo-results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from real_learning import write_on_page

RESULTS = Path(__file__).parent / "real_demo.json"
KEPT = ("seeds", "budget", "labels", "variants")


def table(found: dict[str, Any]) -> str:
    """Of values before training and after it; of several seeds their means."""
    variants = found["variants"]
    lines = ["| | " + " | ".join(variants) + " |", "|---|" + "---|" * len(variants)]
    for name, label in found["labels"].items():
        if name.startswith("eval_"):
            shown = (v["metrics"][name] for v in variants.values())
            cells = [f"{_mean(m['start']):.3f} -> {_mean(m['end']):.3f}" for m in shown]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    for name, label in (("steps", "optimizer steps"), ("seconds", "seconds beside other programs")):
        cells = [f"{_mean(v['costs'][name]):,.0f}" for v in variants.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    seeds = len(found["seeds"])
    return "\n".join(lines) + f"\n\nSeeds: {seeds}." + (" One decides nothing." if seeds == 1 else "")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    if len(sys.argv) > 1:
        summary = json.loads((Path(sys.argv[1]) / "summary.json").read_text())
        RESULTS.write_text(json.dumps({name: summary[name] for name in KEPT}, indent=1) + "\n")
    write_on_page("real_demo.py", table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
