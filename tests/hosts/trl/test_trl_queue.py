"""Over-provisioned generation in real TRL: nothing is lost, resumed tokens are bit-identical, log-probs are true."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from harness import history, make, score, weights
from messages import raises
from program_probes import SEEN

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime import carry_over as module

pytestmark = pytest.mark.host


def run(folder: Any, steps: int = 4, resume: bool = False, **changes: Any) -> Any:
    SEEN.clear()
    """32 groups of 2, whose lengths have a long tail: the untrained policy ends with every token by chance."""
    options = {"num_generations": 2, "max_completion_length": 120} | changes
    trainer = make(folder, ["over_begin"], max_steps=steps, learning_rate=0.05, **options)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def test_every_group_that_was_drawn_is_trained_or_waits(tmp_path, monkeypatch):
    begun, trained = [], []
    admit, decide_advantages = module.admit, module.requeue

    def watched_admit(*args: Any) -> Any:
        groups = admit(*args)
        begun.append(groups)
        return groups

    def watched_settle(stack: Any, groups: Any, order: Any, enough: int) -> Any:
        out = decide_advantages(stack, groups, order, enough)
        trained.append((out[0], groups, order))
        return out

    monkeypatch.setattr("rl_plugins.trl.generation.queue.admit", watched_admit)
    monkeypatch.setattr("rl_plugins.trl.generation.queue.requeue", watched_settle)
    trainer = run(tmp_path)
    fresh = [g.row.prompt_index for groups in begun for g in groups if not g.rollouts]
    done = [g.row.prompt_index for groups, _, _ in trained for g in groups]
    waiting = [g["row"]["prompt_index"] for g in trainer.methods.carried]
    assert Counter(fresh) == Counter(done) + Counter(waiting)
    assert len(done) == 32 * 4 and len(waiting) == 32 and len(begun[0]) == 64
    assert [len(q.carried) for q in SEEN["queues"]] == [0, 32, 32, 32]
    resumed = 0
    for k in range(1, 4):  # a group that goes on keeps its tokens bit for bit
        before = {g.row.prompt_index: g for g in trained[k - 1][1]}
        for g in trained[k][1]:
            if g.row.prompt_index not in before or g.drawn == k:
                continue
            for old, new in zip(before[g.row.prompt_index].rollouts, g.rollouts, strict=True):
                assert new.tokens[: len(old)] == old.tokens and new.logprobs[: len(old)] == old.logprobs
                assert len(new) <= 120
                if module.finished(old):
                    assert new == old
                elif len(new) > len(old):
                    resumed += 1
                    assert new.versions == old.versions + (k,) * (len(new) - len(old))
    assert resumed > 16
    for groups, _, order in trained:
        assert all(g.complete for g in groups) and len(order) >= 32
    for rollouts, _ in SEEN["batches"]:
        assert len(rollouts) == 64 and len(rollouts.groups.ids) == 32
    mixed = 0
    for rollouts, tokens in SEEN["batches"]:
        oldest = torch.full((64,), 99).scatter_reduce(0, tokens.row, tokens.version, "amin")
        newest = torch.full((64,), -1).scatter_reduce(0, tokens.row, tokens.version, "amax")
        assert torch.equal(oldest, rollouts.version)
        mixed += int((oldest < newest).sum())
    assert mixed > 16, "rows of two policies"
    assert history(trainer, "rl_plugins/groups_waiting") == [32.0] * 4


def test_behavior_logprobs_are_those_of_the_policy_that_sampled(tmp_path):
    run(tmp_path)
    for k, (_, tokens) in enumerate(SEEN["batches"]):
        now = tokens.version == k
        assert torch.allclose(tokens.rollout_logprobs[now], tokens.old_logprobs[now], atol=1e-4)
        stale = ~now
        if bool(stale.any()):
            assert (tokens.rollout_logprobs[stale] - tokens.old_logprobs[stale]).abs().max() > 1e-3
    assert any(bool((t.version != k).any()) for k, (_, t) in enumerate(SEEN["batches"]))


def test_without_over_provisioning_nothing_waits_and_nobody_is_stale(tmp_path):
    trainer = run(tmp_path, method_params={"over_begin": {"factor": 1.0}})
    assert trainer.methods.carried == []
    assert all(bool((t.version == k).all()) for k, (_, t) in enumerate(SEEN["batches"]))
    assert all(len(r) == 64 for r, _ in SEEN["batches"])


def test_the_queue_survives_a_checkpoint(tmp_path):
    """Four steps in one go, and two with a resume from the checkpoint: the same decisions and weights."""
    options = dict(save_strategy="steps", save_steps=2, optim="adamw_torch", reward=score)
    whole = run(tmp_path / "a", 4, **options)
    decisions = [(r.prompt_index, r.reward, t.version) for r, t in SEEN["batches"]]
    run(tmp_path / "b", 2, **options)
    resumed = run(tmp_path / "b", 4, resume=True, **options)
    assert len(SEEN["batches"]) == 2
    for (prompts, rewards, versions), (rollouts, tokens) in zip(decisions[2:], SEEN["batches"], strict=True):
        assert torch.equal(prompts, rollouts.prompt_index) and torch.equal(rewards, rollouts.reward)
        assert torch.equal(versions, tokens.version)
    assert torch.equal(weights(whole), weights(resumed))


def test_groups_of_one_and_rows_that_are_all_cut_off(tmp_path):
    trainer = run(tmp_path, 2, max_completion_length=2, per_device_train_batch_size=16)
    assert all(bool(r.truncated.any()) for r, _ in SEEN["batches"]) and trainer.state.global_step == 2


def test_what_cannot_be_interrupted_is_refused(tmp_path):
    with raises(ConfigError, match="`admit`.*vLLM"):
        make(tmp_path, ["over_begin"], use_vllm=True)
    with raises(ConfigError, match="`admit`.*program"):
        make(tmp_path, ["over_begin", "plain"])
