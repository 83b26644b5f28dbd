"""Mutations of the shared runtime: a test must fail when one expression of a module is wrong.

    python tests/mutation/run.py                  every module of TESTS
    python tests/mutation/run.py plan decide      some of them, by name or by path
    python tests/mutation/run.py --list plan      what the last run found; not while one is writing

mutmut makes the mutants, runs the tests that reach each of them, and remembers the answers under build/mutation/, one
folder per module. So a run that was stopped goes on where it was. A mutant of a function that changed is asked again;
so is one that survived, when a test or another module changed. A killed one is not: `--fresh` forgets everything.

Survivors are printed with their diff. Those that no test can kill are listed in equivalent.toml with the reason, and
messages with an XX around them ("text") are only counted; the exit status is 1 while others are left.

mutmut mutates functions and methods without a decorator: neither properties nor what stands in the body of a class or
of a module. It needs an environment of its own, `.venv-mutation`, which this script makes and which sees the packages
of the Python that runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

MUTMUT = "mutmut==3.8.1"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "mutation"
VENV = ROOT / ".venv-mutation"

# module -> its tests, narrow ones: what only another module's tests would notice counts as a survivor.
TESTS: dict[str, tuple[str, ...]] = {
    "runtime/plan": ("test_plan", "test_carry_over"),
    "runtime/decide": ("test_decide",),
    "runtime/stack": ("test_stack",),
    "runtime/metrics": ("test_metrics",),
    "runtime/programs": ("test_programs", "test_side_by_side", "test_redundancy"),
    "runtime/carry_over": ("test_carry_over", "test_redundancy"),
    "runtime/state": ("test_state",),
    "runtime/turn_table": ("test_turn_table",),
    "runtime/preflight": ("test_preflight",),
    "runtime/update": ("test_update",),
    "runtime/rounds": ("test_rounds",),
    "core/rollouts": ("test_rollouts", "test_decide"),
    "core/groups": ("test_groups",),
}

# Test files that tests of these import from.
IMPORTED = ("test_side_by_side", "test_turn_limits")

# Counts calls, and mutmut calls every function through another.
NOT_ASKED = "tests/test_groups.py::test_two_hundred_thousand_ragged_rows_without_a_loop_over_rows"

# Lines that are nothing but text: a mutated word of a message tells nothing about the tests.
TEXT = r"""^\s*(rf?|fr?)?"[^"]* [^"]*"[,)]*$"""

SETTINGS = """
[tool.mutmut]
source_paths = ["rl_plugins"]
only_mutate = ["rl_plugins/{module}.py"]
do_not_mutate_patterns = ['''{text}''']
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist"{deselect}]
pytest_add_cli_args_test_selection = [{tests}]
timeout_multiplier = 10.0
use_git_change_detection = false
on_dependency_change = "ignore"
"""

# Property tests: no deadline, which a busy machine exceeds, and a failure is not made smaller before it is told.
HYPOTHESIS = """
from hypothesis import Phase

settings.register_profile(
    "mutants", derandomize=True, deadline=None, max_examples=40, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("mutants")
"""

SHOW = "import sys; from mutmut.__main__ import cli; [cli(['show', k], standalone_mode=False) for k in sys.argv[1:]]"
COLUMNS = ("killed", "equivalent", "text", "survived", "not asked")
KILLED = {"killed", "timeout", "segfault", "caught by type check"}


def environment() -> Path:
    """The Python that has mutmut; made if it is missing or has another version."""
    python, stamp = VENV / "bin" / "python", VENV / "ready"
    packages = sysconfig.get_path("purelib")
    wanted = f"{MUTMUT}\n{packages}\n"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, MUTMUT], check=True)
        site = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        # .pth files of a folder that is named in a .pth file are not read, so an editable install of rl_plugins, which
        # is the code without mutants, stays invisible
        (Path(site) / "project.pth").write_text(packages + "\n")
        stamp.write_text(wanted)
    return python


def sources(module: str) -> dict[str, bytes]:
    """Every file a run needs -> its content. The module's own mutants are asked of its own tests only."""
    found = [p for p in (ROOT / "rl_plugins").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    found += [p for p in (ROOT / "tests").glob("*.py") if not p.name.startswith("test_")]
    found += [ROOT / "tests" / f"{name}.py" for name in {*TESTS[module], *IMPORTED}]
    found += list((ROOT / "tests" / "plugin_package").rglob("*.py"))
    files = {str(p.relative_to(ROOT)): p.read_bytes() for p in found}
    files["tests/conftest.py"] += HYPOTHESIS.encode()
    files["tests/messages.txt"] = (ROOT / "tests" / "messages.txt").read_bytes()
    files["pyproject.toml"] = (ROOT / "pyproject.toml").read_bytes() + settings(module).encode()
    return files


def settings(module: str) -> str:
    tests = ", ".join(f'"tests/{name}.py"' for name in TESTS[module])
    deselect = f', "--deselect", "{NOT_ASKED}"' if "test_groups" in TESTS[module] else ""
    return SETTINGS.format(module=module, text=TEXT, tests=tests, deselect=deselect)


def prepare(module: str, folder: Path) -> str:
    """Brings the copy up to date; a file that did not change keeps its time, which is what mutmut looks at.

    Returns:
        A digest of all that can change an answer, the module itself left out: mutmut knows its functions.
    """
    files = sources(module)
    made_with = folder / "settings"
    if made_with.exists() and made_with.read_text() != settings(module):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made_with.write_text(settings(module))
    for old in [p for part in ("rl_plugins", "tests") for p in (folder / part).rglob("*.py")]:
        if str(old.relative_to(folder)) not in files:
            old.unlink()
    for name, content in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    others = sorted((name, content) for name, content in files.items() if name != f"rl_plugins/{module}.py")
    return hashlib.sha256(repr(others).encode()).hexdigest()


def mutmut(python: Path, folder: Path, *args: str, capture: bool = False) -> str:
    """mutmut in the folder of a module."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # mutants are imported, nothing else
    variables |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    variables["COLUMNS"] = "1000"
    command = [str(python), *args]
    out = subprocess.run(command, cwd=folder, env=variables, check=True, text=True, capture_output=capture)
    return out.stdout or ""


def statuses(python: Path, folder: Path) -> dict[str, str]:
    """Mutant -> killed, survived, no tests, timeout, not checked, .."""
    lines = mutmut(python, folder, "-m", "mutmut", "results", "--all", "true", capture=True).splitlines()
    return dict(line.strip().split(": ", 1) for line in lines if ": " in line)


def run(python: Path, module: str, folder: Path, jobs: int) -> None:
    """Asks every mutant that has no answer, and survivors again if what they were asked with changed."""
    digest, stamp, list_ = prepare(module, folder), folder / "digest", folder / "again"
    command = ["-m", "mutmut", "run", "--max-children", str(jobs)]
    again = set(list_.read_text().split()) if list_.exists() else set()  # of a run that was stopped
    if stamp.exists() and stamp.read_text() != digest:
        again |= {k for k, s in statuses(python, folder).items() if s not in KILLED and s != "not checked"}
        list_.write_text("\n".join(again))
        (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)  # which test reaches what
    stamp.write_text(digest)
    mutmut(python, folder, *command)
    again &= set(statuses(python, folder))
    if again:
        mutmut(python, folder, *command, *sorted(again))
    list_.unlink(missing_ok=True)


def changed_lines(diff: str) -> tuple[str, str]:
    """What a mutant took away and what it put there, each as one line."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    was, now = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    return " ".join(was), " ".join(now)


def only_text(was: str, now: str) -> bool:
    """A message with an XX before and behind it: tests look for the message inside of an error's text."""
    return now.replace("XX", "") == was and re.search(r"""(["'])XX[^"']* [^"']*XX\1""", now) is not None


def equivalents(module: str) -> set[tuple[str, str]]:
    """(was, now) of the mutants that change nothing."""
    listed = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8"))
    found = set()
    for entry in listed.get(module.rpartition("/")[2], []):
        found |= {(entry["was"], now) for now in entry["now"]}
    return found


def report(python: Path, module: str, folder: Path) -> dict[str, int]:
    """Prints the survivors, and what no test reaches. Returns how many mutants had which end."""
    status = statuses(python, folder)
    ends = Counter({"killed": sum(s in KILLED for s in status.values())})
    ends["not asked"] = sum(s == "not checked" for s in status.values())
    unreached = Counter(k.rpartition("__mutmut_")[0] for k, s in status.items() if s == "no tests")
    for function, n in unreached.items():
        print(f"\nno test reaches {function.replace('ǁ', '.').replace('.x_', '.').replace('.x.', '.')}: {n} mutants")
    ends["survived"] += sum(unreached.values())
    survivors = [k for k, s in status.items() if s not in KILLED | {"not checked", "no tests"}]
    shown = mutmut(python, folder, "-c", SHOW, *survivors, capture=True) if survivors else ""
    known, found = equivalents(module), set()
    for text in shown.split("\n# ") if shown else []:
        title, _, diff = text.removeprefix("# ").partition("\n")
        pair = changed_lines(diff)
        if pair in known:
            found.add(pair)
            ends["equivalent"] += 1
        elif only_text(*pair):
            ends["text"] += 1
        else:
            ends["survived"] += 1
            print(f"\n{title}\n{diff.strip()}")
    for was, now in sorted(known - found):
        print(f"\nequivalent.toml names a mutant of {module} that did not survive: {was} -> {now}")
    return {column: ends[column] for column in COLUMNS}


def named(given: Sequence[str]) -> list[str]:
    """Modules of the table, from names and paths."""
    found = []
    for word in given:
        name = word.removesuffix(".py").replace("\\", "/").partition("rl_plugins/")[2] or word.removesuffix(".py")
        matches = [m for m in TESTS if m == name or m.rpartition("/")[2] == name]
        if not matches:
            raise SystemExit(f"`{word}` has no tests in the table; there are: {', '.join(TESTS)}")
        found += matches
    return found or list(TESTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="names or paths; all of the table if none is given")
    parser.add_argument("--list", action="store_true", help="print what the last run found, run nothing")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    args = parser.parse_args()
    python, table = environment(), dict[str, dict[str, int]]()
    for module in named(args.modules):
        folder = WORK / module.rpartition("/")[2]
        if args.fresh and not args.list:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"\n== {module}.py", flush=True)
        if not args.list:
            run(python, module, folder, args.jobs)
        elif not (folder / "mutants").exists():
            print("never run")
            continue
        table[module] = report(python, module, folder)
    print(f"\n{'module':22}" + "".join(f"{c:>12}" for c in (*COLUMNS, "total")))
    for module, ends in table.items():
        print(f"{module:22}" + "".join(f"{n:>12}" for n in (*ends.values(), sum(ends.values()))))
    return 1 if any(ends["survived"] or ends["not asked"] for ends in table.values()) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Stopped. The same command goes on from here.")
    except subprocess.CalledProcessError as e:
        sys.exit(f"{e.stderr or ''}\nThis command failed: {' '.join(map(str, e.cmd))[:300]}")
