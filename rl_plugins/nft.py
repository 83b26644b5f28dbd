"""DiffusionNFT (arXiv 2509.16117), the objective of Sol-RL: a policy is pulled towards good samples and pushed from bad
ones in the forward process, without log-probs.

Symbols: all predictions are velocities of a flow, dx/dt with x_t = (1 - t) x_0 + t noise, shape (samples, ...).

Source: loss block and `return_decay` of `train_scripts/sol_rl/` of NVlabs/Sana.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_plugins.errors import ConfigError

_LEAST = 1e-5  # of the adaptive weight

# decay type: steps before it begins, growth per step, largest value
_DECAY = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}
DECAY_TYPES = tuple(_DECAY)


@dataclass(frozen=True)
class NftLoss:
    """Parts of the loss, each (samples,) with gradient: `policy`, and `kl` without its factor."""

    policy: Tensor
    kl: Tensor


def noisy(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t of the forward process; t (samples,) in [0, 1]."""
    at = _wide(t, x0)
    return (1 - at) * x0 + at * noise


def optimality(advantages: Tensor, clip: float) -> Tensor:
    """r = clip(clip(A, +-c) / c / 2 + 1/2, 0, 1): the chance with which a sample counts as good."""
    return (advantages.clamp(-clip, clip) / clip / 2 + 0.5).clamp(0, 1)


def nft_loss(
    x0: Tensor,
    xt: Tensor,
    t: Tensor,
    new: Tensor,
    old: Tensor,
    ref: Tensor,
    advantages: Tensor,
    beta: float = 1.0,
    clip: float = 5.0,
) -> NftLoss:
    """The loss of each sample.

        v+ = beta v + (1 - beta) v_old            v- = (1 + beta) v_old - beta v
        x+- = x_t - t v+-                         l+- = mean (x+- - x_0)^2 / w+-,  w+- = max(mean |x+- - x_0|, 1e-5)
        policy = c (r l+ + (1 - r) l-) / beta     kl = mean (v - v_ref)^2

    Args:
        x0: the sample. xt: at time t, see `noisy`. t: (samples,) in [0, 1].
        new, old, ref: velocities at xt of the trained policy, the frozen old one and the reference; a gradient goes
            through the first alone.
        advantages: (samples,).
        beta: how far the good and the bad policy are from the old one.
        clip: c, limit of |advantage|.

    Returns:
        Means are over all dimensions but the first.
    """
    old, ref, at = old.detach(), ref.detach(), _wide(t, x0)
    good = _distance(xt - at * (beta * new + (1 - beta) * old), x0)
    bad = _distance(xt - at * ((1 + beta) * old - beta * new), x0)
    r = optimality(advantages, clip)
    return NftLoss(clip * (r * good + (1 - r) * bad) / beta, _mean((new - ref) ** 2))


def decay(step: int, kind: int) -> float:
    """The share of the old policy that stays after an update; the trained one has the rest.

    Args:
        step: optimizer steps so far.
        kind: 0: none stays. 1: min(0.001 step, 0.5). 2: 0 up to step 75, then min(0.0075 (step - 75), 0.999).

    Raises:
        ConfigError: another kind.
    """
    if kind not in _DECAY:
        raise ConfigError(f"the decay type of the old policy is {kind}. It must be one of {DECAY_TYPES}.")
    begin, growth, most = _DECAY[kind]
    return min(max(step - begin, 0) * growth, most)


def _wide(t: Tensor, x: Tensor) -> Tensor:
    return t.view(-1, *[1] * (x.ndim - 1))


def _mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def _distance(x: Tensor, x0: Tensor) -> Tensor:
    """(samples,) squared distance, divided by the (constant) mean distance."""
    change = x - x0
    weight = _mean(change.detach().double().abs()).clamp(min=_LEAST)
    return _mean(change**2 / _wide(weight, x0))
