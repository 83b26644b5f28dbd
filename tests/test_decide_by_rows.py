"""Decisions of stacks that read no token: per row, and equal to those made with every token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import method

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups, places
from rl_plugins.core.rollouts import Shape, Tokens
from rl_plugins.runtime.decide import Decision, decide
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_tokens

NAN = float("nan")


def drop_some(rollouts, tokens):
    return Shape(keep_rows=rollouts.rollout != 1, row_columns={"hardness": rollouts.reward.nan_to_num()})


def stacks() -> list[MethodStack]:
    """Fresh ones, since methods keep state."""
    return [
        MethodStack([]),
        build_stack("gdpo"),
        build_stack("mc_grpo"),
        MethodStack([method("select", select=lambda r: r.group != 1), method("drop", shape=drop_some, needs=set())]),
        MethodStack([method("double", shape=lambda r, t: Shape(row_factor=2.0 * (r.rollout != 1)), needs=set())]),
        MethodStack([method("less", rewards=lambda r: torch.where(r.rollout == 0, NAN, r.reward))]),
    ]


def told(decision: Decision, tokens: Tokens) -> dict[str, list]:
    """A decision, spelled out per token."""
    keep, advantages = decision.keep_tokens, decision.advantages
    return {
        "stays": decision.stays.tolist(),
        "trained": decision.trained.tolist(),
        "rows": decision.row_advantages.tolist(),
        "keep": (decision.trained[tokens.row] if keep is None else keep).tolist(),
        "advantages": (decision.row_advantages[tokens.row] if advantages is None else advantages).tolist(),
        "columns": {k: v.tolist() for k, v in decision.row_columns.items()},
        "by": [decision.estimator, *decision.rewarded_by, decision.uniform],
    }


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_decisions_by_rows_equal_those_with_tokens(data) -> None:
    n = data.draw(st.integers(1, 16))
    group = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=n, max_size=n))
    rewards[0] = 1.0 if all(r != r for r in rewards) else rewards[0]
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    host = torch.linspace(-1, 1, n) if data.draw(st.booleans()) else None
    for k in range(len(stacks())):
        of_stack = stacks()[k].needs
        table = torch.tensor(rewards, dtype=torch.float64)
        table = torch.stack([table, table.flip(0)], 1) if "several_rewards" in of_stack else table
        rollouts = make_rollouts(table, group, lengths=lengths)
        tokens = make_tokens(rollouts)
        found = []
        for given_tokens in (tokens, None):
            stack = stacks()[k]
            assert not stack.reads_tokens
            try:
                found.append(told(decide(stack, rollouts, given_tokens, host, grpo_advantages, n), tokens))
            except Exception as e:  # the same refusal either way
                found.append(str(e))
        assert found[0] == found[1]


def test_who_reads_tokens_is_told_from_the_stack() -> None:
    reader = method("reader", shape=lambda r, t: None, needs={"tokens", "entropies"})
    other = method("other", policy_loss=lambda t: t.logprobs, needs={"old_logprobs", "tokens"})
    assert MethodStack([other, method("rows", observe=lambda r, t, s: None, needs=set())]).reads_tokens is False
    assert MethodStack([reader, other]).token_columns == {"entropies"}, "only what driver hooks read is gathered"
    assert MethodStack([method(advantages=lambda r: r.reward, advantages_per="turn", needs={"turns"})]).reads_tokens


@given(st.lists(st.integers(0, 5), max_size=8))
def test_places_count_each_block_from_0(sizes) -> None:
    assert places(torch.tensor(sizes, dtype=torch.int64)).tolist() == [i for n in sizes for i in range(n)]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.1, -3.0, 7.5, NAN])), min_size=1, max_size=30))
def test_groups_in_order_sum_like_groups_in_any_order(rows) -> None:
    """Blocks are reduced segment by segment, other rows scattered: the same numbers, to the bit."""
    rows = sorted(rows, key=lambda r: r[0])
    ids, x = torch.tensor([g for g, _ in rows]), torch.tensor([v for _, v in rows], dtype=torch.float64)
    blocks, scattered = Groups(ids, count=5), Groups(ids, count=5)
    scattered.__dict__["_in_order"] = False
    for name in ("sum", "mean", "std", "min", "max", "n"):
        a, b = getattr(blocks, name)(x), getattr(scattered, name)(x)
        assert torch.equal(a.nan_to_num(nan=-99), b.nan_to_num(nan=-99)), name
    assert blocks._in_order
