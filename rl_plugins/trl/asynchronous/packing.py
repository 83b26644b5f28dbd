"""Columns of methods through TRL's tree packing and the dispatch to ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

from rl_plugins.trl.asynchronous.samples import OWN, Own

LIVE, TOKEN, ROW, STEP = "rlp_live", "rlp_token_", "rlp_row_", "rlp_step_"
"""Names in TRL's batch: tokens that are trained; columns of tokens, of samples, and of the whole optimizer step."""


class ColumnsCollator(DataCollatorForRollout):
    """TRL's collator, with columns of methods next to its own: (ranks, tokens) in the order of `token_index`, and
    (ranks, samples) in the order of `segment_id`."""

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        (rows,) = examples
        for row in rows:
            _keep_one_token(row.samples)
        batch: dict[str, Any] = super().torch_call(examples)
        own: list[list[Own]] = [[sample[OWN] for sample in row.samples] for row in rows]
        masks = [[_mask(sample) for sample in row.samples] for row in rows]

        def of_tokens(value: Callable[[dict[str, Any]], Tensor | float]) -> Tensor:
            """(ranks, tokens) from a value per sample, or per token of a sample."""
            per_rank = [
                torch.cat(
                    [torch.as_tensor(value(s)).float().expand(len(m))[m] for s, m in zip(r.samples, ms, strict=True)]
                )
                for r, ms in zip(rows, masks, strict=True)
            ]
            return pad_sequence(per_rank, batch_first=True)

        def column(name: str) -> Tensor:
            return of_tokens(lambda sample: sample[OWN].token.get(name, 0.0))

        def advantage(sample: dict[str, Any]) -> Tensor | float:
            of_its_tokens: Tensor | None = sample[OWN].advantages
            return float(sample["advantage"]) if of_its_tokens is None else of_its_tokens

        batch[LIVE] = of_tokens(lambda sample: float(sample[OWN].live))
        batch |= {TOKEN + name: column(name) for name in sorted({n for r in own for o in r for n in o.token})}
        for name in own[0][0].row:
            values = [torch.tensor([o.row[name] for o in of_row], dtype=torch.float64) for of_row in own]
            batch[ROW + name] = pad_sequence(values, batch_first=True)
        for name, number in own[0][0].batch.items():
            batch[STEP + name] = torch.full((len(rows),), number, dtype=torch.float64)
        if any(o.advantages is not None for of_row in own for o in of_row):
            batch["advantages"] = of_tokens(advantage)
        batch["global_n_tokens"] = torch.full_like(batch["global_n_tokens"], float(batch[LIVE].sum()))
        return batch


def _mask(sample: dict[str, Any]) -> Tensor:
    """Tokens that TRL packs as loss terms."""
    mask = torch.from_numpy(np.asarray(sample["completion_mask"])) > 0
    mask[0] = False
    return mask


def _keep_one_token(samples: list[dict[str, Any]]) -> None:
    """TRL's loss does not take a row without a loss term, and rows whose samples all left have none: one of these
    samples then brings a token with advantage 0, which counts nowhere."""
    if not any(bool(_mask(s).any()) for s in samples):
        mask = np.zeros(len(samples[0]["input_ids"]), dtype=np.int64)
        mask[1] = 1
        samples[0]["completion_mask"] = mask
