"""`m_grpo_rollout` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import writes
from rl_plugins.testing.contract.effects import World
from rl_plugins.tools.messages.contracts import Contract

CASE = Case(
    effects=Effects(
        World(
            prepare=lambda r: r.replace(meta={**r.meta, "invalid": [k % 2 for k in range(len(r))]}),
            model=writes("call 1 + 1 = 3. It is 3 m", "call bb", "end"),
            max_tokens=400,
        ),
        {
            "parse": [lambda text: [text, text] if "call" in text else []],
            "contract": [lambda: Contract("result", {"type": "string", "maxLength": 2})],
            "expert": [lambda task, result: len(result) / 100],
            "guard_facts": ["answer"],
            "guard_verifier": [lambda fields: "red"],
            "guard_splitter": [lambda message: []],
            "guard_entailment": [lambda fields: "red"],
        },
        ({}, {"guard": "strict"}, {"contract": lambda: Contract("result", {"type": "integer"})}),
        {"parse": lambda text: [text] if "call" in text else []},
        elsewhere=("guard_log",),  # tests/methods/test_agent_rollouts.py: it writes files
        files=lambda folder: {"guard_log": [str(folder / "guard")]},
    ),
)
