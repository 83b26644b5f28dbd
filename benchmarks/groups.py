"""CPU seconds of a group-relative advantage: ours against verl's `grpo` loop, its `grpo_vectorized` and TRL's reshape.

Results are compared first, then all arms take turns in one process, one thread, whose CPU time is taken, so that a
shared machine disturbs less. Reported: minimum and median over repetitions (small batches are repeated inside each) and
the median, over repetitions, of ours divided by the fastest that can do the case: the reshape in float64 for regular
groups, `grpo_vectorized` for ragged ones.

| arm | what it is given, and does |
|---|---|
| `ours` | rewards and one integer per row: finds the groups, then the advantages |
| `ours_indexed` | rewards and groups that are known already, as in every statistic after the first |
| `loop` | verl's `grpo`, group numbers |
| `vectorized`, `vectorized64` | verl's `grpo_vectorized`, group numbers that are 0, 1, .. already; rewards float32 or \
float64 (its sums are float32 in both) |
| `vectorized_texts` | the same with a text per row, as verl's trainer has them |
| `reshape`, `reshape64` | TRL's, told that groups have 8 rows; float32 or float64 (n / (n - 1) is float32 in both) |

Rewards are normal. Regular groups have 8 contiguous rows, ragged ones 2 to 14, contiguous or interleaved. With NaN one
row in fifty has no reward, which verl's cannot do.

    python benchmarks/groups.py --repeat 11
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.testing import make_rollouts

SIZES = (512, 2048, 8192, 32768, 131072)
LAYOUTS = ("regular", "ragged", "interleaved", "regular, NaN")
EPS = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = []
    for rows in SIZES:
        for layout in LAYOUTS:
            arms = make_arms(rows, layout)
            differences = check_equal(arms)
            calls = max(1, 16384 // rows)
            seconds = seconds_in_turns(arms, arguments.repeat, calls=calls)
            rivals = ["reshape64"] if "reshape64" in arms else ["vectorized", "vectorized64"]
            fastest = min(rivals, key=lambda name: statistics.median(seconds[name]))
            ratios = {name: median_ratio(seconds[name], seconds[fastest]) for name in ("ours", "ours_indexed")}
            cases.append(
                {
                    "rows": rows,
                    "layout": layout,
                    "calls_per_repetition": calls,
                    "fastest_other": fastest,
                    "ratio_to_fastest_other": ratios,
                    "largest_difference": differences,
                    "arms": {name: summary(values) for name, values in seconds.items()},
                }
            )
            times = "  ".join(f"{n} {1e6 * min(v):.0f} / {1e6 * statistics.median(v):.0f}" for n, v in seconds.items())
            print(f"{rows:>7} {layout:13} " + " ".join(f"{n} {r:.2f}x" for n, r in ratios.items()) + f"  us: {times}")
    arguments.out.write_text(json.dumps({"repeat": arguments.repeat, "cases": cases}, indent=1))


def make_arms(rows: int, layout: str) -> dict[str, Callable[[], Tensor]]:
    from trl.trainer.utils import nanstd
    from verl.trainer.ppo.core_algos import (
        compute_grpo_outcome_advantage,
        compute_grpo_vectorized_outcome_advantage,
    )

    rng = np.random.default_rng(rows)
    regular = layout.startswith("regular")
    group = np.arange(rows) // 8 if regular else ragged_groups(rows, rng)
    if layout == "interleaved":
        group = rng.permutation(group)
    reward = torch.from_numpy(rng.normal(size=rows)).float()
    if layout.endswith("NaN"):
        reward[torch.from_numpy(rng.random(rows) < 0.02)] = torch.nan
    reward64 = reward.double()
    rollouts, indexed = make_rollouts(reward, group), make_rollouts(reward, group)
    assert indexed.groups.count == group.max() + 1  # finds them once

    def ours() -> Tensor:
        vars(rollouts).pop("groups", None)  # as they are found once and kept
        return grpo_advantages(rollouts, eps=EPS)

    def reshape(x: Tensor) -> Tensor:
        grouped = x.view(-1, 8)
        mean = torch.nanmean(grouped, dim=1).repeat_interleave(8, dim=0)
        std = nanstd(grouped, dim=1).repeat_interleave(8, dim=0)
        return (x - mean) / (std + EPS)

    arms: dict[str, Callable[[], Tensor]] = {"ours": ours, "ours_indexed": lambda: grpo_advantages(indexed, eps=EPS)}
    if not layout.endswith("NaN"):
        texts = np.array([str(uuid.UUID(bytes=rng.bytes(16))) for _ in range(group.max() + 1)], dtype=object)[group]
        mask, mask64 = torch.ones(rows, 1), torch.ones(rows, 1, dtype=torch.float64)
        scores, scores64 = reward[:, None], reward64[:, None]
        vectorized = compute_grpo_vectorized_outcome_advantage
        arms |= {
            "loop": lambda: compute_grpo_outcome_advantage(scores.clone(), mask, group, EPS)[0][:, 0],
            "vectorized": lambda: vectorized(scores, mask, group, EPS)[0][:, 0],
            "vectorized64": lambda: vectorized(scores64, mask64, group, EPS)[0][:, 0],
            "vectorized_texts": lambda: vectorized(scores, mask, texts, EPS)[0][:, 0],
        }
    if regular:
        arms |= {"reshape": lambda: reshape(reward), "reshape64": lambda: reshape(reward64)}
    return arms


def ragged_groups(rows: int, rng: np.random.Generator) -> np.ndarray:
    group = np.repeat(np.arange(rows), rng.integers(2, 15, size=rows))[:rows]
    group[-1] = group[-2]  # no group of one: verl gives those their reward
    return group


def check_equal(arms: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Largest difference of every arm to ours, which is as small as the precision of the arm allows."""
    results = {name: arm().double().nan_to_num(nan=0.0) for name, arm in arms.items()}
    for name, other in results.items():
        tolerance = 1e-12 if name.startswith("ours") else 1e-7 if name == "reshape64" else 1e-3
        assert torch.allclose(results["ours"], other, rtol=tolerance, atol=tolerance / 10), name
    return {name: float((results["ours"] - other).abs().max()) for name, other in results.items()}


def seconds_in_turns(
    arms: Mapping[str, Callable[[], Any]], repeat: int, slow: float = 1.0, calls: int = 1
) -> dict[str, list[float]]:
    """CPU seconds per call of every arm in every repetition. One that takes more than `slow` is timed three times; one
    that takes more than a tenth of it is called once per repetition, others `calls` times after a call to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeat):
        for name, arm in arms.items():
            done = seconds[name]
            if len(done) >= 3 and done[0] > slow:
                continue
            times = calls
            if done and done[0] > slow / 10:
                times = 1
            else:
                arm()
            start = time.thread_time()
            for _ in range(times):
                arm()
            done.append((time.thread_time() - start) / times)
    return seconds


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Of values in the same repetition."""
    return statistics.median(v / o for v, o in zip(values, others, strict=False))


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "repetitions": len(values)}


def in_turns(arms: Mapping[str, Callable[[], Any]], repeat: int, slow: float = 1.0) -> dict[str, dict[str, float]]:
    """Minimum and median seconds of every arm, and the median ratio to the first arm in the same repetition."""
    seconds = seconds_in_turns(arms, repeat, slow)
    first = seconds[next(iter(arms))]
    return {name: summary(values) | {"ratio": median_ratio(values, first)} for name, values in seconds.items()}


if __name__ == "__main__":
    main()
