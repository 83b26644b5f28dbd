"""Checkpoints: weights, optimizer, objective and the methods' state, in a folder that appears when it is whole.

A checkpoint is written after a generation batch. Samples, prompts and shuffles follow from the seed and the number of
the batch, so nothing else is state, and a resumed run goes on bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_plugins.core.errors import StateError

WEIGHTS, UNFINISHED = "policy.safetensors", ".writing"


def checkpoints(output_dir: str) -> list[Path]:
    """Whole checkpoints of a run, the oldest first."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if number_of(p) is not None]
    return sorted(found, key=lambda p: number_of(p) or 0)


def number_of(folder: Path) -> int | None:
    """Generation batches before a checkpoint; None for a folder that is none."""
    found = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name)
    return None if found is None else int(found[1])


def begin(output_dir: str, batch: int) -> Path:
    """An empty folder for a checkpoint; `finish` gives it its name."""
    folder = Path(output_dir) / f"checkpoint-{batch}{UNFINISHED}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    save_file({name: p.contiguous().cpu() for name, p in weights.items()}, str(folder / WEIGHTS))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The trained weights of a checkpoint.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        return load_file(str(folder / WEIGHTS))
    except Exception as e:  # what damage makes of a parser is not known beforehand
        raise StateError(
            f"The weights of {folder} cannot be read: {type(e).__name__}: {e}. Resume from another checkpoint."
        ) from e


def finish(folder: Path, keep: int) -> Path:
    """Flushes a checkpoint to the disk, gives it its name, and removes old ones beyond `keep`."""
    for path in [*folder.rglob("*"), folder]:
        with contextlib.suppress(OSError):  # some network file systems cannot
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    named = folder.with_name(folder.name.removesuffix(UNFINISHED))
    shutil.rmtree(named, ignore_errors=True)
    folder.rename(named)
    for old in checkpoints(str(named.parent))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    for cut_off in named.parent.glob(f"checkpoint-*{UNFINISHED}"):
        shutil.rmtree(cut_off, ignore_errors=True)
    return named


def optimizer_to_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with text keys."""
    return {"state": {str(k): v for k, v in state["state"].items()}, "param_groups": state["param_groups"]}


def optimizer_of_plain(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {"state": {int(k): v for k, v in saved["state"].items()}, "param_groups": saved["param_groups"]}
