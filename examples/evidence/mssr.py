"""MSSR's mechanism, measured: does the remembered baseline follow the truth, and does the bonus hold the entropy?

    python examples/evidence/mssr.py --seeds 3 --out evidence-results

Tracker. 500 prompts whose success rates drift; a batch visits 128 of them once. Mean squared error of the remembered
value for several fixed forgetting rates, and for the rule that follows the KL (fed with KL values of half the target
and of twice the target).

Learning. A softmax policy over 8 answers of two tokens (4 values each) for each of 256 prompts; of each prompt 1 to 3
answers are right. 64 rows a batch, Adam with a high learning rate. Arms: GRPO with 8 rollouts of 8 prompts; GRPO with 2
of 32; MSSR with 1 of 64; MSSR without the bonus (MVSR); with the bonus on the full entropy; with the sampler of
prompts. Shown are the success rate over all prompts and the entropy left.

MSSR is the methods themselves (plan, advantages, shape, observe, select_prompts) through the driver. Intervals are 95 %
Student intervals over seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, corner_legend, grouped, named, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import line, panels
from rl_plugins.methods.mssr_baseline import MssrBaseline
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack

DRIFTING, VISITS, BATCHES = 500, 128, 160
TRACKERS = {"rho 0.5": 0.5, "rho 0.875": 0.875, "rho 0.96": 0.96, "rho 1": 1.0, "KL, half the target": None,
            "KL, twice the target": None}  # fmt: skip
PROMPTS, VALUES, ROWS, UPDATES = 256, 4, 64, 200
RHO = {"mssr_baseline": {"rho": 0.96}}
ARMS: dict[str, tuple[list[str], dict, int]] = {  # methods, parameters, the host's group size
    "GRPO, 8 x 8": ([], {}, 8),
    "GRPO, 32 x 2": ([], {}, 2),
    "MSSR": (["mssr"], RHO, 2),
    "MVSR, no bonus": (["mssr", "-mssr_shaping"], RHO, 2),
    "MSSR, full entropy": (["mssr"], {**RHO, "mssr_shaping": {"entropy": "full"}}, 2),
    "MSSR, sampler": (["mssr", "mssr_prompts"], {**RHO, "mssr_prompts": {"rho": 0.96}}, 2),
}


def tracker_error(name: str, drift: float, seed: int) -> float:
    """Mean squared error of the value over all prompts, averaged over the second half of the batches."""
    rng = np.random.default_rng([seed, 1])
    method = MssrBaseline(MssrBaseline.Params(rho=TRACKERS[name]))
    stack = start_stack(method, run=make_run(dataset_size=DRIFTING, total_batches=BATCHES))
    hidden = rng.normal(size=DRIFTING) * 1.5
    kl = 0.005 if name == "KL, half the target" else 0.02
    d = math.sqrt(2 * kl)  # exp(d) - d - 1 is about d^2 / 2
    errors = []
    for batch in range(BATCHES):
        hidden += drift * rng.normal(size=DRIFTING)
        rate = 1 / (1 + np.exp(-hidden))
        prompt = rng.choice(DRIFTING, VISITS, replace=False)
        reward = (rng.random(VISITS) < rate[prompt]).astype(float)
        rollouts = make_rollouts(reward, range(VISITS), prompt_index=prompt.tolist(), lengths=[1] * VISITS)
        old = torch.full((VISITS,), -1.0)
        one_step(stack, rollouts, make_tokens(rollouts, old_logprobs=old, ref_logprobs=old + d))
        stack.metrics.take()
        if batch >= BATCHES // 2:
            alpha, beta = method.state["alpha"].numpy(), method.state["beta"].numpy()
            errors.append(float(((alpha / (alpha + beta) - rate) ** 2).mean()))
    return float(np.mean(errors))


def make_arm(arm: str, seed: int) -> tuple[MethodStack, int]:
    methods, params, group_size = ARMS[arm]
    stack = build_stack(methods, params, seed)
    stack.start(make_run(dataset_size=PROMPTS, group_size=group_size, total_batches=UPDATES))
    return stack, group_size


def learn(arm: str, seed: int) -> tuple[list[float], list[float]]:
    """Success rate over all prompts in percent, and entropy per token in percent of the uniform one, over updates."""
    rng = np.random.default_rng([seed, 2])
    right = np.zeros((PROMPTS, VALUES * VALUES))
    for x in range(PROMPTS):
        right[x, rng.choice(VALUES * VALUES, rng.integers(1, 4), replace=False)] = 1
    stack, group_size = make_arm(arm, seed)
    first = torch.zeros(PROMPTS, VALUES, dtype=torch.float64, requires_grad=True)
    second = torch.zeros(PROMPTS, VALUES, VALUES, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([first, second], lr=0.1)
    order = rng.permutation(PROMPTS)
    success, entropy_left = [], []
    for step in range(UPDATES):
        count = ROWS // group_size
        proposal = [int(order[(step * count + i) % PROMPTS]) for i in range(count)]
        plan = first_plan(stack, proposal, group_size, ROWS, PROMPTS)
        rows = [row for row in plan.rows for _ in range(row.n)]
        prompt = torch.tensor([row.prompt_index for row in rows])
        p1 = torch.softmax(first.detach(), 1)
        a = torch.from_numpy((rng.random((len(rows), 1)) > p1[prompt].numpy().cumsum(1)).sum(1)).clamp(max=VALUES - 1)
        p2 = torch.softmax(second.detach(), 2)
        b = torch.from_numpy((rng.random((len(rows), 1)) > p2[prompt, a].numpy().cumsum(1)).sum(1))
        b = b.clamp(max=VALUES - 1)
        reward = right[prompt.numpy(), (a * VALUES + b).numpy()]
        rollouts = make_rollouts(
            reward, [r.group for r in rows], prompt_index=prompt.tolist(), lengths=[2] * len(rows), batch=stack.batch
        )
        logprobs = torch.stack(
            [torch.log_softmax(first, 1)[prompt, a], torch.log_softmax(second, 2)[prompt, a, b]], 1
        ).flatten()
        h1, h2 = (-(p * torch.log(p.clamp(min=1e-30))).sum(-1) for p in (p1, p2))
        entropies = torch.stack([h1[prompt], h2[prompt, a]], 1).flatten()
        tokens = make_tokens(rollouts, old_logprobs=logprobs.detach().float(), entropies=entropies.float())
        decision = one_step(stack, rollouts, tokens)
        adam.zero_grad()
        (-(decision.advantages * logprobs).mean()).backward()
        adam.step()
        stack.metrics.take()
        joint = (p1[:, :, None] * p2).flatten(1).numpy()
        success.append(100 * float((joint * right).sum(1).mean()))
        left = (h1 + (p1 * h2).sum(1)).mean() / (2 * math.log(VALUES))
        entropy_left.append(100 * float(left))
    return success, entropy_left


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "mssr_baseline",
        "success at equal samples, without the entropy bonus",
        "higher",
        r["MVSR, no bonus"]["success"],
        r["GRPO, 8 x 8"]["success"],
        baseline="GRPO, 8 prompts x 8",
        unit="%",
        budget="samples",
    )
    yield record(
        "mssr_prompts",
        "success with the sampler",
        "higher",
        r["MSSR, sampler"]["success"],
        r["MSSR"]["success"],
        baseline="without it",
        unit="%",
    )
    yield record(
        "mssr_shaping",
        "success with the entropy bonus",
        "higher",
        r["MSSR"]["success"],
        r["MVSR, no bonus"]["success"],
        baseline="without it",
        unit="%",
    )
    yield record(
        "mssr_shaping",
        "entropy left with the entropy bonus",
        "higher",
        r["MSSR"]["entropy"],
        r["MVSR, no bonus"]["entropy"],
        baseline="without it",
        unit="%",
    )
    yield record(
        "mssr",
        "success at equal samples",
        "higher",
        r["MSSR"]["success"],
        r["GRPO, 8 x 8"]["success"],
        baseline="GRPO, 8 prompts x 8",
        unit="%",
        budget="samples",
    )
    yield record(
        "mssr",
        "entropy left",
        "higher",
        r["MSSR"]["entropy"],
        r["GRPO, 8 x 8"]["entropy"],
        baseline="GRPO, 8 prompts x 8",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=3)
    start = time.time()
    result: dict = {"seeds": args.seeds, "tracker_error": {}, "learning": {}, "curves": {}}
    print(f"{'tracker, error x 1000':24}" + "".join(f"{f'drift {d:g}':>18}" for d in (0.0, 0.05, 0.2)))
    for name in TRACKERS:
        line = f"{name:24}"
        for drift in (0.0, 0.05, 0.2):
            cell = summary([1000 * tracker_error(name, drift, seed) for seed in range(args.seeds)])
            result["tracker_error"][f"{name} | drift {drift:g}"] = cell
            line += f"{cell['mean']:>12.1f} +-{cell['ci95']:<4.1f}"
        print(line)
    print(f"\n{'arm':24}{'success %':>17}{'entropy left %':>19}")
    for arm in ARMS:
        runs = [learn(arm, seed) for seed in range(args.seeds)]
        cells = [summary([run[k][-1] for run in runs]) for k in (0, 1)]
        result["learning"][arm] = {"success": cells[0], "entropy": cells[1]}
        result["curves"][arm] = [np.mean([run[k] for run in runs], axis=0).tolist() for k in (0, 1)]
        print(f"{arm:24}" + "".join(f"{c['mean']:>12.1f} +-{c['ci95']:<4.1f}" for c in cells))
    save(
        args.out, "mssr", result, lambda: plot(result), start, records=records(result["learning"]), where="mssr-3-seeds"
    )


def plot(result: dict) -> Figure:
    figure, (learning, entropy, tracker) = panels(3)
    for i, arm in enumerate(ARMS):
        learning.plot(result["curves"][arm][0], label=arm, **line(i))
        entropy.plot(result["curves"][arm][1], label="_", **line(i))
    named(learning, "updates of 64 rows", "success rate over all prompts (%)")
    learning.legend()
    named(entropy, "updates of 64 rows", "entropy (% of the uniform policy's)")
    drifts = {"none": 0.0, "slow": 0.05, "fast": 0.2}
    grouped(
        tracker,
        drifts,
        {arm: [result["tracker_error"][f"{arm} | drift {d:g}"] for d in drifts.values()] for arm in TRACKERS},
    )
    named(tracker, "drift of the success rates", "squared error of the value (x 1000)", "Tracker")
    corner_legend(figure, tracker)
    return figure


if __name__ == "__main__":
    main()
