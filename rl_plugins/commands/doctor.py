"""`rl-plugins doctor` and the dry run of `rl-plugins trl grpo`: what is installed, and methods without a run.

What would happen in a run is in the adapters: `rl_plugins.trl.commands.doctor` and `rl_plugins.verl.doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_plugins.cards.catalog import entries
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import SIGNALS
from rl_plugins.kit.masked import MASKED_OPTIONS
from rl_plugins.lab.demo.masked import needed
from rl_plugins.runtime import preflight
from rl_plugins.runtime.config_text import read_yaml
from rl_plugins.runtime.registry import parse_methods
from rl_plugins.runtime.report import VARIABLES, print_environment, print_problems, print_versions
from rl_plugins.runtime.stack import build_stack

HOSTS = ("trl", "verl")
SHOWN = ("torch", "transformers", "trl", "peft", "verl", "vllm")


# ---- the two commands


def examine(config: Path | None, methods: Sequence[str], method_params: str | None, world_size: int | None) -> int:
    """Prints the state of the installation, and of a run if a config or methods are given.

    Returns:
        1 if something would fail, else 0.
    """
    problems = [*_print_installation()]
    if config is not None:
        argv = ["--config", str(config)]
        argv += ["--methods", ",".join(methods)] if methods else []
        argv += ["--method_params", method_params] if method_params else []
        problems += _print_run(argv, world_size, _masked(config, methods))
    elif methods or method_params:
        problems += _print_methods(methods, method_params)
    return print_problems(problems, SHOWN)


def dry_run(argv: Sequence[str], masked: bool = False) -> int:
    """Prints what `rl-plugins trl grpo` (or `masked_grpo`) with these arguments would do.

    Returns:
        1 if something would fail, else 0.
    """
    return print_problems(_print_run(argv, None, masked), SHOWN)


def _print_run(argv: Sequence[str], world_size: int | None, masked: bool) -> list[str]:
    from rl_plugins.trl.commands.doctor import print_run

    return print_run(argv, world_size, masked)


def _masked(config: Path, methods: Sequence[str]) -> bool:
    """Whether the config or a method has an option of the trainer of masked diffusion models. A config or a name that
    cannot be read is told of later."""
    try:
        values = read_yaml(config, f"The config {config}") or {}
        named = parse_methods(list(methods) or values.get("methods"))
        return bool(MASKED_OPTIONS & set(values)) or needed([n for n in named if not n.startswith("-")])
    except (ConfigError, AttributeError, TypeError):
        return False


# ---- the installation


def _print_installation() -> Iterator[str]:
    states = print_versions(SHOWN)
    usable = [host for host in HOSTS if states[host][1].startswith("ok")]
    if not usable:
        yield (
            f"no host in a tested version is installed: {', '.join(f'{h} is {states[h][1]}' for h in HOSTS)}. Install "
            f"one, e.g. pip install 'rl-plugins[trl]'."
        )
    if "trl" in usable:
        from rl_plugins.trl.compat import moved_symbols

        moved = moved_symbols()
        print(f"  what the adapter uses of TRL: {'as expected' if not moved else '; '.join(moved)}")
        if moved:
            yield f"TRL moved what rl-plugins builds on: {'; '.join(moved)}."

    print_environment(VARIABLES)
    print_found()


def print_found() -> None:
    """How many methods there are, and which cannot be used."""
    found = entries()
    good = [e for e in found if not e.problem]
    foreign = sorted({e.distribution for e in good} - {"rl-plugins"})
    print(f"\nMethods\n  {len(good)} found{', some from ' + ', '.join(foreign) if foreign else ''} (rl-plugins list)")
    for e in found:
        if e.problem:
            print(f"  cannot be used: {e.name}: {e.problem}")


# ---- methods without a run


def _print_methods(methods: Sequence[str], method_params: str | None) -> list[str]:
    try:
        stack = build_stack(methods, method_params)
    except ConfigError as e:
        return [str(e)]
    print(f"\n{preflight.render_table(stack, {})}")
    for m in stack.methods:
        needs = [SIGNALS.get(s, s) for s in sorted(m.needs)]
        if needs:
            print(f"  {m.name} needs: {'; '.join(needs)}")
        for host, options in m.host_options.items():
            print(f"  {m.name} sets in {host}: {', '.join(f'{k}={v!r}' for k, v in options.items())}")
    print("  With --config run.yaml the needs are checked and the batch plan is shown.")
    return []
