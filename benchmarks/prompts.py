"""What memory of prompts costs with 10^4 to 10^7 prompts: `vade`'s draw, an update, a checkpoint, bytes per prompt.

    python benchmarks/prompts.py --out benchmarks/prompts.json

512 prompts of 8 rollouts a batch. CPU time of one thread, the smallest and the median of the repetitions; sizes take
turns within a repetition, so that ratios between them share the machine's noise. Arms:

    plain      a Beta draw for every prompt, a sort, and new arrays in every update: `vade` until 2026-11-22
    few seen   the present form after 200 batches of random prompts
    all seen   the present form where every prompt has between 0 and 10 counts

`program` is the dynamic program of `gdro_rollout` for 512 prompts in 10 bins, groups of 8, 2 to 24 rollouts each.

`history` is `rl_plugins.kit.prompt_memory.History(50)`: 512 outcomes added and 512 rates read. `save` writes the
state of `few seen` as a checkpoint does, on the wall.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_plugins.kit.prompt_memory import Counts, History
from rl_plugins.kit.thompson import SCORES, best_draws
from rl_plugins.methods.gdro_rollout import allocate
from rl_plugins.runtime.state import save_state

BATCH, ROLLOUTS, KEEP, OTHERS = 512, 8, 0.2, 0.999
COUNTS, HISTORY, SCORE = Counts(), History(50), SCORES["p(1-p)^2"]
Work = Callable[[int], Any]


def plain(size: int) -> dict[str, Work]:
    """`vade` as it was: whole arrays in every step."""
    state = {"alpha": torch.zeros(size, dtype=torch.float64), "beta": torch.zeros(size, dtype=torch.float64)}

    def draw(number: int) -> None:
        p = torch.from_numpy(
            np.random.default_rng(number).beta((state["alpha"] + 1).numpy(), (state["beta"] + 1).numpy())
        )
        torch.sort(p * (1 - p) ** 2, descending=True, stable=True).indices[:BATCH].tolist()

    def update(number: int) -> None:
        rows, right = visited(number, size)
        for name, gained in (("alpha", right), ("beta", ROLLOUTS - right)):
            new = OTHERS * state[name]
            new[rows] = KEEP * state[name][rows] + gained
            state[name] = new

    return {"draw": draw, "update": update}


def present(size: int, all_seen: bool) -> tuple[dict[str, Work], dict[str, Any]]:
    state = COUNTS.start(size)
    if all_seen:
        rng = np.random.default_rng(0)
        for name in COUNTS.names:
            state[name] = torch.from_numpy(rng.uniform(0, 5, size))
    else:
        for number in range(200):
            rows, right = visited(number, size)
            COUNTS.visit(state, rows, KEEP, (right, ROLLOUTS - right), OTHERS)
    COUNTS.most(state)

    def draw(number: int) -> None:
        rng = np.random.default_rng(number)
        best_draws(lambda rows: COUNTS.of(state, rows), size, COUNTS.most(state), SCORE, BATCH, set(), rng)

    def update(number: int) -> None:
        rows, right = visited(number, size)
        COUNTS.visit(state, rows, KEEP, (right, ROLLOUTS - right), OTHERS)

    return {"draw": draw, "update": update}, state


def history(size: int) -> dict[str, Work]:
    state = HISTORY.start(size)

    def both(number: int) -> None:
        rows, right = visited(number, size)
        HISTORY.add(state, rows, right > 0, number)
        HISTORY.rate(state, rows)

    for number in range(200):
        both(number)
    return {"add and read": both}


def program() -> dict[str, float]:
    """Seconds of `gdro_rollout`'s allocation, and whether it met the total."""
    rng, found = np.random.default_rng(0), []
    prompts = np.bincount(rng.integers(0, 10, BATCH), minlength=10).tolist()
    for _ in range(12):
        p_arm = rng.dirichlet(np.ones(23), 10)
        begin = time.thread_time()
        chosen = allocate(p_arm, prompts, BATCH * ROLLOUTS, 2)
        found.append(time.thread_time() - begin)
        assert sum(m * n for m, n in zip(prompts, chosen, strict=True)) == BATCH * ROLLOUTS
    return {"min_ms": round(1e3 * min(found), 3), "median_ms": round(1e3 * statistics.median(found), 3)}


def visited(number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng([1, number])
    rows = np.unique(rng.integers(0, size, BATCH))
    return torch.from_numpy(rows), torch.from_numpy(rng.binomial(ROLLOUTS, 0.3, len(rows)).astype(float))


def bytes_of(state: dict[str, Any]) -> int:
    return sum(x.numel() * x.element_size() for x in state.values() if isinstance(x, torch.Tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("prompts.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = defaultdict(list)
    results: dict[str, Any] = {"program": program()}
    work: dict[tuple[int, str], dict[str, Work]] = {}
    for size in options.sizes:
        few, state = present(size, all_seen=False)
        work[size, "plain"], work[size, "few seen"] = plain(size), few
        work[size, "all seen"], work[size, "history"] = present(size, all_seen=True)[0], history(size)
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            save_state(folder, state)
            written = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
            results[f"{size}"] = {
                "save_seconds": round(time.perf_counter() - begin, 4),
                "saved_bytes_per_prompt": round(written / size, 2),
                "bytes_per_prompt": round(bytes_of(state) / size, 2),
                "history_bytes_per_prompt": round(bytes_of(HISTORY.start(size)) / size, 2),
            }
    for repetition in range(options.repetitions + 1):
        for (size, arm), parts in work.items():
            for part, what in parts.items():
                begin = time.thread_time()
                what(1000 + repetition)
                if repetition:  # the first one warms up
                    times[f"{size}|{arm}|{part}"].append(time.thread_time() - begin)
    for key, found in times.items():
        size, arm, part = key.split("|")
        smallest = times[f"{options.sizes[0]}|{arm}|{part}"]
        results[size][f"{arm}, {part}"] = {
            "min_ms": round(1e3 * min(found), 3),
            "median_ms": round(1e3 * statistics.median(found), 3),
            "ratio_to_smallest": round(statistics.median(a / b for a, b in zip(found, smallest, strict=True)), 2),
        }
    options.out.write_text(json.dumps(results, indent=1))
    for size, values in results.items():
        print(size, json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
