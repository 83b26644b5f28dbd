"""PPO's outer step (arXiv 2603.06009): is the plateau that of a noisy step, and what must grow with the batch?

Part 1, the model. theta <- theta - eta (theta + xi) with xi ~ Normal(0, sigma^2 / N): the loss theta^2 / 2 ends at
eta sigma^2 / (2 N (2 - eta)). Measured after the start is forgotten, for five step sizes and three N, and once more
with the step size cut to a quarter in the middle.

Part 2, PPO. A tabular softmax policy of 32 contexts and 8 actions; a reward is the action's true value plus normal
noise of deviation 8. A batch has N samples, four epochs of mini-batches of M samples, the clipped surrogate, Adam; the
advantage is the reward less the context's true value under the policy. Every arm consumes the same samples.

    N                          512 samples a batch, mini-batches of 64
    4N, mini-batch fixed       the paper's recipe: mini-batches of 64, four times as many of them
    4N, number fixed           mini-batches of 256
    4N, number fixed, 2 lr     mini-batches of 256, learning rate times sqrt(4)
    N, lr / 4                  a smaller outer step, no more samples
    N, cut in the middle       learning rate / 4 after half of the samples

Measured is the true value of the policy as a share of the way from the uniform to the best policy: after 1/8 of the
samples, its mean over the last quarter, and its rise there. Measured too: the k3 estimate of the KL that a batch moves
the policy, and the samples per nat, as `ppo_million` logs them. All for two learning rates.

    python examples/evidence/ppo_million.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, band, interval, named, points, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import panels

ETAS, NS, SIGMA, CHAINS = (0.05, 0.1, 0.3, 1.0, 1.5), (1, 4, 16), 1.0, 200
CONTEXTS, ACTIONS, NOISE, CLIP, EPOCHS, TOTAL, N, M = 32, 8, 8.0, 0.2, 4, 512 * 192, 512, 64
ARMS: dict[str, tuple[int, int, float, float]] = {  # samples, mini-batch, factor of the rate, and after the middle
    "N": (N, M, 1.0, 1.0),
    "4N, mini-batch fixed": (4 * N, M, 1.0, 1.0),
    "4N, number fixed": (4 * N, 4 * M, 1.0, 1.0),
    "4N, number fixed, 2 lr": (4 * N, 4 * M, 2.0, 2.0),
    "N, lr / 4": (N, M, 0.25, 0.25),
    "N, cut in the middle": (N, M, 1.0, 0.25),
}
RATES = (0.1, 0.3)


def quadratic(seed: int, eta: float, n: int, cut: bool = False) -> np.ndarray:
    """The loss theta^2 / 2 over the steps, mean of the chains of a seed."""
    rng = np.random.default_rng([seed, n, int(1000 * eta)])
    theta, steps = np.full(CHAINS, 3.0), 400 + int(40 / eta)
    losses = []
    for step in range(steps):
        rate = eta / 4 if cut and step >= steps // 2 else eta
        theta = theta - rate * (theta + SIGMA / n**0.5 * rng.normal(size=CHAINS))
        losses.append((theta**2).mean() / 2)
    return np.array(losses)


def formula(eta: float, n: int) -> float:
    return eta * SIGMA**2 / (2 * n * (2 - eta))


def ppo(seeds: int, rate: float, arm: str) -> dict[str, np.ndarray]:
    """All seeds at once: value (seeds, batches) after each batch, KL (seeds,) of a batch in the last quarter."""
    samples, mini, factor, later = ARMS[arm]
    g = torch.Generator().manual_seed(1)
    value = torch.randn(seeds, CONTEXTS, ACTIONS, generator=g)
    theta = torch.zeros(seeds, CONTEXTS, ACTIONS)
    first, second, step = torch.zeros_like(theta), torch.zeros_like(theta), 0
    rows, batches = torch.arange(seeds)[:, None], TOTAL // samples
    best, uniform = value.max(-1).values.mean(-1), value.mean((-1, -2))
    values, moved = [], []
    for batch in range(batches):
        lr = rate * (later if 2 * batch >= batches else factor)
        old = theta.log_softmax(-1)
        context = torch.randint(CONTEXTS, (seeds, samples), generator=g)
        probs = old.exp()[rows, context].reshape(-1, ACTIONS)
        action = torch.multinomial(probs, 1, generator=g).reshape(seeds, samples)
        reward = value[rows, context, action] + NOISE * torch.randn(seeds, samples, generator=g)
        advantage = reward - (old.exp() * value).sum(-1)[rows, context]
        for _ in range(EPOCHS):
            for part in torch.randperm(samples, generator=g).split(mini):
                c, a, adv = context[:, part], action[:, part], advantage[:, part]
                log_probs = theta.log_softmax(-1)
                ratio = (log_probs[rows, c, a] - old[rows, c, a]).exp()
                live = ~(((adv > 0) & (ratio > 1 + CLIP)) | ((adv < 0) & (ratio < 1 - CLIP)))
                weight = torch.where(live, -ratio * adv, 0.0) / mini  # the surrogate's gradient by the log-prob
                flat = torch.zeros(seeds, CONTEXTS * ACTIONS).scatter_add_(1, c * ACTIONS + a, weight)
                picked = flat.view_as(theta)
                gradient = picked - log_probs.exp() * picked.sum(-1, keepdim=True)
                step += 1
                first = 0.9 * first + 0.1 * gradient
                second = 0.999 * second + 0.001 * gradient**2
                theta = theta - lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        new = theta.log_softmax(-1)
        log_ratio = (new - old)[rows, context, action]
        if batch >= 3 * batches // 4:
            moved.append((torch.expm1(log_ratio) - log_ratio).mean(1))
        values.append(((new.exp() * value).sum(-1).mean(-1) - uniform) / (best - uniform))
    return {"value": torch.stack(values, 1).numpy(), "kl": torch.stack(moved, 1).mean(1).numpy()}


def measured(arm: str, found: dict[str, np.ndarray]) -> dict[str, Any]:
    value, kl = found["value"], found["kl"]
    quarter = value[:, -(value.shape[1] // 4) :]
    half = quarter.shape[1] // 2
    return {
        "after 1/8": interval(value[:, value.shape[1] // 8 - 1]),
        "last quarter": interval(quarter.mean(1)),
        "rise in it": interval(quarter[:, -half:].mean(1) - quarter[:, :half].mean(1)),
        "kl": interval(kl),
        "samples per nat": interval(ARMS[arm][0] / np.maximum(kl, 1e-8)),
        "curve": [summary(column) for column in value.T],
    }


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "ppo_million",
        "value at the end at equal samples, tabular PPO, 4N at fixed mini-batch",
        "higher",
        r["0.1"]["4N, mini-batch fixed"]["last quarter"],
        r["0.1"]["N"]["last quarter"],
        baseline="N",
        budget="samples",
    )
    yield record(
        "ppo_million",
        "value at the end at equal samples, tabular PPO, learning rate 0.075 instead of 0.3",
        "higher",
        r["0.3"]["N, lr / 4"]["last quarter"],
        r["0.3"]["N"]["last quarter"],
        budget="samples",
    )
    yield record(
        "ppo_million",
        "value at the end, tabular PPO, learning rate cut to a quarter on the plateau",
        "higher",
        r["0.3"]["N, cut in the middle"]["last quarter"],
        r["0.3"]["N"]["last quarter"],
    )


def main() -> None:
    args, start = arguments(__doc__ or "", 10), time.time()
    results: dict[str, Any] = {"quadratic": {}, "ppo": {}}
    print("plateau of the quadratic / formula")
    for n in NS:
        for eta in ETAS:
            ends = [quadratic(s, eta, n) for s in range(args.seeds)]
            ratio = interval([e[len(e) // 2 :].mean() / formula(eta, n) for e in ends])
            results["quadratic"][f"{n}, {eta}"] = {"ratio": ratio, "formula": formula(eta, n)}
            print(f"  N {n:2} eta {eta:4}: {ratio['mean']:.3f} ± {ratio['ci95']:.3f}  (formula {formula(eta, n):.5f})")
    cuts = [quadratic(s, 0.3, 1, cut=True) for s in range(args.seeds)]
    results["cut"] = {
        "before": interval([c[len(c) // 4 : len(c) // 2].mean() / formula(0.3, 1) for c in cuts]),
        "after": interval([c[-len(c) // 4 :].mean() / formula(0.075, 1) for c in cuts]),
    }
    print("eta 0.3 cut to 0.075:", {k: round(v["mean"], 3) for k, v in results["cut"].items()})
    for rate in RATES:
        results["ppo"][str(rate)] = {arm: measured(arm, ppo(args.seeds, rate, arm)) for arm in ARMS}
        print(f"\nlearning rate {rate}: after 1/8, last quarter, rise in it, KL of a batch, samples per nat")
        for arm, found in results["ppo"][str(rate)].items():
            cells = [found[k] for k in ("after 1/8", "last quarter", "rise in it", "kl", "samples per nat")]
            print(f"  {arm:23}", *(f"{c['mean']:.4g} ± {c['ci95']:.2g}" for c in cells))

    def draw() -> Figure:
        figure, axes = panels(1 + len(RATES), columns=1)
        for i, n in enumerate(NS):
            cells = [results["quadratic"][f"{n}, {eta}"] for eta in ETAS]
            half = [
                {"mean": c["ratio"]["mean"] * c["formula"], "ci95": c["ratio"]["ci95"] * c["formula"]} for c in cells
            ]
            points(axes[0], ETAS, half, f"N {n}", i)
            axes[0].plot(ETAS, [c["formula"] for c in cells], color="gray", lw=0.8)
        axes[0].set_yscale("log")
        named(axes[0], "step size", "loss at the plateau", "Quadratic: measured, and the formula (thin)")
        axes[0].legend()
        for axis, rate in zip(axes[1:], RATES, strict=True):
            for i, (arm, found) in enumerate(results["ppo"][str(rate)].items()):
                band(axis, np.arange(1, 1 + len(found["curve"])) * ARMS[arm][0], found["curve"], arm, i)
            named(axis, "samples", "share of the way to the best policy", f"PPO, learning rate {rate}")
        axes[1].legend(fontsize=7)
        return figure

    save(
        args.out,
        "ppo_million",
        results,
        draw,
        start,
        records=records(results["ppo"]),
        where="ppo_million-10-seeds",
    )


if __name__ == "__main__":
    main()
