"""Fusion of experts (arXiv 2509.18883, domain-parallel training): does it beat the mean of the weights?

A small network (16 inputs and the task's number, 64 hidden units, 8 actions) picks the best action of a context. Each
of three tasks has another right answer. The base is trained on labels of all tasks for a short time. Then one expert
per task is trained by policy gradient with group-relative advantages on rewards of its own task. In the second part the
third expert trains eight times as long and with three times the learning rate, so its delta is larger. Every arm fuses
the same experts with `rl_plugins.tools.fusion.fuse`, tensor by tensor. Measured on new contexts: share of right answers
under the policy, mean over the three tasks, and the worst task.

Arms: the base; each expert on its own task; one model trained on all tasks for as many steps as the experts together;
the mean of the experts; each step of the fusion alone; all of them; SCE.

    python examples/evidence/dora_fusion.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from common import arguments, grouped, interval, named, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import panels
from rl_plugins.tools.fusion import FusionRule, fuse

TASKS, INPUTS, HIDDEN, ACTIONS, CONTEXTS, SAMPLES = 3, 16, 64, 8, 64, 8
Weights = dict[str, torch.Tensor]
RULES = {
    "mean": FusionRule(False, 1.0, 1.0, False),
    "normalize": FusionRule(True, 1.0, 1.0, False),
    "dropout 0.9": FusionRule(False, 0.9, 1.0, False),
    "erase": FusionRule(False, 1.0, 1.0, True),
    "normalize, erase": FusionRule(True, 1.0, 1.0, True),
    "all, keep 0.9": FusionRule(),
    "all, keep 0.5": FusionRule(keep=0.5),
    "SCE": FusionRule(False, 1.0, 1.0, True, "sce"),
    "SCE, top 0.1": FusionRule(False, 1.0, 0.1, True, "sce"),
}
PARTS = {"equal experts": ((300, 300, 300), (1.0, 1.0, 1.0)), "unequal experts": ((300, 300, 2400), (1.0, 1.0, 3.0))}
RATE, BASE_STEPS = 1e-3, 150


def logits(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ weights["in"].T + weights["in_bias"])
    return torch.relu(hidden @ weights["mid"].T + weights["mid_bias"]) @ weights["out"].T + weights["out_bias"]


class World:
    """The tasks of one seed."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.teachers = torch.randn(TASKS, ACTIONS, INPUTS, generator=self.g)

    def contexts(self, tasks: Sequence[int], n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """n contexts of these tasks and the right action of each."""
        task = torch.tensor(tasks)[torch.randint(len(tasks), (n,), generator=self.g)]
        x = torch.randn(n, INPUTS, generator=self.g)
        right = torch.einsum("nai,ni->na", self.teachers[task], x).argmax(-1)
        return torch.cat([x, torch.nn.functional.one_hot(task, TASKS).float()], 1), right

    def start(self) -> Weights:
        sizes = {"in": (HIDDEN, INPUTS + TASKS), "mid": (HIDDEN, HIDDEN), "out": (ACTIONS, HIDDEN)}
        weights = {n: torch.randn(s, generator=self.g) / s[1] ** 0.5 for n, s in sizes.items()}
        return weights | {f"{n}_bias": torch.zeros(s[0]) for n, s in sizes.items()}

    def trained(self, weights: Weights, tasks: Sequence[int], steps: int, rate: float, rewards: bool) -> Weights:
        """The weights after so many steps of Adam, on labels or on rewards of sampled actions."""
        found = {n: w.clone().requires_grad_() for n, w in weights.items()}
        adam = torch.optim.Adam(found.values(), rate)
        for _ in range(steps):
            x, right = self.contexts(tasks, CONTEXTS)
            log_probs = logits(found, x).log_softmax(-1)
            if rewards:
                actions = torch.multinomial(log_probs.detach().exp(), SAMPLES, True, generator=self.g)
                reward = (actions == right[:, None]).float()
                advantage = reward - reward.mean(1, keepdim=True)
                loss = -(advantage * log_probs.gather(1, actions)).mean()
            else:
                loss = -log_probs.gather(1, right[:, None]).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        return {n: w.detach() for n, w in found.items()}


def right_answers(weights: Weights, tests: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Per task, the probability of the right action."""
    return [float(logits(weights, x).softmax(-1).gather(1, right[:, None]).mean()) for x, right in tests]


def run(seed: int, part: str) -> dict[str, list[float]]:
    """Arm -> share of right answers per task."""
    steps, faster = PARTS[part]
    world = World(seed)
    base = world.trained(world.start(), range(TASKS), BASE_STEPS, RATE, rewards=False)
    experts = [world.trained(base, [t], steps[t], RATE * faster[t], rewards=True) for t in range(TASKS)]
    joint = world.trained(base, range(TASKS), sum(steps), RATE, rewards=True)
    tests = [world.contexts([t], 2000) for t in range(TASKS)]
    found = {"base": right_answers(base, tests), "joint training": right_answers(joint, tests)}
    found["experts, own task"] = [right_answers(e, tests)[t] for t, e in enumerate(experts)]
    for name, rule in RULES.items():
        fused = {
            n: torch.from_numpy(fuse(w.numpy(), {f"task {t}": e[n].numpy() for t, e in enumerate(experts)}, rule, n))
            for n, w in base.items()
        }
        found[name] = right_answers(fused, tests)
    return found


def main() -> None:
    args, start = arguments(__doc__ or "", 10), time.time()
    results: dict[str, Any] = {}
    for part in PARTS:
        seeds = [run(seed, part) for seed in range(args.seeds)]
        results[part] = {
            arm: {
                "mean": interval([sum(s[arm]) / TASKS for s in seeds]),
                "worst": interval([min(s[arm]) for s in seeds]),
                "against the mean": interval([sum(s[arm]) / TASKS - sum(s["mean"]) / TASKS for s in seeds]),
            }
            for arm in seeds[0]
        }
        print(f"\n{part}: share of right answers (mean of tasks, worst task), paired difference to the mean")
        for arm, found in results[part].items():
            print(f"  {arm:18}", *(f"{v['mean']:+.3f} ± {v['ci95']:.3f}" for v in found.values()))

    def draw() -> Figure:
        figure, axes = panels(len(PARTS), columns=1)
        for axis, part in zip(axes, PARTS, strict=True):
            arms = list(results[part])
            grouped(axis, arms, {what: [results[part][a][what] for a in arms] for what in ("mean", "worst")})
            named(axis, "", "share of right answers", part)
            axis.tick_params(axis="x", rotation=30)
        axes[0].legend()
        return figure

    save(args.out, "dora_fusion", results, draw, start)


if __name__ == "__main__":
    main()
