"""Staleness that can be set, in the real trainer: methods that correct for it see exactly that staleness."""

from __future__ import annotations

import pytest
from harness import history, make

from rl_plugins.testing.delayed import Delayed, installed

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def delayed(tmp_path_factory):
    seen, told = [], Delayed.observe

    def observe(self, rollouts, tokens, stats):
        seen.append((rollouts, tokens))
        told(self, rollouts, tokens, stats)

    params = {"delayed": {"lag": 3}}
    with installed(Delayed), pytest.MonkeyPatch.context() as m:
        m.setattr(Delayed, "observe", observe)
        trainer = make(tmp_path_factory.mktemp("delayed"), ["delayed", "minpro"], method_params=params, max_steps=7,
                       learning_rate=0.05)  # fmt: skip
        trainer.train()
    return trainer, seen


def test_every_trained_row_is_as_old_as_asked_for(delayed):
    trainer, seen = delayed
    kept = [r.subset(~r.has_mark("delayed")) for r, _ in seen]
    assert [len(r) for r in kept] == [0, 0, 0, 64, 64, 64, 64]
    for batch, r in enumerate(kept[3:], 3):
        assert r.current_version == batch and r.staleness.unique().tolist() == [3]
        made = seen[batch - 3][0]
        made = made.subset(made.has_mark("delayed"))
        assert r.prompt_index.tolist() == made.prompt_index.tolist() and r.reward.tolist() == made.reward.tolist()
        assert r.length.tolist() == made.length.tolist()
    assert history(trainer, "delayed/waiting") == [1, 2, 3, 3, 3, 3, 3]


def test_a_correction_sees_what_the_older_policy_gave(delayed):
    """minpro's weights leave 1 where the policy has moved; nothing is trained before the first rollouts are due."""
    trainer, _ = delayed
    weight = history(trainer, "minpro/weight_mean")
    assert len(weight) == 4 and all(abs(w - 1) > 1e-3 for w in weight[1:])
    assert weight[0] == pytest.approx(1, abs=1e-5)  # the weights rested, so the oldest rollouts are those of now
