"""Every method is in a world or has a reason, variants run in theirs, and a measurement goes on where it ended."""

from __future__ import annotations

import json

import pytest

from rl_plugins.core.method import Bundle
from rl_plugins.lab.quality import measure as measured
from rl_plugins.lab.quality.drive import Driver
from rl_plugins.lab.quality.measure import Job, jobs, read, run
from rl_plugins.lab.quality.variants import ABSENT, variants_of
from rl_plugins.lab.quality.worlds import ABOUT, WORLDS
from rl_plugins.lab.quality.worlds.processes import agents, sequences
from rl_plugins.lab.quality.worlds.tables import table
from rl_plugins.runtime import registry

SMALL = {
    **{kind: lambda kind=kind: table(kind, 0, prompts=40, dims=6) for kind in ("binary", "rewards")},
    "sequences": lambda: sequences(0, prompts=40, dims=6),
    "updates=2": lambda: sequences(0, updates=2, prompts=40, dims=6),
    "delay=2": lambda: sequences(0, updates=2, prompts=40, dims=6),
    "agents": lambda: agents(0, prompts=40, dims=6),
}


def test_every_method_acts_in_a_world_or_has_a_reason():
    names = {n for n in registry.all_names() if not isinstance(registry.load(n), Bundle)}
    acting = {m for name, make in SMALL.items() for v in variants_of(name, make(), 32) for m in v.methods}
    assert acting | set(ABSENT) == names
    assert not acting & set(ABSENT)
    assert set(ABOUT) == set(WORLDS)


@pytest.mark.parametrize("name", SMALL)
def test_every_variant_makes_a_gradient_in_its_world(name):
    world = SMALL[name]()
    variants = variants_of(name, world, 32)
    assert len({v.label for v in variants}) == len(variants)
    for variant in variants:
        methods = {m: {**p, "references": 8} if m == "dots" else p for m, p in variant.methods.items()}
        variant = type(variant)(**{**vars(variant), "methods": methods, "warm": min(variant.warm, 0.5)})
        driver = Driver(world, variant, 32, 0)
        driver.warm()
        made = [driver.batch() for _ in range(2)]
        assert any((m.gradient != 0).any() and m.signal for m in made), variant.label
        assert made[0].generated >= 24


def test_a_measurement_goes_on_where_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_world", lambda name, seed: table(name, seed, prompts=40, dims=6))
    wanted = jobs(["binary"], ["mc_grpo"], range(2), {32: 4})
    assert {j.variant for j in wanted} == {
        "grpo",
        "mc_grpo, 3 rollouts",
        "mc_grpo, 3 rollouts, clip 3",
        "mc_grpo, 7 rollouts",
    }
    file = tmp_path / "quality.jsonl"
    first = list(run(wanted[:3], file, 1))
    text = file.read_text()
    file.write_text(text[:-20])  # killed in the middle of the third record
    rest = list(run(wanted, file, 1))
    assert len(rest) == len(wanted) - 2
    assert set(read(file)) == {j.key for j in wanted}
    again = {k: v for k, v in rest[0].items() if k != "seconds"}
    assert again == {k: v for k, v in first[2].items() if k != "seconds"}
    assert first[0]["noise"][0] > 0 and set(first[0]["progress"]) == {"reward", "pass@1", "pass@8", "hardest quarter"}
    assert list(run(wanted, file, 1)) == []


def test_records_of_another_version_are_measured_again(tmp_path):
    file = tmp_path / "quality.jsonl"
    record = {"version": 0, **vars(Job("binary", 0, "grpo", 32, 4))}
    file.write_text(json.dumps(record) + "\n")
    assert not read(file)
