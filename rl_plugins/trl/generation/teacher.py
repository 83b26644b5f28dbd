"""Log-probs of completions under other prompts or by another model, for methods that learn from a teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_plugins.runtime.chat import check_teacher
from rl_plugins.runtime.decide import Selection, select_rows, teacher_prompts
from rl_plugins.runtime.ranks import on_driver_for_each, to_driver
from rl_plugins.trl.generation.rows import collect, rollouts_of
from rl_plugins.trl.generation.work import ScoredWork
from rl_plugins.trl.host import HostBatch, Trainer, logprobs_of, tokenizer_of


def select_for_teacher(
    trainer: Trainer, scored: ScoredWork, host_advantages: Tensor
) -> tuple[Selection | None, list[Any] | None]:
    """`rewards`, `select` and `teacher_prompts`, which come before the pass of the teacher.

    Returns:
        What was selected, on the driver only; and a prompt for each of this rank's rows, None for those without one.
        None instead of the list: each has its own; empty: no row of any rank has one.
    """
    stack, work, chosen = trainer.methods, scored.work, list[Selection]()
    parts = to_driver(trainer.accelerator, collect(trainer, scored, host_advantages, {})[0])

    def run() -> list[list[Any] | None]:
        chosen.append(select_rows(stack, rollouts_of(trainer, work, scored.rewards, parts).rollouts))
        prompts = teacher_prompts(stack, chosen[0])
        if prompts is None or all(p is None for p in prompts):
            return [None if prompts is None else []] * len(work.rows)
        each = iter(prompts)
        return [[None if row.plan is None else next(each) for row in rows] for rows in work.rows]

    mine = on_driver_for_each(trainer.accelerator, run)
    return (chosen[0] if chosen else None), mine


def teacher_logprobs(trainer: Trainer, out: HostBatch, prompts: list[Any] | None) -> Tensor:
    """(rows, time) log-probs of TRL's batch by the teacher, NaN in rows without a prompt. Every rank makes equally many
    passes, so these rows are read, too.

    Args:
        prompts: as `select_for_teacher` returns them.
    """
    t, completion = trainer, out["completion_ids"]
    nothing = torch.full(completion.shape, torch.nan, device=completion.device)
    if prompts == []:
        return nothing
    batch, given = out, [p for p in prompts or () if p is not None]
    if given and prompts is not None:
        ids = t._tokenize_prompts([given[0] if p is None else p for p in prompts])[0]
        pad, width = tokenizer_of(t).pad_token_id, max(map(len, ids))
        left = [[pad] * (width - len(row)) + list(row) for row in ids]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in ids]
        made = {"prompt_ids": torch.tensor(left), "prompt_mask": torch.tensor(mask)}
        batch = {**out, **{name: x.to(completion.device) for name, x in made.items()}}
    logprobs, _ = logprobs_of(t, t.model if t.teacher is None else t.teacher, batch)
    if prompts is None:
        return logprobs
    read = torch.tensor([p is not None for p in prompts], device=completion.device)
    return torch.where(read[:, None], logprobs, nothing)


def load_teacher(trainer: Trainer, name: str) -> Any:
    """A model that is only read, made as TRL makes a reference model.

    Raises:
        ConfigError: its tokenizer has other token ids than the policy's.
    """
    from trl.trainer import grpo_trainer as host

    args = trainer.args
    check_teacher(tokenizer_of(trainer), name, trust_remote_code=args.trust_remote_code)
    defaults = {"trust_remote_code": args.trust_remote_code, "dtype": trainer.model.dtype}
    options = {**defaults, **(args.model_init_kwargs or {})}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    model = host.create_model_from_path(name, **options)
    host.disable_dropout_in_model(model)
    host.add_fused_lm_head(model, temperature=trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    if trainer.is_deepspeed_enabled:
        return host.prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return host.prepare_fsdp(model, trainer.accelerator)
    accelerator: Any = trainer.accelerator
    return accelerator.prepare_model(model, evaluation_mode=True)
