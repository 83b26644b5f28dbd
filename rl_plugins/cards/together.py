"""`rl-plugins info A B`: whether methods go together in one run, in which hosts, and which to leave out if not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_plugins.cards.catalog import Card, card_of
from rl_plugins.cards.pairs import refused
from rl_plugins.cards.screen import SHOWN_AS, hosts, verdict
from rl_plugins.cards.usage import hydra, needs_of_run
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file


@dataclass(frozen=True)
class Together:
    """Whether methods go together, with their defaults and examples of the parameters that must be given.

    Attributes:
        cards: of the names, in order.
        classes: of their methods.
        hosts: those that serve all in one run.
        problems: host -> why not; "" where it is so in every host.
        why: what the cards say of two of them together.
        params: values of parameters that they need to go together.
    """

    cards: Sequence[Card]
    classes: Sequence[type[Method]]
    hosts: Sequence[str]
    problems: Mapping[str, Sequence[str]]
    why: Sequence[str] = ()
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def together(names: Sequence[str]) -> Together:
    """Builds and checks them as a run does, in a host that offers everything.

    Raises:
        ConfigError: no such method, or one that cannot be used.
    """
    cards = [card_of(registry.load(name)) for name in names]
    said = {(a.name, b): why for a in cards for b, why in a.goes_with.items() if b in names}
    try:
        selection = registry.select(list(names))
    except ConfigError as e:
        return Together(cards, [], [], {"": str(e).splitlines()})
    given: dict[str, dict[str, Any]] = {}
    for why in said.values():
        for name in names:
            values = {k: v for k, v in card_file(name).goes_with_params.items() if f"`{k}: {json.dumps(v)}`" in why}
            given |= {name: values} if values else {}
    built = [
        registry.build(cls, {**card_file(cls).example_params, **selection.params[n], **given.get(n, {})}, n)
        for n, cls in selection.classes.items()
    ]
    problems: dict[str, Sequence[str]] = {}
    for host in SHOWN_AS:
        lacking = [card.name for card in cards if host not in card.hosts]
        if len(lacking) == len(cards):
            continue
        if lacking:
            problems[host] = [f"{SHOWN_AS[host]} does not serve {' and '.join(f'`{n}`' for n in lacking)}."]
            continue
        pairs = (refused(pair, host, selection.bundle_of) for pair in itertools.combinations(built, 2))
        found = [line for lines in pairs for line in lines] or refused(built, host, selection.bundle_of)
        if found:
            problems[host] = list(dict.fromkeys(found))
    served = [host for host in SHOWN_AS if host not in problems and any(host in card.hosts for card in cards)]
    sentences = list(dict.fromkeys(said.values()))
    return Together(cards, list(selection.classes.values()), served, problems, sentences, given)


def text(found: Together) -> str:
    """For a terminal."""
    return "\n".join(_lines(found))


def _lines(found: Together) -> Iterator[str]:
    *first, last = (card.name for card in found.cards)
    yield f"{', '.join(first)} and {last} {'can' if found.hosts else 'cannot'} run together."
    refusals = {
        host: lines for host, lines in found.problems.items() if all(host in ("", *c.hosts) for c in found.cards)
    }
    told = found.problems if found.hosts else refusals or found.problems
    problems = list(dict.fromkeys(line for lines in told.values() for line in lines))
    if not found.hosts:
        yield from _section("Why not", problems)
        yield from _choice(found.cards, problems)
        return
    yield from _section("Hosts", list(hosts(found.classes)))
    yield from _section("Not in", problems)
    yield from _section("Why", found.why)
    yield from _section("To copy", list(_to_copy(found)))
    needs = [f"{card.name}: {needed}" for card in found.cards if (needed := needs_of_run(card).text)]
    yield from _section("Needed in the run", needs)
    yield "\n`rl-plugins doctor` checks them with your config."


def _choice(cards: Sequence[Card], problems: Sequence[str]) -> Iterator[str]:
    """Of those that a problem names: the ones of a worse verdict, and what there is to say of each."""
    named = [c for c in cards if any(f"`{name}`" in line for name in (c.name, *c.parts) for line in problems)]
    leave = [c.name for c in named if c.promise > min(other.promise for other in named)]
    yield from _section("Leave out", [", ".join(leave) or "one of them: their verdicts are equal"])
    for card in named:
        when = [f"use it when: {card.use_when}"] if len(card.parts) == 1 and card.use_when else []
        yield from _section(card.name, [*verdict(card), *when])


def _to_copy(found: Together) -> Iterator[str]:
    names = [card.name for card in found.cards]
    if "trl" in found.hosts:
        yield f"TRL: methods: [{', '.join(names)}]"
        if found.params:
            yield f"     method_params: {json.dumps(found.params)}"
    if "verl" in found.hosts:
        params = [
            f"+rl_plugins.method_params.{name}.{key}={hydra(value)}"
            for name, of in found.params.items()
            for key, value in of.items()
        ]
        yield " ".join([f'verl: "+rl_plugins.methods=[{",".join(names)}]"', *params])


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"\n{title}"
        yield from (f"  {line}" for line in lines)


def plain(found: Together) -> dict[str, Any]:
    """As plain data."""
    return {
        "names": [card.name for card in found.cards],
        "hosts": list(found.hosts),
        "problems": {host: list(lines) for host, lines in found.problems.items()},
    }
