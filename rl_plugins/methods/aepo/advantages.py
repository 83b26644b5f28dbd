"""AEPO's advantages: each token's advantage is scaled by the policy's uncertainty at that token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_plugins.groups import Groups
from rl_plugins.method import Measured, Method
from rl_plugins.methods.aepo.paper import CODE_READ, PAPER, PAPER_SETTINGS
from rl_plugins.params import MethodParams, above, param
from rl_plugins.rollouts import Rollouts, Shape, Tokens

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

    Logs: `z_max`, `z_min`; `sign_changed`, share of the tokens with A != 0.

    Raises:
        ConfigError: a parameter out of range.

    Source: arXiv 2510.14545, entropy-aware advantage estimation; `compute_policy_loss_entropy_balanced_clipping` in
    `AEPO/verl_aepo_entropy/verl/trainer/ppo/core_algos.py` of the authors' code.
    """

    name = "aepo_advantages"
    paper = PAPER
    fidelity = "code"
    does = "Gives uncertain tokens larger advantages and certain tokens smaller ones"
    problems = ("exploration", "agents")
    measured = (
        Measured(
            "success against PPO's advantages",
            "not told apart",
            "-1.8 ± 2.6 points",
            "echo-aepo-3-seeds",
        ),
    )
    goes_with = {
        "aepo_clip": "The paper uses both in the same update.",
        "aepo_rollout": "The paper uses both: uncertainty decides where rollouts branch and what tokens weigh.",
    }
    use_when = (
        "A few uncertain tokens decide the outcome, for example the first tokens after the result of a tool call."
    )
    avoid_when = "Entropy is already high, or another method scales advantages by entropy."
    cost = (
        "No extra rollouts. Needs the entropy of the old policy at every token: in TRL one extra forward pass per "
        "batch, in verl none."
    )
    disagreements = (
        "The authors' code takes mean and deviation over each micro-batch, with the entropy of the current policy; "
        "here they are those of the whole batch before the update, so nothing depends on how it is split.",
        "The authors' code gives NaN for a single token and divides rounding by rounding where entropy is constant; "
        "here z is 0 in both cases.",
        CODE_READ,
    )
    needs = frozenset({"tokens", "entropies"})
    paper_settings = PAPER_SETTINGS

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
        everything = Groups(torch.zeros(len(tokens), dtype=torch.int64), count=1)
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
