"""The run's reward functions on finished samples, and the engine that serves rollout programs on this rank."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.denoising import Denoise, Sample, SamplePrompt
from rl_plugins.core.errors import ConfigError, MethodError, shown
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Scored
from rl_plugins.diffusion.flows import denoise
from rl_plugins.diffusion.policy import Policy

Decode = Callable[[Tensor], Any]
"""Latents (rows, ..) -> what reward functions and sheets see, with a row for each: a tensor, or a list of images."""


class Rewards:
    """Reward functions: `f(samples, conditions, **columns)` -> a number for each sample, None or NaN where it has none.

    A function gets the dataset columns that its signature names, or all of them if it takes `**kwargs`.

    Args:
        functions: one, or several by their own names.
        weights: of each in the sum; None: 1.
        decode: latents -> samples; None: samples are the latents.

    Raises:
        ConfigError: no function, two of the same name, or other weights than functions.
    """

    def __init__(self, functions: Any, weights: Sequence[float] | None, decode: Decode | None) -> None:
        self.functions: list[Any] = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not self.functions or not all(callable(f) for f in self.functions):
            raise ConfigError(
                f"`reward_funcs` is {shown(functions)}. It must be a function (samples, conditions, **columns) -> "
                f"rewards, or a list of them."
            )
        self.names = tuple(getattr(f, "__name__", type(f).__name__) for f in self.functions)
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"Reward functions must have different names, and these are {', '.join(self.names)}.")
        if weights is not None and len(weights) != len(self.functions):
            raise ConfigError(f"reward_weights has {len(weights)} entries for {len(self.functions)} reward functions.")
        self.weights = torch.tensor(weights or [1.0] * len(self.functions), dtype=torch.float64)
        self.decode = decode or (lambda latents: latents)

    @torch.no_grad()
    def of(self, samples: Sequence[Sample], rows: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, float]]:
        """Rewards of each sample by name.

        Args:
            rows: dataset row of each, with the condition in "prompt" and what its program noted.
            size: latents decoded at a time.

        Raises:
            MethodError: a function returns something else than a number, None or NaN for each sample.
        """
        out: list[dict[str, float]] = []
        for start in range(0, len(samples), size):
            part = rows[start : start + size]
            decoded = self.decode(torch.stack([s.latent for s in samples[start : start + size]]))
            names = dict.fromkeys(k for row in part for k in row if k != "prompt")
            columns = {k: [row.get(k) for row in part] for k in names}
            conditions = [row["prompt"] for row in part]
            scores = [
                self._scores(name, f, decoded, conditions, columns)
                for name, f in zip(self.names, self.functions, strict=True)
            ]
            out += [dict(zip(self.names, values, strict=True)) for values in zip(*scores, strict=True)]
        return out

    @staticmethod
    def _scores(name: str, function: Any, samples: Any, conditions: list[Any], columns: dict[str, Any]) -> list[float]:
        parameters = inspect.signature(function).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            columns = {k: v for k, v in columns.items() if any(p.name == k for p in parameters)}
        given = function(samples, conditions, **columns)
        values = given.tolist() if isinstance(given, Tensor) else list(given)
        if len(values) != len(conditions):
            raise MethodError(
                f"The reward function `{name}` returned {len(values)} rewards for {len(conditions)} samples."
            )
        try:
            return [math.nan if v is None else float(v) for v in values]
        except (TypeError, ValueError):
            raise MethodError(
                f"The reward function `{name}` returned {shown(values)}; it must return a number for each sample, or "
                f"None."
            ) from None


class PolicyEngine:
    """Serves rollout programs on this rank.

    Args:
        policy: what samples.
        rewards: what scores.
        size: latents decoded at a time.
    """

    def __init__(self, policy: Policy, rewards: Rewards, size: int) -> None:
        self.policy, self.rewards, self.size = policy, rewards, size

    def denoise(self, requests: Sequence[tuple[SamplePrompt, Denoise]]) -> list[list[Sample]]:
        """For each request its n samples; each step of all of them is one call of the model."""
        p = self.policy
        return denoise(requests, p.sampled, p.grid, p.config.eta, p.device)

    @torch.no_grad()
    def decoded(self, samples: Sequence[Sample]) -> list[Any]:
        """What reward functions see of each."""
        out: list[Any] = []
        for start in range(0, len(samples), self.size):
            out += list(self.rewards.decode(torch.stack([s.latent for s in samples[start : start + self.size]])))
        return out

    def score(self, requests: Sequence[tuple[SamplePrompt, Sample]]) -> list[Scored]:
        """The run's reward functions on each sample."""
        rows = [{**prompt.columns, **sample.meta} for prompt, sample in requests]
        found = self.rewards.of([sample for _, sample in requests], rows, self.size)
        weights = self.rewards.weights.tolist()
        out = []
        for values in found:
            known = [w * v for w, v in zip(weights, values.values(), strict=True) if not math.isnan(v)]
            out.append(Scored(values, sum(known) if known else math.nan))
        return out


class FlatRollout(Method):
    """What a run without a `rollout` method does: every sample on its own, from noise to the end."""

    name = "flat_rollout"
    hosts = ("diffusion",)

    def rollout(self, prompt: Any) -> Any:
        made = yield [Denoise(prompt.start(s), stochastic=prompt.stochastic) for s in prompt.seeds(prompt.n)]
        return [samples[0] for samples in made]
