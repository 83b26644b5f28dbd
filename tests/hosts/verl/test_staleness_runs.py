"""Rollouts of a known age in verl's real asynchronous trainer: what a run sets, what hooks see, what is logged.

With `num_warmup_batches=k`, no threshold and one batch per publication every row is exactly k publications old from
global step k + 1 on.
"""

from __future__ import annotations

import pytest
import torch
from runs import PROMPTS, SAMPLES, STALENESS, Run, finished

pytestmark = pytest.mark.host

AGES = [0, 1, 2, 3, 4, 4, 4]


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`april` begins five groups per group trained, which is a warm-up of four batches."""
    return finished(
        tmp_path_factory.mktemp("verl") / "stale",
        [
            "+rl_plugins.methods=[april,minpro,watch]",
            "+rl_plugins.method_params.april.over_sampling=5",
            "trainer.v1.separate_async.parameter_sync_step=1",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_file",
            "+ray_kwargs.ray_init.num_gpus=2",
            "ray_kwargs.ray_init.num_cpus=16",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            f"trainer.total_training_steps={len(AGES)}",
        ],
        trainer="watched_separate_async",
        RL_PLUGINS_TEST_VERSIONS="1",
    )


def test_every_row_is_as_old_as_was_set(stale: Run) -> None:
    assert "trainer.v1.separate_async.num_warmup_batches=4.0" in stale.log, "what the method sets is printed"
    for batch, (step, age) in enumerate(zip(stale.steps(), AGES, strict=True)):
        rollouts = step["decision"].rollouts
        assert (rollouts.current_version, rollouts.steps_since_published) == (batch, 0), "one publication per step"
        assert rollouts.staleness.tolist() == [age] * PROMPTS * SAMPLES
        assert torch.equal(rollouts.version, rollouts.newest_version)


def test_tokens_have_the_version_of_their_row(stale: Run) -> None:
    for batch, age in enumerate(AGES):
        rollouts, tokens = torch.load(stale.folder / f"watch{batch}.pt", weights_only=False)
        assert (tokens.version == batch - age).all() and len(tokens) == int(rollouts.length.sum())
        assert stale.metrics(batch + 1)["april/staleness"] == age


def test_the_metrics_of_staleness_are_verls(stale: Run) -> None:
    bars = {0: "0", 1: "1", 2: "2_3", 3: "2_3", 4: "4_7"}
    for number, age in enumerate(AGES, 1):
        logged, measured = stale.metrics(number), stale.measured(number)
        for ours, theirs in STALENESS.items():
            assert logged[f"rl_plugins/{ours}"] == measured[f"training/off_policy/{theirs}"] == age
        shares = {k: v for k, v in logged.items() if "staleness_share" in k and v}
        assert shares == ({f"rl_plugins/staleness_share/{bars[age]}": 1.0} if age else {})
        assert logged["rl_plugins/mixed_version_rows"] == 0.0


def test_minpro_weighs_old_tokens_less(stale: Run) -> None:
    weights = [stale.metrics(number)["actor/minpro/weight_mean"] for number in range(1, len(AGES) + 1)]
    assert weights[0] == pytest.approx(1.0, abs=1e-3) and max(weights[4:]) < 0.97
