"""What the doctors of all hosts print: versions, the environment, problems, and how many rollouts a plan has."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.runtime import registry

# First tested version and first untested one (None: no bound); those of pyproject.toml where it names the package.
TESTED: dict[str, tuple[str, str | None]] = {
    "torch": ("2.6", None),
    "transformers": ("5.10", "5.11"),
    "trl": ("1.16", "1.17"),
    "peft": ("0.18", None),
    "verl": ("0.9.1", "0.10"),
    "TransferQueue": ("0.1.10", None),
    "vllm": ("0.22", "0.32"),
}
VARIABLES = (registry.VETO_VARIABLE, "RL_PLUGINS_ALLOW_UNTESTED")


def print_versions(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Versions of packages and the number of GPUs; returns the state of each package."""
    print("Versions")
    states = {name: package_state(name) for name in names}
    print(f"  {'python':<15}{platform.python_version()}")
    for name, (version, state) in states.items():
        print(f"  {name:<15}{version:<14}{state}".rstrip())
    if states["torch"][1] != "missing":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        print(f"  {'CUDA':<15}{f'{count} device(s)' if count else 'no device'}")
    return states


def print_environment(variables: Sequence[str]) -> None:
    print("\nEnvironment")
    for variable in variables:
        print(f"  {variable:<28}{os.environ.get(variable, 'not set')}")


def package_state(name: str) -> tuple[str, str]:
    """Installed version, and what that means: nothing for a package that is in no tested range."""
    low, high = TESTED.get(name, ("0", None))
    wanted = f">={low}" + (f",<{high}" if high else "")
    for distribution in (name, f"{name}-cpu"):  # vLLM for the CPU has a name of its own
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        inside = _number(version) >= _number(low) and (high is None or _number(version) < _number(high))
        if name not in TESTED:
            return version, ""
        return version, "ok" if inside else f"untested (tested: {wanted})"
    return "-", "missing"


def _number(version: str) -> tuple[int, ...]:
    """Release number of a version: (2, 13, 0) of "2.13.0+cpu"."""
    out = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        out.append(int(part))
    return tuple(out)


def print_problems(problems: Sequence[str]) -> int:
    """The end of every report.

    Returns:
        1 if there is a problem, else 0.
    """
    if not problems:
        print("\nNo problem found.")
        return 0
    print(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}:")
    for problem in problems:
        print("  - " + problem.strip().replace("\n", "\n    "))
    return 1


def per_prompt(rows: Sequence[Any]) -> str:
    """ "9 (8 trained, 1 made to leave)", or ranges where prompts differ."""
    trained: dict[int, int] = {}
    spare: dict[int, int] = {}
    for r in rows:
        trained[r.group] = trained.get(r.group, 0) + r.n
        spare[r.group] = spare.get(r.group, 0) + r.spare
    made = [trained[g] + spare[g] for g in trained]
    if not any(spare.values()):
        return _range(made)
    return f"{_range(made)} ({_range(trained.values())} trained, {_range(spare.values())} made to leave)"


def _range(values: Any) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return f"{low}" if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Private:
    """A name of a host that its adapter relies on: every private one it uses, and the public ones it overrides.

    Args:
        owner: "module:Class", or "module". An attribute that a class sets in its `__init__` is found there.
        name: as it is written.
        parameters: the first ones, as in the version the adapter was tested with; None if it is not called.
        why: what it is used for.
        optional: an upstream seam, which the released host does not have.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] | None
    why: str
    optional: bool = False

    def moved(self, owner: Any = None) -> str:
        """What became of it, in `owner` or in the one that is named; empty if it is as expected."""
        module, _, cls = self.owner.partition(":")
        if owner is None:
            try:
                owner = importlib.import_module(module)
                owner = getattr(owner, cls) if cls else owner
            except (ImportError, AttributeError):
                return f"{self.owner} is gone"
        title = getattr(owner, "__name__", self.owner)
        found = getattr(owner, self.name, None)
        if not hasattr(owner, self.name):
            made = [vars(c)["__init__"] for c in getattr(owner, "__mro__", ()) if "__init__" in vars(c)]
            names = {n for f in made for n in getattr(getattr(inspect.unwrap(f), "__code__", None), "co_names", ())}
            return "" if self.optional or self.name in names else f"{title}.{self.name} is gone"
        if self.parameters is None or not callable(found):
            return "" if self.parameters is None else f"{title}.{self.name} is no function"
        given = [p for p in inspect.signature(found).parameters if p not in ("self", "cls")]
        if tuple(given[: len(self.parameters)]) == self.parameters:
            return ""
        return f"{title}.{self.name}({', '.join(given)}) used to be ({', '.join(self.parameters)})"
