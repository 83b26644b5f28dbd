"""T5 on several processes: `torchrun trl_ranks_script.py OUT_DIR`, with the patched TRL first on the path.

Each case trains a tiny, randomly initialised model on the CPU with half of the groups dropped, and on a batch that
never held them. It writes the relative difference of the two updates.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

CHARS = "0123456789+-*%=,.:;<>()[]# abcdefghijklmnopqrstuvwxyz?"
PROMPTS = ["a:12", "b:345", "c:6", "d:78"]
KEPT_PROMPTS = PROMPTS[:2]  # the hooks below drop the groups of the other two
GROUP = 4  # completions per prompt
MAX_LENGTH = 8
LOSS_TYPES = ["grpo", "sapo", "dr_grpo", "luspo", "dapo"]
# The second step reuses the completions of the first one, so the ratios leave 1 and the KL term is not 0.
REUSE_AND_KL: dict[str, Any] = {"steps": 2, "num_iterations": 2, "beta": 0.1}
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    special = ["<pad>", "<eos>", "<bos>"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(special + list(CHARS))}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def save_model(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save a tiny random model to `path`, from where each trainer (and its reference model) loads it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward that differs within every group of `fixed_completions`."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def fixed_completions(prompt_ids: list[list[int]]) -> list[list[int]]:
    """Return a completion per prompt that depends only on the prompt and on its position in the group.

    Lengths vary from 2 to `MAX_LENGTH`, the last token is EOS (id 1) for two in three of them.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    rows = []
    for ids in prompt_ids:
        number = seen[tuple(ids)]
        seen[tuple(ids)] += 1
        start = sum(ids) + 5 * number
        rows.append([3 + (start + 11 * t) % len(CHARS) for t in range(2 + start % (MAX_LENGTH - 1))])
        if start % 3:
            rows[-1][-1] = 1
    return rows


class FixedGRPO(GRPOTrainer):
    """GRPO on `fixed_completions` instead of sampled ones."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return fixed_completions(prompt_ids), None


class FixedRLOO(RLOOTrainer):
    """RLOO on `fixed_completions` instead of sampled ones."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return fixed_completions(prompt_ids)


def kept_rows(rewards_per_func: torch.Tensor) -> torch.Tensor:
    """Keep mask over all rows: the groups come in the order of `PROMPTS` (shuffle_dataset is off)."""
    return torch.arange(len(rewards_per_func)) < GROUP * len(KEPT_PROMPTS)


class KeepHalf:
    def _select_completions(self, rewards_per_func):
        return kept_rows(rewards_per_func)


class Host:
    """Builds and runs trainers on one saved model.

    Args:
        directory: folder for the model and the trainers' output.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = make_tokenizer()
        save_model(directory / "model", self.tokenizer)
        self.start = self.weights(Qwen3ForCausalLM.from_pretrained(directory / "model"))

    @staticmethod
    def weights(model: torch.nn.Module) -> torch.Tensor:
        """Return all parameters as one vector."""
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

    def trainer(
        self,
        cls: type,
        *,
        prompts: list[str] | None = None,
        accumulation: int = 1,
        steps: int = 1,
        trainer_kwargs: dict[str, Any] | None = None,
        **config: Any,
    ) -> Any:
        """Return a trainer whose generation batch holds `GROUP` completions of each prompt."""
        prompts = prompts or PROMPTS
        config_cls = RLOOConfig if issubclass(cls, RLOOTrainer) else GRPOConfig
        args = config_cls(
            per_device_train_batch_size=GROUP * len(prompts) // accumulation // PROCESSES,
            gradient_accumulation_steps=accumulation,
            num_generations=GROUP,
            max_completion_length=MAX_LENGTH,
            max_steps=steps,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # clipping would hide a wrong factor
            shuffle_dataset=False,
            seed=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **{"learning_rate": 0.1, "beta": 0.0, "output_dir": str(self.directory / "out"), **config},
        )
        trainer = cls(
            model=str(self.directory / "model"),
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
            processing_class=self.tokenizer,
            **(trainer_kwargs or {}),
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def update(self, cls: type, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Train and return how far the weights moved, and the trainer."""
        trainer = self.trainer(cls, **kwargs)
        trainer.train()
        return self.weights(trainer.accelerator.unwrap_model(trainer.model)) - self.start, trainer

    def compare_with_kept_prompts(self, cls: type, base: type, **kwargs: Any) -> float:
        """Compare the update of `cls` with that of `base` on a batch that never held the dropped groups."""
        update, _ = self.update(cls, **kwargs)
        reference, _ = self.update(base, prompts=KEPT_PROMPTS, **kwargs)
        return relative_error(update, reference)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|value - reference| / |reference|``; a value that is not finite counts as 1e9."""
    error = ((value - reference).norm() / reference.norm()).item()
    return error if error < 1e9 else 1e9


def measure(host: Host) -> dict[str, float]:
    """With two processes, the second one loses all of its rows and the first one none."""
    result = {}
    for name in [*LOSS_TYPES, "rloo"]:
        base = FixedRLOO if name == "rloo" else FixedGRPO
        config = REUSE_AND_KL if name == "rloo" else {**REUSE_AND_KL, "loss_type": name}
        half = type("Half", (KeepHalf, base), {})
        result[name] = host.compare_with_kept_prompts(half, base, **config)
    return result


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # each train() ends in a full collection: leave what the imports made out of it
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    results = measure(Host(out / f"rank{rank}"))
    if rank == 0:
        (out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
