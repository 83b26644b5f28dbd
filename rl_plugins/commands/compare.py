"""`rl-plugins compare` and `rl-plugins demo`: the same engine on the user's config and on the embedded one."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rl_plugins.compare import report
from rl_plugins.compare.plan import Arm, Comparison, make_plan, parse_arms
from rl_plugins.compare.runs import is_finished, run_all
from rl_plugins.compare.trl import Trl
from rl_plugins.errors import ConfigError
from rl_plugins.runtime.config_text import read_yaml
from rl_plugins.runtime.registry import parse_method_params


def parse_seeds(text: str) -> list[int]:
    """ "3" is the seeds 0, 1, 2; "4,7" are these two."""
    try:
        seeds = [int(s) for s in text.split(",")] if "," in text else list(range(int(text)))
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds is {text!r}; give a number of seeds (3) or different seeds (4,7,11).")
    return seeds


def compare(
    words: Sequence[str],
    baseline: str,
    seeds: str,
    out: Path,
    jobs: int,
    metrics: Sequence[str],
    launcher: str,
    method_params: str | None,
    dry_run: bool,
) -> None:
    """Trains every arm with every seed on the user's own config of TRL and writes figures and a report.

    Args:
        words: the YAML file, methods, and options of `trl grpo`.
    """
    config = Path(words[0])
    if not config.is_file():
        raise ConfigError(f"There is no config {config}. Give the YAML file you run `trl grpo` with.")
    methods, extra = _split(words[1:], r"-.*")
    arms = parse_arms(_named(methods), baseline)
    values = read_yaml(config, f"The config {config}") or {}
    held_out = str(values.get("eval_strategy", "no")) != "no"
    comparison = make_plan(
        Trl(config.absolute(), tuple(extra)),
        arms,
        parse_seeds(seeds),
        out,
        parse_method_params(method_params),
        _notes(arms, held_out, "eval_strategy and a test split"),
    )
    _run(comparison, _shown(metrics, held_out), jobs, shlex.split(launcher), dry_run)


def compare_verl(
    words: Sequence[str],
    baseline: str,
    seeds: str,
    out: Path,
    metrics: Sequence[str],
    method_params: str | None,
    dry_run: bool,
) -> None:
    """The same on the user's own run of verl.

    Args:
        words: methods, and overrides of `python -m verl.trainer.main_ppo` or the whole command.
    """
    from rl_plugins.compare.verl import Verl
    from rl_plugins.verl.doctor import read_command

    methods, command = _split(words, r"[-~].*|.*=.*|(.*/)?python[\d.]*")
    arms = parse_arms(_named(methods), baseline)
    host = Verl.of(read_command(command))
    notes = _notes(arms, host.evaluates, "trainer.test_freq and data.val_files")
    comparison = make_plan(host, arms, parse_seeds(seeds), out, parse_method_params(method_params), notes)
    _run(comparison, _shown(metrics, host.evaluates), 1, (), dry_run)


def _split(words: Sequence[str], pattern: str) -> tuple[list[str], list[str]]:
    """The words before the first one that matches, and the rest."""
    end = next((i for i, word in enumerate(words) if re.fullmatch(pattern, word)), len(words))
    return list(words[:end]), list(words[end:])


def _named(methods: list[str]) -> list[str]:
    if not methods:
        raise ConfigError("No method is named. Name at least one: rl-plugins compare run.yaml vade")
    return methods


def _notes(arms: Sequence[Arm], held_out: bool, option: str) -> list[str]:
    notes = ["Every run has the same config: optimizer steps, batch and data."]
    if not held_out and any({"select_prompts", "plan"} & _hooks(a.methods) for a in arms):
        notes.append(
            f"A method here chooses prompts or rollouts, so rewards in training are of what it chose. Set {option} to "
            f"compare on held-out prompts."
        )
    return notes


def _shown(metrics: Sequence[str], held_out: bool) -> list[str]:
    return list(metrics) or (["eval_reward"] if held_out else []) + ["reward"]


def demo(methods: Sequence[str], baseline: str, seeds: str, out: Path, jobs: int, long: bool, dry_run: bool) -> None:
    """Builds the embedded policy and compares methods with plain GRPO on it."""
    from rl_plugins.demo import agents, settings
    from rl_plugins.demo.policy import policy_path

    arms = parse_arms(methods, baseline)
    names = _names(arms)
    console = Console()
    if agents.needed(names):
        _demo_agents(arms, seeds, out, jobs, long, dry_run, console)
        return
    policy, data, config = policy_path(), out / "data", out / "run.yaml"
    values = settings.config(policy.absolute(), data.absolute(), names, long)
    out.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(values, sort_keys=False))
    if not dry_run:
        _warm_start(console)
        settings.write_data(data)
    params = _demo_params(names)
    notes = [
        f"TRL's GRPOTrainer, a policy of 78,272 parameters, tasks of sorting digits, reward "
        f"{_rewarded(values['reward_weights'])}. Every run trains {values['max_steps']} steps of "
        f"{values['per_device_train_batch_size']} rollouts, {values['num_generations']} per prompt; what a method "
        f"generates beyond that shows in the tokens.",
        *_demo_notes(params),
    ]
    comparison = make_plan(Trl(config.absolute()), arms, parse_seeds(seeds), out, params, notes)
    shown, watch = settings.metrics(values), "rewards/exact/mean"
    _run(comparison, shown, jobs, (), dry_run, console, watch, _demo_environment(out), settings.LABELS)


def _demo_agents(
    arms: Sequence[Arm], seeds: str, out: Path, jobs: int, long: bool, dry_run: bool, console: Console
) -> None:
    """The demo of methods for agents: in an environment, with the plain agent loop where an arm has no other."""
    from rl_plugins.demo import agents
    from rl_plugins.demo.environments.policy import agent_policy_path, load_agent_policy

    arms = agents.with_loop(arms)
    names = _names(arms)
    environment = agents.environment_of(names)
    data, config = out / "data", out / "run.yaml"
    values = agents.config(agent_policy_path(environment).absolute(), data.absolute(), long)
    out.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(values, sort_keys=False))
    if not dry_run:
        _warm_start(console, lambda progress: load_agent_policy(environment, progress=progress))
        agents.write_data(data, environment)
    params = _demo_params(names) | agents.params(names, environment)
    notes = [
        f"TRL's GRPOTrainer, a policy of 78,272 parameters, agents in `{environment}`, reward: its score. Every run "
        f"trains {values['max_steps']} steps of {values['per_device_train_batch_size']} rollouts, "
        f"{values['num_generations']} per task. {arms[0].label} is the plain agent loop (`{agents.LOOP}`, unlimited).",
        *_demo_notes(params),
    ]
    comparison = make_plan(Trl(config.absolute()), arms, parse_seeds(seeds), out, params, notes)
    watch, labels = agents.METRICS[0], agents.LABELS
    _run(comparison, agents.METRICS, jobs, (), dry_run, console, watch, _demo_environment(out), labels)


def _demo_environment(out: Path) -> dict[str, str]:
    return {
        "HF_DATASETS_CACHE": str((out / "cache").absolute()),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def demo_verl(methods: Sequence[str], baseline: str, seeds: str, out: Path, long: bool, dry_run: bool) -> None:
    """The same with verl's trainer on the CPU: one run at a time, because one is 19 processes."""
    from rl_plugins.compare.verl import Verl
    from rl_plugins.demo import agents, settings, verl_data
    from rl_plugins.demo.policy import policy_path

    arms = parse_arms(methods, baseline)
    names = _names(arms)
    if agents.needed(names):
        raise ConfigError(
            f"{', '.join(names)}: agents are shown on TRL. Run `rl-plugins demo {' '.join(methods)}`; with verl, use "
            f"your own environment and `rl-plugins compare`."
        )
    console = Console()
    steps = verl_data.LONG_STEPS if long else verl_data.SHORT_STEPS
    data = out / "data"
    given = verl_data.overrides(data, policy_path(), out, steps=steps, test_every=steps // 2)
    host = Verl.of([*given, *verl_data.suited(names)])
    params = _demo_params(names)
    weights = verl_data.reward_weights(names)
    notes = [
        f"verl's trainer on the CPU (rollouts by transformers in place of vLLM), a policy of 78,272 parameters, tasks "
        f"of sorting digits, reward {_rewarded(weights)}. Every run trains {steps} steps of "
        f"{verl_data.PROMPTS * verl_data.SAMPLES} rollouts, {verl_data.SAMPLES} per prompt; what a method generates "
        f"beyond that shows in the tokens.",
        f"{baseline} is verl's own trainer `sync`, a method runs in `rl_plugins_sync`. In both the replay buffer is "
        f"asked every 0.2 s instead of verl's 2 s. Seconds are those of the training steps, without start-up and "
        f"evaluation.",
        *_demo_notes(params),
    ]
    if len(parse_seeds(seeds)) < 3:
        notes.append(
            "Fewer than 3 seeds tell only very large differences apart: --seeds 5 takes longer and tells more."
        )
    comparison = make_plan(host, arms, parse_seeds(seeds), out, params, notes)
    waiting = sum(not is_finished(run) for run in comparison.runs)
    if not dry_run:
        _warm_start(console)
        verl_data.write(data)
        if waiting:
            one = verl_data.SECONDS_TO_START + steps * verl_data.SECONDS_PER_STEP
            console.print(
                f"{waiting} runs of verl one after another, each about {one / 60:.1f} minutes on two idle cores (verl "
                f"starts 19 processes per run): about {waiting * one / 60:.0f} minutes. Ctrl-C stops; the same command "
                f"goes on after the last finished run.",
                highlight=False,
            )
    shown = settings.metrics({"reward_weights": weights})
    watch = "rewards/exact/mean"
    _run(comparison, shown, 1, (), dry_run, console, watch, verl_data.ENVIRONMENT, settings.LABELS)


def _names(arms: Sequence[Arm]) -> list[str]:
    return list(dict.fromkeys(name for arm in arms for name in arm.methods))


def _demo_params(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    from rl_plugins.demo.settings import DEMO_PARAMS
    from rl_plugins.runtime import registry

    known = registry.all_names()
    parts = [p for name in names if name in known for p in getattr(registry.load(name), "parts", (name,))]
    return {name: dict(DEMO_PARAMS[name]) for name in parts if name in DEMO_PARAMS}


def _demo_notes(params: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        "In groups of equal rewards nothing is learned. What is right on held-out prompts is comparable; what is right "
        "in training is of the prompts and completions each method chose.",
        *(f"`{name}` with {', '.join(f'{k}={v}' for k, v in given.items())}." for name, given in params.items()),
        "A toy: it shows that the method acts and what it does here, not what it does on a large model.",
    ]


def _rewarded(weights: Sequence[float]) -> str:
    from rl_plugins.demo.settings import REWARDS

    return " + ".join(name for name, weight in zip(REWARDS, weights, strict=True) if weight)


def _warm_start(console: Console, load: Callable[[Any], Any] | None = None) -> None:
    """Builds the policy of the demo, if it is not there yet; `load` builds another one."""
    from rl_plugins.demo.policy import load_policy

    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("warm start of the policy (once, then cached)", total=None)
        (load or (lambda update: load_policy(progress=update)))(
            lambda step, total, _: progress.update(task, total=total, completed=step)
        )
        progress.update(task, total=1, completed=1)


def _run(
    comparison: Comparison,
    metrics: Sequence[str],
    jobs: int,
    launcher: Sequence[str],
    dry_run: bool,
    console: Console | None = None,
    watch: str | None = None,
    environment: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is needed for the report. Install: pip install 'rl-plugins[plot]'.")
    console = console or Console()
    if dry_run:
        for run in comparison.runs:
            state = "finished" if is_finished(run) else "to run"
            console.print(
                f"{run.arm.label} seed {run.seed} ({state}): {' '.join(map(shlex.quote, run.arguments))}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        return
    seconds = run_all(comparison, jobs, launcher, watch or metrics[0], console, dict(environment or {}))
    summary = report.write(comparison, metrics, seconds, labels)
    console.print(Markdown(report.text(summary).replace("![curves](curves.png)", "")))
    console.print(f"{comparison.out}{os.sep}curves.png, report.md, summary.json ({seconds:.0f} s)", highlight=False)


def _hooks(methods: Sequence[str]) -> set[str]:
    from rl_plugins.runtime.registry import select

    found: dict[str, Any] = dict(select(methods).classes)
    return {hook for cls in found.values() for hook in cls.claims()}
