"""Values logged in micro-batches and on ranks become one number per name."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import MethodError
from rl_plugins.runtime.metrics import Metrics, combine

NAN, INF = math.nan, math.inf


def collect(reduce, ranks):
    """ranks: for each rank the (value, weight) pairs it logs."""
    partials = []
    for values in ranks:
        metrics = Metrics()
        for value, weight in values:
            metrics.add("m/x", value, reduce, weight)
        partials.append(metrics.take())
    return combine(partials).get("m/x")


RANKS = [[(1.0, 1.0), (4.0, 3.0)], [(10.0, 2.0)], []]


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 33 / 6), ("sum", 15.0), ("min", 1.0), ("max", 10.0)])
def test_over_micro_batches_and_ranks(reduce, expected):
    assert collect(reduce, RANKS) == pytest.approx(expected)
    assert collect(reduce, [[(torch.tensor(v), torch.tensor([w])) for v, w in rank] for rank in RANKS]) == (
        pytest.approx(expected)
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.1, 100)), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
    st.sampled_from(["mean", "sum", "min", "max"]),
)
def test_how_values_are_split_over_ranks_does_not_matter(values, ranks, reduce):
    split = [[v for v, r in zip(values, ranks, strict=False) if r == rank] for rank in range(4)]
    assert collect(reduce, split) == pytest.approx(collect(reduce, [values]), rel=1e-12, abs=1e-9)
    assert collect(reduce, split[::-1]) == collect(reduce, split)


def test_nan_and_values_without_weight_are_left_out():
    rows = [[(NAN, 5.0), (2.0, 1.0)], [(7.0, 0.0), (NAN, 1.0)], [(torch.tensor(NAN), 1.0)]]
    for reduce in ("mean", "sum", "min", "max"):
        assert collect(reduce, rows) == 2.0
        assert collect(reduce, [[(NAN, 1.0)], [(3.0, 0.0)]]) is None
        assert collect(reduce, [[(3.0, NAN), (3.0, -1.0)]]) is None
    assert combine([]) == {} and combine([Metrics().take()]) == {}


def test_infinite_values_do_not_end_a_run():
    assert collect("mean", [[(INF, 1.0)], [(1.0, 1.0)]]) == INF
    assert collect("sum", [[(1e308, 1.0)], [(1e308, 1.0)]]) == INF
    assert math.isnan(collect("sum", [[(INF, 1.0), (-INF, 1.0)], [(1.0, 1.0)]]))
    assert collect("max", [[(INF, 1.0), (-INF, 1.0)]]) == INF
    assert collect("min", [[(-INF, 1.0), (1.0, 1.0)]]) == -INF


def test_two_kinds_of_reduction_under_one_name_are_refused():
    metrics = Metrics()
    metrics.add("m/x", 1.0, "sum")
    with pytest.raises(MethodError, match=r"`m/x` is logged with reduce='mean' and 'sum' in one step"):
        metrics.add("m/x", 1.0, "mean")
    metrics.take()
    metrics.add("m/x", 1.0, "mean")  # another step
    other = Metrics()
    other.add("m/x", 1.0, "sum")
    with pytest.raises(MethodError, match=r"`m/x` is logged with reduce='sum' and 'mean' on two ranks"):
        combine([metrics.take(), other.take()])
    with pytest.raises(MethodError, match=r"`m/x` is logged with reduce='median'; allowed: mean, sum, min, max"):
        Metrics().add("m/x", 1.0, "median")


def test_only_single_numbers_are_logged():
    with pytest.raises(MethodError, match=r"`m/x` is logged with a tensor of shape \(3,\); log one number"):
        Metrics().add("m/x", torch.ones(3), "mean")
    with pytest.raises(MethodError, match=r"shape \(0,\)"):
        Metrics().add("m/x", 1.0, "mean", weight=torch.ones(0))
    for nonsense in (None, "much", [1.0]):
        with pytest.raises((TypeError, ValueError)):
            Metrics().add("m/x", nonsense, "mean")


def test_a_tensor_is_read_late_and_keeps_no_graph():
    metrics, x = Metrics(), torch.tensor(2.0, requires_grad=True)
    metrics.add("m/x", x * 3, "mean")
    ((value, weight),) = metrics._values["m/x"][1]
    assert isinstance(value, torch.Tensor) and not value.requires_grad and weight == 1.0
    assert combine([metrics.take()]) == {"m/x": 6.0}


def test_all_that_lies_on_a_device_is_read_at_once(monkeypatch):
    """Exactly, whatever the type; a read per value would make the device wait for each."""
    metrics, values = Metrics(), [torch.tensor(0.1), torch.tensor([0.1], dtype=torch.bfloat16), torch.tensor(7), 0.1]
    for i, value in enumerate(values):
        metrics.add(f"m/{i}", value, "sum", torch.tensor(2.0, dtype=torch.float64))
    expected = {f"m/{i}": ("sum", float(value), 1.0) for i, value in enumerate(values)}
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: pytest.fail("one value was read alone"))
    assert metrics.take() == expected


def test_taking_empties_and_what_ranks_exchange_is_plain():
    metrics = Metrics()
    for name, reduce in (("a", "mean"), ("b", "max"), ("c", "sum"), ("d", "min")):
        metrics.add(name, torch.tensor(2), reduce, torch.tensor(4))
    looked, taken = metrics.look(), metrics.take()
    assert looked == taken and metrics.take() == {}
    assert taken == {"a": ("mean", 8.0, 4.0), "b": ("max", 2.0, 1.0), "c": ("sum", 2.0, 1.0), "d": ("min", 2.0, 1.0)}
    assert json.loads(json.dumps(taken)).keys() == taken.keys()
    assert combine([taken]) == {"a": 2.0, "b": 2.0, "c": 2.0, "d": 2.0}


def test_a_weight_that_is_no_number_is_refused_by_name():
    with pytest.raises(MethodError, match=r"`m/x` is logged with a tensor of shape \(2,\)"):
        Metrics().add("m/x", 1.0, "mean", weight=torch.ones(2))


def test_a_name_without_a_value_hides_no_other():
    metrics = Metrics()
    metrics.add("m/none", NAN, "mean")
    metrics.add("m/x", 2.0, "sum")
    taken = metrics.take()
    assert taken == {"m/none": ("mean", 0.0, 0.0), "m/x": ("sum", 2.0, 1.0)}
    assert combine([taken]) == {"m/x": 2.0}
