"""Rows of TransferQueue as the driver sees them, and back.

verl stores every trajectory as a row of ragged columns. Here a batch becomes `Rollouts` and flat `Tokens`; what a
decision says is written back as columns of the same raggedness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.groups import places, spread
from rl_plugins.core.requests import ORIGIN, Turn
from rl_plugins.core.rollouts import Jagged, Rollouts, TokenIds, Tokens, weighted_reward
from rl_plugins.runtime.preflight import no_row_has
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.step_rewards import combined, total
from rl_plugins.runtime.turn_table import spans
from rl_plugins.verl.capabilities import NESTED_COLUMNS
from rl_plugins.verl.host import Batch, Columns, Tokenizer
from rl_plugins.verl.prompts import COLUMN, MADE, NUMBERS, STEPS, TURNS, VERSIONS, Note, Ranges, ranges

ROW_COLUMN, TOKEN_COLUMN = "rl_plugins_row_column:", "rl_plugins_token_column:"
REAL = "rl_plugins_real"  # 1 for rows, 0 for those verl adds to fill the batch
GROUP = "rl_plugins_group"
TOKEN_VERSION = "rl_plugins_token_version"
ROW_VERSIONS = {"version": "rl_plugins_version", "newest_version": "rl_plugins_newest_version"}

# Signal -> column of verl.
TOKEN_COLUMNS = {
    "old_logprobs": "old_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "ref_logprobs": "ref_log_prob",
    "entropies": "entropy",
    "sum_squared_probs": "rl_plugins_sum_squared_probs",
    "teacher_logprobs": "rl_plugins_teacher_log_prob",
}


class Ragged:
    """Where the values of a ragged column belong.

    Attributes:
        offsets: (rows + 1,) where each row begins in the values, and their number.
        length: (rows,) values of each row.
    """

    def __init__(self, offsets: Tensor) -> None:
        self.offsets, self.length = offsets, offsets.diff()

    @classmethod
    def of(cls, column: Tensor) -> Ragged:
        return cls(column.offsets().cpu())  # type: ignore[attr-defined]

    @classmethod
    def of_length(cls, length: Tensor) -> Ragged:
        return cls(torch.nn.functional.pad(torch.cumsum(length, 0), (1, 0)))

    @cached_property
    def row(self) -> Tensor:
        """(values,) row of each value."""
        return spread(torch.arange(len(self.length)), self.length)

    @cached_property
    def position(self) -> Tensor:
        """(values,) place of each value in its row."""
        return places(self.length)

    def sums(self, values: Tensor) -> Tensor:
        """(values,) -> (rows,) float64."""
        if not len(self.length):  # segment_reduce refuses that
            return values.new_zeros(0, dtype=torch.float64)
        return torch.segment_reduce(values.double(), "sum", lengths=self.length, initial=0.0)

    def marked(self, ranges: Sequence[Ranges]) -> Tensor:
        """(values,) bool: True inside of the ranges [start, stop) of each row."""
        marks = torch.zeros(int(self.offsets[-1]), dtype=torch.bool)
        for first, of_row in zip(self.offsets.tolist(), ranges, strict=False):
            for start, stop in of_row:
                marks[first + start : first + stop] = True
        return marks

    def nested(self, values: Tensor) -> Tensor:
        """(values,) -> ragged column, which holds these values and no copy."""
        low, high = map(int, torch.aminmax(self.length)) if len(self.length) else (0, 0)  # without them it pads wrongly
        return torch.nested.nested_tensor_from_jagged(values, self.offsets, min_seqlen=low, max_seqlen=high)


def flat(column: Tensor) -> Tensor:
    """All values of a column, ragged or one per row."""
    return column.values() if column.is_nested else column.flatten()


def plain(column: Any) -> list[Any]:
    """Objects of a column, unwrapped."""
    return [getattr(x, "data", x) for x in column]


def notes_of(rows: Mapping[str, Any]) -> list[Note]:
    """What the plan said of the prompt of each row."""
    return plain(rows[COLUMN])


def column_of(rows: Mapping[str, Any], name: str) -> list[Any] | None:
    """A dataset column by name, or a field of `extra_info` or `reward_model`; None if there is none."""
    if name in rows:
        values = rows[name]
        if isinstance(values, Tensor):
            return [v.tolist() for v in values.unbind()] if values.is_nested else values.tolist()
        return plain(values)
    for nested in NESTED_COLUMNS:
        if nested in rows and all(isinstance(x, dict) and name in x for x in plain(rows[nested])):
            return [x[name] for x in plain(rows[nested])]
    return None


def row_columns(rows: Mapping[str, Any], stack: MethodStack) -> dict[str, list[Any]]:
    """The columns methods ask for: what a row's program or agent loop says of it, else the dataset's.

    Raises:
        MethodError: neither has a column.
    """
    own = [e[MADE]["meta"] if MADE in e else e for e in plain(rows["extra_fields"])]
    found = {}
    for name in sorted(n.removeprefix("column:") for n in stack.needs_now if n.startswith("column:")):
        values = column_of(rows, name)
        if values is None and not any(name in e for e in own) and name != ORIGIN:
            raise no_row_has(name, [m.name for m in stack.methods if f"column:{name}" in m.needs])
        found[name] = [e.get(name, v) for e, v in zip(own, values or [None] * len(own), strict=True)]
    return found


def plan_order(keys: Sequence[str], notes: Sequence[Note]) -> list[int]:
    """Places of rows in the order of the plan: whatever finished first, the driver sees them in this order."""

    def key(i: int) -> tuple[Any, ...]:
        note = notes[i]
        return note["wave"], note["group"], note["round"], note["place"], *split(keys[i])[1:]

    return sorted(range(len(keys)), key=key)


def read_rollouts(
    rows: Mapping[str, Any],
    batch: Batch,
    stack: MethodStack | None,
    rewards: Mapping[str, float],
    tokenizer: Tokenizer,
    number: int,
    published: int = 0,
    steps_since: int = 0,
) -> Rollouts:
    """Rollouts of the rows in their order.

    Args:
        rows: columns of the rows: notes, `extra_fields`, `rm_scores` where those do not say the score, and what signals
            are read from.
        batch: their keys and tags; a key is "{uid}_{session}_{index}".
        stack: the methods, whose signals are filled in; None: none is.
        rewards: key of the reward function's answer -> weight, their weighted sum is the reward; empty: verl's score.
        number: of the generation batch.
        published: newest weights at the start of the step.
        steps_since: optimizer steps since their publication.

    Raises:
        ConfigError: the reward function does not answer with a key of `rewards`.
        MethodError: a column is missing.
    """
    needs = stack.needs_now if stack is not None else set()
    notes = notes_of(rows)
    extra = plain(rows["extra_fields"])
    group, rollout, index = _numbers(batch.keys, notes, extra)
    responses = rows["responses"].unbind() if needs & {"text", "messages", "raw_text"} else ()
    text = tokenizer.batch_decode(responses, skip_special_tokens=True) if needs & {"text", "messages"} else None
    each = components(extra, rewards) if rewards else _scores(rows, extra)[:, None]
    weights = torch.tensor(list(rewards.values()) or [1.0], dtype=torch.float64)
    return Rollouts(
        group=torch.tensor(group, dtype=torch.int64),
        prompt_index=torch.tensor([note["prompt_index"] for note in notes], dtype=torch.int64),
        rollout=torch.tensor(rollout, dtype=torch.int64),
        index=torch.tensor(index, dtype=torch.int64),
        rewards=each,
        reward_names=tuple(rewards) or ("score",),
        reward_weights=weights,
        reward=weighted_reward(each, weights),
        length=torch.tensor([e[NUMBERS][1] for e in extra], dtype=torch.int64),
        truncated=_truncated(extra, tokenizer),
        kept=torch.ones(len(batch), dtype=torch.bool),
        version=_versions(batch, "min_global_steps", published),
        newest_version=_versions(batch, "max_global_steps", published),
        current_version=published,
        steps_since_published=steps_since,
        token_ids=_token_ids(rows) if "token_ids" in needs else None,
        step_rewards=_step_rewards(extra, each, weights) if "step_rewards" in needs else None,
        text=text if "text" in needs else None,
        raw_text=tokenizer.batch_decode(responses, skip_special_tokens=False) if "raw_text" in needs else None,
        messages=[[{"role": "assistant", "content": t}] for t in text or ()] if "messages" in needs else None,
        meta=row_columns(rows, stack) if stack is not None else {},
        payload=[note["payload"] for note in notes],
        batch=number,
    )


def _step_rewards(extra: Sequence[Mapping[str, Any]], rewards: Tensor, weights: Tensor) -> Jagged:
    """Lists that the reward function returned; a row whose reward was known already has one step.

    Args:
        rewards: (rows, rewards)
    """
    noted = [e.get(STEPS) or [None] * len(weights) for e in extra]
    return combined([list(of_reward) for of_reward in zip(*noted, strict=True)], rewards, weights)


def _token_ids(rows: Mapping[str, Any]) -> TokenIds:
    """Prompt and completion of every row, and which tokens its agent loop only read."""
    prompt, completion, mask = (
        Jagged(flat(rows[name]).long(), Ragged.of(rows[name]).offsets)
        for name in ("prompts", "responses", "response_mask")
    )
    return TokenIds(prompt, completion, Jagged(mask.values == 0, mask.offsets))


def _numbers(
    keys: Sequence[str], notes: Sequence[Note], extra: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[int], list[int]]:
    """Group of every row, number of its rollout in the group, and number of the row in the rollout.

    Groups have the number of their plan; where several plans of an asynchronous mode used one, those behind the first
    are numbered after all of them. Rows with a label of a program's own form groups after those.
    """
    planned = dict.fromkeys((note["wave"], note["group"]) for note in notes)
    after = 1 + max((number for _, number in planned), default=-1)
    groups: dict[Any, int] = {}
    taken: set[int] = set()
    for wave, number in planned:
        groups[wave, number] = after if number in taken else number
        after += number in taken
        taken.add(number)
    rollouts: dict[tuple[int, str, int], int] = {}  # (group, uid, rollout of the prompt) -> number in its group
    count: dict[int, int] = {}
    numbers: tuple[list[int], list[int], list[int]] = ([], [], [])
    for key, note, e in zip(keys, notes, extra, strict=True):
        uid, session, place = split(key)
        made = e.get(MADE) or {"group": None, "rollout": session, "index": place}
        label = (note["wave"], note["group"]) if made["group"] is None else (uid, "label", made["group"])
        if label not in groups:
            groups[label], after = after, after + 1
        g = groups[label]
        rollout = (g, uid, made["rollout"])
        if rollout not in rollouts:
            rollouts[rollout] = count[g] = count.get(g, -1) + 1
        for column, number in zip(numbers, (g, rollouts[rollout], made["index"]), strict=True):
            column.append(number)
    return numbers


def scored_late(extra: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a score is not known from `extra_fields`: a reward model on the trainer's devices came after them."""
    return any(e[NUMBERS][-1] is None for e in extra)


def _scores(rows: Mapping[str, Any], extra: Sequence[Mapping[str, Any]]) -> Tensor:
    """(rows,) float64 verl's."""
    if scored_late(extra):
        return Ragged.of(rows["rm_scores"]).sums(flat(rows["rm_scores"]))
    return torch.tensor([e[NUMBERS][-1] for e in extra]).double()  # float32 in verl


def _truncated(extra: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Tensor:
    """(rows,) bool"""
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}

    def cut(e: Mapping[str, Any]) -> bool:
        return e[MADE]["finish"] in ("length", "abort") if MADE in e else e[NUMBERS][2] not in ends

    return torch.tensor([cut(e) for e in extra], dtype=torch.bool)


def read_turns(rows: Mapping[str, Any], tokenizer: Tokenizer) -> list[tuple[Turn, ...]]:
    """Turns of every row: as its program or agent loop marked them, else every unbroken run of trained tokens.

    A loop that marks no tokens may still say of each turn what it knows (`TURNS`: a list of dicts with "anchor",
    "reward" and "valid"). Otherwise the anchor is the text that was read before the turn, and rewards are verl's
    `turn_scores` or `tool_rewards`, where there is one per turn, or one per turn but the last.

    Args:
        rows: columns "extra_fields", "response_mask", "responses" and "prompts".
    """
    found = []
    columns = [rows[name].unbind() for name in ("response_mask", "responses", "prompts")]
    for e, mask, response, prompt in zip(plain(rows["extra_fields"]), *columns, strict=True):
        told = e.get(TURNS) or ()
        if told and "start" in told[0]:
            found.append(tuple(Turn(**t) for t in told))
            continue
        turns = spans(mask.tolist())
        if told:
            known = [*told[: len(turns)], *[{}] * (len(turns) - len(told))]
            found.append(tuple(Turn(t.start, t.stop, **k) for t, k in zip(turns, known, strict=True)))
            continue
        rewards = next((r for r in (e.get("turn_scores"), e.get("tool_rewards")) if _fits(r, len(turns))), ())
        stops = [0, *(t.stop for t in turns)]
        read = [response[a : t.start].tolist() for a, t in zip(stops, turns, strict=False)]
        if turns:
            read[0] = [*prompt.tolist(), *read[0]]
        found.append(spans(mask.tolist(), tokenizer.batch_decode(read, skip_special_tokens=True), rewards))
    return found


def _fits(rewards: Any, turns: int) -> bool:
    return bool(rewards) and len(rewards) in (turns, turns - 1)


def split(key: str) -> tuple[str, int, int]:
    """ "{uid}_{session}_{index}" in its parts."""
    uid, session, index = key.rsplit("_", 2)
    return uid, int(session), int(index)


def _versions(batch: Batch, name: str, published: int) -> Tensor:
    """(rows,) int64 a version of every row; `published` where its agent loop asked no engine."""
    told = [tag.get(name) for tag in batch.tags]
    return torch.tensor([published if v is None else int(v) for v in told], dtype=torch.int64)


def token_versions(rows: Mapping[str, Any], rollouts: Rollouts) -> list[Tensor]:
    """Of each row: (response,) int64 published weights that made each token; of tokens no policy made, the newest.

    A row's extra field `VERSIONS` holds of every request, in order, its attempts: [version, tokens], -1 for tokens of
    no policy. Requests are matched with the unbroken runs of trained tokens, if there are as many, because an agent
    loop may cut the end of a turn; otherwise they are matched as a whole, if they tell as many tokens as are trained.
    A row whose tags name one version is of that version, whatever the requests of its loop were.

    Raises:
        MethodError: a row of several versions, whose requests do not say which version each token has.
    """
    now, found = rollouts.current_version, []
    extra, masks = plain(rows["extra_fields"]), rows["response_mask"].unbind()
    spans = zip(rollouts.version.tolist(), rollouts.newest_version.tolist(), strict=True)
    for e, mask, (oldest, newest) in zip(extra, masks, spans, strict=True):
        live = mask.bool()
        requests = [made for made in e.get(VERSIONS) or () if made]
        told = _matched(requests, ranges(live.numpy()))
        if oldest == newest:
            told = torch.full((int(live.sum()),), oldest) if told is None else torch.where(told < 0, told, oldest)
        elif told is None or bool(((told >= 0) & ((told < oldest) | (told > newest))).any()):
            every = [run for made in requests for run in made]
            names = ", ".join(map(str, sorted({version for version, _ in every})[:8])) or "none"
            raise MethodError(
                f"A method needs the versions of tokens. A rollout made by the versions {oldest} to {newest} has "
                f"{int(live.sum())} trained tokens in {len(ranges(live.numpy()))} turns, and its agent loop tells "
                f"{sum(n for _, n in every)} tokens in {len(requests)} requests, of the versions {names}, so it is "
                f"unknown which version a token has. The loop must hand on `extra_fields` of what the engine answers "
                f"(`{VERSIONS}`), and every request must be a turn of the row. Use one of verl's own loops, or remove "
                f"the method."
            )
        versions = torch.full(mask.shape, now, dtype=torch.int64)
        versions[live] = torch.where(told < 0, now, told)
        found.append(versions)
    return found


def _matched(requests: Sequence[Sequence[Sequence[int]]], turns: Ranges) -> Tensor | None:
    """Versions of the trained tokens as the requests tell them; None if the version of each token is unknown."""
    told, lengths = [_spread(made) for made in requests], [stop - start for start, stop in turns]
    if len(told) != len(lengths):
        made = torch.cat([torch.empty(0, dtype=torch.int64), *told])
        return made if len(made) == sum(lengths) else None
    if any(len(t) < n for t, n in zip(told, lengths, strict=True)):
        return None
    return torch.cat([torch.empty(0, dtype=torch.int64), *(t[:n] for t, n in zip(told, lengths, strict=True))])


def _spread(runs: Sequence[Sequence[int]]) -> Tensor:
    """[value, number], .. -> the values."""
    values, counts = torch.tensor(runs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return torch.repeat_interleave(values, counts)


def components(extra: Sequence[Any], rewards: Mapping[str, float]) -> Tensor:
    """(rows, len(rewards)) float64 parts of the reward of every row, NaN where its reward function gave none.

    Args:
        extra: `extra_fields` of the rows.
        rewards: see `Settings`.

    Raises:
        ConfigError: the reward function never answers with a key of `rewards`.
    """
    infos = [e.get("reward_extra_info", {}) for e in extra]
    for name in rewards:
        if not any(name in info for info in infos):
            known = ", ".join(sorted({k for info in infos for k in info})) or "nothing"
            raise ConfigError(
                f"rl_plugins.rewards names `{name}`, and the reward function answers with {known}. Let it return a "
                f"dict that has the key, or name one that it has."
            )
    nothing = float("nan")

    def number(value: Any) -> float:
        value = total(value)  # a list is one of rewards per step
        return nothing if value is None else float(value)

    return torch.tensor([[number(info.get(k)) for k in rewards] for info in infos], dtype=torch.float64)


def no_tokens(columns: set[str], turns: bool, versions: bool) -> Tokens:
    """Tokens of a batch that has none."""
    nothing = torch.empty(0, dtype=torch.int64)
    return Tokens(
        row=nothing,
        position=nothing,
        advantages=nothing.double(),
        keep=nothing.bool(),
        forced=nothing.bool(),
        turn=nothing if turns else None,
        version=nothing if versions else None,
        **{name: nothing.float() for name in sorted(columns)},
    )


def read_tokens(
    rows: Columns,
    columns: set[str],
    row_number: Tensor,
    forced: Sequence[Ranges],
    versions: Sequence[Tensor] | None = None,
) -> Tokens:
    """Flat tokens of rows.

    Args:
        rows: columns of the rows.
        columns: signals to read.
        row_number: (rows,) what `tokens.row` is to say for each of these rows.
        forced: of each row the ranges of forced tokens.
        versions: of each row those of its tokens, if they are asked for.
    """
    of, mask = Ragged.of(rows["response_mask"]), flat(rows["response_mask"]).bool()
    all_live = bool(mask.all())

    def live(values: Tensor) -> Tensor:
        return values if all_live else values[mask]

    n = int(torch.count_nonzero(mask))
    return Tokens(
        row=live(spread(row_number, of.length)),
        position=live(of.position),
        advantages=torch.zeros(1, dtype=torch.float64).expand(n),  # there are none yet
        keep=torch.ones(n, dtype=torch.bool),
        forced=live(of.marked(forced)),
        version=None if versions is None else live(torch.cat(list(versions))),
        **{name: live(flat(rows[TOKEN_COLUMNS[name]]).float()) for name in sorted(columns)},
    )
