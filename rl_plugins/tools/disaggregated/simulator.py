"""`simulate`: rollouts on machines of several kinds next to a trainer, as a discrete-event simulation on `simpy`,
without a model.

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

import itertools
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from simpy import Environment, Event, Resource

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
    context: int = 0
    cached: int = 0
    server: str = ""
    paused: float = 0.0
    version: int = -1


_Waits = Generator[Event, Any, None]


class _World:
    """Everything at one moment. The trainer and each rollout are processes, which yield what they wait for."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.seed, self.env = setup, seed, Environment()
        self.servers = Servers(setup.router(), setup.pools, setup.servers)
        self.lines: dict[str, deque[tuple[_Rollout, int, Event]]] = {}  # for a place on a server, by tag
        self.queues = [setup.queue() for _ in range(setup.groups)]
        self.per_group = setup.group_size + setup.redundancy
        self.idle = [[q * self.per_group + i for i in range(self.per_group)] for q in range(setup.groups)]
        self.met, self.go_on = 0, self.env.event()  # in lockstep
        self.in_turns = self.engaged = self.hung = self.failed_in_row = 0
        self.workers = Resource(self.env, setup.reward.workers) if setup.reward.workers else None
        self.batch: list[FinishedGroup] = []
        self.needed = setup.groups * setup.groups_per_step
        self.full = self.env.event()  # there is a batch
        self.done: list[TrainedStep] = []
        self.levels, self.alive = Levels(), set[_Rollout]()
        self.counts = dict.fromkeys(("begun", "trained", "failed", "dropped"), 0)
        self.begun: dict[tuple[int, int], int] = {}
        self.shares = np.cumsum([task.share for task in setup.tasks]) / sum(task.share for task in setup.tasks)

    def run(self, steps: int) -> SimulatedRun:
        self.env.process(self._train())
        while len(self.done) < steps:
            if self.env.peek() == float("inf"):
                raise MethodError(
                    f"Step {len(self.done)} waits for {self.needed - len(self.batch)} of its {self.needed} groups, and "
                    f"nothing is under way: {self.hung} of {self.per_group * len(self.queues)} environments have hung. "
                    f"Set `timeout`, or raise `redundancy` above {self.setup.redundancy}."
                )
            self.env.step()
        in_queues = sum(min(len(e.finished), self.setup.group_size) for q in self.queues for e in q.live.values())
        waiting = in_queues + sum(len(group.rollouts) for group in self.batch)
        late = sum(q.late for q in self.queues)
        rollouts = {**self.counts, "late": late, "waiting": waiting, "under_way": len(self.alive)}
        return SimulatedRun(tuple(self.done), rollouts, self.servers.router.moved)

    # ---- rollouts

    def _fill(self, groups: Sequence[int]) -> None:
        """Idle environments begin rollouts where their queue has a place."""
        if self.setup.lockstep:
            if self.engaged:
                return
            groups = range(len(self.queues))
        for q in groups:
            while self.idle[q]:
                episode = self.queues[q].ask(self.env.now)
                if episode is None:
                    break
                rollout = self._draw(self.idle[q].pop(0), q, episode)
                self.in_turns += 1
                self.engaged += 1
                self.alive.add(rollout)
                self.counts["begun"] += 1
                self.levels.add("environments", 1, self.env.now)
                self.env.process(self._play(rollout))

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

    def _play(self, rollout: _Rollout) -> _Waits:
        setup, env = self.setup, self.env
        for turn, fault in enumerate(rollout.faults):
            if turn and setup.close_spare and self._is_late(rollout):
                self._leave_turns()
                self._put(rollout)
                self._free(rollout.environment)
                return
            yield from self._write(rollout, rollout.written[turn])
            yield from self._meet()
            if fault < setup.hangs:
                self.hung += 1
                yield env.event() if setup.timeout is None else env.timeout(setup.timeout)
                self.hung -= 1
            else:
                self.levels.add("acting", 1, env.now)
                yield env.timeout(rollout.seconds[turn])
                self.levels.add("acting", -1, env.now)
            if fault < setup.hangs + setup.fails:
                self._lost(rollout)
                yield env.timeout(setup.restart)
                self._free(rollout.environment)
                return
            yield from self._meet()
        self._leave_turns()
        self.failed_in_row = 0
        if setup.reward.overlapped:
            self._free(rollout.environment)
        if self.workers is None:
            yield env.timeout(rollout.reward)
        else:
            with self.workers.request() as worker:
                yield worker
                self.levels.add("rewards", 1, env.now)
                yield env.timeout(rollout.reward)
                self.levels.add("rewards", -1, env.now)
        self._put(rollout)
        if not setup.reward.overlapped:
            self._free(rollout.environment)
        self._collect()

    def _write(self, rollout: _Rollout, tokens: int) -> _Waits:
        rollout.context += rollout.reads
        end = self.servers.ask(rollout, tokens, self.env.now)
        if end is None:
            placed = self.env.event()
            self.lines.setdefault(rollout.tag, deque()).append((rollout, tokens, placed))
            end = yield placed
        left = end - self.env.now
        while left > 0:
            yield self.env.timeout(left)
            left = self.servers.delayed(rollout)
        self.servers.release(rollout, tokens, self.env.now)
        for line in self.lines.values():
            while line and (end := self.servers.ask(line[0][0], line[0][1], self.env.now)) is not None:
                line.popleft()[2].succeed(end)

    def _is_late(self, rollout: _Rollout) -> bool:
        group = self.queues[rollout.environment // self.per_group].live.get(rollout.episode)
        return group is None or len(group.finished) >= self.setup.group_size

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

    def _put(self, rollout: _Rollout) -> None:
        self.alive.remove(rollout)
        self.queues[rollout.environment // self.per_group].put(rollout.episode, rollout, self.env.now)

    def _free(self, environment: int) -> None:
        q = environment // self.per_group
        self.idle[q].append(environment)
        self.engaged -= 1
        self.levels.add("environments", -1, self.env.now)
        self._fill([q])

    # ---- lockstep

    def _meet(self) -> _Waits:
        """In lockstep waits until all have come this far."""
        if self.setup.lockstep:
            self.met += 1
            go_on = self.go_on
            self._part()
            yield go_on

    def _part(self) -> None:
        if self.met and self.met == self.in_turns:
            self.go_on.succeed()
            self.met, self.go_on = 0, self.env.event()

    def _leave_turns(self) -> None:
        self.in_turns -= 1
        self._part()

    # ---- the trainer

    def _train(self) -> _Waits:
        setup, weights, env = self.setup, self.setup.weights, self.env
        for step in itertools.count():
            asked = env.now
            self._advance(step)
            yield self.full
            waited = env.now - asked
            yield env.timeout(setup.train_seconds)
            if weights.blocking:
                self.servers.pause(weights.transfer + weights.load, step + 1, env.now)
                yield env.timeout(weights.transfer + weights.load)
            else:
                env.process(self._send(step + 1))
            ages = tuple(step - group.create_step for group in self.batch)
            lags = tuple(step - rollout.version for group in self.batch for rollout in group.rollouts)
            self.counts["trained"] += len(lags)
            self.done.append(TrainedStep(env.now, waited, ages, lags, self._so_far()))
            self.batch, self.full = [], env.event()

    def _send(self, version: int) -> _Waits:
        yield self.env.timeout(self.setup.weights.transfer)
        self.servers.pause(self.setup.weights.load, version, self.env.now)

    def _advance(self, step: int) -> None:
        for queue in self.queues:
            before = dict(queue.live)
            queue.advance(step)
            for episode in before.keys() - queue.live.keys():
                self.counts["dropped"] += min(len(before[episode].finished), self.setup.group_size)
        self._fill(range(len(self.queues)))
        self._collect()

    def _collect(self) -> None:
        """Takes complete groups until there is a batch, those that were created first before the others."""
        if self.full.triggered:
            return
        while len(self.batch) < self.needed:
            oldest = [(next(iter(queue.live.values())), queue) for queue in self.queues if queue.live]
            ready = [(e.create_step, queue) for e, queue in oldest if len(e.finished) >= self.setup.group_size]
            if not ready:
                return
            group = min(ready, key=lambda pair: pair[0])[1].get()
            assert group is not None
            self.batch.append(group)
        self.full.succeed()

    def _so_far(self) -> dict[str, float]:
        now, environments = self.env.now, self.per_group * len(self.queues)
        found = self.servers.used(now)
        found |= {name: self.levels.area(name, now) / environments for name in ("environments", "acting")}
        if self.workers:
            found["rewards"] = self.levels.area("rewards", now) / self.workers.capacity
        found["expired"] = float(sum(queue.expired for queue in self.queues))
        found["late"] = float(sum(queue.late for queue in self.queues))
        found["failed"] = float(self.counts["failed"])
        return found


def _log_normal(rng: np.random.Generator, mean: float, spread: float, n: int) -> np.ndarray:
    """Draws with this mean. Their number of random numbers does not depend on it."""
    return mean * np.exp(spread * rng.standard_normal(n) - spread**2 / 2)
