"""ADHint (arXiv 2512.13095): hints and their length, the books of hinted rollouts, advantages and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Prompt
from rl_plugins.core.rollouts import Rollouts, Tokens
from rl_plugins.methods.adhint_rollouts import AdhintRollouts, hint_ratio
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

NAN = math.nan
REFERENCE = "abcdefghij"


def adhint(**params: Any) -> AdhintRollouts:
    return AdhintRollouts(build_params(AdhintRollouts.Params, {"sigma": 0.0, **params}, "adhint_rollouts"))


def model(text: str) -> dict[str, float]:
    """Writes x or the next letter of the reference, and ends after ten letters."""
    said = text.split(">")[-1]
    if len(said) >= 10:
        return {EOS: 1.0}
    return {"x": 0.5, REFERENCE[len(said)]: 0.5}


def engine_of(*solved: str) -> TableEngine:
    """Right are the texts that begin with one of these."""
    return TableEngine(model, lambda text, columns: float(text.startswith(solved)) if solved else 0.0)


def prompt_of(engine: TableEngine, n: int = 8, **changes: Any) -> Prompt:
    return make_prompt(engine.chat, "q", n=n, columns={"reference": REFERENCE, **changes.pop("columns", {})}, **changes)


def made(method: AdhintRollouts, engine: TableEngine, prompt: Prompt) -> tuple[list[Any], dict[str, float]]:
    """The rows, and what was logged."""
    logged: dict[str, float] = {}
    rows = [row for (row,) in run_program(method, prompt, engine, logged)]
    return rows, {k.partition("/")[2]: v for k, v in logged.items()}


# ---- how long a hint is


@given(st.floats(0, 1), st.floats(0, 0.99), st.floats(0, 0.99), st.floats(-1, 1))
def test_the_ratio_stays_inside_its_bounds(difficulty: float, a: float, b: float, noise: float) -> None:
    low, high = sorted((a, b))
    ratio = hint_ratio(difficulty, low, high, noise)
    assert 0 <= ratio <= high
    if difficulty == 0:
        assert ratio == 0
    else:
        expected = (high - low) * difficulty + low + noise
        assert ratio == pytest.approx(max(0.0, min(high, expected)))


def test_a_prompt_that_fails_has_the_longest_hints_and_a_solved_one_none() -> None:
    engine = engine_of()
    rows, logged = made(adhint(w_max=0.7), engine, prompt_of(engine))
    assert [row.meta["adhint"] for row in rows] == [[0, 0]] * 4 + [[0, 7]] * 4
    assert (logged["difficulty"], logged["hinted"], logged["hint_tokens"]) == (1.0, 0.5, 7.0)
    solved = TableEngine(model, lambda text, columns: 1.0)
    rows, logged = made(adhint(), solved, prompt_of(solved))
    assert [row.meta["adhint"] for row in rows] == [[0, 0]] * 8 and logged["hinted"] == 0


def test_books_of_hinted_rollouts() -> None:
    """The hint is a prefix of the reference, forced; the rest is sampled in its context."""
    engine = engine_of("ax", "bx")
    rows, logged = made(adhint(w_min=0.2, w_max=0.6), engine, prompt_of(engine, n=12))
    naive, with_hint = rows[:6], rows[6:]
    assert all(row.rewards is not None for row in naive), "they are not scored again"
    difficulty = 1 - np.mean([row.rewards["reward"] >= 0.5 for row in naive])
    length = int((0.4 * difficulty + 0.2) * 10 + 1e-9)
    assert difficulty > 0 and logged["difficulty"] == pytest.approx(difficulty)
    for row in with_hint:
        assert row.meta["adhint"] == [0, length] and row.rewards is None
        assert engine.chat.decode(row.tokens[:length]) == REFERENCE[:length]
        assert list(row.kinds) == [Kind.FORCED] * length + [Kind.SAMPLED] * (len(row) - length)
        for i, (token, kind, logprob) in enumerate(zip(row.tokens, row.kinds, row.logprobs, strict=True)):
            if kind == Kind.SAMPLED:
                p = engine.probabilities((*row.prompt, *row.tokens[:i]))[token]
                assert logprob == pytest.approx(math.log(p))
            else:
                assert math.isnan(logprob)


def test_hints_that_are_only_read() -> None:
    engine = engine_of()
    rows, _ = made(adhint(hint_loss=False), engine, prompt_of(engine))
    assert list(rows[-1].kinds[:7]) == [Kind.OBSERVED] * 7 and Kind.FORCED not in rows[-1].kinds
    assert "forced_tokens" in adhint().brings and "forced_tokens" not in adhint(hint_loss=False).brings


def test_noise_is_of_each_rollout_or_of_the_prompt() -> None:
    engine = engine_of()
    lengths = {}
    for per in ("rollout", "prompt"):
        rows, _ = made(adhint(sigma=0.2, w_max=0.9, noise_per=per), engine, prompt_of(engine, n=40))
        lengths[per] = [row.meta["adhint"][1] for row in rows[20:]]
        again, _ = made(adhint(sigma=0.2, w_max=0.9, noise_per=per), engine, prompt_of(engine, n=40))
        assert [row.meta["adhint"][1] for row in again[20:]] == lengths[per], "the same after a resume"
    assert len(set(lengths["prompt"])) == 1 < len(set(lengths["rollout"])) and max(lengths["rollout"]) <= 9


def test_the_answer_is_never_in_a_hint() -> None:
    engine = engine_of()
    columns = {"answer": "ef"}
    rows, logged = made(adhint(answer_column="answer"), engine, prompt_of(engine, columns=columns))
    assert rows[-1].meta["adhint"] == [0, 4] and logged["cut"] == 1, "abcd: no part of ef"
    cases = (("zz", 7), ("", 7), (None, 7), ("a", 0), ("hi", 7), ("cdefg", 2), ("ghij", 6), (" ef ", 4))
    for answer, length in cases:
        rows, logged = made(adhint(answer_column="answer"), engine, prompt_of(engine, columns={"answer": answer}))
        assert rows[-1].meta["adhint"] == ([0, length] if length else [0, 0])
        assert logged["cut"] == (length < 7)
    rows, logged = made(adhint(), engine, prompt_of(engine, columns=columns))
    assert rows[-1].meta["adhint"] == [0, 7] and logged["cut"] == 0, "nobody named the column"


@settings(max_examples=40, deadline=None)
@given(st.text("abcde", min_size=1, max_size=12), st.text("abcde", max_size=3))
def test_no_hint_contains_the_answer(reference: str, answer: str) -> None:
    engine = engine_of()
    columns = {"reference": reference, "answer": answer}
    rows, _ = made(adhint(answer_column="answer", w_max=0.99), engine, prompt_of(engine, n=2, columns=columns))
    start, stop = rows[-1].meta["adhint"]
    hint = engine.chat.decode(rows[-1].tokens[start:stop])
    wanted = int(0.99 * len(reference) + 1e-9)
    before = reference.find(answer) if answer and answer in reference else len(reference)
    assert hint == reference[: min(wanted, before, prompt_of(engine).max_tokens - 1)]


def test_references_of_token_ids_missing_ones_and_room() -> None:
    engine = engine_of()
    ids = list(engine.chat.encode("abcd"))
    rows, _ = made(adhint(w_max=0.5), engine, prompt_of(engine, columns={"reference": ids}))
    assert engine.chat.decode(rows[-1].tokens[:2]) == "ab" and rows[-1].meta["adhint"] == [0, 2]
    for missing in ("", None, []):
        rows, logged = made(adhint(), engine, prompt_of(engine, columns={"reference": missing}))
        assert rows[-1].meta["adhint"] == [0, 0] and logged["missing"] == 1 and len(rows) == 8
    rows, logged = made(adhint(), engine, prompt_of(engine, max_tokens=4))
    assert logged["cut"] == 0, "no answer ended it"
    assert rows[-1].meta["adhint"] == [0, 3] and len(rows[-1]) == 4, "a token is left for the policy"
    prefix = tuple(engine.chat.encode("zz"))
    rows, _ = made(adhint(), engine, prompt_of(engine, prefix=prefix))
    assert rows[-1].meta["adhint"] == [2, 9] and engine.chat.decode(rows[-1].tokens[:9]) == "zzabcdefg"


def test_references_that_cannot_be_read() -> None:
    engine = engine_of()
    for reference in (5.0, ["1", "2"], [1.5], [{"role": "user"}]):
        with pytest.raises(MethodError, match="must be a text or a list of token ids. Change column `reference`"):
            made(adhint(), engine, prompt_of(engine, columns={"reference": reference}))


def test_evaluation_has_no_hints() -> None:
    engine = engine_of()
    rows, _ = made(adhint(), engine, prompt_of(engine, training=False))
    assert [row.meta["adhint"] for row in rows] == [[0, 0]] * 8 and all(Kind.FORCED not in row.kinds for row in rows)
    assert "rollout" not in AdhintRollouts.in_eval, "hosts make evaluation's completions themselves"


def test_rewards_that_nobody_gave_make_no_hint() -> None:
    engine = TableEngine(model, lambda text, columns: NAN)
    rows, logged = made(adhint(), engine, prompt_of(engine))
    assert all(row.meta["adhint"] == [0, 0] for row in rows) and "difficulty" not in logged


def test_without_a_share_nothing_is_scored_and_groups_of_one_have_no_hint() -> None:
    engine = engine_of()
    for method, n in ((adhint(hinted_share=0.0), 4), (adhint(), 1)):
        rows, _ = made(method, engine, prompt_of(engine, n=n))
        assert len(rows) == n and all(row.rewards is None and row.meta["adhint"] == [0, 0] for row in rows)
    rows, _ = made(adhint(hinted_share=0.9), engine, prompt_of(engine, n=2))
    assert [row.meta["adhint"] for row in rows] == [[0, 0], [0, 7]]


# ---- advantages


def batch(rows: list[tuple[int, float, bool]]) -> Rollouts:
    rows = sorted(rows, key=lambda row: row[0])
    notes = [[0, 1] if h else [0, 0] for _, _, h in rows]
    return make_rollouts([r for _, r, _ in rows], group=[g for g, _, _ in rows], meta={"adhint": notes})


def by_loop(rollouts: Rollouts, c_max: float, eps: float, threshold: float = 0.5) -> list[float]:
    out = [0.0] * len(rollouts)
    reward, notes = rollouts.reward.tolist(), rollouts.meta["adhint"]
    for g in set(rollouts.group.tolist()):
        rows = [i for i in range(len(out)) if int(rollouts.group[i]) == g and not math.isnan(reward[i])]
        if len(rows) < 2 or len({reward[i] for i in rows}) == 1:
            continue
        mean = sum(reward[i] for i in rows) / len(rows)
        std = math.sqrt(sum((reward[i] - mean) ** 2 for i in rows) / (len(rows) - 1))
        kinds = [[i for i in rows if (notes[i][1] > 0) == h] for h in (False, True)]
        c = 1.0
        if all(kinds):
            naive, with_hint = (1 - sum(reward[i] >= threshold for i in k) / len(k) for k in kinds)
            c = min(max((1 + naive) / (1 + with_hint), 1 / c_max), c_max)
        for i in rows:
            a = (reward[i] - mean) / (std + eps)
            easier = notes[i][1] > 0
            out[i] = a * c if (a > 0) != easier else a / c
    return out


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0, NAN]), st.booleans()), min_size=1, max_size=16
)


def call(name: str, hook: str, *args: Any, **params: Any) -> tuple[Any, dict[str, float]]:
    stack: MethodStack = start_stack(*build_stack(name, {name: params}).methods)
    stack.metrics.take()
    found = stack.call(hook, stack.methods[0], *args)
    return found, {k.partition("/")[2]: v for k, v in combine([stack.metrics.take()]).items()}


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([1.0, 1.3, 2.0]))
def test_advantages_equal_a_loop(rows: Any, c_max: float) -> None:
    rollouts = batch(rows)
    found, _ = call("adhint_advantages", "advantages", rollouts, c_max=c_max, eps=1e-4)
    expected = torch.tensor(by_loop(rollouts, c_max, 1e-4), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    plain = grpo_advantages(rollouts)
    assert torch.equal(torch.sign(found), torch.sign(plain)), "a sign never changes"
    if c_max == 1.0:
        assert torch.equal(found, plain)


def test_equal_difficulties_are_grpo_over_the_union() -> None:
    rollouts = batch([(0, 1.0, False), (0, 0.0, False), (0, 1.0, True), (0, 0.0, True)])
    found, logged = call("adhint_advantages", "advantages", rollouts, eps=1e-4)
    assert torch.equal(found, grpo_advantages(rollouts)) and logged["factor"] == 1.0
    none = batch([(0, 1.0, False), (0, 0.0, False), (1, 0.5, True), (1, 0.25, True)])
    found, logged = call("adhint_advantages", "advantages", none, eps=1e-4)
    assert torch.equal(found, grpo_advantages(none)) and not logged


def test_a_success_without_a_hint_is_worth_more() -> None:
    rollouts = batch([(0, 1.0, False), *[(0, 0.0, False)] * 3, *[(0, 1.0, True)] * 3, (0, 0.0, True)])
    found, logged = call("adhint_advantages", "advantages", rollouts)
    assert found[0] > found[4] > 0 > found[1] > found[7]
    assert logged["factor"] == pytest.approx(1.75 / 1.25)
    assert (logged["difficulty_naive"], logged["difficulty_hinted"]) == (0.75, 0.25)


def test_rows_of_a_rollout_count_once() -> None:
    one = batch([(0, 1.0, False), (0, 0.0, False), (0, 1.0, True), (0, 1.0, True)])
    twice = make_rollouts(
        one.reward.repeat_interleave(2),
        group_size=8,
        rollout=torch.arange(4).repeat_interleave(2),
        index=torch.tensor([0, 1] * 4),
        meta={"adhint": [n for note in one.meta["adhint"] for n in (note, note)]},
    )
    expected, _ = call("adhint_advantages", "advantages", one)
    found, _ = call("adhint_advantages", "advantages", twice)
    torch.testing.assert_close(found, expected.repeat_interleave(2))


# ---- gradients


def hinted_batch(seed: int, lengths: list[int], hints: list[int]) -> tuple[Rollouts, Tokens]:
    """Rows with the first tokens of some forced, and random entropies and advantages."""
    rng = np.random.default_rng(seed)
    rollouts = make_rollouts(
        [0.0] * len(lengths), group_size=2, lengths=lengths, meta={"adhint": [[0, h] for h in hints]}
    )
    count = sum(lengths)
    tokens = make_tokens(rollouts, keep=torch.from_numpy(rng.random(count) < 0.85))
    forced = tokens.position < torch.tensor(hints)[tokens.row]
    advantages = torch.from_numpy(rng.normal(size=len(lengths)))[tokens.row]
    return rollouts, tokens.replace(forced=forced, advantages=advantages)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_gradients_equal_a_loop(rows: Any, kappa: float, mask: bool, seed: int) -> None:
    hints = [h for h, _ in rows]
    rollouts, tokens = hinted_batch(seed, [h + own for h, own in rows], hints)
    shape, logged = call("adhint_gradients", "shape", rollouts, tokens, kappa=kappa, mask_failures=mask)
    weights = []
    for i in range(len(tokens)):
        row, advantage = int(tokens.row[i]), float(tokens.advantages[i])
        mine = [j for j in range(len(tokens)) if int(tokens.row[j]) == row and tokens.keep[j] and not tokens.forced[j]]
        if not tokens.forced[i]:
            assert bool(shape.keep_tokens[i]) and float(shape.advantages[i]) == advantage, "own tokens as they were"
            continue
        mean = sum(float(tokens.entropies[j]) for j in mine) / len(mine) if mine else float(tokens.entropies[i])
        g = math.exp(-kappa * abs(float(tokens.entropies[i]) - mean))
        assert 0 < g <= 1 and float(shape.advantages[i]) == pytest.approx(g * advantage)
        assert bool(shape.keep_tokens[i]) == (not mask or advantage >= 0)
        if tokens.keep[i]:
            weights.append(g)
    assert logged == {} if not weights else logged["weight"] == pytest.approx(np.mean(weights))


def test_all_hints_left_and_nothing_divides_by_0() -> None:
    rollouts, tokens = hinted_batch(0, [3, 3], [3, 3])
    tokens = tokens.replace(advantages=-torch.ones(6).double())
    shape, logged = call("adhint_gradients", "shape", rollouts, tokens)
    assert not shape.keep_tokens.any() and torch.isfinite(shape.advantages).all() and logged["left"] == 1


def test_read_hints_are_not_touched() -> None:
    """They are no tokens of the update; a column without notes is a batch without hints."""
    rollouts, tokens = hinted_batch(1, [4, 4], [0, 0])
    for meta in ({"adhint": [[0, 3], [0, 3]]}, {}, {"adhint": [None, "x"]}):
        shape, _ = call("adhint_gradients", "shape", rollouts.replace(meta=meta), tokens)
        assert shape.keep_tokens.all() and torch.equal(shape.advantages, tokens.advantages)


# ---- refusals


def capabilities(missing: Any = None, **changes: Any) -> HostCapabilities:
    hooks = {"advantages", "shape", "rollout"}
    return HostCapabilities("verl", "0", hooks, {}, (), missing or {}, None, {}, **changes)


def test_refusals() -> None:
    build_stack("adhint")
    with pytest.raises(ConfigError, match=r"`w_min` is 0.8 and `w_max` 0.7"):
        adhint(w_min=0.8)
    with pytest.raises(ConfigError, match="rollout"):
        build_stack(["adhint_rollouts", "latr"])
    with pytest.raises(
        ConfigError, match="`adhint_rollouts` puts tokens into rollouts.*rollout_is=token asks for that"
    ):
        preflight(build_stack("adhint_rollouts"), capabilities(sampling_probabilities={"rollout_is": "token"}))
    with pytest.raises(ConfigError, match="`adhint_rollouts` puts tokens into rollouts.*`minpro` needs it"):
        preflight(build_stack(["adhint_rollouts", "minpro"]), capabilities())
    read = build_stack("adhint_rollouts", {"adhint_rollouts": {"hint_loss": False}})
    assert preflight(read, capabilities(sampling_probabilities={"rollout_is": "token"})) == {}
    with pytest.raises(
        ConfigError, match=r"`reference_column` is 'reference', and the dataset has no .*answer, prompt"
    ):
        build_stack("adhint_rollouts").check(make_run())
    with pytest.raises(ConfigError, match="`answer_column` is 'key'"):
        build_stack("adhint_rollouts", {"adhint_rollouts": {"answer_column": "key"}}).check(
            make_run(columns=("prompt", "reference"))
        )
    with pytest.raises(ConfigError, match="`adhint_gradients` needs entropy"):
        preflight(build_stack("adhint_gradients"), capabilities({"entropies": "no."}))
