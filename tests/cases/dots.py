"""`dots` in the contract test."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from cases import Case, Effects
from rl_plugins.methods.dots import save_adapter
from rl_plugins.methods.dots.predictor import Adapter
from rl_plugins.testing.contract.effects import World

PARAMS: dict[str, Any] = {
    "embeddings": lambda data: [[math.sin(i + 2.0 * j) for j in range(4)] for i in range(16)],
    "references": 4,
}


def adapter(folder: Path) -> dict[str, list[Any]]:
    """A file of another adapter."""
    torch.manual_seed(0)
    save_adapter(folder / "adapter.safetensors", Adapter(4, 8))
    return {"adapter": [str(folder / "adapter.safetensors")]}


CASE = Case(
    params=PARAMS,
    effects=Effects(
        World(),
        {"embeddings": [lambda data: [[math.cos(3.0 * i + j) for j in range(4)] for i in range(16)]], "adapter": []},
        params=PARAMS,
        files=adapter,
    ),
)
