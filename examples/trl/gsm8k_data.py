"""GSM8K for TRL: rows with a prompt and an answer, and two reward functions. examples/trl/gsm8k.yaml names all of it.

    cd examples/trl
    python gsm8k_data.py gsm8k          # once; needs access to the hub

Needs: pip install ".[trl]"
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

PROMPT = "Think step by step, then give the final number as \\boxed{{number}}.\n\n{question}"


def to_row(row: dict[str, str]) -> dict[str, Any]:
    """A row of openai/gsm8k as TRL reads it; `answer` is the number after the last "####"."""
    return {
        "prompt": [{"role": "user", "content": PROMPT.format(question=row["question"])}],
        "answer": row["answer"].split("####")[-1].strip().replace(",", ""),
    }


def boxed(text: str) -> str | None:
    found = re.findall(r"\\boxed\{\s*\$?(-?[\d,]*\.?\d+)\s*\}", text)
    return found[-1].replace(",", "") if found else None


def correct(completions, answer, **columns) -> list[float]:
    """1 if the last boxed number is the answer."""
    return [float(boxed(c[0]["content"]) == a) for c, a in zip(completions, answer, strict=True)]


def boxed_once(completions, **columns) -> list[float]:
    """1 for exactly one boxed number, less for none or several: a second reward, for methods that need several."""
    counts = [c[0]["content"].count("\\boxed{") for c in completions]
    return [1.0 if n == 1 else 0.5 if n > 1 else 0.0 for n in counts]


def main(folder: Path) -> None:
    from datasets import load_dataset

    for split in ("train", "test"):
        rows = load_dataset("openai/gsm8k", "main", split=split)
        rows.map(to_row, remove_columns=rows.column_names).to_json(folder / f"{split}.jsonl")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
