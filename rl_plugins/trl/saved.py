"""TRL's checkpoints from outside: which are whole, which were made with methods, and where in the dataset they are."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rl_plugins.core.errors import StateError
from rl_plugins.runtime.costs import NOTE, Costs
from rl_plugins.runtime.state import FOLDER

logger = logging.getLogger("rl_plugins")

COUNTED = "rl_plugins_costs"  # name of the costs that a run without methods notes in TRL's own state

_NUMBERED = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


def resume_from(output_dir: str, wanted: str | os.PathLike[str] | bool | None, ranks: int) -> str | None:
    """The checkpoint to resume from: `wanted`, or for True the newest whole one. TRL itself takes the newest folder,
    also one that a killed run left unfinished.

    Args:
        output_dir: of the run.
        wanted: as given to `train`.
        ranks: processes of this run.

    Returns:
        A folder; None where none is wanted, or there is none: TRL refuses that.

    Raises:
        StateError: a checkpoint that is named is unfinished, or all are.
    """
    if not wanted:
        return None
    numbers = {int(m[1]): f for f in _folders(output_dir) if (m := _NUMBERED.match(f.name))}
    found = [numbers[n] for n in sorted(numbers, reverse=True)]
    problems: dict[str, str] = {}  # of those that are newer than the newest whole one
    whole = None
    for folder in found:
        problem = unfinished(folder, ranks)
        if problem is None:
            whole = folder
            break
        problems[folder.name] = problem
    newest = f"The newest whole checkpoint is {whole}." if whole else f"{output_dir} has no whole checkpoint."
    if wanted is not True:
        named = os.fspath(wanted)
        problem = unfinished(Path(named), ranks)
        if problem:
            raise StateError(f"The checkpoint {named} is unfinished: {problem}. {newest} Nothing was trained.")
        return named
    if not found:
        return None
    said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    if whole is None:
        raise StateError(
            f"No checkpoint in {output_dir} is whole, so nothing can be resumed ({said}). The run was stopped while it "
            f"saved. Start it again without resume_from_checkpoint. Nothing was trained or overwritten."
        )
    if problems:
        logger.warning("Resuming from %s. Skipped, because a save was cut off: %s.", whole, said)
    return str(whole)


def unfinished(checkpoint: Path, ranks: int) -> str | None:
    """Why a checkpoint is not whole; None if it is. TRL writes `trainer_state.json` last."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        step = state["global_step"]
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE_NAME}, which is written last"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"its {TRAINER_STATE_NAME} cannot be read ({type(e).__name__})"
    number = _NUMBERED.match(checkpoint.name)
    if number and step != int(number[1]):
        return f"its {TRAINER_STATE_NAME} is of step {step}"
    if (checkpoint / "rng_state_0.pth").exists():  # each rank writes its own, and rank 0 does not wait for it
        missing = [r for r in range(ranks) if not (checkpoint / f"rng_state_{r}.pth").exists()]
        if missing:
            return f"it has no rng_state_{missing[0]}.pth"
    return None


def begin(checkpoint: Path) -> None:
    """A checkpoint that is written once more is unfinished until its last file is there again."""
    (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)


def mark(state: Any) -> None:
    """Notes in TRL's own state, which it saves, that the checkpoint of this step is made with methods."""
    state.stateful_callbacks[FOLDER] = {"args": {}, "attributes": {"step": state.global_step}}


def is_marked(state: Any) -> bool:
    """Whether the checkpoint of this state was made with methods. A later one of a run without methods was not: the
    note it carries on is of another step."""
    note = state.stateful_callbacks.get(FOLDER)
    return isinstance(note, dict) and note.get("attributes") == {"step": state.global_step}


def note_costs(state: Any, costs: Costs) -> None:
    """Notes in TRL's own state, which it saves, what a run without methods has cost at this step."""
    attributes = {"step": state.global_step, NOTE: costs.plain()}
    state.stateful_callbacks[COUNTED] = {"args": {}, "attributes": attributes}


def noted_costs(state: Any) -> Mapping[str, Any] | None:
    """What `note_costs` noted at the step of this state; None if the run did not count then."""
    note = state.stateful_callbacks.get(COUNTED)
    found = note.get("attributes") if isinstance(note, dict) else None
    return found if isinstance(found, dict) and found.get("step") == state.global_step else None


class CostsCallback(TrainerCallback):
    """A run without methods that counts its costs: the totals go on from the checkpoint it resumes from."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            noted = noted_costs(state)
            if noted is None:
                logger.warning("The checkpoint of step %d has no costs, so they count from 0.", state.global_step)
            self.trainer.costs = Costs.of_checkpoint(noted)


def skip_passes(loader: Any, passes: int, finished: bool) -> None:
    """Brings the sampler of a new dataloader where it was after so many passes over the dataset.

    TRL's sampler draws each pass from a generator of its own, which nobody saves, and the host begins every resume with
    a new one: without this, a resume in a later pass has the order of the first.

    Args:
        loader: for training.
        passes: over the dataset, that are over.
        finished: the run is at its end, and gets no rows: the host looks at its limit after a step only, and would
            make one step too many.
    """
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # those that share a batch among ranks
        batches = batches.batch_sampler
    if finished:
        batches.sampler = ()
    elif hasattr(batches.sampler, "set_epoch"):  # upstream seam (patches/trl/T11)
        batches.sampler.set_epoch(passes)
    else:
        for _ in range(passes):
            next(iter(batches.sampler), None)  # a pass is drawn when its first row is asked for


def _folders(path: str) -> list[Path]:
    return [f for f in Path(path).iterdir() if f.is_dir()] if os.path.isdir(path) else []
