"""Parameters of `reward_audit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import MethodParams, param
from rl_plugins.core.params import FUNCTION

BEFORE, DURING = {"preflight": True}, {"online": True}
Action = Literal["warn", "quarantine", "stop"]
Function = Callable[..., Any] | None
_CHECKED = {"verifier": FUNCTION}


@dataclass(frozen=True)
class RewardAuditParams(MethodParams):
    preflight: bool = param(True, "audit of reward functions and dataset before the first step")
    online: bool = param(True, "audit of rewards during training")
    on_preflight: Action = param("stop", "action on critical findings before training", only_if=BEFORE)
    on_training: Action = param("quarantine", "action on critical findings during training", only_if=DURING)
    answer_column: str = param("", "column of the right answer; empty: the first known one", only_if=BEFORE)
    gold_renderer: Function = param(None, "function (answer, row): the answer as a completion; none: seven forms")
    corrupter: Function = param(None, "function (answer, row, rng): wrong answers; none: other numbers or texts")
    answer_extractor: Function = param(None, "function (completion): its answer; none: the boxed or last number")
    verifier: Function = param(None, "function (row, completion): 1 is right, 0 is wrong; none: no shadow check")
    verify_share: float = param(0.05, "rho, share of rollouts that the verifier judges", gt=0, le=1, only_if=_CHECKED)
    wrong_answers: int = param(2, "C, wrong answers of each row", ge=1, le=3, only_if=BEFORE)
    max_rows: int = param(10_000, "dataset rows that are looked at", ge=1, only_if=BEFORE)
    tol: float = param(1e-6, "largest difference of equal rewards, as a share of their span", ge=0, only_if=BEFORE)
    tol_stochastic: float = param(
        0.0, "allowed difference of two calls, as a share of the reward's span", ge=0, only_if=BEFORE
    )
    tau: float = param(0.85, "Jaccard index of nearly equal prompts", gt=0, le=1, only_if=BEFORE)
    delta: float = param(0.5, "difference of two rewards that is told, as a share of the span", gt=0, only_if=BEFORE)
    declared_prompt_features: tuple[str, ...] = param((), "features that the reward may depend on", only_if=BEFORE)
    n_min: int = param(8, "fewest groups of a feature that is tested", ge=2, only_if=DURING)
    alpha: float = param(0.01, "level of the tests", gt=0, lt=1, only_if=DURING)
    window: int = param(20_000, "W, groups that the statistics remember", ge=16, only_if=DURING)
    every_n_batches: int = param(10, "batches between two tests", ge=1, only_if=DURING)
    max_features: int = param(100_000, "features that are counted", ge=1, only_if=DURING)
    source_column: str = param("data_source", "column inside whose values the permutation test draws", only_if=DURING)
    allow_change: bool = param(False, "a resumed run may have other reward code, data or config")
