"""A method with the name of a built-in one."""

from __future__ import annotations

from rl_plugins_dummy.good import DummyScale


class McGrpo(DummyScale):
    """Takes the name of a method of rl-plugins. Source: none, this is for tests."""

    name = "mc_grpo"
