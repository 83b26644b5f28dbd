"""How many tokens a masked diffusion model unmasks in each step: uniform, or ascending (ASS, arXiv 2509.23924)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.core.errors import ConfigError


def uniform_schedule(masked: Tensor, steps: int) -> Tensor:
    """Tokens per step of the uniform schedule: m // S, and one more in the first m mod S steps.

    Args:
        masked: (rows,) int64, m, masked tokens of each row.
        steps: S.

    Returns:
        (rows, steps) int64, whose rows add up to m.

    Raises:
        ConfigError: fewer than one step.

    Source: `get_num_transfer_tokens` in eval/generate.py of yjyddq/EOSER-ASS-RL.
    """
    if steps < 1:
        raise ConfigError(f"`steps` is {steps}; a schedule needs at least one step.")
    base, rest = masked // steps, masked % steps
    return base[:, None] + (torch.arange(steps, device=masked.device) < rest[:, None]).long()


def ascending_schedule(length: int) -> tuple[int, ...]:
    """Tokens per step of the ascending schedule: 1, 2, 4 and so on. The last step takes the rest.

    Args:
        length: L, tokens of the answer.

    Raises:
        ConfigError: L below 2.

    Source: arXiv 2509.23924; `get_num_transfer_tokens_ass` in eval/generate.py of yjyddq/EOSER-ASS-RL.
    """
    steps = _steps(length)
    first = [2**i for i in range(steps - 1)]
    return (*first, length - sum(first))


def ascending_blocks(length: int, blocks: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Blocks of the ascending schedule, from left to right: (tokens, steps in which the block is decoded).

    The last blocks have one step each. The first block has the steps that are left, S - blocks + 1. A block has as many
    tokens as its steps unmask.

    Args:
        length: L, tokens of the answer.
        blocks: at least 1, at most S = floor(log2 L).

    Raises:
        ConfigError: L below 2, or another number of blocks.

    Source: `get_block_sizes` in cj-grpo/cj_grpo_trainer_eoser_ass.py of yjyddq/EOSER-ASS-RL.
    """
    sizes = ascending_schedule(length)
    if not 1 <= blocks <= len(sizes):
        raise ConfigError(
            f"`blocks` is {blocks}; the ascending schedule of {length} tokens has {len(sizes)} steps, and a block "
            f"needs one at least. Set it from 1 to {len(sizes)}."
        )
    first = len(sizes) - blocks + 1
    steps = [tuple(range(first)), *((i,) for i in range(first, len(sizes)))]
    return tuple((sum(sizes[i] for i in block), block) for block in steps)


def _steps(length: int) -> int:
    if length < 2:
        raise ConfigError(f"An answer of {length} tokens has no ascending schedule; it needs at least 2.")
    return length.bit_length() - 1
