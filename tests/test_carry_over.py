"""The queue of over-provisioned groups: who is admitted, what is refused, and what survives a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plugins.core.errors import MethodError, StateError
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Generated, Trajectory
from rl_plugins.core.rollouts import Admission, Completion, PlanRow, Queue
from rl_plugins.runtime.carry_over import Group, admit, finished, from_plain, requeue, to_plain
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import copy_plain, load_state, save_state


class Admits(Method):
    """Answers with what it is told to."""

    name = "admits"

    def __init__(self, answer: Callable[[Queue], Any]) -> None:
        super().__init__()
        self.answer = answer
        self.queues: list[Queue] = []

    def admit(self, queue: Queue) -> Any:
        self.queues.append(queue)
        return self.answer(queue)


def all_first(total: int) -> Callable[[Queue], Admission]:
    return lambda q: Admission(total - len(q.carried), tuple(range(len(q.carried))))


class Plans(Method):
    name = "plans"

    def __init__(self, change: Callable[[PlanRow], PlanRow | None]) -> None:
        super().__init__()
        self.change = change

    def plan(self, plan: Any) -> Any:
        return plan.replace(rows=tuple(r for r in map(self.change, plan.rows) if r is not None))


class Picks(Method):
    name = "picks"
    pools: Sequence[Any] = ()

    def select_prompts(self, pool: Any, n: int) -> list[int]:
        self.pools = [*self.pools, pool]
        return [i for i in reversed(range(pool.size)) if i not in pool.taken][:n]


def begin(stack: MethodStack, enough: int = 2, pool: int | None = 20, proposal: Sequence[int] = (3, 1)) -> list[Group]:
    return admit(stack, proposal, enough, 2, pool, None)


def grown(group: Group, tokens: int, ended: int, version: int = 0) -> Group:
    """With so many tokens more for each rollout, the first `ended` of which end."""
    rollouts = group.rollouts or tuple(Trajectory((9, group.row.prompt_index)) for _ in range(group.size))
    made = [
        t
        if finished(t)
        else t.add(Generated(tuple(range(tokens)), (-0.5,) * tokens, "eos" if k < ended else "abort", version))
        for k, t in enumerate(rollouts)
    ]
    return replace(group, rollouts=tuple(made))


def step(stack: MethodStack, done: Sequence[int], enough: int = 2, **changes: Any) -> tuple[list[Group], list[Group]]:
    """A batch in which the groups of these places complete, in this order."""
    groups = begin(stack, enough, **changes)
    after = [grown(g, 3, g.size if i in done else 1, stack.batch) for i, g in enumerate(groups)]
    out = requeue(stack, after, list(done), enough)
    stack.batch, stack.draw = stack.batch + 1, 0
    return groups, out[0]


# ---- what is begun


def test_prompts_of_the_host_serve_until_more_are_needed() -> None:
    stack = MethodStack([Admits(all_first(2))])
    for proposal in ((3, 1), (4, 15)):
        assert [g.row.prompt_index for g in begin(stack, proposal=proposal)] == list(proposal)
    assert stack.extra_prompts == 0
    over = MethodStack([Admits(all_first(4))])
    assert len({g.row.prompt_index for g in begin(over)}) == 4 and over.extra_prompts == 4
    over.methods[0].answer = all_first(2)  # type: ignore[attr-defined]
    own = [g.row.prompt_index for g in begin(over)]  # the host's own would come again later
    assert own != [3, 1] and over.extra_prompts == 6


def test_rows_are_those_of_an_ordinary_plan() -> None:
    row = Plans(lambda r: r.replace(spare=1, payload={"of": r.prompt_index}, prefix=(5,), max_tokens=4))
    plain, mine = MethodStack([row]), MethodStack([row, Admits(all_first(2))])
    assert tuple(g.row for g in begin(mine)) == first_plan(plain, (3, 1), 2, 4, 20).rows
    assert mine.draw == plain.draw == 1 and [g.size for g in begin(mine)] == [3, 3]


def test_no_prompt_is_in_a_batch_twice() -> None:
    """The dataset is drawn through several times while groups wait."""
    stack = MethodStack([Admits(all_first(6))])
    seen: Counter[int] = Counter()
    waiting: Counter[int] = Counter()
    for k in range(12):
        groups, trained = step(stack, [k % 6, (k + 3) % 6], pool=8)
        prompts = [g.row.prompt_index for g in groups]
        assert len(set(prompts)) == 6
        seen.update(g.row.prompt_index for g in groups if not g.rollouts)
        seen.subtract(g.row.prompt_index for g in trained)
        waiting = Counter(g["row"]["prompt_index"] for g in stack.carried)
        assert +seen == waiting and sum(waiting.values()) == 4
    assert stack.extra_prompts > 16


def test_a_method_that_selects_is_told_what_waits() -> None:
    picks = Picks()
    stack = MethodStack([picks, Admits(all_first(4))])
    groups, _ = step(stack, [1, 2], pool=9)
    assert [g.row.prompt_index for g in groups] == [8, 7, 6, 5]
    groups, _ = step(stack, [0, 1], pool=9)
    assert [g.row.prompt_index for g in groups] == [8, 5, 7, 6] and picks.pools[1].taken == (8, 5)


def test_a_small_dataset_begins_what_there_is() -> None:
    stack = MethodStack([Admits(all_first(6))])
    assert len(step(stack, [0, 1], pool=5)[0]) == 5
    assert len(step(stack, [0, 1], pool=5)[0]) == 5
    with pytest.raises(MethodError, match=r"starts 6 new groups, and only 1 came: the dataset has 1 rows"):
        begin(MethodStack([Admits(all_first(6))]), pool=1)


def test_a_stream_has_the_hosts_prompts_only() -> None:
    groups = begin(MethodStack([Admits(all_first(4))]), pool=None, proposal=(0, 1, 2))
    assert [g.row.prompt_index for g in groups] == [0, 1, 2]


# ---- what waits


def test_groups_go_on_restart_wait_and_are_dropped() -> None:
    method = Admits(all_first(6))
    stack = MethodStack([method])
    groups, trained = step(stack, [4, 1])
    assert [g.row.prompt_index for g in trained] == [groups[1].row.prompt_index, groups[4].row.prompt_index]
    assert [g.row.group for g in trained] == [0, 1]
    rest = [groups[i].row.prompt_index for i in (0, 2, 3, 5)]
    assert [g["row"]["prompt_index"] for g in stack.carried] == rest
    method.answer = lambda q: Admission(1, resume=(2,), restart=(0,), drop=(3,))
    now = begin(stack)
    seen = method.queues[1]
    assert (seen.groups, seen.group_size, seen.batch) == (2, 2, 1)
    assert [(c.prompt_index, c.size, c.drawn, c.tokens, c.finished, c.versions) for c in seen.carried] == [
        (p, 2, 0, (3, 3), (True, False), (0, 0)) for p in rest
    ]
    assert [g.row.prompt_index for g in now[:2]] == [rest[2], rest[0]] and now[2].row.prompt_index not in rest
    assert [g.row.group for g in now] == [0, 1, 2]
    assert [g.drawn for g in now] == [0, 1, 1] and [len(g.rollouts) for g in now] == [2, 0, 0]
    assert [g["row"]["prompt_index"] for g in stack.carried] == [rest[1]]
    assert combine([stack.metrics.take()])["rl_plugins/groups_dropped"] == 1


def test_surplus_waits_complete_and_counts() -> None:
    stack = MethodStack([Admits(all_first(5))])
    groups, trained = step(stack, [4, 3, 0])
    assert [g.row.prompt_index for g in trained] == [
        groups[i].row.prompt_index for i in (3, 4)
    ]  # the first two to complete
    back = [from_plain(g) for g in stack.carried]
    assert [g.complete for g in back] == [True, False, False]
    logged = combine([stack.metrics.take()])
    assert logged["rl_plugins/groups_waiting"] == 3 and logged["rl_plugins/tokens_waiting"] == 18
    method = stack.methods[0]
    method.answer = lambda q: Admission(1, resume=(0,))  # type: ignore[attr-defined]
    step(stack, [0, 1])
    logged = combine([stack.metrics.take()])
    assert logged["rl_plugins/groups_waiting"] == 2
    assert logged["rl_plugins/tokens_waiting"] == 12  # of those that were not admitted, too


def test_complete_is_when_every_rollout_ended() -> None:
    group = Group(PlanRow(0, 0, 2, spare=1), 0)
    assert not group.complete and group.size == 3
    assert not grown(group, 2, 2).complete and grown(group, 2, 3).complete
    cut = grown(group, 2, 2)
    assert replace(cut, rollouts=(*cut.rollouts[:2], replace(cut.rollouts[2], finish="length"))).complete


def test_an_engine_that_stops_early_is_an_error() -> None:
    stack = MethodStack([Admits(all_first(4))])
    groups = [grown(g, 1, g.size if i == 0 else 0) for i, g in enumerate(begin(stack))]
    with pytest.raises(MethodError, match="stopped with 1 complete groups of 4, and the batch trains 2"):
        requeue(stack, groups, [0], 2)


# ---- what is refused


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "NoneType instead of an Admission"),
        (Admission(1), "it starts 1 groups, and the batch trains 2"),
        (Admission(-1, resume=(0, 1, 2)), "`fresh` is at least 0"),
        (Admission(2, resume=(0, 0)), "may be named once"),
        (Admission(2, resume=(0,), drop=(0,)), "may be named once"),
        (Admission(2, resume=(4,)), "each of the 4 waiting groups"),
        (Admission(2, restart=(-1,)), "each of the 4 waiting groups"),
        (Admission(2.5), "whole numbers are needed"),  # type: ignore[arg-type]
    ],
)
def test_illegal_admissions(answer: Any, message: str) -> None:
    method = Admits(all_first(6))
    stack = MethodStack([method])
    step(stack, [0, 1])
    before = [g["row"]["prompt_index"] for g in stack.carried]
    method.answer = lambda q: answer
    with pytest.raises(MethodError, match="`admits`") as e:
        begin(stack)
    assert message in str(e.value)
    assert [g["row"]["prompt_index"] for g in stack.carried] == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.replace(given=(Completion((1, 2)),)), "`plans` gives completions"),
        (lambda r: r.replace(group=0), "`plans` makes one group of several plan rows"),
        (lambda r: r if r.group else None, "only 1 came"),
    ],
)
def test_plans_that_cannot_wait(change: Any, message: str) -> None:
    stack = MethodStack([Plans(change), Admits(all_first(2))])
    with pytest.raises(MethodError, match=message):
        begin(stack)


# ---- plain data


def test_a_group_survives_a_file_bit_for_bit(tmp_path: Path) -> None:
    row = PlanRow(7, 2, 1, 1, edit={"prompt": "x", "n": 3}, prefix=(4, 5), max_tokens=9, payload={"m": [1.5, None]})
    one = Trajectory((1, 2)).force((4, 5)).add(Generated((2**40, 6), (-0.1, -1 / 3), "abort", 3))
    two = one.add(Generated((0,), (-2.0,), "eos", 8))
    for group in (Group(row, 11, (one, two)), Group(PlanRow(0, 0, 4), 0), Group(row, 1, (Trajectory((3,)),) * 2)):
        save_state(tmp_path, {"carried": [to_plain(group)]})
        saved = load_state(tmp_path)
        assert saved is not None
        back = from_plain(saved["carried"][0])
        assert back.row == group.row and back.drawn == group.drawn
        for a, b in zip(back.rollouts, group.rollouts, strict=True):
            assert (a.prompt, a.tokens, a.kinds, a.versions, a.finish) == (
                b.prompt,
                b.tokens,
                b.kinds,
                b.versions,
                b.finish,
            )
            for p, q in zip(a.logprobs, b.logprobs, strict=True):
                assert p == q or (math.isnan(p) and math.isnan(q))


def test_later_batches_do_not_change_the_saved_queue() -> None:
    """Groups are kept as they are, not copied; what hooks are given of them is theirs."""
    stack = MethodStack([Admits(all_first(4))])
    step(stack, [0, 1])
    waiting = from_plain(stack.carried[0])
    stack.carried[0] = to_plain(replace(waiting, row=waiting.row.replace(payload={"seen": []}, edit={"a": [1]})))
    saved = stack.state_dict("data")
    before = copy_plain(saved)
    assert saved["carried"] is not stack.carried and saved["carried"][0] is stack.carried[0]
    groups = admit(stack, [0, 1], 2, 2, 100, None)
    groups[0].row.payload["seen"].append(1)
    groups[0].row.edit["a"].append(2)
    requeue(stack, [replace(g, rollouts=tuple(t.force((1,)) for t in g.rollouts)) for g in groups], [0, 1], 2)
    assert str(saved) == str(before)
    other = MethodStack([Admits(all_first(4))])
    other.load_state_dict(saved, "data")
    assert [g["row"]["prompt_index"] for g in other.carried] == [g["row"]["prompt_index"] for g in before["carried"]]
    assert other.extra_prompts == saved["extra_prompts"]


def test_a_queue_is_dropped_without_its_method_and_not_resumed_on_another_dataset() -> None:
    stack = MethodStack([Admits(all_first(4))])
    step(stack, [0, 1])
    saved = stack.state_dict("data")
    without = MethodStack([])
    without.load_state_dict(saved, "data")
    assert len(saved["carried"]) == 2 and without.carried == []
    with pytest.raises(StateError, match="their prompts belong to another dataset"):
        MethodStack([Admits(all_first(4))]).load_state_dict(saved, "other")
    saved["carried"] = []
    MethodStack([]).load_state_dict(saved, "other")


# ---- what mutants showed was not asked


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1, 2], "list instead of an Admission."),
        (Admission("2"), "whole numbers are needed."),  # type: ignore[arg-type]
        (Admission(-1, resume=(0, 1, 2)), "each of the 4 waiting groups may be named once"),
        (Admission(1), "it starts 1 groups, and the batch trains 2."),
    ],
)
def test_an_illegal_admission_is_an_error_of_the_hook(answer: Any, message: str) -> None:
    method = Admits(all_first(6))
    stack = MethodStack([method])
    step(stack, [0, 1])
    method.answer = lambda q: answer
    with pytest.raises(MethodError) as e:
        begin(stack)
    assert str(e.value).startswith("Method `admits` returned something illegal from `admit`: ")
    assert message in str(e.value)


def test_a_batch_may_begin_no_new_group() -> None:
    method = Admits(all_first(6))
    stack = MethodStack([method])
    step(stack, [0, 1])
    method.answer = lambda q: Admission(0, resume=(0, 3))
    waiting = [g["row"]["prompt_index"] for g in stack.carried]
    assert [g.row.prompt_index for g in begin(stack)] == [waiting[0], waiting[3]]


def test_a_method_that_selects_is_given_the_dataset() -> None:
    picks = Picks()
    admit(MethodStack([picks, Admits(all_first(4))]), (3, 1), 2, 2, 20, "the data")
    assert [pool.dataset for pool in picks.pools] == ["the data"]


def test_plans_that_cannot_wait_are_all_named() -> None:
    class Also(Plans):
        name = "also"

    plans = Plans(lambda r: r.replace(given=(Completion((1, 2)),)))
    with pytest.raises(MethodError, match="The plan of `plans` or `also` gives completions, and `admits` lets groups"):
        begin(MethodStack([plans, Also(lambda r: r), Admits(all_first(2))]))


def test_a_rollout_without_a_version_waits_too() -> None:
    """Its tokens were read or put in: no policy made them."""
    method = Admits(all_first(2))
    stack = MethodStack([method])
    read = Trajectory((9,)).force((4, 5))
    both = read.add(Generated((1,), (-0.5,), "abort", 3)).add(Generated((2,), (-0.5,), "abort", 2))
    stack.carried = [to_plain(Group(PlanRow(7, 0, 3), 0, (Trajectory((9,)), read, both)))]
    begin(stack)
    assert method.queues[0].carried[0].versions == (-1, -1, 2)


def test_a_group_is_saved_with_the_same_types_whatever_its_rollouts_hold() -> None:
    for rollout in (Trajectory(()), Trajectory((3,)).add(Generated((5,), (0,), "eos", 1))):
        (saved,) = to_plain(Group(PlanRow(0, 0, 1), 0, (rollout,)))["rollouts"]
        types = {name: values.dtype for name, values in saved.items() if name not in ("finish", "meta")}
        whole = dict.fromkeys(("prompt", "tokens", "versions"), torch.int64)
        assert types == {**whole, "kinds": torch.int8, "logprobs": torch.float64}


def test_the_prompt_of_a_group_is_saved_once(tmp_path: Path) -> None:
    start = Trajectory(tuple(range(500)))
    group = Group(PlanRow(0, 0, 16), 0, tuple(start.force((k,)) for k in range(16)))
    save_state(tmp_path, {"carried": [to_plain(group)]})
    assert (tmp_path / "rl_plugins" / "state.safetensors").stat().st_size < 8 * 500 + 16 * 25 + 500
    saved = load_state(tmp_path)
    assert saved is not None and from_plain(saved["carried"][0]) == group


def test_a_batch_costs_the_groups_it_admits() -> None:
    """The others stay the objects they are: with 1,024 waiting groups each batch made all of them anew."""
    stack = MethodStack([Admits(lambda q: Admission(0, (0, 1)))])
    stack.carried = [to_plain(Group(PlanRow(i, i, 1), 0, (Trajectory((1, i)).force((i,)),))) for i in range(40)]
    before = list(stack.carried)
    groups = admit(stack, [], 2, 1, 100, None)
    assert [g is b for g, b in zip(stack.carried, before[2:], strict=True)] == [True] * 38
    requeue(stack, [replace(g, rollouts=(replace(g.rollouts[0], finish="eos"),)) for g in groups], [0, 1], 2)
    assert all(g is b for g, b in zip(stack.carried, before[2:], strict=True))
