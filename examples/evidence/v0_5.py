"""V_0.5 (arXiv 2603.10848): when is the fused baseline closer to the truth than the mean of the group?

A simulation without a model. Prompts have a mean reward mu, uniform in [-0.9, 0.9]; rollouts are rewarded -1 or 1; the
prior is mu + bias or mu - bias (clipped), each half of the time. The real method plans, asks for more in rounds and
makes advantages; its baseline is reward - advantage. The group mean comes through the same code, without a prior.

Measured per seed: mean squared error of the baseline, and rollouts per prompt, for the mean of 4, the fused baseline of
4 (no extra rollouts), the method with extra rollouts, the mean of as many rollouts as the method took on average, and
the method with leave-one-out (where the error counts, averaged over the group's rows).

Second part, the prior that ships: mu drifts over batches as under training; the running mean of a prompt's earlier
rollouts is the prior. Errors of the same baselines after the first visits.

Found (3 seeds, 2000 prompts): bias 0: .185 -> .046 (fused, 4) and .006 (extra, 4.5 rollouts); .3: .102 and .076
against .146 for the mean of 5; .4: .116 against .121 for the mean of 6; .6: .191 against .103 for the mean of 7. So it
wins while the prior is off by less than a fifth of the reward range and loses beyond, extra rollouts or not. With the
running mean as prior: .187 -> .089 at 4 rollouts, .049 at 5.0.

    python examples/evidence/v0_5.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, interval, named, points, record, save
from matplotlib.figure import Figure

from rl_plugins.core.groups import Groups
from rl_plugins.core.rollouts import GroupSoFar, Plan, Rollouts
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.v0_5 import V05
from rl_plugins.runtime.plan import first_plan, next_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

PROMPTS, BIASES, K_MAX = 800, (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0), 16
BATCH, DRIFT, VISITS, WARM_UP = 100, 0.1, 12, 4


class Priors:
    """A dataset whose column `prior` holds the predictions."""

    column_names = ["prompt", "prior"]

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"prompt": str(i), "prior": float(self.values[i])}


def stack_of(values: np.ndarray, seed: int, **params: Any) -> MethodStack:
    method = V05(V05.Params(reward_low=-1.0, reward_high=1.0, **params))
    return start_stack(method, seed=seed, run=make_run(dataset=Priors(values), dataset_size=len(values), group_size=16))


def generate(stack: MethodStack, mu: np.ndarray, prompts: np.ndarray, rng: np.random.Generator) -> Rollouts:
    """One batch, round by round, as a host makes it."""
    draws = np.where(rng.random((len(mu), K_MAX)) < (1 + mu[:, None]) / 2, 1.0, -1.0)
    budget, have = K_MAX * len(prompts), np.zeros(len(prompts), dtype=int)
    rows = list(first_plan(stack, prompts.tolist(), K_MAX, budget, len(mu)).rows)
    first = {row.group: row for row in rows}
    for number in range(1, 64):
        for row in rows:
            have[row.group] += row.n
        so_far = tuple(GroupSoFar(r, torch.from_numpy(draws[r.prompt_index, : have[g]])) for g, r in first.items())
        rows = list(next_plan(stack, Plan((), K_MAX, budget - int(have.sum()), number, so_far)).rows)
        if not rows:
            break
    group = np.repeat(np.arange(len(prompts)), have)
    rewards = np.concatenate([draws[p, :n] for p, n in zip(prompts, have, strict=True)])
    return make_rollouts(rewards, group, prompt_index=prompts[group], lengths=[1] * len(group))


def errors(stack: MethodStack, mu: np.ndarray, prompts: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """Mean squared error of the baseline over prompts, and rollouts per prompt, of one batch."""
    rollouts = generate(stack, mu, prompts, rng)
    decision = one_step(stack, rollouts, budget=K_MAX * len(prompts))
    stack.metrics.take()
    baseline = rollouts.reward - decision.row_advantages
    error = Groups(rollouts.group).mean((baseline - torch.from_numpy(mu)[rollouts.prompt_index]) ** 2)
    return float(error.mean()), len(rollouts) / len(prompts)


def biased(bias: float, seed: int) -> dict[str, tuple[float, float]]:
    rng = np.random.default_rng([seed, 0])
    mu = rng.uniform(-0.9, 0.9, PROMPTS)
    prior = (mu + bias * rng.choice([-1, 1], PROMPTS)).clip(-1, 1)
    unknown = np.full(PROMPTS, np.nan)
    prompts = np.arange(PROMPTS)

    def run(values: np.ndarray, **params: Any) -> tuple[float, float]:
        stack = stack_of(values, seed, prior="column", prior_column="prior", **params)
        return errors(stack, mu, prompts, np.random.default_rng([seed, 1]))

    found = {
        "mean of 4": run(unknown, cost=float("inf")),
        "fused, 4": run(prior, cost=float("inf")),
        "fused, extra": run(prior),
        "fused, extra, leave one out": run(prior, leave_one_out=True),
    }
    same = round(found["fused, extra"][1])
    found["mean of as many"] = run(unknown, k_init=same, cost=float("inf"))
    return found


def drifting(seed: int) -> dict[str, tuple[float, float]]:
    """Every prompt comes once per pass over the dataset; its mu moves between two visits."""
    arms: dict[str, dict[str, Any]] = {
        "mean of 4": {"prior": "column", "prior_column": "prior", "cost": float("inf")},
        "fused with the running mean, 4": {"cost": float("inf")},
        "fused with the running mean, extra": {},
    }
    found = {}
    for arm, params in arms.items():
        rng, size = np.random.default_rng([seed, 2]), 2 * BATCH
        logit, stack = rng.normal(-0.5, 1.2, size), stack_of(np.full(size, np.nan), seed, **params)
        batches = []
        for visit in range(VISITS):
            logit += DRIFT + DRIFT * rng.normal(size=size)  # the policy gets better, and its prompts differ in it
            mu = 2 / (1 + np.exp(-logit)) - 1
            for half in np.split(rng.permutation(size), 2):
                batch = errors(stack, mu, half, rng)
                batches += [batch] if visit >= WARM_UP else []
        found[arm] = (float(np.mean([e for e, _ in batches])), float(np.mean([k for _, k in batches])))
    return found


def summary(runs: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    return {
        arm: {"error": interval([run[arm][0] for run in runs]), "rollouts": interval([run[arm][1] for run in runs])}
        for arm in runs[0]
    }


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "v0_5",
        "squared error of the baseline at 4 rollouts, simulated",
        "lower",
        r["bias 0"]["fused, 4"]["error"],
        r["bias 0"]["mean of 4"]["error"],
        baseline="group mean",
    )
    yield record(
        "v0_5",
        "squared error of the baseline where the prior is off by 0.3, simulated",
        "lower",
        r["bias 0.3"]["fused, extra"]["error"],
        r["bias 0.3"]["mean of as many"]["error"],
        baseline="mean of as many rollouts",
    )


def main() -> None:
    args = arguments(__doc__, seeds=5)
    seeds = range(args.seeds)

    results = {f"bias {bias:g}": summary([biased(bias, seed) for seed in seeds]) for bias in BIASES}
    results["running mean"] = summary([drifting(seed) for seed in seeds])
    constants = dict(prompts=PROMPTS, k_max=K_MAX, drift=DRIFT, visits=VISITS, seeds=args.seeds)
    content = {"method": "v0_5", "settings": constants, "results": results}
    save(args.out, "v0_5", content, lambda: plot(results), records=records(results), where="v0_5-v0-brpo-3-seeds")
    for setting, arms in results.items():
        print(setting)
        for arm, found in arms.items():
            cells = [f"{f['mean']:8.4f} +- {f['ci95']:.4f}" for f in found.values()]
            print(f"  {arm:36s} squared error {cells[0]}   rollouts {cells[1]}")


def plot(results: dict[str, Any]) -> Figure:
    figure, (error, rollouts) = panels(2)
    for i, arm in enumerate(results["bias 0"]):
        for axis, what in ((error, "error"), (rollouts, "rollouts")):
            points(axis, BIASES, [results[f"bias {bias:g}"][arm][what] for bias in BIASES], arm, i)
    named(error, "error of the prior (rewards are -1 and 1)", "mean squared error of the baseline")
    named(rollouts, "error of the prior (rewards are -1 and 1)", "rollouts per prompt")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
