"""Text that a model wrote, read in time proportional to its length, whatever it is."""

from __future__ import annotations


def between(text: str, begin: str, end: str) -> list[str]:
    """The stretches of `text` from each `begin` to the next `end`, without overlap, as `re.findall(begin(.*?)end)`.

    That pattern looks for `end` anew from every `begin`: a text of nothing but `begin` takes the square of its length.
    """
    found, at = [], 0
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        found.append(text[start + len(begin) : stop])
        at = stop + len(end)
    return found
