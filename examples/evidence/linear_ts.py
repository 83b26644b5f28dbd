"""linear_ts, measured: the posterior against the published update, and the prompts it chooses.

    python examples/evidence/linear_ts.py --seeds 10 --out evidence-results

Estimate. Rewards are linear in a context of three numbers with the truth (0.5, -0.2, 0.1) and a deviation of 0.05. The
distance of the estimate from the truth after some updates, with the posterior and with the update as published, which
changes the precision in place before it is used.

Choice. 500 prompts of five domains, 8 prompts of 4 rollouts per batch, 200 batches. Success rates begin at 0.002, 0.02,
0.1, 0.5 and 0.98 per domain (logits shifted per prompt by a normal deviate of 0.5). Every group with unequal rewards
raises the logit of its domain by 0.01, so that easy domains are used up and hard ones come into reach. Shown are the
share of groups with unequal rewards and the mean success rate over all domains at the end, for uniform prompts,
Thompson sampling with 1 and with 16 draws, with progress as context, with the published update, and `rule: contest`.

linear_ts is the method itself, through the driver. Intervals are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import across, arguments, named, points, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.rollouts import PromptPool
from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods import linear_ts
from rl_plugins.methods.linear_ts import LinearTS
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

TRUTH, NOISE = np.array([0.5, -0.2, 0.1]), 0.05
UPDATES = (10, 40, 160, 640)
DOMAINS, PER_DOMAIN, PROMPTS, GROUP, BATCHES = 5, 100, 8, 4, 200
START = np.array([0.002, 0.02, 0.1, 0.5, 0.98])
LEARNED = 0.01  # logit per group with unequal rewards
ARMS: dict[str, dict[str, Any] | None] = {  # parameters; None: uniform prompts
    "uniform": None,
    "thompson, 1 draw": {},
    "thompson, 16 draws": {"draws": 16},
    "thompson, 16 draws, progress": {"draws": 16, "context": ("constant", "progress")},
    "published update, 1 draw": {},
    "published update, 16 draws": {"draws": 16},
    "contest": {"rule": "contest"},
}


def published(
    precision: torch.Tensor, mean: torch.Tensor, x: torch.Tensor, reward: float, noise_variance: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The authors' update: P m with the P that was changed in place."""
    updated = precision + torch.outer(x, x) / noise_variance
    return updated, torch.linalg.solve(updated, updated @ mean + reward * x / noise_variance)


def errors(seed: int) -> dict[str, float]:
    """Distance from the truth after each number of updates."""
    rng, found = np.random.default_rng(seed), {}
    state = {name: (torch.eye(3).double() / 10, torch.zeros(3).double()) for name in ("posterior", "published")}
    update = {"posterior": linear_ts.posterior, "published": published}
    for i in range(1, max(UPDATES) + 1):
        x = rng.uniform(0, 1, 3)
        reward = float(x @ TRUTH + NOISE * rng.normal())
        for name, (precision, mean) in state.items():
            state[name] = update[name](precision, mean, torch.from_numpy(x), reward, 0.5)
            if i in UPDATES:
                found[f"{name}, {i} updates"] = float(np.linalg.norm(state[name][1].numpy() - TRUTH))
    return found


class Domains:
    """The dataset: prompts of the domains in turn."""

    column_names = ("prompt", "domain")

    def __getitem__(self, key: Any) -> Any:
        assert key == "domain"
        return [str(i % DOMAINS) for i in range(DOMAINS * PER_DOMAIN)]


def train(arm: str, seed: int) -> dict[str, float]:
    """Share of groups with unequal rewards, and success over all domains at the end."""
    rng = np.random.default_rng([seed, 3])
    size = DOMAINS * PER_DOMAIN
    shift = 0.5 * rng.normal(size=size)
    logit = np.log(START / (1 - START))
    params, stack = ARMS[arm], None
    if params is not None:
        run = make_run(dataset=Domains(), dataset_size=size, total_batches=BATCHES)
        stack = start_stack(LinearTS(LinearTS.Params(column="domain", **params)), seed=seed, run=run)
    shares = []
    for batch in range(BATCHES):
        pool = PromptPool(size, (), (), None, batch)
        chosen = (
            rng.choice(size, PROMPTS, replace=False) if stack is None else stack.one("select_prompts", pool, PROMPTS)
        )
        prompt = np.repeat(np.asarray(chosen), GROUP)
        rate = 1 / (1 + np.exp(-(logit[prompt % DOMAINS] + shift[prompt])))
        reward = (rng.random(len(prompt)) < rate).astype(float)
        if stack is not None:
            one_step(stack, make_rollouts(reward, group_size=GROUP, prompt_index=prompt.tolist(), batch=batch))
        groups = reward.reshape(PROMPTS, GROUP)
        unequal = groups.max(1) > groups.min(1)
        np.add.at(logit, prompt.reshape(PROMPTS, GROUP)[unequal, 0] % DOMAINS, LEARNED)
        shares.append(unequal.mean())
    every = np.arange(size)
    success = 1 / (1 + np.exp(-(logit[every % DOMAINS] + shift)))
    return {"signal": 100 * float(np.mean(shares)), "success": 100 * float(success.mean())}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "linear_ts",
        "groups with unequal rewards, simulated",
        "higher",
        r["thompson, 1 draw"]["signal"],
        r["uniform"]["signal"],
        baseline="uniform",
        unit="%",
    )
    yield record(
        "linear_ts",
        "success over all domains at the end, simulated",
        "higher",
        r["thompson, 1 draw"]["success"],
        r["uniform"]["success"],
        baseline="uniform",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__, seeds=10)
    start = time.time()
    runs = [errors(seed) for seed in range(args.seeds)]
    result: dict[str, Any] = {"seeds": args.seeds, "error": {k: summary([r[k] for r in runs]) for k in runs[0]}}
    for name, cell in result["error"].items():
        print(f"{name:28} distance from the truth {cell['mean']:.3f} +- {cell['ci95']:.3f}")
    result["choice"] = {}
    for arm in ARMS:
        update = published if arm.startswith("published") else linear_ts.posterior
        with patch.object(linear_ts, "posterior", update):
            found = [train(arm, seed) for seed in range(args.seeds)]
        cells = {key: summary([run[key] for run in found]) for key in found[0]}
        result["choice"][arm] = cells
        texts = (f"{key} {c['mean']:.1f} +- {c['ci95']:.1f}" for key, c in cells.items())
        print(f"{arm:30} {'   '.join(texts)}", flush=True)
    save(
        args.out,
        "linear_ts",
        result,
        lambda: plot(result),
        start,
        records=records(result["choice"]),
        where="linear_ts-10-seeds",
    )


def plot(result: dict[str, Any]) -> Figure:
    figure, (error, choice) = panels(2)
    for i, key in enumerate(("published", "posterior")):
        points(error, UPDATES, [result["error"][f"{key}, {n} updates"] for n in UPDATES], f"{key} update", i)
    error.set(xscale="log", yscale="log")
    named(error, "updates of the bandit", "distance from the truth")
    error.legend()
    across(choice, ARMS, [result["choice"][arm]["signal"] for arm in ARMS], "groups with unequal rewards (%)")
    choice.tick_params(axis="y", labelsize=7.5)
    return figure


if __name__ == "__main__":
    main()
