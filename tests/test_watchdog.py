"""Processes that the tests start end with the tests, however those end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import watchdog
from waiting import until

START = """
import os, subprocess, sys, time
from pathlib import Path

STUBBORN = '''
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
with open(sys.argv[1], "a") as f:
    print(os.getpid(), file=f)
time.sleep(3600)
'''

def start():  # a process that no group, session or parent leads to
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code, sys.executable, "-c", STUBBORN, "pids"], check=True)
    while not Path("pids").exists() or not Path("pids").read_text().endswith(chr(10)):
        time.sleep(0.01)
"""
WAITS = "def test_it():\n    start()\n    Path('ready').touch()\n    time.sleep(3600)\n"
RETURNS = "def test_it():\n    start()\n"
KILLS_ITS_WORKER = (
    "def test_first():\n    start()\n    os.kill(os.getpid(), 9)\n"
    "def test_second():\n    Path('ready').touch()\n    time.sleep(3600)\n"
)
RAY = """
import ray, time
from pathlib import Path

@ray.remote
class Actor:
    def here(self):
        return 1

def test_ray():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    actor = Actor.remote()
    assert ray.get(actor.here.remote()) == 1
    Path("ready").touch()
    time.sleep(3600)
"""


@contextlib.contextmanager
def pytest_on(folder: Path, code: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run of pytest on `code` in `folder`, with this folder's conftest."""
    (folder / "test_inner.py").write_text(code)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", *options]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--rootdir", str(folder), "test_inner.py"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in what a shell starts with &
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ready(folder: Path, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, (folder / "log.txt").read_text()
    return (folder / "ready").exists()


def started(folder: Path) -> list[psutil.Process]:
    return [psutil.Process(int(line)) for line in (folder / "pids").read_text().split()]


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_tests_that_are_ended_leave_nothing(tmp_path: Path, how: str, options: tuple[str, ...]) -> None:
    with pytest_on(tmp_path, START + WAITS, *options) as process:
        until(lambda: ready(tmp_path, process))
        (left,) = started(tmp_path)
        assert watchdog.alive(left) and left.ppid() != process.pid and os.getsid(left.pid) == left.pid
        os.kill(process.pid, getattr(signal, how))
        until(lambda: not watchdog.alive(left), "the end of what the tests started")
        process.wait()


def test_tests_that_are_done_leave_nothing(tmp_path: Path) -> None:
    with pytest_on(tmp_path, START + RETURNS) as process:
        assert process.wait() == 0, (tmp_path / "log.txt").read_text()
        left = int((tmp_path / "pids").read_text())
        until(lambda: not psutil.pid_exists(left) or not watchdog.alive(psutil.Process(left)))


def test_a_worker_that_is_killed_leaves_nothing_while_the_others_go_on(tmp_path: Path) -> None:
    with pytest_on(tmp_path, START + KILLS_ITS_WORKER, "-n", "1") as process:
        until(lambda: ready(tmp_path, process))
        left = int((tmp_path / "pids").read_text())
        until(lambda: not psutil.pid_exists(left) or not watchdog.alive(psutil.Process(left)))
        assert process.poll() is None


@pytest.mark.host
@pytest.mark.long
def test_the_daemons_of_ray_end_with_the_tests(tmp_path: Path) -> None:
    with pytest_on(tmp_path, RAY) as process:
        until(lambda: ready(tmp_path, process))
        left = [p for p in psutil.Process(process.pid).children(recursive=True) if "watchdog" not in str(p.cmdline())]
        names = " ".join(p.name() for p in left)
        assert "raylet" in names and "gcs_server" in names and "ray::Actor" in names, names
        process.kill()
        until(lambda: not any(map(watchdog.alive, left)), names)


def test_only_what_has_the_mark_is_killed() -> None:
    """And what descends from it, though its environment is empty."""
    sleep = "import time; time.sleep(3600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], env={{}}).wait()"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, watchdog.MARK: mark}, start_new_session=True)
        for code, mark in ((parent, "one two"), (sleep, "two three"), (sleep, "onetwo"))
    ]
    try:
        (child,) = until(lambda: psutil.Process(processes[0].pid).children())
        watchdog.kill_all("one")
        assert not watchdog.alive(child) and processes[0].wait() == -signal.SIGKILL
        assert [p.poll() for p in processes[1:]] == [None, None]
    finally:
        for p in processes:
            p.kill()
            p.wait()
