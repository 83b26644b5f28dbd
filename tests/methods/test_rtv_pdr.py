"""RTV + PDR (arXiv 2604.16529): the tournament, the waves, what training gets, and everything that can fail."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import NEVER, Stuck

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Prompt, Trajectory
from rl_plugins.kit.agents import Observation
from rl_plugins.methods.rtv_pdr import RtvPdr, parse_vote, rtv, rtv_rounds, texts
from rl_plugins.testing.engine import EOS, CharChat, TableEngine, make_prompt, run_program

GOLDEN = Golden("rtv_pdr")
PLAIN: dict[str, Any] = {"shuffle": False, "permute": False, "ties": "first", "unparsable": "first"}


def seeded(seed: int) -> Callable[[str], np.random.Generator]:
    return lambda what: np.random.default_rng([seed, *what.encode()])


# ---- the tournament


@GOLDEN.kind("judge_calls_in_order")
def check_tournament(case: Case) -> None:
    calls = iter(case.inputs["judge_calls_in_order"])
    made = 0

    def judge(shown: tuple[int, ...]) -> str:
        nonlocal made
        call, made = next(calls), made + 1
        assert call["candidates"] == list(shown)
        return call["reply"]

    options = PLAIN | case.options(RtvPdr)
    assert rtv(case.inputs["n_candidates"], judge, **options) == [case.expected["winner"]]
    assert made == case.expected["num_judge_calls"]
    assert next(calls, None) is None


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 13),
    size=st.integers(2, 5),
    votes=st.integers(1, 4),
    stop=st.integers(1, 6),
    discard=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_equals_the_loop(n: int, size: int, votes: int, stop: int, discard: bool, seed: int) -> None:
    replies = [str(r) for r in np.random.default_rng(seed).integers(0, size + 2, size=400)]
    unparsable = "discard" if discard else "first"
    # the loop
    told, left = iter(replies), list(range(n))
    while len(left) > stop:
        winners, losers = [], []
        for i in range(0, len(left), size):
            group = left[i : i + size]
            share = dict.fromkeys(group, 0.0)
            if len(group) > 1:
                for _ in range(votes):
                    place = int(next(told)) - 1
                    if 0 <= place < len(group):
                        share[group[place]] += 1 / votes
                    elif not discard:
                        share[group[0]] += 1 / votes
            winner = next(c for c in group if share[c] > max(share.values()) - 1e-9)
            winners.append(winner)
            losers += [(share[c], c) for c in group if c != winner]
        missing = stop - len(winners)
        for _ in range(max(0, missing)):
            best = max(range(len(losers)), key=lambda i: (round(losers[i][0], 9), -i))
            winners.append(losers.pop(best)[1])
        left = winners
    told = iter(replies)
    options = {**PLAIN, "unparsable": unparsable}
    assert rtv(n, lambda shown: next(told), stop=stop, group_size=size, votes=votes, **options) == left
    assert len(left) == min(n, stop)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 20), size=st.integers(2, 6), seed=st.integers(0, 1000))
def test_a_judge_without_fault_finds_the_best(n: int, size: int, seed: int) -> None:
    quality = np.random.default_rng(seed).permutation(n)
    calls = []

    def judge(shown: tuple[int, ...]) -> int:
        calls.append(shown)
        return int(np.argmax(quality[list(shown)])) + 1

    (winner,) = rtv(n, judge, group_size=size, votes=1, rng=seeded(seed))
    assert quality[winner] == n - 1
    assert all(len(set(shown)) == len(shown) >= 2 for shown in calls)  # nobody meets itself
    if size >= n:
        assert len(calls) == (n > 1)


@pytest.mark.parametrize(("n", "size", "votes", "calls"), [(16, 2, 8, 120), (16, 4, 8, 40), (1, 2, 8, 0), (3, 2, 1, 2)])
def test_number_of_calls(n: int, size: int, votes: int, calls: int) -> None:
    asked: list[Any] = []
    rtv(n, lambda shown: asked.append(shown) or 1, group_size=size, votes=votes, rng=seeded(0))
    assert len(asked) == calls


def test_every_candidate_is_in_the_first_round_and_orders_vary() -> None:
    rounds = rtv_rounds(7, group_size=3, rng=seeded(1))
    first = next(rounds)
    assert [len(group) for group in first] == [3, 3]
    met = [c for group in first for c in group]
    assert len(set(met)) == 6  # the seventh goes on without being compared
    (bye,) = set(range(7)) - set(met)
    second = rounds.send([[group[0]] for group in first])
    assert sorted(second[0]) == sorted([first[0][0], first[1][0], bye])
    shown: Counter[tuple[int, ...]] = Counter()
    rtv(2, lambda order: shown.update([order]) or 1, votes=200, rng=seeded(0))
    assert set(shown) == {(0, 1), (1, 0)} and min(shown.values()) > 70


def test_a_judge_that_prefers_a_position_decides_nothing_in_random_orders() -> None:
    won = Counter(rtv(2, lambda shown: 1, votes=9, rng=seeded(s))[0] for s in range(400))
    assert abs(won[0] - 200) < 60
    assert {rtv(2, lambda shown: 1, votes=9, **PLAIN)[0] for _ in range(5)} == {0}


def test_down_to_k() -> None:
    def judge(shown: tuple[int, ...]) -> int:
        return shown.index(max(shown)) + 1

    assert rtv(16, judge, stop=4, votes=1, **PLAIN) == [3, 7, 11, 15]
    assert rtv(5, judge, stop=9, votes=1, **PLAIN) == [0, 1, 2, 3, 4]
    # 8 -> 2 with groups of 4, and the best loser comes back
    votes = {(0, 1, 2, 3): [3, 3, 1], (4, 5, 6, 7): [7, 6, 6]}
    rounds = rtv_rounds(8, stop=3, group_size=4, ties="first", shuffle=False)
    with pytest.raises(StopIteration) as done:
        rounds.send([votes[g] for g in next(rounds)])
    assert done.value.value == [3, 6, 1]


@pytest.mark.parametrize("reply", [None, "", "neither", "0", 3, -1, "Best: 99", "1 or 2"])
def test_without_a_vote_the_winner_is_drawn(reply: Any) -> None:
    won = Counter(rtv(2, lambda shown: reply, rng=seeded(s))[0] for s in range(200))
    assert 60 < won[0] < 140
    assert rtv(2, lambda shown: reply, rng=seeded(3)) == rtv(2, lambda shown: reply, rng=seeded(3))
    assert rtv(2, lambda shown: reply, **PLAIN) == [0]


@pytest.mark.parametrize(
    ("reply", "place"),
    [
        ("2", 1),
        (" 1.\n", 0),
        (3, 2),
        (np.int64(1), 0),
        ("Attempt 1 has no test, 2 has. Best: 2", 1),
        ("Best: 1? No.\n**Best:** **3**", 2),
        ("attempt 2, surely 2", 1),
        ("best is attempt 2", 1),
        ("1 or 2", None),
        ("Best: 4", None),
        ("Best: -1", None),
        ("-1", None),
        ("0", None),
        ("", None),
        ("first", None),
        (None, None),
        (True, None),
        (1.0, None),
    ],
)
def test_parse_vote(reply: Any, place: int | None) -> None:
    assert parse_vote(reply, 3) == place


def test_a_tournament_out_of_range() -> None:
    with pytest.raises(ConfigError, match="has no `rng`"):
        rtv(4, lambda shown: 1)
    for wrong in ({"n": 0}, {"n": 3, "stop": 0}, {"n": 3, "group_size": 1}):
        with pytest.raises(ConfigError, match="there must be at least 1 candidate"):
            rtv(judge=lambda shown: 1, **{**PLAIN, **wrong})


# ---- a policy that answers, summarizes and judges


def says(reply: str, done: str) -> Mapping[str, float]:
    return {reply[len(done)] if len(done) < len(reply) else EOS: 1.0}


def section(question: str, name: str) -> str:
    return re.search(rf"\[{name}\]\n(.*?)\n\n", question, re.DOTALL)[1]


def candidates(question: str) -> list[str]:
    """What the summaries a judge sees say of their attempts."""
    return re.findall(r"\[Attempt \d+\]\nsum ?([^>\n]*)", question)


def policy(answers: Mapping[str, float] | Callable[[str], Mapping[str, float]], judge: Any = None) -> Any:
    """Attempts are one letter; a summary is "sum LETTER"; the judge prefers letters late in the alphabet."""

    def model(text: str) -> Mapping[str, float]:
        prompt, _, done = text.rpartition(">")
        if prompt.startswith(f"<{texts.SUMMARY[:40]}"):
            return says(f"sum {section(prompt, 'Attempt')}", done)
        if prompt.startswith(f"<{texts.JUDGE[:40]}"):
            shown = candidates(prompt)
            if judge is not None:
                return judge(shown, done)
            return says(f"Best: {shown.index(max(shown)) + 1 if shown else 1}", done)
        if done:
            return {EOS: 1.0}
        return answers(prompt) if callable(answers) else answers

    return model


LETTERS = dict.fromkeys("abcdefgh", 1 / 8)


def evaluate(
    engine: TableEngine, logged: dict[str, float] | None = None, prompt: Prompt | None = None, **params: Any
) -> list[Trajectory]:
    prompt = make_prompt(engine.chat, "p", n=1, training=False, max_tokens=20) if prompt is None else prompt
    method = RtvPdr(build_params(RtvPdr.Params, params, "rtv_pdr"))
    return [row for rows in run_program(method, prompt, engine, logged) for row in rows]


def text(row: Trajectory) -> str:
    return CharChat().decode(row.tokens)


def kinds_of_requests(engine: TableEngine) -> Counter[str]:
    """Continuations asked for, by what they are."""
    count: Counter[str] = Counter()
    for request in engine.requests:
        prompt = engine.chat.decode(request.trajectory.prompt)
        kind = "attempt"
        if prompt.startswith(f"<{texts.SUMMARY[:40]}"):
            kind = "summary"
        elif prompt.startswith(f"<{texts.JUDGE[:40]}"):
            kind = "vote"
        elif "Summaries of earlier attempts" in prompt:
            kind = "refined"
        count[kind] += request.n
    return count


def test_a_tournament_alone() -> None:
    engine, logged = TableEngine(policy(LETTERS)), {}
    (row,) = evaluate(engine, logged, waves=1)
    made = [CharChat().decode(r.trajectory.tokens) for r in engine.requests]
    assert kinds_of_requests(engine) == {"attempt": 16, "summary": 16, "vote": 120}
    shown = {c for r in engine.requests for c in candidates(engine.chat.decode(r.trajectory.prompt))}
    assert text(row) == max(shown)
    assert row.prompt == engine.chat.encode("<p>") and row.group is None
    assert logged["rtv_pdr/votes"] == 120 and logged["rtv_pdr/unparsable"] == 0
    assert 0.9 < logged["rtv_pdr/agreement"] < 1  # attempts that say the same share the votes
    assert logged["rtv_pdr/summaries_failed"] == 0
    assert engine.batches == 6  # attempts, summaries, four rounds
    assert set(made) == {""}


def test_two_waves() -> None:
    engine = TableEngine(policy(LETTERS))
    (row,) = evaluate(engine)
    assert kinds_of_requests(engine) == {"attempt": 16, "summary": 32, "vote": 8 * 12 + 8 * 15, "refined": 16}
    prompt = engine.chat.decode(row.prompt)
    assert prompt.startswith("<p\n\nSummaries of earlier attempts")
    read = candidates(prompt)
    assert len(read) == 4
    # the four that were kept are the winners of groups of four out of the sixteen of the first wave
    first = Counter(section(engine.chat.decode(r.trajectory.prompt), "Attempt") for r in engine.requests[1:17])
    assert max(read) == max(first) and not Counter(read) - first
    refined = [r for r in engine.requests if "Summaries of earlier" in engine.chat.decode(r.trajectory.prompt)]
    assert len(refined) == 1 and refined[0].n == 16  # all of the wave read the same


def test_the_books_of_the_row_that_is_returned() -> None:
    answers = {"a": 0.7, "b": 0.2, "h": 0.1}
    (row,) = evaluate(TableEngine(policy(answers), version=5), attempts=8, keep=2)
    assert row.kinds == (Kind.SAMPLED,) * 2 and row.versions == (5, 5) and row.tokens[1] == 0
    assert row.logprobs == pytest.approx((math.log(answers[text(row)]), 0.0))
    assert row.finish == "eos"


def test_summaries_help_the_second_wave() -> None:
    def answers(prompt: str) -> Mapping[str, float]:
        good = candidates(prompt).count("h")
        return {"h": 0.2 + 0.2 * good, "a": 0.8 - 0.2 * good}

    engine = TableEngine(policy(answers))
    (row,) = evaluate(engine)
    assert candidates(engine.chat.decode(row.prompt)) == ["h"] * 4 or text(row) == "h"
    # a judge that prefers what is wrong spreads it
    engine = TableEngine(policy(answers, lambda shown, done: says(f"Best: {shown.index(min(shown)) + 1}", done)))
    (row,) = evaluate(engine)
    assert text(row) == "a"


def test_the_pool_of_the_answer() -> None:
    def answers(prompt: str) -> Mapping[str, float]:  # the second wave is worse
        return {"a": 1.0} if "Summaries" in prompt else LETTERS

    assert text(evaluate(TableEngine(policy(answers)))[0]) == "a"
    engine = TableEngine(policy(answers))
    (row,) = evaluate(engine, final_pool="all")
    assert text(row) > "a" and row.prompt == engine.chat.encode("<p>")
    assert kinds_of_requests(engine)["vote"] == 8 * 12 + 8 * 31


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"waves": 1}, {"attempt": 1}),
        ({"waves": 2}, {"attempt": 1, "refined": 1, "summary": 1}),
        ({"waves": 2, "final_pool": "all"}, {"attempt": 1, "refined": 1, "summary": 2, "vote": 8}),
        ({"waves": 3}, {"attempt": 1, "refined": 2, "summary": 2}),
    ],
)
def test_one_attempt_asks_nobody_who_is_better(params: dict[str, Any], count: dict[str, int]) -> None:
    engine = TableEngine(policy(LETTERS))
    assert len(evaluate(engine, attempts=1, **params)) == 1
    assert kinds_of_requests(engine) == count


def test_more_wanted_than_there_are() -> None:
    engine = TableEngine(policy(LETTERS))
    (row,) = evaluate(engine, attempts=3, keep=9)
    assert len(candidates(engine.chat.decode(row.prompt))) == 3
    assert kinds_of_requests(engine)["vote"] == 8 * 2


def test_votes_are_sampled_and_orders_permuted() -> None:
    engine, logged = TableEngine(policy(LETTERS, lambda shown, done: says("1", done))), {}
    evaluate(engine, logged, attempts=2, waves=1, votes=40)
    votes = [r for r in engine.requests if r.temperature is not None]
    assert {r.temperature for r in votes} == {1.0} and len(votes) == 2  # one request per order
    assert sum(r.n for r in votes) == 40 and logged["rtv_pdr/agreement"] < 0.8  # prefers a place, not an attempt
    engine = TableEngine(policy(LETTERS, lambda shown, done: says("1", done)))
    evaluate(engine, attempts=2, waves=1, votes=40, permute=False, judge_temperature=0.5)
    assert [(r.n, r.temperature) for r in engine.requests[-1:]] == [(40, 0.5)]


def test_deterministic_and_alone_as_among_others() -> None:
    prompts = [
        make_prompt(CharChat(), name, n=1, training=False, max_tokens=20, seed=f"0|{name}") for name in ("p", "q", "r")
    ]
    noisy = policy(LETTERS, lambda shown, done: {"1": 0.5, "2": 0.5} if not done else {EOS: 1.0})
    method = RtvPdr(build_params(RtvPdr.Params, {"attempts": 6, "keep": 2}, "x"))
    together_ = run_program(method, prompts, TableEngine(noisy))
    alone = [run_program(method, p, TableEngine(noisy)) for p in prompts]
    assert together_ == alone
    assert run_program(method, prompts[0], TableEngine(noisy)) == alone[0]
    assert len({rows[0][0].prompt for rows in alone}) == 3


# ---- training


def train(engine: TableEngine, logged: dict[str, float] | None = None, n: int = 4, **params: Any) -> list[Trajectory]:
    return evaluate(engine, logged, make_prompt(engine.chat, "p", n=n, max_tokens=20), **params)


def test_training_is_ordinary_by_default() -> None:
    engine = TableEngine(policy(LETTERS))
    rows = train(engine)
    assert kinds_of_requests(engine) == {"attempt": 4}
    assert [r.prompt for r in rows] == [engine.chat.encode("<p>")] * 4 and {r.group for r in rows} == {None}


def test_refined_rollouts_are_a_group_of_their_own_prompt() -> None:
    engine = TableEngine(policy(LETTERS))
    rows = train(engine, training="refined", attempts=8, keep=2)
    assert kinds_of_requests(engine) == {"attempt": 8, "summary": 8, "vote": 8 * 6, "refined": 4}
    assert {r.group for r in rows} == {"refined"} and len(rows) == 4
    (prompt,) = {r.prompt for r in rows}
    assert len(candidates(engine.chat.decode(prompt))) == 2
    for row in rows:
        assert row.kinds == (Kind.SAMPLED,) * 2
        assert row.logprobs == pytest.approx((math.log(1 / 8), 0.0))
    engine = TableEngine(policy(LETTERS))
    assert len(train(engine, training="refined", attempts=8, keep=2, waves=3)) == 4
    assert kinds_of_requests(engine) == {"attempt": 8, "summary": 16, "vote": 2 * 8 * 6, "refined": 8 + 4}


def test_hard_prompts_get_a_second_wave() -> None:
    def reward(completion: str, columns: Any) -> float:
        return float(completion == "h")

    easy, logged = TableEngine(policy({"h": 1.0}), reward), {}
    rows = train(easy, logged, training="hard")
    assert kinds_of_requests(easy) == {"attempt": 4} and logged["rtv_pdr/refined"] == 0
    assert [r.rewards for r in rows] == [{"reward": 1.0}] * 4 and {r.group for r in rows} == {None}
    hard, logged = TableEngine(policy({"a": 1.0}), reward), {}
    rows = train(hard, logged, training="hard", keep=2)
    assert kinds_of_requests(hard) == {"attempt": 4, "summary": 4, "vote": 8 * 2, "refined": 4}
    assert {r.group for r in rows} == {"refined"} and {r.rewards for r in rows} == {None}
    assert logged["rtv_pdr/refined"] == 1
    graded = TableEngine(policy({"a": 1.0}), lambda completion, columns: 0.5)
    assert {r.group for r in train(graded, training="hard", hard_below=0.5)} == {"refined"}
    unknown = TableEngine(policy({"a": 1.0}), lambda completion, columns: None)
    assert {r.group for r in train(unknown, training="hard")} == {"refined"}


def test_rewards_and_columns_are_shown_to_nobody() -> None:
    engine = TableEngine(policy(LETTERS), lambda completion, columns: 0.123)
    columns = {"prompt": "p", "answer": "SECRET"}
    prompt = make_prompt(engine.chat, "p", n=4, columns=columns, max_tokens=20)
    evaluate(engine, None, prompt, training="hard", hard_below=0.5)
    assert len(engine.scores) == 4
    read = "".join(engine.chat.decode(r.trajectory.context) for r in engine.requests)
    assert "SECRET" not in read and "0.123" not in read


# ---- callables


def test_callables_summarize_and_judge() -> None:
    seen: list[Any] = []

    def summarizer(problem: str, attempt: str) -> str:
        seen.append((problem, attempt))
        return f"sum {attempt}"

    def judge(problem: str, summaries: Sequence[str]) -> int:
        seen.append((problem, tuple(summaries)))
        return summaries.index(max(summaries)) + 1

    engine = TableEngine(policy(LETTERS))
    (row,) = evaluate(engine, summarizer=summarizer, judge=judge, attempts=4, waves=1, votes=3)
    assert kinds_of_requests(engine) == {"attempt": 4}
    assert {problem for problem, _ in seen} == {"p"} and len(seen) == 4 + 3 * 3
    assert text(row) == max(a for _, a in seen if isinstance(a, str))


def raises(*args: Any) -> Any:
    raise RuntimeError("busy")


@pytest.mark.parametrize("broken", [raises, None, lambda *a: None, lambda *a: 3.5, lambda *a: ""], ids=range(5))
def test_callables_that_fail(broken: Any, stuck: Stuck) -> None:
    """None stands for one that hangs."""
    logged: dict[str, float] = {}
    options = {"attempts": 4, "votes": 2, "keep": 2, "call_timeout": NEVER if broken else 0.5, "waves": 2}
    broken = broken or stuck
    engine = TableEngine(policy({"a": 1.0}))
    (row,) = evaluate(engine, logged, summarizer=broken, judge=lambda problem, summaries: 1, **options)
    assert logged["rtv_pdr/summaries_failed"] == 1
    assert "[Attempt 2]\na>" in engine.chat.decode(row.prompt)  # the attempt itself stands for its summary
    logged.clear()
    found = {text(evaluate(TableEngine(policy(LETTERS)), logged, judge=broken, **options)[0]) for _ in range(2)}
    assert logged["rtv_pdr/unparsable"] == 1 and len(found) == 1  # drawn, with the seed
    assert stuck.waiting == stuck.calls


def test_garbage_of_the_policy_as_judge() -> None:
    for reply in ("", "neither", "Best: 9", "1, 2"):
        logged: dict[str, float] = {}
        engine = TableEngine(policy(LETTERS, lambda shown, done, reply=reply: says(reply, done)))
        assert len(evaluate(engine, logged, attempts=4)) == 1
        assert logged["rtv_pdr/unparsable"] == 1 and "rtv_pdr/agreement" not in logged
    # a vote that is cut off has no verdict, though it names a number
    cut = TableEngine(policy(LETTERS, lambda shown, done: says("attempt 1 is better than " + "x" * 99, done)))
    logged = {}
    evaluate(cut, logged, attempts=4)
    assert logged["rtv_pdr/unparsable"] == 1


# ---- limits


def test_an_engine_that_aborts_and_answers_nothing() -> None:
    logged: dict[str, float] = {}
    engine = TableEngine(policy(LETTERS), abort_after=0)
    (row,) = evaluate(engine, logged, attempts=4)
    assert row.tokens == () and row.finish == "abort"
    assert logged["rtv_pdr/summaries_failed"] == 1 and logged["rtv_pdr/unparsable"] == 1
    (row,) = evaluate(TableEngine(policy(LETTERS), abort_after=1), attempts=4)
    assert len(row.tokens) == 1 and row.finish == "abort" and row.kinds == (Kind.SAMPLED,)
    (row,) = evaluate(TableEngine(policy({EOS: 1.0})), attempts=4)
    assert row.tokens == (0,)


def test_summaries_that_leave_no_room_are_left_out() -> None:
    def long(problem: str, attempt: str) -> str:
        return attempt * 200

    def read(max_context: int) -> tuple[int, int]:
        engine = TableEngine(policy(LETTERS))
        prompt = make_prompt(engine.chat, "p", n=1, training=False, max_tokens=20, max_context=max_context)
        (row,) = evaluate(
            engine, None, prompt, summarizer=long, judge=lambda p, s: 1, attempts=4, keep=4, summary_chars=200
        )
        return engine.chat.decode(row.prompt).count("[Attempt"), len(row.prompt)

    four, length = read(100_000)
    assert four == 4
    assert read(length + 10)[0] == 4  # half of the 20 tokens of an answer are left
    three, length = read(length + 9)
    assert three == 3
    assert read(length + 9)[0] == 2
    assert read(240) == (0, 3)


def test_no_room_at_all_and_prompts_beyond_the_context() -> None:
    engine = TableEngine(policy(LETTERS))
    prompt = make_prompt(engine.chat, "p" * 50, n=1, training=False, max_tokens=20, max_context=40)
    (row,) = evaluate(engine, None, prompt, attempts=4)
    assert row.tokens == () and row.finish == "length" and engine.requests == []


def test_a_long_attempt_is_shown_from_its_end() -> None:
    seen: list[str] = []

    def model(context: str) -> Mapping[str, float]:
        prompt, _, done = context.rpartition(">")
        if prompt.startswith(f"<{texts.SUMMARY[:40]}"):
            seen.append(section(prompt, "Attempt"))
            return says("sum", done)
        if prompt.startswith(f"<{texts.JUDGE[:40]}"):
            return says("1", done)
        return {"x": 1.0} if len(done) < 300 else says("end", done[300:])

    frame = len(texts.SUMMARY)
    engine = TableEngine(model)
    prompt = make_prompt(engine.chat, "p", n=1, training=False, max_tokens=400, max_context=frame + 250)
    evaluate(engine, None, prompt, attempts=2, waves=1, summary_tokens=100)
    assert all(s.endswith("xend") and 20 < len(s) < 303 for s in seen) and seen
    asked = [r for r in engine.requests if r.max_tokens == 100]
    assert len(asked) == 2 and all(len(r.trajectory.prompt) <= frame + 150 for r in asked)


@pytest.mark.parametrize(("shape", "fields"), [("swe_bench", 10), ("terminal_bench", 8)])
def test_summaries_may_have_the_form_of_the_papers_examples(shape: str, fields: int) -> None:
    asked = texts.summary_prompt(shape)
    assert texts.summary_prompt("headings") == texts.SUMMARY != asked
    assert sum(f'"{name}": ' in asked for name in texts.SHAPES[shape]) == fields == len(texts.SHAPES[shape])
    assert [asked.count(name) for name in ("{problem}", "{attempt}", "{chars}")] == [1, 1, 1]
    assert asked.startswith(texts.SUMMARY[:40]) and asked.endswith(texts.SUMMARY[-40:])


def test_summaries_are_cut() -> None:
    engine = TableEngine(policy(LETTERS))
    (row,) = evaluate(
        engine,
        summarizer=lambda problem, attempt: "sum " + attempt + "y" * 500,
        judge=lambda problem, summaries: 1,
        attempts=2,
        keep=1,
        summary_chars=10,
    )
    assert candidates(engine.chat.decode(row.prompt))[0].endswith("yyyyy")
    assert len(re.search(r"\[Attempt 1\]\n(.*)>", engine.chat.decode(row.prompt))[1]) == 10


def test_prompts_as_text_and_the_prefix_of_a_plan() -> None:
    engine = TableEngine(policy(LETTERS))
    prompt = replace(make_prompt(engine.chat, "p", max_tokens=20, prefix=engine.chat.encode("b")), messages="p")
    rows = evaluate(engine, None, prompt, training="refined", attempts=2, keep=1)
    assert {text(r) for r in rows} == {"b"} and rows[0].kinds == (Kind.FORCED, Kind.SAMPLED)
    assert engine.chat.decode(rows[0].prompt).startswith("<p\n\nSummaries of earlier attempts")


# ---- agents


class Room:
    """Two turns; what was written is remembered, and nothing of an earlier episode may be."""

    made: list[Room] = []

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.resets = self.closed = 0
        Room.made.append(self)

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        self.resets += 1
        return Observation("a door")

    def act(self, action: str) -> Observation:
        self.acts.append(action)
        return Observation(f"saw {len(self.acts)}", reward=0.25, done=len(self.acts) == 2)

    def score(self) -> float:
        return 0.123

    def close(self) -> None:
        self.closed += 1


def test_agents_in_new_environments() -> None:
    Room.made = []

    def model(context: str) -> Mapping[str, float]:
        prompt, _, done = context.rpartition(">")
        if prompt.startswith(f"<{texts.SUMMARY[:40]}"):
            return says("sum " + section(prompt, "Attempt").replace("<", "").replace(">", ""), done)
        if prompt.startswith(f"<{texts.JUDGE[:40]}"):
            return says("Best: 1", done)
        return {"l": 0.5, "r": 0.5} if not done else {EOS: 1.0}

    engine = TableEngine(model)
    prompt = make_prompt(engine.chat, "p", n=1, training=False, max_tokens=40)
    (row,) = evaluate(engine, None, prompt, environment=Room, attempts=4, keep=2, votes=2)
    assert len(Room.made) == 8  # four attempts, two waves
    assert all(room.resets == 1 and len(room.acts) == 2 and room.closed >= 1 for room in Room.made)
    assert [(t.anchor, t.reward) for t in row.turns] == [("a door", 0.25), ("saw 1", 0.25)]
    assert row.meta["score"] == 0.123 and row.meta["turns"] == 2
    assert len(candidates(engine.chat.decode(row.prompt))) == 2 and "a door" in engine.chat.decode(row.prompt)
    kinds = list(row.kinds)
    assert kinds[:2] == [Kind.SAMPLED] * 2 and Kind.OBSERVED in kinds and kinds[-1] == Kind.SAMPLED
    asked = [engine.chat.decode(r.trajectory.prompt) for r in engine.requests]
    about = [a for a in asked if a.startswith(f"<{texts.SUMMARY[:40]}")]
    assert all("p\na door" in section(a, "Task") and "saw 1" in section(a, "Attempt") for a in about)
    assert not any("0.123" in a or "0.25" in a for a in asked)


def test_an_environment_that_breaks_in_a_turn_is_an_attempt_like_others() -> None:
    class Broken(Room):
        def act(self, action: str) -> Observation:
            raise RuntimeError("lost")

    engine = TableEngine(policy(LETTERS))
    (row,) = evaluate(engine, environment=Broken, attempts=2, waves=1)
    assert "lost" in row.meta["error"] and len(row.turns) == 1

    class Closed(Room):
        def reset(self, columns: Mapping[str, Any]) -> Observation:
            raise RuntimeError("no display")

    engine = TableEngine(policy(LETTERS))
    (row,) = evaluate(engine, environment=Closed, attempts=2)
    assert len(row) == 0 and "no display" in row.meta["error"] and math.isnan(row.meta["score"])
    assert not engine.requests  # neither played, nor summarized or judged


@pytest.mark.parametrize("training", [None, "plain", "refined", "hard"])
def test_attempts_without_an_environment_are_not_compared(training: str | None) -> None:
    made = iter(range(99))

    class Every(Room):
        def reset(self, columns: Mapping[str, Any]) -> Observation:
            if next(made) % 2:
                raise RuntimeError("no display")
            return super().reset(columns)

    shown: list[str] = []
    engine = TableEngine(policy(LETTERS), reward=lambda text, columns: 0.0)
    method = RtvPdr(
        build_params(
            RtvPdr.Params,
            {
                "environment": Every,
                "attempts": 4,
                "summarizer": lambda problem, attempt: shown.append(attempt) or attempt,
                "judge": lambda problem, said: 1,
                **({"training": training} if training else {}),
            },
            "rtv_pdr",
        )
    )
    prompt = make_prompt(engine.chat, "p", n=4 if training else 1, training=bool(training), reward_names=("r",))
    rows = [row for (row,) in run_program(method, prompt, engine)]
    lost = [row for row in rows if row.meta["error"]]
    assert all(shown) and bool(shown) == (training != "plain")
    if training:
        assert len(rows) == 4 and len(lost) == 2 and all(math.isnan(row.rewards["r"]) for row in lost)
    else:
        assert not lost


# ---- parameters


def test_it_acts_in_evaluation_and_claims_nothing_else() -> None:
    assert RtvPdr.in_eval == ("rollout",) and RtvPdr.claims() == ("rollout",)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"attempts": 0}, "must be >= 1"),
        ({"group_size": 1}, "must be >= 2"),
        ({"votes": 0}, "must be >= 1"),
        ({"judge_temperature": 0}, "must be > 0"),
        ({"final_pool": "first"}, "allowed: 'last', 'all'"),
        ({"training": "refined", "waves": 1}, "needs a wave that reads summaries"),
        ({"hard_below": 0.5}, "`hard_below` has no effect"),
        ({"turn_tokens": 5}, "`turn_tokens` has no effect"),
        ({"judge": "no_such_module:f"}, "cannot be loaded"),
    ],
)
def test_parameters_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_params(RtvPdr.Params, params, "rtv_pdr")
