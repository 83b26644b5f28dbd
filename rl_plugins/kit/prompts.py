"""Texts from outside (environments, tools, judges, datasets) on their way into a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
NO_CHARACTER = "\ufffd"


def as_text(value: Any) -> str:
    """A text that every template and tokenizer takes.

    Bytes are read as UTF-8, None is empty. Of a message's content in parts (`[{"type": "text", "text": ".."}]`) the
    texts follow each other as templates write them, and other parts are named ("[image]"). Of anything else it is the
    `str`. U+FFFD stands for what is no character: half a surrogate pair, bytes that are no UTF-8, and control
    characters but tabs and ends of lines.
    """
    if isinstance(value, (bytes, bytearray)):
        text = value.decode("utf-8", "replace")
    elif (parts := _parts(value)) is not None:
        text = "".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
    else:
        text = "" if value is None else str(value)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # two halves become one character
    return _CONTROL.sub(NO_CHARACTER, whole)


def as_content(content: Any) -> Any:
    """The content of a message as a chat template takes it: a text, or parts where one of them is no text."""
    parts = _parts(content)
    if parts is None or all("text" in part for part in parts):
        return as_text(content)
    return [{**part, "text": as_text(part["text"])} if "text" in part else part for part in parts]


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """A prompt, text or messages, as new messages."""
    if isinstance(prompt, (str, bytes)):
        return [{"role": "user", "content": as_text(prompt)}]
    return [dict(message) for message in prompt]


def appended(prompt: Any, text: str) -> list[dict[str, Any]]:
    """The messages of a prompt with a text in a line of its own at the end of the last one that is not the assistant's:
    in an answer that the prompt begins (a prefill) nobody else speaks."""
    messages = as_messages(prompt)
    last = next((i for i in reversed(range(len(messages))) if messages[i].get("role") != "assistant"), None)
    if last is None:
        return [{"role": "user", "content": text}, *messages]
    content = messages[last].get("content")
    if (parts := _parts(content)) is not None:
        messages[last]["content"] = [*parts, {"type": "text", "text": f"\n{text}"}]
    else:
        messages[last]["content"] = "\n".join(filter(None, (as_text(content), text)))
    return messages


def _parts(content: Any) -> list[Mapping[str, Any]] | None:
    """The parts of a message's content, which an array may hold; None if it is no list of parts."""
    found = content.tolist() if hasattr(content, "tolist") else content
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(p, Mapping) and ("text" in p or "type" in p) for p in found
    ):
        return None
    return [{k: v for k, v in part.items() if v is not None} for part in found]  # a table fills absent keys with None
