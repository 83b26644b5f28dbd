"""What of verl 0.9.1 does not work on a CPU, worked around from outside.

One function per cause. Each looks at the installed verl first and leaves it alone where the cause is gone. All have a
twin in patches/verl, the change proposed to verl itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from typing import Any

from rl_plugins.verl.imports import after_import


def place() -> None:
    """Each workaround runs right after the module it changes was imported."""
    after_import("verl.utils.distributed", one_backend)
    after_import("verl.utils.fsdp_utils", copy_parameters)
    after_import("verl.utils.model", value_model_attention)
    after_import("verl.workers.engine.fsdp.transformer_impl", unpinned_offload)
    after_import("verl.workers.engine.fsdp.transformer_impl", engine_for_cpu)


def one_backend(module: Any) -> None:
    """V13: the process group is asked for as "cpu:gloo,cpu:gloo" (verl/utils/distributed.py:89).

    torch answers "Duplicate device type cpu".
    """
    original = module.initialize_global_process_group_ray
    if 'f"cpu:gloo,{' not in inspect.getsource(original):
        return

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: Any = None, backend: Any = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    def initialize_global_process_group(timeout_second: Any = 36000) -> tuple[int, ...]:
        """That of the SFT trainer, which gives no way to name a backend."""
        initialize_global_process_group_ray(timeout_second)
        return tuple(int(os.environ[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))

    module.initialize_global_process_group_ray = initialize_global_process_group_ray
    module.initialize_global_process_group = initialize_global_process_group


def unpinned_offload(module: Any) -> None:
    """V13: the reference policy is offloaded to pinned memory (verl/workers/engine/fsdp/transformer_impl.py:462).

    Pinning needs an accelerator: "Cannot access accelerator device".
    """
    if "= CPUOffloadPolicy(pin_memory=True)" not in inspect.getsource(module.FSDPEngine):
        return
    policy = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)


def engine_for_cpu(module: Any) -> None:
    """V13: the FSDP engine is registered for "cuda" and "npu" (verl/workers/engine/fsdp/transformer_impl.py:1143)."""
    for model_type, engine in (
        ("language_model", module.FSDPEngineWithLMHead),
        ("value_model", module.FSDPEngineWithValueHead),
    ):
        for backend in ("fsdp", "fsdp2"):
            with contextlib.suppress(AssertionError):  # what verl says of a device that has an engine
                module.EngineRegistry.register(model_type=model_type, backend=backend, device="cpu")(engine)


def copy_parameters(module: Any) -> None:
    """V2: a snapshot of the parameters is taken with `.cpu()` (verl/utils/fsdp_utils.py:1167, 1180).

    On a CPU that is the parameter itself: the snapshot trains along, and what `separate_async` restores from it is no
    old policy at all.
    """
    original = module.fsdp2_sharded_save_to_cpu
    if ".cpu()" not in inspect.getsource(original):
        return

    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> Any:
        state, spec = original(model)
        return {name: (tensor.clone(), layout) for name, (tensor, layout) in state.items()}, spec

    module.fsdp2_sharded_save_to_cpu = fsdp2_sharded_save_to_cpu


def value_model_attention(module: Any) -> None:
    """V14: the critic is loaded with flash attention whatever the config says (verl/utils/model.py:649, 674)."""
    if 'attn_implementation="flash_attention_2"' not in inspect.getsource(module.load_valuehead_model):
        return

    def load_valuehead_model(local_path: Any, torch_dtype: Any, model_config: Any, trust_remote_code: Any) -> Any:
        from transformers import AutoModelForTokenClassification

        attention = getattr(model_config, "_attn_implementation", None) or "sdpa"
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa" if attention.startswith("flash") else attention,
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load_valuehead_model
