"""Trains what is missing: several processes at a time, resumable, with the time left.

Every run is a process of its own, forked from a server that has imported the host once, so that a run of a minute
does not begin with ten seconds of imports. A run that fails is noted with its error, and the others go on.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rl_plugins.core.errors import RLPluginsError
from rl_plugins.core.files import json_lines, write_text
from rl_plugins.lab.bench.results import BenchRun, Results
from rl_plugins.lab.bench.tasks import task_of
from rl_plugins.lab.bench.variants import BenchVariant
from rl_plugins.lab.compare.plan import LOG_VARIABLE
from rl_plugins.runtime import processes
from rl_plugins.runtime.bars import Bars

PRELOADED = ["torch", "transformers", "datasets", "trl", "trl.scripts.grpo", "rl_plugins.trl.commands.script"]


@dataclass(frozen=True)
class Waiting:
    """A run that is to be made."""

    task: str
    variant: str
    seed: int

    def folder(self, out: Path) -> Path:
        return out / "runs" / self.task / f"{self.variant}-seed{self.seed}"


def run_missing(
    wanted: Sequence[Waiting],
    out: Path,
    jobs: int,
    policy: Callable[[str], Path],
    console: Console | None = None,
    watch: Callable[[Results], None] | None = None,
) -> Results:
    """Trains what the results in `out` lack.

    Args:
        wanted: in the order in which they are made.
        jobs: processes at a time.
        policy: the folder of the policy for an environment, or "" for the chains.
        watch: called with the results after every run.

    Raises:
        RLPluginsError: another command is at work in the folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / "lock", timeout=0):
            return _run(wanted, out, jobs, policy, console or Console(), watch)
    except Timeout:
        raise RLPluginsError(
            f"Another command is at work in {out}. Wait for its end, or give another folder with --out."
        ) from None


def _run(
    wanted: Sequence[Waiting],
    out: Path,
    jobs: int,
    policy: Callable[[str], Path],
    console: Console,
    watch: Callable[[Results], None] | None,
) -> Results:
    results = Results.read(out)
    missing = [w for w in dict.fromkeys(wanted) if not results.has(w.task, w.variant, w.seed)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ["HF_DATASETS_CACHE"] = str((out / "cache").absolute())
    running: list[tuple[Waiting, Any]] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    with Bars(*columns, console=console) as progress:
        task = progress.add_task("runs", total=len(missing))
        try:
            while missing or running:
                while missing and len(running) < jobs:
                    running.append(_begin(missing.pop(0), out, policy, context))
                time.sleep(0.1)
                for entry in list(running):
                    w, process = entry
                    if process.is_alive():
                        continue
                    process.join()
                    running.remove(entry)
                    progress.advance(task)
                    if process.exitcode < 0:  # says nothing of the variant: the next command makes the run again
                        console.print(f"{w.task}, {w.variant}, seed {w.seed} was killed.", highlight=False)
                        continue
                    run = _read(w, out, process.exitcode)
                    results.add(run)
                    results.write(out)
                    if run.error:
                        console.print(f"{w.task}, {w.variant}, seed {w.seed} failed: {run.error}", highlight=False)
                    if watch:
                        watch(results)
        finally:
            for _, process in running:
                process.kill()
                process.join()
    return results


def _begin(w: Waiting, out: Path, policy: Callable[[str], Path], context: Any) -> tuple[Waiting, Any]:
    task, variant = task_of(w.task), BenchVariant.of(w.variant)
    folder = w.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").unlink(missing_ok=True)
    data = out / "data" / f"{w.task}-{task.fingerprint}"
    if not (data / "test.jsonl").exists():
        task.write_data(data)
    values = variant.config(task, task.config(policy(task.environment).absolute(), data.absolute()))
    values |= {"seed": w.seed, "output_dir": str(folder.absolute() / "trainer")}
    write_text(folder / "config.yaml", yaml.safe_dump(values, sort_keys=False))
    args = (str(folder.absolute()), variant.script, processes.environment(folder))
    process = context.Process(target=_train, args=args)
    process.start()
    return w, process


def _train(folder: str, script: str, variables: Mapping[str, str]) -> None:
    """In the process of a run: a script, such as that of `rl-plugins trl grpo`, with the config in the folder."""
    place = Path(folder)
    output = os.open(place / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {LOG_VARIABLE: str(place / "log.jsonl"), **variables}
    sys.argv = ["rl-plugins bench", "--config", str(place / "config.yaml")]
    import torch

    torch.set_num_threads(1)
    from rl_plugins.lab.compare.trl_worker import main

    try:
        main(script)
    except BaseException:  # an exit, too: this is a fork, and must not go on as its parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # nothing of the server's state is cleaned up twice


def _read(w: Waiting, out: Path, code: int | None) -> BenchRun:
    folder = w.folder(out)
    lines = json_lines(folder / "log.jsonl")
    error = ""
    if code != 0:
        said = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
        error = _reason(said) if said else f"ended with exit status {code}"
    return BenchRun.of(w.task, w.variant, w.seed, lines, error)


def _reason(said: Sequence[str]) -> str:
    """What a run said of its end: our own sentence if it refused or failed with one, else the last line."""
    ours = [line for line in said if line.startswith("rl-plugins: ") and "methods in effect" not in line]
    refused = said[-1].startswith("SystemExit") and ours
    return (ours[-1].removeprefix("rl-plugins: ") if refused else said[-1])[:300]
