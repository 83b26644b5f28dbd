"""The same prompts, state and rewards in both hosts' forms: the same prompts chosen, the same plans, round by round."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from runs import PROBES

sys.path.insert(0, str(PROBES))

pytest.importorskip("trl", reason="TRL is not installed")

import harness

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.lab.demo import verl_data
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_tokens
from rl_plugins.testing.contract.compare import differences
from rl_plugins.trl import capabilities as trl_capabilities
from rl_plugins.verl import capabilities as verl_capabilities
from rl_plugins.verl.config import Settings, compose
from rl_plugins.verl.doctor import ParquetRows

pytestmark = pytest.mark.host

HINTS = {"templates": ["{prompt} 1", "{prompt} 2"], "n_first": 4, "n_hint": 2}
STACKS: dict[str, dict[str, dict[str, Any]]] = {
    "vade": {"vade": {}},
    "v0": {"v0": {"prior": "running_mean"}},
    "v0_5": {"v0_5": {"k_init": 4}},
    "dars beside vade": {"vade": {}, "dars": {"n_first": 4}},
    "xrpo": {"xrpo_allocate": {}, "xrpo_seeds": {"second_round": False}},
    "brorl": {"brorl": {"ramp": [[1, 16]]}},
    "linear_ts": {"linear_ts": {"column": "level", "draws": 4}},
    "slices": {"difficulty_slices": {"heads": 4, "column": "level"}},
    "slices of own counts": {"difficulty_slices": {"heads": 2, "refresh": 2}},
    "best_perm": {"best_perm": HINTS},
    "gdro_rollout": {"gdro_rollout": {"edges": [0.55], "hysteresis": 0.0, "arm_sign": "paper", "baseline": "none"}},
    "drive": {"drive": {"sizes": [1.0, 12], "batches": [1], "rollouts": [8, 16], "max_tokens": [14, 6]}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return verl_data.write(tmp_path_factory.mktemp("plans")) / "train.parquet"


def batches(stack: MethodStack, plan: Any, size: int) -> Iterator[list[PlanRow]]:
    """What four batches of 8 prompts with 8 rollouts come to; rewards depend on batch, prompt and number alone."""
    for batch in range(4):
        rows = list(plan([(8 * batch + i) % 16 for i in range(8)]).rows)
        rounds = Rounds(stack, rows, 8, 64, size)
        while True:
            made = [row for row in rounds.rows for _ in range(row.n + row.spare)]
            made.sort(key=lambda row: row.group)
            group = [row.group for row in made]
            seen = [group[:i].count(g) for i, g in enumerate(group)]
            rewards = [
                float(random.Random(repr((batch, row.prompt_index, k))).random() < row.prompt_index % 4 / 4)
                for row, k in zip(made, seen, strict=True)
            ]
            if not any(m.rounds for m in stack.methods):
                break
            if not rounds.more(torch.tensor(group), torch.tensor(rewards, dtype=torch.float64)):
                break
        yield list(rounds.rows)
        texts = [f"={row.prompt_index}" for row in made]
        index = [row.prompt_index for row in made]
        payload = [row.payload for row in made]
        rollouts = make_rollouts(rewards, group, prompt_index=index, batch=batch, text=texts, payload=payload)
        decide(stack, rollouts, make_tokens(rollouts), None, grpo_advantages, 64)


@pytest.mark.parametrize("name", STACKS)
def test_both_hosts_plan_alike(tmp_path: Path, data: Path, name: str) -> None:
    params = STACKS[name]
    table = pyarrow.parquet.read_table(data).to_pylist()
    rows = [{"prompt": row["prompt"], "level": row["extra_info"]["level"]} for row in table]
    args = harness.config(tmp_path, [*params], method_params=params, max_steps=4)
    known = trl_capabilities.KnownRun(args, Dataset.from_list(rows), len(rows), ("score",))
    trl = build_stack([*params], params)
    trl.start(trl_capabilities.run_of(known))

    options = ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=8", f"data.train_files={data}"]
    read = verl_capabilities.Reader(compose(options), "sync")
    settings = Settings(tuple(params), params)
    verl, told = settings.stack(), verl_capabilities.Known(read, settings, ParquetRows([data], "prompt"), len(rows), 4)
    verl.start(told.run())

    one = batches(trl, lambda proposal: trl_capabilities.first_plan_of(trl, known, proposal), len(rows))
    two = batches(verl, lambda proposal: told.plan(verl, proposal), len(rows))
    plans = list(zip(one, two, strict=True))
    assert all(a == b for a, b in plans) and len(plans) == 4
    assert len({tuple((row.prompt_index, row.n + row.spare, str(row.edit)) for row in a) for a, _ in plans}) > 1
    assert not differences(trl.state_dict("data"), verl.state_dict("data"))
