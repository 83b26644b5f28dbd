"""Trees of completions (`branch_text_rollout`) on the fake engine: shapes, books, odd ends, and the case of GRPO."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Trajectory
from rl_plugins.methods.branch_advantages import BranchAdvantages
from rl_plugins.methods.branch_text_rollout import BranchTextRollout
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

LETTERS = {"a": 0.3, "b": 0.3, "c": 0.4}
ENDLESS = dict.fromkeys("abc>", LETTERS)


def branching(**params: Any) -> BranchTextRollout:
    return BranchTextRollout(build_params(BranchTextRollout.Params, params, "branch_text_rollout"))


def rows_of(
    n: int = 8, table: Any = ENDLESS, seed: int = 0, prompt: Any = None, max_tokens: int = 12, **params: Any
) -> tuple[list[Trajectory], TableEngine, dict[str, float]]:
    engine, logged = TableEngine(table, seed=seed), dict[str, float]()
    asked = make_prompt(engine.chat, "q", n=n, max_tokens=max_tokens, **(prompt or {}))
    rows = [row for rollout in run_program(branching(**params), asked, engine, logged) for row in rollout]
    return rows, engine, logged


def ways(rows: Sequence[Trajectory]) -> list[tuple[list[int], list[int]]]:
    return [(row.meta["branches"]["nodes"], row.meta["branches"]["stops"]) for row in rows]


def test_the_shape_of_a_tree() -> None:
    rows, engine, logged = rows_of(places=(2, 5, 8))
    assert [stops for _, stops in ways(rows)] == [[2, 5, 8, 12]] * 8
    levels = [Counter(nodes[d] for nodes, _ in ways(rows)) for d in range(4)]
    assert [sorted(level.values()) for level in levels] == [[8], [4, 4], [2] * 4, [1] * 8]
    texts: dict[int, Any] = {}
    for row, (nodes, stops) in zip(rows, ways(rows), strict=True):
        for node, start, stop in zip(nodes, [0, *stops], stops, strict=False):
            assert texts.setdefault(node, row.tokens[start:stop]) == row.tokens[start:stop]
        assert set(row.kinds) == {Kind.SAMPLED} and row.finish == "length"
    assert len(texts) == 1 + 2 + 4 + 8
    assert engine.decoded == 2 + 2 * 3 + 4 * 3 + 8 * 4 and engine.batches == 4
    assert logged["branch_text_rollout/saved"] == pytest.approx(1 - engine.decoded / 96)
    assert (logged["branch_text_rollout/leaves"], logged["branch_text_rollout/copies"]) == (8, 0)


@pytest.mark.parametrize(
    ("n", "children", "wanted"),
    [
        (6, 2, [[6], [3, 3], [2, 1, 2, 1], [1] * 6]),
        (7, 3, [[7], [3, 2, 2], [1] * 7, [1] * 7]),
        (20, 2, [[20], [10, 10], [5] * 4, [1] * 20]),  # a plan asks for more than 2^3: the last split is wider
        (1, 2, [[1]] * 4),
    ],
)
def test_any_number_of_rollouts(n: int, children: int, wanted: list[list[int]]) -> None:
    rows, _, _ = rows_of(n, places=(0, 3, 6), children=children)
    levels = [Counter(nodes[d] for nodes, _ in ways(rows)) for d in range(4)]
    assert [[level[k] for k in sorted(level)] for level in levels] == wanted and len(rows) == n


def test_branches_that_end_early_become_copies() -> None:
    """Half of the completions end with their first token: their rows repeat it, and it is trained once."""
    table = {">": {"a": 0.5, "b": 0.5}, "a": {EOS: 1.0}, "b": {"b": 1.0}}
    made = (rows_of(table=table, places=(0, 3), n=4, seed=seed) for seed in range(9))
    rows, _, logged = next(m for m in made if 0 < m[2]["branch_text_rollout/copies"] < 0.5)
    short = [row for row in rows if row.finish == "eos"]
    assert len(short) == 2 and short[0] == short[1] and ways(short)[0] == ([0, ways(short)[0][0][1]], [0, 2])
    assert logged["branch_text_rollout/leaves"] == 3 and logged["branch_text_rollout/copies"] == 0.25
    decision = trained(rows, [1.0 if row in short else 0.0 for row in rows])
    length = [len(row) for row in rows]
    first = [i for i, row in enumerate(rows) if row in short]
    kept = torch.split(decision.keep_tokens, length)
    assert [bool(k.any()) for k in kept].count(False) == 1 and kept[first[0]].all() and not kept[first[1]].any()


def trained(rows: Sequence[Trajectory], rewards: Sequence[float], **params: Any) -> Any:
    """The decision of `branch_advantages` on these rows."""
    noted = [row.meta["branches"] for row in rows]
    lengths = [len(row) for row in rows]
    rollouts = make_rollouts(list(rewards), [0] * len(rows), lengths=lengths, meta={"branches": noted})
    stack = start_stack(BranchAdvantages(build_params(BranchAdvantages.Params, params, "branch_advantages")))
    decision = one_step(stack, rollouts, make_tokens(rollouts))
    assert not any(math.isnan(x) for x in combine([stack.metrics.take()]).values())
    return decision


def test_one_split_at_the_root_is_grpo() -> None:
    """Rows, requests and advantages: those of independent rollouts."""
    rows, engine, logged = rows_of(places=(0,), children=8)
    plain, other, _ = rows_of(prompt={"training": False})
    assert [(r.tokens, r.logprobs) for r in rows] == [(r.tokens, r.logprobs) for r in plain]
    assert engine.requests[0].n == other.requests[0].n == 8 and engine.batches == 1
    assert logged["branch_text_rollout/saved"] == 0
    rewards = [float(row.tokens[0] == ord("a")) for row in rows]
    decision = trained(rows, rewards, eps=1e-4)
    flat = grpo_advantages(make_rollouts(rewards, [0] * 8))
    torch.testing.assert_close(decision.row_advantages, flat)
    assert decision.keep_tokens.all()


def test_evaluation_samples_independent_rollouts() -> None:
    rows, engine, logged = rows_of(prompt={"training": False})
    assert engine.batches == 1 and not logged and all("branches" not in row.meta for row in rows)


def test_prefixes_and_places_inside_of_them() -> None:
    """Two places inside the prefix are one split right behind it; the prefix is a node of its own."""
    rows, _, _ = rows_of(4, prompt={"prefix": (97, 98, 99)}, places=(0, 2, 6))
    assert [stops for _, stops in ways(rows)] == [[3, 6, 12]] * 4
    assert [len(set(column)) for column in zip(*[nodes for nodes, _ in ways(rows)], strict=True)] == [1, 2, 4]
    assert all(tuple(row.kinds[:4]) == (Kind.FORCED,) * 3 + (Kind.SAMPLED,) for row in rows)


@pytest.mark.parametrize("abort_after", [1, 2, 3])
def test_an_engine_that_is_interrupted(abort_after: int) -> None:
    """Branches go on where they were, and the tree is as without an interruption."""
    engine = TableEngine(ENDLESS, abort_after=abort_after)
    made = run_program(branching(places=(2, 5)), make_prompt(engine.chat, "q", n=4, max_tokens=8), engine)
    rows = [row for rollout in made for row in rollout]
    assert [stops for _, stops in ways(rows)] == [[2, 5, 8]] * 4 and engine.decoded == 2 + 2 * 3 + 4 * 3
    silent = TableEngine(ENDLESS, abort_after=0)
    made = run_program(branching(places=(2, 5)), make_prompt(silent.chat, "q", n=4, max_tokens=8), silent)
    assert [len(row) for rollout in made for row in rollout] == [0] * 4  # an engine that makes nothing is asked once


def test_where_there_is_no_room() -> None:
    """A row's own limit below the places: what ends there is copied."""
    rows, _, logged = rows_of(4, max_tokens=3, places=(0, 3, 6))
    assert [len(row) for row in rows] == [3] * 4 and logged["branch_text_rollout/leaves"] == 2
    rows, _, _ = rows_of(4, prompt={"max_context": 1})
    assert [len(row) for row in rows] == [0] * 4


def test_a_completion_is_distributed_like_an_independent_one() -> None:
    """The second rollout of 400 trees, on its own: first and fourth letters against the model's (chi-square)."""
    engine = TableEngine(ENDLESS, seed=3)
    prompts = [make_prompt(engine.chat, f"{i}", n=4, max_tokens=5) for i in range(400)]
    made = run_program(branching(places=(1, 3)), prompts, engine)
    for place in (0, 3):
        seen = Counter(chr(rollouts[1][0].tokens[place]) for rollouts in made)
        assert stats.chisquare([seen[x] for x in "abc"], [400 * p for p in LETTERS.values()]).pvalue > 0.01
    siblings = [rollouts[0][0].tokens[3] == rollouts[1][0].tokens[3] for rollouts in made]  # apart since place 3
    assert abs(sum(siblings) / 400 - sum(p * p for p in LETTERS.values())) < 0.08


@pytest.mark.parametrize(
    ("params", "facts", "said"),
    [
        ({"places": ()}, {}, r"`places` is \[\]\. It must have at least one place"),
        ({"places": (3, 3)}, {}, r"`places` is \[3, 3\]\. .* they must rise"),
        ({"places": (0, 12)}, {}, "`places` has 12, and a completion has at most 12 tokens"),
        ({"places": (0,)}, {}, "1 splits into 2 branches make 2 completions, and the run has 4 of a prompt"),
        ({"places": (0, 3)}, {"group_size": 5}, "make 4 completions, and the run has 5 of a prompt"),
    ],
)
def test_refusals(params: dict[str, Any], facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        branching(**params).check(make_run(**facts))


def test_runs_that_fit() -> None:
    branching(places=(0, 3)).check(make_run())
    branching(places=(0,), children=4).check(make_run())
