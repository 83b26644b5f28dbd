"""The loss of OTR from logits and from hidden states, against a float64 loop that knows only the formula."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import build_params
from rl_plugins.tools.supervised import otr
from rl_plugins.tools.supervised.otr import (
    Drawing,
    Head,
    OtrParams,
    generator,
    head_loss,
    logits_loss,
    sequence_weights,
)

EXPECTED = dict(expected=True)


def case(tokens=7, width=11, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, width, generator=g, dtype=torch.float64) * 2
    target = torch.randint(width, (tokens,), generator=g)
    return logits.to(dtype), target


def drawing(seed=3, vocabulary=None, **values):
    params = OtrParams(**values)
    return Drawing(params, generator(params, 0, 0, 0, seed, "cpu"), vocabulary)


def all_rows(target):
    return torch.arange(len(target))


def counted(logits, target, how):
    """The draws that `how` makes of these logits, as shares c(a) of each token, from a generator in the same state."""
    q = (logits / how.params.kappa).softmax(-1)
    ids = torch.multinomial(q, how.params.samples, replacement=True, generator=how.generator)
    return torch.stack([torch.bincount(row, minlength=logits.shape[1]) for row in ids]).double() / how.params.samples


def loop(logits, target, kappa, beta, shares=None, vocabulary=None):
    """Losses of the tokens, one logit at a time, in Python floats that autograd can follow."""
    losses = []
    for t in range(len(logits)):
        total = torch.logsumexp(logits[t], 0)
        drawn_from = logits[t].detach() / kappa
        allowed = range(vocabulary or len(drawn_from))
        norm = sum(math.exp(drawn_from[a]) for a in allowed)
        loss = torch.zeros((), dtype=torch.float64)
        for a in range(len(drawn_from)):
            q = (math.exp(drawn_from[a]) / norm if a in allowed else 0.0) if shares is None else float(shares[t, a])
            reward = 1.0 if a == int(target[t]) else beta
            loss = loss - q * reward * (logits[t, a] - total)
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize("block", [1 << 25, 25])
@pytest.mark.parametrize(
    "values",
    [
        dict(kappa=1.3, beta=-0.1),
        dict(kappa=1.0, beta=0.0),
        dict(kappa=0.6, beta=0.5),
        dict(kappa=3.0, beta=-1.0),
    ],
)
@pytest.mark.parametrize("expected", [True, False])
def test_loss_and_gradient_equal_the_loop(values, expected, block, monkeypatch):
    """From logits and from hidden states, the draws of the loop counted from the same stream."""
    monkeypatch.setattr(otr, "BLOCK", block)
    logits, target = case()
    made = dict(values, **(EXPECTED if expected else dict(samples=5)))
    shares = None
    if not expected:
        one, parts = drawing(**made), otr._blocks(len(logits), logits.shape[1])
        shares = torch.cat([counted(logits[b], target[b], one) for b in parts])
    weight = torch.linspace(0.5, 2, len(target), dtype=torch.float64)

    free = logits.clone().requires_grad_()
    wanted = loop(free, target, values["kappa"], values["beta"], shares)
    (wanted * weight).sum().backward()

    ours = logits.clone().requires_grad_()
    found = logits_loss(ours, target, all_rows(target), drawing(**made))
    (found.loss * weight).sum().backward()
    torch.testing.assert_close(found.loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, free.grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.nll, torch.nn.functional.cross_entropy(logits, target, reduction="none"))
    share = shares if shares is not None else (logits / values["kappa"]).softmax(-1)
    torch.testing.assert_close(found.share, share.double().gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(found.entropy, torch.distributions.Categorical(logits=logits).entropy())
    assert torch.equal(found.top1, logits.argmax(-1) == target)

    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 4, generator=g, dtype=torch.float64).requires_grad_()
    head = torch.randn(11, 4, generator=g, dtype=torch.float64).requires_grad_()
    bias = torch.randn(11, generator=g, dtype=torch.float64).requires_grad_()
    how = Head(scale=0.7, cap=3.0, inverse=1 / 1.2)

    def product(h, w, b):
        return how.cap * torch.tanh((h @ w.T + b) * how.scale / how.cap) * how.inverse

    with torch.no_grad():
        z = product(hidden, head, bias)
    if not expected:
        one = drawing(**made)
        shares = torch.cat([counted(z[b], target[b], one) for b in otr._blocks(7, 11)])
    by_loop = loop(product(hidden, head, bias), target, values["kappa"], values["beta"], shares)
    wanted = torch.autograd.grad((by_loop * weight).sum(), (hidden, head, bias))
    result = head_loss(hidden, head, bias, target, drawing(**made), how)
    torch.testing.assert_close(result.loss, by_loop, rtol=1e-12, atol=1e-12)
    for mine, its in zip(torch.autograd.grad((result.loss * weight).sum(), (hidden, head, bias)), wanted, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


def test_the_paper_s_defaults():
    p = OtrParams()
    assert (p.samples, p.kappa, p.beta, p.expected, p.reduction) == (256, 1.3, -0.1, False, "token")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (dict(samples=0), "`samples` is 0; it must be >= 1"),
        (dict(kappa=0), "`kappa` is 0.0; it must be > 0"),
        (dict(kappa="inf"), "`kappa` is 'inf'"),
        (dict(beta=1), "`beta` is 1.0; it must be >= -1 and < 1"),
        (dict(beta=-1.5), "`beta` is -1.5"),
        (dict(reduction="mean"), "`reduction` is 'mean'; allowed: 'token', 'sequence'"),
        (dict(expected=True, samples=8), "`samples` has no effect: it is 8"),
        (dict(bets=0.1), "no parameter `bets`. Did you mean `beta`"),
    ],
)
def test_parameters_out_of_range(values, text):
    with pytest.raises(ConfigError, match=text.replace(".", r"\.").replace("(", r"\(")):
        build_params(OtrParams, values, "otr")


# ---- what the formula implies


def gradient(logits, target, **values):
    free = logits.clone().requires_grad_()
    logits_loss(free, target, all_rows(target), drawing(**values)).loss.sum().backward()
    return free.grad


def test_at_kappa_1_it_is_dft_times_one_minus_beta():
    logits, target = case()
    p = logits.softmax(-1)
    p_x = p.gather(1, target[:, None])
    dft = -p_x * (torch.nn.functional.one_hot(target, 11) - p)
    for beta in (0.0, -0.1, 0.7):
        found = gradient(logits, target, kappa=1.0, beta=beta, **EXPECTED)
        torch.testing.assert_close(found, (1 - beta) * dft, rtol=1e-12, atol=1e-14)
    other = gradient(logits, target, kappa=1.3, beta=-0.1, **EXPECTED)
    cosine = torch.nn.functional.cosine_similarity(other, dft, dim=-1)
    assert cosine.min() < 0.99, "with another kappa the direction must be another"


def test_many_draws_approach_the_expected_form():
    logits, target = case(tokens=4)
    exact = gradient(logits, target, kappa=1.3, beta=-0.1, **EXPECTED)
    one = [(gradient(logits, target, samples=k) - exact).norm() / exact.norm() for k in (200, 200_000)]
    assert one[1] < 0.02 and one[0] > 4 * one[1]


def test_the_mean_over_draws_is_the_expected_gradient():
    logits, target = case(tokens=2, width=5)
    exact = gradient(logits, target, kappa=1.3, beta=-0.5, **EXPECTED)
    many = gradient(logits.repeat(4000, 1), target.repeat(4000), samples=4, beta=-0.5).view(4000, 2, 5)
    error = (many.mean(0) - exact).abs() / (many.std(0) / math.sqrt(len(many)))
    assert error.max() < 4.5


def test_a_target_that_is_never_drawn_gives_no_gradient_with_beta_0():
    logits, target = case(tokens=1)
    logits[0, target[0]] = -60.0
    assert gradient(logits, target, beta=0.0, samples=64).abs().max() == 0
    assert gradient(logits, target, beta=0.0, **EXPECTED).abs().max() < 1e-20
    assert gradient(logits, target, beta=-0.1, samples=64).abs().max() > 1e-3


def test_a_target_that_is_certain_gives_no_gradient():
    logits, target = case(tokens=1)
    logits[0, target[0]] = 80.0
    for values in (EXPECTED, dict(samples=16)):
        assert gradient(logits, target, **values).abs().max() < 1e-15


def test_ids_behind_the_tokenizer_are_not_drawn():
    logits, target = case(tokens=6, width=12)
    target.clamp_(max=7)
    logits[:, 8:] += 6.0  # nearly all probability lies on padding
    wanted = loop(logits, target, 1.3, -0.1, vocabulary=8)
    found = logits_loss(logits, target, all_rows(target), drawing(vocabulary=8, **EXPECTED))
    torch.testing.assert_close(found.loss, wanted)
    free = logits.clone().requires_grad_()
    logits_loss(free, target, all_rows(target), drawing(vocabulary=8, samples=50)).loss.sum().backward()
    share = logits.softmax(-1)
    drawn_sum = free.grad[:, 8:] / share[:, 8:]  # S pi, without a draw
    torch.testing.assert_close(drawn_sum, drawn_sum[:, :1].expand_as(drawn_sum))
    wide = drawing(vocabulary=99, samples=5)  # a tokenizer larger than the head takes nothing away
    assert logits_loss(logits, target, all_rows(target), wide).loss.isfinite().all()


@given(st.integers(0, 10_000), st.booleans(), st.floats(0.05, 20), st.floats(-1, 0.99), st.floats(0, 1e4))
@settings(max_examples=40, deadline=None)
def test_no_nan_whatever_the_logits(seed, expected, kappa, beta, size):
    """Huge logits, minus infinity beside the target, bfloat16."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 9, generator=g) * size
    target = torch.randint(9, (5,), generator=g)
    logits[0, (target[0] + 1) % 9] = -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        free = logits.to(dtype, copy=True).requires_grad_()
        values = dict(EXPECTED) if expected else dict(samples=3)
        found = logits_loss(free, target, all_rows(target), drawing(kappa=kappa, beta=beta, **values))
        found.loss.sum().backward()
        assert found.loss.isfinite().all() and found.entropy.isfinite().all() and free.grad.isfinite().all()
        assert found.loss.dtype == torch.float32 and free.grad.dtype == dtype
        torch.testing.assert_close(free.grad.float().sum(-1), torch.zeros(5), atol=0.05, rtol=0)


def test_rows_that_are_not_trained_have_no_part_in_it():
    """Neither their logits nor a NaN in them; in place and not."""
    logits, target = case(tokens=8, dtype=torch.float32)
    rows = torch.tensor([1, 2, 5])
    whole = logits_loss(logits[rows], target[rows], torch.arange(3), drawing(**EXPECTED))
    logits[0] = torch.nan
    for in_place in (False, True):
        leaf = logits.clone().requires_grad_()
        live = leaf * 1.0
        found = logits_loss(live, target, rows, drawing(**EXPECTED), in_place)
        assert torch.equal(found.loss, whole.loss)
        buffer = live.data_ptr()
        (of_live,) = torch.autograd.grad(found.loss.sum(), live)
        assert (of_live.data_ptr() == buffer) == in_place
        assert of_live[[0, 3, 4, 6, 7]].abs().max() == 0 and of_live[rows].abs().sum() > 0.1
    plain = gradient(logits[rows], target[rows], **EXPECTED)
    torch.testing.assert_close(of_live[rows], plain)


def test_nothing_to_train_is_a_finite_0():
    logits, target = case()
    free = logits.clone().requires_grad_()
    for found in (
        logits_loss(free, target, torch.zeros(0, dtype=torch.long), drawing()),
        head_loss(free[:0], torch.randn(5, 11, dtype=torch.float64), None, target[:0], drawing()),
    ):
        (grad,) = torch.autograd.grad(found.loss.sum(), free)
        assert found.loss.sum() == 0 and grad.abs().max() == 0


def test_streams_of_draws():
    """The same numbers give the same draws; another step, rank, micro-batch, seed of run or loss gives others."""
    p = OtrParams(samples=4)
    first = [torch.rand(4, generator=generator(p, *where, "cpu")) for where in ((1, 2, 3, 4), (1, 2, 3, 4))]
    assert torch.equal(*first)
    others = [(1, 2, 3, 5), (1, 2, 4, 4), (1, 3, 3, 4), (2, 2, 3, 4)]
    drawn = [torch.rand(4, generator=generator(p, *where, "cpu")) for where in others]
    drawn.append(torch.rand(4, generator=generator(OtrParams(samples=4, seed=1), 1, 2, 3, 4, "cpu")))
    assert len({tuple(d.tolist()) for d in [first[0], *drawn]}) == 6
    assert generator(OtrParams(expected=True), 1, 2, 3, 4, "cpu") is None
    assert len({generator(p, 0, step, 0, 0, "cpu").initial_seed() for step in range(300)}) == 300
    state = torch.get_rng_state()
    logits, target = case()
    logits_loss(logits, target, all_rows(target), drawing(samples=9))
    assert torch.equal(torch.get_rng_state(), state), "the global stream was used"


def test_under_autocast_logits_are_rounded_and_sums_are_not():
    """The product is that of autocast, in bfloat16. Gradients add up in float32, over blocks and over tokens."""
    g = torch.Generator().manual_seed(4)
    hidden, head, bias = (torch.randn(*size, generator=g).requires_grad_() for size in ((40, 16), (30, 16), (30,)))
    target = torch.randint(30, (40,), generator=g)
    with torch.autocast("cpu", torch.bfloat16):
        found = head_loss(hidden, head, bias, target, drawing(**EXPECTED))
    found.loss.sum().backward()
    h, w, b = (x.detach().bfloat16() for x in (hidden, head, bias))
    logits = (h @ w.T + b).float()
    wanted = logits_loss(logits.requires_grad_(), target, all_rows(target), drawing(**EXPECTED))
    wanted.loss.sum().backward()
    slope = logits.grad.bfloat16().float()
    assert torch.equal(found.loss, wanted.loss)
    for mine, its in ((hidden.grad, slope @ w.float()), (head.grad, slope.T @ h.float()), (bias.grad, slope.sum(0))):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_a_head_that_is_in_parts_is_whole_while_it_is_read():
    """As a host that shards parameters gives it: whole in the forward pass, which it calls in a context of its own, and
    in the backward pass by `Head.whole`."""
    logits, target = case(tokens=6, width=9)
    hidden, head = logits[:, :4].clone().requires_grad_(), torch.randn(9, 4, dtype=torch.float64).requires_grad_()
    real = head.detach().clone()
    wanted = torch.autograd.grad(head_loss(hidden, head, None, target, drawing(**EXPECTED)).loss.sum(), (hidden, head))

    @contextlib.contextmanager
    def whole(weight, bias):
        assert weight is head and bias is None
        weight.data.copy_(real)
        yield
        weight.data.zero_()

    with whole(head, None):
        found = head_loss(hidden, head, None, target, drawing(**EXPECTED), Head(whole=whole))
    for mine, its in zip(torch.autograd.grad(found.loss.sum(), (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(mine, its)


def test_a_frozen_head_has_no_gradient_and_costs_none():
    """With an adapter only the hidden states have one."""
    hidden = torch.randn(12, 8, requires_grad=True)
    head, target = torch.randn(50, 8), torch.randint(50, (12,))
    for frozen in (True, False):
        head.requires_grad_(not frozen)
        made = []

        class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, made=made):
                out = func(*args, **(kwargs or {}))
                made.append(tuple(out.shape) if torch.is_tensor(out) else ())
                return out

        loss = head_loss(hidden, head, None, target, drawing(**EXPECTED)).loss.sum()
        with Shapes():
            loss.backward()
        assert ((50, 8) in made) != frozen and hidden.grad.abs().sum() > 0


def test_weights_of_sequences():
    weights, number = sequence_weights(torch.tensor([4, 4, 9, 4, 7, 7]))
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3, 1.0, 1 / 3, 0.5, 0.5]) and number == 3
    weights, number = sequence_weights(torch.zeros(0, dtype=torch.long))
    assert len(weights) == 0 and number == 0


def test_blocks_bound_the_memory():
    """No tensor of (tokens, vocabulary) is made of hidden states; one block of logits is."""
    sizes = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(o.numel() for o in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(o))
            return out

    tokens, width = 64, 500
    hidden = torch.randn(tokens, 8, requires_grad=True)
    head = torch.randn(width, 8, requires_grad=True)
    target = torch.randint(width, (tokens,))
    before = otr.BLOCK
    otr.BLOCK = 4 * width
    try:
        for values in (EXPECTED, dict(samples=6)):
            sizes.clear()
            with Largest():
                head_loss(hidden, head, None, target, drawing(**values)).loss.sum().backward()
            assert 4 * width <= max(sizes) < 8 * width + width, (max(sizes), tokens * width)
    finally:
        otr.BLOCK = before
