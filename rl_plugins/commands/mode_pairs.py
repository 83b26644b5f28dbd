"""`rl-plugins mode-pairs`: preference pairs for TRL's DPOTrainer from a table of attempts in two modes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, shortened
from rl_plugins.tools.preferences import DIRECT, PairRule, mode_pairs

READ = (".parquet", ".jsonl", ".csv")
WRITTEN = (".parquet", ".jsonl")


def write_pairs(attempts: Path, out: Path, rule: PairRule, force: bool) -> None:
    """Writes the pairs and prints what became of the problems.

    Raises:
        ConfigError: a file that cannot be read or written, or a row that does not fit.
    """
    if out.suffix not in WRITTEN:
        raise ConfigError(f"the pairs' file is {out}; it must end in {' or '.join(WRITTEN)}.")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists. Nothing was written. Give another file, or --force to replace it.")
    found = mode_pairs(read_rows(attempts), rule)
    if not found.rows:
        raise ConfigError(
            f"no problem in {attempts} has a pair: {found.unsolved} have no right attempt, {found.nothing_rejected} "
            f"have none to reject. Nothing was written. Give attempts in both modes, with `verified`."
        )
    write_rows(found.rows, out)
    direct = sum(row["mode"] == DIRECT for row in found.rows)
    print(f"{len(found.rows)} pairs: {direct} prefer a direct answer, {len(found.rows) - direct} prefer reasoning.")
    print(f"No right attempt: {found.unsolved} problems. Nothing to reject: {found.nothing_rejected} problems.")
    print(f"Written: {out}")


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a table.

    Raises:
        ConfigError: no such file, or no table of this kind.
    """
    if path.suffix not in READ or not path.is_file():
        what = "must end in " + ", ".join(READ) if path.suffix not in READ else "is no file"
        raise ConfigError(f"the table of attempts {shortened(str(path))} {what}. Give a file with a row per attempt.")
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as f:
                return [json.loads(line) for line in f if line.strip()]
        import pyarrow.csv
        import pyarrow.parquet

        if path.suffix == ".parquet":
            return list(pyarrow.parquet.read_table(path).to_pylist())
        lines = pyarrow.csv.ParseOptions(newlines_in_values=True)
        return list(pyarrow.csv.read_csv(path, parse_options=lines).to_pylist())
    except (OSError, ValueError) as e:  # pyarrow's errors are either
        raise ConfigError(
            f"the table of attempts {path} cannot be read ({type(e).__name__}: {shortened(e)}). Save it again."
        ) from None


def write_rows(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Rows as a table."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        out.write_text(text, encoding="utf-8")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), out)
