"""`rl-plugins compare` and `rl-plugins demo`: the same engine on the user's config and on the embedded one."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rl_plugins.compare import report
from rl_plugins.compare.plan import Comparison, make_plan, parse_arms
from rl_plugins.compare.runs import is_finished, run_all
from rl_plugins.errors import ConfigError
from rl_plugins.registry import parse_method_params


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
    config: Path,
    methods: Sequence[str],
    baseline: str,
    seeds: str,
    out: Path,
    jobs: int,
    metrics: Sequence[str],
    launcher: str,
    method_params: str | None,
    dry_run: bool,
    extra: Sequence[str],
) -> None:
    """Trains every arm with every seed on the user's own config and writes figures and a report."""
    if not config.is_file():
        raise ConfigError(f"There is no config {config}. Give the YAML file you run `trl grpo` with.")
    values = yaml.safe_load(config.read_text()) or {}
    arms = parse_arms(methods, baseline)
    chosen = any({"select_prompts", "plan"} & _hooks(a.methods) for a in arms)
    held_out = str(values.get("eval_strategy", "no")) != "no"
    notes = ["Every run has the same config: optimizer steps, batch and data."]
    if chosen and not held_out:
        notes.append(
            "A method here chooses prompts or rollouts, so rewards in training are of what it chose. Set "
            "eval_strategy and a test split to compare on held-out prompts."
        )
    shown = list(metrics) or (["eval_reward"] if held_out else []) + ["reward"]
    comparison = make_plan(
        config.absolute(), arms, parse_seeds(seeds), out, extra, parse_method_params(method_params), notes
    )
    _run(comparison, shown, jobs, shlex.split(launcher), dry_run)


def demo(methods: Sequence[str], baseline: str, seeds: str, out: Path, jobs: int, long: bool, dry_run: bool) -> None:
    """Builds the embedded policy and compares methods with plain GRPO on it."""
    from rl_plugins.demo import settings
    from rl_plugins.demo.policy import load_policy, policy_path

    arms = parse_arms(methods, baseline)
    names = [n for a in arms for n in a.methods]
    console = Console()
    policy, data, config = policy_path(), out / "data", out / "run.yaml"
    values = settings.config(policy.absolute(), data.absolute(), names, long)
    out.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(values, sort_keys=False))
    if not dry_run:
        with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("warm start of the policy (once, then cached)", total=None)
            load_policy(progress=lambda step, total, _: progress.update(task, total=total, completed=step))
            progress.update(task, total=1, completed=1)
        settings.write_data(data)
    params = {n: dict(settings.DEMO_PARAMS[n]) for n in names if n in settings.DEMO_PARAMS}
    weights = zip(settings.REWARDS, values["reward_weights"], strict=True)
    rewarded = " + ".join(name for name, weight in weights if weight)
    notes = [
        f"TRL's GRPOTrainer, a policy of 78,272 parameters, tasks of sorting digits, reward {rewarded}. Every run "
        f"trains {values['max_steps']} steps of {values['per_device_train_batch_size']} rollouts, "
        f"{values['num_generations']} per prompt; what a method generates beyond that shows in the tokens.",
        "In groups of equal rewards nothing is learned. What is right on held-out prompts is comparable; what is right "
        "in training is of the prompts and completions each method chose.",
        *(f"`{name}` with {', '.join(f'{k}={v}' for k, v in given.items())}." for name, given in params.items()),
        "A toy: it shows that the method acts and what it does here, not what it does on a large model.",
    ]
    comparison = make_plan(config.absolute(), arms, parse_seeds(seeds), out, (), params, notes)
    cache = {
        "HF_DATASETS_CACHE": str((out / "cache").absolute()),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    _run(comparison, settings.metrics(values), jobs, (), dry_run, console, "rewards/exact/mean", cache, settings.LABELS)


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
    missing = [name for name in ("matplotlib", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} is needed for the report. Install: pip install 'rl-plugins[plot]'.")
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
    from rl_plugins.registry import select

    found: dict[str, Any] = dict(select(methods).classes)
    return {hook for cls in found.values() for hook in cls.claims()}
