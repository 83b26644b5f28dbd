"""`rl-plugins train-adapter`: the adapter of `dots`, from measured pass rates."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import typer

from rl_plugins.core.errors import ConfigError, shortened
from rl_plugins.methods.dots import checked_embeddings, load_embeddings, save_adapter, steps_of, train_adapter


def train(embeddings: Path, rates: Path, out: Path, references: int, epochs: int, hidden: int, seed: int) -> None:
    """Trains and writes an adapter, with a progress bar.

    Raises:
        ConfigError: a file cannot be read or does not fit, or would be overwritten.
    """
    if out.suffix != ".safetensors" or out.exists():
        what = "exists already" if out.exists() else "must end in .safetensors"
        raise ConfigError(f"the adapter's file {shortened(str(out))} {what}. Give another name.")
    values = checked_embeddings(load_embeddings(embeddings)[0], None, f"`{embeddings.name}`")
    tables = read_rates(rates, int(values.shape[0]))
    for model, (prompts, _) in tables.items():
        if len(prompts) < 4:
            raise ConfigError(f"model {shortened(model)} has {len(prompts)} pass rates; at least 4 are needed.")
    n = sum(len(prompts) for prompts, _ in tables.values())
    typer.echo(f"{n} pass rates of {len(tables)} models, embeddings of {values.shape[1]} numbers, {epochs} epochs")
    with typer.progressbar(length=steps_of(tables, epochs), label="training") as bar:
        adapter, loss = train_adapter(
            values,
            tables,
            references=references,
            epochs=epochs,
            hidden=hidden,
            seed=seed,
            progress=lambda _: bar.update(1),
        )
    save_adapter(out, adapter)
    typer.echo(f"binary cross-entropy of the last epoch {loss:.4f}; written: {out}")


def read_rates(path: Path, size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Model -> (prompts, pass rates), from a .csv or .jsonl file with `row`, `pass_rate` and, for several models,
    `model` in each line.

    Raises:
        ConfigError: no such file, a line without a row of the embeddings or a rate in [0, 1], or twice the same.
    """
    found: dict[str, dict[int, float]] = {}
    try:
        for number, line in enumerate(_lines(path), 1):
            row, rate = int(line["row"]), float(line["pass_rate"])
            if not 0 <= row < size or not 0 <= rate <= 1:
                raise ValueError(
                    f"line {number} has row {row} of {size} and pass_rate {rate:g}, which must be in [0, 1]"
                )
            known = found.setdefault(str(line.get("model") or "-"), {})
            if row in known:
                raise ValueError(f"line {number} has row {row} again; one pass rate per row and model is needed")
            known[row] = rate
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"the pass rates {shortened(str(path))} cannot be read: {type(e).__name__}: {shortened(e)}. Give a .csv or "
            f".jsonl file with `row` (of the embeddings), `pass_rate` and perhaps `model` in each line."
        ) from e
    if not found:
        raise ConfigError(f"the file {shortened(str(path))} has no pass rates.")
    return {
        model: (torch.tensor(list(known)), torch.tensor(list(known.values()), dtype=torch.float64))
        for model, known in found.items()
    }


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(newline="") as f:
        if path.suffix == ".csv":
            yield from csv.DictReader(f)
        elif path.suffix == ".jsonl":
            yield from (json.loads(line) for line in f if line.strip())
        else:
            raise ValueError("it must end in .csv or .jsonl")
