"""The embedded masked diffusion policy: a BERT of 247,368 parameters that fills in the answers of the demo tasks.

Its warm start is that of masked diffusion models: a share of an answer's tokens, drawn per row, is masked, and the loss
is the cross-entropy of the masked ones divided by that share. Demonstrations are those of the causal policy, filled up
with end tokens to MAX_COMPLETION_LENGTH. Built once on this machine (half a minute) and cached like that one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from rl_plugins.lab.demo import policy, tasks
from rl_plugins.lab.demo.policy import MAX_COMPLETION_LENGTH, Progress, WarmStart

PROMPT_LENGTH = 14  # of the longest: two letters, ten digits and two marks of roles
SMALLEST_SHARE = 0.05  # of masked tokens; the weight of a row is one over its share

MASKED_WARM_START = WarmStart(steps=600, batch_size=64, learning_rate=3e-3, warmup_steps=30)


@dataclasses.dataclass(frozen=True)
class MaskedBatch:
    """Prompts, padded on the left, their answers, and which tokens of these are masked with what chance."""

    prompt: Tensor
    prompt_mask: Tensor
    answer: Tensor
    hidden: Tensor
    share: Tensor


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the causal policy with a token more, the mask."""
    tokenizer = policy.build_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    return tokenizer


def build_model(seed: int = 0) -> BertForMaskedLM:
    """The untrained policy, float32 on the CPU: three layers, hidden size 96, three heads, without dropout."""
    config = BertConfig(
        vocab_size=72,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=192,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.06,
        pad_token_id=policy.SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=policy.SPECIAL_TOKENS.index("<eos>"),
        bos_token_id=policy.SPECIAL_TOKENS.index("<bos>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return BertForMaskedLM(config)


def warm_start(
    model: BertForMaskedLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: WarmStart | None = None,
    progress: Progress | None = None,
) -> None:
    """Trains `model` in place on demonstrations of prompts of the train split."""
    settings = MASKED_WARM_START if settings is None else settings
    rng, noise = random.Random(settings.seed), torch.Generator().manual_seed(settings.seed)

    def loss_of(model: PreTrainedModel, batch: MaskedBatch) -> Tensor:
        return masked_loss(model, batch, int(tokenizer.mask_token_id))

    policy.fit(model, lambda: _batch(rng, noise, tokenizer, settings), settings, progress, loss_of)


def masked_loss(model: PreTrainedModel, batch: MaskedBatch, mask_id: int) -> Tensor:
    """Cross-entropy of the masked tokens over the chance of being masked, divided by all tokens of the answers."""
    ids = torch.cat([batch.prompt, batch.answer.masked_fill(batch.hidden, mask_id)], 1)
    seen = torch.cat([batch.prompt_mask, torch.ones_like(batch.answer)], 1)
    places = (seen.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=seen, position_ids=places).logits[:, batch.prompt.size(1) :]
    loss = cross_entropy(logits.transpose(1, 2), batch.answer, reduction="none")
    return (loss * batch.hidden / batch.share).sum() / batch.answer.numel()


def masked_policy_path(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where :func:`load_masked_policy` keeps the policy, whether it was built already or not."""
    key = policy.cache_key(MASKED_WARM_START, __file__, str(policy.__file__), str(tasks.__file__))
    return policy.cache_folder(cache_dir) / f"demo-masked-policy-{key}"


def load_masked_policy(cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Directory of the warm-started policy and its tokenizer, for `from_pretrained`; built when the cache lacks it.

    Args:
        cache_dir, progress: as of :func:`rl_plugins.lab.demo.policy.load_policy`.

    Raises:
        OSError: the cache cannot be written.
    """
    return policy.cached(masked_policy_path(cache_dir), functools.partial(_build, progress=progress))


def _batch(rng: random.Random, noise: torch.Generator, tokenizer: Any, settings: WarmStart) -> MaskedBatch:
    prompts = [tasks.random_prompt(rng, rng.choice(tasks.LEVELS)) for _ in range(settings.batch_size)]
    written = [policy.demonstration(rng, tasks.solve(prompt), settings) for prompt in prompts]
    answers = [text + "<eos>" * (MAX_COMPLETION_LENGTH - len(text)) for text in written]
    asked = _tokens(tokenizer, [f"<user>{prompt}<asst>" for prompt in prompts], PROMPT_LENGTH)
    answer = _tokens(tokenizer, answers, MAX_COMPLETION_LENGTH)["input_ids"]
    share = torch.rand(len(prompts), 1, generator=noise).clamp(min=SMALLEST_SHARE)
    hidden = torch.rand(answer.shape, generator=noise) < share
    return MaskedBatch(asked["input_ids"], asked["attention_mask"], answer, hidden, share)


def _tokens(tokenizer: Any, texts: list[str], length: int) -> Any:
    return tokenizer(texts, return_tensors="pt", padding="max_length", max_length=length, return_token_type_ids=False)


def _build(directory: Path, progress: Progress | None) -> None:
    tokenizer = build_tokenizer()
    model = build_model(MASKED_WARM_START.seed)
    warm_start(model, tokenizer, progress=progress)
    policy.save(model, tokenizer, directory)
