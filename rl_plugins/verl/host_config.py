"""What verl itself would refuse while it builds a run, or accept and never read. The doctor tells it before.

Names are read from verl's source, because the doctor imports no verl. With external modules of the user's, which may
register more, they are not looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, did_you_mean, shown
from rl_plugins.verl.capabilities import Reader

OLD_KEYS = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model": "reward.reward_model",
    "sandbox_fusion": "reward.sandbox_fusion",
}
"""Keys of older verl -> where 0.9.1 reads them. The first that fits counts."""


def problems(read: Reader, folder: Path) -> Iterator[str]:
    """
    Args:
        folder: of the installed verl.
    """
    for rule in (_old_keys, _unknown_names, _too_few_rows):
        yield from rule(read, folder)


def refuse_old_keys(read: Reader) -> None:
    """Raises ConfigError for keys that are given and never read: training, or an audit, would use another reward."""
    if told := list(_old_keys(read, Path())):
        raise ConfigError("\n".join(told))


def _old_keys(read: Reader, folder: Path) -> Iterator[str]:
    for top in ("custom_reward_function", "reward_model", "sandbox_fusion"):
        for key in _given(read(top), top):
            old = next(o for o in OLD_KEYS if key == o or key.startswith(f"{o}."))
            now = OLD_KEYS[old] + key.removeprefix(old)
            yield f"{key}={shown(read(key))} is of an older verl: this one accepts it and never reads it. Write {now}."


def _given(node: Any, path: str) -> Iterator[str]:
    if hasattr(node, "items"):
        for name, value in node.items():
            yield from _given(value, f"{path}.{name}")
    elif node is not None:
        yield path


def _unknown_names(read: Reader, folder: Path) -> Iterator[str]:
    if os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        return
    algos, managers = folder / "trainer/ppo/core_algos.py", folder / "experimental/reward_loop/reward_manager"
    looks = {
        "actor_rollout_ref.actor.policy_loss.loss_mode": (algos, r'@register_policy_loss\("([^"]+)"'),
        "algorithm.adv_estimator": (algos, r'^    [A-Z0-9_]+ = "([a-z0-9_]+)"'),
        "reward.reward_manager.name": (managers, r'@register(?:_manager)?\("([^"]+)"'),
    }
    if read("reward.reward_manager.source") == "importlib":
        del looks["reward.reward_manager.name"]
    for key, (place, pattern) in looks.items():
        given, known = read(key), _found(place, pattern)
        if known and given is not None and str(given) not in known:
            yield (
                f"{key}={shown(given)}: this verl has no such name; it has {', '.join(sorted(known))}."
                f"{did_you_mean(str(given), known)}"
            )


def _found(place: Path, pattern: str) -> set[str]:
    """Names in a file of verl, or in the files of a folder; empty if it is not there or reads otherwise."""
    files = sorted(place.glob("*.py")) if place.is_dir() else [place] * place.is_file()
    return {name for file in files for name in re.findall(pattern, file.read_text(encoding="utf-8"), re.M)}


def _too_few_rows(read: Reader, folder: Path) -> Iterator[str]:
    actor = "actor_rollout_ref.actor"
    micro, mini = read(f"{actor}.ppo_micro_batch_size_per_gpu"), read(f"{actor}.ppo_mini_batch_size")
    gpus = read("trainer.nnodes", 1) * read("trainer.n_gpus_per_node", 1)
    if micro is None or mini is None or not gpus or read(f"{actor}.use_dynamic_bsz"):
        return
    rows = int(mini) * read.group_size // int(gpus)
    if int(micro) > rows:
        yield (
            f"{actor}.ppo_micro_batch_size_per_gpu={micro}, and an optimizer step has {rows} rows per device "
            f"({actor}.ppo_mini_batch_size={mini} prompts of {read.group_size} rollouts over {gpus}): verl ends at its "
            f"first update. Make it {rows} or a divisor of that."
        )
