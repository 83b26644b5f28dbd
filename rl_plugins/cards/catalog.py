"""What there is: every method and bundle, read from the classes, for `list`, `info`, `suggest` and the pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rl_plugins.cards.card_file import CardFile, card_file
from rl_plugins.cards.results import Result, measured_of
from rl_plugins.core.errors import RLPluginsError
from rl_plugins.core.method import HOOKS, SIGNALS, Bundle, Method
from rl_plugins.diffusion.served import NO_HOOKS, NO_SIGNALS
from rl_plugins.runtime import registry


@dataclass(frozen=True)
class ServedByHost:
    """What the adapter of a host serves in a run with fitting settings; what one run lacks, its own check says.

    Attributes:
        hooks: hooks it serves in training.
        eval_hooks: hooks it serves in evaluation.
        missing: kinds of signals that no run of it has.
    """

    hooks: Collection[str]
    eval_hooks: Collection[str] = ()
    missing: Collection[str] = ()


HOSTS = {
    "trl": ServedByHost(hooks=set(HOOKS), eval_hooks={"plan", "rollout"}),
    "verl": ServedByHost(hooks=set(HOOKS), eval_hooks={"plan", "rollout"}),
    "diffusion": ServedByHost(hooks=set(HOOKS) - set(NO_HOOKS), missing=set(NO_SIGNALS)),
}

FIDELITY = {
    "code": "equal to the authors' code: its numbers are stored and compared in the tests",
    "paper": "built from what could be read of the paper, and not compared with code of its authors",
    "abstract": "built from an abstract, a figure or summaries, which were all that could be read",
    "reconstruction": "something needed was not published and had to be filled in; the description says what",
    "own": "no paper: a method of its author",
}


@dataclass(frozen=True)
class Entry:
    """One name in the list.

    Attributes:
        kind: "method", "bundle" or "broken".
        distribution: the package it comes from; "rl-plugins" for the built-in ones.
        does: what it does, in one line.
        problems: keys of `rl_plugins.cards.problems.PROBLEMS`.
        hooks: what it changes, in the order of a step; the parts of a bundle.
        problem: why it cannot be used, empty if it can.
    """

    name: str
    kind: str
    distribution: str
    does: str = ""
    problems: tuple[str, ...] = ()
    arxiv: str = ""
    title: str = ""
    hooks: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    fidelity: str = ""
    problem: str = ""


def entries(vetoed: Collection[str] = ()) -> list[Entry]:
    """Every name there is, without those of vetoed packages ("dist:NAME"). What cannot be loaded is listed with the
    reason and disturbs no other."""
    out = []
    for name in registry.all_names():
        origins = [o for o in registry.origins_of(name) if f"dist:{o.distribution}" not in vetoed]
        if not origins:
            continue
        distribution = " and ".join(o.distribution or "rl-plugins" for o in origins)
        try:
            out.append(_entry(name, distribution, vetoed))
        except RLPluginsError as e:
            out.append(Entry(name, "broken", distribution, problem=str(e)))
    return out


def _entry(name: str, distribution: str, vetoed: Collection[str]) -> Entry:
    card = card_of(registry.load(name, vetoed), vetoed)
    found, paper = card.found, card.file.paper
    return Entry(
        name,
        "bundle" if isinstance(found, Bundle) else "method",
        distribution,
        card.does,
        tuple(found.problems),
        paper.arxiv if paper else "",
        paper.title if paper else "",
        tuple(found.parts) if isinstance(found, Bundle) else found.claims(),
        card.hosts,
        card.fidelity,
    )


def plugins() -> frozenset[str]:
    """Vetoes of everything that other packages offer: what is left is built in."""
    origins = [o for name in registry.all_names() for o in registry.origins_of(name)]
    return frozenset(f"dist:{o.distribution}" for o in origins if o.distribution)


@dataclass(frozen=True)
class Card:
    """What is said of a method or bundle to somebody who chooses; of a bundle the texts are those of its parts.

    Attributes:
        file: what its own `NAME.toml` says.
        parts: the classes it stands for.
        avoid_when, cost: text per part, the name of the part in front if there are several.
    """

    found: type[Method] | Bundle
    file: CardFile
    parts: tuple[type[Method], ...]
    does: str
    fidelity: str
    hosts: tuple[str, ...]
    avoid_when: str
    cost: str

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def measured(self) -> Sequence[Result]:
        """Our results: those of the evidence, then those of the bench."""
        return measured_of(self.name)

    @property
    def use_when(self) -> str:
        return self.file.about if isinstance(self.found, Bundle) else self.file.use_when

    @property
    def rank(self) -> tuple[int, bool, int, str]:
        """Measured better first, what did worse last; then what needs nothing to be given (a judge, embeddings), then
        fidelity, then the name."""
        verdicts = {m.verdict for m in self.measured}
        good, bad = "better" in verdicts, "worse" in verdicts
        worst = max([list(FIDELITY).index(part.fidelity) for part in self.parts], default=0)
        given = any(card_file(part).example_params for part in self.parts)
        return (0 if good and not bad else 1 if good else 3 if bad else 2), given, worst, self.name


def card_of(found: type[Method] | Bundle, vetoed: Collection[str] = ()) -> Card:
    """The card of a loaded method or bundle."""
    parts = tuple(parts_of(found, vetoed))
    return Card(
        found,
        card_file(found),
        parts,
        found.does,
        ", ".join(dict.fromkeys(part.fidelity for part in parts)),
        tuple(h for h in HOSTS if all(h in hosts_of(part) for part in parts)),
        _of_each(parts, "avoid_when"),
        _of_each(parts, "cost"),
    )


def _of_each(parts: Sequence[type[Method]], text: str) -> str:
    said = {part.name: value for part in parts if (value := getattr(card_file(part), text))}
    if len(parts) == 1:
        return "".join(said.values())
    return " ".join(f"`{name}`: {value}" for name, value in said.items())


def cards(vetoed: Collection[str] = ()) -> list[Card]:
    """Cards of everything that can be loaded, the best measured first."""
    out = []
    for name in registry.all_names():
        with suppress(RLPluginsError):  # `list` says what is wrong with it
            out.append(card_of(registry.load(name, vetoed), vetoed))
    return sorted(out, key=lambda card: card.rank)


def answering(problem: str, found: Iterable[Card]) -> list[Card]:
    """The cards that name a problem: those that name it first come first, then by rank."""
    named = [card for card in found if problem in card.found.problems]
    return sorted(named, key=lambda card: (card.found.problems[0] != problem, card.rank))


def hosts_of(cls: type[Method]) -> list[str]:
    """The hosts whose adapter can serve this class."""
    made = example_of(cls)  # needs may depend on parameters
    signals = {signal.partition(":")[0] for signal in made.needs}
    return [
        name
        for name, host in HOSTS.items()
        if name in cls.hosts
        and set(cls.claims()) <= set(host.hooks)
        and set(cls.in_eval) <= set(host.eval_hooks)
        and not signals & set(host.missing)
    ]


def example_of(cls: type[Method]) -> Method:
    """An instance with the parameters that must be given, everything else at its default."""
    return registry.build(cls, dict(card_file(cls).example_params), cls.name)


def parts_of(found: type[Method] | Bundle, vetoed: Collection[str] = ()) -> list[type[Method]]:
    """The classes a name stands for."""
    if not isinstance(found, Bundle):
        return [found]
    return [part for part in (registry.load(name, vetoed) for name in found.parts) if not isinstance(part, Bundle)]


def signal_text(signal: str) -> str:
    """A signal of `needs` as words."""
    kind, _, detail = signal.partition(":")
    if kind == "column":
        return f"a column `{detail}` in the dataset"
    return SIGNALS.get(signal, f"of the engine: {detail}" if kind == "engine" else signal)


def needs_of(cls: type[Method]) -> list[str]:
    """What a method needs of a run, as words. A column that its own rollouts bring is no need."""
    made = example_of(cls)
    return [signal_text(s) for s in sorted(made.needs - made.brings)]


def preset_text(values: Mapping[str, Any]) -> str:
    """Parameters that a bundle sets for a part, in brackets; empty without one."""
    return f" ({', '.join(f'{k} = {v}' for k, v in values.items())})" if values else ""
