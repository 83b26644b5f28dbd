"""A text shop of six items: search, open, choose a size, buy. A tiny relative of WebShop (arXiv:2207.01206)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.lab.demo.environments.episode import DemoEnvironment

COLORS = ("red", "blue", "gold", "pink")
KINDS = ("mug", "hat", "bag", "pen", "cap")
SIZES = ("s", "m", "l")
SHOWN, SEARCHES = 3, 2  # results of a search, searches in an episode
_SEARCH = re.compile(r"s ([a-z ]+)")
_OPEN = re.compile(r"o([0-9])")


@dataclass(frozen=True)
class Item:
    """Something on sale, in some sizes."""

    color: str
    kind: str
    price: int
    sizes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.color} {self.kind} {self.price}"


class Shop(DemoEnvironment):
    """Buy what the prompt asks for: `42 red mug <5 l` wants, in shop 42, a red mug for less than 5 in size l.

    Turns: `s red mug` searches, at most twice, and is answered with up to three items, `1 red mug 7,2 red mug 3,3 red
    hat 2`; `o2` opens one of them, answered with item and sizes, `red mug 3 s l`; `l` chooses a size of it; `b` buys
    it and ends the episode. What cannot be done now is answered with `no`. The reward of buying is the share of wishes
    that are met: color and kind; from level 2 on the price; at level 3 the size.
    """

    LEVELS = (1, 2, 3)
    MAX_TURNS = 7
    MAX_ACTION = 14

    def __init__(self) -> None:
        super().__init__()
        self._columns: Mapping[str, Any] = {}
        self._items: list[Item] = []
        self._results: list[Item] = []
        self._opened: Item | None = None
        self._size = ""
        self._searches = 0

    @staticmethod
    def describe(columns: Mapping[str, Any]) -> str:
        limit = f" <{columns['limit']}" if columns["limit"] else ""
        size = f" {columns['size']}" if columns["size"] else ""
        return f"{columns['seed']} {columns['color']} {columns['kind']}{limit}{size}"

    def advise(self) -> str:
        """Search for color and kind, open the first of the best items, choose its size and buy."""
        best = max(map(self._match, self._results), default=0.0)
        if best < 1 and self._searches < SEARCHES:
            return f"s {self._columns['color']} {self._columns['kind']}"
        if self._opened is None or self._match(self._opened) < best:
            return f"o{[self._match(item) for item in self._results].index(best) + 1}" if self._results else "b"
        wanted = str(self._columns["size"])
        return wanted if self._size != wanted and wanted in self._opened.sizes else "b"

    def stumble(self, rng: random.Random) -> str:
        """Another word, another item, another size, buying too early, or an action that makes no sense now."""
        if not self._results:
            return rng.choice([f"s {rng.choice(COLORS)} {rng.choice(KINDS)}", f"s {rng.choice(KINDS)}", "b"])
        if self._opened is None:
            return rng.choice(["o1", "o2", "o3", "b"])
        return rng.choice([*SIZES, "b", "b", "o1", "o2"])

    @staticmethod
    def _draw(rng: random.Random, level: int) -> dict[str, Any]:
        return {
            "seed": rng.randrange(100),
            "color": rng.choice(COLORS),
            "kind": rng.choice(KINDS),
            "limit": rng.randint(3, 8) if level >= 2 else 0,
            "size": rng.choice(SIZES) if level >= 3 else "",
        }

    def _begin(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns
        self._items = catalog(columns)
        self._results, self._opened, self._size, self._searches = [], None, "", 0

    def _take(self, action: str) -> tuple[str, float, bool, bool]:
        if (search := _SEARCH.fullmatch(action)) and self._searches < SEARCHES:
            self._searches += 1
            words = set(search.group(1).split())
            found = sorted(self._items, key=lambda item: -len(words & {item.color, item.kind}))
            self._results = [item for item in found if words & {item.color, item.kind}][:SHOWN]
            self._opened, self._size = None, ""
            return (self._listing() if self._results else "none"), 0.0, False, True
        opens = _OPEN.fullmatch(action)
        if opens and 1 <= int(opens.group(1)) <= len(self._results):
            self._opened, self._size = self._results[int(opens.group(1)) - 1], ""
            return f"{self._opened} {' '.join(self._opened.sizes)}", 0.0, False, True
        if self._opened is not None and action in self._opened.sizes:
            self._size = action
            return f"size {action}", 0.0, False, True
        if self._opened is not None and action == "b":
            return "sold", self._match(self._opened, self._size), True, True
        return "no", 0.0, False, False

    def _state(self) -> list[str]:
        return [str(self._searches), self._listing(), str(self._opened or ""), self._size]

    def _listing(self) -> str:
        return ",".join(f"{i} {item}" for i, item in enumerate(self._results, 1))

    def _match(self, item: Item, size: str | None = None) -> float:
        """Share of wishes an item meets; of the size, whether it is chosen, or on offer when `size` is None."""
        wanted = self._columns
        met = [item.color == wanted["color"], item.kind == wanted["kind"]]
        if wanted["limit"]:
            met.append(item.price < int(wanted["limit"]))
        if wanted["size"]:
            met.append(wanted["size"] in item.sizes if size is None else wanted["size"] == size)
        return sum(met) / len(met)


def catalog(columns: Mapping[str, Any]) -> list[Item]:
    """The six items of the shop a row names, one of which at least meets every wish.

    Two more have color and kind in common with it, but a price that is too high where there is a limit. No two items
    look alike in a list.
    """
    color, kind, limit = columns["color"], columns["kind"], int(columns["limit"])
    rng = random.Random(f"{columns['seed']} {color} {kind} {limit} {columns['size']}")
    fits = Item(color, kind, rng.randrange(1, limit) if limit else rng.randint(1, 9), _sizes(rng, columns["size"]))
    items = [fits]
    dearer = [p for p in range(limit or 1, 10) if p != fits.price]
    items += [Item(color, kind, price, _sizes(rng)) for price in rng.sample(dearer, min(2, len(dearer)))]
    while len(items) < 6:
        item = Item(rng.choice(COLORS), rng.choice(KINDS), rng.randint(1, 9), _sizes(rng))
        if (item.color, item.kind) != (color, kind) and str(item) not in map(str, items):
            items.append(item)
    rng.shuffle(items)
    return items


def _sizes(rng: random.Random, wanted: str = "") -> tuple[str, ...]:
    """Two sizes, the wanted one among them."""
    chosen = {wanted, rng.choice([size for size in SIZES if size != wanted])} if wanted else set(rng.sample(SIZES, 2))
    return tuple(size for size in SIZES if size in chosen)
