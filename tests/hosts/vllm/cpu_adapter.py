"""What vLLM 0.30 on a CPU lacks for reinforcement learning, added from outside. On a GPU nothing of this is needed.

1. After loading, vLLM packs the weights of linear layers for the CPU and drops the originals: weights loaded later
   raise, or are ignored without a word. `keep_plain_weights` leaves the layers as they are.
2. A server takes new weights over NCCL only. The backend `file` reads them from a safetensors file instead.

The server's processes load this module as a vLLM plugin (entry point `vllm.general_plugins`, see conftest.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def keep_plain_weights() -> None:
    """Linear layers multiply by their own weight, so that loading into it takes effect. Call before a model is made."""
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def register() -> None:
    """The vLLM plugin: plain weights, and the weight-transfer backend `file`."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    keep_plain_weights()
    if "file" in WeightTransferEngineFactory._registry:
        return

    @dataclass
    class Nothing:
        pass

    @dataclass
    class File:
        path: str

    class FileWeights(WeightTransferEngine):
        init_info_cls, update_info_cls = Nothing, File

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # the base class waits for an accelerator

        def receive_weights(self, update_info: File) -> None:
            self.model.load_weights(load_file(update_info.path).items())

        def init_transfer_engine(self, init_info: Nothing) -> None: ...

        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None: ...

    WeightTransferEngineFactory.register_engine("file", FileWeights)


def file_client(path: Path) -> dict[str, Callable[..., None]]:
    """Methods for TRL's `VLLMClient` that send weights through the file `path`."""

    def init_communicator(self: Any, device: Any = None) -> None:
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(self: Any, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        save_file({name: value.detach().contiguous() for name, value in named_params}, path)
        self._start_weight_update()
        self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": str(path)}})
        self._finish_weight_update()

    return {"init_communicator": init_communicator, "update_named_params": update_named_params}
