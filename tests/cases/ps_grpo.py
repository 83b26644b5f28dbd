"""`ps_grpo` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import draw
from rl_plugins.testing.contract.effects import World


def sets_of_four(rollouts: Any) -> Any:
    """Texts that differ from rollout to rollout, in sets of four wordings."""
    of_row = list(zip(rollouts.prompt_index.tolist(), rollouts.rollout.tolist(), strict=True))
    words = ["the", "answer", "to", "this", "question", "is", "1", "2", "3"]
    texts = [" ".join(w for w in words if draw(i, j, w, rollouts.batch) < 0.6) for i, j in of_row]
    return rollouts.replace(text=texts, meta={**rollouts.meta, "paraphrase_set_id": [i // 4 for i, _ in of_row]})


CASE = Case(
    effects=Effects(
        World(prepare=sets_of_four),
        {"set_column": ["answer"], "similarity": [lambda a, b: [0.5] * len(a)], "answer_column": ["prompt"]},
    )
)
