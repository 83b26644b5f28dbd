"""The patches in patches/verl apply to the installed verl release and do what they say.

`verl_host_script.py` runs twice in a subprocess, on the stock verl and on a copy with all patches applied. Each test
shows the fault (or the missing seam) on the first and its absence on the second, and what has to stay as it was.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import NEVER

pytest.importorskip("verl", reason="the patches are checked against an installed verl")

PATCHES = sorted(
    (Path(__file__).parents[2] / "patches" / "verl").glob("V*.patch"), key=lambda p: int(p.name.split("-")[0][1:])
)
VERL_VERSION = "0.9.1"
NEEDS = {"V5": "V4"}  # every other patch applies alone
FIELDS = ["uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"]

pytestmark = [
    pytest.mark.skipif(
        importlib.metadata.version("verl") != VERL_VERSION, reason=f"the patches are diffs against verl {VERL_VERSION}"
    ),
    pytest.mark.skipif(shutil.which("git") is None, reason="git is needed to apply the patches"),
]


def number(patch: Path) -> str:
    """Return "V4" of "V4-some-title.patch"."""
    return patch.name.split("-")[0]


def copy_verl(directory: Path, only: set[str] | None = None) -> Path:
    """Copy the installed `verl` package, or some files of it, into `directory`, without importing it."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    if only is None:
        shutil.copytree(package, directory / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in only or ():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package.parent / name, directory / name)
    return directory


def touched(patch: Path) -> set[str]:
    """Return the files that a patch changes."""
    return set(re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE))


def apply(patch: Path, directory: Path) -> None:
    """Check and apply one patch (git allows no fuzz); git must not look for a repository above `directory`."""
    env = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    env["GIT_CEILING_DIRECTORIES"] = str(directory.resolve().parent)
    for option in (["--check"], []):
        command = ["git", "apply", *option, "-p1", str(patch)]
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"


def run_host(directory: Path, python_path: Path | None) -> dict[str, Any]:
    """Run the script with `python_path` first on the import path and return what it measured."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(python_path)] if python_path else []
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    env.update(CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=os.pathsep.join(paths))
    for name in ("VERL_LOGGING_LEVEL", "VERL_USE_EXTERNAL_MODULES", "VERL_ENGINE_VENDOR"):
        env.pop(name, None)
    command = [sys.executable, str(Path(__file__).with_name("verl_host_script.py")), str(directory)]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=NEVER)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((directory / "results.json").read_text())


@pytest.fixture(scope="module")
def patched_verl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds `verl` with all patches applied in order."""
    directory = copy_verl(tmp_path_factory.mktemp("patched_verl"))
    for patch in PATCHES:
        apply(patch, directory)
    return directory


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_host(tmp_path_factory.mktemp("stock_run"), None)


@pytest.fixture(scope="module")
def patched(patched_verl: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = run_host(tmp_path_factory.mktemp("patched_run"), patched_verl)
    assert Path(results["host"]).is_relative_to(patched_verl.resolve())
    return results


def test_the_patches_are_these() -> None:
    numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 17]
    assert [number(patch) for patch in PATCHES] == [f"V{n}" for n in numbers]


@pytest.mark.parametrize("patch", PATCHES, ids=number)
def test_patch_applies_alone(patch: Path, tmp_path: Path) -> None:
    base = [other for other in PATCHES if number(other) == NEEDS.get(number(patch))]
    directory = copy_verl(tmp_path, set().union(*map(touched, [*base, patch])))
    for other in base:
        apply(other, directory)
    before = {name: (directory / name).read_text() for name in touched(patch)}
    apply(patch, directory)
    for name, old in before.items():
        text = (directory / name).read_text()
        assert text != old
        if name.endswith(".py"):
            compile(text, name, "exec")
        assert max(map(len, set(text.splitlines()) - set(old.splitlines())), default=0) <= 120
    header = patch.read_text().split("diff --git", 1)[0]
    assert re.match(r"Subject: \[[a-z0-9_, ]+\] (fix|feat): .+\n", header) and "How tested" in header


def test_patches_apply_in_the_reverse_order(tmp_path: Path) -> None:
    """No patch needs the lines of another, but V5 those of V4."""
    directory = copy_verl(tmp_path, set().union(*map(touched, PATCHES)))
    order = [patch for patch in reversed(PATCHES) if number(patch) not in ("V4", "V5")]
    order += [patch for patch in PATCHES if number(patch) in ("V4", "V5")]
    for patch in order:
        apply(patch, directory)


@pytest.mark.host
def test_the_default_configuration_has_two_new_keys_only(stock: dict, patched: dict) -> None:
    before, after = stock["CONFIG"]["default"], patched["CONFIG"]["default"]
    assert after["trainer"]["v1"]["sampler"].pop("poll_interval") == 2.0
    assert after["actor_rollout_ref"]["actor"]["policy_loss"].pop("extra_fields", "absent") is None
    assert after == before


@pytest.mark.host
def test_the_generated_configurations_are_current(stock: dict, patched: dict) -> None:
    assert len(patched["CONFIG"]["generated_is_current"]) == 4
    assert all(patched["CONFIG"]["generated_is_current"].values())
    assert all(stock["CONFIG"]["generated_is_current"].values())


@pytest.mark.host
def test_v1_logging_does_not_end_the_setup(stock: dict, patched: dict) -> None:
    for case in ("separate_async", "sglang"):
        assert stock["V1"][case] == "TypeError: Logger._log() got an unexpected keyword argument 'flush'"
        assert patched["V1"][case] == "ok"
    assert patched["V1"]["mode"] == "trainer"


@pytest.mark.host
@pytest.mark.parametrize("parameter", ["sharded", "plain"])
def test_v2_the_snapshot_does_not_follow_the_model(stock: dict, patched: dict, parameter: str) -> None:
    moved = stock["V2"]["model_moved"][parameter]
    assert moved > 1.0 and patched["V2"]["model_moved"][parameter] == moved
    assert stock["V2"]["snapshot_moved"][parameter] == moved
    assert stock["V2"]["restored_error"][parameter] == moved  # nothing was restored
    assert patched["V2"]["snapshot_moved"][parameter] == 0.0
    assert patched["V2"]["restored_error"][parameter] == 0.0


@pytest.mark.host
def test_v3_a_model_is_built_beside_a_trl_without_the_class(stock: dict, patched: dict) -> None:
    before, after = stock["V3"], patched["V3"]
    if int(before["trl"].split(".")[1]) < 16:
        pytest.skip("the installed TRL still has the value head class")
    missing = "ImportError: cannot import name 'AutoModelForCausalLMWithValueHead'"
    for case in ("installed", "load_valuehead_model", "patch_valuehead_model"):
        assert before[case].startswith(missing)
    assert after["installed"] == after["patch_valuehead_model"] == "ok"
    assert after["load_valuehead_model"].startswith("RuntimeError: model(")
    assert "is not a value head model, please install trl" in after["load_valuehead_model"]
    assert after["ignored_on_save"] == ["pretrained_model.w"]


@pytest.mark.host
def test_v3_a_trl_with_the_class_is_used_as_before(stock: dict, patched: dict) -> None:
    for results in (stock["V3"], patched["V3"]):
        assert results["without_trl"] == "ok"
        for module in ("trl", "trl.experimental.ppo"):
            assert results[f"class_in_{module}"] == "ok"
            assert results[f"state_dict_of_{module}"] is True


@pytest.mark.host
def test_v4_gdpo_in_v1_equals_gdpo_in_the_legacy_trainer(stock: dict, patched: dict) -> None:
    assert stock["V4"]["v1"].startswith("KeyError") and "prompts" in stock["V4"]["v1"]
    assert patched["V4"]["v1"] == "ok" and patched["V4"]["error"] == 0.0
    assert patched["V4"]["v0"] == stock["V4"]["v0"]
    assert len({round(value, 3) for value in patched["V4"]["v0_values"]}) == 6  # six different advantages


@pytest.mark.host
def test_v4_reward_components_that_are_not_there(stock: dict, patched: dict) -> None:
    assert patched["V4"]["missing_component"] == "AssertionError: GDPO reward key 'layout' is missing in some samples."
    assert "'nothing' not found" in patched["V4"]["unknown_component"]
    assert "'accuracy', 'layout'" in patched["V4"]["unknown_component"]
    assert "prompts" in stock["V4"]["missing_component"] and "prompts" in stock["V4"]["unknown_component"]


@pytest.mark.host
@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus"])
def test_v4_v5_other_estimators_read_and_compute_what_they_did(stock: dict, patched: dict, estimator: str) -> None:
    assert patched["V4"]["fields"][estimator] == stock["V4"]["fields"][estimator] == FIELDS
    assert patched["V4"]["digests"][estimator] == stock["V4"]["digests"][estimator]


@pytest.mark.host
def test_v5_an_estimator_that_declares_them_gets_the_fields(stock: dict, patched: dict) -> None:
    assert stock["V5"]["declared"]["arguments"] == ["token_level_rewards"]
    assert stock["V5"]["declared"]["fields"] == FIELDS
    after = patched["V5"]["declared"]
    assert after["arguments"] == ["batch", "non_tensor_batch", "token_level_rewards"]
    assert after["fields"] == [*FIELDS, "extra_fields"]
    assert after["columns"]["task"] == [f"task{i}" for i in range(6)]
    assert after["columns"]["accuracy"] == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert after["columns"]["rare"] == [None, None, None, None, 4, None]
    assert after["columns"]["uid"] == ["prompt0"] * 3 + ["prompt1"] * 3


@pytest.mark.host
def test_v5_under_the_legacy_trainer(stock: dict, patched: dict) -> None:
    assert stock["V5"]["legacy"]["arguments"] == ["token_level_rewards"]
    assert patched["V5"]["legacy"]["arguments"] == ["batch", "non_tensor_batch", "token_level_rewards"]
    assert patched["V5"]["legacy"]["columns"]["layout"] == [0.2, 0.8, 0.5, 0.1, 0.9, 0.3]


@pytest.mark.host
@pytest.mark.parametrize("estimator", ["fixed", "open_ended"])
def test_v5_other_signatures_are_called_as_before(stock: dict, patched: dict, estimator: str) -> None:
    for results in (stock["V5"][estimator], patched["V5"][estimator]):
        assert results["arguments"] == ["token_level_rewards"]
        assert results["fields"] == FIELDS


@pytest.mark.host
def test_v6_a_plugin_that_fails_is_reported(stock: dict, patched: dict) -> None:
    for policy in ("auto", "broken"):
        assert stock["V6"][policy]["warnings"] == []
        assert patched["V6"][policy]["warnings"] == ["Failed to load plugin 'broken' no such chip"]
    assert all(run["import"] == "ok" for results in (stock, patched) for run in results["V6"].values())


@pytest.mark.host
def test_v6_a_name_that_is_not_installed_is_reported(stock: dict, patched: dict) -> None:
    assert stock["V6"]["good,absent"]["warnings"] == []
    (warning,) = patched["V6"]["good,absent"]["warnings"]
    assert "not installed: ['absent']" in warning and "['MyPlug', 'broken', 'good']" in warning


@pytest.mark.host
def test_v6_a_plugin_is_selected_by_its_name(stock: dict, patched: dict) -> None:
    assert stock["V6"]["MyPlug"]["loaded"] == []
    assert patched["V6"]["MyPlug"]["loaded"] == ["MyPlug"]
    assert patched["V6"]["myplug,good"]["loaded"] == ["MyPlug", "good"]
    for results in (stock["V6"], patched["V6"]):
        assert results["auto"]["loaded"] == ["MyPlug", "good"]
        assert results["none"] == {"import": "ok", "loaded": [], "warnings": []}
        assert results["good"] == {"import": "ok", "loaded": ["good"], "warnings": []}


@pytest.mark.host
def test_v7_outputs_with_their_own_reward(stock: dict, patched: dict) -> None:
    assert stock["V7"]["own_reward"] == {"status": "failure", "rewards": [], "extra": []}
    assert patched["V7"]["own_reward"]["status"] == "finished"
    assert patched["V7"]["own_reward"]["rewards"] == [0.5, 0.5]
    told = {"status": "finished", "rewards": [0.5, 0.5], "extra": [{"acc": 1.0}] * 2}
    assert stock["V7"]["own_reward_and_info"] == patched["V7"]["own_reward_and_info"] == told


@pytest.mark.host
@pytest.mark.parametrize(("case", "kept"), [("policy_loss", "vanilla_is_kept"), ("agent_loop", "agent_loop_is_kept")])
def test_v8_a_taken_name_is_refused(stock: dict, patched: dict, case: str, kept: str) -> None:
    assert stock["V8"][case] == "ok" and stock["V8"][kept] is False
    assert patched["V8"][case].startswith("ValueError") and "already been registered" in patched["V8"][case]
    assert patched["V8"][kept] is True


@pytest.mark.host
def test_v8_what_stays_allowed(stock: dict, patched: dict) -> None:
    for results in (stock["V8"], patched["V8"]):
        for case in ("again", "new_policy_loss", "agent_loop_again", "new_agent_loop"):
            assert results[case] == "ok"


@pytest.mark.host
def test_v8_the_error_lists_the_estimators(stock: dict, patched: dict) -> None:
    first_words = "ValueError: Unknown advantage estimator simply: nothing"
    assert stock["V8"]["unknown_estimator"] == first_words
    assert patched["V8"]["unknown_estimator"].startswith(first_words)
    assert "'gae', 'grpo'" in patched["V8"]["unknown_estimator"]


@pytest.mark.host
def test_v9_a_subclass_follows_the_mode_of_its_parent(stock: dict, patched: dict) -> None:
    assert stock["V9"]["my_sync"]["replay_buffer"] == "ReplayBufferAsync"
    assert stock["V9"]["my_separate_async"]["parameter_sync_step"] == 1
    for mode in ("sync", "colocate_async", "separate_async"):
        assert stock["V9"][f"my_{mode}"]["mode"] == f"my_{mode}"
        assert patched["V9"][f"my_{mode}"] == patched["V9"][mode]  # its own name changes nothing
    assert patched["V9"]["separate_async"]["parameter_sync_step"] == 4


@pytest.mark.host
def test_v9_a_section_under_the_own_name_comes_on_top(stock: dict, patched: dict) -> None:
    assert stock["V9"]["own_section"]["section"] == {"num_warmup_batches": 3, "mine": 7}
    after = patched["V9"]["own_section"]
    assert after["section"] == {**patched["V9"]["separate_async"]["section"], "num_warmup_batches": 3, "mine": 7}
    assert after["parameter_sync_step"] == after["rollout_skip"] == 4


@pytest.mark.host
@pytest.mark.parametrize("trainer", ["sync", "colocate_async", "separate_async", "own_base"])
def test_v9_trainers_that_are_unchanged(stock: dict, patched: dict, trainer: str) -> None:
    assert stock["V9"][trainer]["mode"] == trainer
    assert patched["V9"][trainer] == stock["V9"][trainer]


@pytest.mark.host
def test_v11_the_interval_is_configurable(stock: dict, patched: dict) -> None:
    for case in ("faster", "inherited"):
        assert stock["V11"][case] == [2.0]
        assert patched["V11"][case] == [0.05]
    for results in (stock["V11"], patched["V11"]):
        assert results["default"] == results["without_key"] == [2.0]
        assert results["passing"] == [0.5]  # its constructor takes **kwargs and sets the interval itself


@pytest.mark.host
def test_v17_attempts_are_told(stock: dict, patched: dict) -> None:
    old = {"global_steps": 5, "min_global_steps": 2, "max_global_steps": 5, "num_cached_tokens": None}
    assert stock["V17"] == {"tokens": [7, 8, 9], "fields": old}
    new = {"attempts": [[2, 2], [3, 0], [5, 1]], "top": [[7], [8], [9]], "server": "s5"}
    assert patched["V17"] == {"tokens": [7, 8, 9], "fields": old | new}


@pytest.mark.host
def test_v12_a_column_reaches_the_policy_loss(stock: dict, patched: dict) -> None:
    assert "unexpected keyword argument 'extra_fields'" in stock["V12"]["weighted"]
    after = patched["V12"]
    assert after["weighted"] == "ok" and after["weight_arrived"] is True
    assert after["weighted_arguments"] == sorted([*after["arguments"], "token_weight"])
    weights = sum(range(1, 4)) + 1 + sum(range(1, 5))  # 1, 2, ... in rows of 3, 1 and 4 tokens
    assert after["weighted_loss"] == pytest.approx([weights * after["recorded"]], rel=1e-6)
    assert after["unknown"].startswith("KeyError") and "nothing" in after["unknown"]


@pytest.mark.host
def test_v12_without_the_key_the_call_is_the_same(stock: dict, patched: dict) -> None:
    assert stock["V12"]["vanilla"] != 0.0
    for name in ("vanilla", "recorded", "arguments"):
        assert patched["V12"][name] == stock["V12"][name]


@pytest.mark.host
@pytest.mark.parametrize("function", ["initialize_global_process_group", "initialize_global_process_group_ray"])
def test_v13_process_group_on_a_cpu_platform(stock: dict, patched: dict, function: str) -> None:
    assert stock["V13_PROCESS_GROUP"][function].startswith("ValueError: Duplicate device type cpu")
    assert patched["V13_PROCESS_GROUP"][function] == "ok"
    assert patched["V13_PROCESS_GROUP"][f"{function}_backend"] == "cpu:gloo"


@pytest.mark.host
@pytest.mark.parametrize("case", ["reference", "offload"])
def test_v13_offload_without_pinned_memory(stock: dict, patched: dict, case: str) -> None:
    assert stock["V13"][case] in (  # of torch without CUDA, of torch with it where there is no GPU
        "RuntimeError: Cannot access accelerator device when none is available.",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a "
        "driver from http://www.nvidia.com/Download/index.aspx",
    )
    assert patched["V13"][case] == "ok" and patched["V13"][f"{case}_same_output"] is True
    assert stock["V13"]["plain_same_output"] is patched["V13"]["plain_same_output"] is True


@pytest.mark.host
@pytest.mark.parametrize("model", ["language_model", "value_model"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_v13_the_engine_is_found(stock: dict, patched: dict, model: str, strategy: str) -> None:
    assert stock["V13"][f"{model}_{strategy}"].startswith("ValueError: No engine registered for device='cpu'")
    assert patched["V13"][f"{model}_{strategy}"] == "ok"


@pytest.mark.host
def test_v13_other_platforms_are_unchanged(stock: dict, patched: dict) -> None:
    for results in (stock, patched):
        assert results["V13_PROCESS_GROUP"]["cuda_backends"] == ["cpu:gloo,cuda:nccl"] * 2 + ["mine"]
        assert results["V13"]["pinned_on_cuda"] == [True]
        assert {"cuda", "npu"} <= set(results["V13"]["devices"])


@pytest.mark.host
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_v14_the_critic_takes_the_configured_attention(stock: dict, patched: dict, attention: str) -> None:
    assert stock["V14"][attention] != "ok"
    assert patched["V14"][attention] == "ok" and patched["V14"][f"{attention}_used"] == attention


@pytest.mark.host
def test_v14_without_a_setting_it_asks_for_flash_attention(stock: dict, patched: dict) -> None:
    assert stock["V14"]["asked"] == ["flash_attention_2", "flash_attention_2"]
    assert patched["V14"]["asked"] == ["flash_attention_2", "sdpa"]
