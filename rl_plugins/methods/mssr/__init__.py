"""MSSR (arXiv 2512.18215): one rollout per prompt. The bundle, its parts, and its sampler of prompts."""

from __future__ import annotations

from rl_plugins.method import Bundle, Measured
from rl_plugins.methods.mssr.baseline import MssrBaseline
from rl_plugins.methods.mssr.prompts import MssrPrompts
from rl_plugins.methods.mssr.shaping import MssrShaping
from rl_plugins.methods.mssr.tracker import PAPER, PAPER_SETTINGS

MSSR = Bundle(
    name="mssr",
    parts={"mssr_baseline": {}, "mssr_shaping": {}},
    paper=PAPER,
    about=(
        "One rollout per prompt and more prompts: the baseline is a discounted count of each "
        "prompt's own successes (`mssr_baseline`), and a bonus for uncertain tokens should "
        "prevent entropy collapse (`mssr_shaping`). Without the second part it is the paper's "
        "ablation MVSR. The authors' prompt sampler is off in their runs and not part of the "
        "bundle; add `mssr_prompts` to use it. The paper's runs have a KL loss to the reference "
        "policy of weight 0.01, gradient norm 0.5, batches of 2048 prompts and learning rate "
        "1e-6."
    ),
    does="Trains one rollout per prompt with a remembered baseline and an entropy bonus",
    problems=("few_rollouts", "no_signal", "exploration"),
    measured=(
        Measured(
            "success at equal samples",
            "better",
            "94.0 ± 1.4 % against 88.9 ± 1.8 (GRPO, 8 prompts x 8)",
            "mssr-3-seeds",
        ),
        Measured(
            "entropy left",
            "worse",
            "17.4 ± 0.4 % against 28.6 ± 1.5 (GRPO, 8 prompts x 8)",
            "mssr-3-seeds",
        ),
        Measured(
            "right answers on held-out prompts in the demo, minus GRPO",
            "not told apart",
            "-0.027 ± 0.047",
            "the-advantage-methods-against-plain-grpo-in-the-demo-3-seeds",
        ),
    ),
    goes_with={
        "mssr_prompts": "The authors' sampler, which is off in their runs.",
    },
    paper_settings=PAPER_SETTINGS,
)

__all__ = ["MSSR", "MssrBaseline", "MssrPrompts", "MssrShaping"]
