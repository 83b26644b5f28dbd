"""Options that several commands have."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer

from rl_plugins.core.errors import ConfigError

# Of every `typer.Typer`.
LOOK: dict[str, Any] = {"rich_markup_mode": None, "no_args_is_help": True, "add_completion": False}


class HostName(enum.StrEnum):
    """Where a run is trained."""

    trl = "trl"
    verl = "verl"


class CostUnit(enum.StrEnum):
    """In what a budget is counted: those of `rl_plugins.lab.compare.costs`."""

    steps = "steps"
    rows_trained = "rows_trained"
    tokens_decoded = "tokens_decoded"
    engine_seconds = "engine_seconds"
    model_passes = "model_passes"


OfRun = Annotated[HostName, typer.Option("--host", help="Host of the run.")]
TrainedIn = Annotated[HostName, typer.Option("--host", help="Host whose trainer runs.")]
Baseline = Annotated[str, typer.Option("--vs", help="Baseline; grpo is the host without methods.")]
Budget = Annotated[CostUnit, typer.Option("--budget", help="Cost unit in which all variants get the same budget.")]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, help="Runs at a time; with --host verl always 1.", show_default=False),
]
MethodParams = Annotated[
    str | None, typer.Option("--method-params", "--method_params", help="Parameters of the methods as JSON.")
]
WorldSize = Annotated[
    int | None,
    typer.Option("--world-size", "--world_size", min=1, help="Number of processes, if not those of this machine."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")]


def parse_seeds(text: str) -> list[int]:
    """ "3" is the seeds 0, 1, 2; "4,7" are these two."""
    try:
        seeds = [int(s) for s in text.split(",")] if "," in text else list(range(int(text)))
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds is {text!r}; give a number of seeds (3) or different seeds (4,7,11).")
    return seeds


def one_job(jobs: int | None) -> None:
    """Raises:
    ConfigError: --jobs of runs of verl.
    """
    if jobs not in (None, 1):
        raise ConfigError(f"--jobs {jobs} is given; runs of verl go one at a time. Leave --jobs out.")
