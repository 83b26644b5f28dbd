"""`rl-plugins doctor` and the dry run of `rl-plugins trl grpo`: what is installed, and methods without a run.

What would happen in a run is in the adapters: `rl_plugins.trl.commands.doctor` and `rl_plugins.verl.doctor`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.commands.shared.options import HostName, MethodParams, OfRun, WorldSize
from rl_plugins.core.errors import ConfigError, pip_command, shown

HOSTS = ("trl", "verl")
SHOWN = ("torch", "transformers", "trl", "peft", "verl", "vllm")


def doctor(
    host: OfRun = HostName.trl,
    config: Annotated[Path | None, typer.Option(help="YAML config of a run of `trl grpo`.")] = None,
    script: Annotated[Path | None, typer.Option(help="Script that trains with TRL; it is run up to `train()`.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Names of the methods: a b, or a,b.")] = None,
    method_params: MethodParams = None,
    world_size: WorldSize = None,
    words: Annotated[  # also the rest of --methods a b
        list[str] | None,
        typer.Argument(
            metavar="[-- WORDS...]", help="Overrides of verl's command line, with --host verl; arguments of the script."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the problems, and the lines of the report.")
    ] = False,
) -> None:
    """Show versions, plugins, and what a run would do.

    Nothing is trained. The exit status is 1 if something cannot take effect, with a list of all problems.

    \b
    A run of TRL:
      rl-plugins doctor --config run.yaml --methods vade minpro

    \b
    A script of TRL, by the trainer it makes:
      rl-plugins doctor --script mine.py -- --learning_rate 1e-6

    \b
    A run of verl, by its overrides or by the whole command:
      rl-plugins doctor --host verl -- trainer.v1.trainer_mode=rl_plugins_sync "+rl_plugins.methods=[vade]" ...
      rl-plugins doctor --host verl -- python -m verl.trainer.main_ppo data.train_batch_size=64 ...
    """
    if host == HostName.verl and (config or script or methods or method_params or world_size):
        raise ConfigError(
            "--config, --script, --methods, --method-params and --world-size are for TRL. Give a run of verl by "
            'its overrides: rl-plugins doctor --host verl -- "+rl_plugins.methods=[vade]" trainer.nnodes=2 ...'
        )
    if script is not None and (config or methods or method_params or world_size):
        raise ConfigError(
            "--script is given beside --config, --methods, --method-params or --world-size. The script has these, and "
            "the doctor runs it in one process; remove them, or give what it takes: rl-plugins doctor --script mine.py "
            "-- ITS ARGUMENTS"
        )
    for word in [*(methods or []), *(words or [])] if script is None and host == HostName.trl else ():
        option = {".py": "--script", ".yaml": "--config", ".yml": "--config"}.get(Path(word).suffix)
        if option is not None:
            raise ConfigError(
                f"{shown(word)} is a file, and what is given here are names of methods. Write: rl-plugins doctor "
                f"{option} {word}"
            )
    from rl_plugins.runtime.report import print_problems, without_tests

    print("Loading the host and looking at the run; this takes a while.", file=sys.stderr)
    packages: Sequence[str] = SHOWN
    with contextlib.redirect_stdout(io.StringIO()) if as_json else contextlib.nullcontext() as report:
        if host == HostName.verl:
            from rl_plugins.verl import doctor as verl_doctor

            packages = verl_doctor.SHOWN
            problems = verl_doctor.examine(words or [], print_found)
        elif script is not None:
            problems = examine_script(script, words or [])
        else:
            problems = examine(config, [*(methods or []), *(words or [])], method_params, world_size)
    if report is None:
        raise typer.Exit(print_problems(problems, packages))
    told = {"problems": problems, "untested": without_tests(packages), "report": report.getvalue().splitlines()}
    typer.echo(json.dumps(told, indent=2))
    raise typer.Exit(int(bool(problems)))


def examine(
    config: Path | None, methods: Sequence[str], method_params: str | None, world_size: int | None
) -> list[str]:
    """Prints the state of the installation, and of a run if a config or methods are given.

    Returns:
        What would fail.
    """
    problems = [*_print_installation(brief=config is not None or bool(methods))]
    if config is not None:
        argv = ["--config", str(config)]
        argv += ["--methods", ",".join(methods)] if methods else []
        argv += ["--method_params", method_params] if method_params else []
        problems += _print_run(argv, world_size, _masked(config, methods), may_be_of_script=True)
    elif methods or method_params:
        problems += _print_methods(methods, method_params)
    return problems


def examine_script(script: Path, words: Sequence[str]) -> list[str]:
    """Prints the state of the installation, and what the trainer of a script would do.

    Returns:
        What would fail.
    """
    from rl_plugins.trl.commands.doctor import print_script

    return [*_print_installation(brief=True), *print_script(script, words)]


def dry_run(argv: Sequence[str], masked: bool = False) -> int:
    """Prints what `rl-plugins trl grpo` (or `masked_grpo`) with these arguments would do.

    Returns:
        1 if something would fail, else 0.
    """
    from rl_plugins.runtime.report import print_problems

    return print_problems(_print_run(argv, None, masked), SHOWN)


def _print_run(argv: Sequence[str], world_size: int | None, masked: bool, may_be_of_script: bool = False) -> list[str]:
    from rl_plugins.trl.commands.doctor import print_run

    return print_run(argv, world_size, masked, may_be_of_script)


def _masked(config: Path, methods: Sequence[str]) -> bool:
    """Whether the config or a method has an option of the trainer of masked diffusion models. A config or a name that
    cannot be read is told of later."""
    from rl_plugins.cards.usage import needs_masked
    from rl_plugins.kit.masked import MASKED_OPTIONS
    from rl_plugins.runtime.config_text import read_yaml
    from rl_plugins.runtime.registry import parse_methods

    try:
        values = read_yaml(config, f"The config {config}") or {}
        named = parse_methods(list(methods) or values.get("methods"))
        return bool(MASKED_OPTIONS & set(values)) or needs_masked([n for n in named if not n.startswith("-")])
    except (ConfigError, AttributeError, TypeError):
        return False


# ---- the installation


def _print_installation(brief: bool) -> Iterator[str]:
    """
    Args:
        brief: only what bears on a run, because a report of it follows.
    """
    from rl_plugins.runtime.report import VARIABLES, print_environment, print_versions
    from rl_plugins.runtime.tested import ALLOW_VARIABLE

    states = print_versions(SHOWN, brief)
    tried = ("not allowed",) if os.environ.get(ALLOW_VARIABLE) else ()
    usable = [host for host in HOSTS if states[host][1].startswith(("ok", *tried))]
    if not usable:
        yield (
            f"no host in a version that is allowed is installed: {', '.join(f'{h} is {states[h][1]}' for h in HOSTS)}. "
            f"Install one, for example TRL: {pip_command('trl')}"
        )
    if "trl" in usable:
        from rl_plugins.trl.compat import closed_parts, moved_symbols, seams

        moved = moved_symbols()
        if moved or not brief:
            print(f"  what the adapter uses of TRL: {'as expected' if not moved else '; '.join(moved)}")
        for part, why in closed_parts().items():
            print(f"  not with this installation, {part}: {why}")
        if moved:
            yield f"TRL moved what rl-plugins builds on: {'; '.join(moved)}."
        if not brief:
            print("\nOptional changes of TRL, nothing to do (patches/README.md)")
        for what, there in seams().items() if not brief else ():
            print(f"  {'there' if there else 'not there':<11}{what}")

    print_environment(VARIABLES, brief)
    print_found(brief)


def print_found(brief: bool) -> None:
    """How many methods there are, and which cannot be used; in brief only these."""
    from rl_plugins.cards.catalog import entries

    found = entries()
    good = [e for e in found if not e.problem]
    foreign = sorted({e.distribution for e in good} - {"rl-plugins"})
    if not brief:
        print(
            f"\nMethods\n  {len(good)} found{', some from ' + ', '.join(foreign) if foreign else ''} (rl-plugins list)"
        )
    for e in found:
        if e.problem:
            print(f"  method that cannot be used: {e.name}: {e.problem}")


# ---- methods without a run


def _print_methods(methods: Sequence[str], method_params: str | None) -> list[str]:
    from rl_plugins.core.method import SIGNALS
    from rl_plugins.runtime import preflight
    from rl_plugins.runtime.stack import build_stack

    stack = build_stack(methods, method_params, refuse=False)
    if stack.problems:
        return stack.problems
    print(f"\n{preflight.render_table(stack, {})}")
    for m in stack.methods:
        needs = [SIGNALS.get(s, s) for s in sorted(m.needs)]
        if needs:
            print(f"  {m.name} needs: {'; '.join(needs)}")
        for host, options in m.host_options.items():
            print(f"  {m.name} sets in {host}: {', '.join(f'{k}={v!r}' for k, v in options.items())}")
    print("  With --config run.yaml the needs are checked and the batch plan is shown.")
    return []
