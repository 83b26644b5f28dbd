"""Seconds to tell a dataset by all of its rows (`rl_plugins.runtime.fingerprint`), at a thousand to a million rows.

Rows are as GRPO has them: a conversation of two messages (about 200 characters), an answer, and numbers of a task in a
nested column. `arrow` is a `datasets.Dataset` in memory, in chunks of 1000 rows; `file` the same from a memory-mapped
file, `shuffled` behind a random indices mapping; `list` a list of dicts, of which at most 32,768 rows are read.
Wall and CPU time of one thread, arms taking turns; minimum and median.

    python benchmarks/fingerprint.py --repeat 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import datasets
import pyarrow as pa

from rl_plugins.runtime.fingerprint import fingerprint

SIZES = (1_000, 10_000, 100_000, 1_000_000)


def row(i: int) -> dict[str, Any]:
    question = f"Sort the digits of {i * 7919} and say which of them come twice; " * 3
    return {
        "prompt": [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": question[:180]}],
        "answer": str(i * 31 % 1_000_003),
        "level": i % 5,
        "extra_info": {"index": i, "numbers": [i, i + 1, i + 2], "split": "train"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    pa.set_cpu_count(1)
    datasets.disable_progress_bars()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            chunks = [
                pa.Table.from_pylist([row(i) for i in range(a, min(a + 1000, size))]) for a in range(0, size, 1000)
            ]
            arrow = datasets.Dataset(pa.concat_tables(chunks))
            arrow.save_to_disk(f"{folder}/{size}")
            file = datasets.load_from_disk(f"{folder}/{size}")
            arms: dict[str, Any] = {"arrow": arrow, "file": file, "shuffled": arrow.shuffle(seed=0)}
            if size <= 100_000:
                arms["list"] = [row(i) for i in range(size)]
            said = {name: fingerprint(arm) for name, arm in arms.items()}
            assert said["arrow"] == said["file"] != said["shuffled"]
            seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
            for _ in range(arguments.repeat):
                for name, arm in arms.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    assert fingerprint(arm) == said[name]
                    seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            cases.append(
                {
                    "rows": size,
                    "megabytes": arrow.data.nbytes / 1e6,
                    "arms": {
                        name: {
                            "wall": {"min": min(w), "median": statistics.median(w)},
                            "cpu": {"min": min(c), "median": statistics.median(c)},
                        }
                        for name, (w, c) in ((n, tuple(zip(*values, strict=True))) for n, values in seconds.items())
                    },
                }
            )
            print(
                f"{size:>9} rows, {arrow.data.nbytes / 1e6:7.1f} MB: "
                + ", ".join(f"{n} {a['cpu']['min']:.3f} s" for n, a in cases[-1]["arms"].items()),
                flush=True,
            )
    arguments.out.write_text(json.dumps({"repeat": arguments.repeat, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
