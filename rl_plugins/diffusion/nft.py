"""DiffusionNFT (arXiv 2509.16117), the objective of Sol-RL: a policy is pulled towards good samples and pushed from bad
ones in the forward process, without log-probs, so samples may be made without noise on the way.

Symbols: all predictions are velocities of a flow, dx/dt with x_t = (1 - t) x_0 + t noise, shape (samples, ...).

Source: loss block and `return_decay` of `train_scripts/sol_rl/` of NVlabs/Sana.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_plugins.core.denoising import Sample, Transition, noise
from rl_plugins.core.errors import ConfigError, did_you_mean, shown
from rl_plugins.core.losses import widest
from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.rollouts import Terms
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.objective import Objective, TransitionBatch
from rl_plugins.diffusion.policy import Policy
from rl_plugins.runtime import update
from rl_plugins.runtime.metrics import Metrics
from rl_plugins.runtime.stack import MethodStack

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
    weight = _mean(change.detach().to(widest(change.device)).abs()).clamp(min=_LEAST)
    return _mean(change**2 / _wide(weight, x0))


_NO_DENSITY = "the objective nft has no densities of transitions. Set objective='ppo', or remove the method."


@dataclass(frozen=True)
class NftParams(MethodParams):
    """`objective_params` of the objective nft."""

    beta: float = param(1.0, "how far the good and the bad policy are from the old one", gt=0)
    decay: Literal[0, 1, 2] = param(1, "how much of the old policy stays after a batch, see `decay`")
    stochastic: bool = param(False, "noise on the way of samples, as ppo has it (authors: none)")


class DiffusionNft(Objective):
    """Pulls the policy towards good samples and pushes it from bad ones, in the forward process.

    Every step of a sample is a token. Noise of its level is added to the finished sample, and the loss is that of
    `nft_loss` there, with c = `advantage_clip`, plus `beta` times the squared distance of the velocity
    from that of the reference. The old policy makes the samples. It follows the trained one after each batch:
    `old = d old + (1 - d) new`, d = `decay(optimizer steps so far)`.
    """

    name = "nft"
    missing = {
        "policy_loss": _NO_DENSITY,
        "regularize": _NO_DENSITY,
        "old_logprobs": _NO_DENSITY,
        "rollout_logprobs": _NO_DENSITY,
        "ref_logprobs": _NO_DENSITY,
        "current_logprobs": _NO_DENSITY,
        "off_policy": _NO_DENSITY,
    }

    def __init__(self, policy: Policy, config: DiffusionConfig) -> None:
        super().__init__(policy, config)
        self.params = _params(config.objective_params)
        self.stochastic = self.params.stochastic
        self.old = {name: p.detach().clone() for name, p in policy.trained.items()}

    def tokens(self, sample: Sample) -> tuple[Transition, ...]:
        return sample.transitions

    def sampling(self) -> contextlib.AbstractContextManager[Any]:
        return self.policy.holding(self.old)

    def outputs(self, batch: TransitionBatch) -> dict[str, Tensor]:
        shape = tuple(batch.clean.shape[1:])
        fresh = torch.stack([noise(shape, key, "forward") for key in batch.keys]).to(batch.clean)
        xt = noisy(batch.clean, fresh, batch.sigma)

        def velocity(weights: Literal["policy", "reference"]) -> Tensor:
            return self.policy.velocity(weights, xt, batch.sigma, batch.conditions)

        with torch.no_grad():
            with self.policy.holding(self.old):
                old = velocity("policy")
            ref = velocity("reference") if self.config.beta else None
        new = velocity("policy")
        advantages, clip = batch.advantages, self.config.advantage_clip
        ref = new.detach() if ref is None else ref
        parts = nft_loss(batch.clean, xt, batch.sigma, new, old, ref, advantages, self.params.beta, clip)
        gap = (new.detach() - old).flatten(1).square().mean(1)
        return {"policy": parts.policy.float(), "kl": parts.kl, "gap": gap}

    def loss(
        self, terms: Terms, outputs: Mapping[str, Tensor], stack: MethodStack, metrics: Metrics
    ) -> tuple[Tensor, Tensor | None]:
        count = terms.mask.sum()
        for name, output in (("kl", "kl"), ("distance_to_old", "gap")):
            mean = update.masked_sum(outputs[output].detach(), terms.mask) / count.clamp(min=1)
            metrics.add(name, mean, "mean", count)
        return outputs["policy"] + self.config.beta * outputs["kl"], None

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        if step % self.config.updates_per_batch:
            return
        stays = decay(step, self.params.decay)
        for name, p in self.policy.trained.items():
            self.old[name].mul_(stays).add_(p, alpha=1 - stays)

    def state_dict(self) -> dict[str, Any]:
        return {"old": {name: value.cpu() for name, value in self.old.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, value in self.old.items():
            value.copy_(saved["old"][name])


def _params(given: Mapping[str, Any]) -> NftParams:
    known = list(NftParams.__dataclass_fields__)
    for name in given:
        if name not in known:
            raise ConfigError(
                f"objective_params has {shown(name)}, which the objective nft does not know."
                f"{did_you_mean(str(name), known)} It has: {', '.join(known)}."
            )
    try:
        return NftParams(**given)
    except ConfigError as e:
        raise ConfigError(f"objective_params: {e}") from None
