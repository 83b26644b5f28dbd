"""Rows that are made round by round, each planned with the rewards so far, until no method asks for more.

Each round goes through TRL's own generation and reward functions. When all are done, TRL's own method makes the batch
and is served with what is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from rl_plugins.core.rollouts import Completion, PlanRow, weighted_reward
from rl_plugins.runtime.ranks import deal, gather, on_driver, to_owners
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.trl.changes import changed
from rl_plugins.trl.generation.plan import checked, planned, rows_of, without_payload
from rl_plugins.trl.generation.prompts import Prompts
from rl_plugins.trl.generation.serving import inputs_of
from rl_plugins.trl.generation.work import FILLER, Row, Work, dealt, flat
from rl_plugins.trl.host import HostRows, Trainer

Made: TypeAlias = tuple[Completion, dict[str, Any]]  # a completion, and what reward functions added to its table


@dataclass(frozen=True)
class RoundRow:
    """A row of an earlier round, with its rewards; its completion is with the rank that made it, and empty here."""

    row: Row
    group: int
    reward: list[float]


def work_of_rounds(trainer: Trainer, prompts: Prompts) -> Work:
    """Generates and scores; in the work that is left groups are whole, in them the rows have the order of the
    rounds."""
    made, own, payload = all_rounds(trainer, prompts)
    order = sorted(range(len(made)), key=lambda i: made[i].group)
    made, payload = [made[i] for i in order], [payload[i] for i in order] if payload else []
    rows, accelerator = dealt(trainer, [m.row for m in made]), trainer.accelerator
    rank, each, place = accelerator.process_index, len(rows[0]), {i: k for k, i in enumerate(order)}
    own = to_owners(accelerator, {place[i]: x for i, x in own.items()}, lambda k: k // each)
    here = [own.get(k) for k in range(rank * each, (rank + 1) * each)]  # of fillers None
    rows[rank] = [r if x is None else replace(r, done=x[0]) for r, x in zip(rows[rank], here, strict=True)]
    names = dict.fromkeys(flat(gather(accelerator, [*{n: 0 for _, x in own.values() for n in x}])))
    extra = {n: [None if x is None else x[1].get(n) for x in here] for n in names}
    rewards = torch.full((sum(map(len, rows)), len(trainer.reward_funcs)), torch.nan)
    rewards[: len(made)] = torch.tensor([m.reward for m in made])
    return Work(prompts, rows, rank, payload=payload, rewards=rewards.to(accelerator.device), extra=extra)


def all_rounds(trainer: Trainer, prompts: Prompts) -> tuple[list[RoundRow], dict[int, Made], list[Any]]:
    """Round after round, until the driver plans none: the rows of all ranks in the order they were made; by their
    places what this rank made; on the driver the payload of each row."""
    stack, size, budget = trainer.methods, trainer.num_generations, trainer.args.generation_batch_size
    weights = trainer.reward_weights.double().cpu()
    made: list[RoundRow] = []
    own: dict[int, Made] = {}
    payload: list[Any] = []
    account: list[Rounds] = []  # on the driver, once the first round is planned

    def more() -> tuple[PlanRow, ...]:
        if not account:
            rows = planned(trainer, prompts)
            account.append(Rounds(stack, rows, size, budget, prompts.size))
        else:
            group = torch.tensor([m.group for m in made])
            reward = weighted_reward(torch.tensor([m.reward for m in made]).double(), weights)
            rows = checked(trainer, prompts, account[0].more(group, reward))
        return without_payload(rows, payload)

    while plan := on_driver(trainer.accelerator, more):
        new, mine = one_round(trainer, prompts, rows_of(plan))
        own |= {len(made) + i: x for i, x in mine.items()}
        made += new
    return made, own, payload


def one_round(trainer: Trainer, prompts: Prompts, rows: list[Row]) -> tuple[list[RoundRow], dict[int, Made]]:
    """One round on all ranks; and by their places what this rank made of it. TRL's counters and metrics are put back,
    because TRL counts these rows again when it is served with them."""
    t, rank = trainer, trainer.accelerator.process_index
    work = Work(prompts, deal(rows, t.accelerator.num_processes, 1, FILLER), rank)
    seen, metrics = t.state.num_input_tokens_seen, {k: list(v) for k, v in t._metrics["train"].items()}
    inputs = inputs_of(work)
    asked = [x["prompt"] for x in inputs]
    with changed(t, batch_phase=work):
        new = HostRows.of(t._generate(asked))
        rewards = t._calculate_rewards(inputs, asked, new.completions, new.ids).double().tolist()
    t.state.num_input_tokens_seen = seen
    t._metrics["train"].clear()
    t._metrics["train"].update(metrics)
    extra = [{k: v[i] for k, v in t._pending_extra_logs.items() if i < len(v)} for i in range(len(inputs))]
    t._pending_extra_logs.clear()
    logprobs: list[Any] = new.logprobs or [None] * len(inputs)
    local = [
        (row.given or Completion(tuple(c), None if p is None else tuple(p)), e)
        for row, c, p, e in zip(work.mine, new.ids, logprobs, extra, strict=True)
    ]
    start = len(inputs) * rank
    found = [
        RoundRow(replace(row, done=Completion(())), row.plan.group, reward)
        for row, reward in zip(work.flat, rewards, strict=True)
        if row.plan is not None
    ]
    return found, {start + k: x for k, x in enumerate(local) if start + k < len(found)}
