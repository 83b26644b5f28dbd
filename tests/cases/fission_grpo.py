"""`fission_grpo` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import THREE, several_rewards
from rl_plugins.testing.contract.effects import World

CASE = Case(
    effects=Effects(
        World(
            prepare=lambda r: several_rewards(THREE)(
                r.replace(meta={**r.meta, "prompt": [[{"role": "user", "content": str(p)}] for p in r.meta["prompt"]]})
            ),
            facts={"reward_names": THREE},
        ),
        {"trigger": [50], "correctness": ["format"], "message": [lambda facts: "wrong"]},
    )
)
