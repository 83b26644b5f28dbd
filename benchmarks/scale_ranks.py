"""What travels between real processes for one generation batch of TRL, in bytes.

    python benchmarks/scale_ranks.py                      # the table of benchmarks/README.md: 2, 4 and 8 processes
    python benchmarks/scale_ranks.py --rows 128 --tokens 64,256 --ranks 2

The package's own exchange over gloo, on rows that are made up: no model, no engine. Counted is what torch's collectives
hand to each process, lengths and padding included; rank 0 is the driver.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typer
from scale_driver import GROUP, Batch

from rl_plugins.core.requests import Generated, Trajectory
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.trl.generation import programs, queue
from rl_plugins.trl.generation.batches import decided_by_driver
from rl_plugins.trl.generation.rounds import work_of_rounds
from rl_plugins.trl.generation.work import ScoredWork

BY_ROWS, BY_TOKENS, TOGETHER = ("gdpo", "vade"), ("mssr_shaping", "d3s"), ("rounds", "queue", "programs")


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes torch's collectives hand to this process, added up in the only entry."""
    received, module, saved = [0], dist.distributed_c10d, {}
    rank, others = dist.get_rank(), dist.get_world_size() - 1

    def size(x: torch.Tensor) -> int:
        return x.numel() * x.element_size()

    def all_to_all(out: torch.Tensor, own: torch.Tensor, *splits: Any) -> int:
        kept = splits[0][rank] if splits else out.numel() // (others + 1)
        return (out.numel() - kept) * out.element_size()

    counts: dict[str, Callable[..., int]] = {
        "broadcast": lambda x, src=0, **_: 0 if src == rank else size(x),
        "scatter": lambda x, scatter_list=None, src=0, **_: 0 if src == rank else size(x),
        "gather": lambda x, gather_list=None, dst=0, **_: size(x) * others if dst == rank else 0,
        "all_gather": lambda parts, x, **_: size(x) * others,
        "all_to_all_single": all_to_all,
    }

    def counting(function: Any, count: Callable[..., int]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            received[0] += count(*args, **{k: v for k, v in kwargs.items() if k not in ("group", "async_op")})
            return function(*args, **kwargs)

        return call

    for name, count in counts.items():
        saved[name] = getattr(module, name)
        for place in (module, dist):
            setattr(place, name, counting(saved[name], count))
    try:
        yield received
    finally:
        for name, function in saved.items():
            for place in (module, dist):
                setattr(place, name, function)


class MadeUp:
    """A generation batch of one rank whose engine answers at once.

    Args:
        tokens: of a completion on average.
    """

    def __init__(self, names: list[str], params: dict[str, Any], rows: int, tokens: int, accelerator: Any) -> None:
        ranks = accelerator.num_processes
        self.source = Batch(names, rows, tokens, ranks, params)
        self.trainer = t = self.source.trainer
        self.rows, self.tokens = rows, tokens
        args = SimpleNamespace(num_generations=GROUP, generation_batch_size=rows)
        size = 4 * rows // GROUP
        self.prompts: Any = SimpleNamespace(
            numbered=True,
            proposal=tuple(range(rows // GROUP)),
            size=size,
            dataset=None,
            has_images=False,
            row=lambda plan: {"prompt": "x"},
        )
        t.accelerator, t.num_generations, t.args, t.tools, t.rollout_func = accelerator, GROUP, args, None, None
        t.max_completion_length, t.reward_funcs = 2 * tokens, [None, None]
        t.multi_objective_aggregation, t.scale_rewards = "sum_then_normalize", "group"
        t.state.num_input_tokens_seen = 0
        t._metrics, t._pending_extra_logs = {"train": defaultdict(list)}, {}
        t._generate, t._calculate_rewards = self._engine, self._scores

    def lengths(self, rows: int) -> list[int]:
        return torch.randint(self.tokens // 2, self.tokens * 3 // 2, (rows,)).tolist()

    def _engine(self, prompts: list[Any]) -> Any:
        ids = [list(range(2, n + 2)) for n in self.lengths(len(prompts))]
        return [[0]] * len(ids), ids, None, [None] * len(ids), None

    def _scores(self, *columns: Any) -> torch.Tensor:
        rows = len(self.trainer.batch_phase.flat)
        return torch.rand(rows, 2, generator=torch.Generator().manual_seed(rows)).round()  # all ranks see the same

    def decided_once(self) -> None:
        """Rows to the driver, its decision back."""
        source, rank = self.source, self.trainer.accelerator.process_index
        made, columns = source.made(rank)
        scored = ScoredWork(replace(source.work, rank=rank), made, source.rewards, None)
        decided_by_driver(self.trainer, scored, torch.zeros(source.rows // source.ranks), columns)

    def decoded(self, trainer: Any, groups: Any, enough: int, row_of: Any) -> Any:
        """Stands for `queue.decode`: the first groups are completed, of the others half is there."""
        made = []
        for k, g in enumerate(groups):
            rollouts = []
            for i, n in enumerate(self.lengths(g.size)):
                t = g.rollouts[i] if g.rollouts else Trajectory(tuple(range(20)))
                new = max(0, (n if k < enough else n // 2) - len(t))
                finish: Any = "eos" if k < enough else "abort"
                rollouts.append(t.add(Generated(tuple(range(new)), (-0.5,) * new, finish, 1)))
            made.append(replace(g, rollouts=tuple(rollouts)))
        return made, list(range(len(made)))

    def played(self, trainer: Any, plan: Any, rows: Any, training: bool) -> Any:
        """Stands for `programs.make_rollouts`: rollouts of the first prompts have two rows, so that rows move."""

        def row(n: int) -> Trajectory:
            return Trajectory(tuple(range(20))).add(Generated(tuple(range(n)), (-0.5,) * n, "eos", 1))

        half = self.rows // GROUP // 2
        return [(None, [[row(n)] * (2 if p.group < half else 1) for n in self.lengths(p.n)]) for p in plan]


def batch_of(case: str, rows: int, tokens: int, accelerator: Any) -> Callable[[], Any]:
    """What is counted: everything between the ranks from the plan to the rows of each, or the decision on made rows."""
    if case == "queue":
        batch = MadeUp(["april"], {}, rows, tokens, accelerator)
        queue.decode = batch.decoded
        queue.run_queue(batch.trainer, batch.prompts)  # now groups wait
        return lambda: queue.run_queue(batch.trainer, batch.prompts)
    if case == "rounds":
        batch = MadeUp(
            ["v0_5"],
            {"v0_5": {"prior": "constant", "prior_value": 0.5, "cost": 0.0, "k_max": 8}},
            rows,
            tokens,
            accelerator,
        )
        return lambda: work_of_rounds(batch.trainer, batch.prompts)
    if case == "programs":
        batch = MadeUp(["gdpo"], {}, rows, tokens, accelerator)
        programs.make_rollouts = batch.played
        plan = [PlanRow(g, g, GROUP) for g in range(rows // GROUP)]
        return lambda: programs.run_programs(batch.trainer, plan, batch.prompts.row)
    return MadeUp([case], {}, rows, tokens, accelerator).decided_once


def one_rank(cases: list[str], rows: int, tokens: list[int], out: Path) -> None:
    """One process of several; rank 0 writes what all received."""
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    found = []
    for case in cases:
        for n in tokens:
            torch.manual_seed(accelerator.process_index)
            work = batch_of(case, rows, n, accelerator)
            dist.barrier()
            start = time.perf_counter()
            with counted() as received:
                work()
            mine = [received[0], round(time.perf_counter() - start, 4)]
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, mine)
            got, seconds = ([x[k] for x in everybody] for k in (0, 1))
            found.append({"case": case, "rows": rows, "tokens": n, "received": got, "seconds": max(seconds)})
    if accelerator.is_main_process:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def launch(cases: list[str], rows: int, tokens: list[int], ranks: int) -> list[dict[str, Any]]:
    """Bytes every rank received, of each case and length."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
        command += ["--cases", ",".join(cases), "--rows", str(rows), "--tokens", ",".join(map(str, tokens))]
        done = subprocess.run([*command, "--out", str(out), "--ranks", "0"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def main(
    rows: int = 1024,
    tokens: str = "256,2048",
    cases: str = ",".join((*BY_ROWS, *BY_TOKENS, *TOGETHER)),
    ranks: str = "2,4,8",
    out: Path = Path("benchmarks/scale_ranks.json"),
) -> None:
    """Launches as many processes as `ranks` says; 0 for a process that is one of them."""
    names, lengths = cases.split(","), [int(n) for n in tokens.split(",")]
    if ranks == "0":
        one_rank(names, rows, lengths, out)
        return
    found = []
    for n in map(int, ranks.split(",")):
        for one in launch(names, rows, lengths, n):
            found.append({"ranks": n, **one})
            print(found[-1], flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
