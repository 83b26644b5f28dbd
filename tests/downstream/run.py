"""TRL's own tests, once as they are and once with our trainer in its place: python tests/downstream/run.py TREE

TREE is a checkout of TRL; the installed TRL is what runs. Models are small and random, data is made up, nothing is
downloaded (substitute.py). Told is how many tests have the same outcome, and how many leave equal weights and logs, to
the last bit; benchmarks/downstream.json keeps it. Arguments behind TREE go to pytest, and then nothing is kept:
`-k "train and not vlm"`. Status 1 if anything differs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "benchmarks" / "downstream.json"


def suite(tree: Path, which: str, folder: Path, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Test -> its outcome, and a digest of what each call of `train` left behind."""
    out = folder / f"{which}.json"
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables |= {"DOWNSTREAM": which, "DOWNSTREAM_OUT": str(out), "DOWNSTREAM_MODELS": str(folder / "models")}
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "substitute", "-p", "no:cacheprovider", "--tb=line"]
    subprocess.run(
        [*command, "tests/test_grpo_trainer.py", *arguments],
        cwd=tree,
        env={**os.environ, **variables, "PYTHONPATH": path},
    )
    return dict(json.loads(out.read_text()))


def compared(stock: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many tests ended how, and those that differ."""
    trained = [t for t in stock if stock[t]["trained"]]
    return {
        "stock": dict(Counter(r["outcome"] for r in stock.values())),
        "ours": dict(Counter(r["outcome"] for r in ours.values())),
        "tests": len(stock.keys() | ours.keys()),
        "other outcome": sorted(
            t for t in stock.keys() | ours.keys() if stock.get(t, {}).get("outcome") != ours.get(t, {}).get("outcome")
        ),
        "trained": len(trained),
        "unequal": sorted(t for t in trained if stock[t]["trained"] != ours.get(t, {}).get("trained")),
    }


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    tree, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    with tempfile.TemporaryDirectory() as made:
        stock, ours = (suite(tree, which, Path(made), arguments) for which in ("stock", "ours"))
    found = compared(stock, ours)
    other, unequal = found["other outcome"], found["unequal"]
    print(f"\nstock: {found['stock']}, ours: {found['ours']}")
    print(f"{found['tests'] - len(other)} of {found['tests']} outcomes as stock")
    trained = found["trained"]
    print(f"{trained - len(unequal)} of {trained} tests that train: weights and logs equal to the last bit")
    for test in other:
        print(f"  other outcome: {test}")
    for test in unequal:
        print(f"  not equal: {test}")
    if not arguments:
        source = tree / "VERSION"
        versions = {p: importlib.metadata.version(p) for p in ("trl", "transformers", "torch")}
        versions["tests"] = source.read_text().strip() if source.exists() else "?"
        KEPT.write_text(json.dumps({"versions": versions, **found}, indent=1) + "\n", encoding="utf-8")
    return int(bool(other or unequal or not found["tests"]))


if __name__ == "__main__":
    sys.exit(main())
