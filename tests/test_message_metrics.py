"""Measures of coordination: by hand, and against a plain loop over pairs."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.messages.metrics import (
    AgentMeans,
    AgentRuns,
    amplified,
    coordination,
    message_density,
    redundancy,
)

ONE = AgentRuns(success=[1, 0.5], turns=[2, 2], tokens=[100, 100])


def test_by_hand() -> None:
    several = AgentRuns([1, 0], [6, 4], [110, 110], [3, 1], [["a b", "a b", ""], ["a", "b"]])
    found = coordination(several, ONE)
    assert found.overhead == pytest.approx(1.5)  # 5 turns against 2
    assert found.message_density == pytest.approx(0.4)
    assert found.redundancy == pytest.approx(0.5)
    assert found.efficiency == pytest.approx(0.5 / 2.5)
    assert found.error_amplification == pytest.approx(0.5 / 0.25)
    assert found.tokens_ratio == pytest.approx(1.1)


def test_one_agent_against_itself() -> None:
    found = coordination(ONE, ONE)
    assert (found.overhead, found.message_density, found.error_amplification) == (0, 0, 1)
    assert found.efficiency == 0.75 and math.isnan(found.redundancy)


def test_errors_are_compared_at_equal_tokens_only() -> None:
    more = AgentRuns([0, 0], [2, 2], [111, 111])
    assert math.isnan(coordination(more, ONE).error_amplification)
    assert coordination(more, ONE, tolerance=0.2).error_amplification == 4
    assert amplified(0.5, 0) == math.inf and math.isnan(amplified(0, 0)) and amplified(0, 0.5) == 0
    assert math.isnan(message_density(0, 0))


def test_means_give_what_their_episodes_give() -> None:
    several = AgentRuns([1, 0], [6, 4], [110, 110], [3, 1], [["a b", "a b", ""], ["a", "b"]])
    assert AgentMeans.of(several) == AgentMeans(0.5, 5.0, 110.0, 2.0, pytest.approx(0.5))
    assert coordination(AgentMeans.of(several), AgentMeans.of(ONE)) == coordination(several, ONE)


def test_what_is_not_known_leaves_the_other_measures() -> None:
    found = coordination(AgentMeans(math.nan, 4.0, math.nan), AgentMeans(0.5, 2.0, 10.0))
    assert found.overhead == 1.0 and found.message_density == 0.0
    for value in (found.redundancy, found.efficiency, found.error_amplification, found.tokens_ratio):
        assert math.isnan(value)
    for tokens in (90.0, math.nan):  # equal by other means
        equal = coordination(AgentMeans(0.25, 4.0, tokens), AgentMeans(0.5, 2.0, 10.0), tolerance=math.inf)
        assert equal.error_amplification == 1.5 and equal.tokens_ratio == pytest.approx(tokens / 10, nan_ok=True)


@given(st.lists(st.text(alphabet="abAB .", max_size=12), max_size=5))
def test_redundancy_is_the_mean_over_pairs(outputs: list[str]) -> None:
    counts = [c for c in (Counter(re.findall(r"\w+", t.lower())) for t in outputs) if c]

    def cosine(a: Counter[str], b: Counter[str]) -> float:
        norm = math.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values()))
        return sum(a[w] * b[w] for w in a) / norm

    pairs = [cosine(a, b) for a, b in itertools.combinations(counts, 2)]
    found = redundancy(outputs)
    if not pairs:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(sum(pairs) / len(pairs)) and 0 <= found <= 1


def test_errors_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="success 1, turns 2, tokens 1"):
        AgentRuns([1], [1, 2], [1])
    with pytest.raises(ConfigError, match="at least 1"):
        AgentRuns([], [], [])
    with pytest.raises(ConfigError, match=r"outside of \[0, 1\]"):
        AgentRuns([2], [1], [1])
    with pytest.raises(ConfigError, match="0 turns"):
        coordination(ONE, AgentRuns([1], [0], [1]))
