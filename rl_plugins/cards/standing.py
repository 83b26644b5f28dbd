"""Whether to use a method: from the verdicts on its claims, and from the quality of its gradients.

use        a claim helped, and nothing speaks against it
use if     it helped, or a step made more progress than GRPO's, in some places and not in all
skip       nothing speaks for it, and it did harm or no more than the host's own way, or its steps make less progress in
           every world where it acts, two or more
unknown    everything else: runs and worlds could not see it, or there are none
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rl_plugins.cards import quality
from rl_plugins.cards.claims import decide, measured, name_of, outcomes_of

Word = Literal["use", "use if", "skip", "unknown"]
WORDS: tuple[Word, ...] = ("use", "use if", "skip", "unknown")
ENOUGH_WORLDS = 2


@dataclass(frozen=True)
class Standing:
    """Whether to use a method.

    Attributes:
        helped: whether a claim helped; else only its gradients speak for it.
        why: what speaks for and against it, as sentences; empty if nothing does. A world without targets in brackets
            stands for all its targets, in batches of any size.
        good, bad: the same, short: what speaks for it, with conditions, and what speaks against it, as counts.
    """

    word: Word
    why: str
    helped: bool = False
    good: str = ""
    bad: str = ""


@cache
def standing_of(name: str, parts: tuple[str, ...]) -> Standing:
    """What is known of a method or bundle. Runs and worlds with further methods say nothing of it.

    Args:
        parts: the methods that it stands for.
    """
    helped, against = [], []
    for told in outcomes_of(name):
        if not set((told.get("variant") or name).partition("@")[0].split("+")) <= {name, *parts}:
            continue
        verdict, by = decide(told)
        where = f"{told.get('metric')} in {told.get('task')}"
        if verdict == "helps":
            helped.append(where)
        elif verdict == "harmful":
            against.append(f"{where}, behind {name_of(told, by)}")
        elif by in measured(told) and by:
            against.append(f"{where}, not seen to be ahead of {name_of(told, by)}")
    more: list[str] = []
    less: list[str] = []
    same: list[str] = []
    acts = 0
    for world, signs, host in worlds_of(parts):
        acts += 1
        targets = list(quality.targets_of(world)[:2])
        for found, sign in ((more, "more"), (less, "less")):
            if signs[sign]:
                found.append(world if signs[sign] == targets else f"{world} ({', '.join(signs[sign])})")
        same += [f"{world} (`{host}`)"] if host else []
    word: Word = "unknown"
    if helped or more:
        word = "use if" if against or less or not helped else "use"
    elif against or len(less) == acts >= ENOUGH_WORLDS:
        word = "skip"
    steps = {"A step makes less progress in ": less, "A step makes no more progress than the host's own way in ": same}
    counts = {"less progress in ": less, "no more than the host's own way in ": same}
    bad = [*against, *(f"{head}{len(of)} of {acts} worlds" for head, of in counts.items() if of)]
    good = _sentences({"Helped: ": helped, "A step makes more progress than GRPO's in ": more})
    why = f"{good} {_sentences({'Against it: ': against, **steps})}".strip()
    return Standing(word, why, bool(helped), good, "; ".join(bad))


def _sentences(parts: Mapping[str, list[str]]) -> str:
    return " ".join(f"{head}{'; '.join(of)}." for head, of in parts.items() if of)


def worlds_of(methods: tuple[str, ...]) -> Iterator[tuple[str, dict[str, list[str]], str]]:
    """Of every world where exactly these methods act: for which targets their steps make "more" or "less" progress than
    GRPO's, in which batches; and the variant of the host that makes more progress, too, if one does. More then does not
    count."""
    places = quality.places(quality.measured())
    said: dict[str, dict[str, list[tuple[str, str]]]] = {}  # world -> target -> (variant, what is said of it)
    acts: dict[str, set[str]] = {}
    for (world, variant), sizes in places.items():
        made = {n: p for n, p in sizes.items() if "refused" not in p}
        if not made or variant == quality.BASELINE:
            continue
        if set(methods) == set(by := next(iter(made.values()))["methods"]):
            acts.setdefault(world, set()).add(variant)
        elif by:
            continue
        for target in quality.targets_of(world)[:2]:
            text = quality.ahead(made, places[world, quality.BASELINE], target)
            said.setdefault(world, {}).setdefault(target, []).append((variant, text))
    for world, own in acts.items():
        signs: dict[str, list[str]] = {"more": [], "less": []}
        host = ""
        for target, texts in said[world].items():
            hosts = [variant for variant, text in texts if variant not in own and text.startswith("more")]
            for sign, found in signs.items():
                mine = {text for variant, text in texts if variant in own and f"{sign} progress" in text}
                if mine and sign == "more" and hosts:
                    host = hosts[0]
                elif mine:
                    sizes_said = {_batches(text, sign) for text in mine}
                    found.append(target + ("" if "" in sizes_said else " or".join(sorted(sizes_said))))
        yield world, signs, host


def _batches(text: str, sign: str) -> str:
    """In which batches: "" for all."""
    told = re.findall(rf"{sign} progress in batches (.*?)(?:, (?=more|less)|$)", text)
    return "" if told == ["of any size"] else f" in batches {' or '.join(told)}"
