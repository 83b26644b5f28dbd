"""verl's validation with the plans of methods that act in evaluation: edited prompts, and payloads for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_plugins.errors import MethodError
from rl_plugins.method import Method
from rl_plugins.rollouts import Plan, PlanRow
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
        plans = [PlanRow(-1, i, self.n, edit=columns) for i, columns in enumerate(shown)]
        for m in planning(self.stack):
            plans = self._ask(m, plans)
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

    def _ask(self, method: Method, plans: Sequence[PlanRow]) -> list[PlanRow]:
        plan = Plan(tuple(plans), self.n, self.n * len(plans), batch=self.stack.batch)
        new = self.stack.call("plan", method, plan)
        result = list(plans if new is None else new.rows)
        same = [(p.group, p.n + p.spare) for p in result] == [(p.group, p.n) for p in plans]
        alone = any(p.prefix or p.max_tokens is not None for p in result) and not in_evaluation(self.stack, "rollout")
        if not same or alone or any(p.given for p in result):
            raise MethodError(
                f"Method `{method.name}` plans an evaluation with other numbers of rollouts, given completions, "
                f"prefixes or token limits. In evaluation a plan may edit prompts and attach payloads (with a rollout "
                f"program also prefixes and token limits), nothing else."
            )
        return [replace(p, edit={**(old.edit or {}), **(p.edit or {})}) for old, p in zip(plans, result, strict=True)]

    def _edit(self, row: dict[str, Any], name: str, value: Any) -> None:
        if name in ("prompt", self.prompts.prompt_key):
            row["raw_prompt"] = messages_of(value)
            if name not in row:
                return
        self.prompts.set(row, name, value, foreign=False)


def planning(stack: MethodStack) -> list[Method]:
    """Methods whose plan acts in evaluation, too."""
    return [m for m in stack.claims["plan"] if "plan" in m.in_eval]


def in_evaluation(stack: MethodStack, hook: str) -> bool:
    """Whether a method acts with this hook in evaluation."""
    return any(hook in m.in_eval for m in stack.claims[hook])
