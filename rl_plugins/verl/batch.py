"""One batch in verl: rewards and selection before the log-prob passes, everything else after the host's advantages.

Rows that leave are removed from TransferQueue, so no optimizer step is cut around them; verl balances the batch twice,
first to what its log-prob passes divide by, and to its mini-batches when it is known which rows are trained.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.utils.padding import response_from_nested

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import GRPO_EPS, Scale, batch_std, grpo_advantages
from rl_plugins.core.groups import Groups, spread
from rl_plugins.core.rollouts import Rollouts, weighted_reward
from rl_plugins.runtime.decide import (
    Decision,
    Selection,
    check_made,
    decide_advantages,
    select_rows,
    teacher_prompts,
)
from rl_plugins.runtime.idle import look_for_idle
from rl_plugins.runtime.metrics import Partial, combine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.turn_table import FlatTurns, token_turns, turn_table
from rl_plugins.verl.capabilities import NESTED_COLUMNS
from rl_plugins.verl.host import Batch, Columns, Tokenizer
from rl_plugins.verl.prompts import COLUMN, FORCED, MADE, NUMBERS, UNKNOWN, Ranges
from rl_plugins.verl.rows import (
    GROUP,
    REAL,
    ROW_COLUMN,
    ROW_VERSIONS,
    TOKEN_COLUMN,
    TOKEN_COLUMNS,
    TOKEN_VERSION,
    Ragged,
    components,
    flat,
    no_tokens,
    plain,
    plan_order,
    read_rollouts,
    read_tokens,
    read_turns,
    scored_late,
    split,
    token_versions,
)

FRAC_ZERO_STD = "rl_plugins/frac_reward_zero_std"


def fetch(batch: Batch, fields: Sequence[str] | None = None) -> Columns:
    """Columns of the rows of a batch; those nobody wrote are left out."""
    chosen = None if fields is None else list(fields)
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=chosen)


def planned_rows(batch: Batch, rewards: Mapping[str, float], more: Sequence[str] = ()) -> dict[str, Any]:
    """Columns of a batch, which is brought into the order of the plan: its notes, `extra_fields`, scores where these do
    not say them, and more.

    Args:
        rewards: see `Settings`.
    """
    told = fetch(batch, [COLUMN, "extra_fields"])
    notes, extra = plain(told[COLUMN]), plain(told["extra_fields"])
    order = plan_order(batch.keys, notes)
    batch.reorder(order)
    names = [*more, *(["rm_scores"] if not rewards and scored_late(extra) else [])]
    rows: Any = fetch(batch, names) if names else {}
    return {
        **{name: rows[name] for name in names if name in rows},
        COLUMN: [notes[i] for i in order],
        "extra_fields": [extra[i] for i in order],
    }


def put(batch: Batch, columns: Mapping[str, Any], keys: Sequence[str] | None = None) -> None:
    """Writes columns of a batch's rows, or of some of them."""
    rows = list(batch.keys if keys is None else keys)
    if rows and columns:
        fields = TensorDict(dict(columns), batch_size=[len(rows)])
        tq.kv_batch_put(keys=rows, partition_id=batch.partition_id, fields=fields)


def without(batch: Batch, stays: Sequence[bool]) -> Batch:
    """The batch without the rows that leave, which are removed from the queue; of all columns, whatever the batch was
    restricted to."""
    gone = [key for key, stay in zip(batch.keys, stays, strict=True) if not stay]
    if gone:
        tq.kv_clear(keys=gone, partition_id=batch.partition_id)
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[key for key, stay in zip(batch.keys, stays, strict=True) if stay],
        tags=[tag for tag, stay in zip(batch.tags, stays, strict=True) if stay],
        extra_info=batch.extra_info,
    )


def all_but_one_leave(batch: Batch, stays: Sequence[bool]) -> tuple[Batch, bool]:
    """The batch without the rows that leave, and whether all of them do. Then one is kept all the same, because verl's
    passes and metrics need a row, and the trainer makes no optimizer step."""
    nothing = not any(stays)
    return without(batch, [True] + [False] * (len(batch) - 1) if nothing else stays), nothing


def is_padding(tag: Mapping[str, Any]) -> bool:
    return bool(tag.get("is_padding", False))


@dataclass(frozen=True)
class Selected:
    """A batch between selection and settlement.

    Args:
        batch: the rows that stayed.
        nothing: every row left, and `batch` holds one for verl.
        generated: all rows, in the order of the plan.
        selection: what `rewards` and `select` made of them.
        number: key of a row -> its place in `generated`.
        tokens: (rows,) of each response, in the order of `generated`; those that are not trained, too.
        turns: of every row; None if no method asks for them.
        versions: key of a row -> (response,) of each token; None if no method asks for them.
        forced, unknown: key of a row -> its tokens that were put in the policy's place, and those without a log-prob.
        teacher: key of a row -> its prompt for the teacher, None without one; None instead of them: each has its own.
        logged: what rollout programs logged.
        lag: batches between the plan of a row and now, mean over the rows.
        by_program: rollout programs made rows.
        groups_of_verl: the groups are those verl sees, which groups by uid.
    """

    batch: Batch
    nothing: bool
    generated: Rollouts
    selection: Selection
    number: Mapping[str, int]
    tokens: Tensor
    turns: FlatTurns | None
    versions: Mapping[str, Tensor] | None
    forced: Mapping[str, Ranges]
    unknown: Mapping[str, Ranges]
    teacher: Mapping[str, Any] | None
    logged: Sequence[Partial]
    lag: float
    by_program: bool
    groups_of_verl: bool

    @property
    def several_rows_of_verl(self) -> bool:
        """Whether an agent loop gave several rows of a rollout, all of which have the reward of the last one. Rows of
        a rollout program each have their own."""
        return not self.by_program and bool((self.generated.index > 0).any())


@dataclass(frozen=True)
class Decided:
    """A batch after settlement.

    Args:
        batch: the rows that are trained, or one for verl if there are none.
        nothing: every row left.
        decision: of all rows, in the order of `Selected.generated`.
        columns: those of ours that were written.
        metrics: what the methods logged, and what verl does not see.
    """

    batch: Batch
    nothing: bool
    decision: Decision
    columns: Sequence[str]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Decisions:
    """Decides on a batch: `select`, and `decide_advantages` when verl has computed log-probs and advantages.

    Args:
        stack: the methods.
        config: the whole config.
        rewards: see `Settings`.
        tokenizer: of the policy.
        rows: rollouts the batch trains, (prompts x group size).
        published: newest weights at the start of the step.
        steps_since: optimizer steps since their publication.
    """

    stack: MethodStack
    config: Any
    rewards: Mapping[str, float]
    tokenizer: Tokenizer
    rows: int
    published: int = 0
    steps_since: int = 0

    def select(self, batch: Batch) -> Selected:
        """`rewards` and `select` on everything that was generated; rows that leave are gone afterwards."""
        check_made(self.stack, len(batch.keys))
        rows, now = planned_rows(batch, self.rewards, self._selection_columns()), self.stack.batch
        rollouts = read_rollouts(
            rows, batch, self.stack, self.rewards, self.tokenizer, now, self.published, self.steps_since
        )
        versions = token_versions(rows, rollouts) if "token_versions" in self.stack.needs_now else None
        turns = FlatTurns.of(read_turns(rows, self.tokenizer)) if "turns" in self.stack.needs_now else None
        if turns is not None:
            rollouts = rollouts.replace(turns=turn_table(rollouts, turns))
        selection = select_rows(self.stack, rollouts)
        teacher = teacher_prompts(self.stack, selection)
        keys, extra = batch.keys, rows["extra_fields"]
        tokens = torch.tensor([e[NUMBERS][0] for e in extra], dtype=torch.int64)
        self._write_rewards(batch, tokens, selection)
        stay, nothing = all_but_one_leave(batch, selection.rollouts.kept.tolist())
        uids = [split(key)[0] for key in keys]
        groups = set(zip(uids, rollouts.group.tolist(), strict=True))
        return Selected(
            batch=stay,
            nothing=nothing,
            generated=rollouts,
            selection=selection,
            number={key: i for i, key in enumerate(keys)},
            tokens=tokens,
            turns=turns,
            versions=None if versions is None else dict(zip(batch.keys, versions, strict=True)),
            forced={key: e.get(FORCED, []) for key, e in zip(keys, extra, strict=True)},
            unknown={key: e[UNKNOWN] for key, e in zip(keys, extra, strict=True) if e.get(UNKNOWN)},
            teacher=None if teacher is None else dict(zip(keys, teacher, strict=True)),
            logged=[e[MADE]["metrics"] for e in extra if e.get(MADE, {}).get("metrics")],
            lag=sum(now - n.get("planned_at", now) for n in rows[COLUMN]) / len(keys),
            by_program=any(MADE in e for e in extra),
            groups_of_verl=len(groups) == len(set(uids)) == len(rollouts.groups.ids),
        )

    def _selection_columns(self) -> list[str]:
        names = [n.removeprefix("column:") for n in self.stack.needs_now if n.startswith("column:")]
        anywhere = [*names, *NESTED_COLUMNS] if names else []
        needs = self.stack.needs_now
        read = ["responses"] if needs & {"text", "messages", "raw_text"} else []
        read += ["response_mask"] if "token_versions" in needs else []
        read += ["prompts", "responses", "response_mask"] if needs & {"turns", "token_ids"} else []
        return list(dict.fromkeys([*read, *anywhere]))

    def _write_rewards(self, batch: Batch, tokens: Tensor, selection: Selection) -> None:
        """What verl computes with from here on: named rewards, those of the hooks, and 0 where a row has none."""
        reward = selection.rollouts.reward
        if not self.rewards and not selection.rewarded_by and not bool(torch.isnan(reward).any()):
            return
        _put_scores(batch, Ragged.of_length(tokens), reward)

    def decide_advantages(self, batch: Batch, selected: Selected) -> Decided:
        """Advantages, shaping, observation; the queue then holds the rows that are trained, with their columns.

        Args:
            batch: as verl's passes left it, with the rows verl added.
        """
        if any(map(is_padding, batch.tags)):
            batch = without(batch, [not is_padding(t) for t in batch.tags])
        wanted = set(self.stack.token_columns & set(TOKEN_COLUMNS))
        # Rewards tell verl's GRPO, and lengths which rows are trained, unless its rejection sampling takes tokens out.
        correction = self.config.algorithm.get("rollout_correction", None) or {}
        told = self.config.algorithm.adv_estimator == "grpo" and not correction.get("rollout_rs")
        reads = self.stack.reads_tokens or not told
        estimator = functools.partial(self._estimator, selected)
        if selected.nothing:
            tokens = no_tokens(wanted, selected.turns is not None, selected.versions is not None) if reads else None
            decision = decide_advantages(self.stack, selected.selection, tokens, None, estimator, self.rows)
            return Decided(batch, True, decision, (), self._metrics(selected, decision))
        number = torch.tensor([selected.number[key] for key in batch.keys])
        counts = self._host_counts(selected)
        mask = tokens = None
        host: Tensor | Literal["unread"] | None = "unread" if counts else None
        if reads:
            read = ["advantages"] if counts else []
            rows = fetch(batch, ["response_mask", *read, *(TOKEN_COLUMNS[n] for n in wanted)])
            mask = rows["response_mask"]
            versions = None if selected.versions is None else [selected.versions[key] for key in batch.keys]
            tokens = read_tokens(rows, wanted, number, [selected.forced[key] for key in batch.keys], versions)
            if selected.turns is not None:
                tokens = tokens.replace(turn=token_turns(tokens.row, tokens.position, selected.turns))
            host = flat(rows["advantages"])[flat(mask).bool()] if counts else None
        # verl's own agent loops may give any number of rows per rollout
        budget = sys.maxsize if selected.several_rows_of_verl else self.rows
        decision = decide_advantages(self.stack, selected.selection, tokens, host, estimator, budget)
        columns = self._columns(batch, decision, number, selected, mask)
        if selected.versions is not None and self.stack.in_loss("token_versions"):
            columns[TOKEN_VERSION] = torch.nested.as_nested_tensor(
                [selected.versions[key] for key in batch.keys], layout=torch.jagged
            )
        put(batch, columns)
        batch, nothing = all_but_one_leave(batch, decision.stays[number].tolist())
        own = [c for c in columns if c.startswith("rl_plugins")]
        return Decided(batch, nothing, decision, own, self._metrics(selected, decision))

    def _host_counts(self, selected: Selected) -> bool:
        """Whether verl's own advantages mean what they say: of the groups and rewards the methods decided on.

        verl groups by uid. It sees the rewards of hooks and only the rows that stayed, but not that a group was made
        in several waves, nor groups a program made apart, nor that a row has no reward, and it takes the raw reward in
        a group of one.
        """
        chosen = selected.selection
        scored = not bool(torch.isnan(chosen.rollouts.reward).any())
        if self.config.algorithm.adv_estimator != "grpo":
            if not selected.groups_of_verl or not scored:
                if self.stack.claimed("advantages"):
                    return False
                raise ConfigError(
                    f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} sees neither groups made in "
                    f"several waves (or apart, by a rollout program) nor rows without a reward, and this batch has "
                    f"some. Use algorithm.adv_estimator=grpo."
                )
            return True
        size = self.config.actor_rollout_ref.rollout.n
        regular = all(n == size for n in selected.generated.groups.size.tolist())
        whole = bool(chosen.rollouts.kept.all()) and not chosen.rewarded_by
        return selected.groups_of_verl and regular and whole and scored

    def _estimator(self, selected: Selected, rollouts: Rollouts) -> Tensor:
        """verl's GRPO for groups of any size; of several rows an agent loop gave of a rollout the last one counts, for
        all of them."""
        scale: Scale = "group" if self.config.algorithm.get("norm_adv_by_std_in_grpo", True) else "none"
        if not selected.several_rows_of_verl:
            return grpo_advantages(rollouts, scale, GRPO_EPS["verl"])
        once = rollouts.per_rollout
        last = torch.zeros(len(rollouts), dtype=torch.bool).index_fill(0, once.last, True)
        values = torch.zeros(len(rollouts), dtype=torch.float64)
        values[last] = grpo_advantages(rollouts.subset(last), scale, GRPO_EPS["verl"])
        return once.rows.rows(values[once.last])

    def _columns(
        self, batch: Batch, decision: Decision, number: Tensor, selected: Selected, mask: Tensor | None
    ) -> dict[str, Tensor]:
        """What a decision says, as columns of verl.

        Args:
            number: of each row of the batch in the decision.
            mask: the column of the tokens that are trained, if it was read.
        """

        def per_row(values: Tensor) -> Tensor:
            return values[number].float()[:, None]

        columns = {REAL: torch.ones(len(number), 1)}
        if self.stack.claimed("before_update"):
            columns[GROUP] = per_row(decision.rollouts.group)
            columns |= {column: per_row(getattr(decision.rollouts, name)) for name, column in ROW_VERSIONS.items()}
        columns |= {ROW_COLUMN + k: per_row(v) for k, v in decision.row_columns.items()}
        new = decision.estimator != "host" or (decision.advantages is not None and self.stack.claimed("shape"))
        if not new and decision.keep_tokens is None:
            return columns
        of = Ragged.of_length(selected.tokens[number])
        if mask is None and not torch.equal(selected.generated.length[number], of.length):
            mask = fetch(batch, ["response_mask"])["response_mask"]
        live = None if mask is None else flat(mask).bool()  # None: all

        def everywhere(values: Tensor) -> Tensor:
            values = values.float()
            return of.nested(values if live is None else torch.zeros(len(live)).masked_scatter_(live, values))

        if decision.advantages is None:
            values = spread(decision.row_advantages[number].float(), of.length)
            columns["advantages"] = columns["returns"] = of.nested(
                values if live is None else torch.where(live, values, 0.0)
            )
        elif new:
            columns["advantages"] = columns["returns"] = everywhere(decision.advantages)
        if decision.keep_tokens is not None and not bool(decision.keep_tokens.all()):
            assert live is not None  # tokens were read
            left = torch.zeros(len(live), dtype=torch.bool).masked_scatter_(live, ~decision.keep_tokens)
            rows = fetch(batch, ["response_mask", "loss_mask"])  # the loss reads one, the token count the other
            columns |= {n: of.nested(torch.where(left, 0, flat(rows[n]))) for n in ("response_mask", "loss_mask")}
        if decision.old_logprobs is not None:
            columns["old_log_probs"] = everywhere(decision.old_logprobs)
        columns |= {TOKEN_COLUMN + k: everywhere(v) for k, v in decision.token_columns.items()}
        return columns

    def _metrics(self, selected: Selected, decision: Decision) -> dict[str, float]:
        """What the methods logged, and rewards of everything that was generated: verl's own metrics see the rows that
        stayed."""
        generated = selected.generated
        values = combine([self.stack.metrics.take(), *selected.logged])
        look_for_idle(self.stack, decision, values)
        values["rl_plugins/rows_generated"] = float(len(generated))
        values["rl_plugins/rows_trained"] = float(decision.trained.sum())
        values["rl_plugins/reward_generated"] = float(torch.nanmean(generated.reward))
        if selected.lag:  # asynchronous modes plan ahead of the feedback
            values["rl_plugins/plan_lag"] = selected.lag
        inside = decision.rollouts.subset(decision.rollouts.kept)
        if len(inside):
            values[FRAC_ZERO_STD] = _frac_zero_std(inside.groups, inside.reward)
        for name, reward in decision.rewarded_by.items():
            values[f"rewards/{name}/mean"] = float(torch.nanmean(reward))
            values[f"rewards/{name}/std"] = float(batch_std(reward))
        return values


def weigh_rewards(batch: Batch, rewards: Mapping[str, float]) -> dict[str, float]:
    """Makes verl compute with the weighted sum of named rewards in a run without methods, as runs with methods do.

    Args:
        batch: rows of verl's own, whose column `rm_scores` is written.
        rewards: see `Settings`.

    Returns:
        Metrics of this reward, under the names that runs with methods use.

    Raises:
        ConfigError: the reward function does not answer with a key of `rewards`.
    """
    rows = fetch(batch, ["extra_fields", "rm_scores"])
    each = components(plain(rows["extra_fields"]), rewards)
    reward = weighted_reward(each, torch.tensor(list(rewards.values()), dtype=torch.float64))
    _put_scores(batch, Ragged.of(rows["rm_scores"]), reward)
    numbers: dict[str, int] = {}
    uids = [split(key)[0] for key in batch.keys]
    groups = Groups(torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids]))
    return {"rl_plugins/reward_generated": float(torch.nanmean(reward)), FRAC_ZERO_STD: _frac_zero_std(groups, reward)}


def _put_scores(batch: Batch, of: Ragged, reward: Tensor) -> None:
    """Writes (rows,) rewards to the last token of each row, 0 for a row without one."""
    values = torch.zeros(int(of.offsets[-1]))
    values[of.offsets[1:] - 1] = torch.nan_to_num(reward, nan=0.0).float()
    put(batch, {"rm_scores": of.nested(values)})


def _frac_zero_std(groups: Groups, reward: Tensor) -> float:
    """Share of rows in groups of equal rewards."""
    spread = groups.rows(torch.nan_to_num(groups.std(reward)))
    return float((spread == 0).double().mean())


def keep_sum_squared_probs(batch: Batch) -> None:
    """What verl's engine computed in addition to the log-probs, of the tokens of the responses."""
    rows = fetch(batch, ["sum_pi_squared", "response_mask"])
    values = response_from_nested(rows["sum_pi_squared"], rows["response_mask"])
    put(batch, {TOKEN_COLUMNS["sum_squared_probs"]: values})


def complete_rollout_logprobs(batch: Batch, unknown: Mapping[str, Ranges], metrics: dict[str, Any]) -> None:
    """Forced tokens have no sampled log-prob: they get that of the policy at the start of the batch. verl's metrics of
    the difference are made again, because they saw the place holders.

    Args:
        unknown: see `Selected`.
        metrics: of verl; values are replaced in it.
    """
    marks = [[] if is_padding(t) else unknown.get(k, []) for k, t in zip(batch.keys, batch.tags, strict=True)]
    if not any(marks):
        return
    names = ["rollout_log_probs", "old_log_probs", "response_mask", "responses"]
    rows = fetch(batch, names)
    if "rollout_log_probs" not in rows or "old_log_probs" not in rows:
        return
    of = Ragged.of(rows["response_mask"])
    values = torch.where(of.marked(marks), flat(rows["old_log_probs"]).float(), flat(rows["rollout_log_probs"]))
    put(batch, {"rollout_log_probs": of.nested(values)})
    padded = rows.select(*names[1:]).to_padded_tensor()
    padded["rollout_log_probs"] = of.nested(values).to_padded_tensor(0.0)
    metrics.update(calculate_debug_metrics(DataProto(batch=padded)))


def clean_padding(batch: Batch, own: Sequence[str]) -> None:
    """Rows verl adds to fill the batch are copies of its first row in every column it does not know of: make them one
    token that says nothing.

    Args:
        own: columns of ours, see `Decided`.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if is_padding(tag)]
    if not keys:
        return
    first = tq.kv_batch_get(keys=keys[:1], partition_id=batch.partition_id)
    known = {*TOKEN_COLUMNS.values(), "advantages", "returns", "values", "token_level_rewards"}
    known |= {"rollout_is_weights", *own}
    put(
        batch,
        {
            c: torch.nested.as_nested_tensor([torch.zeros(1, dtype=first[c].dtype) for _ in keys], layout=torch.jagged)
            for c in sorted(known)
            if c in first
        },
        keys,
    )


def logprob_multiple(config: Any, ranks: int, reference: bool) -> int:
    """What the number of rows must be divisible by for the log-prob passes: the ranks and their micro-batches."""
    parts = [config.actor_rollout_ref.rollout, *([config.actor_rollout_ref.ref] if reference else [])]
    sizes = [1 if p.log_prob_use_dynamic_bsz else int(p.log_prob_micro_batch_size_per_gpu or 1) for p in parts]
    return ranks * math.lcm(*sizes)


def whole_group_order(group: Sequence[int | None], step_rows: int, ranks: int) -> list[int]:
    """An order of rows in which no optimizer step cuts a group.

    verl gives each rank a contiguous part of the batch and cuts every part into the same number of steps.

    Args:
        group: of each row, None for padding.
        step_rows: rows of an optimizer step, all ranks.

    Raises:
        ConfigError: the groups cannot be packed into steps of this size.
    """
    members: dict[int, list[int]] = {}
    padding = []
    for i, g in enumerate(group):
        if g is None:
            padding.append(i)
        else:
            members.setdefault(g, []).append(i)
    steps: list[list[int]] = [[] for _ in range(len(group) // step_rows)]
    for rows in sorted(members.values(), key=len, reverse=True):
        room = [s for s in steps if len(s) + len(rows) <= step_rows]
        if not room:
            sizes = sorted(map(len, members.values()))
            raise ConfigError(
                f"A method needs whole groups in every optimizer step, and groups of {sizes} rows do not fit into "
                f"{len(steps)} steps of {step_rows} rows. Set actor_rollout_ref.actor.ppo_mini_batch_size to "
                f"data.train_batch_size."
            )
        max(room, key=lambda s: step_rows - len(s)).extend(rows)
    for s in steps:
        while len(s) < step_rows:
            s.append(padding.pop())
    share = step_rows // ranks
    return [i for rank in range(ranks) for s in steps for i in s[rank * share : (rank + 1) * share]]
