"""BRPO (arXiv 2506.00103): what do verdicts in both orders and the filter protect against, and what not?

A simulation without a model. A completion is one of 40 arms with a hidden quality and a verbosity, independent of each
other; the policy is a softmax over the arms, trained by plain policy gradient with the advantages of the real method
(through the driver) or of GRPO. What is compared is scored by the same noisy taste

    taste = quality + length_bias * verbosity + noise

GRPO sees it as a scalar reward; the pairwise judge prefers A over B if taste(A) - taste(B) + position_bias > 0.

Arms of the comparison: BRPO (both orders, filter 0.6), BRPO without the filter, "one order" (the judge is asked in one
random order and its verdict used for both), GRPO on the scalar. Measured after the last step: mean quality and mean
verbosity of the policy, the share of groups that left, and how often verdicts agree.

Found (3 seeds, 100 steps, differences on the same arms): both orders with the filter learn faster than one order (by
.033 +- .027 in quality; .042 +- .034 with a position bias of .3), without the filter they do not. A strong position
bias cannot leak, but starves the run: 94 % of the groups leave and little is learned. A length bias that judge and
scalar share is exploited alike (verbosity .82 and .93 at quality .84 and .92): the rule does not protect against it,
only a better judge does. GRPO on the scalar is faster, for verdicts keep the sign only.

    python examples/evidence/brpo.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import arguments, interval, named, record, runs_band, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.brpo import Brpo
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, one_step, start_stack

ARMS, PROMPTS, GROUP, STEPS, RATE, NOISE = 40, 8, 16, 100, 0.6, 0.3
METHODS = ("BRPO", "BRPO, no filter", "BRPO, one order", "GRPO, scalar")
SETTINGS = {  # position bias (in units of taste), length bias
    "no bias": (0.0, 0.0),
    "position bias 0.3": (0.3, 0.0),
    "position bias 1": (1.0, 0.0),
    "length bias 1": (0.0, 1.0),
}
Judge = Callable[[list[tuple[str, str, str]]], list[tuple[float, float]]]


def judge_of(taste: np.ndarray, position_bias: float, one_order: bool, rng: np.random.Generator) -> Judge:
    """A judge of completions "arm#number"; noise is new for every question, or one coin decides both orders."""

    def judge(pairs: list[tuple[str, str, str]]) -> list[tuple[float, float]]:
        arms = np.array([[int(x.split("#")[0]) for x in pair[1:]] for pair in pairs])
        scores = taste[arms] + NOISE * rng.normal(size=arms.shape)
        scores[:, 0] += position_bias
        if one_order:  # questions come in both orders, one after the other; the order that is asked is drawn
            swap = rng.random(len(pairs) // 2) < 0.5
            for i, second in enumerate(swap):
                scores[2 * i + (not second)] = scores[2 * i + second][::-1]
        return [(float(a), float(b)) for a, b in scores]

    return judge


def stack_of(method: str, judge: Judge, seed: int) -> MethodStack:
    if method.startswith("GRPO"):
        return start_stack(seed=seed)
    tau = 1.0 if method == "BRPO, no filter" else 0.6
    return start_stack(Brpo(Brpo.Params(judge=judge, judge_batch_size=10**6, filter_tau=tau)), seed=seed)


def train(method: str, position_bias: float, length_bias: float, seed: int) -> dict[str, Any]:
    """Quality and verbosity of the policy after each step, and what the method logged, on average."""
    rng = np.random.default_rng([seed, 0])
    quality, verbosity = rng.random(ARMS), rng.random(ARMS)
    taste = quality + length_bias * verbosity
    rng = np.random.default_rng([seed, 1])
    stack = stack_of(method, judge_of(taste, position_bias, method == "BRPO, one order", rng), seed)
    logits, curve, logged = np.zeros(ARMS), [], []
    for step in range(STEPS):
        p = np.exp(logits - logits.max())
        p /= p.sum()
        curve.append((p @ quality, p @ verbosity))
        arms = rng.choice(ARMS, size=PROMPTS * GROUP, p=p)
        rollouts = make_rollouts(taste[arms] + NOISE * rng.normal(size=len(arms)), group_size=GROUP, batch=step)
        rollouts = rollouts.replace(
            text=[f"{arm}#{step}.{i}" for i, arm in enumerate(arms)],  # the number keeps equal arms apart
            meta={"prompt": [f"prompt {g}" for g in rollouts.group.tolist()]},
        )
        decision = one_step(stack, rollouts)
        logged.append(combine([stack.metrics.take()]))
        kept = decision.stays.numpy()
        if kept.any():
            advantage = decision.row_advantages.numpy()[kept]
            gradient = (np.bincount(arms[kept], advantage, ARMS) - advantage.sum() * p) / kept.sum()
            logits += RATE * gradient
    mean = {k: float(np.mean([x[k] for x in logged if k in x])) for k in logged[0]}
    return {"curve": np.array(curve), "logged": mean}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "brpo",
        "quality with both orders and the filter, against one order",
        "higher",
        difference=r["no bias"]["BRPO"]["quality - one order"],
    )


def main() -> None:
    args = arguments(__doc__, seeds=5)

    results: dict[str, Any] = {}
    curves: dict[str, dict[str, Any]] = {}
    for setting, (position_bias, length_bias) in SETTINGS.items():
        for method in METHODS:
            runs = [train(method, position_bias, length_bias, seed) for seed in range(args.seeds)]
            curves.setdefault(setting, {})[method] = [run["curve"][:, 0] for run in runs]
            found = {
                "quality": interval([run["curve"][-1, 0] for run in runs]),
                "verbosity": interval([run["curve"][-1, 1] for run in runs]),
            }
            for name in ("dropped", "agree"):
                if f"brpo/{name}" in runs[0]["logged"]:
                    found[name] = interval([run["logged"][f"brpo/{name}"] for run in runs])
            results.setdefault(setting, {})[method] = found
        one_order = np.array(results[setting]["BRPO, one order"]["quality"]["seeds"])
        for found in results[setting].values():  # the seeds share their arms
            found["quality - one order"] = interval(np.array(found["quality"]["seeds"]) - one_order)

    constants = dict(arms=ARMS, prompts=PROMPTS, group=GROUP, steps=STEPS, rate=RATE, noise=NOISE, seeds=args.seeds)
    content = {"method": "brpo", "settings": constants, "results": results}
    save(args.out, "brpo", content, lambda: plot(curves), records=records(results), where="v0_5-v0-brpo-3-seeds")
    columns = ("quality", "quality - one order", "verbosity", "dropped", "agree")
    print(f"{'':38s}" + "".join(f"{name:>22s}" for name in columns))
    for setting, methods in results.items():
        for method, found in methods.items():
            cells = [f"{found[c]['mean']:.3f} +- {found[c]['ci95']:.3f}" if c in found else "" for c in columns]
            print(f"{setting:20s}{method:18s}" + "".join(f"{cell:>22s}" for cell in cells))


def plot(curves: dict[str, dict[str, Any]]) -> Figure:
    figure, axes = panels(len(curves), sharey=True)
    for axis, (setting, methods) in zip(axes, curves.items(), strict=True):
        for i, (method, runs) in enumerate(reversed(methods.items())):
            runs_band(axis, range(len(runs[0])), runs, method, i)
        named(axis, "optimizer step", "true mean quality of the policy (0 to 1)", setting.capitalize())
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
