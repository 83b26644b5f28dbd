"""AReaL's admission and stored groups in verl's real asynchronous trainer: rollouts of a known age, what hooks see of
them, what is logged, and the loss that corrects for it.

With `num_warmup_batches=k`, one batch per publication, and groups that are complete when weights are published, every
fresh row is exactly k publications old from global step k + 1 on.
"""

from __future__ import annotations

import pytest
import torch
from runs import PROMPTS, SAMPLES, SEPARATE, STALENESS, Run, finished

from rl_plugins.methods.areal_admission import capacity

pytestmark = [pytest.mark.host, pytest.mark.long]

ETA, STEPS = 4, 7
BARS = {0: None, 1: "1", 2: "2_3", 3: "2_3", 4: "4_7"}  # of `staleness_share`; none for fresh rows
HALF = PROMPTS * SAMPLES // 2


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(
        tmp_path_factory.mktemp("verl") / "ahead",
        [
            *SEPARATE,
            "+rl_plugins.methods=[areal,rollout_replay,watch]",
            f"+rl_plugins.method_params.areal_admission.max_staleness={ETA}",
            "+rl_plugins.method_params.rollout_replay.start_batch=1",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            f"trainer.total_training_steps={STEPS}",
        ],
        trainer="watched_separate_async",
        RL_PLUGINS_TEST_VERSIONS="1",
        RL_PLUGINS_TEST_SETTLED="1",
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
    assert f"trainer.v1.separate_async.num_warmup_batches={ETA}" in ahead.log, "what the method sets is printed"
    made: dict[tuple[int, ...], list[tuple[list[float], float]]] = {}  # the same tokens may be sampled twice
    found = 0
    for batch, step in enumerate(ahead.steps()):
        rollouts, tokens = torch.load(ahead.folder / f"watch{batch}.pt", weights_only=False)
        assert (rollouts.current_version, rollouts.steps_since_published) == (batch, 0), "one publication per step"
        assert torch.equal(rollouts.version, rollouts.newest_version) and len(tokens) == int(rollouts.length.sum())
        old = replayed(rollouts.payload)
        fresh = rollouts.staleness[~old]
        assert fresh.tolist() == [min(batch, ETA)] * len(fresh)
        assert torch.equal(step["decision"].rollouts.staleness, rollouts.staleness)
        assert int(step["decision"].trained.sum()) == PROMPTS * SAMPLES
        # planned ahead, when the first groups were not there yet
        assert int(old.sum()) == (HALF if batch > ETA else 0)
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
    assert found == (STEPS - ETA - 1) * HALF


def test_the_metrics_of_staleness_are_verls(ahead: Run) -> None:
    for batch in range(STEPS):
        logged, measured = ahead.metrics(batch + 1), ahead.measured(batch + 1)
        for ours, theirs in STALENESS.items():
            assert logged[f"rl_plugins/{ours}"] == pytest.approx(measured[f"training/off_policy/{theirs}"])
        assert logged["rl_plugins/mixed_version_rows"] == 0.0
        if batch <= ETA:  # nothing is replayed yet
            assert {logged[f"rl_plugins/{ours}"] for ours in STALENESS} == {batch}
            shares = {k.rpartition("/")[2]: v for k, v in logged.items() if "staleness_share" in k and v}
            assert shares == ({BARS[batch]: 1.0} if batch else {})


def test_the_loss_weighs_them(ahead: Run) -> None:
    largest = [ahead.metrics(number)["actor/decoupled_ppo/weight_max"] for number in range(1, STEPS + 1)]
    assert largest[0] == pytest.approx(1, abs=1e-3) and min(largest[2:]) > 1.01
    shares = [ahead.metrics(n)["rollout_replay/replayed"] for n in range(1, STEPS + 1)]
    assert shares == [0.0] * (ETA + 1) + [0.5] * (STEPS - ETA - 1)
