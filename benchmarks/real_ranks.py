"""The share of a TRL step that is ours, in 1, 2 and 4 real processes: `RL_PLUGINS_SECONDS` beside TRL's own step time.

    python benchmarks/real_ranks.py --processes 1 2 4

Each process is a gloo rank of one run of the embedded policy with the same rows in all; with more processes than cores
they wait for each other, which counts in the step and, where it is in an exchange of ours, in `gather`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ARMS = {
    "gdpo": (["gdpo"], {}),
    "mssr_shaping": (["mssr_shaping"], {}),
    "minpro, 2 updates": (["minpro"], {"num_iterations": 2}),
    "vcpo, 2 updates": (["vcpo"], {"num_iterations": 2}),
}


def worker(out: Path, rows: int, steps: int) -> None:
    """One rank of all arms."""
    import torch
    from cpu_runs import cpu_run

    from rl_plugins.lab.demo import rewards

    torch.set_num_threads(1)
    ranks, found = int(os.environ.get("WORLD_SIZE", "1")), {}
    for arm, (methods, options) in ARMS.items():
        trainer = cpu_run(
            out.parent / "out",
            rows // ranks,
            steps * options.get("num_iterations", 1),
            [rewards.digits, rewards.format],
            logging_steps=1,
            ddp_backend="gloo" if ranks > 1 else None,
            methods=methods,
            **options,
        )
        trainer.train()
        logged = [h for h in trainer.state.log_history if "rl_plugins/seconds" in h][2:]  # the first ones warm up
        names = sorted({n for h in logged for n in h if n.startswith("rl_plugins/seconds")} | {"step_time"})
        found[arm] = {n: median(h.get(n, 0.0) for h in logged) for n in names}
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
    variables = {**os.environ, "RL_PLUGINS_SECONDS": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    table = {}
    print(f"{'arm':20} {'processes':>9} {'step':>8} {'ours':>8} {'share':>7}   parts")
    for ranks in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            own = [__file__, "--worker", str(out), "--rows", str(options.rows), "--steps", str(options.steps)]
            subprocess.run(command + own, check=True, env=variables, capture_output=True)
            table[str(ranks)] = json.loads(out.read_text())
        for arm, values in table[str(ranks)].items():
            step, ours = values["step_time"], values["rl_plugins/seconds"]
            parts = {n.rsplit("/", 1)[1]: f"{1000 * v:.1f}" for n, v in values.items() if n.count("/") == 2}
            print(f"{arm:20} {ranks:9} {1000 * step:6.0f}ms {1000 * ours:6.1f}ms {ours / step:6.1%}   {parts}")
    options.out.write_text(json.dumps({"rows": options.rows, "steps": options.steps, "processes": table}, indent=1))


if __name__ == "__main__":
    main()
