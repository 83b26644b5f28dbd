"""The node `rl_plugins` of a verl config: which methods, their parameters, and the trainer modes that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_plugins.core.errors import ConfigError, did_you_mean, pip_command, shortened, shown, told
from rl_plugins.runtime import registry
from rl_plugins.runtime.chat import TokenizerChat
from rl_plugins.runtime.reward_errors import STOP, check_on_reward_error
from rl_plugins.runtime.stack import (
    MAX_UNREWARDED_BATCHES,
    MethodStack,
    build_stack,
    check_max_unrewarded_batches,
)
from rl_plugins.runtime.trace import trace_of

# Registered name -> the mode of verl it follows.
MODES = {
    "rl_plugins_sync": "sync",
    "rl_plugins_colocate_async": "colocate_async",
    "rl_plugins_separate_async": "separate_async",
}
KEYS = (
    "methods",
    "method_params",
    "rewards",
    "max_unrewarded_batches",
    "on_reward_error",
    "count_costs",
    "trace",
    "accept_changed_checkpoint",
)


@dataclass(frozen=True)
class Settings:
    """What stands under `rl_plugins`.

    Args:
        methods: as named by the user.
        method_params: method -> parameter -> value.
        rewards: key of the reward function's answer -> weight: the reward functions that methods see. Their weighted
            sum is then the reward, in place of "score", with methods and without.
        max_unrewarded_batches: generation batches in a row in which no completion may have a reward (a service is
            down). They are skipped: no optimizer step, no hook after `rewards`. One more ends the run.
        on_reward_error: what becomes of a row on which the reward function raises, see
            `rl_plugins.runtime.reward_errors`.
        seed: of the run (`data.seed`, 0 if it is not set).
        count_costs: without methods: log what the run costs as runs with methods do, see
            `rl_plugins.runtime.costs.Costs`. Nothing else changes.
        accept_changed_checkpoint: resume from a checkpoint whose files were changed, lost or added after it was saved
            with methods, or whose run had another seed. The run says which. Without it the resume is refused.
        trace: true, or options (`rl_plugins.runtime.trace.TraceParams`): write what is generated and what every
            method does with it to the folder `trace` of `output_dir`, with methods and without.
        output_dir: of the run (`trainer.default_local_dir`).
    """

    methods: tuple[str, ...]
    method_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    max_unrewarded_batches: int = MAX_UNREWARDED_BATCHES
    on_reward_error: str = STOP
    count_costs: bool = False
    accept_changed_checkpoint: bool = False
    trace: Any = None
    output_dir: str = ""

    def stack(self, refuse: bool = True) -> MethodStack:
        """The methods, built again.

        Args:
            refuse: see `build_stack`.

        Raises:
            ConfigError: see `build_stack`.
        """
        params = {k: dict(v) for k, v in self.method_params.items()}
        watchers = trace_of(self.trace, "rl_plugins.trace", self.output_dir)
        return build_stack(list(self.methods), params, self.seed, self.max_unrewarded_batches, watchers, refuse)


def read_settings(config: Any, problems: list[str] | None = None) -> Settings | None:
    """The node `rl_plugins` of a whole verl config; None if there is none.

    Args:
        problems: gets what is wrong, in place of an error; the defaults then stand in for it.

    Raises:
        ConfigError: an unknown key, or a value of the wrong kind.
    """
    from omegaconf import OmegaConf

    node = OmegaConf.select(config, "rl_plugins")
    if node is None:
        return None
    plain = plain_values(node)
    if not isinstance(plain, dict):
        raise ConfigError(f"rl_plugins={shown(plain)} is given; it has the keys {', '.join(KEYS)}.")
    wrong: list[str] = []
    for key in plain:
        if key not in KEYS:
            named = shortened(key if isinstance(key, str) else shown(key), 80)
            wrong.append(
                f"rl_plugins.{named} does not exist; allowed: {', '.join(KEYS)}.{did_you_mean(str(key), KEYS)}"
            )
    checks: dict[str, Callable[[Any], Any]] = {
        "methods": lambda given: tuple(registry.parse_methods(given or [])),
        "method_params": registry.parse_method_params,
        "rewards": lambda given: _rewards(given, config),
        "max_unrewarded_batches": lambda given: check_max_unrewarded_batches(
            MAX_UNREWARDED_BATCHES if given is None else given, "rl_plugins.max_unrewarded_batches"
        ),
        "on_reward_error": lambda given: check_on_reward_error(
            STOP if given is None else given, "rl_plugins.on_reward_error"
        ),
        "count_costs": lambda given: _switch("count_costs", given),
        "accept_changed_checkpoint": lambda given: _switch("accept_changed_checkpoint", given),
    }
    values: dict[str, Any] = {"methods": ()}
    for name, check in checks.items():
        with told(wrong):
            values[name] = check(plain.get(name))
    if wrong and problems is None:
        raise ConfigError("\n".join(wrong))
    if problems is not None:
        problems += wrong
    return Settings(
        **values,
        seed=int(OmegaConf.select(config, "data.seed") or 0),
        trace=plain.get("trace"),
        output_dir=str(OmegaConf.select(config, "trainer.default_local_dir") or ""),
    )


def _switch(name: str, given: Any) -> bool:
    if given is not None and not isinstance(given, bool):
        raise ConfigError(f"rl_plugins.{name}={shown(given)} is given; it is true or false.")
    return bool(given)


def plain_values(node: Any) -> Any:
    """A node of OmegaConf as plain lists and mappings, interpolations followed.

    Raises:
        ConfigError: an interpolation that cannot be followed.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except (OmegaConfBaseException, RecursionError) as e:
        raise ConfigError(f"The node `rl_plugins` of the config cannot be read: {shortened(e, 300)}.") from None


def _rewards(given: Any, config: Any) -> dict[str, float]:
    """Weights of reward components: ours, else those of verl's own GDPO estimator."""
    from omegaconf import OmegaConf

    if given is None:
        names: Sequence[str] = OmegaConf.select(config, "algorithm.gdpo_reward_keys") or ()
        weights = OmegaConf.select(config, "algorithm.gdpo_reward_weights") or [1.0] * len(names)
        given = dict(zip(names, weights, strict=False))
    try:
        return {str(name): float(weight) for name, weight in dict(given).items()}
    except (TypeError, ValueError):
        raise ConfigError(
            f"rl_plugins.rewards={shown(given)} is given; it maps keys of the reward function's answer to weights: "
            f"+rl_plugins.rewards.accuracy=1 +rl_plugins.rewards.format=0.5."
        ) from None


def end_tokens(model: Any) -> tuple[int, ...]:
    """Tokens that end a completion of verl's model config: those of the generation config and the tokenizer's."""
    ends = [getattr(model.generation_config, "eos_token_id", None), model.tokenizer.eos_token_id]
    flat = [i for end in ends for i in (end if isinstance(end, list) else [end]) if i is not None]
    return tuple(dict.fromkeys(flat))


def chat_of(tokenizer: Any, eos: Sequence[int] | None, options: Any = None) -> TokenizerChat:
    """The tokenizer, and its template as `data.apply_chat_template_kwargs` asks for it."""
    given = {k: v for k, v in dict(options or {}).items() if k not in ("tokenize", "return_dict", "return_tensors")}
    return TokenizerChat(tokenizer, eos, **given)


def compose(overrides: Sequence[str], name: str = "ppo_trainer", path: str = "config") -> Any:
    """The config that `python -m verl.trainer.main_ppo OVERRIDES` would get, without starting anything.

    Args:
        name, path: hydra's --config-name, and its --config-path, which is relative to the folder of main_ppo.

    Raises:
        ConfigError: an override that hydra refuses.
    """
    from pathlib import Path

    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder = Path(verl_folder()) / "trainer" / path
    current = GlobalHydra.instance()
    running, current.hydra = current.hydra, None  # verl's own main may be what calls this
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            return hydra_compose(name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError, OSError, RecursionError) as e:
        # an integer of thousands of digits, a name that fits into no path, 300 levels: hydra raises what it comes upon
        raise ConfigError(f"hydra refuses the command line: {shortened(e, 500)}") from e
    finally:
        current.hydra = running


def verl_folder() -> str:
    """Where verl is installed; verl is not imported.

    Raises:
        ConfigError: it is not installed.
    """
    import importlib.util

    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"verl is not installed. Install it: {pip_command('verl')}")
    return spec.submodule_search_locations[0]
