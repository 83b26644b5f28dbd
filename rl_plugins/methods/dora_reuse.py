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
    Method,
    MethodParams,
    Plan,
    PlanRow,
    Rollouts,
    Run,
    Shape,
    Tokens,
    from_params,
    param,
    signals,
)
from rl_plugins.core.params import above
from rl_plugins.kit.start_checks import refuse_no_group
from rl_plugins.methods.rollout_replay.buffer import Buffer
from rl_plugins.methods.rollout_replay.groups import NEEDS, Sampled, check_prompts, drawn, pace, planned

REUSES = {"reuse_ratio": above(0)}


class DoraReuse(Method):
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
    needs = from_params(lambda p: {"several_rollouts"} | (NEEDS if p.reuse_ratio else {"prompt_index"}))
    brings = from_params(lambda p: signals(off_policy=p.reuse_ratio))
    decides_rollouts = from_params(lambda p: bool(p.reuse_ratio or p.spare_share))
    idle = (Idle({"reused": 0}, "no stored group was reused. Raise `spare_share` or `max_staleness`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        reuse_ratio: float = param(0.25, "largest share of a batch's groups that is reused", ge=0, lt=1)
        spare_share: float = param(0.25, "share of a batch's groups that is generated in addition", ge=0, le=4)
        max_staleness: int = param(2, "largest age of a trained group, in published weights", ge=1, only_if=REUSES)
        buffer_groups: int = param(512, "most groups in the buffer; the oldest leave", ge=1, only_if=REUSES)

    _group_size = _spare = 0

    def check(self, run: Run) -> None:
        if run.buffered:
            raise ConfigError(
                "`dora_reuse` generates more groups than a batch trains, and this mode takes batches out of a buffer "
                "of its own. Use a synchronous mode, or verl's own algorithm.filter_groups without this method."
            )

        reused, spare = self.params.reuse_ratio, self.params.spare_share
        refuse_no_group(run, f"`reuse_ratio` is {reused:g}", reused, "reused")
        refuse_no_group(run, f"`spare_share` is {spare:g}", spare, "made in addition")

    def start(self, run: Run) -> None:
        self._group_size = run.group_size

    def plan(self, plan: Plan) -> Plan | None:
        """Rows that are made spare leave room: for the reused groups, and for further prompts, with which the runtime
        fills the plan. It asks again for these, and stops where nothing more is trained."""
        rows, p, reused = list(plan.rows), self.params, list[PlanRow]()
        if not rows:
            return None
        if plan.first:
            total, free = max(1, plan.budget // plan.group_size), max(row.group for row in rows) + 1
            self.state = {**self.state, "total": total}
            reused = [row.replace(group=free + k) for k, row in enumerate(self._drawn(plan, total))]
            self.note([row.group for row in reused], "a stored group of an earlier batch")
            self._spare = len(reused) + int(p.spare_share * total + 1e-6)
        spare = min(self._spare, len(rows) - (not reused))
        self._spare -= spare
        for i in range(spare):  # the first ones, because the runtime takes back the last ones that do not fit
            rows[i] = rows[i].replace(n=0, spare=rows[i].n + rows[i].spare)
        return plan.replace(rows=(*rows, *reused))

    def _drawn(self, plan: Plan, total: int) -> list[PlanRow]:
        """Stored groups that are young enough, at most their share of the batch's groups."""
        if "groups" not in self.state:
            return []
        stored, state = Buffer.of_state(self.state["groups"]), self.state
        young = state["now"] + state["pace"] - stored.version <= self.params.max_staleness
        most = int(self.params.reuse_ratio * total + 1e-6)
        chosen = drawn((stored.rollouts == plan.group_size) & young, most, self.rng("reuse"))
        return [planned(stored, i, 0, state["names"]).marked(self.name, (int(stored.question[i]), i)) for i in chosen]

    def select(self, rollouts: Rollouts) -> Tensor:
        """Drops made groups without a signal."""
        check_prompts(rollouts, self.name)
        groups = rollouts.groups
        signal = groups.max(rollouts.reward) > groups.min(rollouts.reward)  # False without rewards
        keep = groups.rows(signal) | rollouts.has_mark(self.name)
        self.note(~keep, "no two rewards of the group differ")
        return keep

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        trained = self._trained(rollouts)
        self.note(~trained, "the batch was full without this group")
        return None if bool(trained.all()) else Shape(keep_rows=trained)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, now = self.params, rollouts.current_version
        reused, trained = rollouts.has_mark(self.name), self._trained(rollouts)
        surplus = rollouts.kept & ~trained

        def count(rows: Tensor) -> int:
            return Groups(rollouts.group[rows]).count

        self.log("made", count(~reused))
        self.log("reused", count(reused))
        self.log("trained", count(trained & rollouts.kept))
        self.log("no_signal", rollouts.groups.count - count(rollouts.kept))  # a group may have lost some rows only
        made = self._stored(rollouts, tokens, surplus) if p.reuse_ratio else Buffer.empty(0)
        self.log("stored", len(made))
        self.log("dropped", count(surplus) - len(made))
        if not p.reuse_ratio:
            return
        before = Buffer.of_state(self.state["groups"]) if "groups" in self.state else made.keep(made.prompt < -1)
        left = torch.ones(len(before), dtype=torch.bool)
        left[[place for _, place in filter(None, rollouts.marks(self.name))]] = False
        stored = before.keep(left).add(made)
        clock = {"now": now, "pace": pace(self.state, now)}
        young = stored.keep(now + clock["pace"] - stored.version <= p.max_staleness)
        newest = young.keep(torch.arange(len(young)) >= len(young) - p.buffer_groups)
        self.log("expired", len(stored) - len(newest))
        stored = newest.compact()
        self.log("buffer", len(stored))
        self.state = {**self.state, "groups": stored.state(), "names": list(rollouts.reward_names), **clock}

    def _stored(self, rollouts: Rollouts, tokens: Tokens, surplus: Tensor) -> Buffer:
        """The groups of the surplus that can be stored and have a reward for every rollout."""
        scored = rollouts.groups.max(torch.isnan(rollouts.reward).double()) == 0
        usable, sampled = surplus & rollouts.groups.rows(scored), Sampled.of(rollouts, tokens)
        groups = Groups(rollouts.group[usable])
        usable[usable.clone()] = groups.rows(sampled.storable(usable, self._group_size, self.warn))
        return sampled.packed(usable)

    def _trained(self, rollouts: Rollouts) -> Tensor:
        """(rows,) bool: of the groups that were kept, the reused ones and the first made ones that the batch holds."""
        reused, kept = rollouts.has_mark(self.name), rollouts.kept
        groups = Groups(rollouts.group)  # numbers in the order of the plan
        made = groups.max((kept & ~reused).double()) > 0
        room = self.state.get("total", groups.count) - Groups(rollouts.group[reused & kept]).count
        chosen = made & (torch.cumsum(made.long(), 0) <= room)
        return kept & (reused | groups.rows(chosen))
