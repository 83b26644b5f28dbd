"""Runs of verl: `python -m verl.trainer.main_ppo` with the user's overrides.

Every variant runs in the trainer of ours that follows the mode of verl, so that costs are counted alike. For the
baseline it hands everything on to verl, counts, and weighs rewards as the other variants do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.compare.plan import Variant

METRICS = "verl.jsonl"  # of verl's file logger, in the folder of the run
LOGGER_PATH = "VERL_FILE_LOGGER_PATH"


@dataclass(frozen=True)
class Verl:
    """Overrides of verl's config, and what they say.

    Args:
        overrides: as on the command line.
        mode: of verl's trainer, e.g. "sync".
        loggers: of the run, with verl's file logger.
        watched: whether the replay buffer may be ours, see :mod:`rl_plugins.lab.compare.verl_buffer`.
        evaluates: whether the run evaluates on held-out prompts.
        rewards: weights of the parts of the reward, the same in every variant, see `Settings.rewards`.
        method_params: method -> parameter -> value.
    """

    overrides: tuple[str, ...]
    mode: str
    loggers: tuple[str, ...]
    watched: bool
    evaluates: bool
    rewards: Mapping[str, float] = field(default_factory=dict)
    method_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    worker = "rl_plugins.lab.compare.verl_worker"
    config = ""

    @property
    def sets(self) -> str:
        names = [
            "data.seed",
            "actor_rollout_ref.rollout.seed",
            "trainer.v1.trainer_mode",
            "trainer.logger",
            "trainer.default_local_dir",
            "hydra.run.dir",
            f"ray_kwargs.ray_init.runtime_env.env_vars.{LOGGER_PATH}",
            *(["trainer.v1.sampler.custom_sampler"] if self.watched else []),
            "rl_plugins.methods",
            "rl_plugins.method_params",
            "rl_plugins.count_costs",
        ]
        return ", ".join(f"`{name}`" for name in names)

    @classmethod
    def of(cls, overrides: Sequence[str]) -> Verl:
        """Reads what the overrides say, without importing verl.

        Raises:
            ConfigError: hydra refuses them, or they name methods or a trainer that cannot be compared.
        """
        from omegaconf import OmegaConf

        from rl_plugins.verl.config import MODES, compose, read_settings

        config = compose(overrides)
        given = config.trainer.v1.trainer_mode
        mode = MODES.get(given, given)
        if not config.trainer.use_v1 or mode not in MODES.values():
            raise ConfigError(
                f"trainer.use_v1={config.trainer.use_v1} trainer.v1.trainer_mode={given} is given; methods run in "
                f"trainers that follow verl's {', '.join(MODES.values())}. Give one of these modes."
            )
        if OmegaConf.select(config, "rl_plugins.methods"):
            raise ConfigError(
                f"The overrides name rl_plugins.methods={list(config.rl_plugins.methods)}. Here methods are arguments "
                f"before the overrides, each a variant of its own: remove them from the overrides."
            )
        OmegaConf.update(config, "rl_plugins.count_costs", True, force_add=True)  # a node, as every variant has
        settings = read_settings(config)
        assert settings is not None
        sampler, loggers = config.trainer.v1.sampler, config.trainer.logger
        loggers = [loggers] if isinstance(loggers, str) else list(loggers)
        return cls(
            overrides=tuple(overrides),
            mode=mode,
            loggers=tuple(dict.fromkeys([*loggers, "file"])),
            watched=mode == "sync"
            and not sampler.custom_sampler.path
            and not sampler.sync_refill_failed_groups
            and not config.algorithm.filter_groups.enable,
            evaluates=config.trainer.test_freq > 0,
            rewards=settings.rewards,
            method_params=settings.method_params,
        )

    def arguments(
        self, variant: Variant, seed: int, folder: Path, params: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        from rl_plugins.verl.config import MODES

        mine = {
            "data.seed": seed,
            "actor_rollout_ref.rollout.seed": seed,
            "trainer.v1.trainer_mode": next(name for name, mode in MODES.items() if mode == self.mode),
            "rl_plugins.methods": f"[{','.join(variant.methods)}]",
            "rl_plugins.count_costs": "true",
            "trainer.logger": f"[{','.join(self.loggers)}]",
            "trainer.default_local_dir": quoted(folder.absolute() / "checkpoints"),
            "hydra.run.dir": quoted(folder.absolute() / "hydra"),
            f"ray_kwargs.ray_init.runtime_env.env_vars.{LOGGER_PATH}": quoted(folder.absolute() / METRICS),
        }
        if self.watched:
            mine["trainer.v1.sampler.custom_sampler.path"] = "pkg://rl_plugins.lab.compare.verl_buffer"
            mine["trainer.v1.sampler.custom_sampler.name"] = "WatchedReplayBuffer"
        ours = "rl_plugins.method_params" if variant.methods else "rl_plugins"  # without methods: verl, counted
        given = [line for line in self.overrides if not f"{_key(line)}.".startswith(f"{ours}.")]
        if variant.methods:  # JSON in one string, because hydra has no notation for every value
            mine["rl_plugins.method_params"] = quoted(json.dumps(params).replace("'", "\\u0027"))
        else:
            mine |= {f"rl_plugins.rewards.{name}": weight for name, weight in self.rewards.items()}
        added = [f"{'' if name.startswith('hydra.') else '++'}{name}={value}" for name, value in mine.items()]
        return [*(line for line in given if _key(line) not in mine), *added]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def quoted(value: Any) -> str:
    """A value as hydra reads it back, whatever characters a string or path has."""
    if isinstance(value, Path):
        value = str(value.resolve())
    return "'" + value.replace("'", "\\'") + "'" if isinstance(value, str) else str(value)
