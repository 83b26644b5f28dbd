"""How long the page of a large trace takes, in a real browser: 200 batches of 1,024 rows of 2,000 tokens.

    python benchmarks/inspect_page.py
    python benchmarks/inspect_page.py --batches 20 --rows 256 --tokens 500

The writer of a run makes a few different batches (`mc_grpo`, entropies and log-probs, random tokens with the
frequencies of words, no model). The other batches are links to their files under other numbers, with summaries of their
own, so that the trace has its real size for a reader. Files are in the cache of the system. `serve` is the page of
`rl-plugins inspect --serve`, `html` the folder of `--html`, of a few batches. Times of the page run from the request
until it shows the heading of the view; they are medians.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from browser import Browser
from scale_driver import RANKS, Batch

from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.page import write_page
from rl_plugins.lab.viewer.serve import PageServer
from rl_plugins.runtime.trace import schema, trace_of

VOCABULARY, DIFFERENT = 50_000, 3


class _Words:
    """`Chat` of a vocabulary of short words."""

    eos = (1,)

    def decode(self, tokens: Any, special: bool = False) -> str:
        return "".join(f" w{t}" for t in tokens)


class _Random(Batch):
    """Completions of random tokens."""

    seed = 0

    def made(self, rank: int) -> tuple[Any, dict[str, torch.Tensor]]:
        made, columns = super().made(rank)
        draw = torch.Generator().manual_seed(rank + 100 * self.seed)
        for i, ids in enumerate(made.ids):
            ranks = torch.rand(len(ids), generator=draw).mul(-10).exp()  # frequency falls with the rank, as of words
            made.ids[i] = (2 + ranks * VOCABULARY).long().tolist()
        return made, columns


def write_trace(folder: Path, batches: int, rows: int, tokens: int) -> None:
    """Writes the trace."""
    for seed in range(DIFFERENT):
        watchers = trace_of({"signals": ["entropies", "old_logprobs"], "folder": str(folder)}, "trace", "")
        batch = _Random(["mc_grpo"], rows, tokens, watchers=watchers, chat=_Words())
        batch.seed = seed
        joined = batch.joined([batch.part(k) for k in range(RANKS)])
        batch.decided(joined)
        failed = watchers[0]._writer.wait()  # type: ignore[attr-defined]
        assert not failed, failed
        (only,) = (folder / "rollouts").glob("batch-00000000.parquet")
        only.rename(folder / f"rollouts-{seed}")
        (folder / "batches" / only.name).rename(folder / f"summary-{seed}")
    for number in range(batches):
        name = f"batch-{number:08d}.parquet"
        os.link(folder / f"rollouts-{number % DIFFERENT}", folder / "rollouts" / name)
        (summary,) = pq.read_table(folder / f"summary-{number % DIFFERENT}").to_pylist()
        pq.write_table(pa.Table.from_pylist([{**summary, "batch": number}], schema.BATCHES), folder / "batches" / name)


def measure(folder: Path, batches: int, repeats: int = 5) -> dict[str, float]:
    """Seconds and megabytes."""
    found: dict[str, float] = {}
    start = time.perf_counter()
    server = PageServer(TraceFolder(folder))
    found["serve: starts"], found["serve: data of the run, MB"] = time.perf_counter() - start, len(server.run("")) / 1e6
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Browser() as browser:
        heading = "document.querySelector('main h1')"
        found["serve: opens"] = statistics.median(browser.open(server.url, heading) for _ in range(repeats))
        cold, warm, rollout, filtered = [], [], [], []
        for k in range(repeats):
            b = (k * 7 + 3) % batches
            cold.append(browser.move(f"#batch={b}&group=3", f"{heading}?.innerText.startsWith('Group 3')"))
            warm.append(browser.move(f"#batch={b}&group=4", f"{heading}?.innerText.startsWith('Group 4')"))
            row = browser.run(
                "rlTrace.get(location.hash.match(/batch=(\\d+)/)[1].replace(/^/, 'b') + '/g4').rows[0].row"
            )
            place = f"#batch={b}&group=4&rollout={row}"
            rollout.append(browser.move(place, f"{heading}?.innerText.startsWith('Rollout')"))
            browser.move("#", f"{heading}?.innerText.startsWith('mc_grpo')")
            shown = "document.querySelector('main [role=status]').innerText"
            filtered.append(browser.move("#show=zero+variance", f"!{shown}.startsWith({shown}.split(' ')[2])"))
        found["serve: group of another batch"] = statistics.median(cold)
        found["serve: next group of the batch"] = statistics.median(warm)
        found["serve: rollout"] = statistics.median(rollout)
        found["serve: run with a filter"] = statistics.median(filtered)
        found["errors"] = len(browser.errors)
    server.shutdown()
    server.server_close()
    return found


def measure_folder(folder: Path, few: int) -> dict[str, float]:
    """Seconds and megabytes per batch of the folder of `--html`."""
    trace = TraceFolder(folder)
    trace.__dict__["numbers"], trace.__dict__["recorded"] = trace.numbers, trace.numbers[:few]
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        list(write_page(trace, Path(out)))
        seconds = time.perf_counter() - start
        size = sum(p.stat().st_size for p in (Path(out) / "data").glob("b*/*.js")) / 1e6
        with Browser() as browser:
            opens = browser.open(f"file://{out}/index.html")
            group = browser.move("#batch=0&group=3", "document.querySelector('main h1')?.innerText.startsWith('Group')")
    return {
        "html: seconds per batch": seconds / few,
        "html: MB per batch": size / few,
        "html: opens": opens,
        "html: group": group,
    }


def main(
    batches: int = 200,
    rows: int = 1024,
    tokens: int = 2000,
    few: int = 2,
    out: Path = Path("benchmarks/inspect_page.json"),
) -> None:
    """Write the trace and measure the page."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "trace"
        start = time.perf_counter()
        write_trace(folder, batches, rows, tokens)
        print(f"trace written in {time.perf_counter() - start:.0f} s", flush=True)
        sizes = [p.stat().st_size for p in (folder / "rollouts").iterdir()]
        found = {"trace, GB": sum(sizes) / 1e9, **measure(folder, batches), **measure_folder(folder, few)}
    for name, value in found.items():
        print(f"{name:<36}{value:10.3f}")
    setting = {"batches": batches, "rows": rows, "tokens": tokens, "cpu": platform.processor() or platform.machine()}
    out.write_text(json.dumps({"setting": setting, "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
