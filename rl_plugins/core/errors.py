"""Errors of rl-plugins. Each message says what was given, what is allowed, and what to change."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

LONGEST = 200  # characters of a value that a message repeats
_DEEPEST = 6  # levels of a nested value that a message shows
_LONGEST_NAME = 100  # names above it are like no other; comparing them takes its time


class RLPluginsError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(RLPluginsError, ValueError):
    """Something the user named cannot take effect: a method, a parameter, a host option. Raised before training."""


class MethodError(RLPluginsError, RuntimeError):
    """A hook of a method failed or returned something illegal; names the method, the hook and the way to disable it."""


class RunStopped(MethodError):
    """A method ended the run as its parameters say: nothing failed in it."""


class StateError(RLPluginsError, RuntimeError):
    """Saved method state is missing, corrupt or belongs to another run. Nothing was trained or overwritten."""


_EXTRAS = {
    "trl": ("trl", "transformers", "tokenizers", "huggingface_hub", "datasets", "accelerate", "peft", "platformdirs"),
    "verl": ("verl", "hydra", "omegaconf", "ray", "transfer_queue", "tensordict", "orjson"),
    "vllm": ("vllm",),
    "plot": ("matplotlib",),
    "diffusion": ("diffusers", "PIL"),
    "real": ("reasoning_gym",),
}
"""Extra of this package -> the modules that it brings."""


def missing_package(error: ImportError) -> str:
    """Says that a host or an extra is not installed, and how to install it; empty for any other error. A module that
    the user's own code lacks is none of these: its traceback says where."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in _EXTRAS.items() if module in modules), "")
    if not extra or _is_installed(module):
        return ""
    named = next(m for m in (_EXTRAS[extra][0], module) if not _is_installed(m))  # verl sooner than what it brings
    return f"{named} is not installed. Install it: {pip_command(extra)}"


def pip_command(extra: str) -> str:
    """The command that installs what an extra of this package asks for. It names the packages: it is right wherever
    this package came from, and an index need not have it."""
    return f"pip install {shlex.join(_requirements(extra))}"


def _requirements(extra: str) -> list[str]:
    found: list[str] = []
    for line in importlib.metadata.requires("rl-plugins") or ():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker):
            continue
        others = re.match(r"rl-plugins\[([\w,-]+)\]", requirement)
        found += [r for other in others[1].split(",") for r in _requirements(other)] if others else [requirement]
    return list(dict.fromkeys(found))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # `sys.modules` has None for it
        return False


@contextlib.contextmanager
def told(problems: list[str]) -> Iterator[None]:
    """Keeps the text of a ConfigError, so that all problems are told at once."""
    try:
        yield
    except ConfigError as e:
        problems.append(str(e))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean `a` or `b`?' for the nearest names, else an empty text. Names that begin with the given one and an
    underscore come first: `model` means `model_name_or_path` sooner than `delta`."""
    if len(name) > _LONGEST_NAME:
        return ""
    name = name.lower().replace("-", "_")
    names = list(known)
    near = sorted(n for n in names if n.startswith(f"{name}_"))[:3]
    near = near or nearest(name, names)[:3]
    return f" Did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else ""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The known words that are like a word, the nearest first. Of words with as many letters in its order those come
    first that have its letters in any order: `gpdo` is `gdpo` sooner than `hgpo`."""
    found = []
    matcher = difflib.SequenceMatcher(b=word)
    for other in known:
        matcher.set_seq1(other)
        if matcher.quick_ratio() >= cutoff and matcher.ratio() >= cutoff:
            found.append((-matcher.ratio(), -matcher.quick_ratio(), other))
    return [other for _, _, other in sorted(found)]


def printable(text: str) -> str:
    """A text from outside as a terminal may show it: control characters, of escape sequences too, as Python writes
    them (`\\x1b`). Line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def shown(value: Any, length: int = LONGEST) -> str:
    """`value` as a message may repeat it: its `repr`, cut. Large, deep and circular values take no time, and one whose
    `repr` raises is named by its type."""
    return shortened(_shown(value, length, _DEEPEST), length)


def shortened(text: Any, length: int = LONGEST) -> str:
    """A text, or what an exception says, cut and `printable`."""
    if not isinstance(text, str):
        try:
            text = str(text)
        except Exception:  # an exception of somebody else whose text cannot be had
            text = f"<{type(text).__name__} whose text cannot be made>"
    return printable(text if len(text) <= length else f"{text[:length]} [cut]")


def _shown(value: Any, room: int, depth: int) -> str:
    """As `repr`, but of about `room` characters at most; what is beyond them is not looked at."""
    if isinstance(value, (str, bytes)):
        return repr(value[: room + 1])
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to write those of thousands of digits
        return f"a whole number of about {value.bit_length() * 3 // 10} digits"
    if type(value) not in (dict, list, tuple, set, frozenset) or not value:
        try:
            return repr(value)
        except Exception as e:
            return f"<{type(value).__name__} whose repr raises {type(e).__name__}>"
    parts: list[str] = []
    left = room if depth else 0
    for entry in value.items() if isinstance(value, Mapping) else value:
        if left <= 0:
            parts.append("[cut]")
            break
        pair = entry if isinstance(value, Mapping) else (entry,)
        parts.append(": ".join(_shown(part, left, depth - 1) for part in pair))
        left -= len(parts[-1]) + 2
    text = ", ".join(parts)
    if isinstance(value, list):
        return f"[{text}]"
    if isinstance(value, tuple):
        return f"({text},)" if len(value) == 1 else f"({text})"
    return f"frozenset({{{text}}})" if isinstance(value, frozenset) else f"{{{text}}}"
