"""AEPO (arXiv 2510.14545): entropy-balanced rollouts and updates of agents. The bundle and its parts."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.aepo.advantages import AepoAdvantages
from rl_plugins.methods.aepo.clip import AepoClip
from rl_plugins.methods.aepo.paper import PAPER, PAPER_SETTINGS
from rl_plugins.methods.aepo.rollout import AepoRollout

AEPO = Bundle(
    name="aepo",
    parts={"aepo_rollout": {}, "aepo_clip": {}, "aepo_advantages": {}},
    paper=PAPER,
    about=(
        "Rollouts of an agent start from the prompt or branch after uncertain turns, with a penalty on "
        "branching in many rounds in a row (`aepo_rollout`, which needs an environment). Clipping keeps "
        "the gradient of tokens that become more likely (`aepo_clip`), and uncertain tokens get larger "
        "advantages (`aepo_advantages`). The last two also work without agents. The authors' runs use 12 "
        "rollouts per prompt (14B), 6 of them from the prompt, batches of 64 prompts in mini-batches of 8, "
        "5 epochs on 1,000 prompts, prompts of 2,000 and completions of 6,192 tokens. This is not "
        "Arbitrary Entropy Policy Optimization, which has the same acronym."
    ),
    does="Branches an agent's rollouts at uncertain turns and gives uncertain tokens more weight in the update",
    problems=("agents", "exploration"),
    measured=(*AepoClip.measured, *AepoAdvantages.measured, *AepoRollout.measured),
    paper_settings=PAPER_SETTINGS,
)

__all__ = ["AEPO", "AepoAdvantages", "AepoClip", "AepoRollout"]
