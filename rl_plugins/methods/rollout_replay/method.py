"""Rollout replay of DOTS + RR (arXiv 2506.05316): part of every batch consists of groups of earlier batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodParams, from_params, param, signals
from rl_plugins.core.params import below
from rl_plugins.core.rollouts import Plan, PlanRow, Rollouts, Run, Tokens, weighted_reward
from rl_plugins.kit.start_checks import refuse_no_group
from rl_plugins.methods.rollout_replay.buffer import Buffer
from rl_plugins.methods.rollout_replay.groups import NEEDS, Sampled, check_prompts, drawn, pace, planned

REPLAYS = ({"fresh_share": below(1)}, {"replaces": "no_signal"})


class RolloutReplay(Method):
    """Generates only the share sigma of a batch; the rest are groups of earlier batches, drawn from a buffer.

    From generation batch `start_batch` on, of the B rows a batch trains:

        replayed = groups drawn from the buffer, uniformly without replacement, of (1 - sigma) B rows at most
        fresh    = the first prompts of the plan, for the rows that are left

    and when the batch is done, for each of its fresh groups:

        the older group of the same prompt leaves the buffer
        it enters the buffer if it is whole and the rewards of its rollouts differ
        of more than `buffer_groups` groups the oldest leave

    With `replaces: no_signal` all prompts of the batch are generated, and stored groups take the places of those whose
    rewards turn out equal (max r = min r), the first of them first, as far as there are stored ones.

    A replayed group brings its tokens, the log-probs of the policy that made them, their versions and its rewards. It
    is not scored again; its advantages are computed with those of the batch. The loss must correct for the older
    policy, as `decoupled_ppo` does; else the run warns.

    Symbols: sigma = `fresh_share`; rows are rollouts. Log-probs float32 in nats, rewards (rollouts, functions) float64;
    versions as in `Rollouts.version`.

    Special cases: a group is whole if as many rollouts stayed (`select`) as the host trains per prompt. Other groups
    are not stored, and not drawn after a resume with another group size. If there are fewer usable groups than wanted,
    fresh prompts fill the batch. Of several groups of one prompt the last storable one is stored. Tokens that were only
    read are replayed as such. A group is not stored (`unstorable`) if it has a token of unknown sampling probability,
    an empty rollout, or a prompt outside the dataset. Rollouts of several rows, or with turns that a method compares,
    are not stored either.

    `max_staleness` limits the age in the batch that is expected to train the group: the weights known when it is
    planned, plus those the last publication added, plus the largest delay seen so far between the two. The delay is 0
    except in verl's asynchronous modes, where the first `num_warmup_batches` batches may exceed the limit by it.

    State: the groups, as tensors, and the delay; the draw is from `self.rng`.

    Raises:
        MethodError: the prompt of a replayed group is not the one that its rollouts answered.

    Source: arXiv 2506.05316 and rl_training/verl/verl/trainer/ppo/ray_trainer.py of the authors' code (select_buffer).
    """

    name = "rollout_replay"
    fidelity = "paper"
    does = "Generates part of each batch and replays stored groups of earlier batches for the rest"
    problems = ("long_tail", "few_prompts", "no_signal")
    needs = from_params(lambda p: set(NEEDS) if p.replays else set())
    brings = from_params(lambda p: signals(off_policy=p.replays))
    rounds = from_params(lambda p: p.replaces == "no_signal")
    idle = (Idle({"replayed": 0}, "no stored group was replayed. Look at `stored`, `unstorable`, `max_staleness`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        replaces: Literal["share", "no_signal"] = param(
            "share", "what gives way: a share of the prompts, or generated groups of equal rewards"
        )
        fresh_share: float = param(
            0.5,
            "sigma, share of a batch's rows that is generated; 1: no replay",
            gt=0,
            le=1,
            only_if={"replaces": "share"},
        )
        buffer_groups: int = param(512, "most groups in the buffer; the oldest leave", ge=1, only_if=REPLAYS)
        max_staleness: int | None = param(
            None, "largest age of a group in its batch, in weights", ge=1, only_if=REPLAYS
        )
        start_batch: int = param(2, "first batch with replay, from 0", ge=1, only_if=REPLAYS)

        @property
        def replays(self) -> bool:
            return self.replaces == "no_signal" or self.fresh_share < 1

    _group_size = 0

    def check(self, run: Run) -> None:
        fresh = self.params.fresh_share
        if not self.rounds:
            refuse_no_group(run, f"`fresh_share` is {fresh:g}", 1 - fresh, "replayed")

    def start(self, run: Run) -> None:
        self._group_size = run.group_size

    def plan(self, plan: Plan) -> Plan | None:
        p = self.params
        if not p.replays or plan.batch < p.start_batch or "groups" not in self.state:
            return None
        stored = Buffer.of_state(self.state["groups"])
        if self.rounds:
            return self._in_rounds(plan, stored)
        if not plan.first:
            return None
        total = plan.trained or plan.budget
        chosen = self._drawn(stored, plan.group_size, int((1 - p.fresh_share) * total + 1e-6))
        rows, room = list(plan.rows), total - int(stored.rollouts[chosen].sum())
        numbers = []  # of groups that are replaced
        while sum(row.n for row in rows) > room:
            numbers.append(rows.pop(max(i for i, row in enumerate(rows) if row.n > 0)).group)
        free = max([row.group for row in plan.rows], default=-1) + 1
        numbers = [*reversed(numbers), *range(free, free + len(chosen))]
        rows += [self._row(stored, i, number) for i, number in zip(chosen, numbers, strict=False)]
        return plan.replace(rows=tuple(rows))

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        """The second round is of stored groups, so it generates nothing."""
        return 1, 0

    def _in_rounds(self, plan: Plan, stored: Buffer) -> Plan | None:
        """Round 0 is spare, so that its groups can leave; round 1 has a stored group for each that will."""
        size = plan.group_size
        if plan.round == 0:
            return plan.replace(rows=tuple(row.replace(n=0, spare=row.n + row.spare) for row in plan.rows))
        if plan.round > 1:
            return None
        equal = sum(
            len(g.rewards) == size and len(set(g.rewards[~g.rewards.isnan()].tolist())) < 2 for g in plan.so_far
        )
        free = 1 + max(row.group for row in (*(g.row for g in plan.so_far), *plan.rows))
        rows = [self._row(stored, i, free + k) for k, i in enumerate(self._drawn(stored, size, size * equal))]
        return plan.replace(rows=(*plan.rows, *rows))

    def _row(self, stored: Buffer, i: int, number: int) -> PlanRow:
        self.note([number], "a stored group, begun by the weights {version}", version=int(stored.version[i]))
        row = planned(stored, i, number, self.state["names"])
        return row.marked(self.name, (int(stored.question[i]), self._next()))

    def select(self, rollouts: Rollouts) -> Tensor:
        """Takes out groups whose places are taken; prompts of replayed ones must be those their rollouts answered."""
        check_prompts(rollouts, self.name)
        if not self.rounds:
            return torch.ones(len(rollouts), dtype=torch.bool)
        groups, reward = rollouts.groups, weighted_reward(rollouts.rewards, rollouts.reward_weights)
        replayed = groups.max(rollouts.has_mark(self.name).double()) > 0
        equal = (groups.size == self._group_size) & ~(groups.max(reward) > groups.min(reward)) & ~replayed
        gone = groups.rows(equal & (torch.cumsum(equal, 0) <= replayed.sum()))
        self.note(gone, "no two rewards of the group differ: a stored group has its place")
        return ~gone

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p = self.params
        if not p.replays:
            return
        now, replayed = rollouts.current_version, rollouts.has_mark(self.name) & rollouts.kept
        if bool(rollouts.kept.any()):
            self.log("replayed", replayed[rollouts.kept].double().mean())
        if bool(replayed.any()):
            age = rollouts.staleness[replayed].double()
            self.log("staleness", age.mean())
            self.log("oldest", age.max(), "max")
        fresh = rollouts.kept & ~replayed
        made = self._made(rollouts, tokens, fresh)
        stored = Buffer.of_state(self.state["groups"]) if "groups" in self.state else made.keep(made.prompt < -1)
        again = (made.prompt[:, None] == made.prompt).triu(1).any(1)  # a later group of this batch has its prompt
        stored = stored.keep(~torch.isin(stored.prompt, rollouts.prompt_index[fresh])).add(made.keep(~again))
        stays = torch.arange(len(stored)) >= len(stored) - p.buffer_groups
        if p.max_staleness is not None:
            stays &= now - stored.version <= p.max_staleness
        stored = stored.keep(stays).compact()
        delay = max([self.state.get("delay", 0), *(now - due for _, due in filter(None, rollouts.marks(self.name)))])
        clock = {"now": now, "pace": pace(self.state, now), "delay": delay}
        self.state = {"groups": stored.state(), "names": list(rollouts.reward_names), **clock}
        self.log("stored", len(stored))

    def _drawn(self, stored: Buffer, size: int, room: int) -> list[int]:
        """Stored groups of this size, of at most so many rows together."""
        fit = stored.rollouts == size
        if self.params.max_staleness is not None:
            fit &= self._next() + self.state["delay"] - stored.version <= self.params.max_staleness
        return drawn(fit, room // size, self.rng("replay"))

    def _next(self) -> int:
        """The weights that a batch planned now trains if nothing delays it."""
        return int(self.state["now"] + self.state["pace"])

    def _made(self, rollouts: Rollouts, tokens: Tokens, fresh: Tensor) -> Buffer:
        """The fresh groups that are stored: whole ones whose rewards differ."""
        sampled, groups = Sampled.of(rollouts, tokens), Groups(rollouts.group[fresh])
        storable, reward = sampled.storable(fresh, self._group_size, self.warn), rollouts.reward[fresh]
        differ = groups.max(reward) > groups.min(reward)
        if groups.count:
            self.log("unstorable", (~storable).double().mean())
            self.log("constant", (storable & ~differ).double().mean())
        chosen = fresh.clone()
        chosen[fresh] = groups.rows(storable & differ)
        return sampled.packed(chosen)
