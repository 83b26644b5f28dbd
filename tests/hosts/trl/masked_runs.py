"""Trainers of masked diffusion models on a tiny policy, for tests in this process, in ranks, and in one that dies."""

from __future__ import annotations

import os
import signal
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import probes
import torch
from harness import config, history, score, weights
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from rl_plugins.kit.masked import decoding
from rl_plugins.lab.demo.masked_policy import build_model, build_tokenizer
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.trl.changes import changed
from rl_plugins.trl.masked import MaskedGRPOConfig, MaskedGRPOTrainer
from rl_plugins.trl.masked import trainer as module

LENGTH = 14  # of an answer; floor(log2 14) = 3 steps of 1, 2 and 11 tokens


def masked_policy(folder: Path) -> Path:
    """An untrained policy on disk."""
    if not (folder / "config.json").exists():
        build_model(0).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    return folder


def make_masked(folder: Path, methods: Any = (), trainer: type = MaskedGRPOTrainer, **changes: Any) -> Any:
    more: dict[str, Any] = changes.pop("more", {})
    model = more.pop("model", None) or str(masked_policy(folder / "masked-policy"))
    output = Path(changes.pop("output_dir", folder / "out"))
    args = config(output, cls=MaskedGRPOConfig, methods=list(methods), max_completion_length=LENGTH, **changes)
    torch.manual_seed(0)
    given = dict(reward_funcs=score, train_dataset=build_dataset(200, seed=1)) | more
    made = trainer(model=model, args=args, **given)
    made.remove_callback(PrinterCallback)
    torch.manual_seed(0)
    return made


class Watched(MaskedGRPOTrainer):
    """Keeps what was decoded and every micro-batch of the loss."""

    loss_like = "host"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.answers: list[Any] = []
        self.batches: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def decoded(self, model: Any, prompts: Any) -> Any:
        found = super().decoded(model, prompts)
        self.answers += found
        return found

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._live = None
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        kept = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
        self.batches.append({**kept, "loss": loss.detach(), "live": self._live, "step": self.state.global_step})
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._live = found[0].detach()
        return found


class Kill(TrainerCallback):
    """SIGKILL right after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_kill(folder: Path, step: int, options: dict[str, Any]) -> None:
    made = make_masked(folder, ["mdlm"], **options)
    made.add_callback(Kill(step))
    made.train()


def train_in_ranks(folder: Path) -> dict[str, Any]:
    """Four optimizer steps of two batches, of which rows leave."""
    with noise_of_prompts():
        trainer = make_masked(
            folder,
            ["mdlm", "filter"],
            output_dir=folder / f"ranks{os.environ.get('WORLD_SIZE', '1')}",
            beta=0.04,
            gradient_accumulation_steps=2,
            num_iterations=2,
            max_steps=4,
            learning_rate=0.05,
        )
        trainer.train()
    return {"weights": weights(trainer), "loss": history(trainer, "loss")}


def main(out: Path) -> None:
    """As one of the ranks. The main rank writes what `train_in_ranks` returns."""
    probes.register()
    found = train_in_ranks(out.parent)
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)


@contextmanager
def noise_of_prompts():
    """Noise of a row that depends on its prompt and on how often that came before, not on the rows beside it."""
    own, seen = module.decode, Counter[tuple[int, ...]]()

    def noise_of(ids: list[int]) -> torch.Generator:
        key = tuple(x for x in ids if x)  # without padding
        seen[key] += 1
        return torch.Generator().manual_seed(zlib.crc32(repr((key, seen[key])).encode()))

    def decode(model: Any, prompt: Any, *more: Any) -> Any:
        generators = [noise_of(ids) for ids in prompt.tolist()]

        def choose(logits: Any, temperature: float, generator: Any) -> Any:
            noise = torch.stack([torch.rand(logits.shape[1:], generator=g, dtype=torch.float64) for g in generators])
            return (logits - temperature * torch.log(-torch.log(noise))).argmax(-1)

        with changed(decoding, _choose=choose):
            return own(model, prompt, *more)

    module.decode = decode
    try:
        yield
    finally:
        module.decode = own
