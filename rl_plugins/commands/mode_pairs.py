"""`rl-plugins mode-pairs`: preference pairs for TRL's DPOTrainer from a table of attempts in two modes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_plugins.commands.shared.options import Force
from rl_plugins.core.errors import ConfigError, shortened
from rl_plugins.core.files import read_json, whole, write_text

READ = (".parquet", ".jsonl", ".csv")
WRITTEN = (".parquet", ".jsonl")


def mode_pairs(
    attempts: Annotated[Path, typer.Argument(help="Table of attempts (.parquet, .jsonl or .csv).")],
    out: Annotated[Path, typer.Argument(help="File of the pairs (.parquet or .jsonl).")],
    template: Annotated[
        str | None,
        typer.Option(help="The one prompt of all pairs; {prompt} stands for the problem.", show_default="see below"),
    ] = None,
    direct: Annotated[str, typer.Option(help="Name of the mode without reasoning.")] = "direct",
    reasoning: Annotated[str, typer.Option(help="Name of the mode with reasoning.")] = "cot",
    threshold: Annotated[float, typer.Option(help="Lowest number in `verified` that is a right attempt.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the choice among several attempts.")] = 0,
    force: Force = False,
) -> None:
    """Make preference pairs that teach a model when to reason, for TRL's DPOTrainer.

    A row of the table is one attempt: `prompt` (a text or messages), `mode` (direct or cot), `completion` and
    `verified` (true, false, a number, or empty). Make several attempts per problem in each mode with the base model; 32
    is our guess of the paper's number.

    \b
    The rules, a pair for each problem at most (EconProver, arXiv 2509.12603):
      A direct attempt is right:           it is preferred to an attempt with reasoning.
      Only attempts with reasoning are:    one is preferred to a wrong direct attempt.
      No attempt is right:                 no pair.

    What is preferred was always verified. The same attempts and seed give the same pairs. All pairs have one prompt
    that permits both modes; without --template it is the problem and "Answer directly if you can. Reason step by step
    first only if you need to."

    \b
    Then train (examples/trl/mode_switching.py is a whole run, docs/heads.md explains it):
      rl-plugins mode-pairs attempts.parquet pairs/train.parquet
      trl dpo --dataset_name pairs --model_name_or_path MODEL --beta 0.1
    """
    from rl_plugins.tools import preferences

    rule = preferences.PairRule(template or preferences.TEMPLATE, direct, reasoning, threshold, seed)
    if out.suffix not in WRITTEN:
        raise ConfigError(f"the pairs' file is {out}; it must end in {' or '.join(WRITTEN)}.")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists. Nothing was written. Give another file, or --force to replace it.")
    found = preferences.mode_pairs(read_rows(attempts), rule)
    if not found.rows:
        raise ConfigError(
            f"no problem in {attempts} has a pair: {found.unsolved} have no right attempt, {found.nothing_rejected} "
            f"have none to reject. Nothing was written. Give attempts in both modes, with `verified`."
        )
    write_rows(found.rows, out)
    answers = sum(row["mode"] == preferences.DIRECT for row in found.rows)
    print(f"{len(found.rows)} pairs: {answers} prefer a direct answer, {len(found.rows) - answers} prefer reasoning.")
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
                return [read_json(line) for line in f if line.strip()]
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
    if out.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(out, text)
        return
    import pyarrow
    import pyarrow.parquet

    with whole(out) as part:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), part)
