"""What the parts of ECHO that act after generation take for the confidence of the policy in a token."""

from __future__ import annotations

from torch import Tensor

from rl_plugins import Tokens


def confidence(tokens: Tokens, part: slice | Tensor = slice(None)) -> Tensor:
    """Of a part of the tokens, float64 in [0, 1], the probability of each token by the policy before the update.

    The paper's C is the mean of the 5 largest probabilities in its place. No host's training pass gives these; the
    probability of the token itself is what the authors' code takes where sequences are packed without padding.
    """
    assert tokens.old_logprobs is not None  # in `needs` of those who ask
    return tokens.old_logprobs[part].double().exp().clamp(0, 1)
