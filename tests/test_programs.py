"""Rollout programs without a host: the books, several programs as one, faults of engines, tools and programs."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import raises
from waiting import until

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.requests import (
    BranchOrigin,
    Call,
    Generate,
    Generated,
    Kind,
    Prompt,
    Score,
    Trajectory,
    Turn,
    check_rows,
    together,
)
from rl_plugins.core.rollouts import Completion
from rl_plugins.kit.threads import run_calls
from rl_plugins.runtime.programs import SIDE, Running, drive, given_trajectory, run
from rl_plugins.testing.engine import EOS, CharChat, TableEngine, make_prompt, run_program

TABLE = {">": {"a": 0.5, "b": 0.5}, "a": {"a": 0.6, "b": 0.4}, "b": {"a": 0.5, EOS: 0.5}}


def program(body, rows: int = 1):
    """A method whose rollout is `body(prompt)`."""

    class Made(Method):
        name = "made"
        rows_per_rollout = rows

        def rollout(self, prompt):
            return (yield from body(prompt))

    return Made()


def plain(prompt):
    made = yield Generate(prompt.start(), n=prompt.n)
    return [prompt.start().add(g) for g in made]


# ---- the books


def test_sampled_tokens_have_the_models_own_logprobs():
    engine = TableEngine(TABLE, seed=3)
    for (row,) in run_program(program(plain), make_prompt(engine.chat, "hi", n=8), engine):
        context = list(row.prompt)
        for token, logprob in zip(row.tokens, row.logprobs, strict=True):
            assert logprob == pytest.approx(math.log(engine.probabilities(context)[token]))
            context.append(token)
        assert set(row.kinds) == {Kind.SAMPLED} and row.finish == "eos" and row.tokens[-1] == 0


parts = st.lists(st.tuples(st.sampled_from(["add", "force", "observe"]), st.integers(0, 4)), max_size=6)


@given(parts, st.integers(0, 20))
def test_every_token_is_booked_once_and_cutting_is_exact(made, length):
    t, expected = Trajectory((1, 2)), []
    for kind, n in made:
        tokens = tuple(range(10, 10 + n))
        if kind == "add":
            start = len(t)
            t = t.add(Generated(tokens, (-0.5,) * n, "eos", version=4))
            t = t.turn(start) if n else t
            expected += [(k, Kind.SAMPLED, -0.5, 4) for k in tokens]
        elif kind == "force":
            t = t.force(tokens)
            expected += [(k, Kind.FORCED, None, -1) for k in tokens]
        else:
            t = t.observe(tokens)
            expected += [(k, Kind.OBSERVED, None, -1) for k in tokens]
    cut = t.cut(length)
    for row, want in ((t, expected), (cut, expected[:length])):
        found = zip(row.tokens, row.kinds, row.logprobs, row.versions, strict=True)
        assert [(a, b, None if math.isnan(c) else c, d) for a, b, c, d in found] == want
        assert list(row.trained) == [int(k != Kind.OBSERVED) for _, k, _, _ in want]
        assert all(0 <= turn.start < turn.stop <= len(row) for turn in row.turns)
    assert t.context == (1, 2, *t.tokens)


@pytest.mark.parametrize("versions", [(4, 5), (4, 5, 6, 7)])
def test_a_continuation_has_a_version_of_every_token_or_one(versions):
    tokens, logprobs = (5, 6, 7), (-1.0, -2.0, -3.0)
    message = rf"3 tokens has {len(versions)} `versions`, \[4, 5.* Give one of each token, or none and a single `versi"
    with raises(MethodError, match=message):
        Trajectory((1,)).add(Generated(tokens, logprobs, "eos", 3, versions=versions))
    for right, made in (((), (3, 3, 3)), ((4,), (4, 4, 4)), ((4, 4, 5), (4, 4, 5))):
        assert Trajectory((1,)).add(Generated(tokens, logprobs, "eos", 3, versions=right)).versions == made
    assert len(Trajectory((1,)).add(Generated((), (), "length", 3))) == 0


def test_what_was_sampled_elsewhere_is_forgotten():
    t = Trajectory((1,)).add(Generated((5, 6), (-1.0, -2.0), "eos")).observe((7,)).add(Generated((8,), (-3.0,), "eos"))
    t = t.forget_sampling(1)
    assert t.kinds == (Kind.SAMPLED, Kind.FORCED, Kind.OBSERVED, Kind.FORCED)
    assert t.logprobs[0] == -1.0 and all(math.isnan(p) for p in t.logprobs[1:])


def test_the_argmax_is_no_sample():
    engine = TableEngine(TABLE)

    def greedy(prompt):
        made = yield Generate(prompt.start(), max_tokens=3, temperature=0, top=2)
        assert made[0].top[0] == ((ord("a"), pytest.approx(math.log(0.5))), (ord("b"), pytest.approx(math.log(0.5))))
        return [prompt.start().add(made[0])]

    ((row,),) = run_program(program(greedy), make_prompt(engine.chat, "hi", n=1), engine)
    assert engine.chat.decode(row.tokens) == "aaa" and set(row.kinds) == {Kind.FORCED}
    assert all(math.isnan(p) for p in row.logprobs)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([Trajectory((1,)).force((1,))] * 3, "3.*2"),
        ([Trajectory((1,), (5,), (1,), (-1.0,), ())], "columns of different lengths"),
        ([Trajectory((1,), (5,), (1,), (math.nan,), (0,))], "a sampled token has no log-prob"),
        ([Trajectory((1,)).force((1,) * 9)], "9.*8"),
        ([Trajectory((1,)).force((1,)).turn(1)], "a turn lies outside"),
        ([7], "a list with int instead of a trajectory"),
        ([[7]], "returned int instead of a trajectory"),
        ("rows", "str instead of a list"),
        (None, "NoneType"),
    ],
)
def test_wrong_rows_are_refused(rows, why):
    prompt = make_prompt(CharChat(), "hi", n=2, max_tokens=8)
    with raises(MethodError, match=why):
        check_rows(rows, prompt, 1)


# ---- limits


def test_a_completion_never_outgrows_its_budget_nor_the_context():
    engine = TableEngine({">": {"a": 1}, "a": {"a": 1}})

    def greedy_for_room(prompt):
        t = prompt.start()
        for _ in range(5):
            (g,) = yield Generate(t, max_tokens=4)
            t = t.add(g)
        return [t]

    ((row,),) = run_program(program(greedy_for_room), make_prompt(engine.chat, "hi", n=1, max_tokens=10), engine)
    assert len(row) == 10 and row.finish == "length"
    assert [r.max_tokens for r in engine.requests] == [4, 4, 2], "without room the engine is not asked"
    prompt = make_prompt(engine.chat, "hi", n=1, max_tokens=10, max_context=7)
    ((row,),) = run_program(program(greedy_for_room), prompt, engine)
    assert len(row) == 7 - len(prompt.tokens)


def test_a_prompt_longer_than_the_context_gives_an_empty_row():
    engine = TableEngine(TABLE)
    rows = run_program(program(plain), make_prompt(engine.chat, "a long prompt", n=2, max_context=5), engine)
    assert [(len(r), r.finish) for (r,) in rows] == [(0, "length")] * 2 and not engine.requests

    def asked(prompt):
        greedy, sampled = yield [Generate(prompt.start(), n=2, temperature=0), Generate(prompt.start())]
        assert greedy == [Generated((), (), "length", sampled=False)] * 2
        assert sampled == [Generated((), (), "length", sampled=True)]
        (single,) = yield Generate(prompt.start(), temperature=1)
        assert single.sampled
        return []

    assert run_program(program(asked), make_prompt(engine.chat, "a long prompt", max_context=5), engine) == []


def test_a_program_makes_no_more_requests_than_any_that_ends():
    """1,000 of each rollout, and 8 more per token; those that are still under way are asked once."""

    def asks(times):
        def body(prompt):
            for _ in range(times - 2):
                yield []
            yield [Generate(prompt.start()), Score(prompt.start())]
            return []

        return run_program(program(body), make_prompt(CharChat(), "hi", n=2, max_tokens=3), TableEngine(TABLE))

    most = 2 * (1000 + 8 * 3)
    assert asks(most) == []
    with raises(MethodError, match=f"`made`.*more than {most} requests"):
        asks(most + 1)

    def silent():
        while True:
            yield []

    with raises(MethodError, match="`made`.*asked for nothing 10000 times"):
        run_program(program(lambda prompt: together([silent()])), make_prompt(CharChat(), "hi"), TableEngine(TABLE))

    def waiting(prompt):
        made = yield Generate(prompt.start())
        return made

    def side_by_side(prompt):
        yield from together([*(waiting(prompt) for _ in range(600)), counted(prompt)])
        return []

    sides = []

    class Held:
        async def generate(self, prompt, request):
            assert prompt.n == 1
            sides.append(SIDE.get())
            await ended.wait()
            return []

    def counted(prompt):
        for _ in range(3):
            yield Call(int)
        ended.set()

    async def alone():
        nonlocal ended
        ended = asyncio.Event()
        prompt = make_prompt(CharChat(), "hi", n=1, max_tokens=1)
        return await drive(Running(program(side_by_side), prompt), Held())

    ended = None
    assert asyncio.run(alone()) == [] and sides == list(range(600))


def test_token_ids_of_a_program_are_of_the_vocabulary():
    def forces(prompt):
        return [prompt.start().force((200,))]
        yield

    def asks(prompt):
        yield Generate(prompt.start().force((200,)))

    prompt = make_prompt(CharChat(), "hi", n=1)
    assert Running(program(forces), prompt, 201).rows[0][0].tokens == (200,)
    for body in (forces, asks):
        with raises(MethodError, match=r"`made`.*200.*of 0\.\.199"):
            Running(program(body), prompt, 200)


def test_a_completion_that_a_plan_gives_is_a_row():
    prompt = make_prompt(CharChat(), "hi")
    (end,) = prompt.chat.eos
    plain = given_trajectory(prompt, Completion((5, 6)))
    assert (plain.prompt, plain.tokens, plain.versions, plain.finish) == (prompt.tokens, (5, 6), (-1, -1), "length")
    assert plain.kinds == (Kind.FORCED,) * 2 and all(map(math.isnan, plain.logprobs))
    assert (plain.turns, plain.rewards) == ((), None)
    turns = (Turn(0, 2),)
    rich = Completion(
        (5, 6, end), (-0.5, -9.0, -0.25), (4, 5, 6), {"a": 1.0}, (False, True, False), prompt=(1, 2), turns=turns
    )
    row = given_trajectory(prompt, rich)
    assert (row.prompt, row.tokens, row.versions, row.finish) == ((1, 2), (5, 6, end), (4, 5, 6), "eos")
    assert row.kinds == (Kind.SAMPLED, Kind.OBSERVED, Kind.SAMPLED) and row.logprobs[::2] == (-0.5, -0.25)
    assert math.isnan(row.logprobs[1]) and row.turns == turns and row.rewards == {"a": 1.0}
    observed = given_trajectory(prompt, Completion((5, 6), observed=(False, True)))
    assert observed.kinds == (Kind.FORCED, Kind.OBSERVED)


def test_rows_of_a_tree_have_the_number_of_their_rollout_where_it_is_traced():
    def body(prompt):
        t = prompt.start().force((5,))
        return [t, [replace(t, origin=BranchOrigin(0, 1)), t], replace(t, origin=BranchOrigin(1))]
        yield

    for traced, numbers in ((True, [[None], [1, None], [2]]), (False, [[None], [0, None], [0]])):
        prompt = make_prompt(CharChat(), "hi", n=3, traced=traced)
        rollouts = Running(program(body, rows=2), prompt).rows
        assert [[r.origin and r.origin.number for r in rows] for rows in rollouts] == numbers


def test_the_prefix_of_the_plan_is_forced():
    engine = TableEngine(TABLE)
    prompt = make_prompt(engine.chat, "hi", n=1, prefix=engine.chat.encode("ab"))
    ((row,),) = run_program(program(plain), prompt, engine)
    assert row.kinds[:2] == (Kind.FORCED, Kind.FORCED) and Kind.SAMPLED in row.kinds[2:]


# ---- several at once


def echo(prompt, k):
    """k turns; returns how often it was answered."""
    answered = 0
    t = prompt.start()
    for i in range(k):
        if i % 3 == 2:
            one, two = yield [Call(lambda x: x, (i,)), Generate(t, max_tokens=1)]
            assert one.value == i and len(two) == 1
        else:
            (g,) = yield Generate(t, max_tokens=1)
            t = t.add(g)
        answered += 1
        assert (yield []) == []
    return answered


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6))
def test_together_is_each_alone(counts):
    def body(prompt):
        got = yield from together([echo(prompt, k) for k in counts])
        assert got == list(counts)
        return []

    engine = TableEngine(TABLE)
    assert run_program(program(body), make_prompt(engine.chat, "hi", n=1), engine) == []
    assert engine.batches == max(counts, default=0), "what is asked for at the same time is one batch"


def test_many_prompts_share_the_engines_batches():
    engine = TableEngine(TABLE)
    prompts = [make_prompt(engine.chat, text, n=3) for text in ("x", "y", "z")]
    together_ = run_program(program(plain), prompts, engine)
    assert engine.batches == 1 and [len(rows) for rows in together_] == [3, 3, 3]
    twice = Running(program(lambda prompt: together([plain(prompt), plain(prompt)])), prompts[0])
    assert twice.rows_made == 0 and twice.open == [0, 1] and [twice.side(i) for i in twice.open] == [0, 1]
    for i in twice.open:
        twice.answer(i, engine.generate([(prompts[0], twice.requests[i])])[0])
        assert twice.rows_made == 3 * (i + 1)
    alone = [run_program(program(plain), p, TableEngine(TABLE)) for p in prompts]
    assert alone == together_


def test_samples_of_many_prompts_wait_for_their_trees():
    """Prompts whose greedy part takes 1 to 4 requests: the samples after it are one batch, not four, and so are those
    of a program that never asks for the argmax. A program that asks for both at once is not held back."""

    class Watched(TableEngine):
        """Notes of every batch, for each request: of which prompt, and whether it is sampled."""

        def __init__(self):
            super().__init__(TABLE)
            self.held = []

        def generate(self, requests):
            self.held.append([(p.messages, r.temperature != 0) for p, r in requests])
            return super().generate(requests)

    def tree(prompt):
        t = prompt.start()
        for _ in range(int(prompt.messages)):
            (g,) = yield Generate(t, max_tokens=2, temperature=0)
            t = t.add(g)
        first, second = yield [Generate(prompt.start()), Generate(t)]
        return [prompt.start().add(first[0]), t.add(second[0])]

    def both(prompt):
        t = prompt.start()
        greedy, sampled = yield [Generate(t, temperature=0), Generate(t)]
        return [t.add(greedy[0]), t.add(sampled[0])]

    engine = Watched()
    prompts = [replace(make_prompt(engine.chat, k, n=2), messages=k) for k in "1423"]
    programs = [Running(program(tree), p) for p in prompts]
    run(programs, engine)
    assert all(len(p.rows) == 2 for p in programs)
    assert engine.held == [
        *([(k, False) for k in names] for names in ("1423", "423", "43", "4")),
        [(k, True) for k in "1423" for _ in range(2)],
    ]

    engine = Watched()
    sampled = [Running(program(plain), replace(p, messages="s")) for p in prompts[:2]]
    run([sampled[0], *(Running(program(tree), p) for p in prompts), sampled[1]], engine)
    assert [len(batch) for batch in engine.held] == [4, 3, 2, 1, 10]
    assert [k for k, sample in engine.held[-1] if sample] == list("s11442233s")
    assert not any(sample for batch in engine.held[:-1] for _, sample in batch)

    engine = Watched()
    run([Running(program(both), p) for p in prompts], engine)
    assert engine.held == [[(k, sample) for k in "1423" for sample in (False, True)]]

    engine = Watched()
    run(
        [sampled_too := Running(program(plain), replace(prompts[0], messages="s")), Running(program(both), prompts[1])],
        engine,
    )
    assert engine.held == [[("4", False), ("4", True)], [("s", True)]] and sampled_too.rows is not None


def test_an_asynchronous_engine_gives_the_same_rows():
    class Async:
        def __init__(self):
            self.engine = TableEngine(TABLE, reward=lambda text, columns: len(text))

        async def generate(self, prompt, request):
            await asyncio.sleep(0)
            return self.engine.generate([(prompt, request)])[0]

        async def score(self, prompt, trajectory):
            return self.engine.score([(prompt, trajectory)])[0]

    def body(prompt):
        def one(k):
            (g,) = yield Generate(prompt.start())
            t = prompt.start().add(g)
            called = yield Call(time.sleep, (0.01 * k,))
            assert not called.error
            return t.scored((yield Score(t)))

        return (yield from together([one(k) for k in range(prompt.n)]))

    prompt = make_prompt(CharChat(), "hi", n=3)
    asynchronous = asyncio.run(drive(Running(program(body), prompt), Async()))
    assert asynchronous == run_program(program(body), prompt, Async().engine)
    assert asynchronous[0][0].rewards == {"reward": len(asynchronous[0][0]) - 1}

    def listed(prompt):
        t = prompt.start()
        (greedy,), scored = yield [Generate(t, temperature=0), Score(t)]
        return [t.add(greedy).scored(scored)]

    listed_rows = asyncio.run(drive(Running(program(listed), prompt), Async()))
    assert listed_rows == run_program(program(listed), prompt, Async().engine)


# ---- faults


def test_a_call_that_fails_is_an_answer_and_leaks_nothing(stuck):
    def leave():
        raise SystemExit(3)

    async def later(x):
        await asyncio.sleep(0.01)
        return x

    before = threading.active_count()
    hung, raised, left, good = run_calls(
        [Call(stuck, timeout=0.1, name="the tool"), Call(lambda: 1 / 0), Call(leave), Call(later, (5,))]
    )
    assert stuck.waiting == 1, "the time-out does not wait for the thread"
    assert hung.error == "TimeoutError: the tool took longer than 0.1 s" and hung.value is None
    assert raised.error == "ZeroDivisionError: division by zero"
    assert left.error == "SystemExit: 3"
    assert good.value == 5 and not good.error
    stuck.release()
    until(lambda: threading.active_count() <= before, "the end of the threads")


def test_calls_that_never_return_end_the_run_in_time(monkeypatch, stuck):
    import rl_plugins.kit.threads as calls

    monkeypatch.setattr(calls, "MAX_HANGING", 0)
    monkeypatch.setattr(calls._calls, "concurrency", 2)
    until(lambda: not calls._calls._running, "the end of the calls of other tests")
    run_calls([Call(stuck, timeout=0.05, name="judge")] * 2)
    with raises(MethodError, match="2"):
        run_calls([Call(int)])


def test_an_engine_that_dies_ends_it_with_its_own_error():
    closed = []

    def body(prompt):
        try:
            t = prompt.start()
            for _ in range(3):
                (g,) = yield Generate(t, max_tokens=1)
                t = t.add(g)
            return [t]
        finally:
            closed.append(prompt)

    engine = TableEngine({">": {"a": 1}, "a": {"a": 1}}, fail_after=3)
    with pytest.raises(RuntimeError, match="the engine died"):
        run_program(program(body), [make_prompt(engine.chat, t, n=1) for t in "xy"], engine)
    assert len(closed) == 2, "programs that wait are closed, so they release what they hold"


def test_an_abort_keeps_what_was_decoded():
    engine = TableEngine({">": {"a": 1}, "a": {"a": 1}}, abort_after=2)

    def body(prompt):
        t = prompt.start()
        while not t.finish or t.finish == "abort":
            (g,) = yield Generate(t)
            t = t.add(g)
        return [t]

    ((row,),) = run_program(program(body), make_prompt(engine.chat, "hi", n=1, max_tokens=5), engine)
    assert engine.chat.decode(row.tokens) == "aaaaa" and len(engine.requests) == 3


def test_an_abort_before_the_first_token():
    engine = TableEngine(TABLE, abort_after=0)
    rows = run_program(program(plain), make_prompt(engine.chat, "hi", n=2), engine)
    assert [(r.tokens, r.finish) for (r,) in rows] == [((), "abort")] * 2


def test_errors_of_a_program_name_its_method():
    engine = TableEngine(TABLE)

    def fails(prompt):
        yield Generate(prompt.start())
        raise ValueError("third wheel")

    def asks_nonsense(prompt):
        yield "more"

    def too_few(prompt):
        yield Generate(prompt.start(), n=0)

    def many(prompt):
        yield []
        return [prompt.start()] * 5

    def stateful(prompt):
        yield []
        method.state["x"] = 1
        return []

    for body, why in (
        (fails, r"(?s)`made` failed in `rollout`: ValueError: third wheel.*raise ValueError.*Remove `made`"),
        (asks_nonsense, "it yielded str. Yield Generate, Score or Call"),
        (too_few, r"Generate\(n=0\); it must be a whole number of 1 to 100000"),
        (many, "returned 5 rollouts for a prompt that asks for 1"),
        (stateful, "reads self.state in the generation place"),
    ):
        method = program(body)
        with raises(MethodError, match=why):
            run_program(method, make_prompt(engine.chat, "hi", n=1), engine)
        assert method._place == "driver"


def test_a_program_that_changes_its_prompt_is_refused_where_hooks_are_watched(monkeypatch):
    def body(prompt):
        prompt.columns["prompt"] = "another"
        return []
        yield

    monkeypatch.setenv("RL_PLUGINS_DEBUG", "1")
    with raises(MethodError, match="`made`.*`Prompt.columns`"):
        Running(program(body), make_prompt(CharChat(), "hi"))


def test_a_rollout_that_is_no_generator_is_an_error():
    class Wrong(Method):
        name = "wrong"

        def rollout(self, prompt):
            return []

    with raises(MethodError):
        Running(Wrong(), make_prompt(CharChat(), "hi"))


# ---- randomness


def test_random_numbers_depend_on_prompt_step_and_purpose_alone():
    def draws(**changes):
        return make_prompt(CharChat(), "hi", **changes).rng("a", 1).random()

    assert draws() == draws()
    prompt: Prompt = make_prompt(CharChat(), "hi")
    values = {prompt.rng("a").random(), prompt.rng("b").random(), prompt.rng("a", 1).random()}
    values |= {draws(batch=1), draws(seed="1|test|0")}
    assert len(values) == 5


def test_run_needs_programs_at_their_end():
    engine = TableEngine(TABLE)
    running = [Running(program(plain), make_prompt(engine.chat, "hi", n=1))]
    assert running[0].rows is None and running[0].open == [0]
    run(running, engine)
    assert running[0].rows is not None and not running[0].open


def test_what_a_tool_raises_is_told_shortly_whatever_it_is():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def raising(error):
        def tool():
            raise error

        return Call(tool)

    mute, long = run_calls([raising(Mute()), raising(ValueError("x" * 10**6))])
    assert mute.error == "Mute: <Mute whose text cannot be made>"
    assert long.error.startswith("ValueError: xxx") and len(long.error) < 600
