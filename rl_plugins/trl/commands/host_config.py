"""What TRL and transformers would refuse while they build a run, or at its first step, found out from its config.

Each rule looks at one thing and yields what is wrong with it. Those of `MISSING` depend on the machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers.integrations.integration_utils import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.scripts import grpo as script_of_trl

from rl_plugins.core.errors import did_you_mean, shown
from rl_plugins.trl.config import GRPOConfig


@dataclass(frozen=True)
class HostConfig:
    """What a config says.

    Args:
        args, script, model, data: of training, of TRL's script, of the model and of the dataset mixture.
        processes: that train.
        deepspeed: accelerate starts them for DeepSpeed.
    """

    args: GRPOConfig
    script: Any
    model: Any
    data: Any
    processes: int = 1
    deepspeed: bool = False

    @property
    def rewards(self) -> list[str]:
        """A model first, then functions, as TRL's script orders them."""
        model = self.script.reward_model_name_or_path
        return [*([model] if model else []), *(self.script.reward_funcs or ())]

    @property
    def streams(self) -> bool:
        return bool(self.data.streaming if self.data.datasets else self.script.dataset_streaming)

    @property
    def attention(self) -> str:
        """Of the model, without "paged|"; empty: the model's default."""
        given = (self.args.model_init_kwargs or {}).get("attn_implementation", self.model.attn_implementation)
        return str(given or "").removeprefix("paged|")


Rule = Callable[[HostConfig], Iterator[str]]


def problems(config: HostConfig, of_script: bool = False) -> Iterator[str]:
    """What would end the run on every machine.

    Args:
        of_script: a script gives the model and the rewards.
    """
    for rule in REFUSED:
        if not (of_script and rule in (_no_model, _rewards)):
            yield from rule(config)


def missing(config: HostConfig) -> Iterator[str]:
    """What would end the run on this machine."""
    for rule in MISSING:
        yield from rule(config)


# ---- what this machine has not

_MATH = ("accuracy_reward", "reasoning_accuracy_reward")

PACKAGES: tuple[tuple[str, Callable[[HostConfig], Any], str, str], ...] = (
    ("use_vllm=True", lambda c: c.args.use_vllm, "vllm", "trl[vllm]"),
    ("the config of accelerate", lambda c: c.deepspeed, "deepspeed", "deepspeed"),
    ("the option deepspeed", lambda c: c.args.deepspeed, "deepspeed", "deepspeed"),
    ("use_liger_kernel=True", lambda c: c.args.use_liger_kernel, "liger_kernel", "liger-kernel"),
    ("use_peft=True", lambda c: c.model.use_peft, "peft", "peft"),
    ("a quantized model", lambda c: c.model.load_in_4bit or c.model.load_in_8bit, "bitsandbytes", "bitsandbytes"),
    ("attn_implementation", lambda c: "/" in c.attention, "kernels", "kernels"),
    ("TRL's reward of a right answer", lambda c: set(_MATH) & set(c.rewards), "math_verify", "trl[math_verify]"),
)
"""Option, whether it is asked for, the module it imports, what to install."""


def _packages(config: HostConfig) -> Iterator[str]:
    for option, asked, module, package in PACKAGES:
        if asked(config) and importlib.util.find_spec(module) is None:
            yield (
                f"{option} needs the package {module}, which is not installed here. Install it (pip install "
                f"'{package}'), or remove the option."
            )


def _optimizer(config: HostConfig) -> Iterator[str]:
    """transformers is asked for the class, without a model: what needs one is not looked at."""
    if config.args.deepspeed or config.deepspeed:  # its own config may name another
        return
    try:
        transformers.Trainer.get_optimizer_cls_and_kwargs(config.args)
    except (ImportError, ValueError) as e:
        if isinstance(e, ImportError) or isinstance(e.__context__, ImportError):
            yield f"optim={config.args.optim.value} cannot be used here: {e} Or take another optimizer."


def _attention(config: HostConfig) -> Iterator[str]:
    name = config.attention
    if not name or "/" in name:
        return
    flash = {f"flash_attention_{n}": rules for n, rules in FLASH_ATTENTION_COMPATIBILITY_MATRIX.items()}
    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name not in {*known, *flash}:
        yield (
            f"attn_implementation={shown(name)} is given; this transformers knows {', '.join(sorted({*known, *flash}))}"
            f" and kernels of the Hub (OWNER/NAME).{did_you_mean(name, known)}"
        )
        return
    available = name not in flash or flash[name]["general_availability_check"]()
    if not available and importlib.util.find_spec("kernels") is None:  # transformers then takes a kernel of the Hub
        yield (
            f"attn_implementation={name} needs flash-attn and a device it runs on, or the package kernels, and this "
            f"machine has neither. Install one, or set attn_implementation=sdpa."
        )


def _reports(config: HostConfig) -> Iterator[str]:
    asked, there = config.args.report_to or [], get_available_reporting_integrations()
    for name in [asked] if isinstance(asked, str) else asked:
        try:
            get_reporting_integration_callbacks([name] if name != "none" else name)
        except ValueError as e:
            yield f"report_to={shown(name)} is given; {e}"
            continue
        if name not in {*there, "none", "all", "flyte"}:  # transformers does not say whether flyte is there
            yield (
                f"report_to={name} needs its package, which is not installed here or is turned off. Install it, or set "
                f"report_to=none."
            )


def _reward_functions(config: HostConfig) -> Iterator[str]:
    of_trl = inspect.getsource(script_of_trl.main)
    sys.path.insert(0, os.getcwd())  # where TRL looks
    try:
        for name in config.script.reward_funcs or ():
            module, _, function = name.rpartition(".")
            if not module:
                if f'"{name}":' not in of_trl:
                    yield (
                        f"TRL has no reward function `{name}`. Write where yours is: MODULE.{name}. `rl-plugins trl "
                        f"grpo --help` lists those of TRL."
                    )
                continue
            try:
                getattr(importlib.import_module(module), function)
            except (ImportError, AttributeError) as e:
                yield f"the reward function `{name}` cannot be loaded: {type(e).__name__}: {e}."
    finally:
        sys.path.pop(0)


def _paths(config: HostConfig) -> Iterator[str]:
    """Paths that are none. A name that begins otherwise may be one of the Hub."""
    for option, given in (
        ("model_name_or_path", config.model.model_name_or_path),
        ("reward_model_name_or_path", config.script.reward_model_name_or_path),
    ):
        if given and given.startswith(("/", "./", "../", "~")) and not Path(given).is_dir():
            yield f"{option}={shown(given)} is no folder on this machine. Give one, or a name of the Hugging Face Hub."
    checkpoint = config.args.resume_from_checkpoint
    if isinstance(checkpoint, str) and checkpoint.lower() not in ("true", "false") and not Path(checkpoint).is_dir():
        yield f"resume_from_checkpoint={shown(checkpoint)} is no folder on this machine. Give one, or leave it out."


MISSING: tuple[Rule, ...] = (_packages, _optimizer, _attention, _reports, _reward_functions, _paths)


# ---- what no machine would run


def _no_model(config: HostConfig) -> Iterator[str]:
    if not config.model.model_name_or_path:
        yield "the run has no model: set `model_name_or_path`."


def _rewards(config: HostConfig) -> Iterator[str]:
    weights, names = config.args.reward_weights, config.rewards
    if not names:
        yield "the run has no reward: name functions in `reward_funcs` or a model."
    elif weights is not None and len(weights) != len(names):
        yield (
            f"reward_weights={shown(weights)} has {len(weights)} numbers, and the run has {len(names)} rewards: "
            f"{shown(names)}. Give one weight for each, or leave reward_weights out (all 1)."
        )


ALLOWED: dict[str, tuple[Any, ...]] = {
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
}
"""Options whose value TRL first looks at in a step."""


def _values(config: HostConfig) -> Iterator[str]:
    for option, allowed in ALLOWED.items():
        value = getattr(config.args, option)
        if value not in allowed:
            hint = did_you_mean(str(value), allowed)
            yield f"{option}={shown(value)} is given; TRL takes {', '.join(allowed)}, and ends at its first step.{hint}"


def _evaluation(config: HostConfig) -> Iterator[str]:
    a = config.args
    if a.eval_on_start and a.eval_strategy == "no":
        yield "eval_on_start=True evaluates, and TRL's script loads no data for that with eval_strategy=no. Set one."
    if a.save_strategy == "best" and a.metric_for_best_model is None:
        yield "save_strategy=best compares a metric, and none is named. Set metric_for_best_model=reward, for example."


def _reference(config: HostConfig) -> Iterator[str]:
    if config.args.sync_ref_model and config.args.beta == 0.0:
        yield "sync_ref_model=True, and with beta=0 there is no reference model. Set beta > 0, or sync_ref_model=False."
    if config.args.sync_ref_model and config.model.use_peft:
        yield "sync_ref_model=True is not served by TRL with use_peft. Remove one of the two."


def _vespo(config: HostConfig) -> Iterator[str]:
    a, allowed = config.args, ("token_truncate", "token_mask")
    corrects = a.loss_type == "vespo" and a.use_vllm and a.vllm_importance_sampling_correction
    if corrects and a.vllm_importance_sampling_mode not in allowed:
        yield (
            f"loss_type=vespo is given with vllm_importance_sampling_mode={a.vllm_importance_sampling_mode}; it takes "
            f"{' or '.join(allowed)}."
        )


def _streams(config: HostConfig) -> Iterator[str]:
    a = config.args
    if config.streams and a.max_steps <= 0:
        yield "the dataset is a stream, which has no length. Set max_steps, or dataset_streaming=False."
    if config.streams and a.accelerator_config.dispatch_batches:
        yield "TRL takes no stream with dispatch_batches=True in accelerator_config. Set it to False."


def _liger(config: HostConfig) -> Iterator[str]:
    if config.args.use_liger_kernel and (config.args.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
        yield "liger_kernel_config has fused_linear_cross_entropy=True, which TRL refuses. Remove it."


def _quantized_twice(config: HostConfig) -> Iterator[str]:
    asked = config.model.load_in_4bit or config.model.load_in_8bit
    if asked and "quantization_config" in (config.args.model_init_kwargs or {}):
        yield "model_init_kwargs has a quantization_config, and load_in_4bit or load_in_8bit is set. Keep one of them."


def _fsdp(config: HostConfig) -> Iterator[str]:
    if config.args.fsdp and (config.args.deepspeed or config.deepspeed):
        yield "fsdp and deepspeed are both given. Remove one of the two."
    elif config.args.fsdp and config.processes == 1:
        yield "fsdp shards over processes, and the run has one. Start more (--num_processes), or remove fsdp."


REFUSED: tuple[Rule, ...] = (
    _no_model,
    _rewards,
    _values,
    _evaluation,
    _reference,
    _vespo,
    _streams,
    _liger,
    _quantized_twice,
    _fsdp,
)
