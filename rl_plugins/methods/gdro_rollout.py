"""Rollout-GDRO of arXiv 2601.19280: a bandit per difficulty bin decides how many rollouts its prompts get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins import ConfigError, Idle, MethodError, Plan, Rollouts, Run, Tokens, param
from rl_plugins.kit.start_checks import refuse_fixed_size, refuse_one_prompt
from rl_plugins.methods._gdro.bins import Binned, BinParams

Array = NDArray[np.float64]
TIE = 1e-9
MOST_LOGGED = 16  # bins with metrics of their own


class GdroRollout(Binned):
    """Learns for every difficulty bin how many rollouts its prompts should get, at a fixed total.

    Prompts are put into bins b by their running pass@k before the batch (see `_gdro.bins`). An arm is a number of
    rollouts n from n_min to n_max; every bin has a score z_b(n) for each, 0 at the start. With m_b prompts of a bin in
    the batch, M in all, and nbar the mean of the given plan:

        p_b(n) = (1 - gamma) softmax(eta z_b)(n) + gamma / arms
        choose n_b:  maximize sum_b log p_b(n_b)   subject to   sum_b m_b n_b = M nbar          (dynamic program, exact)

    and after the batch, with l(b) the mean of 1 - reward over the rollouts of the bin, minus that over the batch
    (`baseline: batch`), for each bin's n_b:

        z_b(n_b) <- z_b(n_b) + l(b) - mu (n_b - nbar)           arm_sign: code; paper: -l(b) in place of l(b)
        mu <- mu + price_rate (mean n of the batch - nbar)      the shadow price of a rollout

    If no choice meets the total exactly, the closest total below it is used. `tie: uniform` adds -1e-9 m_b (n_b -
    nbar)^2: equal scores give every prompt nbar. `first` takes the first choice found from the hardest bin on.

    Symbols: z (bins, arms), p, l, mu float64. A rollout of several rows counts once.

    Special cases: rollouts without a reward (NaN) count in no mean and no pass@k; a bin without any reward leaves its
    arm unchanged. Foreign prompts and those with given completions (replay) stay as planned.

    State: z, mu, and history and bin of every prompt.

    Raises:
        ConfigError: a parameter out of range; the group size is not between n_min and n_max, or a batch has one
            prompt.
        MethodError: fewer rollouts than n_min each.

    Source: arXiv 2601.19280, equations 13 to 21; verl/trainer/group_dro_grpo.py of the authors' code at b391899b.
    """

    name = "gdro_rollout"
    does = "Learns how many rollouts each difficulty bin should get at a fixed total"
    problems = ("few_prompts",)
    idle = (Idle({"moved": 0.0}, "every prompt gets the host's number. Look at `edges`, `eta`, `n_min` and `n_max`."),)
    keeps_batch_size = True  # rollouts are moved between prompts, not taken away
    decides_rollouts = True

    @dataclass(frozen=True)
    class Params(BinParams):
        n_min: int = param(2, "smallest number of rollouts of a prompt", ge=2)
        n_max: int | None = param(None, "largest number of rollouts of a prompt; none: three group sizes", ge=2)
        eta: float = param(0.65, "eta, influence of an arm's score", ge=0)
        gamma: float = param(0.01, "share of p that is uniform over the arms", ge=0, le=1)
        price_rate: float = param(0.05, "alpha_mu, step size of mu; acts if earlier methods make uneven plans", ge=0)
        arm_sign: Literal["code", "paper"] = param("code", "arms that gain: of high loss (code) or low loss (paper)")
        baseline: Literal["batch", "none"] = param("batch", "loss that a bin's is compared with: the batch's, or 0")
        tie: Literal["uniform", "first"] = param("uniform", "choice among equal sums: nearest nbar, or the first found")

        def check(self) -> None:
            super().check()
            if self.n_max is not None and self.n_max < self.n_min:
                raise ConfigError(f"`n_max` is {self.n_max}, below `n_min` = {self.n_min}; it must be at least that.")

        def most(self, group_size: int) -> int:
            """Rollouts of a prompt at most."""
            return 3 * group_size if self.n_max is None else self.n_max

    def check(self, run: Run) -> None:
        p = self.params
        refuse_fixed_size(run, ("n_min", p.n_min), ("n_max", p.most(run.group_size)))
        refuse_one_prompt(run, "there is no other prompt to move rollouts to")

    def start(self, run: Run) -> None:
        self.check(run)
        super().start(run)
        arms = self.params.most(run.group_size) - self.params.n_min + 1
        self.state |= {"arms": torch.zeros(self.params.count, arms, dtype=torch.float64), "price": 0.0, "played": []}

    def plan(self, plan: Plan) -> Plan | None:
        """As many rollouts as given, the same number for all prompts of a bin."""
        p = self.params
        chosen = [i for i, r in enumerate(plan.rows) if r.n > 0 and r.prompt_index >= 0 and not r.given]
        if plan.first:
            self.state["played"] = []
        if not chosen:
            return None
        bin = self.bins_of(torch.tensor([plan.rows[i].prompt_index for i in chosen]))
        names, count = torch.unique(bin, return_counts=True)
        total = sum(plan.rows[i].n for i in chosen)
        if total < p.n_min * len(chosen):
            raise MethodError(
                f"{total} rollouts for {len(chosen)} prompts are fewer than `n_min` = {p.n_min} each. Raise the group "
                f"size or lower `n_min`."
            )
        p_arm = arm_probabilities(self.state["arms"][names], p.eta, p.gamma).numpy()
        n = allocate(p_arm, count.tolist(), total, p.n_min, p.tie)
        size = dict(zip(names.tolist(), n, strict=True))
        rows = list(plan.rows)
        moved = 0
        for i, b in zip(chosen, bin.tolist(), strict=True):
            moved += max(0, size[b] - rows[i].n)
            rows[i] = rows[i].replace(n=size[b])
        mean = total / len(chosen)
        self.state["played"] += [[rows[i].group, b, size[b], mean] for i, b in zip(chosen, bin.tolist(), strict=True)]
        self.log("most", max(n), "max")
        self.log("least", min(n), "min")
        self.log("moved", moved / total)
        self.log("unmet", total - sum(m * k for m, k in zip(count.tolist(), n, strict=True)), "sum")
        for b, k in list(size.items())[:MOST_LOGGED]:
            self.log(f"rollouts/{self.bin_name(b)}", k)
        return plan.replace(rows=tuple(rows))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, each = self.params, rollouts.per_rollout
        groups, loss = each.groups, torch.where(torch.isnan(each.reward), 0.0, 1 - each.reward)
        of_group = zip(groups.ids.tolist(), groups.sum(loss).tolist(), groups.n(each.reward).tolist(), strict=True)
        of = {group: (total, scored) for group, total, scored in of_group}
        played = [(*entry, *of.get(entry[0], (0.0, 0.0))) for entry in self.state["played"]]
        if p.baseline == "batch":
            mean = sum(total for *_, total, _ in played) / max(1.0, sum(scored for *_, scored in played))
            played = [(*entry, total - mean * scored, scored) for *entry, total, scored in played]
        update_arms(self.state, played, p)
        self.state["played"] = []
        self.log("shadow_price", self.state["price"])
        self.remember(rollouts)


def arm_probabilities(score: Tensor, eta: float, gamma: float) -> Tensor:
    """(bins, arms) p_b(n) from the scores z."""
    return (1 - gamma) * torch.softmax(eta * score, 1) + gamma / score.shape[1]


def update_arms(state: dict[str, Any], played: Sequence[tuple[int, int, int, float, float, float]], p: Any) -> None:
    """Scores and shadow price after a batch, in place.

    Args:
        state: `arms` (bins, arms) float64 and `price`.
        played: of each group its number, bin, rollouts, the mean nbar of its plan, the sum of its losses, and how many
            of its rollouts have one.
    """
    price = state["price"]
    for b, n, nbar in sorted({(b, n, nbar) for _, b, n, nbar, _, _ in played}):
        own = [(total, k) for _, b2, n2, nbar2, total, k in played if (b2, n2, nbar2) == (b, n, nbar)]
        scored = sum(k for _, k in own)
        if scored:
            loss = sum(total for total, _ in own) / scored
            sign = 1 if p.arm_sign == "code" else -1
            state["arms"][b, n - p.n_min] += sign * loss - price * (n - nbar)
    if played:
        state["price"] = price + p.price_rate * sum(n - nbar for _, _, n, nbar, _, _ in played) / len(played)


def allocate(p_arm: Array, prompts: Sequence[int], total: int, n_min: int, tie: str = "uniform") -> list[int]:
    """Rollouts n_b of each bin that maximize sum_b log p_b(n_b) with sum_b m_b n_b = total, or the nearest total below.

    best[t] is the largest sum of the bins so far with t rollouts; all totals of a bin and an arm are done at once.

    Args:
        p_arm: (bins, arms) probability of n = n_min to n_max prompts: m_b of each bin, >= 1. total: at least n_min
        times the prompts. tie: "uniform" prefers n near total / prompts; "first" the largest number for the last bin,
        then for the one
            before: what a search through totals in ascending order finds first.
    """
    value = np.log(np.maximum(p_arm, np.finfo(np.float64).tiny))
    arms = value.shape[1]
    if tie == "uniform":
        nbar = total / sum(prompts)
        value = value - TIE * np.asarray(prompts)[:, None] * (n_min + np.arange(arms)[None, :] - nbar) ** 2
    best = np.full(total + 1, -np.inf)
    best[0] = 0.0
    choices = []
    for b, m in enumerate(prompts):
        new, choice = np.full(total + 1, -np.inf), np.full(total + 1, -1, dtype=np.int64)
        for arm in reversed(range(arms)):
            used = m * (n_min + arm)
            if used > total:
                continue
            candidate = best[: total + 1 - used] + value[b, arm]
            better = candidate > new[used:]
            new[used:][better] = candidate[better]
            choice[used:][better] = arm
        best = new
        choices.append(choice)
    at = int(np.flatnonzero(best > -np.inf)[-1])
    chosen = []
    for m, choice in zip(reversed(prompts), reversed(choices), strict=True):
        n = n_min + int(choice[at])
        chosen.append(n)
        at -= m * n
    return chosen[::-1]
