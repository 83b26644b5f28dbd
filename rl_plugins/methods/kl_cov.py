"""KL-Cov (arXiv 2505.22617): a KL penalty on the tokens that lower entropy most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Rollouts, Shape, Terms, Tokens, param
from rl_plugins.core.losses import Live


class KlCov(Method):
    """Penalizes how far the tokens with the largest covariance of log-prob and advantage move.

    Over all N trained tokens of a batch, at the start of the step:

        c_t     = (log pi_old,t - mean log pi_old) (A_t - mean A)
        chosen  = the max(1, floor(ratio N)) tokens with the largest c, if c > 0
        loss   += coef |log pi_t - log pi_old,t|   for chosen tokens

    Likely tokens with a high advantage are those that make entropy fall; the rest of the loss stays the host's.

    Symbols: A, c, log pi_old (tokens,) float64; the penalty (rows, time), with a gradient through log pi.

    Special cases: tokens with the c of the last chosen one are chosen, too. Tokens that are not trained are in no mean.
    With one optimizer step per batch the penalty has no gradient, because log pi = log pi_old there.

    Source: arXiv 2505.22617, section 4.3; `compute_policy_loss_kl_cov` of verl, made from the authors' code.
    """

    name = "kl_cov"
    fidelity = "code"
    does = "Penalizes movement of the tokens whose log-prob and advantage have the largest covariance"
    problems = ("exploration",)
    needs = frozenset({"tokens", "old_logprobs", "several_updates"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        ratio: float = param(0.0002, "share of the tokens that are penalized", gt=0, le=1)
        coef: float = param(1.0, "weight of the penalty", gt=0)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        c = covariance(tokens)[tokens.keep]
        chosen = torch.zeros(len(tokens))
        if len(c):
            least = torch.topk(c, max(1, int(self.params.ratio * len(c)))).values[-1]
            chosen[tokens.keep] = ((c >= least) & (c > 0)).float()
            self.log("covariance", c.mean())
            self.log("chosen", chosen.sum(), "sum")
        return Shape(token_columns={"kl_cov": chosen})

    def regularize(self, terms: Terms) -> Tensor:
        live = Live(terms)
        lp, old = live.all("logprobs", "old_logprobs")
        penalty = self.params.coef * live(terms.columns["kl_cov"]) * (lp - old).abs()
        live.log_means(self, penalty=penalty)
        return penalty


def covariance(tokens: Tokens) -> Tensor:
    """(tokens,) float64 products of the differences of old log-prob and advantage from their means over the trained
    tokens."""
    old, advantages = tokens.old_logprobs.double(), tokens.advantages  # type: ignore[union-attr]  # in `needs`
    return (old - old[tokens.keep].mean()) * (advantages - advantages[tokens.keep].mean())
