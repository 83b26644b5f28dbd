"""A run of `rl-plugins trl grpo` as its config describes it, with its reward functions: no model, no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import Run
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.trl import capabilities
from rl_plugins.trl.commands import script
from rl_plugins.trl.commands.doctor import Findings, dataset_of, planned_config, reward_names_of
from rl_plugins.trl.generation.rewards import functions_of_config, with_functions


@dataclass(frozen=True)
class OfflineRun:
    """What a config says.

    Args:
        known: the run, as a dry run knows it.
        rewards: a model's name and functions, as TRL's script orders them.
        model: TRL's options of the model.
    """

    known: capabilities.KnownRun
    rewards: Sequence[Any]
    model: Any

    @classmethod
    def of(cls, argv: Sequence[str]) -> OfflineRun:
        """
        Args:
            argv: arguments of `rl-plugins trl grpo`.

        Raises:
            ConfigError: an argument, the dataset or a reward function that cannot be had.
        """
        arguments = script.sort_arguments(argv)
        on_any_machine = [*arguments.script, "--bf16", "False"]
        script_args, args, model, dataset_args = script.parse(on_any_machine, config=planned_config(1))
        found = Findings()
        dataset, streaming = dataset_of(args, script_args, dataset_args, found)
        if dataset is None:
            why = [*found.problems, *found.notes] or ["The dataset is a stream."] * streaming
            raise ConfigError(f"{' '.join(why)} Here only the rows of a dataset on this machine are read.")
        rewards = functions_of_config(script_args.reward_model_name_or_path, script_args.reward_funcs or ())
        return cls(capabilities.KnownRun(args, dataset, len(dataset), reward_names_of(script_args)), rewards, model)

    @property
    def run(self) -> Run:
        """What methods would be told of the run in `start`, apart from the tokenizer."""
        run = replace(capabilities.run_of(self.known), fingerprint=fingerprint(self.known.dataset))
        return with_functions(run, self.rewards, self.known.args.reward_weights)


def run_of_config(argv: Sequence[str]) -> Run:
    """`OfflineRun.run` of arguments of `rl-plugins trl grpo`."""
    return OfflineRun.of(argv).run
