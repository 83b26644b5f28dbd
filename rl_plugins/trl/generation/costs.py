"""What a run costs, counted where TRL calls its engine: `generate` of the model or of vLLM, on every process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_plugins.runtime.costs import Costs, Meter, total
from rl_plugins.runtime.ranks import to_driver
from rl_plugins.trl.changes import changed
from rl_plugins.trl.host import Trainer, policy_of


@contextlib.contextmanager
def engine_counted(trainer: Trainer) -> Iterator[None]:
    """Whatever calls TRL's engine meanwhile is counted: TRL itself, its tools, a `rollout_func`. One that calls an
    engine of its own is counted by what it answers: the prompts it read, the tokens it made."""
    meter = trainer.meter
    if trainer.use_vllm:
        thing, names = trainer.vllm_generation, {"generate": _vllm}
    else:
        thing = policy_of(trainer)
        # a masked diffusion model is decoded by its trainer
        names = {"generate": _transformers} if hasattr(thing, "generate") else {}
        if trainer.args.use_transformers_continuous_batching:
            names["generate_batch"] = _continuous
    wrapped = {n: wrap(getattr(thing, n), meter, trainer.eos_token_ids) for n, wrap in names.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(changed(thing, **wrapped))
        if trainer.rollout_func is not None:
            stack.enter_context(changed(trainer, rollout_func=_rollout_func(trainer.rollout_func, meter)))
        yield


def _transformers(host: Any, meter: Meter, eos: Sequence[int]) -> Any:
    def generate(*args: Any, **kwargs: Any) -> Any:
        with meter.busy():
            out = host(*args, **kwargs)
        given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        ids = out if isinstance(out, Tensor) else out.sequences
        width = 0 if given is None else given.size(1)
        mask = kwargs.get("attention_mask")
        read = mask.sum() if mask is not None else ids[:, :width].numel()
        count(meter, int(read), until_end(ids[:, width:], eos))
        return out

    return generate


def _continuous(host: Any, meter: Meter, eos: Sequence[int]) -> Any:
    def generate_batch(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with meter.busy():
            out = host(inputs, *args, **kwargs)
        count(meter, sum(map(len, inputs)), sum(len(o.generated_tokens) for o in out.values()))
        return out

    return generate_batch


def _vllm(host: Any, meter: Meter, eos: Sequence[int]) -> Any:
    def generate(*args: Any, **kwargs: Any) -> Any:
        with meter.busy():
            out = host(*args, **kwargs)
        prompts = kwargs["prompts"] if "prompts" in kwargs else args[0]
        count(meter, sum(map(len, prompts)), sum(map(len, out[1])))
        return out

    return generate


def _rollout_func(host: Any, meter: Meter) -> Any:
    def rollout_func(*args: Any, **kwargs: Any) -> Any:
        calls, start = meter.costs.engine_calls, meter.clock()
        answer = host(*args, **kwargs)
        if meter.costs.engine_calls == calls:
            meter.spells.append((start, meter.clock()))
            masks = answer.get("env_mask") or [[1] * len(ids) for ids in answer["completion_ids"]]
            count(meter, sum(map(len, answer["prompt_ids"])), sum(map(sum, masks)))
        return answer

    return rollout_func


def count(meter: Meter, read: int, decoded: int) -> None:
    """One call of the engine."""
    meter.costs.engine_calls += 1
    meter.costs.tokens_read += read
    meter.costs.tokens_decoded += decoded


def until_end(ids: Tensor, eos: Sequence[int]) -> int:
    """Tokens of all rows up to the first that ends a row; padding comes behind it."""
    if not ids.numel():
        return 0
    ends = torch.isin(ids, torch.tensor(list(eos), device=ids.device)).int()
    length = torch.where(ends.any(1), ends.argmax(1) + 1, ids.size(1))
    return int(length.sum())


def book(trainer: Trainer, rows_trained: int) -> None:
    """Adds what all ranks counted in a batch to the totals of the run, and logs them.

    Args:
        rows_trained: of all ranks, known to the driver.
    """
    parts = to_driver(trainer.accelerator, trainer.meter.take())
    if trainer.accelerator.is_main_process:
        trainer.costs = trainer.costs + total(parts) + Costs(rows_trained_total=rows_trained)
        for name, value in trainer.costs.logged().items():
            trainer._metrics["train"][name] = [value]  # a total: TRL logs means of the values between two logs
