"""The fingerprint of a dataset: every value counts, and nothing but the values and their order."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.runtime import fingerprint as module
from rl_plugins.runtime.fingerprint import fingerprint


def rows(n: int = 200) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "system", "content": "sort"}, {"role": "user", "content": f"number {i} " * (i % 4)}],
            "answer": None if i % 7 == 3 else f"é{i}",
            "level": i % 5,
            "weights": [i / 3] * (i % 3),
            "flag": None if i % 11 == 0 else bool(i % 2),
            "extra": None if i % 13 == 0 else {"ground_truth": {"target": i, "numbers": [i, i + 1]}},
            "raw": bytes([i % 256]) * (i % 9),
            "day": datetime.date(2026, 1, 1) + datetime.timedelta(days=i),
            "price": decimal.Decimal(i) / 4,
            "nothing": None,
        }
        for i in range(n)
    ]


TABLE = pa.Table.from_pylist(rows())


def test_what_it_says() -> None:
    text = fingerprint(datasets.Dataset(TABLE))
    assert text == fingerprint(TABLE) and text.startswith("200 rows, ") and len(text) == len("200 rows, ") + 16
    assert fingerprint(iter([1])) == "stream" == fingerprint(None)
    assert fingerprint(datasets.Dataset.from_list(rows(9)).to_iterable_dataset()) == "stream"
    assert fingerprint([]) == fingerprint([]) != fingerprint([{}])


def test_it_is_the_same_in_another_process() -> None:
    """Hashes of Python differ between processes; a resumed run is another process."""
    code = (
        "import pyarrow as pa; from rl_plugins.runtime.fingerprint import fingerprint as f; "
        "rows = [{'a': str(i), 'b': [i, None]} for i in range(50)]; print(f(rows)); "
        "print(f(pa.Table.from_pylist(rows)))"
    )
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert said[0].stdout == said[1].stdout
    same = [{"a": str(i), "b": [i, None]} for i in range(50)]
    assert said[0].stdout.split("\n")[:2] == [fingerprint(same), fingerprint(pa.Table.from_pylist(same))]


@pytest.mark.parametrize("form", ["arrow", "list"])
def test_every_row_and_every_column_counts(form: str) -> None:
    make = pa.Table.from_pylist if form == "arrow" else list
    original, seen = fingerprint(make(rows())), set()
    changes: dict[str, Any] = {
        "prompt": lambda v: [v[0], {**v[1], "content": v[1]["content"] + "."}],
        "answer": lambda v: "" if v is None else None,
        "level": lambda v: v + 1,
        "weights": lambda v: [*v, 0.0],
        "flag": lambda v: not v,
        "extra": lambda v: {"ground_truth": {"target": 0, "numbers": None}},
        "raw": lambda v: v + b"\0",
        "day": lambda v: v + datetime.timedelta(days=1),
        "price": lambda v: v + decimal.Decimal("0.25"),
    }
    for name, change in changes.items():
        for place in (0, 1, 57, 133, 199):
            other = rows()
            other[place][name] = change(other[place][name])
            seen.add(fingerprint(pa.Table.from_pylist(other, schema=TABLE.schema) if form == "arrow" else other))
    assert original not in seen and len(seen) == 5 * len(changes)


def test_a_dataset_with_other_rows_between_a_few_that_stay_is_another() -> None:
    """What a sample of 32 prompts does not see: 168 of 200 rows replaced, and every answer changed."""
    kept = {i * 199 // 31 for i in range(32)}
    data = datasets.Dataset.from_list(rows())
    replaced = datasets.Dataset.from_list(
        [r if i in kept else {**r, "prompt": rows()[0]["prompt"]} for i, r in enumerate(rows())]
    )
    answers = data.map(lambda row: {"answer": "0"})
    assert len({fingerprint(d) for d in (data, replaced, answers)}) == 3


def test_order_columns_and_length_count() -> None:
    data = datasets.Dataset(TABLE)
    others = [
        data.select([1, 0, *range(2, 200)]),
        data.select(range(199)),
        data.select(range(1, 200)),
        data.remove_columns("level"),
        data.rename_column("level", "grade"),
        data.add_column("new", [0] * 200),
        data.cast_column("level", datasets.Value("int32")),
        datasets.concatenate_datasets([data, data]),
        data.shuffle(seed=1),
        data.shuffle(seed=2),
    ]
    assert len({fingerprint(d) for d in (data, *others)}) == len(others) + 1
    assert fingerprint(data.select_columns(["level", "answer"])) == fingerprint(
        data.select_columns(["answer", "level"])
    )


def test_how_the_rows_are_kept_does_not_count(tmp_path: Path) -> None:
    rng, text = random.Random(0), fingerprint(TABLE)
    for _ in range(5):  # any cuts, empty chunks among them
        cuts = sorted(rng.choices(range(201), k=9))
        pieces = [TABLE.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, 200], strict=True)]
        assert fingerprint(pa.concat_tables(pieces)) == text
        assert fingerprint(pa.concat_tables(pieces).combine_chunks()) == text
    behind = pa.concat_tables([TABLE.slice(100), TABLE]).combine_chunks().slice(100)
    assert fingerprint(behind) == text
    assert fingerprint(TABLE.combine_chunks().to_batches()[0]) == text
    pq.write_table(TABLE, tmp_path / "all.parquet", row_group_size=17)
    pq.write_table(TABLE.slice(0, 90), tmp_path / "one.parquet")
    pq.write_table(TABLE.slice(90), tmp_path / "two.parquet")
    assert fingerprint(tmp_path / "all.parquet") == fingerprint(str(tmp_path / "all.parquet")) == text
    assert fingerprint([tmp_path / "one.parquet", tmp_path / "two.parquet"]) == text
    assert fingerprint([tmp_path / "two.parquet", tmp_path / "one.parquet"]) != text


def test_an_indices_mapping_gives_the_rows_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = pa.concat_tables([TABLE.slice(i, 7) for i in range(0, 200, 7)])
    data = datasets.Dataset(chunked)
    for chosen in (data.shuffle(seed=3), data.filter(lambda r: r["level"] > 1), data.select([5, 5, 199, 0, 5])):
        assert chosen._indices is not None and chosen.flatten_indices()._indices is None
        assert fingerprint(chosen) == fingerprint(chosen.flatten_indices())
        whole = fingerprint(chosen)
        with monkeypatch.context() as patched:  # gathered in blocks of 16 rows
            patched.setattr(module, "_BLOCK_BYTES", 1)
            assert fingerprint(chosen) == whole
    assert fingerprint(data.shuffle(seed=3).sort("day")) == fingerprint(data)
    assert fingerprint(data.select([])).startswith("0 rows, ")


def test_encodings_of_the_same_values_are_alike_and_what_lies_under_a_null_does_not_count() -> None:
    texts = ["a", "b", None, "a", "", None, "é"] * 3
    forms = [
        pa.array(texts),
        pa.array(texts, pa.large_string()),
        pa.array(texts).dictionary_encode(),
        pa.array(texts, pa.string_view()),
        pa.concat_arrays([pa.array(["x"]), pa.array(texts)]).slice(1),
    ]
    assert len({fingerprint(pa.table({"a": f})) for f in forms}) == 1
    assert fingerprint(pa.table({"a": pa.array([t and t.encode() for t in texts])})) != fingerprint(
        pa.table({"a": forms[0]})
    )
    valid = pa.array([True, False, True]).buffers()[1]
    dirty = pa.Array.from_buffers(pa.int64(), 3, [valid, pa.py_buffer(np.array([1, 99, 3]))])
    assert dirty.to_pylist() == [1, None, 3]
    assert fingerprint(pa.table({"a": dirty})) == fingerprint(pa.table({"a": pa.array([1, None, 3])}))
    lists = [pa.array([[1, 2], None, [], [3]], kind) for kind in (pa.list_(pa.int64()), pa.large_list(pa.int64()))]
    assert len({fingerprint(pa.table({"a": f})) for f in lists}) == 1
    pairs = [[1, 2], None, [3, 4]]
    assert fingerprint(pa.table({"a": pa.array(pairs, pa.list_(pa.int64(), 2))})) == fingerprint(
        pa.table({"a": pa.array(pairs)})
    )


def test_values_do_not_move_over_borders() -> None:
    tables = [
        [{"a": "ab", "b": "c"}],
        [{"a": "a", "b": "bc"}],
        [{"a": "abc", "b": ""}],
        [{"a": "abc", "b": None}],
        [{"a": ["a", "b"], "b": "c"}],
        [{"a": ["ab"], "b": "c"}],
        [{"a": [["a"], ["b"]], "b": "c"}],
        [{"a": [["a", "b"]], "b": "c"}],
        [{"a": {"b": "ab"}, "b": "c"}],
        [{"a": {"d": "ab"}, "b": "c"}],
        [{"a": "a", "b": "c"}, {"a": "b", "b": "c"}],
    ]
    columns: list[tuple[Any, Any]] = [  # of two rows: the same values in a row, cut or placed differently
        (["ab", "c"], ["a", "bc"]),
        ([1, None], [None, 1]),
        (["", None], [None, ""]),
        ([[1], [2]], [[1, 2], []]),
        ([[], None], [None, []]),
        ([[[1], []], [[2]]], [[[1]], [[], [2]]]),
        ([{"x": None}, None], [None, {"x": None}]),
        ([b"ab", b""], [b"a", b"b"]),
    ]
    for one, two in columns:
        assert fingerprint(pa.table({"a": one})) != fingerprint(pa.table({"a": pa.array(two, pa.array(one).type)}))
        assert fingerprint([{"a": v} for v in one]) != fingerprint([{"a": v} for v in two])
    assert len({fingerprint(pa.Table.from_pylist(t)) for t in tables}) == len(tables)
    assert len({fingerprint(t) for t in tables}) == len(tables)
    days = pa.array([1, 2], pa.int32())  # the same bytes, of another type
    assert fingerprint(pa.table({"a": days})) != fingerprint(pa.table({"a": days.cast(pa.date32())}))


scalars = st.one_of(st.none(), st.integers(-5, 5), st.integers(2**40, 2**41))
cells = st.one_of(st.lists(st.one_of(st.none(), st.lists(scalars, max_size=2)), max_size=2), st.none())


@settings(max_examples=60, deadline=None)
@given(st.lists(cells, min_size=1, max_size=6), st.lists(cells, min_size=1, max_size=6), st.integers(0, 6))
def test_alike_if_and_only_if_the_values_are(a: list[Any], b: list[Any], cut: int) -> None:
    kind = pa.list_(pa.list_(pa.int64()))

    def table(values: list[Any]) -> Any:
        return pa.table({"x": pa.chunked_array([pa.array(values[:cut], kind), pa.array(values[cut:], kind)])})

    assert (fingerprint(table(a)) == fingerprint(pa.table({"x": pa.array(b, kind)}))) == (a == b)
    assert (fingerprint(a) == fingerprint(b)) == (a == b)


def test_images_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    pictures = [Image.fromarray(np.full((4, 4, 3), i, np.uint8)) for i in range(6)]
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    made = [{"prompt": str(i), "image": p} for i, p in enumerate(pictures)]
    data = datasets.Dataset.from_list(made, features=features)
    other = datasets.Dataset.from_list([*made[:5], {**made[5], "image": pictures[0]}], features=features)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(datasets.Image, "decode_example", forbidden)
    monkeypatch.setattr(Image.Image, "load", forbidden)
    monkeypatch.setattr(Image.Image, "tobytes", forbidden)
    monkeypatch.setattr(Image, "open", forbidden)
    assert fingerprint(data) != fingerprint(other), "and yet all of their bytes count"
    assert fingerprint(data) != fingerprint(data.remove_columns("image"))
    assert fingerprint(data.shuffle(seed=0)) != fingerprint(data)
    assert fingerprint(made) == fingerprint([dict(r) for r in made]) != fingerprint(made[:5])


def test_columns_beyond_the_bound_are_sampled_and_the_text_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    big = pa.table({"image": [bytes([i % 256]) * 500 for i in range(3000)], "answer": [str(i) for i in range(3000)]})
    whole = fingerprint(big)
    monkeypatch.setattr(module, "MAX_BYTES", 100_000)
    monkeypatch.setattr(module, "SAMPLE", 128)
    text = fingerprint(big)
    assert text.endswith(", of image a sample of 128 rows") and text.split(",")[1] != whole.split(",")[1]
    assert whole.count(",") == 1 and "sample" not in whole
    answers = big.column("answer").to_pylist()
    for place in (0, 1, 1234, 2999):  # every answer counts still
        changed = big.set_column(1, "answer", pa.array([*answers[:place], "x", *answers[place + 1 :]]))
        assert fingerprint(changed) != text
    for place, seen in ((0, True), (1, False), (2999, True)):
        images = big.column("image").to_pylist()
        images[place] = b"x"
        assert (fingerprint(big.set_column(0, "image", pa.array(images))) != text) == seen
    backwards = datasets.Dataset(big).select(list(reversed(range(3000))))
    assert fingerprint(backwards) == fingerprint(backwards.flatten_indices()) != text
    pq.write_table(big, tmp_path / "big.parquet", row_group_size=50)
    assert fingerprint(tmp_path / "big.parquet").endswith(", of image a sample of 100 rows")


class Rows(torch.utils.data.Dataset):
    """A map-style dataset that counts how often it was asked."""

    def __init__(self, values: list[Any]) -> None:
        self.values, self.asked = values, 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        self.asked += 1
        return self.values[i]


def test_other_datasets_are_read_whole_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Rows(rows())
    text = fingerprint(data)
    assert text == fingerprint(rows()) and data.asked == 200 and "sample" not in text
    monkeypatch.setattr(module, "MAX_ROWS", 50)
    sampled = fingerprint(data)
    assert sampled.startswith("200 rows, ") and sampled.endswith(", a sample of 50 rows") and data.asked == 250
    for place, seen in ((0, True), (1, False), (4, True), (199, True)):
        other = rows()
        other[place]["answer"] = "other"
        assert (fingerprint(other) != sampled) == seen
    assert fingerprint(rows(201)) != sampled


@dataclass
class Point:
    x: int


class Opaque:
    pass


def test_objects_in_rows() -> None:
    values = [
        torch.arange(4.0),
        torch.arange(4.0).double(),
        torch.arange(4.0).reshape(2, 2),
        torch.tensor(1.5, dtype=torch.bfloat16),
        np.arange(4.0),
        np.arange(4),
        np.array([["a", None]], dtype=object),
        b"bytes",
        b"other",
        {1: "a"},
        {"1": "a", 1: "b"},
        {"x", "y"},
        {"x", "z"},
        Point(1),
        Point(2),
        datetime.date(2026, 1, 1),
        decimal.Decimal("1.0"),
        Path("a"),
        Opaque(),
        float("nan"),
        "\ud800",
        10**30,
        1,
        1.0,
        True,
        "1",
    ]
    texts = [fingerprint([{"v": v}]) for v in values]
    assert len(set(texts)) == len(values)
    again = [fingerprint([{"v": v.clone() if isinstance(v, torch.Tensor) else v}]) for v in values]
    assert texts == again and fingerprint([{"v": Opaque()}]) == texts[18]
    assert fingerprint([{"v": np.float64(1.0)}]) == fingerprint([{"v": 1.0}])
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    base = torch.arange(8.0)
    assert fingerprint([{"v": base[::2]}]) == fingerprint([{"v": torch.tensor([0.0, 2.0, 4.0, 6.0])}])
    with pytest.raises(ValueError, match="Circular"):
        loop: list[Any] = []
        loop.append(loop)
        fingerprint([loop])


def test_maps_and_other_rare_types_count() -> None:
    kind = pa.map_(pa.string(), pa.int64())
    one = pa.table({"m": pa.array([[("a", 1)], None, []], kind)})
    assert fingerprint(one) == fingerprint(pa.concat_tables([one.slice(0, 1), one.slice(1)]))
    assert fingerprint(one) != fingerprint(pa.table({"m": pa.array([[("a", 2)], None, []], kind)}))
    assert json.dumps(fingerprint(one)).startswith('"3 rows, ')
