"""Process supervision (arXiv 2402.03300, 4.1.3): loops, where steps begin, and what reward functions may return."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import raises

from rl_plugins.core.rollouts import Jagged, TokenIds
from rl_plugins.kit.steps import separated
from rl_plugins.methods.overlong import Overlong
from rl_plugins.methods.process_supervision import ProcessSupervision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.step_rewards import combined, steps_of, total
from rl_plugins.testing import make_rollouts, make_run, make_tokens, make_turns, one_row_per_turn, one_step, start_stack
from rl_plugins.testing.engine import CharChat

NAN = math.nan
number = st.one_of(st.just(NAN), st.integers(-4, 4).map(lambda i: i / 4))
answers = st.lists(st.tuples(st.lists(number, min_size=1, max_size=4), st.integers(0, 2)), min_size=1, max_size=8)


def batch(lists: Any, texts: list[str], group: Any = None) -> Any:
    """Rollouts of these texts, a token per character, with a list of rewards each."""
    chat, rewards = CharChat(), [t if (t := total(own)) is not None else NAN for own in lists]
    rollouts = make_rollouts(rewards, group or [0] * len(lists), lengths=[len(t) for t in texts])
    ids = TokenIds.cat([torch.tensor([1])] * len(texts), [torch.tensor(chat.encode(t)) for t in texts])
    steps = combined([[steps_of(own) for own in lists]], rollouts.rewards, rollouts.reward_weights)
    rollouts = rollouts.replace(step_rewards=steps, token_ids=ids)
    return rollouts, make_tokens(rollouts)


def decide(rollouts: Any, tokens: Any, *others: Any, **params: Any) -> tuple[list[list[float]], dict[str, float]]:
    """Token advantages of each row, and what was logged."""
    method = ProcessSupervision(ProcessSupervision.Params(**params))
    stack = start_stack(*others, method, run=make_run(chat=CharChat()))
    decision = one_step(stack, rollouts, tokens)
    values = torch.zeros(len(tokens)).double() if decision.advantages is None else decision.advantages
    return [values[tokens.row == i].tolist() for i in range(len(rollouts))], combine([stack.metrics.take()])


def loop(lists: Any, texts: list[str], group: Any, separator: str, eps: float) -> list[list[float]]:
    found = []
    for own, text, g in zip(lists, texts, group, strict=True):
        every = [x for other, h in zip(lists, group, strict=True) if h == g for x in other if x == x]
        mean = sum(every) / max(1, len(every))
        std = math.sqrt(sum((x - mean) ** 2 for x in every) / (len(every) - 1)) if len(set(every)) > 1 else 0.0
        z = [(x - mean) / (std + eps) if x == x and std else 0.0 for x in own]
        step, advantages = 0, []
        for i in range(len(text)):
            step = text[:i].count(separator)
            advantages.append(sum(z[min(step, len(z) - 1) :]))
        found.append(advantages)
    return found


@settings(max_examples=40, deadline=None)
@given(rows=answers, data=st.data(), eps=st.sampled_from([1e-4, 0.1]))
def test_it_equals_the_loop(rows, data, eps):
    lists, group = [own for own, _ in rows], [g for _, g in rows]
    texts = [data.draw(st.text("a|", min_size=1, max_size=8)) for _ in rows]
    values, _ = decide(*batch(lists, texts, group), separator="|", eps=eps)
    for row, expected in zip(values, loop(lists, texts, group, "|", eps), strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


def test_two_rollouts_of_two_steps():
    """R = {1, 0, 0, 1}: mean 1/2, deviation 1/sqrt(3), so z = +-sqrt(3)/2."""
    z = math.sqrt(3) / 2
    rollouts, tokens = batch([[1, 0], [0, 1]], ["ab\n\nc", "d\n\ne"])
    values, logged = decide(rollouts, tokens, eps=0.0)
    assert values[0] == pytest.approx([0.0] * 4 + [-z]) and values[1] == pytest.approx([0.0] * 3 + [z])
    assert logged["process_supervision/steps"] == 2 and logged["process_supervision/unmatched"] == 0
    by_token, logged = decide(rollouts, tokens, eps=0.0, steps="token")
    assert by_token[0] == pytest.approx([0.0, *[-z] * 4]) and by_token[1] == pytest.approx([0.0, *[z] * 3])
    assert logged["process_supervision/unmatched"] == 1, "2 rewards for 5 and 4 tokens"


def test_numbers_supervise_the_outcome_and_equal_rewards_nothing():
    texts, group = ["a|b", "cd", "e|f", "g|h|", "i|j"], [0, 0, 1, 1, 2]
    values, _ = decide(*batch([1.0, 0.0, [0.3, 0.3], [0.3] * 3, [2.0]], texts, group))
    z = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert values[0] == pytest.approx([z] * 3) and values[1] == pytest.approx([-z] * 2)
    assert not any(map(any, values[2:]))


def test_what_reward_hooks_change_counts_for_the_last_step():
    """`overlong` takes 1 from the rollout of 12 tokens; one that a hook withdrew is out of the statistic."""
    rollouts, tokens = batch([[1.0, 0.0], [0.0, 0.0]], ["a\n\nbcdefghij", "k\n\nl"])
    values, _ = decide(rollouts, tokens, Overlong(Overlong.Params(filter=False, buffer=4)), eps=0.0)
    z = math.sqrt(1.5)  # of 1, -1, 0, 0: mean 0, variance 2/3
    assert values[0] == pytest.approx([0.0] * 3 + [-z] * 9) and values[1] == [0.0] * 4
    withdrawn = rollouts.replace(reward=torch.tensor([NAN, 0.0]).double())
    assert not any(map(any, decide(withdrawn, tokens)[0]))


def test_turns_of_agents_in_both_layouts():
    lists = [[1.0, 0.0, 0.5], [0.0, 1.0]]
    rollouts, _ = batch(lists, ["abcdef", "ghij"])
    rollouts = rollouts.replace(turns=make_turns([["s"] * 3, ["s"] * 2]))
    tokens = make_tokens(rollouts)
    expected = loop(lists, ["a|b|c", "d|e"], [0, 0], "|", 1e-4)
    per_turn = [[x for x in row[::2] for _ in range(2)] for row in expected]
    assert decide(rollouts, tokens, steps="turn")[0] == [pytest.approx(row) for row in per_turn]
    rows, their_tokens = one_row_per_turn(rollouts, tokens)
    found, _ = decide(rows, their_tokens, steps="turn")
    assert [x for row in found for x in row] == pytest.approx([x for row in per_turn for x in row])


# ---- where steps begin


class Pieces(CharChat):
    """Tokens that are pieces of text."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def piece(self, token: int) -> str:
        return self.texts[token]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=5), separator=st.sampled_from(["\n\n", "\n", "ab"])
)
def test_steps_are_those_of_split(rows, separator):
    chat = Pieces("\n", "a", "b\n", "\n\n", "", "ab\nab")
    found = separated(Jagged.cat([torch.tensor(row, dtype=torch.int64) for row in rows]), separator, chat).tolist()
    expected = []
    for row in rows:
        text, begin = "".join(chat.texts[t] for t in row), 0
        ends = [
            len(separator.join(text.split(separator)[: k + 1])) + len(separator) for k in range(text.count(separator))
        ]
        for token in row:
            expected.append(sum(end <= begin for end in ends))
            begin += len(chat.texts[token])
    assert found == expected


# ---- what reward functions return


def test_answers_of_reward_functions():
    assert total(0.5) == 0.5 and total(None) is None and steps_of(0.5) is steps_of(None) is steps_of([]) is None
    assert total([0.1, None, 0.2]) == pytest.approx(0.3) and total([None, NAN]) is total([]) is None
    assert steps_of(np.array([1, 2])) == [1.0, 2.0] and total(torch.tensor([1.0, 2.0])) == 3.0
    for wrong in ([[1.0]], ["right"], [{}]):
        with raises(TypeError, "a list with a number or None for each step"):
            steps_of(wrong)


def test_functions_are_added_step_by_step():
    lists = [[[1.0, NAN, 3.0], None, [NAN], None], [None, None, [5.0, 6.0], None]]
    rewards = torch.tensor([[4.0, 10.0], [1.0, NAN], [NAN, 11.0], [NAN, NAN]]).double()
    found = combined(lists, rewards, torch.tensor([1.0, 0.5]).double())
    assert [x.tolist() for x in found] == [
        pytest.approx([1.0, NAN, 8.0], nan_ok=True),  # the number counts for the last step
        [1.0],
        [2.5, 3.0],
        pytest.approx([NAN], nan_ok=True),
    ]
