"""Papers that are no method: none is forgotten, none is listed twice, and who names one is told why."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.pages import papers as page
from rl_plugins.lab.pages.source import ROOT
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.papers import VERDICTS, no_method, reviewed


def test_a_paper_is_a_method_or_stands_in_the_file() -> None:
    """A method that lands takes its entry out of `papers.toml`; a piece that is none stays, and names the bundle."""
    assert not set(reviewed()) & set(registry.all_names())
    found = re.findall(r"\]\(https://arxiv\.org/abs/([^)]+)\)", page.page())
    pieces = {p.arxiv: p for p in reviewed().values() if p.part_of}
    assert {arxiv for arxiv, n in Counter(found).items() if n > 1} == set(pieces) == {"2509.12603", "2512.22560"}
    for arxiv, piece in pieces.items():
        assert card_file(piece.part_of).paper.arxiv == arxiv
    assert {paper.arxiv for paper in reviewed().values()} < set(found)


def test_every_entry_says_why() -> None:
    for paper in reviewed().values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", paper.name) and re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv)
        assert paper.verdict in VERDICTS and paper.why.endswith(".") and len(paper.why) > 40


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hecrl", "was reviewed and is not built. Offline control"),
        ("contest_trade", "is built, and is no method. Its rule"),
        ("mode_switching", "is built, and is no method. It is preference training.* `rl-plugins mode-pairs`"),
    ],
)
def test_who_names_one_is_told_why(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.select([name])
    assert re.search(said, str(error.value)) and f"arXiv {reviewed()[name].arxiv}" in str(error.value)
    assert "`rl-plugins list`" in str(error.value)


@pytest.mark.parametrize("name", list(reviewed()))
def test_every_one_of_them_is_refused_with_its_text(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.select(["vade", name])
    paper = reviewed()[name]
    assert str(error.value).endswith(
        f"`{name}` ({paper.title}, arXiv {paper.arxiv}) {VERDICTS[paper.verdict]}. {paper.why} Remove it from "
        f"`methods`; `rl-plugins list` shows all methods."
    )


def test_only_one_file_says_why_a_paper_is_not_built() -> None:
    safety, papers = (ROOT.parent / "docs" / "agents_safety.md").read_text("utf-8"), page.page()
    assert "(README.md#papers)" in safety and "## Reviewed and not built" in papers
    for paper in reviewed().values():
        if paper.verdict == "no":
            assert paper.arxiv not in safety and paper.why in papers


def test_an_installed_method_of_that_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file explains names that nobody has; it reserves none."""
    origin = registry.Origin("cascade", "somebody", "somebody:Cascade", lambda: McGrpo)
    monkeypatch.setattr(registry, "_origins", lambda name: [origin])
    with pytest.raises(ConfigError, match="its class says name = 'mc_grpo'"):  # it was loaded, and is checked
        registry.load("cascade")
    assert no_method("cascade") and not no_method("gdpo")
