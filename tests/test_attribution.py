"""Attribution: the vectors of CapaBench, a plain loop over permutations, and what Shapley values must be."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.attribution import MOST_EXACT, attribute, bootstrap, coalitions, needed, synergies

GOLDEN = Golden("capabench")
SCORES = st.floats(-5, 5, allow_nan=False)


@GOLDEN.kind("values")
def check_modules(case: Case) -> None:
    table = {frozenset(label[0] for label in labels if label.endswith("t")): v for labels, v in case.inputs["values"]}
    players = [name[0] for name in case.expected["true_shapley"]]
    for index, field in [("shapley", "true_shapley"), ("banzhaf", "official_code_value_1_over_2_pow_n_minus_1")]:
        found = attribute(table, players, index=index)  # type: ignore[arg-type]
        assert found.total == pytest.approx(case.expected["grand_minus_empty"], abs=1e-6)
        wanted = case.expected[field]
        assert [found[p] for p in players] == pytest.approx([wanted[f"{p}t"] for p in players], abs=1e-6)
        assert found.evaluated == 16 and not found.error.any()


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def by_permutations(table: dict[frozenset[str], float], players: list[str]) -> list[float]:
    total = dict.fromkeys(players, 0.0)
    for order in itertools.permutations(players):
        inside: frozenset[str] = frozenset()
        for p in order:
            total[p] += table[inside | {p}] - table[inside]
            inside |= {p}
    return [total[p] / math.factorial(len(players)) for p in players]


@st.composite
def games(draw: Any, least: int = 0, most: int = 5) -> tuple[dict[frozenset[str], float], list[str]]:
    players = list("abcde"[: draw(st.integers(least, most))])
    return {s: draw(SCORES) for s in coalitions(players)}, players


@given(games())
@settings(deadline=None, max_examples=40)
def test_equals_the_mean_over_all_permutations(game: Any) -> None:
    table, players = game
    found = attribute(table, players)
    assert list(found.values) == pytest.approx(by_permutations(table, players), abs=1e-9)
    assert found.unexplained == pytest.approx(0, abs=1e-9)  # efficiency


@given(games(1), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_sampled_values_are_efficient(game: Any, seed: int) -> None:
    table, players = game
    found = attribute(table, players, samples=3, seed=seed)
    assert found.unexplained == pytest.approx(0, abs=1e-9)
    assert found.evaluated <= len(table)


@given(games(2), st.sampled_from(["shapley", "banzhaf"]))
@settings(deadline=None, max_examples=40)
def test_dummy_symmetry_additivity(game: Any, index: Any) -> None:
    table, players = game
    a, b = players[:2]
    dummy = {s: table[s - {a}] for s in table}
    assert attribute(dummy, players, index=index)[a] == pytest.approx(0, abs=1e-9)
    swap = {a: b, b: a}
    same = {s: (table[s] + table[frozenset(swap.get(p, p) for p in s)]) / 2 for s in table}
    found = attribute(same, players, index=index)
    assert found[a] == pytest.approx(found[b], abs=1e-9)
    total = attribute({s: table[s] + 2 * dummy[s] for s in table}, players, index=index).values
    parts = attribute(table, players, index=index).values + 2 * attribute(dummy, players, index=index).values
    np.testing.assert_allclose(total, parts, atol=1e-9)


def test_sampling_finds_the_values_of_many_players() -> None:
    """12 players: a sum, and one product of two of them, which they share."""
    players = [f"p{i}" for i in range(12)]
    asked: list[frozenset[str]] = []

    def score(s: frozenset[str]) -> float:
        asked.append(s)
        return sum(int(p[1:]) for p in s) + 6.0 * ({"p0", "p1"} <= s)

    exact = np.arange(12.0) + np.array([3.0, 3.0] + [0.0] * 10)
    assert len(players) > MOST_EXACT
    for index in ("shapley", "banzhaf"):
        asked.clear()
        found = attribute(score, players, index=index, samples=100)  # type: ignore[arg-type]
        np.testing.assert_allclose(found.values, exact, atol=1e-9)  # antithetic pairs: exact for a game of pairs
        assert len(asked) == len(set(asked)) == found.evaluated < 2**12


def test_antithetic_pairs_leave_less_noise_than_twice_as_many_permutations() -> None:
    players = list("abcdef")
    rng = np.random.default_rng(0)
    worth = dict(zip(players, rng.normal(size=6), strict=True))
    table = {s: sum(worth[p] for p in s) ** 2 for s in coalitions(players)}  # a game of pairs: no noise at all is left
    exact = attribute(table, players).values
    np.testing.assert_allclose(attribute(table, players, samples=1, seed=3).values, exact, atol=1e-9)


def test_error_of_sampling_covers() -> None:
    players = list("abcdef")
    rng = np.random.default_rng(1)
    table = {s: float(rng.normal()) for s in coalitions(players)}
    exact = attribute(table, players).values
    z = [
        (attribute(table, players, samples=200, seed=k).values - exact)
        / attribute(table, players, samples=200, seed=k).error
        for k in range(20)
    ]
    assert 0.85 < float(np.sqrt(np.mean(np.square(z)))) < 1.15


def test_intervals_of_noisy_scores() -> None:
    players = ["a", "b"]
    rng = np.random.default_rng(0)
    hit = 0
    for k in range(60):
        task = rng.normal(scale=10, size=30)  # shared by all coalitions: it must cancel
        scores = {s: task + len(s & {"a"}) + rng.normal(scale=0.5, size=30) for s in coalitions(players)}
        found = bootstrap(scores, players, draws=400, seed=k)
        assert (found.low <= found.values).all() and (found.values <= found.high).all()
        assert (found.high - found.low).max() < 1.0
        hit += int(found.low[0] <= 1 <= found.high[0])
    assert 50 <= hit <= 60
    means = {s: float(v.mean()) for s, v in scores.items()}
    np.testing.assert_allclose(found.values, attribute(means, players).values, atol=1e-12)


@given(st.integers(0, 5), st.sampled_from(["shapley", "banzhaf"]), st.sampled_from([None, 1, 3]), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_the_needed_coalitions_are_those_asked_for(n: int, index: Any, samples: int | None, seed: int) -> None:
    players = list("abcde"[:n])
    asked: set[frozenset[str]] = set()
    attribute(lambda s: asked.add(s) or 0.0, players, index=index, samples=samples, seed=seed)
    found = needed(players, index=index, samples=samples, seed=seed)
    assert set(found) == asked and len(found) == len(asked)
    assert samples is not None or found == coalitions(players)


def test_intervals_of_sampled_coalitions() -> None:
    """12 players, 4 pairs of orders: the values are those of the mean scores, and what tasks share cancels."""
    players = [f"p{i}" for i in range(12)]
    rng = np.random.default_rng(0)
    task = rng.normal(scale=10, size=20)
    asked = needed(players, samples=4, seed=5)
    scores = {s: task + sum(int(p[1:]) for p in s) + rng.normal(scale=0.1, size=20) for s in asked}
    assert len(scores) <= 4 * 2 * 11 + 2
    found = bootstrap(scores, players, samples=4, seed=5, draws=300)
    means = {s: float(v.mean()) for s, v in scores.items()}
    np.testing.assert_allclose(found.values, attribute(means, players, samples=4, seed=5).values, atol=1e-9)
    np.testing.assert_allclose(found.values, np.arange(12.0), atol=0.15)
    assert (found.low <= found.values).all() and (found.values <= found.high).all()
    assert (found.high - found.low).max() < 0.2
    with pytest.raises(ConfigError, match="no score of the coalition"):
        bootstrap(scores, players, samples=4, seed=6)


def test_synergies() -> None:
    table = {s: float(len(s)) + 2 * (s == {"a", "b"}) for s in coalitions(["a", "b"])}
    assert synergies(table, ["a", "b"]) == {("a", "b"): 2.0}


def test_errors_say_what_to_change() -> None:
    whole = dict.fromkeys(coalitions(["a", "b"]), 0.0)
    part = {s: v for s, v in whole.items() if s != {"a"}}
    with pytest.raises(ConfigError, match=r"no score of the coalition \{a\}"):
        attribute(part, ["a", "b"])
    with pytest.raises(ConfigError, match="is nan. It must be a finite number"):
        attribute({**whole, frozenset("a"): math.nan}, ["a", "b"])
    with pytest.raises(ConfigError, match="must be a finite number"):
        attribute(lambda s: None, ["a"])
    with pytest.raises(ConfigError, match="named twice: a"):
        attribute(whole, ["a", "a"])
    with pytest.raises(ConfigError, match="must be shapley or banzhaf"):
        attribute(whole, ["a", "b"], index="owen")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`samples` is 0"):
        attribute(whole, ["a", "b"], samples=0)
    with pytest.raises(ConfigError, match="scores. Each needs one per task"):
        bootstrap({s: [0.0] * (1 + len(s)) for s in whole}, ["a", "b"])
    with pytest.raises(ConfigError, match="at most 10 players. Give `samples`"):
        bootstrap({}, [f"p{i}" for i in range(11)])
    with pytest.raises(ConfigError, match="`level` is 95"):
        bootstrap({}, ["a"], level=95)
