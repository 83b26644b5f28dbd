"""A teacher in verl without Ray: what its workers are given, what becomes of their answer, whose model they load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import raises

os.environ.setdefault("VERL_PLATFORM", "cpu")

from memory_queue import MemoryQueue
from transfer_queue import KVBatchMeta

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.stack import build_stack
from rl_plugins.verl import TEACHER_VARIABLE, batch, capabilities, teacher
from rl_plugins.verl.config import compose, read_settings
from rl_plugins.verl.plugin import teacher_as_reference
from rl_plugins.verl.rows import TOKEN_COLUMNS

pytestmark = pytest.mark.host
PROMPTS = {"a": "12", "b": None, "c": "7", "d": "345"}
RESPONSES = {"a": [3, 4], "b": [5], "c": [6, 7, 8], "d": [9], "padding": [1]}


@pytest.mark.parametrize("order", [list(RESPONSES), ["d", "padding", "b", "a", "c"]])
def test_a_response_is_read_behind_the_prompt_of_the_teacher(monkeypatch: pytest.MonkeyPatch, order: list[str]) -> None:
    queue = MemoryQueue()
    monkeypatch.setattr(batch, "tq", queue)
    monkeypatch.setattr(teacher, "tq", queue)
    queue.put_rows({key: {"responses": torch.tensor(RESPONSES[key])} for key in order})
    given: list[KVBatchMeta] = []

    def compute(made: KVBatchMeta) -> None:
        given.append(made)
        for key in made.keys:
            row = queue.rows[key]
            assert row["position_ids"].tolist() == list(range(len(row["input_ids"])))
            # of a token at the place before it: what it is, and all that stands before it
            sums = torch.cumsum(row["input_ids"], 0)
            row["log_probs"] = (100.0 * row["input_ids"] + sums).roll(-1)

    rows = KVBatchMeta(partition_id="train", keys=order, tags=[{}] * len(order), extra_info={})
    teacher.read_by_teacher(rows, PROMPTS, lambda text: [int(c) for c in text], compute, 0.5, 4)
    found = {key: queue.rows[key][TOKEN_COLUMNS["teacher_logprobs"]].tolist() for key in order}
    assert {key: found[key] for key in "acd"} == {
        "a": [300 + 6, 400 + 10],
        "c": [600 + 13, 700 + 20, 800 + 28],
        "d": [900 + 21],
    }
    assert all(x != x for key in ("b", "padding") for x in found[key]), "NaN: nobody read them"
    (made,) = given
    assert made.partition_id != "train" and len(made.keys) == len(set(made.keys)) == 4, "filled to a multiple of 4"
    assert made.extra_info == {"temperature": 0.5, "calculate_entropy": False, "compute_loss": False}
    assert set(queue.rows) == set(order), "its rows are gone"


def test_nobody_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = MemoryQueue()
    monkeypatch.setattr(batch, "tq", queue)
    queue.put_rows({"b": {"responses": torch.tensor([5, 6])}})
    rows = KVBatchMeta(partition_id="train", keys=["b"], tags=[{}], extra_info={})
    teacher.read_by_teacher(rows, PROMPTS, len, lambda made: pytest.fail("no pass"), 1.0, 1)
    assert torch.isnan(queue.rows["b"][TOKEN_COLUMNS["teacher_logprobs"]]).all()


def checked(*overrides: str, **teacher_of: Any) -> dict[str, Any]:
    grpo = ("algorithm.adv_estimator=grpo", "trainer.v1.trainer_mode=rl_plugins_sync")
    config = compose(["+rl_plugins.methods=[opd]", *grpo, *overrides])
    settings = read_settings(config)
    assert settings is not None
    return capabilities.check(build_stack(["opd"], {"opd": teacher_of}), settings, config)


def test_the_model_takes_the_place_of_the_reference() -> None:
    actor = "actor_rollout_ref.actor"
    options = checked(teacher="a/b")
    assert options == {f"{actor}.use_kl_loss": True, f"{actor}.kl_loss_coef": 0.0}
    again = checked(*(f"{k}={v}" for k, v in options.items()), teacher="a/b")
    assert again == options
    for taken in (
        f"{actor}.use_kl_loss=True",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.model.lora_rank=8",
    ):
        with raises(ConfigError, "has the teacher a/b, for which verl has one model beside the policy"):
            checked(taken, teacher="a/b")


def test_the_worker_of_the_reference_loads_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Config:
        model_config: Any = None
        path: str = "policy"
        hf_config_path: str = "policy"
        tokenizer_path: str = "policy"

    worker = type("ActorRolloutRefWorker", (), {"ref_worker_cls": staticmethod(lambda config: config)})
    monkeypatch.setenv(TEACHER_VARIABLE, "a/b")
    teacher_as_reference(SimpleNamespace(ActorRolloutRefWorker=worker))
    made = worker().ref_worker_cls(config=Config(model_config=Config())).model_config
    assert (made.path, made.hf_config_path, made.tokenizer_path) == ("a/b", "a/b", "policy")
