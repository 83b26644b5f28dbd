"""AReaL (arXiv 2505.24298): what generation ahead of training gains, how stale it makes rollouts, what the loss mends.

1. A discrete-event simulation, without a model: groups take log-normal times (sigma 1, mean 1), 16 make a batch,
   training one takes 1. The rule is the method's own, eta 0 to 8; throughput in groups per time, share of the time the
   trainer waits, staleness in published weights.
2. The same with stragglers: one group in fifty takes as long as twenty batches, eta = 2. The rule bounds how many
   groups are ahead, not how old one is; `bound` drops those that are older, or waits for them.
3. A tabular policy (12 independent positions, 8 tokens, reward: share of positions that match a target) trained on
   rollouts that are 0, 2 or 8 batches old, two optimizer steps per batch. Coupled is PPO around the policy that sampled
   (`decoupled_ppo` with `proximal: rollout`), decoupled is the method's default (`recompute`, tokens above 5 masked).
   Uncorrected is PPO around the policy at the start of the batch, as if the rollouts were its own.

Found (5 seeds): eta = 1 trains 3.9 times as many groups per time as eta = 0, and from eta = 2 on the trainer never
waits; more eta only adds staleness, whose mean is eta. Single groups are up to 27 versions old at any eta above 0: the
rule does not bound age. Dropping the old ones costs 2 % of the groups, waiting for them three quarters of the
throughput. At 8 batches and the small learning rate, decoupled reaches 1.000 and coupled .967. At the large one
decoupled is the only one that is always at 1.000, and the intervals of the others reach it. Uncorrected is as good as
decoupled at the small rate: the task is easy, and the loss is not what it hangs on there.

    python examples/evidence/areal.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from common import arguments, interval, named, points, record, save
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.rollouts import Terms
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.areal_admission import ArealAdmission, capacity
from rl_plugins.methods.decoupled_ppo import DecoupledPpo
from rl_plugins.testing import make_terms, start_stack

BATCH, TRAIN, STEPS, SKIP = 16, 1.0, 400, 40
ETAS = (0, 1, 2, 4, 6, 8)
LENGTH, VOCAB, ROWS, BATCHES = 12, 8, 64, 60
LAGS, RATES = (0, 2, 8), {"small": 60.0, "large": 240.0}


# ---- training that runs during generation, as a discrete-event simulation

Capacity = Callable[[int, int, int], int]
"""(version, accepted, running) -> how many groups may be begun now."""


@dataclass(frozen=True)
class SimulatedStep:
    """One batch that was trained.

    Args:
        time: at which it was trained and its weights were published.
        waited: time the trainer had nothing to train before.
        staleness: published weights between the begin of each group and its training.
        dropped: groups that were dropped since the last step.
    """

    time: float
    waited: float
    staleness: tuple[int, ...]
    dropped: int


@dataclass
class _World:
    """What has happened so far. Complete groups that wait and running ones are (group, version at its begin)."""

    capacity: Capacity
    duration: Callable[[int], float]
    time: float = 0.0
    version: int = 0
    begun: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.running: list[tuple[float, int, int]] = []  # end, group, version
        self.ready: list[tuple[int, int]] = []

    def submit(self) -> None:
        while self.capacity(self.version, self.accepted, len(self.running)) > 0:
            end = self.time + self.duration(self.begun)
            heapq.heappush(self.running, (end, self.begun, self.version))
            self.begun += 1

    def advance(self, until: float) -> None:
        """Everything that ends by then, with new groups in its place."""
        while self.running and self.running[0][0] <= until:
            self.time, group, version = heapq.heappop(self.running)
            self.ready.append((group, version))
            self.accepted += 1
            self.submit()
        self.time = max(self.time, until)


def simulate(
    capacity: Capacity,
    duration: Callable[[int], float],
    *,
    batch: int,
    train_time: float,
    steps: int,
    bound: Literal["none", "drop", "wait"] = "none",
    max_staleness: int = 0,
) -> list[SimulatedStep]:
    """Batches, one after the other: the trainer takes the `batch` complete groups that were begun first, trains them
    for `train_time` and publishes, while groups begin as the rule allows and take `duration(group)` each.

    Args:
        bound: complete groups older than `max_staleness` are dropped, or the trainer waits until no running group can
            become older than that.

    Raises:
        ValueError: the rule begins nothing and nothing runs, so there is nothing to wait for.
    """
    world, done, dropped = _World(capacity, duration), list[SimulatedStep](), 0
    world.submit()
    while len(done) < steps:
        asked = world.time
        while True:
            if bound == "drop":
                stay = [g for g in world.ready if world.version - g[1] <= max_staleness]
                dropped += len(world.ready) - len(stay)
                world.accepted -= len(world.ready) - len(stay)  # a rejected group is in no count
                world.ready = stay
                world.submit()
            late = bound == "wait" and any(world.version - v >= max_staleness for _, _, v in world.running)
            if len(world.ready) >= batch and not late:
                break
            if not world.running:
                raise ValueError(f"{len(world.ready)} groups are complete, {batch} are needed, and none may begin.")
            world.advance(world.running[0][0])
        waited = world.time - asked
        world.ready.sort()
        taken, world.ready = world.ready[:batch], world.ready[batch:]
        world.advance(world.time + train_time)
        staleness = tuple(world.version - version for _, version in taken)
        world.version += 1
        world.submit()
        done.append(SimulatedStep(world.time, waited, staleness, dropped))
        dropped = 0
    return done


def measured(steps: Sequence[SimulatedStep], skip: int = 0) -> dict[str, float]:
    """`throughput`, groups trained per time; `idle`, share of the time the trainer waited; `staleness`, its mean over
    groups, and `oldest`, its largest; `wasted`, groups dropped per group trained.

    Args:
        skip: steps at the start that are left out.
    """
    counted = steps[skip:]
    begin = steps[skip - 1].time if skip else 0.0
    time = counted[-1].time - begin
    ages = np.concatenate([s.staleness for s in counted])
    return {
        "throughput": len(ages) / time,
        "idle": sum(s.waited for s in counted) / time,
        "staleness": float(ages.mean()),
        "oldest": float(ages.max()),
        "wasted": sum(s.dropped for s in counted) / len(ages),
    }


def times(seed: int) -> Callable[[int], float]:
    return lambda group: float(np.random.default_rng([seed, group]).lognormal(-0.5, 1))


def stragglers(seed: int) -> Callable[[int], float]:
    def time_of(group: int) -> float:
        rng = np.random.default_rng([seed, group])
        return 20.0 if rng.random() < 0.02 else 0.8

    return time_of


def ahead(seed: int, eta: int, bound: Any = "none", of: Any = times) -> dict[str, float]:
    p = ArealAdmission.Params(max_staleness=eta, bound=bound)
    rule = partial(capacity, batch=BATCH, max_staleness=p.max_staleness)
    run = simulate(rule, of(seed), batch=BATCH, train_time=TRAIN, steps=STEPS, bound=p.bound, max_staleness=eta)
    return measured(run, SKIP)


# ---- training on stale rollouts

METHODS = {
    "coupled": DecoupledPpo(DecoupledPpo.Params(proximal="rollout")),
    "decoupled": DecoupledPpo(),
}
for one in METHODS.values():
    start_stack(one)
ARMS = ("uncorrected", "coupled", "decoupled")


def loss(arm: str, terms: Terms) -> Tensor:
    if arm == "uncorrected":
        per_token = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages)
    else:
        per_token = METHODS[arm].policy_loss(terms)
    return per_token.mean()


def trained(arm: str, lag: int, rate: float, seed: int) -> float:
    """Expected reward after the last batch."""
    rng = np.random.default_rng([seed, lag])
    target = torch.from_numpy(rng.integers(0, VOCAB, LENGTH))
    theta = torch.zeros(LENGTH, VOCAB, dtype=torch.float64)
    past = [theta.clone()]
    for _ in range(BATCHES):
        behavior = torch.log_softmax(past[max(0, len(past) - 1 - lag)], 1)
        gumbel = torch.from_numpy(rng.gumbel(size=(ROWS, LENGTH, VOCAB)))
        tokens = (behavior + gumbel).argmax(2)
        reward = (tokens == target).double().mean(1)
        advantage = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None].expand(ROWS, LENGTH)
        place = torch.arange(LENGTH).expand(ROWS, LENGTH)
        sampled, old = behavior[place, tokens], torch.log_softmax(theta, 1)[place, tokens]
        for half in np.split(rng.permutation(ROWS), 2):
            live = theta.clone().requires_grad_()
            terms = make_terms(
                len(half),
                LENGTH,
                mask=torch.ones(len(half), LENGTH),
                logprobs=torch.log_softmax(live, 1)[place[half], tokens[half]],
                old_logprobs=old[half],
                rollout_logprobs=sampled[half],
                advantages=advantage[half],
            )
            loss(arm, terms).backward()
            assert live.grad is not None
            theta = theta - rate * live.grad
        past.append(theta.clone())
    return float(torch.softmax(theta, 1)[torch.arange(LENGTH), target].mean())


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "areal_admission",
        "groups trained per unit of time, simulated, `max_staleness: 1`",
        "higher",
        r["ahead"][1]["throughput"],
        r["ahead"][0]["throughput"],
        baseline="synchronous",
    )
    yield record(
        "areal_admission",
        "groups trained per unit of time, simulated, `max_staleness: 4` (default)",
        "higher",
        r["ahead"][4]["throughput"],
        r["ahead"][2]["throughput"],
        baseline="`max_staleness: 2`",
    )
    yield record(
        "areal_admission",
        "mean staleness, simulated, `max_staleness: 4` (default)",
        "lower",
        r["ahead"][4]["staleness"],
        r["ahead"][2]["staleness"],
        baseline="`max_staleness: 2`",
    )
    yield record(
        "decoupled_ppo",
        "expected reward on rollouts 8 batches old, small learning rate",
        "higher",
        r["reward"]["small"][8]["decoupled"],
        r["reward"]["small"][8]["coupled"],
        baseline="PPO around the policy that sampled",
    )
    yield record(
        "decoupled_ppo",
        "expected reward on rollouts 8 batches old, small learning rate",
        "higher",
        r["reward"]["small"][8]["decoupled"],
        r["reward"]["small"][8]["uncorrected"],
        baseline="PPO without correction",
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=5), time.time()
    seeds = range(args.seeds)

    def over(found: list[dict[str, float]]) -> dict[str, Any]:
        return {name: interval([f[name] for f in found]) for name in found[0]}

    results: dict[str, Any] = {
        "ahead": {eta: over([ahead(s, eta) for s in seeds]) for eta in ETAS},
        "stragglers, eta 2": {b: over([ahead(s, 2, b, stragglers) for s in seeds]) for b in ("none", "drop", "wait")},
        "reward": {
            name: {lag: {a: interval([trained(a, lag, rate, s) for s in seeds]) for a in ARMS} for lag in LAGS}
            for name, rate in RATES.items()
        },
    }
    for name in ("ahead", "stragglers, eta 2"):
        print(f"\n{name}: throughput, idle, staleness, oldest, wasted")
        for key, row in results[name].items():
            print(f"  {key!s:5}", "  ".join(f"{v['mean']:.3f} ± {v['ci95']:.3f}" for v in row.values()))
    for name, lags in results["reward"].items():
        print(f"\nreward, {name} learning rate: {', '.join(ARMS)}")
        for lag, row in lags.items():
            print(f"  {lag} batches old", "  ".join(f"{v['mean']:.3f} ± {v['ci95']:.3f}" for v in row.values()))

    save(
        args.out,
        "areal",
        results,
        lambda: plot(results),
        start,
        records=records(results),
        where="areal-5-seeds",
    )


def plot(results: dict[str, Any]) -> Figure:
    figure, (ahead, reward) = panels(2)
    for i, key in enumerate(("throughput", "staleness")):
        points(ahead, ETAS, [results["ahead"][e][key] for e in ETAS], f"{'mean ' if i else ''}{key}", i + 1)
    named(ahead, "eta", "throughput (synchronous = 1), staleness (versions)")
    for i, arm in enumerate(ARMS):
        points(reward, LAGS, [results["reward"]["large"][lag][arm] for lag in LAGS], arm, (0, 3, 4)[i])
    named(reward, "age of the rollouts (batches)", "expected reward, large learning rate")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
