"""Heads of one model without a host: shares of a budget, prefix diversity, positions, and the runs that are written."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from messages import raises
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.commands.heads.sampling import SampleBudget, _chunks, summarized
from rl_plugins.commands.shared.yaml_edit import with_values
from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.heads import positions_by_mask, prefix_diversity, shares

RUN = """\
# a run of mine
model_name_or_path: policy
output_dir: runs/out
run_name: mine
learning_rate: 1.0e-5   # as tuned
methods:
  - mc_grpo   # the median
  # and more
method_params:
  mc_grpo:
    mad_eps: 0.1
"""
COMMAND = """\
python -m verl.trainer.main_ppo \\
  data.train_batch_size=64 \\
  actor_rollout_ref.rollout.n=8 \\
  trainer.experiment_name=mine \\
  "+rl_plugins.methods=[mc_grpo]" \\
  +rl_plugins.method_params.mc_grpo.mad_eps=0.1
"""


def write(*words: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["heads", "write", *map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == status, (result.output, result.exception)
    return " ".join(result.stderr.split()) if status == 2 else result.stdout


# ---- shares of a budget


@given(k=st.integers(1, 70), heads=st.integers(1, 20), problem=st.integers(0, 99))
def test_shares_sum_to_the_budget_and_differ_by_one(k: int, heads: int, problem: int) -> None:
    found = shares(k, heads, problem)
    assert sum(found) == k and len(found) == heads and max(found) - min(found) <= 1


@given(k=st.integers(1, 30), heads=st.integers(1, 9))
def test_what_is_left_goes_round(k: int, heads: int) -> None:
    """Over as many problems as heads all heads make the same; each problem goes on where the last one stopped."""
    total = [sum(column) for column in zip(*(shares(k, heads, p) for p in range(heads)), strict=True)]
    assert total == [k] * heads
    turn = 0
    for problem in range(5):
        expected = [k // heads] * heads
        for _ in range(k % heads):
            expected[turn % heads] += 1
            turn += 1
        assert shares(k, heads, problem) == expected


def test_fewer_samples_than_heads_take_turns() -> None:
    assert [shares(3, 8, p).index(1) for p in (0,)] == [0] and sum(shares(3, 8, 0)) == 3
    assert shares(3, 8, 0)[:3] == [1, 1, 1] and shares(3, 8, 1)[3:6] == [1, 1, 1]
    assert shares(3, 8, 2) == [1, 0, 0, 0, 0, 0, 1, 1]
    assert shares(16, 8) == [2] * 8 and shares(5, 1) == [5]
    with raises(ConfigError, match="0.*2.*0.*1"):
        shares(0, 2)


def test_chunks_hold_every_sample_once() -> None:
    chunks = list(_chunks(["a", "b", "c"], 10, SampleBudget(k=4, batch=5)))
    made = Counter((head, problem) for head, _, problems in chunks for problem in problems)
    for problem in range(10):
        assert [made[head, problem] for head in "abc"] == shares(4, 3, problem)
    assert all(len(problems) <= 5 for *_, problems in chunks) and len({c[:2] for c in chunks}) == len(chunks)


# ---- prefix diversity


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=8))
def test_prefix_diversity_equals_the_loop(samples: list[list[int]]) -> None:
    grams = []
    for sample in samples:
        first = sample[:20]
        for i in range(len(first) - 2):
            grams.append((first[i], first[i + 1], first[i + 2]))
    found = prefix_diversity(samples)
    if not grams:
        assert math.isnan(found)
        return
    assert found == len(set(grams)) / len(grams) and 0 < found <= 1
    copied = prefix_diversity([*samples, max(samples, key=len)])
    assert copied < found, "a copy lowers it"


def test_prefix_diversity_by_hand() -> None:
    assert prefix_diversity([[1, 2, 3, 4], [1, 2, 3, 5]]) == 3 / 4
    assert prefix_diversity([[1, 2, 3], [1, 2], [7], []]) == 1
    assert prefix_diversity([[*range(20), 1, 2, 3], [*range(20), 4, 5, 6]]) == 0.5, "only the first 20 tokens"
    assert prefix_diversity([[1, 2, 3, 4]], first=3) == prefix_diversity([[1, 2, 3, 4]], size=4) == 1
    assert math.isnan(prefix_diversity([[1, 2], []])) and math.isnan(prefix_diversity([]))


def test_summary_by_hand() -> None:
    lines = [
        {"head": "a", "problems": [0, 1], "tokens": [[1, 2, 3], [1, 2]], "rewards": [1.0, 0.0]},
        {"head": "b", "problems": [0, 1], "tokens": [[1, 2, 3, 4], [5]], "rewards": [0.4, 0.2]},
    ]
    found = summarized(iter(lines), SampleBudget(k=2))
    assert (found["pass"], found["success"], found["tokens"], found["tokens_per_problem"]) == (0.5, 0.25, 10, 5)
    assert found["pdc"] == 2 / 3, "problem 1 has no 3-gram"
    assert found["heads"]["b"] == {"samples": 2, "success": 0.0, "tokens": 2.5}


# ---- positions


def test_models_without_virtual_tokens_are_left_alone() -> None:
    model = torch.nn.Linear(2, 2)
    positions_by_mask(model)
    assert not model._forward_pre_hooks


# ---- runs of TRL


def test_each_head_gets_a_run_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    text = write(tmp_path / "run.yaml", "--heads", 3, "--column", "wins", "--out", tmp_path / "heads")
    before = yaml.safe_load(RUN)
    for head in range(3):
        made = (tmp_path / "heads" / f"head_{head}.yaml").read_text()
        found = yaml.safe_load(made)
        assert found == {
            **before,
            "output_dir": f"runs/out/head_{head}",
            "run_name": f"mine-head_{head}",
            "methods": ["difficulty_slices", "mc_grpo"],
            "method_params": {
                "mc_grpo": {"mad_eps": 0.1},
                "difficulty_slices": {"heads": 3, "head": head, "column": "wins"},
            },
            "use_peft": True,
            "adapter": "lora",
        }
        assert "# a run of mine" in made and "# as tuned" in made
    assert "the hardest prompts" in text and "rl-plugins trl grpo --config" in text and "overlap" not in text


@pytest.mark.parametrize("adapter", ["prompt_tuning", "prefix_tuning"])
def test_virtual_tokens(tmp_path: Path, adapter: str) -> None:
    (tmp_path / "run.yaml").write_text("model_name_or_path: policy\nmethods: [econprover]\nuse_peft: false\n")
    options = ["--adapter", adapter, "--virtual-tokens", 7, "--text", "Think: first"]
    text = write(tmp_path / "run.yaml", *options, "--heads", 2, "--out", tmp_path)
    found = yaml.safe_load((tmp_path / "head_1.yaml").read_text())
    expected = {"use_peft": True, "adapter": adapter, "num_virtual_tokens": 7, "adapter_text": "Think: first"}
    assert expected.items() <= found.items() and found["output_dir"] == "out/head_1"
    assert found["methods"] == ["difficulty_slices"] and found["method_params"] == {
        "difficulty_slices": {"heads": 2, "head": 1}
    }
    assert found.get("gradient_checkpointing") is (False if adapter == "prefix_tuning" else None)
    assert "slices of the heads may overlap" in text and "at random" not in text
    assert "start at random" in write(tmp_path / "run.yaml", *options[:2], "--heads", 2, "--out", tmp_path / "b")


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (RUN, ["--text", "x"], "--text and --virtual-tokens are for --adapter prompt_tuning and prefix_tuning"),
        (RUN, ["--host", "verl", "--adapter", "prefix_tuning"], "verl trains LoRA adapters only"),
        (
            RUN.replace("mc_grpo", "vade").replace("mad_eps", "selected_decay"),
            [],
            "`difficulty_slices` and `vade` both",
        ),
        ("[1, 2]", [], "holds no `key: value` lines"),
        ("a: 1\nmethods: [nothing]\n", [], "There is no method `nothing`"),
    ],
)
def test_runs_that_are_not_written(tmp_path: Path, config: str, words: list[str], message: str) -> None:
    (tmp_path / "run.yaml").write_text(config)
    assert message in write(tmp_path / "run.yaml", *words, "--out", tmp_path / "heads", status=2)
    assert not (tmp_path / "heads").exists()


def test_files_are_not_replaced_unless_told(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    write(tmp_path / "run.yaml", "--heads", 2, "--out", tmp_path)
    assert "head_0.yaml exists. Nothing was written" in write(tmp_path / "run.yaml", "--out", tmp_path, status=2)
    write(tmp_path / "run.yaml", "--heads", 1, "--out", tmp_path, "--force")
    assert yaml.safe_load((tmp_path / "head_0.yaml").read_text())["method_params"]["difficulty_slices"]["heads"] == 1
    assert "is given as its config file alone" in write("--out", tmp_path / "x", status=2)


@pytest.mark.parametrize(
    "methods", ["methods: [mc_grpo]", "methods: mc_grpo", "methods:\n- mc_grpo", "", "methods:\n  - mc_grpo"]
)
@pytest.mark.parametrize(
    "params", ["", "method_params: {mc_grpo: {mad_eps: 0.1}}", "method_params: '{\"mc_grpo\": {}}'"]
)
def test_methods_are_written_in_any_form(tmp_path: Path, methods: str, params: str) -> None:
    if params and not methods:
        return
    (tmp_path / "run.yaml").write_text("\n".join(filter(None, ["lr: 1", methods, "# after", params])) + "\n")
    write(tmp_path / "run.yaml", "--heads", 2, "--out", tmp_path)
    text = (tmp_path / "head_1.yaml").read_text()
    found = yaml.safe_load(text)
    assert found["methods"] == ["difficulty_slices", *(["mc_grpo"] if methods else [])] and "# after" in text
    assert found["method_params"]["difficulty_slices"] == {"heads": 2, "head": 1}


def test_blocks_of_a_config_are_replaced_where_they_are() -> None:
    text = "a:\n  - 1\n  - b: 2   # inside\n\n# about c\nc: &x\n  d: [1]\ne: *x\n"
    new = with_values(text, {"a": [3]})
    assert new == "a: [3]   # inside\n\n# about c\nc: &x\n  d: [1]\ne: *x\n"
    with raises(ConfigError, match="`e`"):
        with_values(text, {"e": [3]})


# ---- runs of verl


def test_verl_gets_command_lines(tmp_path: Path) -> None:
    from rl_plugins.verl.config import compose, read_settings

    (tmp_path / "command.txt").write_text(COMMAND)
    options = ["--host", "verl", "--heads", 2, "--column", "level", "--out"]
    assert "xargs -a" in write(*options, tmp_path, tmp_path / "command.txt")
    write(*options, tmp_path / "b", "--", *shlex.split(COMMAND.replace("\\\n", ""))[3:])
    files = [(tmp_path / f"head_{head}.txt").read_text() for head in (0, 1)]
    assert files == [(tmp_path / "b" / f"head_{head}.txt").read_text() for head in (0, 1)]
    assert files[0].replace("head_0", "head_1").replace("head=0", "head=1") == files[1]
    config = compose(shlex.split(files[1]))
    settings = read_settings(config)
    assert settings is not None
    assert settings.methods == ("difficulty_slices", "mc_grpo") and settings.method_params == {
        "mc_grpo": {"mad_eps": 0.1},
        "difficulty_slices": {"heads": 2, "head": 1, "column": "level"},
    }
    assert config.actor_rollout_ref.model.lora_rank == 32 and config.data.train_batch_size == 64
    assert config.trainer.v1.trainer_mode == "rl_plugins_sync" and config.trainer.experiment_name == "mine_head_1"
    assert config.trainer.default_local_dir.endswith("/mine/head_1")
    overrides = ["actor_rollout_ref.model.lora_rank=8", "trainer.v1.trainer_mode=rl_plugins_colocate_async"]
    write("--host", "verl", "--heads", 1, "--out", tmp_path / "c", "--", *overrides)
    config = compose(shlex.split((tmp_path / "c" / "head_0.txt").read_text()))
    assert config.actor_rollout_ref.model.lora_rank == 8
    assert config.trainer.v1.trainer_mode == "rl_plugins_colocate_async"
    assert "Give a run of verl as a file or as overrides" in write("--host", "verl", "--out", tmp_path / "d", status=2)
