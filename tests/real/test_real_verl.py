"""Methods of every kind in verl's real V1 trainer on the shallow copy of the real model. Ray starts once: every step
has another stack, and begins with the weights, prompts and noise of the first one, which is plain GRPO."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "hosts" / "verl")]

import pyarrow
import pyarrow.parquet
import reasoning_helpers as helpers
from runs import Run, walked
from shallow_policy import TOOL, shallow_policy

from rl_plugins.core.errors import ConfigError
from rl_plugins.environments import reasoning_gym
from rl_plugins.lab.demo import verl_data
from rl_plugins.verl.config import compose
from rl_plugins.verl.start import prepare

pytestmark = [pytest.mark.real, pytest.mark.host]

TABLE = HERE.parents[1] / "build" / "real" / "verl.json"
PROMPTS, SAMPLES = 6, 4
PLAIN = "noop"
APART = 1e-3  # of an update from that of plain GRPO, as a share of it
AGENT = "turn_control"
# The method that acts -> the stack of its step, if there is more in it. One that learns from a batch comes twice.
STACKS = {
    "hgpo": f"{AGENT}+hgpo",
    "cleaner": "",
    "latr": "",
    "mc_grpo": "",
    "adhint_gradients": "adhint_rollouts+adhint_advantages+adhint_gradients",
    "best_perm": "",
    "gdpo": "",
    "epo": f"{AGENT}+epo",
    "aepo_advantages": "aepo_rollout+aepo_advantages",
    "drpo": "",
    "grpo_roc": "",
    "dars": "",
    "echo_shaping": "echo_labels+echo_tree+echo_shaping",
    "m_grpo": "m_grpo_rollout+m_grpo",
    "vade": "",
    "fapo": "",
    "d3s": "",
    "branch_pruning": "branch_text_rollout+branch_advantages+branch_pruning",
    "ps_grpo": "",
    "ui_s1": "ui_s1_rollout+ui_s1",
    "sol_rl_select": "sol_rl_select+sol_rl_advantages",
    "rtv_pdr": "",
    "brpo": "",
}
TWICE = ("vade",)
MASKED = "decodes masked diffusion models, and this one is causal"
IMAGES = "makes samples of diffusion policies"
# Refused before Ray starts -> why it cannot act on a causal model; of the others the error says what to change.
REFUSED = {
    **dict.fromkeys(("ass", "cj_grpo", "eoser", "mdlm"), MASKED),
    **dict.fromkeys(("branch_grpo", "branch_rollout", "sol_rl", "sol_rl_explore"), IMAGES),
    **dict.fromkeys(("areal", "areal_admission", "mssr", "rollart_redundancy"), ""),
}
TOOLS = "'reasoning_helpers:Tool'"
PARAMS = [
    "grpo_roc.penalty='reasoning_helpers:length_penalty'",
    "sol_rl_select.oversample=2",
    "dars.n_first=2",
    "dars.n_max=6",
    "best_perm.hints_column=hints",
    "best_perm.n_first=2",
    "best_perm.n_hint=1",
    "drpo.reward=solved",
    "fapo.judge='reasoning_helpers:wordy'",
    "brpo.judge='reasoning_helpers:shorter'",
    f"turn_control.environment={TOOLS}",
    "turn_control.limit=3",
    "turn_control.turn_tokens=16",
    f"cleaner.environment={TOOLS}",
    "cleaner.marker='```python'",
    "cleaner.turn_tokens=16",
    "cleaner.max_turns=3",
    f"aepo_rollout.environment={TOOLS}",
    "aepo_rollout.turn_tokens=16",
    "aepo_rollout.initial_rollouts=2",
    "aepo_rollout.branch_probability=0.3",
    "latr.lookahead=[1,2]",
    "latr.tau_abs=0.1",
    "latr.tau_rel=0.6",
    "adhint_rollouts.reference_column=reference",
    "echo_labels.n_votes=4",
    "echo_labels.extract='rl_plugins.environments.reasoning_gym:answer_of'",
    "echo_tree.entropy_delta_threshold=-9.0",
    "m_grpo_rollout.parse='reasoning_helpers:blocks'",
    "m_grpo_rollout.max_calls=1",
    "m_grpo_rollout.max_turns=2",
    "m_grpo.sub_per_rollout=1",
    "ui_s1_rollout.match='reasoning_helpers:same_answer'",
    "ui_s1_rollout.column=expert",
    "ui_s1_rollout.step_tokens=16",
    "ui_s1_rollout.max_steps=2",
    "ui_s1.rows_per_rollout=2",
    "rtv_pdr.training=refined",
    "rtv_pdr.attempts=4",
    "rtv_pdr.keep=2",
    "rtv_pdr.votes=2",
    "rtv_pdr.summary_tokens=8",
    "rtv_pdr.judge_tokens=4",
    "branch_text_rollout.places=[0,1,2]",
]


def places() -> list[str]:
    """The stack of every step; the first two are plain GRPO."""
    acting = [stack or name for name, stack in STACKS.items() for _ in range(1 + (name in TWICE))]
    return [PLAIN, PLAIN, *acting]


def write_rows(folder: Path) -> Path:
    """Prompts with a short system prompt, with the tool's and without any: of unequal lengths."""
    systems = [reasoning_gym.SYSTEM] * 3 + [TOOL, reasoning_gym.SYSTEM, None]
    made = [helpers.with_columns(24, systems[i % 6])[i] for i in range(24)]
    columns = ("task", "reference", "solution", "hints", "paraphrase_set_id", "expert")
    table = reasoning_gym.verl_rows(made)
    for row, given in zip(table, made, strict=True):
        row["extra_info"] |= {name: given[name] for name in columns}
    folder.mkdir(parents=True)
    file = folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), file)
    return file


def overrides(folder: Path) -> list[str]:
    return ["+rl_plugins.methods=[noop,idle]", *(f"+carousel_params.{p}" for p in PARAMS), *options(folder)]


def options(folder: Path) -> list[str]:
    file, actor = write_rows(folder / "rows"), "actor_rollout_ref.actor"
    return [
        "+rl_plugins.rewards.solved=1",
        "+rl_plugins.rewards.brief=0.4",
        f"data.train_files={file}",
        f"data.val_files={file}",
        "data.shuffle=False",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=160",
        "data.max_response_length=80",
        f"actor_rollout_ref.model.path={shallow_policy()}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.optim.lr=1e-4",
        f"{actor}.calculate_entropy=True",
        "reward.custom_reward_function.path=pkg://verl_parts",
        "reward.custom_reward_function.name=reward",
        "++reward.custom_reward_function.reward_kwargs={}",
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    environment = {"RL_PLUGINS_TEST_SAME": "1", "TQ_NUM_THREADS": "1"}
    return walked(tmp_path_factory.mktemp("real"), places(), overrides, PLAIN, paths=[HERE], **environment)


def moved(run: Run, number: int) -> torch.Tensor:
    """How far a step (from 1) moved the last layer."""
    return torch.load(run.folder / f"moved{number}.pt").double()


def distance(run: Run, number: int) -> float:
    """Of a step's update from that of plain GRPO, as a share of the latter."""
    plain = moved(run, 1)
    return float((moved(run, number) - plain).norm() / plain.norm())


def step_of(name: str) -> int:
    """The number of a method's last step, from 1."""
    made = places()
    return len(made) - made[::-1].index(STACKS[name] or name)


def signs(run: Run, name: str) -> dict[str, float]:
    """The method's own metrics that are not zero."""
    logged = run.metrics(step_of(name))
    return {k: v for k, v in logged.items() if k.removeprefix("actor/").startswith(f"{name}/") and v}


def outcome(run: Run, name: str) -> dict[str, Any]:
    """A line of the table of outcomes, as TRL's are."""
    number = step_of(name)
    beside = [other for other in (STACKS[name] or name).split("+") if other != name]
    line = {"method": name, "beside": beside, "outcome": "failed"}
    if number - 1 in run.failed:
        return {**line, "why": run.failed[number - 1].strip().splitlines()[-1]}
    norm = float(moved(run, 1).norm())
    line |= {"metrics": signs(run, name), "difference": distance(run, number) * norm, "baseline_update": norm}
    return {**line, "outcome": "acted" if line["metrics"] and line["difference"] > APART * norm else "failed"}


def refusal(name: str, folder: Path) -> str:
    """The error of the dry run; empty if it goes."""
    settings = [*verl_data.overrides(folder, shallow_policy(), folder), *options(folder)]
    mode = "trainer.v1.trainer_mode=rl_plugins_sync"
    keys = [line.lstrip("+").split("=")[0] for line in settings]
    lines = [line for i, line in enumerate(settings) if keys[i] not in keys[i + 1 :]]
    try:
        prepare(compose([*lines, mode, f"+rl_plugins.methods=[{name}]"]))
    except ConfigError as error:
        return str(error)
    return ""


def test_plain_grpo_again_is_the_same(run: Run) -> None:
    assert moved(run, 1).norm() > 0 and distance(run, 2) < APART / 10


def test_rollout_and_trainer_agree(run: Run) -> None:
    """Prompts with and without a system prompt, of unequal lengths, and texts that were only read."""
    logged = [e["metrics"].get("training/rollout_probs_diff_max", 0.0) for e in run.of("stepped")]
    assert 0 < max(logged) < 5e-5


@pytest.mark.parametrize("name", STACKS)
def test_a_method_acts(run: Run, name: str) -> None:
    assert signs(run, name), sorted(run.metrics(step_of(name)))
    assert distance(run, step_of(name)) > APART


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: refusal(name, tmp_path_factory.mktemp(name)) for name in REFUSED}


def test_what_cannot_act_is_refused(errors: dict[str, str]) -> None:
    assert all(errors.values()), errors


def test_the_table_is_kept(run: Run, errors: dict[str, str]) -> None:
    """For `benchmarks/real_model.py`."""
    lines = [outcome(run, name) for name in STACKS]
    for name, why in REFUSED.items():
        line = {"method": name, "outcome": "not applicable" if why else "refused"}
        lines.append({**line, "why": why or errors[name].splitlines()[0]})
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(json.dumps(sorted(lines, key=lambda line: line["method"]), indent=1) + "\n")
