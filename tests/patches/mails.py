"""The mails in patches/: repositories made from the installed hosts, `git am`, and runs of the patches' own tests."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from waiting import NEVER

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
HEAD = re.compile(r"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\nFrom: .+ <.+@.+>\nDate: .+\nSubject: \[PATCH\] ")
PARTS = ("Problem", "Change", "Alternative considered", "Evidence")


def number(patch: Path) -> str:
    """Return "V4" of "V4-some-title.patch"."""
    return patch.name.split("-")[0]


def patches(host: str) -> list[Path]:
    """Return the mails of a host in the order of their numbers."""
    return sorted((ROOT / "patches" / host).glob("*.patch"), key=lambda p: int(number(p)[1:]))


def title(patch: Path) -> str:
    """Return the subject without "[PATCH] "."""
    lines = patch.read_text().split("Subject: [PATCH] ", 1)[1].splitlines()
    return lines[0] + (lines[1] if lines[1].startswith(" ") else "")


def body(patch: Path) -> str:
    """Return the commit message below the subject."""
    return patch.read_text().split("\n---\n", 1)[0].split("\n\n", 1)[1]


def touched(patch: Path) -> list[str]:
    """Return the files that a mail changes or adds."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)


def added_lines(patch: Path) -> list[str]:
    return [line[1:] for line in patch.read_text().splitlines() if line.startswith("+") and not line.startswith("+++")]


def git(repository: Path, *arguments: str) -> str:
    """Run git in `repository` alone: no configuration of this machine, no repository above."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_SYSTEM=os.devnull)
    env.update(GIT_CEILING_DIRECTORIES=str(repository.resolve().parent))
    for role in ("AUTHOR", "COMMITTER"):
        env.update({f"GIT_{role}_NAME": "a person", f"GIT_{role}_EMAIL": "person@example.org"})
    done = subprocess.run(["git", *arguments], cwd=repository, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"git {' '.join(arguments)}: {done.stderr}{done.stdout}"
    return done.stdout


@functools.cache
def package(host: str) -> Path:
    """Return the folder of the installed host, without importing it."""
    spec = importlib.util.find_spec(host)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def repository(directory: Path, host: str, only: set[str] | None = None) -> Path:
    """Make a git repository in `directory` of the installed package, or of some of its files."""
    if only is None:
        shutil.copytree(package(host), directory / host, ignore=shutil.ignore_patterns("__pycache__"))
    for name in only or ():
        source = package(host).parent / name
        if source.exists():  # tests are added by the patches
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, directory / name)
    git(directory, "init", "-q")
    git(directory, "add", "-A", "-f")
    git(directory, "commit", "-q", "-m", "as released")
    return directory


def am(directory: Path, *mails: Path) -> None:
    """Apply mails as a person would; `--keep-non-patch` keeps the "[module]" of a title."""
    git(directory, "am", "-q", "--keep-non-patch", *map(str, mails))


def patched(directory: Path, host: str) -> Path:
    """Make a repository of the installed host with all mails applied."""
    repository(directory, host)
    am(directory, *patches(host))
    return directory


def environment(tree: Path | None, **more: str) -> dict[str, str]:
    """Return the environment of a child process that imports the host from `tree`, if there is one."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(tree)] if tree else []
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    env.update(CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=os.pathsep.join(paths))
    return {**env, **more}


def run_tests(tree: Path, env: dict[str, str]) -> dict[str, str]:
    """Run pytest on `tests` of a tree and return "passed", "skipped" or the text of the failure, by file::test."""
    report = tree / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "tests"]
    command += ["--junitxml", str(report), "-o", "junit_family=xunit1", "--basetemp", str(tree / "tmp")]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=NEVER)
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        skipped = [child for child in case if child.tag == "skipped"]
        text = f"{bad[0].get('message')}\n{bad[0].text}" if bad else "skipped" if skipped else "passed"
        outcomes[f"{case.get('file')}::{case.get('name')}"] = text
    return outcomes


def check_form(patch: Path, line_length: int) -> None:
    """A mail has the head of `git format-patch`, the four parts, tests of its own, and the host's line length."""
    assert HEAD.match(patch.read_text()), f"{patch.name}: not a mail of git format-patch"
    for part in PARTS:
        assert re.search(rf"^{part}(:|\n)", body(patch), re.MULTILINE), f"{patch.name}: no part {part!r}"
    assert any(name.startswith("tests/") for name in touched(patch)), f"{patch.name}: adds no test"
    assert "rl_plugins" not in "\n".join(added_lines(patch))
    assert max(map(len, added_lines(patch))) <= line_length


def check_own_tests(mails: list[Path], stock: dict[str, str], fixed: dict[str, str], controls: set[str]) -> None:
    """Each mail's tests pass on the patched host. On the stock one they fail, but those of `controls`, by name."""
    for patch in mails:
        files = [name for name in touched(patch) if name.startswith("tests/")]
        names = [name for name in fixed if name.split("::")[0] in files]
        assert names and all(fixed[name] == "passed" for name in names), patch.name
        failed = [name for name in names if stock[name] != "passed"]
        assert failed, f"{patch.name}: no test of its own fails without it"
        for name in set(names) - set(failed):
            assert name.split("::")[1] in controls or name.split("::")[1].split("[")[0] in controls, name
