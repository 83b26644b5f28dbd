"""`rl-plugins check`: the contract test of a method, installed or not."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_plugins.core.errors import ConfigError, shortened, shown
from rl_plugins.core.files import read_json

if TYPE_CHECKING:
    from rl_plugins.core.method import Method


def check(
    method: Annotated[
        str, typer.Argument(help='Name of a method, or "module:Class" of a class that is not installed yet.')
    ],
    params: Annotated[str | None, typer.Option(help="Parameters as JSON.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Dataset rows as .jsonl, for columns the method reads.")] = None,
) -> None:
    """Test a method against the contract that every method keeps.

    Parameters that must be given and are not are those of `example_params` of its card. Without --rows, an environment
    among the parameters is asked for some, where its class has `rows(n)`.
    """
    from rl_plugins.runtime.card_file import card_file
    from rl_plugins.testing.contract import check_method
    from rl_plugins.testing.contract.effects import idle_parameters

    chosen, failed = _mapping(params), False
    stored = _read_rows(rows)
    for cls in _classes(method):
        given = {**card_file(cls).example_params, **chosen}
        try:
            print(check_method(cls, rows=stored or _offered_rows(cls, given), **given))
            for name, tried in idle_parameters(cls, **given).items():
                if tried:  # texts and functions cannot be guessed
                    values = shortened(", ".join(shown(value, 40) for value in tried), 120)
                    usual = shown(given.get(name, cls.Params.__dataclass_fields__[name].default), 40)
                    print(
                        f"  note         parameter `{name}` changed nothing on generated inputs. Tried in the place of "
                        f"{usual}: {values}. If your formula reads it, test it on inputs of your own"
                    )
        except AssertionError as e:
            print(e)
            failed = True
    raise typer.Exit(int(failed))


def _mapping(params: str | None) -> dict[str, Any]:
    from rl_plugins.runtime.config_text import read_json_or_yaml

    found = read_json_or_yaml(params or "", "--params") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"--params is {shown(params)}; it must be a JSON object, e.g. '{{\"mad_eps\": 0.001}}'.")
    return found


def _read_rows(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    try:
        rows = [read_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(
            f"--rows {shown(str(path))} cannot be read: {shortened(e)}. Give a file with one JSON object a line."
        ) from None
    if not rows or not all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        raise ConfigError(f"--rows {shown(str(path))} must have one JSON object a line, all with the same keys.")
    return rows


def _offered_rows(cls: type[Method], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the environments among the parameters."""
    from rl_plugins.core.params import build_params

    try:
        params = build_params(cls.Params, given, cls.name)
    except ConfigError:
        return []  # `check_method` says it
    offers = (getattr(getattr(params, field.name), "rows", None) for field in dataclasses.fields(params))
    return next((list(rows(8)) for rows in offers if callable(rows)), [])


def _classes(target: str) -> list[type[Method]]:
    from rl_plugins.core.method import Bundle
    from rl_plugins.runtime import registry

    if ":" in target:
        return [_imported(target)]
    found = registry.load(target)
    if isinstance(found, Bundle):
        return [part for part in map(registry.load, found.parts) if not isinstance(part, Bundle)]
    return [found]


def _imported(target: str) -> type[Method]:
    from rl_plugins.core.method import Method

    module, _, name = target.partition(":")
    here = [os.getcwd(), os.path.join(os.getcwd(), "src")]
    sys.path[:0] = here
    try:
        found = getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a module that exits when it is imported, too
        raise ConfigError(
            f"{shown(target)} cannot be loaded: {type(e).__name__}: {shortened(e)}. Give a method's "
            f"name or module:Class, with the module installed, in this folder or in its `src`."
        ) from e
    finally:
        for folder in here:
            sys.path.remove(folder)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{shown(target)} is {shown(found)}; it must be a subclass of rl_plugins.Method.")
    return found
