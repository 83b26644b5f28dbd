"""`rl-plugins probe` on a pre-trained language model of 135 M parameters: the command, its answer and what it took.

    python benchmarks/probe_real.py            # under an hour of a core; one that was killed goes on
    python benchmarks/probe_real.py --table    # the answer that is there, in docs/probe.md

The run is the one of `rl-plugins demo --real` on a CPU: SmolLM2-135M-Instruct in float32, LoRA in the last third of its
layers, sums of one and two digits, two rewards, 16 rollouts a batch. The pool has 32 prompts with 16 rollouts of at
most 32 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

RESULTS = Path(__file__).with_suffix(".json")
POOL = ["--prompts", "32", "--rollouts", "16", "--solved-by", "solved"]


def draw(out: Path) -> None:
    """Runs the command, in a process whose CPU time counts, and stores its answer."""
    from rl_plugins.lab.real import demo

    demo.write_data(out / "data", demo.ON_CPU)
    config = {**demo.config(demo.ON_CPU, out / "data", [], False, False), "max_completion_length": 32}
    (out / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = [*("probe", str(out / "run.yaml")), *POOL, *("--out", str(out / "probe"))]
    drawn = len(list((out / "probe" / "pool").glob("*.parquet")))
    wide = {**os.environ, "COLUMNS": "150"}
    made = subprocess.run([sys.executable, "-m", "rl_plugins", *command], check=True, stdout=subprocess.PIPE, env=wide)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {"cpu_minutes": round((used.ru_utime + used.ru_stime) / 60, 1), "gigabytes": round(used.ru_maxrss / 1e6, 1)}
    answer = json.loads((out / "probe" / "probe.json").read_text())
    said = made.stdout.decode().partition("\nWritten: ")[0].strip()
    RESULTS.write_text(json.dumps({**cost, "drawn_before": drawn, "said": said, "answer": answer}, indent=1) + "\n")


def page(found: dict[str, Any]) -> str:
    """What the command printed, and what it took."""
    before = f" ({found['drawn_before']} of 32 prompts had been drawn before)" if found["drawn_before"] else ""
    took = f"It took {found['cpu_minutes']} CPU minutes{before} and {found['gigabytes']} GB of memory."
    return f"    rl-plugins probe run.yaml {' '.join(POOL)}\n\n{took}\n\n```text\n{found['said']}\n```"


def main() -> None:
    from real_learning import write_on_page

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/probe_real"))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        args.out.mkdir(parents=True, exist_ok=True)
        draw(args.out.absolute())
    elif RESULTS.exists():
        write_on_page("probe_real.py", page(json.loads(RESULTS.read_text())), "probe.md")


if __name__ == "__main__":
    main()
