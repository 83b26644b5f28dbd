"""Parameters of `fission_grpo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import MethodParams, param
from rl_plugins.core.params import GIVEN

_ERRORS = {"message": GIVEN}


@dataclass(frozen=True)
class FissionParams(MethodParams):
    share: float = param(0.25, "largest share of a batch's rows for recovery (ours)", gt=0, le=1)
    group_size: int | None = param(None, "number of rollouts of a recovery prompt; none: the host's (ours)", ge=2)
    trigger: int = param(1, "number of entries that the pool must hold before any is served (ours)", ge=1)
    every: int = param(1, "number of batches from one recovery to the next (ours)", ge=1)
    capacity: int = param(256, "most entries of the pool (ours)", ge=1)
    max_age: int = param(4, "largest age of an entry, in batches (ours)", ge=1)
    max_per_prompt: int = param(1, "most errors of a prompt that are kept per batch (ours)", ge=1)
    max_depth: int = param(1, "most recoveries in a row; 1: none for a failed one (ours)", ge=1)
    max_characters: int = param(20_000, "most characters of a recovery's messages (ours)", ge=1)
    error_threshold: float = param(0.5, "lowest reward that is not an error (ours)")
    correctness: str | None = param(None, "name of the reward function that identifies errors; none: the total reward")
    error_column: str | None = param(None, "column of the rows with the environment's own error text")
    message: Callable[..., Any] | None = param(
        None, "function message(error) of a dict with prompt, answer, gold, tools; none: rules"
    )
    message_timeout: float = param(60.0, "time limit of one call of `message`, in seconds", gt=0, only_if=_ERRORS)
    prompt_column: str = param("prompt", "dataset column with the prompt")
    gold_column: str | None = param(None, "dataset column with the right calls")
    tools_column: str | None = param(None, "dataset column with the schemas of the tools")
    role: Literal["tool", "user"] = param("tool", "role of the error message; user for templates without tools")
