"""Fusion of one tensor: SCE's vectors, a plain float64 loop, and the properties of the specification."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from golden_cases import Case, Golden, plain
from hypothesis import example, given
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.fusion import CHUNK, FusionRule, TensorFusion, delta, fuse, sce_weights, signs_agree, stream

PLAIN = dict(normalize=False, keep=1.0, erase=False)  # the mean of the experts
SCE = dict(normalize=False, keep=1.0, erase=True, weights="sce")
GOLDEN = Golden("dora", "experts")


@GOLDEN.kind("experts")
def check_sce(case: Case) -> None:
    base = np.array(plain(case.inputs["base"]), np.float32)
    experts = {f"e{i}": np.array(e, np.float32) for i, e in enumerate(plain(case.inputs["experts"]))}
    deltas = {name: delta(e, base) for name, e in experts.items()}
    np.testing.assert_array_equal(
        signs_agree(np.stack(list(deltas.values()))).astype(float), plain(case.expected["sign_consensus_mask"])
    )
    weights = sce_weights({name: d.ravel() for name, d in deltas.items()})
    np.testing.assert_allclose(list(weights.values()), plain(case.expected["sce_weight"]), atol=2e-6)
    fused = fuse(base, experts, FusionRule(**SCE, select_topk=case.params["select_topk"]))
    np.testing.assert_allclose(fused, plain(case.expected["sce_merged"]), atol=1e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- a plain loop


def looped(base: Any, experts: dict[str, Any], rule: FusionRule, tensor: str = "weight") -> list[float]:
    """The module's first lines, number by number; a delta is rounded to float32 after each step."""
    names, size = sorted(experts), len(base)
    tau = {n: [float(np.float32(e - b)) for e, b in zip(experts[n], base, strict=True)] for n in names}
    if rule.normalize:
        norm = {n: math.sqrt(math.fsum(t * t for t in tau[n])) for n in names}
        present = [v for v in norm.values() if v > 0]
        for n in names:
            if norm[n] > 0:
                factor = math.fsum(present) / len(present) / norm[n]
                tau[n] = [float(np.float32(t * factor)) for t in tau[n]]
    if rule.keep < 1:
        for n in names:
            draws = [int(r) >> 11 for r in np.atleast_1d(stream(rule.seed, n, tensor).random_raw(size))]
            tau[n] = [
                float(np.float32(t) / np.float32(rule.keep)) if d < int(rule.keep * 2**53) else 0.0
                for t, d in zip(tau[n], draws, strict=True)
            ]
    if rule.select_topk < 1 and len(names) > 1:
        variance = []
        for j in range(size):
            mean = sum(tau[n][j] for n in names) / len(names)
            variance.append(float(np.float32(sum((tau[n][j] - mean) ** 2 for n in names) / len(names))))
        stay = set(sorted(range(size), key=lambda j: (-variance[j], j))[: int(rule.select_topk * size)])
        tau = {n: [t if j in stay else 0.0 for j, t in enumerate(tau[n])] for n in names}
    weight = dict.fromkeys(names, 1.0)
    if rule.weights == "sce":
        squares = {n: math.fsum(t * t for t in tau[n]) for n in names}
        total = math.fsum(squares.values())
        weight = {n: squares[n] / total if total > 0 else 1 / len(names) for n in names}
    fused = []
    for j, b in enumerate(base):
        majority = 1 if sum(tau[n][j] for n in names) >= 0 else -1
        kept = [n for n in names if not rule.erase or (tau[n][j] != 0 and math.copysign(1, tau[n][j]) == majority)]
        below = max(sum(weight[n] for n in kept), 1e-6 if rule.weights == "sce" else 1.0)
        fused.append(b + sum(weight[n] * tau[n][j] for n in kept) / below)
    return fused


eighths = st.integers(-64, 64).map(lambda n: n / 8)  # sums and squares of them are exact


@st.composite
def tensors(draw: st.DrawFn) -> tuple[list[float], dict[str, list[float]]]:
    size = draw(st.integers(0, 9))
    row = st.lists(eighths, min_size=size, max_size=size)
    base = draw(row)
    near = st.one_of(row, st.just(base))  # an expert that learned nothing
    return base, draw(st.dictionaries(st.sampled_from(["math", "code", "agent", "z"]), near, min_size=1, max_size=4))


rules = st.builds(
    FusionRule,
    st.booleans(),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([1.0, 0.5, 0.3, 0.01]),
    st.booleans(),
    st.sampled_from(["equal", "sce"]),
    st.integers(0, 3),
)


@given(tensors(), rules)
@example(([1.0, 2.0], {"a": [1.0, 2.0], "b": [1.0, 2.0]}), FusionRule(weights="sce", select_topk=0.5))
@example(([0.0, 0.0], {"a": [100.0, 0.0], "b": [0.0, 0.125]}), FusionRule(**SCE))  # a weight just above the floor
def test_equal_to_a_plain_loop(data: tuple[list[float], dict[str, list[float]]], rule: FusionRule) -> None:
    base, experts = data
    np.testing.assert_allclose(fuse(base, experts, rule), looped(base, experts, rule), rtol=1e-6, atol=1e-6)


def test_equal_to_a_plain_loop_over_several_chunks() -> None:
    """Ties of the variance, the dropout and the norms do not begin again with a chunk."""
    rng = np.random.default_rng(0)
    size = CHUNK + 40
    base = (rng.integers(-64, 65, size) / 8).tolist()
    experts = {n: (np.array(base) + rng.integers(-3, 4, size) / 8).tolist() for n in ("a", "b")}
    for rule in (FusionRule(keep=0.7, select_topk=0.4), FusionRule(False, 1.0, 0.4, True, "sce")):
        np.testing.assert_allclose(fuse(base, experts, rule), looped(base, experts, rule), rtol=1e-6, atol=1e-6)


# ---- properties of the specification


@given(tensors())
def test_the_neutral_rule_is_the_mean(data: tuple[list[float], dict[str, list[float]]]) -> None:
    base, experts = data
    np.testing.assert_allclose(fuse(base, experts, FusionRule(**PLAIN)), np.mean(list(experts.values()), 0), atol=1e-6)


@given(tensors(), rules)
def test_one_expert_without_dropout_is_that_expert(data: Any, rule: FusionRule) -> None:
    base, experts = data
    name, expert = next(iter(experts.items()))
    rule = FusionRule(rule.normalize, 1.0, rule.select_topk, rule.erase, rule.weights)
    np.testing.assert_allclose(fuse(base, {name: expert}, rule), expert, rtol=1e-6, atol=1e-6)


def test_one_expert_is_that_expert_up_to_one_rounding() -> None:
    rng = np.random.default_rng(1)
    base, expert = rng.normal(size=(2, 5000)).astype(np.float32)
    np.testing.assert_array_equal(fuse(base, {"a": expert}, FusionRule(keep=1.0)), base + (expert - base))


@given(tensors(), st.integers(2, 4), st.booleans(), st.sampled_from(["equal", "sce"]))
def test_identical_experts_are_that_model(data: Any, n: int, erase: bool, weights: str) -> None:
    base, experts = data
    expert = next(iter(experts.values()))
    fused = fuse(base, {f"e{i}": expert for i in range(n)}, FusionRule(True, 1.0, 1.0, erase, weights))
    np.testing.assert_allclose(fused, expert, rtol=1e-6, atol=1e-6)


@given(rules, st.integers(1, 4))
def test_experts_that_learned_nothing_leave_the_base_bit_for_bit(rule: FusionRule, n: int) -> None:
    base = np.array([0.0, -0.0, 1e-45, 3.4e38, -7.25, math.inf], np.float32)
    assert fuse(base, {f"e{i}": base.copy() for i in range(n)}, rule).tobytes() == base.tobytes()


@given(tensors(), rules, st.randoms())
def test_the_order_of_the_experts_changes_no_bit(data: Any, rule: FusionRule, random: Any) -> None:
    base, experts = data
    shuffled = list(experts.items())
    random.shuffle(shuffled)
    assert fuse(base, experts, rule).tobytes() == fuse(base, dict(shuffled), rule).tobytes()


def test_the_order_changes_no_bit_of_sums_that_round() -> None:
    experts = {"a": [1e20], "b": [1.0], "c": [-1e20]}  # in this order the sum is 0, and 1 if b is the last
    other = {name: experts[name] for name in "acb"}
    rule = FusionRule(**PLAIN)
    assert fuse([0.0], experts, rule) == fuse([0.0], other, rule)


def test_no_expert_outweighs_another_once_normalized() -> None:
    rng = np.random.default_rng(2)
    base, small, large = rng.normal(size=(3, 400)).astype(np.float32)
    small, large = base + small, base + 1000 * large
    fused = fuse(base, {"small": small, "large": large}, FusionRule(keep=1.0, erase=False)) - base
    norms = [np.linalg.norm(e - base) for e in (small, large)]
    expected = ((small - base) / norms[0] + (large - base) / norms[1]) / 2 * np.mean(norms)
    np.testing.assert_allclose(fused, expected, rtol=1e-4, atol=1e-3)


def test_an_expert_that_learned_nothing_does_not_shrink_the_others() -> None:
    base = np.zeros(3, np.float32)
    fusion = TensorFusion({"a": np.array([3, 4, 0], np.float32), "z": base.copy()}, FusionRule(keep=1.0), "w")
    assert fusion.norms == {"a": 5.0, "z": 0.0}
    np.testing.assert_allclose(fusion.added(base, slice(0, 3)), [3, 4, 0])
    assert fusion.survivors == {"a": 2, "z": 0}


def test_tiny_and_huge_deltas_stay_finite() -> None:
    base = np.zeros(4, np.float32)
    experts = {"tiny": np.full(4, 1e-44, np.float32), "huge": np.full(4, 1e38, np.float32)}
    for weights in ("equal", "sce"):
        fused = fuse(base, experts, FusionRule(keep=1.0, weights=weights))
        assert np.isfinite(fused).all() and (fused > 1e37).all()


# ---- the dropout


def test_dropout_keeps_its_share_and_the_mean() -> None:
    """Alone, an expert's delta keeps its mean: 4 standard errors of the binomial."""
    size, keep = 3 * CHUNK, 0.7
    fused = fuse(np.zeros(size), {"a": np.ones(size)}, FusionRule(keep=keep))
    share = (fused != 0).mean()
    assert abs(share - keep) < 4 * math.sqrt(keep * (1 - keep) / size)
    np.testing.assert_allclose(fused[fused != 0], 1 / keep, rtol=1e-6)


@pytest.mark.parametrize("erase", [True, False])
def test_erasing_counts_survivors_only_and_so_enlarges_what_was_dropped_out(erase: bool) -> None:
    """Two equal experts: over survivors the mean is (1 - (1 - keep)^2) / keep times the delta."""
    size, keep = 3 * CHUNK, 0.5
    fused = fuse(np.zeros(size), {"a": np.ones(size), "b": np.ones(size)}, FusionRule(keep=keep, erase=erase))
    assert abs(float(fused.mean()) - (1.5 if erase else 1.0)) < 0.02


def test_the_stream_is_keyed_by_seed_expert_and_tensor() -> None:
    def mask(seed: int = 0, expert: str = "a", tensor: str = "w", beside: tuple[str, ...] = ()) -> list[bool]:
        """Which elements of one expert survive, alone or together with experts that changed other elements."""
        size = 64
        experts = {n: np.r_[np.zeros(size), np.ones(size)] for n in beside} | {expert: np.r_[np.ones(size), [0] * size]}
        return (fuse(np.zeros(2 * size), experts, FusionRule(keep=0.5, seed=seed), tensor)[:size] != 0).tolist()

    assert mask() == mask() == mask(beside=("0", "b"))
    others = [mask(), mask(seed=1), mask(expert="b"), mask(tensor="v"), mask(expert="aw", tensor="")]
    assert len({tuple(m) for m in others}) == 5


def test_the_stream_is_the_same_for_ever() -> None:
    """These numbers are in folders that users have fused: a change of them is a change of the format."""
    assert [int(r) for r in stream(0, "math", "w").random_raw(2)] == [8395076590848973109, 8480137014974885952]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"keep": 0.0}, r"--keep is 0.0. It must be in \(0, 1\]"),
        ({"keep": 1.5}, "--keep is 1.5"),
        ({"keep": math.nan}, "--keep is nan"),
        ({"select_topk": -0.1}, "--select-topk is -0.1"),
        ({"weights": "norm"}, "--weights is 'norm'. It must be equal or sce"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FusionRule(**values)
