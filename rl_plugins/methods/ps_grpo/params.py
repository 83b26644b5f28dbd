"""Parameters of `ps_grpo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from rl_plugins import ConfigError, MethodParams, param
from rl_plugins.core.errors import pip_command
from rl_plugins.core.params import above

_SAMPLED, _LABELS = {"compare": "sampled"}, {"gamma": above(0)}


@dataclass(frozen=True)
class PsGrpoParams(MethodParams):
    set_column: str = param("paraphrase_set_id", "dataset column with the same value for all wordings of a set")
    similarity: Literal["bleu1", "bleu2", "rougeL", "f1", "em"] | Callable[..., Any] = param(
        "bleu2", "one of these, or a function similarity(hypotheses, references) of two lists of texts"
    )
    compare: Literal["sampled", "exact"] = param(
        "sampled", "texts compared with: a sample, or all of the other wordings"
    )
    kappa: int = param(3, "number of other wordings in the sample; all, if there are fewer", ge=1, only_if=_SAMPLED)
    s: int = param(1, "number of rollouts of each of them; all, if there are fewer", ge=1, only_if=_SAMPLED)
    alpha: float = param(1.0, "weight of the similarity", ge=0)
    gamma: float = param(1.0, "weight of the accuracy; 0: no labels are needed", ge=0)
    answer_column: str | None = param(
        None, "dataset column with the short answer or answers; none: the run's reward", only_if=_LABELS
    )

    def check(self) -> None:
        if self.alpha == self.gamma == 0:
            raise ConfigError("`alpha` and `gamma` are both 0, so every reward would be 0. Set one above 0.")
        if self.similarity == "rougeL" and find_spec("rapidfuzz") is None:
            raise ConfigError("`similarity: rougeL` needs rapidfuzz. Install it: " + pip_command("rouge"))
