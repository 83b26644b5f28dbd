"""Where BranchGRPO comes from."""

from __future__ import annotations

from rl_plugins.method import Paper

PAPER = Paper(
    "2509.06040",
    "BranchGRPO: Stable and Efficient GRPO with Structured Branching in Diffusion Models",
    "Yuming Li and Yikai Wang and Yuying Zhu and Zhongyu Zhao and Ming Lu and Qi She and Shanghang Zhang",
    2025,
    code="Fredreic1849/BranchGRPO",
)

READ = "The paper was read through detailed notes that quote its equations, and the code in full."

# Of the authors' script for FLUX, where a host has the option. Rollouts of a prompt are the leaves of its tree.
PAPER_SETTINGS: dict[str, dict[str, object]] = {
    "trl": {"num_generations": 16, "learning_rate": 1e-5},
    "verl": {"actor_rollout_ref.rollout.n": 16, "actor_rollout_ref.actor.optim.lr": 1e-5},
    "diffusion": {"group_size": 16, "steps": 20, "shift": 3.0, "eta": 0.3, "learning_rate": 1e-5, "clip_range": 1e-3},
}
