"""ARRoL (arXiv 2603.24840): who survives, the head and its calibration, the program, and the way back to the driver."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.groups import Groups
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Prompt
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.methods.arrol import Arrol, Calibrator, balanced, features_of, quality
from rl_plugins.methods.arrol.head import fit, with_prompt
from rl_plugins.methods.arrol.survivors import Rule, count_to_keep, draw, extremes, inclusion, shift_for, survival
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_tokens, one_step, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

LIMIT = 4  # detect_tokens in most tests
PROBABILITIES = st.lists(st.floats(0, 1), min_size=1, max_size=16)


def arrol(**params: Any) -> Arrol:
    values = {"detect_tokens": LIMIT, "cold_start": 0, "independent": False} | params
    return Arrol(build_params(Arrol.Params, acting(Arrol.Params, values), "arrol"))


def step_payload(features: int = 14, shift: float = 0.0, rates: Any = (0.2, 0.8)) -> dict[str, Any]:
    """A head that says q > 0.5 where the first feature (the mean log-prob) is above that of the prompt."""
    w1 = torch.zeros(features, 1, dtype=torch.float64)
    w1[0, 0], w1[features // 2, 0] = 50.0, -50.0
    head = {"w1": w1, "b1": torch.tensor([10.0]), "w2": torch.tensor([1.0]), "b2": torch.tensor(-10.0)}
    head |= {"mean": torch.zeros(features), "scale": torch.ones(features)}
    return {"head": {k: v.double().tolist() for k, v in head.items()}, "rates": list(rates), "shift": shift}


def model(text: str) -> dict[str, float]:
    """The first token decides: after g comes x nearly always, after b x and y alike; 12 tokens in all."""
    said = text.split(">")[-1]
    if not said:
        return {"g": 0.5, "b": 0.5}
    if len(said) == 12:
        return {EOS: 1.0}
    return {"x": 0.95, "y": 0.05} if said[0] == "g" else {"x": 0.5, "y": 0.5}


def prompt_of(engine: TableEngine, n: int = 8, payload: Any = None, **changes: Any) -> Prompt:
    return make_prompt(engine.chat, "p", n=n, payload={"arrol": payload} if payload else None, **changes)


def true_logprobs(engine: TableEngine, row: Any) -> list[float]:
    return [
        math.log(engine.probabilities(row.prompt + row.tokens[:i])[t]) if k == Kind.SAMPLED else math.nan
        for i, (t, k) in enumerate(zip(row.tokens, row.kinds, strict=True))
    ]


def check_books(engine: TableEngine, rollouts: Any) -> None:
    for (row,) in rollouts:
        assert len(row.tokens) == len(row.kinds) == len(row.logprobs) == len(row.versions)
        assert row.logprobs == pytest.approx(true_logprobs(engine, row), nan_ok=True)


# ---- who survives


@settings(max_examples=40, deadline=None)
@given(q=PROBABILITIES, keep=st.floats(0.05, 1), rho=st.floats(0.05, 0.95))
def test_balanced_equals_the_loop_and_reaches_both_targets(q: list[float], keep: float, rho: float) -> None:
    mean = min(max(math.fsum(q) / len(q), 1e-6), 1 - 1e-6)
    a, b = min(1, keep * rho / mean), min(1, keep * (1 - rho) / (1 - mean))
    s = balanced(np.array(q), keep, rho)
    assert s.tolist() == pytest.approx([p * a + (1 - p) * b for p in q], abs=1e-12)
    assert ((s >= 0) & (s <= 1)).all()
    if a < 1 and b < 1 and 1e-6 < mean < 1 - 1e-6:
        assert s.sum() == pytest.approx(keep * len(q))
        right = [p * a for p in q]  # right rollouts are kept with a
        assert math.fsum(right) == pytest.approx(rho * keep * len(q))


def test_balanced_thins_what_there_is_too_much_of() -> None:
    easy, hard = np.array([0.5, 0.9, 0.8]), np.array([0.1, 0.3, 0.2])
    assert (np.diff(balanced(easy, 0.5, 0.5)[np.argsort(easy)]) < 0).all()
    assert (np.diff(balanced(hard, 0.5, 0.5)[np.argsort(hard)]) > 0).all()
    assert balanced(np.array([0.2, 0.8]), 0.5, 0.5).tolist() == pytest.approx([0.5, 0.5])
    for sure in (0.0, 1.0):
        assert np.isfinite(balanced(np.full(4, sure), 0.5, 0.5)).all()


@settings(max_examples=40, deadline=None)
@given(q=PROBABILITIES, keep=st.floats(0.15, 0.85), rho=st.floats(0.05, 0.95), strength=st.floats(0, 2))
def test_the_papers_rule_keeps_the_share_it_should(q: list[float], keep: float, rho: float, strength: float) -> None:
    rule = Rule(keep, rho, strength, 0.1, 0.9)
    weights = np.linspace(1, 3, len(q))
    shift = shift_for(np.array(q), weights, rule)
    p = survival(np.array(q), rule, shift)
    assert p.tolist() == pytest.approx([min(max(keep + shift + strength * (rho - x), 0.1), 0.9) for x in q], abs=1e-12)
    assert float(np.average(p, weights=weights)) == pytest.approx(keep, abs=1e-9)
    assert (np.diff(p[np.argsort(q, kind="stable")]) <= 1e-12).all()  # the likelier right, the less likely to stay


def test_the_papers_rule_with_the_numbers_of_its_example() -> None:
    rule = Rule(0.3, 0.6, 0.5, 0.05, 0.9)
    assert survival(np.array([0.4, 0.0, 1.0]), rule, 0.02).tolist() == pytest.approx([0.42, 0.62, 0.12])


@settings(max_examples=40, deadline=None)
@given(q=st.lists(st.floats(0.01, 1), min_size=1, max_size=16), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_exactly_k_are_drawn(q: list[float], share: float, seed: int) -> None:
    k = round(share * len(q))
    pi = inclusion(np.array(q), k)
    assert pi.sum() == pytest.approx(k) and (pi <= 1 + 1e-12).all() and (pi >= 0).all()
    assert draw(pi, np.random.default_rng(seed)).sum() == k
    assert (np.diff(pi[np.argsort(q, kind="stable")]) >= -1e-12).all()


def test_each_is_drawn_with_its_probability_and_the_number_is_rounded() -> None:
    pi = np.array([0.1, 0.9, 0.5, 0.5, 0.3])
    drawn = np.array([draw(pi, np.random.default_rng(i)) for i in range(4000)])
    assert drawn.mean(0) == pytest.approx(pi, abs=0.03)
    assert set(drawn.sum(1)) == {2, 3}
    assert draw(np.array([]), np.random.default_rng(0)).shape == (0,)


def test_extremes_and_counts() -> None:
    q = np.array([0.2, 0.9, 0.5, 0.1, 0.7, 0.5])
    assert extremes(q, 3, 0.5).tolist() == [False, True, False, True, True, False]  # halves up: two best, one worst
    assert extremes(q, 2, 0.1).tolist() == [True, False, False, True, False, False]
    assert [count_to_keep(n, 0.5, 2) for n in (1, 2, 3, 5, 6, 7)] == [1, 2, 2, 3, 3, 4]
    assert count_to_keep(30, 0.1, 0) == 3 and count_to_keep(4, 0.5, -3) == 2 and count_to_keep(4, 1.0, 0) == 4


def test_perfect_scores_of_a_balanced_group_leave_half_and_half_on_average() -> None:
    q = np.array([0.999] * 8 + [0.001] * 8)
    drawn = np.array([draw(inclusion(balanced(q, 0.5, 0.5), 8), np.random.default_rng(i)) for i in range(500)])
    assert drawn.sum(1).tolist() == [8] * 500
    assert drawn[:, :8].sum(1).mean() == pytest.approx(4, abs=0.2)
    easy = np.array([0.999] * 12 + [0.001] * 4)
    drawn = np.array([draw(inclusion(balanced(easy, 0.5, 0.5), 8), np.random.default_rng(i)) for i in range(500)])
    assert drawn[:, 12:].sum(1).mean() == pytest.approx(4, abs=0.1)  # every wrong one stays
    chosen = extremes(q, 8, 0.5)
    assert chosen[:8].sum() == chosen[8:].sum() == 4


# ---- head, calibration, votes


def test_features_equal_the_loop() -> None:
    x = [-0.05, -2.0, -0.5, -30.0, -0.01]
    found = features_of(x, (), 4, False)
    cut = [-0.05, -2.0, -0.5, -20.0]
    mean = sum(cut) / 4
    assert found == pytest.approx(
        [mean, math.sqrt(sum((v - mean) ** 2 for v in cut) / 4), -20.0, -20.0, 0.25, -20.0 - mean, 1.0]
    )
    assert features_of([], (), 4, False) == [0.0] * 7 and features_of([], (), 4, True) == [0.0] * 10
    top = [((1, math.log(0.5)), (2, math.log(0.25))), ((1, 0.0),)]
    entropy = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)
    assert features_of([-1.0, 0.0], top, 4, True)[7:] == pytest.approx(
        [entropy / 2, entropy, (math.log(2) + 20) / 2], abs=1e-9
    )
    assert np.isfinite(features_of([math.nan, -math.inf], (), 4, True)).all()
    assert with_prompt([[1.0, 2.0], [3.0, 4.0]]) == [[1, 2, 2, 3], [3, 4, 2, 3]]


def test_calibrator_equals_the_formula() -> None:
    scores, labels, weights = [0.1, 0.3, 0.3, 0.9, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 2, 1, 1, 3, 1]
    found = Calibrator.fitted(*(torch.tensor(v, dtype=torch.float64) for v in (scores, labels, weights)), bins=4)
    of = [min(int(4 * s), 3) for s in scores]
    for b in range(4):
        plus = sum(w * y for w, y, i in zip(weights, labels, of, strict=True) if i == b)
        minus = sum(w * (1 - y) for w, y, i in zip(weights, labels, of, strict=True) if i == b)
        right, wrong = (plus + 1) / (6 + 4), (minus + 1) / (3 + 4)
        prior = 6 / 9
        assert found.rates[b] == pytest.approx(prior * right / (prior * right + (1 - prior) * wrong))
    assert found([0.0, 0.26, 1.0]).tolist() == [found.rates[0], found.rates[1], found.rates[3]]


def test_the_head_learns_and_needs_no_global_generator() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(400, 3)) * [1.0, 100.0, 0.0])
    y = (x[:, 0] + x[:, 1] / 100 > 0).double()
    before = torch.random.get_rng_state()
    head, _ = fit(None, None, x, y, torch.ones(400).double(), width=16, steps=60, learning_rate=0.03, rng=rng)
    assert torch.equal(before, torch.random.get_rng_state())
    assert ((quality(head, x) > 0.5) == (y > 0)).double().mean() > 0.93
    assert torch.equal(quality({k: v.tolist() for k, v in head.items()}, x.tolist()), quality(head, x))
    flipped, _ = fit(
        None, None, x, y, y + 1e-9, width=16, steps=60, learning_rate=0.03, rng=rng
    )  # only right ones count
    assert float(quality(flipped, x).mean()) > 0.8


def test_the_optimizer_goes_on_where_it_stood() -> None:
    """Two fits of 15 steps are one of 30; an optimizer that begins anew takes other steps."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(50, 3)))
    data = (x, (x[:, 0] > 0).double(), torch.ones(50).double())
    start = fit(None, None, *data, width=8, steps=1, learning_rate=0.03, rng=rng)
    whole, _ = fit(*start, *data, width=8, steps=30, learning_rate=0.03, rng=rng)
    half = fit(*start, *data, width=8, steps=15, learning_rate=0.03, rng=rng)
    parts, moments = fit(*half, *data, width=8, steps=15, learning_rate=0.03, rng=rng)
    anew, _ = fit(half[0], None, *data, width=8, steps=15, learning_rate=0.03, rng=rng)
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    assert float(moments["w1"]["step"]) == 31
    assert max(float((whole[k] - anew[k]).abs().max()) for k in whole) > 1e-3
    method = arrol()
    stack = start_stack(method)
    feed(stack, 0)
    feed(stack, 1)
    assert float(method.state["moments"]["b2"]["step"]) == 2 * method.params.fit_steps


# ---- the paper's vote over answers by the head's scores, which nothing in the package takes


def rank_weights(scores: Sequence[float]) -> list[float]:
    """The paper's weights of votes: 1 for the best score, 0 for the worst, linear in the rank between; equal scores
    share the mean of their ranks. One score alone: 1."""
    rank = Groups(torch.zeros(len(scores), dtype=torch.int64), count=1).rank(torch.tensor(list(scores)).double())
    return [1.0] * len(scores) if len(scores) < 2 else ((rank - 1) / (len(scores) - 1)).tolist()


def vote(answers: Sequence[Hashable], scores: Sequence[float]) -> Hashable:
    """The answer with the largest sum of scores; of equal ones the first. Rollouts without an answer (None) or with a
    score of NaN do not vote; None without any vote.

    Args:
        answers: of each rollout.
        scores: its quality, or `rank_weights` of it (paper); equal numbers make it a majority vote.
    """
    total: dict[Hashable, float] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None and not math.isnan(score):
            total[answer] = total.get(answer, 0.0) + float(score)
    return max(total, key=total.__getitem__, default=None)


def test_votes() -> None:
    assert vote(["a", "b", "b", None], [0.9, 0.3, 0.4, 5.0]) == "a"
    assert vote(["a", "b", "b"], [1.0, 1.0, 1.0]) == "b"
    assert vote(["a", "b"], [0.5, 0.5]) == "a" and vote([None], [1.0]) is None
    assert vote(["a", "b"], [math.nan, 0.1]) == "b"
    assert rank_weights([2.1, 0.7, 1.4]) == pytest.approx([1.0, 0.0, 0.5])
    assert rank_weights([1.0, 1.0]) == pytest.approx([0.5, 0.5]) and rank_weights([3.0]) == [1.0]


# ---- the program


def test_without_a_head_it_is_one_plain_request() -> None:
    engine, plain = TableEngine(model), TableEngine(model)
    rows = run_program(arrol(), prompt_of(engine), engine)
    assert len(engine.requests) == 1 and engine.requests[0].n == 8 and len(rows) == 8
    (alike,) = plain.generate([(prompt_of(plain), engine.requests[0])])
    assert [row.tokens for (row,) in rows] == [g.tokens for g in alike]
    check_books(engine, rows)
    note = rows[0][0].meta["arrol"]
    assert note["keep"] == 1.0 and note["q"] is None and len(note["features"]) == 14
    assert note["features"][:7] == pytest.approx(features_of(rows[0][0].logprobs[:LIMIT], (), LIMIT, False))


def test_keep_ratio_1_stops_none() -> None:
    engine = TableEngine(model)
    rows = run_program(arrol(keep_ratio=1.0), prompt_of(engine, payload=step_payload()), engine)
    assert len(rows) == 8 and len(engine.requests) == 1


@pytest.mark.parametrize("selection", ["survival", "balanced", "extremes", "random"])
def test_half_of_them_are_stopped_and_the_books_add_up(selection: str) -> None:
    engine, logged = TableEngine(model, seed=3), {}
    method = arrol(selection=selection)
    rows = run_program(method, prompt_of(engine, payload=step_payload()), engine, logged)
    assert len(rows) == 4 if selection != "survival" else len(rows) in (3, 4, 5)
    assert logged["arrol/stopped"] == (8 - len(rows)) / 8
    assert engine.requests[0].max_tokens == LIMIT and engine.requests[0].n == 8
    assert len(engine.requests) == 1 + len(rows)
    assert engine.decoded == 8 * LIMIT + sum(len(row) - LIMIT for (row,) in rows)
    for (row,) in rows:
        assert row.finish == "eos" and len(row) == 13 and set(row.kinds) == {Kind.SAMPLED}
        assert engine.chat.decode(row.tokens)[0] in "gb"
    check_books(engine, rows)
    if selection == "extremes":
        first = [engine.chat.decode(row.tokens)[0] for (row,) in rows]
        q = [row.meta["arrol"]["q"] for (row,) in rows]
        assert sorted(q) == [0.2, 0.2, 0.8, 0.8] and "g" in first
        assert all(row.meta["arrol"]["keep"] == 1.0 for (row,) in rows)
    if selection == "random":
        assert all(row.meta["arrol"]["keep"] == 0.5 for (row,) in rows)


def test_keep_of_the_papers_rule_is_the_formula() -> None:
    engine = TableEngine(model, seed=1)
    rows = run_program(arrol(), prompt_of(engine, n=16, payload=step_payload(shift=0.1)), engine)
    for (row,) in rows:
        note = row.meta["arrol"]
        assert note["keep"] == pytest.approx(0.5 + 0.1 + 0.5 * (0.5 - note["q"]))
        own, mean = note["features"][0], note["features"][7]
        assert note["q"] == (0.8 if own > mean else 0.2)


def test_independent_draws_have_a_random_number_and_min_keep_holds() -> None:
    engine = TableEngine(model)
    sizes = set()
    for i in range(12):
        prompt = prompt_of(engine, n=4, payload=step_payload(shift=-1.0), seed=str(i))  # everyone has 0.1
        rows = run_program(arrol(independent=True, min_keep=1), prompt, engine)
        sizes.add(len(rows))
    assert sizes <= {1, 2, 3} and 1 in sizes
    rows = run_program(arrol(independent=True, min_keep=3), prompt_of(engine, n=4, payload=step_payload()), engine)
    assert len(rows) >= 3


def test_who_ended_before_is_never_stopped() -> None:
    def short(text: str) -> dict[str, float]:
        said = text.split(">")[-1]
        return {"a": 0.5, EOS: 0.5} if len(said) < 6 else {EOS: 1.0}

    engine = TableEngine(short, seed=5)
    logged: dict[str, float] = {}
    prompt = prompt_of(engine, n=24, payload=step_payload())
    rows = run_program(arrol(selection="balanced"), prompt, engine, logged)
    ended = sum(1 for (row,) in rows if len(row) <= LIMIT)
    undecided = 24 - ended
    assert 0 < ended < 24
    assert len(rows) == ended + count_to_keep(undecided, 0.5, 0)
    only_short = TableEngine({">": {"a": 1.0}})
    rows = run_program(arrol(), prompt_of(only_short, payload=step_payload()), only_short)
    assert len(rows) == 8 and len(only_short.requests) == 1


def test_no_room_no_tokens_and_a_prefix() -> None:
    engine = TableEngine(model)
    full = run_program(arrol(), prompt_of(engine, payload=step_payload(), max_context=3), engine)  # the prompt has 3
    assert [len(row) for (row,) in full] == [0] * 8 and not engine.requests
    assert full[0][0].finish == "length"
    at_limit = run_program(arrol(), prompt_of(engine, payload=step_payload(), max_tokens=LIMIT), engine)
    assert [len(row) for (row,) in at_limit] == [LIMIT] * 8  # nothing is left to save
    prefixed = prompt_of(engine, payload=step_payload(), prefix=engine.chat.encode("gx"))
    rows = run_program(arrol(selection="random"), prefixed, engine)
    assert len(rows) == 4
    for (row,) in rows:
        assert row.kinds[:2] == (Kind.FORCED,) * 2 and engine.chat.decode(row.tokens[:2]) == "gx"
    check_books(engine, rows)


def test_what_was_interrupted_goes_on() -> None:
    engine = TableEngine(model, abort_after=2)  # before the fourth token
    rows = run_program(arrol(), prompt_of(engine, payload=step_payload()), engine)
    assert len(rows) == 8 and all(len(row) == 4 and row.finish == "abort" for (row,) in rows)
    check_books(engine, rows)
    dead = TableEngine(model, abort_after=0)
    assert [len(row) for (row,) in run_program(arrol(), prompt_of(dead, payload=step_payload()), dead)] == [0] * 8


def test_it_asks_for_top_log_probs_only_if_told() -> None:
    engine = TableEngine(model)
    method = arrol(top=2)
    assert "engine:logprobs=2" in method.needs and not any("engine" in n for n in arrol().needs)
    rows = run_program(method, prompt_of(engine), engine)
    assert engine.requests[0].top == 2 and len(rows[0][0].meta["arrol"]["features"]) == 20
    assert not any("engine" in n for n in arrol(top=2, features=len).needs)


def hidden_states(contexts: list[list[int]]) -> list[list[float]]:
    assert all(len(c) == 3 + LIMIT for c in contexts)
    return [[float(ord("g") in c), 1.0] for c in contexts]


def test_own_features() -> None:
    engine = TableEngine(model)
    rows = run_program(arrol(features=hidden_states), prompt_of(engine), engine)
    for (row,) in rows:
        good = engine.chat.decode(row.tokens).startswith("g")
        assert row.meta["arrol"]["features"] == [float(good), 1.0]
    payload = step_payload(features=2)
    assert len(run_program(arrol(features=hidden_states), prompt_of(engine, payload=payload), engine)) < 8


@pytest.mark.parametrize(
    "answer", [None, [], [[1.0]], [[1.0]] * 7, [["x"]] * 8, [[math.nan]] * 8, [1.0] * 8, RuntimeError("down")]
)
def test_features_that_fail_stop_nobody(answer: Any) -> None:
    def broken(contexts: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine = TableEngine(model)
    rows = run_program(arrol(features=broken), prompt_of(engine, payload=step_payload()), engine)
    assert len(rows) == 8 and all(row.finish == "eos" and row.meta["arrol"]["features"] is None for (row,) in rows)
    check_books(engine, rows)


def test_it_does_not_depend_on_other_prompts() -> None:
    def rows_of(prompts: Any, engine: TableEngine) -> Any:
        return [[row.tokens for (row,) in rows] for rows in run_program(arrol(), prompts, engine)]

    one, many = TableEngine(model), TableEngine(model)

    def prompt(engine: TableEngine, text: str) -> Prompt:
        payload = {"arrol": step_payload()}
        return make_prompt(engine.chat, text, n=6, payload=payload, seed=f"0|arrol|{text}")

    together = rows_of([prompt(many, "p"), prompt(many, "q"), prompt(many, "r")], many)
    alone = [rows_of([prompt(one, t)], one)[0] for t in "pqr"]
    assert together == alone
    assert together[0] != together[1]


# ---- the driver


def rollouts_of(features: Any, rewards: Any, keep: Any = None, **changes: Any) -> Rollouts:
    keep = [1.0] * len(rewards) if keep is None else keep
    notes = [{"features": f, "keep": k, "q": None} for f, k in zip(features, keep, strict=True)]
    return make_rollouts(rewards, meta={"arrol": notes}, **changes)


def feed(stack: MethodStack, seed: int, n: int = 64) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    one_step(stack, rollouts_of(x.tolist(), (x[:, 0] > 0).astype(float).tolist()))
    return combine([stack.metrics.take()])


def test_the_head_is_sent_after_the_cold_start() -> None:
    method = arrol(cold_start=2)
    stack = start_stack(method)
    plan = make_plan(3)
    assert stack.call("plan", method, plan) is None
    feed(stack, 0)
    assert stack.call("plan", method, plan.replace(batch=1)) is None
    before = plan.replace(batch=2, rows=tuple(r.replace(payload={"other": 1}) for r in plan.rows))
    planned = stack.call("plan", method, before)
    payload = planned.rows[0].payload
    assert payload["other"] == 1 and set(payload["arrol"]) == {"head", "rates", "shift"}
    assert [r.replace(payload=None) for r in planned.rows] == list(plan.rows)
    q = Calibrator(payload["arrol"]["rates"])(quality(payload["arrol"]["head"], [[2.0, 0.0], [-2.0, 0.0]]))
    assert len(q) == 2
    fresh = start_stack(arrol())
    assert fresh.call("plan", fresh.methods[0], plan.replace(batch=50)) is None  # nothing learned yet


def test_learning_is_logged_and_nan_foreign_notes_and_none_are_left_out() -> None:
    method = arrol(window=100)
    stack = start_stack(method)
    assert "arrol/accuracy" not in feed(stack, 0)
    for i in range(1, 8):
        logged = feed(stack, i)
    assert logged["arrol/accuracy"] > 0.9 and logged["arrol/brier"] < 0.1
    assert len(method.state["label"]) == len(method.state["score"]) == len(method.state["features"]) == 100
    before = {k: v.clone() for k, v in method.state["head"].items()}
    bad = make_rollouts([1.0, 0.0, math.nan, 1.0], meta={"arrol": [None, "x", {"features": [1.0, 2.0], "keep": 1}, {}]})
    one_step(stack, bad)
    assert all(torch.equal(before[k], v) for k, v in method.state["head"].items())
    one_step(stack, rollouts_of([[1.0, 2.0, 3.0]] * 2, [1.0, 0.0]))  # another number of features
    assert method.state["features"].shape == (100, 2)


def test_only_one_kind_of_outcome_stops_nobody() -> None:
    method = arrol()
    stack = start_stack(method)
    one_step(stack, rollouts_of([[1.0], [2.0], [3.0], [4.0]], [1.0] * 4))
    assert stack.call("plan", method, make_plan(batch=5)) is None


def test_survivors_count_with_the_inverse_of_their_probability() -> None:
    method = arrol(max_weight=5.0)
    one_step(start_stack(method), rollouts_of([[1.0]] * 3, [1.0, 0.0, 0.0], keep=[0.5, 1.0, 0.01]))
    assert method.state["weight"].tolist() == [2.0, 1.0, 5.0]
    assert method.state["label"].tolist() == [1.0, 0.0, 0.0]


def test_state_survives_a_checkpoint(tmp_path: Any) -> None:
    def run(resume: bool) -> Any:
        method = arrol()
        stack = start_stack(method)
        feed(stack, 0)
        if resume:
            save_state(tmp_path, stack.state_dict("d"))
            method = arrol()
            stack = start_stack(method)
            stack.load_state_dict(load_state(tmp_path) or {}, "d")
        feed(stack, 1)
        return stack.call("plan", method, make_plan(batch=2)).rows[0].payload

    assert run(False) == run(True)


def test_from_the_program_to_the_head_and_back() -> None:
    """The whole way: cold start, the head learns from log-probs what was right, and then half are stopped."""
    method = arrol(cold_start=3, detect_tokens=8, selection="balanced")
    engine = TableEngine(model, reward=lambda text, columns: float(text.startswith("g")), seed=2)
    stack = start_stack(method, run=make_run(max_completion_length=64))
    accuracy, kept = [], []
    for step in range(6):
        plan = stack.call("plan", method, make_plan(4, 16, batch=step)) or make_plan(4, 16, batch=step)
        assert (plan.rows[0].payload is not None) == (step >= 3)
        prompts = [
            make_prompt(engine.chat, "p", n=16, payload=r.payload, seed=f"{step}|{i}") for i, r in enumerate(plan.rows)
        ]
        each = run_program(arrol(detect_tokens=8, selection="balanced"), prompts, engine)  # elsewhere, without a state
        rows = [(i, row) for i, rollouts in enumerate(each) for (row,) in rollouts]
        rewards = [float(engine.chat.decode(row.tokens).startswith("g")) for _, row in rows]
        stack.metrics.take()
        made = make_rollouts(rewards, [i for i, _ in rows], meta={"arrol": [r.meta["arrol"] for _, r in rows]})
        decision = one_step(stack, made, make_tokens(made))
        assert decision.trained.sum() <= len(rows)
        accuracy.append(combine([stack.metrics.take()]).get("arrol/accuracy", math.nan))
        kept.append(len(rows))
    assert kept == [64, 64, 64, 32, 32, 32]
    assert accuracy[-1] > 0.75


def test_parameters_out_of_range() -> None:
    for bad in ({"keep_ratio": 0.0}, {"positive_ratio": 1.0}, {"detect_tokens": 0}, {"low": 0.6}, {"high": 0.4}):
        with pytest.raises(ConfigError):
            arrol(**bad)
