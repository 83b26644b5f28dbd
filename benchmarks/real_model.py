"""What became of methods on the real model: the tables that `make test-real` leaves in build/real, kept.

make test-real && .venv/bin/python benchmarks/real_model.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUILT, PAGE = HERE.parent / "build" / "real", HERE / "README.md"
RESULTS = {"trl": HERE / "real_model.json", "verl": HERE / "real_model_verl.json"}


def table(lines: list[dict[str, Any]]) -> str:
    """Of the page, sorted by outcome and name."""
    order = {"acted": 0, "watched": 1, "refused": 2, "not applicable": 3}
    out = ["| method | beside | outcome | what it logged, or why not | change of the update |", "|---|---|---|---|---|"]
    for line in sorted(lines, key=lambda line: (order.get(line["outcome"], 4), line["method"])):
        if line["outcome"] == "acted":
            shown = ", ".join(f"{name} {value:.3g}" for name, value in list(line["metrics"].items())[:3])
            size = line["baseline_update"]
            change = f"{100 * line['difference'] / size:.3g} %" if size else "it rested"
        else:
            shown, change = line.get("why") or ", ".join(line.get("silent", [])) + " 0", ""
        cells = [line["method"], ", ".join(line.get("beside", [])), line["outcome"], shown, change]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> None:
    for host, result in RESULTS.items():
        built = BUILT / f"{host}.json"
        if built.exists():
            result.write_text(built.read_text())
        if result.exists():
            made = "made by real_model.py" + ("" if host == "trl" else f" of {host}")
            begin, end = f"<!-- {made}: begin -->", f"<!-- {made}: end -->"
            before, rest = PAGE.read_text().split(begin)
            PAGE.write_text(f"{before}{begin}\n{table(json.loads(result.read_text()))}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()
