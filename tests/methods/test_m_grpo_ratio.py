"""The ratio of a whole trajectory (arXiv 2511.13288, eq. 14 to 17): loss, gradient, clipping, masks."""

from __future__ import annotations

import math

import pytest
import torch

from rl_plugins.core.losses import aggregate
from rl_plugins.methods.m_grpo_ratio import MGrpoRatio
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_terms, start_stack

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
ADVANTAGE = torch.tensor([1.5, -0.5, 2.0, -1.0], dtype=torch.float64)


def terms_of(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor = ADVANTAGE):
    rows, time = new.shape
    return make_terms(
        rows, time, mask=MASK, logprobs=new, old_logprobs=old, advantages=advantage[:, None].expand(rows, time)
    )


def log_ratios() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    old = -torch.rand(4, 4, generator=g, dtype=torch.float64) - 1
    return (old + 0.3 * torch.randn(4, 4, generator=g, dtype=torch.float64)).requires_grad_(), old


def test_the_mean_over_trajectories_and_its_gradient_equal_the_loop() -> None:
    new, old = log_ratios()
    terms = terms_of(new, old)
    loss = aggregate(
        start_stack(MGrpoRatio()).one("policy_loss", terms),
        MASK,
        "seq-mean-token-mean",
        num_tokens=MASK.sum(),
        num_rows=torch.tensor(4.0),
        max_length=4,
    )
    (grad,) = torch.autograd.grad(loss, new)
    wanted, slope = [], torch.zeros(4, 4, dtype=torch.float64)
    for i, a in enumerate(ADVANTAGE.tolist()):
        ratio = math.exp(sum(float(new[i, t] - old[i, t]) for t in range(4) if MASK[i, t]))
        clipped = min(max(ratio, 0.8), 1.28)
        wanted.append(-min(ratio * a, clipped * a))
        slope[i] = -ratio * a / 4 * MASK[i] if ratio * a <= clipped * a else 0.0
    assert float(loss) == pytest.approx(math.fsum(wanted) / 4)
    torch.testing.assert_close(grad, slope)
    assert bool((slope == 0).all(1).any()) and bool((slope != 0).any())


def test_on_policy_it_is_the_plain_gradient_and_nothing_is_clipped() -> None:
    _, old = log_ratios()
    new = old.clone().requires_grad_()
    stack = start_stack(MGrpoRatio())
    loss = stack.one("policy_loss", terms_of(new, old))
    (grad,) = torch.autograd.grad((loss / MASK.sum(1, keepdim=True))[MASK > 0].sum(), new)
    torch.testing.assert_close(grad, -ADVANTAGE[:, None] * MASK)
    assert combine([stack.metrics.take()]) == {"m_grpo_ratio/clipped": 0.0, "m_grpo_ratio/log_ratio": 0.0}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_change_nothing(poison: float) -> None:
    new, old = log_ratios()
    bad = torch.where(MASK > 0, new.detach(), poison).requires_grad_()
    found = []
    for values in (new, bad):
        loss = start_stack(MGrpoRatio()).one("policy_loss", terms_of(values, old))
        (grad,) = torch.autograd.grad(loss[MASK > 0].sum(), values)
        assert not bool(grad[MASK == 0].any()) and not bool(loss[MASK == 0].any())
        found.append(loss[MASK > 0].detach())
    assert torch.equal(*found)
