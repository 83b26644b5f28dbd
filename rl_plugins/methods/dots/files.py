"""Embeddings and adapters on disk: safetensors, or npy without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_plugins import ConfigError, Run
from rl_plugins.core.errors import shortened
from rl_plugins.core.files import read_json, whole, write_text
from rl_plugins.methods.dots.predictor import Adapter

FINGERPRINT = "dataset"  # key of the metadata


def save_embeddings(path: str | Path, embeddings: Any, fingerprint: str) -> None:
    """Writes (prompts, H) embeddings, row i of dataset row i, as .safetensors or .npy.

    Args:
        fingerprint: of the dataset, `rl_plugins.runtime.fingerprint.fingerprint(dataset)`, which a run compares. For
            an .npy file it is saved in a second file with `.json` appended to the name.

    Raises:
        ConfigError: another ending.
    """
    from safetensors.torch import save_file

    path, values = Path(path), torch.as_tensor(embeddings)
    if path.suffix == ".safetensors":
        with whole(path) as part:
            save_file({"embeddings": values.contiguous()}, part, {FINGERPRINT: fingerprint})
    elif path.suffix == ".npy":
        with whole(path) as part:
            np.save(part, values.numpy(), allow_pickle=False)
        write_text(_beside(path), json.dumps({FINGERPRINT: fingerprint}))
    else:
        raise ConfigError(f"the file for embeddings is {shortened(str(path))}; it must end in .safetensors or .npy.")


def load_embeddings(path: str | Path) -> tuple[Any, str | None]:
    """Embeddings, which stay on the disk where the format allows it, and the fingerprint of their dataset, if known.

    Raises:
        ConfigError: no such file, another format, not (prompts, H) numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"`embeddings` is {shortened(str(path))}, and there is no such file. Give a .safetensors or .npy file, or "
            f'a function as "module:attribute" with the module on PYTHONPATH.'
        )
    try:
        if path.suffix == ".npy":
            values: Any = np.load(path, mmap_mode="r", allow_pickle=False)
            note = read_json(_beside(path).read_text()) if _beside(path).exists() else {}
        else:
            from safetensors import safe_open

            with safe_open(path, "pt") as f:
                names, note = list(f.keys()), f.metadata() or {}
                if names != ["embeddings"]:
                    raise ValueError(f"it must hold one tensor, `embeddings`; it has {names[:8]}")
                values = f.get_tensor("embeddings")
    except Exception as e:  # whatever a damaged file makes of its parser
        raise ConfigError(
            f"the embeddings {shortened(str(path))} cannot be read: {type(e).__name__}: {shortened(e)}. Write them "
            f"with `rl_plugins.methods.dots.save_embeddings`."
        ) from e
    return values, note.get(FINGERPRINT)


def checked_embeddings(values: Any, size: int | None, where: str) -> Any:
    """(prompts, H) numbers, one row per row of the dataset.

    Raises:
        ConfigError: another shape or type, or NaN in the first rows.
    """
    if not isinstance(values, (torch.Tensor, np.ndarray)):
        values = np.asarray(values)
    shape = tuple(values.shape)
    real = values.is_floating_point() if isinstance(values, torch.Tensor) else np.issubdtype(values.dtype, np.floating)
    if len(shape) != 2 or not real or (size is not None and shape[0] != size):
        raise ConfigError(
            f"{where} has the shape {shape} of {values.dtype}; floating-point numbers of shape "
            f"({'prompts' if size is None else size}, H) are needed, a row per row of the dataset."
        )
    return values


def save_adapter(path: str | Path, adapter: Adapter) -> None:
    """Writes an adapter as .safetensors."""
    from safetensors.torch import save_file

    tensors = {name: value.contiguous() for name, value in adapter.state_dict().items()}
    with whole(path) as part:
        save_file(tensors, part, {"size": str(adapter.size), "hidden": str(adapter.hidden)})


def load_adapter(path: str | Path, size: int) -> Adapter:
    """An adapter for embeddings of this size.

    Raises:
        ConfigError: no such file, damaged, no adapter, or one for another size.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as f:
            note = f.metadata() or {}
            adapter = Adapter(int(note["size"]), int(note["hidden"]))
            adapter.load_state_dict({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
    except Exception as e:
        raise ConfigError(
            f"the adapter {shortened(str(path))} cannot be read: {type(e).__name__}: {shortened(e)}. Make it with "
            f"`rl-plugins train-adapter`."
        ) from e
    if adapter.size != size:
        raise ConfigError(
            f"the adapter {shortened(str(path))} is for embeddings of {adapter.size} numbers, and those given have "
            f"{size}. Train one for these, or give the embeddings it was trained with."
        )
    return adapter


def embeddings_of(source: str | Callable[..., Any], run: Run) -> tuple[Any, str | None]:
    """The embeddings of a run's dataset from a file or a function of the dataset, and the fingerprint noted with them.

    Raises:
        ConfigError: embeddings of another dataset; see `load_embeddings` and `checked_embeddings`.
    """
    size = run.dataset_size
    if isinstance(source, str):
        values, noted = load_embeddings(source)
        if noted is not None and run.fingerprint and noted != run.fingerprint:
            raise ConfigError(
                f"the embeddings belong to another dataset (fingerprint {noted}, this run's is {run.fingerprint}). "
                f"Embed this dataset."
            )
        return checked_embeddings(values, size, f"`embeddings` ({shortened(source)})"), noted
    try:
        values = source(run.dataset)
    except Exception as e:
        raise ConfigError(f"`embeddings` failed: {type(e).__name__}: {shortened(e)}.") from e
    return checked_embeddings(values, size, "what `embeddings` returned"), None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")
