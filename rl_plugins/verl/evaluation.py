"""verl's validation with the plans of methods that act in evaluation: edited prompts, and payloads for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.plan import evaluation_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.verl.prompts import COLUMN, PromptBatches, flat_columns, messages_of, note_of


class PlannedBatches:
    """Batches of a loader of verl, with prompts as methods plan them.

    Args:
        loader: of the validation.
        stack: the methods.
        prompts: knows how columns are changed.
        n: rollouts per prompt.
    """

    def __init__(self, loader: Iterable[Mapping[str, Any]], stack: MethodStack, prompts: PromptBatches, n: int) -> None:
        self.loader, self.stack, self.prompts, self.n = loader, stack, prompts, n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._planned(batch) for batch in self.loader)

    def _planned(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np

        rows = [{name: values[i] for name, values in batch.items()} for i in range(len(batch["raw_prompt"]))]
        shown = [flat_columns(row) for row in rows]
        plans = evaluation_plan(self.stack, [PlanRow(-1, i, self.n, edit=c) for i, c in enumerate(shown)])
        for row, before, plan in zip(rows, shown, plans, strict=True):
            for name, value in (plan.edit or {}).items():
                if name not in before or value is not before[name]:
                    self._edit(row, name, value)
        out = dict(batch)
        for name, values in batch.items():
            if isinstance(values, np.ndarray):
                out[name] = np.fromiter((row[name] for row in rows), dtype=object, count=len(rows))
        notes = [note_of(p, "evaluation", i, 0) | {"planned_at": self.stack.batch} for i, p in enumerate(plans)]
        out[COLUMN] = np.array(notes, dtype=object)
        return out

    def _edit(self, row: dict[str, Any], name: str, value: Any) -> None:
        if name in ("prompt", self.prompts.prompt_key):
            row["raw_prompt"] = messages_of(value)
            if name not in row:
                return
        self.prompts.set(row, name, value, foreign=False)
