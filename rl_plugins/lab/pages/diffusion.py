"""Parts of docs/diffusion.md on the site: the methods that the diffusion trainer takes, and its options."""

from __future__ import annotations

from dataclasses import MISSING, fields

from rl_plugins.cards.catalog import cards, example_of, plugins
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle, Method
from rl_plugins.diffusion import capabilities
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.lab.pages.parts import filled
from rl_plugins.runtime.stack import MethodStack


def with_parts(text: str) -> str:
    """The page with its two parts."""
    names = ", ".join(f"[`{name}`](methods.md#{name})" for name in accepted())
    return filled(filled(text, "methods", names), "options", option_table())


def accepted() -> list[str]:
    """Built-in methods that the checks of a run with everything they may want let pass."""
    found = [card.found for card in cards(plugins()) if not isinstance(card.found, Bundle)]
    return sorted(cls.name for cls in found if any(_passes(cls, updates) for updates in (1, 2)))


def _passes(cls: type[Method], updates: int) -> bool:
    method = example_of(cls)
    columns = {n.removeprefix("column:"): 1 for n in method.needs if n.startswith("column:")}
    dataset = [{"prompt": i, **columns} for i in range(64)]
    config = DiffusionConfig(updates_per_batch=updates, prompts_per_batch=16, group_size=16)
    run = capabilities.run_of(config, dataset, capabilities.columns_of(dataset), ("one", "other"))
    stack = MethodStack([method])
    stack.warn_once = lambda message: None  # type: ignore[method-assign]
    try:
        capabilities.check(stack, config, run, {}, has_cheap=True)
    except ConfigError:
        return False
    return True


def option_table() -> str:
    """Every option with its default and its help."""
    lines = ["| option | default | what |", "|---|---|---|"]
    for f in fields(DiffusionConfig):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        lines.append(f"| `{f.name}` | `{default!r}` | {f.metadata['help']} |")
    return "\n".join(lines)
