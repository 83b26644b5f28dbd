"""Discounted success counts per prompt, which the baseline and the sampler of MSSR read.

Every prompt x has pseudo-counts of successes a_x and failures b_x; its value is v_x = a_x / (a_x + b_x). Each outcome
o = 1[reward > success_threshold] of a rollout updates the counts of its prompt, one after the other:

    a <- rho a + o,    b <- rho b + 1 - o

The forgetting rate rho follows the policy's movement. With d = log pi_ref - log pi_old, KL is the mean over a batch's
rows of the mean over their tokens of exp(d) - d - 1, and Kbar is its mean over the last batches:

    rho = rho_min + (Kbar / target_kl) (rho_max - rho_min)    while Kbar <= target_kl,    else rho_min
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins import ConfigError, Groups, Method, MethodParams, Rollouts, Run, Tokens, from_params, param, signals
from rl_plugins.kit.priors import Column
from rl_plugins.kit.prompt_memory import Counts

COUNTS = Counts(("alpha", "beta"))


@dataclass(frozen=True)
class TrackerParams(MethodParams):
    """Parameters of the counts."""

    rho: float | None = param(None, "forgetting rate; none: it follows the KL to the reference policy", gt=0, le=1)
    rho_min: float = param(0.875, "smallest forgetting rate; a prompt starts with 1 / (1 - rho_min) counts", ge=0, lt=1)
    rho_max: float = param(0.96, "largest forgetting rate", ge=0, le=1, only_if={"rho": None})
    target_kl: float = param(
        0.01, "KL at which rho is rho_max, in nats; above it rho is rho_min", gt=0, only_if={"rho": None}
    )
    kl_window: int = param(10, "number of batches that the KL is averaged over", ge=1, only_if={"rho": None})
    initial_value: float = param(0.5, "value of a prompt before its first rollout", ge=0, le=1)
    value_column: str | None = param(
        None, "dataset column with the values before the first rollout; none: `initial_value` for all prompts"
    )
    success_threshold: float = param(
        0.5, "reward, the weighted sum of the functions, above which a rollout is a success"
    )

    def check(self) -> None:
        if self.rho is None and self.rho_max < self.rho_min:
            raise ConfigError(
                f"parameter `rho_max` is {self.rho_max:g}, below `rho_min` = {self.rho_min:g}; it must be at least "
                f"that. Raise `rho_max` or lower `rho_min`."
            )


class Tracked(Method):
    """Base of the parts that read the counts. State: `alpha`, `beta` (dataset size,) float64, `kl` of the window."""

    needs = from_params(
        lambda p: signals(
            "prompt_index",
            columns=[p.value_column],
            tokens=p.rho is None,
            old_logprobs=p.rho is None,
            ref_logprobs=p.rho is None,
        )
    )

    Params = TrackerParams

    def start(self, run: Run) -> None:
        self.state = self._initial(self._known(run))

    def _initial(self, known: Tensor) -> dict[str, Any]:
        """The state before the first batch, from the values that are known then."""
        value = known.nan_to_num(nan=self.params.initial_value)
        weight = 1 / (1 - self.params.rho_min)
        return {"alpha": weight * value, "beta": weight * (1 - value), "kl": []}

    def _known(self, run: Run) -> Tensor:
        """(dataset size,) value of each prompt before the run, from the dataset; NaN where none is known."""
        name, size = self.params.value_column, run.dataset_size or 0
        if not name:
            return torch.full((size,), torch.nan, dtype=torch.float64)
        column = Column(name)
        value = column.predict(column.start(run), torch.arange(size))
        outside = (value < 0) | (value > 1)
        if bool(outside.any()):
            raise ConfigError(
                f"the column `{name}` has the value {float(value[outside][0]):g}; it must hold success rates from 0 to "
                f"1 (NaN where none is known)."
            )
        return value

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        """Every generated rollout counts, those that `select` removed too; one of several rows counts once."""
        p = self.params
        window = [*self.state["kl"], *(_kl(tokens) if p.rho is None else [])][-p.kl_window :]
        rho = forgetting_rate(window, p)
        found = rollouts.per_rollout  # in the order of groups and rollouts, whatever the order of the rows
        counted = ~torch.isnan(found.reward) & (found.prompt_index >= 0)
        prompts = Groups(found.prompt_index[counted])
        success = (found.reward[counted] > p.success_threshold).double()
        visits = prompts.size.double()
        faded = rho ** (prompts.rows(visits) - prompts.rank(torch.arange(len(success))))  # by the outcomes after each
        outcomes = prompts.sum(faded * success), prompts.sum(faded * (1 - success))
        COUNTS.visit(self.state, prompts.ids, rho**visits, outcomes)
        self.state["kl"] = window
        self.log("rho", rho)
        self.log("success", success.mean())

    def _values(self, prompts: Tensor) -> Tensor:
        """(n,) value of these dataset rows; the initial one for a foreign prompt (-1)."""
        alpha, beta = COUNTS.of(self.state, prompts.clamp(min=0))
        return torch.where(prompts < 0, self.params.initial_value, alpha / (alpha + beta))


def forgetting_rate(window: Sequence[float], p: TrackerParams) -> float:
    """rho after the KL values of the last batches; the middle of the range before there is one."""
    if p.rho is not None:
        return p.rho
    if not window:
        return (p.rho_min + p.rho_max) / 2
    share = sum(window) / len(window) / p.target_kl
    return p.rho_min + (share if share <= 1 else 0.0) * (p.rho_max - p.rho_min)


def _kl(tokens: Tokens) -> list[float]:
    """[KL of the batch], nothing if it has no token."""
    assert tokens.old_logprobs is not None and tokens.ref_logprobs is not None  # in `needs`
    if not len(tokens):
        return []
    d = (tokens.ref_logprobs.double() - tokens.old_logprobs.double()).clamp(-20, 20)  # limits of verl's estimator
    per_token = (torch.expm1(d) - d).clamp(-10, 10)
    return [float(torch.nanmean(Groups(tokens.row).mean(per_token)))]
