"""Parameters of ARRoL (arXiv 2603.24840)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import ConfigError, param
from rl_plugins.core.params import GIVEN, above, below, has_effect
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.methods.arrol.survivors import Rule

# where parameters have an effect
_STOPS: dict[str, Any] = {"keep_ratio": below(1)}
_SURVIVAL = {**_STOPS, "selection": "survival"}
_DRAWN = {**_STOPS, "selection": ("survival", "balanced", "random")}
_AIMED = ({**_STOPS, "selection": ("balanced", "extremes")}, {**_SURVIVAL, "strength": above(0)})
_LOGPROBS = {"features": None}


@dataclass(frozen=True)
class ArrolParams(SuccessParams):
    """Parameters of `arrol`; those that end with (ours) are not the paper's."""

    detect_tokens: int = param(512, "L, number of tokens after which rollouts may be stopped", ge=1)
    keep_ratio: float = param(0.5, "K, share of unfinished rollouts that is continued; 1: all", gt=0, le=1)
    positive_ratio: float = param(0.5, "rho, share of right survivors that is aimed at", gt=0, lt=1, only_if=_AIMED)
    selection: Literal["survival", "balanced", "extremes", "random"] = param(
        "survival", "choice of survivors: by p_i (paper); the others are ours", only_if=_STOPS
    )
    strength: float = param(0.5, "strength of the correction in p_i", ge=0, only_if=_SURVIVAL)
    low: float = param(0.1, "smallest p_i", gt=0, le=1, only_if=_SURVIVAL)
    high: float = param(0.9, "largest p_i", gt=0, le=1, only_if=_SURVIVAL)
    independent: bool = param(True, "independent draws; false: exactly the expected number (ours)", only_if=_DRAWN)
    cold_start: int = param(20, "number of first batches without stopping", ge=0, only_if=_STOPS)
    min_keep: int = param(2, "least rollouts of a prompt that are continued (ours)", ge=1, only_if=_STOPS)
    top: int = param(
        0, "number of most likely tokens whose log-probs are features, too (ours)", ge=0, le=20, only_if=_LOGPROBS
    )
    features: Callable[..., Any] | None = param(
        None, "function features(contexts of token ids, cut to L) -> numbers per context; none: log-probs (ours)"
    )
    features_timeout: float = param(60.0, "longest call of `features`, in seconds", gt=0, only_if={"features": GIVEN})
    width: int = param(32, "number of hidden units of the head (ours)", ge=1)
    learning_rate: float = param(0.01, "learning rate of the head (ours)", gt=0)
    fit_steps: int = param(30, "number of passes over the window per generation batch (ours)", ge=1)
    window: int = param(2000, "last rollouts that head and calibration are fitted to (ours)", ge=10)
    bins: int = param(128, "number of bins of the calibration", ge=1, only_if=_STOPS)
    max_weight: float = param(10.0, "largest weight 1 / p in the fit; 1: none (ours)", ge=1, only_if=_DRAWN)

    def check(self) -> None:
        if has_effect(self, "low") and not self.low <= self.keep_ratio <= self.high:
            raise ConfigError(
                f"`keep_ratio` is {self.keep_ratio:g}, outside of `low` = {self.low:g} to `high` = {self.high:g}, "
                f"the limits of every rollout's probability, so it cannot be their mean. Change the limits."
            )

    @property
    def rule(self) -> Rule:
        return Rule(self.keep_ratio, self.positive_ratio, self.strength, self.low, self.high)
