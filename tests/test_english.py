"""The rules of "English" in CONTRIBUTING.md, where a program can check them."""

from __future__ import annotations

from pathlib import Path

import pytest
from english import (
    Prose,
    check,
    command_problems,
    files,
    help_problems,
    problems_of,
    section_problems,
    sentences,
    words,
)

ROOT = Path(__file__).parents[1]

# Where every rule holds. A new file below one of these is checked by existing.
AREAS = [
    "CONTRIBUTING.md",
    "docs/agents_safety.md",
    "docs/architecture.md",
    "docs/rollouts.md",
    "docs/samplers.md",
    "docs/staleness.md",
    "docs/trl.md",
    "docs/verl.md",
    "docs/verl_cpu.md",
    "docs/walkthrough.md",
    "examples/README.md",
    "rl_plugins/commands/cli.py",
    "rl_plugins/methods",
]


@pytest.mark.parametrize("area", AREAS)
def test_area_keeps_the_rules(area):
    found = [str(p) for path in files([ROOT / area]) for p in check(path, ROOT)]
    assert not found, "\n".join(["", *found])


def _commands():
    import typer

    from rl_plugins.commands.cli import app

    todo = [("rl-plugins", typer.main.get_command(app))]
    while todo:
        name, command = todo.pop()
        for sub, found in getattr(command, "commands", {}).items():
            todo.append((f"{name} {sub}", found))
            yield f"{name} {sub}", found


def test_help_of_commands_begins_with_a_verb():
    found = [str(p) for name, command in _commands() for p in command_problems(name, command.help or "")]
    assert not found, "\n".join(["", *found])


def test_help_of_options_begins_with_a_noun_and_of_flags_with_a_verb():
    found = []
    for name, command in _commands():
        for option in command.params:
            if option.name == "help":
                continue
            where, text = f"{name} {option.name}", getattr(option, "help", None) or ""
            found += command_problems(where, text) if getattr(option, "is_flag", False) else help_problems(where, text)
            if not text[:1].isupper() or not text.endswith("."):
                found.append(f"{where}: help is a capitalized phrase that ends with a period: {text!r}")
    assert not found, "\n".join(["", *map(str, found)])


def _pairs():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## English")[2].partition("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith('| "')]
    return [tuple(cell.strip('" ') for cell in row) for row in rows]


def test_pairs_of_the_style_page():
    """What the page recommends keeps the rules; most of what it warns of is found by a program."""
    pairs = _pairs()
    assert len(pairs) >= 15 and all(len(pair) == 2 for pair in pairs)
    assert not [p for _, after in pairs for p in problems_of([Prose("after:1", after)])]
    found = [before for before, _ in pairs if problems_of([Prose("before:1", before)]) or help_problems("", before)]
    assert len(found) >= len(pairs) / 2, sorted({b for b, _ in pairs} - set(found))


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
