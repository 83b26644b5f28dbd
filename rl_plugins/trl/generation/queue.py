"""Over-provisioned generation in TRL: all admitted groups are decoded together until enough are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rl_plugins.core.requests import Generate, Prompt, Trajectory
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.carry_over import Group, admit, finished, requeue, without_redundant
from rl_plugins.runtime.plan import check_length
from rl_plugins.runtime.ranks import on_driver, on_driver_for_each, rows_each, to_driver, to_owners
from rl_plugins.trl.generation.programs import outline
from rl_plugins.trl.generation.prompts import Prompts
from rl_plugins.trl.generation.work import ProgramRow, Work, made_already
from rl_plugins.trl.host import DatasetRow, Trainer


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
    fresh = [g for g in groups if not g.rollouts]
    tokens = trainer._tokenize_prompts([row_of(g.row)["prompt"] for g in fresh])[0] if fresh else []
    prompts = {id(g): tuple(ids) for g, ids in zip(fresh, tokens, strict=True)}
    begun = [
        replace(g, rollouts=(Trajectory(prompts[id(g)]).force(g.row.prefix),) * g.size) if id(g) in prompts else g
        for g in groups
    ]
    requests: list[Generate] = []
    place: list[tuple[int, int]] = []
    whole: list[list[Trajectory]] = [list(g.rollouts) for g in begun]
    for i, g in enumerate(begun):
        room = Prompt(
            tokens=tuple(g.rollouts[0].prompt),
            messages=None,
            columns={},
            n=g.size,
            max_tokens=min(g.row.max_tokens or trainer.max_completion_length, trainer.max_completion_length),
            max_context=engine.context,
            chat=engine.chat,
        )
        for n, t in enumerate(g.rollouts):
            left = room.room(t)
            if finished(t):
                continue
            if not left:
                whole[i][n] = replace(t, finish="length")
                continue
            requests.append(Generate(t, max_tokens=left))
            place.append((i, n))
    begun = [replace(g, rollouts=tuple(of)) for g, of in zip(begun, whole, strict=True)]
    ready = [g.complete for g in begun]
    going = [k for k, (i, _) in enumerate(place) if not ready[i]]
    requests, place = [requests[k] for k in going], [place[k] for k in going]
    numbers = {i: k for k, i in enumerate(dict.fromkeys(i for i, _ in place))}
    missing = [begun[i].enough - sum(map(finished, begun[i].rollouts)) for i in numbers]
    made, lengths = engine.race(requests, [numbers[i] for i, _ in place], missing, max(0, enough - sum(ready)))
    engine.log("train")
    ticks = [[0] * g.size for g in begun]
    for (i, n), new, length in zip(place, made, lengths, strict=True):
        t = whole[i][n]
        whole[i][n] = t.add(new) if new.tokens else replace(t, finish=t.finish or "abort")
        ticks[i][n] = length
    after = [replace(g, rollouts=tuple(of)) for g, of in zip(begun, whole, strict=True)]
    ended = [without_redundant(g, of) if g.complete else (g, max(of)) for g, of in zip(after, ticks, strict=True)]
    return [g for g, _ in ended], [tick for _, tick in ended]
