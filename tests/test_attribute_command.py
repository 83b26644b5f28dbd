"""`compare --attribute`: the arms are the cube, and the table says what was planted."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from test_compare import fake_logs, plan
from typer.testing import CliRunner

from rl_plugins.cli import app
from rl_plugins.commands import compare
from rl_plugins.commands.attribute import attributed, cube, table
from rl_plugins.compare import report
from rl_plugins.errors import ConfigError

METHODS = ["vade", "mc_grpo"]
BROUGHT = {"grpo": 0.2, "vade": 0.3, "mc_grpo": 0.25, "vade+mc_grpo": 0.45}


def logged(tmp_path, values=BROUGHT, seeds=(0, 1, 2)):
    comparison = plan(tmp_path, cube(METHODS), seeds=seeds)
    fake_logs(comparison, {label: {s: [v + 0.1 * s] * 10 for s in seeds} for label, v in values.items()})
    return comparison


def test_the_arms_are_all_subsets():
    assert cube(["a", "b", "c"]) == ["a", "b", "c", "a+b", "a+c", "b+c", "a+b+c"]
    with pytest.raises(ConfigError, match="6 methods, which are 64 arms. Name at most 5"):
        cube(list("abcdef"))
    with pytest.raises(ConfigError, match="names a twice"):
        cube(["a", "a"])


def test_what_was_planted_is_found(tmp_path):
    """Seeds differ by more than the methods; they are paired, so the intervals do not show it."""
    found = attributed(report.summarize(logged(tmp_path), ["reward"]), METHODS, "reward")
    assert found["total"] == pytest.approx(0.25) and found["seeds"] == [0, 1, 2]
    assert found["methods"]["vade"]["value"] == pytest.approx((0.1 + 0.2) / 2)
    assert found["methods"]["mc_grpo"]["value"] == pytest.approx((0.05 + 0.15) / 2)
    assert found["methods"]["vade"]["low"] == pytest.approx(0.15) == found["methods"]["vade"]["high"]
    assert "| vade | +0.150 (+0.150 to +0.150) |" in table(found) and "| all together | +0.250 |" in table(found)


def test_one_seed_has_no_interval_and_a_missing_metric_is_told(tmp_path):
    summary = report.summarize(logged(tmp_path, seeds=(0,)), ["reward"])
    assert "| vade | +0.150 |" in table(attributed(summary, METHODS, "reward"))
    del summary["arms"]["vade"]["metrics"]["reward"]
    with pytest.raises(ConfigError, match="The arm vade has not logged reward"):
        attributed(summary, METHODS, "reward")


def test_the_command_prints_it_after_the_runs(tmp_path, monkeypatch, capsys):
    comparison = logged(tmp_path)
    monkeypatch.setattr(compare, "run_all", lambda *_: 1.0)  # all were finished
    compare.run(comparison, ["reward"], 1, "steps", False, console=Console(width=120), attribute=METHODS)
    shown = capsys.readouterr().out
    assert "Shapley values of reward over 3 seeds" in shown and "+0.150" in shown
    assert json.loads((comparison.out / "attribution.json").read_text())["total"] == pytest.approx(0.25)


def test_dry_run_names_every_arm(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("max_steps: 2\n")
    words = ["compare", str(config), *METHODS, "--attribute", "--seeds", "1", "--dry-run", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert [line.split(" seed")[0] for line in result.output.splitlines() if " seed 0 (to run)" in line] == list(
        BROUGHT
    )
