"""Environments of Gymnasium and classes for TRL's `environment_factory` as environments of agents, without a model.
TextWorld, verifiers and runs with a policy: tests/real/test_real_environments.py."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from messages import raises

from rl_plugins.core.errors import ConfigError, pip_command
from rl_plugins.core.params import build_params
from rl_plugins.environments import Gymnasium, TextWorld, TRLTools
from rl_plugins.kit.agents import Environment, Observation
from rl_plugins.kit.agents.turns import state_ids
from rl_plugins.lab.demo.environments import Grid
from rl_plugins.methods.turn_control import TurnControl
from rl_plugins.trl import as_tools

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def guide():
    sys.path.insert(0, str(ROOT / "examples" / "guides"))
    yield importlib.import_module("environments")
    sys.path.remove(str(ROOT / "examples" / "guides"))
    sys.modules.pop("environments", None)


def check_environment(kind: Any) -> None:
    """As a run does, where a method names it."""
    build_params(TurnControl.Params, {"environment": kind}, "turn_control")


def call(**arguments: Any) -> str:
    return f'<tool_call>{{"name": "guess", "arguments": {json.dumps(arguments)}}}</tool_call>'


# ---- Gymnasium


def test_an_episode_of_the_lake(guide):
    check_environment("environments:Lake")
    row = guide.Lake.rows(3, seed=5)[1]
    assert row["seed"] == 6 and row["prompt"][0]["content"].endswith(": left, down, right, up.")
    lake = guide.Lake()
    assert isinstance(lake, Environment)
    first = lake.reset(row)
    assert first.text.splitlines()[0] == "[S]FFF" and not first.done
    unclear = [lake.act(text) for text in ("", "leftright", "left or right")]
    assert all(not o.valid and o.anchor == first.anchor and math.isnan(o.reward) for o in unclear)
    way = [lake.act(text) for text in ("I go down.", "Down", "RIGHT", "right", "down", "right")]
    assert [o.reward for o in way] == [0] * 5 + [1] and [o.done for o in way] == [False] * 5 + [True]
    assert way[1].text.splitlines()[-2] == "[F]FFH" and lake.score() == 1
    ids = state_ids([o.anchor for o in (first, *unclear, *way)])
    assert len(set(ids[:4].tolist())) == 1 and len(set(ids.tolist())) == 7
    lake.close()
    lake.close()


def test_a_seed_of_gymnasium_gives_the_same_episode():
    from gymnasium import registry

    class Taxi(Gymnasium):
        id = "Taxi-v4" if "Taxi-v4" in registry else "Taxi-v3"  # gymnasium 1.0

    class Jack(Gymnasium):
        id = "Blackjack-v1"
        actions = ("stick", "hit")

    for kind, word in ((Taxi, "1"), (Jack, "hit")):
        check_environment(kind)
        played = []
        for seed in (3, 3, 4, 5, 6):
            environment = kind()
            observations = [environment.reset({"seed": seed})]
            while not observations[-1].done and len(observations) < 4:
                observations.append(environment.act(word))
            environment.close()
            played.append([(o.text, o.anchor) for o in observations])
        assert played[0] == played[1] and any(other != played[0] for other in played[2:])
    assert "(magenta " in played[0][0][0] or played[0][0][0].startswith("(")
    taxi = Taxi()
    drawn = taxi.reset({"seed": 0}).text
    assert "\x1b" not in drawn and "(magenta " in drawn and "[" in drawn
    taxi.close()


def test_text_spaces_and_spaces_that_are_no_text():
    import gymnasium
    from gymnasium.spaces import Box, Dict, Discrete, Text

    class Echo(gymnasium.Env):
        action_space = Text(5, charset="abc")
        observation_space = Dict({"said": Text(5), "n": Discrete(9)})

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"said": "a", "n": int(self.np_random.integers(9))}, {}

        def step(self, action):
            return {"said": action, "n": len(action)}, float(len(action)), False, True, {}

    class Drawn(Echo):
        observation_space = Box(0, 1, (3,))

    registry = gymnasium.registry
    gymnasium.register("Echo-v0", Echo)
    gymnasium.register("Drawn-v0", Drawn)
    try:
        kind = type("Echoed", (Gymnasium,), {"id": "Echo-v0"})
        check_environment(kind)
        echo = kind()
        echo.reset({"seed": 1})
        assert not echo.act("xyz").valid
        after = echo.act("abc")
        assert "abc" in after.text and after.done and echo.score() == after.reward == 3
        drawn = type("Drawing", (Gymnasium,), {"id": "Drawn-v0"})
        with raises(ConfigError, match="`describe"):
            check_environment(drawn)
        check_environment(type("Told", (drawn,), {"describe": lambda self, observation: "x"}))
        boxes = type("Boxes", (Gymnasium,), {"id": "Drawn-v0", "describe": lambda self, observation: "x"})
        Drawn.action_space = Box(0, 1, (3,))
        with raises(ConfigError, match="`parse"):
            check_environment(boxes)
    finally:
        for name in ("Echo-v0", "Drawn-v0"):
            registry.pop(name)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLake"),
        ({"id": "FrozenLake-v1", "options": {"slippery": True}}, "slippery"),
        ({"id": "FrozenLake-v1", "actions": ("left", "right")}, "4 actions"),
        ({"id": "CartPole-v1"}, "describe"),
    ],
)
def test_what_gymnasium_refuses_at_the_start(fields, named):
    with raises(ConfigError, match=named):
        check_environment(type("Kind", (Gymnasium,), fields))


def test_a_missing_library_names_its_extra(monkeypatch, guide):
    for name in ("gymnasium", "textworld", "verifiers"):
        monkeypatch.setitem(sys.modules, name, None)
        kind = {"gymnasium": guide.Lake, "textworld": TextWorld, "verifiers": guide.Wordle}[name]
        with raises(ConfigError, match=re.escape(pip_command(name))):
            check_environment(kind)


def test_a_row_without_its_column_is_a_broken_episode(guide):
    lake = guide.Lake()
    with raises(ConfigError, match="`seed`"):
        lake.reset({"answer": 1})
    lake.close()


# ---- TRL


def test_an_episode_of_an_environment_for_trl(guide):
    check_environment(guide.HighLowGame)
    game = guide.HighLowGame()
    assert isinstance(game, Environment)
    first = game.reset({"secret": 3, "prompt": []})
    assert first.text.startswith("Find the number") and '"name": "guess"' in first.text and '"integer"' in first.text
    assert game.act(call(number=1)).text == "higher"
    assert game.act("I think " + call(number=1) + call(number=7)).text == "higher\nlower"
    for wrong in (call(numbr=1), call(number=1).replace("guess", "gess"), "<tool_call>guess(1)", '{"nam": 1}'):
        observation = game.act(wrong)
        assert not observation.valid and not observation.done
    assert game.act('{"name": "guess", "arguments": "{\\"number\\": 3}"}') == Observation("right", done=True)
    assert game.score() == 1
    game.reset({"secret": 3})
    assert game.act("It is 3.").done and game.score() == 0
    game.close()


def test_an_environment_as_tools_and_back_is_the_same():
    class Tools(TRLTools):
        factory = as_tools(Grid)
        plain = "act"

        def ended(self):
            return self.environment._last.done

        def state(self):
            return self.environment._last.state

    check_environment(Tools)
    row = Grid.rows(1)[0]
    there, here = Tools(), Grid()
    assert here.reset(row) == there.reset({**row, "prompt": ""})
    for move in [*"x", *Grid.expert(row)]:
        mine, theirs = here.act(move), there.act(move)
        assert (mine.text, mine.done, mine.anchor) == (theirs.text, theirs.done, theirs.anchor)
    assert mine.done and there.score() == here.score()


def test_coroutines_of_an_environment_share_one_loop():
    class Asynchronous:
        closed = 0

        async def reset(self, **row):
            self.loop = asyncio.get_running_loop()

        async def speak(self, word: str) -> str:
            """Speak.

            Args:
                word: what is said.
            """
            return f"{word} {asyncio.get_running_loop() is self.loop}"

        async def close(self):
            type(self).closed += 1

    kind = type("Kind", (TRLTools,), {"factory": Asynchronous, "plain": "speak"})
    check_environment(kind)
    environment = kind()
    environment.reset({})
    assert environment.act("ja").text == "ja True" and environment.score() is None
    environment.close()
    assert Asynchronous.closed == 2


def test_what_is_refused_of_trl_at_the_start(guide):
    class Undescribed(guide.HighLow):
        def move(self, where):
            return where

    for fields, named in (
        ({}, "factory"),
        ({"factory": object}, "reset"),
        ({"factory": guide.HighLow, "plain": "gess"}, "guess"),
        ({"factory": Undescribed}, "move"),
    ):
        with raises(ConfigError, match=named):
            check_environment(type("Kind", (TRLTools,), fields))
