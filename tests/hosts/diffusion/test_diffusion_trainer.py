"""The diffusion trainer: its update against plain torch, what it learns, hooks, programs, faults."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from flow_probes import SEEN
from flow_runs import PROMPTS, Tiny, bright, flat, make, weights
from messages import raises
from methods.branch_loops import advantages_by_loops, first_copies, node_of

from rl_plugins.core.errors import ConfigError, MethodError, StateError
from rl_plugins.diffusion import batch as batch_module
from rl_plugins.diffusion.flows import shifted_sigmas
from rl_plugins.diffusion.logs import read_metrics
from rl_plugins.diffusion.objective import Objective
from rl_plugins.diffusion.objectives import OBJECTIVES

pytestmark = pytest.mark.host


def by_hand(trainer, beta=0.0, bound=5.0):
    """The weights after the first optimizer step, in plain torch: groups, loss and AdamW on the very samples."""
    rows = make(trainer.args.output_dir, beta=beta).batches.make(0).rows
    model = Tiny().double()
    reference = Tiny(5).double()
    sigmas, eta, total = shifted_sigmas(6), 0.3, torch.zeros((), dtype=torch.float64)
    rewards = {}
    for row in rows:
        rewards.setdefault(row.place, []).append(row.sample.rewards["bright"])
    count = 0
    for row in rows:
        group = torch.tensor(rewards[row.place], dtype=torch.float64)
        advantage = (row.sample.rewards["bright"] - group.mean()) / (group.std() + 1e-4)
        advantage = advantage.clamp(-bound, bound)
        for t in row.sample.transitions:
            x, end = t.start.double()[None], t.end.double()[None]
            s, d = sigmas[t.step], sigmas[t.step + 1] - sigmas[t.step]
            args = (x, torch.tensor([s]).double(), torch.tensor([row.condition]))
            std = max(eta * math.sqrt(-d), 1e-8)
            means = []
            for m in (model, reference):
                v = m(*args)
                score = -(x - (1 - s) * (x - s * v)) / s**2
                means.append(x + d * v - 0.5 * eta**2 * score * d)
            logprob = torch.distributions.Normal(means[0], std).log_prob(end).mean()
            ratio = (logprob - t.logprob).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total + beta * (((means[0] - means[1].detach()) / std) ** 2).mean() / 2
            count += 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    (total / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).float(), float(total.detach() / count)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"beta": 0.5},
        {"rows_per_pass": 3},
        {"transitions_per_pass": 5},
        {"transitions_per_pass": 4, "rows_per_pass": 2, "beta": 0.5},
        {"rows_per_call": 3},
        {"advantage_clip": 0.5},
        {"warmup_steps": 4, "learning_rate": 4e-2},
    ],
    ids=str,
)
def test_an_update_is_that_of_plain_torch(tmp_path, how):
    trainer = make(tmp_path / "a", batches=1, **how)
    if "beta" in how:  # at first the policy is its reference, and the KL has no gradient
        trainer.policy._frozen.load_state_dict(Tiny(5).state_dict())
    before, sizes, outputs = weights(trainer), [], trainer.objective.outputs
    trainer.objective.outputs = lambda batch: sizes.append(len(batch.keys)) or outputs(batch)
    (logged,) = trainer.train()
    wanted, loss = by_hand(make(tmp_path / "b"), how.get("beta", 0.0), how.get("advantage_clip", 5.0))
    assert max(sizes) <= how.get("transitions_per_pass", 6 * how.get("rows_per_pass", 8))
    assert (weights(trainer) - before).abs().max() > 5e-3
    assert (weights(trainer) - wanted).abs().max() < 2e-4  # AdamW divides small gradients by themselves
    assert logged["loss"] == pytest.approx(loss, abs=1e-5) and logged["ratio"] == pytest.approx(1.0, abs=1e-4)


def test_it_learns(tmp_path):
    """From noise about 0 to what the class wants, with the defaults of the loss."""
    trainer = make(tmp_path, batches=40, prompts_per_batch=4, group_size=8, learning_rate=2e-2)
    history = trainer.train()
    first, last = (sum(h["reward"] for h in part) / 5 for part in (history[:5], history[-5:]))
    assert last > first + 0.15 and last > -0.25
    lines = read_metrics(tmp_path)
    assert [line["batch"] for line in lines] == list(range(1, 41))
    assert lines[-1]["reward"] == pytest.approx(history[-1]["reward"])
    assert lines[0]["rl_plugins/transitions_trained"] == 4 * 8 * 6 == lines[0]["rl_plugins/model_passes"]


def test_samples_and_batches_follow_from_the_seed(tmp_path):
    runs = [make(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2))]
    a, b, c = ([r["reward"] for r in run.train()] for run in runs)
    assert a == b and a != c and torch.equal(weights(runs[0]), weights(runs[1]))
    seen = [i for batch in range(4) for i in runs[0].batches.proposal(batch)]
    assert sorted(seen[:4]) == sorted(seen[4:]) == [0, 1, 2, 3]  # every prompt once per pass
    assert [runs[0].batches.proposal(i) for i in range(8)] != [runs[2].batches.proposal(i) for i in range(8)]


# ---- hooks


def test_what_hooks_on_the_driver_see(tmp_path):
    SEEN.clear()
    trainer = make(tmp_path, ["looks"], reward_funcs=[bright, flat], reward_weights=[1.0, 0.5], updates_per_batch=2)
    history = trainer.train()
    assert len(SEEN) == 3 and all(h["looks/looked"] == 1 for h in history)
    rollouts, tokens, _ = SEEN[1]
    assert rollouts.reward_names == ("bright", "flat") and rollouts.batch == 1
    assert torch.allclose(rollouts.reward, rollouts.rewards @ torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert rollouts.group.tolist() == [0] * 4 + [1] * 4 and rollouts.rollout.tolist() == [0, 1, 2, 3] * 2
    assert rollouts.length.tolist() == [6] * 8 and tokens.position.tolist() == list(range(6)) * 8
    assert rollouts.meta["level"] == [10 * i for i in rollouts.prompt_index.tolist()]
    assert set(rollouts.version.tolist()) == {2} == set(tokens.version.tolist()) and rollouts.current_version == 2
    assert torch.equal(tokens.old_logprobs, tokens.rollout_logprobs)
    assert not torch.allclose(tokens.ref_logprobs, tokens.old_logprobs, atol=1e-2)
    first = SEEN[0][1]
    assert torch.allclose(first.ref_logprobs, first.old_logprobs, atol=1e-3)  # at first the policy is the reference
    assert SEEN[2][2] == {}  # no method logs in the update


def test_hooks_of_the_update(tmp_path):
    """The host's surrogate as a method trains the same weights; other hooks change them as they say."""
    plain = make(tmp_path / "plain", updates_per_batch=2)
    plain.train()
    SEEN.clear()
    same = make(tmp_path / "same", ["same"], updates_per_batch=2, rows_per_pass=3)
    same.train()
    assert torch.allclose(weights(plain), weights(same), atol=1e-4)
    rows = [x for x in SEEN if hasattr(x, "length")]
    terms = [x for x in SEEN if hasattr(x, "mask")]
    assert len(rows) == 6 and [len(r.length) for r in rows] == [4] * 6
    assert [r.steps_since_published for r in rows] == [0, 1] * 3 and [r.current_version for r in rows] == [
        0,
        0,
        2,
        2,
        4,
        4,
    ]
    assert torch.allclose(rows[0].logprobs, rows[0].old_logprobs, atol=1e-3)
    assert not torch.allclose(rows[1].logprobs, rows[1].old_logprobs, atol=1e-3)
    assert {int(t.num_tokens) for t in terms} == {24} and {int(t.num_rows) for t in terms} == {4}
    assert [tuple(t.mask.shape) for t in terms] == [(3, 6), (1, 6)] * 6 and terms[0].ref_logprobs is not None

    rests = make(tmp_path / "rests", ["rests"], batches=1)
    before = weights(rests)
    rests.train()
    assert torch.equal(weights(rests), before)
    pulls = make(tmp_path / "pulls", ["pulls"], batches=1)
    assert pulls.train()[0]["loss"] != pytest.approx(plain_loss(tmp_path), abs=1.0)
    assert not torch.allclose(weights(pulls), weights(plain), atol=1e-3)


def plain_loss(tmp_path):
    return make(tmp_path / "once", batches=1).train()[0]["loss"]


def test_mc_grpo_makes_one_sample_more_and_trains_as_many(tmp_path):
    plain, odd = make(tmp_path / "a"), make(tmp_path / "b", ["mc_grpo"])
    plain.train()
    logged = odd.train()
    assert {(h["rl_plugins/rows_generated"], h["rl_plugins/rows_trained"]) for h in logged} == {(10.0, 8.0)}
    assert not torch.allclose(weights(plain), weights(odd), atol=1e-4)


def test_gdpo_on_two_rewards(tmp_path):
    trainer = make(tmp_path, ["gdpo"], reward_funcs=[bright, flat])
    other = make(tmp_path / "grpo", reward_funcs=[bright, flat])
    trainer.train(), other.train()
    assert not torch.allclose(weights(trainer), weights(other), atol=1e-4)
    with raises(ConfigError, match="1 reward"):
        make(tmp_path / "one", ["gdpo"])


def test_rounds_edits_and_payloads(tmp_path):
    SEEN.clear()
    (logged,) = make(tmp_path / "a", ["longer"], batches=1, prompts_per_batch=2).train()
    assert logged["rl_plugins/rows_trained"] == 2 + 2 + 2 and [len(g) for g in SEEN[0]] == [2, 2]

    def classes(samples, conditions, **columns):
        seen.extend((c, *columns["level"][:1]) for c in conditions)
        return bright(samples, conditions)

    seen: list = []
    make(tmp_path / "b", ["edits"], batches=1, reward_funcs=classes).train()
    assert {c for c, _ in seen} == {3}


# ---- programs


def test_a_tree_shares_passes_and_transitions(tmp_path):
    trainer = make(tmp_path / "tree", ["forks"])
    logged = trainer.train()
    per_prompt = 2 * 3 + 4 * 3  # transitions of two stems and four tips
    assert {h["rl_plugins/transitions_trained"] for h in logged} == {2.0 * per_prompt}
    assert {h["rl_plugins/transitions"] for h in logged} == {2.0 * 4 * 6}
    assert {h["rl_plugins/model_passes"] for h in logged} == {2.0 * (2 * 3 + 2 + 4 * 2)}  # a split is one pass
    assert {h["forks/pairs"] for h in logged} == {4.0}


def test_the_cheap_copy_explores_and_is_refreshed(tmp_path):
    copies = []

    def cheap(module, earlier):
        made = Tiny()
        made.load_state_dict(module.state_dict())
        copies.append((made, earlier))
        return made

    scored = []

    def counted(samples, conditions):
        scored.append(bright(samples, conditions))
        return scored[-1]

    trainer = make(tmp_path, ["explores"], cheap=cheap, updates_per_batch=2, reward_funcs=counted)
    logged = trainer.train()
    assert len(copies) == 1 + 3 * 2 and copies[1][1] is copies[0][0]
    assert torch.equal(copies[-1][0].outer.weight, trainer.policy.module.outer.weight)
    assert not torch.equal(copies[0][0].outer.weight, copies[-1][0].outer.weight)
    assert {h["rl_plugins/model_passes"] for h in logged} == {2.0 * (8 * 2 + 4 * 6)}
    # tried seeds; then two samples of each prompt, whose programs asked; then the rest
    assert [len(x) for x in scored] == [16, 4, 4] * 3
    trained = [torch.cat(scored[i + 1 : i + 3]).mean().item() for i in (0, 3, 6)]
    assert [h["reward"] for h in logged] == pytest.approx(trained)
    with raises(MethodError, match="cheap"):
        make(tmp_path / "none", ["explores"]).train()


# ---- rewards that are missing or wrong


def test_samples_without_a_reward(tmp_path):
    """Advantage 0 and out of the statistics; a batch without any is skipped, too many of them end the run."""

    def some(samples, conditions):
        return [None if i % 4 == 0 else float(r) for i, r in enumerate(bright(samples, conditions))]

    SEEN.clear()
    trainer = make(tmp_path / "some", ["looks"], reward_funcs=some, batches=1)
    trainer.train()
    rollouts, tokens, _ = SEEN[0]
    assert torch.isnan(rollouts.reward).tolist() == [True, False, False, False] * 2
    assert tokens.advantages[tokens.row % 4 == 0].abs().sum() == 0
    assert tokens.advantages[:24].view(4, 6)[1:].sum(0).abs().max() < 1e-6 and not tokens.advantages.isnan().any()

    calls = []

    def down(samples, conditions):
        calls.append(1)
        return [math.nan] * len(samples) if len(calls) in (1, 2) else bright(samples, conditions)

    trainer = make(tmp_path / "down", reward_funcs=down, batches=4)
    before = weights(trainer)
    logged = trainer.train()
    assert [h["rl_plugins/rows_trained"] for h in logged] == [0, 0, 8, 8] and "loss" not in logged[0]
    assert not torch.equal(before, weights(trainer))
    with raises(MethodError, match="max_unrewarded_batches=1"):
        make(tmp_path / "gone", reward_funcs=lambda s, c: [None] * len(s), max_unrewarded_batches=1).train()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda s, c: [1.0], "1.*8"),
        (lambda s, c: ["good"] * len(s), "it must return a number for each sample, or None"),
        (lambda s, c: [math.inf] * len(s), "infinite"),
    ],
)
def test_wrong_rewards(tmp_path, function, why):
    with raises(MethodError, match=why):
        make(tmp_path, reward_funcs=function).train()


def test_a_velocity_that_is_not_finite_ends_the_run(tmp_path):
    model = Tiny()
    with torch.no_grad():
        model.outer.bias.fill_(math.nan)
    with raises(MethodError, match="NaN.*infinite"):
        make(tmp_path, model=model).train()


# ---- conditions and datasets


def test_conditions(tmp_path):
    asked = []

    def encode(conditions):
        asked.append(list(conditions))
        return torch.tensor([len(c) % 4 for c in conditions])

    trainer = make(
        tmp_path / "text",
        encode=encode,
        train_dataset=["a", "bb", "ccc", "dddd"],
        reward_funcs=lambda s, c: s.mean((1, 2, 3)),
    )
    trainer.train()
    assert sorted(c for batch in asked[:2] for c in batch) == ["a", "bb", "ccc", "dddd"]
    assert [len(batch) for batch in asked] == [2, 2, 2]  # once per batch, not in every step
    with raises(ConfigError, match="`encode`"):
        make(tmp_path / "none", train_dataset=["a", "b"]).train()
    with raises(ConfigError, match="tensor"):
        make(tmp_path / "short", train_dataset=["a", "b"], encode=lambda c: torch.zeros(1)).train()


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        ([], "has no prompts"),
        (iter(PROMPTS), "cannot be taken by number"),
        ([{"class": 1}], "`prompt`"),
        ([0], "1.*prompts_per_batch=2"),
    ],
)
def test_datasets_that_cannot_be_trained(tmp_path, dataset, why):
    with raises(ConfigError, match=why):
        make(tmp_path, train_dataset=dataset)


# ---- BranchGRPO


def test_branch_grpo_trains_every_transition_of_its_trees_once(tmp_path, monkeypatch):
    """Trees of 8 samples with splits at steps 0, 1 and 3 of 6: passes, trained transitions and the update are those of
    loops and plain torch on the very samples; one depth is pruned, and moves up after two batches."""
    params = {
        "branch_rollout": {"splits": [0, 1, 3], "s": 2.0},
        "branch_pruning": {"depths": [6], "interval": 2, "stop_depth": 4, "width": "none"},
    }
    decided = []
    decide_all = batch_module.decide

    def watched(stack, rollouts, tokens, *rest):
        decided.append((rollouts, tokens, decide_all(stack, rollouts, tokens, *rest)))
        return decided[-1][2]

    monkeypatch.setattr(batch_module, "decide", watched)
    how = dict(method_params=params, group_size=8, max_grad_norm=1e9, advantage_clip=5.0)
    trainer = make(tmp_path / "tree", ["branch_grpo"], **how)
    copy = make(tmp_path / "copy", ["branch_grpo"], **how)
    before = weights(trainer)
    copy._start()
    wanted = branch_step(copy, copy.batches.make(0).rows)
    decided.clear()
    logged = trainer.train()
    edges = 2 + 4 + 4 + 8 + 8 + 8
    passes = 1 + 2 + 4 + 4 + 8 + 8  # siblings share one
    assert [h["rl_plugins/model_passes"] for h in logged] == [2 * passes] * 3
    assert [h["rl_plugins/transitions_trained"] for h in logged] == [2 * (edges - 8)] * 3
    assert [h["branch_pruning/shift"] for h in logged] == [0, 1, 1]
    assert logged[0]["branch_rollout/saved"] == pytest.approx(1 - passes / 48)
    for batch, (rollouts, tokens, decision) in enumerate(decided):
        # rows of fixed log-probs: uniform fusion reads none
        advantages = advantages_by_loops(rollouts, tokens.replace(old_logprobs=torch.zeros(len(tokens))))
        first = first_copies(rollouts, tokens)
        for i, (row, step) in enumerate(zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)):
            kept = first[i] and step + 1 != (6 if batch == 0 else 5)
            assert bool(decision.keep_tokens[i]) == kept
            value = advantages[node_of(rollouts, row, step)] if kept else 0.0
            assert float(decision.advantages[i]) == pytest.approx(value, abs=1e-9)
    trainer = make(tmp_path / "once", ["branch_grpo"], batches=1, **how)
    trainer.train()
    assert (weights(trainer) - before).abs().max() > 5e-3
    assert (weights(trainer) - wanted).abs().max() < 2e-4


def branch_step(trainer, rows):
    """The weights after the first optimizer step, in plain torch: a node is a transition object that rows share."""
    model, sigmas, eta = Tiny().double(), shifted_sigmas(6), 0.3
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for place in {row.place for row in rows}:
        group = [row for row in rows if row.place == place]
        for step in range(5):  # depth 6 is pruned
            nodes = {id(row.sample.transitions[step]): [] for row in group}
            for row in group:
                nodes[id(row.sample.transitions[step])].append(row.sample.rewards["bright"])
            value = torch.tensor([sum(r) / len(r) for r in nodes.values()], dtype=torch.float64)
            advantage = (value - value.mean()) / (value.std() + 1e-8)
            moved = {id(row.sample.transitions[step]): row.sample.transitions[step] for row in group}
            for key, a in zip(nodes, advantage, strict=True):
                t, s, d = moved[key], sigmas[step], sigmas[step + 1] - sigmas[step]
                x = t.start.double()[None]
                v = model(x, torch.tensor([s]).double(), torch.tensor([group[0].condition]))
                score = -(x - (1 - s) * (x - s * v)) / s**2
                mean, std = x + d * v - 0.5 * eta**2 * score * d, max(eta * math.sqrt(-d), 1e-8)
                ratio = (torch.distributions.Normal(mean, std).log_prob(t.end.double()[None]).mean() - t.logprob).exp()
                loss, count = loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a), count + 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    (loss / count).backward()
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).float()


# ---- objectives


class Pulled(Objective):
    """Velocities towards the finished sample, weighed by the advantage; samples are made under a mark of its own."""

    name = "pulled"
    missing = {
        "old_logprobs": "it has no ratio. Set objective=ppo.",
        "policy_loss": "it has no ratio. Set objective=ppo.",
    }

    def __init__(self, policy, config):
        super().__init__(policy, config)
        self.sampled, self.steps, self.keys = 0, [], set()

    def tokens(self, sample):
        return sample.transitions[:3]

    @contextlib.contextmanager
    def sampling(self):
        self.sampled += 1
        yield

    def outputs(self, batch):
        self.keys |= set(batch.keys)
        v = self.policy.velocity("policy", batch.start, batch.sigma, batch.conditions)
        assert batch.step.max() <= 2 and torch.equal(batch.sigma > batch.following, torch.ones(len(v)).bool())
        return {"error": (v - (batch.start - batch.clean)).square().flatten(1).mean(1) * batch.advantages.exp()}

    def loss(self, terms, outputs, stack, metrics):
        metrics.add("error", (outputs["error"] * terms.mask).sum().detach() / terms.mask.sum(), "mean")
        return outputs["error"], None

    def after_update(self, step):
        self.steps.append(step)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, saved):
        self.steps = list(saved["steps"])


def test_an_objective_of_another_kind(tmp_path, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "pulled", Pulled)
    options = {"objective": "pulled", "updates_per_batch": 2, "save_every": 1}
    trainer = make(tmp_path / "run", **options)
    history = trainer.train()
    assert all(h["error"] > 0 and "ratio" not in h for h in history)
    assert {h["rl_plugins/transitions_trained"] for h in history} == {8.0 * 3}
    assert trainer.objective.sampled == 3 + 7  # the batches, and the copy of the policy at first and after each step
    assert trainer.objective.steps == [1, 2, 3, 4, 5, 6]
    assert len(trainer.objective.keys) == 3 * 8 * 3  # a key of its own for every transition
    chunks = make(tmp_path / "chunks", transitions_per_pass=2, **options)
    chunks.train()
    assert torch.allclose(weights(chunks), weights(trainer), atol=1e-4)
    again = make(tmp_path / "run", **options)
    again.train(resume_from=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(weights(again), weights(trainer)) and again.objective.steps == [1, 2, 3, 4, 5, 6]
    with raises(StateError, match="pulled.*ppo"):
        make(tmp_path / "run", updates_per_batch=2).train(resume_from=True)
    with raises(ConfigError, match="(?s)log-probs.*ratio"):
        make(tmp_path / "looks", ["looks"], **options)
    with raises(ConfigError, match="`same`.*`policy_loss`"):
        make(tmp_path / "same", ["same"], **options)
