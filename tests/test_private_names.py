"""Every private name of a host that an adapter uses is pinned, every change of a foreign object is listed.

`python tests/private_names.py` counts and lists the uses.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from private_names import ADAPTERS, ROOT, uses

from rl_plugins.lab.pages.source import with_changes

pytestmark = pytest.mark.host

MOST = {"trl": (23, 42), "verl": (20, 25)}  # names, places; they may only fall


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_private_name_that_is_used_is_pinned(adapter: str) -> None:
    pytest.importorskip(adapter)
    pinned = importlib.import_module(f"rl_plugins.{adapter}.compat").PINNED
    names = {p.name for p in pinned}
    assert not sorted({str(u) for u in uses(adapter) if u.name not in names})
    assert all(p.why for p in pinned) and len({(p.owner, p.name) for p in pinned}) == len(pinned)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_pins_that_nobody_uses_are_gone(adapter: str) -> None:
    pytest.importorskip(adapter)
    text = "\n".join(
        f.read_text(encoding="utf-8") for f in (ROOT / adapter).rglob("*.py") if f.name not in ("compat.py", "host.py")
    )
    pinned = importlib.import_module(f"rl_plugins.{adapter}.compat").PINNED
    assert not [p.name for p in pinned if not re.search(rf"\b{p.name}\b", text) and not p.optional]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_installed_host_has_what_is_pinned(adapter: str) -> None:
    pytest.importorskip(adapter)
    assert importlib.import_module(f"rl_plugins.{adapter}.compat").moved_symbols() == []


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_there_are_no_more_private_uses_than_before(adapter: str) -> None:
    found = uses(adapter)
    names, places = MOST[adapter]
    assert len({u.name for u in found}) <= names and len(found) <= places


def test_the_scan_finds_a_name_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "x.py").write_text(
        "from trl.trainer import _imported\n"
        "class Mine(Host):\n"
        "    def _overridden(self):\n"
        "        return super()._overridden()\n"
        "    def _own(self):\n"
        "        self._mine = 1\n"
        "        return self._mine, self._read, getattr(self, '_by_text', None), self.__ray_call__\n"
    )
    (tmp_path / "trl" / "host.py").write_text("class Trainer(Protocol):\n    _read: int\n")
    found = {u.name for u in uses("trl", tmp_path)}
    assert found == {"_imported", "_overridden", "_read", "_by_text", "__ray_call__"}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_page_of_the_host_lists_every_change(adapter: str) -> None:
    """`make site` puts the table there. What is said to end a change exists, and so does what makes it."""
    pytest.importorskip(adapter)
    root = ROOT.parent
    page = (root / "docs" / f"{adapter}_details.md").read_text(encoding="utf-8")
    changes = importlib.import_module(f"rl_plugins.{adapter}.changes").CHANGES
    shown = with_changes(adapter, page)
    assert all(cell in shown for change in changes for cell in (change.what, change.why))
    patches = {f.name.split("-")[0] for f in (root / "patches" / adapter).glob("*.patch")}
    for change in changes:
        named = set(re.findall(r"\b[TV]\d+\b", change.ends))
        assert named <= patches and (named or change.ends == "none"), change
        for by in change.by.split(", "):
            module, _, name = by.removesuffix(".py").partition(".")
            text = (ROOT / adapter / f"{module}.py").read_text(encoding="utf-8")
            assert not name or re.search(rf"(def|class) {name.split('.')[-1]}\b", text), change
