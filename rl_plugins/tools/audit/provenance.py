"""Part D of an audit: short hashes of everything a reward is made of, so that a resumed run notices another one."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_plugins.core.rollouts import Run

_PLAIN = (str, bytes, int, float, bool, type(None))


def provenance(run: Run) -> dict[str, str]:
    """Name of a part -> its hash: every reward function, the dataset, the config of rewards, the chat template."""
    found = {f"reward function {f.name}": hash_of_function(f.source) for f in run.reward_functions}
    config = (run.reward_names, [f.weight for f in run.reward_functions], run.group_size, run.max_completion_length)
    found["reward config"] = _hash(repr(config))
    if run.fingerprint:
        found["dataset"] = run.fingerprint
    if run.chat is not None:
        try:
            found["chat template"] = _hash(repr(run.chat.prompt([{"role": "user", "content": "a"}])))
        except Exception:  # a tokenizer without a template
            found["chat template"] = "none"
    return found


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of the parts that are others now."""
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def hash_of_function(function: Callable[..., Any]) -> str:
    """Of the function's file, its place in it, its defaults and what it closes over."""
    parts: list[str] = []
    while isinstance(function, functools.partial):
        parts.append(repr(_plain((function.args, sorted(function.keywords.items())))))
        function = function.func
    owner = function if inspect.isfunction(function) or inspect.ismethod(function) else type(function)
    try:
        parts.append(hashlib.sha256(Path(inspect.getfile(owner)).read_bytes()).hexdigest())
    except (OSError, TypeError):  # made in a console
        parts.append(repr(getattr(getattr(function, "__code__", None), "co_code", "")))
    parts.append(getattr(owner, "__qualname__", ""))
    if not inspect.isfunction(function):
        parts.append(repr(_plain(sorted(vars(function).items()) if hasattr(function, "__dict__") else ())))
    else:
        parts.append(repr(_plain(function.__defaults__)))
        parts.append(repr(_plain(sorted((function.__kwdefaults__ or {}).items()))))
        closed = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
        parts.append(repr(_plain(sorted(closed.items()))))
    return _hash("\n".join(parts))


def _plain(value: Any) -> Any:
    """A value without addresses of memory: of other objects only the type is seen."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return [(str(k), _plain(v)) for k, v in value.items()]
    if inspect.isfunction(value):
        return hash_of_function(value)
    return type(value).__qualname__


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
