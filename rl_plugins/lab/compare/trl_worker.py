"""One run of a comparison in a process of its own: `rl-plugins trl grpo` that also writes its logs line by line."""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from rl_plugins.lab.compare.plan import LOG_VARIABLE
from rl_plugins.runtime.processes import end_with_command


def main(script: str = "rl_plugins.trl.commands.script") -> None:
    """Trains with the arguments of the command line; logs go to the file named by RL_PLUGINS_LOG_FILE.

    Args:
        script: module whose `main` trains.
    """
    end_with_command()
    file = Path(os.environ[LOG_VARIABLE])
    start = time.monotonic()
    from transformers import TrainerCallback
    from transformers import trainer as hf_trainer

    class LogLines(TrainerCallback):  # type: ignore[misc]
        """Every log of the trainer as a line of JSON, with the step and the seconds since the training began."""

        def _write(self, state: Any, **values: Any) -> None:
            if state.is_world_process_zero:
                with file.open("a") as f:
                    line = {
                        "step": state.global_step,
                        "max_steps": state.max_steps,
                        "seconds": time.monotonic() - self.start,
                        **values,
                    }
                    f.write(json.dumps(line, default=float) + "\n")

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.monotonic()
            self._write(state, started=self.start - start)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self._write(state, **(logs or {}))

    hf_trainer.DEFAULT_CALLBACKS.append(LogLines)
    importlib.import_module(script).main()


if __name__ == "__main__":
    main()
