"""The latest outcomes of every prompt, and the mark of stored rollouts in a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins import Groups, Rollouts
from rl_plugins.kit.prompt_memory import SuccessParams

STORED = "dart_pool"  # in the payload of a plan row: its first rollout is a stored success


def is_stored(rollouts: Rollouts) -> Tensor:
    """(rows,) bool: the rollout was made earlier and given by `dart_pool`."""
    return rollouts.has_mark(STORED) & (rollouts.rollout == 0)


@dataclass(frozen=True)
class TaskHistory:
    """Outcomes of the latest rollouts of the prompts that were seen.

    Args:
        prompt: (prompts,) int64 dataset rows, ascending.
        outcome: (prompts, kept) float64, the newest last, NaN where there are fewer.
    """

    prompt: Tensor
    outcome: Tensor

    @classmethod
    def empty(cls, kept: int) -> TaskHistory:
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0, kept, dtype=torch.float64))

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> TaskHistory:
        return cls(state["prompt"], state["outcome"])

    def state(self) -> dict[str, Any]:
        """Plain data for a method's state."""
        return {"prompt": self.prompt, "outcome": self.outcome}

    def of(self, prompts: Tensor) -> Tensor:
        """(n,) dataset rows -> (n, kept) their outcomes; NaN for those that were not seen."""
        found = torch.full((len(prompts), self.outcome.shape[1]), torch.nan, dtype=torch.float64)
        place = torch.searchsorted(self.prompt, prompts.contiguous())
        known = torch.zeros(len(prompts), dtype=torch.bool)
        inside = place < len(self.prompt)
        known[inside] = self.prompt[place[inside]] == prompts[inside]
        found[known] = self.outcome[place[known]]
        return found

    def add(self, prompt: Tensor, outcome: Tensor) -> TaskHistory:
        """With these outcomes, in their order, none of them NaN; the oldest of a prompt are forgotten.

        Args:
            prompt: (rollouts,) int64 dataset rows. outcome: (rollouts,) float64.
        """
        if not len(prompt):
            return self
        seen, kept = Groups(prompt), self.outcome.shape[1]
        both = torch.cat([self.of(seen.ids), torch.full((seen.count, kept), torch.nan, dtype=torch.float64)], 1)
        # the new ones of each prompt side by side: those beyond `kept` are the oldest
        order = torch.sort(seen.index, stable=True).indices
        first = torch.cumsum(seen.size, 0) - seen.size
        from_end = (first + seen.size)[seen.index[order]] - torch.arange(len(order)) - 1
        stays = from_end < kept
        count = seen.size.clamp(max=kept)
        place = kept + count[seen.index[order]] - 1 - from_end
        both[seen.index[order][stays], place[stays]] = outcome[order][stays].double()
        window = count[:, None] + torch.arange(kept)
        other = ~torch.isin(self.prompt, seen.ids)
        prompts = torch.cat([self.prompt[other], seen.ids])
        outcomes = torch.cat([self.outcome[other], both.gather(1, window)])
        ascending = torch.argsort(prompts)
        return TaskHistory(prompts[ascending], outcomes[ascending])


def success_rate(outcome: Tensor, latest: Tensor | int) -> Tensor:
    """(n, kept) outcomes -> (n,) mean of the latest ones of each prompt; NaN without any.

    Args:
        latest: (n,) how many count, or one number.
    """
    age = outcome.shape[1] - 1 - torch.arange(outcome.shape[1])
    counted = age < torch.as_tensor(latest).reshape(-1, 1)
    return torch.where(counted, outcome, torch.nan).nanmean(1)


def scored(rollouts: Rollouts, p: SuccessParams) -> tuple[Tensor, Tensor]:
    """(rollouts,) dataset rows and outcomes (1.0 or 0.0) of the rollouts of this batch that have a reward, each once.
    Foreign prompts and stored rollouts are left out."""
    once = rollouts.per_rollout
    stored = is_stored(rollouts)[once.last]
    counted = ~torch.isnan(once.reward) & (once.prompt_index >= 0) & ~stored
    return once.prompt_index[counted], p.successes(once.reward[counted])
