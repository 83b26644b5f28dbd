"""The sampler of EconProver's heads (arXiv 2509.12603): half of a batch is of one slice of difficulty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins import ConfigError, Idle, Method, from_params, param, signals
from rl_plugins.core.rollouts import PromptPool, Rollouts, Run, Tokens
from rl_plugins.kit.priors import Column
from rl_plugins.kit.prompt_memory import Counts, Outcomes, SuccessParams
from rl_plugins.kit.row_sets import RowSet, shuffled

COUNTS = Counts(("right", "trials"))
OWN, OTHERS = "own", "others"
WITHOUT_COLUMN = {"column": ""}
UNSEEN = 0.5  # estimate of a prompt without rollouts
Ids = NDArray[np.int64]


class DifficultySlices(Method):
    """Trains one of several heads: a share of its prompts is of its own slice of difficulty, the rest of the others.

    Reconstruction: how slices are cut, the order of their prompts, and how the others are drawn were not published.

    A head is a small adapter (LoRA, prompt or prefix tuning) on a frozen base model, trained by a run of its own. The
    run of head i of n = `heads` cuts the D prompts of the dataset into n slices:

        rank_x  = place of prompt x by successes of the base policy, fewest first; ties by dataset row
        slice_x = floor(rank_x n / D)                     sizes differ by at most 1; slice 0 is the hardest
        of B prompts of a batch, `own_share` B are of slice i, the others of all other slices

    Half a prompt that rounding adds is taken from the next batch. The prompts of slice i, and those of the others
    together, come in a shuffled order, all of them before one is repeated. The successes are in the dataset column
    `column`. Without a column, the prompts come in the host's order for `refresh` batches, and are then sorted by
    (right + 1) / (rollouts + 2) of the run's own rollouts, again every `refresh` batches.

    Symbols: right, rollouts (D,) float64; a success is a reward >= success_threshold.

    Special cases: `heads: 1` is the host's order. A batch that is not full asks again, in the same orders. If one side
    has too few prompts that are not in the batch yet, the other gives the rest. A rollout of several rows counts once;
    those without a reward (NaN) and foreign prompts do not count.

    State: the position in both orders and the rounding carried over; without a column also the counts, and which
    prompts are in the slice.

    Raises:
        ConfigError: head i is not below n; more heads than prompts; no such column or number in it.

    Source: arXiv 2509.12603 (Diverse parallel-scaled RL), as two independent notes describe it. No code was found.
    """

    name = "difficulty_slices"
    fidelity = "reconstruction"
    state_version = 2  # the slice as ranges
    does = "Trains one of several heads, half on its own slice of difficulty and half on the rest"
    problems = ("exploration", "few_prompts")
    needs = from_params(lambda p: signals("prompt_index", columns=[p.column]))
    idle = (Idle({"spread": 0.0}, "the slices are alike: look at `column` and `heads`."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        heads: int = param(8, "n, number of heads and of slices; 1: the host's order", ge=1)
        head: int = param(0, "i, the head that this run trains, counted from 0; slice 0 is the hardest", ge=0)
        column: str = param("", "dataset column with the base policy's successes; empty: the run's own rollouts")
        own_share: float = param(0.5, "share of a batch's prompts that are of the head's own slice", ge=0, le=1)
        refresh: int = param(10, "number of batches between two sortings", ge=1, only_if=WITHOUT_COLUMN)
        decay: float = param(1.0, "share of older outcomes that a visit leaves", ge=0, le=1, only_if=WITHOUT_COLUMN)
        success_threshold: float = param(
            0.5, "lowest reward, the weighted sum of the functions, that counts as a success", only_if=WITHOUT_COLUMN
        )

        def check(self) -> None:
            if self.head >= self.heads:
                raise ConfigError(
                    f"parameter `head` is {self.head}, and `heads` is {self.heads}. Heads are counted from 0: `head` "
                    f"must be at most {self.heads - 1}. Lower `head` or raise `heads`."
                )

    def check(self, run: Run) -> None:
        if run.dataset_size is not None and self.params.heads > run.dataset_size:
            raise ConfigError(
                f"`heads` is {self.params.heads}, and the dataset has {run.dataset_size} prompts, so a slice would be "
                f"empty. Lower `heads` or give more prompts."
            )
        if run.dataset is not None and run.dataset_size is not None:
            self._successes(run)

    def start(self, run: Run) -> None:
        assert run.dataset_size is not None  # `needs` has the prompt_index, which a stream lacks
        self.check(run)
        size = self._size = run.dataset_size
        self._orders: dict[str, tuple[int, Any]] = {}
        self._cut: Tensor | None = None  # the slice that these are the members of
        self._members: dict[str, RowSet] = {}
        self._slice = RowSet.range(0, size).edges
        self._spread = 0.0 if self.params.heads == 1 else None  # None: not known, no slices were cut in this process
        self.state = {"owed": 0.0, OWN: _begin(), OTHERS: _begin()}
        successes = self._successes(run)
        if successes is None:
            self.state |= {**COUNTS.start(size), "slice": self._slice, "sorted": 0}
        else:
            self._slice = self._split(torch.arange(size), successes)

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        state, p = self.state, self.params
        taken = np.array(pool.taken, dtype=np.int64)
        own_free, others_free = self._free(taken, pool.batch)
        if not len(self._members[OTHERS]):
            if len(pool.proposal) == n and not len(taken):
                self.note(pool.proposal, "all {size:.0f} prompts, the host's order", size=self._size)
                return pool.proposal
            own = n
        else:
            own, state["owed"] = rounded(p.own_share * n + state["owed"])
            own = min(max(own, n - others_free), own_free)
            self.log("own", own / n, weight=n)
            self.log("size", len(self._members[OWN]))
        sides = {side: self._next(side, k, taken) for side, k in ((OWN, own), (OTHERS, n - own))}
        for side, rows in sides.items():
            self.note(rows.tolist(), f"slice: {side}, {{size:.0f}} prompts", size=len(self._members[side]))
        chosen = np.concatenate([*sides.values()])
        mixed: list[int] = self.rng("mix").permutation(chosen).tolist()  # an optimizer step has prompts of both sides
        return mixed

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, each = self.params, rollouts.per_rollout
        if "trials" in self.state:
            seen = Outcomes.of(each.prompt_index, p.successes(each.reward))
            COUNTS.visit(self.state, seen.prompts, p.decay, (seen.right, seen.trials))

    # ---- slices

    def _successes(self, run: Run) -> Tensor | None:
        """(prompts,) successes of the base policy; None without a column."""
        name = self.params.column
        if not name:
            return None
        column = Column(name)
        try:
            found = column.predict(column.start(run), torch.arange(run.dataset_size or 0))
        except ValueError as e:
            raise ConfigError(
                f"the column `{name}` must hold a number in every row, and one of its values does not "
                f"fit: {e} Fill the column, or name another."
            ) from None
        wrong = (~torch.isfinite(found)).nonzero()[:, 0]
        if len(wrong):
            raise ConfigError(
                f"the column `{name}` must hold a number in every row, and row {int(wrong[0])} has "
                f"{float(found[wrong[0]]):g}. Fill the column, or name another."
            )
        return found

    def _split(self, rows: Tensor, successes: Tensor) -> Tensor:
        """The edges of the slice, from the successes of these rows; the others are unseen."""
        n = self.params.heads
        own, hardest, easiest = slices(rows, successes, self._size, n, (self.params.head, 0, n - 1))
        self._spread = easiest[1] - hardest[1]
        return own[0].edges

    def _free(self, taken: Ids, batch: int) -> tuple[int, int]:
        """Prompts of the slice and of the others that are not among those taken; without a column sorts first."""
        state, p = self.state, self.params
        if "trials" in state and p.heads > 1 and batch // p.refresh > state["sorted"]:
            seen = COUNTS.visited(state, "trials")
            right, trials = COUNTS.of(state, seen)
            state["slice"] = self._split(seen, (right + 1) / (trials + 2))
            state |= {"sorted": batch // p.refresh, "owed": 0.0, OWN: _begin(), OTHERS: _begin()}
        edges = state.get("slice", self._slice)
        if edges is not self._cut:  # at the start, after a sorting, and after a resume
            self._cut, self._orders = edges, {}
            self._members = {OWN: RowSet(edges), OTHERS: RowSet(edges).others(self._size)}
        if self._spread is not None and not len(taken):
            self.log("spread", self._spread)
        own = int(self._members[OWN].contains(torch.from_numpy(taken)).sum())
        return len(self._members[OWN]) - own, len(self._members[OTHERS]) - (len(taken) - own)

    def _next(self, side: str, k: int, without: Ids) -> Ids:
        """The next k prompts of a side in its order, without these. Those it passes by come first the next time."""
        at, chosen, late = self.state[side], np.empty(0, dtype=np.int64), list[int]()
        waiting = np.array(at["late"], dtype=np.int64)
        while True:
            passed = np.isin(waiting, np.concatenate([without, chosen]))
            found, need = waiting[~passed], k - len(chosen)
            chosen = np.concatenate([chosen, found[:need]])
            late += [*waiting[passed].tolist(), *found[need:].tolist()]
            if len(chosen) == k:
                break
            if at["seed"] < 0 or at["place"] == len(self._members[side]):
                at["seed"], at["place"] = int(self.rng(f"{side} after {at['seed']}").integers(2**31)), 0
            places = range(at["place"], min(at["place"] + k - len(chosen), len(self._members[side])))
            order = self._order(side)
            waiting = self._members[side].at(np.array([order[i] for i in places], dtype=np.int64))
            at["place"] += len(places)
        at["late"] = list(dict.fromkeys(late))
        return chosen

    def _order(self, side: str) -> Any:
        """The order of a side's members in the present pass, as their ranks."""
        seed = self.state[side]["seed"]
        if self._orders.get(side, (-1,))[0] != seed:
            self._orders[side] = seed, shuffled(seed, len(self._members[side]))
        return self._orders[side][1]


def slices(rows: Tensor, successes: Tensor, size: int, heads: int, wanted: Sequence[int]) -> list[tuple[RowSet, float]]:
    """Slices of a dataset, sorted by successes, equal ones by dataset row, and the mean successes of each.

    Args:
        rows: (n,) int64 dataset rows, ascending.
        successes: (n,) float64 of these rows; 1/2 of all others.
        size: rows of the dataset.
        heads: slices, whose sizes differ by at most 1.
        wanted: numbers of slices, 0 for the fewest successes.
    """
    order = torch.sort(successes, stable=True).indices
    few, many = order[: int((successes < UNSEEN).sum())], order[int((successes <= UNSEEN).sum()) :]
    middle = RowSet.range(0, size).toggled(rows[torch.cat([few, many])])
    before, found = len(few) + len(middle), []
    for number in wanted:
        start, stop = -(-number * size // heads), -(-(number + 1) * size // heads)
        chosen = torch.cat([few[start:stop], many[max(0, start - before) : max(0, stop - before)]])
        equal = middle.ranked(start - len(few), stop - len(few))
        mean = (float(successes[chosen].sum()) + UNSEEN * len(equal)) / (stop - start)
        found.append((equal.toggled(rows[chosen]), mean))
    return found


def rounded(exact: float) -> tuple[int, float]:
    """A whole number near this, halves up, and what is left over, in [-1/2, 1/2)."""
    whole = int(np.floor(exact + 0.5))
    return whole, exact - whole


def _begin() -> dict[str, Any]:
    """The position before an order's first prompt."""
    return {"seed": -1, "place": 0, "late": []}
