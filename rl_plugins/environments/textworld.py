"""Games of TextWorld, which the package makes itself.

    class House(TextWorld):
        rewards = "intermediate"

Name the class (or `TextWorld` itself) where a method wants an environment. `House.rows(10, "games")` makes ten games in
that folder and returns rows for the dataset; games of `tw-make` do, too. Needs the extra `textworld`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.environments.libraries import library
from rl_plugins.kit.agents import Observation

_STATUS_LINE = re.compile(r"\n*> +-= .*\Z", re.DOTALL)  # room, score and moves, as a terminal would show them
_ONE_AT_A_TIME = threading.Lock()  # TextWorld has one parser per process, which fails where two threads are in it
_TOLD = ("description", "objective", "facts", "admissible_commands", "score", "max_score", "won", "lost")


class TextWorld:
    """An agent's environment that plays a game of TextWorld, named in the column `game` of the row.

    The first observation is the objective and the room; the others are what the game answers. The state that gigpo
    compares is the set of all `facts` of TextWorld. A command is invalid if it is not among the admissible ones and
    changes no fact. The score is the game's, divided by the highest.

    Attributes:
        commands: how observations tell the admissible commands: "listed"; "numbered", where the agent answers with a
            number; or "hidden".
        rewards: of a turn: "score", what the command added to the score (a share of the highest), or "intermediate",
            1 where it came closer to the end of the quest, -1 where it went away from it.
        task: text of the prompts that `rows` makes.
    """

    commands: ClassVar[Literal["listed", "numbered", "hidden"]] = "listed"
    rewards: ClassVar[Literal["score", "intermediate"]] = "score"
    task: ClassVar[str] = "You play a text game. Answer with one command."

    def __init__(self) -> None:
        self._game = ""
        self._env: Any = None
        self._state: Any = None

    @classmethod
    def check(cls) -> None:
        """
        Raises:
            ConfigError: TextWorld is missing, or an attribute has another value.
        """
        library("textworld", "textworld")
        allowed = {"commands": ("listed", "numbered", "hidden"), "rewards": ("score", "intermediate")}
        for name, values in allowed.items():
            if (given := getattr(cls, name)) not in values:
                raise ConfigError(f"`{name}` of {cls.__name__} is {shown(given)}. Set it to one of {values}.")

    @classmethod
    def rows(
        cls, n: int, folder: str | Path = "textworld-games", seed: int = 0, **settings: Any
    ) -> list[dict[str, Any]]:
        """`n` rows with `prompt` and `game`, the path of a game. A game that is in the folder is not made again; making
        one takes seconds.

        Args:
            folder: of the games.
            seed: of the first game; they count from it.
            settings: of `textworld.GameOptions`. The default here is two rooms, three objects and a quest of two
                commands.
        """
        textworld, rows = library("textworld", "textworld"), []
        settings = {"nb_rooms": 2, "nb_objects": 3, "quest_length": 2, **settings}
        named = "-".join(f"{name}{value}" for name, value in sorted(settings.items()))
        for number in range(seed, seed + n):
            options = textworld.GameOptions()
            for name, value in settings.items():
                if not hasattr(options, name):
                    known = ", ".join(k for k in vars(textworld.GameOptions()) if not k.startswith("_"))
                    raise ConfigError(f"textworld.GameOptions has no `{name}`. It has: {known}.")
                setattr(options, name, value)
            options.seeds, path = number, Path(folder).resolve() / f"{named}-{number}.z8"
            if not path.exists():
                options.path = str(path)
                textworld.make(options)
            prompt = [{"role": "user", "content": cls.task}]
            rows.append({"prompt": prompt, "game": str(path)})
        return rows

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        """Begin the game of a row."""
        if not columns.get("game"):
            raise ConfigError(
                f"the row has no column `game` (its columns: {', '.join(columns) or 'none'}). Add the path of a game, "
                f"as {type(self).__name__}.rows does."
            )
        if columns["game"] != self._game:
            self.close()
            self._env, self._game = _started(str(columns["game"])), columns["game"]
        with _ONE_AT_A_TIME:
            self._env.seed(0)  # of the wording
            self._state = self._env.reset()
        return self._observed(f"{self._state.objective}\n\n{self._state.description.strip()}")

    def act(self, action: str) -> Observation:
        """Give the game a command."""
        before, command = self._state, " ".join(action.split())
        if self.commands == "numbered":
            number = re.search(r"\d+", action)
            if number is None or int(number[0]) >= len(before.admissible_commands):
                return self._observed("Answer with the number of a command.", valid=False)
            command = before.admissible_commands[int(number[0])]
        with _ONE_AT_A_TIME:
            self._state, score, done = self._env.step(command)
        dense = self.rewards == "intermediate"
        reward = self._state.intermediate_reward if dense else (score - before.score) / self._state.max_score
        valid = command in before.admissible_commands or _facts(self._state) != _facts(before)
        answer = _STATUS_LINE.sub("", self._state.feedback).strip()
        return self._observed(answer, reward=float(reward), done=bool(done), valid=valid)

    def score(self) -> float:
        """Share of the game's points, 0 to 1."""
        return float(self._state.score / self._state.max_score)

    def close(self) -> None:
        """End the game."""
        if self._env is not None:
            self._env.close()
        self._game, self._env = "", None

    def _observed(self, text: str, **fields: Any) -> Observation:
        if self.commands != "hidden":
            listed = self._state.admissible_commands
            told = [f"{i} {command}" for i, command in enumerate(listed)] if self.commands == "numbered" else listed
            text += f"\nCommands: {', '.join(told)}"
        return Observation(text, state=_facts(self._state), **fields)


def _started(game: str) -> Any:
    textworld = library("textworld", "textworld")
    if not Path(game).with_suffix(".json").exists() or not Path(game).exists():
        raise ConfigError(
            f"the game {game} is no file, or has no .json file of TextWorld next to it, which tells its facts and "
            f"admissible commands. Give a .z8 game that `tw-make` or TextWorld.rows made."
        )
    with _ONE_AT_A_TIME:
        return textworld.start(game, textworld.EnvInfos(**dict.fromkeys(_TOLD, True), intermediate_reward=True))


def _facts(state: Any) -> list[str]:
    return sorted(map(str, state.facts))
