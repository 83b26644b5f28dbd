"""Rollouts by a cheap copy of the policy (`rollout_precision`), with the log-probs they were sampled with.

The copy stands in for the policy's `generate`, so everything else is TRL's own: prompts, limits, sampling options, and
the log-probs of the loss, which the policy gives to the tokens that the copy sampled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import LogitsProcessorList

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.cheap import CheapCopy, CheapOptions, Precision
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.changes import changed
from rl_plugins.trl.config import GRPOConfig
from rl_plugins.trl.generation.sampling import SamplingOptions, SamplingWatch, cuts_of
from rl_plugins.trl.host import HostTrainer, SingleTurn, policy_of


class CheapRollouts:
    """A cheap copy of a trainer's policy, for its rollouts in training.

    Args:
        trainer: its model is loaded, and whole in this process.

    Raises:
        ConfigError: the model is sharded or quantized already, or has an adapter that cannot be merged.
    """

    def __init__(self, trainer: HostTrainer) -> None:
        self.trainer, precision = trainer, cast(Precision, trainer.args.rollout_precision)
        refused = ""
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            refused = "the model is shared between processes (DeepSpeed, FSDP), and a copy needs all of it"
        elif getattr(trainer.model, "is_quantized", False):
            refused = "the model was loaded quantized, so its rollouts are cheap already"
        if refused:
            raise ConfigError(f"rollout_precision={precision} copies the policy: {refused}. Remove the option.")
        self.copy = CheapCopy(trainer.model, CheapOptions(precision))
        self.copy.version = -1  # a checkpoint may be loaded before the first batch
        self._logprobs: list[list[float]] | None = None  # of the last call

    def generate(self) -> Any:
        """`generate` of the copy, which has the present weights."""
        seconds, copied = self.copy.seconds, self.copy
        copied.refresh(self.trainer.state.global_step)
        if copied.seconds > seconds:
            self.trainer._metrics["train"]["rl_plugins/cheap_refresh_seconds"].append(copied.seconds - seconds)
        return copied.module.generate

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """As long as this lasts, the policy's `generate` is that of the copy, and its log-probs are kept."""
        t = self.trainer
        model, host = policy_of(t), self.generate()

        def generate(*args: Any, **kwargs: Any) -> Any:
            limits = torch.full((len(kwargs["input_ids"]),), t.max_completion_length)
            watch = SamplingWatch(SamplingOptions(float(t.temperature), (), 0), limits, t.processing_class)
            watch.cuts = cuts_of(kwargs["generation_config"], model.generation_config)
            out = host(*args, **kwargs, logits_processor=LogitsProcessorList([watch]))
            watch.finish(out)
            self._logprobs = watch.logprobs
            return out

        with changed(model, generate=generate):
            yield

    def with_logprobs(self, host: SingleTurn) -> SingleTurn:
        """TRL's `_generate_single_turn`, with the log-probs of the tokens that it keeps."""

        def generate(*args: Any, **kwargs: Any) -> Any:
            self._logprobs = None
            ids, logprobs = host(*args, **kwargs)
            if self._logprobs is None:  # the policy made them
                return ids, logprobs
            return ids, [own[: len(tokens)] for own, tokens in zip(self._logprobs, ids, strict=True)]

        return generate


def rollouts_text(stack: MethodStack, args: GRPOConfig) -> str:
    """Who makes the rollouts, in which precision, and what corrects for it."""
    if args.use_vllm:
        return "by vLLM, in the precision it loads the model with"
    if args.rollout_precision == "policy":
        return "by the policy, in its own precision"
    by = [m.name for m in stack.methods if m.corrects_sampling]
    corrected = f"corrected by {', '.join(by)}" if by else "NOT corrected for: name a method that does (dart_tis)"
    what = "bfloat16" if args.rollout_precision == "bf16" else f"{args.rollout_precision} linear layers"
    return f"by a copy of the policy with {what}, made again after each update; {corrected}"
