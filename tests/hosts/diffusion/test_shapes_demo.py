"""The demo for diffusion policies: shapes, their warm start, one run of a comparison, the figure of samples."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.lab.compare.plan import LOG_VARIABLE, make_plan, parse_variants
from rl_plugins.lab.demo import flows, shapes
from rl_plugins.lab.demo.policy import Fit

pytestmark = pytest.mark.host


def test_the_reward_is_highest_for_the_shape_in_the_middle():
    classes = list(range(len(shapes.CLASSES)))
    assert shapes.centred(shapes.wanted(), classes).tolist() == [1.0] * 4
    moved = torch.stack([shapes.shape(c, 0, 1) for c in classes])
    by_hand = [1 - float(((a - b) ** 2).mean()) for a, b in zip(moved, shapes.wanted(), strict=True)]
    assert shapes.centred(moved, classes).tolist() == pytest.approx(by_hand) and max(by_hand) < 1
    assert [int((shapes.shape(c, 1, 2) > 0).sum()) for c in classes] == [25, 16, 9, 9]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy after a short warm start, where the demo looks for it."""
    model, losses = shapes.build_model(), []
    assert sum(p.numel() for p in model.parameters()) == 200_132
    state = torch.random.get_rng_state()
    shapes.warm_start(model, Fit(steps=60, learning_rate=3e-3), lambda step, steps, loss: losses.append(loss))
    assert torch.equal(state, torch.random.get_rng_state())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10]) and len(losses) == 60
    folder = tmp_path_factory.mktemp("policy") / "policy"
    model.save_pretrained(folder)
    return folder


def test_one_run_of_the_demo(policy, tmp_path, monkeypatch):
    """As the comparison starts it: its log has what a report reads, and its sheets are drawn."""
    values = flows.config(policy, long=False) | {"batches": 2, "group_size": 4, "steps": 10, "sheet_every": 1}
    host = flows.Flows(yaml.safe_dump(values))
    params = {"branch_rollout": {"splits": [0, 3]}, "branch_pruning": {"depths": [8, 9]}}
    comparison = make_plan(host, parse_variants(["branch_grpo"], "grpo"), [3], tmp_path, params)
    for run in comparison.runs:
        run.folder.mkdir(parents=True)
        run.write_config()
        monkeypatch.setenv(LOG_VARIABLE, str(run.log_file))
        flows.main(run.arguments)
    grpo, branch = ([json.loads(line) for line in run.log_file.read_text().splitlines()] for run in comparison.runs)
    assert [line["step"] for line in branch] == [0, 1, 2] and {line["max_steps"] for line in branch} == {2}
    assert grpo[0]["eval_reward"] == branch[0]["eval_reward"]  # the same policy, the same seeds
    assert all(name in line for line in branch for name in ("eval_reward", "seconds"))
    assert grpo[-1]["rl_plugins/model_passes_total"] == 2 * 2 * 4 * 10
    # splits at the steps 0 and 3: one pass, then three of two branches, then six of four
    assert branch[-1]["rl_plugins/model_passes_total"] == 2 * 2 * (1 + 2 * 3 + 4 * 6)
    assert branch[-1]["rl_plugins/transitions_trained_total"] == 2 * 2 * (2 * 3 + 4 * 7 - 4 * 2)
    assert branch[-1]["rl_plugins/rows_made"] == 16 == branch[-1]["rl_plugins/rows_trained_total"]
    flows.draw_samples(comparison, tmp_path / "samples.png")
    assert Image.open(tmp_path / "samples.png").size[1] > 700


def test_methods_of_diffusion_get_this_demo(tmp_path):
    assert flows.needed(["branch_grpo"]) and flows.needed(["branch_rollout"])
    assert not flows.needed(["mc_grpo", "mdlm", "gdpo"])
    out = CliRunner().invoke(app, ["demo", "branch_grpo", "--dry-run", "--out", str(tmp_path)])
    assert out.exit_code == 0 and "--methods branch_grpo" in out.output and "shapes of 8 x 8 pixels" in out.output
    refused = CliRunner().invoke(app, ["demo", "branch_grpo", "--host", "verl", "--out", str(tmp_path)])
    assert refused.exit_code and "verl does not train diffusion policies" in refused.output + str(refused.exception)


def test_the_warm_started_policy_is_cached_and_damage_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SHAPE_WARM_START", Fit(steps=1))
    path = shapes.load_shape_policy(tmp_path)
    built = (path / "manifest.json").stat().st_mtime_ns
    assert shapes.load_shape_policy(tmp_path) == path and (path / "manifest.json").stat().st_mtime_ns == built
    (path / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"config\.json has changed"):
        shapes.load_shape_policy(tmp_path)
    assert shapes.scheduler().config.shift == 3.0
