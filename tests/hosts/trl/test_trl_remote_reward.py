"""A reward service that goes down in a real training: the run goes on without its rewards or stops, by choice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import history, make, weights
from messages import raises
from test_remote_reward import Rewards
from transformers import TrainerCallback

from rl_plugins.core.errors import MethodError
from rl_plugins.tools.disaggregated.reward import remote_reward

pytestmark = pytest.mark.host


@pytest.fixture
def server() -> Iterator[Rewards]:
    made = Rewards()
    yield made
    made.close()


class Outage(TrainerCallback):
    """Half of the completions fail in the second batch, all of them in the third; and the weights after each step."""

    def __init__(self, server: Rewards) -> None:
        self.server, self.weights = server, []  # type: ignore[var-annotated]
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        down = (503, "down")
        self.server.fails = lambda text, k: down if step == 2 or (step == 1 and len(text) % 2) else None
        self.weights.append(weights(self.trainer))


def run(folder: Path, server: Rewards, on_failure: str) -> tuple[Any, Outage]:
    params = {**server.params, "retries": 1, "on_failure": on_failure}
    reward: Any = partial(remote_reward, params=params)
    reward.__name__ = "remote"
    outage = Outage(server)
    size = {"per_device_train_batch_size": 16, "num_generations": 4, "max_steps": 4, "learning_rate": 0.05}
    trainer = make(folder, ["noop"], reward=reward, callbacks=[outage], **size)
    outage.trainer = trainer
    return trainer, outage


def test_training_goes_on_without_the_rewards(tmp_path: Path, server: Rewards) -> None:
    trainer, outage = run(tmp_path, server, "mask")
    trainer.train()
    assert trainer.state.global_step == 4
    failed = history(trainer, "remote_reward/failed")[:4]
    assert failed[0] == failed[3] == 0.0 and 0 < failed[1] < 1 and failed[2] == 1.0
    before = [*outage.weights, weights(trainer)]
    moved = [bool((b - a).abs().max() > 0) for a, b in itertools.pairwise(before)]
    assert moved == [True, True, False, True], "a batch without a reward moves nothing"
    assert history(trainer, "rl_plugins/unrewarded_batches")[-1] == 1.0
    assert not any(math.isnan(x) for x in history(trainer, "loss"))


def test_training_stops_and_names_the_service(tmp_path: Path, server: Rewards) -> None:
    trainer, outage = run(tmp_path, server, "stop")
    with raises(MethodError, match=f"reward service at {server.params['url']} gave no reward in 2 tries.*resume"):
        trainer.train()
    assert trainer.state.global_step == 1 and len(outage.weights) == 2
    assert bool((outage.weights[1] == weights(trainer)).all()), "nothing was trained on what came back"
