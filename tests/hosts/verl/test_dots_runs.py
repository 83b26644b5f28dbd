"""DOTS + RR in verl's real synchronous trainer: references leave, the chosen prompts and stored groups are trained."""

from __future__ import annotations

import json

import pytest
import torch
from runs import PROMPTS, SAMPLES, Run, finished

pytestmark = [pytest.mark.host, pytest.mark.long]

REFERENCES, STEPS = 4, 3


@pytest.fixture(scope="module")
def dots_rr(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(
        tmp_path_factory.mktemp("verl") / "dots_rr",
        [
            "+rl_plugins.methods=[dots_rr,watch]",
            "+rl_plugins.method_params.dots.embeddings='verl_probes:embeddings'",
            f"+rl_plugins.method_params.dots.references={REFERENCES}",
            "+rl_plugins.method_params.rollout_replay.start_batch=1",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            f"trainer.total_training_steps={STEPS}",
        ],
        trainer="rl_plugins_sync",
    )


def marked(rollouts: object, name: str) -> torch.Tensor:
    return torch.tensor([isinstance(p, dict) and name in p for p in rollouts.payload])  # type: ignore[attr-defined]


def test_references_leave_and_half_of_the_batch_is_replayed(dots_rr: Run) -> None:
    seen: dict[tuple[int, ...], list[tuple[list[float], float]]] = {}
    for batch in range(STEPS):
        rollouts, tokens = torch.load(dots_rr.folder / f"watch{batch}.pt", weights_only=False)
        reference, old = marked(rollouts, "dots"), marked(rollouts, "rollout_replay")
        assert int(reference.sum()) == (REFERENCES * SAMPLES if batch % 2 == 0 else 0)
        assert int(old.sum()) == (PROMPTS * SAMPLES // 2 if batch else 0)
        assert torch.equal(rollouts.kept, ~reference) and int(rollouts.kept.sum()) == PROMPTS * SAMPLES
        for row in (~reference).nonzero()[:, 0].tolist():
            mine = tokens.row == row
            version = int(rollouts.version[row])
            assert set(tokens.version[mine].tolist()) == {version}
            key = (version, int(rollouts.prompt_index[row]), *rollouts.token_ids.completion[row].tolist())
            known = (tokens.rollout_logprobs[mine].tolist(), float(rollouts.reward[row]))
            if bool(old[row]):
                assert version < batch and known in seen[key]
            else:
                assert version == batch
                seen.setdefault(key, []).append(known)


def test_the_loss_weighs_stored_rollouts(dots_rr: Run) -> None:
    (file,) = dots_rr.folder.glob("rl-plugins/**/*.jsonl")
    logged = {line["step"]: line["data"] for line in map(json.loads, file.read_text().splitlines())}
    largest = [logged[step]["actor/decoupled_ppo/weight_max"] for step in range(1, STEPS + 1)]
    assert largest[0] == pytest.approx(1, abs=1e-3) and min(largest[1:]) > 1.01
    assert [logged[step]["rl_plugins/rows_trained"] for step in (1, 2, 3)] == [PROMPTS * SAMPLES] * 3
    assert logged[1]["dots/reference_rollouts"] == REFERENCES * SAMPLES and logged[2]["dots/reference_rollouts"] == 0
