"""Held-out values of the runs of `rl-plugins demo --real`, kept, and their table in docs/real.md.

rl-plugins demo --real --out demo-results && python benchmarks/real_demo.py demo-results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from real_learning import write_on_page

RESULTS = Path(__file__).parent / "real_demo.json"
SHOWN = {"eval_rewards/solved/mean": "right answers", "eval_rewards/brief/mean": "brevity"}


def read(folder: Path) -> list[dict[str, Any]]:
    """Evaluations of all runs, those that did not end included."""
    found = []
    for log in sorted(folder.glob("runs/*/log.jsonl")):
        lines = map(json.loads, log.read_text().splitlines())
        found += [
            {"run": log.parent.name, "step": line["step"], "of": line["max_steps"], **{k: line[k] for k in SHOWN}}
            for line in lines
            if set(SHOWN) <= line.keys()
        ]
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| run | step | " + " | ".join(SHOWN.values()) + " |", "|---|---|---|---|"]
    for row in found:
        values = " | ".join(f"{row[name]:.3f}" for name in SHOWN)
        lines.append(f"| {row['run']} | {row['step']} of {row['of']} | {values} |")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) > 1:
        RESULTS.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n")
    write_on_page("real_demo.py", table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
