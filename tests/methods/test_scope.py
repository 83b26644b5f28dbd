"""SCOPE (arXiv 2602.24110): steps, what is corrected and how, the books, and the loss of own and corrected tokens."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Prompt
from rl_plugins.methods.scope import Scope, first_wrong, split_steps
from rl_plugins.methods.scope.steps import checked_scores
from rl_plugins.runtime.card_file import card_file
from rl_plugins.testing import make_rollouts, make_terms, make_tokens, one_step, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

# Answers are steps "1.", "2.", "3." or wrong ones "x.", each ended by a dot; right: all three in order.


def oracle(messages: Any, steps: list[str], columns: Any) -> list[float]:
    return [1.0 if step == f"{i + 1}." else 0.0 for i, step in enumerate(steps)]


def teacher(messages: Any, prefix: str, columns: Any) -> str:
    return "".join(f"{i + 1}." for i in range(len(prefix) // 2, 3))


def reward(text: str, columns: Any) -> float:
    return float(text == "1.2.3.")


def scope(**params: Any) -> Scope:
    values = {"prm": oracle, "corrector": teacher, "separator": ".", "min_step": 1, "min_prefix": 0.0} | params
    return Scope(build_params(Scope.Params, acting(Scope.Params, values), "scope"))


def saying(*answers: str) -> Any:
    """A model that gives one of these answers, then ends."""

    def model(text: str) -> dict[str, float]:
        said = text.split(">")[-1]
        follows = [a[len(said) :][:1] or EOS for a in answers if a.startswith(said)]
        return {c: follows.count(c) / len(follows) for c in follows} if follows else {EOS: 1.0}

    return model


def prompt_of(engine: TableEngine, n: int = 4, **changes: Any) -> Prompt:
    return make_prompt(engine.chat, "q", n=n, **changes)


def texts(engine: TableEngine, rollouts: Any) -> list[str]:
    return [engine.chat.decode(row.tokens) for (row,) in rollouts]


def check_books(engine: TableEngine, rollouts: Any) -> None:
    for (row,) in rollouts:
        assert len(row.tokens) == len(row.kinds) == len(row.logprobs) == len(row.versions)
        for i, (token, kind, logprob) in enumerate(zip(row.tokens, row.kinds, row.logprobs, strict=True)):
            if kind == Kind.SAMPLED:
                assert logprob == pytest.approx(math.log(engine.probabilities(row.prompt + row.tokens[:i])[token]))
            else:
                assert math.isnan(logprob)


# ---- steps


@settings(max_examples=40, deadline=None)
@given(text=st.text("ab.\n", max_size=40), least=st.integers(0, 6))
def test_steps_make_up_the_text(text: str, least: int) -> None:
    steps = split_steps(text, "\n\n", least)
    assert "".join(steps) == text
    if len(steps) > 1:
        assert all(len(s.strip()) >= least for s in steps)


def test_short_steps_are_joined() -> None:
    joined = "So.\n\nLonger step here.\n\nok\n\n"
    assert split_steps(joined, "\n\n", 5) == [joined]
    assert split_steps("one step\n\nab\n\ncdefg", "\n\n", 5) == ["one step\n\n", "ab\n\ncdefg"]
    assert split_steps("one step\n\nab", "\n\n", 5) == ["one step\n\nab"]
    assert split_steps("ab", "\n\n", 5) == ["ab"] and split_steps("", "\n\n", 5) == []


def test_a_step_is_short_by_its_tokens() -> None:
    """At least five tokens, however many characters: three long words are joined to what follows."""
    answer = "long-winded introductory words\n\na b c d e\n\ny"
    engine = TableEngine(saying(answer), lambda text, columns: 0.0)
    seen: list[list[str]] = []

    def prm(messages: Any, steps: list[str], columns: Any) -> list[float]:
        seen.append(steps)
        return [1.0] * len(steps)

    class Words(type(engine.chat)):  # type: ignore[misc]
        def encode(self, text: str) -> tuple[int, ...]:
            return tuple(range(len(text.split())))

    prompt = replace(prompt_of(engine, n=1), chat=Words())
    run_program(Scope(build_params(Scope.Params, {"prm": prm, "corrector": teacher}, "scope")), prompt, engine)
    assert seen == [[answer]]
    three = {"prm": prm, "corrector": teacher, "min_step": 3}
    run_program(Scope(build_params(Scope.Params, three, "scope")), prompt, engine)
    assert seen[1] == ["long-winded introductory words\n\n", "a b c d e\n\ny"]


def test_first_wrong_step() -> None:
    assert first_wrong([0.9, 0.4, 0.1], 0.5, False) == 1
    assert first_wrong([0.9, 0.6, 0.8], 0.5, False) is None
    assert first_wrong([0.9, 0.6, 0.6], 0.5, True) == 1
    assert first_wrong([], 0.5, True) is None
    assert first_wrong([0.5], 0.5, False) is None
    for bad in (None, [1.0], ["a", "b"], [1.0, math.nan], 3):
        with pytest.raises(ValueError):
            checked_scores(bad, 2)


def test_a_hopeless_group_gets_one_right_answer_that_begins_like_its_own() -> None:
    engine, logged = TableEngine(saying("1.2.x.", "1.x.x.", "x.x.x."), reward, seed=1), {}
    plain = TableEngine(saying("1.2.x.", "1.x.x.", "x.x.x."), reward, seed=1)
    before = [engine.chat.decode(g.tokens) for g in plain.generate([(prompt_of(plain, 8), plain_request(plain))])[0]]
    rows = run_program(scope(), prompt_of(engine, 8), engine, logged)
    after = texts(engine, rows)
    assert after.count("1.2.3.") == 1
    place = after.index("1.2.3.")
    assert before[place] == "1.2.x." and before.index("1.2.x.") == place  # the longest right part, the first of equals
    assert [a for i, a in enumerate(after) if i != place] == [b for i, b in enumerate(before) if i != place]
    (row,) = rows[place]
    assert row.kinds == (Kind.SAMPLED,) * 4 + (Kind.FORCED,) * 3 and row.tokens[-1] == 0 and row.finish == "eos"
    assert row.meta == {"scope": [4, 7]} and row.rewards == {"reward": 1.0}
    assert all(r.rewards == {"reward": 0.0} and not corrected(r) for i, (r,) in enumerate(rows) if i != place)
    check_books(engine, rows)
    assert logged["scope/eligible"] == 1 and logged["scope/corrected"] == 1 / 8 and logged["scope/verified"] == 1
    assert logged["scope/kept"] == pytest.approx(4 / 7) and logged["scope/located"] == 1
    assert len(engine.scores) == 9


def corrected(row: Any) -> bool:
    """Every row has the column, so that a batch without a correction has it, too."""
    return bool(row.meta["scope"] != [0, 0])


def plain_request(engine: TableEngine, n: int = 8) -> Any:
    from rl_plugins.core.requests import Generate

    return Generate(prompt_of(engine, n).start(), n=n, max_tokens=64)


def test_every_failed_rollout_becomes_right_with_oracles() -> None:
    engine = TableEngine(saying("1.2.x.", "1.x.x.", "x.x.x."), reward)
    rows = run_program(scope(corrections=8), prompt_of(engine, 8), engine)
    assert texts(engine, rows) == ["1.2.3."] * 8
    check_books(engine, rows)
    whole = [row for (row,) in rows if row.meta["scope"][0] == 0]  # the first step was wrong: nothing is left of it
    assert whole and all(set(row.kinds) == {Kind.FORCED} for row in whole)


def test_groups_with_a_right_rollout_stay() -> None:
    engine = TableEngine(saying("1.2.3.", "x.x.x."), reward)
    rows = run_program(scope(), prompt_of(engine, 8), engine)
    assert 0 < texts(engine, rows).count("1.2.3.") < 8 and len(engine.scores) == 8
    assert all(not corrected(row) and row.rewards is not None for (row,) in rows)
    right = TableEngine(saying("1.2.3."), reward)
    assert texts(right, run_program(scope(min_correct=99), prompt_of(right), right)) == ["1.2.3."] * 4
    more = TableEngine(saying("1.2.3.", "x.x.x."), reward)
    rows = run_program(scope(min_correct=8, corrections=8), prompt_of(more, 8), more)
    assert texts(more, rows) == ["1.2.3."] * 8


def test_exactly_min_correct_right_rollouts_are_enough() -> None:
    for least, scores in ((1, 4), (2, 5)):
        given = iter([1.0, 0.0, 0.0, 0.0, 1.0])
        engine = TableEngine(saying("x.x.x."), lambda text, columns, given=given: next(given))
        run_program(scope(min_correct=least), prompt_of(engine), engine)
        assert len(engine.scores) == scores


def test_an_answer_the_policy_does_not_finish_is_dropped() -> None:
    def endless(text: str) -> dict[str, float]:
        said = text.split(">")[-1]
        return {EOS: 1.0} if said == "1.x." else {"1.x."[len(said)] if "1.x.".startswith(said) else "y": 1.0}

    for max_tokens in (4, 64):  # nothing fits behind the step, or too little does
        engine = TableEngine(endless, lambda text, columns: float(text.startswith("1.2.")))
        rows = run_program(scope(extent="step"), prompt_of(engine, max_tokens=max_tokens), engine)
        assert texts(engine, rows) == ["1.x."] * 4


def test_unscorable_rollouts_are_neither_right_nor_wrong() -> None:
    engine = TableEngine(saying("x.x.x."), lambda text, columns: None)
    rows = run_program(scope(), prompt_of(engine), engine)
    assert texts(engine, rows) == ["x.x.x."] * 4 and len(engine.scores) == 4


@pytest.mark.parametrize(
    "params",
    [
        {"prm": lambda m, s, c: [1.0] * len(s)},  # finds no error
        {"min_prefix": 0.9},
        {"corrector": lambda m, text, c: "9."},  # the correction is wrong
        {"corrector": lambda m, text, c: ""},
        {"corrector": lambda m, text, c: None},
        {"corrector": lambda m, text, c: 1 / 0},
        {"corrector": lambda m, text, c: "1." * 100},  # does not fit
        {"prm": lambda m, s, c: 1 / 0},
        {"prm": lambda m, s, c: [0.1]},
        {"prm": lambda m, s, c: "garbage"},
        {"prm": lambda m, s, c: [math.nan] * len(s)},
        {"prm": lambda m, s, c: time.sleep(5), "prm_timeout": 0.05},
        {"corrector": lambda m, text, c: time.sleep(5), "corrector_timeout": 0.05},
    ],
)
def test_what_cannot_be_corrected_stays(params: Any) -> None:
    engine = TableEngine(saying("1.x.x."), reward)
    logged: dict[str, float] = {}
    rows = run_program(scope(**params), prompt_of(engine), engine, logged)
    assert texts(engine, rows) == ["1.x.x."] * 4
    assert all(set(row.kinds) == {Kind.SAMPLED} and row.rewards == {"reward": 0.0} for (row,) in rows)
    assert logged["scope/corrected"] == 0
    check_books(engine, rows)


def test_without_an_error_the_lowest_step_may_be_taken() -> None:
    engine = TableEngine(saying("1.x.x."), reward)
    method = scope(prm=lambda m, s, c: [0.9, 0.6, 0.8], no_error="lowest")
    assert texts(engine, run_program(method, prompt_of(engine), engine)).count("1.2.3.") == 1


def test_rank_by_score() -> None:
    engine = TableEngine(saying("1.2.x.", "x.x.x."), reward, seed=4)
    method = scope(rank="score", prm=lambda m, s, c: [0.3] * 3 if s[0] == "x." else [0.9, 0.6, -9.0])
    rows = run_program(method, prompt_of(engine, 8), engine)
    (row,) = next(r for r in rows if corrected(r[0]))
    assert row.meta["scope"][0] == 0  # the mean of the other is lower, though its right part is longer


def test_what_the_callables_get() -> None:
    seen: list[Any] = []

    def prm(messages: Any, steps: Any, columns: Any) -> Any:
        seen.append(("prm", messages, steps, columns))
        return oracle(messages, steps, columns)

    def corrector(messages: Any, prefix: str, columns: Any) -> str:
        seen.append(("corrector", messages, prefix, columns))
        return teacher(messages, prefix, columns)

    engine = TableEngine(saying("1.x.x."), reward)
    prompt = prompt_of(engine, 1, columns={"answer": 6})
    run_program(scope(prm=prm, corrector=corrector), prompt, engine)
    messages = [{"role": "user", "content": "q"}]
    assert seen == [
        ("prm", messages, ["1.", "x.", "x."], {"answer": 6}),
        ("corrector", messages, "1.", {"answer": 6}),
    ]


def test_one_step_of_correction_and_the_policy_finishes() -> None:
    """The policy knows how to go on after 2 but not how to get there."""

    def model(text: str) -> dict[str, float]:
        said = text.split(">")[-1]
        path = {"": "1", "1": ".", "1.": "x", "1.2": ".", "1.2.": "3", "1.2.3": ".", "1.2.3.": EOS}
        return (
            {path.get(said, EOS): 0.8, "~": 0.2}
            if said in path and said != "1."
            else {"x": 1.0}
            if said == "1."
            else {EOS: 1.0}
        )

    engine = TableEngine(model, reward, seed=2)
    rows = run_program(scope(extent="step", corrections=16), prompt_of(engine, 16), engine)
    fixed = [row for (row,) in rows if corrected(row)]
    assert fixed
    for row in fixed:
        start, stop = row.meta["scope"]
        assert engine.chat.decode(row.tokens) == "1.2.3." and row.finish == "eos"
        assert set(row.kinds[start:stop]) == {Kind.FORCED} and set(row.kinds[:start] + row.kinds[stop:]) <= {
            Kind.SAMPLED
        }
    assert any((row.meta["scope"]) == [2, 4] for row in fixed)
    check_books(engine, rows)


def test_the_policy_corrects_itself_with_the_solution() -> None:
    def model(text: str) -> dict[str, float]:
        """Right if the solution stands in the prompt."""
        prompt, said = text.split(">")
        right = "1.2.3." if "123" in prompt else "1.x.x."
        return {right[len(said) :][:1] or EOS: 1.0} if right.startswith(said) else {EOS: 1.0}

    engine = TableEngine(model, reward)
    method = scope(corrector=None, solution_column="gold", hint="sol {solution}")
    assert "column:gold" in method.needs and "column:gold" not in scope(solution_column="gold").needs
    rows = run_program(method, prompt_of(engine, columns={"gold": "123"}), engine)
    assert texts(engine, rows) == ["1.2.3.", "1.x.x.", "1.x.x.", "1.x.x."]
    (row,) = rows[0]
    assert row.prompt == prompt_of(engine).tokens  # it is trained on the prompt without the solution
    assert row.kinds == (Kind.SAMPLED,) * 2 + (Kind.FORCED,) * 5 and row.meta["scope"] == [2, 7]
    shown = [r.trajectory for r in engine.requests][-1]
    assert engine.chat.decode(shown.prompt) == "<q\n\nsol 123>" and engine.chat.decode(shown.tokens) == "1."
    check_books(engine, [r for r in rows if not corrected(r[0])])
    step = run_program(
        scope(corrector=None, solution_column="gold", hint="sol {solution}", extent="step"),
        prompt_of(engine, columns={"gold": "123"}),
        engine,
    )
    assert texts(engine, step).count("1.2.3.") == 0  # after one step it is on its own again, and wrong
    missing = TableEngine(model, reward)
    assert texts(missing, run_program(method, prompt_of(missing), missing)) == ["1.x.x."] * 4


def test_room_aborts_and_a_prefix_of_the_plan() -> None:
    engine = TableEngine(saying("1.x.x."), reward)
    tight = run_program(scope(), prompt_of(engine, max_tokens=6), engine)  # prefix 2, correction 4 and the end: 7
    assert texts(engine, tight) == ["1.x.x."] * 4
    fits = run_program(scope(), prompt_of(engine, max_tokens=7), engine)
    assert texts(engine, fits).count("1.2.3.") == 1
    none = TableEngine(saying("1.x.x."), reward)
    assert [len(r) for (r,) in run_program(scope(), prompt_of(none, max_context=3), none)] == [0] * 4
    dead = TableEngine(saying("1.x.x."), reward, abort_after=0)
    assert [len(r) for (r,) in run_program(scope(), prompt_of(dead), dead)] == [0] * 4
    cut = TableEngine(saying("1.x.x."), reward, abort_after=3)
    assert texts(cut, run_program(scope(), prompt_of(cut), cut)).count("1.2.3.") == 1  # "1.x" is corrected as well
    prefixed = prompt_of(engine, prefix=engine.chat.encode("1."))
    rows = run_program(scope(prm=lambda m, s, c: [0.0] * len(s)), prefixed, engine)
    (row,) = next(r for r in rows if corrected(r[0]))
    assert row.meta["scope"] == [2, 7] and row.kinds == (Kind.FORCED,) * 7  # the plan's prefix is not foreign
    solution = TableEngine(saying("1.x.x."), reward, abort_after=7)
    method = scope(corrector=None, solution_column="gold", hint="{solution}")
    assert texts(solution, run_program(method, prompt_of(solution, columns={"gold": "?"}), solution)) == ["1.x.x."] * 4


def test_the_example_works() -> None:
    params = {
        "separator": ".",
        "min_step": 1,
        "min_prefix": 0.0,
        "corrector": "rl_plugins.methods.scope.example:finish",
    }
    method = Scope(build_params(Scope.Params, {**card_file(Scope).example_params, **params}, "scope"))
    engine = TableEngine(saying("1.x.x."), reward)
    rows = run_program(method, prompt_of(engine, columns={"answer": "1.2.3."}), engine)
    assert texts(engine, rows).count("1.2.3.") == 1


def test_it_does_not_depend_on_other_prompts() -> None:
    def run(names: str, engine: TableEngine) -> list[Any]:
        prompts = [make_prompt(engine.chat, t, n=4) for t in names]
        return [[row.tokens for (row,) in rows] for rows in run_program(scope(), prompts, engine)]

    answers = saying("1.2.x.", "1.x.x.", "x.x.x.")
    together = run("abc", TableEngine(answers, reward))
    assert together == [run(t, TableEngine(answers, reward))[0] for t in "abc"]


# ---- the loss


@pytest.mark.parametrize("kind", ["shaped", "sft", "plain"])
def test_loss_equals_the_loop(kind: str) -> None:
    method = scope(off_policy=kind, gamma=0.3, clip_low=0.1, clip_high=0.25)
    terms = make_terms(rows=5, time=7, seed=1, mask=torch.ones(5, 7))
    foreign = (torch.arange(35).view(5, 7) % 3 == 0).float()
    terms = terms.replace(columns={"scope_foreign": foreign})
    found = method.policy_loss(terms)
    for i in range(5):
        for t in range(7):
            lp, old, a = (float(x[i, t]) for x in (terms.logprobs, terms.old_logprobs, terms.advantages))
            r = math.exp(lp - old)
            wanted = -min(r * a, min(max(r, 0.9), 1.25) * a)
            if foreign[i, t] and kind == "shaped":
                wanted = -a * math.exp(lp) / (math.exp(lp) + 0.3)
            elif foreign[i, t] and kind == "sft":
                wanted = -a * lp
            assert float(found[i, t].detach()) == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_limits_of_the_loss() -> None:
    terms = make_terms(seed=3, mask=torch.ones(4, 6))
    nothing = terms.replace(columns={"scope_foreign": torch.zeros_like(terms.logprobs)})
    clipped = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages)
    assert torch.equal(scope().policy_loss(nothing), clipped)
    everything = terms.replace(columns={"scope_foreign": torch.ones_like(terms.logprobs)})
    large = scope(gamma=1e6).policy_loss(everything) * 1e6  # a scaled policy gradient without any ratio
    assert torch.allclose(large, -terms.advantages * terms.logprobs.exp(), rtol=1e-3, atol=1e-4)
    assert torch.equal(scope(off_policy="plain").policy_loss(everything), clipped)
    lp = torch.tensor([[math.log(0.1), math.log(0.999), -60.0]], requires_grad=True)
    one = everything.replace(
        mask=torch.ones(1, 3),
        logprobs=lp,
        old_logprobs=lp.detach(),
        advantages=torch.ones(1, 3),
        columns={"scope_foreign": torch.ones(1, 3)},
    )
    (gradient,) = torch.autograd.grad(scope().policy_loss(one).sum(), lp)
    assert gradient[0].tolist() == pytest.approx([-0.25, -0.1 * 0.999 / 1.099**2, 0.0], abs=1e-6)


def test_only_the_correctors_tokens_are_foreign_through_the_driver() -> None:
    """Row 1 has a prefix of the plan (0, forced), its own tokens, a correction (2, 3), and what the policy finished."""
    rollouts = make_rollouts([0.0, 1.0, 0.0], group_size=3, lengths=[4, 5, 2], meta={"scope": [None, [2, 4], None]})
    position = [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]
    forced = torch.tensor([p == 0 or i in (6, 7) for i, p in enumerate(position)])
    tokens = make_tokens(rollouts, forced=forced)
    stack = start_stack(scope())
    decision = one_step(stack, rollouts, tokens)
    assert decision.token_columns["scope_foreign"].nonzero()[:, 0].tolist() == [6, 7]
    assert (decision.advantages[6:8] > 0).all() and bool(decision.trained.all())
    without = one_step(start_stack(scope()), rollouts.replace(meta={}), tokens)
    assert float(without.token_columns["scope_foreign"].sum()) == 0


def test_parameters_out_of_range() -> None:
    with pytest.raises(ConfigError, match="prm"):
        Scope()
    for bad in ({"gamma": 0.0}, {"min_prefix": 1.5}, {"corrections": 0}, {"separator": ""}, {"prm": "no.such:thing"}):
        with pytest.raises(ConfigError):
            scope(**bad)
    with pytest.raises(ConfigError, match="solution"):
        scope(corrector=None, hint="nothing")
    assert "forced_tokens" in scope().brings
