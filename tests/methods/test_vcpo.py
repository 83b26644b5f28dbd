"""VCPO (arXiv 2602.17616): effective sample size, learning rate, baseline, the loss and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.groups import Groups
from rl_plugins.core.losses import aggregate, ppo_clip
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts, Rows, Terms, Update
from rl_plugins.methods.vcpo import Vcpo, ess_ratio, log_baseline_weight, lr_factor, weighted_baseline
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import build_stack
from rl_plugins.runtime.update import before_update
from rl_plugins.testing import make_rollouts, make_tokens, start_stack

GOLDEN = Golden("vcpo")
AGGREGATES = {"mean": "mean", "median": "median", "winsorized_mean": "winsorized"}


def vcpo(**params: Any) -> Vcpo:
    return Vcpo(build_params(Vcpo.Params, params, "vcpo"))


class Batch:
    """One optimizer step: padded log-probs, rewards and groups, from the driver to the loss.

    Args:
        behavior, current: (rows, time) log-probs; the live ones equal `current`.
        square: (tokens,) of `sum_squared_probs`, for the proxy.
    """

    def __init__(self, rewards: Any, group: Any, mask: Any, behavior: Any, current: Any, **extra: Any) -> None:
        self.mask = torch.as_tensor(mask).long()
        self.behavior, self.current = (torch.as_tensor(x, dtype=torch.float64) for x in (behavior, current))
        self.rollouts: Rollouts = make_rollouts(rewards, list(group), lengths=self.mask.sum(1).tolist())
        self.extra = extra

    def sums(self, x: Tensor) -> Tensor:
        return torch.where(self.mask > 0, x, 0.0).sum(1)

    def rows(self, stack: Any) -> Rows:
        tokens = make_tokens(self.rollouts, **self.extra)
        shape = stack.call("shape", stack.methods[0], self.rollouts, tokens)
        return Rows(
            group=self.rollouts.group,
            length=self.mask.sum(1),
            logprobs=self.sums(self.current),
            rollout_logprobs=self.sums(self.behavior),
            columns=dict(shape.row_columns),
        )

    def update(self, ranks: int = 1, **params: Any) -> tuple[Update, dict[str, float], Any]:
        """What an adapter does before an optimizer step, the rows dealt to ranks; the columns are of all rows."""
        stack = start_stack(vcpo(**params))
        rows = self.rows(stack)
        parts, columns = [], []
        for i in range(ranks):
            cut = slice(i * len(self.mask) // ranks, (i + 1) * len(self.mask) // ranks)
            names = ("group", "length", "logprobs", "rollout_logprobs")
            parts.append(
                Rows(
                    **{n: getattr(rows, n)[cut] for n in names},
                    columns={k: v[cut] for k, v in rows.columns.items()},
                )
            )
        for rank in reversed(range(ranks)):
            update = before_update(stack, parts, rank)
            columns.insert(0, update.columns["vcpo_coefficient"])
        metrics = {k.removeprefix("vcpo/"): v for k, v in combine([stack.metrics.take()]).items()}
        return Update(update.lr_scale, {"vcpo_coefficient": torch.cat(columns)}), metrics, stack

    def terms(self, update: Update, dtype: torch.dtype = torch.float64) -> Terms:
        return Terms(
            mask=self.mask,
            logprobs=self.current.to(dtype).clone().requires_grad_(),
            advantages=torch.full_like(self.current, 7.0),  # must not matter
            old_logprobs=torch.full_like(self.current, -9.0),
            num_tokens=self.mask.sum().double(),
            num_rows=(self.mask.sum(1) > 0).sum().double(),
            max_length=self.mask.shape[1],
            rollout_logprobs=self.behavior.to(dtype),
            columns={k: v[:, None].to(dtype) for k, v in update.columns.items()},
        )

    def grad(self, **params: Any) -> tuple[Tensor, Tensor, dict[str, float], float]:
        """Loss, gradient for the log-probs, metrics, and the factor on the learning rate."""
        update, metrics, stack = self.update(**params)
        terms = self.terms(update)
        loss, grad = total(stack.methods[0], terms)
        metrics |= {k.removeprefix("vcpo/"): v for k, v in combine([stack.metrics.take()]).items()}
        return loss, grad, metrics, update.lr_scale


def total(method: Method, terms: Terms) -> tuple[Tensor, Tensor]:
    loss = torch.where(terms.mask > 0, method.policy_loss(terms), 0.0).sum()
    (grad,) = torch.autograd.grad(loss, terms.logprobs)
    return loss.detach(), grad


def random_batch(seed: int = 0, drift: float = 0.4, rewards: Any = None) -> Batch:
    """Three groups, interleaved and ragged; holes, and a row without a token."""
    g = torch.Generator().manual_seed(seed)
    group = [0, 1, 0, 1, 1, 2, 2, 0, 2, 2, 1]
    rows, time = len(group), 7
    mask = (torch.rand(rows, time, generator=g) < 0.7).long()
    mask[:, 0], mask[-1] = 1, 0
    behavior = -torch.rand(rows, time, generator=g, dtype=torch.float64) * 2
    current = behavior + drift * torch.randn(rows, time, generator=g, dtype=torch.float64)
    given = torch.randint(0, 5, (rows,), generator=g).double() / 4 if rewards is None else rewards
    return Batch(given, group, mask, behavior, current)


# ---- golden numbers


@GOLDEN.kind("policy_log_probs")
def check_ess(case: Case) -> None:
    given_, expected, p = case.inputs, case.expected, case.params
    p.must_be("eps", 1e-8)  # the authors add it to sums; the difference is below it here
    mask = torch.tensor(given_["response_mask"])
    batch = Batch(
        torch.zeros(len(mask)), [0] * len(mask), mask, given_["rollout_log_probs"], given_["policy_log_probs"]
    )
    log_w = batch.sums(batch.current - batch.behavior)
    close = dict(rel=2e-8, abs=1e-9)
    assert torch.exp(log_w).tolist() == pytest.approx(expected["seq_is"], **close)
    limit = math.log(p["rollout_is_threshold"])
    clipped = torch.exp(log_w.clamp(max=limit))
    assert clipped.tolist() == pytest.approx(expected["seq_is_clipped"], **close)
    assert ess_ratio(log_w) * len(mask) == pytest.approx(expected["ess"], **close)
    params = dict(truncation=p["rollout_is_threshold"])
    for base, name in ((1.0, "lr_scale_sqrt_base1"), (0.55, "lr_scale_sqrt_base0p55")):
        _, _, metrics, scale = batch.grad(base_ess_ratio=base, **params)
        assert scale == pytest.approx(expected[name], **close)
    assert metrics["ess_ratio"] == pytest.approx(expected["ess_ratio"], **close)
    assert metrics["ess_ratio_truncated"] == pytest.approx(expected["ess_ratio_clipped"], **close)
    assert metrics["ess_ratio_truncated"] * len(mask) == pytest.approx(expected["ess_clipped"], **close)
    assert metrics["weight_mean"] == pytest.approx(sum(clipped.tolist()) / len(mask))
    geometric = torch.exp(log_w / mask.sum(1))
    assert geometric.tolist() == pytest.approx(expected["geom_mean"], **close)
    assert metrics["geometric_mean"] == pytest.approx(sum(expected["geom_mean"]) / len(mask), rel=1e-7)
    ratio = torch.exp(batch.current - batch.behavior)
    k3 = batch.sums(ratio - 1 - torch.log(ratio)) / mask.sum(1)
    assert k3.tolist() == pytest.approx(expected["k3_kl"], rel=1e-6, abs=1e-9)
    assert metrics["k3"] == pytest.approx(sum(expected["k3_kl"]) / len(mask), rel=1e-6)


@GOLDEN.kind("grad_norms")
def check_baseline(case: Case) -> None:
    given_, p = case.inputs, case.params
    p.must_be("eps", 1e-8)
    reward, norms, w, clipped, lengths = (
        torch.tensor(given_[n], dtype=torch.float64)
        for n in ("rewards", "grad_norms", "seq_is", "seq_is_clipped", "lengths")
    )
    norms = norms / lengths if p["normalize_by_length"] else norms
    log_w, groups = torch.log(clipped if p["use_clipped_is_ratios"] else w), Groups(torch.zeros_like(w).long())
    assert w.clamp(max=8.0).tolist() == pytest.approx(clipped.tolist())
    power = "paper" if p["use_is_weights"] else "none"
    weight = log_baseline_weight(log_w, norms**2, power, math.log(8.0))
    everyone = torch.ones(len(w), dtype=torch.bool)
    got = weighted_baseline(groups, reward, weight, everyone, AGGREGATES[p["agg_mode"]])
    assert got.tolist() == pytest.approx([case.expected["baseline"]], abs=1e-7)
    # what they measure holds the truncated weight already
    twice = log_baseline_weight(log_w, norms**2, "code", math.log(8.0))
    torch.testing.assert_close(torch.exp(twice), (torch.exp(log_w) * clipped * norms) ** 2)


@GOLDEN.kind("grad_norm")
def check_run_of_the_code(case: Case) -> None:
    """The authors' three functions one after the other, on one group. They read the norms from outside, too."""
    given_, expected, p = case.inputs, case.expected, case.params
    p.must_be("eps", 1e-8)
    mask = torch.tensor(given_["mask"]).long()
    batch = Batch(given_["reward"], [0] * len(mask), mask, given_["rollout_logprobs"], given_["logprobs"])
    log_w, limit = batch.sums(batch.current - batch.behavior), math.log(p["rollout_is_threshold"])
    close = dict(rel=1e-6, abs=1e-8)  # theirs is float32
    assert torch.exp(log_w).tolist() == pytest.approx(expected["seq_is"], **close)
    _, _, metrics, scale = batch.grad(base_ess_ratio=1.0, truncation=p["rollout_is_threshold"])
    assert scale == pytest.approx(expected["lr_scale_sqrt_base1"], **close)
    for ours, theirs, each in (
        ("ess_ratio", "ess", "ess_ratio"),
        ("ess_ratio_truncated", "ess_clipped", "ess_ratio_clipped"),
    ):
        assert metrics[ours] == pytest.approx(expected[each], **close)
        assert metrics[ours] * len(mask) == pytest.approx(expected[theirs], **close)
    log_ratio = batch.current - batch.behavior
    k3 = batch.sums(torch.exp(log_ratio) - 1 - log_ratio) / mask.sum(1)
    assert k3.tolist() == pytest.approx(expected["k3"], **close)
    groups, reward = Groups(torch.zeros(len(mask), dtype=torch.int64)), torch.tensor(given_["reward"]).double()
    norms, everyone = torch.tensor(given_["grad_norm"]).double(), torch.ones(len(mask), dtype=torch.bool)

    def baseline(norms: Tensor, power: str, mode: str) -> float:
        weight = log_baseline_weight(log_w, norms**2, power, limit)
        return float(weighted_baseline(groups, reward, weight, everyone, AGGREGATES[mode])[0])

    opob = expected["opob"]
    for mode in AGGREGATES:
        assert baseline(norms, "paper", mode) == pytest.approx(opob[mode], **close)
    assert baseline(norms / mask.sum(1), "paper", "mean") == pytest.approx(opob["mean_by_length"], **close)
    assert baseline(norms, "none", "mean") == pytest.approx(opob["mean_without_is"], **close)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the oracle: row by row, token by token


def oracle(batch: Batch, **params: Any) -> tuple[list[list[float]], float, float]:
    """Gradient for the log-probs, learning-rate factor and effective share, by the formulas."""
    p: Any = build_params(Vcpo.Params, params, "vcpo")
    rewards, group = batch.rollouts.reward.tolist(), batch.rollouts.group.tolist()
    mask, cur, beh = batch.mask.tolist(), batch.current.tolist(), batch.behavior.tolist()
    rows = [i for i, m in enumerate(mask) if sum(m)]
    length = {i: sum(mask[i]) for i in rows}
    w = {i: math.exp(sum(c - b for c, b, m in zip(cur[i], beh[i], mask[i], strict=True) if m)) for i in rows}
    share = sum(w.values()) ** 2 / sum(x * x for x in w.values()) / len(rows)
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[p.lr_scale]
    grad = [[0.0] * len(m) for m in mask]
    for i in rows:
        if math.isnan(rewards[i]):
            continue
        everyone = [j for j in range(len(mask)) if group[j] == group[i] and not math.isnan(rewards[j])]
        peers = [j for j in everyone if j in length]
        mean = sum(rewards[j] for j in everyone) / len(everyone)
        std = math.sqrt(sum((rewards[j] - mean) ** 2 for j in everyone) / len(everyone))
        if p.baseline == "opob":
            once, again = {"paper": (2, 0), "code": (2, 2), "none": (0, 0)}[p.weight_power]
            big = {
                j: w[j] ** once
                * min(w[j], p.truncation) ** again
                / (length[j] if p.normalize_by_length else 1 / length[j])
                for j in peers
            }
            b = combined(p.aggregate, [rewards[j] for j in peers], [big[j] for j in peers])
        else:
            b = mean if p.baseline == "group" else 0.0
        a = (rewards[i] - b) / (std if p.norm_by_std and std > 1e-8 else 1.0)
        for t, m in enumerate(mask[i]):
            if m:
                grad[i][t] = -a * min(w[i], p.truncation) / (len(rows) * length[i])
    return grad, min(1.0, share / p.base_ess_ratio) ** power, share


def combined(how: str, values: list[float], weights: list[float]) -> float:
    total_ = sum(weights)

    def quantile(q: float) -> float:
        so_far = 0.0
        for value, weight in sorted(zip(values, weights, strict=True)):
            so_far += weight
            if so_far >= q * total_:
                return value
        return max(values)

    if how == "median":
        return quantile(0.5)
    if how == "winsorized":
        low, high = quantile(0.05), quantile(0.95)
        values = [min(max(v, low), high) for v in values]
    return sum(v * x for v, x in zip(values, weights, strict=True)) / total_


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    rows, time = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))

    def table(element: Any) -> list[list[Any]]:
        return data.draw(st.lists(st.lists(element, min_size=time, max_size=time), min_size=rows, max_size=rows))

    number = st.floats(-1.5, 0.5).map(lambda x: round(x, 3))
    mask = table(st.integers(0, 1))
    mask[0][0] = 1
    reward = st.sampled_from([0.0, 0.25, 1.0, math.nan])
    batch = Batch(
        data.draw(st.lists(reward, min_size=rows, max_size=rows)),
        data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)),
        mask,
        table(number),
        table(number),
    )
    params: dict[str, Any] = {
        "baseline": data.draw(st.sampled_from(["opob", "group", "none"])),
        "truncation": data.draw(st.sampled_from([0.5, 2.0, 8.0, math.inf])),
        "norm_by_std": data.draw(st.booleans()),
        "lr_scale": data.draw(st.sampled_from(["sqrt", "linear", "none"])),
    }
    if params["lr_scale"] != "none":
        params["base_ess_ratio"] = data.draw(st.sampled_from([1.0, 0.55]))
    if params["baseline"] == "opob":
        params["weight_power"] = data.draw(st.sampled_from(["paper", "code", "none"]))
        params["normalize_by_length"] = data.draw(st.booleans())
        # ties of a cumulative weight with a quantile are decided by rounding, so rewards differ with the others
        params["aggregate"] = "mean"
    wanted, scale, share = oracle(batch, **params)
    loss, grad, metrics, got_scale = batch.grad(**params)
    torch.testing.assert_close(grad, torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    assert got_scale == pytest.approx(scale, rel=1e-12) and metrics["ess_ratio"] == pytest.approx(share, rel=1e-12)
    assert float(loss) == pytest.approx(sum(map(sum, wanted)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregate_", ["median", "winsorized"])
@pytest.mark.parametrize("seed", range(4))
def test_robust_baselines_equal_the_loop(aggregate_: str, seed: int) -> None:
    batch = random_batch(seed, 0.7)
    wanted, _, _ = oracle(batch, aggregate=aggregate_)
    torch.testing.assert_close(
        batch.grad(aggregate=aggregate_)[1], torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-7
    )


def test_gradient_of_a_policy_equals_that_of_the_objective_in_float64() -> None:
    """Through a table of logits, against autograd of (1/B) sum A wbar (1/L) sum lp with its factors held."""
    g = torch.Generator().manual_seed(5)
    batch = random_batch(5)
    rows, time = batch.mask.shape
    logits = torch.randn(rows, time, 6, generator=g, dtype=torch.float64, requires_grad=True)
    taken = torch.randint(0, 6, (rows, time, 1), generator=g)
    lp = torch.log_softmax(logits, -1).gather(2, taken)[..., 0]
    batch.current = lp.detach()
    batch.behavior = lp.detach() + 0.3 * torch.randn(rows, time, generator=g, dtype=torch.float64)
    update, _, stack = batch.update()
    terms = batch.terms(update).replace(logprobs=lp)
    (got,) = torch.autograd.grad(
        torch.where(terms.mask > 0, stack.methods[0].policy_loss(terms), 0.0).sum(), logits, retain_graph=True
    )
    factor = -torch.tensor(oracle(batch)[0], dtype=torch.float64)
    (wanted,) = torch.autograd.grad(-(factor * lp).sum(), logits)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8)


def test_proxy_of_the_norm() -> None:
    """n^2 of a row is the sum over its tokens of 1 - 2 p + sum p^2: the squared norm of d lp / d logits."""
    g = torch.Generator().manual_seed(6)
    batch = random_batch(6)
    n = int(batch.mask.sum())
    logits = torch.randn(n, 5, generator=g, dtype=torch.float64, requires_grad=True)
    probs = torch.softmax(logits, -1)
    (grad,) = torch.autograd.grad(torch.log(probs[:, 0]).sum(), logits)
    batch.extra = {
        "old_logprobs": torch.log(probs[:, 0]).detach().float(),
        "sum_squared_probs": (probs**2).sum(1).detach().float(),
    }
    stack = start_stack(vcpo(gradnorm="proxy"))
    rows = batch.rows(stack)
    row = make_tokens(batch.rollouts).row
    wanted = torch.bincount(row, (grad**2).sum(1), minlength=len(batch.mask))
    torch.testing.assert_close(rows.columns["vcpo_norm"], wanted, rtol=1e-5, atol=1e-6)
    assert stack.methods[0].needs >= {"sum_squared_probs", "tokens", "old_logprobs"}
    assert not torch.allclose(batch.grad(gradnorm="proxy")[1], batch.grad()[1])
    equal = {"old_logprobs": torch.full((n,), math.log(0.5)), "sum_squared_probs": torch.full((n,), 0.25)}
    batch.extra = equal  # all tokens alike: it is the length
    torch.testing.assert_close(batch.grad(gradnorm="proxy")[1], batch.grad()[1], rtol=1e-5, atol=1e-8)


# ---- properties of the specification


def grpo(batch: Batch) -> tuple[float, Tensor]:
    """GRPO with a population deviation and a mean over rows, on-policy: loss and gradient."""
    live = batch.mask.sum(1) > 0
    centered, std = batch.rollouts.groups.center_and_std(batch.rollouts.reward, ddof=0)
    advantages = (centered / batch.rollouts.groups.rows(torch.where(std > 1e-8, std, 1.0)))[:, None]
    lp = batch.current.clone().requires_grad_()
    per_token = ppo_clip(lp, batch.current, advantages.expand(lp.shape))
    loss = aggregate(
        per_token,
        batch.mask,
        "seq-mean-token-mean",
        num_tokens=float(batch.mask.sum()),
        num_rows=float(live.sum()),
        max_length=7,
    )
    return float(loss.detach()), torch.autograd.grad(loss, lp)[0]


def test_on_policy_it_is_grpo_with_a_population_deviation() -> None:
    batch = random_batch(7, drift=0.0)
    wanted_loss, wanted = grpo(batch)
    loss, grad, metrics, scale = batch.grad(baseline="group")
    assert metrics["ess_ratio"] == scale == 1.0 and metrics["weight_mean"] == 1
    torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-8)
    assert float(loss) == pytest.approx(wanted_loss, abs=1e-7)
    # rows of one length have equal norms, so the optimal baseline is the mean too
    batch = Batch([0.0, 1.0, 1.0, 0.5], [0, 0, 0, 0], torch.ones(4, 3), -torch.ones(4, 3), -torch.ones(4, 3))
    torch.testing.assert_close(batch.grad()[1], grpo(batch)[1], rtol=1e-6, atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=12), st.floats(-500, 500))
def test_effective_share(logs: list[float], shift: float) -> None:
    log_w = torch.tensor(logs, dtype=torch.float64)
    share = ess_ratio(log_w)
    assert 1 / len(logs) - 1e-12 <= share <= 1
    assert share == pytest.approx(ess_ratio(log_w + shift), rel=1e-9)
    assert ess_ratio(log_w[:1]) == 1
    for base in (1.0, 0.55):
        sqrt, linear, none = (lr_factor(share, base, rule) for rule in ("sqrt", "linear", "none"))
        assert 0 < linear <= sqrt <= none == 1 and sqrt**2 == pytest.approx(linear)


def test_one_dominant_weight() -> None:
    log_w = torch.zeros(8).double()
    log_w[3] = 200.0
    assert ess_ratio(log_w) == pytest.approx(1 / 8)
    assert ess_ratio(torch.full((4,), math.log(1e-5)).double()) == 1  # the authors' epsilon makes this 0.04


@settings(max_examples=40, deadline=None)
@given(data=st.data(), how=st.sampled_from(["mean", "median", "winsorized"]))
def test_baseline_properties(data: st.DataObject, how: Any) -> None:
    n = data.draw(st.integers(1, 8))
    reward = torch.tensor(data.draw(st.lists(st.floats(-2, 2), min_size=n, max_size=n)), dtype=torch.float64)
    log_weight = torch.tensor(data.draw(st.lists(st.floats(-40, 40), min_size=n, max_size=n)), dtype=torch.float64)
    groups, everyone = Groups(torch.zeros(n, dtype=torch.int64)), torch.ones(n, dtype=torch.bool)

    def base(reward: Tensor, log_weight: Tensor) -> float:
        return float(weighted_baseline(groups, reward, log_weight, everyone, how)[0])

    b = base(reward, log_weight)
    assert float(reward.min()) - 1e-9 <= b <= float(reward.max()) + 1e-9
    assert base(reward, log_weight + 300.0) == pytest.approx(b, abs=1e-9)
    if how == "mean":
        assert base(reward + 3, log_weight) == pytest.approx(b + 3, abs=1e-9)
    assert base(torch.full_like(reward, 0.7), log_weight) == pytest.approx(0.7, abs=1e-12)


def test_equal_rewards_move_nothing() -> None:
    """Not by a rounding error either, with a deviation of 0 and tiny weights."""
    batch = random_batch(8, rewards=[0.3] * 11)
    batch.current = batch.current - 3.0
    for params in ({}, {"baseline": "group"}, {"aggregate": "median"}, {"norm_by_std": False}):
        assert not bool(batch.grad(**params)[1].any())
    assert bool(batch.grad(baseline="none")[1].any())


def test_a_group_of_one_moves_nothing() -> None:
    batch = random_batch(9)
    alone = Batch(batch.rollouts.reward, range(11), batch.mask, batch.behavior, batch.current)
    assert not bool(alone.grad()[1].any())


def test_weights_that_are_all_zero_leave_the_mean() -> None:
    """Tokens of probability 1 have no gradient; whatever the baseline, nothing moves them."""
    batch = random_batch(10)
    n = int(batch.mask.sum())
    batch.extra = {"old_logprobs": torch.zeros(n), "sum_squared_probs": torch.ones(n)}
    torch.testing.assert_close(batch.grad(gradnorm="proxy")[1], batch.grad(baseline="group")[1])


def test_unscorable_rows_are_in_no_statistic_and_are_not_moved() -> None:
    rewards = [0.0, 1.0, math.nan, 0.25, math.nan, 0.5, 1.0, 1.0, 0.0, 0.75, 1.0]
    batch = random_batch(11, rewards=rewards)
    _, grad, metrics, scale = batch.grad()
    assert not bool(grad[[2, 4]].any()) and bool(grad[0].any())
    wanted, wanted_scale, share = oracle(batch)  # they count in B and in the effective share
    torch.testing.assert_close(grad, torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    assert (scale, metrics["ess_ratio"]) == (pytest.approx(wanted_scale), pytest.approx(share))


def test_truncation_and_its_absence() -> None:
    batch = random_batch(12, drift=1.2)
    log_w = batch.sums(batch.current - batch.behavior)[:10]
    assert float(log_w.max()) > math.log(2.0)
    _, _, metrics, _ = batch.grad(truncation=2.0)
    assert metrics["truncated"] == pytest.approx(float((log_w > math.log(2.0)).double().mean()))
    assert metrics["weight_mean"] == pytest.approx(float(torch.exp(log_w).clamp(max=2.0).mean()))
    assert batch.grad(truncation="inf")[2]["weight_mean"] == pytest.approx(float(torch.exp(log_w).mean()))


# ---- ranks, micro-batches, extreme values


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_one_effective_sample_size(ranks: int) -> None:
    """From the sums over ranks, not the mean of their ratios."""
    batch = random_batch(13, drift=0.8)
    one, one_metrics, _ = batch.update()
    several, metrics, _ = batch.update(ranks)
    assert several.lr_scale == one.lr_scale and metrics == one_metrics
    assert torch.equal(several.columns["vcpo_coefficient"], one.columns["vcpo_coefficient"])
    log_w = batch.sums(batch.current - batch.behavior)[:10]
    halves = [ess_ratio(log_w[:5]), ess_ratio(log_w[5:])]
    assert abs(one_metrics["ess_ratio"] - sum(halves) / 2) > 0.02


def test_micro_batches_padding_and_order_change_nothing() -> None:
    batch = random_batch(14)
    update, metrics, stack = batch.update()
    terms = batch.terms(update)
    _, grad = total(stack.methods[0], terms)
    k3 = combine([stack.metrics.take()])
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0)).tolist()
    for cuts in ([[i] for i in range(11)], [list(range(4)), list(range(4, 11))], [order]):
        for wider in (0, 2):
            grads = []
            for cut in cuts:
                part = terms.replace(
                    **{
                        n: torch.nn.functional.pad(getattr(terms, n).detach()[cut], (0, wider), value=5.0)
                        for n in ("logprobs", "rollout_logprobs", "advantages", "old_logprobs")
                    },
                    mask=torch.nn.functional.pad(terms.mask[cut], (0, wider)),
                    columns={k: v[cut] for k, v in terms.columns.items()},
                )
                part = part.replace(logprobs=part.logprobs.requires_grad_())
                grads.append(total(stack.methods[0], part)[1][:, :7])
            places = [i for cut in cuts for i in cut]
            assert torch.equal(torch.cat(grads), grad[places])
            assert combine([stack.metrics.take()]) == pytest.approx(k3)
    moved = Batch(
        batch.rollouts.reward[order],
        batch.rollouts.group[order].tolist(),
        batch.mask[order],
        batch.behavior[order],
        batch.current[order],
    )
    _, new, new_metrics, scale = moved.grad()
    torch.testing.assert_close(new, grad[order], rtol=1e-5, atol=1e-8)
    assert scale == pytest.approx(update.lr_scale, rel=1e-12)
    assert {k: new_metrics[k] for k in metrics} == pytest.approx(metrics, abs=1e-8)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_masked_tokens_change_nothing(poison: float) -> None:
    batch = random_batch(15)
    update, _, stack = batch.update()
    terms = batch.terms(update)
    loss, grad = total(stack.methods[0], terms)
    outside = terms.mask == 0
    for name in ("logprobs", "rollout_logprobs"):
        bad = getattr(terms, name).detach().masked_fill(outside, poison)
        spoiled = terms.replace(logprobs=terms.logprobs.detach().requires_grad_()).replace(**{name: bad})
        spoiled = spoiled.replace(logprobs=spoiled.logprobs.detach().requires_grad_())
        new_loss, new_grad = total(stack.methods[0], spoiled)
        assert torch.equal(new_loss, loss) and torch.equal(new_grad, grad) and not bool(new_grad[outside].any())


def test_extreme_log_ratios_stay_finite() -> None:
    for current, behavior in ((-1e4, -0.1), (-0.1, -1e4), (-0.1, -math.inf), (-math.inf, -0.1), (math.nan, -0.1)):
        batch = random_batch(16)
        batch.current[0], batch.behavior[0] = current, behavior
        for params in ({}, {"weight_power": "code"}, {"aggregate": "winsorized"}, {"baseline": "none"}):
            loss, grad, metrics, scale = batch.grad(**params)
            assert all(math.isfinite(x) for x in (float(loss), scale, *metrics.values())), (current, behavior, params)
            assert bool(torch.isfinite(grad).all())
        if current > behavior > -math.inf:
            assert metrics["ess_ratio"] == pytest.approx(1 / 10)  # that row owns the step
            assert metrics["weight_mean"] < 8


def test_a_micro_batch_without_tokens_is_zero() -> None:
    batch = random_batch(17)
    update, _, stack = batch.update()
    terms = batch.terms(update).replace(mask=torch.zeros_like(batch.mask))
    loss, grad = total(stack.methods[0], terms)
    assert float(loss) == 0 and not bool(grad.any()) and combine([stack.metrics.take()]) == {}


# ---- configuration


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"gradnorm": "exact"}, "needs the norm of the gradient of each row: a backward pass per row"),
        ({"base_ess_ratio": 0}, "`base_ess_ratio` is 0"),
        ({"base_ess_ratio": 1.5}, "`base_ess_ratio` is 1.5"),
        ({"truncation": 0}, "`truncation` is 0"),
        ({"baseline": "group", "gradnorm": "proxy"}, "`gradnorm` has no effect"),
        ({"lr_scale": "none", "base_ess_ratio": 0.5}, "`base_ess_ratio` has no effect"),
    ],
    ids=str,
)
def test_parameters_out_of_range(params: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build_stack("vcpo", {"vcpo": params})


def test_what_it_asks_of_a_run() -> None:
    always = {"rollout_logprobs", "current_logprobs", "off_policy"}
    assert vcpo().needs == always | {"whole_groups", "several_rollouts"}
    assert vcpo(baseline="group").needs == always | {"several_rollouts"} and vcpo(baseline="none").needs == always
    with pytest.raises(ConfigError, match="`vcpo` and `drpo`|`drpo` and `vcpo`"):
        build_stack(["vcpo", "drpo"])


def test_refusals() -> None:
    def capabilities(missing: Any = None, **changes: Any) -> HostCapabilities:
        option = {"vllm_importance_sampling_correction": True}
        hooks = {"advantages", "shape", "before_update", "policy_loss"}
        return HostCapabilities("trl", "0", hooks, {}, (), missing or {}, None, option, option, **changes)

    assert preflight(build_stack("vcpo"), capabilities()) == {"vllm_importance_sampling_correction": False}
    with pytest.raises(ConfigError, match="tokens that another policy sampled.*: raise num_iterations"):
        preflight(build_stack("vcpo"), capabilities({"off_policy": "raise num_iterations."}))
    with pytest.raises(
        ConfigError, match="`vcpo` holds the weight .*and so does rollout_is=token: it would count twice"
    ):
        preflight(build_stack("vcpo"), capabilities(importance_weights={"rollout_is": "token"}))
    proxy = build_stack("vcpo", {"vcpo": {"gradnorm": "proxy"}})
    with pytest.raises(ConfigError, match="needs sum of the squared probabilities.*: no pass"):
        preflight(proxy, capabilities({"sum_squared_probs": "no pass."}))
