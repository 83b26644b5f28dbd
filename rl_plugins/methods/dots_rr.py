"""DOTS with rollout replay (arXiv 2506.05316)."""

from __future__ import annotations

from rl_plugins import Bundle

DOTS_RR = Bundle(
    "dots_rr",
    parts={"rollout_replay": {}, "dots": {}, "decoupled_ppo": {"action": "none"}},
    does="Picks prompts of medium predicted difficulty and replays stored groups for half of the batch",
    problems=("no_signal", "too_easy", "too_hard", "few_prompts", "long_tail"),
)
