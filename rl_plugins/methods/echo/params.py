"""Parameters of `echo`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_plugins import ConfigError, MethodParams, param
from rl_plugins.core.params import GIVEN, above

_BRANCHES = {"max_branches": above(1)}
_GROUP = (_BRANCHES, {"prune_threshold": GIVEN})
_TAIL, _RISE = {"tail_threshold": GIVEN}, {"delta_upper": GIVEN}
_ENTROPY = (_BRANCHES, _RISE)


@dataclass(frozen=True)
class EchoTreeParams(MethodParams):
    logprob_top_k: int = param(10, "number of most likely tokens that the engine reports", ge=2)
    confidence_top_k: int = param(5, "number of these that count for the confidence", ge=1, only_if=(*_GROUP, _TAIL))
    min_depth: int = param(4, "first place that may branch", ge=0, only_if=_BRANCHES)
    entropy_high: float = param(1.9, "lowest H that branches, in nats; below ln logprob_top_k", gt=0, only_if=_BRANCHES)
    entropy_low: float = param(
        0.55, "entropy at which alpha adds nothing to the width", ge=0, only_if={**_BRANCHES, "alpha": above(0)}
    )
    entropy_delta_threshold: float = param(0.2, "smallest rise of the entropy that branches", only_if=_BRANCHES)
    branch_threshold: float = param(4.0, "largest G that branches; above ln confidence_top_k", gt=0, only_if=_BRANCHES)
    min_branches: int = param(1, "smallest number of branches", ge=1, only_if=_BRANCHES)
    max_branches: int = param(4, "largest number of branches; 1: nothing branches", ge=1)
    alpha: float = param(2.0, "growth of the width with entropy", ge=0, only_if=_BRANCHES)
    beta: float = param(1.0, "growth of the width with lack of confidence", ge=0, only_if=_BRANCHES)
    entropy_window: int = param(4, "places before a token that its entropy is compared with", ge=1, only_if=_ENTROPY)
    group_window: int = param(4, "number of places of G", ge=1, only_if=_GROUP)
    tail_window: int = param(8, "number of places of L", ge=1, only_if=_TAIL)
    prune_threshold: float | None = param(None, "group confidence below which a response is cut; none: never", gt=0)
    tail_threshold: float | None = param(None, "largest L at which a falling tail is cut; none: never", gt=0)
    tail_decline_steps: int = param(3, "places in a row that the tail must have fallen", ge=1, only_if=_TAIL)
    delta_upper: float | None = param(None, "rise of the entropy above which a response is cut; none: never", ge=0)
    delta_rise_steps: int = param(3, "places in a row that the entropy must have risen", ge=1, only_if=_RISE)

    def check(self) -> None:
        highest, least = math.log(self.logprob_top_k), math.log(self.confidence_top_k)
        if self.confidence_top_k > self.logprob_top_k or self.max_branches > self.logprob_top_k:
            raise ConfigError(
                f"`logprob_top_k` is {self.logprob_top_k}; `confidence_top_k` ({self.confidence_top_k}) and "
                f"`max_branches` ({self.max_branches}) are taken from these tokens and cannot be more."
            )
        branches = self.max_branches > 1
        if branches and not self.entropy_low < self.entropy_high < highest:
            raise ConfigError(
                f"`entropy_low` is {self.entropy_low:g} and `entropy_high` {self.entropy_high:g}; the first must "
                f"be less, and the second below ln logprob_top_k = {highest:.3g}, the largest there can be: else "
                f"nothing ever branches. Lower them, or raise `logprob_top_k`."
            )
        if self.min_branches > self.max_branches:
            raise ConfigError(
                f"`min_branches` is {self.min_branches}, more than `max_branches` ({self.max_branches}). Lower it."
            )
        for name in ("branch_threshold", "prune_threshold", "tail_threshold"):
            value = getattr(self, name)
            if value is not None and value <= least and (branches or name != "branch_threshold"):
                raise ConfigError(
                    f"`{name}` is {value:g}, but the confidence is never below ln confidence_top_k = {least:.3g}, "
                    f"so it would never act. Give a larger value{' or none' * (name != 'branch_threshold')}."
                )
