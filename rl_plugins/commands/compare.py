"""`rl-plugins compare`: methods and a baseline on the user's own run. `run` is what it shares with the demo."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from rl_plugins.commands.attribute import Cube, write
from rl_plugins.core.errors import ConfigError
from rl_plugins.kit.masked import MASKED_OPTIONS
from rl_plugins.lab.compare import costs, report
from rl_plugins.lab.compare.plan import Comparison, Variant, make_plan, parse_variants
from rl_plugins.lab.compare.runs import is_finished, run_all
from rl_plugins.lab.compare.trl import Trl
from rl_plugins.lab.demo.masked import needed
from rl_plugins.runtime.config_text import read_yaml
from rl_plugins.runtime.registry import parse_method_params, parse_methods, select


def parse_seeds(text: str) -> list[int]:
    """ "3" is the seeds 0, 1, 2; "4,7" are these two."""
    try:
        seeds = [int(s) for s in text.split(",")] if "," in text else list(range(int(text)))
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds is {text!r}; give a number of seeds (3) or different seeds (4,7,11).")
    return seeds


def compare(
    words: Sequence[str],
    baseline: str,
    seeds: str,
    out: Path,
    jobs: int,
    metrics: Sequence[str],
    launcher: str,
    method_params: str | None,
    cost_unit: str,
    dry_run: bool,
    attribute: bool = False,
    pairs: int | None = None,
) -> None:
    """Trains every variant with every seed on the user's own config of TRL and writes figures and a report.

    Args:
        attribute: the variants are subsets of the methods, and the report says which method brought what. Without named
            methods they are those of the config.
        pairs: of orders of the methods whose subsets are the variants; none: all subsets.
        words: the YAML file, methods, and options of `trl grpo`.
    """
    need_plots()
    config = Path(words[0])
    if not config.is_file():
        raise ConfigError(f"There is no config {config}. Give the YAML file you run `trl grpo` with.")
    methods, extra = _split(words[1:], r"-.*")
    values = read_yaml(config, f"The config {config}") or {}
    if attribute:
        methods = methods or parse_methods(values.get("methods"))
    cube = _cube(methods, attribute, pairs)
    variants = parse_variants(cube.variants if cube else _named(methods), baseline)
    held_out = _option("eval_strategy", values, extra) not in ("no", False, None)  # YAML reads a bare no as false
    host = Trl(config.read_text(), tuple(extra), _masked(variants, values, extra))
    notes = _notes(variants, host.sets, held_out, "eval_strategy and a test split") + timing_notes(cost_unit, jobs)
    params = _params(variants, parse_method_params(values.get("method_params")), method_params)
    if cube:
        cube.check(baseline, params)
    comparison = make_plan(host, variants, parse_seeds(seeds), out, params, notes, shlex.split(launcher))
    run(comparison, metrics, jobs, cost_unit, dry_run, cube=cube)


def _cube(methods: Sequence[str], attribute: bool, pairs: int | None) -> Cube | None:
    if pairs is not None and not attribute:
        raise ConfigError("--attribute-pairs is given without --attribute. Add --attribute, or leave it out.")
    return Cube(tuple(methods), pairs) if attribute else None


def _masked(variants: Sequence[Variant], values: Mapping[str, Any], extra: Sequence[str]) -> bool:
    """Whether the run is one of masked diffusion models: a method or the config sets an option of their trainer."""
    words = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in extra if word.startswith("--")}
    return needed({name for variant in variants for name in variant.methods}) or bool(
        MASKED_OPTIONS & {*values, *words}
    )


def _option(name: str, values: Mapping[str, Any], extra: Sequence[str]) -> Any:
    """An option of TRL: the last one on the command line, with hyphens or underscores, else that of the config."""
    given = values.get(name)
    for word, behind in itertools.zip_longest(extra, extra[1:], fillvalue=""):
        if word.partition("=")[0].replace("-", "_") == f"__{name}":
            given = word.partition("=")[2] if "=" in word else behind
    return given


def _params(
    variants: Sequence[Variant], of_config: Mapping[str, Mapping[str, Any]], given: str | None
) -> dict[str, dict[str, Any]]:
    """Parameters of the config for the methods of the variants, and those of the command, which win."""
    ours = parse_method_params(given)
    named = {name for variant in variants for name in select(variant.methods).classes}
    return {n: {**of_config.get(n, {}), **ours.get(n, {})} for n in [*of_config, *ours] if n in named or n in ours}


def compare_verl(
    words: Sequence[str],
    baseline: str,
    seeds: str,
    out: Path,
    metrics: Sequence[str],
    method_params: str | None,
    cost_unit: str,
    dry_run: bool,
    attribute: bool = False,
    pairs: int | None = None,
) -> None:
    """The same on the user's own run of verl.

    Args:
        words: methods, and overrides of `python -m verl.trainer.main_ppo` or the whole command.
    """
    from rl_plugins.lab.compare.verl import Verl
    from rl_plugins.verl.doctor import read_command

    need_plots()
    methods, command = _split(words, r"[-~].*|.*=.*|(.*/)?python[\d.]*")
    cube = _cube(methods, attribute, pairs)
    variants = parse_variants(cube.variants if cube else _named(methods), baseline)
    host = Verl.of(read_command(command))
    notes = _notes(variants, host.sets, host.evaluates, "trainer.test_freq and data.val_files")
    if host.rewards:
        parts = " + ".join(f"{weight:g} {name}" for name, weight in host.rewards.items())
        notes.append(
            f"All variants train {parts} (rl_plugins.rewards), in place of the `score` of the reward function."
        )
    params = _params(variants, host.method_params, method_params)
    if cube:
        cube.check(baseline, params)
    comparison = make_plan(host, variants, parse_seeds(seeds), out, params, notes)
    run(comparison, metrics, 1, cost_unit, dry_run, cube=cube)


def need_plots() -> None:
    """Fails before anything is trained if the report could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "matplotlib is not installed, and the curves of the report are drawn with it. Nothing was trained. "
            "Install it: pip install 'rl-plugins[plot]'"
        )


def _split(words: Sequence[str], pattern: str) -> tuple[list[str], list[str]]:
    """The words before the first one that matches, and the rest."""
    end = next((i for i, word in enumerate(words) if re.fullmatch(pattern, word)), len(words))
    return list(words[:end]), list(words[end:])


def _named(methods: list[str]) -> list[str]:
    if not methods:
        raise ConfigError("No method is named. Name at least one: rl-plugins compare run.yaml vade")
    return methods


def _notes(variants: Sequence[Variant], sets: str, held_out: bool, option: str) -> list[str]:
    notes = [f"Every run has the same config. This command sets {sets}; everything else is yours."]
    if not held_out and any({"select_prompts", "plan"} & _hooks(a.methods) for a in variants):
        notes.append(
            f"A method here chooses prompts or rollouts, so rewards in training are those of its choice. Set {option} "
            f"to compare on held-out prompts."
        )
    return notes


def timing_notes(cost_unit: str, jobs: int) -> list[str]:
    if cost_unit != "engine_seconds" or jobs == 1:
        return []
    return [
        f"{jobs} runs share this machine, which changes engine time from run to run. For a budget in it use --jobs 1."
    ]


def run(
    comparison: Comparison,
    metrics: Sequence[str],
    jobs: int,
    cost_unit: str,
    dry_run: bool,
    *,
    console: Console | None = None,
    watch: str = "reward",
    environment: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    cube: Cube | None = None,
) -> None:
    """Says what is set, runs what is not finished, and writes and prints the report.

    Args:
        metrics: logged values of the report; none: rewards and each reward function.
        cost_unit: of :data:`rl_plugins.lab.compare.costs.COST_UNITS`, in which all variants have the same budget.
        watch: the logged value shown next to the bars.
        cube: of methods, whose subsets are the variants; None: nothing is attributed.

    Raises:
        ConfigError: a finished run has not counted the cost unit.
    """
    console = console or Console()
    for note in comparison.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if dry_run:
        for planned in comparison.runs:
            state = "finished" if is_finished(planned) else "to run"
            console.print(
                f"{planned.variant.label} seed {planned.seed} ({state}): {shlex.join(planned.arguments)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        return
    costs.require(comparison, cost_unit)
    seconds = run_all(comparison, jobs, watch, console, dict(environment or {}))
    summary = report.write(comparison, metrics or report.found_metrics(comparison), seconds, labels, cost_unit)
    console.print(Markdown(report.text({**summary, "notes": []})))
    if cube:
        console.print(Markdown(write(summary, cube, comparison.out)))
    console.print(f"{comparison.out}{os.sep}{', '.join(summary['files'])} ({seconds:.0f} s)", highlight=False)


def _hooks(methods: Sequence[str]) -> set[str]:
    found: dict[str, Any] = dict(select(methods).classes)
    return {hook for cls in found.values() for hook in cls.claims()}
