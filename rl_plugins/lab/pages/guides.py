"""The pages `docs/guides/*.md`: their code is that of the files in `examples/guides`, which the tests run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rl_plugins.core.errors import ConfigError, did_you_mean

MARK = re.compile(
    r"<!-- code: (?P<file>[\w.]+)(?P<names>(?: \w+)*) -->\n(?:```.*?```\n)?(?P<end><!-- end of the code -->)", re.DOTALL
)


def with_code(text: str, folder: Path) -> str:
    """A page with its code made anew.

    A place for code is `<!-- code: FILE -->` or `<!-- code: FILE NAME NAME -->`, up to `<!-- end of the code -->`. FILE
    is in `folder`; a NAME is a class, function or variable at the top of a Python file, or `imports`. Without names the
    whole file is shown, of a Python file all behind its docstring.

    Raises:
        ConfigError: there is no such name, or a mark has no end.
    """
    if text.count("<!-- code:") != len(MARK.findall(text)):
        raise ConfigError("A mark `<!-- code: .. -->` has no `<!-- end of the code -->` behind its code. Add it.")

    def made(match: re.Match[str]) -> str:
        path, names = folder / match["file"], match["names"].split()
        code = _of_python(path, names) if path.suffix == ".py" else path.read_text(encoding="utf-8").strip()
        language = {".py": "python", ".yaml": "yaml"}.get(path.suffix, "bash")
        return f"<!-- code: {match['file']}{match['names']} -->\n```{language}\n{code}\n```\n{match['end']}"

    return MARK.sub(made, text)


def _of_python(path: Path, names: list[str]) -> str:
    source = path.read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    parts: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", "") != "__future__":
                parts["imports"] = "\n".join(filter(None, [parts.get("imports"), _lines(lines, node)]))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            parts[node.name] = _lines(lines, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts[node.targets[0].id] = _lines(lines, node)
    if not names:
        return "\n".join(lines[tree.body[0].end_lineno or 0 :]).strip() if ast.get_docstring(tree) else source.strip()
    for name in names:
        if name not in parts:
            raise ConfigError(f"{path} has no `{name}` at its top.{did_you_mean(name, parts)}")
    return "\n\n\n".join(parts[name] for name in names)


def _lines(lines: list[str], node: ast.stmt) -> str:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return "\n".join(lines[first - 1 : node.end_lineno])
