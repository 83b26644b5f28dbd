"""The configs and commands of the runs that train one head each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.cards.usage import hydra
from rl_plugins.commands.shared.overrides import with_overrides, words_of
from rl_plugins.commands.shared.yaml_edit import with_values
from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.config_text import read_yaml
from rl_plugins.runtime.registry import parse_method_params, parse_methods
from rl_plugins.runtime.stack import build_stack

METHOD = "difficulty_slices"


@dataclass(frozen=True)
class Heads:
    """What the runs get: the options of `heads write`."""

    count: int
    column: str = ""
    adapter: str = "lora"
    virtual_tokens: int = 20
    text: str | None = None

    def params(self, head: int) -> dict[str, Any]:
        """Parameters of the method."""
        return {"heads": self.count, "head": head, **({"column": self.column} if self.column else {})}


def trl_runs(words: Sequence[str], heads: Heads) -> list[str]:
    """A config per head, from the config of a run of TRL.

    Raises:
        ConfigError: the config cannot be read, or another sampler chooses its prompts.
    """
    if len(words) != 1:
        raise ConfigError(
            "A run of TRL is given as its config file alone: rl-plugins heads write run.yaml --heads 8. Overrides are "
            "for --host verl."
        )
    config = Path(words[0])
    given = read_yaml(config, f"The config {config}")
    if not isinstance(given, dict):
        raise ConfigError(f"The config {config} holds no `key: value` lines. Give a YAML file with options of TRL.")
    text = config.read_text(encoding="utf-8")
    adapter: dict[str, Any] = {"use_peft": True, "adapter": heads.adapter}
    if heads.adapter != "lora":
        adapter["num_virtual_tokens"] = heads.virtual_tokens
        adapter |= {} if heads.text is None else {"adapter_text": heads.text}
    if heads.adapter == "prefix_tuning":
        adapter["gradient_checkpointing"] = False
    texts = []
    for head in range(heads.count):
        methods, params = _methods(given.get("methods"), given.get("method_params"), heads, head)
        values = {"output_dir": f"{given.get('output_dir') or 'out'}/head_{head}", "methods": methods, **adapter}
        if given.get("run_name"):
            values["run_name"] = f"{given['run_name']}-head_{head}"
        if isinstance(given.get("method_params"), dict):
            values |= {f"method_params.{METHOD}.{name}": value for name, value in params[METHOD].items()}
        else:
            values["method_params"] = params
        texts.append(with_values(text, values))
    return texts


def verl_runs(words: Sequence[str], heads: Heads) -> list[str]:
    """The overrides of a run per head, from a file or overrides of verl.

    Raises:
        ConfigError: the run cannot be read, another sampler chooses its prompts, or verl has no such adapter.
    """
    if heads.adapter != "lora":
        raise ConfigError(
            f"--adapter {heads.adapter} is given with --host verl. verl trains LoRA adapters only, and its engines "
            f"serve no virtual tokens. Give --adapter lora, or train the heads in TRL."
        )
    if not words:
        raise ConfigError(
            "Give a run of verl as a file or as overrides: rl-plugins heads write command.txt --host verl --heads 8, "
            "or rl-plugins heads write --host verl --heads 8 -- data.train_batch_size=64 OVERRIDES"
        )
    from rl_plugins.verl.config import MODES, compose, plain_values, read_settings
    from rl_plugins.verl.doctor import read_command

    one_file = len(words) == 1 and "=" not in words[0]
    overrides = read_command(words_of(Path(words[0])) if one_file else words)
    config = compose(overrides)
    settings = read_settings(config)
    given = ([], {}) if settings is None else (list(settings.methods), dict(settings.method_params))
    model, trainer = config.actor_rollout_ref.model, config.trainer
    common: dict[str, Any] = {} if model.lora_rank else {"actor_rollout_ref.model.lora_rank": 32}
    mode = trainer.v1.trainer_mode
    if mode not in MODES:
        common["trainer.v1.trainer_mode"] = next((ours for ours, theirs in MODES.items() if theirs == mode), mode)
    texts = []
    for head in range(heads.count):
        methods, params = _methods(*given, heads, head)
        values = {
            **common,
            "trainer.experiment_name": hydra(f"{plain_values(trainer.experiment_name)}_head_{head}"),
            "trainer.default_local_dir": hydra(f"{plain_values(trainer.default_local_dir)}/head_{head}"),
            "+rl_plugins.methods": f"[{','.join(methods)}]",
            **{f"+rl_plugins.method_params.{METHOD}.{name}": hydra(v) for name, v in params[METHOD].items()},
        }
        new = with_overrides(overrides, values)
        read = read_settings(compose(new))
        assert read is not None
        read.stack()
        texts.append("".join(f"{shlex.quote(word)}\n" for word in new))
    return texts


def _methods(methods: Any, params: Any, heads: Heads, head: int) -> tuple[list[str], dict[str, Any]]:
    """Names and parameters with those of a head.

    Raises:
        ConfigError: as of `build_stack`.
    """
    names = [name for name in parse_methods(methods) if name not in (METHOD, "econprover")]
    given = {name: dict(values) for name, values in parse_method_params(params).items()}
    given[METHOD] = {**given.get(METHOD, {}), **heads.params(head)}
    build_stack([METHOD, *names], given)
    return [METHOD, *names], given
