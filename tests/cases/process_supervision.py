"""`process_supervision` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from rl_plugins.core.rollouts import Jagged
from rl_plugins.testing.contract.effects import World


def in_steps(r: Any) -> Any:
    """Every second token ends a step."""
    ids = r.token_ids
    if ids is None:
        return r
    values = ids.completion.values.clone()
    values[::2] = ord("|")
    return r.replace(token_ids=type(ids)(ids.prompt, Jagged(values, ids.completion.offsets), ids.observed))


CASE = Case(effects=Effects(World(prepare=in_steps), {"separator": ["|"]}))
