"""What samplers and budgets must have decided, computed anew in plain loops from the rewards of a batch: for TRL's real
trainer and for verl's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from scipy.stats import t as student_t


def by_group(decision: Any, values: Any) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for g, x in zip(decision.rollouts.group.tolist(), values, strict=True):
        found.setdefault(g, []).append(x)
    return dict(sorted(found.items()))


def rewards_of(decision: Any) -> dict[int, list[float]]:
    return by_group(decision, decision.rollouts.reward.tolist())


def centered(decision: Any, spread: Callable[[list[float]], float] = lambda xs: 1.0) -> torch.Tensor:
    """(trained,) rewards minus the mean of their group's trained ones, over a number of the group."""
    r, kept = decision.rollouts, decision.trained.tolist()
    groups = by_group(decision, [x if k else None for x, k in zip(r.reward.tolist(), kept, strict=True)])
    of = {g: [x for x in xs if x is not None] for g, xs in groups.items()}
    trained = [(x, of[g]) for x, g, k in zip(r.reward.tolist(), r.group.tolist(), kept, strict=True) if k]
    return torch.tensor([(x - sum(xs) / len(xs)) / spread(xs) for x, xs in trained], dtype=torch.float64)


def deviation(eps: float) -> Callable[[list[float]], float]:
    return lambda xs: float(torch.tensor(xs, dtype=torch.float64).std()) + eps


def check_dars(decision: Any, n_first: int, n_max: int, threshold: float = 0.5) -> tuple[int, int]:
    """Helpings of schedule et and the groups that left; what was asked for and what was served."""
    success = {g: [float(x >= threshold) for x in xs] for g, xs in rewards_of(decision).items()}
    asked, room = {}, 64
    for g, xs in success.items():
        u = sum(xs[:n_first]) / n_first
        s = 2 * (u or 0.5 / n_first) * (1 - (u or 0.5 / n_first))
        asked[g] = 0 if u >= 0.5 else min(math.ceil((n_first / 2 - n_first * s) / s), n_max - n_first)
        room -= n_first * (asked[g] > 0 or 0 < u < 1)
    given = {g: len(xs) - n_first for g, xs in success.items()}
    assert sum(given.values()) == min(sum(asked.values()), room) and all(given[g] <= asked[g] for g in given)
    assert given == asked or sum(asked.values()) > room
    stays = {g for g, xs in success.items() if 0 < sum(xs) < len(xs)}
    assert decision.trained.tolist() == [g in stays for g in decision.rollouts.group.tolist()]
    assert int(decision.trained.sum()) <= 64
    return sum(asked.values()), sum(given.values())


def check_dynamic_sampling(decision: Any, threshold: float | None = None) -> float:
    """The first 8 groups with unequal rewards, or with successes and failures, are trained, of 8 and as many further
    prompts as they need; rollouts made per row trained."""
    rewards = rewards_of(decision)
    if threshold is not None:
        rewards = {g: [float(x >= threshold) for x in xs] for g, xs in rewards.items()}
    signal = [g for g, xs in rewards.items() if min(xs) < max(xs)]
    prompts = decision.rollouts.prompt_index[decision.rollouts.rollout == 0].tolist()
    assert len(set(prompts)) == len(prompts) == len(rewards) > 8 and len(signal) >= 8
    assert decision.trained.tolist() == [g in signal[:8] for g in decision.rollouts.group.tolist()]
    assert int(decision.trained.sum()) == 64
    return len(decision.rollouts) / 64


def check_brorl(decision: Any) -> None:
    """Groups of one reward leave; one mean and deviation for the batch."""
    rewards = rewards_of(decision)
    assert decision.trained.tolist() == [min(rewards[g]) < max(rewards[g]) for g in decision.rollouts.group.tolist()]
    c = centered(decision)
    torch.testing.assert_close(decision.row_advantages[decision.trained], (c - c.mean()) / (c.std() + 1e-8))


def check_xrpo_phases(decision: Any, exploration: float, threshold: float = 0.5) -> list[tuple[int, int, bool]]:
    """Sizes of three phases, 4 rollouts of 8 prompts first; (group, rollout, whether all before failed) of rows of the
    later ones."""
    rewards, later = rewards_of(decision), []
    order = [*rewards]
    have, drawn = dict.fromkeys(order, 4), 32
    for _ in (2, 3):
        so_far = {g: torch.tensor(rewards[g][: have[g]], dtype=torch.float64) for g in order}
        grown, spread = dict(have), {g: float(x.std()) for g, x in so_far.items()}
        for k in range(16):
            gain = {g: round(_gain(spread[g], grown[g], drawn + k, exploration), 12) for g in order}
            grown[max(order, key=lambda g: (gain[g], -grown[g], -g))] += 1
        failed = {g for g in order if max(rewards[g][: have[g]]) < threshold}
        later += [(g, k, g in failed) for g in order for k in range(have[g], grown[g])]
        have, drawn = grown, drawn + 16
    assert decision.rollouts.groups.size.tolist() == [have[g] for g in order] and len(decision.rollouts) == 64
    return later


def _gain(spread: float, n: int, drawn: int, exploration: float) -> float:
    """What xrpo gains from one more rollout of a prompt."""
    width = [student_t.ppf(0.975, m - 1) * spread / math.sqrt(m) for m in (n, n + 1)]
    return width[0] - width[1] + exploration * math.sqrt(math.log(1 + drawn) / n)


class Cascade:
    """The books of `best_perm` with two hints of the same value, 4 plain rollouts and 2 per try."""

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        self.accepted, self.rejected, self.cascades = [0, 0], [0, 0], 0
        self.orders: set[tuple[int, ...]] = set()

    def check(self, decision: Any) -> list[int | None]:
        """Takes over a batch; the hint of every row, None for plain ones."""
        tries = [a + b for a, b in zip(self.accepted, self.rejected, strict=True)]
        log = 1.5 * math.log(1 + self.cascades)
        u = [min(1, a / n + math.sqrt(log / n)) if n else 1.0 for a, n in zip(self.accepted, tries, strict=True)]
        one, other = sorted((0, 1), key=lambda k: (-u[k], k))  # the likelier first, if it adds anything
        order = (one, other) if u[one] + (1 - u[one]) * u[other] > u[other] else (other,)
        self.orders.add(order)
        hints: list[int | None] = []
        for rewards in rewards_of(decision).values():
            tried, made = 0, 4
            while max(rewards[:made]) < self.threshold and tried < len(order):
                made, tried = made + 2, tried + 1
                k, won = order[tried - 1], max(rewards[made - 2 : made]) >= self.threshold
                self.accepted[k], self.rejected[k] = self.accepted[k] + won, self.rejected[k] + (not won)
            self.cascades += tried > 0
            assert len(rewards) == made
            hints += [None] * 4 + [k for k in order[:tried] for _ in range(2)]
        assert [(p or {}).get("best_perm") for p in decision.rollouts.payload] == hints
        return hints


class Bins:
    """Two bins of difficulty: prompts with a success in more than 0.55 of their earlier batches are in bin 1."""

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        self.outcomes: dict[int, list[bool]] = {}

    def of(self, prompt: int) -> int:
        known = self.outcomes.get(prompt, [])
        return int(bool(known) and sum(known) / len(known) >= 0.55)

    def add(self, decision: Any) -> None:
        """Takes over what a batch says of its prompts."""
        prompts = {g: xs[0] for g, xs in by_group(decision, decision.rollouts.prompt_index.tolist()).items()}
        for g, xs in rewards_of(decision).items():
            self.outcomes.setdefault(prompts[g], []).append(max(xs) >= self.threshold)


class Weighing(Bins):
    """The books of `gdro_prompt`."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__(threshold)
        self.score: dict[int, float] = {}
        self.spread: list[float] = []

    def check(self, decision: Any, base: torch.Tensor) -> None:
        """`base`: (rows,) advantages of the host."""
        r = decision.rollouts
        bins = [self.of(p) for p in r.prompt_index.tolist()]
        present = sorted(set(bins))
        power = {b: math.exp(0.65 * self.score.get(b, 0.0)) for b in present}
        q = {b: 0.99 * power[b] / sum(power.values()) + 0.01 / len(present) for b in present}
        mean = sum(q[b] for b in bins) / len(bins)
        weight = torch.tensor([q[b] / mean for b in bins], dtype=torch.float64)
        torch.testing.assert_close(decision.row_advantages, base * weight, rtol=1e-5, atol=1e-6)
        self.spread.append(float(weight.max() - weight.min()))
        for b in present:
            loss = [1 - x for x, c in zip(r.reward.tolist(), bins, strict=True) if c == b]
            value = sum(loss) / len(loss) / (len(loss) / len(bins))
            self.score[b] = 0.88 * self.score[b] + 0.12 * value if b in self.score else value
        self.add(decision)


class Arms(Bins):
    """The books of `gdro_rollout`: 2 to 24 rollouts for each of 8 prompts, 64 in all; with arm_sign paper and without a
    baseline, so that an arm that was used loses, and others are tried."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__(threshold)
        self.score = {b: dict.fromkeys(range(2, 25), 0.0) for b in (0, 1)}
        self.price = 0.0
        self.sizes: set[tuple[int, ...]] = set()

    def check(self, decision: Any) -> None:
        rewards = rewards_of(decision)
        prompts = {g: xs[0] for g, xs in by_group(decision, decision.rollouts.prompt_index.tolist()).items()}
        bin_of = {g: self.of(p) for g, p in prompts.items()}
        count = {b: list(bin_of.values()).count(b) for b in sorted(set(bin_of.values()))}
        total, best = 8 * len(bin_of), None
        for n in itertools.product(range(2, 25), repeat=len(count)):
            used = sum(m * k for m, k in zip(count.values(), n, strict=True))
            if used <= total:
                value = sum(self._value(b, k, m) for (b, m), k in zip(count.items(), n, strict=True))
                best = max(best or (0, -math.inf, n), (used, value, n), key=lambda found: found[:2])
        assert best is not None
        size = dict(zip(count, best[2], strict=True))
        assert {g: len(xs) for g, xs in rewards.items()} == {g: size[b] for g, b in bin_of.items()}
        self.sizes.add(best[2])
        loss = {b: [1 - x for g, xs in rewards.items() for x in xs if bin_of[g] == b] for b in count}
        for b in count:
            self.score[b][size[b]] += -sum(loss[b]) / len(loss[b]) - self.price * (size[b] - 8)
        self.price += 0.05 * sum(len(xs) - 8 for xs in rewards.values()) / len(rewards)
        self.add(decision)

    def _value(self, b: int, n: int, prompts: int) -> float:
        power = {k: math.exp(0.65 * z) for k, z in self.score[b].items()}
        return math.log(0.99 * power[n] / sum(power.values()) + 0.01 / len(power)) - 1e-9 * prompts * (n - 8) ** 2


def hardest(decisions: list[Any], size: int, threshold: float = 0.5) -> list[int]:
    """What `drive` keeps after these batches: the lowest decayed rates, then few improvements, then the dataset row."""
    known: dict[int, list[float]] = {}  # right, trials, improvements
    for d in decisions:
        prompts = {g: xs[0] for g, xs in by_group(d, d.rollouts.prompt_index.tolist()).items()}
        for g, xs in rewards_of(d).items():
            right, trials, gains = known.get(prompts[g], [0.0, 0.0, 0.0])
            won = sum(x >= threshold for x in xs)
            gained = trials > 0 and won / len(xs) > right / trials
            known[prompts[g]] = [0.5 * right + won, 0.5 * trials + len(xs), 0.5 * gains + gained]
    return sorted(sorted(known, key=lambda i: (known[i][0] / known[i][1], known[i][2], i))[:size])
