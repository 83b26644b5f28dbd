"""Pages of the documentation that are made from the code.

`PAGES` are in git and written by `rl-plugins docs`. Those of `FILLED` and `on_site` are made by `make site` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rl_plugins.cards.catalog import plugins
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text
from rl_plugins.lab.bench import page as bench
from rl_plugins.lab.bench.method_page import method_page
from rl_plugins.lab.bench.published import methods_run
from rl_plugins.lab.pages import (
    choose,
    class_index,
    diffusion,
    losses,
    methods,
    open_questions,
    papers,
    source,
    versions,
)
from rl_plugins.lab.pages.guides import with_code
from rl_plugins.lab.pages.parts import renewed
from rl_plugins.lab.pages.reference import reference_page
from rl_plugins.lab.pages.short_reference import short_page
from rl_plugins.lab.quality import page as quality
from rl_plugins.runtime import registry

# File -> its text, made from the text that is there: a page with a generated part keeps the rest.
PAGES: dict[str, Callable[[str], str]] = {
    "rl_plugins/cards/index.json": lambda _: class_index.text(),
    "docs/methods.md": lambda _: methods.index(),
    "docs/choose.md": lambda _: choose.index(),
    "docs/bench.md": lambda text: renewed(text, "tasks", bench.tasks()),
    "docs/quality.md": lambda text: renewed(text, "worlds", quality.worlds()),
    "docs/open_questions.md": lambda _: open_questions.page(),
    "docs/reference.md": lambda _: short_page(),
    "docs/install.md": versions.install,
    "README.md": choose.readme,
}

# A written page -> the page of the site, which shows more.
FILLED: dict[str, Callable[[str], str]] = {
    "docs/methods.md": lambda _: methods.index(on_site=True),
    "docs/choose.md": lambda _: choose.page(),
    "docs/reference.md": lambda _: reference_page(),
    "docs/bench.md": lambda text: f"{text}\n{bench.results()}",
    "docs/quality.md": lambda text: f"{text}\n{quality.results()}",
    "docs/supervised.md": losses.with_cards,
    "docs/trl_details.md": lambda text: source.with_trainers(source.with_changes("trl", text)),
    "docs/verl_details.md": partial(source.with_changes, "verl"),
    "docs/diffusion.md": diffusion.with_parts,
    "docs/samplers.md": source.with_samplers,
}


def _on_the_bench(method: str) -> str:
    return method_page(method, registry.load(method, plugins()).does)


def on_site() -> dict[str, Callable[[], str]]:
    """A page that only the site has -> what makes it. Its links are those of a file with this name."""
    return {
        "docs/papers.md": papers.page,
        "docs/map.md": source.module_map,
        **{f"docs/bench/{method}.md": partial(_on_the_bench, method) for method in methods_run()},
    }


def write(root: Path, dry: bool = False) -> list[str]:
    """Writes every generated page that is in git under `root`, the folder of the checkout.

    Args:
        dry: change nothing.

    Returns:
        The pages that were not up to date.

    Raises:
        ConfigError: `root` is no checkout, or a page lacks the marks of its generated part.
    """
    if not (root / "docs").is_dir():
        raise ConfigError(f"{root} has no folder docs. Run the command in a checkout of rl-plugins, or name one.")
    made = dict(PAGES)
    for guide in sorted((root / "docs" / "guides").glob("*.md")):
        made[str(guide.relative_to(root))] = partial(with_code, folder=root / "examples" / "guides")
    old = {page: (root / page).read_text(encoding="utf-8") if (root / page).exists() else "" for page in made}
    new = {page: make(old[page]) for page, make in made.items()}
    stale = [page for page in made if new[page] != old[page]]
    for page in stale if not dry else ():
        write_text(root / page, new[page])
    return stale
