"""The card of a method: what a reader who chooses is told. It is `NAME.toml` beside the code, and decides nothing.

use_when, avoid_when    one sentence each
words                   what users call it or its problem, with semicolons between; `rl-plugins suggest` looks for them
cost                    what it costs and which features of the engine it needs
about                   of a bundle: what it does, a paragraph
disagreements           where paper and code differ, and which parameter selects
open                    what no source answers: the `question`, what was `tried`, and `looked`, the day of the last look
logs                    a table: name the method logs -> what the number is
paper                   a table (arxiv, title, authors, year, code), or the name of the card that has it
asked_for               who asked for it, where users of the hosts did and not the plan of this package
goes_with               method -> why the two make sense together
goes_with_params        values that parameters of this method need in the pairs whose sentence names them: `name: value`
example_params          an example of each parameter that must be given, a judge for example
examples                as text, an example of other parameters whose value is not obvious: a function, a file
paper_settings          host -> options of the paper's main experiment, for a config to copy; never applied by us
paper_params            setting -> parameters of the paper's experiments, the main one first; never applied by us
demo, bench             what `rl-plugins demo` and `bench` set so that the method has something to act on
claims                  what the paper says of it, as differences that the bench measures
"""

from __future__ import annotations

import datetime
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rl_plugins
from rl_plugins.core.errors import ConfigError, did_you_mean
from rl_plugins.core.method import Bundle, Method
from rl_plugins.runtime import registry
from rl_plugins.tools import supervised

BUILT_IN = Path(rl_plugins.__file__).parent / "methods"


@dataclass(frozen=True)
class Paper:
    """Where a method comes from.

    Args:
        arxiv: "2601.22582".
        title, year: for the citation.
        authors: "First Last and First Last": BibTeX reads a comma as the end of a surname.
        code: "owner/repository" of the authors' code, if it was published.
    """

    arxiv: str
    title: str
    authors: str
    year: int
    code: str | None = None

    @property
    def url(self) -> str:
        """Its page at arXiv."""
        return f"https://arxiv.org/abs/{self.arxiv}"

    def bibtex(self, key: str) -> str:
        """A BibTeX entry; its key is `key` and the year."""
        title, authors = (re.sub(r"([%&#$_])", r"\\\1", text) for text in (self.title, self.authors))
        return (
            f"@misc{{{key}{self.year},\n  title  = {{{title}}},\n  author = {{{authors}}},\n"
            f"  year   = {{{self.year}}},\n  eprint = {{{self.arxiv}}},\n  archivePrefix = {{arXiv}}\n}}"
        )


@dataclass(frozen=True)
class OpenQuestion:
    """What is not known of a method.

    Args:
        question: what no source answers, and what is done here.
        tried: where it was looked for.
        looked: day of the last look.
    """

    question: str
    tried: str
    looked: datetime.date

    @property
    def text(self) -> str:
        """As a line of a card."""
        return f"{self.question} Tried: {self.tried} Last look: {self.looked.isoformat()}."


@dataclass(frozen=True)
class CardFile:
    """What `NAME.toml` says; everything is empty where there is no such file. The fields are those of this module's
    docstring; texts have no line breaks."""

    name: str
    paper: Paper | None = None
    use_when: str = ""
    words: str = ""
    avoid_when: str = ""
    cost: str = ""
    asked_for: str = ""
    about: str = ""
    disagreements: tuple[str, ...] = ()
    open: tuple[OpenQuestion, ...] = ()
    logs: Mapping[str, str] = field(default_factory=dict)
    goes_with: Mapping[str, str] = field(default_factory=dict)
    goes_with_params: Mapping[str, Any] = field(default_factory=dict)
    example_params: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    paper_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    paper_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    demo: Mapping[str, Any] = field(default_factory=dict)
    bench: Mapping[str, Any] = field(default_factory=dict)
    claims: tuple[Mapping[str, Any], ...] = ()


def card_file(found: type[Method] | Bundle | str) -> CardFile:
    """The card of a class, a bundle, or the name of a method or a supervised loss.

    Raises:
        ConfigError: the file is no TOML or has a field that no card has.
    """
    name = found if isinstance(found, str) else found.name
    return next((_read(place, name) for place in _places(found, name) if place.is_file()), CardFile(name))


def _places(found: type[Method] | Bundle | str, name: str) -> list[Path]:
    if isinstance(found, type):
        return [Path(getattr(sys.modules.get(found.__module__), "__file__", None) or "").with_name(f"{name}.toml")]
    modules = [find_spec(o.where.partition(":")[0]) for o in registry.origins_of(name) if o.distribution]
    beside = [Path(spec.origin).with_name(f"{name}.toml") for spec in modules if spec is not None and spec.origin]
    losses = Path(supervised.__file__).with_name(f"{name}.toml")
    return [BUILT_IN / f"{name}.toml", BUILT_IN / name / f"{name}.toml", losses, *beside]


@cache
def _read(place: Path, name: str) -> CardFile:
    try:
        given = tomllib.loads(place.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"The card {place} cannot be read: {e}. It must be a TOML file.") from e
    known = {f.name for f in fields(CardFile)} - {"name"}
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"The card {place} has `{unknown[0]}`, which is no field of a card.{did_you_mean(unknown[0], known)} "
            f"The fields are: {', '.join(sorted(known))}."
        )
    values: dict[str, Any] = {
        key: " ".join(value.split()) if isinstance(value, str) else value for key, value in given.items()
    }
    if isinstance(values.get("paper"), str):
        shared = card_file(values["paper"])
        values["paper"] = shared.paper
        values.setdefault("paper_settings", shared.paper_settings)
    elif "paper" in values:
        try:
            values["paper"] = Paper(**values["paper"])
        except TypeError as e:
            allowed = ", ".join(f.name for f in fields(Paper))
            raise ConfigError(f"`paper` of the card {place}: {e}. It must be a table with {allowed}.") from e
    values["disagreements"] = tuple(" ".join(text.split()) for text in values.get("disagreements", ()))
    values["claims"] = tuple(values.get("claims", ()))
    try:
        values["open"] = tuple(
            OpenQuestion(" ".join(o["question"].split()), " ".join(o["tried"].split()), _day(o["looked"]))
            for o in values.get("open", ())
        )
    except (KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"`open` of the card {place} is wrong ({e!r}). Each entry is a table [[open]] with `question`, `tried` and "
            f"the day `looked`: 2026-11-26."
        ) from e
    return CardFile(name, **values)


def _day(value: Any) -> datetime.date:
    if type(value) is not datetime.date:
        raise TypeError(f"{value!r} is no day")
    return value
