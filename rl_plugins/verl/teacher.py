"""Log-probs of responses under other prompts or by another model, for methods that learn from a teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from rl_plugins.verl.batch import fetch, put
from rl_plugins.verl.host import Batch
from rl_plugins.verl.rows import TOKEN_COLUMNS, Ragged, flat

PARTITION = "rl_plugins_teacher"  # of TransferQueue: responses behind the prompts of the teacher, during its pass


def read_by_teacher(
    batch: Batch,
    prompts: Mapping[str, Any],
    encode: Callable[[Any], Sequence[int]],
    compute: Callable[[Batch], Any],
    temperature: float,
    multiple: int,
) -> None:
    """Writes the teacher's log-probs of every response, NaN in rows it does not read.

    Args:
        prompts: key of a row -> its prompt for the teacher, a text or messages; None, or no entry: it is not read.
        encode: such a prompt -> token ids.
        compute: pass of the teacher's workers, which writes `log_probs` of what it is given.
        temperature: with which the responses are sampled.
        multiple: number that the rows of a pass must divide by.
    """
    column = fetch(batch, ["responses"])["responses"]
    of, responses = Ragged.of(column), column.unbind()
    told = ((i, prompts.get(key)) for i, key in enumerate(batch.keys))
    ids = {i: torch.tensor(encode(prompt)) for i, prompt in told if prompt is not None}
    values = torch.full((int(of.offsets[-1]),), torch.nan)
    if ids:
        chosen = [*ids, *[next(iter(ids))] * (-len(ids) % multiple)]
        made = KVBatchMeta(
            partition_id=PARTITION,
            keys=[f"{batch.keys[i]}:{n}" for n, i in enumerate(chosen)],
            tags=[batch.tags[i] for i in chosen],
            extra_info={"temperature": temperature, "calculate_entropy": False, "compute_loss": False},
        )
        texts = [torch.cat([ids[i], responses[i]]) for i in chosen]
        read = _ragged([responses[i] for i in chosen])
        places = _ragged([torch.arange(len(text)) for text in texts])
        put(made, {"input_ids": _ragged(texts), "position_ids": places, "loss_mask": torch.ones_like(read)})
        try:
            compute(made)
            found = flat(response_from_nested(fetch(made, ["log_probs"])["log_probs"], read))
        finally:
            tq.kv_clear(keys=made.keys, partition_id=PARTITION)
        of_row = torch.isin(of.row, torch.tensor(list(ids)))
        values[of_row] = found[: int(of_row.sum())].to(values)
    put(batch, {TOKEN_COLUMNS["teacher_logprobs"]: of.nested(values)})


def _ragged(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
