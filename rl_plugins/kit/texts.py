"""Text that a model wrote, read in time proportional to its length, whatever it is."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

_SIGNS = re.compile(r"([^\w\s\x00-\x7f]{256})[^\w\s\x00-\x7f]+")


def between(text: str, begin: str, end: str) -> list[str]:
    """The stretches of `text` from each `begin` to the next `end`, without overlap, as `re.findall(begin(.*?)end)`.

    That pattern looks for `end` anew from every `begin`: a text of nothing but `begin` takes the square of its length.
    """
    found, at = [], 0
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        found.append(text[start + len(begin) : stop])
        at = stop + len(end)
    return found


def normalized(text: str, form: Literal["NFC", "NFKC"] = "NFKC") -> str:
    """The text in a normal form of Unicode, for comparisons. Of more than 256 signs in a row that are neither word nor
    ASCII the rest is left out: combining marks are among them, which Python sorts in the square of their number."""
    return unicodedata.normalize(form, text if text.isascii() else _SIGNS.sub(r"\1", text))


def tokens_before(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], length: int) -> int:
    """How many of the first tokens fit into the first `length` characters of their text. A token that reaches beyond is
    not among them, nor those before it that begin a character which it ends; nothing is tokenized again.

    Args:
        decode: text of tokens. Pieces of a byte-level vocabulary may be cut inside a character; it is U+FFFD then.
    """
    text = decode(tokens)
    n = bisect_right(range(1, len(tokens) + 1), length, key=lambda i: len(decode(tokens[:i])))
    while not text.startswith(decode(tokens[:n])):
        n -= 1
    return n
