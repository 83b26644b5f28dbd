"""Digit lists to sort: three tasks a person can check at a glance, in five levels of difficulty.

A prompt is an operation and a list of digits, the answer the digits that belong there:

    a:5391  -> 1359     (task "ascending")
    d:5391  -> 9531     (task "descending")
    u:5351  -> 135      (task "unique": ascending, each digit once)

Level ``k`` (1 to 5) has ``2 * k`` digits. A completion is one style mark and the digits: ``=1359`` (careful) or
``?1359`` (sloppy). Both count as an answer; the ``format`` reward prefers the careful mark.

Splits: a hash of the prompt itself decides whether a prompt belongs to "train" or to "held_out" (about one in five).
So the two splits share no prompt, whatever ``n``, ``seed`` and ``levels`` either was built with, and the warm start,
which draws from "train" only, has not seen a held-out prompt either. Level 1 has 300 prompts in all (233 and 67), too
few for a large data set: a prompt comes again only after every other prompt of its level and split has come as often.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

TASKS = {"a": "ascending", "d": "descending", "u": "unique"}
LEVELS = (1, 2, 3, 4, 5)
SPLITS = ("train", "held_out")
CAREFUL, SLOPPY = "=", "?"
MAX_ROWS = 100_000


def solve(prompt: str) -> str:
    """The digits that answer ``prompt``, without a style mark.

    Raises:
        ValueError: the prompt is not an operation of ``TASKS``, a colon and ASCII digits.
    """
    operation, _, digits = prompt.partition(":")
    if operation not in TASKS or not (digits.isascii() and digits.isdigit()):
        raise ValueError(
            f"{prompt!r} is not a prompt of the demo tasks. A prompt is one of {', '.join(TASKS)}, a colon and "
            "digits, for example 'a:5391'."
        )
    return "".join(sorted(set(digits) if operation == "u" else digits, reverse=operation == "d"))


def split_of(prompt: str) -> str:
    """The split a prompt belongs to, a function of its text alone."""
    return "held_out" if hashlib.sha256(prompt.encode()).digest()[0] % 5 == 0 else "train"


def random_prompt(rng: random.Random, level: int, split: str = "train") -> str:
    """One prompt of ``level`` from ``split``, drawn with replacement."""
    while True:
        prompt = f"{rng.choice(tuple(TASKS))}:{''.join(rng.choices('0123456789', k=2 * level))}"
        if split_of(prompt) == split:
            return prompt


def build_rows(n: int, seed: int = 0, levels: Sequence[int] = LEVELS, split: str = "train") -> list[dict[str, Any]]:
    """``n`` rows with ``prompt`` (one user message), ``answer``, ``level`` and ``task``, the levels in equal shares.

    The rows depend on the arguments only, and the prompts of a level do not depend on the other levels asked for.

    Args:
        n: Number of rows, 1 to 100,000.
        seed: Selects the prompts and their order.
        levels: Levels of difficulty to draw from, each 1 to 5 and named once.
        split: "train" or "held_out".

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 1 <= n <= MAX_ROWS:
        raise ValueError(f"n is {n}, but a demo data set has 1 to {MAX_ROWS} rows. Ask for a number in that range.")
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r} of the demo tasks. Choose one of: {', '.join(SPLITS)}.")
    if not levels or len(set(levels)) != len(levels) or not set(levels) <= set(LEVELS):
        raise ValueError(
            f"levels is {tuple(levels)}, but the demo tasks have the levels {LEVELS}. Name at least one of them, "
            "each once."
        )
    prompts = []
    for position, level in enumerate(levels):
        count = len(range(position, n, len(levels)))
        prompts += _distinct_prompts(random.Random(f"{seed}/{split}/{level}"), level, split, count)
    random.Random(f"{seed}/{split}/order").shuffle(prompts)
    return [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "answer": solve(prompt),
            "level": (len(prompt) - 2) // 2,
            "task": TASKS[prompt[0]],
        }
        for prompt in prompts
    ]


def build_dataset(n: int = 2000, seed: int = 0, levels: Sequence[int] = LEVELS, split: str = "train") -> Dataset:
    """The rows of :func:`build_rows` as a ``datasets.Dataset``."""
    from datasets import Dataset

    return Dataset.from_list(build_rows(n, seed, levels, split))


def _distinct_prompts(rng: random.Random, level: int, split: str, count: int) -> list[str]:
    if level <= 2:  # 300 and 30,000 prompts: few enough to list, and to run out of
        everything = (
            f"{task}:{''.join(digits)}"
            for task in TASKS
            for digits in itertools.product("0123456789", repeat=2 * level)
        )
        pool = [prompt for prompt in everything if split_of(prompt) == split]
        rng.shuffle(pool)
        return list(itertools.islice(itertools.cycle(pool), count))
    prompts: dict[str, None] = {}  # a set that keeps its order; from level 3 on there are more prompts than MAX_ROWS
    while len(prompts) < count:
        prompts[random_prompt(rng, level, split)] = None
    return list(prompts)


def embeddings(dataset: Any) -> list[list[float]]:
    """A row of 8 numbers for each row of the tasks, which tells its task and its level: for `dots` in the demo, where a
    frozen language model would embed the prompts. Rows that are alike lie together."""
    names = sorted(set(dataset["task"]))
    return [
        [6.0 * (task == name) for name in names] + [0.0] * (3 - len(names)) + [6.0 * (level == k) for k in LEVELS]
        for task, level in zip(dataset["task"], dataset["level"], strict=True)
    ]
