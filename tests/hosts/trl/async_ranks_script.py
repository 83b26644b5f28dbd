"""The asynchronous trainer in one or more ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import probes
import torch
from async_runs import make_async
from harness import history, weights

CASES = {"ppo": ["ppo"], "sum": ["softmax"], "tokens": ["per_token", "corridor"], "uneven": ["uneven", "ppo"]}


def run(folder: Path) -> dict[str, Any]:
    """Two steps of each case; in the first step of "uneven" one of two ranks has nothing to train."""
    ended = {}
    for name, methods in CASES.items():
        trainer = make_async(folder, methods, max_steps=2, lag=1)
        trainer.train()
        ended[name] = {"weights": weights(trainer), "loss": history(trainer, "loss")}
    return ended


def main(out: Path) -> None:
    """As one of the ranks. The main rank writes {case: weights}."""
    probes.register()
    results = run(out.parent)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(results, out)
