"""Staleness that can be set, in any host that generates and trains in turn.

`Delayed` trains every rollout `lag` batches after it was made, `installed` lets a run in this process name it.

    with installed(Delayed):
        trainer = GRPOTrainer(..., args=GRPOConfig(methods=["delayed", "minpro"],
                                                   method_params={"delayed": {"lag": 4}}))
        trainer.train()

For tests, evidence and benchmarks of methods that correct for stale rollouts; nobody trains like this on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import torch

from rl_plugins.core.method import Method
from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.rollouts import Completion, Plan, PlanRow, Rollouts, Shape, Tokens
from rl_plugins.runtime import registry


class Delayed(Method):
    """Batch b trains the rollouts that were made in batch b - lag, and makes those of batch b + lag.

    The first `lag` batches make rollouts and train nothing. From then on every trained row was sampled by the policy
    that stood `lag` batches before, with its log-probs, versions and rewards; the new rows leave in `shape`. Nothing
    else changes: as many rows are generated and trained per batch as in a run without it.

    Special cases: `lag` 0 changes nothing. Prompts come in the host's order, `lag` batches late.

    State: none; what waits lies in this object, so a run cannot be resumed. One process.

    Logs: `waiting`, batches that wait.

    Source: the off-policy protocol of arXiv 2410.18252 (section 3), with the lag counted in generation batches.
    """

    name = "delayed"
    fidelity = "reconstruction"
    needs = frozenset({"prompt_index", "tokens", "token_ids", "token_versions", "rollout_logprobs"})
    brings = frozenset({"off_policy"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        lag: int = param(0, "batches between making and training a rollout", ge=0)
        sampled_as_old: bool = param(
            False, "the importance ratio is taken against the policy that sampled instead of that of the step's start"
        )

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self._waiting: list[tuple[PlanRow, ...]] = []

    def plan(self, plan: Plan) -> Plan | None:
        lag = self.params.lag
        if not lag:
            return None
        fresh = tuple(r.replace(n=0, spare=r.n).marked(self.name, "fresh") for r in plan.rows)
        old = self._waiting.pop(0) if len(self._waiting) == lag else ()
        first = max((r.group for r in fresh), default=-1) + 1
        return plan.replace(rows=tuple(r.replace(group=first + i) for i, r in enumerate(old)) + fresh)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        keep = None
        if self.params.lag:  # not in `select`: tokens of rows that leave there are not seen by `observe`
            keep = ~rollouts.has_mark(self.name)
        old = tokens.rollout_logprobs if self.params.sampled_as_old and len(tokens) else None
        return Shape(keep_rows=keep, old_logprobs=old)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        if not self.params.lag:
            return
        of_row = tokens.row
        assert rollouts.token_ids is not None  # in `needs`
        assert tokens.rollout_logprobs is not None and tokens.version is not None
        rows: dict[int, list[Completion]] = {}
        prompt: dict[int, int] = {}
        for i in rollouts.has_mark(self.name).nonzero()[:, 0].tolist():
            mine, ids = of_row == i, rollouts.token_ids.completion[i]
            at, logprobs = tokens.position[mine], torch.zeros(len(ids))
            versions = torch.full((len(ids),), int(rollouts.version[i]))
            logprobs[at], versions[at] = tokens.rollout_logprobs[mine], tokens.version[mine]
            group = int(rollouts.group[i])
            prompt[group] = int(rollouts.prompt_index[i])
            rows.setdefault(group, []).append(
                Completion(
                    tuple(ids.tolist()),
                    tuple(logprobs.clamp(max=0).tolist()),
                    tuple(versions.tolist()),
                    dict(zip(rollouts.reward_names, rollouts.rewards[i].tolist(), strict=True)),
                    tuple(rollouts.token_ids.observed[i].tolist()),
                )
            )
        self._waiting.append(tuple(PlanRow(prompt[g], g, len(made), given=tuple(made)) for g, made in rows.items()))
        self.log("waiting", len(self._waiting))


@contextmanager
def installed(*classes: type[Method]) -> Iterator[None]:
    """Lets the registry find these methods, in this process, as if a package had brought them."""
    known = [EntryPoint(c.name, f"{c.__module__}:{c.__qualname__}", registry.ENTRY_POINT_GROUP) for c in classes]
    others = registry._entry_points
    registry._entry_points = lambda: [*others(), *known]  # type: ignore[assignment]
    try:
        yield
    finally:
        registry._entry_points = others  # type: ignore[assignment]


__all__: list[str] = ["Delayed", "installed"]
