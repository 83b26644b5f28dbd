"""What happens before Ray starts: the methods are built, checked against the config, and printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.core.errors import ConfigError, did_you_mean, shown, told
from rl_plugins.runtime.preflight import render_table
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.verl import METHODS_VARIABLE, TEACHER_VARIABLE, capabilities
from rl_plugins.verl.compat import check_verl
from rl_plugins.verl.config import MODES, Settings, read_settings
from rl_plugins.verl.host_config import refuse
from rl_plugins.verl.saved import check_tracker

ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"  # what verl hands to `ray.init`


@dataclass(frozen=True)
class Prepared:
    """Methods that passed all checks of a run.

    Args:
        settings: as the config names them.
        stack: the methods; empty for `rl_plugins.methods=[]`.
    """

    settings: Settings
    stack: MethodStack


def prepare(config: Any, trainer: type | None = None) -> Prepared | None:
    """Checks the methods a config names and sets the host options they ask for; nothing without `rl_plugins`.

    Args:
        config: the whole config; options are set in it.
        trainer: the trainer class that is being built, None where only the config is known.

    Raises:
        ConfigError: methods that would be ignored, or that cannot act as this run is configured.
        StateError: verl could not tell from which checkpoint it is to resume.
    """
    problems: list[str] = []
    settings, stack = read_settings(config, problems), build_stack([])
    with told(problems):
        check_mode(settings, config, trainer)
    with told(problems):
        stack = build_stack([]) if settings is None else settings.stack(refuse=False)
    if stack and settings is not None:
        options = dict[str, Any]()
        with told(problems):
            options = apply(stack, settings, config)
    if problems:
        raise ConfigError("\n".join(problems))
    if settings is None:
        return None
    if stack:
        check_tracker(config)
        if trainer is None:
            print(describe(stack, options, config), flush=True)
    return Prepared(settings, stack)


def apply(stack: MethodStack, settings: Settings, config: Any) -> dict[str, Any]:
    """Checks a stack against a config, sets what it asks for, and tells worker processes that there are methods."""
    from omegaconf import OmegaConf, open_dict

    check_verl()
    problems: list[str] = []
    options: dict[str, Any] = {}
    with told(problems):
        options = capabilities.check(stack, settings, config)
    with open_dict(config):
        for name, value in options.items():
            OmegaConf.update(config, name, value, force_add=True)
    with told(problems):  # of the config as methods want it
        refuse(capabilities.Reader(config))
    if problems:
        raise ConfigError("\n".join(problems))
    with open_dict(config):
        teacher = {} if stack.teacher is None else {f"{ENVIRONMENT}.{TEACHER_VARIABLE}": stack.teacher}
        named = {f"{ENVIRONMENT}.{METHODS_VARIABLE}": ",".join(m.name for m in stack.methods), **teacher}
        for name, value in named.items():
            OmegaConf.update(config, name, value, force_add=True)
    return options


def describe(stack: MethodStack, options: dict[str, Any], config: Any) -> str:
    """The table of methods in effect, with host options they set or make meaningless."""
    idle = capabilities.without_effect(stack, config)
    text = render_table(stack, options)
    return text + (f"\n  host options without effect: {', '.join(idle)}" if idle else "")


def serves_methods(trainer: Any) -> bool:
    """Whether a trainer class is one of ours, or derived from one."""
    return hasattr(trainer, "methods_mode")


def _trainers() -> Mapping[str, type]:
    """What verl and plugins registered."""
    from verl.trainer.ppo.v1 import trainer_base

    return trainer_base.TRAINER_REGISTRY  # type: ignore[no-any-return]


def unknown_mode(config: Any) -> str:
    """What to say of a trainer mode that nobody registered; empty for all others."""
    from omegaconf import OmegaConf

    mode, known = OmegaConf.select(config, "trainer.v1.trainer_mode"), {*MODES, *MODES.values()}
    if mode in known or mode in (known := known | set(_trainers())):
        return ""
    return (
        f"trainer.v1.trainer_mode={shown(mode)} is no trainer mode. It must be one of {', '.join(MODES)} with methods, "
        f"or {', '.join(sorted(known - set(MODES)))} without.{did_you_mean(str(mode), known)}"
    )


def check_mode(settings: Settings | None, config: Any, trainer: type | None) -> None:
    """Raises ConfigError for methods or weights of rewards that the trainer of this run would ignore, and for our
    trainer without a list of methods."""
    from omegaconf import OmegaConf

    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    v1 = OmegaConf.select(config, "trainer.use_v1")
    ours = mode in MODES and v1 is not False
    if trainer is not None:
        ours = serves_methods(trainer)
    elif settings is not None and not ours and v1 is not False and mode not in MODES.values():
        ours = serves_methods(_trainers().get(mode))  # a trainer derived from ours
    if settings is None:
        if ours:
            base = MODES.get(mode) or getattr(trainer, "methods_mode", mode)
            raise ConfigError(
                f"trainer.v1.trainer_mode={mode} is given and no methods. Add +rl_plugins.methods=[...] "
                f"(`rl-plugins list` shows them; [] is the host alone), or use trainer.v1.trainer_mode={base}."
            )
        return
    weights = OmegaConf.select(config, "rl_plugins.rewards")
    if (settings.methods or weights or settings.trace) and not ours:
        if trainer is None and v1 is not False and (unknown := unknown_mode(config)):
            raise ConfigError(unknown)
        suggestion = next((name for name, base in MODES.items() if base == mode), "rl_plugins_sync")
        given = f"rl_plugins.methods=[{','.join(settings.methods)}]" if settings.methods else "rl_plugins.rewards"
        given = given if settings.methods or weights else "rl_plugins.trace"
        named = f"trainer.v1.trainer_mode={mode}" if v1 is not False else "trainer.use_v1=False"
        raise ConfigError(
            f"{given} is given, and {named} would ignore it. Set "
            f"trainer.v1.trainer_mode={suggestion}{'' if v1 is not False else ' and trainer.use_v1=True'}."
        )
