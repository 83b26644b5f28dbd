"""What a comparison runs: variants (a baseline or a stack of methods) times seeds, each a directory of its own."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rl_plugins import __version__
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text
from rl_plugins.runtime import registry

LOG_VARIABLE = "RL_PLUGINS_LOG_FILE"
CONFIG = "config.yaml"  # of a run, in its folder


@dataclass(frozen=True)
class Variant:
    """One side of the comparison.

    Args:
        label: as the user wrote it, e.g. "grpo", "mc_grpo", "vade+mc_grpo".
        methods: names in order; empty for the baseline.
        options: of the host, in this variant only, e.g. ("--reward_weights", "0.01", "1"); they win over the config.
    """

    label: str
    methods: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """One training run of a variant with one seed."""

    variant: Variant
    seed: int
    folder: Path
    worker: str  # see Host
    arguments: tuple[str, ...]
    config: str  # text of the config that the arguments name, as it was when the run was planned

    launcher: tuple[str, ...] = ()  # command before the module, e.g. ("accelerate", "launch")

    @property
    def log_file(self) -> Path:
        return self.folder / "log.jsonl"

    def _parts(self) -> dict[str, Any]:
        """What the run is known by. The code of methods of other packages is part of it, files that the config names
        (data, rewards, models) are not."""
        classes = registry.select(list(self.variant.methods)).classes.values()
        others = {inspect.getfile(cls) for cls in classes if not cls.__module__.startswith("rl_plugins.")}
        code = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(others)]
        return {
            "arguments": self.arguments,
            "config": self.config,
            "launcher": self.launcher,
            "version of rl-plugins": __version__,
            "code of methods of other packages": code,
        }

    @property
    def identity(self) -> dict[str, str]:
        """Each part of what the run is known by, as a hash."""
        return {name: _hash(part) for name, part in self._parts().items()}

    @property
    def fingerprint(self) -> str:
        """Tells whether a finished run in the folder is this one."""
        *parts, code = self._parts().values()
        return _hash([*parts, *code])

    def write_config(self) -> None:
        """The config as a file of the run's folder, so that the user's own can change while others run."""
        if self.config:
            write_text(self.folder / CONFIG, self.config)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class Host(Protocol):
    """A trainer that runs are made with.

    Attributes:
        worker: module that trains with the arguments of its command line. It writes what the trainer logs to the file
            named by RL_PLUGINS_LOG_FILE, as lines of JSON with "step", "max_steps" (None: not known), "seconds" of
            training so far, and values by name, with the totals of :mod:`rl_plugins.lab.compare.costs`. Ended by
            SIGTERM it ends all of its processes.
        config: text that becomes `config.yaml` in the folder of every run; empty: the arguments are everything.
        sets: what `arguments` replaces or adds in the user's run, for the report.
    """

    @property
    def worker(self) -> str: ...

    @property
    def config(self) -> str: ...

    @property
    def sets(self) -> str: ...

    def arguments(
        self, variant: Variant, seed: int, folder: Path, params: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Arguments of a run: the user's, with the variant's methods, the seed and a folder of its own instead.

        Args:
            params: of the variant's methods.
        """
        ...


@dataclass(frozen=True)
class Comparison:
    """All runs.

    Args:
        variants: the baseline first.
        seeds: the same for every variant, so that differences can be paired.
        runs: in the order they start: all variants of a seed, then the next seed.
        out: the folder of the results.
        notes: lines for the report (what the budget is, what to mind).
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    out: Path
    notes: tuple[str, ...] = field(default=())


def parse_variants(methods: Sequence[str], baseline: str) -> tuple[Variant, ...]:
    """Variants from the command line: "vade+mc_grpo" is one variant with two methods; "grpo" is the host alone.

    Raises:
        ConfigError: an unknown method, or the same variant twice.
    """
    variants = []
    for text in [baseline, *methods]:
        names = [] if text in registry.BASELINES else [n for n in text.split("+") if n]
        if not names and text not in registry.BASELINES:
            raise ConfigError(
                f"The variant {text!r} names no method. Write mc_grpo, or vade+mc_grpo for both in one variant."
            )
        registry.select(names)
        variants.append(Variant(text, tuple(names)))
    labels = [a.label for a in variants]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"The variants {', '.join(labels)} name one twice; name every variant once.")
    return tuple(variants)


def make_plan(
    host: Host,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    out: Path,
    method_params: Mapping[str, Mapping[str, Any]] | None = None,
    notes: Sequence[str] = (),
    launcher: Sequence[str] = (),
) -> Comparison:
    """The runs of every variant with every seed.

    Raises:
        ConfigError: parameters for a method that no variant names, or that do not fit the method.
    """
    params = {k: dict(v) for k, v in (method_params or {}).items()}
    parts = {variant.label: tuple(registry.select(variant.methods).classes) for variant in variants}  # of bundles, too
    idle = set(params) - {n for names in parts.values() for n in names}
    if idle:
        raise ConfigError(f"Parameters are given for {', '.join(sorted(idle))}, which no variant names. Remove them.")
    runs = []
    for seed in seeds:
        for variant in variants:
            folder = out / "runs" / f"{variant.label}-seed{seed}"
            mine = {n: params[n] for n in parts[variant.label] if n in params}
            registry.select(variant.methods, mine)
            arguments = tuple(host.arguments(variant, seed, folder, mine))
            runs.append(PlannedRun(variant, seed, folder, host.worker, arguments, host.config, tuple(launcher)))
    return Comparison(tuple(variants), tuple(seeds), tuple(runs), out, tuple(notes))
