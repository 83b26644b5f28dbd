"""A trace as a page: a folder of files that opens without a server, or the same files made when they are asked for."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_plugins.viewer.folder import TraceFolder, tree_of

STATIC = Path(__file__).parent / "static"
FILES = (
    "index.html",
    "style.css",
    "store.js",
    "views.js",
    "app.js",
    *(f"vendor/{name}" for name in ("htm-preact.js", "uplot.js", "uplot.css")),
    *(f"vendor/{name}-LICENSE.txt" for name in ("htm", "preact", "uplot")),
)


def run_data(trace: TraceFolder) -> str:
    """`data/run.js`: the summaries of all batches, and the texts of tokens."""
    recorded = set(trace.recorded)
    batches = []
    for b in trace.batches:
        groups = [{**g, "recorded": g["recorded"] and b["batch"] in recorded} for g in b["groups"]]
        kept = {k: v for k, v in b.items() if k not in ("time", "schema", "selected")}
        batches.append({**kept, "groups": groups, "stats": dict(b["stats"])})
    last = trace.batches[-1]
    return _script("run", {"host": last["host"], "methods": last["methods"], "batches": batches, "texts": trace.texts})


def group_data(trace: TraceFolder, batch: int, group: int) -> str:
    """`data/b3/g5.js`: the rollouts of a group.

    Raises:
        ConfigError: they are not in the trace.
    """
    return _group(trace.rollouts(batch, group), batch, group)


def _group(rows: list[dict[str, Any]], batch: int, group: int) -> str:
    tree = asdict(tree_of([row["completion_ids"] for row in rows]))
    return _script(f"b{batch}/g{group}", {"rows": rows, "tree": tree})


def write_page(trace: TraceFolder, out: Path) -> Iterator[int]:
    """Writes the page; yields the number of each batch that is done.

    Args:
        out: folder; a page that is there is replaced.
    """
    shutil.rmtree(out / "data", ignore_errors=True)
    for name in FILES:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(STATIC / name, out / name)
    (out / "data").mkdir()
    (out / "data" / "run.js").write_text(run_data(trace), encoding="ascii")
    for number in trace.recorded:
        folder = out / "data" / f"b{number}"
        folder.mkdir()
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in trace.rollouts(number):
            groups.setdefault(row["group"], []).append(row)
        for group, rows in groups.items():
            (folder / f"g{group}.js").write_text(_group(rows, number, group), encoding="ascii")
        yield number


def _script(name: str, value: Any) -> str:
    """A file that hands a value to the page. ASCII alone: no character of a text can end a string or a line."""
    return f"rlTrace.put({json.dumps(name)}, {json.dumps(_plain(value), separators=(',', ':'))});\n"


def _plain(value: Any) -> Any:
    """Numbers with 6 digits; NaN and infinite ones, which JSON does not have, are null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
