"""Drive the TRL that is on the import path and write what it does to a JSON file.

Usage: ``python trl_host_script.py OUT_DIR``. The tests run it once with the stock TRL and once with the patched copy
first on ``PYTHONPATH``, then compare the two files. Nothing here asserts: the same measurement shows the fault of the
stock host and its absence on the patched one. Under torchrun it measures T5 on several processes and nothing else.

Every training run is a real ``trainer.train()`` of a tiny, randomly initialised model on the CPU.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import SaveStrategy
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import grpo_trainer

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


class HalfAdvantages:
    def _transform_advantages(self, advantages):
        return 0.5 * advantages


class DoubleLoss:
    def _transform_per_token_loss(self, per_token_loss, per_token_logps, log_ratio, mask, inputs):
        return 2.0 * per_token_loss


class OwnClippedLoss:
    """Recompute the host's clipped loss from the arguments of the hook: equal weights show that they are right."""

    called = 0

    def _transform_per_token_loss(self, per_token_loss, per_token_logps, log_ratio, mask, inputs):
        OwnClippedLoss.called += 1
        assert per_token_logps.requires_grad and mask.shape == per_token_loss.shape
        ratio = torch.exp(log_ratio)
        clipped = torch.clamp(ratio, 1 - self.epsilon_low, 1 + self.epsilon_high)
        advantages = inputs["advantages"].unsqueeze(1)
        return -torch.min(ratio * advantages, clipped * advantages)


def kept_rows(rewards_per_func: torch.Tensor) -> torch.Tensor:
    """Keep mask over all rows: the groups come in the order of `PROMPTS` (shuffle_dataset is off)."""
    return torch.arange(len(rewards_per_func)) < GROUP * len(KEPT_PROMPTS)


class KeepHalf:
    def _select_completions(self, rewards_per_func):
        return kept_rows(rewards_per_func)


class KeepNone:
    def _select_completions(self, rewards_per_func):
        return torch.zeros(len(rewards_per_func), dtype=torch.bool)


class KeepHalfFromOutside:
    """Drop rows without the hook: mask them, recount the tokens and put `keep_ratio` into the batch."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        keep = kept_rows(output["advantages"])
        output["tool_mask"] = torch.ones_like(output["completion_mask"]) * keep.unsqueeze(1).int()
        output["num_items_in_batch"] = (output["completion_mask"] * output["tool_mask"]).sum()
        output["keep_ratio"] = keep.float().mean()
        return output


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

    def compare_with_kept_prompts(self, cls: type, base: type, **kwargs: Any) -> dict[str, float]:
        """Compare the update of `cls` with that of `base` on a batch that never held the dropped groups."""
        update, _ = self.update(cls, **kwargs)
        reference, _ = self.update(base, prompts=KEPT_PROMPTS, **kwargs)
        return {"scale": scale(update, reference), "error": relative_error(update, reference)}


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|value - reference| / |reference|``; a value that is not finite counts as 1e9."""
    error = ((value - reference).norm() / reference.norm()).item()
    return error if error < 1e9 else 1e9


def scale(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the factor between two parallel updates."""
    return (value.norm() / reference.norm()).item()


def digest(value: torch.Tensor) -> str:
    """Return a hash of the exact bits."""
    return hashlib.sha256(value.numpy().tobytes()).hexdigest()


def outcome(function: Callable[[], Any]) -> str:
    """Return "ok", or the name and the text of the exception that `function` raised."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def rollout_of(completions: Callable[[list[str]], list[list[int]]]) -> Callable[..., dict[str, Any]]:
    """Return a `rollout_func` that answers with `completions(prompts)`."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rows = completions(prompts)
        return {"prompt_ids": [[3, 4, 5, 6]] * len(rows), "completion_ids": rows, "logprobs": None}

    return rollout


def measure_t1(host: Host) -> dict[str, Any]:
    def grpo(completions, **config):
        kwargs = {"rollout_func": rollout_of(completions)}
        return host.trainer(GRPOTrainer, trainer_kwargs=kwargs, **config)

    def one_empty(position):
        def completions(prompts):
            return [[] if i == position else [5 + i, 6, 1] for i in range(len(prompts))]

        return completions

    def rloo_with_empty(position):
        class EmptyRLOO(RLOOTrainer):
            def _generate_single_turn(self, prompt_ids, *args, **kwargs):
                return one_empty(position)(prompt_ids)

        return EmptyRLOO

    def trained_weights(trainer):
        trainer.train()
        assert torch.isfinite(host.weights(trainer.model)).all(), "the weights are not finite"
        assert (host.weights(trainer.model) != host.start).any(), "the weights did not move"

    result = {}
    twice = grpo(lambda prompts: [[5, 1]] * (2 * len(prompts)))
    result["too_many_rows"] = outcome(lambda: twice._generate(PROMPTS[:2]))
    result["step_too_many_rows"] = outcome(lambda: twice.train())
    half = grpo(lambda prompts: [[5, 1]] * (len(prompts) // 2))
    result["too_few_rows"] = outcome(lambda: half._generate(PROMPTS[:2]))
    for name, trainer in [("grpo", grpo(one_empty(0))), ("rloo", host.trainer(rloo_with_empty(0)))]:
        trainer.model.train()
        result[f"generate_{name}"] = outcome(lambda t=trainer: t._generate(PROMPTS[:2]))
        result[f"clipped_ratio_{name}"] = list(trainer._metrics["train"]["completions/clipped_ratio"])
    for masked in (False, True):
        kwargs = {"mask_truncated_completions": masked}
        for position in (0, 5):  # the first row decides the dtype of the padded batch
            name = f"step_grpo_row_{position}_masked_{masked}"
            result[name] = outcome(lambda p=position, k=kwargs: trained_weights(grpo(one_empty(p), **k)))
        result[f"step_rloo_row_0_masked_{masked}"] = outcome(
            lambda k=kwargs: trained_weights(host.trainer(rloo_with_empty(0), **k))
        )
    return result


def measure_default(host: Host) -> dict[str, Any]:
    """Two steps with sampled completions and no hook in use: every bit of the weights must stay that of the host."""
    result = {}
    for name, cls, config in [
        ("grpo_dapo", GRPOTrainer, {}),
        ("grpo_grpo_kl_reuse", GRPOTrainer, {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2}),
        ("grpo_dr_grpo", GRPOTrainer, {"loss_type": "dr_grpo"}),
        ("grpo_luspo", GRPOTrainer, {"loss_type": "luspo"}),
        ("grpo_sapo", GRPOTrainer, {"loss_type": "sapo"}),
        ("rloo_kl", RLOOTrainer, {"beta": 0.1}),
    ]:
        delta, _ = host.update(cls, steps=2, accumulation=2, **config)
        result[name] = {"moved": delta.norm().item(), "digest": digest(delta)}
    return result


def measure_t2(host: Host) -> dict[str, Any]:
    result = {}
    for name, cls in [("grpo", FixedGRPO), ("rloo", FixedRLOO)]:
        reference, plain = host.update(cls, learning_rate=1.0)
        halved, hooked = host.update(type("Halved", (HalfAdvantages, cls), {}), learning_rate=1.0)
        result[name] = {
            "logged": list(plain._logs["advantages"]),
            "logged_hook": list(hooked._logs["advantages"]),
            "update_error": relative_error(halved, 0.5 * reference),
        }
    return result


def measure_t3(host: Host) -> dict[str, Any]:
    result = {}
    for loss_type in [*LOSS_TYPES, "bnpo", "cispo", "vespo"]:
        config = {"loss_type": loss_type, "learning_rate": 1.0}
        reference, _ = host.update(FixedGRPO, **config)
        doubled, _ = host.update(type("Doubled", (DoubleLoss, FixedGRPO), {}), **config)
        result[loss_type] = {"scale": scale(doubled, reference), "error": relative_error(doubled, 2 * reference)}
    off_policy = {"steps": 2, "num_iterations": 2, "learning_rate": 0.5}
    reference, _ = host.update(FixedGRPO, **off_policy)
    own, _ = host.update(type("Own", (OwnClippedLoss, FixedGRPO), {}), **off_policy)
    result["own_clipped_loss"] = {"same_bits": digest(own) == digest(reference), "called": OwnClippedLoss.called}
    return result


def measure_t5(host: Host) -> dict[str, Any]:
    config = REUSE_AND_KL
    half = type("Half", (KeepHalf, FixedGRPO), {})
    outside = type("Outside", (KeepHalfFromOutside, FixedGRPO), {})
    nothing = type("Nothing", (KeepNone, FixedGRPO), {})
    compare = host.compare_with_kept_prompts
    result: dict[str, Any] = {}
    for loss_type in LOSS_TYPES:
        for accumulation in (1, 2):
            kwargs = {**config, "loss_type": loss_type, "accumulation": accumulation}
            result[f"{loss_type}_accumulation_{accumulation}"] = compare(half, FixedGRPO, **kwargs)
        result[f"{loss_type}_outside"] = compare(outside, FixedGRPO, loss_type=loss_type)
        update, trainer = host.update(nothing, **config, loss_type=loss_type)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        result[f"{loss_type}_nothing_kept"] = {"moved": repr(update.norm().item()), "losses": list(map(repr, losses))}
    result["grpo_entropy_bonus"] = compare(half, FixedGRPO, loss_type="grpo", entropy_coef=0.1)
    result["grpo_sequence_level"] = compare(
        half, FixedGRPO, **config, loss_type="grpo", importance_sampling_level="sequence"
    )

    _, trainer = host.update(half, accumulation=2)
    batches = trainer._buffered_inputs
    result["batch"] = {
        "attended": [int(batch["completion_mask"].sum()) for batch in batches],
        "in_loss": [int((batch["completion_mask"] * batch.get("tool_mask", 1)).sum()) for batch in batches],
        "num_items_in_batch": [int(batch["num_items_in_batch"]) for batch in batches],
        "keep_ratio": [float(batch.get("keep_ratio", "nan")) for batch in batches],
    }

    rloo = type("HalfRLOO", (KeepHalf, FixedRLOO), {})
    for accumulation in (1, 2):
        result[f"rloo_accumulation_{accumulation}"] = compare(rloo, FixedRLOO, **config, accumulation=accumulation)
    update, trainer = host.update(type("NothingRLOO", (KeepNone, FixedRLOO), {}), **config)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result["rloo_nothing_kept"] = {"moved": repr(update.norm().item()), "losses": list(map(repr, losses))}
    return result


def measure_t5_on_several_processes(host: Host) -> dict[str, Any]:
    """With two processes, the second one loses all of its rows and the first one none."""
    result = {}
    for name in [*LOSS_TYPES, "rloo"]:
        base = FixedRLOO if name == "rloo" else FixedGRPO
        config = REUSE_AND_KL if name == "rloo" else {**REUSE_AND_KL, "loss_type": name}
        half = type("Half", (KeepHalf, base), {})
        result[name] = host.compare_with_kept_prompts(half, base, **config)
    return result


def measure_t11(host: Host) -> dict[str, Any]:
    """The prompts of every step of an uninterrupted run, and of runs that resume from its checkpoints."""
    result: dict[str, Any] = {}
    for name, cls in [("grpo", FixedGRPO), ("rloo", FixedRLOO)]:

        def prompts_of(checkpoint: str | None, name: str = name, cls: type = cls) -> list[Any]:
            seen: list[Any] = []

            class Recording(cls):  # type: ignore[misc]
                def _generate_single_turn(self, prompt_ids, *args, **kwargs):
                    seen.append(sorted({tuple(ids) for ids in prompt_ids}))
                    return super()._generate_single_turn(prompt_ids, *args, **kwargs)

            trainer = host.trainer(
                Recording, prompts=PROMPTS[:2], steps=8, output_dir=str(host.directory / name), save_steps=1
            )
            trainer.args.save_strategy = SaveStrategy.STEPS
            trainer.shuffle_dataset = True
            trainer.train_dataset = Dataset.from_dict({"prompt": [f"{c}:1" for c in "abcdef"]})  # 3 steps
            trainer.train(resume_from_checkpoint=checkpoint)
            return seen

        result[name] = {"whole": prompts_of(None)}
        for step in (2, 3, 4, 7):
            result[name][str(step)] = prompts_of(str(host.directory / name / f"checkpoint-{step}"))
    return result


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # each train() ends in a full collection: leave what the imports made out of it
    out = Path(sys.argv[1])
    results: dict[str, Any] = {"host": str(Path(grpo_trainer.__file__).resolve())}
    if PROCESSES > 1:
        rank = int(os.environ["RANK"])
        results["T5"] = measure_t5_on_several_processes(Host(out / f"rank{rank}"))
        if rank > 0:
            return
    else:
        host = Host(out)
        results["default"] = measure_default(host)
        for measure in (measure_t1, measure_t2, measure_t3, measure_t5, measure_t11):
            results[measure.__name__.removeprefix("measure_").upper()] = measure(host)
    (out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
