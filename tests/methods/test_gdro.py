"""Prompt-GDRO and Rollout-GDRO (arXiv 2601.19280): bins, weights, the program against brute force, and the driver."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, Plan, PlanRow
from rl_plugins.methods._gdro.bins import remember
from rl_plugins.methods._gdro.weights import (
    code_weights,
    paper_weights,
    probabilities,
    scores,
    start_scores,
    update_scores,
)
from rl_plugins.methods.gdro_prompt import GdroPrompt
from rl_plugins.methods.gdro_rollout import GdroRollout, allocate, arm_probabilities, update_arms
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_tokens, one_step, start_stack

GOLDEN = Golden("gdro")
NAN = math.nan
EDGES = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9)


def gdro(cls: Any, group_size: int = 4, seed: int = 0, size: int = 16, **params: Any) -> tuple[MethodStack, Any]:
    method = cls(build_params(cls.Params, params, cls.name))
    return start_stack(method, seed=seed, run=make_run(dataset_size=size, group_size=group_size)), method


def seen(method: Any, rates: dict[int, float], visits: int = 10) -> None:
    """Gives these prompts a history with this rate."""
    for visit in range(visits):
        prompts = torch.tensor(list(rates))
        right = torch.tensor([visit < round(rate * visits) for rate in rates.values()])
        remember(method._history, method.state["history"], method.state["bin"], prompts, right, visit, method.params)


# ---- numbers of the authors' code


def numbered(case: Case) -> tuple[list[str], dict[str, int]]:
    names = sorted({name for step in case.inputs["steps"] for name in step["class_ids"]})
    return names, {name: i for i, name in enumerate(names)}


def check_arms(case: Case) -> None:
    p, inputs = case.params, case.inputs
    counts = {name: inputs["class_counts"][name] for name in inputs["class_counts"]}
    names, m = list(counts), list(counts.values())
    params = GdroRollout.Params(
        eta=p["eta_q"], gamma=p["gamma"], n_min=p["n_min"], n_max=p["n_max"], price_rate=p["dual_lr"]
    )
    arms = p["n_max"] - p["n_min"] + 1
    state: dict[str, Any] = {"arms": torch.zeros(len(names), arms, dtype=torch.float64), "price": 0.0}
    nbar = p["bar_n"]
    for step, expected in zip(inputs["steps"], case.expected["steps"], strict=True):
        before = arm_probabilities(state["arms"], p["eta_q"], p["gamma"]).numpy()
        n = allocate(before, m, round(nbar * sum(m)), p["n_min"], "first")
        told = [expected["chosen_n"][name] for name in names]
        of_n, of_told = (sum(math.log(before[b][k - p["n_min"]]) for b, k in enumerate(x)) for x in (n, told))
        assert of_n == pytest.approx(of_told, abs=1e-6)  # which of equal ones is told in tie_break_note
        assert sum(a * b for a, b in zip(m, n, strict=True)) == expected["total"]
        assert sum(a * b for a, b in zip(m, told, strict=True)) == expected["total"]
        assert state["price"] == pytest.approx(expected["mu_before"], abs=1e-9)
        ids, losses = step["expanded_class_ids"], step["per_sample_loss"]
        played = []
        for b, name in enumerate(names):
            own = [x for x, c in zip(losses, ids, strict=True) if c == name]
            assert len(own) == m[b] * told[b]
            played += [
                (0, b, told[b], float(nbar), sum(own[i * told[b] : (i + 1) * told[b]]), told[b]) for i in range(m[b])
            ]
        update_arms(state, played, params)
        assert state["price"] == pytest.approx(expected["mu_after"], abs=1e-9)
        after = arm_probabilities(state["arms"], p["eta_q"], p["gamma"])
        for b, name in enumerate(names):
            assert state["arms"][b].tolist() == pytest.approx(expected["arm_scores_after"][name], abs=1e-6)
            assert after[b].tolist() == pytest.approx(expected["probs_after"][name], abs=1e-6)
    _ = case.values.get("tie_break_note") and case["tie_break_note"]


def check_bins(case: Case) -> None:
    p, inputs = case.params, case.inputs
    edges = tuple(float(x) for x in p["passk_edges"].split(",")) if p.get("passk_edges") else ()
    given: dict[str, Any] = {"edges": edges, "hysteresis": p.get("passk_hysteresis", 0.0)}
    number = p["passk_num_bins"]
    if not edges:
        given["num_bins"] = number
    if "passk_exclude_extremes" in p:
        given["exclude_extremes"] = p["passk_exclude_extremes"]
    stack, method = gdro(GdroPrompt, history=p["passk_history_len"], **given)
    uids = list(inputs["classify_uids"])
    place = {uid: i for i, uid in enumerate(uids)}
    for step, (told, bins) in enumerate(zip(inputs["steps"], case.expected["bins"], strict=True)):
        rows = torch.tensor([place[uid] for uid in told["uids"]])
        rewards = [float(x) for x in told["any_correct"]]
        rollouts = make_rollouts(rewards, group_size=1, prompt_index=rows, batch=step)
        one_step(stack, rollouts)
        found = [method.bin_name(b).replace("extremes", "accbin_excl") for b in method.bins_of(torch.arange(len(uids)))]
        assert [name.replace("bin_", "accbin_") if name.startswith("bin") else name for name in found] == bins


def check_weights(case: Case) -> None:
    p = case.params
    names, number = numbered(case)
    case.params.must_be("debias_scores", True, False)
    form = "ema" if p["debias_scores_ema"] else "mean"
    beta = p.get("ema_beta", 0.1)
    zscore = p.get("use_zscore", False)
    share = p.get("loss_norm_by_class", False)
    state = start_scores(len(names))
    for step, expected in zip(case.inputs["steps"], case.expected["steps"], strict=True):
        bin = torch.tensor([number[name] for name in step["class_ids"]])
        score = scores(state, form, zscore)
        present = torch.bincount(bin, minlength=len(names)) > 0
        q = probabilities(score, present, p["eta_q"], p["gamma"])
        for name in expected["weights_used"]:
            assert float(q[number[name]]) == pytest.approx(expected["weights_used"][name], abs=1e-6)
        found = code_weights(score, bin, p["eta_q"], p["gamma"], p["max_class_weight"])
        assert found.tolist() == pytest.approx(list(expected["normalized_sample_weights"]), abs=2e-6)
        update_scores(state, bin, torch.tensor(step["per_sample_loss"], dtype=torch.float64), beta, share)
        for key, ours in (("ema_scores_after", "ema"), ("cumulative_after", "total")):
            if key in expected:
                for name in expected[key]:
                    assert float(state[ours][number[name]]) == pytest.approx(expected[key][name], abs=1e-6)


@GOLDEN.kind("steps")
def check_steps(case: Case) -> None:
    kind = (
        check_arms if "class_counts" in case.inputs else check_bins if "classify_uids" in case.inputs else check_weights
    )
    kind(case)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- bins


def bins_by_hand(outcomes: list[bool], history: int, edges: Any, margin: float, exclude: bool) -> list[int]:
    """Bin after each outcome, by a loop; -1 for the extremes."""
    cuts = list(edges) if edges else [k / 10 for k in range(1, 10)]
    old, found = None, []
    for t in range(1, len(outcomes) + 1):
        last = outcomes[max(0, t - history) if history else 0 : t]
        rate = sum(last) / len(last)
        if exclude and rate in (0.0, 1.0):
            found.append(-1)
            continue
        new = sum(rate >= c for c in cuts) if edges else min(int(rate * 10), 9)
        if old is None or (new > old and rate >= cuts[old] + margin) or (new < old and rate <= cuts[old - 1] - margin):
            old = new
        found.append(old)
    return found


@settings(max_examples=40, deadline=None)
@given(
    outcomes=st.lists(st.booleans(), min_size=1, max_size=25),
    history=st.sampled_from([0, 1, 4, 10]),
    edges=st.sampled_from([(), EDGES, (0.4, 0.75)]),
    margin=st.sampled_from([0.0, 0.03, 0.2]),
    exclude=st.booleans(),
)
def test_bins_are_those_of_a_loop(outcomes: list[bool], history: int, edges: Any, margin: float, exclude: bool) -> None:
    _, method = gdro(GdroPrompt, history=history, edges=edges, hysteresis=margin, exclude_extremes=exclude)
    found = []
    for batch, right in enumerate(outcomes):
        method.remember(make_rollouts([float(right), 0.0], group_size=2, prompt_index=[3, 3], batch=batch))
        found.append(int(method.bins_of(torch.tensor([3]))))
    last = method.params.count - 1
    assert [-1 if exclude and b == last else b for b in found] == bins_by_hand(
        outcomes, history, edges, margin, exclude
    )


def test_bins_move_both_ways_with_hysteresis() -> None:
    """The example of the specification: ten successes, then failures, ten equal bins."""
    _, method = gdro(GdroPrompt, edges=(), history=10)
    found = []
    for batch in range(20):
        method.remember(make_rollouts([float(batch < 10)], group_size=1, prompt_index=[0], batch=batch))
        found.append(int(method.bins_of(torch.tensor([0]))))
    assert found[9:] == [9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_unseen_prompts_are_in_the_lowest_bin_or_among_the_extremes() -> None:
    everyone = torch.arange(16)
    assert gdro(GdroPrompt)[1].bins_of(everyone).tolist() == [0] * 16
    _, method = gdro(GdroRollout, exclude_extremes=True)
    assert method.bins_of(everyone).tolist() == [7] * 16 and method.bin_name(7) == "extremes"
    assert method.bin_name(6) == "bin_6" and gdro(GdroPrompt)[1].bin_name(6) == "bin_6"


def test_an_outcome_is_pass_at_k_of_scored_rollouts_in_the_batch() -> None:
    """Prompt 0 twice in groups of its own, 1 only unscored, 2 below the threshold, a foreign one."""
    _, method = gdro(GdroPrompt, success_threshold=0.7)
    rewards = [0.0, 0.0, 0.7, NAN, NAN, NAN, 0.69, NAN, 1.0, 1.0]
    rollouts = make_rollouts(rewards, group_size=2, prompt_index=[0, 0, 0, 0, 1, 1, 2, 2, -1, -1], batch=5)
    method.remember(rollouts)
    rate = method._history.rate(method.state["history"], torch.arange(3)).tolist()
    assert rate[0] == 1.0 and math.isnan(rate[1]) and rate[2] == 0.0
    assert method._history.count(method.state["history"], torch.arange(3)).tolist() == [1, 0, 1]
    assert method._history.last(method.state["history"], torch.arange(3)).tolist() == [5, -1, 5]


# ---- weights


def weights_by_hand(steps: Any, bins: int, p: GdroPrompt.Params) -> list[list[float]]:
    """Weights of every batch, by loops. steps: (bin, reward) of every rollout."""
    visits: dict[int, list[float]] = {}
    ema: dict[int, float] = {}
    found = []
    for step in steps:
        score = {b: ema[b] if p.score == "ema" else sum(v) / len(v) for b, v in visits.items()}
        if p.zscore and score:
            mean = sum(score.values()) / len(score)
            std = max(1e-3, math.sqrt(sum((x - mean) ** 2 for x in score.values()) / len(score)))
            score = {b: max(-3.0, min(3.0, (x - mean) / std)) for b, x in score.items()}
        s = [score.get(b, 0.0) for b in range(bins)]
        present = {b for b, _ in step}
        if p.weight_form == "code":
            total = sum(math.exp(p.eta * s[b]) for b in present)
            q = {b: (1 - p.gamma) * math.exp(p.eta * s[b]) / total + p.gamma / len(present) for b in present}
            w = [min(q[b], p.largest_weight) for b, _ in step]
            mean = sum(w) / len(w)
            w = [min(x / mean, p.largest_weight) for x in w]
        else:
            clip = math.inf if p.score_clip is None else p.score_clip
            w = [min(math.exp(p.eta * max(-clip, min(clip, s[b]))), p.largest_weight) for b, _ in step]
        found.append(w)
        scored = [(b, 1 - r) for b, r in step if not math.isnan(r)]
        for b in sorted({b for b, _ in scored}):
            own = [x for c, x in scored if c == b]
            mean = sum(own) / len(own)
            if p.norm_by_share:
                mean /= len(own) / len(scored)
            ema[b] = mean if b not in visits else (1 - p.score_beta) * ema[b] + p.score_beta * mean
            visits.setdefault(b, []).append(mean)
    return found


PARAM_SETS = (
    {},
    {"norm_by_share": False},
    {"score": "mean"},
    {"zscore": True, "eta": 1.2},
    {"gamma": 0.4},
    {"largest_weight": 1.1},
    {"weight_form": "paper"},
    {"weight_form": "paper", "score_clip": 0.8, "largest_weight": 1.5},
    {"score_beta": 0.7},
    {"exclude_extremes": True},
)


@pytest.mark.parametrize("params", PARAM_SETS, ids=str)
def test_advantages_are_those_of_a_loop(params: dict[str, Any]) -> None:
    """Prompts with known rates, four batches of rewards, the weights of the real method against the loop."""
    stack, method = gdro(GdroPrompt, history=0, hysteresis=0.0, **params)
    rates = {0: 0.0, 1: 0.15, 2: 0.3, 3: 0.5, 4: 0.7, 5: 0.85, 6: 0.95, 7: 1.0}
    seen(method, rates, visits=1000)  # so many that a few more visits move no bin
    rng, steps, shaped = np.random.default_rng(0), [], []
    for batch in range(4):
        prompts = rng.choice(8, 5, replace=False).repeat(4)
        rewards = (rng.random(20) < 0.5).astype(float)
        rewards[rng.integers(20)] = NAN
        bins = method.bins_of(torch.from_numpy(prompts)).tolist()
        steps.append(list(zip(bins, rewards.tolist(), strict=True)))
        rollouts = make_rollouts(rewards, prompt_index=prompts, batch=batch, lengths=rng.integers(1, 4, 20).tolist())
        tokens = make_tokens(rollouts)
        shaped.append(stack.call("shape", method, rollouts, tokens).row_factor)
        stack.call("observe", method, rollouts, tokens, {})
    wanted = weights_by_hand(steps, method.params.count, method.params)
    assert any(max(w) - min(w) > 0.02 for w in wanted)
    for factor, w in zip(shaped, wanted, strict=True):
        assert factor.tolist() == pytest.approx(w, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_properties_of_the_weights(data: st.DataObject) -> None:
    bins = data.draw(st.integers(1, 6))
    score = torch.tensor(data.draw(st.lists(st.floats(-5, 5), min_size=bins, max_size=bins)), dtype=torch.float64)
    bin = torch.tensor(data.draw(st.lists(st.integers(0, bins - 1), min_size=1, max_size=30)))
    eta, gamma = data.draw(st.floats(0, 2)), data.draw(st.floats(0, 1))
    weight = code_weights(score, bin, eta, gamma, 1e9)
    assert float(weight.mean()) == pytest.approx(1) and bool((weight >= 0).all())
    assert float(code_weights(score, bin, eta, gamma, 1.3).max()) <= 1.3
    assert code_weights(score, bin, 0.0, gamma, 15.0).tolist() == pytest.approx([1.0] * len(bin))
    assert code_weights(score, bin, eta, 1.0, 15.0).tolist() == pytest.approx([1.0] * len(bin))
    assert paper_weights(score, bin, 0.0, None, 15.0).tolist() == [1.0] * len(bin)
    order = torch.randperm(len(bin), generator=torch.Generator().manual_seed(0))
    assert code_weights(score, bin[order], eta, gamma, 1e9).tolist() == pytest.approx(weight[order].tolist())
    assert len(code_weights(score, bin[:0], eta, gamma, 1.0)) == 0


def test_score_does_not_depend_on_how_often_a_bin_occurs_without_norm_by_share() -> None:
    loss = torch.tensor([0.2, 0.8, 0.5], dtype=torch.float64)
    one, two = start_scores(2), start_scores(2)
    update_scores(one, torch.tensor([0, 0, 1]), loss, 0.1, False)
    update_scores(two, torch.tensor([0, 0, 0, 0, 1]), loss[[0, 1, 0, 1, 2]], 0.1, False)
    assert one["ema"].tolist() == pytest.approx([0.5, 0.5]) == two["ema"].tolist()
    shared = start_scores(2)
    update_scores(shared, torch.tensor([0, 0, 1]), loss, 0.1, True)
    assert shared["ema"].tolist() == pytest.approx([0.75, 1.5], rel=1e-15)  # in float64


def test_losses_that_are_not_there_change_nothing() -> None:
    state = start_scores(3)
    update_scores(state, torch.tensor([1, 1, 2]), torch.tensor([0.4, NAN, NAN], dtype=torch.float64), 0.1, True)
    assert state["ema"].tolist() == pytest.approx([0, 0.4, 0]) and state["visits"].tolist() == [0, 1, 0]
    update_scores(state, torch.tensor([1, 2]), torch.tensor([NAN, NAN], dtype=torch.float64), 0.1, True)
    assert state["ema"].tolist() == pytest.approx([0, 0.4, 0]) and state["visits"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("params", [{"eta": 0.0}, {"gamma": 1.0}, {"edges": (), "num_bins": 1}], ids=str)
def test_neutral_weights_are_grpo(params: dict[str, Any]) -> None:
    stack, method = gdro(GdroPrompt, **params)
    seen(method, {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.3})
    plain = start_stack()
    for batch in range(3):
        rewards = np.random.default_rng(batch).random(16)
        rollouts = make_rollouts(rewards, batch=batch)
        decided, wanted = one_step(stack, rollouts), one_step(plain, rollouts)
        assert decided.row_advantages is not None and wanted.row_advantages is not None
        assert decided.row_advantages.tolist() == pytest.approx(wanted.row_advantages.tolist())


def test_through_the_driver_a_hard_bin_counts_more() -> None:
    stack, method = gdro(GdroPrompt, history=4, eta=2.0)
    rewards = [1.0, 0, 0, 0, 1, 1, 1, 0]  # prompt 0 fails more; both passed once, then prompt 2 never
    for batch in range(3):
        one_step(stack, make_rollouts([0.0, 0, 0, 0, 1, 1, 1, 0], prompt_index=[0] * 4 + [1] * 4, batch=batch))
        stack.metrics.take()
    decision = one_step(stack, make_rollouts(rewards, prompt_index=[0] * 4 + [1] * 4, batch=3))
    logged = combine([stack.metrics.take()])
    assert logged["gdro_prompt/weight/bin_0"] > 1 > logged["gdro_prompt/weight/bin_6"] > 0
    assert logged["gdro_prompt/spread"] == pytest.approx(
        logged["gdro_prompt/weight/bin_0"] - logged["gdro_prompt/weight/bin_6"]
    )
    assert logged["gdro_prompt/largest"] == logged["gdro_prompt/weight/bin_0"]
    assert logged["gdro_prompt/share/bin_0"] == 0.5
    plain = one_step(start_stack(), make_rollouts(rewards)).row_advantages
    w = [logged["gdro_prompt/weight/bin_0"]] * 4 + [logged["gdro_prompt/weight/bin_6"]] * 4
    assert plain is not None and decision.row_advantages is not None
    assert decision.row_advantages.tolist() == pytest.approx([a * x for a, x in zip(plain.tolist(), w, strict=True)])


def test_foreign_prompts_are_not_weighed() -> None:
    stack, method = gdro(GdroPrompt, history=0)
    update_scores(
        method.state["scores"], torch.tensor([0, 6]), torch.tensor([2.0, 0.0], dtype=torch.float64), 0.1, False
    )
    seen(method, {1: 1.0})
    rollouts = make_rollouts([1.0, 0] * 6, prompt_index=[0] * 4 + [1] * 4 + [-1] * 4)
    factor = stack.call("shape", method, rollouts, make_tokens(rollouts)).row_factor
    own, foreign = factor[:8], factor[8:]
    assert set(foreign.tolist()) == {1.0} and 1.0 not in own.tolist()
    only = make_rollouts([1.0, 0, 0, 0], prompt_index=[-1] * 4)
    assert stack.call("shape", method, only, make_tokens(only)) is None


def test_rollouts_of_several_rows_count_once() -> None:
    stack, method = gdro(GdroPrompt, norm_by_share=False)
    rollout, index = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0])
    rollouts = make_rollouts([1.0, 1, 1, 0], [0] * 4, rollout=rollout, index=index)
    one_step(stack, rollouts)
    assert float(method.state["scores"]["ema"][0]) == 0.5


# ---- the program


def every_choice(m: list[int], arms: int, n_min: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(n_min, n_min + arms), repeat=len(m)))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_allocation_is_the_best_of_all(data: st.DataObject) -> None:
    bins, arms = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    n_min = data.draw(st.integers(2, 4))
    m = data.draw(st.lists(st.integers(1, 7), min_size=bins, max_size=bins))
    score = data.draw(
        st.lists(st.lists(st.integers(-3, 3), min_size=arms, max_size=arms), min_size=bins, max_size=bins)
    )
    p = arm_probabilities(torch.tensor(score, dtype=torch.float64), 0.65, 0.01).numpy()
    total = data.draw(st.integers(n_min * sum(m), (n_min + arms) * sum(m)))
    tie = data.draw(st.sampled_from(["uniform", "first"]))
    nbar = total / sum(m)
    totals = {c: sum(a * b for a, b in zip(m, c, strict=True)) for c in every_choice(m, arms, n_min)}
    nearest = max(t for t in totals.values() if t <= total)

    def value(c: Any) -> float:
        penalty = 1e-9 if tie == "uniform" else 0.0
        return sum(math.log(p[b][n - n_min]) - penalty * m[b] * (n - nbar) ** 2 for b, n in enumerate(c))

    found = allocate(p, m, total, n_min, tie)
    assert totals[tuple(found)] == nearest
    best = max(value(c) for c, t in totals.items() if t == nearest)
    assert value(found) == pytest.approx(best, abs=1e-12)


def test_ties() -> None:
    equal = np.full((3, 11), 1 / 11)
    assert allocate(equal, [1, 1, 1], 12, 2, "first") == [2, 2, 8]
    assert allocate(equal, [1, 1, 1], 12, 2) == [4, 4, 4]
    assert allocate(np.full((4, 5), 0.2), [3, 3, 3, 3], 48, 2, "first") == [2, 2, 6, 6]
    assert allocate(np.full((2, 11), 1 / 11), [7, 1], 32, 2, "first") == [3, 11]
    assert sorted(allocate(np.full((2, 3), 1 / 3), [2, 2], 15, 2)) == [3, 4]  # 14, the nearest below 15
    assert allocate(np.full((1, 2), 0.5), [3], 100, 2) == [3]


def test_512_prompts_are_allotted() -> None:
    rng = np.random.default_rng(0)
    p, m = rng.dirichlet(np.ones(23), 10), rng.multinomial(512 - 10, np.ones(10) / 10) + 1
    n = allocate(p, m.tolist(), 512 * 8, 2)
    assert int((m * n).sum()) == 512 * 8 and min(n) >= 2 and max(n) <= 24


# ---- arms


def test_arms_and_price_by_hand() -> None:
    for sign, factor in (("code", 1), ("paper", -1)):
        params = GdroRollout.Params(n_min=2, n_max=6, price_rate=0.1, arm_sign=sign)
        state: dict[str, Any] = {"arms": torch.zeros(2, 5, dtype=torch.float64), "price": 0.5}
        played = [(0, 0, 3, 4.0, 2.0, 3), (1, 0, 3, 4.0, 1.0, 2), (2, 1, 6, 4.0, 3.0, 6), (3, 1, 6, 4.0, 0.0, 0)]
        update_arms(state, played, params)
        wanted = np.zeros((2, 5))
        wanted[0, 1] = factor * 3 / 5 - 0.5 * (3 - 4)
        wanted[1, 4] = factor * 3 / 6 - 0.5 * (6 - 4)
        assert state["arms"].numpy() == pytest.approx(wanted)
        assert state["price"] == pytest.approx(0.5 + 0.1 * ((3 + 3 + 6 + 6) / 4 - 4))
    update_arms(state, [(0, 0, 2, 4.0, 0.0, 0)], params)  # no rollout has a reward
    assert state["arms"].numpy() == pytest.approx(wanted)
    update_arms(state, [], params)


def planned(method: Any, prompts: list[int], group_size: int = 4) -> list[int]:
    rows = tuple(PlanRow(p, g, group_size) for g, p in enumerate(prompts))
    plan = method.plan(Plan(rows, group_size, group_size * len(rows)))
    return [row.n for row in (plan.rows if plan else rows)]


@pytest.mark.parametrize(("baseline", "sign"), [("batch", "code"), ("none", "paper"), ("none", "code")])
def test_a_batch_after_the_other_is_that_of_a_loop(baseline: str, sign: str) -> None:
    """Three batches through the driver; scores, price and plans by brute force."""
    stack, method = gdro(GdroRollout, n_max=6, history=0, hysteresis=0.0, baseline=baseline, arm_sign=sign)
    seen(method, {i: (0.0, 0.5, 1.0)[i % 3] for i in range(12)}, visits=1000)
    z, price, sizes = {(b, n): 0.0 for b in (0, 3, 6) for n in range(2, 7)}, 0.0, []
    for batch in range(4):
        prompts = [0, 1, 2, 3, 4, 5, 6, 7]  # bins 0 3 6 0 3 6 0 3
        plan = first_plan(stack, prompts, 4, 32, 16)
        bins = [(0, 3, 6)[i % 3] for i in prompts]
        p = {}
        for b in (0, 3, 6):
            weight = {n: math.exp(0.65 * z[b, n]) for n in range(2, 7)}
            p |= {(b, n): 0.99 * w / sum(weight.values()) + 0.01 / 5 for n, w in weight.items()}
        m = {0: 3, 3: 3, 6: 2}
        choices = [c for c in itertools.product(range(2, 7), repeat=3) if 3 * c[0] + 3 * c[1] + 2 * c[2] == 32]
        values = [
            sum(math.log(p[b, n]) - 1e-9 * m[b] * (n - 4) ** 2 for b, n in zip((0, 3, 6), c, strict=True))
            for c in choices
        ]
        best = dict(zip((0, 3, 6), choices[int(np.argmax(values))], strict=True))
        assert [row.n for row in plan.rows] == [best[b] for b in bins]
        sizes.append(tuple(best.values()))
        group = np.repeat(range(8), [row.n for row in plan.rows])
        rewards = (np.random.default_rng(batch).random(32) < 0.5).astype(float)
        rewards[3] = NAN
        one_step(stack, make_rollouts(rewards, group.tolist(), prompt_index=[prompts[g] for g in group], batch=batch))
        of_bin = np.array([bins[g] for g in group])
        for b, n in best.items():
            loss = np.nanmean(1 - rewards[of_bin == b]) - (np.nanmean(1 - rewards) if baseline == "batch" else 0)
            z[b, n] += (loss if sign == "code" else -loss) - price * (n - 4)
        price += 0.05 * (sum(m[b] * n for b, n in best.items()) / 8 - 4)
        logged = combine([stack.metrics.take()])
        assert logged["gdro_rollout/shadow_price"] == pytest.approx(price)
        assert logged["gdro_rollout/most"] == max(best.values()) and logged["gdro_rollout/least"] == min(best.values())
        moved = sum(m[b] * max(0, n - 4) for b, n in best.items()) / 32
        assert logged["gdro_rollout/moved"] == pytest.approx(moved) and logged["gdro_rollout/unmet"] == 0
        assert logged["gdro_rollout/rollouts/bin_3"] == best[3]
        for (b, n), score in z.items():
            assert float(method.state["arms"][b, n - 2]) == pytest.approx(score)
    # losses are never below 0: without a baseline the first arms only gain
    assert (len(set(sizes)) == 1) == ((baseline, sign) == ("none", "code"))


def test_neutral_plans_are_the_hosts() -> None:
    rates = {i: i / 15 for i in range(16)}
    for params in ({}, {"eta": 0.0}, {"edges": (), "num_bins": 1}):
        stack, method = gdro(GdroRollout, **params)
        seen(method, rates)
        if params:
            method.state["arms"] = torch.randn(method.state["arms"].shape, dtype=torch.float64)
        assert planned(method, list(range(8))) == [4] * 8
    stack, method = gdro(GdroRollout, tie="first")
    seen(method, rates)
    assert planned(method, list(range(8))) != [4] * 8


def test_rows_of_others_stay_as_planned() -> None:
    _, method = gdro(GdroRollout, history=0)
    seen(method, {0: 0.0, 1: 1.0})
    method.state["arms"][0, 4] = 9.0
    given = (Completion((1,)),)
    rows = (
        PlanRow(0, 0, 4, edit={"prompt": "x"}, payload="p"),
        PlanRow(1, 1, 4, spare=1),
        PlanRow(2, 2, 4, given=given),
        PlanRow(-1, 3, 4, edit={"prompt": "y"}),
        PlanRow(3, 4, 0, spare=2),
    )
    plan = method.plan(Plan(rows, 4, 16))
    assert plan.rows == (rows[0].replace(n=6), rows[1].replace(n=2), *rows[2:])
    assert method.plan(Plan(rows[2:], 4, 16)) is None


def test_a_total_that_cannot_be_met_moves_the_price() -> None:
    """Groups of 4 and 3 in one bin have 7 rollouts: two groups of 3 are the nearest below."""
    stack, method = gdro(GdroRollout, price_rate=0.2)
    plan = stack.call("plan", method, Plan((PlanRow(0, 0, 4), PlanRow(1, 1, 3)), 4, 16))
    assert [row.n for row in plan.rows] == [3, 3]
    rollouts = make_rollouts([0.0] * 6, group_size=3)
    one_step(stack, rollouts)
    logged = combine([stack.metrics.take()])
    assert logged["gdro_rollout/unmet"] == 1 and logged["gdro_rollout/shadow_price"] == pytest.approx(-0.1)
    assert method.state["price"] == pytest.approx(0.2 * (3 - 3.5))


def test_a_total_too_small_is_refused() -> None:
    _, method = gdro(GdroRollout, n_min=3)
    with pytest.raises(MethodError, match="8 rollouts for 4 prompts are fewer than `n_min` = 3 each"):
        method.plan(make_plan(4, 2))


def test_group_size_must_lie_between_the_limits() -> None:
    for params in ({"n_min": 4}, {"n_max": 4}):
        with pytest.raises(ConfigError, match="the group size is 4"):
            gdro(GdroRollout, **params)


@pytest.mark.parametrize("cls", [GdroPrompt, GdroRollout])
def test_state_survives(cls: Any, tmp_path: Path) -> None:
    def batch(stack: MethodStack, step: int) -> Any:
        plan = first_plan(stack, [(5 * step + i) % 16 for i in range(6)], 4, 24, 16)
        group = np.repeat(range(6), [row.n for row in plan.rows])
        index = np.array([plan.rows[g].prompt_index for g in group])
        rewards = (np.random.default_rng(step).random(24) < index / 16).astype(float)
        decision = one_step(stack, make_rollouts(rewards, group.tolist(), prompt_index=index, batch=step))
        assert decision.row_advantages is not None
        return [row.n for row in plan.rows], decision.row_advantages.tolist()

    params = {"history": 3, "eta": 3.0}
    stack, _ = gdro(cls, **params)
    for step in range(5):
        batch(stack, step)
    save_state(tmp_path, stack.state_dict("d"))
    other, _ = gdro(cls, **params)
    other.load_state_dict(load_state(tmp_path), "d")
    later = [batch(stack, step) for step in range(5, 9)]
    assert later == [batch(other, step) for step in range(5, 9)]
    fresh, _ = gdro(cls, **params)
    assert later != [batch(fresh, step) for step in range(5, 9)]


def test_a_second_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="how many rollouts prompts get"):
        build_stack(["v0", "gdro_rollout"], {})
    build_stack(["v0", "gdro_prompt"], {})


@pytest.mark.parametrize(
    ("cls", "params", "text"),
    [
        (GdroPrompt, {"edges": (0.4, 0.2)}, "edges must ascend"),
        (GdroPrompt, {"edges": (0.0,)}, "`edges`"),
        (GdroPrompt, {"num_bins": 5}, "`num_bins` has no effect"),
        (GdroPrompt, {"weight_form": "paper", "gamma": 0.2}, "`gamma` has no effect"),
        (GdroPrompt, {"score_clip": 2.0}, "`score_clip` has no effect"),
        (GdroPrompt, {"signal": "loss"}, "no parameter `signal`"),
        (GdroRollout, {"n_min": 1}, "`n_min` is 1"),
        (GdroRollout, {"n_min": 6, "n_max": 4}, "`n_max` is 4, below `n_min` = 6"),
    ],
)
def test_parameters_that_cannot_be(cls: Any, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_params(cls.Params, params, cls.name)
    assert text in str(caught.value)
