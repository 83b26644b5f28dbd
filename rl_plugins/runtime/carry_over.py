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

from rl_plugins.errors import MethodError
from rl_plugins.requests import Trajectory
from rl_plugins.rollouts import Carried, PlanRow, Queue
from rl_plugins.runtime import gate
from rl_plugins.runtime.plan import admitted_prompts
from rl_plugins.runtime.stack import MethodStack


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
        return self.row.n + self.row.spare

    @property
    def complete(self) -> bool:
        return len(self.rollouts) == self.size and all(finished(t) for t in self.rollouts)


def finished(trajectory: Trajectory) -> bool:
    """Whether a rollout needs no further token."""
    return trajectory.finish not in ("", "abort")


def admit(
    stack: MethodStack, proposal: Sequence[int], groups: int, group_size: int, pool_size: int | None, dataset: Any
) -> list[Group]:
    """Groups that are generated now, in the order of their numbers: those that go on first. What stays behind remains
    in `stack.carried`; what is admitted leaves it, and comes back with `settle_queue`.

    Args:
        proposal: prompts the host would take next; they serve as long as never more were needed, else the driver's own
            permutation does.
        groups: groups the batch trains.

    Raises:
        MethodError: an illegal admission, fewer groups than the batch trains, or plan rows that cannot go on later.
    """
    method = stack.claims["admit"][0]
    waiting = [from_plain(g) for g in stack.carried]
    queue = Queue(tuple(_seen(g) for g in waiting), groups, group_size, stack.batch)
    answer = gate.admission(method, stack.one("admit", queue), len(waiting), groups)
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
    stack.carried = [to_plain(g) for i, g in enumerate(waiting) if i not in leaving]
    begun = [waiting[i] for i in answer.resume] + [Group(waiting[i].row, stack.batch) for i in answer.restart]
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


def settle_queue(
    stack: MethodStack, groups: Sequence[Group], order: Sequence[int], enough: int
) -> tuple[list[Group], list[Group]]:
    """The groups to train, as many as the batch holds, numbered anew; all others go into `stack.carried`, those that
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
    stack.carried += [to_plain(g) for g in rest]
    tokens = sum(len(t["tokens"]) for g in stack.carried for t in g["rollouts"])
    stack.metrics.add("rl_plugins/groups_waiting", len(stack.carried), "mean")
    stack.metrics.add("rl_plugins/tokens_waiting", tokens, "mean")
    chosen = [groups[i] for i in trained]
    return [replace(g, row=g.row.replace(group=k)) for k, g in enumerate(chosen)], rest


def _seen(group: Group) -> Carried:
    tokens = tuple(len(t) for t in group.rollouts)
    return Carried(
        prompt_index=group.row.prompt_index,
        size=group.size,
        drawn=group.drawn,
        tokens=tokens,
        finished=tuple(finished(t) for t in group.rollouts),
        versions=tuple(min((v for v in t.versions if v >= 0), default=-1) for t in group.rollouts),
    )


# ---- plain data, for checkpoints


def to_plain(group: Group) -> dict[str, Any]:
    """A group as plain data."""
    row = group.row
    return {
        "row": {
            "prompt_index": row.prompt_index,
            "group": row.group,
            "n": row.n,
            "spare": row.spare,
            "edit": None if row.edit is None else dict(row.edit),
            "prefix": list(row.prefix),
            "max_tokens": row.max_tokens,
            "payload": row.payload,
        },
        "drawn": group.drawn,
        "rollouts": [
            {
                "prompt": _tensor(t.prompt, np.int64),
                "tokens": _tensor(t.tokens, np.int64),
                "kinds": _tensor(t.kinds, np.int64),
                "logprobs": _tensor(t.logprobs, np.float64),
                "versions": _tensor(t.versions, np.int64),
                "finish": t.finish,
            }
            for t in group.rollouts
        ],
    }


def _tensor(values: Sequence[Any], dtype: type) -> Tensor:
    return torch.from_numpy(np.array(values, dtype))  # several times as fast as torch.tensor


def from_plain(content: Mapping[str, Any]) -> Group:
    """What `to_plain` made."""
    row = dict(content["row"])
    return Group(
        PlanRow(**{**row, "prefix": tuple(row["prefix"])}),
        content["drawn"],
        tuple(
            Trajectory(
                prompt=tuple(t["prompt"].tolist()),
                tokens=tuple(t["tokens"].tolist()),
                kinds=tuple(t["kinds"].tolist()),
                logprobs=tuple(t["logprobs"].tolist()),
                versions=tuple(t["versions"].tolist()),
                finish=t["finish"],
            )
            for t in content["rollouts"]
        ),
    )
