"""Which checkpoint verl would resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_plugins.errors import StateError, shown

TRACKER = "latest_checkpointed_iteration.txt"  # verl's last act of a save


def check_tracker(config: Any) -> None:
    """Refuses a tracker file from which verl could not resume, or beside which it would silently begin again.

    verl writes the file in place, so a kill can leave it empty.

    Raises:
        StateError: it is no number, or names a checkpoint that does not exist.
    """
    from omegaconf import OmegaConf

    folder = OmegaConf.select(config, "trainer.default_local_dir")
    if OmegaConf.select(config, "trainer.resume_mode") != "auto" or not folder:
        return
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return
    text = tracker.read_text(errors="replace")
    try:
        step = int(text)
    except ValueError:
        problem = f"holds {shown(text, 40)} in place of a step: a save was cut off"
    else:
        if (tracker.parent / f"global_step_{step}").exists():
            return
        problem = f"names step {step}, and there is no global_step_{step}"
    whole = sorted(int(f.parent.name.rsplit("_", 1)[1]) for f in tracker.parent.glob("global_step_*/data.pt"))
    there = f"Checkpoints with everything verl writes before that file: {', '.join(map(str, whole[-5:])) or 'none'}."
    raise StateError(
        f"{tracker} {problem}. {there} Write the step to resume from into the file, or start anew with "
        f"trainer.resume_mode=disable. Nothing was trained or overwritten."
    )
