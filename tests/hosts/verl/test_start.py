"""What is known before Ray starts: refusals that name the fix, options that are set, and the plugin itself."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import MARK
from messages import raises
from omegaconf import OmegaConf
from runs import FORKED
from waiting import NEVER

sys.path.insert(0, str(Path(__file__).parents[1] / "trl"))

import probes
from registering import registered

from rl_plugins.core.errors import ConfigError, StateError
from rl_plugins.verl import capabilities, compat
from rl_plugins.verl.config import compose, read_settings
from rl_plugins.verl.start import describe, prepare

FINE = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "trainer.v1.trainer_mode=rl_plugins_sync",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.nnodes=1",  # read in separate_async alone
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]


@pytest.fixture(autouse=True, scope="module")
def _probes():
    with registered(NeedsRef, NeedsEntropies, Sets, SetsNothing, NeedsColumn):
        yield


def config(*overrides: str, methods: str | None = "mc_grpo") -> Any:
    named = [] if methods is None else [f"+rl_plugins.methods=[{methods}]"]
    return compose([*FINE, *named, *overrides])


VERSION = "+rl_plugins.method_params.dora_loss.mu=version"
MAX_VERSIONS = "trainer.v1.sampler.max_off_policy_threshold"
OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload"
REFUSED = {
    "ignored by verl's own trainer": (
        ["trainer.v1.trainer_mode=sync"],
        "mc_grpo",
        r"trainer\.v1\.trainer_mode=sync.*trainer\.v1\.trainer_mode=rl_plugins_sync",
    ),
    "the mode is kept": (
        ["trainer.v1.trainer_mode=separate_async"],
        "mc_grpo",
        "trainer.v1.trainer_mode=rl_plugins_separate_async",
    ),
    "weights of rewards that verl ignores": (
        ["trainer.v1.trainer_mode=sync", "+rl_plugins.rewards.a=1"],
        "",
        r"rl_plugins\.rewards.*trainer\.v1\.trainer_mode=sync.*rl_plugins_sync",
    ),
    "legacy trainer": (["trainer.use_v1=False"], "mc_grpo", "use_v1=False"),
    "trainer without methods": ([], None, r"Add \+rl_plugins.methods"),
    "unknown method": ([], "mc_grpoo", "mc_grpo"),
    "unknown key": (
        ["+rl_plugins.method=[vade]"],
        "mc_grpo",
        r"rl_plugins\.method ",
    ),
    "unknown parameter": (["+rl_plugins.method_params.mc_grpo.mad=1"], "mc_grpo", "mad_eps"),
    "parameters of another method": (["+rl_plugins.method_params.vade.x=1"], "mc_grpo", "vade"),
    "one reward": ([], "gdpo", r"\+rl_plugins\.rewards\."),
    "rewards that are no numbers": (
        ["+rl_plugins.rewards.a=much"],
        "mc_grpo",
        "rl_plugins.rewards=",
    ),
    "top-p": (["actor_rollout_ref.rollout.top_p=0.9"], "minpro", r"top_p=0\.9"),
    "no log-probs": (
        ["actor_rollout_ref.rollout.calculate_log_probs=False"],
        "minpro",
        "calculate_log_probs=False",
    ),
    "redundancy without a program": (
        [],
        "rollart_redundancy",
        "`rollart_redundancy`",
    ),
    "redundancy beside a tree": (
        [],
        "latr,rollart_redundancy",
        "`rollart_redundancy`.*`latr`",
    ),
    "rounds ahead of time": (["trainer.v1.trainer_mode=rl_plugins_colocate_async"], "probing", "rounds"),
    "helpings ahead of time": (
        ["trainer.v1.trainer_mode=rl_plugins_separate_async"],
        "dars",
        "`dars`",
    ),
    "other groups ahead of time": (
        ["trainer.v1.trainer_mode=rl_plugins_colocate_async"],
        "v0",
        "`v0`.*colocate_async.*4",
    ),
    "stages of several numbers ahead of time": (
        ["trainer.v1.trainer_mode=rl_plugins_separate_async", "+rl_plugins.method_params.drive.rollouts=[4,4,4,8]"],
        "drive",
        "`drive`",
    ),
    "a ramp ahead of time": (
        ["trainer.v1.trainer_mode=rl_plugins_colocate_async", "+rl_plugins.method_params.brorl.ramp=[[1,8]]"],
        "brorl",
        "`brorl`",
    ),
    "batches torn by a buffer": (
        ["trainer.v1.trainer_mode=rl_plugins_colocate_async"],
        "together",
        "`together`.*colocate_async",
    ),
    "batches torn beside generation": (
        ["trainer.v1.trainer_mode=rl_plugins_separate_async"],
        "together",
        "`together`.*separate_async.*trainer.v1.trainer_mode=rl_plugins_s",
    ),
    "batches torn by a filter": (
        ["algorithm.filter_groups.enable=True"],
        "together",
        "`together`.*algorithm.filter_groups",
    ),
    "more groups than a buffer holds": (
        ["trainer.v1.trainer_mode=rl_plugins_colocate_async"],
        "dora_reuse",
        "`dora_reuse`",
    ),
    "no older weights": (
        ["trainer.v1.trainer_mode=rl_plugins_colocate_async", VERSION],
        "dora_loss",
        "`dora_loss`.*colocate_async",
    ),
    "older weights without an end": (
        ["trainer.v1.trainer_mode=rl_plugins_separate_async", VERSION, MAX_VERSIONS + "=null"],
        "dora_loss",
        "max_off_policy_threshold",
    ),
    "older weights, offloaded": (
        ["trainer.v1.trainer_mode=rl_plugins_separate_async", VERSION, OFFLOAD + "=True"],
        "dora_loss",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    ),
    "filter": (["algorithm.filter_groups.enable=True"], "mc_grpo", "filter_groups.enable=False"),
    "critic": (["algorithm.adv_estimator=gae"], "mc_grpo", "critic"),
    "KL in the reward": (["algorithm.use_kl_in_reward=True"], "mc_grpo", "use_kl_loss=True"),
    "padded width": (
        ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
        "mc_grpo",
        "loss_scale_factor",
    ),
    "engine": (["actor_rollout_ref.actor.strategy=torchtitan"], "mc_grpo", "RL_PLUGINS_ALLOW_UNTESTED"),
    "waves of another estimator": (["algorithm.adv_estimator=rloo"], "probing", "adv_estimator=grpo"),
    "whole groups": (
        ["actor_rollout_ref.actor.shuffle=True", "actor_rollout_ref.actor.ppo_mini_batch_size=64"],
        "softmax",
        "shuffle=False",
    ),
    "no reference policy": ([], "needs_ref", "use_kl_loss=True"),
    "bypass": (
        ["+algorithm.rollout_correction.bypass_mode=True"],
        "needs_entropies",
        "bypass_mode",
    ),
    "no proximal policy": (
        ["+algorithm.rollout_correction.bypass_mode=True"],
        "decoupled_ppo",
        "`decoupled_ppo`.*bypass_mode=True",
    ),
    "two weights of a row": (
        ["algorithm.rollout_correction.rollout_is=sequence"],
        "vcpo",
        "`vcpo`.*rollout_is=sequence",
    ),
    "rows of other groups": (
        ["actor_rollout_ref.actor.shuffle=True", "actor_rollout_ref.actor.ppo_mini_batch_size=64"],
        "vcpo",
        "`vcpo`.*`before_update`.*shuffle=False",
    ),
    "norms of rows": (["+rl_plugins.method_params.vcpo.gradnorm=exact"], "vcpo", "a backward pass per row"),
    "hybrid engine off": (
        ["trainer.v1.trainer_mode=rl_plugins_separate_async", "actor_rollout_ref.hybrid_engine=False"],
        "noop",
        "patches/verl/V1",
    ),
    "a group of one": (
        ["actor_rollout_ref.rollout.n=1"],
        "mc_grpo",
        "rollout.n=1.*rollout.n to 2",
    ),
    "minimum numbers": (["actor_rollout_ref.rollout.n=3"], "grpo_roc", r"`grpo_roc`.*min_correct.*2.*2"),
    "limits of v0": (["actor_rollout_ref.rollout.n=1"], "v0", "`v0`.*1"),
    "first rollouts of v0_5": (["actor_rollout_ref.rollout.n=2"], "v0_5", "`v0_5`.*`k_init`.*4"),
    "restarts": (
        [
            "trainer.v1.trainer_mode=rl_plugins_colocate_async",
            "+rl_plugins.method_params.april.max_staleness=1",
        ],
        "april",
        "`april`",
    ),
    "admission without generation ahead": (
        [],
        "areal_admission",
        "`areal_admission`.*`admit`.*trainer_mode=rl_plugins_colocate_async.*rl_plugins_separate_async",
    ),
    "a limit on groups in the making": (
        [
            "trainer.v1.trainer_mode=rl_plugins_separate_async",
            "+rl_plugins.method_params.areal_admission.max_concurrent=8",
        ],
        "areal_admission",
        "`max_concurrent`.*8.*num_warmup_batches",
    ),
    "a reward nobody gives": (
        ["+rl_plugins.method_params.drpo.reward=right", "+rl_plugins.rewards.accuracy=1"],
        "drpo",
        "`drpo`.*`reward`.*'right'",
    ),
    "rows of a rollout": (
        ["data.train_batch_size=2", "+rl_plugins.method_params.m_grpo_rollout.max_calls=8"],
        "m_grpo_rollout",
        "9.*4.*36.*8",
    ),
    "masked diffusion": ([], "mdlm", "`ass`.*MaskedGRPOTrainer"),
    "two methods, one hook": ([], "mc_grpo,one", "both decide `advantages`"),
}


class NeedsRef(probes.Probe):
    name = "needs_ref"
    needs = frozenset({"ref_logprobs"})

    def observe(self, rollouts, tokens, stats):
        pass


class NeedsEntropies(NeedsRef):
    name = "needs_entropies"
    needs = frozenset({"entropies"})


class Sets(NeedsRef):
    """Sets an option of verl's, and one that does not exist."""

    name = "sets"
    needs = frozenset()
    host_options = {"verl": {"actor_rollout_ref.actor.ppo_epochs": 2}}


class SetsNothing(Sets):
    name = "sets_nothing"
    host_options = {"verl": {"actor_rollout_ref.actor.ppo_epoch": 2}}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_ray_starts(case: str) -> None:
    overrides, methods, message = REFUSED[case]
    overrides = [o.removeprefix("+") if "bypass_mode" in o else o for o in overrides]
    with raises(ConfigError, match=message):
        prepare(config(*overrides, methods=methods))


@pytest.mark.parametrize("proximal", ["loglinear", "linear", "rollout"])
def test_a_run_without_old_log_probs_has_a_proximal_policy(proximal: str) -> None:
    """The option with which verl leaves out its pass."""
    chosen = f"+rl_plugins.method_params.decoupled_ppo.proximal={proximal}"
    prepare(config("algorithm.rollout_correction.bypass_mode=True", chosen, methods="decoupled_ppo"))


def test_a_missing_chat_template_is_told_before_ray_starts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    model = [f"actor_rollout_ref.model.path={tmp_path}"]
    agent = ["+rl_plugins.method_params.turn_control.environment='rl_plugins.lab.demo.environments:Grid'"]
    for methods, more in (("mc_grpo", []), ("turn_control", agent)):
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
        prepare(config(*model, *more, methods=methods))
        (tmp_path / "tokenizer_config.json").write_text("{}")
        with raises(ConfigError, match="custom_chat_template"):
            prepare(config(*model, *more, methods=methods))
        prepare(config(*model, *more, "actor_rollout_ref.model.custom_chat_template=x", methods=methods))
    prepare(config("actor_rollout_ref.model.path=somebody/model"))


def test_all_problems_are_told_at_once() -> None:
    with raises(ConfigError) as e:
        prepare(config("algorithm.use_kl_in_reward=True", "algorithm.filter_groups.enable=True", methods="mc_grpo"))
    assert "filter_groups" in str(e.value) and "use_kl_in_reward" in str(e.value)
    words = [
        "algorithm.use_kl_in_reward=True",
        "+rl_plugins.count_costs=7",
        "+rl_plugins.method_params={vade: {nope: 1}}",
    ]
    with raises(ConfigError) as e:
        prepare(config(*words, "trainer.v1.trainer_mode=sync", methods="vade,linear_ts,nosuch,mc_grpo"))
    for word in (
        "use_kl_in_reward",
        "count_costs",
        "`nope`",
        "`column`",
        "`vade` and `linear_ts`",
        "`nosuch`",
        "=sync",
    ):
        assert word in str(e.value)


def test_options_are_set_for_what_methods_need(capsys: pytest.CaptureFixture[str]) -> None:
    c = config(methods="minpro,corridor")
    assert not c.actor_rollout_ref.actor.calculate_entropy
    prepare(c)
    assert c.actor_rollout_ref.actor.calculate_entropy
    printed = capsys.readouterr().out
    assert "rl-plugins: methods in effect, in this order" in printed
    assert "host options set: actor_rollout_ref.actor.calculate_entropy=True" in printed


def test_a_tracker_file_that_names_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """A kill leaves it empty where verl was writing it; verl would end with a ValueError, or silently begin anew."""
    tracker, where = tmp_path / "latest_checkpointed_iteration.txt", f"trainer.default_local_dir={tmp_path}"
    assert prepare(config(where)) is not None, "nothing was saved yet"
    for step in (2, 4, 6):
        (tmp_path / f"global_step_{step}").mkdir()
        if step < 6:
            (tmp_path / f"global_step_{step}" / "data.pt").touch()
    wrong = {"": "holds '' in place of a step: a save was cut off", "8": "names step 8, and there is no"}
    for text, problem in wrong.items():
        tracker.write_text(text)
        with raises(StateError, match=rf"{problem}.*2.*4"):
            prepare(config(where))
        assert prepare(config(where, "trainer.resume_mode=disable")) is not None
        assert prepare(config(where, "trainer.v1.trainer_mode=sync", methods=None)) is None, "verl alone"
    tracker.write_text("4")
    assert prepare(config(where)) is not None


def test_host_options_of_methods() -> None:
    c = config(methods="sets")
    prepare(c)
    assert c.actor_rollout_ref.actor.ppo_epochs == 2
    with raises(ConfigError, match="actor_rollout_ref.actor.ppo_epochs.*3"):
        prepare(config("actor_rollout_ref.actor.ppo_epochs=3", methods="sets"))
    with raises(ConfigError, match="ppo_epoch=2"):
        prepare(config(methods="sets_nothing"))


def test_values_that_only_a_newer_verl_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the source of verl 0.9.0 lacks. There `april` would end in a TypeError after everything was started."""
    real = compat.states
    lacks = "_add_async_warmup_batches"
    monkeypatch.setattr(compat, "states", lambda owner, name, root=None: name != lacks and real(owner, name, root))
    warmup, threshold = "trainer.v1.colocate_async.num_warmup_batches", capabilities.MAX_VERSIONS
    cases = ((warmup, 0.5), (warmup, 1), (threshold, None), (threshold, 8), ("data.seed", None))
    assert [compat.needs_newer(*case) for case in cases] == [True, False, True, False, False]
    mode = "trainer.v1.trainer_mode=rl_plugins_colocate_async"
    with raises(ConfigError, match=r"(?s)max_off_policy_threshold is None.*num_warmup_batches is 0\.5"):
        prepare(config(mode, "+rl_plugins.method_params.april.over_sampling=1.5", methods="april"))


def test_options_without_effect_are_listed() -> None:
    c = config("actor_rollout_ref.actor.clip_ratio_high=0.28", methods="minpro")
    settings = read_settings(c)
    assert settings is not None
    text = describe(settings.stack(), {}, c)
    assert "host options without effect: actor_rollout_ref.actor.clip_ratio_high=0.28 (minpro)" in text


def test_the_average_has_no_effect_on_a_sum_of_a_methods_own() -> None:
    """Unless verl adds a term of its own, which it averages."""
    agg = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    for more, methods, told in (
        ([], "drpo", True),
        ([], "minpro", False),
        (["actor_rollout_ref.actor.use_kl_loss=True"], "drpo", False),
        (["actor_rollout_ref.actor.entropy_coeff=0.1"], "drpo", False),
    ):
        c = config(agg, *more, methods=methods)
        settings = read_settings(c)
        assert settings is not None
        text = describe(settings.stack(), {}, c)
        assert (f"without effect: {agg} (drpo brings its own sum)" in text) == told


def test_without_the_node_nothing_is_touched() -> None:
    c = compose(["algorithm.adv_estimator=grpo"])
    before = OmegaConf.to_yaml(c)
    prepare(c)
    assert OmegaConf.to_yaml(c) == before and read_settings(c) is None


def test_no_methods_is_the_host_alone() -> None:
    c = config(methods="")
    before = OmegaConf.to_yaml(c)
    prepare(c)
    assert OmegaConf.to_yaml(c) == before


def test_rewards_are_ours_or_those_of_verl() -> None:
    ours = read_settings(config("+rl_plugins.rewards.a=1", "+rl_plugins.rewards.b=0.5"))
    theirs = read_settings(config("+algorithm.gdpo_reward_keys=[a,b]", "+algorithm.gdpo_reward_weights=[1,0.5]"))
    assert ours is not None and theirs is not None
    assert dict(ours.rewards) == dict(theirs.rewards) == {"a": 1.0, "b": 0.5}


def test_columns_of_parquet_files(tmp_path: Path) -> None:
    from datasets import Dataset

    file = tmp_path / "train.parquet"
    Dataset.from_list([{"prompt": "x", "extra_info": {"level": 1}, "reward_model": {"ground_truth": "1"}}]).to_parquet(
        str(file)
    )
    read = capabilities.Reader(config(f"data.train_files={file}"))
    assert set(capabilities.dataset_columns(read) or ()) == {
        "prompt",
        "extra_info",
        "level",
        "reward_model",
        "ground_truth",
    }
    with raises(ConfigError, match="`answer`"):
        prepare(config(f"data.train_files={file}", methods="needs_column"))


class NeedsColumn(NeedsRef):
    name = "needs_column"
    needs = frozenset({"column:answer"})


def test_untested_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "verl_version", lambda: "0.10.0")
    with raises(ConfigError, match=r"0\.10\.0.*0\.9\.0.*0\.10"):
        compat.check_verl_version()
    monkeypatch.setenv("RL_PLUGINS_ALLOW_UNTESTED", "1")
    compat.check_verl_version()


# ---- the plugin in processes of its own


@pytest.fixture(scope="module")
def libraries() -> Iterator[dict[str, str]]:
    """A process that has imported the libraries; the environment that names it."""
    if len(FORKED) == 1:
        yield {}
        return
    mark = {MARK: uuid.uuid4().hex}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(FORKED, env={**os.environ, "HF_HUB_OFFLINE": "1", **mark}, **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        yield mark
        process.stdin.close()


def python(code: str, folder: Path, libraries: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **libraries, **environment}
    for name in {"VERL_PLATFORM", "RL_PLUGINS_METHODS"} - set(environment):
        env.pop(name, None)
    (folder / "code.py").write_text(textwrap.dedent(code))
    return subprocess.run(
        [*FORKED, "code.py"],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
        timeout=NEVER,
    )


@pytest.mark.host
def test_the_plugin_is_cheap_and_leaves_verl_alone(tmp_path: Path, libraries: dict[str, str]) -> None:
    """Without methods: no module of the adapter but the two small ones, verl's own trainers as they are."""
    done = python(
        """
        import sys
        import verl
        ours = sorted(m for m in sys.modules if m.startswith("rl_plugins"))
        assert ours == ["rl_plugins", "rl_plugins.verl", "rl_plugins.verl.imports", "rl_plugins.verl.plugin"], ours
        from rl_plugins.verl import imports, plugin
        waiting = {name: list(actions) for name, actions in imports._finder.waiting.items()}
        before, calls = set(sys.modules), 0
        def count(frame, event, argument):
            global calls
            calls += event in ("call", "c_call")
        sys.setprofile(count)
        plugin.load()
        sys.setprofile(None)
        assert calls < 25 and set(sys.modules) == before, (calls, "a second time is nothing")  # two variables, a list
        assert imports._finder.waiting == waiting
        import rl_plugins.verl.loss  # what a training worker needs
        assert "rl_plugins.verl.agent_loop" not in sys.modules
        import rl_plugins.verl.agent_loop  # whoever imports it first
        from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
        assert _agent_loop_registry["rl_plugins_planned"]["_target_"] == "rl_plugins.verl.agent_loop.PlannedAgentLoop"
        from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
        assert get_trainer_cls("sync") is PPOTrainerSync
        for name in ("sync", "colocate_async", "separate_async"):
            assert get_trainer_cls(f"rl_plugins_{name}").methods_mode == name
        from verl.workers.engine.base import BaseEngine
        assert not hasattr(BaseEngine.train_batch, "rl_plugins")
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
        assert not [n for n in (*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY) if "rl_plugins" in n]
        print("fine")
        """,
        tmp_path,
        libraries,
    )
    assert done.stdout.endswith("fine\n"), done.stderr[-3000:]


@pytest.mark.host
def test_a_name_that_is_taken_is_an_error(tmp_path: Path, libraries: dict[str, str]) -> None:
    done = python(
        """
        import verl
        from rl_plugins.verl import imports
        def first(module):
            class Other(module.PPOTrainer): pass
            module.register_trainer("rl_plugins_sync")(Other)
        imports.after_import("verl.trainer.ppo.v1.trainer_base", first)
        import verl.trainer.ppo.v1
        """,
        tmp_path,
        libraries,
    )
    assert "Trainer name 'rl_plugins_sync' is already registered to Other" in done.stderr
    done = python(
        """
        import verl
        from rl_plugins.verl import imports
        imports.after_import(
            "verl.experimental.agent_loop.agent_loop",
            lambda m: m._agent_loop_registry.update(rl_plugins_planned={"_target_": "their.Loop"}),
        )
        import verl.experimental.agent_loop
        """,
        tmp_path,
        libraries,
    )
    assert "ConfigError: The agent loop `rl_plugins_planned` is registered in verl by" in done.stderr


@pytest.mark.host
def test_a_plugin_that_fails_is_loud(tmp_path: Path, libraries: dict[str, str]) -> None:
    """verl logs it at DEBUG level; we print it, and a run that names methods ends before Ray starts."""
    done = python(
        """
        import rl_plugins.verl.imports as imports
        place = imports.after_import
        def broken(module, action):
            if module == "verl.trainer.ppo.v1":
                raise OSError("disk on fire")
            place(module, action)
        imports.after_import = broken
        import verl
        from omegaconf import OmegaConf
        from verl.utils.config import validate_config
        config = OmegaConf.create({"rl_plugins": {"methods": ["vade"]}})
        validate_config(config, use_reference_policy=False, use_critic=False)
        """,
        tmp_path,
        libraries,
    )
    assert "[rl-plugins] the verl plugin could not be loaded in process" in done.stderr
    assert "whose verl plugin could not be loaded (OSError: disk on fire)" in done.stderr.splitlines()[-1]


@pytest.mark.host
def test_models_are_built_beside_trl_without_its_value_head(tmp_path: Path, libraries: dict[str, str]) -> None:
    """verl 0.9.1 asks TRL for a class that TRL 1.16 does not have; stock, every model build ends there. Where no
    methods are named that stays as it is."""
    code = """
        import sys
        import verl
        from transformers import LlamaConfig, LlamaForCausalLM
        from verl.models.transformers.monkey_patch import apply_monkey_patch
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                             num_attention_heads=1, num_key_value_heads=1))
        apply_monkey_patch(model, use_remove_padding=False)
        assert "trl" not in sys.modules
        print("fine")
        """
    assert python(code, tmp_path, libraries, RL_PLUGINS_METHODS="vade").stdout.endswith("fine\n")
    assert python(code, tmp_path, libraries, VERL_PLATFORM="cpu").stdout.endswith("fine\n")
    pytest.importorskip("trl", reason="TRL is not installed")
    stock = python(code, tmp_path, libraries)
    assert "AutoModelForCausalLMWithValueHead" in stock.stderr and "fine" not in stock.stdout


@pytest.mark.host
def test_without_methods_nothing_of_verl_is_changed(tmp_path: Path, libraries: dict[str, str]) -> None:
    """In a process with the plugin: of all modules it knows, only the guards are wrappers, and they hand on."""
    done = python(
        """
        import importlib, os, sys
        from rl_plugins.verl import imports
        seen = []
        def spy(owner, name):
            host = getattr(owner, name)
            setattr(owner, name, lambda *args, **kwargs: seen.append((name, args, kwargs)) or "answer of verl")
            return host
        imports.after_import("verl.utils.config", lambda m: spy(m, "validate_config"))
        imports.after_import("verl.trainer.ppo.v1.trainer_base", lambda m: spy(m.PPOTrainer, "__init__"))
        import verl
        from rl_plugins.verl import plugin
        known = [plugin.CONFIG, plugin.TRAINER_BASE, plugin.TRAINERS,
                 plugin.MONKEY_PATCH, plugin.AGENT_LOOP, "verl.workers.engine.base", "verl.workers.rollout.replica",
                 "verl.workers.rollout.base", "verl.checkpoint_engine.base", "verl.utils.distributed",
                 "verl.utils.fsdp_utils", "verl.utils.model", "verl.workers.engine.fsdp.transformer_impl",
                 "verl.trainer.ppo.v1.replay_buffer", "verl.plugin.platform", "verl.trainer.ppo.core_algos",
                 "verl.experimental.agent_loop.agent_loop"]
        ours = os.path.dirname(sys.modules["rl_plugins"].__file__)
        def is_ours(value):
            code = getattr(value, "__code__", None)
            return (code is not None and code.co_filename.startswith(ours)) or (
                str(getattr(value, "__module__", "")).startswith("rl_plugins"))
        changed = set()
        for name in known:
            module = importlib.import_module(name)
            for key, value in vars(module).items():
                if is_ours(value):
                    changed.add(f"{name}.{key}")
                if isinstance(value, type) and value.__module__.startswith("verl"):
                    changed |= {f"{value.__qualname__}.{k}" for k, v in vars(value).items() if is_ours(v)}
        assert changed == {"verl.utils.config.validate_config", "PPOTrainer.__init__"}, changed
        from verl.models.transformers import monkey_patch
        from verl.utils import import_utils
        assert monkey_patch.is_trl_available is import_utils.is_trl_available

        # the guards hand on what they were given, and change nothing of it
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import PPOTrainerSync
        from verl.utils.config import validate_config
        config = OmegaConf.create({"trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}}, "data": {"seed": 1}})
        before = OmegaConf.to_yaml(config)
        assert validate_config(config, True, use_critic=False) == "answer of verl"
        trainer = object.__new__(PPOTrainerSync)
        type(trainer).__init__(trainer, config=config)
        first, second = seen
        assert first == ("validate_config", (config, True), {"use_critic": False}) and first[1][0] is config
        assert second == ("__init__", (trainer,), {"config": config}) and second[2]["config"] is config
        assert OmegaConf.to_yaml(config) == before and vars(trainer) == {}
        assert "RL_PLUGINS_METHODS" not in os.environ

        # registries: names of ours more, the others as they are
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
        from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
        for registry in (TRAINER_REGISTRY, _agent_loop_registry):
            theirs = {k: v for k, v in registry.items() if not k.startswith("rl_plugins")}
            assert theirs and "rl_plugins" not in repr(theirs), theirs
        from verl.plugin.platform import PlatformRegistry
        assert "cpu" not in PlatformRegistry.registered_names()
        print("fine")
        """,
        tmp_path,
        libraries,
    )
    assert done.stdout.endswith("fine\n"), done.stderr[-3000:]


def test_worker_processes_are_told_of_methods() -> None:
    """By the variables verl hands to Ray, and only where methods are named."""
    c = config(methods="mc_grpo,vade")
    prepare(c)
    assert c.ray_kwargs.ray_init.runtime_env.env_vars == {"RL_PLUGINS_METHODS": "mc_grpo,vade"}
    assert "RL_PLUGINS_METHODS" not in os.environ
    c = config("+ray_kwargs.ray_init.runtime_env.env_vars.OTHER=1")
    prepare(c)
    assert c.ray_kwargs.ray_init.runtime_env.env_vars == {"OTHER": 1, "RL_PLUGINS_METHODS": "mc_grpo"}
    c = config(methods="")
    prepare(c)
    assert OmegaConf.select(c, "ray_kwargs.ray_init.runtime_env.env_vars") is None


def test_methods_are_built_and_checked_once_per_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trainer of ours; one of verl's that a program builds is checked by the guard."""
    from verl.trainer.ppo.v1 import PPOTrainerSync

    from rl_plugins.verl.config import Settings
    from rl_plugins.verl.trainer import MethodsSync

    built, checked = [], []
    stack, check = Settings.stack, capabilities.check
    monkeypatch.setattr(Settings, "stack", lambda self, refuse=True: built.append(1) or stack(self, refuse))
    monkeypatch.setattr(capabilities, "check", lambda *args: checked.append(1) or check(*args))

    class Stop(Exception):
        pass

    def built_by_verl(self: Any) -> None:
        raise Stop

    monkeypatch.setattr(PPOTrainerSync, "_build_replay_buffer", built_by_verl)
    with pytest.raises(Stop):
        MethodsSync(config())
    assert (built, checked) == ([1], [1])
    with raises(ConfigError, match="would ignore it"):
        PPOTrainerSync(config("trainer.v1.trainer_mode=sync"))
    with raises(ConfigError, match="no methods"):
        MethodsSync(config(methods=None))


def test_names_that_verl_does_not_promise_are_where_they_are() -> None:
    assert compat.moved_symbols() == []
    assert len({(p.owner, p.name) for p in compat.PINNED}) == len(compat.PINNED)
    assert all(p.why for p in compat.PINNED)


def test_the_start_refuses_a_verl_whose_names_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    own = next(p for p in compat.PINNED if p.name == "_balance_batch")
    changed = (dataclasses.replace(own, parameters=("batch", "more")), dataclasses.replace(own, name="_vanished"))
    monkeypatch.setattr(compat, "PINNED", changed)
    with raises(ConfigError, match=r"PPOTrainer._balance_batch"):
        prepare(config())
    monkeypatch.setenv("RL_PLUGINS_ALLOW_UNTESTED", "1")
    prepare(config())
