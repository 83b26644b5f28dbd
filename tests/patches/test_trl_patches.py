"""The patches in patches/trl apply to the installed TRL release and do what they say.

`trl_host_script.py` runs twice in a subprocess, on the stock TRL and on a copy with all patches applied. Each test
shows the fault (or the missing seam) on the first and its absence on the second.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import NEVER

pytest.importorskip("trl", reason="the patches are checked against an installed TRL")

PATCHES = sorted((Path(__file__).parents[2] / "patches" / "trl").glob("T*.patch"))
TRL_VERSION = "1.16.0"
SEQUENCE_COUNT_LOSSES = ["grpo", "sapo", "dr_grpo", "luspo"]  # their denominator is a number of sequences
LOSS_TYPES = [*SEQUENCE_COUNT_LOSSES, "dapo"]

pytestmark = [
    pytest.mark.skipif(
        importlib.metadata.version("trl") != TRL_VERSION, reason=f"the patches are diffs against trl {TRL_VERSION}"
    ),
    pytest.mark.skipif(shutil.which("git") is None, reason="git is needed to apply the patches"),
]


def copy_trl(directory: Path) -> Path:
    """Copy the installed `trl` package into `directory`, without importing it."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, directory / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def apply(patch: Path, directory: Path) -> None:
    """Check and apply one patch (git allows no fuzz); git must not look for a repository above `directory`."""
    env = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    env["GIT_CEILING_DIRECTORIES"] = str(directory.resolve().parent)
    for option in (["--check"], []):
        command = ["git", "apply", *option, "-p1", str(patch)]
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"


def run_host(directory: Path, python_path: Path | None, processes: int = 1) -> dict[str, Any]:
    """Run the script with `python_path` first on the import path and return what it measured."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(python_path)] if python_path else []
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    env.update(CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=os.pathsep.join(paths))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    script = [str(Path(__file__).with_name("trl_host_script.py")), str(directory)]
    command = [sys.executable, *(launcher if processes > 1 else []), *script]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=NEVER)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((directory / "results.json").read_text())


@pytest.fixture(scope="module")
def patched_trl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds `trl` with all patches applied in order."""
    directory = copy_trl(tmp_path_factory.mktemp("patched_trl"))
    for patch in PATCHES:
        apply(patch, directory)
    return directory


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_host(tmp_path_factory.mktemp("stock_run"), None)


@pytest.fixture(scope="module")
def patched(patched_trl: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = run_host(tmp_path_factory.mktemp("patched_run"), patched_trl)
    assert Path(results["host"]).is_relative_to(patched_trl.resolve())
    return results


def test_there_are_five_patches() -> None:
    assert [patch.name.split("-")[0] for patch in PATCHES] == ["T1", "T11", "T2", "T3", "T5"]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name.split("-")[0])
def test_patch_applies_alone(patch: Path, tmp_path: Path) -> None:
    directory = copy_trl(tmp_path)
    names = ("grpo_trainer.py", "rloo_trainer.py", "utils.py")
    before = {name: (directory / "trl/trainer" / name).read_text() for name in names}
    apply(patch, directory)
    after = {name: (directory / "trl/trainer" / name).read_text() for name in before}
    changed = "utils.py" if patch.name.startswith("T11-") else "grpo_trainer.py"
    assert after[changed] != before[changed]
    for name, text in after.items():
        compile(text, name, "exec")
        new_lines = set(text.splitlines()) - set(before[name].splitlines())
        assert max(map(len, new_lines), default=0) <= 119
    header = patch.read_text().split("diff --git", 1)[0]
    assert header.startswith("Subject: ") and "How tested" in header


@pytest.mark.parametrize("hook", ["_transform_advantages", "_select_completions"])
def test_the_hook_is_word_for_word_equal_in_both_trainers(patched_trl: Path, hook: str) -> None:
    def source(name: str) -> str | None:
        text = (patched_trl / "trl/trainer" / name).read_text()
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == hook]
        assert len(nodes) == 1
        return ast.get_source_segment(text, nodes[0])

    assert source("grpo_trainer.py") == source("rloo_trainer.py")


@pytest.mark.host
@pytest.mark.parametrize(
    "run", ["grpo_dapo", "grpo_grpo_kl_reuse", "grpo_dr_grpo", "grpo_luspo", "grpo_sapo", "rloo_kl"]
)
def test_without_an_override_the_weights_stay_bit_identical(stock: dict, patched: dict, run: str) -> None:
    assert stock["default"][run]["moved"] > 1e-3
    assert patched["default"][run] == stock["default"][run]


@pytest.mark.host
@pytest.mark.parametrize(("case", "count"), [("too_many_rows", 4), ("too_few_rows", 1)])
def test_t1_rollout_func_with_a_wrong_number_of_rows(stock: dict, patched: dict, case: str, count: int) -> None:
    assert stock["T1"][case] == "ok"  # passes silently
    assert patched["T1"][case].startswith("ValueError: rollout_func must return one completion per prompt")
    assert f"{count} completions for 2 prompts" in patched["T1"][case]


@pytest.mark.host
def test_t1_the_error_of_a_whole_step_names_rollout_func(stock: dict, patched: dict) -> None:
    assert stock["T1"]["step_too_many_rows"].startswith("ValueError: The reward function")
    assert "32 completions for 16 prompts" in patched["T1"]["step_too_many_rows"]


@pytest.mark.host
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_t1_an_empty_completion_counts_as_truncated(stock: dict, patched: dict, trainer: str) -> None:
    assert stock["T1"][f"generate_{trainer}"].startswith("IndexError")
    assert patched["T1"][f"generate_{trainer}"] == "ok"
    assert patched["T1"][f"clipped_ratio_{trainer}"] == [0.5]  # one of two rows


@pytest.mark.host
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("step", ["step_grpo_row_0", "step_grpo_row_5", "step_rloo_row_0"])
def test_t1_a_training_step_with_an_empty_completion(stock: dict, patched: dict, step: str, masked: bool) -> None:
    assert stock["T1"][f"{step}_masked_{masked}"].startswith("IndexError")
    assert patched["T1"][f"{step}_masked_{masked}"] == "ok"


@pytest.mark.host
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_t2_advantages_are_halved_in_the_log_and_in_the_update(stock: dict, patched: dict, trainer: str) -> None:
    without, with_patch = stock["T2"][trainer], patched["T2"][trainer]
    assert without["logged_hook"] == without["logged"] and without["update_error"] == pytest.approx(1.0)
    assert len(with_patch["logged"]) == 16 and max(map(abs, with_patch["logged"])) > 1.0
    assert with_patch["logged"] == without["logged"]
    assert with_patch["logged_hook"] == [0.5 * value for value in with_patch["logged"]]
    assert with_patch["update_error"] < 1e-5


@pytest.mark.host
@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "bnpo", "cispo", "vespo"])
def test_t3_twice_the_loss_is_twice_the_gradient(stock: dict, patched: dict, loss_type: str) -> None:
    assert stock["T3"][loss_type]["scale"] == 1.0
    assert patched["T3"][loss_type]["scale"] == pytest.approx(2.0, rel=1e-6)
    assert patched["T3"][loss_type]["error"] < 1e-5


@pytest.mark.host
def test_t3_arguments_are_those_of_the_native_loss(stock: dict, patched: dict) -> None:
    assert stock["T3"]["own_clipped_loss"]["called"] == 0
    assert patched["T3"]["own_clipped_loss"] == {"same_bits": True, "called": 2}


@pytest.mark.host
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("case", [*LOSS_TYPES, "rloo"])
def test_t5_dropped_groups_leave_the_gradient_of_a_batch_without_them(
    stock: dict, patched: dict, case: str, accumulation: int
) -> None:
    name = f"{case}_accumulation_{accumulation}"
    assert stock["T5"][name]["error"] > 0.5  # the hook is not called
    assert patched["T5"][name]["error"] < 1e-5


@pytest.mark.host
@pytest.mark.parametrize("case", ["grpo_entropy_bonus", "grpo_sequence_level"])
def test_t5_other_settings(stock: dict, patched: dict, case: str) -> None:
    assert stock["T5"][case]["error"] > 0.5
    assert patched["T5"][case]["error"] < 1e-5


@pytest.mark.host
@pytest.mark.parametrize("case", [*LOSS_TYPES, "rloo"])
def test_t5_a_batch_without_any_row_has_loss_zero(stock: dict, patched: dict, case: str) -> None:
    assert float(stock["T5"][f"{case}_nothing_kept"]["moved"]) > 0
    assert patched["T5"][f"{case}_nothing_kept"]["moved"] == "0.0"
    assert [float(loss) for loss in patched["T5"][f"{case}_nothing_kept"]["losses"]] == [0.0, 0.0]


@pytest.mark.host
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_t5_keep_ratio_set_from_outside(stock: dict, patched: dict, loss_type: str) -> None:
    """A batch masked from outside: the stock host keeps counting the dropped half in four loss types."""
    expected = 0.5 if loss_type in SEQUENCE_COUNT_LOSSES else 1.0
    assert stock["T5"][f"{loss_type}_outside"]["scale"] == pytest.approx(expected, rel=1e-5)
    assert patched["T5"][f"{loss_type}_outside"]["error"] < 1e-5


@pytest.mark.host
def test_t5_dropped_rows_stay_in_the_attention_mask(stock: dict, patched: dict) -> None:
    before, after = stock["T5"]["batch"], patched["T5"]["batch"]
    assert before["in_loss"] == before["attended"] == after["attended"]
    assert 0 < sum(after["in_loss"]) < sum(after["attended"])
    assert after["num_items_in_batch"] == [sum(after["in_loss"])] * 2  # each half carries the total
    assert after["keep_ratio"] == [0.5, 0.5]


@pytest.mark.host
@pytest.mark.ranks
def test_t5_keep_ratio_counts_the_rows_of_all_processes(patched_trl: Path, tmp_path: Path) -> None:
    """Process 1 loses all of its rows, process 0 none: each alone would take another ratio."""
    results = run_host(tmp_path, patched_trl, processes=2)
    assert set(results["T5"]) == {*LOSS_TYPES, "rloo"}
    for case, measured in results["T5"].items():
        assert measured["error"] < 1e-5, case


@pytest.mark.host
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_t11_a_resume_after_the_first_epoch_has_the_prompts_of_an_uninterrupted_run(
    stock: dict, patched: dict, trainer: str
) -> None:
    assert stock["T11"][trainer]["whole"] == patched["T11"][trainer]["whole"]
    whole = stock["T11"][trainer]["whole"]
    assert len(whole) == 8 and whole[:3] != whole[3:6]
    exact = [step for step in (2, 3, 4, 7) if stock["T11"][trainer][str(step)] == whole[step:]]
    assert exact == [2]
    for step in (2, 3, 4, 7):
        assert patched["T11"][trainer][str(step)] == whole[step:], step
