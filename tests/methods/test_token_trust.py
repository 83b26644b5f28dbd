"""DPPO (arXiv 2602.04879), KL-Cov and Clip-Cov (arXiv 2505.22617): plain loops over tokens, and verl's numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.rollouts import Terms, Tokens
from rl_plugins.methods.clip_cov import ClipCov
from rl_plugins.methods.dppo import Dppo
from rl_plugins.methods.kl_cov import KlCov, covariance
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_terms, make_tokens, one_step, start_stack

DPPO = Golden("dppo")
KL_COV = Golden("kl_cov")
CLIP_COV = Golden("clip_cov")
CLOSE: dict[str, Any] = dict(rel=1e-5, abs=1e-6)  # verl computed in float32


def of_case(case: Case) -> Terms:
    logprobs, old, advantages, mask = (
        torch.tensor([list(row) for row in case.inputs[name]])
        for name in ("logprobs", "old_logprobs", "advantages", "mask")
    )
    logprobs = logprobs.requires_grad_()
    return make_terms(*mask.shape, mask=mask, logprobs=logprobs, old_logprobs=old, advantages=advantages)


def tokens_of(terms: Terms, logprobs: torch.Tensor) -> tuple[Any, Tokens]:
    """Rollouts and tokens of these rows, with these log-probs at the start of the step."""
    mask = terms.mask > 0
    rollouts = make_rollouts([0.0] * len(mask), lengths=mask.sum(1).tolist())
    values = dict(old_logprobs=logprobs.detach()[mask], advantages=terms.advantages[mask].double())
    return rollouts, make_tokens(rollouts).replace(**values)


def mean_and_gradient(per_token: torch.Tensor, terms: Terms) -> tuple[float, list[list[float]]]:
    loss = (per_token * terms.mask).sum() / terms.mask.sum()
    return float(loss.detach()), torch.autograd.grad(loss, terms.logprobs)[0].tolist()


# ---- dppo


def loop(terms: Terms, divergence: str, low: float, high: float, cap: float, anchor: str) -> list[list[float]]:
    """Gradient of the sum of the losses, token by token."""
    found = []
    before = terms.rollout_logprobs if anchor == "rollout" else terms.old_logprobs
    for row in zip(
        terms.logprobs.tolist(), before.tolist(), terms.advantages.tolist(), terms.mask.tolist(), strict=True
    ):
        gradient = []
        for lp, lo, a, trained in zip(*row, strict=True):
            p, mu = math.exp(lp), math.exp(lo)
            d = abs(p - mu)
            if divergence == "kl":
                d = mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu + 1e-8) / (1 - p + 1e-8))
            left = (a > 0 and p > mu and d > high) or (a <= 0 and p < mu and d > low)
            gradient.append(-min(p / mu, cap) * a if trained and not left else 0.0)
        found.append(gradient)
    return found


@pytest.mark.parametrize("anchor", ["rollout", "old"])
@pytest.mark.parametrize(
    ("divergence", "low", "high", "cap"), [("tv", 0.05, 0.1, 20), ("kl", 0.01, 0.02, 1.3), ("tv", 0, 0, 1)]
)
def test_dppo_equals_the_loop(divergence, low, high, cap, anchor):
    old = -torch.rand(6, 9, generator=torch.Generator().manual_seed(1)).double() * 3 - 0.05
    moved = torch.randn(6, 9, generator=torch.Generator().manual_seed(2)).double()
    terms = make_terms(6, 9, old_logprobs=old, rollout_logprobs=(old + 0.2 * moved.flip(0)).clamp(max=-1e-3))
    terms = terms.replace(logprobs=(old + 0.6 * moved).clamp(max=-1e-3).requires_grad_())
    params = Dppo.Params(divergence=divergence, bound_low=low, bound_high=high, cap=cap, anchor=anchor)
    expected = loop(terms, divergence, low, high, cap, anchor)
    per_token = Dppo(params).policy_loss(terms)
    (gradient,) = torch.autograd.grad((per_token * terms.mask).sum(), terms.logprobs)
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert 0 < int((gradient == 0).sum()) < gradient.numel()


@DPPO.kind("logprobs")
def check_dppo(case: Case) -> None:
    terms = of_case(case)
    loss, gradient = mean_and_gradient(Dppo(case.build(Dppo, anchor="old")).policy_loss(terms), terms)
    assert loss == pytest.approx(case.expected["loss"], **CLOSE)
    for got, wanted in zip(gradient, case.expected["gradient"], strict=True):
        assert got == pytest.approx(list(wanted), **CLOSE)


def test_dppo_without_movement_is_reinforce():
    terms = make_terms()
    terms = terms.replace(rollout_logprobs=terms.logprobs.detach())
    _, gradient = mean_and_gradient(Dppo().policy_loss(terms), terms)
    wanted = -terms.advantages * terms.mask / terms.mask.sum()
    assert torch.allclose(torch.tensor(gradient), wanted)


def test_dppo_corrects_the_sampling_policy_only_where_it_reads_it():
    of_engine, of_start = Dppo(), Dppo(Dppo.Params(anchor="old"))
    assert of_engine.corrects_sampling and of_engine.needs == {"off_policy", "rollout_logprobs"}
    assert of_engine.host_options == {"trl": {"vllm_importance_sampling_correction": False}}
    assert not of_start.corrects_sampling and of_start.needs == {"several_updates"} and of_start.host_options == {}


# ---- kl_cov and clip_cov


def by_loop(tokens: Tokens) -> list[float]:
    """Covariance of every trained token, NaN of others."""
    kept = tokens.keep.tolist()
    lp, a = tokens.old_logprobs.double().tolist(), tokens.advantages.tolist()
    n = sum(kept)
    mean_lp, mean_a = (sum(x for x, k in zip(values, kept, strict=True) if k) / n for values in (lp, a))
    return [(x - mean_lp) * (y - mean_a) if k else math.nan for x, y, k in zip(lp, a, kept, strict=True)]


def batch(seed: int = 0, rows: int = 12) -> tuple[Any, Tokens]:
    generator = torch.Generator().manual_seed(seed)
    rollouts = make_rollouts([0.0] * rows, lengths=[3 + i % 5 for i in range(rows)])
    tokens = make_tokens(rollouts, seed, 2 * torch.randn(rows, generator=generator).double())
    return rollouts, tokens.replace(keep=tokens.position % 4 != 3)


@pytest.mark.parametrize("ratio", [1e-6, 0.1, 1.0])
def test_kl_cov_chooses_the_largest_over_the_whole_batch(ratio):
    rollouts, tokens = batch()
    c = by_loop(tokens)
    assert covariance(tokens)[tokens.keep].tolist() == pytest.approx([x for x in c if x == x])
    falling = sorted((i for i, x in enumerate(c) if x == x), key=lambda i: -c[i])
    wanted = {i for i in falling[: max(1, int(ratio * len(falling)))] if c[i] > 0}
    chosen = KlCov(KlCov.Params(ratio=ratio)).shape(rollouts, tokens).token_columns["kl_cov"]
    assert set(chosen.nonzero()[:, 0].tolist()) == wanted and set(chosen.tolist()) <= {0.0, 1.0}


def test_kl_cov_penalizes_movement_in_both_directions():
    column = torch.tensor([[1.0, 0.0, 1.0]])
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    logprobs = torch.tensor([[-0.7, -0.7, -1.4]], requires_grad=True)
    terms = make_terms(1, 3, mask=torch.ones(1, 3), old_logprobs=old, logprobs=logprobs, columns={"kl_cov": column})
    penalty = KlCov(KlCov.Params(coef=0.5)).regularize(terms)
    assert penalty.tolist()[0] == pytest.approx([0.15, 0.0, 0.2])
    assert torch.autograd.grad(penalty.sum(), logprobs)[0].tolist() == [[0.5, 0.0, -0.5]]


@KL_COV.kind("logprobs")
def check_kl_cov(case: Case) -> None:
    terms, method = of_case(case), KlCov(case.build(KlCov))
    column = torch.zeros_like(terms.old_logprobs)
    column[terms.mask > 0] = method.shape(*tokens_of(terms, terms.logprobs)).token_columns["kl_cov"]
    unclipped = -terms.advantages * torch.exp(terms.logprobs - terms.old_logprobs)
    per_token = unclipped + method.regularize(terms.replace(columns={"kl_cov": column}))
    assert mean_and_gradient(per_token, terms)[0] == pytest.approx(case.expected["loss"], **CLOSE)


def test_clip_cov_takes_random_tokens_between_the_bounds():
    rollouts, tokens = batch()
    c = by_loop(tokens)
    between = {i for i, x in enumerate(c) if 0.2 < x < 2.0}

    def chosen(ratio: float, seed: int = 0) -> set[int]:
        stack = start_stack(ClipCov(ClipCov.Params(ratio=ratio, low=0.2, high=2.0)), seed=seed)
        new = stack.methods[0].shape(rollouts, tokens).advantages
        changed = new != tokens.advantages
        assert not bool(new[changed].any())
        return set(changed.nonzero()[:, 0].tolist())

    assert chosen(1.0) == between and len(between) > 8
    few = chosen(4.5 / int(tokens.keep.sum()))
    assert len(few) == 4 and few < between and few == chosen(4.5 / int(tokens.keep.sum()))
    assert len({frozenset(chosen(1e-6, seed)) for seed in range(8)}) > 2


@CLIP_COV.kind("logprobs")
def check_clip_cov(case: Case) -> None:
    terms, method = of_case(case), start_stack(ClipCov(case.build(ClipCov))).methods[0]
    advantages = terms.advantages.clone()
    advantages[terms.mask > 0] = method.shape(*tokens_of(terms, terms.logprobs)).advantages.float()
    per_token = ppo_clip(terms.logprobs, terms.old_logprobs, advantages, 0.5, 0.5)
    loss, gradient = mean_and_gradient(per_token, terms)
    assert loss == pytest.approx(case.expected["loss"], **CLOSE)
    for got, wanted in zip(gradient, case.expected["gradient"], strict=True):
        assert got == pytest.approx(list(wanted), **CLOSE)


@pytest.mark.parametrize("method", [KlCov(), ClipCov()], ids=["kl_cov", "clip_cov"])
def test_through_the_driver_and_with_no_trained_token(method):
    rollouts, tokens = batch()
    stack = start_stack(method)
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(3)).double()
    rollouts = rollouts.replace(reward=rewards, rewards=rewards[:, None])
    assert bool(one_step(stack, rollouts, tokens).trained.all())
    assert any(name.startswith(method.name) for name in combine([stack.metrics.take()]))
    none = tokens.replace(keep=torch.zeros_like(tokens.keep))
    shaped = method.shape(rollouts, none)
    assert shaped.advantages is None or torch.equal(shaped.advantages, none.advantages)


def test_bounds_out_of_order_are_refused():
    with raises(ConfigError, match="`low` is 5 and `high` 1"):
        build_stack(["clip_cov"], {"clip_cov": {"low": 5.0, "high": 1.0}})


@pytest.mark.parametrize("case", DPPO.cases, ids=str)
def test_golden_dppo(case: Case) -> None:
    DPPO.check(case)


@pytest.mark.parametrize("case", KL_COV.cases, ids=str)
def test_golden_kl_cov(case: Case) -> None:
    KL_COV.check(case)


@pytest.mark.parametrize("case", CLIP_COV.cases, ids=str)
def test_golden_clip_cov(case: Case) -> None:
    CLIP_COV.check(case)


def test_further_golden_cases() -> None:
    DPPO.check_further_cases()
    KL_COV.check_further_cases()
    CLIP_COV.check_further_cases()
