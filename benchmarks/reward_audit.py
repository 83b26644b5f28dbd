"""`reward_audit`: CPU time per batch beside the driver's own decisions, arms taking turns, and per row before training.

A batch has 64 or 512 prompts of 30 or 200 words (Zipf, 5,000 words) with 8 rollouts each. "Decisions" is the driver
without the method: GRPO's advantages of the batch. Every tenth batch also tests all features; that is timed apart,
after 20 batches. Before training the rewards are free here, so the time is that of the audit itself.

    python benchmarks/reward_audit.py --out benchmarks/reward_audit.json
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from rl_plugins.core.rollouts import RewardFunction, Rollouts
from rl_plugins.methods.reward_audit import RewardAudit
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack
from rl_plugins.tools.audit import Options, preflight

GROUP, BATCHES = 8, 20


def rows_of(prompts: int, words: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    names = np.array([f"w{i}" for i in range(5000)])
    p = 1 / np.arange(1, 5001)
    texts = rng.choice(names, (prompts, words), p=p / p.sum())
    return [{"prompt": " ".join(t), "answer": str(i), "data_source": "abc"[i % 3]} for i, t in enumerate(texts)]


def batch(rows: list[dict[str, Any]], number: int) -> Rollouts:
    rng = np.random.default_rng(number)
    index = np.repeat(np.arange(len(rows)), GROUP)
    right = rng.random(len(index)) < np.repeat(rng.beta(2, 2, len(rows)), GROUP)
    wrong = rng.integers(10**6, 10**6 + 6, len(index))
    texts = [f"#### {rows[i]['answer'] if good else bad}" for i, good, bad in zip(index, right, wrong, strict=True)]
    meta = {"prompt": [rows[i]["prompt"] for i in index]}
    return make_rollouts(right.astype(float), index.tolist(), prompt_index=index.tolist(), text=texts, meta=meta)


def timed(call: Callable[[], Any]) -> float:
    begin = time.process_time()
    call()
    return 1000 * (time.process_time() - begin)


def per_batch(prompts: int, words: int) -> dict[str, float]:
    rows = rows_of(prompts, words)
    run = make_run(dataset=rows, dataset_size=prompts, group_size=GROUP)
    options = dict(preflight=False, every_n_batches=10**9, verifier=lambda row, text: float(row["answer"] in text))
    method = RewardAudit(RewardAudit.Params(**options))
    stack, plain = start_stack(method, run=run), MethodStack([], 0)
    times: dict[str, list[float]] = {"decisions": [], "reward_audit": []}
    for number in range(BATCHES):
        stack.batch += 1
        made = batch(rows, number)
        tokens = make_tokens(made)
        times["decisions"].append(timed(lambda made=made, tokens=tokens: one_step(plain, made, tokens)))

        def audit(made: Rollouts = made) -> None:
            stack.call("rewards", method, made)
            stack.call("observe", method, made, None, {})

        times["reward_audit"].append(timed(audit))
    ratios = [x / y for x, y in zip(times["reward_audit"][1:], times["decisions"][1:], strict=True)]
    found = {f"{name} ms": round(median(t[1:]), 1) for name, t in times.items()}
    return found | {
        "ratio": round(median(ratios), 2),
        "tests ms": round(timed(method._test), 1),
        "features": len(method.state["newer"]["keys"]),
        "state MB": round(sum(x.nbytes for x in method.state["newer"].values()) / 1e6, 2),
    }


def per_row(n: int) -> dict[str, float]:
    rows = rows_of(n, 30)

    def score(some: list[dict[str, Any]], texts: list[str]) -> list[float]:
        return [float(t.split()[-1] == r["answer"]) for r, t in zip(some, texts, strict=True)]

    reward = RewardFunction("accuracy", 1.0, score, score)
    run = make_run(dataset=rows, dataset_size=n, reward_names=("accuracy",), reward_functions=(reward,))
    took = [timed(lambda: preflight(run, Options())) for _ in range(3)]
    return {"seconds": round(median(took) / 1000, 2), "ms per row": round(median(took) / n, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    results: dict[str, Any] = {
        f"{prompts} x {GROUP}, {words} words": per_batch(prompts, words) for prompts in (64, 512) for words in (30, 200)
    }
    results["before training"] = {f"{n} rows": per_row(n) for n in (1000, 10_000)}
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
