"""The reward functions of `methods.fapo.rewards`, loaded from a config and called by verl's own reward manager."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.policy import build_tokenizer
from rl_plugins.verl import costs, scores
from rl_plugins.verl.config import compose, read_settings
from rl_plugins.verl.processes import program_errors
from rl_plugins.verl.prompts import NUMBERS, STEPS

pytestmark = pytest.mark.host


def odd(prompt: str, answer: str, completion: str) -> str:
    """A judge."""
    return f"\\boxed{{{0 if completion.startswith('odd') else -1}}}"


def of_steps(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
    """A reward per step, or in a dict by the name of the reward."""
    steps = [None if x == "-" else float(x) for x in solution_str.split("|")]
    return {"score": 0.0, "process": steps, "format": 1.0} if ground_truth == "named" else steps


def managed(function: str, replies: list[str], truth: list[Any], info: list[dict[str, Any]], *more: str) -> list[Any]:
    """What the reward manager makes of completions, all of them under way at the same time."""
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    path = ["reward.custom_reward_function.path=pkg://rl_plugins.methods.fapo.rewards"]
    config = compose([*path, f"reward.custom_reward_function.name={function}", *more])

    class Words:
        """A token is a completion."""

        def decode(self, ids: Any, skip_special_tokens: bool) -> str:
            return replies[int(ids[0])]

    def row(i: int) -> Any:
        return DataProto.from_dict(
            tensors={"responses": torch.tensor([[i]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64)},
            non_tensors={
                "data_source": np.array(["x"], dtype=object),
                "reward_model": np.array([{"ground_truth": truth[i]}], dtype=object),
                "extra_info": np.array([info[i]], dtype=object),
            },
        )

    async def run() -> list[Any]:
        manager = NaiveRewardManager(config, build_tokenizer(), get_custom_reward_fn(config))
        manager.loop, manager.tokenizer = asyncio.get_running_loop(), Words()
        return await asyncio.gather(*(manager.run_single(row(i)) for i in range(len(replies))))

    return asyncio.run(run())


def test_fapo() -> None:
    replies = ["so \\boxed{5}", "odd so \\boxed{5}!", "\\boxed{6}", "odd so \\boxed{5}!"]
    info = [{"question": "q", "split": split} for split in ("train", "train", "train", "test")]
    options = (
        "+reward.custom_reward_function.reward_kwargs.params.judge='test_verl_rewards:odd'",
        "+reward.custom_reward_function.reward_kwargs.params.penalty=0.5",
    )
    found = managed("fapo_score", replies, ["5"] * 4, info, *options)
    assert [row["reward_score"] for row in found] == [1.0, 0.5, -1.0, 1.0]
    parts = [row["reward_extra_info"] for row in found]
    assert [p["acc"] for p in parts] == [True, True, False, True]
    assert [p["is_flawed_positive"] for p in parts] == [False, True, False, False]
    assert [p["pred"] for p in parts] == ["5", "5", "6", "5"] and not any(p["judge_failed"] for p in parts)


def test_fapo_judge() -> None:
    info = [{"total_steps": 4}] * 3
    found = managed("fapo_judge_score", ["\\boxed{-1}", "\\boxed{3}", "\\boxed{4}"], [-1, 2, 2], info)
    assert [row["reward_score"] for row in found] == [1.0, 0.75, -1.0]


class Worker:
    """An agent-loop worker of which only the scoring is real."""

    reward_loop_worker_handles = (object(),)

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        if isinstance(self.answer, Exception):
            raise self.answer
        given = self.answer if isinstance(self.answer, dict) else {"reward_score": self.answer}
        outputs[-1].reward_score = given["reward_score"]
        outputs[-1].extra_fields["reward_extra_info"] = given.get("reward_extra_info", {"acc": self.answer})


def output_of(*mask: int) -> Any:
    ids = list(range(5, 5 + len(mask)))
    return SimpleNamespace(reward_score=None, extra_fields={}, response_ids=ids, response_mask=list(mask))


def scored(answer: Any, on_error: str = "stop", validate: bool = False) -> float:
    worker, output = Worker(answer), output_of(1)
    scores.install(worker, on_error)

    async def loop() -> None:
        costs._loop.set(None if validate else costs.LoopUnderWay())
        await worker._compute_score([output], kwargs={})

    asyncio.run(loop())
    assert "reward_extra_info" in output.extra_fields
    return output.reward_score


def test_none_is_no_reward_and_an_exception_ends_the_run_or_is_no_reward() -> None:
    assert scored(0.5) == 0.5
    for answer, on_error in ((None, "stop"), (float("nan"), "stop"), (ValueError("no"), "mask")):
        assert math.isnan(scored(answer, on_error)) and scored(answer, on_error, validate=True) == 0.0
    worker = Worker(ValueError("no"))
    scores.install(worker, "stop")
    with pytest.raises(ValueError):
        asyncio.run(worker._compute_score([output_of(1)], kwargs={}))
    (told,) = program_errors(worker)  # what the driver asks for
    assert "ValueError: no" in told and "on_reward_error" in told


@pytest.mark.parametrize("answer", [0.5, None])
def test_a_worker_notes_what_the_driver_would_read_tokens_for(answer: float | None) -> None:
    """Tokens, those that are trained, the last one and the score, which verl gives to all rows of a loop; a reward
    model that comes later has not said it."""
    worker, rows = Worker(answer), [output_of(1, 0, 1), output_of(), output_of(1)]
    if answer is None:
        worker.reward_loop_worker_handles = None  # type: ignore[assignment]
    scores.install(worker, "stop")
    asyncio.run(worker._compute_score(rows, kwargs={}))
    noted = [row.extra_fields[NUMBERS] for row in rows]
    assert noted == [(3, 2, 7, answer), (0, 0, None, answer), (1, 1, 5, answer)]


def test_rewards_per_step_become_sums() -> None:
    """verl's own manager hands lists on; the worker notes them in all rows of a loop, and gives verl the sums."""
    path = f"reward.custom_reward_function.path={__file__}"
    answers = managed("of_steps", ["1|0.5|-", "2", "-", "0.25|1"], ["", "", "", "named"], [{}] * 4, path)

    async def loop(answer: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
        costs._loop.set(costs.LoopUnderWay())
        worker, (first, last) = Worker(answer), (output_of(1), output_of(1, 1))
        scores.install(worker, "stop", names)
        await worker._compute_score([first, last], kwargs={})
        assert first.extra_fields[STEPS] is last.extra_fields[STEPS]
        return last.reward_score, last.extra_fields["reward_extra_info"], last.extra_fields[STEPS]

    one, number, none, named = (
        asyncio.run(loop(answer, ("process", "format") if i == 3 else ("score",))) for i, answer in enumerate(answers)
    )
    assert one == (1.5, {"acc": 1.5}, [pytest.approx([1.0, 0.5, math.nan], nan_ok=True)])
    assert number == (2.0, {"acc": 2.0}, [[2.0]]) and math.isnan(none[0]) and none[1] == {"acc": None}
    assert named == (0.0, {"score": 0.0, "process": 1.25, "format": 1.0}, [[0.25, 1.0], None])


def test_the_option_is_one_of_two() -> None:
    assert read_settings(compose(["+rl_plugins.on_reward_error=mask"])).on_reward_error == "mask"  # type: ignore[union-attr]
    with raises(ConfigError, match="skip"):
        read_settings(compose(["+rl_plugins.on_reward_error=skip"]))
    with raises(ConfigError, match="on_reward_error"):
        read_settings(compose(["+rl_plugins.on_reward_error=''"]))
