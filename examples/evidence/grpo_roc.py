"""Does Resample on Correct make correct rollouts cleaner, without a word about it in the reward?

A softmax policy over three ways to answer: right with working tool calls ("clean"), right through failing ones
("dirty"), and wrong. The reward sees right or wrong only. Compared are plain GRPO, plain GRPO with as many rollouts as
GRPO-RoC generates, GRPO-RoC with its two ways to select, and the negative control: GRPO-RoC whose penalties are
shuffled among the rollouts. Figures are P(dirty | correct) and the accuracy, mean and 95 % confidence interval over
seeds.

Groups of equal rewards leave in GRPO-RoC, which makes the steps of the others larger (plain SGD, mean over the rows
that stay). "equal groups stay" is without that: compare its accuracy with that of GRPO.

    python examples/evidence/grpo_roc.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import interval, named, parsed, record, runs_band, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.grpo_roc import GrpoRoc
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack

GROUPS, GROUP_SIZE, LEARNING_RATE = 16, 8, 0.1
START = (0.2, 0.2, 0.6)  # clean, dirty, wrong
TURN, TOOL = "<|im_start|>assistant\n{}<|im_end|>\n", "<tool_response>{}</tool_response>\n"
ANSWER = TURN.format("<answer>1</answer>")
TEXT = (
    TURN.format("call") + TOOL.format("42") + ANSWER,
    TURN.format("call") + TOOL.format("NameError: x") + TURN.format("call") + TOOL.format("42") + ANSWER,
    TURN.format("call") + TOOL.format("41") + ANSWER,
)


def shuffled_penalty(seed: int):
    """The penalty of the method, dealt out at random: what is selected no longer has to do with quality."""
    rng, real = np.random.default_rng([seed, 1]), GrpoRoc()

    def penalty(rollouts):
        return real._penalty(rollouts)[torch.from_numpy(rng.permutation(len(rollouts)))]

    penalty.needs = {"raw_text"}
    return penalty


def conditions(seed: int) -> dict[str, tuple[MethodStack, int]]:
    """Name -> methods and trained group size."""

    def run(*methods: GrpoRoc, group_size: int = GROUP_SIZE) -> tuple[MethodStack, int]:
        return start_stack(*methods, seed=seed, run=make_run(group_size=group_size)), group_size

    def roc(**params) -> GrpoRoc:
        return GrpoRoc(GrpoRoc.Params(**params))

    return {
        "GRPO": run(),
        "GRPO, twice the rollouts": run(group_size=2 * GROUP_SIZE),
        "GRPO-RoC": run(roc()),
        "GRPO-RoC, equal groups stay": run(roc(reject_equal_reward=False)),
        "GRPO-RoC, inverse_prob": run(roc(positive_selection="inverse_prob")),
        "GRPO-RoC, penalties shuffled": run(roc(penalty=shuffled_penalty(seed))),
    }


def train(stack: MethodStack, group_size: int, seed: int, steps: int) -> np.ndarray:
    """(steps, 2): P(dirty | correct) and the accuracy of the policy before each step."""
    rng, logits, curve = np.random.default_rng(seed), np.log(START), []
    for _ in range(steps):
        p = np.exp(logits - logits.max())
        p /= p.sum()
        curve.append((p[1] / (p[0] + p[1]), p[0] + p[1]))
        plan = first_plan(stack, range(GROUPS), group_size, GROUPS * group_size, None)
        group = np.repeat([r.group for r in plan.rows], [r.n + r.spare for r in plan.rows])
        action = rng.choice(3, size=len(group), p=p)
        rollouts = make_rollouts(
            (action < 2) * 1.0, group, raw_text=[TEXT[a] for a in action], lengths=[1] * len(group)
        )
        decision = one_step(stack, rollouts, make_tokens(rollouts), budget=GROUPS * group_size)
        trained = decision.trained.numpy()
        gradient = decision.row_advantages.numpy()[trained, None] * (np.eye(3)[action[trained]] - p)
        logits = logits + LEARNING_RATE * gradient.sum(0) / max(trained.sum(), 1)
    return np.array(curve)


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "grpo_roc",
        "share of right answers reached in a dirty way",
        "lower",
        r["GRPO-RoC"]["dirty_given_correct"],
        r["GRPO, twice the rollouts"]["dirty_given_correct"],
        baseline="GRPO with twice the rollouts",
    )
    yield record(
        "grpo_roc",
        "accuracy, against shuffled penalties (control)",
        "higher",
        r["GRPO-RoC"]["accuracy"],
        r["GRPO-RoC, penalties shuffled"]["accuracy"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parsed(parser, seeds=5)
    logging.disable(logging.WARNING)  # a policy that is always right makes whole batches of equal rewards

    curves: dict[str, list[np.ndarray]] = {}
    for seed in range(args.seeds):
        for name, (stack, group_size) in conditions(seed).items():
            curves.setdefault(name, []).append(train(stack, group_size, seed, args.steps))

    results = {}
    print(f"{'after ' + str(args.steps) + ' steps':32}{'P(dirty | correct)':>22}{'accuracy':>20}")
    for name, runs in curves.items():
        last = {what: interval([r[-1, i] for r in runs]) for i, what in enumerate(("dirty_given_correct", "accuracy"))}
        results[name] = last
        print(f"{name:32}" + "".join(f"{v['mean']:>14.3f} ± {v['ci95']:.3f}" for v in last.values()))
    settings = {"groups": GROUPS, "group_size": GROUP_SIZE, "learning_rate": LEARNING_RATE, "start": START}
    record = {"method": "grpo_roc", "steps": args.steps, "seeds": args.seeds, "settings": settings, "results": results}
    save(args.out, "grpo_roc", record, lambda: plot(curves), records=records(results), where="grpo_roc-5-seeds")


def plot(curves: dict[str, list[np.ndarray]]) -> Figure:
    figure, axes = panels(2)
    labels = ("P(dirty | correct): tool errors among correct rollouts", "P(correct)")
    for column, (axis, label) in enumerate(zip(axes, labels, strict=True)):
        for i, (arm, runs) in enumerate(curves.items()):
            runs_band(axis, range(len(runs[0])), [run[:, column] for run in runs], arm, i)
        axis.set_ylim(0, 1)
        named(axis, "optimizer step", label)
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
