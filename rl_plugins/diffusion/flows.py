"""Flow matching as a stochastic policy: noise levels, steps and their log-densities, and the loop that serves requests.

Symbols: x (rows, ..) latents at the noise level sigma (rows,), from 1 (pure noise) down to 0; v their velocity, x at
level sigma being (1 - sigma) x0 + sigma noise; d = next sigma - sigma, below 0; eta the noise of the sampler.

    x0_hat = x - sigma v;   score = -(x - (1 - sigma) x0_hat) / sigma^2
    mean = x + d v - 0.5 eta^2 score d;   std = max(eta sqrt(-d), 1e-8);   x' = mean + std xi,  xi ~ N(0, 1)
    log-prob = mean over the elements of the latent of log N(x'; mean, std^2)

A deterministic step is x' = x + d v. With the exact velocity both keep the marginal of every noise level as d goes to
0.

Source: "BranchGRPO" (arXiv 2509.06040), `fastvideo/train_branchgrpo_flux.py`, flow_grpo_step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_plugins.core.denoising import Denoise, Model, Sample, SamplePrompt, Transition

LEAST_STD = 1e-8


def shifted_sigmas(total: int, shift: float = 3.0) -> tuple[float, ...]:
    """(total + 1) noise levels: even from 1 to 0, then a s / (1 + (a - 1) s) with the shift a."""
    even = [1 - i / total for i in range(total + 1)]
    return tuple(shift * s / (1 + (shift - 1) * s) for s in even)


def sde_mean(x: Tensor, v: Tensor, sigma: Tensor, following: Tensor, eta: float) -> Tensor:
    """Mean of a stochastic step."""
    s, d = _like(sigma, x), _like(following - sigma, x)
    score = -(x - (1 - s) * (x - s * v)) / s**2
    return x + d * v - 0.5 * eta**2 * score * d


def sde_std(sigma: Tensor, following: Tensor, eta: float) -> Tensor:
    """(rows,) its standard deviation."""
    return (eta * (sigma - following).sqrt()).clamp(min=LEAST_STD)


def ode_step(x: Tensor, v: Tensor, sigma: Tensor, following: Tensor) -> Tensor:
    """A deterministic step."""
    return x + _like(following - sigma, x) * v


def transition_logprob(end: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(rows,) mean over the elements of the log-density."""
    z = ((end - mean) / _like(std, mean)).flatten(1)
    return -0.5 * z.square().mean(1) - std.log() - 0.5 * math.log(2 * math.pi)


def transition_kl(mean: Tensor, other: Tensor, std: Tensor) -> Tensor:
    """(rows,) KL divergence of two normal distributions with the same deviation, mean over the elements."""
    return 0.5 * ((mean - other) / _like(std, mean)).flatten(1).square().mean(1)


def _like(per_row: Tensor, x: Tensor) -> Tensor:
    return per_row.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))


class Velocity(Protocol):
    """The model: (rows, ..) latents, (rows,) noise levels and the condition of each row -> (rows, ..) velocities."""

    def __call__(self, model: Model, x: Tensor, sigma: Tensor, conditions: Sequence[Any]) -> Tensor: ...


@dataclass
class _Served:
    """A request under way.

    Args:
        made: its children so far; before the first step none, because all of them share the pass of the sample.
        done: steps.
    """

    prompt: SamplePrompt
    request: Denoise
    made: list[Sample] = field(default_factory=list)
    done: int = 0

    @property
    def waiting(self) -> list[Sample]:
        return self.made if self.done else [self.request.sample]


def denoise(
    requests: Sequence[tuple[SamplePrompt, Denoise]],
    velocity: Velocity,
    grid: Callable[[int], Sequence[float]],
    eta: float,
    device: torch.device | str = "cpu",
) -> list[list[Sample]]:
    """Serves requests side by side: each step of all of them is one call of each model.

    Args:
        grid: number of steps T -> (T + 1) noise levels.
    """
    served = [_Served(prompt, request) for prompt, request in requests]
    for s in served:
        if not s.request.count:
            s.made = s.request.children()
    while True:
        pending = [s for s in served if s.done < s.request.count]
        for model in ("policy", "cheap"):
            asked = [s for s in pending if s.request.model == model]
            if asked:
                _step(asked, model, velocity, grid, eta, device)  # type: ignore[arg-type]
        if not pending:
            return [s.made for s in served]


def _step(
    served: Sequence[_Served],
    model: Model,
    velocity: Velocity,
    grid: Callable[[int], Sequence[float]],
    eta: float,
    device: torch.device | str,
) -> None:
    """One step of every request: a pass of what waits, then a step of each child from it."""
    inputs = [(s, sample) for s in served for sample in s.waiting]
    levels = torch.tensor([grid(x.total)[x.steps] for _, x in inputs], device=device)
    before = torch.stack([x.latent for _, x in inputs]).to(device)
    v = velocity(model, before, levels, [s.prompt.condition for s, _ in inputs]).to(before.dtype)

    children: list[Sample] = []
    source: list[int] = []  # of each child, its place among the inputs
    for place, (s, sample) in enumerate(inputs):
        children += [sample] if s.done else s.request.children()
        source += [place] * (len(children) - len(source))
    owners = [inputs[place][0] for place in source]
    noisy = [s.request.noisy[s.done] for s in owners]
    if source != list(range(len(inputs))):
        index = torch.tensor(source, device=device)
        before, v, levels = before[index], v[index], levels[index]
    following = torch.tensor([grid(c.total)[c.steps + 1] for c in children], device=device)
    ends, logprobs = ode_step(before, v, levels, following), [0.0] * len(children)
    if any(noisy):
        mean, std = sde_mean(before, v, levels, following, eta), sde_std(levels, following, eta)
        none = torch.zeros(ends.shape[1:])
        xi = [s.request.noise_of(c) if n else none for s, c, n in zip(owners, children, noisy, strict=True)]
        moved = mean + _like(std, mean) * torch.stack(xi).to(mean)
        drawn = torch.tensor(noisy, device=device)
        logprobs = torch.where(drawn, transition_logprob(moved, mean, std), 0.0).tolist()
        ends = torch.where(_like(drawn, ends) > 0, moved, ends)
    for s in served:
        s.made, s.done = [], s.done + 1
    for s, child, end, logprob, drawn_here in zip(owners, children, ends.unbind(), logprobs, noisy, strict=True):
        step = Transition(child.steps, child.latent, end.clone(), logprob, drawn_here, model)
        s.made.append(child.add(step))
