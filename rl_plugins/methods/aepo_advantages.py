"""AEPO's advantages: each token's advantage is scaled by the policy's uncertainty at that token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_plugins import Method, MethodParams, Rollouts, Shape, Tokens, param
from rl_plugins.core.groups import empty, parts
from rl_plugins.core.params import above
from rl_plugins.kit.whole_batch import Spread, live_tokens

_SPREAD = 1e-6  # relative; a standard deviation below it is rounding


class AepoAdvantages(Method):
    """Gives uncertain tokens larger advantages and certain tokens smaller ones.

    After any estimator, for every token t of the batch:

        z_t  = (H_t - mean H) / std H           over all tokens of the batch, unbiased
        A_t <- A_t (1 + weight z_t)             z is a constant of the update

    z is not limited, as in the authors' code: where z < -1/weight (-5) an advantage changes its sign. Entropies of
    language models are rarely that low: their distribution has its long tail on the other side. `z_max` limits |z|. z
    has mean 0, so with equal |A| the total stays the same.

    Symbols: A (tokens,) float64; H (tokens,) in nats, of the policy before the update.

    Special cases: a constant entropy (std up to 1e-6 max(1, |mean|), which is rounding) has z = 0, and so has a batch
    of one token. Tokens that left the update and rows without a reward (NaN) do not count in mean and deviation and
    keep their advantage. An advantage of 0 stays 0.

    Source: arXiv 2510.14545, entropy-aware advantage estimation; `compute_policy_loss_entropy_balanced_clipping` in
    `AEPO/verl_aepo_entropy/verl/trainer/ppo/core_algos.py` of the authors' code.
    """

    name = "aepo_advantages"
    fidelity = "code"
    does = "Gives uncertain tokens larger advantages and certain tokens smaller ones"
    problems = ("exploration", "agents")
    needs = frozenset({"tokens", "entropies"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        weight: float = param(0.2, "weight of the z-scored entropy", ge=0)
        z_max: float | None = param(
            None, "limit of |z|; none: no limit (the authors' code)", gt=0, only_if={"weight": above(0)}
        )

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        p, before, entropy = self.params, tokens.advantages, tokens.entropies
        assert entropy is not None  # in `needs`
        live = live_tokens(rollouts, tokens)
        n = int(torch.count_nonzero(live))
        if not n:
            return None
        spread = Spread.of(lambda part: entropy[part].double(), live)
        constant = spread.std <= _SPREAD * max(1, abs(spread.mean))
        after, low, high = empty(len(before)), [], []
        signed = changed = 0
        for part in parts(len(live)):
            a = before[part]
            z = torch.zeros_like(a) if constant else spread.centered(entropy[part].double()).div_(spread.std)
            if p.z_max is not None:
                z.clamp_(-p.z_max, p.z_max)
            if n < len(live):
                z.mul_(live[part])
            factor = 1 + p.weight * z
            torch.mul(a, factor, out=after[part])
            low.append(float(z.min()))  # the mean of z is 0, so the zeros of other tokens are no extremes
            high.append(float(z.max()))
            signed += int(torch.count_nonzero(a if n == len(live) else a * live[part]))
            if 1 + p.weight * low[-1] < 0:
                changed += int(torch.count_nonzero((factor < 0) & (a != 0)))
        self.log("z_max", max(high), "max")
        self.log("z_min", min(low), "min")
        if signed:
            self.log("sign_changed", changed / signed)
        return Shape(advantages=after)
