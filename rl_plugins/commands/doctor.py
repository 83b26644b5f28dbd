"""`rl-plugins doctor` and the dry run of `rl-plugins trl grpo`: what is installed, and what would happen in a run.

A run of verl is in doctor_verl.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_plugins.commands.catalog import entries
from rl_plugins.errors import ConfigError, RLPluginsError
from rl_plugins.method import SIGNALS
from rl_plugins.runtime import preflight
from rl_plugins.runtime.report import VARIABLES, per_prompt, print_environment, print_problems, print_versions
from rl_plugins.runtime.stack import MethodStack, build_stack

HOSTS = ("trl", "verl")
SHOWN = ("torch", "transformers", "trl", "peft", "verl", "vllm")


# ---- the two commands


def examine(config: Path | None, methods: Sequence[str], method_params: str | None, world_size: int | None) -> int:
    """Prints the state of the installation, and of a run if a config or methods are given.

    Returns:
        1 if something would fail, else 0.
    """
    problems = [*_print_installation()]
    if config is not None:
        argv = ["--config", str(config)]
        argv += ["--methods", ",".join(methods)] if methods else []
        argv += ["--method_params", method_params] if method_params else []
        problems += _print_run(argv, world_size)
    elif methods or method_params:
        problems += _print_methods(methods, method_params)
    return print_problems(problems)


def dry_run(argv: Sequence[str]) -> int:
    """Prints what `rl-plugins trl grpo` with these arguments would do.

    Returns:
        1 if something would fail, else 0.
    """
    return print_problems(_print_run(argv, None))


# ---- the installation


def _print_installation() -> Iterator[str]:
    states = print_versions(SHOWN)
    usable = [host for host in HOSTS if states[host][1].startswith("ok")]
    if not usable:
        yield (
            f"no host in a tested version is installed: {', '.join(f'{h} is {states[h][1]}' for h in HOSTS)}. Install "
            f"one, e.g. pip install 'rl-plugins[trl]'."
        )
    if "trl" in usable:
        import trl

        from rl_plugins.trl.compat import moved_symbols

        moved = moved_symbols(trl.GRPOTrainer)
        print(f"  what the adapter uses of TRL: {'as expected' if not moved else '; '.join(moved)}")
        if moved:
            yield f"TRL moved what rl-plugins builds on: {'; '.join(moved)}."

    print_environment(VARIABLES)
    print_found()


def print_found() -> None:
    """How many methods there are, and which cannot be used."""
    found = entries()
    good = [e for e in found if not e.problem]
    foreign = sorted({e.distribution for e in good} - {"rl-plugins"})
    print(f"\nMethods\n  {len(good)} found{', some from ' + ', '.join(foreign) if foreign else ''} (rl-plugins list)")
    for e in found:
        if e.problem:
            print(f"  cannot be used: {e.name}: {e.problem}")


# ---- methods without a run


def _print_methods(methods: Sequence[str], method_params: str | None) -> list[str]:
    try:
        stack = build_stack(methods, method_params)
    except ConfigError as e:
        return [str(e)]
    print(f"\n{preflight.render_table(stack, {})}")
    for m in stack.methods:
        needs = [SIGNALS.get(s, s) for s in sorted(m.needs)]
        if needs:
            print(f"  {m.name} needs: {'; '.join(needs)}")
        for host, options in m.host_options.items():
            print(f"  {m.name} sets in {host}: {', '.join(f'{k}={v!r}' for k, v in options.items())}")
    print("  With --config run.yaml the needs are checked and the batch plan is shown.")
    return []


# ---- a run of TRL


@dataclass
class _Run:
    """A run as far as it is known without a model.

    Attributes:
        args: the training arguments.
        dataset: the training dataset, None if it is not on this machine or a stream.
        streaming: the dataset is a stream.
        rewards: names of the reward functions.
    """

    args: Any
    dataset: Any = None
    streaming: bool = False
    rewards: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _print_run(argv: Sequence[str], world_size: int | None) -> list[str]:
    """The methods in effect, the batch plan; returns what would fail."""
    from rl_plugins.trl import facts, script

    arguments = script.sort_arguments(argv)
    try:
        stack = build_stack(arguments.methods, arguments.method_params)
    except ConfigError as e:
        return [str(e)]
    processes = world_size or script.launched_processes(arguments)
    try:
        run = _load_run(arguments.script, processes, elsewhere=world_size is not None)
    except (ValueError, TypeError) as e:
        return [f"TRL refuses the config: {e}"]
    options: dict[str, Any] = {}
    try:
        options = _check(stack, run)
    except ConfigError as e:
        run.problems += str(e).splitlines()
    for name, value in options.items():
        setattr(run.args, name, value)
    if stack:
        print(f"\n{preflight.render_table(stack, options)}")
        idle = facts.without_effect(stack, run.args)
        if idle:
            print(f"  host options without effect: {', '.join(idle)}")
    else:
        print("\nNo methods are named: the run is TRL's own.")
    print("\nOne generation batch")
    for what, text in _batch(stack, run, processes):
        print(f"  {what:<18}{text}")
    if run.notes:
        print("\nNotes")
        for note in run.notes:
            print(f"  {note}")
    return run.problems


def _check(stack: MethodStack, run: _Run) -> dict[str, Any]:
    import trl

    from rl_plugins.trl import facts
    from rl_plugins.trl.compat import Seams

    known = run.dataset if run.dataset is not None else None if run.streaming else [None]  # columns are not known
    inputs = facts.Inputs(dataset=known, streaming=run.streaming, reward_functions=len(run.rewards))
    return facts.check(stack, run.args, inputs, Seams.of(trl.GRPOTrainer)) if stack else {}


def _load_run(argv: Sequence[str], processes: int, elsewhere: bool) -> _Run:
    """Parses the config as `processes` processes would, and looks at a dataset that lies on this machine."""
    import torch

    from rl_plugins.trl import GRPOConfig, script

    # The config as it would be in those processes, without joining a process group or touching a device here.
    planned = type(
        "GRPOConfig",
        (GRPOConfig,),
        {"world_size": property(lambda self: processes), "device": property(lambda self: torch.device("cpu"))},
    )
    notes: list[str] = []
    problems: list[str] = []
    try:
        script_args, args, _, dataset_args = script.parse(argv, planned)
    except ValueError as e:
        if "bf16" not in str(e):
            raise
        text = f"this machine cannot train with bf16: {e}"
        (notes if elsewhere else problems).append(text + ("" if elsewhere else " Or give --world-size of another."))
        script_args, args, _, dataset_args = script.parse([*argv, "--bf16", "False"], planned)
    rewards = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    run = _Run(args, rewards=(*rewards, *(script_args.reward_funcs or ())), notes=notes, problems=problems)
    if not run.rewards:
        run.problems.append("the run has no reward: name functions in `reward_funcs` or a model.")
    run.problems += _missing_rewards(script_args.reward_funcs or ())
    _look_at_dataset(run, script_args, dataset_args)
    return run


def _missing_rewards(names: Sequence[str]) -> list[str]:
    """Reward functions named by their import path that do not exist."""
    problems = []
    sys.path.insert(0, os.getcwd())  # where TRL looks
    try:
        for name in names:
            module, _, function = name.rpartition(".")
            if not module:
                continue  # TRL's own; it knows which
            try:
                getattr(importlib.import_module(module), function)
            except (ImportError, AttributeError) as e:
                problems.append(f"the reward function `{name}` cannot be loaded: {type(e).__name__}: {e}.")
    finally:
        sys.path.pop(0)
    return problems


def _look_at_dataset(run: _Run, script_args: Any, dataset_args: Any) -> None:
    paths = [d.path for d in dataset_args.datasets] or [script_args.dataset_name]
    run.streaming = bool(dataset_args.streaming if dataset_args.datasets else script_args.dataset_streaming)
    if paths == [None]:
        run.problems.append("the run has no dataset: set `dataset_name` or `datasets`.")
        return
    if not all(Path(path).exists() for path in paths):
        run.notes.append(f"The dataset {', '.join(paths)} is not a path on this machine: its columns are not checked.")
        return
    import trl
    from datasets import load_dataset

    from rl_plugins.trl.facts import too_few_prompts

    try:
        if dataset_args.datasets:
            loaded = trl.get_dataset(dataset_args)
        else:
            name, config = script_args.dataset_name, script_args.dataset_config
            loaded = load_dataset(name, name=config, streaming=run.streaming)
        dataset = loaded[script_args.dataset_train_split]
    except Exception as e:
        run.problems.append(f"the dataset {', '.join(paths)} cannot be loaded: {type(e).__name__}: {e}")
        return
    run.dataset = None if run.streaming else dataset
    if dataset.column_names and "prompt" not in dataset.column_names:
        columns = ", ".join(dataset.column_names)
        run.problems.append(f"the dataset has no column `prompt`, which GRPO needs (it has: {columns}).")
    if run.dataset is not None and (problem := too_few_prompts(run.args, len(dataset))):
        run.problems.append(problem)


# ---- the batch plan


def _batch(stack: MethodStack, run: _Run, processes: int) -> Iterator[tuple[str, str]]:
    """The plan in words and numbers; adds a problem to the run if a method refuses to plan."""
    from rl_plugins.trl.facts import optimizer_steps_per_generation

    a = run.args
    rows, group = a.generation_batch_size, a.num_generations
    plan = None
    try:
        plan = _first_plan(stack, run)
    except RLPluginsError as e:
        if run.dataset is None:
            yield "plan", f"not known without the dataset ({str(e).splitlines()[0]})"
        else:
            run.problems.append(str(e))
    if plan is not None:
        first = " in the first round" if any(m.rounds for m in stack.methods) else ""
        prompts = len({r.group for r in plan.rows})
        own = "" if prompts == rows // group else f" (TRL alone: {rows // group})"
        yield "prompts", f"{prompts}{own}"
        yield "rollouts", f"{per_prompt(plan.rows)} per prompt{first}"
        yield "rows generated", f"{plan.generated}{first}"
        missing = rows - plan.trained
        empty = f"; {missing} stay empty" if missing and not first else ""
        yield "rows trained", f"{plan.trained} of {rows}{empty}"
        choosers = [m.name for m in stack.claims["select"] + stack.claims["shape"]]
        if choosers:
            yield "rows that leave", f"{', '.join(choosers)} may take rows out, depending on the rewards"
    ga, steps = a.gradient_accumulation_steps, optimizer_steps_per_generation(a)
    where = f"{processes} process{'es' if processes > 1 else ''}"
    per_step = a.per_device_train_batch_size * processes * ga
    yield "micro-batches", f"{ga} of {a.per_device_train_batch_size} rows on each of {where} per optimizer step"
    yield "optimizer steps", f"{steps:g} per generation batch, of {per_step} rows each"
    yield "policy", _off_policy(steps, a)
    if run.dataset is not None or a.max_steps > 0:
        total = _total_steps(run)
        yield "whole run", f"{total} optimizer steps, {math.ceil(total / steps)} generation batches"


def _first_plan(stack: MethodStack, run: _Run) -> Any:
    """The plan of the first batch, from the methods themselves, with TRL's own prompts as the proposal."""
    from rl_plugins.rollouts import Run
    from rl_plugins.runtime.plan import first_plan
    from rl_plugins.trl.compat import trl_version
    from rl_plugins.trl.facts import optimizer_steps_per_generation

    a = run.args
    prompts = a.generation_batch_size // a.num_generations
    # A dataset that is not here is taken to be large enough for any plan; a stream has no rows to choose from.
    size = len(run.dataset) if run.dataset is not None else None if run.streaming else a.generation_batch_size
    total = _total_steps(run)
    start = Run(
        host="trl",
        host_version=trl_version(),
        dataset=run.dataset,
        dataset_size=size,
        columns=tuple(getattr(run.dataset, "column_names", None) or ()),
        reward_names=run.rewards,
        group_size=a.num_generations,
        total_steps=total,
        total_batches=math.ceil(total / optimizer_steps_per_generation(a)),
        max_completion_length=a.max_completion_length,
    )
    stack.start(start)
    if size is None and stack.claims["select_prompts"]:
        return None  # refused by the pre-flight check
    proposal = range(prompts if size is None else min(prompts, size))
    return first_plan(stack, proposal, a.num_generations, a.generation_batch_size, size, run.dataset)


def _total_steps(run: _Run) -> int:
    """Optimizer steps of the run; of one generation batch if that is not known."""
    from rl_plugins.trl.facts import optimizer_steps_per_generation

    a = run.args
    if a.max_steps > 0:
        return int(a.max_steps)
    batches = 1
    if run.dataset is not None:
        batches = math.ceil(len(run.dataset) * a.num_generations // a.generation_batch_size * a.num_train_epochs)
    return max(1, math.ceil(batches * optimizer_steps_per_generation(a)))


def _off_policy(steps: float, args: Any) -> str:
    if steps > 1:
        text = f"on-policy in the first optimizer step of a generation batch, off-policy in the {steps - 1:g} after it"
    elif steps < 1:
        text = f"one optimizer step takes {1 / steps:g} generation batches, all sampled by the policy before it"
    else:
        text = "on-policy: every batch is used for one optimizer step"
    return text + ("; sampled by vLLM, whose log-probs differ slightly" if args.use_vllm else "")
