"""Which methods exclude each other, and why: every pair is built and checked as a run would check it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rl_plugins.cards.catalog import HOSTS, example_of
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method, SameAs
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack


@dataclass(frozen=True)
class Conflict:
    """A reason for which methods cannot run together.

    Attributes:
        reason: one sentence; in one of two sides "the first" and "the second" stand for the methods.
        first, second: each of the first with each of the second; without a second side only one of the first can run.
    """

    reason: str
    first: tuple[str, ...]
    second: tuple[str, ...] = ()

    def excluded_by(self, name: str) -> tuple[str, ...]:
        """The methods that cannot run beside `name`."""
        if not self.second:
            return tuple(n for n in self.first if n != name) if name in self.first else ()
        return self.second if name in self.first else self.first if name in self.second else ()


@lru_cache(maxsize=2)  # a thousand pairs and more are built, and a page asks once for every method
def conflicts(classes: tuple[type[Method], ...]) -> tuple[Conflict, ...]:
    """Every conflict between two of these methods with the parameters they must be given, grouped by the reason.

    What one run lacks for one method is no conflict, so a host is assumed that offers everything.
    """
    methods = [example_of(cls) for cls in classes]
    found: dict[str, set[tuple[str, str]]] = {}
    for a, b in itertools.combinations(methods, 2):
        for reason, pair in _refusals(a, b):
            found.setdefault(reason, set()).add(pair)
    excluding = {frozenset(pair) for pairs in found.values() for pair in pairs}
    return tuple(c for reason, pairs in found.items() for c in _grouped(reason, pairs, excluding))


def _refusals(a: Method, b: Method) -> Iterator[tuple[str, tuple[str, str]]]:
    """Reasons and the two names, in the order in which the reason names them."""
    common = [h for h in HOSTS if h in a.hosts and h in b.hosts]
    for host in common or [""]:
        for line in refused([a, b], host):
            first, second = sorted((a.name, b.name), key=lambda name: line.find(f"`{name}`"))
            text = line.replace("The methods ", "").split(". Remove")[0].removesuffix(".")
            if f"`{first}` and `{second}` both" in text:
                yield text.replace(f"`{first}` and `{second}` both", "Both") + ".", (first, second)
            else:
                text = text.replace(f"`{first}`", "the first").replace(f"`{second}`", "the second")
                yield f"{text[0].upper()}{text[1:]}.", (first, second)


def refused(methods: Sequence[Method], host: str, bundle_of: Mapping[str, str] | None = None) -> list[str]:
    """Why these methods cannot run together in this host, if it offers everything: problems, a line each; empty if they
    can. Without a host the stack alone can refuse."""
    try:
        stack = MethodStack(list(methods), bundle_of=bundle_of)
        stack.warn_once = lambda message: None  # type: ignore[method-assign]
        if host:
            preflight(stack, _offers_everything(host, methods))
    except ConfigError as e:
        return str(e).splitlines()
    return []


def _offers_everything(host: str, methods: Sequence[Method]) -> HostCapabilities:
    options: dict[str, str] = {}
    for m in methods:
        for option, value in m.host_options.get(host, {}).items():
            options[option] = f"default of {option}"
            if isinstance(value, SameAs):
                options[value.option] = f"default of {value.option}"
    served = HOSTS[host]
    return HostCapabilities(
        name=host,
        version="",
        hooks=served.hooks,
        missing_hooks={},
        eval_hooks=served.eval_hooks,
        missing_signals={},
        columns=None,
        options=options,
        defaults=options,
    )


def _grouped(reason: str, pairs: set[tuple[str, str]], excluding: set[frozenset[str]]) -> Iterator[Conflict]:
    if reason.startswith("Both "):
        yield from (Conflict(reason, group) for group in _cliques({frozenset(pair) for pair in pairs}, excluding))
        return
    partners: dict[str, set[str]] = {}
    for first, second in pairs:
        partners.setdefault(first, set()).add(second)
    sides: dict[tuple[str, ...], list[str]] = {}
    for first, others in sorted(partners.items()):
        sides.setdefault(tuple(sorted(others)), []).append(first)
    yield from (Conflict(reason, tuple(first), second) for second, first in sides.items())


def _cliques(pairs: set[frozenset[str]], excluding: set[frozenset[str]]) -> Iterator[tuple[str, ...]]:
    """The pairs as groups in which everybody excludes everybody, if need be for another reason."""
    names, left = sorted({name for pair in pairs for name in pair}), set(pairs)
    while left:
        group = sorted(min(left, key=sorted))
        for name in names:
            if name not in group and all(frozenset((name, other)) in excluding for other in group):
                group.append(name)
        left -= {frozenset(pair) for pair in itertools.combinations(group, 2)}
        yield tuple(sorted(group))


def excluded(found: Sequence[Conflict], parts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Reason -> methods that cannot run beside any of these parts; the parts themselves are not named."""
    out: dict[str, list[str]] = {}
    for conflict in found:
        for part in parts:
            others = [n for n in conflict.excluded_by(part) if n not in parts]
            out.setdefault(conflict.reason, []).extend(n for n in others if n not in out.get(conflict.reason, ()))
    return {reason: tuple(sorted(names)) for reason, names in out.items() if names}
