"""The tasks of the bench. A task has prompts, rewards, a config of the host, and a budget.

It differs from `neutral` in one setting, and its name is `setting=value`. `neutral` is where a method without a reason
to help should do no harm. Everything in a task was chosen before any method ran on it; only plain GRPO was looked at,
so that it neither stays at zero nor reaches the top (see `benchmarks/bench/README.md`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_plugins.cards.claims import MEASURES
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text
from rl_plugins.lab.bench import chains, paraphrases
from rl_plugins.lab.bench.chains import Mix
from rl_plugins.lab.demo.settings import ON_CPU

STEPS, ROWS, GROUP = 40, 64, 8
LEARNING_RATE = 2e-4  # the best of 1e-4, 2e-4, 3e-4, 5e-4 and 1e-3 for GRPO in `neutral`, on seeds 100 to 102
TEST_PROMPTS, TEST_TRIES = 96, 16
TRAIN_PROMPTS = 1000
COST_UNITS = ("steps", "rows_trained", "tokens_decoded")
WATCHED = ("right", "clean", "tidy", "steps", "length", "solved", "solved_8")
WATCHED_LATER = ("solved_8", "agree")  # since 2026-11-27: runs from before lack them, and are as good without

METRICS: Mapping[str, tuple[str, str]] = {
    "right": ("eval_rewards/right/mean", MEASURES["right"]),
    "clean": ("eval_rewards/clean/mean", MEASURES["clean"]),
    "tidy": ("eval_rewards/tidy/mean", MEASURES["tidy"]),
    "steps": ("eval_rewards/steps/mean", MEASURES["steps"]),
    "solved": ("eval_rewards/solved/mean", MEASURES["solved"]),
    "solved_8": ("eval_rewards/solved_8/mean", MEASURES["solved_8"]),
    "agree": ("eval_rewards/agree/mean", MEASURES["agree"]),
    "length": ("eval_rewards/length/mean", MEASURES["length"]),
    "no_signal": ("frac_reward_zero_std", MEASURES["no_signal"]),
    "entropy": ("entropy", MEASURES["entropy"]),
    "score": ("eval_rewards/score/mean", MEASURES["score"]),
    "tokens": ("rl_plugins/tokens_decoded", MEASURES["tokens"]),
    "rows": ("rl_plugins/rows_made", MEASURES["rows"]),
}


def fingerprint_of(*settings: Any) -> str:
    """A hash of settings. Functions and classes of this package count by their name, wherever their module is."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(re.sub(r"\brl_plugins(\.\w+)*[.:]", "", text).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class BenchTask:
    """One setting.

    Args:
        name: `setting=value`.
        about: what differs from `neutral`, in a sentence.
        mix: of the prompts to train on.
        test: of the held-out prompts; none: `mix`.
        rewards: function of `chains` -> weight; those of weight 0 are watched.
        options: of the host that differ from the base config.
        prompts: to train on.
        environment: of `rl_plugins.lab.demo.environments`: agents play there, and prompts and rewards are unused.
    """

    name: str
    about: str
    mix: Mix = field(default_factory=Mix)
    test: Mix | None = None
    rewards: Mapping[str, float] = field(default_factory=lambda: {"right": 1.0})
    options: Mapping[str, Any] = field(default_factory=dict)
    prompts: int = TRAIN_PROMPTS
    environment: str = ""

    @property
    def setting(self) -> str:
        return self.name.partition("=")[0]

    @property
    def metric(self) -> str:
        """What the task is judged by unless a claim names another."""
        return "score" if self.environment else "right"

    def config(self, policy: Path, data: Path) -> dict[str, Any]:
        """Options of TRL for every variant."""
        if self.environment:
            from rl_plugins.lab.demo import agents

            values = agents.config(policy, data, long=False)
            return {**values, **AGENTS, **self.options}
        weights = {**self.rewards, **{name: 0.0 for name in WATCHED if name not in self.rewards}}
        return {
            **ON_CPU,
            "model_name_or_path": str(policy),
            "dataset_name": str(data),
            "reward_funcs": [f"rl_plugins.lab.bench.chains.{name}" for name in weights],
            "reward_weights": list(weights.values()),
            "per_device_train_batch_size": ROWS,
            "num_generations": GROUP,
            "max_completion_length": 20,
            "max_steps": STEPS,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": 5,
            "eval_strategy": "steps",
            "eval_steps": STEPS // 4,
            "eval_on_start": True,
            "per_device_eval_batch_size": TEST_PROMPTS * TEST_TRIES,
            "num_generations_eval": TEST_TRIES,
            **self.options,
        }

    def write_data(self, folder: Path) -> Path:
        """Prompts to train on and held-out prompts as files that `datasets` reads without a hub."""
        if self.environment:
            from rl_plugins.lab.demo import agents

            agents.write_data(folder, self.environment)
            return folder
        for split, name, mix, n in (
            ("train", "train", self.mix, self.prompts),
            ("held_out", "test", self.test or self.mix, TEST_PROMPTS),
        ):
            rows = (paraphrases if mix.mode == "w" else chains).build_rows(mix, n, 0, split)
            write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return folder

    @cached_property
    def fingerprint(self) -> str:
        """Changes when results of the task are no longer comparable with earlier ones."""
        config = self.config(Path("policy"), Path("data"))
        if not self.environment:  # 16 tries measure what 4 did, with less noise; what is only watched changes nothing
            config |= {"per_device_eval_batch_size": TEST_PROMPTS * 4, "num_generations_eval": 4}
            kept = [i for i, name in enumerate(config["reward_funcs"]) if name.rpartition(".")[2] not in WATCHED_LATER]
            config |= {name: [config[name][i] for i in kept] for name in ("reward_funcs", "reward_weights")}
        trained = {name: weight for name, weight in self.rewards.items() if weight}
        return fingerprint_of(chains.VERSION, astuple(replace(self, about="", rewards=trained)), config)


AGENTS: Mapping[str, Any] = {"per_device_train_batch_size": 64, "max_steps": 30, "eval_steps": 10}


def _staleness(updates: int) -> BenchTask:
    return BenchTask(
        f"staleness={updates - 1}",
        f"{updates} updates per generated batch, so that rollouts are up to {updates - 1} updates old",
        options={"steps_per_generation": updates, "max_steps": 48, "eval_steps": 12},
    )


def _group(size: int) -> BenchTask:
    return BenchTask(f"group={size}", f"{size} rollouts per prompt, as many rows", options={"num_generations": size})


EVEN, TESTED_TAIL = Mix((2, 3, 4, 5, 6, 7, 8, 9)), Mix((2, 4, 6, 8))
_TASKS = (
    BenchTask("neutral", "chains of 2 to 7 steps, one reward for the right answer, 8 rollouts per prompt"),
    BenchTask("difficulty=narrow", "all chains have 4 steps", Mix((4,)), Mix((4,))),
    BenchTask(
        "difficulty=tail",
        "most chains have 2 steps, some up to 9",
        Mix(EVEN.steps, (32, 16, 8, 8, 8, 8, 8, 8)),
        TESTED_TAIL,
    ),
    BenchTask("difficulty=even", "the chains of `difficulty=tail`, all lengths equally often", EVEN, TESTED_TAIL),
    BenchTask(
        "difficulty=unsolvable",
        "seven of ten prompts have a step that can only be guessed",
        Mix(unsolvable=0.7),
        Mix(),
    ),
    BenchTask(
        "difficulty=repeated",
        "64 prompts to train on, of the lengths of `difficulty=tail`, so that each comes back every eighth batch",
        Mix(EVEN.steps, (32, 16, 8, 8, 8, 8, 8, 8)),
        TESTED_TAIL,
        prompts=64,
    ),
    BenchTask("rewards=1x", "a second reward of the same size for tidy answers", rewards={"right": 1.0, "tidy": 1.0}),
    BenchTask(
        "rewards=10x", "a second reward, ten times as large, for tidy answers", rewards={"right": 1.0, "tidy_10": 1.0}
    ),
    BenchTask(
        "rewards=100x",
        "a second reward, a hundred times as large, for tidy answers",
        rewards={"right": 1.0, "tidy_100": 1.0},
    ),
    BenchTask(
        "length=tail",
        "answers have a log-normal number of dots that mean nothing",
        Mix((1, 2, 3, 4), mode="l"),
        options={"max_completion_length": 32},
    ),
    BenchTask(
        "length=penalty",
        "answers with dots as in `length=tail`, and a second reward for short answers",
        Mix((1, 2, 3, 4), mode="l"),
        rewards={"right": 1.0, "short": 0.5},
        options={"max_completion_length": 32},
    ),
    BenchTask(
        "forks=30",
        "after each step a letter has to be chosen: three of ten tokens",
        Mix((1, 2, 3), mode="f"),
    ),
    BenchTask("noise=10", "the reward is turned around in one of ten rows", rewards={"noisy_10": 1.0}),
    BenchTask("noise=30", "the reward is turned around in three of ten rows", rewards={"noisy_30": 1.0}),
    BenchTask(
        "noise=judge", "the judge believes three of ten wrong answers that end with `!`", rewards={"biased": 1.0}
    ),
    BenchTask(
        "noise=graded", "a judge grades steps and answer, and likes answers that end with `!`", rewards={"graded": 1.0}
    ),
    _group(2),
    _group(4),
    _group(32),
    _staleness(2),
    _staleness(4),
    _staleness(16),
    BenchTask("prompts=16", "16 prompts to train on", prompts=16),
    BenchTask(
        "prompts=wordings",
        "four wordings of each chain, with the same values after each step",
        Mix(mode="w"),
        rewards={"right": 1.0, "agree": 0.0},
    ),
    BenchTask("agents=states", "agents in a grid, whose states repeat", environment="Grid"),
    BenchTask("agents=tools", "agents with a calculator, whose calls can fail", environment="Calculator"),
)
TASKS: Mapping[str, BenchTask] = {task.name: task for task in _TASKS}


def task_of(name: str) -> BenchTask:
    """A task by its name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        raise ConfigError(f"There is no task {name!r}. Tasks: {', '.join(TASKS)}.")
    return TASKS[name]
