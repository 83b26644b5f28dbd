"""DORA's schedules (arXiv 2509.18883), simulated: no model runs here, only events.

Slots decode one token per unit of time. Lengths are log-normal (median 256 tokens, sigma 1), at most 8,192. A batch
trains 256 answers and takes as long as 256 tokens of decoding; then the weights change.

    sync      every slot waits until the batch is complete; generation waits while it is trained
    partial   all slots go on; an answer goes on with new weights, so it has several versions
    versions  all slots go on; an answer keeps the weights it began with. Answers older than S versions when the
              weights change are discarded and their prompts begin again (S + 1 versions are kept)

Measured over 200 batches: trained tokens per unit of time relative to sync, share of the decoded tokens that were
discarded, share of the trained answers with one version, mean age of the trained answers, share of the slots that are
idle; and trained tokens per answer, because a schedule that discards long answers trains shorter ones.

    python examples/evidence/dora_schedules.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import across, arguments, interval, named, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import panels

MEDIAN, SIGMA, LONGEST = 256.0, 1.0, 8192
BATCH, TRAINING, BATCHES = 256, 256.0, 200
SLOTS = {"64 slots": 64, "256 slots": 256}
STALENESS = (0, 1, 2, 4, 8)


@dataclass
class Books:
    """Answers and tokens, by what became of them; the same answer may begin several times."""

    begun: int = 0
    trained: int = 0
    discarded: int = 0
    in_flight: int = 0
    waiting: int = 0
    trained_tokens: float = 0.0
    discarded_tokens: float = 0.0
    one_version: int = 0
    ages: list[int] = field(default_factory=list)
    busy: float = 0.0
    end: float = 0.0

    def check(self) -> None:
        """Nothing is lost: what began was trained, was discarded, is being made, or waits to be trained."""
        assert self.begun == self.trained + self.discarded + self.in_flight + self.waiting


def lengths(rng: np.random.Generator) -> float:
    return float(np.clip(np.ceil(MEDIAN * np.exp(SIGMA * rng.standard_normal())), 1, LONGEST))


def sync(seed: int, slots: int, batches: int = BATCHES) -> Books:
    rng, books = np.random.default_rng(seed), Books()
    for _ in range(batches):
        made = [lengths(rng) for _ in range(BATCH)]
        free = [0.0] * slots
        for length in made:
            heapq.heapreplace(free, free[0] + length)
        books.begun += BATCH
        books.trained += BATCH
        books.one_version += BATCH
        books.ages += [0] * BATCH
        books.trained_tokens += sum(made)
        books.busy += sum(made)
        books.end += max(free) + TRAINING
    return books


def ahead(seed: int, slots: int, staleness: int | None, batches: int = BATCHES) -> Books:
    """Generation that never waits. `staleness`: that of `versions`; None: `partial`."""
    rng, books, version, now = np.random.default_rng(seed), Books(), 0, 0.0
    running: list[tuple[float, float, int]] = []  # end, length, version at its begin
    finished: list[tuple[float, int, int]] = []  # length, version at its begin and at its end
    trainer_free, updates = 0.0, list[float]()  # times at which weights will change

    def begin(at: float) -> None:
        length = lengths(rng)
        books.begun += 1
        heapq.heappush(running, (at + length, length, version))

    for _ in range(slots):
        begin(0.0)
    while len(books.ages) < batches * BATCH:
        if updates and updates[0] <= running[0][0]:  # new weights
            now = updates.pop(0)
            version += 1
            if staleness is not None:
                old = [x for x in running if version - x[2] > staleness]
                running = [x for x in running if version - x[2] <= staleness]
                heapq.heapify(running)
                for end, length, _ in old:
                    done = length - (end - now)
                    books.discarded += 1
                    books.discarded_tokens += done
                    books.busy += done
                    begin(now)
                stale = [x for x in finished if version - x[1] > staleness]
                finished = [x for x in finished if version - x[1] <= staleness]
                books.discarded += len(stale)
                books.discarded_tokens += sum(length for length, *_ in stale)
            continue
        now, length, first = heapq.heappop(running)
        books.busy += length
        finished.append((length, first, version))
        begin(now)
        if len(finished) >= BATCH and trainer_free <= now and not updates:
            batch, finished = finished[:BATCH], finished[BATCH:]
            books.trained += BATCH
            books.trained_tokens += sum(x[0] for x in batch)
            books.one_version += sum(x[1] == x[2] or staleness is not None for x in batch)
            books.ages += [version - x[1] for x in batch]
            trainer_free = now + TRAINING
            updates.append(trainer_free)
    books.end, books.in_flight, books.waiting = now, len(running), len(finished)
    books.busy += sum(length - (end - now) for end, length, _ in running)
    return books


def main() -> None:
    args, start = arguments(__doc__, seeds=10), time.time()
    results: dict[str, Any] = {}
    for name, slots in SLOTS.items():
        arms = {"sync": [sync(seed, slots) for seed in range(args.seeds)]}
        arms["partial"] = [ahead(seed, slots, None) for seed in range(args.seeds)]
        arms |= {f"versions, S = {s}": [ahead(seed, slots, s) for seed in range(args.seeds)] for s in STALENESS}
        base = [b.trained_tokens / b.end for b in arms["sync"]]
        results[name] = {}
        for arm, several in arms.items():
            for books in several:
                books.check()
            made = [b.trained_tokens + b.discarded_tokens for b in several]
            results[name][arm] = row = {
                "throughput": interval([b.trained_tokens / b.end / x for b, x in zip(several, base, strict=True)]),
                "discarded": interval([b.discarded_tokens / x for b, x in zip(several, made, strict=True)]),
                "one version": interval([b.one_version / b.trained for b in several]),
                "age": interval([np.mean(b.ages) for b in several]),
                "idle": interval([1 - b.busy / (b.end * slots) for b in several]),
                "tokens per answer": interval([b.trained_tokens / b.trained for b in several]),
            }
            print(name, arm, {k: f"{v['mean']:.3f} ± {v['ci95']:.3f}" for k, v in row.items()}, flush=True)
    save(args.out, "dora_schedules", results, lambda: plot(results), start)


def plot(results: dict[str, Any]) -> Figure:
    figure, axes = panels(2, 3.4)
    for axis, what, told in zip(
        axes, ("throughput", "discarded"), ("relative to sync", "share of tokens"), strict=True
    ):
        rows = results["256 slots"]
        across(axis, list(rows), [row[what] for row in rows.values()], told)
        named(axis, told, "", f"{what}, 256 slots")
    return figure


if __name__ == "__main__":
    main()
