"""Every parameter of every method changes something, and where it is declared to change nothing it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer
from cases import case_of
from test_contract import BUILT_IN

from rl_plugins.commands.check import check
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.params import MethodParams, param
from rl_plugins.runtime import registry
from rl_plugins.testing.contract.effects import idle_parameters

METHODS = [name for name in BUILT_IN if not isinstance(registry.load(name), Bundle)]


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_changes_something(name: str, tmp_path: Any) -> None:
    case = case_of(name).tried
    values = {**case.values, **(case.files(tmp_path) if case.files else {})}
    cls: Any = registry.load(name)
    idle = idle_parameters(cls, case.world, values, case.settings, **case.params)
    assert {name: tried for name, tried in idle.items() if name not in case.elsewhere} == {}


# ---- the search itself, and what `rl-plugins check` says


@dataclasses.dataclass(frozen=True)
class ToyParams(MethodParams):
    scale: float = param(1.0, "of the advantages", gt=0)
    unread: float = param(1.0, "of nothing", gt=0)
    power: int = param(1, "of the scale", ge=1, only_if={"scale": 1.0})


class Toy(Method):
    name = "toy"
    Params = ToyParams

    def advantages(self, rollouts: Any) -> Any:
        return self.params.scale**self.params.power * rollouts.reward.nan_to_num(nan=0.0)


def test_a_parameter_that_nobody_reads_is_found() -> None:
    idle = idle_parameters(Toy)
    assert list(idle) == ["unread", "power"]  # 1 to any power is 1: the condition says the opposite of what is true
    assert len(idle["unread"]) > 3 and 2.0 in idle["unread"] and len(idle["power"]) > 1


def test_a_setting_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ConfigError, match="`power` has no effect"):
        idle_parameters(Toy, settings=({"scale": 2.0, "power": 2},))


def test_check_notes_parameters_that_changed_nothing(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("rl_plugins.commands.check._classes", lambda target: [Toy])
    monkeypatch.setattr("rl_plugins.testing.contract.check_method", lambda cls, **params: "toy keeps the contract")
    with pytest.raises(typer.Exit) as ended:
        check("toy")
    assert ended.value.exit_code == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "`unread`" in line)
    assert f" {Toy.Params().unread}: 0.05, 2.0, " in line  # its own value, then those that were tried
    assert "`scale`" not in out
