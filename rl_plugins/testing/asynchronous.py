"""Training that runs during generation, as a discrete-event simulation without a model: throughput and staleness.

from functools import partial
from rl_plugins.methods.areal_admission import capacity
from rl_plugins.testing.asynchronous import simulate, summary

def seconds(group):  # that a group takes, as measured in your runs
    return float(np.random.default_rng(group).lognormal(3, 1))

for eta in (0, 1, 2, 4, 8):
    rule = partial(capacity, batch=16, max_staleness=eta)
    print(eta, summary(simulate(rule, seconds, batch=16, train_time=30.0, steps=200), skip=20))
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

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


def summary(steps: Sequence[SimulatedStep], skip: int = 0) -> dict[str, float]:
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
