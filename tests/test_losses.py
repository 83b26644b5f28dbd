"""Surrogates and aggregation against scalar loops; shares of micro-batches; nothing leaks out of masked tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.losses import LOG_RATIO_LIMIT, TRL_AGGREGATION, aggregate, ppo_clip, weighted_logprob

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
NAN, INF = math.nan, math.inf


def loop_ppo(lp, old, advantage, low, high, dual=None):
    """Loss of one token and its derivative by the log-prob."""
    ratio = math.exp(min(max(lp - old, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT))
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss, slope = -ratio * advantage, -ratio * advantage
    if -clipped * advantage > loss:
        loss, slope = -clipped * advantage, 0.0
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, slope = -dual * advantage, 0.0
    return loss, slope


def loop_aggregate(per_token, mask, how, max_length):
    rows = [[x for x, m in zip(xs, ms, strict=True) if m] for xs, ms in zip(per_token, mask, strict=True)]
    rows = [r for r in rows if r]
    if not rows:
        return 0.0
    if how == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_row = {
        "seq-mean-token-mean": [sum(r) / len(r) for r in rows],
        "seq-mean-token-sum": [sum(r) for r in rows],
        "seq-mean-token-sum-norm": [sum(r) / max_length for r in rows],
    }[how]
    return sum(per_row) / len(rows)


def batch(rows=6, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    lp = (old + torch.randn(rows, width, generator=generator, dtype=torch.float64)).requires_grad_()
    return lp, old, torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width)


@pytest.mark.parametrize("dual", [None, 3.0, 1.2])
def test_ppo_clip_equals_a_loop_over_tokens_with_a_clip_range_per_row(dual):
    lp, old, advantages = batch(40, 6)
    low = torch.linspace(0.0, 0.9, 40, dtype=torch.float64)[:, None]
    high = torch.linspace(1.5, 0.0, 40, dtype=torch.float64)[:, None]
    loss = ppo_clip(lp, old, advantages, low, high, dual)
    loss.sum().backward()
    seen = set()
    for i in range(40):
        for t in range(6):
            args = (lp[i, t].item(), old[i, t].item(), advantages[i, t].item(), low[i].item(), high[i].item(), dual)
            value, slope = loop_ppo(*args)
            assert loss[i, t].item() == pytest.approx(value, rel=1e-12)
            assert lp.grad[i, t].item() == pytest.approx(slope, rel=1e-12)
            seen.add((slope == 0, args[2] > 0))
    assert len(seen) == 4  # clipped and not, for both signs of the advantage


def test_ppo_clip_has_its_own_range_for_every_token_too():
    lp = torch.tensor([[0.5, 0.5, 0.5]])
    high = torch.tensor([[0.1, 0.3, 9.0]])
    out = ppo_clip(lp, torch.zeros(1, 3), torch.ones(1, 3), 0.2, high)
    assert out.tolist()[0] == pytest.approx([-1.1, -1.3, -math.exp(0.5)])


def test_dual_clip_bounds_only_tokens_with_a_negative_advantage():
    lp, old = torch.tensor([[4.0, 4.0]], requires_grad=True), torch.zeros(1, 2)
    loss = ppo_clip(lp, old, torch.tensor([[-2.0, 2.0]]), dual_clip=3.0)
    loss.sum().backward()
    assert loss.tolist()[0] == pytest.approx([6.0, -2.4]) and lp.grad.tolist() == [[0.0, 0.0]]
    without = ppo_clip(lp, old, torch.tensor([[-2.0, 2.0]]))
    assert without.tolist()[0] == pytest.approx([2 * math.exp(4), -2.4])


@pytest.mark.parametrize("ratio", [1.0, 1.5, 0.5])
@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_a_positive_weight_on_the_advantage_is_a_weight_on_the_loss(ratio, scale):
    lp = torch.full((1, 2), math.log(ratio), dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    weighted = ppo_clip(lp, torch.zeros(1, 2), scale * advantages, dual_clip=3.0)
    assert torch.allclose(weighted, scale * ppo_clip(lp, torch.zeros(1, 2), advantages, dual_clip=3.0))


def test_on_policy_ppo_is_reinforce():
    lp, _, advantages = batch()
    loss = ppo_clip(lp, lp.detach(), advantages, 0.2, 0.2)
    loss.sum().backward()
    assert torch.equal(loss.detach(), -advantages) and torch.equal(lp.grad, -advantages)


def test_a_huge_log_ratio_is_clamped_like_in_the_hosts_and_stays_finite():
    lp = torch.tensor([[500.0, -500.0]], requires_grad=True)
    loss = ppo_clip(lp, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]))
    loss.sum().backward()
    assert loss.tolist()[0] == pytest.approx([math.exp(20), -math.exp(-20)], rel=1e-5)
    assert lp.grad.tolist() == [[0.0, 0.0]]


def test_the_arithmetic_stays_in_the_dtype_of_the_log_probs():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        lp, old = torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
        bound = torch.full((2, 1), 0.2, dtype=torch.float64)  # a column of `shape` may be wider
        assert ppo_clip(lp, old, torch.ones(2, 3, dtype=dtype), bound, bound).dtype == dtype


def test_weighted_logprob_has_gradient_through_the_log_probs_only():
    lp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    weight = torch.tensor([[3.0, 0.5]], requires_grad=True)
    loss = weighted_logprob(lp, weight, torch.tensor([[2.0, -1.0]]))
    loss.sum().backward()
    assert loss.tolist() == [[6.0, -1.0]] and lp.grad.tolist() == [[-6.0, 0.5]] and weight.grad is None


# ---- aggregation

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])


def share(per_token, mask, how, whole_mask, max_length=8, ranks=1):
    return aggregate(
        per_token,
        mask,
        how,
        num_tokens=whole_mask.sum() / ranks,
        num_rows=(whole_mask.sum(1) > 0).sum() / ranks,
        max_length=max_length,
    )


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_aggregate_equals_a_loop(how, dtype):
    per_token = torch.arange(20, dtype=torch.float64).reshape(5, 4) ** 1.5 - 7
    out = share(per_token, MASK.to(dtype), how, MASK)
    assert out.item() == pytest.approx(loop_aggregate(per_token.tolist(), MASK.tolist(), how, 8), rel=1e-12)


def test_the_modes_differ_and_every_loss_type_of_trl_names_one():
    per_token = torch.arange(20, dtype=torch.float64).reshape(5, 4)
    assert len({round(share(per_token, MASK, how, MASK).item(), 9) for how in MODES}) == 4
    assert set(TRL_AGGREGATION.values()) == set(MODES)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODES), st.data())
def test_shares_of_any_split_add_up_to_the_whole(how, data):
    rows = data.draw(st.integers(1, 9))
    width = data.draw(st.integers(1, 5))
    flags = data.draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    mask = torch.tensor(flags).reshape(rows, width).long()
    per_token = torch.linspace(-3, 5, rows * width, dtype=torch.float64).reshape(rows, width)
    which = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    pads = [data.draw(st.integers(0, 2)) for _ in range(4)]
    total = 0.0
    for part, pad in enumerate(pads):
        mine = which == part
        padded = [torch.nn.functional.pad(x[mine], (0, pad), value=v) for x, v in ((per_token, 99.0), (mask, 0))]
        total += share(*padded, how, mask).item()
    whole = loop_aggregate(per_token.tolist(), mask.tolist(), how, 8)
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_mean_over_ranks_of_their_shares_is_the_whole_even_with_fewer_rows_than_ranks(how, ranks):
    per_token, mask = torch.tensor([[2.0, 4.0, 9.0]]), torch.tensor([[1, 1, 0]])
    empty = torch.zeros(1, 3, dtype=torch.int64)
    shares = [share(per_token, mask if r == 0 else empty, how, mask, ranks=ranks).item() for r in range(ranks)]
    assert sum(shares) / ranks == pytest.approx(loop_aggregate(per_token.tolist(), mask.tolist(), how, 8))
    as_number = aggregate(per_token, mask, how, num_tokens=2 / ranks, num_rows=1 / ranks, max_length=8)
    assert as_number.item() == pytest.approx(shares[0])


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("number", [torch.tensor(0.0), torch.tensor(0), 0, 0.0])
def test_no_token_at_all_gives_0_with_gradient_0(how, number):
    per_token = torch.ones(2, 3, requires_grad=True)
    out = aggregate(per_token, torch.zeros(2, 3), how, num_tokens=number, num_rows=number, max_length=4)
    out.backward()
    assert out.item() == 0.0 and per_token.grad.tolist() == [[0.0] * 3] * 2
    nothing = aggregate(torch.ones(0, 3), torch.zeros(0, 3), how, num_tokens=number, num_rows=number, max_length=4)
    assert nothing.item() == 0.0


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("rubbish", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs"])  # advantages of masked tokens are 0, see the driver
def test_rubbish_in_masked_tokens_reaches_neither_loss_nor_gradient(how, rubbish, where):
    lp, old, advantages = batch(5, 4)
    values = {"logprobs": lp.detach().clone(), "old_logprobs": old.clone(), "advantages": advantages.clone()}
    clean = _loss_and_gradient(values, how)
    values[where][MASK == 0] = rubbish
    dirty = _loss_and_gradient(values, how)
    assert math.isfinite(clean[0]) and dirty == clean
    assert not torch.tensor(dirty[1])[MASK == 0].any()


@pytest.mark.parametrize("how", MODES)
def test_a_masked_token_whose_loss_is_nan_has_gradient_0(how):
    per_token = torch.ones(5, 4).masked_fill(MASK == 0, NAN).requires_grad_()
    out = share(per_token, MASK, how, MASK)
    out.backward()
    assert out.item() == pytest.approx(loop_aggregate([[1.0] * 4] * 5, MASK.tolist(), how, 8))
    assert not per_token.grad[MASK == 0].any() and bool((per_token.grad[MASK == 1] > 0).all())


def _loss_and_gradient(values, how):
    lp = values["logprobs"].clone().requires_grad_()
    loss = share(ppo_clip(lp, values["old_logprobs"], values["advantages"], 0.2, 0.3), MASK, how, MASK)
    loss.backward()
    return loss.item(), lp.grad.tolist()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"unknown aggregation 'mean'; allowed: seq-mean-token-mean, "):
        aggregate(torch.ones(1, 1), torch.ones(1, 1), "mean", num_tokens=1, num_rows=1, max_length=1)
