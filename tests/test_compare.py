"""The comparison engine: what runs, what is not run twice, what the numbers say; and one real comparison."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import yaml
from scipy import stats
from typer.testing import CliRunner

from rl_plugins.cli import app
from rl_plugins.commands.compare import parse_seeds
from rl_plugins.compare import report
from rl_plugins.compare.plan import make_plan, parse_arms
from rl_plugins.compare.runs import is_finished, read_log, run_all
from rl_plugins.compare.trl import Trl
from rl_plugins.errors import ConfigError, RLPluginsError


def fake_logs(comparison, values):
    """Logs as a trainer writes them: `values[label][seed]` is a list of rewards."""
    for run in comparison.runs:
        run.folder.mkdir(parents=True)
        lines = [{"step": 0, "max_steps": 10, "seconds": 0.0, "started": 1.0}]
        for i, v in enumerate(values[run.arm.label][run.seed]):
            lines.append({"step": i + 1, "max_steps": 10, "seconds": float(i), "reward": v, "num_tokens": 100 * i})
        lines.append({"step": 10, "max_steps": 10, "seconds": 9.0, "eval_reward": values[run.arm.label][run.seed][-1]})
        run.log_file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def plan(tmp_path, methods=("mc_grpo",), seeds=(0, 1, 2), extra=(), **kwargs):
    (tmp_path / "run.yaml").write_text("max_steps: 10\n")
    host = Trl(tmp_path / "run.yaml", tuple(extra))
    return make_plan(host, parse_arms(methods, "grpo"), seeds, tmp_path / "out", **kwargs)


def test_every_arm_gets_every_seed_and_the_same_config(tmp_path):
    c = plan(tmp_path, ["mc_grpo", "vade+mc_grpo"], method_params={"mc_grpo": {"mad_eps": 0.5}}, extra=["--lr", "1"])
    assert [(r.arm.label, r.seed) for r in c.runs] == [
        (a, s) for s in (0, 1, 2) for a in ("grpo", "mc_grpo", "vade+mc_grpo")
    ]
    arguments = list(c.runs[2].arguments)
    assert arguments[:4] == ["--config", str(tmp_path / "run.yaml"), "--lr", "1"]
    assert arguments[arguments.index("--methods") + 1 :] == ["vade", "mc_grpo"]
    assert json.loads(arguments[arguments.index("--method_params") + 1]) == {"mc_grpo": {"mad_eps": 0.5}}
    assert list(c.runs[0].arguments)[-1] == "" and '"mc_grpo"' not in " ".join(c.runs[0].arguments)


@pytest.mark.parametrize(
    ("methods", "params", "match"),
    [
        (["mc_grop"], {}, "no method `mc_grop`"),
        (["vade", "vade"], {}, "name one twice"),
        (["vade"], {"mc_grpo": {}}, "Parameters are given for mc_grpo, which no arm names"),
        (["mc_grpo+gdpo"], {}, None),
    ],
)
def test_arms_are_checked(tmp_path, methods, params, match):
    if match is None:
        plan(tmp_path, methods)  # conflicts between methods are the run's to refuse, with its options known
        return
    with pytest.raises(ConfigError, match=match):
        plan(tmp_path, methods, method_params=params)


def test_seeds():
    assert parse_seeds("3") == [0, 1, 2] and parse_seeds("4,7") == [4, 7]
    for bad in ("x", "0", "1,1", "1,"):
        with pytest.raises(ConfigError, match="--seeds is"):
            parse_seeds(bad)


def test_means_intervals_and_paired_differences(tmp_path):
    c = plan(tmp_path)
    rng = np.random.default_rng(0)
    base = {s: list(rng.normal(0.5, 0.2, size=10)) for s in c.seeds}
    values = {"grpo": base, "mc_grpo": {s: [v + 0.1 + 0.01 * s for v in base[s]] for s in c.seeds}}
    fake_logs(c, values)
    summary = report.write(c, ["eval_reward", "reward"], seconds=1.0)
    ends = [base[s][-1] for s in c.seeds]
    entry = summary["arms"]["grpo"]["metrics"]["reward"]
    assert entry["mean"] == pytest.approx(np.mean(ends))
    assert entry["half"] == pytest.approx(stats.t.ppf(0.975, 2) * np.std(ends, ddof=1) / math.sqrt(3))
    difference = summary["arms"]["mc_grpo"]["metrics"]["eval_reward"]["difference"]
    assert difference["mean"] == pytest.approx(0.11)
    assert difference["half"] == pytest.approx(stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3))
    text = (tmp_path / "out" / "report.md").read_text()
    assert "- mc_grpo, eval_reward: 0.110 ± 0.025, more than chance over these seeds." in text
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert (tmp_path / "out" / "curves.png").stat().st_size > 5000


def test_a_difference_within_chance_is_called_that(tmp_path):
    c = plan(tmp_path)
    values = {"grpo": {s: [0.5] * 10 for s in c.seeds}, "mc_grpo": {s: [0.5 + 0.2 * (s - 1)] * 10 for s in c.seeds}}
    fake_logs(c, values)
    assert "not told apart from chance with these seeds" in report.text(report.summarize(c, ["reward"]))


def test_one_seed_has_no_interval(tmp_path):
    c = plan(tmp_path, seeds=[0])
    fake_logs(c, {"grpo": {0: [0.5] * 10}, "mc_grpo": {0: [0.6] * 10}})
    text = report.text(report.summarize(c, ["reward"]))
    assert "one seed says nothing about chance" in text and "±" not in text


def test_a_run_of_another_config_is_not_finished(tmp_path):
    c = plan(tmp_path, seeds=[0])
    c.runs[0].folder.mkdir(parents=True)
    (c.runs[0].folder / "finished.json").write_text(json.dumps({"fingerprint": c.runs[0].fingerprint}))
    assert is_finished(c.runs[0]) and is_finished(plan(tmp_path, seeds=[0]).runs[0])
    (tmp_path / "run.yaml").write_text("max_steps: 11\n")
    changed = make_plan(Trl(tmp_path / "run.yaml"), c.arms, [0], tmp_path / "out")
    assert not is_finished(changed.runs[0])


def test_a_line_being_written_is_left_out(tmp_path):
    c = plan(tmp_path, seeds=[0])
    fake_logs(c, {"grpo": {0: [0.5] * 10}, "mc_grpo": {0: [0.6] * 10}})
    with c.runs[0].log_file.open("a") as f:
        f.write('{"step": 11, "rew')
    assert read_log(c.runs[0])[-1]["step"] == 10


def test_options_behind_the_methods_go_to_trl(tmp_path):
    (tmp_path / "run.yaml").write_text("max_steps: 10\n")
    command = ["compare", str(tmp_path / "run.yaml"), "vade", "mc_grpo", "--learning_rate", "1e-6", "--seeds", "1"]
    result = CliRunner().invoke(app, [*command, "--dry-run"])
    runs = result.output.splitlines()
    assert [run.split()[0] for run in runs] == ["grpo", "vade", "mc_grpo"]
    assert all(" --learning_rate 1e-6 --seed 0 " in run for run in runs)


@pytest.mark.host
def test_a_real_comparison_resumes_and_fails_loudly(tmp_path):
    """Two arms on the demo policy; a second call runs nothing; a run that fails shows the end of its output."""
    from rl_plugins.demo import settings
    from rl_plugins.demo.policy import build_model, build_tokenizer

    build_model(0).save_pretrained(tmp_path / "policy")
    build_tokenizer().save_pretrained(tmp_path / "policy")
    data = settings.write_data(tmp_path / "data")
    values = settings.config(tmp_path / "policy", data, ["mc_grpo"], long=False)
    values |= {"max_steps": 2, "eval_strategy": "no", "eval_on_start": False, "per_device_train_batch_size": 32}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    c = make_plan(Trl(tmp_path / "run.yaml"), parse_arms(["mc_grpo"], "grpo"), [0], tmp_path / "out")
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run_all(c, jobs=2, environment=environment)
    logs = {r.arm.label: read_log(r) for r in c.runs}
    assert [line["step"] for line in logs["grpo"] if "reward" in line] == [1, 2]
    assert [line["rl_plugins/rows_generated"] for line in logs["mc_grpo"] if "reward" in line] == [40.0, 40.0]
    assert all(is_finished(r) for r in c.runs)
    assert run_all(c, jobs=2) < 2.0

    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**values, "num_generations": 3}))
    broken = make_plan(Trl(tmp_path / "run.yaml"), parse_arms([], "grpo"), [1], tmp_path / "out")
    with pytest.raises(RLPluginsError, match=r"(?s)grpo with seed 1 failed .*must be divisible by num_generations"):
        run_all(broken, jobs=1, environment=environment)
    assert not is_finished(broken.runs[0]) and is_finished(c.runs[0])
