"""Comparisons with verl: the command of a run, its log as the report reads it, and no process left, however it ends.

A stand-in for `verl.trainer.main_ppo` starts a daemon as Ray does; a real comparison is `rl-plugins demo --host verl`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner
from waiting import NEVER, until

from rl_plugins.commands.cli import app
from rl_plugins.core.errors import ConfigError, RLPluginsError
from rl_plugins.lab.compare import report
from rl_plugins.lab.compare.plan import LOG_VARIABLE, make_plan, parse_variants
from rl_plugins.lab.compare.runs import is_finished, read_log, run_all
from rl_plugins.lab.compare.verl import Verl
from rl_plugins.lab.compare.verl_worker import follow, translate
from rl_plugins.verl.config import compose, read_settings

# Of real runs of the demo, shortened: verl's own trainer, and vade in ours.
BASELINE = [
    '{"step":0,"data":{"val-core/digit_lists/reward/mean@1":0.328125,"val-aux/digit_lists/score/mean@1":0.328125,'
    '"val-aux/digit_lists/exact/mean@1":0.328125,"val-aux/digit_lists/digits/mean@1":0.6966432178932178,'
    '"val-aux/num_turns/mean":2.0}}',
    '{"step":1,"data":{"critic/score/mean":0.3645833432674408,"critic/score/max":1.0,"timing_s/step":1.5,'
    '"perf/total_num_tokens":1752,"generated/reward":0.3645833333333333,"generated/frac_reward_zero_std":0.5833333333,'
    '"generated/rewards/exact/mean":0.3645833333333333}}',
    '{"step":2,"data":{"critic/score/mean":0.4,"timing_s/step":1.25,"timing_s/testing":21.0,'
    '"perf/total_num_tokens":1700,"generated/reward":0.4,"generated/frac_reward_zero_std":0.5,'
    '"generated/rewards/exact/mean":0.4,"val-aux/digit_lists/exact/mean@1":0.471875}}',
]
VADE = [
    '{"step":0,"data":{"val-core/digit_lists/reward/mean@1":0.328125,"val-aux/digit_lists/exact/mean@1":0.328125}}',
    '{"step":1,"data":{"critic/score/mean":0.5,"rewards/exact/mean":0.375,"timing_s/step":1.0,'
    '"rl_plugins/frac_reward_zero_std":0.25,"rl_plugins/reward_generated":0.375,"perf/total_num_tokens":1700,'
    '"generated/reward":0.375,"generated/frac_reward_zero_std":0.5,"generated/rewards/exact/mean":0.375}}',
    '{"step":2,"data":{"critic/score/mean":0.5,"rewards/exact/mean":0.375,"timing_s/step":1.0,'
    '"rl_plugins/frac_reward_zero_std":0.25,"rl_plugins/reward_generated":0.375,'
    '"val-aux/digit_lists/exact/mean@1":0.571875}}',
]


def lines(stored):
    return list(translate(map(json.loads, stored), max_steps=2))


# ---- the log


def test_a_log_of_verl_gets_the_names_of_the_report():
    first, step, last = lines(BASELINE)
    assert first["step"] == 0 and first["max_steps"] == 2 and first["seconds"] == 0.0
    assert first["eval_reward"] == first["eval_rewards/exact/mean"] == 0.328125
    assert first["eval_rewards/digits/mean"] == pytest.approx(0.69664, abs=1e-5)
    assert not any("num_turns" in name for name in first if name.startswith("eval_"))
    assert step["reward"] == pytest.approx(0.36458, abs=1e-5) and step["rewards/exact/mean"] == step["reward"]
    assert step["frac_reward_zero_std"] == pytest.approx(0.58333, abs=1e-5) and "eval_reward" not in step
    assert last["seconds"] == 2.75  # of training, not of the evaluation's 21 s
    assert last["val-aux/digit_lists/exact/mean@1"] == last["eval_rewards/exact/mean"] == 0.471875
    assert step["critic/score/max"] == 1.0  # verl's own names stay


def test_what_a_method_generated_and_kept():
    _, step, _ = lines(VADE)
    assert step["reward"] == 0.375 and step["critic/score/mean"] == 0.5  # of all that was generated
    assert step["frac_reward_zero_std"] == 0.25  # of what was kept


def test_a_log_without_our_buffer():
    records = [{"step": s, "data": {"timing_s/step": 2, "critic/score/mean": None}} for s in (1, 2)]
    records[1]["data"] |= {"val-core/a/acc/mean@4": 0.5, "val-core/b/x/acc/mean@4": 1.0, "val-core/b/x/acc/best@4": 9}
    _, last = translate(records, None)
    assert last["seconds"] == 4 and last["max_steps"] is None
    assert last["eval_rewards/acc/mean"] == 0.75 and "frac_reward_zero_std" not in last  # mean over the data sources


def test_lines_are_read_as_they_are_written(tmp_path):
    file = tmp_path / "verl.jsonl"
    texts = iter(["", '{"step": 0}\n{"st', 'ep": 1}\n{"step', None])  # the run ends within a line

    def running():
        text = next(texts)
        with file.open("a") as f:
            f.write(text or "")
        return text is not None

    assert [r["step"] for r in follow(file, running, pause=0)] == [0, 1]


def test_what_the_buffer_watches():
    from rl_plugins.lab.compare.verl_buffer import watched

    answers = [{"exact": e, "answer": "12", "right": e == 1.0} for e in (1.0, 1.0, 0.0, 1.0, 0.0)]
    values = watched(["a", "a", "b", "b", "c"], [1.0, 1.0, 0.0, 1.0, 0.0], answers)
    assert values == pytest.approx(
        {
            "generated/reward": 0.6,
            "generated/frac_reward_zero_std": 0.6,  # both of a, and c, which is alone
            "generated/rewards/exact/mean": 0.6,
            "generated/rewards/right/mean": 0.6,
        }
    )


def test_rows_without_a_reward_or_a_part_are_left_out():
    from rl_plugins.lab.compare.verl_buffer import watched

    nan = float("nan")
    answers = [
        {"brief": nan, "code": None},
        {"brief": 0.5, "exact": 1.0, "code": None},
        {"brief": None},
        {"brief": 1.0},
    ]
    values = watched(["a", "a", "b", "b"], [1.0, 1.0, nan, 0.0], answers)
    assert values == pytest.approx(
        {
            "generated/reward": 2 / 3,
            "generated/frac_reward_zero_std": 1.0,
            "generated/rewards/brief/mean": 0.75,
            "generated/rewards/exact/mean": 1.0,
        }
    )
    assert watched(["a"], [nan], [{"brief": nan}]) == {}
    of_numpy = [{"brief": np.float32(0.25), "n": np.int64(3)}, {"brief": 0.75, "n": 1}]
    found = watched(["a", "b"], [1.0, 1.0], of_numpy)
    assert (found["generated/rewards/brief/mean"], found["generated/rewards/n/mean"]) == (0.5, 2.0)


def test_the_buffer_is_one_that_verl_builds(monkeypatch):
    """In verl's slot, with verl's arguments; batches of the evaluation are left alone."""
    import torch
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    from rl_plugins.lab.compare import verl_buffer

    host = Verl.of(["data.train_batch_size=8"])
    config = compose(host.arguments(parse_variants([], "grpo")[0], 3, Path("out"), {}))
    trainer = object.__new__(trainer_base.PPOTrainer.__subclasses__()[0])
    trainer.config, trainer.trainer_mode, trainer._add_prompts_to_generate = config, "sync", None
    buffer = trainer._build_replay_buffer()
    assert type(buffer).__name__ == "WatchedReplayBuffer" and buffer.poll_interval == 0.2

    batch = KVBatchMeta(partition_id="train", keys=["u_0_0", "u_1_0", "v_0_0"], tags=[{}] * 3)
    rows = {
        "rm_scores": torch.nested.as_nested_tensor(
            [torch.tensor([0.0, s]) for s in (1.0, 0.0, 1.0)], layout=torch.jagged
        ),
        "extra_fields": [{"reward_extra_info": {"exact": e}} for e in (1.0, 0.0, 1.0)],
    }
    module = sys.modules[type(buffer).__module__]
    monkeypatch.setattr(verl_buffer.ReplayBuffer, "sample", lambda self, **kwargs: (batch, {"host": 1.0}))
    monkeypatch.setattr(module.tq, "kv_batch_get", lambda keys, partition_id, select_fields: rows)
    _, metrics = buffer.sample(1, "train", 2)
    assert metrics["host"] == 1.0 and metrics["generated/reward"] == pytest.approx(2 / 3)
    assert metrics["generated/frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert buffer.sample(2, "val", 2)[1] == {"host": 1.0}


def test_the_report_of_stored_runs(tmp_path):
    host = Verl.of([])
    c = make_plan(host, parse_variants(["vade"], "grpo"), [0], tmp_path)
    for run, stored in zip(c.runs, (BASELINE, VADE), strict=True):
        run.folder.mkdir(parents=True)
        run.log_file.write_text("".join(json.dumps(line) + "\n" for line in lines(stored)))
    summary = report.write(c, ["eval_rewards/exact/mean", "frac_reward_zero_std"])
    assert summary["variants"]["vade"]["metrics"]["eval_rewards/exact/mean"]["difference"]["mean"] == pytest.approx(0.1)
    assert summary["variants"]["vade"]["metrics"]["frac_reward_zero_std"]["difference"]["mean"] == pytest.approx(-0.25)
    assert summary["variants"]["grpo"]["costs"]["seconds"] == [2.75] and summary["variants"]["vade"]["costs"][
        "steps"
    ] == [2]


def test_verls_names_of_evaluations_count_at_their_last_point(tmp_path):
    c = make_plan(Verl.of([]), parse_variants([], "grpo"), [0], tmp_path)
    c.runs[0].folder.mkdir(parents=True)
    records = [{"step": s, "data": {"val-core/a/reward/mean@1": s, "critic/score/mean": s}} for s in range(20)]
    c.runs[0].log_file.write_text("".join(json.dumps(line) + "\n" for line in translate(records, 20)))
    found = report.summarize(c, ["val-core/a/reward/mean@1", "reward"])["variants"]["grpo"]["metrics"]
    assert found["val-core/a/reward/mean@1"]["end"] == [19] and found["reward"]["end"] == [18.5]


def test_the_reward_in_training_is_the_weighted_sum():
    """In every variant, whether the buffer is watched or not; verl's own evaluation knows the score alone."""
    told = {"critic/score/mean": 0.5, "generated/reward": 0.25, "rl_plugins/reward_generated": 1.5}
    for names in (3, 2, 1):
        data = dict(list(told.items())[:names])
        (line,) = translate([{"step": 1, "data": data}], None)
        assert line["reward"] == list(data.values())[-1]


# ---- the command of a run


def test_variants_in_verls_trainer_and_in_ours(tmp_path):
    given = [
        "data.train_batch_size=8",
        "data.seed=9",
        "+rl_plugins.rewards.exact=1",
        "trainer.logger=wandb",
    ]
    odd = tmp_path / "a b'c"
    params = {"mc_grpo": {"advantage_clip": 3.0}, "vade": {}}
    c = make_plan(Verl.of(given), parse_variants(["vade+mc_grpo"], "grpo"), [4], odd, params)
    grpo, both = (compose(run.arguments) for run in c.runs)
    for config, run in zip((grpo, both), c.runs, strict=True):
        assert config.data.seed == config.actor_rollout_ref.rollout.seed == 4 and config.data.train_batch_size == 8
        assert list(config.trainer.logger) == ["wandb", "file"]
        assert [a for a in run.arguments if "data.seed" in a or "logger=" in a] == [
            "++data.seed=4",
            "++trainer.logger=[wandb,file]",
        ]
        assert config.trainer.default_local_dir == str(odd / "runs" / run.folder.name / "checkpoints")
        logged_to = config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH
        assert logged_to == str(run.folder / "verl.jsonl")
        assert config.trainer.v1.sampler.custom_sampler.name == "WatchedReplayBuffer"
    counted = read_settings(grpo)
    assert grpo.trainer.v1.trainer_mode == "rl_plugins_sync" and not counted.methods and counted.count_costs
    assert set(grpo.rl_plugins) == {"methods", "count_costs", "rewards"} and counted.rewards == {"exact": 1.0}
    assert both.trainer.v1.trainer_mode == "rl_plugins_sync"
    settings = read_settings(both)
    assert settings.methods == ("vade", "mc_grpo") and settings.rewards == {"exact": 1.0} and settings.seed == 4
    assert settings.method_params == params


def test_parameters_of_every_kind_reach_verl(tmp_path):
    params = {"mc_grpo": {"a": 'it\'s {b: [c]} "d"', "e": [1, None, True], "f": {"g": -0.5}}}
    lines = Verl.of([]).arguments(parse_variants(["mc_grpo"], "grpo")[1], 0, tmp_path, params)
    assert read_settings(compose(lines)).method_params == params


def test_the_users_mode_and_sampler_stay(tmp_path):
    variants = parse_variants(["mc_grpo"], "grpo")
    asynchronous = Verl.of(["trainer.v1.trainer_mode=rl_plugins_colocate_async"])
    modes = [compose(asynchronous.arguments(a, 0, tmp_path, {})).trainer.v1.trainer_mode for a in variants]
    assert modes == ["rl_plugins_colocate_async"] * 2 and not asynchronous.watched
    own = ["trainer.v1.sampler.custom_sampler.path=pkg://mine", "trainer.v1.sampler.custom_sampler.name=Mine"]
    for overrides in (
        own,
        ["algorithm.filter_groups.enable=True"],
        ["trainer.v1.sampler.sync_refill_failed_groups=True"],
    ):
        host = Verl.of(overrides)
        sampler = compose(host.arguments(variants[0], 0, tmp_path, {})).trainer.v1.sampler.custom_sampler
        assert not host.watched and sampler.name == ("Mine" if overrides is own else None)


@pytest.mark.parametrize(
    "given",
    [
        ["+rl_plugins.method_params.mc_grpo.mad_eps=0.5", "+rl_plugins.method_params.mc_grpo.advantage_clip=1.0"],
        ["+rl_plugins={method_params: {mc_grpo: {mad_eps: 0.5, advantage_clip: 1.0}}}"],
    ],
)
def test_parameters_in_the_overrides_reach_their_variant(tmp_path, given):
    """Those of --method-params win; a variant that does not name the method would refuse them."""
    words = ["--seeds", "1", "--method-params", '{"mc_grpo": {"advantage_clip": 3.0}}', "gdpo", "mc_grpo"]
    code, text = plan_of("compare", "--host", "verl", "--out", str(tmp_path), *words, "--", *given)
    lines = [line.partition("(to run): ")[2] for line in text.splitlines() if "(to run)" in line]
    settings = [read_settings(compose(shlex.split(line))) for line in lines]
    params = {"mc_grpo": {"mad_eps": 0.5, "advantage_clip": 3.0}}
    assert code == 0 and [s.method_params for s in settings] == [{}, {}, params]


def test_every_variant_trains_the_same_sum_of_rewards(tmp_path):
    """verl alone knows `score` only. However the weights are given, the baseline gets them, too."""
    given = ["+rl_plugins.rewards.correct=1", "+rl_plugins.rewards.brief=0.1"]
    words = ["compare", "--host", "verl", "--out", str(tmp_path), "--seeds", "1"]
    said = "All variants train 1 correct + 0.1 brief (rl_plugins.rewards), in place of the `score`"
    as_node = ["+rl_plugins={rewards: {correct: 1, brief: 0.1}, method_params: {mc_grpo: {mad_eps: 0.5}}}"]
    of_verl = ["+algorithm.gdpo_reward_keys=[correct,brief]", "+algorithm.gdpo_reward_weights=[1,0.1]"]
    for overrides in (given, as_node, of_verl):
        code, text = plan_of(*words, "mc_grpo", "--", *overrides)
        lines = [line.partition("(to run): ")[2] for line in text.splitlines() if "(to run)" in line]
        settings = [read_settings(compose(shlex.split(line))) for line in lines]
        assert code == 0 and said in text
        assert [(s.methods, s.rewards) for s in settings] == [
            (methods, {"correct": 1.0, "brief": 0.1}) for methods in ((), ("mc_grpo",))
        ]
    assert "All variants train" not in plan_of(*words, "mc_grpo", "--", "data.train_batch_size=8")[1]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["+rl_plugins.methods=[vade]"], r"rl_plugins.methods=\['vade'\]. Here methods are arguments"),
        (["trainer.use_v1=False"], "trainer.use_v1=False"),
        (["trainer.v1.trainer_mode=mine"], "trainer.v1.trainer_mode=mine is given; methods run in"),
        (["data.no_such=1"], "hydra refuses the command line"),
    ],
)
def test_overrides_that_cannot_be_compared(overrides, match):
    with pytest.raises(ConfigError, match=match):
        Verl.of(overrides)


# ---- processes

FAKE = textwrap.dedent(
    """
    import json, os, subprocess, sys, time

    values = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
    file = values["ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"].strip("'")
    daemon = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: 0); time.sleep(3600)"
    daemon = subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
    with open(os.environ["PIDS"], "a") as pids:
        pids.write(f"{os.getpid()}\\n{daemon.pid}\\n")
    steps = int(values["trainer.total_training_steps"])
    with open(file, "w", buffering=1) as f:
        for step in range(steps + 1):
            f.write(json.dumps({"step": step, "data": {"critic/score/mean": step / 10, "timing_s/step": 1.0}}) + "\\n")
    if values["data.shuffle"] == "wait":
        time.sleep(3600)
    if values["data.shuffle"] == "fail":
        raise SystemExit("the actor died")
    """
)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A comparison whose runs behave as they are told, and the process ids they leave."""
    (tmp_path / "path" / "verl" / "trainer").mkdir(parents=True)
    (tmp_path / "path" / "verl" / "__init__.py").touch()
    (tmp_path / "path" / "verl" / "trainer" / "main_ppo.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))

    def plan(behavior, methods=()):
        host = Verl((f"data.shuffle={behavior}", "trainer.total_training_steps=3"), "sync", ("file",), False, False)
        return make_plan(host, parse_variants(methods, "grpo"), [0], tmp_path / "out")

    return plan


def pids(tmp_path, n):
    """The processes that the runs started, once there are n."""

    def found():
        lines = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
        return len(lines) >= n and [int(line) for line in lines]

    ids = until(found, f"the start of {n} processes")
    assert len(ids) == n
    return ids


def gone(ids):
    """Waits for the end of processes that would live for an hour."""

    def lives(i):
        with contextlib.suppress(psutil.Error):
            return psutil.Process(i).status() != psutil.STATUS_ZOMBIE

    return until(lambda: not any(map(lives, ids)), f"the end of the processes {ids}")


def test_runs_are_logged_and_leave_nothing(fake, tmp_path):
    c = fake("end", ["mc_grpo"])
    run_all(c, jobs=1, console=Console(quiet=True))
    for run in c.runs:
        assert is_finished(run) and [line["step"] for line in read_log(run)] == [0, 1, 2, 3]
        assert read_log(run)[-1] | {"reward": 0.3, "max_steps": 3, "seconds": 4.0} == read_log(run)[-1]
    assert gone(pids(tmp_path, 4))
    run_all(c, jobs=1, console=Console(quiet=True))
    assert len(pids(tmp_path, 4)) == 4, "nothing is run again"


def test_a_run_that_fails_shows_its_end_and_leaves_nothing(fake, tmp_path):
    c = fake("fail")
    with pytest.raises(RLPluginsError, match=r"(?s)grpo with seed 0 failed .*output\.txt.*the actor died"):
        run_all(c, jobs=1, console=Console(quiet=True))
    assert not is_finished(c.runs[0]) and gone(pids(tmp_path, 2))


@pytest.mark.parametrize("ended", ["Ctrl-C", "SIGTERM", "SIGKILL"])
def test_a_comparison_that_is_ended_leaves_nothing(fake, tmp_path, ended):
    """Ctrl-C goes to the command and the process of the run, SIGTERM only to that; after SIGKILL it is alone."""
    (run,) = fake("wait").runs
    program = (
        "import os, pathlib, subprocess, sys\n"
        "from rl_plugins.runtime.processes import environment\n"
        "p = subprocess.Popen(sys.argv[2:], env=os.environ | environment(pathlib.Path(sys.argv[1])))\n"
        "try:\n    p.wait()\nfinally:\n    p.terminate()\n    p.wait()\n"
    )
    environment = {**os.environ, LOG_VARIABLE: str(run.log_file)}
    run.folder.mkdir(parents=True)
    command = [sys.executable, "-c", program, str(run.folder), sys.executable, "-m", run.worker, *run.arguments]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    ids = pids(tmp_path, 2)
    worker = [p.pid for p in psutil.Process(process.pid).children()]
    if ended == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    elif ended == "SIGTERM":
        os.kill(worker[0], signal.SIGTERM)
    else:
        process.kill()
    process.wait(NEVER)
    assert gone([*ids, *worker])


# ---- the commands


def plan_of(*arguments):
    result = CliRunner().invoke(app, [arguments[0], "--dry-run", *arguments[1:]])
    return result.exit_code, result.output


def test_the_demos_of_verl_share_what_must_be_equal(tmp_path):
    code, text = plan_of("demo", "--host", "verl", "vade", "minpro", "--out", str(tmp_path))
    assert "The reward is `exact` alone in all variants, because `vade` needs a reward that only" in text
    assert "`actor_rollout_ref.actor.ppo_epochs` is 2 in all variants, because `minpro` needs several updates" in text
    runs = [line for line in text.splitlines() if "(to run)" in line]
    assert code == 0 and [r.split(" (")[0] for r in runs] == [
        f"{variant} seed {seed}" for seed in (0, 1) for variant in ("grpo", "vade", "minpro")
    ]
    for run in runs:
        assert "reward_kwargs.binary=True" in run and "actor_rollout_ref.actor.ppo_epochs=2" in run
        assert "+rl_plugins.rewards.exact=1.0" in run
    assert list(tmp_path.iterdir()) == []
    code, text = plan_of("demo", "--host", "verl", "mc_grpo", "--seeds", "1", "--out", str(tmp_path))
    assert "reward_kwargs.binary=False" in text and "ppo_epochs=2" not in text and '"advantage_clip": 3.0' in text


@pytest.mark.parametrize(
    "command",
    [
        ["vade", "mc_grpo", "--", "data.train_batch_size=8", "+data.x=1"],
        ["--seeds", "1", "vade", "mc_grpo", "--", "python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=8"],
    ],
)
def test_compare_takes_a_command_of_verl(command, tmp_path):
    code, text = plan_of("compare", "--host", "verl", "--out", str(tmp_path), *command)
    assert "This command sets `data.seed`, " in text and "`trainer.v1.sampler.custom_sampler`" in text
    first = [line for line in text.splitlines() if "(to run)" in line][:3]
    assert code == 0 and [r.split()[0] for r in first] == ["grpo", "vade", "mc_grpo"]
    assert all(" data.train_batch_size=8 " in r and "main_ppo" not in r for r in first)


def test_compare_attributes_in_verl(tmp_path):
    given = ["compare", "--host", "verl", "--seeds", "1", "--out", str(tmp_path), "vade", "mc_grpo", "--attribute"]
    code, text = plan_of(*given, "--", "data.train_batch_size=8")
    variants = [line.split()[0] for line in text.splitlines() if "(to run)" in line]
    assert code == 0 and variants == ["grpo", "vade", "mc_grpo", "vade+mc_grpo"]
    code, text = plan_of(*given, "gdpo", "--", "data.train_batch_size=8")
    assert code == 2 and "both decide `advantages`" in " ".join(text.split())


def test_what_is_only_for_trl_is_refused():
    for arguments, match in (
        (["demo", "--host", "verl", "--jobs", "2"], "--jobs 2 is given; runs of verl go one at a time"),
        (["compare", "--host", "verl", "vade", "--launcher", "x"], "--launcher is for TRL"),
        (["compare", "--host", "verl", "data.seed=1"], "No method is named"),
    ):
        code, text = plan_of(*arguments)
        assert code == 2 and match in text
