"""D3S (arXiv 2509.22115): sub-sets of rows against brute force, tokens against a sort, both through the driver."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.groups import Groups
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts, Shape, Tokens
from rl_plugins.methods.d3s import D3s, max_variance_rows
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack

NAN = math.nan
ALL = {"group_rows_start": 1, "batch_rows_start": 1, "tokens_start": 1}


class Raw(Method):
    """The reward is the advantage."""

    name = "raw"

    def advantages(self, rollouts):
        return rollouts.reward


def d3s_stack(*before: Method, batches: int = 10, step: int = 0, **params: Any) -> MethodStack:
    method = D3s(build_params(D3s.Params, params, "d3s"))
    stack = start_stack(*before, method, run=make_run(total_batches=batches, total_steps=7 * batches))
    stack.batch = step
    return stack


def decide(rollouts: Rollouts, tokens: Tokens | None = None, *, raw: bool = True, **options: Any) -> Decision:
    stack = d3s_stack(*([Raw()] if raw else []), **options)
    return one_step(stack, rollouts.replace(batch=stack.batch), tokens)


# ---- oracles


def variance(values: Sequence[Fraction]) -> Fraction:
    return sum((v * v for v in values), Fraction(0)) / len(values) - (sum(values, Fraction(0)) / len(values)) ** 2


def best_rows(x: Sequence[float], rows: Sequence[int], size: int) -> set[int]:
    """Tries every h in exact arithmetic: largest variance, then most balanced, then more of the largest."""
    rows = [i for i in rows if not math.isnan(x[i])]
    size = min(max(size, 1), len(rows))
    if not rows:
        return set()
    up, down = sorted(rows, key=lambda i: (-x[i], i)), sorted(rows, key=lambda i: (x[i], i))
    trials = []
    for h in range(size + 1):
        top = up[:h]
        chosen = top + [i for i in down if i not in top][: size - h]
        values = [Fraction(x[i]) for i in chosen]
        score = values[0] ** 2 if size == 1 else variance(values)
        trials.append((score, -abs(2 * h - size), h, set(chosen)))
    return max(trials, key=lambda t: t[:3])[3]


def oracle(
    x: Sequence[float], group: Sequence[int], entropies: Sequence[Sequence[float]], shares: tuple[float, float, float]
) -> tuple[set[int], set[tuple[int, int]]]:
    """Rows and (row, position) of the tokens that stay."""
    rows = set(range(len(x)))
    scored = [i for i in rows if not math.isnan(x[i]) and len(entropies[i])]
    if shares[0] < 1:
        rows = set()
        for g in set(group):
            mine = [i for i in scored if group[i] == g]
            rows |= best_rows(x, mine, math.floor(shares[0] * len(mine) + 0.5))
    if shares[1] < 1:
        rows = best_rows(x, [i for i in scored if i in rows], math.floor(shares[1] * len(scored) + 0.5))
    keys = [
        (-abs(0.0 if math.isnan(x[i]) else x[i]) * entropies[i][t], i, t)
        for i in sorted(rows)
        for t in range(len(entropies[i]))
    ]
    kept = sorted(keys)[: math.ceil(Fraction(shares[2]).limit_denominator(100) * len(keys))]
    return rows, {(i, t) for _, i, t in kept}


quarters = st.integers(-8, 8).map(lambda i: i / 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_loop_on_ragged_interleaved_groups_with_nan(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 18))
    x = data.draw(st.lists(st.one_of(quarters, quarters, st.just(NAN)), min_size=rows, max_size=rows))
    if all(math.isnan(v) for v in x):
        x[0] = 1.0
    group = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    entropies = [data.draw(st.lists(st.integers(0, 6).map(float), min_size=n, max_size=n)) for n in lengths]
    shares = tuple(data.draw(st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0])) for _ in range(3))

    rollouts = make_rollouts(x, group, lengths=lengths)
    flat = torch.tensor([h for of_row in entropies for h in of_row])
    tokens = make_tokens(rollouts, entropies=flat)
    options = {"group_rows_start": shares[0], "batch_rows_start": min(shares[:2]), "tokens_start": shares[2]}
    decision = decide(rollouts, tokens, **options)
    wanted_rows, wanted_tokens = oracle(x, group, entropies, (shares[0], min(shares[:2]), shares[2]))
    kept = decision.keep_tokens
    assert set(zip(tokens.row[kept].tolist(), tokens.position[kept].tolist(), strict=True)) == wanted_tokens
    assert set(decision.trained.nonzero()[:, 0].tolist()) == {i for i, _ in wanted_tokens}
    with_tokens = {i for i in wanted_rows if lengths[i]}
    assert set(decision.stays.nonzero()[:, 0].tolist()) <= wanted_rows
    assert {i for i, _ in wanted_tokens} <= with_tokens


def test_of_equal_variances_the_balanced_choice_wins() -> None:
    """Without 0.25 or without 0.75 the variance is 0.61; three of the largest and two of the smallest are nearer."""
    decision = decide(
        make_rollouts([0.75, 1.0, 1.0, -1.0, 1.0, 0.25], [0] * 6),
        **{**ALL, "group_rows_start": 0.75, "batch_rows_start": None},
    )
    assert decision.stays.tolist() == [False, True, True, True, True, True]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=9), size=st.integers(1, 9))
def test_no_sub_set_has_a_larger_variance(values: list[float], size: int) -> None:
    x, groups = torch.tensor(values, dtype=torch.float64), Groups(torch.zeros(len(values), dtype=torch.int64))
    rows = max_variance_rows(x, groups, torch.tensor([size]))
    size = min(size, len(values))
    assert int(rows.sum()) == size
    best = max(float(np.var(c)) for c in itertools.combinations(values, size))
    assert float(x[rows].var(correction=0)) >= best * (1 - 1e-7) - 1e-15
    if size == 1:
        assert float(x[rows][0].abs()) == max(map(abs, values))


# ---- properties of the specification


def test_shares_of_one_are_the_host() -> None:
    rewards = [1.0, 0.0, NAN, 1.0, 0.0, 0.0, 0.0, 0.0]
    rollouts = make_rollouts(rewards)
    decision, host = decide(rollouts, raw=False, **ALL), one_step(start_stack(), rollouts)
    for name in ("stays", "trained", "keep_tokens", "advantages"):
        assert torch.equal(getattr(decision, name), getattr(host, name)), name
    assert decision.keep_tokens.all()


def test_a_standardized_set_has_a_sub_set_of_every_even_size_with_variance_one() -> None:
    """The paper's lemma, which fails for odd sizes: of a balanced +-1 set, three rows have 8/9."""
    rng = np.random.default_rng(0)
    for n in (4, 6, 8):
        for _ in range(40):
            x = torch.from_numpy(rng.normal(size=n).round(1) + np.arange(n) / 100)
            x = (x - x.mean()) / x.std(correction=0)
            for size in range(2, n + 1, 2):
                rows = max_variance_rows(x, Groups(torch.zeros(n, dtype=torch.int64)), torch.tensor([size]))
                assert float(x[rows].var(correction=0)) >= 1 - 1e-9
    pm = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    rows = max_variance_rows(pm, Groups(torch.zeros(4, dtype=torch.int64)), torch.tensor([3]))
    assert float(pm[rows].var(correction=0)) == pytest.approx(8 / 9)


def test_negation_mirrors_and_a_constant_changes_rows_nowhere_but_tokens() -> None:
    x = np.random.default_rng(1).normal(size=24)
    group = (np.arange(24) % 3).tolist()
    base, mirrored = (decide(make_rollouts(v, group)) for v in (x, -x))
    assert torch.equal(base.keep_tokens, mirrored.keep_tokens)
    rows = [decide(make_rollouts(v, group), tokens_start=1).trained for v in (x, -x, x + 100)]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])

    x = np.array([2.0, 1.0, -1.0, -2.0])
    half = {**ALL, "tokens_start": 0.5}
    kept = [decide(make_rollouts(v, lengths=[1] * 4), _alike(4), **half).keep_tokens.tolist() for v in (x, x + 3)]
    assert kept == [[True, False, False, True], [True, True, False, False]]


def _alike(n: int) -> Tokens:
    """One token per row, all with the same entropy."""
    return make_tokens(make_rollouts([0.0] * n, lengths=[1] * n), entropies=torch.ones(n))


def test_a_tie_goes_to_more_of_the_larger_then_to_the_earlier() -> None:
    def rows(x: list[float], size: int) -> list[int]:
        groups = Groups(torch.zeros(len(x), dtype=torch.int64))
        return max_variance_rows(torch.tensor(x).double(), groups, torch.tensor([size])).nonzero()[:, 0].tolist()

    assert rows([-1.0, -1.0, 1.0, 1.0], 2) == [0, 2]
    assert rows([-1.0, -1.0, 1.0, 1.0], 3) == [0, 2, 3]  # 2 + 1 and 1 + 2 have the same variance
    assert rows([-3.0, 1.0, 3.0], 1) == [2]
    assert rows([0.5] * 5, 4) == [0, 1, 2, 3]


def test_rows_without_signal_stay_only_for_want_of_others_where_rewards_are_0_or_1() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        rewards = np.concatenate([(rng.random(24) < rng.random()).astype(float), np.ones(8)])
        rollouts = make_rollouts(rewards, group_size=8)
        full = one_step(start_stack(), rollouts).row_advantages
        options = {"group_rows_start": 0.5, "batch_rows_start": 0.25, "tokens_start": 1}
        decision = decide(rollouts, raw=False, **options)
        groups = Groups(rollouts.group)
        informative = int((groups.max(full.abs()) > 0).sum()) * 4  # what is left of them after the group step
        zero = int((full[decision.trained] == 0).sum())
        assert zero == max(0, 8 - informative)


@pytest.mark.parametrize(
    ("x", "share", "trained"),
    [
        ([-1.0, -0.5, 0.0, 1.0], 0.75, [0, 1, 3]),  # both signs: the row without signal goes
        ([0.0, 1.0, 2.0, 3.0], 0.5, [0, 3]),  # one sign
        ([-3.0, -2.0, -1.0, 0.0], 0.5, [0, 3]),
        ([-10.0, -9.0, 0.0, 0.1], 0.75, [0, 2, 3]),  # both signs, but far more to one side
    ],
)
def test_a_row_without_signal_stays_where_it_is_an_extreme(x: list[float], share: float, trained: list[int]) -> None:
    decision = decide(make_rollouts(x, [0] * 4), **{**ALL, "batch_rows_start": share})
    assert decision.trained.nonzero()[:, 0].tolist() == trained


def test_tokens_are_ranked_over_the_batch_by_advantage_times_entropy() -> None:
    rollouts = make_rollouts([1.0, -2.0, 0.0], [0] * 3, lengths=[3, 3, 3])
    entropies = torch.tensor([0.9, 0.1, 0.5, 0.3, 0.0, 0.6, 5.0, 5.0, 5.0])
    tokens = make_tokens(rollouts, entropies=entropies)
    # keys: .9 .1 .5, .6 0 1.2, 0 0 0
    for share, wanted in ((1 / 9, {5}), (2 / 9, {5, 0}), (3.5 / 9, {5, 0, 3, 2}), (5 / 9, {5, 0, 3, 2, 1})):
        decision = decide(rollouts, tokens, **{**ALL, "tokens_start": share})
        assert set(decision.keep_tokens.nonzero()[:, 0].tolist()) == wanted
        assert decision.trained.tolist() == [0 in wanted, True, False]
        assert decision.stays.tolist() == decision.trained.tolist()  # a row without a token left is gone


def test_only_tokens_and_rows_that_are_still_in_the_update_are_candidates() -> None:
    class First(Method):
        """The best row leaves, and the first token of all others."""

        name = "first"
        needs = frozenset({"tokens"})

        def shape(self, rollouts, tokens):
            return Shape(keep_rows=rollouts.reward < 3, keep_tokens=tokens.position > 0)

    rollouts = make_rollouts([3.0, 2.0, 1.0, -1.0, -2.0], [0] * 5, lengths=[4] * 5)
    tokens = make_tokens(rollouts, entropies=torch.tensor([9.0, 1.0, 2.0, 3.0] * 5))
    stack = d3s_stack(Raw(), First(), group_rows_start=0.5, batch_rows_start=None, tokens_start=0.5)
    decision = one_step(stack, rollouts, tokens)
    assert decision.trained.tolist() == [False, True, False, False, True]
    kept = tokens.position[decision.keep_tokens]
    assert kept.tolist() == [2, 3, 3]


def test_the_shares_relax_with_the_generation_batches() -> None:
    rollouts = make_rollouts(np.random.default_rng(3).normal(size=64), group_size=16, lengths=[10] * 64)
    shares = []
    for step in range(11):
        stack = d3s_stack(Raw(), step=step, batches=10)
        one_step(stack, rollouts.replace(batch=step))
        logged = combine([stack.metrics.take()])
        shares.append((logged["d3s/rows_kept"], logged["d3s/tokens_kept"]))
    for i, (rows, tokens) in enumerate(shares):
        p = min(i / 10, 1)
        wanted = math.floor((0.25 + 0.75 * p) * 64 + 0.5)
        assert rows * 64 == wanted
        assert round(tokens * 640) == math.ceil((0.2 + 0.8 * p) * wanted * 10 - 1e-9)
    assert shares == sorted(shares) and shares[-1] == (1.0, 1.0)
    ends = {"group_rows_end": 0.75, "batch_rows_end": 0.5, "tokens_end": 0.5}
    late = [decide(rollouts, step=step, batches=10, **ends) for step in (10, 25)]  # at the end, and past it
    assert int(late[0].keep_tokens.sum()) == 160 and torch.equal(late[0].keep_tokens, late[1].keep_tokens)


def test_a_resumed_run_goes_on_at_the_same_share() -> None:
    stack = d3s_stack(Raw())
    rollouts = make_rollouts(np.random.default_rng(4).normal(size=32), group_size=8)
    for step in range(4):
        one_step(stack, rollouts.replace(batch=step))
    resumed = d3s_stack(Raw())
    resumed.load_state_dict(stack.state_dict("data"), "data")
    assert resumed.batch == 4
    a, b = (one_step(s, rollouts.replace(batch=s.batch)) for s in (stack, resumed))
    assert torch.equal(a.keep_tokens, b.keep_tokens) and torch.equal(a.trained, b.trained)


def test_a_batch_without_any_signal_keeps_something_with_advantage_zero() -> None:
    rollouts = make_rollouts([1.0] * 16)
    stack = d3s_stack()
    decision = one_step(stack, rollouts)
    # rows 0 and 1 of every group, of these 0, 1, 4, 5, of their six tokens the first two
    assert decision.keep_tokens.nonzero()[:, 0].tolist() == [0, 1]
    assert decision.trained.nonzero()[:, 0].tolist() == [0, 1]
    assert decision.advantages.abs().sum() == 0
    logged = combine([stack.metrics.take()])
    assert "d3s/variance_gain" not in logged
    assert torch.equal(one_step(d3s_stack(), rollouts).keep_tokens, decision.keep_tokens)


def test_unscorable_rows_leave_and_do_not_count() -> None:
    x = [2.0, NAN, -1.0, 0.5, NAN, -2.0, NAN, NAN]
    rollouts = make_rollouts(x, [0] * 8, lengths=[2] * 8)
    decision = decide(rollouts, group_rows_start=0.5, batch_rows_start=None, tokens_start=1)
    assert decision.trained.nonzero()[:, 0].tolist() == [0, 5]  # half of four
    only_batch = decide(rollouts, group_rows_start=1, batch_rows_start=0.75, batch_rows_end=0.75, tokens_start=1)
    assert only_batch.trained.nonzero()[:, 0].tolist() == [0, 2, 5]


def test_order_of_rows_does_not_matter() -> None:
    rng = np.random.default_rng(5)
    x, group, lengths = rng.normal(size=30), rng.integers(0, 4, 30), rng.integers(1, 6, 30)
    order = rng.permutation(30)

    def kept(rows: np.ndarray) -> set[tuple[int, int]]:
        rollouts = make_rollouts(x[rows], group[rows].tolist(), lengths=lengths[rows].tolist())
        own = [np.random.default_rng([6, int(i)]).random(lengths[i]) for i in rows]
        tokens = make_tokens(rollouts, entropies=torch.from_numpy(np.concatenate(own)))
        left = decide(rollouts, tokens).keep_tokens
        return set(zip(rows[tokens.row[left].numpy()].tolist(), tokens.position[left].tolist(), strict=True))

    assert kept(order) == kept(np.arange(30))


# ---- through the driver


def test_advantages_stay_as_they_were_and_metrics_tell_what_is_left() -> None:
    rng = np.random.default_rng(7)
    rewards = (rng.random(64) < 0.4).astype(float)
    rollouts = make_rollouts(rewards, group_size=16, lengths=[5] * 64)
    stack = d3s_stack()
    decision = one_step(stack, rollouts)
    full = one_step(start_stack(), rollouts).row_advantages
    assert decision.estimator == "rl_plugins"
    trained = decision.trained
    assert int(trained.sum()) <= 16
    torch.testing.assert_close(decision.row_advantages[trained], full[trained], rtol=0, atol=1e-15)
    assert not decision.row_columns and not decision.token_columns and decision.old_logprobs is None
    logged = combine([stack.metrics.take()])
    assert set(logged) == {"d3s/rows_kept", "d3s/tokens_kept", "d3s/variance_gain"}
    assert logged["d3s/rows_kept"] == 0.25
    assert logged["d3s/tokens_kept"] * 320 == pytest.approx(16)  # a fifth of 16 rows of 5
    assert logged["d3s/variance_gain"] > 1.1
    assert int(decision.keep_tokens.sum()) == 16


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"tokens_start": 0}, "tokens_start"),
        ({"tokens_end": 1.5}, "tokens_end"),
        ({"group_rows_start": 0}, "group_rows_start"),
        ({"batch_rows_end": 0}, "batch_rows_end"),
        ({"batch_rows_start": 0.75}, "`batch_rows_start` is 0.75, above `group_rows_start` = 0.5"),
    ],
)
def test_parameters_out_of_range(values: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"Method `d3s`: .*{wrong}"):
        build_stack("d3s", {"d3s": values})
    assert build_stack("d3s", {"d3s": {"batch_rows_start": "none"}}).methods[0].params.batch_rows_start is None
