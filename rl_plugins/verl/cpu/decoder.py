"""Generates for a changing batch of requests, one token for all of them at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from rl_plugins.runtime.cheap import CheapCopy, CheapOptions
from rl_plugins.verl.cpu.sampling import Sampling, choose, filtered_log_probs, penalize


@dataclass(eq=False)
class Request:
    """A prompt to continue, and what was generated so far."""

    prompt: Sequence[int]
    sampling: Sampling
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)  # likeliest tokens of each place, temperature 1


class Decoder:
    """A batch of running requests with their KV cache.

    The rows are padded on the left. A request draws from a generator of its own, so what it samples does not depend on
    its neighbors or on when it arrived.
    """

    def __init__(
        self, model: PreTrainedModel, eos_ids: Collection[int], tokenizer: Any = None, cheap: CheapOptions | None = None
    ) -> None:
        """`model` is in evaluation mode; its attention layers see the whole context. `tokenizer`: for stop texts.
        `cheap`: a copy of the model in this precision decodes."""
        self.weights, self.tokenizer = model, tokenizer
        self.copy = None if cheap is None else CheapCopy(model, cheap)
        self.model: Any = model if self.copy is None else self.copy.module
        self.eos_ids = frozenset(eos_ids)
        self.requests: list[Request] = []
        # Of every running row: ids and mask (rows, width) of prompt and completion. The cache holds all columns but
        # the last, the token whose successor comes next.
        self._ids = self._mask = torch.empty(0, 0, dtype=torch.long)
        self._cache: Any = None
        self._noise = torch.empty(0, 0)
        self._settings: dict[str, torch.Tensor] = {}

    def refresh(self) -> None:
        """To be called when the weights have changed."""
        if self.copy is not None:
            self.copy.refresh(self.copy.version + 1)

    @torch.no_grad()
    def step(self, arriving: Sequence[Request] = ()) -> list[Request]:
        """Takes in the requests that arrive, adds one token to every request, and returns those that are done."""
        if arriving:
            self._join(arriving)
        if not self.requests:
            return []
        out = self.model(
            input_ids=self._ids[:, -1:],
            attention_mask=self._mask,
            position_ids=self._mask.sum(1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
        )
        logits = out.logits[:, -1].float()
        self._report(logits)
        if bool((self._settings["repetition_penalty"] != 1).any()):
            logits = penalize(logits, self._ids, self._mask, self._settings["repetition_penalty"])
        temperature = self._settings["temperature"]
        log_probs = filtered_log_probs(logits, temperature, self._settings["top_k"], self._settings["top_p"])
        position = torch.tensor([[len(request.tokens)] for request in self.requests])
        chosen = choose(log_probs, temperature == 0, self._noise.gather(1, position).squeeze(1))
        chosen_log_probs = log_probs.gather(1, chosen[:, None])
        self._ids = torch.cat([self._ids, chosen[:, None]], 1)
        self._mask = pad(self._mask, (0, 1), value=1)
        for request, token, log_prob in zip(
            self.requests, chosen.tolist(), chosen_log_probs.squeeze(1).tolist(), strict=True
        ):
            request.tokens.append(token)
            request.log_probs.append(log_prob)
        done = [self._is_done(request) for request in self.requests]
        finished = [request for request, end in zip(self.requests, done, strict=True) if end]
        if finished:
            self._keep([row for row, end in enumerate(done) if not end])
        return finished

    def stop(self) -> list[Request]:
        """Ends all running requests and returns them with what they have."""
        stopped, self.requests, self._cache = self.requests, [], None
        return stopped

    def _report(self, logits: torch.Tensor) -> None:
        """The most likely tokens of the model's own distribution, for requests that ask for them."""
        most = min(max(request.sampling.top_logprobs for request in self.requests), logits.shape[1])
        if not most:
            return
        values, tokens = logits.log_softmax(1).topk(most, dim=1)
        for request, row, names in zip(self.requests, values.tolist(), tokens.tolist(), strict=True):
            k = request.sampling.top_logprobs
            if k:
                request.top.append(list(zip(names[:k], row[:k], strict=True)))

    def _is_done(self, request: Request) -> bool:
        token, sampling = request.tokens[-1], request.sampling
        return (
            len(request.tokens) >= sampling.max_tokens
            or token in sampling.stop_token_ids
            or (token in self.eos_ids and not sampling.ignore_eos)
            or self._at_stop_text(request)
        )

    def _at_stop_text(self, request: Request) -> bool:
        stop = request.sampling.stop
        if not stop:
            return False
        last = max(len(text.encode()) for text in stop) + 1  # a token has a byte or more
        text = self.tokenizer.decode(request.tokens[-last:], skip_special_tokens=True)
        return any(s in text for s in stop)

    def _join(self, arriving: Sequence[Request]) -> None:
        """Computes the cache of the new prompts and puts their rows below the running ones."""
        width = max(2, *(len(request.prompt) for request in arriving))  # one column at least goes into the cache
        ids = torch.zeros(len(arriving), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(arriving):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        cache = DynamicCache()
        self.model(
            input_ids=ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, :-1],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if self.requests:
            old, new = max(0, width - self._ids.shape[1]), max(0, self._ids.shape[1] - width)
            self._ids = torch.cat([pad(self._ids, (old, 0)), pad(ids, (new, 0))])
            self._mask = torch.cat([pad(self._mask, (old, 0)), pad(mask, (new, 0))])
            for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
                mine.keys = torch.cat([pad(mine.keys, (0, 0, old, 0)), pad(theirs.keys, (0, 0, new, 0))])
                mine.values = torch.cat([pad(mine.values, (0, 0, old, 0)), pad(theirs.values, (0, 0, new, 0))])
        else:
            self._ids, self._mask, self._cache = ids, mask, cache
        self.requests = [*self.requests, *arriving]
        self._arrange()

    def _keep(self, rows: list[int]) -> None:
        """Drops all other rows, and the columns that are padding in every row that stays."""
        if not rows:
            self.stop()
            return
        self.requests = [self.requests[row] for row in rows]
        self._ids, self._mask = self._ids[rows], self._mask[rows]
        first = int(self._mask.argmax(1).min())
        self._ids, self._mask = self._ids[:, first:], self._mask[:, first:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[rows, :, first:], layer.values[rows, :, first:]
        self._arrange()

    def _arrange(self) -> None:
        """The settings of the running requests, as tensors (rows,), and their noise (rows, tokens)."""
        settings = [request.sampling for request in self.requests]
        self._settings = {
            name: torch.tensor([getattr(one, name) for one in settings])
            for name in ("temperature", "top_k", "top_p", "repetition_penalty")
        }
        noise = [
            torch.rand(request.sampling.max_tokens, generator=torch.Generator().manual_seed(request.seed))
            for request in self.requests
        ]
        self._noise = torch.nn.utils.rnn.pad_sequence(noise, batch_first=True)
