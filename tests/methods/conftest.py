"""In every test of a method, no batch takes more rounds and rollouts than `further_rounds` says of its first plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rl_plugins.core.rollouts import Plan, PlanRow
from rl_plugins.runtime.rounds import Rounds, most_in_rounds


@pytest.fixture(scope="module", autouse=True)
def bounded_rounds() -> Iterator[None]:
    more = Rounds.more

    def checked(self: Rounds, *args: Any) -> tuple[PlanRow, ...]:
        if not self.number:
            first = Plan(tuple(self.rows), self.group_size, self.budget - sum(row.n for row in self.rows))
            self.bound = most_in_rounds(self.stack, first)  # type: ignore[attr-defined]
        found = more(self, *args)
        made = sum(max(0, row.n + row.spare - len(row.given)) for row in self.rows)
        number = self.number + bool(found)
        rounds, rollouts = self.bound  # type: ignore[attr-defined]
        assert number <= rounds and made <= rollouts, (number, made, self.bound)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "more", checked)
        yield
