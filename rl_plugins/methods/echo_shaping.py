"""ECHO's shaping: larger advantages where the policy is uncertain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Groups, Method, MethodParams, Rollouts, Shape, Tokens, from_params, param, signals
from rl_plugins.core.params import above
from rl_plugins.methods.echo.confidence import confidence

_EPS = 1e-8  # of the variance
_SHAPED = ({"mult_coeff": above(0)}, {"add_coeff": above(0)})
_WEIGHED = ({"alpha": above(0)}, {"beta": above(0)})


class EchoShaping(Method):
    """Scales every token's advantage by the policy's uncertainty: entropy and lack of confidence.

    After any estimator, for the tokens t of the batch:

        white(x) = (x - mean x) / sqrt(var x + 1e-8)           over all tokens of the batch, variance with n - 1
        S_t      = clip(alpha white(H)_t + beta white(1 - C)_t, -s_max, s_max)
        A_t     <- A_t (1 + mult_coeff S_t)
        A_t     <- A_t + add_coeff (S_t - mean of S over the tokens of t's group)

    `statistics: raw` uses H and 1 - C themselves instead of white(H) and white(1 - C). Where mult_coeff s_max < 1 the
    product keeps the sign of every advantage; the sum also gives advantages to groups of equal rewards.

    Symbols: A (tokens,) float64; H (tokens,) entropy in nats of the policy before the update; C (tokens,) in [0, 1],
    the probability of the token by that policy.

    Special cases: tokens that left the update and rows without a reward (NaN) do not count in the statistics and keep
    their advantage. A batch of one token has S = 0.


    Source: arXiv 2602.02150; `apply_hybrid_advantage_shaping` in `verl/trainer/ppo/core_algos.py` of the authors' code.
    """

    name = "echo_shaping"
    fidelity = "code"
    does = "Gives tokens with high entropy and low confidence larger advantages"
    problems = ("exploration",)
    needs = from_params(lambda p: signals("tokens", entropies=p.alpha, old_logprobs=p.beta))

    @dataclass(frozen=True)
    class Params(MethodParams):
        alpha: float = param(1.0, "weight of the entropy", ge=0, only_if=_SHAPED)
        beta: float = param(1.0, "weight of 1 - confidence", ge=0, only_if=_SHAPED)
        s_max: float | None = param(2.0, "limit of |S|; none: no limit", gt=0, only_if=_WEIGHED)
        mult_coeff: float = param(0.1, "factor a: the advantage is multiplied by 1 + a S", ge=0, only_if=_WEIGHED)
        add_coeff: float = param(0.0, "lambda: lambda (S - its mean in the group) is added", ge=0, only_if=_WEIGHED)
        statistics: Literal["white", "raw"] = param(
            "white", "H and 1 - C as z-scores (code) or as they are (paper)", only_if=_WEIGHED
        )

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        p, before = self.params, tokens.advantages
        live = tokens.keep & ~torch.isnan(rollouts.reward)[tokens.row]
        if not bool(live.any()):
            return None
        score = torch.zeros_like(before)
        if p.alpha:
            assert tokens.entropies is not None  # in `needs`
            score = score + p.alpha * self._scaled(tokens.entropies.double(), live)
        if p.beta:
            score = score + p.beta * self._scaled(1 - confidence(tokens), live)
        if p.s_max is not None:
            self.log("clipped", (score.abs() > p.s_max)[live].double().mean())
            score = score.clamp(-p.s_max, p.s_max)
        after = before * (1 + p.mult_coeff * score)
        if p.add_coeff:
            groups = Groups(rollouts.group[tokens.row])
            mean = groups.rows(groups.mean(torch.where(live, score, torch.nan)))
            after = after + p.add_coeff * (score - mean)
        after = torch.where(live, after, before)
        self.log("change", (after - before)[live].abs().mean())
        signed = live & (before != 0)
        if bool(signed.any()):
            self.log("sign_changed", (after * before < 0)[signed].double().mean())
        return Shape(advantages=after)

    def _scaled(self, x: Tensor, live: Tensor) -> Tensor:
        if self.params.statistics == "raw":
            return x
        everything = Groups.one(len(x))
        centered, std = everything.center_and_std(torch.where(live, x, torch.nan))
        return torch.nan_to_num(centered / torch.sqrt(std**2 + _EPS), nan=0.0)
