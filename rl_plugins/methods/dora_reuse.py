"""Reuse of surplus groups in DORA (arXiv 2509.18883): what a batch had too much of is part of a later one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import (
    ConfigError,
    Groups,
    Idle,
    MethodParams,
    Plan,
    PlanRow,
    Rollouts,
    Run,
    Shape,
    Tokens,
    from_params,
    param,
)
from rl_plugins.core.params import above
from rl_plugins.methods.rollout_replay.buffer import Buffer
from rl_plugins.methods.rollout_replay.method import RolloutReplay

REUSES = {"reuse_ratio": above(0)}


class DoraReuse(RolloutReplay):
    """Generates more groups than a batch trains, keeps the surplus with a signal, and trains it in a later batch.

    Per batch of B groups, with F = B - (reused groups):

        reused   = at most floor(reuse_ratio B) stored groups, drawn uniformly without replacement
        made     = at most B + floor(spare_share B) groups, B of the host's prompts and others of further ones
        a made group without a signal leaves: its rewards are all equal, or it has none
        the first F made groups with a signal are trained, in the order of the plan
        the others with a signal are stored; groups that were reused or will be too old leave the buffer

    A reused group brings its tokens, their log-probs, their versions (published weights) and its rewards, and is not
    scored again. The loss must correct for the older policy (`dora_loss`).

    Special cases: fewer than F groups with a signal make a smaller batch. Fewer groups are made where the spare ones
    and the reused ones outnumber the batch. A surplus group that cannot be stored (`rollout_replay` says which) or has
    a NaN reward is dropped.

    State: the stored groups, as tensors, and the groups of a batch.

    Raises:
        ConfigError, MethodError: a mode with a buffer of its own (verl's asynchronous ones); a prompt that has changed.

    Source: arXiv 2509.18883, section on reinforcement learning (online filtering with replay); no training code.
    """

    name = "dora_reuse"
    fidelity = "paper"
    does = "Generates spare prompts, trains groups with a signal, and reuses the surplus in later batches"
    problems = ("no_signal", "long_tail")
    idle = (Idle({"reused": 0}, "no stored group was reused. Raise `spare_share` or `max_staleness`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        reuse_ratio: float = param(0.25, "largest share of a batch's groups that is reused", ge=0, lt=1)
        spare_share: float = param(0.25, "share of a batch's groups that is generated in addition", ge=0, le=4)
        max_staleness: int = param(2, "largest age of a trained group, in published weights", ge=1, only_if=REUSES)
        buffer_groups: int = param(512, "most groups in the buffer; the oldest leave", ge=1, only_if=REUSES)

    _group_size = _spare = 0

    @from_params
    def needs(self) -> set[str]:
        return {"several_rollouts"} | (super().needs if self.params.reuse_ratio else {"prompt_index"})

    @from_params
    def brings(self) -> set[str]:
        return {"off_policy"} if self.params.reuse_ratio else set()

    @from_params
    def decides_rollouts(self) -> bool:
        return bool(self.params.reuse_ratio or self.params.spare_share)

    def check(self, run: Run) -> None:
        if run.buffered:
            raise ConfigError(
                "`dora_reuse` generates more groups than a batch trains, and this mode takes batches out of a buffer "
                "of its own. Use a synchronous mode, or verl's own algorithm.filter_groups without this method."
            )

    def plan(self, plan: Plan) -> Plan | None:
        """Rows that are made spare leave room: for the reused groups, and for further prompts, with which the runtime
        fills the plan. It asks again for these, and stops where nothing more is trained."""
        rows, p, reused = list(plan.rows), self.params, list[PlanRow]()
        if not rows:
            return None
        if plan.first:
            total, free = max(1, plan.budget // plan.group_size), max(row.group for row in rows) + 1
            self.state = {**self.state, "total": total}
            if "groups" in self.state:
                stored = Buffer.of_state(self.state["groups"])
                room = int(p.reuse_ratio * total + 1e-6) * plan.group_size
                chosen = self._drawn(stored, plan.group_size, room)
                reused = [self._planned(stored, i, free + k) for k, i in enumerate(chosen)]
            self._spare = len(reused) + int(p.spare_share * total + 1e-6)
        spare = min(self._spare, len(rows) - (not reused))
        self._spare -= spare
        for i in range(spare):  # the first ones, because the runtime takes back the last ones that do not fit
            rows[i] = rows[i].replace(n=0, spare=rows[i].n + rows[i].spare)
        return plan.replace(rows=(*rows, *reused))

    def _drawn(self, stored: Buffer, size: int, room: int) -> list[int]:
        """Stored groups of this size that are young enough, of at most so many rows together."""
        young = self._next() - stored.version <= self.params.max_staleness
        places = ((stored.rollouts == size) & young).nonzero()[:, 0]
        order = torch.from_numpy(self.rng("reuse").permutation(len(places)))
        chosen: list[int] = places[order][: room // size].tolist()
        return chosen

    def select(self, rollouts: Rollouts) -> Tensor:
        """Drops made groups without a signal."""
        super().select(rollouts)  # the prompts of reused groups
        groups = rollouts.groups
        signal = groups.max(rollouts.reward) > groups.min(rollouts.reward)  # False without rewards
        return groups.rows(signal) | self._reused(rollouts)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        trained = self._trained(rollouts)
        return None if bool(trained.all()) else Shape(keep_rows=trained)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, now = self.params, rollouts.current_version
        reused, trained = self._reused(rollouts), self._trained(rollouts)
        surplus = rollouts.kept & ~trained

        def count(rows: Tensor) -> int:
            return Groups(rollouts.group[rows]).count

        self.log("made", count(~reused))
        self.log("reused", count(reused))
        self.log("trained", count(trained & rollouts.kept))
        self.log("no_signal", rollouts.groups.count - count(rollouts.kept))  # a group may have lost some rows only
        made = Buffer.empty(rollouts.rewards.shape[1])
        scored = rollouts.groups.max(torch.isnan(rollouts.reward).double()) == 0
        usable = surplus & rollouts.groups.rows(scored)
        if p.reuse_ratio and bool(usable.any()):
            made, _ = self._made(rollouts, tokens, usable)
        self.log("stored", len(made))
        self.log("dropped", count(surplus) - len(made))
        if not p.reuse_ratio:
            return
        before = Buffer.of_state(self.state["groups"]) if "groups" in self.state else made.keep(made.prompt < -1)
        marks = [m for m in rollouts.marks(self.name) if m is not None]
        taken = torch.tensor(sorted({m[2] for m in marks}), dtype=torch.int64)  # places in the buffer of the plan
        left = torch.ones(len(before), dtype=torch.bool)
        left[taken] = False
        stored = before.keep(left).add(made)
        pace = max(0, now - self.state.get("now", now - 1)) or self.state.get("pace", 0)
        young = stored.keep(now + pace - stored.version <= p.max_staleness)
        newest = young.keep(torch.arange(len(young)) >= len(young) - p.buffer_groups)
        self.log("expired", len(stored) - len(newest))
        stored = newest.compact()
        self.log("buffer", len(stored))
        names = list(rollouts.reward_names)
        self.state = {**self.state, "groups": stored.state(), "names": names, "now": now, "pace": pace}

    def _log_made(self, storable: Tensor, stored: Tensor) -> None:
        """Here groups are counted by what became of them."""

    def _planned(self, stored: Buffer, group: int, number: int) -> PlanRow:
        row = super()._planned(stored, group, number)
        return row.marked(self.name, (*row.mark(self.name), group))

    def _reused(self, rollouts: Rollouts) -> Tensor:
        """(rows,) bool: the group comes from the buffer."""
        return torch.tensor([m is not None for m in rollouts.marks(self.name)], dtype=torch.bool)

    def _trained(self, rollouts: Rollouts) -> Tensor:
        """(rows,) bool: of the groups that were kept, the reused ones and the first made ones that the batch holds."""
        reused, kept = self._reused(rollouts), rollouts.kept
        groups = Groups(rollouts.group)  # numbers in the order of the plan
        made = groups.max((kept & ~reused).double()) > 0
        room = self.state.get("total", groups.count) - Groups(rollouts.group[reused & kept]).count
        chosen = made & (torch.cumsum(made.long(), 0) <= room)
        return kept & (reused | groups.rows(chosen))
