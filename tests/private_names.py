"""Private names of the hosts that the adapters use: `python tests/private_names.py` counts and lists them.

A name is private if it begins with an underscore. It belongs to a host, or to a library below it, if nothing in this
package defines it, or if an override of ours calls it with `super()`. Read are attributes, names given as text to
`getattr`, `setattr`, `hasattr` and `delattr`, and imports.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1] / "rl_plugins"
ADAPTERS = ("trl", "verl")
OF_RAY = {"__ray_metadata__", "__ray_call__"}  # not of Python, and documented nowhere
BY_TEXT = ("getattr", "setattr", "hasattr", "delattr")
# Private in form and documented all the same.
DOCUMENTED = {"_asdict", "_replace", "_fields", "_exit"}


@dataclass(frozen=True, order=True)
class Use:
    name: str
    file: str
    line: int


def uses(adapter: str, root: Path = ROOT) -> list[Use]:
    """Every place where an adapter uses a private name of its host."""
    files = [f for f in root.rglob("*.py") if f.name != "host.py"]  # which describes the host
    own = {name for file in files for name in _defined(ast.parse(file.read_text(encoding="utf-8")))}
    found = []
    for file in sorted((root / adapter).rglob("*.py")):
        for name, line, foreign in _private(ast.parse(file.read_text(encoding="utf-8"))):
            if (foreign or name not in own) and name not in DOCUMENTED:
                found.append(Use(name, str(file.relative_to(root)), line))
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    """Private names that code defines: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def _private(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """(name, line, surely foreign) of every private name that is used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            above = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            yield node.attr, node.lineno, above or node.attr in OF_RAY
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "setattr",
            "hasattr",
            "delattr",
        ):
            text = node.args[1] if len(node.args) > 1 else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and _is_private(text.value):
                yield text.value, node.lineno, False
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("rl_plugins"):
            for alias in node.names:
                if _is_private(alias.name):
                    yield alias.name, node.lineno, True


def _is_private(name: str) -> bool:
    return name in OF_RAY or (name.startswith("_") and not name.startswith("__") and name != "_")


def main() -> None:
    for adapter in ADAPTERS:
        found = uses(adapter)
        names = sorted({u.name for u in found})
        print(f"{adapter}: {len(names)} private names in {len(found)} places")
        for name in names:
            places = ", ".join(f"{u.file}:{u.line}" for u in found if u.name == name)
            print(f"  {name:<42}{places}")


if __name__ == "__main__":
    sys.exit(main())
