"""The dummy plugin package of `plugin_package/`, really installed, into a folder of its own; the examples of property
tests, which are the same in every run unless HYPOTHESIS_PROFILE=random asks for others; the texts of errors, which are
compared once; and the end of all processes that the tests start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import messages
import pytest
import watchdog
from hypothesis import HealthCheck, settings
from waiting import Stuck

watchdog.watch()

# No limit on the time of an example: a busy machine is no fault.
AT_ANY_SPEED = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", derandomize=True, **AT_ANY_SPEED)
settings.register_profile("random", derandomize=False, **AT_ANY_SPEED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

SOURCE = Path(__file__).parent / "plugin_package"


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package. Put it on PYTHONPATH of a process that shall find it."""
    folder = tmp_path_factory.mktemp("plugins")
    copy = folder / "source"  # setuptools builds inside the source tree
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site"), str(copy)], check=True
    )
    return folder / "site"


@pytest.fixture
def plugins(plugin_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package is found in this process, for one test."""
    monkeypatch.delenv("RL_PLUGINS_VETO", raising=False)
    monkeypatch.syspath_prepend(str(plugin_path))
    return plugin_path


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    """A function that hangs to the end of the test."""
    made = Stuck()
    yield made
    made.release()


# ---- texts of errors: see messages.py


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # of a worker of xdist
    if output is not None:
        output["messages"] = messages.seen
    elif os.environ.get("UPDATE_MESSAGES"):
        part = session.config.option.keyword or any("::" in argument for argument in session.config.args)
        messages.update(whole=session.exitstatus == pytest.ExitCode.OK and not part)
    elif os.environ.get("CHECK_MESSAGES") and messages.changes() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    messages.seen.update(getattr(node, "workeroutput", {}).get("messages", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if diff := messages.changes():
        terminalreporter.section("texts of errors changed", sep="=", red=True)
        terminalreporter.write_line(diff)
        terminalreporter.write_line("If that is right, run these tests again with UPDATE_MESSAGES=1.")
