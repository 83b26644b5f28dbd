"""Writes a fused model into a folder that appears when it is whole."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from rl_plugins.commands.fuse.folder import FLOATS, ModelFolder, StoredTensor
from rl_plugins.commands.fuse.plan import FusionPlan
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import whole_folder
from rl_plugins.tools.fusion import Floats, TensorFusion, delta, spans


@dataclasses.dataclass
class Told:
    """What one expert brought, over all tensors."""

    squares: float = 0.0
    survivors: int = 0


def write(plan: FusionPlan, progress: Callable[[int], None] = lambda _: None) -> tuple[dict[str, Told], list[str]]:
    """Writes the fused model into a hidden folder and renames that when it is whole.

    Returns:
        What each expert brought, and the tensors of integers that differ between base and experts.
    """
    told = {expert.name: Told() for expert in plan.experts}
    differing: list[str] = []
    with whole_folder(plan.out) as hidden:
        for file in plan.base.files:
            _write_file(plan, file, hidden / file.name, told, differing, progress)
        for path in [*plan.copied, *([plan.base.index] if plan.base.index else [])]:
            shutil.copyfile(path, hidden / path.name)
        (hidden / "fusion.json").write_text(json.dumps(_provenance(plan), indent=2) + "\n", encoding="utf-8")
    return told, differing


def _provenance(plan: FusionPlan) -> dict[str, object]:
    return {"experts": [expert.name for expert in plan.experts], **dataclasses.asdict(plan.rule)}


def _write_file(
    plan: FusionPlan,
    source: Path,
    target: Path,
    told: dict[str, Told],
    differing: list[str],
    progress: Callable[[int], None],
) -> None:
    """One file of the base with the same header and other numbers."""
    tensors = {name: tensor for name, tensor in plan.base.tensors.items() if tensor.file == source}
    begin = min((tensor.start for tensor in tensors.values()), default=source.stat().st_size)
    with source.open("rb") as old, target.open("wb") as new:
        new.write(old.read(begin))
        for name, tensor in tensors.items():
            if tensor.dtype in FLOATS:
                _write_fused(plan, name, new, told, progress)
            else:
                _copy(tensor, new, progress)
                if any(_differs(tensor, expert.tensors[name]) for expert in plan.experts):
                    differing.append(name)
        new.flush()
        os.fsync(new.fileno())


def _write_fused(
    plan: FusionPlan, name: str, new: BinaryIO, told: dict[str, Told], progress: Callable[[int], None]
) -> None:
    base = plan.base.tensors[name]
    deltas = {expert.name: _delta(name, expert, base) for expert in plan.experts}
    fusion = TensorFusion(deltas, plan.rule, plan.base.shared.get(name, name))  # tied weights get the same dropout
    dtype = FLOATS[base.dtype]
    for span in spans(base.size):
        fused = torch.from_numpy(fusion.added(start := base.floats(span), span)).to(dtype)
        if not bool((torch.isfinite(fused) | torch.from_numpy(~np.isfinite(start))).all()):
            raise ConfigError(
                f"the fused tensor {name} has numbers beyond the range of {base.dtype}. Nothing was written. Look at "
                f"--normalize and --keep, or save the base in BF16 or F32."
            )
        new.write(fused.view(torch.uint8).numpy().tobytes())
        progress(len(fused) * dtype.itemsize)
    for expert, norm in fusion.norms.items():
        told[expert].squares += norm**2
        told[expert].survivors += fusion.survivors[expert]


def _delta(name: str, expert: ModelFolder, base: StoredTensor) -> Floats:
    found = np.empty(base.size, np.float32)
    for span in spans(base.size):
        found[span] = delta(expert.tensors[name].floats(span), base.floats(span))
        if not np.isfinite(found[span]).all():
            raise ConfigError(
                f"the tensor {name} of `{expert.name}` or of the base has numbers that are not finite. Nothing was "
                f"written. Look at the training run of `{expert.name}`."
            )
    return found


def _copy(tensor: StoredTensor, new: BinaryIO, progress: Callable[[int], None]) -> None:
    for span in spans(tensor.length):
        new.write(tensor.raw(span.start, span.stop - span.start))
        progress(span.stop - span.start)


def _differs(a: StoredTensor, b: StoredTensor) -> bool:
    return any(a.raw(s.start, s.stop - s.start) != b.raw(s.start, s.stop - s.start) for s in spans(a.length))
