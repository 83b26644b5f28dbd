"""What methods ask of a user beside rewards, by rule for the tasks of `shallow_policy.py`: environments, judges, scores
of reasoning steps, embeddings, an advisor, more columns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from shallow_policy import expression, rows

from rl_plugins.environments import reasoning_gym
from rl_plugins.kit.agents import Observation

CODE = re.compile(r"```(?:python)?\n?(.*?)(?:```|$)", re.DOTALL)
CALLS = {
    "gcd": (re.compile(r"gcd\((\d+), (\d+)\)"), math.gcd),
    "sum": (re.compile(r"(\d+) \+ (\d+)"), lambda a, b: a + b),
}


def computed(code: str) -> int:
    """
    Raises:
        ValueError: it is neither a sum nor a greatest common divisor.
    """
    for form, rule in CALLS.values():
        if found := form.fullmatch(code.strip()):
            return int(rule(*map(int, found.groups())))
    raise ValueError("invalid syntax")


class Tool:
    """A block of ```python is computed and the agent goes on; any other turn is the answer."""

    MAX_TURNS = 4

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        self.columns = {name: [columns[name]] for name in ("task", "entry", "answer")}
        self.reward = 0.0
        return Observation("")

    def act(self, action: str) -> Observation:
        if code := CODE.search(action):
            try:
                return Observation(f"output: {computed(code[1])}", state=f"output {computed(code[1])}")
            except ValueError as error:
                return Observation(f"error: {error}", valid=False, state="error")
        self.reward = reasoning_gym.solved([action], **self.columns)[0]
        return Observation("", reward=self.reward, done=True)

    def score(self) -> float:
        return self.reward

    def close(self) -> None:
        pass


def episode_score(completions: Any, score: Any = None, **columns: Any) -> list[float]:
    """Of the environment; in a run without one, of the text."""
    if score is None:
        return reasoning_gym.solved(completions, **columns)
    return [0.0 if value is None or value != value else float(value) for value in score]


def worked(completions: Any, **columns: Any) -> list[float]:
    """1 where the first block of ```python can be computed."""
    return [float(_computes(completion[-1]["content"])) for completion in completions]


def first_word(completions: Any, **columns: Any) -> list[list[float]]:
    """The reward of `solved`, for the first of the words."""
    words = (completion[-1]["content"].count(" ") for completion in completions)
    return [[value] + [0.0] * n for value, n in zip(reasoning_gym.solved(completions, **columns), words, strict=True)]


def _computes(text: str) -> bool:
    code = CODE.search(text)
    try:
        return code is not None and computed(code[1]) >= 0
    except ValueError:
        return False


def wordy(prompt: Any, answer: str, completion: str) -> int:
    """A judge of flaws: a right answer with words around it is flawed in its first step."""
    return 0 if len(completion) > len(answer) + 2 else -1


def divisors(prompt: Any, answer: str, completion: str) -> int:
    """A judge of flaws: a right answer about divisors is flawed in its first step."""
    return 0 if "Divisor" in str(prompt) else -1


def last_is_wrong(messages: Any, steps: list[str], columns: Any) -> list[float]:
    return [1.0] * (len(steps) - 1) + [0.0]


def right_answer(messages: Any, text: str, columns: Mapping[str, Any]) -> str:
    """A stronger model that corrects."""
    return str(columns["answer"])


def shorter(prompt: Any, a: str, b: str) -> tuple[float, float]:
    """A judge that compares: the shorter one is better."""
    return -float(len(a)), -float(len(b))


def fulfils(prompt: Any, criterion: str, completion: str) -> float:
    """A judge of criteria."""
    return float(len(completion) < 8 if criterion == "short" else completion.strip().isdigit())


def step_scores(messages: Any, steps: list[str], columns: Mapping[str, Any]) -> list[float]:
    """A step without the right answer is wrong, but for the first."""
    return [1.0 if i == 0 else float(columns["answer"] in step) for i, step in enumerate(steps)]


def embeddings(dataset: Any) -> np.ndarray:
    """Counts of the characters of each question, scaled."""
    texts = [chat[-1]["content"] for chat in dataset["prompt"]]
    counts = np.array([[text.count(c) for c in "0123456789+acdegmnr"] for text in texts], float)
    return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)


def advise(question: str) -> str:
    """A language model that writes experiences."""
    advice = "numbers: Say only the final answer."
    operation = json.dumps([{"operation": "ADD", "id": None, "content": advice}])
    return f"<Experiences>\n{advice}\n</Experiences>\n```json\n{operation}\n```"


def blocks(text: str) -> list[str]:
    """Tasks that a main agent delegates."""
    return CODE.findall(text)[:1]


def same_answer(response: str, expert: str, columns: Any) -> tuple[bool, float]:
    matched = reasoning_gym.answer_of(response) == reasoning_gym.answer_of(expert)
    return matched, float(matched)


def length_penalty(rollouts: Any) -> torch.Tensor:
    return torch.tensor([len(text) / 100 for text in rollouts.text], dtype=torch.float64)


length_penalty.needs = {"text"}  # type: ignore[attr-defined]


def with_columns(size: int = 24, system: str | None = reasoning_gym.SYSTEM) -> list[dict[str, Any]]:
    """Rows with a reference solution, hints, sets of wordings and an expert's turns."""
    made = []
    for i, row in enumerate(rows(size, system)):
        question, answer = row["prompt"][-1]["content"], row["answer"]
        code = f"```python\n{expression(question)}\n```"
        made.append(
            {
                **row,
                "reference": f"{expression(question)} = {answer}",
                "solution": f"The answer is {answer}.",
                "hints": ["Think about the numbers.", f"The answer begins with {answer[:1]}."],
                "paraphrase_set_id": i // 4 * 2 + i % 2,
                "expert": [[question, code], [f"output: {answer}", answer]],
            }
        )
    return made
