"""TRL's checkpoints from outside: which are whole, which were made with methods, and where in the dataset they are."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from rl_plugins.core.errors import StateError
from rl_plugins.runtime.costs import NOTE, Costs
from rl_plugins.runtime.host_files import of_ranks
from rl_plugins.runtime.ranks import on_driver
from rl_plugins.runtime.resume import FILES, check_files, tell_methods
from rl_plugins.runtime.state import FOLDER, load_state

logger = logging.getLogger("rl_plugins")

COUNTED = "rl_plugins_costs"  # name of the costs that a run without methods notes in TRL's own state
OF_TRAINER, ALONE = "trainer_state", "save_only_model"  # of our state: a checksum; whether only the model was saved
PROCESSES, PROMPTS = "processes", "prompts per optimizer step"  # in our note in TRL's state
ACCEPT = "accept_changed_checkpoint=True"
# Files that the Trainer loads if they are there.
LOADED = r"[^/]+\.(safetensors|bin|pt|pth|index\.json)|[^/]+/adapter_model\.(safetensors|bin)|.*\.distcp"

_NUMBERED = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


def wanted_of(given: str | bool | None) -> str | bool | None:
    """`resume_from_checkpoint`, also as a command line gives it."""
    return given.lower() == "true" if isinstance(given, str) and given.lower() in ("true", "false") else given


def resume_from(trainer: Any, wanted: Any) -> str | None:
    """The checkpoint to resume from: `wanted`, or for True the newest whole one. TRL itself takes the newest folder,
    also one that a killed run left unfinished; so does a run without methods.

    Args:
        wanted: as given to `train`.

    Returns:
        A folder; None where there is none: TRL refuses that.

    Raises:
        StateError: a checkpoint that is named is not there or is unfinished, or all are.
    """
    output_dir, ranks = trainer.args.output_dir, trainer.accelerator.num_processes
    if not trainer.methods:
        return get_last_checkpoint(output_dir) if wanted is True else os.fspath(wanted)
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
    again = "start again without resume_from_checkpoint"
    way = (
        f"Resume from {whole}, the newest whole one, or {again}."
        if whole
        else f"{output_dir} has no whole one: {again}."
    )
    if wanted is not True:
        named = os.fspath(wanted)
        if not os.path.isdir(named):
            raise StateError(f"There is no checkpoint {named}. {way} Nothing was trained.")
        problem = unfinished(Path(named), ranks)
        if problem:
            raise StateError(f"The checkpoint {named} is unfinished: {problem}. {way} Nothing was trained.")
        return named
    if not found:
        return None
    said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    if whole is None:
        raise StateError(
            f"No checkpoint in {output_dir} is whole, so nothing can be resumed ({said}). The run was stopped while it "
            f"saved. To begin anew, {again}. Nothing was trained or overwritten."
        )
    if problems:
        logger.warning("Resuming from %s. Skipped, because a save was cut off: %s.", whole, said)
    return str(whole)


def unfinished(checkpoint: Path, ranks: int) -> str | None:
    """Why a checkpoint is not whole; None if it is. TRL writes `trainer_state.json` last."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        step = state["global_step"]
        ranks = _note(state.get("stateful_callbacks") or {}, step).get(PROCESSES, ranks)
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE_NAME}, which is written last"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"its {TRAINER_STATE_NAME} cannot be read ({type(e).__name__})"
    number = _NUMBERED.match(checkpoint.name)
    if number and step != int(number[1]):
        return f"its {TRAINER_STATE_NAME} is of step {step}"
    if (checkpoint / "rng_state_0.pth").exists():  # each rank writes its own, and rank 0 does not wait for it
        missing = [r for r in range(ranks) if not (checkpoint / f"rng_state_{r}.pth").exists()]
        if missing:
            return f"it has no rng_state_{missing[0]}.pth"
    return None


def files_of(trainer: Any, checkpoint: str) -> dict[str, Any]:
    """The host's files in a checkpoint that are written before the last one, read by all ranks together."""
    return of_ranks(trainer.accelerator, checkpoint, (TRAINER_STATE_NAME,))


def state_checksum(values: Mapping[str, Any]) -> str:
    """Of the file that TRL writes last, before it is written: of all that is known then."""
    kept = {k: v for k, v in values.items() if k not in ("stateful_callbacks", "best_model_checkpoint")}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True).encode()))


def check_saved(trainer: Any, checkpoint: str) -> None:
    """Compares a checkpoint that was made with methods with its save, before anything of it is loaded, on every rank;
    in a run without methods, says what is dropped.

    Raises:
        StateError: it was changed.
    """
    t = trainer

    def read() -> dict[str, Any] | None:
        saved = load_state(checkpoint)
        if saved is not None and not t.methods:
            if not is_marked(TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))):
                return None  # a run without methods has written it since
            tell_methods(checkpoint, saved, t.methods)
        return saved and {name: saved.get(name) for name in (FILES, "seed", OF_TRAINER, ALONE) if name in saved}

    saved = on_driver(t.accelerator, read)
    if saved is None:
        return
    found = files_of(t, checkpoint) if saved.get(FILES) else {}

    def check() -> None:
        further = []
        if OF_TRAINER in saved:
            try:
                values = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_bytes())
            except (OSError, ValueError):
                values = {}
            if state_checksum(values) != saved[OF_TRAINER]:
                further.append(f"{TRAINER_STATE_NAME} has another content")
        accept = bool(getattr(t.args, "accept_changed_checkpoint", False))
        check_files(checkpoint, saved, found, LOADED, t.args.seed, ACCEPT, accept, further)
        if saved.get(ALONE):
            logger.warning(
                "The checkpoint %s was saved with save_only_model: the optimizer, its schedule and the random numbers "
                "of the host start fresh.",
                checkpoint,
            )

    on_driver(t.accelerator, check)


def begin(checkpoint: Path) -> None:
    """A checkpoint that is written once more is unfinished until its last file is there again."""
    (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)


def mark(state: Any, sizes: Mapping[str, float]) -> None:
    """Notes in TRL's own state, which it saves, that the checkpoint of this step is made with methods, and `sizes_of`
    the run."""
    state.stateful_callbacks[FOLDER] = {"args": {}, "attributes": {"step": state.global_step, **sizes}}


def is_marked(state: Any) -> bool:
    """Whether the checkpoint of this state was made with methods. A later one of a run without methods was not: the
    note it carries on is of another step."""
    return bool(_note(state.stateful_callbacks, state.global_step))


def _note(callbacks: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """What `mark` noted at this step; nothing if it did not."""
    note = callbacks.get(FOLDER)
    found = note.get("attributes") if isinstance(note, dict) else None
    return found if isinstance(found, dict) and found.get("step") == step else {}


def sizes_of(trainer: Any) -> dict[str, float]:
    """What decides how the host goes on from a checkpoint."""
    a = trainer.args
    batch = a.generation_batch_size / a.num_generations / (a.steps_per_generation * trainer.num_iterations)
    return {PROCESSES: trainer.accelerator.num_processes, PROMPTS: batch * a.gradient_accumulation_steps}


def tell_sizes(checkpoint: str, state: Any, sizes: Mapping[str, float]) -> None:
    """One warning where a resume does not go on as the run would have, because it has other `sizes_of`. The methods
    decide in one process, from random numbers that depend on none of them."""
    saved = {**sizes, **_note(state.stateful_callbacks, state.global_step)}
    changes = {PROCESSES: "the random numbers of the host start anew", PROMPTS: "it goes on elsewhere in the dataset"}
    told = [
        f"it was made with {saved[name]:g} {name}, and this run has {sizes[name]:g}: {change}"
        for name, change in changes.items()
        if saved[name] != sizes[name]
    ]
    if told:
        logger.warning("The checkpoint %s: %s.", checkpoint, "; ".join(told))


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
