"""Over-provisioned generation: groups that go on in a later batch, with what they have.

A method that claims `admit` begins more groups than the batch trains. Generation stops as soon as enough of them are
complete; those are trained, all others wait in the driver's queue with their tokens, log-probs and policy versions, and
go on in a later batch from where they stopped. Nothing is lost: a group that was drawn is trained, in the queue, or
dropped because `admit` said so. The queue is part of the saved state.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_plugins.driver import admitted_prompts
from rl_plugins.errors import MethodError
from rl_plugins.requests import Trajectory
from rl_plugins.rollouts import Admission, Carried, PlanRow, Queue
from rl_plugins.stack import MethodStack


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
    """Groups that are generated now, in the order of their numbers: those that go on first. What stays behind remains in
    `stack.carried`; what is admitted leaves it, and comes back with `carry`.

    Args:
        proposal: prompts the host would take next; used for streams only, else the driver's own permutation serves.
        groups: groups the batch trains.

    Raises:
        MethodError: an illegal admission, or fewer groups than the batch trains.
    """
    method = stack.claims["admit"][0]
    waiting = [from_plain(g) for g in stack.carried]
    queue = Queue(tuple(_seen(g) for g in waiting), groups, group_size, stack.step)
    answer = stack.one("admit", queue)
    if not isinstance(answer, Admission):
        raise stack.refuse(method, "admit", f"{type(answer).__name__} instead of an Admission.")
    resume, restart, drop = ([operator.index(i) for i in part] for part in (answer.resume, answer.restart, answer.drop))
    named = [*resume, *restart, *drop]
    if len(set(named)) != len(named) or not all(0 <= i < len(waiting) for i in named) or answer.fresh < 0:
        raise stack.refuse(
            method,
            "admit",
            f"{answer}: each of the {len(waiting)} waiting groups may be named once, and `fresh` is at least 0.",
        )
    started = len(resume) + len(restart) + answer.fresh
    if started < groups:
        raise stack.refuse(method, "admit", f"it starts {started} groups, and the batch trains {groups}.")
    stack.carried = [to_plain(g) for i, g in enumerate(waiting) if i not in set(named)]
    begun = [waiting[i] for i in resume] + [Group(waiting[i].row, stack.step) for i in restart]
    rows = admitted_prompts(stack, proposal, answer.fresh, group_size, pool_size, dataset)
    begun += [Group(row, stack.step) for row in rows]
    if len(begun) < groups:
        raise MethodError(
            f"`{method.name}` starts {answer.fresh} new groups, and the dataset has only {len(rows)} further prompts; "
            f"the batch trains {groups}. Use a larger dataset or a smaller batch."
        )
    stack.metrics.add("rl_plugins/groups_dropped", len(drop), "sum")
    return [replace(g, row=g.row.replace(group=i)) for i, g in enumerate(begun)]


def settle_queue(
    stack: MethodStack, groups: Sequence[Group], order: Sequence[int], enough: int
) -> tuple[list[Group], list[Group]]:
    """The groups to train, as many as the batch holds, numbered anew; all others go into `stack.carried`.

    Args:
        groups: after generation.
        order: places of the complete ones, the first to complete first.
    """
    trained = sorted(order[:enough])
    rest = [groups[i] for i in range(len(groups)) if i not in set(trained)]
    stack.carried += [to_plain(g) for g in rest]
    stack.metrics.add("rl_plugins/groups_waiting", len(stack.carried), "mean")
    stack.metrics.add("rl_plugins/tokens_waiting", sum(len(t) for g in rest for t in g.rollouts), "mean")
    chosen = [groups[i] for i in trained]
    return [replace(g, row=g.row.replace(group=k)) for k, g in enumerate(chosen)], rest


def _seen(group: Group) -> Carried:
    tokens = tuple(len(t) for t in group.rollouts)
    return Carried(
        prompt=group.row.prompt,
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
            "prompt": row.prompt,
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
                "prompt": torch.tensor(t.prompt, dtype=torch.int64),
                "tokens": torch.tensor(t.tokens, dtype=torch.int64),
                "kinds": torch.tensor(t.kinds, dtype=torch.int64),
                "logprobs": torch.tensor(t.logprobs, dtype=torch.float64),
                "versions": torch.tensor(t.versions, dtype=torch.int64),
                "finish": t.finish,
            }
            for t in group.rollouts
        ],
    }


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
