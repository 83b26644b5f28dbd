"""GAE in verl's real trainer: a critic is trained, and a method that only changes the loss gets its advantages. Methods
that change rows or advantages are refused beside a critic (`test_start.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradients import reference
from runs import PROMPTS, SAMPLES, finished

from rl_plugins.lab.demo.policy import load_policy

pytestmark = [pytest.mark.host, pytest.mark.long]


def test_a_loss_on_advantages_of_a_critic(tmp_path: Path) -> None:
    run = finished(
        tmp_path / "run",
        [
            "+rl_plugins.methods=[minpro]",
            "algorithm.adv_estimator=gae",
            "critic.strategy=fsdp2",
            f"critic.model.path={load_policy()}",
            "+critic.model.override_config.attn_implementation=sdpa",
            "critic.model.use_remove_padding=False",
            "critic.model.enable_gradient_checkpointing=False",
            "+critic.fsdp.mixed_precision.param_dtype=fp32",
            "critic.fsdp.use_torch_compile=False",
            f"critic.ppo_micro_batch_size_per_gpu={PROMPTS * SAMPLES}",
            "critic.optim.lr=1e-2",
        ],
        trainer="watched_sync",
        RL_PLUGINS_TEST_DUMP="1",
    )
    updates = run.updates()
    assert len(updates) == 2
    for number, update in enumerate(updates):
        norm, rows = reference([update])
        assert update["global_batch_size"] == rows == PROMPTS * SAMPLES
        assert update["grad_norm"] == pytest.approx(norm, rel=1e-4)
        advantages = [
            a[m.bool()] for a, m in zip(*map(update["rows"].get, ("advantages", "response_mask")), strict=True)
        ]
        assert max(float(a.max() - a.min()) for a in advantages) > 0.01, "one per token"
        assert run.metrics(number + 1)["critic/grad_norm"] > 0
    assert run.metrics(2)["critic/vf_loss"] != run.metrics(1)["critic/vf_loss"]
