"""What comes through hydra and OmegaConf, which read the command line before us: always a short ConfigError."""

from __future__ import annotations

from typing import Any

import pytest
from messages import raises
from omegaconf import OmegaConf

from rl_plugins.core.errors import ConfigError
from rl_plugins.verl.config import compose, plain_values, read_settings

LONG = "x" * 20_000
PARAMS = "method_params"
REFUSED: dict[str, tuple[Any, str]] = {
    "an integer as key": ({1: 2}, "rl_plugins.1 does not exist"),
    "an integer as method": ({PARAMS: {1: {"a": 2}}}, "it must map method names to parameters"),
    "a long key": ({LONG: 1}, "does not exist"),
    "text": (LONG, "it has the keys methods, method_params, "),
    "rewards that are text": ({"rewards": LONG}, "it maps keys of the reward function's answer to weights"),
    "an interpolation of itself": ({PARAMS: "${rl_plugins.method_params}"}, "Recursive interpolation"),
    "an interpolation of its parent": ({PARAMS: {"a": "${rl_plugins.method_params}"}}, "parent node"),
    "an interpolation of nothing": ({PARAMS: "${nothing.here}"}, "'nothing.here' not found"),
    "a value that is missing": ({PARAMS: {"mc_grpo": {"mad_eps": "???"}}}, "Missing mandatory value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_node_that_cannot_be_is_refused_in_few_words(name: str) -> None:
    node, why = REFUSED[name]
    with raises(ConfigError) as e:
        read_settings(OmegaConf.create({"rl_plugins": node}))
    assert why in str(e.value) and len(str(e.value)) < 600


def test_everything_else_is_read_as_omegaconf_does() -> None:
    node = {"methods": ["a", "b"], PARAMS: {"a": {"x": 1, "y": [1.5, None, True, "${rl_plugins.methods}"]}}}
    config = OmegaConf.create({"rl_plugins": node})
    assert plain_values(config.rl_plugins) == OmegaConf.to_container(config.rl_plugins, resolve=True)


@pytest.mark.parametrize(
    "value",
    [f".{LONG}=1", f"=[{LONG}"],
    ids=("name", "open"),
)
def test_what_hydra_cannot_read_is_refused_in_few_words(value: str) -> None:
    with raises(ConfigError) as e:
        read_settings(compose([f"+rl_plugins.method_params.mc_grpo.mad_eps{value}"]))
    assert len(str(e.value)) < 600
