"""verl's real SFT trainer with OTR under FSDP2 on two ranks, against float64 autograd; and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from messages import raises
from waiting import NEVER

pytest.importorskip("verl", reason="verl is not installed")

pytestmark = [pytest.mark.host, pytest.mark.ranks]

EXPECTED = ["+otr.expected=True"]
CASES = {
    "token": [*EXPECTED, "data.val_files=${data.train_files}", "data.val_max_samples=16"],
    "sequence": [*EXPECTED, "+otr.reduction=sequence", "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=60"],
    "packed": [*EXPECTED, "model.use_remove_padding=True", "+otr.beta=-0.4", "+otr.kappa=2"],
    "drawn": ["+otr.samples=16", "trainer.total_training_steps=2"],
    "again": ["+otr.samples=16"],
    "others": ["+otr.samples=16", "+otr.seed=1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import pandas as pd
    from transformers import set_seed

    from rl_plugins.lab.demo.policy import build_model, build_tokenizer
    from rl_plugins.lab.demo.tasks import build_rows

    path = tmp_path_factory.mktemp("verl_sft")
    set_seed(0)
    tokenizer, model = build_tokenizer(), build_model(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(path / "policy")
    tokenizer.save_pretrained(path / "policy")
    rows = [[*r["prompt"], {"role": "assistant", "content": "=" + r["answer"]}] for r in build_rows(32, seed=2)]
    pd.DataFrame({"messages": rows}).to_parquet(path / "train.parquet")
    return path


@pytest.fixture(scope="module")
def runs(folder):
    """Case -> what each of the two ranks recorded."""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(__file__).parent / "sft_script.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
         str(folder), json.dumps(list(CASES.values())), str(folder / "out")],
        capture_output=True, text=True, timeout=NEVER, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(folder / f"out-{rank}", weights_only=False) for rank in (0, 1)]
    return dict(zip(CASES, zip(*ranks, strict=True), strict=True))


def reference(folder, ranks, reduction="token", kappa=1.3, beta=-0.1):
    """Gradient and mean cross-entropy of the first step in float64: autograd and plain loops over all rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "policy").double()
    terms, nll, tokens = [], 0.0, 0
    for steps, _ in ranks:
        for ids, mask in zip(steps[0]["ids"], steps[0]["mask"], strict=True):
            log_p = model(ids[None]).logits[0].log_softmax(-1)
            of = []
            for t in range(len(ids) - 1):
                if mask[t + 1]:
                    q = (log_p[t].detach() / kappa).softmax(-1)
                    reward = torch.full_like(q, beta)
                    reward[ids[t + 1]] = 1.0
                    of.append(-(q * reward * log_p[t]).sum())
                    nll -= log_p[t, ids[t + 1]].item()
            tokens += len(of)
            terms.append(torch.stack(of).sum() / (len(of) if reduction == "sequence" else 1))
    loss = sum(terms) / (tokens if reduction == "token" else len(terms))
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), loss.item(), nll / tokens


@pytest.mark.parametrize(
    ("case", "how"),
    [("token", {}), ("sequence", {"reduction": "sequence"}), ("packed", {"beta": -0.4, "kappa": 2.0})],
)
def test_the_gradient_of_two_ranks_is_that_of_float64_autograd(folder, runs, case, how):
    """Micro-batches of fixed and of dynamic size, with and without padding."""
    wanted, loss, nll = reference(folder, runs[case], **how)
    for steps, _ in runs[case]:
        assert (steps[0]["gradient"].double() - wanted).norm() / wanted.norm() < 2e-6
        assert steps[0]["metrics"]["train/loss"] == pytest.approx(loss, rel=1e-5)
        assert steps[0]["metrics"]["otr/nll"] == pytest.approx(nll, rel=1e-5)
    assert wanted.norm() > 0.01


def test_draws_are_repeated_and_near_the_expected_form(folder, runs):
    wanted, *_ = reference(folder, runs["drawn"])
    one, again, others = (runs[name][0][0][0]["gradient"].double() for name in ("drawn", "again", "others"))
    assert torch.equal(one, again) and not torch.equal(one, others)
    assert 0.01 < (one - wanted).norm() / wanted.norm() < 2
    first, second = runs["drawn"][0][0]
    assert 0 < first["metrics"]["otr/share"] < 0.3
    assert first["metrics"]["otr/share"] == runs["drawn"][1][0][0]["metrics"]["otr/share"], "over all ranks"
    assert second["gradient"].norm() > 0


def test_validation_is_verl_s_cross_entropy(runs):
    steps, validated = runs["token"][0]
    assert len(validated) == 1 and 3 < validated[0] < 6
    assert abs(validated[0] - steps[0]["metrics"]["otr/nll"]) < 1 and steps[0]["metrics"]["train/loss"] < 0


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["+otr.bets=1"], "has no parameter `bets`. Did you mean `beta`"),
        (["+otr.beta=2"], "`beta` is 2.0; it must be >= -1 and < 1"),
        (["+otr=3"], "`otr` is 3; write parameters"),
        (["+rl_plugins.methods=[vade]"], "Methods act on rollouts, and SFT has none"),
        (["model.use_fused_kernels=True"], "`model.use_fused_kernels` is True. OTR needs False: they make no logits"),
        (["engine.pad_to_length=True"], "`engine.pad_to_length` is True"),
        (["engine.ulysses_sequence_parallel_size=2"], "`engine.ulysses_sequence_parallel_size` is 2. OTR needs 1"),
        (["engine.strategy=fsdp_turbo"], "`engine.strategy` is 'fsdp_turbo'. OTR needs fsdp or fsdp2"),
    ],
)
def test_refusals(folder, overrides, text):
    import sft_script

    from rl_plugins.core.errors import ConfigError
    from rl_plugins.verl import otr

    with raises(ConfigError) as e:
        otr.check(sft_script.config(folder, overrides))
    assert text in str(e.value)


def test_a_sequence_does_not_predict_the_first_token_of_the_next():
    from rl_plugins.verl import otr

    def ragged(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)

    data = {"input_ids": ragged([4, 5, 6], [7, 8]), "loss_mask": ragged([0, 1, 1], [1, 1])}
    target, rows, sequence = otr.targets(data)
    assert target[rows].tolist() == [5, 6, 8] and rows.tolist() == [0, 1, 3] and sequence.tolist() == [0, 0, 1]
