"""A method whose hook raises, in one process or in all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rl_plugins import Method, MethodParams, Rollouts, Terms, Update, param, ppo_clip


class DummyFails(Method):
    """Raises ZeroDivisionError in the hook named by `hook`, from the generation batch or call numbered `after` on.

    With the environment variable DUMMY_FAILS_ON_RANK the hooks of the update place raise in the process of that RANK
    only. `advantages` runs on the driver alone. Source: none, this is for tests.
    """

    name = "dummy_fails"
    fidelity = "paper"

    @dataclass(frozen=True)
    class Params(MethodParams):
        hook: Literal["advantages", "before_update", "policy_loss"] = param("advantages", "the hook that raises")
        after: int = param(0, "calls of that hook that succeed first", ge=0)

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self._calls = 0

    def advantages(self, rollouts: Rollouts) -> Tensor:
        self._fail("advantages", any_rank=True)
        return (rollouts.reward - rollouts.groups.rows(rollouts.groups.mean(rollouts.reward))).nan_to_num(0.0)

    def before_update(self, rows: Any) -> Update | None:
        self._fail("before_update")
        return None

    def policy_loss(self, terms: Terms) -> Tensor:
        self._fail("policy_loss")
        return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages)

    def _fail(self, hook: str, any_rank: bool = False) -> None:
        if hook != self.params.hook:
            return
        self._calls += 1
        rank = os.environ.get("DUMMY_FAILS_ON_RANK")
        here = any_rank or rank is None or rank == os.environ.get("RANK", "0")
        if here and self._calls > self.params.after:
            raise ZeroDivisionError(f"asked to fail in {hook} on rank {os.environ.get('RANK', '0')}")
