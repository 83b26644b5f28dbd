"""Dynamic sampling of DAPO (arXiv 2503.14476): asks for further prompts until a batch has only groups with signal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Plan, Rollouts, Run, param
from rl_plugins.core.rollouts import MAX_ROUNDS, PlanRow, weighted_reward


class DynamicSampling(Method):
    """Fills a batch with groups whose rewards differ, and generates for further prompts until it is full.

    A batch of P prompts has groups with rewards r_1 .. r_G, the weighted sum of the reward functions:

        round 0    all rollouts of the P prompts are made; a group has signal if max r > min r, or, with
                   `success_threshold`, if some r reach it and others do not
        round t    with m groups of signal so far: ceil(refill (P - m)) other prompts, drawn at random from the dataset
        until      m >= P, or max_rounds further rounds were made
        train      the first P groups with signal; all others leave before the advantages

    Symbols: r (rows,) float64, before `rewards` hooks, in `plan` and `select` alike.

    Special cases: a rollout without a reward (NaN) is left out of max and min; a group with fewer than two rewards has
    no signal. No prompt comes twice in a batch, so a small dataset may end before the batch is full. A batch that is
    not full trains what there is; one without any signal trains nothing. Groups with given completions stay as they are
    planned, and their rows are not refilled.

    Source: arXiv 2503.14476, section 3.2, equation 11 and algorithm 1.
    """

    name = "dynamic_sampling"
    fidelity = "paper"
    does = "Generates for further prompts until a batch holds only groups with unequal rewards"
    problems = ("no_signal", "too_easy")
    needs = frozenset({"prompt_index", "several_rollouts"})
    host_options = {"verl": {"algorithm.filter_groups.enable": False}}  # its own form of the same
    decides_rollouts = True
    rounds = True

    @dataclass(frozen=True)
    class Params(MethodParams):
        max_rounds: int = param(9, "most further rounds of a batch", ge=1, lt=MAX_ROUNDS)
        success_threshold: float | None = param(None, "lowest reward of a success; none: any two rewards that differ")
        refill: float = param(1.0, "new groups per missing group in a further round", ge=1, le=16)

    def start(self, run: Run) -> None:
        self._size = run.dataset_size or 0

    def plan(self, plan: Plan) -> Plan | None:
        """Everything is spare, because nobody knows yet which groups stay; the mark is the round of a group."""
        if plan.round == 0:
            spare = [r if r.given else r.replace(n=0, spare=r.n + r.spare).marked(self.name, 0) for r in plan.rows]
            return plan.replace(rows=tuple(spare))
        own = [g for g in plan.so_far if g.row.mark(self.name) is not None]
        wanted = sum(g.row.mark(self.name) == 0 for g in own)
        missing = wanted - sum(len(set(self._outcome(g.rewards[~g.rewards.isnan()]).tolist())) > 1 for g in own)
        if plan.round > self.params.max_rounds or missing <= 0:
            return None
        taken = {g.row.prompt_index for g in plan.so_far}
        new = self._others(taken, math.ceil(self.params.refill * missing), plan)
        first, size = plan.so_far[-1].row.group + 1, own[0].row.spare  # groups ascend
        rows = [PlanRow(i, first + k, 0, spare=size).marked(self.name, plan.round) for k, i in enumerate(new)]
        text = "round {round}: {missing} of {wanted} groups lacked unequal rewards"
        self.note([row.group for row in rows], text, round=1 + plan.round, missing=missing, wanted=wanted)
        return plan.replace(rows=(*plan.rows, *rows))

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        sizes = [row.spare for row in plan.rows if row.mark(self.name) is not None]
        most = self.params.max_rounds if sizes else 0
        return most, most * math.ceil(self.params.refill * len(sizes)) * max(sizes, default=0)

    def select(self, rollouts: Rollouts) -> Tensor:
        groups, marks = rollouts.groups, rollouts.marks(self.name)
        number = groups.max(torch.tensor([-1 if mark is None else mark for mark in marks], dtype=torch.float64))
        reward = weighted_reward(rollouts.rewards, rollouts.reward_weights)
        outcome = torch.where(rollouts.kept & ~reward.isnan(), self._outcome(reward), torch.nan)
        own, wanted = number >= 0, int((number == 0).sum())
        signal = own & (groups.max(outcome) > groups.min(outcome))
        keep = signal & (torch.cumsum(signal, 0) <= wanted)
        self.note(groups.rows(own & ~signal), self._no_signal)
        self.note(groups.rows(signal & ~keep), "the batch was full without this group")
        if wanted:
            filled, trained = int(keep.sum()) / wanted, groups.size[keep].sum()
            self.log("rounds", 1 + number.max())
            self.log("signal", signal[own].double().mean())
            self.log("filled", filled)
            self.log("rollouts_per_row", groups.size[own].sum() / trained.clamp(min=1), weight=trained)
            if filled < 1:
                self.warn("a batch is not full (metric dynamic_sampling/filled). Raise `max_rounds` or `refill`.")
        return groups.rows(keep | ~own)

    @property
    def _no_signal(self) -> str:
        if self.params.success_threshold is None:
            return "no two rewards of the group differ"
        return "the group does not have both a success and a failure"

    def _outcome(self, reward: Tensor) -> Tensor:
        """What must differ in a group: rewards, or 1 and 0 for success and failure."""
        lowest = self.params.success_threshold
        return reward if lowest is None else (reward >= lowest).double()

    def _others(self, taken: set[int], n: int, plan: Plan) -> list[int]:
        """n prompts of the dataset that this batch has not had yet; fewer if there are no more."""
        drawn = self.rng(f"round {plan.round}").choice(self._size, min(n + len(taken), self._size), replace=False)
        return [i for i in drawn.tolist() if i not in taken][:n]
