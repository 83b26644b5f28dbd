"""Seconds of a group-relative advantage: ours against verl's `grpo` loop, its `grpo_vectorized` and TRL's reshape.

Every size is first checked for equal results, then all arms take turns in one process, one thread. Reported: minimum
and median over repetitions, and the median ratio to ours in the same repetition. Rewards are normal; regular groups
have 8 contiguous rows, ragged ones 2 to 14, interleaved, which the reshape cannot do.

    python benchmarks/groups.py --repeat 9
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.estimators import grpo_advantages
from rl_plugins.testing import make_rollouts

SIZES = (512, 2048, 8192, 32768, 131072)
EPS = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"repeat": arguments.repeat, "cases": []}
    print(f"{'rows':>7} {'groups':8}" + "".join(f"{a:>32}" for a in ("ours", "verl grpo", "verl vectorized", "TRL")))
    for rows in SIZES:
        for layout in ("regular", "ragged"):
            arms = make_arms(rows, layout)
            difference = check_equal(arms)
            timed = in_turns(arms, arguments.repeat)
            result["cases"].append({"rows": rows, "layout": layout, "largest_difference": difference, "arms": timed})
            print(f"{rows:>7} {layout:8}" + "".join(cell(timed.get(a)) for a in ("ours", "grpo", "vectorized", "trl")))
    arguments.out.write_text(json.dumps(result, indent=1))


def cell(arm: Mapping[str, float] | None) -> str:
    if arm is None:
        return f"{'-':>32}"
    return f"{1e3 * arm['min']:>11.2f} / {1e3 * arm['median']:.2f} ms {arm['ratio']:>7.2f}x"


def make_arms(rows: int, layout: str) -> dict[str, Callable[[], Tensor]]:
    from trl.trainer.utils import nanstd
    from verl.trainer.ppo.core_algos import (
        compute_grpo_outcome_advantage,
        compute_grpo_vectorized_outcome_advantage,
    )

    rng = np.random.default_rng(rows)
    if layout == "regular":
        group = np.arange(rows) // 8
    else:
        sizes = rng.integers(2, 15, size=rows)
        group = np.repeat(np.arange(rows), sizes)[: rows - rows % 2]
        group = np.concatenate([group, np.full(rows - len(group), group[-1])])
        group[-1] = group[-2]  # no group of one: verl gives those their reward
        group = rng.permutation(group)
    reward = torch.from_numpy(rng.normal(size=rows)).float()
    rollouts = make_rollouts(reward, group)
    scores, mask = reward[:, None], torch.ones(rows, 1)

    def trl() -> Tensor:
        grouped = reward.view(-1, 8)
        mean = torch.nanmean(grouped, dim=1).repeat_interleave(8, dim=0)
        std = nanstd(grouped, dim=1).repeat_interleave(8, dim=0)
        return (reward - mean) / (std + EPS)

    arms: dict[str, Callable[[], Tensor]] = {
        # `replace` forgets the groups, so that finding them is timed too
        "ours": lambda: grpo_advantages(rollouts.replace(), eps=EPS),
        "grpo": lambda: compute_grpo_outcome_advantage(scores.clone(), mask, group, EPS)[0][:, 0],
        "vectorized": lambda: compute_grpo_vectorized_outcome_advantage(scores, mask, group, EPS)[0][:, 0],
    }
    return arms | ({"trl": trl} if layout == "regular" else {})


def check_equal(arms: Mapping[str, Callable[[], Tensor]]) -> float:
    """The largest difference to ours; the others are float32."""
    results = {name: arm().double() for name, arm in arms.items()}
    for name, other in results.items():
        assert torch.allclose(results["ours"], other, rtol=1e-3, atol=1e-4), name
    return max(float((results["ours"] - other).abs().max()) for other in results.values())


def in_turns(arms: Mapping[str, Callable[[], Any]], repeat: int, slow: float = 1.0) -> dict[str, dict[str, float]]:
    """Minimum and median seconds of every arm, and the median ratio to the first arm in the same repetition. An arm
    that takes more than `slow` seconds is timed three times."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeat):
        for name, arm in arms.items():
            if len(seconds[name]) >= 3 and seconds[name][0] > slow:
                continue
            start = time.perf_counter()
            arm()
            seconds[name].append(time.perf_counter() - start)
    first = seconds[next(iter(arms))]
    return {
        name: {
            "min": min(values),
            "median": statistics.median(values),
            "ratio": statistics.median(v / f for v, f in zip(values, first, strict=False)),
            "repetitions": len(values),
        }
        for name, values in seconds.items()
    }


if __name__ == "__main__":
    main()
