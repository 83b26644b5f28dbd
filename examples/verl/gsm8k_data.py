"""GSM8K for verl: the data set as parquet files, and the reward function.

    python examples/verl/gsm8k_data.py FOLDER      writes train.parquet and test.parquet (needs the hub)

`compute_score` is named in the runs by reward.custom_reward_function (see gsm8k.sh).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

INSTRUCTION = 'Think step by step, then give the final number in a last line "#### number".'
FORMAT_WEIGHT = 0.2


def to_row(example: dict[str, str], index: int, split: str) -> dict[str, Any]:
    """One example in verl's format. Fields of `extra_info` count as columns for methods (`column:answer`)."""
    answer = example["answer"].split("####")[-1].strip().replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{example['question']}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index, "split": split, "question": example["question"], "answer": answer},
    }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """Reward of one completion.

    Returns:
        "score", which is trained, and its parts: "accuracy", 1 if the last number after "####" is the answer, and
        "format", 1 if there is exactly one such number. Methods see the parts by +rl_plugins.rewards.NAME=weight.
    """
    numbers = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", solution_str)
    accuracy = float(bool(numbers) and numbers[-1].replace(",", "") == ground_truth)
    form = float(len(numbers) == 1)
    return {"score": accuracy + FORMAT_WEIGHT * form, "accuracy": accuracy, "format": form}


def main() -> None:
    from datasets import load_dataset

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "gsm8k")
    folder.mkdir(parents=True, exist_ok=True)
    for split, examples in load_dataset("openai/gsm8k", "main").items():
        rows = examples.map(
            lambda e, i, s=split: to_row(e, i, s), with_indices=True, remove_columns=["question", "answer"]
        )
        rows.to_parquet(str(folder / f"{split}.parquet"))
        print(f"{len(rows)} rows in {folder / f'{split}.parquet'}")


if __name__ == "__main__":
    main()
