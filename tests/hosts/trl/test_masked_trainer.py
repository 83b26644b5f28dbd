"""Masked diffusion models in TRL's trainer: states that travel with the rows, the authors' loss, learning."""

from __future__ import annotations

import math
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import clean_processes
import datasets
import masked_runs
import probes
import pytest
import torch
import yaml
from harness import history, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_runs import LENGTH, Watched, make_masked, masked_policy
from transformers import BertForMaskedLM
from transformers import trainer as hf_trainer
from waiting import NEVER

from rl_plugins.kit.masked import ascending_schedule, step_weights
from rl_plugins.lab.compare.plan import make_plan, parse_variants
from rl_plugins.lab.compare.runs import read_log
from rl_plugins.lab.compare.trl import Trl
from rl_plugins.lab.demo import masked
from rl_plugins.lab.demo.settings import write_data
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.trl.changes import changed
from rl_plugins.trl.masked.trainer import MaskedTrainer

pytestmark = pytest.mark.host

STEPS = len(ascending_schedule(LENGTH))
EPSILON, BETA = 0.5, 0.04
MU = 4  # optimizer steps of a batch
ROWS = 2 * 8 * 9  # batches, prompts, rollouts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masked")


@pytest.fixture(scope="module")
def watched(folder: Path) -> Any:
    """Two batches, each in four optimizer steps of two micro-batches; rows leave, `mc_grpo` makes more."""
    trainer = make_masked(
        folder,
        ["mdlm", "mc_grpo", "filter", "signals"],
        Watched,
        method_params={"mc_grpo": {"advantage_clip": 3.0}},
        beta=BETA,
        epsilon=EPSILON,
        use_bias_correction_kl=False,  # as in the authors' code
        gradient_accumulation_steps=2,
        num_iterations=MU,
        max_steps=2 * MU,
        learning_rate=1.0,
    )
    trainer.train()
    return trainer


def loop_logprobs(
    model: Any, batch: dict[str, Any], row: int, mask_id: int, entropies: list[float] | None = None
) -> list[float]:
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
        lp = logits.log_softmax(-1)
        found.append(float(lp[answer[t]]))
        if entropies is not None:
            entropies.append(-float((lp.exp() * lp).nansum()))
    return found


def test_the_order_of_unmasking_travels_with_its_row(watched: Any) -> None:
    """Through rows that leave, TRL's shuffle and its split into micro-batches."""
    made = {(tuple(a), tuple(a.unmasked_at)) for a in watched.answers}
    assert len(watched.answers) == ROWS and len(watched.batches) == 4 * MU
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
        assert apart < 2e-6 if batch["step"] % MU == 0 else apart > 1e-4


def test_loss_is_the_mean_over_steps_of_the_means_of_their_tokens(watched: Any) -> None:
    """The authors' loss, in loops; KL has the weights of the surrogate; rows that left are out of every mean."""
    for step in range(2 * MU):
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
    assert any(abs(float(b["loss"])) > 1e-4 for b in watched.batches if b["step"] % MU)


def test_the_share_of_clipped_tokens_is_logged(watched: Any) -> None:
    """Those whose term is the clipped one, each step alike. The authors count the others outside of the range."""
    found: list[list[float]] = [[], []]
    for b in watched.batches:
        ratio, a, weight = (b["live"] - b["old_per_token_logps"]).exp(), b["advantages"][:, None], b["tool_mask"]
        free, clipped = ratio * a, ratio.clamp(1 - EPSILON, 1 + EPSILON) * a
        for shares, counted in zip(found, (free > clipped, free < clipped), strict=True):
            shares.append(float((counted * weight).sum() / weight.sum()))
    logged = history(watched, "clip_ratio/region_mean")
    mean = [[sum(shares[2 * i : 2 * i + 2]) / 2 for i in range(2 * MU)] for shares in found]
    assert logged == pytest.approx(mean[0], abs=1e-6) and max(logged) > 0.01
    assert all(x == 0 for x in logged[::MU]) and any(abs(x - y) > 0.01 for x, y in zip(logged, mean[1], strict=True))


def test_signals_of_methods_are_those_of_the_states(watched: Any, folder: Path) -> None:
    """What hooks see of a token is of its state, as in the loss; text is that of the whole answer."""
    rollouts, tokens = probes.Signals.seen[0]
    model = BertForMaskedLM.from_pretrained(masked_policy(folder / "masked-policy")).double().eval()
    when = {tuple(a): a.unmasked_at for a in watched.answers}
    assert rollouts.text == watched.processing_class.batch_decode([*rollouts.token_ids.completion], True)
    for row in (0, 40):
        answer = rollouts.token_ids.completion[row].tolist()
        prompt = torch.tensor(rollouts.token_ids.prompt[row].tolist())
        alone = {
            "prompt_ids": prompt[None],
            "prompt_mask": torch.ones(1, len(prompt)),
            "completion_ids": torch.tensor([answer]),
            "unmasked_at": torch.tensor([when[tuple(answer)]]),
        }
        of, entropies = tokens.row == row, []
        expected = loop_logprobs(model, alone, 0, watched.mask_id, entropies)
        for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs"):
            assert getattr(tokens, name)[of].tolist() == pytest.approx(expected, abs=2e-5), name
        assert tokens.entropies[of].tolist() == pytest.approx(entropies, abs=2e-5)


def test_costs_count_answers_of_full_length(watched: Any) -> None:
    assert history(watched, "rl_plugins/tokens_decoded")[-1] == ROWS * LENGTH
    assert history(watched, "rl_plugins/rows_made")[-1] == ROWS


def test_one_step_log_probs_see_no_answer(folder: Path) -> None:
    """The baseline: one pass, an answer of masks, some prompt tokens hidden, the same ones in both updates."""
    trainer = make_masked(
        folder, (), Watched, prompt_masking=0.3, num_iterations=2, max_steps=2, learning_rate=0.05, pad_to_multiple_of=8
    )
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
    expected = logits.log_softmax(-1).gather(1, first["completion_ids"][row, :LENGTH, None])[:, 0]
    torch.testing.assert_close(first["live"][row, :LENGTH].double(), expected, atol=2e-5, rtol=0)


def sevens(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Share of the digit 7 in the text of an answer."""
    assert all(len(ids) == LENGTH for ids in completion_ids)
    return [c[-1]["content"].count("7") / LENGTH for c in completions]


def test_it_learns_what_is_rewarded_in_the_text(folder: Path) -> None:
    """From nothing: 10 steps of 64 rollouts."""
    trainer = make_masked(
        folder,
        ["mdlm"],
        max_steps=10,
        optim="adamw_torch",
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=10,
        per_device_eval_batch_size=40,
        num_generations_eval=1,
        more={"reward_funcs": sevens, "eval_dataset": build_dataset(40, seed=2)},
    )
    trainer.train()
    learned = history(trainer, "rewards/sevens/mean")
    assert learned[0] < 0.05 and learned[-1] > 0.8
    assert history(trainer, "eval_rewards/sevens/mean")[-1] > 0.8


def sometimes(completion_ids: Any, **columns: Any) -> list[float | None]:
    return [None if sum(ids) % 4 == 0 else sum(ids) % 7 / 7 for ids in completion_ids]


def test_every_way_to_decode_trains_on_its_states(folder: Path) -> None:
    """Guided, from the left, in random order, at another temperature, padded; rows without a reward teach nothing."""
    trainer = make_masked(
        folder,
        ["cj_grpo"],
        Watched,
        diffusion_steps=4,
        unmasking_blocks=2,
        guidance=0.5,
        remasking="random",
        temperature=0.7,
        pad_to_multiple_of=8,
        max_steps=1,
        more={"reward_funcs": sometimes},
    )
    trainer.train()
    (batch,) = trainer.batches
    assert batch["unmasked_at"].shape == (64, 16) and (batch["tool_mask"][:, LENGTH:] == 0).all()
    batch |= {name: batch[name][:, :LENGTH] for name in ("unmasked_at", "completion_ids", "live", "tool_mask")}
    assert [[when.count(i) for i in range(4)] for when in batch["unmasked_at"].tolist()] == [[4, 3, 4, 3]] * 64
    for step in range(4):
        weight = (batch["tool_mask"] * (batch["unmasked_at"] == step)).sum(1)
        torch.testing.assert_close(weight, torch.full((64,), LENGTH / 4))
    assert (batch["unmasked_at"][:, :7] < 2).all() and batch["unmasked_at"].dtype == torch.int16
    model = BertForMaskedLM.from_pretrained(masked_policy(folder / "masked-policy")).double().eval()
    assert batch["live"][3].tolist() == pytest.approx(loop_logprobs(model, batch, 3, trainer.mask_id), abs=2e-5)
    unscored = torch.tensor([x is None for x in sometimes(batch["completion_ids"].tolist())])
    assert unscored.any() and (batch["advantages"][unscored] == 0).all() and batch["advantages"].any()


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_properties_of_the_loss(watched: Any, data: Any) -> None:
    """At the first update: 0 for centred advantages, with a gradient and without a clip; 0 without a spread of rewards;
    the same for the rows in any order."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "unmasked_at")
    batch = {name: watched.batches[0][name][:8] for name in names}
    batch["tool_mask"] = step_weights(batch["unmasked_at"], STEPS)
    raw = data.draw(st.lists(st.floats(-2, 2), min_size=8, max_size=8))
    centred = torch.tensor(raw) - sum(raw) / 8
    order = torch.tensor(data.draw(st.permutations(range(8))))

    def loss_of(advantages: Any, rows: Any = slice(None), epsilon: float = EPSILON, beta: float = 0.0) -> Any:
        given = {name: x[rows] for name, x in (batch | {"advantages": advantages}).items()}
        with torch.no_grad(), watched._in_states(given["unmasked_at"], None):
            live = watched._get_per_token_logps_and_entropies(
                watched.model,
                torch.cat([given["prompt_ids"], given["completion_ids"]], 1),
                torch.cat([given["prompt_mask"], given["completion_mask"]], 1),
                LENGTH,
            )[0]
        given |= {"ref_per_token_logps": live - 0.1, "num_items_in_batch": torch.tensor(8.0 * LENGTH)}
        with changed(watched, beta=beta, epsilon_low=epsilon, epsilon_high=epsilon):
            loss = MaskedTrainer.compute_loss(watched, watched.model, given)
        watched.model.zero_grad()
        loss.backward()
        return float(loss), torch.cat([p.grad.flatten() for p in watched.model.parameters() if p.grad is not None])

    (value, gradient), (zero, none) = loss_of(centred), loss_of(torch.zeros(8))
    assert value == pytest.approx(0, abs=1e-6) and zero == 0 and not none.any()
    assert gradient.any() or centred.abs().max() < 1e-3
    assert torch.equal(loss_of(centred, epsilon=0.0)[1], gradient)
    mixed, other = loss_of(torch.tensor(raw), order, beta=BETA), loss_of(torch.tensor(raw), beta=BETA)
    assert mixed[0] == pytest.approx(other[0], abs=1e-6)
    torch.testing.assert_close(mixed[1], other[1], atol=1e-6, rtol=1e-4)
    kl = math.exp(-0.1) + 0.1 - 1
    assert loss_of(torch.zeros(8), beta=BETA)[0] == pytest.approx(BETA * kl, rel=1e-4)


def test_recomputed_states_give_the_same_gradient(folder: Path) -> None:
    runs = []
    for recompute in (False, True):
        trainer = make_masked(folder, ["mdlm"], recompute_states=recompute, max_steps=2, learning_rate=0.05, beta=BETA)
        trainer.train()
        runs.append((weights(trainer), history(trainer, "grad_norm")))
    assert runs[0][1][0] > 1e-3 and runs[0][1] == pytest.approx(runs[1][1], rel=1e-6)
    torch.testing.assert_close(runs[0][0], runs[1][0], atol=1e-7, rtol=0)


def test_a_killed_run_resumes_to_the_same_weights(folder: Path) -> None:
    """SIGKILL inside of the second batch, whose answers and their states are lost: the batch is made again."""
    options: dict[str, Any] = dict(max_steps=6, optim="adamw_torch", learning_rate=1e-3, num_iterations=2, beta=BETA)
    options |= dict(save_strategy="steps", save_steps=2)
    whole = make_masked(folder, ["mdlm"], output_dir=folder / "whole", **options)
    whole.train()
    dies = options | {"output_dir": folder / "killed"}
    child = clean_processes.clean().Process(target=masked_runs.train_and_kill, args=(folder, 3, dies))
    child.start()
    child.join(NEVER)
    assert child.exitcode == -signal.SIGKILL
    assert [p.name for p in (folder / "killed").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = make_masked(folder, ["mdlm"], **dies)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(whole), weights(resumed))
    assert history(whole, "loss") == history(resumed, "loss") and any(history(whole, "loss"))


@pytest.mark.ranks
def test_two_ranks_train_as_one(folder: Path) -> None:
    one, out = masked_runs.train_in_ranks(folder), folder / "ranks.pt"
    clean_processes.ranks(2, "masked_runs", "main", out)
    two = torch.load(out)
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


def test_a_run_of_the_demo_trains_by_its_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rl-plugins trl masked_grpo` on the demo's config, as `rl-plugins demo mdlm` starts it, in this process."""
    policy, data = masked_policy(folder / "masked-policy"), write_data(tmp_path / "data")
    values = masked.config(policy, data, ["mdlm"], long=False)
    values |= {"max_steps": 2, "eval_steps": 2, "eval_on_start": False, "per_device_train_batch_size": 32}
    plan = make_plan(Trl(yaml.safe_dump(values), masked=True), parse_variants(["mdlm"], "grpo"), [0], tmp_path)
    run = plan.runs[1]
    run.folder.mkdir(parents=True)
    run.write_config()
    monkeypatch.setattr(sys, "argv", [run.worker, *run.arguments])
    monkeypatch.setenv("RL_PLUGINS_LOG_FILE", str(run.log_file))
    monkeypatch.setattr(hf_trainer, "DEFAULT_CALLBACKS", [*hf_trainer.DEFAULT_CALLBACKS])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    runpy.run_module(run.worker, run_name="__main__")
    logs = read_log(run)
    assert [line["rl_plugins/tokens_decoded"] for line in logs if "reward" in line] == [32 * LENGTH, 64 * LENGTH]
    assert any("eval_rewards/exact/mean" in line for line in logs)
    assert "host options set: unmasking=ascending, end_confidence_start=0.01" in capsys.readouterr().out
