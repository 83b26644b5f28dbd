"""TRL's own tests, once as they are and once with our trainer in its place: python tests/downstream/run.py TREE

TREE is a checkout of TRL; the installed TRL is what runs. Models are small and random, data is made up, nothing is
downloaded (substitute.py). Told is how many tests have the same outcome, and how many leave equal weights and logs, to
the last bit. Arguments behind TREE go to pytest: `-k "train and not vlm"`. Status 1 if anything differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def suite(tree: Path, which: str, folder: Path, arguments: list[str]) -> dict[str, dict[str, object]]:
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


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    tree, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    with tempfile.TemporaryDirectory() as made:
        stock, ours = (suite(tree, which, Path(made), arguments) for which in ("stock", "ours"))
    tests = sorted(stock.keys() | ours.keys())
    other = [t for t in tests if stock.get(t, {}).get("outcome") != ours.get(t, {}).get("outcome")]
    trained = [t for t in tests if stock.get(t, {}).get("trained")]
    unequal = [t for t in trained if stock[t]["trained"] != ours.get(t, {}).get("trained")]
    passed = sum(r["outcome"] == "passed" for r in stock.values())
    print(f"\n{len(tests) - len(other)} of {len(tests)} outcomes as stock, of which {passed} passed with stock")
    print(f"{len(trained) - len(unequal)} of {len(trained)} tests that train: weights and logs equal to the last bit")
    for test in other:
        print(
            f"  other outcome: {test}: {stock.get(test, {}).get('outcome')}, ours {ours.get(test, {}).get('outcome')}"
        )
    for test in unequal:
        print(f"  not equal: {test}")
    return int(bool(other or unequal or not tests))


if __name__ == "__main__":
    sys.exit(main())
