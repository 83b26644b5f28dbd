"""ARRoL (arXiv 2603.24840): what is left of a group after half of it was stopped early?

A simulation without a model. Every prompt has a success rate p ~ Beta(0.8, 0.8); a rollout is right with p, and tokens
of right rollouts (and of easy prompts) have somewhat higher log-probs, with much spread between rollouts. The real
method makes the rollouts (its program, on an engine that draws these log-probs), learns its head from the rewards of
what was finished, and stops rollouts after 32 of 128 tokens. The first 6 of 18 batches are its cold start and not
measured.

Measured per seed, over groups of 16 before stopping: mean variance m (1 - m) of the 0/1 rewards that are left (what
GRPO learns from; also as a difference to random stopping on the same prompts), share of groups without any variance,
share of right rollouts among what is left, on prompts with p < 0.25 too, tokens made relative to no stopping, and the
head's accuracy. `group of 8` is the host without ARRoL at half the rollouts.

Found (3 seeds): the head is right in 88 of 100 cases. Variance left, all at 62 % of the tokens: .131 random; more than
that by .003 +- .007 with the paper's rule, .019 +- .010 balanced, .028 +- .011 extremes (.142 without stopping). The
paper's rule lowers the share of right rollouts (.35 from .51), on hard prompts too (.09, balanced: .14): it thins what
is likely right wherever it is. So where success rates are spread as here, the rules made for each prompt do what the
method is for and the paper's, as it was reported, hardly does.

    python examples/evidence/arrol.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from common import across, arguments, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Generate, Generated, Prompt, Scored, Trajectory
from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods.arrol import Arrol
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.programs import Running, run
from rl_plugins.testing import make_plan, make_rollouts, make_run, one_step, start_stack
from rl_plugins.testing.engine import CharChat, make_prompt

PROMPTS, GROUP, PROBE, LENGTH, COLD, BATCHES = 16, 16, 32, 128, 6, 18
RIGHT, WRONG = 1, 2  # the first token tells the engine (and nobody else) what the rollout will become
ARMS: dict[str, dict[str, Any]] = {
    "no stopping": {"keep_ratio": 1.0},
    "group of 8": {"keep_ratio": 1.0},
    "random": {"selection": "random"},
    "survival (paper)": {},
    "balanced (ours)": {"selection": "balanced"},
    "extremes (ours)": {"selection": "extremes"},
}
MEASURES = {
    "variance": "variance of the rewards left",
    "flat": "groups without variance",
    "right": "right among what is left",
    "hard": "the same, prompts with p < 0.25",
    "tokens": "tokens, relative",
}


class Simulated:
    """An engine whose log-probs tell a little of the outcome."""

    def __init__(self, seed: int) -> None:
        self.rng, self.made = np.random.default_rng([seed, 7]), 0
        self.level: dict[tuple[int, ...], float] = {}  # of a rollout, by what it has so far

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        return [[self._one(prompt, request) for _ in range(request.n)] for prompt, request in requests]

    def _one(self, prompt: Prompt, request: Generate) -> Generated:
        t, p = request.trajectory, prompt.columns["p"]
        n = min(request.max_tokens or LENGTH, LENGTH - len(t))
        if len(t):
            tokens, level = (int(x) for x in self.rng.integers(3, 1000, n)), self.level[t.tokens[:4]]
        else:
            right = self.rng.random() < p
            tokens = [RIGHT if right else WRONG, *(int(x) for x in self.rng.integers(3, 1000, n - 1))]
            level = 0.4 * np.exp(-0.5 * (2 * right - 1) - 0.8 * (p - 0.5) + 0.5 * self.rng.normal())
        tokens = tuple(tokens)
        self.level[(t.tokens + tokens)[:4]] = level
        self.made += n
        logprobs = tuple((-level * self.rng.exponential(size=n)).tolist())
        return Generated(tokens, logprobs, "eos" if len(t) + n == LENGTH else "length")

    def score(self, requests: Sequence[tuple[Prompt, Trajectory]]) -> list[Scored]:
        return []

    def anybody(self, wants: bool) -> bool:
        return wants


def one_run(arm: str, seed: int) -> dict[str, float]:
    stops = ARMS[arm].get("keep_ratio", 0.5) < 1
    params = {"detect_tokens": PROBE} | ({"cold_start": COLD} if stops else {}) | ARMS[arm]
    driver, worker = (Arrol(build_params(Arrol.Params, params, "arrol")) for _ in range(2))
    group = GROUP // 2 if arm == "group of 8" else GROUP
    stack = start_stack(driver, seed=seed, run=make_run(max_completion_length=LENGTH, group_size=group))
    engine, chat = Simulated(seed), CharChat()
    found: dict[str, list[float]] = {name: [] for name in (*MEASURES, "accuracy")}
    for step in range(BATCHES):
        p = np.random.default_rng([seed, step]).beta(0.8, 0.8, PROMPTS)
        plan = make_plan(PROMPTS, group, batch=step)
        plan = stack.call("plan", driver, plan) or plan
        prompts = [
            make_prompt(
                chat, f"p{i}", group, LENGTH, columns={"p": p[i]}, payload=row.payload, seed=f"{seed}|{step}|{i}"
            )
            for i, row in enumerate(plan.rows)
        ]
        programs, engine.made = [Running(worker, prompt) for prompt in prompts], 0
        run(programs, engine)
        rows = [(i, row) for i, program in enumerate(programs) for (row,) in program.rows or ()]
        reward = np.array([float(row.tokens[0] == RIGHT) for _, row in rows])
        of = np.array([i for i, _ in rows])
        one_step(stack, make_rollouts(reward, of.tolist(), meta={"arrol": [row.meta["arrol"] for _, row in rows]}))
        logged = combine([stack.metrics.take()])
        if step < COLD:
            continue
        mean = np.array([reward[of == i].mean() for i in range(PROMPTS)])
        found["variance"].append(float((mean * (1 - mean)).mean()))
        found["flat"].append(float(((mean == 0) | (mean == 1)).mean()))
        found["right"].append(float(reward.mean()))
        found["hard"].append(float(mean[p < 0.25].mean()) if (p < 0.25).any() else float("nan"))
        found["tokens"].append(engine.made / (PROMPTS * GROUP * LENGTH))
        found["accuracy"].append(logged["arrol/accuracy"])
    return {name: float(np.nanmean(values)) for name, values in found.items()}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "arrol",
        "reward variance left, `selection: survival` (default), against stopping at random",
        "higher",
        difference=r["survival (paper)"]["gain"],
    )
    yield record(
        "arrol",
        "reward variance left, `selection: balanced`, against stopping at random",
        "higher",
        difference=r["balanced (ours)"]["gain"],
    )
    yield record(
        "arrol",
        "reward variance left, `selection: extremes`, against stopping at random",
        "higher",
        difference=r["extremes (ours)"]["gain"],
    )


def main() -> None:
    args = arguments(__doc__, seeds=3)
    results: dict[str, Any] = {}
    every = {arm: [one_run(arm, seed) for seed in range(args.seeds)] for arm in ARMS}
    for arm, runs in every.items():
        for mine, random in zip(runs, every["random"], strict=True):
            mine["gain"] = mine["variance"] - random["variance"]
        results[arm] = {name: summary([r[name] for r in runs]) for name in runs[0]}
        cells = "   ".join(f"{name} {f['mean']:.3f} +- {f['ci95']:.3f}" for name, f in results[arm].items())
        print(f"{arm:18s} {cells}")
    settings = dict(prompts=PROMPTS, group=GROUP, probe=PROBE, length=LENGTH, batches=BATCHES, seeds=args.seeds)
    content = {"method": "arrol", "settings": settings, "results": results}
    save(
        args.out,
        "arrol",
        content,
        lambda: plot(results),
        records=records(results),
        where="latr-8-seeds-arrol-scope-fission_grpo-3-seeds",
    )


def plot(results: dict[str, Any]) -> Figure:
    figure, axes = panels(len(MEASURES), 2.2, sharey=True)
    for axis, (key, title) in zip(axes, MEASURES.items(), strict=True):
        across(axis, results, [found[key] for found in results.values()], "m (1 - m)" if key == "variance" else "share")
        axis.set_title(title, loc="left")
    axes[0].set_ylim(len(results) - 0.5, -0.5)
    return figure


if __name__ == "__main__":
    main()
