"""The cards in docs/supervised.md: losses for supervised trainers, from their modules."""

from __future__ import annotations

from rl_plugins.cards.catalog import FIDELITY
from rl_plugins.cards.results import measured_of
from rl_plugins.lab.pages.methods import bullets, measured, parameter_table, with_formulas
from rl_plugins.lab.pages.parts import filled
from rl_plugins.runtime.card_file import card_file
from rl_plugins.tools.supervised import LOSSES, SupervisedLoss, card_of


def with_cards(text: str) -> str:
    """The page with the cards between its marks."""
    return filled(text, "losses", "\n\n".join(card(card_of(name)) for name in LOSSES))


def card(loss: SupervisedLoss) -> str:
    """One loss, with a heading of the second level."""
    file = card_file(loss.name)
    p = file.paper
    assert p is not None
    parts = [f"## {loss.name}", f"[{p.title}]({p.url}), {p.authors}, {p.year}.", f"**{loss.does}.**"]
    parts += [with_formulas(loss.about), f"**Use it when:** {file.use_when}", f"**Not when:** {file.avoid_when}"]
    parts += [f"**What it costs:** {file.cost}", f"**What we measured:** {measured(measured_of(loss.name))}"]
    parts.append(parameter_table(loss.params))
    parts.append("**Where paper and code differ:**\n\n" + bullets(file.disagreements))
    if file.open:
        parts.append("**What is not known:**\n\n" + bullets(o.text for o in file.open))
    parts.append(f"**Fidelity:** {loss.fidelity}: {FIDELITY[loss.fidelity]}.")
    return "\n\n".join(parts)
