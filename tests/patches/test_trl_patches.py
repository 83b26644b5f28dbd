"""The mails in patches/trl can be taken with `git am`, and their own tests fail without and pass with them.

The patches' tests are written for TRL's repository. Here they run in a repository made from the installed package, on
the stock TRL and with all mails applied; `trl_conftest.py` stands in for the hub. `trl_weights.py` runs in the same two
processes and writes what must be equal on both.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mails
import pytest
from waiting import NEVER

pytest.importorskip("trl", reason="the patches are checked against an installed TRL")

PATCHES = mails.patches("trl")
TRL_VERSION = "1.16.0"
CONTROLS = {
    "test_everything_kept_is_the_default",
    "test_the_default_changes_nothing",
    "test_the_name_of_a_cuda_device_is_still_asked_for",
}  # what the patches' tests show to be unchanged
STAND_INS = {"trl_conftest.py": "conftest.py", "trl_testing_utils.py": "testing_utils.py"}
LOSS_TYPES = ["grpo", "sapo", "dr_grpo", "luspo", "dapo"]

pytestmark = [
    pytest.mark.skipif(
        importlib.metadata.version("trl") != TRL_VERSION, reason=f"the patches are diffs against trl {TRL_VERSION}"
    ),
    pytest.mark.skipif(shutil.which("git") is None, reason="git is needed to apply the patches"),
]


class Run(NamedTuple):
    tests: dict[str, str]
    weights: dict[str, Any]


def run(tree: Path) -> Run:
    """Run the patches' tests, and ours that compare both hosts, with the TRL of `tree`."""
    for source, name in {**STAND_INS, "trl_weights.py": "test_weights.py"}.items():
        shutil.copyfile(mails.HERE / source, tree / "tests" / name)
    (tree / "tests" / "__init__.py").touch()
    env = mails.environment(
        tree, HF_HOME=str(tree / "hf"), RESULTS=str(tree / "results.json"), TRL_EXPERIMENTAL_SILENCE="1"
    )
    tests = mails.run_tests(tree, env)
    results = json.loads((tree / "results.json").read_text())
    assert Path(results.pop("host")).is_relative_to(tree.resolve())
    return Run(tests, results)


@pytest.fixture(scope="module")
def patched_trl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mails.patched(tmp_path_factory.mktemp("patched_trl"), "trl")


@pytest.fixture(scope="module")
def patched(patched_trl: Path) -> Run:
    return run(patched_trl)


@pytest.fixture(scope="module")
def stock(patched_trl: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    tree = mails.repository(tmp_path_factory.mktemp("stock_trl"), "trl")
    shutil.copytree(patched_trl / "tests", tree / "tests")
    return run(tree)


def test_the_patches_are_those_of_the_page() -> None:
    assert [mails.number(patch) for patch in PATCHES] == ["T1", "T2", "T3", "T5", "T11", "T12", "T13", "T14", "T15"]


@pytest.mark.parametrize("patch", PATCHES, ids=mails.number)
def test_a_mail_is_taken_by_git_am_alone(patch: Path, tmp_path: Path) -> None:
    mails.check_form(patch, line_length=119)
    mails.am(mails.repository(tmp_path, "trl"), patch)
    assert mails.git(tmp_path, "log", "-1", "--format=%s").strip() == mails.title(patch)
    for name in mails.touched(patch):
        compile((tmp_path / name).read_text(), name, "exec")


@pytest.mark.parametrize("hook", ["_transform_advantages", "_select_completions"])
def test_the_hook_is_word_for_word_equal_in_both_trainers(patched_trl: Path, hook: str) -> None:
    def source(name: str) -> str | None:
        text = (patched_trl / "trl/trainer" / name).read_text()
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == hook]
        assert len(nodes) == 1
        return ast.get_source_segment(text, nodes[0])

    assert source("grpo_trainer.py") == source("rloo_trainer.py")


@pytest.mark.host
def test_the_patches_own_tests_fail_without_and_pass_with_them(stock: Run, patched: Run) -> None:
    mails.check_own_tests(PATCHES, stock.tests, patched.tests, CONTROLS)


@pytest.mark.host
@pytest.mark.parametrize(
    ("test", "fault"),
    [
        ("test_empty_completions.py::test_grpo[False-0]", "IndexError: list index out of range"),
        ("test_empty_completions.py::test_rloo[True-5]", "IndexError: list index out of range"),
        ("test_empty_completions.py::test_train_raises[32]", "the reward function returns exactly one reward"),
        ("test_repeat_sampler_epoch.py::test_resumed_training_has_the_prompts_of_an_uninterrupted_one[grpo]", "step 3"),
        ("test_repeat_sampler_epoch.py::test_resumed_training_has_the_prompts_of_an_uninterrupted_one[rloo]", "step 3"),
    ],
)
def test_the_stock_host_fails_with_the_fault_that_is_described(stock: Run, test: str, fault: str) -> None:
    assert fault in stock.tests[f"tests/{test}"]


@pytest.mark.host
@pytest.mark.parametrize("case", ["dapo", "grpo_kl_reuse", "dr_grpo", "luspo", "sapo", "rloo_kl"])
def test_without_an_override_the_weights_stay_bit_identical(stock: Run, patched: Run, case: str) -> None:
    assert stock.weights[case]["moved"] > 1e-3
    assert patched.weights[case] == stock.weights[case]


@pytest.mark.host
@pytest.mark.ranks
def test_t5_keep_ratio_counts_the_rows_of_all_processes(patched_trl: Path, tmp_path: Path) -> None:
    """Process 1 loses all of its rows, process 0 none: each alone would take another ratio."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = [str(mails.HERE / "trl_ranks_script.py"), str(tmp_path)]
    command = [sys.executable, *launcher, *script]
    env = mails.environment(patched_trl)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=NEVER)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == {*LOSS_TYPES, "rloo"}
    for case, error in results.items():
        assert error < 1e-5, case


def test_the_readme_names_each_mail_by_its_title() -> None:
    readme = (mails.ROOT / "patches" / "README.md").read_text()
    for patch in [*PATCHES, *mails.patches("verl")]:
        folder = patch.parent.name
        assert f"[{mails.number(patch)}]({folder}/{patch.name})" in readme
        assert f"| {mails.title(patch)} |" in readme


@pytest.mark.parametrize("name", ["T2", "T3", "T5", "T15", "V5", "V9", "V12"])
def test_a_seam_begins_as_an_issue(name: str) -> None:
    text = (mails.ROOT / "patches" / "issues" / f"{name}.md").read_text()
    assert text.startswith("# ") and len(text.split()) < 400
    for part in ("Use case", "What is possible today", "Proposal", "Alternatives", "Who else asks", "Draft"):
        assert f"**{part}.**" in text
    assert any(f"/{patch.name})" in text for patch in [*PATCHES, *mails.patches("verl")])
