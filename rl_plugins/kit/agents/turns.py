"""Turns of agents in time order: returns, histories, and which turns began in the same state.

Both layouts of a host, a row per rollout and a row per turn, look alike here: a rollout is every row with the same
`group` and `rollout`, and time is `table.turn`, never the order of rows or turns in the batch. Nothing loops over turns
in Python but the hashing of observations; sorting is the most expensive part, and no temporary is (rollouts x time).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.groups import Groups, joint
from rl_plugins.core.rollouts import Rollouts

__all__ = ["Turns", "canonical_form", "joint", "normalized", "state_ids"]

_EXACT = 2**53  # whole numbers below it are exact in float64


class Turns:
    """The turns of a batch, one entry per entry of `rollouts.turns` and in that order.

    Args:
        rollouts: with `turns`.

    Attributes:
        table: `rollouts.turns`.
        group: (turns,) int64 group of the turn's rollout.
        rollout: (turns,) int64 number of the turn's rollout in the whole batch, from 0.
        before: (turns,) int64 turns of the rollout that came before.
        outcome: (turns,) float64 reward of the turn's row, NaN if unscorable.
        reward: (turns,) float64 reward of the turn: 0 where the environment gave none; a rollout none of whose turns
            has a reward gets its outcome at its last turn.

    Raises:
        MethodError: without turns.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        table = rollouts.turns
        if table is None:
            raise MethodError('these rollouts have no turns; a method that needs them names "turns" in `needs`.')
        self.table = table
        self.group = rollouts.group[table.row]
        self.rollout = joint(self.group, rollouts.rollout[table.row])
        by_time = torch.sort(table.turn, stable=True).indices
        self._order = by_time[torch.sort(self.rollout[by_time], stable=True).indices]  # by rollout, then time
        count = int(self.rollout.max()) + 1 if len(self.rollout) else 0
        of_rollout = Groups(self.rollout, count=count)
        start = torch.cumsum(of_rollout.size, 0) - of_rollout.size
        self._place = torch.arange(len(self._order)) - start[self.rollout[self._order]]
        self.before = torch.empty_like(self._order)
        self.before[self._order] = self._place
        last = self.before == of_rollout.rows(of_rollout.size) - 1
        self.outcome = rollouts.reward[table.row]
        rewarded = of_rollout.rows(of_rollout.n(table.reward) > 0)
        self.reward = torch.where(~rewarded & last, self.outcome, table.reward).nan_to_num(nan=0.0)

    def returns(self, gamma: float) -> Tensor:
        """(turns,) discounted return of each turn, `g_t = r_t + gamma g_(t+1)`; NaN for unscorable rows.

        After the round with hop h every entry is the sum over the next 2h turns, so there are log2(turns) rounds.
        """
        value = self.reward[self._order]
        longest = int(self._place.max()) + 1 if len(value) else 0
        hop, factor = 1, gamma
        while hop < longest:
            inside = self._place[hop:] >= hop  # the turn `hop` entries ahead is of the same rollout
            value[:-hop] += torch.where(inside, factor * value[hop:], 0.0)
            hop, factor = 2 * hop, factor * factor
        returns = torch.empty_like(value)
        returns[self._order] = value
        return torch.where(torch.isnan(self.outcome), torch.nan, returns)

    def earlier(self, x: Tensor, turns: int) -> Tensor:
        """(turns,) the entry of `x` (whole numbers) that many turns before in the same rollout, -1 where there is
        none."""
        if turns == 0:
            return x
        in_order = x[self._order]
        shifted = torch.full_like(in_order, -1)
        shifted[turns:] = torch.where(self._place[turns:] >= turns, in_order[:-turns], -1)
        out = torch.empty_like(shifted)
        out[self._order] = shifted
        return out


def normalized(x: Tensor, groups: Groups, by_std: bool, eps: float, ddof: int = 1, of: Tensor | None = None) -> Tensor:
    """(n,) `x - mean` per group, divided by `std + eps` if asked for; 0 for a group of one value.

    Args:
        by_std: divide.
        ddof: of the standard deviation, whose divisor is n - ddof.
        of: values whose mean and deviation are taken instead of those of `x` (NaN: left out).
    """
    if of is None:
        centered, std = groups.center_and_std(x, ddof)
    else:
        centered, std = x - groups.rows(groups.mean(of)), groups.std(of, ddof)
    return centered / groups.rows(std + eps) if by_std else centered


def state_ids(anchors: Sequence[Any]) -> Tensor:
    """(turns,) int64: equal numbers for equal observations, the same in every process and run.

    Equal are texts with the same characters, numbers with the same value (1, 1.0 and True; NaN and NaN), sequences and
    arrays with the same entries in the same shape, whichever of the two they are, and mappings with the same entries in
    any order. None is an observation nobody knows: it equals nothing, another None neither.

    The number is half of a 128-bit BLAKE2b, so two different observations out of 100,000 get the same one with a
    probability of 3e-10.

    Raises:
        MethodError: an observation of another type, whose equality would depend on the process.
    """
    ids = np.empty(len(anchors), dtype=np.int64)
    texts: dict[str, int] = {}  # the same ones come again and again
    for i, anchor in enumerate(anchors):
        if type(anchor) is not str:
            ids[i] = _hashed(b"?" + struct.pack("<q", i) if anchor is None else canonical_form(anchor))
            continue
        if anchor not in texts:
            texts[anchor] = _hashed(canonical_form(anchor))
        ids[i] = texts[anchor]
    return torch.from_numpy(ids)


def _hashed(form: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(form, digest_size=16).digest()[:8], "little", signed=True)


def canonical_form(value: Any) -> bytes:
    """Bytes that are equal exactly where `state_ids` calls two observations equal."""
    if isinstance(value, str):
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _sized(b"b", value)
    if value is None:
        return b"0"
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, (bool, int, float, np.generic)):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, (list, tuple)):
        if value and all(type(v) is float or (type(v) is int and -_EXACT < v < _EXACT) for v in value):
            return _array(np.asarray(value))
        return _listed(b"[", [canonical_form(v) for v in value])
    if isinstance(value, Mapping):
        return _listed(b"{", sorted(canonical_form(k) + canonical_form(v) for k, v in value.items()))
    if isinstance(value, (set, frozenset)):
        return _listed(b"<", sorted(canonical_form(v) for v in value))
    raise MethodError(
        f"an observation is (or contains) {type(value).__name__}, which cannot be compared the same way in every "
        f"process. Give text, numbers, None, lists, arrays, mappings or sets of those as `anchor`, e.g. the text of it."
    )


def _array(array: np.ndarray[Any, Any]) -> bytes:
    """Like nested lists of numbers, `[` and n times `n` with the eight bytes of a double, but without a loop."""
    if array.ndim > 1:
        return _listed(b"[", [_array(part) for part in array])
    if array.dtype.kind in "biuf":
        numbers = array.astype(np.float64)
        numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0)  # one NaN, and no negative zero
        if not bool((np.isfinite(numbers) & (np.abs(numbers) >= _EXACT)).any()):
            if array.ndim == 0:
                return b"n" + numbers.astype("<f8").tobytes()
            packed = np.full((len(array), 9), ord("n"), dtype=np.uint8)
            packed[:, 1:] = numbers.astype("<f8").view(np.uint8).reshape(-1, 8)
            return b"[" + struct.pack("<q", len(array)) + packed.tobytes()
    if array.ndim == 1:
        return _listed(b"[", [canonical_form(v) for v in array.tolist()])
    item = array.item()
    if isinstance(item, (int, float, np.floating)):  # a double cannot tell neighbors apart
        return _sized(b"i", str(int(item)).encode())
    return canonical_form(item)


def _sized(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<q", len(content)) + content


def _listed(kind: bytes, parts: Sequence[bytes]) -> bytes:
    return kind + struct.pack("<q", len(parts)) + b"".join(parts)
