"""The TRL adapter with vLLM on CPU, in the trainer's process (colocate) and as a server. `make test-vllm` runs this.

With float32 weights engine and trainer agree to 1e-5 on a log-prob, so nothing can hide in a tolerance; with TRL's own
choice, bfloat16, to 0.01 in the mean, which makes the engine's log-probs differ from the trainer's.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import trl
from harness import history, make, weights
from messages import raises
from processes import started
from watch import Watch

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.trl_data import write
from rl_plugins.lab.probe.pool import PoolPlan, RunPool
from rl_plugins.lab.probe.runs import ProbedRun

_spec = importlib.util.find_spec("vllm")
_installed = _spec is not None and _spec.origin is not None
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not _installed, reason="needs vLLM on CPU; `make test-vllm` installs and runs it"),
]

EXACT = 5e-5  # float32 on both sides


def run(folder, methods, *, stale=False, **options):
    """A trained trainer and its Watch. `stale`: the engine gets the first weights and then none."""
    t = make(folder, methods, **options)
    watch = Watch(t)
    if stale:
        sync, synced = t.vllm_generation.sync_weights, []
        t.vllm_generation.sync_weights = lambda: None if synced else (synced.append(True), sync())
    t.train()
    return t, watch


def moved(t, folder):
    return (weights(t) - weights(make(folder))).abs().max().item()


def gradient(t, loss):
    t.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in t.model.parameters()])


# ---- colocate


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", EXACT), ("auto", 0.02)])
def test_engine_has_the_weights_of_the_trainer(folder, colocate, dtype, tolerance):
    """Every batch was sampled with the weights of that moment; an engine that is stale would be seen."""
    options = dict(colocate(dtype), max_steps=3, learning_rate=1.0)
    t, watch = run(folder, [], **options)
    served = t.vllm_generation.llm.llm_engine.model_config.dtype
    assert served == (torch.float32 if dtype == "float32" else torch.bfloat16)
    errors = [b.error.mean().item() for b in watch.batches]
    _, other = run(folder, [], stale=True, **options)
    stale = [b.error.mean().item() for b in other.batches]
    print(dtype, "mean |dlogp| per step", errors, "max", [b.error.max().item() for b in watch.batches], "stale", stale)
    assert len(errors) == 3 and max(errors) < tolerance and stale[0] < tolerance
    assert min(stale[1:]) > 3 * tolerance and moved(t, folder) > 1e-3


def test_off_is_bit_identical(folder, colocate):
    """No methods, or one that only looks: the weights and rewards of stock TRL."""
    results = {}
    for name, kwargs in {"stock": dict(stock=True), "empty": {}, "noop": dict(methods=["noop"])}.items():
        t = make(folder, kwargs.pop("methods", ()), **colocate(), max_steps=2, learning_rate=0.3, **kwargs)
        t.train()
        results[name] = weights(t), history(t, "reward")
    for name in ("empty", "noop"):
        assert torch.equal(results["stock"][0], results[name][0]), name
        assert results["stock"][1] == results[name][1]


def test_vade_and_mc_grpo(folder, colocate):
    """8 chosen prompts with 9 rollouts each are generated, 64 rows trained, in every step with new weights."""
    t, watch = run(folder, ["vade", "mc_grpo"], **colocate(), max_steps=3, learning_rate=0.1, temperature=0.8)
    for call, batch in zip(watch.calls, watch.batches, strict=True):
        prompts = [r.plan.prompt_index for r in call.work.mine]
        assert len(set(prompts)) == 8 and prompts == [p for p in prompts[::9] for _ in range(9)]
        assert len(call.prompts) == 72 and len(batch.tensors["advantages"]) == 64
        assert batch.error.max() < EXACT
    assert history(t, "rl_plugins/rows_generated") == [72.0] * 3
    assert history(t, "rl_plugins/rows_trained") == [64.0] * 3
    assert max(history(t, "sampling/sampling_logp_difference/max")) < EXACT
    assert all(h > 0 for h in history(t, "grad_norm")) and moved(t, folder) > 1e-3


def test_minpro_has_the_log_probs_of_the_engine(folder, colocate):
    """In the first step the weights differ from 1 only by what the engine rounds; the update is that of the formula."""
    with raises(ConfigError, match=r"`minpro`.*use_vllm"):
        make(folder, ["minpro"])
    t, watch = run(folder, ["minpro"], **colocate("auto"), max_steps=1, max_grad_norm=0.0, learning_rate=0.5)
    (call,), (batch,) = watch.calls, watch.batches
    b = batch.tensors
    assert t.vllm_importance_sampling_correction is False and "importance_sampling_ratio" not in b
    for row, logprobs in zip(b["rlp_rollout_logprobs"], call.logprobs, strict=True):
        assert row[: len(logprobs)].tolist() == pytest.approx(logprobs, abs=1e-6)
    assert 1e-4 < batch.error.mean() < 0.02
    start = make(folder)
    ids = torch.cat([b["prompt_ids"], b["completion_ids"]], 1)
    attention = torch.cat([b["prompt_mask"], b["completion_mask"]], 1)
    lp = start._get_per_token_logps_and_entropies(start.model, ids, attention, b["completion_ids"].size(1))[0]
    total = torch.zeros(())
    for i in range(len(lp)):
        prefix = 1.0
        for j in range(int(b["completion_mask"][i].sum())):
            ratio = (lp[i, j] - b["rlp_rollout_logprobs"][i, j]).exp().item()
            total = total - prefix * ratio * b["advantages"][i] * lp[i, j] / batch.mask.sum()
            prefix = ratio if j == 0 else min(prefix, ratio)
    expected = gradient(start, total)
    step = (weights(t) - weights(make(folder))) / -0.5
    assert (step - expected).norm() / expected.norm() < 1e-4
    assert abs(history(t, "minpro/weight_mean")[0] - 1) > 1e-4


def test_a_probe_samples_by_the_engine(tmp_path, folder, colocate):
    """The most likely token of the probed policy in every place, from an engine that began with other weights."""
    path = write(tmp_path)
    options = ["--use_vllm", "--vllm_mode", "colocate", "--vllm_max_model_length", "64", "--top_k", "1"]
    make(folder, **colocate())  # the engine of `folder`'s policy, which the probe gets, too
    run = ProbedRun.of([str(path), *options, "--max_completion_length", "6"])
    pool = RunPool(run, PoolPlan(prompts=3, rollouts=2, accuracy=0.2), tmp_path / "pool")
    pool.draw()
    sampler = run.sampler()
    for i, file in enumerate(sorted((tmp_path / "pool" / "pool").iterdir())):
        prompt = sampler.encode([run.rows.dataset[pool.prompts[i]]["prompt"]])["input_ids"][0]
        for made in pq.read_table(file)["completion_ids"].to_pylist():
            with torch.no_grad():
                logits = sampler.model(torch.cat([prompt, torch.tensor(made)])[None]).logits[0]
            assert len(made) > 0 and logits[len(prompt) - 1 : -1].argmax(-1).tolist() == made


def check_given(t, watch, tolerance):
    import probes

    rollouts, tokens = probes.Given.seen
    (call,), (batch,) = watch.calls, watch.batches
    b, ids = batch.tensors, t._tokenizer.convert_tokens_to_ids
    assert call.num_generations == 1 and len(call.prompts) == 62, "two of 64 rows are given"
    assert call.prompts[6][-2:] == [10, 11] and call.prompts[6][:-2] == call.prompts[7][:-2]
    assert call.prompts[22][1:-1] == ids(list("a:21")) and call.prompts[30][1:-1] == ids(list("d:12"))
    known = b["sampling_per_token_logps"].isnan().logical_not()
    assert b["completion_ids"][0].tolist()[:4] == [7, 8, 9, 1] and b["completion_ids"][1].tolist()[:3] == [6, 6, 1]
    assert (b["completion_ids"][8:16, :2] == torch.tensor([10, 11])).all()
    assert b["completion_mask"][16:24].sum(1).max() == 3
    unknown = batch.mask & ~known
    expected = torch.zeros_like(unknown)
    expected[1, :3] = expected[8:16, :2] = True
    assert torch.equal(unknown, expected)
    # Those of the engine stand with their tokens and are nearly those of the policy; those given are as they are.
    at = lambda row: tokens.row == row
    assert tokens.rollout_logprobs[at(0)].tolist() == [-1.0, -2.0, -3.0, -4.0]
    torch.testing.assert_close(tokens.rollout_logprobs[at(1)], tokens.old_logprobs[at(1)])
    torch.testing.assert_close(tokens.rollout_logprobs[at(8)][:2], tokens.old_logprobs[at(8)][:2])
    for i in range(2, 64):
        lead = 2 if 8 <= i < 16 else 0
        got = tokens.rollout_logprobs[at(i)][lead:].tolist()
        assert got == pytest.approx(call.logprobs[i - 2][: len(got)], abs=1e-6)
        assert got == pytest.approx(call.policy[i - 2][: len(got)], abs=tolerance)
    assert not tokens.forced[at(0)].any()  # its log-probs are known: it is a sample
    assert tokens.forced[at(1)].all() and tokens.forced[at(8)].tolist()[:3] == [True, True, False]
    assert rollouts.prompt_index[32] == -1 and rollouts.payload[8] == {"hint": 2}


def test_a_plan_can_ask_for_every_kind_of_row(folder, colocate):
    """Given completions, prefix, token limit, edited and foreign prompts: one answer per row, in its place."""
    options = dict(vllm_importance_sampling_mode="token_truncate", max_steps=1, learning_rate=0.3)
    t, watch = run(folder, ["given"], **colocate("auto"), **options)
    check_given(t, watch, 0.3)
    b = watch.batches[0].tensors
    ratio = b["importance_sampling_ratio"]
    assert (ratio[1, :3] == 1).all() and (ratio[8:16, :2] == 1).all(), "nothing is known, nothing is corrected"
    own = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    expected = (b["old_per_token_logps"][0, :4] - own).exp().clamp(max=t.vllm_importance_sampling_clip_max)
    torch.testing.assert_close(ratio[0, :4], expected)
    assert torch.isfinite(weights(t)).all() and moved(t, folder) > 1e-4


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_tokens_without_a_log_prob_have_the_policys_own(folder, colocate, num_iterations):
    """Forced tokens have no log-prob of the engine; for minpro their ratio is 1 when the step begins."""
    options = dict(max_steps=num_iterations, num_iterations=num_iterations)
    t, watch = run(folder, ["prefixed", "minpro"], **colocate("auto"), **options)
    b = watch.batches[0].tensors
    assert (b["completion_ids"][:, 0] == 10).all() and b["sampling_per_token_logps"][:, 0].isnan().all()
    assert all(torch.isfinite(torch.tensor(history(t, n))).all() for n in ("loss", "grad_norm", "minpro/weight_mean"))
    assert torch.isfinite(weights(t)).all() and history(t, "grad_norm")[0] > 0


def check_rounds(watch):
    """4 rollouts for every prompt, then 8 more for the 4 with the lowest rewards."""
    assert [len(c.prompts) for c in watch.calls] == [32, 32] * len(watch.batches)
    for first, second, batch in zip(watch.calls[::2], watch.calls[1::2], watch.batches, strict=True):
        assert first.num_generations == second.num_generations == 1
        r = batch.decision.rollouts
        sizes = torch.bincount(r.group)
        assert sizes.tolist().count(12) == 4 and sizes.tolist().count(4) == 4
        asked = sorted(map(tuple, first.prompts + second.prompts))
        b = batch.tensors
        trained = [tuple(p[m > 0].tolist()) for p, m in zip(b["prompt_ids"], b["prompt_mask"], strict=True)]
        assert sorted(trained) == asked
        assert batch.error.max() < EXACT


def test_rounds(folder, colocate):
    t, watch = run(folder, ["probing"], **colocate(), max_steps=2, learning_rate=0.3)
    check_rounds(watch)
    assert max(history(t, "sampling/sampling_logp_difference/max")) < EXACT


def test_lora(folder, colocate):
    """The adapters reach the engine merged into the weights."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options = dict(colocate(), more=dict(peft_config=lora), max_steps=3, learning_rate=20.0)
    _, watch = run(folder, ["mc_grpo"], **options)
    assert max(b.error.max() for b in watch.batches) < EXACT
    _, stale = run(folder, ["mc_grpo"], stale=True, **options)
    assert stale.batches[2].error.max() > 0.01


# ---- the loss


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extras", [{}, dict(loss_type="grpo", beta=0.04, entropy_coef=0.01, delta=None)])
def test_own_surrogate_under_the_correction_equals_native(folder, colocate, mode, extras):
    """PPO-clip as a method has TRL's own gradient on a batch whose importance ratios are cut off above and below."""
    low, high = (0.9, 1.1) if mode.startswith("token") else (0.7, 1.4)
    options = dict(
        max_steps=2,
        learning_rate=0.1,
        epsilon=0.05,
        epsilon_high=0.1,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        **extras,
    )
    params = {"ppo": {"low": 0.05, "high": 0.1}}
    t, watch = run(folder, ["ppo"], stale=True, method_params=params, **colocate(), **options)
    batch = watch.batches[1]
    b = batch.tensors
    ratio = b["importance_sampling_ratio"]
    assert ratio.shape[1] == (1 if mode.startswith("sequence") else b["completion_ids"].size(1))
    cut = ratio == 0 if mode.endswith("mask") else (ratio == low) | (ratio == high)
    assert 0.02 < cut.float().mean() < 0.9, "some ratios must be cut off, and some not"
    torch.manual_seed(0)
    with torch.no_grad():
        for p in t.model.parameters():
            p.add_(0.01 * torch.randn_like(p))  # ratios of the policy that trains to the one that sampled
    t.model.train()
    native = gradient(t, trl.GRPOTrainer._compute_loss(t, t.model, b))
    own = gradient(t, t.compute_loss(t.model, b))
    assert native.norm() > 1e-3
    assert (own - native).norm() / native.norm() < 1e-5
    uncorrected = {**b, "importance_sampling_ratio": torch.ones_like(ratio)}
    other = gradient(t, t.compute_loss(t.model, uncorrected))
    assert (other - native).norm() / native.norm() > 0.01


# ---- server


def test_server_and_groups_of_other_sizes(folder, server):
    """vade + mc_grpo: TRL asks a server for `num_generations` per unique prompt, which 9 rollouts per prompt break."""
    t, watch = run(folder, ["vade", "mc_grpo"], **server, max_steps=2, learning_rate=0.3, temperature=0.8)
    for call, batch in zip(watch.calls, watch.batches, strict=True):
        assert call.num_generations == 1 and len(call.completions) == 72
        assert len(batch.tensors["advantages"]) == 64
        assert batch.error.max() < EXACT
    print("server max |dlogp|", [b.error.max().item() for b in watch.batches])
    assert moved(t, folder) > 1e-3


def test_server_with_groups_as_trl_has_them(folder, server):
    """A method that leaves the plan alone leaves the request alone: 8 completions of 8 prompts. Staleness shows."""
    options = dict(server, max_steps=2, learning_rate=1.0)
    _, watch = run(folder, ["noop"], **options)
    assert [c.num_generations for c in watch.calls] == [8, 8]
    assert max(b.error.max() for b in watch.batches) < EXACT
    _, stale = run(folder, ["noop"], stale=True, **options)
    assert stale.batches[0].error.max() < EXACT < 0.1 < stale.batches[1].error.max()


def test_server_rounds(folder, server):
    check_rounds(run(folder, ["probing"], **server, max_steps=2, learning_rate=0.3)[1])


def test_server_plan(folder, server):
    t, watch = run(folder, ["given"], **server, max_steps=1)
    check_given(t, watch, EXACT)


def on_two_ranks(folder, url, out):
    """What ranks_script.py found on each rank."""
    script = Path(__file__).parent / "ranks_script.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    log = out / "log.txt"
    with started([*command, str(folder), url, str(out)], log) as process:
        assert process.wait(900) == 0, log.read_text()[-8000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def check_ranks(results, cases):
    for rank, found in enumerate(results):
        assert set(found) == cases
        requests = found.pop("requests")
        assert requests["rows"] == [[5, 16, 0], [16, 5, 16]][rank] and requests["limits"]
        assert requests["tokens"] > 40 and requests["error"] < EXACT
        for case, r in found.items():
            assert r["rows"] == 32 and r["tokens"] > 200 and r["error"] < EXACT, (case, rank, r)


def test_server_and_two_ranks(folder, server_url, tmp_path):
    """TRL cuts the server's answer into equal shares, whatever each rank asked for."""
    cases = {"mc_grpo", "small", "given", "probing", "talk", "requests"}
    check_ranks(on_two_ranks(folder, server_url, tmp_path), cases)


def test_two_ranks_with_an_engine_each(folder, tmp_path):
    check_ranks(on_two_ranks(folder, "colocate", tmp_path), {"talk", "requests"})
