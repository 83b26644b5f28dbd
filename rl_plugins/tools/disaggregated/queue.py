"""`GroupQueue`: groups of rollouts that environments fill one by one, with redundancy and bounded staleness.

    queue = GroupQueue(8, redundancy=1, groups_per_step=16, staleness=1)
    queue.advance(0)                    # before each training step
    episode = queue.ask()               # an environment begins; None: wait
    queue.put(episode, rollout)         # it has finished
    group = queue.get()                 # the trainer takes the oldest group; None: wait

The class is pure: no clock, no thread, no waiting. Calls that the paper's queue would let wait return None and change
nothing. Ask again after the next `advance`, `put` or `get`.

Source: arXiv 2512.22560; `GroupQueue` of alibaba/ROLL, commit 8eb27cc2. Two things are ours. A group is cut to its
size, because the paper's code returns redundant rollouts too. `most_filtered` ends the search for groups that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_plugins.core.errors import ConfigError, MethodError


@dataclass
class QueuedGroup:
    """A group in the making.

    Args:
        create_step: training step at which it was created, for its staleness.
        started: rollouts that environments have begun.
        finished: rollouts in the order in which they finished.
        changed: time of the last `ask` or `put`.
    """

    create_step: int
    started: int = 0
    finished: list[Any] = field(default_factory=list)
    changed: float = 0.0


@dataclass(frozen=True)
class FinishedGroup:
    """What the trainer takes: `group_size` rollouts of one episode, first finisher first."""

    episode: int
    create_step: int
    rollouts: tuple[Any, ...]


class GroupQueue:
    """Episodes of one environment group, in the order of their creation.

    The first finishers of a group are trained. Short episodes finish earlier, so redundancy favours them; `late` counts
    the rollouts that came too late.

    Args:
        group_size: G, rollouts of a group.
        redundancy: x, rollouts that may begin beyond G.
        groups_per_step: J, groups created for each training step. None: a group is created when an environment asks
            and none is open.
        staleness: a, training steps for which an unused group is kept; 0: it is dropped at the next step.
        drop: says of the rollouts of a complete group whether it is thrown away. A new group replaces it.
        most_filtered: groups thrown away within one training step at most; later ones pass. None: no limit.

    Attributes:
        live: episode id -> `QueuedGroup`, oldest first.
        closed: a group came back with None in the place of every rollout: the environments have ended.
        expired, filtered, late: groups that became too old, groups thrown away, rollouts of groups already gone or
            beyond their size.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(
        self,
        group_size: int,
        redundancy: int = 0,
        groups_per_step: int | None = 1,
        staleness: int = 1,
        drop: Callable[[Sequence[Any]], bool] | None = None,
        most_filtered: int | None = None,
    ) -> None:
        least = {"group_size": (group_size, 1), "redundancy": (redundancy, 0), "staleness": (staleness, 0)}
        least["groups_per_step"] = (1 if groups_per_step is None else groups_per_step, 1)
        least["most_filtered"] = (0 if most_filtered is None else most_filtered, 0)
        for name, (given, bound) in least.items():
            if given < bound:
                raise ConfigError(f"`{name}` is {given}. It must be at least {bound}.")
        self.group_size, self.redundancy, self.groups_per_step = group_size, redundancy, groups_per_step
        self.staleness, self.drop, self.most_filtered = staleness, drop, most_filtered
        self.live: dict[int, QueuedGroup] = {}
        self.step: int | None = None
        self.closed = False
        self.expired = self.filtered = self.late = 0
        self._next_id = self._filtered_now = 0

    def advance(self, step: int) -> None:
        """Begins a training step: groups that are too old leave, and new ones are created.

        The first call creates (a + 1) J groups, each later one J.

        Raises:
            MethodError: the step lies before that of the last call.
        """
        if self.step is not None and step < self.step:
            raise MethodError(f"`advance` got step {step} after step {self.step}. Steps must not go back.")
        create = self.groups_per_step or 0
        if self.step is None:
            create *= self.staleness + 1
        old = [i for i, e in self.live.items() if step - e.create_step > self.staleness]
        for i in old:
            del self.live[i]
        self.expired += len(old)
        self.step, self._filtered_now = step, 0
        for _ in range(create):
            self._create()

    def ask(self, now: float = 0.0) -> int | None:
        """The episode that the next free environment works on: the oldest with a free place. None: wait.

        Raises:
            MethodError: `advance` was never called.
        """
        if self.step is None:
            raise MethodError("`ask` came before the first `advance`. Call `advance(0)` first.")
        if self.closed:
            return None
        most = self.group_size + self.redundancy
        i = next((i for i, e in self.live.items() if e.started < most), None)
        if i is None:
            if self.groups_per_step is not None:
                return None
            i = self._create()
        self.live[i].started += 1
        self.live[i].changed = now
        return i

    def failed(self, episode: int) -> None:
        """Gives the place of an environment that failed to the next one that asks."""
        if episode in self.live:
            self.live[episode].started -= 1

    def put(self, episode: int, rollout: Any, now: float = 0.0) -> None:
        """A rollout has finished. It is dropped where its group has gone.

        Args:
            episode: what `ask` returned.
            rollout: anything; None from an environment that has ended.
        """
        found = self.live.get(episode)
        if found is None:
            self.late += 1
            return
        found.finished.append(rollout)
        found.changed = now
        if len(found.finished) != self.group_size:
            self.late += len(found.finished) > self.group_size
            return
        if all(r is None for r in found.finished):
            self.closed = True
        elif self._filters(found.finished):
            del self.live[episode]
            self.filtered += 1
            self._filtered_now += 1
            self._create()

    def get(self) -> FinishedGroup | None:
        """Takes the oldest group. None: it is not complete (even if a younger one is), or there is none."""
        for i, episode in self.live.items():
            if len(episode.finished) < self.group_size:
                return None
            del self.live[i]
            return FinishedGroup(i, episode.create_step, tuple(episode.finished[: self.group_size]))
        return None

    def hung(self, now: float, timeout: float) -> list[int]:
        """Episodes with rollouts under way in which nothing began or finished for longer than `timeout`."""
        return [
            i
            for i, e in self.live.items()
            if len(e.finished) < min(e.started, self.group_size) and now - e.changed > timeout
        ]

    def _create(self) -> int:
        assert self.step is not None
        i, self._next_id = self._next_id, self._next_id + 1
        self.live[i] = QueuedGroup(self.step)
        return i

    def _filters(self, rollouts: Sequence[Any]) -> bool:
        if self.drop is None or (self.most_filtered is not None and self._filtered_now >= self.most_filtered):
            return False
        return self.drop(rollouts)
