"""Samplers, budgets, pools and further methods in verl's real V1 trainer on the CPU, as the hooks in `test_runs.py`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from methods.ps_grpo_loops import COLUMN, check_ps_grpo
from methods.slices_loops import check_slices
from runs import COMMON, PROBES, PROMPTS, SAMPLES, Run, check_gradient, check_setting, seen, trained_prompts, walked

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
from rl_plugins.methods.swarm_sapo import Files, Package
from rl_plugins.methods.swarm_sapo.packages import sender_of, written_files

pytestmark = [pytest.mark.host, pytest.mark.long]

# Samplers, budgets and curricula. One that learns from a batch comes again.
XRPO = "xrpo_allocate+xrpo_seeds+xrpo_novelty+watch"
SAMPLERS = ["dars+watch", XRPO, XRPO, "brorl+watch", *2 * ["linear_ts+watch"], *2 * ["best_perm+watch"]]
SAMPLERS += [*2 * ["half_right+gdro_prompt+watch"], *2 * ["half_right+gdro_rollout+watch"]]
SAMPLERS += [*2 * ["half_right+dart_pool+dart_tis+watch"], *2 * ["drive+watch"]]
PARAMS = [
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
    f"drive.batches=[{len(SAMPLERS) - 1}]",  # the second phase begins with its second batch
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
ALL = SAMPLERS + FURTHER + SWARM + SETS + SLICES + AUDIT + POOL


@pytest.fixture(scope="module")
def carousel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The last batch ends it, as every walk."""

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
            *(f"+carousel_params.{p}" for p in PARAMS),
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


@pytest.mark.parametrize("number", range(len(ALL)), ids=[f"{i + 1}-{names}" for i, names in enumerate(ALL)])
def test_a_setting_trains_what_it_planned(carousel: Run, number: int) -> None:
    check_setting(carousel, number)


@pytest.mark.parametrize("number", range(len(ALL)), ids=[f"{i + 1}-{names}" for i, names in enumerate(ALL)])
def test_its_gradient_is_that_of_plain_torch(carousel: Run, number: int) -> None:
    if ALL[number] not in FURTHER:
        check_gradient(carousel, number)


# ---- decisions


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


def test_dars_gives_hard_prompts_a_second_helping(carousel: Run) -> None:
    d, _, logged = seen(carousel, "dars")
    asked, given = check_dars(d, 4, 12)
    assert logged["dars/asked"] == asked > 0 and logged["rl_plugins/rows_generated"] == 32 + given
    expected = centered(d, deviation(1e-6))  # the run divides by the deviation
    torch.testing.assert_close(d.row_advantages[d.trained], expected, rtol=1e-4, atol=1e-5)


def test_xrpo_hands_out_phases_seeds_what_failed_and_lifts_what_is_rare(carousel: Run) -> None:
    for visit in (0, 1):
        d, tokens, logged = seen(carousel, "xrpo_allocate", visit)
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
    d, _, logged = seen(carousel, "brorl")
    assert d.rollouts.groups.size.tolist() == [16] * 4 and d.estimator == "brorl"
    check_brorl(d)
    assert logged["actor/brorl/lr_scale"] == pytest.approx(math.sqrt(int(d.trained.sum()) / 16))


def test_linear_ts_takes_a_batch_from_one_domain(carousel: Run) -> None:
    for visit in (0, 1):
        d, _, logged = seen(carousel, "linear_ts", visit)
        (level,) = {row["level"] for row in carousel.rows_of(d.rollouts.prompt_index.tolist())}
        informative = [min(xs) < max(xs) for xs in rewards_of(d).values()]
        assert logged[f"linear_ts/share/{level}"] == 1.0
        assert logged[f"linear_ts/reward/{level}"] == pytest.approx(sum(informative) / PROMPTS)


def test_best_perm_tries_hints_in_the_order_of_the_oracle(carousel: Run) -> None:
    books = Cascade()
    for visit in (0, 1):
        d, _, _ = seen(carousel, "best_perm", visit)
        hints = [k for k in books.check(d) if k is not None]
        words = [text.removesuffix("<asst>") for text in trained_prompts(carousel, "best_perm", visit)]
        assert [sum(text.endswith(f" {k + 1}") for text in words) for k in (0, 1)] == [hints.count(0), hints.count(1)]
    assert books.cascades > 0


def test_gdro_prompt_weighs_bins_by_what_was_known_before(carousel: Run) -> None:
    books = Weighing()
    for visit in (0, 1):
        d, _, _ = seen(carousel, "gdro_prompt", visit)
        assert sorted(set(d.rollouts.prompt_index.tolist())) == [*range(PROMPTS)]
        books.check(d, centered(d, deviation(1e-6)))
    assert books.spread[0] == 0 and books.spread[1] > 0.01, "no history before the second visit"


def test_gdro_rollout_moves_rollouts_between_bins(carousel: Run) -> None:
    books = Arms()
    for visit in (0, 1):
        d, _, logged = seen(carousel, "gdro_rollout", visit)
        books.check(d)
        assert logged["gdro_rollout/shadow_price"] == pytest.approx(books.price)
    assert len(books.sizes) == 2 and logged["gdro_rollout/most"] > SAMPLES


def test_dart_gives_the_stored_success_of_a_group_that_fails(carousel: Run) -> None:
    """The probe rewards the first rollout of every second prompt: in the second batch that is the stored one."""
    stored: dict[int, Any] = {}
    replaced = 0  # none, where the policy has collapsed and all groups sample their stored success again
    for visit in (0, 1):
        d, tokens, logged = seen(carousel, "dart_pool", visit)
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
    first, _, _ = seen(carousel, "drive", 0)
    second, _, logged = seen(carousel, "drive", 1)
    assert first.rollouts.groups.size.tolist() == [8] * 8 and second.rollouts.groups.size.tolist() == [16] * 4
    unseen = [i for i in range(20) if i not in first.rollouts.prompt_index.tolist()]  # without an estimate: the hardest
    assert set(second.rollouts.prompt_index.tolist()) <= set(unseen[:6])
    assert int(second.rollouts.length.max()) == 6 < int(first.rollouts.length.max())
    assert (logged["drive/phase"], logged["drive/set"], logged["drive/outside"]) == (1, 6, 0)


def test_ps_grpo_trains_whole_sets_and_compares_wordings(carousel: Run) -> None:
    """Sets of three in a batch of eight prompts: two of them, and two places stay empty."""
    d, _, logged = seen(carousel, "ps_grpo")
    table = pyarrow.parquet.read_table(carousel.folder / "data" / "train.parquet").to_pylist()
    found = check_ps_grpo(d, [row["extra_info"][COLUMN] for row in table], gamma=0.5)
    assert len(found) == 2 and int(d.trained.sum()) == 6 * SAMPLES and logged["ps_grpo/empty_places"] == 2
    expected = centered(d, deviation(1e-6))
    torch.testing.assert_close(d.row_advantages[d.trained], expected, rtol=1e-4, atol=1e-5)
    assert logged["ps_grpo/distinct_answers"] in (0.5, 1.0) and 0 < logged["ps_grpo/consistency"] < 1


def test_difficulty_slices_takes_half_of_a_batch_from_its_slice(carousel: Run) -> None:
    d, _, logged = seen(carousel, "difficulty_slices")
    table = pyarrow.parquet.read_table(carousel.folder / "data" / "train.parquet").to_pylist()
    level = [row["extra_info"]["level"] for row in table]
    assert d.rollouts.groups.size.tolist() == [SAMPLES] * PROMPTS and bool(d.trained.all())
    check_slices([d.rollouts.prompt_index[::SAMPLES].tolist()], level, heads=3, head=2, share=0.5)
    assert logged["difficulty_slices/own"] == 0.5 and logged["difficulty_slices/spread"] > 1


def test_swarm_sapo_trains_groups_of_another_node_as_they_were_sent(carousel: Run) -> None:
    """Its questions and columns, too: the reward function here reads the answer that was sent."""
    d, tokens, logged = seen(carousel, "swarm_sapo")
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
