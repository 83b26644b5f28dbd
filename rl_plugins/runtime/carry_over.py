"""Over-provisioned generation: groups that go on in a later batch, with what they have.

A method that claims `admit` begins more groups than the batch trains. Generation stops as soon as enough of them are
complete; those are trained, all others wait in the driver's queue with their tokens, log-probs and policy versions, and
go on in a later batch from where they stopped. Nothing is lost: a group that was drawn is trained, in the queue, or
dropped because `admit` said so. The queue is part of the saved state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.entries import Entries
from rl_plugins.core.errors import MethodError
from rl_plugins.core.redundancy import note
from rl_plugins.core.requests import Trajectory
from rl_plugins.core.rollouts import Carried, PlanRow, Queue
from rl_plugins.runtime import validate
from rl_plugins.runtime.plan import admitted_prompts
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import copy_plain


@dataclass(frozen=True)
class Group:
    """A group in the making.

    Args:
        row: its plan row; `group` numbers it inside the batch.
        drawn: batch in which it was begun.
        rollouts: what there is of each; empty for a group not begun yet.
    """

    row: PlanRow
    drawn: int
    rollouts: tuple[Trajectory, ...] = ()

    @property
    def size(self) -> int:
        """Rollouts in the making, redundant ones included."""
        return self.enough + self.row.redundant

    @property
    def enough(self) -> int:
        """Rollouts that it ends with."""
        return self.row.n + self.row.spare

    @property
    def complete(self) -> bool:
        return len(self.rollouts) == self.size and sum(map(finished, self.rollouts)) >= self.enough


def finished(trajectory: Trajectory) -> bool:
    """Whether a rollout needs no further token."""
    return trajectory.finish not in UNFINISHED


UNFINISHED = ("", "abort")  # why a rollout ended that goes on


def without_redundant(group: Group, ticks: Sequence[int]) -> tuple[Group, int]:
    """A complete group with the rollouts that ended first, in the order of their numbers; the others are closed.

    Args:
        ticks: when each rollout ended, 0 for those of an earlier batch; of those that have not, anything. Rollouts that
            end at the same time are taken in the order of their numbers.

    Returns:
        The group, and when the last of them ended.
    """
    ended = [i for i, t in enumerate(group.rollouts) if finished(t)]
    first = sorted(sorted(ended, key=lambda i: ticks[i])[: group.enough])
    last = max((ticks[i] for i in first), default=0)
    if not group.row.redundant:
        return group, last
    kept = [t for i, t in enumerate(group.rollouts) if i in first]
    closed = [t for i, t in enumerate(group.rollouts) if i not in first]
    told = note([(1, len(t)) for t in kept], [(1, len(t)) for t in closed])
    row = group.row.replace(redundant=0)
    return replace(group, row=row, rollouts=tuple(t.noted(**told) for t in kept)), last


def admit(
    stack: MethodStack, proposal: Sequence[int], groups: int, group_size: int, pool_size: int | None, dataset: Any
) -> list[Group]:
    """Groups that are generated now, in the order of their numbers: those that go on first. What stays behind remains
    in `stack.carried`; what is admitted leaves it, and comes back with `requeue`.

    Args:
        proposal: prompts the host would take next; they serve as long as never more were needed, else the driver's own
            permutation does.
        groups: groups the batch trains.

    Raises:
        MethodError: an illegal admission, fewer groups than the batch trains, or plan rows that cannot go on later.
    """
    method = stack.claims["admit"][0]
    waiting = stack.carried
    queue = Queue(tuple(_seen(g) for g in waiting), groups, group_size, stack.batch)
    given = stack.one("admit", queue)
    with validate.invalid_returns(method, "admit"):
        answer = validate.admission(method, given, len(waiting), groups)
    # while all that wait are still in the queue: no prompt is in a batch twice
    rows = admitted_prompts(stack, proposal, answer.fresh, group_size, pool_size, dataset)
    _check_rows(stack, rows)
    if len(answer.resume) + len(answer.restart) + len(rows) < groups:
        raise MethodError(
            f"`{method.name}` starts {answer.fresh} new groups, and only {len(rows)} came: the dataset has "
            f"{'no end' if pool_size is None else f'{pool_size} rows'}, {len(waiting)} groups wait, and a `plan` hook "
            f"may have left out prompts. The batch trains {groups}. Use a larger dataset or a smaller batch, or remove "
            f"the method that plans."
        )
    leaving = {*answer.resume, *answer.restart, *answer.drop}
    stack.carried = [g for i, g in enumerate(waiting) if i not in leaving]
    begun = [from_plain(waiting[i]) for i in answer.resume]
    begun += [Group(_row(waiting[i]), stack.batch) for i in answer.restart]
    begun += [Group(row, stack.batch) for row in rows]
    stack.metrics.add("rl_plugins/groups_dropped", len(answer.drop), "sum")
    return [replace(g, row=g.row.replace(group=i)) for i, g in enumerate(begun)]


def _check_rows(stack: MethodStack, rows: Sequence[PlanRow]) -> None:
    """Refuses what a group that may wait cannot have."""
    if any(r.given for r in rows):
        why = "gives completions"
    elif len({r.group for r in rows}) < len(rows):
        why = "makes one group of several plan rows"
    else:
        return
    names = " or ".join(f"`{m.name}`" for m in stack.claims["plan"])
    raise MethodError(
        f"The plan of {names} {why}, and `{stack.claims['admit'][0].name}` lets groups wait with what they have, which "
        f"is one prompt and what was sampled for it. Remove one of the methods."
    )


def requeue(
    stack: MethodStack, groups: Sequence[Group], order: Sequence[int], enough: int
) -> tuple[list[Group], list[Group]]:
    """The groups to train, as many as the batch holds, numbered again; all others go into `stack.carried`, those that
    are complete included.

    Args:
        groups: after generation.
        order: places of the complete ones, the first to complete first.

    Raises:
        MethodError: the engine stopped before enough groups were complete.
    """
    if len(order) < enough:
        raise MethodError(
            f"The engine stopped with {len(order)} complete groups of {len(groups)}, and the batch trains {enough}. It "
            f"was interrupted from elsewhere; see its log."
        )
    trained = sorted(order[:enough])
    stay = set(trained)
    rest = [g for i, g in enumerate(groups) if i not in stay]
    stack.carried = [*stack.carried, *(to_plain(g) for g in rest)]
    tokens = sum(len(t["tokens"]) for g in stack.carried for t in g["rollouts"])
    stack.metrics.add("rl_plugins/groups_waiting", len(stack.carried), "mean")
    stack.metrics.add("rl_plugins/tokens_waiting", tokens, "mean")
    chosen = [groups[i] for i in trained]
    return [replace(g, row=g.row.replace(group=k)) for k, g in enumerate(chosen)], rest


def _seen(group: Mapping[str, Any]) -> Carried:
    """What `admit` is told of a waiting group, as `to_plain` made it."""
    row, rollouts = group["row"], group["rollouts"]
    return Carried(
        prompt_index=row["prompt_index"],
        size=row["n"] + row["spare"] + row.get("redundant", 0),
        drawn=group["drawn"],
        tokens=tuple(len(t["tokens"]) for t in rollouts),
        finished=tuple(t["finish"] not in UNFINISHED for t in rollouts),
        versions=tuple(_oldest(t["versions"].numpy()) for t in rollouts),
    )


def _oldest(versions: Any) -> int:
    """The oldest of the versions a policy made; -1 without one."""
    made = versions[versions >= 0]
    return int(made.min()) if len(made) else -1


# ---- plain data, for checkpoints


def to_plain(group: Group) -> dict[str, Any]:
    """A group as plain data. Rollouts of one prompt share its tensor."""
    row = group.row
    prompts: dict[bytes, Tensor] = {}

    def shared(prompt: Sequence[int]) -> Tensor:
        ids = _tensor(prompt, np.int64)
        return prompts.setdefault(ids.numpy().tobytes(), ids)

    return {
        "row": {
            "prompt_index": row.prompt_index,
            "group": row.group,
            "n": row.n,
            "spare": row.spare,
            "redundant": row.redundant,
            "edit": None if row.edit is None else dict(row.edit),
            "prefix": list(row.prefix),
            "max_tokens": row.max_tokens,
            "payload": row.payload,
        },
        "drawn": group.drawn,
        "rollouts": [
            {
                "prompt": shared(t.prompt),
                "tokens": _tensor(t.tokens, np.int64),
                "kinds": _tensor(t.kinds, np.int8),
                "logprobs": _tensor(t.logprobs, np.float64),
                "versions": _tensor(t.versions, np.int64),
                "finish": t.finish,
                "meta": dict(t.meta),
            }
            for t in group.rollouts
        ],
    }


def _tensor(values: Sequence[Any], dtype: type) -> Tensor:
    return torch.from_numpy(np.array(values, dtype))  # several times as fast as torch.tensor


def from_plain(content: Mapping[str, Any]) -> Group:
    """What `to_plain` made."""
    return Group(
        _row(content),
        content["drawn"],
        tuple(
            Trajectory(
                prompt=Entries.of_array(t["prompt"].numpy(), "q"),
                tokens=Entries.of_array(t["tokens"].numpy(), "q"),
                kinds=Entries.of_array(t["kinds"].numpy(), "b"),
                logprobs=Entries.of_array(t["logprobs"].numpy(), "d"),
                versions=Entries.of_array(t["versions"].numpy(), "q"),
                finish=t["finish"],
                meta=t.get("meta", {}),
            )
            for t in content["rollouts"]
        ),
    )


def _row(content: Mapping[str, Any]) -> PlanRow:
    """The plan row of a group. Hooks see its payload and its columns, and what waits must not change with them."""
    row = {name: copy_plain(value) for name, value in content["row"].items()}
    return PlanRow(**{**row, "prefix": tuple(row["prefix"])})
