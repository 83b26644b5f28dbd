"""BroRL (arXiv 2510.01180): hundreds of rollouts per prompt, and advantages normalized over the batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_plugins import ConfigError, Groups, Idle, Method, MethodError, from_params, param
from rl_plugins.core.estimators import centered_rewards
from rl_plugins.core.groups import joint
from rl_plugins.core.params import GIVEN
from rl_plugins.core.rollouts import Plan, Rollouts, Rows, Run, Update
from rl_plugins.kit.prompt_memory import SuccessParams

NORMALIZED = {"norm_over": ("trajectory", "token")}
POWERS = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}


class BroRL(Method):
    """Broadened RL: leaves a training plateau with N = 512 rollouts per prompt instead of 16.

    Of the N rollouts of a prompt with rewards r_i, over all groups of a generation batch:

        groups whose rewards are all equal leave                  (`dynamic_sampling`)
        c_i = r_i - mean of the group
        A_i = (c_i - mean c) / (std c + eps)                      over the trajectories of all groups that are left
              (c_i - mean c) / sqrt(var c + eps)                  `norm_over: token`, over their tokens;   c_i: `none`

    N is the host's number. With a `ramp` of pairs (batch, N) the plan has, from that generation batch on, floor(rows /
    N) prompts of N rollouts in the same number of rows. With `base_rows`, the rows per optimizer step that the host's
    learning rate was tuned for, an optimizer step of B trained rows has

        lr <- lr (B / base_rows)^p          p = 1/2 (`sqrt`), 1 (`linear`), 0 (`none`); this step only

    The paper's B is the rows of a whole batch, from 512 prompts with 16 rollouts (8192) to 128 with 512: a factor of
    sqrt(8) = 2.83 at as many optimizer steps per batch. It fills a batch again after dynamic sampling, until 128
    prompts are left; here a batch is as large as what is left of it.

    Symbols: r, c, A (rows,) float64; deviations have the divisor n - 1.

    Special cases: rollouts without a reward (NaN) are in no statistic and have A = 0; a group with fewer than two
    scored rollouts leaves, or has A = 0. Rewards that differ by less than 1e-6 of their size are equal. A rollout of
    several rows counts once, with the mean of their rewards and the sum of their tokens; B counts rows. A ramp's N that
    does not divide the rows leaves fewer than N empty. Groups of given completions are unchanged.

    Raises:
        ConfigError: batches of a ramp out of order.
        MethodError: a batch has fewer rows than the N of the ramp.

    Source: arXiv 2510.01180v1, sections 2 to 4, tables 1 and 2, appendices A to D. No code was found.
    """

    name = "brorl"
    fidelity = "paper"
    does = "Trains with hundreds of rollouts per prompt and scales the learning rate to the batch"
    problems = ("exploration", "no_signal")
    needs = frozenset({"text", "several_rollouts"})
    decides_rollouts = from_params(lambda p: bool(p.ramp))
    idle = (Idle({"signal": 0.0}, "all rewards within each group are equal: too easy, too hard, or N is too small."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        norm_over: Literal["trajectory", "token", "none"] = param(
            "trajectory", "units that count in mean and deviation"
        )
        eps: float = param(1e-8, "constant added to deviation or variance", gt=0, only_if=NORMALIZED)
        dynamic_sampling: bool = param(True, "removal of groups whose rewards are all equal")
        ramp: tuple[tuple[int, ...], ...] = param((), "pairs [first generation batch, N]; empty: the host's number")
        base_rows: int | None = param(None, "rows per step that the learning rate was tuned for; none: no change", ge=1)
        lr_scale: Literal["sqrt", "linear", "none"] = param("sqrt", "scaling of the rate", only_if={"base_rows": GIVEN})
        success_threshold: float = param(
            0.5, "lowest reward, the weighted sum of the functions, that counts as a success in the logs"
        )
        answer: Callable[..., Any] | None = param(
            None, "function answer(text) -> answer or None, to count answers; none: the text"
        )

        def check(self) -> None:
            for i, pair in enumerate(self.ramp):
                if len(pair) != 2 or pair[0] < 0 or pair[1] < 2:
                    raise ConfigError(
                        f"`ramp` has the entry {list(pair[:4])}; each must be two whole numbers, a generation batch "
                        f"from 0 and rollouts per prompt from 2: [[0, 16], [100, 64]]."
                    )
                if i and pair[0] <= self.ramp[i - 1][0]:
                    raise ConfigError(
                        f"`ramp` has batch {pair[0]} after batch {self.ramp[i - 1][0]}; batches must ascend."
                    )

    def check(self, run: Run) -> None:
        largest = max((n for _, n in self.params.ramp), default=0)
        if run.batch_rows is not None and largest > run.batch_rows:
            raise ConfigError(_too_small(largest, run.batch_rows))

    def stages(self) -> Sequence[int]:
        return [batch for batch, _ in self.params.ramp]

    def plan(self, plan: Plan) -> Plan | None:
        """Fewer (or more) prompts of N rollouts each, once the ramp has started."""
        largest = max((n for _, n in self.params.ramp), default=0)
        if plan.batch == 0 and largest > plan.budget and plan.first:
            raise MethodError(_too_small(largest, plan.budget))  # now, and not when its batch comes
        size = group_size(self.params.ramp, plan.batch)
        fresh = [row for row in plan.rows if row.n > 0 and not row.given]
        if size is None or not fresh:
            return None
        room = plan.budget - sum(row.n for row in plan.rows if row.given)
        if room < size and plan.first:  # later calls fill a batch with what still fits
            raise MethodError(_too_small(size, room))
        taken = {row.group for row in fresh[: room // size]}
        rows = tuple(
            row.replace(n=size if row.group in taken else 0) if row.n > 0 and not row.given else row
            for row in plan.rows
        )
        return plan.replace(rows=rows)

    def select(self, rollouts: Rollouts) -> Tensor:
        """Leaves out groups whose rewards teach nothing, and logs what the batch looks like."""
        inside = rollouts.subset(rollouts.kept)
        unequal = _unequal(inside)
        self._report(inside, unequal)
        keep = rollouts.kept.clone()
        if self.params.dynamic_sampling:
            keep[rollouts.kept] = inside.groups.rows(unequal)
            self.note(rollouts.kept & ~keep, "all rewards of the group are equal")
        return keep

    def advantages(self, rollouts: Rollouts) -> Tensor:
        p, each = self.params, rollouts.per_rollout
        values = centered_rewards(each.reward, each.groups)
        if p.norm_over == "trajectory":
            mean, variance = _moments(values, torch.ones_like(values))
            values = (values - mean) / (variance.sqrt() + p.eps)
        elif p.norm_over == "token":
            tokens = torch.where(torch.isnan(rollouts.reward), 0.0, rollouts.length.double())
            mean, variance = _moments(values, each.rows.sum(tokens))
            values = (values - mean) / (variance + p.eps).sqrt()
        alone = each.groups.rows(each.groups.n(each.reward)) < 2  # over tokens the mean would move them
        return each.rows.rows(torch.where(alone, 0.0, values.nan_to_num(nan=0.0)))

    def before_update(self, rows: Rows) -> Update:
        p, count = self.params, len(rows.length)
        if p.base_rows is None or not count:
            return Update()
        scale = lr_factor(count, p.base_rows, p.lr_scale)
        self.log("lr_scale", scale)
        return Update(scale)

    def _report(self, rollouts: Rollouts, unequal: Tensor) -> None:
        each = rollouts.per_rollout
        scored = each.groups.n(each.reward) > 0
        success = self.params.successes(each.reward)
        self.log("signal", unequal[scored].double().mean())
        self.log("success", each.groups.mean(success)[scored].mean())
        self.log("group_size", each.groups.size.double().mean())
        assert rollouts.text is not None  # in `needs`
        texts = [rollouts.text[i] for i in each.last.tolist()]
        answer = self.params.answer or str.strip
        distinct, unseen = answer_statistics(each.groups, [answer(text) for text in texts])
        self.log("distinct_answers", distinct.nanmean())
        self.log("unseen_mass", unseen.nanmean())


def _too_small(n: int, rows: int) -> str:
    return (
        f"`ramp` asks for {n} rollouts per prompt, and a batch has room for {rows} rows. Make the batch larger or the "
        f"ramp smaller."
    )


def group_size(ramp: Sequence[Sequence[int]], batch: int) -> int | None:
    """Rollouts per prompt in a generation batch; None before the ramp begins."""
    begun = [n for first, n in ramp if first <= batch]
    return begun[-1] if begun else None


def lr_factor(rows: float, base_rows: float, rule: Literal["sqrt", "linear", "none"]) -> float:
    """(rows / base_rows)^p, the factor on the learning rate of an optimizer step of so many rows."""
    return float((rows / base_rows) ** POWERS[rule])


def answer_statistics(groups: Groups, answers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Different answers of each group, and the Good-Turing estimate of the probability of those it did not find.

    Args:
        groups: of the rollouts.
        answers: of each rollout, in any form that can be compared; None: it has none and is left out.

    Returns:
        (groups,) float64 different answers, and answers found once / rollouts with an answer; NaN without any answer.
    """
    number: dict[Hashable, int] = {}
    ids = [
        -1 if a is None else number.setdefault(a if isinstance(a, Hashable) else repr(a), len(number)) for a in answers
    ]
    known = torch.tensor(ids, dtype=torch.int64) >= 0
    group = groups.index[known]
    answer = Groups(joint(group, torch.tensor(ids, dtype=torch.int64)[known]))
    owner = Groups(answer.max(group.double()).long(), count=groups.count)
    rollouts = torch.bincount(group, minlength=groups.count).double()
    found = owner.size.double()
    once = owner.sum((answer.size == 1).double())
    return torch.where(rollouts > 0, found, torch.nan), once / rollouts


def _unequal(rollouts: Rollouts) -> Tensor:
    """(groups,) bool, groups whose scored rollouts have different rewards."""
    each = rollouts.per_rollout
    return each.groups.max(centered_rewards(each.reward, each.groups).abs()) > 0  # NaN is not


def _moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (divisor: sum of weights - 1) of the values that are not NaN, each as often as its weight."""
    count = torch.where(torch.isnan(x), 0.0, weight)
    mean = torch.nansum(count * x) / count.sum()
    return mean, torch.nansum(count * (x - mean) ** 2) / (count.sum() - 1).clamp(min=1)
