"""DOTS + RR at size: what the replay buffer costs a step and a checkpoint, and a draw among up to a million prompts.

    python benchmarks/replay.py --out benchmarks/replay.json

Buffer: 512 groups of 8 rollouts of 512 tokens, 256 groups of them replaced per batch. Seconds on the wall of one
thread, the smallest and the median of the repetitions: `observe` (the new groups enter), `plan` (256 groups are drawn
and become given completions), `check` (the gate of the plan looks at each of their tokens), `snapshot` (what a
generation boundary does with the state), `save` (a checkpoint, with its bytes).

Draw: D prompts with embeddings of 1,024 float16 numbers in a file that stays on the disk, 256 references, 1,024 chosen.
`start` is the adapter's pass over them, `predict` reads all once, `MB` is what the process grows by, pages of the file
included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_plugins.core.rollouts import TokenIds
from rl_plugins.methods.dots.predictor import Adapter, Predictor, draw, selection_logits
from rl_plugins.methods.rollout_replay import RolloutReplay
from rl_plugins.runtime import validate
from rl_plugins.runtime.state import save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_tokens, start_stack

GROUPS, SIZE, TOKENS, FRESH = 512, 8, 512, 256
WIDTH, REFERENCES, CHOSEN = 1024, 256, 1024


def seconds(what: Callable[[], Any], repetitions: int) -> dict[str, float]:
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        what()
        times.append(time.perf_counter() - begin)
    return {"min": round(min(times), 5), "median": round(statistics.median(times), 5)}


def batch(number: int) -> tuple[Any, Any]:
    """FRESH groups of other prompts than the batch before."""
    rng = np.random.default_rng(number)
    rows = FRESH * SIZE
    prompt = torch.arange(FRESH).repeat_interleave(SIZE) + number % 4 * FRESH
    completions = torch.from_numpy(rng.integers(0, 150_000, (rows, TOKENS)))
    ids = TokenIds.cat([torch.arange(64)] * rows, list(completions))
    rollouts = make_rollouts(
        torch.from_numpy(rng.random(rows)),
        group_size=SIZE,
        lengths=[TOKENS] * rows,
        prompt_index=prompt,
        token_ids=ids,
        current_version=number,
        version=torch.full((rows,), number),
        batch=number,
    )
    return rollouts, make_tokens(rollouts)


def buffer(repetitions: int) -> dict[str, Any]:
    stack = start_stack(RolloutReplay(), run=make_run(dataset_size=4 * FRESH, group_size=SIZE))
    method = stack.methods[0]
    data = [batch(number) for number in range(4)]
    for rollouts, tokens in data:
        method.observe(rollouts, tokens, {})
    stack.batch = 4
    plan = make_plan(GROUPS, SIZE, batch=4)
    planned = method.plan(plan)
    turn = iter(range(10**9))
    found: dict[str, Any] = {
        "observe": seconds(lambda: method.observe(*data[next(turn) % 4], {}), repetitions),
        "plan": seconds(lambda: method.plan(plan), repetitions),
        "check": seconds(lambda: validate.plan(method, planned, plan, 4 * FRESH, 151_936), repetitions),
        "snapshot": seconds(lambda: stack.state_dict("data"), repetitions),
    }
    with tempfile.TemporaryDirectory() as folder:
        found["save"] = seconds(lambda: save_state(folder, stack.state_dict("data")), repetitions)
        found["checkpoint MB"] = round(sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file()) / 1e6, 1)
    return found


def peak() -> float:
    """Most memory this process ever had, in MB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def write(path: Path, size: int) -> None:
    rng = np.random.default_rng(0)
    values = np.lib.format.open_memmap(path, "w+", np.float16, (size, WIDTH))
    for start in range(0, size, 65_536):
        values[start : start + 65_536] = rng.standard_normal((min(65_536, size - start), WIDTH), dtype=np.float32)
    values.flush()


def selection(path: Path, size: int, adapter: bool, repetitions: int) -> dict[str, Any]:
    """In a process of its own, so that its memory is its own."""
    torch.set_num_threads(1)
    rng, before, begin = np.random.default_rng(0), peak(), time.perf_counter()
    predictor = Predictor(np.load(path, mmap_mode="r"), Adapter(WIDTH) if adapter else None)
    found: dict[str, Any] = {"start": round(time.perf_counter() - begin, 2)}
    references = torch.from_numpy(rng.choice(size, REFERENCES, replace=False))
    rates = torch.from_numpy(rng.integers(0, 9, REFERENCES) / 8)
    found["predict"] = seconds(lambda: predictor.predict(references, rates), repetitions)
    logits = selection_logits(predictor.predict(references, rates), 0.5, 1e-3)
    found["draw"] = seconds(lambda: draw(logits, CHOSEN, np.random.default_rng(1)), repetitions)
    found["MB"] = round(peak() - before)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/replay.json"))
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"buffer": buffer(args.repetitions)}
    print(json.dumps(results["buffer"], indent=1), flush=True)
    for size, adapter in ((10**4, False), (10**4, True), (10**5, False), (10**5, True), (10**6, False)):
        name = f"{size} prompts{', adapter' if adapter else ''}"
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as process:
            path = Path(folder) / "embeddings.npy"
            write(path, size)
            repetitions = 1 if size == 10**6 else args.repetitions
            results[name] = process.submit(selection, path, size, adapter, repetitions).result()
        print(name, results[name], flush=True)
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
