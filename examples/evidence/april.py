"""APRIL (arXiv 2509.18521): how much faster is generation, how stale does it make batches, and does that do harm?

Schedule. A simulation (`rl_plugins.testing.generation`) of the real method and the real queue: 16 groups of 8 a batch,
log-normal lengths (median 24 tokens, half of the variance of their logarithm between prompts), cut at 384. Two engines:
`free`, a token takes as long however many rollouts are decoded; `busy`, it takes 1 + rollouts / 64 (three times as long
with the 128 of a plain batch as with one), and reading a token of a resumed rollout takes 0.01. Speed-up of generation
over plain batches (trained tokens per time), share of stale tokens, mean length of the trained rollouts relative to
plain. Last row: over-provisioning as usual, where the rest of a batch is thrown away.

Update. A policy with 6 x 6 logits (next token by last one) writes 24 tokens, rewarded for pairs of tokens. Policy
`old` is so many updates behind `new` (Adam, 0.05). In half of the groups the first 16 tokens are old's, the rest is
new's, as in groups that went on; the real method shapes GRPO's advantages. Against the gradient of batches that are all
new: `bias`, distance of the mean gradient of 250 batches relative to its length, and `cosine` of the two; `noise`, mean
distance of a single batch's gradient from its own mean, on the same scale. `all new` is the floor: other batches
without a stale token. What this policy writes does not depend on the place, so masking the first tokens of carried
rollouts loses nothing but their number; a language model's first tokens are then learned from fresh groups alone.

Found (3 seeds). Where a token is free of charge, generation is 1.5 to 2.1 times as fast with N'/N = 1.25 and 3.0 to
4.6 times with 2; on the busy engine 1.3 to 1.6 and 1.4 to 2.0 times, so the first quarter brings most of it (the paper:
1.23 on average, at most 1.44). Staleness is the price: 33 to 48 % of the tokens at 1.25, 72 to 78 % at 2 (the paper:
about 40 %). Lengths of what is trained do not change, unlike with discarding (0.32 to 0.72 of plain), which is slower
than plain batches on the busy engine (0.63 to 0.93). One update behind, nothing is told apart from a batch without
stale tokens; 16 behind, the gradient is off by 25 +- 9 % uncorrected, 15 +- 5 % with token_tis, 7 +- 3 % masked (floor
6 %), where masking costs noise (0.78 instead of 0.65).

    python examples/evidence/april.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import arguments, named, points, save, summary
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.april import April
from rl_plugins.testing import generation as simulation
from rl_plugins.testing import make_rollouts, make_tokens, one_step, start_stack

GROUPS, SIZE, MEDIAN, BATCHES, SKIP = 16, 8, 24, 28, 8
ENGINES: dict[str, dict[str, Any]] = {"free": {}, "busy": {"token_time": lambda n: 1 + n / 64, "prefill": 0.01}}
SIGMAS = (0.5, 1.0, 1.5)
SCHEDULES: dict[str, dict[str, Any]] = {
    "N'/N = 1.25": {"over_sampling": 1.25},
    "N'/N = 1.5": {"over_sampling": 1.5},
    "N'/N = 2": {"over_sampling": 2.0},
    "2, rest discarded": {"over_sampling": 2.0, "max_staleness": 0, "stale": "drop"},
}
VOCABULARY, LENGTH, STALE, MANY = 6, 24, 16, 250
CORRECTIONS = ("all new", "none", "mask", "token_tis")
BEHIND = (1, 4, 16)


# ---- schedule


def log_normal(sigma: float, seed: int) -> Callable[[int, int], np.ndarray]:
    def lengths(prompt: int, drawn: int) -> np.ndarray:
        of_prompt = np.random.default_rng([seed, prompt]).normal()
        own = np.random.default_rng([seed, prompt, drawn, 1]).normal(size=SIZE)
        return 1 + (MEDIAN * np.exp(sigma * (of_prompt + own) / np.sqrt(2))).astype(np.int64)

    return lengths


def schedule(params: dict[str, Any], sigma: float, engine: dict[str, Any], seed: int) -> dict[str, float]:
    method, lengths = April(April.Params(**params)), log_normal(sigma, seed)
    run = simulation.Simulation(method, lengths, groups=GROUPS, group_size=SIZE, max_tokens=16 * MEDIAN, **engine)
    return simulation.summary([run.batch() for _ in range(BATCHES)], SKIP)


def schedules(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for engine, options in ENGINES.items():
        for sigma in SIGMAS:
            plain = [schedule({"over_sampling": 1.0}, sigma, options, s) for s in range(seeds)]
            for arm, params in SCHEDULES.items():
                found = [schedule(params, sigma, options, s) for s in range(seeds)]
                pairs = list(zip(found, plain, strict=True))
                values = {
                    "speed-up": [f["throughput"] / p["throughput"] for f, p in pairs],
                    "stale": [f["stale"] for f in found],
                    "length": [f["length"] / p["length"] for f, p in pairs],
                    "thrown away": [f["wasted"] for f in found],
                }
                rows.append({"engine": engine, "sigma": sigma, "arm": arm, **intervals(values)})
    return rows


# ---- update


class Policy:
    """Next-token logits by the last token, and a reward for pairs of tokens."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.logits = 0.5 * torch.randn(VOCABULARY, VOCABULARY, generator=self.generator, dtype=torch.float64)
        self.worth = torch.randn(VOCABULARY, VOCABULARY, generator=self.generator, dtype=torch.float64)

    def write(self, rows: int, switch: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """(rows, LENGTH + 1) tokens, the first one given; place t by `old` where t < switch of the row."""
        tokens = [torch.zeros(rows, dtype=torch.int64)]
        for t in range(LENGTH):
            logits = torch.where((t < switch)[:, None], old[tokens[-1]], new[tokens[-1]])
            tokens.append(torch.multinomial(logits.softmax(1), 1, generator=self.generator)[:, 0])
        return torch.stack(tokens, 1)

    def gradient(self, correction: str, old: Tensor, new: Tensor) -> Tensor:
        """Of one batch of 8 groups of 8, at `new`."""
        rows = 64
        switch = torch.full((rows,), STALE if correction != "all new" else 0)
        switch[rows // 2 :] = 0
        tokens = self.write(rows, switch, old, new)
        reward = self.worth[tokens[:, :-1], tokens[:, 1:]].mean(1)
        rollouts = make_rollouts(reward, group_size=8, lengths=[LENGTH] * rows)
        place = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
        stale = (torch.arange(LENGTH) < switch[:, None]).flatten()
        sampled = torch.where(stale, old.log_softmax(1)[place], new.log_softmax(1)[place])
        columns = make_tokens(
            rollouts,
            version=torch.where(stale, 0, 1),
            old_logprobs=new.log_softmax(1)[place].float(),
            rollout_logprobs=sampled.float(),
        )
        method = April(April.Params(correction="none" if correction == "all new" else correction))
        decision = one_step(start_stack(method), rollouts, columns)
        at = new.clone().requires_grad_()
        objective = (decision.advantages * at.log_softmax(1)[place]).sum() / decision.keep_tokens.sum()
        return torch.autograd.grad(objective, at)[0]

    def train(self, steps: int, start: Tensor) -> Tensor:
        logits = start.clone()
        adam = torch.optim.Adam([logits], lr=0.05, maximize=True)
        for _ in range(steps):
            logits.grad = self.gradient("all new", logits, logits)
            adam.step()
        return logits


def update(behind: int, seed: int) -> dict[str, dict[str, float]]:
    policy = Policy(seed)
    old = policy.logits
    new = policy.train(behind, old)
    truth = torch.stack([policy.gradient("all new", old, new) for _ in range(MANY)]).mean(0)
    out = {}
    for correction in CORRECTIONS:
        every = torch.stack([policy.gradient(correction, old, new) for _ in range(MANY)])
        mean = every.mean(0)
        out[correction] = {
            "bias": float((mean - truth).norm() / truth.norm()),
            "cosine": float((mean * truth).sum() / mean.norm() / truth.norm()),
            "noise": float((every - mean).flatten(1).norm(dim=1).mean() / truth.norm()),
        }
    return out


def updates(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for behind in BEHIND:
        found = [update(behind, seed) for seed in range(seeds)]
        for c in CORRECTIONS:
            rows.append({"behind": behind, "arm": c, **intervals({k: [f[c][k] for f in found] for k in found[0][c]})})
    return rows


# ---- report


def intervals(values: dict[str, list[float]]) -> dict[str, Any]:
    return {name: summary(v) for name, v in values.items()}


def main() -> None:
    args = arguments(__doc__, seeds=3)
    results = {"schedule": schedules(args.seeds), "update": updates(args.seeds)}
    content = {"method": "april", "settings": {"seeds": args.seeds}, "results": results}
    save(args.out, "april", content, lambda: plot(results))
    for rows in results.values():
        for row in rows:
            keys = " ".join(f"{k} {v}" for k, v in row.items() if not isinstance(v, dict))
            numbers = "  ".join(
                f"{k} {v['mean']:.3f} +- {v['ci95']:.3f}" for k, v in row.items() if isinstance(v, dict)
            )
            print(f"{keys:48} {numbers}")


def plot(results: dict[str, list[dict[str, Any]]]) -> Figure:
    figure, axes = panels(4)
    shown = [(e, "speed-up", f"Generation, {e} engine", "times as fast as plain") for e in ENGINES]
    shown.append(("busy", "stale", "Staleness, busy engine", "share of stale tokens"))
    for axis, (engine, measure, title, label) in zip(axes, shown, strict=False):
        for i, arm in enumerate(SCHEDULES):
            rows = [r for r in results["schedule"] if r["engine"] == engine and r["arm"] == arm]
            points(axis, [r["sigma"] for r in rows], [r[measure] for r in rows], arm, i)
        named(axis, "sigma of log length", label, title)
    for i, arm in enumerate(CORRECTIONS):
        rows = [r for r in results["update"] if r["arm"] == arm]
        points(axes[3], [r["behind"] for r in rows], [r["bias"] for r in rows], f"correction: {arm}", i)
    axes[3].set_xscale("log")
    title = "Half of the groups two thirds stale"
    named(axes[3], "updates between the two policies", "bias of the gradient / its length", title)
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
