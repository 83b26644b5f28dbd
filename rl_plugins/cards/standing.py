"""Whether to use a method: from the verdicts on its claims, and from the quality of its gradients.

use        a claim helped, and nothing speaks against it
use if     a claim helped; or no claim was harmful, and steps make more progress than GRPO's in as many worlds as less
skip       neither, and it did harm or no more than the host's own way, or its steps make less progress in every world
           where it acts, two or more
unknown    everything else: runs and worlds could not see it, or there are none

Claims that were not met and what was measured below the baseline are told, and decide nothing but between use and use
if.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rl_plugins.cards import quality
from rl_plugins.cards.claims import ahead, decide, measured, moved, name_of, numbers, outcomes_of, promised
from rl_plugins.cards.quality import trained, trainings_of
from rl_plugins.cards.results import measured_of

Word = Literal["use", "use if", "skip", "unknown"]
WORDS: tuple[Word, ...] = ("use", "use if", "skip", "unknown")
MEANING = {
    "use": "helped, and nothing speaks against it",
    "use if": "helped in places",
    "skip": "did harm, or no more than the host's own way",
    "unknown": "our runs cannot tell",
}
ENOUGH_WORLDS = 2
HOSTS_WAY = "a plain option of the host"


@dataclass(frozen=True)
class Standing:
    """Whether to use a method.

    Attributes:
        why: what speaks for and against it, as sentences; empty if nothing does. A world without targets in brackets
            stands for all its targets, in batches of any size.
        helped: claims that helped, with figures; without any only its gradients speak for it.
        good: what speaks for it, as sentences.
        against: what speaks against it, the strongest first; worlds as counts.
        worlds: the worlds by name in which its steps make more, less, or no more progress than the host's own way.
        brief_good, brief_against: the same as `good` and `against` without figures, tasks and names of worlds.
    """

    word: Word
    why: str
    helped: tuple[str, ...] = ()
    good: str = ""
    against: tuple[str, ...] = ()
    worlds: tuple[str, ...] = ()
    brief_good: str = ""
    brief_against: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """What the word says of it."""
        return MEANING[self.word] if self.helped or self.word != "use if" else "better gradients in places"

    @property
    def bad(self) -> str:
        """What speaks against it, as one text."""
        return "; ".join(self.against)


@cache
def standing_of(name: str, parts: tuple[str, ...]) -> Standing:
    """What is known of a method or bundle. Runs and worlds with further methods say nothing of it.

    Args:
        parts: the methods that it stands for.
    """
    helped, harm, matched, unmet = [], [], [], []
    brief: dict[str, list[str]] = {"helped": [], "harm": [], "matched": [], "lost": [], "unmet": []}
    for told in outcomes_of(name):
        if not set((told.get("variant") or name).partition("@")[0].split("+")) <= {name, *parts}:
            continue
        verdict, by = decide(told)
        if not (d := measured(told).get(by)):
            continue
        where, to = f"in `{told['task']}`", name_of(told, by)
        wanted = promised(told).replace(" (share)", "")
        if verdict == "helps":
            helped.append(f"{promised(told)} {where}, {numbers(d)} to {to}")
            brief["helped"].append(wanted)
        elif verdict == "harmful":
            harm.append(f"{moved(told['metric'], d['mean'])} {where}, harmful, {numbers(d)} to {to}")
            brief["harm"].append(f"did harm: {moved(told['metric'], d['mean']).replace(' (share)', '')}")
        elif by:
            matched.append(f"showed no {promised(told)} {where} than {to}")
            brief["matched"].append(f"no {wanted} than {'GRPO at equal tokens' if by == 'tokens' else HOSTS_WAY}")
        elif ahead(told):
            unmet.append(f"{promised(told)} {where}, but by less than matters, {numbers(d)} to {to}")
            brief["unmet"].append(f"{wanted}, but by less than matters")
        else:
            unmet.append(f"showed no {promised(told)} {where}, {numbers(d)} to {to}")
            brief["unmet"].append(f"no {wanted} than {'GRPO' if told['than'].partition('@')[0] == 'grpo' else to}")
    lost = [f"behind in {r.line}" for r in measured_of(name) if r.worse]
    lost += [f"`{p}`: behind in {r.line}" for p in parts if p != name for r in measured_of(p) if r.worse]
    worse = [t for t in trainings_of(parts) if "difference" in t and t["difference"][2] < 0]
    lost += [f"{t['world']}, {trained(t)}" for t in worse]
    behind = [r for p in dict.fromkeys((name, *parts)) for r in measured_of(p) if r.worse]
    brief["lost"] = [f"behind in {r.claim}" + (f", against {r.baseline}" if r.baseline else "") for r in behind]
    brief["lost"] += ["a lower reward than GRPO's after training in a simulation"] * bool(worse)
    more: dict[str, str] = {}
    less: dict[str, str] = {}
    same: dict[str, str] = {}
    acts = 0
    for world, signs, host in worlds_of(parts):
        acts += 1
        targets = list(quality.targets_of(world)[:2])
        said = {
            s: world if found == targets else f"{world} ({', '.join(found)})" for s, found in signs.items() if found
        }
        more |= {world: said["more"]} if "more" in said else {}
        if "less" in said:
            less[world] = said["less"]
        elif host:
            same[world] = host
    word: Word = "unknown"
    if helped or (more and not harm and len(more) >= len(less)):
        word = "use if" if harm or matched or unmet or lost or less or not helped else "use"
    elif harm or matched or len(less) == acts >= ENOUGH_WORLDS:
        word = "skip"
    ways = ", ".join(f"`{way}`" for way in dict.fromkeys(same.values()))
    counts = {"less progress": less, f"no more than the host's own way ({ways})": same}
    steps = {"less progress than GRPO's": less, f"no more progress than with {HOSTS_WAY}": same}
    brief_against = [text for key in ("harm", "matched", "lost", "unmet") for text in brief[key]]
    for head, of in steps.items():
        other = ", by another measure" * bool(of and of.keys() <= more.keys())
        brief_against += [f"a step makes {head} in {len(of)} of {acts} simulations{other}"] * bool(of)
    brief_good = [f"helped in small runs: {'; '.join(dict.fromkeys(brief['helped']))}"] * bool(helped)
    brief_good += [
        f"a step makes more progress than GRPO's and host options' in {len(more)} of {acts} simulations"
    ] * bool(more)
    told_against = [*harm, *matched, *lost, *unmet]
    against = (*told_against, *(f"{head} in {len(of)} of {acts} worlds" for head, of in counts.items() if of))
    good = _sentences({"Helped: ": helped, "A step makes more progress than GRPO's in ": list(more.values())})
    worlds = {
        "A step makes less progress in ": list(less.values()),
        "A step makes no more progress than the host's own way in ": [f"{w} (`{way}`)" for w, way in same.items()],
    }
    why = [good, _sentences({"Against it: ": told_against}), _sentences(worlds)]
    listed = tuple(f"{head}{'; '.join(of)}." for head, of in worlds.items() if of)
    return Standing(
        word,
        " ".join(filter(None, why)),
        tuple(helped),
        good,
        against,
        listed,
        "; ".join(brief_good),
        tuple(dict.fromkeys(brief_against)),
    )


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
