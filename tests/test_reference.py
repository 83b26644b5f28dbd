"""The page of the reference: complete, and every field of it described."""

from __future__ import annotations

import ast
import dataclasses
import re

from rl_plugins import Plan, PlanRow, Rollouts, Rows, Run, Shape, Terms, Tokens, Update, testing
from rl_plugins.core.method import HOOKS
from rl_plugins.lab.pages.reference import entries, objects, reference_page, sections, undocumented
from rl_plugins.lab.pages.short_reference import short_page

# What the hooks are given and return, as the issue lists it.
WANTED = (
    *("Rollouts", "Groups", "Tokens", "TurnTable", "Terms", "Rows", "Update", "Shape", "Run"),
    *("PromptPool", "Plan", "PlanRow", "Queue", "Admission"),
    *("Prompt", "Trajectory", "Generate", "Score", "Call", "Service", "Endpoint", "Observation", "Environment"),
)


def test_every_object_of_the_hooks_is_there_and_every_field_is_described():
    text = reference_page()
    assert [name for name in WANTED if f"\n### {name}\n" not in text] == []
    assert undocumented() == []
    for module, thing in objects():
        assert f"`from {module} import {thing.__name__}`" in text
        assert getattr(__import__(module, fromlist=["_"]), thing.__name__) is thing


def test_links_and_tables_of_the_page_are_whole():
    text = reference_page()
    headings = {re.sub(r"[^a-z0-9_ -]", "", h.lower()).replace(" ", "-") for h in re.findall("^#+ (.*)$", text, re.M)}
    assert set(re.findall(r"\(#([^)]*)\)", text)) <= headings
    tables = re.findall(r"(?:^\|.*\|$\n?)+", text, re.M)
    assert len(tables) > 60
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table
    assert " at 0x" not in text
    for code in re.findall("```python\n(.*?)```", text, re.DOTALL):
        ast.parse(code)
    assert "```text\nmarked   between" in text


def test_sections_of_a_docstring_become_entries():
    doc = "What it is.\n\nArgs:\n    a, b: two\n        of them.\n    c: one.\n\nRaises:\n    ValueError: x.\n\nMore.\n"
    parts = list(sections(doc))
    assert [title for title, _ in parts] == ["", "Args", "Raises", ""]
    assert list(entries(parts[1][1])) == [("a, b", "two of them."), ("c", "one.")]
    assert parts[3][1].strip() == "More."


def test_the_short_page_has_what_a_method_and_its_tests_use():
    text = short_page()
    first = re.findall(r"^\| `(?:self\.)?(\w+)", text, re.M)
    assert {"check", "start", *HOOKS} <= set(first)
    for of in (Rollouts, Tokens, Shape, Terms, Rows, Update, Run, Plan, PlanRow):
        assert all(re.search(rf"`{f.name}[`:]", text) for f in dataclasses.fields(of)), of
    assert {"mean", "leave_one_out", "top_k", "state", "log", "rng", *testing.__all__, "TableEngine"} <= set(first)
    for table in re.findall(r"(?:^\|.*\|$\n?)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table
    assert "check_method(cls: " in text and "\\\\|" not in text
    assert text.count("\n") < 230 and len(text.split()) < len(reference_page().split()) / 3
