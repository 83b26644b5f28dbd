"""`gigpo` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import draw
from rl_plugins.testing.contract.effects import World


def long_anchors(r: Any) -> Any:
    """Texts of 300 letters of which the first differs, and short ones."""

    def anchor(i: int) -> str:
        if i % 2:
            return f"room number {i % 5}"
        return f"{i % 3}" + "".join("abcdefgh"[int(8 * draw(k))] for k in range(299))

    return r.replace(turns=r.turns.replace(anchor=[anchor(i) for i in range(len(r.turns.row))]))


CASE = Case(effects=Effects(World(prepare=long_anchors), {"similarity": [0.9]}))
