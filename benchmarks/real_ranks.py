"""The share of a TRL step that is ours, in 1, 2 and 4 real processes: CPU seconds of the driver's process.

    python benchmarks/real_ranks.py --processes 1 2 4

Each process is a gloo rank of one run of the embedded policy with the same rows in all. The time in which they wait for
each other is not counted: with more processes than cores it says how busy the machine is.

The clock is outside: it wraps functions while a run trains. Parts lie in each other, and a second belongs to the
innermost one; the time inside TRL's own functions is nobody's. Passes of the model that TRL would not make are a part
of their own, beside what the driver computes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ARMS = {
    "gdpo": (["gdpo"], {}),
    "mssr_shaping": (["mssr_shaping"], {}),
    "d3s": (["d3s"], {}),
    "minpro, 2 updates": (["minpro"], {"num_iterations": 2}),
    "vcpo, 2 updates": (["vcpo"], {"num_iterations": 2}),
}
HOST = ""  # the part of TRL's own functions
PASSES = "passes"  # of the model, which a method asks for in addition: log-probs, entropies


class Clock:
    """CPU seconds by part, of functions that are wrapped while it runs.

    Attributes:
        spent: part -> seconds since `take`.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def watching(self, parts: dict[str, list[tuple[Any, str]]]) -> Iterator[Clock]:
        """Wraps functions.

        Args:
            parts: part -> (class or module, name of the function in it).
        """
        with contextlib.ExitStack() as undo:
            for part, functions in parts.items():
                for owner, name in functions:
                    plain = getattr(owner, name)
                    undo.callback(setattr, owner, name, plain)
                    setattr(owner, name, self.timed(part, plain))
            yield self

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._book()
            inside = self._open[-1:] == [HOST]  # a pass of TRL's own
            self._open.append(HOST if inside and part == PASSES else part)
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._open.pop()

        return counted

    def take(self) -> dict[str, float]:
        """What was counted since the last time."""
        found, self.spent = dict(self.spent), defaultdict(float)
        return found

    def _book(self) -> None:
        now = time.process_time()
        if self._open and self._open[-1] != HOST:
            self.spent[self._open[-1]] += now - self._since
        self._since = now


def parts() -> dict[str, list[tuple[Any, str]]]:
    """What is ours in a step of TRL, and TRL's own functions inside it."""
    import torch.distributed
    from accelerate import utils
    from trl import GRPOTrainer

    from rl_plugins.runtime import update
    from rl_plugins.trl.trainer import MethodsMixin

    batch = ("_generate_and_score_completions", "_generate", "_generate_single_turn", "_calculate_rewards")
    return {
        "driver": [(MethodsMixin, name) for name in batch],
        "update": [(MethodsMixin, "compute_loss"), (update, "surrogate")],
        "gather": [
            *((utils, name) for name in ("broadcast_object_list", "gather_object")),
            *((torch.distributed, n) for n in ("scatter_object_list", "gather_object", "all_to_all_single")),
        ],
        PASSES: [(GRPOTrainer, "_get_per_token_logps_and_entropies")],
        HOST: [(GRPOTrainer, n) for n in (*batch, "compute_loss")],
    }


def worker(out: Path, rows: int, steps: int) -> None:
    """One rank of all arms."""
    import torch
    from cpu_runs import cpu_run
    from transformers import TrainerCallback

    from rl_plugins.lab.demo import rewards

    class Steps(TrainerCallback):  # type: ignore[misc]
        def __init__(self, clock: Clock) -> None:
            self.clock, self.found, self.since = clock, list[dict[str, float]](), time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            now = time.process_time()
            self.found.append({**self.clock.take(), "step": now - self.since})
            self.since = now

    torch.set_num_threads(1)
    ranks, found = int(os.environ.get("WORLD_SIZE", "1")), {}
    for arm, (methods, options) in ARMS.items():
        trainer = cpu_run(
            out.parent / "out",
            rows // ranks,
            steps * options.get("num_iterations", 1),
            [rewards.digits, rewards.format],
            ddp_backend="gloo" if ranks > 1 else None,
            methods=methods,
            **options,
        )
        with Clock().watching(parts()) as clock:
            steps_seen = Steps(clock)
            trainer.add_callback(steps_seen)
            trainer.train()
        logged = steps_seen.found[2:]  # the first warm up
        names = sorted({n for x in logged for n in x})
        found[arm] = {n: median(x.get(n, 0.0) for x in logged) for n in names}
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/real_ranks.json"))
    parser.add_argument("--worker", type=Path)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.rows, options.steps)
        return
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    table = {}
    for ranks in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            own = [__file__, "--worker", str(out), "--rows", str(options.rows), "--steps", str(options.steps)]
            subprocess.run(command + own, check=True, env=variables, capture_output=True)
            table[str(ranks)] = json.loads(out.read_text())
        print("\n".join(lines(table)), flush=True)
    options.out.write_text(json.dumps({"rows": options.rows, "steps": options.steps, "processes": table}, indent=1))
    page, (begin, end) = Path(__file__).with_name("README.md"), MARKS
    before, rest = page.read_text().split(begin)
    page.write_text(before + "\n".join([begin, *lines(table), end]) + rest.split(end)[1])


MARKS = ("<!-- made by real_ranks.py: begin -->", "<!-- made by real_ranks.py: end -->")


def lines(table: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Markdown of what was found, by number of processes and arm."""
    kinds = ("step", "driver", "gather", "update", PASSES)
    found = ["| processes | methods | step, ms | driver | exchanges | update | further passes | ours without passes |"]
    found.append("|---" * 8 + "|")
    for ranks, arms in table.items():
        for arm, values in arms.items():
            ours = sum(values.get(kind, 0.0) for kind in ("driver", "gather", "update"))
            cells = [f"{1000 * values.get(kind, 0.0):.{1 if kind != 'step' else 0}f}" for kind in kinds]
            found.append(f"| {ranks} | {arm} | {' | '.join(cells)} | {ours / values['step']:.1%} |")
    return found


if __name__ == "__main__":
    main()
