"""dora_length in TRL's trainer: completions end at the limit of their stage, which rises, in a resumed run too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import history, make, weights

pytestmark = pytest.mark.host
LIMITS = [3, 7, 14, 14]  # tokens; an answer of the untrained policy reaches any of them


class Lengths:
    """A reward function that notes the longest completion of every batch."""

    __name__ = "lengths"

    def __init__(self) -> None:
        self.longest: list[int] = []

    def __call__(self, completion_ids: Any = None, **kwargs: Any) -> list[float]:
        self.longest.append(max(map(len, completion_ids)))
        return [float(ids[0]) for ids in completion_ids]


def run(folder: Path, steps: int, resume: bool = False) -> tuple[Any, list[int]]:
    folder.mkdir(exist_ok=True)
    seen = Lengths()
    options = dict(max_steps=steps, save_strategy="steps", save_steps=2, learning_rate=1e-3)
    params = {"dora_length": {"shares": [0.25, 0.5, 1.0], "percentile": 50.0, "window": 32}}
    t = make(folder, ["dora_length"], reward=seen, method_params=params, **options)
    t.train(resume_from_checkpoint=resume)
    return t, seen.longest


def test_the_limit_rises_with_the_lengths(tmp_path: Path) -> None:
    whole, longest = run(tmp_path / "whole", 4)
    assert longest == LIMITS and whole.max_completion_length == 14
    assert history(whole, "dora_length/limit") == [7, 14, 14, 14], "of the next batch"
    assert history(whole, "dora_length/percentile") == [1.0, 1.0], "none at the last stage"
    run(tmp_path / "parts", 2)
    resumed, rest = run(tmp_path / "parts", 4, resume=True)
    assert rest == LIMITS[2:] and resumed.methods.methods[0].state["stage"] == 2
    assert torch.equal(weights(whole), weights(resumed))


def reusing(folder: Path, steps: int, resume: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    params = {"dora_reuse": {"spare_share": 0.5, "reuse_ratio": 0.25}}
    options = dict(max_steps=steps, save_strategy="steps", save_steps=3, learning_rate=1e-3)
    t = make(folder, ["dora_reuse", "dora_loss"], method_params=params, num_iterations=2, **options)
    t.train(resume_from_checkpoint=resume)
    return t


def test_surplus_groups_are_trained_later(tmp_path: Path) -> None:
    """Every batch holds 8 groups; 4 more are made. What is stored comes back, in a resumed run too."""
    whole = reusing(tmp_path / "whole", 8)
    logged = {
        name: history(whole, f"dora_reuse/{name}")
        for name in ("made", "reused", "trained", "no_signal", "stored", "dropped", "expired", "buffer")
    }
    assert logged["made"] == [12.0] * 4 and max(logged["reused"]) > 0 and max(logged["stored"]) > 0
    before = 0.0
    for k in range(4):
        gone = sum(logged[name][k] for name in ("no_signal", "trained", "dropped", "expired", "buffer"))
        assert logged["made"][k] + before == gone
        assert logged["trained"][k] == min(8, 12 - logged["no_signal"][k] + logged["reused"][k])
        before = logged["buffer"][k]
    reusing(tmp_path / "parts", 4)
    resumed = reusing(tmp_path / "parts", 8, resume=True)
    assert torch.equal(weights(whole), weights(resumed))
