"""Weight transfer "cpu_file" for trainers with rollout replicas of their own: one safetensors file per transfer.

verl's own engines need a GPU or a network library. All processes must see the same temporary directory.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from rl_plugins.verl.compat import checkpoint_engine
from rl_plugins.verl.cpu import CHECKPOINT_ENGINE, free

POLL_SECONDS = 0.05


class FileCheckpointEngine(CheckpointEngine):
    """Rank 0 of the actor writes, every rollout worker reads, rank 0 deletes.

    For each transfer verl calls prepare, build_topology, init_process_group, then send_weights and receive_weights at
    the same time, then finalize.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, folder: str | None = None) -> None:
        """`folder` (checkpoint_engine.engine_kwargs.cpu_file.folder) is where the file goes; else memory, else disk."""
        self.is_master = is_master
        memory = Path("/dev/shm")
        self.folder = Path(folder or (memory if os.access(memory, os.W_OK) else tempfile.gettempdir()))
        self.path: Path | None = None

    def prepare(self) -> dict[str, Any]:
        return {"path": str(self.folder / f"verl-weights-{uuid.uuid4().hex}.safetensors")}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        path = metadata[0]["path"]
        return {"path": [path] * actor_wg_world_size}, {"path": [path] * rollout_world_size}

    def init_process_group(self, path: str) -> None:
        self.path = Path(path)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        # Every rank reads to the end: the generator gathers shards, which all ranks must take part in.
        named = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}
        if not self.is_master:
            return {}
        assert self.path is not None
        unfinished = self.path.with_suffix(".writing")
        save_file(named, unfinished)
        unfinished.replace(self.path)  # a reader sees the whole file or none
        return {"cpu_file/megabytes": sum(tensor.nbytes for tensor in named.values()) / 2**20}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        assert self.path is not None
        while not self.path.exists():
            await asyncio.sleep(POLL_SECONDS)
        for name, tensor in load_file(self.path).items():
            yield name, tensor

    def finalize(self) -> None:
        if self.is_master and self.path is not None:
            self.path.unlink(missing_ok=True)


def _register() -> None:
    if free(checkpoint_engine(CHECKPOINT_ENGINE), FileCheckpointEngine, CHECKPOINT_ENGINE, "a checkpoint engine"):
        CheckpointEngineRegistry.register(CHECKPOINT_ENGINE)(FileCheckpointEngine)


_register()
