"""What a run costs, counted where the engine is called: tokens, calls, seconds and rows since the start of the run.

A process that calls an engine has a `Meter`. The driver asks every meter after a batch and adds what they counted to
the `Costs` of the run, which every host logs and saves in its checkpoints. Evaluation is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_plugins.core.entries import Entries
from rl_plugins.core.errors import StateError, shown
from rl_plugins.core.requests import Generated, Trajectory

NOTE = "costs"  # name of the totals in a checkpoint


@dataclass
class Costs:
    """Totals, each logged as `rl_plugins/<name>`.

    Args:
        tokens_decoded: tokens the engine sampled, whatever became of them: in rows that a program or a method threw
            away, behind a cut, and in generation that was given up.
        tokens_read: tokens of every context the engine was given to continue, once for each continuation, whether or
            not a cache had them; and prompt and completion of every `Score` of a program.
        engine_calls: of the engine: in TRL one for a batch of rows on one process, in verl one for a request, which is
            one row; an interrupted request counts once per attempt.
        engine_seconds: in which at least one of these calls was under way in any process, on the wall.
        rows_made: rows the engine began: completions, branches of a completion, and what a program generates in a
            context of its own (a sub-agent, a retry aside). An agent's next turn continues its row. Completions that a
            plan gives are not made.
        rows_trained_total: rows that were trained, once for each batch they were in.
    """

    tokens_decoded: int = 0
    tokens_read: int = 0
    engine_calls: int = 0
    engine_seconds: float = 0.0
    rows_made: int = 0
    rows_trained_total: int = 0

    def __add__(self, other: Costs) -> Costs:
        mine, theirs = self.plain(), other.plain()
        return Costs(**{name: value + theirs[name] for name, value in mine.items()})

    def plain(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return dataclasses.asdict(self)

    def logged(self) -> dict[str, float]:
        """Names in the logs of a run, and values."""
        return {f"rl_plugins/{name}": float(value) for name, value in self.plain().items()}

    @classmethod
    def of_checkpoint(cls, saved: Mapping[str, Any] | None) -> Costs:
        """The totals in what a checkpoint holds; zeros where it has none, as in those of earlier versions.

        Raises:
            StateError: not as this version writes them.
        """
        found = (saved or {}).get(NOTE)
        if found is None:
            return cls()
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(found, Mapping) or not all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and v >= 0 for v in found.values()
        ):
            raise StateError(
                f"`{NOTE}` of the checkpoint is {shown(found)}, not a number of at least 0 for each of "
                f"{', '.join(sorted(names))}. Resume with the version of rl-plugins that wrote it."
            )
        return cls(**{name: value for name, value in found.items() if name in names})


Spell = tuple[float, float]
"""[start, stop) in seconds of `time.time`."""


class Meter:
    """Counts the engine calls of one process.

    Args:
        clock: seconds, the same in all processes.

    Attributes:
        costs: counted since the last `take`; its `engine_seconds` are not filled in, see `total`.
        spells: in which the engine was busy since then.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.costs = Costs()
        self.spells: list[Spell] = []
        self._under_way, self._since = 0, 0.0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A call of the engine, which may overlap with others of this process."""
        if not self._under_way:
            self._since = self.clock()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.spells.append((self._since, self.clock()))

    def take(self) -> tuple[Costs, list[Spell]]:
        """What was counted since the last time, and when the engine was busy. A call under way is split here."""
        if self._under_way:
            now = self.clock()
            self.spells.append((self._since, now))
            self._since = now
        costs, spells = self.costs, self.spells
        self.costs, self.spells = Costs(), []
        return costs, spells


def total(parts: Iterable[tuple[Costs, Sequence[Spell]]]) -> Costs:
    """What several meters counted, together. Seconds in which several of them were busy count once."""
    parts = list(parts)
    out = sum((costs for costs, _ in parts), Costs())
    out.engine_seconds += union_seconds(spell for _, spells in parts for spell in spells)
    return out


def union_seconds(spells: Iterable[Spell]) -> float:
    """Seconds that lie in at least one spell."""
    seconds, end = 0.0, -np.inf
    for start, stop in sorted(spells):
        seconds += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return float(seconds)


class RowCount:
    """Counts the rows that the samples of one program make.

    A sample that goes on where an earlier one ended continues its row, whatever was read or put in between; every
    further sample from there, and every sample from anywhere else, is a row of its own.
    """

    def __init__(self) -> None:
        self._ends: Counter[bytes] = Counter()  # contexts at which a row ends and was not continued, as hashes

    def count(self, trajectory: Trajectory, made: Sequence[Generated]) -> int:
        """New rows among `made`, the continuations of `trajectory`."""
        prompt, tokens = Entries.of(trajectory.prompt, "q"), Entries.of(trajectory.tokens, "q")
        before = prompt.hashed(hashlib.blake2b(digest_size=16), len(prompt))
        start = tokens.hashed(before, policy_made(trajectory)).digest()
        continues = bool(made) and self._ends[start] > 0
        self._ends[start] -= continues
        context = tokens.hashed(before, len(tokens))
        for one in made:
            end = context.copy()
            end.update(np.asarray(one.tokens, dtype=np.int64).tobytes())
            self._ends[end.digest() if len(one.tokens) else start] += 1
        return len(made) - continues


def policy_made(trajectory: Trajectory) -> int:
    """Tokens up to the last one that the policy made; 0 if it made none."""
    versions, end = trajectory.versions, len(trajectory.versions)
    while end and versions[end - 1] < 0:
        end -= 1
    return end
