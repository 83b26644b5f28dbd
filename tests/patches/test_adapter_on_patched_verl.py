"""On a verl with the patches the adapter uses the seams, and computes what it computes on the stock one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import NEVER

pytest.importorskip("verl", reason="verl is not installed")

import mails
from test_verl_patches import pytestmark

pytestmark = [*pytestmark, pytest.mark.host, pytest.mark.long]

SCRIPT = Path(__file__).with_name("verl_adapter_script.py")


def run(folder: Path, python_path: Path | None = None) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    checkout = str(SCRIPT.parents[2])
    env["PYTHONPATH"] = os.pathsep.join([str(python_path), checkout] if python_path else [checkout])
    command = [sys.executable, str(SCRIPT), str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


def test_seams_are_used(tmp_path_factory: pytest.TempPathFactory) -> None:
    host = mails.patched(tmp_path_factory.mktemp("patched"), "verl")
    stock = run(tmp_path_factory.mktemp("stock"))
    patched = run(tmp_path_factory.mktemp("seams"), host)
    for mode in ("sync", "colocate_async", "separate_async"):  # V9
        assert stock[mode] == {"own_property": True, "base_mode": None}
        assert patched[mode] == {"own_property": False, "base_mode": mode}
    # V12: verl's `ppo_loss` calls our surrogate with the columns, instead of being run with advantages 0
    assert stock["calls"] == 0 and patched["calls"] == 1
    assert {"rollout_log_probs", "rl_plugins_row_column:scale", "rl_plugins_token_column:weight"} <= {
        *patched["keywords"]
    }
    assert patched["loss"] == pytest.approx(stock["loss"], rel=1e-6)
    assert patched["gradient"] == pytest.approx(stock["gradient"], abs=1e-7)
    assert max(map(abs, stock["gradient"])) > 1e-2
    assert stock["loss_mode_of_the_run"] == patched["loss_mode_of_the_run"] == "vanilla"
