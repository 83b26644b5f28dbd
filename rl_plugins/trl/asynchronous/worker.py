"""A rollout worker in the trainer's own process, on transformers' generate: for the CPU, tests and evidence.

TRL's own worker is a process with a vLLM server behind it. This one is asked by the trainer itself: when its queue is
empty it makes the samples of one optimizer step, with weights that are exactly `lag` optimizer steps old.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo.async_rollout_worker import (
    RolloutGroup,
    RolloutSample,
    TrainingSequence,
    _AsyncRolloutLoop,
)

from rl_plugins.errors import ConfigError
from rl_plugins.trl.facts import reward_names


@dataclass(slots=True)
class Sample(RolloutSample):
    """A sample of which more is known: all its tokens are of `model_version`, and `prompt_index` is its row of the
    dataset."""

    prompt_index: int = -1


@dataclass
class _Published:
    """Weights as they were after `step` optimizer steps, under TRL's number."""

    step: int
    version: int
    weights: dict[str, Tensor]


class GenerateWorker:
    """Rollout worker, its queue, and weight transfer in one object: pass it as `rollout_worker` and `weight_transfer`.

    The dataset is walked in its order, `num_generations` completions per prompt. The batch of optimizer step b is made
    by the weights after step max(0, b - lag); where weights are published less often, by the newest ones at or before
    it. After a resume the count begins anew, so the first `lag` batches are fresher. Scoring is TRL's own.

    A `lag` of 0 does not exist: accelerate reads one micro-batch ahead, so the samples of a step are asked for before
    the step before them was made. A worker that waits for newer weights would wait for ever.

    Args:
        model: folder or name of the model.
        reward_funcs: as the trainer's.
        dataset: with a column `prompt`; further columns go to the reward functions.
        args: of the trainer.
        lag: optimizer steps between the weights that sample and those that are trained, from 1 to `max_staleness`.
        processing_class: tokenizer; None: that of the model.

    Raises:
        ConfigError: `lag` is out of its range.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Any,
        dataset: Any,
        args: Any,
        lag: int = 1,
        processing_class: Any = None,
    ) -> None:
        if not 1 <= lag <= args.max_staleness:
            raise ConfigError(
                f"lag={lag} is given; it must be from 1 to max_staleness={args.max_staleness}. 0 does not exist in "
                f"TRL's asynchronous trainer, which reads one micro-batch ahead, and older samples are thrown away. "
                f"Change lag, or raise max_staleness."
            )
        self.args, self.dataset, self.lag = args, dataset, lag
        self.tokenizer = processing_class or AutoTokenizer.from_pretrained(model)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=args.dtype).eval()
        self.model.to(args.device)
        ends = self.model.generation_config.eos_token_id
        self._ends = [*dict.fromkeys([self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])])]
        self._ends = [e for e in self._ends if e is not None]
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self._scoring = SimpleNamespace(
            reward_funcs=functions,
            reward_func_names=list(reward_names(functions)),
            _env_reward_types=[],
            _provides_rollout_reward=False,
        )
        self.rollout_buffer = self
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ready: deque[RolloutSample] = deque()
        self._published: list[_Published] = []
        self._coming: dict[str, Tensor] = {}
        self._first_version = 0
        self.batch = self.group = 0

    # ---- weight transfer

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Copies them."""
        self._coming = {name: weights.detach().clone() for name, weights in iterator}

    # ---- rollout worker

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        """The weights that were just sent have this number."""
        if not self._published:
            self._first_version = model_version
        step = (model_version - self._first_version) * self.args.weight_sync_steps
        self._published.append(_Published(step, model_version, self._coming))
        needed = [p for p in self._published if p.step <= self.batch - self.lag]
        del self._published[: max(0, len(needed) - 1)]

    def begin_at(self, step: int) -> None:
        """Prompts of a resumed run go on behind those of the first `step` optimizer steps."""
        self.group = step * -(-self._rows // self.args.num_generations)

    # ---- queue

    def qsize(self) -> int:
        return len(self._ready)

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """The next sample; the batch of the next optimizer step is made when there is none."""
        if not self._ready:
            self._make_batch()
        return self._ready.popleft()

    @property
    def _rows(self) -> int:
        a = self.args
        return int(a.per_device_train_batch_size * a.gradient_accumulation_steps * a.world_size)

    def _make_batch(self) -> None:
        wanted = max(0, self.batch - self.lag)
        source = [p for p in self._published if p.step <= wanted][-1]
        self.model.load_state_dict(source.weights, strict=False)  # tied weights come once
        each = self.args.num_generations
        groups = -(-self._rows // each)
        index = [(self.group + i) % len(self.dataset) for i in range(groups)]
        rows = [self.dataset[i] for i in index]
        prompts = [self._prompt_ids(row["prompt"]) for row in rows]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed * 1_000_003 + self.group)
            made = self._generate([p for p in prompts for _ in range(each)])
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            self._ready.extend(
                self._scored(row, index[i], prompt, made[i * each : (i + 1) * each], source.version, self.group + i)
            )
        self.batch, self.group = self.batch + 1, self.group + groups

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
            return ids
        options = dict(self.args.chat_template_kwargs or {})
        ids = self.tokenizer.apply_chat_template(prompt, return_dict=False, add_generation_prompt=True, **options)
        return list(ids)

    @torch.no_grad()
    def _generate(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Completions and the log-probs of the distribution they were sampled from."""
        a, device = self.args, self.model.device
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=a.temperature,
            top_p=a.top_p,
            top_k=a.top_k,
            min_p=a.min_p,
            repetition_penalty=a.repetition_penalty,
            max_new_tokens=a.max_completion_length,
            eos_token_id=self._ends,
            pad_token_id=pad,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[:, width:]
        logprobs = torch.stack(
            [s.float().log_softmax(-1).gather(1, t[:, None])[:, 0] for s, t in zip(out.scores, tokens.T, strict=True)],
            dim=1,
        )
        ended = torch.isin(tokens, torch.tensor(self._ends, device=device))
        length = torch.where(ended.any(1), ended.int().argmax(1) + 1, tokens.size(1)).tolist()
        return [(t[:n], p[:n]) for t, p, n in zip(tokens.tolist(), logprobs.tolist(), length, strict=True)]

    def _scored(
        self,
        row: dict[str, Any],
        prompt_index: int,
        prompt: list[int],
        made: Sequence[tuple[list[int], list[float]]],
        version: int,
        group: int,
    ) -> list[Sample]:
        """The samples of a group, with rewards and advantages as TRL's own worker makes them."""
        texts = self.tokenizer.batch_decode([ids for ids, _ in made], skip_special_tokens=True)
        n = len(made)
        scored = _AsyncRolloutLoop._score_group(
            self._scoring,
            RolloutGroup(
                prompts=[row["prompt"]] * n,
                reward_kwargs={k: [v] * n for k, v in row.items() if k != "prompt"},
                completions=[[{"role": "assistant", "content": text}] for text in texts],
                completions_ids=[ids for ids, _ in made],
                completions_sequences=[
                    [
                        TrainingSequence(
                            input_ids=prompt + ids,
                            completion_mask=[0] * len(prompt) + [1] * len(ids),
                            old_log_probs=[0.0] * len(prompt) + logprobs,
                            rollout_id=str(i),
                        )
                    ]
                    for i, (ids, logprobs) in enumerate(made)
                ],
                tool_call_counts=[0] * n,
                tool_failure_counts=[0] * n,
                model_version=version,
                group_id=group,
                env_rewards=[None] * n,
                rollout_rewards=[None] * n,
            ),
        )
        with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one (a notebook)
            samples = thread.submit(asyncio.run, scored).result()
        now = time.time()
        fields = RolloutSample.__slots__
        return [
            Sample(**{f: getattr(s, f) for f in fields} | {"enqueued_at": now}, prompt_index=prompt_index)
            for s in samples
        ]
