"""The dataset of the kit: prompts, answers, and plausible values for every column a method asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


class StoredDataset:
    """A dataset: rows by number, columns by name."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._columns = dict(columns)
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(self._columns["prompt"])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return {name: values[key] for name, values in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))


def column_value(column: str, prompt: int) -> Any:
    """Something plausible: numbers in [0, 1] for columns that sound like one, text with a digit for others."""
    if column.endswith("set_id"):
        return prompt // 2  # two wordings of a question
    if re.search("difficult|rate|score|prior|level|value|weight", column):
        return (prompt % 5) / 4
    return f"question {prompt}" if column == "prompt" else str(prompt % 3)
