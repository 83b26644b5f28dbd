"""The policy of the bench: a character-level Qwen3 of 0.6 million parameters, warm-started on demonstrations of chains.

First it learns from right demonstrations, and stops before it can do all of it. Then it learns from those of a sloppy
demonstrator, so that it samples badly and knows ways that reinforcement learning should leave.

Where a GPU is at hand, `size="large"` is one of 25 million. Both are built on this machine and kept in the cache of the
demo's policy, see :mod:`rl_plugins.lab.demo.policy`, from which the tokenizer is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_plugins.lab.bench import chains
from rl_plugins.lab.demo import policy as demo

MIXES = (  # what the demonstrations are drawn from, in equal shares
    chains.Mix((1, 2, 3, 4)),
    chains.Mix((1, 2, 3, 4), unsolvable=0.5),
    chains.Mix((1, 2, 3), mode="f"),
    chains.Mix((1, 2, 3), mode="l"),
)
SHARES = (6, 1, 1, 1)
SIZES = {"small": (128, 3, 384), "large": (512, 8, 1536)}  # hidden size, layers, intermediate size


SLOPPY, CLEAN = chains.Style(), chains.Style(slip=0.0, direct=0.0, dirty=0.0, shortcut=0.0)


@dataclasses.dataclass(frozen=True)
class BenchStart(demo.Fit):
    """Settings of the warm start.

    Args:
        sloppy_steps: of the second part, at a third of the learning rate.
    """

    steps: int = 900
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    sloppy_steps: int = 150
    size: str = "small"
    style: chains.Style = SLOPPY
    version: int = chains.VERSION


def build_model(size: str = "small", seed: int = 0) -> Qwen3ForCausalLM:
    """The untrained policy in float32."""
    hidden, layers, inner = SIZES[size]
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        intermediate_size=inner,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=demo.SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=demo.SPECIAL_TOKENS.index("<eos>"),
        bos_token_id=demo.SPECIAL_TOKENS.index("<bos>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def demonstrations(rng: random.Random, settings: BenchStart, style: chains.Style) -> list[str]:
    """One batch of conversations as text."""
    texts = []
    for mix in rng.choices(MIXES, SHARES, k=settings.batch_size):
        prompt = chains.random_prompt(mix, rng)
        texts.append(f"<user>{prompt}<asst>{chains.write(prompt, style, rng)}<eos>")
    return texts


def load_policy(size: str = "small", progress: demo.Progress | None = None) -> Path:
    """Directory of the warm-started policy; built when the cache lacks it.

    Raises:
        OSError: the cache cannot be written.
    """
    settings = BenchStart(size=size)
    key = demo.cache_key(settings)
    return demo.cached(
        demo.cache_folder() / f"bench-policy-{key}", functools.partial(_build, settings=settings, progress=progress)
    )


def _build(directory: Path, settings: BenchStart, progress: demo.Progress | None) -> None:
    tokenizer = demo.build_tokenizer()
    model = build_model(settings.size, settings.seed)
    rng = random.Random(settings.seed)

    def batch(style: chains.Style) -> Any:
        return demo.labeled(tokenizer, demonstrations(rng, settings, style))

    every = settings.steps + settings.sloppy_steps
    demo.fit(model, lambda: batch(CLEAN), settings, progress and (lambda i, n, loss: progress(i, every, loss)))
    sloppy = dataclasses.replace(settings, steps=settings.sloppy_steps, learning_rate=settings.learning_rate / 3)
    done = settings.steps
    demo.fit(
        model, lambda: batch(settings.style), sloppy, progress and (lambda i, n, loss: progress(done + i, every, loss))
    )
    demo.save(model, tokenizer, directory)
