"""DART (arXiv 2509.23866): its six methods against plain loops, golden numbers, state, refusals."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import method
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.groups import Groups
from rl_plugins.core.losses import aggregate, ppo_clip
from rl_plugins.core.rollouts import Rollouts, TokenIds, Tokens
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.methods.dart.history import STORED, TaskHistory, is_stored, scored, success_rate
from rl_plugins.methods.dart_entropy import lower_quantile
from rl_plugins.methods.dart_rollouts import rollouts_for
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import copy_plain
from rl_plugins.testing import (
    make_plan,
    make_rollouts,
    make_run,
    make_tokens,
    make_turns,
    one_row_per_turn,
    one_step,
    start_stack,
)

GOLDEN = Golden("dart")
NAN = math.nan
N = 4


def started(name: str, size: int = N, **params: Any) -> MethodStack:
    stack = build_stack(name, {name: params})
    return start_stack(*stack.methods, run=make_run(group_size=size))


def call(stack: MethodStack, hook: str, *args: Any) -> Any:
    """A hook of the only method, with what it logs in `logged`."""
    (method,) = stack.methods
    stack.metrics.take()
    return stack.call(hook, method, *args)


def train(stack: MethodStack, rollouts: Rollouts, tokens: Tokens | None = None) -> Decision:
    """A whole batch, as a host decides it: what `observe` is shown is what the other hooks left."""
    stack.metrics.take()
    if tokens is None:
        tokens = make_tokens(rollouts, forced=torch.zeros(int(rollouts.length.sum()), dtype=torch.bool))
    return one_step(stack, rollouts, tokens)


def logged(stack: MethodStack) -> dict[str, float]:
    return {k.partition("/")[2]: v for k, v in combine([stack.metrics.take()]).items()}


# ---- golden numbers


@GOLDEN.kind("success_rate")
def check_rollouts(case: Case) -> None:
    p = case.params
    rate = torch.tensor(case.inputs["success_rate"], dtype=torch.float64)
    assert rollouts_for(rate, p["rollout_n"], p["threshold"], p["min_n"]).tolist() == case.expected["n"]


@GOLDEN.kind("old_log_prob")
def check_loss(case: Case) -> None:
    """The released losses are the hosts' own, on advantages scaled by `dart_tis`."""
    p, given_ = case.params, case.inputs
    old, new, engine = (torch.tensor(given_[k]).double() for k in ("old_log_prob", "log_prob", "rollout_log_prob"))
    new.requires_grad_()
    length = torch.tensor(given_["response_lengths"])
    mask = torch.arange(old.shape[1]) < length[:, None]
    engine = torch.where((engine == 0).all(1, keepdim=True), NAN, engine)  # a row that was not recorded
    rollouts = make_rollouts(torch.zeros(len(old)), lengths=length.tolist(), group_size=len(old))
    row, position = mask.nonzero().T
    advantage = torch.tensor(given_["advantages"]).double()
    tokens = make_tokens(
        rollouts,
        old_logprobs=old[row, position],
        rollout_logprobs=engine[row, position],
        advantages=advantage,
        forced=torch.zeros(len(row), dtype=torch.bool),
    )
    assert torch.equal(tokens.row, row) and torch.equal(tokens.position, position)
    scaled = torch.zeros_like(old)
    scaled[row, position] = call(started("dart_tis", cap=p["is_cap"]), "shape", rollouts, tokens).advantages
    p.must_be("loss", "ppo", "gspo")
    low, high = p["clip_low"], p["clip_high"]
    if p["loss"] == "ppo":
        per_token = ppo_clip(new, old, scaled, low, high, p["dual_clip_c"])
    else:
        change = ((new - old) * mask).sum(1, keepdim=True) / length[:, None]
        ratio = (new - new.detach() + change.detach()).exp()
        per_token = torch.maximum(-scaled * ratio, -scaled * ratio.clamp(1 - low, 1 + high))
        p.must_be("dual_clip_c", p["dual_clip_c"])
    loss = aggregate(per_token, mask.long(), p["agg"], num_tokens=mask.sum(), num_rows=len(old), max_length=1)
    loss.backward()
    assert loss.item() == pytest.approx(case.expected["loss"], rel=2e-6, abs=1e-7)
    torch.testing.assert_close(new.grad.float(), torch.tensor(case.expected["grad_log_prob"]), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- numbers of rollouts


def rollouts_by_loop(rate: float, most: int, threshold: float, least: int) -> int:
    if math.isnan(rate) or rate < threshold or rate == 0:
        return most
    return min(most, max(least, int(9 / rate - 7)))


RATES = st.one_of(st.just(NAN), st.sampled_from([0.0, 0.25, 0.5, 0.6, 0.75, 1.0]), st.floats(0.01, 1.0))


@given(st.lists(RATES, max_size=8), st.integers(1, 16), st.floats(0.0, 1.2), st.integers(1, 16))
def test_numbers_equal_a_loop(rates: list[float], most: int, threshold: float, least: int) -> None:
    least = min(least, most)
    found = rollouts_for(torch.tensor(rates, dtype=torch.float64), most, threshold, least).tolist()
    assert found == [rollouts_by_loop(r, most, threshold, least) for r in rates]
    assert all(least <= n <= most for n in found)


def test_numbers_fall_with_the_success_rate_and_a_threshold_above_one_is_off() -> None:
    rate = torch.linspace(0.01, 1, 200, dtype=torch.float64)
    found = rollouts_for(rate, 8, 0.6, 1)
    assert (found.diff() <= 0).all() and found[-1] == 2 and found[0] == 8
    assert (rollouts_for(rate, 8, 1.1, 1) == 8).all()


OUTCOME = st.sampled_from([0.0, 1.0, 1.0, NAN])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 3), st.lists(OUTCOME, min_size=1, max_size=9), min_size=1), max_size=5))
def test_the_history_of_a_task_sets_its_next_number(batches: list[dict[int, list[float]]]) -> None:
    """The latest n' outcomes count, where n' is what was planned at the last visit."""
    size = 8
    stack = started("dart_rollouts", size, threshold=0.6, n_min=2)
    kept: dict[int, deque[float]] = {}
    planned: dict[int, int] = {}
    for number, batch in enumerate(batches):
        plan = call(stack, "plan", make_plan(4, size))
        for row in plan.rows:
            task = row.prompt_index
            latest = list(kept.get(task, ()))[-planned.get(task, size) :]
            rate = float(np.mean(latest)) if latest else NAN
            assert row.n == rollouts_by_loop(rate, size, 0.6, 2), (task, latest)
        now = {row.prompt_index: row.n for row in plan.rows}
        rewards = [r for rs in batch.values() for r in rs]
        tasks = [t for t, rs in batch.items() for _ in rs]
        rollouts = make_rollouts(rewards, group=tasks, batch=number)
        if all(math.isnan(r) for r in rewards):  # a batch without a reward is skipped
            continue
        train(stack, rollouts)
        for task, outcomes in batch.items():
            planned[task] = now[task]
            kept.setdefault(task, deque(maxlen=size)).extend(r for r in outcomes if not math.isnan(r))


def test_freed_rollouts_go_to_further_prompts_and_foreign_prompts_keep_theirs() -> None:
    stack = started("dart_rollouts")
    easy = make_rollouts([1.0] * 4)
    train(stack, easy)
    plan = make_plan(2)
    foreign = plan.replace(rows=(plan.rows[0], plan.rows[1].replace(prompt_index=-1)))
    assert [row.n for row in call(stack, "plan", foreign).rows] == [2, 4]
    assert plan.budget == 8, "the driver fills it with further prompts"
    with pytest.raises(ConfigError, match=r"`n_min` is 5, and the run has 4 rollouts per prompt"):
        started("dart_rollouts", n_min=5)


@given(
    st.integers(1, 5),
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 1.0])), max_size=9), max_size=4),
)
def test_the_history_equals_deques(kept: int, batches: list[list[tuple[int, float]]]) -> None:
    history, plain = TaskHistory.empty(kept), {t: deque([NAN] * kept, maxlen=kept) for t in range(5)}
    for batch in batches:
        history = history.add(
            torch.tensor([t for t, _ in batch], dtype=torch.int64),
            torch.tensor([x for _, x in batch], dtype=torch.float64),
        )
        for t, x in batch:
            plain[t].append(x)
    found = history.of(torch.arange(5))
    torch.testing.assert_close(found, torch.tensor([list(d) for d in plain.values()]).double(), equal_nan=True)
    for latest in range(1, kept + 1):
        rates = success_rate(found, latest).tolist()
        for t, rate in enumerate(rates):
            seen = [x for x in list(plain[t])[-latest:] if not math.isnan(x)]
            assert rate == pytest.approx(sum(seen) / len(seen) if seen else NAN, nan_ok=True)


# ---- limits of turns


def with_turns(counts: list[int], rewards: list[float], group: list[int], **changes: Any) -> Rollouts:
    return make_rollouts(
        rewards, group=group, lengths=[2 * c for c in counts], turns=make_turns([["x"] * c for c in counts]), **changes
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 6), st.sampled_from([0.0, 1.0, NAN])), min_size=1, max_size=9
        ),
        max_size=4,
    ),
    st.integers(0, 2),
)
def test_limits_are_the_longest_success(batches: list[list[tuple[int, int, float]]], slack: int) -> None:
    stack, longest = started("dart_length", slack=slack), dict[int, int]()
    for batch in batches:
        limits = [row.max_turns for row in call(stack, "plan", make_plan(4)).rows]
        assert limits == [longest[t] + slack if t in longest else None for t in range(4)]
        batch = sorted(batch, key=lambda x: x[0])
        tasks, turns, rewards = (list(x) for x in zip(*batch, strict=True))
        rollouts = with_turns(turns, rewards, tasks)
        before = dict(longest)
        if all(math.isnan(r) for r in rewards):  # a batch without a reward is skipped
            continue
        train(stack, rollouts)
        found = logged(stack)
        assert found["limited"] == pytest.approx(np.mean([t in before for t in set(tasks)]))
        cut = [t in before and r != 1.0 and n >= before[t] + slack for t, n, r in batch]
        assert found["cut"] == pytest.approx(np.mean(cut))
        for task, count, reward in batch:
            if reward == 1.0:
                longest[task] = max(longest.get(task, 0), count)


def test_a_lower_limit_of_another_method_stays_and_rows_of_a_rollout_are_one() -> None:
    stack = started("dart_length")
    one = with_turns([3, 5, 2, 4], [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    split, tokens = one_row_per_turn(one, make_tokens(one))
    train(stack, split, tokens)
    plan = make_plan(3)
    low = plan.replace(rows=tuple(row.replace(max_turns=2 + i) for i, row in enumerate(plan.rows)))
    assert [row.max_turns for row in call(stack, "plan", low).rows] == [2, 2, 4]
    assert [row.max_turns for row in call(stack, "plan", plan).rows] == [3, 2, None]


# ---- the pool


def ids_of(rollouts: Rollouts, completions: list[list[int]]) -> TokenIds:
    return TokenIds.cat(
        prompt=[torch.tensor([3, 10 + p]) for p in rollouts.prompt_index.tolist()],
        completion=[torch.tensor(c) for c in completions],
    )


def batch_of(
    rewards: list[list[float]], stored: dict[int, tuple[list[int], list[int]]] | None = None, seed: int = 0, **more: Any
) -> Rollouts:
    """Groups of own rollouts; `stored`: group -> (prompt, tokens) of a stored success in front of them."""
    stored, rng = stored or {}, np.random.default_rng(seed)
    group, values, payload, completions = [], [], [], []
    for g, rs in enumerate(rewards):
        if g in stored:
            group.append(g), values.append(1.0), completions.append(stored[g][1])
        for r in rs:
            group.append(g), values.append(r), completions.append(rng.integers(20, 60, 3).tolist())
        payload += [{STORED: stored[g][0]} if g in stored else None] * (len(rs) + (g in stored))
    rollouts = make_rollouts(values, group=group, lengths=[len(c) for c in completions], payload=payload, **more)
    return rollouts.replace(token_ids=ids_of(rollouts, completions))


def select_by_loop(rollouts: Rollouts, acc_max: float) -> list[bool]:
    """The rule of a group without trimming, row by row."""
    keep = [False] * len(rollouts)
    ids = rollouts.token_ids
    for g in set(rollouts.group.tolist()):
        rows = [i for i in range(len(rollouts)) if int(rollouts.group[i]) == g]
        mark = rollouts.payload[rows[0]]
        given = rows[0] if mark else None
        own = [i for i in rows if i != given and bool(rollouts.kept[i])]
        scored = [i for i in own if not math.isnan(float(rollouts.reward[i]))]
        if not scored:
            continue
        rate = sum(float(rollouts.reward[i]) >= 0.5 for i in scored) / len(scored)
        if 0 < rate < acc_max:
            for i in own:
                keep[i] = True
        elif rate == 0 and given is not None and ids.prompt[given].tolist() == mark[STORED]:
            mates = [i for i in rows if i != given]
            if any(ids.completion[given].tolist() == ids.completion[i].tolist() for i in mates):
                continue
            oldest = min(scored, key=lambda i: (int(rollouts.version[i]), int(rollouts.rollout[i])))
            for i in own:
                keep[i] = i != oldest
            keep[given] = True
    return keep


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, NAN]), min_size=1, max_size=N), min_size=1, max_size=5),
    st.lists(st.sampled_from(["none", "good", "copy", "other prompt"]), min_size=5, max_size=5),
    st.sampled_from([0.7, 1.0, 1.5]),
    st.integers(0, 100),
)
def test_selection_equals_a_loop(rewards: Any, kinds: list[str], acc_max: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = batch_of(rewards, seed=seed)
    stored = {}
    for g in range(len(rewards)):
        if kinds[g] == "none":
            continue
        first = next(i for i in range(len(base)) if int(base.group[i]) == g)
        own = base.token_ids.completion[first].tolist()
        prompt = [3, 10 + g] if kinds[g] != "other prompt" else [3, 99]
        stored[g] = (prompt, own if kinds[g] == "copy" else [7, 8])
    rollouts = batch_of(rewards, stored, seed)
    rollouts = rollouts.replace(version=torch.from_numpy(rng.integers(0, 3, len(rollouts))))
    stack = started("dart_pool", acc_max=acc_max)
    found = train(stack, rollouts).stays
    assert found.tolist() == select_by_loop(rollouts, acc_max)
    pool = {entry["task"]: entry["tokens"].tolist() for entry in stack.methods[0].state["pool"]}
    for g in range(len(rewards)):
        mine = (rollouts.group == g) & ~is_stored(rollouts)
        assert int((found & (rollouts.group == g)).sum()) in (0, len(rewards[g])), "a group stays whole or leaves"
        right = (mine & (rollouts.reward == 1)).nonzero()[:, 0].tolist()
        assert pool.get(g) == (rollouts.token_ids.completion[right[-1]].tolist() if right else None), "its last success"


def test_a_success_is_stored_and_given_and_replaces_the_oldest_failure() -> None:
    stack = started("dart_pool")
    first = batch_of([[1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    tokens = make_tokens(first, forced=torch.zeros(int(first.length.sum()), dtype=torch.bool))
    train(stack, first, tokens)
    (entry,) = stack.methods[0].state["pool"]
    assert entry["task"] == 0 and entry["tokens"].tolist() == first.token_ids.completion[0].tolist()
    assert entry["logprobs"].tolist() == tokens.rollout_logprobs[tokens.row == 0].tolist()
    assert entry["rewards"] == {"reward_0": 1.0}
    given_, other = call(stack, "plan", make_plan(2)).rows
    assert (given_.n, given_.spare, len(given_.given)) == (4, 1, 1) and not other.given
    assert given_.given[0].tokens == tuple(entry["tokens"].tolist()) and given_.given[0].rewards == {"reward_0": 1.0}
    assert given_.payload == {STORED: [3, 10]}

    later = batch_of([[0.0] * 4, [0.0, 1.0, 0.0, 0.0]], {0: ([3, 10], entry["tokens"].tolist())}, seed=5)
    later = later.replace(version=torch.tensor([0, 2, 1, 1, 2, 2, 2, 2, 2]))
    assert train(stack, later).stays.tolist() == [True, True, False, True, True, True, True, True, True]
    found = logged(stack)
    assert (found["failed"], found["replaced"], found["dropped"], found["given"]) == (0.5, 0.5, 0.0, 1.0)
    tasks = {e["task"]: e["tokens"].tolist() for e in stack.methods[0].state["pool"]}
    assert tasks == {0: entry["tokens"].tolist(), 1: later.token_ids.completion[6].tolist()}, "a stored one is not new"
    (kept,) = [e for e in stack.methods[0].state["pool"] if e["task"] == 0]
    assert kept["logprobs"].tolist() == entry["logprobs"].tolist() != [0.0] * 3, "of the weights that made it"


def test_a_stored_success_is_no_outcome() -> None:
    rollouts = batch_of([[0.0, 0.0]], {0: ([3, 10], [7, 8, 9])})
    tasks, outcomes = scored(rollouts, SuccessParams())
    assert tasks.tolist() == [0, 0] and outcomes.tolist() == [0.0, 0.0]


def test_what_is_given_depends_on_the_history() -> None:
    """Tasks that mostly succeed get none."""
    stack = started("dart_pool", give_below=0.25)
    rollouts = batch_of([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    train(stack, rollouts)
    assert [len(row.given) for row in call(stack, "plan", make_plan(3)).rows] == [1, 0, 0]


def test_what_is_not_stored() -> None:
    """Failures, tokens of unknown probability, foreign prompts, rows that left."""
    rewards = [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, NAN], [1.0, 1.0]]
    rollouts = batch_of(rewards, prompt_index=[0, 0, -1, -1, 2, 2, 3, 3, 4, 4])
    kept = torch.ones(10, dtype=torch.bool)
    kept[4] = False
    forced = torch.zeros(30, dtype=torch.bool)
    forced[1] = True  # of task 0
    stack = started("dart_pool")
    stack = start_stack(method("other", select=lambda rollouts: kept), *stack.methods, run=make_run(group_size=N))
    train(stack, rollouts, make_tokens(rollouts, forced=forced))
    (entry,) = stack.methods[1].state["pool"]
    assert entry["task"] == 4 and entry["tokens"].tolist() == rollouts.token_ids.completion[9].tolist(), "the last one"


def test_the_pool_is_bounded_and_the_oldest_leave() -> None:
    stack = started("dart_pool", pool_tasks=2)
    for tasks in ([0, 1], [2, 0], [3]):
        index = [t for t in tasks for _ in range(2)]
        rollouts = batch_of([[1.0, 0.0]] * len(tasks), prompt_index=index)
        forced = torch.zeros(int(rollouts.length.sum()), dtype=torch.bool)
        train(stack, rollouts, make_tokens(rollouts, forced=forced))
    assert [e["task"] for e in stack.methods[0].state["pool"]] == [0, 3] and logged(stack)["pool"] == 2


def test_broken_runs_are_no_rewards() -> None:
    stack = started("dart_pool", invalid_below=0.0)
    rollouts = batch_of([[-1.0, 0.0, 1.0, 0.0], [-1.0, 0.0, -1.0, 0.0]])
    reward = call(stack, "rewards", rollouts)
    assert (
        torch.isnan(reward).tolist() == [r < 0 for r in rollouts.reward.tolist()] and logged(stack)["invalid"] == 3 / 8
    )
    assert train(stack, rollouts).stays.tolist() == [True] * 4 + [False] * 4
    assert call(started("dart_pool"), "rewards", rollouts) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=5, max_size=12), st.integers(0, 50))
def test_trimmed_groups_have_a_success_and_a_failure(rewards: list[float], seed: int) -> None:
    rollouts = batch_of([rewards])
    stack = started("dart_pool", acc_max=1.5)
    stack.seed = seed
    keep = train(stack, rollouts).stays
    values = [r for r in rewards if not math.isnan(r)]
    if not values or not any(values):
        assert not keep.any()
        return
    assert int(keep.sum()) == N
    left = [rewards[i] for i in keep.nonzero()[:, 0].tolist()]
    assert 1.0 in left and (0.0 in left or 0.0 not in values)
    assert sum(map(math.isnan, left)) == max(0, N - len(values)), "rows without a reward leave first"


# ---- advantages


def advantages_by_loop(reward: list[float], steps: list[int], group: list[int], eps: float) -> list[float]:
    out = [0.0] * len(reward)
    for g in set(group):
        rows = [i for i in range(len(reward)) if group[i] == g and not math.isnan(reward[i])]
        flat = [reward[i] for i in rows for _ in range(steps[i])]
        if len(flat) < 2:
            continue
        mean = sum(flat) / len(flat)
        std = math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1))
        if len(set(flat)) == 1:
            std = 0.0
        for i in rows:
            out[i] = (reward[i] - mean) / (std + eps) if std else 0.0
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 6), st.sampled_from([0.0, 0.25, 1.0, NAN])), min_size=1, max_size=14
    )
)
def test_advantages_equal_a_loop(rows: list[tuple[int, int, float]]) -> None:
    group, steps, reward = (list(x) for x in zip(*sorted(rows, key=lambda x: x[0]), strict=True))
    rollouts = with_turns(steps, reward, group)
    found = call(started("dart_advantages"), "advantages", rollouts)
    torch.testing.assert_close(found, torch.tensor(advantages_by_loop(reward, steps, group, 1e-6)).double())
    whole = call(started("dart_advantages", group_stats="trajectory", eps=0.1), "advantages", rollouts)
    plain = advantages_by_loop(reward, [1] * len(reward), group, 0.1)
    torch.testing.assert_close(whole, torch.tensor(plain).double())
    split, _ = one_row_per_turn(rollouts, make_tokens(rollouts))
    for stats, per_rollout in (("step", found), ("trajectory", whole)):
        eps = 1e-6 if stats == "step" else 0.1
        rowwise = call(started("dart_advantages", group_stats=stats, eps=eps), "advantages", split)
        torch.testing.assert_close(rowwise, per_rollout[torch.repeat_interleave(torch.tensor(steps))])


def test_equal_numbers_of_steps_give_the_means_of_rollouts() -> None:
    rollouts = with_turns([3] * 8, [0.0, 1.0, 0.5, 0.25] * 2, [0] * 4 + [1] * 4)
    stack = started("dart_advantages")
    found = call(stack, "advantages", rollouts)
    assert logged(stack) == {"steps": 3.0, "mean_shift": pytest.approx(0.0, abs=1e-12)}
    assert found.sum() == pytest.approx(0, abs=1e-12)
    longer = with_turns([9, 1, 1, 1], [0.0, 1.0, 1.0, 1.0], [0] * 4)
    call(stack, "advantages", longer)
    assert logged(stack)["mean_shift"] == pytest.approx(0.75 - 0.25)


# ---- entropy of steps


def entropy_by_loop(rollouts: Rollouts, tokens: Tokens, q: float) -> list[bool]:
    table, keep = rollouts.turns, [True] * len(tokens)
    mean = {}
    for s in range(len(table.row)):
        mine = [i for i in range(len(tokens)) if int(tokens.turn[i]) == s and bool(tokens.keep[i])]
        if mine:
            mean[s] = sum(float(tokens.entropies[i]) for i in mine) / len(mine)
    for g in set(rollouts.group.tolist()):
        of = [s for s in mean if int(rollouts.group[int(table.row[s])]) == g]
        if not of:
            continue
        threshold = sorted(mean[s] for s in of)[math.floor(q * (len(of) - 1) + 1e-9)]
        for i in range(len(tokens)):
            s = int(tokens.turn[i])
            if s in of and bool(tokens.keep[i]):
                keep[i] = mean[s] >= threshold
    return keep


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_steps_equal_a_loop(rows: list[tuple[int, int]], q: float, ties: bool, seed: int) -> None:
    group, steps = (list(x) for x in zip(*sorted(rows), strict=True))
    rollouts = with_turns(steps, [1.0] * len(rows), group)
    rng = np.random.default_rng(seed)
    count = int(rollouts.length.sum())
    entropies = torch.from_numpy(rng.choice([0.5, 1.0], count) if ties else rng.random(count)).float()
    tokens = make_tokens(rollouts, entropies=entropies, keep=torch.from_numpy(rng.random(count) < 0.8))
    stack = started("dart_entropy", quantile=q)
    keep = call(stack, "shape", rollouts, tokens).keep_tokens
    assert keep.tolist() == entropy_by_loop(rollouts, tokens, q)
    found = logged(stack)
    if "kept" in found:
        assert found["kept"] >= 1 - q - 1e-9, "at most the share q leaves"
    if q == 0.0:
        assert keep.all(), "nothing is below the smallest"


def test_the_quantile_is_an_order_statistic() -> None:
    groups = Groups(torch.tensor([0] * 6 + [1] + [2] * 2))
    x = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0, NAN, NAN], dtype=torch.float64)
    assert lower_quantile(x, groups, 0.2).tolist()[:2] == [2.0, 7.0]
    assert math.isnan(lower_quantile(x, groups, 0.2)[2])
    for q in (0.0, 0.2, 0.5, 0.99):
        plain = np.quantile(x[:6].numpy(), q, method="lower")
        assert lower_quantile(x, groups, q)[0] == plain


# ---- truncated importance sampling


def test_weights_equal_a_loop() -> None:
    rollouts = make_rollouts([1.0, 0.0] * 8)
    tokens = make_tokens(rollouts)
    engine = tokens.rollout_logprobs.clone()
    engine[3], engine[5] = NAN, -math.inf
    forced = torch.zeros(len(tokens), dtype=torch.bool)
    forced[7] = True
    advantages = torch.linspace(-1, 1, len(tokens)).double()
    tokens = tokens.replace(rollout_logprobs=engine, forced=forced, advantages=advantages)
    for cap in (1.0, 2.5, math.inf):
        stack = started("dart_tis", cap=cap)
        found = call(stack, "shape", rollouts, tokens).advantages
        expected, capped = [], 0
        for i in range(len(tokens)):
            change = float(tokens.old_logprobs[i]) - float(engine[i])
            known = math.isfinite(change) and not bool(forced[i])
            ratio = math.exp(max(-20.0, min(20.0, change))) if known else 1.0
            capped += known and ratio > cap
            expected.append(min(ratio, cap) * float(advantages[i]) if known else float(advantages[i]))
        assert found.tolist() == pytest.approx(expected)
        assert logged(stack)["capped"] == pytest.approx(capped / len(tokens))


def test_equal_probabilities_change_nothing() -> None:
    rollouts = make_rollouts([1.0, 0.0] * 8)
    tokens = make_tokens(rollouts)
    tokens = tokens.replace(rollout_logprobs=tokens.old_logprobs, advantages=torch.randn(len(tokens)).double())
    stack = started("dart_tis")
    assert torch.equal(call(stack, "shape", rollouts, tokens).advantages, tokens.advantages)
    assert logged(stack) == {"weight_mean": 1.0, "weight_max": 1.0, "capped": 0.0}


def no_tokens(rollouts: Rollouts) -> Tensor:
    return torch.zeros(len(rollouts), dtype=torch.int64)


def test_batches_without_a_trained_token() -> None:
    rollouts = make_rollouts([1.0, 0.0] * 2, lengths=[0] * 4, turns=make_turns([["x"], ["x"], [], ["x"]]))
    tokens = make_tokens(rollouts.replace(turns=None))
    tokens = tokens.replace(turn=torch.zeros(0, dtype=torch.int64))
    for name in ("dart_tis", "dart_entropy"):
        shape = call(started(name), "shape", rollouts, tokens)
        assert all(len(x) == 0 for x in (shape.advantages, shape.keep_tokens) if x is not None)


# ---- the bundle, state, refusals


def test_the_bundle_stands_for_all_of_it() -> None:
    names = [
        m.name
        for m in build_stack(
            ["turn_control", "dart"], {"turn_control": {"environment": "rl_plugins.lab.demo.environments:Grid"}}
        ).methods
    ]
    parts = ["rollouts", "length", "pool", "advantages", "entropy", "tis"]
    assert names == ["turn_control", *(f"dart_{p}" for p in parts)]


def test_state_survives() -> None:
    """A resumed method plans as one that went on, with stored tokens, turns and log-probs."""
    rollouts = batch_of([[1.0] * 4, [0.0] * 4])
    rollouts = rollouts.replace(turns=make_turns([["a", "b"]] * 8, [[0.5, NAN]] * 8))
    tokens = make_tokens(rollouts, forced=torch.zeros(24, dtype=torch.bool))
    for name in ("dart_rollouts", "dart_length", "dart_pool"):
        params = {"give_below": 1.0} if name == "dart_pool" else {}
        stack, other = started(name, **params), started(name, **params)
        train(stack, rollouts, tokens)
        other.methods[0].state = copy_plain(stack.methods[0].state)
        one, two = (call(s, "plan", make_plan(4)) for s in (stack, other))
        assert one == two and one != make_plan(4)
    turns = one.rows[0].given[0].turns
    assert [(t.start, t.stop, t.anchor, t.reward) for t in turns][0] == (0, 2, "a", 0.5) and math.isnan(turns[1].reward)


def capabilities(missing: Any = None, **changes: Any) -> HostCapabilities:
    hooks = {"advantages", "shape", "plan", "select", "observe", "rewards"}
    return HostCapabilities("verl", "0", hooks, {}, (), missing or {}, None, {}, **changes)


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("dart_tis", "off_policy", "tokens that another policy sampled"),
        ("dart_entropy", "turns", "turns"),
        ("dart_entropy", "entropies", "entropy of the policy"),
        ("dart_length", "turn_limits", "turns"),
        ("dart_pool", "rollout_logprobs", "log-probs"),
        ("dart_rollouts", "prompt_index", "prompt"),
    ],
)
def test_what_they_cannot_do_without(name: str, missing: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` needs .*{said}.*: not here"):
        preflight(build_stack(name), capabilities({missing: "not here."}))


def test_sampling_is_corrected_once() -> None:
    with pytest.raises(ConfigError, match="`dart_tis` holds the weight .*and so does rollout_is=token"):
        preflight(build_stack("dart_tis"), capabilities(importance_weights={"rollout_is": "token"}))
    with pytest.raises(ConfigError, match="and so does `"):
        preflight(build_stack(["dart_tis", "april"], {"april": {"correction": "token_tis"}}), capabilities())
    with pytest.raises(ConfigError, match="how many rollouts"):
        build_stack(["dart_rollouts", "gdro_rollout"])
