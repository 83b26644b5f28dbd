"""Experience pool of DART (arXiv 2509.23866): a stored success replaces a failure where every rollout fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins import Completion, Groups, Idle, Method, Plan, PlanRow, Rollouts, Run, Shape, Tokens, param
from rl_plugins.core.requests import Turn
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.methods.dart.history import STORED, TaskHistory, is_stored, scored, success_rate
from rl_plugins.methods.rollout_replay.groups import Sampled


class DartPool(Method):
    """Keeps the newest success of every task, and lets it replace the oldest failure of a group that fails as a whole.

    Per group, of its own rollouts that have a reward, a the share of successes:

        0 < a < acc_max    nothing changes
        a >= acc_max       the group leaves: there is nothing to compare, but its last success is stored
        a = 0, stored      the stored success replaces the failure of the oldest weights; of several, the first one
        a = 0, not stored  the group leaves

    A group of more than N rollouts (spare ones of other methods) is then trimmed to N, the host's number: one success
    and one failure at random where there are both, then others with a reward at random, then those without.

    A stored success is planned with the rollouts of its task, as a spare completion that is given, if the latest N
    outcomes of the task have a success rate of at most `give_below`. It leaves where it is not needed.

    Symbols: a success is a reward of at least `success_threshold`. Versions are published weights, log-probs in nats.

    Special cases: rewards below `invalid_below` are no rewards (NaN). A group without a reward leaves. A stored rollout
    whose tokens the group has, or whose prompt has changed, leaves. Rollouts of several rows, of foreign prompts (-1),
    and with a token of unknown probability are not stored. Turns are stored where a method of the run reads them.

    State: the outcomes, and the stored rollouts: at most `pool_tasks`, the oldest leave.

    Source: arXiv 2509.23866, section on the experience pool; src/core/task_loader.py of dart_rollouter (its filter).
    """

    name = "dart_pool"
    fidelity = "paper"
    does = "Replaces a failure by a stored success where all rollouts of a task fail"
    problems = ("too_hard", "no_signal", "exploration")
    needs = frozenset({"prompt_index", "tokens", "token_ids", "rollout_logprobs"})
    brings = frozenset({"off_policy"})
    idle = (Idle({"replaced": 0, "dropped": 0}, "no group failed or succeeded as a whole."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        acc_max: float = param(1.0, "success rate at which a group leaves; above 1: none does", gt=0)
        give_below: float = param(0.5, "highest success rate of a task that is given its stored success", ge=0, le=1)
        pool_tasks: int = param(512, "most tasks with a stored success; the oldest leave", ge=1)
        invalid_below: float | None = param(None, "reward below which a rollout is invalid; none: every reward counts")

    def start(self, run: Run) -> None:
        self._size, self._solved = run.group_size, torch.zeros(0, dtype=torch.int64)
        self.state = {"outcomes": TaskHistory.empty(run.group_size).state(), "pool": []}

    # ---- before generation

    def plan(self, plan: Plan) -> Plan | None:
        stored = {entry["task"]: entry for entry in self.state["pool"]}
        history = TaskHistory.of_state(self.state["outcomes"])
        prompts = torch.tensor([row.prompt_index for row in plan.rows], dtype=torch.int64)
        rate = success_rate(history.of(prompts), plan.group_size).tolist()
        rows = [
            self._with_stored(row, stored[row.prompt_index])
            if row.prompt_index in stored and row.n and not row.given and acc <= self.params.give_below
            else row
            for row, acc in zip(plan.rows, rate, strict=True)
        ]
        return plan.replace(rows=tuple(rows))

    def _with_stored(self, row: PlanRow, entry: Mapping[str, Any]) -> PlanRow:
        """The row with a stored success as its first rollout, one more than it has."""
        given = Completion(
            tokens=tuple(entry["tokens"].tolist()),
            logprobs=tuple(entry["logprobs"].tolist()),
            versions=tuple(entry["versions"].tolist()),
            rewards=dict(entry["rewards"]),
            observed=tuple(entry["observed"].tolist()) if bool(entry["observed"].any()) else None,
            prompt=tuple(entry["prompt"].tolist()) if entry["turns"] or bool(entry["observed"].any()) else None,
            turns=tuple(Turn(**turn) for turn in entry["turns"]),
        )
        return row.replace(spare=row.spare + 1, given=(given,)).marked(STORED, entry["prompt"].tolist())

    # ---- the batch

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        if self.params.invalid_below is None:
            return None
        invalid = rollouts.reward < self.params.invalid_below
        self.log("invalid", invalid.double().mean())
        self.note(invalid, "invalid: the reward is below {least:g}", least=self.params.invalid_below)
        return torch.where(invalid, torch.nan, rollouts.reward)

    def select(self, rollouts: Rollouts) -> Tensor:
        p, once, stored = self.params, rollouts.per_rollout, is_stored(rollouts)
        groups, given = once.groups, stored[once.last]  # of rollouts
        own = (once.rows.max(rollouts.kept.double()) > 0) & ~given
        success = torch.where(own, p.successes(once.reward), torch.nan)
        rate = groups.mean(success)  # NaN without a reward
        usable = groups.max((given & self._usable(rollouts)[once.last]).double()) > 0
        failed, solved = rate == 0, rate >= p.acc_max
        replaced = failed & usable
        stays = ((rate > 0) & ~solved) | replaced
        keep = own & groups.rows(stays) & ~self._oldest_failures(rollouts, success, replaced)
        keep |= given & groups.rows(replaced)
        # of solved groups the last success leaves in `shape`: `observe` sees no token of a row that leaves here
        number = torch.arange(len(own)).double()
        keep |= groups.top_k(torch.where((success == 1) & groups.rows(solved), number, torch.nan), 1)
        self._solved = groups.ids[solved]
        for name, share in (("failed", failed), ("solved", solved), ("replaced", replaced), ("dropped", ~stays)):
            self.log(name, share.double().mean())
        self.log("given", float(given.sum()))
        if self.traced:
            gone, rates = once.rows.rows(own & groups.rows(~stays)), once.rows.rows(groups.rows(rate))
            self.note(gone, "the group has the success rate {rate:.2f}", rate=rates)
            old, needless = own & groups.rows(stays) & ~keep, given & ~groups.rows(replaced)
            self.note(once.rows.rows(old), "the oldest failure: a stored success has its place")
            self.note(once.rows.rows(needless), "a stored success that the group does not need")
            self.note(once.rows.rows(given & groups.rows(replaced)), "a stored success: the group has none")
        trained = self._trimmed(rollouts, keep)
        self.note(once.rows.rows(keep & ~trained), "beyond the size of a group")
        return once.rows.rows(trained) & rollouts.kept

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        return Shape(keep_rows=~torch.isin(rollouts.group, self._solved))

    def _usable(self, rollouts: Rollouts) -> Tensor:
        """(rows,) bool: stored rollouts that answer the present prompt, and are no copy of a rollout of the group."""
        usable, ids = is_stored(rollouts), rollouts.token_ids
        if not bool(usable.any()):
            return usable
        assert ids is not None  # in `needs`
        answered = rollouts.marks(STORED)
        for row in usable.nonzero()[:, 0].tolist():
            same = ids.prompt[row].tolist() == answered[row]
            mates = ((rollouts.group == rollouts.group[row]) & ~is_stored(rollouts)).nonzero()[:, 0].tolist()
            usable[row] = same and not any(torch.equal(ids.completion[row], ids.completion[m]) for m in mates)
        return usable

    def _oldest_failures(self, rollouts: Rollouts, success: Tensor, replaced: Tensor) -> Tensor:
        """(rollouts,) bool: the one that leaves in each group that gets a stored success, of the oldest weights, and
        the first of several."""
        once = rollouts.per_rollout
        candidates = (success == 0) & once.groups.rows(replaced)
        age = once.rows.min(rollouts.version.double()) * (1 + once.rollout.max()) + once.rollout
        return once.groups.top_k(torch.where(candidates, -age, torch.nan), 1)

    def _trimmed(self, rollouts: Rollouts, kept: Tensor) -> Tensor:
        """(rollouts,) bool: at most N of each group, among them a success and a failure where there are both."""
        once = rollouts.per_rollout
        if bool((once.groups.sum(kept.double()) <= self._size).all()):
            return kept
        key, success = -torch.from_numpy(self.rng("trim").random(len(kept))), self.params.successes(once.reward)
        first = torch.zeros_like(kept)
        for outcome in (1, 0):
            first |= once.groups.top_k(torch.where(kept & (success == outcome), key, torch.nan), 1)
        key = key + 2.0 * first.double() - torch.isnan(success).double()
        return once.groups.top_k(torch.where(kept, key, torch.nan), self._size)

    # ---- afterwards

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, outcomes = self.params, TaskHistory.of_state(self.state["outcomes"])
        outcomes = outcomes.add(*scored(rollouts, p))
        new = self._successes(rollouts, tokens)
        pool = [*(entry for entry in self.state["pool"] if entry["task"] not in new), *new.values()]
        self.state = {"outcomes": outcomes.state(), "pool": pool[-p.pool_tasks :]}
        self.log("pool", len(self.state["pool"]))

    def _successes(self, rollouts: Rollouts, tokens: Tokens) -> dict[int, dict[str, Any]]:
        """The last success of every task in this batch, ready to be given."""
        several = rollouts.groups.rows(rollouts.groups.max(rollouts.index.double())) > 0
        right = (self.params.successes(rollouts.reward) == 1) & rollouts.kept & ~several & ~is_stored(rollouts)
        right &= (rollouts.prompt_index >= 0) & (rollouts.length > 0)
        last = {int(rollouts.prompt_index[row]): row for row in right.nonzero()[:, 0].tolist()}
        sampled = Sampled.of(rollouts, tokens)
        found = {task: self._entry(sampled, tokens, task, row) for task, row in last.items()}
        return {task: entry for task, entry in found.items() if entry is not None}

    def _entry(self, sampled: Sampled, tokens: Tokens, task: int, row: int) -> dict[str, Any] | None:
        """None if the probability of a token is not known."""
        rollouts, ids = sampled.rollouts, sampled.rollouts.token_ids
        assert ids is not None
        logprobs, observed = sampled.logprobs[row], ids.observed[row]
        if not bool((torch.isfinite(logprobs) | observed).all()):
            return None
        names = rollouts.reward_names
        return {
            "task": task,
            "prompt": ids.prompt[row].clone(),
            "tokens": ids.completion[row].clone(),
            "observed": observed.clone(),
            "logprobs": logprobs.clamp(max=0.0).nan_to_num(nan=0.0),
            "versions": sampled.versions[row].clone(),
            "rewards": dict(zip(names, rollouts.rewards[row].tolist(), strict=True)),
            "turns": self._turns(rollouts, tokens, tokens.row == row),
        }

    def _turns(self, rollouts: Rollouts, tokens: Tokens, mine: Tensor) -> list[dict[str, Any]]:
        """Turns of a row with their places in the completion; none where no method of the run reads turns."""
        table = rollouts.turns
        if table is None or tokens.turn is None:
            return []
        place, number = tokens.position[mine], tokens.turn[mine]
        found = Groups(number)
        starts, stops = found.min(place.double()).long().tolist(), (found.max(place.double()).long() + 1).tolist()
        turns = [
            Turn(start, stop, table.anchor[i], float(table.reward[i]), bool(table.valid[i]))
            for i, start, stop in zip(found.ids.tolist(), starts, stops, strict=True)
        ]
        return [asdict(turn) for turn in sorted(turns, key=lambda turn: turn.start)]
