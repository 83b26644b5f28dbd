"""DARS and DARS-B (arXiv 2508.13755): more rollouts for hard prompts, and the whole batch in every optimizer step."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.dars.breadth import DarsBreadth
from rl_plugins.methods.dars.method import PAPER, PAPER_SETTINGS, Dars
from rl_plugins.methods.dars.schedule import helping, served

DARS_B = Bundle(
    name="dars_b",
    parts={"dars": {}, "dars_breadth": {}},
    paper=PAPER,
    about=(
        "Depth and breadth: more rollouts for hard prompts in a second round (`dars`), and a "
        "large batch that is trained as a whole, several times (`dars_breadth`). The authors' "
        "runs have 3072 prompts with 8 first rollouts, 2 passes, learning rate 5e-6 (1.5B), "
        "temperature 1, no KL, and responses of up to 3072 tokens."
    ),
    does="Combines more rollouts for hard prompts with full-batch updates",
    problems=("exploration", "no_signal"),
    measured=Dars.measured,
    paper_settings=PAPER_SETTINGS,
)

__all__ = ["DARS_B", "Dars", "DarsBreadth", "helping", "served"]
