"""A fake engine for rollout programs of a diffusion policy: velocities and densities that are known, and no host.

engine = FlowEngine(GaussianFlow(mean=1.0, std=0.5), reward=lambda x, columns: float(x.mean()))
samples = run_sample_program(MyMethod(), make_sample_prompt(n=8), engine)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.denoising import Denoise, Model, Sample, SamplePrompt
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Scored
from rl_plugins.diffusion.flows import denoise, shifted_sigmas
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.samples import RunningSamples, run_samples
from rl_plugins.runtime.stack import MethodStack


@dataclass(frozen=True)
class GaussianFlow:
    """The exact velocity of data that is normal in every element, so every marginal is known.

    At the noise level s a latent is normal with mean (1 - s) `mean` and variance (1 - s)^2 `std`^2 + s^2. A condition
    that is a number is added to the mean.

    Args:
        mean, std: of the data.
    """

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, x: Tensor, sigma: Tensor, conditions: Sequence[Any]) -> Tensor:
        shift = [c if isinstance(c, (int, float)) else 0.0 for c in conditions]
        ones = (-1, *[1] * (x.dim() - 1))
        mean = self.mean + torch.tensor(shift, dtype=x.dtype).reshape(ones)
        s = sigma.to(x.dtype).reshape(ones)
        gain = (s - (1 - s) * self.std**2) / ((1 - s) ** 2 * self.std**2 + s**2)
        return gain * (x - (1 - s) * mean) - mean


class FlowEngine:
    """Serves programs from a known velocity. Without rollouts of a host, and the same on every machine.

    Args:
        velocity: latents, noise levels and conditions -> velocities.
        reward: latent of a finished sample, columns -> a number, a mapping by function, or None.
        cheap: velocity of the cheap copy.
        shift: of the noise levels.
        eta: noise of the sampler.
        fail_after: requests after which the engine raises; None: never.

    Attributes:
        requests: every `Denoise` served. scores: samples scored. calls: of the model. passes: rows in these calls, by
            model.
    """

    def __init__(
        self,
        velocity: Callable[[Tensor, Tensor, Sequence[Any]], Tensor] | None = None,
        reward: Callable[..., Any] | None = None,
        cheap: Callable[[Tensor, Tensor, Sequence[Any]], Tensor] | None = None,
        shift: float = 3.0,
        eta: float = 0.3,
        fail_after: int | None = None,
    ) -> None:
        self._models = {"policy": velocity or GaussianFlow(), "cheap": cheap}
        self._reward, self.shift, self.eta, self.fail_after = reward, shift, eta, fail_after
        self.requests: list[Denoise] = []
        self.scores: list[Sample] = []
        self.calls = 0
        self.passes = {"policy": 0, "cheap": 0}

    def velocity(self, model: Model, x: Tensor, sigma: Tensor, conditions: Sequence[Any]) -> Tensor:
        """Of a model, counted."""
        self.calls, self.passes[model] = self.calls + 1, self.passes[model] + len(x)
        chosen = self._models[model]
        assert chosen is not None  # the prompt says whether there is one
        return chosen(x, sigma, conditions)

    def denoise(self, requests: Sequence[tuple[SamplePrompt, Denoise]]) -> list[list[Sample]]:
        """The samples of each request."""
        if self.fail_after is not None and len(self.requests) >= self.fail_after:
            raise RuntimeError("the engine died")
        self.requests += [request for _, request in requests]
        return denoise(requests, self.velocity, lambda total: shifted_sigmas(total, self.shift), self.eta)

    def score(self, requests: Sequence[tuple[SamplePrompt, Sample]]) -> list[Scored]:
        """The reward of each sample."""
        out = []
        for prompt, sample in requests:
            self.scores.append(sample)
            given = None if self._reward is None else self._reward(sample.latent, prompt.columns)
            rewards = dict(given) if isinstance(given, Mapping) else {"reward": given}
            values = {k: math.nan if v is None else float(v) for k, v in rewards.items()}
            known = [v for v in values.values() if not math.isnan(v)]
            out.append(Scored(values, sum(known) if known else math.nan))
        return out


def make_sample_prompt(n: int = 4, steps: int = 20, shape: tuple[int, ...] = (1, 2, 2), **changes: Any) -> SamplePrompt:
    """A prompt of a diffusion policy; further fields of `SamplePrompt` as keywords (`condition`, `payload`)."""
    values: dict[str, Any] = {"condition": None, "columns": {}, "seed": "0|test|0"} | changes
    return SamplePrompt(n=n, steps=steps, sigmas=shifted_sigmas(steps), shape=shape, **values)


def run_sample_program(
    method: Method,
    prompt: SamplePrompt | Sequence[SamplePrompt],
    engine: Any,
    logged: dict[str, float] | None = None,
) -> Any:
    """Samples of a prompt (or, of several prompts, a list of those), as an adapter would get them.

    Args:
        logged: filled with what the program logged.
    """
    prompts = [prompt] if isinstance(prompt, SamplePrompt) else list(prompt)
    stack = MethodStack([method])
    programs = [RunningSamples(method, p) for p in prompts]
    run_samples(programs, engine)
    if logged is not None:
        logged.update(combine([stack.metrics.take()]))
    return programs[0].samples if isinstance(prompt, SamplePrompt) else [p.samples for p in programs]
