"""What the parts of ECHO that act after generation take for the confidence of the policy in a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_plugins.method import Paper
from rl_plugins.rollouts import Tokens

PAPER = Paper(
    "2602.02150",
    "ECHO: Entropy-Confidence Hybrid Optimization for Test-Time Reinforcement Learning",
    "Chu Zhao and Enneng Yang and Yuting Liu and Jianzhe Zhao and Guibing Guo",
    2026,
    code="user683/ECHO",
)
PAPER_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "trl": {
        "num_generations": 32,
        "learning_rate": 5e-7,
        "temperature": 0.8,
        "num_train_epochs": 80,
    },
    "verl": {
        "data.train_batch_size": 8,
        "actor_rollout_ref.rollout.n": 32,
        "actor_rollout_ref.actor.optim.lr": 5e-7,
        "actor_rollout_ref.rollout.temperature": 0.8,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "trainer.total_epochs": 80,
    },
}


def confidence(tokens: Tokens) -> Tensor:
    """(tokens,) float64 in [0, 1], the probability of each token by the policy before the update.

    The paper's C is the mean of the 5 largest probabilities in its place. No host's training pass gives these; the
    probability of the token itself is what the authors' code takes where sequences are packed without padding.
    """
    assert tokens.old_logprobs is not None  # in `needs` of those who ask
    return tokens.old_logprobs.double().exp().clamp(0, 1)
