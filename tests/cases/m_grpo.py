"""`m_grpo` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from rl_plugins.testing.contract.effects import World


# a main agent's row and one of a sub-agent it called
def prepare(r: Any) -> Any:
    return r.replace(
        index=(index := r.index if r.index.any() else r.rollout % 2),
        rollout=r.rollout if r.index.any() else r.rollout // 2,
        meta={**r.meta, "agent": ["sub" if i else "main" for i in index]},
    )


CASE = Case(prepare=prepare, effects=Effects(World(prepare=prepare), {"main_agent": ["sub"]}))
