"""MSSR's shaping: a small, capped bonus on the advantages of uncertain tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rl_plugins import Method, MethodParams, Rollouts, Shape, Tokens, from_params, param
from rl_plugins.core.groups import empty, parts
from rl_plugins.core.params import above

_ON = {"entropy_weight": above(0)}


class MssrShaping(Method):
    """Adds a bonus to the advantages of uncertain tokens, too small to turn a negative advantage positive.

    After any estimator, for every token of the batch:

        psi_it = min(entropy_weight H_it, |A_it| / cap)
        A_it  <- A_it + psi_it

    psi is a constant of the update: no gradient goes through it. For cap > 1 the sign of A never changes, at cap = 1 a
    negative A can become 0; a token with A = 0 or H = 0 is unchanged, and entropy_weight = 0 changes nothing.

    Symbols: A (tokens,) float64; H (tokens,) in nats, of the policy before the update: `entropy: sampled` is -p log p
    of the sampled token alone, p = exp(log pi_old), at most 1/e = 0.368 (authors' code); `entropy: full` is the entropy
    of the next-token distribution (paper).


    Source: arXiv 2512.18215, entropy-based advantage shaping; `compute_entropy_advantage_shaping` and
    `compute_token_entropy` in `verl/trainer/core_algos.py` of the authors' code.
    """

    name = "mssr_shaping"
    fidelity = "code"
    does = "Adds a small, capped bonus to the advantages of uncertain tokens"
    problems = ("exploration",)
    needs = from_params(lambda p: {"tokens", "old_logprobs" if p.entropy == "sampled" else "entropies"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        entropy_weight: float = param(0.4, "alpha, weight of the entropy (paper: 0.2 to 0.6)", ge=0)
        cap: float = param(2.0, "kappa: the largest bonus is |A| / kappa", gt=0, only_if=_ON)
        entropy: Literal["sampled", "full"] = param(
            "sampled", "of the sampled token, -p log p (code), or of the whole distribution (paper)", only_if=_ON
        )

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        p, before = self.params, tokens.advantages
        column = tokens.old_logprobs if p.entropy == "sampled" else tokens.entropies
        assert column is not None  # in `needs`
        after, counts = empty(len(before)), torch.zeros(4, dtype=torch.float64)
        for part in parts(len(tokens)):
            keep, size, x = tokens.keep[part], before[part].abs(), column[part].double()
            entropy = torch.exp(x).neg_().mul_(x) if p.entropy == "sampled" else x
            wanted, cap = p.entropy_weight * entropy.clamp_(min=0), size / p.cap
            bonus = torch.minimum(wanted, cap)
            torch.add(before[part], bonus, out=after[part])
            live, capped = keep & (size > 0), wanted > cap
            found = [(bonus * keep).sum(), *(torch.count_nonzero(x) for x in (keep, capped & live, live))]
            counts += torch.stack(found)
        bonus_sum, kept, capped_tokens, live_tokens = counts
        self.log("bonus", bonus_sum / kept)
        self.log("capped", capped_tokens / live_tokens)
        return Shape(advantages=after)
