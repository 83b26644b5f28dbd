"""D3S's mechanism, measured: how strong is the gradient of what it keeps, and what is learned per token updated?

    python examples/evidence/d3s.py --seeds 8 --out evidence-results

A softmax policy writes 6 digits (of 5) for each of 32 prompts, position by position; 16 rollouts per prompt. The reward
is 1 if at least half of the digits are right, else 0. Some digits are known from the start (low entropy), others not.

Gradient. One batch at the start: norm of the mean gradient over kept tokens, relative to that of all tokens, for D3S
and for as many random tokens.

Learning. 120 updates with Adam and clipped gradient norm. Arms: GRPO on everything; D3S with its default schedule; with
the starting shares throughout; its row level only; its token level only; and as many random tokens as D3S keeps. Shown
is the share of right digits over updates and over updated tokens.

D3S is the method itself, through the driver, behind the estimator of rl_plugins. Intervals are 95 % Student intervals
over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import across, arguments, corner_legend, named, record, save, summary
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.rollouts import Rollouts, Shape, Tokens
from rl_plugins.lab.compare.figures import line, panels
from rl_plugins.methods.d3s import D3s
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack

PROMPTS, GROUP, DIGITS, VALUES, UPDATES = 32, 16, 6, 5, 120
FIXED = {"group_rows_end": 0.5, "batch_rows_end": 0.25, "tokens_end": 0.2}
ROWS_ONLY = {"tokens_start": 1.0}
TOKENS_ONLY = {"group_rows_start": 1.0, "batch_rows_start": None}
ARMS = ("GRPO", "D3S", "D3S, no schedule", "D3S, rows only", "D3S, tokens only", "random tokens")


class RandomTokens(D3s):
    """As many tokens as D3S keeps, drawn at random."""

    name = "random_tokens"

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        kept = super().shape(rollouts, tokens).keep_tokens
        assert kept is not None
        return Shape(keep_tokens=kept[torch.from_numpy(self.rng("tokens").permutation(len(kept)))])


def make_stack(arm: str, seed: int) -> MethodStack:
    run = make_run(total_batches=UPDATES, group_size=GROUP, max_completion_length=DIGITS)
    if arm == "GRPO":
        return start_stack(seed=seed, run=run)
    if arm == "random tokens":
        return start_stack(RandomTokens(), seed=seed, run=run)
    params = {"D3S, no schedule": FIXED, "D3S, rows only": ROWS_ONLY, "D3S, tokens only": TOKENS_ONLY}.get(arm, {})
    return start_stack(D3s(D3s.Params(**params)), seed=seed, run=run)


class Task:
    """Prompts with a right digit at every place, a policy, and rollouts of it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 8])
        self.right = self.rng.integers(0, VALUES, (PROMPTS, DIGITS))
        logits = np.zeros((PROMPTS, DIGITS, VALUES))
        known = self.rng.random((PROMPTS, DIGITS)) < 0.4
        at = np.ix_(np.arange(PROMPTS), np.arange(DIGITS))
        logits[at[0], at[1], self.right] = np.where(known, 4.0, 0.0)
        self.logits = torch.tensor(logits, requires_grad=True)
        self.prompt = np.repeat(np.arange(PROMPTS), GROUP)

    def batch(self, stack: MethodStack) -> tuple[Decision, Tensor]:
        """Decisions on a new batch, and the log-probs of its tokens with gradient, (tokens,)."""
        policy = torch.softmax(self.logits.detach(), 2)
        drawn = self.rng.random((len(self.prompt), DIGITS, 1)) > policy.numpy().cumsum(2)[self.prompt]
        digit = drawn.sum(2).clip(max=VALUES - 1)
        reward = ((digit == self.right[self.prompt]).mean(1) >= 0.5).astype(float)
        rollouts = make_rollouts(reward, self.prompt.tolist(), lengths=[DIGITS] * len(reward), batch=stack.batch)
        entropy = -(policy * torch.log(policy.clamp(min=1e-30))).sum(2)
        decision = one_step(stack, rollouts, make_tokens(rollouts, entropies=entropy[self.prompt].flatten().float()))
        place = torch.arange(DIGITS).expand(len(self.prompt), DIGITS)
        logprobs = torch.log_softmax(self.logits, 2)[
            torch.from_numpy(self.prompt)[:, None], place, torch.from_numpy(digit)
        ]
        return decision, logprobs.flatten()

    def loss(self, decision: Decision, logprobs: Tensor) -> Tensor:
        return -(decision.advantages * logprobs)[decision.keep_tokens].sum() / decision.keep_tokens.sum()

    def accuracy(self) -> float:
        """Expected share of right digits, in percent."""
        policy = torch.softmax(self.logits.detach(), 2).numpy()
        return 100 * float(np.take_along_axis(policy, self.right[..., None], 2).mean())


def gradient_ratio(arm: str, seed: int) -> float:
    """Norm of the mean gradient over kept tokens, relative to all tokens of the same batch."""
    norms = []
    for name in ("GRPO", arm):
        task = Task(seed)
        decision, logprobs = task.batch(make_stack(name, seed))
        (grad,) = torch.autograd.grad(task.loss(decision, logprobs), task.logits)
        norms.append(float(grad.norm()))
    return norms[1] / norms[0]


def learn(arm: str, seed: int) -> tuple[list[float], list[float]]:
    """Accuracy after every update, and tokens updated so far, in thousands."""
    task, stack = Task(seed), make_stack(arm, seed)
    adam = torch.optim.Adam([task.logits], lr=0.03)
    accuracy, tokens = [task.accuracy()], [0.0]
    for _ in range(UPDATES):
        decision, logprobs = task.batch(stack)
        adam.zero_grad()
        task.loss(decision, logprobs).backward()
        torch.nn.utils.clip_grad_norm_([task.logits], 1.0)
        adam.step()
        stack.metrics.take()
        accuracy.append(task.accuracy())
        tokens.append(tokens[-1] + float(decision.keep_tokens.sum()) / 1000)
    return accuracy, tokens


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "d3s",
        "accuracy after 20 % of GRPO's tokens",
        "higher",
        r["D3S"]["at_20_percent_of_the_tokens"],
        r["GRPO"]["at_20_percent_of_the_tokens"],
        baseline="GRPO",
        unit="%",
    )
    yield record(
        "d3s",
        "accuracy after equally many updates",
        "higher",
        r["D3S"]["final"],
        r["GRPO"]["final"],
        baseline="GRPO",
        unit="%",
        budget="updates",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=8)
    start = time.time()
    result: dict = {"seeds": args.seeds, "gradient_ratio": {}, "accuracy": {}, "curves": {}}
    everything = PROMPTS * GROUP * DIGITS * UPDATES / 1000
    budget = 0.2 * everything
    print(f"{'arm':20}{'gradient norm':>18}{'accuracy %':>16}{'at 20 % tokens':>18}{'tokens used %':>16}")
    for arm in ARMS:
        ratio = summary([gradient_ratio(arm, seed) for seed in range(args.seeds)])
        runs = [learn(arm, seed) for seed in range(args.seeds)]
        final = summary([a[-1] for a, _ in runs])
        early = summary([float(np.interp(budget, t, a)) for a, t in runs])
        used = summary([100 * t[-1] / everything for _, t in runs])
        result["gradient_ratio"][arm] = ratio
        result["accuracy"][arm] = {"final": final, "at_20_percent_of_the_tokens": early, "tokens_used_percent": used}
        result["curves"][arm] = {
            "accuracy": np.mean([a for a, _ in runs], axis=0).tolist(),
            "thousand_tokens": np.mean([t for _, t in runs], axis=0).tolist(),
        }
        cells = "".join(f"{c['mean']:>12.1f} +-{c['ci95']:<3.1f}" for c in (final, early))
        print(f"{arm:20}{ratio['mean']:>11.2f} +-{ratio['ci95']:.2f}{cells}{used['mean']:>12.1f}")
    save(args.out, "d3s", result, lambda: plot(result), start, records=records(result["accuracy"]), where="d3s-3-seeds")


def plot(result: dict) -> Figure:
    figure, (updates, tokens, norm) = panels(3)
    for i, arm in enumerate(ARMS):
        curve = result["curves"][arm]
        updates.plot(curve["accuracy"], label=arm, **line(i))
        tokens.plot(curve["thousand_tokens"], curve["accuracy"], label=arm, **line(i))
    named(updates, "optimizer step", "right digits (%)")
    named(tokens, "tokens trained (thousands)", "right digits (%)")
    across(norm, ARMS, [result["gradient_ratio"][arm] for arm in ARMS], "first gradient norm / that of all tokens")
    corner_legend(figure, updates)
    return figure


if __name__ == "__main__":
    main()
