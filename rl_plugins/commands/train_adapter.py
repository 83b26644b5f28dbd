"""`rl-plugins train-adapter`: the adapter of `dots`, from measured pass rates."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_plugins.core.errors import ConfigError, shortened
from rl_plugins.core.files import read_json

if TYPE_CHECKING:
    import torch


def train_adapter(
    embeddings: Annotated[
        Path, typer.Argument(help="File of embeddings (.safetensors or .npy) with a row per prompt.")
    ],
    rates: Annotated[
        Path,
        typer.Argument(help="File of pass rates (.csv or .jsonl): row, pass_rate, and model if there are several."),
    ],
    out: Annotated[Path, typer.Argument(help="File that is written (.safetensors).")],
    references: Annotated[int, typer.Option(min=2, help="Number of prompts that a prediction is made from.")] = 256,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pass rates.")] = 20,
    hidden: Annotated[int, typer.Option(min=1, help="Size of the projections.")] = 896,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the order of the pass rates.")] = 0,
) -> None:
    """Train the adapter of `dots`, which predicts pass rates of prompts.

    A pass rate is a number from 0 to 1, of any model on any of the prompts; `row` is the prompt's row in the file of
    embeddings. The more models the pass rates come from, the better the adapter transfers to a policy in training. For
    some thousands of prompts training takes minutes on a CPU. Nothing is downloaded.

    \b
    Write the embeddings (row i belongs to dataset row i; for example a frozen model's mean over tokens):
      from rl_plugins.methods.dots import save_embeddings
      from rl_plugins.runtime.fingerprint import fingerprint
      save_embeddings("embeddings.safetensors", array, fingerprint(train_dataset))

    \b
    Then:
      rl-plugins train-adapter embeddings.safetensors rates.csv adapter.safetensors
      rl-plugins trl grpo --config run.yaml --methods dots --method_params
        '{"dots": {"embeddings": "embeddings.safetensors", "adapter": "adapter.safetensors"}}'
    """
    from rl_plugins.methods import dots

    if out.suffix != ".safetensors" or out.exists():
        what = "exists already" if out.exists() else "must end in .safetensors"
        raise ConfigError(f"the adapter's file {shortened(str(out))} {what}. Give another name.")
    values = dots.checked_embeddings(dots.load_embeddings(embeddings)[0], None, f"`{embeddings.name}`")
    tables = read_rates(rates, int(values.shape[0]))
    for model, (prompts, _) in tables.items():
        if len(prompts) < 4:
            raise ConfigError(f"model {shortened(model)} has {len(prompts)} pass rates; at least 4 are needed.")
    n = sum(len(prompts) for prompts, _ in tables.values())
    typer.echo(f"{n} pass rates of {len(tables)} models, embeddings of {values.shape[1]} numbers, {epochs} epochs")
    with typer.progressbar(length=dots.steps_of(tables, epochs), label="training") as bar:
        adapter, loss = dots.train_adapter(
            values,
            tables,
            references=references,
            epochs=epochs,
            hidden=hidden,
            seed=seed,
            progress=lambda _: bar.update(1),
        )
    dots.save_adapter(out, adapter)
    typer.echo(f"binary cross-entropy of the last epoch {loss:.4f}; written: {out}")


def read_rates(path: Path, size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Model -> (prompts, pass rates), from a .csv or .jsonl file with `row`, `pass_rate` and, for several models,
    `model` in each line.

    Raises:
        ConfigError: no such file, a line without a row of the embeddings or a rate in [0, 1], or twice the same.
    """
    import torch

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
            yield from (read_json(line) for line in f if line.strip())
        else:
            raise ValueError("it must end in .csv or .jsonl")
