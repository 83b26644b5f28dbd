"""Sol-RL (arXiv 2604.06916): a large cheap pool of samples, whose best and worst are trained."""

from __future__ import annotations

from rl_plugins.method import Bundle, Measured
from rl_plugins.methods.sol_rl.advantages import SolRlAdvantages
from rl_plugins.methods.sol_rl.choice import PAPER
from rl_plugins.methods.sol_rl.explore import PAPER_SETTINGS, SolRlExplore
from rl_plugins.methods.sol_rl.select import SolRlSelect

SOL_RL = Bundle(
    name="sol_rl",
    parts={"sol_rl_explore": {}, "sol_rl_select": {"oversample": 1.0}, "sol_rl_advantages": {}},
    paper=PAPER,
    about=(
        "For diffusion policies, in `rl_plugins.diffusion.DiffusionTrainer` with a cheap copy. A pool of seeds is "
        "explored by the copy with few steps, and the best and worst seeds are made again by the policy "
        "(`sol_rl_explore`). These samples alone are trained. A second choice among them is off, as in the authors' "
        "configs (`sol_rl_select`). Advantages have one scale in the batch (`sol_rl_advantages`). The paper's "
        "objective is `objective: nft` of the trainer. On text name `sol_rl_select` alone."
    ),
    does="Explores seeds with a cheap copy of a diffusion policy, and trains the best and worst made again",
    problems=("few_rollouts",),
    measured=(
        Measured(
            "reward of a small policy of images, mean over 32 batches, 6 of 24 seeds explored in FP4",
            "better",
            "0.780 ± 0.011 against 0.716 ± 0.022 (6 of 6 samples)",
            "sol_rl-5-seeds",
        ),
        Measured(
            "the same reward at equal passes of policy and copy together",
            "worse",
            "by 0.083 ± 0.018 than 6 of 6 samples",
            "sol_rl-5-seeds",
        ),
    ),
    paper_settings=PAPER_SETTINGS,
)

__all__ = ["SOL_RL", "SolRlAdvantages", "SolRlExplore", "SolRlSelect"]
