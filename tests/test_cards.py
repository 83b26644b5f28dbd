"""The cards of the built-in methods: what they say to a reader who chooses a method."""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import re
from collections.abc import Callable
from typing import get_args, get_origin, get_type_hints

import pytest

from rl_plugins.cards.catalog import example_of
from rl_plugins.cards.problems import PROBLEMS
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle
from rl_plugins.core.params import describe_params, parse_value, resolve_callable
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.stack import build_stack

BUILT_IN = [n for n in registry.all_names() if any(o.where.startswith("rl_plugins.") for o in registry.origins_of(n))]


def card(name):
    return registry.load(name)


def parts(name):
    return list(card(name).parts) if isinstance(card(name), Bundle) else [name]


# ---- for a reader who chooses


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_card_says_in_a_line_what_the_method_does_and_for_what(name):
    does, problems = card(name).does, card(name).problems
    assert 20 < len(does) <= 100 and "\n" not in does and not does.endswith(".")
    assert re.match(r"[A-Z][a-z]+s ", does), "it begins with a verb in the third person"
    apart = set(problems) - {"too_easy", "too_hard"}  # both are of `no_signal`, too
    assert problems and len(apart) <= 3 and set(problems) <= set(PROBLEMS) and len(set(problems)) == len(problems)


def test_no_two_methods_do_the_same():
    assert len({card(name).does for name in BUILT_IN}) == len(BUILT_IN)


def test_every_problem_has_an_answer():
    assert {problem for name in BUILT_IN for problem in card(name).problems} == set(PROBLEMS)


@pytest.mark.parametrize("name", [n for n in BUILT_IN if not isinstance(card(n), Bundle)])
def test_cost_is_said_in_rollouts_or_calls(name):
    assert re.search(r"rollout|generation|token|call", card_file(name).cost), card_file(name).cost
    assert len(card_file(name).cost.split()) >= 4


@pytest.mark.parametrize("name", BUILT_IN)
def test_methods_that_go_with_it_can_be_named_together(name):
    for other, why in card_file(name).goes_with.items():
        assert other in BUILT_IN and other not in parts(name)
        assert why.endswith(".") and len(why) > 20
        names = [name, other]
        params = {p: dict(card_file(p).example_params) for n in names for p in parts(n) if card_file(p).example_params}
        for n in names:
            told = {k: v for k, v in card_file(n).goes_with_params.items() if f"`{k}: {json.dumps(v)}`" in why}
            if told:
                params[n] = {**params.get(n, {}), **told}
        build_stack(names, params or None)


# ---- parameters


METHODS = [n for n in BUILT_IN if not isinstance(card(n), Bundle)]


def fields(name):
    """Name, type, and help with its example, of every parameter."""
    params = card(name).Params
    hints = get_type_hints(params)
    return [
        (f.name, hints[f.name], f"{f.metadata['help']} {f.metadata['example']}") for f in dataclasses.fields(params)
    ]


def kinds(hint):
    """A type and everything inside of it."""
    return {hint, get_origin(hint)}.union(*map(kinds, get_args(hint))) if get_origin(hint) else {hint}


@pytest.mark.parametrize("name", METHODS)
def test_every_object_parameter_has_an_example(name):
    for parameter, hint, text in fields(name):
        nested = get_origin(hint) is tuple and get_origin(get_args(hint)[0]) is tuple
        path = parameter in ("adapter", "embeddings", "library") or parameter.endswith("_url")
        if nested or path or kinds(hint) & {Callable, collections.abc.Callable}:
            shown = parameter in {**card_file(name).example_params, **card_file(name).examples}
            assert shown or re.search(r"for example |http://|rl_plugins\.[\w.]+:", text), (name, parameter, text)
    for parameter, example in card_file(name).examples.items():
        assert parameter in {known for known, _, _ in fields(name)}
        if example.startswith("rl_plugins."):
            resolve_callable(example, parameter)


@pytest.mark.parametrize("name", METHODS)
def test_help_describes_only_values_that_are_allowed(name):
    """ "none: off", "0: all", "empty: ..": the value before the colon can be given."""
    params = card(name).Params
    limits = {f.name: f.metadata for f in dataclasses.fields(params)}
    for parameter, hint, text in fields(name):
        for value in re.findall(r"(?:^|[;,] )(none|inf|true|false|-?\d+(?:\.\d+)?): ", text):
            rules = {"limits": limits[parameter]["limits"], "allow_inf": limits[parameter]["allow_inf"]}
            parse_value(value, hint, parameter, **rules)
        if re.search(r"(?:^|[;,] )empty: ", text):
            assert {str, tuple} & kinds(hint), (name, parameter)


def test_conditions_name_only_values_that_are_allowed():
    rows = {(n, r["name"]): r for n in METHODS for r in describe_params(card(n).Params)}
    assert rows["v0_5", "prior_decay"]["only_if"] == "`prior` is 'running_mean'"
    assert rows["v0", "prior_decay"]["only_if"] == "`prior` is 'running_mean' or 'beta'"
    with pytest.raises(ConfigError, match="`prior` is constant, which needs `prior_value`"):
        card("v0_5").Params(prior="constant")


def test_columns_that_the_program_of_a_method_writes_are_not_asked_of_the_dataset():
    method = build_stack(["turn_control"], {"turn_control": dict(card_file("turn_control").example_params)}).methods[0]
    assert {"column:turns", "column:stop_reason", "column:extended"} <= method.needs & method.brings


# ---- the paper's setting


@pytest.mark.parametrize("name", BUILT_IN)
def test_host_options_of_the_paper_do_not_contradict_those_that_the_method_sets(name):
    settings, sets = card_file(name).paper_settings, getattr(example(name), "host_options", {})
    assert set(settings) <= {"trl", "verl", "diffusion"} and set(settings) <= set(hosts_of_all(name))
    for host in settings:
        assert settings[host], name
        for option in set(settings[host]) & set(sets.get(host, {})):
            assert settings[host][option] == sets[host][option]


def example(name):
    """An instance of a method; a bundle itself."""
    found = card(name)
    return found if isinstance(found, Bundle) else example_of(found)


def hosts_of_all(name):
    """Hosts of a method, or of all parts of a bundle."""
    found = card(name)
    parts = [card(part) for part in found.parts] if isinstance(found, Bundle) else [found]
    return set.intersection(*(set(part.hosts) for part in parts))


def test_the_diffusion_trainer_takes_the_host_options_of_the_papers():
    from rl_plugins.diffusion import DiffusionConfig

    for name in BUILT_IN:
        options = card_file(name).paper_settings.get("diffusion", {})
        given = DiffusionConfig(**options)
        assert {k: getattr(given, k) for k in options} == dict(options), name


def test_trl_takes_the_host_options_of_the_papers(tmp_path):
    trl = pytest.importorskip("trl")
    known = {f.name for f in dataclasses.fields(trl.GRPOConfig)}
    for name in BUILT_IN:
        options = card_file(name).paper_settings.get("trl", {})
        assert not set(options) - known, name
        rows = options.get("num_generations", 8)
        room = {} if "generation_batch_size" in options else {"per_device_train_batch_size": rows}
        given = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **room, **options)
        assert {k: getattr(given, k) for k in options} == dict(options), name


def test_verl_has_the_host_options_of_the_papers():
    pytest.importorskip("verl")
    from omegaconf import OmegaConf

    from rl_plugins.verl.config import compose

    config = compose([])
    for name in BUILT_IN:
        for key in card_file(name).paper_settings.get("verl", {}):
            folder, _, last = key.rpartition(".")
            assert last in OmegaConf.select(config, folder), (name, key)
