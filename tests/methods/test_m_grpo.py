"""M-GRPO against the authors' numbers and a plain loop, the alignment and its properties, and through the driver."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from golden_cases import Golden, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.methods.m_grpo import (
    MGrpo,
    aligned_advantages,
    alignment,
    copied_statistics,
    main_reward,
    sub_agent_format,
)
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_tokens, one_step, start_stack

GOLDEN = Golden("m_grpo")
NAN = float("nan")


def method(**params) -> MGrpo:
    return MGrpo(MGrpo.Params(**params))


def code(**params) -> MGrpo:
    """With the rewards and statistics of the authors' code."""
    values = {**CODE, **params}
    if not values.get("align", True):
        del values["statistics"]  # there are no copies
    return method(**values)


def rows_of(rows, column="agent") -> Rollouts:
    """One row per (query, rollout, agent, reward), in this order."""
    group, rollout, agent, reward = (list(x) for x in zip(*rows, strict=True))
    seen: Counter = Counter()
    index = []
    for q, k, *_ in rows:
        index.append(seen[q, k])
        seen[q, k] += 1
    return make_rollouts(reward, group, rollout=torch.tensor(rollout), index=torch.tensor(index), meta={column: agent})


CODE = {"sub_reward": "outcome", "statistics": "before", "ddof": 1, "std_eps": 1e-6}


def of_query(*rollouts, query=0):
    """Rows of rollouts, each (main reward, [sub-agent rewards])."""
    rows = []
    for k, (main, subs) in enumerate(rollouts):
        rows += [(query, k, "main", main), *((query, k, "sub", r) for r in subs)]
    return rows


def oracle(rows, p, copies=None):
    """Rewards and advantages as loops over rows, in Python floats."""
    copies = [1] * len(rows) if copies is None else copies
    reward = []
    for q, k, agent, own in rows:
        main = [r for q2, k2, a, r in rows if (q2, k2, a) == (q, k, "main") and not math.isnan(r)]
        if agent == "main":
            reward.append(own)
        elif not main or math.isnan(own):
            reward.append(NAN)
        else:
            right = main[0] > p.right_above + 1e-6
            made = p.format_weight + p.correct_weight * right + p.expert_weight * own
            if p.sub_reward == "outcome":
                made = p.sub_right if right else p.sub_wrong
            reward.append(0.0 if own <= 0 else made)
    out = []
    for (q, _, agent, _), r in zip(rows, reward, strict=True):
        kind = [
            x
            for (q2, _, a, _), x, c in zip(rows, reward, copies, strict=True)
            if (q2, a) == (q, agent) and not math.isnan(x)
            for _ in range(c)
        ]
        if math.isnan(r) or not kind or max(kind) == min(kind):
            out.append(0.0)
            continue
        mean = math.fsum(kind) / len(kind)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in kind) / (len(kind) - p.ddof))
        out.append((r - mean) / (std + p.std_eps))
    return reward, out


# ---- numbers


@GOLDEN.kind("messages")
def check_format_rule_and_rewards(case):
    score = sub_agent_format(plain(case.inputs["messages"]))
    assert score == case.expected["format_score"]
    params, rewards = case.build(MGrpo, **CODE), case.expected["sub_reward_by_main_score"]
    for main in rewards:
        for number in (float(main), float(np.float32(main))):  # a host may hold rewards in float32
            assert MGrpo(params).rewards(rows_of(of_query((number, [score])))).tolist() == [number, rewards[main]]


@GOLDEN.kind("correct")
def check_main_reward(case):
    """Eq. 4, and its advantages among the rollouts of one query (eq. 9, 10)."""
    valid, correct = (torch.tensor(case.inputs[name], dtype=torch.float64) for name in ("format", "correct"))
    reward = main_reward(valid, correct, case.params["alpha1"], case.params["alpha2"])
    assert reward.tolist() == pytest.approx(case.expected["reward"], abs=1e-12)
    rows = [(0, k, "main", r) for k, r in enumerate(reward.tolist())]
    found = one_step(start_stack(method()), rows_of(rows)).row_advantages
    assert found.tolist() == pytest.approx(case.expected["advantage_population_std"], abs=1e-9)


@GOLDEN.kind("copies")
def check_statistics_after_alignment(case):
    """Eq. 12, 13: of one query, with the copies as given."""
    given_, p = case.inputs, case.params
    copies = [torch.tensor(of_rollout) for of_rollout in given_["copies"]]
    assert {int(c.sum()) for c in copies} == {given_["d"]}
    rewards = [torch.tensor(of_rollout, dtype=torch.float64) for of_rollout in given_["rewards_before"]]
    reward, copies = torch.cat(rewards), torch.cat(copies)
    groups = Groups(torch.zeros(len(reward), dtype=torch.int64))
    mean, std = copied_statistics(reward, copies, groups, p["ddof"])
    assert [float(mean), float(std)] == pytest.approx([case.expected["mean"], case.expected["std"]], abs=1e-12)
    found = aligned_advantages(reward, copies, groups, p["ddof"], p["eps"]).split([len(r) for r in rewards])
    for of_rollout, wanted in zip(found, case.expected["advantage"], strict=True):
        assert of_rollout.tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case):
    GOLDEN.check(case)


def test_further_golden_cases():
    GOLDEN.check_further_cases()


OK_CALL = "<thinking>a</thinking><tool_call>search(x)</tool_call>"
OK_END = "<thinking>b</thinking><result>B</result>"
TOOL = "<tool_response>r</tool_response>"


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        ([OK_END], 1.0),
        ([" <thinking>b</thinking>\n<result>B\nC</result>\n"], 1.0),
        ([OK_CALL, TOOL, "<tool_call>y</tool_call>", TOOL, OK_END], 1.0),
        ([OK_CALL, "<tool_response><result>a page</result></tool_response>", OK_END], 1.0),
        ([OK_CALL, TOOL], 0.0),
        ([OK_CALL, TOOL, OK_CALL], 0.0),
        ([OK_END, TOOL, OK_END], 0.0),
        ([OK_CALL, "r", OK_END], 0.0),
        ([OK_CALL + "<tool_call>y</tool_call>", TOOL, OK_END], 0.0),
        (["so " + OK_CALL, TOOL, OK_END], 0.0),
        (["<thinking>a</thinking> so <result>B</result>"], 0.0),
        ([OK_END + " indeed"], 0.0),
        (["<thinking>a<thinking>b</thinking></thinking><result>B</result>"], 0.0),
        (["<thinking>b</thinking><result>B"], 0.0),
    ],
)
def test_format_rule(turns, score):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    messages += [{"role": ("assistant", "user")[i % 2], "content": t} for i, t in enumerate(turns)]
    assert sub_agent_format(messages) == score
    assert sub_agent_format(messages[:1]) == 0.0


def test_long_messages_are_read_in_no_time():
    """The rule's expression must not try every way to cut a text."""
    text = "<thinking>" + "a <b> " * 20000 + "</thinking><result>" + "c" * 20000
    user = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert sub_agent_format([*user, {"role": "assistant", "content": text}]) == 0.0
    assert sub_agent_format([*user, {"role": "assistant", "content": text + "</result>"}]) == 1.0


mains = st.sampled_from([0.0, 0.1, 1.0, 0.6, NAN])
calls = st.lists(st.tuples(st.sampled_from(["sub", "coder"]), st.sampled_from([0.0, 1.0, 1.0, NAN])), max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    rollouts=st.lists(st.tuples(st.integers(0, 2), mains, calls), min_size=1, max_size=8).filter(
        lambda rollouts: any(m == m for _, m, _ in rollouts)
    ),
    order=st.randoms(use_true_random=False),
    params=st.sampled_from(
        [
            {**CODE, "align": False, "statistics": "aligned", "std_eps": 1e-3, "sub_right": 0.9, "sub_wrong": 0.2},
            {"align": False, "correct_weight": 0.3},
            {"align": False, "ddof": 1, "std_eps": 0.1},
        ]
    ),
)
def test_equals_the_loop_on_ragged_shuffled_queries_with_nan(rollouts, order, params):
    rows = []
    for k, (q, main, subs) in enumerate(rollouts):
        rows += [(q, k, "main", main), *((q, k, agent, r) for agent, r in subs)]
    order.shuffle(rows)
    m = method(**params)
    decision = one_step(start_stack(m), rows_of(rows))
    reward, expected = oracle(rows, m.params)
    assert decision.rollouts.reward.tolist() == pytest.approx(reward, nan_ok=True)
    assert decision.row_advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    unscorable = [agent != "main" and math.isnan(r) for (_, _, agent, _), r in zip(rows, reward, strict=True)]
    assert (~decision.trained).tolist() == unscorable


# ---- alignment


@settings(max_examples=40, deadline=None)
@given(
    queries=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=4),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
    fill=st.booleans(),
)
def test_every_rollout_gets_its_number(queries, size, seed, fill):
    called = [d for q in queries for d in q]
    query_of = torch.tensor([i for i, q in enumerate(queries) for _ in q])
    rollout = torch.arange(len(called)).repeat_interleave(torch.tensor(called))
    counts = alignment(rollout, query_of, size, np.random.default_rng(seed), fill)
    assert counts.shape == rollout.shape
    start = 0
    for own in queries:
        totals = [counts[rollout == start + j].sum().item() for j in range(len(own))]
        empty = sum(d == 0 for d in own)
        if not any(own):
            assert totals == [0] * len(own)
        elif fill:
            assert sum(totals) == len(own) * size  # K * D
        else:
            assert totals == [size * (d > 0) for d in own]
        for j, d in enumerate(own):
            mine = counts[rollout == start + j]
            if empty == 0 or not fill:
                if d > size:
                    assert mine.max() == 1 and mine.sum() == size
                elif d == size:
                    assert (mine == 1).all()
                elif d:
                    assert mine.min() >= 1
        start += len(own)


def counted(called, size, times=4000) -> np.ndarray:
    """Counts of many equal queries, (times, subs)."""
    of_one = torch.tensor(called)
    rollout = torch.arange(len(called) * times).repeat_interleave(of_one.repeat(times))
    query_of = torch.arange(times).repeat_interleave(len(called))
    return alignment(rollout, query_of, size, np.random.default_rng(3)).view(times, -1).numpy()


@pytest.mark.parametrize(
    ("called", "size", "expected"),
    [
        ([6], 2, [1 / 3] * 6),  # 2 of 6 stay
        ([3], 5, [5 / 3] * 3),  # 2 copies among 3
        ([0, 2, 1], 4, [4 / 2 + 4 / 3, 4 / 2 + 4 / 3, 4 + 4 / 3]),  # the empty rollout draws from all 3
    ],
)
def test_draws_are_uniform(called, size, expected):
    counts = counted(called, size)
    seen, wanted = counts.sum(0), np.array(expected) * len(counts)
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3
    if called == [6]:  # and pairs, too
        pairs = Counter(tuple(np.flatnonzero(row)) for row in counts)
        assert len(pairs) == 15 and stats.chisquare(list(pairs.values())).pvalue > 1e-3


def test_a_row_with_copies_is_its_copies():
    """The surrogate is proportional to the advantage, so one row with 3 A is three rows with A."""
    g = torch.Generator().manual_seed(0)
    old, new, a = (torch.randn(5, 7, generator=g) for _ in range(3))
    count = torch.tensor([3.0, 1, 0, 2, 1])[:, None]
    weighted = ppo_clip(new, old, count * a, 0.2, 0.28).sum()
    expanded = torch.tensor([0, 0, 0, 1, 3, 3, 4])
    assert float(weighted) == pytest.approx(float(ppo_clip(new[expanded], old[expanded], a[expanded], 0.2, 0.28).sum()))


# ---- the whole driver

RAGGED = of_query(
    (1.0, [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
    (0.1, [1.0]),
    (0.0, []),
    (1.0, [1.0, 0.0]),
)


def drawn(m, rows):
    """How often each row is in the aligned batch."""
    start_stack(m)
    return m._copies(rows_of(rows), torch.tensor([agent == "main" for *_, agent, _ in rows])).tolist()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_statistics_count_the_copies_that_are_trained(size):
    m = method(sub_per_rollout=size)
    _, plain = oracle(RAGGED, m.params)
    copies = drawn(m, RAGGED)
    assert sum(c for c, (*_, agent, _) in zip(copies, RAGGED, strict=True) if agent != "main") == 4 * size
    reward, expected = oracle(RAGGED, m.params, copies)
    decision = one_step(start_stack(method(sub_per_rollout=size)), rows_of(RAGGED))
    assert decision.rollouts.reward.tolist() == pytest.approx(reward)
    wanted = [c * a for c, a in zip(copies, expected, strict=True)]
    assert decision.row_advantages.tolist() == pytest.approx(wanted, abs=1e-12)
    assert max(abs(a - b) for a, b in zip(plain, expected, strict=True)) > 0.01


def test_equal_rewards_of_copies_leave_no_rounding():
    """Three copies of 0.1 have the mean 0.1, and a row that is not in the batch moves nothing."""
    reward, copies = torch.tensor([0.1, 0.1, 5.0], dtype=torch.float64), torch.tensor([2, 1, 0])
    groups = Groups(torch.zeros(3, dtype=torch.int64))
    mean, std = copied_statistics(reward, copies, groups)
    assert float(mean) == 0.1 and float(std) == 0
    assert aligned_advantages(reward, copies, groups)[:2].tolist() == [0.0, 0.0]


def test_the_expert_judges_in_a_column_of_its_own():
    rows = of_query((1.0, [1.0, 1.0, 0.0, 1.0]), (0.1, [1.0, NAN]))
    judged = [None, 0.25, "0.5", 1.0, None, None, 1, 1]
    rollouts = rows_of(rows)
    rollouts = rollouts.replace(meta={**rollouts.meta, "expert": judged})
    m = method(expert_column="expert", align=False)
    assert "column:expert" in m.needs
    found = one_step(start_stack(m), rollouts).rollouts.reward.tolist()
    assert found == pytest.approx([1.0, 0.625, 0.75, 0.0, NAN, 0.1, 0.6, NAN], nan_ok=True)
    with pytest.raises(MethodError, match="column `expert`"):
        bad = rollouts.replace(meta={**rollouts.meta, "expert": ["?"] * 8})
        one_step(start_stack(method(expert_column="expert")), bad)


def test_sub_agents_rows_are_aligned_after_their_advantages():
    m = code(sub_per_rollout=3)
    stack = start_stack(m)
    rollouts = rows_of(RAGGED)
    decision = one_step(stack, rollouts, budget=4 * (1 + 3))
    reward, expected = oracle(RAGGED, m.params)
    main = torch.tensor([agent == "main" for *_, agent, _ in RAGGED])
    assert decision.trained[main].all()
    assert decision.row_advantages[main].tolist() == pytest.approx(torch.tensor(expected)[main].tolist())
    ratio = decision.row_advantages / torch.tensor(expected)  # no advantage is 0 here
    copies = ratio.round()
    assert ratio.tolist() == pytest.approx(copies.tolist())
    assert (copies > 0).tolist() == decision.trained.tolist()
    assert copies[~main].sum() == 4 * 3
    assert decision.estimator == "m_grpo" and decision.uniform
    logged = combine([stack.metrics.take()])
    subs = copies[~main]
    assert logged == pytest.approx(
        {
            "m_grpo/reward_main": 2.1 / 4,
            "m_grpo/reward_sub": (5 * 1.0 + 0.1 + 1.0) / 9,
            "m_grpo/calls": 9 / 4,
            "m_grpo/without_calls": 1 / 4,
            "m_grpo/dropped": float((subs == 0).sum()) / 9,
            "m_grpo/copies": float((subs - 1).clamp(min=0).sum()) / 12,
        }
    )


def test_alignment_depends_on_the_seed_and_the_step_but_not_on_the_order_of_rows():
    def advantages(seed=0, order=None, steps=1):
        order = list(range(len(RAGGED))) if order is None else order
        stack = start_stack(code(sub_per_rollout=3), seed=seed)
        rows = rows_of(RAGGED)
        moved = rows.replace(
            **{k: getattr(rows, k)[list(order)] for k in ("group", "rollout", "index", "rewards", "reward", "length")},
            meta={"agent": [rows.meta["agent"][i] for i in order]},
        )
        for _ in range(steps):
            decision = one_step(stack, moved)
        out = [0.0] * len(RAGGED)
        for place, i in enumerate(order):
            out[i] = float(decision.row_advantages[place])
        return out

    shuffled = random.Random(1).sample(range(len(RAGGED)), len(RAGGED))
    assert advantages() == advantages() == pytest.approx(advantages(order=shuffled))
    assert len({tuple(advantages(seed)) for seed in range(4)}) > 1
    assert advantages(steps=2) != advantages()


def test_rollouts_with_as_many_calls_as_wanted_are_left_alone():
    rows = of_query((1.0, [1.0, 0.0]), (0.1, [1.0, 1.0])) + of_query((0.0, [1.0, 1.0]), (1.0, [0.0, 1.0]), query=5)
    m = method(sub_per_rollout=2)
    decision = one_step(start_stack(m), rows_of(rows))
    assert decision.trained.all()
    assert decision.row_advantages.tolist() == pytest.approx(oracle(rows, m.params)[1])


def test_without_delegation_it_is_grpo():
    rewards = [1.0, 0.1, 0.0, 1.0, 0.1, 0.1, 1.0, 0.0]
    rows = [(i // 4, i % 4, "main", r) for i, r in enumerate(rewards)]
    decision = one_step(start_stack(code()), rows_of(rows))
    assert decision.trained.all()
    assert decision.row_advantages.tolist() == pytest.approx(grpo_advantages(make_rollouts(rewards), eps=1e-6).tolist())


def test_one_call_that_shares_the_reward_has_the_main_agents_advantage():
    rows = of_query((1.0, [1.0]), (0.1, [1.0]), (0.1, [1.0]), (1.0, [1.0]), (1.0, [1.0]))
    decision = one_step(start_stack(code(sub_per_rollout=1)), rows_of(rows))
    of_main, of_sub = decision.row_advantages[0::2].tolist(), decision.row_advantages[1::2].tolist()
    assert of_main == of_sub and len(set(of_main)) == 2


def test_agents_and_queries_are_groups_of_their_own():
    rows = of_query((1.0, [1.0, 1.0]), (0.1, [1.0, 1.0]))
    alone = code(align=False).advantages(rows_of(rows)).tolist()
    other = [(0, 0, "coder", 7.0), (0, 1, "coder", -3.0), (1, 0, "main", 50.0), (1, 0, "sub", 9.0)]
    assert code(align=False).advantages(rows_of(rows + other))[: len(rows)].tolist() == alone
    mixed = grpo_advantages(rows_of(rows)).tolist()  # what one group for all would give
    assert mixed != pytest.approx(alone, abs=0.1)


def test_tokens_of_a_row_have_the_advantage_of_their_own_agent():
    rows = of_query((1.0, [0.0, 1.0]), (0.1, [1.0, 1.0]))
    m = method(sub_per_rollout=2)
    rollouts = rows_of(rows)
    decision = one_step(start_stack(m), rollouts)
    expected = oracle(rows, m.params)[1]
    assert decision.advantages.tolist() == pytest.approx([expected[r] for r in make_tokens(rollouts).row.tolist()])


def test_equal_rewards_and_rows_alone_with_their_kind_have_no_advantage(caplog):
    rows = of_query((1.0, [1.0, 1.0]), (1.0, [1.0]), (1.0, []))
    stack = start_stack(method())
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        assert one_step(stack, rows_of(rows)).row_advantages.tolist() == [0.0] * 6
        assert "no other row" not in caplog.text
        assert one_step(stack, rows_of(of_query((1.0, [1.0]), (0.1, [])))).row_advantages[1] == 0
    assert "no other row of its query and agent" in caplog.text


def test_a_failed_sub_agent_leaves_and_its_place_is_filled():
    rows = of_query((1.0, [1.0, NAN, 0.0]), (0.1, [NAN]), (NAN, [1.0, 1.0]))
    decision = one_step(start_stack(code(sub_per_rollout=3)), rows_of(rows))
    #                                        main, its calls,   main, call, main without a reward, its calls
    assert decision.trained.tolist() == [True, True, False, True, True, False, True, False, False]
    subs = decision.row_advantages[[1, 3]]
    unit = 2**-0.5  # of the two rewards 1 and 0
    copies = (subs / torch.tensor([unit, -unit])).round()
    assert copies.sum() == 9 and copies.min() >= 1  # three rollouts of 3, all from the two that are scored


def test_rewards_the_user_made_can_stay():
    rows = of_query((1.0, [0.3, 0.9]), (0.1, [0.2]))
    decision = one_step(start_stack(method(sub_reward="own", align=False)), rows_of(rows))
    assert decision.rollouts.reward.tolist() == [r for *_, r in rows]
    assert "m_grpo" not in decision.rewarded_by
    decided = one_step(start_stack(code(align=False)), rows_of(rows)).rewarded_by["m_grpo"]
    assert decided.tolist() == [1.0, 1.0, 1.0, 0.1, 0.1]


def test_more_rows_than_the_batch_holds_are_an_error_without_alignment():
    rows = of_query((1.0, [1.0] * 6), (0.1, [1.0]))
    assert one_step(start_stack(method(sub_per_rollout=2)), rows_of(rows), budget=6).stays.sum() <= 6
    with pytest.raises(MethodError, match="9 rows would be trained, the batch takes 6"):
        one_step(start_stack(method(sub_per_rollout=2, align=False)), rows_of(rows), budget=6)


def test_rows_must_say_whose_they_are():
    stack = start_stack(method())
    with pytest.raises(MethodError, match=r"no row of the batch is the main agent's: column `agent` has planner, sub"):
        one_step(stack, rows_of([(0, 0, "planner", 1.0), (0, 0, "sub", 1.0)]))
    with pytest.raises(MethodError, match="there is no column `agent`"):
        one_step(stack, make_rollouts([1.0, 0.0]))
    other = code(main_agent="planner", agent_column="role")
    assert other.needs == {"several_rollouts", "column:role"}
    rows = rows_of([(0, 0, "planner", 1.0), (0, 0, "sub", 1.0), (0, 1, "planner", 0.0)], column="role")
    assert one_step(start_stack(other), rows).row_advantages.tolist() == pytest.approx(
        [2**-0.5, 0, -(2**-0.5)], rel=1e-5
    )


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"std_eps": -1}, "std_eps"),
        ({"ddof": 2}, "ddof"),
        ({"sub_right": 0.5}, "sub_right"),
        ({"sub_per_rollout": 0}, "sub_per_rollout"),
        ({"sub_reward": "judge"}, "sub_reward"),
        ({"align": "yes please"}, "align"),
        ({"right_above": NAN}, "right_above"),
        ({"D": 4}, "no parameter `D`"),
    ],
)
def test_parameters_out_of_range_are_named(values, wrong):
    with pytest.raises(ConfigError, match=f"m_grpo.*{wrong}"):
        build_params(MGrpo.Params, values, "m_grpo")


def test_is_found_by_name_and_says_how_many_rows_a_rollout_takes():
    stack = build_stack("m_grpo", {"m_grpo": {"sub_per_rollout": "2"}})
    assert [m.rows_per_rollout for m in stack.methods] == [3]
    assert stack.needs == {"several_rollouts", "column:agent"}
    with pytest.raises(ConfigError, match="both decide `advantages`"):
        build_stack("m_grpo, mc_grpo")
