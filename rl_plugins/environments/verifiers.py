"""Environments of the library `verifiers`, with their `env_response` as turn and their rubric as reward.

    class Wordle(Verifiers):
        id = "wordle"  # as verifiers.load_environment takes it
        arguments = {"use_think": False}

Name the class where a method wants an environment. `Wordle.rows(100)` are rows for the dataset. Needs the extra
`verifiers`: a version below 0.4, which has no `env_response` any more.
"""

from __future__ import annotations

import functools
import json
import signal
import threading
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

from rl_plugins.core.errors import ConfigError
from rl_plugins.environments.libraries import answered, library
from rl_plugins.kit.agents import Observation

_ROW = "verifiers_row"  # column with the row of the environment's dataset, as JSON


class Verifiers:
    """Base of classes that play an environment of `verifiers` as an agent's: a `MultiTurnEnv` or `SingleTurnEnv` whose
    agent acts by text.

    The library does what its own rollout does: `setup_state`, stop conditions, `env_response`, clean-up, and the rubric
    on the finished state, whose weighted sum is the score. Turns have no reward of their own. The state that gigpo
    compares is the text of the last response, since an environment of `verifiers` tells no other. An error of the
    environment means that the episode has no score; an exception in a function of the rubric counts as 0, as there.

    Attributes:
        id: of an installed environment, as `verifiers.load_environment` takes it.
        arguments: of its `load_environment`.
    """

    id: ClassVar[str] = ""
    arguments: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        self._environment = self._loaded()
        self._state: Any = None
        self._before: list[Any] = []
        self._clean = True

    @classmethod
    def make(cls) -> Any:
        """The environment. Override it for one of your own; one serves all episodes of a process."""
        return library("verifiers", "verifiers").load_environment(cls.id, **cls.arguments)

    @classmethod
    def check(cls) -> None:
        """
        Raises:
            ConfigError: the library or the environment is missing, or it is one that cannot be played here.
        """
        environment, vf = cls._loaded(), _library()
        why = ""
        if not isinstance(environment, vf.MultiTurnEnv):
            why = "is no MultiTurnEnv"
        elif environment.tool_defs:
            why = "gives its agent tools, whose calls only its own client reads"
        elif environment.requires_group_rollouts:
            why = "has rewards that compare the rollouts of a group"
        if why:
            raise ConfigError(
                f"the environment of {cls.__name__} ({type(environment).__name__}) {why}. Give a MultiTurnEnv whose "
                f"agent acts by text and whose rubric scores one rollout, or train it with verifiers' own trainer."
            )

    @classmethod
    def rows(cls, n: int, seed: int | None = None) -> list[dict[str, Any]]:
        """At most `n` rows of the environment's dataset, shuffled where a seed is given."""
        rows = cls._loaded().get_dataset(n, seed)
        return [{"prompt": row["prompt"], _ROW: json.dumps(row, default=str)} for row in rows]

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        """Begin the episode of a row."""
        if not columns.get(_ROW):
            raise ConfigError(
                f"the row has no column `{_ROW}` (its columns: {', '.join(columns) or 'none'}). Make the rows with "
                f"{type(self).__name__}.rows."
            )
        self.close()
        return answered(self._reset(json.loads(columns[_ROW])))

    def act(self, action: str) -> Observation:
        """Take a turn of the agent."""
        return answered(self._act(action))

    def score(self) -> float:
        """The weighted sum of the rubric."""
        return answered(self._score())

    def close(self) -> None:
        """Run the environment's clean-up of an episode that was not scored."""
        answered(self._clean_up())

    async def _reset(self, row: dict[str, Any]) -> Observation:
        self._clean = False
        self._state = await self._environment.init_state(row, client=_no_client(), model="policy")
        self._state = await self._environment.setup_state(self._state) or self._state
        self._before = _messages(await self._environment.get_prompt_messages(self._state))
        return Observation(_text(self._before[-1:]))

    async def _act(self, action: str) -> Observation:
        environment, state = self._environment, self._state
        await environment.add_model_response(state, self._before, _response(action))
        if await environment.is_completed(state):
            return Observation("", done=True)
        spoken = [*self._before, *state["trajectory"][-1]["completion"]]
        messages = _messages(await environment.get_prompt_messages(state))
        if await environment.is_completed(state):
            return Observation(_text(_messages(state.get("final_env_response") or [])), done=True)
        if messages[: len(spoken)] != spoken:
            raise ConfigError(
                f"{type(environment).__name__} rewrites what was said before. Here an agent reads its episode as one "
                f"text that only grows."
            )
        self._before = messages
        return Observation(_text(messages[len(spoken) :]))

    async def _score(self) -> float:
        await self._clean_up()
        await self._environment.rubric.score_rollout(self._state)
        await self._environment.rubric.cleanup(self._state)
        return float(self._state["reward"])

    async def _clean_up(self) -> None:
        if not self._clean and self._state is not None:
            self._clean = True
            await self._environment.cleanup(self._state)

    @classmethod
    def _loaded(cls) -> Any:
        with _LOADING:
            loaded: Any = cls
            return _load(loaded)


_LOADING = threading.Lock()


@functools.cache
def _load(cls: Any) -> Any:
    _library()
    try:
        # it takes SIGINT and SIGTERM for itself, which the trainer needs, and fails where it is not in the main thread
        with mock.patch.object(signal, "signal", lambda number, handler: signal.getsignal(number)):
            return cls.make()
    except Exception as e:
        raise ConfigError(f"the environment of {cls.__name__} cannot be made: {type(e).__name__}: {e}") from e


def _library() -> Any:
    vf = library("verifiers", "verifiers")
    if not hasattr(vf, "MultiTurnEnv"):
        raise ConfigError(
            f"verifiers {vf.__version__} has no MultiTurnEnv: since 0.4 its environments are driven by a harness that "
            f"asks the model over HTTP. Install a version before: pip install 'verifiers<0.4'."
        )
    return vf


@functools.cache
def _no_client() -> Any:
    """Stands for the client through which verifiers would ask the model. Here the trainer does."""
    clients = library("verifiers.clients", "verifiers")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError("the environment asks the policy through its client. Only the trainer's engine speaks here.")

    body = dict.fromkeys(clients.Client.__abstractmethods__, refuse)
    kind = type("NoClient", (clients.Client,), {**body, "__init__": lambda self: None})
    return kind()


def _response(text: str) -> Any:
    types = library("verifiers.types", "verifiers")
    message = types.ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
    return types.Response(id="", created=0, model="policy", usage=None, message=message)


def _messages(given: Any) -> list[Any]:
    """Messages as objects of verifiers; an environment may give a text or mappings."""
    return list(library("verifiers.utils.message_utils", "verifiers").normalize_messages(given))


def _text(messages: list[Any]) -> str:
    parts = [message.content for message in messages]
    return "\n".join(
        part if isinstance(part, str) else "\n".join(piece.text for piece in part or [] if hasattr(piece, "text"))
        for part in parts
    )
