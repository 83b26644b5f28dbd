"""What there is: every method and bundle, read from the classes, for `list`, `info`, `suggest` and the pages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.resources import files
from typing import Any

from rl_plugins.cards.problems import Answer
from rl_plugins.cards.quality import trained, trainings_of
from rl_plugins.cards.results import Result, measured_of
from rl_plugins.cards.standing import Standing, standing_of
from rl_plugins.core.errors import RLPluginsError
from rl_plugins.core.method import HOOKS, SIGNALS, Bundle, Method
from rl_plugins.diffusion.served import NO_HOOKS, NO_SIGNALS
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import CardFile, card_file


@dataclass(frozen=True)
class ServedByHost:
    """What the adapter of a host serves in a run with fitting settings; what one run lacks, its own check says.

    Attributes:
        hooks: hooks it serves in training.
        eval_hooks: hooks it serves in evaluation.
        missing: kinds of signals that no run of it has.
        lacks: options that methods set, and that it does not have. No asynchronous mode has those of masked models.
    """

    hooks: Collection[str]
    eval_hooks: Collection[str] = ()
    missing: Collection[str] = ()
    lacks: Collection[str] = ()


OURS = "rl-plugins"  # the distribution of built-in methods
HOSTS = {
    "trl": ServedByHost(hooks=set(HOOKS), eval_hooks={"plan", "rollout"}),
    "verl": ServedByHost(hooks=set(HOOKS), eval_hooks={"plan", "rollout"}),
    "diffusion": ServedByHost(hooks=set(HOOKS) - set(NO_HOOKS), missing=set(NO_SIGNALS)),
}

MODES = {
    "TRL's asynchronous trainer": ServedByHost(
        hooks=set(HOOKS) - {"select_prompts", "plan", "admit", "rollout"},  # its worker generates by itself
        missing={
            "engine",
            "turn_limits",
            "redundancy",
            "turns",
            "step_rewards",
            "teacher_logprobs",
            "ref_logprobs",
            "whole_batches",
            "entropies",
            "sum_squared_probs",
            "token_versions",
        },
        lacks={"loss_type", "num_iterations", "steps_per_generation"},
    ),
    "verl's asynchronous modes": ServedByHost(hooks=set(HOOKS), missing={"whole_batches", "engine"}),
}
"""Those that generate ahead of training."""

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


@cache
def index() -> Mapping[str, Mapping[str, Any]]:
    """What `make docs` read off the classes of this package, so that nobody who chooses waits for torch: name ->
    `entry`, the fields of its `Entry`; `use`, host -> what to add to a command line; `needs` and `notes` of
    `usage.Needs`; `asynchronous`, the needs in TRL's asynchronous trainer, null if it does not serve it; `excludes`,
    reason -> built-in methods that cannot run beside it."""
    found: dict[str, Any] = json.loads(files("rl_plugins.cards").joinpath("index.json").read_text(encoding="utf-8"))
    return found


def indexed(name: str) -> Mapping[str, Any] | None:
    """What the index says of a name; None if it is not, or not only, a built-in one, or may be vetoed."""
    if any(o.distribution for o in registry.origins_of(name)) or os.environ.get(registry.VETO_VARIABLE):
        return None
    return index().get(name)


def entries(vetoed: Collection[str] = ()) -> list[Entry]:
    """Every name there is, without those of vetoed packages ("dist:NAME"). What cannot be loaded is listed with the
    reason and disturbs no other."""
    out = []
    for name in registry.all_names():
        if known := indexed(name):
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in known["entry"].items()}
            out.append(Entry(name, **values))
            continue
        origins = [o for o in registry.origins_of(name) if f"dist:{o.distribution}" not in vetoed]
        if not origins:
            continue
        distribution = " and ".join(o.distribution or OURS for o in origins)
        try:
            out.append(entry_of(registry.load(name, vetoed), distribution, vetoed))
        except RLPluginsError as e:
            out.append(Entry(name, "broken", distribution, problem=str(e)))
    return out


def entry_of(found: type[Method] | Bundle, distribution: str, vetoed: Collection[str] = ()) -> Entry:
    """What the list says of a loaded method or bundle."""
    parts, paper = parts_of(found, vetoed), card_file(found).paper
    return Entry(
        found.name,
        "bundle" if isinstance(found, Bundle) else "method",
        distribution,
        found.does,
        tuple(found.problems),
        paper.arxiv if paper else "",
        paper.title if paper else "",
        tuple(found.parts) if isinstance(found, Bundle) else found.claims(),
        tuple(h for h in HOSTS if all(h in hosts_of(part) for part in parts)),
        ", ".join(dict.fromkeys(part.fidelity for part in parts)),
    )


def plugins() -> frozenset[str]:
    """Vetoes of everything that other packages offer: what is left is built in."""
    origins = [o for name in registry.all_names() for o in registry.origins_of(name)]
    return frozenset(f"dist:{o.distribution}" for o in origins if o.distribution)


@dataclass(frozen=True)
class Card:
    """What is said of a method or bundle to somebody who chooses; of a bundle the texts are those of its parts.

    Args:
        entry: of the list.
        load: loads the class or the bundle.
    """

    entry: Entry
    load: Callable[[], type[Method] | Bundle] = field(compare=False)

    @property
    def found(self) -> type[Method] | Bundle:
        """The class or the bundle; a built-in one loads torch."""
        return self.load()

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def problems(self) -> tuple[str, ...]:
        return self.entry.problems

    @property
    def does(self) -> str:
        return self.entry.does

    @property
    def fidelity(self) -> str:
        return self.entry.fidelity

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.entry.hosts

    @property
    def file(self) -> CardFile:
        """What its own `NAME.toml` says."""
        return card_file(self.name if self.entry.distribution == OURS else self.found)

    @property
    def parts(self) -> tuple[str, ...]:
        """The methods it stands for."""
        return self.entry.hooks if self.entry.kind == "bundle" else (self.name,)

    def _files(self) -> dict[str, CardFile]:
        return {part: card_file(part) for part in self.parts} if self.entry.kind == "bundle" else {self.name: self.file}

    @property
    def avoid_when(self) -> str:
        """Text per part, the name of the part in front if there are several."""
        return _of_each({name: file.avoid_when for name, file in self._files().items()})

    @property
    def cost(self) -> str:
        """Text per part, as `avoid_when`."""
        return _of_each({name: file.cost for name, file in self._files().items()})

    @property
    def measured(self) -> Sequence[Result]:
        """Our results in examples."""
        return measured_of(self.name, self.parts)

    @property
    def goes_with(self) -> Mapping[str, str]:
        """Method -> why the two make sense together; of one to be skipped it says so."""
        skip = {n for n in self.file.goes_with if (e := indexed(n)) and _standing(n, e["entry"]).word == "skip"}
        return {n: f"(skip) {why}" if n in skip else why for n, why in self.file.goes_with.items()}

    @property
    def use_when(self) -> str:
        return self.file.about if self.entry.kind == "bundle" else self.file.use_when

    @cached_property
    def standing(self) -> Standing:
        """Whether to use it, and why."""
        return standing_of(self.name, self.parts)

    @property
    def promise(self) -> int:
        """0: a claim helped, 1: only its gradients speak for it, 2: nothing is known, 3: to be skipped."""
        if self.standing.helped:
            return 0
        return {"use if": 1, "unknown": 2, "skip": 3}[self.standing.word]

    @property
    def seen(self) -> list[str]:
        """What was measured, a line each: runs of many steps in exact worlds, then examples."""
        trainings = (f"{t['world']}, {trained(t)}" for t in trainings_of(self.parts))
        return [*trainings, *(result.line for result in self.measured)]

    @property
    def good(self) -> str:
        """What speaks for it; without a verdict, what was measured of it."""
        return self.standing.good or f"no verdict; measured: {'; '.join(self.seen[:3]) or 'nothing'}"

    @property
    def bad(self) -> str:
        """What speaks against it."""
        return self.standing.bad or ("no loss was measured" if self.seen else "")

    @property
    def rank(self) -> tuple[bool, int, str]:
        """First what needs nothing to be given (a judge, embeddings), then by fidelity, then by name."""
        worst = max(map(list(FIDELITY).index, self.fidelity.split(", ")), default=0)
        return any(file.example_params for file in self._files().values()), worst, self.name


def card_of(found: type[Method] | Bundle, vetoed: Collection[str] = ()) -> Card:
    """The card of a loaded method or bundle."""
    return Card(entry_of(found, "", vetoed), lambda: found)


def _standing(name: str, entry: Mapping[str, Any]) -> Standing:
    """Of a built-in name, by its entry in the index."""
    return standing_of(name, tuple(entry["hooks"]) if entry["kind"] == "bundle" else (name,))


def _of_each(texts: Mapping[str, str]) -> str:
    if len(texts) == 1:
        return "".join(texts.values())
    return " ".join(f"`{name}`: {text}" for name, text in texts.items() if text)


def cards(vetoed: Collection[str] = ()) -> list[Card]:
    """Cards of everything that can be loaded, by name."""
    found = [e for e in entries(vetoed) if not e.problem]  # `list` says what is wrong with the others
    return [Card(e, partial(registry.load, e.name, vetoed)) for e in found]


def answering(problem: str, found: Iterable[Card]) -> list[Card]:
    """The cards that name a problem: those of the best promise first, then those that name it first, then by rank."""
    named = [card for card in found if problem in card.problems]
    return sorted(named, key=lambda card: (card.promise, card.problems[0] != problem, card.rank))


def in_order(found: Sequence[Card], others: Sequence[Answer]) -> tuple[Card | Answer, ...]:
    """What answers a problem, in the one order of README, choose.md and `suggest`: methods that helped, options of
    hosts and commands, then the other methods.

    Args:
        found: in the order of :func:`answering`.
    """
    helped = sum(card.promise == 0 for card in found)
    return (*found[:helped], *others, *found[helped:])


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


def modes_of(cls: type[Method]) -> list[str]:
    """The asynchronous modes that can serve this class with its default parameters."""
    from rl_plugins.kit.masked import MASKED_OPTIONS  # loads torch, as the class does

    made, hosts = example_of(cls), hosts_of(cls)
    signals, claims = {signal.partition(":")[0] for signal in made.needs}, set(cls.claims())
    if made.rounds:
        return []
    # TRL's loss there weighs the policy that sampled; verl's buffer counts groups of one size.
    apart = {
        "trl": made.corrects_sampling and "policy_loss" not in claims,
        "verl": made.decides_rollouts or made.rows_per_rollout > 1,
    }
    return [
        name
        for (name, mode), host in zip(MODES.items(), ("trl", "verl"), strict=True)
        if host in hosts
        and not apart[host]
        and claims <= set(mode.hooks)
        and not signals & set(mode.missing)
        and not set(made.host_options.get(host, ())) & {*mode.lacks, *MASKED_OPTIONS}
    ]


def verl_modes_of(cls: type[Method]) -> list[str]:
    """The values of verl's `trainer.v1.trainer_mode` that can serve this class with its default parameters."""
    from rl_plugins.verl.config import MODES as names

    if "verl" not in hosts_of(cls):
        return []
    ahead = "verl's asynchronous modes" in modes_of(cls)
    queued = "admit" in cls.claims()  # verl's own buffer, which only the asynchronous modes have
    return [name for name, follows in names.items() if (not queued if follows == "sync" else ahead)]


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
