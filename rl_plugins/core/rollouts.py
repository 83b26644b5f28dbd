"""The data a method sees: `Plan`, `Rollouts` (rows), `TurnTable` (agent turns), flat `Tokens`, and what hooks return.

On the driver everything is a CPU tensor (float64 for numbers of rows, float32 for tokens) or a list; in the update
place (`Terms`, `Rows`) tensors lie on the training device. No object is ever changed by a hook: use `replace`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rl_plugins.core.groups import Groups, places
from rl_plugins.core.requests import mark_of

if TYPE_CHECKING:
    from rl_plugins.core.requests import Chat, Turn

Self = TypeVar("Self")


class Replaceable:
    """Immutable record with `replace`."""

    def replace(self: Self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


# ---- before generation


@dataclass(frozen=True)
class Completion(Replaceable):
    """A completion that is given instead of generated (replayed, foreign, corrected).

    With log-probs it is a sample: the importance weight of its tokens exists. Without them its tokens are `forced`.

    Args:
        tokens: its token ids, at least one.
        logprobs: of each token, of the distribution it was sampled from; those of observed tokens are not read. None
            where that distribution is not known.
        versions: published weights that made each token, as in `Tokens.version`; None: it counts as made now.
        rewards: of each reward function by name, NaN where it gave none; it is then not scored again. None: it is.
        observed: of each token, True if it was only read (a tool's output): it is not trained. None: none was.
        prompt: token ids before the completion; None: those of the plan row's prompt. An agent's environment may have
            added its first observation to them.
        turns: of an agent, in order, as in `Trajectory.turns`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    rewards: Mapping[str, float] | None = None
    observed: tuple[bool, ...] | None = None
    prompt: tuple[int, ...] | None = None
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class PlanRow(Replaceable):
    """One prompt and the rollouts to make for it.

    Args:
        prompt_index: dataset row; -1 for a foreign prompt, whose columns then all stand in `edit`.
        group: rollouts with the same number form a group. Unique per prompt unless a method merges prompts.
        n: rollouts that are trained. They count against the budget.
        spare: further rollouts, made to leave again (`select`, `shape`) by the method that asked for them.
        redundant: further rollouts that only begin: those that end last are closed and become no row (signal
            "redundancy").
        edit: dataset columns that replace those of the row (a prompt with a hint, say).
        prefix: token ids every completion of this row starts with. They are marked `forced`.
        max_tokens: completion length, at most the host's.
        max_turns: turns of an agent, at most those of the method that plays it (signal "turn_limits").
        given: completions used instead of the first generated ones.
        payload: what methods want to find again, by name of the method (`marked`).
    """

    prompt_index: int
    group: int
    n: int
    spare: int = 0
    redundant: int = 0
    edit: Mapping[str, Any] | None = None
    prefix: tuple[int, ...] = ()
    max_tokens: int | None = None
    max_turns: int | None = None
    given: tuple[Completion, ...] = ()
    payload: Any = None

    def marked(self, name: str, mark: Any) -> PlanRow:
        """The row with what a method wants to find again (`Rollouts.marks`, `Prompt.mark`), next to what others do."""
        return self.replace(payload={**(self.payload or {}), name: mark})

    def mark(self, name: str) -> Any:
        """What a method attached, None if nothing."""
        return mark_of(self.payload, name)


MAX_ROUNDS = 64
"""Rounds of one batch; a method that still asks for rollouts in the last of them is an error."""


@dataclass(frozen=True)
class GroupSoFar:
    """A group after the rounds so far.

    Args:
        row: of the first round as it was planned, payload included.
        rewards: (rollouts,) float64 of all its rollouts, in the order they were planned.
    """

    row: PlanRow
    rewards: Tensor


@dataclass(frozen=True)
class Plan(Replaceable):
    """What is to be generated.

    Args:
        rows: of this round. In round 0 the host's own plan: every prompt with `n = group_size`. In later rounds empty;
            a row added there with the group number of an earlier one adds rollouts to that group, also under another
            text (`edit`).
        group_size: rollouts per prompt the host trains.
        budget: rows that may still be trained.
        round: 0, 1, ..
        so_far: groups of the earlier rounds with their rewards (of the reward functions, before `rewards` hooks).
        batch: generation batch, counted from 0.
        first: this is the first call for this batch. False in later rounds, and where further prompts fill a batch that
            the plan so far leaves short.
    """

    rows: tuple[PlanRow, ...]
    group_size: int
    budget: int
    round: int = 0
    so_far: tuple[GroupSoFar, ...] = ()
    batch: int = 0
    first: bool = True

    @property
    def trained(self) -> int:
        """Rollouts of all rows that are trained."""
        return sum(row.n for row in self.rows)

    @property
    def generated(self) -> int:
        """Rollouts of all rows, spare ones included."""
        return sum(row.n + row.spare for row in self.rows)


@dataclass(frozen=True)
class Carried:
    """A group that was begun in an earlier batch and waits to go on.

    Args:
        prompt_index: dataset row.
        size: its rollouts.
        drawn: generation batch in which it was begun.
        tokens: of each rollout so far.
        finished: of each rollout, whether it needs no further token.
        versions: of each rollout, published weights that made its oldest token; -1 without a token.
    """

    prompt_index: int
    size: int
    drawn: int
    tokens: tuple[int, ...]
    finished: tuple[bool, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class Queue:
    """What `admit` decides on, before a batch is generated.

    Args:
        carried: groups that wait, those that waited longest first.
        groups: groups the batch trains: generation stops when so many are complete.
        group_size: rollouts per prompt.
        batch: generation batch, counted from 0.
    """

    carried: tuple[Carried, ...]
    groups: int
    group_size: int
    batch: int


@dataclass(frozen=True)
class Admission:
    """What `admit` returns: which groups are generated now. Waiting groups it does not name go on waiting.

    Args:
        fresh: new groups to begin.
        resume: places in `queue.carried` of groups that go on.
        restart: of groups that begin again, without their tokens.
        drop: of groups that are given up.
    """

    fresh: int
    resume: tuple[int, ...] = ()
    restart: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptPool:
    """Where `select_prompts` chooses from.

    Args:
        size: rows of the dataset; prompts are 0..size-1.
        proposal: the prompts the host would take next, in its order.
        taken: prompts this batch has had already, those a plan left out included (a further call fills a batch that
            is not full); choose others.
        dataset: the dataset itself, for methods that look at columns.
        batch: generation batch, counted from 0.
    """

    size: int
    proposal: tuple[int, ...]
    taken: tuple[int, ...]
    dataset: Any
    batch: int


@dataclass(frozen=True)
class RewardFunction:
    """One of the run's reward functions, which `start` can call on the driver.

    Args:
        name: as in `Run.reward_names`.
        weight: of its reward in the weighted sum.
        call: (dataset rows, texts of completions) -> one reward per pair, None where it gave none. No other process
            takes part, and nothing of it is logged. It raises what the function raises.
        source: the function itself, for those that read its code.
    """

    name: str
    weight: float
    call: Callable[[Sequence[Mapping[str, Any]], Sequence[str]], list[float | None]]
    source: Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """What `check` and `start` are told about the run.

    Args:
        host, host_version: "trl" or "verl".
        dataset: the training dataset, None if it is a stream; in `check` also if it was not read yet.
        dataset_size: its rows, None as of `dataset`.
        columns: its columns.
        reward_names: names of the reward functions; none in `check` if they are not known yet.
        group_size: rollouts per prompt that are trained.
        total_steps: optimizer steps of the whole run.
        total_batches: generation batches of the whole run (rounded up).
        max_completion_length: in tokens.
        fingerprint: of the dataset, a short text that tells datasets apart; empty where it was not made, as in `check`
            before the run.
        chat: tokenizer and chat template of the policy: texts of other sources become token ids with them. In `start`
            only; None before the model is there.
        rows_per_update: rows per optimizer step of all processes, if every row is trained; None if not known.
        batch_rows: rows that a generation batch trains; None if not known.
        buffered: the host takes batches out of a buffer that counts groups, so a plan has as many groups as it was
            given (verl's asynchronous modes).
        keeps_versions: the host keeps older weights, so that old log-probs are of the weights that generated each token
            where a method asks for that (`Method.old_policy`; verl's `separate_async`).
        reward_functions: those that can be called here, see `RewardFunction`. In `start` only.
        unreachable_rewards: (name, reason) of every other one. In `start` only.
    """

    host: str
    host_version: str
    dataset: Any
    dataset_size: int | None
    columns: tuple[str, ...]
    reward_names: tuple[str, ...]
    group_size: int
    total_steps: int
    total_batches: int
    max_completion_length: int
    fingerprint: str = ""
    chat: Chat | None = None
    rows_per_update: int | None = None
    batch_rows: int | None = None
    buffered: bool = False
    keeps_versions: bool = False
    reward_functions: tuple[RewardFunction, ...] = ()
    unreachable_rewards: tuple[tuple[str, str], ...] = ()

    @property
    def batch_prompts(self) -> int | None:
        """Prompts of a generation batch with groups of equal size; None if that is not known, or groups come one by
        one (`buffered`)."""
        return None if self.batch_rows is None or self.buffered else self.batch_rows // self.group_size


# ---- after generation


@dataclass(frozen=True)
class TurnTable(Replaceable):
    """Turns of agents, flat: one entry per turn, whichever way the host lays rows out (a trajectory or a turn a row).

    Args:
        row: (turns,) row of `Rollouts` that holds the turn's tokens.
        turn: (turns,) number of the turn inside its rollout, from 0.
        anchor: what was observed before the turn (any hashable or nested plain data), for grouping by state.
        reward: (turns,) float64, NaN where the environment gave none.
        valid: (turns,) bool, False for a turn whose action was not understood.
    """

    row: Tensor
    turn: Tensor
    anchor: Sequence[Any]
    reward: Tensor
    valid: Tensor


@dataclass(frozen=True, eq=False)
class Jagged(Sequence[Tensor]):
    """Rows of different lengths in one tensor, one behind the other. `x[i]` is row i, a view on `values`.

    Args:
        values: (values of all rows,).
        offsets: (rows + 1,) int64, where each row begins in `values`, and the number of values.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, values: Tensor, length: Tensor) -> Jagged:
        """Values that lie row by row, and the (rows,) lengths."""
        return cls(values, torch.nn.functional.pad(torch.cumsum(length, 0), (1, 0)))

    @classmethod
    def cat(cls, rows: Sequence[Tensor]) -> Jagged:
        """One tensor a row."""
        length = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls.of(torch.cat(list(rows)) if rows else torch.empty(0, dtype=torch.int64), length)

    @property
    def length(self) -> Tensor:
        """(rows,) int64."""
        return self.offsets.diff()

    def take(self, rows: Tensor) -> Jagged:
        """Rows of these numbers, in this order, as often as they are named."""
        length = self.length[rows]
        first = torch.repeat_interleave(self.offsets[rows], length)
        return Jagged.of(self.values[first + places(length)], length)

    @cached_property
    def _bounds(self) -> list[int]:
        return self.offsets.tolist()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: Any) -> Any:
        i = range(len(self))[row]
        return self.values[self._bounds[i] : self._bounds[i + 1]]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(self.values, self.length.tolist()))


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Prompt and whole completion of every row, as the engine saw and made them. Text that is tokenized again is
    another rollout.

    Args:
        prompt: int64.
        completion: int64; `Tokens.position` is a place in a row of it.
        observed: bool like `completion`, with its offsets: tokens that were only read and are not trained.
    """

    prompt: Jagged
    completion: Jagged
    observed: Jagged

    @classmethod
    def cat(
        cls, prompt: Sequence[Tensor], completion: Sequence[Tensor], observed: Sequence[Tensor] | None = None
    ) -> TokenIds:
        """One tensor a row; without `observed` none was only read."""
        made = Jagged.cat([row.long() for row in completion])
        read = torch.zeros(len(made.values), dtype=torch.bool) if observed is None else Jagged.cat(observed).values
        return cls(Jagged.cat([row.long() for row in prompt]), made, Jagged(read.bool(), made.offsets))

    def take(self, rows: Tensor) -> TokenIds:
        """Rows of these numbers, in this order, as often as they are named."""
        return TokenIds(self.prompt.take(rows), self.completion.take(rows), self.observed.take(rows))


RAGGED = ("token_ids", "step_rewards")
"""Fields of `Rollouts` with rows of different lengths."""


@dataclass(frozen=True)
class Rollouts(Replaceable):
    """All rollouts of one generation batch, one row per trained sequence, in the order of the plan.

    Args:
        group: (rows,) int64.
        prompt_index: (rows,) int64 stable dataset row; -1 for foreign prompts and for streams.
        rollout: (rows,) int64 number inside its group.
        index: (rows,) int64 number of the row inside its rollout (turns, agents); 0 where a rollout is one row.
        rewards: (rows, reward functions) float64, NaN where a function returned None.
        reward_names, reward_weights: of the functions; weights (reward functions,) float64.
        reward: (rows,) float64 weighted sum over the functions that scored the row, or what a `rewards` hook made of
            it. NaN = unscorable: out of every statistic, advantage 0, still trained as far as the host trains it.
        length: (rows,) int64 tokens that may carry a gradient.
        truncated: (rows,) bool, stopped by the length limit.
        kept: (rows,) bool. False: left by `select`. All True in every hook but `observe` and a later `select`.
        version: (rows,) int64 published weights that made the row's oldest token. Weights are counted from 0, those
            the run begins with; in TRL every optimizer step publishes, in verl every `update_weights`.
        newest_version: (rows,) that made its newest token; as `version` where a row was made in one go.
        current_version: the newest published weights at the start of this step: those being trained, if no optimizer
            step was made since.
        steps_since_published: optimizer steps made since these weights were published.
        token_ids: if a method needs them.
        step_rewards: float64, of each row the weighted sum over the functions that scored a step; NaN if none did. A
            number in the place of a list counts for the last step. There if a method needs it.
        text, raw_text, messages: decoded completions without and with special tokens, and as the host's list of
            messages; present if a method needs them.
        meta: dataset columns asked for with `needs = {"column:NAME"}`, and the host's per-row extras: lists.
        payload: what the plan attached to each row.
        turns: of agents, or None.
        batch: generation batch, counted from 0.
    """

    group: Tensor
    prompt_index: Tensor
    rollout: Tensor
    index: Tensor
    rewards: Tensor
    reward_names: tuple[str, ...]
    reward_weights: Tensor
    reward: Tensor
    length: Tensor
    truncated: Tensor
    kept: Tensor
    version: Tensor
    text: Sequence[str] | None = None
    raw_text: Sequence[str] | None = None
    messages: Sequence[Any] | None = None
    meta: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    payload: Sequence[Any] | None = None
    turns: TurnTable | None = None
    batch: int = 0
    newest_version: Tensor = None  # type: ignore[assignment]  # as `version`
    current_version: int = 0
    steps_since_published: int = 0
    token_ids: TokenIds | None = None
    step_rewards: Jagged | None = None

    def __post_init__(self) -> None:
        if self.newest_version is None:
            object.__setattr__(self, "newest_version", self.version)

    def __len__(self) -> int:
        return len(self.group)

    def marks(self, name: str) -> list[Any]:
        """What the method of this name attached to the plan row of each row (`PlanRow.marked`); None where nothing."""
        return [mark_of(payload, name) for payload in self.payload or [None] * len(self)]

    def has_mark(self, name: str) -> Tensor:
        """(rows,) bool, rows that have a mark of this method."""
        return torch.tensor([mark is not None for mark in self.marks(name)], dtype=torch.bool)

    @property
    def staleness(self) -> Tensor:
        """(rows,) int64 published weights between the row's oldest token and now; of a token:
        `rollouts.current_version - tokens.version`."""
        return self.current_version - self.version

    @cached_property
    def groups(self) -> Groups:
        """Statistics per group of these rows."""
        return Groups(self.group)

    @cached_property
    def per_rollout(self) -> PerRollout:
        """Every rollout once, however many rows (turns, agents) it has."""
        return PerRollout.of(self)

    def subset(self, keep: Tensor) -> Rollouts:
        """The rows where `keep` is True; turns are renumbered."""
        if bool(keep.all()):
            return self
        rows = keep.nonzero()[:, 0]
        take = rows.tolist()

        def pick(value: Any) -> Any:
            if value is None:
                return None
            return value[rows] if isinstance(value, Tensor) else [value[i] for i in take]

        per_row = (
            "group",
            "prompt_index",
            "rollout",
            "index",
            "rewards",
            "reward",
            "length",
            "truncated",
            "kept",
            "version",
            "newest_version",
            "text",
            "raw_text",
            "messages",
            "payload",
        )
        changes = {name: pick(getattr(self, name)) for name in per_row}
        changes["meta"] = {name: pick(values) for name, values in self.meta.items()}
        for name in RAGGED:
            if (ragged := getattr(self, name)) is not None:
                changes[name] = ragged.take(rows)
        if self.turns is not None:
            stay = keep[self.turns.row]
            new_row = torch.cumsum(keep, 0) - 1
            changes["turns"] = TurnTable(
                row=new_row[self.turns.row[stay]],
                turn=self.turns.turn[stay],
                reward=self.turns.reward[stay],
                anchor=[a for a, s in zip(self.turns.anchor, stay.tolist(), strict=True) if s],
                valid=self.turns.valid[stay],
            )
        return self.replace(**changes)


@dataclass(frozen=True)
class PerRollout:
    """The rollouts of a batch, each once, by group and number.

        once = rollouts.per_rollout
        mean = once.groups.mean(once.reward)                             # (groups,) each rollout counts once
        advantage = once.rows.rows(once.reward - once.groups.rows(mean))  # (rows,)

    Attributes:
        rows: which rows make a rollout; `rows.index` is the rollout of each row.
        group, rollout: (rollouts,) int64 as in `Rollouts`.
        prompt_index: (rollouts,) int64.
        reward: (rollouts,) float64, mean over its rows that have one; NaN if none has.
        last: (rollouts,) int64 its last row.
    """

    rows: Groups
    group: Tensor
    rollout: Tensor
    prompt_index: Tensor
    reward: Tensor
    last: Tensor

    @classmethod
    def of(cls, rollouts: Rollouts) -> PerRollout:
        """Of these rollouts; `rollouts.per_rollout` is the same."""
        groups = rollouts.groups
        width = int(rollouts.rollout.max()) + 1 if len(rollouts) else 1
        rows = Groups(groups.index * width + rollouts.rollout)
        by_time = torch.sort(rollouts.index, stable=True).indices
        last = by_time[rows.max(torch.argsort(by_time).double()).long()]
        return cls(
            rows=rows,
            group=groups.ids[rows.ids // width],
            rollout=rows.ids % width,
            prompt_index=rollouts.prompt_index[last],
            reward=rows.mean(rollouts.reward),
            last=last,
        )

    @cached_property
    def groups(self) -> Groups:
        """Statistics per group over rollouts; its numbers are those of `rollouts.groups`."""
        return Groups(self.group)

    def row_weight(self, x: Tensor) -> Tensor:
        """(rows,) 1 / rows of the same rollout that have a value in `x`: the weight with which a row of `x` makes its
        rollout count once."""
        return 1 / self.rows.rows(self.rows.n(x))

    def members(self, rollouts: Rollouts, keep: Tensor) -> dict[int, list[list[int]]]:
        """Group number -> its rollouts, in order -> their rows, in order; of rows where `keep` is True."""
        order = torch.sort(rollouts.index, stable=True).indices
        order = order[torch.sort(self.rows.index[order], stable=True).indices]
        found: dict[int, dict[int, list[int]]] = {}
        of = self.rows.index.tolist()
        group = self.group.tolist()
        for row in order[keep[order]].tolist():
            found.setdefault(group[of[row]], {}).setdefault(of[row], []).append(row)
        return {g: list(rows.values()) for g, rows in found.items()}


def weighted_reward(rewards: Tensor, weights: Tensor) -> Tensor:
    """(rows, functions) -> (rows,): weighted sum of the functions that scored a row; NaN if none did."""
    total = torch.nansum(rewards * weights, dim=1)
    return torch.where(torch.isnan(rewards).all(dim=1), torch.nan, total)


@dataclass(frozen=True)
class Tokens(Replaceable):
    """Every token of the batch that may carry a gradient, flat: there is no padding here that anything could depend on.
    They lie row by row, in the order of their places.

    Statistics over rows are `Groups(tokens.row, count=len(rollouts))`. Columns a method did not ask for are None.

    Args:
        row: (tokens,) int64 row of the rollouts passed along.
        position: (tokens,) int64 place in the completion.
        turn: (tokens,) int64 entry of `rollouts.turns`, or None.
        forced: (tokens,) bool, put in the policy's place (prefix, completion given without log-probs) instead of
            sampled.
        version: (tokens,) int64 published weights that made each token, as in `Rollouts.version`.
        advantages: (tokens,) float64.
        keep: (tokens,) bool, False for tokens an earlier `shape` took out of the update.
        old_logprobs: (tokens,) float32 of the policy at the start of the step.
        rollout_logprobs: of the distribution that was sampled from; NaN where that is not known.
        ref_logprobs: of the reference policy.
        teacher_logprobs: of the teacher under the prompt of `teacher_prompts`; NaN in rows without one.
        entropies: nats, of the policy at the start of the step.
        sum_squared_probs: sum of the squared probabilities of all tokens of the vocabulary in this place, of the
            distribution whose log-probs are `old_logprobs`.
    """

    row: Tensor
    position: Tensor
    advantages: Tensor
    keep: Tensor
    forced: Tensor
    turn: Tensor | None = None
    version: Tensor | None = None
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    sum_squared_probs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.row)

    def subset(self, keep: Tensor, new_row: Tensor | None = None) -> Tokens:
        """The tokens where `keep` is True, with `row` mapped through `new_row` if given."""
        changes = {
            f.name: getattr(self, f.name)[keep] for f in dataclasses.fields(self) if getattr(self, f.name) is not None
        }
        if new_row is not None:
            changes["row"] = new_row[changes["row"]]
        return self.replace(**changes)


@dataclass(frozen=True)
class Shape(Replaceable):
    """What `shape` returns; a field left None changes nothing.

    Args:
        advantages: (tokens,) new token advantages.
        row_factor: (rows,) factor on the advantages of a row, so a rule per row reads no token.
        keep_rows: (rows,) bool, False: the row leaves the update.
        keep_tokens: (tokens,) bool, False: the token leaves the update.
        old_logprobs: (tokens,) log-probs to use in the importance ratio instead of the host's.
        row_columns, token_columns: columns for `policy_loss` and `regularize`, (rows,) and (tokens,) each.
    """

    advantages: Tensor | None = None
    row_factor: Tensor | None = None
    keep_rows: Tensor | None = None
    keep_tokens: Tensor | None = None
    old_logprobs: Tensor | None = None
    row_columns: Mapping[str, Tensor] = field(default_factory=dict)
    token_columns: Mapping[str, Tensor] = field(default_factory=dict)


# ---- in update


@dataclass(frozen=True)
class Rows(Replaceable):
    """Rows of one optimizer step over all ranks and micro-batches, for `before_update`. Only rows that are trained.

    Args:
        group: (rows,) int64.
        length: (rows,) tokens that are trained.
        logprobs, old_logprobs, rollout_logprobs: (rows,) sums over those tokens: at the current weights (one pass
            without gradient, if `needs` has "current_logprobs"), at the start of the step, of the behaviour policy.
        columns: row columns of `shape`.
        version, newest_version: (rows,) int64 as in `Rollouts`.
        current_version, steps_since_published: as in `Rollouts`, of this optimizer step.
    """

    group: Tensor
    length: Tensor
    logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    version: Tensor | None = None
    newest_version: Tensor | None = None
    current_version: int = 0
    steps_since_published: int = 0


@dataclass(frozen=True)
class Update:
    """What `before_update` returns.

    Args:
        lr_scale: factor on the learning rate of this one optimizer step; finite and at least 0.
        columns: row columns for `policy_loss` and `regularize`, (rows,) each.
    """

    lr_scale: float = 1.0
    columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RowRatio:
    """Importance ratios of one row in one optimizer step, for the trace.

    Args:
        row: of the generation batch.
        ratio: (tokens,) float32 of the completion, NaN where it is not trained; what follows is not trained either.
        clipped: (tokens,) bool, the clip left it no gradient; None where the surrogate has no such clip.
    """

    row: int
    ratio: Tensor
    clipped: Tensor | None


@dataclass(frozen=True)
class Terms(Replaceable):
    """One micro-batch in the loss, padded: everything (rows, time) unless said otherwise.

    Args:
        mask: 1 where a token is trained.
        logprobs: with gradient.
        entropies: with gradient, in nats; None unless `needs` has "current_entropies".
        advantages: of each token.
        old_logprobs: of the policy at the start of the step (equal to `logprobs.detach()` where that is the same).
        rollout_logprobs, ref_logprobs: if asked for in `needs`; a token whose behaviour log-prob is not known has its
            old one.
        columns: own columns: (rows, time), and (rows, 1) for those given per row.
        num_tokens, num_rows: tokens and rows of the whole optimizer step, all ranks, without those that left.
        max_length: the configured completion length.
        versions: int64 published weights that made each token; None unless `needs` has "token_versions".
        current_version, steps_since_published: as in `Rollouts`, of this optimizer step.
    """

    mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    num_tokens: Tensor
    num_rows: Tensor
    max_length: int
    entropies: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    versions: Tensor | None = None
    current_version: int = 0
    steps_since_published: int = 0
