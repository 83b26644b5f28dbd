"""TRL's generation and reward functions as the engine of rollout programs.

Requests go through TRL's own `_generate_single_turn`, so weights are synchronized, unwrapped and gathered as always.
What a request asks for beyond it (its own token limit, temperature, stop texts, top log-probs) is added around the
model's `generate`, or to the options of vLLM, for as long as the call runs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.requests import Finish, Generate, Generated, Prompt, Scored, Trajectory
from rl_plugins.core.rollouts import weighted_reward
from rl_plugins.runtime.chat import TokenizerChat
from rl_plugins.runtime.costs import Meter, policy_made
from rl_plugins.runtime.ranks import gather
from rl_plugins.trl.changes import changed
from rl_plugins.trl.generation.context_cache import ContextCache
from rl_plugins.trl.generation.costs import count
from rl_plugins.trl.generation.sampling import (
    SamplingOptions,
    SamplingRace,
    SamplingStop,
    SamplingWatch,
    cuts_of,
    window,
)
from rl_plugins.trl.host import DatasetRow, HostTrainer, Score, SingleTurn, Trainer, VllmEngine, policy_of, tokenizer_of


class TrlEngine:
    """`programs.Engine` on a trainer.

    Args:
        trainer: the trainer.
        host_generate: TRL's own `_generate_single_turn`.
        host_score: TRL's own `_calculate_rewards`.
        row_of: prompt -> the row of columns TRL passes to reward functions.
        meter: what it costs is counted there.
    """

    def __init__(
        self,
        trainer: Trainer,
        host_generate: SingleTurn,
        host_score: Score,
        row_of: Callable[[Prompt], DatasetRow],
        meter: Meter,
    ) -> None:
        self.trainer, self._host, self._host_score, self._row_of = trainer, host_generate, host_score, row_of
        self.meter = meter
        self.chat = chat_of(trainer)
        self.context = max_context(trainer)
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        self.contexts = ContextCache(int(trainer.args.rollout_cache_gb * 1e9), more_passes=not sharded)

    def anybody(self, wants: bool) -> bool:
        return any(gather(self.trainer.accelerator, wants))

    def log(self, mode: str) -> None:
        """What all ranks read of their contexts, to TRL's metrics."""
        parts = gather(self.trainer.accelerator, (self.contexts.read, self.contexts.positions))
        read, positions = (sum(x) for x in zip(*parts, strict=True))
        if positions:
            self.trainer._metrics[mode]["rl_plugins/contexts_read"].append(read / positions)

    # ---- generation

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        asked: dict[SamplingOptions, list[int]] = {}
        for i, (_, request) in enumerate(requests):
            asked.setdefault(self._options(request), []).append(i)
        everybody = gather(self.trainer.accelerator, {o: sum(requests[i][1].n for i in v) for o, v in asked.items()})
        results: list[list[Generated]] = [[] for _ in requests]
        for options in sorted({o for part in everybody for o in part}, key=repr):
            mine = [(i, requests[i][1]) for i in asked.get(options, ()) for _ in range(requests[i][1].n)]
            most = max(part.get(options, 0) for part in everybody)
            made = self._call(options, [r for _, r in mine], most)
            for (i, _), one in zip(mine, made, strict=True):
                results[i].append(one)
        self.contexts.end_round()
        return results

    def race(
        self, requests: Sequence[Generate], group: Sequence[int], missing: Sequence[int], enough: int
    ) -> tuple[list[Generated], list[int]]:
        """One completion for each request, all decoded together until `enough` groups are complete on this rank; the
        others come back as they are, with finish "abort".

        Args:
            group: number of each request's group, from 0.
            missing: of each group, how many of its requests must end. It is complete then, and its others stop.
            enough: groups; 0 decodes nothing.

        Returns:
            The completions, and after how many tokens each ended (of those that were aborted: the last one).
        """
        t = self.trainer
        if t.use_vllm:
            raise ConfigError("Over-provisioned generation interrupts the engine, which is served with use_vllm=False.")
        if not requests or not enough:
            return [Generated((), (), "abort", t.state.global_step) for _ in requests], [0] * len(requests)
        options = SamplingOptions(float(t.temperature), (), 0)
        limits = torch.tensor([r.max_tokens or 1 for r in requests])
        race = SamplingRace(torch.tensor(group), torch.tensor(missing), enough)
        with self._transformers(options, limits, race) as watch:
            ids, _ = self._host([r.trajectory.context_array for r in requests], None, {}, 1)
        eos = set(t.eos_token_ids)
        made = []
        for k, (request, tokens) in enumerate(zip(requests, ids, strict=True)):
            g = watch.generated(k, list(tokens))
            ended = bool(g.tokens) and g.tokens[-1] in eos
            finish: Finish = "eos" if ended else "length" if len(g.tokens) >= (request.max_tokens or 1) else "abort"
            made.append(replace(g, finish=finish, version=t.state.global_step))
        self.meter.costs.tokens_decoded += sum(len(g.tokens) for g in made)
        self.meter.costs.rows_made += sum(not policy_made(r.trajectory) for r in requests)
        return made, [len(g.tokens) for g in made]

    def _options(self, request: Generate) -> SamplingOptions:
        temperature = self.trainer.temperature if request.temperature is None else request.temperature
        return SamplingOptions(float(temperature), tuple(request.stop), request.top)

    def _call(self, options: SamplingOptions, requests: list[Generate], most: int) -> list[Generated]:
        """One engine call. Every rank enters it with as many rows, because TRL cuts what comes back into equal parts;
        a rank with fewer repeats one."""
        t = self.trainer
        filler = Generate(Trajectory((t.eos_token_ids[0],)), max_tokens=1)
        rows = requests + (requests[:1] or [filler]) * (most - len(requests))
        # vLLM takes lists; for transformers TRL makes a tensor of each, which copies an array in one piece
        contexts = [list(c.context) if t.use_vllm else c.context_array for c in (r.trajectory for r in rows)]
        limits = torch.tensor([r.max_tokens or 1 for r in rows])
        if t.use_vllm:
            with self._vllm(options, limits.tolist()) as raw:
                ids, _ = self._host(contexts, None, {}, 1)
            made = [_from_vllm(i, lp, tok, options) for i, lp, tok in zip(ids, raw[0], raw[1], strict=True)]
        else:
            with self._transformers(options, limits) as watch:
                ids, _ = self._host(contexts, None, {}, 1)
            made = [watch.generated(k, list(i)) for k, i in enumerate(ids)]
        self.meter.costs.tokens_decoded += sum(len(g.tokens) for g in made)  # what fills the call up included
        made = made[: len(requests)]
        eos, version = set(t.eos_token_ids), t.state.global_step
        return [self._finished(g, options, eos, version) for g in made]

    def _finished(self, g: Generated, options: SamplingOptions, eos: set[int], version: int) -> Generated:
        finish: Finish = "length"
        if g.tokens and g.tokens[-1] in eos:
            finish = "eos"
        elif options.stop and any(s in self.chat.decode(g.tokens[-window(options.stop) :]) for s in options.stop):
            finish = "stop"
        return Generated(g.tokens, g.logprobs, finish, version, g.top, options.temperature != 0)

    @contextlib.contextmanager
    def _transformers(
        self, options: SamplingOptions, limits: Tensor, race: SamplingRace | None = None
    ) -> Iterator[SamplingWatch]:
        """`generate` of the policy with the options of a call. `race`: when all of it stops."""
        t = self.trainer
        model = policy_of(t)
        host = t.rollout_generate(model)
        watch = SamplingWatch(options, limits, t.processing_class)

        def generate(generation_config: Any, **kwargs: Any) -> Any:
            config = copy.copy(generation_config)
            config.max_new_tokens = int(limits.max())
            config.do_sample = options.temperature != 0
            config.temperature = options.temperature if config.do_sample else None
            if not config.do_sample:
                config.top_k = config.top_p = config.min_p = None
            else:
                watch.cuts = cuts_of(config, model.generation_config)
            ids = kwargs["input_ids"]
            watch.start = ids.size(1)
            stop = SamplingStop(watch, race, t.eos_token_ids, ids.device)
            with self.meter.busy():
                out = self.contexts.generate(
                    host,
                    model,
                    config,
                    logits_processor=LogitsProcessorList([watch]),
                    stopping_criteria=StoppingCriteriaList([stop]),
                    **kwargs,
                )
            watch.finish(out)
            count(self.meter, int(kwargs["attention_mask"].sum()), 0)  # tokens are counted where it is known who ended
            return out

        with changed(model, generate=generate):
            yield watch

    @contextlib.contextmanager
    def _vllm(self, options: SamplingOptions, limits: Sequence[int]) -> Iterator[list[Any]]:
        """vLLM with the options of a call and a limit of new tokens for each of this rank's rows; yields the list its
        log-probs and their tokens are put into."""
        engine = self.trainer.vllm_generation
        if options.top:
            _check_top(engine, options)
        of_ranks = gather(self.trainer.accelerator, list(limits))
        kwargs = {
            **engine.generation_kwargs,
            "temperature": options.temperature,
            "logprobs": options.top,
        }
        if options.stop:
            kwargs |= {"stop": list(options.stop), "include_stop_str_in_output": True}
        raw: list[Any] = []
        host = engine.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            with self.meter.busy():
                out = host(*args, **kwargs)
            raw[:] = out[2:4]
            count(self.meter, sum(map(len, kwargs["prompts"])), 0)
            return out

        with contextlib.ExitStack() as stack:
            stack.enter_context(changed(engine, generation_kwargs=kwargs, generate=generate))
            if engine.mode == "colocate":
                size = engine.tensor_parallel_size
                first = self.trainer.accelerator.process_index // size * size
                rows = [n for part in of_ranks[first : first + size] for n in part]
                stack.enter_context(changed(engine.llm, generate=_limited(engine.llm.generate, rows)))
            elif self.trainer.accelerator.is_main_process:
                client = engine.vllm_client
                rows = [n for part in of_ranks for n in part]
                stack.enter_context(changed(client, generate=_limited_requests(client.generate, rows)))
            yield raw

    # ---- rewards

    def score(self, requests: Sequence[tuple[Prompt, Trajectory]]) -> list[Scored]:
        t = self.trainer
        self.meter.costs.tokens_read += sum(len(row.prompt) + len(row) for _, row in requests)
        rewards = self.rewards_of([(self._row_of(p), p.messages, trajectory) for p, trajectory in requests])
        weights = t.reward_weights.double().cpu()
        totals = weighted_reward(rewards, weights).tolist()
        return [
            Scored(dict(zip(t.reward_func_names, row, strict=True)), total)
            for row, total in zip(rewards.tolist(), totals, strict=True)
        ]

    def rewards_of(self, rows: Sequence[tuple[DatasetRow, Any, Trajectory]]) -> Tensor:
        """(rows, functions) float64 rewards of this rank's rows (columns, prompt, trajectory). All ranks enter; what
        reward functions add to TRL's table of completions is not kept, because these rows are not in it yet."""
        t = self.trainer
        parts = gather(t.accelerator, (len(rows), rows[0] if rows else None))
        most = max(n for n, _ in parts)
        if not most:
            return torch.zeros((0, len(t.reward_funcs)), dtype=torch.float64)
        filler = next(row for _, row in parts if row is not None)  # with columns the reward functions understand
        full = [*rows, *[filler] * (most - len(rows))]
        names = dict.fromkeys(k for columns, _, row in full for k in (*columns, *row.meta))
        inputs = [{k: {**columns, **row.meta}.get(k) for k in names} for columns, _, row in full]
        ids = [list(row.tokens) for _, _, row in full]
        prompts = [prompt for _, prompt, _ in full]
        texts = [self.chat.decode(i) for i in ids]
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        pending = {k: list(v) for k, v in t._pending_extra_logs.items()}
        rewards = self._host_score(inputs, prompts, completions, ids)
        t._pending_extra_logs.clear()
        t._pending_extra_logs.update(pending)
        start = t.accelerator.process_index * len(full)
        return rewards[start : start + len(rows)].detach().double().cpu()


def _limited(host: Callable[..., Any], limits: Sequence[int]) -> Callable[..., Any]:
    """`LLM.generate` with a limit of new tokens for every prompt: TRL gives it one for all."""

    def generate(prompts: Sequence[Any], sampling_params: Any, **kwargs: Any) -> Any:
        each = [copy.copy(sampling_params) for _ in prompts]
        for params, limit in zip(each, limits, strict=True):
            params.max_tokens = limit
        return host(prompts, sampling_params=each, **kwargs)

    return generate


def _limited_requests(host: Callable[..., Any], limits: Sequence[int]) -> Callable[..., Any]:
    """`VLLMClient.generate` with a limit of new tokens for every prompt: one HTTP request for each limit there is, at
    the same time, so that the server decodes them together."""

    def generate(prompts: Sequence[Any], generation_kwargs: Any = None, **kwargs: Any) -> dict[str, list[Any]]:
        places: dict[int, list[int]] = {}
        for i, (_, limit) in enumerate(zip(prompts, limits, strict=True)):
            places.setdefault(limit, []).append(i)

        def ask(limit: int) -> Any:
            own = {**(generation_kwargs or {}), "max_tokens": limit}
            return host(prompts=[prompts[i] for i in places[limit]], generation_kwargs=own, **kwargs)

        with ThreadPoolExecutor(min(len(places), 64)) as pool:
            answers = list(pool.map(ask, places))
        out: dict[str, list[Any]] = {name: [None] * len(prompts) for name in answers[0]}
        for answer, rows in zip(answers, places.values(), strict=True):
            for name, values in answer.items():
                for i, value in zip(rows, values, strict=True):
                    out[name][i] = value
        return out

    return generate


def _check_top(engine: VllmEngine, options: SamplingOptions) -> None:
    """vLLM in TRL reports log-probs of the distribution that is sampled; the argmax is taken of the policy's own.

    Raises:
        ConfigError: something stands between the two.
    """
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    cuts = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "structured_outputs_regex": None}
    neutral = penalties | cuts if options.temperature else penalties
    given = {name: getattr(engine, name) for name in neutral if hasattr(engine, name)}
    given |= {name: value for name, value in engine.generation_kwargs.items() if name in neutral}
    changed = [f"{name}={value}" for name, value in given.items() if value is not None and value != neutral[name]]
    if options.temperature not in (0.0, 1.0):
        changed.append(f"temperature={options.temperature}")
    if changed:
        raise ConfigError(
            f"A rollout program asks for the {options.top} most likely tokens with their log-probs at temperature 1, "
            f"and with {', '.join(changed)} vLLM reports others, because TRL has it report what it samples from. Leave "
            f"{'this option' if len(changed) == 1 else 'these options'} at the neutral value (temperature 1 or 0), or "
            f"set use_vllm=False."
        )


def _from_vllm(ids: Sequence[int], logprobs: Any, tokens: Any, options: SamplingOptions) -> Generated:
    """vLLM reports log-probs by rank; the sampled token's is found by its id."""
    own, top = [], []
    for token, values, names in zip(ids, logprobs, tokens, strict=True):
        known = {n: float("nan") if v is None else float(v) for n, v in zip(names, values, strict=True)}
        own.append(known[token])
        top.append(tuple(sorted(known.items(), key=lambda x: -x[1])[: options.top]))
    return Generated(tuple(ids), tuple(own), "length", top=tuple(top) if options.top else ())


def chat_of(trainer: HostTrainer) -> TokenizerChat:
    """The trainer's tokenizer and template."""
    options = dict(getattr(trainer, "chat_template_kwargs", None) or {})
    template = getattr(trainer, "chat_template", None)
    return TokenizerChat(tokenizer_of(trainer), trainer.eos_token_ids, template, **options)


def max_context(trainer: HostTrainer) -> int:
    """Tokens of prompt and completion the engine takes."""
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        return int(trainer.vllm_generation.llm.llm_engine.model_config.max_model_len)
    if trainer.use_vllm:
        length = 0
        if trainer.accelerator.is_main_process:
            client = trainer.vllm_generation.vllm_client
            length = client.session.get(f"{client.base_url}/v1/models").json()["data"][0]["max_model_len"]
        return int(gather(trainer.accelerator, length)[0])
    config = trainer.model.config
    return int(getattr(getattr(config, "text_config", config), "max_position_embeddings", 2**31))
