"""A small host: plans, "generates" and decides, batch after batch, as the driver asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.rollouts import Plan, PlanRow, Rollouts, Tokens
from rl_plugins.runtime.decide import Decision, check_full
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.rounds import Rounds, in_rounds, most_in_rounds
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing.contract.kit import BUDGET, GROUP_SIZE, GROUPS, NAN, PROMPTS, Kit


@dataclass
class DecidedBatch:
    """One generation batch of the small host: what was planned, generated and decided."""

    plan: list[PlanRow]
    tokens: Tokens
    decision: Decision


def run_batch(kit: Kit, stack: MethodStack) -> DecidedBatch:
    """Plans, generates and decides once."""
    proposal = [(GROUPS * stack.batch + i) % PROMPTS for i in range(GROUPS)]
    plan = first_plan(stack, proposal, GROUP_SIZE, BUDGET * kit.rows_per_rollout, PROMPTS, kit.dataset)
    rows = list(plan.rows)
    rollouts, forced = _generate(kit, rows, stack.batch)
    rounds = Rounds(stack, rows, GROUP_SIZE, BUDGET)
    while in_rounds(stack) and rounds.more(rollouts.group, rollouts.reward):
        rows = rounds.rows
        rollouts, forced = _generate(kit, rows, stack.batch)
    _check_bound(kit, stack, plan, rounds)
    tokens = kit.tokens(rollouts, forced=forced, seed=stack.batch)
    decision = kit.decide(stack, rollouts, tokens, BUDGET * kit.rows_per_rollout)
    check_full(stack, decision, BUDGET * kit.rows_per_rollout)
    return DecidedBatch(rows, tokens, decision)


def _check_bound(kit: Kit, stack: MethodStack, plan: Plan, rounds: Rounds) -> None:
    """Fails where a batch took more than `further_rounds` says of its first plan."""
    most, allowed = most_in_rounds(stack, plan)
    made = sum(max(0, row.n + row.spare - len(row.given)) for row in rounds.rows)
    if rounds.number > most or made > allowed:
        kit.fail(
            f"a batch took {rounds.number} rounds and {made} rollouts, and by `further_rounds` it takes at most {most} "
            f"and {allowed}."
        )


def _generate(kit: Kit, plan: Sequence[PlanRow], batch: int) -> tuple[Rollouts, Tensor]:
    """The rollouts of a plan, which depend on batch, prompt and number alone; and which tokens are forced."""
    made = [(row, i) for row in plan for i in range(row.n + row.spare)]
    group = [row.group for row, _ in made]
    number = [group[:i].count(g) for i, g in enumerate(group)]
    rewards, lengths, versions, forced = [], [], [], []
    for (row, i), k in zip(made, number, strict=True):
        given = row.given[i] if i < len(row.given) else None
        length = len(row.prefix) + 1 + (3 * row.prompt_index + 2 * k) % 4
        put_in = len(row.prefix)  # tokens that were not sampled
        if given is not None:
            length = len(given.tokens) - sum(given.observed or ())
            put_in = length if given.logprobs is None else 0
        chance = np.random.default_rng([batch, row.prompt_index + 1, k]).random()
        reward = NAN if chance > 0.97 else float(chance < 0.2 + 0.3 * (row.prompt_index % 3))
        stored = (given and given.rewards) or {}
        rewards.append(stored.get("reward_0", reward))
        lengths.append(length)
        versions.append(min(given.versions) if given and given.versions else batch)
        forced += [j < put_in for j in range(length)]
    per_rollout = kit.rows_per_rollout
    repeat = torch.arange(len(made)).repeat_interleave(per_rollout).tolist()
    dataset = kit.dataset
    edits = [{**dataset[max(row.prompt_index, 0)], **(row.edit or {})} for row, _ in made]
    rollouts = kit.rollouts(
        [rewards[i] for i in repeat],
        [group[i] for i in repeat],
        lengths=[lengths[i] for i in repeat],
        prompt_index=[made[i][0].prompt_index for i in repeat],
        rollout=torch.tensor([number[i] for i in repeat], dtype=torch.int64),
        index=torch.arange(len(repeat)) % per_rollout,
        payload=[made[i][0].payload for i in repeat],
        meta={c: [edits[i].get(c) for i in repeat] for c in kit.columns},
        batch=batch,
        version=torch.tensor([versions[i] for i in repeat], dtype=torch.int64),
        current_version=batch,
    )
    return rollouts, torch.tensor(forced if per_rollout == 1 else [False] * int(rollouts.length.sum()))
