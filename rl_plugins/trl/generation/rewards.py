"""TRL's reward functions, called on the driver: by methods in `start` and by `rl-plugins audit`."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState
from trl.trainer.utils import is_async_callable

from rl_plugins.core.errors import ConfigError, shortened, shown
from rl_plugins.core.requests import Chat
from rl_plugins.core.rollouts import Jagged, RewardFunction, Run
from rl_plugins.kit.threads import finished
from rl_plugins.runtime.step_rewards import combined, steps_of, total
from rl_plugins.trl.generation.work import Work
from rl_plugins.trl.host import Trainer

logger = logging.getLogger("rl_plugins")

NOT_PASSED = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass on


def with_reward_functions(run: Run, trainer: Trainer, chat: Chat) -> Run:
    """The run with the reward functions of a trainer."""
    if not hasattr(trainer, "reward_funcs"):
        why = "TRL's asynchronous trainer scores in a process of its own"
        return replace(run, unreachable_rewards=tuple((name, why) for name in run.reward_names))
    loop = getattr(trainer, "async_loop", None)
    wait = finished if loop is None else lambda c: asyncio.run_coroutine_threadsafe(c, loop).result()
    weights = trainer.reward_weights.tolist()
    given = list(zip(trainer.reward_func_names, weights, trainer.reward_funcs, strict=True))
    return _with(run, given, trainer.state, chat, wait)


def with_functions(run: Run, functions: Sequence[Any], weights: Sequence[float] | None) -> Run:
    """The run with functions that a config names, before there is a tokenizer."""
    given = list(zip(run.reward_names, weights or [1.0] * len(functions), functions, strict=True))
    return _with(run, given, TrainerState(), None, finished)


def masking(function: Any, name: str) -> Any:
    """A reward function that does not raise: where it did, it is called with each completion alone, and those on which
    it raises again get None. How many these are is logged as `rewards/NAME/raised`. A reward model is left as it is."""
    if isinstance(function, torch.nn.Module):
        return function

    def alone(given: Mapping[str, Any], i: int) -> dict[str, Any]:
        n = len(given["prompts"])
        return {k: [v[i]] if isinstance(v, list) and len(v) == n else v for k, v in given.items()}

    def told(given: Mapping[str, Any], answers: list[Any], error: Exception) -> list[Any]:
        raised = sum(a is error for a in answers)
        given["log_metric"](f"rewards/{name}/raised", float(raised))
        logger.warning("%s raised on %d of %d completions: %s", name, raised, len(answers), shortened(error))
        return [None if a is error else a for a in answers]

    @functools.wraps(function)
    async def waits(**given: Any) -> Any:
        try:
            return await function(**given)
        except Exception as error:
            answers: list[Any] = []
            for i in range(len(given["prompts"])):
                try:
                    answers += await function(**alone(given, i))
                except Exception:
                    answers.append(error)
            return told(given, answers, error)

    @functools.wraps(function)
    def calls(**given: Any) -> Any:
        try:
            return function(**given)
        except Exception as error:
            answers: list[Any] = []
            for i in range(len(given["prompts"])):
                try:
                    answers += function(**alone(given, i))
                except Exception:
                    answers.append(error)
            return told(given, answers, error)

    return waits if is_async_callable(function) else calls


STEPS = "step_rewards/"
"""Before the name of a reward function: the column of TRL's table of completions that has its lists."""


def with_steps(function: Any, name: str) -> Any:
    """A reward function that may return a list for a completion, one number per step: TRL gets the sum, and its table
    of completions the lists. A reward model is left as it is."""
    if isinstance(function, torch.nn.Module):
        return function

    def summed(given: Mapping[str, Any], answers: Sequence[Any]) -> list[Any]:
        given["log_extra"](STEPS + name, [steps_of(a) for a in answers])
        return [total(a) for a in answers]

    @functools.wraps(function)
    async def waits(**given: Any) -> Any:
        return summed(given, await function(**given))

    @functools.wraps(function)
    def calls(**given: Any) -> Any:
        return summed(given, function(**given))

    return waits if is_async_callable(function) else calls


def noted_steps(trainer: Trainer, work: Work, rewards: Tensor) -> Jagged:
    """Rewards per step of this rank's rows, before TRL moves its table of completions on. A row whose rewards were
    known already has one step.

    Args:
        rewards: (rows of all ranks, functions)
    """
    rows, weights = len(work.mine), trainer.reward_weights.double().cpu()
    noted = [trainer._pending_extra_logs.get(STEPS + name) or [None] * rows for name in trainer.reward_func_names]
    return combined(noted, rewards[work.rank * rows :][:rows].double().cpu(), weights)


def functions_of_config(model: str | None, names: Sequence[str]) -> list[Any]:
    """What a config of `trl grpo` names: a model's name, then functions.

    Raises:
        ConfigError: a function cannot be loaded.
    """
    from trl import rewards

    found: list[Any] = [model] if model else []
    sys.path.insert(0, os.getcwd())  # where TRL looks
    try:
        for name in names:
            module, _, attribute = name.rpartition(".")
            if name == "get_soft_overlong_punishment":  # TRL's script calls it with these
                found.append(rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256))
            else:
                found.append(getattr(importlib.import_module(module) if module else rewards, attribute))
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"The reward function {shown(name)} cannot be loaded: {type(e).__name__}: {e}. Name one of TRL's, or "
            f"module.function with the module in this folder."
        ) from e
    finally:
        sys.path.pop(0)
    return found


def _with(
    run: Run,
    given: Sequence[tuple[str, float, Any]],
    state: Any,
    chat: Chat | None,
    wait: Callable[[Any], Any],
) -> Run:
    reachable, others = [], []
    for name, weight, function in given:
        why = _unreachable(function, chat)
        if why:
            others.append((name, why))
        else:
            reachable.append(RewardFunction(name, weight, _caller(name, function, state, chat, wait), function))
    return replace(run, reward_functions=tuple(reachable), unreachable_rewards=tuple(others))


def _unreachable(function: Any, chat: Chat | None) -> str:
    if isinstance(function, (str, torch.nn.Module)):
        return "it is a reward model, which runs on the devices of the trainer"
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    needed = {name for name, p in parameters.items() if p.default is p.empty}
    if "environments" in needed:
        return "it scores episodes of an environment"
    if chat is None and "completion_ids" in needed:
        return "it reads token ids, and there is no tokenizer before the run; the method `reward_audit` has one"
    return ""


def _caller(
    name: str, function: Any, state: Any, chat: Chat | None, wait: Callable[[Any], Any]
) -> Callable[[Sequence[Mapping[str, Any]], Sequence[str]], list[float | None]]:
    def call(rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float | None]:
        keys = dict.fromkeys(k for row in rows for k in row if k not in NOT_PASSED)
        columns: dict[str, Any] = {k: [row.get(k) for row in rows] for k in keys}
        prompts = [row["prompt"] for row in rows]
        if chat is not None:
            columns["completion_ids"] = [[*chat.encode(text), *chat.eos[:1]] for text in completions]
        answers = function(
            prompts=prompts,
            completions=[
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, completions, strict=True)
            ],
            trainer_state=state,
            log_extra=lambda column, values: None,
            log_metric=lambda name, value: None,
            **columns,
        )
        if is_async_callable(function):
            answers = wait(answers)
        found = [None if a is None else float(a) for a in map(total, answers)]
        if len(found) != len(rows):
            raise ValueError(f"the reward function `{name}` returned {len(found)} rewards for {len(rows)} completions")
        return found

    return call
