"""A save that is cut off at any operation of the file system: the old state or the new one is found, never anything
else, and later saves work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import Disk
from messages import raises

from rl_plugins.core.errors import StateError
from rl_plugins.runtime.state import FOLDER, load_state, save_state

CONTENTS = [{"number": i, "methods": {"m": torch.full((3,), float(i))}} for i in range(3)]


@pytest.fixture(autouse=True)
def no_real_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the disk is modelled by `Disk`; flushing for real is slow."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def number_in(folder: Path) -> int | None:
    """Which of the contents is found; a mixture fails."""
    found = load_state(folder)
    if found is None:
        return None
    number: int = found["number"]
    assert torch.equal(found["methods"]["m"], CONTENTS[number]["methods"]["m"]) and set(found) == {"number", "methods"}
    return number


def operations(folder: Path, before: int | None) -> int:
    """How many operations a save takes."""
    if before is not None:
        save_state(folder, CONTENTS[before])
    with Disk() as disk:
        save_state(folder, CONTENTS[1])
    shutil.rmtree(folder)
    return len(disk.done)


KINDS: list[dict[str, Any]] = [{}, {"half": True}, {"power_loss": True}, {"half": True, "power_loss": True}]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: " and ".join(k) or "crash")
@pytest.mark.parametrize("before", [None, 0], ids=["first save", "overwrite"])
def test_a_crash_at_any_operation_leaves_the_old_state_or_the_new_one(
    before: int | None, kind: dict[str, Any], tmp_path: Path
) -> None:
    total = operations(tmp_path / "count", before)
    assert total > 12
    found = []
    for stop in range(total + 1):
        folder = tmp_path / str(stop)
        if before is not None:
            save_state(folder, CONTENTS[before])
        with Disk(stop, **kind) as disk:
            save_state(folder, CONTENTS[1])
        assert disk.stopped == (stop < total)
        found.append(number_in(folder))
        save_state(folder, CONTENTS[2])
        assert number_in(folder) == 2 and [p.name for p in folder.iterdir()] == [FOLDER]
    assert set(found) == {before, 1} and found[0] == before and found[-1] == 1
    assert found == sorted(found, key=lambda n: n == 1), "what was found once is not lost by going on"


def test_a_crash_of_the_save_after_a_crash_never_goes_back(tmp_path: Path) -> None:
    """Every place of the first crash, and every third of the second."""
    kind, total = KINDS[3], operations(tmp_path / "count", 0)
    for first in range(total):
        origin = tmp_path / f"{first}"
        save_state(origin, CONTENTS[0])
        with Disk(first, **kind):
            save_state(origin, CONTENTS[1])
        kept, second, cut = number_in(origin), first % 3, True
        while cut:
            folder = tmp_path / "again"
            shutil.copytree(origin, folder)
            with Disk(second, **kind) as disk:
                save_state(folder, CONTENTS[2])
            assert number_in(folder) in (kept, 2), (first, second)
            shutil.rmtree(folder)
            cut, second = disk.stopped, second + 3
        assert second > 12


def test_what_the_name_stands_for_is_on_the_disk_before_anything_is_removed(tmp_path: Path) -> None:
    """Files are flushed before their folder gets its name, and the name before the older state goes."""
    save_state(tmp_path, CONTENTS[0])
    with Disk() as disk:
        save_state(tmp_path, CONTENTS[1])
    steps = [(name, Path(path).name) for name, path in disk.done]
    named = steps.index(("rename", f"{FOLDER}.writing"))
    for file in ("state.json", "state.safetensors", f"{FOLDER}.writing"):
        assert ("fsync", file) in steps[:named]
    after = steps[named + 1 :]
    assert after.index(("fsync", tmp_path.name)) < next(i for i, (name, _) in enumerate(after) if name == "unlink")


def test_whole_copies_under_other_names_are_found_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a kill between the two renames leaves."""
    save_state(tmp_path / "old", CONTENTS[0])
    save_state(tmp_path / "new", CONTENTS[1])
    (tmp_path / "old" / FOLDER).rename(tmp_path / "old" / f"{FOLDER}.before")
    assert number_in(tmp_path / "old") == 0
    (tmp_path / "new" / FOLDER).rename(tmp_path / "old" / f"{FOLDER}.writing")
    caplog.clear()
    assert number_in(tmp_path / "old") == 1
    assert f"{FOLDER}.writing" in caplog.text and "cut off" in caplog.text
    assert sorted(p.name for p in (tmp_path / "old").iterdir()) == [f"{FOLDER}.before", f"{FOLDER}.writing"]
    (tmp_path / "old" / f"{FOLDER}.writing" / "state.json").unlink()
    assert number_in(tmp_path / "old") == 0


def test_an_older_copy_that_is_damaged_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_state(tmp_path, CONTENTS[0])
    (tmp_path / FOLDER).rename(tmp_path / f"{FOLDER}.before")
    (tmp_path / f"{FOLDER}.before" / "state.json").write_text("{}")
    with raises(StateError, match=rf"{FOLDER}\.before"):
        load_state(tmp_path)
