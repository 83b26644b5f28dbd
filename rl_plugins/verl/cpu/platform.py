"""The platform "cpu" for verl's platform registry, and what stands in for `torch.cuda` in it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from rl_plugins.verl.cpu import free


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a device does on request and a CPU needs not do."""


def _device_module() -> types.ModuleType:
    """torch.cpu lacks the memory functions verl calls without asking (verl/workers/engine_workers.py:219, 769)."""
    module = types.ModuleType("rl_plugins.verl.cpu.device")
    for name in ("Stream", "stream", "current_stream", "Event", "synchronize"):
        setattr(module, name, getattr(torch.cpu, name, _nothing))
    for name in (
        "empty_cache",
        "ipc_collect",
        "set_device",
        "set_per_process_memory_fraction",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    ):
        setattr(module, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *args, **kwargs: 0)
    members: dict[str, Any] = {
        "is_available": lambda: False,  # verl asks it before it touches an accelerator
        "device_count": lambda: 1,
        "current_device": lambda: torch.device("cpu"),
        "get_device_name": lambda *args: "CPU",
        "get_device_properties": lambda *args: types.SimpleNamespace(name="CPU", total_memory=0),
        "mem_get_info": lambda *args: (0, 0),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


class CPUPlatform(PlatformBase):
    """verl's idea of a device, on the processor."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # only by name: a machine whose GPU is not seen shall not train on its CPU unasked

    def current_device(self) -> Any:
        # verl hands it to Tensor.to() (verl/workers/engine/fsdp/transformer_impl.py:730), where 0 would be "cuda:0"
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # Ray sets it for a worker that holds the resource "GPU"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # A number for Ray's scheduler, no device: verl counts workers by "GPU" or "NPU" only
        # (verl/single_controller/ray/base.py:226), and `+ray_kwargs.ray_init.num_gpus=N` declares them.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register() -> None:
    """Registers the platform under "cpu".

    Raises:
        ConfigError: another platform has that name.
    """
    if free(PlatformRegistry.get("cpu"), CPUPlatform, "cpu", "a platform"):
        PlatformRegistry.register(platform="cpu")(CPUPlatform)
