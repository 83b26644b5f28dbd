"""The same prompts under two policies: of two runs, or of two batches of one."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.viewer.folder import Record, TraceFolder


@dataclass(frozen=True)
class SamePrompt:
    """A prompt that both sides have.

    Args:
        prompt: dataset row.
        a, b: (batch, summary of the group) of each side.
    """

    prompt: int
    a: tuple[int, Record]
    b: tuple[int, Record]

    @property
    def difference(self) -> float:
        """Mean reward of b minus that of a."""
        return float(self.b[1]["reward"] - self.a[1]["reward"])


def pairs(a: TraceFolder, b: TraceFolder, batch: int | None = None, other_batch: int | None = None) -> list[SamePrompt]:
    """Prompts whose rollouts both sides have, the largest difference first.

    Args:
        a, b: runs. Of each, the last visit of a prompt counts; of one run with itself, the first and the last.
        batch, other_batch: of a and b: only this one.
    """
    same = a.path == b.path
    left, right = _visits(a, batch), _visits(b, other_batch)
    found = [SamePrompt(p, visits[0 if same else -1], right[p][-1]) for p, visits in left.items() if p in right]
    found = [p for p in found if not same or p.a[0] != p.b[0]]
    return sorted(found, key=lambda p: (-abs(p.difference) if p.difference == p.difference else 0.0, p.prompt))


def pair_of(found: list[SamePrompt], prompt: int) -> SamePrompt:
    """The pair of a prompt.

    Raises:
        ConfigError: it is not in both.
    """
    for pair in found:
        if pair.prompt == prompt:
            return pair
    some = ", ".join(str(p.prompt) for p in found[:10]) or "none"
    raise ConfigError(
        f"Dataset row {prompt} has rollouts in one of the two only. Rows in both are, for example, {some}."
    )


def word_differences(a: str, b: str) -> Iterator[tuple[str, str]]:
    """Pieces of two texts in order.

    Yields:
        ("=", in both), ("-", in a alone) or ("+", in b alone).
    """
    left, right = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (a, b))
    often = Counter(left)
    equal = sum(often[word] for word in right)  # pairs of equal words, which difflib goes through again and again
    for kind, i, j, k, m in difflib.SequenceMatcher(None, left, right, autojunk=equal > 10**6).get_opcodes():
        if kind == "equal":
            yield "=", "".join(left[i:j])
            continue
        if j > i:
            yield "-", "".join(left[i:j])
        if m > k:
            yield "+", "".join(right[k:m])


def _visits(trace: TraceFolder, only: int | None) -> dict[int, list[tuple[int, Record]]]:
    found: dict[int, list[tuple[int, Record]]] = {}
    recorded = set(trace.recorded)
    if only is not None and only not in recorded:
        trace.rollout_table(only)  # an error names what is there
    for summary in trace.batches:
        if summary["batch"] not in recorded or only not in (None, summary["batch"]):
            continue
        for group in summary["groups"]:
            if group["recorded"] and group["prompt_index"] >= 0:
                found.setdefault(group["prompt_index"], []).append((summary["batch"], group))
    return found
