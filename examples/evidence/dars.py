"""DARS (arXiv 2508.13755): do helpings even out what prompts weigh, and are more prompts solved by as many rollouts?

Simulations without a model; the real method plans in rounds, filters, and its groups get the advantages r - mean.

1. Total of |advantage| that a prompt has in a batch, by its pass rate p: GRPO with 8 rollouts, DARS (8, then helpings,
   room for all of them) with either schedule, and GRPO with as many rollouts per prompt as DARS took on average.

2. 64 prompts, each with a policy of its own (one logit theta, p = sigmoid(theta)), p log-uniform from 0.0003 to 0.5
   at the start. In every batch all prompts are rolled out and each logit takes a step along its share of the policy
   gradient, sum of A_i (r_i - p) over the rows of the batch. The uniform arm gets exactly the rollouts that the arm it
   is compared with generated in that batch, spread evenly. Measured: share of prompts ever solved (a right rollout in
   any batch), and of the prompts that began below 0.05 the share that ends above 0.5; mean p at the end. Both arms
   divide by the rows with an advantage, so GRPO's step is not made smaller by groups without signal.

Found (10 seeds): totals are not flat below one half, because a prompt without a success is taken for p = 1/16, but hard
prompts weigh more: at p = 0.05 2.45 (et) and 4.84 (hw) of 3.5 at one half in GRPO, which has 0.66, or 1.43 with as many
rollouts. Of the hard prompts 0.43 (et) and 0.44 (hw) are learned against 0.31 of GRPO with as many rollouts; ever
solved 0.88 and 0.87 against 0.84 and 0.83.

    python examples/evidence/dars.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from common import arguments, grouped, named, points, record, save
from common import summary as over_seeds
from matplotlib.figure import Figure

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods.dars import Dars
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, start_stack

RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99)
REPEATS, N = 400, 8
PROMPTS, BATCHES, RATE = 64, 40, 60.0
ARMS: dict[str, dict[str, Any]] = {
    "et, room 16": {"schedule": "et", "group_size": 16},
    "hw, room 16": {"schedule": "hw", "group_size": 16},
    "et, room 8": {"schedule": "et", "group_size": 8},
}

Draw = Callable[[int, int], list[float]]  # prompt, number of rollouts -> rewards


def plain(rollouts: Rollouts) -> torch.Tensor:
    return grpo_advantages(rollouts, "none")


def stack_of(schedule: Any, group_size: int) -> MethodStack:
    return start_stack(Dars(Dars.Params(schedule=schedule)), run=make_run(group_size=group_size))


def dars(draw: Draw, prompts: int, group_size: int, stack: MethodStack) -> tuple[Rollouts, torch.Tensor]:
    """The rollouts of a batch, and the advantages of those that stay, 0 for the others."""
    budget = prompts * group_size
    plan = first_plan(stack, range(prompts), group_size, budget, prompts)
    rounds, rows, group, reward = Rounds(stack, plan.rows, group_size, budget, prompts), plan.rows, [], list[float]()
    while rows:
        for row in rows:
            reward += draw(row.prompt_index, row.n + row.spare)
            group += [row.group] * (row.n + row.spare)
        rows = rounds.more(torch.tensor(group), torch.tensor(reward, dtype=torch.float64))
    rollouts = make_rollouts(reward, group, lengths=[1] * len(group))
    stack.metrics.take()
    return rollouts, decide(stack, rollouts, None, None, plain, budget).row_advantages


def uniform(draw: Draw, counts: Sequence[int]) -> tuple[Rollouts, torch.Tensor]:
    rewards = [r for prompt, n in enumerate(counts) for r in draw(prompt, n)]
    group = [prompt for prompt, n in enumerate(counts) for _ in range(n)]
    rollouts = make_rollouts(rewards, group, lengths=[1] * len(group))
    return rollouts, plain(rollouts)


def drawer(p: np.ndarray, rng: np.random.Generator) -> Draw:
    return lambda prompt, n: (rng.random(n) < p[prompt]).astype(float).tolist()


def totals(seed: int) -> dict[str, list[float]]:
    """Arm -> mean total of |advantage| of a prompt, by pass rate; and rollouts per prompt."""
    p = np.repeat(RATES, REPEATS)

    def by_rate(values: torch.Tensor) -> list[float]:
        return values.reshape(len(RATES), REPEATS).mean(1).tolist()

    def run(found: tuple[Rollouts, torch.Tensor]) -> tuple[list[float], list[float]]:
        rollouts, advantages = found
        groups = Groups(rollouts.group, count=len(p))
        return by_rate(groups.sum(advantages.abs())), by_rate(groups.size.double())

    result: dict[str, list[float]] = {}
    result["grpo, 8"], _ = run(uniform(drawer(p, np.random.default_rng([seed, 0])), [N] * len(p)))
    for schedule in ("et", "hw"):
        found = run(dars(drawer(p, np.random.default_rng([seed, 1])), len(p), 64, stack_of(schedule, 64)))
        result[f"dars, {schedule}"], result[f"rollouts, {schedule}"] = found
    same = round(np.mean(result["rollouts, et"]))
    result["grpo, as many as et"], _ = run(uniform(drawer(p, np.random.default_rng([seed, 2])), [same] * len(p)))
    return result


def spread(total: int, turn: int) -> list[int]:
    """A total over the prompts, as evenly as it goes; in every batch others get the rest."""
    counts = np.full(PROMPTS, total // PROMPTS)
    counts[(np.arange(total % PROMPTS) + turn * 17) % PROMPTS] += 1
    return [int(c) for c in counts]


def train(seed: int, batch: Callable[[Draw, int], tuple[Rollouts, torch.Tensor]]) -> dict[str, Any]:
    rng = np.random.default_rng([seed, 3])
    start = np.exp(rng.uniform(np.log(0.0003), np.log(0.5), PROMPTS))
    theta, ever, generated = np.log(start / (1 - start)), np.zeros(PROMPTS, dtype=bool), []
    for number in range(BATCHES):
        p = 1 / (1 + np.exp(-theta))
        rollouts, advantages = batch(drawer(p, rng), number)
        groups = Groups(rollouts.group, count=PROMPTS)
        ever |= (groups.max(rollouts.reward) > 0).numpy()
        step = groups.sum(advantages * (rollouts.reward - torch.from_numpy(p)[rollouts.group])).numpy()
        trained = int((advantages != 0).sum())
        theta = theta + RATE * step / max(1, trained)
        generated.append(len(rollouts))
    p, hard = 1 / (1 + np.exp(-theta)), start < 0.05
    return {
        "ever solved": float(ever.mean()),
        "hard ones learned": float((p[hard] > 0.5).mean()),
        "mean pass rate": float(p.mean()),
        "rollouts per prompt": float(np.mean(generated) / PROMPTS),
        "generated": generated,
    }


def learning(seed: int) -> dict[str, dict[str, Any]]:
    found = {}
    for arm, options in ARMS.items():
        stack, size = stack_of(**options), options["group_size"]
        ours = train(seed, lambda draw, number, s=stack, g=size: dars(draw, PROMPTS, g, s))
        given = ours.pop("generated")
        theirs = train(seed, lambda draw, number, g=given: uniform(draw, spread(g[number], number)))
        assert theirs.pop("generated") == given
        found[f"dars, {arm}"], found[f"grpo, as many as {arm}"] = ours, theirs
    return found


def paired(runs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Arm -> measure over seeds; and the difference of each pair."""
    found = {arm: {name: over_seeds([r[arm][name] for r in runs]) for name in runs[0][arm]} for arm in runs[0]}
    for arm in ARMS:
        a, b = f"dars, {arm}", f"grpo, as many as {arm}"
        found[f"difference, {arm}"] = {n: over_seeds([r[a][n] - r[b][n] for r in runs]) for n in runs[0][a]}
    return found


def records(r: Any, selection: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "dars",
        "mean pass rate at equal rollouts, simulated",
        "higher",
        difference=r["mean pass rate"],
        baseline="GRPO",
        budget="rollouts",
    )
    yield record(
        "dars",
        "prompts that began below 0.05 and end above 0.5, simulated",
        "higher",
        difference=r["hard ones learned"],
        baseline="GRPO",
    )


def main() -> None:
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)  # batches of which nothing is left are meant to be
    args, start = arguments(__doc__ or "", seeds=10), time.time()
    by_seed = [totals(seed) for seed in range(args.seeds)]
    curves = {arm: [over_seeds([run[arm][i] for run in by_seed]) for i in range(len(RATES))] for arm in by_seed[0]}
    results = {"totals": curves, "learning": paired([learning(seed) for seed in range(args.seeds)])}
    for arm, values in curves.items():
        print(f"{arm:22}" + " ".join(f"{v['mean']:6.2f}" for v in values))
    for arm, values in results["learning"].items():
        print(f"{arm:26}" + "  ".join(f"{n} {v['mean']:.3f} ± {v['ci95']:.3f}" for n, v in values.items()))
    content = {"method": "dars", "settings": {"rates": RATES, "seeds": args.seeds}, "results": results}
    save(
        args.out,
        "dars",
        content,
        lambda: plot(results),
        start,
        records=records(results["learning"]["difference, et, room 16"]),
        where="dars-10-seeds",
    )


def plot(results: dict[str, Any]) -> Figure:
    figure, (totals, learned) = panels(2, columns=1)
    arms = [arm for arm in results["totals"] if not arm.startswith("rollouts")]
    for i, arm in enumerate(arms):
        points(totals, RATES, results["totals"][arm], arm, i)
    totals.set_xscale("log")
    named(totals, "pass rate", "total of |advantage| per prompt")
    totals.legend()
    names = [arm for arm in results["learning"] if not arm.startswith("difference")]
    measures = ("ever solved", "hard ones learned", "mean pass rate")
    grouped(
        learned,
        [n.replace(", ", ",\n") for n in names],
        {m: [results["learning"][arm][m] for arm in names] for m in measures},
    )
    named(learned, "", "share of the prompts")
    learned.legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    return figure


if __name__ == "__main__":
    main()
