"""DRIVE (arXiv 2511.06307): first all prompts with few rollouts, then fewer and harder prompts with many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_plugins import ConfigError, Idle, Method, MethodError, MethodParams, from_params, param
from rl_plugins.core.rollouts import Plan, PlanRow, PromptPool, Rollouts, Run, Tokens
from rl_plugins.kit.prompt_memory import Counts, Outcomes, SuccessParams
from rl_plugins.kit.row_sets import RowSet, shuffled

COUNTS = Counts(("right", "trials", "gains"))


class Drive(Method):
    """A curriculum that keeps the hardest prompts, with more rollouts each.

    The paper trains a second stage (Pre-GRPO) in phases, and carries from each phase the cases with a low pass rate to
    the next. The pass rate is that of the training rollouts. Its decay, ties and one dataset for both stages are ours.

    Phase j of a run has a set of `sizes`[j] prompts, `rollouts`[j] rollouts per prompt, completions of at most
    `max_tokens`[j] tokens, and `batches`[j] generation batches (the last phase: the rest of the run). At its start

        rate_i = right rollouts / rollouts of prompt i, older batches times `decay` at every visit
        order the set by rate, then by fewer recent improvements, then by dataset row;  keep the first sizes[j]

    so sets are nested. An improvement is a batch whose rate was above the previous estimate; it decays like outcomes.
    Prompts of a set come in a shuffled order, all of them before one is repeated; in the host's order while the set is
    the whole dataset and `rollouts` is not given. More rollouts per prompt are fewer prompts of a batch. If a set does
    not fill it, its prompts are repeated in further groups (`when_short: repeat`), or it is smaller (`fewer`).

    By default phases last 32, 64, 32 and the remaining batches. The sets are the paper's 72, 50 and 25 prompts as
    shares of the 175 that its second stage begins with; its rollouts are 8, then 64 (`rollouts: [8, 64, 64, 64]`).

    Symbols: sizes up to 1 are shares of the dataset, larger ones numbers of prompts; a success is a reward >=
    success_threshold. Estimates (dataset size,) float64. Phases of equal rollouts and token limit are a stage.

    Special cases: a prompt without an estimate counts as the hardest. Rollouts without a reward (NaN) do not count, and
    one of several rows counts once. With `keep_unsolved: false`, prompts tried and never right leave at the next phase,
    unless none would remain. Rows of replay and foreign prompts stay as planned. Name drive before methods that edit
    prompts: only methods after it see the groups that it adds.

    State: phase, set, position in its order, estimates. A run resumed in the middle of a phase continues exactly.

    Raises:
        ConfigError: lists of unequal length; sizes that rise or exceed the dataset; a limit above the host's.
        MethodError: a batch with fewer rows than a phase has rollouts per prompt.

    Source: arXiv 2511.06307v1, sections 3.2, 4.1 and 4.6. No code was found.
    """

    name = "drive"
    fidelity = "paper"
    state_version = 2  # the set as ranges
    does = "Trains all prompts first, then smaller sets of the hardest ones with more rollouts each"
    problems = ("few_prompts", "too_easy", "exploration")
    needs = frozenset({"prompt_index"})
    decides_rollouts = from_params(lambda p: bool(p.rollouts))
    idle = (Idle({"success": 0.0}, "no rollout of the set was right. Set `keep_unsolved` to false, or raise `sizes`."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        sizes: tuple[float, ...] = param(
            (1.0, 0.4114, 0.2857, 0.1429), "prompts of a phase: a share up to 1, or a number", gt=0
        )
        batches: tuple[int, ...] = param((32, 64, 32), "number of generation batches of each phase but the last", ge=1)
        rollouts: tuple[int, ...] = param((), "rollouts per prompt in each phase; empty: the host's", ge=2)
        max_tokens: tuple[int, ...] = param((), "completion length in each phase; empty: the host's", ge=1)
        decay: float = param(0.5, "share of a prompt's older outcomes that remains after a visit", ge=0, le=1)
        keep_unsolved: bool = param(True, "permission to keep prompts that were never right (paper)")
        when_short: Literal["repeat", "fewer"] = param("repeat", "treatment of a set smaller than the batch")

        def check(self) -> None:
            n = len(self.sizes)
            if not n or any(x > 1 and x != int(x) for x in self.sizes):
                raise ConfigError(
                    f"`sizes` is {list(self.sizes)[:8]}; it needs at least one entry, each a share of the dataset up "
                    f"to 1 or a whole number of prompts."
                )
            for name, wanted in (("batches", n - 1), ("rollouts", n), ("max_tokens", n)):
                given = len(getattr(self, name))
                if given != wanted and (given or name == "batches"):
                    last = ", for the last phase lasts to the end of the run" if name == "batches" else ""
                    raise ConfigError(f"`{name}` has {given} entries, and `sizes` has {n}; give {wanted}{last}.")
            for a, b in pairwise(self.sizes):
                if b > a and (a > 1 or b <= 1):
                    raise ConfigError(f"`sizes` has {b:g} after {a:g}; a set is part of the one before. Let them fall.")

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self._orders: dict[tuple[int, int], Any] = {}
        self._known: RowSet | None = None

    def check(self, run: Run) -> None:
        p = self.params
        if p.max_tokens and max(p.max_tokens) > run.max_completion_length:
            raise ConfigError(
                f"`max_tokens` is {list(p.max_tokens)[:8]}, and the host's completion length is "
                f"{run.max_completion_length}. Lower it, or raise the host's to the longest phase's."
            )
        if run.dataset_size is not None:
            self._sizes(run.dataset_size)

    def stages(self) -> Sequence[int]:
        return list(accumulate(self.params.batches))

    def start(self, run: Run) -> None:
        assert run.dataset_size is not None  # `needs` has the prompt_index, which a stream lacks
        self.check(run)
        self._size = run.dataset_size
        begin = sum(self.params.batches)
        if begin >= run.total_batches:
            self.warn(
                f"the last phase begins with batch {begin}, and the run has {run.total_batches}: it is not reached. "
                f"Lower `batches`."
            )
        self.state = {**COUNTS.start(run.dataset_size), "phase": -1, "place": 0, "ahead": []}
        self.state["set"] = RowSet.range(0, self._size).edges

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        """The next prompts of the set, and others only where it has no more; `plan` drops those again."""
        self._enter(pool.batch)
        taken = set(pool.taken)
        own = bool(self.params.rollouts)  # with other numbers than the host's, not every prompt it proposes is trained
        why = "phase {phase:.0f}, set of {size:.0f} prompts"
        if self._whole and not own and len(pool.proposal) == n and not taken:
            self.note(pool.proposal, f"{why}, the host's order", phase=self.state["phase"], size=self._size)
            return pool.proposal
        free = self._available(taken)
        chosen = self._next(min(n, free), taken)
        left = taken | set(chosen)
        rest = (i for i in range(pool.size) if i not in left)
        self.note(chosen, why, phase=self.state["phase"], size=len(self._set))
        chosen += [i for i, _ in zip(rest, range(n - len(chosen)), strict=False)]
        return chosen

    def plan(self, plan: Plan) -> Plan | None:
        """Rows of the set, with the rollouts and the token limit of the phase."""
        self._enter(plan.batch)
        phase = self.state["phase"]
        if plan.batch == 0 or phase == 0:
            self._check_room(plan)
        if not self._acts(phase):
            return None
        others = [row for row in plan.rows if not _is_fresh(row)]
        room = plan.budget - sum(row.n for row in others)
        numbers = count(max(row.group for row in plan.rows) + 1)
        wanted = self._of_set(plan, room, numbers)
        repeats = self.params.when_short == "repeat" and wanted
        again = (wanted[i % len(wanted)].replace(group=next(numbers)) for i in count()) if repeats else ()
        rows = _fitting(chain(wanted, again), room)
        self._advance([row.prompt_index for row in rows[: len(wanted)]])
        self.log("repeated", max(0, len(rows) - len(wanted)), "sum")
        return plan.replace(rows=(*others, *rows))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, each = self.params, rollouts.per_rollout
        own = each.prompt_index >= 0
        seen = Outcomes.of(each.prompt_index, p.successes(each.reward))
        before, tried, _ = COUNTS.of(self.state, seen.prompts)
        gained = (tried > 0) & (seen.right / seen.trials > before / tried)
        COUNTS.visit(self.state, seen.prompts, p.decay, (seen.right, seen.trials, gained.double()))

        self.log("phase", max(0, self.state["phase"]))
        self.log("stage", self._stage(max(0, self.state["phase"])))
        self.log("set", len(self._set))
        self.log("success", seen.right.sum() / seen.trials.sum())
        self.log("unscored", 1 - seen.trials.sum() / own.sum().clamp(min=1))
        inside = self._set.contains(seen.prompts)
        self.log("outside", (~inside).double().mean() if len(inside) else 0.0)

    # ---- phases

    def _sizes(self, dataset: int) -> list[int]:
        """Prompts of every phase."""
        found = [max(1, round(x * dataset)) if x <= 1 else int(x) for x in self.params.sizes]
        if max(found) > dataset:
            raise ConfigError(f"`sizes` asks for {max(found)} prompts, and the dataset has {dataset}. Lower it.")
        for a, b in pairwise(found):
            if b > a:
                raise ConfigError(
                    f"`sizes` comes to {found[:8]} of {dataset} prompts; a set is part of the one before. "
                    f"Let them fall."
                )
        return found

    def _acts(self, phase: int) -> bool:
        """Whether a phase is anything but the host's plan."""
        p = self.params
        return p.sizes[phase] != 1 or bool(p.rollouts) or bool(p.max_tokens)

    def _stage(self, phase: int) -> int:
        p = self.params
        kind = [(p.rollouts[j] if p.rollouts else 0, p.max_tokens[j] if p.max_tokens else 0) for j in range(phase + 1)]
        return sum(a != b for a, b in pairwise(kind))

    def _enter(self, batch: int) -> None:
        """Makes the sets of the phases that have started."""
        phase, sizes = sum(batch >= end for end in accumulate(self.params.batches)), self._sizes(self._size)
        while self.state["phase"] < phase:
            j = self.state["phase"] = self.state["phase"] + 1
            if sizes[j] == self._size:
                continue
            self._keep(sizes[j])

    def _keep(self, size: int) -> None:
        """Makes the set smaller. Prompts without an estimate are the hardest, so only the others are compared."""
        seen = COUNTS.visited(self.state, "trials")
        seen = seen[self._set.contains(seen)]
        unseen = self._set.toggled(seen)
        right, trials, gains = COUNTS.of(self.state, seen)
        rate = right / trials
        if not self.params.keep_unsolved and (len(unseen) or bool((right > 0).any())):  # else none would remain
            seen, rate, gains = (x[right > 0] for x in (seen, rate, gains))
        kept = hardest(rate, gains, max(0, size - len(unseen)))
        self.state |= {"set": unseen.ranked(0, size).toggled(seen[kept]).edges, "place": 0, "ahead": []}
        self.log("kept_rate", rate[kept].mean())
        self.log("unseen", (len(self._set) - int(kept.sum())) / len(self._set))

    def _check_room(self, plan: Plan) -> None:
        """Refuses, in the first batch already, phases whose groups do not fit into a batch."""
        most = max(self.params.rollouts, default=0)
        if most > plan.budget and plan.first:
            raise MethodError(
                f"`rollouts` is {list(self.params.rollouts)[:8]}, and the batch trains {plan.budget} rows, which hold "
                f"no group of {most}. Make the batch larger or the groups smaller."
            )

    # ---- prompts of the set

    @property
    def _set(self) -> RowSet:
        edges = self.state["set"]
        if self._known is None or self._known.edges is not edges:  # at the start, in a new phase, after a resume
            self._known = RowSet(edges)
        return self._known

    @property
    def _whole(self) -> bool:
        return len(self._set) == self._size

    def _available(self, without: Iterable[int]) -> int:
        """Prompts of the set that are not among those."""
        return len(self._set) - int(self._set.contains(torch.tensor(sorted(without), dtype=torch.int64)).sum())

    def _at(self, place: int) -> int:
        """The prompt at a place of the endless order: one permutation of the set after the other."""
        epoch, at = divmod(place, len(self._set))
        key = self.state["phase"], epoch
        if key not in self._orders:
            if len(self._orders) > 1:
                self._orders.clear()
            self._orders[key] = shuffled([self._seed(), max(0, self.state["phase"]), epoch], len(self._set))
        return int(self._set.at(self._orders[key][at]))

    def _seed(self) -> int:
        if "seed" not in self.state:
            self.state["seed"] = int(self.rng("order").integers(2**31))
        return int(self.state["seed"])

    def _next(self, n: int, without: Iterable[int]) -> list[int]:
        """The next n prompts of the set in its order, without those. Nothing is moved on."""
        without, chosen = set(without), list[int]()
        for place in self._to_come():
            if len(chosen) == n:
                break
            prompt = self._at(place)
            if prompt not in without:
                without.add(prompt)
                chosen.append(prompt)
        return chosen

    def _advance(self, used: Iterable[int]) -> None:
        """Takes the prompts that were planned out of the order. One that the batch had already keeps its place in the
        next pass, and those after it are not dealt twice."""
        left, ahead = set(used), self.state["ahead"]
        for place in self._to_come():
            if not left:
                break
            if (prompt := self._at(place)) in left:
                left.remove(prompt)
                ahead.append(place)
        while self.state["place"] in ahead:
            ahead.remove(self.state["place"])
            self.state["place"] += 1

    def _to_come(self) -> Iterator[int]:
        """Places of the order that were not dealt."""
        dealt = set(self.state["ahead"])
        return (place for place in count(self.state["place"]) if place not in dealt)

    def _of_set(self, plan: Plan, room: int, numbers: Iterator[int]) -> list[PlanRow]:
        """Rows of the plan whose prompts are in the set, and of further ones that fit; none if the plan has none."""
        fresh = [row for row in plan.rows if _is_fresh(row)]
        inside = self._set.contains(torch.tensor([row.prompt_index for row in fresh], dtype=torch.int64))
        fresh = [row for row, is_in in zip(fresh, inside.tolist(), strict=True) if is_in]
        if not fresh:
            return []  # a call that fills the batch, and the set has no more
        size = self.params.rollouts[self.state["phase"]] if self.params.rollouts else plan.group_size
        named = {row.prompt_index for row in fresh}
        more = min(room // size - len(fresh), self._available(named))
        further = [PlanRow(i, next(numbers), plan.group_size) for i in self._next(max(0, more), named)]
        return [self._changed(row) for row in (*fresh, *further)]

    def _changed(self, row: PlanRow) -> PlanRow:
        """The row with the phase's rollouts and token limit."""
        p, phase = self.params, self.state["phase"]
        if p.rollouts:
            row = row.replace(n=p.rollouts[phase])
        if p.max_tokens:
            row = row.replace(max_tokens=min(p.max_tokens[phase], row.max_tokens or p.max_tokens[phase]))
        return row


def _is_fresh(row: PlanRow) -> bool:
    """Whether a row trains a prompt of the dataset, with completions that are to be made."""
    return row.n > 0 and row.prompt_index >= 0 and not row.given


def _fitting(rows: Iterable[PlanRow], room: int) -> list[PlanRow]:
    """The first rows, as long as their rollouts fit."""
    found: list[PlanRow] = []
    for row in rows:
        room -= row.n
        if room < 0:
            break
        found.append(row)
    return found


def hardest(rate: Tensor, gains: Tensor, size: int) -> Tensor:
    """(n,) bool, `size` prompts with the lowest success rate, of equal ones with the fewest gains, of equal ones the
    first; all if there are fewer.

    Args:
        rate, gains: (n,) float64 success rate and recent improvements of each.
    """
    kept, candidates = torch.zeros(len(rate), dtype=torch.bool), torch.ones(len(rate), dtype=torch.bool)
    for key in (rate, gains):  # by selection, which takes less than a sort
        values = key[candidates].numpy()
        if len(values) <= size:
            break
        edge = float(np.partition(values, size)[size])
        kept |= (below := candidates & (key < edge))
        size -= int(below.sum())
        candidates &= key == edge
    kept[candidates.nonzero()[:size, 0]] = True
    return kept
