"""Over-provisioned generation in TRL: all admitted groups are decoded together until enough are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rl_plugins.core.requests import Generate, Generated, Prompt, Trajectory
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.carry_over import Group, admit, finished, requeue, without_redundant
from rl_plugins.runtime.plan import check_length
from rl_plugins.runtime.ranks import on_driver, on_driver_for_each, rows_each, to_driver, to_owners
from rl_plugins.trl.generation.programs import outline
from rl_plugins.trl.generation.prompts import Prompts
from rl_plugins.trl.generation.work import ProgramRow, Work, made_already
from rl_plugins.trl.host import DatasetRow, ProgramEngine, Trainer


def work_of_queue(trainer: Trainer, prompts: Prompts) -> Work:
    """The rows of the groups that are complete."""
    return made_already(trainer, prompts, run_queue(trainer, prompts))


def run_queue(trainer: Trainer, prompts: Prompts) -> list[ProgramRow]:
    """Generates, puts what is not trained back into the queue, and returns the rows of the groups that are.

    On several ranks every rank decodes whole groups of its own and stops at its share of complete ones; there is no
    exchange for every token. Tokens go to the driver, whose queue they wait in, and to the rank that trains them.
    """
    stack, accelerator, size = trainer.methods, trainer.accelerator, trainer.num_generations
    enough, ranks = trainer.args.generation_batch_size // size, accelerator.num_processes
    k = accelerator.process_index
    trained: list[ProgramRow] = []  # on the driver only

    def begin() -> list[list[Group]]:
        groups = admit(stack, prompts.proposal, enough, size, prompts.size, prompts.dataset)
        for g in groups:
            check_length(g.row, trainer.max_completion_length)
        return [groups[rank::ranks] for rank in range(ranks)]  # the oldest first on every rank

    mine = on_driver_for_each(accelerator, begin)
    parts = to_driver(accelerator, decode(trainer, mine, enough // ranks + (k < enough % ranks), prompts.row))

    def end() -> list[ProgramRow]:
        count = sum(len(made) for made, _ in parts)
        places = [(i % ranks, i // ranks) for i in range(count)]  # as `begin` dealt them
        after = [parts[rank][0][n] for rank, n in places]
        tick = [parts[rank][1][n] for rank, n in places]
        order = sorted((i for i, g in enumerate(after) if g.complete), key=lambda i: (tick[i], i))
        chosen = requeue(stack, after, order, enough)[0]
        trained[:] = [ProgramRow(g.row, g.row.group, n, 0, t) for g in chosen for n, t in enumerate(g.rollouts)]
        plans = {g.row.group: g.row.replace(payload=None) for g in chosen}
        return [replace(r, plan=plans[r.group], trajectory=outline(r.trajectory)) for r in trained]

    rows = on_driver(accelerator, end)
    each = rows_each(len(rows), ranks, trainer.args.generation_batch_size // ranks)
    own = to_owners(accelerator, {i: r.trajectory for i, r in enumerate(trained)}, lambda place: place // each)
    return [replace(row, trajectory=own.get(i, row.trajectory)) for i, row in enumerate(trained or rows)]


def decode(
    trainer: Trainer, groups: Sequence[Group], enough: int, row_of: Callable[[PlanRow], DatasetRow]
) -> tuple[list[Group], list[int]]:
    """Decodes groups until `enough` are complete. Of those that are, the redundant rollouts are gone.

    Returns:
        The groups with their tokens, and for each after how many tokens its last rollout ended.
    """
    engine = trainer.program_engine(lambda prompt: {})
    begun = _begun(trainer, groups, row_of)
    rooms = [_room(trainer, engine, g) for g in begun]
    begun = [_without_full(g, room) for g, room in zip(begun, rooms, strict=True)]
    going = [(i, n) for i, g in enumerate(begun) if not g.complete for n, t in enumerate(g.rollouts) if not finished(t)]
    numbers = {i: k for k, i in enumerate(dict.fromkeys(i for i, _ in going))}
    missing = [begun[i].enough - sum(map(finished, begun[i].rollouts)) for i in numbers]
    rollouts = [begun[i].rollouts[n] for i, n in going]
    requests = [Generate(t, max_tokens=rooms[i].room(t)) for t, (i, _) in zip(rollouts, going, strict=True)]
    still = max(0, enough - sum(g.complete for g in begun))
    made, lengths = engine.race(requests, [numbers[i] for i, _ in going], missing, still)
    engine.log("train")
    after = {at: _with(t, new) for at, t, new in zip(going, rollouts, made, strict=True)}
    ticks = dict(zip(going, lengths, strict=True))
    ended = []
    for i, g in enumerate(begun):
        g = replace(g, rollouts=tuple(after.get((i, n), t) for n, t in enumerate(g.rollouts)))
        of_group = [ticks.get((i, n), 0) for n in range(g.size)]
        ended.append(without_redundant(g, of_group) if g.complete else (g, max(of_group)))
    return [g for g, _ in ended], [tick for _, tick in ended]


def _begun(trainer: Trainer, groups: Sequence[Group], row_of: Callable[[PlanRow], DatasetRow]) -> list[Group]:
    """The groups; those that are new get rollouts that hold their prompt and its prefix."""
    fresh = [g for g in groups if not g.rollouts]
    tokens = iter(trainer._tokenize_prompts([row_of(g.row)["prompt"] for g in fresh])[0] if fresh else [])
    return [
        g if g.rollouts else replace(g, rollouts=(Trajectory(tuple(next(tokens))).force(g.row.prefix),) * g.size)
        for g in groups
    ]


def _room(trainer: Trainer, engine: ProgramEngine, group: Group) -> Prompt:
    """The prompt of a group, which knows how many tokens still fit."""
    most = trainer.max_completion_length
    return Prompt(
        tokens=tuple(group.rollouts[0].prompt),
        messages=None,
        columns={},
        n=group.size,
        max_tokens=min(group.row.max_tokens or most, most),
        max_context=engine.context,
        chat=engine.chat,
    )


def _without_full(group: Group, prompt: Prompt) -> Group:
    """The group; rollouts that have no room left end."""
    ends = [not finished(t) and not prompt.room(t) for t in group.rollouts]
    rollouts = zip(group.rollouts, ends, strict=True)
    return replace(group, rollouts=tuple(replace(t, finish="length") if full else t for t, full in rollouts))


def _with(trajectory: Trajectory, new: Generated) -> Trajectory:
    return trajectory.add(new) if new.tokens else replace(trajectory, finish=trajectory.finish or "abort")
