"""The package's own modules and what each imports, read from their source: lazy imports and those of types included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import rl_plugins

ROOT = Path(rl_plugins.__file__).parent


@dataclass(frozen=True)
class Import:
    """One import statement.

    Attributes:
        module: that imports, "rl_plugins.trl.step".
        target: what it imports: a module of this package, or the top-level name of another one.
        line: in its file.
    """

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module} (line {self.line}) imports {self.target}"


def path_of(module: str) -> Path:
    folder = ROOT.joinpath(*module.split(".")[1:])
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@cache
def modules() -> tuple[str, ...]:
    """Every module of the package."""
    names = []
    for file in sorted(ROOT.rglob("*.py")):
        parts = ("rl_plugins", *file.relative_to(ROOT).with_suffix("").parts)
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return tuple(names)


@cache
def imports() -> tuple[Import, ...]:
    """Every import statement of the package."""
    return tuple(i for module in modules() for i in _imports_of(module))


def _imports_of(module: str) -> Iterator[Import]:
    known = set(modules())
    for node in ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.name in known else alias.name.split(".")[0]
                yield Import(module, target, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                target = inside if inside in known else node.module
                yield Import(module, target if target in known else target.split(".")[0], node.lineno)
