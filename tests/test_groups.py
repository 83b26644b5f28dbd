"""Group statistics against plain loops over Python floats."""

from __future__ import annotations

import math
import random
import statistics
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.groups import Groups, count_true, places

NAN, INF = math.nan, math.inf

# what each statistic is, for the values (no NaN among them) of one group
PER_GROUP = {
    "n": lambda v: float(len(v)),
    "sum": math.fsum,
    "mean": lambda v: math.fsum(v) / len(v) if v else NAN,
    "std": lambda v: NAN if not v else statistics.stdev(v) if len(v) > 1 else 0.0,
    "std0": lambda v: statistics.pstdev(v) if v else NAN,
    "min": lambda v: min(v, default=NAN),
    "max": lambda v: max(v, default=NAN),
    "median": lambda v: statistics.median_low(v) if v else NAN,
    "median_upper": lambda v: statistics.median_high(v) if v else NAN,
    "mad": lambda v: statistics.median_low([abs(x - statistics.median_low(v)) for x in v]) if v else NAN,
}


def per_group(name: str, groups: Groups, x: torch.Tensor) -> torch.Tensor:
    if name == "std0":
        return groups.std(x, ddof=0)
    if name == "median_upper":
        return groups.median(x, upper=True)
    return getattr(groups, name)(x)


def loop_rank(values):
    def rank(x):
        return sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2

    return [NAN if math.isnan(x) else rank(x) for x in values]


def loop_leave_one_out(values):
    out = []
    for i, x in enumerate(values):
        others = [v for j, v in enumerate(values) if j != i and not math.isnan(v)]
        out.append(math.fsum(others) / len(others) if others and not math.isnan(x) else NAN)
    return out


def loop_top_k(values, k):
    scored = sorted((i for i, v in enumerate(values) if not math.isnan(v)), key=lambda i: (-values[i], i))
    return [i in scored[: max(k, 0)] for i in range(len(values))]


def loop_median_row(values, upper):
    """Place of the median among the group's rows, -1 without values."""
    scored = sorted((i for i, v in enumerate(values) if not math.isnan(v)), key=lambda i: (values[i], i))
    return scored[len(scored) // 2 if upper else (len(scored) - 1) // 2] if scored else -1


def members(ids, count=None):
    """Group -> its rows, in the order of the group numbers."""
    names = range(count) if count is not None else sorted(set(ids))
    return {name: [i for i, g in enumerate(ids) if g == name] for name in names}


def same(given, expected, exact=False):
    given = given.tolist() if isinstance(given, torch.Tensor) else given
    close = {"rel": 0, "abs": 0} if exact else {"rel": 1e-9, "abs": 1e-9}
    assert given == pytest.approx(expected, nan_ok=True, **close)


def check_everything(ids, values, count=None):
    """Every statistic of these rows, in both ways of giving the groups."""
    x, index = torch.tensor(values, dtype=torch.float64), torch.tensor(ids, dtype=torch.int64)
    groups = Groups(index, count)
    rows = members(ids, count)
    inside = [[values[i] for i in r] for r in rows.values()]
    scored = [[v for v in vs if not math.isnan(v)] for vs in inside]
    assert groups.count == len(rows) and groups.ids.tolist() == list(rows)
    assert groups.size.tolist() == [len(r) for r in rows.values()]
    same(groups.rows(groups.ids), [float(g) for g in ids])
    for name, oracle in PER_GROUP.items():
        out = per_group(name, groups, x)
        assert out.shape == (len(rows),) and out.dtype == torch.float64, name
        same(out, [oracle(v) for v in scored], exact=name in ("n", "min", "max", "median", "median_upper"))
    for upper in (False, True):
        row = groups.median_row(x, upper)
        places = [loop_median_row(v, upper) for v in inside]
        assert row.tolist() == [r[p] if p >= 0 else -1 for r, p in zip(rows.values(), places, strict=True)]
        assert row.dtype == torch.int64

    for ddof in (0, 1):
        centered, std = groups.center_and_std(x, ddof)
        assert std.tolist() == pytest.approx(groups.std(x, ddof).tolist(), rel=0, abs=0, nan_ok=True)
        assert centered.shape == x.shape and centered.dtype == std.dtype == torch.float64
    same(centered, [v - PER_GROUP["mean"](scored[list(rows).index(g)]) for v, g in zip(values, ids, strict=True)])

    def spread(per_member):
        out = [NAN] * len(ids)
        for r, v in zip(rows.values(), per_member, strict=True):
            for i, value in zip(r, v, strict=True):
                out[i] = value
        return out

    same(groups.rank(x), spread([loop_rank(v) for v in inside]), exact=True)
    same(groups.leave_one_out(x), spread([loop_leave_one_out(v) for v in inside]))
    for k in (0, 1, 2, 5):
        assert groups.top_k(x, k).tolist() == spread([loop_top_k(v, k) for v in inside])
    each = torch.arange(len(rows)) % 4
    assert groups.top_k(x, each).tolist() == spread([loop_top_k(v, i % 4) for i, v in enumerate(inside)])
    for out in (groups.rank(x), groups.leave_one_out(x), groups.top_k(x, 1)):
        assert out.shape == (len(ids),)
    assert groups.rank(x).dtype == groups.leave_one_out(x).dtype == torch.float64
    assert groups.top_k(x, 1).dtype == torch.bool


value = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 0.1, 0.7, 1 / 3, NAN, NAN]), st.floats(-100, 100))
ragged = st.lists(st.tuples(st.integers(-3, 4), value), max_size=24)


@settings(max_examples=60, deadline=None)
@given(ragged)
def test_ragged_interleaved_groups_equal_plain_loops(rows):
    check_everything([g for g, _ in rows], [v for _, v in rows])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), value), max_size=16))
def test_count_makes_groups_without_rows(rows):
    check_everything([g for g, _ in rows], [v for _, v in rows], count=6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_regular_groups_take_the_reshaped_path_and_equal_plain_loops_and_the_general_path(count, width, data):
    values = data.draw(st.lists(value, min_size=count * width, max_size=count * width))
    ids = [10 * g - 7 for g in range(count) for _ in range(width)]
    check_everything(ids, values)
    x = torch.tensor(values, dtype=torch.float64)
    fast, general = Groups(torch.tensor(ids)), Groups(torch.arange(count).repeat_interleave(width), count)
    assert fast.width == width and general.width is None
    for name in PER_GROUP:
        same(per_group(name, fast, x), per_group(name, general, x).tolist())
    for name in ("rank", "leave_one_out"):
        same(getattr(fast, name)(x), getattr(general, name)(x).tolist())
    assert fast.median_row(x).tolist() == general.median_row(x).tolist()
    assert fast.top_k(x, 2).tolist() == general.top_k(x, 2).tolist()


@settings(max_examples=40, deadline=None)
@given(ragged, st.randoms(use_true_random=False))
def test_row_order_changes_nothing_but_which_of_equal_rows(rows, shuffle: random.Random):
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    ids, x = torch.tensor([g for g, _ in rows], dtype=torch.int64), torch.tensor([v for _, v in rows]).double()
    index = torch.tensor(order, dtype=torch.int64)
    before, after = Groups(ids), Groups(ids[index])
    for name in PER_GROUP:
        same(per_group(name, after, x[index]), per_group(name, before, x).tolist())
    same(after.rank(x[index]), before.rank(x)[index].tolist(), exact=True)
    same(after.leave_one_out(x[index]), before.leave_one_out(x)[index].tolist())


@pytest.mark.parametrize(
    ("ids", "width"),
    [
        ([0, 0, 1, 1, 2, 2], 2),
        ([5, 5, 9, 9], 2),
        ([3, 3, 3], 3),
        ([0, 1, 2], 1),
        ([7], 1),
        ([0, 0, 1], None),  # ragged
        ([0, 1, 0, 1], None),  # interleaved
        ([0, 0, 1, 1, 0, 0], None),  # comes back
        ([1, 1, 0, 0], None),  # descending: statistics are in ascending order
        ([0, 0, 1, 2], None),
        ([0, 1, 0], None),
        ([0, 0, 0, 1], None),
        ([], None),
    ],
)
def test_only_equal_ascending_blocks_are_regular(ids, width):
    assert Groups(torch.tensor(ids, dtype=torch.int64)).width == width
    check_everything(ids, [float(3 * i % 5) for i in range(len(ids))])


def test_empty_input_has_no_groups_and_no_rows():
    empty, groups = torch.empty(0, dtype=torch.float64), Groups(torch.empty(0, dtype=torch.int64))
    check_everything([], [])
    assert groups.count == 0 and groups.size.tolist() == []
    for out in (groups.mean(empty), groups.median(empty), groups.rank(empty), groups.top_k(empty, 2)):
        assert out.tolist() == []
    without_rows = Groups(torch.empty(0, dtype=torch.int64), count=2)
    assert without_rows.sum(empty).tolist() == [0.0, 0.0] and without_rows.median_row(empty).tolist() == [-1, -1]
    same(without_rows.mean(empty), [NAN, NAN])
    same(without_rows.median(empty), [NAN, NAN])


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e12, 1e12), st.integers(1, 40), st.booleans())
def test_identical_values_have_exactly_that_mean_and_no_deviation(v, n, regular):
    ids = torch.zeros(n, dtype=torch.int64) if regular else torch.tensor([*[1] * n, 0, 2, 2])
    x = torch.full((len(ids),), v, dtype=torch.float64)
    groups = Groups(ids)
    for statistic, expected in (
        (groups.mean(x), v),
        (groups.std(x), 0.0),
        (groups.std(x, ddof=0), 0.0),
        (groups.mad(x), 0.0),
        (groups.median(x), v),
    ):
        assert set(statistic.tolist()) == {expected}
    other = groups.leave_one_out(x)
    assert set(other[~torch.isnan(other)].tolist()) <= {v}


@pytest.mark.parametrize("v", [0.1, 0.7, 1 / 3, 1e-300, -2.3e8])
def test_the_usual_sums_would_leave_a_residue_where_ours_does_not(v):
    for n in range(2, 400, 7):
        x = torch.full((n,), v, dtype=torch.float64)
        for groups in (Groups(torch.zeros(n, dtype=torch.int64)), Groups(torch.zeros(n, dtype=torch.int64), 1)):
            assert (x - groups.rows(groups.mean(x))).tolist() == [0.0] * n
            assert groups.std(x).item() == 0.0


@pytest.mark.parametrize("offset", [0.0, 1e8, -1e8])
@pytest.mark.parametrize("layout", ["regular", "ragged", "interleaved"])
@pytest.mark.parametrize("missing", [False, True])
def test_groups_of_identical_values_are_exact_beside_others_far_away(offset, layout, missing):
    ids = torch.tensor({"regular": [0] * 8 + [1] * 8, "ragged": [0] * 5 + [1] * 11, "interleaved": [0, 1] * 8}[layout])
    generator = torch.Generator().manual_seed(0)
    x = torch.where(ids == 0, offset + 0.1, offset + torch.rand(16, generator=generator).double())
    if missing:
        x[[1, 2, 15]] = NAN
    groups = Groups(ids)
    assert (groups.width == 8) == (layout == "regular")
    centered, std = groups.center_and_std(x)
    values = x[(ids == 0) & ~torch.isnan(x)]
    assert groups.mean(x)[0] == values[0] and std[0] == 0 and len(values) > 2
    assert set(centered[(ids == 0) & ~torch.isnan(x)].tolist()) == {0.0}
    assert torch.isnan(centered).tolist() == torch.isnan(x).tolist()
    others = [v - offset for v in x[ids == 1].tolist() if not math.isnan(v)]  # exact: these are near `offset`
    assert std[1].item() == pytest.approx(statistics.stdev(others), rel=1e-12)
    mean = math.fsum(others) / len(others)
    same(centered[ids == 1], [v - offset - mean for v in x[ids == 1].tolist()])


def test_a_value_that_is_missing_or_infinite_changes_no_other_group_by_a_bit():
    x = torch.rand(60, generator=torch.Generator().manual_seed(1)).double()
    for ids in (torch.arange(60) // 5, torch.arange(60) % 12, torch.arange(60) // 5 * 1000):
        groups = Groups(ids)
        for spoiler in (NAN, INF, -INF):
            spoiled = x.clone()
            spoiled[[0, 17]] = spoiler
            clean = ~torch.isin(ids, ids[[0, 17]])
            whole = ~torch.isin(groups.ids, ids[[0, 17]])
            assert int(whole.sum()) == 10
            for name in ("mean", "std", "sum", "n"):
                assert torch.equal(per_group(name, groups, spoiled)[whole], per_group(name, groups, x)[whole]), name
            assert torch.equal(groups.center_and_std(spoiled)[0][clean], groups.center_and_std(x)[0][clean])


def test_a_row_without_a_value_changes_nothing_in_its_group_by_a_bit():
    x = torch.rand(7, generator=torch.Generator().manual_seed(2)).double()
    without = Groups(torch.tensor([0, 0, 0, 1, 1, 1, 1])).center_and_std(x)
    for place in range(8):
        beside = torch.cat([x[:place], torch.tensor([NAN]).double(), x[place:]])
        ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
        index = torch.cat([ids[:place], torch.tensor([0]), ids[place:]])
        centered, std = Groups(index).center_and_std(beside)
        assert torch.equal(std, without[1])
        assert torch.equal(centered[~torch.isnan(beside)], without[0])


def test_sums_that_overflow_are_no_reason_to_drop_values():
    large = sys.float_info.max
    x = torch.tensor([large, large, 1.0, 3.0], dtype=torch.float64)
    for ids in ([0, 0, 1, 1], [1, 1, 0, 0]):
        groups = Groups(torch.tensor(ids))
        other = groups.ids.tolist().index(ids[2])
        assert groups.n(x).tolist() == [2, 2]
        assert groups.mean(x)[1 - other] == large and groups.std(x)[1 - other] == 0
        assert groups.mean(x)[other] == 2 and groups.std(x)[other].item() == pytest.approx(2**0.5)


@pytest.mark.parametrize("step", [1, 3, 10**6, 2**40])
@pytest.mark.parametrize("start", [0, -50, -(2**62), 2**61])
def test_group_numbers_near_to_each_other_and_far_apart(step, start):
    plain = torch.tensor([3, 0, 3, 5, 0, 3, 1, 5])
    groups = Groups(start + step * plain)
    assert groups.ids.tolist() == [start + step * g for g in (0, 1, 3, 5)]
    assert groups.index.tolist() == [2, 0, 2, 3, 0, 2, 1, 3]
    assert groups.size.tolist() == [2, 1, 3, 2]
    assert groups.sum(torch.arange(8.0)).tolist() == [5.0, 6.0, 7.0, 10.0]
    largest = torch.tensor([2**63 - 1, -(2**63), 2**63 - 1])
    assert Groups(largest).ids.tolist() == [-(2**63), 2**63 - 1] and Groups(largest).size.tolist() == [1, 2]


@pytest.mark.parametrize("ids", [[0, 0, 1, 1], [0, 1, 1]])
def test_values_that_are_not_one_per_row_are_refused(ids):
    groups = Groups(torch.tensor(ids))
    for shape in ((1,), (len(ids) + 1,), (2 * len(ids),), (len(ids), 1)):
        for name in ("n", "sum", "mean", "std", "min", "median", "mad", "rank", "leave_one_out", "center_and_std"):
            with pytest.raises(ValueError, match=rf"one per row, \({len(ids)},\), got shape"):
                getattr(groups, name)(torch.zeros(shape))


def test_too_few_values_for_the_divisor_have_no_deviation():
    groups = Groups(torch.tensor([0, 1, 1, 2, 2, 2]))
    x = torch.tensor([5.0, 0.0, 1.0, 0.0, 3.0, 3.0])
    assert groups.std(x, ddof=2).tolist() == pytest.approx([0.0, 0.0, 6**0.5])


def test_float32_input_is_computed_in_float64():
    x = torch.tensor([0.1, 0.2, 0.4, 0.9], dtype=torch.float32)
    groups = Groups(torch.tensor([0, 0, 0, 0]))
    assert groups.mean(x).dtype == torch.float64
    same(groups.std(x), [statistics.stdev(x.double().tolist())])
    assert groups.mean(torch.tensor([1, 2, 2, 3])).tolist() == [2.0]
    assert groups.rank(torch.tensor([1, 2, 2, 3])).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert groups.top_k(torch.tensor([1, 2, 2, 3]), 2).tolist() == [False, True, False, True]


def test_of_equal_rows_the_median_is_the_middle_place_and_torch_agrees():
    ids = torch.zeros(5, dtype=torch.int64)
    for values in ([1.0, 1, 1, 1, 1], [2.0, 1, 1, 1, 0], [0.0, 1, 1, 0, 1], [3.0, 0, 3, 0, 3]):
        x = torch.tensor(values)
        assert Groups(ids).median_row(x).item() == torch.median(x, dim=0).indices.item()
    even = torch.tensor([0.0, 1.0, 1.0, 1.0])
    groups = Groups(torch.zeros(4, dtype=torch.int64))
    assert groups.median_row(even).item() == 1 and groups.median_row(even, upper=True).item() == 2


def test_ties_go_to_the_earlier_row_in_top_k_and_are_averaged_in_ranks():
    groups = Groups(torch.tensor([4, 2, 4, 2, 4, 4]))
    x = torch.tensor([1.0, 5.0, 1.0, 5.0, 0.0, 1.0])
    assert groups.top_k(x, 2).tolist() == [True, True, True, True, False, False]
    assert groups.top_k(x, torch.tensor([0, 3])).tolist() == [True, False, True, False, False, True]
    assert groups.rank(x).tolist() == [3.0, 1.5, 3.0, 1.5, 1.0, 3.0]
    zeros = torch.tensor([0.0, 1.0, -0.0, 1.0, 0.0, -0.0])  # both zeros are equal
    assert groups.rank(zeros).tolist() == [2.5, 1.5, 2.5, 1.5, 2.5, 2.5]


def test_infinite_values_keep_their_place():
    x = torch.tensor([INF, 1.0, -INF, NAN, INF, 2.0, -INF, INF], dtype=torch.float64)
    for ids in ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 2, 2, 1, 1, 3, 3]):
        groups = Groups(torch.tensor(ids))
        where = [ids.index(g) // 2 for g in groups.ids.tolist()]

        def at(expected, where=where):
            return [expected[i] for i in where]

        same(groups.min(x), at([1.0, -INF, 2.0, -INF]), exact=True)
        same(groups.max(x), at([INF, -INF, INF, INF]), exact=True)
        same(groups.sum(x), at([INF, -INF, INF, NAN]), exact=True)
        same(groups.mean(x), at([INF, -INF, INF, NAN]), exact=True)
        same(groups.median(x), at([1.0, -INF, 2.0, -INF]), exact=True)
        same(groups.rank(x), [2.0, 1.0, 1.0, NAN, 2.0, 1.0, 1.0, 2.0], exact=True)
        assert groups.top_k(x, 1).tolist() == [True, False, True, False, True, False, False, True]
        for statistic in (groups.std(x), groups.mad(x), groups.leave_one_out(x)):
            assert statistic.dtype == torch.float64  # no crash; infinite rewards never reach a method
    largest = torch.tensor([INF, sys.float_info.max], dtype=torch.float64)
    assert Groups(torch.tensor([0, 0])).rank(largest).tolist() == [2.0, 1.0]
    assert Groups(torch.tensor([0, 0])).mean(torch.tensor([INF, INF])).tolist() == [INF]
    assert Groups(torch.tensor([0, 0])).mean(torch.tensor([-INF, 1.0])).tolist() == [-INF]
    for ids in ([0, 0, 1, 1], [1, 1, 0, 0]):
        last = Groups(torch.tensor(ids)).mean(torch.tensor([1.0, INF, 1.0, -INF]))
        assert last.tolist() == ([INF, -INF] if ids[0] == 0 else [-INF, INF])


def test_a_column_of_a_larger_tensor_and_other_integer_types():
    table = torch.arange(12, dtype=torch.float64).reshape(6, 2)
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        groups = Groups(torch.tensor([0, 0, 1, 1, 2, 2], dtype=dtype))
        assert groups.mean(table[:, 1]).tolist() == [2.0, 6.0, 10.0]
        ragged = Groups(torch.tensor([1, 0, 1, 1, 0, 2], dtype=dtype))
        assert ragged.sum(table[:, 1]).tolist() == [12.0, 13.0, 11.0]
        assert Groups(torch.tensor([1, 0, 1, 1, 0, 2], dtype=dtype), 4).size.tolist() == [2, 3, 1, 0]


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        (torch.tensor([0.0, 1.0]), None, r"one integer per row, got shape \(2,\) of torch.float32"),
        (torch.tensor([[0, 1]]), None, r"one integer per row, got shape \(1, 2\)"),
        (torch.tensor(3), None, r"one integer per row, got shape \(\)"),
        (torch.tensor([0, 2]), 2, r"must lie in 0..1, got 0..2"),
        (torch.tensor([-1, 0]), 2, r"must lie in 0..1, got -1..0"),
    ],
)
def test_bad_ids_are_refused(ids, count, message):
    with pytest.raises(ValueError, match=message):
        Groups(ids, count)


def test_two_hundred_thousand_ragged_rows_without_a_loop_over_rows():
    torch.manual_seed(0)
    rows, count = 200_000, 30_000
    ids = torch.randint(0, count, (rows,))
    x = torch.randint(0, 50, (rows,)).double() / 7
    x[torch.rand(rows) < 0.05] = NAN
    groups = Groups(ids)
    calls = 0

    def count_calls(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        out = {name: per_group(name, groups, x) for name in PER_GROUP}
        rank, others, top = groups.rank(x), groups.leave_one_out(x), groups.top_k(x, 3)
    finally:
        sys.setprofile(None)

    inside: dict[int, list[int]] = {}
    for i, g in enumerate(ids.tolist()):
        inside.setdefault(g, []).append(i)
    values = x.tolist()
    for place, g in enumerate(groups.ids.tolist()):
        if place % 500 == 0:  # plain loops over every group would take longer than the code under test
            members = [values[i] for i in inside[g]]
            scored = [v for v in members if not math.isnan(v)]
            for name, oracle in PER_GROUP.items():
                same([out[name][place].item()], [oracle(scored)])
            same(rank[inside[g]], loop_rank(members), exact=True)
            same(others[inside[g]], loop_leave_one_out(members))
            assert top[inside[g]].tolist() == loop_top_k(members, 3)
    assert calls < 2_000, "a loop over rows or groups"


@pytest.mark.parametrize("size", [[], [0], [3, 0, 2, 1], [0, 0, 4], [5]])
def test_places_and_counts_of_blocks(size):
    mask = torch.arange(sum(size)) % 2 == 0
    assert places(torch.tensor(size, dtype=torch.int64)).tolist() == [i for n in size for i in range(n)]
    blocks = torch.split(mask, size) if size else ()
    assert count_true(mask, torch.tensor(size, dtype=torch.int64)).tolist() == [int(b.sum()) for b in blocks]
