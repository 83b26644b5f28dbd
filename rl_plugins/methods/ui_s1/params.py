"""Parameters of `ui_s1`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_plugins import MethodParams, param
from rl_plugins.core.params import above

_RETURNS = ({"step_weight": above(0)}, {"episode_source": "rollout_return"}, {"filter_by": "first_return"})
_EPISODE, _FILTERED = {"episode_weight": above(0)}, {"filter_by": ("first_return", "advantages")}


@dataclass(frozen=True)
class UiS1Params(MethodParams):
    gamma: float = param(0.5, "discount of the rewards of later turns", ge=0, le=1, only_if=_RETURNS)
    include_first_mismatch: bool = param(
        False, "the first mismatch counts in returns before it", only_if={"gamma": above(0)}
    )
    episode_source: Literal["step_reward", "rollout_return"] = param(
        "step_reward", "values of A_epi: turns' rewards (code) or rollouts' returns (paper)", only_if=_EPISODE
    )
    episode_weight: float = param(1.0, "weight of the episode advantage", ge=0)
    step_weight: float = param(1.0, "weight of the turn's advantage (the paper's step advantage)", ge=0)
    scale: Literal["std", "none"] = param("std", "divisor of the advantages: std + std_eps, or none")
    std_eps: float = param(1e-6, "constant added to the standard deviation", gt=0, only_if={"scale": "std"})
    filter_by: Literal["first_return", "advantages", "none"] = param(
        "first_return", "spread that decides which tasks stay: of R_0 (code), of the advantages (paper)"
    )
    filter_std: float = param(0.3, "standard deviation above which a task stays", ge=0, only_if=_FILTERED)
    rows_per_rollout: int = param(16, "most rows of the batch per rollout: turns of the longest task", ge=1)
