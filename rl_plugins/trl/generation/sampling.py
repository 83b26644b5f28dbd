"""What the adapter sees and stops in the sampling of transformers' `generate`: log-probs, limits, stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from rl_plugins.core.requests import Generated


@dataclass(frozen=True)
class SamplingOptions:
    """What requests of one engine call share."""

    temperature: float
    stop: tuple[str, ...]
    top: int


@dataclass(frozen=True)
class SamplingRace:
    """Groups that are decoded together until `enough` are complete.

    Args:
        group: of each row.
        missing: of each group, rows that must end.
    """

    group: Tensor
    missing: Tensor
    enough: int


class SamplingWatch(LogitsProcessor):  # type: ignore[misc]
    """Sees the logits of every token: log-probs of the tokens that were chosen, under the distribution they were drawn
    from, and the most likely ones of the whole one. `cuts` is what `generate` cuts from it afterwards. All of it stays
    on the model's device until the end: a read per token would make the device wait for each."""

    def __init__(self, options: SamplingOptions, limits: Tensor, tokenizer: Any) -> None:
        self.options, self.limits, self.tokenizer = options, limits, tokenizer
        self.cuts = LogitsProcessorList()
        self.start = 0  # columns of the padded prompts
        self.length = limits.clone()  # new tokens of each row when it was stopped
        self._last: Tensor | None = None
        self._logprobs: list[Tensor] = []
        self._top: list[tuple[Tensor, Tensor]] = []
        self._table: list[Any] = []  # when all is over: log-probs, top values, top tokens of all rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        logits = scores.float()
        self._last = torch.log_softmax(self.cuts(input_ids, logits / (self.options.temperature or 1.0)), dim=-1)
        if self.options.top:
            plain = torch.log_softmax(logits, dim=-1)
            values, tokens = plain.topk(min(self.options.top, plain.size(-1)), dim=-1)
            self._top.append((values, tokens))
        return scores

    def finish(self, output: Tensor) -> None:
        self._take(output)
        self.length = self.length.cpu()
        self._table = [torch.stack(list(x), 1).tolist() for x in (self._logprobs, *zip(*self._top, strict=True))]

    def _take(self, input_ids: Tensor) -> None:
        """The log-prob of the token that was chosen from the last logits."""
        if self._last is not None:
            self._logprobs.append(self._last.gather(1, input_ids[:, -1:]).squeeze(1))
            self._last = None

    @property
    def logprobs(self) -> list[list[float]]:
        """Of all rows, when all is over."""
        return list(self._table[0])

    def generated(self, row: int, ids: list[int]) -> Generated:
        """What TRL returned for a row (cut at the end of sequence), without what came after it was stopped."""
        n = min(len(ids), int(self.length[row]))
        own, *best = (x[row][:n] for x in self._table)
        top = (tuple(zip(tokens, values, strict=True)) for values, tokens in zip(*best, strict=True))
        return Generated(tuple(ids[:n]), tuple(own), "length", top=tuple(top))


# Options of `generate` that cut tokens from what it samples, in its order, with the value that cuts nothing.
_CUTS = {
    "top_h": (TopHLogitsWarper, None),
    "top_k": (TopKLogitsWarper, 0),
    "top_p": (TopPLogitsWarper, 1.0),
    "min_p": (MinPLogitsWarper, None),
    "typical_p": (TypicalLogitsWarper, 1.0),
    "epsilon_cutoff": (EpsilonLogitsWarper, 0.0),
    "eta_cutoff": (EtaLogitsWarper, 0.0),
}


def cuts_of(config: Any, of_model: Any) -> LogitsProcessorList:
    """What `generate` cuts with this configuration, behind the temperature; an option of None is the model's own."""
    cuts = LogitsProcessorList()
    for name, (warper, neutral) in _CUTS.items():
        value = getattr(config, name, None)
        value = getattr(of_model, name, None) if value is None else value
        if value not in (None, neutral):
            cuts.append(warper(value))
    return cuts


class SamplingStop(StoppingCriteria):  # type: ignore[misc]
    """Every row has its own limit of tokens, and stops after a stop text; in a race all stop when enough groups are
    complete. Everything is decided on `device`, that of the tokens; a stop text has to be read on the host."""

    def __init__(self, watch: SamplingWatch, race: SamplingRace | None, eos: Sequence[int], device: Any) -> None:
        watch.limits, watch.length = watch.limits.to(device), watch.length.to(device)
        self.watch, self.eos = watch, torch.tensor(list(eos), device=device)
        self.race = race and replace(race, group=race.group.to(device), missing=race.missing.to(device))
        self.done = torch.zeros_like(watch.limits, dtype=torch.bool)
        self.ended = self.done.clone()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        w = self.watch
        made = input_ids.size(1) - w.start
        now = made >= w.limits
        if w.options.stop:
            texts = w.tokenizer.batch_decode(input_ids[:, w.start :][:, -window(w.options.stop) :])
            now |= torch.tensor([any(s in text for s in w.options.stop) for text in texts]).to(now.device)
        if self.race is not None:
            race = self.race
            self.ended |= now | torch.isin(input_ids[:, -1], self.eos)
            complete = torch.zeros_like(race.missing).index_add(0, race.group, self.ended.long()) >= race.missing
            now |= complete[race.group] | (complete.sum() >= race.enough)
        w.length = torch.where(now & ~self.done, made, w.length)
        self.done |= now
        return self.done


def window(stop: Sequence[str]) -> int:
    """Tokens at the end in which a stop text that just ended must lie: a token has at least one byte."""
    return max(len(s.encode()) for s in stop) + 1
