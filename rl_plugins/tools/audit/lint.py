"""Part A4 of an audit: what the source of a reward function shows. For information, because code can mean well."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from rl_plugins.tools.audit.findings import Finding

PART = "source"
PROMPTS = {"prompt", "prompts", "question", "problem", "query", "instruction", "messages", "extra_info", "data_source"}
OUTSIDE = {
    "os.environ": "the environment",
    "os.getenv": "the environment",
    "time": "the time",
    "datetime": "the time",
    "random": "random numbers",
    "requests": "the network",
    "urllib": "the network",
    "httpx": "the network",
    "aiohttp": "the network",
    "socket": "the network",
    "subprocess": "other programs",
}


def findings(name: str, function: Callable[..., Any]) -> Iterator[Finding]:
    """What the source of a function and of its helpers in the same file shows."""
    for node, file in sources(function):
        at = f"{file}:{node.lineno}"
        for line, what in sorted(_negations(node)):
            yield Finding(
                "info",
                PART,
                "negation",
                f"`{name}` turns a value around ({what}) where a condition looks at the prompt ({file}:{line}).",
                details={"function": name, "line": line},
            )
        reads = sorted({told for n in ast.walk(node) for path, told in OUTSIDE.items() if _path(n) == path})
        if reads:
            yield Finding(
                "info",
                PART,
                "outside",
                f"`{name}` reads {', '.join(reads)} in `{node.name}` ({at}), so equal completions may get other "
                f"rewards elsewhere.",
                details={"function": name, "reads": reads},
            )


def sources(function: Callable[..., Any]) -> list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """The function and those of its file that it calls by name; nothing where there is no source."""
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = type(function).__call__
    try:
        code, file = inspect.unwrap(function).__code__, inspect.getsourcefile(function)
        tree = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return []
    every = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    by_name = {n.name: n for n in every}
    start = [n for n in every if n.name == code.co_name and _first_line(n) <= code.co_firstlineno <= n.lineno]
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    waiting = start[:1]
    while waiting:
        node = waiting.pop()
        found[node.name] = node
        called = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        waiting += [by_name[c] for c in called if c in by_name and c not in found]
    return [(node, str(file).rsplit("/", 1)[-1]) for node in found.values()]


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def _negations(function: ast.AST) -> set[tuple[int, str]]:
    prompts = _about_prompts(function)
    found = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.If | ast.IfExp) or not _names(node.test) & prompts:
            continue
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
        for part in (inner for p in parts for inner in ast.walk(p)):
            what = _negation(part)
            if what:
                found.add((getattr(part, "lineno", 0), what))
    return found


def _about_prompts(function: ast.AST) -> set[str]:
    """Names that hold prompts, or parts of them."""
    known = set(PROMPTS)
    for _ in range(4):
        for node in ast.walk(function):
            if isinstance(node, ast.For | ast.comprehension):
                known |= _taken(node.target, node.iter, known)
            elif isinstance(node, ast.Assign) and _names(node.value) & known:
                known |= {n for t in node.targets for n in _names(t)}
    return known


def _taken(target: ast.expr, source: ast.expr, known: set[str]) -> set[str]:
    """Loop variables over prompts; of `zip` only those in the place of prompts."""
    zipped = isinstance(source, ast.Call) and isinstance(source.func, ast.Name) and source.func.id == "zip"
    if zipped and isinstance(target, ast.Tuple) and isinstance(source, ast.Call):
        pairs = zip(target.elts, source.args, strict=False)
        return {n for t, s in pairs if _names(s) & known for n in _names(t)}
    return _names(target) if _names(source) & known else set()


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _negation(node: ast.AST) -> str:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return "a minus sign"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Constant):
        return "a constant minus the value"
    return ""


def _path(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        path = f"{node.value.id}.{node.attr}"
        return path if path in OUTSIDE else node.value.id
    return ""
