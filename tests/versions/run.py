"""Runs the suites of the hosts in environments of other versions, and notes what passed.

    python tests/versions/run.py trl-1.15             builds build/versions/trl-1.15, runs, notes what passed
    python tests/versions/run.py trl-1.15 -- FILES    runs these tests only and notes nothing
    python tests/versions/run.py --pin trl-1.15       makes pins/trl-1.15.txt anew from the registry

An environment of environments.toml has these keys:
    python      version of the interpreter, which must be installed
    extras      extras of this package
    requires    what is asked for beside them; it goes before what `base` says of the same packages
    base        whether the other versions are those of constraints.txt
    resolution  which version of a package is taken: "highest" or "lowest-direct"
    tools       what the tests need
    tests       files, by name if they are under tests/, or folders
    quick       a part of them that takes two minutes of one core: --quick
    variables   of the environment of the tests (optional)
The registry and other settings are those of uv: UV_INDEX, UV_FIND_LINKS, UV_TORCH_BACKEND. What passed is noted in
rl_plugins/runtime/tested/NAME.json: the doctor reads it, and `make docs` makes the table in README of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDS = ROOT / "rl_plugins" / "runtime" / "tested"
BUILT = ROOT / "build" / "versions"
SHOWN = (
    "torch",
    "transformers",
    "trl",
    "verl",
    "accelerate",
    "peft",
    "datasets",
    "huggingface_hub",
    "numpy",
    "diffusers",
    "vllm",
)
OTHER_TIERS = "not vllm and not deepspeed and not patches and not browser and not site and not gpu and not real"


def environments() -> dict[str, dict[str, Any]]:
    """The environments by name, with the defaults filled in."""
    read = tomllib.loads((HERE / "environments.toml").read_text(encoding="utf-8"))
    defaults = read.pop("defaults")
    return {
        name: {"requires": [], "resolution": "highest", "variables": {}, **defaults, **e} for name, e in read.items()
    }


def uv(*arguments: str | Path, given: str | None = None) -> None:
    import uv as package

    command = [package.find_uv_bin(), *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, text=True, input=given, stdout=subprocess.DEVNULL)


def pin(name: str, wanted: dict[str, Any]) -> None:
    """Writes `pins/NAME.txt`: every package and its version."""
    taken = {re.split(r"[^\w.-]", r)[0].lower() for r in wanted["requires"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    taken |= set() if wanted["base"] else {line.split("==")[0].lower() for line in lines} - set(wanted["tools"])
    base = BUILT / f"{name}.base"
    base.parent.mkdir(parents=True, exist_ok=True)
    base.write_text("\n".join(line for line in lines if line.split("==")[0].lower() not in taken))
    extras = [part for extra in wanted["extras"] for part in ("--extra", extra)]
    target = HERE / "pins" / f"{name}.txt"
    target.unlink(missing_ok=True)  # uv would keep what it says
    here = [part for file in os.environ.get("UV_CONSTRAINT", "").split() for part in ("--constraints", file)]
    uv(
        *("pip", "compile", "pyproject.toml", "-", *extras, "--constraints", base, *here, "--output-file", target),
        *("--resolution", wanted["resolution"], "--python-version", wanted["python"]),
        *("--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links"),
        given="\n".join([*wanted["requires"], *wanted["tools"]]),
    )
    target.write_text(re.sub(r"\+cpu$", "", target.read_text(), flags=re.M))  # which wheel is taken is not pinned


def build(name: str, wanted: dict[str, Any], pinned_as: str = "") -> Path:
    """The folder of the environment, made if its pins or this package's metadata changed since.

    Args:
        pinned_as: the environment that has the pins, if it is another one.
    """
    folder, pins = BUILT / name, HERE / "pins" / f"{pinned_as or name}.txt"
    stamp = folder / "ready"
    sources = (pins, ROOT / "pyproject.toml")
    if not pins.exists():
        pin(name, wanted)
    if not stamp.exists() or any(stamp.stat().st_mtime < s.stat().st_mtime for s in sources):
        uv("venv", "--clear", "--python", wanted["python"], folder)
        uv("pip", "install", "--python", folder, "--requirements", pins)
        uv("pip", "install", "--python", folder, "--no-deps", "--editable", ROOT)
        stamp.touch()
    return folder


def run(folder: Path, wanted: dict[str, Any], arguments: list[str], result: Path | None = None) -> int:
    """Runs pytest in an environment; returns its exit status."""
    files = [next((str(f) for f in (ROOT / "tests").rglob(a)), a) if a.endswith(".py") else a for a in arguments]
    command: list[str | Path] = [
        folder / "bin" / "python",
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "-m",
        OTHER_TIERS,
        *files,
    ]
    if result is not None:
        command.append(f"--junitxml={result}")
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **alone, **wanted["variables"]}).returncode


def outcome(result: Path) -> dict[str, Any]:
    """Of pytest's report: how many tests passed, which failed, and which were skipped for what reason."""
    passed, failed, skipped = 0, [], {}
    for case in ElementTree.parse(result).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (reason := case.find("skipped")) is not None:
            skipped[name] = reason.get("message", "")
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


def installed(folder: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower().replace('-', '_'): d.version for d in m.distributions()}\n"
        f"names = {SHOWN}\n"
        "print(json.dumps({'python': sys.version.split()[0], **{n: found[n] for n in names if n in found}}))"
    )
    done = subprocess.run([folder / "bin" / "python", "-c", code], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def note(
    name: str, folder: Path, tests: list[str], result: Path, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Writes the record of an environment.

    Args:
        before: the record whose failures were run again.
    """
    found = outcome(result)
    if before:
        tests, found["passed"] = before["tests"], found["passed"] + before["passed"]
        found["skipped"] = {**before["skipped"], **found["skipped"]}
    record = {
        "environment": name,
        "date": datetime.date.today().isoformat(),
        "versions": installed(folder),
        "tests": tests,
        **found,
    }
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def main() -> int:
    known = environments()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of them: {' '.join(known)}")
    parser.add_argument("--pin", action="store_true", help="make the pins anew, and run nothing")
    parser.add_argument("--quick", action="store_true", help="run a part of the tests; the record says which")
    parser.add_argument("--again", action="store_true", help="run what failed before, and note what passes now")
    parser.add_argument("--remove", action="store_true", help="remove an environment (3 GB) when it was run")
    words, _, after = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(words.split())
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown: {' '.join(sorted(unknown))}. Choose from {' '.join(known)}.")
    failed = False
    for name in options.names or known:
        if options.pin:
            pin(name, known[name])
            continue
        folder = build(name, known[name])
        if after:
            failed |= run(folder, known[name], after.split()) != 0
            continue
        result = BUILT / f"{name}.xml"
        before = json.loads((RECORDS / f"{name}.json").read_text()) if options.again else None
        tests = before["failed"] if before else known[name]["quick" if options.quick else "tests"]
        result.unlink(missing_ok=True)
        run(folder, known[name], tests, result)
        if not result.exists():
            print(f"{name}: pytest did not end, so nothing is noted")
            failed = True
            continue
        record = note(name, folder, tests, result, before)
        failed |= bool(record["failed"])
        print(f"{name}: {record['passed']} passed, {len(record['failed'])} failed, {len(record['skipped'])} skipped")
        if options.remove:
            shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
