"""Reading the cards: TOML beside the code, for built-in methods and for those of others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from rl_plugins.cards.catalog import card_of, entries
from rl_plugins.cards.info import info
from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import CardFile, _read, card_file

METHOD = '''
from rl_plugins import Method


class Theirs(Method):
    """A method of somebody else: every advantage is halved."""

    name = "theirs"
    does = "Halves every advantage"
    problems = ("no_signal",)

    def advantages(self, rollouts, advantages):
        return advantages / 2
'''
CARD = """
use_when = '''
Always,
if at all.'''
cost = "No rollouts."

[paper]
arxiv = "2401.00001"
title = "A paper"
authors = "First Last"
year = 2024
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """The class of a third party, in a module of its own, and the place for its card."""
    (tmp_path / "their_module.py").write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_module", raising=False)
    _read.cache_clear()
    yield importlib.import_module("their_module").Theirs, tmp_path / "theirs.toml"
    sys.modules.pop("their_module", None)


def test_a_class_without_a_card_works(theirs):
    cls, _ = theirs
    assert card_file(cls) == CardFile("theirs")
    assert card_of(cls).cost == "" and "theirs: a method of your own" in info(cls)


def test_a_card_beside_the_module_is_read(theirs):
    cls, place = theirs
    place.write_text(CARD)
    file = card_file(cls)
    assert file.use_when == "Always, if at all." and file.cost == "No rollouts."
    assert file.paper is not None and file.paper.url == "https://arxiv.org/abs/2401.00001"
    assert "theirs: A paper" in info(cls) and "Always, if at all." in info(cls)


def test_a_card_is_found_by_the_name_of_an_installed_method(theirs, monkeypatch):
    cls, place = theirs
    place.write_text(CARD)
    origin = registry.Origin("theirs", "somebody", "their_module:Theirs", lambda: cls)
    monkeypatch.setattr(registry, "origins_of", lambda name: [origin])
    assert card_file("theirs").cost == "No rollouts."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('use_wen = "Always."', "use_wen.*did you mean.*use_when"),
        ("use_when = Always", "must be a TOML file"),
        ('[paper]\narxiv = "2601.00001"\n', "paper.*title"),
        ("paper = 3", "paper"),
        ('[paper]\ntitel = "x"', "paper.*titel"),
    ],
)
def test_what_no_card_can_say_is_refused(theirs, text, said):
    cls, place = theirs
    place.write_text(text)
    with pytest.raises(ConfigError, match=f"(?i){said}"):
        card_file(cls)


def test_a_paper_is_shared_by_the_name_of_the_card_that_has_it(theirs):
    cls, place = theirs
    place.write_text('paper = "gdpo"')
    assert card_file(cls).paper == card_file("gdpo").paper is not None
    assert card_file(cls).paper_settings == card_file("gdpo").paper_settings


def test_a_built_in_card_is_the_same_by_name_and_by_class():
    for name in ("gdpo", "vade", "scope", "areal"):
        assert card_file(name) is card_file(registry.load(name))
        assert card_file(name).paper is not None
    assert card_file("otr").paper is not None, "a supervised loss has a card, too"
    assert card_file("nothing_of_this_name") == CardFile("nothing_of_this_name")


def test_open_questions_have_a_day(theirs):
    cls, place = theirs
    asked = '[[open]]\nquestion = "Which k? It is 3 here."\ntried = "The abstract."\n'
    place.write_text(f"{asked}looked = 2026-11-26\n")
    (found,) = card_file(cls).open
    assert found.text == "Which k? It is 3 here. Tried: The abstract. Last look: 2026-11-26."


@pytest.mark.parametrize("text", ['looked = "yesterday"', "", "looked = 2026-11-26T10:00:00", 'when = "2026-11-26"'])
def test_a_question_without_a_day_is_refused(theirs, text):
    cls, place = theirs
    place.write_text(f'[[open]]\nquestion = "Which k?"\ntried = "The abstract."\n{text}\n')
    with pytest.raises(ConfigError, match=r"\[\[open\]\]"):
        card_file(cls)


def test_a_method_that_equals_its_authors_code_has_their_numbers():
    """Stored vectors with the name of the paper's method, or of the first part of several."""
    stored = {file.stem for file in (Path(__file__).parent / "golden").glob("*.json")}
    of = {entry.name: card_file(entry.name).paper for entry in entries() if not entry.problem}
    papers = {of[n].arxiv for n in of for slug in stored if of[n] and (n == slug or n.startswith(f"{slug}_"))}
    assert not [e.name for e in entries() if e.fidelity == "code" and of[e.name].arxiv not in papers]


def test_what_was_not_published_is_asked_with_a_day():
    """A reconstruction says what is not known, where it was looked for and when; so does an abstract."""
    for entry in entries():
        if entry.kind == "method" and entry.fidelity in ("reconstruction", "abstract"):
            assert card_file(entry.name).open, entry.name
