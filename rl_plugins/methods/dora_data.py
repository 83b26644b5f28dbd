"""Data control of DORA (arXiv 2509.18883): groups without signal leave, and unreliable rows are masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import (
    ConfigError,
    Idle,
    Method,
    MethodError,
    MethodParams,
    Rollouts,
    Run,
    Shape,
    Tokens,
    from_params,
    param,
    signals,
)
from rl_plugins.core.rollouts import Jagged
from rl_plugins.kit.start_checks import refuse_beyond_completion

MASKED = {"truncated": ("mask", "mask_unscored")}


class DoraData(Method):
    """Drops groups of mean accuracy 0 or 1, and masks failed gradings and truncated rows that are no loops.

    Per batch, in this order:

        a row whose `failed_column` is true has no reward (NaN): out of every statistic, advantage 0
        a row of several versions leaves, if `pure: drop`
        a group leaves if the accuracies of its scored rows are all 0 or all 1, or if no row is scored
        a truncated row that does not end in a repetition loop gets the advantage 0

    A masked row stays in its group: the loss divides by it as by any other. With `truncated: mask` its reward counts in
    the mean and deviation of the group; with `mask_unscored` it has no reward. A completion ends in a loop if its last
    `loop_tokens` tokens repeat with a period of at most `loop_period`; then it keeps its advantage, to be unlearned.

    Symbols: accuracy is the reward function `accuracy`, or the weighted reward. Versions are published weights.

    Special cases: with `pure: drop` only pure rows count in their group. A group of one row leaves if it is right or
    wrong. A row whose reward function returned nothing is a failed grading. A KL term still trains masked rows.

    Raises:
        ConfigError, MethodError: no reward function `accuracy`; a value of `failed_column` that is no truth value.

    Source: arXiv 2509.18883, section on reinforcement learning. The loop detection is ours."""

    name = "dora_data"
    fidelity = "paper"
    does = "Drops groups without signal and masks rows whose grading failed or that were cut off"
    problems = ("no_signal",)
    needs = from_params(lambda p: signals(columns=[p.failed_column], token_ids=p.truncated != "keep"))
    idle = (Idle({"dropped_groups": 0, "failed": 0, "truncated_masked": 0}, "nothing left: look at `accuracy`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        accuracy: str | None = param(None, "reward function that is the accuracy; none: the weighted reward")
        failed_column: str | None = param(None, "column that is true where grading failed; none: no such column")
        truncated: Literal["mask", "mask_unscored", "keep"] = param("mask", "truncated rows that are no loops")
        loop_tokens: int = param(64, "tokens at the end of a completion that must repeat", ge=2, only_if=MASKED)
        loop_period: int = param(16, "longest period of a repetition loop, in tokens", ge=1, only_if=MASKED)
        pure: Literal["keep", "drop"] = param("keep", "treatment of rows that several versions made")

        def check(self) -> None:
            if self.loop_period * 2 > self.loop_tokens and self.truncated != "keep":
                most, given = self.loop_tokens // 2, self.loop_period
                raise ConfigError(f"`loop_period` is {given}. A loop repeats at least once: give at most {most}.")

    def check(self, run: Run) -> None:
        if self.params.accuracy is not None and run.reward_names and self.params.accuracy not in run.reward_names:
            raise ConfigError(
                f"`accuracy` is {self.params.accuracy!r}. The reward functions are {', '.join(run.reward_names)}. Set "
                f"method_params.dora_data.accuracy to one of them."
            )

        if self.params.loop_tokens != type(self.params).loop_tokens:  # the default asks for nothing
            refuse_beyond_completion(run, "loop_tokens", self.params.loop_tokens, "no loop is ever found")

    def rewards(self, rollouts: Rollouts) -> Tensor:
        unscored = self._failed(rollouts)
        self.log("failed", (unscored | torch.isnan(rollouts.reward)).double().mean())
        self.note(unscored, "the scorer failed")
        if self.params.truncated == "mask_unscored":
            unscored = unscored | self._masked(rollouts)
        return torch.where(unscored, torch.nan, rollouts.reward)

    def select(self, rollouts: Rollouts) -> Tensor:
        mixed = rollouts.newest_version != rollouts.version
        self.log("mixed", mixed.double().mean())
        keep = rollouts.kept & ~mixed if self.params.pure == "drop" else rollouts.kept
        groups, accuracy = rollouts.groups, torch.where(keep, self._accuracy(rollouts), torch.nan)
        low, high = groups.min(accuracy), groups.max(accuracy)
        signal = ~torch.isnan(low) & ~((low == high) & ((low == 0) | (low == 1)))
        self.log("dropped_groups", (~signal).double().mean())
        if self.traced:
            self.note(mixed & (self.params.pure == "drop"), "several versions of the policy made it")
            text = "the group has no signal: accuracies {low:.2f} to {high:.2f}"
            self.note(keep & groups.rows(~signal), text, low=groups.rows(low), high=groups.rows(high))
        return keep & groups.rows(signal)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        if self.params.truncated != "mask":
            return None
        return Shape(row_factor=(~self._masked(rollouts)).double())

    def _accuracy(self, rollouts: Rollouts) -> Tensor:
        """(rows,) accuracy; NaN for rows without a reward."""
        name, names = self.params.accuracy, rollouts.reward_names
        if name is None:
            return rollouts.reward
        if name not in names:
            raise MethodError(
                f"`accuracy` is {name!r}. The reward functions are {', '.join(names)}. Set "
                f"method_params.dora_data.accuracy to one of them."
            )
        return torch.where(torch.isnan(rollouts.reward), torch.nan, rollouts.rewards[:, names.index(name)])

    def _failed(self, rollouts: Rollouts) -> Tensor:
        """(rows,) bool."""
        name = self.params.failed_column
        if name is None:
            return torch.zeros(len(rollouts), dtype=torch.bool)
        values = [0 if v is None else v for v in rollouts.meta[name]]
        wrong = next((v for v in values if v not in (0, 1)), None)
        if wrong is not None:
            raise MethodError(
                f"the column `{name}` has the value {wrong!r}; it must be true or false (1 or 0) in every row, or None "
                f"(false). Change the column, or method_params.dora_data.failed_column."
            )
        return torch.tensor([bool(v) for v in values], dtype=torch.bool)

    def _masked(self, rollouts: Rollouts) -> Tensor:
        """(rows,) bool: truncated, and no repetition loop."""
        p, ids = self.params, rollouts.token_ids
        assert ids is not None  # in `needs`
        loops = torch.zeros_like(rollouts.truncated)
        rows = rollouts.truncated.nonzero()[:, 0]
        loops[rows] = ends_in_loop(ids.completion.take(rows), p.loop_tokens, p.loop_period)
        self.log("loops", loops.double().mean())
        masked = rollouts.truncated & ~loops
        self.log("truncated_masked", masked.double().mean())
        return masked


def ends_in_loop(completions: Jagged, tokens: int, period: int) -> Tensor:
    """(completions,) bool: whether the last `tokens` tokens repeat with a period of at most `period` tokens. A shorter
    completion does not."""
    result = completions.length >= tokens
    ends = completions.values[completions.offsets[1:][result][:, None] - tokens + torch.arange(tokens)]
    result[result.clone()] = torch.stack([(ends[:, p:] == ends[:, :-p]).all(1) for p in range(1, period + 1)]).any(0)
    return result
