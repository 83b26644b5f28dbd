"""The learning runs: a short one on two layers of the model, what is stored of it, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rl_plugins.lab.real.model import model_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import real_learning

pytestmark = pytest.mark.real

WELL = {"grpo": 0.5, "gdpo": 0.75, "vade": 0.25}


def test_a_run_is_stored_when_it_ends_and_not_made_again(tmp_path, monkeypatch):
    shallow, train = model_folder("bfloat16", layers=2), real_learning.train
    made = []

    def short(arm, seed, out):
        made.append((arm, seed))
        if arm == "vade":
            raise KeyboardInterrupt  # the second arm is stored by then
        return train(arm, seed, out, steps=2, model=shallow)

    for name, value in {"RESULTS": tmp_path / "results.json", "STEPS": 2, "LENGTH": 3, "train": short}.items():
        monkeypatch.setattr(real_learning, name, value)
    monkeypatch.setattr(real_learning, "model_folder", lambda dtype: shallow)
    rows, held = real_learning.questions()
    monkeypatch.setattr(real_learning, "questions", lambda: (rows, held[:4]))
    monkeypatch.setattr(sys, "argv", ["", "--seeds", "1", "--out", str(tmp_path)])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            real_learning.main()
    assert made == [("grpo", 0), ("gdpo", 0), ("vade", 0), ("vade", 0)]
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["base"].keys() == {"correct", "solved", "brief"} and list(found["runs"]) == ["grpo 0", "gdpo 0"]
    for name, run in found["runs"].items():
        assert list(run["held_out"]) == ["1", "2"] and run["cpu_seconds"] > 0
        assert [row["step"] for row in run["log"] if "loss" in row] == [1, 2]
        for step in (1, 2):
            assert (tmp_path / f"{name.replace(' ', '-')}-{step}" / "adapter_model.safetensors").exists()


def test_the_table_pairs_by_seed_and_says_when_it_decides_nothing(tmp_path, monkeypatch):
    def run(solved):
        return {"held_out": {step: {"solved": solved, "brief": 0.5, "correct": solved} for step in ("12", "24")}}

    runs = {"grpo 0": run(0.25), "grpo 1": run(0.5), "gdpo 1": run(0.625), "gdpo 2": run(0.875)}
    file, page = tmp_path / "results.json", tmp_path / "real.md"
    file.write_text(json.dumps({"base": {"solved": 0.1, "brief": 0.2}, "runs": runs}))
    page.write_text("a\n<!-- made by benchmarks/real_learning.py: begin -->\nold\n"
                    "<!-- made by benchmarks/real_learning.py: end -->\nb\n")  # fmt: skip
    monkeypatch.setattr(real_learning, "RESULTS", file)
    monkeypatch.setattr(real_learning, "PAGE", page)
    monkeypatch.setattr(real_learning, "FIGURE", tmp_path / "curves.png")
    monkeypatch.setattr(sys, "argv", ["", "--table"])
    real_learning.main()
    text = page.read_text()
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert cells[1] == ["before training", "", "0.100", "0.200", "", ""]
    assert cells[3][:2] == ["gdpo", "2"] and cells[3][2].startswith("0.750 ±") and cells[3][4:] == ["0.125", "1"]
    assert text.startswith("a\n") and text.endswith("-->\nb\n") and "old" not in text
    assert "0 of 8 seeds have run in every variant: this decides nothing." in text  # none of vade
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    runs = {f"{arm} {seed}": run(solved) for arm, solved in WELL.items() for seed in range(8)}
    file.write_text(json.dumps({"base": {"solved": 0.1, "brief": 0.2}, "runs": runs}))
    real_learning.main()
    told = [line for line in page.read_text().splitlines() if line.startswith("- ")]
    assert "the claim holds" in told[0] and "the claim fails" in told[1]
