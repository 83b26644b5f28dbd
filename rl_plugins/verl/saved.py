"""Which checkpoint verl would resume from, and what a run without methods leaves in one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import StateError, shown
from rl_plugins.runtime.costs import NOTE, Costs
from rl_plugins.runtime.host_files import checksums, shares, sizes
from rl_plugins.runtime.resume import FILES, check_files, tell_methods
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state, save_state

TRACKER = "latest_checkpointed_iteration.txt"  # verl's last act of a save
ACCEPT = "+rl_plugins.accept_changed_checkpoint=true"
LOADED = r"(actor|critic)/[^/]+\.pt|data\.pt|transfer_queue/.+"  # files that verl reads if they are there
COUNTED = "rl_plugins_costs"  # folder in a checkpoint, with the costs that a run without methods counted


def check_tracker(config: Any) -> None:
    """Refuses a tracker file from which verl could not resume, or with which it would silently begin again.

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
        f"{tracker} {problem}. {there} Write the step to resume from into the file, or start again with "
        f"trainer.resume_mode=disable. Nothing was trained or overwritten."
    )


def host_files(checkpoint: str, workers: Sequence[Any]) -> dict[str, list[int | str]]:
    """verl's files in a checkpoint with their checksums, read by this process and the workers together: the shards of a
    worker may be on the disk of its node.

    Args:
        workers: handles of Ray actors.
    """
    from rl_plugins.verl.processes import ask

    seen = [_seen(None, checkpoint), *ask(workers, _seen, checkpoint)]
    of = dict(zip((place for place, _ in seen), shares([found for _, found in seen]), strict=True))
    parts = [*ask(workers, _checksums, checkpoint, of), _checksums(None, checkpoint, of)]
    return {name: found for part in parts for name, found in part.items()}


def _place() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _seen(worker: Any, folder: str) -> tuple[str, dict[str, int]]:
    """Runs in a process: which it is, and the files it sees."""
    return _place(), sizes(folder, (COUNTED,))


def _checksums(worker: Any, folder: str, of: Mapping[str, Sequence[str]]) -> dict[str, list[int | str]]:
    """Runs in a process: the checksums of its share."""
    return checksums(folder, of[_place()])


def check_saved(checkpoint: str, workers: Sequence[Any], methods: MethodStack, seed: int, accept: bool) -> None:
    """Compares a checkpoint that was made with methods with its save; in a run without methods, says what is dropped.

    Raises:
        StateError: it was changed.
    """
    saved = load_state(checkpoint)
    if saved is None:
        return
    if not methods:
        tell_methods(checkpoint, saved, methods)
    found = host_files(checkpoint, workers) if saved.get(FILES) else {}
    check_files(checkpoint, saved, found, LOADED, seed, ACCEPT, accept)


def save_costs(checkpoint: str, costs: Costs) -> None:
    """Writes what a run without methods has cost into a checkpoint folder. It is no state of methods, which has a
    folder of its own."""
    save_state(Path(checkpoint) / COUNTED, {NOTE: costs.plain()})


def saved_costs(checkpoint: str) -> Mapping[str, Any] | None:
    """What `save_costs` wrote; None if the run did not count.

    Raises:
        StateError: it is damaged.
    """
    return load_state(Path(checkpoint) / COUNTED)
