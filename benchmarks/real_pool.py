"""A pool of rollouts of a pre-trained model with rewards: 32 prompts x 64 rollouts of three checkpoints of a GRPO run.

    python benchmarks/real_pool.py ADAPTERS   ADAPTERS: folder of `real_learning.py --out`; goes on where it stopped

The checkpoints are the base model and the adapters of the run `grpo 0` of `real_learning.py` after 12 and 24 steps,
which are copied into the pool in bfloat16. Model, tasks and limits are those of that script. Rollouts are sampled in
bfloat16 at temperature 1 from the whole vocabulary. A part is the 64 rollouts of a prompt with a random stream of its
own, so a pool that was stopped is the same as one that was not. What is in the files: `real_pool/README.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from real_learning import HALF, LENGTH, STEPS, encode, questions

from rl_plugins.environments import reasoning_gym as gym
from rl_plugins.lab.real.model import NAME, PACKAGE, VERSION, model_folder

PROMPTS, ROLLOUTS = 32, 64
POOL = Path(__file__).parent / "real_pool"
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("prompt", pa.int32()),
        ("rollout", pa.int32()),
        ("completion_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("text", pa.string()),
        ("ended", pa.bool_()),
        ("correct", pa.float32()),
        ("solved", pa.float32()),
        ("brief", pa.float32()),
    ]
)


@torch.no_grad()
def sample(model: Any, ids: torch.Tensor, n: int, end: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples n completions of one prompt; the prompt is read once.

    Args:
        ids: (1, length) prompt.
        end: id of the token that ends a completion.

    Returns:
        Token ids (n, T), `end` after the end, and their log-probs (n, T), float32.
    """
    stream = torch.Generator().manual_seed(seed)
    read = model(ids, use_cache=True, logits_to_keep=1)
    cache, logits = read.past_key_values, read.logits[:, -1].expand(n, -1)
    cache.batch_repeat_interleave(n)
    tokens, logprobs = [], []
    ended = torch.zeros(n, dtype=torch.bool)
    for _ in range(LENGTH):
        logp = logits.float().log_softmax(-1)
        below = logp.double().exp().cumsum(-1)  # by its inverse: a third of the time of `multinomial`
        token = torch.searchsorted(below, torch.rand(n, 1, generator=stream, dtype=torch.float64) * below[:, -1:])
        token[ended] = end
        tokens.append(token)
        logprobs.append(logp.gather(1, token))
        ended |= token[:, 0] == end
        if ended.all():
            break
        step = model(token, past_key_values=cache, use_cache=True)
        cache, logits = step.past_key_values, step.logits[:, -1]
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def part(model: Any, tokenizer: Any, row: dict[str, Any], step: int, prompt: int) -> pa.Table:
    """The rollouts of one prompt."""
    end = tokenizer.eos_token_id
    ids, logprobs = sample(model, encode(tokenizer, [row])["input_ids"], ROLLOUTS, end, 1000 * step + prompt)
    ended = (ids == end).any(1)
    lengths = torch.where(ended, (ids == end).int().argmax(1) + 1, ids.shape[1]).tolist()
    kept = [x[:n].tolist() for x, n in zip(ids, lengths, strict=True)]
    texts = tokenizer.batch_decode(kept, skip_special_tokens=True)
    columns = {key: [row[key]] * ROLLOUTS for key in ("task", "entry", "answer")}
    made = {
        "step": [step] * ROLLOUTS,
        "prompt": [prompt] * ROLLOUTS,
        "rollout": list(range(ROLLOUTS)),
        "completion_ids": kept,
        "logprobs": [x[:n].tolist() for x, n in zip(logprobs, lengths, strict=True)],
        "text": texts,
        "ended": ended.tolist(),
        **{f.__name__: f(texts, **columns) for f in (gym.correct, gym.solved, gym.brief)},
    }
    return pa.table(made, schema=SCHEMA)


def policy(step: int, adapters: Path) -> tuple[Any, str]:
    """The model of a step with its adapter merged, and the checksum of the adapter's file."""
    from peft import PeftModel
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder("bfloat16"), dtype=torch.bfloat16)
    if not step:
        return model.eval(), ""
    folder = POOL / f"adapter-{step}"
    weights = folder / "adapter_model.safetensors"
    if not weights.exists():
        source = adapters / f"grpo-0-{step}"
        config = json.loads((source / "adapter_config.json").read_text()) | {"base_model_name_or_path": NAME}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({k: v.bfloat16() for k, v in load_file(source / weights.name).items()}, weights)
    model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return model.eval(), hashlib.sha256(weights.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--parts", type=Path, default=Path("build/real_pool"), help="folder of unfinished parts")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    base = model_folder("bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = questions()[0][:PROMPTS]
    POOL.mkdir(exist_ok=True)
    args.parts.mkdir(parents=True, exist_ok=True)
    prompts = encode(tokenizer, rows)
    ids = [x[m.bool()].tolist() for x, m in zip(prompts["input_ids"], prompts["attention_mask"], strict=True)]
    kept = [{"prompt": i, "prompt_ids": ids[i], **{k: r[k] for k in r if k != "prompt"}} for i, r in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(kept), POOL / "prompts.parquet", compression="zstd")
    for step in (0, HALF, STEPS):
        file = POOL / f"rollouts-{step}.parquet"
        if file.exists():
            continue
        if step and not (POOL / f"adapter-{step}").exists() and not (args.adapters / f"grpo-0-{step}").exists():
            print(f"step {step} is left out: {args.adapters} has no adapter grpo-0-{step}")
            continue
        model, adapter = policy(step, args.adapters)
        parts = []
        for prompt, row in enumerate(rows):
            stored = args.parts / f"{step}-{prompt}.parquet"
            if not stored.exists():
                pq.write_table(part(model, tokenizer, row, step, prompt), stored)
                print(stored, flush=True)
            parts.append(pq.read_table(stored))
        about = {
            "model": f"{NAME} of {PACKAGE} {VERSION} in bfloat16, adapter merged",
            "model_sha256": hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest(),
            "adapter_sha256": adapter,
            "temperature": 1.0,
            "max_completion_length": LENGTH,
            "seed_of_a_part": "1000 * step + prompt",
        }
        together = pa.concat_tables(parts).replace_schema_metadata({"pool": json.dumps(about)})
        pq.write_table(together, file, compression="zstd")


if __name__ == "__main__":
    main()
