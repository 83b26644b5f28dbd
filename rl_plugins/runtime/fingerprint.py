"""Which dataset a run has: a short text over all rows and all columns, the same in every process and after a resume.

    fingerprint(train_dataset)  ->  "200 rows, 5f1c9a3be2d04471"

Data in Arrow (a `datasets.Dataset`, a pyarrow Table or RecordBatch, Parquet files) is hashed as it lies there: nothing
is decoded, no image is opened. The text depends on the values in the order of the rows, not on how they are cut into
chunks, sliced, shuffled by an indices mapping or encoded as a dictionary. Other datasets with random access are hashed
row by row. Both are bounded, and beyond the bound the text says that it is a sample.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl_plugins.core.files import parquet_of

MAX_BYTES = 4 << 30  # of Arrow data that are hashed; the columns beyond, largest last, are sampled
MAX_ROWS = 32_768  # of other datasets, whose rows may be slow to make
SAMPLE = 2048  # rows of a column that is too large
_BLOCK_BYTES, _BLOCK_ROWS = 64 << 20, 262_144  # of rows that are gathered at once


def fingerprint(dataset: Any) -> str:
    """A short text that tells datasets apart; "stream" for one without random access.

    A transform that `datasets` applies when rows are read (`set_transform`) is not seen. Of objects in the rows of
    other datasets, tensors, arrays, bytes and dataclasses are seen whole, of an image size and mode, of anything else
    only its type.
    """
    data = _arrow(dataset)
    if data is not None:
        return data.fingerprint()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return "stream"
    size = len(dataset)
    rows = _spread(size, MAX_ROWS)
    digest = hashlib.sha256(f"{size} rows".encode())
    for i in rows:
        digest.update(hashlib.sha256(_text(dataset[i]).encode()).digest())
    return _said(size, digest.hexdigest(), f"a sample of {len(rows)} rows" if len(rows) < size else "")


def _said(size: int, digest: str, sample: str) -> str:
    return f"{size} rows, {digest[:16]}{', ' if sample else ''}{sample}"


def _spread(size: int, most: int) -> Sequence[int]:
    """All numbers below `size`, or `most` of them from the first to the last."""
    return range(size) if size <= most else [i * (size - 1) // (most - 1) for i in range(most)]


# ---- Arrow


@dataclass(frozen=True)
class _Arrow:
    """Rows in Arrow.

    Args:
        size: rows.
        bytes_of: column -> its bytes, about.
        batches: columns -> record batches of all rows in order.
        sample: columns -> record batches of some rows; always the same ones.
    """

    size: int
    bytes_of: Mapping[str, int]
    batches: Callable[[list[str]], Iterator[Any]]
    sample: Callable[[list[str]], Iterator[Any]]

    def fingerprint(self) -> str:
        left, whole = MAX_BYTES, []
        for name in sorted(self.bytes_of, key=lambda n: (self.bytes_of[n], n)):
            left -= self.bytes_of[name]
            if left < 0:
                break
            whole.append(name)
        rest = sorted(set(self.bytes_of) - set(whole))
        digest = _Digest()
        rows = {"all": 0, "sample": 0}
        for part, columns, read in (("all", whole, self.batches), ("sample", rest, self.sample)):
            for batch in read(columns) if columns else ():
                rows[part] += batch.num_rows
                for name, array in zip(batch.schema.names, batch.columns, strict=True):
                    digest.add((part, name), array)
        sample = f"of {', '.join(rest)} a sample of {rows['sample']} rows" if rest else ""
        return _said(self.size, digest.result(f"{self.size} rows of {sorted(self.bytes_of)}"), sample)


class _Digest:
    """Values of Arrow arrays, fed in pieces of any length: every leaf of a nested type has its own running hash."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[str, ...], Any] = {}

    def result(self, head: str) -> str:
        total = hashlib.sha256(head.encode())
        for path in sorted(self._leaves):
            total.update(repr(path).encode() + self._leaves[path].digest())
        return total.hexdigest()

    def _feed(self, path: tuple[str, ...], kind: str, data: Any) -> None:
        leaf = (*path, kind)
        if leaf not in self._leaves:
            self._leaves[leaf] = hashlib.sha256()
        self._leaves[leaf].update(data)

    def add(self, path: tuple[str, ...], array: Any) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        is_ = pa.types
        array = _as_stored(array)
        kind = array.type
        valid = np.ones(len(array), np.uint8)
        if array.null_count:
            valid = pc.cast(array.is_valid(), pa.uint8()).to_numpy()
            array = array.drop_null()  # what lies under a null is anything
        self._feed(path, "valid", valid)
        if is_.is_null(kind):
            self._feed(path, "null", b"")
        elif is_.is_struct(kind):
            self._feed(path, "struct", b"")
            for field, child in zip(kind, array.flatten(), strict=True):
                self.add((*path, field.name), child)
        elif is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
            self._feed(path, "list", pc.list_value_length(array).cast(pa.int64()).to_numpy())
            self.add((*path, "[]"), array.flatten())
        elif is_.is_boolean(kind):
            self._feed(path, "bool", pc.cast(array, pa.uint8()).to_numpy())
        elif (
            is_.is_string(kind) or is_.is_large_string(kind) or is_.is_binary(kind) or is_.is_large_binary(kind)
        ):  # the wide forms hold the same values
            self._add_text(path, array)
        elif is_.is_fixed_size_binary(kind) or is_.is_primitive(kind) or is_.is_decimal(kind):
            width = kind.bit_width // 8
            data = b"" if not len(array) else memoryview(array.buffers()[1])
            self._feed(path, str(kind), data[array.offset * width : (array.offset + len(array)) * width])
        else:  # maps, unions, views of lists
            for value in array.to_pylist():
                self._feed(path, str(kind), _text(value).encode())

    def _add_text(self, path: tuple[str, ...], array: Any) -> None:
        import numpy as np
        import pyarrow as pa

        is_, kind = pa.types, array.type
        name = "text" if is_.is_string(kind) or is_.is_large_string(kind) else "bytes"
        if not len(array):
            self._feed(path, name, b"")
            return
        wide = is_.is_large_string(kind) or is_.is_large_binary(kind)
        _, ends, values = array.buffers()
        ends = np.frombuffer(ends, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
        self._feed(path, f"{name} lengths", np.diff(ends).astype(np.int64))
        self._feed(path, name, memoryview(values or b"")[ends[0] : ends[-1]])


def _as_stored(array: Any) -> Any:
    """The array as its values lie in memory."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_ = pa.types
    while True:
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        elif is_.is_dictionary(array.type):
            array = array.dictionary_decode()
        elif is_.is_run_end_encoded(array.type):
            array = pc.run_end_decode(array)
        elif is_.is_string_view(array.type):
            array = array.cast(pa.large_string())
        elif is_.is_binary_view(array.type):
            array = array.cast(pa.large_binary())
        else:
            return array


def _arrow(dataset: Any) -> _Arrow | None:
    """The dataset's rows in Arrow, if that is how it has them. Nothing is imported that the dataset did not bring."""
    files = _parquet_files(dataset)
    if files:
        return _of_files(files)
    kind = type(dataset)
    if kind.__module__.split(".")[0] == "pyarrow" and kind.__name__ in ("Table", "RecordBatch"):
        return _of_table(dataset, None)
    table: Any = getattr(getattr(dataset, "data", None), "table", None)  # of `datasets.Dataset`
    if type(table).__module__.split(".")[0] != "pyarrow" or not hasattr(dataset, "__len__"):
        return None
    mapping = getattr(dataset, "_indices", None)
    indices = None if mapping is None else mapping.column(0)
    if len(dataset) != (table.num_rows if indices is None else len(indices)):
        return None  # not the `datasets` this was written for
    return _of_table(table, indices)


def _of_table(table: Any, indices: Any) -> _Arrow:
    import numpy as np
    import pyarrow as pa

    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    places = None if indices is None else np.asarray(indices.to_numpy(), np.int64)
    size = table.num_rows if places is None else len(places)
    share = size / max(1, table.num_rows)

    def batches(columns: list[str]) -> Iterator[Any]:
        part = table.select(columns)
        return iter(part.to_batches(max_chunksize=_BLOCK_ROWS)) if places is None else _gathered(part, places)

    def sample(columns: list[str]) -> Iterator[Any]:
        rows = np.asarray(_spread(size, SAMPLE), np.int64)
        return _gathered(table.select(columns), rows if places is None else places[rows])

    sizes = {n: int(c.nbytes * share) for n, c in zip(table.column_names, table.columns, strict=True)}
    return _Arrow(size, sizes, batches, sample)


def _gathered(table: Any, places: Any) -> Iterator[Any]:
    """Rows of a table in any order. `Table.take` would first put all its chunks together; here each gives its rows, and
    only those are put together and in order."""
    import numpy as np
    import pyarrow as pa

    chunks = table.to_batches()
    starts = np.cumsum([0, *(len(c) for c in chunks)])
    block = int(_BLOCK_BYTES * table.num_rows / max(1, table.nbytes))
    block = min(max(block, 16), _BLOCK_ROWS)
    for first in range(0, len(places), block):
        wanted = places[first : first + block]
        order = np.argsort(wanted, kind="stable")
        ascending = wanted[order]
        chunk = np.searchsorted(starts, ascending, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(chunk)) + 1).tolist(), len(wanted)]
        pieces = [chunks[chunk[a]].take(pa.array(ascending[a:b] - starts[chunk[a]])) for a, b in pairwise(cuts)]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        yield from pa.Table.from_batches(pieces).take(pa.array(back)).to_batches()


def _parquet_files(dataset: Any) -> list[str]:
    """The files, where the dataset is the path of a Parquet file or a list of such paths."""
    if isinstance(dataset, (str, os.PathLike)):
        dataset = [dataset]
    if not isinstance(dataset, (list, tuple)) or not all(isinstance(p, (str, os.PathLike)) for p in dataset):
        return []
    return [os.fspath(p) for p in dataset] if all(Path(p).suffix == ".parquet" for p in dataset) else []


def _of_files(files: list[str]) -> _Arrow:
    import pyarrow.parquet as pq

    opened = []
    for file in files:
        with parquet_of(file):
            opened.append(pq.ParquetFile(file))
    sizes = dict.fromkeys(opened[0].schema_arrow.names, 0)
    for file in opened:
        for g in range(file.num_row_groups):
            group = file.metadata.row_group(g)
            for c in range(group.num_columns):
                name = next(n for n in _roots(group.column(c).path_in_schema) if n in sizes)
                sizes[name] += group.column(c).total_uncompressed_size

    def batches(columns: list[str]) -> Iterator[Any]:
        for file in opened:
            yield from file.iter_batches(columns=columns)

    def sample(columns: list[str]) -> Iterator[Any]:
        groups = [(file, g) for file in opened for g in range(file.num_row_groups)]
        for i in _spread(len(groups), SAMPLE // 64):
            file, group = groups[i]
            yield from [next(file.iter_batches(batch_size=64, row_groups=[group], columns=columns))]

    return _Arrow(sum(f.metadata.num_rows for f in opened), sizes, batches, sample)


def _roots(path: str) -> Iterator[str]:
    """Columns a leaf "a.b.c" of a Parquet schema may belong to, the longest name first: names can contain dots."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        yield ".".join(parts[:n])


# ---- rows of other datasets


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except TypeError:  # keys of several types, or of types that JSON has not
        return json.dumps(_with_text_keys(value), sort_keys=True, default=lambda o: _with_text_keys(_plain(o)))


def _plain(value: Any) -> Any:
    """What represents an object that JSON does not have."""
    import numpy as np
    import torch

    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        return ["tensor", str(value.dtype), list(value.shape), _sum(value.view(-1).view(torch.uint8).numpy())]
    if isinstance(value, np.generic):
        return value.item() if isinstance(value.item(), (bool, int, float, str)) else [name, str(value)]
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return ["array", list(value.shape), value.ravel().tolist()]
        return ["array", str(value.dtype), list(value.shape), _sum(np.ascontiguousarray(value))]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", len(value), _sum(value)]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return ["set", sorted(_text(v) for v in value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [name, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, enum.Enum)):
        return [name, str(value)]
    if isinstance(value, os.PathLike):
        return [name, os.fspath(value)]
    shape = (getattr(value, "size", None), getattr(value, "mode", None))  # of an image; its pixels are not decoded
    return [name, *map(str, shape)] if isinstance(shape[0], tuple) and isinstance(shape[1], str) else [name]


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {f"{type(k).__name__} {k!r}": _with_text_keys(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_text_keys(v) for v in value]
    return value


def _sum(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()
