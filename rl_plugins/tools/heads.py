"""Heads of one model (EconProver, arXiv 2509.12603): how a budget of samples is shared, and how alike samples are.

A head is a small adapter on a frozen base model. `rl-plugins heads` writes the runs that train heads, with the method
`difficulty_slices`, and samples over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rl_plugins.core.errors import ConfigError


def shares(k: int, heads: int, problem: int = 0) -> list[int]:
    """How many of `k` samples of a problem each head makes.

    Every head makes floor(k / heads) of them. What is left goes to one head after the other, and the next problem goes
    on where this one stopped. With fewer samples than heads some heads make none, and the heads take turns.

    Args:
        k, heads: at least 1.
        problem: number of the problem, from 0.

    Returns:
        A number per head. They sum to `k` and differ by at most 1.
    """
    if k < 1 or heads < 1 or problem < 0:
        raise ConfigError(f"k is {k}, heads {heads} and problem {problem}; k and heads must be at least 1, problem 0.")
    each, left = divmod(k, heads)
    begin = problem * left % heads
    return [each + ((head - begin) % heads < left) for head in range(heads)]


def prefix_diversity(samples: Iterable[Sequence[int]], first: int = 20, size: int = 3) -> float:
    """PDC, prefix diversity coverage: different n-grams among the first tokens of all samples, over all n-grams there.

    1 where no n-gram comes twice; copies of a sample lower it. The paper counts; dividing by the number of n-grams is
    inferred.

    Args:
        samples: token ids of each.
        first: tokens of a sample that count.
        size: tokens of an n-gram; shorter samples have none.

    Returns:
        A number in (0, 1], NaN if there is no n-gram.
    """
    found = [tuple(s[i : i + size]) for s in (list(x)[:first] for x in samples) for i in range(len(s) - size + 1)]
    return len(set(found)) / len(found) if found else math.nan


def positions_by_mask(model: Any) -> None:
    """Makes a model with a prompt-learning adapter of PEFT count positions by its attention mask; others stay.

    PEFT puts virtual tokens before the padding on the left and gives the model no positions, so in a padded row the
    prompt stands further from the virtual tokens than in a row by itself. Its log-probs then depend on the other rows
    of the batch; with a prefix they are also not those that `generate` samples from.
    """
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        model.get_base_model().register_forward_pre_hook(_with_positions, with_kwargs=True)


def _with_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        inputs = kwargs.get("inputs_embeds")
        inputs = kwargs.get("input_ids", args[0] if args else None) if inputs is None else inputs
        if inputs is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            kwargs = {**kwargs, "position_ids": positions[:, -inputs.shape[1] :]}
    return args, kwargs
