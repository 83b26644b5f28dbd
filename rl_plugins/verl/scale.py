"""`rl-plugins scale` for verl: larger batches, the same mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_plugins.core.errors import ConfigError, shortened, shown
from rl_plugins.runtime.scaling import Scaled, Setting, check_divisible, fewer, whole
from rl_plugins.verl.capabilities import Reader
from rl_plugins.verl.config import MODES, compose

BATCH = "data.train_batch_size"
ACTOR = "actor_rollout_ref.actor"
MINI = f"{ACTOR}.ppo_mini_batch_size"
SYNC = "trainer.v1.separate_async.parameter_sync_step"
KEPT = (MINI, f"{ACTOR}.ppo_epochs", f"{ACTOR}.optim.lr", f"{ACTOR}.clip_ratio", "actor_rollout_ref.rollout.n")
# verl's global steps, each of which takes one batch; -1 and 0 switch an interval off.
COUNTERS = {
    "trainer.total_training_steps": "length of the run",
    "trainer.save_freq": "interval of checkpoints",
    "trainer.test_freq": "interval of validation",
    "trainer.critic_warmup": "warm-up of the critic",
}
# Steps of the learning-rate schedule, which verl moves once per batch it updates on.
SCHEDULE = ("lr_warmup_steps", "lr_decay_steps", "lr_wsd_decay_steps")


def config_of(values: Mapping[str, Any]) -> Any:
    """verl's config with nested values of a YAML file on top of its defaults.

    Raises:
        ConfigError: a key that verl does not have, or a `defaults` list of another config.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    own = {k: v for k, v in values.items() if k not in ("defaults", "rl_plugins", "hydra")}
    parents = values.get("defaults", [])
    if any(p not in ("ppo_trainer", "_self_") for p in parents):
        raise ConfigError(
            f"`defaults` of the config is {shown(parents)}. Only [ppo_trainer, _self_] can be read from a file. Give "
            f"the run as overrides: rl-plugins scale --host verl --by 4 -- model_engine=megatron OVERRIDES"
        )
    base = compose([])
    OmegaConf.set_struct(base, True)
    try:
        config = OmegaConf.merge(base, own)
    except (OmegaConfBaseException, ValueError, TypeError) as e:
        raise ConfigError(f"The config is none of verl's: {shortened(e, 300)}. Correct or remove the key.") from None
    OmegaConf.set_struct(config, False)
    return OmegaConf.merge(config, {k: v for k, v in values.items() if k == "rl_plugins"})


def scaled(config: Any, by: int) -> Scaled:
    """What a config of verl needs for `by` times the prompts per batch.

    Args:
        config: the whole config, composed.

    Raises:
        ConfigError: a number is missing, the trainer mode is unknown, or the larger batch is no whole number of
            mini-batches.
    """
    read = Reader(config)
    if read.mode not in MODES.values():
        raise ConfigError(
            f"trainer.v1.trainer_mode is {shown(read.mode)}. Known are {', '.join([*MODES.values(), *MODES])}, because "
            f"another trainer may count its batches in another way. Scale its config by hand."
        )
    prompts, mini, n = whole(BATCH, read(BATCH)), whole(MINI, read(MINI)), read.group_size
    epochs = whole(f"{ACTOR}.ppo_epochs", read(f"{ACTOR}.ppo_epochs", 1))
    settings = [Setting(BATCH, prompts, prompts * by, f"prompts per batch; {n} rollouts each, as before")]
    separate = read.mode == "separate_async"
    if separate:
        sync = whole(SYNC, read(SYNC))
        if prompts != sync * mini:
            raise ConfigError(
                f"{BATCH} is {prompts}, {SYNC} is {sync} and {MINI} is {mini}. verl's separate_async takes only "
                f"{BATCH} = {SYNC} x {MINI}. Correct one of them first."
            )
        why = f"verl demands {BATCH} = parameter_sync_step x ppo_mini_batch_size"
        settings.append(Setting(SYNC, sync, sync * by, why))
    else:
        check_divisible(prompts, mini, by, f"{BATCH} is {prompts} and {MINI} is {mini}")
        settings += _schedule(read, by)
    for option, what in COUNTERS.items():
        value = read(option)
        if value is not None and value > 0:
            settings.append(fewer(option, whole(option, value), by, what))
    before = prompts // mini * epochs if prompts % mini == 0 else prompts / mini * epochs
    batch = (
        f"A batch has {prompts * by} prompts (before: {prompts}), {prompts * by * n} rows, and takes "
        f"{before * by:g} optimizer steps (before: {before:g}) of {mini * n} rows each."
    )
    changed = tuple(s for s in settings if s.before != s.after)
    return Scaled(changed, {k: read(k) for k in KEPT}, batch, tuple(_notes(read, by, before)) if by > 1 else ())


def _schedule(read: Reader, by: int) -> Iterator[Setting]:
    """In separate_async the schedule moves with every mini-batch, which has as many samples as before."""
    for owner in (ACTOR, "critic"):
        for name in SCHEDULE:
            option = f"{owner}.optim.{name}"
            value = read(option)
            if value is not None and value > 0:
                yield fewer(option, whole(option, value), by, "learning-rate schedule")


def _notes(read: Reader, by: int, before: float) -> Iterator[str]:
    optim = f"{ACTOR}.optim"
    if read.mode == "separate_async":
        yield (
            "verl moves its learning-rate schedule with every mini-batch, which has as many samples as before: the "
            "schedule is not changed. Weights are published after "
            f"{by} times the samples, so a version of staleness is {by} times as many samples."
        )
    elif read(f"{optim}.lr_scheduler_type", "constant") != "constant" or _warmup(read):
        yield (
            f"verl moves its learning-rate schedule once per batch: the rate now stays the same for {before * by:g} "
            f"optimizer steps."
        )
        if _warmup(read):
            yield f"verl's warm-up begins at learning rate 0: the first batch, now {by} times as large, trains at it."
    yield (
        "verl leaves out the last prompts of an epoch that fill no batch; trainer.total_epochs is not changed, and the "
        "dataset must hold at least one batch."
    )
    if read("global_profiler.steps"):
        yield "global_profiler.steps lists batches and is not changed."
    methods = read("rl_plugins.methods")
    if methods:
        yield (
            f"Parameters of {', '.join(methods)} are not changed. Those that count batches count {by} times the "
            f"samples now: `rl-plugins info METHOD`."
        )


def _warmup(read: Reader) -> bool:
    optim = f"{ACTOR}.optim"
    return bool(read(f"{optim}.lr_warmup_steps", 0) > 0 or read(f"{optim}.lr_warmup_steps_ratio", 0) > 0)
