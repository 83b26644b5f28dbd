"""Rows of a dataset as an audit reads and changes them: the prompt's text, a column, words in their normal form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError
from rl_plugins.kit.services import prompt_text
from rl_plugins.kit.texts import normalized

NESTED = ("extra_info", "reward_model")  # columns of verl's datasets whose fields count as columns
ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "target", "label", "gold")
QUESTION_COLUMNS = ("question", "problem", "query", "instruction", "input")
PROMPT_COLUMNS = ("prompt", "raw_prompt")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"))
_WORD = re.compile(r"\w+|[^\w\s]")

Row = Mapping[str, Any]


class DatasetRows:
    """DatasetRows of a dataset, read when they are asked for.

    Args:
        dataset: anything with `len` and rows by number; a dataset of verl is read without its template.
        most: rows that are looked at; a larger dataset is sampled.
        rng: draws the sample.
    """

    def __init__(self, dataset: Any, most: int, rng: np.random.Generator) -> None:
        self._dataset = getattr(dataset, "dataframe", dataset)
        self.size = len(self._dataset)
        chosen = rng.choice(self.size, most, replace=False) if self.size > most else np.arange(self.size)
        self.numbers: list[int] = np.sort(chosen).tolist()
        self._read: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Row:
        """A row by its number in the dataset."""
        if number not in self._read:
            self._read[number] = read_row(self._dataset, number)
        return self._read[number]

    def __iter__(self) -> Iterator[Row]:
        return (self[n] for n in self.numbers)


def read_row(dataset: Any, number: int) -> Row:
    """One row, with the messages as "prompt"."""
    row = dict(getattr(dataset, "dataframe", dataset)[int(number)])
    return row if "prompt" in row else {"prompt": row.get("raw_prompt", ""), **row}


def columns_of(row: Row) -> dict[str, Any]:
    """Columns with the fields of nested ones."""
    found: dict[str, Any] = {}
    for name in NESTED:
        if isinstance(row.get(name), Mapping):
            found |= row[name]
    return {**found, **row}


def answer_column(row: Row, named: str) -> str:
    """The column of the right answer: the one that was named, or the first that is known.

    Raises:
        ConfigError: there is none.
    """
    columns = columns_of(row)
    found = next((c for c in ((named,) if named else ANSWER_COLUMNS) if c in columns), None)
    if found is None:
        what = f"no column `{named}`" if named else f"none of the columns {', '.join(ANSWER_COLUMNS)}"
        raise ConfigError(
            f"The dataset has {what} (it has: {', '.join(sorted(columns))}). Name the column of the right answer: "
            f"`answer_column`."
        )
    return found


def with_cell(row: Row, column: str, value: Any) -> Row:
    """The row with another value in a column, and in the fields of nested ones that have its name."""
    nested = {n: {**row[n], column: value} for n in NESTED if isinstance(row.get(n), Mapping) and column in row[n]}
    return {**row, **nested, **({column: value} if column in row or not nested else {})}


def text_of(row: Row) -> str:
    """The prompt as text."""
    return prompt_text(row["prompt"])


def with_prompt(row: Row, change: Callable[[str], str]) -> Row:
    """The row with another text in the last message of its prompt, and in columns that hold the question."""
    found = dict(row)
    for name in PROMPT_COLUMNS:
        if name in row:
            found[name] = _changed(row[name], change)
    for name in QUESTION_COLUMNS:
        if isinstance(row.get(name), str):
            found[name] = change(row[name])
    extra = row.get("extra_info")
    if isinstance(extra, Mapping):
        asked = {k: change(v) for k, v in extra.items() if k in QUESTION_COLUMNS and isinstance(v, str)}
        found["extra_info"] = {**extra, **asked}
    return found


def with_system(row: Row, text: str) -> Row:
    """The row with another system message; a prompt without messages is left as it is."""
    found = dict(row)
    for name in PROMPT_COLUMNS:
        if name in row and not isinstance(row[name], str):
            rest = [m for m in row[name] if not (isinstance(m, Mapping) and m.get("role") == "system")]
            found[name] = [{"role": "system", "content": text}, *rest]
    return found


def _changed(prompt: Any, change: Callable[[str], str]) -> Any:
    if isinstance(prompt, str):
        return change(prompt)
    messages = list(prompt)
    for i in range(len(messages) - 1, -1, -1):
        if isinstance(messages[i], Mapping) and isinstance(messages[i].get("content"), str):
            messages[i] = {**messages[i], "content": change(messages[i]["content"])}
            break
    return messages


def normal(text: str) -> str:
    """A text in its normal form: NFKC, lower case, no invisible characters, single spaces."""
    return " ".join(normalized(text).translate(_INVISIBLE).casefold().split())


def words_of(text: str) -> list[str]:
    """Words and marks of a normal text."""
    return _WORD.findall(text)


def oddities(text: str) -> list[str]:
    """What is strange about the characters of a raw text."""
    found = []
    if text.translate(_INVISIBLE) != text:
        found.append("invisible characters")
    if not text.isascii():
        found.append("not only ASCII")
        if any(_mixed(word) for word in re.findall(r"\w+", text)):
            found.append("a word of several scripts")
    if re.search(r"\s{3,}", text):
        found.append("runs of spaces")
    return found


def _mixed(word: str) -> bool:
    scripts = {unicodedata.name(c, "?").split()[0] for c in word if c.isalpha()}
    return len(scripts & {"LATIN", "CYRILLIC", "GREEK"}) > 1


def scalars_of(row: Row) -> dict[str, Any]:
    """Short values of the columns, the prompt and texts left out."""
    return {
        k: v
        for k, v in columns_of(row).items()
        if k not in PROMPT_COLUMNS and (isinstance(v, (bool, int)) or (isinstance(v, str) and len(v) <= 40))
    }


def spread(items: Sequence[int], most: int) -> list[int]:
    """All of them, or `most` from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // max(most - 1, 1)] for i in range(most)]
