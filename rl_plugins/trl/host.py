"""What the adapter uses of TRL's trainer and of what hangs on it. `compat.PRIVATE` lists private names, with why.

The arguments of the trainer are typed by our config. Models, tokenizers and engines stay the host's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_plugins.core.requests import Generate, Generated, Prompt
from rl_plugins.runtime.chat import TokenizerChat
from rl_plugins.runtime.costs import Costs, Meter
from rl_plugins.runtime.programs import Engine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.compat import Seams
from rl_plugins.trl.config import GRPOConfig
from rl_plugins.trl.hosts import Loss

DatasetRow = dict[str, Any]
HostBatch = dict[str, Tensor]
"""TRL's batch: a row is the first dimension. What else is in it (lists with images) is handed on unread."""

SingleTurn = Callable[..., tuple[list[list[int]], list[list[float | None]] | None]]
"""`_generate_single_turn` of TRL: (prompt ids, images, fields, num_generations) -> completion ids, log-probs."""
Score = Callable[[list[DatasetRow], list[Any], list[Any], list[list[int]]], Tensor]
"""`_calculate_rewards` of TRL: (inputs, prompts, completions, completion ids) -> (rows of all ranks, functions)."""

# Columns of ours in TRL's batch.
ROW_COLUMN, TOKEN_COLUMN = "rlp_row_column:", "rlp_token_column:"
PUBLISHED = "rlp_published"  # the version the generation batch began with
VERSION, NEWEST_VERSION, VERSIONS = "rlp_version", "rlp_newest_version", "rlp_versions"  # of rows, and of tokens


class Accelerator(Protocol):
    num_processes: int
    process_index: int
    is_main_process: bool
    device: torch.device
    scaler: Any
    sync_gradients: bool
    optimizer_step_was_skipped: bool

    def gather(self, tensor: Tensor) -> Tensor: ...
    def unwrap_model(self, model: Any, *, keep_torch_compile: bool = True) -> Any: ...
    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Any: ...


class State(Protocol):
    epoch: float | None
    global_step: int
    stateful_callbacks: Any
    max_steps: int
    num_input_tokens_seen: int


class VllmEngine(Protocol):
    """TRL's `VLLMGeneration`."""

    mode: str
    tensor_parallel_size: int
    generation_kwargs: dict[str, Any]
    llm: Any
    vllm_client: Any

    def generate(self, *args: Any, **kwargs: Any) -> Any: ...


class HostTrainer(Protocol):
    """TRL's own trainer."""

    accelerator: Accelerator
    args: GRPOConfig
    state: State
    model: Any
    model_wrapped: Any
    processing_class: Any
    eos_token_ids: list[int]
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    train_dataset: Any
    num_generations: int
    num_iterations: int
    current_gradient_accumulation_steps: int
    max_completion_length: int
    mask_truncated_completions: bool
    temperature: float
    use_vllm: bool
    vllm_mode: str
    vllm_generation: VllmEngine
    vllm_importance_sampling_correction: bool
    rollout_func: Callable[..., dict[str, Any]] | None
    tools: list[Any]
    environments: list[Any] | None
    reward_funcs: list[Any]
    reward_func_names: list[str]
    reward_weights: Tensor
    multi_objective_aggregation: str
    scale_rewards: Any
    loss_type: str
    off_policy_mask_threshold: float | None
    aux_loss_enabled: bool
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    _step: int
    _buffered_inputs: list[HostBatch]
    _metrics: dict[str, dict[str, list[float]]]
    _logs: dict[str, Any]
    _pending_extra_logs: dict[str, list[Any]]

    def get_off_policy_mask(self, **kwargs: Any) -> Tensor: ...
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]: ...
    def _calculate_rewards(
        self, inputs: list[DatasetRow], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor: ...
    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, Any]: ...
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Any]: ...


class ProgramEngine(Engine, Protocol):
    """The engine of rollout programs and of the queue (engine.py)."""

    chat: TokenizerChat
    context: int
    meter: Meter

    def log(self, mode: str) -> None: ...
    def race(
        self, requests: Sequence[Generate], group: Sequence[int], missing: Sequence[int], enough: int
    ) -> tuple[list[Generated], list[int]]: ...


class Trainer(HostTrainer, Protocol):
    """TRL's trainer behind `MethodsMixin`."""

    methods: MethodStack
    seams: Seams
    host_loss: Loss
    costs: Costs
    meter: Meter
    cheap_rollouts: Any
    updates_seen: Any
    teacher: Any
    batch_phase: Any  # of generation/batches.py, while a batch is made

    def rollout_generate(self, model: Any) -> Callable[..., Any]: ...
    def program_engine(self, row_of: Callable[[Prompt], DatasetRow]) -> ProgramEngine: ...


@dataclass(frozen=True)
class HostRows:
    """What TRL's `_generate` returned of this rank: one entry per row.

    Args:
        prompts: tokens of the prompts.
        ids: tokens of the completions.
        tool_mask: 0 for tokens that were read, not written; None without tools.
        completions: as reward functions see them.
        logprobs: of the engine, None if it gives none.
    """

    prompts: list[list[int]]
    ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list[Any]
    logprobs: list[list[float]] | None

    @classmethod
    def of(cls, answer: Sequence[Any]) -> HostRows:
        prompts, ids, tool_mask, completions, logprobs, *_ = answer
        return cls(prompts, ids, tool_mask, completions, logprobs)


def tokenizer_of(trainer: HostTrainer) -> Any:
    """The tokenizer, which a processor of images holds inside."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def model_input(batch: HostBatch) -> tuple[Tensor, Tensor, int]:
    """Token ids and attention mask of prompts with their completions, and the columns that are completion."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    return ids, mask, batch["completion_ids"].size(1)


def logprobs_of(trainer: Trainer, model: Any, batch: HostBatch, **more: Any) -> tuple[Tensor, Tensor | None]:
    """(rows, time) log-probs of the completions by a model, as TRL takes them, and entropies if they are asked for."""
    size = trainer.args.per_device_train_batch_size
    with torch.no_grad():
        logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            model, *model_input(batch), batch_size=size, **more
        )
    return logprobs, entropies


def more_model_input(batch: HostBatch) -> dict[str, Any]:
    """What else of a batch the log-probs of its rows are taken with."""
    return {k: batch[k] for k in _FORWARD_KEYS if k in batch}


def loss_mask(batch: HostBatch) -> Tensor:
    """(rows, time) 1 where a token is trained."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


_FORWARD_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
    "unmasked_at",  # of masked diffusion models, see trl/masked
    "prompt_hidden",
)


def policy_of(trainer: HostTrainer) -> Any:
    """The model itself, whose `generate` TRL calls. With torch 2.7 nothing can be taken off a compiled one again."""
    return trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)


def has_numbers(dataset: Any) -> bool:
    """Whether rows can be taken by number; a stream cannot."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
