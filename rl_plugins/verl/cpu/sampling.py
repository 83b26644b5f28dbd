"""What one request asks of the sampler, and one token for every row of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_KNOWN = (
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "max_tokens",
    "max_new_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "stop",
    "include_stop_str_in_output",
)


@dataclass(frozen=True)
class Sampling:
    """Settings of one request, as verl's agent loops pass them."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1  # below 1: all
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0  # most likely tokens to report in every place
    stop: tuple[str, ...] = ()  # texts that end a completion and stay in it

    @classmethod
    def read(cls, params: Mapping[str, Any], max_tokens: int, room: int, ignore_eos: bool = False) -> Sampling:
        """The settings in a dictionary of verl.

        Args:
            params: `sampling_params` of a request.
            max_tokens: Tokens to generate where the request names no number.
            room: Tokens the model's context has left; the request gets at most these and at least one.
            ignore_eos: Where the request does not say.

        Raises:
            ValueError: a parameter this backend does not have, or a value out of its range.
        """
        unknown = sorted(set(params) - set(_KNOWN))
        if unknown:
            raise ValueError(
                f"The rollout backend hf_cpu was asked to sample with {', '.join(unknown)}, which it does not have. It "
                f"has {', '.join(_KNOWN)}. Leave the others out of the agent loop's sampling_params."
            )
        limit = params.get("max_tokens", params.get("max_new_tokens"))
        settings = cls(
            max_tokens=max(1, min(max_tokens if limit is None else int(limit), room)),
            temperature=float(params.get("temperature", 1.0)),
            top_k=int(params.get("top_k", -1)),
            top_p=float(params.get("top_p", 1.0)),
            repetition_penalty=float(params.get("repetition_penalty", 1.0)),
            stop_token_ids=frozenset(params.get("stop_token_ids") or ()),
            ignore_eos=bool(params.get("ignore_eos", ignore_eos)),
            logprobs=bool(params.get("logprobs", False)),
            top_logprobs=int(params.get("top_logprobs", 0)),
            stop=tuple(params.get("stop") or ()),
        )
        if settings.stop and not params.get("include_stop_str_in_output", False):
            raise ValueError(
                "The rollout backend hf_cpu was asked to stop at texts without include_stop_str_in_output=True. It "
                "leaves them in the tokens; say so."
            )
        if settings.temperature < 0 or not 0 < settings.top_p <= 1 or settings.repetition_penalty <= 0:
            raise ValueError(
                f"The rollout backend hf_cpu was asked to sample with temperature={settings.temperature}, "
                f"top_p={settings.top_p}, repetition_penalty={settings.repetition_penalty}. It takes a temperature of "
                "0 or more, a top_p above 0 and up to 1, and a repetition_penalty above 0. Change them in "
                "actor_rollout_ref.rollout."
            )
        return settings


def penalize(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Repetition penalty: the logit of a token that is there already is divided by it if positive, else multiplied.

    Args:
        logits: (rows, vocabulary).
        ids: (rows, width), prompt and completion so far.
        mask: (rows, width), 0 at padding.
        penalty: (rows,).
    """
    seen = torch.zeros_like(logits).scatter_reduce(1, ids, mask.to(logits.dtype), "amax") > 0
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def filtered_log_probs(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Log-probs (rows, vocabulary) of the distribution that is sampled from, -inf for tokens that are left out.

    Temperature, then the `top_k` likeliest, then the smallest set of them with probability `top_p` or more. Greedy rows
    (temperature 0) keep the model's own distribution, as vLLM's `processed_logprobs` do. All settings have shape
    (rows,).
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    vocabulary = scaled.shape[1]
    k = torch.where(greedy | (top_k < 1), vocabulary, top_k)[:, None]
    p = torch.where(greedy, 1.0, top_p)[:, None]
    if bool((k < vocabulary).any() or (p < 1).any()):
        ordered, order = scaled.sort(dim=1, descending=True)
        ordered = ordered.masked_fill(torch.arange(vocabulary) >= k, -torch.inf)
        probs = ordered.softmax(1)
        likelier = probs.cumsum(1) - probs
        ordered = ordered.masked_fill((p < 1) & (likelier >= p), -torch.inf)
        scaled = torch.empty_like(scaled).scatter_(1, order, ordered)
    return scaled.log_softmax(1)


def choose(log_probs: torch.Tensor, greedy: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One token per row (rows,): the likeliest where `greedy`, else where `noise` falls in the cumulative distribution.

    Args:
        log_probs: (rows, vocabulary).
        greedy: (rows,), bool.
        noise: (rows,), float32 uniform on [0, 1).
    """
    # In float64, where 1 - 2^-24 times the total stays below the total: the token found never has probability 0.
    cumulative = log_probs.double().exp().cumsum(1)
    found = torch.searchsorted(cumulative, noise.double()[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    return torch.where(greedy, log_probs.argmax(1), found)
