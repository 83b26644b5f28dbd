"""`rl-plugins export`: what it writes, and that it is right on the released hosts without this package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.commands.export.contribution import FOLDER, available, plan
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Terms
from rl_plugins.methods.aepo_clip import AepoClip
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.testing import make_rollouts, make_tokens, start_stack

GOLDEN = Path(__file__).parent / "golden"
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


def test_every_export_is_of_a_method_and_complete(tmp_path: Path) -> None:
    assert available() == {"trl": ["mc_grpo"], "verl": ["aepo_clip"]}
    for host, methods in available().items():
        for method in methods:
            written = plan(method, host, tmp_path)
            assert {f.state for f in written} == {"new", "by hand"}
            assert not [f.path for f in written if "@@" in f.text or "rl_plugins" in f.text]
            assert any(Path(f.path).name.startswith("test_") for f in written)


def test_exports_are_formatted_as_their_host_is(tmp_path: Path) -> None:
    ruff = shutil.which("ruff", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if ruff is None:
        pytest.skip("needs ruff")
    for host, method, columns in (("trl", "mc_grpo", 119), ("verl", "aepo_clip", 120)):
        assert run(method, "--host", host, "--into", str(tmp_path / host)).exit_code == 0
        command = [ruff, "format", "--isolated", "--line-length", str(columns), "--diff", str(tmp_path / host)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_into_a_checkout(tmp_path: Path) -> None:
    """Files are new, lists of the host get their lines once, a second time changes nothing, a changed file is kept."""
    toctree = tmp_path / "docs" / "source" / "_toctree.yml"
    toctree.parent.mkdir(parents=True)
    toctree.write_text("- sections:\n  - local: gspo_token\n    title: GSPO\n  - local: merge_model_callback\n")
    index = toctree.with_name("paper_index.md")
    index.write_text("## Group Relative Policy Optimization\n\ntext\n\n## Optimal Advantage Regression\n\ntext\n")
    words = ("mc_grpo", "--host", "trl", "--into", str(tmp_path))

    dry = run(*words, "--dry-run")
    assert dry.exit_code == 0 and "Nothing was written" in dry.output
    assert not (tmp_path / "trl").exists()

    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "title: GSPO\n  - local: mc_grpo\n    title: MC-GRPO\n  - local: merge_model_callback" in toctree.read_text()
    text = index.read_text()
    assert text.index("### MC-GRPO: Median") < text.index("## Optimal Advantage Regression")
    assert '"MCGRPOTrainer"' in first.output  # base_trainer.py is not there: the line is printed

    second = run(*words)
    assert second.exit_code == 0 and index.read_text() == text
    assert [line.split()[0] for line in second.output.splitlines() if "mc_grpo_trainer.py" in line][:1] == ["unchanged"]

    changed = tmp_path / "trl" / "experimental" / "mc_grpo" / "mc_grpo_trainer.py"
    changed.write_text("mine")
    refused = run(*words)
    assert refused.exit_code == 2 and "mc_grpo_trainer.py" in refused.output and changed.read_text() == "mine"
    assert run(*words, "--force").exit_code == 0 and changed.read_text() != "mine"


def test_without_an_export(tmp_path: Path) -> None:
    refused = run("vade", "--host", "verl", "--into", str(tmp_path))
    assert refused.exit_code == 2
    assert "verl: aepo_clip" in refused.output and not list(tmp_path.iterdir())


# ---- the vectors are those of tests/golden


def vectors(host: str, method: str) -> list[dict]:
    return json.loads((FOLDER / host / method / "vectors.json").read_text())["cases"]


def test_vectors_of_mc_grpo() -> None:
    golden = json.loads((GOLDEN / "mc_grpo.json").read_text())["cases"]
    ours = vectors("trl", "mc_grpo")
    assert [c["name"] for c in ours] == [c["name"] for c in golden]
    for mine, case in zip(ours, golden, strict=True):
        assert mine["rewards"] == case["inputs"]["rewards"]
        assert mine["advantages"] == case["expected"]["advantages_math_variant"]
        assert (mine["num_generations"], mine["mad_eps"]) == (case["params"]["group_size"], case["params"]["mad_eps"])


def test_vectors_of_aepo_clip() -> None:
    """Their advantages are those after AEPO's scaling by entropy, which is no part of the export."""
    golden = {c["name"]: c for c in json.loads((GOLDEN / "aepo.json").read_text())["cases"]}
    ours = vectors("verl", "aepo_clip")
    clipped = [n for n, c in golden.items() if c["params"].get("entropy_balanced_clipping")]
    assert [c["name"] for c in ours] == clipped and len(ours) >= 3
    for mine in ours:
        case = golden[mine["name"]]
        given, expected, p = case["inputs"], case["expected"], case["params"]
        assert (mine["log_prob"], mine["old_log_prob"]) == (given["log_prob"], given["old_log_prob"])
        assert (mine["loss"], mine["grad_log_prob"]) == (expected["loss"], expected["grad_log_prob"])
        assert (mine["pg_clipfrac"], mine["pg_clipfrac_lower"]) == (expected["clipfrac"], expected["clipfrac_lower"])
        limits = (mine["clip_ratio_low"], mine["clip_ratio_high"], mine["clip_ratio_c"], mine["loss_agg_mode"])
        assert limits == (p["clip_low"], p["clip_high"], p["clip_ratio_c"], p["agg"])
        mask = torch.tensor(given["response_mask"]) > 0
        assert torch.equal(torch.tensor(mine["response_mask"]) > 0, mask)
        entropy = torch.tensor(given["entropy"], dtype=torch.float64)[mask]
        factor = torch.ones(mask.shape, dtype=torch.float64)
        factor[mask] += p["alpha"] * (entropy - entropy.mean()) / entropy.std()
        before = torch.tensor(given["advantages"], dtype=torch.float64)
        before = before if before.ndim == 2 else before[:, None]
        torch.testing.assert_close(
            torch.tensor(mine["advantages"], dtype=torch.float64), before * factor, rtol=0, atol=1e-9
        )


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
RANDOM_MC_GRPO = """
import json, torch
import transformers.training_args
transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # TRL's tests are made for GPUs; bf16 works here
from trl.experimental.mc_grpo.mc_grpo_trainer import median_centered_advantages
out = []
for case in json.load(open("random.json")):
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    a, pivot = median_centered_advantages(rewards, case["n"], case["eps"], case["clip"])
    out.append({"advantages": a.tolist(), "pivot": pivot.tolist()})
json.dump(out, open("answers.json", "w"))
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/experimental/test_mc_grpo_trainer.py"]))
"""


@pytest.mark.long
@pytest.mark.host
def test_mc_grpo_in_released_trl(tmp_path: Path) -> None:
    """The exported tests, training among them, run on the installed TRL with the export's files laid over it; the
    advantages equal the method's on random groups."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from rl_plugins.lab.demo.policy import policy_path

    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(trl.__file__).parent, tmp_path / "trl", ignore=ignored)
    assert run("mc_grpo", "--host", "trl", "--into", str(tmp_path)).exit_code == 0
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

    generator = torch.Generator().manual_seed(0)
    cases = []
    for n, levels in ((2, 2), (3, 3), (4, 2), (5, 1000), (9, 4), (1, 3)):
        rewards = torch.randint(levels, (6 * n,), generator=generator) / 7
        cases.append(
            {"rewards": rewards.tolist(), "n": n, "eps": None if n == 9 else 1e-3, "clip": 3.0 if n == 4 else None}
        )
    (tmp_path / "random.json").write_text(json.dumps(cases))
    done = alone(RANDOM_MC_GRPO, tmp_path)
    assert " passed" in done.stdout and "skipped" not in done.stdout

    for case, answer in zip(cases, json.loads((tmp_path / "answers.json").read_text()), strict=True):
        params = {"scale": "none"} if case["eps"] is None else {"mad_eps": case["eps"]}
        params |= {} if case["clip"] is None else {"advantage_clip": case["clip"]}
        method = McGrpo(build_params(McGrpo.Params, params, "mc_grpo"))
        rollouts = make_rollouts(case["rewards"], group_size=case["n"])
        torch.testing.assert_close(torch.tensor(answer["advantages"], dtype=torch.float64), method.advantages(rollouts))
        leaves = ~method.shape(rollouts, make_tokens(rollouts)).keep_rows
        assert (
            torch.tensor(answer["pivot"]).view(-1, case["n"]).sum(1).tolist()
            == leaves.view(-1, case["n"]).sum(1).tolist()
        )


VERL = """
import json, torch
import verl  # imports the module that VERL_USE_EXTERNAL_MODULES names
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig
case = json.load(open("random.json"))
x = {k: torch.tensor(v, dtype=torch.float64) for k, v in case.items()}
x["log_prob"].requires_grad_()
config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28)
loss, metrics = get_policy_loss_fn("aepo_clip")(**x, config=config)
loss.backward()
json.dump({"loss": loss.item(), "grad": x["log_prob"].grad.tolist(), "metrics": metrics}, open("answers.json", "w"))
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "recipe/aepo_clip/tests"]))
"""


@pytest.mark.host
def test_aepo_clip_in_released_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl loads the exported module by VERL_USE_EXTERNAL_MODULES; loss and gradient equal the method's; the exported
    tests pass."""
    pytest.importorskip("verl", reason="verl is not installed")
    assert run("aepo_clip", "--host", "verl", "--into", str(tmp_path / "recipe")).exit_code == 0
    script = tmp_path / "recipe" / "aepo_clip" / "run_qwen2.5-3b_gsm8k_aepo_clip.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    generator = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(6, 9, generator=generator, dtype=torch.float64)
    new = old + 0.6 * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    mask = (torch.rand(6, 9, generator=generator) < 0.8).double()
    given = {"old_log_prob": old, "log_prob": new, "advantages": advantages, "response_mask": mask}
    (tmp_path / "random.json").write_text(json.dumps({k: v.tolist() for k, v in given.items()}))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "recipe.aepo_clip.aepo_clip_core_algos")
    done = alone(VERL, tmp_path)
    assert " passed" in done.stdout
    answer = json.loads((tmp_path / "answers.json").read_text())

    terms = Terms(
        mask=mask,
        logprobs=new.requires_grad_(),
        advantages=advantages,
        old_logprobs=old,
        num_tokens=mask.sum(),
        num_rows=torch.tensor(6),
        max_length=9,
    )
    method = AepoClip(build_params(AepoClip.Params, {"clip_high": 0.28}, "aepo_clip"))
    stack = start_stack(method)
    loss = (stack.one("policy_loss", terms) * mask).sum() / mask.sum()
    loss.backward()
    assert answer["loss"] == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.tensor(answer["grad"], dtype=torch.float64), new.grad, rtol=0, atol=1e-12)
    assert answer["metrics"]["actor/aepo_preserved"] > 0
