"""What TRL's model card, README.md of the output folder, says of the methods of a run."""

from __future__ import annotations

from typing import Any

import yaml

from rl_plugins import __version__
from rl_plugins.core.params import params_to_dict
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.config import as_names


def methods_section(stack: MethodStack) -> str:
    """A section of the card: what each method does, its paper, all parameters as they were, and citations."""
    lines: list[str] = []
    params: dict[str, Any] = {}
    citations: dict[str, str] = {}
    for m in stack.methods:
        if m.name in stack.names:
            paper = card_file(type(m)).paper
            bundle = f" (of `{stack.bundle_of[m.name]}`)" if m.name in stack.bundle_of else ""
            source = f" [{paper.title}]({paper.url})." if paper else ""
            lines.append(f"- `{m.name}`{bundle}: {m.does or 'a method of this run'}.{source}")
            params[m.name] = as_names(params_to_dict(m.params))
            if paper:
                citations.setdefault(paper.arxiv, paper.bibtex(m.name))
    config = {"methods": list(params), "method_params": {name: given for name, given in params.items() if given}}
    parts = [
        "## Methods",
        f"The trainer ran with methods of rl-plugins {__version__}, in this order:",
        "\n".join(lines),
        f"```yaml\n{yaml.safe_dump(config, sort_keys=False, width=100).rstrip()}\n```",
        *(["Cite the methods as:", "```bibtex\n" + "\n\n".join(citations.values()) + "\n```"] if citations else []),
    ]
    return "\n\n".join(parts) + "\n"
