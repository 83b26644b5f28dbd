"""best_perm's mechanism, measured: tries until a success against fixed orders of the same hints.

    python examples/evidence/best_perm.py --seeds 10 --out evidence-results

Six hints from weak to strong are accepted with probabilities between 0.05 and 0.7, and a prompt may try three of them.
Every batch has 16 prompts whose plain rollouts fail. Two kinds of values of a success by hint k: equal (1), or falling
with its strength (1 - k / 6, the default of the method). Two kinds of prompts: all alike (what the estimates assume),
or each with a difficulty of its own that moves all acceptances together (logit shifted by a normal deviate of 1.5).

Arms: fixed orders (weak first, strong first, a random one per prompt), the oracle with the true mean acceptances, and
best_perm with both estimates, which begins with none and learns over 100 batches. Per prompt, mean over all batches:
the value of the outcome, tries that were made (until a success or the end of the list), tries of prompts with a
success, and the share of prompts with a success.

best_perm is the method itself, through the driver and its rounds. Intervals are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common import across, arguments, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.rollouts import PlanRow
from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods.best_perm import BestPerm, best_permutation
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

ACCEPT = np.array([0.05, 0.35, 0.15, 0.3, 0.6, 0.7])
HINTS, TRIES, PROMPTS, BATCHES = len(ACCEPT), 3, 16, 100
VALUES = {"equal": [1.0] * HINTS, "falling": [1 - k / HINTS for k in range(HINTS)]}
LEARNED = {"best_perm, upper": "upper", "best_perm, posterior": "posterior"}
ARMS = ("weak first", "strong first", "random", "oracle", *LEARNED)

Outcome = tuple[list[int], bool]  # hints tried, whether the last one was accepted


class Prompts:
    """A dataset of prompts without anything in them."""

    column_names = ("prompt",)

    def __getitem__(self, i: int) -> dict[str, str]:
        return {"prompt": f"{i}"}


def acceptances(alike: bool, rng: np.random.Generator) -> np.ndarray:
    """(PROMPTS, HINTS) of one batch."""
    shift = np.zeros(PROMPTS) if alike else 1.5 * rng.normal(size=PROMPTS)
    return 1 / (1 + np.exp(-(np.log(ACCEPT / (1 - ACCEPT)) + shift[:, None])))


def follow(order: list[int], accepted: np.ndarray) -> Outcome:
    """A fixed list on one prompt. accepted: (HINTS,) bool."""
    for i, k in enumerate(order):
        if accepted[k]:
            return order[: i + 1], True
    return order, False


def learned_arm(estimate: str, values: list[float]) -> Callable[[np.ndarray], list[Outcome]]:
    """best_perm on a batch of outcomes, (PROMPTS, HINTS) bool."""
    templates = tuple(f"{{prompt}} {k}" for k in range(HINTS))
    params = {"templates": templates, "n_first": 1, "max_hints": TRIES, "values": tuple(values), "estimate": estimate}
    size = 1 + TRIES
    run = make_run(dataset=Prompts(), dataset_size=PROMPTS, group_size=size)
    stack = start_stack(BestPerm(BestPerm.Params(**params)), run=run)

    def batch(accepted: np.ndarray) -> list[Outcome]:
        rounds = Rounds(stack, [PlanRow(i, i, 1) for i in range(PROMPTS)], size, PROMPTS * size, PROMPTS)
        while True:
            hint = [row.payload["best_perm"] if row.payload else -1 for row in rounds.rows]
            group = [row.group for row in rounds.rows]
            reward = [float(k >= 0 and accepted[g, k]) for g, k in zip(group, hint, strict=True)]
            if not rounds.more(torch.tensor(group), torch.tensor(reward, dtype=torch.float64)):
                break
        payload = [row.payload for row in rounds.rows]
        one_step(stack, make_rollouts(reward, group, payload=payload), budget=PROMPTS * size)
        tried = [[k for g, k in zip(group, hint, strict=True) if g == i and k >= 0] for i in range(PROMPTS)]
        return [(ks, bool(accepted[i, ks[-1]])) for i, ks in enumerate(tried)]

    return batch


def measure(arm: str, values: list[float], alike: bool, seed: int) -> dict[str, float]:
    """Means over all prompts of all batches; every arm has the same prompts and the same luck."""
    rng, shuffle = np.random.default_rng([seed, alike]), np.random.default_rng([seed, 9])
    mean = np.mean([acceptances(alike, np.random.default_rng([7, i])).mean(0) for i in range(200)], 0)
    best = best_permutation(mean.tolist(), values, TRIES)[0]
    learned = learned_arm(LEARNED[arm], values) if arm in LEARNED else None
    outcomes: list[Outcome] = []
    for _ in range(BATCHES):
        accepted = rng.random((PROMPTS, HINTS)) < acceptances(alike, rng)
        if learned is not None:
            outcomes += learned(accepted)
            continue
        for row in accepted:
            fixed = {"weak first": list(range(TRIES)), "strong first": list(range(HINTS))[::-1][:TRIES], "oracle": best}
            outcomes.append(follow(fixed.get(arm) or shuffle.permutation(HINTS)[:TRIES].tolist(), row))
    return {
        "value": float(np.mean([values[ks[-1]] if right else 0.0 for ks, right in outcomes])),
        "tries": float(np.mean([len(ks) for ks, _ in outcomes])),
        "tries_of_successes": float(np.mean([len(ks) for ks, right in outcomes if right])),
        "success": 100 * float(np.mean([right for _, right in outcomes])),
    }


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "best_perm",
        "value of successes where weaker hints are worth more, simulated",
        "higher",
        r["falling values | prompts alike"]["best_perm, upper"]["value"],
        r["falling values | prompts alike"]["weak first"]["value"],
        baseline="weak hints first",
    )
    yield record(
        "best_perm",
        "tries until a success where all hints are worth the same, simulated",
        "lower",
        r["equal values | prompts alike"]["best_perm, upper"]["tries"],
        r["equal values | prompts alike"]["strong first"]["tries"],
        baseline="strong hints first",
    )
    yield record(
        "best_perm",
        "tries until a success where all hints are worth the same, simulated",
        "lower",
        r["equal values | prompts alike"]["best_perm, upper"]["tries"],
        r["equal values | prompts alike"]["weak first"]["tries"],
        baseline="weak hints first",
    )


def main() -> None:
    args = arguments(__doc__, seeds=10)
    start = time.time()
    result: dict = {"seeds": args.seeds, "table": {}}
    for kind, values in VALUES.items():
        for alike in (True, False):
            for arm in ARMS:
                runs = [measure(arm, values, alike, seed) for seed in range(args.seeds)]
                cells = {key: summary([run[key] for run in runs]) for key in runs[0]}
                place = f"{kind} values | {'prompts alike' if alike else 'prompts differ'}"
                result["table"].setdefault(place, {})[arm] = cells
                texts = (f"{k} {c['mean']:.3f} +- {c['ci95']:.3f}" for k, c in cells.items())
                print(f"{place:34} {arm:22} {'   '.join(texts)}", flush=True)
    save(
        args.out,
        "best_perm",
        result,
        lambda: plot(result),
        start,
        records=records(result["table"]),
        where="best_perm-10-seeds",
    )


def plot(result: dict) -> Figure:
    table = result["table"]
    figure, axes = panels(2 * len(table), 2.2)
    for pair, (place, arms) in zip(zip(axes[::2], axes[1::2], strict=True), table.items(), strict=True):
        for axis, key in zip(pair, ("value", "tries"), strict=True):
            across(axis, ARMS, [arms[arm][key] for arm in ARMS], f"{key} per prompt")
            axis.set_title(place, loc="left")
    return figure


if __name__ == "__main__":
    main()
