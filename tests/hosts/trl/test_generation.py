"""What is generated, what is trained, and what is logged: one generation batch in the real trainer."""

from __future__ import annotations

import peft
import pytest
import torch
import trl
from datasets import IterableDataset
from harness import history, length, make, score, stub_sampling, weights
from messages import raises
from transformers import TrainerCallback

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.lab.demo.tasks import build_dataset

pytestmark = pytest.mark.host


class Spy:
    """Keeps what the trainer hands to its loss and the decisions of the driver."""

    def __init__(self, trainer):
        self.batches, self.batches_of_driver = [], []
        host = trainer._generate_and_score_completions

        def wrapped(inputs):
            out = host(inputs)
            if trainer.model.training:
                self.batches.append(out)
            return out

        trainer._generate_and_score_completions = wrapped
        from rl_plugins.trl.generation import batches as module

        finish = module.finish

        def finished(trainer, batch, out):
            self.batches_of_driver.append(batch)
            return finish(trainer, batch, out)

        self.undo = lambda: setattr(module, "finish", finish)
        module.finish = finished


def run(tmp_path, methods, stub=True, **kwargs):
    t = make(tmp_path, methods, **kwargs)
    spy = Spy(t)
    try:
        if stub:
            with stub_sampling():
                t.train()
        else:
            t.train()
    finally:
        spy.undo()
    return t, spy


# ---- off


def test_off_is_bit_identical(tmp_path):
    """No methods, or one that only looks: the weights of stock TRL to the last bit, real sampling included."""
    results = {}
    for name, kwargs in {"stock": dict(stock=True), "empty": dict(methods=[]), "noop": dict(methods=["noop"])}.items():
        t = make(tmp_path, kwargs.pop("methods", ()), max_steps=3, learning_rate=0.05, **kwargs)
        t.train()
        results[name] = (weights(t), history(t, "reward"), torch.rand(1))
    for name in ("empty", "noop"):
        assert torch.equal(results["stock"][0], results[name][0]), name
        assert results["stock"][1] == results[name][1]
        assert torch.equal(results["stock"][2], results[name][2]), "the global generator must be where TRL leaves it"


def test_evaluation_is_untouched(tmp_path):
    results = []
    for methods in ((), ("mc_grpo",)):
        t = make(
            tmp_path,
            methods,
            per_device_eval_batch_size=16,
            do_eval=True,
            more=dict(eval_dataset=build_dataset(8, seed=3)),
        )
        results.append(t.evaluate())
    assert results[0]["eval_reward"] == results[1]["eval_reward"]
    assert results[0]["eval_loss"] == results[1]["eval_loss"]


# ---- the first methods


@pytest.mark.parametrize("columns", [{}, {"images": []}])
def test_mc_grpo_trains_g_of_g_plus_one(tmp_path, columns):
    """72 completions, 64 rows in the batch, advantages as a plain loop over the groups has them. A text-only dataset
    may have the column of its multimodal siblings, without an image in it."""
    t, spy = run(tmp_path, ["mc_grpo"], dataset=build_dataset(64, seed=1).map(lambda row: columns))
    out, batch = spy.batches[0], spy.batches_of_driver[0]
    assert len(batch.work.mine) == 72 and len(out["advantages"]) == 64 and "tool_mask" not in out
    assert int(out["num_items_in_batch"]) == int(out["completion_mask"].sum())
    expected = []
    rewards = batch.rewards[:, 0].double().tolist()
    for g in range(8):
        r = rewards[9 * g : 9 * g + 9]
        median = sorted(r)[4]
        mad = sorted(abs(x - median) for x in r)[4]
        a = [(x - median) / (mad + 1e-3) for x in r]
        pivot = min(range(9), key=lambda i: abs(a[i]) + 1e-9 * abs(sorted(range(9), key=lambda j: r[j])[4] - i))
        expected += [x for i, x in enumerate(a) if i != pivot]
    assert sorted(out["advantages"].tolist()) == pytest.approx(sorted(expected), rel=1e-5, abs=1e-6)
    assert history(t, "rl_plugins/rows_generated") == [72.0, 72.0]
    assert history(t, "rl_plugins/rows_trained") == [64.0, 64.0]
    assert len(t._logs["prompt"]) == len(t._logs["advantages"]) == len(t._logs["rewards"]["score"]) == 72
    assert t.num_generations == 8


def test_gdpo_equals_trl_own_option(tmp_path):
    kwargs = dict(reward=[score, length], reward_weights=[1.0, 0.3], max_steps=2, learning_rate=0.05)
    with stub_sampling():
        native = make(tmp_path, stock=True, multi_objective_aggregation="normalize_then_sum", **kwargs)
        native.train()
        ours = make(tmp_path, ["gdpo"], **kwargs)
        ours.train()
        plain = make(tmp_path, [], **kwargs)
        plain.train()
    assert (weights(native) - weights(ours)).abs().max() < 1e-7
    assert (weights(plain) - weights(ours)).abs().max() > 1e-5


def test_minpro_gradient_is_that_of_its_formula(tmp_path):
    """Two optimizer steps per batch; the second one against autograd of -w A lp / N with w from a plain loop."""
    options = dict(num_iterations=2, learning_rate=0.5, max_grad_norm=0.0)
    t, spy = run(tmp_path, ["minpro"], max_steps=2, **options)
    first, _ = run(tmp_path, ["minpro"], max_steps=1, **options)
    b = spy.batches[0]
    ids = torch.cat([b["prompt_ids"], b["completion_ids"]], 1)
    attention = torch.cat([b["prompt_mask"], b["completion_mask"]], 1)
    lp = first._get_per_token_logps_and_entropies(first.model, ids, attention, b["completion_ids"].size(1))[0]
    total, n, moved = 0.0, int(b["completion_mask"].sum()), 0
    for i in range(len(lp)):
        prefix = 1.0
        for j in range(int(b["completion_mask"][i].sum())):
            ratio = (lp[i, j] - b["rlp_rollout_logprobs"][i, j]).exp().item()
            total = total - min(max(prefix * ratio, 0.0), 5.0) * b["advantages"][i] * lp[i, j] / n
            prefix = ratio if j == 0 else min(prefix, ratio)
            moved += abs(prefix - 1) > 1e-3
    total.backward()
    grad = torch.cat([p.grad.flatten() for p in first.model.parameters()])
    step = (weights(t) - weights(first)) / -0.5
    assert (step - grad).norm() / grad.norm() < 1e-4
    assert moved > 100, "the policy must have moved away from the one that sampled"


def test_vade_trains_on_the_prompts_it_chose(tmp_path):
    t, spy = run(tmp_path, ["vade"], max_steps=3)
    rows = build_dataset(200, seed=1)
    for batch in spy.batches_of_driver:
        prompts = [r.plan.prompt_index for r in batch.work.mine]
        assert len(set(prompts)) == 8 and prompts == [p for p in prompts[::8] for _ in range(8)]
        assert (
            list(t._logs["prompt"])[-64:][0]
            == rows[[r.plan.prompt_index for r in spy.batches_of_driver[-1].work.mine][0]]["prompt"]
        )
    counts = t.methods.methods[0].state
    total = float(sum(v.sum() for v in counts.values() if isinstance(v, torch.Tensor)))
    assert 64 * 2 < total <= 64 * 3


def test_grpo_roc_keeps_the_clean_ones(tmp_path):
    """16 completions a prompt, 8 stay; of the right ones those with the least penalty."""

    def right(completion_ids, **kwargs):
        return [float(c[0] % 2) for c in completion_ids]

    def penalty(rollouts):
        return rollouts.length.double() / 20

    t, spy = run(
        tmp_path,
        ["grpo_roc"],
        reward=right,
        method_params={"grpo_roc": {"penalty": penalty, "reject_equal_reward": False}},
    )
    batch = spy.batches_of_driver[0]
    d = batch.driver.decision
    r = d.rollouts
    assert len(r) == 128 and int(d.trained.sum()) == 64 and len(spy.batches[0]["advantages"]) == 64
    for g in range(8):
        mine = (r.group == g) & (r.reward > 0)
        kept, dropped = r.length[mine & d.trained], r.length[mine & ~d.trained]
        assert int((d.trained & (r.group == g)).sum()) == 8
        if len(kept) and len(dropped):
            assert kept.max() <= dropped.min()
    inside = r.subset(r.kept)
    mean = inside.groups.rows(inside.groups.mean(inside.reward))
    std = inside.groups.rows(inside.groups.std(inside.reward))
    torch.testing.assert_close(d.row_advantages[r.kept], (inside.reward - mean) / (std + 1e-4))


# ---- plans


def test_a_plan_can_ask_for_every_kind_of_row(tmp_path):
    """Given completions, prefix, token limit, edited and foreign prompts, payload, columns and log-probs."""
    import probes

    seen = []

    def rewarder(completion_ids, level, **kwargs):
        seen.append((completion_ids, level))
        return [len(c) / 10 for c in completion_ids]

    t, spy = run(tmp_path, ["given"], reward=rewarder, stub=False, max_steps=1, num_iterations=1)
    rollouts, tokens = probes.Given.seen
    ids, level = seen[0]
    assert ids[0] == [7, 8, 9, 1] and ids[1] == [6, 6, 1]
    assert all(c[:2] == [10, 11] for c in ids[8:16])
    assert all(len(c) <= 3 for c in ids[16:24]) and any(len(c) == 3 for c in ids[16:24])
    assert level[24:32] == [77] * 8 and level[32:40] == [99] * 8
    assert rollouts.meta["level"] == level and rollouts.payload[8] == {"hint": 2} and rollouts.payload[0] is None
    assert rollouts.prompt_index[32] == -1 and rollouts.truncated[16:24].any()
    logs = list(t._logs["prompt"])
    assert logs[24] == [{"role": "user", "content": "a:21"}]
    at = lambda row: tokens.row == row
    assert tokens.rollout_logprobs[at(0)].tolist() == [-1.0, -2.0, -3.0, -4.0]
    torch.testing.assert_close(tokens.rollout_logprobs[at(1)], tokens.old_logprobs[at(1)])
    assert not tokens.forced[at(0)].any()  # its log-probs are known: it is a sample
    assert tokens.forced[at(1)].all() and tokens.forced[at(8)].tolist()[:3] == [True, True, False]
    assert not tokens.forced[at(2)].any()
    assert len(spy.batches[0]["advantages"]) == 64


@pytest.mark.parametrize("rounds", [False, True])
def test_stored_rollouts_return_with_their_log_probs_versions_rewards_and_mask(tmp_path, monkeypatch, rounds):
    """Two updates per batch: the group is two published weights old when it comes back. Given in a round it is kept for
    TRL's own pass the same way."""
    import probes

    for name in ("seen", "updates", "losses"):
        monkeypatch.setattr(probes.Stored, name, [])
    monkeypatch.setattr(probes.Stored, "rounds", rounds)
    scored = []

    def rewarder(completion_ids, **kwargs):
        scored.append(len(completion_ids))
        return score(completion_ids)

    rewarder.__name__ = "score"
    t, spy = run(tmp_path, ["stored"], reward=rewarder, max_steps=4, num_iterations=2, learning_rate=0.05)
    assert scored == [64, 56]
    for name, value in {"mean": 2 * 8 / 64, "max": 2, "oldest_max": 2, "share/0": 56 / 64, "share/2_3": 8 / 64}.items():
        assert history(t, f"rl_plugins/staleness_{name}")[-1] == pytest.approx(value)
    assert history(t, "rl_plugins/staleness_max")[0] == 0 and history(t, "rl_plugins/mixed_version_rows")[-1] == 0
    (first, before), (r, tokens) = probes.Stored.seen
    old = r.prompt_index == first.prompt_index[0]
    assert old.nonzero()[:, 0].tolist() == list(range(8)) and first.current_version == 0 and r.current_version == 2
    assert r.staleness.tolist() == [2] * 8 + [0] * 56 and torch.equal(r.newest_version, r.version)
    assert not first.staleness.any() and first.steps_since_published == r.steps_since_published == 0
    assert r.reward[:8].tolist() == pytest.approx(first.reward[:8].tolist())
    assert tokens.version.tolist() == torch.where(tokens.row < 8, 0, 2).tolist() and not tokens.forced.any()
    for row in range(8):
        was, now = before.rollout_logprobs[before.row == row], tokens.rollout_logprobs[tokens.row == row]
        assert now.tolist() == (was[[0, *range(2, len(was))]] if row == 0 and len(was) > 1 else was).tolist()
        assert r.token_ids.completion[row].tolist() == first.token_ids.completion[row].tolist()
        assert r.token_ids.prompt[row].tolist() == first.token_ids.prompt[row].tolist()
        assert r.token_ids.observed[row].nonzero()[:, 0].tolist() == [1] * (row == 0)
    assert r.length[0] == first.length[0] - 1 and r.length[1:8].tolist() == first.length[1:8].tolist()
    assert (tokens.old_logprobs is None) and spy.batches[1]["tool_mask"][0, :3].tolist() == [1, 0, 1]
    # in the update: the version the batch began with, and the optimizer steps since
    told = [(u.current_version, u.steps_since_published) for u in probes.Stored.updates]
    assert told == [(0, 0), (0, 1), (2, 0), (2, 1)]
    for u in probes.Stored.updates[2:]:
        assert sorted(u.version.tolist()) == [0] * 8 + [2] * 56 and torch.equal(u.version, u.newest_version)
    assert [(x.current_version, x.steps_since_published) for x in probes.Stored.losses] == told
    for terms in probes.Stored.losses[2:]:
        stale = (terms.versions < terms.current_version).any(1)
        assert int(stale.sum()) == 8 and set(terms.versions[stale].unique().tolist()) <= {0, 2}
        # the weight of a stored token is that of the policy that sampled it
        gap = (terms.rollout_logprobs - terms.old_logprobs).abs() * terms.mask
        assert float(gap[~stale].max()) < 1e-5 < float(gap[stale].max())


def test_a_text_of_another_source_is_tokenized_by_the_run(tmp_path):
    import probes

    run(tmp_path, ["quotes"], max_steps=1)
    rollouts, tokens = probes.Quotes.seen
    assert rollouts.text[0] == "21 = 21" and not rollouts.truncated[0]
    assert tokens.forced[tokens.row == 0].all() and not tokens.forced[tokens.row == 1].any()


@pytest.mark.parametrize("lora", [False, True])
def test_the_sum_of_squared_probabilities(tmp_path, lora):
    """As a plain softmax of the logits gives it, temperature included; with LoRA TRL patches the model inside."""
    import probes

    more = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"])} if lora else {}
    t, _ = run(tmp_path, ["squares"], max_steps=1, learning_rate=0.0, temperature=0.7, more=more)
    rollouts, tokens = probes.Squares.seen
    model, ids = t.accelerator.unwrap_model(t.model).eval(), rollouts.token_ids
    for row in (0, 17, 63):
        prompt, completion = ids.prompt[row], ids.completion[row]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        wanted = torch.softmax(logits.double() / 0.7, -1).square().sum(-1)
        torch.testing.assert_close(tokens.sum_squared_probs[tokens.row == row].double(), wanted, rtol=1e-4, atol=1e-6)
    assert float(tokens.sum_squared_probs.min()) >= 1 / 64 and tokens.old_logprobs is None


def test_short_plans_are_filled_with_further_prompts(tmp_path):
    """5 rollouts instead of 8: 12 prompts fit into 64 rows, 4 rows stay empty; the loss does not see them."""
    _, spy = run(tmp_path, ["small"], max_steps=2)
    for batch, out in zip(spy.batches_of_driver, spy.batches, strict=True):
        plans = [r.plan for r in batch.work.mine]
        prompts = [p.prompt_index for p in plans if p is not None]
        assert len(set(prompts)) == 12 and plans.count(None) == 4
        assert len(out["advantages"]) == 64 and int((out["tool_mask"].sum(1) > 0).sum()) == 60
        assert int(out["num_items_in_batch"]) == int((out["completion_mask"] * out["tool_mask"]).sum())
    first, second = ([r.plan.prompt_index for r in s.work.mine if r.plan][40:] for s in spy.batches_of_driver)
    assert set(first) != set(second)


def test_one_rollout_per_prompt(tmp_path):
    _, spy = run(tmp_path, ["one"], num_generations=2, max_steps=1)
    prompts = [r.plan.prompt_index for r in spy.batches_of_driver[0].work.mine]
    assert len(set(prompts)) == 64


def test_rounds(tmp_path):
    """4 rollouts a prompt, then 8 more for the 4 prompts with the lowest rewards; columns of the table stay aligned."""

    def rewarder(completion_ids, log_extra, **kwargs):
        log_extra("ids", [str(c) for c in completion_ids])
        return score(completion_ids)

    t, spy = run(tmp_path, ["probing"], reward=rewarder, max_steps=2)
    for batch in spy.batches_of_driver:
        r = batch.driver.decision.rollouts
        sizes = torch.bincount(r.group)
        assert sizes.tolist().count(12) == 4 and sizes.tolist().count(4) == 4
        first = torch.stack([r.reward[(r.group == g) & (r.rollout < 4)].mean() for g in range(8)])
        assert first[sizes == 12].max() <= first[sizes == 4].min()
    groups = spy.batches_of_driver[-1].driver.decision.rollouts
    mean = groups.groups.rows(groups.groups.mean(groups.reward))
    std = groups.groups.rows(groups.groups.std(groups.reward))
    logged = torch.tensor(list(t._logs["advantages"])[-64:])
    torch.testing.assert_close(logged.double(), (groups.reward - mean) / (std + 1e-4), rtol=1e-5, atol=1e-6)
    table = list(t._logs["extra"]["ids"])[-64:]
    assert [score([eval(x)])[0] for x in table] == pytest.approx(groups.reward.tolist())
    assert history(t, "completions/mean_length")[0] == pytest.approx(
        spy.batches_of_driver[0].driver.decision.rollouts.length.double().mean().item()
    )
    stock = make(tmp_path, stock=True, max_steps=1)
    with stub_sampling():
        stock.train()
    assert set(history(t, "num_tokens")) and history(t, "num_tokens")[0] < 2 * history(stock, "num_tokens")[0]


def test_rows_of_rounds_keep_their_payload_their_order_and_their_rewards(tmp_path):
    """32 + 8 + 8 rows, asked for from the last group to the first; 16 fillers count nowhere."""
    import probes

    def rewarder(completion_ids, log_extra, **kwargs):
        log_extra("ids", [str(c) for c in completion_ids])
        return score(completion_ids)

    t, spy = run(tmp_path, ["payloads"], stub=False, reward=rewarder, max_steps=1)
    first = [(g, 0) for g in range(8)]
    assert probes.Payloads.read == [first, first], "in rounds 1 and 2 a method reads what it attached in round 0"
    r = probes.Payloads.seen
    assert r.group.tolist() == [g for g in range(8) for _ in range(6)], "groups are whole"
    assert r.payload == [(g, k) for g in range(8) for k in (0, 0, 0, 0, 1, 2)], "in them the order of the rounds"
    made = [eval(x) for x in t._logs["extra"]["ids"]]
    assert len(made) == 48 and [score([ids])[0] for ids in made] == pytest.approx(r.reward.tolist())
    assert len({tuple(ids) for ids in made}) > 40, "rows must be told apart by their rewards"
    rewards = spy.batches_of_driver[0].rewards[:, 0]
    assert torch.isnan(rewards[48:]).all() and torch.equal(rewards[:48].double(), r.reward)
    assert history(t, "reward")[0] == pytest.approx(r.reward.mean().item())
    assert history(t, "rewards/rewarder/std")[0] == pytest.approx(r.reward.std().item())


def test_later_rounds_edit_prompts_and_have_the_room_of_groups_that_leave(tmp_path):
    """A first round that is all spare (n = 0); what it leaves goes to the four groups of lowest mean reward, whose
    further rollouts answer other words and join the group they name, with the row as planned."""
    import probes

    t, spy = run(tmp_path, ["helpings"], max_steps=2)
    for batch, out in zip(spy.batches_of_driver, spy.batches, strict=True):
        d = batch.driver.decision
        r, groups = d.rollouts, d.rollouts.groups
        assert sorted(groups.size.tolist()) == [4] * 4 + [16] * 4 and int(d.trained.sum()) == 64 == len(r) - 16
        first = torch.stack([r.reward[(r.group == g) & (r.rollout < 4)].mean() for g in range(8)])
        low = groups.size == 16
        assert first[low].max() <= first[~low].min() and torch.equal(d.trained, groups.rows(low))
        inside = r.subset(d.trained).groups
        mean, std = (inside.rows(f(r.reward[d.trained])) for f in (inside.mean, inside.std))
        expected = (r.reward[d.trained] - mean) / (std + 1e-4)
        torch.testing.assert_close(d.row_advantages[d.trained], expected)
        # what is trained: 4 rollouts of the dataset's prompt and 12 of the other words, in one group
        words = t.processing_class.batch_decode(
            [p[m > 0] for p, m in zip(out["prompt_ids"], out["prompt_mask"], strict=True)]
        )
        hints = [f"d:{i:04d}" for i in r.prompt_index[d.trained].tolist()]
        found = [hint in text for hint, text in zip(hints, words, strict=True)]
        assert found == ([False] * 4 + [True] * 12) * 4
        assert [p.get("helping", 0) for p, kept in zip(r.payload, d.trained, strict=True) if kept] == [
            int(x) for x in found
        ]
    assert [p["planned"] for p in probes.Helpings.seen.payload] == probes.Helpings.seen.prompt_index.tolist()
    assert history(t, "rl_plugins/rows_generated") == [80.0] * 2 and history(t, "rl_plugins/rows_trained") == [64.0] * 2


def test_a_prompt_in_two_groups_of_its_own(tmp_path):
    """Each group has a mean of its own, and TRL's own advantages are those of the groups."""
    _, spy = run(tmp_path, ["twice"], max_steps=1)
    d = spy.batches_of_driver[0].driver.decision
    r, groups = d.rollouts, d.rollouts.groups
    assert groups.size.tolist() == [8] * 8 and d.estimator == "host"
    assert torch.equal(r.prompt_index[:32], r.prompt_index[32:]) and len(r.prompt_index.unique()) == 4
    mean, std = (groups.rows(f(r.reward)) for f in (groups.mean, groups.std))
    torch.testing.assert_close(d.row_advantages, (r.reward - mean) / (std + 1e-4), rtol=1e-5, atol=1e-6)


def test_fillers_have_no_reward(tmp_path):
    """60 rows and 4 fillers: what TRL logs of rewards is of the 60."""
    t, spy = run(tmp_path, ["small"], max_steps=1)
    r = spy.batches_of_driver[0].driver.decision.rollouts
    rewards = spy.batches_of_driver[0].rewards[:, 0]
    assert len(r) == 60 and torch.isnan(rewards[60:]).all() and torch.equal(rewards[:60].double(), r.reward)
    assert history(t, "reward")[0] == history(t, "rewards/score/mean")[0] == pytest.approx(r.reward.mean().item())
    assert history(t, "reward_std")[0] == pytest.approx(r.reward.std().item())
    assert [round(x, 5) for x in t._logs["rewards"]["score"]] == [round(x, 5) for x in r.reward.tolist()]


def test_prompts_may_be_merged_into_one_group(tmp_path):
    """Regular numbers, but other groups than TRL's: its own advantages must not be taken."""
    _, spy = run(tmp_path, ["merged"], max_steps=1)
    d = spy.batches_of_driver[0].driver.decision
    r = d.rollouts
    assert r.groups.size.tolist() == [16] * 4 and r.rollout[:16].tolist() == list(range(16))
    mean, std = (r.groups.rows(f(r.reward)) for f in (r.groups.mean, r.groups.std))
    torch.testing.assert_close(d.row_advantages, (r.reward - mean) / (std + 1e-4))


def test_rounds_without_end_are_an_error(tmp_path):
    with raises(MethodError, match="`restless`.*64"):
        run(tmp_path, ["restless"], max_steps=1)


def test_a_plan_of_nothing_is_an_error(tmp_path, monkeypatch):
    import probes

    monkeypatch.setattr(probes.Small, "plan", lambda self, plan: plan.replace(rows=()))
    with raises(MethodError, match="`small`"):
        run(tmp_path, ["small"])


def test_streams_have_prompts_but_no_index(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(build_dataset(200, seed=1)))
    _, spy = run(tmp_path, ["mc_grpo"], dataset=stream, max_steps=2)
    assert all(len(b["advantages"]) == 64 for b in spy.batches)
    assert spy.batches_of_driver[0].driver.decision.rollouts.prompt_index.unique().tolist() == [-1]
    make(tmp_path, ["mc_grpo"], dataset=build_dataset(200, seed=1).to_iterable_dataset())  # a stream with columns
    with raises(ConfigError, match="`vade`"):
        make(tmp_path, ["vade"], dataset=stream)


def test_a_plan_too_large_is_refused_before_generation(tmp_path, monkeypatch):
    import probes

    monkeypatch.setattr(
        probes.Small, "plan", lambda self, plan: plan.replace(rows=tuple(r.replace(n=9) for r in plan.rows))
    )
    with raises(MethodError, match=r"72.*64.*9"):
        run(tmp_path, ["small"])


def test_spare_rows_that_stay_are_an_error(tmp_path, monkeypatch):
    import probes

    monkeypatch.setattr(probes.ZeroSpare, "select", lambda self, rollouts: rollouts.kept)
    with raises(MethodError, match="65.*64"):
        run(tmp_path, ["zero_spare"])


# ---- rewards


def test_rewards_of_a_judge_are_used_and_logged(tmp_path):
    t, spy = run(tmp_path, ["judge"], max_steps=1)
    r = spy.batches_of_driver[0].driver.decision.rollouts
    raw = spy.batches_of_driver[0].rewards[:, 0].double()
    assert torch.isnan(r.reward).equal(r.length < 4)
    ok = r.length >= 4
    torch.testing.assert_close(r.reward[ok], 2 * raw[ok])
    assert spy.batches[0]["advantages"][r.length < 4].abs().max() == 0
    assert history(t, "reward")[0] == pytest.approx(r.reward.nanmean().item())
    assert history(t, "rewards/judge/mean")[0] == pytest.approx(r.reward.nanmean().item())
    assert list(t._logs["rewards"]["judge"])[-64:] == pytest.approx(r.reward.tolist(), nan_ok=True)


def test_each_method_that_changes_rewards_logs_its_own(tmp_path):
    t, spy = run(tmp_path, ["judge", "halve"], max_steps=1)
    raw, r = spy.batches_of_driver[0].rewards[:, 0].double(), spy.batches_of_driver[0].driver.decision.rollouts
    judged = torch.where(r.length < 4, torch.nan, raw * 2)
    assert history(t, "rewards/judge/mean")[0] == pytest.approx(judged.nanmean().item())
    assert history(t, "rewards/halve/mean")[0] == pytest.approx(judged.nanmean().item() / 2)
    assert history(t, "reward")[0] == pytest.approx(judged.nanmean().item() / 2)


def test_the_completions_table_stays_aligned(tmp_path):
    """Columns of `rewards` hooks beside TRL's, with fillers in training and evaluation in between."""
    import pandas as pd

    evaluation = dict(eval_dataset=build_dataset(8, seed=3))
    options = dict(log_completions=True, eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=3)
    options["num_generations_eval"] = 2  # 16 rows: the table of 64 holds rows of training as well
    t, spy = run(tmp_path, ["small", "halve"], per_device_eval_batch_size=16, more=evaluation, **options)
    tables = [pd.read_parquet(f) for f in sorted((tmp_path / "out" / "completions").glob("*.parquet"))]
    assert len(tables) == 4
    trained = t._logs["rewards"]
    assert len({len(c) for c in (t._logs["prompt"], t._logs["advantages"], *trained.values())}) == 1
    score_column, halved = (torch.tensor(list(trained[n])) for n in ("score", "halve"))
    train_rows = ~torch.isnan(halved)
    torch.testing.assert_close(halved[train_rows], score_column[train_rows] / 2)
    assert train_rows.any() and not train_rows[-16:].any(), "the last rows are of the evaluation, which no hook changes"


def test_no_reward_at_all_is_an_error(tmp_path):
    with raises(MethodError, match="64.*score_nothing"):

        def score_nothing(completion_ids, **kwargs):
            return [None] * len(completion_ids)

        run(tmp_path, ["noop"], reward=score_nothing, max_unrewarded_batches=0)


class Outage:
    """A reward service that is down in these generation batches."""

    __name__ = "service"

    def __init__(self, *batches):
        self.batches = batches

    def __call__(self, completion_ids, trainer_state=None, **kwargs):
        down = trainer_state.global_step in self.batches
        return [None] * len(completion_ids) if down else score(completion_ids)


def test_an_outage_of_the_rewards_is_skipped_counted_and_resumed(tmp_path):
    """Batches 2 and 3 of 6 have no reward: the weights rest, the method's state does not see them, and a run that is
    resumed in the middle of the outage counts on. One batch more ends the run, and the checkpoint before it is good."""
    weights_at = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            weights_at[state.global_step] = torch.cat([p.detach().flatten() for p in model.parameters()])

    options = dict(
        optim="adamw_torch", weight_decay=0.1, learning_rate=0.01, save_strategy="steps", save_steps=1, max_steps=6
    )
    t, _ = run(tmp_path, ["counter"], reward=Outage(2, 3), max_unrewarded_batches=2, callbacks=[Watch()], **options)
    rests = [torch.equal(weights_at[k], weights_at[k + 1]) for k in range(1, 6)]
    assert rests == [False, True, True, False, False]
    assert history(t, "rl_plugins/unrewarded_batches") == [1.0, 2.0, 2.0, 2.0]
    assert history(t, "rl_plugins/rows_trained") == [0.0, 0.0], "in the other batches it is TRL's own number"
    assert t.methods.methods[0].state["steps"] == 4
    checkpoint = str(tmp_path / "out" / "checkpoint-3")
    with raises(MethodError, match="max_unrewarded_batches=2"), stub_sampling():
        make(tmp_path, ["counter"], reward=Outage(2, 3, 4), max_unrewarded_batches=2, **options).train(checkpoint)
    again = make(tmp_path, ["counter"], reward=Outage(2, 3), max_unrewarded_batches=2, **options)
    with stub_sampling():
        again.train(checkpoint)
    assert (weights(again) - weights(t)).abs().max() < 1e-6
    assert _same_state(again, t)


def _same_state(a, b):
    a, b = a.methods.state_dict(""), b.methods.state_dict("")
    names = ("batch", "unrewarded", "unrewarded_in_a_row", "extra_prompts")
    state = [s["methods"]["counter"]["state"] for s in (a, b)]
    return [a[n] for n in names] == [b[n] for n in names] and torch.equal(state[0]["seen"], state[1]["seen"])


@pytest.mark.parametrize("methods", ["probing", "talk", "april", "mc_grpo", "noop"])
def test_a_batch_without_a_reward_is_skipped_however_it_was_made(tmp_path, methods):
    """In rounds, by programs, from a queue, with spare rollouts; under a loss with which no row may leave otherwise."""
    loss_type = "bnpo" if methods == "noop" else "dapo"
    t, spy = run(tmp_path, [methods], stub=methods != "april", reward=Outage(0), max_steps=2, loss_type=loss_type)
    assert history(t, "rl_plugins/unrewarded_batches") == [1.0, 1.0] and history(t, "grad_norm")[0] == 0.0
    trained = [int(b.driver.decision.trained.sum()) for b in spy.batches_of_driver]
    assert trained[0] == 0 and trained[1] > 32 and history(t, "grad_norm")[1] > 0


@pytest.mark.parametrize("awaited", [False, True])
def test_a_reward_that_raises_ends_the_run_or_leaves_the_row_without_one(tmp_path, awaited):
    alone = []

    def picky(completion_ids, **columns):
        bad = [sum(ids) % 3 == 0 for ids in completion_ids]
        if len(bad) == 1:
            alone.extend(bad)
        if any(bad):
            raise ValueError("no")
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    async def awaits(**columns):
        return picky(**columns)

    reward = [awaits if awaited else picky, length]
    with pytest.raises(ValueError, match="no"):
        run(tmp_path, ["noop"], reward=reward, max_steps=1)
    t, spy = run(tmp_path, ["noop"], reward=reward, max_steps=1, on_reward_error="mask", output_dir=tmp_path / "masked")
    rewards = spy.batches_of_driver[0].rewards
    assert torch.isnan(rewards[:, 0]).tolist() == alone and 0 < sum(alone) < 64 and not torch.isnan(rewards[:, 1]).any()
    assert history(t, f"rewards/{t.reward_func_names[0]}/raised") == [float(sum(alone))]


def test_too_few_rewards_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="returned 63 rewards, but 64 were expected"):
        run(tmp_path, ["noop"], reward=lambda completion_ids, **k: [0.5] * 63)


def test_reward_functions_never_see_our_columns(tmp_path):
    names = []

    def rewarder(completion_ids, **kwargs):
        names.append(sorted(kwargs))
        return score(completion_ids)

    run(tmp_path, ["vade"], reward=rewarder, max_steps=1)
    assert names[0] == ["answer", "completions", "level", "log_extra", "log_metric", "prompts", "task", "trainer_state"]


# ---- together with options of TRL


@pytest.mark.parametrize(
    "options",
    [
        dict(mask_truncated_completions=True),
        dict(top_entropy_quantile=0.3),
        dict(beta=0.1),
        dict(entropy_coef=0.01),
        dict(steps_per_generation=4, gradient_accumulation_steps=2),
        dict(num_iterations=3),
        dict(remove_unused_columns=True),
        dict(log_completions=True),
        dict(importance_sampling_level="sequence"),
        dict(loss_type="vespo"),
        dict(use_adaptive_entropy=True, entropy_coef=0.01),
    ],
)
def test_composes_with(tmp_path, options, capsys):
    t, spy = run(tmp_path, ["vade", "mc_grpo"], max_steps=3, **options)
    assert all(len(b["advantages"]) == 64 for b in spy.batches)
    assert all(torch.isfinite(torch.tensor(history(t, k))).all() for k in ("loss", "grad_norm"))
    if "mask_truncated_completions" in options:
        r, d = spy.batches_of_driver[0].driver.decision.rollouts, spy.batches_of_driver[0].driver.decision
        assert r.truncated.any() and not d.trained[r.truncated].any()


def test_lora(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    t, spy = run(
        tmp_path,
        ["mc_grpo", "minpro"],
        num_iterations=2,
        max_steps=2,
        learning_rate=0.5,
        beta=0.05,
        more=dict(peft_config=lora),
    )
    assert len(spy.batches[0]["advantages"]) == 64
    moved = [n for n, p in t.model.named_parameters() if p.requires_grad and "lora_B" in n and p.abs().max() > 0]
    assert moved and all("lora" in n for n, p in t.model.named_parameters() if p.requires_grad)


def test_rollout_func_is_composed(tmp_path):
    def rollout(prompts, trainer):
        n = len(prompts)
        return {
            "prompt_ids": [[3]] * n,
            "completion_ids": [[5 + i % 9, 6, 1] for i in range(n)],
            "logprobs": [[0.0] * 3] * n,
            "tag": list(range(n)),
        }

    t, spy = run(tmp_path, ["mc_grpo"], stub=False, more=dict(rollout_func=rollout), max_steps=1)
    assert len(spy.batches_of_driver[0].work.mine) == 72 and len(spy.batches[0]["advantages"]) == 64
    with raises(ConfigError, match="`probing`.*rollout_func"):
        make(tmp_path, ["probing"], more=dict(rollout_func=rollout))
    with raises(ConfigError, match="rollout_func"):
        run(tmp_path, ["prefixed"], stub=False, more=dict(rollout_func=rollout), max_steps=1)


def test_stock_trainer_refuses_a_config_with_methods(tmp_path):
    from harness import config, policy

    args = config(tmp_path, ["mc_grpo"])
    with raises(ConfigError, match="TRL"):
        trl.GRPOTrainer(
            model=str(policy(tmp_path / "policy")), reward_funcs=score, args=args, train_dataset=build_dataset(20)
        )


def test_mixin_over_a_users_own_trainer(tmp_path):
    from rl_plugins.trl import MethodsMixin

    class Theirs(trl.GRPOTrainer):
        calls = 0

        def _compute_loss(self, model, inputs):
            Theirs.calls += 1
            return super()._compute_loss(model, inputs)

    class Both(MethodsMixin, Theirs):
        pass

    t, _ = run(tmp_path, ["mc_grpo"], trainer=Both)
    assert Theirs.calls == 2 and history(t, "rl_plugins/rows_trained") == [64.0, 64.0]
