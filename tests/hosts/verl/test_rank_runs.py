"""verl's real V1 trainer on two FSDP2 ranks of the CPU, with two optimizer steps per batch and two rollout replicas.

One run takes another stack of methods every step, as in `test_runs.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import reference
from runs import COMMON, PROMPTS, SAMPLES, Run, check_end, walked

from rl_plugins.lab.demo.verl_data import SOURCE

pytestmark = pytest.mark.host

# Methods whose loss or pool acts in a later batch or optimizer step; each comes twice, with its state.
TWICE = ["fission_grpo+echo_clip+watch", "aepo_clip+aepo_advantages+kl_cov+watch", "ppo_million", "epo"]
EPO = {"average": "host", "entropy_coeff": 0.1, "kl": 0.9, "kr": 1.1, "rho": 2.0, "phase": "none"}
ROUTED = ["routed"]  # a program, whose requests have the tag of their task
ROUTER = f"""
router_class: verl_routes.NotedBalancer
pools:
  - {{name: fast, servers: ["hf_cpu:0"], capacity: 40, prefill_rate: 20000, decode_rate: 300}}
  - {{name: slow, replicas: [1], capacity: 64, prefill_rate: 20000, decode_rate: 100}}
tags: {{{SOURCE}: [fast, slow]}}
"""
PLACES = ["mc_grpo", "half+per_token", "filter+corridor", "softmax", "minpro", "odd", "decoupled_ppo", "vcpo"]
ALL = [*PLACES, *2 * TWICE, *ROUTED]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two FSDP2 ranks, two optimizer steps per batch, means over rows, micro-batches by tokens and without padding, and
    a router for both rollout replicas, one of which is slow. The last batch ends it: a hook raises on one rank."""

    def overrides(folder: Path) -> list[str]:
        (folder / "router.yaml").write_text(ROUTER)
        return [
            *COMMON,
            f"actor_rollout_ref.rollout.router_config_path={folder / 'router.yaml'}",
            "+carousel_params.boom.where=rank1",
            "+rl_plugins.methods=[mc_grpo,routed]",
            *(f"+carousel_params.epo.{k}={v}" for k, v in EPO.items()),
            "+carousel_params.kl_cov.ratio=0.3",
            "+carousel_params.fission_grpo.role=user",
            "+carousel_params.fission_grpo.message='verl_programs:complaint'",
            "+carousel_params.fission_grpo.error_threshold=0.5",
            "data.max_prompt_length=64",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
            "actor_rollout_ref.model.use_remove_padding=True",
        ]

    folder = tmp_path_factory.mktemp("verl")
    options = {"RL_PLUGINS_TEST_DUMP": "1", "RL_PLUGINS_TEST_SLOW_REPLICA": "0.01"}
    return walked(folder, [*ALL, "boom"], overrides, stand_in="noop", ranks=2, **options)


@pytest.mark.parametrize("number", range(len(ALL)), ids=[f"{i + 1}-{names}" for i, names in enumerate(ALL)])
def test_a_setting_makes_its_step(ranks: Run, number: int) -> None:
    ranks.check(number)
    assert ranks.steps()[number]["names"] == ALL[number].split("+")


@pytest.mark.parametrize("name", [*PLACES, *ROUTED])
def test_gradients_on_two_ranks_with_two_steps(ranks: Run, name: str) -> None:
    """The second step of a batch is off-policy: its ratios are not 1. Rollouts of a program count as any other."""
    ranks.check(ALL.index(name))
    first, second = ranks.updates(0), ranks.updates(1)
    assert len(first) == len(second)
    steps = [(a, b) for a, b in zip(first, second, strict=True) if a["methods"] == name.split("+")]
    for mine, theirs in steps:
        norm, rows = reference([mine, theirs])
        assert mine["global_batch_size"] == theirs["global_batch_size"] == rows
        assert mine["grad_norm"] == pytest.approx(norm, rel=2e-4, abs=1e-7)
    assert len(steps) == 2 or name in ("half+per_token", "filter+corridor", "odd")


def test_the_learning_rate_follows_the_effective_sample_size(ranks: Run) -> None:
    """Below 1 where the first step of a batch moved the policy. Logged is the mean of the steps."""
    logged = ranks.metrics(PLACES.index("vcpo") + 1)
    assert 0.1 < logged["actor/vcpo/ess_ratio"] < 1 - 1e-3
    assert logged["actor/lr"] == pytest.approx(6e-4), "the schedule does not see it"
    weight = ranks.metrics(PLACES.index("decoupled_ppo") + 1)["actor/decoupled_ppo/weight_mean"]
    assert weight == pytest.approx(1, abs=1e-3), "this engine samples from the trained weights"


def test_fission_turns_errors_into_prompts(ranks: Run) -> None:
    before, after = len(PLACES), len(PLACES + TWICE)
    first, _ = torch.load(ranks.folder / f"watch{before}.pt", weights_only=False)
    assert ranks.metrics(before + 1)["fission_grpo/pool"] > 0 and bool((first.prompt_index >= 0).all())
    rollouts, _ = torch.load(ranks.folder / f"watch{after}.pt", weights_only=False)
    foreign = rollouts.prompt_index == -1
    assert ranks.metrics(after + 1)["fission_grpo/served"] > 0 and 0 < int(foreign.sum()) < 64
    assert not set(rollouts.group[foreign].tolist()) & set(rollouts.group[~foreign].tolist()), "groups of their own"


@pytest.mark.parametrize(
    ("place", "name"),
    [*zip(TWICE, ("echo_clip", "aepo_clip", "ppo_million", "epo"), strict=True), (TWICE[1], "actor/kl_cov")],
)
def test_clips_act_in_the_second_update(ranks: Run, place: str, name: str) -> None:
    logged = ranks.metrics(len(PLACES) + 1 + TWICE.index(place))
    updates = [u for u in ranks.updates() if u["methods"] == place.split("+")]
    assert len(updates) == 4 and all(u["grad_norm"] > 0 for u in updates)
    assert any(f"{name}/" in key for key in logged), sorted(logged)
    assert "kl_cov" not in name or logged["actor/kl_cov/penalty"] > 0


def test_epo_keeps_the_entropy_of_the_batch_before(ranks: Run) -> None:
    """No corridor at the first visit; at the second one around the mean entropy of the first. Both ranks have it."""
    parts = [[u for u in ranks.updates(rank) if u["methods"] == ["epo"]] for rank in (0, 1)]
    visits = [len(PLACES) + 1 + TWICE.index("epo") + k * len(TWICE) for k in (0, 1)]
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
    first, second = (len(PLACES) + 1 + TWICE.index("ppo_million") + k * len(TWICE) for k in (0, 1))
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
    assert len(tagged) == 128 and len(tagged) + len(plain) == len(routed) and len(plain) >= 64 * len(PLACES)
    got = {s: sum(e["server"] == s for e in plain) for s in servers}
    assert got[servers[0]] > 1.2 * got[servers[1]] > 0, got
    assert len(released) == len(routed)
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


def test_a_hook_that_raises_on_one_rank_ends_the_run(ranks: Run) -> None:
    check_end(ranks, "boom", "`regularize`: ValueError: the loss hook went wrong")
