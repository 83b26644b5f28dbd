"""UI-S1 against the authors' numbers and a plain loop, its properties, its environment, and through the driver."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from golden_cases import Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting, changed

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts, TurnTable
from rl_plugins.methods.ui_s1 import (
    ExpertStep,
    SemiOnlineEpisode,
    UiS1,
    gui_step_reward,
    semi_online_performance,
    turn_returns,
)
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_tokens, one_step, start_stack

GOLDEN = Golden("ui_s1")
NAN = float("nan")
T, F = True, False


def method(**params) -> UiS1:
    return UiS1(UiS1.Params(**acting(UiS1.Params, {"filter_by": "none", **params})))


def rows_of(steps, **changes) -> Rollouts:
    """One row per step of (task, rollout, turn, reward, matched), in this order."""
    group, rollout, turn, reward, matched = (list(x) for x in zip(*steps, strict=True))
    n = len(steps)
    return make_rollouts(
        [0.0] * n,
        group,
        lengths=[1 + i % 3 for i in range(n)],
        rollout=torch.tensor(rollout),
        index=torch.tensor(turn),
        turns=TurnTable(
            torch.arange(n),
            torch.tensor(turn),
            [None] * n,
            torch.tensor(reward, dtype=torch.float64),
            torch.tensor(matched),
        ),
        **changes,
    )


def of_rollouts(*rollouts, task=0):
    """Steps of rollouts of one task, each a list of (reward, matched)."""
    return [(task, i, k, r, m) for i, steps in enumerate(rollouts) for k, (r, m) in enumerate(steps)]


def returns(steps, gamma=0.5, include_first_mismatch=False) -> list[float]:
    s = rows_of(steps)
    rollout = 100 * s.group + s.rollout
    return turn_returns(s.turns.reward, s.turns.valid, rollout, s.turns.turn, gamma, include_first_mismatch).tolist()


def oracle(steps, p):
    """The method as loops over tasks, rollouts and steps, in Python floats; by (task, rollout, turn)."""
    known = {(u, i, k): (r, m) for u, i, k, r, m in steps if not math.isnan(r)}
    ret = {}
    for u, i, k in sorted(known, reverse=True):
        r, m = known[u, i, k]
        after = known.get((u, i, k + 1))
        goes_on = m and after is not None and (after[1] or p.include_first_mismatch)
        ret[u, i, k] = r + p.gamma * ret[u, i, k + 1] if goes_on else r

    def z(value, values):
        mean = math.fsum(values) / len(values)
        if len(values) == 1 or max(values) == min(values):
            return 0.0
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
        return (value - mean) / (std + p.std_eps) if p.scale == "std" else value - mean

    out = {}
    for u, i, k in known:
        same = [ret[key] for key in known if key[0] == u and key[2] == k]
        if p.episode_source == "step_reward":
            episode = z(known[u, i, k][0], [v[0] for key, v in known.items() if key[0] == u])
        else:
            first = {}
            for key in sorted(known):
                if key[0] == u:
                    first.setdefault(key[1], ret[key])
            episode = z(first[i], list(first.values()))
        out[u, i, k] = p.episode_weight * episode + p.step_weight * z(ret[u, i, k], same)
    return [out.get((u, i, k), 0.0) for u, i, k, _, _ in steps]


# ---- numbers


@GOLDEN.kind("extract_match")
def check_advantages(case):
    inputs, p, expected = case.inputs, case.params, case.expected
    number = lambda names: [sorted(set(names)).index(n) for n in names]
    columns = (number(inputs["uid"]), number(inputs["traj_uid"]), inputs["step_id"])
    steps = list(zip(*columns, inputs["step_reward"], inputs["extract_match"], strict=True))
    mask = torch.tensor(inputs["response_mask"])
    rewards = torch.tensor(inputs["token_level_rewards"], dtype=torch.float64)
    assert rewards.sum(1).tolist() == pytest.approx(inputs["step_reward"], rel=1e-6)  # the method has one of the two
    assert bool((rewards * (1 - mask) == 0).all())
    names = {"episode_advantage_w": "episode_weight", "step_advantage_w": "step_weight", "epsilon": "std_eps"}
    scale = {"mean_std_norm": "std", "mean_norm": "none"}[p["mode"]]
    params = case.build(UiS1, names, filter_by="none", scale=scale)
    close = dict(rel=1e-5, abs=3e-6)
    assert returns(steps, params.gamma, params.include_first_mismatch) == pytest.approx(
        expected["step_returns"], **close
    )
    for key, changes in (
        ("advantages", {}),
        ("episode_advantage", dict(episode_weight=1.0, step_weight=0.0)),
        ("step_advantage", dict(episode_weight=0.0, step_weight=1.0)),
    ):
        got = UiS1(changed(params, **changes)).advantages(rows_of(steps))[:, None] * mask
        assert got.tolist() == [pytest.approx(row, **close) for row in expected[key]]


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case):
    GOLDEN.check(case)


def test_further_golden_cases():
    GOLDEN.check_further_cases()


values = st.one_of(st.sampled_from([0.0, 0.1, 0.55, 1.0, NAN]), st.floats(0, 1, width=32))


@settings(max_examples=40, deadline=None)
@given(
    rollouts=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.tuples(values, st.booleans()), min_size=1, max_size=5)),
        min_size=1,
        max_size=8,
    ),
    order=st.randoms(use_true_random=False),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    mismatch=st.booleans(),
    source=st.sampled_from(["step_reward", "rollout_return"]),
    scale=st.sampled_from(["std", "none"]),
    weights=st.sampled_from([(1.0, 1.0), (0.5, 2.0), (0.0, 1.0)]),
)
def test_equals_the_loop_on_ragged_shuffled_rollouts_with_nan(rollouts, order, gamma, mismatch, source, scale, weights):
    steps = [(u, i, k, r, m) for i, (u, own) in enumerate(rollouts) for k, (r, m) in enumerate(own)]
    order.shuffle(steps)
    m = method(
        gamma=gamma,
        include_first_mismatch=mismatch,
        episode_source=source,
        scale=scale,
        episode_weight=weights[0],
        step_weight=weights[1],
        std_eps=1e-3,
    )
    decision = one_step(start_stack(m), rows_of(steps))
    assert decision.row_advantages.tolist() == pytest.approx(oracle(steps, m.params), rel=1e-8, abs=1e-8)


def test_returns_by_hand():
    steps = of_rollouts([(1.0, T), (0.8, T), (0.1, F), (0.9, T), (1.0, T)])
    assert returns(steps) == pytest.approx([1.0 + 0.5 * 0.8, 0.8, 0.1, 0.9 + 0.5, 1.0])
    assert returns(steps, include_first_mismatch=True) == pytest.approx([1.425, 0.8 + 0.5 * 0.1, 0.1, 1.4, 1.0])
    assert returns(steps, gamma=0.0) == [1.0, 0.8, 0.1, 0.9, 1.0]
    matching = of_rollouts([(r, T) for r in (0.3, 0.2, 0.7)])
    assert returns(matching, gamma=0.9) == pytest.approx([0.3 + 0.9 * 0.2 + 0.81 * 0.7, 0.2 + 0.9 * 0.7, 0.7])


def test_returns_do_not_reach_over_a_step_that_is_missing_or_has_no_reward():
    steps = of_rollouts([(1.0, T), (NAN, T), (0.5, T), (0.25, T)])
    got = returns(steps)
    assert math.isnan(got[1]) and [got[0], *got[2:]] == [1.0, 0.625, 0.25]
    assert returns([s for s in steps if s[2] != 1]) == [1.0, 0.625, 0.25]


def test_a_row_without_a_reward_takes_its_step_out():
    steps = of_rollouts([(1.0, T), (0.5, T)], [(0.2, F), (0.9, T)], [(0.6, T), (0.1, F)])
    rows = rows_of(steps).replace(reward=torch.tensor([0, 0, 0, NAN, 0, 0], dtype=torch.float64))
    got = method().advantages(rows).tolist()
    without = method().advantages(rows_of([s for i, s in enumerate(steps) if i != 3])).tolist()
    assert got[3] == 0
    assert got[:3] + got[4:] == pytest.approx(without)


# ---- properties


def test_one_step_per_task_is_grpo():
    rewards = [1.0, 0.1, 0.55, 0.1, 0.2, 0.2, 0.9, 0.3]
    steps = [(i // 4, i % 4, 0, r, i % 3 == 0) for i, r in enumerate(rewards)]
    grpo = grpo_advantages(make_rollouts(rewards), eps=1e-6).tolist()
    assert method(episode_weight=0.0).advantages(rows_of(steps)).tolist() == grpo
    assert method(step_weight=0.0, gamma=0.9).advantages(rows_of(steps)).tolist() == grpo


def test_equal_rollouts_give_exact_zeros():
    same = [(0.19, T), (0.19, T), (0.19, F)]
    assert method(episode_weight=0.0).advantages(rows_of(of_rollouts(*[same] * 5))).tolist() == [0.0] * 15
    assert method(step_weight=0.0).advantages(rows_of(of_rollouts(*[same] * 5))).tolist() == [0.0] * 15


def test_the_future_counts_only_with_gamma():
    """Two rollouts with the same first step, one of which cannot go on after it."""
    steps = of_rollouts([(1.0, T), (1.0, T)], [(1.0, T), (0.1, F)])
    near, far = (method(gamma=g, episode_weight=0.0).advantages(rows_of(steps)).tolist() for g in (0.0, 0.5))
    assert near[0] == near[2] == 0
    assert far[0] == pytest.approx(2**-0.5, rel=1e-5) and far[2] == pytest.approx(-(2**-0.5), rel=1e-5)


def test_a_step_that_one_rollout_reached_has_only_its_episode_advantage():
    steps = of_rollouts([(1.0, T), (0.4, T), (0.7, T)], [(0.1, F)])
    assert method(episode_weight=0.0).advantages(rows_of(steps))[1:3].tolist() == [0.0, 0.0]
    assert method(step_weight=0.0).advantages(rows_of(steps))[1] != 0


def test_a_task_with_one_step_has_no_advantage_and_warns(caplog):
    stack = start_stack(method())
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        decision = one_step(stack, rows_of([(0, 0, 0, 0.9, T), (1, 0, 0, 0.1, F), (1, 1, 0, 1.0, T)]))
    assert decision.row_advantages[0] == 0 and decision.row_advantages[1] < 0 < decision.row_advantages[2]
    assert "single turn" in caplog.text


def test_several_rows_of_a_rollout_are_not_members_of_the_group():
    """More steps of one rollout change nothing for another step."""
    short = of_rollouts([(1.0, T)], [(0.1, F)], [(0.55, T)])
    long = [*short, (0, 0, 1, 1.0, F), (0, 0, 2, 1.0, F)]  # R_0 stays, for step 1 does not match
    m = method(episode_weight=0.0)
    assert m.advantages(rows_of(long))[:3].tolist() == m.advantages(rows_of(short)).tolist()


def test_one_row_per_rollout_gives_the_same_advantages():
    steps = of_rollouts([(1.0, T), (0.8, T), (0.1, F)], [(0.3, F)], [(0.9, T), (0.2, F)])
    expected = method().advantages(rows_of(steps)).tolist()
    row = [s[1] for s in steps]
    flat = rows_of(steps).turns.replace(row=torch.tensor(row))
    rollouts = make_rollouts([0.0] * 3, [0] * 3, lengths=[6, 1, 4], turns=flat)
    assert method().advantages(rollouts).tolist() == expected
    decision = one_step(start_stack(method()), rollouts)
    assert decision.advantages.tolist() == [expected[i] for i in (0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 5)]


# ---- the filter, and the whole driver


def two_tasks():
    """Task 4 differs in R_0 (1.5, 0.1, 1.0: std 0.58), task 9 hardly does (0.9, 1.0)."""
    return [
        *((4, *s[1:]) for s in of_rollouts([(1.0, T), (1.0, T)], [(0.1, F), (0.8, T), (0.1, F)], [(1.0, T), (0.1, F)])),
        *((9, *s[1:]) for s in of_rollouts([(0.9, T), (0.1, F)], [(1.0, T), (0.1, F)])),
    ]


@pytest.mark.parametrize(
    ("params", "trained"),
    [
        ({}, [T] * 7 + [F] * 4),
        ({"filter_std": 0.0}, [T] * 11),
        ({"filter_std": 0.06}, [T] * 7 + [F] * 4),  # 0.05 with divisor n, 0.07 with n - 1
        ({"filter_std": 0.6}, [F] * 11),
        ({"filter_by": "none"}, [T] * 11),
        ({"filter_by": "advantages"}, [T] * 11),
        ({"filter_by": "advantages", "scale": "none"}, [T] * 11),
        ({"filter_by": "advantages", "scale": "none", "filter_std": 0.6}, [T] * 7 + [F] * 4),
    ],
)
def test_tasks_whose_rollouts_differ_too_little_leave(params, trained):
    steps = two_tasks()
    decision = one_step(start_stack(UiS1(UiS1.Params(**acting(UiS1.Params, params)))), rows_of(steps))
    assert decision.trained.tolist() == trained
    expected = oracle(steps, UiS1.Params(**acting(UiS1.Params, params)))  # tasks do not see each other
    assert decision.row_advantages.tolist() == pytest.approx([a * t for a, t in zip(expected, trained, strict=True)])


@pytest.mark.parametrize(("limit", "stays"), [(0.5, F), (0.499, T)])
def test_a_spread_at_the_limit_leaves(limit, stays):
    rollouts = rows_of(of_rollouts([(1.0, T)], [(0.0, F)]))  # standard deviation with divisor n: exactly 0.5
    assert one_step(start_stack(UiS1(UiS1.Params(filter_std=limit))), rollouts).trained.tolist() == [stays] * 2


def test_a_task_with_one_rollout_stays_and_is_compared_with_its_own_steps():
    decision = one_step(start_stack(UiS1()), rows_of(of_rollouts([(1.0, T), (0.1, F)])))
    assert decision.trained.all()
    assert decision.row_advantages.tolist() == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-5)


def test_tokens_get_the_advantage_of_their_step_and_metrics_are_logged():
    stack = start_stack(UiS1())
    rollouts = rows_of(two_tasks())
    decision = one_step(stack, rollouts)
    assert decision.estimator == "ui_s1"
    expected = oracle(two_tasks(), UiS1.Params())
    row = make_tokens(rollouts).row.tolist()
    assert decision.advantages.tolist() == pytest.approx([expected[r] * (r < 7) for r in row])
    assert combine([stack.metrics.take()]) == pytest.approx(
        {
            "ui_s1/matched": 6 / 11,
            "ui_s1/patches": 1 / 5,
            "ui_s1/steps": 11 / 5,
            "ui_s1/first_return": (1.5 + 0.1 + 1.0 + 0.9 + 1.0) / 5,
            "ui_s1/alone": 1 / 11,
            "ui_s1/filtered": 1 / 2,
        }
    )


def test_a_batch_of_which_nothing_stays_warns(caplog):
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        decision = one_step(start_stack(UiS1()), rows_of(of_rollouts([(1.0, T)], [(1.0, T)])))
    assert not decision.trained.any()
    assert "filter_std" in caplog.text


def test_a_batch_without_steps_is_refused():
    with pytest.raises(MethodError, match=r"no turns.*agent loop"):
        one_step(start_stack(UiS1()), make_rollouts([1.0, 0, 0, 1]))


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"gamma": 1.1}, "gamma"),
        ({"gamma": -0.1}, "gamma"),
        ({"episode_weight": -1}, "episode_weight"),
        ({"step_weight": -1}, "step_weight"),
        ({"std_eps": 0}, "std_eps"),
        ({"filter_std": -0.1}, "filter_std"),
        ({"filter_by": "rewards"}, "filter_by"),
        ({"scale": "mad"}, "scale"),
        ({"episode_source": "task"}, "episode_source"),
        ({"rows_per_rollout": 0}, "rows_per_rollout"),
        ({"max_patches": 1}, "max_patches"),
    ],
)
def test_parameters_out_of_range_are_named(values, wrong):
    with pytest.raises(ConfigError, match=f"ui_s1.*{wrong}"):
        build_params(UiS1.Params, values, "ui_s1")


def test_is_found_by_name_and_says_how_many_rows_a_rollout_takes():
    stack = build_stack("ui_s1", {"ui_s1": {"rows_per_rollout": 12}})
    assert [m.rows_per_rollout for m in stack.methods] == [12]
    assert stack.needs == {"turns"}
    with pytest.raises(ConfigError, match="both decide `advantages`"):
        build_stack("ui_s1, mc_grpo")


# ---- the environment

EXPERT = [ExpertStep(f"screen {k}", f"expert {k}") for k in range(5)]


def play(matches, max_patches, expert=EXPERT) -> SemiOnlineEpisode:
    episode = SemiOnlineEpisode(expert, max_patches)
    while not episode.done:
        k = len(episode.turns)
        assert episode.observation == f"screen {k}"
        episode.act(f"own {k}", matches[k], 1.0 if matches[k] else 0.1)
    return episode


def test_a_wrong_response_is_replaced_in_the_history_only():
    episode = play([T, F, T, F, T], max_patches=1)
    assert episode.history == ["own 0", "expert 1", "own 2", "own 3"]  # the second mismatch ends it
    assert [(t.turn, t.anchor, t.reward, t.valid, t.patched) for t in episode.turns] == [
        (0, "screen 0", 1.0, T, F),
        (1, "screen 1", 0.1, F, T),
        (2, "screen 2", 1.0, T, F),
        (3, "screen 3", 0.1, F, F),
    ]
    assert episode.patches == 1 and episode.progress == pytest.approx(1 / 5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=5, max_size=5), st.sampled_from([0, 1, 2, None]))
def test_as_many_patches_as_allowed(matches, max_patches):
    episode = play(matches, max_patches)
    wrong = [k for k, m in enumerate(matches) if not m]
    ends = wrong[max_patches] if max_patches is not None and len(wrong) > max_patches else 4
    assert len(episode.turns) == ends + 1  # without a limit: all
    assert episode.patches == sum(k < ends for k in wrong)
    assert max_patches is None or episode.patches <= max_patches
    if max_patches == 0:
        assert sum(not t.valid for t in episode.turns) <= 1


def test_a_patch_can_be_written_by_the_caller():
    episode = SemiOnlineEpisode(EXPERT, 1)
    episode.act("wrong", False, 0.0, patch="a new thought, the expert's action")
    assert episode.history == ["a new thought, the expert's action"]
    episode.act("right", True, 1.0, patch="unused")
    assert episode.history[1] == "right"


def test_an_episode_that_is_used_wrongly_says_so():
    with pytest.raises(MethodError, match="0 recorded turns"):
        SemiOnlineEpisode([])
    with pytest.raises(MethodError, match="max_patches=-1"):
        SemiOnlineEpisode(EXPERT, -1)
    over = play([F] * 5, 0)
    with pytest.raises(MethodError, match="over"):
        over.act("more", True, 1.0)


def test_turns_of_episodes_are_what_the_method_reads():
    episodes = [play([T, F, T, T, T], 1), play([F, F, T, T, T], 1)]
    steps = [(0, i, t.turn, t.reward, t.valid) for i, e in enumerate(episodes) for t in e.turns]
    decision = one_step(start_stack(method(episode_weight=0.0)), rows_of(steps))
    # R: 1, .1, 1.75, 1.5, 1 and .1, .1
    assert returns(steps) == pytest.approx([1, 0.1, 1.75, 1.5, 1, 0.1, 0.1])
    assert decision.row_advantages.tolist() == pytest.approx([2**-0.5, 0, 0, 0, 0, -(2**-0.5), 0], rel=1e-5)


def test_semi_online_performance():
    assert semi_online_performance([1.0, 0.5, 0.0, 1.0]) == {"progress": 0.625, "success": 0.5, "score": 0.5625}
    assert play([T] * 5, 0).progress == 1.0


def test_the_authors_step_reward():
    assert [gui_step_reward(True, a) for a in ("exact", "type", "wrong", "unreadable")] == pytest.approx(
        [1.0, 0.55, 0.19, 0.1]
    )
    assert gui_step_reward(False, "exact") == pytest.approx(0.9)
