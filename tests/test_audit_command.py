"""`rl-plugins audit`: on the examples of this repository, on planted errors, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.lab.demo.tasks import build_rows

ROOT = Path(__file__).parents[1]
VERL = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=4", "data.train_batch_size=8")


def audit(*words: object, status: int = 0) -> str:
    """What the command prints; on an error its message."""
    result = CliRunner().invoke(app, ["audit", *map(str, words)], env={"COLUMNS": "400"})
    assert result.exit_code == status, (result.output, result.exception)
    return result.stderr if status == 2 else result.stdout


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    """examples/trl/run.yaml with its dataset, without its policy."""
    (tmp_path / "laptop-run" / "data").mkdir(parents=True)
    lines = [json.dumps(row) for row in build_rows(200)]
    (tmp_path / "laptop-run" / "data" / "train.jsonl").write_text("\n".join(lines))
    shutil.copy(ROOT / "examples" / "trl" / "run.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_of_trl_has_no_critical_finding_and_a_planted_error_has_one(laptop):
    text = audit("run.yaml", "--out", "clean")
    assert "No critical finding" in text and "exact, digits, careful" in text
    report = json.loads((laptop / "clean" / "report.json").read_text())
    assert report["facts"]["rows looked at"] == 200 and report["not_served"] == {}
    (laptop / "planted_reward.py").write_text(
        "from rl_plugins.lab.demo.rewards import exact\n\n"
        "def planted(prompts, completions, answer, task, **columns):\n"
        "    found = exact(prompts, completions, answer=answer)\n"
        "    return [1 - r if t == 'unique' else r for r, t in zip(found, task)]\n"
    )
    words = ("run.yaml", "--reward_funcs", "planted_reward.planted", "--reward_weights", "1")
    text = audit(*words, "--out", "bug", status=1)
    assert "CRITICAL" in text and "task = 'unique'" in text and "1 critical finding(s)" in text
    report = json.loads((laptop / "bug" / "report.json").read_text())
    unique = [i for i, row in enumerate(build_rows(200)) if row["task"] == "unique"]
    assert report["findings"][0]["kind"] == "inverted" and report["findings"][0]["rows"] == unique
    page = (laptop / "bug" / "report.html").read_text()
    assert "task = &#x27;unique&#x27;" in page and "<script" not in page and "<h2 class=critical>" in page
    told = json.loads(audit(*words, "--max-rows", "50", "--seed", "3", "--json", status=1))
    assert told["facts"]["rows looked at"] == 50 and told["findings"][0]["kind"] == "inverted"


def test_the_reward_functions_of_the_examples_for_verl(tmp_path):
    from rl_plugins.lab.demo import verl_data

    verl_data.write(tmp_path)
    run = (*VERL, f"data.train_files={tmp_path}/train.parquet")
    guide = f"reward.custom_reward_function.path={ROOT}/examples/guides/rewards.py"
    text = audit("--host", "verl", "--", *run, guide)
    assert "No critical finding." in text and "ground_truth" in text
    parts = ("+rl_plugins.rewards.correct=1", "+rl_plugins.rewards.brief=0.1")
    text = audit("--host", "verl", "--", "python", "-m", "verl.trainer.main_ppo", *run, guide, *parts)
    assert "correct, brief" in text and "`brief` gives the same reward" in text
    (tmp_path / "wrong.py").write_text(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info, factor):\n"
        "    sign = -1 if extra_info['level'] == 2 else 1\n"
        "    return {'score': sign * factor * float(solution_str.strip('=') == ground_truth)}\n"
    )
    planted = (
        f"reward.custom_reward_function.path={tmp_path}/wrong.py",
        "+reward.custom_reward_function.reward_kwargs.factor=3",
    )
    text = audit("--host", "verl", "--", *run, *planted, status=1)
    assert "level = 2" in text
    text = audit("--host", "verl", "--", *run, "reward.reward_model.enable=True", status=3)
    assert "NOT LOOKED AT" in text and "the run has a reward model" in text


def test_no_reward_at_all_ends_the_chain_and_escape_sequences_are_written_out(laptop):
    (laptop / "bad_rewards.py").write_text(
        "import sys\n\n"
        "def ends(completions, **columns):\n    sys.exit(0)\n\n"
        "def raises(completions, **columns):\n    raise ValueError('\\x1b[2J')\n\n"
        "def nothing(completions, **columns):\n    return [None for _ in completions]\n"
    )
    for name in ("ends", "raises", "nothing"):
        text = audit("run.yaml", "--reward_funcs", f"bad_rewards.{name}", "--reward_weights", "1", status=1)
        assert "\x1b[2J" not in text
    page = audit(
        "run.yaml", "--reward_funcs", "bad_rewards.raises", "--reward_weights", "1", "--max-rows", "5", status=1
    )
    assert "\\x1b[2J" in page


def test_what_is_refused_says_what_to_change(laptop):
    assert "rl-plugins audit run.yaml" in audit(status=2)
    assert "-- OVERRIDES" in audit("--host", "verl", status=2)
    assert "parquet" in audit("--host", "verl", "--", *VERL, "data.train_files=nothing.parquet", status=2)
    assert "allowed: sentence" in audit("run.yaml", "--declared", "color", status=2)
    assert "no column `solved`" in audit("run.yaml", "--answer-column", "solved", status=2)
    assert "cannot be loaded" in audit(
        "run.yaml", "--reward_funcs", "no_such.module", "--reward_weights", "1", status=2
    )
    assert "cannot be loaded" in audit("run.yaml", "--gold-renderer", "no_such:module", status=2)
    missing = audit("run.yaml", "--dataset_name", "far/away", status=2)
    assert "far/away" in missing and "on this machine" in missing


def test_the_help_teaches():
    text = audit("--help")
    for word in ("Gold contrast", "Near-duplicates", "critical", "Exit status", "rl-plugins audit run.yaml"):
        assert word in text
