"""D3S (arXiv 2509.22115): train the rows with the largest advantage variance and their tokens with the largest |A| x
entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins import ConfigError, Groups, Idle, Method, MethodParams, Rollouts, Run, Shape, Tokens, param
from rl_plugins.core.groups import parts, spread
from rl_plugins.core.params import GIVEN

_ROUNDING = 1e-9  # of variances that are equal, and of shares times counts


class D3s(Method):
    """Dynamic Dual-Level Down-Sampling: trains few rows and tokens at first, and almost all of them at the end.

    Reconstruction: shares, ties, rounding, and whether tokens are ranked over the batch are ours. The rules are the
    paper's. After any estimator, with p = batch / batches of the run, a share is (1 - p) start + p end:

        1. group    of the n rows of each group keep the round(group_rows(p) n) rows whose A have the largest variance
        2. batch    of these rows keep the round(batch_rows(p) * rows of the batch) with the largest variance of A
        3. tokens   of the tokens of these rows keep the ceil(tokens(p) * number of them) with the largest |A_it| H_it

    The rows with the largest (population) variance are the h largest and otherwise the smallest ones for some h, so all
    h are tried. Of equal variances the h closest to half of the rows wins, then the larger; of equal rows the earlier.

    Symbols: A (rows,) float64 is the mean of the row's token advantages; A_it (tokens,) that of the token; H_it
    (tokens,) its entropy in nats, of the policy before the update. The loss is normalized by what is kept.

    Special cases: at least one row of a group and of the batch is kept, that with the largest |A| if it is one. Rows
    without a reward (NaN) leave as soon as rows are selected and do not count in the shares. Each row of a rollout
    counts separately, and a row may lose all of its tokens.

    Source: arXiv 2509.22115, sample level, token level and dynamic schedule. The authors' code was not published
    (2026-11-26; a note says that it is in the supplement at ICLR 2026)."""

    name = "d3s"
    fidelity = "reconstruction"
    does = "Trains only the rows with the largest advantage variance and their most informative tokens"
    problems = ("length",)
    needs = frozenset({"tokens", "entropies"})
    idle = (Idle({"rows_kept": 1, "tokens_kept": 1}, "no row and no token left. Lower the shares at the start."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        group_rows_start: float = param(0.5, "share of each group's rows that is kept at the start", gt=0, le=1)
        group_rows_end: float = param(1.0, "share of each group's rows that is kept at the end", gt=0, le=1)
        batch_rows_start: float | None = param(0.25, "share of the batch's rows; none: no line 2", gt=0, le=1)
        batch_rows_end: float = param(1.0, "batch share at the end", gt=0, le=1, only_if={"batch_rows_start": GIVEN})
        tokens_start: float = param(0.2, "share of the kept rows' tokens that is kept at the start", gt=0, le=1)
        tokens_end: float = param(1.0, "share of the kept rows' tokens that is kept at the end", gt=0, le=1)

        def check(self) -> None:
            start, end = self.batch_rows_start, self.batch_rows_end
            if start is not None and start > self.group_rows_start and end >= self.group_rows_end:
                raise ConfigError(
                    f"parameter `batch_rows_start` is {start:g}, above `group_rows_start` = {self.group_rows_start:g}, "
                    f"so line 2 has nothing to drop. Lower it, or set it to none to skip line 2."
                )

    def start(self, run: Run) -> None:
        self._batches = max(1, run.total_batches)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        p, progress = self.params, min(rollouts.batch / self._batches, 1.0)

        def share(start: float, end: float) -> float:
            return (1 - progress) * start + progress * end

        in_update = tokens.advantages
        if not bool(tokens.keep.all()):
            in_update = torch.where(tokens.keep, in_update, torch.nan)
        of_row = Groups(tokens.row, count=len(rollouts))
        advantages = of_row.mean(in_update)
        advantages = torch.where(torch.isnan(rollouts.reward), torch.nan, advantages)
        everything = Groups.one(len(rollouts))
        rows = torch.ones(len(rollouts), dtype=torch.bool)
        group_rows = share(p.group_rows_start, p.group_rows_end)
        if group_rows < 1:
            size = _rounded(group_rows * rollouts.groups.n(advantages))
            rows = max_variance_rows(advantages, rollouts.groups, size)
        batch_rows = 1.0 if p.batch_rows_start is None else share(p.batch_rows_start, p.batch_rows_end)
        if batch_rows < 1:
            size = _rounded(batch_rows * everything.n(advantages))
            rows = max_variance_rows(torch.where(rows, advantages, torch.nan), everything, size)
        candidates = spread(rows, of_row.size) & tokens.keep
        kept = top_tokens(tokens, candidates, share(p.tokens_start, p.tokens_end))

        text = "advantage {advantage:.2f} adds too little to the variance"
        self.note(~rows & ~torch.isnan(advantages), text, advantage=advantages)
        self.log("rows_kept", rows.double().mean())
        self.log("tokens_kept", torch.count_nonzero(kept).double() / torch.count_nonzero(tokens.keep))
        gain = everything.std(torch.where(rows, advantages, torch.nan), ddof=0) / everything.std(advantages, ddof=0)
        self.log("variance_gain", gain**2)
        return Shape(keep_rows=rows, keep_tokens=kept)


def max_variance_rows(x: Tensor, groups: Groups, size: Tensor) -> Tensor:
    """The rows of each group whose values have the largest population variance.

    Args:
        x: (rows,) values; NaN rows are no candidates.
        groups: of the rows.
        size: (count,) int64, rows to choose of each group; limited to 1 .. its candidates.

    Returns:
        (rows,) bool.
    """
    n = groups.n(x).long()
    size = torch.minimum(size.clamp(min=1), n)
    centered = x - groups.rows(groups.mean(x))  # squares of large values would cancel
    by_value = torch.sort(centered, stable=True).indices  # NaN last
    order = by_value[torch.sort(groups.index[by_value], stable=True).indices]  # by group, in it by value
    start = torch.cumsum(groups.size, 0) - groups.size
    value = torch.cat([torch.nan_to_num(centered[order], nan=0.0), torch.zeros(1, dtype=torch.float64)])
    sums = torch.cumsum(torch.nn.functional.pad(value, (1, 0)), 0)
    squares = torch.cumsum(torch.nn.functional.pad(value**2, (1, 0)), 0)

    # one trial per group and h = 0 .. size: the h largest and the size - h smallest
    trial = torch.repeat_interleave(torch.arange(groups.count), size + 1)
    h = torch.arange(len(trial)) - (torch.cumsum(size + 1, 0) - size - 1)[trial]
    low, high, k = start[trial], (start + n)[trial], size[trial]

    def total(prefix: Tensor) -> Tensor:
        return prefix[low + k - h] - prefix[low] + prefix[high] - prefix[high - h]

    variance = total(squares) / k - (total(sums) / k) ** 2
    alone = torch.where(h > 0, groups.max(x)[trial], groups.min(x)[trial]) ** 2  # of one row: the largest |x|
    variance = torch.where(k == 1, alone, variance)
    trials = Groups(trial, count=groups.count)
    equal = variance >= trials.rows(trials.max(variance)) * (1 - _ROUNDING)
    balance = torch.where(2 * h > k, 0.5, 0.0).double() - (2 * h - k).abs()  # then more of the largest
    won = trials.top_k(torch.where(equal, balance, torch.nan), 1)
    largest = torch.zeros(groups.count, dtype=torch.int64).index_put((trial[won],), h[won])
    top = groups.top_k(x, largest)
    return top | groups.top_k(torch.where(top, torch.nan, -x), size - largest)


def top_tokens(tokens: Tokens, candidates: Tensor, share: float) -> Tensor:
    """(tokens,) bool: the `share` of the `candidates`, rounded up, with the largest |A| x entropy."""
    entropies = tokens.entropies
    assert entropies is not None  # in `needs`
    total = int(torch.count_nonzero(candidates))
    left = total - math.ceil(share * total - _ROUNDING)  # how many leave
    if left <= 0:
        return candidates

    def key(part: slice) -> NDArray[np.float64]:
        return (tokens.advantages[part].abs() * entropies[part].double()).numpy()

    wanted, keys, filled = candidates.numpy(), np.empty(total), 0
    for part in parts(len(tokens)):
        own = key(part)[wanted[part]]
        keys[filled : (filled := filled + len(own))] = own
    keys.partition(left)  # by selection: a sort takes ten times as long
    least, kept = keys[left], np.empty(len(tokens), dtype=bool)
    equal = int(np.count_nonzero(keys[left:] == least))  # of the smallest key that stays; the earlier tokens have it
    for part in parts(len(tokens)):
        own = key(part)
        kept[part] = wanted[part] & (own > least)
        ties = np.flatnonzero(wanted[part] & (own == least))[:equal]
        kept[part][ties] = True
        equal -= len(ties)
    return torch.from_numpy(kept)


def _rounded(x: Tensor) -> Tensor:
    return torch.floor(x + 0.5 + _ROUNDING).long()
