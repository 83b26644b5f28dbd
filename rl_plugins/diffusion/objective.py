"""What is minimized: objectives over the transitions of a batch, and PPO's clipped surrogate as one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_plugins.core.denoising import Sample, Transition
from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.rollouts import Terms
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.flows import sde_mean, sde_std, transition_kl, transition_logprob
from rl_plugins.diffusion.policy import Policy, Weights
from rl_plugins.diffusion.rows import LocalRow
from rl_plugins.runtime import update
from rl_plugins.runtime.metrics import Metrics
from rl_plugins.runtime.stack import MethodStack


@dataclass(frozen=True)
class TransitionBatch:
    """Transitions of some rows, flat.

    Args:
        start, end: (tokens, ..) latents before and after each.
        clean: (tokens, ..) the finished latent of its row.
        step: (tokens,) of the grid.
        sigma, following: (tokens,) noise levels before and after.
        conditions: of each.
        advantages: (tokens,) within the bounds of `advantage_clip`.
        keys: of each a text that is its own in the whole run, for random numbers (`rl_plugins.core.denoising.noise`).
    """

    start: Tensor
    end: Tensor
    clean: Tensor
    step: Tensor
    sigma: Tensor
    following: Tensor
    conditions: Sequence[Any]
    advantages: Tensor
    keys: Sequence[str]

    def part(self, rows: slice) -> TransitionBatch:
        """Some of them."""
        return TransitionBatch(**{name: value[rows] for name, value in vars(self).items()})


def transition_batch(
    policy: Policy, chosen: Sequence[tuple[LocalRow, Transition]], advantages: Tensor | None = None, purpose: str = ""
) -> TransitionBatch:
    """Transitions of some rows, on the device of the policy.

    Args:
        advantages: of each; None: 0.
        purpose: makes their keys those of one optimizer step.
    """
    device = policy.device
    step = torch.tensor([t.step for _, t in chosen], device=device)
    levels = torch.tensor(policy.grid(policy.config.steps), device=device)

    def stacked(latents: list[Tensor]) -> Tensor:
        return torch.stack([x.to(device) for x in latents])

    return TransitionBatch(
        start=stacked([t.start for _, t in chosen]),
        end=stacked([t.end for _, t in chosen]),
        clean=stacked([row.sample.latent for row, _ in chosen]),
        step=step,
        sigma=levels[step],
        following=levels[step + 1],
        conditions=[row.condition for row, _ in chosen],
        advantages=torch.zeros(len(chosen), device=device) if advantages is None else advantages.to(device),
        keys=[f"{purpose}|{row.sample.key}|{t.step}" for row, t in chosen],
    )


class Objective:
    """Base of all objectives. One instance per run, on every rank.

    Class attributes an objective sets:
        name: as in `DiffusionConfig.objective`.
        missing: hooks and signals of methods that have no meaning with it -> why and what to change.

    Attributes:
        stochastic: whether samples are made with noise on the way, where a program does not say.
    """

    name: ClassVar[str] = ""
    missing: ClassVar[Mapping[str, str]] = {}
    stochastic = True

    def __init__(self, policy: Policy, config: DiffusionConfig) -> None:
        self.policy, self.config = policy, config

    def tokens(self, sample: Sample) -> tuple[Transition, ...]:
        """The transitions of a sample that are trained, in order."""
        return sample.trained

    def sampling(self) -> contextlib.AbstractContextManager[Any]:
        """Wraps the making of samples, for an objective that samples with other weights."""
        return contextlib.nullcontext()

    def outputs(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """(tokens,) values with gradient that the loss is made of. Those of a part of a batch must not depend on the
        other parts. "logprobs", if there is one, is what hooks in the loss see."""
        raise NotImplementedError

    def loss(
        self, terms: Terms, outputs: Mapping[str, Tensor], stack: MethodStack, metrics: Metrics
    ) -> tuple[Tensor, Tensor | None]:
        """(rows, time) of what is averaged as the config says; and what methods add, which they may want as a sum.

        Args:
            outputs: (rows, time) each.
        """
        raise NotImplementedError

    def after_update(self, step: int) -> None:
        """After each optimizer step, which are counted from 1."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors for a checkpoint."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""


class ClippedPPO(Objective):
    """`-min(rho A, clip(rho, 1 - c, 1 + c) A) + beta KL`, rho = exp(new - old log-density) of each transition.

    Methods may replace the surrogate (`policy_loss`) and add terms (`regularize`).
    """

    name = "ppo"

    def __init__(self, policy: Policy, config: DiffusionConfig) -> None:
        super().__init__(policy, config)
        if config.objective_params:
            raise ConfigError(
                f"objective_params={shown(dict(config.objective_params))} is given, and the objective ppo has none. "
                f"Its options are clip_range, advantage_clip and beta."
            )

    def outputs(self, batch: TransitionBatch) -> dict[str, Tensor]:
        mean, std = self._normal("policy", batch)
        found = {"logprobs": transition_logprob(batch.end, mean, std)}
        if self.config.beta:
            with torch.no_grad():
                reference, _ = self._normal("reference", batch)
            found["kl"] = transition_kl(mean, reference, std)
        return found

    @torch.no_grad()
    def reference_logprobs(self, batch: TransitionBatch) -> Tensor:
        """(tokens,) of the reference policy."""
        return transition_logprob(batch.end, *self._normal("reference", batch))

    def _normal(self, weights: Weights, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        v = self.policy.velocity(weights, batch.start, batch.sigma, batch.conditions)
        eta = self.config.eta
        mean = sde_mean(batch.start, v, batch.sigma, batch.following, eta)
        return mean, sde_std(batch.sigma, batch.following, eta)

    def loss(
        self, terms: Terms, outputs: Mapping[str, Tensor], stack: MethodStack, metrics: Metrics
    ) -> tuple[Tensor, Tensor | None]:
        count, c = terms.mask.sum(), self.config.clip_range
        ratio = torch.exp((terms.logprobs - terms.old_logprobs).detach())
        metrics.add("ratio", update.masked_sum(ratio, terms.mask) / count.clamp(min=1), "mean", count)
        host = torch.zeros_like(terms.logprobs)
        own = None
        if stack.claims["policy_loss"]:
            own = update.surrogate(stack, terms)
        else:
            host = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, c, c)
            low, high = (ratio < 1 - c) & (terms.advantages < 0), (ratio > 1 + c) & (terms.advantages > 0)
            share = update.masked_sum((low | high).float(), terms.mask) / count.clamp(min=1)
            metrics.add("clip_ratio", share, "mean", count)
        if "kl" in outputs:
            host = host + self.config.beta * outputs["kl"]
            kl = update.masked_sum(outputs["kl"].detach(), terms.mask) / count.clamp(min=1)
            metrics.add("kl", kl, "mean", count)
        added = update.regularizer(stack, terms)
        if added is not None:
            own = added if own is None else own + added
        return host, own
