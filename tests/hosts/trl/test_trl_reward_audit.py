"""`reward_audit` in TRL's trainer: a reward that is turned around for one kind of prompt, and the three actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import history, make, stub_sampling, weights
from messages import raises

from rl_plugins.core.errors import RunStopped, StateError
from rl_plugins.trl.generation import batches as module

pytestmark = pytest.mark.host
STEPS = 6
ONLINE = dict(preflight=False, verifier="audit_functions:right", verify_share=1.0, n_min=4, every_n_batches=1)


def turned_around(completions: Any = None, answer: Any = None, task: Any = None, **kwargs: Any) -> list[float]:
    """1 for the right answer, but 0 for it in rows of the task `unique`. Wrong answers of them have 1."""
    rewards = []
    for completion, right, kind in zip(completions, answer, task, strict=True):
        good = completion[0]["content"].lstrip("=") == right
        rewards.append(float(good != (kind == "unique")) + 0.01 * (len(completion[0]["content"]) % 5))
    return rewards


def run(tmp_path: Path, name: str, monkeypatch: Any, resume: bool = False, steps: int = STEPS, **params: Any) -> Any:
    """The trainer, and the decisions of its batches."""
    decisions: list[Any] = []
    decide = module.decide

    def watched(*args: Any, **kwargs: Any) -> Any:
        decisions.append(decide(*args, **kwargs))
        return decisions[-1]

    monkeypatch.setattr(module, "decide", watched)
    (tmp_path / name).mkdir(exist_ok=True)
    options = dict(max_steps=steps, reward=turned_around, save_strategy="no", method_params={"reward_audit": params})
    t = make(tmp_path / name, ["reward_audit"], **options)
    with stub_sampling():
        t.train(resume_from_checkpoint=resume or None)
    return t, decisions


def rows_of(t: Any, d: Any) -> list[bool]:
    """Whether each rollout is of the task that is turned around."""
    tasks = t.train_dataset["task"]
    return [tasks[n] == "unique" for n in d.rollouts.prompt_index.tolist()]


def check_quarantine(t: Any, d: Any) -> None:
    """Marked rows have no reward and no advantage; the others have what the reward function gave, bit for bit."""
    marked = torch.tensor(rows_of(t, d))
    assert 0 < int(marked.sum()) < len(marked)
    assert torch.isnan(d.rollouts.reward[marked]).all() and not d.row_advantages[marked].any()
    assert torch.equal(d.rollouts.reward[~marked], d.rollouts.rewards[~marked, 0].double())
    assert (d.row_advantages[~marked] != 0).any()


def test_before_training_it_stops_and_names_the_rows(tmp_path, monkeypatch):
    with raises(RunStopped, match=r"`reward_audit`.*1.*'unique'"):
        run(tmp_path, "stop", monkeypatch)


def test_quarantine_before_training_takes_out_these_rows(tmp_path, monkeypatch):
    t, decisions = run(tmp_path, "quarantine", monkeypatch, steps=2, on_preflight="quarantine", online=False)
    for d, share in zip(decisions, history(t, "reward_audit/quarantined"), strict=True):
        check_quarantine(t, d)
        assert share == pytest.approx(sum(rows_of(t, d)) / len(d.rollouts))


def test_during_training_the_verifier_convicts_the_column_and_its_rows_leave(tmp_path, monkeypatch):
    """The stop comes after the batch that convicts, with a checkpoint from which the run goes on."""
    warned, before = run(tmp_path, "warn", monkeypatch, on_training="warn", **ONLINE)
    assert not any(history(warned, "reward_audit/quarantined")) and all(d.trained.all() for d in before)
    critical = history(warned, "reward_audit/critical")
    found = next(n for n, count in enumerate(critical) if count)
    assert 0 < found < STEPS - 2
    findings = warned.methods.methods[0].state["findings"]
    (finding,) = [f for f in findings if f["details"].get("feature") == "task = 'unique'"]
    assert finding["severity"] == "critical" and finding["details"]["mean"] == 1.0

    t, decisions = run(tmp_path, "quarantine", monkeypatch, on_training="quarantine", **ONLINE)
    for d in decisions[: found + 1]:
        assert not torch.isnan(d.rollouts.reward).any()
    for d in decisions[found + 1 :]:
        check_quarantine(t, d)

    with raises(RunStopped, match=rf"reward_audit.*{found + 1}"):
        run(tmp_path, "stop", monkeypatch, on_training="stop", **ONLINE)
    assert [p.name for p in (tmp_path / "stop" / "out").glob("checkpoint-*")] == [f"checkpoint-{found + 1}"]
    again, after = run(tmp_path, "stop", monkeypatch, resume=True, on_training="stop", **ONLINE)
    assert again.state.global_step == STEPS and len(after) == STEPS - found - 1
    assert torch.equal(weights(again), weights(warned)), "nothing of the run was lost"
    with raises(StateError):
        run(tmp_path, "stop", monkeypatch, resume=True, on_training="warn", **ONLINE)
