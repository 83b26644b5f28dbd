"""A trace as a page: a folder of files that opens without a server, or the same files made when they are asked for.

data/run.js              what is known of every batch, as columns
data/b3/g5.js            the rollouts of a group, and the texts of their tokens
data/other/run.js ...    the same of the run it is compared with
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rl_plugins.core.files import claim
from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.summary import batch_summary
from rl_plugins.lab.viewer.trees import tree_of

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("store.js", "parts.js", "run.js", "batch.js", "group.js", "rollout.js", "compare.js", "app.js")
VENDORED = {"htm-preact.js": ("htm", "preact"), "uplot.js": ("uplot",), "uplot.css": ("uplot",), "diff.js": ("diff",)}
FILES = (
    "index.html",
    "style.css",
    *SCRIPTS,
    *(f"vendor/{name}" for name in VENDORED),
    *(f"vendor/{name}-LICENSE.txt" for name in ("htm", "preact", "uplot", "diff")),
)
OTHER = "other"
LONGEST_TOKEN = 200  # characters of a token's text
LARGEST = 500e6
"""Bytes of a page that is written without being asked for that many batches."""
# columns of a row that the page has from elsewhere
LEFT_OUT = ("schema", "batch", "group", "prompt_index", "prompt_ids")


def run_data(trace: TraceFolder, name: str = "run", compared: bool = False) -> str:
    """`data/run.js`: what is known of all batches.

    Args:
        name: by which the page knows it.
        compared: a second run is there as `other/run`.
    """
    batches = [batch_summary(trace, b) for b in trace.batches]
    last = trace.batches[-1]
    kept = [{k: v for k, v in b.items() if k not in ("schema", "selected", "host", "methods", "time")} for b in batches]
    about = {"name": _name(trace), "host": last["host"], "methods": last["methods"], "compared": compared}
    return _script(name, json.dumps(_plain({**about, "batches": kept}), separators=(",", ":")))


def group_data(trace: TraceFolder, batch: int, group: int, prefix: str = "") -> str:
    """`data/b3/g5.js`: the rollouts of a group.

    Raises:
        ConfigError: they are not in the trace.
    """
    return _group(trace, trace.rollout_table(batch, group), f"{prefix}b{batch}/g{group}")


def page_size(trace: TraceFolder) -> tuple[float, float]:
    """(bytes, seconds) that writing its batches takes about: a group of the first, middle and last one, scaled by the
    size of the files."""
    chosen = {trace.recorded[k] for k in (0, len(trace.recorded) // 2, -1)} if trace.recorded else set()
    size = seconds = sampled = 0.0
    for number in chosen:
        start = time.perf_counter()
        whole = trace.rollout_table(number)
        read = time.perf_counter()
        rows = whole.filter(pc.equal(whole["group"], whole["group"][0]))
        times = len(whole) / len(rows)
        size += times * len(_group(trace, rows, ""))
        seconds += read - start + times * (time.perf_counter() - read)
        sampled += trace.bytes_of(number)
    factor = sum(map(trace.bytes_of, trace.recorded)) / max(sampled, 1.0)
    return factor * size, factor * seconds


def write_page(trace: TraceFolder, out: Path, other: TraceFolder | None = None) -> Iterator[int]:
    """Writes the page; yields the number of each batch that is done.

    Args:
        out: folder; a page that is there is replaced.
        other: a run that it is compared with.

    Raises:
        ConfigError: the folder has files and is no page. Nothing in it is changed.
    """
    claim(out, "page")
    (out / FILES[0]).unlink(missing_ok=True)
    shutil.rmtree(out / "data", ignore_errors=True)
    for run, prefix in ((trace, ""), *(((other, f"{OTHER}/"),) if other else ())):
        data = out / "data" / prefix
        data.mkdir(parents=True)
        text = run_data(run, f"{prefix}run", other is not None)
        (data / "run.js").write_text(text, encoding="ascii")
        for number in run.recorded:
            folder = data / f"b{number}"
            folder.mkdir()
            whole = run.rollout_table(number)
            for group in pc.unique(whole["group"]).to_pylist():
                rows = whole.filter(pc.equal(whole["group"], group))
                text = _group(run, rows, f"{prefix}b{number}/g{group}")
                (folder / f"g{group}.js").write_text(text, encoding="ascii")
            yield number
    for name in reversed(FILES):  # index.html last: a page that can be opened is whole
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(STATIC / name, out / name)


def _name(trace: TraceFolder) -> str:
    """Of the run: its folder, without the names that every run has."""
    names = [n for n in trace.path.absolute().parts if n not in ("trace", "trainer")]
    return names[-1]


def _group(trace: TraceFolder, table: Any, name: str) -> str:
    tree = asdict(tree_of([row.values.to_numpy() for row in table["completion_ids"]]))
    ids = pc.unique(pa.concat_arrays(c.flatten() for c in table["completion_ids"].chunks)).to_pylist()
    texts = {i: _cut(trace.texts[i]) for i in ids if i in trace.texts}
    lists = {n: _lists(table[n]) for n in _token_columns(table)}
    rows = []
    ratios = _ratios(trace, table["batch"][0].as_py())
    for i, row in enumerate(table.drop_columns([*lists, *LEFT_OUT]).to_pylist()):
        plain = json.dumps(_plain(row), separators=(",", ":"))
        rows.append(plain[:-1] + "".join(f',"{n}":{values[i]}' for n, values in lists.items()))
        rows[-1] += "".join(f',"{n}":{values}' for n, values in ratios.get(row["row"], {}).items()) + "}"
    why = trace.why_chosen(table["batch"][0].as_py()).get(table["group"][0].as_py(), [])
    shared = json.dumps({"tree": tree, "texts": texts, "chosen": why}, separators=(",", ":"))
    return _script(name, f'{{"rows":[{",".join(rows)}],{shared[1:]}')


def _ratios(trace: TraceFolder, batch: int) -> dict[int, dict[str, str]]:
    """Row -> its ratios and clips at the updates that were recorded, as JSON."""
    found: dict[int, dict[str, str]] = {}
    for update in trace.updates(batch):
        for record in update["ratios"] or []:
            own = found.setdefault(record["row"], {})
            for name in ("ratio", "clipped"):
                if record[name] is not None:
                    own[f"{name}, update {update['update']}"] = json.dumps(_plain(record[name]), separators=(",", ":"))
    return found


def _token_columns(table: Any) -> list[str]:
    """Columns with a number for each token."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return [
        f.name
        for f in table.schema
        if f.name not in LEFT_OUT and pa.types.is_list(f.type) and any(is_(f.type.value_type) for is_ in kinds)
    ]


def _lists(column: Any) -> list[str]:
    """Lists of a column as JSON; floats have 4 decimals, and null where they are not finite."""
    column = column.combine_chunks()
    values = column.values
    if pa.types.is_floating(values.type):
        values = values.cast(pa.float64())
        values = pc.if_else(pc.is_finite(values), pc.round(values, 4), None)
    texts = pc.fill_null(values.cast(pa.string()), "null")
    joined = pc.binary_join(pa.ListArray.from_arrays(column.offsets, texts), ",").to_pylist()
    return [f"[{text}]" if there else "null" for text, there in zip(joined, column.is_valid().to_pylist(), strict=True)]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TOKEN else f"{text[:LONGEST_TOKEN]}[{len(text) - LONGEST_TOKEN} further]"


def _script(name: str, value: str) -> str:
    """A file that hands a value to the page. ASCII alone: no character of a text can end a string or a line."""
    return f"rlTrace.put({json.dumps(name)}, {value});\n"


def _plain(value: Any) -> Any:
    """Numbers with 6 digits; NaN and infinite ones, which JSON does not have, are null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        plain = {int, bool, str, type(None)}.issuperset(map(type, value))
        return value if plain else [_plain(v) for v in value]
    return value
