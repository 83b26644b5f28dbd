"""What this adapter relies on in TRL and transformers, which parts of it older releases do not serve, and which seams
exist. The range of versions is that of pyproject.toml.

The seams are the small patches in `patches/trl/`. Where the installed TRL has one, the adapter uses it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import os
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rl_plugins.core.errors import ConfigError, pip_command
from rl_plugins.runtime.host_names import Pinned
from rl_plugins.runtime.tested import ALLOW_VARIABLE, bounds, inside, number, wanted

_log = logging.getLogger(__name__)

HEAD, ASYNCHRONOUS, OTR = "fused head", "asynchronous trainer", "loss otr"
PARTS = {HEAD: "1.15", ASYNCHRONOUS: "1.16", OTR: "1.16"}
"""Parts of the adapter that build on names which came with this TRL. Below it they are refused, the rest runs."""

_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
_ASYNC = "trl.experimental.async_grpo"
ASYNC_TRAINER = f"{_ASYNC}.async_grpo_trainer:AsyncGRPOTrainer"
_SFT = "trl.trainer.sft_trainer:SFTTrainer"

PINNED = (
    Pinned(
        _TRAINER,
        "_generate_and_score_completions",
        ("inputs",),
        "overridden: the plan before it, the decision after it",
    ),
    Pinned(_TRAINER, "_generate", ("prompts",), "overridden: keeps what it returned; called once per round"),
    Pinned(
        _TRAINER,
        "_generate_single_turn",
        ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
        "overridden: serves the rows of the plan; the engine of rollout programs",
    ),
    Pinned(
        _TRAINER,
        "_calculate_rewards",
        ("inputs", "prompts", "completions", "completion_ids_list"),
        "overridden: fillers have no reward; called once per round and by programs",
    ),
    Pinned(_TRAINER, "_tokenize_prompts", ("prompts",), "called: contexts of rollout programs are TRL's own"),
    Pinned(
        _TRAINER,
        "_get_per_token_logps_and_entropies",
        ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        "overridden: the log-probs TRL's loss is made of; called for signals TRL does not compute",
    ),
    Pinned(
        _TRAINER,
        "_set_signature_columns_if_needed",
        (),
        "overridden: the number of a row is a column TRL must not drop",
    ),
    Pinned(_TRAINER, "_dist", None, "read: parameters are whole while a masked diffusion model decodes"),
    Pinned(_TRAINER, "_signature_columns", None, "extended by that column"),
    Pinned(_TRAINER, "_step", None, "read: micro-batches so far, which tell where a batch and an optimizer step end"),
    Pinned(_TRAINER, "_buffered_inputs", None, "read: micro-batches of the coming optimizer step; columns are added"),
    Pinned(_TRAINER, "_metrics", None, "changed: what TRL logs of rows it did not choose"),
    Pinned(_TRAINER, "_logs", None, "changed: the table of completions"),
    Pinned(_TRAINER, "_pending_extra_logs", None, "changed: columns that reward functions add to that table"),
    Pinned(
        _TRAINER,
        "_transform_advantages",
        ("advantages",),
        "T2: the methods decide before TRL logs and slices",
        optional=True,
    ),
    Pinned(
        _TRAINER,
        "_transform_per_token_loss",
        ("per_token_loss", "per_token_logps", "log_ratio", "mask", "inputs"),
        "T3: the method's surrogate takes the place of TRL's",
        optional=True,
    ),
    Pinned(_TRAINER, "_select_completions", None, "T5: `keep_ratio` beside an entropy bonus", optional=True),
    Pinned(
        "trl.trainer.utils:RepeatSampler",
        "set_epoch",
        ("epoch",),
        "T11: TRL resumes a later pass over the dataset in its order",
        optional=True,
    ),
    Pinned(_TRAINER, "training_step", ("model", "inputs", "num_items_in_batch"), "overridden: the gradient is finite"),
    Pinned(_TRAINER, "compute_loss", ("model", "inputs"), "overridden: `before_update` before it, the surrogate in it"),
    Pinned(_TRAINER, "get_high_entropy_mask", ("entropies", "mask", "threshold"), "overridden: seen by the loss"),
    Pinned(
        _TRAINER,
        "get_off_policy_mask",
        ("advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold"),
        "called: the factor TRL puts on its own surrogate",
    ),
    Pinned(_TRAINER, "get_train_dataloader", (), "overridden: rows with their number"),
    Pinned(_TRAINER, "train", ("resume_from_checkpoint",), "overridden: which checkpoint the state comes from"),
    Pinned(_TRAINER, "save_model", ("output_dir",), "overridden: TRL writes each checkpoint with it first"),
    Pinned(
        _TRAINER,
        "_save_rng_state",
        ("output_dir",),
        "overridden: the last file of a checkpoint but for the one that says it is whole; the state is written then",
    ),
    Pinned(
        ASYNC_TRAINER,
        "get_train_dataloader",
        (),
        "overridden: the driver stands before TRL's batcher in it",
        part=ASYNCHRONOUS,
    ),
    Pinned(
        ASYNC_TRAINER,
        "rollout_queue",
        None,
        "changed while the dataloader is made: its samples are seen whole",
        part=ASYNCHRONOUS,
    ),
    Pinned(
        ASYNC_TRAINER,
        "get_batch_samples",
        ("epoch_iterator", "num_batches", "device"),
        "overridden: one step",
        part=ASYNCHRONOUS,
    ),
    Pinned(ASYNC_TRAINER, "compute_loss", ("model", "inputs"), "overridden: the surrogate in it", part=ASYNCHRONOUS),
    Pinned(ASYNC_TRAINER, "model_version", None, "read: the number of the newest published weights", part=ASYNCHRONOUS),
    Pinned(
        f"{_ASYNC}.async_grpo_trainer:FixedCountBatcher",
        "__init__",
        ("dataset", "num_processes", "microbatch_size"),
        "called with the driver as its dataset",
        part=ASYNCHRONOUS,
    ),
    Pinned(
        f"{_ASYNC}.async_grpo_trainer:DataCollatorForRollout",
        "torch_call",
        ("examples",),
        "overridden: columns",
        part=ASYNCHRONOUS,
    ),
    Pinned(f"{_ASYNC}.packing", "_flash_attn", (), "replaced on a CPU", part=ASYNCHRONOUS),
    Pinned(
        f"{_ASYNC}.async_rollout_worker:AsyncRolloutWorker",
        "_loop_kwargs",
        None,
        "read: the first prompt",
        part=ASYNCHRONOUS,
    ),
    Pinned(
        f"{_ASYNC}.async_rollout_worker",
        "_AsyncRolloutLoop",
        None,
        "its way to score a group, for our worker",
        part=ASYNCHRONOUS,
    ),
    Pinned(
        f"{_ASYNC}.async_rollout_worker:_AsyncRolloutLoop",
        "_score_group",
        ("group",),
        "called: rewards and advantages of our worker's groups are TRL's own",
        part=ASYNCHRONOUS,
    ),
    Pinned(
        f"{_ASYNC}.async_rollout_worker:_AsyncRolloutLoop",
        "_env_reward_types",
        None,
        "given to that: no environments",
        part=ASYNCHRONOUS,
    ),
    Pinned(
        f"{_ASYNC}.async_rollout_worker:_AsyncRolloutLoop",
        "_provides_rollout_reward",
        None,
        "given to that: False",
        part=ASYNCHRONOUS,
    ),
    Pinned(
        "trl.trainer.utils",
        "_ChunkedLogProbFunction",
        None,
        "replaced while the loss of `otr` is computed: the fused head gives its loss instead of log-probs",
        part=OTR,
    ),
    Pinned(
        "trl.trainer.utils", "_use_triton", ("device",), "replaced with it: the head hands over targets alone", part=OTR
    ),
    Pinned(
        _SFT, "get_batch_samples", ("epoch_iterator", "num_batches", "device"), "overridden: counts sequences for `otr`"
    ),
    Pinned(_SFT, "_metrics", None, "extended: what `otr` logs"),
    Pinned(_SFT, "compute_loss", ("model", "inputs"), "overridden: the head is replaced in it"),
    Pinned(
        "transformers.generation.utils:GenerationMixin",
        "_supports_default_dynamic_cache",
        (),
        "called: whether keys and values of a model can be kept",
    ),
    Pinned(
        "trl.trainer.grpo_trainer",
        "add_fused_lm_head",
        ("model", "temperature"),
        "replaced while a trainer is made: the head gives more, or there is none. It came with entropies that have a "
        "gradient",
        part=HEAD,
    ),
    Pinned("trl.trainer.grpo_trainer", "create_model_from_path", ("model_id",), "replaced while a trainer is made"),
    Pinned(_TRAINER, "eos_token_ids", None, "read: tokens that end a completion"),
    Pinned(_TRAINER, "chat_template", None, "read: the template of contexts that programs make"),
    Pinned(_TRAINER, "chat_template_kwargs", None, "read with it"),
    Pinned(_TRAINER, "async_loop", None, "read: where reward functions that are awaited run"),
    *(
        Pinned("trl.generation.vllm_generation:VLLMGeneration", name, None, "read: what vLLM's top log-probs are of")
        for name in ("repetition_penalty", "top_p", "top_k", "min_p", "structured_outputs_regex")
    ),
    Pinned("trl:GRPOConfig", "use_transformers_continuous_batching", None, "read: it is refused beside programs"),
    Pinned("trl.trainer.utils", "is_async_callable", ("func",), "called: which reward functions are awaited"),
    Pinned("transformers", "TopHLogitsWarper", None, "the sampler of methods that ask for top-h"),
    Pinned(
        "argparse:ArgumentParser", "_option_string_actions", None, "read: options of TRL's and accelerate's parsers"
    ),
)


def trl_version() -> str:
    return importlib.metadata.version("trl")


def untested_allowed() -> bool:
    return bool(os.environ.get(ALLOW_VARIABLE))


def check_versions() -> None:
    """Raises ConfigError if TRL is missing, or if TRL or transformers is of a version that is not in the range."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers")}
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"TRL is not installed. Install it: {pip_command('trl')}") from None
    for name, version in versions.items():
        if not inside(name, version):
            _refuse(
                f"{name} {version} is installed; this version of rl-plugins is tested with {name} {wanted(name)}. "
                f"Install one of those (pip install '{name}{wanted(name)}')"
            )


def check_names(trainer_class: type, owner: str = _TRAINER) -> None:
    """Raises ConfigError if a trainer of TRL is not what this adapter builds on.

    Args:
        owner: the trainer of TRL that it is, as `Pinned.owner`.
    """
    moved = _moved((p for p in PINNED if p.owner == owner), trainer_class)
    if moved:
        _refuse(
            f"{trainer_class.__name__} of TRL {trl_version()} is not what rl-plugins builds on: {'; '.join(moved)}. "
            f"Install TRL {wanted('trl')}, or update rl-plugins"
        )


def _refuse(problem: str) -> None:
    if not untested_allowed():
        raise ConfigError(f"{problem}, or set {ALLOW_VARIABLE}=1 to try.")
    _log.warning("%s. %s=1 is set, so the run goes on.", problem, ALLOW_VARIABLE)


def moved_symbols() -> list[str]:
    """What of the pinned names is gone or takes other parameters; empty if this host is as expected. What only a part
    of the adapter builds on is in `closed_parts`."""
    return _moved(p for p in PINNED if not p.part)


def closed_parts() -> dict[str, str]:
    """Parts of the adapter that the installed TRL does not serve, with the reason."""
    return {part: why for part in PARTS if (why := missing(part))}


def seams() -> dict[str, bool]:
    """What upstream changes in the installed TRL would serve, by their number, and whether they are there."""
    return {p.why: hasattr(pkgutil.resolve_name(p.owner), p.name) for p in PINNED if p.optional}


def missing(part: str) -> str:
    """Why a part of `PARTS` cannot run with the installed TRL, with what to do; empty if it can."""
    moved = _moved(p for p in PINNED if p.part == part)
    if not moved:
        return ""
    version, first = trl_version(), PARTS[part]
    lacking = [text.rpartition(" ")[2] for text in moved if " needs " in text]
    if lacking and number(version) >= number(first):
        return f"{moved[0]}, which is not installed. Install it (pip install {lacking[0]})."
    high = bounds("trl")[1]
    return (
        f"it needs TRL >={first},<{high}, and TRL {version} is installed ({moved[0]}). Install one of those (pip "
        f"install 'trl>={first},<{high}')."
    )


def check_part(part: str) -> None:
    """Raises ConfigError if a part of the adapter cannot run. No variable opens it: what it builds on is not there."""
    why = missing(part)
    if why:
        raise ConfigError(f"The {part} of rl-plugins cannot run: {why}")


@functools.cache  # once in a process
def fell_back(what: str, why: str) -> None:
    """Tells that a capability of the host was looked for and is not there, so that something is off or slower."""
    _log.warning("rl-plugins: %s: %s.", what, why)


def cache_argument(model: Any) -> str | None:
    """The parameter of `forward`, and of `generate`, that takes keys and values; transformers 5.24 renamed it."""
    given = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in given), None)


def _moved(names: Iterable[Pinned], trainer_class: type | None = None) -> list[str]:
    return [text for p in names if (text := p.moved(trainer_class))]


@dataclass(frozen=True)
class Seams:
    """Upstream seams of the installed trainer class (True if it has them)."""

    transform_per_token_loss: bool
    select_completions: bool

    @classmethod
    def of(cls, host: Any) -> Seams:
        return cls(
            transform_per_token_loss=hasattr(host, "_transform_per_token_loss"),
            select_completions=hasattr(host, "_select_completions"),
        )
