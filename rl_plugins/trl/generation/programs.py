"""Rollout programs in TRL: run on every rank for its prompts, their rows served to TRL as those of a `rollout_func`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rl_plugins.core.requests import Prompt, Trajectory, Turn
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.decide import check_made
from rl_plugins.runtime.plan import split_plan
from rl_plugins.runtime.programs import Running, given_trajectory, run
from rl_plugins.runtime.ranks import gather, on_driver, rows_each, to_owners
from rl_plugins.runtime.turn_table import spans
from rl_plugins.trl.generation.plan import planned
from rl_plugins.trl.generation.prompts import Prompts
from rl_plugins.trl.generation.work import ProgramRow, Work, made_already
from rl_plugins.trl.host import DatasetRow, HostTrainer, Trainer, tokenizer_of


def work_of_programs(trainer: Trainer, prompts: Prompts) -> Work:
    """The rows that programs made of the plan."""
    plan = on_driver(trainer.accelerator, lambda: planned(trainer, prompts))
    rows = run_programs(trainer, plan, prompts.row)
    check_made(trainer.methods, len(rows))
    return made_already(trainer, prompts, rows)


def run_programs(
    trainer: Trainer, plan: Sequence[PlanRow], row_of: Callable[[PlanRow], DatasetRow]
) -> list[ProgramRow]:
    """Runs one program for every plan row, each rank those of its share; the rows of all, in the order of the plan.
    Tokens and what is known of them stand only in the rows that this rank is dealt."""
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    mine = split_plan(plan, ranks)[rank]
    local = [rollouts for _, rollouts in make_rollouts(trainer, mine, [row_of(p) for p in mine], training=True)]
    if ranks == 1:
        return number_rows(plan, local)
    parts = gather(trainer.accelerator, [[[outline(t) for t in rows] for rows in of] for of in local])
    every = number_rows(plan, [of for part in parts for of in part])
    first = sum(len(rows) for part in parts[:rank] for of in part for rows in of)
    own = dict(enumerate((t for of in local for rows in of for t in rows), first))
    each = rows_each(len(every), ranks, trainer.args.generation_batch_size // ranks)
    own = to_owners(trainer.accelerator, own, lambda place: place // each)
    return [replace(row, trajectory=own.get(i, row.trajectory)) for i, row in enumerate(every)]


def outline(trajectory: Trajectory) -> Trajectory:
    """All but what belongs to its tokens."""
    return replace(trajectory, prompt=(), tokens=(), kinds=(), logprobs=(), versions=(), turns=())


def make_rollouts(
    trainer: Trainer, plan: Sequence[PlanRow], rows: Sequence[DatasetRow], training: bool
) -> list[tuple[Prompt, list[list[Trajectory]]]]:
    """This rank's prompts with the rows of their rollouts: those the plan gives, then those a program makes."""
    stack = trainer.methods
    method = stack.claims["rollout"][0]
    tokens = trainer._tokenize_prompts([row["prompt"] for row in rows])[0] if rows else []
    columns: dict[int, DatasetRow] = {}
    engine = trainer.program_engine(lambda prompt: columns[id(prompt)])
    prompts = [
        Prompt(
            tokens=tuple(ids),
            messages=row["prompt"],
            columns=row,
            n=p.n + p.spare - len(p.given),
            max_tokens=min(p.max_tokens or trainer.max_completion_length, trainer.max_completion_length),
            max_context=engine.context,
            chat=engine.chat,
            prefix=tuple(p.prefix),
            payload=p.payload,
            batch=stack.batch,
            training=training,
            reward_names=tuple(trainer.reward_func_names),
            max_turns=p.max_turns,
            redundant=p.redundant,
            seed=f"{stack.seed}|{method.name}|{p.group}",
            traced=training and bool(stack.watchers),
        )
        for p, row, ids in zip(plan, rows, tokens, strict=True)
    ]
    columns.update({id(prompt): row for prompt, row in zip(prompts, rows, strict=True)})
    programs = {i: Running(method, prompt) for i, prompt in enumerate(prompts) if prompt.n}
    run(list(programs.values()), engine)
    engine.meter.costs.rows_made += sum(p.rows_made for p in programs.values())
    engine.log("train" if training else "eval")
    given = [[[given_trajectory(prompt, c)] for c in p.given] for p, prompt in zip(plan, prompts, strict=True)]
    made = [programs[i].rows or [] if i in programs else [] for i in range(len(prompts))]
    return [(prompt, old + new) for prompt, old, new in zip(prompts, given, made, strict=True)]


def number_rows(plan: Sequence[PlanRow], rollouts: Sequence[list[list[Trajectory]]]) -> list[ProgramRow]:
    """Numbers groups and rollouts. Rows with a label of their own form groups after those of the plan."""
    labels: dict[Any, int] = {}
    count: dict[int, int] = {}
    rows = []
    after = max((p.group for p in plan), default=-1) + 1
    for place, (p, of_prompt) in enumerate(zip(plan, rollouts, strict=True)):
        for rollout in of_prompt:
            numbers: dict[int, int] = {}
            for index, trajectory in enumerate(rollout):
                group = p.group
                if trajectory.group is not None:
                    group = labels.setdefault((place, trajectory.group), after + len(labels))
                if group not in numbers:
                    numbers[group] = count[group] = count.get(group, -1) + 1
                rows.append(ProgramRow(p, group, numbers[group], index, trajectory))
    return rows


def served(rows: Sequence[ProgramRow | None], prompts: Sequence[Any], trainer: HostTrainer) -> dict[str, Any]:
    """What TRL's `rollout_func` returns for rows that are made already. A row without a token, and a filler, is one end
    token that is not trained."""
    eos = trainer.eos_token_ids[0]
    empty = Trajectory((eos,)).observe((eos,))
    made = [row.trajectory if row is not None else empty for row in rows]
    made = [t if len(t) else t.observe((eos,)) for t in made]
    logprobs = [[None if p != p else p for p in t.logprobs] for t in made] if trainer.use_vllm else None
    return {
        "prompt_ids": [list(t.prompt) for t in made],
        "completion_ids": [list(t.tokens) for t in made],
        "logprobs": logprobs,
        "env_mask": [list(t.trained) for t in made],
    }


def host_turns(
    trainer: Trainer, real: Sequence[int], tool_mask: Sequence[Sequence[int]] | None, ids: Sequence[Sequence[int]]
) -> list[tuple[Turn, ...]]:
    """Turns of rows that TRL's own tools and environments made: the runs of the policy's tokens.

    An environment tells what it knows of them in an attribute `rl_plugins_turns`, a list with `anchor`, `reward` and
    `valid` of each (`trl.generation.environments.as_tools` makes such environments). Of others the anchor is the text
    that was read before the turn; of the first turn it is the prompt's row, so that rollouts of a prompt start alike.
    """
    out = []
    for i in real:
        mask = [1] * len(ids[i]) if tool_mask is None else list(tool_mask[i])
        records = getattr(trainer.environments[i], "rl_plugins_turns", None) if trainer.environments else None
        if records is None:
            turns = spans(mask)
            read = [ids[i][a : t.start] for a, t in zip([0, *(t.stop for t in turns)], turns, strict=False)]
            texts = [tokenizer_of(trainer).decode(part) for part in read]
            out.append(tuple(replace(t, anchor=text) for t, text in zip(turns, texts, strict=True)))
            continue
        turns = spans(mask, [r.anchor for r in records], [r.reward for r in records])
        out.append(
            tuple(
                Turn(t.start, t.stop, t.anchor, t.reward, records[k].valid if k < len(records) else True)
                for k, t in enumerate(turns)
            )
        )
    return out
