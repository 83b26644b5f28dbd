"""What one run of TRL's asynchronous trainer offers to methods, and what is refused there, with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trl.experimental import async_grpo

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import HOOKS
from rl_plugins.core.rollouts import Run
from rl_plugins.runtime.preflight import NO_TURN_LIMITS, HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.asynchronous.config import AsyncGRPOConfig
from rl_plugins.trl.asynchronous.worker import GenerateWorker
from rl_plugins.trl.capabilities import NO_MASKED_OPTIONS, reward_names
from rl_plugins.trl.compat import trl_version
from rl_plugins.trl.host import has_numbers

GENERATING = ("select_prompts", "plan", "admit", "rollout")
"""Hooks that decide what is generated."""
PROGRAMS = ("admit", "rollout")
"""Those of them that our own worker does not serve, either."""
OPTIONS = {
    "vllm_importance_sampling_correction": False,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
}
"""Options of `GRPOConfig` that methods set and the asynchronous trainer lacks, with the value that says the same."""


@dataclass(frozen=True)
class KnownAsync:
    """What the constructor of the trainer was called with.

    Args:
        args: the training arguments.
        dataset: for training.
        rewards: names of the reward functions.
        tools: whether there are tools or environments.
        worker: the rollout worker; None: TRL's own.
    """

    args: AsyncGRPOConfig
    dataset: Any
    rewards: tuple[str, ...]
    tools: bool
    worker: Any

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> KnownAsync:
        return cls(
            args=arguments["args"],
            dataset=arguments.get("train_dataset"),
            rewards=reward_names(arguments.get("reward_funcs")),
            tools=bool(arguments.get("tools")) or arguments.get("environment_factory") is not None,
            worker=arguments.get("rollout_worker"),
        )

    @property
    def size(self) -> int | None:
        """Rows of the dataset; None for a stream."""
        return len(self.dataset) if self.dataset is not None and has_numbers(self.dataset) else None

    @property
    def ours(self) -> bool:
        return isinstance(self.worker, GenerateWorker)

    @property
    def walks(self) -> bool:
        """Whether it is known which row of the dataset a group is of."""
        return self.size is not None and (self.worker is None or self.ours)


def rows_per_step(args: Any) -> int:
    """Samples of one optimizer step, over all ranks: what the driver decides on at a time."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)


def run_of(given: KnownAsync) -> Run:
    """What methods are told of the run."""
    a, rows = given.args, rows_per_step(given.args)
    steps = a.max_steps
    if steps <= 0:
        steps = math.ceil((given.size or 1) * a.num_generations * a.num_train_epochs / rows)
    return Run(
        host="trl",
        host_version=trl_version(),
        dataset=given.dataset if given.size is not None else None,
        dataset_size=given.size,
        columns=tuple(getattr(given.dataset, "column_names", None) or ()),
        reward_names=given.rewards,
        group_size=a.num_generations,
        total_steps=steps,
        total_batches=steps,
        max_completion_length=a.max_completion_length,
        rows_per_update=rows,
        batch_rows=rows,
    )


def check(stack: MethodStack, given: KnownAsync) -> dict[str, Any]:
    """Everything that can be known before the model is loaded.

    Returns:
        Options of the config to set for the methods.

    Raises:
        ConfigError: with one paragraph per problem.
    """
    options: dict[str, Any] = {}
    problems = _problems(stack, given)
    try:
        options = preflight(stack, capabilities_of(stack, given))
    except ConfigError as e:  # all problems are told at once
        problems.append(str(e))
    if problems:
        raise ConfigError("\n".join(problems))
    return {name: value for name, value in options.items() if name not in OPTIONS}


def _problems(stack: MethodStack, given: KnownAsync) -> list[str]:
    a, rows, problems = given.args, rows_per_step(given.args), []
    if a.token_budget is None or a.token_budget > 0:
        problems.append(
            f"token_budget={a.token_budget}: TRL then fills each row up to so many tokens (None: the server's "
            f"max_model_len), so nobody knows beforehand how many samples an optimizer step has, and no step holds "
            f"whole groups to decide on. Set token_budget=0."
        )
    if rows % a.num_generations:
        problems.append(
            f"An optimizer step takes {rows} samples (per_device_train_batch_size={a.per_device_train_batch_size}, "
            f"gradient_accumulation_steps={a.gradient_accumulation_steps}, processes={a.world_size}), which is no "
            f"multiple of num_generations={a.num_generations}, so groups would be cut. Make it one."
        )
    if given.tools:
        problems.append(
            "The trainer has tools or environments. TRL then makes one or more training rows of a conversation, and "
            "its queue does not say which rows are of one rollout, so no group could be counted. Remove them, or use "
            "rl_plugins.trl.GRPOTrainer."
        )
    problems += [
        f"`{m.name}` generates in rounds, each planned with the rewards of the one before, and no worker of TRL's "
        f"asynchronous trainer makes a batch in rounds. Use rl_plugins.trl.GRPOTrainer, or remove the method."
        for m in stack.methods
        if m.rounds
    ]
    if not stack.claims["policy_loss"]:
        problems += [
            f"`{m.name}` holds the weight of the policy that sampled, and so does the ratio in the loss of TRL's "
            f"asynchronous trainer: it would count twice. Name a method with a loss of its own instead (minpro, "
            f"decoupled_ppo, vcpo)."
            for m in stack.methods
            if m.corrects_sampling
        ]
    return problems


def capabilities_of(stack: MethodStack, given: KnownAsync) -> HostCapabilities:
    """What this run offers."""
    if given.ours and given.size is not None:
        why = "GenerateWorker makes a batch in one call of generate"
    elif given.worker is None:
        why = "TRL's rollout worker is a process of its own that walks the dataset and generates by itself"
    else:
        why = f"{type(given.worker).__name__} generates by itself"
    hooks = PROGRAMS if given.ours and given.size is not None else GENERATING
    missing_hooks = dict.fromkeys(hooks, f"{why}. Use rl_plugins.trl.GRPOTrainer, or remove the method.")
    return HostCapabilities(
        name="trl",
        version=trl_version(),
        hooks=[h for h in HOOKS if h not in missing_hooks],
        missing_hooks=missing_hooks,
        eval_hooks=(),
        missing_signals=_missing_signals(given),
        columns=run_of(given).columns if given.walks else (),
        options={**vars(given.args), **OPTIONS},
        defaults={f.name: f.default for f in fields(async_grpo.AsyncGRPOConfig)} | OPTIONS,
        missing_options=NO_MASKED_OPTIONS,
        run=run_of(given),
        group_option="num_generations",
        batch_rows=rows_per_step(given.args),
        weighs_old=not stack.claims["policy_loss"],  # TRL's ratio is taken against the policy that sampled
    )


def _missing_signals(given: KnownAsync) -> dict[str, str]:
    a = given.args
    before = "TRL's asynchronous trainer decides before any pass over the rollouts. Use rl_plugins.trl.GRPOTrainer."
    missing = {
        "engine": "no rollout program runs in TRL's asynchronous trainer.",
        "turn_limits": NO_TURN_LIMITS,
        "redundancy": "the rollout worker of TRL's asynchronous trainer waits for all rollouts of a prompt.",
        "turns": "samples in the queue of TRL's asynchronous trainer do not tell turns.",
        "step_rewards": "TRL's asynchronous trainer scores in a process of its own, which takes numbers. Use "
        "rl_plugins.trl.GRPOTrainer.",
        "ref_logprobs": "TRL's asynchronous trainer has no reference model.",
        "whole_batches": "TRL's asynchronous trainer takes groups one by one out of a queue, so they may be trained in "
        "different steps. Use rl_plugins.trl.GRPOTrainer.",
        "entropies": before,
        "sum_squared_probs": before,
        "teacher_logprobs": before,
    }
    if not given.ours:
        missing["token_versions"] = (
            "a group of TRL's rollout worker has one version, that of the weights with which it began. Weights may "
            "change while it is generated, and nobody says which tokens the newer ones made. Use "
            "rl_plugins.trl.asynchronous.GenerateWorker, or a parameter that does without them."
        )
    if not given.walks:
        missing["prompt_index"] = (
            "the dataset is a stream. Use a dataset with an index."
            if given.size is None
            else f"{type(given.worker).__name__} does not say which row of the dataset a group is of."
        )
    changed = [
        f"{name}={getattr(a, name)}"
        for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0))
        if getattr(a, name) != neutral and not (name == "min_p" and getattr(a, name) == 0)
    ]
    if changed:
        missing["rollout_logprobs"] = (
            f"with {', '.join(changed)} the distribution that was sampled is not the policy's. Remove "
            f"{'it' if len(changed) == 1 else 'them'}."
        )
    if len(given.rewards) < 2:
        missing["several_rewards"] = (
            f"the run has {len(given.rewards)} reward function. Pass two or more in reward_funcs, e.g. one for the "
            f"answer and one for the format."
        )
    return missing
