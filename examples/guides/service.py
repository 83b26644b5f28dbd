"""A judge that a method asks. The guide docs/guides/service.md shows this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins import GIVEN, Method, MethodParams, Rollouts, param
from rl_plugins.kit.services import Endpoint, Failure, Service, failures, number

TEMPLATE = "How clear is this answer, from 0 to 10?\n\nAnswer:\n{text}"


class Judged(Method):
    """Adds a judge's score of 0 to 10, times a weight, to the reward. Without a score the reward stays as it is."""

    name = "judged"
    needs = frozenset({"text"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        judge: Callable[..., Any] | None = param(None, 'function judge(text) -> 0 to 10, as "module:function"')
        url: str = param("", "OpenAI-compatible endpoint that judges instead, http://localhost:8000/v1")
        model: str = param("judge", "name of the endpoint's model", only_if={"url": GIVEN})
        weight: float = param(0.1, "factor on the judge's score", ge=0)
        timeout: float = param(30.0, "seconds of one call", gt=0)

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        p = self.params
        ask = p.judge
        if p.url:
            endpoint = Endpoint(p.url, p.model, TEMPLATE, timeout=p.timeout)
            ask = lambda text: endpoint({"text": text})  # noqa: E731
        self._judge = None if ask is None else Service(ask, "the judge", answer=number(0, 10), timeout=p.timeout)

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        if self._judge is None:
            return None
        answers = self._judge.ask(rollouts.text or (), strict=False)
        scores = [0.0 if isinstance(answer, Failure) else answer for answer in answers]
        self.log("failed", len(failures(answers)) / max(1, len(answers)))
        return rollouts.reward + self.params.weight * torch.tensor(scores, dtype=torch.float64)


class Steps(Method):
    """A process reward model: the reward becomes the mean score of a rollout's lines."""

    name = "steps"
    needs = frozenset({"text"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        score: Callable[..., Any] | None = param(None, "function score(lines) -> a number of 0 to 1 for each")

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        if self.params.score is None:
            return None
        lines = [text.splitlines() or [""] for text in rollouts.text or ()]
        service = Service(self.params.score, "the process reward model", answer=number(0, 1), batch_size=64)
        flat = service.ask([line for of in lines for line in of])
        scores = iter(flat)
        means = [sum(next(scores) for _ in of) / len(of) for of in lines]
        return torch.tensor(means, dtype=torch.float64) + 0 * rollouts.reward  # NaN stays NaN


def longer_is_better(lines: list[str]) -> list[float]:
    """Stands for a model: a call gets up to 64 lines and answers with as many numbers."""
    return [min(1.0, len(line) / 20) for line in lines]
