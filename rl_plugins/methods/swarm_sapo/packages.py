"""What nodes send each other: a question, its columns and the completions as text; and what is accepted of it.

A file holds one package per line, as JSON:

    {"id": "..", "prompt": .., "columns": {..}, "completions": ["..", ..], "finished": [true, ..]}

`id` is the hash of prompt and columns. The name of the file is `NODE.BATCH.HASH.jsonl`; HASH is that of its bytes, so a
file that is not whole is seen. Nothing in a file is trusted: it is text of somebody else, read as JSON and as nothing
more, and it has no field for rewards.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins import ConfigError
from rl_plugins.core.requests import Chat
from rl_plugins.core.rollouts import Completion, Run
from rl_plugins.kit.texts import normalized
from rl_plugins.methods.swarm_sapo.exchange import is_plain

NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_FILE = re.compile(rf"({NODE.pattern})\.(\d{{8}})\.([0-9a-f]{{16}})\.jsonl")
_SAMPLES = 64  # rows of the own dataset that say what columns hold
_INSIDE = 16  # entries of a list that say what it holds


@dataclass(frozen=True)
class Package:
    """One question with its completions.

    Args:
        prompt: a text, or a list of messages.
        columns: the other columns of its dataset row.
        completions: as text, without special tokens.
        finished: of each, False if it was cut off.
    """

    prompt: Any
    columns: Mapping[str, Any]
    completions: tuple[str, ...]
    finished: tuple[bool, ...]

    @property
    def id(self) -> str:
        """Hash of the question: prompt and columns."""
        return question_id(self.prompt, self.columns)

    def line(self) -> str:
        """The package as a line of a file.

        Raises:
            ValueError: a column is no plain data (or a number is not finite), or a text is no Unicode.
        """
        fields = {"completions": list(self.completions), "finished": list(self.finished)}
        return _written({"id": self.id, "prompt": self.prompt, "columns": dict(self.columns), **fields})


@dataclass(frozen=True)
class PackageLimits:
    """What is read of others.

    Args:
        characters: of a completion, and of prompt and columns together.
        completions: of a package.
    """

    characters: int
    completions: int


class Refused(ValueError):
    """A package that is not accepted. Its text is the reason, in a few words for a warning."""


class Schema:
    """What prompts and columns look like here, read off rows of the own dataset: a foreign question must look alike,
    because reward functions of this run read its columns.

    Args:
        rows: of the dataset.
        prompt: the column of the prompt.
        columns: those that make a question together with the prompt.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], prompt: str, columns: Iterable[str]) -> None:
        self.columns = tuple(columns)
        prompts = [plain(row[prompt]) for row in rows]
        self._prompts = _of_each_kind(prompts)
        self._values = {name: _of_each_kind([plain(row[name]) for row in rows]) for name in self.columns}
        messages = [p for p in prompts if isinstance(p, list)]
        self._roles = {m.get("role") for p in messages for m in p if isinstance(m, dict)}

    def check(self, package: Package) -> None:
        """Raises Refused for a question that does not look like one of this dataset."""
        if not fits(package.prompt, self._prompts):
            raise Refused("another kind of prompt")
        if isinstance(package.prompt, list):
            roles = {m.get("role") for m in package.prompt if isinstance(m, dict)}
            if not package.prompt or not roles <= self._roles:
                raise Refused("another role in the prompt")
        if set(package.columns) != set(self.columns):
            raise Refused("other columns")
        if not all(fits(value, self._values[name]) for name, value in package.columns.items()):
            raise Refused("another kind of value in a column")


def schema_of(run: Run, prompt: str) -> Schema:
    """What the own dataset looks like.

    Raises:
        ConfigError: a column that no exchange can carry.
    """
    rows = (
        [dict(run.dataset[i]) for i in range(min(run.dataset_size or 0, _SAMPLES))] if run.dataset is not None else []
    )
    first = rows[0] if rows else {}
    made = ("raw_prompt", "dummy_tensor", "index", "tools_kwargs", "interaction_kwargs")  # what verl adds to a row
    left_out = {prompt, *(made if "raw_prompt" in first else ())}
    columns = [c for c in first if c not in left_out and (c in run.columns or not run.columns)]
    for name in columns:
        try:
            Package("", {name: [plain(row[name]) for row in rows]}, (), ()).line()
        except ValueError as e:
            raise ConfigError(
                f"The dataset column `{name}` cannot be exchanged as JSON ({e}). Remove it from the dataset, or make "
                f"it text or numbers."
            ) from None
    return Schema(rows, prompt, columns)


def fits(value: Any, samples: Sequence[Any]) -> bool:
    """Whether a value is of a kind that one of the samples is: text, true or false, a finite number of 64 bits, none, a
    list of such values, or a mapping with the same keys."""
    same = [s for s in samples if _kind(s) == _kind(value)]
    if not same:
        return False
    if isinstance(value, list):
        inside = [x for s in same for x in s[:_INSIDE]]
        return all(fits(v, inside) for v in value)
    if isinstance(value, dict):
        alike = [s for s in same if s.keys() == value.keys()]
        return bool(alike) and all(fits(v, [s[k] for s in alike]) for k, v in value.items())
    if _kind(value) == "number":
        return abs(value) < 2**63 and math.isfinite(value)
    return True


def _of_each_kind(samples: Sequence[Any]) -> list[Any]:
    """One sample of each simple kind; all lists and mappings."""
    simple = {_kind(s): s for s in samples if not isinstance(s, (list, dict))}
    return [*simple.values(), *(s for s in samples if isinstance(s, (list, dict)))]


def _kind(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number"
    return type(value).__name__


def plain(value: Any) -> Any:
    """A value of a dataset as JSON has it: arrays and numbers of numpy become lists and numbers."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def question_id(prompt: Any, columns: Mapping[str, Any]) -> str:
    """Hash of a question: 32 hexadecimal digits of the SHA-256 of its JSON, keys sorted.

    Raises:
        ValueError: it is no plain data, or a text in it is no Unicode.
    """
    return hashlib.sha256(_written([prompt, columns]).encode()).hexdigest()[:32]


def _written(value: Any) -> str:
    """Canonical JSON in one line.

    Raises:
        ValueError: not plain data, a number that is not finite, text with half of a character, too deeply nested.
    """
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
        return text
    except (TypeError, RecursionError) as e:
        raise ValueError(str(e)) from None


# ---- files


def file_name(node: str, batch: int, data: bytes) -> str:
    """The name of a file with these bytes."""
    return f"{node}.{batch:08d}.{_digest(data)}.jsonl"


def sender_of(name: Any) -> str | None:
    """The node that a file is from, as its name says; None for a file that is none of ours."""
    found = _FILE.fullmatch(name) if is_plain(name) else None
    return found[1] if found else None


def batch_of(name: str) -> int:
    """The batch of its sender that a file is from. Of two packages, the one with the larger number is newer.

    Raises:
        ValueError: the file is none of ours.
    """
    found = _FILE.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is no file of packages")
    return int(found[2])


def is_whole(name: str, data: bytes) -> bool:
    """Whether these are the bytes that the name tells of."""
    found = _FILE.fullmatch(name)
    return found is not None and found[3] == _digest(data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def written_files(node: str, batch: int, packages: Iterable[Package], most: int) -> dict[str, bytes]:
    """Packages as files of at most `most` bytes each, name -> bytes. A package that is too long for a file, or cannot
    be written, is left out."""
    parts: list[bytes] = []
    for package in packages:
        try:
            line = package.line().encode() + b"\n"
        except ValueError:
            continue
        if len(line) > most:
            continue
        if parts and len(parts[-1]) + len(line) <= most:
            parts[-1] += line
        else:
            parts.append(line)
    return {file_name(node, batch, data): data for data in parts}


def read_packages(data: bytes, schema: Schema, limits: PackageLimits) -> tuple[list[Package], Counter[str]]:
    """The packages of a file that are accepted, and how many were refused for which reason."""
    found, refused = [], Counter[str]()
    for line in data.split(b"\n"):
        if line.strip():
            try:
                found.append(read_package(line, schema, limits))
            except Refused as e:
                refused[str(e)] += 1
    return found, refused


def read_package(line: bytes | str, schema: Schema, limits: PackageLimits) -> Package:
    """The package of a line.

    Raises:
        Refused: the line holds no package, its id is wrong, it is too large, or it does not fit this run.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise Refused("no JSON") from None
    wanted = {"id": str, "columns": dict, "completions": list, "finished": list}
    if not isinstance(fields, dict) or not all(isinstance(fields.get(k), kind) for k, kind in wanted.items()):
        raise Refused("a field is missing")
    completions, finished = fields["completions"], fields["finished"]
    if len(completions) != limits.completions or len(finished) != limits.completions:
        raise Refused("another number of completions")
    if not all(isinstance(c, str) for c in completions) or not all(isinstance(f, bool) for f in finished):
        raise Refused("a completion is no text")
    if max(map(len, completions), default=0) > limits.characters:
        raise Refused("a completion is too long")
    package = Package(fields.get("prompt"), fields["columns"], tuple(completions), tuple(finished))
    try:
        question = _written([package.prompt, package.columns])
        _written(completions)
    except ValueError:
        raise Refused("no plain text") from None
    if len(question) > limits.characters:
        raise Refused("the question is too long")
    if package.id != fields["id"]:
        raise Refused("the id is not that of the question")
    try:
        schema.check(package)
    except RecursionError:
        raise Refused("no plain text") from None
    return package


# ---- tokens


def tokenized(package: Package, chat: Chat, most_of_prompt: int, longest: int) -> tuple[Completion, ...]:
    """The completions of a package as tokens of this run.

    Args:
        most_of_prompt, longest: tokens that a prompt and a completion may have.

    Raises:
        Refused: there are too many, or none; or they would give another text.
    """
    try:
        messages = package.prompt if isinstance(package.prompt, list) else None
        prompt = chat.encode(package.prompt) if messages is None else chat.prompt(messages)
        texts = [m["content"] for m in messages or () if isinstance(m.get("content"), str)]
        tokens = [chat.encode(text) for text in package.completions]
        same = all(_same(text, chat.decode(chat.encode(text))) for text in texts) and all(
            _same(text, chat.decode(t)) for text, t in zip(package.completions, tokens, strict=True)
        )
    except Exception as e:  # whatever a tokenizer or a template says of the text
        raise Refused(f"the tokenizer or the chat template fails ({type(e).__name__})") from e
    if not same:
        raise Refused("the tokens give another text")
    ends = [chat.eos[:1] if done else () for done in package.finished]
    tokens = [(*t, *end) for t, end in zip(tokens, ends, strict=True)]
    if len(prompt) > most_of_prompt:
        raise Refused("the prompt has too many tokens")
    if not all(0 < len(t) <= longest for t in tokens):
        raise Refused("a completion has no token, or too many")
    return tuple(Completion(t) for t in tokens)


def _same(a: str, b: str) -> bool:
    """Whether two texts are equal but for spaces around them and for how characters are composed."""
    return normalized(a, "NFC").strip() == normalized(b, "NFC").strip()
