"""Columns of dataset rows and of planned rows, and planned rows with another text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.kit.services import with_task

_NESTED = ("extra_info", "reward_model")  # columns of verl's datasets whose fields count as columns


def cell(dataset: Any, prompt: int, column: str) -> Any:
    """What stands in a column of a dataset row, or in a field of those whose fields count as columns.

    Raises:
        ConfigError: nothing does.
    """
    row = dataset[prompt]
    for place in (row, *(row[name] for name in _NESTED if isinstance(row.get(name), Mapping))):
        if column in place:
            return place[column]
    raise ConfigError(f"The dataset has no column `{column}` (it has: {', '.join(sorted(row))}). Add it.")


def arrow_column(dataset: Any, name: str, kinds: tuple[str, ...]) -> Any:
    """A column of a `datasets.Dataset` as it lies in Arrow, whose type begins with one of these words; None of anything
    else, and where rows are made by a function."""
    if name not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "with_format"):
        return None
    kind = getattr(dataset.features[name], "dtype", "")
    if dataset.format["type"] is not None or not kind.startswith(kinds):
        return None
    return dataset.select_columns([name]).with_format("arrow")[:].column(name)


def categories(dataset: Any, name: str, size: int) -> tuple[list[str], NDArray[np.int64]]:
    """Values of a column, or of a field of those whose fields count as columns, as texts, and which of them each row
    has, (rows,)."""
    column = arrow_column(dataset, name, ("int", "uint", "float", "bool", "string", "large_string"))
    if column is not None:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        return [str(v) for v in encoded.dictionary.to_pylist()], encoded.indices.to_numpy().astype(np.int64)
    whole = name in (getattr(dataset, "column_names", None) or ())
    texts = [str(v) for v in (dataset[name] if whole else (cell(dataset, i, name) for i in range(size)))]
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return list(number), np.array([number[text] for text in texts], dtype=np.int64)


def planned_cell(dataset: Any, row: PlanRow, column: str) -> Any:
    """What stands in a column of a planned row: what its `edit` says, else its dataset row.

    Raises:
        MethodError: neither is there.
        ConfigError: the dataset row has no such column.
    """
    if row.edit and column in row.edit:
        return row.edit[column]
    if row.prompt_index < 0 or dataset is None:
        raise MethodError(
            f"A foreign prompt of the plan has no column `{column}` in its `edit`, or the dataset is a stream, whose "
            f"rows cannot be looked up. Add the column to `edit`, or use a dataset with random access."
        )
    return cell(dataset, row.prompt_index, column)


def rewritten(dataset: Any, row: PlanRow, column: str, change: Callable[[str], str]) -> PlanRow:
    """The row with another task (`with_task`) in the column of its prompt. Raises as `planned_cell` does."""
    prompt = with_task(planned_cell(dataset, row, column), change)
    return row.replace(edit={**(row.edit or {}), column: prompt})
