"""Names of an earlier version: whoever still uses one is told the new name. A renaming stays here for one version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rl_plugins.errors import ConfigError, MethodError

C = TypeVar("C", bound=type)

SIGNALS = {"steps": "turns"}


def renamed(**names: str) -> Callable[[C], C]:
    """A class decorator: reading, or giving, an old name raises a MethodError with the new one."""

    def decorate(cls: C) -> C:
        create = cls.__init__  # type: ignore[misc]

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for old in names.keys() & kwargs.keys():
                raise MethodError(_told(cls, old, names[old]))
            create(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[misc]
        for old, new in names.items():
            setattr(cls, old, property(_refusal(cls, old, new)))
        return cls

    return decorate


def check_signals(method: str, needs: Iterable[str]) -> None:
    """Raises ConfigError for a signal that has another name now."""
    for old in sorted(set(needs) & SIGNALS.keys()):
        raise ConfigError(f'`{method}` needs the signal "{old}", which is called "{SIGNALS[old]}" now. Rename it.')


def _refusal(cls: type, old: str, new: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        raise MethodError(_told(cls, old, new))

    return read


def _told(cls: type, old: str, new: str) -> str:
    return f"`{cls.__name__}.{old}` is called `{new}` now (a step is an optimizer step). Rename it in the method."
