"""Trees of completions with the advantages of their nodes: what do they save, and what do they cost?

A simulation: 8 prompts, answers of 12 tokens, 6 tokens to choose from. The policy is a table of logits, uniform at
first. The real methods make the rollouts, the advantages and what is trained; Adam on the table, one update per batch
of 8 rollouts per prompt. Trees split before tokens 0, 4 and 8.

Tasks, by where the reward comes from: the share of right tokens among all 12, among the first 4, or among the last 4.

Arms: GRPO on independent rollouts; trees with the advantages of GRPO, in which shared tokens are trained in every row;
trees with `branch_advantages`; the same with `branch_pruning` (Parent-Top1).

Measured: the exact mean reward of the policy, as a mean over all updates, at the end, and where an arm has sampled as
many tokens as trees do in all; sampled and trained tokens.

    python examples/evidence/branch_text_rollout.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from common import arguments, interval, minus, named, record, runs_band, save
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.losses import aggregate, ppo_clip
from rl_plugins.core.requests import Generate, Generated, Prompt, Trajectory
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.runtime.programs import Running, run
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack

PROMPTS, GROUP, LENGTH, VOCABULARY, UPDATES, RATE = 8, 8, 12, 6, 120, 0.1
TASKS = {"all tokens": range(LENGTH), "first 4": range(4), "last 4": range(LENGTH - 4, LENGTH)}
TREE = {"branch_text_rollout": {"places": [0, 4, 8]}}
ROLLOUT, ADVANTAGES, PRUNING = "branch_text_rollout", "branch_advantages", "branch_pruning"
ARMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "GRPO": ((), {}),
    "trees, GRPO's advantages": ((ROLLOUT,), TREE),
    "trees, node advantages": ((ROLLOUT, ADVANTAGES), TREE),
    "trees, pruned": ((ROLLOUT, ADVANTAGES, PRUNING), TREE),
}


class Table:
    """The policy and its engine: a token is its number."""

    def __init__(self, seed: int, task: str) -> None:
        self.rng, self.counts = np.random.default_rng([seed, 7]), np.array(TASKS[task])
        self.answers = self.rng.integers(0, VOCABULARY, (PROMPTS, LENGTH))
        self.logits = torch.zeros(PROMPTS, LENGTH, VOCABULARY, dtype=torch.float64, requires_grad=True)
        self.sampled = self.trained = 0

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        p = torch.softmax(self.logits.detach(), -1).numpy()
        return [[self._one(p[x.columns["number"]], r) for _ in range(r.n)] for x, r in requests]

    def _one(self, p: np.ndarray, request: Generate) -> Generated:
        start = len(request.trajectory)
        new = [int(self.rng.choice(VOCABULARY, p=row / row.sum())) for row in p[start : start + request.max_tokens]]
        self.sampled += len(new)
        return Generated(tuple(new), tuple(float(np.log(p[start + i, v])) for i, v in enumerate(new)), "length")

    def score(self, requests: Any) -> Any:
        raise NotImplementedError  # nobody asks

    def anybody(self, wants: bool) -> bool:
        return wants

    def reward(self, number: int, tokens: Sequence[int]) -> float:
        return float((np.array(tokens) == self.answers[number])[self.counts].mean())

    def mean_reward(self) -> float:
        p = torch.softmax(self.logits.detach(), -1).gather(2, torch.from_numpy(self.answers)[:, :, None])[:, :, 0]
        return float(p[:, self.counts].mean())


def one_run(task: str, arm: str, seed: int) -> dict[str, Any]:
    """Curves over updates: mean reward after each, and tokens sampled and trained until then."""
    names, params = ARMS[arm]
    table = Table(seed, task)
    stack = start_stack(
        *build_stack(list(names), params).methods,
        seed=seed,
        run=make_run(group_size=GROUP, max_completion_length=LENGTH, total_batches=UPDATES),
    )
    makes = [m for m in stack.methods if "rollout" in m.claims()]
    optimizer = torch.optim.Adam([table.logits], RATE)
    reward, sampled, trained = [], [], []
    for batch in range(UPDATES):
        asked = [
            Prompt((99,), f"{i}", {"number": i}, GROUP, LENGTH, 1000, chat=None, batch=batch, seed=f"{seed}|{i}")
            for i in range(PROMPTS)
        ]
        if makes:
            programs = [Running(makes[0], p) for p in asked]
            run(programs, table)
            rows = [(i, row) for i, program in enumerate(programs) for (row,) in program.rows or ()]
        else:
            made = table.generate([(p, Generate(p.start(), n=GROUP, max_tokens=LENGTH)) for p in asked])
            rows = [(i, asked[i].start().add(g)) for i, many in enumerate(made) for g in many]
        update(table, optimizer, stack, rows)
        reward.append(table.mean_reward())
        sampled.append(table.sampled)
        trained.append(table.trained)
    return {"reward": np.array(reward), "sampled": np.array(sampled), "trained": np.array(trained)}


def update(table: Table, optimizer: Any, stack: MethodStack, rows: list[tuple[int, Trajectory]]) -> None:
    """An optimizer step."""
    number, tokens = torch.tensor([i for i, _ in rows]), torch.tensor([list(row.tokens) for _, row in rows])
    rollouts = make_rollouts(
        [table.reward(i, row.tokens) for i, row in rows],
        number.tolist(),
        lengths=[LENGTH] * len(rows),
        meta={"branches": [row.meta.get("branches") for _, row in rows]},
    )
    logprobs = torch.log_softmax(table.logits, -1)[number].gather(2, tokens[:, :, None])[:, :, 0]
    decision = one_step(stack, rollouts, make_tokens(rollouts))
    shape = len(rows), LENGTH
    advantages = decision.row_advantages[:, None].expand(shape)
    if decision.advantages is not None:
        advantages = decision.advantages.view(shape)
    mask = torch.ones(shape) if decision.keep_tokens is None else decision.keep_tokens.view(shape).double()
    count = mask.sum()
    table.trained += int(count)
    per_token = ppo_clip(logprobs, logprobs.detach(), advantages)
    loss: Tensor = aggregate(per_token, mask, "token-mean", num_tokens=count, num_rows=len(rows), max_length=LENGTH)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "branch_advantages",
        "reward over all updates (simulation, text)",
        "higher",
        difference=minus(
            r["all tokens/trees, node advantages"]["all updates"],
            r["all tokens/trees, GRPO's advantages"]["all updates"],
        ),
        baseline="GRPO's advantages on the same trees",
    )
    yield record(
        "branch_pruning",
        "reward over all updates (simulation, text)",
        "higher",
        difference=minus(
            r["all tokens/trees, pruned"]["all updates"], r["all tokens/trees, node advantages"]["all updates"]
        ),
        baseline="the same without pruning",
    )
    yield record(
        "branch_text_rollout",
        "reward from late tokens at equal sampled tokens (simulation)",
        "higher",
        difference=minus(
            r["last 4/trees, node advantages"]["equal sampled tokens"], r["last 4/GRPO"]["equal sampled tokens"]
        ),
        baseline="GRPO",
        budget="sampled tokens",
    )
    yield record(
        "branch_text_rollout",
        "reward from all tokens at equal sampled tokens (simulation)",
        "higher",
        difference=minus(
            r["all tokens/trees, node advantages"]["equal sampled tokens"], r["all tokens/GRPO"]["equal sampled tokens"]
        ),
        baseline="GRPO",
        budget="sampled tokens",
    )
    yield record(
        "branch_text_rollout",
        "reward from early tokens at equal sampled tokens (simulation)",
        "higher",
        difference=minus(
            r["first 4/trees, node advantages"]["equal sampled tokens"], r["first 4/GRPO"]["equal sampled tokens"]
        ),
        baseline="GRPO",
        budget="sampled tokens",
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=5), time.time()
    results: dict[str, Any] = {}
    curves: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for task in TASKS:
        curves[task] = {arm: [one_run(task, arm, seed) for seed in range(args.seeds)] for arm in ARMS}
        budget = curves[task]["trees, node advantages"][0]["sampled"][-1]
        for arm, runs in curves[task].items():
            at = int(np.searchsorted(runs[0]["sampled"], budget, side="right")) - 1
            results[f"{task}/{arm}"] = cells = {
                "all updates": interval([r["reward"].mean() for r in runs]),
                "end": interval([r["reward"][-1] for r in runs]),
                "equal sampled tokens": interval([r["reward"][at] for r in runs]),
                "sampled": interval([r["sampled"][-1] for r in runs]),
                "trained": interval([r["trained"][-1] for r in runs]),
            }
            told = "   ".join(f"{k} {v['mean']:.4g} +- {v['ci95']:.2g}" for k, v in cells.items())
            print(f"{task:11s} {arm:26s} {told}", flush=True)
    settings = dict(prompts=PROMPTS, group=GROUP, length=LENGTH, vocabulary=VOCABULARY, updates=UPDATES, rate=RATE)
    content = {"method": "branch_text_rollout", "settings": {**settings, "seeds": args.seeds}, "results": results}
    save(
        args.out,
        "branch_text_rollout",
        content,
        lambda: plot(curves),
        start,
        records=records(results),
        where="branch_text_rollout-5-seeds",
    )


def plot(curves: dict[str, dict[str, list[dict[str, Any]]]]) -> Figure:
    figure, axes = panels(len(TASKS))
    for axis, (task, arms) in zip(axes, curves.items(), strict=True):
        for i, (arm, runs) in enumerate(arms.items()):
            runs_band(axis, runs[0]["sampled"], [r["reward"] for r in runs], arm, i)
        named(axis, "tokens sampled", "mean reward of the policy", f"Reward: {task}")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
