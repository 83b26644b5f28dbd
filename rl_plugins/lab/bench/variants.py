"""The variants of a task: baselines as the host has them, and methods with their parameters.

grpo                        the host's GRPO
dr_grpo                     without the deviation and with a constant denominator
rloo                        the host's RLOO, without its KL term, as no variant has one unless it says so
mc_grpo                     a method
vade+mc_grpo                two of them
grpo@learning_rate=1e-3     options of the host, in this variant only; several are joined with commas
drpo@drpo.reward=right      a parameter of a method, in this variant only
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench.tasks import BenchTask
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

BASELINES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "rloo": {},
}
OF_GRPO = ("loss_type",)  # options of the base config that RLOO has not


@dataclass(frozen=True)
class BenchVariant:
    """One side of a difference.

    Args:
        label: as it is written, e.g. "vade+mc_grpo".
        methods: names in order; empty for a baseline.
        options: of the host.
        params: of the methods.
    """

    label: str
    methods: tuple[str, ...]
    options: Mapping[str, Any]
    params: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, label: str) -> BenchVariant:
        """A variant by its label.

        Raises:
            ConfigError: an unknown method, an option that is no `name=value`, or a parameter of another method.
        """
        names, _, given = label.partition("@")
        options: dict[str, Any] = dict(BASELINES.get(names, {}))
        told: dict[str, dict[str, Any]] = {}
        for word in filter(None, given.split(",")):
            key, equals, value = word.partition("=")
            if not equals:
                raise ConfigError(f"{word!r} in the variant {label!r} is no option. Write name=value behind the @.")
            read = float(value) if "e-" in value else yaml.safe_load(value)
            method, dot, name = key.partition(".")
            if dot:
                told.setdefault(method, {})[name] = read
            else:
                options[key] = read
        methods = () if names in BASELINES else tuple(names.split("+"))
        parts = registry.select(methods).classes
        if other := sorted(set(told) - set(parts)):
            raise ConfigError(f"{other[0]!r} has parameters in the variant {label!r}, but is no method of it.")
        params = {
            method: values
            for method in parts
            if (values := {**card_file(method).bench.get("params", {}), **told.get(method, {})})
        }
        registry.select(methods, params)
        return cls(label, methods, options, params)

    @property
    def parts(self) -> list[str]:
        """The methods that run, those of bundles, too."""
        return list(registry.select(self.methods).classes)

    @property
    def is_rloo(self) -> bool:
        return self.label.partition("@")[0] == "rloo"

    @property
    def script(self) -> str:
        """Module whose `main` trains."""
        return "rl_plugins.trl.commands.rloo" if self.is_rloo else "rl_plugins.trl.commands.script"

    def check(self, task: BenchTask) -> None:
        """
        Raises:
            ConfigError: RLOO where agents play.
        """
        if self.is_rloo and task.environment:
            raise ConfigError(f"TRL's RLOO plays no environments, so {self.label} does not run in {task.name}.")

    def config(self, task: BenchTask, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the task with this variant in it."""
        methods, params = self.methods, {**self.params}
        if self.is_rloo:
            return {k: v for k, v in {**config, **self.options}.items() if k not in OF_GRPO}
        if task.environment:
            from rl_plugins.lab.compare.plan import Variant
            from rl_plugins.lab.demo import agents

            (played,) = agents.with_loop([Variant(self.label, methods)])
            methods = played.methods
            playing = agents.params(methods, task.environment)
            params = {name: {**playing.get(name, {}), **params.get(name, {})} for name in {**params, **playing}}
        values = {**config, **self.options, "count_costs": True, "methods": list(methods)}
        return {**values, "method_params": params} if params else values
