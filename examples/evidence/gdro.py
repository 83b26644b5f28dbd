"""GDRO (arXiv 2601.19280): do weights follow the worst bin, and do rollouts follow the noise?

Two simulations without a model, through the real methods and the driver's own code.

Weights: 240 prompts in three kinds of difficulty with success rates 0.9, 0.5 and 0.1, shares 60, 30 and 10 %. The worst
kind changes in the middle (0.1 and 0.9 swap). Per seed: the weight of the worst bin over the mean of the others, before
and after; and the worst kind's success after training in which a batch moves a kind's logit in proportion to the
weighted signal (mean |A| times weight) it had, at equal rollouts, against weights of 1.

Rollouts: prompts of kinds with success rates 0.5, 0.8 and 0.97, shares 1/3 each, 48 a batch of 8 rollouts. With the
same total: the weighted standard error sum_b q_b sigma_b / sqrt(n_b), of the real allocations over the last half of 120
batches, of uniform groups, and of the square-root law n_b = nbar sqrt(v_b) / sum_j q_j sqrt(v_j), relative to uniform.

    python examples/evidence/gdro.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import across, arguments, interval, record, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods.gdro_prompt import GdroPrompt
from rl_plugins.methods.gdro_rollout import GdroRollout
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

PROMPTS, BATCH, GROUP, STEPS = 240, 24, 4, 120
RATES, SHARES = np.array([0.9, 0.5, 0.1]), np.array([0.6, 0.3, 0.1])
NOISY, NOISY_GROUP, NOISY_BATCH, NOISY_STEPS = np.array([0.5, 0.8, 0.97]), 8, 48, 120


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def one_batch(stack: MethodStack, prompts: np.ndarray, rate: np.ndarray, group: int, rng: Any) -> tuple[Any, Any, Any]:
    """Plans, samples and decides; returns prompts and advantages of the rows, and what was logged."""
    plan = first_plan(stack, prompts.tolist(), group, len(prompts) * group, len(rate))
    number = [row.group for row in plan.rows for _ in range(row.n)]
    prompt = np.array([row.prompt_index for row in plan.rows for _ in range(row.n)])
    right = (rng.random(len(prompt)) < rate[prompt]).astype(float)
    rollouts = make_rollouts(right, number, prompt_index=prompt, lengths=[1] * len(prompt), batch=stack.batch)
    decision = one_step(stack, rollouts)
    assert decision.row_advantages is not None
    return plan, (prompt, decision.row_advantages.numpy()), combine([stack.metrics.take()])


def weights(seed: int) -> dict[str, float]:
    kind = np.repeat(range(3), (SHARES * PROMPTS).round().astype(int))
    # edges between the pass@4 of the three kinds
    method = GdroPrompt(GdroPrompt.Params(edges=(0.5, 0.97), history=10, hysteresis=0.0))
    run = make_run(dataset_size=PROMPTS, group_size=GROUP)
    stack, rng, found = start_stack(method, seed=seed, run=run), np.random.default_rng(seed), {}
    rates = RATES.copy()
    for step in range(2 * STEPS):
        if step == STEPS:
            rates = rates[::-1].copy()
        prompts = rng.choice(PROMPTS, BATCH, replace=False)
        one_batch(stack, prompts, rates[kind], GROUP, rng)
        if step in (STEPS - 1, 2 * STEPS - 1):
            bins = method.bins_of(torch.from_numpy(np.arange(PROMPTS))).numpy()
            score = method.state["scores"]["ema"].exp().pow(method.params.eta).numpy()
            worst = rates.argmin()
            others = [score[bins[kind == k]].mean() for k in range(3) if k != worst]
            name = "before" if step == STEPS - 1 else "after the worst kind changed"
            found[f"weight of the worst kind over the others, {name}"] = score[bins[kind == worst]].mean() / np.mean(
                others
            )
    return found


def learning(seed: int, params: dict[str, Any] | None) -> float:
    """Success of the worst kind after training at equal rollouts."""
    kind = np.repeat(range(3), (SHARES * PROMPTS).round().astype(int))
    logits = np.log(RATES / (1 - RATES))
    methods = [] if params is None else [GdroPrompt(GdroPrompt.Params(edges=(0.5, 0.97), history=10, **params))]
    run = make_run(dataset_size=PROMPTS, group_size=GROUP)
    stack, rng = start_stack(*methods, seed=seed, run=run), np.random.default_rng([seed, 1])
    for _ in range(STEPS):
        prompts = rng.choice(PROMPTS, BATCH, replace=False)
        _, (prompt, advantage), _ = one_batch(stack, prompts, sigmoid(logits)[kind], GROUP, rng)
        for k in range(3):
            logits[k] += 0.5 * np.abs(advantage[kind[prompt] == k]).sum() / len(advantage)
    return float(sigmoid(logits).min())


def rollouts(seed: int, params: dict[str, Any]) -> dict[str, float]:
    """Weighted standard error relative to uniform groups."""
    kind = np.arange(PROMPTS) % 3
    method = GdroRollout(GdroRollout.Params(edges=(0.3, 0.7), **params))
    run = make_run(dataset_size=PROMPTS, group_size=NOISY_GROUP)
    stack, rng = start_stack(method, seed=seed, run=run), np.random.default_rng([seed, 2])
    bins = np.array([1, 2, 0])[kind]  # what a classifier that tells them apart would say
    method.bins_of = lambda prompts: torch.from_numpy(bins[prompts.numpy()])  # type: ignore[method-assign]
    error, sigma, share = [], np.sqrt(NOISY * (1 - NOISY)), np.full(3, 1 / 3)
    for step in range(NOISY_STEPS):
        prompts = np.concatenate(
            [rng.choice(np.flatnonzero(kind == k), NOISY_BATCH // 3, replace=False) for k in range(3)]
        )
        plan, _, _ = one_batch(stack, prompts, NOISY[kind], NOISY_GROUP, rng)
        n = np.array([np.mean([row.n for row in plan.rows if kind[row.prompt_index] == k]) for k in range(3)])
        if step >= NOISY_STEPS // 2:
            error.append((share * sigma / np.sqrt(n)).sum())
    uniform = (share * sigma / np.sqrt(NOISY_GROUP)).sum()
    law = NOISY_GROUP * sigma / (share * sigma).sum()
    best = NOISY_GROUP * sigma ** (2 / 3) / (share * sigma ** (2 / 3)).sum()  # minimizes this very sum
    return {
        "gdro_rollout": float(np.mean(error) / uniform),
        "square-root law": float((share * sigma / np.sqrt(law)).sum() / uniform),
        "least there is": float((share * sigma / np.sqrt(best)).sum() / uniform),
    }


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "gdro_prompt",
        "success of the worst kind of prompts after 120 batches, simulated",
        "higher",
        r["success of the worst kind after training"]["code"],
        r["success of the worst kind after training"]["weights of 1"],
        baseline="weights of 1",
    )
    error = r["weighted standard error over uniform, code"]
    yield record(
        "gdro_rollout",
        "weighted standard error relative to equal groups, simulated",
        "lower",
        difference=error["gdro_rollout"],
        baseline="equal groups",
        none=1,
        note=f"the least that is possible is {error['least there is']['mean']:.3f} times",
    )


def main() -> None:
    args, start = arguments(__doc__ or "", seeds=10), time.time()
    seeds = range(args.seeds)
    results: dict[str, Any] = {}
    found = [weights(seed) for seed in seeds]
    results["weights"] = {name: interval([f[name] for f in found]) for name in found[0]}
    arms = {"weights of 1": None, "code": {}, "code, eta 3": {"eta": 3.0}, "no norm_by_share": {"norm_by_share": False}}
    after = {arm: np.array([learning(seed, params) for seed in seeds]) for arm, params in arms.items()}
    results["success of the worst kind after training"] = {arm: interval(v) for arm, v in after.items()}
    results["success of the worst kind after training"] |= {
        f"{arm} - weights of 1": interval(v - after["weights of 1"])
        for arm, v in after.items()
        if arms[arm] is not None
    }
    forms: dict[str, dict[str, Any]] = {
        "code": {},
        "paper's sign": {"arm_sign": "paper"},
        "code, no baseline": {"baseline": "none"},
        "paper's sign, no baseline": {"arm_sign": "paper", "baseline": "none"},
    }
    for form, params in forms.items():
        found = [rollouts(seed, params) for seed in seeds]
        results[f"weighted standard error over uniform, {form}"] = {
            k: interval([f[k] for f in found]) for k in found[0]
        }
    for name, of in results.items():
        print(name)
        for arm, r in of.items():
            print(f"  {arm:60s} {r['mean']:8.3f} +- {r['ci95']:.3f}")
    save(
        args.out,
        "gdro",
        {"method": "gdro", "seeds": args.seeds, "results": results},
        lambda: plot(results),
        start,
        records=records(results),
        where="gdro-5-seeds",
    )


def plot(results: dict[str, Any]) -> Figure:
    figure, axes = panels(len(results), 2.3)
    for axis, (title, found) in zip(axes, results.items(), strict=True):
        arms = {arm: cell for arm, cell in found.items() if " - " not in arm}
        across(axis, [textwrap.fill(arm, 24) for arm in arms], arms.values(), "")
        axis.set_title(textwrap.fill(title, 40), loc="left", fontsize=8.5)
    return figure


if __name__ == "__main__":
    main()
