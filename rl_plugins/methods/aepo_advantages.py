"""AEPO's advantages: each token's advantage is scaled by the policy's uncertainty at that token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_plugins import Groups, Method, MethodParams, Rollouts, Shape, Tokens, param
from rl_plugins.core.params import above

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
        assert tokens.entropies is not None  # in `needs`
        live = tokens.keep & ~torch.isnan(rollouts.reward)[tokens.row]
        if not bool(live.any()):
            return None
        entropy = torch.where(live, tokens.entropies.double(), torch.nan)
        everything = Groups.one(len(tokens))
        centered, std = everything.center_and_std(entropy)
        constant = std <= _SPREAD * everything.mean(entropy).abs().clamp(min=1)
        z = torch.nan_to_num(torch.where(constant, 0.0, centered / std), nan=0.0)
        if self.params.z_max is not None:
            z = z.clamp(-self.params.z_max, self.params.z_max)
        before = tokens.advantages
        after = before * (1 + self.params.weight * z)
        self.log("z_max", z[live].max(), "max")
        self.log("z_min", z[live].min(), "min")
        signed = live & (before != 0)
        if bool(signed.any()):
            self.log("sign_changed", (after * before < 0)[signed].double().mean())
        return Shape(advantages=after)
