"""EPO (arXiv 2509.22576): an entropy bonus with a corridor around the mean entropy of the batches before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import (
    Groups,
    Idle,
    Method,
    MethodError,
    MethodParams,
    Rollouts,
    Run,
    Shape,
    Terms,
    Tokens,
    from_params,
    param,
    signals,
)
from rl_plugins.core.groups import joint
from rl_plugins.core.losses import Live
from rl_plugins.core.params import above

NO_BOUND = 1e30  # a bound that no entropy reaches; columns are finite in float32
_ON = {"entropy_coeff": above(0)}
_SMOOTHED = {**_ON, "smooth_coeff": above(0), "rho": above(0)}
_PHASED = {**_SMOOTHED, "phase": ("code", "paper")}
_PAPER = {**_SMOOTHED, "phase": "paper"}
_SCALED, _TURN = {**_ON, "smooth_coeff": above(0)}, {**_SMOOTHED, "corridor": "turn"}


class Epo(Method):
    """Adds an entropy bonus to any policy loss, and a penalty where the entropy leaves a corridor around its history.

    H is the entropy of the policy at a token, s the turn the token belongs to, k the batch of K = `phase_batches`:

        e_k    = mean of H over the trained tokens of batch k, before its update
        ref    = mean of e_j over the batches j < k                                    # `window`: the latest of them
        low, high = kl ref, kr ref

        relu       p = rho g_k (relu(low - H) + relu(H - high))
        indicator  p = rho g_k if H <= low or H >= high, else 0                        # as released: no gradient

        term of a token = -entropy_coeff (H - smooth_coeff p)

    Terms are averaged over the tokens of a turn, then over the turns of a rollout, then over rollouts (`average: turn`,
    paper), or as the host averages its loss (`host`, code). With `corridor: turn` (code) e, ref and the corridor are of
    each turn s by itself. `mode: seq` computes p of the mean of H over the row's trained tokens in the turn, for each
    of these tokens; with one corridor for all tokens the row counts as one turn.

    Phase weight g_k, with m = K // 2:

        paper  1 + exp(-phase_rate k / m)                      falls from 2 to 1.0025; `phase_middle` in the place of m
        code   1 - 0.2 (1 - exp(-2 k / m)) while k <= m, then 0.8 exp(-3 (min(k, K) - m) / (K - m))
        none   1

    The paper's alpha is `rho`, which it assumes to be below 0.5. In relu mode the upper bound brakes only if
    smooth_coeff rho g > 1, so with such values entropy above it is still pushed up, only less: by 20 % less at the
    start of a run with alpha 0.1.

    Symbols: H (rows, time) in nats, with gradient, of the current policy. History and phase are counted once per
    generation batch; k stays at K after K batches.

    Special cases: without history, or before `gate_turn`, there is no corridor: only the bonus acts. Tokens that are
    not trained count nowhere. Turns are counted from 0 in every rollout. Where a rollout is several rows, the mean over
    rollouts of an optimizer step takes as many rows per rollout as the batch has on average.

    State: the sum of e and the number of batches, with `corridor: turn` per turn; with a `window` e of its batches.

    Raises:
        ConfigError: an entropy bonus of the host in addition to this one.
        MethodError: a batch without turns, where `average` or `corridor` needs them.

    Source: arXiv 2509.22576v2, eq. 2 to 6, algorithm 1 and tables 2 and 3; WujiangXu/EPO at 5b6fa98e,
    verl/workers/actor/dp_actor.py.
    """

    name = "epo"
    fidelity = "paper"
    does = "Adds an entropy bonus, and keeps the entropy in a corridor around its history"
    problems = ("exploration", "agents")
    state_version = 2  # by default one history for all turns
    host_options = {
        "trl": {"entropy_coef": 0.0, "use_adaptive_entropy": False},
        "verl": {"actor_rollout_ref.actor.entropy_coeff": 0},
    }
    needs = from_params(lambda p: signals("tokens", "entropies", "current_entropies", turns=p.by_turn))
    aggregation = from_params(lambda p: "sum" if p.mean_of_turns else "host")
    idle = (Idle({"covered": 0}, "no token has a corridor: this is the plain bonus. Lower `gate_turn`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        entropy_coeff: float = param(0.001, "lambda, coefficient of the entropy bonus and of the penalty", ge=0)
        average: Literal["turn", "host"] = param(
            "turn", "average of the terms: turns, then rollouts (paper), or that of the host (code)", only_if=_ON
        )
        smooth_coeff: float = param(1.0, "coefficient of the penalty, relative to the bonus", ge=0, only_if=_ON)
        smoothing: Literal["relu", "indicator"] = param("relu", "distance to the corridor, or a constant", only_if=_ON)
        rho: float = param(
            0.1, "alpha, factor of p (paper: 0.1 in ALFWorld, 0.05 in ScienceWorld)", ge=0, only_if=_SCALED
        )
        corridor: Literal["batch", "turn"] = param("batch", "tokens that share one: all or a turn's", only_if=_SMOOTHED)
        kl: float = param(0.0, "lower bound over the reference; 0: none", ge=0, lt=1, only_if=_SMOOTHED)
        kr: float = param(2.0, "upper bound over the reference; inf: none", gt=1, allow_inf=True, only_if=_SMOOTHED)
        mode: Literal["token", "seq"] = param("token", "entropy that is compared: token or row mean", only_if=_SMOOTHED)
        window: int | None = param(None, "latest batches in the reference; none: all", ge=1, only_if=_SMOOTHED)
        include_current: bool = param(False, "the batch itself counts in its reference (code)", only_if=_SMOOTHED)
        gate_turn: int = param(0, "first turn with a corridor, from 0 (code: 25)", ge=0, only_if=_TURN)
        phase: Literal["paper", "code", "none"] = param(
            "paper", "weight of the penalty over the run", only_if=_SMOOTHED
        )
        phase_batches: int | None = param(None, "K, batches of the schedule; none: the run's", ge=1, only_if=_PHASED)
        phase_rate: float = param(
            3.0, "gamma, rate of the paper's weight; negative: it grows", ge=-5, le=5, only_if=_PAPER
        )
        phase_middle: int | None = param(
            None, "k_mid, batch at which the rate acted once; none: half of K", ge=1, only_if=_PAPER
        )

        @property
        def smoothed(self) -> bool:
            """Whether there is a penalty at all."""
            return self.entropy_coeff > 0 and self.smooth_coeff > 0 and self.rho > 0

        @property
        def mean_of_turns(self) -> bool:
            """Whether the terms have weights of their own."""
            return self.entropy_coeff > 0 and self.average == "turn"

        @property
        def by_turn(self) -> bool:
            """Whether it must be known which turn a token belongs to."""
            return self.mean_of_turns or (self.smoothed and self.corridor == "turn")

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        none = torch.zeros(0, dtype=torch.float64)
        self.state = {"sum": none, "count": none.clone(), "recent": none.reshape(0, 0)}

    # ---- the driver: history, corridor and phase

    def start(self, run: Run) -> None:
        self._batches = max(1, run.total_batches)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        p = self.params
        assert tokens.entropies is not None  # in `needs`
        counted = tokens.keep & torch.isfinite(tokens.entropies)
        entropies = torch.where(counted, tokens.entropies.double(), torch.nan)
        self.log("entropy", entropies.nanmean(), weight=counted.sum())
        turn = self._turns(rollouts, tokens)
        columns = {"epo_weight": weight_of_turns(rollouts, tokens, counted)} if p.mean_of_turns else {}
        if not p.smoothed:
            return Shape(token_columns=columns)
        turns = max(int(turn.max()) + 1 if len(turn) else 0, len(self.state["sum"]), self.state["recent"].shape[1])
        reference = self._reference(turns)
        self._remember(Groups(turn, count=turns).mean(entropies))
        if p.include_current:
            reference = self._reference(turns)
        reference[: p.gate_turn] = torch.nan
        low, high = corridor(reference, p.kl, p.kr)
        self.log("covered", (~torch.isnan(reference))[turn][counted].double().mean(), weight=counted.sum())
        columns |= {"epo_low": low[turn], "epo_high": high[turn]}
        if p.mode == "seq":
            columns["epo_turn"] = turn.double()
        weight = phase_weight(p.phase, rollouts.batch, p.phase_batches or self._batches, p.phase_rate, p.phase_middle)
        self.log("phase", weight)
        rows = torch.full((len(rollouts),), weight, dtype=torch.float64)
        return Shape(token_columns=columns, row_columns={"epo_phase": rows})

    def _turns(self, rollouts: Rollouts, tokens: Tokens) -> Tensor:
        """(tokens,) int64 number of the turn inside its rollout; 0 with one corridor for all."""
        table, of = rollouts.turns, tokens.turn
        if self.params.by_turn and (table is None or of is None):
            raise MethodError(
                "`average: turn` and `corridor: turn` need turns, and this batch has none. Use tools, an environment "
                "or a method that plays turns (turn_control), or set `average: host` and `corridor: batch`."
            )
        return torch.zeros_like(tokens.row) if self.params.corridor == "batch" else table.turn[of]  # type: ignore[union-attr]

    def _reference(self, turns: int) -> Tensor:
        """(turns,) float64 mean of the history, NaN for a turn without one."""
        if self.params.window is None:
            total, count = (_wider(self.state[name], turns, 0.0) for name in ("sum", "count"))
            return total / count  # 0 / 0 is NaN
        return torch.nanmean(_wider(self.state["recent"], turns, torch.nan), dim=0)

    def _remember(self, means: Tensor) -> None:
        """Adds a batch: (turns,) mean entropies, NaN for a turn that did not occur."""
        turns, state = len(means), self.state
        if self.params.window is None:
            total, count = (_wider(state[name], turns, 0.0) for name in ("sum", "count"))
            occurred = ~torch.isnan(means)
            self.state = {**state, "sum": total + means.nan_to_num(nan=0.0), "count": count + occurred.double()}
            return
        rows = torch.cat([_wider(state["recent"], turns, torch.nan), means[None]])
        self.state = {**state, "recent": rows[-self.params.window :].clone()}

    # ---- the loss

    def regularize(self, terms: Terms) -> Tensor:
        p, live = self.params, Live(terms)
        (entropies,) = live.all("entropies")
        kept = entropies
        if p.smoothed:
            low, high = terms.columns["epo_low"], terms.columns["epo_high"]
            compared = entropies
            if p.mode == "seq":
                compared = mean_of_turn(entropies, live.valid, terms.columns["epo_turn"])
            within = (low < compared) & (compared < high)
            if p.smoothing == "relu":
                outside = torch.relu(low - compared) + torch.relu(compared - high)
            else:
                outside = (~within).to(entropies)
            penalty = live(p.rho * terms.columns["epo_phase"] * outside)
            live.log_means(self, within=within, penalty=penalty)
            kept = entropies - p.smooth_coeff * penalty
        if p.mean_of_turns:
            kept = kept * live(terms.columns["epo_weight"]) / terms.num_rows.clamp(min=1)
        return -p.entropy_coeff * kept


def weight_of_turns(rollouts: Rollouts, tokens: Tokens, counted: Tensor) -> Tensor:
    """(tokens,) float64 weights whose sum over a rollout is the mean number of rows of a rollout: each turn of a
    rollout weighs the same, and each token of a turn. 0 for tokens that do not count.

    Args:
        rollouts, tokens: with turns.
        counted: (tokens,) bool.
    """
    assert rollouts.turns is not None and tokens.turn is not None
    rollout = Groups(joint(rollouts.group, rollouts.rollout))
    size = torch.bincount(tokens.turn[counted], minlength=len(rollouts.turns.row)).double()
    of_turn = rollout.index[rollouts.turns.row]
    turns = torch.bincount(of_turn[size > 0], minlength=rollout.count).double()
    rows = (torch.bincount(tokens.row[counted], minlength=len(rollouts)) > 0).sum()
    per_token = rows / (turns > 0).sum() / (turns[of_turn] * size)
    return torch.where(counted, per_token[tokens.turn], 0.0)


def corridor(reference: Tensor, kl: float, kr: float) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the entropy.

    Args:
        reference: (n,) nats, at least 0; NaN: no corridor.
        kl, kr: bounds over the reference; 0 and infinity are no bound.

    Returns:
        Two (n,) tensors; a bound that is not there is -1e30 or 1e30.
    """
    low = kl * reference if kl > 0 else torch.full_like(reference, -NO_BOUND)
    high = kr * reference if math.isfinite(kr) else torch.full_like(reference, NO_BOUND)
    return low.nan_to_num(nan=-NO_BOUND), high.nan_to_num(nan=NO_BOUND).clamp(max=NO_BOUND)


def mean_of_turn(values: Tensor, valid: Tensor, turn: Tensor) -> Tensor:
    """(rows, time) the mean of the valid values of the same row and turn; 0 where a token is not valid.

    Args:
        values: (rows, time), with gradient.
        valid: (rows, time) bool.
        turn: (rows, time) number of the turn; not read where a token is not valid.
    """
    number = torch.where(valid, turn, 0.0).long()
    size = values.new_zeros(len(values), int(number.max()) + 1 if number.numel() else 1)
    count = size.scatter_add(1, number, valid.to(values))
    total = size.scatter_add(1, number, torch.where(valid, values, 0.0))
    return torch.where(valid, (total / count.clamp(min=1)).gather(1, number), 0.0)


def phase_weight(phase: str, batch: int, batches: int, rate: float = 3.0, middle: int | None = None) -> float:
    """The weight g of the penalty in a batch.

    Args:
        phase: "none", "code" or "paper".
        batch: from 0.
        batches: length of the schedule, at least 1.
        rate, middle: gamma and k_mid of the paper's weight; none: half of the schedule.
    """
    k, half = min(batch, batches), batches // 2
    if phase == "none":
        return 1.0
    if phase == "paper":
        return 1.0 + math.exp(-rate * k / (middle or max(half, 1)))
    if k <= half:
        return 1.0 - 0.2 * (1.0 - math.exp(-2.0 * k / max(half, 1)))
    return 0.8 * math.exp(-3.0 * (k - half) / (batches - half))


def _wider(values: Tensor, turns: int, fill: float) -> Tensor:
    """`values` with further entries in the last dimension."""
    return torch.nn.functional.pad(values, (0, turns - values.shape[-1]), value=fill)
