"""PPO's outer step (arXiv 2603.06009): what is logged, the term of 0, the plateau test and the cuts."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.losses import aggregate
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rows, Terms
from rl_plugins.methods.ppo_million import CUTS, PpoMillion, plateau, slope_is_positive
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.update import before_update, regularizer
from rl_plugins.testing import make_rollouts, start_stack

NAN = math.nan


def stack_of(**params: Any) -> MethodStack:
    return start_stack(PpoMillion(build_params(PpoMillion.Params, params, "ppo_million")))


def terms_of(lp: Any, old: Any, mask: Any, advantages: Any) -> Terms:
    lp, old, adv = (torch.as_tensor(x, dtype=torch.float64) for x in (lp, old, advantages))
    mask = torch.as_tensor(mask).long()
    return Terms(
        mask=mask,
        logprobs=lp.clone().requires_grad_(),
        advantages=adv,
        old_logprobs=old,
        num_tokens=mask.sum().double(),
        num_rows=(mask.sum(1) > 0).sum().double(),
        max_length=mask.shape[1],
    )


def logged(stack: MethodStack, *micro_batches: Terms) -> dict[str, float]:
    """The metrics of one optimizer step, over its micro-batches."""
    for terms in micro_batches:
        assert float(regularizer(stack, terms).abs().max()) == 0.0
    return {name.partition("/")[2]: value for name, value in combine([stack.metrics.take()]).items()}


def loop(terms: Terms, low: float, high: float) -> dict[str, float]:
    """kl and the clip share token by token, in Python's floats."""
    kl, clipped, tokens = [], 0, 0
    rows = zip(*(x.tolist() for x in (terms.logprobs, terms.old_logprobs, terms.mask, terms.advantages)), strict=True)
    for lp, old, mask, adv in rows:
        for a, b, m, x in zip(lp, old, mask, adv, strict=True):
            if not m:
                continue
            tokens += 1
            log_ratio = min(max(a - b, -20.0), 20.0) if math.isfinite(a - b) else 0.0
            kl.append(math.expm1(log_ratio) - log_ratio)
            clipped += (x > 0 and math.expm1(log_ratio) > high) or (x < 0 and math.expm1(log_ratio) < -low)
    return {"kl": math.fsum(kl) / tokens, "clipped": clipped / tokens} if tokens else {}


# ---- what is logged in the loss


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_kl_and_clip_share_equal_the_loop(data: st.DataObject) -> None:
    rows, time = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    number = st.floats(-4, 4) | st.sampled_from([NAN, math.inf, -math.inf, -40.0])

    def table(element: Any) -> list[list[Any]]:
        return data.draw(st.lists(st.lists(element, min_size=time, max_size=time), min_size=rows, max_size=rows))

    terms = terms_of(table(number), table(number), table(st.integers(0, 1)), table(st.floats(-2, 2)))
    low, high = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 3))
    got = logged(stack_of(clip_low=low, clip_high=high), terms)
    assert got == pytest.approx(loop(terms, low, high), rel=1e-12)


def random_terms(seed: int = 0, rows: int = 8, time: int = 9) -> Terms:
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, time, generator=g, dtype=torch.float64) * 3
    lp = old + 0.4 * torch.randn(rows, time, generator=g, dtype=torch.float64)
    mask = (torch.rand(rows, time, generator=g) < 0.7).long()
    mask[-1] = 0
    return terms_of(lp, old, mask, torch.randn(rows, time, generator=g, dtype=torch.float64))


def test_micro_batches_and_padding_change_nothing() -> None:
    terms = random_terms()
    whole = logged(stack_of(), terms)

    def cut(rows: slice, more: int) -> Terms:
        def pad(x: Any, value: float) -> Any:
            return torch.nn.functional.pad(x.detach()[rows], (0, more), value=value)

        return terms.replace(
            mask=pad(terms.mask, 0),
            logprobs=pad(terms.logprobs, NAN),
            old_logprobs=pad(terms.old_logprobs, math.inf),
            advantages=pad(terms.advantages, 1.0),
        )

    parts = logged(stack_of(), *(cut(slice(i, j), j) for i, j in ((0, 1), (1, 5), (5, 8))))
    assert parts == pytest.approx(whole, rel=1e-12) and whole["kl"] > 0.01 and 0 < whole["clipped"] < 1
    assert whole == pytest.approx(loop(terms, 0.2, 0.2), rel=1e-12)


def test_kl_is_the_expectation_under_the_old_policy() -> None:
    """k3 averaged over the old policy's own tokens is KL(old || live)."""
    old, live = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]))
    drawn = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    terms = terms_of(live[drawn].log()[None], old[drawn].log()[None], torch.ones(1, 10), torch.ones(1, 10))
    assert logged(stack_of(), terms)["kl"] == pytest.approx(float((old * (old / live).log()).sum()), rel=1e-12)
    same = terms_of(old[drawn].log()[None], old[drawn].log()[None], torch.ones(1, 10), torch.ones(1, 10))
    assert logged(stack_of(), same) == {"kl": 0.0, "clipped": 0.0}


def test_the_term_is_zero_and_has_no_gradient() -> None:
    stack, terms = stack_of(), random_terms(1)
    term = regularizer(stack, terms)
    assert not term.requires_grad and torch.equal(term, torch.zeros_like(term))
    loss = (terms.logprobs * terms.advantages).sum()
    added = aggregate(term, terms.mask, "token-mean", num_tokens=terms.num_tokens, num_rows=1.0, max_length=9)
    (plain,) = torch.autograd.grad(loss, terms.logprobs, retain_graph=True)
    (other,) = torch.autograd.grad(loss + added, terms.logprobs)
    assert torch.equal(loss, loss + added) and torch.equal(plain, other)


# ---- the driver


class Drive:
    """Batches one after the other, as an adapter makes them: decide, then the optimizer steps, whose kl is told to the
    next batch."""

    def __init__(self, **params: Any) -> None:
        self.stack = stack_of(**params)
        self.metrics: list[dict[str, float]] = []
        self.scales = [1.0]

    @property
    def state(self) -> dict[str, Any]:
        return self.stack.methods[0].state

    def batch(self, reward: float, kl: float | None, rows: int = 4, ranks: int = 1) -> float:
        """The learning-rate factor of a batch with this mean reward; `kl` is that of its updates."""
        driver = []
        if math.isnan(reward):  # a batch that `decide` would skip: the hooks as they are
            rollouts = make_rollouts([NAN] * rows)
            self.stack.call("observe", self.stack.methods[0], rollouts, None, dict(self.stack.stats))
            self.stack.batch += 1
        else:
            spread = [reward + 0.25 * (-1) ** i for i in range(rows)]
            rollouts = make_rollouts(spread)
            decision = decide(self.stack, rollouts, None, None, grpo_advantages, rows)
            columns = dict(decision.row_columns)
            parts = [Rows(rollouts.group, rollouts.length, columns=columns)] if ranks == 1 else []
            for rank in range(ranks if not parts else 0):
                take = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
                parts.append(
                    Rows(rollouts.group[take], rollouts.length[take], columns={k: v[take] for k, v in columns.items()})
                )
            driver.append(self.stack.metrics.take())
            self.scales = [before_update(self.stack, parts, rank).lr_scale for rank in reversed(range(len(parts)))]
        driver.append(self.stack.metrics.take())
        self.metrics.append({k.partition("/")[2]: v for k, v in combine(driver).items()})
        self.stack.stats = {} if kl is None else {"ppo_million/kl": kl}
        return self.scales[0]


def rising(values: Sequence[float], p: PpoMillion.Params) -> bool:
    if p.test == "halves":
        half = len(values) // 2
        return sum(values[len(values) - half :]) > sum(values[:half]) + 1e-12
    from scipy.stats import linregress

    return bool(linregress(range(len(values)), values, alternative="greater").pvalue < p.alpha)


def cuts_of(rewards: Sequence[float], kls: Sequence[float], p: PpoMillion.Params) -> list[int]:
    """The cuts each batch is trained with, by a plain loop over batches."""
    window: list[tuple[float, float]] = []
    cuts, seen = 0, []
    for k, reward in enumerate(rewards):
        seen.append(cuts)
        if k == 0:
            continue
        window.append((reward, kls[k - 1]))
        if len(window) < p.window:
            continue
        last = window[-p.window :]
        half = p.window // 2
        older, newer = sum(x for _, x in last[:half]) / half, sum(x for _, x in last[-half:]) / half
        moves = older > 0 and newer >= p.kl_share * older
        known = not any(math.isnan(r) for r, _ in last)
        if known and moves and not rising([r for r, _ in last], p) and cuts < p.max_cuts:
            cuts, window = cuts + 1, []
    return seen


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_cuts_equal_the_loop(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 30))
    level = st.integers(0, 6).map(lambda i: i / 8)
    rewards = data.draw(st.lists(level | st.sampled_from([NAN]), min_size=n, max_size=n))
    rewards[0] = 0.0
    kls = data.draw(st.lists(st.sampled_from([0.0, 1 / 64, 1 / 32, 1 / 16]), min_size=n, max_size=n))
    p = {
        "action": "shrink",
        "window": data.draw(st.integers(4, 7)),
        "test": (test := data.draw(st.sampled_from(["slope", "halves"]))),
        "kl_share": data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        "max_cuts": data.draw(st.integers(1, 4)),
        "factor": data.draw(st.sampled_from([2.0, 3.0])),
    }
    if test == "slope":
        p["alpha"] = data.draw(st.sampled_from([0.013, 0.21, 0.47]))
    drive = Drive(**p)
    expected = cuts_of(rewards, kls, drive.stack.methods[0].params)
    for reward, kl, cuts in zip(rewards, kls, expected, strict=True):
        scale = drive.batch(reward, kl)
        if not math.isnan(reward):
            assert scale == pytest.approx(p["factor"] ** -cuts, rel=1e-12)


def test_a_flat_reward_is_cut_once_per_window_and_no_more_than_allowed() -> None:
    drive = Drive(action="shrink", window=4, factor=2.0, max_cuts=3)
    scales = [drive.batch(0.5, 0.01, ranks=2) for _ in range(30)]
    # the first batch has no update before it; then a test after 4 batches, and the cut acts in the next
    assert scales == [1.0] * 5 + [0.5] * 4 + [0.25] * 4 + [0.125] * 17
    assert drive.scales == [0.125, 0.125], "the same on both ranks"
    held = [m.get("plateau") for m in drive.metrics]
    assert held[:5] == [None] * 4 + [1.0] and [m["cuts"] for m in drive.metrics][-1] == 3
    assert drive.metrics[-1]["lr_scale"] == 0.125
    same = Drive(action="shrink", window=4, kl_share=1.0)
    assert min(same.batch(0.5, 1 / 64) for _ in range(6)) == 0.5, "a KL that stays the same still moves"


@pytest.mark.parametrize("test", ["slope", "halves"])
def test_what_rises_or_stands_still_is_left_alone(test: str) -> None:
    for rewards, kls in (
        ([0.1 + 0.02 * k for k in range(20)], [0.01] * 20),  # the reward rises
        ([0.5] * 20, [0.0] * 20),  # nothing moves
        ([0.5] * 20, [0.02 * 0.5**k for k in range(20)]),  # the policy settles by itself
    ):
        drive = Drive(action="shrink", window=6, test=test)
        assert {drive.batch(r, k) for r, k in zip(rewards, kls, strict=True)} == {1.0}


def test_a_batch_without_a_reward_delays_the_cut_until_it_has_left_the_window() -> None:
    drive = Drive(action="shrink", window=4)
    scales = [drive.batch(r, 0.01) for r in [0.5] * 3 + [NAN] + [0.5] * 6]
    assert scales.index(0.5) == 8, "entries 4 to 7 are the first four without NaN"


def test_without_shrink_nothing_is_scaled_and_nothing_is_sent() -> None:
    drive = Drive(window=4)
    assert {drive.batch(0.5, 0.01) for _ in range(12)} == {1.0}
    assert not {"cuts", "plateau", "lr_scale"} & set().union(*drive.metrics)
    decision = decide(drive.stack, make_rollouts([0.0, 1.0, 0.0, 1.0]), None, None, grpo_advantages, 4)
    assert CUTS not in decision.row_columns


def test_samples_and_their_ratio_to_kl() -> None:
    drive = Drive(window=4)
    for rows, kl in ((4, 0.5), (8, 0.25), (4, None), (4, 0.0), (4, 0.1)):
        drive.batch(0.5, kl, rows=rows)
    samples = [m["samples"] for m in drive.metrics]
    assert samples == [10, 20, 10, 10, 10], "tokens of 1, 2, 3 and 4 per four rows"
    ratios = [m.get("samples_per_nat") for m in drive.metrics]
    assert ratios == [None, 20.0, 80.0, None, 1e9], "of the batch before; at kl = 0 the divisor is 1e-8"
    assert drive.metrics[2]["samples_per_nat_mean"] == 50.0
    kept = make_rollouts([0.0, 1.0, 0.0, 1.0], kept=torch.tensor([True, False, True, False]))
    drive.stack.call("observe", drive.stack.methods[0], kept, None, {})
    assert drive.state["samples"] == 4, "rows that left are none"


def test_the_window_keeps_its_last_batches() -> None:
    drive = Drive(window=4)
    for k in range(12):
        drive.batch(k / 16, 0.01 * (k + 1))
    window = drive.state["window"]
    assert window[:, 0].tolist() == [k / 16 for k in (8, 9, 10, 11)]
    assert window[:, 1].tolist() == pytest.approx([0.08, 0.09, 0.1, 0.11])


def test_a_resumed_run_makes_the_same_cuts() -> None:
    whole, parts = Drive(action="shrink", window=5), Drive(action="shrink", window=5)
    g = torch.Generator().manual_seed(0)
    rewards, kls = (0.5 + 0.1 * torch.randn(30, generator=g)).tolist(), [0.01] * 30
    one = [whole.batch(r, k) for r, k in zip(rewards, kls, strict=True)]
    two = [parts.batch(r, k) for r, k in zip(rewards[:13], kls, strict=False)]
    saved = copy.deepcopy(parts.stack.state_dict("data"))
    again = Drive(action="shrink", window=5)
    again.stack.load_state_dict(saved, "data")
    two += [again.batch(r, k) for r, k in zip(rewards[13:], kls[13:], strict=True)]
    assert one == two and min(one) < 1.0


# ---- the plateau test


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(0, 50), min_size=4, max_size=30), alpha=st.floats(0.01, 0.49))
def test_the_slope_test_is_the_textbooks(values: list[int], alpha: float) -> None:
    from scipy.stats import linregress

    y = torch.tensor(values, dtype=torch.float64)
    p = float(linregress(range(len(values)), values, alternative="greater").pvalue)
    if len(set(values)) > 1 and abs(p - alpha) > 1e-9 and p > 1e-12:
        assert slope_is_positive(y, alpha) == (p < alpha)


def test_exact_lines() -> None:
    line = torch.arange(6, dtype=torch.float64)
    assert slope_is_positive(line, 0.05) and not slope_is_positive(-line, 0.05)
    assert not slope_is_positive(torch.ones(6, dtype=torch.float64), 0.05)


def test_halves_leave_out_the_middle() -> None:
    kl = torch.full((5,), 0.1, dtype=torch.float64)
    flat = torch.tensor([0.0, 1.0, 99.0, 1.0, 0.0], dtype=torch.float64)
    assert plateau(flat, kl, "halves", 0.05, 0.5)
    assert not plateau(flat + torch.tensor([0.0, 0, 0, 0, 0.1]), kl, "halves", 0.05, 0.5)


# ---- what is refused


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"action": "grow"}, ["neither host can change its batch", "rl-plugins scale CONFIG --by 2"]),
        ({"action": "anchor"}, ["second set of weights", "`action: shrink`"]),
        ({"factor": 3.0}, ["`factor` has no effect", "acts only if `action` is 'shrink'"]),
        ({"alpha": 0.1, "action": "shrink", "test": "halves"}, ["`alpha` has no effect"]),
        ({"window": 3}, ["window", ">= 4"]),
    ],
)
def test_refusals(params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        build_stack(["ppo_million"], {"ppo_million": params})
    for word in words:
        assert word in str(e.value)
