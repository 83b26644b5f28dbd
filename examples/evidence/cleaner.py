"""CLEANER's mechanism, measured: does erasing failed calls teach the policy to make the right one first?

    python examples/evidence/cleaner.py --seeds 5 --out evidence-results

An agent makes a call, which is good or bad, and answers once a call has succeeded; then the answer is right in 70 %
of the episodes, whatever came before. At the start the first call is good in 20 % or 50 % of the cases, and a call
after an error in 60 %: two logits, trained by plain gradient ascent on GRPO's advantages (of the library's driver), 8
groups of 8 rollouts, 30 updates. Both arms have four tries: the plain loop as four turns, CLEANER as three retries of
one. Grafted calls are trained in the merged context, as the method has it.

Reported: the chance that the first call is good after the updates, and that of a call after an error; the expected
gradient on the first call at the start, next to what theory says (below); and the share of rollouts whose error is seen
by the policy in training.

Theory. With mean-centered advantages only differences inside a group teach. Where all rollouts are repaired, all say
the same, and nothing is learned from them; what teaches is that a call that stays bad costs the reward. With q bad
first calls, a share f = 0.4^3 of which stays bad, the gradient is 0.7 q f (1 - q) in the plain loop and
0.7 q f (1 - q f) with CLEANER.

The method and the plain loop (rollback_probability 0) come from the library and run on the fake engine. Intervals are
95 % Student intervals over seeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import arguments, named, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.requests import Trajectory
from rl_plugins.kit.agents import Observation
from rl_plugins.lab.compare.figures import line, name_lines, panels
from rl_plugins.methods.cleaner import Cleaner
from rl_plugins.testing import make_rollouts, one_step, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

GROUPS, SIZE, UPDATES, RATE, RIGHT, FIX, TRIES = 8, 8, 30, 8.0, 0.7, 0.6, 4
STARTS = (0.2, 0.5)
ARMS = {
    "plain loop": {"rollback_probability": 0.0, "max_turns": TRIES + 1},
    "CLEANER": {"note": "", "max_tool_retries": TRIES - 1, "max_turns": 2},
}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rollouts_of(arm: str, logits: np.ndarray, seed: int) -> list[Trajectory]:
    """A batch: the rollouts of all groups, in order."""
    rng = np.random.default_rng(seed)

    class Tool:
        """`[g]` succeeds, `[b]` fails, `=` is the answer, which counts after a success."""

        def reset(self, columns: Any) -> Observation:
            self.solved, self.reward, self.luck = False, 0.0, rng.random() < RIGHT
            return Observation("")

        def act(self, action: str) -> Observation:
            if action == "=":
                self.reward = float(self.solved and self.luck)
                return Observation("end", done=True)
            self.solved |= action == "[g]"
            return Observation("ok" if action == "[g]" else "err", valid=action == "[g]")

        def score(self) -> float:
            return self.reward

        def close(self) -> None: ...

    good = sigmoid(logits)

    def model(text: str) -> dict[str, float]:
        if text.endswith("ok>"):
            return {"=": 1.0}
        if text.endswith("["):
            p = good[int(text.endswith("err>["))]
            return {"g": p, "b": 1 - p}
        return {"[" if text.endswith(">") else "]" if text[-1] in "gb" else EOS: 1.0}

    engine = TableEngine(model, seed=seed)
    method = Cleaner(Cleaner.Params(environment=Tool, marker="[", **ARMS[arm]))
    prompts = [make_prompt(engine.chat, f"q{i}", n=SIZE, max_tokens=200, seed=f"{seed}|{i}") for i in range(GROUPS)]
    return [rows[0] for prompt in run_program(method, prompts, engine) for rows in prompt]


def gradient(made: list[Trajectory], logits: np.ndarray) -> np.ndarray:
    """Of advantage times log-prob, mean over rollouts, by the logit of the first call and of one after an error."""
    rewards = [t.meta["score"] for t in made]
    advantages = one_step(start_stack(), make_rollouts(rewards, group_size=SIZE)).row_advantages.numpy()
    total, good = np.zeros(2), sigmoid(logits)
    for t, a in zip(made, advantages, strict=True):
        text = "".join(map(chr, t.context))
        for i in (k for k, token in enumerate(text) if token in "gb" and text[k - 1] == "["):
            which = int(text[:i].endswith("err>["))
            total[which] += a * ((text[i] == "g") - good[which])
    return total / len(made)


def learn(arm: str, start: float, seed: int) -> dict[str, Any]:
    logits = np.log([start / (1 - start), FIX / (1 - FIX)])
    curve, errors = [], 0
    for update in range(UPDATES):
        curve.append(sigmoid(logits).tolist())
        made = rollouts_of(arm, logits, 1000 * seed + update)
        errors += sum("<err>" in "".join(map(chr, t.tokens)) for t in made)
        logits = logits + RATE * gradient(made, logits)
    return {"curve": [*curve, sigmoid(logits).tolist()], "errors": 100 * errors / (UPDATES * GROUPS * SIZE)}


def covariance(arm: str, start: float, seed: int) -> float:
    """The gradient on the first call at the start, of reward minus the group's mean (without the deviation)."""
    logits = np.log([start / (1 - start), FIX / (1 - FIX)])
    found = []
    for batch in range(10):
        made = rollouts_of(arm, logits, 500_000 + 1000 * seed + batch)
        first = np.array([chr(t.tokens[1]) == "g" for t in made], dtype=float).reshape(GROUPS, SIZE)
        reward = np.array([t.meta["score"] for t in made]).reshape(GROUPS, SIZE)
        found.append(((reward - reward.mean(1, keepdims=True)) * first).mean() * SIZE / (SIZE - 1))
    return float(np.mean(found))


def _pm(cell: dict[str, float], digits: int = 1) -> str:
    return f"{cell['mean']:.{digits}f} +-{cell['ci95']:.{digits}f}"


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "cleaner",
        "first calls that are good after 30 updates, simulated",
        "higher",
        r["0.2, CLEANER"]["first"],
        r["0.2, plain loop"]["first"],
        baseline="plain agent loop",
        unit="%",
    )
    yield record(
        "cleaner",
        "calls after an error that are good after 30 updates, simulated",
        "higher",
        r["0.2, CLEANER"]["after_error"],
        r["0.2, plain loop"]["after_error"],
        baseline="plain agent loop",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=5)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    start = time.time()
    result: dict[str, Any] = {"seeds": args.seeds, "runs": {}}
    heads = ("first call good, %", "after an error, %", "gradient, measured", "gradient, theory", "errors seen, %")
    print(f"{'first call at the start, arm':32}" + "".join(f"{h:>20}" for h in heads))
    for begin in STARTS:
        for arm in ARMS:
            runs = [learn(arm, begin, seed) for seed in range(args.seeds)]
            curves = np.array([run["curve"] for run in runs])
            q, f = 1 - begin, (1 - FIX) ** (TRIES - 1)
            cells: dict[str, Any] = {
                "first": summary((100 * curves[:, -1, 0]).tolist()),
                "after_error": summary((100 * curves[:, -1, 1]).tolist()),
                "gradient": summary([covariance(arm, begin, seed) for seed in range(args.seeds)]),
                "theory": RIGHT * q * f * (1 - (q * f if arm == "CLEANER" else q)),
                "errors": summary([run["errors"] for run in runs]),
                "curve": curves.mean(0).tolist(),
            }
            result["runs"][f"{begin:g}, {arm}"] = cells
            shown = [_pm(cells["first"]), _pm(cells["after_error"]), _pm(cells["gradient"], 4)]
            shown += [f"{cells['theory']:.4f}", _pm(cells["errors"])]
            print(f"{f'{100 * begin:.0f} %, {arm}':32}" + "".join(f"{s:>20}" for s in shown))
    save(
        args.out,
        "cleaner",
        result,
        lambda: plot(result),
        start,
        records=records(result["runs"]),
        where="turn_control-cleaner-3-seeds",
    )


def plot(result: dict[str, Any]) -> Figure:
    figure, axes = panels(2, 3.0, sharey=True)
    for axis, which, title in zip(axes, (0, 1), ("First call", "Call after an error"), strict=True):
        for k, (arm, cells) in enumerate(result["runs"].items()):
            style = {**line(k % 2), "linestyle": ":" if k < 2 else "-"}
            axis.plot(100 * np.array(cells["curve"])[:, which], label=f"start {arm}", **style)
        axis.set_ylim(0, 100)
        named(axis, "optimizer step", "chance that it is good (%)", title)
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
