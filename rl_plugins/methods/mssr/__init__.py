"""MSSR (arXiv 2512.18215): one rollout per prompt. The bundle, its parts, and its sampler of prompts."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.mssr.baseline import MssrBaseline
from rl_plugins.methods.mssr.prompts import MssrPrompts
from rl_plugins.methods.mssr.shaping import MssrShaping
from rl_plugins.methods.mssr.tracker import PAPER

MSSR = Bundle(
    name="mssr",
    parts={"mssr_baseline": {}, "mssr_shaping": {}},
    paper=PAPER,
    about="One rollout per prompt and more prompts instead: the baseline is a discounted count of each prompt's own "
    "successes (`mssr_baseline`), and a bonus for uncertain tokens keeps the policy from collapsing (`mssr_shaping`). "
    "Without the second part it is the paper's ablation MVSR. The authors' sampler of prompts is off in their runs and "
    "not part of the bundle; add `mssr_prompts` for it. The paper's runs have a KL loss to the reference policy of "
    "weight 0.01, gradient norm 0.5, batches of 2048 prompts and learning rate 1e-6.",
)

__all__ = ["MSSR", "MssrBaseline", "MssrPrompts", "MssrShaping"]
