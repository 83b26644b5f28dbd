"""DOTS and the bundle with rollout replay (arXiv 2506.05316)."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.dots.files import (
    checked_embeddings,
    load_adapter,
    load_embeddings,
    save_adapter,
    save_embeddings,
)
from rl_plugins.methods.dots.method import Dots
from rl_plugins.methods.dots.training import steps_of, train_adapter
from rl_plugins.methods.rollout_replay.method import RolloutReplay

DOTS_RR = Bundle(
    name="dots_rr",
    parts={"rollout_replay": {}, "dots": {}, "decoupled_ppo": {"action": "none"}},
    paper=Dots.paper,
    about=(
        "Half of a batch consists of stored groups of earlier batches (`rollout_replay`). The "
        "prompts of the other half have predicted pass rates closest to one half (`dots`, which "
        "needs embeddings of the dataset and synchronous generation). The loss corrects for the "
        "policy that sampled, without a bound (`decoupled_ppo`). The authors' runs have batches "
        "of 512 prompts and groups of 8, 256 reference prompts every two batches, a buffer of "
        "512, and a clip range of 0.2. They report 23 to 62 % less time to the same accuracy."
    ),
    does="Picks prompts of medium predicted difficulty and replays stored groups for half of the batch",
    problems=("no_signal", "few_prompts", "long_tail"),
    measured=(*Dots.measured[:2], *RolloutReplay.measured[:2]),
    paper_settings=Dots.paper_settings,
)

__all__ = [
    "DOTS_RR",
    "Dots",
    "checked_embeddings",
    "load_adapter",
    "load_embeddings",
    "save_adapter",
    "save_embeddings",
    "steps_of",
    "train_adapter",
]
