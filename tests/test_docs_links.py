"""No link of the Markdown files leads nowhere, and what the pages name in code exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from rl_plugins.runtime import registry

ROOT = Path(__file__).parents[1]
PLACES = ("*.md", "docs/**/*.md", "patches/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
PAGES = sorted({file for place in PLACES for file in ROOT.glob(place)})


def tokens(file: Path) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable("table").parse(file.read_text(encoding="utf-8")):
        yield token
        yield from token.children or ()


@cache
def anchors(file: Path) -> frozenset[str]:
    """What GitHub makes of the headings of a file, and the ids given in HTML."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    inside = False
    for token in tokens(file):
        if token.type == "inline" and inside:
            words = "".join(child.content for child in token.children or () if child.type in ("text", "code_inline"))
            name = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
            found.append(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
        if token.type.startswith("html"):
            found += re.findall(r'(?:id|name)=["\']([^"\']+)', token.content)
        inside = token.type == "heading_open"
    return frozenset(found)


def links(file: Path) -> Iterator[str]:
    for token in tokens(file):
        target = token.attrGet("href" if token.type == "link_open" else "src")
        if target and token.type in ("link_open", "image"):
            yield str(target)
        if token.type.startswith("html"):
            yield from re.findall(r'(?:href|src|srcset)=["\']([^"\']+)', token.content)


def test_files_that_messages_name_are_in_the_repository():
    """`rl-plugins --help` says so. `lab/pages` writes some only for the site."""
    place = re.compile(r"\b(?:docs|patches|examples|benchmarks)/[\w./-]*\w|\b[A-Z]{5,}\.md\b")
    named = {
        (file.name, path)
        for file in (ROOT / "rl_plugins").rglob("*.py")
        if not {"pages", "methods"} & {*file.parts}  # the sources of a method are files of its authors
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for path in place.findall(node.value)
    }
    assert len(named) > 20
    assert not {(file, path) for file, path in named if not (ROOT / path).exists() and not list(ROOT.glob(f"{path}*"))}


def broken(file: Path) -> list[str]:
    out = []
    for target in links(file):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        other = (file.parent / path).resolve() if path else file
        if not other.exists() or not other.is_relative_to(ROOT):
            out.append(f"{target}: no such file")
        elif anchor and other.suffix == ".md" and anchor not in anchors(other):
            out.append(f"{target}: no such heading")
    return out


def test_the_pages_are_found():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {file.name for file in PAGES}
    assert {ROOT / folder / "README.md" for folder in ("patches", "benchmarks", "examples")} <= set(PAGES)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_link_leads_somewhere(file: Path):
    assert broken(file) == []


def test_a_broken_link_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# One thing: `two`_x\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[fine](b.md#one-thing-two_x) [gone](c.md) [no](b.md#three) <a href='x'>\n\n"
        '`[code](d.md)` [web](https://example.com/x.md) <img src="p.png">\n\n| a |\n|---|\n| [cell](e.md) |\n'
    )
    assert broken(page) == [
        "c.md: no such file",
        "b.md#three: no such heading",
        "x: no such file",
        "p.png: no such file",
        "e.md: no such file",
    ]


def test_every_place_the_walkthrough_names_exists():
    text = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    places = re.findall(r"`([a-z_/]+\.py): ([A-Za-z_.]+)`", text)
    assert len(places) > 25
    for file, name in places:
        found = ast.parse((ROOT / "rl_plugins" / file).read_text(encoding="utf-8")).body
        for part in name.split("."):
            nodes = [n for n in found if getattr(n, "name", None) == part]
            assert nodes, f"{file} has no {name}"
            found = getattr(nodes[0], "body", [])


def test_every_place_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Where things are")[2].partition("\n## ")[0]
    places = [place for place in re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", table) if "NAME" not in place]
    assert len(places) > 20
    assert [place for place in places if not (ROOT / "rl_plugins" / place).exists()] == []


def test_every_method_the_page_of_samplers_names_exists():
    text = (ROOT / "docs" / "samplers.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("|")]
    named = {name for pair in cells for cell in pair for name in re.findall(r"`([a-z0-9_]+)`", cell)}
    assert len(named) > 15
    assert not named - set(registry.all_names())
