"""Parameters of `scope`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import ConfigError, param
from rl_plugins.core.params import GIVEN
from rl_plugins.kit.prompt_memory import SuccessParams

HINT = "A correct solution, which must not be mentioned in the answer:\n{solution}"
_OWN, _OTHER = {"corrector": None}, {"corrector": GIVEN}
Function = Callable[..., Any] | None


@dataclass(frozen=True)
class ScopeParams(SuccessParams):
    prm: Function = param(None, "function prm(messages, steps, columns): a score per reasoning step; required")
    corrector: Function = param(
        None, "function corrector(messages, prefix, columns): the rest as text; none: the policy"
    )
    solution_column: str = param("solution", "dataset column with a right answer", only_if=_OWN)
    hint: str = param(HINT, "text with {solution} that ends the prompt's last message", only_if=_OWN)
    extent: Literal["suffix", "step"] = param("suffix", "extent of the correction: the rest, or one reasoning step")
    threshold: float = param(0.5, "score below which a reasoning step is wrong")
    no_error: Literal["skip", "lowest"] = param("skip", "treatment of a wrong rollout without a wrong reasoning step")
    min_prefix: float = param(0.5, "smallest share of the reasoning steps that must precede the wrong one", ge=0, le=1)
    rank: Literal["prefix", "score"] = param("prefix", "order of correction: by longest right part, or by mean score")
    corrections: int = param(1, "most rollouts of a group that are corrected", ge=1)
    min_correct: int = param(1, "number of right rollouts at which a group is unchanged", ge=1)
    separator: str = param("\n\n", "text between two reasoning steps")
    min_step: int = param(5, "smallest number of tokens of a reasoning step; a shorter one is joined to the next", ge=0)
    off_policy: Literal["shaped", "sft", "plain"] = param("shaped", "loss of the corrector's tokens")
    gamma: float = param(0.1, "gamma of the shaped loss (LUFFY)", gt=0, only_if={"off_policy": "shaped"})
    clip_low: float = param(0.2, "lower clip range of own tokens", ge=0, le=1)
    clip_high: float = param(0.2, "upper clip range of own tokens", ge=0, allow_inf=True)
    prm_timeout: float = param(60.0, "time limit of one call of `prm`, in seconds", gt=0)
    corrector_timeout: float = param(120.0, "time limit of a call of `corrector`, in seconds", gt=0, only_if=_OTHER)

    def check(self) -> None:
        if not self.separator:
            raise ConfigError("`separator` is empty. Give the text between two reasoning steps, such as a blank line.")
        if self.corrector is None and "{solution}" not in self.hint:
            raise ConfigError(f"`hint` is {self.hint!r}; without a corrector it must have {{solution}} in it.")
