"""Sol-RL in the diffusion trainer: the objective nft against plain torch, the old policy, and the two stages."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from flow_runs import Tiny, make, weights
from messages import raises
from peft import PeftModel

from rl_plugins.core.denoising import noise
from rl_plugins.core.errors import ConfigError
from rl_plugins.diffusion.flows import shifted_sigmas
from rl_plugins.diffusion.nft import decay
from rl_plugins.runtime.cheap import CheapOptions, round_fp4

pytestmark = pytest.mark.host
NFT = {"objective": "nft", "beta": 0.1, "steps": 5}


def predicted(model, x, s, condition):
    return model(x[None], torch.tensor([s], dtype=x.dtype), torch.tensor([condition]))[0]


def update_by_hand(model, old, reference, rows, step, beta=1.0):
    """One optimizer step on `model` in plain torch, with the noise of the run; and its loss."""
    sigmas, total, count = shifted_sigmas(5), torch.zeros((), dtype=torch.float64), 0
    rewards = {}
    for row in rows:
        rewards.setdefault(row.place, []).append(row.sample.rewards["bright"])
    for row in rows:
        group = torch.tensor(rewards[row.place], dtype=torch.float64)
        a = ((row.sample.rewards["bright"] - group.mean()) / (group.std() + 1e-4)).clamp(-5, 5)
        r = (a / 5 / 2 + 0.5).clamp(0, 1)
        x0 = row.sample.latent.double()
        for k in range(5):
            t = sigmas[k]
            xt = (1 - t) * x0 + t * noise(x0.shape, f"{step}|{row.sample.key}|{k}", "forward").double()
            v = predicted(model, xt, t, row.condition)
            with torch.no_grad():
                v_old, v_ref = (predicted(m, xt, t, row.condition) for m in (old, reference))
            parts = []
            for x in (beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v):
                change = xt - t * x - x0
                parts.append((change**2 / change.detach().abs().mean().clamp(min=1e-5)).mean())
            total = total + 5 * (r * parts[0] + (1 - r) * parts[1]) / beta + 0.1 * ((v - v_ref) ** 2).mean()
            count += 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    (total / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(total.detach() / count)


@pytest.mark.parametrize("how", [{}, {"rows_per_pass": 3}, {"transitions_per_pass": 7}], ids=str)
def test_an_update_is_that_of_plain_torch(tmp_path, how):
    trainer = make(tmp_path / "a", batches=1, **NFT, **how)
    (logged,) = trainer.train()
    rows = make(tmp_path / "b", **NFT).batches.make(0).rows
    model, old, reference = Tiny().double(), Tiny().double(), Tiny().double()
    loss = update_by_hand(model, old, reference, rows, step=0)
    wanted = torch.cat([p.detach().flatten() for p in model.parameters()]).float()
    assert (weights(trainer) - weights(make(tmp_path / "c", **NFT))).abs().max() > 5e-3
    assert (weights(trainer) - wanted).abs().max() < 2e-4
    assert logged["loss"] == pytest.approx(loss, rel=1e-4)
    assert logged["kl"] == logged["distance_to_old"] == 0  # before the first update
    assert logged["rl_plugins/transitions_trained"] == 2 * 4 * 5


def test_a_weaker_beta_is_another_loss_and_the_same_gradient_at_the_old_policy(tmp_path):
    """At v = v_old the two policies are the old one, so beta only scales the loss."""
    rows = make(tmp_path / "b", **NFT).batches.make(0).rows
    trainer = make(tmp_path / "a", batches=1, objective_params={"beta": 0.5}, **NFT)
    (logged,) = trainer.train()
    loss = update_by_hand(Tiny().double(), Tiny().double(), Tiny().double(), rows, step=0, beta=0.5)
    assert logged["loss"] == pytest.approx(loss, rel=1e-4)


def test_the_old_policy_samples_and_follows(tmp_path):
    """Samples of a batch are the old policy's, without noise; it follows by the decay after the batch."""
    trainer = make(tmp_path, batches=4, updates_per_batch=2, objective_params={"decay": 1}, **NFT)
    objective, made = trainer.objective, []
    inside = trainer.batches.make

    def keep(version):
        before = {n: p.clone() for n, p in objective.old.items()}
        batch = inside(version)
        made.append((before, batch.rows, weights(trainer)))
        return batch

    trainer.batches.make = keep
    trainer.train()
    for before, rows, now in made[1:]:
        old = Tiny()
        old.load_state_dict(before)
        assert not torch.equal(torch.cat([p.flatten() for p in before.values()]), now)
        x = rows[0].sample.transitions[0].start
        for k, t in enumerate(rows[0].sample.transitions):
            assert not t.stochastic
            s, d = shifted_sigmas(5)[k], shifted_sigmas(5)[k + 1] - shifted_sigmas(5)[k]
            x = x + d * predicted(old, x, s, rows[0].condition).detach()
            torch.testing.assert_close(t.end, x, rtol=1e-4, atol=1e-5)
    # after batch i (two optimizer steps) old = d old + (1 - d) new
    for i, ((old, _, _), (following, _, new)) in enumerate(itertools.pairwise(made)):
        d = decay(2 * (i + 1), 1)
        flat = torch.cat([p.flatten() for p in old.values()])
        torch.testing.assert_close(torch.cat([p.flatten() for p in following.values()]), d * flat + (1 - d) * new)


def test_samples_may_have_noise_on_the_way(tmp_path):
    """As those of ppo, from the same seeds; every step is a token, whether it had noise or not."""
    trainer = make(tmp_path / "nft", objective_params={"stochastic": True}, **NFT)
    noisy = trainer.batches.make(0).rows
    ppo = make(tmp_path / "ppo", steps=5).batches.make(0).rows
    for row, same in zip(noisy, ppo, strict=True):
        assert torch.equal(row.sample.latent, same.sample.latent) and len(row.tokens) == 5
    plain = make(tmp_path / "plain", **NFT).batches.make(0).rows
    assert not any(torch.equal(a.sample.latent, b.sample.latent) for a, b in zip(noisy, plain, strict=True))


def test_the_old_policy_is_in_the_checkpoint(tmp_path):
    options = {**NFT, "batches": 4, "save_every": 2, "objective_params": {"decay": 1}}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    make(tmp_path / "cut", **{**options, "batches": 2}).train()
    again = make(tmp_path / "cut", **options)
    again.train(resume_from=True)
    assert torch.equal(weights(again), weights(whole))
    for name, value in whole.objective.old.items():
        assert torch.equal(value, again.objective.old[name])
        assert not torch.equal(value, whole.policy.trained[name].detach())  # the checkpoint has both


STAYS = {0: lambda step: 0.0, 1: lambda step: min(0.001 * step, 0.5), 2: lambda step: max(0.0, 0.0075 * (step - 75))}


@pytest.mark.parametrize("kind", STAYS)
def test_adapters_learn_from_an_old_adapter(tmp_path, kind):
    """LoRA, objective nft and a cheap copy: base weights stay, the old adapter follows by its decay, and a run that was
    cut, resumed and saved has the adapters of a whole one."""
    options = {"lora_rank": 2, "lora_targets": ["inner", "outer"], "beta": 0.01, "objective": "nft", "steps": 5}
    options |= {"objective_params": {"decay": kind}, "updates_per_batch": 8, "learning_rate": 2e-2, "save_every": 6}
    options |= {"method_params": {"sol_rl_explore": {"pool": 2, "steps": 3}}, "cheap": CheapOptions("fp4")}

    def trainer(name, batches):
        return make(tmp_path / name, ["sol_rl"], batches=batches, group_size=6, **options)

    whole, policies = trainer("whole", 12), []

    def keep(line):
        policies.append([copy.deepcopy(x) for x in (whole.objective.old, whole.policy.state_dict())])

    expected = {n: p.clone() for n, p in whole.objective.old.items()}
    history = whole.train(on_log=keep)
    assert sum(h["reward"] for h in history[-3:]) > sum(h["reward"] for h in history[:3]) + 0.3
    assert history[0]["sol_rl_explore/gap"] > 0 and history[-1]["kl"] > history[0]["kl"]
    for batch, (old, trained) in enumerate(policies):
        stays = STAYS[kind](8 * (batch + 1))
        for name, value in trained.items():
            assert "lora_" in name
            expected[name] = stays * expected[name] + (1 - stays) * value
            torch.testing.assert_close(old[name], expected[name])
    old, trained = (torch.cat([p.flatten() for p in found.values()]) for found in policies[-1])
    assert torch.equal(old, trained) == (kind == 0)
    base, first = whole.policy.module.get_base_model(), Tiny()
    assert torch.equal(base.inner.base_layer.weight, first.inner.weight)
    of_old = {n.split("base_model.model.")[1]: p for n, p in whole.objective.old.items()}
    delta = 2 * of_old["inner.lora_B.default.weight"] @ of_old["inner.lora_A.default.weight"]
    merged = round_fp4(first.inner.weight.detach() + delta)
    torch.testing.assert_close(whole.policy.cheap.inner.weight, merged)  # of the old adapter, which samples

    trainer("cut", 6).train()
    again = trainer("cut", 12)
    again.train(resume_from=True)
    assert torch.equal(weights(again), weights(whole))
    assert all(torch.equal(p, whole.objective.old[n]) for n, p in again.objective.old.items())
    again.save_model(str(tmp_path / "adapters"))
    loaded = PeftModel.from_pretrained(Tiny(), str(tmp_path / "adapters"))
    x, level, classes = torch.randn(3, 1, 2, 2), torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0, 1, 3])
    assert torch.equal(loaded(x, level, classes), whole.policy.module(x, level, classes))


def test_it_learns_with_two_stages(tmp_path):
    """The bundle of the paper's methods with its objective; what was explored has metrics of its own."""
    trainer = make(
        tmp_path,
        ["sol_rl"],
        method_params={"sol_rl_explore": {"pool": 2, "steps": 3}},
        cheap=CheapOptions("fp4"),
        batches=30,
        prompts_per_batch=4,
        group_size=6,
        learning_rate=2e-2,
        objective="nft",
        steps=5,
    )
    history = trainer.train()
    first, last = (sum(h["reward"] for h in part) / 5 for part in (history[:5], history[-5:]))
    assert last > first + 0.15
    for h in history:
        assert h["rl_plugins/cheap_passes"] == 4 * 12 * 3
        assert h["rl_plugins/model_passes"] == 4 * (12 * 3 + 6 * 5)
        assert h["rl_plugins/rows_generated"] == h["rl_plugins/rows_trained"] == 4 * 6
        assert h["reward"] == pytest.approx(h["sol_rl_explore/kept_exact_reward"])
        assert h["reward"] != h["sol_rl_explore/explored_reward"] and h["sol_rl_explore/gap"] > 0
        assert h["time/cheap_refresh"] > 0
    copied, policy = trainer.policy.cheap, trainer.policy.module
    old = copy.deepcopy(policy)
    old.load_state_dict(trainer.objective.old)
    assert torch.equal(copied.inner.weight, round_fp4(old.inner.weight.detach()))  # of the old policy, which samples
    assert torch.equal(copied.inner.bias, old.inner.bias)


def test_the_choice_alone_works_on_exact_samples(tmp_path):
    """Without exploration the pool is made by the policy, and its best and worst are trained with PPO."""
    trainer = make(tmp_path, ["sol_rl_select"], method_params={"sol_rl_select": {"oversample": 2}}, batches=1)
    inside, seen = trainer.batches.make, []
    trainer.batches.make = lambda version: seen.append(inside(version)) or seen[-1]
    (logged,) = trainer.train()
    assert logged["rl_plugins/rows_generated"] == 16 and logged["rl_plugins/rows_trained"] == 8
    rewards = torch.tensor([r.sample.rewards["bright"] for r in seen[0].rows]).view(2, 8)
    kept = seen[0].part.trained.view(2, 8)
    for of_prompt, stays in zip(rewards, kept, strict=True):
        ordered = of_prompt.sort().values
        assert sorted(of_prompt[stays].tolist()) == [*ordered[:2].tolist(), *ordered[-2:].tolist()]


def test_exploring_with_a_copy_like_the_policy_finds_its_own_samples(tmp_path):
    """One model, the same steps, no noise: what is made again is what was explored."""
    params = {"sol_rl_explore": {"steps": 5, "model": "policy"}}
    trainer = make(tmp_path, ["sol_rl_explore"], method_params=params, objective="nft", steps=5, batches=2)
    for h in trainer.train():
        assert h["sol_rl_explore/gap"] == pytest.approx(0, abs=1e-6)
        assert h["sol_rl_explore/rank_correlation"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("methods", "changes", "text"),
    [
        (["sol_rl"], {}, r"`sol_rl_explore`.*`cheap`"),
        (["sol_rl"], {"cheap": CheapOptions(), "steps": 4}, "6.*4.*`steps`"),
        (["sol_rl"], {"cheap": CheapOptions("int8", min_size=2240)}, "No linear layer takes the precision int8"),
        (["drpo"], {"objective": "nft"}, "`drpo`"),
        (["dart_tis"], {"objective": "nft"}, "the objective nft has no densities of transitions"),
        ([], {"objective": "flow"}, "objective='flow'"),
        ([], {"objective": "nft", "objective_params": {"decay": 3}}, "objective_params.*`decay`.*3"),
        (
            [],
            {"objective": "nft", "objective_params": {"betta": 1}},
            "'betta'",
        ),
        ([], {"objective_params": {"beta": 1}}, "the objective ppo has none"),
    ],
    ids=str,
)
def test_what_cannot_act_is_refused(tmp_path, methods, changes, text):
    with raises(ConfigError, match=text):
        make(tmp_path, methods, **changes).train()
