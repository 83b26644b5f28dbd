"""Log-probs and other columns of tokens that methods ask for, where TRL did not compute them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_plugins.runtime.ranks import gather
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.changes import head_output
from rl_plugins.trl.generation.work import ScoredWork, Work
from rl_plugins.trl.host import HostBatch, Trainer, logprobs_of, more_model_input

NAMES = frozenset(
    {"old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "entropies", "sum_squared_probs"}
)


def columns_wanted(stack: MethodStack) -> frozenset[str] | set[str]:
    """Those a batch must have before it is decided on."""
    return stack.needs_now & NAMES


def with_columns(trainer: Trainer, scored: ScoredWork, out: HostBatch) -> tuple[HostBatch, dict[str, Tensor]]:
    """TRL's batch with log-probs somebody needs and TRL did not compute (one pass at the weights that generated);
    and the columns methods asked for: signal -> (rows, time)."""
    t, wanted, out = trainer, columns_wanted(trainer.methods), dict(out)
    engine, entropies = out.get("sampling_per_token_logps"), None
    sampled = "rollout_logprobs" in wanted and (
        engine is None or any(gather(t.accelerator, bool(torch.isnan(engine).any())))  # forced tokens have none
    )
    seen: list[Tensor] = []  # of each micro-batch
    if wanted & {"entropies", "sum_squared_probs"} or (
        ("old_logprobs" in wanted or sampled) and "old_per_token_logps" not in out
    ):
        with head_output(t, "sum_squared_probs" in wanted, seen):
            more = {"compute_entropy": "entropies" in wanted, **more_model_input(out)}
            logprobs, entropies = logprobs_of(t, t.model, out, **more)
        out.setdefault("old_per_token_logps", logprobs)
    if "rollout_logprobs" in wanted:
        out["rlp_rollout_logprobs"] = rollout_logprobs(scored.work, out)
    found = {
        "old_logprobs": out.get("old_per_token_logps"),
        "rollout_logprobs": out.get("rlp_rollout_logprobs"),
        "ref_logprobs": out.get("ref_per_token_logps"),
        "entropies": entropies,
        "sum_squared_probs": torch.cat(seen)[:, -out["completion_ids"].size(1) :].exp() if seen else None,
    }
    return out, {name: c for name, c in found.items() if name in wanted and c is not None}


def rollout_logprobs(work: Work, out: HostBatch) -> Tensor:
    """(rows, time) of what was sampled: the engine's, else the policy's own (transformers samples from exactly it);
    given completions have their own. A token without one falls back to the policy at the start of the step."""
    old = out.get("old_per_token_logps")
    name = "sampling_per_token_logps" if "sampling_per_token_logps" in out else "old_per_token_logps"
    behavior = out[name].clone()
    for i, row in enumerate(work.mine):
        own: Sequence[float | None] | None = None
        if row.made is not None:
            own = row.made.trajectory.logprobs
        elif row.given is not None:
            own = row.given.logprobs
        if own:
            values = torch.from_numpy(np.array(own, np.float64))  # None is NaN
            behavior[i, : len(values)] = values.to(behavior)
    return behavior if old is None else torch.where(torch.isnan(behavior), old, behavior)
