"""What one run of the diffusion trainer offers to methods, and what is refused before the model is touched."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.core.method import HOOKS
from rl_plugins.core.rollouts import PlanRow, Run
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.served import NO_HOOKS, NO_SIGNALS
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack


def host_version() -> str:
    """Of diffusers; empty where it is not installed, as for pages."""
    try:
        return importlib.metadata.version("diffusers")
    except importlib.metadata.PackageNotFoundError:
        return ""


def columns_of(dataset: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of its columns."""
    names = getattr(dataset, "column_names", None)
    return tuple(names if names is not None else dict.fromkeys(k for row in dataset for k in row))


def run_of(config: DiffusionConfig, dataset: Any, columns: Sequence[str], rewards: Sequence[str]) -> Run:
    """What methods are told of the run. Tokens are transitions, so the longest completion has T of them."""
    return Run(
        host="diffusion",
        host_version=host_version(),
        dataset=dataset,
        dataset_size=len(dataset),
        columns=tuple(columns),
        reward_names=tuple(rewards),
        group_size=config.group_size,
        total_steps=config.total_steps,
        total_batches=config.batches,
        max_completion_length=config.steps,
        rows_per_update=config.batch_rows // config.updates_per_batch,
        batch_rows=config.batch_rows,
    )


def capabilities_of(
    stack: MethodStack, config: DiffusionConfig, run: Run, missing: Mapping[str, str], has_cheap: bool
) -> HostCapabilities:
    """What this run offers.

    Args:
        missing: hook or signal -> why the objective has no use for it.
        has_cheap: whether there is a cheap copy of the policy.
    """
    hooks, signals = dict(NO_HOOKS), dict(NO_SIGNALS)
    for name, why in missing.items():
        (hooks if name in HOOKS else signals)[name] = why
    if config.updates_per_batch > 1:
        signals["whole_groups"] = "rows are shuffled before a batch is divided. Set updates_per_batch=1."
    if not has_cheap:
        signals["cheap_copy"] = (
            "the trainer has none. Give it `cheap`, for example rl_plugins.runtime.cheap.CheapOptions('int8')."
        )
    if len(run.reward_names) < 2:
        signals["several_rewards"] = f"the run has {len(run.reward_names)} reward function. Give two or more."
    if config.updates_per_batch == 1:
        again = "every batch is used for one optimizer step. Set updates_per_batch=2 or more."
        signals.setdefault("several_updates", again)
        signals.setdefault("off_policy", again)
    options = {f.name: getattr(config, f.name) for f in fields(config)}
    return HostCapabilities(
        name="diffusion",
        version=run.host_version,
        hooks=[h for h in HOOKS if h not in hooks],
        missing_hooks=hooks,
        eval_hooks=(),
        missing_signals=signals,
        columns=run.columns,
        options=options,
        defaults={f.name: getattr(_DEFAULTS, f.name) for f in fields(config)},
        row_columns=bool(stack.claims["rollout"]),
        run=run,
        group_option="group_size",
        batch_rows=config.batch_rows,
    )


_DEFAULTS = DiffusionConfig()


def check(
    stack: MethodStack, config: DiffusionConfig, run: Run, missing: Mapping[str, str], has_cheap: bool = False
) -> dict[str, Any]:
    """Everything that can be known before the model is touched.

    Returns:
        Options of the config to set for the methods.

    Raises:
        ConfigError: with one paragraph per problem.
    """
    problems: list[str] = []
    options: dict[str, Any] = {}
    try:
        options = preflight(stack, capabilities_of(stack, config, run, missing, has_cheap))
    except ConfigError as e:  # all problems are told at once
        problems.append(str(e))
    for m in stack.methods:
        if m.brings & {"off_policy", "forced_tokens"}:
            problems.append(
                f"`{m.name}` gives completions or tokens, and samples of a diffusion policy have none. Remove it."
            )
        if m.rows_per_rollout > 1:
            problems.append(
                f"`{m.name}` makes several rows of a rollout, and a sample of a diffusion policy is one. Remove it."
            )
        if not m.claims() and not m.host_options.get("diffusion"):
            problems.append(f"`{m.name}` only sets options of {', '.join(m.host_options)}, so it does nothing here.")
    if run.dataset_size is not None and run.dataset_size < config.prompts_per_batch:
        problems.append(
            f"The dataset has {run.dataset_size} prompts, and a batch takes prompts_per_batch="
            f"{config.prompts_per_batch}. Make the batch smaller, or give more prompts."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return options


def check_plan(rows: Sequence[PlanRow]) -> None:
    """Refuses what a plan may ask of language models only.

    Raises:
        ConfigError: prefixes, completions, or limits of tokens or turns.
    """
    for row in rows:
        asked = {name: getattr(row, name) for name in ("prefix", "given", "max_tokens", "max_turns")}
        given = [name for name, value in asked.items() if value not in ((), None)]
        if given:
            raise ConfigError(
                f"The plan gives prompt {row.prompt_index} {given[0]}={shown(asked[given[0]], 80)}, which is about "
                f"tokens. A plan of a diffusion policy may set `n`, `spare`, `edit` and `payload`. Remove the method."
            )
