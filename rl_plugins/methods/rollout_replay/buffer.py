"""Groups of rollouts in few tensors, so that a state with millions of tokens costs a step and a checkpoint little.

The tokens of all groups of a batch are in one store, which is never changed. Columns hold the facts of each group. A
store is copied when less than half of it is still used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

PER_GROUP = ("prompt", "question", "version", "rollouts", "store", "start")


@dataclass(frozen=True)
class Buffer:
    """Groups in the order in which they came.

    Args:
        prompt: (groups,) dataset row.
        question: (groups,) digest of the prompt's token ids.
        version: (groups,) published weights that made its oldest token.
        rollouts: (groups,) how many it has.
        store, start: (groups,) where its tokens begin.
        lengths: (rollouts of all groups,) tokens of each completion.
        rewards: (rollouts of all groups, reward functions) float64.
        stores: "numbers" (3, tokens) int32: token ids, versions, 1 where a token was only read; "logprobs" (tokens,).
    """

    prompt: Tensor
    question: Tensor
    version: Tensor
    rollouts: Tensor
    store: Tensor
    start: Tensor
    lengths: Tensor
    rewards: Tensor
    stores: tuple[Mapping[str, Tensor], ...]

    def __len__(self) -> int:
        return len(self.prompt)

    @classmethod
    def empty(cls, functions: int) -> Buffer:
        none = torch.zeros(0, dtype=torch.int64)
        rewards = torch.zeros(0, functions, dtype=torch.float64)
        return cls(none, none, none, none, none, none, lengths=none, rewards=rewards, stores=())

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Buffer:
        return cls(**{**state, "stores": tuple(state["stores"])})

    def state(self) -> dict[str, Any]:
        """Plain data for a method's state."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"stores": [dict(s) for s in self.stores]}

    def keep(self, mask: Tensor) -> Buffer:
        """The groups where `mask` (groups,) is True."""
        if bool(mask.all()):
            return self
        of_rollouts = mask.repeat_interleave(self.rollouts)
        columns = {name: getattr(self, name)[mask] for name in PER_GROUP}
        return replace(self, **columns, lengths=self.lengths[of_rollouts], rewards=self.rewards[of_rollouts])

    def add(self, newer: Buffer) -> Buffer:
        """These groups, followed by `newer` ones."""
        shifted = replace(newer, store=newer.store + len(self.stores))
        columns = {f.name: torch.cat([getattr(self, f.name), getattr(shifted, f.name)]) for f in fields(self)[:-1]}
        return Buffer(**columns, stores=(*self.stores, *newer.stores))

    def compact(self) -> Buffer:
        """The same groups without unused stores, and with stores copied when less than half of them is used."""
        tokens = self._tokens()
        used = torch.bincount(self.store, tokens.double(), minlength=len(self.stores)).tolist()
        sparse = [i for i, s in enumerate(self.stores) if used[i] < s["logprobs"].numel() / 2]
        if not sparse:
            return self
        moves = torch.isin(self.store, torch.tensor(sparse))
        parts = [self._part(i) for i in moves.nonzero()[:, 0].tolist()]
        number = torch.full((len(self.stores),), -1)
        dense = [i for i in range(len(self.stores)) if i not in sparse]
        number[dense] = torch.arange(len(dense))
        stores = [self.stores[i] for i in dense]
        store, start = number[self.store], self.start.clone()
        if parts:
            store[moves] = len(stores)
            start[moves] = torch.cumsum(tokens[moves], 0) - tokens[moves]
            joined = {name: torch.cat([part[name] for part in parts], -1) for name in ("numbers", "logprobs")}
            stores.append(joined)
        return replace(self, store=store, start=start, stores=tuple(stores))

    def completions(self, group: int) -> Sequence[Mapping[str, Tensor]]:
        """Of each rollout of a group: "tokens", "versions", "observed", "logprobs" (its tokens,), "rewards"."""
        first = int(self.rollouts[:group].sum())
        mine = slice(first, first + int(self.rollouts[group]))
        lengths, part = self.lengths[mine].tolist(), self._part(group)
        numbers, logprobs = torch.split(part["numbers"], lengths, 1), torch.split(part["logprobs"], lengths)
        return [
            {"tokens": n[0], "versions": n[1], "observed": n[2] > 0, "logprobs": lp, "rewards": r}
            for n, lp, r in zip(numbers, logprobs, self.rewards[mine], strict=True)
        ]

    def _tokens(self) -> Tensor:
        """(groups,) tokens of each."""
        of = torch.arange(len(self)).repeat_interleave(self.rollouts)
        return torch.zeros(len(self), dtype=torch.int64).index_add_(0, of, self.lengths)

    def _part(self, group: int) -> Mapping[str, Tensor]:
        first = int(self.rollouts[:group].sum())
        tokens = int(self.lengths[first : first + int(self.rollouts[group])].sum())
        store, start = self.stores[int(self.store[group])], int(self.start[group])
        return {name: values[..., start : start + tokens] for name, values in store.items()}
