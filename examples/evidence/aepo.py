"""AEPO's mechanisms, measured: where chains branch, how the probe splits the budget, and what clip and advantages do.

    python examples/evidence/aepo.py --seeds 3 --out evidence-results

Branching. An agent of 8 turns in a simple environment; most chains of a prompt are calm (sharp tokens), some get into
stretches of uncertain turns. 12 rollouts for each of 40 prompts. Arms: the paper's penalty for new chains in a row;
none; and no entropy in the decision. Shown are the Gini index of how many chains descend from each of those that
started from the prompt (0: equally many), the share of the copies made behind uncertain turns, and different chains.

Probe. Chains that start from the prompt (of 12) where the turns are as uncertain as the start, more and less so.

Learning. Bandits of 10 arms for each of 64 prompts whose best arm starts with a probability of 1 %; groups of 8
rollouts, 8 updates per batch. Arms: PPO; with the clip; with the advantages; with both. Shown are the success rate
after 25 and 100 batches and the gain over PPO.

Everything is the methods themselves, through the fake engine or through the driver. Intervals are 95 % Student
intervals over seeds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from common import across, arguments, named, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Terms
from rl_plugins.kit.agents import Observation
from rl_plugins.lab.compare.figures import bars, line, name_lines, panels
from rl_plugins.methods.aepo_rollout import AepoRollout
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

K, TURNS, TREE_PROMPTS = 12, 8, 40
BRANCHING: dict[str, dict[str, float]] = {
    "penalty 0.05 (paper)": {},
    "no penalty": {"penalty": 0.0},
    "penalty 0.2": {"penalty": 0.2},
    "no entropy": {"entropy_weight": 0.0},
}
LETTERS = "abcdefgh"
SHARP = {"a": 0.93, **dict.fromkeys(LETTERS[1:], 0.01)}
FLAT = dict.fromkeys(LETTERS, 0.125)
PROMPTS, VALUES, BATCH, GROUP, UPDATES, STEPS = 64, 10, 16, 8, 8, 100
ARMS: dict[str, list[str]] = {
    "PPO": [],
    "clip": ["aepo_clip"],
    "advantages": ["aepo_advantages"],
    "both": ["aepo_clip", "aepo_advantages"],
}


# ---- branching

_NUMBERS = itertools.count()


class Walk:
    """Answers every turn with "u" or "s": whether the next one is uncertain. Uncertainty begins at a letter that is not
    "a" and lasts for three turns. Its score is the number of the chain it was first made for, which copies share."""

    def __init__(self) -> None:
        self.turns, self.left, self.root = 0, 0, next(_NUMBERS)

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        return Observation("")

    def act(self, action: str) -> Observation:
        self.turns += 1
        self.left = self.left - 1 if self.left else 3 * (action[:1] != "a")
        return Observation("u" if self.left else "s", done=self.turns >= TURNS)

    def score(self) -> float:
        return float(self.root)

    def close(self) -> None:
        pass


def agent(text: str) -> Mapping[str, float]:
    said = text.rsplit(">", 1)[-1]
    if len(said) >= 3:
        return {EOS: 1.0}
    return FLAT if text.rsplit(">", 2)[-2].endswith("<u") else SHARP


def engine_of(model: Any, seed: int) -> TableEngine:
    engine = TableEngine(model, seed=seed)
    engine.chat.vocabulary = 8  # the letters
    return engine


def branch(arm: str, seed: int) -> dict[str, float]:
    gini, uncertain, answers = [], [], []
    given = {"environment": Walk, "max_turns": TURNS, "entropy_weight": 0.2, **BRANCHING[arm]}
    method = AepoRollout(build_params(AepoRollout.Params, given, "aepo_rollout"))
    for i in range(TREE_PROMPTS):
        engine = engine_of(agent, 1000 * seed + i)
        prompt = make_prompt(engine.chat, f"{i}", n=K, max_tokens=200, seed=f"{seed}|{i}")
        rows = [row for (row,) in run_program(method, prompt, engine)]
        answers.append(len({row.tokens for row in rows}))
        copies = {row.meta["score"]: 0 for row in rows}
        for row in rows:
            at = row.meta["aepo_branch"]
            if at is None:
                continue
            copies[row.meta["score"]] += 1
            turn = engine.chat.decode(row.tokens[: row.turns[at - 1].start])
            uncertain.append(100 * turn.endswith("<u>"))
        made = sorted(copies.values())
        n, total = len(made), sum(made)
        if total:
            gini.append(sum((2 * (j + 1) - n - 1) * x for j, x in enumerate(made)) / (n * total))
    return {
        "gini": float(np.mean(gini)),
        "behind uncertain turns %": float(np.mean(uncertain)),
        "different chains": float(np.mean(answers)),
    }


def probe(first: Mapping[str, float], later: Mapping[str, float], length: int, seed: int) -> float:
    """Mean number of chains that start from the prompt."""

    def policy(text: str) -> Mapping[str, float]:
        said = text.rsplit(">", 1)[-1]
        return {EOS: 1.0} if len(said) >= length else (first if text.count("<") == 1 else later)

    given = {"environment": Walk, "max_turns": TURNS, "probe": True}
    method = AepoRollout(build_params(AepoRollout.Params, given, "aepo_rollout"))
    found = []
    for i in range(10):
        logged: dict[str, float] = {}
        engine = engine_of(policy, 1000 * seed + i)
        run_program(method, make_prompt(engine.chat, f"{i}", n=K, max_tokens=400, seed=f"{seed}|{i}"), engine, logged)
        found.append(logged["aepo_rollout/initial"])
    return float(np.mean(found))


# ---- learning


def learn(arm: str, seed: int) -> list[float]:
    """Success rate over all prompts in percent, over batches."""
    rng = np.random.default_rng([seed, 3])
    stack = build_stack(ARMS[arm], {}, seed)
    stack.start(make_run(dataset_size=PROMPTS, group_size=GROUP))
    best = torch.from_numpy(rng.integers(0, VALUES, PROMPTS))
    logits = torch.from_numpy(rng.normal(size=(PROMPTS, VALUES)) * 0.3)
    rows = torch.arange(PROMPTS)
    logits[rows, best] = -np.inf
    logits[rows, best] = logits.logsumexp(1) + math.log(0.01 / 0.99)
    logits.requires_grad_()
    adam = torch.optim.Adam([logits], lr=0.1)
    success = []
    for step in range(STEPS):
        prompt = torch.from_numpy(rng.choice(PROMPTS, BATCH, replace=False)).repeat_interleave(GROUP)
        with torch.no_grad():
            p = torch.softmax(logits[prompt], 1)
            action = torch.from_numpy((rng.random((len(prompt), 1)) > p.cumsum(1).numpy()).sum(1))
            action = action.clamp(max=VALUES - 1)
            old = p.gather(1, action[:, None]).log()
            entropies = -(p * p.log()).sum(1)
        reward = (action == best[prompt]).double()
        rollouts = make_rollouts(reward, group_size=GROUP, lengths=[1] * len(prompt), batch=step)
        tokens = make_tokens(rollouts, old_logprobs=old[:, 0].float(), entropies=entropies.float())
        advantages = one_step(stack, rollouts, tokens).advantages[:, None]
        for _ in range(UPDATES):
            lp = torch.log_softmax(logits, 1)[prompt, action][:, None]
            if stack.claims["policy_loss"]:
                count = torch.tensor(float(len(lp)))
                loss = stack.one("policy_loss", Terms(torch.ones_like(lp), lp, advantages, old, count, count, 1))
            else:
                loss = ppo_clip(lp, old, advantages, 0.2, 0.2, 3.0)
            adam.zero_grad()
            loss.mean().backward()
            adam.step()
        stack.metrics.take()
        success.append(100 * float(torch.softmax(logits.detach(), 1)[rows, best].mean()))
    return success


# ---- report


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "aepo_advantages",
        "success",
        "higher",
        difference=r["learning"]["advantages"]["after 25, less PPO"],
        baseline="PPO's advantages",
        unit="points",
    )
    yield record(
        "aepo_clip",
        "success after 25 batches",
        "higher",
        r["learning"]["clip"]["after 25"],
        r["learning"]["PPO"]["after 25"],
        baseline="PPO's clipping",
        unit="%",
    )
    yield record(
        "aepo_rollout",
        "spread of branches over prompts with the penalty on repeated branching",
        "lower",
        r["branching"]["penalty 0.05 (paper)"]["gini"],
        r["branching"]["no penalty"]["gini"],
        baseline="without it",
        note="Gini coefficients",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=3)
    start, seeds = time.time(), range(args.seeds)
    result: dict[str, Any] = {"seeds": args.seeds, "branching": {}, "probe": {}, "learning": {}, "curves": {}}
    for arm in BRANCHING:
        runs = [branch(arm, seed) for seed in seeds]
        result["branching"][arm] = {key: summary([run[key] for run in runs]) for key in runs[0]}
        cells = (f"{key} {c['mean']:.2f} +-{c['ci95']:.2f}" for key, c in result["branching"][arm].items())
        print(f"{arm:22}" + ",  ".join(cells))
    print(f"\n{'turns of':10}{'tokens; start / later':>26}{'chains from the prompt':>26}")
    for length in (1, 5, 20):
        for name, first, later in (("sharp / flat", SHARP, FLAT), ("equal", FLAT, FLAT), ("flat / sharp", FLAT, SHARP)):
            cell = summary([probe(first, later, length, seed) for seed in seeds])
            result["probe"][f"{length} | {name}"] = cell
            print(f"{length:<10}{name:>26}{cell['mean']:>18.1f} +-{cell['ci95']:.1f}")
    print(f"\n{'arm':22}{'success after 25 %':>22}{'after 100 %':>18}{'after 25, less PPO':>24}")
    every: dict[str, list[list[float]]] = {}
    for arm in ARMS:
        every[arm] = [learn(arm, seed) for seed in seeds]
        cells = [summary([run[k] for run in every[arm]]) for k in (24, -1)]
        cells.append(summary([run[24] - plain[24] for run, plain in zip(every[arm], every["PPO"], strict=True)]))
        result["learning"][arm] = dict(zip(("after 25", "after 100", "after 25, less PPO"), cells, strict=True))
        result["curves"][arm] = np.mean(every[arm], axis=0).tolist()
        print(f"{arm:22}" + "".join(f"{c['mean']:>14.1f} +-{c['ci95']:<5.1f}" for c in cells))
    save(args.out, "aepo", result, lambda: plot(result), start, records=records(result), where="echo-aepo-3-seeds")


def plot(result: dict[str, Any]) -> Figure:
    figure, (branching, learning, probe) = panels(3, 3.0)
    found = result["branching"]
    shown = {
        "Gini index of copies (x 100)": ("gini", 100),
        "copies behind uncertain turns (%)": ("behind uncertain turns %", 1),
    }
    shares = {
        label: [(scale * c[key]["mean"], scale * c[key]["ci95"]) for c in found.values()]
        for label, (key, scale) in shown.items()
    }
    bars(branching, [key.replace(" ", "\n", 1) for key in found], shares)
    named(branching, "", "", f"Branching, {K} rollouts")
    for i, arm in enumerate(ARMS):
        learning.plot(result["curves"][arm], label=arm, **line(i))
    named(learning, f"batches of {UPDATES} updates", "success rate over all prompts (%)", "Learning")
    across(probe, result["probe"], result["probe"].values(), f"chains from the prompt, of {K}")
    probe.set_title("Probe: tokens per turn | entropy of start / later", loc="left", fontweight="bold")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
