"""The `verl.plugins` entry point, loaded at the end of `import verl` in every process of a run.

It only places actions that run when their module of verl is imported (0.1 ms, any order of plugins); changes.py lists
what they change. In the driver the config is checked before Ray starts; trainers are registered next to verl's own; on
machines without an accelerator (VERL_PLATFORM=cpu) the CPU platform is registered.

verl reports a plugin that fails at DEBUG level only. So a failure is printed here, and a run that names methods then
ends before Ray starts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_plugins.verl import METHODS_VARIABLE, TEACHER_VARIABLE
from rl_plugins.verl.imports import after_import

CONFIG, TRAINER_BASE = "verl.utils.config", "verl.trainer.ppo.v1.trainer_base"
TRAINERS, MONKEY_PATCH = "verl.trainer.ppo.v1", "verl.models.transformers.monkey_patch"
TRAINING_WORKERS = "verl.workers.engine_workers"
AGENT_LOOP = "verl.experimental.agent_loop.single_turn_agent_loop"


def load() -> None:
    """Places everything; a second time is nothing."""
    on_cpu = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
    try:
        if on_cpu:
            from rl_plugins.verl.cpu.activate import activate

            activate()
        after_import(CONFIG, _guard_config)
        after_import(TRAINER_BASE, _guard_trainer)
        after_import(TRAINERS, _register_trainers)
        after_import(AGENT_LOOP, _register_agent_loop)
        if on_cpu or os.environ.get(METHODS_VARIABLE):
            after_import(MONKEY_PATCH, without_value_head)
        if os.environ.get(TEACHER_VARIABLE):
            after_import(TRAINING_WORKERS, teacher_as_reference)
    except Exception as e:
        if not _verl_reports_plugins():
            print(f"[rl-plugins] the verl plugin could not be loaded in process {os.getpid()}:", file=sys.stderr)
            traceback.print_exc()
        after_import(CONFIG, functools.partial(_refuse_methods, why=f"{type(e).__name__}: {e}"))
        raise


def _verl_reports_plugins() -> bool:
    """Seam V6: verl itself warns of a plugin that fails. Stock, it writes a line at DEBUG level."""
    file = getattr(sys.modules.get("verl"), "__file__", None)
    return bool(file) and '.debug("Failed to load plugin' not in Path(str(file)).read_text(encoding="utf-8")


def _before(owner: Any, name: str, first: Callable[..., None]) -> None:
    """Wraps a function: `first` sees the same arguments before it, and what it raises is raised."""
    host = getattr(owner, name)

    @functools.wraps(host)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return host(*args, **kwargs)

    setattr(owner, name, wrapped)


def _guard_config(module: ModuleType) -> None:
    """`validate_config` is what every entry point of verl calls before it starts Ray."""

    def check(config: Any, *args: Any, **kwargs: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        from rl_plugins.core.errors import RLPluginsError
        from rl_plugins.verl import start

        try:
            start.prepare(config)
        except RLPluginsError as e:
            if not HydraConfig.initialized():
                raise
            sys.exit(f"rl-plugins: {e}")  # of a command: hydra would print a traceback above it

    _before(module, "validate_config", check)


def _guard_trainer(module: ModuleType) -> None:
    """Programs that build a trainer themselves are checked, too: methods named under a trainer of verl do nothing.
    Trainers of ours have prepared the methods before they get here."""

    def check(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        from rl_plugins.verl import start

        if not start.serves_methods(type(self)):
            start.prepare(config, type(self))

    _before(module.PPOTrainer, "__init__", check)


def _register_trainers(module: ModuleType) -> None:
    importlib.import_module("rl_plugins.verl.trainer")


def _register_agent_loop(module: ModuleType) -> None:
    importlib.import_module("rl_plugins.verl.agent_loop")


def _refuse_methods(module: ModuleType, why: str) -> None:
    def check(config: Any, *args: Any, **kwargs: Any) -> None:
        if config.get("rl_plugins") is not None:
            raise RuntimeError(
                f"The config names methods of rl-plugins, whose verl plugin could not be loaded ({why}); its traceback "
                f"was printed when verl was imported."
            )

    _before(module, "validate_config", check)


def teacher_as_reference(module: Any) -> None:
    """The reference worker loads the model of a teacher: verl has one model beside the policy, and it is the policy's
    first weights."""
    made = module.ActorRolloutRefWorker.ref_worker_cls

    def make(config: Any) -> Any:
        replace, teacher = dataclasses.replace, os.environ[TEACHER_VARIABLE]
        model = replace(config.model_config, path=teacher, hf_config_path=teacher)
        return made(config=replace(config, model_config=model))

    module.ActorRolloutRefWorker.ref_worker_cls = staticmethod(make)


def without_value_head(module: Any) -> None:
    """verl 0.9.1 asks an installed TRL for its value-head class in every model build, and TRL 1.16 has none any more.

    Then verl is told that TRL is not there, as far as this module is concerned (verl/models/transformers/
    monkey_patch.py:352). The twin is patches/verl/V3. The files are looked at, because importing TRL costs seconds.
    """
    if not hasattr(module, "is_trl_available") or trl_has_value_head():
        return
    available = module.is_trl_available
    module.is_trl_available = lambda *args, **kwargs: available(*args, **kwargs) and trl_has_value_head()


def trl_has_value_head() -> bool:
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0])
    return (folder / "experimental" / "ppo").is_dir() or "AutoModelForCausalLMWithValueHead" in (
        folder / "__init__.py"
    ).read_text(encoding="utf-8")


load()
