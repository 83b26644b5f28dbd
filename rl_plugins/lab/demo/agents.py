"""The runs of `rl-plugins demo` for agents: an environment, a policy warm-started for it, and the plain agent loop.

Methods that give credit per turn, or change how turns are made, have nothing to act on in one-turn tasks. A variant
without a rollout method of its own is played by `turn_control` with `strategy: unlimited`, which is the plain agent
loop; the baseline is that loop with the host's GRPO.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text
from rl_plugins.core.method import Bundle, Method
from rl_plugins.lab.compare.plan import Variant
from rl_plugins.lab.demo import environments
from rl_plugins.lab.demo.settings import ON_CPU
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

LOOP = "turn_control"
LABELS = {
    "eval_rewards/score/mean": "score, held out (0 to 1)",
    "rewards/score/mean": "score, in training (0 to 1)",
    "frac_reward_zero_std": "rollouts in groups of equal rewards (share)",
}
METRICS = ["eval_rewards/score/mean", "frac_reward_zero_std", "rewards/score/mean"]
SHORT_STEPS, LONG_STEPS = 60, 150
TRAIN_PROMPTS, TEST_PROMPTS = 300, 160


def needed(names: Iterable[str]) -> bool:
    """Whether any of the methods plays in environments."""
    return any("turns" in cls(_params(cls)).needs or _has_environment(cls) for cls in _classes(names))


def environment_of(names: Iterable[str]) -> str:
    """The environment all variants play in: that of a card (`environment` in `[demo]`), else the grid."""
    told = (card_file(cls).demo.get("environment") for cls in _classes(names))
    return next(filter(None, told), "Grid")


def with_loop(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """Variants without a rollout method of their own get the plain agent loop.

    Raises:
        ConfigError: a variant whose rollout method plays in no environment.
    """
    out = []
    for variant in variants:
        makes = [cls for cls in _classes(variant.methods) if "rollout" in cls.claims()]
        if any(not _has_environment(cls) for cls in makes):
            raise ConfigError(
                f"`{makes[0].name}` makes its rollouts without an environment, and another variant of this demo plays "
                f"in one. Run them apart: rl-plugins demo {variant.label}"
            )
        out.append(variant if makes else replace(variant, methods=(LOOP, *variant.methods)))
    return tuple(out)


def params(names: Iterable[str], environment: str) -> dict[str, dict[str, Any]]:
    """Parameters of the methods that play: the environment, its limit of turns, and tokens per turn."""
    kind = getattr(environments, environment)
    of: dict[str, dict[str, Any]] = {}
    for cls in _classes(names):
        if not _has_environment(cls):
            continue
        fields = cls.Params.__dataclass_fields__
        known = {
            "environment": f"rl_plugins.lab.demo.environments:{environment}",
            "turn_tokens": kind.MAX_ACTION,
            "hard_cap": kind.MAX_TURNS,
            "max_turns": kind.MAX_TURNS,
            "strategy": "unlimited",
            "marker": "[",
        }
        of[cls.name] = {k: v for k, v in known.items() if k in fields}
    return of


def config(policy: Path, data: Path, long: bool) -> dict[str, Any]:
    """The config of every run."""
    steps = LONG_STEPS if long else SHORT_STEPS
    return {
        **ON_CPU,
        "model_name_or_path": str(policy),
        "dataset_name": str(data),
        "reward_funcs": ["rl_plugins.lab.demo.rewards.score"],
        "per_device_train_batch_size": 128,
        "num_generations": 8,
        "max_completion_length": 200,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "warmup_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": steps // 3,
        "eval_on_start": True,
        "per_device_eval_batch_size": TEST_PROMPTS,
        "num_generations_eval": 1,
    }


def write_data(folder: Path, environment: str) -> None:
    """Episodes to train on and episodes held out."""
    kind = getattr(environments, environment)
    for split, n in (("train", TRAIN_PROMPTS), ("test", TEST_PROMPTS)):
        rows = kind.rows(n, seed=0, split="train" if split == "train" else "held_out")
        write_text(folder / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _classes(names: Iterable[str]) -> list[type[Method]]:
    found: list[type[Method]] = []
    for name in names:
        loaded = registry.load(name)
        if isinstance(loaded, Bundle):
            found += _classes(loaded.parts)
        else:
            found.append(loaded)
    return found


def _has_environment(cls: type[Method]) -> bool:
    return "environment" in cls.Params.__dataclass_fields__ and "rollout" in cls.claims()


def _params(cls: type[Method]) -> Any:
    from rl_plugins.core.params import build_params

    given: Mapping[str, Any] = dict(card_file(cls).example_params)
    return build_params(cls.Params, given, cls.name)
