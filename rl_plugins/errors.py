"""Errors of rl-plugins. Each message says what was given, what is allowed, and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RLPluginsError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(RLPluginsError, ValueError):
    """Something the user named cannot take effect: a method, a parameter, a host option. Raised before training."""


class MethodError(RLPluginsError, RuntimeError):
    """A hook of a method failed or returned something illegal; names the method, the hook and the way to disable it."""


class StateError(RLPluginsError, RuntimeError):
    """Saved method state is missing, corrupt or belongs to another run. Nothing was trained or overwritten."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean `a` or `b`?' for the nearest names, else an empty text."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else ""


def shown(value: object, length: int = 200) -> str:
    """`repr` of a value for a message, cut to a length; never an error of its own."""
    try:
        text = repr(value)
    except Exception as e:
        text = f"<{type(value).__name__} whose repr raises {type(e).__name__}>"
    return text if len(text) <= length else f"{text[:length]}.. ({len(text)} characters)"


def told(error: BaseException) -> str:
    """The text of an exception; never an error of its own."""
    try:
        return str(error)
    except Exception as e:
        return f"<its text cannot be made: {type(e).__name__}>"
