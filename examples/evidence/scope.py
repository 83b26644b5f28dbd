"""SCOPE (arXiv 2602.24110): do corrected rollouts teach hard prompts, and does the policy keep its own ways?

A simulation: 8 prompts, answers of 5 steps, each step one of 8 tokens of which 2 are right (a prompt's own two), so
there are 32 right answers. The policy is a table of logits, uniform at first: one answer in a thousand is right, and a
group of 8 almost never holds one. An oracle process reward model knows the first wrong step; the teacher always goes
on with the same one of the two right tokens. The real method makes the rollouts (its program with the two callables),
marks the teacher's tokens and gives the loss; advantages are GRPO's; Adam on the table, one update per batch, 64
rollouts each, the same for all arms.

Arms: GRPO; whole answers of the teacher in a hopeless group (LUFFY's case: a reward model that finds the first step
wrong); SCOPE with any prefix; with its default gate (half of the steps must be right); with other losses.

Measured: probability of a right answer, averaged over all updates and at the end, exactly from the table; and how much
of the freedom is left: entropy over the two right tokens, in bits, mean over steps (1: both alike; 0: one is gone).

Found (3 seeds), right answers over all updates / bits left: GRPO .03 / .78, whole answers .51 / .13, SCOPE .57 / .35
with any prefix, .38 / .43 with its gate of half the steps (there is little to correct at first), .63 / .27 with the
losses `sft` and `plain`, which are the same here, where every batch has one update. GRPO hardly begins (.21 +- .41 at
the end); all others end at .93 to .96.

    python examples/evidence/scope.py --seeds 3 --out evidence-results
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from common import across, arguments, record, save, summary
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.losses import aggregate, ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Generate, Generated, Kind, Prompt, Scored, Trajectory
from rl_plugins.core.rollouts import Terms
from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods.scope import Scope
from rl_plugins.runtime.programs import Running, run
from rl_plugins.testing import make_rollouts, make_tokens, one_step, start_stack

PROMPTS, GROUP, STEPS, VOCABULARY, UPDATES = 8, 8, 5, 8, 80
RATE = 0.1
ARMS: dict[str, dict[str, Any] | None] = {
    "GRPO": None,
    "whole answers": {"min_prefix": 0.0, "prm": "none"},
    "SCOPE, any prefix": {"min_prefix": 0.0},
    "SCOPE, half right": {},
    "SCOPE, any prefix, sft": {"min_prefix": 0.0, "off_policy": "sft"},
    "SCOPE, any prefix, plain": {"min_prefix": 0.0, "off_policy": "plain"},
}


class Letters:
    """A token is a step: token 1 + v is written "a.", "b.", ..; 0 ends."""

    eos = (0,)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(c) - 96 for c in text.replace(".", ""))

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        return "".join(f"{chr(96 + t)}." for t in tokens if t)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (99,)

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return ()


def right_tokens(prompt: int) -> tuple[int, int]:
    return 1 + prompt % VOCABULARY, 1 + (3 * prompt + 5) % VOCABULARY


class Table:
    """The policy and its engine."""

    def __init__(self, seed: int) -> None:
        self.logits = torch.zeros(PROMPTS, STEPS, VOCABULARY, requires_grad=True)
        self.rng = np.random.default_rng([seed, 3])

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        log_p = torch.log_softmax(self.logits.detach().double(), -1).numpy()
        return [[self._one(log_p[p.columns["number"]], len(r.trajectory)) for _ in range(r.n)] for p, r in requests]

    def _one(self, log_p: np.ndarray, start: int) -> Generated:
        new = [int(self.rng.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum())) for row in log_p[start:]]
        logprobs = [float(log_p[start + i, v]) for i, v in enumerate(new)]
        return Generated((*(v + 1 for v in new), 0), (*logprobs, 0.0), "eos")

    def score(self, requests: Sequence[tuple[Prompt, Trajectory]]) -> list[Scored]:
        found = [float(is_right(p.columns["number"], t.tokens)) for p, t in requests]
        return [Scored({"right": r}, r) for r in found]

    def anybody(self, wants: bool) -> bool:
        return wants

    def logprobs(self, prompt: Tensor, tokens: Tensor) -> Tensor:
        """(rows, STEPS + 1) of tokens (rows, STEPS + 1), the end included."""
        of = torch.log_softmax(self.logits, -1)[prompt]
        steps = of.gather(2, (tokens[:, :STEPS, None] - 1).clamp(min=0))[..., 0]
        return torch.cat([steps, torch.zeros(len(tokens), 1)], 1)

    def measures(self) -> tuple[float, float]:
        """Probability of a right answer, and bits over the two right tokens."""
        p = torch.softmax(self.logits.detach().double(), -1)
        pair = torch.stack([p[i][:, [t - 1 for t in right_tokens(i)]] for i in range(PROMPTS)])
        share = pair / pair.sum(-1, keepdim=True)
        bits = -(share * share.clamp(min=1e-12).log2()).sum(-1)
        return float(pair.sum(-1).prod(-1).mean()), float(bits.mean())


def is_right(number: int, tokens: Sequence[int]) -> bool:
    steps = [t for t in tokens if t]
    return len(steps) == STEPS and all(t in right_tokens(number) for t in steps)


def oracle(messages: Any, steps: Sequence[str], columns: Mapping[str, Any]) -> list[float]:
    return [float(ord(s[0]) - 96 in right_tokens(columns["number"])) for s in steps]


def nothing_right(messages: Any, steps: Sequence[str], columns: Mapping[str, Any]) -> list[float]:
    return [0.0] * len(steps)


def teacher(messages: Any, prefix: str, columns: Mapping[str, Any]) -> str:
    return f"{chr(96 + right_tokens(columns['number'])[0])}." * (STEPS - prefix.count("."))


def one_run(arm: str, seed: int) -> dict[str, float]:
    table, given = Table(seed), ARMS[arm]
    params = {"prm": oracle, "corrector": teacher, "separator": ".", "min_step": 1} | (given or {})
    if params["prm"] == "none":
        params["prm"] = nothing_right
    method = Scope(build_params(Scope.Params, params, "scope"))
    worker = Scope(build_params(Scope.Params, params, "scope"))  # programs run elsewhere, without a state
    stack = start_stack(*([method] if given is not None else []), seed=seed)
    optimizer = torch.optim.Adam([table.logits], RATE)
    right, corrected = [], 0
    for _ in range(UPDATES):
        prompts = [
            Prompt((99,), f"{i}", {"number": i}, GROUP, STEPS + 1, 1000, Letters(), reward_names=("right",))
            for i in range(PROMPTS)
        ]
        if given is None:
            made = table.generate([(p, Generate(p.start(), n=GROUP)) for p in prompts])
            rows = [(i, prompts[i].start().add(g)) for i, many in enumerate(made) for g in many]
        else:
            programs = [Running(worker, p) for p in prompts]
            run(programs, table)
            rows = [(i, row) for i, program in enumerate(programs) for (row,) in program.rows or ()]
        update(table, optimizer, stack, method if given is not None else None, rows)
        corrected += sum(row.meta.get("scope", [0, 0]) != [0, 0] for _, row in rows)
        right.append(table.measures()[0])
    end, bits = table.measures()
    share = corrected / (UPDATES * PROMPTS * GROUP)
    return {"right, all updates": float(np.mean(right)), "right, end": end, "bits": bits, "corrected": share}


def update(table: Table, optimizer: Any, stack: Any, method: Scope | None, rows: list[tuple[int, Trajectory]]) -> None:
    number = torch.tensor([i for i, _ in rows])
    tokens = torch.tensor([row.tokens for _, row in rows])
    reward = [float(is_right(i, row.tokens)) for i, row in rows]
    n, time = tokens.shape
    rollouts = make_rollouts(
        reward, number.tolist(), lengths=[time] * n, meta={"scope": [row.meta.get("scope") for _, row in rows]}
    )
    forced = torch.tensor([k == Kind.FORCED for _, row in rows for k in row.kinds])
    decision = one_step(stack, rollouts, make_tokens(rollouts, forced=forced))
    stack.metrics.take()
    logprobs = table.logprobs(number, tokens)
    terms = Terms(
        mask=torch.ones(n, time),
        logprobs=logprobs,
        advantages=decision.advantages.view(n, time).float(),
        old_logprobs=logprobs.detach(),
        num_tokens=torch.tensor(float(n * time)),
        num_rows=torch.tensor(float(n)),
        max_length=time,
        columns={k: v.view(n, time) for k, v in decision.token_columns.items()},
    )
    plain = method is None
    loss = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages) if plain else method.policy_loss(terms)
    optimizer.zero_grad()
    total = aggregate(loss, terms.mask, "token-mean", num_tokens=n * time, num_rows=n, max_length=time)
    total.backward()
    optimizer.step()


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "scope",
        "right answers with an oracle as corrector, any prefix",
        "higher",
        r["SCOPE, any prefix"]["right, all updates"],
        r["GRPO"]["right, all updates"],
        baseline="GRPO",
    )
    yield record(
        "scope",
        "bits of diversity left with an oracle as corrector, any prefix",
        "higher",
        r["SCOPE, any prefix"]["bits"],
        r["GRPO"]["bits"],
        baseline="GRPO",
    )
    yield record(
        "scope",
        "bits of diversity left, against whole answers of the oracle",
        "higher",
        r["SCOPE, any prefix"]["bits"],
        r["whole answers"]["bits"],
    )


def main() -> None:
    args = arguments(__doc__, seeds=3)
    results: dict[str, Any] = {}
    for arm in ARMS:
        runs = [one_run(arm, seed) for seed in range(args.seeds)]
        results[arm] = {k: summary([r[k] for r in runs]) for k in runs[0]}
        cells = "   ".join(f"{k} {v['mean']:.3f} +- {v['ci95']:.3f}" for k, v in results[arm].items())
        print(f"{arm:26s} {cells}")
    settings = dict(prompts=PROMPTS, group=GROUP, steps=STEPS, updates=UPDATES, rate=RATE, seeds=args.seeds)
    content = {"method": "scope", "settings": settings, "results": results}
    save(
        args.out,
        "scope",
        content,
        lambda: plot(results),
        records=records(results),
        where="latr-8-seeds-arrol-scope-fission_grpo-3-seeds",
    )


def plot(results: dict[str, Any]) -> Figure:
    titles = {
        "right, all updates": "right answers, mean over updates",
        "right, end": "right answers, at the end",
        "bits": "bits left over the two right tokens",
        "corrected": "rows that were corrected",
    }
    figure, axes = panels(len(titles), 2.2, sharey=True)
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        across(axis, results, [found[key] for found in results.values()], "bits" if key == "bits" else "share")
        axis.set_title(title, loc="left")
    axes[0].set_ylim(len(results) - 0.5, -0.5)
    return figure


if __name__ == "__main__":
    main()
