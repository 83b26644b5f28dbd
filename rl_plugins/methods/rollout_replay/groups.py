"""Groups on their way into a `Buffer` and out of it: which can be stored, and what a plan is given of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins import Groups, MethodError
from rl_plugins.core.rollouts import Completion, Jagged, PlanRow, Rollouts, Tokens
from rl_plugins.methods.rollout_replay.buffer import Buffer

NEEDS = frozenset({"prompt_index", "tokens", "token_ids", "token_versions", "rollout_logprobs"})


@dataclass(frozen=True)
class Sampled:
    """A batch with every token of its completions as it was sampled.

    Attributes:
        logprobs: of each row, float32, NaN where it is not known, and where a token was only read.
        versions: of each row, int64 published weights.
    """

    rollouts: Rollouts
    logprobs: Jagged
    versions: Jagged

    @classmethod
    def of(cls, rollouts: Rollouts, tokens: Tokens) -> Sampled:
        ids = rollouts.token_ids
        assert ids is not None and tokens.rollout_logprobs is not None  # in `needs`
        place = ids.completion.offsets[tokens.row] + tokens.position
        logprobs = torch.full((len(ids.completion.values),), torch.nan)
        logprobs[place] = torch.where(tokens.forced, torch.nan, tokens.rollout_logprobs.float())
        versions = torch.repeat_interleave(rollouts.version, ids.completion.length)
        if tokens.version is not None:
            versions[place] = tokens.version
        return cls(rollouts, Jagged(logprobs, ids.completion.offsets), Jagged(versions, ids.completion.offsets))

    def storable(self, rows: Tensor, size: int, warn: Callable[[str], None]) -> Tensor:
        """(groups of these rows,) bool, those of `size` rollouts that a plan can give again: of a dataset prompt, a row
        per rollout, without turns, and with a known probability of every token that was sampled, of one at least.

        Args:
            rows: (rows,) bool.
        """
        rollouts, ids = self.rollouts, self.rollouts.token_ids
        assert ids is not None
        of, sampled = torch.arange(len(rollouts)).repeat_interleave(ids.completion.length), ~ids.observed.values
        unknown = torch.bincount(of, (sampled & ~torch.isfinite(self.logprobs.values)).double(), len(rollouts))
        whole = (
            (unknown == 0) & (torch.bincount(of, sampled.double(), len(rollouts)) > 0) & (rollouts.prompt_index >= 0)
        )
        one_row = rollouts.groups.rows(rollouts.groups.max(rollouts.index.double())) == 0
        if rollouts.turns is not None or not bool(one_row.all()):
            what = "several rows" if rollouts.turns is None else "turns that a method of this run compares"
            warn(f"rollouts with {what} are not replayed, because a stored completion is one row and has no turns.")
            whole &= one_row & (rollouts.turns is None)
        groups = Groups(rollouts.group[rows])
        return (groups.min(whole[rows].double()) > 0) & (groups.size == size)

    def packed(self, rows: Tensor) -> Buffer:
        """These rows, whole groups, as a buffer.

        Args:
            rows: (rows,) bool.
        """
        rollouts, ids = self.rollouts, self.rollouts.token_ids
        assert ids is not None
        if not bool(rows.any()):
            return Buffer.empty(rollouts.rewards.shape[1])
        at = rows.nonzero()[:, 0]
        at = at[torch.sort(rollouts.group[at], stable=True).indices]
        groups, length = Groups(rollouts.group[at]), ids.completion.length[at]
        first = torch.cumsum(groups.size, 0) - groups.size  # rollout of each group
        tokens = groups.sum(length.double()).long()
        numbers = [x.take(at).values.int() for x in (ids.completion, self.versions, ids.observed)]
        logprobs = self.logprobs.take(at).values.nan_to_num(nan=0.0)  # of a token that was only read nobody reads it
        return Buffer(
            prompt=rollouts.prompt_index[at[first]],
            question=torch.tensor([digest(ids.prompt[row]) for row in at[first].tolist()], dtype=torch.int64),
            version=groups.min(rollouts.version[at].double()).long(),
            rollouts=groups.size,
            store=torch.zeros_like(groups.size),
            start=torch.cumsum(tokens, 0) - tokens,
            lengths=length,
            rewards=rollouts.rewards[at],
            stores=({"numbers": torch.stack(numbers), "logprobs": logprobs.clamp(max=0.0)},),
        )


def drawn(fit: Tensor, count: int, rng: np.random.Generator) -> list[int]:
    """At most `count` of the places where `fit` (groups,) is True, uniformly without replacement."""
    places = fit.nonzero()[:, 0]
    chosen: list[int] = places[torch.from_numpy(rng.permutation(len(places)))][:count].tolist()
    return chosen


def planned(stored: Buffer, group: int, number: int, names: list[str]) -> PlanRow:
    """A stored group as a row of the plan, with this number. `names` are those of its reward functions."""
    given = tuple(
        Completion(
            tokens=_listed(c["tokens"]),
            logprobs=_listed(c["logprobs"]),
            versions=_listed(c["versions"]),
            rewards=dict(zip(names, c["rewards"].tolist(), strict=True)),
            observed=_listed(c["observed"]) if bool(c["observed"].any()) else None,
        )
        for c in stored.completions(group)
    )
    return PlanRow(int(stored.prompt[group]), number, len(given), given=given)


def check_prompts(rollouts: Rollouts, name: str) -> None:
    """Refuses stored rollouts whose prompt is not the one they answered. The first part of a row's mark is its digest.

    Args:
        name: of the method that planned them.
    """
    for row, mark in enumerate(rollouts.marks(name)):
        if mark is not None and rollouts.token_ids is not None and digest(rollouts.token_ids.prompt[row]) != mark[0]:
            raise MethodError(
                f"prompt {int(rollouts.prompt_index[row])} is not the one that the stored rollouts answered, so "
                f"their log-probs are of another text. Something edits prompts differently from batch to batch (a "
                f"method, or a template with a date); remove it, or remove `{name}`."
            )


def pace(state: Mapping[str, Any], now: int) -> int:
    """Weights that the last publication added. Batches between two publications add none, and the next one is trained
    after a publication all the same."""
    return max(0, now - state.get("now", now - 1)) or int(state.get("pace", 0))


def digest(prompt: Tensor) -> int:
    return zlib.crc32(prompt.long().contiguous().numpy().tobytes())


def _listed(values: Tensor) -> tuple[Any, ...]:
    return tuple(values.numpy().tolist())  # torch's own takes several times as long
