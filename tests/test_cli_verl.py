"""`rl-plugins doctor --host verl` and the examples for verl: real composition of verl's config, no Ray."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict
from typer.testing import CliRunner
from waiting import NEVER

from rl_plugins.cards import catalog
from rl_plugins.cards.info import info
from rl_plugins.cards.usage import hydra, usage_of
from rl_plugins.commands.cli import app
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import HOOKS, Bundle
from rl_plugins.lab.demo import verl_data
from rl_plugins.runtime import registry, report
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.stack import build_stack
from rl_plugins.verl import capabilities, compat, doctor, host_config, start
from rl_plugins.verl.capabilities import Reader
from rl_plugins.verl.config import MODES, Settings, compose, read_settings
from rl_plugins.verl.offline import run_of_words

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "verl"
VERL = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
STRATEGY = "actor_rollout_ref.actor.strategy"
RUN = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "trainer.v1.trainer_mode=rl_plugins_sync",
    "+rl_plugins.methods=[vade,mc_grpo]",
)


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """The package as pip installs it, in front of what an old build left in the checkout; returns its metadata."""
    for variable in ("VERL_USE_EXTERNAL_PLUGINS", "VERL_PLATFORM", *report.VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "site" / "rl_plugins-0.1.0.dist-info"
    folder.mkdir(parents=True)
    asks = "".join(f"Requires-Dist: {line}\n" for line in importlib.metadata.requires("rl-plugins"))
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rl-plugins\nVersion: 0.1.0\n{asks}")
    (folder / "entry_points.txt").write_text("[verl.plugins]\nrl_plugins = rl_plugins.verl.plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    return folder


def examine(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", "--host", "verl", "--", *words])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stderr if status == 2 else result.stdout


def section(text: str, title: str) -> dict[str, str]:
    """The lines under a title, by their first word or words."""
    lines = text[text.index(f"\n{title}\n") :].splitlines()[2:]
    return {line[2:20].strip(): line[20:] for line in lines[: lines.index("")]}


def problems(text: str) -> str:
    return text[text.rindex(" problem") :]


def data(path: Path, rows: int) -> str:
    """A data set in verl's format."""
    row = example("gsm8k_data").to_row({"question": "1+1?", "answer": "It is 2. #### 2"}, 0, "train")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * rows), path)
    return str(path)


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the installation


def test_without_a_run_it_shows_what_is_installed():
    text = examine()
    assert re.search(r"^  verl +0\.9\.\d+ +>=\S+ .* ok$", text, re.M) and re.search(r"^  ray +\d", text, re.M)
    assert "rl_plugins = rl_plugins.verl.plugin (rl-plugins 0.1.0), loaded" in text
    assert "what the adapter uses of verl: as expected" in text
    assert re.search(r"^  VERL_PLATFORM +not set$", text, re.M)
    assert "rl-plugins doctor --host verl -- OVERRIDES" in text and "The run" not in text


def test_without_a_run_it_imports_neither_verl_nor_ray():
    code = (
        "import sys\nfrom rl_plugins.verl.doctor import examine\n"
        "problems = examine([])\n"
        "print(problems, sorted({m.split('.')[0] for m in sys.modules} & {'verl', 'ray', 'trl', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=NEVER)
    assert done.stdout.splitlines()[-1] == "[] []", (done.stdout, done.stderr)


def test_a_missing_or_untested_verl(monkeypatch):
    real = report.importlib.metadata.version
    monkeypatch.setattr(report.importlib.metadata, "version", lambda name: "0.10.1" if name == "verl" else real(name))
    text = examine(status=1)
    assert re.search(r"^  verl +0\.10\.1 .*not allowed$", text, re.M)
    assert "verl 0.10.1 is installed; this version" in problems(text)
    monkeypatch.setenv("RL_PLUGINS_ALLOW_UNTESTED", "1")
    examine()

    def nothing(name):
        if name == "verl":
            raise report.importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(report.importlib.metadata, "version", nothing)
    assert "verl is not installed" in problems(examine(status=1))


@pytest.mark.parametrize(
    ("policy", "state", "problem"),
    [
        ("auto", "loaded", ""),
        ("none", "LEFT OUT", "VERL_USE_EXTERNAL_PLUGINS=none leaves rl-plugins out"),
        ("other", "LEFT OUT", "name rl_plugins in it (VERL_USE_EXTERNAL_PLUGINS=rl_plugins)"),
        ("rl_plugins,other", "loaded", ""),
    ],
)
def test_what_verl_lets_through(policy, state, problem, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    text = examine(status=int(bool(problem)))
    assert f"rl_plugins = rl_plugins.verl.plugin (rl-plugins 0.1.0), {state}" in text
    assert problem in text and ("names other, which nothing offers" in text) == ("other" in policy)


def test_an_installation_without_the_entry_point(installed):
    (installed / "entry_points.txt").write_text("")
    assert "verl finds no entry point `rl_plugins` in the group verl.plugins" in problems(examine(status=1))


def test_a_plugin_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "rl_plugins.verl.plugin", None)
    assert "the verl plugin of rl-plugins cannot be loaded: ModuleNotFoundError" in problems(examine(status=1))


def test_symbols_of_verl_that_moved(monkeypatch):
    owner = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
    step, gone = (
        compat.Pinned(owner, *rest, "") for rest in (("step", ("metrics", "timing_raw", "more")), ("_vanished", ()))
    )
    other = compat.Pinned("verl.trainer.nowhere", "_there", None, "")
    monkeypatch.setattr(compat, "PINNED", (step, gone, other))
    text = examine(status=1)
    assert "PPOTrainer.step(metrics, timing_raw) used to be (metrics, timing_raw, more)" in problems(text)
    assert "PPOTrainer._vanished is gone" in problems(text)
    assert "verl.trainer.nowhere._there is gone" in problems(text)
    monkeypatch.setenv("RL_PLUGINS_ALLOW_UNTESTED", "1")
    assert "_vanished is gone" in examine()


def test_trl_beside_verl(monkeypatch):
    from rl_plugins.verl import plugin

    monkeypatch.setattr(plugin, "trl_has_value_head", lambda: False)
    told = "it has no value head; in runs with methods verl's model builder is told that TRL is not there"
    assert f"TRL in the same environment: {told}" in examine()
    monkeypatch.setattr(plugin, "trl_has_value_head", lambda: True)
    assert "TRL in the same environment: it has the value head that verl asks for" in examine()


def test_upstream_changes_are_recognized(tmp_path):
    """In a copy of verl with our patches all of them are there; the names the adapter uses stay."""
    assert set(doctor._seams(VERL).values()) == {False}
    copy = tmp_path / "host" / "verl"
    shutil.copytree(VERL, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.so"))
    for name in doctor.SEAMS:
        (patch,) = (ROOT / "patches" / "verl").glob(f"{name}-*.patch")
        done = subprocess.run(
            ["git", "apply", "-p1", str(patch)],
            cwd=copy.parent,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert doctor._seams(copy)[name], name
    assert compat.moved_symbols(copy) == []


# ---- a run


def test_a_run_with_methods(tmp_path):
    train = data(tmp_path / "train.parquet", 50)
    text = examine(*RUN, f"data.train_files={train}", "trainer.total_epochs=2", "trainer.save_freq=5")
    assert re.search(r"^  mc_grpo +plan, advantages, shape +scale=mad", text, re.M)
    found = section(text, "The run")
    assert found["trainer"] == "rl_plugins_sync: a batch is generated, then trained, with methods"
    assert found["prompts"] == "16 per batch"
    assert found["rollouts"] == "5 (4 trained, 1 made to leave) per prompt"
    assert (found["rows generated"], found["rows trained"]) == ("80", "64 of 64")
    assert found["rows that leave"].startswith("mc_grpo may take rows out")
    assert found["optimizer steps"] == "1 per batch, of 64 rows each"
    assert found["whole run"] == "6 batches, 6 optimizer steps"  # 50 prompts / 16 * 2 epochs
    assert "the methods' state in its folder rl_plugins/" in found["checkpoints"]
    assert len(text.split()) < 250, "what bears on this run"
    assert "its columns and size are not checked" not in text and text.endswith("No problem found.\n")


def test_the_batches_of_a_schedule(tmp_path):
    train = data(tmp_path / "train.parquet", 50)
    params = "+rl_plugins.method_params.brorl={ramp:[[3,16]]}"
    methods = ("trainer.v1.trainer_mode=rl_plugins_sync", "+rl_plugins.methods=[brorl]", params)
    found = section(examine(*RUN[:8], *methods, f"data.train_files={train}"), "The run")
    assert (found["prompts"], found["rollouts"]) == ("16 per batch", "4 per prompt")
    assert found["from batch 3"] == "4 groups with 16 rollouts each; 64 rows generated, 64 of 64 trained"


def test_the_precision_of_the_rollouts_is_named():
    sync = (*RUN[:8], "trainer.v1.trainer_mode=rl_plugins_sync")
    assert section(examine(*RUN[:8], "trainer.v1.trainer_mode=sync"), "The run")["precision"] == "rollouts in bfloat16"
    quantized = (*sync, "actor_rollout_ref.rollout.quantization=fp8")
    pool = "+rl_plugins.methods=[sol_rl_select]"
    found = section(examine(*quantized, pool), "The run")["precision"]
    assert found == (
        "rollouts in bfloat16, quantized: fp8; NOT corrected for: set algorithm.rollout_correction.rollout_is=token, "
        "or name a method that does (dart_tis)"
    )
    found = section(examine(*quantized, "+rl_plugins.methods=[sol_rl_select,dart_tis]"), "The run")["precision"]
    assert found == "rollouts in bfloat16, quantized: fp8; corrected by dart_tis"
    found = section(examine(*quantized, pool, "algorithm.rollout_correction.rollout_is=token"), "The run")["precision"]
    assert found.endswith("corrected by algorithm.rollout_correction.rollout_is=token")


def test_several_optimizer_steps_and_several_rewards():
    text = examine(
        *RUN[:7],
        "trainer.v1.trainer_mode=rl_plugins_sync",
        "+rl_plugins.methods=[gdpo]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "+rl_plugins.rewards.accuracy=1",
        "+rl_plugins.rewards.format=0.5",
        "trainer.total_training_steps=3",
    )
    found = section(text, "The run")
    assert found["optimizer steps"] == "8 per batch, of 16 rows each"
    assert found["policy"].startswith("the batch's own in the first optimizer step, off-policy in the 7 after it")
    assert found["whole run"] == "3 batches, 24 optimizer steps"
    assert found["rewards"] == "accuracy (weight 1), format (weight 0.5): keys of the reward function's answer"
    assert "several_rewards" not in text


def test_a_run_of_verl_alone():
    text = examine(*RUN[:8])
    found = section(text, "The run")
    assert "No methods are named: the run is verl's own." in text and "without a reward" not in found
    assert (
        found["trainer"] == "sync: a batch is generated, then trained, verl's own" and found["rows generated"] == "64"
    )


def test_the_whole_command_of_a_script(monkeypatch):
    expected = section(examine(*RUN), "The run")
    monkeypatch.setenv("RL_PLUGINS_VETO", "placeholder")  # restored at the end of the test
    pasted = "RL_PLUGINS_VETO=minpro python3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(
        f"'{w}'" for w in RUN
    )  # fmt: skip
    for words in (
        ["python3", "-m", "verl.trainer.main_ppo", *RUN, "$@"],
        ["python", "verl/trainer/main_ppo.py", *RUN],
        shlex.split(pasted.replace("\\\n", " ")),
        [pasted + " $@ 2>&1 | tee log.txt"],
    ):
        assert section(examine(*words), "The run") == expected
    assert os.environ["RL_PLUGINS_VETO"] == "minpro"


@pytest.mark.parametrize("form", ["--config-path={} --config-name=mine", "-cp {} -cn mine"])
def test_a_config_of_ones_own(form, tmp_path):
    text = f"hydra: {{searchpath: ['file://{VERL}/trainer/config']}}\ndefaults: [ppo_trainer, _self_]\n"
    (tmp_path / "mine.yaml").write_text(text + "data: {train_batch_size: 32}\n")
    words = [w for w in RUN if "train_batch_size" not in w]
    command = ["python", "-m", "verl.trainer.main_ppo", *form.format(tmp_path).split(), *words]
    assert section(examine(*command), "The run")["prompts"] == "32 per batch"
    assert "hydra refuses the command line" in problems(examine("--config-name=no_such", *words, status=1))


def test_options_of_hydra_and_of_trl_are_refused():
    assert "`--config-dir=x` is an option of hydra" in examine("--config-dir=x", status=2)
    result = CliRunner().invoke(app, ["doctor", "--host", "verl", "--methods", "vade"])
    assert result.exit_code == 2 and '"+rl_plugins.methods=[vade]"' in result.stderr


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["data.train_batch=1"], "hydra refuses the command line: .*train_batch"),
        (
            ["trainer.v1.trainer_mode=sync"],
            "trainer_mode=sync would ignore it. Set trainer.v1.trainer_mode=rl_plugins_s",
        ),
        (["trainer.use_v1=False"], "trainer.use_v1=False would ignore it"),
        (["~rl_plugins"], "hydra refuses|and no methods"),
        (["rl_plugins.methods=[vadee]"], "no method `vadee`. Did you mean `vade`"),
        (["rl_plugins.methods=[gdpo,mc_grpo]", *(f"+rl_plugins.rewards.{n}=1" for n in "ab")], "decide `advantages`"),
        (["+rl_plugins.method_params.mc_grpo.mad_epps=1"], "no parameter `mad_epps`"),
        (["+rl_plugins.method_parms.mc_grpo.mad_eps=1"], "rl_plugins.method_parms does not exist.* Did you mean"),
        (["rl_plugins.methods=[gdpo]"], "`gdpo` needs two or more reward functions"),
        (["rl_plugins.methods=[minpro]", "actor_rollout_ref.rollout.top_p=0.9"], "with top_p=0.9 the distribution"),
        (["algorithm.adv_estimator=gae"], "the critic would be trained on returns that do not belong"),
        (["algorithm.use_kl_in_reward=True"], "do not contain the KL penalty"),
        (["algorithm.filter_groups.enable=True"], "algorithm.filter_groups would replace part of it"),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], "divides by the width of the padded"),
        (["actor_rollout_ref.actor.strategy=veomni"], "strategy=veomni was never run with rl-plugins"),
        (["reward.custom_reward_function.path=nowhere.py"], "nowhere.py does not exist"),
        (["actor_rollout_ref.rollout.name=???"], "verl demands a value for actor_rollout_ref.rollout.name"),
        (["actor_rollout_ref.rollout.name=hf"], "actor_rollout_ref.rollout.name='hf'.* sglang, trtllm, vllm"),
        (["actor_rollout_ref.rollout.name=hf_cpu"], "VERL_PLATFORM=cpu"),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"], "actor.ppo_micro_batch_size_per_gpu"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=32"], "must be >= actor.ppo_mini_batch_size"),
        (["trainer.v1.trainer_mode=rl_plugins_async"], "rl_plugins_separate_async.* Did you mean `rl_plugins_sync`"),
        (["~rl_plugins", "trainer.v1.trainer_mode=asynch"], "colocate_async, separate_async, sync"),
        (["data.gen_batch_size=5"], "data.gen_batch_size=5 must divide data.train_batch_size=16"),
        (["trainer.v1.sampler.max_off_policy_strategy=skip"], "drop or wait"),
        (["reward.reward_model.enable_resource_pool=True"], "reward.reward_model.nnodes"),
    ],
)
def test_what_cannot_take_effect_is_a_problem(changes, problem):
    text = problems(examine(*RUN, *changes, status=1))
    assert re.search(problem, text, re.S), text
    assert text.startswith(" problem:"), text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["custom_reward_function.path=x.py", "custom_reward_function.name=f"], ["reward.custom_reward_function.name"]),
        (["reward_model.enable=True", "reward_model.model.path=rm"], ["reward.reward_model.model_path"]),
        (["reward_model.reward_manager=dapo"], ["reward.reward_manager.name"]),
        (["sandbox_fusion.url=http://x"], ["reward.sandbox_fusion.url"]),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gspoo"], ["loss_mode", "`gspo`"]),
        (["algorithm.adv_estimator=grop"], ["adv_estimator", "`grpo`"]),
        (["reward.reward_manager.name=batch"], ["reward.reward_manager.name", "rate_limited"]),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4096"], ["ppo_micro_batch_size_per_gpu"]),
    ],
)  # fmt: skip
def test_what_verl_would_refuse_later_or_never_read_is_a_problem(changes, words):
    said = problems(examine(*RUN, *changes, status=1))
    assert all(word in said for word in words)


def test_what_verl_asserts_where_rollouts_have_devices_of_their_own():
    """The trainer does so after Ray has started and the models are loaded; the run ends before."""
    mode = "trainer.v1.trainer_mode=rl_plugins_separate_async"
    wrong = [*RUN, mode, "reward.reward_model.enable=True", "trainer.v1.separate_async.parameter_sync_step=4"]
    keys = (
        "Set trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.rollout.nnodes=0",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
        "reward.reward_model.enable_resource_pool=False",
    )
    said = problems(examine(*wrong, status=1))
    assert all(key in said for key in keys) and "n_gpus_per_node" not in said
    with pytest.raises(ConfigError) as error:
        start.prepare(compose(wrong))
    assert all(key in str(error.value) for key in keys)
    apart = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl")
    mini = (
        mode,
        "trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "rl_plugins.methods=[dars_breadth]",
    )
    assert start.prepare(compose([*RUN, *apart, *mini])) is not None  # the method makes it the batch
    halves = ("trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.n_gpus_per_node=4")
    found = section(examine(*RUN, *apart, *halves, mode, "trainer.v1.separate_async.parameter_sync_step=1"), "The run")
    assert found["devices"] == "1 x 4 cuda; rollouts on 1 x 4 of their own, 8 together"


def test_a_critic_and_tools_are_named(tmp_path):
    tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path="
    (tmp_path / "there.yaml").write_text("tools: []")
    text = examine(*RUN[:9], "+rl_plugins.methods=[vade]", "algorithm.adv_estimator=gae", f"{tools}not_there.yaml")
    found = section(text, "The run")
    assert "critic" in found["engines"] and found["tools"] == "not_there.yaml"
    assert text.count("not_there.yaml") == 2, "in the notes, too"
    text = examine(*RUN, f"{tools}there.yaml")
    assert text.count("there.yaml") == 1 and "critic" not in text


@pytest.mark.parametrize(
    "words", [["model_engine=megatron"], [f"{STRATEGY}=megatron"], ["--config-name=ppo_megatron_trainer"]]
)
def test_an_engine_that_never_ran_is_one_problem(words):
    text = problems(examine(*words, *RUN, status=1))
    assert text.startswith(" problem:") and f"{STRATEGY}=megatron" in text


MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
ROWS = {
    "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 6, "use_dynamic_bsz": False}, "rollout": {"n": 2}},
    "trainer": {"nnodes": 2, "n_gpus_per_node": 2},
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (f"{MICRO}=3", []),  # 6 prompts of 2 rollouts over 4 devices
        (f"{MICRO}=4", ["has 3 rows per device"]),
        (f"{MICRO}=4 actor_rollout_ref.actor.use_dynamic_bsz=true", []),
        (f"{MICRO}=4 actor_rollout_ref.actor.ppo_mini_batch_size=null", []),
        (f"{MICRO}=4 trainer.nnodes=0", []),
        *((f"{old}=x", [f"Write {new}."]) for old, new in host_config.OLD_KEYS.items() if "." in old),
        (
            "reward_model.enable=true reward_model.other=null",
            ["reward_model.enable", "Write reward.reward_model.enable."],
        ),
        (
            "custom_reward_function.path=a custom_reward_function.name=b",
            ["reward.custom_reward_function.path", "_function.name"],
        ),
        ("sandbox_fusion.url=x", ["reward.sandbox_fusion.url"]),
    ],
)
def test_rules_of_verl_stop_where_they_should(change, told):
    config = OmegaConf.merge(OmegaConf.create(ROWS), OmegaConf.from_dotlist(change.split()))
    said = "\n".join(host_config.problems(Reader(config), Path("nowhere")))
    assert bool(said) == bool(told) and all(words in said for words in told)


@pytest.mark.parametrize("source", ["importlib", "register"])
def test_a_manager_that_is_imported_is_no_name_of_verl(source, tmp_path):
    managers = tmp_path / "experimental/reward_loop/reward_manager"
    managers.mkdir(parents=True)
    (managers / "one.py").write_text('@register("naive")\nclass Naive: ...\n')
    config = OmegaConf.create({"reward": {"reward_manager": {"name": "mine", "source": source}}})
    said = list(host_config.problems(Reader(config), tmp_path))
    assert said == [] if source == "importlib" else "naive" in said[0]


def test_a_reward_under_its_old_key_stops_the_audit_and_the_run(tmp_path):
    old = [*RUN, "custom_reward_function.path=mine.py"]
    with pytest.raises(ConfigError, match=r"reward\.custom_reward_function\.path"):
        run_of_words([*old, f"data.train_files={data(tmp_path / 'train.parquet', 8)}"])
    with pytest.raises(ConfigError, match=r"reward\.custom_reward_function\.path"):
        start.prepare(compose(old))


def test_names_that_modules_of_the_user_may_register_are_not_looked_at(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    assert "adv_estimator" not in examine(*RUN, "algorithm.adv_estimator=mine")


def test_all_problems_are_listed_at_once(tmp_path):
    train = data(tmp_path / "train.parquet", 8)
    text = examine(
        *RUN,
        f"data.train_files={train}",
        "trainer.v1.trainer_mode=sync",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.actor.strategy=veomni",
        "reward.custom_reward_function.path=nowhere.py",
        status=1,
    )
    assert "\n6 problems:" in text
    for words in ("would ignore it", "the critic", "KL penalty", "strategy=veomni", "nowhere.py", "has 8 prompts and"):
        assert words in problems(text)


def test_columns_of_the_data_set(tmp_path, monkeypatch):
    """Fields of `extra_info` count as columns."""
    train = f"data.train_files={data(tmp_path / 'train.parquet', 50)}"
    monkeypatch.setattr(registry.load("vade"), "needs", {"column:answer"})
    examine(*RUN, train)
    monkeypatch.setattr(registry.load("vade"), "needs", {"column:difficulty"})
    assert "the dataset has no column `difficulty` (it has: ability, answer," in problems(
        examine(*RUN, train, status=1)
    )
    assert "is no parquet file on this machine: its columns and size are not checked" in examine(*RUN)


def test_options_that_methods_set_and_make_meaningless(monkeypatch):
    monkeypatch.setattr(registry.load("mc_grpo"), "host_options", {"verl": {"actor_rollout_ref.actor.ppo_epochs": 3}})
    text = examine(*RUN, "algorithm.norm_adv_by_std_in_grpo=False")
    assert "  host options set: actor_rollout_ref.actor.ppo_epochs=3\n" in text
    assert "host options without effect: algorithm.norm_adv_by_std_in_grpo=False (mc_grpo)" in text
    assert section(text, "The run")["optimizer steps"] == "3 per batch, of 64 rows each"
    text = examine(*RUN, "actor_rollout_ref.actor.ppo_epochs=2", status=1)
    assert "ppo_epochs=3, but the config has actor_rollout_ref.actor.ppo_epochs=2" in problems(text)


def test_asynchronous_modes(monkeypatch):
    mode = "trainer.v1.trainer_mode=rl_plugins_separate_async"
    sizes = ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=5")
    apart = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl")
    text = examine(*RUN, mode, *sizes, *apart, "trainer.v1.separate_async.num_warmup_batches=2")
    found = section(text, "The run")
    assert found["prompts"] == "16 per plan, of 4 batches"
    assert found["optimizer steps"] == "1 per batch, of 16 rows each"
    assert found["whole run"] == "20 batches, 20 optimizer steps"
    assert "the engine gets new weights every 4 batches" in found["policy"]
    assert found["lag"].startswith(
        "prompts are chosen 2 batch(es) before they are trained; a rollout may span at most 8"
    )
    assert "vade decides without the rewards of that time" in found["lag"] and "mc_grpo" not in found["lag"]
    assert "lag" not in section(examine(*RUN), "The run")
    monkeypatch.setattr(registry.load("mc_grpo"), "rounds", True)
    text = examine(*RUN, "trainer.v1.trainer_mode=rl_plugins_colocate_async", status=1)
    assert "`mc_grpo` generates in rounds, and a batch of colocate_async" in problems(text)


def test_asynchronous_modes_need_equal_groups(monkeypatch):
    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(n=2) for r in plan.rows))

    monkeypatch.setattr(registry.load("mc_grpo"), "plan", plan)
    train = section(examine(*RUN), "The run")
    assert train["prompts"] == "32 per batch (verl alone: 16)"
    text = examine(*RUN, "trainer.v1.trainer_mode=rl_plugins_colocate_async", status=1)
    found = problems(text)
    assert "`mc_grpo` plans 32 prompts with [2] trained rollouts each, where 16 with 4 were asked for" in found
    assert "colocate_async takes batches out of a buffer of groups and needs one group of 4 per prompt" in found


def test_a_method_that_cannot_plan(tmp_path, monkeypatch):
    def start(self, run):
        raise ValueError("no difficulties")

    monkeypatch.setattr(registry.load("vade"), "start", start)
    text = examine(*RUN, f"data.train_files={data(tmp_path / 'train.parquet', 50)}", status=1)
    assert "Method `vade` failed in `start`: ValueError: no difficulties" in problems(text)
    found = section(examine(*RUN), "The run")
    assert found["plan"].startswith("not known without the data set") and "rows trained" not in found


def test_rewards_that_the_run_names_are_those_of_the_methods():
    """A method may name one of them; the run has no `score` then."""
    named = ("+rl_plugins.rewards.accuracy=1", "+rl_plugins.rewards.format=0.5")
    run = [*RUN[:9], "+rl_plugins.methods=[drpo]", "+rl_plugins.method_params.drpo.reward=accuracy"]
    train = ["trainer.total_training_steps=3"]
    assert examine(*run, *named, *train).endswith("No problem found.\n")
    found = section(examine(*run, *train, status=1), "The run")
    assert found, "the run is told all the same"
    told = examine(*run, *train, status=1).split("1 problem:")[1]
    assert "accuracy" in told and "reward functions of this run are: score" in told


def test_methods_that_read_the_data_set_find_it(tmp_path):
    """A column of a local file, and a field of `extra_info`; rows are read when they are asked for."""
    train = tmp_path / "train.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": str(i)}], "data_source": "x", "value": i / 64, "extra_info": {"p": 0.5}}
        for i in range(64)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), train, row_group_size=10)
    run = [
        *RUN[:9],
        "+rl_plugins.methods=[v0]",
        f"data.train_files={train}",
        "+rl_plugins.method_params.v0.prior=column",
    ]
    for column in ("value", "p"):
        text = examine(*run, f"+rl_plugins.method_params.v0.prior_column={column}")
        assert text.endswith("No problem found.\n")
    text = examine(*run, "+rl_plugins.method_params.v0.prior_column=nothing", status=1)
    assert "no column `nothing`" in problems(text)
    read = doctor.ParquetRows([train, train], "prompt")
    assert len(read) == 128 and read[75]["value"] == 11 / 64 and read[127]["p"] == 0.5
    assert read[9]["prompt"] == read[9]["raw_prompt"] == rows[9]["prompt"] and read[10]["value"] == 10 / 64
    with pytest.raises(IndexError):
        read[128]


def test_several_nodes_are_told_to_be_equal():
    assert "Several nodes: install the same rl-plugins on each" in examine(*RUN, "trainer.nnodes=2")
    assert "Several nodes" not in examine(*RUN)


# ---- list and info


def test_hosts_are_those_whose_check_a_method_can_pass():
    """A run with everything a method may want: it passes where `list` names verl, in the modes that `info` names."""
    run = [line for line in RUN[:9] if not line.startswith(("actor_rollout_ref.rollout.n=", "trainer.v1."))]
    run += ["data.max_response_length=1024", "actor_rollout_ref.actor.ppo_epochs=2"]
    run += ["actor_rollout_ref.rollout.name=hf_cpu", "actor_rollout_ref.rollout.n=8"]
    configs = {  # whether there is a reference policy: its model may be a teacher's
        (mode, kl): compose([*run, f"trainer.v1.trainer_mode={mode}", f"actor_rollout_ref.actor.use_kl_loss={kl}"])
        for mode in MODES
        for kl in (True, False)
    }
    queued = compose([*RUN[:9], "trainer.v1.trainer_mode=rl_plugins_colocate_async"])
    for name in registry.all_names():
        found = registry.load(name)
        if isinstance(found, Bundle) or "verl" not in catalog.hosts_of(found):
            continue
        beside = ("turn_control",) if {"turns", "turn_limits", "redundancy"} & catalog.example_of(found).needs else ()
        params = {n: dict(card_file(n).example_params) for n in (*beside, name)}
        settings = Settings((*beside, name), params, rewards={"correctness": 1.0, "format": 0.5})
        served, why = [], []
        for mode in MODES:
            config = configs[mode, settings.stack().teacher is None]
            try:
                capabilities.check(settings.stack(), settings, queued if "admit" in found.claims() else config)
                capabilities.check(settings.stack(), settings, config)
                served.append(mode)
            except ConfigError as e:
                why.append(str(e))
        assert served == catalog.verl_modes_of(found) and served, (name, why)
        assert f"of verl: {', '.join(served)}." in info(found)
    offered = capabilities.verl_capabilities(build_stack([]), Settings(()), queued)
    assert set(catalog.HOSTS["verl"].hooks) == set(HOOKS) - set(offered.missing_hooks)
    assert set(catalog.HOSTS["verl"].missing) <= set(offered.missing_signals)


def test_the_command_that_info_shows_is_read_back():
    """Read by Hydra's own parser; one in thirty is composed as a whole, which takes longer."""
    base = compose([])
    for number, name in enumerate(registry.all_names()):
        found = registry.load(name)
        if "verl" not in usage_of(found).hosts:
            assert "\n  verl:\n" not in info(found)
            continue
        lines = re.split(r"\n\nSource\n|\n  Diffusion \(|\n  hf_cpu is", info(found).split("\n  verl:\n")[1])[0]
        usage = usage_of(found)
        for params in usage.params.values():  # objects of the demo, for which the line has places to fill in
            for key, value in params.items():
                lines = lines.replace(f"your_module:{key}", str(value))
        overrides = shlex.split(lines.replace("\\\n", " "))[3:]
        config = copy.deepcopy(base) if number % 30 else compose(overrides)
        with open_dict(config):
            for override in OverridesParser.create().parse_overrides(overrides if number % 30 else []):
                OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
        settings = read_settings(config)
        expected = build_stack(list(usage.methods), usage.params)
        assert settings.stack().names == expected.names
        assert [m.params for m in settings.stack().methods] == [m.params for m in expected.methods]


@pytest.mark.parametrize("value", ["plain", "p(1-p)^2", "it's", 0.5, True, [1, 2], ["a b", "c"], {"k": "x,y"}])
def test_values_are_quoted_for_hydra(value):
    config = compose([f"+rl_plugins.method_params.some.key={hydra(value)}"])
    assert config.rl_plugins.method_params.some.key == value


# ---- the examples


def run_example(script: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "RL_PLUGINS_", "RAY_", "HF_"))}
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=NEVER,
        env={**clean, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "MODEL": "somebody/model", **environment},
    )


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k data")  # a space, as in many a path
    data(folder / "train.parquet", 300)
    data(folder / "test.parquet", 2)
    return folder


def test_the_example_takes_effect(gsm8k, tmp_path):
    done = run_example("gsm8k.sh", "--dry-run", "trainer.total_epochs=3", cwd=tmp_path, DATA=str(gsm8k), GPUS="4")
    assert done.returncode == 0, done.stdout + done.stderr
    found = section(done.stdout, "The run")
    assert re.search(r"^  vade +select_prompts", done.stdout, re.M)
    assert found["trainer"].startswith("rl_plugins_sync") and found["devices"] == "1 x 4 cuda"
    assert (found["prompts"], found["rows generated"], found["rows trained"]) == ("128 per batch", "512", "512 of 512")
    assert found["optimizer steps"] == "1 per batch, of 512 rows each" and found["whole run"].startswith("6 batches")
    assert found["rewards"].startswith("accuracy (weight 1), format (weight 0.2)")
    assert "not checked" not in done.stdout and not (tmp_path / "gsm8k-run").exists()


def test_the_example_with_other_methods_and_with_none(gsm8k, tmp_path):
    done = run_example("gsm8k.sh", "--dry-run", cwd=tmp_path, DATA=str(gsm8k), METHODS="vade,gdpo")
    assert done.returncode == 0 and re.search(r"^  gdpo +advantages", done.stdout, re.M), done.stdout
    done = run_example("gsm8k.sh", "data.seed=3", cwd=tmp_path, METHODS="", PYTHON="echo")
    assert "trainer.v1.trainer_mode=sync data.seed=3" in done.stdout and "+rl_plugins" not in done.stdout
    done = run_example("gsm8k.sh", "--dry-run", cwd=tmp_path, MODEL="")
    assert done.returncode == 1 and "MODEL: names the model to train" in done.stderr


def test_the_example_for_several_nodes(gsm8k, tmp_path):
    done = run_example(
        "gsm8k_multinode.sh", "--dry-run", cwd=tmp_path, DATA=str(gsm8k), NODES="2", HF_HOME="/a b", METHODS="vade"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = section(done.stdout, "The run")
    assert found["devices"] == "2 x 8 cuda" and found["prompts"] == "256 per batch"
    assert found["optimizer steps"] == "1 per batch, of 1024 rows each" and "Several nodes" in done.stdout


@pytest.mark.parametrize("script", ["gsm8k.sh", "gsm8k_multinode.sh", "laptop.sh", "reasoning_gym.sh"])
def test_help_of_an_example(script, tmp_path):
    done = run_example(script, "--help", cwd=tmp_path, MODEL="")
    assert done.returncode == 0 and f"bash examples/verl/{script}" in done.stdout and "set -euo" not in done.stdout


def test_the_example_for_a_laptop_says_what_it_sets(tmp_path):
    """What the user sets otherwise is not among it, and what he gives without a plus replaces a key with one."""
    told = run_example("laptop.sh", "--help", cwd=tmp_path).stdout
    own = ("data.seed=2", "rl_plugins.method_params.dars.n_first=2", "actor_rollout_ref.actor.ppo_epochs=3")
    done = run_example("laptop.sh", "vade", "dars", "minpro", "--dry-run", "--", *own, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("No problem found.\n"), done.stdout + done.stderr
    assert re.search(r"^  dars .*n_first=2", done.stdout, re.M)
    assert section(done.stdout, "The run")["optimizer steps"].startswith("3 per batch")
    assert list(tmp_path.iterdir()) == [tmp_path / "site"]  # of the fixture
    lines = verl_data.overrides(tmp_path, tmp_path, tmp_path, methods=["vade", "dars", "minpro"])
    chosen = set(re.findall(r"^  (\S+=.*?) *$", done.stderr, re.M))
    of_demo = {line for found in verl_data.choices(lines).values() for line in found}
    assert of_demo - chosen == {"+rl_plugins.method_params.dars.n_first=3", "actor_rollout_ref.actor.ppo_epochs=2"}
    assert chosen < of_demo
    for line in of_demo:
        assert re.split(r"[.=]", line)[-2] in told, line


@pytest.mark.parametrize("words", [["vadee"], ["vadee", "--dry-run"]])
def test_a_laptop_with_a_method_that_does_not_exist_is_told_so_in_a_line(words, tmp_path):
    done = run_example("laptop.sh", *words, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert "`vadee`" in done.stderr and "`vade`" in done.stderr


def test_the_separate_devices_of_the_page_take_effect_on_a_laptop(tmp_path, monkeypatch):
    """The command of docs/verl_cpu.md as it is printed: `tests/hosts/verl/test_cpu.py` has such a run."""
    page = (ROOT / "docs" / "verl_cpu.md").read_text()
    (command,) = re.findall(r"bash examples/verl/laptop.sh (.*separate_async \\\n(?:.*\\\n)*.*)", page)
    words = shlex.split(command.replace("\\\n", " "))
    end = words.index("--")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    demo = verl_data.overrides(tmp_path, tmp_path, tmp_path, methods=words[:end])
    found = section(examine(*verl_data.replaced(demo, words[end + 1 :])), "The run")
    assert found["trainer"].startswith("rl_plugins_separate_async") and "rollouts on 1 x 1" in found["devices"]


def test_a_refused_run_of_verl_ends_in_a_line(tmp_path):
    """The command itself, before Ray starts: nothing of hydra's traceback."""
    words = [*RUN, "rl_plugins.methods=[vadee]", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *words], capture_output=True, text=True, timeout=NEVER
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("rl-plugins: ") and "`vadee`" in done.stderr


@pytest.mark.host
def test_verl_itself_accepts_the_commands_of_the_examples(gsm8k, tmp_path):
    """verl's `validate_config` on what the scripts start, with the plugin that verl loads: the driver's whole check."""
    show = tmp_path / "show"  # stands for python
    show.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    show.chmod(0o755)
    scripts = ("gsm8k.sh", "gsm8k_multinode.sh", "reasoning_gym.sh")
    for script in scripts:
        done = run_example(script, cwd=tmp_path, DATA=str(gsm8k), PYTHON=str(show), HF_HOME="/a b")
        command = done.stdout.splitlines()
        assert command[:2] == ["-m", "verl.trainer.main_ppo"] and done.returncode == 0, done.stderr
        (tmp_path / script).write_text("\n".join(command[2:]))
    code = (
        "import sys\n"
        "import verl\n"
        "from verl.trainer.ppo.utils import need_critic, need_reference_policy\n"
        "from verl.utils.config import validate_config\n"
        "from rl_plugins.verl.config import compose\n"
        "for file in sys.argv[1:]:\n"
        "    config = compose(open(file).read().splitlines())\n"
        "    validate_config(config, need_reference_policy(config), need_critic(config))\n"
        "    print(config.trainer.nnodes, config.ray_kwargs.ray_init.runtime_env.get('env_vars'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *scripts],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=NEVER,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("methods in effect, in this order") == 3
    assert "1 {'RL_PLUGINS_METHODS': 'gdpo,trace'}" in done.stdout
    assert "1 {'RL_PLUGINS_METHODS': 'vade'}" in done.stdout
    assert "2 {'HF_HOME': '/a b', 'RL_PLUGINS_METHODS': 'vade'}" in done.stdout


def test_the_reward_of_the_example():
    score = example("gsm8k_data").compute_score
    assert score("", "so it is\n#### 1,234", "1234") == {"score": 1.2, "accuracy": 1.0, "format": 1.0}
    assert score("", "#### 3 or rather\n#### 4", "4") == {"score": 1.0, "accuracy": 1.0, "format": 0.0}
    assert score("", "#### $5", "4") == {"score": 0.2, "accuracy": 0.0, "format": 1.0}
    assert score("", "4", "4") == {"score": 0.0, "accuracy": 0.0, "format": 0.0}


def test_the_weights_of_an_example_are_those_of_its_score():
    for script, parts in (
        ("gsm8k.sh", {"accuracy": 1.0, "format": example("gsm8k_data").FORMAT_WEIGHT}),
        ("reasoning_gym.sh", {"solved": 1.0, "brief": example("reasoning_gym_data").BRIEF_WEIGHT}),
    ):
        weights = dict(re.findall(r"\+rl_plugins\.rewards\.(\w+)=([\d.]+)", (EXAMPLES / script).read_text()))
        assert {k: float(v) for k, v in weights.items()} == parts


def test_files_named_on_the_page_and_in_the_list_of_examples_exist():
    for page in ("docs/verl.md", "docs/verl_details.md", "examples/README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            if not target.startswith("http"):
                assert (ROOT / page).parent.joinpath(target).exists(), (page, target)
    for script in re.findall(r"verl/\w+\.(?:sh|py)", (ROOT / "examples" / "README.md").read_text()):
        assert (ROOT / "examples" / script).exists(), script
