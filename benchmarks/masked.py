"""A training step of masked diffusion models against one of causal GRPO in TRL: CPU time per token, and peak memory.

Two untrained models of three layers and hidden size 96, 32 rollouts of 128 tokens per step, one thread. The causal one
writes left to right with its cache and is kept from ending early. The masked one decodes in S = 3, 5 or 7 uniform
passes; its log-probs are those of one pass, or of the S states of the trajectory (`cj_grpo`), with or without
`recompute_states`. Arms take turns in processes of their own, because the peak of a process never falls. Each trains
three steps, of which the last two are timed.

Reported: CPU time per trained token of the rollouts and of the rest (log-probs, loss, gradient, optimizer), the ratio
to causal GRPO in the same repetition, and by how much the peak of resident memory grew during training.

    python benchmarks/masked.py --repeat 3
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, LENGTH, STEPS = 32, 128, 3
SIZE: dict[str, Any] = dict(hidden_size=96, num_hidden_layers=3, num_attention_heads=3, intermediate_size=192)
CAUSAL = "causal GRPO"
ARMS: dict[str, dict[str, Any]] = {
    CAUSAL: {},
    "one step, S = 7": {"diffusion_steps": 7},
    **{
        f"trajectory, S = {s}{', recomputed' * again}": {
            "diffusion_steps": s,
            "logprobs_from": "trajectory",
            "recompute_states": again,
        }
        for again in (False, True)
        for s in (3, 5, 7)
    },
}


def causal_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = dict(num_key_value_heads=3, head_dim=32)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=72, pad_token_id=0, eos_token_id=1, bos_token_id=2, **SIZE, **heads))


def masked_model() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=256)
    return BertForMaskedLM(BertConfig(vocab_size=72, pad_token_id=0, eos_token_id=1, **SIZE, **dropout))


def score(completion_ids: Any, **columns: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def measure(arm: str) -> dict[str, float]:
    import torch
    from transformers import TrainerCallback

    from rl_plugins.lab.demo import masked_policy, policy
    from rl_plugins.lab.demo.tasks import build_dataset
    from rl_plugins.trl import GRPOConfig, GRPOTrainer
    from rl_plugins.trl.masked import MaskedGRPOConfig, MaskedGRPOTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    causal = arm == CAUSAL
    base: Any = GRPOTrainer if causal else MaskedGRPOTrainer
    spent: list[float] = []  # CPU seconds: of the rollouts of each step, then of all of it

    class Timed(base):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            made = super()._generate_single_turn(*args, **kwargs)
            spent.append(time.process_time() - begin)
            assert all(len(ids) == LENGTH for ids in made[0])
            return made

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            spent.append(time.process_time() - self.begin)

    options: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": LENGTH}} if causal else ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        args = (GRPOConfig if causal else MaskedGRPOConfig)(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            num_generations=8,
            max_completion_length=LENGTH,
            max_steps=STEPS,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            logging_steps=1000,
            **options,
        )
        trainer = Timed(
            model=causal_model() if causal else masked_model(),
            processing_class=(policy if causal else masked_policy).build_tokenizer(),
            reward_funcs=score,
            args=args,
            train_dataset=build_dataset(200),
            callbacks=[Steps()],
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = ROWS * LENGTH * (STEPS - 1)
    rollouts, whole = sum(spent[2::2]), sum(spent[3::2])
    return {
        "rollouts": 1e6 * rollouts / tokens,
        "update": 1e6 * (whole - rollouts) / tokens,
        "step": 1e6 * whole / tokens,
        "mib": (peak - before) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--arm", choices=ARMS, help="measure one arm in this process")
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(measure(arguments.arm)))
        return
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(arguments.repeat):
        for arm in ARMS:
            line = subprocess.run([sys.executable, __file__, "--arm", arm], capture_output=True, text=True, check=True)
            found[arm].append(json.loads(line.stdout.splitlines()[-1]))
    cases: dict[str, Any] = {}
    for arm, runs in found.items():
        ratio = {
            f"{part}_ratio": statistics.median(r[part] / c[part] for r, c in zip(runs, found[CAUSAL], strict=True))
            for part in ("rollouts", "update", "step")
        }
        least = {f"{part}_us": min(r[part] for r in runs) for part in ("rollouts", "update", "step")}
        peak = statistics.median(r["mib"] for r in runs)
        cases[arm] = {k: round(v, 3) for k, v in {**least, **ratio, "peak_mib": peak}.items()}
        print(arm, cases[arm], flush=True)
    result = {"rows": ROWS, "length": LENGTH, "repeat": arguments.repeat, "arms": cases}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
