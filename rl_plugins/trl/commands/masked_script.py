"""`rl-plugins trl masked_grpo`: TRL's script of GRPO with the trainer of masked diffusion language models.

Under any other launcher: `accelerate launch -m rl_plugins.trl.commands.masked_script --config run.yaml`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl_plugins.trl.commands.script import MASKED_GRPO, main_of, run_script
from rl_plugins.trl.masked.trainer import MaskedGRPOTrainer


def run(argv: Sequence[str]) -> None:
    """Trains in this process, one of those a launcher has started.

    Raises:
        ConfigError: see `rl_plugins.trl.commands.script.run_script`.
    """
    run_script(MASKED_GRPO, argv, lambda args, model: {"GRPOTrainer": MaskedGRPOTrainer})


def main() -> None:
    """The script of `rl-plugins trl masked_grpo`."""
    main_of(run)


if __name__ == "__main__":
    main()
