"""The mails in patches/verl can be taken with `git am`, and their own tests fail without and pass with them.

The patches' tests are written for verl's repository. They run in a repository made from the installed package, on the
stock verl and with all mails applied: one process each, on the CPU, without Ray. `verl_unchanged.py` runs in the same
two processes and writes what must be equal on both.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import mails
import pytest

pytest.importorskip("verl", reason="the patches are checked against an installed verl")

PATCHES = mails.patches("verl")
VERL_VERSION = "0.9.1"
NEEDS = {"V5": "V4"}  # every other patch applies alone
FIELDS = ["uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"]
CONTROLS = {  # what the patches' tests show to be unchanged
    "test_a_config_without_the_key_keeps_the_default",
    "test_backend_of_the_process_group",
    "test_built_in_trainers_are_unchanged",
    "test_custom_sampler_that_sets_the_interval_keeps_its_own",
    "test_default_interval_is_unchanged",
    "test_direct_subclass_of_the_base_keeps_its_registered_name",
    "test_flash_attention_2_stays_the_default",
    "test_memory_is_pinned_where_there_is_an_accelerator",
    "test_new_names_are_registered",
    "test_other_estimators_do_not_fetch_the_extra_fields",
    "test_other_signatures_are_called_as_before",
    "test_policies_that_are_unchanged",
    "test_reward_of_the_last_output_reaches_every_output[reward_and_info]",
    "test_state_dict_of_the_class_is_patched_where_trl_has_it",
    "test_the_same_object_may_be_registered_again",
    "test_versions_of_the_first_and_the_last_attempt_stay",
    "test_without_redundant_sessions_all_are_awaited[seconds0-finished]",
    "test_without_redundant_sessions_all_are_awaited[seconds1-failure]",
    "test_without_the_key_a_policy_loss_gets_the_arguments_it_got",
}

pytestmark = [
    pytest.mark.skipif(
        importlib.metadata.version("verl") != VERL_VERSION, reason=f"the patches are diffs against verl {VERL_VERSION}"
    ),
    pytest.mark.skipif(shutil.which("git") is None, reason="git is needed to apply the patches"),
]


class Run(NamedTuple):
    tests: dict[str, str]
    measured: dict[str, Any]


def run(tree: Path) -> Run:
    """Run the patches' tests, and ours that compare both hosts, with the verl of `tree`."""
    shutil.copyfile(mails.HERE / "verl_unchanged.py", tree / "tests" / "test_unchanged_on_cpu.py")
    env = mails.environment(tree, VERL_USE_EXTERNAL_PLUGINS="none", RESULTS=str(tree / "results.json"))
    for name in ("VERL_LOGGING_LEVEL", "VERL_USE_EXTERNAL_MODULES", "VERL_ENGINE_VENDOR", "VERL_PLATFORM"):
        env.pop(name, None)
    tests = mails.run_tests(tree, env)
    measured = json.loads((tree / "results.json").read_text())
    assert Path(measured.pop("host")).is_relative_to(tree.resolve())
    return Run(tests, measured)


@pytest.fixture(scope="module")
def patched_verl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mails.patched(tmp_path_factory.mktemp("patched_verl"), "verl")


@pytest.fixture(scope="module")
def patched(patched_verl: Path) -> Run:
    return run(patched_verl)


@pytest.fixture(scope="module")
def stock(patched_verl: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    tree = mails.repository(tmp_path_factory.mktemp("stock_verl"), "verl")
    shutil.copytree(patched_verl / "tests", tree / "tests")
    return run(tree)


def test_the_patches_are_these() -> None:
    numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 17, 18]
    assert [mails.number(patch) for patch in PATCHES] == [f"V{n}" for n in numbers]


@pytest.mark.parametrize("patch", PATCHES, ids=mails.number)
def test_a_mail_is_taken_by_git_am_alone(patch: Path, tmp_path: Path) -> None:
    mails.check_form(patch, line_length=120)
    base = [other for other in PATCHES if mails.number(other) == NEEDS.get(mails.number(patch))]
    files = {name for mail in [*base, patch] for name in mails.touched(mail)}
    mails.am(mails.repository(tmp_path, "verl", files), *base, patch)
    subject = mails.git(tmp_path, "log", "-1", "--format=%s").strip()
    assert subject == mails.title(patch) and re.match(r"\[[a-z0-9_, ]+\] (fix|feat): .+", subject)
    for name in mails.touched(patch):
        if name.endswith(".py"):
            compile((tmp_path / name).read_text(), name, "exec")
        if name.startswith("tests/"):
            assert name.endswith("_on_cpu.py")  # verl's CI collects no other file on a CPU


def test_the_mails_apply_in_the_reverse_order(tmp_path: Path) -> None:
    """No mail needs the lines of another, but V5 those of V4."""
    mails.repository(tmp_path, "verl", {name for patch in PATCHES for name in mails.touched(patch)})
    last = [patch for patch in PATCHES if mails.number(patch) in ("V4", "V5")]
    mails.am(tmp_path, *[patch for patch in reversed(PATCHES) if patch not in last], *last)


@pytest.mark.host
def test_the_patches_own_tests_fail_without_and_pass_with_them(stock: Run, patched: Run) -> None:
    mails.check_own_tests(PATCHES, stock.tests, patched.tests, CONTROLS)


@pytest.mark.host
@pytest.mark.parametrize(
    ("test", "fault"),
    [
        ("trainer/ppo/v1/test_separate_async_setup_on_cpu.py::test_setup_without_hybrid_replicas", "argument 'flush'"),
        (
            "utils/test_fsdp2_sharded_save_on_cpu.py::test_snapshot_does_not_follow_parameters_on_cpu",
            "the snapshot of 0.weight moved with the model",
        ),
        (
            "utils/test_trl_value_head_class_on_cpu.py::test_a_model_is_patched_beside_trl_without_the_class",
            "cannot import name 'AutoModelForCausalLMWithValueHead'",
        ),
        ("trainer/ppo/v1/test_gdpo_advantage_on_cpu.py::test_advantages_are_those_of_the_legacy_trainer", "prompts"),
        (
            "trainer/ppo/v1/test_agent_loop_multi_output_reward_on_cpu.py"
            "::test_reward_of_the_last_output_reaches_every_output[reward_only]",
            "'failure' == 'finished'",
        ),
        (
            "trainer/ppo/v1/test_agent_loop_redundant_sessions_on_cpu.py"
            "::test_another_session_takes_the_place_of_one_that_fails",
            "'failure'",
        ),
        ("trainer/ppo/v1/test_replay_buffer_poll_interval_on_cpu.py::test_interval_is_configurable", "[2.0] == [0.05]"),
        ("plugin/test_cpu_device_on_cpu.py::test_process_group_on_cpu", "Duplicate device type cpu"),
        (
            "plugin/test_cpu_device_on_cpu.py::test_the_fsdp_engines_are_registered_for_cpu[fsdp2-value_model]",
            "No engine registered for device='cpu'",
        ),
    ],
)
def test_the_stock_host_fails_with_the_fault_that_is_described(stock: Run, test: str, fault: str) -> None:
    assert fault in stock.tests[f"tests/{test}"]


@pytest.mark.host
def test_v3_is_about_the_installed_trl() -> None:
    trl = importlib.util.find_spec("trl")
    if trl is None or importlib.metadata.version("trl") < "1.16":
        pytest.skip("the installed TRL still has the value head class")
    exported = (Path(trl.origin).parent / "__init__.py").read_text()
    assert "AutoModelForCausalLMWithValueHead" not in exported


@pytest.mark.host
def test_the_default_configuration_has_two_new_keys_only(stock: Run, patched: Run) -> None:
    before, after = stock.measured["default"], patched.measured["default"]
    assert after["trainer"]["v1"]["sampler"].pop("poll_interval") == 2.0
    assert after["actor_rollout_ref"]["actor"]["policy_loss"].pop("extra_fields", "absent") is None
    assert after == before


@pytest.mark.host
def test_the_generated_configurations_are_current(stock: Run, patched: Run) -> None:
    for result in (stock, patched):
        assert len(result.measured["generated_is_current"]) == 4
        assert all(result.measured["generated_is_current"].values())


@pytest.mark.host
@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus"])
def test_v4_v5_other_estimators_read_and_compute_what_they_did(stock: Run, patched: Run, estimator: str) -> None:
    before, after = stock.measured["advantages"][estimator], patched.measured["advantages"][estimator]
    assert after == before
    assert after["fields"] == FIELDS
