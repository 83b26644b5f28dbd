"""Masked diffusion models in TRL's trainer: states that travel with the rows, the authors' loss, learning, refusals."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import history, make, policy, weights
from masked_runs import LENGTH, Watched, make_masked, masked_policy
from transformers import BertForMaskedLM
from waiting import NEVER

from rl_plugins.errors import ConfigError, MethodError
from rl_plugins.masked import ascending_schedule
from rl_plugins.trl import GRPOConfig
from rl_plugins.trl.masked import MaskedGRPOTrainer

pytestmark = pytest.mark.host

STEPS = len(ascending_schedule(LENGTH))
EPSILON, BETA = 0.5, 0.04
ROWS = 2 * 8 * 9  # batches, prompts, rollouts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masked")


@pytest.fixture(scope="module")
def watched(folder: Path) -> Any:
    """Two batches, each in two optimizer steps of two micro-batches; rows leave, `mc_grpo` makes more."""
    trainer = make_masked(
        folder,
        ["mdlm", "mc_grpo", "filter"],
        Watched,
        method_params={"mc_grpo": {"advantage_clip": 3.0}},
        beta=BETA,
        epsilon=EPSILON,
        use_bias_correction_kl=False,  # as in the authors' code
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_steps=4,
        learning_rate=0.05,
    )
    trainer.train()
    return trainer


def loop_logprobs(model: Any, batch: dict[str, Any], row: int, mask_id: int) -> list[float]:
    """Of one row, token by token, each in its own state, in float64."""
    seen, prompt = batch["prompt_mask"][row].bool(), batch["prompt_ids"][row]
    answer, when = batch["completion_ids"][row], batch["unmasked_at"][row]
    found = []
    for t in range(len(answer)):
        state = [int(a) if w < when[t] else mask_id for a, w in zip(answer, when, strict=True)]
        ids = torch.tensor([[*prompt[seen].tolist(), *state]])
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, int(seen.sum()) + t]
        logits[mask_id] = -math.inf
        found.append(float(logits.log_softmax(-1)[answer[t]]))
    return found


def test_the_order_of_unmasking_travels_with_its_row(watched: Any) -> None:
    """Through rows that leave, TRL's shuffle and its split into micro-batches."""
    made = {(tuple(a), tuple(a.unmasked_at)) for a in watched.answers}
    assert len(watched.answers) == ROWS and len(watched.batches) == 8
    for batch in watched.batches:
        for ids, when in zip(batch["completion_ids"].tolist(), batch["unmasked_at"].tolist(), strict=True):
            assert (tuple(ids), tuple(when)) in made
            assert [when.count(i) for i in range(STEPS)] == list(ascending_schedule(LENGTH))


def test_log_probs_are_those_of_a_loop_over_tokens(watched: Any, folder: Path) -> None:
    model = BertForMaskedLM.from_pretrained(masked_policy(folder / "masked-policy")).double().eval()
    first = watched.batches[0]
    for row in (0, 7, 20):
        expected = loop_logprobs(model, first, row, watched.mask_id)
        assert first["live"][row].tolist() == pytest.approx(expected, abs=2e-5)
        assert first["ref_per_token_logps"][row].tolist() == pytest.approx(expected, abs=2e-5)


def test_old_log_probs_are_the_live_ones_before_the_first_update(watched: Any) -> None:
    for batch in watched.batches:
        apart = (batch["old_per_token_logps"] - batch["live"]).abs().max()
        assert apart < 2e-6 if batch["step"] % 2 == 0 else apart > 1e-4


def test_loss_is_the_mean_over_steps_of_the_means_of_their_tokens(watched: Any) -> None:
    """The authors' loss, in loops; KL has the weights of the surrogate; rows that left are out of every mean."""
    for step in range(4):
        batches = [b for b in watched.batches if b["step"] == step]
        total = 0.0
        for i in range(STEPS):
            values = []
            for b in batches:
                for r in range(len(b["completion_ids"])):
                    if float(b["tool_mask"][r].sum()) == 0:
                        continue
                    for t in range(LENGTH):
                        if b["unmasked_at"][r, t] != i:
                            continue
                        lp, old, ref = (
                            float(b[k][r, t]) for k in ("live", "old_per_token_logps", "ref_per_token_logps")
                        )
                        ratio, a = math.exp(lp - old), float(b["advantages"][r])
                        clipped = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
                        values.append(-min(ratio * a, clipped * a) + BETA * (math.exp(ref - lp) - (ref - lp) - 1))
            total += sum(values) / len(values)
        assert sum(float(b["loss"]) for b in batches) == pytest.approx(total / STEPS, rel=1e-4, abs=1e-7)
    assert any((b["tool_mask"].sum(1) == 0).any() for b in watched.batches), "rows left"
    assert any(abs(float(b["loss"])) > 1e-4 for b in watched.batches if b["step"] % 2)


def test_costs_count_answers_of_full_length(watched: Any) -> None:
    assert history(watched, "rl_plugins/tokens_decoded")[-1] == ROWS * LENGTH
    assert history(watched, "rl_plugins/rows_made")[-1] == ROWS


def test_one_step_log_probs_see_no_answer(folder: Path) -> None:
    """The baseline: one pass, an answer of masks, some prompt tokens hidden, the same ones in both updates."""
    trainer = make_masked(folder, (), Watched, prompt_masking=0.3, num_iterations=2, max_steps=2, learning_rate=0.05)
    trainer.train()
    first, second = trainer.batches
    hidden = first["prompt_hidden"] & first["prompt_mask"].bool()
    assert 0.2 < float(hidden.sum() / first["prompt_mask"].sum()) < 0.4
    assert (first["old_per_token_logps"] - first["live"]).abs().max() < 2e-6
    model = BertForMaskedLM.from_pretrained(masked_policy(folder / "masked-policy")).double().eval()
    row = int(hidden.sum(1).argmax())
    seen = first["prompt_mask"][row].bool()
    prompt = first["prompt_ids"][row].masked_fill(first["prompt_hidden"][row], trainer.mask_id)[seen].tolist()
    ids = torch.tensor([[*prompt, *[trainer.mask_id] * LENGTH]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) :]
    logits[:, trainer.mask_id] = -math.inf
    expected = logits.log_softmax(-1).gather(1, first["completion_ids"][row][:, None])[:, 0]
    torch.testing.assert_close(first["live"][row].double(), expected, atol=2e-5, rtol=0)


def test_recomputed_states_give_the_same_gradient(folder: Path) -> None:
    runs = []
    for recompute in (False, True):
        trainer = make_masked(folder, ["mdlm"], recompute_states=recompute, max_steps=2, learning_rate=0.05, beta=BETA)
        trainer.train()
        runs.append((weights(trainer), history(trainer, "grad_norm")))
    assert runs[0][1][0] > 1e-3 and runs[0][1] == pytest.approx(runs[1][1], rel=1e-6)
    torch.testing.assert_close(runs[0][0], runs[1][0], atol=1e-7, rtol=0)


def test_a_run_resumed_from_a_checkpoint_ends_at_the_same_weights(folder: Path) -> None:
    options: dict[str, Any] = dict(max_steps=4, optim="adamw_torch", learning_rate=1e-3, num_iterations=2)
    whole = make_masked(folder, ["mdlm"], output_dir=folder / "whole", save_strategy="steps", save_steps=2, **options)
    whole.train()
    resumed = make_masked(folder, ["mdlm"], output_dir=folder / "again", **options)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(resumed))


def test_two_ranks_train_as_one(folder: Path) -> None:
    script, results = Path(__file__).parent / "masked_ranks_script.py", []
    for ranks in (1, 2):
        out = folder / f"ranks{ranks}.pt"
        command = [sys.executable, str(script), str(out)]
        if ranks > 1:
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(torch.load(out))
    one, two = results
    assert max(map(abs, one["loss"])) > 1e-4
    torch.testing.assert_close(one["weights"], two["weights"], atol=3e-7, rtol=0)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-4, abs=1e-7)


def test_a_lora_adapter_trains_against_the_base_model(folder: Path) -> None:
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=True)
    trainer = make_masked(folder, ["mdlm"], beta=BETA, max_steps=2, learning_rate=0.5, more={"peft_config": adapter})
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    trainer.train()
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
    first, second = history(trainer, "kl")
    assert abs(first) < 1e-9 < 1e-6 < second


# ---- refusals


def test_a_causal_model_is_refused(folder: Path) -> None:
    causal = str(policy(folder / "policy"))
    with pytest.raises(ConfigError, match="causal"):
        make_masked(folder, ["mdlm"], mask_token_id=6, more={"model": causal})


def test_a_tokenizer_without_a_mask_is_refused(folder: Path) -> None:
    from rl_plugins.demo.policy import build_tokenizer as without_mask

    with pytest.raises(ConfigError, match="mask_token_id"):
        make_masked(folder, more={"processing_class": without_mask()})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(use_vllm=True), "vLLM decodes from left to right"),
        (dict(top_k=5), "whole distribution"),
        (dict(generation_kwargs={"top_p": 0.5}), "no option of `generate`"),
        (dict(mask_truncated_completions=True), "same length"),
        (dict(step_weight="equal"), "logprobs_from='trajectory'"),
        (dict(recompute_states=True), "acts with logprobs_from='trajectory' only"),
        (dict(logprobs_from="both"), "allowed are one_step and trajectory"),
        (dict(unmasking="random"), "allowed: uniform, ascending"),
        (dict(diffusion_steps=15), "14 or fewer"),
        (dict(methods=["ass"], diffusion_steps=5), "has 3"),
        (dict(methods=["ass"], method_params={"ass": {"blocks": 4}}), "from 1 to 3"),
        (dict(methods=["mdlm", "april"]), "continues no text"),
        (
            dict(
                methods=["mdlm", "turn_control"],
                method_params={"turn_control": {"environment": "rl_plugins.demo.environments:Grid"}},
            ),
            "continues no",
        ),
        (dict(methods=["mdlm", "rollout_replay"]), "without the order in which"),
        (dict(methods=["mdlm", "forcing"]), "without the order in which"),
        (dict(methods=["mdlm", "probing"]), "generates in rounds"),
        (dict(methods=["mdlm", "ppo"]), "step_weight='tokens'"),
        (dict(methods=["cj_grpo", "minpro"], temperature=0.7, num_iterations=2), "temperature=0.7"),
        (dict(methods=["ass", "minpro"], num_iterations=2), "no log-probs of what was sampled"),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else None,
)
def test_options_and_methods_that_do_not_fit(options: dict[str, Any], text: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        make_masked(folder, **options)


@pytest.mark.parametrize(
    "more",
    [dict(tools=[print]), dict(rollout_func=lambda prompts, trainer: {})],
    ids=["tools", "rollout_func"],
)
def test_what_continues_an_answer_is_refused(more: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigError, match="decodes it as a whole"):
        make_masked(folder, more=more)


def test_completions_without_their_steps_are_refused(folder: Path) -> None:
    trainer = make_masked(folder, ["mdlm", "prefixed"])
    with pytest.raises(MethodError, match="order in which its tokens were unmasked"):
        trainer.train()


def test_the_config_of_the_trainer_is_its_own(folder: Path) -> None:
    args = GRPOConfig(str(folder / "x"), use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match="MaskedGRPOConfig"):
        MaskedGRPOTrainer(model=str(masked_policy(folder / "masked-policy")), args=args)


def test_other_trainers_name_this_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"MaskedGRPOTrainer of rl_plugins\.trl\.masked"):
        make(folder, ["mdlm"])
