"""verl's real V1 trainer on the CPU: Ray, TransferQueue, FSDP2, agent loops, our rollout replica.

One run takes another stack of methods every step; each test looks at one step of it. What the methods decide is
recomputed here, and the gradient norm of every optimizer step is compared with plain transformers and torch on the rows
that were trained.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pyarrow.parquet as pq
import pytest
import torch
from methods.ps_grpo_loops import COLUMN, check_ps_grpo
from methods.slices_loops import check_slices
from runs import PROBES, PROMPTS, SAMPLES, SEPARATE, STALENESS, Run, broken, check_costs, check_groups, finished, start

sys.path.insert(0, str(PROBES))

from sampler_checks import (
    Arms,
    Cascade,
    Weighing,
    centered,
    check_brorl,
    check_dars,
    check_xrpo_phases,
    deviation,
    rewards_of,
)

from rl_plugins.core.groups import Groups
from rl_plugins.lab.demo.policy import build_tokenizer
from rl_plugins.lab.demo.tasks import build_rows
from rl_plugins.lab.demo.verl_data import SOURCE
from rl_plugins.methods.swarm_sapo import Folder, Package
from rl_plugins.methods.swarm_sapo.packages import sender_of, written_files

pytestmark = pytest.mark.host

PLACES = [
    "mc_grpo",
    "vade+mc_grpo",
    "probing",
    "minpro",
    "gdpo",
    "grpo_roc",
    "half+per_token",
    "filter+corridor",
    "softmax",
    "verl_given",
    "odd+judge",
    "one",
    "decoupled_ppo",
    "vcpo",
    "helpings+watch",
    "twice",
]
# Samplers, budgets and curricula. One that learns from a batch comes again.
XRPO = "xrpo_allocate+xrpo_seeds+xrpo_novelty+watch"
SAMPLERS = ["dars+watch", XRPO, XRPO, "brorl+watch", *2 * ["linear_ts+watch"], *2 * ["best_perm+watch"]]
SAMPLERS += [*2 * ["half_right+gdro_prompt+watch"], *2 * ["half_right+gdro_rollout+watch"]]
SAMPLERS += [*2 * ["half_right+dart_pool+dart_tis+watch"], *2 * ["drive+watch"]]
SAMPLER_PARAMS = [
    "dars.n_first=4",
    "dars.n_max=12",
    "xrpo_allocate.exploration=0.1",
    "xrpo_seeds.second_round=False",
    "xrpo_seeds.examples=1",
    "xrpo_seeds.template='{examples} {problem}'",
    "brorl.ramp=[[0,16]]",
    "brorl.base_rows=16",
    "linear_ts.column=level",
    "best_perm.templates=['{prompt} 1','{prompt} 2']",
    "best_perm.n_first=4",
    "best_perm.n_hint=2",
    "best_perm.max_hints=2",
    "best_perm.values=[1.0,1.0]",
    *(f"gdro_{name}.{option}" for name in ("prompt", "rollout") for option in ("edges=[0.55]", "hysteresis=0.0")),
    "dart_pool.give_below=1.0",
    "gdro_rollout.arm_sign=paper",
    "gdro_rollout.baseline=none",
    "drive.sizes=[1.0,6]",
    f"drive.batches=[{len(PLACES + SAMPLERS) - 1}]",  # the second phase begins with its second batch
    "drive.rollouts=[8,16]",
    "drive.max_tokens=[14,6]",
]
# Methods whose objective has tests of its own; here it is seen that they act in the real trainer.
FURTHER = ["drpo", "d3s", "mssr_baseline+mssr_shaping", "v0_5", "v0", "brpo", "fapo"]
SWARM = ["swarm_sapo+watch"]
SETS = ["ps_grpo+watch"]
SLICES = ["difficulty_slices+watch"]
AUDIT = ["reward_audit"]
POOL = ["sol_rl_select+sol_rl_advantages"]
ALL = PLACES + SAMPLERS + FURTHER + SWARM + SETS + SLICES + AUDIT + POOL
COMMON = [
    "+rl_plugins.rewards.exact=1",
    "+rl_plugins.rewards.digits=0.5",
    "+rl_plugins.method_params.mc_grpo.mad_eps=0.1",
    "actor_rollout_ref.actor.calculate_entropy=True",
]
# Methods whose loss or pool acts in a later batch or optimizer step; each comes twice, with its state.
TWICE = ["fission_grpo+echo_clip+watch", "aepo_clip+aepo_advantages+watch", "ppo_million", "epo"]
EPO = {"corridor": "batch", "entropy_coeff": 0.1, "kl": 0.9, "kr": 1.1}
ROUTED = ["routed"]  # a program, whose requests have the tag of their task
ROUTER = f"""
router_class: verl_routes.NotedBalancer
pools:
  - {{name: fast, servers: ["hf_cpu:0"], capacity: 40, prefill_rate: 20000, decode_rate: 300}}
  - {{name: slow, replicas: [1], capacity: 64, prefill_rate: 20000, decode_rate: 100}}
tags: {{{SOURCE}: [fast, slow]}}
"""
RANK_PLACES = ["mc_grpo", "half+per_token", "filter+corridor", "softmax", "minpro", "odd", "decoupled_ppo", "vcpo"]


@pytest.fixture(scope="module")
def carousel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The last batch ends it: a hook raises on the driver."""
    folder = tmp_path_factory.mktemp("verl")
    for name, data in foreign_files().items():
        Folder(folder / "swarm").put(name, data)
    return broken(
        folder / "carousel",
        [
            *COMMON,
            f"+carousel=[{','.join([*ALL, 'boom'])}]",
            "+rl_plugins.methods=[mc_grpo]",
            "+carousel_params.brpo.judge='verl_probes:judge'",
            "+carousel_params.fapo.judge='probes:flaw'",
            "+carousel_params.fapo.reward_high=1.5",
            "+carousel_params.drpo.reward=exact",
            f"+carousel_params.swarm_sapo.exchange={folder / 'swarm'}",
            "+carousel_params.swarm_sapo.node=me",
            "+carousel_params.swarm_sapo.external_weight=0.5",
            "+carousel_params.ps_grpo.compare=exact",
            "+carousel_params.ps_grpo.gamma=0.5",
            "+carousel_params.difficulty_slices.column=level",
            "+carousel_params.difficulty_slices.heads=3",
            "+carousel_params.difficulty_slices.head=2",
            "+carousel_params.sol_rl_select.oversample=2",
            "+carousel_params.reward_audit.on_preflight=quarantine",
            "+carousel_params.reward_audit.gold_renderer='verl_probes:turned_answer'",
            "actor_rollout_ref.actor.use_kl_loss=True",  # a reference policy, with no weight in the loss
            "actor_rollout_ref.actor.kl_loss_coef=0.0",
            *(f"+carousel_params.{p}" for p in SAMPLER_PARAMS),
            "data.max_prompt_length=96",
            f"trainer.total_training_steps={len(ALL) + 1}",
        ],
        trainer="carousel",
        RL_PLUGINS_TEST_DUMP="1",
        RL_PLUGINS_SECONDS="1",
    )


def foreign_files() -> dict[str, bytes]:
    """Packages of another node, in the columns of the demo: the right answer, and wrong ones. Two groups have equal
    rewards; one answer is cut off."""
    packages = []
    for i, row in enumerate(build_rows(12, seed=7)):
        answer, task = row["answer"], row["task"]
        completions = [f"={answer}", *(f"={answer[:-1]}{k}" for k in range(7))] if i > 1 else [f"={answer}"] * SAMPLES
        columns = {
            "data_source": SOURCE,
            "ability": task,
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {
                "index": 1000 + i,
                "split": "train",
                "level": row["level"],
                "answer": answer,
                COLUMN: 1000 + i,
            },
        }
        packages.append(Package(row["prompt"], columns, tuple(completions), (*[True] * 7, i % 2 == 0)))
    return written_files("other", 0, packages, 10**6)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two FSDP2 ranks, two optimizer steps per batch, means over rows, micro-batches by tokens, and a router for both
    rollout replicas, one of which is slow. The last batch ends it: a hook raises on one rank."""
    folder = tmp_path_factory.mktemp("verl")
    (folder / "router.yaml").write_text(ROUTER)
    return broken(
        folder / "ranks",
        [
            *COMMON,
            f"actor_rollout_ref.rollout.router_config_path={folder / 'router.yaml'}",
            f"+carousel=[{','.join([*RANK_PLACES, *2 * TWICE, *ROUTED, 'boom'])}]",
            "+carousel_params.boom.where=rank1",
            "+rl_plugins.methods=[mc_grpo,routed]",
            *(f"+carousel_params.epo.{k}={v}" for k, v in EPO.items()),
            "+carousel_params.fission_grpo.role=user",
            "+carousel_params.fission_grpo.message='verl_programs:complaint'",
            "+carousel_params.fission_grpo.error_threshold=0.5",
            "data.max_prompt_length=64",
            f"trainer.total_training_steps={len(RANK_PLACES + 2 * TWICE + ROUTED) + 1}",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        ],
        trainer="carousel",
        ranks=2,
        RL_PLUGINS_TEST_DUMP="1",
        RL_PLUGINS_TEST_SLOW_REPLICA="0.006",
    )


def place(run: Run, names: str) -> dict[str, Any]:
    return next(s for s in run.steps() if s["names"] == names.split("+"))


# ---- decisions


def test_mc_grpo_leaves_the_pivot_out(carousel: Run) -> None:
    step = place(carousel, "mc_grpo")
    d, groups = step["decision"], step["decision"].rollouts.groups
    assert groups.size.tolist() == [SAMPLES + 1] * PROMPTS and int(d.trained.sum()) == step["batch_rows"] == 64
    r = d.rollouts.reward
    center = groups.rows(groups.median(r))
    spread = groups.rows(groups.median((r - center).abs()))
    expected = (r - center) / (spread + 0.1)
    assert torch.allclose(d.row_advantages[d.trained], expected[d.trained], atol=1e-9)
    assert groups.sum((~d.trained).double()).tolist() == [1.0] * PROMPTS
    assert float((r - center)[~d.trained].abs().max()) == 0.0


def test_vade_chooses_other_prompts_than_the_loader(carousel: Run) -> None:
    plans = carousel.of("plan")[: len(ALL)]
    decided = carousel.of("decided")
    for plan, d in zip(plans, decided, strict=True):
        assert sorted(set(plan["prompts"])) == sorted(set(d["prompts"])), plan["step"]
    loader = plans[0]["prompts"]
    assert len(set(loader)) == PROMPTS and plans[1]["prompts"] != loader
    assert carousel.metrics(2)["vade/seen"] > 0


def test_rounds_add_to_the_groups(carousel: Run) -> None:
    """Four rollouts each, then eight more for the four groups of lowest mean reward."""
    d = place(carousel, "probing")["decision"]
    groups, r = d.rollouts.groups, d.rollouts.reward
    assert sorted(groups.size.tolist()) == [4] * 4 + [12] * 4 and d.estimator == "rl_plugins"
    first = d.rollouts.rollout < 4
    means = Groups(d.rollouts.group).mean(torch.where(first, r, torch.nan))
    low = torch.argsort(means, stable=True)[:4].sort().values
    assert low.tolist() == (groups.size == 12).nonzero()[:, 0].tolist()
    expected = (r - groups.rows(groups.mean(r))) / (groups.rows(groups.std(r)) + 1e-6)
    assert torch.allclose(d.row_advantages, expected, atol=1e-9)


def test_later_rounds_edit_prompts_and_have_the_room_of_groups_that_leave(carousel: Run) -> None:
    """A first round that is all spare (n = 0): 4 rollouts each; the four groups of lowest mean reward get 12 more under
    other words, which join the group they name, with the row as planned."""
    step = place(carousel, "helpings+watch")
    d, number = step["decision"], PLACES.index("helpings+watch")
    rollouts, groups, r = d.rollouts, d.rollouts.groups, d.rollouts.reward
    assert sorted(groups.size.tolist()) == [4] * 4 + [16] * 4 and step["batch_rows"] == 64 and step["padding"] == 0
    means = Groups(rollouts.group).mean(torch.where(rollouts.rollout < 4, r, torch.nan))
    low = groups.size == 16
    assert means[low].max() <= means[~low].min() and torch.equal(d.trained, groups.rows(low))
    inside = rollouts.subset(d.trained)
    mean, std = (inside.groups.rows(f(inside.reward)) for f in (inside.groups.mean, inside.groups.std))
    assert torch.allclose(d.row_advantages[d.trained], (inside.reward - mean) / (std + 1e-6), atol=1e-6)
    assert [p["planned"] for p in rollouts.payload] == rollouts.prompt_index.tolist()
    words = build_tokenizer().batch_decode([list(p) for p in rollouts.token_ids.prompt])
    hinted = [f"d:{i:04d}" in text for i, text in zip(rollouts.prompt_index.tolist(), words, strict=True)]
    assert hinted == [p.get("helping", 0) == 1 for p in rollouts.payload] == (rollouts.rollout >= 4).tolist()
    update = next(u for u in carousel.updates() if u["methods"] == ["helpings", "watch"])
    trained = build_tokenizer().batch_decode([list(p) for p in update["rows"]["prompts"]])
    wanted = [text for text, kept in zip(words, d.trained.tolist(), strict=True) if kept]
    assert sorted(trained) == sorted(wanted) and carousel.metrics(number + 1)["rl_plugins/rows_generated"] == 80


def test_a_prompt_in_two_groups_of_its_own(carousel: Run) -> None:
    d = place(carousel, "twice")["decision"]
    rollouts, groups, r = d.rollouts, d.rollouts.groups, d.rollouts.reward
    assert groups.size.tolist() == [SAMPLES] * PROMPTS and d.estimator == "host", "each has a mean of its own"
    assert torch.equal(rollouts.prompt_index[:32], rollouts.prompt_index[32:])
    assert len(rollouts.prompt_index.unique()) == PROMPTS // 2
    expected = (r - groups.rows(groups.mean(r))) / (groups.rows(groups.std(r)) + 1e-6)
    assert torch.allclose(d.row_advantages, expected, atol=1e-5)


def test_gdpo_normalizes_each_reward(carousel: Run) -> None:
    d = place(carousel, "gdpo")["decision"]
    rollouts, groups = d.rollouts, d.rollouts.groups
    assert rollouts.reward_names == ("exact", "digits") and rollouts.reward_weights.tolist() == [1.0, 0.5]
    assert torch.allclose(rollouts.reward, rollouts.rewards @ rollouts.reward_weights)
    total = torch.zeros(len(rollouts), dtype=torch.float64)
    for x, w in zip(rollouts.rewards.unbind(1), rollouts.reward_weights, strict=True):
        total += w * (x - groups.rows(groups.mean(x))) / (groups.rows(groups.std(x)) + 1e-4)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    assert d.estimator == "gdpo" and torch.allclose(d.row_advantages, expected, atol=2e-3)


def test_grpo_roc_generates_twice_and_trains_half(carousel: Run) -> None:
    step = place(carousel, "grpo_roc")
    d = step["decision"]
    assert d.rollouts.groups.size.tolist() == [2 * SAMPLES] * PROMPTS
    assert d.rollouts.subset(d.rollouts.kept).groups.size.tolist() == [SAMPLES] * PROMPTS
    assert step["batch_rows"] == 64 and step["padding"] == 0


def test_sol_rl_trains_the_best_and_worst_of_a_pool(carousel: Run) -> None:
    step = place(carousel, *POOL)
    d = step["decision"]
    assert d.rollouts.groups.size.tolist() == [2 * SAMPLES] * PROMPTS
    assert step["batch_rows"] == 64 and step["padding"] == 0
    pool = d.rollouts.reward.view(PROMPTS, -1)
    kept = d.rollouts.kept.view(PROMPTS, -1)
    half = SAMPLES // 2
    for rewards, stays in zip(pool.tolist(), kept.tolist(), strict=True):
        falling = sorted(range(len(rewards)), key=lambda i: -rewards[i])  # stable
        assert {i for i, s in enumerate(stays) if s} == {*falling[:half], *falling[-half:]}
    rewards = pool[kept].view(PROMPTS, -1)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(correction=0) + 1e-4)
    torch.testing.assert_close(d.row_advantages[d.rollouts.kept], advantages.flatten())


def test_rows_and_tokens_that_leave(carousel: Run) -> None:
    step = place(carousel, "half+per_token")
    d = step["decision"]
    assert (d.rollouts.kept == (d.rollouts.group < 4)).all() and int(d.trained.sum()) == 32
    assert step["padding"] == 32, "verl fills the batch to its mini-batch"
    update = carousel.updates()[PLACES.index("half+per_token")]
    real = [i for i, x in enumerate(update["rows"]["rl_plugins_real"]) if float(x.sum()) > 0]
    assert len(real) == 32 == update["global_batch_size"]
    for i in real:
        mask, loss_mask = update["rows"]["response_mask"][i], update["rows"]["loss_mask"][i]
        assert mask.tolist() == loss_mask.tolist() == [int(k % 3 != 2) for k in range(len(mask))]
        a = update["rows"]["advantages"][i]
        assert torch.allclose(a[1::3], torch.where(torch.arange(1, len(a), 3) % 2 > 0, 2.0, 1.0) * a[0], atol=1e-5)


def test_what_a_plan_can_ask_for(carousel: Run) -> None:
    rollouts, tokens = torch.load(carousel.folder / "given.pt", weights_only=False)
    of = Groups(tokens.row, count=len(rollouts))
    forced = of.sum(tokens.forced.double())
    assert rollouts.length[:2].tolist() == [4, 3] and forced[:2].tolist() == [0, 3], "with log-probs it is a sample"
    assert tokens.rollout_logprobs[:4].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert torch.equal(tokens.rollout_logprobs[4:7], tokens.old_logprobs[4:7]), "unknown: that of the policy"
    assert forced[8:16].tolist() == [2.0] * 8 and rollouts.payload[8] == {"hint": 2}
    assert rollouts.text[8].startswith(carousel_text((10, 11)))
    assert int(rollouts.length[16:24].max()) == 3
    assert rollouts.meta["level"][24:32] == [77] * 8 and rollouts.meta["level"][32:40] == [99] * 8
    assert rollouts.prompt_index[32:40].tolist() == [-1] * 8
    given = (rollouts.group == rollouts.group[0]) & (rollouts.rollout == 0)
    given |= (rollouts.group == rollouts.group[40]) & (rollouts.rollout == 0)
    sampled = ~tokens.forced & ~given[tokens.row]
    assert torch.allclose(tokens.rollout_logprobs[sampled], tokens.old_logprobs[sampled], atol=1e-4)
    host = carousel.metrics(PLACES.index("verl_given") + 1)["training/rollout_probs_diff_mean"]
    assert host < 0.05, "verl's metric does not see place holders"


def test_a_stored_rollout_comes_back_as_it_was(carousel: Run) -> None:
    """With its log-probs, versions, observed token and rewards, which are not computed again."""
    rollouts, tokens = torch.load(carousel.folder / "given.pt", weights_only=False)
    own, now = tokens.row == 40, PLACES.index("verl_given")
    assert tokens.position[own].tolist() == [0, 1, 3, 4] and not bool(tokens.forced[own].any())
    assert tokens.rollout_logprobs[own].tolist() == [-1.0, -2.0, -4.0, -5.0]
    assert (tokens.old_logprobs[own] - tokens.rollout_logprobs[own]).abs().max() > 0.1, "its weight exists"
    assert tokens.version[own].tolist() == [2, 2, 3, 5]
    assert (int(rollouts.version[40]), int(rollouts.newest_version[40]), rollouts.current_version) == (2, 5, now)
    assert rollouts.rewards[40].tolist() == [1.0, 0.25] and float(rollouts.reward[40]) == 1.125
    assert rollouts.token_ids.prompt[40].tolist() == [12, 11, 10, 9], "its own, and no other row's"
    assert all(p.tolist() != [12, 11, 10, 9] for i, p in enumerate(rollouts.token_ids.prompt) if i != 40)
    assert rollouts.token_ids.completion[40].tolist() == [7, 8, 9, 6, 1]
    assert rollouts.token_ids.observed[40].tolist() == [False, False, True, False, False]
    others = torch.arange(len(rollouts)) != 40
    assert (rollouts.version[others] == now).all() and (rollouts.newest_version[others] == now).all(), "made now"
    assert (tokens.version[~own] == now).all(), "also those that were given without versions, or put in"
    logged = carousel.metrics(now + 1)
    assert (logged["rl_plugins/staleness_max"], logged["rl_plugins/mixed_version_rows"]) == (now - 5, 1 / 64)
    assert logged["rl_plugins/staleness_oldest_max"] == now - 2 and logged["rl_plugins/staleness_share/4_7"] == 1 / 64


def test_squared_probabilities_are_those_of_the_policy_that_gave_the_old_log_probs(carousel: Run) -> None:
    from rl_plugins.lab.demo.policy import build_model

    rollouts, tokens = torch.load(carousel.folder / "given.pt", weights_only=False)
    update = next(u for u in carousel.updates() if u["methods"] == ["verl_given"])
    model = build_model(0).float()
    model.load_state_dict(update["weights"])
    for row in (0, 8, 40, 63):
        prompt, made = rollouts.token_ids.prompt[row], rollouts.token_ids.completion[row]
        with torch.no_grad():
            p = model(torch.cat([prompt, made])[None]).logits[0, len(prompt) - 1 : -1].softmax(-1)
        own = tokens.row == row
        place = tokens.position[own]
        assert torch.allclose(tokens.sum_squared_probs[own], (p**2).sum(-1)[place], atol=1e-5)
        logprobs = p.gather(1, made[:, None])[place, 0].log()
        assert torch.allclose(tokens.old_logprobs[own], logprobs, atol=1e-4)


def test_staleness_is_verls_own(carousel: Run) -> None:
    for number, step in enumerate(carousel.steps(), 1):
        if bool(step["decision"].stays.any()):  # of a batch that left whole verl keeps one row
            logged, measured = carousel.metrics(number), carousel.measured(number)
            for ours, theirs in STALENESS.items():
                assert logged[f"rl_plugins/{ours}"] == pytest.approx(measured[f"training/off_policy/{theirs}"]), number


def carousel_text(ids: tuple[int, ...]) -> str:
    return build_tokenizer().decode(ids)


def test_rewards_that_are_withdrawn(carousel: Run) -> None:
    d = place(carousel, "odd+judge")["decision"]
    r = d.rollouts.reward
    short = d.rollouts.length < 4
    base = d.rollouts.rewards @ d.rollouts.reward_weights
    assert torch.equal(torch.isnan(r), short) and torch.allclose(r[~short], 2 * base[~short])
    assert (d.row_advantages[short] == 0).all()
    assert carousel.metrics(PLACES.index("odd+judge") + 1)["rewards/judge/mean"] == pytest.approx(float(r.nanmean()))


def test_a_plan_of_one_fills_the_batch_with_prompts(carousel: Run) -> None:
    step = place(carousel, "one")
    d = step["decision"]
    assert d.rollouts.groups.size.tolist() == [1] * 64 and step["batch_rows"] == 64
    assert len(set(d.rollouts.prompt_index.tolist())) == 64
    assert torch.allclose(d.row_advantages, d.rollouts.reward - 0.5)


def test_the_advantage_methods_act(carousel: Run) -> None:
    drpo, d3s, mssr, v0_5, v0, brpo, _ = (place(carousel, names) for names in FURTHER)
    assert drpo["decision"].estimator == "drpo"
    assert next(u for u in carousel.updates() if u["methods"] == ["drpo"])["grad_norm"] > 0
    share = float(d3s["decision"].keep_tokens.float().mean())  # late in its schedule, which ends at 1
    assert int(d3s["decision"].trained.sum()) < 64 and 0.2 < share < 0.8
    assert d3s["batch_rows"] == 64 and d3s["padding"] == 64 - int(d3s["decision"].trained.sum())
    rollouts = mssr["decision"].rollouts
    assert rollouts.groups.size.tolist() == [1] * 64 and len(set(rollouts.prompt_index.tolist())) == 64
    assert v0_5["decision"].estimator == "v0_5" and int(v0_5["decision"].trained.sum()) <= 64
    assert int(v0["decision"].rollouts.groups.size.sum()) == 64
    assert brpo["decision"].estimator == "brpo" and set(brpo["decision"].rewarded_by) == {"brpo"}


def test_fapo_judges_right_rollouts(carousel: Run) -> None:
    d = place(carousel, "fapo")["decision"]
    base = d.rollouts.rewards @ d.rollouts.reward_weights
    right = base >= 0.5
    flawed = right & torch.tensor([len(text) % 2 == 1 for text in d.rollouts.text])
    assert torch.allclose(d.rollouts.reward, torch.where(flawed, base - 0.75, base), atol=1e-12)
    assert 0 < int(flawed.sum()) < len(flawed)
    logged = carousel.metrics(ALL.index("fapo") + 1)
    assert logged["fapo/right"] == pytest.approx(float(right.double().mean()))
    assert logged["fapo/judged"] <= int(right.sum()) and logged["fapo/judge_failed"] == 0


def test_reward_audit_takes_out_what_it_finds_wrong_before_training(carousel: Run) -> None:
    """Probes say of every fourth row of the dataset that a wrong answer is right: the rewards of the run look wrong."""
    d, logged = place(carousel, "reward_audit")["decision"], carousel.metrics(ALL.index("reward_audit") + 1)
    marked = torch.tensor([row["index"] % 4 == 0 for row in rows_of(carousel, d.rollouts.prompt_index.tolist())])
    assert 0 < int(marked.sum()) < len(marked) and logged["reward_audit/quarantined"] == marked.double().mean()
    assert torch.isnan(d.rollouts.reward[marked]).all() and not d.row_advantages[marked].any()
    given = d.rollouts.rewards @ d.rollouts.reward_weights
    assert torch.equal(d.rollouts.reward[~marked], given[~marked]) and d.row_advantages[~marked].any()
    assert logged["reward_audit/critical"] == 1


def sampler(run: Run, name: str, visit: int = 0) -> tuple[Any, Any, dict[str, float]]:
    """Decision, tokens and what was logged in the first or a later batch of a sampler."""
    k = [i for i, names in enumerate(ALL) if name in names.split("+")][visit]
    _, tokens = torch.load(run.folder / f"watch{k}.pt", weights_only=False)
    return run.steps()[k]["decision"], tokens, run.metrics(k + 1)


def rows_of(run: Run, prompts: list[int]) -> list[dict[str, Any]]:
    """`extra_info` of rows of the dataset."""
    table = pyarrow.parquet.read_table(run.folder / "data" / "train.parquet").to_pylist()
    return [table[i]["extra_info"] for i in prompts]


def trained_prompts(run: Run, name: str, visit: int = 0) -> list[str]:
    update = [u for u in run.updates() if name in u["methods"]][visit]["rows"]
    real = [float(x.sum()) > 0 for x in update["rl_plugins_real"]]
    texts = build_tokenizer().batch_decode([list(p) for p in update["prompts"]])
    return [text for text, kept in zip(texts, real, strict=True) if kept]


def test_dars_gives_hard_prompts_a_second_helping(carousel: Run) -> None:
    d, _, logged = sampler(carousel, "dars")
    asked, given = check_dars(d, 4, 12)
    assert logged["dars/asked"] == asked > 0 and logged["rl_plugins/rows_generated"] == 32 + given
    expected = centered(d, deviation(1e-6))  # the run divides by the deviation
    torch.testing.assert_close(d.row_advantages[d.trained], expected, rtol=1e-4, atol=1e-5)


def test_xrpo_hands_out_phases_seeds_what_failed_and_lifts_what_is_rare(carousel: Run) -> None:
    for visit in (0, 1):
        d, tokens, logged = sampler(carousel, "xrpo_allocate", visit)
        later = check_xrpo_phases(d, 0.1)
        assert logged["xrpo_allocate/most"] == int(d.rollouts.groups.size.max())
        seeded = [text for text in trained_prompts(carousel, "xrpo_allocate", visit) if "olution" in text]
        assert len(seeded) == logged["xrpo_seeds/seeded"] <= sum(failed for *_, failed in later)
        assert (len(seeded) > 0) == (visit > 0 and any(failed for *_, failed in later)), "answers of earlier batches"
        base = centered(d, deviation(1e-6))
        rare = Groups(tokens.row).mean(tokens.old_logprobs.double())
        eta = torch.exp(rare - d.rollouts.groups.rows(d.rollouts.groups.mean(rare)))
        bonus = torch.minimum((2.5 * (1 - eta)).clamp(min=0), 0.5 * base)
        expected = base + torch.where(base > 0, bonus, 0.0)
        torch.testing.assert_close(d.row_advantages, expected, rtol=1e-4, atol=1e-4)
        assert float((expected - base).max()) > 0.01


def test_brorl_has_fewer_prompts_with_more_rollouts_and_a_rate_for_its_rows(carousel: Run) -> None:
    d, _, logged = sampler(carousel, "brorl")
    assert d.rollouts.groups.size.tolist() == [16] * 4 and d.estimator == "brorl"
    check_brorl(d)
    assert logged["actor/brorl/lr_scale"] == pytest.approx(math.sqrt(int(d.trained.sum()) / 16))


def test_linear_ts_takes_a_batch_from_one_domain(carousel: Run) -> None:
    for visit in (0, 1):
        d, _, logged = sampler(carousel, "linear_ts", visit)
        (level,) = {row["level"] for row in rows_of(carousel, d.rollouts.prompt_index.tolist())}
        informative = [min(xs) < max(xs) for xs in rewards_of(d).values()]
        assert logged[f"linear_ts/share/{level}"] == 1.0
        assert logged[f"linear_ts/reward/{level}"] == pytest.approx(sum(informative) / PROMPTS)


def test_best_perm_tries_hints_in_the_order_of_the_oracle(carousel: Run) -> None:
    books = Cascade()
    for visit in (0, 1):
        d, _, _ = sampler(carousel, "best_perm", visit)
        hints = [k for k in books.check(d) if k is not None]
        words = [text.removesuffix("<asst>") for text in trained_prompts(carousel, "best_perm", visit)]
        assert [sum(text.endswith(f" {k + 1}") for text in words) for k in (0, 1)] == [hints.count(0), hints.count(1)]
    assert books.cascades > 0


def test_gdro_prompt_weighs_bins_by_what_was_known_before(carousel: Run) -> None:
    books = Weighing()
    for visit in (0, 1):
        d, _, _ = sampler(carousel, "gdro_prompt", visit)
        assert sorted(set(d.rollouts.prompt_index.tolist())) == [*range(PROMPTS)]
        books.check(d, centered(d, deviation(1e-6)))
    assert books.spread[0] == 0 and books.spread[1] > 0.01, "no history before the second visit"


def test_gdro_rollout_moves_rollouts_between_bins(carousel: Run) -> None:
    books = Arms()
    for visit in (0, 1):
        d, _, logged = sampler(carousel, "gdro_rollout", visit)
        books.check(d)
        assert logged["gdro_rollout/shadow_price"] == pytest.approx(books.price)
    assert len(books.sizes) == 2 and logged["gdro_rollout/most"] > SAMPLES


def test_dart_gives_the_stored_success_of_a_group_that_fails(carousel: Run) -> None:
    """The probe rewards the first rollout of every second prompt: in the second batch that is the stored one."""
    stored: dict[int, Any] = {}
    for visit in (0, 1):
        d, tokens, logged = sampler(carousel, "dart_pool", visit)
        r = d.rollouts
        for group in r.group.unique().tolist():
            rows = (r.group == group).nonzero()[:, 0].tolist()
            task = int(r.prompt_index[rows[0]])
            assert len(rows) == SAMPLES + (visit == 1 and task % 2 == 0)
            kept = [i for i in rows if r.kept[i]]
            if task % 2:
                assert not kept, "never solved"
            elif not visit:
                assert kept == rows
                mine = tokens.row == rows[0]
                ids = r.token_ids.completion[rows[0]].tolist()
                stored[task] = (ids, tokens.rollout_logprobs[mine], int(r.version[rows[0]]))
            else:
                ids, logprobs, version = stored[task]
                copies = [r.token_ids.completion[i].tolist() == ids for i in rows[1:]]
                assert kept == ([] if any(copies) else [rows[0], *rows[2:]]), "the oldest failure leaves"
                assert r.token_ids.completion[rows[0]].tolist() == ids and int(r.version[rows[0]]) == version
                if kept:
                    torch.testing.assert_close(tokens.rollout_logprobs[tokens.row == rows[0]], logprobs)
        left = d.trained[tokens.row]
        weight = (tokens.old_logprobs - tokens.rollout_logprobs).double().exp().clamp(max=1)[left]
        centers = (r.reward - r.groups.rows(r.groups.mean(torch.where(d.trained, r.reward, torch.nan))))[tokens.row][
            left
        ]
        assert torch.equal(torch.sign(d.advantages[left]), torch.sign(centers))
        assert logged["dart_tis/weight_mean"] == pytest.approx(float(weight.mean()), rel=1e-4)
    assert logged["dart_pool/replaced"] > 0 and logged["dart_pool/pool"] == 4


def test_drive_changes_prompts_rollouts_and_length_within_a_run(carousel: Run) -> None:
    first, _, _ = sampler(carousel, "drive", 0)
    second, _, logged = sampler(carousel, "drive", 1)
    assert first.rollouts.groups.size.tolist() == [8] * 8 and second.rollouts.groups.size.tolist() == [16] * 4
    unseen = [i for i in range(20) if i not in first.rollouts.prompt_index.tolist()]  # without an estimate: the hardest
    assert set(second.rollouts.prompt_index.tolist()) <= set(unseen[:6])
    assert int(second.rollouts.length.max()) == 6 < int(first.rollouts.length.max())
    assert (logged["drive/phase"], logged["drive/set"], logged["drive/outside"]) == (1, 6, 0)


def test_ps_grpo_trains_whole_sets_and_compares_wordings(carousel: Run) -> None:
    """Sets of three in a batch of eight prompts: two of them, and two places stay empty."""
    d, _, logged = sampler(carousel, "ps_grpo")
    table = pyarrow.parquet.read_table(carousel.folder / "data" / "train.parquet").to_pylist()
    found = check_ps_grpo(d, [row["extra_info"][COLUMN] for row in table], gamma=0.5)
    assert len(found) == 2 and int(d.trained.sum()) == 6 * SAMPLES and logged["ps_grpo/empty_places"] == 2
    expected = centered(d, deviation(1e-6))
    torch.testing.assert_close(d.row_advantages[d.trained], expected, rtol=1e-4, atol=1e-5)
    assert logged["ps_grpo/distinct_answers"] in (0.5, 1.0) and 0 < logged["ps_grpo/consistency"] < 1


def test_difficulty_slices_takes_half_of_a_batch_from_its_slice(carousel: Run) -> None:
    d, _, logged = sampler(carousel, "difficulty_slices")
    table = pyarrow.parquet.read_table(carousel.folder / "data" / "train.parquet").to_pylist()
    level = [row["extra_info"]["level"] for row in table]
    assert d.rollouts.groups.size.tolist() == [SAMPLES] * PROMPTS and bool(d.trained.all())
    check_slices([d.rollouts.prompt_index[::SAMPLES].tolist()], level, heads=3, head=2, share=0.5)
    assert logged["difficulty_slices/own"] == 0.5 and logged["difficulty_slices/spread"] > 1


def test_swarm_sapo_trains_groups_of_another_node_as_they_were_sent(carousel: Run) -> None:
    """Its questions and columns, too: the reward function here reads the answer that was sent."""
    d, tokens, logged = sampler(carousel, "swarm_sapo")
    rollouts, step = d.rollouts, place(carousel, "swarm_sapo+watch")
    sent = [json.loads(line) for data in foreign_files().values() for line in data.splitlines()]
    by_text = {tuple(line["completions"]): line for line in sent}
    foreign, forced = rollouts.prompt_index < 0, Groups(tokens.row, count=len(rollouts)).mean(tokens.forced.double())
    assert torch.equal(forced[rollouts.kept], foreign[rollouts.kept].double()), "nobody sampled them here"
    assert int(foreign.sum()) == 8 * SAMPLES and int(d.trained.sum()) == 64, "four of eight candidates, four own"
    asked, end = trained_prompts(carousel, "swarm_sapo"), build_tokenizer().eos_token
    for group in rollouts.group[foreign].unique().tolist():
        rows = (rollouts.group == group).nonzero()[:, 0].tolist()
        line = by_text[tuple(rollouts.text[i] for i in rows)]
        answer = line["columns"]["reward_model"]["ground_truth"]
        assert any(line["prompt"][0]["content"] in text for text in asked) == bool(d.trained[rows].any())
        assert rollouts.rewards[rows, 0].tolist() == [float(rollouts.text[i][1:] == answer) for i in rows]
        assert [rollouts.raw_text[i].endswith(end) for i in rows] == line["finished"]
        same = len(set(rollouts.reward[rows].tolist())) == 1
        assert not (same and bool(d.trained[rows].any()))
    kept = d.trained & foreign
    assert int(kept.sum()) == 4 * SAMPLES and step["padding"] == 0
    expected = centered(d, deviation(1e-6)) * torch.where(foreign[d.trained], 0.5, 1.0)
    torch.testing.assert_close(d.row_advantages[d.trained], expected, rtol=1e-4, atol=1e-5)
    assert logged["swarm_sapo/candidates"] == 8 and logged["swarm_sapo/arrived"] == 12
    assert logged["swarm_sapo/external"] == 0.5 and logged["swarm_sapo/published"] == 4
    folder = Folder(carousel.folder.parent / "swarm")
    (own,) = [folder.get(name, 10**6) for name in folder.names() if sender_of(name) == "me"]
    published = [json.loads(line) for line in own.splitlines()]
    first = rollouts.text[:SAMPLES]
    assert len(published) == 4 and published[0]["completions"] == first
    assert set(published[0]["columns"]) == set(sent[0]["columns"])


def test_metrics_of_hooks_and_of_everything_generated(carousel: Run) -> None:
    for number, (names, step) in enumerate(zip(ALL, carousel.steps(), strict=True), 1):
        logged, d = carousel.metrics(number), step["decision"]
        assert logged["rl_plugins/rows_generated"] == len(d.rollouts), names
        assert logged["rl_plugins/rows_trained"] == int(d.trained.sum()), names
    minpro = carousel.metrics(PLACES.index("minpro") + 1)
    assert any(k.startswith("actor/minpro/") for k in minpro)
    assert carousel.metrics(PLACES.index("softmax") + 1)["actor/softmax/groups"] == PROMPTS


def test_every_process_loaded_the_plugin_and_workers_confirmed(carousel: Run) -> None:
    assert "methods confirmed by 3 workers (training" in carousel.log
    assert len({e["pid"] for e in carousel.of("loaded")}) >= 6
    assert "rl-plugins: methods in effect, in this order" in carousel.log


# ---- numbers of the update


def reference(parts: list[dict[str, Any]]) -> tuple[float, int]:
    """Gradient norm of one optimizer step by plain torch on the rows that are trained, and their number."""
    from rl_plugins.lab.demo.policy import build_model

    model = build_model(0).float()
    model.load_state_dict(parts[0]["weights"])
    rows = [
        {k: v[i] for k, v in p["rows"].items()}
        for p in parts
        for i in range(len(p["rows"]["responses"]))
        if float(p["rows"]["rl_plugins_real"][i].sum()) > 0
    ]
    terms = []
    for row in rows:
        prompt, response = row["prompts"], row["responses"]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = logits.gather(1, response[:, None])[:, 0]
        terms.append((row, logprobs, -(logits.exp() * logits).sum(-1), row["response_mask"].float()))
    methods, mode = parts[0]["methods"], parts[0]["loss_agg_mode"]
    tokens = sum(float(m.sum()) for *_, m in terms)

    def aggregate(values: list[torch.Tensor]) -> torch.Tensor:
        masked = [(v * m).sum() for v, (*_, m) in zip(values, terms, strict=True)]
        if mode == "token-mean":
            return torch.stack(masked).sum() / tokens
        return torch.stack([x / m.sum() for x, (*_, m) in zip(masked, terms, strict=True)]).mean()

    if "softmax" in methods:
        score = torch.stack([(lp.detach() * m).sum() / m.sum() for _, lp, _, m in terms])
        group = [int(row["rl_plugins_group"]) for row, *_ in terms]
        positive = [float(row["rl_plugins_row_column:positive"]) > 0 for row, *_ in terms]
        loss = 0.0 * terms[0][1].sum()  # no group may have both a right and a wrong rollout
        for g in set(group):
            inside = [i for i in range(len(group)) if group[i] == g]
            pos, neg = [i for i in inside if positive[i]], [i for i in inside if not positive[i]]
            if pos and neg:
                weight = score[neg].exp() / score[neg].exp().sum()
                objective = sum(terms[i][1] @ terms[i][3] / terms[i][3].sum() / len(pos) for i in pos)
                objective -= sum(
                    w * (terms[i][1] @ terms[i][3]) / terms[i][3].sum() for i, w in zip(neg, weight, strict=True)
                )
                loss = loss - objective / len(set(group))
    elif "minpro" in methods:
        losses = []
        for row, lp, *_ in terms:
            ratio = (lp - row["rollout_log_probs"]).detach().exp()
            prefix = torch.cat([torch.ones(1), torch.cummin(ratio, 0).values[:-1]])
            losses.append(-(ratio * prefix).clamp(max=4.0) * row["advantages"] * lp)
        loss = aggregate(losses)
    elif "vcpo" in methods:
        loss = vcpo_loss(terms)
    elif "decoupled_ppo" in methods:
        losses = []
        for row, lp, *_ in terms:
            a, ratio = row["advantages"], (lp - row["old_log_probs"]).exp()
            omega = (row["old_log_probs"] - row["rollout_log_probs"]).exp()
            omega = torch.where(omega > 5, 0.0, omega)
            losses.append(omega * torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)))
        loss = aggregate(losses)
    else:
        losses = []
        for row, lp, *_ in terms:
            a, ratio = row["advantages"], (lp - row["old_log_probs"]).exp()
            x = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            losses.append(torch.where(a < 0, torch.minimum(x, -a * 3.0), x))
        loss = aggregate(losses)
    if "corridor" in methods:
        loss = loss + aggregate([0.1 * (torch.relu(2.0 - h) + torch.relu(h - 2.5)) for _, _, h, _ in terms])
    if "epo" in methods:
        outside = []
        for row, _, h, _ in terms:
            low, high = (row[f"rl_plugins_token_column:epo_{name}"] for name in ("low", "high"))
            outside.append(torch.relu(low - h) + torch.relu(h - high))
        loss = loss - 0.1 * aggregate([h - 2.0 * x for (_, _, h, _), x in zip(terms, outside, strict=True)])
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    return norm, len(rows)


def vcpo_loss(terms: list[tuple[Any, ...]]) -> torch.Tensor:
    """A sum over rows with weights of their own; the baseline of a group at the weights of this step."""
    rows = [(row, lp, m) for row, lp, _, m in terms]
    log_w = [float(((lp.detach() - row["rollout_log_probs"]) * m).sum()) for row, lp, m in rows]
    length = [float(m.sum()) for *_, m in rows]
    reward = [float(row["rl_plugins_row_column:vcpo_reward"]) for row, *_ in rows]
    group = [int(row["rl_plugins_group"]) for row, *_ in rows]
    loss = torch.zeros(())
    for i, (_, lp, m) in enumerate(rows):
        peers = [j for j in range(len(rows)) if group[j] == group[i]]
        big = [math.exp(2 * log_w[j]) * length[j] for j in peers]
        baseline = sum(x * reward[j] for x, j in zip(big, peers, strict=True)) / sum(big)
        weight = min(math.exp(log_w[i]), 8.0)
        loss = loss - (reward[i] - baseline) * weight * (lp * m).sum() / length[i] / len(rows)
    return loss


def test_gradients_are_those_of_plain_torch(carousel: Run) -> None:
    updates, trained = carousel.updates(), [s for s in carousel.steps() if bool(s["decision"].trained.any())]
    assert len(updates) == len(trained), "one optimizer step per batch, also where more rows were generated"
    assert {"+".join(s["names"]) for s in trained} >= {*PLACES, *FURTHER} - {"brpo"}, "all groups of brpo may leave"
    compared = [u for u in updates if "+".join(u["methods"]) not in FURTHER]
    assert len(compared) >= len(PLACES + SAMPLERS) - 1
    for update in compared:
        norm, rows = reference([update])
        assert update["global_batch_size"] == rows, update["methods"]
        assert update["grad_norm"] == pytest.approx(norm, rel=1e-4), update["methods"]


def test_gradients_on_two_ranks_with_two_steps(ranks: Run) -> None:
    """The second step of a batch is off-policy: its ratios are not 1."""
    first, second = ranks.updates(0), ranks.updates(1)
    assert len(first) == len(second)
    steps = {tuple(n.split("+")): 0 for n in RANK_PLACES}
    for mine, theirs in zip(first, second, strict=True):
        if tuple(mine["methods"]) not in steps:
            continue
        steps[tuple(mine["methods"])] += 1
        norm, rows = reference([mine, theirs])
        assert mine["global_batch_size"] == theirs["global_batch_size"] == rows, mine["methods"]
        assert mine["grad_norm"] == pytest.approx(norm, rel=2e-4, abs=1e-7), mine["methods"]
    assert all(steps[(name,)] == 2 for name in ("mc_grpo", "softmax", "minpro", "decoupled_ppo", "vcpo"))


def test_the_learning_rate_follows_the_effective_sample_size(carousel: Run, ranks: Run) -> None:
    """1 on-policy; below it where the first step of a batch moved the policy. Logged is the mean of the steps."""
    on_policy = carousel.metrics(PLACES.index("vcpo") + 1)
    assert on_policy["actor/vcpo/ess_ratio"] == pytest.approx(1, abs=1e-3)
    off_policy = ranks.metrics(RANK_PLACES.index("vcpo") + 1)
    assert 0.1 < off_policy["actor/vcpo/ess_ratio"] < on_policy["actor/vcpo/ess_ratio"]
    assert off_policy["actor/lr"] == on_policy["actor/lr"], "the schedule does not see it"
    weight = ranks.metrics(RANK_PLACES.index("decoupled_ppo") + 1)["actor/decoupled_ppo/weight_mean"]
    assert weight == pytest.approx(1, abs=1e-3), "this engine samples from the trained weights"


def test_fission_turns_errors_into_prompts(ranks: Run) -> None:
    before, after = len(RANK_PLACES), len(RANK_PLACES + TWICE)
    first, _ = torch.load(ranks.folder / f"watch{before}.pt", weights_only=False)
    assert ranks.metrics(before + 1)["fission_grpo/pool"] > 0 and bool((first.prompt_index >= 0).all())
    rollouts, _ = torch.load(ranks.folder / f"watch{after}.pt", weights_only=False)
    foreign = rollouts.prompt_index == -1
    assert ranks.metrics(after + 1)["fission_grpo/served"] > 0 and 0 < int(foreign.sum()) < 64
    assert not set(rollouts.group[foreign].tolist()) & set(rollouts.group[~foreign].tolist()), "groups of their own"


def test_clips_act_in_the_second_update(ranks: Run) -> None:
    for place, name in zip(TWICE, ("echo_clip", "aepo_clip", "ppo_million", "epo"), strict=True):
        updates = [u for u in ranks.updates() if u["methods"] == place.split("+")]
        assert len(updates) == 4 and all(u["grad_norm"] > 0 for u in updates)
        logged = ranks.metrics(len(RANK_PLACES) + 1 + TWICE.index(place))
        assert any(f"{name}/" in key for key in logged), sorted(logged)


def test_epo_keeps_the_entropy_of_the_batch_before(ranks: Run) -> None:
    """No corridor at the first visit; at the second one around the mean entropy of the first. Both ranks have it."""
    parts = [[u for u in ranks.updates(rank) if u["methods"] == ["epo"]] for rank in (0, 1)]
    visits = [len(RANK_PLACES) + 1 + TWICE.index("epo") + k * len(TWICE) for k in (0, 1)]
    logged = [ranks.metrics(n) for n in visits]
    assert [m["epo/covered"] for m in logged] == [0, 1]
    bounds = [0.9 * logged[0]["epo/entropy"], 1.1 * logged[0]["epo/entropy"]]
    for number, step in enumerate(zip(*parts, strict=True)):
        norm, rows = reference(list(step))
        assert step[0]["grad_norm"] == pytest.approx(norm, rel=2e-4) and step[0]["global_batch_size"] == rows
        for name, bound in zip(("low", "high"), bounds, strict=True):
            told = [
                x[r["response_mask"].bool()]
                for p in step
                for r in ({k: v[i] for k, v in p["rows"].items()} for i in range(len(p["rows"]["responses"])))
                for x in [r[f"rl_plugins_token_column:epo_{name}"]]
            ]
            told = torch.cat(told)
            assert (told.abs() > 1e20).all() if number < 2 else told == pytest.approx(bound, rel=1e-4)
    assert len(parts[0]) == 4 and 0 < logged[1]["actor/epo/within"] < 1 and logged[1]["actor/epo/penalty"] > 0


def test_ppo_million_measures_the_second_update(ranks: Run) -> None:
    """verl's mean over the two optimizer steps of a batch: 0 in the first one, k3 of the old policy in the second."""
    parts = [[u for u in ranks.updates(rank) if u["methods"] == ["ppo_million"]] for rank in (0, 1)]
    kl = []
    for step in zip(*parts, strict=True):
        norm, _ = reference(list(step))
        assert step[0]["grad_norm"] == pytest.approx(norm, rel=2e-4), "the term of 0 leaves verl's own loss"
        kl.append(mean_k3(step))
    first, second = (len(RANK_PLACES) + 1 + TWICE.index("ppo_million") + k * len(TWICE) for k in (0, 1))
    logged = [ranks.metrics(n)["actor/ppo_million/kl"] for n in (first, second)]
    assert len(kl) == 4 and min(kl[1], kl[3]) > 1e-7
    assert logged == pytest.approx([(kl[0] + kl[1]) / 2, (kl[2] + kl[3]) / 2], rel=1e-2, abs=1e-9)
    ratio = ranks.metrics(second)["ppo_million/samples_per_nat"]
    assert ratio == pytest.approx(ranks.metrics(first)["ppo_million/samples"] / logged[0], rel=1e-6)


def mean_k3(parts: Any) -> float:
    """Over the trained tokens of an optimizer step of all ranks, by plain torch in float64."""
    from rl_plugins.lab.demo.policy import build_model

    model = build_model(0).double()
    model.load_state_dict(parts[0]["weights"])
    total, tokens = 0.0, 0
    for p in parts:
        for i in range(len(p["rows"]["responses"])):
            row = {k: v[i] for k, v in p["rows"].items()}
            if float(row["rl_plugins_real"].sum()) > 0:
                prompt, response = row["prompts"], row["responses"]
                with torch.no_grad():
                    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                d = logits.gather(1, response[:, None])[:, 0] - row["old_log_probs"].double()
                mask = row["response_mask"].bool()
                total, tokens = total + float((d.expm1() - d)[mask].sum()), tokens + int(mask.sum())
    return total / tokens


def test_the_router_of_two_replicas(ranks: Run) -> None:
    """Requests without a tag go where a turn is cheapest by what was measured. Those of the program have a tag, whose
    first pool takes as many as it has places for."""
    routed, released = ranks.of("routed"), ranks.of("released")
    servers = ("hf_cpu:0", "hf_cpu:1")
    tagged = [e for e in routed if e["request"].startswith(f"{SOURCE}|")]
    plain = [e for e in routed if "|" not in e["request"]]
    assert len(tagged) == 128 and len(tagged) + len(plain) == len(routed) and len(plain) >= 64 * len(RANK_PLACES)
    got = {s: sum(e["server"] == s for e in plain) for s in servers}
    assert got[servers[0]] > 1.2 * got[servers[1]] > 0, got
    took = {s: sorted(e["took"] for e in released if e["server"] == s) for s in servers}
    assert took[servers[0]][len(took[servers[0]]) // 2] < took[servers[1]][len(took[servers[1]]) // 2], "it is slow"
    first, turns = {}, {}
    for e in tagged:
        assert e["load"][servers[0]] <= 40 and e["load"][servers[1]] <= 64
        first.setdefault(e["request"], e["server"])
        turns.setdefault(e["request"], []).append((e["server"], e["tokens"]))
    assert len(turns) == 64 and all(len(of) == 2 and of[0][1] < of[1][1] for of in turns.values())
    assert list(first.values())[:40] == ["hf_cpu:0"] * 40 and "hf_cpu:1" in first.values()
    changed = sum(a[0] != b[0] for a, b in turns.values())
    before = routed[routed.index(tagged[0]) - 1]  # requests of the last step come after the tagged ones
    assert changed == tagged[-1]["moved"] - before["moved"] <= 8, "a trajectory leaves a full server only"
    lines = [json.loads(line) for line in (ranks.folder / "served.jsonl").read_text().splitlines()]
    assert [sum(line[3] == k for line in lines) for k in (0, 1)] == [
        sum(e["server"] == s for e in routed) for s in servers
    ]


def test_steps_do_not_cut_groups(ranks: Run) -> None:
    updates = [ranks.updates(rank) for rank in (0, 1)]
    for parts in zip(*updates, strict=True):
        if parts[0]["methods"] == ["softmax"]:
            group = [int(g) for p in parts for g in p["rows"]["rl_plugins_group"]]
            assert sorted(group.count(g) for g in set(group)) == [SAMPLES] * (PROMPTS // 2)


# ---- errors


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("carousel", "Method `boom` failed in `observe`: ValueError: the driver hook went wrong"),
        ("ranks", "Method `boom` failed in `regularize`: ValueError: the loss hook went wrong"),
    ],
)
def test_a_hook_that_raises_ends_the_run(name: str, message: str, request: pytest.FixtureRequest) -> None:
    """With its traceback, the method's name and the way to do without it; on one rank of two as on the driver."""
    run: Run = request.getfixturevalue(name)
    assert message in run.log and "raise ValueError(" in run.log
    assert "Remove `boom` from `methods` to go on without it." in run.log
    assert run.of("step")[-1]["step"] == run.of("stepped")[-1]["step"] + 1, "the step before it was whole"


# ---- asynchronous modes


def test_colocate_async_with_a_kill(tmp_path: Path) -> None:
    """Killed in the save of step 3 and resumed from step 2: what was in flight is trained, and the plans go on where
    they were."""
    where = f"trainer.default_local_dir={tmp_path / 'checkpoints'}"
    traced = "+rl_plugins.trace={groups: 5, signals: [old_logprobs]}"
    common = ["+rl_plugins.methods=[vade,mc_grpo]", *COMMON[2:3], where, "trainer.save_freq=1", traced]
    killed = start(
        tmp_path / "killed",
        [*common, "trainer.total_training_steps=9"],
        trainer="watched_colocate_async",
        RL_PLUGINS_TEST_SLOW="1",
        RL_PLUGINS_TEST_HOLD="3",
    )
    try:
        killed.wait_for("saving", step=3)
        killed.kill()
    finally:
        killed.clean_up()
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = finished(
        tmp_path / "resumed",
        [*common, "trainer.total_training_steps=4", "trainer.resume_mode=auto"],
        trainer="watched_colocate_async",
        RL_PLUGINS_TEST_SETTLED="1",  # of groups that are complete the oldest are trained
    )
    for run in (killed, resumed):
        for step in run.steps():
            assert step["decision"].rollouts.groups.size.tolist() == [SAMPLES + 1] * PROMPTS
            assert int(step["decision"].trained.sum()) == 64
    assert [killed.metrics(k).get("rl_plugins/plan_lag", 0.0) for k in (1, 2)] == [0.0, 1.0]
    plans = [e["prompts"] for e in killed.of("plan")]
    assert len({tuple(p) for p in plans}) == len(plans) == 4, "every plan draws other prompts"
    third = {e["step"]: e["prompts"] for e in resumed.of("plan")}[3]
    assert third == {e["step"]: e["prompts"] for e in killed.of("plan")}[3], "the same state and random numbers"
    trained = [set(e["prompts"]) for e in (*killed.of("decided")[:2], *resumed.of("decided"))]
    in_flight = set(plans[0] + plans[1] + plans[2]) - trained[0] - trained[1]
    assert in_flight and in_flight <= trained[2] | trained[3], "nothing that was in flight is lost"
    assert check_groups([killed, resumed], [2], rows=SAMPLES + 1) == (4 * PROMPTS, PROMPTS)
    assert resumed.metrics(4)["vade/seen"] > killed.metrics(2)["vade/seen"]
    check_costs(killed, resumed, 2, 4)
    check_trace(tmp_path / "checkpoints" / "trace", [*killed.steps()[:2], *resumed.steps()])


def check_trace(folder: Path, steps: list[dict[str, Any]]) -> None:
    """The files of a killed and a resumed run beside what was decided."""

    def read(table: str, number: int) -> list[dict[str, Any]]:
        return list(pq.read_table(folder / table / f"batch-{number:08d}.parquet").to_pylist())

    assert len(list((folder / "batches").iterdir())) == len(steps) == 4
    for number, step in enumerate(steps):
        d, rows, (batch,) = step["decision"], read("rollouts", number), read("batches", number)
        assert batch["rows"] == len(d.rollouts) == 72 and batch["trained_rows"] == int(d.trained.sum()) == 64
        recorded = {g["group"] for g in batch["groups"] if g["recorded"]}
        assert recorded == {r["group"] for r in rows} and len(recorded) == 5 and len(rows) == 5 * (SAMPLES + 1)
        assert batch["stages"] == ["mc_grpo.advantages"]
        for r in rows:
            i = r["row"]
            assert r["advantage"] == float(d.row_advantages[i]) and r["trained"] == bool(d.trained[i])
            assert r["raw_reward"] == float(d.rollouts.reward[i])
            assert r["prompt_index"] == int(d.rollouts.prompt_index[i])
            assert r["trained"] or [m["method"] for m in r["left"]] == ["mc_grpo"]
            assert len(r["old_logprobs"]) == len(r["completion_ids"]) and max(r["old_logprobs"]) < 0
            assert r["prompt"].startswith("<user>") and r["plan"] is None, "plans of a buffer are not recorded"


def test_separate_async_with_a_kill(tmp_path: Path) -> None:
    """Killed in the save of step 3 and resumed from step 2, while rollouts are made all the time."""
    options = [
        *SEPARATE,
        "+rl_plugins.methods=[drive,dora_loss]",  # as a filter: the host's number of rollouts in both phases
        "+rl_plugins.method_params.dora_loss.mu=version",
        "+rl_plugins.method_params.drive.sizes=[1.0,16]",
        "+rl_plugins.method_params.drive.batches=[2]",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.separate_async.num_warmup_batches=2",
        "trainer.v1.sampler.max_off_policy_threshold=4",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
    ]
    trainer = "watched_separate_async"
    run = start(
        tmp_path / "killed",
        [*options, "trainer.total_training_steps=9"],
        trainer=trainer,
        RL_PLUGINS_TEST_HOLD="3",
        RL_PLUGINS_TEST_DUMP="1",
    )
    try:
        run.wait_for("saving", step=3)
        run.kill()
    finally:
        run.clean_up()
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = finished(
        tmp_path / "resumed",
        [*options, "trainer.total_training_steps=4", "trainer.resume_mode=auto"],
        trainer=trainer,
    )
    check_costs(run, resumed, 2, 4)
    trained, waiting = check_groups([run, resumed], [2])
    assert trained == 4 * PROMPTS and waiting > 0
    kept = {i for r in (run, resumed) for e in r.of("plan") if e["step"] in (2, 3, 4) for i in e["prompts"]}
    assert len(kept) == 16, "plans are of the set from the second step on, and the resumed run has the same set"
    outside = [r.metrics(number)["drive/outside"] for r, number in ((run, 2), (resumed, 3), (resumed, 4))]
    assert outside[0] > outside[2], f"what is trained was planned up to two steps before: {outside}"
    assert [r.metrics(n)["drive/phase"] for r, n in ((run, 1), (run, 2), (resumed, 4))] == [0, 1, 1]
    steps = run.steps()[:4]
    assert [len(s["decision"].rollouts) for s in steps] == [32] * 4, "two batches per weight synchronization"
    assert [e["step"] for e in run.of("decided")][:4] == [1, 1, 2, 2]
    told = [s["decision"].rollouts for s in steps]
    assert [(r.current_version, r.steps_since_published) for r in told] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    ages = [sorted(set(r.staleness.tolist())) for r in told]  # a group may wait until the next publication
    assert ages[:2] == [[0], [0]] and {*ages[2], *ages[3]} <= {0, 1}, "in publications"
    assert [e["step"] for e in resumed.of("decided")] == [3, 3, 4, 4]
    for process, number in ((run, 1), (run, 2), (resumed, 3), (resumed, 4)):
        logged, measured = process.metrics(number), process.measured(number)
        for ours, theirs in STALENESS.items():
            assert logged[f"rl_plugins/{ours}"] == pytest.approx(measured[f"training/off_policy/{theirs}"])
    logged = run.metrics(2)
    assert logged["rl_plugins/rows_trained"] == 32 and logged["actor/dora_loss/clipfrac"] > 0, "the rows are older"
    assert logged["actor/dora_loss/weight_mean"] == pytest.approx(1, abs=1e-3), "and the engine samples exactly"
    check_generating_weights(run)
    stale = [bool((s["decision"].rollouts.staleness > 0).any()) for s in resumed.steps()[:2]]
    assert any(stale) and resumed.metrics(3)["rl_plugins/version_lost"] > 0, "copies are not part of a checkpoint"
    assert "Some tokens were generated by weights that are no longer kept" in resumed.log


def check_generating_weights(run: Run) -> None:
    """Old log-probs of steps 1 and 2 are those of the weights that were published when each token was generated, and
    the trainer goes on with its own weights. Two optimizer steps per publication; float64 here."""
    from rl_plugins.lab.demo.policy import build_model

    updates = run.updates()[:4]
    published = [build_model(0).double(), build_model(0).double()]
    for model, update in zip(published, updates[::2], strict=True):
        model.load_state_dict(update["weights"])
    older, change = 0, 0.0
    for update in updates:
        for i in range(len(update["rows"]["responses"])):
            row = {k: v[i] for k, v in update["rows"].items()}
            if float(row["rl_plugins_real"].sum()) == 0:
                continue
            prompt, response, mask = row["prompts"], row["responses"], row["response_mask"].bool()
            ids = torch.cat([prompt, response])[None]
            with torch.no_grad():
                both = [m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in published]
            first, second = (x.gather(1, response[:, None])[:, 0] for x in both)
            version = row["rl_plugins_token_version"].flatten()
            expected = torch.where(version == 0, first, second)
            torch.testing.assert_close(row["old_log_probs"][mask].double(), expected[mask], rtol=0, atol=1e-4)
            if update is updates[2] or update is updates[3]:
                older += int((version[mask] == 0).sum())
                change = max(change, float((first - second)[mask].abs().max()))
    assert older > 0 and change > 0.01, "of the newest weights they would be others"
    weights = [torch.cat([v.flatten() for v in update["weights"].values()]) for update in updates]
    moved = [float((b - a).abs().max()) for a, b in itertools.pairwise(weights)]
    assert min(moved) > 1e-4, "an optimizer step moves the trainer's own weights"
    passes = [run.metrics(step)["rl_plugins/version_passes"] for step in (1, 2)]
    assert passes[0] == 0 and 0 < passes[1] <= 1 and run.metrics(2)["rl_plugins/version_lost"] == 0


@pytest.mark.parametrize("name", ["minpro", "gdpo", "filter+corridor", "softmax"])
def test_a_step_says_what_it_costs_in_the_package(carousel: Run, name: str) -> None:
    """On the driver, and in the worker; there only rows and tokens are counted unless a hook is in the loss."""
    logged = carousel.metrics(PLACES.index(name) + 1)
    for clock in ("rl_plugins/seconds", "rl_plugins/cpu_seconds"):
        parts = [logged[f"{clock}/{part}"] for part in ("driver", "gather", "split")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(logged[clock])
        assert logged[f"actor/{clock}/update"] == logged[f"actor/{clock}"] > 0
    update = "actor/rl_plugins/cpu_seconds/update"
    assert name == "gdpo" or logged[update] > carousel.metrics(PLACES.index("gdpo") + 1)[update]
