"""CPU seconds of a surrogate and its gradient against PPO's clip (GRPO's loss) on the same log-probs.

What a model costs is not in here: rows of float32 log-probs with half of the places filled, the loss of one
micro-batch, its sum, and the gradient for the log-probs. All arms take turns in one process, one thread, whose CPU
time is taken.
Reported: minimum and median over repetitions, and the median, over repetitions, of the arm divided by GRPO.

`vcpo, before the step` is what it does once per optimizer step: row sums of 512 and 4,096 rows, without the pass that
makes their log-probs.

    python benchmarks/losses.py --repeat 21
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.rollouts import Rows, Terms
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_run

SIZES = ((8, 1024), (64, 1024))
STEP_ROWS = (512, 4096)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "minpro": ("minpro", {}),
    "decoupled_ppo": ("decoupled_ppo", {}),
    "decoupled_ppo, no bound": ("decoupled_ppo", {"action": "none"}),
    "decoupled_ppo, rows": ("decoupled_ppo", {"level": "sequence", "action": "clamp"}),
    "decoupled_ppo, loglinear": ("decoupled_ppo", {"proximal": "loglinear"}),
    "decoupled_ppo, linear": ("decoupled_ppo", {"proximal": "linear"}),
    "vcpo": ("vcpo", {}),
    "dora_loss": ("dora_loss", {}),
}
# Terms beside GRPO's own loss. GRPO's is then made, too, and `epo` takes the gradient for the entropies as well.
ADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO + epo": ("epo", {"average": "host"}),
    "GRPO + epo, rows": ("epo", {"average": "host", "mode": "seq"}),
    "GRPO + ppo_million": ("ppo_million", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = []
    for rows, time_ in SIZES:
        terms = make_terms(rows, time_)
        losses = {"GRPO": grpo, **{name: loss_of(*arm) for name, arm in ARMS.items()}}
        losses |= {name: with_term(*arm) for name, arm in ADDED.items()}
        arms = {name: partial(gradient, loss, terms) for name, loss in losses.items()}
        cases.append(measured(f"{rows} x {time_}", arms, arguments.repeat))
    for rows in STEP_ROWS:
        arms = {"group": before_update(rows, {"baseline": "group"})}
        for name, params in (
            ("opob", {}),
            ("median", {"aggregate": "median"}),
            ("winsorized", {"aggregate": "winsorized"}),
        ):
            arms[name] = before_update(rows, params)
        cases.append(measured(f"vcpo, before the step, {rows} rows", arms, arguments.repeat))
    arguments.out.write_text(json.dumps({"repeat": arguments.repeat, "cases": cases}, indent=1))


def measured(what: str, arms: dict[str, Callable[[], Any]], repeat: int) -> dict[str, Any]:
    """All arms in turns; the first one is the base of the ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(repeat + 1):
        for name, arm in arms.items():
            start = time.thread_time()
            arm()
            if i:  # the first one warms up
                seconds[name].append(time.thread_time() - start)
    base = next(iter(seconds.values()))
    found = {
        name: {
            "min": min(values),
            "median": statistics.median(values),
            "ratio": statistics.median(a / b for a, b in zip(values, base, strict=True)),
        }
        for name, values in seconds.items()
    }
    print(f"\n{what}")
    for name, x in found.items():
        print(f"  {name:28s}{1e3 * x['min']:8.2f} / {1e3 * x['median']:8.2f} ms   {x['ratio']:.2f}")
    return {"what": what, "arms": found}


def make_terms(rows: int, time_: int) -> Terms:
    g = torch.Generator().manual_seed(0)
    length = torch.randint(1, time_, (rows, 1), generator=g)
    behavior = -torch.rand(rows, time_, generator=g)
    old = behavior + 0.1 * torch.randn(rows, time_, generator=g)
    mask = (torch.arange(time_) < length).long()
    return Terms(
        mask=mask,
        logprobs=(old + 0.1 * torch.randn(rows, time_, generator=g)).requires_grad_(),
        advantages=torch.randn(rows, 1, generator=g).expand(rows, time_),
        old_logprobs=old,
        num_tokens=mask.sum().float(),
        num_rows=torch.tensor(float(rows)),
        max_length=time_,
        rollout_logprobs=behavior,
        versions=torch.randint(0, 5, (rows, time_), generator=g),
        current_version=5,
        entropies=torch.rand(rows, time_, generator=g).requires_grad_(),
        columns={
            "vcpo_coefficient": torch.randn(rows, 1, generator=g),
            "dora_share": torch.ones(rows, 1),
            "epo_low": torch.full((rows, time_), 0.25),
            "epo_high": torch.full((rows, time_), 0.75),
            "epo_turn": torch.zeros(rows, time_),
            "epo_phase": torch.ones(rows, 1),
        },
    )


def gradient(loss: Callable[[Terms], Tensor], terms: Terms) -> Tensor:
    per_token = torch.where(terms.mask > 0, loss(terms), 0.0).sum()
    return torch.autograd.grad(per_token, [terms.logprobs, terms.entropies], allow_unused=True)[0]


def grpo(terms: Terms) -> Tensor:
    return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages)


def loss_of(method: str, params: dict[str, Any]) -> Callable[[Terms], Tensor]:
    stack = build_stack(method, {method: params})
    stack.start(make_run())

    def loss(terms: Terms) -> Tensor:
        value: Tensor = stack.one("policy_loss", terms)
        stack.metrics.take()
        return value

    return loss


def with_term(method: str, params: dict[str, Any]) -> Callable[[Terms], Tensor]:
    """GRPO's loss and the term of a method."""
    stack = build_stack(method, {method: params})
    stack.start(make_run())

    def loss(terms: Terms) -> Tensor:
        added: Tensor = stack.call("regularize", stack.methods[0], terms)
        stack.metrics.take()
        return grpo(terms) + added

    return loss


def before_update(rows: int, params: dict[str, Any]) -> Callable[[], Any]:
    stack = build_stack("vcpo", {"vcpo": params})
    stack.start(make_run())
    g = torch.Generator().manual_seed(0)
    length = torch.randint(1, 1024, (rows,), generator=g)
    behavior = -length.double()
    given = Rows(
        group=torch.arange(rows) // 8,
        length=length,
        logprobs=behavior + torch.randn(rows, generator=g).double(),
        rollout_logprobs=behavior,
        columns={
            "vcpo_reward": torch.randn(rows, generator=g).double(),
            "vcpo_scored": torch.ones(rows).double(),
        },
    )

    def step() -> None:
        stack.call("before_update", stack.methods[0], given)
        stack.metrics.take()

    return step


if __name__ == "__main__":
    main()
