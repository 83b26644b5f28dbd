"""V_0 (arXiv 2602.03584): predicted success rates decide how many rollouts each prompt gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins import (
    ConfigError,
    Groups,
    Idle,
    Method,
    MethodError,
    MethodParams,
    Plan,
    Rollouts,
    Run,
    Tokens,
    from_params,
    param,
)
from rl_plugins.kit.priors import PriorParams, make_prior
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.kit.start_checks import refuse_fixed_size, refuse_one_prompt

Array = NDArray[np.float64]
Split = Literal["greedy", "exact", "uniform"]
_SPLIT = {"allocation": ("greedy", "exact")}
Prior = Literal["nearest", "running_mean", "beta", "column"] | Callable[..., Any]


class V0(Method):
    """Splits a fixed rollout budget by predicted success rate.

    With p_i the predicted success rate of prompt i, before anything is sampled:

        U(B, p) = B (1 - p) (1 - (1 - p)^(B - 1))     expected failed rollouts in a group that also has a success
        maximize sum_i U(B_i, p_i)   subject to   sum_i B_i = T,   min_rollouts <= B_i <= max_rollouts

    T is what the host would generate. A group with a single outcome has utility 0.

    U is not concave in B, so the optimum gives most of the budget to few hard prompts. `greedy` (paper; ties: first
    prompt) repeatedly takes the best single rollout and is not optimal. `exact` is a dynamic program.

    p comes from `prior` (`rl_plugins.kit.priors`). The paper's value model is not shipped.

    Symbols: p, B one per row of the plan; success (rollouts,) float64: a reward >= success_threshold, after `rewards`
    hooks, of all generated rows. A rollout of several rows (turns, agents) counts once.

    Special cases: a prompt without a prediction (NaN) keeps its share of the host's plan; before the first rewards this
    holds for all prompts. A foreign prompt (-1) has none (with `nearest` an average one) and is not remembered. A
    rollout without a reward (NaN) is no outcome. Given completions (replay) and `spare` rollouts keep their room.

    State: that of the prior. Draws only choose the context's sample of a large batch.

    Raises:
        ConfigError: nothing to move: group size not between min_rollouts and max_rollouts, or one prompt in a batch.
        MethodError: a plan too small for min_rollouts each; the prior fails or leaves [0, 1].

    Source: arXiv 2602.03584, as read through two independent notes; v0_core/trainer.py of the authors' code for the
    loss.
    """

    name = "v0"
    fidelity = "paper"
    does = "Splits a fixed rollout budget by predicted success rate"
    problems = ("no_signal", "few_prompts")
    decides_rollouts = from_params(lambda p: p.allocation != "uniform")
    idle = (Idle({"utility": 1}, "budgets are no better than equal ones. Look at `prior` and `min_rollouts`."),)
    keeps_batch_size = True  # rollouts are moved between prompts, not taken away

    @dataclass(frozen=True)
    class Params(PriorParams, SuccessParams):
        prior: Prior = param("nearest", "source of p: one of these, or a function values(prompts, context)")
        allocation: Split = param("greedy", "best single rollout (paper), a dynamic program, or the host's")
        min_rollouts: int = param(2, "smallest number of rollouts of a prompt", ge=2, only_if=_SPLIT)
        max_rollouts: int = param(128, "largest number of rollouts of a prompt", ge=2, only_if=_SPLIT)

        def check(self) -> None:
            super().check()
            if self.max_rollouts < self.min_rollouts:
                raise ConfigError(
                    f"`max_rollouts` is {self.max_rollouts}, below `min_rollouts` = {self.min_rollouts}; it must be at "
                    f"least that."
                )

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self.prior = make_prior(self.params, 0.0, 1.0, guess_unseen=False)  # equal guesses would not give equal budgets
        self.needs = self.prior.needs

    def check(self, run: Run) -> None:
        p = self.params
        if p.allocation != "uniform":
            refuse_fixed_size(run, ("min_rollouts", p.min_rollouts), ("max_rollouts", p.max_rollouts))
            refuse_one_prompt(run, "there is no other prompt to move rollouts to")

    def start(self, run: Run) -> None:
        self.state = self.prior.start(run)

    def plan(self, plan: Plan) -> Plan | None:
        """As many rollouts as given, spread over the prompts by their predicted success rate."""
        p = self.params
        rate = self._predict(torch.tensor([row.prompt_index for row in plan.rows], dtype=torch.int64)).numpy()
        chosen = [i for i, row in enumerate(plan.rows) if row.n > 0 and not np.isnan(rate[i])]
        if not chosen or p.allocation == "uniform":
            return None
        rows = [plan.rows[i] for i in chosen]
        lows = [max(p.min_rollouts, len(row.given) - row.spare) for row in rows]
        total, equal = sum(row.n for row in rows), np.array([row.n for row in rows])
        if total < sum(lows):
            raise MethodError(
                f"{total} rollouts for {len(rows)} prompts are fewer than `min_rollouts` = {p.min_rollouts} each (and "
                f"room for given completions). Raise the group size or lower `min_rollouts`."
            )
        allocate = allocate_greedy if p.allocation == "greedy" else allocate_exact
        budgets = allocate(rate[chosen], total, lows, [max(low, p.max_rollouts) for low in lows])
        before = float(utility(equal, rate[chosen]).sum())
        self.log("utility", float(utility(budgets, rate[chosen]).sum()) / before if before > 0 else 1.0)
        self.log("most", int(budgets.max()), "max")
        planned = list(plan.rows)
        named = [row.group for row in rows]
        self.note(named, "{n} rollouts: predicted success rate {rate:.2f}", n=budgets, rate=rate[chosen])
        for i, n in zip(chosen, budgets.tolist(), strict=True):
            planned[i] = planned[i].replace(n=n)
        return plan.replace(rows=tuple(planned))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        each = rollouts.per_rollout
        known = ~torch.isnan(each.reward)
        prompt, success = each.prompt_index[known], self.params.successes(each.reward[known])
        self._report(prompt, success, Groups(each.group[known]))
        self.state = self.prior.observe(self.state, prompt, success, self.rng("context"))

    def _predict(self, prompts: Tensor) -> Tensor:
        """Predicted success rate of each prompt, asked once per prompt.

        Raises:
            MethodError: a value outside of [0, 1].
        """
        ids, place = torch.unique(prompts, return_inverse=True)
        rate = self.prior.predict(self.state, ids)
        if bool(((rate < 0) | (rate > 1)).any()):
            raise MethodError(
                f"A predicted success rate is {float(rate[(rate < 0) | (rate > 1)][0]):g}; it must be in [0, 1]. Check "
                f"the prior ({self.params.prior})."
            )
        return rate[place]

    def _report(self, prompt: Tensor, success: Tensor, groups: Groups) -> None:
        rate = self._predict(prompt)  # the state is still the one of the plan
        told = ~torch.isnan(rate)
        if bool(told.any()):
            self.log("predicted", rate[told].mean())
            self.log("brier", ((rate - success)[told] ** 2).mean())
            self.log("auc", auc(rate[told], success[told]))
        self.log("mixed", (groups.max(success) > groups.min(success)).double().mean())


# ---- budgets


def utility(budget: Any, rate: Any) -> Array:
    """Expected failed rollouts in a group of `budget` that also has a success, elementwise."""
    q = 1 - np.asarray(rate, dtype=np.float64)
    return np.asarray(budget * q * (1 - q ** (np.asarray(budget, dtype=np.float64) - 1)))


def allocate_greedy(rate: Array, total: int, low: Sequence[int], high: Sequence[int]) -> NDArray[np.int64]:
    """Budgets by the best single rollout, again and again; of equal gains the first prompt's.

    Args:
        rate: (prompts,) success rates.
        total: of the budgets, at least sum(low); what `high` leaves no room for stays unspent.
        low, high: limits of each budget.
    """
    budget, most = np.array(low, dtype=np.int64), np.array(high)
    q = 1 - np.asarray(rate, dtype=np.float64)
    gain = np.where(budget < most, _next(budget, q), -np.inf)
    for _ in range(total - int(budget.sum())):
        i = int(np.argmax(gain))
        if gain[i] == -np.inf:
            break
        budget[i] += 1
        gain[i] = _next(budget[i], q[i]) if budget[i] < most[i] else -np.inf
    return budget


def allocate_exact(rate: Array, total: int, low: Sequence[int], high: Sequence[int]) -> NDArray[np.int64]:
    """Budgets of the largest sum of utilities; arguments as in `allocate_greedy`.

    best[r] is the largest utility of the prompts so far with exactly r rollouts above their lower limits.
    """
    rest = min(total, int(sum(high))) - int(sum(low))
    best = np.full(rest + 1, -np.inf)
    best[0] = 0.0
    choices = []
    for p, least, most in zip(rate, low, high, strict=True):
        extra = np.arange(min(most - least, rest) + 1)
        padded = np.concatenate([np.full(len(extra) - 1, -np.inf), best])
        before = np.lib.stride_tricks.sliding_window_view(padded, len(extra))[:, ::-1]  # [r, e] = best[r - e]
        value = before + utility(least + extra, p)
        choices.append(value.argmax(1))
        best = value.max(1)
    budget = np.array(low, dtype=np.int64)
    for i in reversed(range(len(budget))):
        budget[i] += choices[i][rest]
        rest -= int(choices[i][rest])
    return budget


def _next(budget: Any, q: Any) -> Any:
    """What one rollout more is worth: U(B + 1) - U(B)."""
    return q + q**budget * (budget - (budget + 1) * q)


# ---- the value model


def auc(score: Tensor, success: Tensor) -> float:
    """Probability that a success is scored above a failure, ties half; NaN without both."""
    positive = success > 0.5
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return float("nan")
    rank = Groups(torch.zeros(len(score), dtype=torch.int64)).rank(score)
    return (float(rank[positive].sum()) - n * (n + 1) / 2) / (n * m)
