"""A fixed budget of samples over heads, resumable, and what came of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim_for, whole, write_text
from rl_plugins.runtime.bars import tracked
from rl_plugins.tools.heads import prefix_diversity, shares

SOLVED = "solved"  # column of the dataset that is written
ALONE = "model"  # what samples of the model without a head are called


@dataclass(frozen=True)
class SampleBudget:
    """What is sampled: the options of `heads sample`."""

    k: int
    split: str = "test"
    limit: int | None = None
    reward: str = ""
    threshold: float = 0.5
    batch: int = 64
    seed: int = 0


def sample_heads(config: Path, heads: Sequence[Path], budget: SampleBudget, out: Path) -> dict[str, Any]:
    """Samples what is not there yet; writes and returns the summary.

    Raises:
        ConfigError: a config, adapter or reward function that cannot be used, or `out` holds samples of something else.
    """
    from rl_plugins.trl.commands.head_samples import Sampler, SamplingRun

    names = _names(heads)
    sampling = SamplingRun.of(config, budget.split)
    functions = sampling.scored_by(budget.reward)
    dataset, count = sampling.run.dataset, sampling.run.dataset_size or 0
    count = count if budget.limit is None else min(count, budget.limit)
    facts = {
        **asdict(budget),
        "limit": count,
        "heads": {name: str(folder) for name, folder in names.items()},
        "model": sampling.model,
        "generation": dict(sampling.generation),
        "dataset": sampling.run.fingerprint,
    }
    file = _opened(out, facts)
    done = {(line["head"], line["chunk"]) for line in _lines(file)}
    chunks = list(_chunks([*names] or [ALONE], count, budget))
    left = [chunk for chunk in chunks if chunk[:2] not in done]
    if left:
        sampler = Sampler(sampling, names)
        with file.open("a", encoding="utf-8") as f:
            for head, number, problems in tracked(left, "sampling", Console(stderr=True), transient=True):
                rows = [dataset[i] for i in problems]
                tokens = sampler.sample(head, [row["prompt"] for row in rows], _seed(budget.seed, head, number))
                texts = sampler.texts(tokens)
                rewards = np.zeros(len(rows))
                for function in functions:
                    given = [math.nan if r is None else r for r in function.call(rows, texts)]
                    rewards += function.weight * np.nan_to_num(given)
                line = {"head": head, "chunk": number, "problems": problems, "tokens": tokens, "texts": texts}
                f.write(json.dumps({**line, "rewards": rewards.tolist()}) + "\n")
                f.flush()
                os.fsync(f.fileno())
    summary = summarized(_lines(file), budget)
    _write_solved(dataset, count, _lines(file), budget, out)
    write_text(out / "summary.json", json.dumps(summary, indent=1))
    return summary


def summarized(lines: Iterator[dict[str, Any]], budget: SampleBudget) -> dict[str, Any]:
    """What samples come to: overall, and per head."""
    solved, tokens, per_head = defaultdict(list), defaultdict(list), defaultdict(list)
    for line in lines:
        for problem, sample, reward in zip(line["problems"], line["tokens"], line["rewards"], strict=True):
            won = reward >= budget.threshold
            solved[problem].append(won)
            tokens[problem].append(sample)
            per_head[line["head"]].append((won, len(sample)))
    spread = [d for d in (prefix_diversity(samples) for samples in tokens.values()) if not math.isnan(d)]
    return {
        "k": budget.k,
        "problems": len(solved),
        "pass": float(np.mean([any(s) for s in solved.values()])),
        "success": float(np.mean([w for s in solved.values() for w in s])),
        "tokens_per_problem": float(np.mean([sum(map(len, samples)) for samples in tokens.values()])),
        "tokens": sum(len(s) for samples in tokens.values() for s in samples),
        "pdc": float(np.mean(spread)) if spread else None,
        "heads": {
            head: {
                "samples": len(found),
                "success": float(np.mean([w for w, _ in found])),
                "tokens": float(np.mean([n for _, n in found])),
            }
            for head, found in per_head.items()
        },
    }


def _write_solved(dataset: Any, count: int, lines: Iterator[dict[str, Any]], budget: SampleBudget, out: Path) -> None:
    """The problems with one more column, how many of their samples are solved: a dataset for `difficulty_slices`."""
    solved = [0] * count
    for line in lines:
        for problem, reward in zip(line["problems"], line["rewards"], strict=True):
            solved[problem] += reward >= budget.threshold
    kept = [name for name in dataset.column_names if name != SOLVED]
    table = dataset.select(range(count)).select_columns(kept).add_column(SOLVED, solved)
    with whole(out / "dataset" / f"{budget.split}.parquet") as part:
        table.to_parquet(str(part))


def _chunks(heads: Sequence[str], count: int, budget: SampleBudget) -> Iterator[tuple[str, int, list[int]]]:
    """(head, number of its batch, problem of each sequence); the same in every call."""
    every = [shares(budget.k, len(heads), problem) for problem in range(count)]
    for place, head in enumerate(heads):
        problems = [problem for problem in range(count) for _ in range(every[problem][place])]
        for number, begin in enumerate(range(0, len(problems), budget.batch)):
            yield head, number, problems[begin : begin + budget.batch]


def _seed(seed: int, head: str, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{head}/{number}".encode()).digest()[:8], "big") >> 1


def _names(heads: Sequence[Path]) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for folder in heads:
        name = Path(os.path.abspath(folder)).name
        if name in names or name == ALONE:
            raise ConfigError(
                f"two heads have the name {name}, or it is `{ALONE}`: {folder}. The name is part of the seed. Rename "
                f"the folder."
            )
        names[name] = folder
    return names


def _opened(out: Path, facts: dict[str, Any]) -> Path:
    """The file of the samples. What a run that was cut off left of a line is taken away.

    Raises:
        ConfigError: the folder holds samples of something else.
    """
    claim_for(out, "heads", facts, "samples")
    file = out / "samples.jsonl"
    file.touch()
    content = file.read_bytes()
    with file.open("r+b") as f:
        f.truncate(content.rfind(b"\n") + 1)
    return file


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as f:
        yield from map(json.loads, f)
