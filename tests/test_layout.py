"""Where things are: the public modules, one meaning per class name, and what the wheel carries.

What may import what is checked by import-linter (`make lint`, contracts in pyproject.toml)."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import rl_plugins

PACKAGE = Path(rl_plugins.__file__).parent
ROOT = PACKAGE.parent

# Names in these are kept from version to version. Every other module is private and may move.
PUBLIC = [
    "rl_plugins",
    "rl_plugins.core.denoising",
    "rl_plugins.core.estimators",
    "rl_plugins.core.groups",
    "rl_plugins.core.losses",
    "rl_plugins.core.redundancy",
    "rl_plugins.core.requests",
    "rl_plugins.diffusion",
    "rl_plugins.environments",
    "rl_plugins.kit.agents",
    "rl_plugins.kit.judges",
    "rl_plugins.kit.masked",
    "rl_plugins.kit.priors",
    "rl_plugins.kit.services",
    "rl_plugins.lab.demo",
    "rl_plugins.testing",
    "rl_plugins.testing.engine",
    "rl_plugins.tools.attribution",
    "rl_plugins.tools.audit",
    "rl_plugins.tools.disaggregated",
    "rl_plugins.tools.fusion",
    "rl_plugins.tools.gradient_quality",
    "rl_plugins.tools.heads",
    "rl_plugins.tools.messages",
    "rl_plugins.tools.preferences",
    "rl_plugins.tools.supervised",
    "rl_plugins.trl",
    "rl_plugins.trl.asynchronous",
    "rl_plugins.trl.masked",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_is_there_and_says_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__ and all(getattr(module, public) is not None for public in getattr(module, "__all__", ()))


def test_the_first_pages_import_public_modules_only() -> None:
    """README and the guides, and their examples: what a user copies must not move."""
    pages = [ROOT / "README.md", *(ROOT / "docs" / "guides").glob("*.md"), *(ROOT / "examples" / "guides").glob("*.py")]
    named = {
        (page.name, module)
        for page in pages
        for module in re.findall(r"from (rl_plugins\b[\w.]*) import", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not {(page, module) for page, module in named if module not in PUBLIC and ".methods." not in module}


def test_a_public_class_name_means_one_thing() -> None:
    found = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(PACKAGE)))
    assert not {name: where for name, where in found.items() if len(where) > 1}


def test_files_that_are_no_code_are_in_the_package() -> None:
    """A file that the wheel lacks is missed by an installed package alone, never by a checkout."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets == {"wheel": {"packages": ["rl_plugins"]}}  # with every file that git does not ignore
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    there = [f.relative_to(ROOT) for f in PACKAGE.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert len(there) > 700
    assert not [f for f in there if any(fnmatch(part, pattern) for part in f.parts for pattern in ignored)]


def test_what_a_plain_install_imports_is_declared() -> None:
    """Packages used outside the adapters and `lab`: another package may stop bringing them."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = {re.split(r"[<>=]", d)[0] for d in tomllib.loads(text)["project"]["dependencies"]}
    named = {"pyyaml": "yaml"}
    known = {named.get(d, d) for d in declared} | {"rl_plugins", *sys.stdlib_module_names}
    known |= {"accelerate", "transformers", "huggingface_hub"}  # of the hosts
    known |= {"rapidfuzz"}  # of an extra, whose error names it
    rooms = ("core", "kit", "tools", "methods", "runtime", "cards", "commands", "testing")
    missing = {
        (module, str(file.relative_to(PACKAGE)))
        for room in rooms
        for file in (PACKAGE / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for module in _imported(node)
        if module not in known
    }
    assert not missing


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [node.module.partition(".")[0]] if isinstance(node, ast.ImportFrom) and node.module else []


def test_workflows_of_the_forge_ask_for_what_there_is() -> None:
    """Targets and variables of make, and sets of versions."""
    makefile = (ROOT / "Makefile").read_text()
    sets = tomllib.loads((ROOT / "tests" / "versions" / "environments.toml").read_text())
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    jobs = [job for f in files for job in yaml.safe_load(f.read_text())["jobs"].values()]
    runs = [s["run"] for job in jobs for s in job["steps"] if s.get("run", "").startswith("make ")]
    targets = {word for r in runs for word in re.sub(r"\${{.*?}}", "", r).split()[1:] if "=" not in word}
    assert targets == {"lint", "test", "test-versions", "test-site", "canary", "site"}
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    matrices = [job["strategy"]["matrix"] for job in jobs if "strategy" in job]
    assert {name for m in matrices for name in m.get("environment", ())} <= set(sets)
    assert all(f"$({e['variable']})" in makefile for m in matrices for e in m.get("include", ()))


def test_no_two_test_files_have_one_name():
    """pytest imports them by their names; two of one name end the collection, and only where both are collected."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
