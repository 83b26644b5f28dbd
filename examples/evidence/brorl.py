"""BroRL's mechanism, measured: what part of an update moves correct tokens the wrong way, and how it falls with N.

    python examples/evidence/brorl.py --seeds 10 --out evidence-results

Mass balance. One place with a softmax over 1000 tokens, p ~ Dirichlet(0.1), 5 % of them correct, rewards 1 and -1. N
tokens are sampled, and the change of the probability of all correct tokens is split into the part of the sampled
tokens, which is never negative, and the coupling of those that were not sampled (`mass_balance`). Shown are the median
of |coupling| / sampled part, the share of draws whose whole change is negative, and the share of draws in which a
single sampled correct token loses probability.

Signal. 256 prompts with heavy-tailed success rates, Beta(0.25, 1), N rollouts each: the share of groups with unequal
rewards (those that dynamic sampling keeps). And with the same number of rollouts, 4096 and at most 256 prompts: how
many groups are kept of how many prompts.

Unseen answers. The Good-Turing estimate that the method logs against the true probability of the answers that a group
of N did not find; answers are Zipf-distributed over 200.

The numbers come from the method itself through the driver. Intervals are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import arguments, named, points, record, save, summary
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods.brorl import BroRL
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_rollouts, one_step, start_stack

SIZES = (4, 16, 64, 256, 1024, 4096)
GROUP_SIZES = (4, 16, 64, 256, 512)
TOKENS, CORRECT, DRAWS = 1000, 0.05, 200
ROLLOUTS, PROMPTS, ANSWERS = 4096, 256, 200


@dataclass(frozen=True)
class MassBalance:
    """What one update does to the probability of all correct tokens, to first order in eta.

    Attributes:
        reward: S_R, mean reward under p of the sampled tokens.
        step: dz, the change of each logit.
        sampled_correct, sampled_wrong: never negative for right >= 0 >= wrong.
        unsampled: can be negative; goes to 0 as fewer tokens are left unsampled.
        total: their sum, the change of the probability.
    """

    reward: Tensor
    step: Tensor
    sampled_correct: Tensor
    sampled_wrong: Tensor
    unsampled: Tensor
    total: Tensor


def mass_balance(
    p: Tensor, correct: Tensor, sampled: Tensor, right: float = 1.0, wrong: float = -1.0, eta_over_n: float = 1.0
) -> MassBalance:
    """Theorem 1 of the paper: a softmax over tokens, whose logits go up the gradient of the reward of sampled tokens.

        S_R = R_c sum_{S, C} p + R_w sum_{S, W} p,   dz_j = (eta / N) p_j (R_j 1[j in S] - S_R)
        dQ  = (eta / N) [(R_c - S_R) Q_W A2 + (S_R - R_w) Q_C B2 + S_R (Q_C U_W2 - Q_W U_C2)]

    C are the correct tokens, W the others, S the sampled ones and U the rest. Q is a sum of p; A2, B2, U_C2, U_W2 are
    sums of p^2 over S and C, S and W, U and C, U and W. Only the whole of the correct tokens is protected: a single one
    can lose probability for any N.

    Args:
        p: (..., tokens) probabilities that sum to 1. correct, sampled: (..., tokens) bool, C and S. right, wrong: R_c
        and R_w, rewards of correct and other tokens. eta_over_n: learning rate / number of samples.

    Returns:
        Numbers (...,) float64, and `step` (..., tokens).

    Raises:
        ValueError: shapes differ, or probabilities do not sum to 1.
    """
    if p.shape != correct.shape or p.shape != sampled.shape:
        raise ValueError(
            f"p, correct and sampled are {tuple(p.shape)}, {tuple(correct.shape)} and {tuple(sampled.shape)}; they "
            f"must have the same shape."
        )
    p = p.double()
    if bool(((p.sum(-1) - 1).abs() > 1e-6).any()):
        raise ValueError(f"p sums to {float(p.sum(-1).flatten()[0]):g}; probabilities of one place must sum to 1.")

    def over(values: Tensor, *masks: Tensor) -> Tensor:
        for mask in masks:
            values = torch.where(mask, values, 0.0)
        return values.sum(-1)

    reward = right * over(p, sampled, correct) + wrong * over(p, sampled, ~correct)
    of_token = torch.where(correct, p.new_tensor(right), p.new_tensor(wrong))
    step = eta_over_n * p * (torch.where(sampled, of_token, 0.0) - reward[..., None])
    q_correct, q_wrong = over(p, correct), over(p, ~correct)
    sampled_correct = eta_over_n * (right - reward) * q_wrong * over(p**2, sampled, correct)
    sampled_wrong = eta_over_n * (reward - wrong) * q_correct * over(p**2, sampled, ~correct)
    coupling = q_correct * over(p**2, ~sampled, ~correct) - q_wrong * over(p**2, ~sampled, correct)
    unsampled = eta_over_n * reward * coupling
    return MassBalance(
        reward, step, sampled_correct, sampled_wrong, unsampled, sampled_correct + sampled_wrong + unsampled
    )


def share_trained(steps: int, prompts: int, n: int, sampled: float) -> float:
    """Share of the sampled rows that a run trained whose batches were filled again after dynamic sampling."""
    return steps * prompts * n / sampled


def balance(n: int, seed: int) -> dict[str, float]:
    """Of DRAWS places: medians and shares of the mass balance."""
    rng = np.random.default_rng([seed, n])
    p = rng.dirichlet([0.1] * TOKENS, size=DRAWS)
    correct = rng.random((DRAWS, TOKENS)) < CORRECT
    sampled = np.stack([np.bincount(rng.choice(TOKENS, n, p=row), minlength=TOKENS) > 0 for row in p])
    masks = torch.from_numpy(correct), torch.from_numpy(sampled)
    found = mass_balance(torch.from_numpy(p), *masks, eta_over_n=1 / n)
    good = found.sampled_correct + found.sampled_wrong
    # first-order change of each token's probability: p_i (dz_i - sum_j p_j dz_j)
    moved = found.step - (torch.from_numpy(p) * found.step).sum(-1, keepdim=True)
    loser = (moved < 0) & masks[0] & masks[1]
    return {
        "ratio": float((found.unsampled.abs() / good).median()),
        "negative": 100 * float((found.total < 0).double().mean()),
        "single_loses": 100 * float(loser.any(-1).double().mean()),
    }


def signal(n: int, seed: int) -> dict[str, float]:
    """What one batch of PROMPTS groups of n and one of ROLLOUTS rollouts has."""
    rng = np.random.default_rng([seed, 1])
    rate = rng.beta(0.25, 1.0, size=PROMPTS)
    logged, _ = batch(np.repeat(np.arange(PROMPTS), n), rate, rng)
    order = rng.permutation(PROMPTS)[: max(1, ROLLOUTS // n)]
    _, kept = batch(np.repeat(order, n), rate, rng)
    return {"signal": 100 * logged["brorl/signal"], "groups": float(len(kept)), "all": float(len(order))}


def batch(prompt: np.ndarray, rate: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, float], set[int]]:
    """What the method logs of these rollouts, and the prompts it keeps."""
    stack = start_stack(BroRL())
    rewards = (rng.random(len(prompt)) < rate[prompt]).astype(float)
    rollouts = make_rollouts(rewards, prompt.tolist(), lengths=[1] * len(prompt), text=["a"] * len(prompt))
    decision = one_step(stack, rollouts)
    return combine([stack.metrics.take()]), set(decision.rollouts.group[decision.trained].tolist())


def unseen(n: int, seed: int) -> dict[str, float]:
    """Estimated and true probability of the answers a group did not find, mean over 64 groups."""
    rng = np.random.default_rng([seed, 2, n])
    p = 1 / np.arange(1, ANSWERS + 1)
    p /= p.sum()
    made = rng.choice(ANSWERS, size=(64, n), p=p)
    stack = start_stack(BroRL(BroRL.Params(dynamic_sampling=False)))
    rewards = (made.ravel() == 0).astype(float)
    text = [str(a) for a in made.ravel().tolist()]
    one_step(stack, make_rollouts(rewards, group_size=n, lengths=[1] * made.size, text=text))
    logged = combine([stack.metrics.take()])
    return {
        "estimate": logged["brorl/unseen_mass"],
        "true": float(np.mean([1 - p[np.unique(row)].sum() for row in made])),
        "answers": logged["brorl/distinct_answers"],
    }


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "brorl",
        "updates that lower the probability of all right tokens, simulated, 4 rollouts against 16",
        "lower",
        r["balance"]["4"]["negative"],
        r["balance"]["16"]["negative"],
        baseline="16 rollouts",
        unit="%",
    )
    yield record(
        "brorl",
        "groups with a signal among 4096 rollouts, simulated, 512 per prompt",
        "higher",
        r["signal"]["512"]["groups"],
        r["signal"]["16"]["groups"],
        baseline="16 per prompt",
    )


def main() -> None:
    args = arguments(__doc__, seeds=10)
    start = time.time()
    result: dict = {"seeds": args.seeds}
    for name, measure, sizes in (
        ("balance", balance, SIZES),
        ("signal", signal, GROUP_SIZES),
        ("unseen", unseen, GROUP_SIZES),
    ):
        result[name] = {}
        for n in sizes:
            runs = [measure(n, seed) for seed in range(args.seeds)]
            cells = {key: summary([run[key] for run in runs]) for key in runs[0]}
            result[name][str(n)] = cells
            texts = (f"{k} {c['mean']:.5g} +- {c['ci95']:.2g}" for k, c in cells.items())
            print(f"{name:8} N={n:<5} {'   '.join(texts)}")
    save(args.out, "brorl", result, lambda: plot(result), start, records=records(result), where="brorl-10-seeds")


def plot(result: dict) -> Figure:
    figure, (balance, signal, unseen) = panels(3)

    def draw_line(axis: Axes, table: str, key: str, label: str, i: int) -> None:
        points(axis, [int(n) for n in result[table]], [c[key] for c in result[table].values()], label, i)
        axis.set_xscale("log", base=2)

    draw_line(balance, "balance", "ratio", "_", 0)
    balance.set_yscale("log")
    named(
        balance, "N, rollouts per prompt", "median |coupling| / sampled part", "One update, softmax over 1,000 tokens"
    )
    draw_line(signal, "signal", "signal", "_", 0)
    named(signal, "N, rollouts per prompt", "groups with unequal rewards (%)", "Heavy-tailed success rates")
    draw_line(unseen, "unseen", "true", "true", 0)
    draw_line(unseen, "unseen", "estimate", "Good-Turing estimate", 1)
    named(unseen, "N, rollouts per prompt", "probability", "Answers not found among N")
    unseen.legend()
    return figure


if __name__ == "__main__":
    main()
