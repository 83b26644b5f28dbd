"""Pairs of modes in TRL's DPOTrainer: the example on an untrained policy, and what the trainer makes of a pair."""

from __future__ import annotations

import importlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from harness import policy
from trl import DPOConfig, DPOTrainer

from rl_plugins.lab.demo.policy import Fit
from rl_plugins.tools.preferences import mode_pairs

pytestmark = pytest.mark.host
EXAMPLES = Path(__file__).parents[3] / "examples" / "trl"


def config(folder: Path, **changes: Any) -> DPOConfig:
    values = dict(output_dir=str(folder), per_device_train_batch_size=4, max_steps=3, learning_rate=0.02, optim="sgd",
                  use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
                  logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant")  # fmt: skip
    return DPOConfig(**{**values, **changes})


@pytest.mark.parametrize("conversation", [True, False])
def test_the_trainer_learns_what_the_pairs_prefer(tmp_path: Path, conversation: bool) -> None:
    from datasets import Dataset

    def asked(text: str) -> Any:
        return [{"role": "user", "content": text}] if conversation else f"<user>{text}<asst>"

    attempts = [
        {"prompt": asked(f"a:{i}5"), "mode": mode, "completion": text, "verified": mode == "direct" or i % 2 == 0}
        for i in range(4)
        for mode, text in (("direct", f"={i}5"), ("cot", f"({i})(5)={i}5"))
    ]
    attempts = [a | {"verified": False} if a["mode"] == "direct" and i > 5 else a for i, a in enumerate(attempts)]
    pairs = mode_pairs(attempts)
    assert [row["mode"] for row in pairs.rows] == ["direct"] * 3 and pairs.unsolved == 1
    t = DPOTrainer(
        model=str(policy(tmp_path / "policy")),
        args=config(tmp_path / "out"),
        train_dataset=Dataset.from_list([dict(row) for row in pairs.rows]),
    )
    row = t.train_dataset[0]
    ids = [row[name] for name in row if name in ("chosen_ids", "chosen_input_ids")][0]
    text = t.processing_class.decode(ids)
    assert text.replace(" ", "").endswith("=05<eos>"), text
    t.train()
    margins = [h["rewards/margins"] for h in t.state.log_history if "rewards/margins" in h]
    assert margins[0] == pytest.approx(0, abs=1e-5) and margins[2] > margins[1] > 0


def test_the_example_from_attempts_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("mode_switching")
    for name, value in {"WARM_START": Fit(steps=1), "QUESTIONS": 8, "HELD_OUT": 4, "ATTEMPTS": 2, "SAMPLES": 1}.items():
        monkeypatch.setattr(example, name, value)
    monkeypatch.setattr(example, "right", lambda question, text: zlib.crc32(text.encode()) % 3 == 0)
    found = example.run(tmp_path)
    assert list(found) == ["direct answers", "reasoning", "before DPO", "after DPO", "after DPO with SFT"]
    attempts = [json.loads(line) for line in (tmp_path / "seed-0" / "attempts.jsonl").read_text().splitlines()]
    assert len(attempts) == 2 * 8 * 2 and {a["mode"] for a in attempts} == {"direct", "cot"}
    pairs = [json.loads(line) for line in (tmp_path / "seed-0" / "pairs" / "train.jsonl").read_text().splitlines()]
    verified = {a["completion"] for a in attempts if a["verified"]}
    assert pairs and all(p["chosen"][0]["content"] in verified for p in pairs)
    assert all(p["prompt"][0]["content"][1] == ":" for p in pairs), "without a mark"
    assert (tmp_path / "seed-0" / "switched" / "model.safetensors").exists()
    assert all(0 <= f["tokens"] <= 36 for f in found.values())


def test_the_example_verifies_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("mode_switching")
    assert example.reasoning("135") == "(1)(3)(5)=135"
    assert example.right("u:5351", "=135") and example.right("u:5351", example.reasoning("135"))
    assert not example.right("u:5351", "135") and not example.right("u:5351", "=1355")
