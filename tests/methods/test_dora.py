"""DORA (arXiv 2509.18883): the loss against a loop and golden numbers; the data control row by row."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import refused
from torch import Tensor

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.losses import aggregate
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Jagged, Rollouts, Terms, TokenIds
from rl_plugins.methods.dora_data import DoraData, ends_in_loop
from rl_plugins.methods.dora_loss import DoraLoss
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack

GOLDEN = Golden("dora", "infer_log_prob")
COLUMN = "dora_share"


def loss_method(**params: Any) -> DoraLoss:
    return DoraLoss(build_params(DoraLoss.Params, params, "dora_loss"))


def data_method(**params: Any) -> DoraData:
    return DoraData(build_params(DoraData.Params, params, "dora_data"))


def terms_of(
    lp: Any,
    mu: Any,
    engine: Any,
    mask: Any,
    adv: Any,
    max_length: int = 16,
    share: Any = None,
    dtype: Any = torch.float64,
) -> Terms:
    """Advantages per row; every row counts, masked ones too."""
    lp, mu, engine, adv = (torch.as_tensor(x, dtype=dtype).detach().clone() for x in (lp, mu, engine, adv))
    mask = torch.as_tensor(mask).long()
    rows = len(mask)
    share = torch.ones(rows, 1, dtype=dtype) if share is None else torch.as_tensor(share, dtype=dtype)[:, None]
    return Terms(
        mask=mask,
        logprobs=lp.requires_grad_(),
        advantages=adv[:, None].expand(lp.shape),
        old_logprobs=mu,
        num_tokens=mask.sum().double(),
        num_rows=torch.tensor(float(rows)),
        max_length=max_length,
        rollout_logprobs=engine,
        columns={COLUMN: share},
    )


def loss_grad(terms: Terms, **params: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    stack = start_stack(loss_method(**params))
    loss = aggregate(
        stack.one("policy_loss", terms),
        terms.mask,
        "seq-mean-token-sum-norm",
        num_tokens=terms.num_tokens,
        num_rows=terms.num_rows,
        max_length=terms.max_length,
    )
    (grad,) = torch.autograd.grad(loss, terms.logprobs)
    return loss.detach(), grad, {k.removeprefix("dora_loss/"): v for k, v in combine([stack.metrics.take()]).items()}


# ---- golden numbers


@GOLDEN.kind("infer_log_prob")
def check_equation_4(case: Case) -> None:
    x, p = case.inputs, case.params
    terms = terms_of(
        x["log_prob"], x["train_old_log_prob"], x["infer_log_prob"], x["response_mask"], x["advantages"], p["T_max"]
    )
    bounds = dict(neg_low=p["eps_neg_low"], pos_high=p["eps_pos_high"], neg_high=p["eps_neg_high"], weight_cap=p["C"])
    loss, grad, _ = loss_grad(terms, **bounds)
    assert float(loss) == pytest.approx(case.expected["loss"], abs=1e-8)
    torch.testing.assert_close(grad, torch.tensor(case.expected["grad_log_prob"]).double(), rtol=0, atol=2e-8)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    assert len(GOLDEN.cases) == 1
    GOLDEN.check_further_cases()


# ---- the oracle: group by group, token by token


def oracle(lp, mu, engine, mask, adv, group, length, neg_low, pos_high, neg_high, weight_cap):
    """Equation 4 with its mean over prompts, and its gradient, with plain numbers."""
    groups = sorted(set(group))
    total, grad = 0.0, [[0.0] * len(row) for row in lp]
    for g, b in itertools.product(groups, range(len(lp))):
        if group[b] != g:
            continue
        scale = 1 / (group.count(g) * length * len(groups))
        for t in (t for t in range(len(lp[b])) if mask[b][t]):
            r, a = math.exp(lp[b][t] - mu[b][t]), adv[b]
            w = min(math.exp(mu[b][t] - engine[b][t]), weight_cap)
            clipped = min(max(r, 1 - neg_low), 1 + pos_high)
            f, moves = min(r * a, clipped * a), r * a <= clipped * a
            if a < 0 and neg_high * a > f:
                f, moves = neg_high * a, False
            total -= scale * w * f
            grad[b][t] = -scale * w * r * a if moves else 0.0
    return total, grad


def drawn(seed: int, rows: int = 7, time: int = 6) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(rows, time, generator=g, dtype=torch.float64) * scale

    mask = (torch.rand(rows, time, generator=g) < 0.7).long()
    mask[0], mask[-1] = 1, 0  # a full row, and one without a token
    engine = -normal(1.5).abs()
    mu = engine + normal(0.6)
    lp = mu + normal(0.7)
    adv = torch.randn(rows, generator=g, dtype=torch.float64)
    group = torch.randint(0, 3, (rows,), generator=g).tolist()
    return lp, mu, engine, mask, adv, group


BOUNDS = st.fixed_dictionaries(
    {
        "neg_low": st.sampled_from([0.0, 0.2, 1.0]),
        "pos_high": st.sampled_from([0.0, 0.28, 5.0]),
        "neg_high": st.sampled_from([1.3, 3.0]),
        "weight_cap": st.sampled_from([0.5, 2.0]),
    }
)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), bounds=BOUNDS)
def test_loss_and_gradient_equal_a_loop(seed: int, bounds: dict[str, float]) -> None:
    lp, mu, engine, mask, adv, group = drawn(seed)
    rollouts = make_rollouts([0.0] * len(lp), group, lengths=mask.sum(1).tolist())
    shape = loss_method(**bounds).shape(rollouts, None)  # type: ignore[arg-type]
    terms = terms_of(lp, mu, engine, mask, adv, 9, shape.row_columns[COLUMN])
    loss, grad, logged = loss_grad(terms, **bounds)
    value, slope = oracle(*(x.tolist() for x in (lp, mu, engine, mask, adv)), group, 9, **bounds)
    assert float(loss) == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(grad, torch.tensor(slope, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    weight = torch.exp(mu - engine)[mask > 0]
    assert logged["weight_mean"] == pytest.approx(float(weight.clamp(max=bounds["weight_cap"]).mean()))
    assert logged["weight_max"] <= bounds["weight_cap"] + 1e-12
    assert logged["weight_capped"] == pytest.approx(float((weight > bounds["weight_cap"]).double().mean()))


def test_bounds_act_where_the_paper_says() -> None:
    """A > 0 above 1 + e_pos_high, A < 0 below 1 - e_neg_low and above e_neg_high: gradient 0. Elsewhere not."""
    ratio = [1.5, 1.2, 0.5, 0.7, 0.9, 1.5, 4.0]
    adv = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    zero = [[0.0]] * 7
    terms = terms_of([[math.log(r)] for r in ratio], zero, zero, [[1]] * 7, adv, 1)
    _, grad, logged = loss_grad(terms)
    assert [bool(x) for x in grad[:, 0]] == [False, True, True, False, True, True, False]
    assert logged["clipfrac"] == pytest.approx(2 / 7) and logged["clipfrac_negative"] == pytest.approx(1 / 7)
    _, grad, _ = loss_grad(terms, neg_high=math.inf)
    assert bool(grad[6]), "without the bound a large ratio of a bad token counts"


def test_neutral_parameters_are_dr_grpo() -> None:
    lp, mu, _, mask, adv, _ = drawn(3)
    terms = terms_of(mu, mu, mu, mask, adv, 11)
    loss, grad, logged = loss_grad(terms)
    wanted = -(adv[:, None] * mask).sum() / (len(mask) * 11)
    assert float(loss) == pytest.approx(float(wanted), abs=1e-12) and logged["weight_mean"] == 1
    torch.testing.assert_close(grad, -adv[:, None] * mask / (len(mask) * 11), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_and_extreme_values_leave_no_nan(bad: float, dtype: torch.dtype) -> None:
    lp, mu, engine, mask, adv, _ = drawn(5)
    dirty = [torch.where(mask > 0, x, bad) for x in (lp, mu, engine)]
    clean = loss_grad(terms_of(lp, mu, engine, mask, adv, dtype=dtype))
    again = loss_grad(terms_of(*dirty, mask, adv, dtype=dtype))
    assert clean[0] == again[0] and torch.equal(clean[1], again[1]) and clean[2] == again[2]
    assert clean[0].dtype == torch.float32, "ratios are float32 or better"
    for place in range(3):
        values = [lp.clone(), mu.clone(), engine.clone()]
        values[place][0, 0] = bad
        loss, grad, logged = loss_grad(terms_of(*values, mask, adv, dtype=dtype))
        assert torch.isfinite(loss) and torch.isfinite(grad).all() and all(map(math.isfinite, logged.values()))


def test_micro_batches_and_padding_change_nothing() -> None:
    lp, mu, engine, mask, adv, _ = drawn(7)
    whole = terms_of(lp, mu, engine, mask, adv)
    loss, grad, logged = loss_grad(whole)
    stack, total, parts = start_stack(loss_method()), 0.0, []
    for rows in (slice(0, 1), slice(1, 5), slice(5, 7)):
        pad = [torch.nn.functional.pad(x[rows], (2, 3), value=-9.0) for x in (lp, mu, engine)]
        micro = terms_of(*pad, torch.nn.functional.pad(mask[rows], (2, 3)), adv[rows])
        micro = micro.replace(num_rows=whole.num_rows, num_tokens=whole.num_tokens)
        share = aggregate(
            stack.one("policy_loss", micro),
            micro.mask,
            "seq-mean-token-sum-norm",
            num_tokens=micro.num_tokens,
            num_rows=micro.num_rows,
            max_length=16,
        )
        parts.append(torch.autograd.grad(share, micro.logprobs)[0][:, 2:-3])
        total += float(share.detach())
    assert total == pytest.approx(float(loss), abs=1e-12)
    torch.testing.assert_close(torch.cat(parts), grad, rtol=0, atol=1e-12)
    again = {k.removeprefix("dora_loss/"): v for k, v in combine([stack.metrics.take()]).items()}
    assert again == pytest.approx(logged, abs=1e-9)


def test_mu_version_is_refused_for_older_rows() -> None:
    versions = dict(version=torch.tensor([3, 1, 3, 3]), current_version=3)
    stale = make_rollouts([1.0, 0, 1, 0], **versions)
    refused(
        lambda: one_step(start_stack(loss_method(mu="version")), stale),
        "1 of 4 rows are up to 2 published weights old",
        "mu=start",
    )
    fresh = stale.replace(version=torch.full((4,), 3), newest_version=torch.full((4,), 3))
    for mu, rollouts in (("version", fresh), ("start", stale)):
        decision = one_step(start_stack(loss_method(mu=mu)), rollouts)
        assert decision.row_columns[COLUMN].tolist() == [1, 1, 1, 1]
    kept = make_run(keeps_versions=True)
    decision = one_step(start_stack(loss_method(mu="version"), run=kept), stale)
    assert decision.row_columns[COLUMN].tolist() == [1, 1, 1, 1]
    assert loss_method(mu="version").old_policy == "generating" and loss_method().old_policy == "proximal"


# ---- data control


def loops(*tails: Any, before: int = 3) -> Jagged:
    head = torch.arange(900, 900 + before)
    return Jagged.cat([torch.cat([head, torch.as_tensor(t, dtype=torch.int64)]) for t in tails])


def test_loops() -> None:
    period = [1, 2, 3]
    tails = [period * 4, [*period * 3, 1, 2, 9], [7] * 12, list(range(12)), [5] * 4, (list(range(6)) * 2)]
    assert ends_in_loop(loops(*tails), 12, 4).tolist() == [True, False, True, False, False, False]
    assert ends_in_loop(loops(*tails), 12, 6).tolist() == [True, False, True, False, False, True]
    assert ends_in_loop(loops([5] * 4), 7, 3).tolist() == [False] and ends_in_loop(loops(), 4, 2).tolist() == []


@settings(max_examples=40, deadline=None)
@given(
    tail=st.lists(st.integers(0, 2), min_size=0, max_size=12),
    tokens=st.integers(2, 10),
    period=st.integers(1, 5),
)
def test_loops_equal_a_loop(tail: list[int], tokens: int, period: int) -> None:
    period = min(period, tokens // 2)
    end = tail[-tokens:]
    wanted = len(tail) >= tokens and any(
        all(end[i] == end[i - p] for i in range(p, tokens)) for p in range(1, period + 1)
    )
    assert ends_in_loop(Jagged.cat([torch.tensor(tail)]), tokens, period).tolist() == [wanted]


def rows_of(rewards: Any, group: Any, truncated: Any = (), **changes: Any) -> Rollouts:
    rollouts = make_rollouts(rewards, group, lengths=[8] * len(group), **changes)
    cut = torch.zeros(len(group), dtype=torch.bool)
    cut[list(truncated)] = True
    ids = [torch.arange(8) + 10 * i for i in range(len(group))]
    return rollouts.replace(truncated=cut, token_ids=TokenIds.cat([torch.tensor([1])] * len(group), ids))


def decided(rollouts: Rollouts, **params: Any) -> tuple[Any, dict[str, float]]:
    stack = start_stack(data_method(**params), run=make_run(reward_names=rollouts.reward_names))
    decision = one_step(stack, rollouts, make_tokens(rollouts))
    return decision, {k.removeprefix("dora_data/"): v for k, v in combine([stack.metrics.take()]).items()}


NAN = math.nan


def test_groups_without_signal_leave() -> None:
    rewards = [0, 0, 0, 1, 1, NAN, 0, 1, 0.5, 0.5, NAN, NAN, 0, 0, 1]
    group = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    decision, logged = decided(rows_of(rewards, group))
    assert decision.stays.tolist() == [g in (2, 3, 5) for g in group]
    assert logged["dropped_groups"] == 0.5 and logged["failed"] == pytest.approx(3 / 15)


def test_accuracy_may_be_one_of_several_rewards() -> None:
    rewards = [[1, 0.2], [1, 0.9], [0, 0.4], [1, 0.4]]
    for name, wanted in (("reward_0", [False, False, True, True]), (None, [True] * 4)):
        decision, _ = decided(rows_of(rewards, [0, 0, 1, 1]), accuracy=name)
        assert decision.stays.tolist() == wanted
    stack = start_stack(data_method(accuracy="right"), run=make_run(reward_names=()))  # not known before the run
    rollouts = rows_of(rewards, [0, 0, 1, 1])
    refused(lambda: one_step(stack, rollouts, make_tokens(rollouts)), "'right'", "reward_0, reward_1")
    with pytest.raises(ConfigError, match="'right'.*accuracy, format"):
        data_method(accuracy="right").check(make_run())


@pytest.mark.parametrize("how", ["mask", "mask_unscored", "keep"])
def test_failed_and_truncated_rows_are_masked_and_stay(how: str) -> None:
    rollouts = rows_of([1, 0, 0, 1, 1], [0] * 5, truncated=[1, 2])
    ids = rollouts.token_ids
    assert ids is not None
    looped = list(ids.completion)
    looped[2] = torch.tensor([4, 5] * 4)
    rollouts = rollouts.replace(token_ids=TokenIds.cat(ids.prompt, looped, ids.observed))
    rollouts = rollouts.replace(meta={"broken": [None, False, 0, True, False]})
    short = {} if how == "keep" else {"loop_tokens": 6, "loop_period": 2}
    decision, logged = decided(rollouts, truncated=how, failed_column="broken", **short)
    assert decision.stays.tolist() == [True] * 5, "rows of weight 0 still count in G"
    scored = {"mask": [1.0, 0.0, 0.0, None, 1.0], "keep": [1.0, 0.0, 0.0, None, 1.0]}.get(
        how, [1.0, None, 0, None, 1.0]
    )
    values = torch.tensor([x for x in scored if x is not None], dtype=torch.float64)
    full = [0.0 if x is None else float((x - values.mean()) / (values.std() + 1e-4)) for x in scored]
    if how == "mask":
        full[1] = 0.0
    assert decision.row_advantages.tolist() == pytest.approx(full, abs=1e-6)
    assert logged["failed"] == 0.2
    if how != "keep":
        assert logged["loops"] == 0.2 and logged["truncated_masked"] == 0.2
    with pytest.raises(MethodError, match="'yes'; it must be true or false"):
        decided(rollouts.replace(meta={"broken": ["yes", 0, 0, 0, 0]}), failed_column="broken")


def test_mixed_versions_leave_or_are_counted() -> None:
    rollouts = rows_of(
        [1, 0, 1, 0, 0, 1],
        [0, 0, 0, 1, 1, 1],
        version=torch.tensor([1, 1, 1, 0, 1, 0]),
        newest_version=torch.tensor([1, 1, 2, 0, 1, 1]),
        current_version=2,
    )
    kept, logged = decided(rollouts)
    assert kept.stays.all() and logged["mixed"] == pytest.approx(2 / 6)
    pure, logged = decided(rollouts, pure="drop")
    # the second group has only wrong answers left
    assert pure.stays.tolist() == [True, True, False, False, False, False] and logged["mixed"] == pytest.approx(2 / 6)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_data_control_equals_a_loop(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    group = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.5, NAN]), min_size=n, max_size=n))
    newest = data.draw(st.lists(st.integers(1, 2), min_size=n, max_size=n))
    if all(map(math.isnan, rewards)):
        return
    rollouts = rows_of(
        rewards, group, version=torch.ones(n).long(), newest_version=torch.tensor(newest), current_version=2
    )
    decision, _ = decided(rollouts, pure="drop")
    for i in range(n):
        own = [r for r, g, v in zip(rewards, group, newest, strict=True) if g == group[i] and v == 1]
        own = [r for r in own if not math.isnan(r)]
        signal = bool(own) and set(own) not in ({0.0}, {1.0})
        assert bool(decision.stays[i]) == (newest[i] == 1 and signal)


def test_bundle_and_refusals() -> None:
    stack = build_stack(["dora"])
    assert stack.names == ["dora_data", "dora_loss"]
    with pytest.raises(ConfigError, match="`loop_period` is 5"):
        data_method(loop_tokens=8, loop_period=5)
    with pytest.raises(ConfigError, match="neg_high"):
        loss_method(neg_high=1.0)
