"""`rl-plugins info METHOD` on one screen: whether to use it, what it needs, and lines to copy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from rl_plugins.cards.catalog import MODES, Card, card_of, modes_of, parts_of, preset_text, verl_modes_of
from rl_plugins.cards.usage import line_of, needs_of_run, usage_of
from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.params import describe_params

Sections = list[tuple[str, str]]
POINTS = 3  # lines against a method
NAMED = 5  # parameters with their meaning, methods that decide the same
WORDS = 40  # of a text
LONGEST = 60  # characters of a default
SHOWN_AS = {"trl": "TRL", "verl": "verl", "diffusion": "the diffusion trainer"}


def screen(found: type[Method] | Bundle, excludes: Mapping[str, Sequence[str]]) -> tuple[str, Sections]:
    """The head, and the sections that are not empty.

    Args:
        excludes: reason -> methods that cannot run beside it.
    """
    card = card_of(found)
    paper = card.file.paper
    head = f"{card.name}: {paper.title if paper else 'a method of your own'}" + f"\n{card.does}." * bool(card.does)
    sections = [("Whether to use it", "\n".join(verdict(card)))]
    if isinstance(found, Bundle):
        parts = [f"{part}{preset_text(values)}" for part, values in found.parts.items()]
        of_parts = f"see `rl-plugins info` of {', '.join(found.parts)}"
        sections += [
            ("Stands for", "\n".join(parts)),
            ("Not when, costs, parameters", of_parts),
        ]
    else:
        sections += [
            ("Use it when", card.use_when),
            ("Not when", _short(card.avoid_when)),
            ("What it costs", _short(card.cost)),
        ]
        sections.append(("Parameters", "\n".join(_parameters(found))))
    sections += [
        ("Excludes", "\n".join(_excluded(card.name, excludes))),
        ("Hosts", "\n".join(hosts(parts_of(found)))),
        ("To copy", "\n".join(_to_copy(found, card))),
    ]
    return head, [(title, text) for title, text in sections if text.strip()]


def verdict(card: Card) -> Iterator[str]:
    """The word, and what speaks for and against it, without figures."""
    standing = card.standing
    good, against = for_and_against(card)
    if not (good or against):
        yield f"{standing.word}: nobody measured it yet."
        return
    yield f"{standing.word}: {standing.meaning}."
    if good:
        yield f"for: {good}"
    for text in against[:POINTS]:
        yield f"against: {text}"


def for_and_against(card: Card) -> tuple[str, tuple[str, ...]]:
    """What speaks for it, and what against it, the strongest first; without figures of claims and worlds."""
    standing = card.standing
    if standing.brief_good or standing.brief_against or not card.measured:
        return standing.brief_good, standing.brief_against
    return f"no verdict; measured: {card.measured[0].line}", ()


def hosts(classes: Sequence[type[Method]]) -> Iterator[str]:
    """Which hosts, and which of their trainers, serve all of these."""
    cards = [card_of(cls) for cls in classes]
    for host, name in SHOWN_AS.items():
        if not all(host in card.hosts for card in cards):
            continue
        modes = set.intersection(*(set(modes_of(cls)) for cls in classes))
        of_trl, _ = MODES
        more = ""
        if host == "trl":
            more = f"; its asynchronous trainer: {'yes' if of_trl in modes else 'no'}"
        elif host == "verl":
            shared = [m for m in verl_modes_of(classes[0]) if all(m in verl_modes_of(cls) for cls in classes)]
            more = f", trainer.v1.trainer_mode: {', '.join(shared) or 'none serves all'}"
        yield name + more


def _short(text: str) -> str:
    """Its first sentences."""
    sentences = text.split(". ")
    while len(sentences) > 1 and sum(len(s.split()) for s in sentences) > WORDS:
        sentences.pop()
    kept = ". ".join(sentences)
    return kept if kept == text else f"{kept}. ..."


def _parameters(cls: type[Method]) -> Iterator[str]:
    rows = describe_params(cls.Params)
    for row in rows[:NAMED]:
        default = textwrap.shorten(row["default"], LONGEST, placeholder=" ...")
        yield f"{row['name']} = {default}: {row['help'].partition(';')[0]}"
    if left := [row["name"] for row in rows[NAMED:]]:
        yield f"{len(left)} more: {', '.join(left)}"


def _excluded(name: str, excludes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for reason, names in excludes.items():
        if reason.startswith("Both decide"):
            decided = reason.removeprefix("Both decide ").partition(",")[0]
            some = names if len(names) <= NAMED + 1 else names[:NAMED]
            more = f" and {len(names) - NAMED} more" if len(names) > len(some) else ""
            yield f"{', '.join(some)}{more}: they decide {decided}, too"
    if others := {n for reason, names in excludes.items() if not reason.startswith("Both decide") for n in names}:
        yield f"{len(others)} for another reason"
    if excludes:
        yield f"`rl-plugins info {name} OTHER` says whether two go together."


def _to_copy(found: type[Method] | Bundle, card: Card) -> Iterator[str]:
    usage = usage_of(found, paper=False)
    if "trl" in usage.hosts:
        module = "rl_plugins.trl.masked" if usage.masked else "rl_plugins.trl"
        yield f"TRL: {usage.command_of_trl} --config run.yaml {line_of(card, 'trl')}"
        yield f"TRL, Python: {module}.{usage.python()}"
    if "verl" in usage.hosts:
        yield f"verl: {line_of(card, 'verl')}"
    if "diffusion" in usage.hosts:
        yield f"diffusion: rl_plugins.diffusion.{usage.python_of_diffusion()}"
    yield from needs_of_run(card).notes


def of_loss(sections: Sections) -> Sections:
    """What a user of a supervised loss decides by."""
    kept = ("Use it when", "Not when", "What it costs", "Parameters", "How to start")
    return [(title, text) for title, text in sections if title in kept]
