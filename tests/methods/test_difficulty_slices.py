"""`difficulty_slices` (EconProver, arXiv 2509.12603): slices against a loop, the draw, its state, and the driver."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.slices_loops import check_slices, slice_of_each

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PromptPool
from rl_plugins.kit.row_sets import RowSet
from rl_plugins.methods.difficulty_slices import DifficultySlices, rounded, slices
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.registry import load
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

SIZE = 20


def made(size: int = SIZE, seed: int = 0, values: Any = None, **params: Any) -> tuple[MethodStack, DifficultySlices]:
    """A started stack; with `values` they stand in the column `base`."""
    data = None if values is None else Dataset.from_dict({"base": values})
    column = {} if values is None else {"column": "base"}
    method = DifficultySlices(build_params(DifficultySlices.Params, {**column, **params}, "difficulty_slices"))
    return start_stack(method, seed=seed, run=make_run(dataset_size=size, dataset=data)), method


def choose(
    stack: MethodStack, n: int, size: int = SIZE, taken: tuple[int, ...] = (), batch: int | None = None
) -> list[int]:
    stack.batch = stack.batch if batch is None else batch
    proposal = () if taken else tuple((stack.batch * n + i) % size for i in range(n))
    return [int(i) for i in stack.one("select_prompts", PromptPool(size, proposal, taken, None, stack.batch), n)]


def several(stack: MethodStack, n: int, batches: int, size: int = SIZE) -> list[list[int]]:
    return [choose(stack, n, size, batch=b) for b in range(batches)]


def rows_of(rows: RowSet) -> list[int]:
    found: list[int] = rows.at(np.arange(len(rows))).tolist()
    return found


def logged(stack: MethodStack) -> dict[str, float]:
    return {k.partition("/")[2]: v for k, v in combine([stack.metrics.take()]).items()}


def train(stack: MethodStack, rate: Any, batches: int, prompts: int = 6, size: int = SIZE) -> list[list[int]]:
    """Generation batches of groups of four on prompts with these success rates."""
    history = []
    for _ in range(batches):
        proposal = [(stack.batch * prompts + i) % size for i in range(prompts)]
        plan = first_plan(stack, proposal, 4, 4 * prompts, size)
        index = [row.prompt_index for row in plan.rows for _ in range(row.n)]
        right = np.random.default_rng([3, stack.batch]).random(len(index)) < np.asarray(rate)[index]
        group = [row.group for row in plan.rows for _ in range(row.n)]
        one_step(stack, make_rollouts(right.astype(float), group, prompt_index=index, batch=stack.batch))
        history.append([row.prompt_index for row in plan.rows])
    return history


# ---- the slices


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 32.0]), min_size=1, max_size=40), data=st.data())
def test_slices_equal_the_loop_and_divide_the_dataset(values: list[float], data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, len(values)))
    seen = [i for i, value in enumerate(values) if value != 0.5 or data.draw(st.booleans())]
    of_seen = torch.tensor([values[i] for i in seen], dtype=torch.float64)
    found = slices(torch.tensor(seen, dtype=torch.int64), of_seen, len(values), heads, range(heads))
    wanted = slice_of_each(values, heads)
    for number, (members, mean) in enumerate(found):
        own = [i for i, k in enumerate(wanted) if k == number]
        assert rows_of(members) == own and mean == pytest.approx(np.mean([values[i] for i in own]))
    sizes = Counter(wanted)
    assert set(sizes) == set(range(heads)) and max(sizes.values()) - min(sizes.values()) <= 1


def test_slices_of_heads_divide_the_dataset_together() -> None:
    values = [float(v) for v in np.random.default_rng(0).integers(0, 33, SIZE)]
    seen = []
    for head in range(3):
        stack, method = made(values=values, heads=3, head=head, own_share=1.0)
        seen += choose(stack, len(RowSet(method._slice)))
    assert sorted(seen) == list(range(SIZE))


@given(share=st.floats(0, 1), sizes=st.lists(st.integers(1, 64), max_size=20))
def test_rounding_is_carried_over(share: float, sizes: list[int]) -> None:
    total, owed = 0, 0.0
    for n in sizes:
        whole, owed = rounded(share * n + owed)
        total += whole
        assert 0 <= whole <= n and -0.5 <= owed <= 0.5
    assert abs(total - share * sum(sizes)) <= 0.5 + 1e-9


# ---- the draw


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_batches_equal_the_loop(data: st.DataObject) -> None:
    heads = data.draw(st.integers(2, 4))
    size = data.draw(st.integers(6 * heads, 40))
    values = data.draw(st.lists(st.integers(0, 32), min_size=size, max_size=size))
    head, n = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(1, size // heads))
    share = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0]))
    stack, _ = made(size, data.draw(st.integers(0, 9)), values, heads=heads, head=head, own_share=share)
    check_slices(several(stack, n, 7, size), values, heads, head, share)


def test_half_of_a_batch_is_of_the_slice_exactly_and_odd_batches_take_turns() -> None:
    values = list(range(SIZE))
    stack, _ = made(values=values, heads=2, head=1)
    assert [sum(i >= 10 for i in b) for b in several(stack, 6, 8)] == [3] * 8
    stack, _ = made(values=values, heads=2, head=1)
    assert [sum(i >= 10 for i in b) for b in several(stack, 5, 4)] == [3, 2, 3, 2]
    found = logged(stack)
    assert found["own"] == 0.5 and found["size"] == 10 and found["spread"] == 10


def test_every_prompt_of_a_side_comes_before_one_comes_again() -> None:
    stack, _ = made(values=list(range(SIZE)), heads=4, head=0)  # slices of 5, the others 15
    dealt = several(stack, 10, 6)
    own = [[i for i in b if i < 5] for b in dealt]
    others = [i for b in dealt for i in b if i >= 5]
    assert all(sorted(b) == [0, 1, 2, 3, 4] for b in own) and len({tuple(b) for b in own}) > 3
    assert sorted(others[:15]) == sorted(others[15:]) == list(range(5, 20)) and others[:15] != others[15:]


def test_one_head_is_the_hosts_order() -> None:
    for values in (None, list(range(SIZE))):
        stack, _ = made(values=values, heads=1)
        assert several(stack, 6, 4) == [[(6 * b + i) % SIZE for i in range(6)] for b in range(4)]
        assert logged(stack) == {"spread": 0.0}
        rest = choose(stack, 4, taken=tuple(range(3, 19)), batch=4)  # the host has no order for a batch that is filled
        assert sorted(rest) == [0, 1, 2, 19]


def test_a_short_slice_is_filled_from_the_others_and_the_other_way_round() -> None:
    values = list(range(SIZE))
    stack, _ = made(values=values, heads=10, head=0)  # slices of 2
    batch = choose(stack, 8)
    assert {0, 1} < set(batch) and len(set(batch)) == 8
    stack, _ = made(values=values, heads=2, head=0, own_share=0.1)
    batch = choose(stack, 18, batch=0)
    assert sum(i < 10 for i in batch) == 8 and len(set(batch)) == 18
    assert sorted(choose(stack, SIZE, batch=1)) == values


def test_taken_prompts_are_not_chosen_and_come_first_the_next_time() -> None:
    values = list(range(SIZE))
    whole = made(values=values, heads=2, head=0, own_share=1.0)[0]
    order = choose(whole, 10, batch=0)
    # the order of one head is shuffled inside a batch: ask one prompt at a time
    one = made(values=values, heads=2, head=0, own_share=1.0)[0]
    dealt = [choose(one, 1, batch=0)[0] for _ in range(3)]
    passed = choose(made(values=values, heads=2, head=0, own_share=1.0)[0], 1, taken=(dealt[0],), batch=0)
    assert passed == [dealt[1]] and set(dealt) < set(order)
    late = made(values=values, heads=2, head=0, own_share=1.0)[0]
    assert choose(late, 1, taken=(dealt[0], -1), batch=0) == [dealt[1]]
    assert choose(late, 1, batch=1) == [dealt[0]], "it was passed by"
    assert choose(late, 1, batch=2) == [dealt[2]]


def test_seeds_and_global_generators() -> None:
    values = list(range(SIZE))
    a, b, c = (several(made(seed=s, values=values, heads=2)[0], 6, 3) for s in (1, 1, 2))
    assert a == b != c
    np.random.seed(0)
    torch.manual_seed(0)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    several(made(values=values, heads=2)[0], 6, 3)
    assert np.array_equal(np.random.get_state()[1], before[0]) and torch.equal(torch.get_rng_state(), before[1])


def test_a_large_dataset() -> None:
    size = 200_000
    values = np.random.default_rng(0).integers(0, 33, size)
    stack, method = made(size, values=values, heads=8, head=7)
    batch = choose(stack, 256, size)
    easiest = set(np.argsort(values, kind="stable")[-size // 8 :].tolist())
    assert sum(i in easiest for i in batch) == 128 and len(set(batch)) == 256
    assert set(method.state) == {"owed", "own", "others"}, "only a position is saved"


# ---- the run's own rollouts


def test_without_a_column_the_host_orders_until_there_are_counts() -> None:
    rate = np.repeat([0.0, 1.0], 10)
    stack, method = made(heads=2, head=0, refresh=4)
    history = train(stack, rate, 12)
    assert history[:4] == [[(6 * b + i) % SIZE for i in range(6)] for b in range(4)]
    for batch in history[4:]:
        assert sum(i < 10 for i in batch) == 3, "the hardest slice is that of the prompts that are never right"
    # state and estimate against a loop
    right, trials, sorted_by = [0.0] * SIZE, [0.0] * SIZE, []
    for b, batch in enumerate(history):
        if b == 8:  # the last sorting
            sorted_by = [(r + 1) / (t + 2) for r, t in zip(right, trials, strict=True)]
        outcome = np.random.default_rng([3, b]).random(24) < rate[[i for i in batch for _ in range(4)]]
        for k, i in enumerate(batch):
            right[i] += outcome[4 * k : 4 * k + 4].sum()
            trials[i] += 4
    assert method.state["right"].tolist() == right and method.state["trials"].tolist() == trials
    own = [i for i, s in enumerate(slice_of_each(sorted_by, 2)) if s == 0]
    assert rows_of(RowSet(method.state["slice"])) == own
    stack.metrics.take()
    choose(stack, 4, batch=11)
    assert logged(stack)["spread"] == pytest.approx(np.mean(sorted_by[10:]) - np.mean(sorted_by[:10]))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_counts_equal_the_loop(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 20))
    rewards = data.draw(st.lists(st.sampled_from([math.nan, 0.0, 0.4, 0.5, 1.0]), min_size=rows, max_size=rows))
    prompts = data.draw(st.lists(st.integers(-1, 3), min_size=rows, max_size=rows))
    threshold, decay = data.draw(st.sampled_from([0.4, 0.5])), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    stack, method = made(4, heads=2, decay=decay, success_threshold=threshold)
    method.state["right"][:], method.state["trials"][:] = 2.0, 3.0
    group = [p if p >= 0 else 9 for p in prompts]
    rollouts = make_rollouts(rewards, group, prompt_index=prompts)
    one_step(stack, rollouts)
    for i in range(4):
        scored = [r for r, p in zip(rewards, prompts, strict=True) if p == i and not math.isnan(r)]
        kept = decay if scored else 1.0
        assert float(method.state["right"][i]) == kept * 2 + sum(r >= threshold for r in scored)
        assert float(method.state["trials"][i]) == kept * 3 + len(scored)


def test_a_rollout_of_several_rows_counts_once() -> None:
    stack, method = made(2, heads=2)
    rollouts = make_rollouts(
        [1.0, 1.0, 0.0], group=[0] * 3, prompt_index=[0] * 3, rollout=torch.tensor([0, 0, 1]),
        index=torch.tensor([0, 1, 0]),
    )  # fmt: skip
    one_step(stack, rollouts)
    assert (float(method.state["right"][0]), float(method.state["trials"][0])) == (1.0, 2.0)


def test_prompts_that_nobody_tried_are_in_the_middle() -> None:
    stack, method = made(6, heads=3, head=1, refresh=1, own_share=1.0)
    method.state["right"][:] = torch.tensor([0.0, 8, 0, 0, 8, 0])
    method.state["trials"][:] = torch.tensor([8.0, 8, 0, 8, 8, 0])
    assert sorted(choose(stack, 2, 6, batch=1)) == [2, 5]


# ---- state


@pytest.mark.parametrize("column", [True, False])
def test_state_in_a_file_goes_on_bit_by_bit(tmp_path: Path, column: bool) -> None:
    rate = np.linspace(0, 1, SIZE)
    options: dict[str, Any] = dict(heads=3, head=1) | (dict(values=rate.tolist()) if column else dict(refresh=2))
    whole = train(made(**options)[0], rate, 12, prompts=5)
    for stop in (1, 5, 7):  # in the middle of both orders
        first, _ = made(**options)
        train(first, rate, stop, prompts=5)
        save_state(tmp_path / str(stop), first.state_dict("f"))
        again, method = made(**options)
        again.load_state_dict(load_state(tmp_path / str(stop)), "f")
        assert train(again, rate, 12 - stop, prompts=5) == whole[stop:]
        assert ("right" in method.state) == (not column)


# ---- errors


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"head": 8}, "`head` is 8, and `heads` is 8. Heads are counted from 0: `head` must be at most 7"),
        ({"heads": 0}, "heads"),
        ({"own_share": 1.5}, "own_share"),
        ({"column": "base", "refresh": 3}, "`refresh` has no effect"),
    ],
)
def test_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_params(DifficultySlices.Params, params, "difficulty_slices")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, None], "`base` must hold a number in every row, and one of its values does not fit: None is not"),
        (["1", "2", "3"], "'1' is not a number. Fill the column, or name another"),
        ([1.0, math.nan, 2.0], "must hold a number in every row, and row 1 has nan"),
        ([1.0, 2.0, math.inf], "row 2 has inf"),
    ],
)
def test_a_column_that_holds_no_numbers(values: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(3, values=values, heads=2)


def test_datasets_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="`heads` is 8, and the dataset has 4 prompts, so a slice would be empty"):
        made(4)
    with pytest.raises(ConfigError, match="has no column `other` \\(it has: base\\)"):
        made(3, values=[1, 2, 3], heads=2, column="other")


# ---- the bundle


def test_the_bundle_explains_its_pieces() -> None:
    bundle = load("econprover")
    stack = build_stack(["econprover"], {"difficulty_slices": {"head": 3}})
    (method,) = stack.methods
    assert (method.name, method.params.heads, method.params.head, method.params.own_share) == (
        "difficulty_slices",
        8,
        3,
        0.5,
    )
    for piece in ("rl-plugins heads write", "`rl-plugins heads sample`", "`rl-plugins mode-pairs`", "docs/heads.md"):
        assert piece in card_file(bundle).about
