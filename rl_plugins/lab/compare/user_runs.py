"""Methods and a baseline on the user's own run, of TRL or verl."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.cards.usage import needs_masked
from rl_plugins.core.errors import ConfigError
from rl_plugins.kit.masked import MASKED_OPTIONS
from rl_plugins.lab.compare.attribution import Cube
from rl_plugins.lab.compare.comparison import RunOptions, need_plots, run
from rl_plugins.lab.compare.plan import Variant, make_plan, parse_variants
from rl_plugins.lab.compare.trl import Trl
from rl_plugins.runtime.config_text import read_yaml
from rl_plugins.runtime.registry import parse_method_params, parse_methods, select
from rl_plugins.trl import compat


def compare_trl(
    words: Sequence[str],
    options: RunOptions,
    metrics: Sequence[str] = (),
    method_params: str | None = None,
    attribute: bool = False,
    pairs: int | None = None,
    launcher: str = "",
) -> None:
    """Trains every variant with every seed on the user's own config of TRL and writes figures and a report.

    Args:
        words: the YAML file, methods, and options of `trl grpo`.
        attribute: the variants are subsets of the methods, and the report says which method brought what. Without named
            methods they are those of the config.
        pairs: of orders of the methods whose subsets are the variants; None: all subsets.
    """
    need_plots()
    compat.check_versions()
    config = Path(words[0])
    if not config.is_file():
        raise ConfigError(f"There is no config {config}. Give the YAML file you run `trl grpo` with.")
    methods, extra = _split(words[1:], r"-.*")
    values = read_yaml(config, f"The config {config}") or {}
    if attribute:
        methods = methods or parse_methods(values.get("methods"))
    cube = _cube(methods, attribute, pairs)
    variants = parse_variants(cube.variants if cube else _named(methods), options.baseline)
    held_out = _option("eval_strategy", values, extra) not in ("no", False, None)  # YAML reads a bare no as false
    host = Trl(config.read_text(), tuple(extra), _masked(variants, values, extra))
    notes = _notes(variants, host.sets, held_out, "eval_strategy and a test split") + options.notes
    params = _params(variants, parse_method_params(values.get("method_params")), method_params)
    notes += _given(params, extra)
    if cube:
        cube.check(options.baseline, params)
    comparison = make_plan(host, variants, options.seeds, options.out, params, notes, shlex.split(launcher))
    run(comparison, metrics, options, cube=cube)


def _cube(methods: Sequence[str], attribute: bool, pairs: int | None) -> Cube | None:
    if pairs is not None and not attribute:
        raise ConfigError("--attribute-pairs is given without --attribute. Add --attribute, or leave it out.")
    return Cube(tuple(methods), pairs) if attribute else None


def _masked(variants: Sequence[Variant], values: Mapping[str, Any], extra: Sequence[str]) -> bool:
    """Whether the run is one of masked diffusion models: a method or the config sets an option of their trainer."""
    words = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in extra if word.startswith("--")}
    return needs_masked({name for variant in variants for name in variant.methods}) or bool(
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


def _given(params: Mapping[str, Any], extra: Sequence[str]) -> list[str]:
    """What two reports of the same methods and config may differ in."""
    told = {"Parameters of methods": json.dumps(params) if params else "", "Options of this command": shlex.join(extra)}
    return [f"{what}: `{text}`." for what, text in told.items() if text]


def compare_verl(
    words: Sequence[str],
    options: RunOptions,
    metrics: Sequence[str] = (),
    method_params: str | None = None,
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
    variants = parse_variants(cube.variants if cube else _named(methods), options.baseline)
    host = Verl.of(read_command(command))
    notes = _notes(variants, host.sets, host.evaluates, "trainer.test_freq and data.val_files")
    if host.rewards:
        parts = " + ".join(f"{weight:g} {name}" for name, weight in host.rewards.items())
        notes.append(
            f"All variants train {parts} (rl_plugins.rewards), in place of the `score` of the reward function."
        )
    params = _params(variants, host.method_params, method_params)
    notes += _given(params, [])
    if cube:
        cube.check(options.baseline, params)
    comparison = make_plan(host, variants, options.seeds, options.out, params, notes)
    run(comparison, metrics, options, cube=cube)


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
    changing = {a.label: "rewards" in _hooks(a.methods) for a in variants}
    if len(set(changing.values())) > 1:
        named = ", ".join(label for label, changes in changing.items() if changes)
        notes.append(
            f"Methods of these variants change rewards: {named}. Their reward in training is the changed one, which "
            f"cannot be compared with that of the others. Compare the reward on held-out prompts, or a reward function "
            f"of weight 0 (--metric)."
        )
    return notes


def _hooks(methods: Sequence[str]) -> set[str]:
    found: dict[str, Any] = dict(select(methods).classes)
    return {hook for cls in found.values() for hook in cls.claims()}
