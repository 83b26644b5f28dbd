"""A shallow copy of the real model that answers little sums, right or wrong, in words, and with a tool.

The first two of thirty layers write nothing that can be read. A minute of supervised steps on chats made of the tasks
gives texts of unequal length, right and wrong answers, and tool calls that work or fail, so a method has something to
act on. Embedding and head, 28 of 35 million weights, stay the model's own."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_plugins.environments import reasoning_gym
from rl_plugins.lab.real.model import model_folder, model_path

LAYERS = 2
RECIPE = 1  # raised when the weights become others
STEPS, ROWS, RATE = 48, 16, 2e-3
TASKS: dict[str, dict[str, Any]] = {
    "gcd": {"min_value": 1, "max_value": 12},
    "basic_arithmetic": {
        **dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1, operators=("+",)),
        **dict(allow_negation=False, allow_parentheses=False),
    },
}
TOOL = "Compute with a block of ```python, then reply with the answer only."


def rows(size: int = 24, system: str | None = reasoning_gym.SYSTEM) -> list[dict[str, Any]]:
    """Greatest common divisors, of which most are 1, and sums, which are right less often."""
    return reasoning_gym.rows(TASKS, size, system=system)


def expression(question: str) -> str:
    """What a question asks for, as code."""
    a, b = re.findall(r"\d+", question)
    return f"{a} + {b}" if "+" in question else f"gcd({a}, {b})"


def shallow_policy() -> Path:
    """Its folder, made once in the cache of the real model."""

    shallow = model_path(layers=LAYERS)
    folder = shallow.with_name(f"{shallow.name}-arithmetic-{RECIPE}")
    if not (folder / "done").exists():
        _train(model_folder(layers=LAYERS), folder)
        (folder / "done").touch()
    return folder


def _train(source: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.get_input_embeddings().weight.requires_grad_(False)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=RATE, weight_decay=0.0, betas=(0.9, 0.95))
    chats = _chats()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 5, (STEPS - step) / 20)
        ids, learned = _batch(tokenizer, [next(chats) for _ in range(ROWS)])
        hidden = model.model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state[:, :-1]
        where = learned[:, 1:]
        loss = F.cross_entropy(model.lm_head(hidden[where]), ids[:, 1:][where])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _chats() -> Iterator[list[dict[str, str]]]:
    """Chats whose assistant turns are learned. An answer is right with probability 0.6."""
    rng, questions = random.Random(0), rows()
    while True:
        row = rng.choice(questions)
        user, system = row["prompt"][-1], rng.random() < 0.5
        value = (
            row["answer"]
            if rng.random() < 0.6
            else str(rng.randrange(1, 5) if row["task"] == "gcd" else rng.randrange(10))
        )
        what = expression(user["content"])
        if system:
            answer = rng.choice(["{v}", "{v}", "{e} = {v}", "The answer is {v}."]).format(v=value, e=what)
            yield [row["prompt"][0], user, {"role": "assistant", "content": answer}]
            continue
        chat = [{"role": "system", "content": TOOL}, user]
        for _ in range(2):
            fails = rng.random() < 0.4
            code = what.replace("(", "((").replace("+", "+ *") if fails else what
            chat.append({"role": "assistant", "content": f"```python\n{code}\n```"})
            chat.append({"role": "user", "content": "error: invalid syntax" if fails else f"output: {row['answer']}"})
            if not fails:
                break
        yield [*chat, {"role": "assistant", "content": value}]


def _batch(tokenizer: Any, chats: list[list[dict[str, str]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, 0 behind the end, and which of them an assistant wrote."""
    made: list[tuple[list[int], list[bool]]] = []
    for chat in chats:
        ids: list[int] = []
        learned: list[bool] = []
        for message in chat:
            head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
            body = tokenizer.encode(f"{message['content']}<|im_end|>")
            end = tokenizer.encode("\n")
            wrote = message["role"] == "assistant"
            ids += [*head, *body, *end]
            learned += [False] * len(head) + [wrote] * len(body) + [False] * len(end)
        made.append((ids, learned))
    longest = max(len(ids) for ids, _ in made)
    pad = [longest - len(ids) for ids, _ in made]
    return (
        torch.tensor([ids + [0] * n for (ids, _), n in zip(made, pad, strict=True)]),
        torch.tensor([learned + [False] * n for (_, learned), n in zip(made, pad, strict=True)]),
    )
