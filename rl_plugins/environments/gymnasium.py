"""Environments of Gymnasium that can be told in text.

    class Lake(Gymnasium):
        id = "FrozenLake-v1"
        options = {"is_slippery": False}
        actions = ("left", "down", "right", "up")

Name the class where a method wants an environment. `Lake.rows(100)` are rows for the dataset. Needs the extra
`gymnasium`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.environments.libraries import library
from rl_plugins.kit.agents import Observation

_COLORS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")  # of gymnasium.utils.colorize
_COLORED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)


class Gymnasium:
    """Base of classes that play an environment of Gymnasium as an agent's.

    The agent reads what `render_mode="ansi"` draws, where the environment has it, else the observation. An action of a
    `Discrete` space is one of `actions`; a text that names none of them, or several, is invalid and changes nothing.
    An action of a `Text` space is the whole text. The state that gigpo compares is Gymnasium's observation. The column
    `seed` of a row seeds its episodes, so rollouts of a prompt begin alike. The score is the sum of the rewards.

    Override `describe` or `parse` for spaces that are no text.

    Attributes:
        id: as `gymnasium.make` takes it.
        options: further arguments of `gymnasium.make`.
        actions: words for the actions of a `Discrete` space, in order; without them they are numbers.
        task: text of the prompts that `rows` makes; without it, the id and the actions.
    """

    id: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    actions: ClassVar[Sequence[str]] = ()
    task: ClassVar[str] = ""

    def __init__(self) -> None:
        self._env = _made(self.id, self.options, self._render_mode())
        self._score, self._last = 0.0, Observation("", done=True)

    @classmethod
    def check(cls) -> None:
        """
        Raises:
            ConfigError: Gymnasium is missing or has no such environment, or its spaces are no text.
        """
        environment = cls()
        try:
            environment._check_spaces()
        finally:
            environment.close()

    @classmethod
    def rows(cls, n: int, seed: int = 0) -> list[dict[str, Any]]:
        """`n` rows with `prompt` and `seed`, which counts from `seed`."""
        environment = cls()
        words = environment._words()
        environment.close()
        how = f"Answer with one of these actions: {', '.join(words)}." if words else "Answer with your action."
        prompt = [{"role": "user", "content": cls.task or f"Act in {cls.id}. {how}"}]
        return [{"prompt": prompt, "seed": seed + i} for i in range(n)]

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        """Begin the episode of a row, whose column `seed` decides what is random in it."""
        if columns.get("seed") is None:
            raise ConfigError(
                f"the row has no column `seed` (its columns: {', '.join(columns) or 'none'}), so rollouts of a prompt "
                f"would begin in different states. Add one, as {type(self).__name__}.rows does."
            )
        self._score = 0.0
        observation, _ = self._env.reset(seed=int(columns["seed"]))
        self._last = self._observed(observation)
        return self._last

    def act(self, action: str) -> Observation:
        """Take a step."""
        try:
            step = self.parse(action)
        except ValueError as e:
            return Observation(f"{e}\n{self._last.text}", valid=False, state=self._last.state)
        observation, reward, terminated, truncated, _ = self._env.step(step)
        self._score += float(reward)
        self._last = self._observed(observation, reward=float(reward), done=bool(terminated or truncated))
        return self._last

    def score(self) -> float:
        """Sum of the rewards so far."""
        return self._score

    def close(self) -> None:
        """Close the environment of Gymnasium."""
        self._env.close()

    def describe(self, observation: Any) -> str:
        """What the agent reads of an observation: the drawing of the environment, where it draws in text."""
        return _plain(str(self._env.render())) if self._render_mode() == "ansi" else str(observation)

    def parse(self, action: str) -> Any:
        """The action that a text names.

        Raises:
            ValueError: none; the agent reads the message.
        """
        space, words = self._env.action_space, self._words()
        if not words:
            if not space.contains(action):
                raise ValueError(f"Not an action of {space}.")
            return action
        named = {i for i, word in enumerate(words) if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", action, re.I)}
        if len(named) != 1:
            raise ValueError(f"Answer with one of these actions: {', '.join(words)}.")
        return int(space.start) + named.pop()

    def _words(self) -> list[str]:
        """Names of the actions of a discrete space; none of another space."""
        space = self._env.action_space
        if not hasattr(space, "n"):
            return []
        return list(self.actions) or [str(int(space.start) + i) for i in range(int(space.n))]

    def _observed(self, observation: Any, **fields: Any) -> Observation:
        state = self._env.observation_space.to_jsonable([observation])  # travels between processes
        return Observation(self.describe(observation), state=state, **fields)

    @classmethod
    @functools.cache
    def _render_mode(cls) -> str | None:
        if "render_mode" in cls.options:
            return str(cls.options["render_mode"])
        environment = _made(cls.id, cls.options, None)
        environment.close()
        return "ansi" if "ansi" in (environment.metadata or {}).get("render_modes", ()) else None

    def _check_spaces(self) -> None:
        spaces, name = library("gymnasium.spaces", "gymnasium"), f"{type(self).__name__} ({self.id})"
        action, observation = self._env.action_space, self._env.observation_space
        if type(self).parse is Gymnasium.parse and not isinstance(action, (spaces.Text, spaces.Discrete)):
            raise ConfigError(
                f"the actions of {name} are {shown(action)}. A text can name those of Text and Discrete spaces. Define "
                f"`parse(self, action: str)`, which returns an action of that space."
            )
        if isinstance(action, spaces.Discrete) and len(self._words()) != action.n:
            raise ConfigError(
                f"`actions` of {name} has {len(self.actions)} names, and there are {action.n} actions. Name each one."
            )
        told = type(self).describe is not Gymnasium.describe or self._render_mode() == "ansi"
        if not told and not _readable(spaces, observation):
            raise ConfigError(
                f"the observations of {name} are {shown(observation)}, and it has no text rendering "
                f'(render_mode="ansi"). Define `describe(self, observation) -> str`, which tells them in text.'
            )


def _made(id: str, options: Mapping[str, Any], render_mode: str | None) -> Any:
    gymnasium = library("gymnasium", "gymnasium")
    rendered = {} if render_mode is None else {"render_mode": render_mode}
    try:
        return gymnasium.make(id, **{**rendered, **options})
    except (gymnasium.error.Error, TypeError, ImportError) as e:  # the text of UnregisteredEnv has the nearest names
        raise ConfigError(f"Gymnasium cannot make the environment {id!r} with {shown(dict(options))}: {e}") from e


def _readable(spaces: Any, space: Any) -> bool:
    """Whether a value of the space is short as text."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        return all(_readable(spaces, part) for part in (parts.values() if isinstance(parts, Mapping) else parts))
    return isinstance(space, (spaces.Text, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def _plain(drawn: str) -> str:
    """A drawing without its escape sequences: [x] is highlighted, (red x) is colored."""

    def word(match: re.Match[str]) -> str:
        codes = {int(code) for code in match[1].split(";") if code}
        if any(40 <= code < 48 for code in codes):
            return f"[{match[2]}]"
        color = next((_COLORS[code - 30] for code in codes if 30 <= code < 38), "")
        return f"({color} {match[2]})" if color else match[2]

    return _COLORED.sub(word, drawn).strip("\n")
