"""Two methods that work and a bundle of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_plugins import Bundle, Method, MethodParams, Rollouts, Shape, Tokens, param


class DummyScale(Method):
    """Advantages are the distance to the group's mean times `factor`.

        A_i = factor * (r_i - mean(r))

    Symbols: r (rows,) rewards of a group, A (rows,) advantages. Rows without a reward (NaN) are out of the mean and
    have A = 0.

    Raises: ConfigError for a parameter out of range.

    Source: arXiv 2402.03300 in name only, this is for tests.
    """

    name = "dummy_scale"
    fidelity = "paper"

    @dataclass(frozen=True)
    class Params(MethodParams):
        factor: float = param(2.0, "what distances are multiplied by", gt=0)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        distance = rollouts.reward - rollouts.groups.rows(rollouts.groups.mean(rollouts.reward))
        return self.params.factor * distance.nan_to_num(0.0)


class DummyShift(Method):
    """Adds `shift` to the advantage of every token.

        A_t <- A_t + shift

    Symbols: A_t (tokens,) advantages.

    Raises: ConfigError for a parameter that is no number.

    Source: arXiv 2402.03300 in name only, this is for tests.
    """

    name = "dummy_shift"
    needs = frozenset({"tokens"})
    fidelity = "paper"

    @dataclass(frozen=True)
    class Params(MethodParams):
        shift: float = param(1.0, "what is added to every advantage")

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        return Shape(advantages=tokens.advantages + self.params.shift)


BOTH = Bundle("dummy_both", {"dummy_scale": {"factor": 3.0}, "dummy_shift": {}})
