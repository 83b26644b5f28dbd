"""Answers to what TRL's own method asks for while it makes a batch: prompts, completions, rewards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rl_plugins.core.rollouts import Completion, PlanRow
from rl_plugins.trl import logs
from rl_plugins.trl.changes import changed
from rl_plugins.trl.generation.programs import served
from rl_plugins.trl.generation.work import Row, Work
from rl_plugins.trl.host import DatasetRow, Score, SingleTurn, Trainer

Tokens: TypeAlias = tuple[list[int], list[float | None] | None]  # of a completion, with their log-probs


@contextlib.contextmanager
def host_view(trainer: Trainer, work: Work, proposed: list[DatasetRow]) -> Iterator[list[DatasetRow]]:
    """This rank's inputs, with TRL's settings bent for as long as its own method runs on them.

    Args:
        proposed: TRL's own inputs, which it gets where the plan leaves its prompts.
    """
    logs.make_room(trainer, len(work.flat))
    for name, values in work.extra.items():
        trainer._pending_extra_logs[name].extend(values)
    bent: dict[str, Any] = {} if work.regular else {"num_generations": 1}  # other groups mean nothing to TRL
    if work.by_program:  # what the programs made, in the place TRL has for it
        made = [r.made for r in work.mine]
        bent["rollout_func"] = lambda prompts, trainer: served(made, prompts, trainer)
    with changed(trainer, batch_phase=work, **bent):
        yield proposed if work.as_proposed else inputs_of(work)


def inputs_of(work: Work) -> list[DatasetRow]:
    """This rank's rows as TRL's dataloader would give them; fillers look like the first row of all."""
    anything = next(r.plan for r in work.flat if r.plan is not None)
    inputs = [work.prompts.row(r.plan or anything) for r in work.mine]
    # what a program notes of a row is a column for reward functions
    names = dict.fromkeys(k for r in work.flat if r.made for k in r.made.trajectory.meta)
    for row, x in zip(work.mine, inputs, strict=True):
        x |= {k: (row.made.trajectory.meta if row.made else {}).get(k, x.get(k)) for k in names}
    return inputs


# ---- completions


def completions(
    trainer: Trainer,
    work: Work,
    host: SingleTurn,
    prompt_ids: list[list[int]],
    images: Any,
    fields: dict[str, Any],
    num_generations: int,
) -> tuple[list[list[int]], Any]:
    """Serves TRL's request for one completion per row: given ones as they are, the others from the engine."""
    rows, eos = work.mine, trainer.eos_token_ids[0]
    if all(r.plain for r in work.flat):  # of all ranks: they must make the same request
        # a vLLM server is asked for `each` completions of every each-th prompt
        return host(prompt_ids, images, fields, num_generations if work.regular else 1)
    made = _from_engine(trainer, work, host, prompt_ids, images, fields)
    for i, row in enumerate(rows):
        if i not in made:
            given = row.given or Completion((eos,))
            made[i] = list(given.tokens), _sampled(given)
    out = [made[i][0] or [eos] for i in range(len(rows))]
    if not trainer.use_vllm and trainer.cheap_rollouts is None:
        return out, None
    return out, [made[i][1] or [None] * len(tokens) for i, tokens in enumerate(out)]


def _from_engine(
    trainer: Trainer, work: Work, host: SingleTurn, prompt_ids: list[list[int]], images: Any, fields: dict[str, Any]
) -> dict[int, Tokens]:
    """What this rank's engine makes, by the rows it is asked for."""
    rows = work.mine
    todo = [i for i, r in enumerate(rows) if r.asked]
    if not todo and len(work.rows) == 1:
        return {}
    ask = todo or [0]  # every rank must enter the engine, even one with nothing to generate
    if trainer.use_vllm:  # TRL cuts the answer of a server, or of a tensor-parallel group, into equal shares
        most = max(sum(r.asked for r in part) for part in work.rows)
        ask = ask + ask[:1] * (most - len(ask))
    prompts = [prompt_ids[i] + list(p.prefix if (p := rows[i].plan) else ()) for i in ask]
    part = {k: [v[i] for i in ask] if isinstance(v, list) else v for k, v in fields.items()}
    ids, logprobs = host(prompts, images, part, 1)
    own = [None if logprobs is None else logprobs[j] for j in range(len(todo))]
    return {i: _with_prefix(trainer, rows[i].plan, ids[j], own[j]) for j, i in enumerate(todo)}


def _with_prefix(trainer: Trainer, plan: PlanRow | None, ids: list[int], logprobs: list[float | None] | None) -> Tokens:
    prefix, limit = list(plan.prefix) if plan else [], trainer.max_completion_length
    limit = min(limit, plan.max_tokens) if plan and plan.max_tokens is not None else limit
    if not prefix and len(ids) <= limit:
        return ids, logprobs  # as they are: a trainer may have made more than a list of them
    tokens = (prefix + list(ids))[:limit]
    return tokens, None if logprobs is None else ([None] * len(prefix) + list(logprobs))[:limit]


def _sampled(given: Completion) -> list[float | None] | None:
    """Log-probs for TRL, which reads those of masked tokens, too."""
    if given.logprobs is None or given.observed is None:
        return None if given.logprobs is None else list(given.logprobs)
    return [0.0 if read else p for p, read in zip(given.logprobs, given.observed, strict=True)]


def with_observed(work: Work, generated: tuple[Any, ...]) -> tuple[Any, ...]:
    """What TRL's `_generate` returned, with a mask of the tokens that were only read in given completions."""
    if not any(r.given is not None and r.given.observed for r in work.flat):
        return generated
    prompts, ids, _, *rest = generated
    mask = [[1] * len(tokens) for tokens in ids]
    for i, row in enumerate(work.mine):
        if row.given is not None and row.given.observed:
            mask[i] = [int(not read) for read in row.given.observed]
    return prompts, ids, mask, *rest


# ---- rewards


def rewards_of(trainer: Trainer, work: Work, host: Score, *columns: list[Any]) -> Tensor:
    """(rows of all ranks, functions) TRL's rewards; fillers are unscorable.

    Args:
        columns: of this rank's rows, as TRL hands them to its reward functions.
    """
    if work.rewards is not None:
        return work.rewards
    if any(r.rewards is not None for r in work.flat):
        return _missing_rewards(trainer, work, host, columns)
    rewards = host(*columns)
    filler = torch.tensor([r.plan is None for r in work.flat], device=rewards.device)
    return torch.where(filler[:, None], torch.nan, rewards)


def _missing_rewards(trainer: Trainer, work: Work, host: Score, columns: Sequence[list[Any]]) -> Tensor:
    """Rewards that are known (a program has them from `Score`, a given completion brings them), and TRL's for the
    other rows, which alone are computed."""
    given, size, rank = [r.rewards for r in work.flat], len(work.mine), work.rank
    rewards = torch.full((len(given), len(trainer.reward_funcs)), torch.nan, device=trainer.accelerator.device)
    each = [[i for i, r in enumerate(part) if _unscored(r)] for part in work.rows]
    most = max(map(len, each))
    if most:
        take = each[rank] + (each[rank][:1] or [0]) * (most - len(each[rank]))  # equally many on every rank
        inputs, prompts, texts, ids = ([x[i] for i in take] for x in columns)
        scored = host(inputs, prompts, texts, ids)
        for k, places in enumerate(each):
            at = k * size + torch.tensor(places, dtype=torch.int64, device=rewards.device)
            rewards[at] = scored[k * most : k * most + len(places)]
        _spread_extra_columns(trainer, each[rank], size)
    for i, own in enumerate(given):
        if own is not None:
            rewards[i] = torch.tensor([own.get(n, torch.nan) for n in trainer.reward_func_names])
    return rewards


def _unscored(row: Row) -> bool:
    return row.plan is not None and row.rewards is None


def _spread_extra_columns(trainer: Trainer, scored: list[int], rows: int) -> None:
    """What reward functions added to the table of completions, at the rows they saw."""
    for name, values in trainer._pending_extra_logs.items():
        full: list[Any] = [None] * rows
        for i, value in zip(scored, values, strict=False):
            full[i] = value
        trainer._pending_extra_logs[name] = full
