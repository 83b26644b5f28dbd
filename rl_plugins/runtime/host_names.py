"""How an adapter stands to its host, as data: names it relies on that the host may change, and what it changes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pinned:
    """A name of a host that its adapter relies on: every private one it uses, and the public ones it overrides.

    Args:
        owner: "module:Class", or "module". An attribute that a class sets in its `__init__` is found there.
        name: as it is written.
        parameters: the first ones, as in the version the adapter was tested with; None if it is not called.
        why: what it is used for.
        optional: an upstream seam, which the released host does not have.
        part: what of the adapter is closed where the name is missing; empty: all of it.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] | None
    why: str
    optional: bool = False
    part: str = ""

    def moved(self, owner: Any = None) -> str:
        """What became of it, in `owner` or in the one that is named; empty if it is as expected."""
        module, _, cls = self.owner.partition(":")
        if owner is None:
            try:
                owner = importlib.import_module(module)
                owner = getattr(owner, cls) if cls else owner
            except (ImportError, AttributeError) as e:
                other = e.name if isinstance(e, ModuleNotFoundError) and e.name else module  # a package beside the host
                root = module.partition(".")[0]
                return f"{self.owner} is gone" if other.partition(".")[0] == root else f"{module} needs {other}"
        title = getattr(owner, "__name__", self.owner)
        found = getattr(owner, self.name, None)
        if not hasattr(owner, self.name):
            made = [vars(c)["__init__"] for c in getattr(owner, "__mro__", ()) if "__init__" in vars(c)]
            names = {n for f in made for n in getattr(getattr(inspect.unwrap(f), "__code__", None), "co_names", ())}
            return "" if self.optional or self.name in names else f"{title}.{self.name} is gone"
        if self.parameters is None or not callable(found):
            return "" if self.parameters is None else f"{title}.{self.name} is no function"
        declared = [p for p in inspect.signature(found).parameters.values() if p.name not in ("self", "cls")]
        given = [p.name for p in declared]
        any_ = next(
            (i for i, p in enumerate(declared) if p.kind is p.VAR_POSITIONAL), len(self.parameters)
        )  # takes all
        expected = self.parameters[:any_]
        if tuple(given[: len(expected)]) == expected:
            return ""
        return f"{title}.{self.name}({', '.join(given)}) used to be ({', '.join(self.parameters)})"


@dataclass(frozen=True)
class Change:
    """One change of an object that is not the adapter's own.

    Args:
        what: is changed, how, and for how long.
        why: one line.
        when: what switches it on.
        ends: the patch upstream that makes it needless (patches/README.md), or "none".
        by: modules, and functions in them, of the adapter that make it: "loss.wrap_train_batch".
    """

    what: str
    why: str
    when: str
    ends: str
    by: str


def change_table(changes: Sequence[Change]) -> str:
    """The table of a host's page, in Markdown."""
    rows = [("what", "why", "switched on by", "ended by", "in"), ("---",) * 5]
    rows += [(c.what, c.why, c.when, c.ends, ", ".join(f"`{b}`" for b in c.by.split(", "))) for c in changes]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
