"""The cards of the built-in methods: what they say to a reader who chooses a method."""

from __future__ import annotations

import dataclasses

import pytest

from rl_plugins.runtime import registry

BUILT_IN = [n for n in registry.all_names() if any(o.where.startswith("rl_plugins.") for o in registry.origins_of(n))]


def card(name):
    return registry.load(name)


@pytest.mark.parametrize("name", BUILT_IN)
def test_host_options_of_the_paper_do_not_contradict_those_that_the_method_sets(name):
    settings, sets = card(name).paper_settings, getattr(card(name), "host_options", {})
    assert set(settings) <= {"trl", "verl"}
    for host in settings:
        assert settings[host], name
        for option in set(settings[host]) & set(sets.get(host, {})):
            assert settings[host][option] == sets[host][option]


def test_trl_takes_the_host_options_of_the_papers(tmp_path):
    trl = pytest.importorskip("trl")
    for name in BUILT_IN:
        options = card(name).paper_settings.get("trl")
        if options:
            known = {f.name for f in dataclasses.fields(trl.GRPOConfig)}
            assert not set(options) - known, name
            given = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
            assert {k: getattr(given, k) for k in options} == dict(options), name


def test_verl_has_the_host_options_of_the_papers():
    pytest.importorskip("verl")
    from omegaconf import OmegaConf

    from rl_plugins.verl.config import compose

    config = compose([])
    for name in BUILT_IN:
        for key in card(name).paper_settings.get("verl", {}):
            *folders, last = key.split(".")
            assert last in OmegaConf.select(config, ".".join(folders)), (name, key)
