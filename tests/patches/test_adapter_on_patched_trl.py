"""On a TRL with the patches the adapter uses the seams, and trains like on the stock one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mails
import pytest
import torch
from waiting import NEVER

pytestmark = [pytest.mark.host, pytest.mark.long]

SCRIPT = Path(__file__).parents[1] / "hosts" / "trl" / "ranks_script.py"
OFF = {"num_iterations": 2, "max_steps": 4, "learning_rate": 0.3, "epsilon": 0.05, "epsilon_high": 0.1, "beta": 0.04}
CASES = [
    ["mc_grpo", ["mc_grpo"], {"max_steps": 2, "learning_rate": 0.05}],
    ["half", ["half"], {"max_steps": 2, "learning_rate": 0.05, "loss_type": "grpo", "beta": 0.04}],
    ["filter", ["filter"], {"max_steps": 2, "learning_rate": 0.05, "loss_type": "dr_grpo"}],
    ["ppo", ["ppo"], {**OFF, "method_params": {"ppo": {"low": 0.05, "high": 0.1}}}],
]
BONUS = ["bonus", ["half"], {"max_steps": 1, "loss_type": "grpo", "entropy_coef": 0.01}]


def run(tmp_path, cases, python_path=None):
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if python_path:
        env["PYTHONPATH"] = str(python_path)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out.pt"), str(tmp_path / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER, env=env)
    return done, torch.load(tmp_path / "out.pt", weights_only=False) if done.returncode == 0 else None


def test_seams_are_used(tmp_path_factory):
    host = mails.patched(tmp_path_factory.mktemp("patched"), "trl")
    done, stock = run(tmp_path_factory.mktemp("stock"), CASES)
    assert done.returncode == 0, done.stderr
    done, patched = run(tmp_path_factory.mktemp("seams"), [*CASES, BONUS], host)
    assert done.returncode == 0, done.stderr
    for name, _, _ in CASES:
        assert (stock[name]["weights"] - patched[name]["weights"]).abs().max() < 2e-6, name
        for a, b in zip(stock[name]["decisions"], patched[name]["decisions"], strict=True):
            torch.testing.assert_close(a["advantages"], b["advantages"])
            assert torch.equal(a["trained"], b["trained"])
    # T2: decided while TRL's own method ran. T3: TRL's clip metrics are of the surrogate that was trained.
    assert patched["mc_grpo"]["decided_in_host"] and not stock["mc_grpo"]["decided_in_host"]
    assert "clip_ratio/region_mean" not in stock["ppo"]["logs"]
    assert max(patched["ppo"]["logs"]["clip_ratio/region_mean"]) > 0.01
    # T5: rows may leave under a row loss beside an entropy bonus, which the stock host cannot do exactly.
    done, _ = run(tmp_path_factory.mktemp("refused"), [BONUS])
    assert done.returncode != 0 and "`half` removes rows" in done.stderr
    assert len(patched["bonus"]["decisions"]) == 1


@pytest.mark.patches
def test_two_functions_train_a_masked_diffusion_model(tmp_path_factory):
    """T15: the weights that `MaskedTrainer` gets with five overrides."""
    host, out = mails.patched(tmp_path_factory.mktemp("patched"), "trl"), tmp_path_factory.mktemp("masked")
    command = [sys.executable, str(mails.HERE / "trl_masked_script.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER, env=mails.environment(host))
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(out / "out.pt")
    assert (found["overrides"] - found["begun"]).abs().max() > 1e-3
    torch.testing.assert_close(found["functions"], found["overrides"], atol=1e-6, rtol=0)
