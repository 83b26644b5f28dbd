"""Redundant rollouts of RollArt (arXiv 2512.22560): a group does not wait for its slowest environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_plugins import Idle, Method, MethodParams, Plan, Rollouts, Tokens, from_params, param, signals
from rl_plugins.core.redundancy import FIELDS, NOTE


class RollartRedundancy(Method):
    """Begins more rollouts of a prompt than are kept, and closes the others as soon as enough have ended.

        begin G + x rollouts of the prompt, each in an environment of its own
        as soon as G of them have ended: keep these, close the others

    Nothing else changes: the group has G rollouts as before, and the closed ones are no rows. Closing runs the
    `finally` blocks of a rollout, which end its environment. A request that is under way is cancelled on our side.

    Symbols: G = rollouts that the plan asks for (`num_generations`, rollout.n, and what other methods add),
    x = `spare`.

    Special cases: a rollout whose environment is broken (it raised, or took longer than its time-out) does not count as
    ended while others may still take its place. Rollouts that end at the same moment are kept in the order of their
    numbers. `spare: 0` changes nothing. Evaluation has no redundancy. Groups that wait for a later batch (`april` in
    TRL) begin with G + x rollouts and are complete with G.

    Short rollouts end earlier, so they are kept more often than they are sampled. This bias grows with x / G and with
    the spread of the times. The logs compare rollouts that are kept with those that were closed. A limit that is
    learned from episodes (`turn_control` without a `limit`) sees only those that are kept.

    Source: arXiv 2512.22560, redundant environments; `GroupQueue` of alibaba/ROLL, commit 8eb27cc2, starts G + x
    rollouts and completes a group with G.
    """

    name = "rollart_redundancy"
    fidelity = "paper"
    does = "Begins spare rollouts of every prompt, keeps the first to end and closes the others"
    problems = ("long_tail", "agents")
    brings = frozenset({f"column:{NOTE}"})
    needs = from_params(lambda p: signals(redundancy=p.spare, columns=[NOTE] if p.spare else []))
    idle = (Idle({"closed": 0}, "no rollout was closed. Raise `spare`, or look at `failed`: too few rollouts end."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        spare: int = param(1, "x, number of rollouts of a prompt that begin beyond those that are kept", ge=0, le=64)

    def plan(self, plan: Plan) -> Plan | None:
        spare = self.params.spare
        if not spare:
            return None
        rows = (row.replace(redundant=row.redundant + spare) if row.n + row.spare else row for row in plan.rows)
        return plan.replace(rows=tuple(rows))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        told = [note if isinstance(note, Mapping) else {} for note in rollouts.meta.get(NOTE, ())]
        if not told:
            return
        values = torch.tensor([[note.get(name, torch.nan) for name in FIELDS] for note in told], dtype=torch.float64)
        means = {name: rollouts.groups.mean(c).nanmean() for name, c in zip(FIELDS, values.unbind(1), strict=True)}
        self.log("closed", means.pop("closed"))
        for name, mean in means.items():
            self.log(name, mean)  # NaN, which is not logged, where no group has a number
