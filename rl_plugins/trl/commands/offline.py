"""A run of `rl-plugins trl grpo` as its config describes it, with its reward functions: no model, no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import Run
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.trl import capabilities
from rl_plugins.trl.commands import script
from rl_plugins.trl.commands.doctor import Findings, dataset_of, planned_config, reward_names_of
from rl_plugins.trl.generation.rewards import functions_of_config, with_functions


def run_of_config(argv: Sequence[str]) -> Run:
    """What methods would be told of the run in `start`, apart from the tokenizer.

    Args:
        argv: arguments of `rl-plugins trl grpo`.

    Raises:
        ConfigError: an argument, the dataset or a reward function that cannot be had.
    """
    arguments = script.sort_arguments(argv)
    on_any_machine = [*arguments.script, "--bf16", "False"]
    script_args, args, _, dataset_args = script.parse(on_any_machine, config=planned_config(1))
    found = Findings()
    dataset, streaming = dataset_of(args, script_args, dataset_args, found)
    if dataset is None:
        why = [*found.problems, *found.notes] or ["The dataset is a stream."] * streaming
        raise ConfigError(f"{' '.join(why)} An audit reads the rows of a dataset on this machine.")
    functions: list[Any] = functions_of_config(script_args.reward_model_name_or_path, script_args.reward_funcs or ())
    known = capabilities.KnownRun(args, dataset, len(dataset), reward_names_of(script_args))
    run = replace(capabilities.run_of(known), fingerprint=fingerprint(dataset))
    return with_functions(run, functions, args.reward_weights)
