"""What methods cost on a device: whole steps against stock TRL, memory, and how often the host waits for the device."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import KINDS, Clock, large_policy, trainer_on
from harness import length, score, stub_sampling
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

ARMS: dict[str, dict[str, Any]] = {
    "stock": {"stock": True},
    "methods: []": {},
    "gdpo": {"methods": ["gdpo"]},
    "echo_shaping (tokens)": {"methods": ["echo_shaping"]},
    "aepo_clip (loss)": {"methods": ["aepo_clip"]},
    "plain (program)": {"methods": ["plain"]},
}
READS = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
MICRO_BATCHES = 4
BATCHES = {"cpu": 1, "cuda": 3}  # that are measured
UPDATES = 2  # optimizer steps of a batch: a clipped loss has nothing to do in the first


def run(arm: dict[str, Any], device: str, folder: Path, batches: int, **options: Any) -> tuple[Any, Clock]:
    clock = Clock(options.get("num_iterations", UPDATES))
    if device == "cuda" and not (folder / "policy").exists():
        large_policy(folder)
    given = {"gradient_accumulation_steps": MICRO_BATCHES, "num_iterations": UPDATES, "reward": [score, length]}
    given |= {"bf16": True, "max_steps": batches * clock.steps, "callbacks": [clock], **options, **arm}
    return trainer_on(device, folder, **given), clock


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speed")


def test_whole_steps(device: str, folder: Path, note: Any) -> None:
    """Real sampling of completions of one length, arms in turns."""
    tokens, rounds = (128, 2) if device == "cuda" else (14, 1)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name, arm in ARMS.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            fixed = {"generation_kwargs": {"min_new_tokens": tokens}, "max_completion_length": tokens}
            trainer, clock = run(arm, device, folder, BATCHES[device] + 1, **fixed)
            trainer.train()
            seconds[name] += clock.seconds
            if device == "cuda":
                peak = torch.cuda.max_memory_allocated() / 2**30
                note("whole steps", name, **{"peak GiB": peak})
    stock = statistics.median(seconds["stock"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        share = 1 - stock / middle
        note("whole steps", name, **{"s/batch, least": min(values), "median": middle, "share added": share})
    assert all(len(values) == BATCHES[device] * rounds for values in seconds.values())


def test_how_often_the_host_waits(device: str, folder: Path, note: Any) -> None:
    """On the same completions for all, so that what stock TRL reads is the same. On the CPU only reads of single
    numbers can be counted, those of numbers on the CPU among them."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    counts: dict[str, dict[str, float]] = {}
    for name, arm in ARMS.items():
        with stub_sampling():
            trainer, _ = run(arm, device, folder, BATCHES[device])
            with profile(activities=activities) as seen:
                trainer.train()
        found = {e.key: e.count for e in seen.key_averages()}
        counts[name] = {
            read: found.get(read, 0) / (BATCHES[device] * UPDATES)
            for read in READS
            if device == "cuda" or read.startswith("aten")
        }
    for name, values in counts.items():
        added = {f"{read}, added": n - counts["stock"][read] for read, n in values.items()}
        note("waits per step", name, **values, **added)
    read = READS[0]  # the others are of the allocator, too
    assert counts["methods: []"][read] == counts["stock"][read], "a run without methods waits as often as stock TRL"


def test_the_context_cache_against_reading_again(device: str, folder: Path, note: Any) -> None:
    methods, options, _ = KINDS["turns"]
    for name, gigabytes in (("with the cache", 1.0), ("without", 0.0)):
        more = {**options, "rollout_cache_gb": gigabytes, "gradient_accumulation_steps": 1, "num_iterations": 1}
        trainer, clock = run({"methods": methods}, device, folder, BATCHES[device] + 1, **more)
        trainer.train()
        note("context cache, agents", name, **{"s/batch, least": min(clock.seconds)})
