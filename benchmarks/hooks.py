"""What single hooks cost: those that read tokens, the dataset, the corpus or the rounds of a batch.

    python benchmarks/hooks.py                       # all cases, into hooks.json
    python benchmarks/hooks.py --only d3s --label before

CPU time of one thread, the least of the repetitions, without a model. A hook on tokens gets 1,024 rows of 4,096 to
12,288 tokens; `copies` is its time over that of copying one float64 column of them into memory that is there already.
A hook on prompts gets a dataset of 10^7 rows (`linear_ts`: 10^6) and batches of 512.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
import typer

from rl_plugins.core.rollouts import GroupSoFar, Plan, PlanRow, PromptPool, Tokens
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_run

ROWS, TOKENS, GROUP, REPETITIONS = 1024, 8192, 8, 5
PROMPTS, BATCH = 10**7, 512
SHAPES = ("d3s", "echo_shaping", "aepo_advantages", "mssr_shaping", "echo_clip", "xrpo_novelty", "gdro_prompt")
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- made by hooks.py: begin -->", "<!-- made by hooks.py: end -->"
Found = dict[str, float]


def least(work: Callable[[int], Any], repetitions: int = REPETITIONS) -> float:
    """CPU seconds."""
    found = []
    for number in range(repetitions):
        gc.collect()
        start = time.process_time()
        work(number)
        found.append(time.process_time() - start)
    return min(found)


def batch_of(rows: int = ROWS) -> tuple[Any, Tokens]:
    draw = torch.Generator().manual_seed(0)
    length = torch.randint(TOKENS // 2, TOKENS * 3 // 2 + 1, (rows,), generator=draw)
    rollouts = make_rollouts(torch.rand(rows, generator=draw).round(), group_size=GROUP, lengths=length.tolist())
    n, row = int(length.sum()), torch.arange(rows).repeat_interleave(length)
    advantages = (rollouts.reward - 0.4)[row]
    position = torch.cat([torch.arange(k) for k in length.tolist()])
    keep, forced = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    tokens = Tokens(row, position, advantages, keep, forced)
    entropies, logprobs = torch.rand(n, generator=draw), -torch.rand(n, generator=draw)
    return rollouts, tokens.replace(entropies=entropies, old_logprobs=logprobs)


def shape(name: str, seen: tuple[Any, Tokens], copy: float) -> Found:
    stack = started(name, 4 * ROWS // GROUP)
    seconds = least(lambda _: stack.call("shape", stack.methods[0], *seen))
    return {"seconds": seconds, "ns_per_token": 1e9 * seconds / len(seen[1]), "copies": seconds / copy}


def started(name: str, prompts: int, params: Any = None, **run: Any) -> MethodStack:
    stack = build_stack(name, params and {name: params})
    size = dict(total_steps=1000, total_batches=1000, max_completion_length=2 * TOKENS, group_size=GROUP)
    stack.start(make_run(dataset_size=prompts, **size, **run))
    return stack


def prompts(name: str, size: int, **params: Any) -> Found:
    """A batch: prompts, and an `observe` after a boundary, where the state is shared with the copy to save."""
    stack = started(name, size, params)
    method, rows = stack.methods[0], BATCH * GROUP
    saved, chosen = None, list(range(BATCH))

    def select(number: int) -> None:
        nonlocal chosen
        stack.batch = number
        if stack.claims["select_prompts"]:
            chosen = list(stack.one("select_prompts", PromptPool(size, (), (), None, number), BATCH))

    def observe(number: int) -> None:
        nonlocal saved
        saved = stack.state_dict("")
        index = torch.tensor(chosen).repeat_interleave(GROUP)
        draw = torch.Generator().manual_seed(number)
        rollouts = make_rollouts(torch.rand(rows, generator=draw).round(), group_size=GROUP).replace(prompt_index=index)
        nothing = torch.zeros(0, dtype=torch.int64)
        tokens = Tokens(nothing, nothing, nothing.double(), nothing.bool(), nothing.bool())
        stack.call("observe", method, rollouts, tokens, {})

    return {"select": least(select), "boundary_and_observe": least(observe)}


def filled() -> Found:
    """A plan of half of the batch, filled with prompts of the driver's own order."""
    stack = started("mssr_baseline", PROMPTS, {"rho": 0.9})
    proposal = list(range(BATCH // GROUP))
    return {"seconds": least(lambda _: first_plan(stack, proposal, GROUP, BATCH, PROMPTS))}


def domains(size: int = 10**6) -> Found:
    data = datasets.Dataset.from_dict({"prompt": ["x"] * size, "domain": [f"d{i % 7}" for i in range(size)]})
    params = {"column": "domain"}
    return {"start": least(lambda _: started("linear_ts", size, params, dataset=data), 2)}


def rounds(rows: int) -> Found:
    """Twelve rounds of `v0_5` whose every group asks for one more."""
    groups = rows // 16
    stack = started("v0_5", groups, {"prior": "constant", "prior_value": 0.5, "k_init": 4, "k_max": 16, "cost": 0.0})
    draw = torch.Generator().manual_seed(0)

    def work(_: int) -> None:
        first = tuple(PlanRow(g, g, 4) for g in range(groups))
        account, group = Rounds(stack, first, 16, rows, groups), torch.arange(groups).repeat_interleave(4)
        reward = (torch.rand(len(group), generator=draw) > 0.02).double()
        while more := account.more(group, reward):
            group = torch.cat([group, torch.tensor([row.group for row in more]).repeat_interleave(more[0].n)])
            reward = torch.cat([reward, (torch.rand(len(group) - len(reward), generator=draw) > 0.02).double()])

    return {"seconds": least(work, 3)}


def seeds(failed: int, words: int = 60, corpus: int = 1024) -> Found:
    """`xrpo_seeds` looks for the examples of the failed prompts of a batch."""
    draw = torch.Generator().manual_seed(0)
    size = corpus + failed
    texts = [" ".join(f"w{w}" for w in torch.randint(4000, (words,), generator=draw).tolist()) for _ in range(size)]
    data = datasets.Dataset.from_dict({"prompt": texts})
    stack = started("xrpo_seeds", size, dataset=data)
    method = stack.methods[0]
    method.state["answers"] = {str(i): "42" for i in range(corpus)}
    so_far = tuple(GroupSoFar(PlanRow(corpus + i, i, GROUP), torch.zeros(GROUP // 2)) for i in range(failed))

    def work(_: int) -> None:
        method.state["left"] = {str(i): GROUP // 2 for i in range(failed)}
        stack.call("plan", method, Plan((), GROUP, failed * GROUP, 1, so_far, 0, first=False))

    return {"seconds": least(work, 2)}


def main(only: str = "", label: str = "now", out: Path = Path("benchmarks/hooks.json")) -> None:
    """Without `--only` all cases, else those whose name contains it; the others in `out` stay."""
    torch.set_num_threads(1)
    found = json.loads(out.read_text()) if out.exists() else {}
    cases: dict[str, Callable[[], Found]] = {
        "mssr_prompts, 10^7 prompts": lambda: prompts("mssr_prompts", PROMPTS, rho=0.9),
        "vade, 10^7 prompts": lambda: prompts("vade", PROMPTS),
        "a batch filled, 10^7 prompts": filled,
        "linear_ts, 10^6 prompts": domains,
        "v0_5, 1,024 rows": lambda: rounds(1024),
        "v0_5, 8,192 rows": lambda: rounds(8192),
        "xrpo_seeds, 64 failed": lambda: seeds(64),
        "xrpo_seeds, 512 failed": lambda: seeds(512),
    }
    names = [name for name in SHAPES if only in name]
    if names:
        seen = batch_of()
        column, room = seen[1].advantages, torch.empty_like(seen[1].advantages)
        copy = least(lambda _: room.copy_(column))
        cases |= {name: lambda name=name: shape(name, seen, copy) for name in names}  # type: ignore[misc]
    for name, case in cases.items():
        if only in name:
            found.setdefault(name, {})[label] = {k: round(v, 5) for k, v in case().items()}
            print(name, json.dumps(found[name]), flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    before, mark, rest = README.read_text().partition(BEGIN)
    README.write_text(before + mark + table(found) + END + rest.partition(END)[2] if mark else before)


def table(found: dict[str, dict[str, Found]]) -> str:
    """Of the page: CPU ms before and now."""
    lines = ["| hook | part | before, ms | now, ms | now, ns a token | copies |", "|---|---|---|---|---|---|"]
    for name, of in found.items():
        for part in ("start", "select", "boundary_and_observe", "seconds"):
            times = [of.get(label, {}).get(part) for label in ("before", "now")]
            if times != [None, None]:
                cells = ["-" if t is None else f"{1e3 * t:,.3g}" if t < 1 else f"{1e3 * t:,.0f}" for t in times]
                more = [f"{of['now'][key]:.3g}" if key in of["now"] else "" for key in ("ns_per_token", "copies")]
                what = "" if part == "seconds" else part.replace("_", " ")
                lines.append("| " + " | ".join([name, what, *cells, *more]) + " |")
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
