"""MinPRO (arXiv 2601.22718): the weight, its gradient, masks, metrics and micro-batches."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.losses import aggregate, weighted_logprob
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Terms
from rl_plugins.methods.minpro import Minpro, log_prefix_min
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_terms, start_stack

GOLDEN = Golden("minpro")


def terms_of(lp: Any, behavior: Any, mask: Any, advantages: Any, dtype: torch.dtype = torch.float64) -> Terms:
    """`advantages` per row or per token."""
    lp, behavior = (torch.as_tensor(x, dtype=dtype).detach().clone() for x in (lp, behavior))
    mask, adv = torch.as_tensor(mask).long(), torch.as_tensor(advantages, dtype=dtype)
    return Terms(
        mask=mask,
        logprobs=lp.requires_grad_(),
        entropies=torch.zeros_like(lp),
        advantages=adv[:, None].expand(lp.shape) if adv.ndim == 1 else adv,
        old_logprobs=torch.full_like(lp, -9.0),  # must not matter
        num_tokens=mask.sum().double(),
        num_rows=(mask.sum(1) > 0).sum().double(),
        max_length=lp.shape[1],
        rollout_logprobs=behavior,
    )


def minpro(**params: Any) -> Minpro:
    return Minpro(build_params(Minpro.Params, params, "minpro"))


def loss_and_grad(method: Method, terms: Terms, how: str = "token-mean") -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to the log-probs."""
    per_token = method.policy_loss(terms)
    loss = aggregate(
        per_token,
        terms.mask,
        how,
        num_tokens=terms.num_tokens,
        num_rows=terms.num_rows,
        max_length=terms.max_length,
    )
    (grad,) = torch.autograd.grad(loss, terms.logprobs)
    return loss.detach(), grad


def weights(terms: Terms, **params: Any) -> Tensor:
    """(rows, time) the weight, read off the gradient at advantages of 1."""
    ones = terms.replace(advantages=torch.ones_like(terms.advantages), num_tokens=torch.ones(()))
    return -loss_and_grad(minpro(**params), ones)[1]


def random_terms(seed: int = 0, rows: int = 6, time: int = 9, drift: float = 0.8) -> Terms:
    """Ragged rows, holes, a late start, and one row without a token."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, time, generator=g) < 0.75).long()
    mask[0] = 1
    if rows > 1:
        mask[1, :3], mask[-1] = 0, 0
    behavior = -torch.rand(rows, time, generator=g, dtype=torch.float64) * 3
    lp = behavior + drift * torch.randn(rows, time, generator=g, dtype=torch.float64)
    return terms_of(lp, behavior, mask, torch.randn(rows, generator=g, dtype=torch.float64))


# ---- golden numbers and the oracle


@GOLDEN.kind("log_prob")
def check_weights_and_loss(case: Case) -> None:
    given_, expected = case.inputs, case.expected
    results = ("log_min_prefix", "weight_unclipped", "weight_clipped", "loss", "grad_log_prob")
    wanted = {name: torch.tensor(expected[name], dtype=torch.float64) for name in results}
    terms = terms_of(
        torch.tensor(given_["log_prob"], dtype=torch.float64),
        torch.tensor(given_["old_log_prob"], dtype=torch.float64),
        given_["response_mask"],
        given_["advantages"],
    )
    params = case.build(Minpro, {"eps_low": "clip_low", "eps_high": "clip_high"})
    p = asdict(params)
    mask = terms.mask.double()
    prefix = log_prefix_min(terms.logprobs.detach() - terms.rollout_logprobs, terms.mask > 0)
    torch.testing.assert_close(prefix * mask, wanted["log_min_prefix"], rtol=0, atol=6e-9)
    unclipped = weights(terms, **p | {"clip_low": 1.0, "clip_high": "inf"})
    torch.testing.assert_close(unclipped, wanted["weight_unclipped"], rtol=0, atol=6e-9)
    torch.testing.assert_close(weights(terms, **p), wanted["weight_clipped"], rtol=0, atol=6e-9)
    loss, grad = loss_and_grad(Minpro(params), terms, case.params["agg"])
    torch.testing.assert_close(loss, wanted["loss"], rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(grad, wanted["grad_log_prob"], rtol=0, atol=6e-9)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def oracle(terms: Terms, low: float, high: float, limit: float) -> tuple[list[list[float]], float]:
    """Weights and token-mean loss, token by token."""
    assert terms.rollout_logprobs is not None
    lp, behavior = terms.logprobs.tolist(), terms.rollout_logprobs.tolist()
    mask, advantages = terms.mask.tolist(), terms.advantages.tolist()
    weight, total, n = [], 0.0, 0
    for b in range(len(lp)):
        smallest, row = None, []
        for t in range(len(lp[b])):
            if not mask[b][t]:
                row.append(0.0)
                continue
            ratio = math.exp(min(max(lp[b][t] - behavior[b][t], -limit), limit))
            product = ratio * (1.0 if smallest is None else smallest)
            row.append(min(max(product, 1 - low), 1 + high))
            total, n = total - row[-1] * advantages[b][t] * lp[b][t], n + 1
            smallest = ratio if smallest is None else min(smallest, ratio)
        weight.append(row)
    return weight, total / max(n, 1)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    rows, time = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    number = st.floats(-6, 6, allow_nan=False)

    def table(element: Any) -> list[list[Any]]:
        return data.draw(st.lists(st.lists(element, min_size=time, max_size=time), min_size=rows, max_size=rows))

    terms = terms_of(table(number), table(number), table(st.integers(0, 1)), table(number))
    low, high, limit = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 9)), data.draw(st.floats(0.5, 20))
    weight, loss = oracle(terms, low, high, limit)
    got, grad = loss_and_grad(minpro(clip_low=low, clip_high=high, log_ratio_limit=limit), terms)
    assert float(got) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    wanted = -torch.tensor(weight, dtype=torch.float64) * terms.advantages / max(float(terms.num_tokens), 1)
    torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-15)


# ---- properties of the specification


def test_on_policy_is_reinforce_and_cispo() -> None:
    terms = random_terms(drift=0.0)
    valid = terms.mask > 0
    assert torch.equal(weights(terms), valid.double())
    loss, grad = loss_and_grad(minpro(), terms)
    n = float(terms.num_tokens)
    plain = -(terms.advantages * terms.logprobs.detach())[valid].sum() / n
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(grad, torch.where(valid, -terms.advantages / n, 0.0))


def cispo_weight(terms: Terms, high: float = 4.0) -> Tensor:
    return torch.exp(terms.logprobs.detach() - terms.rollout_logprobs).clamp(0, 1 + high)


def test_first_token_and_rows_of_one_token_are_cispo() -> None:
    terms = random_terms(1)
    first = (terms.mask > 0) & (torch.cumsum(terms.mask, 1) == 1)
    torch.testing.assert_close(weights(terms)[first], cispo_weight(terms)[first])
    single = terms.replace(mask=first.long())
    torch.testing.assert_close(weights(single)[first], cispo_weight(terms)[first])
    assert not torch.allclose(weights(terms)[terms.mask > 0], cispo_weight(terms)[terms.mask > 0])


def test_equals_cispo_with_behavior_lowered_by_the_prefix() -> None:
    terms = random_terms(2)
    assert terms.rollout_logprobs is not None
    prefix = log_prefix_min(terms.logprobs.detach() - terms.rollout_logprobs, terms.mask > 0)
    weight = torch.exp(terms.logprobs - (terms.rollout_logprobs - prefix)).clamp(max=5.0)
    cispo = weighted_logprob(terms.logprobs, weight, terms.advantages)
    got = minpro().policy_loss(terms)
    torch.testing.assert_close(got[terms.mask > 0], cispo[terms.mask > 0])


def test_prefix_minimum_never_rises_and_is_not_capped() -> None:
    terms = random_terms(3)
    for row, mask in zip(
        log_prefix_min(terms.logprobs.detach() - terms.rollout_logprobs, terms.mask > 0), terms.mask, strict=True
    ):
        along = row[mask > 0][1:]
        assert bool((along[1:] <= along[:-1]).all())
    up = terms_of([[-1.0, -1.0, -1.0]], [[-1.5, -1.25, -1.0]], [[1, 1, 1]], [1.0])
    assert weights(up)[0].tolist() == pytest.approx([math.exp(0.5), math.exp(0.5 + 0.25), math.exp(0.25)])


def test_causality_and_monotonicity() -> None:
    terms = random_terms(4, rows=1, time=8)
    base = weights(terms, clip_high="inf")
    for t in range(8):
        lower = terms.logprobs.detach().clone()
        lower[0, t] -= 0.7
        new = weights(terms.replace(logprobs=lower.requires_grad_()), clip_high="inf")
        assert torch.equal(new[0, :t], base[0, :t])
        assert float(new[0, t]) == pytest.approx(float(base[0, t]) * math.exp(-0.7))
        assert bool((new[0, t + 1 :] <= base[0, t + 1 :]).all())


def test_a_damped_token_damps_all_later_ones() -> None:
    terms = terms_of([[-1.0, -4.0, -1.0, -1.0]], [[-1.0] * 4], [[1, 1, 1, 1]], [1.0])
    assert weights(terms)[0].tolist() == pytest.approx([1.0, math.exp(-3), math.exp(-3), math.exp(-3)])
    # with PPO's lower bound the damping would be lost
    assert weights(terms, clip_low=0.2)[0].tolist() == pytest.approx([1.0, 0.8, 0.8, 0.8])


def test_tool_output_is_skipped_not_reset() -> None:
    terms = terms_of([[-3.0, 0.0, -8.0, -1.0]], [[-1.0] * 4], [[1, 0, 0, 1]], [1.0])
    assert weights(terms)[0].tolist() == pytest.approx([math.exp(-2), 0.0, 0.0, math.exp(-2)])


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, -1e30])
def test_masked_tokens_change_nothing(poison: float) -> None:
    terms = random_terms(5)
    loss, grad = loss_and_grad(minpro(), terms)
    outside = terms.mask == 0
    bad = {
        name: getattr(terms, name).detach().masked_fill(outside, poison)
        for name in ("logprobs", "rollout_logprobs", "advantages")
    }
    for names in (["logprobs"], ["rollout_logprobs"], ["advantages"], list(bad)):
        spoiled = terms.replace(**{n: bad[n] for n in names})
        spoiled = spoiled.replace(logprobs=spoiled.logprobs.detach().requires_grad_())
        per_token = minpro().policy_loss(spoiled)
        assert torch.equal(per_token[outside], torch.zeros_like(per_token[outside]))
        new_loss, new_grad = loss_and_grad(minpro(), spoiled)
        assert torch.equal(new_loss, loss)
        assert torch.equal(new_grad, grad)
    assert torch.equal(grad[outside], torch.zeros_like(grad[outside]))


def test_masked_tokens_do_not_leak_into_parameters() -> None:
    """-inf log-probs of masked tokens come from a graph: their zero gradient must not become NaN on the way back."""
    logits = torch.tensor([[[0.0, -math.inf], [0.5, 0.2]]], requires_grad=True)
    lp = torch.log_softmax(logits, -1)[..., 1]
    terms = terms_of([[0.0, 0.0]], [[-1.0, -1.0]], [[0, 1]], [1.0], torch.float32).replace(logprobs=lp)
    (grad,) = torch.autograd.grad(minpro().policy_loss(terms).sum(), logits)
    assert bool(torch.isfinite(grad[0, 1]).all())
    assert torch.equal(grad[0, 0], torch.zeros(2))


def test_a_batch_without_tokens_is_zero() -> None:
    terms = random_terms(6)
    empty = terms.replace(mask=torch.zeros_like(terms.mask), num_tokens=torch.zeros(()))
    stack = start_stack(minpro())
    loss, grad = loss_and_grad(stack.methods[0], empty)
    assert float(loss) == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))
    assert combine([stack.metrics.take()]) == {}


def test_zero_advantages_have_no_gradient_and_order_matters() -> None:
    terms = random_terms(7)
    assert not bool(loss_and_grad(minpro(), terms.replace(advantages=torch.zeros_like(terms.advantages)))[1].any())
    lp, behavior = terms.logprobs.detach()[:1], terms.rollout_logprobs[:1]
    there = weights(terms_of(lp, behavior, torch.ones(1, 9), [1.0]))
    back = weights(terms_of(lp.flip(1), behavior.flip(1), torch.ones(1, 9), [1.0])).flip(1)
    assert not torch.allclose(there, back)


def test_extreme_drift_stays_finite() -> None:
    lp = torch.tensor([[-1e4, -1e4, -0.1, -0.1]])
    for dtype in (torch.float32, torch.float64):
        for sign in (1, -1):
            a, b = (lp, -torch.ones(1, 4)) if sign > 0 else (-torch.ones(1, 4), lp)
            for params in ({}, {"clip_high": "inf", "log_ratio_limit": 40}):
                weight = weights(terms_of(a, b, torch.ones(1, 4), [1.0], dtype), **params)
                assert bool(torch.isfinite(weight).all())
                assert weight.max() > 0


def test_low_precision_is_raised_inside() -> None:
    """bfloat16 holds 8 bits: the ratio of two rounded log-probs must still be that of float32."""
    terms = random_terms(8)
    low = terms_of(terms.logprobs, terms.rollout_logprobs, terms.mask, terms.advantages, torch.bfloat16)
    exact = terms_of(low.logprobs.float(), low.rollout_logprobs.float(), low.mask, low.advantages, torch.float32)
    low = low.replace(rollout_logprobs=low.rollout_logprobs.float(), advantages=low.advantages.float())
    loss = minpro().policy_loss(low)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, minpro().policy_loss(exact), rtol=1e-6, atol=1e-6)
    assert loss_and_grad(minpro(), low)[1].dtype == torch.bfloat16


# ---- micro-batches, metrics, configuration


def test_micro_batches_give_the_loss_gradient_and_metrics_of_the_whole() -> None:
    terms = random_terms(9)
    # tokens outside of the mask would be the smallest and the largest weights
    far = torch.where(torch.arange(9) % 2 > 0, -18.0, 18.0).expand(6, 9).double()
    terms = terms.replace(logprobs=torch.where(terms.mask > 0, terms.logprobs.detach(), far).requires_grad_())

    def parts(cuts: list[slice]) -> tuple[Tensor, Tensor, dict[str, float]]:
        stack = start_stack(minpro(clip_high=0.3))
        loss, grads = torch.zeros((), dtype=torch.float64), []
        for cut in cuts:
            names = ("mask", "advantages", "old_logprobs", "rollout_logprobs", "entropies")
            part = terms.replace(
                logprobs=terms.logprobs.detach()[cut].requires_grad_(), **{n: getattr(terms, n)[cut] for n in names}
            )
            per_token = stack.one("policy_loss", part)
            share = aggregate(
                per_token,
                part.mask,
                "token-mean",
                num_tokens=terms.num_tokens,
                num_rows=terms.num_rows,
                max_length=1,
            )
            grads.append(torch.autograd.grad(share, part.logprobs)[0])
            loss = loss + share.detach()
        return loss, torch.cat(grads), combine([stack.metrics.take()])

    loss, grad, metrics = parts([slice(0, 6)])
    for cuts in ([slice(0, 1), slice(1, 4), slice(4, 6)], [slice(i, i + 1) for i in range(6)]):
        new_loss, new_grad, new_metrics = parts(cuts)
        torch.testing.assert_close(new_loss, loss)
        assert torch.equal(new_grad, grad)
        assert new_metrics == pytest.approx(metrics)

    valid = terms.mask > 0
    weight = torch.tensor(oracle(terms, 1.0, 0.3, 20.0)[0], dtype=torch.float64)[valid]
    free = torch.tensor(oracle(terms, 1.0, 1e9, 20.0)[0], dtype=torch.float64)[valid]
    prefix = torch.exp(log_prefix_min(terms.logprobs.detach() - terms.rollout_logprobs, valid))[valid]
    assert metrics == pytest.approx(
        {
            "minpro/weight_mean": float(weight.mean()),
            "minpro/weight_min": float(weight.min()),
            "minpro/clipped": float((free > 1.3).double().mean()),
            "minpro/prefix_min": float(prefix.mean()),
        }
    )
    assert 0 < metrics["minpro/clipped"] < 1


def test_padding_width_changes_nothing() -> None:
    terms = make_terms(rows=5, time=6)
    _, grad = loss_and_grad(minpro(), terms)

    def wider(x: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(x.detach(), (0, 3), value=value)

    names = ("entropies", "advantages", "old_logprobs", "rollout_logprobs")
    wide = terms.replace(
        mask=wider(terms.mask, 0),
        logprobs=wider(terms.logprobs, -7.0).requires_grad_(),
        **{n: wider(getattr(terms, n), 3.0) for n in names},
    )
    assert torch.equal(loss_and_grad(minpro(), wide)[1][:, :6], grad)


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip_low", -0.1), ("clip_low", 1.1), ("clip_high", -0.1), ("log_ratio_limit", 0), ("log_ratio_limit", 41)],
)
def test_parameters_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"Method `minpro`: parameter `{name}`"):
        build_stack("minpro", {"minpro": {name: value}})


def test_neither_a_run_without_staleness_nor_a_second_correction_is_accepted() -> None:
    def host(correction: bool, missing: dict[str, str]) -> HostCapabilities:
        option = {"vllm_importance_sampling_correction": correction}
        defaults = {"vllm_importance_sampling_correction": True}
        return HostCapabilities("trl", "0", {"policy_loss"}, {}, (), missing, None, option, defaults)

    assert preflight(build_stack("minpro"), host(True, {})) == {"vllm_importance_sampling_correction": False}
    assert preflight(build_stack("minpro"), host(False, {})) == {}
    with pytest.raises(ConfigError, match="tokens that another policy sampled than the one that is updated: raise"):
        preflight(build_stack("minpro"), host(True, {"off_policy": "raise num_iterations."}))
    with pytest.raises(ConfigError, match="needs log-probs of the distribution the engine sampled from: no top-p"):
        preflight(build_stack("minpro"), host(True, {"rollout_logprobs": "no top-p."}))
