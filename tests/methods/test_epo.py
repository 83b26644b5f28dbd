"""EPO (arXiv 2509.22576): history, corridor, penalty, its gradient, phase, masks, micro-batches, resume, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting
from torch import Tensor

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.losses import aggregate
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts, Terms, Tokens
from rl_plugins.methods.epo import NO_BOUND, Epo, corridor, mean_of_turn, phase_weight
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.runtime.update import masked_sum
from rl_plugins.testing import (
    make_rollouts,
    make_run,
    make_terms,
    make_tokens,
    make_turns,
    one_row_per_turn,
    one_step,
    start_stack,
)

GOLDEN = Golden("epo")
# A corridor around every turn that acts from both sides, and the host's average: most tests look at these.
NARROW = {"average": "host", "corridor": "turn", "kl": 0.5, "kr": 1.5, "rho": 2.0, "phase": "none"}


def epo(**params: Any) -> Epo:
    rho = {"rho": 0.1} if params.get("smoothing") == "indicator" else {}
    return Epo(build_params(Epo.Params, acting(Epo.Params, NARROW | rho | params) | params, "epo"))


def paper(**params: Any) -> Epo:
    return Epo(build_params(Epo.Params, params, "epo"))


def terms_of(
    entropies: Any, low: Any, high: Any, mask: Any = None, turn: Any = None, phase: float = 1.0, dtype: Any = None
) -> Terms:
    """A micro-batch; float64 unless said otherwise. `low` and `high` broadcast."""
    dtype = dtype or torch.float64
    h = torch.as_tensor(entropies, dtype=dtype).detach().clone().requires_grad_()
    bounds = {
        f"epo_{name}": torch.as_tensor(v, dtype=torch.float64).broadcast_to(h.shape)
        for name, v in (("low", low), ("high", high))
    }
    if turn is not None:
        bounds["epo_turn"] = torch.as_tensor(turn, dtype=torch.float64).broadcast_to(h.shape)
    columns = {**bounds, "epo_phase": torch.full((len(h), 1), phase, dtype=torch.float64)}
    valid = torch.ones(h.shape) if mask is None else torch.as_tensor(mask)
    return make_terms(len(h), h.shape[1], mask=valid.long(), logprobs=h.detach(), entropies=h, columns=columns)


def loss_and_grad(method: Epo, terms: Terms, how: str = "token-mean") -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to the entropies."""
    numbers = dict(num_tokens=terms.num_tokens, num_rows=terms.num_rows, max_length=terms.max_length)
    loss = aggregate(method.regularize(terms), terms.mask, how, **numbers)
    return loss.detach(), torch.autograd.grad(loss, terms.entropies, materialize_grads=True)[0]


def penalty(terms: Terms, **params: Any) -> Tensor:
    """(rows, time) p, read off the term: with coefficients of 1 the term is p - H."""
    term = epo(entropy_coeff=1.0, **params).regularize(terms)
    return (term + terms.entropies).detach()


# ---- the authors' numbers

NAMES = {"mask_mode": "mode", "min_ratio": "kl", "max_ratio": "kr", "out_range_penalty": "rho"}


def check_released_penalty(case: Case, turn: Tensor, reference: Any, within: float) -> None:
    """The penalty of the authors' code on a grid without padding, from the term of the loss."""
    params = case.build(Epo, NAMES, **{**NARROW, "smoothing": "indicator"})
    low, high = corridor(torch.tensor(reference, dtype=torch.float64), params.kl, params.kr)
    terms = terms_of(case.inputs["entropy"], low[turn][:, None], high[turn][:, None], turn=turn[:, None])
    stack = start_stack(Epo(params))
    term = stack.one("regularize", terms).detach()
    found = (term / params.entropy_coeff + terms.entropies) / params.smooth_coeff
    wanted = torch.tensor(case.expected["penalty"], dtype=torch.float64)
    torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=1e-8)  # theirs is float32
    logged = combine([stack.metrics.take()])
    assert logged["epo/within"] == pytest.approx(within, abs=1e-6)
    assert logged["epo/penalty"] == pytest.approx(float(wanted.mean()), abs=1e-6)


@GOLDEN.kind("turn_index")
def check_penalty(case: Case) -> None:
    given_ = case.inputs
    turn, history = torch.tensor(given_["turn_index"]), given_["history_mean_per_turn"]
    check_released_penalty(case, turn, history, case.expected["within_fraction"])


@GOLDEN.kind("reference")
def check_penalty_around_references(case: Case) -> None:
    check_released_penalty(case, torch.tensor(case.inputs["turn"]), case.inputs["reference"], case.expected["within"])


@GOLDEN.kind("epoch")
def check_phase(case: Case) -> None:
    found = [phase_weight("code", k, case.inputs["max_epochs"]) for k in case.inputs["epoch"]]
    assert found == pytest.approx(case.expected["weight"], rel=1e-14)
    assert len(found) == len(case.expected["weight"])


@GOLDEN.kind("epochs")
def check_phase_of_a_length(case: Case) -> None:
    found = [phase_weight("code", k, case.params["K"]) for k in case.inputs["epochs"]]
    assert found == pytest.approx(case.expected["weight"], rel=1e-12)


@GOLDEN.kind("k")
def check_phase_of_the_paper(case: Case) -> None:
    """Eq. 5, through the driver: what a batch is given."""
    p = case.params
    middle = {} if p["k_mid"] == p["K"] // 2 else {"phase_middle": p["k_mid"]}  # the paper's is the default
    stack = start_stack(paper(phase_rate=p["gamma"], **middle), run=make_run(total_batches=p["K"]))
    found = [float(decided(stack, BATCH, k).row_columns["epo_phase"][0]) for k in case.inputs["k"]]
    assert found == pytest.approx(case.expected["beta"], rel=1e-9)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- batches and a loop over their tokens

Batch = Sequence[Sequence[Sequence[float]]]  # of each rollout, of each turn: entropies of its tokens


def batch_of(batch: Batch, number: int = 0, layout: str = "rollout") -> tuple[Rollouts, Tokens]:
    """Rollouts of groups of two, and their tokens; every turn has at least one."""
    turns = [(r, t) for r, rollout in enumerate(batch) for t in range(len(rollout))]
    table = make_turns([["x"] * len(rollout) for rollout in batch])
    lengths = [sum(len(turn) for turn in rollout) for rollout in batch]
    rewards = [float(i % 2) for i in range(len(batch))]
    rollouts = make_rollouts(rewards, group_size=2, lengths=lengths, turns=table, batch=number)
    of = [i for i, (r, t) in enumerate(turns) for _ in batch[r][t]]
    flat = [h for rollout in batch for turn in rollout for h in turn]
    tokens = make_tokens(rollouts, turn=torch.tensor(of), entropies=torch.tensor(flat, dtype=torch.float64))
    return one_row_per_turn(rollouts, tokens) if layout == "turn" else (rollouts, tokens)


def decided(stack: MethodStack, batch: Batch, number: int = 0, layout: str = "rollout") -> Decision:
    rollouts, tokens = batch_of(batch, number, layout)
    return one_step(stack, rollouts, tokens)


def bounds(decision: Decision) -> list[tuple[float, float]]:
    """Of each token, in the order of the batch."""
    low, high = (decision.token_columns[f"epo_{name}"].tolist() for name in ("low", "high"))
    return list(zip(low, high, strict=True))


class Loop:
    """The rule, token by token."""

    def __init__(self, p: Any) -> None:
        self.p, self.history = p, []

    def corridors(self, batch: Batch) -> list[tuple[float, float]]:
        p, sums = self.p, {}
        for rollout in batch:
            for s, turn in enumerate(rollout):
                key = 0 if p.corridor == "batch" else s
                for h in turn:
                    total, n = sums.get(key, (0.0, 0))
                    sums[key] = (total + h, n + 1)
        now = {s: total / n for s, (total, n) in sums.items()}
        history = self.history + ([now] if p.include_current else [])
        self.history = [*self.history, now]
        found = []
        for rollout in batch:
            for s, turn in enumerate(rollout):
                key = 0 if p.corridor == "batch" else s
                seen = [e[key] for e in history[-p.window if p.window else 0 :] if key in e]
                known = bool(seen) and key >= p.gate_turn
                ref = sum(seen) / len(seen) if known else 0.0
                low = p.kl * ref if known and p.kl > 0 else -NO_BOUND
                high = p.kr * ref if known and p.kr < math.inf else NO_BOUND
                found += [(low, high)] * len(turn)
        return found

    def phase(self, k: int, batches: int) -> float:
        p = self.p
        total = p.phase_batches or batches
        middle, k = total // 2, min(k, total)
        if p.phase == "none":
            return 1.0
        if p.phase == "paper":
            return 1.0 + math.exp(-p.phase_rate * k / (p.phase_middle or max(middle, 1)))
        if k <= middle:
            return 1.0 - 0.2 * (1 - math.exp(-2 * k / middle)) if k else 1.0
        return 0.8 * math.exp(-3 * (k - middle) / (total - middle))

    def term(self, values: list[float], low: float, high: float, phase: float, own: float) -> tuple[float, float]:
        """Term of a token and the derivative of p with respect to the compared value. `values`: what is averaged."""
        p, h = self.p, sum(values) / len(values)
        rho = p.rho
        inside = low < h < high
        if p.smoothing == "relu":
            distance, slope = max(low - h, 0.0) + max(h - high, 0.0), float(h > high) - float(h < low)
        else:
            distance, slope = float(not inside), 0.0
        return -p.entropy_coeff * (own - p.smooth_coeff * rho * phase * distance), rho * phase * slope


def choice(**values: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({k: st.sampled_from(v) for k, v in values.items()})


PARAMS = choice(
    entropy_coeff=[0.001, 0.7],
    smooth_coeff=[1.0, 0.4],
    smoothing=["relu", "indicator"],
    rho=[0.1, 0.05, 3.0],
    kl=[0.0, 0.5, 0.9],
    kr=[1.2, 2.0, math.inf],
    mode=["token", "seq"],
    window=[None, 1, 2],
    include_current=[False, True],
)
TURNS = choice(corridor=["batch"]) | choice(corridor=["turn"], gate_turn=[0, 1, 2])
PHASES = choice(phase=["none"]) | choice(phase=["code"], phase_batches=[None, 1, 2, 4])
PHASES |= choice(phase=["paper"], phase_batches=[None, 3], phase_rate=[3.0, -2.0], phase_middle=[None, 2])
NUMBER = st.floats(0, 4, allow_subnormal=False)
ROLLOUT = st.lists(st.lists(NUMBER, min_size=1, max_size=3), min_size=1, max_size=4)
BATCHES = st.lists(st.lists(ROLLOUT, min_size=2, max_size=4).filter(lambda b: len(b) % 2 == 0), min_size=2, max_size=4)


@settings(max_examples=40, deadline=None)
@given(PARAMS, TURNS, PHASES, BATCHES)
def test_equals_the_loop(some: dict[str, Any], turns: dict[str, Any], phase: dict[str, Any], batches: Any) -> None:
    method = epo(**some, **turns, **phase)
    stack, loop = start_stack(method, run=make_run(total_batches=7)), Loop(method.params)
    for k, batch in enumerate(batches):
        decision = decided(stack, batch, k)
        wanted, g = loop.corridors(batch), loop.phase(k, 7)
        low, high = (torch.tensor(column, dtype=torch.float64) for column in zip(*wanted, strict=True))
        for name, column in (("low", low), ("high", high)):
            torch.testing.assert_close(
                decision.token_columns[f"epo_{name}"].double(), column, rtol=1e-6, atol=1e-7, msg=f"{name}, batch {k}"
            )
        assert decision.row_columns["epo_phase"].tolist() == pytest.approx([g] * len(batch))

        # the loss of this batch, a rollout a row, on exact bounds
        flat = [[h for turn in rollout for h in turn] for rollout in batch]
        numbers = [[s for s, turn in enumerate(rollout) for _ in turn] for rollout in batch]
        if some["mode"] == "seq" and turns["corridor"] == "batch":
            numbers = [[0] * len(row) for row in numbers]
        width = max(map(len, flat))
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in flat])
        n = int(mask.sum())

        def padded(rows: Any, width: int = width) -> Tensor:
            return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)

        cut, place = [], 0
        for row in flat:
            cut.append(wanted[place : place + len(row)])
            place += len(row)
        terms = terms_of(
            padded(flat),
            padded([[a for a, _ in row] for row in cut]),
            padded([[b for _, b in row] for row in cut]),
            mask,
            padded(numbers),
            g,
        )
        total, wanted_grad = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
        c, c_s = some["entropy_coeff"], some["smooth_coeff"]
        for r, row in enumerate(flat):
            for t, h in enumerate(row):
                same = [i for i in range(len(row)) if numbers[r][i] == numbers[r][t]]
                used = same if some["mode"] == "seq" else [t]
                value, slope = loop.term([row[i] for i in used], *cut[r][t], g, h)
                total += value / n
                wanted_grad[r, t] -= c / n
                for i in used:
                    wanted_grad[r, i] += c * c_s * slope / len(used) / n
        near = some["mode"] == "seq" and any(
            abs(sum(row) / len(row) - b) < 1e-9 for row, of in zip(flat, cut, strict=True) for pair in of for b in pair
        )
        if near:  # a mean on the bound itself: rounding decides
            continue
        loss, grad = loss_and_grad(method, terms)
        if some["mode"] == "token":
            assert float(loss) == pytest.approx(total, rel=1e-10, abs=1e-12)
            torch.testing.assert_close(grad, wanted_grad, rtol=1e-10, atol=1e-13)
        else:
            assert float(loss) == pytest.approx(total, rel=1e-6, abs=1e-8)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(NUMBER, min_size=4, max_size=4), min_size=1, max_size=3), st.sampled_from(["token", "seq"]))
def test_the_gradient_is_autograds(rows: list[list[float]], mode: str) -> None:
    """Float32 against the formula written out in float64."""
    turn, mask = [0, 0, 1, 1], torch.tensor([1, 1, 1, 0]).expand(len(rows), 4)
    terms = terms_of(rows, [0.5, 0.5, 1.0, 1.0], [1.5, 1.5, 3.0, 3.0], mask, turn, 0.7, torch.float32)
    _, grad = loss_and_grad(epo(entropy_coeff=0.3, mode=mode, rho=1.5), terms)
    h = torch.tensor(rows, dtype=torch.float32).double().requires_grad_()
    first = h[:, :2].mean(1, keepdim=True).expand(-1, 2) if mode == "seq" else h[:, :2]
    outside = torch.cat(
        [(0.5 - first).relu() + (first - 1.5).relu(), (1 - h[:, 2:3]).relu() + (h[:, 2:3] - 3).relu()], 1
    )
    loss = 0.3 * (1.5 * 0.7 * outside - h[:, :3]).sum() / (3 * len(rows))
    (wanted,) = torch.autograd.grad(loss, h)
    edge = ((first - 0.5).abs() < 1e-6) | ((first - 1.5).abs() < 1e-6)
    if not bool(edge.any()):
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-7)


# ---- properties of the specification

BATCH = [[[1.0, 2.0], [0.5]], [[3.0], [0.1, 0.3], [2.0, 2.0, 2.0]]]
NEXT = [[[0.2, 6.0], [0.4]], [[1.0], [5.0, 0.3]], [[2.0]], [[2.0], [1.0], [0.2], [3.0]]]


def test_the_first_batch_has_no_corridor_and_the_second_that_of_the_first() -> None:
    stack = start_stack(epo())
    assert set(bounds(decided(stack, BATCH))) == {(-NO_BOUND, NO_BOUND)}
    assert combine([stack.metrics.take()]) == pytest.approx({"epo/entropy": 12.9 / 9, "epo/covered": 0, "epo/phase": 1})
    second = bounds(decided(stack, NEXT, 1))
    first, later, third = (1.0, 3.0), (0.15, 0.45), (1.0, 3.0)  # means 2, 0.3, 2
    none = (-NO_BOUND, NO_BOUND)
    wanted = [first, first, later, first, later, later, first, first, later, third, none]
    assert [pytest.approx(w) for w in wanted] == second
    assert combine([stack.metrics.take()])["epo/covered"] == pytest.approx(10 / 11)
    state = stack.methods[0].state
    assert state["count"].tolist() == [2, 2, 2, 1] and state["recent"].numel() == 0


def test_a_turn_never_seen_is_no_corridor_of_zeros() -> None:
    stack = start_stack(epo())
    decided(stack, [[[1.0]], [[1.0]]])
    low, high = bounds(decided(stack, [[[1.0], [2.0]], [[1.0]]], 1))[1]
    terms = terms_of([[2.0]], low, high)
    assert float(penalty(terms)) == 0 and float(penalty(terms, smoothing="indicator")) == 0
    assert float(penalty(terms_of([[2.0]], 0.0, 0.0), smoothing="indicator")) == pytest.approx(0.1), "what it would be"


def test_turns_are_found_by_number_whatever_the_layout_and_order() -> None:
    """Rollouts of 1 to 4 turns; a row per turn, as verl-agent has them, gives the same corridors and history."""
    results = []
    for layout in ("rollout", "turn"):
        stack = start_stack(epo())
        decided(stack, BATCH, 0, layout)
        results.append((bounds(decided(stack, NEXT, 1, layout)), stack.methods[0].state))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1]["sum"], results[1][1]["sum"])

    stack, turned = start_stack(epo()), start_stack(epo())
    decided(stack, BATCH), decided(turned, BATCH[::-1])
    for a, b in zip(bounds(decided(stack, NEXT, 1)), bounds(decided(turned, NEXT, 1)), strict=True):
        assert a == pytest.approx(b)


def test_short_batches_shift_nothing() -> None:
    """The authors' left padding would give turn 0 the entropy of turn 2."""
    stack = start_stack(epo())
    decided(stack, [[[1.0], [2.0], [3.0]]] * 2)
    decided(stack, [[[5.0]]] * 2, 1)
    low = [b[0] for b in bounds(decided(stack, [[[1.0], [2.0], [3.0]]] * 2, 2))[:3]]
    assert low == pytest.approx([1.5, 1.0, 1.5])  # half of (1 + 5) / 2, 2, 3


def test_window_and_current_batch() -> None:
    constant = [[[[h]], [[h]]] for h in (1.0, 2.0, 4.0, 8.0)]

    def last_low(**params: Any) -> float:
        stack = start_stack(epo(**params))
        return [bounds(decided(stack, batch, k))[0][0] for k, batch in enumerate(constant)][-1]

    assert last_low() == pytest.approx(7 / 6)
    assert last_low(window=1) == pytest.approx(2.0)
    assert last_low(window=2) == pytest.approx(1.5)
    assert last_low(window=2, include_current=True) == pytest.approx(3.0)
    assert last_low(include_current=True) == pytest.approx(15 / 8)
    stack = start_stack(epo(include_current=True))
    assert bounds(decided(stack, BATCH))[0] == pytest.approx((1.0, 3.0)), "a corridor in the first batch"


def test_a_window_forgets_turns_that_no_longer_occur() -> None:
    stack = start_stack(epo(window=1))
    decided(stack, [[[1.0], [2.0]]] * 2)
    decided(stack, [[[1.0]]] * 2, 1)
    assert bounds(decided(stack, [[[1.0], [2.0]]] * 2, 2))[1] == (-NO_BOUND, NO_BOUND)
    assert stack.methods[0].state["recent"].shape == (1, 2)


def test_a_turn_missing_in_a_batch_of_the_window_keeps_the_reference_of_the_others() -> None:
    stack = start_stack(epo(window=2))
    decided(stack, [[[1.0], [2.0]]] * 2)
    decided(stack, [[[3.0]]] * 2, 1)
    assert bounds(decided(stack, [[[1.0], [2.0]]] * 2, 2))[:2] == [(1.0, 3.0)] * 2  # of (1 + 3) / 2, and of 2


def test_one_corridor_for_the_batch_needs_no_turns() -> None:
    stack = start_stack(epo(corridor="batch"))
    for k in range(2):
        rollouts, tokens = batch_of(BATCH, k)
        decision = one_step(stack, rollouts.replace(turns=None), tokens.replace(turn=None))
    mean = 12.9 / 9
    assert bounds(decision) == [pytest.approx((0.5 * mean, 1.5 * mean))] * 9
    with pytest.raises(MethodError, match=r"need turns.*set `average: host` and `corridor: batch`"):
        one_step(start_stack(epo()), rollouts.replace(turns=None), tokens.replace(turn=None))


def test_turns_of_one_are_one_corridor() -> None:
    single, batches = [[[1.0, 3.0]], [[2.0]]], []
    for params in ({}, {"corridor": "batch"}):
        stack = start_stack(epo(**params))
        decided(stack, single)
        batches.append(bounds(decided(stack, single, 1)))
    assert batches[0] == batches[1] == [(1.0, 3.0)] * 3


def test_the_gate_is_that_of_a_turn() -> None:
    stack = start_stack(epo(gate_turn=1))
    decided(stack, BATCH)
    found = bounds(decided(stack, BATCH, 1))
    none = (-NO_BOUND, NO_BOUND)
    assert [b == none for b in found] == [True, True, False, True, False, False, False, False, False]


def test_tokens_that_left_and_those_without_entropy_count_nowhere() -> None:
    def after(change: Any) -> Mapping[str, Any]:
        stack = start_stack(epo())
        rollouts, tokens = batch_of(BATCH)
        stack.call("shape", stack.methods[0], rollouts, change(tokens))
        return stack.methods[0].state

    poisoned = torch.tensor([1.0, math.nan, 0.5, 3.0, math.inf, 0.3, 2.0, 2.0, 2.0])
    keep = torch.tensor([True, False, True, True, False, True, True, True, True])
    a = after(lambda tokens: tokens.replace(entropies=poisoned))
    b = after(lambda tokens: tokens.replace(keep=keep))
    torch.testing.assert_close(a["sum"], torch.tensor([2.0, 0.4, 2.0], dtype=torch.float64))
    torch.testing.assert_close(b["sum"], a["sum"])
    nothing = after(lambda tokens: tokens.replace(keep=torch.zeros(9, dtype=torch.bool)))
    assert nothing["count"].tolist() == [0, 0, 0] and nothing["sum"].tolist() == [0, 0, 0]


def test_the_drivers_metrics_are_means_over_the_tokens_that_count() -> None:
    """Of both batches of a logging step, which have 9 and 6 such tokens."""
    stack = start_stack(epo())
    decided(stack, BATCH)
    rollouts, tokens = batch_of(NEXT, 1)
    stack.call("shape", stack.methods[0], rollouts, tokens.replace(keep=torch.arange(11) >= 5))
    logged = combine([stack.metrics.take()])
    assert logged["epo/covered"] == pytest.approx(5 / 15)  # in the second batch all but the only token of turn 3
    assert logged["epo/entropy"] == pytest.approx((12.9 + 0.3 + 2 + 2 + 1 + 0.2 + 3) / 15)


def test_coefficient_zero_is_the_loss_without() -> None:
    terms = terms_of([[0.1, 5.0]], 1.0, 2.0)
    loss, grad = loss_and_grad(epo(entropy_coeff=0), terms)
    assert float(loss) == 0 and not bool(grad.any())


@pytest.mark.parametrize(
    "neutral", [{"kl": 0, "kr": "inf"}, {"rho": 0}, {"smooth_coeff": 0}, {"smoothing": "indicator"}]
)
@pytest.mark.parametrize("mode", ["token", "seq"])
def test_neutral_parameters_are_the_plain_bonus(neutral: dict[str, Any], mode: str) -> None:
    """To the last bit, corridor and history from the driver included. The indicator has a value and no gradient."""
    some = {} if {"rho", "smooth_coeff"} & set(neutral) else {"mode": mode}
    stack = start_stack(epo(entropy_coeff=0.3, **neutral, **some))
    decided(stack, BATCH)
    columns = decided(stack, BATCH, 1).token_columns
    h = torch.tensor([[1.0, 2.0, 0.5, 3.0, 0.1, 0.3, 2.0, 2.0, 9.0]])
    terms = make_terms(
        1,
        9,
        mask=torch.ones(1, 9).long(),
        entropies=h.requires_grad_(),
        columns={k: v[None].float() for k, v in columns.items()} | {"epo_phase": torch.ones(1, 1)},
    )
    loss, grad = loss_and_grad(stack.methods[0], terms)
    plain = -0.3 * h
    bonus = aggregate(plain, terms.mask, "token-mean", num_tokens=terms.num_tokens, num_rows=1, max_length=9)
    assert torch.equal(grad, torch.autograd.grad(bonus, h)[0])
    assert (loss == bonus.detach()) == ("smoothing" not in neutral)


def test_no_history_and_no_upper_bound_is_no_nan() -> None:
    low, high = corridor(torch.tensor([0.0, math.nan, 2.0]).double(), 0.5, math.inf)
    assert low.tolist() == [0.0, -NO_BOUND, 1.0] and high.tolist() == [NO_BOUND] * 3
    low, high = corridor(torch.tensor([0.0, math.nan, 2.0]).double(), 0.0, 1e300)
    assert low.tolist() == [-NO_BOUND] * 3 and high.tolist() == [0.0, NO_BOUND, NO_BOUND]


def test_the_penalty_pulls_towards_the_corridor_from_both_sides() -> None:
    terms = terms_of([[0.2, 1.0, 1.5, 2.0, 5.0]], 1.0, 2.0)
    grad = loss_and_grad(epo(entropy_coeff=0.1), terms)[1][0]
    bonus = -0.1 / 5
    own = (grad - bonus).tolist()
    assert own == pytest.approx([-2 * 0.1 / 5, 0, 0, 0, 2 * 0.1 / 5])
    assert grad[4] > 0, "at rho 2 the upper bound brakes: descent lowers the entropy"
    weak = loss_and_grad(epo(entropy_coeff=0.1, rho=0.1), terms)[1][0]
    assert weak[4] == pytest.approx(0.9 * bonus), "at the released 0.1 it is still pushed up, 10 % less"
    assert penalty(terms)[0].tolist() == pytest.approx([1.6, 0, 0, 0, 6.0])
    assert penalty(terms, smoothing="indicator")[0].tolist() == pytest.approx([0.1, 0.1, 0, 0.1, 0.1]), "strict bounds"


def test_the_mean_of_a_turn_takes_the_tokens_of_row_and_turn() -> None:
    values = torch.tensor([[1.0, 3.0, 9.0, 5.0], [2.0, 4.0, 6.0, 8.0]]).requires_grad_()
    valid = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]]) > 0
    turn = torch.tensor([[0.0, 0.0, math.nan, 2.0], [1.0, 0.0, 0.0, 1.0]])
    mean = mean_of_turn(values, valid, turn)
    assert mean.tolist() == [[2, 2, 0, 5], [5, 5, 5, 5]]
    (grad,) = torch.autograd.grad(mean[0].sum(), values)
    assert grad.tolist() == [[1, 1, 0, 1], [0, 0, 0, 0]]


def test_seq_compares_the_mean_of_each_turn() -> None:
    terms = terms_of([[0.0, 2.0, 7.0, 1.0]], 0.5, [1.5, 1.5, 3.0, 3.0], turn=[0, 0, 1, 1])
    assert penalty(terms, mode="seq")[0].tolist() == pytest.approx([0, 0, 2.0, 2.0])  # means 1 and 4
    assert penalty(terms)[0].tolist() == pytest.approx([1.0, 1.0, 8.0, 0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("params", [{}, {"mode": "seq"}, {"smoothing": "indicator"}, {"smooth_coeff": 0}])
def test_masked_tokens_change_nothing(poison: float, params: dict[str, Any]) -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    h, turn = torch.tensor([[0.2, 3.0, 2.0, 9.0]] * 3).double(), torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(3, 4)

    def result(bad: bool) -> tuple[Tensor, Tensor, dict[str, float]]:
        def spoilt(x: Tensor) -> Tensor:
            return torch.where((mask > 0) | (not bad), x, poison)

        stack = start_stack(epo(**params))
        bound = torch.full((3, 4), 0.5).double()
        terms = terms_of(spoilt(h), spoilt(bound), spoilt(4 * bound), mask, spoilt(turn.double()))
        assert not bool(epo(**params).regularize(terms)[mask == 0].any()), "neither a number nor NaN"
        return *loss_and_grad(stack.methods[0], terms), combine([stack.metrics.take()])

    (loss, grad, logged), (bad_loss, bad_grad, bad_logged) = result(False), result(True)
    assert torch.equal(loss, bad_loss) and torch.equal(grad, bad_grad) and logged == bad_logged
    assert not bool(grad[mask == 0].any()) and bool(grad[mask > 0].all())


@pytest.mark.parametrize(("smoothing", "mean"), [("indicator", 0.05), ("relu", 3.0)])
def test_metrics_count_no_masked_token(smoothing: str, mean: float) -> None:
    """Without a lower bound the entropy 0 that stands in for a masked token would be within."""
    stack = start_stack(epo(smoothing=smoothing))
    terms = terms_of([[1.0, 5.0, 9.0, 9.0]], -NO_BOUND, 2.0, [[1, 1, 0, 0]])
    stack.one("regularize", terms)
    assert combine([stack.metrics.take()]) == pytest.approx({"epo/within": 0.5, "epo/penalty": mean})


@pytest.mark.parametrize("params", [{}, {"mode": "seq"}, {"smooth_coeff": 0}])
def test_low_precision_is_raised_inside(params: dict[str, Any]) -> None:
    """Entropies in bfloat16 beside columns in float32, as hosts give them."""
    terms = terms_of([[0.31, 2.7, 1.13]], 1.0, 1.3, turn=0.0, dtype=torch.bfloat16)
    terms = terms.replace(columns={name: column.float() for name, column in terms.columns.items()})
    term = epo(entropy_coeff=0.3, **params).regularize(terms)
    assert term.dtype == torch.float32
    h = terms.entropies.detach().double()
    compared = h.mean().expand_as(h) if "mode" in params else h
    outside = 0 if "smooth_coeff" in params else 2 * ((1 - compared).relu() + (compared - 1.3).relu())
    torch.testing.assert_close(term.detach().double(), 0.3 * (outside - h), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["token", "seq"])
@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_and_padding_give_the_loss_gradient_and_metrics_of_the_whole(mode: str, how: str) -> None:
    g = torch.Generator().manual_seed(0)
    h = torch.rand(6, 8, generator=g, dtype=torch.float64) * 4
    mask = (torch.rand(6, 8, generator=g) < 0.7).long()
    mask[4] = 0
    turn = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]).expand(6, 8)
    whole = terms_of(h, 1.0, 2.5, mask, turn)

    def parts(cuts: list[list[int]], more: int = 0) -> tuple[Tensor, Tensor, dict[str, float]]:
        stack = start_stack(epo(mode=mode, entropy_coeff=0.2))
        loss, grad = 0.0, torch.zeros_like(h)
        for cut in cuts:
            wide = [torch.nn.functional.pad(x[cut], (0, more), value=v) for x, v in ((h, 7.0), (mask, 0), (turn, 3))]
            part = terms_of(wide[0], 1.0, 2.5, wide[1], wide[2])
            part = part.replace(num_tokens=whole.num_tokens, num_rows=whole.num_rows, max_length=8)
            own, own_grad = loss_and_grad(stack.methods[0], part, how)
            loss, grad[cut] = loss + own, own_grad[:, :8]
        return loss, grad, combine([stack.metrics.take()])

    loss, grad, logged = parts([[0, 1, 2, 3, 4, 5]])
    for cuts in ([[0], [1, 2, 3], [4, 5]], [[i] for i in (3, 1, 5, 0, 4, 2)]):
        for more in (0, 3):
            new_loss, new_grad, new_logged = parts(cuts, more)
            torch.testing.assert_close(new_loss, loss, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(new_grad, grad, rtol=1e-12, atol=1e-14)
            assert new_logged == pytest.approx(logged, rel=1e-6)
    assert 0 < logged["epo/within"] < 1 and logged["epo/penalty"] > 0


# ---- the paper's defaults


def test_the_papers_values_are_the_default() -> None:
    """Tables 2 and 3; of the two environments alpha is that of ALFWorld, below 0.5 as the paper assumes."""
    p = Epo.Params()
    assert (p.entropy_coeff, p.kl, p.kr, p.rho, p.phase_rate) == (0.001, 0.0, 2.0, 0.1, 3.0)
    assert (p.corridor, p.phase, p.phase_middle, p.average, p.include_current) == (
        "batch",
        "paper",
        None,
        "turn",
        False,
    )
    code = {"average": "host", "corridor": "turn", "phase": "code", "smoothing": "indicator", "include_current": True}
    method = paper(**code, gate_turn=25)
    assert method.aggregation == "host" and paper().aggregation == "sum"
    assert paper(entropy_coeff=0).aggregation == "host"


def term_of(method: Epo, decision: Decision, rollouts: Rollouts, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The loss of a whole batch as the host adds it up, and its gradient with respect to the entropies in the order of
    the tokens."""
    rows, time = len(rollouts), int(rollouts.length.max())
    mask = (torch.arange(time)[None] < rollouts.length[:, None]).long()

    def padded(flat: Any) -> Tensor:
        return torch.zeros(rows, time, dtype=torch.float64).masked_scatter(mask > 0, flat.double())

    columns = {name: padded(x) for name, x in decision.token_columns.items()}
    columns |= {name: x.double()[:, None] for name, x in decision.row_columns.items()}
    h = padded(tokens.entropies).requires_grad_()
    loss = masked_sum(method.regularize(make_terms(rows, time, mask=mask, entropies=h, columns=columns)), mask)
    (grad,) = torch.autograd.grad(loss, h)
    return loss.detach(), grad[mask > 0]


@pytest.mark.parametrize("params", [{}, {"rho": 0}, {"kr": 1.1, "kl": 0.9, "rho": 3.0, "corridor": "turn"}])
@pytest.mark.parametrize("layout", ["rollout", "turn"])
def test_means_over_turns_then_rollouts(layout: str, params: dict[str, Any]) -> None:
    """Eq. 2, 4 and 6 by loops, in both layouts: a row per rollout, and a row per turn."""
    method = paper(entropy_coeff=0.5, **params)
    stack, run = start_stack(method, run=make_run(total_batches=9)), [BATCH, NEXT, BATCH]
    p, history = method.params, list[dict[int, float]]()
    for k, batch in enumerate(run):
        rollouts, tokens = batch_of(batch, k, layout)
        decision = one_step(stack, rollouts, tokens)
        loss, grad = term_of(method, decision, rollouts, tokens)
        wanted, slope, now = 0.0, list[float](), dict[int, list[float]]()
        for rollout in batch:
            for t, turn in enumerate(rollout):
                key = 0 if p.corridor == "batch" else t
                now.setdefault(key, []).extend(turn)
                seen = [e[key] for e in history if key in e]
                ref = sum(seen) / len(seen) if seen else math.nan
                for h in turn:
                    share = 1 / len(turn) / len(rollout) / len(batch)
                    outside = max(p.kl * ref - h, 0) + max(h - p.kr * ref, 0) if seen else 0.0
                    sign = (h > p.kr * ref) - (h < p.kl * ref) if seen else 0
                    factor = p.rho * (1 + math.exp(-3 * k / 4))
                    wanted -= 0.5 * share * (h - factor * outside)
                    slope.append(-0.5 * share * (1 - factor * sign))
        history.append({key: sum(values) / len(values) for key, values in now.items()})
        assert float(loss) == pytest.approx(wanted, rel=1e-6)
        assert grad.tolist() == pytest.approx(slope, rel=1e-6)


# ---- phase


def test_phase_weights_fall_and_grow() -> None:
    released = [phase_weight("code", k, 150) for k in range(200)]
    assert released[0] == 1.0 and all(a >= b for a, b in itertools.pairwise(released))
    assert released[150:] == [released[150]] * 50
    falling = [phase_weight("paper", k, 101) for k in range(120)]
    assert falling[0] == 2.0 and falling[50] == pytest.approx(1 + math.exp(-3))
    assert falling[101] == pytest.approx(1.0025, abs=2e-4) and falling[101:] == [falling[101]] * 19
    growing = [phase_weight("paper", k, 100, rate=-1.0, middle=60) for k in range(101)]
    assert all(a < b for a, b in itertools.pairwise(growing)) and growing[60] == pytest.approx(1 + math.e)
    assert phase_weight("paper", 1, 1) == pytest.approx(1 + math.exp(-3))
    assert [phase_weight("code", k, 1) for k in (0, 1, 2)] == pytest.approx(
        [1.0, 0.8 * math.exp(-3), 0.8 * math.exp(-3)]
    )
    assert [phase_weight("none", k, 3) for k in range(9)] == [1.0] * 9


def test_the_phase_is_that_of_the_batch_and_scales_the_penalty() -> None:
    stack = start_stack(epo(phase="code"), run=make_run(total_batches=10))
    weights = [decided(stack, BATCH, k).row_columns["epo_phase"].tolist() for k in (0, 5, 9)]
    assert weights == [
        [1.0] * 2,
        [pytest.approx(phase_weight("code", 5, 10))] * 2,
        [pytest.approx(0.8 * math.exp(-2.4))] * 2,
    ]
    own = start_stack(epo(phase="paper", phase_batches=20), run=make_run(total_batches=10))
    assert decided(own, BATCH, 5).row_columns["epo_phase"].tolist() == pytest.approx([1 + math.exp(-1.5)] * 2)
    assert float(penalty(terms_of([[3.0]], 1.0, 2.0, phase=0.25))) == pytest.approx(0.5)


# ---- history once per batch, resume, refusals


def test_optimizer_steps_and_passes_leave_the_history_alone() -> None:
    stack = start_stack(epo())
    decided(stack, BATCH)
    before = {k: v.clone() for k, v in stack.methods[0].state.items()}
    for _ in range(5):
        stack.one("regularize", terms_of([[1.0, 9.0]], 0.5, 2.0))
    stack.methods[0]._place = "driver"
    assert all(torch.equal(v, before[k]) for k, v in stack.methods[0].state.items())


@pytest.mark.parametrize("params", [{}, {"window": 2}, {"phase": "code", "corridor": "batch"}])
def test_a_resumed_run_goes_on_exactly(tmp_path: Path, params: dict[str, Any]) -> None:
    whole, resumed = start_stack(epo(**params)), start_stack(epo(**params))
    decided(whole, BATCH), decided(whole, NEXT, 1)
    save_state(tmp_path, whole.state_dict("x"))
    resumed.load_state_dict(load_state(tmp_path) or {}, "x")
    for k in (2, 3):
        a, b = decided(whole, BATCH, k), decided(resumed, BATCH, k)
        assert bounds(a) == bounds(b) and any(low > 0 for low, _ in bounds(a))
        assert a.row_columns["epo_phase"].tolist() == b.row_columns["epo_phase"].tolist()


def host(name: str = "trl", missing: dict[str, str] | None = None, **options: Any) -> HostCapabilities:
    defaults = {"entropy_coef": 0.0, "use_adaptive_entropy": False, "actor_rollout_ref.actor.entropy_coeff": 0}
    return HostCapabilities(
        name, "0", {"shape", "regularize"}, {}, (), missing or {}, None, defaults | options, defaults
    )


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("trl", "entropy_coef", 0.01),
        ("trl", "use_adaptive_entropy", True),
        ("verl", "actor_rollout_ref.actor.entropy_coeff", 0.01),
    ],
)
def test_the_hosts_own_bonus_would_count_twice(name: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        preflight(build_stack("epo"), host(name, **{option: value}))


def test_refused_without_turns_unless_there_is_one_corridor() -> None:
    missing = {"turns": "every completion is one turn."}
    with pytest.raises(ConfigError, match=r"`epo` needs turns of agents.*: every completion is one turn"):
        preflight(build_stack("epo"), host(missing=missing))
    with pytest.raises(ConfigError, match=r"`epo` needs turns of agents"):
        preflight(build_stack("epo", {"epo": {"average": "host", "corridor": "turn"}}), host(missing=missing))
    for params in ({"average": "host"}, {"average": "host", "rho": 0}, {"entropy_coeff": 0}):
        preflight(build_stack("epo", {"epo": params}), host(missing=missing))


@pytest.mark.parametrize("need", ["tokens", "entropies", "current_entropies"])
@pytest.mark.parametrize("params", [{"corridor": "batch"}, {"smooth_coeff": 0}])
def test_refused_where_the_host_has_no_entropies(need: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the host says why not"):
        preflight(build_stack("epo", {"epo": params}), host(missing={need: "the host says why not."}))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"entropy_coeff": -0.1}, "entropy_coeff"),
        ({"kl": 1.0}, "kl"),
        ({"kl": -0.1}, "kl"),
        ({"kr": 1.0}, "kr"),
        ({"rho": -1}, "rho"),
        ({"window": 0}, "window"),
        ({"gate_turn": 1}, "gate_turn"),
        ({"phase": "none", "phase_rate": 2.0}, "phase_rate"),
        ({"phase": "code", "phase_middle": 3}, "phase_middle"),
        ({"rho": 0, "kl": 0.3}, "kl"),
        ({"mode": "row"}, "mode"),
    ],
)
def test_parameters_out_of_range_or_without_effect(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"`{named}`"):
        build_stack("epo", {"epo": params})


def test_a_run_without_any_corridor_is_told() -> None:
    (idle,) = Epo.idle
    stack = start_stack(epo(gate_turn=9))
    for k in range(3):
        decided(stack, BATCH, k)
        logged = combine([stack.metrics.take()])
        assert {name: logged[f"epo/{name}"] for name in idle.signs} == idle.signs
