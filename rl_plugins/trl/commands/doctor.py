"""What `rl-plugins trl grpo` or `masked_grpo` would do, found out from the config alone: no model, no process group.
What a script would do, from the trainer it makes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from datasets import load_dataset
from transformers.trainer import TRAINER_STATE_NAME

from rl_plugins.core.errors import ConfigError, RLPluginsError, StateError, shown, told
from rl_plugins.core.rollouts import Plan, Queue
from rl_plugins.runtime import preflight
from rl_plugins.runtime.chat import has_template
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.runtime.report import plan_lines, stage_lines
from rl_plugins.runtime.resume import resume
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.trl import capabilities, saved
from rl_plugins.trl.changes import changed
from rl_plugins.trl.commands import heads, host_config, script
from rl_plugins.trl.compat import Seams
from rl_plugins.trl.config import GRPOConfig
from rl_plugins.trl.generation.precision import rollouts_text
from rl_plugins.trl.masked import MaskedGRPOConfig
from rl_plugins.trl.masked import capabilities as masked_capabilities


@dataclass(frozen=True)
class Findings:
    """What the report says in addition to its tables. problems: they would end the run."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def print_run(
    argv: Sequence[str], world_size: int | None, masked: bool = False, may_be_of_script: bool = False
) -> list[str]:
    """Prints the methods in effect and the batch plan.

    Args:
        argv: arguments of `rl-plugins trl grpo`.
        world_size: processes, if not those this machine would start.
        masked: they are those of `rl-plugins trl masked_grpo`.
        may_be_of_script: a config without a model, a dataset and rewards is not one of `trl grpo`: a script gives them.

    Returns:
        What would fail.
    """
    command = script.MASKED_GRPO if masked else script.GRPO
    found = Findings()
    arguments = script.sort_arguments(argv, command, found.problems)
    stack, launch = build_stack([]), script.Launch(1, deepspeed=False)  # where one is refused, the rest is still told
    words = [*arguments.script, "--methods", "", "--method_params", "{}"]
    with told(found.problems):
        stack, words = build_stack(arguments.methods, arguments.method_params, refuse=False), arguments.script
    with told(found.problems):
        launch = script.planned_launch(arguments)
    if launch.asked and world_size is None:
        found.problems.append(
            f"num_processes={launch.asked} has no effect: without GPUs `accelerate launch` starts one process, unless "
            f"it is told how to start several. Remove it, or give --world-size of another machine to the doctor."
        )
    processes = world_size or launch.processes
    try:
        known = _known_of(words, processes, world_size is not None, launch.deepspeed, found, masked, may_be_of_script)
    except (ValueError, TypeError, ImportError) as e:
        return [*found.problems, *stack.problems, f"TRL refuses the config: {e}"]
    options: dict[str, Any] = {}
    lines: list[str] = []
    with told(lines):
        options = _check(stack, known)
    refused = "\n".join(lines).splitlines()
    found.problems.extend(refused)
    if stack.methods and not stack.problems:
        print(f"\n{preflight.render_table(stack, options)}")
    elif not arguments.methods:
        print("\nNo methods are named: the run is TRL's own.")
    if idle := capabilities.without_effect(stack, known.args):
        print(f"  host options without effect: {', '.join(idle)}")
    _print_batch(stack, known, processes, found, plans=not refused)
    if not refused:
        _print_resume(saved.wanted_of(known.args.resume_from_checkpoint), stack, known, processes, found)
    return found.problems


def _print_resume(
    wanted: str | bool | None, stack: MethodStack, known: capabilities.KnownRun, processes: int, found: Findings
) -> None:
    if wanted:
        print("\nResume", flush=True)
        with told(found.problems):
            _look_at_checkpoint(wanted, stack, known, processes)


def _look_at_checkpoint(wanted: str | bool, stack: MethodStack, known: capabilities.KnownRun, processes: int) -> None:
    """Prints what a resume would load and drop, as the run does.

    Args:
        stack: it has planned a batch, so it is started.

    Raises:
        ConfigError: with what the run would refuse.
    """
    alone = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device=torch.device("cpu"))
    run = SimpleNamespace(args=known.args, methods=stack, num_iterations=known.args.num_iterations, accelerator=alone)
    try:
        folder = saved.resume_from(run, wanted)
        if folder is None or not os.path.isdir(folder):
            raise ConfigError(f"There is no checkpoint {folder or f'in {known.args.output_dir}'} to resume from.")
        saved.check_saved(run, folder)
        if stack and known.dataset is not None:
            state = transformers.TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
            step, data, marked = state.global_step, fingerprint(known.dataset), saved.is_marked(state)
            resume(stack, folder, fingerprint=data, step=step, batch=0, with_methods=marked)
            saved.tell_sizes(folder, state, {**saved.sizes_of(run), saved.PROCESSES: processes})
    except StateError as e:
        raise ConfigError(str(e)) from None


def print_script(script: Path, words: Sequence[str]) -> list[str]:
    """Runs a script up to `train()` and prints what its trainer would do. The trainer prints its methods itself.

    Args:
        words: the arguments of the script.

    Returns:
        What would fail.

    Raises:
        ConfigError: the script cannot be read, or calls no `train()`. Errors of the script are passed on.
    """
    print(f"\nRunning {script} up to `train()`", flush=True)
    found = Findings()
    at: _AtTrain | None = None
    made: list[Path] = []
    with _noting_folders(made):
        with told(found.problems):
            at = _called_train(script, words)
        if at is not None:
            _print_trainer(at.trainer, at.resume, found)
    if at is not None:
        _remove_empty(made, Path(at.trainer.args.output_dir).absolute())
    return found.problems


def _print_trainer(trainer: Any, wanted: str | bool | None, found: Findings) -> None:
    """
    Args:
        wanted: what the script resumes from.
    """
    print(f"\nStopped at `train()` of {type(trainer).__qualname__}")
    stack = getattr(trainer, "methods", None)
    if not stack:
        print("  No methods are named: the run is TRL's own.")
        return
    known = replace(capabilities.known_of(trainer), total_steps=None)  # TRL counts them later
    if known.size and (problem := capabilities.too_few_prompts(known.args, known.size)):
        found.problems.append(problem)
    processes = trainer.accelerator.num_processes
    if processes == 1:
        found.notes.append(
            "These are numbers of one process. With N processes a batch has N times the prompts and rows, unless the "
            "script sets generation_batch_size."
        )
    _print_batch(stack, known, processes, found, plans=True)
    _print_resume(wanted, stack, known, processes, found)


@contextlib.contextmanager
def _noting_folders(made: list[Path]) -> Iterator[None]:
    """Adds the folders that are made."""
    mkdir = os.mkdir

    def noted(path: Any, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if isinstance(path, (str, os.PathLike)) and options.get("dir_fd") is None:
            made.append(Path(os.fsdecode(path)).absolute())

    with changed(os, mkdir=noted):
        yield


def _remove_empty(made: Sequence[Path], output: Path) -> None:
    """Removes those of the folders that were made for a run's output and have nothing in them."""
    for folder in reversed(made):
        if folder == output or folder in output.parents or output in folder.parents:
            with contextlib.suppress(OSError):
                folder.rmdir()


class _AtTrain(BaseException):
    """Stops a script; no `except Exception` of it holds this up."""

    def __init__(self, trainer: Any, resume: str | bool | None) -> None:
        self.trainer, self.resume = trainer, resume


def _called_train(script: Path, words: Sequence[str]) -> _AtTrain:
    """The trainer whose `train` a script calls first, and what it resumes from."""

    @functools.wraps(transformers.Trainer.train)  # whose parameters `compat` checks
    def stop(trainer: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> None:
        raise _AtTrain(trainer, resume_from_checkpoint)

    if not script.is_file():
        raise ConfigError(f"--script {shown(str(script))} is no file. Give the path of a Python script.")
    path = [str(script.parent.resolve()), *sys.path]
    with changed(transformers.Trainer, train=stop), changed(sys, argv=[str(script), *words], path=path):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _AtTrain as reached:
            return reached
        except TypeError as e:
            ours = {f.name for f in fields(GRPOConfig)} - {f.name for f in fields(trl.GRPOConfig)}
            word = re.search(r"unexpected keyword argument '(\w+)'", str(e))
            if word is None or word[1] not in ours:
                raise
            raise ConfigError(
                f"{script} gives `{word[1]}` to a config of TRL's own, which does not know it. Import GRPOConfig and "
                f"GRPOTrainer from rl_plugins.trl instead of trl."
            ) from None
    raise ConfigError(
        f"{script} came to its end and called no `train()` of a trainer of TRL. Give the script that trains."
    )


def _print_batch(
    stack: MethodStack, known: capabilities.KnownRun, processes: int, found: Findings, plans: bool
) -> None:
    print("\nOne generation batch")
    for what, text in _batch(stack, known, processes, found, plans):
        print(f"  {what:<18}{text}")
    if found.notes:
        print("\nNotes")
        for note in found.notes:
            print(f"  {note}")


def _check(stack: MethodStack, known: capabilities.KnownRun) -> dict[str, Any]:
    """Options that the methods set, which the config then has."""
    args, offered = known.args, None
    if isinstance(args, MaskedGRPOConfig):
        stack.problems += masked_capabilities.problems_of(stack)
        offered = masked_capabilities.masked_capabilities(capabilities.trl_capabilities(stack, known), stack, args)
    options = capabilities.check(stack, known, Seams.of(trl.GRPOTrainer), offered) if stack else {}
    for name, value in options.items():
        setattr(args, name, value)
    if isinstance(args, MaskedGRPOConfig):
        args.check_masked()
    return options


def _known_of(
    argv: Sequence[str],
    processes: int,
    elsewhere: bool,
    deepspeed: bool,
    found: Findings,
    masked: bool,
    may_be_of_script: bool,
) -> capabilities.KnownRun:
    """The config as `processes` processes would parse it, without joining a process group or touching a device here."""
    planned = planned_config(processes, MaskedGRPOConfig if masked else GRPOConfig)
    try:
        script_args, args, model_args, dataset_args = script.parse(argv, config=planned)
    except ValueError as e:
        if "bf16" not in str(e):
            raise
        text = f"this machine cannot train with bf16: {e}"
        if elsewhere:
            found.notes.append(text)
        else:
            found.problems.append(f"{text} Or give --world-size of another.")
        script_args, args, model_args, dataset_args = script.parse([*argv, "--bf16", "False"], config=planned)
    try:
        heads.check_adapter(model_args, args)
    except ConfigError as e:
        found.problems.append(str(e))
    config = host_config.HostConfig(args, script_args, model_args, dataset_args, processes, deepspeed)
    named = (model_args.model_name_or_path, script_args.dataset_name, *dataset_args.datasets, *config.rewards)
    if may_be_of_script and not any(named):
        found.notes.append(
            "The config names no model, no dataset and no reward. Where a script gives them, `rl-plugins doctor "
            "--script mine.py` looks at its trainer; `rl-plugins trl grpo` would ask for all three."
        )
        found.problems.extend(host_config.problems(config, of_script=True))
        (found.notes if elsewhere else found.problems).extend(host_config.missing(config))
        return capabilities.KnownRun(
            args, None, args.generation_batch_size, ("reward",) * 2
        )  # as many as a method asks for
    found.problems.extend(host_config.problems(config))
    (found.notes if elsewhere else found.problems).extend(host_config.missing(config))
    dataset, streaming = dataset_of(args, script_args, dataset_args, found)
    # A dataset that is not here is taken to be large enough for any plan; a stream has no rows to choose from.
    size = None if streaming else args.generation_batch_size if dataset is None else len(dataset)
    names = reward_names_of(script_args)
    model = model_args.model_name_or_path or "the model"
    return capabilities.KnownRun(args, dataset, size, names, model=model, template=has_template(model))


def reward_names_of(script_args: Any) -> tuple[str, ...]:
    """Names of the reward functions of a config."""
    named = tuple(OTHER_NAMES.get(f, f.rpartition(".")[2]) for f in script_args.reward_funcs or ())
    return capabilities.reward_names(script_args.reward_model_name_or_path) + named


def planned_config(processes: int, config: type[GRPOConfig] = GRPOConfig) -> type[GRPOConfig]:
    """A config that believes in `processes` processes, without joining a process group or touching a device here."""
    return type(
        "GRPOConfig",
        (config,),
        {"world_size": property(lambda self: processes), "device": property(lambda self: torch.device("cpu"))},
    )


OTHER_NAMES = {"get_soft_overlong_punishment": "soft_overlong_punishment_reward"}  # TRL's script calls it


def dataset_of(args: GRPOConfig, script_args: Any, dataset_args: Any, found: Findings) -> tuple[Any, bool]:
    """The training dataset, None if it is a stream or not on this machine; and whether it is a stream."""
    paths = [d.path for d in dataset_args.datasets] or [script_args.dataset_name]
    streaming = bool(dataset_args.streaming if dataset_args.datasets else script_args.dataset_streaming)
    if paths == [None]:
        found.problems.append("the run has no dataset: set `dataset_name` or `datasets`.")
        return None, streaming
    if not all(Path(path).exists() for path in paths):
        found.notes.append(
            f"The dataset {', '.join(paths)} is not a path on this machine: its columns are not checked."
        )
        return None, streaming
    try:
        if dataset_args.datasets:
            loaded = trl.get_dataset(dataset_args)
        else:
            name, config = script_args.dataset_name, script_args.dataset_config
            loaded = load_dataset(name, name=config, streaming=streaming)
    except Exception as e:
        found.problems.append(f"the dataset {', '.join(paths)} cannot be loaded: {type(e).__name__}: {e}")
        return None, streaming
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    if absent := [s for s in (train, *([] if args.eval_strategy == "no" else [test])) if s not in loaded]:
        found.problems.append(
            f"the dataset {', '.join(paths)} has no split {', '.join(absent)} (it has: {', '.join(loaded)}). Set "
            f"dataset_train_split, and dataset_test_split or eval_strategy=no."
        )
    if train not in loaded:
        return None, streaming
    dataset = loaded[train]
    if dataset.column_names and "prompt" not in dataset.column_names:
        columns = ", ".join(dataset.column_names)
        found.problems.append(f"the dataset has no column `prompt`, which GRPO needs (it has: {columns}).")
    if streaming:
        return None, True
    if problem := capabilities.too_few_prompts(args, len(dataset)):
        found.problems.append(problem)
    return dataset, False


# ---- the batch plan


def _batch(
    stack: MethodStack, known: capabilities.KnownRun, processes: int, found: Findings, plans: bool
) -> Iterator[tuple[str, str]]:
    """The plan in words and numbers; adds a problem if a method refuses to plan.

    Args:
        plans: methods are asked; not if the pre-flight check has refused them.
    """
    a = known.args
    rows, group = a.generation_batch_size, a.num_generations
    plan, stages = None, list[tuple[str, str]]()
    try:
        plan = _first_plan(stack, known) if plans else None
        if plan is not None:
            stages = list(stage_lines(stack, lambda: _plan(stack, known), rows))
    except RLPluginsError as e:
        if known.dataset is None:
            yield "plan", f"not known without the dataset ({str(e).splitlines()[0]})"
        else:
            found.problems.append(str(e))
    if plan is not None:
        prompts = len({r.group for r in plan.rows})
        own = "" if prompts == rows // group else f" (TRL alone: {rows // group})"
        yield from plan_lines(stack, plan, rows, f"{prompts}{own}")
        yield from stages
        if stack.claims["admit"]:
            begun = stack.one("admit", Queue((), rows // group, group, 0)).fresh
            yield "groups begun", f"{begun} in the first batch; those that are not complete wait for a later one"
    ga, steps = a.gradient_accumulation_steps, capabilities.optimizer_steps_per_batch(a)
    where = f"{processes} process{'es' if processes > 1 else ''}"
    per_step = a.per_device_train_batch_size * processes * ga
    yield "micro-batches", f"{ga} of {a.per_device_train_batch_size} rows on each of {where} per optimizer step"
    yield "optimizer steps", f"{steps:g} per generation batch, of {per_step} rows each"
    yield "policy", _off_policy(steps, a)
    yield "precision", rollouts_text(stack, a)
    if known.dataset is not None or a.max_steps > 0:
        run = capabilities.run_of(known)
        yield "whole run", f"{run.total_steps} optimizer steps, {run.total_batches} generation batches"


def _first_plan(stack: MethodStack, known: capabilities.KnownRun) -> Plan | None:
    """The plan of the first batch, with TRL's own prompts as the proposal."""
    if known.size is None and ("prompt_index" in stack.needs or stack.claims["select_prompts"]):
        return None  # refused by the pre-flight check
    stack.start(capabilities.run_of(known))
    return _plan(stack, known)


def _plan(stack: MethodStack, known: capabilities.KnownRun) -> Plan:
    prompts = known.args.generation_batch_size // known.args.num_generations
    return capabilities.first_plan_of(stack, known, range(prompts if known.size is None else min(prompts, known.size)))


def _off_policy(steps: float, args: GRPOConfig) -> str:
    if steps > 1:
        text = f"on-policy in the first optimizer step of a generation batch, off-policy in the {steps - 1:g} after it"
    elif steps < 1:
        text = f"one optimizer step takes {1 / steps:g} generation batches, all sampled by the policy before it"
    else:
        text = "on-policy: every batch is used for one optimizer step"
    if args.rollout_precision != "policy":
        return text + f"; sampled by a copy in {args.rollout_precision}, whose log-probs differ"
    return text + ("; sampled by vLLM, whose log-probs differ slightly" if args.use_vllm else "")
