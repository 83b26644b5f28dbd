"""`rl-plugins demo --real`: plain GRPO and methods on SmolLM2-135M-Instruct with LoRA, on sums of reasoning-gym.

What the command says of time, memory and disk was measured on the runs of its default (`MEASURED`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from rl_plugins.cards.usage import needs_masked
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim, write_text
from rl_plugins.environments import reasoning_gym
from rl_plugins.lab.compare.comparison import RunOptions, need_plots, run
from rl_plugins.lab.compare.plan import make_plan, parse_variants
from rl_plugins.lab.compare.runs import is_finished
from rl_plugins.lab.compare.trl import Trl
from rl_plugins.lab.demo import agents, flows, settings
from rl_plugins.lab.demo.demos import SETS, params_of, told_how_to_look
from rl_plugins.lab.real.model import INSTALL, NAME, missing_packages, model_folder, model_path, need_packages

TASKS = {
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "operators": ["+"],
        "allow_negation": False,
        "allow_parentheses": False,
    }
}
REWARDS, WEIGHTS = ("solved", "correct", "brief"), (0.0, 1.0, 1.0)
METRICS = ["eval_rewards/solved/mean", "eval_rewards/brief/mean", "rewards/solved/mean", "rewards/brief/mean"]
LABELS = {
    "eval_rewards/solved/mean": "right answers, held out (share)",
    "eval_rewards/brief/mean": "brevity, held out (0 to 1)",
    "rewards/solved/mean": "right answers, in training (share)",
    "rewards/brief/mean": "brevity, in training (0 to 1)",
}


@dataclass(frozen=True)
class Size:
    """How much a run trains.

    Args:
        rows, group: rollouts of a step, and of a prompt.
        held_out: questions of an evaluation.
        layers: pattern of the layers with LoRA.
    """

    steps: int
    rows: int
    group: int
    held_out: int
    dtype: str
    layers: str
    learning_rate: float


# On a CPU the last third of the layers has LoRA: gradients go no deeper, which saves a third of a step's time.
ON_CPU = Size(24, 16, 4, 48, "float32", r".*layers\.2\d\..*_proj", 3e-4)
ON_CUDA = Size(200, 128, 16, 200, "bfloat16", r".*layers\..*_proj", 2e-4)


@dataclass(frozen=True)
class Measured:
    """What a run of the default took on a CPU.

    Args:
        start, step, evaluation: CPU seconds.
        memory, model, results: GB.
    """

    start: float
    step: float
    evaluation: float
    memory: float
    model: float
    results: float
    machine: str

    def minutes(self, steps: int) -> float:
        """CPU minutes of a run, which evaluates at its beginning, in the middle and at its end."""
        return (self.start + steps * self.step + 3 * self.evaluation) / 60


MEASURED = Measured(15, 14.5, 25, 3.9, 0.54, 0.05, "a core of a busy server, float32")


def demo_real(methods: Sequence[str], options: RunOptions, long: bool) -> None:
    """Says what it takes, makes the model once, and compares methods with plain GRPO. A dry run needs no model.

    Raises:
        ConfigError: a package is missing, or a method needs an environment or another kind of model.
    """
    if not options.dry_run:
        need_packages()
        need_plots()
    variants = parse_variants(methods, options.baseline)
    names = list(dict.fromkeys(name for variant in variants for name in variant.methods))
    if agents.needed(names) or flows.needed(names) or needs_masked(names):
        raise ConfigError(
            f"{', '.join(names)}: with --real a language model answers questions in one turn, and a method here needs "
            f"an environment or another kind of model. Leave --real out: rl-plugins demo {' '.join(methods)}"
        )
    import torch

    gpu, console = torch.cuda.is_available(), Console()
    size = ON_CUDA if gpu else ON_CPU
    values = config(size, options.out / "data", names, gpu, long)
    params = params_of(names)
    notes = [
        f"TRL's GRPOTrainer, {NAME} (134,515,008 parameters, {size.dtype}) with LoRA, sums of numbers of one and two "
        f"digits of reasoning-gym. Rewards: `correct` (its scorer) and `brief` (short answers), weight 1 each.",
        f"Every run trains {values['max_steps']} steps of {size.rows} rollouts, {size.group} per prompt. Held out: "
        f"{size.held_out} questions that are not trained on, a sampled answer each, before, halfway and after.",
        *settings.reasons(names, REWARDS),
        *(f"`{name}` runs with {', '.join(f'{k}={v}' for k, v in given.items())}." for name, given in params.items()),
        SETS.format(options.out),
        *options.notes,
    ]
    host = Trl(yaml.safe_dump(values, sort_keys=False), trace=True)
    comparison = make_plan(host, variants, options.seeds, options.out, params, notes)
    waiting = sum(not is_finished(planned) for planned in comparison.runs)
    lines = costs(waiting, options.jobs, size, gpu, values["max_steps"])
    for line in [*lines, *filter(None, [missing_packages()])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not options.dry_run:
        claim(options.out, "compare")
        with console.status("making the model, once"):
            model_folder(size.dtype)
        write_data(options.out / "data", size)
    run(
        comparison,
        METRICS,
        options,
        console=console,
        watch="rewards/solved/mean",
        environment=settings.environment(options.out),
        labels=LABELS,
    )
    told_how_to_look(comparison, options, console)


def config(size: Size, data: Path, methods: Sequence[str], gpu: bool, long: bool) -> dict[str, Any]:
    """The config of every run, baseline included."""
    steps = size.steps * (3 if long else 1)
    values = {
        **settings.ON_CPU,
        "model_name_or_path": str(model_path(size.dtype)),
        "dataset_name": str(data.absolute()),
        "dtype": size.dtype,
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_target_modules": [size.layers],
        "reward_funcs": [f"rl_plugins.environments.reasoning_gym.{name}" for name in REWARDS],
        "reward_weights": list(settings.BINARY if any(map(settings.wants_binary, methods)) else WEIGHTS),
        "per_device_train_batch_size": size.rows,
        "num_generations": size.group,
        "max_completion_length": 24,
        "max_steps": steps,
        "learning_rate": size.learning_rate,
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": max(1, steps // 2),
        "eval_on_start": True,
        "per_device_eval_batch_size": size.held_out,
        "num_generations_eval": 1,
        "save_strategy": "steps",
        "save_steps": max(1, steps // 4),
        "save_total_limit": 1,
        **settings.suited(methods),
    }
    return values | ({"use_cpu": False, "bf16": True, "eval_steps": steps // 4} if gpu else {})


def costs(waiting: int, jobs: int, size: Size, gpu: bool, steps: int) -> list[str]:
    """What is to come, before it begins."""
    m = MEASURED
    made = model_path(size.dtype).exists()
    lines = [
        f"Download: none; the model is in the package that `{INSTALL[1]}` installed (92 MB). Disk: {m.model:g} GB for "
        f"the model in {model_path(size.dtype)} ({'there already' if made else 'made once, half a CPU minute'}), up to "
        f"{m.results:g} GB for the results of a run.",
    ]
    if not waiting:
        return [*lines, "All runs are finished; only the report is written again."]
    if gpu:
        return [*lines, f"{waiting} runs on CUDA in bfloat16. How long they take was not measured: see the bars."]
    minutes, at_once = m.minutes(steps), min(jobs, waiting)
    return [
        *lines,
        f"Time: {waiting} runs of about {minutes:.0f} CPU minutes each, about {waiting * minutes:.0f} in all. Memory: "
        f"{m.memory:g} GB per run, {at_once} at a time (--jobs). Measured on {m.machine}. Ctrl-C stops; the same "
        f"command goes on from the last checkpoint.",
    ]


def write_data(folder: Path, size: Size) -> None:
    """Questions to train on and held-out questions, as files that `datasets` reads."""
    for name, rows in zip(("train", "test"), reasoning_gym.split(TASKS, 400, size.held_out), strict=True):
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
