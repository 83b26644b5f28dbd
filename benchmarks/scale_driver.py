"""What the driver of TRL and of verl does with one batch, by size and ranks: gather, load, decide, split, dump.

    python benchmarks/scale_driver.py                       # cases that scale_driver.json has not, then the table
    python benchmarks/scale_driver.py --again               # all of them
    python benchmarks/scale_driver.py --host trl --rows 1024 --tokens 8192 --ranks 64 --method gdpo

No model. In TRL the driver collects its own rows as a rank (gather), unpacks and joins what every rank sends (load),
decides, cuts the decision and packs the part of every rank (dump). The way in between is not measured. In verl rows in
memory stand for TransferQueue: what it takes to read them is "gather", and to write "dump" (see scale_verl.py). CPU
time of one thread, the least of the repetitions; every case in a process of its own, for its peak memory.

Beside it stand the host's own functions that the same process calls on the same tensors: in TRL padding, shuffle and
split of the driver's share of the batch; in verl `_compute_advantage` on the whole batch.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import pickle
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer

from rl_plugins import Method, Rollouts, Shape, Tokens
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.rollouts import PlanRow, Run
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.ranks import dumps
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.trl.generation.decided import local_decisions
from rl_plugins.trl.generation.rows import collect, rollouts_of
from rl_plugins.trl.generation.work import Row, ScoredWork, Work

RANKS, GROUP, TURN, READ = 64, 8, 8, 2
"""Ranks where nothing is said; rollouts of a group; every so many tokens of an agent, so many were only read."""
PARTS = ("gather", "load", "decide", "split", "dump")
ARMS = {
    "gdpo": "rows",
    "reads_tokens": "tokens, no rule",
    "mssr_shaping": "tokens",
    "d3s": "tokens",
    "gigpo": "turns",
}
SIZES = ((256, 14), (1024, 8192), (4096, 8192), (8192, 32768))
MOST_TOKENS = 5 * 10**7
"""More would take a case that reads them above 10 GB."""


class ReadsTokens(Method):
    """Has the runtime gather and split tokens, and changes none."""

    name = "reads_tokens"
    needs = frozenset({"tokens", "old_logprobs"})

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        return None


def stack_of(names: list[str], params: dict[str, Any] | None = None, watchers: Sequence[Any] = ()) -> MethodStack:
    return MethodStack([ReadsTokens()]) if names == ["reads_tokens"] else build_stack(names, params, watchers=watchers)


class Batch:
    """One generation batch as the ranks of TRL have it.

    Args:
        names: methods.
        rows: of all ranks.
        tokens: of a row on average; lengths lie between a half and one and a half of it.
        ranks: processes.
        watchers: of the stack.
        chat: of the run.
    """

    def __init__(
        self,
        names: list[str],
        rows: int,
        tokens: int,
        ranks: int = RANKS,
        params: dict[str, Any] | None = None,
        watchers: Sequence[Any] = (),
        chat: Any = None,
    ) -> None:
        self.stack: MethodStack = stack_of(names, params, watchers)
        self.rows, self.ranks = rows, ranks
        draw = torch.Generator().manual_seed(0)
        self.length = torch.randint(tokens // 2, tokens * 3 // 2 + 1, (rows,), generator=draw)
        self.rewards = torch.rand(rows, 2, generator=draw).round()
        plans = [PlanRow(g, g, GROUP) for g in range(rows // GROUP)]
        flat = [Row(p, i) for p in plans for i in range(GROUP)]
        each = rows // ranks
        self.prompts: Any = SimpleNamespace(numbered=True)
        parts = [flat[k * each : (k + 1) * each] for k in range(ranks)]
        self.work = Work(self.prompts, parts, regular=True, payload=[None] * rows)
        self.trainer: Any = SimpleNamespace(
            methods=self.stack,
            eos_token_ids=[1],
            processing_class=SimpleNamespace(pad_token_id=0, decode=lambda ids: f"state {len(ids)}"),
            mask_truncated_completions=False,
            environments=None,
            state=SimpleNamespace(global_step=1),
            reward_weights=torch.ones(2),
            reward_func_names=["right", "short"],
        )
        size = 4 * rows // GROUP
        self.stack.start(Run("trl", "1.16", None, size, (), ("right", "short"), GROUP, 10, 10, 2 * tokens, chat=chat))

    def made(self, rank: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """What TRL generated on a rank, and the columns somebody reads."""
        each = self.rows // self.ranks
        length = self.length[rank * each : (rank + 1) * each].tolist()
        ids, prompts = [self.ids_of(n) for n in length], [range(2, 66)] * each
        agents = "turns" in self.stack.needs
        mask = [[int(i % TURN < TURN - READ) for i in range(n)] for n in length] if agents else None
        made: Any = SimpleNamespace(ids=ids, prompts=prompts, tool_mask=mask, completions=[None] * each)
        names = {"old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies"} & self.stack.token_columns
        columns = {n: -torch.rand(each, max(length), generator=torch.Generator().manual_seed(rank)) for n in names}
        return made, columns

    def ids_of(self, n: int) -> Any:
        """A completion of so many tokens."""
        return range(2, n + 2)

    def part(self, rank: int) -> Any:
        """What a rank gives the driver."""
        made, columns = self.made(rank)
        return collect(self.trainer, self.scored(rank, made), torch.zeros(len(made.ids)), columns)[0]

    def scored(self, rank: int, made: Any) -> ScoredWork:
        return ScoredWork(replace(self.work, rank=rank), made, self.rewards, None)

    def joined(self, parts: list[Any]) -> Any:
        return rollouts_of(self.trainer, self.work, self.rewards, parts)

    def decided(self, seen: Any) -> Any:
        return decide(self.stack, seen.rollouts, seen.tokens, None, grpo_advantages, self.rows)

    def split(self, decision: Any) -> Any:
        return local_decisions(decision, [self.rows // self.ranks] * self.ranks, self.rows)


def least(found: dict[str, list[float]]) -> dict[str, float]:
    return {what: min(values) for what, values in found.items()}


def measure(names: list[str], rows: int, tokens: int, ranks: int) -> dict[str, Any]:
    """Seconds, bytes and peak memory of one case, in this process."""
    torch.set_num_threads(1)
    batch = Batch(names, rows, tokens, ranks)
    packed, opened = (dumps, pickle.loads) if ranks > 1 else (lambda part: part, lambda part: part)
    sent = [packed(batch.part(k)) for k in range(ranks)]
    took: dict[str, list[float]] = {part: [] for part in PARTS}

    def timed(what: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.process_time()
        out = call(*args)
        took[what].append(time.process_time() - start)
        return out

    made, columns = batch.made(0)
    scored = batch.scored(0, made)
    advantages, back, count = torch.zeros(len(made.ids)), [], int(batch.length.sum())
    for _ in range(5 if count < 2 * 10**7 else 3):
        own = timed("gather", lambda: packed(collect(batch.trainer, scored, advantages, columns)[0]))
        seen = timed("load", lambda: batch.joined([opened(part) for part in sent]))
        split = timed("split", batch.split, timed("decide", batch.decided, seen))
        del own, seen
        back = timed("dump", lambda split=split: [packed(("done", part)) for part in split])
    found = {
        **least(took),
        "bytes_to_driver_per_rank": max(map(len, sent)) if ranks > 1 else 0,
        "bytes_back_per_rank": max(map(len, back)) if ranks > 1 else 0,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    if count // ranks < 5 * 10**7:
        found["host_own"] = min(_trl(made, columns) for _ in range(3))
    if batch.stack.reads_tokens:  # row, position, advantages, keep, forced, and the columns
        found["copy"] = copied(count * (8 + 8 + 8 + 1 + 1 + 4 * len(batch.stack.token_columns)))
    return found


def _trl(made: Any, columns: dict[str, torch.Tensor]) -> float:
    """Seconds of what TRL does with a rank's completions: it pads ids and masks, shuffles and splits the batch."""
    from trl.trainer.utils import pad, shuffle_sequence_dict, split_tensor_dict

    ids = [torch.tensor(x) for x in made.ids]
    start = time.process_time()
    out = {
        "completion_ids": pad(ids, padding_value=0),
        "completion_mask": pad([torch.ones_like(x) for x in ids], padding_value=0),
        "advantages": torch.zeros(len(ids)),
        **columns,
    }
    split_tensor_dict(shuffle_sequence_dict(out), min(8, len(ids)))
    return time.process_time() - start


def copied(size: int) -> float:
    """Seconds to copy so many bytes."""
    memory = torch.ones(size // 8, dtype=torch.float64)
    start = time.process_time()
    memory.clone()
    return time.process_time() - start


# ---- all cases


def cases() -> Iterator[dict[str, Any]]:
    """What is to be measured."""
    for rows, tokens in SIZES:
        for name in ARMS:
            for host, ranks in (("trl", 1), ("trl", 64), ("trl", 512), ("verl", 0)):
                case = {"host": host, "method": name, "rows": rows, "tokens": tokens, "ranks": ranks}
                if rows >= ranks and (rows * tokens <= MOST_TOKENS or ARMS[name] == "rows"):
                    yield case


def key(case: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(case[name] for name in ("host", "method", "rows", "tokens", "ranks"))


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """One case in this process."""
    name, rows, tokens, ranks = key(case)[1:]
    if case["host"] == "verl":
        from scale_verl import measure as of_verl

        return of_verl(name, rows, tokens)
    return measure(name.split("+"), rows, tokens, ranks)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case in a process of its own: a fork, which need not import anything."""
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, fork) as pool:
        found = pool.submit(measured, case).result()
    return {name: round(x, 6) if isinstance(x, float) else x for name, x in (case | found).items()}


# ---- the table

BEGIN, END = "<!-- made by scale_driver.py: begin -->", "<!-- made by scale_driver.py: end -->"


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f}"


def table(found: list[dict[str, Any]]) -> str:
    """Markdown of all cases."""
    heads = ["host", "ranks", "method", "reads", *PARTS, "whole path", "host's own", "ratio", "copies", "peak, GB"]
    lines = []
    for rows, tokens in SIZES:
        lines += [
            "",
            f"**{rows:,} rows of {tokens:,} tokens**",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
        ]
        for case in (c for c in found if (c["rows"], c["tokens"]) == (rows, tokens)):
            ranks = case["ranks"] or "any"
            whole, own, copy = sum(case[part] for part in PARTS), case.get("host_own"), case.get("copy")
            cells = [case["host"], ranks, f"`{case['method']}`", ARMS[case["method"]], *(ms(case[p]) for p in PARTS)]
            cells += [ms(whole), ms(own), f"{whole / own:.2f}" if own else "-", f"{whole / copy:.1f}" if copy else "-"]
            lines.append(f"| {' | '.join(map(str, [*cells, format(case['peak_gb'], '.1f')]))} |")
    rows, tokens = SIZES[-1]
    took = ", ".join(f"{host} `{name}` {gb:.0f}" for (host, name), gb in too_large(found, rows * tokens).items())
    return "\n".join(
        [*lines, "", f"{rows:,} x {tokens:,} with tokens was not run; by the peaks above, in GB: {took}.", ""]
    )


def too_large(found: list[dict[str, Any]], tokens: int) -> dict[tuple[str, str], float]:
    """Gigabytes that so many tokens would take at the peak, on the line through the two largest batches measured."""
    peaks = defaultdict[tuple[str, str], dict[int, float]](dict)
    for case in (c for c in found if ARMS[c["method"]] != "rows"):
        of = peaks[case["host"], case["method"]]
        size = case["rows"] * case["tokens"]
        of[size] = max(of.get(size, 0.0), case["peak_gb"])
    lines = {which: sorted(of.items())[-2:] for which, of in peaks.items()}
    return {which: y + (y - x) / (b - a) * (tokens - b) for which, ((a, x), (b, y)) in lines.items()}


def write_table(found: list[dict[str, Any]], page: Path) -> None:
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.split(END)[1]}")


def main(
    host: str = "trl",
    rows: int = 0,
    tokens: int = 0,
    ranks: int = RANKS,
    method: str = "",
    again: bool = False,
    out: Path = Path("benchmarks/scale_driver.json"),
) -> None:
    """All cases, each in a process of its own, or the one of a method, into `out` and the table of README.md."""
    torch.set_num_threads(1)
    known = {key(c): c for c in (json.loads(out.read_text()) if out.exists() and not again else ())}
    one = {"host": host, "method": method, "rows": rows, "tokens": tokens, "ranks": ranks}
    for case in [one] if method else cases():
        if method or key(case) not in known:
            known[key(case)] = run(case)
            print(known[key(case)], flush=True)
        found = [known[key(c)] for c in cases() if key(c) in known]
        out.write_text(json.dumps(found, indent=1) + "\n")
    write_table(found, Path(__file__).with_name("README.md"))


if __name__ == "__main__":
    typer.run(main)
