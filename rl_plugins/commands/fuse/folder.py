"""A model folder with safetensors files, read element by element: no tensor is in memory as a whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from rl_plugins.core.errors import ConfigError, shortened
from rl_plugins.core.files import read_json
from rl_plugins.tools.fusion import Floats, spans

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
COPIED = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "U32": 4,
    "I32": 4,
    "U64": 8,
    "I64": 8,
}  # bytes of an element
INDEX = ".safetensors.index.json"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz")


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor is.

    Attributes:
        file: the safetensors file.
        dtype: as safetensors names it, for example BF16.
        shape: its shape.
        start: byte of the file at which it begins.
        length: how many bytes it has.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def floats(self, span: slice) -> Floats:
        """These elements as float32; the dtype must be one of `FLOATS`."""
        width = FLOATS[self.dtype].itemsize
        raw = bytearray(self.raw(span.start * width, (span.stop - span.start) * width))
        return torch.frombuffer(raw, dtype=FLOATS[self.dtype]).float().numpy()

    def raw(self, start: int, count: int) -> bytes:
        """`count` bytes of the tensor from `start`."""
        with self.file.open("rb") as f:
            f.seek(self.start + start)
            found = f.read(count)
        if len(found) != count:
            raise ConfigError(f"{self.file} became shorter while it was read. Leave the folders alone during a fusion.")
        return found


@dataclass(frozen=True)
class ModelFolder:
    """A model folder.

    Attributes:
        name: of the expert, or "base".
        path: the folder.
        files: its safetensors files, in the order of their names.
        tensors: name -> where it is.
        index: the index of a sharded model, if there is one.
    """

    name: str
    path: Path
    files: Sequence[Path]
    tensors: dict[str, StoredTensor]
    index: Path | None

    @classmethod
    def open(cls, name: str, path: Path) -> ModelFolder:
        """Reads the headers of all files.

        Raises:
            ConfigError: no folder with whole safetensors files, or weights that cannot be fused.
        """
        if not path.is_dir():
            raise ConfigError(
                f"`{name}` is {shortened(str(path))}, which is not a folder. Give a local model folder with "
                f"safetensors files; `hf download NAME --local-dir FOLDER` fetches one."
            )
        files, index, expected = _files(name, path)
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            found = _header(name, file)
            if twice := sorted(set(found) & set(tensors)):
                raise ConfigError(f"`{name}` has the tensor {twice[0]} in two files of {path}. Save the model again.")
            tensors |= found
        if expected is not None and (odd := _not_as_indexed(expected, tensors)):
            raise ConfigError(f"`{name}`: {odd} Copy or save the model {path} again.")
        folder = cls(name, path, files, tensors, index)
        if "quantization_config" in folder.config:
            raise ConfigError(f"`{name}` ({path}) is quantized. Differences of its codes mean nothing. Give the "
                              f"weights before quantization, in bf16, fp16 or fp32.")  # fmt: skip
        return folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json, empty without one."""
        try:
            read = read_json((self.path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}

    @cached_property
    def shared(self) -> dict[str, str]:
        """Tensor -> the first name of the same weights, where a file has tied weights twice.

        Matrices whose bytes are equal are tied, unless they are constant or the config says that nothing is tied.
        """
        if self.config.get("tie_word_embeddings") is False:
            return {}
        alike = defaultdict(list)
        for name, tensor in sorted(self.tensors.items()):
            if len(tensor.shape) > 1 and tensor.dtype in FLOATS and tensor.size:
                alike[tensor.dtype, tensor.shape, tensor.raw(0, min(tensor.length, 4096))].append(name)
        found: dict[str, str] = {}
        for names in alike.values():
            for i, name in enumerate(names[1:], 1):
                first = next((n for n in names[:i] if n not in found and self._equal(n, name)), None)
                if first is not None:
                    found[name] = first
        return found

    def _equal(self, a: str, b: str) -> bool:
        one, two = self.tensors[a], self.tensors[b]
        constant = True
        for span in spans(one.size):
            x = one.floats(span)
            if not np.array_equal(x, two.floats(span)):
                return False
            constant = constant and bool((x == x[0]).all())
        return not constant


def _files(name: str, path: Path) -> tuple[list[Path], Path | None, dict[str, str] | None]:
    if (path / "adapter_config.json").exists():
        raise ConfigError(f"`{name}` ({path}) is a LoRA adapter. Merge it first: peft's `merge_and_unload()`, then "
                          f"`save_pretrained`.")  # fmt: skip
    indices, files = sorted(path.glob(f"*{INDEX}")), sorted(path.glob("*.safetensors"))
    if len(indices) > 1:
        raise ConfigError(f"`{name}` ({path}) has several indices: {', '.join(i.name for i in indices)}. Leave one.")
    if indices:
        try:
            weight_map = read_json(indices[0].read_text(encoding="utf-8"))["weight_map"]
            expected = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"`{name}`: the index {indices[0]} cannot be read ({shortened(e)}). Save the model "
                              f"again.") from e  # fmt: skip
        wanted = sorted(set(expected.values()))
        for file in wanted:
            if Path(file).name != file or not (path / file).is_file():
                raise ConfigError(f"`{name}`: the index {indices[0]} names the file {shortened(file)}, which is not in "
                                  f"that folder. Copy or save the model again.")  # fmt: skip
        return [path / file for file in wanted], indices[0], expected
    if len(files) == 1:
        return files, None, None
    if files:
        raise ConfigError(f"`{name}` ({path}) has {len(files)} safetensors files and no *{INDEX}, so parts of one "
                          f"model cannot be told from several models. Save it with `save_pretrained`.")  # fmt: skip
    other = sorted(f.name for f in path.iterdir() if f.suffix in OTHER_WEIGHTS)
    raise ConfigError(
        f"`{name}` ({path}) has no safetensors file{f', but {shortened(other[0])}' if other else ''}. Only safetensors "
        f"can be fused. Load the model and call `save_pretrained(folder, safe_serialization=True)`."
    )


def _header(name: str, file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(str(file), framework="np") as checked:  # the library checks offsets and lengths
            checked.keys()
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            entries = read_json(f.read(length))
    except (SafetensorError, OSError, ValueError) as e:
        raise ConfigError(
            f"`{name}`: {file} is no whole safetensors file ({shortened(e)}). Copy or save it again."
        ) from e
    entries.pop("__metadata__", None)
    found = {}
    for tensor, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        if entry["dtype"] not in FLOATS and entry["dtype"] not in COPIED:
            raise ConfigError(
                f"`{name}`: {tensor} in {file} has dtype {entry['dtype']}. Weights must be {', '.join(FLOATS)}; "
                f"integers are copied. Save the model in one of these."
            )
        found[tensor] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
    return found


def _not_as_indexed(expected: dict[str, str], tensors: dict[str, StoredTensor]) -> str:
    for tensor, file in expected.items():
        if tensor not in tensors or tensors[tensor].file.name != file:
            return f"the index says that {file} has the tensor {tensor}; the file does not."
    extra = sorted(set(tensors) - set(expected))
    return f"{tensors[extra[0]].file.name} has the tensor {extra[0]}, which the index does not list." if extra else ""
