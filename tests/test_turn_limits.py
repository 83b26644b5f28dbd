"""The turn limit of a plan row: every program that plays agents keeps it, and runs without one refuse it."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Turn, together
from rl_plugins.core.rollouts import Completion
from rl_plugins.kit.agents import Observation, play
from rl_plugins.methods.aepo_rollout import AepoRollout
from rl_plugins.methods.cleaner import Cleaner
from rl_plugins.methods.m_grpo_rollout.method import MGrpoRollout
from rl_plugins.methods.turn_control import TurnControl
from rl_plugins.runtime.programs import given_trajectory
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program


class Endless:
    """Never done."""

    def reset(self, columns: Any) -> Observation:
        return Observation("go")

    def act(self, action: str) -> Observation:
        return Observation("on")

    def close(self) -> None:
        pass


class Plain(Method):
    name = "plain"

    def rollout(self, prompt: Any) -> Any:
        return (yield from together([play(prompt, Endless, 6) for _ in range(prompt.n)]))


def made(cls: type[Method], **params: Any) -> Method:
    return cls(build_params(cls.Params, params, cls.name))


AGENTS = {
    "play": (Plain, 6),
    "turn_control, unlimited": (lambda: made(TurnControl, environment=Endless, strategy="unlimited", hard_cap=6), 6),
    "turn_control, fixed": (lambda: made(TurnControl, environment=Endless, limit=6), 6),
    "turn_control, dynamic": (
        lambda: made(TurnControl, environment=Endless, strategy="dynamic", limit=3, extension=3),
        6,
    ),
    "cleaner": (lambda: made(Cleaner, environment=Endless, max_turns=6), 6),
    "aepo_rollout": (lambda: made(AepoRollout, environment=Endless, max_turns=6), 6),
    "m_grpo_rollout": (lambda: made(MGrpoRollout, max_turns=6, max_calls=8, parse=lambda text: ["task"]), 6),
}


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("limit", [None, 1, 4, 9])
def test_agents_keep_the_limit_of_the_plan(name: str, limit: int | None) -> None:
    build, own = AGENTS[name]
    engine = TableEngine(lambda text: {EOS: 1.0} if text[-1] == "a" else {"a": 1.0})
    prompt = make_prompt(engine.chat, "task", n=4, max_tokens=4000, max_turns=limit)
    rollouts = run_program(build(), prompt, engine)
    longest = max(len(row.turns) for rows in rollouts for row in rows)
    assert longest == (own if limit is None else min(own, limit))


def test_a_given_episode_has_its_own_prompt_and_turns() -> None:
    engine = TableEngine({"a": {EOS: 1.0}})
    prompt = make_prompt(engine.chat, "task")
    turns = (Turn(0, 2, "s", 0.5), Turn(3, 4, None))
    given = Completion((7, 0, 9, 8), (-0.5, -0.1, -9.0, -0.2), observed=(False, False, True, False), turns=turns)
    row = given_trajectory(prompt, given.replace(prompt=(1, 2, 3)))
    assert row.prompt == (1, 2, 3) and row.turns == turns and row.tokens == given.tokens
    assert given_trajectory(prompt, given).prompt == prompt.tokens
