"""The loss of DORA (arXiv 2509.18883): PPO around the policy that generated, weighted for the engine that sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import (
    Method,
    MethodError,
    MethodParams,
    Rollouts,
    Run,
    Shape,
    Terms,
    Tokens,
    from_params,
    param,
    ppo_clip,
    signals,
)
from rl_plugins.core.losses import LOG_RATIO_LIMIT, Live, finite
from rl_plugins.core.method import SameAs

_ACTOR = "actor_rollout_ref.actor"


class DoraLoss(Method):
    """PPO with three clip bounds, a truncated weight for the engine, and a constant divisor.

    Per token of a row with advantage A:

        r = exp(lp - lp^mu)
        w = min(exp(lp^mu - lp^e), C),   without gradient
        f = min(r A, clip(r, 1 - e_neg_low, 1 + e_pos_high) A),   and at least e_neg_high A where A < 0
        J = 1 / (G T_max) sum of w f over the rows and tokens of a group,   loss = -mean of J over the prompts

    `mu` says which weights make lp^mu. `start`: those at the start of the step, the host's old log-probs. `version`:
    those that generated the token, for which verl's `separate_async` keeps a copy of every published version and makes
    one forward pass per older version. Without such copies a row of older weights ends the run.

    Symbols: lp, lp^mu, lp^e (the engine's) log-probs in nats, A, f, all (rows, time). G is the number of trained rows
    of the group, masked ones included; T_max the host's completion limit in tokens. Ratios are float32 or better;
    differences of log-probs are limited to 20 nats before `exp`.

    Special cases: a log-ratio that is not finite counts as 0, so r or w is 1; such an r has no gradient. Tokens that
    are not trained have loss and gradient 0 for any value. Groups of different size get the weights (rows / groups) /
    G, so that the host's mean over rows is the mean over prompts.

    Raises:
        MethodError: `mu: version` and a row that older weights generated, where the host keeps no older weights.

    Source: arXiv 2509.18883, equation 4; no training code. The golden case is verl's loss with the same constants.
    """

    name = "dora_loss"
    fidelity = "paper"
    does = "Clips around the generating policy with three bounds and caps the engine's importance weight"
    problems = ("stale",)
    host_options = {
        "trl": {"vllm_importance_sampling_correction": False, "loss_type": "dr_grpo"},
        "verl": {
            f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
            f"{_ACTOR}.loss_scale_factor": SameAs("data.max_response_length"),
        },
    }
    corrects_sampling = True
    _kept = False  # the host keeps older weights
    needs = from_params(lambda p: signals("rollout_logprobs", token_versions=p.mu == "version"))
    old_policy = from_params(lambda p: "generating" if p.mu == "version" else "proximal")

    @dataclass(frozen=True)
    class Params(MethodParams):
        neg_low: float = param(0.2, "e_neg_low, lower clip range: r is clipped at 1 - neg_low", ge=0, le=1)
        pos_high: float = param(
            0.28, "e_pos_high, upper clip range: r is clipped at 1 + pos_high", ge=0, allow_inf=True
        )
        neg_high: float = param(3.0, "e_neg_high, largest ratio that counts where A < 0", gt=1, allow_inf=True)
        weight_cap: float = param(2.0, "C, upper bound of the engine's weight w", gt=0, allow_inf=True)
        mu: Literal["start", "version"] = param(
            "start", "weights of the centre: of the step's start, or that generated"
        )

    def start(self, run: Run) -> None:
        self._kept = run.keeps_versions

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        """The weight of every row that makes the mean over rows the mean over prompts."""
        if self.params.mu == "version" and not self._kept:
            self._all_newest(rollouts)
        groups = rollouts.groups
        size = groups.rows(groups.size.double())
        return Shape(row_columns={"dora_share": len(rollouts) / (groups.count * size)})

    def _all_newest(self, rollouts: Rollouts) -> None:
        stale = rollouts.staleness > 0
        if bool(stale.any()):
            raise MethodError(
                f"`mu: version` needs log-probs of the weights that generated each row, and {int(stale.sum())} of "
                f"{len(stale)} rows are up to {int(rollouts.staleness.max())} published weights old. Only "
                f"verl's separate_async keeps older weights. Set method_params.dora_loss.mu=start, or train without "
                f"staleness."
            )

    def policy_loss(self, terms: Terms) -> Tensor:
        p, live = self.params, Live(terms)
        lp, mu, engine, adv = live.all("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
        change, log_weight = finite(lp - mu), finite(mu - engine)
        uncapped = torch.exp(log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).detach()
        weight = uncapped.clamp(max=p.weight_cap)
        bound = None if math.isinf(p.neg_high) else p.neg_high
        loss = ppo_clip(change, torch.zeros_like(change), adv, p.neg_low, p.pos_high, bound)
        ratio = torch.exp(change.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        plain, clipped = ratio * adv, ratio.clamp(1 - p.neg_low, 1 + p.pos_high) * adv
        live.log_means(
            self,
            weight_mean=weight,
            weight_capped=uncapped > p.weight_cap,
            clipfrac=clipped < plain,
            clipfrac_negative=(adv < 0) & (torch.minimum(plain, clipped) < p.neg_high * adv),
        )
        live.log_extreme(self, "weight_max", weight, "max")
        return terms.columns["dora_share"].to(live.dtype) * weight * loss
