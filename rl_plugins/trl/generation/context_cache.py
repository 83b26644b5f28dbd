"""Keys and values of contexts that the model has read, kept between calls of `generate`.

Rollout programs send whole contexts, and most of a context was read before: by the other continuations of a prompt, by
the turns before this one, by the parent of a branch. `ContextCache.generate` stands around a model's `generate` and
hands it what is known already. Columns stay where TRL's left padding puts them, so positions and masks are those of a
call without it, and tokens and log-probs are equal up to rounding.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from rl_plugins.trl.compat import cache_argument, fell_back

PASS = 1024
"""Positions that are read in the time of a call of its own. By a fit to CPU times it is 230 for a model of 78,272
parameters and 110 for one of 5 million; on a GPU, with 25 ms a pass in `transformers` assumed, 1,000 for 7 billion and
3,000 for 1.5 billion. If the guess is wrong, at most a part of one pass is lost."""

KEEPS_MORE = ("glm_moe_dsa",)
"""Models that keep more of a context than its keys and values."""


@dataclass
class _Kept:
    """The keys and values that one call left behind.

    Args:
        layers: keys and values of each layer, (rows, heads, columns, size of a head).
        first: column of each row's first token.
        tokens: of each row, as `_key` writes them.
        fresh: no round has ended since it was made or used.
    """

    layers: list[tuple[Tensor, Tensor]]
    first: Tensor
    tokens: list[bytes]
    fresh: bool = True

    @property
    def size(self) -> int:
        return sum(x.nbytes for layer in self.layers for x in layer)


@dataclass(frozen=True)
class _Known:
    """The `length` first tokens of a context are in a row of what is kept."""

    length: int = 0
    kept: _Kept | None = None
    row: int = 0


class ContextCache:
    """Serves `generate` of one set of weights; make another one after an update.

    Args:
        limit: bytes that are kept between calls; 0: nothing is, and every context is read as a whole. While a call
            runs its own keys and values come on top, as without this cache.
        more_passes: contexts may be read in a pass of their own, where that saves more than it costs. Not where the
            ranks share parameters, because they must make equally many passes there.

    Attributes:
        positions: of all contexts so far. read: those that went through the model.
    """

    def __init__(self, limit: int, more_passes: bool = True) -> None:
        self.limit, self.more_passes = limit, more_passes
        self.positions = self.read = 0
        self._kept: list[_Kept] = []
        self._sorted: list[tuple[bytes, int, int]] = []  # tokens, number in `_kept`, row

    def generate(
        self,
        host: Callable[..., Tensor],
        model: Any,
        generation_config: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """`host`, the `generate` of `model`, with everything that is known handed to it."""
        self.positions += int(attention_mask.sum())
        why = self.limit and no_reuse(model, generation_config, kwargs)
        if why:
            fell_back("keys and values of contexts are not kept (rollout_cache_gb has no effect)", why)
        if why or not self.limit:
            self.read += int(attention_mask.sum())
            return host(
                generation_config=generation_config, input_ids=input_ids, attention_mask=attention_mask, **kwargs
            )

        def call(config: Any, rows: Sequence[int], known: Sequence[_Known], **kwargs: Any) -> Tensor:
            cache = DynamicCache(config=model.config)
            return self._generate(host, model, cache, config, input_ids[rows], attention_mask[rows], known, **kwargs)

        contexts = [_key(ids[mask]) for ids, mask in zip(_array(input_ids), _array(attention_mask) > 0, strict=True)]
        known = [self._find(c) for c in contexts]
        ahead = self._read_ahead(contexts, known) if self.more_passes else []
        if ahead:
            other = {k: v for k, v in kwargs.items() if k not in ("logits_processor", "stopping_criteria")}
            call(_one_token(generation_config), ahead, [known[i] for i in ahead], **other)
            known = [self._find(c) for c in contexts]
        output = call(generation_config, range(len(contexts)), known, **kwargs)
        self._fit()
        return output

    def end_round(self) -> None:
        """A round of requests is served. What none of them made or used goes: most later requests go on from these. A
        program that was held back finds its context gone, and it is read again."""
        self._kept = [c for c in self._kept if c.fresh]
        for c in self._kept:
            c.fresh = False
        self._sort()

    def _generate(
        self,
        host: Callable[..., Tensor],
        model: Any,
        cache: DynamicCache,
        config: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        known: Sequence[_Known],
        **kwargs: Any,
    ) -> Tensor:
        """`host` on rows of whose contexts something is known; afterwards all of them are, with what was generated."""
        width = input_ids.size(1)
        lengths = attention_mask.sum(1).cpu()
        unread = max(int(n) - min(k.length, int(n) - 1) for n, k in zip(lengths, known, strict=True))
        self.read += int(lengths.clamp(max=unread).sum())
        self._gather(cache, known, width - lengths, width - unread)
        output = host(
            generation_config=config,
            input_ids=input_ids,
            attention_mask=attention_mask,
            **{str(cache_argument(_inside(model))): cache},
            **kwargs,
        )
        self._keep(cache, width - lengths, output)
        return output

    def _keep(self, cache: DynamicCache, first: Tensor, output: Tensor) -> None:
        columns = output.size(1) - 1  # no pass has read the last token
        if cache.get_seq_length() < columns:  # the model did not use it
            return
        # it may have more: where ranks share parameters, one that is done makes passes as long as others generate
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        tokens = [_key(row[f:columns]) for row, f in zip(_array(output), first.tolist(), strict=True)]
        self._kept.append(_Kept(layers, first, tokens))
        self._sort()

    def _fit(self) -> None:
        """Drops the oldest calls, and of the newest the rows beyond the limit."""
        while len(self._kept) > 1 and sum(c.size for c in self._kept) > self.limit:
            self._kept.pop(0)
        for c in self._kept:
            rows = int(self.limit * len(c.tokens) // max(c.size, 1))
            if rows < len(c.tokens):
                c.layers = [(keys[:rows].clone(), values[:rows].clone()) for keys, values in c.layers]
                c.first, c.tokens = c.first[:rows], c.tokens[:rows]
        self._kept = [c for c in self._kept if c.tokens]
        self._sort()

    def _sort(self) -> None:
        self._sorted = sorted((t, n, i) for n, c in enumerate(self._kept) for i, t in enumerate(c.tokens))

    def _find(self, context: bytes) -> _Known:
        """The row with the most tokens in common. It comes with the context's place in the order of all rows."""
        place = bisect.bisect_left(self._sorted, (context,))
        best = _Known()
        for tokens, number, row in self._sorted[max(0, place - 1) : place + 1]:
            length = _common(tokens, context)
            if length > best.length:
                best = _Known(length, self._kept[number], row)
        return best

    def _read_ahead(self, contexts: Sequence[bytes], known: Sequence[_Known]) -> list[int]:
        """Rows to read in a pass of their own: different contexts, those of which least is known, so many that the
        fewest positions are read in all."""
        unique = {c: i for i, c in reversed(list(enumerate(contexts)))}
        rows = sorted(unique.values(), key=lambda i: known[i].length - _length(contexts[i]))
        unread = np.array([max(1, _length(contexts[i]) - known[i].length) for i in rows] + [1])
        cost = np.arange(len(unread)) * unread[0] + len(contexts) * unread + PASS
        cost[0] -= PASS  # nothing is read ahead
        return rows[: int(cost.argmin())]

    @staticmethod
    def _gather(cache: DynamicCache, known: Sequence[_Known], first: Tensor, columns: int) -> None:
        """Puts the first columns of rows whose tokens start at `first` into an empty cache, from wherever they are
        known. Columns of padding, which are masked, hold anything finite."""
        sources: dict[int, tuple[_Kept, list[int]]] = {}
        for i, k in enumerate(known):
            if k.kept is not None and first[i] < columns:
                sources.setdefault(id(k.kept), (k.kept, []))[1].append(i)
        parts = []
        for kept, targets in sources.values():
            kept.fresh = True
            rows = torch.tensor([known[i].row for i in targets])
            token = torch.arange(columns) - first[targets][:, None]  # its number in the context
            parts.append((kept, targets, rows[:, None], kept.first[rows][:, None] + token.clamp(min=0)))
        for number in range(len(parts[0][0].layers) if parts else 0):
            pair: list[Tensor] = []
            for which in (0, 1):
                like = parts[0][0].layers[number][which]
                new = like.new_zeros((len(known), like.size(1), columns, like.size(3)))
                for kept, targets, rows, place in parts:
                    old = kept.layers[number][which]
                    new[targets] = old[rows.to(old.device), :, place.to(old.device)].transpose(1, 2)
                pair.append(new)
            cache.update(*pair, number)


def no_reuse(model: Any, config: Any, kwargs: dict[str, Any]) -> str:
    """Why keys and values cannot be kept; empty if they can: they are all there is to a context, stay what they are
    when it grows, and are kept row by row. What `config` leaves open is the model's own, as in `generate`."""

    def option(name: str) -> Any:
        value = getattr(config, name, None)
        return getattr(model.generation_config, name, None) if value is None else value

    rope = getattr(model.config, "rope_parameters", None) or {}
    kinds = [r.get("rope_type") or "" for r in (rope, *rope.values()) if isinstance(r, dict)]
    reasons = {
        "use_cache is off": option("use_cache") is False,
        "cache_implementation is set": option("cache_implementation") is not None,
        "prefill_chunk_size is set": option("prefill_chunk_size") is not None,
        "num_beams is above 1": (option("num_beams") or 1) != 1,
        "the model has an encoder": model.config.is_encoder_decoder,
        "the model sees images": model.config.get_text_config(decoder=True) is not model.config,
        f"{model.config.model_type} keeps more than keys and values": model.config.model_type in KEEPS_MORE,
        "transformers makes no dynamic cache for the model": not model._supports_default_dynamic_cache(),
        "`forward` of the model takes no cache": cache_argument(_inside(model)) is None,
        "PEFT learns a prompt": getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False),
        "RoPE depends on the length": any("dynamic" in k or k == "longrope" for k in kinds),
        "the rows have more than tokens": any(isinstance(v, Tensor) for v in kwargs.values()),
    }
    found = [why for why, applies in reasons.items() if applies]
    if not found and any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers):
        found = ["layers slide or are recurrent"]
    return ", ".join(found)


def _inside(model: Any) -> Any:
    """The model that PEFT wraps, or the model."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _one_token(config: Any) -> Any:
    """Reads contexts and, because `generate` must, makes one token: the most likely one, so that no random number is
    used up."""
    config = copy.copy(config)
    config.max_new_tokens, config.min_new_tokens, config.do_sample = 1, None, False
    config.temperature = config.top_k = config.top_p = config.min_p = None
    return config


def _array(x: Tensor) -> Any:
    return x.cpu().numpy()


def _key(tokens: Any) -> bytes:
    """Token ids in an order of bytes that is the order of ids."""
    return bytes(tokens.astype(">i4").tobytes())


def _length(key: bytes) -> int:
    return len(key) // 4


def _common(a: bytes, b: bytes) -> int:
    """Tokens until the first that differs."""
    n = min(len(a), len(b))
    differs = np.frombuffer(a[:n], ">i4") != np.frombuffer(b[:n], ">i4")
    return int(differs.argmax()) if differs.any() else n // 4
