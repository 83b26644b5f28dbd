"""What became of every method on the real model: the table that `make test-real` leaves in build/real, kept.

make test-real && .venv/bin/python benchmarks/real_model.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE, RESULT, PAGE = HERE.parent / "build" / "real" / "trl.json", HERE / "real_model.json", HERE / "README.md"
BEGIN, END = "<!-- made by real_model.py: begin -->", "<!-- made by real_model.py: end -->"


def table(lines: list[dict[str, Any]]) -> str:
    """Of the page, sorted by outcome and name."""
    order = {"acted": 0, "refused": 1, "not applicable": 2}
    out = ["| method | beside | outcome | what it logged, or why not | change of the update |", "|---|---|---|---|---|"]
    for line in sorted(lines, key=lambda line: (order[line["outcome"]], line["method"])):
        if line["outcome"] == "acted":
            shown = ", ".join(f"{name} {value:.3g}" for name, value in list(line["metrics"].items())[:3])
            change = f"{100 * line['difference'] / line['baseline_update']:.3g} %"
        else:
            shown, change = line["why"], ""
        cells = [line["method"], ", ".join(line.get("beside", [])), line["outcome"], shown, change]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> None:
    if SOURCE.exists():
        RESULT.write_text(SOURCE.read_text())
    lines = json.loads(RESULT.read_text())
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
