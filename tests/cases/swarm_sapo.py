"""`swarm_sapo` in the contract test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from methods.swarm import Letters, Memory, package, send

from cases import Case, Effects
from rl_plugins.testing.contract.effects import World


def swarm(files: int) -> Callable[[str], Any]:
    """An exchange in which two others have left questions of different length, so many each."""

    def opened(exchange: str) -> Memory:
        found = Memory()
        for sender in ("ann", "bob"):
            made = [
                package(f"{sender} {exchange}{'?' * 5 * k}", str(k), ("7", "8" * k, "7", "9" * 9))
                for k in range(1, files)
            ]
            send(found, sender, *made)
        return found

    return opened


PARAMS: dict[str, Any] = {"exchange": "memory://contract", "node": "me", "external_groups": 2}

CASE = Case(
    params=PARAMS,
    effects=Effects(
        World(facts={"chat": Letters()}),
        {"accept": [lambda found: "ann" in found["prompt"]], "transport": [swarm(1)], "sender_quota": [2]}
        | {"max_characters": [45], "max_prompt_tokens": [45], "inbox_groups": [3], "max_age": [0], "spare_groups": [0]}
        | {"exchange": ["memory://other"], "key_env": ["PATH"]},
        ({}, {"sender_quota": 2}, {"external_groups": 1}),
        {**PARAMS, "transport": swarm(8)},
        elsewhere=("key_env",),  # of an endpoint, which is not in these worlds
    ),
)
