"""ECHO's shaping: larger advantages where the policy is uncertain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Groups, Method, MethodParams, Rollouts, Shape, Tokens, from_params, param, signals
from rl_plugins.core.groups import empty, parts
from rl_plugins.core.params import above
from rl_plugins.kit.whole_batch import Spread, live_tokens
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
        live = live_tokens(rollouts, tokens)
        n = int(torch.count_nonzero(live))
        if not n:
            return None
        scores = self._scores(tokens, live)
        after, level, counts = empty(len(before)), None, torch.zeros(3, dtype=torch.float64)
        no_token, keeps_signs = torch.tensor(0), not p.add_coeff and p.mult_coeff * (p.s_max or torch.inf) < 1
        if p.add_coeff:
            of_row, score = rollouts.groups.index.index_select(0, tokens.row), torch.full_like(before, torch.nan)
            for part in parts(len(live)):
                score[part] = torch.where(live[part], self._limited(scores(part)), torch.nan)
            level = Groups(of_row, count=rollouts.groups.count).mean(score)
        for part in parts(len(live)):
            a, raw = before[part], scores(part)
            score = self._limited(raw)
            change = a * score * p.mult_coeff
            if level is not None:
                change += p.add_coeff * (score - level.index_select(0, of_row[part]))
            clipped = raw != score
            if n < len(live):
                change, clipped = torch.where(live[part], change, 0.0), clipped & live[part]
            new = torch.add(a, change, out=after[part])
            flipped = no_token if keeps_signs else torch.count_nonzero(new * a < 0)
            counts += torch.stack([change.abs_().sum(), torch.count_nonzero(clipped), flipped])
        change, clipped, flipped = counts.tolist()
        if p.s_max is not None:
            self.log("clipped", clipped / n)
        self.log("change", change / n)
        signed = (int(torch.count_nonzero(before[part] * live[part])) for part in parts(len(live)))
        total = sum(signed) if flipped else next(filter(None, signed), 0)
        if total:
            self.log("sign_changed", flipped / total)
        return Shape(advantages=after)

    def _scores(self, tokens: Tokens, live: Tensor) -> Callable[[slice], Tensor]:
        """A part of the tokens -> S before its limit, float64."""
        p, terms = self.params, list[tuple[float, Callable[[slice], Tensor], Spread | None]]()
        entropies = tokens.entropies
        if p.alpha:
            assert entropies is not None  # in `needs`
            terms.append((p.alpha, lambda part: entropies[part].double(), None))
        if p.beta:
            terms.append((p.beta, lambda part: 1 - confidence(tokens, part), None))
        if p.statistics == "white":
            terms = [(weight, values, Spread.of(values, live)) for weight, values, _ in terms]

        def score(part: slice) -> Tensor:
            total = torch.zeros_like(tokens.advantages[part])
            for weight, values, spread in terms:
                x = values(part)
                if spread is not None:
                    x = spread.centered(x).div_((spread.std**2 + _EPS) ** 0.5)
                total.add_(x, alpha=weight)
            return total

        return score

    def _limited(self, score: Tensor) -> Tensor:
        limit = self.params.s_max
        return score if limit is None else score.clamp(-limit, limit)
