"""The pages of the site: `landing.md` beside this file, the Markdown of the repository under other names, pages made
from the code (the reference, the papers, the map of the modules, results of the bench), and one page per method.

A link of a page is turned to where its target is on the site: another page, the page of a method for `methods.md#name`,
a generated page for an anchor of `docs/README.md`, or a page that shows the file. What cannot be found is an error.
"""

from __future__ import annotations

import ast
import fnmatch
import html
import inspect
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from rl_plugins.cards.catalog import card_of, entries, plugins
from rl_plugins.cards.results import measured_of
from rl_plugins.cards.usage import usage_of
from rl_plugins.core.files import claim
from rl_plugins.core.method import Bundle, Method
from rl_plugins.lab.pages import FILLED, on_site
from rl_plugins.lab.pages.methods import section, slug
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
EVIDENCE = ROOT / "examples" / "evidence"

# Navigation: heading -> pages in this order. A page of docs/ that is named nowhere is added to the last but one.
NAVIGATION = {
    "Start": ["readme", "install", "choose", "faq", "probe", "compare", "real", "examples"],
    "Hosts": ["trl", "trl_details", "verl", "verl_details", "verl_cpu", "diffusion", "masked_diffusion"],
    "Guides": [
        *("guides/index", "guides/rewards", "guides/environment", "guides/methods", "guides/hooks", "guides/rollout"),
        "guides/*",
    ],
    "Methods": ["methods", "papers", "open_questions"],
    "What was measured": ["evidence", "bench", "quality", "benchmarks"],
    "Tools": ["inspect", "trace", "audit", "fusion", "heads", "supervised", "disaggregated"],
    "In depth": ["rollouts", "samplers", "staleness", "agents_safety", "architecture", "map", "reference"],
    "Project": ["patches/index", "contributing", "changelog"],
}
REST = "In depth"
LANDING = "docs/site/landing.md"
# The page docs/README.md says in git what only the site has: its sections -> pages of the site.
CONTENTS = "docs/README.md"
SECTIONS = {
    "": "index.md",
    "pages-of-the-methods": "methods.md",
    "results-of-the-bench": "bench.md",
    "reference": "reference.md",
    "papers": "papers.md",
    "module-map": "map.md",
}

LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json", ".patch": "diff"}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"<picture>(.*?)</picture>", re.DOTALL)


def write(out: Path) -> None:
    """Writes the source of the site into `out`, which is emptied.

    Raises:
        ConfigError: `out` has other files.
        ValueError: a page links to a file that the repository does not have.
    """
    claim(out, "site")
    shutil.rmtree(out)
    claim(out, "site")
    if FIGURES.exists():
        shutil.copytree(FIGURES, out / "figures")
    site = Site(out)
    for source, target in site.pages.items():
        text = site.made[source]() if source in site.made else (ROOT / source).read_text()
        site.page(target, site.moved(FILLED.get(source, str)(text), source))
    for name in site.methods:
        site.page(f"methods/{name}.md", site.moved(method_page(name), "docs/methods.md"))
        if f"docs/bench/{name}.md" in site.made:
            site.page(f"methods/{name}.md", _toctree("", [f"/bench/{name}"]), add=True)
    site.page("methods.md", _toctree("", [f"methods/{name}" for name in site.methods]), add=True)
    issues = [page.removesuffix(".md") for page in site.pages.values() if page.startswith("patches/")]
    site.page("patches/index.md", _toctree("", [f"/{page}" for page in issues if page != "patches/index"]), add=True)
    site.page("index.md", "\n\n".join(site.navigation()), add=True)
    site.show_files()


class Site:
    """Where everything is on the site.

    Attributes:
        pages: file of the repository -> page of the site, both as relative POSIX paths.
        made: pages that only the site has, and what makes them.
        methods: the built-in methods and bundles.
        shown: files of the repository that pages link to and that get a page which shows them.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.made = on_site()
        self.pages = dict(_pages(self.made))
        self.methods = list(built_in())
        self.shown: set[str] = set()

    def page(self, target: str, text: str, add: bool = False) -> None:
        file = self.out / target
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{file.read_text()}\n\n{text}\n" if add else text + "\n")

    def moved(self, text: str, source: str) -> str:
        """The text of `source` with its links and pictures as they are on the site."""
        home = self.pages[source]
        if source == "docs/methods.md" and not text.startswith("# Methods"):
            home = "methods/any.md"

        def link(found: re.Match[str]) -> str:
            label, target = found.groups()
            moved = self.place(target, source, home)
            return f"{label}({moved})" if moved else label.removeprefix("[").removesuffix("]")

        def picture(found: re.Match[str]) -> str:
            dark, light, alt = (
                re.search(p, found[1]) for p in (r'srcset="([^"]+)"', r'src="([^"]+)"', r'alt="([^"]*)"')
            )
            if dark is None or light is None:
                raise ValueError(f"{source}: a picture needs a source with srcset and an img: {found[0]}")
            return _image(light[1], dark[1], html.unescape(alt[1]) if alt else "")

        pieces, at = [], 0
        for fence in _FENCE.finditer(text):
            pieces += [_LINK.sub(link, _PICTURE.sub(picture, text[at : fence.start()])), fence[0]]
            at = fence.end()
        return "".join([*pieces, _LINK.sub(link, _PICTURE.sub(picture, text[at:]))])

    def place(self, target: str, source: str, home: str) -> str:
        """The target of a link in `source` as it is written on the page `home`; empty for a folder."""
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            return target
        file = str(PurePosixPath(os.path.normpath(PurePosixPath(source).parent / path))) if path else source
        if file == "docs/methods.md" and anchor in self.methods:
            return _relative(f"methods/{anchor}.md", home)
        if file == CONTENTS and anchor in SECTIONS:
            return _relative(SECTIONS[anchor], home)
        if not path:
            return target
        if file in self.pages:
            return _relative(self.pages[file], home) + (f"#{anchor}" if anchor else "")
        if file.startswith("docs/figures/"):
            return _relative(file.removeprefix("docs/"), home)
        if (ROOT / file).is_dir():
            return ""
        if not (ROOT / file).exists():
            raise ValueError(f"{source} links to {target}, which does not exist.")
        self.shown.add(file)
        return _relative(f"files/{file}.md", home)

    def show_files(self) -> None:
        for file in sorted(self.shown):
            language = LANGUAGES.get(Path(file).suffix, "text")
            code = _code((ROOT / file).read_text(), language)
            self.page(f"files/{file}.md", f"---\norphan: true\nnosearch: true\n---\n# {_plain(file)}\n\n{code}")

    def navigation(self) -> Iterator[str]:
        left = [page.removesuffix(".md") for page in sorted(self.pages.values()) if page != "index.md"]
        left = [page for page in left if page == "patches/index" or not page.startswith(("patches/", "bench/"))]
        chosen: dict[str, list[str]] = {}
        for title, patterns in NAVIGATION.items():
            chosen[title] = []
            for pattern in patterns:
                fitting = fnmatch.filter(left, pattern)
                chosen[title] += fitting
                left = [page for page in left if page not in fitting]
        chosen[REST] += left
        chosen["Start"][0] = "Install and first runs <readme>"
        for title, pages in chosen.items():
            if pages:
                yield _toctree(title, pages)


def _pages(made: Iterable[str]) -> Iterator[tuple[str, str]]:
    yield LANDING, "index.md"
    yield "README.md", "readme.md"
    yield "CONTRIBUTING.md", "contributing.md"
    yield "CHANGELOG.md", "changelog.md"
    for folder in ("benchmarks", "examples"):
        yield f"{folder}/README.md", f"{folder}.md"
    for file in sorted((ROOT / "patches").rglob("*.md")):
        name = file.relative_to(ROOT).as_posix()
        yield name, name.replace("README.md", "index.md")
    for page in sorted({f.relative_to(ROOT).as_posix() for f in (ROOT / "docs").rglob("*.md")} | set(made)):
        if page not in (CONTENTS, LANDING):
            yield page, page.removeprefix("docs/").replace("README.md", "index.md")


# ---- the page of a method


@cache
def built_in() -> dict[str, type[Method] | Bundle]:
    """The methods and bundles of this package, by name."""
    foreign = plugins()
    return {entry.name: registry.load(entry.name, foreign) for entry in entries(foreign)}


def method_page(name: str) -> str:
    """The page of a method or bundle: card, rule, what we measured with its figure, and how to use it. Links are those
    of `docs/methods.md`."""
    found = built_in()[name]
    parts = [f"# {name}", section(found, whole=False).split("\n\n", 1)[1]]
    if not isinstance(found, Bundle):
        first, _, rest = inspect.cleandoc(found.__doc__ or "").partition("\n\n")
        known = " ".join(first.split()) in " ".join(parts[1].split())
        parts += ["## The rule", rule(rest if known else f"{first}\n\n{rest}")]
    standing = card_of(found).standing
    parts += [
        f"## What we measured\n\n**Whether to use it:** {standing.word}. {standing.why}".rstrip(),
        *_measured(found),
    ]
    parts += ["## How to use it", *_usage(found)]
    paper = card_file(found).paper
    assert paper is not None
    parts += ["## How to cite", _code(paper.bibtex(name), "bibtex")]
    return "\n\n".join(parts)


def _usage(found: type[Method] | Bundle) -> Iterator[str]:
    usage = usage_of(found)
    if settings := card_file(found).paper_settings:
        yield f"With host options of the paper: {_plain(', '.join(settings))}."
    yield from map(_plain, usage.notes)
    if "trl" in usage.hosts:
        yield "TRL, in the YAML config of a run:\n\n" + _code(usage.yaml(), "yaml")
        yield "TRL, on the command line:\n\n" + _code(f"rl-plugins trl grpo --config run.yaml {usage.flags()}", "bash")
        imports = "from rl_plugins.trl import GRPOConfig, GRPOTrainer"
        yield "TRL, in Python:\n\n" + _code(f"{imports}\n\nargs = {usage.python()}", "python")
    if "verl" in usage.hosts:
        yield "verl:\n\n" + _code(usage.command(), "bash")


def rule(doc: str) -> str:
    """A docstring as Markdown: indented lines are code, `Word:` at the start of a paragraph is bold, what lies between
    backticks is code, and nothing else has a meaning in Markdown."""
    runs = itertools.groupby(doc.splitlines(), key=_Indented())
    parts = [(indented, inspect.cleandoc("\n" + "\n".join(lines))) for indented, lines in runs]
    out, title = [], ""
    for indented, text in parts:
        if title:
            items = re.split(r"\n(?=\S)", text)
            out.append(f"**{title}:**\n\n" + "\n".join(f"- {_plain(' '.join(item.split()))}" for item in items))
            title = ""
        elif indented:
            out.append(_code(text, "text"))
        else:
            for block in re.split(r"\n{2,}", text):
                label = re.match(r"(Raises|Args|Attributes):$|([A-Z][a-z]+(?: [a-z]+)?): ", block)
                title = label[1] or "" if label else ""
                if not title:
                    out.append(f"**{label[2]}:** {_plain(block[label.end() :])}" if label else _plain(block))
    return "\n\n".join(out)


class _Indented:
    """Says of each line whether it is indented; an empty line is as the line before it."""

    last = False

    def __call__(self, line: str) -> bool:
        self.last = line.startswith(" ") if line.strip() else self.last
        return self.last


def _measured(found: type[Method] | Bundle) -> Iterator[str]:
    rows = [
        f"| {m.claim} | {m.better} | {m.numbers} | [{m.page.removesuffix('.md')}]({m.page}#{m.where}) |"
        for m in measured_of(found.name, found.parts if isinstance(found, Bundle) else ())
    ]
    if rows:
        yield "\n".join(["| what | better is | numbers | where |", "|---|---|---|---|", *rows])
    sections = [f"[{title}](evidence.md#{slug})" for title, slug in evidence_sections(found)]
    if sections:
        yield "In the evidence: " + "; ".join(sections) + "."
    drawn = [script for script in scripts_of(found) if (FIGURES / "evidence" / f"{script}.png").exists()]
    for script in drawn:
        what = " ".join((ast_doc(EVIDENCE / f"{script}.py") or script).split("\n\n")[0].split())
        light, dark = (f"figures/evidence/{script}{suffix}.png" for suffix in ("", "-dark"))
        yield _image(light, dark, what)
        yield f"{_plain(what)} Drawn by [{script}.py](../examples/evidence/{script}.py)."
    if benched := (FIGURES / "bench" / f"{found.name}.png").exists():
        light, dark = (f"figures/bench/{found.name}{suffix}.png" for suffix in ("", "-dark"))
        yield _image(light, dark, f"{found.name} on the tasks of the bench")
        yield f"Curves of [its page of the bench](bench/{found.name}.md)."
    if not (drawn or benched):
        yield "There is no figure for it."


def scripts_of(found: type[Method] | Bundle) -> list[str]:
    """The evidence scripts that drive a method or a part of a bundle, those of its own name first."""
    parts = [built_in()[part] for part in found.parts] if isinstance(found, Bundle) else [found]
    modules = {part.__module__ for part in parts if not isinstance(part, Bundle)}
    names = {found.name, *bundles_with(found.name)}
    names |= {word for module in modules for word in module.removeprefix("rl_plugins.methods.").split(".")}
    own, others = [], []
    for file in sorted(EVIDENCE.glob("*.py")):
        if file.stem in names:
            own.append(file.stem)
        elif any(f"from {module} import" in file.read_text() for module in modules):
            others.append(file.stem)
    return own + others


def bundles_with(name: str) -> list[str]:
    """The bundles that a method is a part of."""
    return [found.name for found in built_in().values() if isinstance(found, Bundle) and name in found.parts]


def evidence_sections(found: type[Method] | Bundle) -> list[tuple[str, str]]:
    """(title, anchor) of the sections of docs/evidence.md whose title names the method, a part of it or its bundle."""
    names = {found.name, *scripts_of(found)[:1], *bundles_with(found.name)}
    names |= set(found.parts) if isinstance(found, Bundle) else set()
    titles = re.findall(r"^## (.+)$", (ROOT / "docs" / "evidence.md").read_text(), re.MULTILINE)
    return [(title, slug(title)) for title in titles if names & set(re.findall(r"\w+", title))]


# ---- pieces


def ast_doc(file: Path) -> str | None:
    return ast.get_docstring(ast.parse(file.read_text()))


def _toctree(title: str, pages: Iterable[str]) -> str:
    caption = f":caption: {title}\n" if title else ""
    return "\n".join(["```{toctree}", f":hidden:\n:maxdepth: 1\n{caption}", *pages, "```"])


def _image(light: str, dark: str, alt: str) -> str:
    return "\n\n".join(f"![{_plain(alt)}]({file}){{.only-{mode}}}" for file, mode in ((light, "light"), (dark, "dark")))


def _code(text: str, language: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _plain(text: str) -> str:
    """Text in which only backticks mean something."""
    pieces: Sequence[str] = re.split(r"(`[^`]+`)", text)
    return "".join(p if i % 2 else re.sub(r"([\\*_<>\[\]|$#])", r"\\\1", p) for i, p in enumerate(pieces))


def _relative(target: str, home: str) -> str:
    return os.path.relpath(target, PurePosixPath(home).parent).replace(os.sep, "/")
