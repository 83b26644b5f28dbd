"""`rl-plugins export`: what it writes, and that it is right on the released hosts without this package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rl_plugins.cards.catalog import card_of
from rl_plugins.commands.cli import app
from rl_plugins.commands.export.contribution import available, plan
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PromptPool
from rl_plugins.methods.vade import Vade
from rl_plugins.runtime import registry
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

# In a process of its own: nothing of this package can be imported.
ALONE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rl_plugins":
            raise ImportError("rl_plugins is not installed here")
sys.meta_path.insert(0, Blocked())
"""


def run(*words: str):
    return CliRunner().invoke(app, ["export", *words])


def alone(code: str, path: Path, **kwargs) -> subprocess.CompletedProcess[str]:
    """Runs `code` in `path`, which is in front of all installed packages, without this package."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"VERL_USE_EXTERNAL_PLUGINS": "none", "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", ALONE + code]
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, timeout=600, **kwargs)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


# ---- the command


def test_every_export_is_of_a_method_that_helped_and_complete(tmp_path: Path) -> None:
    assert available() == {"trl": ["vade"]}
    for host, methods in available().items():
        for method in methods:
            assert card_of(registry.load(method)).standing.why.startswith("Helped")
            written = plan(method, host, tmp_path)
            assert {f.state for f in written} == {"new", "by hand"}
            assert not [f.path for f in written if "@@" in f.text or "rl_plugins" in f.text]
            assert any(Path(f.path).name.startswith("test_") for f in written)


def test_an_export_is_formatted_as_its_host_is(tmp_path: Path) -> None:
    ruff = shutil.which("ruff", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if ruff is None:
        pytest.skip("needs ruff")
    assert run("vade", "--host", "trl", "--into", str(tmp_path)).exit_code == 0
    command = [ruff, "format", "--isolated", "--line-length", "119", "--diff", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_into_a_checkout(tmp_path: Path) -> None:
    """Files are new, lists of the host get their lines once, a second time changes nothing, a changed file is kept."""
    toctree = tmp_path / "docs" / "source" / "_toctree.yml"
    toctree.parent.mkdir(parents=True)
    toctree.write_text("- sections:\n  - local: gspo_token\n    title: GSPO\n  - local: merge_model_callback\n")
    index = toctree.with_name("paper_index.md")
    index.write_text("## Group Relative Policy Optimization\n\ntext\n\n## Optimal Advantage Regression\n\ntext\n")
    words = ("vade", "--host", "trl", "--into", str(tmp_path))

    dry = run(*words, "--dry-run")
    assert dry.exit_code == 0 and "Nothing was written" in dry.output
    assert not (tmp_path / "trl").exists()

    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "title: GSPO\n  - local: vade\n    title: VADE\n  - local: merge_model_callback" in toctree.read_text()
    text = index.read_text()
    assert text.index("### VADE") < text.index("## Optimal Advantage Regression")
    assert '"VADETrainer"' in first.output  # base_trainer.py is not there: the line is printed

    second = run(*words)
    assert second.exit_code == 0 and index.read_text() == text
    assert [line.split()[0] for line in second.output.splitlines() if "vade_trainer.py" in line][:1] == ["unchanged"]

    changed = tmp_path / "trl" / "experimental" / "vade" / "vade_trainer.py"
    changed.write_text("mine")
    refused = run(*words)
    assert refused.exit_code == 2 and "vade_trainer.py" in refused.output and changed.read_text() == "mine"
    assert run(*words, "--force").exit_code == 0 and changed.read_text() != "mine"


def test_without_an_export(tmp_path: Path) -> None:
    refused = run("dots", "--host", "trl", "--into", str(tmp_path))
    assert refused.exit_code == 2
    assert "trl: vade" in refused.output and not list(tmp_path.iterdir())


# ---- on the released hosts, without this package

TRL_TESTS = """
import pytest
class TrlTestCase:
    @pytest.fixture(autouse=True)
    def _tmp_dir(self, tmp_path):
        self.tmp_dir = str(tmp_path)
"""
ZEN = """---
configs:
- config_name: standard_prompt_only
  data_files:
  - {split: train, path: train.jsonl}
---
"""
RANDOM_VADE = """
import json, numpy as np
import transformers.training_args
transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # TRL's tests are made for GPUs; bf16 works here
from trl.experimental.vade.vade_trainer import SuccessCounts
given = json.load(open("random.json"))
counts = SuccessCounts(given["size"], given["selected_decay"], given["unselected_decay"])
chosen = []
for k, outcomes in enumerate(given["batches"]):
    prompts = counts.choose(len(outcomes), np.random.default_rng(k))
    chosen.append(prompts.tolist())
    counts.update(prompts, *np.array(outcomes).T)
json.dump({"chosen": chosen, "alpha": counts.alpha.tolist(), "beta": counts.beta.tolist()}, open("answers.json", "w"))
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/experimental/test_vade_trainer.py"]))
"""


@pytest.mark.long
@pytest.mark.host
def test_vade_in_released_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported tests, training among them, run on the installed TRL with the export's files laid over it; prompts
    and counts equal the method's with the same generators."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from rl_plugins.lab.demo.policy import policy_path

    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(trl.__file__).parent, tmp_path / "trl", ignore=ignored)
    assert run("vade", "--host", "trl", "--into", str(tmp_path)).exit_code == 0
    for folder in ("tests", "tests/experimental"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "tests" / "testing_utils.py").write_text(TRL_TESTS)
    hub = tmp_path / "trl-internal-testing"  # what the hub has under these names, as folders of this machine
    shutil.copytree(policy_path(), hub / "tiny-Qwen2ForCausalLM-2.5")
    (hub / "zen").mkdir()
    (hub / "zen" / "README.md").write_text(ZEN)
    (hub / "zen" / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"sort {i}{9 - i}: "}) + "\n" for i in range(9))
    )

    rng, size, group = np.random.default_rng(0), 40, 4
    params = {"selected_decay": 0.3, "unselected_decay": 0.9}
    # of each prompt of a batch (successes, scored rollouts)
    trials = rng.integers(0, group + 1, (12, 6))
    batches = np.stack([rng.binomial(trials, 0.5), trials], -1)
    (tmp_path / "random.json").write_text(json.dumps({"size": size, "batches": batches.tolist(), **params}))
    done = alone(RANDOM_VADE, tmp_path)
    assert " passed" in done.stdout and "skipped" not in done.stdout
    answers = json.loads((tmp_path / "answers.json").read_text())

    method = Vade(build_params(Vade.Params, params, "vade"))
    stack = start_stack(method, run=make_run(dataset_size=size))
    for k, outcomes in enumerate(batches.tolist()):
        monkeypatch.setattr(method, "rng", lambda purpose, k=k: np.random.default_rng(k))
        chosen = method.select_prompts(PromptPool(size, tuple(range(6)), (), None, k), 6)
        assert chosen == answers["chosen"][k]
        rewards = [[1.0] * right + [0.0] * (n - right) + [float("nan")] * (group - n) for right, n in outcomes]
        index = [i for i in chosen for _ in range(group)]
        one_step(stack, make_rollouts([r for own in rewards for r in own], group_size=group, prompt_index=index))
    for name in ("alpha", "beta"):
        assert method.state[name].tolist() == pytest.approx(answers[name], abs=1e-12)
