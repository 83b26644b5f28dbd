"""Every method is in a world or has a reason, variants run in theirs, and a measurement goes on where it ended."""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
import json
import math

import numpy as np
import pytest
from messages import raises
from rich.console import Console

from rl_plugins.cards.quality import ahead, sentence
from rl_plugins.cards.quality import measured as measured_summary
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle
from rl_plugins.lab.quality import measure as measured
from rl_plugins.lab.quality import page
from rl_plugins.lab.quality.drive import Driver, QualityVariant
from rl_plugins.lab.quality.measure import Job, jobs, read, run
from rl_plugins.lab.quality.session import session
from rl_plugins.lab.quality.summary import replication, spread
from rl_plugins.lab.quality.train import ABOUT as TRAINED_ABOUT
from rl_plugins.lab.quality.train import TRAINED, deceptive, train
from rl_plugins.lab.quality.variants import ABSENT, TRAINING, variants_of
from rl_plugins.lab.quality.worlds import ABOUT, WORLDS
from rl_plugins.lab.quality.worlds.masked import masked
from rl_plugins.lab.quality.worlds.processes import agents, sequences, team
from rl_plugins.lab.quality.worlds.tables import table
from rl_plugins.runtime import registry

SMALL = {
    **{kind: lambda kind=kind: table(kind, 0, prompts=40, dims=6) for kind in ("binary", "judged", "rewards")},
    "sequences": lambda: sequences(0, prompts=40, dims=6),
    "updates=2": lambda: sequences(0, updates=2, prompts=40, dims=6),
    "delay=2": lambda: sequences(0, updates=2, prompts=40, dims=6),
    "agents": lambda: agents(0, prompts=40, dims=6),
    "team": lambda: team(0, prompts=40, dims=6),
    "masked": lambda: masked(0, prompts=40, dims=6),
}


def test_every_method_acts_in_a_world_or_has_a_reason():
    names = {n for n in registry.all_names() if not isinstance(registry.load(n), Bundle)}
    variants = [v for name, make in SMALL.items() for v in variants_of(name, make(), 32)]
    acting = {m for v in [*variants, *itertools.chain(*TRAINING.values())] for m in v.methods}
    assert acting | set(ABSENT) == names
    assert not acting & set(ABSENT)
    assert set(ABOUT) == set(WORLDS) and set(TRAINED_ABOUT) == set(TRAINED) == set(TRAINING)


@pytest.mark.parametrize("name", SMALL)
def test_every_variant_makes_a_gradient_in_its_world(name):
    world = SMALL[name]()
    variants = variants_of(name, world, 32)
    assert len({v.label for v in variants}) == len(variants)
    for variant in variants:
        methods = {m: {**p, "references": 8} if m == "dots" else p for m, p in variant.methods.items()}
        variant = type(variant)(**{**vars(variant), "methods": methods, "warm": min(variant.warm, 0.1)})
        driver = Driver(world, variant, 32, 0)
        driver.warm()
        made = [driver.batch()]
        while len(made) < 16 and not ((made[-1].gradient != 0).any() and made[-1].signal):  # two groups may be equal
            made.append(driver.batch())
        assert len(made) < 16, variant.label
        assert made[0].generated >= 24


@pytest.mark.parametrize("name", TRAINED)
def test_every_variant_of_many_steps_moves_the_policy(name):
    world = TRAINED[name]()
    for variant in TRAINING[name]:
        reward, generated = train(world, variant, 1.0, 0, 2, 64)
        assert reward != pytest.approx(world.pass_rate.mean(), abs=1e-6) and generated >= 64, variant.label


def test_a_bonus_adds_its_own_terms_and_leaves_the_mean_of_the_host():
    """The term of epo is a sum over turns with weights of its own: a small one changes GRPO's gradient by little, and
    what it adds has the direction of the exact gradient of the mean entropy."""
    flat = deceptive()  # where every entropy is the largest
    world = dataclasses.replace(flat, thetas=np.random.default_rng(0).normal(size=flat.thetas.shape))
    made = {}
    for coefficient in (1e-9, 1e-6, 1.0):
        variant = QualityVariant("epo", {"epo": {"entropy_coeff": coefficient, "smooth_coeff": 0.0}})
        made[coefficient] = Driver(world, variant, 64, 0).batch().gradient
    np.testing.assert_allclose(made[1e-6], made[1e-9], atol=1e-5)
    step = np.zeros_like(world.thetas[-1])
    step[0] = 1e-5  # the logit of the first action in the first state
    ends = [dataclasses.replace(world, thetas=world.thetas + s * step).entropies[0] for s in (1, -1)]
    assert world.entropy_scores[0, 0] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-8)
    added = made[1.0] - made[1e-9]
    assert added @ world.entropy_scores.mean(0) > 0


def test_a_measurement_goes_on_where_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_world", lambda name, seed, _: table(name, seed, prompts=40, dims=6))
    wanted = jobs(["binary", "team"], ["mc_grpo"], range(2), {32: 4})
    assert {j.world for j in wanted} == {"binary"}  # the method does not act in a team
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


# ---- what is told


def test_a_session_keeps_records_summary_and_figures_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_world", lambda name, seed, _: table(name, seed, prompts=40, dims=6))
    root, out = tmp_path / "checkout", tmp_path / "out"
    (root / "rl_plugins" / "lab" / "quality").mkdir(parents=True)
    (root / "rl_plugins" / "cards").mkdir()
    console = Console(file=io.StringIO(), width=200)
    sizes = {32: 6, 64: 6}
    session(console, ["vade"], ["binary"], 2, 1, out, root, sizes=sizes)
    told = json.loads((root / "rl_plugins/cards/quality.json").read_text())
    records = list(read(out / "quality.jsonl").values())
    raw = gzip.decompress((root / "benchmarks/quality/records.jsonl.gz").read_bytes()).decode().splitlines()
    assert [json.loads(line) for line in raw] == records and len(records) == 8
    assert told["seeds"] == 2 and told["batches"] == {"32": 6, "64": 6}
    (place,) = (p for p in told["places"] if p["variant"] == "vade" and p["rollouts"] == 64)
    found = [r["progress"]["pass@1"] for r in records if r["variant"] == "vade" and r["rollouts"] == 64]
    assert place["progress"]["pass@1"][0] == pytest.approx((found[0][0] + found[1][0]) / 2, rel=0.01)
    half = told["spread"]["progress"] * math.hypot(found[0][1], found[1][1]) / 2
    assert place["progress"]["pass@1"][2] - place["progress"]["pass@1"][0] == pytest.approx(half, rel=0.02)
    assert {f.name for f in (root / "docs/figures/quality").iterdir()} == {"binary.png", "binary-dark.png"}
    text = console.file.getvalue()
    assert "vade" in text and "- binary, vade: " in text
    session(console, ["vade"], ["binary"], 2, 1, out, sizes=sizes, dry_run=True)
    assert "0 of 8 records to make" in console.file.getvalue()
    with raises(ConfigError, "acts in no world"):
        session(console, ["aepo_rollout"], ["binary"], 2, 1, out, sizes=sizes)


def test_intervals_are_as_wide_as_worlds_differ():
    rng = np.random.default_rng(0)
    errors = rng.uniform(0.1, 1, size=(4000, 2))
    values = 2 + rng.normal(size=(4000, 2)) * errors * 1.5  # half as much again as the batches say
    pairs = [(a, e, b, f) for (a, b), (e, f) in zip(values.tolist(), errors.tolist(), strict=True)]
    assert spread(pairs) == pytest.approx(1.5 * 1.96, rel=0.05) and spread([]) == 1.96
    told = replication(pairs)
    assert told["figures"] == 4000 and told["agree"] / 4000 == pytest.approx(
        math.erf(1.96 / 1.5 / math.sqrt(2)), abs=0.03
    )
    assert replication([(1.5, 0.1, 1.1, 9.0), (0.5, 0.1, 1.1, 9.0), (1.1, 0.1, 0.2, 0.1)]) == {
        "figures": 3,
        "agree": 2,
        "clear": 2,
        "same": 1,
    }


def place(progress, direction, noise, ratio, **more):
    pair = {t: [progress, progress, progress] for t in ("pass@1", "pass@8")}
    ways = {t: [direction, direction, direction] for t in pair}
    return {"progress": pair, "direction": ways, "noise": [noise] * 3, "ratio": dict.fromkeys(pair, ratio), **more}


def test_a_sentence_names_the_batches_in_which_a_method_is_ahead():
    base = {64: place(0.1, 1.0, 9.0, [1, 1, 1])}
    biased = {64: place(0.15, 0.8, 3.0, [1.5, 1.4, 1.6])}
    noisy = {64: place(0.05, 1.0, 19.0, [0.5, 0.4, 0.6])}
    # d^2 / (1 + c/n) with c = 192 against 576: .64 (n + 576) > n + 192 up to n = 490.7
    assert ahead(biased, base, "pass@1") == "more progress in batches up to 491 rollouts"
    assert ahead(noisy, base, "pass@1") == "less progress in batches of any size"
    assert ahead({64: place(0.1, 1, 9, [1.0, 0.8, 1.2])}, base, "pass@1") == "no difference was seen"
    # A cost that every batch has: little in large batches, so what is predicted for small ones is wrong.
    fixed = {64: place(0.04, 1, 24.0, [0.4, 0.3, 0.5]), 1024: place(0.7, 1, 0.4, [1.2, 1.1, 1.3])}
    both = {**base, 1024: place(0.6, 1, 0.6, [1, 1, 1])}
    said = "less progress in batches of 64 rollouts, more progress in batches of 1,024 rollouts"
    assert ahead(fixed, both, "pass@1") == said
    # GRPO makes none, so there is no ratio, and the intervals come apart.
    nothing, much = {64: place(0.0, 0.1, 99.0, None)}, {64: place(0.1, 1.0, 9.0, None)}
    nothing[64]["ratio"] = much[64]["ratio"] = {}
    assert ahead(much, nothing, "pass@1") == "more progress in batches of any size"
    assert ahead(nothing, nothing, "pass@1") == "no difference was seen"
    text = sentence(biased, base, ("pass@1", "pass@8"))
    assert text == (
        "progress for pass@1 1.50 x GRPO's at 64 rollouts (1.40 to 1.60); direction 0.80 for pass@1, 0.80 for pass@8; "
        "0.3 x its noise: more progress in batches up to 491 rollouts."
    )


def test_the_page_has_every_world_that_was_measured():
    told = measured_summary()
    text = page.results()
    assert all(f"### {world}\n" in text for world in {p["world"] for p in told["places"]})
    assert all(f"`{name}`" in text for name in ABSENT)
