"""What verl itself would refuse while it builds a run, or accept and never read. The doctor tells it before.

Names are read from verl's source. With external modules of the user's, which may register more, they are not looked at.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, did_you_mean, shortened, shown
from rl_plugins.verl.capabilities import ACTOR, MAX_VERSIONS, ROLLOUT, Reader
from rl_plugins.verl.cpu import ROLLOUT as CPU_ROLLOUT

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
    for rule in (_old_keys, _unknown_names, _too_few_rows, _apart, _buffer, _pools):
        yield from rule(read, folder)


def refuse(read: Reader) -> None:
    """Raises ConfigError, before Ray starts, for what verl would refuse after it, and for old keys."""
    if told := [text for rule in (_old_keys, _apart, _buffer, _pools) for text in rule(read, Path())]:
        raise ConfigError("\n".join(told))


def refuse_old_keys(read: Reader) -> None:
    """Raises ConfigError for keys that are given and never read: training, or an audit, would use another reward."""
    if told := list(_old_keys(read, Path())):
        raise ConfigError("\n".join(told))


def check_of_verl(config: Any) -> str:
    """What verl's own check says against a config, as it does before it starts Ray; empty if it says nothing. Imports
    verl, which takes some seconds."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from verl.trainer.ppo.utils import need_reference_policy
            from verl.utils.config import validate_config
        except Exception as e:
            return f"verl cannot be imported: {type(e).__name__}: {shortened(e)}."
        config = copy.deepcopy(config)
        try:  # without our plugin's check in front of it, and without a critic, for which verl reads the model
            inspect.unwrap(validate_config)(config, need_reference_policy(config), use_critic=False)
        except ImportError:  # a rollout engine that is not on this machine
            return ""
        except Exception as e:
            text = shortened(e.__cause__ or e, 500)
            return f"verl refuses this config: {text}{'' if text.endswith('.') else '.'}"
    return ""


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
        f"{ROLLOUT}.name": (folder / "workers/rollout/base.py", r'^    \("([^"]+)", "async"\): "'),
    }
    on_cpu = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
    if read("reward.reward_manager.source") == "importlib":
        del looks["reward.reward_manager.name"]
    for key, (place, pattern) in looks.items():
        given, known = read(key), _found(place, pattern)
        if key == f"{ROLLOUT}.name" and given == CPU_ROLLOUT:
            if not on_cpu:
                yield f"{key}={given} needs VERL_PLATFORM=cpu in the environment (docs/verl_cpu.md). Set it."
            continue
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
    micro, mini = read(f"{ACTOR}.ppo_micro_batch_size_per_gpu"), read(f"{ACTOR}.ppo_mini_batch_size")
    gpus = read("trainer.nnodes", 1) * read("trainer.n_gpus_per_node", 1)
    if micro is None or mini is None or not gpus or read(f"{ACTOR}.use_dynamic_bsz"):
        return
    rows = int(mini) * read.group_size // int(gpus)
    if int(micro) > rows:
        yield (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro}, and an optimizer step has {rows} rows per device "
            f"({ACTOR}.ppo_mini_batch_size={mini} prompts of {read.group_size} rollouts over {gpus}): verl ends at its "
            f"first update. Make it {rows} or a divisor of that."
        )


def _v1(read: Reader) -> bool:
    return read("trainer.use_v1", True) is not False


def _apart(read: Reader, folder: Path) -> Iterator[str]:
    """What verl's trainer asserts where rollouts have devices of their own."""
    if not _v1(read) or read.mode != "separate_async":
        return
    step, batch = "trainer.v1.separate_async.parameter_sync_step", read("data.train_batch_size")
    steps, mini = read(step, 1), read(f"{ACTOR}.ppo_mini_batch_size")
    if None not in (batch, mini) and batch != steps * mini:
        fits = f"{step}={batch // mini}" if mini and batch % mini == 0 else f"data.train_batch_size={steps * mini}"
        yield (
            f"data.train_batch_size={batch}: in separate_async it must be {step} times {ACTOR}.ppo_mini_batch_size. "
            f"These are {steps} and {mini}. Set {fits}."
        )
    for name in ("nnodes", "n_gpus_per_node"):
        if not (given := read(f"{ROLLOUT}.{name}", 0)) > 0:
            yield (
                f"{ROLLOUT}.{name}={given}: in separate_async rollouts have devices of their own. Set it to 1 or more."
            )
    if read(f"{ROLLOUT}.checkpoint_engine.backend") == "naive":
        yield (
            f"{ROLLOUT}.checkpoint_engine.backend=naive: in separate_async weights go to other devices. Set it to nccl "
            f"or another of verl's backends (without a GPU: cpu_file)."
        )
    model = "reward.reward_model"
    if read(f"{model}.enable", False) and not read(f"{model}.enable_resource_pool", False):
        yield f"{model}.enable_resource_pool=False: in separate_async a reward model has devices of its own. Set True."
    switch = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    if read(switch, False) and read(f"{ROLLOUT}.disaggregation.enabled", False):
        yield f"{switch}=True cannot be combined with {ROLLOUT}.disaggregation.enabled=True. Set one of them to False."


def _buffer(read: Reader, folder: Path) -> Iterator[str]:
    """What verl's replay buffer asserts."""
    if not _v1(read) or read("trainer.v1.sampler.custom_sampler.path"):
        return
    most = read(MAX_VERSIONS)
    if most is not None and not (isinstance(most, int) and most > 0):
        yield f"{MAX_VERSIONS}={shown(most)} is given. It must be a whole number of 1 or more, or null for no limit."
    strategy, ways = read("trainer.v1.sampler.max_off_policy_strategy", "drop"), ("drop", "wait")
    if strategy not in ways:
        yield f"trainer.v1.sampler.max_off_policy_strategy={shown(strategy)} is given. It must be {' or '.join(ways)}."
    if read("algorithm.filter_groups.enable", False) and not read("algorithm.filter_groups.metric"):
        yield "algorithm.filter_groups.enable=True needs algorithm.filter_groups.metric, for example acc. Set it."
    batch, fetched = read("data.train_batch_size"), read("data.gen_batch_size")
    if batch and fetched and batch % fetched:
        yield f"data.gen_batch_size={fetched} must divide data.train_batch_size={batch}. Set it to a divisor."


def _pools(read: Reader, folder: Path) -> Iterator[str]:
    """Models on devices of their own that have no device."""
    for model, on in (("reward.reward_model", "enable_resource_pool"), ("distillation", "enabled")):
        for name in ("nnodes", "n_gpus_per_node"):
            if read(f"{model}.{on}", False) and not read(f"{model}.{name}", 0) > 0:
                yield f"{model}.{on}=True, and {model}.{name} is {read(f'{model}.{name}', 0)}. Set it to 1 or more."
