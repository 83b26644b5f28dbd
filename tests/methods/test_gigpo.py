"""GiGPO against a plain loop, the authors' numbers, its properties, and through the whole driver."""

from __future__ import annotations

import logging
import math
import random
import re
from difflib import SequenceMatcher

import pytest
import torch
from golden_cases import Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting, changed

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.params import build_params
from rl_plugins.kit.agents.turns import Turns
from rl_plugins.methods.gigpo import Gigpo, _Clusters
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_rollouts, make_tokens, make_turns, one_row_per_turn, one_step, start_stack

GOLDEN = Golden("gigpo")
NAN = math.nan


def method(**params) -> Gigpo:
    return Gigpo(Gigpo.Params(**acting(Gigpo.Params, params)))


def batch(rollouts):
    """Rollouts given as (group, reward, [(anchor, reward, valid), ..])."""
    nested = [[list(of_turn) for of_turn in zip(*turns, strict=True)] or [[], [], []] for _, _, turns in rollouts]
    anchor, reward, valid = ([n[i] for n in nested] for i in range(3))
    return make_rollouts(
        [r for _, r, _ in rollouts],
        [g for g, _, _ in rollouts],
        lengths=[2 * len(turns) for _, _, turns in rollouts],
        turns=make_turns(anchor, reward, valid),
    )


def advantages(rollouts, **params) -> list[float]:
    return method(**params).advantages(rollouts).tolist()


def mean_and_std(values):
    mean = math.fsum(values) / len(values)
    return mean, (math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0


def oracle(rollouts, **params):
    """The method as loops over all pairs of turns, in Python floats."""
    p = Gigpo.Params(**acting(Gigpo.Params, params))
    rows = []  # one per turn: group, rollout, turn, anchor, reward, episode reward, valid
    for i, (g, reward, turns) in enumerate(rollouts):
        own = any(not math.isnan(r) for _, r, _ in turns)
        for t, (anchor, r, valid) in enumerate(turns):
            r = (0.0 if math.isnan(r) else r) if own else (reward if t == len(turns) - 1 else 0.0)
            rows.append((g, i, t, anchor, r, reward, valid))
    out = []
    for g, i, t, anchor, _, reward, valid in rows:
        if math.isnan(reward):
            out.append(0.0)
            continue

        def less(row):
            return 0.0 if row[6] else p.invalid_action_penalty_coef

        def discounted(row):
            return sum(r[4] * p.gamma ** (r[2] - row[2]) for r in rows if r[1] == row[1] and r[2] >= row[2])

        group = [r for r in rows if r[0] == g and not math.isnan(r[5])]
        entries = [r[5] - less(r) for r in group if p.statistics == "turns" or r[2] == 0]
        own = reward - less((0, 0, 0, 0, 0, 0, valid))
        mean, std = mean_and_std(entries)
        divide = p.mode == "mean_std_norm"
        if len(entries) == 1:
            episode = 0.0 if p.single_group == "zero" else own / (1 + p.eps if divide else 1)
        else:
            episode = (own - mean) / (std + p.eps if divide else 1)
        returns = [discounted(r) - less(r) for r in group if r[3] == anchor]
        mean, std = mean_and_std(returns)
        g_t = discounted((g, i, t)) - less((0, 0, 0, 0, 0, 0, valid))
        step = (g_t - mean) / (std + p.eps if divide else 1)
        out.append(episode + p.step_advantage_w * step)
    return out


turn = st.tuples(
    st.sampled_from(["a", "b", "c"]), st.sampled_from([0.0, 1.0, 10.0, 0.1, NAN]), st.sampled_from([True, True, False])
)
rollout_lists = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, 10.0, 0.1, NAN]), st.lists(turn, max_size=5, min_size=1)),
    min_size=1,
    max_size=8,
).filter(lambda rollouts: any(not math.isnan(r) for _, r, _ in rollouts))


@settings(max_examples=60, deadline=None)
@given(
    rollouts=rollout_lists,
    params=st.fixed_dictionaries(
        {
            "gamma": st.sampled_from([0.0, 0.95, 1.0]),
            "step_advantage_w": st.sampled_from([0.0, 1.0, 0.3]),
            "mode": st.sampled_from(["mean_norm", "mean_std_norm"]),
            "statistics": st.sampled_from(["turns", "rollouts"]),
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
        # equal returns may differ by rounding, which eps turns into 1e-9
        assert decision.advantages.tolist() == pytest.approx(of_token, rel=1e-7, abs=1e-7)


# ---- the authors' numbers


def golden_rollouts(inputs):
    """A row per turn; rows of a rollout are in time order, those of different rollouts may be mixed."""
    n, groups, seen = len(inputs["uid"]), sorted(set(inputs["uid"])), {}
    turns = [seen.setdefault(u, []).append(i) or len(seen[u]) - 1 for i, u in enumerate(inputs["traj_uid"])]
    names = list(dict.fromkeys(inputs["traj_uid"]))
    return make_rollouts(
        inputs["episode_reward"],
        [groups.index(g) for g in inputs["uid"]],
        rollout=torch.tensor([names.index(u) for u in inputs["traj_uid"]]),
        index=torch.tensor(turns),
        lengths=inputs["response_lengths"],
        turns=make_turns(
            [[o] for o in inputs["anchor_obs"]], [[r] for r in inputs["step_env_reward"]], row_per="turn"
        ).replace(turn=torch.tensor(turns)),
    ), n


CLOSE = dict(rel=1e-5, abs=5e-6)  # theirs is float32


def params_of(case, **changes):
    own = dict(invalid_action_penalty_coef=0.0, single_group="reward")
    if "compute_mean_std_cross_steps" in case.params:
        own["statistics"] = "turns" if case.params["compute_mean_std_cross_steps"] else "rollouts"
    if case.params.get("enable_similarity", False):
        own["similarity"] = case.params["similarity_thresh"]
    return changed(case.build(Gigpo, {"epsilon": "eps"}, **own), **changes)


@GOLDEN.kind("uid")
def check_advantages(case):
    """The name of an expected value says the mode and the statistics where they are not those of the parameters."""
    rollouts, n = golden_rollouts(case.inputs)
    tokens, expected = make_tokens(rollouts), case.expected
    for key in expected:
        form = re.fullmatch(r"(advantages_token|episode_adv_row)(?:_(mean(?:_std)?_norm))?(?:_(cross|per)_\w+)?", key)
        if form is None:
            continue
        changes = {"mode": form[2]} if form[2] else {}
        if form[3]:
            changes["statistics"] = {"cross": "turns", "per": "rollouts"}[form[3]]
        if form[1] == "episode_adv_row":
            changes["step_advantage_w"] = 0.0
        decision = one_step(start_stack(Gigpo(params_of(case, **changes))), rollouts, tokens)
        padded = torch.zeros(n, case.inputs["T"], dtype=torch.float64)
        padded[tokens.row, tokens.position] = decision.advantages
        if form[1] == "episode_adv_row":
            assert padded[:, 0].tolist() == pytest.approx(expected[key], **CLOSE)
        else:
            assert padded.tolist() == [pytest.approx(row, **CLOSE) for row in expected[key]]
    if "step_discounted_returns" in expected:
        returns = Turns(rollouts).returns(params_of(case).gamma)
        assert returns.tolist() == pytest.approx(expected["step_discounted_returns"], **CLOSE)


@GOLDEN.kind("pairs")
def check_similar_texts(case):
    p, found = case.build(Gigpo, {"threshold": "similarity"}), []
    for a, b in case.inputs["pairs"]:
        clusters = _Clusters(p.similarity, p.autojunk)
        found.append(clusters.join(a) == clusters.join(b))
    assert found == case.expected["similar"]


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case):
    GOLDEN.check(case)


def test_further_golden_cases():
    GOLDEN.check_further_cases()


# ---- similar texts


def greedy(texts, threshold, autojunk):
    """Every text against the first text of every cluster."""
    first, out = [], []
    for text in texts:
        similar = [i for i, f in enumerate(first) if SequenceMatcher(None, text, f, autojunk).ratio() >= threshold]
        if not similar:
            first.append(text)
        out.append(similar[0] if similar else len(first) - 1)
    return out


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab c\u0161\U0001f600", max_size=12), max_size=14),
    threshold=st.sampled_from([0.05, 0.5, 0.8, 2 / 3, 0.95]),
)
def test_clusters_equal_the_comparison_of_all_pairs(texts, threshold):
    clusters = _Clusters(threshold, autojunk=True)
    assert [clusters.join(t) for t in texts] == greedy(texts, threshold, True)


@pytest.mark.parametrize("autojunk", [True, False])
def test_clusters_of_long_texts_and_of_many(autojunk):
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=n)) for n in (3, 40, 199, 260) for _ in range(12)]
    texts += [t[:k] + "#" + t[k + 1 :] for t in texts for k in (len(t) // 3, len(t) - 1)]
    clusters = _Clusters(0.9, autojunk)
    assert [clusters.join(t) for t in texts] == greedy(texts, 0.9, autojunk)
    assert len(clusters.matchers) > 32  # the table of letters has grown


def test_of_several_similar_clusters_the_first_one_is_joined():
    clusters = _Clusters(0.6, autojunk=True)
    assert [clusters.join(t) for t in ("xyz", "abcd", "abq", "abqd")] == [0, 1, 2, 1]  # nearer to the third


def test_few_pairs_are_compared(monkeypatch):
    """Texts that differ in length or letters are told apart by the bounds."""
    compared, real = [], SequenceMatcher.ratio
    monkeypatch.setattr(SequenceMatcher, "ratio", lambda self: compared.append(1) or real(self))
    texts = [f"You are in {'corridor ' * k}room {c * 12}." for k in range(10) for c in "abcdefghij"]
    clusters = _Clusters(0.97, autojunk=True)
    assert len({clusters.join(t) for t in texts}) == 100
    assert len(compared) < 200  # of 4950 pairs


def test_similar_states_are_compared_and_other_groups_are_not():
    texts = ["You are in the kitchen. You see a mug 1.", "You are in the kitchen. You see a mug 2.", "elsewhere"]
    made = batch([(g, r, [(t, NAN, True)]) for g, r, t in [(0, 1, 0), (0, 0, 1), (0, 0, 2), (1, 1, 0), (1, 0, 2)]])
    anchors = [texts[t] for t in (0, 1, 2, 0, 2)]
    made = made.replace(turns=made.turns.replace(anchor=anchors))
    plain = advantages(made)
    similar = advantages(made, similarity=0.95)
    step = [a - b for a, b in zip(similar, plain, strict=True)]
    assert step == pytest.approx([0.5, -0.5, 0, 0, 0])


def test_similar_groups_do_not_depend_on_the_order_of_the_batch():
    rng = random.Random(1)
    base = "You are in the middle of a room. Looking around you see {}."
    words = ["a cabinet", "a cabinat", "a cebinat", "a cebinet 4", "a desk", "a disk", "a risk"]
    rollouts = [
        (i % 2, rng.random(), [(base.format(rng.choice(words)), rng.random(), True) for _ in range(4)])
        for i in range(10)
    ]
    made = batch(rollouts)
    one = method(similarity=0.97).advantages(made)
    order = torch.from_numpy(torch.randperm(40, generator=torch.Generator().manual_seed(0)).numpy())
    s = made.turns
    moved = made.replace(
        turns=s.replace(
            row=s.row[order],
            turn=s.turn[order],
            anchor=[s.anchor[i] for i in order],
            reward=s.reward[order],
            valid=s.valid[order],
        )
    )
    assert torch.allclose(method(similarity=0.97).advantages(moved), one[order], atol=1e-12)
    assert not torch.allclose(one, method().advantages(made))


def test_unscorable_rows_open_no_cluster_and_unknown_observations_are_like_no_other():
    """a ~ b ~ c but not a ~ c: who comes first decides, so a row without a reward must not."""
    a, b, c = "abcdefghii", "abcdefghiz", "abcdefghzz"
    params = dict(similarity=0.9, step_advantage_w=1.0, gamma=0.0)
    scored = [(0, 1.0, [(b, 1.0, True)]), (0, 0.0, [(c, 0.0, True)])]
    without = advantages(batch(scored), **params)
    assert advantages(batch([(0, NAN, [(a, 1.0, True)]), *scored]), **params)[1:] == without == [1.0, -1.0]
    unknown = batch([(0, 1.0, [(None, 1.0, True)]), (0, 0.0, [(None, 0.0, True)])])
    for similarity in (None, 0.5):
        assert advantages(unknown, similarity=similarity) == [0.5, -0.5]  # A^E alone


def test_similarity_of_what_is_no_text_is_an_error():
    with pytest.raises(MethodError, match="of a turn is int. Let the environment give text, or set `similarity`"):
        advantages(batch([(0, 1.0, [(3, 0.0, True)])]), similarity=0.9)


# ---- properties


def chains(rewards_last, anchors):
    """Rollouts of one group with a reward at the last turn."""
    return batch(
        [
            (0, r, [(a, r if i == len(of) - 1 else 0.0, True) for i, a in enumerate(of)])
            for r, of in zip(rewards_last, anchors, strict=True)
        ]
    )


def test_without_the_step_term_it_is_grpo():
    anchors = [["s"] * n for n in (1, 3, 2, 4)]
    rollouts = chains([1.0, 0.0, 0.5, 0.25], anchors)
    for mode, scale in (("mean_std_norm", "group"), ("mean_norm", "none")):
        a = advantages(rollouts, step_advantage_w=0.0, statistics="rollouts", mode=mode)
        expected = grpo_advantages(rollouts, scale, eps=1e-6)[rollouts.turns.row]
        assert a == pytest.approx(expected.tolist(), rel=1e-12)


def test_different_observations_are_not_compared_and_equal_ones_all():
    rewards, anchors = [1.0, 0.0, 0.5], [["a", "b"], ["c", "d"], ["e", "f"]]
    different = chains(rewards, anchors)
    assert advantages(different) == advantages(different, step_advantage_w=0.0)
    same = chains(rewards, [["s", "s"]] * 3)
    g = torch.tensor([0.95, 1.0, 0.0, 0.0, 0.475, 0.5], dtype=torch.float64)
    episode = torch.tensor(advantages(same, step_advantage_w=0.0), dtype=torch.float64)
    assert advantages(same) == pytest.approx((episode + g - g.mean()).tolist())


def test_one_turn_episodes_double_the_advantage():
    rollouts = chains([1.0, 0.0, 0.0, 1.0], [["s"]] * 4)
    assert advantages(rollouts) == [1.0, -1.0, -1.0, 1.0]


def test_sums_over_groups_are_zero():
    rng = random.Random(2)
    rollouts = batch(
        [
            (i % 3, rng.random(), [(rng.choice("abc"), rng.random(), rng.random() > 0.2) for _ in range(1 + i % 4)])
            for i in range(12)
        ]
    )
    group = rollouts.group[rollouts.turns.row]
    for weight in (0.0, 1.0):
        a = method(step_advantage_w=weight).advantages(rollouts)
        sums = torch.zeros(3, dtype=torch.float64).index_add_(0, group, a)
        assert sums.tolist() == pytest.approx([0, 0, 0], abs=1e-12)


def test_the_same_observation_in_another_group_and_revisits():
    rollouts = batch([(0, 1.0, [("s", 0.0, True), ("s", 1.0, True)]), (1, 5.0, [("s", 0.0, True), ("t", 5.0, True)])])
    a = advantages(rollouts, gamma=0.5)
    assert a == [-0.25, 0.25, 0.0, 0.0]  # the revisited state of the first rollout, returns 0.5 and 1


@pytest.mark.parametrize(("gamma", "first"), [(0.0, 1.0), (1.0, 111.0)])
def test_discounts_zero_and_one(gamma, first):
    rollouts = batch(
        [(0, 0.0, [("s", 1.0, True), ("a", 10.0, True), ("b", 100.0, True)]), (0, 0.0, [("s", 0.0, True)])]
    )
    assert advantages(rollouts, gamma=gamma) == pytest.approx([first / 2, 0, 0, -first / 2])


def test_equal_returns_give_no_advantage_in_any_mode():
    for value in (9.025, 0.1, 1e6 / 3):
        for mode in ("mean_norm", "mean_std_norm"):
            a = advantages(chains([value] * 5, [["s", "t"]] * 5), mode=mode)
            assert max(map(abs, a)) < 1e-7


def test_an_invalid_action_pays_for_itself_alone():
    turns = [("a", 0.0, True), ("b", 0.0, False), ("c", 1.0, True)]
    rollouts = batch([(0, 1.0, turns), (0, 1.0, [(a, r, True) for a, r, _ in turns])])
    a = advantages(rollouts, step_advantage_w=0.0)
    assert a == pytest.approx([0.1 / 6, 0.1 / 6 - 0.1, *[0.1 / 6] * 4])
    step = [x - y for x, y in zip(advantages(rollouts), a, strict=True)]
    assert step == pytest.approx([0, -0.05, 0, 0, 0.05, 0])
    assert advantages(rollouts, invalid_action_penalty_coef=0.0) == [0.0] * 6


# ---- driver


def test_through_the_driver_advantages_logs_and_nothing_else(caplog):
    rollouts = batch(
        [
            (0, 1.0, [("s", NAN, True), ("a", NAN, True)]),
            (0, 0.0, [("s", NAN, True), ("b", NAN, False)]),
            (0, NAN, [("s", NAN, True)]),
            (1, 1.0, [("s", NAN, True)]),
        ]
    )
    stack = start_stack(method())
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        decision = one_step(stack, rollouts)
    assert decision.estimator == "gigpo" and not decision.uniform and decision.stays.all()
    episode = [1 - 0.475, 1 - 0.475, -0.475, -0.1 - 0.475]
    step = [0.475, 0.0, -0.475, 0.0]
    per_turn = [e + s for e, s in zip(episode, step, strict=True)]
    assert decision.advantages.tolist() == pytest.approx([a for a in [*per_turn, 0.0, 0.0] for _ in range(2)])
    assert decision.row_advantages.tolist() == pytest.approx([sum(per_turn[:2]) / 2, sum(per_turn[2:]) / 2, 0, 0])
    stats = combine([stack.metrics.take()])
    assert stats == pytest.approx(
        {
            "gigpo/compared": 2 / 5,
            "gigpo/states": 4.0,
            "gigpo/abs_episode": sum(map(abs, episode)) / 5,
            "gigpo/abs_step": 0.95 / 5,
        }
    )
    assert "a group has a single rollout or turn" in caplog.text and "its advantage is 0" in caplog.text
    assert "no two turns" not in caplog.text


def test_a_batch_without_repeated_states_warns(caplog):
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        one_step(start_stack(method()), chains([1.0, 0.0], [["a"], ["b"]]))
    assert "no two turns of a group began in the same state" in caplog.text


def test_without_turns_the_driver_refuses():
    with pytest.raises(MethodError, match="`gigpo` makes one advantage per turn, and this batch does not say"):
        one_step(start_stack(method()), make_rollouts([1.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 1.01),
        ("gamma", -0.1),
        ("step_advantage_w", -1),
        ("mode", "mean"),
        ("statistics", "steps"),
        ("single_group", "one"),
        ("similarity", 1.0),
        ("similarity", 0),
        ("invalid_action_penalty_coef", -0.1),
        ("eps", 0),
    ],
)
def test_parameters_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"Method `gigpo`: parameter `{name}`"):
        build_params(Gigpo.Params, {name: value}, "gigpo")
