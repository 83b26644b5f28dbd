"""State of methods on disk: `state.json` for structure and numbers, `state.safetensors` for tensors. No pickle.

The files lie in a folder `rl_plugins/` inside the host's own checkpoint. They are written to a temporary folder that is
renamed, so a crash leaves either the whole state or none, and a checksum ties the two files together.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plugins.errors import StateError

FOLDER = "rl_plugins"
FORMAT = 1
_TENSOR = "__tensor__"  # in state.json, in place of a tensor: its name in state.safetensors


def save_state(checkpoint: str | os.PathLike[str], content: Mapping[str, Any]) -> Path:
    """Writes `content` (nested dicts with text keys, lists, numbers, text, tensors) into a checkpoint folder.

    Raises:
        StateError: something in it is not plain data; names the place.
    """
    from safetensors.torch import save

    tensors: dict[str, Any] = {}
    structure = _flatten(content, "", tensors)
    data = save({k: v.contiguous() for k, v in tensors.items()})
    folder = Path(checkpoint) / FOLDER
    scratch = folder.with_name(f"{FOLDER}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "state.safetensors").write_bytes(data)
    header = {"format": FORMAT, "sha256": hashlib.sha256(data).hexdigest(), "content": structure}
    (scratch / "state.json").write_text(json.dumps(header, indent=1))
    before = folder.with_name(f"{FOLDER}.before")  # a folder that is half removed must not bear the name
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        folder.rename(before)
    scratch.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
    return folder


def load_state(checkpoint: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What `save_state` wrote, or None if the checkpoint has no such folder.

    Raises:
        StateError: a file is missing, unreadable, or does not belong to the other.
    """
    from safetensors.torch import load

    folder = Path(checkpoint) / FOLDER
    if not folder.exists():
        return None
    try:
        header = json.loads((folder / "state.json").read_text())
        data = (folder / "state.safetensors").read_bytes()
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, this version of rl-plugins reads {FORMAT}")
        if hashlib.sha256(data).hexdigest() != header["sha256"]:
            raise ValueError("state.safetensors is not the file that was written with state.json")
        tensors = load(data)
        restored: dict[str, Any] = _restore(header["content"], tensors)
        return restored
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StateError(
            f"The state of the methods in {folder} cannot be read: {type(e).__name__}: {e}. Resume from an older "
            f"checkpoint. Nothing was trained or overwritten."
        ) from e


def _flatten(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        name = f"{len(tensors)}:{path}"  # two places may have one path: keys can contain dots
        tensors[name] = value.detach().cpu().clone()
        return {_TENSOR: name}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_flatten(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise StateError(
                    f"The state at `{path}` has the key {key!r} ({type(key).__name__}); keys must be text."
                )
            if key == _TENSOR:
                raise StateError(f"The state at `{path}` has the key {key!r}, which is reserved; rename it.")
        return {k: _flatten(v, f"{path}.{k}" if path else k, tensors) for k, v in value.items()}
    raise StateError(
        f"The state at `{path}` is a {type(value).__name__}; it must be numbers, text, lists, dicts and tensors."
    )


def _restore(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {k: _restore(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore(v, tensors) for v in value]
    return value


def copy_plain(value: Any) -> Any:
    """A copy of plain state data that later changes do not reach."""
    if hasattr(value, "clone"):
        return value.clone()
    if isinstance(value, dict):
        return {k: copy_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_plain(v) for v in value]
    return value
