"""verl's asynchronous trainers on the CPU, killed in the save of a step and resumed from the one before."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from runs import COMMON, PROMPTS, SAMPLES, SEPARATE, STALENESS, Run, check_costs, check_groups, finished, start

pytestmark = pytest.mark.host


@pytest.mark.long
def test_colocate_async_with_a_kill(tmp_path: Path) -> None:
    """Killed in the save of step 3 and resumed from step 2: what was in flight is trained, and the plans go on where
    they were."""
    where = f"trainer.default_local_dir={tmp_path / 'checkpoints'}"
    traced = "+rl_plugins.trace={groups: 5, signals: [old_logprobs]}"
    common = ["+rl_plugins.methods=[vade,mc_grpo]", *COMMON[2:3], where, "trainer.save_freq=1", traced]
    killed = start(
        tmp_path / "killed",
        [*common, "trainer.total_training_steps=9"],
        trainer="watched_colocate_async",
        RL_PLUGINS_TEST_SLOW="1",
        RL_PLUGINS_TEST_HOLD="3",
    )
    try:
        killed.wait_for("saving", step=3)
        killed.kill()
    finally:
        killed.clean_up()
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = finished(
        tmp_path / "resumed",
        [*common, "trainer.total_training_steps=4", "trainer.resume_mode=auto"],
        trainer="watched_colocate_async",
        RL_PLUGINS_TEST_SETTLED="1",  # of groups that are complete the oldest are trained
    )
    for run in (killed, resumed):
        for step in run.steps():
            assert step["decision"].rollouts.groups.size.tolist() == [SAMPLES + 1] * PROMPTS
            assert int(step["decision"].trained.sum()) == 64
    assert [killed.metrics(k).get("rl_plugins/plan_lag", 0.0) for k in (1, 2)] == [0.0, 1.0]
    plans = [e["prompts"] for e in killed.of("plan")]
    assert len({tuple(p) for p in plans}) == len(plans) == 4, "every plan draws other prompts"
    third = {e["step"]: e["prompts"] for e in resumed.of("plan")}[3]
    assert third == {e["step"]: e["prompts"] for e in killed.of("plan")}[3], "the same state and random numbers"
    trained = [set(e["prompts"]) for e in (*killed.of("decided")[:2], *resumed.of("decided"))]
    in_flight = set(plans[0] + plans[1] + plans[2]) - trained[0] - trained[1]
    assert in_flight and in_flight <= trained[2] | trained[3], "nothing that was in flight is lost"
    assert check_groups([killed, resumed], [2], rows=SAMPLES + 1) == (4 * PROMPTS, PROMPTS)
    assert resumed.metrics(4)["vade/seen"] > killed.metrics(2)["vade/seen"]
    check_costs(killed, resumed, 2, 4)
    check_trace(tmp_path / "checkpoints" / "trace", [*killed.steps()[:2], *resumed.steps()])


def check_trace(folder: Path, steps: list[dict[str, Any]]) -> None:
    """The files of a killed and a resumed run beside what was decided."""

    def read(table: str, number: int) -> list[dict[str, Any]]:
        return list(pq.read_table(folder / table / f"batch-{number:08d}.parquet").to_pylist())

    assert len(list((folder / "batches").iterdir())) == len(steps) == 4
    for number, step in enumerate(steps):
        d, rows, (batch,) = step["decision"], read("rollouts", number), read("batches", number)
        assert batch["rows"] == len(d.rollouts) == 72 and batch["trained_rows"] == int(d.trained.sum()) == 64
        recorded = {g["group"] for g in batch["groups"] if g["recorded"]}
        assert recorded == {r["group"] for r in rows} and len(recorded) == 5 and len(rows) == 5 * (SAMPLES + 1)
        assert batch["stages"] == ["mc_grpo.advantages"]
        for r in rows:
            i = r["row"]
            assert r["advantage"] == float(d.row_advantages[i]) and r["trained"] == bool(d.trained[i])
            assert r["raw_reward"] == float(d.rollouts.reward[i])
            assert r["prompt_index"] == int(d.rollouts.prompt_index[i])
            assert r["trained"] or [m["method"] for m in r["left"]] == ["mc_grpo"]
            assert len(r["old_logprobs"]) == len(r["completion_ids"]) and max(r["old_logprobs"]) < 0
            assert r["prompt"].startswith("<user>") and r["plan"] is None, "plans of a buffer are not recorded"


@pytest.mark.long
def test_separate_async_with_a_kill(tmp_path: Path) -> None:
    """Killed in the save of step 3 and resumed from step 2, while rollouts are made all the time."""
    options = [
        *SEPARATE,
        "+rl_plugins.methods=[drive,dora_loss]",  # as a filter: the host's number of rollouts in both phases
        "+rl_plugins.method_params.dora_loss.mu=version",
        "+rl_plugins.method_params.drive.sizes=[1.0,16]",
        "+rl_plugins.method_params.drive.batches=[2]",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.separate_async.num_warmup_batches=2",
        "trainer.v1.sampler.max_off_policy_threshold=4",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
    ]
    trainer = "watched_separate_async"
    run = start(
        tmp_path / "killed",
        [*options, "trainer.total_training_steps=9"],
        trainer=trainer,
        RL_PLUGINS_TEST_HOLD="3",
        RL_PLUGINS_TEST_DUMP="1",
    )
    try:
        run.wait_for("saving", step=3)
        run.kill()
    finally:
        run.clean_up()
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = finished(
        tmp_path / "resumed",
        [*options, "trainer.total_training_steps=4", "trainer.resume_mode=auto"],
        trainer=trainer,
    )
    check_costs(run, resumed, 2, 4)
    trained, waiting = check_groups([run, resumed], [2])
    assert trained == 4 * PROMPTS and waiting > 0
    kept = {i for r in (run, resumed) for e in r.of("plan") if e["step"] in (2, 3, 4) for i in e["prompts"]}
    assert len(kept) == 16, "plans are of the set from the second step on, and the resumed run has the same set"
    outside = [r.metrics(number)["drive/outside"] for r, number in ((run, 2), (resumed, 3), (resumed, 4))]
    assert outside[0] > outside[2], f"what is trained was planned up to two steps before: {outside}"
    assert [r.metrics(n)["drive/phase"] for r, n in ((run, 1), (run, 2), (resumed, 4))] == [0, 1, 1]
    steps = run.steps()[:4]
    assert [len(s["decision"].rollouts) for s in steps] == [32] * 4, "two batches per weight synchronization"
    assert [e["step"] for e in run.of("decided")][:4] == [1, 1, 2, 2]
    told = [s["decision"].rollouts for s in steps]
    assert [(r.current_version, r.steps_since_published) for r in told] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    ages = [sorted(set(r.staleness.tolist())) for r in told]  # a group may wait until the next publication
    assert ages[:2] == [[0], [0]] and {*ages[2], *ages[3]} <= {0, 1}, "in publications"
    assert [e["step"] for e in resumed.of("decided")] == [3, 3, 4, 4]
    for process, number in ((run, 1), (run, 2), (resumed, 3), (resumed, 4)):
        logged, measured = process.metrics(number), process.measured(number)
        for ours, theirs in STALENESS.items():
            assert logged[f"rl_plugins/{ours}"] == pytest.approx(measured[f"training/off_policy/{theirs}"])
    logged = run.metrics(2)
    assert logged["rl_plugins/rows_trained"] == 32 and logged["actor/dora_loss/clipfrac"] > 0, "the rows are older"
    assert logged["actor/dora_loss/weight_mean"] == pytest.approx(1, abs=1e-3), "and the engine samples exactly"
    check_generating_weights(run)
    stale = [bool((s["decision"].rollouts.staleness > 0).any()) for s in resumed.steps()[:2]]
    assert any(stale) and resumed.metrics(3)["rl_plugins/version_lost"] > 0, "copies are not part of a checkpoint"
    assert "Some tokens were generated by weights that are no longer kept" in resumed.log


def check_generating_weights(run: Run) -> None:
    """Old log-probs of steps 1 and 2 are those of the weights that were published when each token was generated, and
    the trainer goes on with its own weights. Two optimizer steps per publication; float64 here."""
    from rl_plugins.lab.demo.policy import build_model

    updates = run.updates()[:4]
    published = [build_model(0).double(), build_model(0).double()]
    for model, update in zip(published, updates[::2], strict=True):
        model.load_state_dict(update["weights"])
    older, change = 0, 0.0
    for update in updates:
        for i in range(len(update["rows"]["responses"])):
            row = {k: v[i] for k, v in update["rows"].items()}
            if float(row["rl_plugins_real"].sum()) == 0:
                continue
            prompt, response, mask = row["prompts"], row["responses"], row["response_mask"].bool()
            ids = torch.cat([prompt, response])[None]
            with torch.no_grad():
                both = [m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in published]
            first, second = (x.gather(1, response[:, None])[:, 0] for x in both)
            version = row["rl_plugins_token_version"].flatten()
            expected = torch.where(version == 0, first, second)
            torch.testing.assert_close(row["old_log_probs"][mask].double(), expected[mask], rtol=0, atol=1e-4)
            if update is updates[2] or update is updates[3]:
                older += int((version[mask] == 0).sum())
                change = max(change, float((first - second)[mask].abs().max()))
    assert older > 0 and change > 0.01, "of the newest weights they would be others"
    weights = [torch.cat([v.flatten() for v in update["weights"].values()]) for update in updates]
    moved = [float((b - a).abs().max()) for a, b in itertools.pairwise(weights)]
    assert min(moved) > 1e-4, "an optimizer step moves the trainer's own weights"
    passes = [run.metrics(step)["rl_plugins/version_passes"] for step in (1, 2)]
    assert passes[0] == 0 and 0 < passes[1] <= 1 and run.metrics(2)["rl_plugins/version_lost"] == 0
