"""Rewards of `ps_grpo` for a batch of 512 prompts with 8 rollouts each: CPU time on the driver, arms taking turns.

The batch has sets of 6 wordings (the last one of 2). A text has about 30 or 200 tokens, drawn from 5,000 words by
Zipf's law; a rollout shares about half of them with the others of its set. The time is that of the hook `rewards`:
tokens, comparisons, rewards. In the same repetition the arms take turns; the baseline is a plain loop over pairs for
the default (BLEU-2, sampled), which counts n-grams once per text.

    python benchmarks/ps_grpo.py --out benchmarks/ps_grpo.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.methods.ps_grpo import PsGrpo
from rl_plugins.methods.ps_grpo.method import weights
from rl_plugins.methods.ps_grpo.texts import tokens_of
from rl_plugins.testing import make_rollouts, start_stack
from rl_plugins.testing.contract.dataset import StoredDataset
from rl_plugins.testing.data import make_run

PROMPTS, GROUP, WORDINGS = 512, 8, 6
ARMS: dict[str, dict[str, Any]] = {
    "bleu2, sampled (default)": {},
    "bleu1, sampled": {"similarity": "bleu1"},
    "f1, sampled": {"similarity": "f1"},
    "em, sampled": {"similarity": "em"},
    "rougeL, sampled": {"similarity": "rougeL"},
    "bleu2, exact": {"compare": "exact"},
    "rougeL, exact": {"compare": "exact", "similarity": "rougeL"},
    "bleu2, sampled, F1 to an answer": {"answer_column": "answer"},
}
SETS = [i // WORDINGS for i in range(PROMPTS)]


def batch(length: int) -> Rollouts:
    rng = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(5000)])
    chance = 1 / np.arange(1, 5001)
    chance /= chance.sum()
    texts = []
    for prompt in range(PROMPTS):
        if prompt % WORDINGS == 0:
            common = rng.choice(words, length, p=chance)
        for _ in range(GROUP):
            own = rng.choice(words, length, p=chance)
            texts.append(" ".join(np.where(rng.random(length) < 0.5, common, own)[: rng.integers(length // 2, length)]))
    prompts = [p for p in range(PROMPTS) for _ in range(GROUP)]
    meta = {"paraphrase_set_id": [SETS[p] for p in prompts], "answer": [f"w{p} w1" for p in prompts]}
    return make_rollouts([0.0] * len(prompts), prompts, prompt_index=prompts, text=texts, meta=meta)


def stack_of(params: dict[str, Any]) -> Any:
    dataset = StoredDataset({"prompt": [""] * PROMPTS, "paraphrase_set_id": SETS})
    run = make_run(dataset=dataset, dataset_size=PROMPTS, group_size=GROUP)
    return start_stack(PsGrpo(build_params(PsGrpo.Params, params, "ps_grpo")), run=run)


def loop(rollouts: Rollouts) -> list[float]:
    """BLEU-2 of three sampled references per rollout, pair by pair."""
    texts = [tokens_of(t) for t in rollouts.text or ()]
    grams = [(Counter(t), Counter(pairwise(t))) for t in texts]
    rng, sets = np.random.default_rng(0), np.array(rollouts.meta["paraphrase_set_id"])
    found = []
    for number in range(sets[-1] + 1):
        rows = np.flatnonzero(sets == number)
        chosen = weights(rollouts.prompt_index.numpy()[rows], 3, 1, rng)
        for i, row in enumerate(rows):
            total = 0.0
            for j in np.flatnonzero(chosen[i]):
                a, b = row, rows[j]
                one, two = (sum((x & y).values()) for x, y in zip(grams[a], grams[b], strict=True))
                n, m = len(texts[a]), len(texts[b])
                total += chosen[i, j] * math.exp(min(0.0, 1 - m / n)) * math.sqrt(one / n * (two + 1) / n)
            found.append(total)
    return found


def measured(length: int, repetitions: int) -> dict[str, Any]:
    rollouts = batch(length)
    stacks = {name: stack_of(params) for name, params in ARMS.items()}
    times: dict[str, list[float]] = {name: [] for name in ("a loop over pairs", *stacks)}

    def timed(name: str, call: Any) -> None:
        begin = time.process_time()
        call()
        times[name].append(1000 * (time.process_time() - begin))

    for _ in range(repetitions + 1):
        timed("a loop over pairs", lambda: loop(rollouts))
        for name, stack in stacks.items():
            timed(name, lambda stack=stack: stack.call("rewards", stack.methods[0], rollouts))
    base = times["a loop over pairs"]
    return {
        name: {
            "ms": round(median(t[1:]), 1),
            "least": round(min(t[1:]), 1),
            "ratio": round(median(x / y for x, y in zip(t[1:], base[1:], strict=True)), 3),
        }
        for name, t in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {f"{length} tokens at most": measured(length, args.repetitions) for length in (40, 270)}
    text = json.dumps({"prompts": PROMPTS, "rollouts": GROUP, "wordings": WORDINGS, "results": results}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
