"""FAPO (arXiv 2510.22543): are flawed right rollouts a stepping stone first and a burden later, and which lambda fits?

Two parts without a model, on the advantages of the real method through the driver.

The sign rule. Every group of 12 with at least one flawed rollout, for five values of lambda: does the advantage of the
flawed rollouts have the sign of (2 - lambda) beta - lambda alpha, with the shares alpha (flawless) and beta (wrong)?

A bandit. The policy draws one of three arms: a flawless right rollout, a flawed right one, a wrong one. It begins with
shares of 0.005, 0.045 and 0.95, and is trained by plain policy gradient, 16 prompts of 8 rollouts a step. The judge
names the arm, or errs in 20 % of its questions.

    shared     logits (u + v, u, 0): both right arms rise with u, and v tells them apart: a flawed rollout teaches a
               part of what a flawless one needs
    separate   logits (w, u, 0): a flawed rollout teaches nothing of a flawless one

Measured: steps until half of the rollouts are right (counted as all steps if they never are), and the shares of right,
flawed and flawless rollouts over the last ten steps.

Found (10 seeds): the sign rule holds in all 390 cases. With shared features lambda 1 is as fast as GRPO (41 steps) and
ends with 0.006 flawed rollouts instead of 0.713; lambda 2 needs 165 steps. With separate features lambda 1 ends like
GRPO, with flawed rollouts alone; lambda 2 reaches 0.375 +- 0.227 flawless ones.

    python examples/evidence/fapo.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import arguments, interval, named, record, runs_band, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.fapo.method import Fapo
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, one_step, start_stack

PROMPTS, GROUP, STEPS, RATE, ERROR = 16, 8, 300, 0.3, 0.2
START = (0.005, 0.045, 0.95)
FEATURES = {"shared": [[1, 1], [1, 0], [0, 0]], "separate": [[0, 1], [1, 0], [0, 0]]}  # (arms, parameters)
METHODS = {
    "lambda 0 (GRPO)": (0.0, 0.0),
    "lambda 1": (1.0, 0.0),
    "lambda 2": (2.0, 0.0),
    "lambda 1, judge errs": (1.0, ERROR),
}
FLAWLESS, FLAWED, WRONG = range(3)


def stack_of(penalty: float, error: float, seed: int) -> MethodStack:
    """The method on rewards of -1 and +1, with a judge of completions "arm#number"."""
    rng = np.random.default_rng([seed, 1])

    def judge(items: list[tuple[str, str, str]]) -> list[int]:
        flawed = np.array([int(completion.split("#")[0]) == FLAWED for *_, completion in items])
        return np.where(flawed ^ (rng.random(len(items)) < error), 0, -1).tolist()

    options = dict(judge=judge, judge_batch_size=10**6, reward_low=-1.0, success_threshold=0.0, answer_column=None)
    return start_stack(Fapo(Fapo.Params(penalty=penalty, **options)), seed=seed)


def advantages(stack: MethodStack, arms: np.ndarray, group_size: int, step: int) -> np.ndarray:
    rollouts = make_rollouts(np.where(arms == WRONG, -1.0, 1.0), group_size=group_size, batch=step)
    rollouts = rollouts.replace(
        text=[f"{arm}#{step}.{i}" for i, arm in enumerate(arms)],  # the number keeps equal arms apart
        meta={"prompt": [f"prompt {g}" for g in rollouts.group.tolist()]},
    )
    return one_step(stack, rollouts).row_advantages.numpy()


def sign_rule(n: int = 12) -> dict[str, dict[str, int]]:
    """Groups looked at and groups whose flawed rollouts have an advantage of another sign than the rule's."""
    found = {}
    groups = [(a, b, n - a - b) for a in range(n) for b in range(n - a)]
    arms = np.array(
        [arm for group in groups for arm, count in enumerate((group[0], group[2], group[1])) for _ in range(count)]
    )
    for penalty in (0.0, 0.5, 1.0, 1.5, 2.0):
        given = advantages(stack_of(penalty, 0.0, 0), arms, n, 0).reshape(-1, n)
        wrong = 0
        for (flawless, wrong_ones, _), row in zip(groups, given, strict=True):
            rule = (2 - penalty) * wrong_ones - penalty * flawless
            flawed = row[flawless]
            wrong += np.sign(rule) != (0 if abs(flawed) < 1e-9 else np.sign(flawed))
        found[f"{penalty:g}"] = {"groups": len(groups), "exceptions": int(wrong)}
    return found


def train(setting: str, penalty: float, error: float, seed: int) -> np.ndarray:
    """(steps, 3) shares of the arms before each step."""
    rng, stack = np.random.default_rng([seed, 0]), stack_of(penalty, error, seed)
    features = np.array(FEATURES[setting], dtype=float)
    bias = np.log(START)
    theta, curve = np.zeros(2), []
    for step in range(STEPS):
        logits = features @ theta + bias
        p = np.exp(logits - logits.max())
        p /= p.sum()
        curve.append(p)
        arms = rng.choice(3, size=PROMPTS * GROUP, p=p)
        advantage = advantages(stack, arms, GROUP, step)
        theta += RATE * (advantage[:, None] * (features[arms] - p @ features)).mean(0)
    return np.array(curve)


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "fapo",
        "flawed rollouts at the end, where they teach a part of what flawless ones need (bandit)",
        "lower",
        r["shared"]["lambda 1"]["flawed"],
        r["shared"]["lambda 0 (GRPO)"]["flawed"],
        baseline="GRPO",
        note="as fast at the start",
    )
    yield record(
        "fapo",
        "flawless rollouts at the end, where flawed ones teach nothing of them (bandit)",
        "higher",
        r["separate"]["lambda 1"]["flawless"],
        r["separate"]["lambda 0 (GRPO)"]["flawless"],
        baseline="GRPO",
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=10), time.time()
    signs = sign_rule()
    for penalty, row in signs.items():
        print(f"sign rule, lambda {penalty}: {row['exceptions']} exceptions in {row['groups']} groups")

    results: dict[str, Any] = {}
    curves: dict[str, dict[str, Any]] = {}
    print(f"\n{'':34s}{'steps to half right':>22s}{'right':>20s}{'flawed':>20s}{'flawless':>20s}")
    for setting in FEATURES:
        for method, (penalty, error) in METHODS.items():
            runs = [train(setting, penalty, error, seed) for seed in range(args.seeds)]
            curves.setdefault(setting, {})[method] = runs
            right = [1 - run[:, WRONG] for run in runs]
            found = {
                "steps": interval([float(np.argmax(r >= 0.5)) if (r >= 0.5).any() else float(STEPS) for r in right]),
                "right": interval([r[-10:].mean() for r in right]),
                "flawed": interval([run[-10:, FLAWED].mean() for run in runs]),
                "flawless": interval([run[-10:, FLAWLESS].mean() for run in runs]),
            }
            results.setdefault(setting, {})[method] = found
            cells = [f"{found[c]['mean']:.3f} +- {found[c]['ci95']:.3f}" for c in ("right", "flawed", "flawless")]
            steps = f"{found['steps']['mean']:.1f} +- {found['steps']['ci95']:.1f}"
            print(f"{setting:10s}{method:24s}{steps:>22s}" + "".join(f"{cell:>20s}" for cell in cells))

    settings = dict(prompts=PROMPTS, group=GROUP, steps=STEPS, rate=RATE, start=START, error=ERROR, seeds=args.seeds)
    content = {"method": "fapo", "settings": settings, "sign_rule": signs, "results": results}
    save(args.out, "fapo", content, lambda: plot(curves), start, records=records(results), where="fapo-10-seeds")


def plot(curves: dict[str, dict[str, Any]]) -> Figure:
    figure, axes = panels(4, sharey=True)
    shown = [(setting, arm) for setting in curves for arm in (FLAWLESS, FLAWED)]
    for axis, (setting, arm) in zip(axes, shown, strict=True):
        for i, (method, runs) in enumerate(curves[setting].items()):
            runs_band(axis, range(STEPS), [run[:, arm] for run in runs], method, i)
        what = "flawless" if arm == FLAWLESS else "flawed"
        named(axis, "optimizer step", "share of the rollouts", f"{what.capitalize()}, {setting} features")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
