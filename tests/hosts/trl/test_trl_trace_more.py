"""The trace of TRL's trainers in use: questions of docs/trace.md, masked diffusion models, no secrets, refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from harness import length, make, stub_sampling
from masked_runs import LENGTH, make_masked
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.trl.asynchronous import AsyncGRPOConfig
from rl_plugins.trl.generation import batches as module

pytestmark = pytest.mark.host
DOCS = Path(__file__).parents[3] / "docs" / "trace.md"


def zero_or_one(completion_ids: Any = None, **kwargs: Any) -> list[float]:
    """Equal rewards in about half of the groups."""
    return [float(sum(c[:1]) % 7 == 0) for c in completion_ids]


def fenced() -> list[str]:
    """The Python code of the section, block by block."""
    section = DOCS.read_text().split("## Questions in a few lines")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)


def questions(run: Path) -> list[Any]:
    """What the code in the docs prints for a run, an entry for each question."""
    found: list[Any] = []
    exec(fenced()[0].replace("my-run", str(run)), {"print": found.append})
    return found


def test_the_questions_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_PLUGINS_SECRET", "sk-very-secret-key")
    decisions: list[Any] = []
    decide = module.decide
    monkeypatch.setattr(module, "decide", lambda *args: decisions.append(decide(*args)) or decisions[-1])
    t = make(tmp_path, ["mc_grpo"], trace=True, reward=[zero_or_one, length])
    with stub_sampling():
        t.train()
    silent, moved, correlation = questions(tmp_path / "out")
    spread: dict[int, float] = {}
    changed = trained = 0
    rewards = []
    for d in decisions:
        r = d.rollouts
        raw = (r.rewards * r.reward_weights).sum(1)
        for g in r.groups.ids.tolist():
            own = raw[r.group == g]
            prompt = int(r.prompt_index[r.group == g][0])
            spread[prompt] = max(spread.get(prompt, 0.0), float(own.max() - own.min()))
        grpo = torch.zeros(len(r), dtype=torch.float64)
        for g in r.groups.ids.tolist():
            own = r.group == g
            grpo[own] = (raw[own] - raw[own].mean()) / (raw[own].std() + 1e-4)
        trained += int(d.trained.sum())
        changed += int(((d.row_advantages - grpo).abs() > 1e-6)[d.trained].sum())
        rewards.append(r.rewards)
    assert silent == sorted(p for p, s in spread.items() if s == 0)
    assert moved == pytest.approx(changed / trained, abs=0.01) and moved > 0.5
    expected = np.corrcoef(torch.cat(rewards).numpy().T)[0, 1]
    assert float(correlation.loc["zero_or_one", "length"]) == pytest.approx(expected)
    # the plain call of `datasets`
    code = fenced()[1].replace("my-run", str(tmp_path / "out"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names: dict[str, Any] = {}
    exec(code, names)
    texts = names["texts"]
    assert len(texts) == sum(len(d.rollouts) for d in decisions)
    assert sorted(texts["advantage"]) == sorted(a for d in decisions for a in d.row_advantages.tolist())
    # nothing of the environment is in any file
    for file in (tmp_path / "out" / "trace").rglob("*.parquet"):
        assert "sk-very-secret-key" not in repr(pq.read_table(file).to_pylist())


def test_a_masked_diffusion_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[Any] = []
    decide = module.decide
    monkeypatch.setattr(module, "decide", lambda *args: decisions.append(decide(*args)) or decisions[-1])
    t = make_masked(tmp_path, ["mdlm", "mc_grpo"], max_steps=1, trace=True)
    t.train()
    (file,) = sorted((tmp_path / "out" / "trace" / "rollouts").iterdir())
    rows, (d,) = pq.read_table(file).to_pylist(), decisions
    assert [r["trained"] for r in rows] == d.trained.tolist() and len(rows) == len(d.rollouts)
    assert [r["advantage"] for r in rows] == d.row_advantages.tolist()
    assert all(1 <= len(r["completion_ids"]) <= LENGTH for r in rows)
    assert sum(bool(r["notes"]) for r in rows) == sum(not t for t in d.trained.tolist()) > 0


def test_the_asynchronous_trainer_refuses_a_trace(tmp_path: Path) -> None:
    with raises(ConfigError, match="rl_plugins.trl.GRPOTrainer"):
        AsyncGRPOConfig(output_dir=str(tmp_path), trace=True)


@pytest.mark.long
def test_trackers_keep_every_number_and_every_table(tmp_path: Path) -> None:
    """Real W&B (offline) and real trackio (local), in a process of its own: trackio takes its folder at the import."""
    for name in ("wandb", "trackio"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "TRACKIO_DIR": tmp_path / "trackio"}
    script = Path(__file__).parent / "trackers_script.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {k: str(v) for k, v in variables.items()},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    rows = [
        row
        for file in sorted((tmp_path / "out" / "trace" / "rollouts").iterdir())
        for row in pq.read_table(file).to_pylist()[:3]
    ]
    assert len(rows) == 9 and any(row["notes"] for row in rows)
    for name, kept in found["trackers"].items():
        table = [row for part in kept["tables"] for row in part]
        for mine, row in zip(table, rows, strict=True):
            notes = "\n".join(f"{n['method']}: {n['text']}" for n in row["notes"])
            assert mine.pop("notes") == notes and mine == {c: row[c] for c in mine} and len(mine) == 10, name
        numbers = {m["train/global_step"]: m for m in kept["metrics"]}
        for told in found["host"]:
            expected = {f"train/{k}": v for k, v in told.items() if k != "step"}
            assert expected.items() <= numbers[told["step"]].items() and len(expected) > 30, name
    # the tables stretch no curve of trackio
    assert [m["step"] for m in found["trackers"]["trackio"]["metrics"]] == [1, 2, 3]
