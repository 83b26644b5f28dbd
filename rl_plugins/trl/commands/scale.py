"""`rl-plugins scale` for TRL: larger generation batches, the same optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.config_text import read_yaml
from rl_plugins.runtime.scaling import Scaled, Setting, check_divisible
from rl_plugins.trl.capabilities import optimizer_steps_per_batch
from rl_plugins.trl.commands import script
from rl_plugins.trl.commands.doctor import planned_config
from rl_plugins.trl.config import GRPOConfig

KEPT = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "num_iterations",
    "learning_rate",
    "epsilon",
    "max_grad_norm",
)


def scaled(config: Path, by: int, world_size: int | None) -> Scaled:
    """What a config of `trl grpo` needs for `by` times the rows per generation batch.

    Optimizer steps keep their size, so everything that TRL counts in optimizer steps (`max_steps`, schedules,
    intervals) still counts the same samples.

    Args:
        world_size: processes, if not those that `accelerate launch` would start.

    Raises:
        ConfigError: TRL refuses the config, or the larger batch is no whole number of optimizer steps.
    """
    a, processes = read(config, world_size)
    given = read_yaml(config)
    rows, step_rows = a.generation_batch_size, a.per_device_train_batch_size * processes * a.gradient_accumulation_steps
    kept = {name: getattr(a, name) for name in KEPT}
    if by == 1:
        return Scaled((), kept, f"A generation batch has {rows} rows, as before.", ())
    check_divisible(
        rows,
        step_rows,
        by,
        f"A generation batch has {rows} rows and an optimizer step {step_rows} (per_device_train_batch_size x "
        f"{processes} processes x gradient_accumulation_steps)",
    )
    settings: tuple[Setting, ...]
    if given.get("generation_batch_size") is not None:
        settings = (Setting("generation_batch_size", rows, rows * by, "rows per generation batch, all processes"),)
    else:
        per_batch = a.steps_per_generation
        why = "micro-batches per generation batch"
        why += "" if given.get("steps_per_generation") else "; TRL's default is gradient_accumulation_steps"
        settings = (Setting("steps_per_generation", given.get("steps_per_generation"), per_batch * by, why),)
    before = optimizer_steps_per_batch(a)
    after = before * by
    if a.max_steps > 0 and a.max_steps % after:
        steps = int(math.ceil(a.max_steps / after) * after)
        why = f"whole generation batches of {after:g} optimizer steps, rounded up"
        settings += (Setting("max_steps", a.max_steps, steps, why),)
    batch = (
        f"A generation batch has {rows * by} rows (before: {rows}) and takes {after:g} optimizer steps "
        f"(before: {before:g}) of {step_rows} rows each."
    )
    return Scaled(settings, kept, batch, tuple(_notes(a, by, before)))


def check(old: Path, new: Path, by: int, world_size: int | None) -> None:
    """Raises ConfigError if TRL does not read the new config as the old one with `by` times the rows per batch."""
    (a, _), (b, _) = read(old, world_size), read(new, world_size)
    other = [name for name in KEPT if getattr(a, name) != getattr(b, name)]
    if other or b.generation_batch_size != by * a.generation_batch_size:
        what = ", ".join(other) or f"generation_batch_size={b.generation_batch_size}"
        raise ConfigError(f"The new config differs in {what}. Write steps_per_generation out in the config by hand.")


def read(config: Path, world_size: int | None) -> tuple[GRPOConfig, int]:
    """The training arguments, and the number of processes.

    Raises:
        ConfigError: neither `trl grpo` nor `accelerate launch` knows a key, or TRL refuses a value.
    """
    arguments = script.sort_arguments(["--config", str(config)])
    processes = world_size or script.planned_launch(arguments).processes
    try:  # bf16 is of no interest here, and this machine may not have it
        args = script.parse([*arguments.script, "--bf16", "False"], planned_config(processes))[1]
    except (ValueError, TypeError) as e:
        raise ConfigError(f"TRL refuses the config {config}: {e}") from None
    return args, processes


def _notes(a: GRPOConfig, by: int, before: float) -> Iterator[str]:
    yield (
        "max_steps, warm-up, schedule, save_steps, eval_steps and logging_steps count optimizer steps, and an "
        "optimizer step has as many rows as before: they count the same samples and are not changed."
    )
    if before <= 1:
        yield (
            "The ratio to the old policy is no longer 1 after the first optimizer step of a batch, so clipping acts, "
            "and TRL makes one more forward pass per batch for old log-probs."
        )
    prompts = a.generation_batch_size // a.num_generations
    yield (
        f"A batch takes {prompts * by} prompts (before: {prompts}); TRL leaves out the last prompts of an epoch that "
        f"fill no batch, and needs a dataset of at least one batch."
    )
    if a.methods:
        yield (
            f"Parameters of {', '.join(a.methods)} are not changed. Those that count batches count {by} times the "
            f"samples now: `rl-plugins info METHOD`."
        )
