"""Methods in TRL's real asynchronous trainer: nothing changes without one, decisions and losses against plain loops."""

from __future__ import annotations

import json
import math
import re
import signal
import types
from typing import Any, ClassVar

import async_ranks_script
import async_runs
import clean_processes
import pytest
import torch
from async_runs import async_config, make_async
from harness import history, length, score, weights
from messages import raises
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.experimental import async_grpo
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from waiting import NEVER

from rl_plugins.core.errors import ConfigError, MethodError, StateError
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Completion, PlanRow
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.runtime.state import load_state
from rl_plugins.testing.delayed import installed
from rl_plugins.trl import MethodsMixin
from rl_plugins.trl.asynchronous import AsyncGRPOTrainer, GenerateWorker
from rl_plugins.trl.asynchronous.cpu import varlen_attention
from rl_plugins.trl.asynchronous.driver import Deciding, host_advantages
from rl_plugins.trl.asynchronous.samples import Now, seen

pytestmark = pytest.mark.host

TWO = dict(gradient_accumulation_steps=2, per_device_train_batch_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("asynchronous")


@pytest.fixture(scope="module")
def stock(folder):
    """Four steps of TRL's own trainer, of which ours must not differ."""
    trainer = make_async(folder, stock=True, **TWO)
    trainer.train()
    return trainer


# ---- nothing changes that should not


@pytest.mark.parametrize("methods", [[], ["noop"], ["ppo"]])
def test_weights_are_those_of_trl_to_the_bit(folder, stock, methods):
    """Without methods, with one that only looks, and with TRL's clip as our surrogate, on stale rollouts."""
    trainer = make_async(folder, methods, **TWO)
    trainer.train()
    assert torch.equal(weights(trainer), weights(stock))
    assert (history(trainer, "clip_ratio/low_mean") == []) == (methods == ["ppo"])
    assert history(trainer, "reward") == history(stock, "reward")
    assert history(trainer, "loss") == history(stock, "loss")
    if methods:
        assert history(trainer, "rl_plugins/staleness_mean") == [0, 1, 2, 2]
        assert history(trainer, "rl_plugins/rows_trained") == [32] * 4
    else:
        assert set(vars(trainer)) == set(vars(stock))


def test_the_ratio_is_not_one(stock):
    """Else the clip would be compared where it does nothing."""
    assert all(abs(r - 1) > 1e-4 for r in history(stock, "ratio")[1:])


# ---- against plain loops in float64


class Recorder(TrainerCallback):
    """Weights before and after every optimizer step, and what the driver decided on."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.weights, self.entries = trainer, [self.now(trainer)], []
        own = Deciding._decided

        def decided(driver, entries):
            self.entries.append(entries)
            return own(driver, entries)

        self.decided = decided
        trainer.add_callback(self)

    @staticmethod
    def now(trainer):
        model = trainer.accelerator.unwrap_model(trainer.model)
        return {k: v.detach().clone() for k, v in model.named_parameters()}

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(self.now(self.trainer))


def recorded(folder, methods, monkeypatch, **changes):
    trainer = make_async(folder, methods, **{**TWO, "learning_rate": 0.1, "max_grad_norm": 1e9, **changes})
    recorder = Recorder(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(Deciding, "_decided", recorder.decided)
        trainer.train()
    return recorder


def token_values(model, entries):
    """Per sample: log-probs and entropies of its completion, each sample alone, and its sampled log-probs."""
    out = []
    for e in entries:
        ids = torch.tensor(e.row["input_ids"])
        start = int(torch.tensor(e.row["completion_mask"]).argmax())
        logp = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
        old = torch.tensor(e.row["old_log_probs"][start:]).double()
        out.append((logp.gather(1, ids[start:, None])[:, 0], -(logp.exp() * logp).sum(-1), old))
    return out


def mean_of_means(per_sample, each=16):
    """TRL's average: over the tokens of a micro-batch, then over micro-batches."""
    parts = [per_sample[i : i + each] for i in range(0, len(per_sample), each)]
    return sum(torch.cat(p).sum() / max(1, sum(map(len, p))) for p in parts) / len(parts)


def clip(logp, old, advantage):
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def corridor_loss(entries, values):
    terms = []
    for e, (logp, entropy, old) in zip(entries, values, strict=True):
        extra = 0.1 * (torch.relu(2.0 - entropy) + torch.relu(entropy - 2.5))
        terms.append(clip(logp, old, e.sample.advantage) + extra)
    return mean_of_means(terms)


def per_token_loss(entries, values):
    terms = []
    for e, (logp, _, old) in zip(entries, values, strict=True):
        place = torch.arange(len(logp))
        terms.append(clip(logp, old, e.sample.advantage * (1 + place % 2))[place % 3 != 2])
    return mean_of_means(terms)


def filter_loss(entries, values):
    """Groups 0, 3, 6, .. and the longest row of every other group leave."""
    sizes: dict[int, list[tuple[int, int]]] = {}
    for i, e in enumerate(entries):
        sizes.setdefault(e.sample.group_id, []).append((len(values[i][0]) * 1000 + i, i))
    median = {sorted(rows)[len(rows) // 2][1] for rows in sizes.values()}
    terms = []
    for i, (e, (logp, _, old)) in enumerate(zip(entries, values, strict=True)):
        leaves = e.sample.group_id % 3 == 0 or i in median
        terms.append(clip(logp, old, e.sample.advantage)[: 0 if leaves else None])
    return mean_of_means(terms)


def softmax_loss(entries, values):
    """A plain sum over the optimizer step; coefficients at the weights of the step."""
    groups: dict[int, list[int]] = {}
    for i, e in enumerate(entries):
        groups.setdefault(e.sample.group_id, []).append(i)
    total = torch.zeros((), dtype=torch.float64)
    for rows in groups.values():
        positive = [i for i in rows if entries[i].sample.metrics["rewards/score"] > 0.5]
        negative = [i for i in rows if i not in positive]
        scores = {i: math.exp(float(values[i][0].detach().mean())) for i in negative}
        for i in rows if positive and negative else ():
            share = 1 / len(positive) if i in positive else -scores[i] / sum(scores.values())
            total = total - share / len(groups) / len(values[i][0]) * values[i][0].sum()
    return total


ORACLES = {"corridor": corridor_loss, "per_token": per_token_loss, "filter": filter_loss, "softmax": softmax_loss}


@pytest.mark.parametrize("name", ORACLES)
def test_the_step_is_that_of_a_plain_loop(folder, monkeypatch, name):
    """The third step, on rollouts two versions old: gradient of every parameter against float64 autograd of samples
    that were never packed. Entropies with gradient, tokens and rows that leave, sums with `before_update`."""
    run = recorded(folder, [name], monkeypatch, max_steps=3)
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float64)
    model.load_state_dict({k: v.double() for k, v in run.weights[2].items()}, strict=False)
    entries = run.entries[2]
    assert len(entries) == 32 and {e.sample.model_version for e in entries} == {1}
    values = token_values(model, entries)
    assert max(float((v[0].detach() - v[2]).abs().max()) for v in values) > 1e-2  # off-policy
    ORACLES[name](entries, values).backward()
    moved = 0.0
    for key, parameter in model.named_parameters():
        step = (run.weights[2][key] - run.weights[3][key]).double() / 0.1
        torch.testing.assert_close(step, parameter.grad, rtol=2e-4, atol=2e-6)
        moved = max(moved, float(step.abs().max()))
    assert moved > 1e-3


def test_advantages_are_those_of_trl(folder, monkeypatch):
    """Our estimator, which takes over where groups changed, on the rewards of real groups; NaN is no reward."""
    run = recorded(folder, ["noop"], monkeypatch, max_steps=1, reward=sometimes)
    entries = run.entries[0]
    rollouts, _ = seen(entries, run.trainer.methods, Now(1, 0, 0, 1), [], run.trainer)
    theirs = torch.tensor([e.sample.advantage for e in entries], dtype=torch.float64)
    torch.testing.assert_close(host_advantages(rollouts), theirs, rtol=1e-6, atol=1e-9)
    assert bool(rollouts.reward.isnan().any()) and float(theirs.abs().max()) > 0.5


def sometimes(completion_ids: Any = None, **kwargs: Any) -> list[float | None]:
    return [None if len(c) % 4 == 0 else sum(c) % 7 / 7 for c in completion_ids]


# ---- rows that leave, versions, state


def test_a_step_without_rows_moves_nothing(folder, monkeypatch):
    """AdamW, whose moments would move the weights."""
    run = recorded(folder, ["none_left"], monkeypatch, max_steps=3, optim="adamw_torch", learning_rate=1e-3)
    moved = [any(not torch.equal(a[k], b[k]) for k in a) for a, b in zip(run.weights, run.weights[1:], strict=False)]
    assert moved == [True, False, True]
    assert history(run.trainer, "rl_plugins/rows_trained") == [32, 0, 32]


def test_rewards_are_changed_in_what_is_trained_and_logged(folder, stock):
    trainer = make_async(folder, ["halve"], **{**TWO, "max_steps": 1})
    trainer.train()
    own = history(stock, "reward")[0] / 2  # the first two batches are made by the first weights
    assert history(trainer, "reward")[0] == pytest.approx(own)
    assert history(trainer, "rewards/halve")[0] == pytest.approx(own)
    assert history(trainer, "reward_std")[0] == pytest.approx(history(stock, "reward_std")[0] / 2)


def test_advantages_of_a_method_and_an_option_trl_lacks_here(folder, monkeypatch):
    """gdpo sets an option of GRPOConfig whose value the asynchronous trainer has built in. The loss of the first step
    is that of its advantages."""
    run = recorded(folder, ["gdpo"], monkeypatch, max_steps=1, reward=[score, length])
    entries = run.entries[0]
    columns = torch.tensor(
        [[e.sample.metrics[f"rewards/{n}"] for n in ("score", "length")] for e in entries], dtype=torch.float64
    )
    grouped = columns.reshape(4, 8, 2)
    normed = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).sum(2).flatten()
    advantages = (normed - normed.mean()) / (normed.std() + 1e-4)
    lengths = torch.tensor([int(e.row["completion_mask"].sum()) for e in entries], dtype=torch.float64)
    halves = [-(advantages[i : i + 16] * lengths[i : i + 16]).sum() / lengths[i : i + 16].sum() for i in (0, 16)]
    assert history(run.trainer, "loss")[0] == pytest.approx(float(sum(halves) / 2), abs=1e-5)  # ratios are 1
    assert run.trainer._method_options == {}


class Look(Method):
    """Keeps what hooks see."""

    name = "look"
    fidelity = "paper"
    needs = frozenset(
        {"tokens", "token_ids", "token_versions", "text", "prompt_index", "column:prompt", "rollout_logprobs"}
    )
    seen: ClassVar[list[Any]] = []
    terms: ClassVar[list[Any]] = []

    def observe(self, rollouts, tokens, stats):
        self.seen.append((rollouts, tokens))

    def regularize(self, terms):
        self.terms.append(terms)
        return 0 * terms.logprobs


def test_what_hooks_see(folder, monkeypatch):
    """Versions, places and columns of a run with lag 3, weights published every second step."""
    with installed(Look):
        run = recorded(folder, ["look"], monkeypatch, max_steps=6, lag=3, weight_sync_steps=2)
    data, tokenizer = build_dataset(64, seed=1), run.trainer.processing_class
    for b, (rollouts, tokens) in enumerate(Look.seen[:6]):
        published = max(0, b - 3) // 2
        assert rollouts.batch == b and rollouts.current_version == b // 2
        assert rollouts.steps_since_published == b % 2
        assert rollouts.version.tolist() == [published] * 32 == rollouts.newest_version.tolist()
        assert tokens.version.tolist() == [published] * len(tokens)
        assert rollouts.prompt_index.tolist() == [4 * b + i // 8 for i in range(32)]
        assert rollouts.meta["prompt"] == [data[4 * b + i // 8]["prompt"] for i in range(32)]
        assert rollouts.rollout.tolist() == list(range(8)) * 4
        for i, e in enumerate(run.entries[b]):
            mine, ids = tokens.row == i, rollouts.token_ids
            completion = e.row["input_ids"][len(ids.prompt[i]) :].tolist()
            assert ids.completion[i].tolist() == completion and not bool(ids.observed[i].any())
            assert rollouts.text[i] == tokenizer.decode(completion, skip_special_tokens=True)
            assert bool(rollouts.truncated[i]) == (completion[-1] != tokenizer.eos_token_id)
            assert tokens.position[mine].tolist() == list(range(len(completion)))
            sampled = e.row["old_log_probs"][-len(completion) :]
            assert tokens.rollout_logprobs[mine].tolist() == pytest.approx(sampled.tolist())
    assert [t.current_version for t in Look.terms] == [b // 2 for b in range(6) for _ in range(2)]
    assert [t.steps_since_published for t in Look.terms] == [b % 2 for b in range(6) for _ in range(2)]
    for b in range(6):
        pair = Look.terms[2 * b : 2 * b + 2]
        lengths = [int(e.row["completion_mask"].sum()) for e in run.entries[b]]
        assert sorted(n for t in pair for n in t.mask.sum(1).long().tolist()) == sorted(lengths)
        assert all(int(t.num_tokens) == sum(lengths) and int(t.num_rows) == 32 for t in pair)
        assert all(set(t.versions.flatten().tolist()) == {max(0, b - 3) // 2} for t in pair)
        assert all(bool((t.rollout_logprobs == t.old_logprobs).all()) for t in pair)


def test_state_is_that_of_the_trained_batches(folder, monkeypatch):
    """The dispatcher has decided one batch further when a checkpoint is made; its state does not hold that batch."""
    import probes

    monkeypatch.delattr(probes.Counter, "select_prompts")
    output = folder / "resumed"
    first = make_async(folder, ["counter"], max_steps=4, save_strategy="steps", save_steps=2, output_dir=output)
    first.train()
    for step in (2, 4):
        saved = load_state(output / f"checkpoint-{step}")
        state = saved["methods"]["counter"]["state"]
        assert state["steps"] == saved["batch"] == step
        assert state["stream"] == [[4 * b + i for i in range(4)] for b in range(step)]
    again = make_async(folder, ["counter"], max_steps=4, output_dir=output)
    again.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    state = again.methods.methods[0].state
    assert state["stream"][:4] == [[4 * b + i for i in range(4)] for b in range(4)]  # the same prompts
    assert history(again, "rl_plugins/staleness_mean")[2:] == [0, 1]  # its worker begins with the checkpoint's weights
    other = make_async(folder, ["counter"], max_steps=4, output_dir=output, trainer=None)
    (output / "checkpoint-2" / "rl_plugins" / "state.json").write_text("{}")
    with raises(StateError, match="cannot be read"):
        other.train(resume_from_checkpoint=str(output / "checkpoint-2"))


def test_killed_and_resumed_with_the_state_of_trls_worker(tmp_path):
    """SIGKILL after step 5; the last checkpoint is that of step 4. Its `rollout_state.json` and the state of the
    method agree but for the one micro-batch that was read ahead: TRL leaves out its prompts. Then training goes on, and
    versions go on where they were."""
    child = clean_processes.clean().Process(target=async_runs.train_and_kill, args=(tmp_path, 5))
    child.start()
    child.join(NEVER)
    assert child.exitcode == -signal.SIGKILL
    found = sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*"))
    assert found == ["checkpoint-2", "checkpoint-4"]
    last = tmp_path / "out" / "checkpoint-4"
    theirs, saved = json.loads((last / "rollout_state.json").read_text()), load_state(last)
    walk = saved["methods"]["walked"]["state"]["stream"]
    assert walk == [[4 * b + i for i in range(4)] for b in range(4)] and saved["batch"] == 4
    assert theirs == {"prompt_index": walk[-1][-1] + 1 + 4, "model_version": 4 + 1}

    again = async_runs.as_trls(tmp_path)
    again.train(resume_from_checkpoint=True)
    state = again.methods.methods[0].state
    assert state["stream"][:7] == walk + [[20 + 4 * b + i for i in range(4)] for b in range(3)]
    assert state["batches"][:7] == list(range(7)) and again.state.global_step == 7
    assert state["versions"][4:7] == [4, 4, 5]  # lag 1, counted anew from the weights of the checkpoint
    assert history(again, "rl_plugins/staleness_mean")[4:] == [0, 1, 1]
    assert again.model_version == 4 + 1 + 1 + 3  # one number more at the start of each process
    saved = AutoModelForCausalLM.from_pretrained(last)
    assert not torch.equal(torch.cat([p.detach().flatten() for p in saved.parameters()]), weights(again))


def test_an_incomplete_group_is_left_out(folder, caplog):
    """A worker that loses a sample, and TRL's own way to throw old ones away."""
    trainer = make_async(folder, ["noop"], max_steps=1)
    own, count = trainer.rollout_worker.get, iter(range(10**6))

    def lossy(*args, **kwargs):
        sample = own(*args, **kwargs)
        return own(*args, **kwargs) if next(count) == 3 else sample

    trainer.rollout_worker.get = lossy
    trainer.train()
    assert history(trainer, "rl_plugins/incomplete_groups_total") == [1]
    assert history(trainer, "rl_plugins/rows_trained") == [32]
    assert "7 samples instead of num_generations=8" in caplog.text


def test_an_error_of_a_hook_names_it(folder):
    trainer = make_async(folder, ["boom"], max_steps=3)
    with raises(MethodError, match=r"`boom`.*`observe`.*ValueError"):
        trainer.train()


# ---- plans, with our worker


class Planned(Method):
    """From the third batch on, everything that a plan may ask for at once."""

    name = "planned"
    fidelity = "paper"
    needs = frozenset({"tokens", "token_ids", "token_versions", "text", "column:level", "rollout_logprobs"})
    seen: ClassVar[list[Any]] = []
    terms: ClassVar[list[Any]] = []
    FOREIGN: ClassVar[dict[str, Any]] = {"prompt": [{"role": "user", "content": "d:12"}], "level": 99}
    SAMPLED = Completion(
        (7, 8, 9, 1), (-1.0, -2.0, -3.0, -4.0), (0, 0, 0, 1), {"score": 0.9}, (False, True, False, False)
    )

    def plan(self, plan):
        if plan.batch < 2:
            return None
        rows = list(plan.rows)
        rows[0] = rows[0].replace(given=(self.SAMPLED, Completion((6, 6, 1))))
        rows[1] = rows[1].replace(prefix=(10, 11), payload={"hint": 2})
        rows[2] = rows[2].replace(n=5, max_tokens=3)
        rows[3] = PlanRow(-1, rows[3].group, 8, spare=6, edit=self.FOREIGN)
        return plan.replace(rows=tuple(rows))

    def select(self, rollouts):
        return rollouts.rollout < 8

    def observe(self, rollouts, tokens, stats):
        self.seen.append((rollouts, tokens))

    def regularize(self, terms):
        self.terms.append(terms)
        return 0 * terms.logprobs


def test_a_plan_is_served_by_our_worker(folder, monkeypatch):
    """Given completions, prefixes, limits, a foreign prompt and spare rollouts: what hooks see, and the third step
    against a float64 loop. Of 35 rollouts 29 are trained, in a batch of 32."""
    Planned.seen, Planned.terms, asked = [], [], []

    def score(completion_ids: Any = None, **kwargs: Any) -> list[float]:
        asked.append(len(completion_ids))
        return [sum(c) % 7 / 7 for c in completion_ids]

    one = dict(per_device_train_batch_size=32, gradient_accumulation_steps=1, temperature=0.8)
    with installed(Planned):
        run = recorded(folder, ["planned"], monkeypatch, max_steps=3, reward=score, **one)
    assert asked[:12] == [8] * 8 + [7, 8, 5, 14]  # one brings its reward
    rollouts, tokens = Planned.seen[2]
    entries, data = run.entries[2], build_dataset(64, seed=1)
    assert rollouts.group.tolist() == [0] * 8 + [1] * 8 + [2] * 5 + [3] * 14 and len(entries) == 35
    assert rollouts.prompt_index.tolist() == [8] * 8 + [9] * 8 + [10] * 5 + [-1] * 14
    assert rollouts.payload == [None] * 8 + [{"hint": 2}] * 8 + [None] * 19
    assert (
        rollouts.meta["level"] == [data[8]["level"]] * 8 + [data[9]["level"]] * 8 + [data[10]["level"]] * 5 + [99] * 14
    )
    ids, completions = rollouts.token_ids, [c.tolist() for c in rollouts.token_ids.completion]
    assert completions[:2] == [[7, 8, 9, 1], [6, 6, 1]] and ids.observed[0].tolist() == [False, True, False, False]
    assert all(c[:2] == [10, 11] and len(c) <= 10 for c in completions[8:16])
    assert any(len(c) == 3 for c in completions[16:21]) and all(len(c) <= 3 for c in completions[16:21])
    text = run.trainer.processing_class.apply_chat_template(
        Planned.FOREIGN["prompt"], return_dict=False, add_generation_prompt=True
    )
    assert ids.prompt[21].tolist() == list(text)
    scored = [0.9, *score(completion_ids=completions[1:])]
    assert rollouts.reward.tolist() == pytest.approx(scored)
    first = tokens.row == 0
    assert tokens.position[first].tolist() == [0, 2, 3] and tokens.version[first].tolist() == [0, 0, 1]
    assert tokens.rollout_logprobs[first].tolist() == [-1.0, -3.0, -4.0] and not bool(tokens.forced[first].any())
    assert (int(rollouts.version[0]), int(rollouts.newest_version[0])) == (0, 1)
    assert set(tokens.version[~first].tolist()) == {0}
    forced = {(r, p) for r, p in zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)}
    forced = {rp for rp, f in zip(sorted(forced), tokens.forced.tolist(), strict=True) if f}
    assert forced == {(1, 0), (1, 1), (1, 2)} | {(r, p) for r in range(8, 16) for p in (0, 1)}
    assert history(run.trainer, "rl_plugins/rows_generated") == [35]
    assert history(run.trainer, "rl_plugins/rows_trained") == [32, 32, 29]
    versions = sorted(t for row in Planned.terms[2].versions.tolist() for t in row)
    assert versions.count(1) == 1 and Planned.terms[2].mask.shape[0] == 29

    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float64)

    def logprobs(i):
        whole = torch.tensor([ids.prompt[i].tolist() + completions[i]])
        logp = (model(whole).logits[0, len(ids.prompt[i]) - 1 : -1] / 0.8).log_softmax(-1)
        return logp.gather(1, whole[0, len(ids.prompt[i]) :, None])[:, 0]

    def load(weights):
        model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)

    old = [torch.tensor(e.row["old_log_probs"][len(p) :]) for e, p in zip(entries, ids.prompt, strict=True)]
    load(run.weights[0])  # the first weights made the batch, and so are the log-probs of what nobody sampled
    with torch.no_grad():
        for i in range(1, 35):
            torch.testing.assert_close(old[i].double(), logprobs(i), rtol=1e-5, atol=1e-5)
    load(run.weights[2])
    total, count = torch.zeros((), dtype=torch.float64), 0
    for g in range(4):
        rows = [i for i in range(35) if int(rollouts.group[i]) == g and int(rollouts.rollout[i]) < 8]
        rewards = torch.tensor([scored[i] for i in rows], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)
        for i, advantage in zip(rows, advantages.tolist(), strict=True):
            keep = ~ids.observed[i]
            total = total + clip(logprobs(i), old[i].double(), advantage)[keep].sum()
            count += int(keep.sum())
    (total / count).backward()
    for key, parameter in model.named_parameters():
        step = (run.weights[2][key] - run.weights[3][key]).double() / 0.1
        torch.testing.assert_close(step, parameter.grad, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("methods", "made", "trained"), [(["small"], 30, 30), (["odd"], 34, 30), (["merged", "odd"], 30, 15)]
)
def test_groups_of_other_sizes(folder, monkeypatch, methods, made, trained):
    """What fills up a batch is in no metric, and the prompts go on where those of TRL would."""
    run = recorded(
        folder, methods, monkeypatch, max_steps=2, per_device_train_batch_size=32, gradient_accumulation_steps=1
    )
    trainer, worker = run.trainer, run.trainer.rollout_worker
    assert worker.walked == 4 * worker.batch and worker.group == sum(
        len({e.sample.group_id for e in entries}) for entries in run.entries
    )
    if made <= 32:
        rewards = [e.sample.metrics["reward"] for entries in run.entries[:2] for e in entries]  # one is read ahead
        assert history(trainer, "reward")[0] == pytest.approx(sum(rewards) / made / 2)
    assert history(trainer, "rl_plugins/rows_generated") == [made] * 2
    assert history(trainer, "rl_plugins/rows_trained") == [trained] * 2


def test_a_method_chooses_the_prompts(folder):
    """Samples are of these prompts, and a resumed run chooses as the whole one did, although a batch further had been
    planned when the checkpoint was made."""
    Look.seen.clear()
    output = folder / "chosen"
    with installed(Look):
        saves = dict(max_steps=3, save_strategy="steps", save_steps=2, output_dir=output)
        trainer = make_async(folder, ["counter", "look"], **saves)
        trainer.train()
        stream = trainer.methods.methods[0].state["stream"]
        taken = [list(dict.fromkeys(r.prompt_index.tolist())) for r, _ in Look.seen]
        assert taken[:3] == stream[:3] and taken[0] != [0, 1, 2, 3]
        data = build_dataset(64, seed=1)
        assert [p for r, _ in Look.seen for p in r.meta["prompt"]] == [
            data[i]["prompt"] for batch in taken for i in batch for _ in range(8)
        ]
        saved = load_state(output / "checkpoint-2")["methods"]["counter"]["state"]["stream"]
        again = make_async(folder, ["counter", "look"], **saves)
        again.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    assert saved == stream[:2] and again.methods.methods[0].state["stream"][:3] == stream[:3]


class Asking(Method):
    """Asks for one row that is changed as it is told."""

    name = "asking"
    fidelity = "paper"
    row: ClassVar[dict[str, Any]] = {}

    def plan(self, plan):
        return plan.replace(rows=(plan.rows[0].replace(**self.row), *plan.rows[1:]))


@pytest.mark.parametrize(
    ("row", "error", "said"),
    [
        (dict(prefix=(5,) * 10), MethodError, "10.*0.*10"),
        (dict(given=(Completion((5, 1), rewards={"other": 1.0}),)), MethodError, "`other`"),
        (dict(given=(Completion((5, 1), (-1.0, -1.0), (3, 3)),)), MethodError, "3"),
        (dict(given=(Completion((5, 1), prompt=(5, 6)),)), ConfigError, "no method plays agents in TRL's asynchronous"),
    ],
)
def test_plans_that_cannot_be(folder, monkeypatch, row, error, said):
    monkeypatch.setattr(Asking, "row", row)
    with installed(Asking):
        trainer = make_async(folder, ["asking"], max_steps=1)
        with raises(error, match=said):
            trainer.train()


@pytest.mark.parametrize(("methods", "warned"), [(["rollout_replay"], False), (["rollout_replay", "softmax"], True)])
def test_old_rollouts_are_weighed_by_trls_ratio(folder, caplog, methods, warned):
    """Unless a method replaces it."""
    make_async(folder, methods)
    assert ("trained as if they were fresh" in caplog.text) == warned


# ---- refusals, all before the model is loaded


def refused(folder, methods, worker=None, arguments=None, **changes):
    args = async_config(folder / "out", methods, **changes)
    with raises(ConfigError) as e:
        AsyncGRPOTrainer(
            model="no/such/model",
            reward_funcs=score,
            args=args,
            train_dataset=build_dataset(64, seed=1),
            rollout_worker=worker,
            **(arguments or {}),
        )
    return str(e.value)


class Wishing(Method):
    """Needs everything that no worker gives, and weighs rollouts without a loss of its own."""

    name = "wishing"
    fidelity = "paper"
    needs = frozenset({"turns", "turn_limits", "redundancy", "entropies", "ref_logprobs", "engine:logprobs=5"})
    corrects_sampling = True

    def shape(self, rollouts, tokens):
        return None


TRLS = "TRL's rollout worker is a process of its own that walks the dataset and generates by itself"


@pytest.mark.parametrize(
    ("methods", "changes", "said"),
    [
        (["noop"], dict(token_budget=None), "token_budget=None: TRL then fills each row up to so many tokens"),
        (["noop"], dict(token_budget=512), "no step holds whole groups to decide on. Set token_budget=0."),
        (["noop"], dict(num_generations=5), "takes 32 samples .* no multiple of num_generations=5"),
        (["noop"], dict(arguments={"tools": [score]}), "does not say which rows are of one rollout"),
        (["noop"], dict(arguments={"environment_factory": object}), "The trainer has tools or environments"),
        (["vade"], {}, f"`vade` changes `select_prompts`, and trl cannot do that here: {TRLS}"),
        (["mc_grpo"], {}, f"`mc_grpo` changes `plan`, and trl cannot do that here: {TRLS}"),
        (["dars"], {}, "`dars` generates in rounds, each planned with the rewards of the one before, and no worker"),
        (["latr"], {}, f"`latr` changes `rollout`, and trl cannot do that here: {TRLS}"),
        (["april"], {}, f"`april` changes `admit`, and trl cannot do that here: {TRLS}"),
        (["together"], {}, "`together` needs .* in one batch, .* queue"),
        (["rollout_replay"], {}, f"`rollout_replay` changes `plan`, and trl cannot do that here: {TRLS}"),
        (["squares"], {}, "`squares` needs .*: TRL's asynchronous trainer decides before any pass over the rollouts"),
        (["wishing"], {}, "`wishing` needs entropy .*: TRL's asynchronous trainer decides before any pass"),
        (["wishing"], {}, "`wishing` needs .*: samples in the queue of TRL's asynchronous trainer do not tell turns"),
        (["wishing"], {}, "`wishing` needs .*: TRL's asynchronous trainer has no reference model"),
        (["wishing"], {}, "`wishing` needs .*: no rollout program runs in TRL's asynchronous trainer"),
        (["wishing"], {}, "`wishing` needs .*: no method of the run plays agents"),
        (
            ["wishing"],
            {},
            "`wishing` needs .*: the rollout worker of TRL's asynchronous trainer waits for all rollouts",
        ),
        (
            ["wishing"],
            {},
            "`wishing` holds the weight of the policy that sampled, and so does the ratio .* count twice",
        ),
        (["gdpo"], {}, "the run has 1 reward function"),
        (["minpro"], dict(top_p=0.9), "with top_p=0.9 the distribution that was sampled is not the policy's"),
        (["minpro"], dict(top_k=5, min_p=0.1), "with top_k=5, min_p=0.1 the distribution"),
        (
            ["decoupled_ppo"],
            dict(method_params={"decoupled_ppo": {"proximal": "loglinear"}}),
            "a group of TRL's rollout worker has one version, that of the weights with which it began",
        ),
    ],
)
def test_what_cannot_be_honest_is_refused_with_the_reason(folder, methods, changes, said):
    with installed(Wishing):
        text = refused(folder, methods, **changes)
    assert re.search(said, text), text


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (["latr"], "`latr` changes `rollout`, and trl cannot do that here: GenerateWorker makes a batch in one call"),
        (["april"], "`april` changes `admit`, and trl cannot do that here: GenerateWorker makes a batch in one call"),
        (["dars"], "`dars` generates in rounds"),
        (["wishing"], "`wishing` needs .*: samples in the queue"),
        (["rtv_pdr"], "acts with `rollout` in evaluation, which trl does not serve"),
    ],
)
def test_what_our_worker_does_not_serve_either(folder, methods, said):
    with installed(Wishing):
        text = refused(folder, methods, worker=object.__new__(GenerateWorker))
    assert re.search(said, text), text
    assert "changes `plan`" not in text and "changes `select_prompts`" not in text and "token_versions" not in text


def test_a_stream_has_no_numbers(folder):
    """Its rows cannot be taken by number, so nothing is planned, whoever generates."""
    args = async_config(folder / "out", ["counter", "mc_grpo"], max_steps=1)
    with raises(ConfigError) as e:
        AsyncGRPOTrainer(
            model="no/such/model",
            reward_funcs=score,
            args=args,
            train_dataset=build_dataset(64, seed=1).to_iterable_dataset(),
            rollout_worker=object.__new__(GenerateWorker),
        )
    for said in ("`counter` changes `select_prompts`", "`mc_grpo` changes `plan`", "the dataset is a stream"):
        assert said in str(e.value)


def test_a_worker_of_others_does_not_say_the_prompt(folder):
    class Theirs:
        pass

    text = refused(folder, ["counter"], worker=Theirs())
    assert "Theirs generates by itself" in text and "Theirs does not say which row of the dataset" in text


def test_lag_zero_does_not_exist(folder):
    for lag in (0, 9):
        with raises(ConfigError, match=f"lag={lag}.*1.*max_staleness=8"):
            make_async(folder, lag=lag)


def test_the_other_mixin_and_the_stock_trainer_say_where_to_go(folder):
    args = async_config(folder / "out", ["noop"])
    cls = type("Mine", (MethodsMixin, async_grpo.AsyncGRPOTrainer), {})
    with raises(ConfigError, match=r"rl_plugins\.trl\.asynchronous"):
        cls(model="no/such/model", args=args)
    made = make_async(folder, max_steps=1)  # a model that exists
    with raises(ConfigError, match="TRL"):
        async_grpo.AsyncGRPOTrainer(
            model=made.model.name_or_path,
            reward_funcs=score,
            args=args,
            train_dataset=made.train_dataset,
            rollout_worker=made.rollout_worker,
            weight_transfer=made.rollout_worker,
        )


@pytest.mark.parametrize(
    ("mode", "temperature", "wrong"), [("raw", 0.7, True), ("raw", 1.0, False), ("processed", 0.7, False)]
)
def test_log_probs_are_checked_on_the_server(folder, mode, temperature, wrong):
    """TRL's own worker needs a vLLM server, which is not here: its answer is given, the check is that of the run."""
    trainer = make_async(folder, ["minpro"], temperature=temperature)
    trainer.rollout_worker = object.__new__(AsyncRolloutWorker)
    info = {"model_config": {"logprobs_mode": f"{mode}_logprobs"}}
    trainer.vllm_client = types.SimpleNamespace(get_server_info=lambda: info)
    if not wrong:
        trainer.check_server_logprobs()
        return
    with raises(ConfigError, match="--logprobs-mode.*raw_logprobs"):
        trainer.check_server_logprobs()


def test_prompts_of_trls_worker_are_found_by_their_group(folder):
    """It walks the dataset from `dataset_start_index`, and around."""
    trainer = make_async(folder, ["noop"])
    worker = object.__new__(AsyncRolloutWorker)
    worker._loop_kwargs = {"dataset_start_index": 60}
    trainer.rollout_worker = worker
    found = [trainer.prompt_index_of(types.SimpleNamespace(group_id=g)) for g in range(6)]
    assert found == [60, 61, 62, 63, 0, 1]
    trainer.rollout_worker = object()
    assert trainer.prompt_index_of(types.SimpleNamespace(group_id=3)) == -1


# ---- attention on the CPU


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
def test_attention_is_that_of_every_segment_alone(window):
    torch.manual_seed(0)
    q_lengths, k_lengths = [3, 1, 5, 4], [3, 4, 9, 4]
    cu_q = torch.tensor([0, *torch.tensor(q_lengths).cumsum(0)], dtype=torch.int32)
    cu_k = torch.tensor([0, *torch.tensor(k_lengths).cumsum(0)], dtype=torch.int32)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((13, 4), (20, 2), (20, 2)))
    out = varlen_attention(q, k, v, cu_q, cu_k, max(q_lengths), max(k_lengths), 0.3, window_size=window)
    for s in range(4):
        for i in range(q_lengths[s]):
            own = i + k_lengths[s] - q_lengths[s]
            first = 0 if window[0] < 0 else max(0, own - window[0])
            for head in range(4):
                keys = k[cu_k[s] + first : cu_k[s] + own + 1, head // 2]
                share = (0.3 * keys @ q[cu_q[s] + i, head]).softmax(0)
                expected = share @ v[cu_k[s] + first : cu_k[s] + own + 1, head // 2]
                torch.testing.assert_close(out[cu_q[s] + i, head], expected)
    with pytest.raises(NotImplementedError, match="softcap"):
        varlen_attention(q, k, v, cu_q, cu_k, 5, 9, softcap=1.0)


def test_what_is_changed_in_trl_is_put_back(folder):
    own = async_grpo_trainer.FixedCountBatcher, async_grpo_trainer.DataCollatorForRollout
    trainer = make_async(folder, ["noop"])
    queue = trainer.rollout_queue
    trainer.get_train_dataloader()
    assert (async_grpo_trainer.FixedCountBatcher, async_grpo_trainer.DataCollatorForRollout) == own
    assert trainer.rollout_queue is queue and isinstance(queue, GenerateWorker)


# ---- ranks


@pytest.mark.ranks
def test_two_ranks_train_as_one(folder):
    """Columns are packed and dispatched to both; in one step one of them has nothing to train."""
    one = async_ranks_script.run(folder)
    out = folder / "ranks.pt"
    clean_processes.ranks(2, "async_ranks_script", "main", out)
    two = torch.load(out)
    begun = weights(make_async(folder))
    for name in async_ranks_script.CASES:
        assert float((one[name]["weights"] - two[name]["weights"]).abs().max()) < 3e-7, name
        assert float((one[name]["weights"] - begun).abs().max()) > 1e-4, name
