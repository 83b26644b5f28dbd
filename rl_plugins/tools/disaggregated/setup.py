"""`Setup`: what the simulator of disaggregated rollouts is told: machines, tasks, environments, rewards and trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.disaggregated.queue import GroupQueue
from rl_plugins.tools.disaggregated.router import AffinityRouter, Pool


@dataclass(frozen=True)
class Task:
    """A class of prompts.

    Args:
        tag: for the router.
        turns: of a rollout.
        read: tokens that each turn adds to the context before the policy writes.
        written: mean tokens that the policy writes in a turn.
        seconds: mean time in which the environment acts.
        spread: standard deviation of the logarithm of that time. The mean does not depend on it.
        written_spread: the same of the tokens that are written.
        share: weight of the class among all groups.
    """

    tag: str
    turns: int = 1
    read: int = 1_000
    written: float = 200.0
    seconds: float = 0.0
    spread: float = 0.0
    written_spread: float = 0.0
    share: float = 1.0


@dataclass(frozen=True)
class Reward:
    """How rewards are computed.

    Args:
        seconds: mean time of one.
        spread: standard deviation of the logarithm of that time.
        workers: rewards at a time; None: as many as are asked for, as from an elastic service.
        overlapped: the environment begins its next rollout at once. False: it waits for the reward first.
    """

    seconds: float = 0.0
    spread: float = 0.0
    workers: int | None = None
    overlapped: bool = True


@dataclass(frozen=True)
class Weights:
    """How new weights reach the servers.

    Args:
        transfer: seconds from the trainer to the servers.
        load: seconds in which a server takes them over and does nothing else.
        blocking: trainer and servers stop for both. False: the trainer goes on, and servers stop for `load` only.
    """

    transfer: float = 0.0
    load: float = 0.0
    blocking: bool = True


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    Args:
        pools, servers, tags: as of `AffinityRouter`.
        tasks: classes of prompts.
        believed: pools as the router knows them; None: as they are. With equal rates it only balances load.
        group_size: G, rollouts of a group.
        redundancy: x, further environments and rollouts of a group.
        groups: environment groups.
        groups_per_step: J, groups that each of them makes for a training step.
        staleness: a, training steps for which a group may wait. Where weights arrive late, a rollout may lag by more.
        lockstep: all rollouts write, then all act, as in a batch. New ones begin when all have ended.
        close_spare: a rollout whose group is complete or gone ends with its turn. False: it runs to its end.
        fails: probability that an environment fails in a turn. Another rollout takes the place of this one.
        hangs: probability that it never returns from a turn.
        timeout: seconds after which a hanging environment counts as failed; None: never.
        restart: seconds until an environment that failed can be used again.
        train_seconds: time to train a batch.
        reward: how rewards are computed.
        weights: how new weights reach the servers.

    Raises:
        ConfigError: a number out of range, or a task that no server may generate.
    """

    pools: Sequence[Pool]
    servers: Mapping[str, str]
    tasks: Sequence[Task]
    tags: Mapping[str, Sequence[str]] | None = None
    believed: Sequence[Pool] | None = None
    group_size: int = 8
    redundancy: int = 0
    groups: int = 16
    groups_per_step: int = 1
    staleness: int = 1
    lockstep: bool = False
    close_spare: bool = False
    fails: float = 0.0
    hangs: float = 0.0
    timeout: float | None = None
    restart: float = 0.0
    train_seconds: float = 0.0
    reward: Reward = field(default_factory=Reward)
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        _at_least(self, 1, "groups")
        _at_least(self, 0, "fails", "hangs", "restart", "train_seconds")
        _at_least(self.reward, 0, "seconds", "spread")
        _at_least(self.weights, 0, "transfer", "load")
        if self.timeout is not None:
            _at_least(self, 0, "timeout")
        if self.reward.workers is not None:
            _at_least(self.reward, 1, "workers")
        if self.fails + self.hangs > 1:
            raise ConfigError(
                f"`fails` and `hangs` are {self.fails} and {self.hangs}. Together they must be at most 1."
            )
        if not self.tasks or sum(task.share for task in self.tasks) <= 0:
            raise ConfigError("No task has a share above 0. Give at least one.")
        AffinityRouter(self.pools, self.servers, self.tags)
        router = self.router()
        for task in self.tasks:
            _at_least(task, 1, "turns")
            _at_least(task, 0, "read", "written", "seconds", "spread", "written_spread", "share")
            if not set(router.allowed(task.tag)) & set(self.servers.values()):
                raise ConfigError(
                    f"The task {task.tag} may use the pools {', '.join(router.allowed(task.tag))}, and none of them "
                    f"has a server. Add one, or allow another pool in `tags`."
                )
        self.queue()

    def router(self) -> AffinityRouter:
        """A router at its start."""
        return AffinityRouter(self.believed or self.pools, self.servers, self.tags)

    def queue(self) -> GroupQueue:
        """The queue of an environment group at its start."""
        return GroupQueue(self.group_size, self.redundancy, self.groups_per_step, self.staleness)


def _at_least(what: Any, least: float, *names: str) -> None:
    for name in names:
        given = getattr(what, name)
        if not least <= given < math.inf:
            raise ConfigError(f"`{name}` of {type(what).__name__} is {given}. It must be at least {least} and finite.")
