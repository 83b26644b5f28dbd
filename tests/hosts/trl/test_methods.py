"""Every advantage method takes two real steps in TRL's trainer, and what it changes is seen in the batch it trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import make, score, stub_sampling

from rl_plugins.groups import Groups
from rl_plugins.trl import generation as module

pytestmark = pytest.mark.host


def right(completion_ids: Any = None, **kwargs: Any) -> list[float]:
    """Right or wrong, from the token ids alone."""
    return [float(sum(c) % 3 == 0) for c in completion_ids]


def judge(prompt: Any, a: str, b: str) -> tuple[float, float]:
    """The longer answer has the higher score."""
    return float(len(a)), float(len(b))


CASES: dict[str, dict[str, Any]] = {
    "drpo": {"reward": right},
    "d3s": {},
    "mssr": {"reward": right, "num_generations": 2, "beta": 0.04},
    "v0_5": {"reward": right},
    "v0": {"reward": right},
    "brpo": {"method_params": {"brpo": {"judge": judge}}},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Method -> the decisions of two generation batches."""
    found: dict[str, list[Any]] = {}
    decide = module.decide
    for name, options in CASES.items():
        seen = found.setdefault(name, [])

        def watched(*args: Any, seen: list[Any] = seen, **kwargs: Any) -> Any:
            seen.append(decide(*args, **kwargs))
            return seen[-1]

        module.decide = watched
        try:
            options = {"reward": score, **options}
            trainer = make(tmp_path_factory.mktemp(name), [name], learning_rate=0.05, **options)
            before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
            with stub_sampling():
                trainer.train()
            after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
            seen.append((before, after, trainer))
        finally:
            module.decide = decide
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_real_steps(steps: dict[str, list[Any]], name: str) -> None:
    *decisions, (before, after, trainer) = steps[name]
    assert len(decisions) == 2 and not torch.equal(before, after)
    logged = {k for h in trainer.state.log_history for k in h if k.split("/")[0].startswith(name[:4])}
    assert logged, "the method logs what it does"
    for d in decisions:
        assert 0 < int(d.trained.sum()) <= 64 and bool(torch.isfinite(d.row_advantages).all())


def test_what_they_change(steps: dict[str, list[Any]]) -> None:
    drpo = steps["drpo"][0]
    assert drpo.estimator == "drpo"
    d3s = steps["d3s"][0]
    assert int(d3s.trained.sum()) < 64, "at the start a part of the rows and tokens is trained"
    assert 0 < float(d3s.keep_tokens.float().mean()) < 0.5
    mssr = steps["mssr"][0]
    assert mssr.rollouts.groups.size.tolist() == [1] * 64, "one rollout per prompt, the batch is full"
    assert len(set(mssr.rollouts.prompt_index.tolist())) == 64
    v05 = steps["v0_5"][0]
    sizes = v05.rollouts.groups.size
    assert int(sizes.min()) >= 1 and v05.estimator == "v0_5"
    v0 = steps["v0"][1]
    assert int(v0.rollouts.groups.size.sum()) == 64
    brpo = steps["brpo"][0]
    assert brpo.estimator == "brpo" and set(brpo.rewarded_by) == {"brpo"}
    groups = Groups(brpo.rollouts.group)
    assert int(groups.count) == 8
