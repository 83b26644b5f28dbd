"""GiGPO's mechanism, measured: does comparing turns of one state tell good actions from bad ones, and learn faster?

    python examples/evidence/gigpo.py --seeds 10 --out evidence-results

An agent walks along a chain of 7 states for at most 24 turns, from the left end to the goal at the right one, with the
actions left and right. The only reward is 1 at the goal. Groups are 8 rollouts of one policy, 4 groups a batch.

Credit. The true advantage Q - V of every action is computed by backward induction (discount 0.95, turns left included).
Reported is its correlation with the advantages of one batch under the policy that goes right with probability p.

Learning. A softmax policy with one logit per state, plain gradient ascent on advantage times log-probability. Reported
is the number of updates until the exact chance to reach the goal is 90 %, at most 100; and where the chance stands
after 30 updates.

GRPO (reward of the rollout for all its turns, divided by the deviation) and GiGPO (mean_std_norm as for ALFWorld, with
and without the discount) come from the library through the driver. Intervals are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import arguments, grouped, named, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.rollouts import Rollouts
from rl_plugins.lab.compare.figures import line, name_lines, panels
from rl_plugins.methods.gigpo import Gigpo
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_turns, one_step, start_stack

STATES, TURNS, GROUPS, SIZE, GAMMA = 7, 24, 4, 8, 0.95
CHANCES = (0.5, 0.6, 0.7, 0.8)
UPDATES, EARLY, RATE = 100, 30, 2.0
ARMS = {
    "GRPO": None,
    "GiGPO": {"mode": "mean_std_norm"},
    "GiGPO, gamma 1": {"mode": "mean_std_norm", "gamma": 1.0},
    "GiGPO, step term 0": {"mode": "mean_std_norm", "step_advantage_w": 0.0},
}


def make_arm(arm: str) -> MethodStack:
    params = ARMS[arm]
    return start_stack() if params is None else start_stack(Gigpo(Gigpo.Params(**params)))


def walk(right: np.ndarray, rng: np.random.Generator) -> tuple[Rollouts, np.ndarray, np.ndarray, np.ndarray]:
    """Rollouts of a policy (states,), and the state, action and turns left of every turn, in the order of tokens."""
    n = GROUPS * SIZE
    place, done = np.zeros(n, dtype=int), np.zeros(n, dtype=bool)
    seen: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
    for left in range(TURNS, 0, -1):
        action = (rng.random(n) < right[place]).astype(int)
        for i in np.flatnonzero(~done):
            seen[i].append((place[i], action[i], left))
        place = np.where(done, place, np.clip(place + 2 * action - 1, 0, STATES - 1))
        done |= place == STATES - 1
        place = np.minimum(place, STATES - 2 + done)
    anchors = [[f"state {s}" for s, _, _ in turns] for turns in seen]
    rewards = [[0.0] * (len(turns) - 1) + [float(d)] for turns, d in zip(seen, done, strict=True)]
    lengths = [len(turns) for turns in seen]
    rollouts = make_rollouts(
        done.astype(float), np.arange(n) // SIZE, lengths=lengths, turns=make_turns(anchors, rewards)
    )
    state, action, left = np.array([turn for turns in seen for turn in turns]).T
    return rollouts, state, action, left


def values(right: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """V (turns left, states) and Q (turns left, states, actions)."""
    v, q = np.zeros((TURNS + 1, STATES)), np.zeros((TURNS + 1, STATES, 2))
    for left in range(1, TURNS + 1):
        for s in range(STATES - 1):
            for a, to in enumerate((max(s - 1, 0), s + 1)):
                q[left, s, a] = 1.0 if to == STATES - 1 else gamma * v[left - 1, to]
            v[left, s] = (1 - right[s]) * q[left, s, 0] + right[s] * q[left, s, 1]
    return v, q


def correlation(arm: str, chance: float, seed: int) -> float:
    rng, right = np.random.default_rng([seed, int(100 * chance)]), np.full(STATES, chance)
    rollouts, state, action, left = walk(right, rng)
    decision = one_step(make_arm(arm), rollouts)
    v, q = values(right, GAMMA)
    true = q[left, state, action] - v[left, state]
    given = decision.advantages.numpy()
    return float(np.corrcoef(true, given)[0, 1]) if given.std() > 0 else 0.0


def learn(arm: str, seed: int) -> list[float]:
    """The chance to reach the goal before every update, and after the last."""
    rng, stack = np.random.default_rng([seed, 7]), make_arm(arm)
    logits = np.zeros(STATES)
    curve = []
    for _ in range(UPDATES + 1):
        right = 1 / (1 + np.exp(-logits))
        curve.append(values(right, 1.0)[0][TURNS, 0])
        if curve[-1] > 0.999:
            break
        rollouts, state, action, _ = walk(right, rng)
        advantages = one_step(stack, rollouts).advantages.numpy()
        gradient = np.bincount(state, advantages * (action - right[state]), minlength=STATES)
        logits += RATE * gradient / len(state)
    return curve + [curve[-1]] * (UPDATES + 1 - len(curve))


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "gigpo",
        "updates until 90 % success in a chain of 7 states",
        "lower",
        r["updates_to_90"]["GiGPO"],
        r["updates_to_90"]["GRPO"],
        baseline="GRPO",
    )
    yield record(
        "gigpo",
        "correlation with the true advantages, policy right with probability 0.7",
        "higher",
        r["correlation"]["GiGPO"]["0.7"],
        r["correlation"]["GRPO"]["0.7"],
        baseline="GRPO",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=10)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    start = time.time()
    result: dict = {"seeds": args.seeds, "correlation": {}, "updates_to_90": {}, "chance_early": {}, "curves": {}}
    print(
        f"{'arm':20}"
        + "".join(f"{f'corr., p = {c}':>18}" for c in CHANCES)
        + f"{'updates to 90 %':>20}{'chance at 30, %':>20}"
    )
    for arm in ARMS:
        by_chance = {str(c): summary([correlation(arm, c, seed) for seed in range(4 * args.seeds)]) for c in CHANCES}
        curves = np.array([learn(arm, seed) for seed in range(args.seeds)])
        until = [float(np.argmax(c >= 0.9)) if (c >= 0.9).any() else float(UPDATES) for c in curves]
        result["correlation"][arm] = by_chance
        result["updates_to_90"][arm] = summary(until) | {"never": int(sum((c < 0.9).all() for c in curves))}
        result["chance_early"][arm] = summary([100 * float(c[EARLY]) for c in curves])
        result["curves"][arm] = {
            "mean": curves.mean(0).tolist(),
            "sd": curves.std(0, ddof=min(1, len(curves) - 1)).tolist(),
        }
        cells = [f"{by_chance[str(c)]['mean']:.2f} +-{by_chance[str(c)]['ci95']:.2f}" for c in CHANCES]
        late = [
            f"{result[k][arm]['mean']:.1f} +-{result[k][arm]['ci95']:.1f}" for k in ("updates_to_90", "chance_early")
        ]
        print(f"{arm:20}" + "".join(f"{c:>18}" for c in cells) + "".join(f"{c:>20}" for c in late))
    save(
        args.out,
        "gigpo",
        result,
        lambda: plot(result),
        start,
        records=records(result),
        where="gigpo-3-seeds-hgpo-10-seeds",
    )


def plot(result: dict) -> Figure:
    figure, (credit, learning) = panels(2)
    grouped(credit, map(str, CHANCES), {arm: [result["correlation"][arm][str(c)] for c in CHANCES] for arm in ARMS})
    named(credit, "policy: chance to go right", "correlation with the true advantage")
    for i, arm in enumerate(ARMS):
        learning.plot(100 * np.array(result["curves"][arm]["mean"]), label="_", **{**line(i), "linestyle": "-"})
    learning.set_ylim(0, 101)
    named(learning, "optimizer step", "chance to reach the goal (%)")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
