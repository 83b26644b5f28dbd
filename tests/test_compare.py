"""The comparison engine: what runs, what is not run twice, what the numbers say; and one real comparison."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import yaml
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.commands.shared.options import parse_seeds
from rl_plugins.core.errors import ConfigError, RLPluginsError
from rl_plugins.lab.compare import costs, report
from rl_plugins.lab.compare import runs as comparison_runs
from rl_plugins.lab.compare.plan import make_plan, parse_variants
from rl_plugins.lab.compare.runs import is_finished, read_log, run_all
from rl_plugins.lab.compare.trl import Trl
from rl_plugins.runtime import bars, registry


def fake_logs(comparison, values, tokens=None, evals=None, parts=(), steps=10):
    """Logs as a trainer writes them: `values[label][seed]` is a list of rewards, `tokens[label]` tokens per step."""
    for run in comparison.runs:
        run.folder.mkdir(parents=True, exist_ok=True)
        label, rewards = run.variant.label, values[run.variant.label][run.seed]
        lines = [{"step": 0, "max_steps": steps, "seconds": 0.0, "started": 1.0}]
        for i, v in enumerate(rewards, 1):
            line = {"step": i, "max_steps": steps, "seconds": float(i), "reward": v}
            line |= {f"rewards/{p}/mean": v * k for p, k in parts}
            if tokens:
                line |= {
                    "rl_plugins/tokens_decoded": tokens[label] * i,
                    "rl_plugins/tokens_read": 7 * i,
                    "rl_plugins/engine_calls": i,
                    "rl_plugins/engine_seconds": 0.5 * i,
                    "rl_plugins/rows_made": 16 * i,
                    "rl_plugins/rows_trained_total": 8 * i,
                }
            lines.append(line)
            if evals and i in evals:
                lines.append({k: line[k] for k in ("step", "max_steps", "seconds")} | {"eval_reward": 10.0 * i})
        if not evals:
            lines.append({"step": len(rewards), "max_steps": steps, "seconds": 9.0, "eval_reward": rewards[-1]})
        run.log_file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def plan(tmp_path, methods=("mc_grpo",), seeds=(0, 1, 2), extra=(), **kwargs):
    return make_plan(
        Trl("max_steps: 10\n", tuple(extra)), parse_variants(methods, "grpo"), seeds, tmp_path / "out", **kwargs
    )


def test_every_variant_gets_every_seed_and_the_same_config(tmp_path):
    c = plan(tmp_path, ["mc_grpo", "vade+mc_grpo"], method_params={"mc_grpo": {"mad_eps": 0.5}}, extra=["--lr", "1"])
    assert [(r.variant.label, r.seed) for r in c.runs] == [
        (a, s) for s in (0, 1, 2) for a in ("grpo", "mc_grpo", "vade+mc_grpo")
    ]
    arguments = list(c.runs[2].arguments)
    assert arguments[:4] == ["--config", str(c.runs[2].folder / "config.yaml"), "--lr", "1"]
    assert arguments[arguments.index("--methods") + 1 :] == ["vade", "mc_grpo"]
    assert json.loads(arguments[arguments.index("--method_params") + 1]) == {"mc_grpo": {"mad_eps": 0.5}}
    assert list(c.runs[0].arguments)[-1] == "" and '"mc_grpo"' not in " ".join(c.runs[0].arguments)


@pytest.mark.parametrize(
    ("methods", "params", "match"),
    [
        (["mc_grop"], {}, "no method `mc_grop`"),
        (["vade", "vade"], {}, "name one twice"),
        (["vade"], {"mc_grpo": {}}, "Parameters are given for mc_grpo, which no variant names"),
        (["mc_grpo+gdpo"], {}, None),
    ],
)
def test_variants_are_checked(tmp_path, methods, params, match):
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
    entry = summary["variants"]["grpo"]["metrics"]["reward"]
    assert entry["mean"] == pytest.approx(np.mean(ends))
    assert entry["half"] == pytest.approx(stats.t.ppf(0.975, 2) * np.std(ends, ddof=1) / math.sqrt(3))
    difference = summary["variants"]["mc_grpo"]["metrics"]["eval_reward"]["difference"]
    assert difference["mean"] == pytest.approx(0.11)
    assert difference["half"] == pytest.approx(stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3))
    text = (tmp_path / "out" / "report.md").read_text()
    assert "- mc_grpo, reward, held out: 0.110 ± 0.025, more than chance over these seeds." in text
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    brief = report.text(summary, brief=True).splitlines()
    assert "| tokens decoded |" in text and not any(line.startswith("| tokens decoded") for line in brief)
    assert set(brief) < set(text.splitlines()) and [v for v in brief if v[:1] == "-"] == re.findall("^- .*", text, re.M)
    assert (tmp_path / "out" / "curves.png").stat().st_size > 5000


def test_a_difference_within_chance_is_called_that(tmp_path):
    c = plan(tmp_path)
    values = {"grpo": {s: [0.5] * 10 for s in c.seeds}, "mc_grpo": {s: [0.5 + 0.2 * (s - 1)] * 10 for s in c.seeds}}
    fake_logs(c, values)
    assert "no significant difference from chance with these seeds" in report.text(report.summarize(c, ["reward"]))


def test_one_seed_has_no_interval_and_is_told_so_once(tmp_path):
    c = plan(tmp_path, ["mc_grpo", "gdpo"], seeds=[0])
    rising = [0.1 * i for i in range(10)]
    fake_logs(c, {"grpo": {0: rising}, "mc_grpo": {0: rising}, "gdpo": {0: rising}}, parts=[("a", 1), ("b", 0.5)])
    text = report.text(report.summarize(c, report.found_metrics(c)))
    assert text.count("nothing about chance") == 1 and "±" not in text
    assert "- gdpo, reward `b`, in training: 0.000.\n" in text and "told apart" not in text


# ---- budgets


def rising(c):
    return {a.label: {s: [0.1 * i + 0.01 * s for i in range(1, 11)] for s in c.seeds} for a in c.variants}


def test_variants_are_compared_at_equal_tokens(tmp_path):
    """A variant that decodes twice as much per step is read at half of its steps; evaluations in between are joined."""
    c = plan(tmp_path)
    fake_logs(c, rising(c), tokens={"grpo": 100, "mc_grpo": 250}, evals=(2, 5, 10))
    by_steps = report.summarize(c, ["eval_reward", "reward"])
    assert by_steps["budget"] == {"cost_unit": "steps", "of": [10, 10, 10]}
    assert by_steps["variants"]["mc_grpo"]["metrics"]["eval_reward"]["end"] == [100.0] * 3
    assert by_steps["variants"]["mc_grpo"]["costs"]["tokens_decoded"] == [2500] * 3
    assert by_steps["variants"]["grpo"]["costs"]["tokens_decoded"] == [1000] * 3

    summary = report.write(c, ["eval_reward", "reward"], cost_unit="tokens_decoded")
    assert summary["budget"] == {"cost_unit": "tokens_decoded", "of": [1000, 1000, 1000]}
    grpo, variant = summary["variants"]["grpo"], summary["variants"]["mc_grpo"]
    assert grpo["costs"]["steps"] == [10] * 3 and variant["costs"]["steps"] == [4] * 3
    assert variant["steps_in_all"] == [10] * 3 and variant["costs"]["rows_trained"] == [32] * 3
    assert variant["metrics"]["eval_reward"]["end"] == pytest.approx(
        [20 + 30 * 2 / 3] * 3
    )  # between steps 2 and 5, at 4
    assert grpo["metrics"]["eval_reward"]["end"] == [100.0] * 3
    assert variant["metrics"]["reward"]["end"] == pytest.approx([0.4, 0.41, 0.42])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Budget: 1,000 tokens decoded per run" in text and "Cut: mc_grpo at step 4 of 10." in text
    assert "learning-rate schedule" in text and "Cut:" not in report.text(by_steps)
    for row in ("optimizer steps | 10 | 4", "rows made | 160 | 64", "rows trained | 80 | 32", "tokens read | 70 | 28"):
        assert f"| {row} |" in text
    assert "| tokens decoded | 1,000 | 1,000 |" in text and "| engine time (s) | 5.0 | 2.0 |" in text
    assert "| engine calls | 10 | 4 |" in text and "| time (s) | 10.0 | 4.0 |" in text


@pytest.mark.parametrize(
    ("cost_unit", "steps"), [("steps", 10), ("rows_trained", 10), ("tokens_decoded", 4), ("engine_seconds", 10)]
)
def test_every_cost_unit_cuts_and_is_drawn(tmp_path, cost_unit, steps):
    c = plan(tmp_path)
    fake_logs(c, rising(c), tokens={"grpo": 100, "mc_grpo": 250}, evals=(2, 5, 10))
    assert report.summarize(c, ["reward"], cost_unit=cost_unit)["variants"]["mc_grpo"]["costs"]["steps"] == [steps] * 3
    runs = costs.Cut.read(c, cost_unit).runs_of("mc_grpo")
    curve = report.curve(runs, "reward", cost_unit)
    assert curve.costs[-1] <= runs[0][1] and curve.values.shape == (3, steps)
    assert curve.values[0] == pytest.approx([0.1 * i for i in range(1, steps + 1)])


def test_a_budget_is_paired_by_seed(tmp_path):
    c = plan(tmp_path, seeds=[0, 1])
    values = {"grpo": {0: [0.5] * 10, 1: [0.5] * 6}, "mc_grpo": {0: [0.5] * 8, 1: [0.5] * 10}}
    fake_logs(c, values, tokens={"grpo": 100, "mc_grpo": 100})
    summary = report.summarize(c, ["reward"], cost_unit="rows_trained")
    assert summary["budget"]["of"] == [64, 48]
    assert [summary["variants"][a]["costs"]["steps"] for a in ("grpo", "mc_grpo")] == [[8, 6], [8, 6]]


def test_logs_without_counters_are_an_error_that_says_what_to_do(tmp_path):
    c = plan(tmp_path)
    fake_logs(c, rising(c))
    for run in c.runs:
        (run.folder / "finished.json").write_text(json.dumps({"fingerprint": run.fingerprint}))
    costs.require(c, "steps")
    message = r"(?s)runs/grpo-seed0/log.jsonl has no `rl_plugins/tokens_decoded`.*Remove .*grpo-seed0 .*--budget steps"
    with pytest.raises(ConfigError, match=message):
        costs.require(c, "tokens_decoded")
    with pytest.raises(ConfigError, match=message):
        report.summarize(c, ["reward"], cost_unit="tokens_decoded")
    assert "| tokens decoded | not counted | not counted |" in report.text(report.summarize(c, ["reward"]))


def test_no_run_is_repeated_for_another_cost_unit(tmp_path):
    """The budget is no part of what a run is."""
    (tmp_path / "run.yaml").write_text("max_steps: 10\n")
    plans = []
    for cost_unit in costs.COST_UNITS:
        command = ["compare", str(tmp_path / "run.yaml"), "vade", "--budget", cost_unit, "--seeds", "1", "--dry-run"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        plans.append(result.output)
    assert len(set(plans)) == 1
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "run.yaml"), "vade", "--budget", "tokens", "--dry-run"])
    assert result.exit_code == 2 and "steps" in result.output and "engine_seconds" in result.output


# ---- what is shown


def test_rewards_held_out_and_in_training_and_every_function(tmp_path):
    c = plan(tmp_path)
    fake_logs(c, rising(c), parts=[("length", 0.25), ("exact", 0.75)])
    assert report.found_metrics(c) == ["eval_reward", "reward", "rewards/exact/mean", "rewards/length/mean"]
    text = report.text(report.summarize(c, report.found_metrics(c)))
    for row in ("reward, held out", "reward, in training", "reward `exact`, in training"):
        assert f"\n| {row} | " in text


def test_a_single_function_is_not_shown_twice(tmp_path):
    c = plan(tmp_path)
    fake_logs(c, rising(c), parts=[("exact", 1)])
    assert report.found_metrics(c) == ["eval_reward", "reward"]


def test_the_same_difference_of_one_step_in_every_seed_is_within_chance(tmp_path):
    """Right answers among 64: every seed ends one better. Without the step of the metric the interval would be 0."""
    c = plan(tmp_path)
    steps = {s: [k / 64 for k in (20, 23, 25 + s)] for s in c.seeds}
    fake_logs(c, {"grpo": steps, "mc_grpo": {s: [*v[:2], v[2] + 1 / 64] for s, v in steps.items()}})
    summary = report.summarize(c, ["reward"])
    difference = summary["variants"]["mc_grpo"]["metrics"]["reward"]["difference"]
    assert difference["half"] == pytest.approx(4.302653 / 64 / math.sqrt(3)) and difference["mean"] == pytest.approx(
        1 / 64
    )
    assert "more than chance" not in report.text(summary)
    far = {s: [*v[:2], v[2] + 20 / 64] for s, v in steps.items()}
    fake_logs(c, {"grpo": steps, "mc_grpo": far})
    assert "more than chance" in report.text(report.summarize(c, ["reward"]))


def test_two_seeds_have_no_verdict(tmp_path):
    c = plan(tmp_path, seeds=[0, 1])
    fake_logs(
        c, {"grpo": {s: [0.1] * 10 for s in (0, 1)}, "mc_grpo": {s: [0.1, *[0.9 + s / 1000] * 9] for s in (0, 1)}}
    )
    text = report.text(report.summarize(c, ["reward"]))
    assert "chance" not in text and text.count("2 seeds decide nothing") == 1


def test_collapsed_variants_are_called_that(tmp_path):
    c = plan(tmp_path, ["mc_grpo", "gdpo"])
    zero = {s: [0.3, 0.1, *[0.0] * 28] for s in c.seeds}
    up = {s: [0.1 * i + 0.01 * s for i in range(1, 31)] for s in c.seeds}
    fake_logs(c, {"grpo": zero, "mc_grpo": zero, "gdpo": up})
    text = report.text(report.summarize(c, ["reward"]))
    assert "grpo has collapsed in 3 of 3 runs" in text and "gdpo has collapsed" not in text
    assert "- mc_grpo, reward, in training: 0, both have collapsed." in text
    assert "told apart" not in text and "- gdpo, reward, in training: 2.910 ± 0.025, more than chance" in text
    short = {label: {s: values[:8] for s, values in of.items()} for label, of in (("grpo", zero), ("mc_grpo", zero))}
    fake_logs(c, {**short, "gdpo": {s: up[s][:8] for s in c.seeds}})
    assert "collapsed" not in report.text(report.summarize(c, ["reward"])), "six equal values may be chance"


def test_the_curves_are_a_page_wide_and_come_in_light_and_dark(tmp_path):
    from PIL import Image

    c = plan(tmp_path)
    fake_logs(c, rising(c), tokens={"grpo": 100, "mc_grpo": 250}, parts=[("a", 1.5), ("b", 0.5)])
    report.write(c, report.found_metrics(c), cost_unit="tokens_decoded")
    sizes = [Image.open(tmp_path / "out" / f"curves{mode}.png").size for mode in ("", "-dark")]
    assert sizes[0] == sizes[1] and sizes[0][0] == 1600 and sizes[0][1] > 800  # two rows of two panels


def test_a_run_of_another_config_is_not_finished(tmp_path):
    c = plan(tmp_path, seeds=[0])
    c.runs[0].folder.mkdir(parents=True)
    (c.runs[0].folder / "finished.json").write_text(json.dumps({"fingerprint": c.runs[0].fingerprint}))
    assert is_finished(c.runs[0]) and is_finished(plan(tmp_path, seeds=[0]).runs[0])
    changed = make_plan(Trl("max_steps: 11\n"), c.variants, [0], tmp_path / "out")
    assert not is_finished(changed.runs[0]) and comparison_runs.why_again(changed.runs[0])
    comparison_runs._mark(c.runs[0], "finished.json")
    assert (
        is_finished(c.runs[0])
        and comparison_runs.why_again(c.runs[0]) == ""
        and comparison_runs.why_again(changed.runs[0]) == "config"
    )
    again = make_plan(Trl("max_steps: 11\n"), c.variants, [0], tmp_path / "out", launcher=["accelerate", "launch"])
    assert again.runs[0].fingerprint != changed.runs[0].fingerprint


def test_a_file_gets_lines_in_place_of_bars(tmp_path, monkeypatch):
    """A run tells when it begins, again after a while, and its end; a second command why a run is trained again."""
    (tmp_path / "logs.py").write_text(
        "import json, os, time\n"
        "for step in (1, 2, 3):\n"
        "    line = {'step': step, 'max_steps': 3, 'seconds': 1.0, 'reward': step / 4}\n"
        "    open(os.environ['RL_PLUGINS_LOG_FILE'], 'a').write(json.dumps(line) + '\\n')\n"
        "    time.sleep(1)\n"
    )

    def told(every, config="max_steps: 3\n"):
        monkeypatch.setattr(bars, "EVERY", every)
        planned = make_plan(Trl(config), parse_variants([], "grpo"), [0], tmp_path / "out")
        planned = replace(planned, runs=tuple(replace(run, worker="logs") for run in planned.runs))
        console = Console(file=io.StringIO(), width=200)
        run_all(planned, 1, console=console, environment={"PYTHONPATH": str(tmp_path)})
        return console.file.getvalue().splitlines()

    first = told(30.0)
    assert len(first) == 2 and all(line.startswith("grpo seed 0") for line in first)
    assert "3/3" in first[1] and "reward 0.750" in first[1]
    assert len(told(30.0)) == 1  # finished before
    again = told(0.0, "max_steps: 4\n")
    assert "config" in again[0] and any("1/3" in line for line in again) and any("2/3" in line for line in again)


def test_edited_code_of_an_own_method_makes_its_runs_new(tmp_path, monkeypatch):
    file = tmp_path / "own_method.py"
    file.write_text(
        "from rl_plugins import Method\n\n\nclass Own(Method):\n    name = 'own'\n\n"
        "    def rewards(self, rollouts):\n        return rollouts.reward\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = EntryPoint("own", "own_method:Own", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: [own])
    before = [run.fingerprint for run in plan(tmp_path, ["own"], seeds=[0]).runs]
    assert before == [run.fingerprint for run in plan(tmp_path, ["own"], seeds=[0]).runs]
    file.write_text(file.read_text().replace("reward\n", "reward / 2\n"))
    after = [run.fingerprint for run in plan(tmp_path, ["own"], seeds=[0]).runs]
    assert before[0] == after[0] and before[1] != after[1]  # plain GRPO, own


def test_runs_start_from_the_config_as_it_was_planned(tmp_path, monkeypatch):
    """The user edits the file while the first of two runs trains; the second starts from the text of the plan."""
    import dataclasses

    from rl_plugins.lab.compare import user_runs

    (tmp_path / "run.yaml").write_text("max_steps: 10\n")
    (tmp_path / "edits.py").write_text(
        "import pathlib, sys\n"
        "config = pathlib.Path(sys.argv[sys.argv.index('--config') + 1])\n"
        "(config.parent / 'read').write_text(config.read_text())\n"
        f"pathlib.Path({str(tmp_path / 'run.yaml')!r}).write_text('max_steps: 11')\n"
    )
    planned = []
    monkeypatch.setattr(user_runs, "run", lambda comparison, *args, **options: planned.append(comparison))
    command = ["compare", str(tmp_path / "run.yaml"), "vade", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, command).exit_code == 0
    runs = tuple(dataclasses.replace(run, worker="edits") for run in planned[0].runs)
    run_all(dataclasses.replace(planned[0], runs=runs), jobs=1, environment={"PYTHONPATH": str(tmp_path)})
    assert [(run.folder / "read").read_text() for run in runs] == ["max_steps: 10\n"] * 2


def test_two_commands_do_not_share_a_folder(tmp_path):
    from filelock import FileLock

    c = plan(tmp_path, seeds=[0])
    c.out.mkdir()
    with FileLock(c.out / "lock"), pytest.raises(RLPluginsError, match="Another command is comparing in"):
        run_all(c, jobs=1)


def test_an_evaluation_costs_what_the_run_had_cost_at_its_step():
    """Evaluated every step, costs logged every third: its cost is read in proportion, not that of the log before."""
    lines = [{"step": 0, "eval_reward": 0.0}, {"step": 1, "eval_reward": 1.0}, {"step": 2, "eval_reward": 2.0}]
    lines += [{"step": 3, "reward": 0.5, "rl_plugins/tokens_decoded": 300.0}, {"step": 3, "eval_reward": 3.0}]
    lines += [{"step": 5, "eval_reward": 5.0}, {"step": 6, "reward": 0.5, "rl_plugins/tokens_decoded": 900.0}]
    lines += [{"step": 7, "eval_reward": 7.0}]
    assert costs.Course.of(lines).series("eval_reward", "tokens_decoded") == [
        (0, 0), (100, 1), (200, 2), (300, 3), (700, 5), (900, 7)
    ]  # fmt: skip


def test_parameters_of_the_parts_of_a_bundle(tmp_path):
    c = plan(tmp_path, ["dots_rr"], seeds=[0], method_params={"dots": {"embeddings": "a:b"}})
    assert '{"dots": {"embeddings": "a:b"}}' in c.runs[1].arguments


def test_variants_are_paired_by_seed_where_one_has_no_log(tmp_path):
    c = plan(tmp_path)
    fake_logs(c, rising(c))
    next(r for r in c.runs if r.variant.label == "mc_grpo" and r.seed == 1).log_file.unlink()
    difference = report.summarize(c, ["reward"])["variants"]["mc_grpo"]["metrics"]["reward"]["difference"]
    assert difference["values"] == [0.0, 0.0]


def test_a_value_that_no_run_logged_is_named_with_those_that_are(tmp_path):
    c = plan(tmp_path, seeds=[0])
    fake_logs(c, {"grpo": {0: [0.1] * 10}, "mc_grpo": {0: [0.2] * 10}})
    with pytest.raises(ConfigError, match="No run has logged rewrad.*one of eval_reward, reward"):
        report.summarize(c, ["rewrad"])
    summary = report.write(c, ["reward"])
    json.loads((c.out / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert math.isnan(summary["variants"]["grpo"]["metrics"]["reward"]["half"])


def test_a_value_that_overflowed_is_null_in_the_summary(tmp_path):
    c = plan(tmp_path, seeds=[0, 1])
    fake_logs(c, {variant: {seed: [math.inf] * 10 for seed in (0, 1)} for variant in ("grpo", "mc_grpo")})
    report.write(c, ["reward"])
    entry = json.loads((c.out / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name}"))
    assert entry["variants"]["grpo"]["metrics"]["reward"]["end"] == [None, None] and (c.out / "report.md").exists()


def test_small_numbers_keep_their_digits():
    assert str(report.Interval(1e-4, 3e-4, 3)) == "0.000100 ± 0.000300"
    assert str(report.Interval(5e-17, 3e-17, 3)) == "0.000 ± 0.000"  # rounding of equal values
    assert (
        str(report.Interval(82.5, 0.25, 3)) == "82.500 ± 0.250" and str(report.Interval(0.0, 0.0, 3)) == "0.000 ± 0.000"
    )


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
    runs = [line for line in result.output.splitlines() if " seed 0 (to run): " in line]
    assert [run.split()[0] for run in runs] == ["grpo", "vade", "mc_grpo"]
    assert (
        "This command sets `--seed`, `--output_dir`, `--count_costs`, `--methods` and `--method_params`"
        in result.output
    )
    assert all(" --learning_rate 1e-6 --seed 0 " in run for run in runs)


def dry(tmp_path, config, *words):
    (tmp_path / "run.yaml").write_text(config)
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "run.yaml"), *words, "--seeds", "1", "--dry-run"])
    assert result.exit_code == 0, result.output
    return result.output


def test_parameters_of_the_config_reach_their_variants(tmp_path):
    """Those of the command win, one by one; those of a method that no variant names stay out."""
    config = "method_params: {mc_grpo: {mad_eps: 0.5, advantage_clip: 1.0}, gdpo: {}}\n"
    text = dry(tmp_path, config, "--method-params", '{"mc_grpo": {"advantage_clip": 3.0}}', "vade", "mc_grpo")
    grpo, vade, mc_grpo = (line for line in text.splitlines() if "(to run)" in line)
    assert " --method_params '{}'" in grpo and " --method_params '{}'" in vade
    assert """ --method_params '{"mc_grpo": {"mad_eps": 0.5, "advantage_clip": 3.0}}'""" in mc_grpo
    told = " ".join(text.split())  # in the report, too
    assert """Parameters of methods: `{"mc_grpo": {"mad_eps": 0.5, "advantage_clip": 3.0}""" in told
    option = "--method_params={mc_grpo: {mad_eps: 0.25}}"  # TRL's spelling, behind the methods
    last = dry(tmp_path, config, "mc_grpo", option).splitlines()[-1]
    assert last.count("--method_params") == 1 and '{"mad_eps": 0.25, "advantage_clip": 1.0}' in last


@pytest.mark.parametrize(
    ("config", "words", "masked"),
    [
        ("max_steps: 10\n", ["vade"], False),
        ("max_steps: 10\n", ["eoser", "vade"], True),
        ("max_steps: 10\n", ["mdlm"], True),
        ("diffusion_steps: 4\n", ["vade"], True),
        ("max_steps: 10\n", ["vade", "--recompute-states=True"], True),
    ],
)
def test_masked_diffusion_models_are_trained_by_their_trainer(tmp_path, monkeypatch, config, words, masked):
    from rl_plugins.lab.compare import user_runs

    planned = []
    monkeypatch.setattr(user_runs, "run", lambda comparison, *args, **options: planned.append(comparison))
    (tmp_path / "run.yaml").write_text(config)
    command = ["compare", str(tmp_path / "run.yaml"), *words, "--out", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert {run.worker for run in planned[0].runs} == {f"rl_plugins.lab.compare.{'masked' if masked else 'trl'}_worker"}


@pytest.mark.parametrize(
    ("config", "options", "evaluates"),
    [
        ("max_steps: 10\n", [], False),
        ("eval_strategy: no\n", [], False),
        ("eval_strategy: 'no'\n", [], False),
        ("eval_strategy: steps\n", [], True),
        ("eval_strategy: no\n", ["--eval_strategy", "steps"], True),
        ("eval_strategy: steps\n", ["--eval_strategy=no"], False),
        ("eval_strategy: no\n", ["--eval-strategy", "steps"], True),  # TRL's parser knows both spellings
    ],
)
def test_whether_a_run_evaluates(tmp_path, config, options, evaluates):
    assert ("Set eval_strategy and a test split" in dry(tmp_path, config, "vade", *options)) == (not evaluates)


@pytest.mark.parametrize(
    ("words", "named"),
    [(["vade"], ""), (["overlong", "vade"], "overlong."), (["overlong", "--vs", "overlong+vade"], "")],
)
def test_variants_whose_rewards_are_others_are_named(tmp_path, words, named):
    """Where all variants change rewards, or none, there is nothing to say."""
    text = dry(tmp_path, "eval_strategy: steps\n", *words)
    assert (f"change rewards: {named} " in text) if named else ("change rewards" not in text)


def test_an_variant_without_a_method_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"The variant '\+' names no method"):
        plan(tmp_path, ["+"])


def test_a_budget_below_one_second_is_told(tmp_path):
    c = plan(tmp_path, seeds=[0])
    fake_logs(c, {"grpo": {0: [0.5]}, "mc_grpo": {0: [0.6]}}, tokens={"grpo": 100, "mc_grpo": 100})
    text = report.text(report.summarize(c, ["reward"], cost_unit="engine_seconds"))
    assert "Budget: 0.5 engine time (s) per run" in text and "| engine time (s) | 0.5 | 0.5 |" in text


def test_no_link_to_curves_that_are_not_there(tmp_path):
    """A value that only one of two runs of each variant logged has no curve."""
    c = plan(tmp_path, seeds=[0, 1])
    fake_logs(c, rising(c))
    assert report.write(c, ["reward"])["files"] == ["curves.png", "curves-dark.png", "report.md", "summary.json"]
    assert "![curves](curves.png)" in (c.out / "report.md").read_text()
    for run in c.runs[:2]:
        with run.log_file.open("a") as f:
            f.write('{"step": 10, "max_steps": 10, "seconds": 10.0, "kl": 0.1}\n')
    assert report.write(c, ["kl"])["files"] == ["report.md", "summary.json"]
    assert "curves" not in (c.out / "report.md").read_text() and not list(c.out.glob("*.png"))


@pytest.mark.host
def test_a_real_comparison_resumes_and_fails_loudly(tmp_path):
    """Two variants on the demo policy; a second call runs nothing; a run that fails shows the end of its output."""
    from rl_plugins.lab.demo import settings
    from rl_plugins.lab.demo.policy import build_model, build_tokenizer

    build_model(0).save_pretrained(tmp_path / "policy")
    build_tokenizer().save_pretrained(tmp_path / "policy")
    data = settings.write_data(tmp_path / "data")
    values = settings.config(tmp_path / "policy", data, ["mc_grpo"], long=False)
    values |= {"max_steps": 2, "eval_strategy": "no", "eval_on_start": False, "per_device_train_batch_size": 32}
    c = make_plan(Trl(yaml.safe_dump(values)), parse_variants(["mc_grpo"], "grpo"), [0], tmp_path / "out")
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run_all(c, jobs=2, environment=environment)
    logs = {r.variant.label: read_log(r) for r in c.runs}
    assert [line["step"] for line in logs["grpo"] if "reward" in line] == [1, 2]
    assert [line["rl_plugins/rows_generated"] for line in logs["mc_grpo"] if "reward" in line] == [40.0, 40.0]
    assert all(is_finished(r) for r in c.runs)
    assert run_all(c, jobs=2) < 2.0

    broken = make_plan(
        Trl(yaml.safe_dump({**values, "num_generations": 3})), parse_variants([], "grpo"), [1], tmp_path / "out"
    )
    with pytest.raises(RLPluginsError, match=r"(?s)grpo with seed 1 failed .*must be divisible by num_generations"):
        run_all(broken, jobs=1, environment=environment)
    assert not is_finished(broken.runs[0]) and is_finished(c.runs[0])
