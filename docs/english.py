"""The rules of "English" in CONTRIBUTING.md that a program can check, as warnings of `make lint`. It never fails.

`python docs/english.py` looks at `AREAS` and at the help of every command. `python docs/english.py FILE...` looks at
Python files (docstrings, messages, help) and Markdown files; a folder stands for all such files below it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AREAS = ("README.md", "CONTRIBUTING.md", "docs", "examples/README.md", "rl_plugins")
# Pages that are no prose of ours, or made from the code: from the root of the checkout.
LEFT_OUT = (
    "docs/english.py",
    "docs/site",
    "docs/evidence.md",
    "docs/methods.md",
    "docs/choose.md",
    "rl_plugins/commands/export/templates",
)
SHOWN = 40  # warnings that are printed; the rest is counted
README_LINES, LINE = 150, 120

LONGEST = 40  # words of a sentence
MEDIAN = 20  # words of a sentence, over a file with at least TWENTY sentences
TWENTY = 20

# A word or construction -> what to write. In quotes and in code nothing is looked at.
WORDS = {
    r"shall": "must, will, or the imperative",
    r"whence|thence|hither|thither": "from where, therefore",
    r"thereof|therein|thereto|therewith|thereupon|wherein|whereof|whereupon|hereby|herein": "of it, in it, where",
    r"whilst|amongst|albeit|nought|naught|aught|ere|lest|oft|unto|nigh|yonder|save for": "while, among, although",
    r"upon": "on, after",
    r"of which|of whom|in whose": "two sentences, or a relative clause with 'that'",
    r"from which(?: on)?": "'lowest ... that', 'after which'",
    r"so to speak|as it were|if you will|needless to say|it goes without saying": "leave it out",
    r"for good|for ever": "permanently, without end",
    r"anew": "again",
    r"in vain": "without effect",
    r"stands? (?:in|behind|beside|there|here)(?! for)": "is in, follows",
    r"lies? (?:in|behind|beside|there|on)(?! (?:\[|\(|\d|an? interval|the (?:inner|outer)))": "is in, is saved in",
    r"beside": "together with, next to",
    r"behind": "after",
    r"mends?|mended": "fixes, repairs",
    r"dear(?:er|est|ly)?": "expensive",
    r"at sight": "at a glance",
    r"the like": "name the things, or 'such as'",
    r"(?<!there )(?:is|are|was|were) (?-i:none)(?! of)": "say what is missing: 'is not an optimizer step'",
    r"could not be had|can be had|is to be had": "is not available",
    r"(?:has|have) not(?=\W*$|[,.;:])": "does not have",
    r"the same with": "name the thing",
    r"(?:keeps?|kept) the books|the books of": "tracks where tokens come from",
    r"on paper": "expected, before the run",
    r"not told apart": "no significant difference",
    r"arms?": "variant",
    r"dials?": "setting",
    r"is to (?:stay|be saved|leave)|are to (?:stay|be saved|leave)": "you want to keep, save, remove",
}
# Two dots between two ends are a range (1 .. T).
ELLIPSIS = re.compile(r"(?<![./])\.\.(?![./])")
RANGE = re.compile(r"(?<=[\w\])}>=]) \.\. (?=[\w(*>=])")
# Help of a parameter or option begins with a noun phrase, not with one of these.
_NOT_A_NOUN = """
    how what which whether where when why who whose if for to in at of by with from
    use set enable make do does is are give take takes let lets turn be
    added subtracted divided multiplied clipped true false"""
NOT_A_NOUN = set(_NOT_A_NOUN.split())
# Help of a command or flag begins with one of these.
_VERBS = """
    add build check compare copy create describe draw drop explain export find fuse keep leave list look make
    measure name print put read repeat replace report run save search send serve show skip start stop suggest
    summarize test train use write"""
VERBS = set(_VERBS.split())
# Sections of a method's docstring, in this order.
SECTIONS = ("Reconstruction", "Symbols", "Special cases", "State", "Logs", "Raises", "Source")

_QUOTED = re.compile(r"\"[^\"\n]*\"|“[^”]*”")
_CODE = re.compile(r"``[^`]*``|`[^`]*`")
_END = re.compile(r"(?<=[.!?])[)\"'*]*\s+(?=[A-Z`*\[(\"'0-9]|verl\b|vLLM\b|torch\b)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|cf|vs|resp|Eq|Fig|Sec|No|arXiv|St|al)\.$")


@dataclass(frozen=True)
class Prose:
    """A paragraph, a list item, a cell of a table, or a message.

    Args:
        where: "file:line".
        short: it may be a fragment (a cell, a help text): sentence length counts, the median does not.
    """

    where: str
    text: str
    short: bool = False


@dataclass(frozen=True)
class Problem:
    where: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {' '.join(self.text.split())[:160]}"


# ---- rules


def plain(text: str) -> str:
    """The text without code and quotations, each replaced by one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "URL", text)
    text = _CODE.sub("X", text)
    text = re.sub(r":(?:class|func|meth|mod):X", "X", text)
    return _QUOTED.sub("X", text)


def sentences(text: str) -> list[str]:
    """Sentences of a paragraph. A section of a docstring ("Logs: a, ..; b, ..") is a list, whose items end with `;`."""
    out: list[str] = []
    flat = " ".join(plain(text).split())
    if re.match(rf"(?:{'|'.join(SECTIONS)}):", flat):
        flat = re.sub(r";\s+(\w)", lambda m: f". {m[1].upper()}", flat)
    for part in _END.split(flat):
        if out and _ABBREVIATION.search(out[-1]):
            out[-1] += " " + part
        elif part:
            out.append(part)
    return out


def words(sentence: str) -> int:
    return len(re.findall(r"[A-Za-z0-9][\w'’.,/%-]*", sentence))


def problems_of(prose: Iterable[Prose]) -> list[Problem]:
    """What breaks the rules, in the order of the text."""
    found = []
    lengths = []
    first = ""
    for piece in prose:
        first = first or piece.where.rpartition(":")[0]
        text = plain(piece.text)
        for words_, instead in WORDS.items():
            for match in re.finditer(rf"\b(?:{words_})\b", text, re.IGNORECASE):
                around = text[max(0, match.start() - 40) : match.end() + 40]
                found.append(Problem(piece.where, f"'{match[0]}' -> {instead}", around))
        if match := ELLIPSIS.search(RANGE.sub(" to ", text)):
            around = text[max(0, match.start() - 40) : match.end() + 40]
            found.append(Problem(piece.where, "'..' -> name the rest; '...' in an example", around))
        for sentence in sentences(piece.text):
            n = words(sentence)
            if n > LONGEST:
                found.append(Problem(piece.where, f"{n} words in one sentence, {LONGEST} are the most", sentence))
            if not piece.short and n > 3:
                lengths.append(n)
    if len(lengths) >= TWENTY and median(lengths) > MEDIAN:
        found.append(Problem(first, f"the median sentence has {median(lengths):g} words, {MEDIAN} are the most", ""))
    return found


def help_problems(where: str, text: str) -> list[Problem]:
    """Of the help of a parameter or of an option with a value: it begins with a noun phrase, perhaps after the paper's
    symbol ("K, rollouts of a prompt")."""
    first = re.match(r"[\"'`(]*([A-Za-z]+)", text)
    if first and first[1].lower() in NOT_A_NOUN:
        return [Problem(where, f"help begins with '{first[1]}' -> begin with a noun phrase", text)]
    return []


def command_problems(where: str, text: str) -> list[Problem]:
    """Of the help of a command or flag: it begins with a verb."""
    first = (text.split() or [""])[0].strip("`.,:")
    if first.lower() not in VERBS:
        return [Problem(where, f"help begins with '{first}' -> begin with a verb (docs/english.py: VERBS)", text)]
    return []


def section_problems(where: str, docstring: str) -> list[Problem]:
    """Of a method's docstring: sections have fixed names in a fixed order."""
    names = re.findall(r"^(?:    )?([A-Z][A-Za-z]*(?: [a-z]+)?):(?: |$)", docstring, re.MULTILINE)
    known = [name for name in names if name in SECTIONS]
    if known != sorted(known, key=SECTIONS.index):
        return [Problem(where, f"sections in the order {known} -> {', '.join(SECTIONS)}", "")]
    return []


# ---- where prose is


def prose_of(path: Path, root: Path | None = None) -> list[Prose]:
    """All prose of a Markdown or Python file."""
    name = str(path.relative_to(root)) if root else str(path)
    reader = {".md": _of_markdown, ".py": _of_python}[path.suffix]
    return list(reader(name, path.read_text()))


def _of_markdown(name: str, text: str) -> Iterator[Prose]:  # noqa: C901  # a branch a kind of line
    """Paragraphs, list items and cells; no code, no headings, no generated parts."""
    block: list[str] = []
    start, fenced, generated = 1, False, False
    previous = ""

    def flush() -> Iterator[Prose]:
        if block:
            yield Prose(f"{name}:{start}", " ".join(block))
            block.clear()

    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("```"):
            yield from flush()
            fenced = not fenced
        elif fenced:
            pass
        elif bare.startswith("<!--"):
            yield from flush()
            generated = ("generated" in bare or generated) and not bare.startswith("<!-- end")
        elif generated:
            pass
        elif bare.startswith("|"):
            yield from flush()
            for cell in re.split(r"(?<!\\)\|", bare.strip("|")):
                if re.search(r"[A-Za-z]", cell):
                    yield Prose(f"{name}:{number}", cell.strip(), short=True)
        elif not bare or bare.startswith("#"):
            yield from flush()
        elif line.startswith("    ") and not block and not previous.lstrip().startswith(("-", "*")):
            pass  # indented code
        else:
            if re.match(r"(?:[-*]|\d+\.)\s", bare):
                yield from flush()
                bare = re.sub(r"^(?:[-*]|\d+\.)\s+", "", bare)
            if not block:
                start = number
            block.append(bare)
        if bare:
            previous = line
    yield from flush()


def _of_python(name: str, text: str) -> Iterator[Prose]:
    """Docstrings (without indented formulas and examples), and every other text of five words or more."""
    tree = ast.parse(text)
    docstrings = {}
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings[id(first.value)] = first.value
        if isinstance(node, ast.JoinedStr):
            inside.update(id(part) for part in ast.walk(node) if part is not node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Paper", "Regex"):
            inside.update(id(part) for part in ast.walk(node))
    for node in docstrings.values():
        yield from _of_docstring(name, node.lineno, str(node.value))
    for node in ast.walk(tree):
        if id(node) in inside or id(node) in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values]
            found = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = node.value
        else:
            continue
        if len(re.findall(r"\b[a-z]{2,}\b", found)) >= 5 and "\n\n" not in found.strip() and "{%" not in found:
            for line in found.splitlines():
                yield Prose(f"{name}:{node.lineno}", line, short=True)


def _of_docstring(name: str, line: int, text: str) -> Iterator[Prose]:
    lines = text.expandtabs().splitlines()
    indents = [len(x) - len(x.lstrip()) for x in lines[1:] if x.strip()]
    base = min(indents, default=0)
    block: list[str] = []
    start, section = line, False

    def flush() -> Iterator[Prose]:
        if block:
            yield Prose(f"{name}:{start}", " ".join(block))
            block.clear()

    for offset, raw in enumerate(lines):
        indent = 0 if offset == 0 else max(0, len(raw) - len(raw.lstrip()) - base)
        bare = raw.strip()
        if not bare:
            yield from flush()
            continue
        if indent == 0:
            section = bool(re.fullmatch(r"[A-Z][A-Za-z ]*:|Class attributes a method sets:", bare))
            if section or bare.startswith(("- ", "|", "\b")):
                yield from flush()
            if section or bare.startswith("|") or bare == "\b":
                continue
        elif section:
            if indent == 4:
                yield from flush()  # a new entry
        elif indent >= 4 or (indent and not block):
            yield from flush()
            continue  # a formula or an example
        if not block:
            start = line + offset
        block.append(bare)
    yield from flush()


def files(paths: Iterable[Path]) -> list[Path]:
    out = []
    for path in paths:
        found = sorted(p for p in path.rglob("*") if p.suffix in (".md", ".py")) if path.is_dir() else [path]
        out += [p for p in found if "__pycache__" not in p.parts]
    return out


def check(path: Path, root: Path | None = None) -> list[Problem]:
    """What breaks the rules in one file; help of `param(...)` and sections of method docstrings included."""
    prose = prose_of(path, root)
    found = problems_of(prose)
    if path.suffix == ".py":
        name = str(path.relative_to(root)) if root else str(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "param":
                texts = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "help")]
                for text in texts:
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        found += help_problems(f"{name}:{node.lineno}", text.value)
            if isinstance(node, ast.ClassDef) and "methods" in path.parts:
                found += section_problems(f"{name}:{node.lineno}", ast.get_docstring(node) or "")
    return found


def help_of_commands() -> Iterator[Problem]:
    """Of the help of every command, option and flag of `rl-plugins`."""
    import typer

    from rl_plugins.commands.cli import app

    todo: list[tuple[str, Any]] = [("rl-plugins", typer.main.get_command(app))]
    while todo:
        name, command = todo.pop()
        for sub, found in getattr(command, "commands", {}).items():
            todo.append((f"{name} {sub}", found))
        if name == "rl-plugins":
            continue
        yield from command_problems(name, command.help or "")
        for option in command.params:
            where, text = f"{name} {option.name}", getattr(option, "help", None) or ""
            if option.name == "help":
                continue
            yield from (
                command_problems(where, text) if getattr(option, "is_flag", False) else help_problems(where, text)
            )
            if not text[:1].isupper() or not text.endswith("."):
                yield Problem(where, "help is a capitalized phrase that ends with a period", text)


def readme_problems(path: Path) -> Iterator[Problem]:
    """Of the README: it is short."""
    lines = path.read_text().splitlines()
    if len(lines) >= README_LINES:
        yield Problem(path.name, f"{len(lines)} lines, {README_LINES - 1} are the most", "")
    for number, line in enumerate(lines, 1):
        if len(line) > LINE:
            yield Problem(f"{path.name}:{number}", f"{len(line)} characters, {LINE} are the most", line)


def main(arguments: Iterable[str]) -> None:
    """Prints what was found. The exit status is always 0."""
    given = [Path(argument) for argument in arguments]
    paths = files(given or [ROOT / area for area in AREAS])
    left_out = [] if given else [ROOT / path for path in LEFT_OUT]
    found = []
    for path in paths:
        if not any(path.is_relative_to(out) for out in left_out):
            found += check(path, None if given else ROOT)
    if not given:
        found += [*help_of_commands(), *readme_problems(ROOT / "README.md")]
    shown = found if given else found[:SHOWN]
    print("\n".join(f"warning: {problem}" for problem in shown) or "English: nothing found")
    if len(found) > len(shown):
        print(
            f"warning: {len(found) - len(shown)} more about English; python docs/english.py FILE shows all of a file."
        )


if __name__ == "__main__":
    main(sys.argv[1:])
