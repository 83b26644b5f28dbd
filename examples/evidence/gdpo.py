"""GDPO's mechanism, measured: which reward combinations stay apart, and is a small reward learned beside a large one?

    python examples/evidence/gdpo.py --seeds 10 --out evidence-results

Collapse (exact, no seeds). All combinations of two binary rewards for G rollouts are one batch; counted are the
different advantage vectors of a group (3 decimals), as ordered vectors and up to the order of the rollouts. GRPO adds
the rewards before it normalizes, so combinations with equal sums fall together.

Learning. A Gaussian policy over two numbers a_1, a_2, rewards -scale (a_1 - 1)^2 and -(a_2 - 1)^2, updated with Adam
for a fixed number of steps, groups of 8. Shown is how much of the initial squared distance of each mean is gone.
Beside GRPO on the sum runs GRPO with reward weights tuned to the scales, which GDPO should not need. The last setting
asks for the price: a third reward is noise of size 0.01 that no action changes, and GDPO normalizes it up.

The advantages come from the method itself through the driver, those of GRPO from the estimator of rl_plugins. Intervals
are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, corner_legend, grouped, named, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import line, panels
from rl_plugins.methods.gdpo import Gdpo
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, one_step, start_stack

GROUP_SIZES = (2, 3, 4, 5, 6)
ARMS = ("GRPO", "GRPO, tuned weights", "GDPO")
SETTINGS = {  # name -> scales of the rewards; the third is pure noise
    "scales 1 : 1": (1.0, 1.0),
    "scales 10 : 1": (10.0, 1.0),
    "scales 100 : 1": (100.0, 1.0),
    "scales 1 : 1 and noise": (1.0, 1.0, 0.01),
}
PROMPTS, GROUP, STEPS, SPREAD = 8, 8, 120, 0.3


def make_stack(arm: str) -> MethodStack:
    return start_stack(Gdpo()) if arm == "GDPO" else start_stack()


def different_vectors(arm: str, size: int) -> tuple[int, int]:
    """Different advantage vectors of a group over all pairs of binary rewards: ordered, and up to order."""
    rows = list(itertools.product((0.0, 1.0), repeat=2))
    rewards = [row for group in itertools.product(rows, repeat=size) for row in group]
    decision = one_step(make_stack(arm), make_rollouts(rewards, None, size, lengths=[1] * len(rewards)))
    vectors = decision.row_advantages.view(-1, size).mul(1000).round().long()
    return len(torch.unique(vectors, dim=0)), len(torch.unique(vectors.sort(1).values, dim=0))


def learn(arm: str, scales: tuple[float, ...], seed: int) -> tuple[float, float]:
    """How much of the initial squared distance of the two means is gone after STEPS updates, in percent."""
    rng, stack = np.random.default_rng(seed), make_stack(arm)
    weights = [1 / s for s in scales[:2]] + [1.0] * (len(scales) - 2) if arm == ARMS[1] else [1.0] * len(scales)
    mean = torch.zeros(2, requires_grad=True)
    adam = torch.optim.Adam([mean], lr=0.005)
    for _ in range(STEPS):
        action = mean.detach().numpy() + SPREAD * rng.normal(size=(PROMPTS * GROUP, 2))
        reward = -((action - 1) ** 2)
        if len(scales) == 3:
            reward = np.concatenate([reward, rng.normal(size=(len(action), 1))], axis=1)
        rollouts = make_rollouts(reward * np.array(scales), None, GROUP, weights=weights, lengths=[1] * len(action))
        advantages = one_step(stack, rollouts).row_advantages
        logprobs = -((torch.from_numpy(action).float() - mean) ** 2).sum(1) / (2 * SPREAD**2)
        loss = -(advantages.float() * logprobs).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([mean], 1.0)
        adam.step()
    first, second = (100 * (1 - (mean.detach().numpy() - 1) ** 2)).tolist()
    return first, second


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "gdpo",
        "progress on the small reward, the other one 100 times as large",
        "higher",
        r["scales 100 : 1"]["GDPO"][1],
        r["scales 100 : 1"]["GRPO"][1],
        baseline="GRPO",
        unit="%",
    )
    yield record(
        "gdpo",
        "progress on the small reward, the other one 10 times as large",
        "higher",
        r["scales 10 : 1"]["GDPO"][1],
        r["scales 10 : 1"]["GRPO"][1],
        baseline="GRPO",
        unit="%",
    )
    yield record(
        "gdpo",
        "progress on the small reward, both of equal size",
        "higher",
        r["scales 1 : 1"]["GDPO"][1],
        r["scales 1 : 1"]["GRPO"][1],
        baseline="GRPO",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=10)
    start = time.time()

    counts = {arm: [different_vectors(arm, size) for size in GROUP_SIZES] for arm in ("GRPO", "GDPO")}
    print("different advantage vectors, ordered (up to order)")
    for i, size in enumerate(GROUP_SIZES):
        print(f"  G = {size}:  " + "   ".join(f"{arm} {counts[arm][i][0]} ({counts[arm][i][1]})" for arm in counts))

    print(f"\n{'distance gone (%)':26}" + "".join(f"{arm + ': first, second':>38}" for arm in ARMS))
    learned: dict[str, dict[str, list[dict[str, float]]]] = {}
    for setting, scales in SETTINGS.items():
        runs = {arm: [learn(arm, scales, seed) for seed in range(args.seeds)] for arm in ARMS}
        learned[setting] = {arm: [summary(list(v)) for v in zip(*pairs, strict=True)] for arm, pairs in runs.items()}
        cells = ["  ".join(f"{c['mean']:6.1f} +-{c['ci95']:.1f}" for c in learned[setting][arm]) for arm in ARMS]
        print(f"{setting:26}" + "".join(f"{cell:>38}" for cell in cells))

    result = {
        "seeds": args.seeds,
        "different_vectors": {arm: dict(zip(map(str, GROUP_SIZES), counts[arm], strict=True)) for arm in counts},
        "distance_gone_percent": learned,
    }
    save(
        args.out, "gdpo", result, lambda: plot(counts, learned), start, records=records(learned), where="gdpo-10-seeds"
    )


def plot(counts: dict, learned: dict) -> Figure:
    figure, (vectors, *axes) = panels(3)
    for i, (arm, pairs) in enumerate(counts.items()):
        vectors.plot(GROUP_SIZES, [ordered for ordered, _ in pairs], label=arm, marker="o", ms=3.5, **line(2 * i))
    vectors.set(yscale="log", xticks=GROUP_SIZES)
    named(vectors, "G, rollouts per group", "different advantage vectors", "Two binary rewards, all combinations")
    vectors.legend()
    groups = [setting.removeprefix("scales ").replace(" and ", "\nand ") for setting in SETTINGS]
    for which, (axis, word) in enumerate(zip(axes, ("first", "second"), strict=True)):
        grouped(axis, groups, {arm: [learned[setting][arm][which] for setting in SETTINGS] for arm in ARMS})
        named(axis, "scale of the first : second reward", "way gone (%)", f"Learning: the {word} reward")
    corner_legend(figure, axes[-1])
    return figure


if __name__ == "__main__":
    main()
