"""Arguments of `rl-plugins trl grpo` that no run can have: a short ConfigError, whatever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.trl.commands.script import sort_arguments

LONG = "x" * 20_000
FILES = {
    "an integer as key": ("1: 2", "the key 1 (int) is no text"),
    "a long env": (f"env: {LONG}", "it must map variables to values"),
    "a long key": (f"{LONG[:900]}: 1", "which neither `trl grpo` nor `accelerate launch` knows"),
    "a list": ("[1, 2]", "holds no `key: value` lines"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_that_cannot_be(name: str, tmp_path: Path) -> None:
    text, why = FILES[name]
    (tmp_path / "run.yaml").write_text(text)
    with raises(ConfigError) as e:
        sort_arguments(["--config", str(tmp_path / "run.yaml")])
    assert why in str(e.value) and len(str(e.value)) < 800


@pytest.mark.parametrize(
    "argv", [[LONG], [f"--{LONG}", "1"], ["--learning_rate", LONG]], ids=("word", "option", "value")
)
def test_a_command_line_that_cannot_be(argv: list[str]) -> None:
    with raises(ConfigError) as e:
        sort_arguments(argv)
    assert len(str(e.value)) < 800
