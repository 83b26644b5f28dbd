"""Length curriculum of DORA (arXiv 2509.18883): the response limit grows when answers reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import ConfigError, Idle, Method, MethodParams, Plan, Rollouts, Run, Tokens, param


class DoraLength(Method):
    """Begins with a short response limit and raises it when the 90th percentile of the lengths comes near it.

    With rising limits L_0, L_1 and so on, each a share of the host's completion length, at stage s:

        every planned row is cut at L_s tokens
        once `window` rollouts of stage s are there:   s = s + 1  if  percentile(length / L_s) >= threshold
        the window begins again where the stage rises; else its oldest batches leave

    Symbols: lengths in tokens of the completion; a truncated rollout has the length L_s. The percentile interpolates
    linearly. A window holds the fewest latest whole batches that have `window` rollouts.

    Special cases: a rollout does not count if it is of an earlier stage (asynchronous modes plan ahead), if its plan
    row has given completions or a prefix, or if another method limits it further. A rollout of several rows has the
    length of its longest row. At the last stage nothing is counted. Evaluation has the host's limit only.

    State: the stage, and the lengths of the window by batch.

    Raises:
        ConfigError: `shares` that do not rise, or a first limit below one token.

    Source: arXiv 2509.18883, section on domain-parallel training (coding). No training code was published.
    """

    name = "dora_length"
    fidelity = "paper"
    does = "Raises the response limit in stages, when long answers come near it"
    problems = ("length", "long_tail")
    idle = (Idle({"counted": 0}, "no rollout counts: another method gives completions, or limits them further."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        shares: tuple[float, ...] = param(
            (0.75, 0.875, 1.0), "rising limits, as shares of the host's completion length"
        )
        percentile: float = param(90.0, "percentile of the lengths that is compared with the limit", ge=0, le=100)
        threshold: float = param(0.95, "share of the limit at which it is raised", gt=0, le=1)
        window: int = param(256, "least number of latest rollouts that count, in whole batches", ge=1)

        def check(self) -> None:
            rising = all(a < b for a, b in zip(self.shares, self.shares[1:], strict=False))
            if not self.shares or not rising or self.shares[0] <= 0 or self.shares[-1] > 1:
                raise ConfigError(
                    f"parameter `shares` is {list(self.shares)}; it must be rising numbers in (0, 1], for example "
                    f"[0.75, 0.875, 1.0]."
                )

    def check(self, run: Run) -> None:
        first = self.params.shares[0]
        if int(first * run.max_completion_length) < 1:
            raise ConfigError(
                f"the first of `shares` is {first:g}, which is no whole token of the completion length "
                f"({run.max_completion_length}). Raise it."
            )

    def start(self, run: Run) -> None:
        self._longest = run.max_completion_length
        self.state = {"stage": 0, "lengths": []}

    @property
    def _limit(self) -> int:
        return int(self.params.shares[self.state["stage"]] * self._longest)

    def plan(self, plan: Plan) -> Plan | None:
        limit, stage = self._limit, self.state["stage"]
        rows = []
        for row in plan.rows:
            if row.max_tokens is None or row.max_tokens >= limit:
                counts = not row.given and not row.prefix
                row = row.replace(max_tokens=limit)
                row = row.marked(self.name, stage) if counts else row
            rows.append(row)
        return plan.replace(rows=tuple(rows))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, stage = self.params, self.state["stage"]
        if stage + 1 < len(p.shares):
            batches = [*self.state["lengths"], self._lengths(rollouts)]
            self.log("counted", len(batches[-1]))
            while sum(map(len, batches[1:])) >= p.window:
                batches = batches[1:]
            lengths = torch.cat(batches)
            if len(lengths) >= p.window:
                reached = float(torch.quantile(lengths, p.percentile / 100))
                self.log("percentile", reached)
                if reached >= p.threshold:
                    stage, batches = stage + 1, []
            self.state = {"stage": stage, "lengths": batches}
        self.log("stage", stage)
        self.log("limit", self._limit)

    def _lengths(self, rollouts: Rollouts) -> Tensor:
        """(rollouts,) length / limit of the rollouts that count."""
        of_stage = torch.tensor([stage == self.state["stage"] for stage in rollouts.marks(self.name)], dtype=torch.bool)
        once = rollouts.per_rollout
        length = torch.where(rollouts.truncated, float(self._limit), rollouts.length.double())
        return once.rows.max(length)[of_stage[once.last]] / self._limit
