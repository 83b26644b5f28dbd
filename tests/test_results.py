"""Records of what we measured: their files, their figures as text, and the verdict that follows from them."""

from __future__ import annotations

import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from rl_plugins.cards import results as module
from rl_plugins.cards.catalog import card_of
from rl_plugins.cards.info import info
from rl_plugins.cards.results import measured_of, read, results
from rl_plugins.core.method import Bundle
from rl_plugins.lab.pages.methods import measured, slug
from rl_plugins.runtime import registry
from rl_plugins.tools.supervised import LOSSES

ROOT = Path(__file__).parents[1]
FOLDER = Path(module.__file__).parent / "records"
SCRIPTS = [*(ROOT / "examples/evidence").glob("*.py"), *(ROOT / "examples/agents").glob("*.py")]


def sections() -> dict[str, str]:
    """Anchor -> text of each section of docs/evidence.md."""
    parts = re.split(r"^#+ ", (ROOT / "docs/evidence.md").read_text(), flags=re.M)[1:]
    return {slug(part.partition("\n")[0]): part for part in parts}


@pytest.mark.parametrize(
    ("record", "numbers"),
    [
        (
            {"value": [0.84, 0.01], "other": [0.1, 0.09], "baseline": "GRPO", "mean": 0.74, "low": 0.65, "high": 0.83},
            "0.84 ± 0.01 against 0.10 ± 0.09 (GRPO)",
        ),
        (
            {"value": [39, 19], "other": [8, 6], "baseline": "PPO", "unit": "%", "mean": 31, "low": 11, "high": 51},
            "39 ± 19 % against 8 ± 6 (PPO)",
        ),
        (
            {"mean": 0.077, "low": 0.051, "high": 0.103, "paired": True, "baseline": "GRPO"},
            "+0.077 ± 0.026 against GRPO",
        ),
        ({"mean": -1.8, "low": -4.4, "high": 0.8, "unit": "points"}, "-1.8 ± 2.6 points"),
        (
            {"value": [29.3, 0.8], "other": [28.2, 0.6], "mean": 1.1, "low": -0.1, "high": 2.3, "paired": True},
            "29.3 ± 0.8 against 28.2 ± 0.6; paired difference +1.1 ± 1.2",
        ),
        (
            {"mean": 1.57, "low": 1.22, "high": 1.59, "none": 1, "baseline": "plain batches"},
            "1.57 (1.22 to 1.59) times plain batches",
        ),
        (
            {"mean": 60, "low": 50, "high": 70, "none": 100, "unit": "%", "baseline": "the loop's"},
            "60 ± 10 % of the loop's",
        ),
        ({"value": [0.65], "other": [0.0], "mean": 0.65}, "0.65 against 0.00"),
        ({"note": "a warning in 2 of 80 runs"}, "a warning in 2 of 80 runs"),
    ],
)
def test_figures_as_text(record, numbers):
    assert read(json.dumps([{"method": "m", "claim": "c", "better": "higher", **record}]))[0].numbers == numbers


def test_a_record_with_an_unknown_field_or_without_one_is_refused():
    with pytest.raises(TypeError):
        read('[{"method": "m", "claim": "c", "better": "higher", "sign": "better"}]')
    with pytest.raises(TypeError):
        read('[{"method": "m", "claim": "c"}]')


def test_every_record_is_of_a_method_and_of_a_script_and_is_found_on_its_page():
    anchors = sections()
    for file in sorted(FOLDER.glob("*.json")):
        assert file.stem == "demo" or any(script.stem == file.stem for script in SCRIPTS), file.name
        for result in read(file.read_text()):
            assert result.method in LOSSES or registry.origins_of(result.method), result
            assert result.better in ("higher", "lower") and result.seeds >= 2 and result.numbers, result
            assert (result.page, result.where in anchors) == ("evidence.md", True), result
            assert result.low is None or result.low <= result.mean <= result.high, result


def test_imported_figures_stand_in_the_section_that_they_link_to():
    anchors, checked = sections(), 0
    for result in results():
        if not result.imported:
            continue
        known = re.sub(r"[\s,]+", " ", anchors[result.where])
        for figure in map(float, re.findall(r"\d*\.\d+|\d+", re.sub(r"(?<=\d),(?=\d)", "", result.numbers))):
            assert figure in map(float, re.findall(r"\d*\.\d+|\d+", known)), (figure, result)
            checked += 1
    assert checked > 600


def test_the_figures_of_a_card_are_those_of_the_records():
    """Also of `info` and the pages, which say what the record says and nothing else."""
    record = next(r for r in json.loads((FOLDER / "gdpo.json").read_text()) if "100 times" in r["claim"])
    found = next(r for r in measured_of("gdpo") if r.claim == record["claim"])
    assert (found.mean, found.low, found.high) == (record["mean"], record["low"], record["high"])
    assert found.numbers == "83.8 ± 0.1 % against 10.1 ± 8.7 (GRPO)"
    assert found in card_of(registry.load("gdpo")).measured
    line = f"{record['claim']}, {found.numbers}"
    assert line in info(registry.load("gdpo")) and line in measured([found])


def test_what_a_script_writes_is_read_as_its_result(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/evidence")
    common = importlib.import_module("common")
    mine, theirs = common.interval([0.8, 0.9, 0.7]), common.interval([0.1, 0.2, 0.3])
    common.write_records(
        tmp_path / "x.json",
        [
            common.record("gdpo", "right", "higher", mine, theirs, scale=100, unit="%", baseline="GRPO"),
            common.record("gdpo", "right", "higher", mine, theirs, difference=common.minus(mine, theirs)),
            common.record("gdpo", "right", "higher", 0.5, 0.25),
            common.record("gdpo", "seen", "higher", difference=(1.0, 0.83, 1.0)),
            common.record("gdpo", "speed", "higher", difference=[1.1, 0.9, 1.0], none=1, baseline="plain batches"),
        ],
    )
    apart, paired, bare, share, ratio = read((tmp_path / "x.json").read_text())
    half = 0.1 * stats.t.ppf(0.975, 2) / math.sqrt(3)  # of each arm
    assert apart.numbers == "80 ± 25 % against 20 ± 25 (GRPO)"
    assert apart.mean == 60 and apart.high - apart.mean == pytest.approx(100 * math.hypot(half, half), abs=0.5)
    assert paired.paired and paired.mean == pytest.approx(0.6) and (paired.low, paired.high) == (0.17, 1.03)
    assert (bare.low, bare.mean, bare.numbers) == (None, 0.25, "0.50 against 0.25")
    assert (share.low, share.high) == (0.83, 1.0)
    assert (ratio.none, ratio.paired) == (1, False)
    assert ratio.numbers.startswith("1.00 ± 0.25 times plain batches")


@pytest.mark.parametrize("name", [n for n in registry.all_names() if isinstance(registry.load(n), Bundle)])
def test_a_bundle_has_its_own_results_and_then_those_of_its_parts(name):
    parts = registry.load(name).parts
    own = [r for r in results() if r.method == name]
    of_parts = [replace(r, claim=f"`{part}`: {r.claim}") for part in parts for r in measured_of(part)]
    assert measured_of(name, parts) == own + of_parts
