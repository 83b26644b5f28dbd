"""A pool for gradient quality: rollouts of the embedded policy with sketched score functions.

    python benchmarks/quality_pool.py       # writes benchmarks/quality/embedded_policy.npz: minutes of a core

128 prompts of the demo, 32 rollouts each at temperature 1, two rewards, and the gradient of each rollout in all
parameters as 192 numbers. `rl-plugins bench --quality --task benchmarks/quality/embedded_policy.npz` measures in it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_plugins.lab.demo import rewards, tasks
from rl_plugins.lab.demo.policy import MAX_COMPLETION_LENGTH, load_policy
from rl_plugins.tools.gradient_quality import write_pool
from rl_plugins.tools.gradient_quality.sketch import score_sketches

OUT = Path(__file__).parent / "quality" / "embedded_policy.npz"


@torch.no_grad()
def sample(model: Any, ids: torch.Tensor, n: int, end: int) -> list[list[int]]:
    """Completions of a prompt, with the token that ends them."""
    how = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_COMPLETION_LENGTH)
    made = model.generate(ids.expand(n, -1), pad_token_id=end, eos_token_id=end, **how)
    rows = made[:, ids.shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--dims", type=int, default=192)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = load_policy()
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    score, told, length, levels = [], [], [], []
    for row in tasks.build_rows(args.prompts):
        levels.append(f"level {row['level']}")
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        rows = sample(model, ids, args.rollouts, tokenizer.eos_token_id)
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        columns = {k: [v] * len(rows) for k, v in row.items() if k != "prompt"}
        prompts = [row["prompt"]] * len(rows)
        told.append([rewards.exact(prompts, texts, **columns), rewards.digits(prompts, texts, **columns)])
        score.append(score_sketches(model, [ids[0].tolist()] * len(rows), rows, args.dims).numpy())
        length.append([len(r) for r in rows])
        print(f"{len(score)}: {np.mean(told[-1][0]):.2f} right, {len(set(texts))} texts", flush=True)
    exact, digits = np.array(told).transpose(1, 0, 2)
    args.out.parent.mkdir(exist_ok=True)
    more = dict(reward_names=["digits"], domain=levels)
    write_pool(args.out, np.stack(score), digits[..., None], exact > 0.5, np.array(length), **more)


if __name__ == "__main__":
    main()
