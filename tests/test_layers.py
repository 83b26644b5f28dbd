"""The layers of the package: which may import which, no circles, and one meaning for every public class name.

contract                          errors .. method, redundancy: what the author of a method reads
agents, services, judges, priors  for methods, on the contract
audit, messages                   for methods, on the contract
methods                           on those
rewards                           reward functions of papers, on their methods
runtime                           the host-free engine, for adapters, on the contract
trl, verl, diffusion              one adapter each
testing, demo, compare, bench, commands  on top
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict

import pytest

from rl_plugins.lab.pages.source import (
    LAYERS,
    ROOT,
    Import,
    imports,
    modules,
    path_of,
    summary_of,
    with_map,
    with_samplers,
)
from rl_plugins.runtime import registry

CONTRACT = {
    "errors",
    "problems",
    "renamed",
    "groups",
    "params",
    "losses",
    "rollouts",
    "requests",
    "denoising",
    "entries",
    "estimators",
    "method",
    "redundancy",
}
AUTHORS = {"contract", "agents", "services", "judges", "evidence", "thompson", "priors", "audit", "messages"}
ADAPTER = {*AUTHORS, "runtime", "supervised", "masked", "flows", "nft", "cheap", "disaggregated", "heads"}
MAY_IMPORT: dict[str, set[str]] = {
    "contract": {"contract"},
    "agents": {"contract", "agents", "services"},
    "services": {"contract", "runtime.threads"},  # calls that may hang are limited in one place
    "judges": {"contract", "services"},
    "evidence": {"contract"},
    "audit": {"contract", "services", "audit"},
    "messages": {"contract", "services", "messages"},
    "attribution": {"contract"},
    "disaggregated": {"contract", "services", "disaggregated"},
    "heads": {"contract"},
    "preferences": {"contract"},
    "fusion": {"contract"},  # for commands: weights of models, no rollouts
    "thompson": {"evidence"},
    "priors": {"contract", "services", "evidence"},
    "papers": set(),
    "supervised": {"contract", "supervised"},
    "masked": {"contract", "masked"},
    "flows": {"contract"},
    "cheap": {"contract"},
    "nft": {"contract"},
    "runtime": {"contract", "runtime", "supervised", "papers"},  # whose names are no methods
    "methods": {*AUTHORS, "methods"},
    "rewards": {*AUTHORS, "methods"},
    "trl": {*ADAPTER, "trl"},
    "verl": {*ADAPTER, "verl"},
    "diffusion": {*ADAPTER, "diffusion"},
    "testing": {*ADAPTER, "testing"},
    "compare": {"contract", "runtime", "messages", "compare"},
    "demo": {*AUTHORS, "runtime", "compare.plan", "compare.verl", "masked", "demo", "diffusion"},
    "bench": {"contract", "runtime", "attribution", "compare", "demo", "bench"},
    # one command trains what one method loads
    "commands": {
        "bench",
        *ADAPTER,
        "commands",
        "compare",
        "demo",
        "testing",
        "trl",
        "verl",
        "diffusion",
        "methods.dots",
        "fusion",
        "papers",
        "attribution",
        "viewer",
        "preferences",
    },
    "viewer": {"contract", "viewer"},  # files alone
    "cli": {
        "contract",
        "runtime",
        "commands",
        "audit",
        "fusion",
        "preferences",
        "compare",
        "demo",
        "testing",
        "trl",
        "verl",
    },
    # where names are found since the first version
    "environments": {"agents", "trl.environments"},
    "turns": {"agents"},
    "simulation": {"testing"},
    "": {"contract"},  # rl_plugins itself
}
# What starts and watches real runs of a host for a comparison stands beside that host's adapter.
BESIDE = {
    "compare.trl": "trl",
    "compare.trl_worker": "trl",
    "compare.masked_worker": "trl",
    "compare.verl": "verl",
    "compare.verl_worker": "verl",
    "compare.verl_buffer": "verl",
}


def layer(module: str) -> str:
    name = module.partition(".")[2].split(".")[0]
    return "contract" if name in CONTRACT else name


def inside(module: str) -> str:
    return module.removeprefix("rl_plugins").lstrip(".")


def allowed(i: Import) -> bool:
    own, target = inside(i.module), i.target
    if target == "diffusers":
        return layer(i.module) in ("diffusion", "demo")
    if target in ("trl", "verl"):  # the hosts themselves
        return layer(i.module) == target or BESIDE.get(own) == target
    if not target.startswith("rl_plugins"):
        return True
    if target == "rl_plugins":
        return layer(i.module) not in ("contract", "runtime")
    mine = MAY_IMPORT[layer(i.module)] | ({BESIDE[own]} if own in BESIDE else set())
    return layer(target) in mine or inside(target) in mine


def test_every_module_imports_only_what_its_layer_may() -> None:
    assert not [str(i) for i in imports() if not allowed(i)]


def test_the_rule_can_fail() -> None:
    for module, target in [
        ("rl_plugins.methods.vade", "rl_plugins.runtime.stack"),
        ("rl_plugins.methods.vade", "trl"),
        ("rl_plugins.trl.generation.batches", "rl_plugins.methods.gdpo"),
        ("rl_plugins.trl.generation.batches", "rl_plugins.verl.rows"),
        ("rl_plugins.runtime.plan", "rl_plugins.trl.generation.batches"),
        ("rl_plugins.commands.doctor", "trl"),
        ("rl_plugins.lab.demo.policy", "rl_plugins.trl"),
        ("rl_plugins.diffusion.flows", "diffusers"),
        ("rl_plugins.diffusion.served", "rl_plugins.trl.generation.batches"),
        ("rl_plugins.core.rollouts", "rl_plugins.runtime.stack"),
    ]:
        assert not allowed(Import(module, target, 1)), (module, target)


def test_no_import_goes_in_a_circle() -> None:
    """Strongly connected modules, lazy imports counted; a package's `__init__` may gather its own modules."""
    edges: dict[str, set[str]] = defaultdict(set)
    for i in imports():
        if i.target.startswith("rl_plugins") and i.target != i.module:
            edges[i.module].add(i.target)
    reach = {m: _reachable(m, edges) for m in modules()}
    circles = sorted({tuple(sorted(n for n in reach[m] if m in reach[n])) for m in modules() if m in reach[m]})
    assert not circles


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = list(edges[start])
    while todo:
        m = todo.pop()
        if m not in seen:
            seen.add(m)
            todo += edges.get(m, ())
    return seen


def public_classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in ast.parse(path_of(module).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


# A pair per host, or per reader: alike on purpose, and never imported together.
PAIRS: set[str] = set()


def test_a_public_class_name_means_one_thing() -> None:
    twice = {name: where for name, where in public_classes().items() if len(where) > 1 and name not in PAIRS}
    assert not twice


@pytest.mark.parametrize(
    "name",
    [
        "rl_plugins.core.method:Method",
        "rl_plugins.core.rollouts:Rollouts",
        "rl_plugins.core.requests:Generate",
        "rl_plugins.core.params:param",
        "rl_plugins.core.losses:ppo_clip",
        "rl_plugins.core.groups:Groups",
        "rl_plugins.core.errors:ConfigError",
        "rl_plugins.kit.agents:Observation",
        "rl_plugins.kit.agents:Environment",
        "rl_plugins.kit.agents:play",
        "rl_plugins.kit.agents.turns:Turns",
        "rl_plugins.kit.services:Service",
        "rl_plugins.kit.priors:make_prior",
        "rl_plugins.testing.generation:Simulation",
        "rl_plugins.testing:check_method",
        "rl_plugins.testing.engine:TableEngine",
        "rl_plugins.trl:GRPOTrainer",
        "rl_plugins.trl:MethodsMixin",
    ],
)
def test_public_names_are_found_where_they_were(name: str) -> None:
    import importlib

    module, attribute = name.split(":")
    assert getattr(importlib.import_module(module), attribute) is not None


def test_the_map_of_the_architecture_names_every_module() -> None:
    """`make docs` writes it; each line is the first sentence of the module itself."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert with_map(text) == text
    layers = {inside(m).split(".")[0] for m in modules()} - {""}
    assert layers == {name for names in LAYERS.values() for name in names.split()}
    assert all(summary_of(m) for m in modules())


def test_the_page_of_samplers_is_that_of_the_registry() -> None:
    """Its table is made by `make docs`, and every method it speaks of exists."""
    text = (ROOT.parent / "docs" / "samplers.md").read_text(encoding="utf-8")
    assert with_samplers(text) == text
    cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("|")]
    named = {name for pair in cells for cell in pair for name in re.findall(r"`([a-z0-9_]+)`", cell)}
    assert len(named) > 15
    assert not named - set(registry.all_names())


def test_every_place_the_walkthrough_names_exists() -> None:
    text = (ROOT.parent / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    places = re.findall(r"`([a-z_/]+\.py): ([A-Za-z_.]+)`", text)
    assert len(places) > 25
    for file, name in places:
        found = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        for part in name.split("."):
            nodes = [n for n in found if getattr(n, "name", None) == part]
            assert nodes, f"{file} has no {name}"
            found = getattr(nodes[0], "body", [])


def test_files_that_are_no_code_are_in_the_package():
    """A file that the wheel lacks is missed by an installed package alone, never by a checkout."""
    text = (ROOT.parent / "pyproject.toml").read_text()
    patterns = tomllib.loads(text)["tool"]["setuptools"]["package-data"]["rl_plugins"]
    packed = {file for pattern in patterns for file in ROOT.glob(pattern)}
    there = {f for f in ROOT.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert there <= packed, sorted(str(f.relative_to(ROOT)) for f in there - packed)
