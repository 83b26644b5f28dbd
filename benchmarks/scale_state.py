"""The state of a run at size: what a generation boundary and a checkpoint cost, and what a run costs to start.

State of `vade`, `mssr_prompts` and `v0` with 10^6 prompts, and a queue of `april` with 1,024 waiting groups. `growth`
is the state of every method in a long run on 16 prompts: what still grows after each was seen has no other bound.

    python benchmarks/scale_state.py --part boundary
    python benchmarks/scale_state.py --part growth --out benchmarks/state_growth.json
    python benchmarks/scale_state.py --part batches --rows 10000000 --out benchmarks/state_batches.json

`batches` is what a batch of 4 prompts costs every method with 10^7 prompts: nearly all of it grows with the dataset.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch
from cases import case_of

from rl_plugins.core.errors import RLPluginsError
from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.requests import Generated, Trajectory
from rl_plugins.core.rollouts import PlanRow, Run
from rl_plugins.runtime.carry_over import Group, admit, requeue, to_plain
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.registry import all_names, build, load
from rl_plugins.runtime.resume import resume, save_run
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import save_state
from rl_plugins.testing.contract import host
from rl_plugins.testing.contract.host import run_batch
from rl_plugins.testing.contract.kit import GROUP_SIZE, GROUPS, PROMPTS, Kit
from rl_plugins.testing.generation import Simulation


def least(work: Callable[[], Any], times: int = 5) -> float:
    """CPU seconds, the least of some takes."""
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def dataset_of(rows: int) -> datasets.Dataset:
    number = pa.array(range(rows))
    text = pa.compute.binary_join_element_wise("What is the number after ", number.cast(pa.string()), "?", "")
    return datasets.Dataset(pa.table({"prompt": text, "answer": number.cast(pa.string())}))


def run_with(dataset: Any) -> Run:
    return Run("trl", "1.16", dataset, len(dataset), ("prompt", "answer"), ("reward",), 8, 1000, 1000, 4096)


STACKS: dict[str, dict[str, Any]] = {
    "vade": {},
    "mssr_prompts": {"rho": 0.9},
    "v0": {"prior": "running_mean"},
    "v0_5": {"prior": "running_mean"},
}


def stacks(rows: int) -> dict[str, Any]:
    """Boundary, checkpoint and resume of methods with counts of all prompts."""
    found = {}
    run = run_with(dataset_of(rows))
    for name, params in STACKS.items():
        stack = build_stack([name], {name: params} if params else None)
        stack.start(run)
        found[name] = costs(stack)
    return found


def costs(stack: MethodStack) -> dict[str, float]:
    """Of a boundary, of a checkpoint, of a resume."""
    stack.state_dict("f")
    with tempfile.TemporaryDirectory() as folder:
        write = least(lambda: save_run(folder, stack.state_dict("f"), 0), 3)
        size = sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())
        read = least(lambda: resume(stack, folder, fingerprint="f", step=0, batch=0), 3)
    return {
        "boundary, ms": least(lambda: stack.state_dict("f")) * 1e3,
        "checkpoint, s": write,
        "checkpoint, MB": size / 1e6,
        "resume, s": read,
    }


def queue(groups: int, size: int, tokens: int, prompt: int = 500) -> dict[str, Any]:
    """Of `april` with waiting groups of rollouts with so many tokens."""
    stack = build_stack(["april"])
    stack.start(run_with(dataset_of(10_000)))

    def rollout(i: int) -> Trajectory:
        ids, logprobs = tuple(range(i, i + tokens)), tuple(-0.1 * k for k in range(tokens))
        return Trajectory(tuple(range(prompt))).add(Generated(ids, logprobs, "abort", 7))

    stack.carried = [
        to_plain(Group(PlanRow(i, i, size), 0, tuple(rollout(j) for j in range(size)))) for i in range(groups)
    ]
    found: dict[str, Any] = {"groups": groups, "rollouts": size, "tokens": tokens, **costs(stack)}
    begun = admit(stack, range(groups // 2), groups // 2, size, 10_000, None)
    requeue(stack, begun, [], 0)

    def batch() -> None:
        requeue(stack, admit(stack, range(groups // 2), groups // 2, size, 10_000, None), [], 0)

    found["admit and settle all, s"] = least(batch, 3)
    return found


def start(rows: int) -> dict[str, Any]:
    """CPU seconds of `start`, the first plan and the fingerprint with a dataset of so many rows, by method."""
    dataset = dataset_of(rows)
    found: dict[str, Any] = {"fingerprint": least(lambda: fingerprint(dataset), 1)}
    run = run_with(dataset)
    for name in all_names():
        try:
            stack = build_stack([name], {name: GIVEN[name]} if name in GIVEN else None)
            begin = time.process_time()
            stack.start(run)
            begun = time.process_time()
            first_plan(stack, range(64), 8, 512, rows, dataset)
            found[name] = {"start": round(begun - begin, 4), "plan": round(time.process_time() - begun, 4)}
        except RLPluginsError as e:  # of other hosts, or with parameters that must be given
            found[name] = str(e)[:120]
    return found


class _LongRun(Kit):
    """The kit of the contract test, without its checks, with a dataset of so many rows."""

    size = PROMPTS

    def build(self) -> Method:
        method = build(self.cls, self.params, self.cls.name)
        self.needs, self.rows_per_rollout = frozenset(method.needs), method.rows_per_rollout
        return method

    @cached_property
    def dataset(self) -> Any:  # type: ignore[override]
        few = super().dataset
        if self.size == PROMPTS:
            return few
        each = 10_000
        table = pa.table({name: [few[name][i % PROMPTS] for i in range(each)] for name in few.column_names})
        table = pa.concat_tables([table] * (self.size // each))
        for name in (n for n in table.column_names if n.endswith("set_id")):  # as in few rows
            table = table.set_column(table.column_names.index(name), name, pa.array(np.arange(self.size) // 2))
        return datasets.Dataset(table)


def batches(rows: int, names: Sequence[str], out: Path | None) -> dict[str, Any]:
    """CPU milliseconds of a batch of every method, the state kept at each boundary; written after each method.

    `start`; `first`: its first batch; `batch`: the most of the next 12; `stage`: the most of the first batches of the
    parts that a schedule of it has.
    """
    import scipy.stats  # noqa: F401  a method would in its first batch

    torch.optim.SGD([torch.zeros(1)])  # as a trainer has: the first optimizer imports for seconds
    host.PROMPTS = rows
    found: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {}
    for name in names or all_names():
        cls = load(name)
        if isinstance(cls, Bundle) or name in found:
            continue
        try:
            took = _batches_of(name, cls, rows)
        except RLPluginsError as e:  # the case of the contract test is one of few prompts
            print(name, str(e)[:200], flush=True)
            continue
        found[name] = {what: round(1e3 * seconds, 1) for what, seconds in took.items()}
        print(name, found[name], flush=True)
        if out:
            out.write_text(json.dumps(found, indent=1) + "\n")
    if out:
        kinds = ("start", "first", "batch", "stage")
        lines = [
            "| method | start, ms | first batch | most of the others | begin of a stage |",
            "|---|---|---|---|---|",
        ]
        most = sorted(found, key=lambda n: -found[n]["batch"])
        lines += [
            f"| {n} | {' | '.join(f'{found[n][k]:,.0f}' if k in found[n] else '' for k in kinds)} |" for n in most
        ]
        write("batches", lines)
    return found


def _batches_of(name: str, cls: type[Method], rows: int) -> dict[str, float]:
    """Seconds."""
    step, stack, started = _steps(name, cls, rows)

    def batch() -> float:
        kept = stack.state_dict("f")
        begin = time.process_time()
        step()
        del kept
        return time.process_time() - begin

    first, others, stages = batch(), [batch() for _ in range(12)], []
    for number in stack.methods[0].stages():
        stack.batch = number
        stages.append(batch())
        others += [batch() for _ in range(2)]
    return {"start": started, "first": first, "batch": max(others), **({"stage": max(stages)} if stages else {})}


def growth(names: Sequence[str], at: Sequence[int], out: Path | None) -> dict[str, dict[str, int]]:
    """Bytes of the saved state of each method with a state after so many batches; written after each method."""
    found: dict[str, dict[str, int]] = json.loads(out.read_text()) if out and out.exists() else {}
    for name in names or all_names():
        cls = load(name)
        if isinstance(cls, Bundle) or name in found:
            continue
        step, stack, _ = _steps(name, cls)
        step()
        if not any(m._state for m in stack.methods) and not stack.carried:
            continue
        sizes: dict[str, int] = {}
        for batch in range(2, max(at) + 1):
            step()
            if batch in at:
                sizes[str(batch)] = _bytes(stack)
        found[name] = sizes
        print(name, sizes, flush=True)
        if out:
            out.write_text(json.dumps(found, indent=1) + "\n")
    if out:
        lines = ["| method | batches: bytes |", "|---|---|"]
        lines += [
            f"| {n} | {', '.join(f'{b}: {size:,}' for b, size in of.items())} |" for n, of in sorted(found.items())
        ]
        write("growth", lines)
    return found


def write(part: str, lines: Sequence[str]) -> None:
    """The table of a part in README.md."""
    page = Path(__file__).with_name("README.md")
    begin, end = (f"<!-- made by scale_state.py, {part}: {which} -->" for which in ("begin", "end"))
    before, rest = page.read_text().split(begin)
    page.write_text(before + "\n".join([begin, *lines, end]) + rest.split(end)[1])


def _steps(name: str, cls: type[Method], rows: int = PROMPTS) -> tuple[Callable[[], Any], MethodStack, float]:
    """What makes a batch, its stack, and the seconds in which that started."""
    case = case_of(name)
    kit = _LongRun(cls, case.params if rows == PROMPTS else {**case.params, **LARGE.get(name, {})}, case.prepare)
    kit.given_rows, kit.facts, kit.size = list(case.rows or ()), {"dataset_size": rows}, rows
    method, run = kit.build(), kit.run
    if "admit" in cls.claims():

        def lengths(prompt: int, drawn: int) -> Any:
            return 1 + np.random.default_rng([prompt, drawn]).lognormal(2.5, 1.0, GROUP_SIZE).astype(int)

        simulation = Simulation(method, lengths, groups=GROUPS, group_size=GROUP_SIZE, max_tokens=64, dataset_size=rows)
        begin = time.process_time()
        simulation.stack.start(run)
        return simulation.batch, simulation.stack, time.process_time() - begin
    begin = time.process_time()
    stack = kit.stack()
    return partial(run_batch, kit, stack), stack, time.process_time() - begin


def _bytes(stack: MethodStack) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return sum(file.stat().st_size for file in save_state(folder, stack.state_dict("f")).iterdir())


LARGE: dict[str, dict[str, Any]] = {
    "dots": {"embeddings": lambda data: np.sin(np.arange(len(data))[:, None] + 2.0 * np.arange(4)).astype(np.float32)}
}
"""Parameters where the case of the contract test is one of few prompts."""
GIVEN: dict[str, Any] = {"v0": {"prior": "running_mean"}, "v0_5": {"prior": "running_mean"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=["boundary", "queue", "start", "growth", "batches"], required=True)
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--groups", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--names", nargs="*", default=[], help="methods of growth; default: all")
    parser.add_argument("--batches", nargs="*", type=int, default=[100, 1_000, 10_000], help="of growth")
    parser.add_argument("--out", type=Path, help="file of growth, which an interrupted run goes on with")
    a = parser.parse_args()
    if a.part == "growth":
        growth(a.names, a.batches, a.out)
        return
    if a.part == "batches":
        batches(a.rows, a.names, a.out)
        return
    found = (
        stacks(a.rows)
        if a.part == "boundary"
        else queue(a.groups, 16, a.tokens)
        if a.part == "queue"
        else start(a.rows)
    )
    print(json.dumps({**found, "peak, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}, indent=1))


if __name__ == "__main__":
    main()
