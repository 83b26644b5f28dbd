"""V_0 (arXiv 2602.03584): what do predicted success rates buy when they allot the rollouts, and who predicts them?

Part 1, budgets. 256 prompts with success rates p ~ Beta(0.5, 0.8) and 8 rollouts each on average; the prediction is p
with normal noise on its logit. The real method plans through the driver's own code. Measured per seed with rollouts
drawn at the true rates: share of the groups with both outcomes, failed rollouts in such groups (what the utility
promises), sum of |advantages| of GRPO per rollout (what is left of it after GRPO divides by the standard deviation),
and the share of prompts whose group has a success, for equal budgets, greedy and exact, at limits of 32 and 128.

Part 2, predictions. 600 prompts of the demo's digit lists; the success rate is logistic in the level, in a random
effect of each prompt, and in the step (the policy learns). Batches of 64 prompts x 8. Measured after a warm-up:
`v0/auc` and `v0/brier` of the priors that ship, of the batch's mean (which tells no prompts apart) and of the true
rates; and the same for "new prompts", where no prompt comes twice.

Found (3 seeds): the objective is met (failed rollouts beside a success, per rollout: equal .36, greedy .57, exact .70
at a limit of 32), at a price: mixed groups .66 -> .43, prompts with a success .75 -> .64. Greedy at 32 raises GRPO's
|advantage| per rollout from .52 to .75; exact raises it to .54 only, because it makes large groups with one success. At
128 fewer groups still are mixed. With predictions of pure noise the price is paid for nothing. AUC: nearest .90 (.90
for new prompts), running mean .92, the batch's mean .50, true rates .93.

    python examples/evidence/v0.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import across, arguments, grouped, interval, named, record, save
from matplotlib.figure import Figure

from rl_plugins.core.groups import Groups
from rl_plugins.lab.compare.figures import color, name_lines, panels
from rl_plugins.lab.demo.tasks import build_rows
from rl_plugins.methods.v0 import V0
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

PROMPTS, GROUP, REPEATS = 256, 8, 8
NOISES = {"true rates": 0.0, "noise 1": 1.0, "noise 2": 2.0, "pure noise": None}
BUDGETS = {
    "equal": {"allocation": "uniform"},
    "greedy, 32": {"allocation": "greedy", "max_rollouts": 32},
    "exact, 32": {"allocation": "exact", "max_rollouts": 32},
    "greedy, 128": {"allocation": "greedy", "max_rollouts": 128},
    "exact, 128": {"allocation": "exact", "max_rollouts": 128},
}
LISTS, BATCH, STEPS, WARM_UP = 600, 64, 60, 20
PRIORS = ("nearest", "running_mean", "beta", "batch mean", "true rates", "nearest, new prompts", "true, new prompts")


class Dataset:
    def __init__(self, prompts: list[Any], rates: np.ndarray) -> None:
        self.column_names, self.prompts, self.rates = ["prompt", "rate"], prompts, rates

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"prompt": self.prompts[i], "rate": float(self.rates[i])}


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def allot(seed: int, noise: float | None, **params: Any) -> dict[str, float]:
    """What a plan by noisy predictions gives at the true rates."""
    rng = np.random.default_rng([seed, 0])
    rate = rng.beta(0.5, 0.8, PROMPTS).clip(1e-4, 1 - 1e-4)
    logit = np.log(rate / (1 - rate))
    guess = rng.permutation(rate) if noise is None else sigmoid(logit + noise * rng.normal(size=PROMPTS))
    method = V0(V0.Params(prior="column", prior_column="rate", **params))
    dataset = Dataset([str(i) for i in range(PROMPTS)], guess)
    stack = start_stack(method, run=make_run(dataset=dataset, dataset_size=PROMPTS, group_size=GROUP))
    plan = first_plan(stack, list(range(PROMPTS)), GROUP, PROMPTS * GROUP, PROMPTS)
    group = np.repeat(np.arange(PROMPTS), [row.n for row in plan.rows])
    found: dict[str, list[float]] = {"mixed": [], "failures": [], "advantages": [], "solved": []}
    for repeat in range(REPEATS):
        success = np.random.default_rng([seed, 1, repeat]).random(len(group)) < rate[group]
        groups, reward = Groups(torch.from_numpy(group)), torch.from_numpy(success.astype(float))
        mean, std = groups.mean(reward), groups.std(reward)
        mixed = (mean > 0) & (mean < 1)
        advantage = (reward - groups.rows(mean)) / (groups.rows(std) + 1e-4)
        found["mixed"].append(float(mixed.double().mean()))
        found["failures"].append(float(((1 - reward) * groups.rows(mixed)).sum()) / len(group))
        found["advantages"].append(float(advantage.abs().sum()) / len(group))
        found["solved"].append(float((mean > 0).double().mean()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def predict(seed: int, name: str) -> dict[str, float]:
    """AUC and Brier score of a prior while a policy learns digit lists."""
    prior, _, new = name.partition(", ")
    size = STEPS * BATCH if new else LISTS
    rng, rows = np.random.default_rng([seed, 2]), build_rows(size, seed=seed)
    level, own = np.array([row["level"] for row in rows]), rng.normal(size=size)
    rates = np.zeros(size)
    params: dict[str, Any] = {"prior": prior}
    if prior == "batch mean":

        def mean(prompts: list[str], context: list[tuple[str, float]]) -> list[float]:
            return [float(np.mean([value for _, value in context]))] * len(prompts) if context else [0.5] * len(prompts)

        params = {"prior": mean, "context_size": 512}
    elif prior.startswith("true"):
        params = {"prior": "column", "prior_column": "rate"}
    method = V0(V0.Params(allocation="uniform", **params))
    dataset = Dataset([row["prompt"] for row in rows], rates)
    stack = start_stack(method, seed=seed, run=make_run(dataset=dataset, dataset_size=size, group_size=GROUP))
    queue, logged = np.zeros(0, dtype=int), []
    for step in range(STEPS):
        rates[:] = sigmoid(5 - 2 * level + own + 3 * step / STEPS)
        if len(queue) < BATCH:
            queue = np.concatenate([queue, rng.permutation(size)])
        prompts, queue = queue[:BATCH], queue[BATCH:]
        first_plan(stack, prompts.tolist(), GROUP, BATCH * GROUP, size)
        success = rng.random((BATCH, GROUP)) < rates[prompts][:, None]
        one_step(
            stack,
            make_rollouts(
                success.ravel().astype(float),
                group_size=GROUP,
                prompt_index=torch.from_numpy(np.repeat(prompts, GROUP)),
                lengths=[1] * BATCH * GROUP,
            ),
        )
        logged.append(combine([stack.metrics.take()]))
    late = logged[WARM_UP:]
    return {name: float(np.mean([x[f"v0/{name}"] for x in late])) for name in ("auc", "brier")}


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {name: interval([run[name] for run in runs]) for name in runs[0]}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "v0",
        "failed rollouts in groups with a success, per rollout, simulated",
        "higher",
        r["greedy, 128"]["failures"],
        r["equal"]["failures"],
        baseline="equal budgets",
    )
    yield record(
        "v0",
        "share of mixed groups, simulated",
        "higher",
        r["greedy, 128"]["mixed"],
        r["equal"]["mixed"],
        baseline="equal budgets",
    )


def main() -> None:
    args = arguments(__doc__, seeds=5)
    seeds = range(args.seeds)

    budgets = {
        noise: {name: summary([allot(s, NOISES[noise], **params) for s in seeds]) for name, params in BUDGETS.items()}
        for noise in NOISES
    }
    priors = {name: summary([predict(s, name) for s in seeds]) for name in PRIORS}
    constants = dict(prompts=PROMPTS, group=GROUP, lists=LISTS, batch=BATCH, steps=STEPS, seeds=args.seeds)
    results = {"budgets": budgets, "priors": priors}
    content = {"method": "v0", "settings": constants, "results": results}
    save(
        args.out,
        "v0",
        content,
        lambda: plot(budgets, priors),
        records=records(budgets["true rates"]),
        where="v0_5-v0-brpo-3-seeds",
    )
    for title, table in [*((f"budgets, {noise}", t) for noise, t in budgets.items()), ("priors", priors)]:
        print(title)
        for name, found in table.items():
            cells = [f"{what} {f['mean']:.3f} +- {f['ci95']:.3f}" for what, f in found.items()]
            print(f"  {name:22s}" + "   ".join(cells))


def plot(budgets: dict[str, Any], priors: dict[str, Any]) -> Figure:
    figure, axes = panels(4)
    what = {
        "mixed": "share of groups with both outcomes",
        "failures": "failed rollouts beside a success, per rollout",
        "advantages": "mean |advantage| of GRPO",
    }
    for axis, (key, label) in zip(axes, what.items(), strict=False):
        grouped(axis, NOISES, {budget: [budgets[noise][budget][key] for noise in NOISES] for budget in BUDGETS})
        named(axis, "prediction", label)
    across(axes[3], priors, [found["auc"] for found in priors.values()], "AUC of predictions, digit lists")
    axes[3].axvline(0.5, color=color(0), linewidth=0.8)
    axes[3].set_xlim(0.4, 1)
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
