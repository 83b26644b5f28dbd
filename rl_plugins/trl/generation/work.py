"""What a batch generates, and what becomes of it, as records of which each phase makes the next (see batches.py).

The rows of a `Work` come from one of four sources: plan.py, rounds.py, programs.py, queue.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from rl_plugins.core.requests import Trajectory
from rl_plugins.core.rollouts import Completion, Jagged, PlanRow
from rl_plugins.runtime.ranks import deal
from rl_plugins.trl.generation.prompts import Prompts
from rl_plugins.trl.host import HostRows, Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class ProgramRow:
    """One row a program made.

    Args:
        plan: of its prompt.
        group: number of its group: the plan's, or one of its own after all of those.
        rollout: number of its rollout inside the group. index: of the row inside the rollout.
        trajectory: the row.
    """

    plan: PlanRow
    group: int
    rollout: int
    index: int
    trajectory: Trajectory


@dataclass(frozen=True)
class Row:
    """One completion to make: rollout `number` of a plan row.

    Args:
        plan: None for a filler.
        done: made in an earlier round.
        made: by a rollout program.
    """

    plan: PlanRow | None
    number: int = 0
    done: Completion | None = None
    made: ProgramRow | None = None

    @property
    def given(self) -> Completion | None:
        """The completion that is there already: made in an earlier round, or given by the plan."""
        if self.made is None and self.done is None and self.plan is not None and self.number < len(self.plan.given):
            return self.plan.given[self.number]
        return self.done

    @property
    def rewards(self) -> Mapping[str, float] | None:
        """Of the reward functions, where they are known already."""
        if self.made is not None:
            return self.made.trajectory.rewards
        return None if self.given is None else self.given.rewards

    @property
    def versions(self) -> Sequence[int] | None:
        """Of each token, where it is not of the present weights; below 0 for those that no policy made."""
        if self.made is not None:
            return self.made.trajectory.versions
        return None if self.given is None else self.given.versions

    @property
    def asked(self) -> bool:
        """Whether the engine makes it when TRL asks for completions."""
        return self.plan is not None and self.given is None and self.made is None

    @property
    def plain(self) -> bool:
        """Whether TRL's own request makes it: nothing is given, and it has no limit of its own."""
        return self.plan is not None and self.asked and not self.plan.prefix and self.plan.max_tokens is None


FILLER = Row(plan=None)


@dataclass(frozen=True)
class Work:
    """What a batch generates, the same on every rank but for tokens, `payload` and `extra`.

    Args:
        prompts: the rows of the dataset that the plan rows name.
        rows: of each rank; fillers are the last ones.
        rank: this one.
        regular: groups are those of TRL, so its own advantages mean something.
        as_proposed: prompts are TRL's, too.
        payload: of every row but fillers, in order; where programs do not want it, on the driver only.
        by_program: a rollout program or the queue made the rows; TRL's own method gets them instead of generating.
        rewards: (rows of all ranks, functions) of rows that were made in rounds, NaN for fillers; else None.
        extra: what reward functions added to the table of completions: name -> values of this rank's rows.
        served: TRL has got its completions; what its tools ask for afterwards is the engine's.
    """

    prompts: Prompts
    rows: list[list[Row]]
    rank: int = 0
    regular: bool = False
    as_proposed: bool = False
    payload: list[Any] = field(default_factory=list)
    by_program: bool = False
    rewards: Tensor | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict)
    served: bool = False

    @property
    def mine(self) -> list[Row]:
        """This rank's rows."""
        return self.rows[self.rank]

    @property
    def flat(self) -> list[Row]:
        """The rows of all ranks in rank order."""
        return flat(self.rows)


@dataclass(frozen=True)
class GeneratedWork:
    """rows: what TRL made of this rank's rows."""

    work: Work
    rows: HostRows


@dataclass(frozen=True)
class ScoredWork(GeneratedWork):
    """rewards: (rows of all ranks, functions), NaN for fillers. step_rewards: of this rank's rows, if a method needs
    them."""

    rewards: Tensor
    step_rewards: Jagged | None


def dealt(trainer: Trainer, rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each rank, as many as the batch trains at least."""
    ranks = trainer.accelerator.num_processes
    return deal(rows, ranks, trainer.args.generation_batch_size // ranks, FILLER)


def made_already(trainer: Trainer, prompts: Prompts, made: Sequence[ProgramRow]) -> Work:
    """The work of rows that programs or the queue made."""
    return Work(
        prompts,
        dealt(trainer, [Row(m.plan, m.rollout, made=m) for m in made]),
        trainer.accelerator.process_index,
        payload=[m.plan.payload for m in made],
        by_program=True,
    )


def flat(parts: Sequence[Sequence[T]]) -> list[T]:
    """What all ranks have, in rank order."""
    return [x for part in parts for x in part]
