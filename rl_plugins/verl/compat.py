"""Which verl this adapter is tested with, which names it uses that verl does not promise, and which seams exist.

The seams are the small patches in `patches/verl/`. Where the installed verl has one, the adapter uses it.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, pip_command
from rl_plugins.runtime.host_names import Pinned
from rl_plugins.runtime.tested import ALLOW_VARIABLE, inside, wanted

_V1, _LOOP = "verl.trainer.ppo.v1", "verl.experimental.agent_loop.agent_loop"
_TRAINER, _WORKER = f"{_V1}.trainer_base:PPOTrainer", f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ"
_BATCH = ("batch", "metrics")
_FSDP = "verl.workers.engine.fsdp.transformer_impl"

PINNED: tuple[Pinned, ...] = (
    Pinned(_TRAINER, "fit", ("agent_loop_manager",), "workers confirm the methods and get the loss"),
    Pinned(_TRAINER, "step", ("metrics", "timing_raw"), "logged values are means over its batches"),
    Pinned(_TRAINER, "on_init_end", (), "`start`, and the state of a checkpoint"),
    Pinned(_TRAINER, "on_validate_begin", (), "plans of methods that act in evaluation"),
    Pinned(_TRAINER, "on_validate_end", (), "the loader of the validation is verl's again"),
    Pinned(_TRAINER, "_save_checkpoint", (), "the state is written before the checkpoint can be found"),
    Pinned(_TRAINER, "_next_train_batch", ("num_prompts",), "the loader's prompts are what a plan starts from"),
    Pinned(_TRAINER, "_submit_batch_to_rollout", ("batch",), "rounds; a dead worker is named"),
    Pinned(_TRAINER, "_get_required_batch_multiple", ("dp_size",), "the log-prob passes need no whole mini-batches"),
    Pinned(_TRAINER, "_balance_batch", _BATCH, "rewards are there, log-probs are not yet: `rewards`, `select`"),
    Pinned(_TRAINER, "_compute_old_log_prob", _BATCH, "log-probs of tokens nobody sampled"),
    Pinned(f"{_V1}.trainer_separate_async:PPOTrainerSeparateAsync", "_compute_old_log_prob", _BATCH, "the same"),
    Pinned(
        "verl.workers.engine_workers:ActorRolloutRefWorker",
        "ref_worker_cls",
        None,
        "replaced: it loads the model of a teacher",
    ),
    Pinned(_TRAINER, "_compute_advantage", _BATCH, "`advantages`, `shape`, `observe`"),
    Pinned(_TRAINER, "get_llm_client", (), "versions of tokens"),
    Pinned(
        "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient",
        "generate",
        ("request_id",),
        "every attempt goes through `generate` of its base: versions of tokens",
    ),
    Pinned(
        "verl.workers.rollout.llm_server:LLMServerClient",
        "generate",
        ("request_id",),
        "tokens and calls of every attempt are counted",
    ),
    Pinned(
        "verl.workers.engine.fsdp.transformer_impl",
        "calculate_sum_pi_squared",
        None,
        "what a batch asks for: squared probabilities",
    ),
    Pinned("verl.workers.engine.fsdp.transformer_impl", "sum_pi_squared", None, "squared probabilities, in its output"),
    Pinned(_TRAINER, "_update_critic", _BATCH, "no optimizer step where nothing is trained"),
    Pinned(_TRAINER, "_update_actor", _BATCH, "no optimizer step where nothing is trained; logged values"),
    Pinned(
        f"{_V1}.replay_buffer:ReplayBuffer",
        "_wait_for_next_poll",
        ("partition_id", "last_debug_time"),
        "the wait for rollouts looks for dead workers",
    ),
    Pinned(_LOOP, "_agent_loop_registry", None, "a name that is taken is an error"),
    Pinned(_WORKER, "_run_prompt", ("prompt", "sampling_params", "trajectory", "trace"), "one program for a prompt"),
    Pinned(_WORKER, "__rollout_n__", None, "a column of this name says how many rollouts a prompt gets"),
    Pinned(_WORKER, "_agent_loop_postprocess", ("output", "validate"), "rows of a program are sessions of verl"),
    Pinned(
        f"{_LOOP}:AgentLoopWorker", "_run_agent_loop", ("sampling_params", "trajectory"), "failures are kept; costs"
    ),
    Pinned(f"{_LOOP}:AgentLoopWorker", "_compute_score", ("outputs", "kwargs"), "`Score` of a rollout program"),
    Pinned("ray.actor", "__ray_call__", ("fn",), "asks workers for their methods, errors and costs"),
    Pinned("ray.actor", "__ray_metadata__", None, "the class behind verl's agent-loop actor"),
    Pinned("importlib._bootstrap", "_initializing", None, "a module that is not whole yet is waited for"),
    Pinned("verl.workers.rollout.base", "_ROLLOUT_REGISTRY", None, "hf_cpu: nothing public registers an adapter"),
    Pinned("verl.workers.rollout.replica:RolloutReplica", "_server_handle", None, "hf_cpu: what a replica must set"),
    Pinned("verl.workers.rollout.replica:RolloutReplica", "_server_address", None, "hf_cpu: what a replica must set"),
    Pinned("verl.trainer.sft_trainer:SFTTrainer", "training_client", None, "`otr`: gets the loss and marks batches"),
    Pinned(_FSDP, "distillation_use_topk", None, "`otr`: a flag on the batch; the engine hands its logits to the loss"),
    Pinned(_FSDP, "distillation_only", None, "`otr`: likewise; log-probs are not computed"),
    Pinned("transformers.configuration_utils", "_attn_implementation", None, "V14: what the critic is told to use"),
)


def verl_version() -> str:
    return importlib.metadata.version("verl")


def untested_allowed() -> bool:
    return bool(os.environ.get(ALLOW_VARIABLE))


def check_verl_version() -> None:
    """Raises ConfigError if verl is missing or of a version this adapter was not tested with."""
    try:
        version = verl_version()
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"verl is not installed. Install it: {pip_command('verl')}") from None
    if not inside("verl", version) and not untested_allowed():
        raise ConfigError(
            f"verl {version} is installed; this version of rl-plugins is tested with verl {wanted('verl')}. Install "
            f"one of those (pip install 'verl{wanted('verl')}'), or set {ALLOW_VARIABLE}=1 to try."
        )


def check_verl() -> None:
    """Raises ConfigError if the installed verl is not as this adapter expects it."""
    check_verl_version()
    moved = moved_symbols()
    if moved and not untested_allowed():
        raise ConfigError(
            f"verl {verl_version()} is not as this version of rl-plugins expects it: {'; '.join(moved)}. Install a "
            f"version it was tested with."
        )


def moved_symbols(root: Path | None = None) -> list[str]:
    """What of the table is gone or takes other parameters; empty if this host is as expected. Nothing is imported:
    the names are looked up in the sources.

    Args:
        root: folder of verl, if not the installed one.
    """
    found = []
    for p in PINNED:
        shown = f"{p.owner.rpartition(':')[2]}.{p.name}"
        parameters = _parameters(p.owner, p.name, root)
        if not states(p.owner, p.name, root) or (p.parameters is not None and parameters is None):
            found.append(f"{shown} is gone")
        elif p.parameters is not None and parameters is not None and parameters[: len(p.parameters)] != p.parameters:
            found.append(f"{shown}({', '.join(parameters)}) used to be ({', '.join(p.parameters)})")
    return found


def states(owner: str, name: str, root: Path | None = None) -> bool:
    """Whether the source of "module" or "module:Class" has a name."""
    node = _source(owner, root)
    return node is not None and any(
        name == getattr(n, "id", getattr(n, "attr", getattr(n, "name", None)))
        or (isinstance(n, ast.Constant) and n.value == name)
        for n in ast.walk(node)
    )


def _parameters(owner: str, name: str, root: Path | None) -> tuple[str, ...] | None:
    node = _source(owner, root)
    for n in ast.walk(node) if node is not None else ():
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name:
            return tuple(a.arg for a in (*n.args.posonlyargs, *n.args.args) if a.arg != "self")
    return None


def _source(owner: str, root: Path | None) -> ast.AST | None:
    """The syntax tree of a module or a class; None if there is none."""
    module, _, name = owner.partition(":")
    tree = _tree(module, root)
    if tree is None or not name:
        return tree
    return next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)


def _tree(module: str, root: Path | None) -> ast.Module | None:
    top, *rest = module.split(".")
    if root is None or top != root.name:
        spec = importlib.util.find_spec(top)
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(spec.submodule_search_locations[0])
    file = root.joinpath(*rest).with_suffix(".py") if rest else root / "__init__.py"
    return _parsed(file, file.stat().st_mtime_ns) if file.is_file() else None


@functools.cache
def _parsed(file: Path, changed: int) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def states_its_mode(trainer_class: Any) -> bool:
    """Seam V9: trainers say which mode they follow, whatever name they are registered under."""
    return hasattr(trainer_class, "base_mode")


def passes_extra_fields(policy_loss_config: Any) -> bool:
    """Seam V12: `ppo_loss` hands extra columns to the policy loss."""
    return hasattr(policy_loss_config, "extra_fields")


# ---- differences of 0.9.0


async def initial_tokens(loop: Any, messages: list[Any]) -> list[int]:
    """The prompt of a chat as an agent loop of verl makes it."""
    if getattr(loop, "enable_continuous_token", True):  # 0.9.1 has no other way
        return list(await loop.ct_build_initial_tokens(messages))
    return list(await loop.apply_chat_template(messages))


def checkpoint_engine(name: str) -> Any:
    """The checkpoint engine that has a name, or None."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    try:
        return CheckpointEngineRegistry.get(name)
    except (KeyError, ValueError):  # 0.9.0 raises the first, 0.9.1 the second
        return None


def runs_without_hybrid_engine() -> bool:
    """Whether `separate_async` can do without replicas on the training devices: 0.9.0 ignores the option, 0.9.1 ends in
    a logging call (patches/verl/V1 mends it)."""
    module = f"{_V1}.trainer_separate_async"
    tree = _source(module, None)
    return (
        tree is not None
        and states(module, "_enable_hybrid_replicas")
        and not any(isinstance(n, ast.keyword) and n.arg == "flush" for n in ast.walk(tree))
    )


def needs_newer(option: str, value: Any) -> bool:
    """Whether only verl 0.9.1 takes this value: a fraction of a batch ahead of training, or rows of any age."""
    if states(_TRAINER, "_add_async_warmup_batches"):
        return False
    name = option.rpartition(".")[2]
    return (name == "num_warmup_batches" and not isinstance(value, int)) or (
        name == "max_off_policy_threshold" and value is None
    )
