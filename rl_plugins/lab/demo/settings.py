"""The runs of `rl-plugins demo`: proven settings for the embedded policy, as a config that `trl grpo` could read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.core.files import write_text
from rl_plugins.core.method import Bundle
from rl_plugins.core.params import build_params
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

REWARDS = ("exact", "digits", "careful")
GRADED, BINARY = (0.0, 1.0, 1.0), (1.0, 0.0, 0.0)  # weights; a function of weight 0 is watched, not trained
# Graded rewards leave small groups something to tell rollouts apart by, and come in two sizes for methods that combine
# several. Methods that tell right from wrong rollouts get the binary one: `rewards = "binary"` in `[demo]` of the card.
LABELS = {
    "eval_rewards/exact/mean": "right answers, held out (share)",
    "rewards/exact/mean": "right answers, in training (share)",
    "frac_reward_zero_std": "rollouts in groups of equal rewards (share)",
    "eval_rewards/digits/mean": "right digits, held out (share)",
    "rewards/digits/mean": "right digits, in training (share)",
    "eval_rewards/careful/mean": "reward for the careful mark, held out (0 to 0.1)",
    "rewards/careful/mean": "reward for the careful mark, in training (0 to 0.1)",
}
# Options of the host that a method has nothing to do without: value, signals that ask for it, and what they need.
SUITED: Mapping[str, tuple[Any, set[str], str]] = {
    "num_iterations": (2, {"off_policy", "several_updates"}, "several updates per batch"),
    "beta": (0.04, {"ref_logprobs"}, "a reference policy"),
}
SHORT_STEPS, LONG_STEPS = 80, 200
TRAIN_PROMPTS, TEST_PROMPTS = 300, 320  # few enough that a prompt comes back, for methods that remember prompts

ABOUT = "TRL's GRPOTrainer, a policy of 78,272 parameters, tasks of sorting digits."

# What every small run of TRL on a CPU has in common.
ON_CPU: Mapping[str, Any] = {
    "dtype": "float32",
    "lr_scheduler_type": "constant_with_warmup",
    "loss_type": "dapo",
    "beta": 0.0,
    "temperature": 1.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


def config(policy: Path, data: Path, methods: Iterable[str], long: bool) -> dict[str, Any]:
    """The config of every run, baseline included, so that all have the same budget.

    Args:
        policy: folder of the warm-started policy.
        data: folder with train.jsonl and test.jsonl.
        methods: all methods of the comparison; one that corrects for off-policy updates gets two per batch.
        long: the long setting.
    """
    methods = list(methods)
    steps = LONG_STEPS if long else SHORT_STEPS
    values: dict[str, Any] = {
        **ON_CPU,
        "model_name_or_path": str(policy),
        "dataset_name": str(data),
        "reward_funcs": [f"rl_plugins.lab.demo.rewards.{name}" for name in REWARDS],
        "reward_weights": list(BINARY if any(map(wants_binary, methods)) else GRADED),
        "per_device_train_batch_size": 256 if long else 128,
        "num_generations": 4,
        "max_completion_length": 14,
        "max_steps": steps,
        "learning_rate": 3e-4,
        "warmup_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": steps // 4,
        "eval_on_start": True,
        "per_device_eval_batch_size": 320,
        "num_generations_eval": 1,
    }
    return values | suited(methods)


def suited(methods: Iterable[str]) -> dict[str, Any]:
    """Options of the host that methods have nothing to do without."""
    needs = _needs(methods)
    return {name: value for name, (value, signals, _) in SUITED.items() if needs & signals}


def reasons(methods: Iterable[str], rewards: Sequence[str] = REWARDS) -> list[str]:
    """What a demo sets for all variants because of single methods, a sentence each.

    Args:
        rewards: names of its reward functions; the first only tells right from wrong.
    """
    methods = list(methods)
    lines = []
    if binary := [name for name in methods if wants_binary(name)]:
        lines.append(
            f"`reward_weights` of {', '.join(rewards)} is {', '.join(f'{w:g}' for w in BINARY)} in all variants, "
            f"because {needing(binary)} a reward that only tells right from wrong."
        )
    for name, (value, signals, why) in SUITED.items():
        if asking := [method for method in methods if _needs([method]) & signals]:
            lines.append(f"`{name}` is {value} in all variants, because {needing(asking)} {why}.")
    return lines


def demo_params(name: str) -> Mapping[str, Any]:
    """Parameters with which a method has something to act on in the demo; everything else is the paper's default."""
    params: Mapping[str, Any] = card_file(name).demo.get("params", {})
    return params


def wants_binary(name: str) -> bool:
    """Whether a method tells right from wrong rollouts, so that graded rewards would mislead it."""
    return bool(card_file(name).demo.get("rewards") == "binary")


def needing(names: list[str]) -> str:
    """ "`a`, `b` need", for a sentence that goes on with what."""
    return f"{', '.join(f'`{n}`' for n in names)} {'needs' if len(names) == 1 else 'need'}"


def _needs(names: Iterable[str]) -> set[str]:
    """Signals any of the methods asks for."""
    found: set[str] = set()
    for name in names:
        loaded = registry.load(name)
        if isinstance(loaded, Bundle):
            found |= _needs(loaded.parts)
        else:
            params = demo_params(name) or card_file(name).example_params
            found |= set(loaded(build_params(loaded.Params, params, name)).needs)
    return found


def metrics(values: Mapping[str, Any]) -> list[str]:
    """The logged values a comparison with this config shows, the main one first."""
    graded = tuple(values["reward_weights"]) == GRADED
    names = ["eval_rewards/exact/mean", "frac_reward_zero_std", "rewards/exact/mean"]
    parts = [f"{split}rewards/{name}/mean" for name in ("digits", "careful") for split in ("eval_", "")]
    return names + (parts if graded else [])


def write_data(folder: Path) -> Path:
    """Prompts to train on and prompts held out, as files `datasets` reads without any hub."""
    from rl_plugins.lab.demo.tasks import build_rows

    for split, n in (("train", TRAIN_PROMPTS), ("test", TEST_PROMPTS)):
        rows = build_rows(n, seed=0, split="train" if split == "train" else "held_out")
        write_text(folder / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder


def environment(out: Path) -> dict[str, str]:
    """Variables of every run: its cache of data in the folder of the results, one thread, no hub."""
    return {
        "HF_DATASETS_CACHE": str((out / "cache").absolute()),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
