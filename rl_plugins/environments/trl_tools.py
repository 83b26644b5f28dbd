"""Environment classes that were written for `environment_factory` of TRL's trainers.

    class Wordle(TRLTools):
        factory = WordleEnv  # has reset(**row), methods that are tools, perhaps get_reward()

Name the class where a method wants an environment; it runs in TRL and in verl, and methods that make the rollouts work
with it. The other way round, `rl_plugins.trl.as_tools` makes a class for TRL's
`environment_factory` of an environment here.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_plugins.core.errors import ConfigError, did_you_mean, shown
from rl_plugins.environments.libraries import answered, library
from rl_plugins.kit.agents import Observation

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_HOW = 'Call a tool with <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. These are the tools:'


class TRLTools:
    """Base of classes that play an environment of TRL as an agent's.

    A turn calls tools as Hermes and Qwen write them, `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, or as
    that JSON alone. As in TRL's loop, a turn without a call is the agent's answer and ends the episode, and the agent
    is told what a tool raises. Such a turn is invalid, like one with an unknown tool or broken JSON. The first
    observation is what TRL's `reset` returns and the schemas of the tools. The score is `get_reward()`, asked once,
    when the episode is over; without that method there is none.

    Attributes:
        factory: class or function that makes the environment, as TRL's `environment_factory` takes it.
        plain: name of a tool that gets the whole text of a turn as its only argument, instead of calls in JSON; then
            no schemas are told.
    """

    factory: ClassVar[Any] = None
    plain: ClassVar[str] = ""

    def __init__(self) -> None:
        if type(self).factory is None:
            raise ConfigError(
                f"{type(self).__name__} has no `factory`. Set it to a class for TRL's environment_factory."
            )
        self.environment = type(self).factory()
        self._tools = {
            name: getattr(self.environment, name)
            for name, _ in inspect.getmembers(type(self.environment), inspect.isfunction)
            if name not in ("reset", "get_reward", "close") and not name.startswith("_")
        }

    @classmethod
    def check(cls) -> None:
        """
        Raises:
            ConfigError: there is no factory, what it makes has no `reset` or no tool, or a tool cannot be described.
        """
        made = cls()
        try:
            name = type(made.environment).__name__
            if not callable(getattr(made.environment, "reset", None)) or not made._tools:
                raise ConfigError(f"{name} has no method `reset`, or no public method that would be a tool.")
            if cls.plain and cls.plain not in made._tools:
                raise ConfigError(
                    f"`plain` is {cls.plain!r}, which is no tool of {name}.{did_you_mean(cls.plain, made._tools)} Its "
                    f"tools: {', '.join(made._tools)}."
                )
            made._told()
        finally:
            made.close()

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        """Begin the episode of a row."""
        text = answered(self.environment.reset(**columns)) or ""
        if not isinstance(text, str):
            raise ConfigError(
                f"`reset` of {type(self.environment).__name__} returned {shown(text)}. Only texts can be told here; "
                f"take TRL's environment_factory itself for images."
            )
        return self._observed("\n\n".join(filter(None, (text, self._told()))))

    def act(self, action: str) -> Observation:
        """Take a turn of the agent."""
        try:
            calls = [(self.plain, [action.strip()], {})] if self.plain else self._calls(action)
        except ValueError as e:
            return self._observed(str(e), valid=False)
        if not calls:
            return self._observed("", done=True)
        results, valid = [], True
        for name, args, arguments in calls:
            try:
                result = answered(self._tools[name](*args, **arguments))
            except Exception as e:  # as TRL does
                result, valid = {"error": str(e)}, False
            if isinstance(result, list):
                raise ConfigError(f"the tool `{name}` returned {shown(result)}. Only texts can be told here.")
            results.append(str(result))
        return self._observed("\n".join(results), valid=valid)

    def score(self) -> float | None:
        """`get_reward()` of the environment, None without that method."""
        reward = getattr(self.environment, "get_reward", None)
        return None if reward is None else answered(reward())

    def close(self) -> None:
        """`close()` of the environment, if it has one."""
        close = getattr(self.environment, "close", None)
        if close is not None:
            answered(close())

    def ended(self) -> bool:
        """Whether the episode is over after a turn: the attribute `done` of the environment, which TRL's examples use.
        Override it for another."""
        return bool(getattr(self.environment, "done", False))

    def state(self) -> Any:
        """What tells this state from others; None: the text. Override it where texts differ in equal states."""
        return None

    def _observed(self, text: str, done: bool = False, valid: bool = True) -> Observation:
        return Observation(text, done=done or self.ended(), valid=valid, state=self.state())

    def _told(self) -> str:
        """The tools, as text."""
        if self.plain:
            return ""
        schema = library("transformers.utils", "trl").get_json_schema
        try:
            return "\n".join((_HOW, *(json.dumps(schema(tool)["function"]) for tool in self._tools.values())))
        except Exception as e:  # TypeHintParsingException, DocstringParsingException
            raise ConfigError(f"a tool of {type(self.environment).__name__} cannot be described: {e}") from e

    def _calls(self, action: str) -> list[tuple[str, list[Any], dict[str, Any]]]:
        """Name and arguments of each call of a turn.

        Raises:
            ValueError: a call that cannot be read, or of a tool that is not there.
        """
        texts = _CALL.findall(action) or ([action] if action.strip().startswith(("{", "[")) else [])
        calls: list[tuple[str, list[Any], dict[str, Any]]] = []
        for text in texts:
            try:
                read = json.loads(text)
                for call in read if isinstance(read, list) else [read]:
                    arguments = call.get("arguments", call.get("parameters")) or {}
                    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                    calls.append((call["name"], [], dict(arguments)))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f"This is no call of a tool. {_HOW.split(' These')[0]}") from None
        for name, _, _ in calls:
            if name not in self._tools:
                raise ValueError(f"There is no tool `{name}`. There are: {', '.join(self._tools)}.")
        return calls
