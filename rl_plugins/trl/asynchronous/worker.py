"""A rollout worker in the trainer's own process, on transformers' generate: for the CPU, tests and evidence.

TRL's own worker is a process with a vLLM server behind it. This one is asked by the trainer itself: when its queue is
empty it makes the samples of one optimizer step, with weights that are exactly `lag` optimizer steps old. It makes them
where the methods are, so it can follow a plan of theirs.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.trl.capabilities import reward_names
from rl_plugins.trl.generation.work import Row


@dataclass(slots=True)
class RowSample(RolloutSample):
    """A sample of which more is known: all its tokens are of `model_version`, unless it was given.

    Args:
        row: which rollout of which row of the plan it is.
        columns: of the dataset, with the edits of the plan.
        start: tokens of its prompt.
    """

    row: Row = field(default_factory=lambda: Row(None))
    columns: Mapping[str, Any] = field(default_factory=dict)
    start: int = 0


@dataclass
class _Published:
    """Weights as they were after `step` optimizer steps, under TRL's number."""

    step: int
    version: int
    weights: dict[str, Tensor]


class GenerateWorker:
    """Rollout worker, its queue, and weight transfer in one object: pass it as `rollout_worker` and `weight_transfer`.

    The dataset is walked in its order, `num_generations` completions per prompt, unless methods plan otherwise
    (`make`). The batch of optimizer step b is made by the weights after step max(0, b - lag); where weights are
    published less often, by the newest ones at or before it. After a resume the count begins again, so the first `lag`
    batches are fresher. Scoring is TRL's own.

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
        self.reward_names = reward_names(functions)
        self._scoring = SimpleNamespace(
            reward_funcs=functions,
            reward_func_names=list(self.reward_names),
            _env_reward_types=[],
            _provides_rollout_reward=False,
        )
        self.rollout_buffer = self
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ready: deque[RolloutSample] = deque()
        self._published: list[_Published] = []
        self._coming: dict[str, Tensor] = {}
        self._first_version = 0
        self.batch = self.group = self.walked = 0

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
        self.group = self.walked = step * self._groups

    # ---- queue

    def qsize(self) -> int:
        return len(self._ready)

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """The next sample; the batch of the next optimizer step is made when there is none."""
        if not self._ready:
            each = self.args.num_generations
            self.make([PlanRow(p, self.group + i, each) for i, p in enumerate(self.proposal())])
        return self._ready.popleft()

    @property
    def _rows(self) -> int:
        a = self.args
        return int(a.per_device_train_batch_size * a.gradient_accumulation_steps * a.world_size)

    @property
    def _groups(self) -> int:
        return -(-self._rows // self.args.num_generations)

    def proposal(self) -> list[int]:
        """Prompts of the next optimizer step, in the order of the dataset."""
        return [(self.walked + i) % len(self.dataset) for i in range(self._groups)]

    def make(self, plan: Sequence[PlanRow]) -> None:
        """Makes the samples of the next optimizer step, in the order of the plan.

        A given completion is taken as it is, scored only if it brings no rewards. Its old log-probs are its own. Tokens
        that nobody sampled (given without log-probs, of a prefix) have those of the weights that make the batch.
        """
        wanted = max(0, self.batch - self.lag)
        source = [p for p in self._published if p.step <= wanted][-1]
        self.model.load_state_dict(source.weights, strict=False)  # tied weights come once
        columns = [{**(self.dataset[p.prompt_index] if p.prompt_index >= 0 else {}), **(p.edit or {})} for p in plan]
        prompts = [self._prompt_ids(c["prompt"]) for c in columns]
        places = [k for k, p in enumerate(plan) for _ in range(p.n + p.spare)]  # of each sample in the plan
        rows = [Row(p, i) for p in plan for i in range(p.n + p.spare)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed * 1_000_003 + self.walked)
            made = self._made(rows, [prompts[k] for k in places])
        groups: dict[int, list[int]] = {}
        for i, k in enumerate(places):
            groups.setdefault(plan[k].group, []).append(i)
        samples: dict[int, RowSample] = {}
        for number, members in enumerate(groups.values()):
            of = [(rows[i], columns[places[i]], prompts[places[i]], *made[i]) for i in members]
            samples |= zip(members, self._scored(of, source.version, self.group + number), strict=True)
        self._ready.extend(samples[i] for i in range(len(rows)))
        self.batch, self.group, self.walked = self.batch + 1, self.group + len(groups), self.walked + self._groups

    def _made(self, rows: Sequence[Row], prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Completions and their old log-probs: given, or generated behind their prefix."""
        asked = [(p + list(r.plan.prefix if r.plan else ())) for r, p in zip(rows, prompts, strict=True) if r.asked]
        generated = iter(self._generate(asked) if asked else [])
        out = []
        for row, prompt in zip(rows, prompts, strict=True):
            assert row.plan is not None
            given, longest = row.given, self.args.max_completion_length
            if given is not None:
                out.append(([*given.tokens], [*(given.logprobs or self._logprobs(prompt, given.tokens))]))
                continue
            ids, logprobs = next(generated)
            if row.plan.prefix:
                ids, logprobs = [*row.plan.prefix, *ids], self._logprobs(prompt, row.plan.prefix) + logprobs
            limit = min(row.plan.max_tokens or longest, longest)
            out.append((ids[:limit], logprobs[:limit]))
        return out

    @torch.no_grad()
    def _logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Of tokens that were not sampled here, by the weights at hand."""
        ids = torch.tensor([[*prompt, *completion]], device=self.model.device)
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float() / self.args.temperature
        found: list[float] = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return found

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
        self, members: Sequence[tuple[Row, dict[str, Any], list[int], list[int], list[float]]], version: int, group: int
    ) -> list[RowSample]:
        """The samples of a group, with rewards and advantages as TRL's own worker makes them.

        Args:
            members: row, columns of the dataset, prompt, completion, old log-probs.
        """
        rows, columns = [m[0] for m in members], [m[1] for m in members]
        texts = self.tokenizer.batch_decode([ids for *_, ids, _ in members], skip_special_tokens=True)
        n = len(members)
        scoring = self._scoring
        known = [row.rewards for row in rows]
        if any(k is not None for k in known):
            functions = zip(scoring.reward_funcs, scoring.reward_func_names, strict=True)
            scoring = SimpleNamespace(**vars(scoring) | {"reward_funcs": [_of_others(*f, known) for f in functions]})
        scored = _AsyncRolloutLoop._score_group(
            scoring,
            RolloutGroup(
                prompts=[c["prompt"] for c in columns],
                reward_kwargs={
                    k: [c.get(k) for c in columns]
                    for k in dict.fromkeys(k for c in columns for k in c)
                    if k != "prompt"
                },
                completions=[[{"role": "assistant", "content": text}] for text in texts],
                completions_ids=[ids for *_, ids, _ in members],
                completions_sequences=[
                    [
                        TrainingSequence(
                            input_ids=prompt + ids,
                            completion_mask=[0] * len(prompt) + _trained(row, len(ids)),
                            old_log_probs=[0.0] * len(prompt) + logprobs,
                            rollout_id=str(i),
                        )
                    ]
                    for i, (row, _, prompt, ids, logprobs) in enumerate(members)
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
            RowSample(
                **{f: getattr(s, f) for f in fields} | {"enqueued_at": now}, row=row, columns=of, start=len(prompt)
            )
            for s, (row, of, prompt, *_) in zip(samples, members, strict=True)
        ]


def _trained(row: Row, length: int) -> list[int]:
    """The mask of a completion: 0 for tokens that were only read."""
    observed = row.given.observed if row.given else None
    return [1] * length if observed is None else [int(not o) for o in observed]


def _of_others(function: Any, name: str, known: Sequence[Mapping[str, float] | None]) -> Callable[..., Any]:
    """A reward function that is asked for the rows whose rewards are not known."""
    ask = [i for i, k in enumerate(known) if k is None]

    async def scored(**columns: Any) -> list[float | None]:
        found = function(**{k: [v[i] for i in ask] for k, v in columns.items()}) if ask else []
        new = dict(zip(ask, await found if inspect.isawaitable(found) else found, strict=True))
        return [new[i] if k is None else k.get(name) for i, k in enumerate(known)]

    return scored
