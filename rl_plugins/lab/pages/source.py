"""Parts of pages that are made from the source: the map of the modules, and the tables of the adapters and samplers."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path

import rl_plugins
from rl_plugins.cards.catalog import cards, example_of, plugins
from rl_plugins.core.method import Bundle
from rl_plugins.lab.pages.methods import table
from rl_plugins.lab.pages.parts import filled
from rl_plugins.runtime.host_names import change_table

ROOT = Path(rl_plugins.__file__).parent


def path_of(module: str) -> Path:
    folder = ROOT.joinpath(*module.split(".")[1:])
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@cache
def modules() -> tuple[str, ...]:
    """Every module of the package."""
    names = []
    for file in sorted(ROOT.rglob("*.py")):
        parts = ("rl_plugins", *file.relative_to(ROOT).with_suffix("").parts)
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return tuple(names)


# ---- the map

_MAP_HEAD = """\
# Module map

Every module with the first sentence of its docstring, the lowest layer first. [architecture.md](architecture.md) says
what the layers are. Methods are listed in [methods.md](methods.md)."""
# From the lowest layer to the highest.
PACKAGES = (
    *("core", "kit", "tools", "runtime", "methods"),
    *("trl", "verl", "diffusion", "cards", "testing", "lab", "commands"),
)


def summary_of(module: str) -> str:
    """The first sentence of the module's docstring, as one line."""
    text = ast.get_docstring(ast.parse(path_of(module).read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def module_map() -> str:
    """The page: every module of every package, of `methods` only the package itself."""
    parts = [_MAP_HEAD]
    for name in PACKAGES:
        package = f"rl_plugins.{name}"
        inside = [m for m in modules() if m.startswith(f"{package}.") and name != "methods"]
        rows = [[f"`{path_of(m).relative_to(ROOT).as_posix()}`", summary_of(m)] for m in inside]
        parts += [f"## {name}", summary_of(package), *([table(["module", "what"], rows)] if rows else [])]
    return "\n\n".join(parts) + "\n"


# ---- tables of the hosts and samplers


def with_changes(host: str, text: str) -> str:
    """The page of a host with its table of changes."""
    return filled(text, "changes", change_table(importlib.import_module(f"rl_plugins.{host}.changes").CHANGES))


def with_trainers(text: str) -> str:
    """The page of TRL with the table of its trainers."""
    from rl_plugins.trl.hosts import trainer_table

    return filled(text, "trainers", trainer_table())


def with_samplers(text: str) -> str:
    """The page of samplers with the table of what each method claims."""
    return filled(text, "samplers", sampler_table())


def sampler_table() -> str:
    """Every method that chooses prompts or decides how many rollouts they get."""
    lines = ["| method | chooses prompts | decides rollouts per prompt | plans in rounds |", "|---|---|---|---|"]
    for card in sorted(cards(plugins()), key=lambda card: card.name):
        if isinstance(card.found, Bundle):
            continue
        method = example_of(card.found)
        claims = ("select_prompts" in method.claims(), method.decides_rollouts, method.rounds)
        if any(claims):
            lines.append(f"| `{card.name}` | " + " | ".join("yes" if c else "" for c in claims) + " |")
    return "\n".join(lines)
