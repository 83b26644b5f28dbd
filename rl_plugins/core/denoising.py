"""Rollout programs of a diffusion policy: samples in the making, and what a method may ask for. No I/O in here.

A `rollout` method is the same kind of generator as for text. It yields requests and returns samples:

    def rollout(self, prompt):
        roots = [prompt.start(seed) for seed in prompt.seeds(prompt.n // 2)]
        begun = yield [Denoise(root, steps=4) for root in roots]                    # 4 transitions of each
        pairs = yield [Denoise(s, n=2, shared_noise=4.0) for (s,) in begun]         # two children, then to the end
        return [leaf for pair in pairs for leaf in pair]

Requests are `Denoise`, and `Score` and `Call` of `rl_plugins.core.requests`; `together` runs several programs as one.
The pending requests of all programs are one call of the model.

A row of the batch is a sample, and its tokens are its stochastic transitions: `Tokens.position` is the step,
`old_logprobs` the log-density of the transition (mean over the elements of the latent). A transition that several
samples share appears in the row of each of them. A program tells a method of the driver which ones these are by
numbers of its own, `sample.noted(nodes=[..])`: latents stay where they were made.

All randomness follows from the seeds of the samples, so the same seeds give the same samples, whichever requests are
served together, on however many ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rl_plugins.core.requests import Scored

if TYPE_CHECKING:
    import numpy as np

Model = Literal["policy", "cheap"]
SEEDS = 2**31 - 1
"""Seeds of samples are below it."""


@dataclass(frozen=True, eq=False)
class Transition:
    """One denoising step that was made. Samples that share it hold the same object.

    Args:
        step: of its grid, counted from 0.
        start, end: latents before and after it, float32. They are all that its log-density needs besides the model.
        logprob: mean over the latent's elements of the log-density of `end`; 0 for a deterministic step.
        stochastic: whether noise was added. Only such transitions are trained.
        model: that made it. Transitions of the cheap copy are never trained.
    """

    step: int
    start: Tensor
    end: Tensor
    logprob: float
    stochastic: bool = True
    model: Model = "policy"


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample in the making, and in the end a row. Immutable: every method returns another one.

    Args:
        latent: after its last transition.
        total: steps of its grid, from pure noise to the end.
        seed: it was started with.
        key: of its noise. Children of a request have keys of their own.
        transitions: from the first step on.
        rewards: of the run's reward functions, if `Score` computed them: they are not computed again.
        meta: plain data for the driver: `rollouts.meta[name]` of hooks that need "column:name".
        group: None: the prompt's own group; else a label: rows of this prompt with the same label form a group apart.
    """

    latent: Tensor
    total: int
    seed: int
    key: str
    transitions: tuple[Transition, ...] = ()
    rewards: Mapping[str, float] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    group: Hashable = None

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return len(self.transitions)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.steps == self.total

    @property
    def trained(self) -> tuple[Transition, ...]:
        """Its tokens: the stochastic transitions, in order."""
        return tuple(t for t in self.transitions if t.stochastic)

    def add(self, transition: Transition) -> Sample:
        """One transition longer."""
        return replace(self, latent=transition.end, transitions=(*self.transitions, transition), rewards=None)

    def child(self, seed: int, number: int) -> Sample:
        """The same with a key of its own for the noise of what follows."""
        return replace(self, key=f"{self.key}/{self.steps}.{seed}.{number}")

    def scored(self, scored: Scored) -> Sample:
        """With the rewards of a `Score`."""
        return replace(self, rewards=scored.rewards)

    def noted(self, **meta: Any) -> Sample:
        """With further `meta`."""
        return replace(self, meta={**self.meta, **meta})


@dataclass(frozen=True)
class SamplePrompt:
    """One prompt of a diffusion policy and what is to be made of it.

    Args:
        condition: what the policy is given: a text, a class or an embedding, as the dataset has it.
        columns: its dataset row.
        n: samples to return (those that are trained and those that are spare).
        steps: T, denoising steps of a sample that is returned.
        sigmas: (T + 1) noise levels of these steps, from 1 down to 0.
        shape: of a latent.
        payload: what the plan attached.
        batch: generation batch, counted from 0.
        training: False in evaluation.
        reward_names: of the run's reward functions.
        has_cheap: whether the run has a cheap copy of the policy.
        stochastic: whether steps of a returned sample add noise: what an objective on their densities needs.
        seed: of random numbers, see `rng`.
    """

    condition: Any
    columns: Mapping[str, Any]
    n: int
    steps: int
    sigmas: tuple[float, ...]
    shape: tuple[int, ...]
    payload: Any = None
    batch: int = 0
    training: bool = True
    reward_names: tuple[str, ...] = ()
    has_cheap: bool = False
    stochastic: bool = True
    seed: str = ""

    def rng(self, purpose: str, rollout: int = 0) -> np.random.Generator:
        """A fresh generator from (seed, method, generation batch, prompt, purpose, rollout): the same on every rank and
        after a resume."""
        import numpy as np

        key = f"{self.seed}|{self.batch}|{purpose}|{rollout}".encode()
        return np.random.default_rng(list(hashlib.sha256(key).digest()))

    def seeds(self, n: int, purpose: str = "seeds") -> list[int]:
        """`n` different seeds, the same each time."""
        rng, found = self.rng(purpose), dict[int, None]()
        while len(found) < n:
            found.setdefault(int(rng.integers(SEEDS)))
        return list(found)

    def start(self, seed: int, total: int | None = None) -> Sample:
        """Pure noise from a seed: the same seed gives the same noise, whatever the prompt and the batch.

        Args:
            seed: 0 to 2^31 - 2.
            total: steps of its grid; None: those of the prompt. Samples that are returned have the prompt's.
        """
        steps = self.steps if total is None else total
        return Sample(noise(self.shape, str(int(seed)), "start"), steps, int(seed), str(int(seed)))


@dataclass(frozen=True)
class Denoise:
    """Continue a sample. Result: a list of n `Sample`.

    Children of one request differ in their noise from the first step on. Two requests that continue the same sample get
    the same noise, unless their `seed` differs.

    Args:
        sample: what is continued.
        steps: to make; None: all that are left.
        n: children. More than one need a stochastic first step.
        shared_noise: s of the noise that the n siblings get in the first step, (xi_0 + s eta) / sqrt(1 + s^2), with
            xi_0 shared and eta of each: every child is an ordinary sample, and the noises of two siblings correlate
            with 1 / (1 + s^2). None: their noises are independent.
        stochastic: whether noise is added: in all of these steps or, as a tuple, in each of them.
        model: "policy", or "cheap": the run's cheap copy.
        noise_scale: factor on the noise of the first step; its log-density is still that of factor 1. Other values than
            1 reproduce code that does so; samples are then not those of the policy.
        seed: of the noise, in addition to the seed of the sample.
    """

    sample: Sample
    steps: int | None = None
    n: int = 1
    shared_noise: float | None = None
    stochastic: bool | tuple[bool, ...] = True
    model: Model = "policy"
    noise_scale: float = 1.0
    seed: int = 0

    @property
    def count(self) -> int:
        """Steps to make."""
        left = self.sample.total - self.sample.steps
        return left if self.steps is None else self.steps

    @property
    def noisy(self) -> tuple[bool, ...]:
        """Of each of the steps, whether noise is added."""
        return self.stochastic if isinstance(self.stochastic, tuple) else (self.stochastic,) * self.count

    def children(self) -> list[Sample]:
        """The n samples before the first step."""
        if self.n == 1 and self.seed == 0:
            return [self.sample]  # so the noise does not depend on how the steps are split into requests
        return [self.sample.child(self.seed, number) for number in range(self.n)]

    def noise_of(self, child: Sample) -> Tensor:
        """Standard normal noise (times `noise_scale`) of the next step of one of the children."""
        own = noise(tuple(child.latent.shape), child.key, str(child.steps))
        if child.steps > self.sample.steps:
            return own
        if self.shared_noise is not None:
            shared = noise(tuple(own.shape), self.sample.key, f"{child.steps}.{self.seed}.shared")
            own = (shared + self.shared_noise * own) / math.sqrt(1 + self.shared_noise**2)
        return own if self.noise_scale == 1 else self.noise_scale * own


def noise(shape: Sequence[int], key: str, purpose: str) -> Tensor:
    """Standard normal float32 numbers on the CPU, from a text."""
    digest = hashlib.sha256(f"{key}|{purpose}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(tuple(shape), generator=generator)
