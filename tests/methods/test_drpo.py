"""DRPO (arXiv 2510.04474): the authors' gradients, the whole objective by autograd, and both through the driver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts, Rows, Shape, Terms, Update
from rl_plugins.methods.drpo import Drpo
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_run, make_terms, one_step, start_stack

GOLDEN = Golden("drpo")
WIDTH = 12
NAN = math.nan


def drpo_stack(*others: Method, **params: Any) -> MethodStack:
    method = Drpo(build_params(Drpo.Params, acting(Drpo.Params, params), "drpo"))
    return start_stack(method, *others, run=make_run(max_completion_length=WIDTH))


class Batch:
    """One optimizer step: rollouts, and log-probs of their padded tokens at the current weights and at the start."""

    def __init__(self, rollouts: Rollouts, logprobs: Any, old_logprobs: Any) -> None:
        self.rollouts = rollouts
        self.logprobs = torch.as_tensor(logprobs, dtype=torch.float64)
        self.old_logprobs = torch.as_tensor(old_logprobs, dtype=torch.float64)
        self.mask = (torch.arange(self.logprobs.shape[1])[None] < rollouts.length[:, None]).long()

    @staticmethod
    def random(
        rewards: Sequence[float], group: Sequence[int], seed: int = 0, drift: float = 0.1, width: int = WIDTH
    ) -> Batch:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, width + 1, size=len(rewards)).tolist()
        old = -rng.exponential(size=(len(rewards), width))
        new = old + drift * rng.normal(size=old.shape)
        return Batch(make_rollouts(rewards, group, lengths=lengths), new, old)

    def rows(self, columns: dict[str, Tensor], trained: Tensor | None = None) -> Rows:
        """Row sums over the tokens in the mask, of the rows that are trained."""
        keep = self.rollouts.length > 0 if trained is None else trained
        return Rows(
            group=self.rollouts.group[keep],
            length=self.mask.sum(1)[keep],
            logprobs=(self.logprobs * self.mask).sum(1)[keep],
            old_logprobs=(self.old_logprobs * self.mask).sum(1)[keep],
            columns={k: v[keep] for k, v in columns.items()},
        )

    def update(self, stack: MethodStack, decision: Decision | None = None) -> tuple[Decision, Update, Tensor]:
        """What the driver decides, what `before_update` answers, and which rows are trained."""
        decision = one_step(stack, self.rollouts) if decision is None else decision
        rows = self.rows(decision.row_columns, decision.trained)
        return decision, stack.call("before_update", stack.methods[0], rows), decision.trained

    def loss(self, stack: MethodStack, micro_batches: Sequence[Sequence[int]] | None = None) -> tuple[float, Tensor]:
        """The loss of the optimizer step and its gradient for the log-probs, (rows, time), through Terms, summed over
        micro-batches as the adapters do."""
        _, update, trained = self.update(stack)
        return self.through_terms(stack, update, trained, micro_batches or [range(len(self.rollouts))])

    def through_terms(
        self, stack: MethodStack, update: Update, trained: Tensor, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[float, Tensor]:
        full = {k: torch.zeros(len(trained), dtype=torch.float64) for k in update.columns}
        for k, v in update.columns.items():
            full[k][trained] = v
        mask = self.mask * trained[:, None]
        lp = self.logprobs.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for chosen in micro_batches:
            rows = list(chosen)
            terms = Terms(
                mask=mask[rows],
                logprobs=lp[rows],
                advantages=torch.full((len(rows), mask.shape[1]), NAN),  # the loss must not read them
                old_logprobs=self.old_logprobs[rows],
                num_tokens=mask.sum(),
                num_rows=trained.sum(),
                max_length=WIDTH,
                columns={k: v[rows][:, None] for k, v in full.items()},
            )
            per_token = stack.one("policy_loss", terms)
            total = total + torch.where(terms.mask > 0, per_token, 0.0).sum()  # aggregation = "sum"
        (grad,) = torch.autograd.grad(total, lp)
        return float(total), grad


def whole_objective(
    batch: Batch, outcome: Sequence[int], width: int = WIDTH, official_value: bool = False, **params: Any
) -> tuple[float, Tensor]:
    """The loss as the paper writes it, question by question, and its gradient by autograd; all in float64.

    The authors' loss has the same gradient and another value, which `official_value` gives: tau in the place of
    tau log mean exp, and in the penalty kl_weight excess kl.
    """
    p = Drpo.Params(**acting(Drpo.Params, params))
    lp = batch.logprobs.clone().requires_grad_()
    length = batch.mask.sum(1)
    score = (lp * batch.mask).sum(1) / length.clamp(min=1)
    group = batch.rollouts.group.tolist()
    live = [i for i in range(len(group)) if length[i] > 0]
    questions = sorted({group[i] for i in live})
    objective = torch.zeros((), dtype=torch.float64)
    for q in questions:
        right = [i for i in live if group[i] == q and outcome[i] > 0]
        wrong = [i for i in live if group[i] == q and outcome[i] < 0]
        if not right or not wrong:
            continue
        exponents = [(1 - int(length[i]) / width) / p.length_temperature for i in right]
        weights = [math.exp(e - max(exponents)) for e in exponents]
        for i, w in zip(right, weights, strict=True):
            objective = objective + w / sum(weights) * score[i]
        mean = torch.stack([score[i] / p.score_temperature for i in wrong]).exp().mean()
        objective = objective - p.score_temperature * (1.0 if official_value else mean.log())
    kl = ((batch.old_logprobs - lp) * batch.mask).sum() / batch.mask.sum()
    excess = torch.clamp(kl - p.kl_limit, min=0)
    penalty = p.kl_weight * (excess.detach() * kl if official_value else excess**2 / 2)
    loss = penalty - objective / len(questions)
    (grad,) = torch.autograd.grad(loss, lp)
    return float(loss), grad


def outcomes(rewards: Sequence[float]) -> list[int]:
    return [(r == 1) - (r == 0) for r in rewards]


def random_split(rows: int, seed: int) -> list[list[int]]:
    """All rows in random order, cut at random places."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(rows)
    cuts = np.sort(rng.choice(rows + 1, size=rng.integers(0, rows + 1)))
    return [part.tolist() for part in np.split(order, cuts) if len(part)]


# ---- the authors' numbers and the whole objective


@GOLDEN.kind("log_prob")
def check_gradients(case: Case) -> None:
    """For several splits into micro-batches."""
    inputs, expected = case.inputs, case.expected
    case.params.must_be("kl_type", "kl")
    width = inputs["T_max_response_length"]
    names = {"Lambda": "length_temperature", "tau": "score_temperature", "beta": "kl_weight", "delta": "kl_limit"}
    p = case.build(Drpo, names)
    rollouts = make_rollouts(inputs["reward"], numbers(inputs["uid"]), lengths=inputs["response_lengths"])
    batch = Batch(rollouts, inputs["log_prob"], inputs["old_log_prob"])
    assert batch.logprobs.shape[1] == width
    for seed in (None, 0, 1):
        stack = start_stack(Drpo(p), run=make_run(max_completion_length=width))
        loss, grad = batch.loss(stack, None if seed is None else random_split(len(rollouts), seed))
        torch.testing.assert_close(grad, torch.tensor(expected["grad_log_prob"]).double(), rtol=2e-6, atol=3e-8)
        logged = combine([stack.metrics.take()])
        assert logged["drpo/kl"] == pytest.approx(expected["ppo_kl"], abs=1e-7)
        assert logged["drpo/kl_active"] == expected["kl_violated"]
        reward = outcomes(inputs["reward"])
        assert loss == pytest.approx(whole_objective(batch, reward, width, **asdict(p))[0], rel=1e-12)
        official, _ = whole_objective(batch, reward, width, official_value=True, **asdict(p))
        assert official == pytest.approx(expected["loss_value_official"], rel=2e-6, abs=1e-6)


def numbers(ids: Sequence[Any]) -> list[int]:
    return [list(dict.fromkeys(ids)).index(i) for i in ids]


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_loss_through_terms_is_the_whole_objective_for_any_split(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 16))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.0, 0.5, NAN]), min_size=rows, max_size=rows))
    if all(math.isnan(r) for r in rewards):
        rewards[0] = 1.0
    group = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    params = {
        "length_temperature": data.draw(st.sampled_from([0.005, 0.1, 1.0, math.inf])),
        "score_temperature": data.draw(st.sampled_from([0.05, 1.0, 10.0])),
        "kl_weight": data.draw(st.sampled_from([0.0, 1.0, 1e3])),
        "kl_limit": data.draw(st.sampled_from([0.0, 1e-4, 0.1])),
    }
    batch = Batch.random(rewards, group, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.0, 0.01, 1.0])))
    loss, grad = batch.loss(drpo_stack(**params), random_split(rows, data.draw(st.integers(0, 99))))
    wanted_loss, wanted = whole_objective(batch, outcomes(rewards), **params)
    assert loss == pytest.approx(wanted_loss, rel=1e-11, abs=1e-12)
    torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-13)


def test_coefficients_per_micro_batch_would_be_wrong() -> None:
    """The reason for `before_update`: the same formula inside shuffled micro-batches is another objective."""
    rng = np.random.default_rng(0)
    rewards = (rng.random(64) < 0.4).astype(float).tolist()
    batch = Batch.random(rewards, (np.arange(64) // 8).tolist(), drift=0.02)
    stack = drpo_stack()
    split = np.split(rng.permutation(64), 4)
    loss, grad = batch.loss(stack, split)
    wanted_loss, wanted = whole_objective(batch, outcomes(rewards))
    assert loss == pytest.approx(wanted_loss, rel=1e-12)
    torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-14)

    local = torch.zeros_like(grad)
    for rows in split:
        part = Batch(
            batch.rollouts.subset(_mask(64, rows)), batch.logprobs[sorted(rows)], batch.old_logprobs[sorted(rows)]
        )
        local[sorted(rows)] = part.loss(drpo_stack())[1] / 4  # a mean over micro-batches, as their trainer has it
    assert float((local - wanted).norm() / wanted.norm()) > 0.05


def _mask(n: int, rows: Any) -> Tensor:
    keep = torch.zeros(n, dtype=torch.bool)
    keep[torch.as_tensor(rows)] = True
    return keep


def test_coefficients_follow_the_weights() -> None:
    """Two optimizer steps on one batch: the second one's softmax and hinge are those of the moved policy."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    batch = Batch.random(rewards, [0] * 6, drift=0.0)
    stack = drpo_stack(score_temperature=0.2)
    decision, first, trained = batch.update(stack)
    assert combine([stack.metrics.take()])["drpo/kl"] == 0.0
    batch.logprobs = batch.logprobs - 0.3 * torch.arange(6)[:, None] / 6
    _, second, _ = batch.update(stack, decision)
    logged = combine([stack.metrics.take()])
    tokens = batch.mask.sum(1)
    assert logged["drpo/kl"] == pytest.approx(float((0.05 * torch.arange(6) * tokens).sum() / tokens.sum()))
    wanted = whole_objective(batch, outcomes(rewards), score_temperature=0.2)
    loss, grad = batch.through_terms(stack, second, trained, [[5, 0], [1, 2, 3, 4]])
    assert loss == pytest.approx(wanted[0], rel=1e-12)
    torch.testing.assert_close(grad, wanted[1], rtol=1e-10, atol=1e-14)
    _, stale = batch.through_terms(stack, first, trained, [range(6)])
    assert float((stale - wanted[1]).norm() / wanted[1].norm()) > 0.1


def test_rows_and_tokens_that_left_are_out_of_everything() -> None:
    class Leave(Method):
        """The first row and every third token leave."""

        name = "leave"
        needs = frozenset({"tokens"})

        def shape(self, rollouts, tokens):
            rows = torch.arange(len(rollouts)) > 0
            return Shape(keep_rows=rows, keep_tokens=tokens.position % 3 != 2)

    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    batch = Batch.random(rewards, [0] * 4 + [1] * 4, seed=4)
    stack = drpo_stack(Leave())
    decision = one_step(stack, batch.rollouts)
    assert decision.trained.tolist() == [False] + [True] * 7
    full_length = batch.rollouts.length
    batch.mask = batch.mask * (torch.arange(WIDTH) % 3 != 2)
    _, update, trained = batch.update(stack, decision)
    coefficient = update.columns["drpo_coefficient"] * batch.mask.sum(1)[1:] * 2  # without 1 / (questions L_i)
    kl_part = batch.mask.sum(1)[1:] * 2 * _hinge(batch, trained)
    weight = coefficient - kl_part
    # of group 0 one right answer is left; omega of group 1 still knows the lengths that were generated
    assert float(weight[0]) == pytest.approx(1.0)
    a, b = (1 - int(full_length[i]) / WIDTH for i in (4, 6))
    assert float(weight[3]) == pytest.approx(1 / (1 + math.exp((b - a) / 0.1)))


def _hinge(batch: Batch, trained: Tensor) -> float:
    mask = batch.mask * trained[:, None]
    kl = float(((batch.old_logprobs - batch.logprobs) * mask).sum() / mask.sum())
    return 1e3 * max(kl - 1e-4, 0) / float(mask.sum())


# ---- properties of the specification


def weights(rewards: Sequence[float], group: Sequence[int], batch: Batch, **params: Any) -> Tensor:
    """(rows,) dJ/ds_i times the number of questions, without the trust region."""
    _, update, trained = batch.update(drpo_stack(kl_weight=0.0, **params))
    out = torch.zeros(len(trained), dtype=torch.float64)
    out[trained] = update.columns["drpo_coefficient"] * batch.rollouts.length[trained] * len(set(group))
    return out


def test_right_goes_up_wrong_goes_down_and_they_balance() -> None:
    rng = np.random.default_rng(1)
    for seed in range(20):
        rewards = rng.integers(0, 2, 24).astype(float).tolist()
        group = rng.integers(0, 4, 24).tolist()
        batch = Batch.random(rewards, group, seed)
        w = weights(rewards, group, batch)
        for q in set(group):
            mine = torch.tensor([g == q for g in group])
            right, wrong = mine & (torch.tensor(rewards) == 1), mine & (torch.tensor(rewards) == 0)
            if right.any() and wrong.any():
                assert bool((w[right] > 0).all()) and bool((w[wrong] < 0).all())
                assert float(w[right].sum()) == pytest.approx(1) and float(w[wrong].sum()) == pytest.approx(-1)
            else:
                assert not w[mine].any()


def lengths_batch(rewards: Sequence[float], lengths: Sequence[int], seed: int = 0) -> Batch:
    batch = Batch.random(rewards, [0] * len(rewards), seed)
    return Batch(make_rollouts(rewards, [0] * len(rewards), lengths=lengths), batch.logprobs, batch.old_logprobs)


def test_limits_of_the_temperatures() -> None:
    rewards, group = [1.0, 1.0, 1.0, 0.0, 0.0], [0] * 5
    batch = lengths_batch(rewards, [2, 6, 12, 4, 9])
    score = ((batch.logprobs * batch.mask).sum(1) / batch.mask.sum(1)).tolist()
    hardest = 3 if score[3] > score[4] else 4
    assert weights(rewards, group, batch, length_temperature="inf")[:3].tolist() == pytest.approx([1 / 3] * 3)
    assert weights(rewards, group, batch, length_temperature=1e-3)[:3].tolist() == pytest.approx([1, 0, 0])
    assert weights(rewards, group, batch, score_temperature=1e9)[3:].tolist() == pytest.approx([-0.5] * 2)
    sharp = weights(rewards, group, batch, score_temperature=1e-3)
    assert float(sharp[hardest]) == pytest.approx(-1)
    known = [math.exp((1 - n / WIDTH) / 0.1) for n in (2, 6, 12)]
    assert weights(rewards, group, batch)[:3].tolist() == pytest.approx([k / sum(known) for k in known])


def test_only_differences_of_right_lengths_count_and_shorter_is_never_less() -> None:
    rewards, group = [1.0, 1.0, 1.0, 0.0, 0.0], [0] * 5
    base = weights(rewards, group, lengths_batch(rewards, [2, 4, 7, 3, 5]))[:3]
    assert base.tolist() == sorted(base.tolist(), reverse=True) and base[0] > base[1] > base[2]
    shifted = weights(rewards, group, lengths_batch(rewards, [6, 8, 11, 7, 9]))[:3]
    other_wrong = weights(rewards, group, lengths_batch(rewards, [2, 4, 7, 12, 1]))[:3]
    assert shifted.tolist() == pytest.approx(base.tolist()) and other_wrong.tolist() == pytest.approx(base.tolist())
    equal = weights(rewards, group, lengths_batch(rewards, [5, 5, 5, 2, 9]), length_temperature=0.01)
    assert equal[:3].tolist() == pytest.approx([1 / 3] * 3)


def test_padding_does_not_change_omega() -> None:
    """The length reward is relative to the configured length, not to the width of this batch."""
    rewards = [1.0, 1.0, 0.0]
    batch = lengths_batch(rewards, [2, 4, 3])
    narrow = Batch(batch.rollouts, batch.logprobs[:, :4], batch.old_logprobs[:, :4])
    assert torch.equal(weights(rewards, [0] * 3, batch), weights(rewards, [0] * 3, narrow))


def test_questions_of_one_kind_count_but_teach_nothing() -> None:
    rewards = [1.0, 0.0] + [1.0] * 2 + [0.0] * 2
    batch = Batch.random(rewards, [0, 0, 1, 1, 2, 2], drift=0.0)
    loss, grad = batch.loss(drpo_stack())
    assert not grad[2:].any() and grad[:2].any()
    alone = Batch(batch.rollouts.subset(_mask(6, [0, 1])), batch.logprobs[:2], batch.old_logprobs[:2])
    assert loss == pytest.approx(alone.loss(drpo_stack())[0] / 3)

    nothing = Batch.random([1.0] * 3 + [0.0] * 3, [0] * 3 + [1] * 3, drift=0.0)
    loss, grad = nothing.loss(drpo_stack())
    assert loss == 0.0 and not grad.any()


def test_the_trust_region_is_off_up_to_its_limit() -> None:
    batch = Batch.random([1.0] * 4, [0] * 4, drift=0.0)
    for shift, active in ((0.0, 0.0), (0.05, 0.0), (-0.05, 0.0), (0.2, 1.0)):
        batch.logprobs = batch.old_logprobs - shift  # K is the shift itself
        stack = drpo_stack(kl_limit=0.1, kl_weight=10.0)
        loss, grad = batch.loss(stack)
        assert combine([stack.metrics.take()])["drpo/kl_active"] == active
        assert loss == pytest.approx(5 * max(shift - 0.1, 0) ** 2)
        slope = -10 * max(shift - 0.1, 0) / int(batch.mask.sum())
        torch.testing.assert_close(grad, slope * batch.mask.double())


def test_very_small_length_temperature_does_not_overflow() -> None:
    batch = lengths_batch([1.0, 1.0, 0.0], [1, 12, 3])
    loss, grad = batch.loss(drpo_stack(length_temperature=1e-4, score_temperature=1e-4))
    assert math.isfinite(loss) and bool(torch.isfinite(grad).all())


def test_order_of_rows_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    rewards, group = rng.integers(0, 2, 20).astype(float), rng.integers(0, 3, 20)
    batch = Batch.random(rewards.tolist(), group.tolist())
    loss, grad = batch.loss(drpo_stack())
    order = rng.permutation(20)
    moved = Batch(
        make_rollouts(rewards[order], group[order].tolist(), lengths=batch.rollouts.length[order].tolist()),
        batch.logprobs[order],
        batch.old_logprobs[order],
    )
    moved_loss, moved_grad = moved.loss(drpo_stack())
    assert moved_loss == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(moved_grad, grad[order], rtol=1e-12, atol=1e-16)


# ---- what is right, through the driver


def test_rewards_that_are_neither_and_rows_without_tokens_are_in_no_set(caplog: pytest.LogCaptureFixture) -> None:
    rewards = [1.0, 1.0, 0.0, 0.5, NAN, 0.0]
    rollouts = make_rollouts(rewards, [0] * 6, lengths=[2, 0, 3, 4, 5, 0])
    stack = drpo_stack()
    decision = one_step(stack, rollouts)
    assert decision.row_columns["drpo_outcome"].tolist() == [1, 0, -1, 0, 0, 0]
    assert decision.row_advantages.tolist() == [1, 0, -1, 0, 0, 0]
    assert any("neither 0 nor 1 (here 0.5)" in m and "`threshold`" in m for m in caplog.messages)
    caplog.clear()
    graded = one_step(drpo_stack(threshold=0.5), rollouts)
    assert graded.row_columns["drpo_outcome"].tolist() == [1, 0, -1, 1, 0, 0]
    assert not caplog.messages


def test_a_named_reward_function_says_what_is_right() -> None:
    """A length penalty beside it changes the reward, not what is right."""
    rewards = torch.tensor([[1.0, -0.3], [1.0, -0.9], [0.0, -0.1], [NAN, -0.2], [0.0, -0.5]], dtype=torch.float64)
    rollouts = make_rollouts(rewards, [0] * 5, reward_names=("accuracy", "format"))
    decision = one_step(drpo_stack(reward="accuracy"), rollouts)
    assert decision.row_columns["drpo_outcome"].tolist() == [1, 1, -1, 0, -1]
    withdrawn = rollouts.replace(reward=torch.where(torch.arange(5) == 1, NAN, rollouts.reward))
    decision = one_step(drpo_stack(reward="accuracy"), withdrawn)
    assert decision.row_columns["drpo_outcome"].tolist() == [1, 0, -1, 0, -1]
    with pytest.raises(
        ConfigError, match="`reward` is 'acc', but the reward functions of this run are: accuracy, form"
    ):
        drpo_stack(reward="acc")


def test_advantages_metrics_and_columns_through_the_driver() -> None:
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    rollouts = make_rollouts(rewards, [7, 7, 7, 7, 3, 3], lengths=[3, 5, 9, 6, 2, 4])
    stack = drpo_stack()
    decision = one_step(stack, rollouts)
    omega = 1 / (1 + math.exp((3 - 9) / WIDTH / 0.1))
    assert decision.row_advantages.tolist() == pytest.approx([omega, -0.5, 1 - omega, -0.5, 0, 0])
    assert decision.estimator == "drpo" and decision.stays.all() and decision.trained.all()
    assert set(decision.row_columns) == {"drpo_outcome", "drpo_length_reward"}
    wanted = [1 - n / WIDTH for n in (3, 5, 9, 6, 2, 4)]
    assert decision.row_columns["drpo_length_reward"].tolist() == pytest.approx(wanted)
    assert combine([stack.metrics.take()]) == pytest.approx(
        {"drpo/mixed": 0.5, "drpo/length_right": 6.0, "drpo/length_wrong": 17 / 4}
    )
    batch = Batch.random(rewards, rollouts.group.tolist(), drift=0.5)
    batch.loss(stack)
    logged = combine([stack.metrics.take()])
    assert set(logged) == {
        f"drpo/{n}" for n in ("mixed", "length_right", "length_wrong", "objective", "kl", "kl_active")
    }
    wanted_loss = whole_objective(batch, outcomes(rewards), kl_weight=0.0)[0]
    assert logged["drpo/objective"] == pytest.approx(-wanted_loss)


def test_the_loss_is_one_value_per_token_in_the_models_precision() -> None:
    columns = {"drpo_coefficient": torch.full((4, 1), 0.5), "drpo_loss": torch.full((4, 1), 0.25)}
    terms = make_terms(columns=columns)
    per_token = drpo_stack().one("policy_loss", terms)
    assert per_token.dtype == torch.float32 and torch.equal(per_token, torch.full_like(per_token, 0.25))
    (grad,) = torch.autograd.grad(per_token.sum(), terms.logprobs)
    assert torch.equal(grad, torch.full_like(grad, -0.5))


@pytest.mark.parametrize(
    ("name", "value"),
    [("length_temperature", 0), ("score_temperature", 0), ("score_temperature", "inf"), ("kl_weight", -1),
     ("kl_limit", -1e-9), ("threshold", "half")],
)  # fmt: skip
def test_parameters_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"Method `drpo`: parameter `{name}`"):
        build_stack("drpo", {"drpo": {name: value}})


def test_what_it_asks_of_the_host() -> None:
    stack = build_stack("drpo")
    assert stack.aggregation == "sum"
    assert stack.needs == {"old_logprobs", "current_logprobs", "several_rollouts", "whole_groups"}
    correction = "vllm_importance_sampling_correction"
    missing = {"before_update": "it needs whole groups in every optimizer step."}
    hooks = {"advantages", "shape", "before_update", "policy_loss"}
    host = HostCapabilities("trl", "0", hooks, {}, (), {}, None, {correction: True}, {correction: True})
    assert preflight(stack, host) == {correction: False}
    with pytest.raises(
        ConfigError, match="`drpo` changes `before_update`, and trl cannot do that here: it needs whole"
    ):
        preflight(
            stack, HostCapabilities("trl", "0", hooks - {"before_update"}, missing, (), {}, None, {correction: False})
        )
    with pytest.raises(ConfigError, match="both decide `advantages`"):
        build_stack("drpo, mc_grpo")


def test_the_card_says_which_kl_of_the_authors_is_left_out() -> None:
    assert any("low_var_kl" in d and "not offered" in d for d in card_file(Drpo).disagreements)
