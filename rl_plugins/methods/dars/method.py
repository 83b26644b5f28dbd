"""DARS (arXiv 2508.13755): prompts with a low success rate get a second round of rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import ConfigError, Idle, Method, Plan, PlanRow, Rollouts, Run, from_params, param
from rl_plugins.core.rollouts import GroupSoFar, PerRollout, weighted_reward
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.methods.dars.schedule import Schedule, helping, served


class Dars(Method):
    """Difficulty Adaptive Rollout Sampling: more rollouts for hard prompts, which get small advantages in GRPO.

    Every prompt gets N rollouts. With u the share of successes among them, or 0.5 / N without any:

        S  = 2 u (1 - u),  P = N / 2                   mean |advantage|, its total at u = 1/2;   with `use_std`
        S  = 2 sqrt(u (1 - u)),  P = N
        dn = ceil((P - N S) / S)                       schedule et: every prompt has the same total
        dn = ceil((2 (1 - u) P - N S) / S)             schedule hw: harder ones have more
        dn = min(dn, n_max - N),  0 for u >= 1/2

    and dn more in a second round. All rollouts of a prompt are one group, which leaves if its share of successes is
    then 0 or at least `upper`. Advantages are the host's.

    The batch holds group size x prompts rows, and what N per prompt leave is room for second rounds. Prompts that are
    sure to leave (u >= `upper`, or no success and no second round) free their rows. If second rounds need more, each
    gets a proportional share, by largest remainder. Rows that are not needed stay empty.

    Symbols: N = `n_first`; a success is a reward >= success_threshold, of the reward functions, before `rewards` hooks.

    Special cases: a rollout without a reward (NaN) does not count, and one of several rows counts once. A prompt
    without any reward, and given completions (replay), get no second round; the filter applies to them.

    Raises:
        ConfigError: n_max < n_first, or n_first > group size.

    Source: arXiv 2508.13755; `verl/verl/trainer/ppo/ray_dars_trainer.py` of the authors' code at 9b21b714.
    """

    name = "dars"
    fidelity = "code"
    does = "Gives prompts with a low success rate a second round of rollouts"
    problems = ("no_signal", "too_hard", "exploration")
    rounds = True
    decides_rollouts = True
    host_options = from_params(
        lambda p: {
            "trl": {"scale_rewards": "group" if p.use_std else "none"},
            "verl": {"algorithm.norm_adv_by_std_in_grpo": p.use_std},
        }
    )
    idle = (Idle({"asked": 0}, "no prompt asked for more: all are right half of the time, or `n_max` is `n_first`."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        n_first: int = param(8, "N, number of first rollouts of every prompt", ge=1)
        n_max: int | None = param(None, "most rollouts of a prompt; none: 32 with et, 64 with hw (paper)", ge=1)
        schedule: Schedule = param("et", "target of the second round: equal totals, or larger ones for hard prompts")
        use_std: bool = param(False, "division of advantages by the group's deviation, with the matching schedule")
        upper: float = param(1.0, "lowest share of successes at which a group leaves", gt=0, le=1)

        @property
        def most(self) -> int:
            return self.n_max or (32 if self.schedule == "et" else 64)

        def check(self) -> None:
            if self.most < self.n_first:
                raise ConfigError(
                    f"`n_max` is {self.most}, below `n_first` = {self.n_first}; it must be at least that. Raise "
                    f"`n_max` or lower `n_first`."
                )

    def check(self, run: Run) -> None:
        p = self.params
        if run.group_size < p.n_first:
            raise ConfigError(
                f"`n_first` is {p.n_first}, but the batch has room for {run.group_size} rollouts per prompt. Raise the "
                f"group size (rows above n_first are room for second rounds), or lower `n_first`."
            )

    def plan(self, plan: Plan) -> Plan | None:
        """N spare rollouts each; in the second round the helpings, as far as they fit."""
        if plan.round == 0:
            n = self.params.n_first
            rows = tuple(row if row.given else row.replace(n=0, spare=row.spare + n) for row in plan.rows)
            return plan.replace(rows=rows)
        if plan.round > 1:
            return None
        groups = [g for g in plan.so_far if not g.row.given]
        asked, sizes = [self._helping(g) for g in groups], [len(g.rewards) for g in groups]
        room = plan.budget - plan.trained
        room -= sum(size for g, size, a in zip(groups, sizes, asked, strict=True) if a or self._stays(g))
        found = served(asked, max(0, room))
        self.log("asked", sum(asked))
        if self.traced:
            rate = [self._rate(g) for g in groups]
            text = "success rate {rate:.2f}: {asked} more rollouts asked, {served} served"
            self.note([g.row.group for g in groups], text, rate=rate, asked=asked, served=list(found))
        if sum(asked):
            self.log("served", sum(found) / sum(asked))
        return plan.replace(rows=(*plan.rows, *_further(groups, found)))

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        """The most are served where as many prompts ask for all they may as have room for it."""
        p, groups = self.params, sum(not row.given for row in plan.rows)
        most = max(min(k * (p.most - p.n_first), plan.budget - k * p.n_first) for k in range(groups + 1))
        return min(1, most), most

    def select(self, rollouts: Rollouts) -> Tensor:
        """Groups of one outcome leave."""
        p, each = self.params, _as_planned(rollouts)
        success = p.successes(each.reward)
        rate = each.groups.mean(success)
        first = torch.where(each.rollout < p.n_first, success, torch.nan)
        stays = (rate > 0) & (rate < p.upper)
        self.log("rescued", int(((each.groups.max(first) == 0) & (rate > 0)).sum()), "sum")
        self.log("left", (~stays).double().mean())
        if self.traced:
            gone = each.rows.rows(each.groups.rows(~stays))
            rates = each.rows.rows(each.groups.rows(rate))
            self.note(gone, "the group has the success rate {rate:.2f}", rate=rates)
        return each.rows.rows(each.groups.rows(stays))

    def _rate(self, group: GroupSoFar) -> float:
        """u; NaN without a reward."""
        return float(self.params.successes(group.rewards).nanmean())

    def _helping(self, group: GroupSoFar) -> int:
        p = self.params
        if self._rate(group) >= p.upper:  # it leaves, unless others have changed
            return 0
        return helping(self._rate(group), p.schedule, p.n_first, p.most, p.use_std)

    def _stays(self, group: GroupSoFar) -> bool:
        """Whether a group is trained that gets no helping."""
        return 0 < self._rate(group) < self.params.upper


def _as_planned(rollouts: Rollouts) -> PerRollout:
    """Every rollout once, with the reward that `plan` saw, so exactly the rows leave that `plan` counted on."""
    return rollouts.replace(reward=weighted_reward(rollouts.rewards, rollouts.reward_weights)).per_rollout


def _further(groups: list[GroupSoFar], numbers: list[int]) -> list[PlanRow]:
    pairs = zip(groups, numbers, strict=True)
    return [g.row.replace(n=n, spare=0, given=()) for g, n in pairs if n]
