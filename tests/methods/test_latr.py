"""LATR (arXiv 2510.24302): the authors' trees, a plain loop as oracle, and every way a rollout can go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Generated, Kind, Prompt, Trajectory
from rl_plugins.core.rollouts import Plan, PlanRow
from rl_plugins.methods.latr import Latr, grow
from rl_plugins.methods.latr.similarity import common_subsequence, edit_distance, suffix_match
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack
from rl_plugins.testing.engine import EOS, CharChat, TableEngine, make_prompt, run_program

GOLDEN = Golden("latr")
Distribution = dict[int, float]
SMALL = {"lookahead": (2, 4), "tau_abs": 0.15, "tau_rel": 0.25, "max_tree_tokens": None, "stop_when_full": False}


RUN = make_run(max_completion_length=64)  # a lookahead of 50 fits into it


def latr(**params: Any) -> Latr:
    """With all rollouts from the tree, unless told otherwise."""
    values = {"eta": (1.0,), "eta_steps": (0,), **params}
    return Latr(build_params(Latr.Params, acting(Latr.Params, values), "latr"))


def engine_of(model: Callable[[tuple[int, ...]], Distribution], **options: Any) -> TableEngine:
    """The fake engine on a model that sees token ids; 0 ends a sequence."""
    chat = CharChat()
    text = {0: EOS}

    def probabilities(so_far: str) -> dict[str, float]:
        return {text.get(t, chr(t)): p for t, p in model(chat.encode(so_far)).items()}

    return TableEngine(probabilities, **options)


def prompt_of(tokens: Sequence[int], n: int, max_tokens: int, **changes: Any) -> Prompt:
    values: dict[str, Any] = {"messages": "", "columns": {}, "max_context": 10_000, "chat": CharChat()} | changes
    return Prompt(tokens=tuple(tokens), n=n, max_tokens=max_tokens, **values)


def rows_of(method: Latr, prompt: Prompt, engine: TableEngine, logged: dict[str, float] | None = None) -> list[Any]:
    return [row for (row,) in run_program(method, prompt, engine, logged)]


def markov(logits: Sequence[Sequence[float]]) -> Callable[[tuple[int, ...]], Distribution]:
    p = [np.exp(np.asarray(row) - np.logaddexp.reduce(row)).tolist() for row in logits]
    return lambda context: dict(enumerate(p[context[-1]]))


def random_model(
    seed: int, tokens: int = 6, sharp: float = 2.0, end: float = -1.0
) -> Callable[[tuple[int, ...]], Distribution]:
    """Probabilities that depend on the last two tokens; `end` is added to the logit of token 0, the end."""
    logits = np.random.default_rng(seed).normal(size=(tokens + 1, tokens + 1, tokens + 1)) * sharp
    logits[..., 0] += end

    def model(context: tuple[int, ...]) -> Distribution:
        row = logits[context[-2] % (tokens + 1), context[-1] % (tokens + 1)]
        return dict(enumerate(np.exp(row - np.logaddexp.reduce(row)).tolist()))

    return model


# ---- the authors' numbers


NAMES = {
    "suffix_match_thres": "tau_sm",
    "rouge_l_thres": "tau_rl",
    "lookahead_steps": "lookahead",
    "max_n_branch_per_token": "candidates",
}


@GOLDEN.kind("transition_logits")
def check_tree(case: Case) -> None:
    given_, p, expected = case.inputs, case.params, case.expected
    p.must_be("continuation", "argmax")
    p.must_be("fill", "duplicate first (root) branch")
    p.get("seed")  # made the logits
    params = case.build(
        Latr, NAMES, eta=(1.0,), eta_steps=(0,), rel_test="close", stop_when_full=False, max_tree_tokens=None
    )
    eos = given_["eos_id"]
    names = {eos: 0, 0: eos}  # the fake engine ends a sequence with token 0

    def named(x: Any) -> Any:
        return [named(v) for v in x] if isinstance(x, list) else names.get(x, x)

    logits = np.array(given_["transition_logits"])
    places = named(list(range(len(logits))))
    model = markov(logits[places][:, places])
    prompts = [prompt_of(named(tokens), p["n"], p["max_new_tokens"]) for tokens in given_["prompts"]]
    for decode_ahead in (params.decode_ahead,) if "decode_ahead" in p else (1, 7, 64):
        method = Latr(replace(params, decode_ahead=decode_ahead))
        engine, sequences, branches = engine_of(model), [], 0.0
        for prompt in prompts:
            logged: dict[str, float] = {}
            for row in rows_of(method, prompt, engine, logged):
                sequences.append([*named(list(row.tokens)), *[given_["pad_id"]] * (p["max_new_tokens"] - len(row))])
            branches += logged["latr/branches"]
        assert sequences == expected["sequences"]
        assert branches == expected["n_live_branches_total"]
        whole: dict[str, float] = {}  # all prompts of a batch, as it is logged
        run_program(method, prompts, engine_of(model), whole)
        assert whole.get("latr/pruning_ratio", 0.0) == pytest.approx(expected["pruning_ratio"], abs=1e-12)


@GOLDEN.kind("topk_probs_desc")
def check_filter_of_candidates(case: Case) -> None:
    params = case.build(Latr, NAMES, rel_test="close", candidates=64)
    masks = case.expected["mask_for_candidates_2..m"]
    for p, wanted in zip(case.inputs["topk_probs_desc"], masks, strict=True):
        assert [params.branches(p[0], q) for q in p[1 : params.candidates]] == wanted


@GOLDEN.kind("schedule")
def check_schedule(case: Case) -> None:
    schedule = {int(first): case.inputs["schedule"][first] for first in case.inputs["schedule"]}
    eta = {"eta": tuple(schedule.values()), "eta_steps": tuple(schedule)}
    params = case.build(Latr, NAMES, **eta)
    for step in case.expected:
        if step.isdigit():
            assert params.eta_at(int(step)) == case.expected[step]


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def test_candidates_on_a_threshold_do_not_branch() -> None:
    params = latr(tau_abs=0.25, tau_rel=0.25).params
    assert params.branches(0.375, 0.3125) and not params.branches(0.375, 0.25) and not params.branches(0.625, 0.375)
    far = latr(tau_abs=0.25, tau_rel=0.25, rel_test="far").params
    assert far.branches(0.625, 0.3125) and not far.branches(0.625, 0.375) and not far.branches(0.5, 0.4375)


# ---- a plain loop as oracle


def levenshtein(a: Sequence[int], b: Sequence[int]) -> int:
    table = [[i + j if i * j == 0 else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            same = table[i - 1][j - 1] + (a[i - 1] != b[j - 1])
            table[i][j] = min(table[i - 1][j] + 1, table[i][j - 1] + 1, same)
    return table[-1][-1]


def lcs(a: Sequence[int], b: Sequence[int]) -> int:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def longest_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    return max(
        (k for k in range(len(a) + 1) for i in range(len(b) - k + 1) if list(a[len(a) - k :]) == list(b[i : i + k])),
        default=0,
    )


def oracle(
    model: Callable[[tuple[int, ...]], Distribution], prompt: tuple[int, ...], n: int, length: int, p: Any
) -> tuple[list[list[int]], int, int]:
    """Rows, tests and fired tests: one token for every row in each step, exactly as the specification counts."""
    rows: list[dict[str, Any]] = [{"tokens": [], "parent": None, "birth": 0, "done": False}]
    made = fired = 0
    for s in range(length if p.max_tree_tokens is None else min(length, p.max_tree_tokens)):
        if all(row["done"] for row in rows):
            break
        slots, ranked = [], []
        for i, row in enumerate(rows):
            q = model((*prompt, *row["tokens"]))
            ranked.append(sorted(q, key=lambda t: (-q[t], t))[: p.candidates])
            slots.append((0, i))
            for j, token in enumerate(ranked[-1][1:], 1):
                distance = q[ranked[-1][0]] - q[token]
                close = distance < p.tau_rel if p.rel_test == "close" else distance > p.tau_rel
                if not row["done"] and q[token] > p.tau_abs and close:
                    slots.append((j, i))
        slots = sorted(slots)[:n]
        children = [
            {"tokens": [*rows[i]["tokens"], ranked[i][j]], "parent": rows[i], "birth": s, "done": False}
            for i, j in sorted((i, j) for j, i in slots if j)
        ]
        for i, row in enumerate(rows):
            if not row["done"]:
                row["tokens"] = [*row["tokens"], ranked[i][0]]
        rows += children
        dropped = []
        for r in p.lookahead:
            for row in rows:
                if row["parent"] is None or row["birth"] != s + 1 - r:
                    continue
                a = row["tokens"][row["birth"] :]
                b = row["parent"]["tokens"][row["birth"] :]
                if 0 in a or 0 in b or row["done"] or row["parent"]["done"]:
                    continue
                assert len(a) == len(b) == r and a[0] != b[0]
                made += 1
                sm = max(longest_suffix(a, b), longest_suffix(b, a))
                if (
                    (p.tau_ed is not None and levenshtein(a, b) / r < p.tau_ed)
                    or (p.tau_sm is not None and sm / r > p.tau_sm)
                    or (p.tau_rl is not None and lcs(a, b) / r > p.tau_rl)
                ):
                    fired += 1
                    dropped.append(row)
        alive = []
        for row in rows:
            if not any(row is d for d in dropped):
                alive.append(row)
                continue
            for other in rows:  # children vanish with it
                if other["parent"] is row:
                    dropped.append(other)
        rows = alive
        for row in rows:
            row["done"] = row["tokens"][-1] == 0
        enough = len(rows) >= round(n * (p.full_share - p.full_decay * s / length))
        if p.stop_when_full and enough and not any(row["birth"] + max(p.lookahead) >= s for row in rows):
            break
    return [row["tokens"] for row in rows], made, fired


def tree_of(method: Latr, prompt: Prompt, engine: TableEngine) -> Any:
    """The tree alone, without its tails."""
    program = grow(prompt, method.params, prompt.n)
    answer = None
    while True:
        try:
            asked = program.send(answer)
        except StopIteration as done:
            return done.value
        answer = engine.generate([(prompt, r) for r in asked])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    seed, length = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 30))
    model = random_model(seed, sharp=data.draw(st.sampled_from([0.7, 1.5, 3.0])))
    none_or = lambda: st.none() | st.sampled_from([0.2, 0.5, 0.8])
    method = latr(
        candidates=data.draw(st.integers(2, 4)),
        tau_abs=data.draw(st.sampled_from([0.0, 0.1, 0.2])),
        tau_rel=data.draw(st.sampled_from([0.05, 0.2, 0.6])),
        rel_test=data.draw(st.sampled_from(["close", "far"])),
        lookahead=tuple(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True))),
        tau_ed=data.draw(none_or()),
        tau_sm=data.draw(none_or()),
        tau_rl=data.draw(none_or()),
        stop_when_full=data.draw(st.booleans()),
        full_decay=data.draw(st.sampled_from([0.0, 0.5])),
        max_tree_tokens=data.draw(st.none() | st.integers(1, 40)),
        decode_ahead=data.draw(st.integers(1, 12)),
    )
    n, start = data.draw(st.integers(1, 9)), (1, data.draw(st.integers(1, 6)))
    tree = tree_of(method, prompt_of(start, n, length), engine_of(model))
    rows, made, fired = oracle(model, start, n, length, method.params)
    assert [b.tokens for b in tree.branches] == rows
    assert (tree.tests, tree.pruned) == (made, fired)
    assert len(tree.branches) <= n and tree.branches[0].parent is None
    assert tree.used <= tree.decoded


@settings(max_examples=40, deadline=None)
@given(a=st.lists(st.integers(0, 3), min_size=1, max_size=12), b=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_similarity_equals_the_loop(a: list[int], b: list[int]) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == levenshtein(a, b)
    assert common_subsequence(a, b) == lcs(a, b)
    assert suffix_match(a, b) == suffix_match(b, a) == max(longest_suffix(a, b), longest_suffix(b, a))


def test_similarity_by_hand() -> None:
    assert edit_distance([1, 2, 3, 4], [2, 3, 4, 5]) == 2
    assert common_subsequence([1, 2, 3, 4], [2, 9, 4]) == 2
    assert suffix_match([1, 2, 3, 4], [9, 3, 4, 9]) == 2
    assert suffix_match([1, 2], [3, 4]) == 0


# ---- the books


@pytest.mark.parametrize("stop", [True, False])
def test_tree_tokens_are_forced_and_the_tail_is_sampled_with_its_log_probs(stop: bool) -> None:
    model, n, length = random_model(5, end=-4.0), 6, 40
    method = latr(**SMALL | {"stop_when_full": stop, "max_tree_tokens": 12})
    engine = engine_of(model, temperature=0.7, version=5)
    prompt = prompt_of((1, 2), n, length)
    tree = tree_of(method, prompt, engine)
    rows = rows_of(method, prompt, engine)
    assert len(rows) == n and len(tree.branches) < n  # some are copies
    for row, grown in zip(rows, [*tree.branches, *[tree.branches[0]] * n], strict=False):
        forced = len(grown.tokens)
        assert list(row.tokens[:forced]) == grown.tokens
        assert row.kinds == (Kind.FORCED,) * forced + (Kind.SAMPLED,) * (len(row) - forced)
        assert all(math.isnan(p) for p in row.logprobs[:forced])
        assert set(row.versions) == {5}
        assert len(row.kinds) == len(row.logprobs) == len(row.versions) == len(row)
        assert row.finish == ("eos" if row.tokens[-1] == 0 else "length")
        assert len(row) == length or row.finish == "eos"
        check_sampled(row, model, 0.7)
    assert any(Kind.SAMPLED in row.kinds for row in rows)


def check_sampled(row: Trajectory, model: Callable[[tuple[int, ...]], Distribution], temperature: float) -> None:
    """The log-prob of every sampled token is the model's, at the temperature of the run."""
    for i, (token, kind, logprob) in enumerate(zip(row.tokens, row.kinds, row.logprobs, strict=True)):
        if kind == Kind.SAMPLED:
            q = model(row.prompt + row.tokens[:i])
            scaled = {t: p ** (1 / temperature) for t, p in q.items()}
            assert logprob == pytest.approx(math.log(scaled[token] / sum(scaled.values())), abs=1e-9)


def test_requests_are_greedy_then_sampled() -> None:
    engine = engine_of(random_model(5, end=-6.0))
    rows_of(latr(**SMALL | {"max_tree_tokens": 12}), prompt_of((1, 2), 6, 40), engine)
    greedy = [r for r in engine.requests if r.temperature == 0]
    assert greedy and all(r.top == 2 and r.n == 1 for r in greedy)
    tails = [r for r in engine.requests if r.temperature is None]
    assert tails and all(r.top == 0 and len(r.trajectory) == 12 for r in tails)
    assert engine.requests[-len(tails) :] == tails


def test_branches_share_the_prefix_and_differ_at_birth() -> None:
    for seed in range(30):
        tree = tree_of(latr(**SMALL), prompt_of((1, 2), 8, 30), engine_of(random_model(seed)))
        for b in tree.branches[1:]:
            assert b.parent in tree.branches  # descendants of a pruned branch are gone
            assert b.tokens[: b.born] == b.parent.tokens[: b.born]
            assert b.tokens[b.born] != b.parent.tokens[b.born]


def test_copies_of_the_root_diverge_in_the_tail() -> None:
    model = lambda context: {1: 0.9, 2: 0.1}
    rows = rows_of(latr(**SMALL | {"max_tree_tokens": 5}), prompt_of((1,), 6, 40), engine_of(model))
    assert {row.tokens[:5] for row in rows} == {(1,) * 5}
    assert len({row.tokens for row in rows}) == 6


def test_finished_copies_are_not_generated_again() -> None:
    model = lambda context: {0: 0.9, 2: 0.1}
    engine = engine_of(model)
    logged: dict[str, float] = {}
    rows = rows_of(latr(**SMALL), prompt_of((1,), 4, 10), engine, logged)
    assert [(r.tokens, r.finish) for r in rows] == [((0,), "eos")] * 4
    assert len(engine.requests) == 1
    assert logged["latr/branches"] == 1 and logged["latr/copies"] == 0.75


def test_an_end_among_the_candidates_is_a_branch_that_is_over() -> None:
    model = lambda context: {2: 0.55, 0: 0.45} if len(context) < 3 else {3: 1.0}
    rows = rows_of(latr(**SMALL), prompt_of((1,), 3, 6), engine_of(model))
    assert [(r.tokens, r.finish) for r in rows] == [
        ((2, 2, 3, 3, 3, 3), "length"),
        ((0,), "eos"),
        ((2, 0), "eos"),
    ]  # and the ends, alike as they are, were never tested


def test_a_forced_prefix_and_prompts_with_little_room() -> None:
    model = random_model(3)
    prompt = prompt_of((1,), 4, 10, prefix=(2, 3))
    for row in rows_of(latr(**SMALL), prompt, engine_of(model)):
        assert row.tokens[:2] == (2, 3) and row.kinds[:2] == (Kind.FORCED,) * 2 and len(row) <= 10
    tree = tree_of(latr(**SMALL), prompt, engine_of(model))
    assert [b.tokens for b in tree.branches] == oracle(model, (1, 2, 3), 4, 8, latr(**SMALL).params)[0]
    for context, room in ((5, 3), (2, 0), (1, 0)):
        rows = rows_of(latr(**SMALL), prompt_of((1, 2), 4, 10, max_context=context), engine_of(model))
        assert [len(r) <= room for r in rows] == [True] * 4
    assert [(r.tokens, r.finish) for r in rows] == [((), "length")] * 4


# ---- an engine that is interrupted


@pytest.mark.parametrize("after", [1, 3])
def test_an_abort_between_tokens_changes_no_tree(after: int) -> None:
    model, prompt = random_model(3), prompt_of((1, 2), 6, 20)
    whole = tree_of(latr(**SMALL), prompt, engine_of(model))
    cut = tree_of(latr(**SMALL), prompt, engine_of(model, abort_after=after))
    assert [b.tokens for b in cut.branches] == [b.tokens for b in whole.branches]


def test_an_engine_that_gives_nothing_ends_the_tree() -> None:
    rows = rows_of(latr(**SMALL), prompt_of((1, 2), 4, 20), engine_of(random_model(3), abort_after=0))
    assert [(r.tokens, r.finish) for r in rows] == [((), "abort")] * 4


def test_the_tail_may_be_aborted() -> None:
    engine = engine_of(random_model(3), abort_after=2)
    for row in rows_of(latr(**SMALL | {"max_tree_tokens": 6}), prompt_of((1, 2), 4, 20), engine):
        assert row.finish in ("abort", "eos") and len(row) <= 8


def test_an_engine_without_top_log_probs_is_refused() -> None:
    class Bare(TableEngine):
        def _one(self, request: Any) -> Generated:
            made = super()._one(request)
            return Generated(made.tokens, made.logprobs, made.finish, made.version, (), made.sampled)

    with pytest.raises(MethodError, match="reports no most likely tokens for 5 of 5 tokens"):
        rows_of(latr(**SMALL), prompt_of((97,), 4, 5), Bare({"a": {"a": 1.0}}))


def test_a_vocabulary_smaller_than_the_candidates() -> None:
    rows = rows_of(latr(**SMALL | {"candidates": 4}), prompt_of((1,), 3, 4), engine_of(lambda c: {1: 1.0}))
    assert [r.tokens for r in rows] == [(1,) * 4] * 3


# ---- mixing, schedule, reductions


@pytest.mark.parametrize(("n", "eta", "k"), [(8, 0.75, 6), (5, 0.5, 2), (7, 0.5, 4), (3, 0.5, 2), (1, 0.5, 0)])
def test_share_of_the_tree(n: int, eta: float, k: int) -> None:
    """Python's round: to the even number where it is in the middle."""
    engine = engine_of(random_model(3))
    prompt = prompt_of((1, 2), n, 20, payload={"other": 1, "latr": eta})
    rows = rows_of(latr(**SMALL), prompt, engine)
    assert len(rows) == n
    assert [r.kinds[0] for r in rows] == [Kind.FORCED] * k + [Kind.SAMPLED] * (n - k)


class Plain(Method):
    """Ordinary sampling."""

    name = "plain"

    def rollout(self, prompt: Prompt) -> Any:
        from rl_plugins.core.requests import Generate

        made = yield Generate(prompt.start(), n=prompt.n)
        return [prompt.start().add(g) for g in made]


@pytest.mark.parametrize("how", ["eta", "payload", "evaluation", "rounds to none"])
def test_without_a_share_it_is_plain_sampling(how: str) -> None:
    changes: dict[str, Any] = {"evaluation": {"training": False}, "payload": {"payload": {"latr": 0.0}}}.get(how, {})
    prompt = prompt_of((1, 2), 1 if how == "rounds to none" else 6, 20, **changes)
    method = latr(**SMALL, eta=({"eta": 0.0, "rounds to none": 0.5}.get(how, 1.0),))
    ours, plain = engine_of(random_model(3), temperature=0.8), engine_of(random_model(3), temperature=0.8)
    rows = rows_of(method, prompt, ours)
    assert rows == [row for (row,) in run_program(Plain(), prompt, plain)]
    assert ours.requests == plain.requests


@pytest.mark.parametrize("params", [{"tau_rel": 0.0}, {"tau_abs": 0.5}])
def test_thresholds_that_never_branch_give_equal_greedy_rows(params: dict[str, Any]) -> None:
    model = random_model(3, sharp=0.3)
    rows = rows_of(latr(**SMALL | params), prompt_of((1, 2), 5, 20), engine_of(model))
    assert len({r.tokens for r in rows}) == 1 and rows[0].tokens[0] == max(model((1, 2)), key=model((1, 2)).get)
    varied = rows_of(latr(**SMALL | {"tau_abs": 0.1}), prompt_of((1, 2), 5, 20), engine_of(model))
    assert len({r.tokens for r in varied}) > 1


def test_one_rollout_is_greedy() -> None:
    (row,) = rows_of(latr(**SMALL), prompt_of((1, 2), 1, 20), engine_of(random_model(3)))
    context = [1, 2]
    for token in row.tokens:
        q = random_model(3)(tuple(context))
        assert token == max(q, key=q.get)
        context.append(token)


def test_place_freed_by_pruning_is_used_again() -> None:
    # two ways that meet again at once, over and over: every branch is pruned, and there is place for one only
    model = lambda c: {2: 0.55, 3: 0.45} if c[-1] == 1 else {1: 1.0}
    method = latr(**SMALL | {"lookahead": (4,), "tau_ed": 0.5})
    tree = tree_of(method, prompt_of((1,), 2, 20), engine_of(model))
    assert (tree.tests, tree.pruned) == (5, 5)  # born at 0, 4, 8, 12, 16
    assert [(b.born, len(b.tokens)) for b in tree.branches] == [(0, 20)]


def test_deterministic_and_independent_of_other_prompts() -> None:
    method = latr(**SMALL | {"max_tree_tokens": 10}, eta=(0.7,))
    prompts = [prompt_of((1, t), 6, 30) for t in range(1, 5)]
    alone = [rows_of(method, p, engine_of(random_model(3))) for p in prompts]
    among = run_program(method, prompts, engine_of(random_model(3)))
    assert [[row for (row,) in rows] for rows in among] == alone
    assert [rows_of(method, p, engine_of(random_model(3))) for p in prompts] == alone


def test_the_tree_ends_when_it_is_full_and_settled() -> None:
    # one fork at the first token, then two different, endless tales
    model = lambda c: {2: 0.55, 3: 0.45} if len(c) == 1 else {c[1]: 1.0}
    method = latr(**SMALL | {"stop_when_full": True, "lookahead": (3, 5)})
    tree = tree_of(method, prompt_of((1,), 2, 50), engine_of(model))
    assert [len(b.tokens) for b in tree.branches] == [7, 7]  # after step s = 6: born at 0, 6 > 5
    # a third rollout is missing, so it goes on to the end
    tree = tree_of(method, prompt_of((1,), 3, 50), engine_of(model))
    assert [len(b.tokens) for b in tree.branches] == [50, 50]
    # until a share of 2 in 3 is enough: round(3 (0.98 - s / 50)) = 2 from s = 8 on
    method = latr(**SMALL | {"stop_when_full": True, "lookahead": (3, 5), "full_decay": 1.0})
    tree = tree_of(method, prompt_of((1,), 3, 50), engine_of(model))
    assert [len(b.tokens) for b in tree.branches] == [9, 9]
    method = latr(**SMALL | {"max_tree_tokens": 4})
    tree = tree_of(method, prompt_of((1,), 2, 50), engine_of(model))
    assert [len(b.tokens) for b in tree.branches] == [4, 4]


# ---- cost


def test_what_is_decoded_for_nothing_is_counted() -> None:
    # a fork at the first of 10 tokens: 10 for the root, 9 for the branch
    model = lambda c: {2: 0.55, 3: 0.45} if len(c) == 1 else {c[1]: 1.0}
    engine, logged = engine_of(model), {}
    rows_of(latr(**SMALL), prompt_of((1,), 2, 10), engine, logged)
    assert engine.decoded == 19 and logged["latr/unused"] == 0.0
    assert engine.batches == 2  # one for the root, one for the branch
    # the same, but the tree ends after 7 tokens: 3 + 3 are lost, the tails are not counted
    engine, logged = engine_of(model), {}
    method = latr(**SMALL | {"stop_when_full": True, "lookahead": (3, 5)})
    rows_of(method, prompt_of((1,), 2, 10), engine, logged)
    assert engine.decoded == 19 + 6 and logged["latr/unused"] == pytest.approx(6 / 19)
    assert logged["latr/tree_tokens"] == 7
    # rows decoded ahead end together, so that they are asked for in the same batch
    engine = engine_of(model)
    rows_of(latr(**SMALL | {"decode_ahead": 5}), prompt_of((1,), 2, 10), engine)
    assert [r.max_tokens for r in engine.requests] == [5, 4, 5, 5] and engine.batches == 3
    # the least where nothing is decoded ahead: a batch for each place of the tree
    engine = engine_of(model)
    rows_of(latr(**SMALL | {"decode_ahead": 1}), prompt_of((1,), 2, 10), engine)
    assert engine.decoded == 19 and engine.batches == 10


# ---- tokens of the tree that are sampled


@pytest.mark.parametrize("mode", ["full", "always"])
def test_sampled_tokens_of_the_tree(mode: str) -> None:
    """The log-probs are true, branching rows still take the argmax, and with 'full' only full trees sample."""
    seen = set()
    for seed in range(25):
        model = random_model(seed, sharp=1.0)
        method = latr(**SMALL | {"sample_nk": mode, "decode_ahead": 1 + seed % 6})
        prompt, n = prompt_of((1, 2), 5, 24), 5
        engine = engine_of(model, temperature=0.9)
        tree = tree_of(method, prompt, engine)
        assert len(tree.branches) <= n
        for b in tree.branches:
            row = b.trajectory(prompt.start())
            seen |= set(row.kinds)
            check_sampled(row, model, 0.9)
            for i, kind in enumerate(row.kinds):
                q = model(row.context[: 2 + i])
                first, second = sorted(q, key=lambda t: (-q[t], t))[:2]
                opens = method.params.branches(q[first], q[second])
                if kind == Kind.FORCED and mode == "always":
                    assert opens and row.tokens[i] in (first, second)
                elif kind == Kind.FORCED:
                    assert row.tokens[i] == first or opens
    assert seen == {Kind.SAMPLED, Kind.FORCED}


def test_full_trees_sample_and_others_do_not() -> None:
    model = lambda c: {2: 0.55, 3: 0.45} if len(c) == 1 else {c[1]: 0.7, 4: 0.3}
    method = latr(**SMALL | {"sample_nk": "full"})
    full = rows_of(method, prompt_of((1,), 2, 8), engine_of(model))
    assert [r.kinds for r in full] == [(Kind.FORCED, *[Kind.SAMPLED] * 7)] * 2
    room_left = rows_of(latr(**SMALL | {"sample_nk": "full", "tau_abs": 0.4}), prompt_of((1,), 3, 8), engine_of(model))
    assert {k for r in room_left for k in r.kinds} == {Kind.FORCED}


def test_sampling_in_the_tree_follows_the_model() -> None:
    """What was decoded ahead and thrown away biases nothing: the first token is 2 in 70 % of the trees."""
    model = lambda c: {2: 0.7, 3: 0.3} if len(c) % 2 else {5: 0.5, 6: 0.45, 7: 0.05}
    method = latr(**SMALL | {"sample_nk": "always"})
    rows = [r for seed in range(400) for r in rows_of(method, prompt_of((1,), 2, 5), engine_of(model, seed=seed))[:1]]
    for place in (0, 2, 4):
        assert np.mean([r.tokens[place] == 2 for r in rows]) == pytest.approx(0.7, abs=0.08)
    assert all(r.tokens[1] == 5 for r in rows)  # where the row branches


# ---- through the driver


def test_plan_sends_the_share_and_changes_no_count() -> None:
    method = Latr()
    stack = start_stack(method, run=RUN)
    for step, eta in ((0, 1.0), (9, 1.0), (10, 0.75), (79, 0.5), (80, 0.25), (200, 0.0), (5000, 0.0)):
        stack.batch = step
        plan = first_plan(stack, [3, 1], 4, 8, 16)
        assert [(r.prompt_index, r.n, r.spare, r.payload) for r in plan.rows] == [
            (3, 4, 0, {"latr": eta}),
            (1, 4, 0, {"latr": eta}),
        ]
        assert combine([stack.metrics.take()]) == {"latr/eta": eta}


def test_payloads_of_others_stay() -> None:
    plan = start_stack(Latr(), run=RUN).call(
        "plan", Latr(), Plan((PlanRow(0, 0, 2, payload={"x": 1}),), 2, 2, batch=15)
    )
    assert plan.rows[0].payload == {"x": 1, "latr": 0.75}


def test_rows_that_another_method_adds_have_the_share_of_the_schedule() -> None:
    method = latr(**SMALL, eta=(1.0, 0.0), eta_steps=(0, 5))
    for step, kind in ((4, Kind.FORCED), (5, Kind.SAMPLED)):
        rows = rows_of(method, prompt_of((1, 2), 2, 8, batch=step), engine_of(random_model(3)))
        assert [r.kinds[0] for r in rows] == [kind] * 2


def test_the_update_is_that_of_the_host() -> None:
    """Nothing after generation is touched: advantages are GRPO's, forced tokens are trained like any."""
    rollouts = make_rollouts([1.0, 0.0, 0.0, 1.0, math.nan, 1.0, 0.0, 0.0])
    tokens = make_tokens(rollouts, forced=torch.ones(int(rollouts.length.sum()), dtype=torch.bool))
    ours = one_step(start_stack(Latr(), run=RUN), rollouts, tokens)
    plain = one_step(start_stack(run=RUN), rollouts, tokens)
    assert torch.equal(ours.advantages, plain.advantages) and bool(ours.keep_tokens.all()) and bool(ours.stays.all())


def test_what_it_declares() -> None:
    assert "forced_tokens" in latr().brings and latr().claims() == ("plan", "rollout") and latr().in_eval == ()
    assert latr(candidates=3).needs == {"engine:logprobs=3", "several_rollouts"}


def test_on_text() -> None:
    """The program as users test theirs, with a table of characters."""
    engine = TableEngine(
        {">": {"a": 0.5, "b": 0.5}, "a": {"c": 1.0}, "b": {"d": 1.0}, "c": {EOS: 1.0}, "d": {"d": 1.0}}
    )
    rows = run_program(latr(), make_prompt(engine.chat, "q", n=2, max_tokens=6), engine)
    assert [engine.chat.decode(row.tokens, special=True) for (row,) in rows] == ["ac<eos>", "bddddd"]


# ---- parameters


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"eta": (1.2,), "eta_steps": (0,)}, "`eta`"),
        ({"eta": (1.0, 0.5), "eta_steps": (0,)}, "`eta` has 2 shares and `eta_steps` 1 batches"),
        ({"eta": (), "eta_steps": ()}, "`eta` has 0 shares"),
        ({"eta": (1.0, 0.5), "eta_steps": (0, 0)}, "must begin with 0 and increase"),
        ({"eta": (1.0,), "eta_steps": (3,)}, "must begin with 0 and increase"),
        ({"candidates": 1}, "`candidates`"),
        ({"tau_abs": -0.1}, "`tau_abs`"),
        ({"tau_rel": 1.1}, "`tau_rel`"),
        ({"tau_ed": 2}, "`tau_ed`"),
        ({"rel_test": "both"}, "`rel_test`"),
        ({"lookahead": ()}, "`lookahead` is empty"),
        ({"lookahead": (0,)}, "`lookahead`"),
        ({"sample_nk": "some"}, "`sample_nk`"),
        ({"max_tree_tokens": 0}, "`max_tree_tokens`"),
        ({"decode_ahead": 0}, "`decode_ahead`"),
    ],
)
def test_parameters_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_params(Latr.Params, params, "latr")
