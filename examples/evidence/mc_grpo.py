"""MC-GRPO's mechanism, measured: how often is the sign of an advantage wrong, and does it matter for learning?

    python examples/evidence/mc_grpo.py --seeds 10 --out evidence-results

Signs. Rewards of a group are drawn from a known distribution, so the true advantage (reward minus its expectation) of
every rollout is known. GRPO uses G rollouts, MC-GRPO generates G + 1 and trains G. Counted over trained rollouts: the
share whose advantage has the opposite sign of the true one, and the share with advantage 0. GRPO with G + 1 rollouts is
the control with equal generation.

Learning. A softmax policy over 8 answers for each of 64 prompts; a reward is the answer's value plus noise: normal, or
small with an extreme value (+-10) in a tenth of the cases. Adam, gradient norm limited to 1 as in the hosts. Shown is
how much of the way from the uniform to the best policy is gone after a fixed number of updates. MC-GRPO runs with the
paper's scale (MAD), with the standard deviation as scale, and with the paper's scale and |advantage| limited to 3,
which separates the effect of the median baseline from that of the scale.

The advantages come from the method itself (plan, advantages, shape) through the driver, those of GRPO from the
estimator of rl_plugins. Intervals are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from common import arguments, grouped, named, record, save, summary
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, one_step, start_stack

SIZES = (2, 4, 8)
GRPO, CONTROL, PAPER = "GRPO, G", "GRPO, G+1", "MC-GRPO, G"
VARIANTS = {  # arm -> parameters of MC-GRPO
    PAPER: {},
    "MC-GRPO, scale std": {"scale": "std"},
    "MC-GRPO, clip 3": {"advantage_clip": 3.0},
}
ARMS = (GRPO, CONTROL, *VARIANTS)
SIGN_ARMS = ARMS[:3]  # neither the scale nor the limit changes a sign
REWARDS = {  # name -> (sample, expectation)
    "normal": (lambda rng, n: rng.normal(size=n), 0.0),
    "three levels": (lambda rng, n: rng.choice([2.0, 1.5, 0.0], size=n, p=[0.3, 0.3, 0.4]), 1.05),
    "two levels": (lambda rng, n: rng.choice([1.0, 0.0], size=n, p=[0.3, 0.7]), 0.3),
}
NOISE = ("normal", "outliers")
GROUPS, PROMPTS, ANSWERS, STEPS = 1000, 64, 8, 60


def make_arm(arm: str, group_size: int) -> tuple[MethodStack, int]:
    """The stack of an arm, and how many rollouts per prompt it trains."""
    if arm in VARIANTS:
        return start_stack(McGrpo(McGrpo.Params(**VARIANTS[arm]))), group_size
    return start_stack(), group_size + (arm == CONTROL)


def add_noise(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    if kind == "normal":
        return values + rng.normal(size=len(values))
    extreme = rng.choice([0.0, 10.0, -10.0], size=len(values), p=[0.9, 0.05, 0.05])
    return values + 0.5 * rng.normal(size=len(values)) + extreme


def rows_of(stack: MethodStack, prompts: int, trained: int) -> list[int]:
    """The prompt of every row that the stack's plan generates."""
    plan = first_plan(stack, range(prompts), trained, prompts * trained, None)
    return [row.prompt_index for row in plan.rows for _ in range(row.n + row.spare)]


def decide_rows(stack: MethodStack, rewards: np.ndarray, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (rows,), and which rows stay in the update."""
    decision = one_step(stack, make_rollouts(rewards, prompt, lengths=[1] * len(prompt)))
    return decision.row_advantages, decision.trained


def sign_errors(arm: str, group_size: int, rewards: str, seed: int) -> tuple[float, float]:
    """Shares of trained rollouts with the opposite sign and with advantage 0, in percent."""
    stack, trained = make_arm(arm, group_size)
    prompt = rows_of(stack, GROUPS, trained)
    sample, expectation = REWARDS[rewards]
    values = sample(np.random.default_rng([seed, group_size]), len(prompt))
    advantages, stay = decide_rows(stack, values, prompt)
    assert int(stay.sum()) == GROUPS * trained
    true = torch.from_numpy(values) - expectation
    wrong, zero = (advantages * true < 0)[stay], (advantages == 0)[stay]
    return 100 * float(wrong.double().mean()), 100 * float(zero.double().mean())


def learn(arm: str, group_size: int, noise: str, seed: int) -> float:
    """How much of the way from the uniform to the best policy is gone after STEPS updates, in percent."""
    rng = np.random.default_rng([seed, 77])
    value = rng.normal(size=(PROMPTS, ANSWERS))
    stack, trained = make_arm(arm, group_size)
    logits = torch.zeros(PROMPTS, ANSWERS, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.05)
    for _ in range(STEPS):
        prompt = np.array(rows_of(stack, PROMPTS, trained))
        policy = torch.softmax(logits.detach(), 1).double().numpy()
        answer = (rng.random((len(prompt), 1)) > policy.cumsum(1)[prompt]).sum(1).clip(max=ANSWERS - 1)
        reward = add_noise(value[prompt, answer], noise, rng)
        advantages, stay = decide_rows(stack, reward, prompt.tolist())
        logprobs = torch.log_softmax(logits, 1)[torch.from_numpy(prompt), torch.from_numpy(answer)]
        loss = -(advantages.float() * logprobs)[stay].mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([logits], 1.0)
        adam.step()
    policy = torch.softmax(logits.detach(), 1).double().numpy()
    uniform, best = value.mean(), value.max(1).mean()
    return 100 * float(((policy * value).sum(1).mean() - uniform) / (best - uniform))


def measure_signs(seeds: int) -> dict[str, dict[str, dict[str, float]]]:
    out: dict[str, dict[str, dict[str, float]]] = {"sign_wrong_percent": {}, "zero_percent": {}}
    print(f"{'rewards':14}{'G':>3}  " + "".join(f"{a + ': wrong / zero %':>30}" for a in SIGN_ARMS))
    for rewards in REWARDS:
        for size in SIZES:
            line = f"{rewards:14}{size:>3}  "
            for arm in SIGN_ARMS:
                pairs = [sign_errors(arm, size, rewards, seed) for seed in range(seeds)]
                wrong, zero = summary([p[0] for p in pairs]), summary([p[1] for p in pairs])
                out["sign_wrong_percent"][key(rewards, size, arm)] = wrong
                out["zero_percent"][key(rewards, size, arm)] = zero
                line += f"{wrong['mean']:>16.2f} +-{wrong['ci95']:.2f} / {zero['mean']:4.1f}"
            print(line)
    return out


def measure_learning(seeds: int) -> dict[str, dict[str, dict[str, float]]]:
    out: dict[str, dict[str, dict[str, float]]] = {"learned_percent": {}, "learned_minus_grpo": {}}
    print(f"\n{'learned %':14}{'G':>3}  " + "".join(f"{a:>20}" for a in ARMS))
    for noise in NOISE:
        for size in (SIZES[0], SIZES[-1]):
            runs = {arm: [learn(arm, size, noise, seed) for seed in range(seeds)] for arm in ARMS}
            for arm, values in runs.items():
                gain = [a - b for a, b in zip(values, runs[GRPO], strict=True)]
                out["learned_percent"][key(noise, size, arm)] = summary(values)
                out["learned_minus_grpo"][key(noise, size, arm)] = summary(gain)
            cells = [out["learned_percent"][key(noise, size, arm)] for arm in ARMS]
            print(f"{noise:14}{size:>3}  " + "".join(f"{c['mean']:>13.1f} +-{c['ci95']:<4.1f}" for c in cells))
    return out


def key(*parts: object) -> str:
    return " | ".join(map(str, parts))


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "mc_grpo",
        "advantages with the wrong sign, normal rewards, groups of 4",
        "lower",
        r["sign_wrong_percent"][key("normal", 4, PAPER)],
        r["sign_wrong_percent"][key("normal", 4, CONTROL)],
        baseline="GRPO with one more rollout",
        unit="%",
    )
    yield record(
        "mc_grpo",
        "advantages with the wrong sign, two reward levels",
        "lower",
        r["sign_wrong_percent"][key("two levels", 4, PAPER)],
        r["sign_wrong_percent"][key("two levels", 4, GRPO)],
        baseline="GRPO",
        unit="%",
    )
    yield record(
        "mc_grpo",
        "way to the best policy, normal rewards, groups of 2",
        "higher",
        r["learned_percent"][key("normal", 2, PAPER)],
        r["learned_percent"][key("normal", 2, GRPO)],
        baseline="GRPO",
        unit="%",
    )
    yield record(
        "mc_grpo",
        "way to the best policy, normal rewards, groups of 2, `advantage_clip: 3`",
        "higher",
        r["learned_percent"][key("normal", 2, "MC-GRPO, clip 3")],
        r["learned_percent"][key("normal", 2, CONTROL)],
        baseline="GRPO with one more rollout",
        unit="%",
    )
    yield record(
        "mc_grpo",
        "way to the best policy, rewards with outliers, groups of 8, `advantage_clip: 3`",
        "higher",
        r["learned_percent"][key("outliers", 8, "MC-GRPO, clip 3")],
        r["learned_percent"][key("outliers", 8, CONTROL)],
        baseline="GRPO with one more rollout",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=10)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)  # two reward levels are warned about, and measured here
    start = time.time()
    result = {"seeds": args.seeds, **measure_signs(args.seeds), **measure_learning(args.seeds)}
    save(args.out, "mc_grpo", result, lambda: plot(result), start, records=records(result), where="mc_grpo-10-seeds")


def plot(result: dict) -> Figure:
    figure, axes = panels(4)

    def draw_bars(axis: Axes, table: dict, first: str, sizes: Sequence[int], arms: Sequence[str]) -> None:
        grouped(axis, map(str, sizes), {arm: [table[key(first, size, arm)] for size in sizes] for arm in arms})

    for axis, rewards in zip(axes, ("normal", "three levels"), strict=False):
        draw_bars(axis, result["sign_wrong_percent"], rewards, SIZES, SIGN_ARMS)
        axis.set_ylim(0, 28)
        named(axis, "G, trained rollouts per prompt", "rollouts with wrong sign (%)", f"Signs, rewards: {rewards}")
    for axis, noise in zip(axes[2:], NOISE, strict=True):
        draw_bars(axis, result["learned_percent"], noise, (SIZES[0], SIZES[-1]), ARMS)
        axis.set_ylim(0, 100)
        named(axis, "G, trained rollouts per prompt", "way to the best policy gone (%)", f"Learning, noise: {noise}")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
