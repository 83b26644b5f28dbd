"""Real runs of `python -m verl.trainer.main_ppo` on the CPU, in processes of their own that are gone afterwards.

A run takes most of a minute to start, so tests share runs: `walked` takes another stack of methods every step, and each
step has its own tests.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
import torch
from forked import MARK
from gradients import reference
from waiting import NEVER

from rl_plugins.lab.demo.policy import build_tokenizer

HERE = Path(__file__).parent
PROBES = HERE.parent / "trl"
FORKED = [sys.executable, str(HERE / "forked.py")] if sys.platform == "linux" else [sys.executable]
PROMPTS, SAMPLES = 8, 8
COSTS = ("tokens_decoded", "tokens_read", "engine_calls", "engine_seconds", "rows_made", "rows_trained_total")
PROGRAMS = {
    "ladder": "Agent",
    "turns_apart": "TurnsApart",
    "grafting": "Grafting",
    "idle": "Idle",
    "watch": "Watch",
    "recorded": "Recorded",
    "sleepy": "Sleepy",
    "failing": "Failing",
    "gone": "Gone",
    "wasteful": "Wasteful",
    "spared": "Spared",
    "routed": "Routed",
}

# Rollouts on a device of their own, one batch per publication.
SEPARATE = [
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_file",
    "+ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=16",
]

COMMON = [
    "+rl_plugins.rewards.exact=1",
    "+rl_plugins.rewards.digits=0.5",
    "+rl_plugins.method_params.mc_grpo.mad_eps=0.1",
    "actor_rollout_ref.actor.calculate_entropy=True",
]

# Metrics of staleness of ours -> those of verl they are equal to.
STALENESS = {
    "staleness_mean": "trajectory_staleness/mean",
    "staleness_max": "trajectory_staleness/max",
    "staleness_oldest_mean": "trajectory_staleness_worst/mean",
    "staleness_oldest_max": "trajectory_staleness_worst/max",
}


def plugin_path(folder: Path) -> str:
    """PYTHONPATH with this checkout, and the probes as an installed package: its metadata is written into `folder`."""
    sys.path.insert(0, str(PROBES))
    try:
        import probes
    finally:
        sys.path.remove(str(PROBES))
    known = [c for c in vars(probes).values() if isinstance(c, type) and issubclass(c, probes.Probe)]
    lines = [f"{c.name} = probes:{c.__name__}" for c in known if c.name]
    info = folder / "verl_probes-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl-probes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[verl.plugins]\nverl_probes = verl_probes\n\n[rl_plugins.methods]\nverl_given = verl_probes:VerlGiven\n"
        + "".join(f"{name} = verl_programs:{cls}\n" for name, cls in PROGRAMS.items())
        + "\n".join(lines)
        + "\n"
    )
    return os.pathsep.join([str(folder), str(HERE / "on_path"), str(PROBES), str(HERE.parents[2])])


@dataclass
class Run:
    """A run in its folder."""

    folder: Path
    process: subprocess.Popen[bytes]
    mark: str
    started: float = field(default_factory=time.time)
    settings: tuple[str, ...] = ()  # of a run by `walked`: the stack of every step
    failed: dict[int, str] = field(default_factory=dict)  # step, from 0 -> log of the run that it ended
    read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # files of a run that is over

    def check(self, number: int) -> None:
        """Fails if the setting of a step (from 0) ended the run."""
        assert number not in self.failed, f"`{self.settings[number]}` ended the run:\n{self.failed[number]}"

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] == kind]

    def metrics(self, step: int) -> dict[str, float]:
        self.check(step - 1)
        return next(e["metrics"] for e in self.of("stepped") if e["step"] == step)

    def measured(self, step: int) -> dict[str, float]:
        """verl's own metrics of staleness."""
        return next(e["metrics"] for e in self.of("measured") if e["step"] == step)

    def served(self, start: float = 0.0, end: float = math.inf) -> tuple[int, int, int]:
        """Requests the rollout servers finished in a time, the tokens they made, and those of the contexts they read:
        counted in the servers. Requests that never ran are left out."""
        lines = (self.folder / "served.jsonl").read_text().splitlines()
        found = [row for row in map(json.loads, lines) if start <= row[0] < end and row[1]]
        return len(found), sum(row[1] for row in found), sum(row[2] for row in found)

    def costs(self, step: int) -> dict[str, float]:
        """What a run cost until the end of a step, as it was logged."""
        return {name: self.metrics(step)[f"rl_plugins/{name}"] for name in COSTS}

    def steps(self) -> list[dict[str, Any]]:
        """What every decision said, in order."""
        return self._load("step*.pt", lambda f: int(f.name.split(".")[1]))

    def updates(self, rank: int = 0) -> list[dict[str, Any]]:
        return self._load(f"update*.rank{rank}.pt", lambda f: int(f.name[6:].split(".")[0]))

    def update(self, number: int) -> dict[str, Any] | None:
        """The optimizer step of a step (from 0) that has one at most; none if no row stayed."""
        trained = [i for i, s in enumerate(self.steps()) if bool(s["decision"].trained.any())]
        return self.updates()[trained.index(number)] if number in trained else None

    def _load(self, files: str, order: Callable[[Path], int]) -> list[dict[str, Any]]:
        if files in self.read:
            return self.read[files]
        found = [torch.load(f, weights_only=False) for f in sorted(self.folder.glob(files), key=order)]
        if self.process.poll() is not None:
            self.read[files] = found
        return found

    def step(self, names: str) -> dict[str, Any]:
        """What was decided the first time a setting had its turn."""
        self.check(self.settings.index(names))
        return self.steps()[self.settings.index(names)]

    def rows_of(self, prompts: Sequence[int]) -> list[dict[str, Any]]:
        """`extra_info` of rows of the dataset."""
        table = pyarrow.parquet.read_table(self.folder / "data" / "train.parquet").to_pylist()
        return [table[i]["extra_info"] for i in prompts]

    def wait_for(self, kind: str, timeout: float = NEVER, **values: Any) -> dict[str, Any]:
        """Waits until an event was written."""
        end = time.time() + timeout
        while time.time() < end:
            for event in self.events:
                if event["kind"] == kind and all(event.get(k) == v for k, v in values.items()):
                    return event
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}\n{self.log[-5000:]}"
            time.sleep(0.1)
        raise AssertionError(f"no {kind} {values} within {timeout} s\n{self.log[-3000:]}")

    def wait(self, timeout: float = NEVER) -> int:
        """Exit code; everything the run started is gone afterwards."""
        try:
            return self.process.wait(timeout)
        finally:
            self.clean_up()

    def kill(self) -> None:
        """SIGKILL of the driver: the process that runs the trainer, and the one that started it."""
        for p in self.processes():
            with contextlib.suppress(psutil.Error):
                if p.name().startswith("ray::TaskRunner") or "verl.trainer.main_ppo" in " ".join(p.cmdline()):
                    os.kill(p.pid, signal.SIGKILL)
        self.process.wait(NEVER)

    def processes(self) -> list[psutil.Process]:
        found = []
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if p.environ().get(MARK) == self.mark:
                    found.append(p)
        return found

    def clean_up(self) -> None:
        for _ in range(3):  # Ray's daemons ignore SIGTERM and outlive a driver that was killed
            for p in self.processes():
                with contextlib.suppress(psutil.Error):
                    p.kill()
            time.sleep(0.2)


def with_sets(data: Path) -> Path:
    """Every three rows of the training data are a set, named in a field of `extra_info`."""
    import pyarrow
    import pyarrow.parquet

    file = data / "train.parquet"
    rows = pyarrow.parquet.read_table(file).to_pylist()
    for i, row in enumerate(rows[: len(rows) // 3 * 3]):
        row["extra_info"]["paraphrase_set_id"] = i // 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[: len(rows) // 3 * 3]), file)
    return data


def start(
    folder: Path,
    overrides: Sequence[str],
    trainer: str = "watched_sync",
    ranks: int = 1,
    paths: Sequence[Path] = (),
    **environment: str,
) -> Run:
    """Starts a run of the demo task with 8 prompts and 8 rollouts each.

    Args:
        paths: on PYTHONPATH, too.
    """
    from rl_plugins.lab.demo import verl_data
    from rl_plugins.lab.demo.policy import load_policy

    folder.mkdir(parents=True)
    data = with_sets(verl_data.write(folder / "data"))
    mark = uuid.uuid4().hex
    rows = PROMPTS * SAMPLES // ranks
    lines = [
        *verl_data.overrides(data, load_policy(), folder, steps=2, test_every=-1),
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows // 4}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={rows // 4}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={rows // 4}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "trainer.val_before_train=False",
        f"trainer.n_gpus_per_node={ranks}",
        f"ray_kwargs.ray_init.num_cpus={8 * ranks}",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        f"trainer.v1.trainer_mode={trainer}",
        f"++ray_kwargs.ray_init.runtime_env.py_executable='{' '.join(FORKED)}'",
        *overrides,
    ]
    keys = [line.lstrip("+").split("=")[0] for line in lines]
    lines = [line for i, line in enumerate(lines) if keys[i] not in keys[i + 1 :]]  # the last one of a key counts
    env = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "PYTHONPATH": os.pathsep.join([plugin_path(folder / "plugins"), *map(str, paths)]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it would end the run when other programs fill the memory
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",  # 15 by default: other tests would come first
        "SPT_NOENV": "1",  # the name of a process goes over its command line only, so `MARK` can be read
        "HYDRA_FULL_ERROR": "1",
        "VERL_FILE_LOGGER_ROOT": str(folder),
        "RL_PLUGINS_TEST_OUT": str(folder),
        MARK: mark,
        **environment,
    }
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [*FORKED, "-m", "verl.trainer.main_ppo", *lines],
            cwd=folder,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(folder, process, mark)


def finished(folder: Path, overrides: Sequence[str], **kwargs: Any) -> Run:
    """A run to its end, which must be a good one."""
    run = start(folder, overrides, **kwargs)
    code = run.wait()
    assert code == 0, run.log[-8000:]
    return run


def walked(
    parent: Path,
    settings: Sequence[str],
    overrides: Callable[[Path], Sequence[str]],
    stand_in: str,
    **kwargs: Any,
) -> Run:
    """A run that takes another stack of methods every step, and that the last of them ends with an error.

    A setting that ends it earlier is noted, and the run is made again with a plain stack in its place: the tests of the
    other settings have their steps. If nothing fails, Ray is started once.

    Args:
        parent: an empty folder.
        settings: the stack of every step, "a+b".
        overrides: from the folder of one attempt.
        stand_in: the stack that takes the place of one that failed.
    """
    failed: dict[int, str] = {}
    while True:
        folder = parent / str(len(failed))
        folder.mkdir(parents=True)
        names = [stand_in if i in failed else name for i, name in enumerate(settings)]
        options = [f"+carousel=[{','.join(names)}]", f"trainer.total_training_steps={len(names)}", *overrides(folder)]
        run = start(folder / "run", options, trainer="carousel", **kwargs)
        run.wait(NEVER + 60 * len(names))
        run.settings, run.failed = tuple(settings), failed
        done = len(run.of("stepped"))
        if done >= len(settings) - 1:
            return run
        assert run.of("step") and done not in failed and len(failed) < 4, run.log[-8000:]
        failed[done] = run.log[-8000:]


def check_end(run: Run, method: str, error: str) -> None:
    """The last setting of a walk ended it, with the traceback, the method's name and the way to do without it."""
    assert run.process.returncode != 0, run.log[-3000:]
    assert f"Method `{method}` failed in {error}" in run.log and "raise ValueError(" in run.log
    assert f"Remove `{method}` from `methods` to go on without it." in run.log
    assert run.of("step")[-1]["step"] == run.of("stepped")[-1]["step"] + 1, "the step before it was whole"
    assert run.of("stepped")[-1]["step"] == len(run.settings) - 1


def check_setting(run: Run, number: int, later_rounds: bool = False) -> None:
    """A step (from 0) of a walk trained its prompts and its rows, which are as old as verl's own measure says.

    Args:
        later_rounds: it planned prompts in later rounds, too.
    """
    logged, step, name = run.metrics(number + 1), run.steps()[number], run.settings[number]
    d, plan, decided = step["decision"], run.of("plan")[number], run.of("decided")[number]
    assert step["names"] == name.split("+") and plan["step"] == decided["step"] == number + 1
    assert set(plan["prompts"]) <= set(decided["prompts"])
    assert (set(plan["prompts"]) < set(decided["prompts"])) == later_rounds
    assert logged["rl_plugins/rows_generated"] == len(d.rollouts)
    assert logged["rl_plugins/rows_trained"] == int(d.trained.sum())
    if bool(d.stays.any()):  # of a batch that left whole verl keeps one row
        measured = run.measured(number + 1)
        for ours, theirs in STALENESS.items():
            assert logged[f"rl_plugins/{ours}"] == pytest.approx(measured[f"training/off_policy/{theirs}"]), ours


def check_gradient(run: Run, number: int) -> bool:
    """The gradient norm of a step (from 0) of a walk is that of plain transformers and torch; False if it trained
    nothing."""
    run.check(number)
    update = run.update(number)
    if update is None:
        return False
    norm, rows = reference([update])
    assert update["methods"] == run.settings[number].split("+") and update["global_batch_size"] == rows
    assert update["grad_norm"] == pytest.approx(norm, rel=1e-4)
    return True


def seen(run: Run, name: str, visit: int = 0) -> tuple[Any, Any, dict[str, float]]:
    """Decision, tokens and what was logged in the first or a later batch of a method beside `watch`."""
    k = [i for i, names in enumerate(run.settings) if name in names.split("+")][visit]
    run.check(k)
    _, tokens = torch.load(run.folder / f"watch{k}.pt", weights_only=False)
    return run.steps()[k]["decision"], tokens, run.metrics(k + 1)


def trained_prompts(run: Run, name: str, visit: int = 0) -> list[str]:
    update = [u for u in run.updates() if name in u["methods"]][visit]["rows"]
    real = [float(x.sum()) > 0 for x in update["rl_plugins_real"]]
    texts = build_tokenizer().batch_decode([list(p) for p in update["prompts"]])
    return [text for text, kept in zip(texts, real, strict=True) if kept]


def check_costs(killed: Run, resumed: Run, step: int, last: int) -> None:
    """Costs of a run that was killed and went on from `step`: nothing of what its servers did until then is lost, and
    nothing is counted twice."""
    saved, after = killed.costs(step), resumed.costs(last)
    assert all(after[name] > saved[name] > 0 for name in COSTS), (saved, after)
    assert resumed.costs(step + 1)["tokens_decoded"] >= saved["tokens_decoded"]
    checkpoint = next(e["t"] for e in killed.of("saved") if e["step"] == step)
    before = killed.served(end=checkpoint)
    more = resumed.served(end=next(e["t"] for e in resumed.of("stepped") if e["step"] == last))
    for name, old, new in zip(("engine_calls", "tokens_decoded", "tokens_read"), before, more, strict=True):
        assert saved[name] <= old and after[name] <= old + new, (name, saved, after, before, more)


def check_groups(processes: Sequence[Run], resumed_from: Sequence[int], rows: int = SAMPLES) -> tuple[int, int]:
    """The books of a run of several processes, each but the last of which was killed: no group is lost, none is trained
    twice.

    Args:
        processes: in their order.
        resumed_from: the step each but the first went on from.
        rows: rollouts of a group.

    Returns:
        Groups that were trained, and groups that wait at the end.
    """
    begun, trained, waiting = [], [], set()
    for run, last in zip(processes, [*resumed_from, None], strict=True):
        for event in run.events:  # what came after the checkpoint the next one began with did not happen
            if last is not None and event.get("step", 0) > last:
                continue
            if event["kind"] == "plan":
                begun += event["groups"]
            elif event["kind"] == "sampled":
                counts = {group: event["groups"].count(group) for group in event["groups"]}
                assert set(counts.values()) == {rows}, counts
                trained += counts
            elif event["kind"] == "saved":
                waiting = set(event["waiting"])
    assert len(set(begun)) == len(begun) and len(set(trained)) == len(trained), "a group was begun or trained twice"
    assert set(begun) - set(trained) == waiting and set(trained) <= set(begun), "a group was lost"
    return len(trained), len(waiting)
