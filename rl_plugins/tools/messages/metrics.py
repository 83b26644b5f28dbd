"""Measures of coordination between agents, from Towards a Science of Scaling Agent Systems (2512.08296)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Coordination:
    """Several agents against one.

    Attributes:
        overhead: (turns of several - turns of one) / turns of one.
        message_density: messages between agents per turn.
        redundancy: mean overlap of the agents' outputs, see `redundancy`; NaN without two outputs.
        efficiency: success / (turns of several / turns of one).
        error_amplification: error of several / error of one; infinite if only several err; NaN if neither errs, or if
            their tokens are not equal.
        tokens_ratio: tokens of several / tokens of one.
    """

    overhead: float
    message_density: float
    redundancy: float
    efficiency: float
    error_amplification: float
    tokens_ratio: float


@dataclass(frozen=True)
class AgentRuns:
    """Episodes of one system, several agents or one.

    Args:
        success: (episodes,) share of success in [0, 1].
        turns: (episodes,) turns of all its agents together.
        tokens: (episodes,) generated tokens of all its agents together.
        messages: (episodes,) messages between agents; empty: none.
        outputs: (episodes,) the texts of its agents, one per agent; empty: not known.

    Raises:
        ConfigError: lengths that differ, no episode, or a success outside of [0, 1].
    """

    success: Sequence[float]
    turns: Sequence[float]
    tokens: Sequence[float]
    messages: Sequence[float] = ()
    outputs: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        given: dict[str, Sequence[Any]] = {"success": self.success, "turns": self.turns, "tokens": self.tokens}
        optional: dict[str, Sequence[Any]] = {"messages": self.messages, "outputs": self.outputs}
        given |= {name: values for name, values in optional.items() if len(values)}
        lengths = {name: len(values) for name, values in given.items()}
        if len(set(lengths.values())) > 1 or not len(self.success):
            told = ", ".join(f"{name} {n}" for name, n in lengths.items())
            raise ConfigError(f"The numbers of episodes are {told}. Give the same, at least 1, for all.")
        if not all(0 <= s <= 1 for s in self.success):
            raise ConfigError("A success is outside of [0, 1]. Scale it, for example to 1 for a solved task.")


@dataclass(frozen=True)
class AgentMeans:
    """Means over the episodes of one system; NaN where a value is not known.

    Args:
        success, turns, tokens, messages: as in `AgentRuns`.
        redundancy: of the outputs of its agents.
    """

    success: float
    turns: float
    tokens: float
    messages: float = 0.0
    redundancy: float = math.nan

    @classmethod
    def of(cls, runs: AgentRuns) -> AgentMeans:
        """The means of these episodes."""
        overlaps = [v for v in map(redundancy, runs.outputs) if not math.isnan(v)]
        return cls(
            float(np.mean(runs.success)),
            float(np.mean(runs.turns)),
            float(np.mean(runs.tokens)),
            float(np.mean(runs.messages)) if len(runs.messages) else 0.0,
            float(np.mean(overlaps)) if overlaps else math.nan,
        )


def coordination(several: AgentRuns | AgentMeans, one: AgentRuns | AgentMeans, tolerance: float = 0.1) -> Coordination:
    """Measures of a system of several agents against one agent on the same tasks.

    Args:
        several, one: their episodes, or means over them. A measure without its values is NaN.
        tolerance: largest relative difference of mean tokens at which two budgets count as equal; infinite if they are
            equal by other means.

    Raises:
        ConfigError: the single agent has no turn or no token.

    Source: arXiv 2512.08296. Its fitted predictor is not here: its fit changed between the versions of the paper.
    """
    several, one = (v if isinstance(v, AgentMeans) else AgentMeans.of(v) for v in (several, one))
    if one.turns <= 0 or one.tokens <= 0:
        raise ConfigError(f"The single agent has {one.turns:g} turns and {one.tokens:g} tokens. Both must be above 0.")
    ratio = several.tokens / one.tokens
    equal = tolerance == math.inf or abs(ratio - 1) <= tolerance + 1e-9
    return Coordination(
        overhead=(several.turns - one.turns) / one.turns,
        message_density=message_density(several.messages, several.turns),
        redundancy=several.redundancy,
        efficiency=several.success / (several.turns / one.turns) if several.turns else math.nan,
        error_amplification=amplified(1 - several.success, 1 - one.success) if equal else math.nan,
        tokens_ratio=ratio,
    )


def amplified(error: float, error_of_one: float) -> float:
    """error / error_of_one; infinite if only the first is above 0, NaN if neither is or one is not known."""
    if math.isnan(error) or math.isnan(error_of_one):
        return math.nan
    if error_of_one > 0:
        return error / error_of_one
    return math.inf if error > 0 else math.nan


def message_density(messages: float, turns: float) -> float:
    """Messages between agents per turn of all agents; NaN without a turn."""
    return messages / turns if turns else math.nan


def redundancy(outputs: Sequence[str]) -> float:
    """Mean cosine similarity of the word counts of every pair of outputs: 1 for equal words, 0 for none in common.

    An output without words is left out. NaN with fewer than two others. Word counts stand for the paper's embeddings,
    so paraphrases count as different.

    Args:
        outputs: one text per agent.
    """
    counts = [c for c in (Counter(_WORD.findall(text.casefold())) for text in outputs) if c]
    if len(counts) < 2:
        return math.nan
    place = {word: i for i, word in enumerate(dict.fromkeys(word for c in counts for word in c))}
    table = np.zeros((len(counts), len(place)))
    for row, c in zip(table, counts, strict=True):
        row[[place[word] for word in c]] = list(c.values())
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    n = len(counts)
    return min(max(float((np.sum(table.sum(0) ** 2) - n) / (n * (n - 1))), 0.0), 1.0)
