"""A planner and the sub-agent it calls: does training both help, and what do role-aware groups and alignment do to it?

A query has 6 subtasks. For each the main agent decides to do it itself (right with a fixed probability: 0.95 and 0.7 in
turn in every second query, 0.7 and 0.4 in the others) or to delegate it, 0 to 6 times a rollout. A sub-agent gives one
of 4 answers or a malformed one; it begins with half of its answers right. The query is done if all subtasks are right:
then the main agent gets 1, else 0.1. The sub-agents' rewards follow from that, their format, and an expert who knows
whether their answer is right.

Arms: the sub-agent frozen; both trained by M-GRPO as in the paper, with d = 8 and d = 2 rows per rollout, with
statistics before the alignment, and without alignment; without an expert, so that the format stands for its judgment;
with the rewards of the code. And two ways the method is not: one group per query for all rows (role-blind), and the
released code, where every 8 sub-agents' rows that arrive make a group, whatever query they are of. Shown are the exact
probability that a query is done, its mean over training, the share of delegated subtasks, and what a batch holds of
the sub-agent: smallest and largest weight (rows times copies) and the most rows of a batch.

Rewards, groups and alignment are the method's own, through the driver. Intervals are 95 % Student intervals over seeds.

    python examples/evidence/m_grpo.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, named, record, runs_band, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.groups import Groups
from rl_plugins.core.rollouts import Rollouts, Shape, Tokens
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.m_grpo import MGrpo, aligned_advantages
from rl_plugins.testing import make_rollouts, one_step, start_stack

QUERIES, ROLLOUTS, SUBTASKS, RESPONSES = 8, 8, 6, 5  # the last response is malformed, the first is right
UPDATES, EVALUATE_EVERY = 150, 10
MAIN_SKILL = torch.tensor([[0.95, 0.7], [0.7, 0.4]], dtype=torch.float64).repeat(QUERIES // 2, SUBTASKS // 2)


class RoleBlind(MGrpo):
    """One group per query."""

    def advantages(self, rollouts: Rollouts) -> torch.Tensor:
        copies = self._copies(rollouts, torch.tensor([a == "main" for a in rollouts.meta["agent"]]))
        return aligned_advantages(rollouts.reward, copies, rollouts.groups)


class Queue(MGrpo):
    """Groups of sub-agents' rows as they arrive, 8 at a time."""

    def advantages(self, rollouts: Rollouts) -> torch.Tensor:
        main = torch.tensor([a == "main" for a in rollouts.meta["agent"]])
        arrival = torch.from_numpy(self.rng("queue").permutation(int((~main).sum())))
        group = rollouts.group.clone()
        group[~main] = 1_000_000 + arrival // 8
        return aligned_advantages(rollouts.reward, torch.ones_like(group), Groups(group), self.params.ddof, 1e-6)


ALIGNED, FROZEN = "both, aligned to 8", "sub-agent frozen"
EXPERT = {"expert_column": "expert"}
ARMS = {  # arm -> method
    FROZEN: lambda: MGrpo(MGrpo.Params(**EXPERT)),
    ALIGNED: lambda: MGrpo(MGrpo.Params(**EXPERT)),
    "both, aligned to 2": lambda: MGrpo(MGrpo.Params(**EXPERT, sub_per_rollout=2)),
    "both, statistics before": lambda: MGrpo(MGrpo.Params(**EXPERT, statistics="before")),
    "both, not aligned": lambda: MGrpo(MGrpo.Params(**EXPERT, align=False)),
    "both, no expert": lambda: MGrpo(MGrpo.Params()),
    "both, rewards of the code": lambda: MGrpo(MGrpo.Params(sub_reward="outcome")),
    "both, role-blind groups": lambda: RoleBlind(MGrpo.Params(**EXPERT)),
    "both, code: queue of 8": lambda: Queue(MGrpo.Params(sub_reward="outcome", align=False, ddof=1, std_eps=1e-6)),
}


def watched(method: MGrpo, sizes: list[tuple[float, int]]) -> MGrpo:
    """Notes the aligned weight and the rows of the sub-agent of every batch."""
    shape = method.shape

    def noted(rollouts: Rollouts, tokens: Tokens) -> Shape:
        sub = torch.tensor([a != "main" for a in rollouts.meta["agent"]])
        copies = method._copies(rollouts, ~sub)[sub]
        sizes.append((float(copies.sum()), int((copies > 0).sum())))
        return shape(rollouts, tokens)

    method.shape = noted
    return method


def train(arm: str, seed: int) -> dict[str, list[float]]:
    rng = np.random.default_rng([seed, 11])
    sizes: list[tuple[float, int]] = []
    stack = start_stack(watched(ARMS[arm](), sizes), seed=seed)
    delegate = torch.zeros(QUERIES, SUBTASKS, dtype=torch.float64, requires_grad=True)
    answer = torch.zeros(QUERIES, SUBTASKS, RESPONSES, dtype=torch.float64)
    answer[..., 0] = np.log(RESPONSES - 1)  # half of the answers are right
    answer.requires_grad_(arm != FROZEN)
    adam = torch.optim.Adam([delegate, answer] if arm != FROZEN else [delegate], lr=0.05)
    curves: dict[str, list[float]] = {"done": [], "delegated": []}
    query = np.repeat(np.arange(QUERIES), ROLLOUTS)
    number = np.tile(np.arange(ROLLOUTS), QUERIES)
    for update in range(UPDATES + 1):
        with torch.no_grad():
            p_delegate = torch.sigmoid(delegate)
            p_answer = torch.softmax(answer, -1)
        if update % EVALUATE_EVERY == 0:
            right = p_delegate * p_answer[..., 0] + (1 - p_delegate) * MAIN_SKILL
            curves["done"].append(100 * float(right.prod(1).mean()))
            curves["delegated"].append(100 * float(p_delegate.mean()))
        calls = rng.random((len(query), SUBTASKS)) < p_delegate.numpy()[query]
        chosen = (rng.random((len(query), SUBTASKS, 1)) > p_answer.numpy().cumsum(-1)[query]).sum(-1)
        chosen = chosen.clip(max=RESPONSES - 1)
        alone = rng.random((len(query), SUBTASKS)) < MAIN_SKILL.numpy()[query]
        done = np.where(calls, chosen == 0, alone).all(1)
        parent, subtask = np.nonzero(calls)
        response = chosen[parent, subtask]
        group = np.concatenate([query, query[parent]])
        rollouts = make_rollouts(
            np.concatenate([np.where(done, 1.0, 0.1), (response < RESPONSES - 1).astype(float)]),
            group.tolist(),
            rollout=torch.from_numpy(np.concatenate([number, number[parent]])),
            index=torch.from_numpy(np.concatenate([np.zeros_like(query), 1 + subtask])),
            lengths=[1] * len(group),
            meta={
                "agent": ["main"] * len(query) + ["sub"] * len(parent),
                "expert": [None] * len(query) + (response == 0).astype(float).tolist(),
            },
        )
        decision = one_step(stack, rollouts)
        decided = torch.distributions.Bernoulli(logits=delegate[query]).log_prob(torch.from_numpy(calls).double())
        answered = torch.log_softmax(answer, -1)[query[parent], subtask, response]
        logprobs = torch.cat([decided.sum(1), answered])
        loss = -(decision.row_advantages * logprobs)[decision.trained].sum() / len(query)
        adam.zero_grad()
        loss.backward()
        adam.step()
    weights, rows = zip(*sizes, strict=True)
    return {**curves, "weight": [min(weights), max(weights)], "rows": [max(rows)]}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "m_grpo",
        "queries done, simulated, both agents trained",
        "higher",
        r[ALIGNED]["done"],
        r[FROZEN]["done"],
        baseline="sub-agent frozen",
        unit="%",
    )
    yield record(
        "m_grpo",
        "queries done, simulated, aligned to 8",
        "higher",
        r[ALIGNED]["done"],
        r["both, not aligned"]["done"],
        baseline="not aligned",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=5)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    start = time.time()
    runs = {arm: [train(arm, seed) for seed in range(args.seeds)] for arm in ARMS}
    table = {}
    print(f"{'arm':26}{'done %':>14}{'mean %':>14}{'delegated %':>14}{'- aligned to 8':>17}{'weight':>12}{'rows':>6}")
    for arm, found in runs.items():
        cells = {
            "done": summary([f["done"][-1] for f in found]),
            "done_mean": summary([float(np.mean(f["done"])) for f in found]),
            "delegated": summary([f["delegated"][-1] for f in found]),
            "done_mean_minus_aligned": summary(
                [float(np.mean(f["done"]) - np.mean(a["done"])) for f, a in zip(found, runs[ALIGNED], strict=True)]
            ),
        }
        table[arm] = {
            **cells,
            "weight": [min(f["weight"][0] for f in found), max(f["weight"][1] for f in found)],
            "most_rows": max(f["rows"][0] for f in found),
        }
        widths = (8, 8, 8, 11)
        line = "".join(f"{c['mean']:>{w}.1f} +-{c['ci95']:<3.1f}" for c, w in zip(cells.values(), widths, strict=True))
        low, high = table[arm]["weight"]
        print(f"{arm:26}{line}{f'{low:.0f}..{high:.0f}':>12}{table[arm]['most_rows']:>6}")
    result = {"seeds": args.seeds, "arms": table, "curves": runs}
    save(args.out, "m_grpo", result, lambda: plot(runs), start, records=records(table), where="ui_s1-m_grpo-3-seeds")


def plot(runs: dict) -> Figure:
    figure, axes = panels(2, 3.0)
    updates = np.arange(0, UPDATES + 1, EVALUATE_EVERY)
    labels = {"done": "queries done (%)", "delegated": "subtasks delegated (%)"}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for i, (arm, found) in enumerate(runs.items()):
            runs_band(axis, updates, [f[key] for f in found], arm, i)
        axis.set_ylim(0, 100)
        named(axis, "optimizer step", label)
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
