"""Runs variants in worlds, a record each, and goes on where it stopped."""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.core.errors import RLPluginsError
from rl_plugins.lab.quality.drive import Driver, QualityVariant
from rl_plugins.lab.quality.train import STEPS, TRAINED, TRAINED_ROLLOUTS, trained
from rl_plugins.lab.quality.variants import BASELINE, TRAINING, variants_of
from rl_plugins.lab.quality.worlds import is_pool, world_of
from rl_plugins.tools.gradient_quality import Figure, quality

SIZES: Mapping[int, int] = {64: 48, 1024: 8, 8192: 3}  # rollouts of a batch -> batches
VERSION = 2  # of the worlds and of what is recorded: records of another one are measured again
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One record to make.

    Args:
        world, variant: by name. rollouts: of a batch. batches: of them.
    """

    world: str
    seed: int
    variant: str
    rollouts: int
    batches: int

    @property
    def key(self) -> tuple[Any, ...]:
        return (VERSION, *asdict(self).values())


@lru_cache(maxsize=2)
def _world(name: str, seed: int, rollouts: int) -> Any:
    return world_of(name, seed, rollouts)


def jobs(worlds: Sequence[str], methods: Sequence[str], seeds: Iterable[int], sizes: Mapping[int, int]) -> list[Job]:
    """What is measured: all variants of these methods, and the baseline where they act; all without `methods`."""
    labels: dict[tuple[str, int], list[str]] = {}
    for name in (w for w in worlds if w not in TRAINED):
        world = _world(name, 0, 0)
        for rollouts in sizes:
            if is_pool(name) and rollouts // 8 > len(world.pass_rate) // 2:
                continue  # a pool of few prompts: a batch would be most of them
            found = variants_of(name, world, rollouts)
            labels[name, rollouts] = _labels(found, methods)
    trainings = [
        Job(name, 0, label, TRAINED_ROLLOUTS, STEPS)
        for name in TRAINED
        if name in worlds
        for label in _labels(TRAINING[name], methods)
    ]
    return trainings + [  # by seed: after each of them there is something to look at
        Job(name, seed, label, rollouts, batches)
        for seed in seeds
        for name in worlds
        for rollouts, batches in sizes.items()
        for label in labels.get((name, rollouts), ())
    ]


def _labels(variants: Sequence[QualityVariant], methods: Sequence[str]) -> list[str]:
    kept = [v for v in variants if not methods or v.label == BASELINE or set(methods) & set(v.methods)]
    return [v.label for v in kept] if not methods or len(kept) > 1 else []


def measure(job: Job) -> Record:
    """The record of a job: figures with their errors over batches, or why the variant was refused."""
    log = logging.getLogger("rl_plugins")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return _measure(job)
    finally:
        log.setLevel(level)


def _measure(job: Job) -> Record:
    import torch

    torch.set_num_threads(1)
    of_steps, start = job.world in TRAINED, time.process_time()
    world = TRAINED[job.world]() if of_steps else _world(job.world, job.seed, job.rollouts)
    among = TRAINING[job.world] if of_steps else variants_of(job.world, world, job.rollouts)
    (variant,) = (v for v in among if v.label == job.variant)
    record: Record = {"version": VERSION, **asdict(job), "methods": list(variant.methods)}
    if of_steps:
        made = trained(world, variant, job.rollouts)
        return {**record, **made, "seconds": round(time.process_time() - start, 2)}
    try:
        driver = Driver(world, variant, job.rollouts, job.seed)
        driver.warm()
        batches = [driver.batch() for _ in range(job.batches)]
    except RLPluginsError as e:
        return {**record, "refused": str(e).splitlines()[0]}
    generated = np.array([m.generated for m in batches], dtype=np.float64)
    found = quality(np.stack([m.gradient for m in batches]), generated, driver.world.targets, job.rollouts)

    def pair(figure: Figure) -> list[float]:
        return [float(f"{figure.value:.6g}"), float(f"{figure.error:.3g}")]

    return {
        **record,
        "generated": round(float(generated.mean()), 2),
        "tokens": round(float(np.mean([m.tokens for m in batches])), 1),
        "signal": round(float(np.mean([m.signal for m in batches])), 2),
        "noise": pair(found.noise),
        "progress": {t: pair(f) for t, f in found.progress.items()},
        "direction": {t: pair(f) for t, f in found.direction.items()},
        "seconds": round(time.process_time() - start, 2),
    }


def read(file: Path) -> dict[tuple[Any, ...], Record]:
    """Records of this version, by the key of their job; none where there is no file. It may be compressed (.gz)."""
    stored = file.read_bytes() if file.exists() else b""
    text = (gzip.decompress(stored) if file.suffix == ".gz" and stored else stored).decode()
    whole = text[: text.rfind("\n") + 1]  # the last line may be cut off
    found = [json.loads(line) for line in whole.splitlines()]
    names = Job.__dataclass_fields__
    return {(r["version"], *(r[n] for n in names)): r for r in found if r["version"] == VERSION}


def run(wanted: Sequence[Job], file: Path, at_a_time: int) -> Iterator[Record]:
    """Measures what the file lacks, appends each record at once, and yields it."""
    done = read(file)
    todo = [job for job in wanted if job.key not in done]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as out:
        out.seek(0)
        out.truncate(out.read().rfind(b"\n") + 1)
        for record in _records(todo, at_a_time):
            out.write(json.dumps(record).encode() + b"\n")
            out.flush()
            yield record


def _records(todo: Sequence[Job], at_a_time: int) -> Iterator[Record]:
    if at_a_time == 1:
        yield from map(measure, todo)
        return
    # Neighbours share a world, so that a process makes few of them.
    with ProcessPoolExecutor(at_a_time, mp_context=get_context("spawn")) as pool:
        yield from pool.map(measure, todo, chunksize=8)
