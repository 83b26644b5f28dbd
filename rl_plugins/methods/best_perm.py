"""BestPerm (arXiv 2401.08961): prompts without a success try hints one after another, in a learned order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import (
    ConfigError,
    Idle,
    Method,
    MethodError,
    Plan,
    PlanRow,
    Rollouts,
    Run,
    Tokens,
    from_params,
    param,
    signals,
)
from rl_plugins.core.errors import shown
from rl_plugins.core.params import GIVEN
from rl_plugins.core.rollouts import GroupSoFar, weighted_reward
from rl_plugins.kit.columns import planned_cell, rewritten
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.kit.services import fill, media_of
from rl_plugins.kit.start_checks import refuse_whole_group

HINTED = "{prompt}\n\nHint: {hint}"
MOST_LOGGED = 16  # hints with a metric of their own


class BestPerm(Method):
    """A cascade of hints: after plain rollouts without a success, the next hint, until one succeeds.

    Reconstruction: we derived the oracle's dynamic program. The paper's values belong to states of a Markov process.

    Every prompt gets n_first plain rollouts. Then, in each round, every prompt without a success tries the next hint of
    its list, with n_hint rollouts under the hinted prompt. The list A of at most m = `max_hints` hints maximizes

        f(A) = sum_i [prod_{j<i} (1 - u_j)] u_i w_i + [prod_{all i} (1 - u_i)] w_none

    with u_k the probability that a try of hint k succeeds, and w_k its value then (`best_permutation`). After the
    batch, with t = 1 + cascades so far, for every hint k that was tried:

        a_k <- a_k + 1[a rollout of the try succeeded],   b_k <- b_k + 1[none did]
        u_k  = (a_k + 1) / (a_k + b_k + 2)                                  `estimate: posterior`
        u_k  = min(1, a_k / (a_k + b_k) + sqrt(1.5 ln t / (a_k + b_k)))     `estimate: upper`, 1 for a hint never tried

    All rollouts of a prompt are one group. The k-th text of `hints_column` is hint k, put into the prompt by
    `hint_template`; or `templates` have {prompt}. w_k is `values[k]`, by default 1 - k / K for hint k of K from 0.

    Symbols: u, w one per hint. A success is a reward >= success_threshold, before `rewards` hooks.

    Special cases: the batch has group size rows per prompt. Rows that prompts with an early success do not need go to
    other prompts, in the order of the plan; the rest stays empty. Hints with w_k <= w_none are never tried. A rollout
    without a reward (NaN) is no evidence, and a prompt or a try without any does not count. Prompts with given
    completions are left as planned. A rollout of several rows counts once.

    State: `accepted`, `rejected` per hint, `cascades`.

    Raises:
        ConfigError: not one source of hints, a template without {prompt}, too few values, images.
        MethodError: hints of a prompt are no list of texts, or more than `values`.

    Source: arXiv 2401.08961, problem and oracle BestPerm; without code, hints and language models.
    """

    name = "best_perm"
    fidelity = "reconstruction"
    does = "Adds hints, one after another, to prompts without a success and learns the best order of hints"
    problems = ("too_hard", "no_signal", "exploration")
    rounds = True
    decides_rollouts = True
    needs = from_params(lambda p: signals("prompt_index", columns=[p.hints_column]))
    idle = (Idle({"hinted": 0.0}, "no prompt tried a hint: all succeed, or look at `value_none` and `n_first`."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        hints_column: str = param("", "dataset column with a list of hints per prompt")
        hint_template: str = param(
            HINTED, "the hinted prompt, with {prompt} and {hint}", only_if={"hints_column": GIVEN}
        )
        templates: tuple[str, ...] = param((), "hinted prompts with {prompt}, used instead of a column")
        n_first: int | None = param(None, "number of plain rollouts per prompt; none: half of the group size", ge=1)
        n_hint: int = param(1, "number of rollouts of a try", ge=1)
        max_hints: int = param(3, "m, most hints that a prompt tries", ge=1, le=32)
        values: tuple[float, ...] = param((), "w, value of a success with each hint, net of its cost; empty: 1 - k/K")
        value_none: float = param(0.0, "w_none, value of no success")
        estimate: Literal["upper", "posterior"] = param("upper", "acceptance: upper bound, or posterior mean")
        prompt_column: str = param("prompt", "dataset column with the prompt")

        def check(self) -> None:
            if bool(self.hints_column) == bool(self.templates):
                raise ConfigError(
                    f"{'both' if self.templates else 'neither'} `hints_column` and `templates` are given; give "
                    f"exactly one: a dataset column with lists of hints, or hinted prompts with {{prompt}}."
                )
            wanted = ("{prompt}", "{hint}") if self.hints_column else ("{prompt}",)
            for text in [self.hint_template] if self.hints_column else self.templates:
                missing = [field for field in wanted if field not in text]
                if missing:
                    raise ConfigError(f"the template {shown(text)} lacks {' and '.join(missing)}.")
            if self.values and len(self.values) < len(self.templates):
                raise ConfigError(
                    f"`values` has {len(self.values)} numbers for {len(self.templates)} templates; it needs one each."
                )

    def check(self, run: Run) -> None:
        if media := media_of(run):
            raise ConfigError(
                f"the prompts have {media}, and rounds under other prompts cannot be made with images, videos or "
                f"audio. Use prompts of text."
            )
        refuse_whole_group(run, "n_first", self._first(run.group_size), "there is no room for hints")

    def start(self, run: Run) -> None:
        self._dataset = run.dataset
        self.state = {"accepted": [], "rejected": [], "cascades": 0}

    def plan(self, plan: Plan) -> Plan:
        """n_first plain rollouts each; in later rounds a try of the next hint for prompts without a success."""
        p = self.params
        if plan.round == 0:
            first = self._first(plan.group_size)
            rows = [row if row.given else row.replace(n=min(row.n, first)) for row in plan.rows]
            return plan.replace(rows=tuple(rows))
        rows, left = list(plan.rows), plan.budget - plan.trained
        for group in plan.so_far:
            if left <= 0:
                break
            if self._without_success(group):
                hints = self._hints(group.row)
                order = self.order(len(hints))
                if plan.round <= len(order):
                    tried = order[plan.round - 1]
                    n = min(p.n_hint, left)
                    rows.append(self._hinted(group.row, tried, hints[tried], n))
                    text = "hint {hint} after {failed} rollouts without a success"
                    self.note([group.row.group], text, hint=tried, failed=len(group.rewards))
                    left -= n
        return plan.replace(rows=tuple(rows))

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        p = self.params
        hints = min(p.max_hints, len(p.templates) or p.max_hints, plan.budget)
        return hints, min(hints * p.n_hint * len(plan.rows), plan.budget)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        state, each = self.state, rollouts.per_rollout
        used = self._acceptance(max(len(state["accepted"]), len(self.params.templates)))
        reward = each.rows.mean(weighted_reward(rollouts.rewards, rollouts.reward_weights))
        success = self.params.successes(reward)
        tried_by = [-1 if k is None else k for k in rollouts.marks(self.name)]
        hint = torch.tensor(tried_by, dtype=torch.int64)[each.last]
        plain = each.groups.max(torch.where(hint < 0, success, torch.nan))
        tries, hinted, rescued = 0, set[int](), set[int]()
        for k in sorted(set(hint[hint >= 0].tolist())):
            of_group = each.groups.max(torch.where(hint == k, success, torch.nan))
            tried, accepted = (~torch.isnan(of_group)).nonzero()[:, 0].tolist(), (of_group > 0).nonzero()[:, 0].tolist()
            for name, more in (("accepted", len(accepted)), ("rejected", len(tried) - len(accepted))):
                state[name] = [*state[name], *[0] * (k + 1 - len(state[name]))]
                state[name][k] += more
            tries += len(tried)
            hinted.update(tried)
            rescued.update(accepted)
        state["cascades"] += len(hinted)
        self._report(plain, len(hinted), len(rescued), tries)
        for k, u in enumerate(used[:MOST_LOGGED]):
            self.log(f"acceptance/{k}", u)

    def order(self, hints: int) -> list[int]:
        """The hints that a prompt with so many of them tries, in this order."""
        p = self.params
        if p.values and len(p.values) < hints:
            raise MethodError(
                f"A prompt has {hints} hints, and `values` has {len(p.values)} numbers. Give one per hint, or none."
            )
        values = list(p.values[:hints]) or [1 - k / hints for k in range(hints)]
        return best_permutation(self._acceptance(hints), values, p.max_hints, p.value_none)[0]

    def _acceptance(self, hints: int) -> list[float]:
        """u of the first `hints` hints."""
        state, found = self.state, []
        for k in range(hints):
            a, b = (state[name][k] if k < len(state[name]) else 0 for name in ("accepted", "rejected"))
            if self.params.estimate == "posterior":
                found.append((a + 1) / (a + b + 2))
            else:
                found.append(upper_bound(a, a + b, 1 + state["cascades"]))
        return found

    def _first(self, group_size: int) -> int:
        return min(self.params.n_first or -(-group_size // 2), group_size)

    def _without_success(self, group: GroupSoFar) -> bool:
        """Whether a group has rewards and none of them is a success; not so for replayed ones."""
        failed = self.params.successes(group.rewards).nanmean() == 0
        return bool(failed) and group.row.n > 0 and not group.row.given

    def _hints(self, row: PlanRow) -> list[str]:
        """The hints of a prompt, or the templates."""
        p = self.params
        if p.templates:
            return list(p.templates)
        found = planned_cell(self._dataset, row, p.hints_column)
        if found is None:
            return []
        hints = [found] if isinstance(found, str) else list(found)
        if not all(isinstance(hint, str) for hint in hints):
            raise MethodError(
                f"The column `{p.hints_column}` of prompt {row.prompt_index} holds {shown(found)}; it must be a list "
                f"of texts."
            )
        return hints

    def _hinted(self, row: PlanRow, k: int, hint: str, n: int) -> PlanRow:
        """n rollouts of the group of `row` under the prompt with hint k."""
        p = self.params
        template, fields = (hint, {}) if p.templates else (p.hint_template, {"hint": hint})

        def told(problem: str) -> str:
            return fill(template, {**fields, "prompt": problem})

        hinted = rewritten(self._dataset, row, p.prompt_column, told)
        return hinted.replace(n=n, spare=0, given=()).marked(self.name, k)

    def _report(self, plain: Tensor, hinted: int, rescued: int, tries: int) -> None:
        known = plain[~torch.isnan(plain)]
        self.log("plain", known.mean())
        self.log("hinted", hinted / max(1, len(plain)))
        if hinted:
            self.log("rescued", rescued / hinted, weight=hinted)
            self.log("tries", tries / hinted, weight=hinted)


def best_permutation(u: Sequence[float], w: Sequence[float], m: int, w_none: float = 0.0) -> tuple[list[int], float]:
    """The list of at most m items of the largest value, if items are tried in turn until one is accepted.

        f(A) = sum_i [prod_{j<i} (1 - u_j)] u_i w_i + [prod_{all i} (1 - u_i)] w_none

    For a given set the best order is by falling w, and items with w <= w_none are of no use. With the others in that
    order, F[i][k] the best value of items from i on with k places left:

        F[i][k] = max(F[i+1][k], u_i w_i + (1 - u_i) F[i+1][k-1]),   F[N][.] = F[.][0] = w_none

    in O(N log N + N m). Of equal w the larger u comes first, which changes no value; an item is taken only where it is
    strictly better. The value is per accepted item: a cost of tries that are not accepted is not part of the problem.

    Args:
        u: of each item, the probability that it is accepted, in [0, 1].
        w: of each item, its value if it is.
        m: items at most.
        w_none: value if none is.

    Returns:
        The items in the order of the tries, and f.

    Raises:
        ValueError: different lengths, u outside of [0, 1], a number that is not finite, m < 0.

    Source: arXiv 2401.08961, oracle BestPerm.
    """
    if len(u) != len(w) or m < 0 or not all(0 <= x <= 1 for x in u) or not all(map(math.isfinite, [*w, w_none])):
        raise ValueError(
            f"u (in [0, 1]) and w need one finite number per item and m must be at least 0; given: {len(u)} and "
            f"{len(w)} numbers, m = {m}."
        )
    items = sorted((i for i in range(len(w)) if w[i] > w_none), key=lambda i: (-w[i], -u[i], i))
    m = min(m, len(items))
    best = [[w_none] * (m + 1)]  # from the last item to the first
    for i in reversed(items):
        after = best[-1]
        taken = (u[i] * w[i] + (1 - u[i]) * after[k - 1] for k in range(1, m + 1))
        best.append([w_none, *(max(skip, take) for skip, take in zip(after[1:], taken, strict=True))])
    best.reverse()
    order, k = [], m
    for place, i in enumerate(items):
        if k and best[place][k] > best[place + 1][k]:
            order.append(i)
            k -= 1
    return order, best[0][m]


def upper_bound(accepted: float, tries: float, t: float) -> float:
    """Upper confidence bound of an acceptance: mean + sqrt(1.5 ln t / tries), at most 1; 1 before the first try."""
    return min(1.0, accepted / tries + math.sqrt(1.5 * math.log(t) / tries)) if tries else 1.0
