"""Clip-Cov (arXiv 2505.22617): takes a few of the tokens that lower entropy most out of the update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_plugins import ConfigError, Method, MethodParams, Rollouts, Shape, Tokens, param
from rl_plugins.methods.kl_cov import covariance


class ClipCov(Method):
    """Gives no gradient to random tokens among those whose log-prob and advantage have a large covariance.

    Over all N trained tokens of a batch, at the start of the step:

        c_t     = (log pi_old,t - mean log pi_old) (A_t - mean A)
        chosen  = max(1, floor(ratio N)) random ones of the tokens with low < c < high
        A_t    <- 0   for chosen tokens

    They stay in the mean over tokens; the loss of all others is the host's.

    Symbols: A, c, log pi_old (tokens,) float64.

    Special cases: where fewer tokens lie between the bounds, all of them are chosen. Tokens that are not trained are
    in no mean.

    Raises:
        ConfigError: the bounds are out of order.

    Source: arXiv 2505.22617, section 4.3; `compute_policy_loss_clip_cov` of verl, made from the authors' code.
    """

    name = "clip_cov"
    fidelity = "code"
    does = "Gives no gradient to random tokens among those with a large covariance of log-prob and advantage"
    problems = ("exploration",)
    needs = frozenset({"tokens", "old_logprobs"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        ratio: float = param(0.0002, "share of the tokens that get no gradient", gt=0, le=1)
        low: float = param(1.0, "covariance above which a token may be chosen")
        high: float = param(5.0, "covariance below which a token may be chosen", allow_inf=True)

        def check(self) -> None:
            if self.low >= self.high:
                raise ConfigError(f"`low` is {self.low:g} and `high` {self.high:g}; the first must be lower.")

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        p, c, kept = self.params, covariance(tokens), tokens.keep
        between = (kept & (c > p.low) & (c < p.high)).nonzero()[:, 0]
        order = torch.from_numpy(self.rng("tokens").permutation(len(between)))
        chosen = between[order[: max(1, int(p.ratio * int(kept.sum())))]]
        self.log("between", len(between) / max(1, int(kept.sum())))
        self.log("chosen", len(chosen), "sum")
        return Shape(advantages=tokens.advantages.index_fill(0, chosen, 0.0))
