"""Commands that are killed with SIGKILL: no process of theirs goes on, no file is half written, the same command goes
on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from traces import a_row, write_batch
from waiting import NEVER, until

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim, json_lines, whole, whole_folder, write_text
from rl_plugins.runtime.processes import FOLDER

COMPARE = """
import sys, yaml
from pathlib import Path
from rl_plugins.lab.compare.plan import make_plan, parse_variants
from rl_plugins.lab.compare.runs import run_all
from rl_plugins.lab.compare.trl import Trl

folder = Path(sys.argv[1])
values = yaml.safe_load((folder / "run.yaml").read_text())
plan = make_plan(Trl(yaml.safe_dump(values)), parse_variants(["mc_grpo"], "grpo"), [0], folder / "out")
run_all(plan, jobs=2)
"""


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those of runs in this folder that are alive."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(FOLDER, "").startswith(str(folder)) and alive(process):
                found.append(process)
    return found


@pytest.mark.host
@pytest.mark.long
def test_trainers_end_with_the_comparison_and_a_rerun_has_its_logs_alone(tmp_path: Path) -> None:
    from rl_plugins.lab.demo import settings
    from rl_plugins.lab.demo.policy import build_model, build_tokenizer

    build_model(0).save_pretrained(tmp_path / "policy")
    build_tokenizer().save_pretrained(tmp_path / "policy")
    values = settings.config(tmp_path / "policy", settings.write_data(tmp_path / "data"), ["mc_grpo"], long=False)
    values |= {"max_steps": 6, "eval_strategy": "no", "eval_on_start": False, "per_device_train_batch_size": 32}
    write_text(tmp_path / "run.yaml", json.dumps(values))
    write_text(tmp_path / "compare.py", COMPARE)
    environment = {**os.environ, **settings.environment(tmp_path)}

    def command() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, tmp_path / "compare.py", tmp_path], env=environment, stdout=subprocess.DEVNULL
        )

    logs = [tmp_path / "out" / "runs" / f"{name}-seed0" / "log.jsonl" for name in ("grpo", "mc_grpo")]
    first = command()
    until(lambda: all(len(json_lines(log)) > 2 for log in logs), "lines of both runs")
    trainers = processes_of(tmp_path)
    assert len(trainers) >= 2
    first.kill()
    first.wait(NEVER)
    second = command()  # at once
    until(lambda: not any(map(alive, trainers)), f"the end of {trainers}")
    assert second.wait(NEVER) == 0 and not processes_of(tmp_path)
    for log in logs:
        steps = [line["step"] for line in json_lines(log) if "reward" in line]
        assert steps == list(range(1, 7)), log


def test_a_trainer_ends_by_itself_when_its_command_is_killed() -> None:
    """No later command is needed for it."""
    trainer = "from rl_plugins.runtime.processes import end_with_command as e; import time; e(); time.sleep(1000)"
    code = (
        "import os, subprocess, sys, time\n"
        "from rl_plugins.runtime.processes import environment\n"
        f"started = subprocess.Popen([sys.executable, '-c', {trainer!r}], env={{**os.environ, **environment()}})\n"
        "print(started.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert command.stdout is not None
    process = psutil.Process(int(command.stdout.readline()))
    try:
        time.sleep(1.0)  # it watches by now, and goes on while the command is there
        assert alive(process)
        command.kill()
        command.wait()
        until(lambda: not alive(process), "the end of the trainer")
    finally:
        command.kill()
        with contextlib.suppress(psutil.Error):
            process.kill()


def test_a_process_that_ignores_everything_is_ended_by_the_next_command(tmp_path: Path) -> None:
    """What watches nothing: a launcher, a daemon of Ray."""
    from rl_plugins.runtime.processes import end_all, environment

    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
    daemons = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **environment(folder)},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for folder in (tmp_path / "mine", tmp_path / "other")
    ]
    try:
        for daemon in daemons:
            assert daemon.stdout is not None and daemon.stdout.readline()
        end_all(tmp_path / "mine")
        assert daemons[0].wait(NEVER) == -signal.SIGKILL and daemons[1].poll() is None
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


# ---- files


def in_child(action: Callable[[], Any], die_at: int | None = None) -> int:
    """Runs an action in a forked process, which kills itself at a call of a function.

    Returns:
        Calls of functions that the action makes; 0 for one that was killed.
    """
    out, into = os.pipe()
    child = os.fork()
    if not child:
        count = 0

        def counted(frame: Any, kind: str, argument: Any) -> None:
            nonlocal count
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(counted)
        try:
            action()
        finally:
            sys.setprofile(None)
            os.write(into, str(count).encode())
            os._exit(0)
    os.close(into)
    said = os.read(out, 100)
    os.close(out)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (die_at is not None and not said)
    return int(said or 0)


def moments(total: int, most: int = 5, last: int = 400) -> list[int]:
    """Some calls, most of them among the last ones, where files are written."""
    rng = random.Random(0)
    return sorted(
        {
            *rng.sample(range(1, total + 1), min(total, 1)),
            *(rng.randint(max(1, total - last), total) for _ in range(most)),
        }
    )


def test_a_picture_is_whole_or_the_one_before(tmp_path: Path) -> None:
    from PIL import Image

    from rl_plugins.lab.compare import figures

    def draw(value: float) -> Callable[[], Any]:
        def drawn() -> Any:
            figure, (axis,) = figures.panels(1)
            axis.plot([0, 1], [0, value])
            return figure

        return lambda: figures.save(tmp_path / "curves.png", drawn)

    draw(1.0)()
    total = in_child(draw(2.0))
    for moment in moments(total):
        in_child(draw(3.0), moment)
        for file in tmp_path.glob("curves*.png"):
            with Image.open(file) as image:
                image.load()
    draw(1.0)()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves-dark.png", "curves.png"]


def test_results_of_the_bench_lose_no_curves(tmp_path: Path) -> None:
    from rl_plugins.lab.bench.results import BenchRun, Results

    def run(seed: int) -> BenchRun:
        log = [{"step": step, "eval_rewards/right/mean": 0.1 * step, "reward": 0.2} for step in (0, 5, 10)]
        return BenchRun.of("neutral", "grpo", seed, log)

    Results([run(0)]).write(tmp_path)
    two = Results([run(0), run(1)])
    total = in_child(lambda: two.write(tmp_path / "other"))
    states = set()
    for moment in range(1, total + 1, max(1, total // 40)):
        Results([run(0)]).write(tmp_path)
        in_child(lambda: two.write(tmp_path), moment)
        found = Results.read(tmp_path)
        assert all(one.curves for one in found.runs.values()), moment
        states.add((len(found.runs), sum(len(points) for one in found.runs.values() for points in one.curves.values())))
    assert len(states) == 2, "the old results or the new ones"


def test_a_run_that_died_in_a_line_of_its_log_does_not_end_the_bench(tmp_path: Path) -> None:
    from rl_plugins.lab.bench.runs import Waiting, _read

    run = Waiting("neutral", "grpo", 0)
    folder = run.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "output.txt").write_text("MemoryError\n")
    (folder / "log.jsonl").write_bytes(b'{"step": 1, "max_steps": 5, "seconds": 1.0}\n{"step": 2, "na\xc3')
    assert _read(run, tmp_path, 1).error == "MemoryError"


@pytest.mark.parametrize("torn", [b"", b"{", b'{"a": 1', b'{"text": "\xe2\x80', b"\x00\x00"])
def test_a_torn_last_line_is_left_out_and_another_is_an_error(torn: bytes, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    assert json_lines(file) == []
    text = "one\u2028two\x85"  # no ends of lines in JSON
    whole_lines = "".join(json.dumps({"a": i, "t": text}, ensure_ascii=False) + "\n" for i in range(3)).encode()
    file.write_bytes(whole_lines + torn)
    assert json_lines(file) == [{"a": i, "t": text} for i in range(3)]
    if torn:
        file.write_bytes(whole_lines + torn + b"\n" + whole_lines)
        with pytest.raises(ValueError):
            json_lines(file)


@pytest.mark.parametrize("write", [lambda path: write_text(path, "new" * 10), lambda path: half(path)])
def test_a_file_is_the_old_one_or_the_new_one(write: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "a" / "file.txt"
    total = in_child(lambda: write(tmp_path / "count" / "file.txt"))
    for moment in range(1, total + 1, max(1, total // 40)):
        write_text(file, "old")
        in_child(lambda: write(file), moment)
        assert file.read_text() in ("old", "new" * 10)
        assert len(list(file.parent.iterdir())) <= 2
    write(file)
    assert [p.name for p in file.parent.iterdir()] == ["file.txt"]


def half(path: Path) -> None:
    """A writer of another library, in several calls."""
    with whole(path) as part, part.open("w") as f:
        for _ in range(10):
            f.write("new")
            f.flush()


def test_an_error_leaves_nothing_and_a_link_stays_one(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(RuntimeError), whole(tmp_path / "link") as part:
        part.write_text("new")
        raise RuntimeError
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    with whole("/dev/null") as path:
        path.write_text("x")


def test_a_folder_appears_whole_and_a_kill_leaves_one_hidden_folder_at_most(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        with whole_folder(path) as folder:
            for name in "abc":
                (folder / name).write_text(name)

    total = in_child(lambda: fill(tmp_path / "count"))
    for moment in range(1, total + 1, max(1, total // 40)):
        out = tmp_path / "out"
        in_child(lambda path=out: fill(path), moment)
        assert len([p for p in tmp_path.iterdir() if p.name.startswith(".out")]) <= 1
        if out.exists():
            assert sorted(p.name for p in out.iterdir()) == ["a", "b", "c"]
            shutil.rmtree(out)
    fill(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["count", "out"]


def test_a_folder_that_is_being_written_is_refused(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
        with pytest.raises(ConfigError, match="Another process is writing"), whole_folder(tmp_path / "out"):
            pass
        assert (folder / "a").exists()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["a"]


# ---- folders of the user

TARGETS: dict[str, list[str]] = {
    "inspect": ["inspect", "RUN", "--html"],
    "compare": ["compare", "run.yaml", "mc_grpo", "--out"],
    "demo": ["demo", "mc_grpo", "--out"],
    "demo without methods": ["demo", "--out"],
    "demo of agents": ["demo", "gigpo", "--out"],
    "demo of diffusion": ["demo", "branch_grpo", "--out"],
    "demo of verl": ["demo", "--host", "verl", "--out"],
    "bench": ["bench", "mc_grpo", "--out"],
    "bench of stacks": ["bench", "vade", "mc_grpo", "--stack", "--task", "neutral", "--out"],
    "audit": ["audit", "run.yaml", "--out"],
    "fuse": ["fuse", "base", "expert", "--out"],
    "heads sample": ["heads", "sample", "run.yaml", "--k", "2", "--out"],
}


@pytest.mark.host
@pytest.mark.parametrize("command", TARGETS)
def test_a_folder_of_the_user_is_refused_and_left_alone(command: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Every command that writes a folder; names of its own files are there already."""
    from typer.testing import CliRunner

    from rl_plugins.commands.cli import app
    from rl_plugins.lab.demo import trl_data

    monkeypatch.chdir(tmp_path)
    prepare(command, tmp_path, trl_data)
    mine = tmp_path / "mine"
    for name in (
        "index.html",
        "data/run.js",
        "runs/grpo-seed0/log.jsonl",
        "report.json",
        "summary.json",
        "samples.jsonl",
    ):
        write_text(mine / name, f"mine: {name}")
    before = {p: p.read_bytes() for p in mine.rglob("*") if p.is_file()}
    result = CliRunner().invoke(app, [*TARGETS[command], str(mine)])
    assert result.exit_code == 2 and "mine" in result.output, result.output
    assert {p: p.read_bytes() for p in mine.rglob("*") if p.is_file()} == before


def prepare(command: str, folder: Path, trl_data: Any) -> None:
    if command == "inspect":
        write_batch(folder / "RUN" / "trace", 0, [a_row(i, 0, [1, 2]) for i in range(2)])
    elif command == "fuse":
        return
    elif "run.yaml" in TARGETS[command]:
        trl_data.write(folder / "laptop")
        shutil.copy(folder / "laptop" / "run.yaml", folder / "run.yaml")


def test_what_a_command_made_is_its_own(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        claim(folder, "compare")
        (folder / "file").touch()
        claim(folder, "compare")
        with pytest.raises(ConfigError, match="Nothing in it was changed"):
            claim(folder, "bench")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError):
            claim(path, "compare")
