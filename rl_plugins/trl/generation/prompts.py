"""Rows of the dataset by number: in the dataloader (so that prompts can be told apart) and on the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from rl_plugins.core.rollouts import PlanRow
from rl_plugins.kit.services import empty_column
from rl_plugins.runtime.ranks import gather
from rl_plugins.trl.host import Accelerator, DatasetRow

# Column added to what the dataloader yields; removed before anything of TRL or the user sees it.
PROMPT_INDEX = "rl_plugins_prompt_index"


class NumberedDataset(Dataset[DatasetRow]):
    """The same rows with their number. The user's dataset itself is left as it is."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> DatasetRow:
        return {**self.dataset[int(i)], PROMPT_INDEX: int(i)}

    def __getitems__(self, ids: Sequence[int]) -> list[DatasetRow]:
        known = {i: self[i] for i in dict.fromkeys(map(int, ids))}  # rollouts of one prompt repeat its number
        return [known[int(i)] for i in ids]


def strip(rows: Sequence[Mapping[str, Any]]) -> list[DatasetRow]:
    """Rows without their number."""
    return [{k: v for k, v in row.items() if k != PROMPT_INDEX} for row in rows]


class Prompts:
    """Rows of the dataset by prompt number; of a stream only the prompts of this batch exist."""

    def __init__(
        self, dataset: Any, proposal: list[int], local: list[DatasetRow], accelerator: Accelerator, group_size: int
    ) -> None:
        self.numbered = all(p >= 0 for p in proposal)
        self.dataset = dataset if self.numbered else None
        self.has_images = any(c in local[0] and not empty_column(self.dataset, c) for c in ("image", "images"))
        self._known: dict[int, DatasetRow] = {}
        self.size: int | None = None
        if self.numbered:
            self.proposal, self.size = tuple(proposal), len(dataset)
        else:
            rows = [x for part in gather(accelerator, local) for x in part][::group_size]
            self.proposal = tuple(range(len(rows)))
            self._known = dict(enumerate(rows))

    def row(self, plan: PlanRow) -> DatasetRow:
        """The row of a plan row, its edits applied; a new dict every time, because TRL adds keys to it."""
        if self.dataset is not None and plan.prompt_index >= 0 and plan.prompt_index not in self._known:
            self._known[plan.prompt_index] = self.dataset[plan.prompt_index]
        return {**(self._known[plan.prompt_index] if plan.prompt_index >= 0 else {}), **(plan.edit or {})}
