"""Turn control's mechanism, measured: what do limits, reminders and extensions save, and what do they cost?

    python examples/evidence/turn_control.py --seeds 5 --out evidence-results

An agent solves a task by enough useful turns; how many is drawn from a log-normal distribution. Every turn is useful
with a certain probability and dithers otherwise. Two agents: one is deaf to reminders (half of its turns are useful),
one hurries (the fewer turns it is told to have left, the more of them are useful, up to 95 %; half without a reminder).
The unrestricted agent has at most 40 turns; limits are calibrated on 64 of its episodes, then 96 tasks are solved under
each strategy, the same ones. Cost is what the engine reads over all turns if each adds the same number of tokens,
turns (turns + 1) / 2, as a share of `unlimited`; the reminder itself is not counted.

The spread: calibration that goes on while limits are in force. Turns wanted are geometric (10 % end every turn, T_75 =
13); the last 64 episodes count. The library's rule (an episode that was cut off is longer than all others) against the
two simple ones: its turns as they are, and leaving it out. Reported is the limit after 150 batches of 32 episodes.

The method comes from the library and runs on the fake engine. Intervals are 95 % Student intervals over seeds.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, named, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.rollouts import Rollouts
from rl_plugins.kit.agents import Observation
from rl_plugins.lab.compare.figures import color, line, name_lines, panels
from rl_plugins.methods.turn_control import TurnControl
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_plan, make_rollouts, make_tokens, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

CAP, CALIBRATION, TASKS = 40, 64, 96
ARMS: dict[str, dict[str, Any]] = {
    "unlimited": {"strategy": "unlimited"},
    "fixed T75": {"strategy": "fixed"},
    "fixed T50": {"strategy": "fixed", "percentile": 50},
    "dynamic T50 to T75": {"strategy": "dynamic"},
    "dynamic, not told": {"strategy": "dynamic", "remind_from": 0, "extension_text": ""},
}
AGENTS = ("deaf", "hurrying")
WINDOW, BATCHES, BATCH, TRUE = 64, 150, 32, 13


class Task:
    """Done after `need` useful turns."""

    def reset(self, columns: Any) -> Observation:
        self.left = int(columns["need"])
        return Observation("")

    def act(self, action: str) -> Observation:
        self.left -= action == "w"
        return Observation("ok", done=self.left <= 0)

    def score(self) -> float:
        return float(self.left <= 0)

    def close(self) -> None: ...


def engine_of(agent: str, seed: int) -> TableEngine:
    def model(text: str) -> dict[str, float]:
        if text[-1] in "wd":
            return {EOS: 1.0}
        told = re.findall(r"(\d+) turns left", text)
        useful = 0.5 if agent == "deaf" or not told else 0.5 + 0.45 * math.exp(-(int(told[-1]) - 1) / 6)
        return {"w": useful, "d": 1 - useful}

    return TableEngine(model, seed=seed)


def method_of(arm: str) -> TurnControl:
    options = {"calibration_episodes": CALIBRATION} | ARMS[arm]
    told = options["strategy"] != "unlimited" and options.get("remind_from") != 0
    reminder = {"reminder": "{remaining} turns left"} if told else {}
    return TurnControl(TurnControl.Params(environment=Task, hard_cap=CAP, **reminder, **options))


def observe(stack: MethodStack, turns: list[int], reasons: list[str]) -> None:
    n = len(turns)
    meta = {"turns": turns, "stop_reason": reasons, "extended": [False] * n}
    rollouts: Rollouts = make_rollouts(torch.zeros(n), lengths=[1] * n, meta=meta)
    stack.call("observe", stack.methods[0], rollouts, make_tokens(rollouts), {})


def payload_of(stack: MethodStack) -> Any:
    plan = stack.call("plan", stack.methods[0], make_plan(1, 1))
    return None if plan is None else plan.rows[0].payload


def episodes(method: TurnControl, agent: str, needs: np.ndarray, seed: int, payload: Any) -> tuple[list[Any], float]:
    """`meta` of an episode per task, and the cost of all."""
    engine = engine_of(agent, seed)
    prompts = [
        make_prompt(engine.chat, f"task {i}", n=1, max_tokens=4000, columns={"need": int(n)}, payload=payload)
        for i, n in enumerate(needs)
    ]
    made = [rollouts[0][0] for rollouts in run_program(method, prompts, engine)]
    return [t.meta for t in made], sum(t.meta["turns"] * (t.meta["turns"] + 1) / 2 for t in made)


def strategy(arm: str, agent: str, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    needs = np.ceil(rng.lognormal(1.6, 0.6, CALIBRATION + TASKS)).astype(int)
    method = method_of(arm)
    stack = start_stack(method)
    meta, _ = episodes(method, agent, needs[:CALIBRATION], 1000 + seed, None)
    observe(stack, [m["turns"] for m in meta], [m["stop_reason"] for m in meta])
    meta, cost = episodes(method, agent, needs[CALIBRATION:], seed, payload_of(stack))
    return {
        "solved": 100 * float(np.mean([m["score"] for m in meta])),
        "turns": float(np.mean([m["turns"] for m in meta])),
        "extended": 100 * float(np.mean([m["extended"] for m in meta])),
        "cost": cost,
    }


def limits(rule: str, seed: int) -> list[float]:
    """The limit before every batch."""
    rng = np.random.default_rng([seed, 3])
    params = dict(calibration="rolling", calibration_episodes=WINDOW, window=WINDOW, update_every=1, hard_cap=50)
    stack = start_stack(TurnControl(TurnControl.Params(environment=Task, **params)))
    limit, curve = 50, []
    turns: list[int] = []
    for _ in range(BATCHES):
        curve.append(float(limit))
        wanted = rng.geometric(0.1, BATCH)
        used = np.minimum(wanted, limit)
        if rule == "longer than all":
            observe(stack, used.tolist(), np.where(wanted > limit, "limit", "done").tolist())
            given = payload_of(stack)
            limit = given["turn_control"]["limit"] if given else limit
        else:
            counted = used if rule == "as they are" else used[wanted <= limit]
            turns = [*turns, *counted.tolist()][-WINDOW:]
            limit = math.ceil(np.percentile(turns, 75)) if len(turns) >= WINDOW else limit
    return curve


def _pm(cell: dict[str, float]) -> str:
    return f"{cell['mean']:.1f} +-{cell['ci95']:.1f}"


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "turn_control",
        "cost of an agent that hurries, 75th percentile as limit, simulated",
        "lower",
        difference=r["hurrying, fixed T75"]["cost_share"],
        baseline="the unlimited loop's",
        unit="%",
        none=100,
    )
    yield record(
        "turn_control",
        "cost of an agent that hurries, with extension, simulated",
        "lower",
        difference=r["hurrying, dynamic T50 to T75"]["cost_share"],
        baseline="the unlimited loop's",
        unit="%",
        none=100,
    )
    yield record(
        "turn_control",
        "tasks solved by an agent that ignores reminders, 75th percentile as limit",
        "higher",
        r["deaf, fixed T75"]["solved"],
        r["deaf, unlimited"]["solved"],
        baseline="unlimited",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=5)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    start = time.time()
    result: dict[str, Any] = {"seeds": args.seeds, "strategies": {}, "limits": {}}
    print(f"{'agent, strategy':32}{'cost, % of unlimited':>24}{'solved, %':>18}{'turns':>16}{'extended, %':>16}")
    for agent in AGENTS:
        runs = {arm: [strategy(arm, agent, seed) for seed in range(args.seeds)] for arm in ARMS}
        for arm, of_arm in runs.items():
            for run, free in zip(of_arm, runs["unlimited"], strict=True):
                run["cost_share"] = 100 * run["cost"] / free["cost"]
            names = ("cost_share", "solved", "turns", "extended")
            cells = {name: summary([run[name] for run in of_arm]) for name in names}
            result["strategies"][f"{agent}, {arm}"] = cells
            shown = [_pm(cells[n]) for n in names]
            print(
                f"{f'{agent}, {arm}':32}" + "".join(f"{s:>{w}}" for s, w in zip(shown, (24, 18, 16, 16), strict=True))
            )
    print(f"\n{'episodes that were cut off count':34}{f'limit at the end (T75 = {TRUE})':>34}")
    for rule in ("longer than all", "as they are", "left out"):
        curves = np.array([limits(rule, seed) for seed in range(args.seeds)])
        end = summary(curves[:, -30:].mean(1).tolist())
        result["limits"][rule] = {"end": end, "mean": curves.mean(0).tolist()}
        print(f"{rule:34}{_pm(end):>34}")
    save(
        args.out,
        "turn_control",
        result,
        lambda: plot(result),
        start,
        records=records(result["strategies"]),
        where="turn_control-cleaner-3-seeds",
    )


def plot(result: dict[str, Any]) -> Figure:
    figure, (trade, limits) = panels(2, 4.8)
    for agent, marker in zip(AGENTS, ("o", "s"), strict=True):
        for i, arm in enumerate(ARMS):
            cells = result["strategies"][f"{agent}, {arm}"]
            x, y = cells["cost_share"], cells["solved"]
            trade.errorbar(
                x["mean"],
                y["mean"],
                y["ci95"],
                x["ci95"],
                fmt=marker,
                color=color(i),
                capsize=2,
                label=f"{agent}, {arm}",
            )
    named(trade, "tokens read (% of unlimited)", "solved (%)", "Cost and success")
    for i, rule in enumerate(result["limits"]):
        limits.plot(result["limits"][rule]["mean"], label=f"limit: {rule}", **line(i + 1))
    limits.axhline(TRUE, color=color(0), linewidth=0.8, linestyle=":", label="limit: T_75 of the unrestricted agent")
    limits.set_ylim(0, 25)
    named(limits, "generation batch", "turn limit", "Rolling calibration counts episodes cut off")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
