"""Heads in TRL: prompt and prefix tuning as options of `rl-plugins trl grpo`, next to TRL's LoRA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import trl
from transformers import PreTrainedTokenizerBase

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.tools.heads import positions_by_mask
from rl_plugins.trl.trainer import GRPOTrainer

LORA, PROMPT, PREFIX = "lora", "prompt_tuning", "prefix_tuning"


@dataclass
class AdapterModelConfig(trl.ModelConfig):
    """TRL's options of the model, and the kind of adapter."""

    adapter: Literal["lora", "prompt_tuning", "prefix_tuning"] = field(
        default="lora",
        metadata={"help": "Adapter of PEFT that `use_peft` trains: lora, prompt_tuning or prefix_tuning."},
    )
    num_virtual_tokens: int = field(
        default=20, metadata={"help": "Number of trained vectors before the prompt, of prompt and prefix tuning."}
    )
    adapter_text: str | None = field(
        default=None,
        metadata={
            "help": "Text that prompt and prefix tuning start from. Without it they start at random, which ruins the "
            "policy at first."
        },
    )


def check_adapter(model_args: Any, args: Any) -> None:
    """Refuses options of an adapter that would have no effect or cannot train.

    Raises:
        ConfigError: with what to change.
    """
    m, default = model_args, AdapterModelConfig()
    kind = getattr(m, "adapter", LORA)
    if kind not in (LORA, PROMPT, PREFIX):
        raise ConfigError(f"adapter is {shown(kind)}; it must be {LORA}, {PROMPT} or {PREFIX}.")
    if kind == LORA or not m.use_peft:
        names = (
            ("num_virtual_tokens", "adapter_text") if m.use_peft else ("adapter", "num_virtual_tokens", "adapter_text")
        )
        idle = [f"{n}={getattr(m, n)!r}" for n in names if getattr(m, n, getattr(default, n)) != getattr(default, n)]
        if idle:
            raise ConfigError(
                f"{', '.join(idle)} has no effect: use_peft is {m.use_peft} and adapter is {kind}. Set use_peft: true "
                f"and adapter: {PROMPT} or {PREFIX}, or remove it."
            )
        return
    if m.num_virtual_tokens < 1:
        raise ConfigError(f"num_virtual_tokens is {m.num_virtual_tokens}; it must be at least 1.")
    if args.use_vllm:
        raise ConfigError(
            f"adapter: {kind} is set with use_vllm: true. TRL gives vLLM weights that an adapter is merged into, and "
            f"virtual tokens cannot be merged. Set use_vllm: false, or adapter: {LORA}."
        )
    if kind == PREFIX and args.gradient_checkpointing:
        raise ConfigError(
            f"adapter: {PREFIX} is set with gradient_checkpointing: true, which drops the keys and values that a "
            f"prefix consists of. Set gradient_checkpointing: false, or adapter: {PROMPT}."
        )


def peft_config_of(model_args: Any) -> Any:
    """What TRL's `get_peft_config` returns, for every kind of adapter."""
    if not model_args.use_peft or model_args.adapter == LORA:
        return trl.get_peft_config(model_args)
    from peft import PrefixTuningConfig, PromptTuningConfig

    common = {"task_type": "CAUSAL_LM", "num_virtual_tokens": model_args.num_virtual_tokens}
    if model_args.adapter == PREFIX:
        return PrefixTuningConfig(**common)
    if model_args.adapter_text is None:
        return PromptTuningConfig(**common)
    return PromptTuningConfig(
        **common,
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text=model_args.adapter_text,
        tokenizer_name_or_path=model_args.model_name_or_path,
    )


def trainer_of(model_args: Any) -> type[GRPOTrainer]:
    """The trainer of a run with virtual tokens."""

    class HeadTrainer(GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            positions_by_mask(self.model)
            if model_args.adapter == PREFIX and model_args.adapter_text is not None:
                prefix_from_text(self.model, self.processing_class, model_args.adapter_text)

    return HeadTrainer


def prefix_from_text(model: Any, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Starts a prefix from the keys and values of a text, which is repeated where it is too short.

    Raises:
        ConfigError: PEFT cannot do that, or the text has no token.
    """
    try:
        from peft import initialize_kv_prefix_from_text
    except ImportError:
        raise ConfigError(
            "adapter_text with adapter: prefix_tuning needs PEFT 0.19 or newer. Install it (pip install -U peft), "
            "remove adapter_text, or take adapter: prompt_tuning."
        ) from None
    length = len(tokenizer(text)["input_ids"])
    if not length:
        raise ConfigError(f"adapter_text is {text!r}, which has no token. Give a text.")
    wanted = model.active_peft_config.num_virtual_tokens
    initialize_kv_prefix_from_text(model, tokenizer, text=text * -(-wanted // length), use_chat_template=False)
