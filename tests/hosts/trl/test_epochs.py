"""A resume in a later pass over the dataset: the prompts that an uninterrupted run would have had, in their order."""

from __future__ import annotations

import pytest
import torch
from harness import make, weights
from messages import raises

from rl_plugins.core.errors import StateError
from rl_plugins.lab.demo.tasks import build_dataset

pytestmark = pytest.mark.host

ROWS, STEPS, A_PASS = 60, 15, 7  # 8 prompts a step
ACROSS = (6, 7, 8, 14)  # in the first pass, at its end, in the second, at the end of that


class Recorder:
    """A reward function that knows which prompts it saw in every step."""

    __name__ = "recorder"

    def __init__(self):
        self.seen = {}

    def __call__(self, prompts, completion_ids, trainer_state, **kwargs):
        self.seen.setdefault(trainer_state.global_step, []).append([str(p) for p in prompts])
        return [sum(c) % 7 / 7 for c in completion_ids]


def run(folder, methods, resume=None, **options):
    """(trainer, prompts of every step)."""
    recorder = Recorder()
    settings = dict(
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=1,
        learning_rate=0.05,
        optim="adamw_torch",
        max_completion_length=6,
        dataset=build_dataset(ROWS, seed=1),
    )
    t = make(folder, methods, reward=recorder, **{**settings, **options})
    t.train(resume_from_checkpoint=resume)
    return t, recorder.seen


@pytest.mark.parametrize("methods", [["mc_grpo"], ["v0_5"]], ids=lambda m: m[0])
def test_a_resume_in_a_later_pass_has_the_prompts_of_an_uninterrupted_run(tmp_path, methods):
    whole, prompts = run(tmp_path, methods)
    assert whole.state.epoch > 2 and prompts[0] != prompts[A_PASS] != prompts[2 * A_PASS]
    for step in ACROSS:
        again, rest = run(tmp_path, methods, resume=str(tmp_path / f"out/checkpoint-{step}"), save_strategy="no")
        assert rest == {k: v for k, v in prompts.items() if k >= step} and len(rest) == STEPS - step
        assert torch.equal(weights(again), weights(whole)), step


def test_a_stream_is_resumed_in_its_first_pass_and_refused_later(tmp_path):
    def stream():
        return build_dataset(24, seed=1).to_iterable_dataset()  # three steps

    options = dict(max_steps=5, per_device_train_batch_size=64)
    whole, prompts = run(tmp_path, ["filter"], dataset=stream(), **options)
    first = {p for step in range(3) for p in prompts[step][0]}
    assert len(first) == 24 and set(prompts[3][0]) < first, "the second pass"
    again, rest = run(tmp_path, ["filter"], str(tmp_path / "out/checkpoint-2"), dataset=stream(), **options)
    assert rest == {k: v for k, v in prompts.items() if k >= 2} and torch.equal(weights(again), weights(whole))
    with raises(StateError, match=r"checkpoint-4.*pass 2"):
        run(tmp_path, ["filter"], str(tmp_path / "out/checkpoint-4"), dataset=stream(), **options)
