"""AReaL's admission and stored groups in verl's real asynchronous trainer, with the loss that corrects for both."""

from __future__ import annotations

import pytest
import torch
from runs import PROMPTS, SAMPLES, Run, finished

from rl_plugins.methods.areal import capacity

pytestmark = pytest.mark.host

ETA, STEPS = 2, 6


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(
        tmp_path_factory.mktemp("verl") / "ahead",
        [
            "+rl_plugins.methods=[areal,rollout_replay,watch]",
            f"+rl_plugins.method_params.areal_admission.max_staleness={ETA}",
            "+rl_plugins.method_params.rollout_replay.start_batch=1",
            "trainer.v1.separate_async.parameter_sync_step=1",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_file",
            "+ray_kwargs.ray_init.num_gpus=2",
            "ray_kwargs.ray_init.num_cpus=16",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            f"trainer.total_training_steps={STEPS}",
        ],
        trainer="watched_separate_async",
    )


def replayed(payload: object) -> torch.Tensor:
    return torch.tensor([isinstance(p, dict) and "rollout_replay" in p for p in payload])  # type: ignore[attr-defined]


def test_as_many_groups_are_begun_as_the_rule_allows(ahead: Run) -> None:
    """When a batch is trained at version v, (eta + v + 1) B groups have been begun, and the rule allows none more."""
    begun = version = 0
    for event in ahead.events:
        if event["kind"] == "plan":
            begun += len(event["groups"])
        if event["kind"] == "decided":
            accepted = version * PROMPTS
            assert begun == (ETA + version + 1) * PROMPTS
            assert capacity(version, accepted, begun - accepted, PROMPTS, ETA) == 0
            version += 1
    assert version == STEPS


def test_fresh_rows_are_as_old_as_eta_and_stored_groups_return_as_they_were(ahead: Run) -> None:
    assert f"trainer.v1.separate_async.num_warmup_batches={ETA}" in ahead.log
    made: dict[tuple[int, ...], list[tuple[list[float], float]]] = {}  # the same tokens may be sampled twice
    found = 0
    for batch, step in enumerate(ahead.steps()):
        rollouts, tokens = torch.load(ahead.folder / f"watch{batch}.pt", weights_only=False)
        assert rollouts.current_version == batch
        old = replayed(rollouts.payload)
        fresh = rollouts.staleness[~old]
        assert fresh.tolist() == [min(batch, ETA)] * len(fresh)
        assert int(step["decision"].trained.sum()) == PROMPTS * SAMPLES
        # planned ahead, when the first groups were not there yet
        assert int(old.sum()) == (PROMPTS * SAMPLES // 2 if batch > ETA else 0)
        for row in range(len(rollouts)):
            mine = tokens.row == row
            logprobs = tokens.rollout_logprobs[mine].tolist()
            version = int(rollouts.version[row])
            assert set(tokens.version[mine].tolist()) == {version}
            key = (version, int(rollouts.prompt_index[row]), *rollouts.token_ids.completion[row].tolist())
            known = (logprobs, float(rollouts.reward[row]))
            if bool(old[row]):
                assert version < batch and known in made[key]
                _, expected = rollouts.payload[row]["rollout_replay"]
                assert batch - expected == ETA  # the delay from plan to training, which `max_staleness` adds
                found += 1
            else:
                made.setdefault(key, []).append(known)
    assert found == (STEPS - ETA - 1) * PROMPTS * SAMPLES // 2


def test_the_loss_weighs_them(ahead: Run) -> None:
    largest = [ahead.metrics(number)["actor/decoupled_ppo/weight_max"] for number in range(1, STEPS + 1)]
    assert largest[0] == pytest.approx(1, abs=1e-3) and min(largest[2:]) > 1.01
    assert [ahead.metrics(n)["rollout_replay/replayed"] for n in range(1, STEPS + 1)] == [0, 0, 0, 0.5, 0.5, 0.5]
