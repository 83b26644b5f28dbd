"""Claims of messages between agents: who made them, from which others, in which round, and what became of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rl_plugins.core.errors import MethodError, shown
from rl_plugins.kit.texts import normalized

TAG = "[unverified]"  # before a released claim that nobody verified
_TAGS = re.compile(rf"\A(?:{re.escape(TAG)}\s*)+")
Status = Literal["confirmed", "entailed", "unverified", "rejected"]


@dataclass(frozen=True)
class Claim:
    """One claim of one message.

    Attributes:
        id: its number in the lineage.
        text: as the message has it.
        author: the sender of the message.
        parents: ids of claims it repeats, follows from or contradicts; all smaller than its own.
        status: confirmed (given, or verified: later claims are compared with it), entailed (follows from confirmed
            ones), unverified, or rejected.
        round: of the message.
        released: the receiver read it.
    """

    id: int
    text: str
    author: str
    parents: tuple[int, ...]
    status: Status
    round: int
    released: bool


@dataclass
class Lineage:
    """The claims of one rollout, in the order they were made. Acyclic: a parent is older than its child.

    Attributes:
        claims: `claims[i].id == i`.
    """

    claims: list[Claim] = field(default_factory=list)

    def __post_init__(self) -> None:
        given, self.claims = self.claims, []
        self._last: dict[str, int] = {}
        self._confirmed: dict[str, int] = {}
        for c in given:
            self.add(c.text, c.author, c.status, c.round, parents=c.parents, released=c.released)

    def add(
        self,
        text: str,
        author: str,
        status: Status,
        round: int = 0,
        *,
        parents: Sequence[int] = (),
        released: bool = True,
    ) -> Claim:
        """A new claim. An earlier claim with the same words becomes its parent.

        Raises:
            MethodError: a parent that does not exist yet, or an unknown status.
        """
        here = len(self.claims)
        if status not in get_args(Status):
            raise MethodError(
                f"The status of a claim is {shown(status)}. It must be one of {', '.join(get_args(Status))}."
            )
        if not all(0 <= p < here for p in parents):
            raise MethodError(
                f"Claim {here} has the parents {shown(list(parents))}. They must be ids of earlier claims."
            )
        same = key(text)
        older = {*parents, self._last[same]} if same in self._last else set(parents)
        claim = Claim(here, text, author, tuple(sorted(older)), status, round, released)
        self.claims.append(claim)
        self._last[same] = here
        if status == "confirmed":
            self._confirmed.setdefault(same, here)
        return claim

    def confirmed(self) -> list[Claim]:
        """Claims that later ones are compared with, each text once."""
        return [self.claims[i] for i in self._confirmed.values()]

    def confirmed_as(self, text: str) -> Claim | None:
        """The confirmed claim with the same words."""
        i = self._confirmed.get(key(text))
        return None if i is None else self.claims[i]

    def ancestors(self, id: int) -> list[Claim]:
        """All claims it goes back to, oldest first, without itself."""
        found: set[int] = set()
        todo = list(self.claims[id].parents)
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo += self.claims[i].parents
        return [self.claims[i] for i in sorted(found)]

    def origins(self, id: int) -> list[Claim]:
        """The claims without parents it goes back to; itself if it has none."""
        return [c for c in [*self.ancestors(id), self.claims[id]] if not c.parents]

    @classmethod
    def from_log(cls, records: Iterable[Mapping[str, Any]]) -> Lineage:
        """The lineage that the records of a guard tell of, claim for claim."""
        lineage = cls()
        for record in records:
            for c in record["claims"]:
                lineage.add(
                    c["text"],
                    record["sender"],
                    c["status"],
                    record["round"],
                    parents=c["parents"],
                    released=c["released"],
                )
        return lineage


def key(text: str) -> str:
    """A text without case, runs of white space, end marks and the tag: equal for claims with the same words."""
    words = " ".join(normalized(text).casefold().split())
    return _TAGS.sub("", words).strip(" .!?;,*-")
