"""ECHO (arXiv 2602.02150): labels by vote, the tree, the shaping, the clip range, and all through the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.losses import aggregate, ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Trajectory
from rl_plugins.core.rollouts import PlanRow, Rollouts, Shape, Terms, Tokens
from rl_plugins.methods.echo import ECHO
from rl_plugins.methods.echo.answers import boxed_answer
from rl_plugins.methods.echo.controller import branch_at, penalty, prune_at, statistics
from rl_plugins.methods.echo_clip import EchoClip
from rl_plugins.methods.echo_labels import EchoLabels
from rl_plugins.methods.echo_shaping import EchoShaping
from rl_plugins.methods.echo_tree import EchoTree
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_terms, make_tokens, one_step, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

GOLDEN = Golden("echo")
NAN = math.nan


def built(cls: Any, **params: Any) -> Any:
    return cls(build_params(cls.Params, acting(cls.Params, params), cls.name))


# ---- golden numbers of the authors' code


def flat(inputs: Mapping[str, Any]) -> tuple[Rollouts, Tokens, Tensor]:
    """A golden batch as rows and flat tokens, and the mask (rows, time)."""
    mask = torch.tensor(inputs["response_mask"]) > 0
    ids = {uid: i for i, uid in enumerate(dict.fromkeys(inputs["uid"]))}
    rollouts = make_rollouts([0.0] * len(mask), [ids[u] for u in inputs["uid"]], lengths=mask.sum(1).tolist())
    advantages, entropies, confidences = (
        torch.tensor(inputs[name], dtype=torch.float64)[mask] for name in ("advantages", "entropys", "confidences")
    )
    tokens = make_tokens(rollouts, entropies=entropies, old_logprobs=confidences.log())
    return rollouts, tokens.replace(advantages=advantages), mask


RESULTS = ("advantages", "clip_epsilon", "tail_confidence")


@GOLDEN.kind("entropys")
def check_shaping_and_clip_range(case: Case) -> None:
    p = case.params
    expected = {
        name: torch.tensor(case.expected[name], dtype=torch.float64) for name in RESULTS if name in case.expected
    }
    rollouts, tokens, mask = flat(case.inputs)
    method = EchoShaping(case.build(EchoShaping))
    shaped = method.shape(rollouts, tokens).advantages if p["enable"] else tokens.advantages
    padded = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, shaped)
    # their means divide by the number + 1e-8, and 1 / sqrt(variance + 1e-8) magnifies that
    smallest = min(float(x.double().var()) for x in (tokens.entropies, tokens.old_logprobs.exp()))
    tolerance = max(1e-8, 1e-9 / math.sqrt(smallest + 1e-8))
    torch.testing.assert_close(padded, expected["advantages"], rtol=0, atol=tolerance)
    params = case.build(EchoClip)
    assert ("clip_epsilon" in expected) == p["use_adaptive_clip"]
    if "clip_epsilon" in expected:
        ranged = EchoClip(params).shape(rollouts, tokens).row_columns["echo_clip_range"]
        torch.testing.assert_close(ranged, expected["clip_epsilon"], rtol=0, atol=1e-12)
    if "tail_confidence" in expected:
        wide = replace(params, eps_min=0.0, eps_max=0.5, kappa=1.0)  # with these the range tells the tail's confidence
        tail = 1 - torch.logit(2 * EchoClip(wide).shape(rollouts, tokens).row_columns["echo_clip_range"])
        torch.testing.assert_close(tail, expected["tail_confidence"], rtol=0, atol=1e-12)


@GOLDEN.kind("clip_epsilon_per_sequence")
def check_loss(case: Case) -> None:
    names = ("log_prob", "old_log_prob", "advantages", "response_mask", "clip_epsilon_per_sequence")
    x = {name: torch.tensor(case.inputs[name], dtype=torch.float64) for name in names}
    mask = x["response_mask"]
    terms = Terms(
        mask=mask,
        logprobs=x["log_prob"].requires_grad_(),
        advantages=x["advantages"],
        old_logprobs=x["old_log_prob"],
        num_tokens=mask.sum(),
        num_rows=(mask.sum(1) > 0).sum(),
        max_length=mask.shape[1],
        columns={"echo_clip_range": x["clip_epsilon_per_sequence"][:, None]},
    )
    stack = start_stack(EchoClip(case.build(EchoClip, {"clip_ratio_c": "dual_clip"})))
    per_token = stack.one("policy_loss", terms)
    wanted, n = case.expected, float(mask.sum())
    how, length = case.params["loss_agg_mode"], terms.max_length
    loss = aggregate(per_token, mask, how, num_tokens=terms.num_tokens, num_rows=terms.num_rows, max_length=length)
    assert float(loss) == pytest.approx(wanted["pg_loss"], abs=1e-12)
    logged = combine([stack.metrics.take()])
    assert logged["echo_clip/clipfrac"] * n / (n + 1e-8) == pytest.approx(wanted["pg_clipfrac"], abs=1e-12)
    assert logged["echo_clip/clipfrac_lower"] == pytest.approx(wanted["pg_clipfrac_lower"], abs=1e-12)
    assert logged["echo_clip/kl"] == pytest.approx(wanted["ppo_kl"], abs=1e-9)


@GOLDEN.kind("logprob_steps")
def check_controller(case: Case) -> None:
    case.params.must_be("enable", True)
    p = SimpleNamespace(**asdict(EchoTree.Params()) | case.options(EchoTree))  # theirs may be out of our ranges
    top = [
        sorted(((int(t), lp) for t, lp in step.items()), key=lambda entry: -entry[1])
        for step in case.inputs["logprob_steps"]
    ]
    s, wanted = statistics(top, p), case.expected
    names = {"tail_conf": "tail", "group_conf": "group", "delta_entropy": "delta", "c_bot10": "bottom"}
    assert len(wanted["stats"]) == len(top)
    for t, of_t in enumerate(wanted["stats"]):
        for key in of_t:
            if hasattr(s, names.get(key, key)):
                assert getattr(s, names.get(key, key))[t] == pytest.approx(of_t[key], abs=1e-9), (t, key)
    branch = branch_at(s, p)
    if wanted["branch"] is None:
        assert branch is None
    else:
        assert branch == (wanted["branch"]["position"], wanted["branch"]["width"])
        assert [t for t, _ in top[branch[0]][: branch[1]]] == wanted["branch"]["candidate_token_ids"]
    pruned, prune = prune_at(s, p), wanted["prune"]
    assert (pruned is not None) == prune["should_prune"]
    assert pruned == ((prune["prune_pos"], prune["reason"]) if pruned else None)
    assert pruned or (prune["prune_pos"], prune["reason"]) == (None, None)
    # the method has no such weights: their use of the penalty is none, so it has the default ones
    l1, l2, l3 = (case.params.get(f"prune_lambda_{i}", default) for i, default in ((1, 1.0), (2, 1.0), (3, 0.05)))
    found = l1 * s.tail[pruned[0]] - l2 * (1 - s.bottom[pruned[0]]) - l3 if pruned else 0.0
    assert found == pytest.approx(prune["penalty"], abs=1e-9)
    if pruned and (l1, l2, l3) == (1.0, 1.0, 0.05):
        assert penalty(s, pruned[0]) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the controller against loops


CONTROL = {
    **{f: getattr(EchoTree.Params(), f) for f in EchoTree.Params.__dataclass_fields__},
    "logprob_top_k": 5,
    "confidence_top_k": 3,
}


def loop_statistics(top: Sequence[Sequence[tuple[int, float]]], p: Any) -> list[dict[str, float]]:
    out: list[dict[str, float]] = []
    for t, place in enumerate(top):
        probs = [math.exp(lp) for _, lp in place][: p.logprob_top_k]
        probs = sorted((q / sum(probs) for q in probs), reverse=True)
        best = probs[: p.confidence_top_k]
        low = probs[-max(1, int(0.1 * len(probs))) :]
        out.append(
            {
                "entropy": -sum(q * math.log(max(q, 1e-9)) for q in probs),
                "confidence": -sum(math.log(q + 1e-9) for q in best) / len(best),
                "bottom": sum(low) / len(low),
            }
        )
        conf = [s["confidence"] for s in out]
        past = [s["entropy"] for s in out[max(0, t - p.entropy_window) : t]]
        out[t]["group"] = sum(conf[-p.group_window :]) / len(conf[-p.group_window :])
        out[t]["tail"] = sum(conf[-p.tail_window :]) / len(conf[-p.tail_window :])
        out[t]["delta"] = out[t]["entropy"] - sum(past) / len(past) if past else 0.0
    return out


def loop_branch(s: list[dict[str, float]], p: Any) -> tuple[int, int] | None:
    for t in range(max(0, min(p.min_depth, len(s) - 1)), len(s)):
        of = s[t]
        if of["entropy"] >= p.entropy_high and of["group"] <= p.branch_threshold:
            if of["delta"] < p.entropy_delta_threshold:
                continue
            raw = p.min_branches + p.alpha * (of["entropy"] - p.entropy_low) / (p.entropy_high - p.entropy_low)
            raw -= p.beta * (of["group"] - p.branch_threshold) / p.branch_threshold
            width = min(max(round(raw), p.min_branches), p.max_branches)
            return (t, width) if width > 1 else None
    return None


def loop_prune(s: list[dict[str, float]], p: Any) -> tuple[int, str] | None:
    falls = rises = 0
    lowest = math.inf
    for t, of in enumerate(s):
        lowest = min(lowest, of["group"])
        falls = falls + 1 if t and of["tail"] < s[t - 1]["tail"] - 1e-9 else 0
        rises = rises + 1 if of["delta"] > 1e-9 else 0
        if p.prune_threshold is not None and lowest < p.prune_threshold:
            return t, "low_confidence"
        if p.tail_threshold is not None and falls >= p.tail_decline_steps and of["tail"] <= p.tail_threshold:
            return t, "tail_decline"
        if p.delta_upper is not None and rises >= p.delta_rise_steps and of["delta"] > p.delta_upper:
            return t, "entropy_spike"
    return None


@st.composite
def tops(draw: st.DrawFn) -> list[list[tuple[int, float]]]:
    places = []
    for _ in range(draw(st.integers(0, 14))):
        # few levels, so that rules meet and ties happen
        levels = draw(st.sampled_from([(0, 9, 9, 9, 9, 9), (0, 0, 0, 0, 0, 0), (0, 1, 2, 3, 4, 5), (0, 0, 4, 4, 4, 4)]))
        total = math.log(sum(math.exp(-x) for x in levels))
        places.append([(i, -x - total) for i, x in enumerate(levels)][: draw(st.integers(4, 6))])
    return places


@settings(max_examples=60, deadline=None)
@given(top=tops(), data=st.data())
def test_the_controller_equals_the_loop(top: list[list[tuple[int, float]]], data: st.DataObject) -> None:
    change = {
        "entropy_high": data.draw(st.sampled_from([0.6, 1.3, 1.6])),
        "branch_threshold": data.draw(st.sampled_from([1.5, 3.0, 6.0])),
        "entropy_delta_threshold": data.draw(st.sampled_from([-1.0, 0.2])),
        "prune_threshold": data.draw(st.sampled_from([None, 1.5, 2.0])),
        "tail_threshold": data.draw(st.sampled_from([None, 3.0, 6.0])),
        "delta_upper": data.draw(st.sampled_from([None, 0.1, 0.5])),
        "delta_rise_steps": data.draw(st.integers(1, 3)),
        "tail_decline_steps": data.draw(st.integers(1, 3)),
        "min_depth": data.draw(st.integers(0, 5)),
        "group_window": data.draw(st.integers(1, 4)),
        "tail_window": data.draw(st.integers(1, 5)),
    }
    p = SimpleNamespace(**{**CONTROL, **change})
    s, loop = statistics(top, p), loop_statistics(top, p)
    assert len(s) == len(top)
    for t, of in enumerate(loop):
        for key, value in of.items():
            assert getattr(s, key)[t] == pytest.approx(value, abs=1e-9), (t, key)
    assert branch_at(s, p) == loop_branch(loop, p)
    assert prune_at(s, p) == loop_prune(loop, p)


def peaked(n: int) -> list[list[tuple[int, float]]]:
    return [[(0, math.log(0.96)), *((i, math.log(0.01)) for i in range(1, 5))] for _ in range(n)]


def mixed(best: float) -> list[tuple[int, float]]:
    return [(0, math.log(best)), *((i, math.log((1 - best) / 4)) for i in range(1, 5))]


def test_a_falling_tail_is_cut_and_a_pause_begins_anew() -> None:
    """The golden cases have no such case. Each place is less sure than the one before; one that is not resets."""
    rule = {"tail_window": 2, "tail_threshold": 9.0, "tail_decline_steps": 3, "delta_upper": None}
    p = SimpleNamespace(**{**CONTROL, **rule})
    falling = [mixed(b) for b in (0.99, 0.9, 0.8, 0.7, 0.6)]
    assert prune_at(statistics(falling, p), p) == (3, "tail_decline")
    pause = [*falling[:3], mixed(0.999), *falling[1:]]
    assert prune_at(statistics(pause, p), p) == (7, "tail_decline")
    p.tail_threshold = 0.1
    assert prune_at(statistics(falling, p), p) is None


def test_equal_places_neither_rise_nor_fall() -> None:
    rule = {"tail_threshold": 9.0, "tail_decline_steps": 1, "delta_rise_steps": 1, "delta_upper": 0.0}
    p = SimpleNamespace(**{**CONTROL, **rule, "entropy_window": 3, "tail_window": 3})
    assert prune_at(statistics(peaked(50), p), p) is None


def test_the_configs_own_thresholds_can_never_act() -> None:
    """Which is why they are refused: entropy of 10 tokens <= ln 10, confidence of 5 tokens >= ln 5."""
    p = SimpleNamespace(**{**CONTROL, "logprob_top_k": 10, "confidence_top_k": 5})
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 10, generator=rng, dtype=torch.float64) * torch.rand(2000, 1, generator=rng) * 5
    top = [[(i, lp) for i, lp in enumerate(row.tolist())] for row in logits.log_softmax(1).sort(descending=True).values]
    s = statistics(top, p)
    assert s.entropy.max() < math.log(10) < 3.5 and s.confidence.min() > math.log(5) - 1e-6 > 1.2
    for name, value in (("branch_threshold", 1.2), ("prune_threshold", 0.4), ("tail_threshold", 1.0)):
        with pytest.raises(ConfigError, match=rf"`{name}` is {value:g}, but the confidence is never below"):
            built(EchoTree, **{name: value})
    with pytest.raises(ConfigError, match=r"below ln logprob_top_k = 2.3"):
        built(EchoTree, entropy_high=3.5)


# ---- the tree on a known model


LETTERS = "pqrstu"
SCRIPT = "abcde"


def sure(token: str, rest: str = LETTERS) -> dict[str, float]:
    return {token: 0.97, **{c: 0.03 / len(rest) for c in rest if c != token}}


def model(text: str) -> dict[str, float]:
    """Five certain letters, one of six, its capital, and the end."""
    said = text.rsplit(">", 1)[-1]
    if len(said) < len(SCRIPT):
        return sure(SCRIPT[len(said)])
    if len(said) == len(SCRIPT):
        return {c: 0.2 - 0.01 * i for i, c in enumerate(LETTERS)}
    if len(said) == len(SCRIPT) + 1:
        return sure(said[-1].upper() if said[-1] in LETTERS else "X")
    return sure(EOS)


def tree(**params: Any) -> EchoTree:
    return built(
        EchoTree, **{"logprob_top_k": 6, "confidence_top_k": 3, "entropy_high": 1.5, "delta_upper": None, **params}
    )


def rows_of(engine: TableEngine, method: EchoTree, n: int = 8, **changes: Any) -> list[Trajectory]:
    prompt = make_prompt(engine.chat, "go", n=n, **changes)
    return [row for rollout in run_program(method, prompt, engine) for row in rollout]


def assert_books(engine: TableEngine, rows: Sequence[Trajectory]) -> None:
    """Sampled tokens have the model's log-prob of their context, all others none."""
    for row in rows:
        assert len(row.tokens) == len(row.kinds) == len(row.logprobs) == len(row.versions)
        for i, (token, kind, logprob) in enumerate(zip(row.tokens, row.kinds, row.logprobs, strict=True)):
            if kind == Kind.SAMPLED:
                context = row.prompt + row.tokens[:i]
                assert logprob == pytest.approx(math.log(engine.probabilities(context)[token]))
            else:
                assert math.isnan(logprob)


def typical(seed: int) -> tuple[TableEngine, list[Trajectory]]:
    engine = TableEngine(model, seed=seed)
    return engine, rows_of(engine, tree())


def test_the_first_rollout_branches_at_the_uncertain_token() -> None:
    widths = set()
    for seed in range(12):
        engine, rows = typical(seed)
        assert len(rows) == 8
        assert_books(engine, rows)
        base, text = rows[0], engine.chat.decode(rows[0].tokens)
        branches = [r for r in rows if r.meta["echo_branch"] is not None]
        if not text.startswith(SCRIPT) or len(text) < 6:
            continue  # an unlikely letter came first
        assert rows[1 : 1 + len(branches)] == branches
        widths.add(1 + len(branches))
        # the most likely letters and the sampled one, each once
        letters = [engine.chat.decode(r.tokens)[5] for r in (base, *branches)]
        expected = list(LETTERS[:4]) if text[5] in LETTERS[:4] else [text[5], *LETTERS[:3]]
        assert sorted(letters) == sorted(expected)
        for branch in branches:
            assert branch.meta["echo_branch"] == 5
            assert branch.tokens[:5] == base.tokens[:5] and branch.logprobs[:5] == base.logprobs[:5]
            assert branch.kinds[:5] == (Kind.SAMPLED,) * 5 and branch.kinds[5] == Kind.FORCED
            assert set(branch.kinds[6:]) <= {Kind.SAMPLED} and branch.finish == "eos"
        assert set(base.kinds) == {Kind.SAMPLED}
        assert all(set(r.kinds) == {Kind.SAMPLED} for r in rows[1 + len(branches) :])
        assert all(r.meta["echo_pruned"] is None and r.meta["echo_penalty"] == 0 for r in rows)
        # base, branches and the missing ones, in two waves
        assert [r.n for r in engine.requests] == [1, *[1] * len(branches), 8 - 1 - len(branches)]
        assert engine.batches == 2
    assert widths == {4}


def test_width_follows_entropy_and_confidence() -> None:
    p = SimpleNamespace(**{**CONTROL, "logprob_top_k": 6, "entropy_high": 1.5, "branch_threshold": 3.0})
    uniform = [(i, -math.log(6)) for i in range(6)]
    uncertain = [*([uniform] * 3), [(i, 0.0 if not i else -9.0) for i in range(6)], uniform]
    p.entropy_low, p.alpha, p.max_branches, p.min_depth = 0.5, 1.0, 6, 4
    s = statistics(uncertain, p)
    raw = 1 + (math.log(6) - 0.5) / 1.0 - (s.group[4] - 3.0) / 3.0
    assert branch_at(s, p) == (4, round(raw)) == (4, 2)
    p.alpha = 3.0
    assert branch_at(s, p) == (4, 5)
    p.max_branches = 1
    assert branch_at(s, p) is None


def test_nothing_branches_without_doubt_or_when_too_narrow() -> None:
    for method, engine in (
        (tree(), TableEngine(lambda text: sure("a") if len(text) < 14 else {EOS: 1.0})),
        (tree(max_branches=1), TableEngine(model)),
        (tree(min_depth=40), TableEngine(model)),
        (tree(entropy_delta_threshold=2.0), TableEngine(model)),
    ):
        rows = rows_of(engine, method, n=3)
        assert len(rows) == 3 and all(set(r.kinds) == {Kind.SAMPLED} for r in rows)
        assert [r.n for r in engine.requests] == [1, 2]
        assert_books(engine, rows)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 12])
def test_as_many_rollouts_as_asked_for(n: int) -> None:
    engine = TableEngine(model, seed=1)
    rows = rows_of(engine, tree(), n=n)
    assert len(rows) == n
    assert sum(r.meta["echo_branch"] is not None for r in rows) == min(3, n - 1)
    assert sum(r.n for r in engine.requests) == n  # nothing is made to be thrown away


def test_a_branch_may_be_the_end() -> None:
    def ends(text: str) -> dict[str, float]:
        said = text.rsplit(">", 1)[-1]
        if len(said) == 5:
            return {EOS: 0.3, "p": 0.28, "q": 0.22, "r": 0.2}
        return sure("a") if len(said) < 9 else {EOS: 1.0}

    found = 0
    for seed in range(8):
        engine = TableEngine(ends, seed=seed)
        rows = rows_of(engine, tree(entropy_high=1.2), n=4)
        assert_books(engine, rows)
        for row in rows:
            if row.meta["echo_branch"] is not None and row.tokens[row.meta["echo_branch"]] == 0:
                found += 1
                assert len(row) == 6 and row.finish == "eos" and row.kinds[-1] == Kind.FORCED
        assert all(0 not in r.trajectory.tokens for r in engine.requests)
    assert found


@pytest.mark.parametrize("abort", [None, 0, 1, 6])
@pytest.mark.parametrize("room", [{}, {"max_tokens": 6}, {"max_tokens": 3}, {"max_context": 4}, {"max_context": 2}])
def test_little_room_and_interruptions(abort: int | None, room: dict[str, int]) -> None:
    engine = TableEngine(model, seed=1, abort_after=abort)
    rows = rows_of(engine, tree(), n=5, **room)
    assert len(rows) == 5
    assert_books(engine, rows)
    limit = min(room.get("max_tokens", 64), room.get("max_context", 64) - 4)
    assert all(len(r) <= max(0, limit) for r in rows)
    if abort == 0 or limit <= 0:
        assert all(len(r) == 0 for r in rows)
    if room == {"max_tokens": 6} and abort is None:
        assert [len(r) for r in rows] == [6] * 5 and sum(Kind.FORCED in r.kinds for r in rows) == 3


def test_a_prefix_of_the_plan_stays_in_front() -> None:
    engine = TableEngine(model, seed=1)
    prefix = engine.chat.encode("ab")
    rows = rows_of(engine, tree(min_depth=2), prefix=prefix)
    assert all(r.tokens[:2] == prefix and r.kinds[:2] == (Kind.FORCED,) * 2 for r in rows)
    assert [r.meta["echo_branch"] for r in rows[:5]] == [None, 5, 5, 5, None]
    assert_books(engine, rows)


def test_what_goes_astray_is_cut_behind_the_place() -> None:
    """Entropy rises in three places in a row, behind the branching token as in the first rollout."""

    def astray(text: str) -> dict[str, float]:
        said = text.rsplit(">", 1)[-1]
        if len(said) == 5:
            return {c: 0.2 - 0.01 * i for i, c in enumerate(LETTERS)}
        best = {8: 0.9, 9: 0.7, 10: 0.2}.get(len(said), 0.97)
        letter = "o" if len(said) > 5 else SCRIPT[len(said)]
        return {letter: best, **dict.fromkeys(LETTERS, (1 - best) / 6)} if len(said) < 14 else {EOS: 1.0}

    rules = {"entropy_window": 2, "delta_upper": 0.5, "logprob_top_k": 7}
    engine = TableEngine(astray, seed=3)
    method, logged = tree(**rules), {}
    rollouts = run_program(method, make_prompt(engine.chat, "go", n=6), engine, logged)
    rows = [r for rollout in rollouts for r in rollout]
    assert_books(engine, rows)
    assert [r.meta["echo_pruned"] for r in rows] == ["entropy_spike"] * 4 + [None] * 2
    assert [len(r) for r in rows] == [11] * 4 + [15] * 2  # the place of the spike stays; independent ones are whole
    assert all(r.finish == "length" for r in rows[:4])
    assert [r.meta["echo_branch"] for r in rows] == [None, 5, 5, 5, None, None]
    assert all(r.meta["echo_penalty"] != 0 for r in rows[:4])
    assert logged == pytest.approx({"echo_tree/branches": 3, "echo_tree/pruned": 1.0, "echo_tree/kept_tokens": 11 / 15})
    # the statistics of a branch begin with its branching token: what was before it cuts nothing of it
    rows = rows_of(TableEngine(astray, seed=3), tree(**rules, delta_rise_steps=1, min_depth=5), n=6)
    assert [(len(r), r.meta["echo_pruned"]) for r in rows[:2]] == [(6, "entropy_spike"), (10, "entropy_spike")]


def test_a_program_does_not_depend_on_its_neighbors() -> None:
    def alone(text: str) -> list[list[Trajectory]]:
        engine = TableEngine(model, seed=5)
        return run_program(tree(), make_prompt(engine.chat, text, n=6), engine)

    engine = TableEngine(model, seed=5)
    prompts = [make_prompt(engine.chat, text, n=6) for text in ("one", "two", "three")]
    assert run_program(tree(), prompts, engine) == [alone(t) for t in ("one", "two", "three")]


def test_what_the_tree_declares() -> None:
    assert tree(logprob_top_k=7).needs == {"engine:logprobs=7", "several_rollouts"} and tree().brings == {
        "forced_tokens"
    }
    assert not tree(max_branches=1).brings


# ---- labels


def voted(texts: Sequence[str], group: Sequence[int], **changes: Any) -> Rollouts:
    return make_rollouts([NAN] * len(texts), group, text=list(texts), **changes)


def box(answer: Any) -> str:
    return f"so it is \\boxed{{{answer}}}."


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("x \\boxed{4} y \\boxed{ 12 }", "12"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1,234,567}", "1234567"),
        ("\\boxed{(1,234)}", "(1,234)"),
        ("\\boxed{$+007.50$}", "7.5"),
        ("\\boxed{-0.0}", "0"),
        ("\\boxed{-3.}", "-3"),
        ("\\boxed{1\\,000}", "1000"),
        ("the answer is 4", None),
        ("\\boxed{4", None),
        ("", None),
    ],
)
def test_boxed_answers(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def loop_vote(texts: Sequence[str], group: Sequence[int]) -> list[float]:
    answers = [boxed_answer(t) for t in texts]
    out = []
    for a, g in zip(answers, group, strict=True):
        mine = [b for b, h in zip(answers, group, strict=True) if h == g and b is not None]
        label = max(mine, key=lambda b: (mine.count(b), -mine.index(b))) if mine else None
        out.append(float(a is not None and a == label))
    return out


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_votes_equal_the_loop(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    group = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    texts = [box(a) if a else "no idea" for a in data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))]
    method = EchoLabels()
    assert method.rewards(voted(texts, group)).tolist() == loop_vote(texts, group)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()
    rollouts = voted(texts, group)
    moved = rollouts.replace(
        group=rollouts.group[order], rollout=rollouts.rollout[order], text=[texts[i] for i in order]
    )
    assert method.rewards(moved).tolist() == [loop_vote(texts, group)[i] for i in order]


def test_votes_through_the_driver() -> None:
    """Six votes, four are trained: the answer of the first four alone would be another one."""
    stack = build_stack("echo_labels", {"echo_labels": {"n_votes": 6, "label_column": "truth"}})
    stack.start(make_run())
    plan = first_plan(stack, [3, 5], 4, 8, 16)
    assert [(r.prompt_index, r.n, r.spare, r.payload) for r in plan.rows] == [
        (3, 4, 2, {"echo_labels": 4}),
        (5, 4, 2, {"echo_labels": 4}),
    ]
    answers = [1, 1, 2, 3, 2, 2, 7, None, 8, 8, None, None]
    texts = ["?" if a is None else box(a) for a in answers]
    rollouts = make_rollouts(
        [0.5] * 12,
        group_size=6,
        text=texts,
        payload=[r.payload for r in plan.rows for _ in range(6)],
        meta={"truth": ["2"] * 6 + ["7"] * 6},
    )
    decision = one_step(stack, rollouts, budget=8)
    assert decision.rollouts.reward.tolist() == [0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert decision.stays.tolist() == [True, True, True, True, False, False] * 2
    assert decision.row_advantages[4:6].tolist() == [0, 0]
    assert float(decision.row_advantages[2]) == pytest.approx(1.5, abs=1e-3)  # (1 - 1/4) / std of 0 0 1 0
    assert combine([stack.metrics.take()]) == pytest.approx(
        {
            "echo_labels/majority_ratio": (3 / 6 + 2 / 6) / 2,
            "echo_labels/answered": 9 / 12,
            "echo_labels/label_accuracy": 0.5,
            "echo_labels/reward_accuracy": (6 + 3) / 12,
        }
    )


def test_a_plan_with_groups_of_several_rows_and_spare_ones() -> None:
    rows = (PlanRow(1, 0, 3, payload={"other": 1}), PlanRow(1, 0, 2), PlanRow(2, 1, 2, spare=1), PlanRow(3, 2, 40))
    planned = EchoLabels().plan(make_plan().replace(rows=rows)).rows
    assert [(r.n, r.spare) for r in planned] == [(3, 27), (2, 0), (2, 30), (40, 0)]
    assert planned[0].payload == {"other": 1, "echo_labels": 5}
    assert planned[2].payload == {"echo_labels": 3}
    # all rows of the group know how many stay, those of the second plan row too
    rollouts = voted(["?"] * 32, [0] * 32, payload=[planned[0].payload] * 30 + [None] * 2)
    assert EchoLabels().select(rollouts).tolist() == [True] * 5 + [False] * 27


def test_no_answers_one_vote_and_strange_extractors() -> None:
    assert EchoLabels().rewards(voted(["?", "?"], [0, 0])).tolist() == [0, 0]
    assert EchoLabels().rewards(voted([box(3)], [0])).tolist() == [1]
    assert EchoLabels().rewards(voted([], [])).tolist() == []
    assert EchoLabels().select(voted([box(3)] * 3, [0] * 3)).tolist() == [True] * 3  # nobody planned these

    def extract(text: str) -> Any:
        return {"raise": 1 / 0} if text == "bad" else {"n": 4, "s": " 4 ", "e": ""}.get(text)

    rewards = built(EchoLabels, extract=extract).rewards(voted(["n", "s", "e", "bad", "none"], [0] * 5))
    assert rewards.tolist() == [1, 1, 0, 0, 0]


def test_a_rollout_of_several_rows_votes_once_with_its_last() -> None:
    rollouts = voted(
        [box(9), box(1), box(2), box(9), box(2)],
        [0] * 5,
        rollout=torch.tensor([0, 0, 1, 1, 2]),
        index=torch.tensor([0, 1, 1, 0, 0]),
    )
    assert EchoLabels().rewards(rollouts).tolist() == [0, 0, 1, 1, 1]


# ---- shaping


def loop_shaping(rollouts: Rollouts, tokens: Tokens, p: Any) -> list[float]:
    live = [
        bool(k) and not math.isnan(float(rollouts.reward[r]))
        for k, r in zip(tokens.keep.tolist(), tokens.row.tolist(), strict=True)
    ]

    def white(x: list[float]) -> list[float]:
        if p.statistics == "raw":
            return x
        known = [v for v, ok in zip(x, live, strict=True) if ok]
        mean = sum(known) / len(known) if known else 0.0
        var = sum((v - mean) ** 2 for v in known) / (len(known) - 1) if len(known) > 1 else 0.0
        return [(v - mean) / math.sqrt(var + 1e-8) if len(known) > 1 else 0.0 for v in x]

    h = white(tokens.entropies.double().tolist())
    c = white([1 - min(1.0, math.exp(v)) for v in tokens.old_logprobs.double().tolist()])
    s = [p.alpha * a + p.beta * b for a, b in zip(h, c, strict=True)]
    s = [max(-p.s_max, min(p.s_max, v)) for v in s] if p.s_max is not None else s
    group = [int(rollouts.group[r]) for r in tokens.row.tolist()]
    out = []
    for i, a in enumerate(tokens.advantages.tolist()):
        if not live[i]:
            out.append(a)
            continue
        mine = [s[j] for j in range(len(s)) if live[j] and group[j] == group[i]]
        out.append(a * (1 + p.mult_coeff * s[i]) + p.add_coeff * (s[i] - sum(mine) / len(mine)))
    return out


@st.composite
def batches(draw: st.DrawFn) -> tuple[Rollouts, Tokens]:
    n = draw(st.integers(1, 8))
    group = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, NAN]), min_size=n, max_size=n))
    lengths = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    rollouts = make_rollouts(rewards, group, lengths=lengths)
    seed = draw(st.integers(0, 99))
    tokens = make_tokens(rollouts, seed)
    rng = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(rollouts), generator=rng, dtype=torch.float64).nan_to_num()
    advantages = torch.where(torch.isnan(rollouts.reward), 0.0, advantages)[tokens.row]
    return rollouts, tokens.replace(advantages=advantages, keep=torch.rand(len(tokens), generator=rng) > 0.2)


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_shaping_equals_the_loop(batch: tuple[Rollouts, Tokens], data: st.DataObject) -> None:
    rollouts, tokens = batch
    method = built(
        EchoShaping,
        alpha=data.draw(st.sampled_from([1.0, 0.3])),
        beta=data.draw(st.sampled_from([1.0, 2.0])),
        s_max=data.draw(st.sampled_from([None, 2.0, 0.5])),
        mult_coeff=data.draw(st.sampled_from([0.1, 0.0, 0.4])),
        add_coeff=data.draw(st.sampled_from([0.0, 0.5])),
        statistics=data.draw(st.sampled_from(["white", "raw"])),
    )
    shaped = method.shape(rollouts, tokens) or Shape(advantages=tokens.advantages)
    assert shaped.advantages.tolist() == pytest.approx(loop_shaping(rollouts, tokens, method.params), abs=1e-9)


def shaped_batch(**params: Any) -> tuple[Rollouts, Tokens, Tensor]:
    rollouts = make_rollouts([1.0, 0.0, 0.2, 1.0, 1.0, 1.0, 1.0, 1.0], lengths=[4, 3, 6, 2, 5, 1, 3, 4])
    tokens = make_tokens(rollouts, advantages=torch.tensor([0.9, -1.2, -0.7, 0.9, 0.0, 0.0, 0.0, 0.0]))
    return rollouts, tokens, built(EchoShaping, **params).shape(rollouts, tokens).advantages


def test_signs_zeros_and_group_means() -> None:
    rollouts, tokens, after = shaped_batch(mult_coeff=0.49)
    assert bool((after * tokens.advantages >= 0).all())
    assert bool((after[tokens.advantages == 0] == 0).all())
    assert float((after - tokens.advantages).abs().max()) > 0.1
    _, _, added = shaped_batch(mult_coeff=0.0, add_coeff=0.3)
    group = rollouts.group[tokens.row]
    change = added - tokens.advantages
    for g in (0, 1):  # of a group of equal rewards, too
        assert float(change[group == g].mean()) == pytest.approx(0, abs=1e-12)
        assert float(change[group == g].abs().max()) > 0.05


@pytest.mark.parametrize("neutral", [{"mult_coeff": 0.0}, {"alpha": 0.0, "beta": 0.0}])
def test_neutral_parameters_leave_grpo(neutral: dict[str, float]) -> None:
    _, tokens, after = shaped_batch(**neutral)
    assert torch.equal(after, tokens.advantages)
    rollouts = make_rollouts([1.0, 0, 0, 1] * 2)
    plain, ours = one_step(start_stack(), rollouts), one_step(start_stack(built(EchoShaping, **neutral)), rollouts)
    assert torch.equal(plain.advantages, ours.advantages)


def test_constant_statistics_change_nothing() -> None:
    for n, value in ((3, 0.1), (1000, 0.7), (7, 1 / 3)):
        rollouts = make_rollouts([1.0], lengths=[n])
        tokens = make_tokens(
            rollouts,
            advantages=torch.tensor([0.37]),
            entropies=torch.full((n,), value),
            old_logprobs=torch.full((n,), -value),
        )
        assert torch.equal(EchoShaping().shape(rollouts, tokens).advantages, tokens.advantages)


def test_a_batch_of_one_token_and_one_of_unscorable_rows() -> None:
    one = make_rollouts([1.0], lengths=[1])
    tokens = make_tokens(one, advantages=torch.tensor([0.4]))
    assert torch.equal(EchoShaping().shape(one, tokens).advantages, tokens.advantages)
    none = make_rollouts([NAN, NAN])
    assert built(EchoShaping, add_coeff=1.0).shape(none, make_tokens(none)) is None


def test_shaping_needs_what_it_reads() -> None:
    assert EchoShaping().needs == {"tokens", "entropies", "old_logprobs"}
    assert built(EchoShaping, beta=0).needs == {"tokens", "entropies"}
    assert built(EchoShaping, alpha=0).needs == {"tokens", "old_logprobs"}
    rollouts = make_rollouts([1.0, 0, 0, 1])
    for params, missing in (({"beta": 0}, "old_logprobs"), ({"alpha": 0}, "entropies")):
        tokens = make_tokens(rollouts, advantages=rollouts.reward).replace(**{missing: None})
        changed = built(EchoShaping, **params).shape(rollouts, tokens).advantages
        assert not torch.equal(changed, tokens.advantages)


def test_what_shaping_logs() -> None:
    rollouts = make_rollouts([1.0, 0.0], group_size=2, lengths=[3, 3])
    tokens = make_tokens(rollouts, entropies=torch.tensor([0.0, 0, 0, 0, 0, 9.0]))
    stack = start_stack(built(EchoShaping, beta=0, mult_coeff=0.9, s_max=1.5))
    decision = one_step(stack, rollouts, tokens)
    plain = one_step(start_stack(), rollouts, tokens)
    logged = combine([stack.metrics.take()])
    assert logged["echo_shaping/clipped"] == pytest.approx(1 / 6)  # z of the 9 is 5 / sqrt(6) = 2.04
    assert logged["echo_shaping/change"] == pytest.approx(float((decision.advantages - plain.advantages).abs().mean()))
    assert logged["echo_shaping/sign_changed"] == 0
    assert not decision.uniform


# ---- the clip range


def test_the_tail_equals_the_loop() -> None:
    rng = torch.Generator().manual_seed(0)
    for window in (0, 1, 3, 16):
        rollouts = make_rollouts([0.0] * 6, lengths=[0, 1, 2, 5, 9, 30])
        tokens = make_tokens(rollouts, 4)
        tokens = tokens.replace(keep=torch.rand(len(tokens), generator=rng) > 0.3)
        found = built(EchoClip, tail_window=window).shape(rollouts, tokens).row_columns["echo_clip_range"]
        for row in range(6):
            mine = sorted(
                (int(tokens.position[i]), math.exp(float(tokens.old_logprobs[i])))
                for i in range(len(tokens))
                if tokens.row[i] == row and tokens.keep[i]
            )
            tail = [c for _, c in mine][-window:]
            mean = sum(tail) / len(tail) if tail else 0.0
            wanted = 0.05 + 0.15 / (1 + math.exp(-4 * (1 - mean)))
            assert float(found[row]) == pytest.approx(wanted, abs=1e-9)


def test_the_less_sure_the_wider() -> None:
    rollouts = make_rollouts([0.0] * 5, lengths=[4] * 5)
    sure_of = torch.tensor([0.0, 1e-9, 0.3, 0.9, 1.0]).repeat_interleave(4)
    tokens = make_tokens(rollouts, old_logprobs=sure_of.log())
    found = EchoClip().shape(rollouts, tokens).row_columns["echo_clip_range"]
    assert bool((found.diff() <= 0).all()) and float(found[-1]) == 0.125
    assert float(found.min()) >= 0.05 + 0.15 / 2 and float(found.max()) < 0.2
    assert float(found[0]) == pytest.approx(0.05 + 0.15 / (1 + math.exp(-4)))


def with_range(terms: Terms, value: Any) -> Terms:
    column = torch.as_tensor(value, dtype=torch.float32)
    return terms.replace(columns={"echo_clip_range": column.expand(len(terms.mask))[:, None]})


def test_equal_ranges_are_ppo() -> None:
    terms = with_range(make_terms(rows=6, time=9, seed=1), 0.15)
    terms = terms.replace(logprobs=(3 * (terms.logprobs.detach() - terms.old_logprobs) + terms.old_logprobs))
    terms = terms.replace(logprobs=terms.logprobs.requires_grad_())
    ours = EchoClip().policy_loss(terms)
    ppo = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, 0.15, 0.15, 3.0)
    on = terms.mask > 0
    assert torch.equal(ours[on], ppo[on])
    assert torch.equal(*(torch.autograd.grad(x[on].sum(), terms.logprobs, retain_graph=True)[0] for x in (ours, ppo)))


def test_every_row_has_its_own_range() -> None:
    old = torch.full((2, 1), -1.0)
    lp = (old + math.log(1.15)).requires_grad_()
    base = make_terms(rows=2, time=1, mask=torch.ones(2, 1))
    terms = base.replace(logprobs=lp, old_logprobs=old, advantages=torch.ones(2, 1))
    loss = EchoClip().policy_loss(with_range(terms, [0.1, 0.2]))
    assert loss[:, 0].tolist() == pytest.approx([-1.1, -1.15])
    assert torch.autograd.grad(loss.sum(), lp)[0][:, 0].tolist() == pytest.approx([0.0, -1.15])


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_masked_tokens_change_nothing(poison: float) -> None:
    terms = with_range(make_terms(rows=5, time=7), 0.15)
    outside = terms.mask == 0
    bad = {k: getattr(terms, k).detach().masked_fill(outside, poison) for k in ("old_logprobs", "advantages")}
    lp = terms.logprobs.detach().masked_fill(outside, poison).requires_grad_()
    loss = EchoClip().policy_loss(terms.replace(**bad, logprobs=lp))
    assert bool((loss[outside] == 0).all())
    assert torch.equal(loss[~outside], EchoClip().policy_loss(terms)[~outside])
    assert bool((torch.autograd.grad(loss.sum(), lp)[0][outside] == 0).all())


def test_logs_of_the_clip_combine_over_micro_batches() -> None:
    terms = with_range(make_terms(rows=6, time=9, seed=2), 0.1)
    terms = terms.replace(old_logprobs=terms.old_logprobs - 1.5 * (terms.logprobs.detach() > -0.8))
    whole, parts = start_stack(EchoClip()), start_stack(EchoClip())
    whole.one("policy_loss", terms)
    for i in range(6):
        names = ("mask", "logprobs", "advantages", "old_logprobs")
        cut = {k: getattr(terms, k)[i : i + 1] for k in names}
        parts.one("policy_loss", with_range(terms.replace(**cut), 0.1))
    one, two = combine([whole.metrics.take()]), combine([parts.metrics.take()])
    assert one == pytest.approx(two)
    on = terms.mask > 0
    ratio = torch.exp(terms.logprobs.detach() - terms.old_logprobs)
    clipped = (-terms.advantages * ratio.clamp(0.9, 1.1) > -terms.advantages * ratio)[on].double().mean()
    lower = ((terms.advantages < 0) & (ratio > 3))[on].double().mean()
    assert one["echo_clip/clipfrac"] == pytest.approx(float(clipped)) and 0 < clipped < 1
    assert one["echo_clip/clipfrac_lower"] == pytest.approx(float(lower)) and lower > 0


# ---- all of it


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("echo_labels", {"n_votes": 0}),
        ("echo_labels", {"extract": "no.such:thing"}),
        ("echo_shaping", {"s_max": 0}),
        ("echo_shaping", {"statistics": "z"}),
        ("echo_clip", {"eps_min": 0.3}),
        ("echo_clip", {"dual_clip": 1.0}),
        ("echo_tree", {"entropy_low": 2.0}),
        ("echo_tree", {"logprob_top_k": 4}),
        ("echo_tree", {"max_branches": 11}),
        ("echo_tree", {"min_branches": 5}),
    ],
)
def test_parameters_out_of_range(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"Method `{name}`"):
        build_stack(name, {name: params})


def test_the_bundle() -> None:
    stack = build_stack("echo")
    assert stack.names == list(ECHO.parts)
    assert stack.needs == {"text", "tokens", "entropies", "old_logprobs", "several_updates", "engine:logprobs=10"} | {
        "several_rollouts"
    }
    assert [m.name for m in stack.claims["shape"]] == ["echo_shaping", "echo_clip"]
    assert build_stack(["echo", "-echo_tree"]).names == ["echo_labels", "echo_shaping", "echo_clip"]


def test_the_bundle_from_the_tree_to_the_decision() -> None:
    """Votes of a tree: six rollouts, four of them trained, every column where it belongs."""
    params = {"echo_labels": {"n_votes": 6, "extract": lambda text: text[5:6] or None}}
    shrunk = {"logprob_top_k": 6, "confidence_top_k": 3, "entropy_high": 1.5, "delta_upper": None}
    stack = build_stack("echo", {**params, "echo_tree": shrunk})
    plan = first_plan(stack, [0, 1], 4, 8, 16)
    engine = TableEngine(model, seed=2)
    rows = []
    for row in plan.rows:
        prompt = make_prompt(engine.chat, f"go{row.prompt_index}", n=row.n + row.spare)
        rows += [r for rollout in run_program(built(EchoTree, **shrunk), prompt, engine) for r in rollout]
    texts = [engine.chat.decode(r.tokens) for r in rows]
    rollouts = make_rollouts(
        [NAN] * 12,
        group_size=6,
        lengths=[sum(r.trained) for r in rows],
        text=texts,
        payload=[p.payload for p in plan.rows for _ in range(6)],
    )
    decision = one_step(stack, rollouts, make_tokens(rollouts), budget=8)
    assert decision.stays.tolist() == ([True] * 4 + [False] * 2) * 2
    letters = [t[5:6] for t in texts[:6]]
    label = max(letters, key=lambda c: (letters.count(c), -letters.index(c)))
    assert decision.rollouts.reward[:6].tolist() == [float(c == label) for c in letters]
    ranges = decision.row_columns["echo_clip_range"]
    assert bool((ranges[decision.stays] >= 0.125).all()) and len(set(ranges[decision.stays].tolist())) > 4
    assert not decision.uniform and decision.estimator == "rl_plugins"
