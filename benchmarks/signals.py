"""What the signals of old rollouts cost in TRL: a step with a method that asks for one, against one that only looks.

CPU time of one thread, arms in turns, one process; the embedded policy, so that the model is as small as can be and the
shares are as large as can be.

    python benchmarks/signals.py --repeat 5 --steps 4 --rows 256
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from trl_overhead import measure

from rl_plugins.core.method import Method
from rl_plugins.testing.delayed import installed

ARMS: dict[str, set[str]] = {
    "nothing": set(),
    "tokens": {"tokens"},
    "tokens, token_versions": {"tokens", "token_versions"},
    "token_ids": {"token_ids"},
    "tokens, old_logprobs": {"tokens", "old_logprobs"},
    "tokens, old_logprobs, sum_squared_probs": {"tokens", "old_logprobs", "sum_squared_probs"},
}


def looks(name: str, signals: set[str]) -> type[Method]:
    """A method that asks for signals and does nothing with them."""

    def observe(self: Method, rollouts: Any, tokens: Any, stats: Any) -> None:
        pass

    made = type(
        name,
        (Method,),
        {
            "__module__": "__main__",
            "__qualname__": name,
            "name": name.lower(),
            "fidelity": "reconstruction",
            "needs": frozenset(signals),
            "observe": observe,
        },
    )
    globals()[name] = made  # where an entry point finds it
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/signals.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    classes = {arm: looks(f"Arm{i}", signals) for i, (arm, signals) in enumerate(ARMS.items())}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder, installed(*classes.values()):
        for _ in range(options.repeat):
            for arm, cls in classes.items():
                found = measure(
                    {"methods": [cls.name]}, Path(folder), options.rows, options.steps, clock=time.process_time
                )
                seconds[arm].append(found[0])
    table = {}
    for arm, values in seconds.items():
        ratios = [v / b for v, b in zip(values, seconds["nothing"], strict=True)]
        table[arm] = {"ms": 1000 * min(values), "ratio": statistics.median(ratios), "ratios": ratios}
        print(
            f"{arm:42} {table[arm]['ms']:7.0f} ms  {table[arm]['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    options.out.write_text(json.dumps({**vars(options), "out": None, "arms": table}, indent=1))


if __name__ == "__main__":
    main()
