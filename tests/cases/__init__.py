"""What single methods need to be tried, a file each, called as the method: parameters, rollouts, dataset rows.

A method without a file is tried with its defaults on generated data. So a new method touches no list.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from rl_plugins.testing.contract.effects import World


@dataclasses.dataclass(frozen=True)
class Effects:
    """How the parameters of a method are tried one by one, where generated inputs and guessed values do not do.

    Args:
        world: what hooks are given.
        values: parameter -> further values.
        settings: parameters with which each one is tried.
        params: of every try.
        elsewhere: parameters that act on inputs which only the method's own tests have.
        files: makes further values from a temporary folder.
    """

    world: World = dataclasses.field(default_factory=World)
    values: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    settings: Sequence[Mapping[str, Any]] = ({},)
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    elsewhere: Sequence[str] = ()
    files: Callable[[Any], Mapping[str, Sequence[Any]]] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """What a method needs in the contract test.

    Args:
        params: that it must be given, or that let it act.
        prepare: data of the rollouts that cannot be guessed from `needs`.
        rows: dataset rows for environments and programs that read columns.
        effects: how its parameters are tried; none: in a generated world with these.
    """

    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Any], Any] | None = None
    rows: Sequence[Mapping[str, Any]] | None = None
    effects: Effects | None = None

    @property
    def tried(self) -> Effects:
        return self.effects or Effects(World(prepare=self.prepare), params=self.params)


@cache
def case_of(name: str) -> Case:
    """The case of a method."""
    if find_spec(f"{__name__}.{name}") is None:
        return Case()
    found: Case = importlib.import_module(f"{__name__}.{name}").CASE
    return found
