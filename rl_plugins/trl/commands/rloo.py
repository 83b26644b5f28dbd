"""TRL's RLOO as a baseline: its own script, whose logs get the costs that our trainer counts in every other run."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers import trainer as hf_trainer
from trl.scripts import rloo

from rl_plugins.runtime.costs import Costs


class RlooCosts(TrainerCallback):  # type: ignore[misc]
    """Adds the totals so far to every log of a step. TRL logs the mean length of the completions of a step, and every
    row is trained once."""

    def __init__(self) -> None:
        self.total = Costs()

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            rows = args.generation_batch_size
            tokens = round(rows * logs["completions/mean_length"])
            self.total += Costs(tokens_decoded=tokens, rows_made=rows, rows_trained_total=rows)
            told = self.total.logged()
            logs |= {name: told[name] for name in told if "engine" not in name and "read" not in name}


def main() -> None:
    """Trains with the arguments of the command line."""
    hf_trainer.DEFAULT_CALLBACKS.insert(0, RlooCosts)  # before the one that writes the logs
    rloo.main(*rloo.make_parser().parse_args_and_config(fail_with_unknown_args=True))
