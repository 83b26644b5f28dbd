"""A run of verl as its command line describes it, with its reward function: no model, no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import Run
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.verl.capabilities import Known, Reader
from rl_plugins.verl.config import Settings, compose, read_settings
from rl_plugins.verl.doctor import ParquetRows, read_command
from rl_plugins.verl.host_config import refuse_old_keys
from rl_plugins.verl.rewards import with_reward_functions


def run_of_words(words: Sequence[str]) -> Run:
    """What methods would be told of the run in `start`, apart from the tokenizer.

    Args:
        words: overrides of `python -m verl.trainer.main_ppo`, or the whole command.

    Raises:
        ConfigError: an override, the data or the reward function that cannot be had.
    """
    return run_of(compose(read_command(words)))


def run_of(config: Any) -> Run:
    """As `run_of_words`, of the whole config."""
    settings, read = read_settings(config) or Settings(()), Reader(config)
    refuse_old_keys(read)
    files = read("data.train_files")
    paths = [Path(str(f)).expanduser() for f in ([files] if isinstance(files, str) else files or ())]
    if not paths or not all(p.suffix == ".parquet" and p.is_file() for p in paths):
        raise ConfigError(
            f"data.train_files={', '.join(map(str, paths)) or 'null'} is given. Here only parquet files on this "
            f"machine are read."
        )
    rows = ParquetRows(paths, read("data.prompt_key", "prompt"))
    most = read("data.train_max_samples", -1)
    run = Known(read, settings, rows, min(len(rows), most) if most > 0 else len(rows), 1).run()
    run = replace(run, fingerprint=fingerprint(rows))
    return with_reward_functions(run, read, settings.rewards)
