"""State of methods on disk: `state.json` for structure and numbers, `state.safetensors` for tensors. No pickle.

The files are in a folder `rl_plugins/` inside the host's own checkpoint. One checksum at the head of `state.json`
covers every byte behind it, and among those the checksum of the tensors, so damage of either file is seen before
anything is read out of them.

A save writes a new folder next to the old one, flushes it to the disk and renames it. A crash at any point leaves the
old state or the new one. Between the two renames neither has its name; loading then finds them under
`rl_plugins.writing` (the newer one) and `rl_plugins.before`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import StateError, shortened, shown
from rl_plugins.core.version import full_version

logger = logging.getLogger("rl_plugins")

FOLDER = "rl_plugins"
WRITING, BEFORE = f"{FOLDER}.writing", f"{FOLDER}.before"
FORMAT = 3
WRITER = "written_by"
"""In the content of a run's state: the version of rl-plugins that wrote it."""
LARGEST = 10**4000  # whole number; Python reads none of more than 4,300 digits
MAX_DEPTH = 100  # of nested lists and dicts; a file within it can be read wherever in a program that is done
_DTYPES = re.compile(r"torch\.(bool|complex64|b?float(8|16|32|64)\w*|u?int(8|16|32|64))")  # that safetensors has
_TENSOR = "__tensor__"  # in state.json, in place of a tensor: its dtype, its start among those, its shape
_HEAD = '{\n "format": %d,\n "sha256": "%s",\n'  # of state.json; the checksum is that of all bytes behind
_HEAD_READ = re.compile(rb'\{\n "format": (\d+),\n "sha256": "([0-9a-f]{64})",\n')


def save_state(checkpoint: str | os.PathLike[str], content: Mapping[str, Any]) -> Path:
    """Writes `content` (nested dicts with text keys, lists, numbers, text, tensors) into a checkpoint folder.

    Raises:
        StateError: something in it is not plain data; names the place. What was saved before is left alone.
    """
    files = _encode(content)
    folder = Path(checkpoint) / FOLDER
    scratch, before = folder.with_name(WRITING), folder.with_name(BEFORE)
    if not folder.exists():  # what is found now must be found until the new state is
        found = next((f for f in (scratch, before) if f.exists() and _is_whole(f)), None)
        if found is not None:
            os.rename(found, folder)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, data in files.items():
        _write(scratch / name, data)
    _flush_folder(scratch)
    shutil.rmtree(before, ignore_errors=True)  # a folder that is half removed must not bear the name
    if folder.exists():
        os.rename(folder, before)
    os.rename(scratch, folder)
    _flush_folder(folder.parent)
    shutil.rmtree(before, ignore_errors=True)
    return folder


def load_state(checkpoint: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What `save_state` wrote last, or None if the checkpoint has no such folder, or only the beginning of a first one.

    Raises:
        StateError: a file is missing, unreadable, damaged, or does not belong to the other.
    """
    folder = Path(checkpoint) / FOLDER
    if folder.exists():
        return _read(folder)
    for name in (WRITING, BEFORE):
        found = folder.with_name(name)
        if found.exists() and _is_whole(found):
            logger.warning("A save was cut off: %s is missing, the state is read from %s.", folder, name)
            return _read(found)
    if folder.with_name(BEFORE).exists():
        raise StateError(
            f"The state of the methods in {folder} is missing, and what an interrupted save left next to it, {BEFORE}, "
            f"is not whole. {_ANOTHER}"
        )
    return None


_ANOTHER = (
    "Resume from another checkpoint, or start a new run from this one's weights. Nothing was trained or overwritten."
)


def other_version(content: Any) -> str:
    """The end of a message for a state that this version of rl-plugins cannot take over: who wrote it, and both ways
    on."""
    found = content.get(WRITER) if isinstance(content, Mapping) else None
    who, that = f"rl-plugins {shortened(found, 40)}" if isinstance(found, str) else "an earlier rl-plugins", "version"
    if found == full_version():
        who, that = "another commit of rl-plugins with the same number, or it was edited", "commit"
    return (
        f"It was written by {who}; this is rl-plugins {full_version()}. Resume with the {that} that wrote it, or start "
        f"a new run from the weights of the checkpoint. Nothing was trained or overwritten."
    )


def _encode(content: Mapping[str, Any]) -> dict[str, bytes]:
    """The files, name -> bytes."""
    from safetensors.torch import save

    tensors = _Tensors()
    structure = _flatten(content, "", tensors)
    try:
        data = save(tensors.joined())
        body = {"safetensors_sha256": hashlib.sha256(data).hexdigest(), "content": structure}
        text = json.dumps(body)[len("{") :].encode()
    except Exception as e:  # whatever safetensors says of a tensor, or json of a number
        raise StateError(f"The state cannot be written: {type(e).__name__}: {e}.") from e
    head = _HEAD % (FORMAT, hashlib.sha256(text).hexdigest())
    return {"state.safetensors": data, "state.json": head.encode() + text}


def _read(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load

    try:
        raw = (folder / "state.json").read_bytes()
        data = (folder / "state.safetensors").read_bytes()
        head = _HEAD_READ.match(raw)
        if head is None or int(head[1]) != FORMAT:
            written = json.loads(raw)
            if isinstance(written, dict) and written.get("format", FORMAT) != FORMAT:
                raise _other_format(folder, written)
            raise ValueError("state.json was not written by rl-plugins, or was edited")
        if hashlib.sha256(raw[head.end() :]).hexdigest() != head[2].decode():
            raise ValueError("state.json is not as it was written: its checksum differs")
        body = json.loads(raw)
        if hashlib.sha256(data).hexdigest() != body["safetensors_sha256"]:
            raise ValueError("state.safetensors is not the file that was written with state.json")
        restored: dict[str, Any] = _restore(body["content"], load(data))
        return restored
    except StateError:
        raise
    except Exception as e:  # what damage makes of a parser is not known beforehand
        raise StateError(
            f"The state of the methods in {folder} cannot be read: {type(e).__name__}: {e}. {_ANOTHER}"
        ) from None


def _other_format(folder: Path, written: Mapping[str, Any]) -> StateError:
    return StateError(
        f"The state of the methods in {folder} has the format {shown(written['format'], 40)}, and this version reads "
        f"format {FORMAT}. {other_version(written.get('content'))}"
    )


def _is_whole(folder: Path) -> bool:
    try:
        _read(folder)
    except StateError:
        return False
    return True


def _write(path: Path, data: bytes) -> None:
    """A file whose bytes are on the disk when this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        rest = memoryview(data)
        while rest:  # one call writes 2 GiB at most
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_folder(folder: Path) -> None:
    """The names in a folder are on the disk when this returns; some network file systems cannot, and refuse."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class _Tensors:
    """Tensors of a state, those of a dtype one behind the other: a queue has ten thousands of small ones. The same
    object in several places is written once."""

    def __init__(self) -> None:
        self._of: dict[str, list[Any]] = {}
        self._length: dict[str, int] = {}
        self._place: dict[int, tuple[Any, list[Any]]] = {}  # id -> the tensor, so that it stays, and its place

    def place(self, value: Any) -> list[Any]:
        """Where `value` is found again."""
        if id(value) not in self._place:
            dtype = str(value.dtype).removeprefix("torch.")
            start = self._length.get(dtype, 0)
            self._of.setdefault(dtype, []).append(value.detach().cpu().reshape(-1))
            self._length[dtype] = start + value.numel()
            self._place[id(value)] = value, [dtype, start, list(value.shape)]
        return self._place[id(value)][1]

    def joined(self) -> dict[str, Any]:
        import torch

        return {dtype: torch.cat(parts) for dtype, parts in self._of.items()}


def _flatten(value: Any, path: str, tensors: _Tensors) -> Any:
    return _plain(value, path, lambda x: {_TENSOR: tensors.place(x)})


def _plain(value: Any, path: str, tensor: Callable[[Any], Any], depth: int = 0) -> Any:
    """A copy of what can be saved, with something else in place of each tensor.

    Raises:
        StateError: something in it cannot be saved; names the place.
    """
    import numpy as np
    import torch

    if depth > MAX_DEPTH:
        raise StateError(f"The state at `{path[:60]}` is nested deeper than {MAX_DEPTH} levels, or contains itself.")
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_meta or not _DTYPES.fullmatch(str(value.dtype)):
            kind = "nested" if value.is_nested else f"{value.dtype}, {value.layout}, on {value.device}"
            raise StateError(f"The state at `{path}` is a tensor that cannot be saved ({kind}); keep a dense one.")
        return tensor(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        if abs(value) >= LARGEST:
            raise StateError(f"The state at `{path}` is {shown(value)}; a number of that size cannot be read again.")
        return value
    if isinstance(value, (list, tuple)):
        return [v if _scalar(v) else _plain(v, f"{path}.{i}", tensor, depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise StateError(
                    f"The state at `{path}` has the key {shown(key)} ({type(key).__name__}); keys must be text."
                )
            if key == _TENSOR:
                raise StateError(f"The state at `{path}` has the key {key!r}, which is reserved; rename it.")
        return {
            k: v if _scalar(v) else _plain(v, f"{path}.{k}" if path else k, tensor, depth + 1) for k, v in value.items()
        }
    raise StateError(
        f"The state at `{path}` is a {type(value).__name__}; it must be numbers, text, lists, dicts and tensors."
    )


def _scalar(value: Any) -> bool:
    """Whether it is a number or a text that can be saved, as nearly all of a large state are."""
    kind = type(value)
    return kind is float or kind is str or (kind is int and -(2**63) <= value < 2**63)


def _restore(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            dtype, start, shape = value[_TENSOR]
            return tensors[dtype][start : start + math.prod(shape)].reshape(shape)
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


def snapshot(value: Any, path: str = "") -> Any:
    """As `copy_plain`, but the bytes of a tensor are copied only when somebody writes to it: torch notices that, in
    whichever of its functions it happens, also through views and through `numpy()` called afterwards. A tensor whose
    memory torch does not own (`from_numpy`) is copied at once. Lists and dicts are copied.

    Args:
        path: of the value in the state.

    Raises:
        StateError: something in it cannot be saved; names the place.
    """
    return _plain(value, path, _copied_on_write)


def _copied_on_write(value: Any) -> Any:
    import torch

    try:
        return torch._lazy_clone(value.detach())
    except (AttributeError, RuntimeError):  # an older torch has no such function; memory that torch does not own
        return value.clone()
