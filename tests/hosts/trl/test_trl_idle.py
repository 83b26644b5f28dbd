"""Real TRL runs of methods that do nothing, and of rewards that teach nothing: one warning, in the fifth batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import history, make
from transformers import TrainerCallback

from rl_plugins.runtime.idle import BATCHES

pytestmark = pytest.mark.host
SMALL = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=2)


def run(tmp_path: Path, caplog: Any, methods: list[str], steps: int, **options: Any) -> tuple[Any, list[list[str]]]:
    """The trainer, and the warnings of each step."""
    steps_of: list[list[str]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps_of.append([r.getMessage() for r in caplog.records if r.name == "rl_plugins"])
            caplog.clear()

    caplog.set_level("WARNING", "rl_plugins")
    trainer = make(tmp_path, methods, max_steps=steps, callbacks=[Watch()], **{**SMALL, **options})
    caplog.clear()
    trainer.train()
    return trainer, steps_of


def test_latr_on_answers_of_two_tokens_with_equal_rewards(tmp_path, caplog):
    def equal(completion_ids: Any = None, **kwargs: Any) -> list[float]:
        return [1.0] * len(completion_ids)

    params = {"latr": {"lookahead": [1]}}
    options = dict(reward=equal, temperature=0.1, method_params=params)
    trainer, warned = run(tmp_path, caplog, ["latr"], BATCHES + 1, **options)
    assert history(trainer, "latr/copies")[:BATCHES] == [0.75] * BATCHES
    assert history(trainer, "frac_reward_zero_std")[:BATCHES] == [1.0] * BATCHES
    assert not any(warned[: BATCHES - 1]) and not warned[BATCHES]
    rewards, latr = warned[BATCHES - 1]
    assert "no token had an advantage other than 0" in rewards and "frac_reward_zero_std" in rewards
    assert latr.startswith("latr: it did nothing") and "latr/branches is 1" in latr and "`tau_abs`" in latr


def test_echo_tree_without_branches(tmp_path, caplog):
    trainer, warned = run(tmp_path, caplog, ["echo_tree"], BATCHES + 1, max_completion_length=6)
    assert history(trainer, "echo_tree/branches") == [0.0] * (BATCHES + 1)
    assert not any(warned[: BATCHES - 1]) and not warned[BATCHES]
    (text,) = warned[BATCHES - 1]
    assert text.startswith("echo_tree: it did nothing") and "`branch_threshold`" in text


def test_a_healthy_run_does_not_warn(tmp_path, caplog):
    params = {"latr": {"lookahead": [2, 3], "tau_abs": 0.01, "tau_rel": 0.9}}
    options = dict(max_completion_length=8, method_params=params, per_device_train_batch_size=16)
    trainer, warned = run(tmp_path, caplog, ["latr"], BATCHES + 1, **options)
    assert min(history(trainer, "latr/branches")) > 1 and not any(warned)
