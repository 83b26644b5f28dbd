"""Decoupled PPO (arXiv 2505.24298): weight, bounds, proximal policies, gradient; and the replay loss of 2506.05316."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.losses import aggregate, ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Terms
from rl_plugins.methods.decoupled_ppo import DecoupledPpo, approximated
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import start_stack

AREAL = Golden("areal", "proximal_logprobs", "versions")
DOTS_RR = Golden("dots_rr", "behavior_log_prob")
NAMES = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")


def terms_of(
    lp: Any,
    proximal: Any,
    behavior: Any,
    mask: Any,
    advantages: Any,
    dtype: torch.dtype = torch.float64,
    versions: Any = None,
    current_version: int = 0,
) -> Terms:
    """`advantages` per row or per token."""
    lp, proximal, behavior = (torch.as_tensor(x, dtype=dtype).detach().clone() for x in (lp, proximal, behavior))
    mask, adv = torch.as_tensor(mask).long(), torch.as_tensor(advantages, dtype=dtype)
    return Terms(
        mask=mask,
        logprobs=lp.requires_grad_(),
        advantages=adv[:, None].expand(lp.shape) if adv.ndim == 1 else adv,
        old_logprobs=proximal,
        num_tokens=mask.sum().double(),
        num_rows=(mask.sum(1) > 0).sum().double(),
        max_length=lp.shape[1],
        rollout_logprobs=behavior,
        versions=torch.zeros_like(mask) if versions is None else torch.as_tensor(versions),
        current_version=current_version,
    )


def method(**params: Any) -> DecoupledPpo:
    return DecoupledPpo(build_params(DecoupledPpo.Params, params, "decoupled_ppo"))


def token_mean(per_token: Tensor, terms: Terms) -> Tensor:
    return aggregate(
        per_token,
        terms.mask,
        "token-mean",
        num_tokens=terms.num_tokens,
        num_rows=terms.num_rows,
        max_length=terms.max_length,
    )


def loss_grad_metrics(terms: Terms, **params: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Token-mean loss, its gradient with respect to the log-probs, and what was logged."""
    stack = start_stack(method(**params))
    loss = token_mean(stack.one("policy_loss", terms), terms)
    (grad,) = torch.autograd.grad(loss, terms.logprobs)
    logged = combine([stack.metrics.take()])
    return loss.detach(), grad, {k.removeprefix("decoupled_ppo/"): v for k, v in logged.items()}


def weights(terms: Terms, **params: Any) -> Tensor:
    """(rows, time) omega after the action: the gradient at u = 1 and advantages of -1."""
    proximal = terms.old_logprobs.clone()
    at = terms.replace(
        logprobs=proximal.requires_grad_(),
        old_logprobs=proximal.detach(),
        advantages=-torch.ones_like(terms.advantages),
        num_tokens=torch.ones(()),
    )
    return loss_grad_metrics(at, **params)[1]


def random_terms(seed: int = 0, rows: int = 6, time: int = 9, drift: float = 0.8, live: float = 0.3) -> Terms:
    """Ragged rows, holes, a late start, and one row without a token."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, time, generator=g, dtype=torch.float64)

    mask = (torch.rand(rows, time, generator=g) < 0.75).long()
    mask[0] = 1
    if rows > 1:
        mask[1, :3], mask[-1] = 0, 0
    behavior = -torch.rand(rows, time, generator=g, dtype=torch.float64) * 3
    proximal = behavior + drift * normal()
    versions = torch.randint(-1, 6, (rows, time), generator=g)
    return terms_of(
        proximal + live * normal(), proximal, behavior, mask, normal()[:, 0], versions=versions, current_version=5
    )


# ---- golden numbers


@AREAL.kind("proximal_logprobs")
def check_areal_loss(case: Case) -> None:
    given_, expected, p = case.inputs, case.expected, case.params
    p.must_be("importance_sampling_level", "token")
    rejection = plain(p["rejection_sampling"])
    params = {"clip_low": p["eps_clip"], "clip_high": p["eps_clip_higher"], "dual_clip": p["c_clip"], **rejection}
    params["clip_high"] = params["clip_low"] if params["clip_high"] is None else params["clip_high"]
    terms = terms_of(
        given_["logprobs"],
        given_["proximal_logprobs"],
        given_["old_logprobs"],
        given_["loss_mask"],
        given_["advantages"],
    )
    loss, grad, logged = loss_grad_metrics(terms, **params)
    assert float(loss) == pytest.approx(expected["loss"], abs=2e-7)
    torch.testing.assert_close(grad, torch.tensor(expected["grad_logprobs"]).double(), rtol=0, atol=2e-7)
    omega = torch.tensor(expected["behave_imp_weight"]).double()
    torch.testing.assert_close(weights(terms, **params), omega, rtol=0, atol=5e-7)
    assert logged["weight_mean"] == pytest.approx(float(omega.sum() / terms.num_tokens), abs=1e-6)
    assert logged["weight_max"] == pytest.approx(float(omega.max()), abs=1e-6)
    assert logged["filtered"] == pytest.approx(expected["filtered_fraction"], abs=1e-12)


@AREAL.kind("versions")
def check_approximated(case: Case) -> None:
    """Theirs is the version of the weights in training; ours the newest published one, which is one less."""
    given_, version = case.inputs, case.params["current_version"]
    args = [torch.tensor(given_[n], dtype=torch.float64) for n in ("logprobs", "old_logprobs")]
    for how in ("loglinear", "linear", "rollout"):
        got = approximated(how, *args, torch.tensor(given_["versions"]), version - 1)
        torch.testing.assert_close(got, torch.tensor(case.expected[how]).double(), rtol=0, atol=2e-7)


@DOTS_RR.kind("behavior_log_prob")
def check_replay_loss(case: Case) -> None:
    given_, expected = case.inputs, case.expected
    case.params.must_be("agg", "token-mean over mask")
    clip = case.params["cliprange"]
    lengths = given_["response_lengths"]
    time = len(given_["log_prob"][0])
    mask = [[int(t < n) for t in range(time)] for n in lengths]
    lp, behavior, adv = given_["log_prob"], given_["behavior_log_prob"], given_["advantages"]
    params = dict(action="none", clip_low=clip, clip_high=clip)
    loss, grad, logged = loss_grad_metrics(terms_of(lp, given_["proximal_log_prob"], behavior, mask, adv), **params)
    assert float(loss) == pytest.approx(expected["loss"], abs=2e-7)
    assert logged["clipfrac"] == pytest.approx(expected["clipfrac"], abs=1e-6)
    torch.testing.assert_close(grad, torch.tensor(expected["grad_log_prob"]).double(), rtol=0, atol=2e-8)
    # PPO around the policy that sampled, which is `rollout` here
    vanilla = terms_of(lp, given_["proximal_log_prob"], behavior, mask, adv)
    loss, _, logged = loss_grad_metrics(vanilla, proximal="rollout", clip_low=clip, clip_high=clip)
    assert float(loss) == pytest.approx(expected["vanilla_ppo_loss_same_inputs"], abs=2e-7)
    assert logged["weight_mean"] == 1


@pytest.mark.parametrize("case", AREAL.cases, ids=str)
def test_golden_areal(case: Case) -> None:
    AREAL.check(case)


@pytest.mark.parametrize("case", DOTS_RR.cases, ids=str)
def test_golden_dots_rr(case: Case) -> None:
    DOTS_RR.check(case)


def test_further_golden_cases() -> None:
    assert (len(AREAL.cases), len(DOTS_RR.cases)) == (5, 4)
    AREAL.check_further_cases()
    DOTS_RR.check_further_cases()


# ---- the oracle: token by token, and a float64 autograd of the formula


def oracle(terms: Terms, **params: Any) -> tuple[float, list[list[float]]]:
    """Token-mean loss and its gradient by the formula, with plain numbers."""
    p: Any = build_params(DecoupledPpo.Params, params, "decoupled_ppo")
    assert terms.rollout_logprobs is not None and terms.versions is not None
    lp, old, beh = (x.tolist() for x in (terms.logprobs, terms.old_logprobs, terms.rollout_logprobs))
    mask, adv, version = terms.mask.tolist(), terms.advantages.tolist(), terms.versions.tolist()
    n = max(1, sum(map(sum, mask)))

    def proximal(b: int, t: int) -> float:
        if p.proximal == "recompute":
            return old[b][t]
        if p.proximal == "rollout":
            return beh[b][t]
        made, now = version[b][t], terms.current_version + 1
        alpha = min(max((now - 1 - made) / (now - made), 0.0), 1.0) if 0 <= made < now else 0.0
        if p.proximal == "loglinear":
            return beh[b][t] + alpha * (lp[b][t] - beh[b][t])
        return math.log((1 - alpha) * math.exp(beh[b][t]) + alpha * math.exp(lp[b][t]) + 1e-10)

    def metric(log_ratio: float) -> float:
        r = math.exp(log_ratio)
        return {
            "ratio": r,
            "k1": log_ratio,
            "k2": log_ratio**2 / 2,
            "k3": r - log_ratio - 1,
            "k3_code": 1 / r + log_ratio - 1,
        }[p.metric]

    def combined(values: list[float]) -> float:
        return {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values)}[p.aggregation]

    total, grad = 0.0, []
    for b in range(len(lp)):
        logs = {t: proximal(b, t) - beh[b][t] for t in range(len(lp[b])) if mask[b][t]}
        row = [0.0] * len(lp[b])
        for t in logs:
            omega, m = math.exp(logs[t]), metric(logs[t])
            if p.level == "sequence" and p.metric == "ratio":
                omega, m = math.exp(sum(logs.values()) / len(logs)), math.exp(combined(list(logs.values())))
            elif p.level == "sequence":
                m = combined([metric(x) for x in logs.values()])
            outside = m > p.upper or (p.lower is not None and m < p.lower)
            if p.action == "mask" and outside:
                omega = 0.0
            elif p.action == "clamp" and outside:
                omega = min(max(omega, p.lower or 0.0), p.upper)
            a, u = adv[b][t], math.exp(lp[b][t] - proximal(b, t))
            plain_, clipped = -a * u, -a * min(max(u, 1 - p.clip_low), 1 + p.clip_high)
            value, slope = (plain_, plain_) if plain_ >= clipped else (clipped, 0.0)
            if p.dual_clip is not None and a < 0 and value > -p.dual_clip * a:
                value, slope = -p.dual_clip * a, 0.0
            total += omega * value / n
            row[t] = omega * slope / n
        grad.append(row)
    return total, grad


CHOICES = st.fixed_dictionaries(
    {
        "level": st.sampled_from(["token", "sequence"]),
        "action": st.sampled_from(["none", "mask", "clamp"]),
        "metric": st.sampled_from(["ratio", "k1", "k2", "k3", "k3_code"]),
        "aggregation": st.sampled_from(["mean", "sum", "max"]),
        "proximal": st.sampled_from(["recompute", "loglinear", "linear", "rollout"]),
        "upper": st.floats(1.1, 4),
        "lower": st.none() | st.floats(0.05, 0.9),
        "clip_low": st.floats(0.01, 0.9),
        "clip_high": st.floats(0.01, 2),
        "dual_clip": st.none() | st.floats(1.1, 3),
    }
)


def allowed(choice: dict[str, Any]) -> dict[str, Any]:
    """Without what has no effect beside the others."""
    c = dict(choice)
    if c["proximal"] == "rollout":
        for name in ("level", "action", "metric", "aggregation", "upper", "lower"):
            del c[name]
        return c
    if c["action"] != "mask":
        del c["metric"]
    if c["action"] == "none" or c["level"] == "token":
        del c["aggregation"]
    if c["action"] == "none":
        del c["upper"], c["lower"]
    return c


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    rows, time = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    number = st.floats(-4, 4, allow_nan=False).map(lambda x: round(x, 3))

    def table(element: Any) -> list[list[Any]]:
        return data.draw(st.lists(st.lists(element, min_size=time, max_size=time), min_size=rows, max_size=rows))

    terms = terms_of(
        table(number),
        table(number),
        table(number),
        table(st.integers(0, 1)),
        table(number),
        versions=table(st.integers(-1, 7)),
        current_version=data.draw(st.integers(0, 6)),
    )
    params = allowed(data.draw(CHOICES))
    loss, grad = oracle(terms, **params)
    got, got_grad, _ = loss_grad_metrics(terms, **params)
    assert float(got) == pytest.approx(loss, rel=1e-9, abs=1e-11)
    torch.testing.assert_close(got_grad, torch.tensor(grad, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("params", [{}, {"level": "sequence", "action": "clamp"}, {"action": "none"}], ids=str)
def test_gradient_is_that_of_float64_differences(params: dict[str, Any]) -> None:
    """Of the value itself, where it is smooth: no clip acts."""
    terms = random_terms(3, live=0.05)
    assert torch.autograd.gradcheck(
        lambda lp: token_mean(method(clip_low=1, clip_high=9, **params).policy_loss(terms.replace(logprobs=lp)), terms),
        terms.logprobs,
    )


# ---- equal to verl's own decoupled mode


@pytest.mark.parametrize("seed", range(3))
def test_equals_verl_with_icepop(seed: int) -> None:
    """verl's weights with a bound of 5 on its vanilla loss, the dual clip far away: value and gradient. verl wants a
    lower bound above 0; no weight is as small as this one."""
    algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig

    terms = random_terms(seed, rows=8, drift=1.3)
    mask = terms.mask.double()
    log_ratio = terms.old_logprobs - terms.rollout_logprobs
    theirs, metrics = compute_rollout_correction_weights(log_ratio, mask, "token", "1e-30_5.0")
    actor = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e9, use_dynamic_bsz=True
    )
    actor.global_batch_info.update(
        dp_size=1, batch_num_tokens=float(mask.sum()), global_batch_size=7, loss_scale_factor=None
    )
    loss, logged = algos.compute_policy_loss_vanilla(
        terms.old_logprobs,
        terms.logprobs,
        terms.advantages,
        mask,
        "token-mean",
        actor,
        rollout_is_weights=theirs,
    )
    (grad,) = torch.autograd.grad(loss, terms.logprobs)
    ours, our_grad, ours_logged = loss_grad_metrics(terms)
    assert 0 < ours_logged["filtered"] == pytest.approx(metrics["rollout_is_oob_ratio"], abs=1e-6)
    assert float(ours) == pytest.approx(float(loss), rel=1e-7)
    torch.testing.assert_close(our_grad, grad, rtol=1e-7, atol=1e-12)
    assert 0 < logged["actor/pg_clipfrac"] < 1


# ---- properties of the specification


def test_without_a_difference_to_the_behaviour_policy_it_is_ppo() -> None:
    terms = random_terms(1)
    same = terms.replace(rollout_logprobs=terms.old_logprobs)
    for params in ({}, {"action": "clamp"}, {"action": "none"}, {"level": "sequence"}, {"dual_clip": 2.0}):
        dual = params.get("dual_clip")
        per_token = ppo_clip(same.logprobs, same.old_logprobs, same.advantages, 0.2, 0.2, dual)
        loss = token_mean(torch.where(same.mask > 0, per_token, 0.0), same)
        (grad,) = torch.autograd.grad(loss, same.logprobs)
        got, got_grad, logged = loss_grad_metrics(same, **params)
        assert float(got) == pytest.approx(float(loss.detach()), rel=1e-14)
        torch.testing.assert_close(got_grad, grad, rtol=1e-14, atol=1e-16)
        assert logged["weight_mean"] == logged["weight_max"] == 1 and logged["filtered"] == 0


def test_where_the_live_policy_is_the_proximal_one_the_clip_is_idle() -> None:
    terms = random_terms(2, live=0.0)
    valid = terms.mask > 0
    omega = torch.exp(terms.old_logprobs - terms.rollout_logprobs)
    _, grad, logged = loss_grad_metrics(terms, action="none", clip_low=0.001, clip_high=0.001)
    wanted = torch.where(valid, -omega * terms.advantages / terms.num_tokens, 0.0)
    torch.testing.assert_close(grad, wanted)
    assert logged["clipfrac"] == 0


def test_a_bound_at_infinity_is_no_bound() -> None:
    terms = random_terms(4, drift=2.0)
    exact = loss_grad_metrics(terms, action="none")
    assert exact[2]["weight_max"] > 20
    for action in ("mask", "clamp"):
        for level in ("token", "sequence"):
            params = dict(action=action, level=level, upper="inf")
            unbounded = loss_grad_metrics(terms, action="none", level=level)
            assert torch.equal(loss_grad_metrics(terms, **params)[1], unbounded[1])


def test_the_bounded_ratio_scaled_by_the_weight_is_the_replay_loss() -> None:
    """DOTS writes max(-A r, -A clip(r, w (1 - eps), w (1 + eps)))."""
    terms = random_terms(5, drift=1.5)
    w, r = (torch.exp(x - terms.rollout_logprobs) for x in (terms.old_logprobs, terms.logprobs))
    a = terms.advantages
    per_token = torch.maximum(-a * r, -a * torch.minimum(torch.maximum(r, w * 0.8), w * 1.2))
    loss = token_mean(per_token, terms)
    (grad,) = torch.autograd.grad(loss, terms.logprobs)
    got, got_grad, _ = loss_grad_metrics(terms, action="none")
    assert float(got) == pytest.approx(float(loss.detach()), rel=1e-13)
    torch.testing.assert_close(got_grad, grad, rtol=1e-12, atol=1e-15)


def test_rejected_tokens_stay_in_the_denominator() -> None:
    """One of two tokens is rejected: the other one still counts half."""
    terms = terms_of([[-1.0, -1.0]], [[-1.0, -1.0]], [[-1.0, -4.0]], [[1, 1]], [1.0])
    loss, grad, logged = loss_grad_metrics(terms)
    assert float(loss) == -0.5 and grad.tolist() == [[-0.5, 0.0]]
    assert logged["filtered"] == 0.5 and logged["weight_mean"] == 0.5
    _, grad, logged = loss_grad_metrics(terms, action="clamp")
    assert grad.tolist() == [[-0.5, -2.5]] and logged["filtered"] == 0.5 and logged["weight_max"] == 5


def test_level_of_a_row_rejects_all_of_it() -> None:
    lp, behavior = [[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -5.0], [-1.0, -1.5]]
    terms = terms_of(lp, lp, behavior, [[1, 1], [1, 1]], [1.0, 1.0])
    mean = loss_grad_metrics(terms, level="sequence")[1]  # geometric means e^2 and e^0.25
    assert mean.tolist() == [[0.0, 0.0], [pytest.approx(-math.exp(0.25) / 4)] * 2]
    largest = loss_grad_metrics(terms, level="sequence", aggregation="max", upper=60)[1]  # e^4 and e^0.5
    assert largest[0].tolist() == [pytest.approx(-math.exp(2) / 4)] * 2
    assert weights(terms, level="sequence", metric="k1", upper=1.0).tolist() == [
        [0.0, 0.0],
        [1.0, pytest.approx(math.exp(0.5))],  # another metric than the ratio leaves every token its own weight
    ]


def test_metrics_bound_what_they_say() -> None:
    """A ratio of e^2 and one of e^-2: k3 is large for the former, that of the authors' code for the latter."""
    terms = terms_of([[-1.0, -3.0]], [[-1.0, -3.0]], [[-3.0, -1.0]], [[1, 1]], [1.0])
    kept = {
        metric: [w > 0 for w in weights(terms, metric=metric, upper=upper)[0].tolist()]
        for metric, upper in (("ratio", 5.0), ("k1", 1.0), ("k2", 1.9), ("k3", 2.0), ("k3_code", 2.0))
    }
    assert kept == {
        "ratio": [False, True],
        "k1": [False, True],
        "k2": [False, False],
        "k3": [False, True],
        "k3_code": [True, False],
    }


def test_proximal_policies_by_version() -> None:
    """v_p is the newest published version; a token two versions older than the one in training is half way."""
    lp, behavior = torch.tensor([[-2.0, -2.0, -2.0, -2.0]]), torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    versions = torch.tensor([[5, 4, 2, -1]])
    got = approximated("loglinear", lp, behavior, versions, 5)
    assert got[0].tolist() == pytest.approx([-1.0, -1.5, -1.75, -1.0])
    assert approximated("loglinear", lp, behavior, versions + 3, 5)[0, :3].tolist() == pytest.approx([-1, -1, -1])
    linear = approximated("linear", lp, behavior, versions, 5)
    assert linear[0, 1] == pytest.approx(math.log((math.exp(-2) + math.exp(-1)) / 2), abs=1e-6)


def test_versions_count_token_by_token() -> None:
    """Which version made a token changes nothing for `recompute`, and only that token for `loglinear`."""
    terms = random_terms(6)
    assert terms.versions is not None
    moved = terms.replace(versions=terms.versions.flip(1))
    assert torch.equal(loss_grad_metrics(terms)[1], loss_grad_metrics(moved)[1])
    one = terms.replace(versions=torch.where(torch.arange(9) == 4, terms.versions - 1, terms.versions).clamp(min=0))
    two = one.replace(versions=one.versions.clone())
    two.versions[:, 4] += 1
    a, b = (loss_grad_metrics(t, proximal="loglinear")[1] for t in (one, two))
    assert torch.equal(a[:, [0, 1, 2, 3, 5, 6, 7, 8]], b[:, [0, 1, 2, 3, 5, 6, 7, 8]])
    assert not torch.equal(a[:, 4], b[:, 4])


# ---- extreme values, masks, batches


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, -1e30])
@pytest.mark.parametrize(
    "params", [{}, {"proximal": "linear"}, {"level": "sequence", "aggregation": "max"}, {"metric": "k3"}], ids=str
)
def test_masked_tokens_change_nothing(poison: float, params: dict[str, Any]) -> None:
    terms = random_terms(7)
    outside = terms.mask == 0
    loss, grad, logged = loss_grad_metrics(terms, **params)
    bad = {name: getattr(terms, name).detach().masked_fill(outside, poison) for name in NAMES}
    for names in (*([n] for n in NAMES), NAMES):
        spoiled = terms.replace(**{n: bad[n] for n in names})
        spoiled = spoiled.replace(logprobs=spoiled.logprobs.detach().requires_grad_())
        per_token = method(**params).policy_loss(spoiled)
        assert not bool(per_token[outside].any())
        new_loss, new_grad, new_logged = loss_grad_metrics(spoiled, **params)
        assert torch.equal(new_loss, loss) and torch.equal(new_grad, grad) and new_logged == logged


def test_masked_tokens_do_not_leak_into_parameters() -> None:
    """-inf log-probs of masked tokens come from a graph: their zero gradient must not become NaN on the way back."""
    logits = torch.tensor([[[0.0, -math.inf], [0.5, 0.2]]], requires_grad=True)
    lp = torch.log_softmax(logits, -1)[..., 1]
    terms = terms_of([[0.0, 0.0]], [[-1.0, -1.0]], [[-1.0, -1.0]], [[0, 1]], [1.0], torch.float32).replace(logprobs=lp)
    (grad,) = torch.autograd.grad(method().policy_loss(terms).sum(), logits)
    assert bool(torch.isfinite(grad[0, 1]).all()) and bool(grad[0, 1].any())
    assert torch.equal(grad[0, 0], torch.zeros(2))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_log_ratios_that_are_not_finite_count_as_zero(bad: float) -> None:
    terms = terms_of([[-1.0, -1.1]], [[-1.0, -1.0]], [[bad, -1.5]], [[1, 1]], [1.0])
    _, grad, _ = loss_grad_metrics(terms)
    assert grad[0].tolist() == [-0.5, pytest.approx(-0.5 * math.exp(0.5) * math.exp(-0.1))]
    assert weights(terms)[0, 0] == 1
    terms = terms_of([[-1.0, -1.1]], [[bad, -1.0]], [[-1.0, -1.5]], [[1, 1]], [1.0])
    loss, grad, _ = loss_grad_metrics(terms)
    assert float(loss) == pytest.approx(-0.5 - 0.5 * math.exp(0.4)) and grad[0, 0] == 0 and grad[0, 1] < 0


def test_extreme_drift_stays_finite() -> None:
    far, near = torch.tensor([[-1e4, -1e4, -0.1, -0.1]]), -torch.ones(1, 4)
    for dtype in (torch.float32, torch.float64):
        for policies in ((far, near, near), (near, far, near), (near, near, far), (far, near, far), (near, far, far)):
            for a in (-3.0, 3.0):
                for params in (
                    {"action": "none"},
                    {},
                    {"action": "clamp", "level": "sequence", "aggregation": "sum"},
                    {"metric": "k3_code"},
                    {"metric": "k2", "level": "sequence"},
                    {"proximal": "loglinear", "action": "none"},
                    {"proximal": "linear", "action": "none"},
                ):
                    terms = terms_of(*policies, torch.ones(1, 4), [a], dtype, current_version=3)
                    loss, grad, logged = loss_grad_metrics(terms, **params)
                    values = [loss, *grad.flatten(), *map(torch.tensor, logged.values())]
                    assert all(bool(torch.isfinite(v)) for v in values), (policies, params)


def test_low_precision_is_raised_inside() -> None:
    terms = random_terms(8)
    low = terms_of(
        terms.logprobs,
        terms.old_logprobs,
        terms.rollout_logprobs,
        terms.mask,
        terms.advantages,
        torch.bfloat16,
    )
    exact = terms_of(
        low.logprobs.float(),
        low.old_logprobs.float(),
        low.rollout_logprobs.float(),
        low.mask,
        low.advantages.float(),
        torch.float32,
    )
    loss = method().policy_loss(low)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, method().policy_loss(exact), rtol=1e-6, atol=1e-6)


def test_a_batch_without_tokens_is_zero() -> None:
    terms = random_terms(9)
    empty = terms.replace(mask=torch.zeros_like(terms.mask), num_tokens=torch.zeros(()))
    for params in ({}, {"level": "sequence", "aggregation": "max"}, {"proximal": "loglinear"}):
        loss, grad, logged = loss_grad_metrics(empty, **params)
        assert float(loss) == 0 and not bool(grad.any()) and logged == {}


@pytest.mark.parametrize("params", [{}, {"level": "sequence", "action": "clamp", "upper": 1.2}], ids=str)
def test_micro_batches_padding_and_order_change_nothing(params: dict[str, Any]) -> None:
    terms = random_terms(10)
    _, grad, logged = loss_grad_metrics(terms, dual_clip=1.5, **params)

    def parts(cuts: list[Any], wider: int = 0) -> tuple[Tensor, dict[str, float]]:
        stack, grads = start_stack(method(dual_clip=1.5, **params)), []
        for cut in cuts:
            part = terms.replace(
                **{
                    n: torch.nn.functional.pad(getattr(terms, n).detach()[cut], (0, wider), value=-3)
                    for n in (*NAMES, "versions")
                },
                mask=torch.nn.functional.pad(terms.mask[cut], (0, wider)),
            )
            part = part.replace(logprobs=part.logprobs.requires_grad_())
            loss = token_mean(stack.one("policy_loss", part), part)
            grads.append(torch.autograd.grad(loss, part.logprobs)[0][:, :9])
        return torch.cat(grads), combine([stack.metrics.take()])

    order = [4, 2, 5, 0, 1, 3]
    for cuts, places in (
        ([slice(0, 6)], range(6)),
        ([slice(0, 1), slice(1, 4), slice(4, 6)], range(6)),
        ([order], order),
    ):
        for wider in (0, 3):
            new_grad, new_logged = parts(cuts, wider)
            torch.testing.assert_close(new_grad, grad[list(places)], rtol=1e-12, atol=1e-15)
            assert {k.removeprefix("decoupled_ppo/"): v for k, v in new_logged.items()} == pytest.approx(logged)


def test_what_is_logged() -> None:
    terms = random_terms(11, drift=1.3, live=0.6)
    valid = terms.mask > 0
    omega = torch.exp(terms.old_logprobs - terms.rollout_logprobs)[valid]
    u, a = torch.exp(terms.logprobs - terms.old_logprobs)[valid], terms.advantages[valid]
    kept = omega <= 5
    loss = torch.maximum(-a * u, -a * u.clamp(0.8, 1.2))
    logged = loss_grad_metrics(terms, dual_clip=1.3)[2]
    assert logged == pytest.approx(
        {
            "weight_mean": float(torch.where(kept, omega, 0.0).mean()),
            "weight_max": float(omega[kept].max()),
            "filtered": float((~kept).double().mean()),
            "clipfrac": float(((loss > -a * u) & kept).double().mean()),
            "clipfrac_dual": float(((a < 0) & (loss > -1.3 * a) & kept).double().mean()),
            "behavior_kl": float((terms.rollout_logprobs - terms.old_logprobs)[valid].mean()),
        }
    )
    assert 0 < logged["filtered"] < 1 and 0 < logged["clipfrac"] < 1 and 0 < logged["clipfrac_dual"] < 1


# ---- configuration


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"clip_low": 1.5}, "`clip_low` is 1.5"),
        ({"dual_clip": 1.0}, "`dual_clip` is 1"),
        ({"upper": 0.9}, "`upper` is 0.9; it must be > 1, because tokens of unchanged probability"),
        ({"upper": 2.0, "lower": 3.0}, "`lower` is 3 and `upper` is 2; no value is between them"),
        ({"lower": -1.0}, "the metric `ratio` is never negative"),
        ({"action": "clamp", "metric": "k2"}, "`metric` has no effect"),
        ({"action": "none", "upper": 3.0}, "`upper` has no effect"),
        ({"aggregation": "max"}, "`aggregation` has no effect"),
        ({"proximal": "rollout", "action": "clamp"}, "`action` has no effect"),
    ],
    ids=str,
)
def test_parameters_out_of_range(params: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build_stack("decoupled_ppo", {"decoupled_ppo": params})


def capabilities(**changes: Any) -> HostCapabilities:
    return HostCapabilities("verl", "0", {"policy_loss"}, {}, (), changes.pop("missing", {}), None, {}, **changes)


def test_refusals() -> None:
    """Nothing to correct, no versions, a second correction, and old log-probs that are the rollout's."""

    def stack(proximal: str = "recompute", *others: str) -> Any:
        return build_stack(["decoupled_ppo", *others], {"decoupled_ppo": {"proximal": proximal}})

    assert preflight(stack(), capabilities()) == {}
    none = {"off_policy": "set ppo_epochs=2.", "token_versions": "no versions here."}
    with pytest.raises(ConfigError, match="tokens that another policy sampled.*: set ppo_epochs=2"):
        preflight(stack(), capabilities(missing=none))
    with pytest.raises(ConfigError, match="published weights that made each token.*: no versions here"):
        preflight(stack("loglinear"), capabilities(missing=none))
    with pytest.raises(ConfigError, match="it would count twice. Turn that off"):
        preflight(stack(), capabilities(importance_weights={"rollout_is": "token"}))
    twice = build_stack(["decoupled_ppo", "april"], {"april": {"correction": "token_tis"}})
    with pytest.raises(
        ConfigError, match="`decoupled_ppo` holds the weight .*and so does `april`: it would count twice"
    ):
        preflight(twice, capabilities())
    bypass = capabilities(rollout_as_old="bypass_mode=True")
    with pytest.raises(ConfigError, match="needs log-probs of the policy at the start of the step in addition to"):
        preflight(stack(), bypass)
    for proximal in ("loglinear", "linear", "rollout"):  # these save the pass that `bypass_mode` leaves out
        assert preflight(stack(proximal), bypass) == {}
