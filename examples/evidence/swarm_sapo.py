"""SAPO's sharing of rollouts (arXiv 2509.08721): does it pay, how much of a batch, and who learns only by it?

Eight nodes train a tabular policy each: 8 kinds of tasks with 64 answers, one right per kind, the same for all nodes.
Node n begins with a pass rate of 0.5 at kind n; at the others it guesses (1/64). Every round a node trains 8 groups of
8 rollouts, I of its own questions and J that others shared, with one step of gradient ascent; the exchange, the draw
and the choice are those of the method. No node waits.

1. Splits I/J 8/0, 6/2, 4/4 and 2/6 at the same number of trained groups: expected reward, mean over kinds and nodes,
   summed over 40 rounds (the paper's measure) and at the end, at a small and a large learning rate. Since external
   groups are not generated, also the expected reward after the same number of generated rollouts.
2. The rules at 4/4: uniform among groups with unequal rewards (paper), uniform among all (rl-swarm), and the released
   one of genrl.
3. A node without success: seven nodes as above and one whose right answers have a probability of e^-10 / 64, or of
   e^-20 / 64, in every kind. Its expected reward at the end, with J = 0 and with J = 4.

Found (5 seeds): sharing raises the cumulative reward, more of it the more groups are external. 2/6 is not worse than
4/4 here. Dropping groups of equal rewards matters. The node without success never moves with J = 0. With J = 4 its odds
rise a thousandfold in 40 rounds, which is still no success.

    python examples/evidence/swarm_sapo.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from common import arguments, interval, minus, named, record, runs_band, save
from matplotlib.figure import Figure

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.swarm_sapo import SwarmSapo
from rl_plugins.runtime.plan import first_plan
from rl_plugins.testing import make_rollouts, make_run, make_terms, make_tokens, one_step, start_stack

NODES, KINDS, ANSWERS, ASKED, GROUP, GROUPS, ROUNDS = 8, 8, 64, 64, 8, 8, 40
RATES = {"small": 12.0, "large": 48.0}
SPLITS = {"8/0": 0, "6/2": 2, "4/4": 4, "2/6": 6}
RULES = {"uniform": "uniform, unequal rewards", "sample": "uniform, all", "total_reward": "released"}
FAR = (10.0, 20.0)
DATA = [{"prompt": f"kind {i % KINDS}", "answer": str(i % KINDS)} for i in range(ASKED)]
END = ANSWERS


class Chat:
    """A token per answer."""

    eos = (END,)

    def encode(self, text: str) -> tuple[int, ...]:
        return (int(text),) if text.isdigit() else ()

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        return " ".join(str(t) for t in tokens if t != END)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return ()

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return ()


class Shared:
    """An exchange in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def names(self) -> list[str]:
        return list(self.files)

    def get(self, name: str, most: int) -> bytes:
        return self.files[name][:most]

    def remove(self, name: str) -> None:
        self.files.pop(name, None)


class Node:
    """A tabular policy and its method.

    Args:
        right: (KINDS,) the right answers.
        theta: (KINDS, ANSWERS) logits at the start.
    """

    def __init__(
        self,
        number: int,
        shared: Shared,
        right: torch.Tensor,
        theta: torch.Tensor,
        rate: float,
        seed: int,
        **params: Any,
    ) -> None:
        self.right, self.theta, self.rate = right, theta, rate
        self.rng = np.random.default_rng([seed, number])
        given = dict(exchange="memory", node=f"node_{number}", transport=lambda where: shared, keep_files=4)
        method = SwarmSapo(SwarmSapo.Params(**given, **params))
        facts = dict(dataset=DATA, dataset_size=ASKED, columns=("prompt", "answer"), group_size=GROUP, chat=Chat())
        self.stack = start_stack(method, seed=1000 * seed + number, run=make_run(**facts))
        self.made = 0

    @property
    def reward(self) -> float:
        """Expected, mean over kinds."""
        return float(torch.softmax(self.theta, 1)[torch.arange(KINDS), self.right].mean())

    def round(self) -> None:
        proposal = self.rng.permutation(ASKED)[:GROUPS].tolist()
        plan = first_plan(self.stack, proposal, GROUP, GROUPS * GROUP, ASKED)
        policy, rows = torch.log_softmax(self.theta, 1), [row for row in plan.rows for _ in range(row.n + row.spare)]
        kinds = torch.tensor([self.kind(row) for row in rows])
        drawn = (policy[kinds] + torch.from_numpy(self.rng.gumbel(size=(len(rows), ANSWERS)))).argmax(1)
        place: dict[int, int] = {}
        for i, row in enumerate(rows):
            if row.given:
                drawn[i] = row.given[place.setdefault(row.group, 0)].tokens[0]
                place[row.group] += 1
            else:
                self.made += 1
        rollouts = make_rollouts(
            (drawn == self.right[kinds]).double(),
            [row.group for row in rows],
            lengths=[1] * len(rows),
            prompt_index=[row.prompt_index for row in rows],
            payload=[row.payload for row in rows],
            text=[str(a) for a in drawn.tolist()],
            meta={"prompt": [f"kind {k}" for k in kinds.tolist()]},
            batch=self.stack.batch,
        )
        decision = one_step(self.stack, rollouts, make_tokens(rollouts), budget=GROUPS * GROUP)
        self.stack.metrics.take()
        kept = decision.trained
        live = self.theta.clone().requires_grad_()
        logprobs = torch.log_softmax(live, 1)[kinds, drawn][kept][:, None]
        advantages = decision.row_advantages[kept][:, None]
        terms = make_terms(len(logprobs), 1, mask=torch.ones_like(logprobs), logprobs=logprobs, advantages=advantages)
        loss = ppo_clip(terms.logprobs, logprobs.detach(), terms.advantages).sum() / (GROUPS * GROUP)
        (gradient,) = torch.autograd.grad(loss, live)
        self.theta = self.theta - self.rate * gradient

    def kind(self, row: PlanRow) -> int:
        return int((row.edit or DATA[row.prompt_index])["answer"])


def swarm(rate: float, seed: int, far: float = 0.0, **params: Any) -> list[Node]:
    world = np.random.default_rng(seed)
    right, shared, nodes = torch.from_numpy(world.integers(0, ANSWERS, KINDS)), Shared(), []
    for number in range(NODES):
        theta = torch.zeros(KINDS, ANSWERS, dtype=torch.float64)
        theta[number, right[number]] = np.log(ANSWERS - 1)
        if far and number == 0:
            theta[torch.arange(KINDS), right] = -far
        nodes.append(Node(number, shared, right, theta, rate, seed, **params))
    return nodes


def curve(nodes: Sequence[Node]) -> np.ndarray:
    """(rounds, 2): generated rollouts of a node and expected reward after each round."""
    found = []
    for _ in range(ROUNDS):
        for node in nodes:
            node.round()
        found.append((np.mean([n.made for n in nodes]), np.mean([n.reward for n in nodes])))
    return np.array(found)


def last_of_first(nodes: Sequence[Node]) -> float:
    """The reward of the first node at the end."""
    curve(nodes)
    return nodes[0].reward


def facts(curves: Sequence[np.ndarray]) -> dict[str, Any]:
    budget = ROUNDS * GROUPS * GROUP // 4  # what 2/6 generates
    return {
        "cumulative reward": interval([c[:, 1].sum() for c in curves]),
        "reward at the end": interval([c[-1, 1] for c in curves]),
        f"reward after {budget} rollouts": interval([c[np.searchsorted(c[:, 0], budget), 1] for c in curves]),
    }


def shown(name: str, row: Mapping[str, Any]) -> None:
    print(name, {k: f"{v['mean']:.3g} ± {v['ci95']:.2g}" for k, v in row.items()}, flush=True)


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "swarm_sapo",
        "cumulative reward of eight nodes, 4 own and 4 external groups, simulated",
        "higher",
        r["small"]["4/4"]["cumulative reward"],
        r["small"]["8/0"]["cumulative reward"],
        baseline="no sharing",
    )
    yield record(
        "swarm_sapo",
        "cumulative reward with 2 own and 6 external groups against 4 and 4, simulated",
        "higher",
        r["small"]["2/6"]["cumulative reward"],
        r["small"]["4/4"]["cumulative reward"],
        difference=minus(r["small"]["2/6"]["cumulative reward"], r["small"]["4/4"]["cumulative reward"]),
    )
    yield record(
        "swarm_sapo",
        "cumulative reward with the paper's rule against a draw from all groups, simulated",
        "higher",
        r["small"]["4/4"]["cumulative reward"],
        r["rules"][RULES["sample"]]["cumulative reward"],
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=5), time.time()
    seeds, results = range(args.seeds), dict[str, Any]()
    curves: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, rate in RATES.items():
        curves[name] = {s: [curve(swarm(rate, seed, external_groups=j)) for seed in seeds] for s, j in SPLITS.items()}
        results[name] = {split: facts(found) for split, found in curves[name].items()}
        alone = [c[:, 1].sum() for c in curves[name]["8/0"]]
        for split, found in curves[name].items():
            gains = [100 * (c[:, 1].sum() / a - 1) for c, a in zip(found, alone, strict=True)]
            results[name][split]["gain over 8/0, percent"] = interval(gains)
            shown(f"{name} {split}", results[name][split])
    results["rules"] = {}
    for rule, told in RULES.items():
        several = curves["small"]["4/4"]  # of the first rule, which is the default
        if results["rules"]:
            several = [curve(swarm(RATES["small"], seed, external_groups=4, select_by=rule)) for seed in seeds]
        results["rules"][told] = facts(several)
        shown(told, results["rules"][told])
    results["without success"] = {}
    for far in FAR:
        for j in (0, 4):
            name = f"e^-{far:g} / {ANSWERS}, J = {j}"
            ends = [last_of_first(swarm(RATES["small"], seed, far=far, external_groups=j)) for seed in seeds]
            results["without success"][name] = {"reward at the end": interval(ends)}
            shown(name, results["without success"][name])
    save(
        args.out,
        "swarm_sapo",
        results,
        lambda: plot(curves),
        start,
        records=records(results),
        where="swarm_sapo-5-seeds",
    )


def plot(curves: Mapping[str, Mapping[str, Sequence[np.ndarray]]]) -> Figure:
    figure, axes = panels(2, 3.2)
    for axis, (rate, splits) in zip(axes, curves.items(), strict=True):
        for i, (split, several) in enumerate(splits.items()):
            runs_band(axis, np.arange(1, ROUNDS + 1), [c[:, 1] for c in several], f"{split} own/external", i)
        named(axis, "rounds", "expected reward", f"{rate} learning rate")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
