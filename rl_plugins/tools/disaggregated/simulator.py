"""`simulate`: rollouts on machines of several kinds next to a trainer, as a discrete-event simulation without a model.

    setup = Setup(
        [Pool("h800", 64, 20_000, 50), Pool("h20", 64, 3_000, 60)],
        {"0": "h800", "1": "h20"},
        [Task("swe", turns=10, read=3_000, written=100, seconds=5.0, spread=1.0), Task("math", 1, 300, 2_000)],
        tags={"swe": ["h800"], "math": ["h20"]},
        train_seconds=60.0,
    )
    print(summary(simulate(setup, steps=20, seed=0), skip=4))

`GroupQueue` and `AffinityRouter` decide as in a run. Times are made up:

- A server reads one request after the other. It writes all of its requests at once, each at the pool's rate.
- A trajectory that stays on its server reads only what is new, also after new weights.
- A turn is a request, then the environment acts. Its time is log-normal.
- Each environment group has a queue and G + x environments. A batch is made of `groups` x `groups_per_step` groups.
- The draws of a rollout depend on the seed, its group and its place alone. Setups can be compared in pairs.

Source: arXiv 2512.22560. Times, failures and the rule of service are ours.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from rl_plugins.core.errors import MethodError
from rl_plugins.tools.disaggregated.queue import FinishedGroup
from rl_plugins.tools.disaggregated.router import Pool
from rl_plugins.tools.disaggregated.servers import Levels, Servers
from rl_plugins.tools.disaggregated.setup import Reward, Setup, Task, Weights

__all__ = ["Pool", "Reward", "Setup", "SimulatedRun", "Task", "TrainedStep", "Weights", "simulate", "summary"]


@dataclass(frozen=True)
class TrainedStep:
    """One training step.

    Args:
        time: at which the trainer can begin the next one.
        waited: seconds without a complete batch before the training.
        ages: of each group, training steps since it was created: what `staleness` bounds.
        lags: of each rollout, updates between the weights of its first token and those that it trains.
        so_far: seconds of use since the start, of each part (see `summary`) for its size; numbers of `failed` and
            `late` rollouts and of `expired` groups.
    """

    time: float
    waited: float
    ages: tuple[int, ...]
    lags: tuple[int, ...]
    so_far: Mapping[str, float]


@dataclass(frozen=True)
class SimulatedRun:
    """What happened.

    Args:
        steps: in their order.
        rollouts: those `begun`, and what became of them at the end of the last step: `trained`, `failed`, `late` (their
            group was complete or gone), `dropped` (of groups that expired), `waiting` (for training), `under_way`.
        moved: requests that left the server of their trajectory.
    """

    steps: tuple[TrainedStep, ...]
    rollouts: Mapping[str, int]
    moved: int


def simulate(setup: Setup, steps: int, seed: int = 0) -> SimulatedRun:
    """Runs so many training steps. Equal arguments give equal results.

    Raises:
        MethodError: a step waits for groups that will never be complete.
    """
    return _World(setup, seed).run(steps)


def summary(run: SimulatedRun, skip: int = 0) -> dict[str, float]:
    """`step_time` in seconds; `throughput`, trained rollouts per second; `waited`, share of the time in which the
    trainer has no batch; `lag` mean and `oldest` largest lag of a rollout, `lag_K` the share whose lag is K, `age` the
    mean age of a group; `expired` groups per trained group, `failed` and `late` rollouts per trained rollout.

    Shares of the time: `busy POOL` servers with a request, `places POOL` places with one, `reading POOL` servers that
    read; `environments` with a rollout, `acting` of them in a turn; `rewards` workers in use, where they are limited.

    Args:
        skip: steps at the start that are left out.
    """
    counted = run.steps[skip:]
    before = run.steps[skip - 1] if skip else None
    time = counted[-1].time - (before.time if before else 0.0)
    lags = np.concatenate([step.lags for step in counted])
    ages = np.concatenate([step.ages for step in counted])
    used = {name: end - (before.so_far[name] if before else 0.0) for name, end in counted[-1].so_far.items()}
    per = {"expired": len(ages), "failed": len(lags), "late": len(lags)}
    return {
        "step_time": time / len(counted),
        "throughput": len(lags) / time,
        "waited": sum(step.waited for step in counted) / time,
        "lag": float(lags.mean()),
        "oldest": float(lags.max()),
        "age": float(ages.mean()),
        **{f"lag_{k}": float((lags == k).mean()) for k in range(int(lags.max()) + 1)},
        **{name: value / per.get(name, time) for name, value in used.items()},
    }


@dataclass(slots=True, eq=False)
class _Rollout:
    """One environment's way through an episode, with all of its draws. The last fields are for `Servers`."""

    name: str
    tag: str
    environment: int
    episode: int
    written: list[int]
    seconds: list[float]
    faults: list[float]
    reward: float
    reads: int
    turn: int = 0
    context: int = 0
    cached: int = 0
    server: str = ""
    paused: float = 0.0
    version: int = -1


class _World:
    """Everything at one moment; `events` holds what will happen."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.seed = setup, seed
        self.now, self.step = 0.0, 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = count()
        self.servers = Servers(setup.router(), setup.pools, setup.servers)
        self.lines: dict[str, deque[_Rollout]] = {}  # for a place on a server, by tag
        self.queues = [setup.queue() for _ in range(setup.groups)]
        self.per_group = setup.group_size + setup.redundancy
        self.idle = [[q * self.per_group + i for i in range(self.per_group)] for q in range(setup.groups)]
        self.met: list[tuple[_Rollout, Callable[[_Rollout], None]]] = []  # in lockstep
        self.in_turns = self.engaged = self.hung = self.failed_in_row = 0
        self.workers, self.worked = [0.0] * (setup.reward.workers or 0), 0.0
        self.batch: list[FinishedGroup] = []
        self.needed = setup.groups * setup.groups_per_step
        self.training, self.asked, self.waited = False, 0.0, 0.0
        self.done: list[TrainedStep] = []
        self.levels, self.alive = Levels(), set[_Rollout]()
        self.counts = dict.fromkeys(("begun", "trained", "failed", "dropped"), 0)
        self.begun: dict[tuple[int, int], int] = {}
        self.shares = np.cumsum([task.share for task in setup.tasks]) / sum(task.share for task in setup.tasks)

    def run(self, steps: int) -> SimulatedRun:
        self._advance()
        while len(self.done) < steps:
            if not self.events:
                raise MethodError(
                    f"Step {self.step} waits for {self.needed - len(self.batch)} of its {self.needed} groups, and "
                    f"nothing is under way: {self.hung} of {self.per_group * len(self.queues)} environments have hung. "
                    f"Set `timeout`, or raise `redundancy` above {self.setup.redundancy}."
                )
            self.now, _, happens, args = heapq.heappop(self.events)
            happens(*args)
        in_queues = sum(min(len(e.finished), self.setup.group_size) for q in self.queues for e in q.live.values())
        waiting = in_queues + sum(len(group.rollouts) for group in self.batch)
        late = sum(q.late for q in self.queues)
        rollouts = {**self.counts, "late": late, "waiting": waiting, "under_way": len(self.alive)}
        return SimulatedRun(tuple(self.done), rollouts, self.servers.router.moved)

    def _at(self, time: float, happens: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.events, (time, next(self.order), happens, args))

    # ---- environments

    def _fill(self, groups: Sequence[int]) -> None:
        """Idle environments begin rollouts where their queue has a place."""
        if self.setup.lockstep:
            if self.engaged:
                return
            groups = range(len(self.queues))
        began = []
        for q in groups:
            while self.idle[q]:
                episode = self.queues[q].ask(self.now)
                if episode is None:
                    break
                began.append(self._draw(self.idle[q].pop(0), q, episode))
        self.in_turns += len(began)
        self.engaged += len(began)
        self.alive.update(began)
        self.counts["begun"] += len(began)
        self.levels.add("environments", len(began), self.now)
        for rollout in began:
            self._request(rollout)

    def _draw(self, environment: int, q: int, episode: int) -> _Rollout:
        place = self.begun[q, episode] = self.begun.get((q, episode), -1) + 1
        at = np.random.default_rng([self.seed, q, episode]).random()
        task = self.setup.tasks[min(int(np.searchsorted(self.shares, at, side="right")), len(self.shares) - 1)]
        rng, reward = np.random.default_rng([self.seed, q, episode, place]), self.setup.reward
        return _Rollout(
            f"{q}/{episode}/{place}",
            task.tag,
            environment,
            episode,
            written=_log_normal(rng, task.written, task.written_spread, task.turns).round().astype(int).tolist(),
            seconds=_log_normal(rng, task.seconds, task.spread, task.turns).tolist(),
            faults=rng.random(task.turns).tolist(),
            reward=float(_log_normal(rng, reward.seconds, reward.spread, 1)[0]),
            reads=task.read,
        )

    def _request(self, rollout: _Rollout) -> None:
        rollout.context += rollout.reads
        if not self._asked(rollout):
            self.lines.setdefault(rollout.tag, deque()).append(rollout)

    def _asked(self, rollout: _Rollout) -> bool:
        end = self.servers.ask(rollout, rollout.written[rollout.turn], self.now)
        if end is not None:
            self._at(end, self._written, rollout)
        return end is not None

    def _written(self, rollout: _Rollout) -> None:
        extra = self.servers.delayed(rollout)
        if extra > 0:
            self._at(self.now + extra, self._written, rollout)
            return
        self.servers.release(rollout, rollout.written[rollout.turn], self.now)
        for line in self.lines.values():
            while line and self._asked(line[0]):
                line.popleft()
        self._meet(rollout, self._act)

    def _act(self, rollout: _Rollout) -> None:
        fault, setup = rollout.faults[rollout.turn], self.setup
        if fault < setup.hangs:
            self.hung += 1
            if setup.timeout is not None:
                self._at(self.now + setup.timeout, self._timed_out, rollout)
            return
        self.levels.add("acting", 1, self.now)
        after = self._failed if fault < setup.hangs + setup.fails else self._acted
        self._at(self.now + rollout.seconds[rollout.turn], after, rollout)

    def _acted(self, rollout: _Rollout) -> None:
        self.levels.add("acting", -1, self.now)
        self._meet(rollout, self._go_on)

    def _go_on(self, rollout: _Rollout) -> None:
        rollout.turn += 1
        if rollout.turn == len(rollout.seconds):
            self._ended(rollout)
        elif self.setup.close_spare and self._is_late(rollout):
            self._leave_turns()
            self._put(rollout)
            self._free(rollout.environment)
        else:
            self._request(rollout)

    def _is_late(self, rollout: _Rollout) -> bool:
        group = self.queues[rollout.environment // self.per_group].live.get(rollout.episode)
        return group is None or len(group.finished) >= self.setup.group_size

    def _failed(self, rollout: _Rollout) -> None:
        self.levels.add("acting", -1, self.now)
        self._lost(rollout)

    def _timed_out(self, rollout: _Rollout) -> None:
        self.hung -= 1
        self._lost(rollout)

    def _lost(self, rollout: _Rollout) -> None:
        self.counts["failed"] += 1
        self.failed_in_row += 1
        if self.failed_in_row > 1_000 + 100 * self.per_group * len(self.queues):
            raise MethodError(
                f"The last {self.failed_in_row} rollouts failed. `fails` is {self.setup.fails} and `hangs` is "
                f"{self.setup.hangs} in each turn. Lower them, or give tasks fewer turns."
            )
        self.alive.remove(rollout)
        self.queues[rollout.environment // self.per_group].failed(rollout.episode)
        self._leave_turns()
        self._at(self.now + self.setup.restart, self._free, rollout.environment)

    def _ended(self, rollout: _Rollout) -> None:
        self._leave_turns()
        self.failed_in_row = 0
        begin = self.now
        if self.workers:
            begin = max(self.workers[0], self.now)
            heapq.heapreplace(self.workers, begin + rollout.reward)
            self.worked += rollout.reward
        self._at(begin + rollout.reward, self._rewarded, rollout)
        if self.setup.reward.overlapped:
            self._free(rollout.environment)

    def _rewarded(self, rollout: _Rollout) -> None:
        self._put(rollout)
        if not self.setup.reward.overlapped:
            self._free(rollout.environment)
        self._collect()

    def _put(self, rollout: _Rollout) -> None:
        self.alive.remove(rollout)
        self.queues[rollout.environment // self.per_group].put(rollout.episode, rollout, self.now)

    def _free(self, environment: int) -> None:
        q = environment // self.per_group
        self.idle[q].append(environment)
        self.engaged -= 1
        self.levels.add("environments", -1, self.now)
        self._fill([q])

    # ---- lockstep

    def _meet(self, rollout: _Rollout, go: Callable[[_Rollout], None]) -> None:
        """Goes on at once, or in lockstep when all have come this far."""
        if not self.setup.lockstep:
            go(rollout)
            return
        self.met.append((rollout, go))
        self._part()

    def _part(self) -> None:
        if self.met and len(self.met) == self.in_turns:
            met, self.met = self.met, []
            for rollout, go in met:
                go(rollout)

    def _leave_turns(self) -> None:
        self.in_turns -= 1
        self._part()

    # ---- the trainer

    def _advance(self) -> None:
        for queue in self.queues:
            before = dict(queue.live)
            queue.advance(self.step)
            for episode in before.keys() - queue.live.keys():
                self.counts["dropped"] += min(len(before[episode].finished), self.setup.group_size)
        self._fill(range(len(self.queues)))
        self._collect()

    def _collect(self) -> None:
        """Takes complete groups until there is a batch, those that were created first before the others."""
        if self.training:
            return
        while len(self.batch) < self.needed:
            oldest = [(next(iter(queue.live.values())), queue) for queue in self.queues if queue.live]
            ready = [(e.create_step, queue) for e, queue in oldest if len(e.finished) >= self.setup.group_size]
            if not ready:
                return
            group = min(ready, key=lambda pair: pair[0])[1].get()
            assert group is not None
            self.batch.append(group)
        self.training, self.waited = True, self.now - self.asked
        self._at(self.now + self.setup.train_seconds, self._trained)

    def _trained(self) -> None:
        weights, version = self.setup.weights, self.step + 1
        if weights.blocking:
            self.servers.pause(weights.transfer + weights.load, version, self.now)
            self._at(self.now + weights.transfer + weights.load, self._next)
        else:
            self._at(self.now + weights.transfer, self._arrived, version)
            self._next()

    def _arrived(self, version: int) -> None:
        self.servers.pause(self.setup.weights.load, version, self.now)

    def _next(self) -> None:
        ages = tuple(self.step - group.create_step for group in self.batch)
        lags = tuple(self.step - rollout.version for group in self.batch for rollout in group.rollouts)
        self.counts["trained"] += len(lags)
        self.done.append(TrainedStep(self.now, self.waited, ages, lags, self._so_far()))
        self.step += 1
        self.training, self.asked, self.batch = False, self.now, []
        self._advance()

    def _so_far(self) -> dict[str, float]:
        environments = self.per_group * len(self.queues)
        found = self.servers.used(self.now)
        found |= {name: self.levels.area(name, self.now) / environments for name in ("environments", "acting")}
        if self.workers:
            left = sum(max(free - self.now, 0.0) for free in self.workers)
            found["rewards"] = (self.worked - left) / len(self.workers)
        found["expired"] = float(sum(queue.expired for queue in self.queues))
        found["late"] = float(sum(queue.late for queue in self.queues))
        found["failed"] = float(self.counts["failed"])
        return found


def _log_normal(rng: np.random.Generator, mean: float, spread: float, n: int) -> np.ndarray:
    """Draws with this mean. Their number of random numbers does not depend on it."""
    return mean * np.exp(spread * rng.standard_normal(n) - spread**2 / 2)
