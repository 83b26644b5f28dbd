"""The site: built once from the repository as `make site` builds it, and read as a browser would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from snowballstemmer import stemmer

from rl_plugins.cards.usage import usage_of
from rl_plugins.core.method import Bundle
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

pytestmark = pytest.mark.site

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "link": "href", "img": "src", "source": "srcset", "iframe": "src", "video": "src"}
METHODS = [name for name in registry.all_names() if not any(o.distribution for o in registry.origins_of(name))]


@dataclass
class Page(HTMLParser):
    """What a page links to, loads and can be linked at."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v or "" for k, v in attrs}
        self.ids |= {given[k] for k in ("id", "name") if k in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if given.get(LOADED.get(tag, ""), ""):
            self.loads.append(given[LOADED[tag]])

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "html"
    command = [sys.executable, "docs/site/build.py", "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return out


@pytest.fixture(scope="module")
def read(site: Path) -> dict[Path, Page]:
    found = {}
    for file in site.rglob("*.html"):
        found[file] = Page()
        found[file].feed(file.read_text(encoding="utf-8"))
    return found


def test_nothing_is_loaded_from_the_net(site: Path, read: dict[Path, Page]):
    for file, page in read.items():
        assert page.loads, file
        for target in page.loads:
            assert not re.match(r"[a-z]+:(?!image)|//", target), (file, target)
    for file in site.rglob("*.css"):
        for target in re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s]+)", file.read_text(encoding="utf-8")):
            assert not re.match(r"https?:|//", target), (file, target)


def test_every_link_leads_somewhere_and_every_page_is_led_to(site: Path, read: dict[Path, Page]):
    def of(file: Path) -> Iterator[tuple[Path, str, str]]:
        for target in read[file].links:
            if not re.match(r"[a-z]+:", target):
                path, _, anchor = target.partition("#")
                yield (file.parent / path).resolve() if path else file, anchor, target

    for file in read:
        for other, anchor, target in of(file):
            assert other in read, (file, target)
            assert not anchor or anchor in read[other].ids, (file, target)
    reached, left = set(), [site / "index.html"]
    while left:
        if (file := left.pop()) not in reached:
            reached.add(file)
            left += [other for other, _, _ in of(file)]
    assert set(read) - reached == {site / "search.html"}  # the search field leads there


def test_each_document_has_a_page(site: Path):
    for file in set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / f for f in ("README.md", "site/landing.md")}:
        page = str(file.relative_to(ROOT / "docs").with_suffix(".html")).replace("README", "index")
        assert (site / page).exists(), file
    for name in ("index", "readme", "contributing", "changelog", "examples", "benchmarks", "patches/index"):
        assert (site / f"{name}.html").exists(), name


def test_what_a_reader_is_shown_first(read: dict[Path, Page], site: Path):
    """The landing page has the picture and leads to hosts, guides, methods and questions; the bench's page of a method
    is below the method; no page speaks to who writes it."""
    landing = (site / "index.html").read_text(encoding="utf-8")
    main, sidebar = landing.split('id="furo-main-content"')[1], landing.split('id="furo-main-content"')[0]
    assert "<svg" in main
    for page in ("trl", "verl", "guides/index", "methods", "faq", "readme"):
        assert f'href="{page}.html"' in main and f'href="{page}.html"' in sidebar, page
    assert sidebar.count("toctree-l1") < 80
    for bench in site.glob("bench/*.html"):
        nested = re.search(rf'<li class="toctree-l(\d)"><a [^>]*href="bench/{bench.name}"', sidebar)
        assert nested and nested[1] == "3", bench
        assert f"methods/{bench.stem}.html" in sidebar
    assert not [file for file, page in read.items() if "do not edit" in page.text]


def test_pages_and_parts_that_only_the_site_has(read: dict[Path, Page], site: Path):
    wanted = {
        "reference": "TurnTable",
        "papers": "Reviewed and not built",
        "map": "core/estimators.py",
        "bench/vade": "Claims",
        "bench": "How it is decided",
        "choose": "Combinations that exclude each other",
        "supervised": "One-Token Rollout",
        "trl_details": "AsyncGRPOTrainer",
        "verl_details": "switched on by",
        "diffusion": "updates_per_batch",
        "samplers": "plans in rounds",
    }
    for name, words in wanted.items():
        assert words in read[site / f"{name}.html"].text, name


def test_sections_of_the_contents_are_pages(read: dict[Path, Page], site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import pages

    titles = re.findall(r"^## (.*)$", (ROOT / pages.CONTENTS).read_text(encoding="utf-8"), re.M)
    assert {pages.slug(title) for title in titles} == set(pages.SECTIONS) - {""}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_a_page(name: str, site: Path, read: dict[Path, Page]):
    page, found = read[site / "methods" / f"{name}.html"], registry.load(name)
    text = " ".join(page.text.split())
    paper = card_file(found).paper
    assert paper is not None and paper.title in text and paper.url in page.links
    usage = usage_of(found)
    assert usage.hosts
    if "trl" in usage.hosts:
        assert f"rl-plugins trl grpo --config run.yaml {' '.join(usage.flags().split())}" in text
    if "verl" in usage.hosts:
        assert " ".join(usage.command().split()) in text
    figures = [target for target in page.loads if "_images/" in target]
    assert figures or "There is no figure for it." in text
    assert not figures or sum("-dark" in target for target in figures) * 2 == len(figures)
    if not isinstance(found, Bundle):
        for line in (found.__doc__ or "").split("\n    Raises:")[0].splitlines()[1:]:
            if line.startswith(" " * 8) and line.strip() and "`" not in line:  # the rule, an indented block
                assert " ".join(line.split()) in text
        assert page.links.count("../methods.html") and "Source" in text


def test_the_search_knows_every_page(site: Path):
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8")[len("Search.setIndex(") : -1])
    stem = stemmer("english").stemWord
    pages, terms = index["docnames"], index["terms"]
    for name in METHODS:
        assert f"methods/{name}" in pages
        word = stem(name)
        assert word in terms or word in index["titleterms"], name
    found = terms[stem("advantage")]
    assert len({pages[i] for i in found} & {f"methods/{name}" for name in METHODS}) > 20
    assert not any(page.startswith("files/") and i in found for i, page in enumerate(pages))


def test_a_link_to_nothing_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import pages

    site = pages.Site(tmp_path)
    text = "[a](docs/trl.md#run) [m](docs/methods.md#vade) [f](constraints.txt) [d](patches/) [w](https://x.org)"
    moved = "[a](trl.md#run) [m](methods/vade.md) [f](files/constraints.txt.md) d [w](https://x.org)"
    assert site.moved(text, "README.md") == moved
    assert site.moved("```\n[a](b.md)\n```\n", "README.md") == "```\n[a](b.md)\n```\n"
    with pytest.raises(ValueError, match=r"README.md links to docs/no.md, which does not exist"):
        site.moved("[a](docs/no.md)", "README.md")
