"""SIGKILL at random moments of a process that saves in a loop."""

from __future__ import annotations

from pathlib import Path

from kills import attack, save_warm_up

from rl_plugins.runtime.state import FOLDER


def test_what_a_killed_process_saved_is_found(tmp_path: Path) -> None:
    save_warm_up()
    left = attack(48, 0, tmp_path / "checkpoint")
    assert sum(left.values()) == 48
    assert sum(n for there, n in left.items() if there != FOLDER) > 10, "kills came in the midst of saves"
