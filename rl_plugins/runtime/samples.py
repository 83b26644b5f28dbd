"""Runs rollout programs of a diffusion policy: what its adapter and the fake engine of the tests share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast, get_args

from rl_plugins.core.denoising import Denoise, Model, Sample, SamplePrompt
from rl_plugins.core.errors import MethodError, shown
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Call, Request, Score, Scored
from rl_plugins.kit.threads import run_calls
from rl_plugins.runtime.programs import IDLE_REQUESTS, REQUESTS_PER_TOKEN, Running
from rl_plugins.runtime.validate_programs import call_problem, told_problem


class SampleEngine(Protocol):
    """Serves a batch of requests at once."""

    def denoise(self, requests: Sequence[tuple[SamplePrompt, Denoise]]) -> list[list[Sample]]:
        """For each request its n samples."""
        ...

    def score(self, requests: Sequence[tuple[SamplePrompt, Sample]]) -> list[Scored]:
        """The run's reward functions on each sample."""
        ...


class RunningSamples(Running):
    """A program of a diffusion policy between two requests.

    Args:
        method: whose program it is.
        prompt: what it works on.
    """

    kinds = (Denoise, Score, Call)

    def __init__(self, method: Method, prompt: SamplePrompt) -> None:
        super().__init__(method, cast(Any, prompt))

    @property
    def samples(self) -> list[Sample]:
        """What it returned, once it has ended."""
        return cast(Any, self.rows) or []

    def _most_requests(self) -> int:
        prompt: SamplePrompt = cast(Any, self.prompt)
        return prompt.n * (IDLE_REQUESTS + REQUESTS_PER_TOKEN * prompt.steps)

    def _problem(self, request: Request) -> str:
        return request_problem(request, cast(Any, self.prompt))

    def _checked(self, returned: Any) -> Any:
        prompt: SamplePrompt = cast(Any, self.prompt)
        samples = check_samples(returned, prompt)
        self._check_unchanged()
        return samples


def run_samples(programs: Sequence[RunningSamples], engine: SampleEngine) -> None:
    """Drives programs to their end, all together: what they ask for at the same time is one call of the model. Their
    `samples` are set then.

    Raises:
        MethodError: of a program; whatever the engine raised. The other programs are closed.
    """
    try:
        while True:
            calls, scores, asked = (
                [(p, i) for p in programs for i in p.open if isinstance(p.requests[i], kind)]
                for kind in (Call, Score, Denoise)
            )
            results: Sequence[Any]
            if calls:
                now, results = calls, run_calls([cast(Call, p.requests[i]) for p, i in calls])
            elif scores:
                now, results = scores, engine.score([(p.prompt, p.requests[i].trajectory) for p, i in scores])  # type: ignore[misc,union-attr]
            elif asked:
                now, results = asked, engine.denoise([(p.prompt, p.requests[i]) for p, i in asked])  # type: ignore[misc]
            else:
                return
            for (p, i), result in zip(now, results, strict=True):
                p.answer(i, result)
    finally:
        for p in programs:
            p.close()


def request_problem(request: Any, prompt: SamplePrompt) -> str:
    """What cannot be served about a request; empty if nothing is."""
    if isinstance(request, Call):
        return call_problem(request)
    name = type(request).__name__
    sample = request.trajectory if isinstance(request, Score) else request.sample
    if not isinstance(sample, Sample):
        return f"{name} of {shown(sample)} instead of a Sample"
    if tuple(sample.latent.shape) != tuple(prompt.shape):
        return f"{name} of a latent of shape {tuple(sample.latent.shape)}; those of this run have {tuple(prompt.shape)}"
    if isinstance(request, Score):
        unfinished = f"Score of a sample with {sample.steps} of {sample.total} steps; finish it with Denoise"
        return "" if sample.finished else unfinished
    return _denoise_problem(request, sample, prompt)


def _denoise_problem(request: Denoise, sample: Sample, prompt: SamplePrompt) -> str:
    left = sample.total - sample.steps
    for name, least, most in (("n", 1, 100_000), ("steps", 1, left), ("seed", -(2**63), 2**63)):
        value = getattr(request, name)
        if name == "steps" and value is None and left:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            if name == "steps" and not left:
                return f"Denoise of a finished sample: all {sample.total} steps are done"
            return f"Denoise({name}={shown(value)}); it must be a whole number of {least} to {most}"
    if request.model not in get_args(Model):
        return f"Denoise(model={shown(request.model)}); allowed: {', '.join(map(repr, get_args(Model)))}"
    if request.model == "cheap" and not prompt.has_cheap:
        return 'Denoise(model="cheap"), and the run has no cheap copy of the policy. Give the trainer one (`cheap`)'
    noisy = request.stochastic
    if not isinstance(noisy, bool) and not (
        isinstance(noisy, tuple) and len(noisy) == request.count and all(isinstance(x, bool) for x in noisy)
    ):
        return (
            f"Denoise(stochastic={shown(noisy)}) of {request.count} steps; it must be True, False, or a tuple with one "
            f"of them for each step"
        )
    if request.n > 1 and not request.noisy[0]:
        return f"Denoise(n={request.n}) with a deterministic first step: all children would be the same"
    for name in ("shared_noise", "noise_scale"):
        factor = getattr(request, name)
        if name == "shared_noise" and factor is None:
            continue
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            return f"Denoise({name}={shown(factor)}); it must be a finite number of at least 0"
    return ""


def check_samples(returned: Any, prompt: SamplePrompt) -> list[Sample]:
    """What a program returned, as rows.

    Raises:
        MethodError: not samples, more than asked for, unfinished, of another grid, made by the cheap copy, or with
            extras that cannot travel.
    """
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise MethodError(f"the program returned {type(returned).__name__} instead of a list of samples.")
    for sample in returned:
        if not isinstance(sample, Sample):
            raise MethodError(f"the program returned a list with {type(sample).__name__} instead of a Sample.")
    if len(returned) > prompt.n:
        raise MethodError(
            f"the program returned {len(returned)} samples for a prompt that asks for {prompt.n}; return at most "
            f"{prompt.n}."
        )
    for sample in returned:
        if tuple(sample.latent.shape) != tuple(prompt.shape):
            raise MethodError(
                f"a sample has a latent of shape {tuple(sample.latent.shape)}; those of this run have "
                f"{tuple(prompt.shape)}."
            )
        if sample.total != prompt.steps or not sample.finished:
            raise MethodError(
                f"a sample has {sample.steps} of {sample.total} steps; rows have all {prompt.steps} steps of the run. "
                f"Finish it with Denoise, or make its seed again with `prompt.start(seed)`."
            )
        if any(t.model != "policy" for t in sample.transitions):
            raise MethodError(
                "a sample has steps of the cheap copy, which are not trained. Make its seed again with the policy: "
                "Denoise(prompt.start(sample.seed))."
            )
        if not all(math.isfinite(t.logprob) for t in sample.transitions):
            raise MethodError(
                "a sample has a log-density that is NaN or infinite. Look at the velocities of the model."
            )
        problem = told_problem(sample, prompt.reward_names, "a sample")
        if problem:
            raise MethodError(f"{problem}.")
    return list(returned)
