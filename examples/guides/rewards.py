"""Reward functions for TRL and for verl. The guide docs/guides/rewards.md shows this file."""

from __future__ import annotations

import math
import re
from typing import Any

from rl_plugins.methods.fapo import rewards


def digits(text: str) -> str:
    """The digits after the last mark `=` or `?`; empty if there are none."""
    found = re.findall(r"[=?](\d+)", text)
    return found[-1] if found else ""


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for the right digits, else 0. `answer` is a column of the dataset."""
    return [float(digits(c[-1]["content"]) == a) for c, a in zip(completions, answer, strict=True)]


def brief(completions: list[Any], **columns: Any) -> list[float | None]:
    """1 for at most 8 characters, 0 for more, None for an empty completion, which cannot be judged."""
    texts = [c[-1]["content"] for c in completions]
    return [float(len(text) <= 8) if text else None for text in texts]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """The same for verl, which has one function: the reward `score`, and its parts under names of their own."""
    completion = [{"role": "assistant", "content": solution_str}]
    right, short = correct([completion], [ground_truth])[0], brief([completion])[0]
    return {
        "score": right + 0.1 * (short or 0.0),
        "correct": right,
        "brief": math.nan if short is None else short,
    }


async def flaws(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """FAPO's reward in TRL: a judge reads the right answers while TRL computes other rewards."""
    params = {"judge": first_wrong_step, "judge_concurrency": 64}
    return await rewards.fapo(prompts, completions, answer, params=params, **columns)


def first_wrong_step(prompt: str, answer: str, completion: str) -> int:
    """Stands for a model that reads the steps: index of the first wrong one, -1 for none."""
    steps = completion.splitlines()
    return next((i for i, step in enumerate(steps) if "guess" in step), -1)
