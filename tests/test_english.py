"""The program that `make lint` warns with about English: what it finds, and that it never fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "english.py"
spec = importlib.util.spec_from_file_location("english", SCRIPT)
assert spec is not None and spec.loader is not None
english = importlib.util.module_from_spec(spec)
sys.modules["english"] = english
spec.loader.exec_module(english)
Prose, check, problems_of, sentences, words = (
    english.Prose,
    english.check,
    english.problems_of,
    english.sentences,
    english.words,
)
command_problems, help_problems, section_problems = (
    english.command_problems,
    english.help_problems,
    english.section_problems,
)


def test_findings_are_warnings(tmp_path):
    (tmp_path / "a.md").write_text("Rows shall be dropped.\n")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("warning: ") and "'shall'" in done.stdout


def _rules(text):
    return [p.rule for p in problems_of([Prose("x:1", text)])]


@pytest.mark.parametrize(
    "bad",
    [
        "Rows shall be dropped.",
        "A queue of objects (`Plan`, `Prompt`, ..) is kept.",
        "It lies in the trainer's checkpoint.",
        "A step without a token is none for the optimizer.",
        "The file, half of which is read, is closed.",
        "Reward from which a rollout is a success.",
        "This is " + "one of many words " * 12 + "here.",
    ],
)
def test_rule_finds(bad):
    assert len(_rules(bad)) == 1


@pytest.mark.parametrize(
    "good",
    [
        'The word "shall" in quotes and `of which` in code are not looked at.',
        "For t = 1 .. T the reward lies in [0, 1].",
        "None if there is none. Nothing is None.",
        "It was read (e.g. By hand) and is fine. " + "A short sentence. " * 30,
    ],
)
def test_rule_lets_pass(good):
    assert not _rules(good)


def test_sentences_and_words():
    assert sentences("One `a.b` two. Three (four) five! See [six](x.md).") == [
        "One X two.",
        "Three (four) five!",
        "See six.",
    ]
    assert words("Don't count - signs, but 7,680 numbers.") == 6
    assert len(sentences("Logs: a, share of rows; b, their mean.")) == 2


def test_help_and_sections():
    assert help_problems("", "whether rows leave") and not help_problems("", "K, rollouts of a prompt")
    assert command_problems("", "Everything about one method.") and not command_problems("", "Show one method.")
    assert section_problems("", "What.\n\n    Logs: a.\n\n    Symbols: b.\n")
    assert not section_problems(
        "", "What.\n\n    Symbols: b.\n\n    Logs: a.\n\n    Raises:\n        ValueError: no.\n"
    )


def test_markdown_and_docstrings_are_read(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(
        "# Shall\n\nText that shall go.\n\n```\nshall\n```\n\n| a | one shall |\n|---|---|\n\n    shall = 1\n"
    )
    module = tmp_path / "b.py"
    module.write_text(
        '"""What shall be.\n\n        shall = 1\n\n    Args:\n        a: what shall be.\n    """\n'
        'def f(x):\n    raise ValueError(f"the row {x} shall be given as a number")\n'
    )
    assert [p.where for p in check(page, tmp_path)] == ["a.md:3", "a.md:9"]
    assert [p.where for p in check(module, tmp_path)] == ["b.py:1", "b.py:6", "b.py:9"]
