"""Which versions of other packages are tested: the ranges of pyproject.toml, and the environments in which the suites
of the hosts were run, a file for each, written by `tests/versions/run.py`."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
from importlib import resources
from typing import Any


@functools.cache
def records() -> tuple[dict[str, Any], ...]:
    """By the names of the environments: `environment`, `date`, `versions` by package, `tests`, `passed` (how many),
    `failed` (names), `skipped` (name -> reason)."""
    files = [f for f in resources.files(__name__).iterdir() if f.name.endswith(".json")]
    return tuple(json.loads(f.read_text(encoding="utf-8")) for f in sorted(files, key=lambda f: f.name))


ALLOW_VARIABLE = "RL_PLUGINS_ALLOW_UNTESTED"


@functools.cache
def bounds(package: str) -> tuple[str, str | None]:
    """First version that may be installed and first that may not (None: no bound), of all requirements that name the
    package; ("0", None) for any other package."""
    low, high = "0", None
    python = importlib.metadata.metadata("rl-plugins")["Requires-Python"]
    for requirement in (*(importlib.metadata.requires("rl-plugins") or ()), f"python{python or ''}"):
        name, specifiers = re.match(r"([\w-]+)(?:\[[^]]*\])?([^;]*)", requirement).groups()  # type: ignore[union-attr]
        if name.lower() == package.lower():
            for sign, version in re.findall(r"(>=|<)\s*([\w.]+)", specifiers):
                if sign == ">=":
                    low = max(low, version, key=number)
                else:
                    high = version if high is None else min(high, version, key=number)
    return low, high


def wanted(package: str) -> str:
    """The range as pip reads it: ">=1.14,<1.17"."""
    low, high = bounds(package)
    return f">={low}" + (f",<{high}" if high else "")


def inside(package: str, version: str) -> bool:
    low, high = bounds(package)
    return number(low) <= number(version) and (high is None or number(version) < number(high))


@functools.cache
def ran(package: str) -> tuple[str, ...]:
    """Versions the tests of a host passed with, the oldest first."""
    passed = [r["versions"].get(package) for r in records() if not r["failed"]]
    return tuple(sorted({v.partition("+")[0] for v in passed if v}, key=number))


def number(version: str) -> tuple[int, ...]:
    """Release number of a version: (2, 13, 0) of "2.13.0+cpu"."""
    out = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        out.append(int(part))
    return tuple(out)
