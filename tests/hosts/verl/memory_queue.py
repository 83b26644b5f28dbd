"""The part of TransferQueue that the adapter uses, in memory, for tests without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tensordict import NonTensorStack, TensorDict

from rl_plugins.verl.prompts import NUMBERS, numbers_of


class MemoryQueue:
    """Rows by key; columns go in and come out as in the real queue: ragged tensors and stacks of objects."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def put_rows(self, rows: dict[str, dict[str, Any]]) -> None:
        """Rows as agent-loop workers write them, which note what the driver asks of a row (scores.py)."""
        for key, row in rows.items():
            self.rows.setdefault(key, {}).update(row)
            if "extra_fields" in row and "responses" in row:
                output = SimpleNamespace(
                    response_ids=row["responses"].tolist(), response_mask=row["response_mask"].tolist()
                )
                score = float(row["rm_scores"].sum()) if "rm_scores" in row else None
                noted = {**row["extra_fields"], NUMBERS: numbers_of(output, score)}
                self.rows[key]["extra_fields"] = noted

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str | None = None, select_fields: Sequence[str] | None = None
    ) -> TensorDict:
        common = set.intersection(*(set(self.rows[k]) for k in keys))
        fields = [f for f in (select_fields or sorted(common)) if f in common]
        import torch

        columns: dict[str, Any] = {}
        for name in fields:
            values = [self.rows[k][name] for k in keys]
            if isinstance(values[0], torch.Tensor):  # always ragged, like the real queue
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                columns[name] = NonTensorStack(*values)
        return TensorDict(columns, batch_size=[len(keys)])

    def kv_batch_put(self, keys: Sequence[str], partition_id: str | None = None, fields: Any = None, tags: Any = None):
        import torch

        for name in [str(k) for k in fields.keys()] if fields is not None else ():  # noqa: SIM118
            column = fields[name]
            values = column.unbind() if isinstance(column, torch.Tensor) else [getattr(x, "data", x) for x in column]
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value.clone() if isinstance(value, torch.Tensor) else value
        from transfer_queue import KVBatchMeta

        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=[{} for _ in keys])

    def kv_clear(self, keys: Sequence[str], partition_id: str | None = None) -> None:
        for key in keys:
            self.rows.pop(key, None)
