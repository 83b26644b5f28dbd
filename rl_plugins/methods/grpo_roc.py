"""GRPO-RoC (arXiv 2508.20722): oversample, then keep the cleanest correct rollouts and any wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_plugins import ConfigError, Groups, Method, MethodError, MethodParams, Plan, Rollouts, Run, from_params, param
from rl_plugins.core.params import GIVEN
from rl_plugins.kit.oversampling import oversampled, to_keep
from rl_plugins.kit.texts import between

NO_TOOL_CALL = 0.5  # error penalty of a rollout without a tool call: between clean and failing ones
NO_ANSWER = 1.0  # format penalty of a rollout without a readable answer block
RTOL, ATOL = 1e-5, 1e-8  # rewards closer than this are equal, as in torch.allclose
_OWN = {"penalty": None}
_ERROR, _FORMAT = {**_OWN, "use_error": True}, {**_OWN, "use_format": True}
_DRAWN = [{"positive_selection": "inverse_prob", **of} for of in ({"penalty": GIVEN}, _ERROR, _FORMAT)]
_TOOL, _TURN = ("<tool_response>", "</tool_response>"), ("<|im_start|>assistant", "<|im_end|>")
Pick = Literal["top", "inverse_prob"]
Penalty = Callable[..., Any] | None


def _needs(p: Any) -> set[str]:
    if p.penalty is None:
        return {"raw_text"} if p.use_error or p.use_format else set()
    needs = getattr(p.penalty, "needs", ())
    return {needs} if isinstance(needs, str) else set(needs)


class GrpoRoc(Method):
    """Resample on Correct: generates too many rollouts and keeps the cleanest correct ones and the first wrong ones.

    For a prompt whose G rollouts are trained, N = ceil(oversample * G) are generated. Those with reward r >
    correct_threshold are correct, the others wrong; n of them have a reward. The penalty of a rollout is

        p = p_err + p_format                                              (0..2)
        p_err    = tool responses with the word "error" / tool responses, 0.5 without a tool response
        p_format = min((answer blocks - 1) / assistant turns, 1), 1 without a block or with unbalanced tags

    and the group is cut to G rollouts in its original proportion of wrong and correct:

        k_wrong = round(wrong * G / n),  k_correct = round(correct * G / n)          half to even
        if k_wrong   <= min(min_wrong, wrong):      k_wrong   = that minimum,  k_correct = G - k_wrong
        if k_correct <= min(min_correct, correct):  k_correct = that minimum,  k_wrong   = G - k_correct
        stay: the k_correct correct rollouts with the lowest penalty, and the first k_wrong wrong ones

    Symbols: reward and penalty (rows,) float64; a rollout of several rows (turns, agents) counts once, with their mean.
    G is the `n` of the plan, plus the spare rollouts of other methods that have not left yet; of a group that was not
    planned floor(N / oversample).

    Special cases: a group of equal rewards leaves before (`reject_equal_reward`). A group of n = G stays whole, one of
    n < G leaves with a warning, or stays (`short_groups`). Rollouts without a reward (NaN) do not count in n and leave.
    In a tie the rollout generated first stays.

    State: what was planned, from `plan` to `select` of one batch. `inverse_prob` draws from `self.rng`.

    Raises:
        ConfigError: min_wrong + min_correct > group size.
        MethodError: `penalty` returns something else than one finite number >= 0 per row.

    Source: arXiv 2508.20722, section 2.2.3; `roc.py`, `reject_sampling.py` in `rstar2_agent/down_sample` of the
    authors' code.
    """

    name = "grpo_roc"
    fidelity = "code"
    does = "Generates twice the rollouts and keeps the cleanest correct ones and any wrong ones"
    problems = ("agents", "no_signal")
    needs = from_params(lambda p: _needs(p))

    @dataclass(frozen=True)
    class Params(MethodParams):
        oversample: float = param(2.0, "rollouts generated per trained rollout (report: 2)", gt=1)
        penalty: Penalty = param(None, "function penalty(rollouts): (rows,) numbers >= 0, with `needs`; none: p")
        use_error: bool = param(True, "failing tool calls count in the penalty", only_if=_OWN)
        use_format: bool = param(True, "missing and repeated answer blocks count in the penalty", only_if=_OWN)
        min_wrong: int = param(2, "smallest number of wrong rollouts that stay, if there are that many", ge=0)
        min_correct: int = param(2, "smallest number of correct rollouts that stay, if there are that many", ge=0)
        reject_equal_reward: bool = param(True, "groups of equal rewards leave before the selection (code)")
        positive_selection: Pick = param("top", "lowest penalty (code), or drawn by 1 / (penalty + eps)")
        inverse_eps: float = param(0.1, "constant added to the penalty in `inverse_prob`", gt=0, only_if=_DRAWN)
        correct_threshold: float = param(0.0, "reward above which a rollout is correct")
        short_groups: Literal["drop", "keep"] = param("drop", "groups below the group size")
        error_keyword: str = param("error", "text that marks a failing tool response, in any case", only_if=_ERROR)
        tool_tags: tuple[str, ...] = param(_TOOL, "opening and closing tag of a tool response", only_if=_ERROR)
        answer_tags: tuple[str, ...] = param(("<answer>", "</answer>"), "tags of an answer block", only_if=_FORMAT)
        turn_tags: tuple[str, ...] = param(_TURN, "tags of an assistant turn", only_if=_FORMAT)
        count_first_turn: bool = param(True, "the turn that the prompt's template opened counts", only_if=_FORMAT)

        def check(self) -> None:
            for name in ("tool_tags", "answer_tags", "turn_tags"):
                if len(getattr(self, name)) != 2 or not all(getattr(self, name)):
                    raise ConfigError(
                        f"parameter `{name}` is {getattr(self, name)!r}; it must be two texts, the opening and the "
                        f"closing tag."
                    )

    def check(self, run: Run) -> None:
        p, size = self.params, run.group_size
        if p.min_wrong + p.min_correct > size:
            raise ConfigError(
                f"at least min_wrong + min_correct = {p.min_wrong} + {p.min_correct} rollouts of a group stay, but the "
                f"group size is {size}. Lower `min_wrong` or `min_correct`, or raise the group size."
            )

    def plan(self, plan: Plan) -> Plan:
        """ceil(oversample * n) rollouts for every n that are trained."""
        return oversampled(plan, self.params.oversample, self.state)

    def select(self, rollouts: Rollouts) -> Tensor:
        # One entry per rollout, by group and in generation order: decisions do not depend on the order of the rows.
        each, groups = rollouts.per_rollout.rows, rollouts.per_rollout.groups
        present = each.max(rollouts.kept.double()) > 0
        reward = torch.where(present, each.mean(rollouts.reward), torch.nan)
        penalty = each.mean(self._penalty(rollouts))
        correct, wrong = reward > self.params.correct_threshold, reward <= self.params.correct_threshold

        target = to_keep(self.state, self.params.oversample, groups, present)
        n = groups.sum((correct | wrong).double())
        equal = self._equal(groups, reward) & (n > 0)
        short = (n < target) & ~equal
        leaves = equal | (short & (self.params.short_groups == "drop"))
        k_correct, k_wrong = self._sizes(groups.sum(correct.double()), groups.sum(wrong.double()), target, leaves)
        cleanest = groups.top_k(torch.where(correct, self._preference(penalty), torch.nan), k_correct)
        first = groups.top_k(torch.where(wrong, 0.0, torch.nan), k_wrong)
        keep = cleanest | first

        self._report(n, correct, penalty, keep, equal, short)
        if self.traced:
            gone, of = present & ~keep, groups.rows
            whole = of(leaves)
            for rows, why in (
                (gone & of(equal), "all rewards of the group are equal"),
                (gone & whole & ~of(equal), "the group has too few scored rollouts"),
                (gone & ~whole & wrong, "wrong, and not among the first of its group"),
            ):
                self.note(each.rows(rows), why)
            self.note(torch.isnan(rollouts.reward) & each.rows(gone & ~whole), "no reward")
            text = "right, with a larger penalty than others of its group: {penalty:.2f}"
            self.note(each.rows(gone & ~whole & correct), text, penalty=each.rows(penalty))
        self.state.clear()
        return each.rows(keep) & ~torch.isnan(rollouts.reward)

    def _equal(self, groups: Groups, reward: Tensor) -> Tensor:
        """(count,) bool, groups that leave because their rewards are equal."""
        high, low = groups.max(reward), groups.min(reward)
        close = high - low <= ATOL + RTOL * torch.maximum(high.abs(), low.abs())
        return close & self.params.reject_equal_reward

    def _sizes(self, correct: Tensor, wrong: Tensor, target: Tensor, leaves: Tensor) -> tuple[Tensor, Tensor]:
        """(count,) correct and wrong rollouts of each group that stay: of a group that `leaves` none, of one with no
        more than `target` rollouts all, of a larger one the quota."""
        k_correct, k_wrong = _quota(correct, wrong, target, self.params.min_correct, self.params.min_wrong)
        whole = correct + wrong <= target
        k_correct, k_wrong = torch.where(whole, correct, k_correct), torch.where(whole, wrong, k_wrong)
        return torch.where(leaves, 0.0, k_correct), torch.where(leaves, 0.0, k_wrong)

    def _penalty(self, rollouts: Rollouts) -> Tensor:
        """(rows,) float64, lower is better."""
        p = self.params
        if p.penalty is not None:
            given: Tensor = torch.as_tensor(p.penalty(rollouts)).double()
            if given.shape != (len(rollouts),) or not bool((torch.isfinite(given) & (given >= 0)).all()):
                raise MethodError(
                    f"`penalty` must return one finite number >= 0 per row ({len(rollouts)}); it returned "
                    f"{_text(given)}."
                )
            return given
        total = torch.zeros(len(rollouts), dtype=torch.float64)
        if not (p.use_error or p.use_format):
            return total
        texts = rollouts.raw_text
        assert texts is not None  # named in `needs`
        errors = torch.tensor([self._error_ratio(t) for t in texts], dtype=torch.float64)
        formats = torch.tensor([self._format_penalty(t) for t in texts], dtype=torch.float64)
        scored = rollouts.reward > p.correct_threshold
        self.log("tool_errors", errors[scored].nanmean())
        if len(texts) and bool(torch.isnan(errors).all()) and bool((formats == NO_ANSWER).all()):
            self.warn(
                f"no completion of a batch has a tool response ({p.tool_tags[0]}) or a readable answer block "
                f"({p.answer_tags[0]}), so all penalties are equal and which correct rollouts stay is arbitrary. Set "
                f"`tool_tags`, `answer_tags` and `turn_tags` to what the model's template uses, or give a `penalty`."
            )
        if p.use_error:
            total = total + errors.nan_to_num(nan=NO_TOOL_CALL)
        return total + formats if p.use_format else total

    def _error_ratio(self, text: str) -> float:
        """Failing tool responses / tool responses, NaN without any."""
        responses = between(text, *self.params.tool_tags)
        keyword = self.params.error_keyword.lower()
        return sum(keyword in r.lower() for r in responses) / len(responses) if responses else math.nan

    def _format_penalty(self, text: str) -> float:
        p = self.params
        blocks = len(between(text, *p.answer_tags))
        if blocks == 0 or any(text.count(tag) != blocks for tag in p.answer_tags):
            return NO_ANSWER
        if p.count_first_turn and not text.lstrip().startswith(p.turn_tags[0]):
            text = p.turn_tags[0] + text
        turns = len(between(text, *p.turn_tags))
        return min((blocks - 1) / turns, 1.0) if turns else NO_ANSWER

    def _preference(self, penalty: Tensor) -> Tensor:
        """(rollouts,) correct rollouts with the highest values stay."""
        if self.params.positive_selection == "top":
            return -penalty
        # Gumbel noise on log-weights: the top k are a draw without replacement by these weights.
        noise = torch.from_numpy(self.rng("correct").gumbel(size=len(penalty)))
        return noise - torch.log(penalty + self.params.inverse_eps)

    def _report(self, n: Tensor, correct: Tensor, penalty: Tensor, keep: Tensor, equal: Tensor, short: Tensor) -> None:
        self.log("correct", correct.sum() / n.sum(), weight=n.sum())
        self.log("penalty_correct", penalty[correct].mean())
        self.log("penalty_kept", penalty[correct & keep].mean())
        self.log("kept", keep.sum(), "sum")
        self.log("equal_groups", equal.sum(), "sum")
        self.log("short_groups", short.sum(), "sum")
        if bool(short.any()):
            became = "leave" if self.params.short_groups == "drop" else "are trained as they are"
            self.warn(
                f"groups with fewer rewarded rollouts than the group size {became} (metric grpo_roc/short_groups; "
                f"parameter `short_groups`)."
            )
        if len(keep) and not bool(keep.any()):
            self.warn(
                "no rollout of a batch stays, so it is not trained: all groups have equal rewards "
                "or too few rollouts. If this is frequent, the prompts are too easy or too hard."
            )


def _quota(correct: Tensor, wrong: Tensor, target: Tensor, min_correct: int, min_wrong: int) -> tuple[Tensor, Tensor]:
    """(count,) correct and wrong rollouts that stay of groups with more than `target` of them; they add up to it."""
    total = (correct + wrong).clamp(min=1)
    k_wrong, k_correct = torch.round(wrong * target / total), torch.round(correct * target / total)
    # The target may be smaller than the minimum numbers where another method's plan has fewer rollouts than the host.
    least_correct, least_wrong = torch.minimum(correct.clamp(max=min_correct), target), wrong.clamp(max=min_wrong)
    few = k_wrong <= least_wrong
    k_wrong, k_correct = torch.where(few, least_wrong, k_wrong), torch.where(few, target - least_wrong, k_correct)
    few = k_correct <= least_correct
    k_correct, k_wrong = torch.where(few, least_correct, k_correct), torch.where(few, target - least_correct, k_wrong)
    # Two halves that both round down (odd target) lose a rollout, which the correct ones get. Last of all: the same
    # line before the minimum rules would change other groups.
    return target - k_wrong, k_wrong


def _text(given: Tensor) -> str:
    if given.ndim != 1 or not len(given):
        return f"shape {tuple(given.shape)}"
    return f"shape {tuple(given.shape)} with values from {float(given.min()):g} to {float(given.max()):g}"
