"""The trace in TRL's trainer: its files beside the decisions, a run without methods, and what a run does not have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import trl
from harness import make, policy, stub_sampling, weights
from messages import raises
from traces import by_name

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.trl import GRPOConfig
from rl_plugins.trl.commands.script import _of_grpo
from rl_plugins.trl.generation import batches as module

pytestmark = pytest.mark.host


def read(folder: Path, table: str) -> list[dict[str, Any]]:
    files = sorted((folder / "out" / "trace" / table).iterdir())
    return [record for file in files for record in pq.read_table(file).to_pylist()]


def test_files_equal_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[Any] = []
    decide = module.decide
    monkeypatch.setattr(module, "decide", lambda *args: decisions.append(decide(*args)) or decisions[-1])
    signals = ["entropies", "old_logprobs"]
    t = make(tmp_path, ["mc_grpo", "filter", "per_token"], trace={"signals": signals})
    with stub_sampling():
        t.train()
    rows, batches = read(tmp_path, "rollouts"), read(tmp_path, "batches")
    assert [b["batch"] for b in batches] == [0, 1] and len(decisions) == 2
    assert all(b["methods"] == ["mc_grpo", "filter", "per_token"] for b in batches)
    for number, d in enumerate(decisions):
        mine = [r for r in rows if r["batch"] == number]
        assert len(mine) == len(d.rollouts) == 72, "a pivot beside 8 rollouts of 8 prompts"
        assert [r["trained"] for r in mine] == d.trained.tolist()
        assert [r["advantage"] for r in mine] == d.row_advantages.tolist()
        assert [r["raw_reward"] for r in mine] == d.rollouts.reward.tolist()
        assert [r["prompt_index"] for r in mine] == d.rollouts.prompt_index.tolist()
        by = {(m["method"], m["hook"]) for r in mine for m in r["left"]}
        assert by == {("mc_grpo", "shape"), ("filter", "shape"), ("per_token", "shape")}
        assert all(r["trained"] == ({m["method"] for m in r["left"]} <= {"per_token"}) for r in mine)
        keep, advantages = (
            torch.split(d.keep_tokens, d.rollouts.length.tolist()),
            torch.split(d.advantages, d.rollouts.length.tolist()),
        )
        for i, r in enumerate(mine):
            tokenizer = t.processing_class
            assert r["completion"] == tokenizer.decode(r["completion_ids"]) and r["prompt"] == tokenizer.decode(
                r["prompt_ids"]
            )
            if r["trained"]:
                left = [-1 if k else 0 for k in keep[i].tolist()]
                assert (r["token_left"] or [-1] * len(left)) == left and (len(left) < 3 or 0 in left)
                last = r["advantages"][-1]
                values = torch.tensor(last["tokens"] or [last["advantage"]] * len(keep[i]))
                torch.testing.assert_close(values[keep[i]], advantages[i][keep[i]].float())
            assert len(r["entropies"]) == len(r["old_logprobs"]) == len(r["completion_ids"]) == r["length"]
            assert max(r["old_logprobs"]) < 0 <= min(r["entropies"])
    stats = [by_name(b["stats"]) for b in batches]
    logged = {"mc_grpo/mad_zero", "mc_grpo/sign_changed", "mc_grpo/max_abs_advantage"}
    assert all(logged <= set(s) for s in stats), "what the hooks of this batch logged"


def test_without_methods_the_weights_are_those_of_trl(tmp_path: Path) -> None:
    found = []
    for name, options in (("stock", {"stock": True}), ("traced", {"trace": True})):
        (tmp_path / name).mkdir()
        t = make(tmp_path / name, **options)
        with stub_sampling():
            t.train()
        found.append(weights(t))
    assert torch.equal(*found)
    rows = read(tmp_path / "traced", "rollouts")
    assert len(rows) == 2 * 64 and all(r["advantages"][0]["stage"] == "host" and r["trained"] for r in rows)
    assert all(r["advantage"] == pytest.approx(r["grpo"], abs=1e-5) for r in rows)


def test_signals_that_the_run_does_not_have_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, match="`trace`"):
        make(tmp_path, trace={"signals": ["turns"]})
    with raises(ConfigError, match="`trace`.*7"):
        make(tmp_path, trace=7)


def test_a_trainer_of_trl_that_would_write_none_is_refused(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), trace=True, use_cpu=True, bf16=False)
    model, dataset = str(policy(tmp_path / "policy")), build_dataset(8, seed=1)
    with raises(ConfigError, match="`trace`"):
        trl.GRPOTrainer(model=model, reward_funcs=len, args=args, train_dataset=dataset)


@pytest.mark.parametrize(("word", "own"), [(True, True), (None, False)])
def test_the_command_takes_our_trainer_for_a_trace_without_methods(word: Any, own: bool) -> None:
    args = SimpleNamespace(methods=[], count_costs=False, trace=word, resume_from_checkpoint=None)
    assert ("GRPOTrainer" in _of_grpo(args, SimpleNamespace(use_peft=False))) == own


def test_updates_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizer steps over each half of a batch, the second ones off-policy, in the proportions TRL itself logs."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    params = {"brorl": {"base_rows": 128, "dynamic_sampling": False, "lr_scale": "sqrt"}}
    t = make(
        tmp_path,
        ["brorl"],
        method_params=params,
        trace={"signals": ["ratio", "old_logprobs"], "groups": 5},
        steps_per_generation=2,
        num_iterations=2,
        max_steps=8,
        learning_rate=0.5,
        epsilon=0.02,
    )
    saw = t.updates_seen.saw_loss
    monkeypatch.setattr(
        t.updates_seen, "saw_loss", lambda inputs, new: (seen.append((inputs, new.detach())), saw(inputs, new))
    )
    with stub_sampling():
        t.train()
    rows, updates = read(tmp_path, "rollouts"), read(tmp_path, "updates")
    assert [(u["batch"], u["update"]) for u in updates] == [(b, u) for b in (0, 1) for u in range(4)]
    factor = (32 / 128) ** 0.5
    assert all(u["lr_scale"] == factor and u["scaled"] == [{"method": "brorl", "lr_scale": factor}] for u in updates)
    assert all(by_name(u["stats"])["brorl/lr_scale"] == pytest.approx(factor) for u in updates), "of its own step"
    assert [u["ratios"] is None for u in updates] == [False, True, True, False] * 2, "of the first and of the last one"
    clipped = 0
    for u, (inputs, new) in zip(updates, seen, strict=True):
        if u["ratios"] is None:
            continue
        mine = {r["row"]: r for r in rows if r["batch"] == u["batch"]}
        own = {int(row): i for i, row in enumerate(inputs["rlp_trace_row"])}
        assert {r["row"] for r in u["ratios"]} == set(own) & set(mine) and 0 < len(u["ratios"]) < 40
        for r in u["ratios"]:
            i, record = own[r["row"]], mine[r["row"]]
            assert inputs["completion_ids"][i, : record["length"]].tolist() == record["completion_ids"]
            expected = (new[i] - inputs["old_per_token_logps"][i]).exp()[: record["length"]]
            torch.testing.assert_close(torch.tensor(r["ratio"]), expected)
            out = (expected > 1.02) if record["advantage"] > 0 else (expected < 0.98)
            assert [bool(c) for c in r["clipped"]] == (out & (record["advantage"] != 0)).tolist()
            clipped += sum(r["clipped"])
            if u["update"] == 0:
                assert r["ratio"] == pytest.approx([1.0] * record["length"], abs=1e-5)
    assert clipped > 0
