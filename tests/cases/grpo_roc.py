"""`grpo_roc` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import draw
from rl_plugins.testing.contract.effects import World


def tool_texts(r: Any) -> Any:
    def text(i: int, g: int) -> str:
        parts = [f"<tool_response>{'Error' if draw(i, g, k) < 0.5 else 'fine'}</tool_response>" for k in range(i % 4)]
        parts += ["<answer>1</answer>"] * (1 + (draw(g, i) < 0.4))
        return "".join([*parts, "<|im_end|><|im_start|>assistant<|im_end|>" * (i % 2)])

    return r.replace(raw_text=[text(i, g) for i, g in zip(r.rollout.tolist(), r.group.tolist(), strict=True)])


CASE = Case(
    effects=Effects(
        World(prepare=tool_texts),
        {"penalty": [lambda r: r.length]},
        ({}, {"reject_equal_reward": False}),
    )
)
