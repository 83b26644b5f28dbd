"""The risk meter: its vectors, plain loops, and rates found again in runs that were drawn with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from golden_cases import Case, Golden, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.messages.risk import estimate_rates, propagate, risk, spectral_radius

GOLDEN = Golden("error_cascade")
MESH = np.ones((4, 4)) - np.eye(4)
P = st.floats(0, 1, allow_nan=False)


@GOLDEN.kind("A_row_i_listens_to_col_j")
def check_cascade(case: Case) -> None:
    graph = plain(case.inputs["A_row_i_listens_to_col_j"])
    beta, delta = case.params["beta"], case.params["delta"]
    wanted = np.array(plain(case.expected["trajectory"]))
    found = propagate(graph, plain(case.inputs["s0"]), beta, delta, len(wanted) - 1)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert spectral_radius(graph) == pytest.approx(case.expected["rho"], abs=1e-6)
    assert risk(graph, beta, delta) == pytest.approx(case.expected["risk_R"], abs=1e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


@st.composite
def graphs(draw: Any) -> tuple[list[list[int]], list[float]]:
    n = draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 1), min_size=n, max_size=n)
    return draw(st.lists(row, min_size=n, max_size=n)), draw(st.lists(P, min_size=n, max_size=n))


@given(graphs(), P, P)
@settings(deadline=None)
def test_equals_a_loop_and_stays_a_probability(case: Any, b: float, d: float) -> None:
    graph, s = case
    found = propagate(graph, s, b, d, 3)
    for t in range(3):
        new = []
        for i in range(len(s)):
            keep = 1.0
            for j in range(len(s)):
                keep *= 1 - b * graph[i][j] * s[j]
            new.append((1 - d) * s[i] + (1 - s[i]) * (1 - keep))
        s = new
        np.testing.assert_allclose(found[t + 1], s, atol=1e-12)
    assert (found >= 0).all() and (found <= 1 + 1e-12).all()


@pytest.mark.parametrize(("d", "grows"), [(0.8, True), (1.0, False)])
def test_a_small_claim_grows_if_r_is_above_one(d: float, grows: bool) -> None:
    found = propagate(MESH, [1e-6] * 4, 0.3, d, 30).sum(1)
    assert (risk(MESH, 0.3, d) > 1) is grows is bool(found[-1] > found[0])


def test_no_circle_no_amplification() -> None:
    n = 60  # eigenvalues of a long chain that were computed by rounding alone are far from 0
    chain = np.triu(np.ones((n, n)), 1)
    assert spectral_radius(chain) == 0.0 and risk(chain, 0.9, 0.0) == 0.0
    assert risk(MESH, 0.5, 0.0) == math.inf and risk(MESH, 0.0, 0.0) == 0.0
    assert spectral_radius(np.zeros((0, 0))) == 0.0


def test_rates_are_found_again() -> None:
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(400):
        has = np.zeros((12, 4), bool)
        has[0, 0] = True
        for t in range(11):
            k = MESH @ has[t]
            draw = rng.random(4)
            has[t + 1] = np.where(has[t], draw >= 0.4, draw < 1 - (1 - 0.15) ** k)
        runs.append(has)
    found = estimate_rates(runs, MESH)
    assert found.adoption == pytest.approx(0.15, abs=0.02) and found.correction == pytest.approx(0.4, abs=0.03)
    assert found.exposures > 1000 and found.held > 1000


def test_rates_by_hand_and_without_evidence() -> None:
    pair = [[0, 0], [1, 0]]  # the second reads the first: k is 1, so b is a share
    found = estimate_rates([[[1, 0], [1, 1], [0, 0]], [[1, 0], [1, 0]], [[1, 0], [1, 0]]], pair)
    assert found.adoption == pytest.approx(1 / 3) and found.correction == pytest.approx(2 / 5)
    assert (found.exposures, found.held) == (3, 5)
    none = estimate_rates([[[0, 0], [0, 0]]], pair)
    assert math.isnan(none.adoption) and math.isnan(none.correction) and none.exposures == 0
    assert estimate_rates([[[1, 0], [1, 1]]], pair).adoption == 1.0
    assert estimate_rates([[[1, 0], [1, 0]]], pair).adoption == 0.0
    assert math.isnan(estimate_rates([], pair).adoption)


def test_errors_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="`adoption` is 1.5"):
        risk(MESH, 1.5, 0.1)
    with pytest.raises(ConfigError, match="square matrix"):
        spectral_radius([[0, 1]])
    with pytest.raises(ConfigError, match="a probability for each of 4 agents"):
        propagate(MESH, [1, 0], 0.1, 0.1, 1)
    with pytest.raises(ConfigError, match=r"must be \(rounds, 4\)"):
        estimate_rates([[[1, 0]]], MESH)
