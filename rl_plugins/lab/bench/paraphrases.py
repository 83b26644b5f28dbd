"""Several wordings of one chain, with the same values after each step."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from rl_plugins.lab.bench import chains
from rl_plugins.lab.bench.chains import Mix
from rl_plugins.lab.demo.tasks import split_of

WORDINGS = 4
_TRIES = 64


def wordings(prompt: str, rng: random.Random, split: str) -> list[str]:
    """`WORDINGS` chains with the values of this one after each step, all of a split; empty if there are too few.

    Modulo 10, `+3` and `-7` are the same, and the first two digits of `+` and `*` can change places.
    """
    found = {prompt: None}
    for _ in range(_TRIES):
        text = prompt[0]
        for i in range(1, len(prompt), 2):
            operation, digit = prompt[i], int(prompt[i + 1])
            if operation in "+-" and rng.random() < 0.5:
                operation, digit = "-" if operation == "+" else "+", (10 - digit) % 10
            text += operation + str(digit)
        if text[1] in "+*" and rng.random() < 0.5:
            text = text[2] + text[1] + text[0] + text[3:]
        if split_of(text) == split:
            found[text] = None
        if len(found) == WORDINGS:
            return list(found)
    return []


def build_rows(mix: Mix, n: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
    """Different rows for `datasets`, those of a chain one after another, with its number in `paraphrase_set_id`."""
    rng = random.Random(f"{seed}/{split}/{mix}")
    sets: list[list[str]] = []
    seen: set[str] = set()
    while len(sets) * WORDINGS < n:
        told = wordings(chains.random_prompt(dataclasses.replace(mix, mode=""), rng, split), rng, split)
        if told and seen.isdisjoint(told):
            sets.append(told)
            seen.update(told)
    return [{**chains.row_of(p), "paraphrase_set_id": i} for i, told in enumerate(sets) for p in told][:n]
