"""The update: `before_update`, `policy_loss` and `regularize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.rollouts import Update
from rl_plugins.testing.contract.compare import differences
from rl_plugins.testing.contract.kit import Kit
from rl_plugins.testing.contract.update_step import How, UpdateStep


def check_before_update(kit: Kit) -> bool:
    """before_update does not depend on the order of the rows"""
    if "before_update" not in kit.cls.claims():
        return False
    with kit.at("before_update"):
        step = UpdateStep(kit)
        one = step.update
        order = torch.from_numpy(np.random.default_rng(2).permutation(len(step.rows.length)))
        moved = {
            f.name: v[order]
            for f in dataclasses.fields(step.rows)
            if isinstance(v := getattr(step.rows, f.name), torch.Tensor)
        }
        rows = step.rows.replace(**moved, columns={k: v[order] for k, v in step.rows.columns.items()})
        two = step.stack.call("before_update", step.method, rows) or Update()
        for update in (one, two):
            if not isinstance(update, Update) or not np.isfinite(update.lr_scale) or update.lr_scale < 0:
                kit.fail(f"`before_update` returns {update!r}; it must be an Update with a finite lr_scale >= 0.")
                return True
        columns = {k: v[order] for k, v in one.columns.items()}
        for changed in differences(Update(one.lr_scale, columns), two, close=True):
            kit.fail(f"`before_update` depends on the order of the rows (`{changed}`).")
    return True


def check_losses(kit: Kit) -> bool:
    """losses: same value and gradient for every split into micro-batches and every padding; masked tokens are out"""
    hooks = [hook for hook in ("policy_loss", "regularize") if hook in kit.cls.claims()]
    for hook in hooks:
        with kit.at(hook):
            step = UpdateStep(kit)
            before = len(kit.problems)
            hows: tuple[How, ...] = ("token-mean", "seq-mean-token-mean")
            for how in ("sum",) if step.method.aggregation == "sum" else hows:
                if len(kit.problems) == before:
                    _check_loss_invariance(kit, step, hook, how)
    return bool(hooks)


def _check_loss_invariance(kit: Kit, step: UpdateStep, hook: str, how: How) -> None:
    everything, empty = list(range(step.size)), step.empty
    whole = step.loss(hook, how, [everything])
    if not all(bool(torch.isfinite(x).all()) for x in whole):
        kit.fail(f"`{hook}` or its gradient is not finite.")
        return
    if any(bool((g[step.mask == 0] != 0).any()) for g in whole[1:]):
        kit.fail(f"`{hook}` has a gradient at masked tokens; leave out what `terms.mask` says is out.")
    splits = {
        "depends on the split into micro-batches": [[[i] for i in everything], _pairs(everything)],
        "depends on the order of the rows": [[np.random.default_rng(6).permutation(everything).tolist()]],
    }
    others = {what: [step.loss(hook, how, split) for split in several] for what, several in splits.items()}
    others["depends on the width of the padding"] = [step.loss(hook, how, [everything], padding=3)]
    others["depends on values at masked tokens"] = [step.loss(hook, how, [everything], noise=True)]
    for what, losses in others.items():
        different = [loss for loss in losses if not _same_loss(whole, loss)]
        if different:
            kit.fail(
                f"`{hook}` {what}: losses are {float(whole[0]):.6g} and {float(different[0][0]):.6g}, or gradients "
                "differ. Return one value per token that depends on its own row only; what rows share comes as a "
                "column, `num_tokens` or `num_rows`."
            )
    nothing = step.loss(hook, how, [empty])
    if any(bool((x != 0).any()) or bool(torch.isnan(x).any()) for x in nothing):
        kit.fail(f"`{hook}` of rows without a token is {float(nothing[0]):.6g}; it must be 0, with gradient 0.")


def _pairs(rows: list[int]) -> list[list[int]]:
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


def _same_loss(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Equal up to the rounding of float32 sums."""
    return all(torch.allclose(x, y, 1e-4, 1e-5 * (1e-3 + float(x.abs().max()))) for x, y in zip(a, b, strict=True))
