"""The best draws from Beta posteriors: the quick form has the distribution of the plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl_plugins.kit import thompson
from rl_plugins.kit.prompt_memory import Counts
from rl_plugins.kit.thompson import SCORES, Draws, best_draws, largest_density

SIZE, N, DRAWS = 400, 12, 800
COUNTS = Counts()


def posteriors(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A third unseen, a third with a few counts, a third with many."""
    rng = np.random.default_rng(seed)
    alpha, beta = rng.uniform(0, 12, (2, size)) * np.repeat([0.0, 0.2, 1.0], -(-size // 3))[:size]
    return {"alpha": torch.from_numpy(alpha), "beta": torch.from_numpy(beta)}


def draws(state: dict[str, torch.Tensor], seed: int, score: str = "p(1-p)^2", n: int = N) -> Draws:
    rng = np.random.default_rng([3, seed])
    most = COUNTS.most(dict(state))
    return best_draws(lambda i: COUNTS.of(state, i), len(state["alpha"]), most, SCORES[score], n, set(), rng)


def draw(state: dict[str, torch.Tensor], seed: int, n: int = N, taken: tuple[int, ...] = ()) -> list[int]:
    rng, most = np.random.default_rng([3, seed]), COUNTS.most(dict(state))
    size, score = len(state["alpha"]), SCORES["p(1-p)^2"]
    chosen: list[int] = best_draws(lambda i: COUNTS.of(state, i), size, most, score, n, set(taken), rng).rows.tolist()
    return chosen


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick form for a small dataset, with several levels and a rest that is drawn one by one."""
    monkeypatch.setattr(thompson, "SMALL", 0)
    monkeypatch.setattr(thompson, "_FIRST_LEVEL", 1)


@pytest.mark.parametrize("score", SCORES)
def test_rows_and_rates_come_as_often_as_in_the_plain_form(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = posteriors(SIZE)
    plain = [draws(state, seed, score, SIZE // 4) for seed in range(DRAWS)]
    monkeypatch.setattr(thompson, "SMALL", 0)
    monkeypatch.setattr(thompson, "_FIRST_LEVEL", 1)
    quick = [draws(state, seed + DRAWS, score, SIZE // 4) for seed in range(DRAWS)]
    assert all(len(set(d.rows.tolist())) == SIZE // 4 for d in quick)
    kind = np.repeat([0, 1, 2], -(-SIZE // 3))[:SIZE]
    for rank in (0, 3, 10, 30, 60, SIZE // 4 - 1):  # of the levels, and of the rest
        rates = [np.array([d.rates[rank] for d in form]) for form in (plain, quick)]
        assert stats.ks_2samp(*rates).pvalue > 1e-4
        assert stats.ks_2samp(*(SCORES[score].value(r) for r in rates)).pvalue > 1e-4
        table = [np.bincount(kind[[d.rows[rank] for d in form]], minlength=3) for form in (plain, quick)]
        assert stats.chi2_contingency(table).pvalue > 1e-4
    often = [np.bincount(np.concatenate([d.rows[:N] for d in form]), minlength=SIZE) for form in (plain, quick)]
    spread = (often[0] - often[1]) / np.sqrt(np.maximum(often[0] + often[1], 1))
    assert abs((spread**2).mean() - 1) < 0.35 and np.abs(spread).max() < 5


@pytest.mark.usefixtures("quick")
def test_a_further_call_continues_the_ranking_of_the_same_draw() -> None:
    state = posteriors(SIZE)
    for n in (40, SIZE):  # within the levels, and down to the rest
        whole = draw(state, 0, n=n)
        assert len(set(whole)) == n
        assert draw(state, 0, n=10) == whole[:10]
        assert draw(state, 0, n=n - 10, taken=tuple(whole[:10])) == whole[10:]


@pytest.mark.usefixtures("quick")
def test_few_rows_are_looked_at() -> None:
    state, looked = posteriors(200_000), []

    def counts(rows: torch.Tensor | slice) -> tuple[torch.Tensor, ...]:
        looked.append(len(rows) if isinstance(rows, torch.Tensor) else 200_000)
        return COUNTS.of(state, rows)

    rng = np.random.default_rng(0)
    most = COUNTS.most(dict(state))
    assert len(best_draws(counts, 200_000, most, SCORES["p(1-p)^2"], 64, set(), rng)) == 64
    assert sum(looked) < 64 * 30


@settings(max_examples=60, deadline=None)
@given(
    most=st.sampled_from([0.0, 0.01, 0.5, 3.0, 10.0, 40.0, 800.0]),
    share=st.floats(0, 1),
    first=st.floats(0, 1),
    ends=st.tuples(st.floats(0.02, 0.98), st.floats(0.02, 0.98)),
)
def test_no_posterior_has_a_larger_density(most: float, share: float, first: float, ends: tuple[float, float]) -> None:
    low, high = sorted(ends)
    a, b = most * share * first, most * share * (1 - first)
    density = stats.beta.pdf(np.linspace(low, high, 41), a + 1, b + 1)
    assert density.max() <= largest_density(most, (low, high)) * (1 + 1e-9)


@pytest.mark.parametrize("score", SCORES.values())
def test_levels_of_the_scores(score: thompson.Ranking) -> None:
    p = np.linspace(0, 1, 100_001)
    assert score.peak == pytest.approx(score.value(p).max()) and score.place == pytest.approx(
        p[score.value(p).argmax()], abs=1e-5
    )
    for width in (1e-6, 1e-3, 0.2):
        level = score.peak - (width / 2) ** 2
        low, high = score.interval(level)
        assert score.value(low) == pytest.approx(level, abs=1e-14) == score.value(high)
        assert high - low == pytest.approx(width, rel=0.1)
    assert score.interval(-0.1) == (0.0, 1.0)


def test_a_level_holds_as_many_rows_as_are_left_for_it() -> None:
    """Uniform posteriors, known not to lie in the inner interval: 2143 rows of 10,000, 0.15 of the 0.7 that is left."""
    state = {name: torch.zeros(10_000, dtype=torch.float64) for name in ("alpha", "beta")}
    inner, outer, rng = (0.2, 0.5), (0.15, 0.6), np.random.default_rng(0)
    none = np.zeros(0, dtype=np.int64)
    found = thompson._level(lambda i: COUNTS.of(state, i), 10_000, 1.0, SCORES["p(1-p)"], inner, outer, none, rng)
    wanted = 10_000 * 0.15 / 0.7
    assert abs(len(found) - wanted) < 4 * wanted**0.5
    left = found.rates < 0.2
    assert bool(((found.rates[left] > 0.15) & (found.rates[left] < 0.2)).all())
    assert bool(((found.rates[~left] > 0.5) & (found.rates[~left] < 0.6)).all())
    assert abs(left.mean() - 1 / 3) < 4 * (2 / 9 / len(found)) ** 0.5
