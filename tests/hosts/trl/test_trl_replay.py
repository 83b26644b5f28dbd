"""DOTS + RR in TRL's trainer: references leave, stored groups return as they were, and a resumed run goes on alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import make, score, weights
from messages import raises

from rl_plugins.core.errors import MethodError
from rl_plugins.methods.rollout_replay import Buffer
from rl_plugins.trl.generation import batches as module

pytestmark = pytest.mark.host

PROMPTS, SIZE, REFERENCES, STEPS, SAVED = 8, 8, 6, 5, 3


def embeddings(dataset: Any) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(len(dataset), 6)).astype(np.float32)


class Scored:
    """The reward function, and how many completions it was asked about in each batch."""

    def __init__(self) -> None:
        self.asked = 0
        self.__name__ = "score"

    def __call__(self, completion_ids: Any = None, **kwargs: Any) -> list[float]:
        self.asked += len(completion_ids)
        return score(completion_ids)


class SometimesFlat(Scored):
    """About half of the prompts have equal rewards."""

    def __call__(self, completion_ids: Any = None, prompts: Any = (), **kwargs: Any) -> list[float]:
        graded = super().__call__(completion_ids)
        return [r * (sum(map(ord, str(p))) % 2) for r, p in zip(graded, prompts, strict=True)]


DOTS = {"dots": {"embeddings": embeddings, "references": REFERENCES}, "rollout_replay": {"start_batch": 1}}


def run(
    folder: Path, resume: bool = False, methods: Any = ("dots_rr",), params: Any = DOTS, reward: Any = None
) -> tuple[list[dict[str, Any]], Any]:
    """What was decided on in each batch, with the buffer before it, and the trainer."""
    seen, decide, reward = [], module.decide, reward or Scored()

    def watched(stack: Any, rollouts: Any, tokens: Any, *args: Any) -> Any:
        state = stack.methods[0].state
        before = Buffer.of_state(state["groups"]) if "groups" in state else Buffer.empty(1)
        asked, reward.asked = reward.asked, 0
        decision = decide(stack, rollouts, tokens, *args)
        kept = {"stored": before, "given": rollouts, "tokens": tokens, "decision": decision, "asked": asked}
        seen.append(kept)
        return decision

    module.decide = watched
    try:
        trainer = make(
            folder,
            list(methods),
            reward=reward,
            learning_rate=0.05,
            max_steps=STEPS,
            save_strategy="steps",
            save_steps=SAVED,
            method_params=params,
        )
        trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{SAVED}") if resume else None)
    finally:
        module.decide = decide
    return seen, trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Any, Path]:
    folder = tmp_path_factory.mktemp("dots_rr")
    return *run(folder), folder


def replayed(rollouts: Any) -> torch.Tensor:
    return torch.tensor([isinstance(p, dict) and "rollout_replay" in p for p in rollouts.payload])


def test_references_leave_and_half_of_the_batch_is_replayed(whole: Any) -> None:
    batches, trainer, _ = whole
    assert len(batches) == STEPS
    for number, batch in enumerate(batches):
        rollouts, decision = batch["given"], batch["decision"]
        old = replayed(rollouts)
        references = REFERENCES * SIZE if number % 2 == 0 else 0
        assert int(old.sum()) == (PROMPTS * SIZE // 2 if number else 0)
        assert len(rollouts) == PROMPTS * SIZE + references and int(decision.trained.sum()) == PROMPTS * SIZE
        assert batch["asked"] == len(rollouts) - int(old.sum()), "stored rewards are not asked for again"
    logged = {k: v for h in trainer.state.log_history for k, v in h.items()}
    assert logged["rollout_replay/replayed"] == 0.5 and logged["rollout_replay/staleness"] >= 1


def test_stored_groups_take_the_places_of_groups_without_signal(tmp_path: Path) -> None:
    params = {"rollout_replay": {"replaces": "no_signal", "start_batch": 1}}
    batches, trainer = run(tmp_path, methods=["rollout_replay"], params=params, reward=SometimesFlat())
    taken = 0
    for number, batch in enumerate(batches):
        rollouts, decision, old = batch["given"], batch["decision"], replayed(batch["given"])
        groups, kept = rollouts.groups, decision.rollouts.kept
        flat = groups.rows(groups.max(rollouts.reward) == groups.min(rollouts.reward))
        places = min(int(flat.sum()) // SIZE, len(batch["stored"])) if number else 0
        assert int(old.sum()) == places * SIZE and not bool((flat & old).any())
        assert batch["asked"] == PROMPTS * SIZE == int(decision.trained.sum()) == int(kept.sum())
        assert bool(flat[~kept].all()), "only groups of equal rewards left"
        was = {tuple(c["tokens"].tolist()) for g in range(len(batch["stored"])) for c in batch["stored"].completions(g)}
        assert {
            tuple(ids.tolist()) for ids, again in zip(rollouts.token_ids.completion, old, strict=True) if again
        } <= was
        taken += places
    assert taken >= 3
    assert any(h.get("rollout_replay/replayed", 0) > 0 for h in trainer.state.log_history)


def test_a_stored_group_returns_with_its_log_probs_versions_and_rewards(whole: Any) -> None:
    found = 0
    for number, batch in enumerate(whole[0]):
        rollouts, tokens, stored = batch["given"], batch["tokens"], batch["stored"]
        old = replayed(rollouts)
        assert torch.equal(rollouts.version[~old], torch.full((int((~old).sum()),), number))  # every step publishes
        assert rollouts.current_version == number and not tokens.forced[old[tokens.row]].any()
        for prompt in rollouts.prompt_index[old].unique().tolist():
            (place,) = (stored.prompt == prompt).nonzero()[:, 0].tolist()
            rows = (old & (rollouts.prompt_index == prompt)).nonzero()[:, 0].tolist()
            for row, was in zip(rows, stored.completions(place), strict=True):
                mine = tokens.row == row
                assert torch.equal(rollouts.token_ids.completion[row], was["tokens"].long())
                assert torch.equal(tokens.rollout_logprobs[mine], was["logprobs"])
                assert torch.equal(tokens.version[mine], was["versions"].long())
                assert int(rollouts.version[row]) == int(was["versions"].min()) < number
                assert float(rollouts.reward[row]) == float(was["rewards"][0])
                found += 1
    assert found == (STEPS - 1) * PROMPTS * SIZE // 2


def test_the_loss_weighs_them(whole: Any) -> None:
    """On fresh rows the weight is 1; on rows of older weights it is not."""
    logged = [h for h in whole[1].state.log_history if "decoupled_ppo/weight_max" in h]
    largest = [h["decoupled_ppo/weight_max"] for h in logged]
    assert largest[0] == pytest.approx(1, abs=1e-3) and all(w > 1.01 for w in largest[1:])


def test_a_resumed_run_replays_the_same_groups(whole: Any) -> None:
    batches, trainer, folder = whole
    again, resumed = run(folder, resume=True)
    assert len(again) == STEPS - SAVED
    for one, two in zip(batches[SAVED:], again, strict=True):
        assert torch.equal(one["given"].prompt_index, two["given"].prompt_index)
        assert torch.equal(one["given"].reward, two["given"].reward)
        assert torch.equal(one["tokens"].rollout_logprobs, two["tokens"].rollout_logprobs)
        assert torch.equal(one["given"].version, two["given"].version)
    torch.testing.assert_close(weights(trainer), weights(resumed), rtol=0, atol=1e-6)


def test_a_hint_that_changes_ends_the_run(tmp_path: Path) -> None:
    """Another method writes the batch's number into every prompt: stored rollouts would answer another one."""
    options = {"max_steps": 2, "method_params": {"rollout_replay": {"start_batch": 1}}}
    trainer = make(tmp_path, ["rollout_replay", "hinting"], **options)
    with raises(MethodError, match="stored"):
        trainer.train()
