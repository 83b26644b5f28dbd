"""MinPRO (arXiv 2601.22718): does the prefix minimum help when rollouts come from an older policy?

A tabular autoregressive softmax policy: logits[t, previous token, token], vocabulary 8, length 12. The reward is the
share of positions that match a target string, so the expected reward and its exact gradient follow by propagating the
distribution of the previous token. Rollouts come from the policy `d` updates ago (d = 0, 2, 4, 8); advantages are
GRPO's. Compared, all as -stop_gradient(w) A lp, token-mean:

    token ratio     w = clip(rho_t, 0, 5)                    CISPO
    prefix product  w = clip(product of rho_i, i <= t, 0, 5), and once more without the clip
    MinPRO          w = clip(min of rho_i, i < t, times rho_t, 0, 5): the real method, with its defaults

1. The gradient estimate at fixed pairs (policy, policy d updates older) of one common training run: cosine of its mean
   with the exact gradient (bias in direction), mean cosine of single batches, noise E|g - mean|^2 / |mean|^2, and the
   length of the step along the exact gradient relative to on-policy rollouts.
2. Training: every estimator on its own rollouts, plain gradient ascent, at a small and at a large learning rate.

Found (5 seeds): with stale rollouts MinPRO's estimate has the least noise of all and the best single batches; its bias
in direction is that of the token ratio. The reward does not profit here: MinPRO's steps are shorter, so it learns more
slowly than CISPO at the same learning rate, and CISPO does not collapse on this task. The product does fail.

    python examples/evidence/minpro.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, interval, named, points, record, runs_band, save
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.losses import weighted_logprob
from rl_plugins.core.rollouts import Terms
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.minpro import Minpro
from rl_plugins.testing import make_rollouts, make_terms, start_stack

VOCAB, LENGTH, GROUPS, GROUP = 8, 12, 8, 8
DELAYS = (0, 2, 4, 8)
PATH_RATE, CHECKPOINTS, BATCHES = 40.0, (20, 35, 50), 100
RATES, STEPS = {"small": 40.0, "large": 160.0}, 60
BOUND = 5.0  # MinPRO's default 1 + clip_high, given to all

ON_POLICY = "token ratio (CISPO)"  # with a delay of 0 all estimators are the same

MINPRO = start_stack(Minpro())


def log_ratio(terms: Terms) -> Tensor:
    assert terms.rollout_logprobs is not None
    return terms.logprobs.detach() - terms.rollout_logprobs


def token_ratio(terms: Terms) -> Tensor:
    return weighted_logprob(terms.logprobs, log_ratio(terms).exp().clamp(max=BOUND), terms.advantages)


def prefix_product(terms: Terms) -> Tensor:
    weight = log_ratio(terms).cumsum(1).exp()
    return weighted_logprob(terms.logprobs, weight.clamp(max=BOUND), terms.advantages)


def prefix_product_unclipped(terms: Terms) -> Tensor:
    return weighted_logprob(terms.logprobs, log_ratio(terms).cumsum(1).exp(), terms.advantages)


def minpro(terms: Terms) -> Tensor:
    loss: Tensor = MINPRO.one("policy_loss", terms)
    MINPRO.metrics.take()
    return loss


ESTIMATORS: dict[str, Callable[[Terms], Tensor]] = {
    "token ratio (CISPO)": token_ratio,
    "prefix product, clipped": prefix_product,
    "prefix product, unclipped": prefix_product_unclipped,
    "MinPRO": minpro,
}


class Task:
    """The policy class, its exact value, and batches of rollouts. Logits are (LENGTH, VOCAB, VOCAB) float64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.target = torch.randint(VOCAB, (LENGTH,), generator=self.generator)

    def start(self) -> Tensor:
        return 0.5 * torch.randn(LENGTH, VOCAB, VOCAB, generator=self.generator, dtype=torch.float64)

    def value(self, logits: Tensor) -> Tensor:
        """Exact expected reward, differentiable."""
        policy, previous, total = logits.softmax(-1), torch.eye(VOCAB, dtype=torch.float64)[0], torch.zeros(())
        for t in range(LENGTH):
            previous = previous @ policy[t]
            total = total + previous[self.target[t]]
        return total / LENGTH

    def exact_gradient(self, logits: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(self.value(leaf), leaf)[0]

    def sample(self, logits: Tensor, rows: int) -> Tensor:
        """(rows, LENGTH) tokens."""
        policy, tokens = logits.softmax(-1), torch.zeros(rows, LENGTH + 1, dtype=torch.int64)
        for t in range(LENGTH):
            tokens[:, t + 1] = torch.multinomial(policy[t, tokens[:, t]], 1, generator=self.generator)[:, 0]
        return tokens[:, 1:]

    def advantages(self, tokens: Tensor) -> Tensor:
        reward = (tokens == self.target).double().mean(1)
        return grpo_advantages(make_rollouts(reward, group_size=GROUP))


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    previous = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
    return logits.log_softmax(-1)[torch.arange(LENGTH), previous, tokens]


def gradients(task: Task, name: str, logits: Tensor, behavior: Tensor, tokens: Tensor, batches: int) -> Tensor:
    """(batches, parameters) ascent directions of `batches` batches of GROUPS x GROUP rows each."""
    rows = len(tokens)
    leaf = logprobs(logits, tokens).requires_grad_()
    ones = torch.ones(rows, LENGTH, dtype=torch.float64)
    terms = make_terms(1, 1).replace(
        mask=ones.long(),
        logprobs=leaf,
        rollout_logprobs=logprobs(behavior, tokens),
        advantages=task.advantages(tokens)[:, None] * ones,
    )
    (per_token,) = torch.autograd.grad(-ESTIMATORS[name](terms).sum(), leaf)
    # d lp / d logits[t, previous] = onehot(token) - policy: the chain rule, batch by batch
    previous = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
    place = torch.arange(LENGTH).expand(rows, -1)
    onehot = torch.nn.functional.one_hot(tokens, VOCAB)
    flow = per_token[..., None] * (onehot - logits.softmax(-1)[place, previous])
    batch = torch.arange(rows)[:, None] * batches // rows
    index = ((batch * LENGTH + place) * VOCAB + previous).flatten()
    out = torch.zeros(batches * LENGTH * VOCAB, VOCAB, dtype=torch.float64)
    out.index_add_(0, index, flow.reshape(-1, VOCAB))
    return out.view(batches, -1) / (rows / batches * LENGTH)


def train(task: Task, name: str, delay: int, rate: float, steps: int) -> tuple[list[Tensor], list[float]]:
    """Gradient ascent on rollouts `delay` updates old; all policies and their exact expected rewards."""
    history = [task.start()]
    for step in range(steps):
        behavior = history[max(0, step - delay)]
        tokens = task.sample(behavior, GROUPS * GROUP)
        history.append(history[-1] + rate * gradients(task, name, history[-1], behavior, tokens, 1).view_as(behavior))
    return history, [float(task.value(h)) for h in history]


def quality(seed: int) -> dict[tuple[str, int], dict[str, float]]:
    """Part 1, mean over the checkpoints."""
    task = Task(seed)
    path, _ = train(task, "token ratio (CISPO)", 0, PATH_RATE, max(CHECKPOINTS))
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for checkpoint in CHECKPOINTS:
        exact = task.exact_gradient(path[checkpoint]).flatten()
        for delay in DELAYS:
            behavior = path[checkpoint - delay]
            tokens = task.sample(behavior, BATCHES * GROUPS * GROUP)
            for name in ESTIMATORS if delay else [ON_POLICY]:
                g = gradients(task, name, path[checkpoint], behavior, tokens, BATCHES)
                mean, cosine = g.mean(0), torch.nn.functional.cosine_similarity
                along = float(mean @ exact)
                if delay == 0:
                    along_on_policy = along
                # |mean|^2 of a finite sample is too large by the noise that is left in it
                noise = float(((g - mean) ** 2).sum()) / (BATCHES - 1)
                signal = max(float((mean**2).sum()) - noise / BATCHES, 1e-12)
                found.setdefault((name, delay), []).append(
                    {
                        "cosine of the mean": float(cosine(mean, exact, dim=0)),
                        "cosine of one batch": float(cosine(g, exact[None], dim=1).mean()),
                        "noise": noise / signal,
                        "relative step": along / along_on_policy,
                    }
                )
    return {key: {k: float(np.mean([x[k] for x in xs])) for k in xs[0]} for key, xs in found.items()}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "minpro",
        "noise of the gradient estimate, rollouts 8 updates old",
        "lower",
        r["gradient"]["noise"]["MinPRO, d=8"],
        r["gradient"]["noise"][f"{ON_POLICY}, d=8"],
        baseline="CISPO",
    )
    yield record(
        "minpro",
        "cosine of the mean gradient with the exact one",
        "higher",
        r["gradient"]["cosine of the mean"]["MinPRO, d=8"],
        r["gradient"]["cosine of the mean"][f"{ON_POLICY}, d=8"],
        baseline="CISPO",
    )
    yield record(
        "minpro",
        "final reward, small learning rate, rollouts 8 updates old",
        "higher",
        r["training"]["final reward, small learning rate"]["MinPRO, d=8"],
        r["training"]["final reward, small learning rate"][f"{ON_POLICY}, d=8"],
        baseline="CISPO",
    )


def main() -> None:
    args = arguments(__doc__, seeds=5)
    seeds = range(args.seeds)

    pairs = [(name, delay) for delay in DELAYS for name in (ESTIMATORS if delay else [ON_POLICY])]
    measured = [quality(s) for s in seeds]
    gradient = {
        key: {f"{name}, d={delay}": interval([m[name, delay][key] for m in measured]) for name, delay in pairs}
        for key in measured[0][ON_POLICY, 0]
    }
    curves = {
        (size, name, delay): np.array([train(Task(s), name, delay, rate, STEPS)[1] for s in seeds])
        for size, rate in RATES.items()
        for name, delay in pairs
    }
    training = {
        f"{what}, {size} learning rate": {
            f"{name}, d={delay}": interval(number(curves[size, name, delay])) for name, delay in pairs
        }
        for size in RATES
        for what, number in {"final reward": lambda c: c[:, -1], "mean reward": lambda c: c.mean(1)}.items()
    }

    for table in (*gradient.values(), *training.values()):
        for delay in DELAYS[1:]:
            ours, base = (np.array(table[f"{name}, d={delay}"]["seeds"]) for name in ("MinPRO", ON_POLICY))
            table[f"MinPRO - token ratio, d={delay}"] = interval(ours - base)

    settings = dict(vocab=VOCAB, length=LENGTH, groups=GROUPS, group=GROUP, steps=STEPS, learning_rates=RATES)
    content = {
        "method": "minpro",
        "settings": {**settings, "bound": BOUND, "batches": BATCHES, "seeds": args.seeds},
        "gradient": gradient,
        "training": training,
    }
    save(args.out, "minpro", content, lambda: plot(gradient, curves), records=records(content), where="minpro-5-seeds")
    for part in (gradient, training):
        print("\n" + f"{'':32s}" + "".join(f"{key:>36s}" for key in part))
        for row in next(iter(part.values())):
            cells = (part[key][row] for key in part)
            print(f"{row:32s}" + "".join(f"{c['mean']:27.3f} +- {c['ci95']:.3f}" for c in cells))


def plot(gradient: dict[str, Any], curves: dict[Any, np.ndarray]) -> Figure:
    figure, axes = panels(4)
    shown = {
        "cosine of the mean": "cosine of the mean gradient with the exact one",
        "noise": "noise of the gradient: E|g - mean|² / |mean|²",
    }
    estimators = dict(zip(ESTIMATORS, (1, 2, 3, 4), strict=True))
    for axis, (key, label) in zip(axes, shown.items(), strict=False):
        for arm, i in estimators.items():
            cells = [gradient[key][f"{arm if d else ON_POLICY}, d={d}"] for d in DELAYS]
            points(axis, DELAYS, cells, arm, i)
        axis.set_xticks(DELAYS)
        named(axis, "delay of the rollouts (updates)", label)
    axes[1].set_yscale("log")
    for axis, size in zip(axes[2:], ("small", "large"), strict=True):
        runs_band(axis, range(STEPS + 1), curves[size, ON_POLICY, 0], "on-policy", 0)
        for arm, i in estimators.items():
            runs_band(axis, range(STEPS + 1), curves[size, arm, 8], arm, i)
        named(axis, "optimizer step", "exact expected reward", f"Training, delay 8, {size} learning rate")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
