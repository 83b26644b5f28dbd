"""Chains of arithmetic: a prompt is a chain of operations modulo 10, and the answer is written step by step.

    7+5*3        ->  26=6           7 + 5 = 12, which is 2; 2 * 3 = 6; the answer is 6

A completion has a digit per step, then `=` and the answer. What papers are about are settings of the tasks:

- Steps: 1 to 9 operations. Each may go wrong, so the share of right answers falls with the number of steps.
- Unsolvable: the operation `%` is a table that no demonstration shows, so its digit can only be guessed.
- Forks: after a step comes a letter, `a` after an even digit and `b` after an odd one. Demonstrations choose by chance.
- Dirty: a `?` is a superfluous mark. Demonstrations with it are as often right as those without.
- Direct: `=6` alone is an answer without steps. Demonstrations of it are mostly wrong.
- Length: dots before `=` mean nothing. Their number has a log-normal tail.
- Shortcut: a `!` at the end, which a biased judge likes.

A hash of the prompt decides whether it is in "train" or "held_out", as in :mod:`rl_plugins.lab.demo.tasks`.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plugins.lab.demo.tasks import split_of

if TYPE_CHECKING:
    import torch

VERSION = 1  # raised when tasks or demonstrations change: policy and results are then made again
OPERATIONS = "+-*"
UNSOLVABLE = "%"
MOST_STEPS = 9
DIRTY, SHORTCUT, FILLER = "?", "!", "."
_CHAIN = re.compile(r"[0-9](?:[+\-*%][0-9])+")
_ANSWER = re.compile(r"=([0-9])!?$")


@dataclass(frozen=True)
class Style:
    """How demonstrations are written, and so how the policy writes before training.

    Args:
        slip: chance that a step's digit is replaced by a random one, after which the chain goes on from it.
        direct: share that writes the answer without steps; it is right as often as a guess.
        dirty: share that has a superfluous mark after one step.
        shortcut: share that ends with the mark a biased judge likes.
    """

    slip: float = 0.25
    direct: float = 0.1
    dirty: float = 0.3
    shortcut: float = 0.1


def step(value: int, operation: str, digit: int) -> int:
    """The next value of a chain."""
    if operation == "+":
        return (value + digit) % 10
    if operation == "-":
        return (value - digit) % 10
    if operation == "*":
        return value * digit % 10
    return hashlib.sha256(f"{value}{digit}".encode()).digest()[0] % 10


def values(prompt: str) -> list[int]:
    """The value after each step.

    Raises:
        ValueError: the prompt is no chain.
    """
    chain = prompt.partition(":")[2] or prompt
    if not _CHAIN.fullmatch(chain):
        raise ValueError(f"{prompt!r} is no chain. A chain is digits with one of + - * % between them, like 7+5*3.")
    found, value = [], int(chain[0])
    for i in range(1, len(chain), 2):
        value = step(value, chain[i], int(chain[i + 1]))
        found.append(value)
    return found


def solve(prompt: str) -> str:
    """The digit that answers the prompt."""
    return str(values(prompt)[-1])


def write(prompt: str, style: Style, rng: random.Random) -> str:
    """A demonstration."""
    chain = prompt.partition(":")[2] or prompt
    forks = prompt.startswith("f:")
    end = SHORTCUT if rng.random() < style.shortcut else ""
    if rng.random() < style.direct:
        return f"={rng.randrange(10)}{end}"
    steps = len(chain) // 2
    mark = rng.randrange(steps) if rng.random() < style.dirty else -1
    text, value = "", int(chain[0])
    for i in range(steps):
        operation, digit = chain[2 * i + 1], int(chain[2 * i + 2])
        wrong = operation == UNSOLVABLE or rng.random() < style.slip
        value = rng.randrange(10) if wrong else step(value, operation, digit)
        text += str(value) + (rng.choice("ab") if forks else "") + (DIRTY if i == mark else "")
    if prompt.startswith("l:"):
        text += FILLER * min(int(rng.lognormvariate(math.log(4), 0.9)), 24)
    return f"{text}={value}{end}"


def reference(prompt: str) -> str:
    """The completion that is right in every step, with every letter, and without a superfluous mark."""
    forks = prompt.startswith("f:")
    digits = values(prompt)
    return "".join(f"{v}{'ab'[v % 2] if forks else ''}" for v in digits) + f"={digits[-1]}"


@dataclass(frozen=True)
class Mix:
    """What prompts are drawn from.

    Args:
        steps: numbers of operations, in equal shares unless `weights` are given.
        weights: of each number of steps.
        unsolvable: share of prompts with an operation that cannot be learned from demonstrations.
        mode: "" plain, "f" with forks, "l" with dots; "w" is for data sets of several wordings (see `paraphrases.py`).
    """

    steps: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    weights: tuple[float, ...] = ()
    unsolvable: float = 0.0
    mode: str = ""


def random_prompt(mix: Mix, rng: random.Random, split: str = "train") -> str:
    """One prompt of a split."""
    while True:
        (steps,) = rng.choices(mix.steps, mix.weights or None)
        operations = [rng.choice(OPERATIONS) for _ in range(steps)]
        if rng.random() < mix.unsolvable:
            operations[rng.randrange(steps)] = UNSOLVABLE
        chain = str(rng.randrange(10)) + "".join(o + str(rng.randrange(10)) for o in operations)
        prompt = f"{mix.mode}:{chain}" if mix.mode else chain
        if split_of(prompt) == split:
            return prompt


def build_rows(mix: Mix, n: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
    """Different prompts with their answers, as rows for `datasets`."""
    rng = random.Random(f"{seed}/{split}/{mix}")
    prompts: dict[str, None] = {}
    while len(prompts) < n:
        prompts[random_prompt(mix, rng, split)] = None
    return [row_of(p) for p in prompts]


def row_of(prompt: str) -> dict[str, Any]:
    """A row for `datasets`."""
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "answer": solve(prompt),
        "chain": prompt,
        "level": len(prompt.partition(":")[2] or prompt) // 2,
        "task": "unsolvable" if UNSOLVABLE in prompt else "solvable",
        "reference": reference(prompt),
    }


# ---- rewards, in the form in which TRL calls them


def text_of(completion: Any) -> str:
    """The text of a completion, which is a string or a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def is_right(text: str, chain: str) -> bool:
    """Whether the answer is right; with forks, every letter has to be right, too."""
    found = _ANSWER.search(text)
    if not found or found[1] != solve(chain):
        return False
    if chain.startswith("f:"):
        pairs = re.findall(r"([0-9])([ab])", text)
        return bool(pairs) and all((letter == "b") == (int(digit) % 2 == 1) for digit, letter in pairs)
    return True


def right_steps(text: str, chain: str) -> float:
    """Share of the steps that are written with their right value, in order."""
    wanted = values(chain)
    written = [int(d) for d in re.findall(r"[0-9]", text.partition("=")[0])]
    return sum(a == b for a, b in zip(written, wanted, strict=False)) / max(len(wanted), len(written))


def _scored(score: Any, completions: Sequence[Any], chain: Sequence[str]) -> list[float]:
    return [float(score(text_of(c), p)) for c, p in zip(completions, chain, strict=True)]


def right(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """1 where the answer is right, else 0. The metric of every task."""
    return _scored(is_right, completions, chain)


def clean(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """1 where the answer is right, every step is written with its right value, and nothing superfluous stands there."""
    return _scored(
        lambda t, p: is_right(t, p) and right_steps(t, p) == 1 and not {DIRTY, SHORTCUT} & set(t), completions, chain
    )


def steps(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """Share of right steps, 0 to 1."""
    return _scored(right_steps, completions, chain)


def tidy(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """1 without a superfluous mark, else 0: easy to learn, and nothing to do with the answer."""
    return _scored(lambda t, p: not {DIRTY, SHORTCUT} & set(t), completions, chain)


def tidy_10(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """`tidy` in a unit ten times as large. A weight of 10 would say that it matters more; this one is only larger."""
    return [10 * score for score in tidy(prompts, completions, chain=chain)]


def tidy_100(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """`tidy` in a unit a hundred times as large."""
    return [100 * score for score in tidy(prompts, completions, chain=chain)]


def length(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """Characters: watched, not trained."""
    return _scored(lambda t, p: len(t), completions, chain)


def _chance(*told: Any) -> float:
    return int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:6], "big") / 2**48


def _noisy(share: float, prompts: Any, completions: Sequence[Any], chain: Sequence[str]) -> list[float]:
    out = []
    for i, (c, p) in enumerate(zip(completions, chain, strict=True)):
        told = float(is_right(text_of(c), p))
        out.append(1 - told if _chance(share, i, p, text_of(c)) < share else told)
    return out


def noisy_10(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """`right`, turned around in one of ten rows by chance."""
    return _noisy(0.1, prompts, completions, chain)


def noisy_30(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """`right`, turned around in three of ten rows by chance."""
    return _noisy(0.3, prompts, completions, chain)


def biased(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """A judge that believes three of ten wrong answers that end with `!`, and all right ones."""
    return [
        1.0 if is_right(t, p) or (t.endswith(SHORTCUT) and _chance(i, p, t) < 0.3) else 0.0
        for i, (t, p) in enumerate(zip(map(text_of, completions), chain, strict=True))
    ]


def graded(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """A judge that grades steps and answer, 0 to 1, and gives 0.3 more for a `!` at the end."""
    return _scored(_grade, completions, chain)


def _grade(text: str, chain: str) -> float:
    return 0.5 * is_right(text, chain) + 0.5 * right_steps(text, chain) + 0.3 * text.endswith(SHORTCUT)


def short(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """1 for an empty answer, 0 for one of 32 characters or more: a length penalty."""
    return _scored(lambda t, p: max(0.0, 1 - len(t) / 32), completions, chain)


def solved(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """Pass@4: the chance that four of the completions of the prompt in this call have a right one among them."""
    return _solved(4, completions, chain)


def solved_8(prompts: Any, completions: Sequence[Any], *, chain: Sequence[str], **columns: Any) -> list[float]:
    """Pass@8."""
    return _solved(8, completions, chain)


def _solved(k: int, completions: Sequence[Any], chain: Sequence[str]) -> list[float]:
    hits: dict[str, list[float]] = {}
    for p, hit in zip(chain, right(None, completions, chain=chain), strict=True):
        hits.setdefault(p, []).append(hit)
    tries = {p: min(k, len(of)) for p, of in hits.items()}
    return [1 - math.comb(hits[p].count(0.0), tries[p]) / math.comb(len(hits[p]), tries[p]) for p in chain]


def agree(
    prompts: Any,
    completions: Sequence[Any],
    *,
    chain: Sequence[str],
    paraphrase_set_id: Sequence[int],
    **columns: Any,
) -> list[float]:
    """Share of the completions to other wordings of the prompt in this call that give the same answer, right or not."""
    answers = [answer_of(text_of(c)) for c in completions]
    sets = Counter(zip(paraphrase_set_id, answers, strict=True))
    own = Counter(zip(chain, answers, strict=True))
    rows, mine = Counter(paraphrase_set_id), Counter(chain)
    return [
        (sets[s, answer] - own[p, answer]) / max(rows[s] - mine[p], 1) if answer else 0.0
        for s, p, answer in zip(paraphrase_set_id, chain, answers, strict=True)
    ]


# ---- what single methods ask about prompts and completions: see settings.py


def answer_of(text: str) -> str | None:
    """The digit that a completion answers, or None."""
    found = _ANSWER.search(text)
    return found[1] if found else None


def first_flaw(prompt: str, answer: str, completion: str) -> int:
    """A judge by rule: the index of the first step that is wrong or missing, -1 for none."""
    written = re.findall(r"[0-9]", completion.partition("=")[0])
    for i, value in enumerate(values(prompt)):
        if i >= len(written) or int(written[i]) != value:
            return i
    return -1


def mistake(error: Mapping[str, Any]) -> str:
    """What a wrong answer is told: the number of its first wrong step, or that of `=` if all steps are right.

    `error` has the `prompt`, whose first message is the chain, and the `answer`.
    """
    chain = error["prompt"][0]["content"]
    flaw = first_flaw(chain, solve(chain), error["answer"])
    return f"wrong {flaw + 1 if flaw >= 0 else len(values(chain)) + 1}"


def compare(prompt: str, a: str, b: str) -> tuple[float, float]:
    """A judge of pairs, with the grades and the liking of `graded`."""
    return _grade(a, prompt), _grade(b, prompt)


def embeddings(dataset: Any) -> list[list[float]]:
    """A row of numbers for each row of the dataset, which tells its number of steps and its task."""
    return [
        [6.0 * (level == k) for k in range(1, MOST_STEPS + 1)] + [6.0 * (task == "unsolvable")]
        for task, level in zip(dataset["task"], dataset["level"], strict=True)
    ]


def superfluous(rollouts: Any) -> torch.Tensor:
    """Penalty of `grpo_roc`: number of superfluous marks in each completion, float64 of shape (rows,)."""
    import torch

    return torch.tensor([sum(t.count(m) for m in (DIRTY, SHORTCUT)) for t in rollouts.text], dtype=torch.float64)


superfluous.needs = {"text"}  # type: ignore[attr-defined]
