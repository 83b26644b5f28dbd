"""Runs a comparison: some processes at a time, live progress, and nothing is run twice.

A run is finished when its folder holds `finished.json` with its fingerprint; a comparison that was cut off goes on
where it stopped. A run of TRL that was killed goes on from its last checkpoint if it made one; others begin anew, as
does a run that failed: what it failed of may be mended. A run that fails stops the comparison, with the end of its
output and the folder of all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn

from rl_plugins.core.errors import RLPluginsError
from rl_plugins.core.files import json_lines, write_text
from rl_plugins.lab.compare.plan import LOG_VARIABLE, Comparison, PlannedRun
from rl_plugins.runtime import processes
from rl_plugins.runtime.bars import Bars

BEGUN, FINISHED = "begun.json", "finished.json"
CHECKPOINTS = "trainer/checkpoint-*"  # of TRL, in a run's folder
PATIENCE = 10.0  # seconds in which a run that is told to stop may end by itself


@dataclass
class _Running:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    task: TaskID
    output: Any = field(repr=False)


def is_finished(run: PlannedRun) -> bool:
    return _has(run, FINISHED)


def _has(run: PlannedRun, file: str) -> bool:
    """Whether a file in the run's folder is of this run."""
    return _kept(run, file).get("fingerprint") == run.fingerprint


def _kept(run: PlannedRun, file: str) -> dict[str, Any]:
    try:
        kept = json.loads((run.folder / file).read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _mark(run: PlannedRun, file: str) -> None:
    write_text(run.folder / file, json.dumps({"fingerprint": run.fingerprint, "identity": run.identity}))


def why_again(run: PlannedRun) -> str:
    """What differs from the finished run that is in the folder; empty if there is none, or if it is this one."""
    kept = _kept(run, FINISHED)
    if not kept or is_finished(run):
        return ""
    before = kept.get("identity")
    if not before:  # written by an older version
        return "version of rl-plugins"
    return ", ".join(name for name, part in run.identity.items() if before.get(name) != part)


def read_log(run: PlannedRun) -> list[dict[str, Any]]:
    """The lines a run has logged so far; a line that is still being written is left out."""
    return json_lines(run.log_file)


def run_all(
    comparison: Comparison,
    jobs: int,
    watch: str = "reward",
    console: Console | None = None,
    environment: dict[str, str] | None = None,
) -> float:
    """Runs what is not finished.

    Args:
        jobs: processes at a time.
        watch: the logged value shown next to the bars.

    Returns:
        Seconds it took.

    Raises:
        RLPluginsError: a run failed; the others are stopped, finished ones stay. Or another command is at work in the
            comparison's folder.
    """
    comparison.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(comparison.out / "lock", timeout=0):
            return _run_all(comparison, jobs, watch, console or Console(), environment or {})
    except Timeout:
        raise RLPluginsError(
            f"Another command is comparing in {comparison.out}. Wait for its end, or give another folder with --out."
        ) from None


def _run_all(comparison: Comparison, jobs: int, watch: str, console: Console, environment: dict[str, str]) -> float:
    start = time.monotonic()
    waiting = [r for r in comparison.runs if not is_finished(r)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[value]}"),
    )
    for run in waiting:
        if told := why_again(run):
            console.print(
                f"{run.variant.label} seed {run.seed} was finished before with another {told}. It is trained again.",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    running: list[_Running] = []
    with Bars(*columns, console=console) as progress:
        for run in comparison.runs:
            if run not in waiting:
                progress.add_task(f"{run.variant.label} seed {run.seed}", total=1, completed=1, value="finished before")
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_begin(waiting.pop(0), progress, environment))
                time.sleep(0.3)
                for r in list(running):
                    ended = r.process.poll() is not None  # before the log is read: then it is whole
                    _show(r, progress, watch)
                    if ended:
                        running.remove(r)
                        _end(r)
        finally:
            for r in running:
                r.process.terminate()
            for r in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    r.process.wait(PATIENCE)
                processes.end_all(r.run.folder)
                r.process.wait()
                r.output.close()
    return time.monotonic() - start


def _begin(run: PlannedRun, progress: Bars, environment: dict[str, str]) -> _Running:
    processes.end_all(run.folder)  # of a command that was killed
    if not (_has(run, BEGUN) and any(run.folder.glob(CHECKPOINTS))):  # else the worker goes on from the last one
        shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.mkdir(parents=True)
        run.write_config()
        _mark(run, BEGUN)
    output = (run.folder / "output.txt").open("ab")
    command = [*(run.launcher or (sys.executable,)), "-m", run.worker, *run.arguments]
    write_text(run.folder / "command.json", json.dumps(command, indent=1))
    ours = {LOG_VARIABLE: str(run.log_file), **processes.environment(run.folder)}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment, **ours}
    )
    task = progress.add_task(f"{run.variant.label} seed {run.seed}", total=None, value="starting")
    return _Running(run, process, task, output)


def _show(r: _Running, progress: Bars, watch: str) -> None:
    lines = read_log(r.run)
    if not lines:
        return
    values = [line[watch] for line in lines if watch in line]
    text = f"{watch} {values[-1]:.3f}" if values else ""
    progress.update(r.task, total=lines[-1]["max_steps"], completed=lines[-1]["step"], value=text)


def _end(r: _Running) -> None:
    r.output.close()
    processes.end_all(r.run.folder)
    if r.process.returncode == 0:
        _mark(r.run, FINISHED)
        return
    if r.process.returncode > 0:
        (r.run.folder / BEGUN).unlink(missing_ok=True)
    end = _last_lines(r.run.folder / "output.txt")
    raise RLPluginsError(
        f"The run of {r.run.variant.label} with seed {r.run.seed} failed (exit status {r.process.returncode}). The end "
        f"of its output ({r.run.folder / 'output.txt'}):\n{end}\nFinished runs are kept; the same command goes on."
    )


def _last_lines(file: Path, n: int = 25) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-n:])
