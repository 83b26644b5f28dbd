"""What over-provisioned generation would give: a simulation of whole batches, without a model and without an engine.

    from rl_plugins.methods.april import April
    from rl_plugins.testing.generation import Simulation, summary

    def lengths(prompt, drawn):  # of the rollouts of a prompt, as measured in your runs
        return np.random.default_rng([prompt, drawn]).lognormal(6, 1, size=8).astype(int) + 1

    for n in (1.0, 1.5, 2.0):
        april = April(April.Params(over_sampling=n))
        run = Simulation(april, lengths, groups=32, group_size=8, max_tokens=8192, slots=256)
        print(n, summary([run.batch() for _ in range(50)], skip=10))

The method's own `admit` and the driver's own queue decide, as in a training run; only the decoding is made up: every
rollout that has a slot makes one token per tick, and a tick takes as long as you say for so many rollouts at once. A
rollout that goes on in a later batch is read again, which takes `prefill` per token.

Only generation is timed. With g seconds of generation and u seconds of everything else in a batch, a throughput of
generation that is r times as high makes training (g + u) / (g / r + u) times as fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_plugins.core.method import Method
from rl_plugins.core.requests import Finish, Generated, Trajectory
from rl_plugins.runtime.carry_over import Group, admit, finished, from_plain, requeue, to_plain
from rl_plugins.runtime.stack import MethodStack

Lengths = Callable[[int, int], Sequence[int]]
"""(prompt, batch in which it was begun) -> tokens after which each of its rollouts would end by itself, at least 1.
Entries beyond the size of the group are not used."""


@dataclass(frozen=True)
class SimulatedBatch:
    """What became of one generation batch.

    Args:
        time: of generation, in ticks of an engine with one rollout.
        decoded: tokens made, those that are given up later included.
        read: tokens of resumed rollouts that were read again.
        trained: groups, complete.
        waiting: groups after it.
        fresh, resumed, restarted: groups begun, that went on, and that were begun again.
        dropped: groups given up before the batch, or lost after it.
        given_up: tokens of groups that were restarted, dropped or lost.
    """

    time: float
    decoded: int
    read: int
    trained: tuple[Group, ...]
    waiting: tuple[Group, ...]
    fresh: int
    resumed: int
    restarted: int
    dropped: int
    given_up: int


class Simulation:
    """Batches of over-provisioned generation, one after the other.

    Args:
        method: claims `admit`, as `April` does.
        lengths: of the rollouts of a prompt.
        groups, group_size: trained per batch.
        max_tokens: longest completion.
        slots: rollouts decoded at once; the others wait for a free slot, groups in order. None: no limit.
        token_time: rollouts decoded at once -> time of a tick. None: 1 whatever their number, as on an engine that is
            far from busy.
        prefill: time to read a token of a resumed rollout.
        dataset_size: prompts; None: endlessly many, each drawn once, in order.
        lose_surplus: groups that are complete when decoding stops and are not trained are lost, as in the authors'
            code.

    Attributes:
        stack: with the queue. With a `dataset_size` its `state_dict` is all there is to remember.
    """

    def __init__(
        self,
        method: Method,
        lengths: Lengths,
        *,
        groups: int,
        group_size: int,
        max_tokens: int,
        slots: int | None = None,
        token_time: Callable[[int], float] | None = None,
        prefill: float = 0.0,
        dataset_size: int | None = None,
        lose_surplus: bool = False,
        seed: int = 0,
    ) -> None:
        self.stack = MethodStack([method], seed)
        self.lengths, self.groups, self.group_size, self.max_tokens = lengths, groups, group_size, max_tokens
        self.slots, self.token_time, self.prefill = slots, token_time or (lambda running: 1.0), prefill
        self.dataset_size, self.lose_surplus = dataset_size, lose_surplus
        self._next = 0  # prompt of an endless dataset

    def batch(self) -> SimulatedBatch:
        """Generates the next batch."""
        stack = self.stack
        before = [from_plain(g) for g in stack.carried]
        endless = self.dataset_size is None
        proposal = range(self._next, self._next + 64 * self.groups) if endless else range(0)
        admitted = admit(stack, proposal, self.groups, self.group_size, self.dataset_size, None)
        still = [from_plain(g) for g in stack.carried]
        resumed = [g for g in admitted if g.rollouts]
        known = {g.row.prompt_index for g in before}
        restarted = sum(g.row.prompt_index in known for g in admitted if not g.rollouts)
        fresh = len(admitted) - len(resumed) - restarted
        self._next += fresh
        after, order, time, decoded = self._decode(admitted)
        trained, rest = requeue(stack, after, order, self.groups)
        lost = [g for g in rest if g.complete] if self.lose_surplus else []
        waiting = [g for g in (*still, *rest) if not (self.lose_surplus and g.complete)]
        if lost:
            stack.carried = [to_plain(g) for g in waiting]
        stack.batch, stack.draw = stack.batch + 1, 0  # as `driver.decide_advantages` leaves it
        stack.metrics.take()
        read = sum(len(t) for g in resumed for t in g.rollouts if not finished(t))
        return SimulatedBatch(
            time=time + self.prefill * read,
            decoded=decoded,
            read=read,
            trained=tuple(trained),
            waiting=tuple(waiting),
            fresh=fresh,
            resumed=len(resumed),
            restarted=restarted,
            dropped=len(before) - len(still) - len(resumed) - restarted + len(lost),
            given_up=_tokens(before) - _tokens(still) - _tokens(resumed) + _tokens(lost),
        )

    def _decode(self, groups: Sequence[Group]) -> tuple[list[Group], list[int], float, int]:
        """Groups after decoding, places of the complete ones in the order they completed, time, and tokens made."""
        size = [g.size for g in groups]
        rollouts = [t for g in groups for t in g.rollouts or (Trajectory(()),) * g.size]
        natural = np.concatenate(
            [np.asarray(self.lengths(g.row.prompt_index, g.drawn), dtype=np.int64)[: g.size] for g in groups]
        )
        had = np.array([len(t) for t in rollouts])
        of = np.repeat(np.arange(len(groups)), size)
        left = np.minimum(natural, self.max_tokens) - had
        left[[finished(t) for t in rollouts]] = 0
        todo, time, completed = left.copy(), 0.0, np.full(len(groups), np.inf)
        while True:
            whole = np.bincount(of, weights=left, minlength=len(groups)) == 0
            completed[whole & np.isinf(completed)] = time
            if whole.sum() >= self.groups:
                break
            running = np.flatnonzero(left)[: self.slots]
            ticks = int(left[running].min())
            left[running] -= ticks
            time += ticks * self.token_time(len(running))
        made = todo - left
        grown = iter([self._grown(*row) for row in zip(rollouts, made, natural, strict=True)])
        after = [replace(g, rollouts=tuple(next(grown) for _ in range(g.size))) for g in groups]
        order = [i for i in np.argsort(completed, kind="stable").tolist() if np.isfinite(completed[i])]
        return after, order, time, int(made.sum())

    def _grown(self, trajectory: Trajectory, made: int, natural: int) -> Trajectory:
        """With so many tokens more. Their ids tell the batch and the place."""
        if finished(trajectory):
            return trajectory
        step, start, n = self.stack.batch, len(trajectory), int(made)
        tokens = tuple(range((step << 32) + start, (step << 32) + start + n))
        if start + n < min(natural, self.max_tokens):
            finish: Finish = "abort"
        else:
            finish = "eos" if natural <= self.max_tokens else "length"
        return trajectory.add(Generated(tokens, (-1.0 / (step + 1),) * n, finish, step))


def summary(batches: Sequence[SimulatedBatch], skip: int = 0) -> dict[str, float]:
    """What a run came to, as numbers.

    `throughput` trained tokens per time; `time` per batch; `length` mean of the trained rollouts; `stale` share of the
    trained tokens that an earlier batch made; `age_K` share that is K batches old; `oldest` in batches; `waiting`
    groups per group trained, after a batch; `wasted` share of the decoded tokens that was given up; `read` tokens read
    again per token trained.

    Args:
        skip: batches at the start that are left out. Over-provisioned runs begin with short rollouts.
    """
    counted = batches[skip:]
    age: Counter[int] = Counter()
    for number, batch in enumerate(batches):
        if number >= skip:
            for group in batch.trained:
                for rollout in group.rollouts:
                    for version, tokens in Counter(rollout.versions).items():
                        age[number - version] += tokens
    trained, time = age.total(), sum(b.time for b in counted)
    rollouts = sum(len(g.rollouts) for b in counted for g in b.trained)
    return {
        "throughput": trained / time,
        "time": time / len(counted),
        "length": trained / rollouts,
        "stale": 1 - age[0] / trained,
        "oldest": float(max(age)),
        "waiting": sum(len(b.waiting) for b in counted) / sum(len(b.trained) for b in counted),
        "wasted": sum(b.given_up for b in counted) / max(1, sum(b.decoded for b in counted)),
        "read": sum(b.read for b in counted) / trained,
        **{f"age_{k}": age[k] / trained for k in range(max(age) + 1)},
    }


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(t) for g in groups for t in g.rollouts)
