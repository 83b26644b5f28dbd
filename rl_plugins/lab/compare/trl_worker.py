"""One run of a comparison in a process of its own: `rl-plugins trl grpo` that also writes its logs line by line."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rl_plugins.core.files import json_lines, write_text
from rl_plugins.lab.compare.plan import LOG_VARIABLE
from rl_plugins.lab.compare.runs import CHECKPOINTS
from rl_plugins.runtime.processes import end_with_command

OPTIMIZERS = ("optimizer*", "global_step*")  # the second is DeepSpeed's


def main(script: str = "rl_plugins.trl.commands.script") -> None:
    """Trains with the arguments of the command line; logs go to the file named by RL_PLUGINS_LOG_FILE.

    Args:
        script: module whose `main` trains.
    """
    end_with_command()
    file = Path(os.environ[LOG_VARIABLE])
    start = time.monotonic()
    earlier = go_on(file)
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
                        "seconds": earlier + time.monotonic() - self.start,
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


def go_on(log: Path) -> float:
    """Makes a run that was killed go on from its newest whole checkpoint, if it has one: completes the command line and
    takes the lines of later steps out of the log.

    Returns:
        Seconds of training up to there.
    """
    found = {_whole(folder): folder for folder in log.parent.glob(CHECKPOINTS)}
    step = max((n for n in found if n is not None), default=None)
    lines = [line for line in json_lines(log) if step is not None and line["step"] <= step]
    if os.environ.get("RANK", "0") == "0":
        write_text(log, "".join(json.dumps(line) + "\n" for line in lines))
    if step is None:
        return 0.0
    sys.argv += ["--resume_from_checkpoint", str(found[step]), "--eval_on_start", "False"]
    return max((float(line["seconds"]) for line in lines), default=0.0)


def _whole(checkpoint: Path) -> int | None:
    """The step of a checkpoint; None without the file that TRL writes last, which a killed process has not written, and
    without an optimizer (`save_only_model`)."""
    if not any(found for pattern in OPTIMIZERS for found in checkpoint.glob(pattern)):
        return None
    try:
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError):
        return None


if __name__ == "__main__":
    main()
