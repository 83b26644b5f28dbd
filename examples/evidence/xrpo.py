"""XRPO (arXiv 2510.06672): are pass rates estimated better by as many rollouts, and do right answers stay more varied?

Simulations without a model; the real methods plan in rounds and shape advantages.

1. Allocator. 64 prompts x 16 rollouts; pass rates are 0 (a third), 1 (a sixth), else uniform. Measured after all
   phases: mean squared error of the mean reward as an estimate of the pass rate, times 1000; share of groups with
   unequal rewards; and the total of the half widths. Equal groups against the allocator, by `n_first` and
   `exploration`.

2. Sharpening. 16 prompts with 20 answers each, of which 5 are right, policies are tables of logits. At the start the
   right answers are unequally likely (standard normal logits) and 30 % in all. 16 rollouts per prompt and batch; the
   gradient is that of sum of A log p. GRPO and GRPO with `xrpo_novelty` get the same number of rollouts. Measured: the
   entropy of the right answers (nats, log 5 = 1.61 is all alike) where the pass rate first is 0.9, and after all
   batches; batches until then.

Found (10 seeds): the error falls from 5.0 to 4.5 (exploration 0.05) and 4.3 (0.025), and the share of mixed groups from
0.449 to 0.440 and 0.433: rollouts leave the prompts that seem solved or hopeless. Without a bonus and with `n_first` 4
prompts that failed four times get no more, and the error doubles; from 0.5 on groups are equal. The entropy of the
right answers at a pass rate of 0.9 is 0.060 +- 0.009 nats higher with the paper's cap, 0.201 +- 0.026 with a cap of 2,
and it takes 3 and 12 batches longer to get there.

    python examples/evidence/xrpo.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, grouped, named, points, record, save
from common import summary as over_seeds
from matplotlib.figure import Figure

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.method import Method
from rl_plugins.lab.compare.figures import line, panels
from rl_plugins.methods.xrpo_allocate import XrpoAllocate, half_width
from rl_plugins.methods.xrpo_novelty import XrpoNovelty
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.testing import make_rollouts, make_run, make_tokens, start_stack

PROMPTS, SIZE, BATCHES = 64, 16, 8
ALLOCATORS = [(n, w) for n in (4, 8) for w in (0.0, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)]
TASKS, ANSWERS, RIGHT, STEPS, RATE = 16, 20, 5, 200, 0.2
ARMS: dict[str, list[Any]] = {
    "grpo": [],
    "novelty (2.5, 0.5)": [{}],
    "novelty (2.5, 2)": [{"cap": 2.0}],
}


# ---- allocator


def allocated(seed: int, n_first: int | None, exploration: float = 0.0) -> dict[str, float]:
    """Means over batches; without `n_first` the groups are equal."""
    rng, found = np.random.default_rng([seed, 0]), []
    methods = [XrpoAllocate(XrpoAllocate.Params(n_first=n_first, exploration=exploration))] if n_first else []
    stack = start_stack(*methods, run=make_run(group_size=SIZE))
    for _ in range(BATCHES):
        kind, p = rng.random(PROMPTS), rng.random(PROMPTS)
        p = np.where(kind < 1 / 3, 0.0, np.where(kind < 1 / 2, 1.0, p))
        table = (rng.random((PROMPTS, 1024)) < p[:, None]).astype(float)  # the same for every arm
        plan = first_plan(stack, range(PROMPTS), SIZE, PROMPTS * SIZE, PROMPTS)
        rounds, rows = Rounds(stack, plan.rows, SIZE, PROMPTS * SIZE, PROMPTS), plan.rows
        have, group, reward = np.zeros(PROMPTS, dtype=int), list[int](), list[float]()
        while rows:
            for row in rows:
                reward += table[row.group, have[row.group] : have[row.group] + row.n].tolist()
                group += [row.group] * row.n
                have[row.group] += row.n
            rows = rounds.more(torch.tensor(group), torch.tensor(reward, dtype=torch.float64))
        assert len(reward) == PROMPTS * SIZE
        groups, values = Groups(torch.tensor(group)), torch.tensor(reward, dtype=torch.float64)
        std = groups.std(values).numpy()
        found.append(
            {
                "error": 1000 * float(((groups.mean(values).numpy() - p) ** 2).mean()),
                "mixed": float((std > 0).mean()),
                "half width": float(half_width(std, have, 0.05).sum()),
                "largest group": float(have.max()),
            }
        )
    return {name: float(np.mean([f[name] for f in found])) for name in found[0]}


# ---- sharpening


def trained(seed: int, methods: list[Any]) -> dict[str, float]:
    rng = np.random.default_rng([seed, 1])
    logits = rng.normal(size=(TASKS, ANSWERS))
    right = np.exp(logits[:, :RIGHT]).sum(1) / np.exp(logits).sum(1)
    logits[:, :RIGHT] += (np.log(0.3 / 0.7) - np.log(right / (1 - right)))[:, None]
    stack = start_stack(*[XrpoNovelty(XrpoNovelty.Params(**m)) for m in methods] or [_Nothing()])
    group, reached, at = np.repeat(np.arange(TASKS), SIZE), STEPS, np.nan
    for step in range(STEPS):
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        answers = (p.cumsum(1)[group] < rng.random((TASKS * SIZE, 1))).sum(1).clip(max=ANSWERS - 1)
        rollouts = make_rollouts((answers < RIGHT).astype(float), group, lengths=[1] * len(group))
        tokens = make_tokens(rollouts, old_logprobs=torch.from_numpy(np.log(p[group, answers])).float())
        decision = decide(stack, rollouts, tokens, None, grpo_advantages, len(group))
        stack.metrics.take()
        gradient = np.zeros_like(logits)
        advantage = decision.row_advantages.numpy()
        np.add.at(gradient, (group, answers), advantage)
        np.add.at(gradient, group, -advantage[:, None] * p[group])
        logits += RATE * gradient / SIZE
        if reached == STEPS and p[:, :RIGHT].sum(1).mean() >= 0.9:
            reached, at = step, entropy(p)
    return {"entropy at 0.9": at, "batches to 0.9": float(reached), "entropy at the end": entropy(p)}


def entropy(p: np.ndarray) -> float:
    """Of the right answers, mean over tasks."""
    own = p[:, :RIGHT] / p[:, :RIGHT].sum(1, keepdims=True)
    return float(-(own * np.log(own.clip(1e-300))).sum(1).mean())


class _Nothing(Method):
    name = "nothing"
    needs = frozenset({"tokens"})


def against(runs: dict[str, list[dict[str, float]]], baseline: str) -> dict[str, Any]:
    """Arm -> measure over seeds, and its difference from the baseline's, paired by seed."""
    return {
        arm: {
            name: {
                **over_seeds([r[name] for r in found]),
                "difference": over_seeds([r[name] - b[name] for r, b in zip(found, runs[baseline], strict=True)]),
            }
            for name in found[0]
        }
        for arm, found in runs.items()
    }


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "xrpo_allocate",
        "squared error of estimated pass rates x 1000",
        "lower",
        difference=r["allocator"]["n_first 8, exploration 0.05"]["error"]["difference"],
        baseline="equal groups",
    )
    yield record(
        "xrpo_allocate",
        "share of groups with unequal rewards, simulated",
        "higher",
        difference=r["allocator"]["n_first 8, exploration 0.05"]["mixed"]["difference"],
        baseline="equal groups",
    )
    yield record(
        "xrpo_novelty",
        "entropy of right answers at a pass rate of 0.9",
        "higher",
        difference=r["sharpening"]["novelty (2.5, 0.5)"]["entropy at 0.9"]["difference"],
        baseline="GRPO",
    )
    yield record(
        "xrpo_novelty",
        "batches until a pass rate of 0.9",
        "lower",
        r["sharpening"]["novelty (2.5, 0.5)"]["batches to 0.9"],
        r["sharpening"]["grpo"]["batches to 0.9"],
        baseline="GRPO",
    )


def main() -> None:
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    args, start = arguments(__doc__ or "", seeds=10), time.time()
    seeds = range(args.seeds)
    runs = {"equal groups": [allocated(seed, None) for seed in seeds]}
    for n, w in ALLOCATORS:
        runs[f"n_first {n}, exploration {w:g}"] = [allocated(seed, n, w) for seed in seeds]
    sharpening = {arm: [trained(seed, methods) for seed in seeds] for arm, methods in ARMS.items()}
    results = {"allocator": against(runs, "equal groups"), "sharpening": against(sharpening, "grpo")}
    for part in results.values():
        for arm, values in part.items():
            print(f"{arm:28}", end="")
            for name, v in values.items():
                print(f"{name} {v['mean']:.3f} ± {v['ci95']:.3f} ({v['difference']['mean']:+.3f})", end="  ")
            print()
    content = {"method": "xrpo", "settings": {"seeds": args.seeds}, "results": results}
    save(args.out, "xrpo", content, lambda: plot(results), start, records=records(results), where="xrpo-10-seeds")


def plot(results: dict[str, Any]) -> Figure:
    figure, (error, entropy) = panels(2)
    error.axhline(results["allocator"]["equal groups"]["error"]["mean"], label="equal groups", **line(0))
    for i, n in enumerate((4, 8)):
        weights = [w for m, w in ALLOCATORS if m == n]
        cells = [results["allocator"][f"n_first {n}, exploration {w:g}"]["error"] for w in weights]
        points(error, weights, cells, f"n_first {n}", i + 1)
    error.set_xscale("symlog", linthresh=0.01)
    named(error, "exploration", "squared error x 1000")
    error.legend()
    arms = results["sharpening"]
    grouped(
        entropy,
        [arm.replace(" (", "\n(") for arm in arms],
        {key: [cells[key] for cells in arms.values()] for key in ("entropy at 0.9", "entropy at the end")},
    )
    named(entropy, "", "entropy (nats)")
    entropy.legend()
    return figure


if __name__ == "__main__":
    main()
