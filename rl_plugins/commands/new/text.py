"""The files that `rl-plugins new` writes."""

from __future__ import annotations

from collections.abc import Sequence

from rl_plugins.commands.new.parts import PARTS

# Where names are that the package itself does not offer.
HOMES = {
    "rl_plugins.core.rollouts": ("Carried",),
    "rl_plugins.testing.engine": ("TableEngine", "make_prompt", "run_program"),
}


def files(name: str, hooks: Sequence[str]) -> dict[str, str]:
    """Path in the package -> text, for a method with these hooks.

    Args:
        hooks: keys of `PARTS`, in the order in which they are called.
    """
    cls, module = class_name(name), f"rl_plugins_{name}"
    common = {"name": name, "dashed": f"rl-plugins-{name.replace('_', '-')}", "module": module, "cls": cls}
    return {
        "pyproject.toml": _PYPROJECT.format(**common),
        ".gitignore": "__pycache__/\n*.egg-info/\nbuild/\n",
        "README.md": _README.format(**common, hooks=", ".join(hooks)),
        f"src/{module}/__init__.py": _method(name, cls, hooks),
        f"src/{module}/{name}.toml": _CARD.format(name=name),
        f"tests/test_{name}.py": _tests(name, cls, module, hooks),
    }


def class_name(name: str) -> str:
    """MyMethod of my_method."""
    return "".join(word.capitalize() for word in name.split("_"))


def _method(name: str, cls: str, hooks: Sequence[str]) -> str:
    parts = [PARTS[h] for h in hooks]
    names = {"Method"} | {n for p in parts for n in p.names}
    params, code = "".join(p.params.lstrip("\n") for p in parts), "".join(p.code for p in parts)
    names |= {"MethodParams", "param"} if params else set()
    imports = ["from collections.abc import Mapping"] if "Mapping" in code else []
    imports += ["from dataclasses import dataclass"] if params else []
    imports += [""] if imports else []
    imports += ["import torch"] if "torch." in code else []
    imports += _imports(names)
    imports += ["from torch import Tensor"] if "Tensor" in code else []
    needs = ", ".join(f'"{n}"' for n in dict.fromkeys(n for p in parts for n in p.needs))
    broken = "\n        " if len(needs) > 80 else ""
    told = list(dict.fromkeys(p.symbols for p in parts))
    states = [s.removeprefix("State: ") for s in told if s.startswith("State: ")]
    sections = {"Symbols": [s for s in told if not s.startswith("State: ")], "State": states}
    symbols = [f"    {title}:\n" + "\n".join(f"        {s}" for s in of) for title, of in sections.items() if of]
    return _METHOD.format(
        name=name,
        cls=cls,
        imports="\n".join(imports),
        rules="\n".join(f"        {p.rule}" for p in parts),
        symbols="\n\n".join(symbols),
        needs=f"    needs = frozenset({broken}{{{needs}}}{broken[:5]})\n" if needs else "",
        params=f"\n    @dataclass(frozen=True)\n    class Params(MethodParams):\n{params}" if params else "",
        errors="ConfigError for a parameter out of range" if params else "none",
        code=code.rstrip("\n"),
    )


def _imports(names: set[str]) -> list[str]:
    """Import statements for names of this package, in lines of at most 120 characters."""
    deeper = {home: names & set(of) for home, of in HOMES.items()}
    found = []
    for home, here in {"rl_plugins": names - set().union(*deeper.values()), **deeper}.items():
        listed = sorted(here, key=lambda n: (n.islower(), n))
        line = f"from {home} import {', '.join(listed)}"
        if len(line) > 120:
            line = f"from {home} import (\n" + "".join(f"    {n},\n" for n in listed) + ")"
        found += [line] if listed else []
    return found


def _tests(name: str, cls: str, module: str, hooks: Sequence[str]) -> str:
    tests = [f"def test_{h}():\n{PARTS[h].test.strip(chr(10)).replace('METHOD', cls)}" for h in hooks]
    imports = [f"import {library}" for library in ("pytest", "torch") if any(f"{library}." in t for t in tests)]
    imports += _imports({"testing"} | {n for h in hooks for n in PARTS[h].test_names})
    text = {"imports": "\n".join(imports), "tests": "\n\n\n".join(tests)}
    return _TESTS.format(name=name, cls=cls, module=module, **text)


_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{dashed}"
version = "0.1.0"
description = "The method {name} for rl-plugins."
requires-python = ">=3.11"
dependencies = []  # rl-plugins is on no package index yet; name it here when it is

# This makes `methods: [{name}]` work wherever the package is installed.
[project.entry-points."rl_plugins.methods"]
{name} = "{module}:{cls}"

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
{module} = ["*.toml"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["src"]
"""

_README = """\
# {dashed}

The method `{name}` for rl-plugins. It changes: {hooks}.

    pip install -e . pytest
    rl-plugins check {name}
    pytest
    rl-plugins trl grpo --config run.yaml --methods {name}

Install rl-plugins first, then this package: from its folder, its wheel or its git address; for verl on every node.

What to do with this start:

1. `src/{module}/__init__.py`: your update rule in the docstring, your formula in the hook.
2. `src/{module}/{name}.toml`: when the method helps, and what it costs.
3. `tests/`: compare with numbers that you know: a plain loop, a paper's table, the authors' code.

In the clone of rl-plugins, docs/guides/methods.md goes from here to a comparison with plain GRPO, and
docs/guides/hooks.md has an example of each hook.
"""

_CARD = """\
# What `rl-plugins info {name}` tells a user. Nothing here changes what the method does.

use_when = ""  # one sentence: when it helps
avoid_when = ""  # one sentence: when it does not
cost = ""  # what it costs: more rollouts, another model, memory

# If they apply:
# logs = {{ mean_reward = "reward of the batches so far" }}
# goes_with = {{ vade = "it chooses the prompts whose rewards this method then compares" }}
# disagreements = ["The paper divides by the group's size, the code by the batch's: `per_group`."]
# example_params = {{ column = "answer" }}  # values for parameters without a default, for `rl-plugins check`

# [paper]
# arxiv = "2402.03300"
# title = "The title"
# authors = "First Last and First Last"
# year = 2024
# code = "owner/repository"
"""

_METHOD = '''\
"""The method {name}."""

from __future__ import annotations

{imports}


class {cls}(Method):
    """Say in one sentence what the method does.

{rules}

{symbols}

    Raises: {errors}.
    """

    name = "{name}"
    # If it is from a paper, name that in {name}.toml, and say here how close to it the method is:
    # fidelity = "paper"  # "code": compared with the authors' code; "reconstruction": something was not published
{needs}{params}{code}
'''

_TESTS = '''\
"""The method {name}: the contract of rl-plugins, and the numbers of its own."""

from __future__ import annotations

{imports}

from {module} import {cls}


def test_contract():
    report = testing.check_method({cls})
    assert report.name == "{name}"


{tests}
'''
