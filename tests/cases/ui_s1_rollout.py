"""`ui_s1_rollout` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import writes
from rl_plugins.testing.contract.effects import World

CASE = Case(
    rows=[{"expert": [{"observation": "a window", "response": "a"}, {"observation": "b", "response": "b"}]}],
    effects=Effects(
        World(
            model=writes("yes", "no", "perhaps"),
            columns={"expert": [["a", "yes"], ["b", "no"], ["c", "yes"]], "other": [["a", "no"], ["b", "no"]]},
        ),
        {
            "column": ["other"],
            "match": [lambda response, wanted, columns: (response[0] == "y", 0.5)],
            "write": [lambda messages, history, seen: [*messages, {"role": "user", "content": f"{len(history)}"}]],
        },
    ),
)
