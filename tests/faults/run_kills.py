"""Whole runs of TRL's trainer with methods, killed with SIGKILL again and again, in the midst of saves above all, and
resumed until they are at their end: weights, logged numbers and the state of the methods are those of a run that
nobody killed.

    python tests/faults/run_kills.py --kills 100 --seed 1
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS), str(TESTS / "hosts" / "trl")]

import clean_processes
import torch
from damage import plain
from harness import make, policy, weights
from swarm_packages import fill
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from rl_plugins.core.errors import StateError
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.trl.saved import unfinished

HANGS = 300.0  # seconds; only a process that does not do what it should gets there
STEPS = 7  # three a pass over the dataset
RUNS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "vade, mc_grpo": (["vade", "mc_grpo"], {"save_steps": 2}),
    "grpo_roc": (["grpo_roc"], {}),
    "v0_5": (["v0_5"], {}),
    "swarm_sapo": (["swarm_sapo"], {}),
    "ps_grpo": (["ps_grpo"], {}),  # an epoch of five batches
    "april": (["april"], {"method_params": {"april": {"over_sampling": 1.5}}, "max_completion_length": 12}),
    "vade, two iterations": (
        ["vade"],
        {"num_iterations": 2, "max_steps": 8},
    ),  # its last save is no save inside a batch
}
TIMES = ("time", "runtime", "_seconds", "_per_second")  # what is logged of them differs from run to run


def trainer(folder: Path, name: str, callbacks: Any = None) -> Any:
    methods, options = RUNS[name]
    if name == "swarm_sapo":
        if not (folder / "swarm").exists():
            fill(folder, 40)
        options = {"method_params": {"swarm_sapo": {"exchange": str(folder / "swarm"), "node": "me"}}}
    data = build_dataset(30, seed=1)
    if name == "ps_grpo":
        data = data.add_column("paraphrase_set_id", [i % 10 for i in range(30)])
    settings = dict(
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=1,
        learning_rate=0.05,
        optim="adamw_torch",
        max_completion_length=6,
        dataset=data,
    )
    return make(folder, methods, callbacks=callbacks, **{**settings, **options})


def end_of(t: Any) -> tuple[torch.Tensor, list[Any], str]:
    """What a run leaves: weights, logged numbers, state of the methods."""
    steps = [entry for entry in t.state.log_history if "train_runtime" not in entry]  # that one is of this process
    logged = [{k: v for k, v in entry.items() if not any(w in k for w in TIMES)} for entry in steps]
    return weights(t), logged, repr(plain(t.methods.state_dict("")))


def start_or_resume(t: Any) -> str:
    """Trains as a user would who starts the run again. What it was resumed from."""
    try:
        t.train(resume_from_checkpoint=True)
    except StateError as e:
        if "is whole, so nothing can be resumed" not in str(e):
            raise
    except ValueError as e:
        if "No valid checkpoint found" not in str(e):
            raise
    else:
        return os.path.basename(t._methods_callback.resume_from)
    t.train()
    return "the beginning"


# ---- a process that dies


@dataclass
class Moment:
    """When it dies.

    Args:
        save: in this save of the process, from 1; None: anywhere.
        event: at this call of a function within it.
        seconds: after this time; in the save if that is given, else in training.
    """

    save: int | None = None
    event: int | None = None
    seconds: float = 0.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(seconds: float) -> None:
    threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()


class Saves:
    """Sees the saves of a trainer: counts their calls of functions and their seconds, and dies where it should."""

    def __init__(self, t: Any, moment: Moment | None = None) -> None:
        self.moment, self.done = moment or Moment(), 0
        self.events: list[int] = []
        self.seconds: list[float] = []
        self._save = t._save_checkpoint
        t._save_checkpoint = self._saved

    def _saved(self, *args: Any, **kwargs: Any) -> None:
        self.done += 1
        here, count, began = self.moment.save == self.done, 0, time.perf_counter()

        def counted(frame: Any, kind: str, argument: Any) -> None:
            nonlocal count
            count += 1
            if here and count == self.moment.event:
                die()

        if here and self.moment.event is None:
            die_after(self.moment.seconds)
        else:
            sys.setprofile(counted)
        try:
            self._save(*args, **kwargs)
        finally:
            sys.setprofile(None)
        self.events.append(count)
        self.seconds.append(time.perf_counter() - began)


class Begin(TrainerCallback):
    """Dies some time after training began."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        die_after(self.seconds)


def child(folder: Path, name: str, moment: Moment) -> None:
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1), os.dup2(sink, 2)
    t = trainer(folder, name, callbacks=[] if moment.save else [Begin(moment.seconds)])
    Saves(t, moment)
    start_or_resume(t)


# ---- many of them


@dataclass
class Reference:
    """The run that nobody kills."""

    end: tuple[torch.Tensor, list[Any], str]
    events: int
    save_seconds: float
    seconds: float


@dataclass
class Found:
    """What became of the runs of one kind."""

    kills: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    newest_unfinished: int = 0
    runs: int = 0
    identical: int = 0


def reference(folder: Path, name: str) -> Reference:
    t = trainer(folder, name)
    saves, began = Saves(t), time.perf_counter()
    t.train()
    return Reference(end_of(t), max(saves.events), max(saves.seconds), time.perf_counter() - began)


def random_moment(rng: random.Random, known: Reference) -> tuple[str, Moment]:
    kind = rng.choice(["at a call in a save", "at a call in a save", "at a time in a save", "anywhere"])
    save = rng.randrange(1, 4)
    if kind == "at a call in a save":
        return kind, Moment(save, event=rng.randrange(1, known.events))
    if kind == "at a time in a save":
        return kind, Moment(save, seconds=rng.random() * known.save_seconds)
    return kind, Moment(seconds=rng.random() * known.seconds)


def kill_and_resume(folder: Path, name: str, known: Reference, rng: random.Random, found: Found) -> None:
    """One run: killed once or more, resumed each time, and compared at its end.

    Raises:
        AssertionError: it ends otherwise than the run that nobody killed.
    """
    out = folder / "out"
    while True:
        kind, moment = random_moment(rng, known)
        process = clean_processes.clean().Process(target=child, args=(folder, name, moment))
        process.start()
        process.join(HANGS)
        if process.exitcode == 0:  # it was at its end before the moment came
            break
        assert process.exitcode == -signal.SIGKILL, f"{name}, {moment}: it ended by itself with {process.exitcode}"
        found.kills[kind] += 1
        last = get_last_checkpoint(out) if out.exists() else None
        found.newest_unfinished += last is not None and unfinished(Path(last), 1) is not None
        if rng.random() < 0.6:
            break
    t = trainer(folder, name)
    origin = start_or_resume(t)
    found.resumed[origin] += 1
    found.runs += 1
    mine = end_of(t)
    assert torch.equal(mine[0], known.end[0]), f"{name}: other weights, resumed from {origin}"
    assert mine[1] == known.end[1], f"{name}: other numbers were logged, resumed from {origin}"
    assert mine[2] == known.end[2], f"{name}: another state of the methods, resumed from {origin}"
    found.identical += 1


def attack(name: str, kills: int, seed: int) -> Found:
    """So many kills at least of one kind of run."""
    rng, found = random.Random(seed), Found()
    with tempfile.TemporaryDirectory() as base:
        saved = policy(Path(base) / "policy")

        def new_folder() -> Path:
            shutil.rmtree(Path(base) / "run", ignore_errors=True)
            shutil.copytree(saved, Path(base) / "run" / "policy")
            return Path(base) / "run"

        known = reference(new_folder(), name)
        while found.kills.total() < kills:
            kill_and_resume(new_folder(), name, known, rng, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="of each kind of run, at least")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable()
    print("run | kills | newest folder unfinished | resumed from | identical / runs")
    for name in RUNS:
        found = attack(name, arguments.kills, arguments.seed)
        kills = ", ".join(f"{n} {kind}" for kind, n in found.kills.most_common())
        origins = ", ".join(f"{origin}: {n}" for origin, n in sorted(found.resumed.items()))
        same = f"{found.identical} / {found.runs}"
        print(f"{name} | {kills} | {found.newest_unfinished} | {origins} | {same}", flush=True)


if __name__ == "__main__":
    main()
