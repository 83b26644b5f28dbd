"""What the package carries of the results: `published.json` here, and `claims.json` of the cards.

`rl-plugins bench --publish` writes all of them. Nothing here reads raw results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from rl_plugins.cards.claims import outcomes

COSTS: Mapping[str, str] = {"rows_trained": "rows trained", "tokens_decoded": "tokens decoded"}


@cache
def published() -> Mapping[str, Any]:
    """The summary: `published.json` with the claims of the cards."""
    text = files("rl_plugins.lab.bench").joinpath("published.json").read_text(encoding="utf-8")
    return {**json.loads(text), "claims": outcomes()}


def methods_run(told: Mapping[str, Any] | None = None) -> list[str]:
    """Methods and bundles of which a claim was run, in the order of their names.

    Args:
        told: a summary; none: the published one.
    """
    return sorted({c["method"] for c in (told or published())["claims"] if "mean" in c or "error" in c})
