"""CLEANER: golden merges, every branch of the rollback, and books that are right token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from golden_cases import Case, Golden
from one_method import acting
from waiting import SOON, Stuck

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Trajectory, together
from rl_plugins.kit.agents import Observation, play
from rl_plugins.lab.demo.environments import Calculator
from rl_plugins.methods.cleaner import PATTERNS, Cleaner, call_start, code_of, error_type, merge_turns
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

GOLDEN = Golden("cleaner")


class Tool:
    """`[ok]` is a call that succeeds, `[...]` any other that fails, `=` ends the episode; `!` changes it for good."""

    made: list[Tool] = []

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.closed = False
        Tool.made.append(self)

    def reset(self, columns: Any) -> Observation:
        return Observation("", state="start")

    def act(self, action: str) -> Observation:
        self.actions.append(action)
        if "=" in action:
            return Observation("right", 1.0, done=True)
        if "[raise" in action:
            raise OSError("crashed")
        if "[end" in action:
            return Observation("over", 0.0, done=True, valid=False)
        valid = "[ok]" in action
        return Observation("fine" if valid else "NameError", float(valid), valid=valid, state=len(self.actions))

    def score(self) -> float:
        return float(len(self.actions))

    def close(self) -> None:
        self.closed = True


class Plain(Method):
    name = "plain"

    def rollout(self, prompt: Any) -> Any:
        return (yield from together([play(prompt, Tool, 5) for _ in range(prompt.n)]))


def cleaner(environment: Any = Tool, **params: Any) -> Cleaner:
    values = {"environment": environment, "marker": "[", "max_turns": 5, **params}
    return Cleaner(build_params(Cleaner.Params, acting(Cleaner.Params, values), "cleaner"))


def script(turns: dict[str, str], **options: Any) -> TableEngine:
    """Writes a given text after a given end of the context (up to where its turn begins); the longest end counts."""

    def model(text: str) -> dict[str, float]:
        place = text.rindex(">") + 1
        context, begun = text[:place], text[place:]
        wanted = max((end for end in turns if context.endswith(end)), key=len)
        rest = turns[wanted][len(begun) :]
        return {rest[0] if rest else EOS: 1.0}

    return TableEngine(model, **options)


def run(method: Method, engine: TableEngine, logged: Any = None, **options: Any) -> list[Trajectory]:
    prompt = make_prompt(engine.chat, "q", **{"n": 1, "max_tokens": 400, **options})
    return [rows[0] for rows in run_program(method, prompt, engine, logged)]


def show(engine: TableEngine, t: Trajectory) -> str:
    return engine.chat.decode(t.tokens, special=True).replace(EOS, "|")


def kinds_of(t: Trajectory) -> str:
    """Observed `.`, sampled `s`, forced `F`."""
    return "".join(".sF"[k] for k in t.kinds)


def check_books(engine: TableEngine, t: Trajectory) -> None:
    """Sampled tokens have the log-prob of exactly this context, all others none; the turns hold every trained token."""
    assert len(t.tokens) == len(t.kinds) == len(t.logprobs) == len(t.versions) == len(t.trained)
    for i, (token, kind, logprob, version) in enumerate(zip(t.tokens, t.kinds, t.logprobs, t.versions, strict=True)):
        if kind == Kind.SAMPLED:
            true = engine.probabilities(t.prompt + t.tokens[:i])[token]
            assert logprob == pytest.approx(math.log(true), abs=1e-9)
        else:
            assert math.isnan(logprob)
        assert version == (-1 if kind == Kind.OBSERVED else engine.version)
    inside = {i for turn in t.turns for i in range(turn.start, turn.stop)}
    assert inside == {i for i, kind in enumerate(t.kinds) if kind != Kind.OBSERVED}


# ---- golden cases: the authors' merge and their detection of errors


@GOLDEN.kind("old_tokens")
def check_merge(case: Case) -> None:
    given, expected = case.inputs, case.expected
    words = sorted({*given["old_tokens"], *given["new_tokens"]})
    old, new = ([words.index(w) for w in given[k]] for k in ("old_tokens", "new_tokens"))

    def decode(tokens: Any) -> str:
        return "".join(words[t] for t in tokens)

    p = case.build(Cleaner, environment=Tool)
    split = [p.marker in decode(turn) and not any(p.marker in words[t] for t in turn) for turn in (old, new)]
    boundaries = ("code_compat",) if any(split) else ("exact", "code_compat")  # theirs cuts inside of a split marker
    for boundary in (p.boundary,) if "boundary" in case.params else boundaries:
        merge = merge_turns(old, new, decode, replace(p, boundary=boundary))
        assert merge.similarity == pytest.approx(expected["similarity"], abs=5e-7)
        assert ("full_turn" if merge.deep else "tool_call_only") == expected["strategy"]
        for tokens, name in ((old, "old_prefix_len"), (new, "new_prefix_len")):
            assert call_start(tokens, decode, p.marker, boundary) == expected[name]
        merged = old[: merge.keep] + new[merge.begin :]
        assert [words[t] for t in merged] == expected["merged_response_tokens"]
        assert given["prompt_tokens"] + [words[t] for t in merged] == expected["sequence_tokens"]
        assert [1] * len(merged) == expected["response_mask"]
        if None in (given["old_logprobs"], given["new_logprobs"]):
            assert expected["response_logprobs"] is None
        else:
            logprobs = given["old_logprobs"][: merge.keep] + given["new_logprobs"][merge.begin :]
            # where nothing of the old turn is kept theirs stays empty, by mistake
            assert expected["response_logprobs"] in ([logprobs] if merge.keep else [logprobs, []])


@GOLDEN.kind("tool_text")
def check_error(case: Case) -> None:
    p = case.build(Cleaner, environment=Tool)
    found = error_type(case.inputs["tool_text"], p.success_marker, p.patterns)
    assert (found is not None, found) == (case.expected["has_error"], case.expected["error_type"])


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def test_a_case_whose_marker_is_split_has_the_authors_boundary() -> None:
    inputs = {
        "prompt_tokens": ["p"],
        "old_tokens": ["Think", " ", "<tool", "_call>", "x"],
        "new_tokens": ["So", "<tool", "_call>", "x"],
        "old_logprobs": [-1.0, -2.0, -3.0, -4.0, -5.0],
        "new_logprobs": [-0.1, -0.2, -0.3, -0.4],
    }
    merged = ["Think", " ", "<tool", "_call>", "x"]
    expected = {
        "similarity": 1.0,
        "strategy": "tool_call_only",
        "merged_response_tokens": merged,
        "sequence_tokens": ["p", *merged],
        "response_mask": [1] * 5,
        "response_logprobs": [-1.0, -2.0, -3.0, -0.3, -0.4],
        "old_prefix_len": 3,
        "new_prefix_len": 2,
    }
    params = {"gamma": 0.5, "marker": "<tool_call>"}
    values = {"name": "split", "inputs": inputs, "params": params, "expected": expected}
    GOLDEN.check(Case("cleaner.json", values))
    with pytest.raises(AssertionError):
        GOLDEN.check(Case("cleaner.json", values | {"params": params | {"boundary": "exact"}}))


def test_default_patterns_are_the_authors() -> None:
    assert PATTERNS in [tuple(c.params["patterns"]) for c in GOLDEN.cases if "patterns" in c.params]
    assert error_type("") is None


def test_a_marker_of_several_tokens() -> None:
    words = ["Think", " <to", "ol_", "call>", "\n{", "x", "}", "<tool", "_call", ">"]

    def decode(tokens: Any) -> str:
        return "".join(words[t] for t in tokens)

    old, new = [0, 1, 2, 3, 4, 5, 6], [0, 0, 7, 8, 9, 4, 6]
    exact, compat = cleaner(marker="<tool_call>").params, cleaner(marker="<tool_call>", boundary="code_compat").params
    assert [call_start(t, decode, "<tool_call>", "exact") for t in (old, new)] == [1, 2]
    assert [call_start(t, decode, "<tool_call>", "code_compat") for t in (old, new)] == [3, 4]
    a, b = merge_turns(old, new, decode, exact), merge_turns(old, new, decode, compat)
    assert decode(old[: a.keep] + new[a.begin :]) == "Think<tool_call>\n{}"
    assert decode(old[: b.keep] + new[b.begin :]) == "Think <tool_>\n{}"  # garbled, as in the code
    assert call_start([0, 0], decode, "<tool_call>", "exact") is None
    assert call_start([0, 1], decode, "", "exact") == 0


def test_similarity_at_gamma_keeps_the_reasoning() -> None:
    def decode(tokens: Any) -> str:
        return "".join(map(chr, tokens))

    old, new = [ord(c) for c in "so[ab"], [ord(c) for c in "no, [cd"]  # 2 of 6 characters: s = 1/3
    for gamma, deep in ((1 / 3, False), (0.334, True), (0.0, False), (1.01, True)):
        merge = merge_turns(old, new, decode, cleaner(gamma=gamma).params)
        assert merge.similarity == pytest.approx(1 / 3) and merge.deep == deep
        assert decode(old[: merge.keep] + new[merge.begin :]) == ("no, [cd" if deep else "so[cd")
    merge = merge_turns(old, [ord("=")], decode, cleaner().params)
    assert (merge.similarity, merge.deep, merge.keep, merge.begin) == (None, True, 0, 0)


def test_the_code_alone_can_be_compared() -> None:
    call = '<tool_call>\n{"name": "code", "arguments": {"code": "print(1)"}}\n</tool_call>'
    other = call.replace("print(1)", "xyz")
    assert code_of(call) == "print(1)" and code_of(other) == "xyz"
    assert code_of('{"arguments": "as text"}') == "as text"
    assert [code_of(t) for t in ("<tool_call>{broken}", "[1+1]", '{"no": 1}', '{"arguments": 3}')] == [
        "<tool_call>{broken}",
        "[1+1]",
        '{"no": 1}',
        '{"arguments": 3}',
    ]
    tokens = [[ord(c) for c in text] for text in (call, other)]
    for compare, deep in (("call_text", False), ("code", True)):
        p = cleaner(marker="<tool_call>", compare=compare).params
        assert merge_turns(*tokens, lambda t: "".join(map(chr, t)), p).deep == deep


# ---- the rollout


def test_a_swapped_call_is_grafted_token_by_token() -> None:
    engine = script({"<q>": "so [oh]", "<NameError>": "hm [ok]", "<fine>": "=1"}, version=7)
    (t,) = run(cleaner(gamma=0.4), engine)
    assert show(engine, t) == "so [ok]|<fine>=1|"
    assert kinds_of(t) == "sssFFFFF......sss"  # reasoning sampled, call and its end grafted, the answer sampled
    check_books(engine, t)
    assert Tool.made[-1].actions == ["so [oh]", "so [ok]", "=1"] and Tool.made[-1].closed
    assert {k: t.meta[k] for k in ("calls", "failed_calls", "recovered", "given_up", "retries", "deep_repairs")} == {
        "calls": 1,
        "failed_calls": 1,
        "recovered": 1,
        "given_up": 0,
        "retries": 1,
        "deep_repairs": 0,
    }
    assert (t.meta["turns"], t.meta["stop_reason"], t.meta["error_types"]) == (2, "done", ["invalid"])
    assert [(turn.anchor, turn.valid, turn.reward) for turn in t.turns] == [("start", True, 1.0), (2, True, 1.0)]
    assert engine.requests[1].trajectory.tokens == ()  # the retry was generated aside
    assert engine.chat.decode(engine.requests[1].trajectory.prompt) == "<q>so [oh]<NameError>"


def test_a_whole_turn_is_grafted_where_the_calls_differ() -> None:
    engine = script({"<q>": "so [oh]", "<NameError>": "hm [ok]", "<fine>": "=1"})
    (t,) = run(cleaner(gamma=0.9), engine)
    assert show(engine, t) == "hm [ok]|<fine>=1|"
    assert kinds_of(t) == "FFFFFFFF......sss"
    check_books(engine, t)
    assert t.meta["deep_repairs"] == t.meta["repairs"] == t.meta["recovered"] == 1


def test_a_later_turn_is_repaired_too() -> None:
    engine = script({"<q>": "a[ok]", "<fine>": "b[no]", "<NameError>": "c[ok]=", "|": "="})
    (t,) = run(cleaner(), engine)
    assert show(engine, t) == "a[ok]|<fine>b[ok]=|"
    assert kinds_of(t) == "ssssss......sFFFFFF"
    check_books(engine, t)
    assert (t.meta["calls"], t.meta["failed_calls"], t.meta["recovered"]) == (2, 1, 1)


@pytest.mark.parametrize("retries", [0, 1, 2, 3])
def test_after_k_retries_one_failed_call_and_its_error_stay(retries: int) -> None:
    engine = script({"<q>": "a[0]", "NameError>": "b[1]", "times in a row. Try another approach.>": "="})
    (t,) = run(cleaner(max_tool_retries=retries, max_turns=2), engine, max_tokens=900)
    failed = "a[1]|" if retries else "a[0]|"
    note = f"\nNote: this has failed {retries} times in a row. Try another approach." if retries >= 2 else ""
    answer = "=|" if note else "b[1]|"
    assert show(engine, t) == f"{failed}<NameError{note}>{answer}"
    assert len(engine.requests) == 2 + retries and t.meta["retries"] == retries
    assert t.meta["given_up"] == 1 + (not note) and t.meta["recovered"] == 0  # the next one is not repaired either
    assert (t.meta["calls"], t.meta["failed_calls"]) == ((1, 1) if note else (2, 2))
    check_books(engine, t)


def test_after_giving_up_nothing_is_repaired() -> None:
    (t,) = run(cleaner(max_tool_retries=1, max_turns=4), engine := script({"<q>": "a[0]", "NameError>": "b[1]"}))
    assert show(engine, t) == "a[1]|<NameError>b[1]|<NameError>b[1]|<NameError>b[1]|"
    assert (t.meta["retries"], t.meta["calls"], t.meta["given_up"], len(engine.requests)) == (1, 4, 4, 5)


def test_each_retry_sees_the_call_that_was_merged_last() -> None:
    engine = script({"<q>": "a[0]", "a[0]" + EOS + "<NameError>": "b[1]", "a[1]" + EOS + "<NameError>": "c[ok]"})
    (t,) = run(cleaner(max_turns=1 + 1), engine, max_tokens=12)
    assert show(engine, t).startswith("a[ok]|")
    assert [engine.chat.decode(r.trajectory.context) for r in engine.requests[:3]] == [
        "<q>",
        "<q>a[0]<NameError>",
        "<q>a[1]<NameError>",
    ]


def test_another_turn_without_a_call_stays_as_it_was_sampled() -> None:
    engine = script({"<q>": "a[0]", "<NameError>": "no idea", "idea" + EOS + "<NameError>": "[no]"})
    (t,) = run(cleaner(max_turns=3), engine)
    assert show(engine, t) == "a[0]|<NameError>no idea|<NameError>[no]|"
    assert "F" not in kinds_of(t)
    check_books(engine, t)
    assert (t.meta["given_up"], t.meta["retries"], t.meta["turns"], t.meta["recovered"]) == (2, 1, 3, 0)
    assert len(engine.requests) == 3  # repairs have ended
    engine = script({"<q>": "a[0]", "<NameError>": "=5"})
    (t,) = run(cleaner(), engine)
    assert show(engine, t) == "a[0]|<NameError>=5|" and t.meta["stop_reason"] == "done"
    check_books(engine, t)


def test_without_rollback_it_is_the_plain_loop() -> None:
    def model(text: str) -> dict[str, float]:
        begun = text[text.rindex(">") + 1 :]
        ways = ["a[ok]", "b[no]", "c=1"]
        possible = [w[len(begun) :] for w in ways if w.startswith(begun)]
        return {(rest[0] if rest else EOS): 0.25 + 0.5 * (rest[:1] == "b") for rest in possible}

    def made(method: Method, seed: int) -> Any:
        engine = TableEngine(model, seed=seed)
        return [(t.context, t.kinds, t.turns, t.meta["score"]) for t in run(method, engine, n=8)]

    plain = made(Plain(), 1)
    assert made(cleaner(rollback_probability=0.0), 1) == plain
    assert made(cleaner(max_tool_retries=0), 1) == plain
    with_it = made(cleaner(), 1)
    assert with_it != plain and any(Kind.FORCED in kinds for _, kinds, _, _ in with_it)
    # no failure, nothing changes
    for engine in (TableEngine(model, seed=s) for s in range(3)):
        for t in run(cleaner(), engine, n=8):
            check_books(engine, t)
            assert (Kind.FORCED in t.kinds) == (t.meta["repairs"] > 0)
            assert t.meta["failed_calls"] == t.meta["recovered"] + t.meta["given_up"]


def test_rollouts_are_drawn_before_they_begin() -> None:
    def repaired(seed: str, p: float) -> list[bool]:
        engine = script({"<q>": "a[0]", "<NameError>": "b[ok]", "<fine>": "="})
        return [t.meta["repairs"] > 0 for t in run(cleaner(rollback_probability=p), engine, n=200, seed=seed)]

    half = repaired("0|cleaner|0", 0.5)
    assert 70 < sum(half) < 130
    assert half == repaired("0|cleaner|0", 0.5) != repaired("1|cleaner|0", 0.5)
    assert all(repaired("0|cleaner|0", 1.0))


def test_after_many_attempts_nothing_is_repaired() -> None:
    engine = script({"<q>": "a[0]", "<NameError>": "b[1]"})
    (t,) = run(cleaner(max_attempts=2, max_turns=3), engine)
    assert t.meta["retries"] == 1 and len(engine.requests) == 4
    assert show(engine, t) == "a[1]|<NameError>b[1]|<NameError>b[1]|"


def test_the_last_turn_is_not_repaired() -> None:
    engine = script({"<q>": "a[0]", "<NameError>": "b[ok]"})
    (t,) = run(cleaner(max_turns=1), engine)
    assert show(engine, t) == "a[0]|" and (t.meta["stop_reason"], t.meta["retries"]) == ("limit", 0)


# ---- room, interruptions, broken tools


def test_a_retry_may_be_longer_than_the_completion_and_a_merge_is_cut() -> None:
    turns = {"<q>": "[ok]", "<fine>": "a[0]", "<NameError>": "long thoughts [ok]", "a[ok]" + EOS + "<fine>": "="}
    (t,) = run(cleaner(), engine := script(turns), max_tokens=20)  # error and retry together: 46 tokens
    assert show(engine, t) == "[ok]|<fine>a[ok]|" and t.meta["recovered"] == 1
    check_books(engine, t)
    (t,) = run(cleaner(gamma=1.1), engine := script(turns), max_tokens=20)
    assert show(engine, t) == "[ok]|<fine>long thoughts [ok]|"[:20] and kinds_of(t) == "sssss......" + "F" * 9
    assert (t.meta["stop_reason"], t.finish, t.meta["turns"]) == ("length", "length", 2)
    assert [(x.start, x.stop, x.valid) for x in t.turns] == [(0, 5, True), (11, 20, False)]
    assert Tool.made[-1].actions == ["[ok]", "a[0]"]
    check_books(engine, t)


def test_where_the_error_does_not_fit() -> None:
    turns = {"<q>": "a[0]", "<NameError>": "no idea"}
    (t,) = run(cleaner(), engine := script(turns), max_tokens=10)  # no room for the error, and the retry has no call
    assert show(engine, t) == "a[0]|" and t.meta["stop_reason"] == "length"
    (t,) = run(cleaner(), engine := script(turns), max_tokens=20)  # the error fits, the turn does not
    assert show(engine, t) == "a[0]|<NameError>no idea|"[:20] and t.meta["stop_reason"] == "length"
    check_books(engine, t)
    (t,) = run(cleaner(), engine := script(turns), max_context=8, max_tokens=8)  # the context of the engine is full
    assert show(engine, t) == "a[0]|" and t.meta["retries"] == 0
    (t,) = run(cleaner(), engine := script(turns), max_context=3)
    assert (len(t), t.meta["stop_reason"], t.turns) == (0, "length", ())


def test_an_empty_retry_counts_and_changes_nothing() -> None:
    engine = script({"<q>": "a[0]", "<NameError>": "b[ok]", "row. Try another approach.>": "=", "<fine>": "="})
    generate = engine._one

    def sometimes(request: Any) -> Any:
        aside = request.trajectory.tokens == () and request.trajectory.prompt[-2:] == engine.chat.encode("r>")
        engine.abort_after = 0 if aside and len(engine.requests) < empty + 2 else None
        return generate(request)

    engine._one = sometimes  # type: ignore[method-assign]
    empty = 2
    (t,) = run(cleaner(max_turns=2), engine)
    assert show(engine, t).startswith("a[ok]|") and t.meta["retries"] == 3 and t.meta["recovered"] == 1
    assert Tool.made[-1].actions[:2] == ["a[0]", "a[ok]"]
    engine.requests.clear()
    empty = 9
    (t,) = run(cleaner(max_turns=2), engine, max_tokens=900)
    assert show(engine, t) == "a[0]|<NameError\nNote: this has failed 3 times in a row. Try another approach.>=|"
    check_books(engine, t)


def test_interrupted_turns_go_on() -> None:
    turns = {"<q>": "so [oh]", "<NameError>": "hm [ok]", "<fine>": "=1"}
    for gamma in (0.4, 0.9):
        whole, parts = (run(cleaner(gamma=gamma), script(turns, abort_after=k))[0] for k in (None, 2))
        assert (whole.tokens, whole.kinds, whole.turns) == (parts.tokens, parts.kinds, parts.turns)


def test_a_broken_environment_ends_the_episode_unless_there_is_a_copy(stuck: Stuck) -> None:
    turns = {"<q>": "a[raise]", "OSError: crashed>": "b[ok]", "<fine>": "="}
    (t,) = run(cleaner(), engine := script(turns))
    assert show(engine, t) == "a[raise]|" and t.meta["stop_reason"] == "error" and math.isnan(t.meta["score"])
    Tool.made.clear()
    (t,) = run(cleaner(copy_environment=True, gamma=0.0), engine := script(turns))
    assert show(engine, t) == "a[ok]|<fine>=|" and t.meta["stop_reason"] == "done" and not t.meta["error"]
    check_books(engine, t)
    twice = {"<q>": "a[raise]", "OSError: crashed>": "b[raise]"}  # given up, and the copy goes on
    (t,) = run(cleaner(copy_environment=True, gamma=0.0, max_tool_retries=1, max_turns=2), engine := script(twice))
    assert (t.meta["given_up"], t.meta["turns"], t.meta["error"]) == (2, 2, "OSError: crashed")

    class Slow(Tool):
        def act(self, action: str) -> Observation:
            if "raise" in action:
                stuck()
            return super().act(action)

    late = f"took longer than {SOON:g} s>"
    (t,) = run(cleaner(Slow, timeout=SOON, copy_environment=True, gamma=0.0), script({**turns, late: "b[ok]"}))
    assert t.meta["stop_reason"] == "done" and t.meta["recovered"] == 1
    assert stuck.waiting == 1


def test_a_copy_is_the_environment_before_the_failed_call() -> None:
    turns = {"<q>": "a[0]", "<NameError>": "b[ok]", "<fine>": "="}
    (t,) = run(cleaner(copy_environment=True), script(turns))
    assert t.meta["score"] == 2.0  # the failed call never happened
    (t,) = run(cleaner(), script(turns))
    assert t.meta["score"] == 3.0
    turns = {"<q>": "a[end]", "<over>": "b[ok]", "<fine>": "="}
    (t,) = run(cleaner(gamma=0), engine := script(turns))
    assert show(engine, t) == "a[end]|" and (t.meta["stop_reason"], t.meta["given_up"]) == ("done", 1)
    (t,) = run(cleaner(gamma=0, copy_environment=True), engine := script(turns))
    assert show(engine, t) == "a[ok]|<fine>=|" and t.meta["score"] == 2.0


def test_copies_are_closed() -> None:
    copies: list[Tool] = []

    class Copied(Tool):
        def __deepcopy__(self, memo: Any) -> Copied:
            copies.append(Copied())
            copies[-1].actions = list(self.actions)
            return copies[-1]

    Tool.made.clear()
    run(cleaner(Copied, copy_environment=True), script({"<q>": "a[0]", "<NameError>": "b[ok]", "<fine>": "="}))
    assert len(copies) == 2 and len(Tool.made) == 3 and all(tool.closed for tool in Tool.made)

    class Fixed(Tool):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("it holds a socket")

    with pytest.raises(MethodError, match="Fixed cannot be copied .*it holds a socket.*`copy_environment` to false"):
        run(cleaner(Fixed, copy_environment=True), script({"<q>": "a[0]"}))


def test_a_rollout_without_an_environment_is_a_row_without_a_reward() -> None:
    class Never(Tool):
        def reset(self, columns: Any) -> Observation:
            raise OSError("no port")

    for t in run(cleaner(Never), script({"<q>": "a[0]"}), n=2):
        assert len(t) == 0 and math.isnan(t.meta["score"]) and t.meta["stop_reason"] == "error"
        assert "no port" in t.meta["error"] and t.meta["calls"] == t.meta["turns"] == 0
    count = iter(range(9))

    def sometimes() -> Tool:
        return Never() if next(count) == 1 else Tool()

    rows = run(cleaner(sometimes), script({"<q>": "="}), n=3)
    assert sorted(len(t) > 0 for t in rows) == [False, True, True]


def test_errors_by_text() -> None:
    class Harness(Tool):
        """Every observation counts as valid; the text says what happened."""

        def act(self, action: str) -> Observation:
            if "=" in action:
                return Observation("bye", done=True)
            return Observation("Tool call success: 4" if "[ok]" in action else "NameError: x")

    turns = {"<q>": "a[0]", "<NameError: x>": "b[ok]", ": 4>": "="}
    (t,) = run(cleaner(Harness, errors="text"), engine := script(turns))
    assert show(engine, t) == "a[ok]|<Tool call success: 4>=|" and t.meta["error_types"] == ["NameError"]
    (t,) = run(cleaner(Harness), engine := script(turns))
    assert show(engine, t).startswith("a[0]|<NameError: x>b[ok]|")


def test_without_a_marker_the_turn_is_the_call() -> None:
    engine = script({"<q>": "a[0]", "<NameError>": "b[ok]", "<fine>": "="})
    (t,) = run(cleaner(marker="", gamma=0.0), engine)
    assert show(engine, t) == "b[ok]|<fine>=|" and kinds_of(t).startswith("FFFFFF.")
    assert t.meta["deep_repairs"] == 0


def test_what_is_logged_counts_first_attempts() -> None:
    engine = script({"<q>": "a[0]", "a[0]" + EOS + "<NameError>": "b[1]", "<NameError>": "c[ok]", "<fine>": "="})
    logged: dict[str, float] = {}
    run(cleaner(gamma=0.0), engine, logged, n=3)
    assert logged == {
        "cleaner/failed_calls": 1.0,  # one call of each rollout, which failed at first and once more
        "cleaner/recovered": 1.0,
        "cleaner/deep": 0.0,
        "cleaner/retries": 2.0,
        "cleaner/grafted": pytest.approx(5 / 8),  # `[ok]|` of `a[ok]|=|`
    }
    logged.clear()
    run(cleaner(), engine, logged, training=False)
    assert logged == {}


def test_a_prompt_alone_and_among_others_is_the_same() -> None:
    def model(text: str) -> dict[str, float]:
        begun = text[text.rindex(">") + 1 :]
        possible = [w[len(begun) :] for w in ("a[ok]", "b[no]", "=") if w.startswith(begun)]
        return {(rest[0] if rest else EOS): 1.0 for rest in possible}

    def made(names: str) -> list[Any]:
        engine = TableEngine(model, seed=4)
        prompts = [make_prompt(engine.chat, name, n=3, max_tokens=90, seed=name) for name in names]
        return [[rows[0].context for rows in p] for p in run_program(cleaner(), prompts, engine)]

    assert made("xyz") == made("x") + made("y") + made("z")


def test_the_demo_environment() -> None:
    row = next(r for r in Calculator.rows(20, levels=[1]))
    action, answer = Calculator.expert(row)
    question = row["prompt"][0]["content"]
    turns = {"?>": "[1+]", "<err>": action, ">": answer}
    (t,) = run(cleaner(Calculator), engine := script(turns), columns=row)
    assert engine.chat.decode(t.tokens).startswith(action) and "err" not in engine.chat.decode(t.tokens)
    assert t.meta["score"] == 1.0 and t.meta["recovered"] == 1 and question not in show(engine, t)
    check_books(engine, t)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"environment": None}, "rl_plugins.lab.demo.environments:Grid"),
        ({"note": "{times} times"}, "cannot be filled in"),
        ({"gamma": -0.1}, "`gamma` is -0.1"),
        ({"rollback_probability": 1.1}, "`rollback_probability` is 1.1"),
        ({"max_tool_retries": -1}, "`max_tool_retries` is -1"),
        ({"boundary": "near"}, "'exact', 'code_compat'"),
        ({"environment": "no.such:thing"}, "cannot be loaded"),
    ],
)
def test_parameters_that_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cleaner(**params)


def test_it_forces_tokens_and_acts_in_evaluation() -> None:
    assert "forced_tokens" in Cleaner.brings and Cleaner.in_eval == ("rollout",)
