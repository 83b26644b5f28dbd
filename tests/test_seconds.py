"""`rl_plugins/seconds`: parts lie in each other, the host's time is not ours, nothing is logged unless asked for."""

from __future__ import annotations

import pytest

from rl_plugins.runtime import seconds
from rl_plugins.runtime.seconds import VARIABLE, Seconds


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(seconds.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(seconds.time, "process_time", lambda: now[0] / 2)
    monkeypatch.setenv(VARIABLE, "1")

    def spend(s):
        now[0] += s

    return spend


def test_a_second_belongs_to_the_innermost_part(clock):
    s = Seconds()
    clock(100)
    with s.part("driver"):
        clock(1)
        with s.part("gather"):
            clock(2)
        clock(4)
        with s.part("programs"):
            clock(8)
            with s.part(""):
                clock(1000)
                with s.part("gather"):
                    clock(16)
            clock(32)
    clock(100)
    s.timed("split")(clock)(64)
    assert s.take() == {
        "rl_plugins/seconds": 127,
        "rl_plugins/seconds/driver": 5,
        "rl_plugins/seconds/gather": 18,
        "rl_plugins/seconds/programs": 40,
        "rl_plugins/seconds/split": 64,
        "rl_plugins/cpu_seconds": 63.5,
        "rl_plugins/cpu_seconds/driver": 2.5,
        "rl_plugins/cpu_seconds/gather": 9,
        "rl_plugins/cpu_seconds/programs": 20,
        "rl_plugins/cpu_seconds/split": 32,
    }
    again = s.take()
    assert len(again) == 10 and not any(again.values()), "of every step anew"
    assert {n for n in [*again, "rl_plugins/steps_skipped", "reward"] if Seconds.has(n)} == {*again}


def test_an_error_closes_its_part(clock):
    s = Seconds()
    with pytest.raises(ValueError, match="x"), s.part("driver"):
        clock(1)
        raise ValueError("x")
    clock(5)
    assert s.take()["rl_plugins/seconds"] == 1


@pytest.mark.parametrize("value", ["", "0", None])
def test_off_unless_asked_for(clock, monkeypatch, value):
    monkeypatch.delenv(VARIABLE) if value is None else monkeypatch.setenv(VARIABLE, value)
    s = Seconds()
    with s.part("driver"):
        clock(1)
    assert s.take() == {}
