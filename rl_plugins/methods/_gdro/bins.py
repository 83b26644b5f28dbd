"""Bins of difficulty: the running pass@k of every prompt, which both methods of the paper read.

c is 1 if any of a prompt's rollouts in a batch is right, else 0. The rate of a prompt is the mean of its last H values
of c, and 0 before the first. Its bin is the one that contains the rate; the bin changes only if the rate passes the
edge by a margin. Rate and bin come from earlier batches, so they are known before a batch is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rl_plugins import ConfigError, Method, Rollouts, Run, param
from rl_plugins.core.params import Is
from rl_plugins.kit.prompt_memory import History, Outcomes, SuccessParams, settled_bins


@dataclass(frozen=True)
class BinParams(SuccessParams):
    """Parameters of the bins."""

    edges: tuple[float, ...] = param(
        (0.1, 0.2, 0.4, 0.6, 0.8, 0.9),
        "edges of the bins, as ascending rates; empty: `num_bins` equal bins",
        gt=0,
        lt=1,
    )
    num_bins: int = param(
        10, "number of equal bins of the rate", ge=1, only_if={"edges": Is("empty", lambda edges: not edges)}
    )
    exclude_extremes: bool = param(False, "separate bin for prompts with a rate of exactly 0 or 1")
    history: int = param(50, "H, number of last batches of a prompt that count; 0: all", ge=0)
    hysteresis: float = param(0.03, "distance by which the rate must pass an edge before the bin changes", ge=0, lt=1)

    @property
    def cuts(self) -> Sequence[float] | int:
        """Edges, or the number of equal bins."""
        return self.edges or self.num_bins

    @property
    def count(self) -> int:
        """Bins there are; the last is that of the extremes, if they have one."""
        return (len(self.edges) + 1 if self.edges else self.num_bins) + self.exclude_extremes

    def check(self) -> None:
        if any(a >= b for a, b in pairwise(self.edges)):
            raise ConfigError(f"`edges` is {list(self.edges)[:10]}; edges must ascend.")


class Binned(Method):
    """Base of both methods. State: `history` (`kit.prompt_memory.History`) and `bin` (dataset size,) int16, the last
    bin of every prompt except the extremes, -1 before its first batch."""

    fidelity = "code"
    Params = BinParams
    needs = frozenset({"prompt_index"})

    def start(self, run: Run) -> None:
        p = self.params
        assert run.dataset_size is not None  # `needs` has the prompt_index, which a stream lacks
        self._history = History(p.history)
        self.state = {
            "history": self._history.start(run.dataset_size),
            "bin": torch.full((run.dataset_size,), -1, dtype=torch.int16),
        }

    def bins_of(self, prompts: Tensor) -> Tensor:
        """(n,) int64 bin of each of these dataset rows (>= 0)."""
        p, rate = self.params, self._history.rate(self.state["history"], prompts).nan_to_num(nan=0.0)
        found = self.state["bin"][prompts].long().clamp(min=0)
        return torch.where(extreme(rate), p.count - 1, found) if p.exclude_extremes else found

    def remember(self, rollouts: Rollouts) -> None:
        """Adds the outcomes of a batch: of every prompt whether any of its scored rollouts was right."""
        p, each = self.params, rollouts.per_rollout
        seen = Outcomes.of(each.prompt_index, p.successes(each.reward))
        state = self.state
        remember(self._history, state["history"], state["bin"], seen.prompts, seen.right > 0, rollouts.batch, p)

    def bin_name(self, number: int) -> str:
        """ "bin_0" is the hardest; "extremes"."""
        extremes = self.params.exclude_extremes and number == self.params.count - 1
        return "extremes" if extremes else f"bin_{number}"


def extreme(rate: Tensor) -> Tensor:
    """(n,) bool: a rate of exactly 0 or 1."""
    return (rate == 0) | (rate == 1)


def remember(
    history: History, state: dict[str, Any], bin: Tensor, prompts: Tensor, right: Tensor, batch: int, p: BinParams
) -> None:
    """Adds one outcome to each of these prompts and moves them to the bin of their new rate.

    Args:
        state: of the history, changed in place.
        bin: (dataset size,) last bin of each prompt, -1: none yet; changed in place.
        prompts: (n,) int64 different dataset rows. right: (n,) bool.
    """
    history.add(state, prompts, right, batch)
    rate, old = history.rate(state, prompts), bin[prompts].long()
    new = settled_bins(old, rate, p.cuts, p.hysteresis)
    bin[prompts] = (torch.where(extreme(rate), old, new) if p.exclude_extremes else new).to(bin.dtype)
