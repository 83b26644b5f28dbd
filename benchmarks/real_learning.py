"""Learning of a pre-trained model of 135 M parameters on tasks of reasoning-gym: methods against plain GRPO, by seeds.

    python benchmarks/real_learning.py --seeds 8      the missing runs, all arms of a seed together
    python benchmarks/real_learning.py --table        table and curves of the runs that are there, in docs/real.md

Written down before the first run (2026-11-26); what a run gave changes none of it:
- Policy: SmolLM2-135M-Instruct in bfloat16 with LoRA (rank 8, alpha 32, all four projections of attention).
- Tasks: sums and products of two one-digit numbers, scored by the package. Questions that are held out are not trained.
- Rewards: `correct` and `brief`, weight 1 each. 24 steps of 4 prompts x 4 rollouts of at most 24 tokens, AdamW.
- Learning rate 3e-4 for every arm, by judgment and without a run: some tens of steps of LoRA with Adam need a high one.
  No other rate was tried.
- Claims, on greedy answers to 64 held-out questions after step 24, difference to `grpo` paired by seed:
  1. `gdpo`: more of them are solved.
  2. `vade`: more of them are solved.
  A claim holds if the 95 % interval of eight seeds is above 0. Fewer seeds decide nothing.

A run is 5 to 8 CPU minutes on one core. Each is stored when it ends, in real_learning.json. real_pool has the adapters
of `grpo 0`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_plugins.environments import reasoning_gym as gym
from rl_plugins.lab.compare.report import Interval
from rl_plugins.lab.real.model import model_folder

RESULTS, PAGE = Path(__file__).parent / "real_learning.json", Path(__file__).parents[1] / "docs" / "real.md"
FIGURE = PAGE.parent / "figures" / "real_learning.png"
SEEDS = 8  # that decide
ARMS: dict[str, list[str]] = {"grpo": [], "gdpo": ["gdpo"], "vade": ["vade"]}
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = {
    "basic_arithmetic": ONE_DIGIT | {"operators": ["+"], "allow_negation": False, "allow_parentheses": False},
    "products": ONE_DIGIT,
}
STEPS, HALF, HELD_OUT, LENGTH, RATE = 24, 12, 64, 24, 3e-4
REWARDS = [gym.correct, gym.brief]


def questions() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows for training and rows held out, each question once: neither list has one of the other."""
    once = {row["prompt"][-1]["content"]: row for row in gym.rows(TASKS, 400)}
    rows = list(once.values())
    return rows[HELD_OUT:], rows[:HELD_OUT]


def encode(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> Any:
    texts = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, tokenize=False) for r in rows]
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)


@torch.no_grad()
def held_out(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean rewards of greedy answers."""
    model.eval()
    ids = encode(tokenizer, rows)
    made = model.generate(**ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(made[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    columns = {key: [row[key] for row in rows] for key in ("task", "entry", "answer")}
    scores = {f.__name__: f(texts, **columns) for f in (gym.correct, gym.solved, gym.brief)}
    return {name: sum(values) / len(values) for name, values in scores.items()}


def train(arm: str, seed: int, out: Path, steps: int = STEPS, model: Path | None = None) -> dict[str, Any]:
    """One run. Adapters after half of the steps and after all are in `out`.

    Returns:
        Held-out means by step, the log of each step, CPU seconds.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback

    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    rows, held = questions()
    folder = model or model_folder("bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    curve: dict[str, dict[str, float]] = {}

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **rest: Any) -> None:
            if state.global_step in (steps // 2, steps):
                curve[str(state.global_step)] = held_out(model, tokenizer, held)
                model.save_pretrained(out / f"{arm}-{seed}-{state.global_step}")
                model.train()

    args = GRPOConfig(
        output_dir=str(out / f"{arm}-{seed}"),
        methods=ARMS[arm],
        seed=seed,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=LENGTH,
        max_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        model_init_kwargs={"dtype": "bfloat16"},
        bf16=False,  # the weights are bfloat16 and the adapter float32: no autocast
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    lora = LoraConfig(
        r=8, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=REWARDS,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Look()],
    )
    began = time.process_time()
    trainer.train()
    log = [{k: v for k, v in row.items() if isinstance(v, float | int)} for row in trainer.state.log_history]
    return {"held_out": curve, "log": log, "cpu_seconds": round(time.process_time() - began)}


def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"base": {}, "runs": {}}


def table() -> str:
    """Per arm the held-out means after the last step, and differences to `grpo` paired by seed."""
    found = results()
    runs: dict[str, dict[str, dict[str, float]]] = {arm: {} for arm in ARMS}
    for name, run in found["runs"].items():
        arm, seed = name.split(" ")
        runs[arm][seed] = run["held_out"][str(STEPS)]
    lines = [
        "| variant | seeds | solved | brief | solved, minus `grpo` | seeds of the difference |",
        "|---|---|---|---|---|---|",
    ]
    if base := found["base"]:
        lines.append(f"| before training | | {base['solved']:.3f} | {base['brief']:.3f} | | |")
    for arm, seeds in runs.items():
        if not seeds:
            continue
        means = [Interval.of([run[key] for run in seeds.values()]) for key in ("solved", "brief")]
        pairs = [run["solved"] - runs["grpo"][s]["solved"] for s, run in seeds.items() if s in runs["grpo"]]
        difference = (str(Interval.of(pairs, 1 / HELD_OUT)), len(pairs)) if arm != "grpo" else ("", "")
        lines.append(f"| {arm} | {len(seeds)} | {means[0]} | {means[1]} | {difference[0]} | {difference[1]} |")
    few = min(map(len, runs.values()))
    if few < SEEDS:
        return "\n".join(lines) + f"\n\n{few} of {SEEDS} seeds have run in every variant: this decides nothing."
    told = (f"- `{arm}`, more solved than `grpo`: {_verdict(runs, arm)}" for arm in runs if arm != "grpo")
    return "\n".join([*lines, "", *told])


def _verdict(runs: dict[str, dict[str, dict[str, float]]], arm: str) -> str:
    found = Interval.of([run["solved"] - runs["grpo"][s]["solved"] for s, run in runs[arm].items()], 1 / HELD_OUT)
    low, high = found.mean - found.half, found.mean + found.half
    if low > 0:
        return "the claim holds."
    return "the claim fails." if high < 0 else f"not seen. A difference from {low:+.2f} to {high:+.2f} fits these runs."


def draw() -> Any:
    """Share of held-out questions solved: each seed thin, means and 95 % intervals thick."""
    from rl_plugins.lab.compare.figures import color, line, name_axes, name_lines, panels

    found, steps = results(), [0, HALF, STEPS]
    by_arm: dict[str, list[list[float]]] = {}
    for name, run in found["runs"].items():
        curve = [found["base"]["solved"], *(run["held_out"][str(step)]["solved"] for step in steps[1:])]
        by_arm.setdefault(name.split(" ")[0], []).append(curve)
    figure, axes = panels(len(by_arm), sharey=True)
    for i, (axis, (arm, curves)) in enumerate(zip(axes, by_arm.items(), strict=True)):
        for curve in curves:
            axis.plot(steps, curve, color=color(i), linewidth=0.6, alpha=0.5)
        means = [Interval.of(values) for values in zip(*curves, strict=True)]
        axis.plot(steps, [m.mean for m in means], label=f"{arm}, {len(curves)} seeds", **line(i))
        axis.fill_between(
            steps, [m.mean - m.half for m in means], [m.mean + m.half for m in means], color=color(i), alpha=0.2
        )
        axis.set_ylim(0, 1)
        name_axes(axis, "optimizer step", "solved, held out (share)" if not i else "")
    name_lines(figure)
    return figure


def write_on_page(maker: str, text: str, name: str = PAGE.name) -> None:
    """Puts a text between the marks of who made it, in a page of docs/."""
    page = PAGE.with_name(name)
    begin, end = (f"<!-- made by benchmarks/{maker}: {mark} -->" for mark in ("begin", "end"))
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("build/real_learning"), help="folder of the adapters")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.table:
        from rl_plugins.lab.compare.figures import save

        save(FIGURE, draw)
        write_on_page("real_learning.py", table())
        return
    found = results()
    if not found["base"]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(model_folder("bfloat16"), dtype=torch.bfloat16)
        found["base"] = held_out(model, AutoTokenizer.from_pretrained(model_folder("bfloat16")), questions()[1])
    for seed in range(args.seeds):
        for arm in args.arms:
            if (name := f"{arm} {seed}") not in found["runs"]:
                found["runs"][name] = train(arm, seed, args.out)
                RESULTS.write_text(json.dumps(found, indent=1) + "\n")
                print(name, found["runs"][name]["held_out"], flush=True)


if __name__ == "__main__":
    main()
