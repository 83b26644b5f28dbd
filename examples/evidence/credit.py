"""Does credit per turn point the right way? Estimators of agents against exact advantages and the exact gradient.

    python examples/evidence/credit.py --seeds 5 --out evidence-results

Worlds with known tables, four drawn tasks of each per seed:

    grid level 1, 2   the demo's grid world: reward 1 at the goal, at most 12 turns, every state comes again and again
    dense             6 states, 3 actions, random rewards of every turn and random next states, 8 turns
    dense, turn seen  the same, but the number of the turn is part of what is observed
    recording         6 recorded steps, 4 actions: an action that is not the expert's ends the rollout (UI-S1, no patch)

The policy is a table of logits, better actions preferred by a factor, the competence. V, Q and the gradient of the
expected score follow exactly by induction over turns and states. A batch has 64 rollouts in groups of G. Reported for
each estimator, world, competence and G:

    correlation     of its advantages with Q - V over all turns, Pearson and Spearman; Pearson also with the Q - V of
                    the return discounted by 0.95, which GiGPO and HGPO aim at
    sign            share of the turns with Q - V != 0 whose sign is right; an advantage of 0 counts one half
    bias, variance  of the advantages, scaled to have slope 1 on Q - V: squared mean error of each (task, turn, state,
                    action) and the rest, in percent of the mean square of Q - V. "-" where the slope is not above 0.
                    What few samples add to the bias is taken off, a little too much (members of a group depend on one
                    another): a small negative bias is none
    cosine          of the gradient of one batch, sum of advantage times gradient of the log-probability, with the exact
                    one; of the mean over all batches of the seed, which shows what more samples do not mend; and of
                    that mean with the gradient that the discounted Q - V gives

GRPO, GiGPO, HGPO and UI-S1 come from the library through the driver. "return - V" is what cannot be had without the
tables: the return of each turn less the exact V, without bias. Intervals are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from common import arguments, named, points, record, save
from matplotlib.figure import Figure
from scipy.stats import rankdata
from torch import Tensor

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.kit.agents.turns import Turns
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.lab.compare.report import Interval
from rl_plugins.lab.demo.environments import Grid
from rl_plugins.methods.gigpo import Gigpo
from rl_plugins.methods.hgpo import Hgpo
from rl_plugins.methods.ui_s1 import UiS1
from rl_plugins.runtime.decide import decide
from rl_plugins.testing import make_rollouts, make_tokens, make_turns, start_stack

TASKS, BATCH, BATCHES = 4, 64, 8
SIZES = (4, 8, 16)
MAIN_SIZE = 8
GAMMA = 0.95


@dataclass(frozen=True)
class World:
    """A task as tables; the first state is the start.

    Args:
        next: (states, actions, states) probabilities.
        reward: (states, actions).
        final: (states,) whether the rollout has ended there.
        better: (states, actions) what a competent policy prefers.
        turn_seen: whether turns are compared with those of the same number only.
    """

    next: np.ndarray
    reward: np.ndarray
    final: np.ndarray
    better: np.ndarray
    turns: int
    turn_seen: bool = False

    def policy(self, competence: float, rng: np.random.Generator) -> np.ndarray:
        """(states, actions) probabilities."""
        logits = competence * self.better + 0.5 * rng.normal(size=self.better.shape)
        return softmax(logits)

    def values(self, policy: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
        """V (turns left, states) and Q (turns left, states, actions)."""
        v, q = np.zeros((self.turns + 1, len(policy))), np.zeros((self.turns + 1, *policy.shape))
        for left in range(1, self.turns + 1):
            q[left] = (self.reward + gamma * self.next @ v[left - 1]) * ~self.final[:, None]
            v[left] = (policy * q[left]).sum(1)
        return v, q

    def gradient(self, policy: np.ndarray, gamma: float) -> np.ndarray:
        """(states, actions) by the logits: of the expected score for gamma 1, else what the discounted Q - V gives."""
        v, q = self.values(policy, gamma)
        here, total = np.eye(len(policy))[0], np.zeros_like(policy)
        for left in range(self.turns, 0, -1):
            total += here[:, None] * policy * (q[left] - v[left][:, None])
            here = np.einsum("s,sa,san->n", here * ~self.final, policy, self.next)
        return total


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def grid(level: int) -> Callable[[np.random.Generator], World]:
    def make(rng: np.random.Generator) -> World:
        columns = Grid.rows(1, seed=int(rng.integers(1 << 30)), levels=[level])[0]
        table = Grid().transition(columns)
        n = len(table.states)
        final = np.array(table.final)
        value = np.zeros(n)
        for _ in range(60):  # of the best policy, whose discount makes it prefer short ways
            best = np.where(final[:, None], 0.0, np.array(table.reward) + 0.8 * value[np.array(table.next)])
            value = best.max(1)
        better = best - value[:, None]
        return World(np.eye(n)[np.array(table.next)], np.array(table.reward), final, better / 0.2, Grid.MAX_TURNS)

    return make


def dense(rng: np.random.Generator) -> World:
    states, actions, turns = 6, 3, 8
    following = rng.dirichlet(np.full(states, 0.3), size=(states, actions))
    reward, final = rng.normal(size=(states, actions)), np.zeros(states, dtype=bool)
    world = World(following, reward, final, reward, turns)
    for _ in range(20):  # of the best policy in the long run
        v, q = world.values(np.eye(actions)[world.better.argmax(1)], GAMMA)
        world = World(following, reward, final, q[-1] - v[-1][:, None], turns)
    return world


def dense_turn_seen(rng: np.random.Generator) -> World:
    return replace(dense(rng), turn_seen=True)


def recording(rng: np.random.Generator) -> World:
    steps, actions = 6, 4
    right = rng.integers(0, actions, size=steps)
    matched = np.zeros((steps + 1, actions))
    matched[np.arange(steps), right] = 1.0
    following = np.zeros((steps + 1, actions, steps + 1))
    following[:, :, steps] = 1 - matched
    for k in range(steps):
        following[k, right[k], k + 1] = 1.0
    return World(following, matched, np.arange(steps + 1) == steps, matched, steps)


WORLDS: dict[str, tuple[Callable[[np.random.Generator], World], tuple[float, ...]]] = {  # with competences
    "grid level 1": (grid(1), (0.0, 0.7, 1.5, 3.0)),
    "grid level 2": (grid(2), (0.7, 1.5, 3.0, 5.0)),
    "dense": (dense, (0.0, 0.5, 1.0, 2.0)),
    "dense, turn seen": (dense_turn_seen, (0.0, 0.5, 1.0, 2.0)),
    "recording": (recording, (0.5, 1.5, 2.5, 4.0)),
}


def leave_one_out(rollouts: Rollouts) -> Tensor:
    """RLOO: the reward less the mean of the others in the group."""
    n = rollouts.groups.rows(rollouts.groups.n(rollouts.reward))
    return grpo_advantages(rollouts, scale="none") * n / (n - 1)


# The method of each arm, or the host's own estimator.
ARMS: dict[str, Method | Callable[[Rollouts], Tensor]] = {
    "GRPO": grpo_advantages,
    "RLOO": leave_one_out,
    "GiGPO": Gigpo(),
    "GiGPO, divided by std": Gigpo(Gigpo.Params(mode="mean_std_norm")),
    "GiGPO, gamma 1": Gigpo(Gigpo.Params(gamma=1.0)),
    "GiGPO, step weight 4": Gigpo(Gigpo.Params(step_advantage_w=4.0)),
    "GiGPO, mean of rollouts": Gigpo(Gigpo.Params(statistics="rollouts")),
    "HGPO, paper's weights": Hgpo(),
    "HGPO, code's weights": Hgpo(Hgpo.Params(weight_offset=2)),
    "HGPO, not divided": Hgpo(Hgpo.Params(mode="mean_norm")),
    "UI-S1": UiS1(UiS1.Params(filter_by="none")),
    "UI-S1, gamma 1": UiS1(UiS1.Params(filter_by="none", gamma=1.0)),
    "UI-S1, not divided": UiS1(UiS1.Params(filter_by="none", scale="none")),
}
REFERENCE = "return - V"
SHOWN_WORLDS = ("grid level 1", "dense", "recording")  # the figure's; the JSON has all
SHOWN = ("GRPO", "GiGPO", "GiGPO, divided by std", "HGPO, paper's weights", "HGPO, not divided", "UI-S1", REFERENCE)


@dataclass(frozen=True)
class Played:
    """Rollouts of all batches of a seed, and for every turn, in the order of tokens, what it was."""

    rollouts: Rollouts
    batch: np.ndarray
    task: np.ndarray
    left: np.ndarray
    state: np.ndarray
    action: np.ndarray


def play(worlds: list[World], policies: list[np.ndarray], size: int, rng: np.random.Generator) -> Played:
    per_task = BATCH // TASKS * BATCHES
    seen: list[list[tuple[int, ...]]] = []
    anchors, rewards = [], []
    for task, (world, policy) in enumerate(zip(worlds, policies, strict=True)):
        state, live = np.zeros(per_task, dtype=int), np.ones(per_task, dtype=bool)
        turns: list[list[tuple[int, ...]]] = [[] for _ in range(per_task)]
        gained: list[list[float]] = [[] for _ in range(per_task)]
        for left in range(world.turns, 0, -1):
            action = draw(policy[state], rng)
            reward = world.reward[state, action]
            for i in np.flatnonzero(live):
                turns[i].append((i * BATCHES // per_task, task, left, int(state[i]), int(action[i])))
                gained[i].append(float(reward[i]))
            state = np.where(live, draw(world.next[state, action], rng), state)
            live &= ~world.final[state]
        seen += turns
        rewards += gained
        anchors += [[f"{t[3]} {t[2]}" if world.turn_seen else f"{t[3]}" for t in of_rollout] for of_rollout in turns]
    n = TASKS * per_task
    matched = [[bool(r > 0) for r in of_rollout] for of_rollout in rewards]
    rollouts = make_rollouts(
        [sum(r) for r in rewards],
        np.arange(n) // size,
        lengths=[len(t) for t in seen],
        turns=make_turns(anchors, rewards, valid=matched),  # UI-S1 reads there what matches
    )
    return Played(rollouts, *np.array([turn for turns in seen for turn in turns]).T)


def draw(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.random((len(chances), 1)) > chances.cumsum(1)[:, :-1]).sum(1)


def advantages(arm: str, rollouts: Rollouts) -> np.ndarray:
    """Of every turn."""
    made = ARMS[arm]
    if not isinstance(made, UiS1) and rollouts.turns is not None:
        rollouts = rollouts.replace(turns=rollouts.turns.replace(valid=torch.ones_like(rollouts.turns.valid)))
    methods, host = ([made], grpo_advantages) if isinstance(made, Method) else ([], made)
    tokens = make_tokens(rollouts)
    return decide(start_stack(*methods), rollouts, tokens, None, host, len(rollouts)).advantages.numpy()


def measures(given: np.ndarray, played: Played, truth: dict[float, np.ndarray], exact: Gradients) -> dict[str, float]:
    true = truth[1.0]
    known = np.abs(true) > 1e-9
    right = np.where(given[known] == 0, 0.5, np.sign(given[known]) == np.sign(true[known]))
    slope = (given * true).mean() / (true**2).mean()
    bias, variance = np.nan, np.nan
    if slope > 0:
        bias, variance = 100 * bias_and_variance(given / slope - true, played) / (true**2).mean()
    return {
        "pearson": correlation(given, true),
        "spearman": correlation(rankdata(given), rankdata(true)),
        "pearson_discounted": correlation(given, truth[GAMMA]),
        "sign": 100 * float(right.mean()),
        "bias": bias,
        "variance": variance,
        **exact.cosines(given, played),
    }


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 1e-12 and y.std() > 1e-12 else 0.0


def bias_and_variance(error: np.ndarray, played: Played) -> np.ndarray:
    """Over cells with several samples; what the finite number of samples adds to squared means is taken off."""
    keys = np.stack([played.task, played.left, played.state, played.action])
    _, cell = np.unique(keys, axis=1, return_inverse=True)
    n = np.bincount(cell.reshape(-1))
    mean, square = np.bincount(cell, error) / n, np.bincount(cell, error**2) / n
    several = n > 1
    n, mean, square = n[several], mean[several], square[several]
    variance = (square - mean**2) * n / (n - 1)
    weight = n / n.sum()
    return np.array([((mean**2 - variance / n) * weight).sum(), (variance * weight).sum()])


class Gradients:
    """The exact gradient of all tasks, and those of batches."""

    def __init__(self, worlds: list[World], policies: list[np.ndarray]) -> None:
        self.policies = policies
        self.exact, self.discounted = (
            np.concatenate([w.gradient(p, gamma).ravel() for w, p in zip(worlds, policies, strict=True)])
            for gamma in (1.0, GAMMA)
        )

    def cosines(self, given: np.ndarray, played: Played) -> dict[str, float]:
        """0 for a batch without any gradient."""
        batches = [self._of(given, played, played.batch == b) for b in range(BATCHES)]
        mean = np.mean(batches, axis=0)
        return {
            "cosine": float(np.mean([cosine(g, self.exact) for g in batches])),
            "cosine_of_mean": cosine(mean, self.exact),
            "cosine_of_mean_discounted": cosine(mean, self.discounted),
        }

    def _of(self, given: np.ndarray, played: Played, inside: np.ndarray) -> np.ndarray:
        parts = []
        for task, policy in enumerate(self.policies):
            turns = np.flatnonzero(inside & (played.task == task))
            taken, visited = np.zeros_like(policy), np.zeros(len(policy))
            np.add.at(taken, (played.state[turns], played.action[turns]), given[turns])
            np.add.at(visited, played.state[turns], given[turns])
            parts.append((taken - visited[:, None] * policy).ravel())
        return np.concatenate(parts)


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    size = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y / size) if size > 1e-12 else 0.0


def run(kind: str, competence: float, size: int, seed: int) -> dict[str, dict[str, float]]:
    """Measures of every arm, and the score of the policy."""
    make, competences = WORLDS[kind]
    drawn = list(WORLDS).index(kind.removesuffix(", turn seen"))
    rng = np.random.default_rng([seed, drawn])  # the same tasks at every competence and size
    worlds = [make(rng) for _ in range(TASKS)]
    policies = [w.policy(competence, rng) for w in worlds]
    score = float(np.mean([w.values(p, 1.0)[0][-1, 0] for w, p in zip(worlds, policies, strict=True)]))
    played = play(worlds, policies, size, np.random.default_rng([seed, size, competences.index(competence)]))
    truth, value = {}, np.zeros(len(played.left))
    for gamma in (1.0, GAMMA):
        truth[gamma] = np.zeros(len(played.left))
        for task, (world, policy) in enumerate(zip(worlds, policies, strict=True)):
            v, q = world.values(policy, gamma)
            mine = played.task == task
            left, state, action = played.left[mine], played.state[mine], played.action[mine]
            truth[gamma][mine] = q[left, state, action] - v[left, state]
            if gamma == 1.0:
                value[mine] = v[left, state]
    exact = Gradients(worlds, policies)
    given = {arm: advantages(arm, played.rollouts) for arm in arms(kind)}
    given[REFERENCE] = Turns(played.rollouts).returns(1.0).numpy() - value
    return {"": {"score": score}, **{arm: measures(a, played, truth, exact) for arm, a in given.items()}}


def arms(kind: str) -> list[str]:
    return [arm for arm in ARMS if kind == "recording" or not arm.startswith("UI-S1")]


def summary(found: list[float]) -> dict[str, float]:
    interval = Interval.of(found)
    return {"mean": interval.mean, "ci95": interval.half, "n": interval.n}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "gigpo",
        "cosine of one batch's gradient with the exact one on the grid",
        "higher",
        difference=min(
            (r["minus_grpo"][f"grid level 1 | {c} | 8"]["GiGPO"]["cosine"] for c in (0.0, 0.7, 1.5)),
            key=lambda c: c["mean"],
        ),
        baseline="GRPO",
        note="the smallest gain of three policies",
    )
    yield record(
        "hgpo",
        "cosine of the mean gradient on the grid, default `mode`, score of 0.92",
        "higher",
        r["measures"]["grid level 1 | 3.0 | 8"]["HGPO, paper's weights"]["cosine_of_mean"],
        r["measures"]["grid level 1 | 3.0 | 8"]["GRPO"]["cosine_of_mean"],
        baseline="GRPO",
    )
    yield record(
        "ui_s1",
        "cosine of the gradient in recordings, weak policies",
        "higher",
        difference=r["minus_grpo"]["recording | 0.5 | 8"]["UI-S1"]["cosine"],
        baseline="GRPO",
    )
    yield record(
        "ui_s1",
        "cosine of the gradient in recordings, best policy",
        "higher",
        difference=r["minus_grpo"]["recording | 4.0 | 8"]["UI-S1"]["cosine"],
        baseline="GRPO",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=5)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    start = time.time()
    result: dict[str, Any] = {"seeds": args.seeds, "measures": {}, "minus_grpo": {}}
    for kind, (_, competences) in WORLDS.items():
        for competence in competences:
            for size in SIZES:
                runs = [run(kind, competence, size, seed) for seed in range(args.seeds)]
                key = f"{kind} | {competence} | {size}"
                result["measures"][key] = {
                    arm: {m: summary([r[arm][m] for r in runs]) for m in of_arm} for arm, of_arm in runs[0].items()
                }
                result["minus_grpo"][key] = {
                    arm: {m: summary([r[arm][m] - r["GRPO"][m] for r in runs]) for m in runs[0]["GRPO"]}
                    for arm in runs[0]
                    if arm not in ("", "GRPO")
                }
                if size == MAIN_SIZE:
                    show(f"{kind}, competence {competence}, groups of {size}", result["measures"][key])
    save(
        args.out,
        "credit",
        result,
        lambda: plot(result),
        start,
        records=records(result),
        where="credit-per-turn-gigpo-hgpo-ui_s1-against-exact-values-5-seeds",
    )


def show(title: str, found: dict[str, dict[str, dict[str, float]]]) -> None:
    names = list(found["GRPO"])
    heads = [n.replace("discounted", "d.").replace("cosine_of", "cos.").replace("_", " ") for n in names]
    print(f"\n{title}; score {found['']['score']['mean']:.2f}\n{'':24}" + "".join(f"{n:>14}" for n in heads))
    for arm, of_arm in found.items():
        if arm:
            digits = {m: 0 if m in ("sign", "bias", "variance") else 2 for m in names}
            cells = [
                f"{of_arm[m]['mean']:.{digits[m]}f} +-{of_arm[m]['ci95']:.{digits[m]}f}" if of_arm[m]["n"] else "-"
                for m in names
            ]
            print(f"{arm:24}" + "".join(f"{c:>14}" for c in cells))


def plot(result: dict[str, Any]) -> Figure:
    worlds = {kind: WORLDS[kind] for kind in SHOWN_WORLDS}
    figure, axes = panels(2 * len(worlds), 2.5)
    for pair, (kind, (_, competences)) in zip(zip(axes[::2], axes[1::2], strict=True), worlds.items(), strict=True):
        found = [result["measures"][f"{kind} | {c} | {MAIN_SIZE}"] for c in competences]
        scores = [f[""]["score"]["mean"] for f in found]
        for axis, measure, label in zip(
            pair, ("pearson", "cosine"), ("correlation with Q - V", "cosine with the exact gradient"), strict=True
        ):
            for i, arm in enumerate(SHOWN):
                if arm in found[0]:
                    points(axis, scores, [f[arm][measure] for f in found], arm, i)
            named(axis, "score of the policy", label, kind.capitalize())
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
