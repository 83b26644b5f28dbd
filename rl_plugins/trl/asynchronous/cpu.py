"""TRL's asynchronous trainer on a machine without CUDA: for tests, evidence and debugging.

Two things tie it to CUDA: the attention kernel of its packed rows, and the name of the device, which it asks for to
count floating-point operations. patches/trl/T12 and T13 end both.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo import async_grpo_trainer, packing


def activate() -> None:
    """From now on packed rows are attended to by torch, and no peak of floating-point operations is known. For good,
    in this process."""
    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    packing._flash_attn = lambda: kernel
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **_: Any,
) -> Tensor:
    """What `flash_attn_varlen_func` computes, by torch's own attention on padded segments.

    Args:
        query: (all queries, heads, size). key, value: (all keys, key heads, size).
        cu_q, cu_k: (segments + 1,) where the queries and the keys of each segment begin. The last query of a segment
            is in the place of its last key.
        max_q, max_k: of the longest segment.
        softmax_scale: factor on the products; None: 1 / sqrt(size).
        causal: a query sees no key behind its own place.
        window_size: (keys a query sees before its own place, -1 for all; not read).
        softcap: 0 only.

    Raises:
        NotImplementedError: softcap is not 0.

    Returns:
        (all queries, heads, size).
    """
    if softcap:
        raise NotImplementedError("softcap is not served on the CPU. Use a model without it, or a GPU.")
    device = query.device
    length_q, length_k = (cu_q[1:] - cu_q[:-1]).long(), (cu_k[1:] - cu_k[:-1]).long()
    place_q, place_k = torch.arange(max_q, device=device), torch.arange(max_k, device=device)
    inside_q, inside_k = place_q < length_q[:, None], place_k < length_k[:, None]
    at_q = (cu_q[:-1, None].long() + place_q).clamp(max=len(query) - 1)
    at_k = (cu_k[:-1, None].long() + place_k).clamp(max=len(key) - 1)
    sees = inside_k[:, None, :]
    own = place_q + (length_k - length_q)[:, None]  # the key in the place of each query
    if causal:
        sees = sees & (place_k <= own[..., None])
    if window_size[0] >= 0:
        sees = sees & (place_k >= own[..., None] - window_size[0])
    sees = sees | (~inside_q[..., None] & (place_k == 0))  # padding sees something, so that it is not NaN
    out = torch.nn.functional.scaled_dot_product_attention(
        query[at_q].transpose(1, 2),
        key[at_k].transpose(1, 2),
        value[at_k].transpose(1, 2),
        attn_mask=sees[:, None],
        scale=softmax_scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)[inside_q]
