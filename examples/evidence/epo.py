"""EPO (arXiv 2509.22576): does the penalty act, does it steady the entropy, and does it help an agent?

A chain of 30 steps with one reward at its end. A tabular softmax policy picks one of 3 actions per step, one of them
right; a rollout succeeds if at least 16 of its actions are right (2 % for the policy that guesses). A batch has 8
groups of 8 rollouts, two optimizer steps of Adam with PPO's clip at 0.2, and GRPO's advantages. Every step is a turn.
The term, the history and the corridor are those of the method.

1. Without any entropy term, with the plain bonus, with the indicator (as released), with the paper's values (one
   corridor of 0 to 2 for all turns, alpha 0.1, a falling weight), and with corridors per turn that brake (rho 2): of
   0.5 to 1.5, the paper's "robust default", and of 0.8 to 1.2, for two coefficients. Does the indicator end at the
   same weights as the plain bonus, bit for bit?
2. Success of the last policy (exact), its entropy, and the spread of the entropy over training: the standard deviation
   over batches of the mean entropy, after a straight line is taken out, and the largest change between two batches.

    python examples/evidence/epo.py --seeds 8 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from common import arguments, interval, named, record, runs_band, save
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.epo import Epo
from rl_plugins.testing import make_rollouts, make_run, make_terms, make_tokens, make_turns, one_step, start_stack

STEPS, ACTIONS, NEEDED = 30, 3, 16
GROUPS, GROUP, BATCHES, UPDATES = 8, 8, 150, 2
ROWS = GROUPS * GROUP
RATES = {"small": 0.03, "large": 0.2}
COEFFICIENTS = (0.01, 0.1)
PLAIN = {"smooth_coeff": 0.0}
BRAKING = {"corridor": "turn", "kl": 0.5, "kr": 1.5, "rho": 2.0, "phase": "none"}
FORMS: dict[str, dict[str, Any]] = {
    "plain bonus": PLAIN,
    "indicator": {"smoothing": "indicator", "corridor": "turn", "include_current": True, "phase": "code"},
    "paper": {},
    "per turn": BRAKING,
    "per turn, narrow": {**BRAKING, "kl": 0.8, "kr": 1.2},
}
TURNS = make_turns([[f"step {s}" for s in range(STEPS)]] * ROWS)


def success(logits: Tensor, right: Tensor) -> float:
    """Exact: the number of right actions is a sum of independent ones."""
    p, chance = logits.softmax(-1)[torch.arange(STEPS), right], torch.zeros(STEPS + 1, dtype=torch.float64)
    chance[0] = 1
    for q in p.tolist():
        chance = chance * (1 - q) + torch.cat([chance.new_zeros(1), chance[:-1] * q])
    return float(chance[NEEDED:].sum())


def entropy(logits: Tensor) -> Tensor:
    log = logits.log_softmax(-1)
    return -(log.exp() * log).sum(-1)


def trained(seed: int, rate: float, params: Mapping[str, Any] | None) -> tuple[np.ndarray, Tensor, float]:
    """(batches, 2) mean entropy and exact success before each batch; the last policy; its success.

    Args:
        params: of the method; None: no entropy term.
    """
    draw = torch.Generator().manual_seed(seed)
    right = torch.randint(ACTIONS, (STEPS,), generator=draw)
    logits = torch.zeros(STEPS, ACTIONS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=rate)
    stack = None
    if params is not None:
        method = Epo(build_params(Epo.Params, dict(params), "epo"))
        stack = start_stack(method, run=make_run(total_batches=BATCHES))
    curve = []
    for _ in range(BATCHES):
        now = logits.detach()
        actions = torch.multinomial(now.softmax(-1), ROWS, replacement=True, generator=draw).T
        reward = ((actions == right).sum(1) >= NEEDED).double()
        curve.append((float(entropy(now).mean()), success(now, right)))
        rollouts = make_rollouts(reward, group_size=GROUP, lengths=[STEPS] * ROWS, turns=TURNS)
        groups = rollouts.groups
        centered, std = groups.center_and_std(reward)
        advantages = (centered / groups.rows(std + 1e-6))[:, None].expand(ROWS, STEPS)
        old, columns = now.log_softmax(-1).gather(1, actions.T).T, dict[str, Tensor]()
        if stack is not None:
            tokens = make_tokens(rollouts, entropies=entropy(now).repeat(ROWS).float())
            decision = one_step(stack, rollouts, tokens)
            columns = {name: x.reshape(ROWS, STEPS) for name, x in decision.token_columns.items()}
            columns |= {name: x[:, None] for name, x in decision.row_columns.items()}
            stack.metrics.take()
        for _ in range(UPDATES):
            logprobs = logits.log_softmax(-1).gather(1, actions.T).T
            loss = ppo_clip(logprobs, old, advantages, 0.2, 0.2).mean()
            if stack is not None:
                mask = torch.ones(ROWS, STEPS, dtype=torch.long)
                entropies = entropy(logits).expand(ROWS, STEPS)
                terms = make_terms(ROWS, STEPS, mask=mask, columns=columns, entropies=entropies)
                loss = loss + stack.methods[0].regularize(terms).sum()
                stack.metrics.take()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return np.array(curve), logits.detach().clone(), success(logits.detach(), right)


def spread(curve: np.ndarray) -> tuple[float, float]:
    """Standard deviation around a straight line, and the largest change between two batches, of the mean entropy."""
    x, y = np.arange(len(curve)), curve[:, 0]
    return float(np.std(y - np.polyval(np.polyfit(x, y, 1), x))), float(np.abs(np.diff(y)).max())


def facts(runs: Sequence[tuple[np.ndarray, Tensor, float]], base: Sequence[tuple[np.ndarray, Tensor, float]]) -> Any:
    """Means over seeds, and paired differences to the plain bonus."""
    found: dict[str, Any] = {
        "success": [end for _, _, end in runs],
        "entropy at the end": [float(entropy(logits).mean()) for _, logits, _ in runs],
        "spread of the entropy": [spread(curve)[0] for curve, _, _ in runs],
        "largest change": [spread(curve)[1] for curve, _, _ in runs],
    }
    plain = {
        "success": [end for _, _, end in base],
        "spread of the entropy": [spread(curve)[0] for curve, _, _ in base],
    }
    row = {name: interval(values) for name, values in found.items()}
    for name, values in plain.items():
        row[f"{name}, minus plain bonus"] = interval(np.array(found[name]) - np.array(values))
    return row


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "epo",
        "spread of the entropy over training, large learning rate, coefficient 0.01, simulated",
        "lower",
        r["paper, 0.01"]["spread of the entropy"],
        r["plain bonus, 0.01"]["spread of the entropy"],
        difference=r["paper, 0.01"]["spread of the entropy, minus plain bonus"],
        baseline="plain bonus",
    )
    yield record(
        "epo",
        "spread of the entropy over training, large learning rate, coefficient 0.01, simulated, corridors per turn of "
        "0.5 to 1.5 and `rho: 2`",
        "lower",
        r["per turn, 0.01"]["spread of the entropy"],
        r["plain bonus, 0.01"]["spread of the entropy"],
        difference=r["per turn, 0.01"]["spread of the entropy, minus plain bonus"],
        baseline="plain bonus",
    )
    yield record(
        "epo",
        "success at the end, large learning rate, coefficient 0.01, simulated",
        "higher",
        difference=r["paper, 0.01"]["success, minus plain bonus"],
        baseline="plain bonus",
    )
    yield record(
        "epo",
        "success at the end, large learning rate, coefficient 0.1, against no term, simulated",
        "higher",
        r["paper, 0.1"]["success"],
        r["no term"]["success"],
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=8), time.time()
    seeds, results, curves = range(args.seeds), dict[str, Any](), dict[str, dict[str, list[np.ndarray]]]()
    for name, rate in RATES.items():
        none = [trained(seed, rate, None) for seed in seeds]
        results[name], curves[name] = {}, {"no term": [curve for curve, _, _ in none]}
        for coefficient in COEFFICIENTS:
            last = coefficient == COEFFICIENTS[-1]
            forms = {form: p for form, p in FORMS.items() if last or form != "indicator"}
            runs = {
                form: [trained(seed, rate, {"entropy_coeff": coefficient, **p}) for seed in seeds]
                for form, p in forms.items()
            }
            plain = runs["plain bonus"]
            if coefficient == COEFFICIENTS[0]:
                results[name]["no term"] = facts(none, plain)
            for form, found in runs.items():
                results[name][f"{form}, {coefficient}"] = facts(found, plain)
            if last:
                same = [bool(torch.equal(a[1], b[1])) for a, b in zip(plain, runs["indicator"], strict=True)]
                results[name][f"indicator, {coefficient}"]["weights equal to the plain bonus"] = (
                    f"{sum(same)} of {len(same)}"
                )
                curves[name] |= {f: [c for c, _, _ in runs[f]] for f in FORMS if f != "indicator"}
        for arm, row in results[name].items():
            print(
                name,
                arm,
                {k: v if isinstance(v, str) else f"{v['mean']:.4f} ± {v['ci95']:.4f}" for k, v in row.items()},
            )
    save(args.out, "epo", results, lambda: plot(curves), start, records=records(results["large"]), where="epo-8-seeds")


def plot(curves: Mapping[str, Mapping[str, Sequence[np.ndarray]]]) -> Figure:
    figure, axes = panels(2, 3.2)
    for axis, (rate, arms) in zip(axes, curves.items(), strict=True):
        for i, (arm, several) in enumerate(arms.items()):
            runs_band(axis, np.arange(BATCHES), [c[:, 0] for c in several], arm, i)
        named(axis, "batches", "mean entropy (nats)", f"{rate} learning rate, coefficient {COEFFICIENTS[-1]}")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
