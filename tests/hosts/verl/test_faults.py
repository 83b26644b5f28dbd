"""What a run survives, and how it ends when it cannot: SIGKILL of the driver and of a worker. Hooks that raise end the
runs of `test_runs.py` and `test_program_runs.py`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from runs import PROMPTS, Run, start

from rl_plugins.lab.demo.policy import build_model
from rl_plugins.runtime.state import load_state

pytestmark = [pytest.mark.host, pytest.mark.long]

LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=True"]
ALONE = 300  # seconds; a trainer that waited for a worker that is gone would wait longer, or for ever


def decisions(run: Run) -> dict[int, dict[str, object]]:
    """step -> what was decided in it, last writer wins."""
    return {e["step"]: {k: e[k] for k in ("prompts", "rewards", "advantages")} for e in run.of("decided")}


def state(folder: Path) -> dict[str, object]:
    content = json.loads((folder / "rl_plugins" / "state.json").read_text())["content"]
    return {**content["methods"]["counter"]["state"], "batch": content["batch"]}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A run with LoRA whose driver is killed in step 6, and one that goes on from its checkpoint of step 2 until its
    worker is killed, too. Their checkpoints are in a folder `checkpoints` of each."""
    root = tmp_path_factory.mktemp("verl")
    common = [
        "+rl_plugins.methods=[counter]",
        "actor_rollout_ref.rollout.top_k=1",  # greedy: rollouts depend on the weights alone
        *LORA,
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=50",
        "trainer.save_freq=2",
        f"data.train_max_samples={2 * PROMPTS}",
    ]

    def begin(name: str, *more: str) -> Run:
        checkpoints = f"trainer.default_local_dir={root / name / 'checkpoints'}"
        return start(root / name, [*common, checkpoints, *more], RL_PLUGINS_TEST_SLOW="0.5", RL_PLUGINS_TEST_DUMP="1")

    driver = begin("driver")
    try:
        driver.wait_for("decided", step=6)
        driver.kill()
    finally:
        driver.clean_up()
    origin = driver.folder / "checkpoints" / "global_step_2"
    worker = begin("worker", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={origin}")
    try:
        worker.wait_for("saved", step=6)
        workers = [p for p in worker.processes() if "AgentLoopWorker" in " ".join(p.cmdline())]
        assert workers
        for p in workers:
            os.kill(p.pid, signal.SIGKILL)
        worker.process.wait(ALONE)
    finally:
        worker.clean_up()
    return driver, worker


def test_sigkill_of_the_driver_and_resume(killed: tuple[Run, Run]) -> None:
    """What is resumed in the second pass over the dataset decides what had been decided; in the third pass, too."""
    before, after = killed
    assert (before.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    first, rest = decisions(before), decisions(after)
    assert sorted(first) == [1, 2, 3, 4, 5, 6] and sorted(rest)[:4] == [3, 4, 5, 6]
    passes = [{p for step in steps for p in first[step]["prompts"]} for steps in ((1, 2), (3, 4))]
    assert passes[0] == passes[1] and len(passes[0]) == 2 * PROMPTS
    assert len({tuple(first[step]["prompts"]) for step in first}) == 6, "every pass has an order of its own"
    for step in (3, 4, 5, 6):
        for what in ("prompts", "rewards", "advantages"):
            assert rest[step][what] == first[step][what], (step, what)
    mine, theirs = (state(r.folder / "checkpoints" / "global_step_4") for r in killed)
    assert mine == theirs
    norms = [[r.metrics(s)["actor/grad_norm"] for s in (3, 4, 5)] for r in killed]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_lora_trains_adapters_and_samples_from_merged_weights(killed: tuple[Run, Run]) -> None:
    """Greedy rollouts of step 5 are those of the base weights plus the adapters of step 4, which verl sends in
    bfloat16, and not those of the base weights."""
    first, _, update = killed[1].updates()[:3]
    old, new = ({k.removeprefix("base_model.model."): v for k, v in u["weights"].items()} for u in (first, update))
    assert {name for name in old if not torch.equal(old[name], new[name])} == {n for n in old if "lora_" in n} != set()
    base = {name.replace(".base_layer", ""): value for name, value in new.items() if "lora_" not in name}
    merged = dict(base)
    for name, down in new.items():
        if ".lora_A." in name:
            up, target = new[name.replace(".lora_A.", ".lora_B.")], name.replace(".lora_A.default", "")
            merged[target] = base[target] + 16 / 4 * up @ down
    sent = {name: value.bfloat16().float() for name, value in merged.items()}
    assert lost_by_greedy(sent, update["rows"]) < 1e-3 and lost_by_greedy(base, update["rows"]) > 1


def lost_by_greedy(state: dict[str, torch.Tensor], rows: dict[str, list[torch.Tensor]]) -> float:
    """By how much the logit of a token is below the largest one, at most."""
    model, lost = build_model(0).float(), 0.0
    model.load_state_dict(state)
    for prompt, response in zip(rows["prompts"], rows["responses"], strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        lost = max(lost, float((logits.amax(-1) - logits.gather(1, response[:, None])[:, 0]).max()))
    return lost


def test_sigkill_of_an_agent_loop_worker(killed: tuple[Run, Run]) -> None:
    """verl would wait for its rollouts without an end; the run ends, and the last checkpoint has the state."""
    _, run = killed
    assert run.process.returncode not in (0, None)
    assert "died" in run.log and "trainer.resume_mode=auto" in run.log
    last = int((run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert state(run.folder / "checkpoints" / f"global_step_{last}")["steps"] == last >= 6


def test_a_changed_checkpoint_is_refused_by_name(killed: tuple[Run, Run], tmp_path: Path) -> None:
    """verl itself would begin the dataset anew without `data.pt`, and go on with the optimizer of another step."""
    saved = killed[0].folder / "checkpoints"
    files = load_state(saved / "global_step_2")["files"]
    shards = {f"actor/{part}_world_size_1_rank_0.pt" for part in ("model", "optim", "extra_state")}
    assert {*shards, "data.pt"} <= set(files)
    changed = tmp_path / "global_step_2"
    shutil.copytree(saved / "global_step_2", changed)
    (changed / "data.pt").unlink()
    optimizer = "actor/optim_world_size_1_rank_0.pt"
    shutil.copy(saved / "global_step_4" / optimizer, changed / optimizer)
    run = start(
        tmp_path / "run",
        [
            "+rl_plugins.methods=[counter]",
            *LORA,
            "trainer.total_training_steps=50",
            f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={changed}",
        ],
    )
    try:
        run.process.wait(ALONE)
    finally:
        run.clean_up()
    assert run.process.returncode not in (0, None) and not run.of("decided")
    assert "data.pt is missing" in run.log and f"{optimizer} has" in run.log
