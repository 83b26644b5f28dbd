"""The library of experiences: a language model's replies, the changes they make, and the library as a file.

All functions are pure except `read_library` and `write_library`. Experiences are texts under their ids, in order."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_plugins import ConfigError
from rl_plugins.core.errors import shortened
from rl_plugins.core.files import read_json, write_text
from rl_plugins.kit.prompts import as_text

FORMAT = 1
CHARACTERS = 16  # a word of a text may have on average
Experiences = Mapping[str, str]
Operation = Mapping[str, Any]


# ---- replies


def parse_operations(reply: str) -> list[dict[str, Any]]:
    """The JSON list of a reply: the content of its last ```json block, or the whole reply without such a block. Entries
    that are not objects are left out, and so are values that are neither a text, a number nor a list of texts.

    Raises:
        ValueError: the reply is not JSON, or not a list.
    """
    found = read_json(reply.split("```json")[-1].split("```")[0])
    if not isinstance(found, list):
        raise ValueError(f"the JSON is a {type(found).__name__}, not a list.")
    return [
        {_writable(name): _writable(value) for name, value in entry.items() if not isinstance(value, dict)}
        for entry in found
        if isinstance(entry, dict)
    ]


def _writable(value: Any) -> Any:
    """Without what cannot be written as UTF-8 (JSON may name half of a character), and without lists of lists."""
    if isinstance(value, list):
        return [_writable(part) for part in value if isinstance(part, str)]
    return as_text(value) if isinstance(value, str) else value


def within(operations: Sequence[Operation], max_words: int) -> list[dict[str, Any]]:
    """The operations with no text of an experience longer than `max_words` words, and `CHARACTERS` a word: a text
    without spaces is one word, however long it is."""
    found = [dict(o) for o in operations]
    for operation in found:
        for name in ("content", "experience"):
            text = operation.get(name)
            if not isinstance(text, str):
                continue
            words = list(re.finditer(r"\S+", text))
            if len(words) > max_words:
                text = text[: words[max_words - 1].end()]
            operation[name] = text[: CHARACTERS * max_words]
    return found


def parse_experiences(reply: str) -> str:
    """What stands between <Experiences> and </Experiences>; empty without them."""
    inside = re.split("<Experiences>", reply, maxsplit=1, flags=re.IGNORECASE)[1:]
    found = [part for text in inside for part in re.split("</Experiences>", text, maxsplit=1, flags=re.IGNORECASE)]
    return found[0].strip() if len(found) == 2 else ""


# ---- what is shown


def listed(experiences: Experiences) -> str:
    """The experiences, one per line, "[id]. text"; "None" if there is none."""
    return "\n".join(f"[{i}]. {text}" for i, text in experiences.items()) or "None"


def by_experience(experiences: Experiences, operations: Sequence[Operation]) -> str:
    """Every experience with the operations that name it; at the end those that name none, or none that exists."""

    def shown(some: Sequence[Operation]) -> str:
        return "\n".join(json.dumps(o, indent=2, ensure_ascii=False) for o in some) or "None"

    blocks = [
        f"Experience {i}:\nContent: {text}\nRelated Operations:\n{shown([o for o in operations if o.get('id') == i])}"
        for i, text in experiences.items()
    ]
    others = [o for o in operations if _text(o.get("id")) not in experiences]
    if others:
        blocks.append(f"Operations without specific Experience ID:\n{shown(others)}")
    return "\n\n".join(blocks)


# ---- changes


def revise(experiences: Experiences, plan: Sequence[Operation]) -> dict[str, str]:
    """Applies a revision plan of {operation, id, content}, in order.

    Without content an operation does nothing, a DELETE neither. ADD (the default) appends; UPDATE replaces in its
    place, or appends if the id is unknown; DELETE removes; anything else does nothing.
    """
    found, number = dict(experiences), len(experiences)
    for operation in plan:
        content, known = _text(operation.get("content")), _text(operation.get("id"))
        kind = operation.get("operation", "ADD")
        if not content:
            continue
        if kind == "DELETE":
            found.pop(known, None)
        elif kind == "UPDATE" and known in found:
            found[known] = content
        elif kind in ("ADD", "UPDATE"):
            found[str(number)] = content
            number += 1
    return found


def candidates(
    experiences: Experiences, operations: Sequence[Operation]
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The experiences with all additions under new ids (C0, C1 and so on), and the modifications of existing ones.
    Operations are {option: add | modify, experience, modified_from}; others are left out."""
    added = [text for o in operations if o.get("option") == "add" and (text := _text(o.get("experience")))]
    found = {**experiences, **{f"C{i}": text for i, text in enumerate(added)}}
    changes = [dict(o) for o in operations if o.get("option") == "modify" and _text(o.get("modified_from")) in found]
    return found, changes


def merge(
    experiences: Experiences, plan: Sequence[Operation], without_text: Literal["skip", "delete"] = "skip"
) -> dict[str, str]:
    """Applies a revision plan of {option: modify | merge, experience, modified_from, merged_from} to candidates.

    modify sets a text, of an unknown id too; merge removes what it names and appends its text under the next C id.

    Args:
        without_text: a merge without a text does nothing, or removes what it names all the same (authors' code).
    """
    found, number = dict(experiences), sum(i.startswith("C") for i in experiences)
    for operation in plan:
        text, option = _text(operation.get("experience")), operation.get("option")
        target, sources = _text(operation.get("modified_from")), operation.get("merged_from")
        if option == "modify" and text and target:
            found[target] = text
        elif option == "merge" and isinstance(sources, list) and (text or without_text == "delete"):
            for source in sources:
                found.pop(_text(source), None)
            if text:
                found[f"C{number}"] = text
                number += 1
    return found


def _text(value: Any) -> str:
    """A text as it is, anything else as none."""
    return value if isinstance(value, str) and value.strip() else ""


# ---- the file


def write_library(path: str | os.PathLike[str], experiences: Experiences, batches: int, variant: str) -> None:
    """Writes a library; a crash leaves the file of before. Folders are made.

    Args:
        batches: generation batches it was learned from.
        variant: that wrote it.
    """
    content = {
        "format": FORMAT,
        "method": "training_free_grpo",
        "variant": variant,
        "step": batches,
        "experiences": dict(experiences),
    }
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_library(path: str | os.PathLike[str], max_words: int | None = None) -> dict[str, str]:
    """The experiences of a file that `write_library` or a person wrote, renumbered.

    Args:
        max_words: most words of a text, which `within` cuts; None: texts are not cut.

    Raises:
        ConfigError: the file cannot be read, or is not a library.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, this version of rl-plugins reads {FORMAT}")
        texts = [_writable(text) for text in content["experiences"].values()]
        if not all(_text(text) for text in texts):
            raise ValueError("an experience is no text")
        if max_words is not None:
            texts = [o["content"] for o in within([{"content": text} for text in texts], max_words)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(
            f"the library {os.fspath(path)} cannot be read: {type(e).__name__}: {shortened(e)}. It must hold "
            f'{{"format": {FORMAT}, "experiences": {{"G0": "text", ...}}}}; repair it, or name another file.'
        ) from e
    return {f"G{i}": text for i, text in enumerate(texts)}
