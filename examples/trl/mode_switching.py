"""Mode switching of EconProver (arXiv 2509.12603) on the demo's tasks: a small policy learns when to reason.

    python examples/trl/mode_switching.py mode-switching          (CPU, two minutes)

The question `a:5391` asks for the digits in order. A direct answer is `=1359`. An answer with reasoning writes each
digit in brackets first, `(1)(3)(5)(9)=1359`, which takes three more tokens per digit. `!a:5391` asks for the first,
`?a:5391` for the second, `a:5391` permits both. The policy is warm-started here: its direct answers get worse with the
length of the question, its reasoning hardly does, and without a mark it reasons every second time.

1. Attempts in both modes on training questions, each verified        attempts.jsonl
2. rl-plugins mode-pairs: a pair per question, without a mark          pairs/train.jsonl
3. TRL's DPOTrainer on the pairs, from the policy                      switched/
4. Right answers and tokens on other questions: each mode alone, the policy without a mark before and after DPO

The paper names standard DPO. On this small policy it also lowers the likelihood of the chosen answers and ruins them.
With TRL's `loss_type: [sigmoid, sft]`, which adds the log-likelihood of the chosen answer, it does not: that model is
saved. Rate, epochs and the second loss were chosen on the seeds 100 and 101.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rl_plugins.commands.mode_pairs import mode_pairs
from rl_plugins.lab.demo import policy, tasks

LEVELS = (1, 2, 3, 4)  # 2 to 8 digits
WRONG = {1: 0.0, 2: 0.05, 3: 0.4, 4: 0.6}  # chance that a demonstration's direct answer has another digit, per digit
WARM_START = policy.Fit(steps=500)
MARKS = {"direct": "!", "cot": "?", "free": ""}
LONGEST = 36
QUESTIONS, ATTEMPTS, HELD_OUT, SAMPLES = 400, 4, 200, 4
TEMPLATE = "{prompt}"  # the policy knows no other prompt without a mark
LOSSES = {"after DPO": ["sigmoid"], "after DPO with SFT": ["sigmoid", "sft"]}


def reasoning(answer: str) -> str:
    """An answer with its reasoning."""
    return "".join(f"({digit})" for digit in answer) + f"={answer}"


def demonstrations(rng: random.Random) -> Iterator[list[str]]:
    """Batches of rendered conversations."""
    while True:
        batch = []
        for _ in range(WARM_START.batch_size):
            level = rng.choice(LEVELS)
            asked = tasks.random_prompt(rng, level)
            answer, mode = tasks.solve(asked), rng.choice(("direct", "cot"))
            mark = MARKS[mode] if rng.random() < 0.6 else ""
            noisy = "".join(rng.choice("0123456789") if rng.random() < WRONG[level] else digit for digit in answer)
            batch.append(f"<user>{mark}{asked}<asst>{'=' + noisy if mode == 'direct' else reasoning(answer)}<eos>")
        yield batch


def load_policy(folder: Path, seed: int = 0) -> Path:
    """The warm-started policy of a seed, made once."""

    def build(directory: Path) -> None:
        tokenizer, model = policy.build_tokenizer(), policy.build_model(seed)
        batches = demonstrations(random.Random(seed))
        policy.fit(model, lambda: policy.labeled(tokenizer, next(batches)), WARM_START)
        policy.save(model, tokenizer, directory)

    return policy.cached(folder / f"policy-{policy.cache_key(WARM_START, __file__)}-{seed}", build)


def sampled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[str], seed: int
) -> list[tuple[str, int]]:
    """A sample for each of these questions: its text, and how many tokens it has."""
    texts = [f"<user>{question}<asst>" for question in asked]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model.eval().generate(**inputs, max_new_tokens=LONGEST, do_sample=True, top_k=0)
    made = made[:, inputs["input_ids"].shape[1] :]
    lengths = (made != tokenizer.pad_token_id).sum(1).tolist()
    return list(zip(tokenizer.batch_decode(made, skip_special_tokens=True), lengths, strict=True))


def right(question: str, text: str) -> bool:
    """The verifier: the last answer counts."""
    return text.rpartition("=")[2] == tasks.solve(question) and "=" in text


def attempts(model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Attempts in both modes, verified: what `rl-plugins mode-pairs` reads."""
    questions = [row["prompt"][0]["content"] for row in rows for _ in range(ATTEMPTS)]
    found = []
    for number, mode in enumerate(("direct", "cot")):
        answers = sampled(model, tokenizer, [MARKS[mode] + q for q in questions], 2 * seed + number)
        for question, (text, _) in zip(questions, answers, strict=True):
            prompt = [{"role": "user", "content": question}]
            found.append({"prompt": prompt, "mode": mode, "completion": text, "verified": right(question, text)})
    return found


def train(model: Path, pairs: Path, loss: Sequence[str], out: Path, seed: int) -> PreTrainedModel:
    """TRL's DPO on the pairs, without logs and checkpoints."""
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        output_dir=str(out),
        beta=0.1,
        loss_type=list(loss),
        learning_rate=5e-4,
        per_device_train_batch_size=32,
        num_train_epochs=6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=seed,
    )
    data = load_dataset(str(pairs.parent), split="train").remove_columns("mode")
    trainer = DPOTrainer(model=str(model), args=args, train_dataset=data)
    trainer.train()
    return trainer.model


def measured(model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], mark: str, seed: int) -> dict[str, Any]:
    """Share of right answers, tokens and reasoning, over all questions and per level."""
    questions = [row["prompt"][0]["content"] for row in rows for _ in range(SAMPLES)]
    answers = sampled(model, tokenizer, [mark + q for q in questions], seed)
    won = torch.tensor([float(right(q, text)) for q, (text, _) in zip(questions, answers, strict=True)])
    tokens = torch.tensor([float(n) for _, n in answers])
    reasons = torch.tensor([float("(" in text) for text, _ in answers])
    level = torch.tensor([row["level"] for row in rows for _ in range(SAMPLES)])
    found = {"right": won, "tokens": tokens, "reasoning": reasons}
    overall = {name: float(values.mean()) for name, values in found.items()}
    of_level = {k: {name: float(values[level == k].mean()) for name, values in found.items()} for k in LEVELS}
    return {**overall, "levels": of_level}


def run(out: Path, seed: int = 0) -> dict[str, Any]:
    """Everything for one seed. Returns what was measured, by arm."""
    folder = load_policy(out, seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    work = out / f"seed-{seed}"
    work.mkdir(parents=True, exist_ok=True)
    made = attempts(model, tokenizer, tasks.build_rows(QUESTIONS, seed=seed, levels=LEVELS), seed)
    (work / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    mode_pairs(work / "attempts.jsonl", work / "pairs" / "train.jsonl", TEMPLATE, force=True)
    held_out = tasks.build_rows(HELD_OUT, seed=seed, levels=LEVELS, split="held_out")
    found = {
        "direct answers": measured(model, tokenizer, held_out, MARKS["direct"], seed),
        "reasoning": measured(model, tokenizer, held_out, MARKS["cot"], seed),
        "before DPO": measured(model, tokenizer, held_out, MARKS["free"], seed),
    }
    for arm, loss in LOSSES.items():
        switched = train(folder, work / "pairs" / "train.jsonl", loss, work / "switched", seed)
        found[arm] = measured(switched, tokenizer, held_out, MARKS["free"], seed)
    switched.save_pretrained(work / "switched")
    tokenizer.save_pretrained(work / "switched")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the policy, the pairs and the trained model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for arm, found in run(args.out, args.seed).items():
        levels = "  ".join(f"{values['reasoning']:.2f}" for values in found["levels"].values())
        print(f"{arm:20s} right {found['right']:.3f}   tokens {found['tokens']:.1f}   reasoning by level {levels}")


if __name__ == "__main__":
    main()
