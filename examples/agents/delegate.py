"""M-GRPO in TRL: a main agent that may send parts of its question to sub-agents, both played by one small policy.

    python examples/agents/delegate.py

The question `5391,8240` asks for both lists in order, `=1359,0248`. The main agent answers at once, or delegates with
`(5391)(8240)`: each list is a question to a sub-agent, which answers `=1359`, and the main agent reads both and writes
the answer. The policy is warm-started here on demonstrations that answer at once (60 %, each digit wrong with
probability 0.3) or delegate (40 %), and of sub-agents (each digit wrong with probability 0.1): delegating pays from the
start.

Arms: TRL's GRPO, where all rows of a question are one group, and M-GRPO, where main agent and sub-agents are compared
with their own kind only and sub-agents' rows are aligned to 2 per rollout; and M-GRPO without alignment. The reward is
the same for all: the main agent gets 1 for the right answer, 0.1 for a well-formed one, else 0; a well-formed sub-agent
1 if its main agent was right, else 0.1, and a malformed one 0.

Measured in training, where every question comes once: right answers of main agents, of sub-agents, and calls.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import arguments, compare, write_rows

from rl_plugins.lab.demo import policy

DIGITS, GROUP, QUESTIONS, CALLS = 4, 8, 6, 2
DELEGATES, NOISE, SUB_NOISE = 0.4, 0.3, 0.1
WARM_START = policy.Fit(steps=400)
ROLLOUT = {"max_calls": CALLS, "max_turns": 2, "sub_tokens": DIGITS + 3, "parse": "delegate:parts", "reply": "{result}"}
# Rewards are those of the reward function, and statistics as the authors' code has them.
CODE = {"sub_reward": "own", "ddof": 1, "std_eps": 1e-6}
ARMS: dict[str, Any] = {
    "grpo": (["m_grpo_rollout"], {"m_grpo_rollout": ROLLOUT}),
    "m_grpo": (
        ["m_grpo_rollout", "m_grpo"],
        {"m_grpo_rollout": ROLLOUT, "m_grpo": {**CODE, "statistics": "before", "sub_per_rollout": CALLS}},
    ),
    "m_grpo, not aligned": (
        ["m_grpo_rollout", "m_grpo"],
        {"m_grpo_rollout": ROLLOUT, "m_grpo": {**CODE, "sub_per_rollout": CALLS, "align": False}},
    ),
}
_CALL = re.compile(r"\(([^()]*)\)")
_ANSWER = re.compile(rf"=([0-9]{{{DIGITS}}},[0-9]{{{DIGITS}}})$")
_SUB_ANSWER = re.compile(rf"=([0-9]{{{DIGITS}}})")


def parts(text: str) -> list[str]:
    """What a turn of the main agent delegates."""
    return _CALL.findall(text)


def outcome(
    completions: Sequence[Any], agent: Sequence[str | None], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Rewards of main agents and sub-agents. The rows of a rollout follow one another, its main agent's first."""
    rewards, right = [], False
    for completion, who, wanted in zip(completions, agent, answer, strict=True):
        text = completion[-1]["content"]
        if who == "main":
            found = _ANSWER.search(text)
            right = found is not None and found.group(1) == wanted
            rewards.append(1.0 if right else 0.1 if found else 0.0)
        else:
            rewards.append((1.0 if right else 0.1) if _SUB_ANSWER.fullmatch(text) else 0.0)
    return rewards


def main_right(
    completions: Sequence[Any], agent: Sequence[str | None], answer: Sequence[str], **columns: Any
) -> list[float | None]:
    """1 where a main agent's answer is right; nothing for other rows."""
    rows = zip(completions, agent, answer, strict=True)
    return [float(c[-1]["content"].endswith(f"={a}")) if who == "main" else None for c, who, a in rows]


def sub_right(
    completions: Sequence[Any], agent: Sequence[str | None], answer: Sequence[str], **columns: Any
) -> list[float | None]:
    """1 where a sub-agent's answer is one of the two right lists; nothing for other rows."""
    rows = zip(completions, agent, answer, strict=True)
    return [
        float(c[-1]["content"] in [f"={part}" for part in a.split(",")]) if who == "sub" else None for c, who, a in rows
    ]


def question(rng: random.Random) -> tuple[str, str]:
    lists = ["".join(rng.choices("0123456789", k=DIGITS)) for _ in range(2)]
    return ",".join(lists), ",".join("".join(sorted(digits)) for digits in lists)


def noisy(rng: random.Random, digits: str, chance: float) -> str:
    return "".join(rng.choice("0123456789") if d.isdigit() and rng.random() < chance else d for d in digits)


def demonstrations(rng: random.Random) -> Iterator[list[str]]:
    """Batches of rendered conversations."""
    while True:
        batch = []
        for _ in range(WARM_START.batch_size // 2):
            asked, answer = question(rng)
            results = [f"={noisy(rng, part, SUB_NOISE)}" for part in answer.split(",")]
            first = asked.split(",")
            if rng.random() < DELEGATES:
                calls = "".join(f"({part})" for part in first)
                final = "=" + ",".join(result[1:] for result in results)
                read = "\n".join(results)
                batch.append(f"<user>{asked}<asst>{calls}<eos><user>{read}<asst>{final}<eos>")
            else:
                batch.append(f"<user>{asked}<asst>={noisy(rng, answer, NOISE)}<eos>")
            batch.append(f"<user>{first[0]}<asst>{results[0]}<eos>")
        yield batch


def load_policy(folder: Path) -> Path:
    """The warm-started policy, made once."""

    def build(directory: Path) -> None:
        tokenizer, model = policy.build_tokenizer(), policy.build_model(WARM_START.seed)
        batches = demonstrations(random.Random(WARM_START.seed))
        policy.fit(model, lambda: policy.labeled(tokenizer, next(batches)), WARM_START, None)
        policy.save(model, tokenizer, directory)

    return policy.cached(folder / f"policy-{policy.cache_key(WARM_START, __file__)}", build)


def main() -> None:
    args = arguments(__doc__.splitlines()[0], "compare-results/delegate")
    rng = random.Random(0)
    batch = (1 + CALLS) * GROUP * QUESTIONS
    asked = [question(rng) for _ in range(batch // GROUP * args.steps)]  # TRL needs a prompt for every group of rows
    rows = [{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in asked]
    write_rows(args.out / "data", train=rows)
    config = {
        "model_name_or_path": str(load_policy(args.out)),
        "dataset_name": str(args.out / "data"),
        "reward_funcs": ["delegate.outcome", "delegate.main_right", "delegate.sub_right"],
        "reward_weights": [1.0, 0.0, 0.0],
        "per_device_train_batch_size": batch,
        "num_generations": GROUP,
        "max_completion_length": 48,
        "learning_rate": 3e-4,  # with 1e-3 training is unstable in every arm
    }
    labels = {
        "rewards/main_right/mean": "main agent right",
        "rewards/sub_right/mean": "sub-agents right",
        "m_grpo_rollout/calls": "calls per rollout",
    }
    note = f"{QUESTIONS} questions x {GROUP} rollouts a batch, {args.steps} steps."
    compare(args, config, ARMS, labels, note)


if __name__ == "__main__":
    main()
