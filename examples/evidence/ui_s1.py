"""What does a policy learn from recordings if it acts on its own history, and what do patches and returns add?

A task is a recorded trajectory of 5 steps. A response is an action (one of 4, one right) and a style of writing (one of
3). The reward sees the action only, and the next step's policy sees the style: after the styles 0 and 1 it knows the
task, each in a context of its own with a part in common; after style 2 it does not ("a note that says nothing"), so its
next action is a guess. The expert writes in style 0; the policy begins with a liking for styles 1 and 2.

Arms: steps trained on the expert's history (offline RL); UI-S1 on the policy's own history with no, one and any number
of patches; one patch with gamma = 0, which sees no step after the present one; one patch with the filter of tasks
(0.3), which the other arms do without. Measured as in the paper: the policy on its own history, no patches, share of
the steps done before the first mistake (progress) and share of the tasks done to the end (success), in percent, at the
end; and how often the policy writes the note that says nothing (in the last step, a fifth of all, nobody reads it). All
arms make the same number of updates with the same number of rollouts per task; rows differ, and are counted.

Episodes, returns, advantages and filter are the method's own, through the driver. Intervals are 95 % Student intervals
over seeds.

    python examples/evidence/ui_s1.py --seeds 5 --out evidence-results
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

from rl_plugins.core.rollouts import TurnTable
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.ui_s1 import ExpertStep, SemiOnlineEpisode, UiS1, gui_step_reward, semi_online_performance
from rl_plugins.testing import make_rollouts, one_step, start_stack

TASKS, STEPS, ACTIONS, STYLES = 8, 5, 4, 3
ROLLOUTS, UPDATES, EVALUATE_EVERY = 8, 120, 10
SAYS_NOTHING = 2
OFFLINE, FULL, MYOPIC = "expert history (offline)", "own history, 1 patch", "own history, 1 patch, gamma 0"
ARMS: dict[str, dict] = {  # arm -> patches ("expert": offline) and parameters
    OFFLINE: {"patches": "expert", "gamma": 0.0, "episode_weight": 0.0},
    "own history, 0 patches": {"patches": 0},
    FULL: {"patches": 1},
    "own history, any patches": {"patches": None},
    MYOPIC: {"patches": 1, "gamma": 0.0},
    "own history, 1 patch, filter": {"patches": 1, "filter_by": "first_return"},
}


class Policy:
    """Logits of (style, action) by task, step and the style in the history before."""

    def __init__(self, rng: np.random.Generator) -> None:
        def noise(*shape: int) -> torch.Tensor:
            return torch.from_numpy(0.5 * rng.normal(size=shape))

        liking = torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
        self.common = (torch.zeros(TASKS, STEPS, STYLES, ACTIONS, dtype=torch.float64) + liking).requires_grad_()
        self.after = noise(TASKS, STEPS, STYLES - 1, STYLES, ACTIONS).requires_grad_()
        self.lost = (noise(STEPS, STYLES, ACTIONS) + liking).requires_grad_()

    def logprobs(self, task: torch.Tensor, step: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        """(rows, STYLES * ACTIONS)"""
        known = self.common[task, step] + self.after[task, step, style.clamp(max=STYLES - 2)]
        logits = torch.where((style == SAYS_NOTHING)[:, None, None], self.lost[step], known)
        return torch.log_softmax(logits.flatten(1), 1)


def play(policy: Policy, right: np.ndarray, copies: int, patches: int | str | None, rng: np.random.Generator) -> list:
    """Episodes with what each step's policy saw and did: (task, rollout, episode, [(style before, response)])."""
    live = []
    for task in range(TASKS):
        expert = [ExpertStep(k, (0, int(right[task, k]))) for k in range(STEPS)]
        limit = None if patches == "expert" else patches
        live += [(task, i, SemiOnlineEpisode(expert, limit), []) for i in range(copies)]
    played = list(live)
    while live:
        step = len(live[0][2].turns)
        style = [e.history[-1][0] if step and patches != "expert" else 0 for _, _, e, _ in live]
        task = torch.tensor([u for u, _, _, _ in live])
        with torch.no_grad():
            p = policy.logprobs(task, torch.full_like(task, step), torch.tensor(style)).exp().numpy()
        response = (rng.random((len(live), 1)) > p.cumsum(1)).sum(1).clip(max=STYLES * ACTIONS - 1)
        for (u, _, episode, seen), before, chosen in zip(live, style, response.tolist(), strict=True):
            seen.append((before, chosen))
            good = chosen % ACTIONS == right[u, step]
            reward = gui_step_reward(True, "exact" if good else "wrong")
            episode.act((chosen // ACTIONS, chosen % ACTIONS), good, reward)
        live = [x for x in live if not x[2].done]
    return played


def evaluate(policy: Policy, right: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
    played = play(policy, right, 16, 0, rng)
    found = semi_online_performance([episode.progress for _, _, episode, _ in played])
    notes = [chosen // ACTIONS == SAYS_NOTHING for *_, seen in played for _, chosen in seen]
    return {k: 100 * v for k, v in {**found, "says_nothing": float(np.mean(notes))}.items()}


def train(arm: str, seed: int) -> dict[str, list[float]]:
    """Curves of the evaluation; and rows trained, in total."""
    rng = np.random.default_rng([seed, 5])
    right = rng.integers(0, ACTIONS, size=(TASKS, STEPS))
    policy = Policy(rng)
    options = {"filter_by": "none", **ARMS[arm]}
    patches = options.pop("patches")
    stack = start_stack(UiS1(UiS1.Params(**options)))
    adam = torch.optim.Adam([policy.common, policy.after, policy.lost], lr=0.1)
    curves: dict[str, list[float]] = {"progress": [], "success": [], "says_nothing": [], "rows": []}
    rows = 0
    for update in range(UPDATES + 1):
        if update % EVALUATE_EVERY == 0:
            found = evaluate(policy, right, rng)
            for name in ("progress", "success", "says_nothing"):
                curves[name].append(found[name])
            curves["rows"].append(rows)
        played = play(policy, right, ROLLOUTS, patches, rng)
        flat = [(u, i, t, *s) for u, i, e, seen in played for t, s in zip(e.turns, seen, strict=True)]
        task, rollout = torch.tensor([x[0] for x in flat]), torch.tensor([x[1] for x in flat])
        turns = [x[2] for x in flat]
        style, chosen = torch.tensor([x[3] for x in flat]), torch.tensor([x[4] for x in flat])
        turn = torch.tensor([t.turn for t in turns])
        reward = torch.tensor([t.reward for t in turns], dtype=torch.float64)
        valid = torch.tensor([t.valid for t in turns])
        steps = TurnTable(torch.arange(len(flat)), turn, [t.anchor for t in turns], reward, valid)
        rollouts = make_rollouts(
            reward, task.tolist(), rollout=rollout, index=turn, lengths=[1] * len(flat), turns=steps
        )
        decision = one_step(stack, rollouts)
        rows += int(decision.trained.sum())
        if not bool(decision.trained.any()):
            continue
        logprobs = policy.logprobs(task, turn, style).gather(1, chosen[:, None])[:, 0]
        loss = -(decision.row_advantages * logprobs)[decision.trained].mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return curves


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "ui_s1",
        "tasks done to the end on the policy's own history, simulated, one patch",
        "higher",
        r[FULL]["success"],
        r[OFFLINE]["success"],
        baseline="offline on expert histories",
        unit="%",
    )
    yield record(
        "ui_s1_rollout",
        "tasks done to the end on the policy's own history, simulated, one patch",
        "higher",
        r[FULL]["success"],
        r[OFFLINE]["success"],
        baseline="offline on expert histories",
        unit="%",
    )
    yield record(
        "ui_s1_rollout",
        "tasks done to the end, simulated, one patch against no patch",
        "higher",
        r[FULL]["success"],
        r["own history, 0 patches"]["success"],
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=5)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    start = time.time()
    runs = {arm: [train(arm, seed) for seed in range(args.seeds)] for arm in ARMS}
    measured = ("success", "progress", "says_nothing", "rows")
    final = {arm: {name: summary([c[name][-1] for c in curves]) for name in measured} for arm, curves in runs.items()}
    gain = {
        arm: summary([a["success"][-1] - b["success"][-1] for a, b in zip(runs[FULL], curves, strict=True)])
        for arm, curves in runs.items()
        if arm != FULL
    }
    print(f"{'arm':32}" + "".join(f"{name:>16}" for name in measured) + f"{'1 patch better by':>22}")
    for arm, cells in final.items():
        line = "".join(f"{c['mean']:>9.0f} +-{c['ci95']:<4.0f}" for c in cells.values())
        better = f"{gain[arm]['mean']:>14.0f} +-{gain[arm]['ci95']:<4.0f}" if arm in gain else ""
        print(f"{arm:32}{line}{better}")
    result = {"seeds": args.seeds, "final": final, "success_of_one_patch_minus": gain, "curves": runs}
    save(args.out, "ui_s1", result, lambda: plot(runs), start, records=records(final), where="ui_s1-m_grpo-3-seeds")


def plot(runs: dict) -> Figure:
    figure, axes = panels(3)
    titles = {
        "success": "tasks done to the end, own history (%)",
        "progress": "steps done before the first mistake (%)",
        "says_nothing": "responses after which the policy is lost (%)",
    }
    updates = np.arange(0, UPDATES + 1, EVALUATE_EVERY)
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for i, (arm, curves) in enumerate(runs.items()):
            runs_band(axis, updates, [c[key] for c in curves], arm, i)
        axis.set_ylim(0, 100)
        named(axis, "optimizer step", title)
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
