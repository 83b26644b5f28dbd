"""GRPO with methods on GSM8K, a real model, vLLM on GPUs. Only the import and `methods` differ from a TRL script.

    accelerate launch --num_processes 4 examples/trl/gsm8k.py --config examples/trl/gsm8k.yaml
    accelerate launch --num_processes 4 examples/trl/gsm8k.py --config examples/trl/gsm8k.yaml --methods vade gdpo

Needs: pip install "rl-plugins[trl]" vllm, GPUs with 24 GB or more, and access to the hub (model and dataset).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from datasets import load_dataset
from trl import TrlParser

from rl_plugins.trl import GRPOConfig, GRPOTrainer

PROMPT = "Think step by step, then give the final number as \\boxed{{number}}.\n\n{question}"


@dataclass
class ScriptArguments:
    model: str = field(default="Qwen/Qwen2.5-1.5B-Instruct", metadata={"help": "Model to train."})


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


def main() -> None:
    script, args = TrlParser((ScriptArguments, GRPOConfig)).parse_args_and_config()
    rows = load_dataset("openai/gsm8k", "main", split="train")
    dataset = rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": PROMPT.format(question=row["question"])}],
            "answer": row["answer"].split("####")[-1].strip().replace(",", ""),
        },
        remove_columns=rows.column_names,
    )
    trainer = GRPOTrainer(model=script.model, reward_funcs=[correct, boxed_once], args=args, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
