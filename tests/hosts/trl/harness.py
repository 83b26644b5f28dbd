"""Real GRPOTrainers on a tiny policy, for tests in this process and in ranks started by torchrun.

`stub_sampling` replaces the sampling of the policy (and nothing else) by completions that depend on the prompt and on
how often it was asked for in the step only, so that runs with other ranks or micro-batches see the same rollouts.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
import trl
from transformers.trainer_callback import PrinterCallback

from rl_plugins.core.requests import Generated
from rl_plugins.lab.demo.policy import build_model, build_tokenizer
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.runtime.ranks import gather
from rl_plugins.trl import GRPOConfig, GRPOTrainer
from rl_plugins.trl.generation.engine import TrlEngine

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
gc.freeze()  # the Trainer collects garbage; without this each collection walks through all imported modules


def policy(folder: Path) -> Path:
    """An untrained demo policy on disk."""
    if not (folder / "config.json").exists():
        build_model(0).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    return folder


def score(completion_ids: Any = None, **kwargs: Any) -> list[float]:
    """A graded reward from the token ids alone."""
    return [sum(c) % 7 / 7 for c in completion_ids]


def text_score(completions: Any = None, **kwargs: Any) -> list[float]:
    """A graded reward from the text alone."""
    return [sum(map(ord, c[0]["content"])) % 7 / 7 for c in completions]


def length(completion_ids: Any = None, **kwargs: Any) -> list[float]:
    return [len(c) / 12 for c in completion_ids]


def config(output_dir: Path, methods: Any = (), cls: type = GRPOConfig, **changes: Any) -> Any:
    values: dict[str, Any] = dict(
        output_dir=str(output_dir),
        per_device_train_batch_size=64 // WORLD,
        num_generations=8,
        max_steps=2,
        learning_rate=1e-3,
        max_completion_length=14,
        use_cpu="ACCELERATE_USE_DEEPSPEED" not in os.environ,  # accelerate ignores DeepSpeed with it
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        loss_type="dapo",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        dataloader_pin_memory=False,
        logging_steps=1,
        optim="sgd",
        lr_scheduler_type="constant",
    )
    if WORLD > 1:
        values["ddp_backend"] = "gloo"
    values.update(changes)
    if "per_device_train_batch_size" not in changes:
        values["per_device_train_batch_size"] = (
            64 // WORLD // values.get("steps_per_generation", 0)
            if values.get("steps_per_generation")
            else 64 // WORLD // values.get("gradient_accumulation_steps", 1)
        )
    if issubclass(cls, GRPOConfig):
        values["methods"] = list(methods)
    return cls(**values)


def make(
    folder: Path,
    methods: Any = (),
    *,
    stock: bool = False,
    reward: Any = score,
    dataset: Any = None,
    trainer: type | None = None,
    callbacks: Any = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer on the tiny policy; `stock=True`: TRL's own classes."""
    output = Path(changes.pop("output_dir", folder / "out"))
    args = config(output, methods, trl.GRPOConfig if stock else GRPOConfig, **changes)
    if os.environ.get("ACCELERATE_USE_FSDP"):
        _allow_fsdp_on_cpu()
    cls = trainer or (trl.GRPOTrainer if stock else GRPOTrainer)
    torch.manual_seed(0)
    made = cls(
        model=str(policy(folder / "policy")),
        reward_funcs=reward,
        args=args,
        train_dataset=build_dataset(200, seed=1) if dataset is None else dataset,
        callbacks=callbacks,
        **(more or {}),
    )
    made.remove_callback(PrinterCallback)
    torch.manual_seed(0)
    return made


def _allow_fsdp_on_cpu() -> None:
    """accelerate gives FSDP only to what it takes for a GPU run; the process group stays gloo."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState()
    state.distributed_type = state._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextmanager
def stub_sampling(longest: int = 13, pool: Sequence[int] = range(5, 20)):
    """Completions as a function of the prompt and of how many of that prompt came before in the batch, of tokens of the
    pool."""
    original = trl.GRPOTrainer._generate_single_turn

    @functools.wraps(original)
    def fake(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        seen: Counter[tuple[int, ...]] = getattr(self, "_stub_seen", Counter())
        out = []
        for rank, prompts in enumerate(gather(self.accelerator, prompt_ids)):
            for p in prompts:
                key = tuple(p)
                rng = random.Random(zlib.crc32(repr((key, seen[key], self.state.global_step)).encode()))
                seen[key] += 1
                tokens = [rng.choice(pool) for _ in range(rng.randrange(1, longest))]
                if rank == self.accelerator.process_index:
                    out.append(tokens + ([self._tokenizer.eos_token_id] if rng.random() < 0.8 else []))
        return out, None

    seen_by_programs: Counter[Any] = Counter()

    def call(self: Any, options: Any, requests: Any, most: int) -> Any:
        """The same for rollout programs: a function of the context and of how often it was continued in the step."""
        accelerator = self.trainer.accelerator
        out = []
        for rank, part in enumerate(gather(accelerator, [(r.trajectory.context, r.max_tokens) for r in requests])):
            for context, most in part:
                key = (context, self.trainer.state.global_step)
                rng = random.Random(zlib.crc32(repr((key, seen_by_programs[key])).encode()))
                seen_by_programs[key] += 1
                tokens = [rng.choice(pool) for _ in range(rng.randrange(1, longest))][:most]
                if rank == accelerator.process_index:
                    out.append(Generated(tuple(tokens), (-1.0,) * len(tokens), "stop"))
        return out

    own = TrlEngine._call
    trl.GRPOTrainer._generate_single_turn, TrlEngine._call = fake, call
    try:
        yield
    finally:
        trl.GRPOTrainer._generate_single_turn, TrlEngine._call = original, own


def weights(trainer: Any) -> torch.Tensor:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def history(trainer: Any, name: str) -> list[float]:
    return [h[name] for h in trainer.state.log_history if name in h]


class EngineTruth:
    """What the engine of `transformers` does in training, counted inside of its sampling loop: rows that are not
    finished make a token. Calls without a logits processor of ours (a pass of the context cache) are `cache_calls`."""

    def __init__(self) -> None:
        self.decoded = self.read = self.calls = self.cache_calls = 0

    @contextmanager
    def watching(self, of_programs: bool = False):
        from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
        from transformers.generation.utils import GenerationMixin

        own, truth = GenerationMixin._sample, self

        class Counting(StoppingCriteria):
            def __init__(self, criteria: Any, rows: int) -> None:
                self.criteria, self.unfinished = criteria, torch.ones(rows, dtype=torch.bool)

            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                done = self.criteria(input_ids, scores, **kwargs)
                truth.decoded += int(self.unfinished.sum())
                self.unfinished &= ~done.cpu()
                return done

        def sample(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.training:  # evaluation
                return own(self, input_ids, *args, **kwargs)
            if of_programs and not any(type(p).__name__ == "SamplingWatch" for p in kwargs["logits_processor"]):
                truth.cache_calls += 1
                return own(self, input_ids, *args, **kwargs)
            truth.calls += 1
            truth.read += int(kwargs["attention_mask"].sum())
            counting = Counting(kwargs["stopping_criteria"], len(input_ids))
            criteria = StoppingCriteriaList([*kwargs["stopping_criteria"]])
            counting.criteria = criteria
            kwargs["stopping_criteria"] = _OneCriterion([counting], criteria)
            return own(self, input_ids, *args, **kwargs)

        GenerationMixin._sample = sample
        try:
            yield self
        finally:
            GenerationMixin._sample = own


def _OneCriterion(counting: Any, criteria: Any) -> Any:
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    class Seen(StoppingCriteriaList):
        def __iter__(self) -> Any:  # `_sample` looks for criteria that know the end of sequence
            return iter(criteria)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return counting[0](*args, **kwargs)

    return Seen(criteria)
