"""`rl-plugins check`: the contract test of a method, installed or not."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.method import Bundle, Method
from rl_plugins.runtime import registry


def check_and_print(target: str, params: str | None = None) -> int:
    """Checks a method, or every part of a bundle, and prints what was checked or what failed.

    Args:
        target: a name, or "module:Class" with the module in the current folder, in its `src`, or installed.
        params: parameters as JSON, for a method that has no default for one.

    Returns:
        1 if something failed, else 0.

    Raises:
        ConfigError: no such method, or it cannot be imported.
    """
    from rl_plugins.testing.contract import check_method

    given = _mapping(params)
    failed = False
    for cls in _classes(target):
        try:
            print(check_method(cls, **given))
        except AssertionError as e:
            print(e)
            failed = True
    return int(failed)


def _mapping(params: str | None) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(params or "") or {}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--params is {params!r}; it must be a JSON object, e.g. '{{\"mad_eps\": 0.001}}'.")
    return found


def _classes(target: str) -> list[type[Method]]:
    if ":" in target:
        return [_imported(target)]
    found = registry.load(target)
    if isinstance(found, Bundle):
        return [part for part in map(registry.load, found.parts) if not isinstance(part, Bundle)]
    return [found]


def _imported(target: str) -> type[Method]:
    module, _, name = target.partition(":")
    here = [os.getcwd(), os.path.join(os.getcwd(), "src")]
    sys.path[:0] = here
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as e:
        raise ConfigError(
            f"{target!r} cannot be loaded: {type(e).__name__}: {e}. Give a method's name or module:Class, with the "
            f"module installed, in this folder or in its `src`."
        ) from e
    finally:
        for folder in here:
            sys.path.remove(folder)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{target!r} is {found!r}; it must be a subclass of rl_plugins.Method.")
    return found
