"""Everything the adapter changes in objects that are not its own, and what switches it on.

Overriding a method in `MethodsMixin` changes nothing of TRL; what it may override or read is in `compat.PINNED`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from rl_plugins.runtime.host_names import Change

CHANGES = (
    Change(
        "`transformers.trainer.DEFAULT_CALLBACKS`: one more, for good",
        "TRL's own trainer would ignore the methods of a config in silence",
        "a `GRPOConfig` that names methods",
        "none",
        "config.refuse_stock_trainers",
    ),
    Change(
        "`trl.GRPOTrainer`: ours, while TRL's script runs",
        "the script takes its trainer from there",
        "`rl-plugins trl grpo` with methods",
        "none",
        "commands/script.run",
    ),
    Change(
        "`trl.GRPOTrainer` and `trl.get_peft_config`: ours, while TRL's script runs",
        "the script makes LoRA only",
        "`rl-plugins trl grpo` with `adapter: prompt_tuning` or `prefix_tuning`",
        "none",
        "commands/script.run",
    ),
    Change(
        "`transformers.Trainer.train`: stops, while the doctor runs a script",
        "a script makes its trainer where nobody else sees it",
        "`rl-plugins doctor --script`",
        "none",
        "commands/doctor.print_script",
    ),
    Change(
        "the base model under a prompt-learning adapter of PEFT: a hook before its forward pass gives it positions",
        "PEFT gives none, and the log-probs of a padded row depend on the other rows of its batch",
        "any method, or the options above",
        "none",
        "trainer.MethodsMixin.__init__",
    ),
    Change(
        "`trl.SFTTrainer`: ours, while TRL's script runs",
        "the script takes its trainer from there",
        "`rl-plugins trl sft` with `loss_type: otr`",
        "none",
        "commands/sft.run",
    ),
    Change(
        "`loss_type` of the config, while TRL's constructor runs",
        "it knows its own losses only",
        "`SFTTrainer` of ours with `loss_type: otr`",
        "none",
        "commands/sft.SFTTrainer.__init__",
    ),
    Change(
        "`_ChunkedLogProbFunction` and `_use_triton` in `trl.trainer.utils`, while a training loss is computed",
        "TRL's fused head gives the loss of OTR, tile by tile and for targets alone, instead of log-probs",
        "`SFTTrainer` of ours with `loss_type: otr`",
        "none",
        "commands/sft.SFTTrainer.compute_loss",
    ),
    Change(
        "`error` of the parser accelerate makes for `launch`",
        "an argument it cannot read is one paragraph",
        "`rl-plugins trl grpo` and `trl sft`",
        "none",
        "commands/script.launch",
    ),
    Change(
        "the launchers in `accelerate.commands.launch`, while it is asked which it would call",
        "as many processes are reported as would start",
        "a dry run",
        "none",
        "commands/script.planned_launch",
    ),
    Change(
        "`__init__` of `trl.GRPOTrainer`, while one of our trainers is made",
        "its arguments are seen as TRL gets them, whatever the constructors before it look like",
        "a config that names methods, or that the constructor makes itself",
        "none",
        "trainer.MethodsMixin.__init__",
    ),
    Change(
        "options of the config that a method sets, for good",
        "`host_options` of the method; a value of the user's own is an error instead",
        "a method with `host_options`",
        "none",
        "trainer.MethodsMixin.__init__",
    ),
    Change(
        "`add_fused_lm_head` in `trl.trainer.grpo_trainer`, while a trainer is made",
        "the fused head computes the sum of squared probabilities, too",
        "a method that needs `sum_squared_probs`",
        "none",
        "changes.more_head_outputs",
    ),
    Change(
        "`add_fused_lm_head` in `trl.trainer.grpo_trainer`, while a trainer is made",
        "the fused head computes log-probs of the next token",
        "`rl_plugins.trl.masked`",
        "T15",
        "masked/trainer.MaskedTrainer.__init__",
    ),
    Change(
        "`create_model_from_path` in `trl.trainer.grpo_trainer`, while a trainer is made; a `generation_config` of a "
        "model without one, for good",
        "TRL writes token ids into a generation config",
        "`rl_plugins.trl.masked`",
        "none",
        "masked/trainer.MaskedTrainer.__init__",
    ),
    Change(
        "trainer: `num_generations`, `rollout_func`, while it makes a batch",
        "groups of other sizes mean nothing to TRL; rows of programs are served where TRL has a place for them",
        "any method",
        "none",
        "generation/serving.host_view, generation/evaluation.evaluation_view",
    ),
    Change(
        "trainer: `train_dataset`, while the dataloader is made, and `_signature_columns`",
        "rows carry their number, which TRL's collator would drop",
        "any method",
        "none",
        "trainer.MethodsMixin.get_train_dataloader",
    ),
    Change(
        "trainer: `state.num_input_tokens_seen`, `_metrics`, `_pending_extra_logs`, put back",
        "rows are counted and logged once, when TRL makes its batch of them",
        "rounds, and programs that ask for rewards",
        "none",
        "generation/rounds.one_round, generation/engine.TrlEngine.rewards_of",
    ),
    Change(
        "trainer: `_logs` and `_metrics` of the batch just made",
        "the numbers shown are the numbers used",
        "a decision that differs from TRL's own",
        "T2",
        "logs",
    ),
    Change(
        "TRL's batch: advantages, masks, columns; rows cut away, moved or masked",
        "it is trained as decided",
        "any method",
        "T2, T5",
        "generation/decided.apply_decision",
    ),
    Change(
        "TRL's batch: advantages 0, in a copy for its loss",
        "its own surrogate vanishes and the method's takes its place",
        "`policy_loss`",
        "T3",
        "loss/micro_batch.compute_loss",
    ),
    Change(
        "`generate` of the model, while one request is served",
        "limits, temperature, stop texts and top log-probs of each request; keys and values that are kept",
        "`rollout`, `admit`",
        "none",
        "generation/engine.TrlEngine",
    ),
    Change(
        "`generate` of the model, while TRL makes completions",
        "a cheap copy of the policy samples, and its log-probs are kept",
        "`rollout_precision` with any method",
        "none",
        "generation/precision.CheapRollouts.serving",
    ),
    Change(
        "`generate` of the model or of `VLLMGeneration`, and `rollout_func`, while TRL makes completions",
        "tokens and calls are counted",
        "any method, or `count_costs`",
        "none",
        "generation/costs.engine_counted",
    ),
    Change(
        "`VLLMGeneration`: `generation_kwargs`, `generate`; `generate` of its `llm` or `vllm_client`, likewise",
        "the same, where TRL has one limit for all",
        "`rollout` with `use_vllm`",
        "none",
        "generation/engine.TrlEngine",
    ),
    Change(
        "sampler of the training dataloader, at a resume: the orders of earlier passes are drawn from it; it is empty "
        "if the run is at its end",
        "TRL begins a resume with the order of the first pass, whatever pass the checkpoint is in, and trains a step "
        "more of a finished run",
        "any method",
        "T11",
        "saved.skip_passes",
    ),
    Change(
        "`torch.load`, for good: a file may be loaded to `cpu:0`, `cpu:1`, .. as to `cpu`",
        "accelerate gives these names to several processes without GPUs, the host loads its optimizer to them, and "
        "torch knows `cpu` only",
        "a resume with any method, in several processes without GPUs",
        "none",
        "stateful.StatefulMixin.train",
    ),
    Change(
        "trainer: a note in `state.stateful_callbacks`; `trainer_state.json` of a checkpoint that is written once more "
        "goes first",
        "a checkpoint whose state was lost is told from one without methods, and a half-written one from a whole one",
        "any method",
        "none",
        "saved.mark, saved.begin",
    ),
    Change(
        "asynchronous trainer: `rollout_queue`; its module: `FixedCountBatcher`, `DataCollatorForRollout`, while its "
        "dataloader is made",
        "the driver stands between queue and batcher, and columns of methods are packed",
        "`rl_plugins.trl.asynchronous` with any method",
        "none",
        "asynchronous/trainer.get_train_dataloader",
    ),
    Change(
        "asynchronous trainer: `_metrics` and its counters of a step, put back",
        "a pass for log-probs at the present weights is not logged as one of the loss",
        "a method that needs `current_logprobs`",
        "none",
        "asynchronous/loss._live",
    ),
    Change(
        "`_flash_attn` of TRL's packing and `get_peak_flops_per_device` of its asynchronous trainer, for good",
        "both need CUDA",
        "a call of `rl_plugins.trl.asynchronous.cpu.activate`",
        "T12, T13",
        "asynchronous/cpu.activate",
    ),
    Change(
        "the optimizer: hooks around its step, for learning rates of one step, and for no gradient at all",
        "`Update.lr_scale`; a step without a trained token moves nothing",
        "any method",
        "none",
        "checkpoint.MethodsCallback",
    ),
)


@contextlib.contextmanager
def changed(thing: Any, **values: Any) -> Iterator[None]:
    """An object with other attributes, as long as this lasts.

    Raises:
        AttributeError: it is a module, and has no such name: nobody would look at what is put there.
    """
    gone = [name for name in values if isinstance(thing, ModuleType) and not hasattr(thing, name)]
    if gone:
        raise AttributeError(f"{thing.__name__} has no {', '.join(gone)}; see rl_plugins.trl.compat")
    before = {name: vars(thing)[name] for name in values if name in vars(thing)}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(thing, name, before[name])
            else:
                delattr(thing, name)


@functools.cache
def load_to_numbered_cpus() -> None:
    """`torch.load(file, map_location="cpu:1")` loads to the CPU."""
    priority = 9  # torch's own for the CPU is 10
    torch.serialization.register_package(
        priority,
        lambda storage: None,
        lambda storage, location: storage if re.fullmatch(r"cpu:\d+", location) else None,
    )


@contextlib.contextmanager
def arguments_of(
    cls: type, instance: Any, act: Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """As long as this lasts, `act` gets the arguments with which the constructor of `cls` makes `instance`, by name,
    and the constructor runs in what it returns."""
    own: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(own)
    def init(made: Any, *args: Any, **kwargs: Any) -> None:
        if made is not instance:
            return own(made, *args, **kwargs)
        with act(inspect.signature(own).bind(made, *args, **kwargs).arguments):
            own(made, *args, **kwargs)

    with changed(cls, __init__=init):
        yield


@contextlib.contextmanager
def more_head_outputs() -> Iterator[None]:
    """TRL's fused head of the policy computes `log_sum_sq_probs` in every pass, too."""
    from trl.trainer import grpo_trainer

    host = grpo_trainer.add_fused_lm_head

    def add(model: Any, *args: Any, **options: Any) -> None:
        if "entropy" in options.get("outputs", ()):  # that of the policy
            options["outputs"] = (*options["outputs"], "log_sum_sq_probs")
        host(model, *args, **options)

    with changed(grpo_trainer, add_fused_lm_head=add):
        yield


@contextlib.contextmanager
def head_output(trainer: Any, wanted: bool, seen: list[Any]) -> Iterator[None]:
    """Collects `log_sum_sq_probs` (rows, time) of the passes made inside, if it is wanted."""
    if not wanted:
        yield
        return
    handle = trainer.model.register_forward_hook(lambda module, args, out: seen.append(out.log_sum_sq_probs))
    try:
        yield
    finally:
        handle.remove()
