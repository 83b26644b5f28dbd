"""DRPO's mechanism, measured: does shortening cost right answers, and what do micro-batches do to the objective?

    python examples/evidence/drpo.py --seeds 10 --out evidence-results

Example. Six answers to one question, three of them right, with a length reward of 1 - L/C for right ones: advantages of
GRPO, of GRPO with the length reward, and the weights of DRPO.

Learning. A softmax policy over four lengths for each of 64 questions. Half are easy: any length is right in 90 % of the
cases. Half are hard: only long answers are (10, 30, 60, 90 %). GRPO gets the reward right * (1 - penalty * L/C) with
several penalties, DRPO several lambdas; both take two Adam updates per batch, so that clipping and the trust region
act. Shown are accuracy and length of the trained policies: the upper left is better.

Micro-batches. Relative error of the gradient when the objective is formed inside shuffled micro-batches of 16 of 64
rows instead of over the optimizer step, for two temperatures tau, on-policy and after a small move.

Everything of DRPO comes from the method itself (`advantages`, `shape`, `before_update`, `policy_loss`) through the
driver; GRPO's advantages from the estimator of rl_plugins. Intervals are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from common import across, arguments, named, record, save, summary
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.rollouts import Rollouts, Rows, Terms
from rl_plugins.lab.compare.figures import bars, color, line, panels
from rl_plugins.methods.drpo import Drpo
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

C = 8  # the longest answer
LENGTHS = np.array([1, 2, 4, 8])
EASY, HARD = [0.9, 0.9, 0.9, 0.9], [0.1, 0.3, 0.6, 0.9]
QUESTIONS, GROUP, BATCHES, UPDATES = 64, 8, 60, 2
PENALTIES, LAMBDAS = (0.0, 0.3, 0.6, 0.9), (float("inf"), 1.0, 0.3, 0.1)
ARMS = [("GRPO", p) for p in PENALTIES] + [("DRPO", x) for x in LAMBDAS]


def make_stack(**params: float) -> MethodStack:
    return start_stack(Drpo(Drpo.Params(**params)), run=make_run(max_completion_length=C, group_size=GROUP))


def example() -> dict[str, list[float]]:
    right, lengths = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [1, 3, 7, 2, 4, 8]
    rewards = [r * (1 - n / C) for r, n in zip(right, lengths, strict=True)]
    out = {
        "GRPO": one_step(start_stack(), make_rollouts(right, [0] * 6, lengths=lengths)).row_advantages.tolist(),
        "GRPO + length": one_step(start_stack(), make_rollouts(rewards, [0] * 6)).row_advantages.tolist(),
        "DRPO": one_step(make_stack(length_temperature=0.3), make_rollouts(right, [0] * 6, lengths=lengths))
        .row_advantages.tolist(),
    }  # fmt: skip
    print(
        "answers: right, length  "
        + "".join(f"{'yes' if r else 'no':>6} {n}" for r, n in zip(right, lengths, strict=True))
    )
    for name, values in out.items():
        print(f"{name:22}  " + "".join(f"{v:>8.2f}" for v in values))
    return out


def drpo_loss(
    stack: MethodStack, group: Tensor, columns: dict[str, Tensor], logprobs: Tensor, old: Tensor, mask: Tensor
) -> Tensor:
    """The loss of one optimizer step on these rows, (rows, time), through the hooks of the update."""
    length, live = mask.sum(1), (mask > 0)
    sums = [torch.where(live, x.detach(), 0.0).double().sum(1) for x in (logprobs, old)]
    rows = Rows(group=group, length=length, logprobs=sums[0], old_logprobs=sums[1], columns=columns)
    update = stack.call("before_update", stack.methods[0], rows)
    terms = Terms(
        mask=mask,
        logprobs=logprobs,
        advantages=torch.zeros_like(logprobs),
        old_logprobs=old,
        num_tokens=length.sum(),
        num_rows=torch.tensor(float(len(length))),
        max_length=C,
        columns={k: v[:, None] for k, v in update.columns.items()},
    )
    stack.metrics.take()
    return torch.where(live, stack.one("policy_loss", terms), 0.0).sum()


def learn(arm: str, value: float, seed: int) -> tuple[float, float]:
    """Accuracy in percent and mean length in percent of the longest answer, of the policy after training."""
    rng = np.random.default_rng([seed, 5])
    right_of = np.array([EASY if q % 2 == 0 else HARD for q in range(QUESTIONS)])
    stack = make_stack(length_temperature=value) if arm == "DRPO" else start_stack()
    question = np.repeat(np.arange(QUESTIONS), GROUP)
    logits = torch.zeros(QUESTIONS, len(LENGTHS), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.05)
    for _ in range(BATCHES):
        policy = torch.softmax(logits.detach(), 1).numpy()
        choice = (rng.random((len(question), 1)) > policy.cumsum(1)[question]).sum(1).clip(max=len(LENGTHS) - 1)
        right = (rng.random(len(question)) < right_of[question, choice]).astype(float)
        length = LENGTHS[choice]
        reward = right if arm == "DRPO" else right * (1 - value * length / C)
        rollouts = make_rollouts(reward, question.tolist(), lengths=length.tolist())
        decision = one_step(stack, rollouts)
        at = torch.from_numpy(question), torch.from_numpy(choice)
        old = torch.log_softmax(logits.detach(), 1)[at][:, None]
        one_token = torch.ones(len(question), 1, dtype=torch.int64)  # what the policy decides is the length alone
        for _ in range(UPDATES):
            logprobs = torch.log_softmax(logits, 1)[at][:, None]
            if arm == "DRPO":
                loss = drpo_loss(stack, rollouts.group, decision.row_columns, logprobs, old, one_token)
            else:
                loss = ppo_clip(logprobs, old, decision.row_advantages[:, None]).mean()
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([logits], 1.0)
            adam.step()
    policy = torch.softmax(logits.detach(), 1).numpy()
    return 100 * float((policy * right_of).sum(1).mean()), 100 * float((policy * LENGTHS / C).sum(1).mean())


def micro_batch_error(tau: float, drift: float, seed: int) -> float:
    """Relative error of the gradient, in percent, when the objective is formed inside micro-batches of 16 rows."""
    rng = np.random.default_rng([seed, 6])
    rows, time = 64, C
    right = (rng.random(rows) < 0.5).astype(float)
    rollouts = make_rollouts(right, group_size=GROUP, lengths=rng.integers(1, C + 1, rows).tolist())
    old = torch.from_numpy(-rng.exponential(size=(rows, time)))
    new = old + drift * torch.from_numpy(rng.normal(size=(rows, time)))
    mask = (torch.arange(time)[None] < rollouts.length[:, None]).long()
    stack = make_stack(score_temperature=tau)
    columns = one_step(stack, rollouts).row_columns

    def gradient(micro_batches: Sequence[np.ndarray]) -> Tensor:
        lp = new.clone().requires_grad_()
        parts = [_part(rollouts, columns, rows) for rows in micro_batches]
        losses = [
            drpo_loss(stack, group, own, lp[rows], old[rows], mask[rows])
            for (group, own), rows in zip(parts, micro_batches, strict=True)
        ]
        (grad,) = torch.autograd.grad(torch.stack(losses).mean(), lp)
        return grad

    exact = gradient([np.arange(rows)])
    inside = gradient(np.split(rng.permutation(rows), 4))
    return 100 * float((inside - exact).norm() / exact.norm())


def _part(rollouts: Rollouts, columns: dict[str, Tensor], rows: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
    return rollouts.group[rows], {k: v[rows] for k, v in columns.items()}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "drpo",
        "accuracy at about half of the longest length, lambda 0.3",
        "higher",
        r["DRPO | 0.3"]["accuracy"],
        r["GRPO | 0.3"]["accuracy"],
        baseline="GRPO with a length penalty",
        unit="%",
    )
    yield record(
        "drpo",
        "accuracy at two thirds of the longest length, lambda 1",
        "higher",
        r["DRPO | 1"]["accuracy"],
        r["GRPO | 0.3"]["accuracy"],
        baseline="GRPO with a length penalty",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=10)
    start = time.time()
    result: dict = {"seeds": args.seeds, "example": example(), "learning": {}, "micro_batch_error_percent": {}}
    print(f"\n{'arm':22}{'accuracy %':>18}{'length % of C':>20}")
    for arm, value in ARMS:
        runs = [learn(arm, value, seed) for seed in range(args.seeds)]
        accuracy, length = summary([r[0] for r in runs]), summary([r[1] for r in runs])
        name = f"{arm} | {value:g}"
        result["learning"][name] = {"accuracy": accuracy, "length": length}
        label = f"{arm}, {'lambda' if arm == 'DRPO' else 'penalty'} {value:g}"
        print(f"{label:22}" + "".join(f"{c['mean']:>12.1f} +-{c['ci95']:<4.1f}" for c in (accuracy, length)))
    print(f"\n{'tau':>5}{'move':>7}{'error inside micro-batches %':>32}")
    for tau in (10.0, 0.5):
        for drift in (0.0, 0.02):
            cell = summary([micro_batch_error(tau, drift, seed) for seed in range(args.seeds)])
            result["micro_batch_error_percent"][f"tau {tau:g} | move {drift:g}"] = cell
            print(f"{tau:>5g}{drift:>7g}{cell['mean']:>22.1f} +-{cell['ci95']:.1f}")
    save(
        args.out, "drpo", result, lambda: plot(result), start, records=records(result["learning"]), where="drpo-3-seeds"
    )


def plot(result: dict) -> Figure:
    figure, (example, trained, inside) = panels(3, 3.0)
    answers = ["right\nL=1", "right\nL=3", "right\nL=7", "wrong\nL=2", "wrong\nL=4", "wrong\nL=8"]
    bars(example, answers, {key: [(v, 0.0) for v in values] for key, values in result["example"].items()})
    example.axhline(0, color=color(0), linewidth=0.8)
    named(example, "six answers to one question (C = 8)", "advantage / weight of the score")
    example.legend()
    for i, arm in enumerate(("GRPO", "DRPO")):
        cells = {v: result["learning"][f"{a} | {v:g}"] for a, v in ARMS if a == arm}
        x, y = ([c[k]["mean"] for c in cells.values()] for k in ("length", "accuracy"))
        dx, dy = ([c[k]["ci95"] for c in cells.values()] for k in ("length", "accuracy"))
        word = "lambda" if arm == "DRPO" else "penalty"
        trained.errorbar(x, y, dy, dx, marker="o", ms=3.5, capsize=2, label=f"{arm} (numbers: {word})", **line(i))
        for v, a, b in zip(cells, x, y, strict=True):
            trained.annotate(f"{v:g}", (a, b), textcoords="offset points", xytext=(5, -11), color=color(i), fontsize=8)
    named(trained, "mean length (% of the longest)", "accuracy (%)")
    trained.legend()
    cells = result["micro_batch_error_percent"]
    across(inside, cells, cells.values(), "relative error of the gradient (%)")
    inside.set_title("Objective inside micro-batches of 16 of 64 rows", loc="left")
    return figure


if __name__ == "__main__":
    main()
