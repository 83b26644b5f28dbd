"""VCPO (arXiv 2602.17616): does its baseline lower the variance of stale gradients, does its learning rate help?

A tabular bandit of sequences: logits[t, token], vocabulary 8, at most 12 tokens; the last token of the vocabulary ends
a row. The reward is the share of the 12 places that hold the token of a target string, so longer rows earn more and
rows have different lengths. The expected reward is exact.

1. Variance. 2,000 resamples of 4 groups of 8 rows from the policy `d` updates ago, at two pairs (policy, older policy)
   of one training run per seed. The gradient is the real method's (its coefficients times the score of each row),
   without division by the deviation; weights truncated at 8 or not. Measured: trace of the covariance over resamples,
   relative to that with the group mean; and the cosine of the mean with the on-policy gradient of the same objective
   (200,000 rows). `exact norms` has the norm of each row's own score in place of the stand-ins, which no host can
   compute (in a tabular policy the proxy equals it); `of the update` has wbar / L inside of the norm.
2. Learning rate: the effective share of 32 rows and the factor on the learning rate (sqrt), for the same pairs.
3. Training with Adam on rollouts d updates old: truncated weights of rows alone (`no scaling`), with the learning rate,
   with the baseline, with both; and PPO's clip around the policy that sampled (GRPO). Final and mean expected reward,
   and the share of seeds that end below 90 % of their own best.

    python examples/evidence/vcpo.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from common import arguments, interval, named, points, record, save
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.groups import Groups
from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rows
from rl_plugins.lab.compare.figures import line, name_lines, panels
from rl_plugins.methods.vcpo import Vcpo, ess_ratio, lr_factor, weighted_baseline
from rl_plugins.testing import make_rollouts, make_tokens, start_stack

VOCAB, LENGTH, GROUPS, GROUP = 8, 12, 4, 8
ROWS = GROUPS * GROUP
RESAMPLES = 2000
DELAYS = (0, 1, 4, 16, 32)
CHECKPOINTS, PATH_RATE = (40, 100), 0.05
STEPS, RATES = 200, {"small": 0.05, "large": 0.3}


class Task:
    """The bandit. Policies are logits (LENGTH, VOCAB) float64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.target = torch.randint(VOCAB - 1, (LENGTH,), generator=self.generator)

    def start(self) -> Tensor:
        logits = 0.3 * torch.randn(LENGTH, VOCAB, generator=self.generator, dtype=torch.float64)
        logits[:, -1] -= 0.5  # rows of about half the length
        return logits

    def sample(self, logits: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Tokens and mask, (rows, LENGTH) each; the token that ends a row belongs to it."""
        tokens = torch.multinomial(logits.softmax(-1), rows, replacement=True, generator=self.generator).T
        ended = (tokens == VOCAB - 1).cumsum(1)
        return tokens, (ended - (tokens == VOCAB - 1).long() == 0).double()

    def reward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return ((tokens == self.target) * mask).mean(1)

    def value(self, logits: Tensor) -> float:
        """Exact expected reward."""
        p = logits.softmax(-1)
        alive = torch.cat([torch.ones(1, dtype=torch.float64), (1 - p[:-1, -1]).cumprod(0)])
        return float((alive * p[torch.arange(LENGTH), self.target]).mean())


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1)[torch.arange(LENGTH), tokens]


def score(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """(rows, LENGTH, VOCAB) d sum_t lp / d logits of every row."""
    return (torch.nn.functional.one_hot(tokens, VOCAB) - logits.softmax(-1)) * mask[..., None]


class Step:
    """What the driver of the real method gives and gets, on rows that are groups of GROUP."""

    def __init__(self, logits: Tensor, behavior: Tensor, tokens: Tensor, mask: Tensor, reward: Tensor) -> None:
        self.length = mask.sum(1).long()
        self.rollouts = make_rollouts(reward, group_size=GROUP, lengths=self.length.tolist())
        self.now, self.then = ((logprobs(x, tokens) * mask).sum(1) for x in (logits, behavior))
        self.logits, self.tokens, self.live = logits, tokens, mask > 0

    def coefficients(self, stack: Any) -> tuple[Tensor, float]:
        """(rows,) A wbar / (B L) of every row, and the factor on the learning rate."""
        method, given = stack.methods[0], None
        if "tokens" in method.needs:
            square = (self.logits.softmax(-1) ** 2).sum(-1).expand(self.live.shape)
            old = logprobs(self.logits, self.tokens)
            given = make_tokens(
                self.rollouts, old_logprobs=old[self.live].float(), sum_squared_probs=square[self.live].float()
            )
        columns = method.shape(self.rollouts, given).row_columns
        rows = Rows(self.rollouts.group, self.length, logprobs=self.now, rollout_logprobs=self.then, columns=columns)
        update = method.before_update(rows)
        stack.metrics.take()
        return update.columns["vcpo_coefficient"].double(), update.lr_scale


def stack_of(params: dict[str, Any]) -> Any:
    return start_stack(Vcpo(build_params(Vcpo.Params, params, "vcpo")))


ARMS: dict[str, dict[str, Any]] = {
    "none": {"baseline": "none"},
    "group mean": {"baseline": "group"},
    "opob, length": {},
    "opob, proxy": {"gradnorm": "proxy"},
    "opob, length, as in the code": {"weight_power": "code", "truncation": 8.0},
    "opob, length, unweighted": {"weight_power": "none"},
    "opob, length / L": {"normalize_by_length": True},
}


def variance(seed: int) -> tuple[dict[tuple[str, int, str], dict[str, float]], dict[int, dict[str, float]]]:
    """Parts 1 and 2, means over the checkpoints."""
    task = Task(seed)
    path, _ = train(task, "reference", 0, PATH_RATE, max(CHECKPOINTS))
    found: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    share: dict[int, list[dict[str, float]]] = {}
    n = RESAMPLES * ROWS
    for at in CHECKPOINTS:
        exact = exact_gradient(task, path[at])
        for delay in DELAYS:
            logits, behavior = path[at], path[at - delay]
            tokens, mask = task.sample(behavior, n)
            reward, length = task.reward(tokens, mask), mask.sum(1)
            step = Step(logits, behavior, tokens, mask, reward)
            s = score(logits, tokens, mask).flatten(1)
            log_w = ((logprobs(logits, tokens) - logprobs(behavior, tokens)) * mask).sum(1)
            ratios = [ess_ratio(x) for x in log_w.view(-1, ROWS)]
            share.setdefault(delay, []).append(
                {
                    "effective share": float(np.mean(ratios)),
                    "learning rate": float(np.mean([lr_factor(r, 1.0, "sqrt") for r in ratios])),
                    "share of the largest weight": float(log_w.view(-1, ROWS).softmax(1).amax(1).mean()),
                }
            )
            for bound in ("truncated", "exact weights"):
                limit = {"norm_by_std": False, "truncation": 8.0 if bound == "truncated" else "inf"}
                made = {name: n * step.coefficients(stack_of({**limit, **params}))[0] for name, params in ARMS.items()}
                wbar = torch.exp(log_w.clamp(max=math.log(8.0)) if bound == "truncated" else log_w)
                square = (s**2).sum(1)
                groups = Groups(torch.arange(n) // GROUP)
                for name, log_weight in {
                    "opob, exact norms": 2 * log_w + torch.log(square),
                    "opob, norms of the update": torch.log(square * (wbar / length) ** 2),
                }.items():
                    b = weighted_baseline(groups, reward, log_weight, torch.ones(n, dtype=torch.bool), "mean")
                    made[name] = (reward - groups.rows(b)) * wbar / length
                base = None
                for name in ("group mean", *(x for x in made if x != "group mean")):
                    g = torch.bmm(made[name].view(RESAMPLES, 1, ROWS) / ROWS, s.view(RESAMPLES, ROWS, -1))[:, 0]
                    trace = float(g.var(0).sum())
                    base = trace if base is None else base
                    cosine = float(torch.nn.functional.cosine_similarity(g.mean(0), exact, dim=0))
                    found.setdefault((name, delay, bound), []).append(
                        {"relative variance": trace / base, "cosine of the mean": cosine}
                    )

    def mean(xs: list[dict[str, float]]) -> dict[str, float]:
        return {k: float(np.mean([x[k] for x in xs])) for k in xs[0]}

    return {k: mean(v) for k, v in found.items()}, {k: mean(v) for k, v in share.items()}


def exact_gradient(task: Task, logits: Tensor) -> Tensor:
    """Of the expected reward with 1/L on each row, from 200,000 on-policy rows and the best constant of it."""
    tokens, mask = task.sample(logits, 200_000)
    reward, s = task.reward(tokens, mask), score(logits, tokens, mask).flatten(1)
    return (((reward - reward.mean()) / mask.sum(1))[:, None] * s).mean(0)


TRAINED: dict[str, dict[str, Any] | None] = {
    "reference": {"baseline": "group", "lr_scale": "none"},
    "no scaling": {"baseline": "group", "lr_scale": "none"},
    "learning rate": {"baseline": "group"},
    "baseline": {"lr_scale": "none"},
    "both": {},
    "GRPO": None,
}


def train(task: Task, name: str, delay: int, rate: float, steps: int) -> tuple[list[Tensor], list[float]]:
    """Adam on rollouts `delay` updates old; all policies and their exact expected rewards."""
    logits, params = task.start().requires_grad_(), TRAINED[name]
    stack = None if params is None else stack_of(params)
    optimizer, history = torch.optim.Adam([logits], lr=rate), [logits.detach().clone()]
    for step in range(steps):
        now, behavior = history[-1], history[max(0, step - delay)]
        tokens, mask = task.sample(behavior, ROWS)
        reward, scale = task.reward(tokens, mask), 1.0
        if stack is None:
            lp = logprobs(logits, tokens)
            rollouts = make_rollouts(reward, group_size=GROUP)
            centered, std = rollouts.groups.center_and_std(reward, ddof=0)
            a = centered / rollouts.groups.rows(torch.where(std > 1e-8, std, 1.0))
            per_token = ppo_clip(lp, logprobs(behavior, tokens), a[:, None].expand_as(lp))
            loss = ((per_token * mask).sum(1) / mask.sum(1)).mean()
            (logits.grad,) = torch.autograd.grad(loss, logits)
        else:
            c, scale = Step(now, behavior, tokens, mask, reward).coefficients(stack)
            logits.grad = -(c[:, None, None] * score(now, tokens, mask)).sum(0)
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        optimizer.step()
        history.append(logits.detach().clone())
    return history, [task.value(h) for h in history]


def trained(seed: int) -> dict[tuple[str, str, int], list[float]]:
    """Part 3: the expected reward after every update."""
    return {
        (size, name, delay): train(Task(seed), name, delay, rate, STEPS)[1]
        for size, rate in RATES.items()
        for name in TRAINED
        if name != "reference"
        for delay in DELAYS
    }


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "vcpo",
        "variance of the gradient, rollouts 16 updates old, relative to the group mean",
        "lower",
        difference=r["gradient"]["relative variance"]["opob, length, d=16, truncated"],
        baseline="the group mean's",
        none=1,
    )
    yield record(
        "vcpo",
        "variance of the gradient, fresh rollouts, relative to the group mean",
        "lower",
        difference=r["gradient"]["relative variance"]["opob, length, d=0, truncated"],
        baseline="the group mean's",
        none=1,
    )
    yield record(
        "vcpo",
        "final reward, rollouts 32 updates old, small learning rate",
        "higher",
        r["training"]["final reward, small learning rate"]["both, d=32"],
        r["training"]["final reward, small learning rate"]["GRPO, d=32"],
        baseline="GRPO without correction",
    )
    yield record(
        "vcpo",
        "final reward with the learning rate scaled only, rollouts 32 updates old, small learning rate",
        "higher",
        r["training"]["final reward, small learning rate"]["learning rate, d=32"],
        r["training"]["final reward, small learning rate"]["no scaling, d=32"],
        baseline="neither",
    )


def main() -> None:
    args, began = arguments(__doc__, seeds=5), time.time()
    seeds = range(args.seeds)
    with ProcessPoolExecutor(2) as pool:
        measured = list(pool.map(variance, seeds))
        learned = dict(zip(seeds, pool.map(trained, seeds), strict=True))
    keys, delays = list(measured[0][0]), list(measured[0][1])
    gradient = {
        what: {", ".join(map(str, (name, f"d={d}", bound))): interval([m[0][name, d, bound][what] for m in measured])
               for name, d, bound in keys}
        for what in ("relative variance", "cosine of the mean")
    }  # fmt: skip
    rate = {what: {f"d={d}": interval([m[1][d][what] for m in measured]) for d in delays} for what in measured[0][1][0]}
    curves = {key: np.array([learned[s][key] for s in seeds]) for key in learned[0]}
    training = {
        f"{what}, {size} learning rate": {
            f"{name}, d={delay}": interval(number(runs)) for (s, name, delay), runs in curves.items() if s == size
        }
        for size in RATES
        for what, number in {
            "final reward": lambda c: c[:, -1],
            "mean reward": lambda c: c.mean(1),
            "fell below 90 % of its best": lambda c: (c[:, -1] < 0.9 * c.max(1)).astype(float),
        }.items()
    }
    settings = dict(vocab=VOCAB, length=LENGTH, groups=GROUPS, group=GROUP, resamples=RESAMPLES, steps=STEPS)
    content = {
        "method": "vcpo",
        "settings": {**settings, "learning_rates": RATES, "seeds": args.seeds},
        "gradient": gradient,
        "learning rate": rate,
        "training": training,
    }
    save(
        args.out,
        "vcpo",
        content,
        lambda: plot(gradient, rate, curves),
        began,
        records=records(content),
        where="vcpo-5-seeds",
    )
    for part in (gradient, rate, training):
        for what, table in part.items():
            print(f"\n{what}")
            for row, cell in table.items():
                print(f"  {row:52s}{cell['mean']:9.3f} +- {cell['ci95']:.3f}")


def plot(gradient: dict[str, Any], rate: dict[str, Any], curves: dict[Any, np.ndarray]) -> Figure:
    figure, axes = panels(2 + len(RATES), 3.4)
    arms = (*ARMS, "opob, exact norms", "opob, norms of the update")
    for i, arm in enumerate(arms):
        cells = [gradient["relative variance"][f"{arm}, d={d}, truncated"] for d in DELAYS]
        points(axes[0], DELAYS, cells, arm, i)
    axes[0].set_yscale("log")
    named(axes[0], "delay of the rollouts (updates)", "variance, group mean = 1", "Variance of the gradient")
    for i, (arm, table) in enumerate(rate.items()):
        points(axes[1], DELAYS, [table[f"d={d}"] for d in DELAYS], arm, i + 1)
    named(axes[1], "delay of the rollouts (updates)", "share", "Effective share of 32 rows")
    axes[1].legend(fontsize=7.5)
    for axis, size in zip(axes[2:], RATES, strict=True):
        for i, arm in enumerate(dict.fromkeys(arm for _, arm, _ in curves)):
            runs = curves.get((size, arm, DELAYS[-1]))
            if runs is not None:
                k = arms.index(arm) if arm in arms else len(arms) + i
                axis.plot(runs.mean(0), label=arm, **line(k))
        named(axis, "optimizer step", "expected reward", f"Training, delay {DELAYS[-1]}, {size} learning rate")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
