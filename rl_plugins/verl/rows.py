"""Rows of TransferQueue as the driver sees them, and back.

verl stores every trajectory as a row of ragged columns. Here a batch becomes `Rollouts` and flat `Tokens`; what a
decision says is written back as columns of the same raggedness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.errors import ConfigError
from rl_plugins.rollouts import Rollouts, Tokens, weighted_reward
from rl_plugins.verl.facts import NESTED_COLUMNS
from rl_plugins.verl.prompts import COLUMN, FORCED

ROW_COLUMN, TOKEN_COLUMN = "rl_plugins_row_column:", "rl_plugins_token_column:"
REAL = "rl_plugins_real"  # 1 for rows, 0 for those verl adds to fill the batch
GROUP = "rl_plugins_group"

# Signal -> column of verl.
TOKEN_COLUMNS = {
    "old_logprobs": "old_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "ref_logprobs": "ref_log_prob",
    "entropies": "entropy",
}


@dataclass(frozen=True)
class Ragged:
    """Where the values of a ragged column belong: (values,) row of each value and place in its row."""

    row: Tensor
    position: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, column: Any) -> Ragged:
        offsets = column.offsets().cpu()
        length = offsets.diff()
        row = torch.repeat_interleave(torch.arange(len(length)), length)
        return cls(row, torch.arange(len(row)) - offsets[:-1][row], offsets)

    def nested(self, values: Tensor) -> Tensor:
        """(values,) -> ragged column."""
        return torch.nested.as_nested_tensor(
            list(torch.split(values, self.offsets.diff().tolist())),
            layout=torch.jagged,  # as verl itself makes them
        )


def flat(column: Tensor) -> Tensor:
    """All values of a column, ragged or one per row."""
    return column.values() if column.is_nested else column.flatten()


def plain(column: Any) -> list[Any]:
    """Objects of a column, unwrapped."""
    return [getattr(x, "data", x) for x in column]


def column_of(rows: Mapping[str, Any], name: str) -> list[Any]:
    """A dataset column by name, or a field of `extra_info` or `reward_model`.

    Raises:
        ConfigError: there is no such column.
    """
    if name in rows:
        values = rows[name]
        if isinstance(values, Tensor):
            return [v.tolist() for v in values.unbind()] if values.is_nested else values.tolist()
        return plain(values)
    for nested in NESTED_COLUMNS:
        if nested in rows and all(isinstance(x, dict) and name in x for x in plain(rows[nested])):
            return [x[name] for x in plain(rows[nested])]
    raise ConfigError(
        f"The dataset has no column `{name}`; it has {', '.join(sorted(map(str, rows)))} and the fields of "
        f"{' and '.join(NESTED_COLUMNS)}. Add it."
    )


def sort_key(note: Mapping[str, Any], session: int, index: int) -> tuple[Any, ...]:
    """The order of the plan: whatever finished first, the driver sees rows in this order."""
    return note["wave"], note["group"], note["round"], note["place"], session, index


def read_rollouts(
    rows: Mapping[str, Any],
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    needs: set[str],
    rewards: Mapping[str, float],
    tokenizer: Any,
    step: int,
    total_steps: int,
) -> Rollouts:
    """Rollouts of the rows in their order.

    Args:
        rows: columns of the rows.
        keys, tags: of the rows; a key is "{uid}_{session}_{index}".
        needs: signals of the methods.
        rewards: key of the reward function's answer -> weight, their weighted sum is the reward; empty: verl's score.

    Raises:
        ConfigError: the reward function does not answer with a key of `rewards`, or a dataset column is missing.
    """
    notes = plain(rows[COLUMN])
    extra = plain(rows["extra_fields"])
    mask = rows["response_mask"]
    n = len(keys)
    of = Ragged.of(mask)
    score = torch.zeros(n, dtype=torch.float64).index_add(0, of.row, flat(rows["rm_scores"]).double())
    groups: dict[tuple[str, int], int] = {}
    rollouts: dict[tuple[int, str, int], int] = {}  # (group, uid, session) -> number in its group
    group, rollout, index = [], [], []
    made: dict[int, int] = {}
    for key, note in zip(keys, notes, strict=True):
        uid, session, number = split(key)
        g = groups.setdefault((note["wave"], note["group"]), len(groups))
        if (g, uid, session) not in rollouts:
            rollouts[(g, uid, session)] = made.get(g, 0)
            made[g] = made.get(g, 0) + 1
        group.append(g)
        rollout.append(rollouts[(g, uid, session)])
        index.append(number)
    responses = [r.tolist() for r in rows["responses"].unbind()]
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    columns = {n.removeprefix("column:") for n in needs if n.startswith("column:")}
    text = tokenizer.batch_decode(responses, skip_special_tokens=True) if needs & {"text", "messages"} else None
    each = _components(extra, rewards) if rewards else score[:, None]
    weights = torch.tensor(list(rewards.values()) or [1.0], dtype=torch.float64)
    return Rollouts(
        group=torch.tensor(group, dtype=torch.int64),
        prompt_index=torch.tensor([note["prompt"] for note in notes], dtype=torch.int64),
        rollout=torch.tensor(rollout, dtype=torch.int64),
        index=torch.tensor(index, dtype=torch.int64),
        rewards=each,
        reward_names=tuple(rewards) or ("score",),
        reward_weights=weights,
        reward=weighted_reward(each, weights),
        length=torch.bincount(of.row[flat(mask).bool()], minlength=n),
        truncated=torch.tensor([not r or r[-1] not in ends for r in responses], dtype=torch.bool),
        kept=torch.ones(n, dtype=torch.bool),
        version=torch.tensor([_version(tag) for tag in tags], dtype=torch.int64),
        text=text if "text" in needs else None,
        raw_text=tokenizer.batch_decode(responses, skip_special_tokens=False) if "raw_text" in needs else None,
        messages=[[{"role": "assistant", "content": t}] for t in text or ()] if "messages" in needs else None,
        meta={c: column_of(rows, c) for c in sorted(columns)},
        payload=[note["payload"] for note in notes],
        step=step,
        total_steps=total_steps,
    )


def split(key: str) -> tuple[str, int, int]:
    """ "{uid}_{session}_{index}" in its parts."""
    uid, session, index = key.rsplit("_", 2)
    return uid, int(session), int(index)


def _version(tag: Mapping[str, Any]) -> int:
    """Optimizer version of the oldest weights a row was generated with."""
    oldest = tag.get("min_global_steps")
    return int(tag["global_steps"] if oldest is None else oldest)


def _components(extra: Sequence[Any], rewards: Mapping[str, float]) -> Tensor:
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
        return nothing if value is None else float(value)

    return torch.tensor([[number(info.get(k)) for k in rewards] for info in infos], dtype=torch.float64)


def read_tokens(rows: Mapping[str, Any], columns: set[str], row_number: Tensor) -> tuple[Tokens, Ragged, Tensor]:
    """Flat tokens of rows.

    Args:
        rows: columns of the rows.
        columns: signals to read.
        row_number: (rows,) what `tokens.row` is to say for each of these rows.

    Returns:
        The tokens, the raggedness of the responses, and (values,) which values are tokens.
    """
    of = Ragged.of(rows["response_mask"])
    live = flat(rows["response_mask"]).bool()
    forced = torch.tensor([int(e.get(FORCED, 0)) for e in plain(rows["extra_fields"])], dtype=torch.int64)
    tokens = Tokens(
        row=row_number[of.row[live]],
        position=of.position[live],
        advantages=torch.zeros(int(live.sum()), dtype=torch.float64),
        keep=torch.ones(int(live.sum()), dtype=torch.bool),
        forced=(of.position < forced[of.row])[live],
        **{name: flat(rows[TOKEN_COLUMNS[name]]).float()[live] for name in sorted(columns)},
    )
    return tokens, of, live
