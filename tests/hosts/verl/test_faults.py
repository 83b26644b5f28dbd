"""What a run survives, and how it ends when it cannot: SIGKILL of the driver and of a worker, hooks that raise."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from runs import PROMPTS, Run, finished, start

pytestmark = pytest.mark.host

ALONE = 300  # seconds; a rank or a trainer that waited for one that is gone would wait longer, or for ever

STATEFUL = [
    "+rl_plugins.methods=[counter]",
    "actor_rollout_ref.rollout.top_k=1",  # greedy: rollouts depend on the weights alone
    "trainer.total_training_steps=5",
    "trainer.save_freq=3",
]


def decisions(run: Run) -> dict[int, dict[str, object]]:
    """step -> what was decided in it, last writer wins."""
    return {e["step"]: {k: e[k] for k in ("prompts", "rewards", "advantages")} for e in run.of("decided")}


def state(folder: Path) -> dict[str, object]:
    content = json.loads((folder / "rl_plugins" / "state.json").read_text())["content"]
    return {**content["methods"]["counter"]["state"], "batch": content["batch"]}


def test_sigkill_of_the_driver_and_resume(tmp_path: Path) -> None:
    """A run that is killed in step 4 and resumed from step 3, in the second pass over the dataset, decides what an
    unbroken run decides; in the third pass, too."""
    methods = ["+rl_plugins.methods=[counter]", *STATEFUL[1:], f"data.train_max_samples={2 * PROMPTS}"]
    checkpoints = tmp_path / "checkpoints"
    unbroken = finished(tmp_path / "unbroken", [*methods, f"trainer.default_local_dir={tmp_path / 'whole'}"])
    where = f"trainer.default_local_dir={checkpoints}"
    killed = start(tmp_path / "killed", [*methods, where], RL_PLUGINS_TEST_SLOW="1")
    try:
        killed.wait_for("decided", step=4)
        killed.kill()
    finally:
        killed.clean_up()
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3"
    resumed = finished(tmp_path / "resumed", [*methods, where, "trainer.resume_mode=auto"])
    whole, first, rest = decisions(unbroken), decisions(killed), decisions(resumed)
    assert sorted(whole) == [1, 2, 3, 4, 5] and sorted(rest) == [4, 5]
    passes = [{p for step in steps for p in whole[step]["prompts"]} for steps in ((1, 2), (3, 4))]
    assert passes[0] == passes[1] and len(passes[0]) == 2 * PROMPTS
    assert len({tuple(whole[step]["prompts"]) for step in whole}) == 5, "every pass has an order of its own"
    for step in (1, 2, 3, 4):
        assert first[step]["prompts"] == whole[step]["prompts"]
    for step in rest:
        assert rest[step]["prompts"] == whole[step]["prompts"], step
        assert rest[step]["rewards"] == whole[step]["rewards"], step
        assert rest[step]["advantages"] == whole[step]["advantages"], step
    assert state(checkpoints / "global_step_5") == state(tmp_path / "whole" / "global_step_5")
    norms = [[r.metrics(s)["actor/grad_norm"] for s in (4, 5)] for r in (unbroken, resumed)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_sigkill_of_an_agent_loop_worker(tmp_path: Path) -> None:
    """verl would wait for its rollouts without an end; the run ends, and the last checkpoint has the state."""
    checkpoints = tmp_path / "checkpoints"
    run = start(
        tmp_path / "run",
        [
            "+rl_plugins.methods=[counter]",
            "trainer.total_training_steps=50",
            "trainer.save_freq=1",
            f"trainer.default_local_dir={checkpoints}",
        ],
        RL_PLUGINS_TEST_SLOW="0.5",
    )
    try:
        run.wait_for("saved", step=2)
        workers = [p for p in run.processes() if "AgentLoopWorker" in " ".join(p.cmdline())]
        assert workers
        for p in workers:
            os.kill(p.pid, signal.SIGKILL)
        code = run.process.wait(ALONE)
    finally:
        run.clean_up()
    assert code != 0
    assert "died" in run.log and "trainer.resume_mode=auto" in run.log
    last = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert state(checkpoints / f"global_step_{last}")["steps"] == last >= 2


@pytest.mark.parametrize(("where", "ranks", "hook"), [("driver", 1, "observe"), ("rank1", 2, "regularize")])
def test_a_hook_that_raises_ends_the_run(tmp_path: Path, where: str, ranks: int, hook: str) -> None:
    """With its traceback, the method's name and the way to do without it; on one rank of two as on the driver."""
    run = start(
        tmp_path / "run",
        ["+rl_plugins.methods=[boom]", f"+rl_plugins.method_params.boom.where={where}"],
        ranks=ranks,
    )
    try:
        run.wait_for("decided" if where == "rank1" else "plan", step=1)
        code = run.process.wait(ALONE)
    finally:
        run.clean_up()
    assert code != 0
    assert (
        f"Method `boom` failed in `{hook}`: ValueError: the {where.rstrip('1').replace('rank', 'loss')} hook" in run.log
    )
    assert "Remove `boom` from `methods` to go on without it." in run.log
