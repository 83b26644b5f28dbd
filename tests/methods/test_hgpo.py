"""HGPO against a plain loop, the authors' numbers, its properties, and through the whole driver."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from golden_cases import Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting, changed

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import build_params
from rl_plugins.kit.agents.turns import Turns
from rl_plugins.methods.gigpo import Gigpo
from rl_plugins.methods.hgpo import Hgpo
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_rollouts, make_tokens, make_turns, one_row_per_turn, one_step, start_stack

GOLDEN = Golden("hgpo")
NAN = math.nan


def method(**params) -> Hgpo:
    return Hgpo(Hgpo.Params(**acting(Hgpo.Params, params)))


def batch(rollouts):
    """Rollouts given as (group, reward, [(anchor, reward, valid), ..])."""
    nested = [[list(of_turn) for of_turn in zip(*turns, strict=True)] for _, _, turns in rollouts]
    anchor, reward, valid = ([n[i] for n in nested] for i in range(3))
    return make_rollouts(
        [r for _, r, _ in rollouts],
        [g for g, _, _ in rollouts],
        lengths=[2 * len(turns) for _, _, turns in rollouts],
        turns=make_turns(anchor, reward, valid),
    )


def advantages(rollouts, **params) -> list[float]:
    return method(**params).advantages(rollouts).tolist()


def entry(value, values, ddof, p):
    """The normalized difference of `value` from the mean of `values`, and 0 where it is rounding."""
    mean = math.fsum(values) / len(values)
    std = (math.fsum((v - mean) ** 2 for v in values) / max(len(values) - ddof, 1)) ** 0.5
    if abs(value - mean) <= 1e-6 * max(1.0, abs(value)):
        return 0.0
    return (value - mean) / (std + p.eps if p.mode == "mean_std_norm" else 1.0)


def oracle(rollouts, **params):
    """The method as loops over turns, depths and all pairs, in Python floats."""
    p = Hgpo.Params(**acting(Hgpo.Params, params))
    rows = []  # one per turn: group, scored, return, reward, observations up to the turn
    for g, reward, turns in rollouts:
        rewards = [0.0 if math.isnan(r) else r for _, r, _ in turns]
        if all(math.isnan(r) for _, r, _ in turns):
            rewards[-1] = reward
        for t, (_, _, valid) in enumerate(turns):
            less = 0.0 if valid else p.invalid_action_penalty_coef
            g_t = sum(r * p.gamma**k for k, r in enumerate(rewards[t:]))
            rows.append((g, not math.isnan(reward), g_t - less, reward - less, [a for a, _, _ in turns[: t + 1]]))
    out = []
    for g, scored, g_t, reward, seen in rows:
        items = []  # weight, entry
        group = [r for r in rows if r[0] == g and r[1]]
        if scored and p.base_group:
            if len(group) > 1:
                items.append((1.0, entry(reward, [r[3] for r in group], 1, p)))
            elif p.single_group == "reward":
                items.append((1.0, reward / (1 + p.eps) if p.mode == "mean_std_norm" else reward))
        for k in range(p.history_length + 1) if scored else ():
            same = [r[2] for r in group if len(seen) > k and r[4][-k - 1 :] == seen[-k - 1 :] and len(r[4]) > k]
            if len(same) > 1:
                items.append(((k + p.weight_offset) ** p.length_weight_alpha, entry(g_t, same, 0, p)))
        items = [(w, a) for w, a in items if a != 0 or not p.drop_zero]
        out.append(sum(w * a for w, a in items) / (sum(w for w, _ in items) + p.eps))
    return out


turn = st.tuples(
    st.sampled_from(["a", "a", "b"]), st.sampled_from([0.0, 1.0, 10.0, 0.1, NAN]), st.sampled_from([True, True, False])
)
rollout_lists = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0.0, 1.0, 10.0, 0.1, NAN]), st.lists(turn, max_size=5, min_size=1)),
    min_size=1,
    max_size=8,
).filter(lambda rollouts: any(not math.isnan(r) for _, r, _ in rollouts))


@settings(max_examples=60, deadline=None)
@given(
    rollouts=rollout_lists,
    params=st.fixed_dictionaries(
        {
            "history_length": st.sampled_from([0, 1, 2, 100]),
            "gamma": st.sampled_from([0.0, 0.95, 1.0]),
            "mode": st.sampled_from(["mean_norm", "mean_std_norm"]),
            "length_weight_alpha": st.sampled_from([0.0, 1.0, 2.0]),
            "weight_offset": st.sampled_from([1, 2]),
            "drop_zero": st.booleans(),
            "base_group": st.booleans(),
            "single_group": st.sampled_from(["zero", "reward"]),
            "invalid_action_penalty_coef": st.sampled_from([0.0, 0.1]),
        }
    ),
)
def test_equals_the_loop_over_all_pairs_in_both_layouts(rollouts, params):
    expected = oracle(rollouts, **params)
    made = batch(rollouts)
    tokens = make_tokens(made)
    for rows, row_tokens in ((made, tokens), one_row_per_turn(made, tokens)):
        decision = one_step(start_stack(method(**params)), rows, row_tokens)
        of_token = [expected[i] for i in row_tokens.turn.tolist()]
        assert decision.advantages.tolist() == pytest.approx(of_token, rel=1e-7, abs=1e-7)


@GOLDEN.kind("uid")
def check_advantages(case):
    """The name of an expected value says the parameters that are not those of the case."""
    inputs, expected = case.inputs, case.expected
    groups, names, seen = sorted(set(inputs["uid"])), list(dict.fromkeys(inputs["traj_uid"])), {}
    turns = [seen.setdefault(u, []).append(i) or len(seen[u]) - 1 for i, u in enumerate(inputs["traj_uid"])]
    steps = make_turns([[o] for o in inputs["anchor_obs"]], [[r] for r in inputs["step_env_reward"]], row_per="turn")
    rollouts = make_rollouts(
        inputs["episode_reward"],
        [groups.index(g) for g in inputs["uid"]],
        rollout=torch.tensor([names.index(u) for u in inputs["traj_uid"]]),
        index=torch.tensor(turns),
        lengths=inputs["response_lengths"],
        turns=steps.replace(turn=torch.tensor(turns)),
    )
    assert max(inputs["response_lengths"]) <= inputs["T"]
    own = dict(weight_offset=2, single_group="reward", invalid_action_penalty_coef=0.0)
    params = case.build(Hgpo, {"epsilon": "eps"}, **own)
    close = dict(rel=1e-5, abs=5e-6)  # theirs is float32
    for key in expected:
        form = re.fullmatch(r"adv_row(?:_K(\d+))?(?:_(mean(?:_std)?_norm))?(?:_base(\d))?(?:_alpha([\d.]+))?", key)
        if form is None:
            continue
        words = ("history_length", "mode", "base_group", "length_weight_alpha")
        kinds = (int, str, lambda text: text == "1", float)
        changes = {word: kind(text) for word, kind, text in zip(words, kinds, form.groups(), strict=True) if text}
        result = Hgpo(changed(params, **changes)).advantages(rollouts).tolist()
        assert result == pytest.approx(expected[key], **close), key
    if "step_discounted_returns" in expected:
        assert Turns(rollouts).returns(params.gamma).tolist() == pytest.approx(
            expected["step_discounted_returns"], **close
        )


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case):
    GOLDEN.check(case)


def test_further_golden_cases():
    GOLDEN.check_further_cases()


# ---- properties


def random_batch(seed=0, scale=1.0, shift=0.0):
    """Rollouts of two groups whose returns (gamma 0) are scale * x + shift."""
    rng = random.Random(seed)
    return batch(
        [
            (i % 2, 0.0, [(rng.choice("ab"), scale * rng.random() + shift, True) for _ in range(rng.randint(1, 5))])
            for i in range(10)
        ]
    )


def test_depth_zero_is_the_step_advantage_of_gigpo():
    rollouts = random_batch()
    of_gigpo = {}
    for mode in ("mean_norm", "mean_std_norm"):
        with_step = Gigpo(Gigpo.Params(mode=mode)).advantages(rollouts)
        of_gigpo[mode] = with_step - Gigpo(Gigpo.Params(mode=mode, step_advantage_w=0.0)).advantages(rollouts)
    assert advantages(rollouts, history_length=0, mode="mean_norm") == pytest.approx(
        of_gigpo["mean_norm"].tolist(), rel=1e-5
    )
    steps = rollouts.turns
    key = list(zip(rollouts.group[steps.row].tolist(), steps.anchor, strict=True))
    factor = [math.sqrt(key.count(k) / (key.count(k) - 1)) for k in key]
    expected = [a * f for a, f in zip(of_gigpo["mean_std_norm"].tolist(), factor, strict=True)]
    assert advantages(rollouts, history_length=0) == pytest.approx(expected, rel=1e-4)


def test_deeper_groups_are_smaller_and_logged():
    stack = start_stack(method(history_length=4))
    one_step(stack, random_batch())
    stats = combine([stack.metrics.take()])
    shares = [stats[f"hgpo/compared_{k}"] for k in range(5)]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[2] > 0
    assert stats["hgpo/abs"] > 0 and "hgpo/compared_5" not in stats


def test_a_shift_changes_nothing_and_a_scale_only_without_normalization():
    base = dict(gamma=0.0, history_length=2)
    for mode, factor in (("mean_norm", 3.0), ("mean_std_norm", 1.0)):
        one = torch.tensor(advantages(random_batch(), mode=mode, **base))
        two = torch.tensor(advantages(random_batch(scale=3.0, shift=5.0), mode=mode, **base))
        assert two.tolist() == pytest.approx((factor * one).tolist(), rel=1e-4, abs=1e-6)


def test_weights_of_depths_of_paper_and_code():
    """Three rollouts of states x/y then s; the second turn is compared at depths 0 (all three) and 1 (those from x)."""
    rollouts = batch([(0, 0.0, [(first, 0.0, True), ("s", r, True)]) for first, r in (("x", 6), ("x", 0), ("y", 0))])
    params = dict(mode="mean_norm", history_length=1, gamma=0.0)
    at_0, at_1 = 6 - 2, 6 - 3
    for offset, alpha in ((1, 1.0), (2, 1.0), (1, 0.0), (1, 2.0)):
        w = [offset**alpha, (1 + offset) ** alpha]
        a = advantages(rollouts, weight_offset=offset, length_weight_alpha=alpha, **params)
        assert a[1] == pytest.approx((w[0] * at_0 + w[1] * at_1) / sum(w), rel=1e-6)
        assert a[5] == pytest.approx(-2, rel=1e-6)  # from y: nobody else, so depth 0 alone
        assert [a[0], a[2], a[4]] == [0, 0, 0]  # returns of first turns are equal
    assert Hgpo.Params().weight_offset == 1  # the paper's


def test_entries_of_zero_leave_the_mean_unless_they_are_kept():
    rollouts = batch([(0, 0.0, [(f, 0.0, True), ("s", r, True)]) for f, r in (("x", 3), ("x", 1), ("y", 5))])
    params = dict(mode="mean_norm", history_length=1, gamma=0.0)
    assert advantages(rollouts, **params)[1] == pytest.approx(1.0, rel=1e-6)  # 0 from three, 1 from two
    assert advantages(rollouts, drop_zero=False, **params)[1] == pytest.approx(2 / 3, rel=1e-6)


def test_rounding_is_no_entry():
    """Returns that are equal up to rounding: 0.1 + 0.2 and 0.3."""
    rollouts = batch([(0, 0.0, [("s", r, True)]) for r in (0.1 + 0.2, 0.3, 0.3)])
    assert advantages(rollouts) == [0.0, 0.0, 0.0]


def test_a_state_of_its_own_gets_nothing_and_copies_neither():
    alone = batch([(0, 1.0, [("a", 1.0, True)]), (0, 0.0, [("b", 0.0, True)]), (1, 5.0, [("a", 5.0, True)])])
    assert advantages(alone) == [0.0, 0.0, 0.0]
    base = advantages(alone, base_group=True, mode="mean_norm")
    assert base == pytest.approx([0.5, -0.5, 0.0], rel=1e-5)
    copies = batch([(0, 1.0, [("a", 0.0, True), ("b", 0.0, True), ("c", 1.0, True)])] * 4)
    assert advantages(copies) == [0.0] * 12
    revisited = batch([(0, 1.0, [("a", 0.0, True), ("b", 0.0, True), ("a", 1.0, True)])] * 4)
    assert advantages(revisited)[0] < 0 < advantages(revisited)[2]


@pytest.mark.parametrize(("mode", "expected"), [("mean_norm", 5.0), ("mean_std_norm", 5.0 / (1 + 1e-6))])
def test_the_base_entry_of_a_single_turn_is_zero_or_its_reward(mode, expected):
    alone = batch([(1, 5.0, [("a", 5.0, True)])])
    assert advantages(alone, base_group=True, mode=mode) == [0.0]
    kept = advantages(alone, base_group=True, mode=mode, single_group="reward")
    assert kept == pytest.approx([expected / (1 + 1e-6)], rel=1e-9)


def test_a_gap_in_a_history_is_not_a_state():
    """The first turn has no history; a turn with an empty text before it has one."""
    rollouts = batch([(0, 0.0, [("s", 1.0, True)]), (0, 0.0, [("", 0.0, True), ("s", 4.0, True)])])
    stack = start_stack(method(history_length=1))
    one_step(stack, rollouts)
    stats = combine([stack.metrics.take()])
    assert stats["hgpo/compared_0"] == pytest.approx(2 / 3) and stats["hgpo/compared_1"] == 0


def test_through_the_driver_rows_without_reward_and_tokens():
    rollouts = batch(
        [
            (0, 1.0, [("s", NAN, True), ("a", NAN, True)]),
            (0, 0.0, [("s", NAN, True), ("a", NAN, False)]),
            (0, NAN, [("s", 100.0, True), ("a", 100.0, True)]),
        ]
    )
    decision = one_step(start_stack(method(mode="mean_norm")), rollouts)
    assert decision.estimator == "hgpo" and decision.stays.all() and not decision.uniform
    expected = [0.475, 0.55, -0.475, -0.55, 0, 0]  # returns 0.95, 1, 0, -0.1
    assert decision.advantages.tolist() == pytest.approx([a for a in expected for _ in range(2)], rel=1e-5)
    assert decision.row_advantages.tolist() == pytest.approx([0.5125, -0.5125, 0], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("history_length", -1),
        ("history_length", 1.5),
        ("gamma", 1.01),
        ("mode", "mean"),
        ("length_weight_alpha", -0.1),
        ("weight_offset", 0),
        ("single_group", "none"),
        ("invalid_action_penalty_coef", -1),
        ("eps", 0),
    ],
)
def test_parameters_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"Method `hgpo`: parameter `{name}`"):
        build_params(Hgpo.Params, {name: value}, "hgpo")
