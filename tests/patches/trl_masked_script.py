"""On a TRL with T15: a masked diffusion model trained by two functions, and by the overrides of `MaskedTrainer`.

python trl_masked_script.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor
from torch.nn.functional import pad
from transformers import BertForMaskedLM, GenerationConfig

from rl_plugins.kit.masked import Decoded, Decoding, decode, trajectory_logprobs
from rl_plugins.lab.demo.masked_policy import build_model, build_tokenizer
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.trl.masked import MaskedGRPOConfig, MaskedGRPOTrainer

LENGTH, ROWS = 14, 32  # tokens of an answer, rows of a micro-batch
HOW = Decoding(LENGTH, schedule="ascending")
MASK, END = (int(x) for x in (build_tokenizer().mask_token_id, build_tokenizer().eos_token_id))


def score(completion_ids: Any, **columns: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def logits_of(model: Any, mask: Tensor) -> Any:
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return lambda ids: model(input_ids=ids, attention_mask=mask, position_ids=places).logits


def sample(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Tensor]]:
    parts = [decoded(model, prompts[i : i + ROWS]) for i in range(0, len(prompts), ROWS)]
    return torch.cat([p.answer for p in parts]).tolist(), {"unmasked_at": torch.cat([p.unmasked_at for p in parts])}


def decoded(model: Any, prompts: list[list[int]]) -> Decoded:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return decode(logits_of(model, pad(mask, (0, LENGTH), value=1)), ids, HOW, MASK, END)


def logps(model: Any, ids: Tensor, mask: Tensor, kept: int, unmasked_at: Tensor) -> tuple[Tensor, Tensor | None]:
    prompt, answer, steps = ids[:, :-kept], ids[:, -kept:], HOW.number_of_steps
    return trajectory_logprobs(
        logits_of(model, mask), prompt, answer, unmasked_at, steps, MASK, entropies=True, without_mask=True
    )


def train(folder: Path, trainer: type, config: type, options: dict[str, Any], **functions: Any) -> Tensor:
    args = config(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        num_iterations=2,
        num_generations=8,
        max_completion_length=LENGTH,
        max_steps=4,
        beta=0.04,
        learning_rate=0.5,
        optim="sgd",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        **options,
    )
    model: BertForMaskedLM = build_model(0)
    model.generation_config = GenerationConfig(eos_token_id=END)
    model.save_pretrained(folder / "model")  # the reference model is loaded from there
    model = BertForMaskedLM.from_pretrained(folder / "model")
    model.generation_config = GenerationConfig(eos_token_id=END)
    data = build_dataset(200, seed=1)
    made = trainer(
        model=model, args=args, reward_funcs=score, train_dataset=data, processing_class=build_tokenizer(), **functions
    )
    torch.manual_seed(0)
    made.train()
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


if __name__ == "__main__":
    out = Path(sys.argv[1])
    masked = {"unmasking": "ascending", "logprobs_from": "trajectory"}
    torch.save(
        {
            "begun": torch.cat([p.detach().flatten() for p in build_model(0).parameters()]),
            "overrides": train(out, MaskedGRPOTrainer, MaskedGRPOConfig, masked),
            "functions": train(out, trl.GRPOTrainer, trl.GRPOConfig, {}, sampling_func=sample, logps_func=logps),
        },
        out / "out.pt",
    )
