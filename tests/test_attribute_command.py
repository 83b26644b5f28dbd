"""`compare --attribute`: the variants are the cube, and the table says what was planted."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from test_compare import fake_logs, plan
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim
from rl_plugins.lab.compare import comparison, report
from rl_plugins.lab.compare.attribution import Cube, attributed, table
from rl_plugins.lab.compare.comparison import RunOptions

METHODS = ["vade", "mc_grpo"]
CUBE = Cube(("vade", "mc_grpo"))
BROUGHT = {"grpo": 0.2, "vade": 0.3, "mc_grpo": 0.25, "vade+mc_grpo": 0.45}


def logged(tmp_path, values=BROUGHT, seeds=(0, 1, 2)):
    comparison = plan(tmp_path, CUBE.variants, seeds=seeds)
    fake_logs(comparison, {label: {s: [v + 0.1 * s] * 10 for s in seeds} for label, v in values.items()})
    return comparison


def test_the_variants_are_all_subsets():
    assert Cube(("a", "b", "c")).variants == ["a", "b", "c", "a+b", "a+c", "b+c", "a+b+c"]
    with pytest.raises(
        ConfigError, match="6 methods, which are 64 variants. Name at most 5.* 4 pairs .* at most 42 variants"
    ):
        Cube(tuple("abcdef"))
    with pytest.raises(ConfigError, match="names a twice"):
        Cube(("a", "a"))
    with pytest.raises(ConfigError, match="No method is named. Name them, or set `methods`"):
        Cube(())
    with pytest.raises(ConfigError, match="--attribute-pairs is 0. It must be at least 1"):
        Cube(("a",), 0)


def test_a_sample_of_the_cube_for_many_methods(tmp_path):
    """Seven methods have 128 subsets; two pairs of orders need at most 26 of them, and the values still sum up."""
    names = ("vade", "mc_grpo", "d3s", "minpro", "brorl", "vcpo", "reward_audit")
    cube = Cube(names, 2)
    assert "+".join(names) in cube.variants and 20 < len(cube.variants) <= 25
    worth = dict(zip(names, (0.1, 0.2, 0.0, -0.1, 0.05, 0.0, 0.3), strict=True))
    values = {label: sum(worth[n] for n in label.split("+")) for label in cube.variants} | {"grpo": 0.0}
    comparison = plan(tmp_path, cube.variants)
    fake_logs(comparison, {label: {s: [v + 0.1 * s] * 10 for s in (0, 1, 2)} for label, v in values.items()})
    found = attributed(report.summarize(comparison, ["reward"]), cube, "reward")
    assert {n: of["value"] for n, of in found["methods"].items()} == pytest.approx(worth)
    assert sum(of["value"] for of in found["methods"].values()) == pytest.approx(found["total"])
    assert [of["sampling"] for of in found["methods"].values()] == pytest.approx([0.0] * 7, abs=1e-12)
    told = table(found)
    assert (
        "over 3 seeds, from 2 pairs of random orders" in told and "| vade | +0.100 (+0.100 to +0.100) | 0.000 |" in told
    )
    one = attributed(report.summarize(comparison, ["reward"]), Cube(names, 2), "reward")
    assert one == found, "the same orders when the command is given again"
    assert "not known" in table({**found, "methods": {"vade": {"value": 0.0, "sampling": None}}})


def test_what_cannot_be_attributed_is_refused_before_anything_is_trained(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("max_steps: 2\n")

    def refused(*words):
        result = CliRunner().invoke(app, ["compare", str(config), *words, "--dry-run", "--out", str(tmp_path / "o")])
        assert result.exit_code == 2 and not (tmp_path / "o").exists()
        return " ".join(result.output.split())

    both = refused("mc_grpo", "gdpo", "--attribute")
    assert "--attribute trains all of mc_grpo, gdpo together. The methods `mc_grpo` and `gdpo` both decide" in both
    assert "--vs is vade. With --attribute the baseline is the host" in refused(
        "mc_grpo", "--attribute", "--vs", "vade"
    )
    assert "--attribute-pairs is given without --attribute" in refused("vade", "--attribute-pairs", "2")
    assert "No method is named. Name them, or set `methods` in the config" in refused("--attribute")
    assert "parameter `column` is missing" in refused("linear_ts", "--attribute")


def test_the_methods_of_the_config_are_attributed(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("max_steps: 2\nmethods: [vade, mc_grpo]\n")
    words = ["compare", str(config), "--attribute", "--seeds", "1", "--dry-run", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(app, words)
    assert [line.split(" seed")[0] for line in result.output.splitlines() if " seed 0 (to run)" in line] == list(
        BROUGHT
    )


def test_what_was_planted_is_found(tmp_path):
    """Seeds differ by more than the methods; they are paired, so the intervals do not show it."""
    found = attributed(report.summarize(logged(tmp_path), ["reward"]), CUBE, "reward")
    assert found["total"] == pytest.approx(0.25) and found["seeds"] == [0, 1, 2]
    assert found["methods"]["vade"]["value"] == pytest.approx((0.1 + 0.2) / 2)
    assert found["methods"]["mc_grpo"]["value"] == pytest.approx((0.05 + 0.15) / 2)
    assert found["methods"]["vade"]["low"] == pytest.approx(0.15) == found["methods"]["vade"]["high"]
    assert "| vade | +0.150 (+0.150 to +0.150) |" in table(found) and "| all together | +0.250 |" in table(found)


def test_one_seed_has_no_interval_and_a_missing_metric_is_told(tmp_path):
    summary = report.summarize(logged(tmp_path, seeds=(0,)), ["reward"])
    assert "| vade | +0.150 |" in table(attributed(summary, CUBE, "reward"))
    del summary["variants"]["vade"]["metrics"]["reward"]
    with pytest.raises(ConfigError, match="The variant vade has not logged reward"):
        attributed(summary, CUBE, "reward")


def test_the_command_prints_it_after_the_runs(tmp_path, monkeypatch, capsys):
    claim(tmp_path / "out", "compare")
    planned = logged(tmp_path)
    monkeypatch.setattr(comparison, "run_all", lambda *_: 1.0)  # all were finished
    comparison.run(planned, ["reward"], RunOptions(planned.out), console=Console(width=120), cube=CUBE)
    shown = capsys.readouterr().out
    assert "Shapley values of reward over 3 seeds" in shown and "+0.150" in shown
    assert json.loads((planned.out / "attribution.json").read_text())["total"] == pytest.approx(0.25)


def test_dry_run_names_every_variant(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("max_steps: 2\n")
    words = ["compare", str(config), *METHODS, "--attribute", "--seeds", "1", "--dry-run", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert [line.split(" seed")[0] for line in result.output.splitlines() if " seed 0 (to run)" in line] == list(
        BROUGHT
    )
