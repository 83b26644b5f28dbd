"""What a run has learned of its prompts, by dataset row.

As with the priors, the memory is a plain dict that a method holds in its state, so that it is saved with the run. It is
changed in place. A visit and a lookup cost what the visited rows cost, however large the dataset is:

    counts = Counts(("alpha", "beta"))                              successes and failures, older ones forgotten
    self.state = counts.start(size)
    counts.visit(self.state, prompts, keep, (right, wrong), others)
    alpha, beta = counts.of(self.state, prompts)

    history = History(50)                                           the last 50 outcomes, and the batch of the last one
    self.state = history.start(size)
    history.add(self.state, prompts, solved, batch)
    rate = history.rate(self.state, prompts)

`SuccessParams` say which reward is a success, and `Outcomes` counts the successes of a batch by prompt. `bins` sorts
success rates into bins; `settled_bins` moves a prompt only when its rate is clearly in another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.groups import Groups, parts
from rl_plugins.core.params import MethodParams, param

# Rows up to which whole arrays are gone through: half a megabyte of float64, less than a millisecond.
SMALL = 65_536
_SMALLEST_SCALE = 1e-6
_MOST_RECENT = 65_536  # rows whose counts lie beside the tensors of the dataset


@dataclass(frozen=True)
class SuccessParams(MethodParams):
    """Parameters of methods that ask whether a rollout succeeded."""

    success_threshold: float = param(0.5, "lowest reward that counts as a success")

    def successes(self, reward: Tensor) -> Tensor:
        """Rewards -> float64 of the same shape: 1 for a success, 0 for a failure, NaN without a reward (NaN)."""
        return torch.where(torch.isnan(reward), torch.nan, (reward >= self.success_threshold).double())


@dataclass(frozen=True)
class Outcomes:
    """Successes of a batch by dataset row.

    Attributes:
        prompts: (prompts,) int64 different dataset rows, ascending.
        right, wrong: (prompts,) float64 sums of success and of 1 - success over the prompt's rollouts.
        mixed: (prompts,) bool, its rollouts differ in success.
    """

    prompts: Tensor
    right: Tensor
    wrong: Tensor
    mixed: Tensor

    @classmethod
    def of(cls, prompts: Tensor, success: Tensor) -> Outcomes:
        """Of rollouts, each once (`rollouts.per_rollout`). Those without a reward (NaN) and of foreign prompts (-1) do
        not count.

        Args:
            prompts: (rollouts,) int64 dataset rows. success: (rollouts,) float64 in [0, 1].
        """
        counted = ~torch.isnan(success) & (prompts >= 0)
        of, x = Groups(prompts[counted]), success[counted]
        return cls(of.ids, of.sum(x), of.sum(1 - x), of.max(x) > of.min(x))

    @property
    def trials(self) -> Tensor:
        """(prompts,) float64 rollouts that count."""
        return self.right + self.wrong


@dataclass(frozen=True)
class Counts:
    """Decayed counts per prompt.

    A visit with the outcomes g of its batch, and all other prompts:

        c <- keep c + g            c <- others c

    State: one tensor (dataset size,) float64 per name. Above `SMALL` rows, `others` is not applied row by row: a tensor
    then holds counts / its entry of `scales`, and a visit makes that smaller. Rows of the last visits then lie beside
    each tensor: `rows_NAME`, their numbers, ascending, and `recent_NAME`. A write into a tensor that is shared with a
    copy to save copies all of it, so that is done only where many rows lie beside it or its scale is tiny, for one name
    a visit. `most`, once it was asked for: no prompt has a sum of counts above it.

    Args:
        names: of the counts.
    """

    names: Sequence[str] = ("alpha", "beta")

    def start(self, size: int, value: float = 0.0) -> dict[str, Any]:
        """The memory before the first visit: every count is `value`."""
        return {name: torch.full((size,), value, dtype=torch.float64) for name in self.names}

    def of(self, state: Mapping[str, Any], prompts: Tensor | slice) -> tuple[Tensor, ...]:
        """The counts of these dataset rows, a copy of each, in the order of the names."""
        return tuple(
            _held(state, name, prompts) * scale for name, scale in zip(self.names, self._scales(state), strict=True)
        )

    def _scales(self, state: Mapping[str, Any]) -> Sequence[float]:
        found: Sequence[float] = state.get("scales", [state.get("scale", 1.0)] * len(self.names))  # older states: one
        return found

    def visit(
        self,
        state: dict[str, Any],
        prompts: Tensor,
        keep: float | Tensor,
        gained: Sequence[Tensor],
        others: float = 1.0,
    ) -> None:
        """Adds the outcomes of a batch.

        Args:
            prompts: (n,) int64 different dataset rows >= 0.
            keep: share of their counts that the visit leaves; a number or (n,).
            gained: (n,) per name, what is added.
            others: share of the counts of all other prompts that the batch leaves, > 0.
        """
        new = [keep * count + more for count, more in zip(self.of(state, prompts), gained, strict=True)]
        if len(state[self.names[0]]) <= SMALL:
            for name, count in zip(self.names, new, strict=True):
                if others != 1.0:
                    state[name].mul_(others)
                state[name][prompts] = count
        else:
            if others != 1.0:
                state["scales"] = [scale * others for scale in self._scales(state)]
            for name, count, scale in zip(self.names, new, self._scales(state), strict=True):
                _put(state, name, prompts, count / scale)
            self._settle(state)
        if "most" in state:
            visited = float(torch.stack(new).sum(0).max()) if len(prompts) else 0.0
            state["most"] = max(state["most"] * others, visited)

    def _settle(self, state: dict[str, Any]) -> None:
        """Writes what lies beside the tensor of one name into it, and brings it to scale 1."""
        scales = list(self._scales(state))
        full = [len(state[f"rows_{name}"]) > _MOST_RECENT for name in self.names]
        due = [i for i, scale in enumerate(scales) if full[i] or scale < _SMALLEST_SCALE]
        if not due:
            return
        i = min(due, key=scales.__getitem__)
        name = self.names[i]
        state[name][state.pop(f"rows_{name}")] = state.pop(f"recent_{name}")
        if scales[i] != 1.0:
            state[name].mul_(scales[i])
            state["scales"] = [*scales[:i], 1.0, *scales[i + 1 :]]

    def visited(self, state: Mapping[str, Any], name: str) -> Tensor:
        """(n,) int64 dataset rows, ascending, to which a visit has added something under this name."""
        rows = state[name].nonzero()[:, 0]
        return rows if f"rows_{name}" not in state else torch.unique(torch.cat([rows, state[f"rows_{name}"]]))

    def most(self, state: dict[str, Any]) -> float:
        """No prompt has a sum of counts above this. Looked up once, then kept up to date by the visits."""
        if "most" not in state:
            of_parts = (torch.stack(self.of(state, part)).sum(0) for part in parts(len(state[self.names[0]])))
            state["most"] = max((float(total.max()) for total in of_parts), default=0.0)
        return float(state["most"])


def _held(state: Mapping[str, Any], name: str, prompts: Tensor | slice) -> Tensor:
    """What `Counts` holds of these dataset rows under a name."""
    found: Tensor = state[name][prompts]
    rows = state.get(f"rows_{name}")
    if rows is None or not len(rows):
        return found
    if isinstance(prompts, slice):
        start, stop, step = prompts.indices(len(state[name]))
        here = ((rows >= start) & (rows < stop) & ((rows - start) % step == 0)).nonzero()[:, 0]
        at = (rows[here] - start) // step
    else:
        place = torch.searchsorted(rows, prompts.contiguous()).clamp(max=len(rows) - 1)
        at = (rows[place] == prompts).nonzero()[:, 0]
        here = place[at]
    return found.index_copy(0, at, state[f"recent_{name}"][here])


def _put(state: dict[str, Any], name: str, prompts: Tensor, held: Tensor) -> None:
    """Lays them beside the tensor."""
    rows = torch.unique(torch.cat([state.get(f"rows_{name}", prompts[:0]), prompts]))
    at = torch.searchsorted(rows, prompts.contiguous())
    state[f"recent_{name}"] = _held(state, name, rows).index_copy(0, at, held)
    state[f"rows_{name}"] = rows


@dataclass(frozen=True)
class History:
    """The last outcomes of every prompt, one per visit, right or not.

    State: `slot` (dataset size,) int32, the place of a prompt in the tensors that follow, -1 before its first visit;
    `visits`, `right`, `last` (places,) int64: outcomes ever, right ones among those remembered, batch of the last one;
    `outcomes` (places, size) uint8, a ring, if the size is not 0; `used`, places that are taken.

    Args:
        size: outcomes that are remembered; 0: all of them, as two numbers.
    """

    size: int = 0

    def start(self, prompts: int) -> dict[str, Any]:
        """The memory before the first visit, of a dataset with that many rows."""
        return {
            "slot": torch.full((prompts,), -1, dtype=torch.int32),
            "used": 0,
            **{name: torch.zeros(0, dtype=torch.int64) for name in ("visits", "right", "last")},
            "outcomes": torch.zeros(0, self.size, dtype=torch.uint8),
        }

    def add(self, state: dict[str, Any], prompts: Tensor, outcomes: Tensor, batch: int) -> None:
        """Adds one outcome to each of these prompts.

        Args:
            prompts: (n,) int64 different dataset rows >= 0.
            outcomes: (n,) bool.
            batch: the generation batch.
        """
        place = self._places(state, prompts)
        visits, new = state["visits"][place], outcomes.long()
        right = state["right"][place] + new
        if self.size:
            column = visits % self.size
            right -= state["outcomes"][place, column].long()  # 0 where the ring is not full
            state["outcomes"][place, column] = new.to(torch.uint8)
        state["right"][place] = right
        state["visits"][place] = visits + 1
        state["last"][place] = batch

    def rate(self, state: dict[str, Any], prompts: Tensor) -> Tensor:
        """(n,) float64 share of right ones among the remembered outcomes; NaN of a prompt without any."""
        return self._read(state, "right", prompts, 0).double() / self.count(state, prompts)

    def count(self, state: dict[str, Any], prompts: Tensor) -> Tensor:
        """(n,) int64 remembered outcomes."""
        visits = self._read(state, "visits", prompts, 0)
        return visits.clamp(max=self.size) if self.size else visits

    def last(self, state: dict[str, Any], prompts: Tensor) -> Tensor:
        """(n,) int64 generation batch of the last outcome, -1 before the first."""
        return self._read(state, "last", prompts, -1)

    def _read(self, state: dict[str, Any], name: str, prompts: Tensor, unseen: int) -> Tensor:
        place = state["slot"][prompts].long()
        if not state["used"]:
            return torch.full_like(place, unseen)
        found: Tensor = torch.where(place < 0, unseen, state[name][place.clamp(min=0)])
        return found

    def _places(self, state: dict[str, Any], prompts: Tensor) -> Tensor:
        """(n,) int64 places of these prompts; new ones get the next free."""
        place: Tensor = state["slot"][prompts].long()
        new = (place < 0).nonzero()[:, 0]
        place[new] = state["used"] + torch.arange(len(new))
        state["slot"][prompts[new]] = place[new].int()
        state["used"] += len(new)
        missing = state["used"] - len(state["visits"])
        if missing > 0:  # at least twice as many, so that a run copies few times
            missing = max(missing, len(state["visits"]))
            for name in ("visits", "right", "last", "outcomes"):
                kept = state[name]
                state[name] = torch.cat([kept, kept.new_zeros(missing, *kept.shape[1:])])
        return place


def bins(rate: Tensor, edges: Sequence[float] | int) -> Tensor:
    """(n,) int64 bin of each success rate in [0, 1].

    Args:
        edges: m ascending numbers, the bin is how many of them are <= rate: 0..m. Or the number B of equal bins,
            min(floor(rate B), B - 1).
    """
    if isinstance(edges, int):
        return (rate * edges).floor().long().clamp(max=edges - 1)
    return torch.bucketize(rate, torch.tensor(list(edges), dtype=rate.dtype), right=True)


def settled_bins(old: Tensor, rate: Tensor, edges: Sequence[float] | int, margin: float) -> Tensor:
    """(n,) int64 bin of each success rate, where a prompt leaves its old bin only by a margin.

    From bin b a prompt moves up if rate >= upper edge of b + margin, and down if rate <= lower edge of b - margin; it
    then goes to the bin that the rate falls in, however many are between.

    Args:
        old: (n,) int64 the bin of each prompt, -1: none yet.
        rate, edges: as of `bins`.
    """
    new = bins(rate, edges)
    if isinstance(edges, int):
        edges = [k / edges for k in range(1, edges)]
    if not edges:
        return new
    edge = torch.tensor(list(edges), dtype=rate.dtype)
    upper, lower = edge[old.clamp(0, len(edge) - 1)], edge[(old - 1).clamp(0, len(edge) - 1)]
    up, down = (new > old) & (rate >= upper + margin), (new < old) & (rate <= lower - margin)
    return torch.where((old < 0) | up | down, new, old)
