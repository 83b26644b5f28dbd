"""verl's real V1 trainer on the CPU: Ray, TransferQueue, FSDP2, agent loops, our rollout replica.

One run takes another stack of methods every step, a setting; each test looks at one of them. A setting that ends the
run fails its own tests only: see `walked`. What the methods decide is recomputed here, and the gradient norm of every
optimizer step is compared with plain transformers and torch on the rows that were trained.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from gradients import reference
from methods.ps_grpo_loops import COLUMN, check_ps_grpo
from methods.slices_loops import check_slices
from runs import COMMON, PROBES, PROMPTS, SAMPLES, STALENESS, Run, check_end, walked

sys.path.insert(0, str(PROBES))

from sampler_checks import (
    Arms,
    Cascade,
    Weighing,
    centered,
    check_brorl,
    check_dars,
    check_dynamic_sampling,
    check_xrpo_phases,
    deviation,
    rewards_of,
)

from rl_plugins.core.groups import Groups
from rl_plugins.lab.demo.judges import meets
from rl_plugins.lab.demo.policy import build_tokenizer
from rl_plugins.lab.demo.tasks import build_rows
from rl_plugins.lab.demo.verl_data import SOURCE
from rl_plugins.methods.swarm_sapo import Files, Package
from rl_plugins.methods.swarm_sapo.packages import sender_of, written_files

pytestmark = pytest.mark.host

MAX_LENGTH = 14  # of a completion, in the demo's config

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
    "dynamic_sampling.success_threshold=1.0",
    "clip_cov.ratio=0.1",
    "clip_cov.low=0.1",
    "rubric.judge='rl_plugins.lab.demo.judges:meets'",
    "rubric.criteria=['2: right','1: careful']",
    "overlong.buffer=6",
    "overlong.penalty=0.5",
]
# Methods whose objective has tests of its own; here it is seen that they act in the real trainer.
FURTHER = ["drpo", "d3s", "mssr_baseline+mssr_shaping", "v0_5", "v0", "brpo", "fapo"]
SWARM = ["swarm_sapo+watch"]
SETS = ["ps_grpo+watch"]
SLICES = ["difficulty_slices+watch"]
AUDIT = ["reward_audit"]
POOL = ["sol_rl_select+sol_rl_advantages"]
# What users of the hosts ask for most.
FILLED = "dynamic_sampling+max_rl+clip_cov+dppo+watch"
FILTERED = "rubric+overlong+gfpo+variance_filter+pkpo+watch"
ALL = PLACES + SAMPLERS + FURTHER + SWARM + SETS + SLICES + AUDIT + POOL + [FILLED, FILTERED]


@pytest.fixture(scope="module")
def carousel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The last batch ends it: a hook raises on the driver."""

    def overrides(folder: Path) -> list[str]:
        for name, data in foreign_files().items():
            Files(folder / "swarm").put(name, data)
        return [
            *COMMON,
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
        ]

    folder = tmp_path_factory.mktemp("verl")
    return walked(folder, [*ALL, "boom"], overrides, stand_in="noop", RL_PLUGINS_TEST_DUMP="1")


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


# ---- every setting


each = pytest.mark.parametrize("number", range(len(ALL)), ids=[f"{i + 1}-{names}" for i, names in enumerate(ALL)])


@each
def test_a_setting_trains_what_it_planned(carousel: Run, number: int) -> None:
    """Its prompts, its rows, and how old they are by verl's own measure."""
    logged, step = carousel.metrics(number + 1), carousel.steps()[number]
    d, plan, decided = step["decision"], carousel.of("plan")[number], carousel.of("decided")[number]
    assert step["names"] == ALL[number].split("+") and plan["step"] == decided["step"] == number + 1
    more = set(decided["prompts"]) - set(plan["prompts"])  # of later rounds
    assert set(plan["prompts"]) <= set(decided["prompts"]) and bool(more) == (ALL[number] == FILLED)
    assert logged["rl_plugins/rows_generated"] == len(d.rollouts)
    assert logged["rl_plugins/rows_trained"] == int(d.trained.sum())
    if bool(d.stays.any()):  # of a batch that left whole verl keeps one row
        measured = carousel.measured(number + 1)
        for ours, theirs in STALENESS.items():
            assert logged[f"rl_plugins/{ours}"] == pytest.approx(measured[f"training/off_policy/{theirs}"]), ours


@each
def test_its_gradient_is_that_of_plain_torch(carousel: Run, number: int) -> None:
    carousel.check(number)
    update = carousel.update(number)
    if update is None:  # no row stayed
        assert ALL[number] not in {*PLACES, *FURTHER} - {"brpo"}
    elif ALL[number] not in FURTHER:
        norm, rows = reference([update])
        assert update["methods"] == ALL[number].split("+") and update["global_batch_size"] == rows
        assert update["grad_norm"] == pytest.approx(norm, rel=1e-4)


# ---- decisions


def test_mc_grpo_leaves_the_pivot_out(carousel: Run) -> None:
    step = carousel.step("mc_grpo")
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
    plans = carousel.of("plan")
    loader = plans[0]["prompts"]
    assert len(set(loader)) == PROMPTS and plans[1]["prompts"] != loader
    assert carousel.metrics(2)["vade/seen"] > 0


def test_rounds_add_to_the_groups(carousel: Run) -> None:
    """Four rollouts each, then eight more for the four groups of lowest mean reward."""
    d = carousel.step("probing")["decision"]
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
    step = carousel.step("helpings+watch")
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
    d = carousel.step("twice")["decision"]
    rollouts, groups, r = d.rollouts, d.rollouts.groups, d.rollouts.reward
    assert groups.size.tolist() == [SAMPLES] * PROMPTS and d.estimator == "host", "each has a mean of its own"
    assert torch.equal(rollouts.prompt_index[:32], rollouts.prompt_index[32:])
    assert len(rollouts.prompt_index.unique()) == PROMPTS // 2
    expected = (r - groups.rows(groups.mean(r))) / (groups.rows(groups.std(r)) + 1e-6)
    assert torch.allclose(d.row_advantages, expected, atol=1e-5)


def test_gdpo_normalizes_each_reward(carousel: Run) -> None:
    d = carousel.step("gdpo")["decision"]
    rollouts, groups = d.rollouts, d.rollouts.groups
    assert rollouts.reward_names == ("exact", "digits") and rollouts.reward_weights.tolist() == [1.0, 0.5]
    assert torch.allclose(rollouts.reward, rollouts.rewards @ rollouts.reward_weights)
    total = torch.zeros(len(rollouts), dtype=torch.float64)
    for x, w in zip(rollouts.rewards.unbind(1), rollouts.reward_weights, strict=True):
        total += w * (x - groups.rows(groups.mean(x))) / (groups.rows(groups.std(x)) + 1e-4)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    assert d.estimator == "gdpo" and torch.allclose(d.row_advantages, expected, atol=2e-3)


def test_grpo_roc_generates_twice_and_trains_half(carousel: Run) -> None:
    step = carousel.step("grpo_roc")
    d = step["decision"]
    assert d.rollouts.groups.size.tolist() == [2 * SAMPLES] * PROMPTS
    assert d.rollouts.subset(d.rollouts.kept).groups.size.tolist() == [SAMPLES] * PROMPTS
    assert step["batch_rows"] == 64 and step["padding"] == 0


def test_sol_rl_trains_the_best_and_worst_of_a_pool(carousel: Run) -> None:
    step = carousel.step(POOL[0])
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
    step = carousel.step("half+per_token")
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


def carousel_text(ids: tuple[int, ...]) -> str:
    return build_tokenizer().decode(ids)


def test_rewards_that_are_withdrawn(carousel: Run) -> None:
    d = carousel.step("odd+judge")["decision"]
    r = d.rollouts.reward
    short = d.rollouts.length < 4
    base = d.rollouts.rewards @ d.rollouts.reward_weights
    assert torch.equal(torch.isnan(r), short) and torch.allclose(r[~short], 2 * base[~short])
    assert (d.row_advantages[short] == 0).all()
    assert carousel.metrics(PLACES.index("odd+judge") + 1)["rewards/judge/mean"] == pytest.approx(float(r.nanmean()))


def test_a_plan_of_one_fills_the_batch_with_prompts(carousel: Run) -> None:
    step = carousel.step("one")
    d = step["decision"]
    assert d.rollouts.groups.size.tolist() == [1] * 64 and step["batch_rows"] == 64
    assert len(set(d.rollouts.prompt_index.tolist())) == 64
    assert torch.allclose(d.row_advantages, d.rollouts.reward - 0.5)


def test_the_advantage_methods_act(carousel: Run) -> None:
    drpo, d3s, mssr, v0_5, v0, brpo, _ = (carousel.step(names) for names in FURTHER)
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
    d = carousel.step("fapo")["decision"]
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
    d, logged = carousel.step("reward_audit")["decision"], carousel.metrics(ALL.index("reward_audit") + 1)
    marked = torch.tensor([row["index"] % 4 == 0 for row in carousel.rows_of(d.rollouts.prompt_index.tolist())])
    assert 0 < int(marked.sum()) < len(marked) and logged["reward_audit/quarantined"] == marked.double().mean()
    assert torch.isnan(d.rollouts.reward[marked]).all() and not d.row_advantages[marked].any()
    given = d.rollouts.rewards @ d.rollouts.reward_weights
    assert torch.equal(d.rollouts.reward[~marked], given[~marked]) and d.row_advantages[~marked].any()
    assert logged["reward_audit/critical"] == 1


def sampler(run: Run, name: str, visit: int = 0) -> tuple[Any, Any, dict[str, float]]:
    """Decision, tokens and what was logged in the first or a later batch of a sampler."""
    k = [i for i, names in enumerate(ALL) if name in names.split("+")][visit]
    run.check(k)
    _, tokens = torch.load(run.folder / f"watch{k}.pt", weights_only=False)
    return run.steps()[k]["decision"], tokens, run.metrics(k + 1)


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
        (level,) = {row["level"] for row in carousel.rows_of(d.rollouts.prompt_index.tolist())}
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
    replaced = 0  # none, where the policy has collapsed and all groups sample their stored success again
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
                    replaced += 1
                    torch.testing.assert_close(tokens.rollout_logprobs[tokens.row == rows[0]], logprobs)
        left = d.trained[tokens.row]
        weight = (tokens.old_logprobs - tokens.rollout_logprobs).double().exp().clamp(max=1)[left]
        centers = (r.reward - r.groups.rows(r.groups.mean(torch.where(d.trained, r.reward, torch.nan))))[tokens.row][
            left
        ]
        assert torch.equal(torch.sign(d.advantages[left]), torch.sign(centers))
        if bool(d.trained.any()) or not visit:  # later every group may hold a copy of its stored success, and leaves
            assert logged["dart_tis/weight_mean"] == pytest.approx(float(weight.mean()), rel=1e-4)
    assert logged["dart_pool/replaced"] == pytest.approx(replaced / PROMPTS) and logged["dart_pool/pool"] == 4


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
    rollouts, step = d.rollouts, carousel.step("swarm_sapo+watch")
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
    folder = Files(carousel.folder.parent / "swarm")
    (own,) = [folder.get(name, 10**6) for name in folder.names() if sender_of(name) == "me"]
    published = [json.loads(line) for line in own.splitlines()]
    first = rollouts.text[:SAMPLES]
    assert len(published) == 4 and published[0]["completions"] == first
    assert set(published[0]["columns"]) == set(sent[0]["columns"])


def test_dynamic_sampling_fills_a_batch_with_groups_that_have_signal(carousel: Run) -> None:
    """Beside an estimator, tokens without advantage and a loss of other methods."""
    d, tokens, logged = sampler(carousel, "dynamic_sampling")
    assert logged["dynamic_sampling/rollouts_per_row"] == pytest.approx(check_dynamic_sampling(d, 1.0))
    assert logged["dynamic_sampling/filled"] == 1.0
    r, left = d.rollouts, d.trained[tokens.row]
    mean = r.groups.rows(r.groups.mean(r.reward))
    given, expected = d.advantages[left], ((r.reward - mean) / (mean + 1e-6))[tokens.row][left]
    zeroed = (given - expected).abs() > 1e-6
    assert logged["clip_cov/chosen"] == int(zeroed.sum()) == int(0.1 * int(left.sum())) and not given[zeroed].any()
    assert logged["actor/dppo/left_out"] == 0 and 0 <= logged["actor/dppo/divergence"] < 1e-4, "on-policy"


def test_filters_keep_short_rollouts_of_groups_with_spread_and_judge_by_criteria(carousel: Run) -> None:
    d, _, logged = sampler(carousel, "rubric")
    r, prompts = d.rollouts, [prompt[0]["content"] for prompt in d.rollouts.meta["prompt"]]
    assert r.groups.size.tolist() == [2 * SAMPLES] * PROMPTS and logged["rubric/questions"] == 2 * len(r)
    for text, task, reward, length in zip(r.text, prompts, r.reward.tolist(), r.length.tolist(), strict=True):
        judged = (2 * meets(task, "right", text) + meets(task, "careful", text)) / 3
        assert reward == pytest.approx(judged - 0.5 * min(max(length - (MAX_LENGTH - 6), 0) / 6, 1))
    assert logged["overlong/punished"] > 0 and not bool((d.trained & r.truncated).any())
    efficiency = (r.reward / r.length).tolist()
    for group in range(PROMPTS):
        rows = (r.group == group).nonzero()[:, 0].tolist()
        short = sorted(rows, key=lambda i: -efficiency[i])[:SAMPLES]
        kept = [i for i in rows if r.kept[i]]
        assert set(kept) in ({*short}, set())
        for i in (i for i in kept if d.trained[i]):
            best = [
                max(r.reward[list(s)]) - max(r.reward[[j for j in s if j != i]])
                for s in itertools.combinations(kept, 4)
                if i in s
            ]
            assert float(d.row_advantages[i]) == pytest.approx(SAMPLES * float(sum(best)) / 70, abs=1e-5)
    assert 0 < logged["variance_filter/kept"] < 1


def test_metrics_of_hooks(carousel: Run) -> None:
    minpro = carousel.metrics(PLACES.index("minpro") + 1)
    assert any(k.startswith("actor/minpro/") for k in minpro)
    assert carousel.metrics(PLACES.index("softmax") + 1)["actor/softmax/groups"] == PROMPTS


def test_every_process_loaded_the_plugin_and_workers_confirmed(carousel: Run) -> None:
    assert "methods confirmed by 3 workers (training" in carousel.log
    assert len({e["pid"] for e in carousel.of("loaded")}) >= 6
    assert "rl-plugins: methods in effect, in this order" in carousel.log


# ---- numbers of the update


def test_a_batch_is_one_optimizer_step(carousel: Run) -> None:
    """Also where more rows were generated. Nearly all settings train."""
    updates, trained = carousel.updates(), [s for s in carousel.steps() if bool(s["decision"].trained.any())]
    assert len(carousel.steps()) == len(ALL) and len(updates) == len(trained)
    compared = [u for u in updates if "+".join(u["methods"]) not in FURTHER]
    assert len(compared) >= len(PLACES + SAMPLERS) - 1


def test_the_learning_rate_is_the_schedules(carousel: Run) -> None:
    """`vcpo` multiplies it by the effective sample size, which is 1 on-policy."""
    logged = carousel.metrics(PLACES.index("vcpo") + 1)
    assert logged["actor/vcpo/ess_ratio"] == pytest.approx(1, abs=1e-3)
    assert logged["actor/lr"] == pytest.approx(6e-4), "the schedule does not see it"


def test_a_hook_that_raises_ends_the_run(carousel: Run) -> None:
    check_end(carousel, "boom", "`observe`: ValueError: the driver hook went wrong")
