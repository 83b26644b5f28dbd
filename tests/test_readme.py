"""The README's example runs as printed; the example config is one that takes effect."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import NEVER

ROOT = Path(__file__).parents[1]


@pytest.mark.host
def test_first_python_example_runs_as_printed(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=NEVER,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "methods in effect" in done.stdout and "'rl_plugins/rows_generated': " in done.stdout.replace('"', "'")


def test_files_named_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


@pytest.mark.host
def test_example_config_takes_effect(monkeypatch):
    """Everything but the model and the GPUs: parsing, names, parameters, signals, options."""
    from trl import TrlParser

    from rl_plugins.runtime.stack import build_stack
    from rl_plugins.trl import GRPOConfig, facts
    from rl_plugins.trl.compat import Seams

    monkeypatch.syspath_prepend(ROOT / "examples" / "trl")
    import gsm8k

    parser = TrlParser((gsm8k.ScriptArguments, GRPOConfig))
    config = ["--config", str(ROOT / "examples" / "trl" / "gsm8k.yaml"), "--use_cpu", "true", "--bf16", "false"]
    _, args = parser.parse_args_and_config(config)
    stack = build_stack(args.methods, args.method_params)
    known = facts.KnownRun(args, dataset=[1], size=1, rewards=("correct", "boxed_once"))
    assert facts.check(stack, known, Seams(False, False)) == {}
    text = [{"role": "assistant", "content": "so \\boxed{1,234}"}]
    assert gsm8k.correct([text], ["1234"]) == [1.0] and gsm8k.boxed_once([text]) == [1.0]
