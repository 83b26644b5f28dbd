"""A run's state in a checkpoint, written and taken over again: the one way for every adapter.

An adapter writes the state into every checkpoint it makes with methods, and calls `resume` for every checkpoint it
resumes from, after `MethodStack.start`. So a checkpoint without our folder was made without methods, or has lost it;
a host whose own files say which of the two is asked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from rl_plugins.core.errors import RLPluginsError, StateError
from rl_plugins.core.method import Bundle
from rl_plugins.core.version import full_version
from rl_plugins.runtime import registry
from rl_plugins.runtime.host_files import Files, differences
from rl_plugins.runtime.stack import MethodStack, Watcher
from rl_plugins.runtime.state import FOLDER, WRITER, WRITING, load_state, other_version, save_state

logger = logging.getLogger("rl_plugins")

STEP, FILES = "step", "files"
KEEPS = "keeps state"
MOST_TOLD = 8


def save_run(
    checkpoint: str | os.PathLike[str], content: Mapping[str, Any], step: int, files: Files | None = None, **notes: Any
) -> None:
    """Writes the state of a run into a checkpoint folder.

    Args:
        content: `MethodStack.state_dict`, of now or of the last batch that was finished.
        step: the host's step that the checkpoint bears, as `resume` will be told it.
        files: the host's files in the checkpoint; None: they are not known.
        notes: what the adapter wants to find again, plain data under names of its own.

    Raises:
        StateError: a method's state is not plain data.
    """
    save_state(checkpoint, {**content, **notes, STEP: int(step), FILES: files, WRITER: full_version()})


def resume(
    stack: MethodStack,
    checkpoint: str | os.PathLike[str],
    *,
    fingerprint: str,
    step: int,
    batch: int,
    with_methods: bool | None = None,
    option: str = "",
    accept: bool = False,
) -> dict[str, Any] | None:
    """Takes over everything a resumed run needs: states of methods, waiting groups, and how far prompts were drawn.
    Either all of it, or nothing and an error.

    Args:
        stack: started.
        fingerprint: of the dataset now (`rl_plugins.runtime.fingerprint`).
        step: the host's step, as it was told to `save_run`.
        batch: generation batches the host made until then; where the checkpoint was made without methods, the count
            goes on from there.
        with_methods: whether the checkpoint was made with methods, as the host's own files say; None: they do not say.
        option: that sets `accept`, as the user writes it.
        accept: the user says that the checkpoint was changed on purpose.

    Returns:
        What was saved, notes included; None for a checkpoint made without methods.

    Raises:
        StateError: the state was lost, or it may have been and some method cannot begin without it; it is damaged, or
            of another step, dataset, version or parameters.
    """
    saved = load_state(checkpoint)
    if saved is None:
        needed = needs_state(stack)
        if with_methods or (with_methods is None and needed and not accept):
            raise StateError(_missing(checkpoint, needed, with_methods, option))
        anew = _begin_anew(stack)
        told = f"The checkpoint {checkpoint} was made without methods. Starting fresh: {anew or 'nothing'}."
        _tell(told, warn=bool(anew))
        stack.batch, stack.extra_prompts, stack.draw = batch, 0, 0
        return None
    found = saved.get(STEP)
    if type(found) is not int or found != step:
        raise StateError(
            f"The state of the methods in {checkpoint} was saved at step {found!r}, and the checkpoint is of step "
            f"{step}. It was copied from another checkpoint. Resume from a checkpoint that is as it was written, or "
            f"start a new run from its weights."
        )
    for group in saved["carried"] if isinstance(saved.get("carried"), list) else ():
        problem = _group_problem(group)
        if problem:
            raise StateError(
                f"A waiting group of the checkpoint {checkpoint} is not as this version of rl-plugins writes it: "
                f"{problem}. {other_version(saved)}"
            )
    stack.load_state_dict(saved, fingerprint)
    tell_methods(checkpoint, saved, stack)
    return saved


def tell_methods(checkpoint: str | os.PathLike[str], saved: Mapping[str, Any], stack: MethodStack) -> None:
    """One line: the methods of the checkpoint and of the run, what is loaded, what is dropped, what starts fresh. It is
    a warning where the methods are others."""
    old = saved["methods"]
    loaded: list[str] = []
    dropped: list[str] = []
    if saved["carried"]:
        owner = next((f" of `{name}`" for name in old if _lets_wait(name)), "")
        (loaded if stack.claims["admit"] else dropped).append(f"{len(saved['carried'])} waiting groups{owner}")
    for name, one in old.items():
        if one["state"]:
            parts = ", ".join(list(one["state"])[:MOST_TOLD])
            (loaded if name in stack.names else dropped).append(f"state of `{name}` ({parts})")
    writer = saved.get(WRITER, "of unknown version")
    _tell(
        f"The checkpoint {checkpoint} (step {saved.get(STEP)}, rl-plugins {writer}) was made with methods: "
        f"[{', '.join(old)}]; this run has methods: [{', '.join(stack.names)}]. "
        f"Loaded: {', '.join(loaded) or 'nothing'}. Dropped: {', '.join(dropped) or 'nothing'}. "
        f"Starting fresh: {_begin_anew(stack, old) or 'nothing'}.",
        warn=list(old) != stack.names,
    )


def _tell(line: str, warn: bool) -> None:
    if warn:
        logger.warning("%s", line)
    else:
        print(line, flush=True)  # as the table of methods is; programs show no line below a warning


def _begin_anew(stack: MethodStack, old: Collection[str] = ()) -> str:
    """Methods with a state of their own that the checkpoint does not have."""
    return ", ".join(name for name, why in needs_state(stack).items() if why == KEEPS and name not in old)


def _lets_wait(name: str) -> bool:
    try:
        found = registry.load(name)
    except RLPluginsError:  # of a package that is gone
        return False
    return not isinstance(found, Bundle) and "admit" in found.claims()


def check_files(
    checkpoint: str | os.PathLike[str],
    saved: Mapping[str, Any],
    found: Files,
    read: str,
    seed: int,
    option: str,
    accept: bool,
    further: Sequence[str] = (),
) -> None:
    """Refuses a checkpoint whose files are not those of its save, or whose run had another seed.

    Args:
        saved: content of the state.
        found: the host's files that are there.
        read: see `host_files.differences`.
        seed: of this run.
        option: that sets `accept`, as the user writes it.
        accept: say it in a warning and go on.
        further: what else is not as it was saved.

    Raises:
        StateError: with everything that differs.
    """
    problems = list(further)
    if saved.get(FILES) is None:
        logger.warning("The checkpoint %s has no checksums of the host's files, so they are not checked.", checkpoint)
    else:
        problems = differences(saved[FILES], found, read) + problems
    if saved.get("seed", seed) != seed:
        problems.append(
            f"it was made with seed {saved['seed']}, and this run has seed {seed} (set it to {saved['seed']})"
        )
    if not problems:
        return
    told = "; ".join(problems[:MOST_TOLD]) + (f"; and {n} more" if (n := len(problems) - MOST_TOLD) > 0 else "")
    if accept:
        logger.warning("The checkpoint %s is not as it was saved: %s. It is resumed (%s).", checkpoint, told, option)
        return
    raise StateError(
        f"The checkpoint {checkpoint} is not as it was saved: {told}. Put back what was saved, or resume from another "
        f"checkpoint. If you changed it on purpose, set {option}. Nothing was trained or overwritten."
    )


def needs_state(stack: MethodStack) -> dict[str, str]:
    """Method -> why it would make another run without its state of a checkpoint."""
    reasons = {}
    for m in stack.methods:
        claims = () if isinstance(m, Watcher) else m.claims()
        if m._state or "observe" in claims:
            reasons[m.name] = KEEPS
        elif "admit" in claims:
            reasons[m.name] = "lets groups wait"
        elif "select_prompts" in claims or "plan" in claims:
            reasons[m.name] = "decides which prompts come next"
        elif m.rows_per_rollout > 1:
            reasons[m.name] = "draws its own prompts"
    return reasons


def _missing(
    checkpoint: str | os.PathLike[str], needed: Mapping[str, str], with_methods: bool | None, option: str
) -> str:
    """The message for a checkpoint without state."""
    left = os.path.join(checkpoint, WRITING)
    cut_off = f" (an interrupted save left {left}, which is not whole)" if os.path.exists(left) else ""
    then = "To go on from its weights, start a new run with that checkpoint as the model."
    if with_methods:
        return (
            f"The checkpoint {checkpoint} was made with methods, and its folder `{FOLDER}`, which holds their state, "
            f"was lost{cut_off}. Put it back, or resume from another checkpoint. {then}"
        )
    origin = (
        f"Its folder `{FOLDER}` was lost{cut_off}, or the checkpoint was made without methods"
        f"{f': if it was, set {option}' if option else ''}."
    )
    return (
        f"The checkpoint {checkpoint} holds no state of methods, and {', '.join(needed)} cannot resume without theirs "
        f"({', '.join(f'`{name}` {why}' for name, why in needed.items())}). {origin} {then}"
    )


_OF_ROW: dict[str, Any] = {
    "prompt_index": int,
    "group": int,
    "n": int,
    "spare": int,
    "redundant": int,
    "edit": (dict, type(None)),
    "prefix": list,
    "max_tokens": (int, type(None)),
    "payload": object,
}
_OF_EARLIER = {"redundant": 0}  # what rows of earlier versions lack
_OF_ROLLOUT = {
    "prompt": torch.int64,
    "tokens": torch.int64,
    "kinds": torch.int8,
    "logprobs": torch.float64,
    "versions": torch.int64,
}


def _group_problem(group: Any) -> str | None:
    """What is wrong with a group as `carry_over.to_plain` makes it."""
    if not isinstance(group, dict) or set(group) != {"row", "drawn", "rollouts"}:
        return "its fields are others"
    row, rollouts = group["row"], group["rollouts"]
    if not isinstance(row, dict) or set(row := {**_OF_EARLIER, **row}) != {*_OF_ROW}:
        return "the fields of `row` are others"
    if not isinstance(rollouts, list) or type(group["drawn"]) is not int:
        return "`rollouts` or `drawn` has another type"
    for name, kinds in _OF_ROW.items():
        if not isinstance(row[name], kinds) or (isinstance(row[name], bool) and kinds is not object):
            return f"`row.{name}` is {row[name]!r}"
    if not all(type(t) is int for t in row["prefix"]):
        return "`row.prefix` is not of token ids"
    for one in rollouts:
        if not isinstance(one, dict) or {*one, "meta"} != {*_OF_ROLLOUT, "finish", "meta"}:
            return "the fields of a rollout are others"
        if not isinstance(one["finish"], str) or not isinstance(one.get("meta", {}), dict):
            return "`finish` or `meta` of a rollout has another type"
        for name, dtype in _OF_ROLLOUT.items():
            value = one[name]
            if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.dim() != 1:
                return f"`{name}` of a rollout has another type"
        if len({len(one[name]) for name in ("tokens", "kinds", "logprobs", "versions")}) > 1:
            return "a rollout has not one kind, log-prob and version per token"
    return None
