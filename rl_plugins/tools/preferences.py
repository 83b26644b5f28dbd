"""Preference pairs that teach a model to choose between a direct answer and long reasoning (EconProver, 2509.12603).

For each problem, attempts in both modes are made with the base model and verified. Then

    some direct attempt is right          chosen: a right direct one,         rejected: any with reasoning
    only some with reasoning are right    chosen: a right one with reasoning, rejected: a wrong direct one
    none is right                         no pair

All pairs have one prompt that permits both modes. The model trained on them picks the mode by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError, shown

DIRECT, REASONING = "direct", "reasoning"
PROMPT = "{prompt}"
TEMPLATE = "{prompt}\n\nAnswer directly if you can. Reason step by step first only if you need to."
COLUMNS = ("prompt", "mode", "completion", "verified")


@dataclass(frozen=True)
class PairRule:
    """How pairs are made.

    Args:
        template: the one prompt, with {prompt} where the problem's own is; of a conversation it is the text of the last
            message.
        direct, reasoning: what the column `mode` has for the two modes.
        threshold: lowest number in `verified` that is a right attempt.
        seed: of the choice among several attempts.
    """

    template: str = TEMPLATE
    direct: str = "direct"
    reasoning: str = "cot"
    threshold: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if PROMPT not in self.template:
            raise ConfigError(
                f"the template is {shown(self.template)}; it must hold {PROMPT}, which stands for the problem."
            )
        if self.direct == self.reasoning:
            raise ConfigError(f"both modes are called {shown(self.direct)}. Give them two names.")


@dataclass(frozen=True)
class ModePairs:
    """What became of the problems.

    Attributes:
        rows: a pair per problem, as TRL's DPOTrainer takes it: `prompt`, `chosen`, `rejected`; and `mode`, that of the
            chosen one.
        unsolved: problems without a right attempt.
        nothing_rejected: solved problems without an attempt that could be rejected.
    """

    rows: Sequence[Mapping[str, Any]]
    unsolved: int
    nothing_rejected: int


@dataclass
class _Problem:
    """Attempts at one problem, by mode."""

    prompt: Any
    right: dict[str, set[str]] = field(default_factory=lambda: {DIRECT: set(), REASONING: set()})
    wrong: dict[str, set[str]] = field(default_factory=lambda: {DIRECT: set(), REASONING: set()})
    unknown: dict[str, set[str]] = field(default_factory=lambda: {DIRECT: set(), REASONING: set()})

    def pair(self) -> tuple[str, set[str], set[str]]:
        """The mode of the chosen attempt, and what it and the rejected one are chosen from."""
        if self.right[DIRECT]:
            others = self.right[REASONING] | self.wrong[REASONING] | self.unknown[REASONING]
            return DIRECT, self.right[DIRECT], others
        # a direct attempt that nobody verified may be right
        return REASONING, self.right[REASONING], self.wrong[DIRECT]


def mode_pairs(attempts: Iterable[Mapping[str, Any]], rule: PairRule | None = None) -> ModePairs:
    """A pair for each problem that has one, in the order in which problems come first.

    The pairs depend on the attempts of their problem and on the seed; the order of the attempts, copies of them and
    other problems change nothing.

    Args:
        attempts: rows with `prompt` (a text, or messages), `mode`, `completion` (a text) and `verified`: True, False, a
            number, or None where nobody verified it. Rows with the same prompt are of the same problem.

    Raises:
        ConfigError: a row lacks one of these or has something else there.
    """
    rule = rule or PairRule()
    problems: dict[str, _Problem] = {}
    for number, row in enumerate(attempts):
        _check_row(row, number, rule)
        key = json.dumps(row["prompt"], sort_keys=True)
        problem = problems.setdefault(key, _Problem(row["prompt"]))
        mode = DIRECT if row["mode"] == rule.direct else REASONING
        verified = row["verified"]
        of = problem.unknown if verified is None else problem.right if verified >= rule.threshold else problem.wrong
        of[mode].add(row["completion"])
    rows, unsolved, nothing_rejected = [], 0, 0
    for key, problem in problems.items():
        mode, chosen, rejected = problem.pair()
        if not chosen:
            unsolved += 1
            continue
        best_of = sorted(c for c in chosen if rejected - {c})  # an attempt is not preferred to itself
        if not best_of:
            nothing_rejected += 1
            continue
        rng = np.random.default_rng([rule.seed, int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")])
        best = best_of[rng.integers(len(best_of))]
        others = sorted(rejected - {best})
        rows.append(_row(problem.prompt, best, others[rng.integers(len(others))], mode, rule))
    return ModePairs(rows, unsolved, nothing_rejected)


def _row(prompt: Any, chosen: str, rejected: str, mode: str, rule: PairRule) -> dict[str, Any]:
    if isinstance(prompt, str):
        asked: Any = rule.template.replace(PROMPT, prompt)
        return {"prompt": asked, "chosen": chosen, "rejected": rejected, "mode": mode}
    *before, last = prompt
    asked = [*before, {**last, "content": rule.template.replace(PROMPT, last["content"])}]
    answers = {
        name: [{"role": "assistant", "content": text}] for name, text in (("chosen", chosen), ("rejected", rejected))
    }
    return {"prompt": asked, **answers, "mode": mode}


def _check_row(row: Mapping[str, Any], number: int, rule: PairRule) -> None:
    missing = [name for name in COLUMNS if name not in row]
    if missing:
        raise ConfigError(
            f"row {number} of the attempts has no {missing[0]} (it has: {', '.join(sorted(row))}). Attempts have the "
            f"columns {', '.join(COLUMNS)}."
        )
    prompt, verified = row["prompt"], row["verified"]
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt)
    if not (isinstance(prompt, str) or (messages and isinstance(prompt[-1].get("content"), str))):
        raise ConfigError(
            f"row {number} of the attempts has the prompt {shown(prompt)}; it must be a text or messages."
        )
    if row["mode"] not in (rule.direct, rule.reasoning):
        raise ConfigError(
            f"row {number} of the attempts has the mode {shown(row['mode'])}; it must be {rule.direct} or "
            f"{rule.reasoning}. Change the column, or name the modes with --direct and --reasoning."
        )
    if not isinstance(row["completion"], str):
        raise ConfigError(
            f"row {number} of the attempts has the completion {shown(row['completion'])}; it must be a text."
        )
    if verified is not None and (not isinstance(verified, (bool, int, float)) or verified != verified):
        raise ConfigError(
            f"row {number} of the attempts has {shown(verified)} in `verified`; it must be true, false, a number, or "
            f"empty where nobody verified the attempt."
        )
