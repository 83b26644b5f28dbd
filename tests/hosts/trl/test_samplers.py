"""Samplers, budgets and curricula in TRL's real trainer: which rows were generated for whom in which round, which left,
and what became of their advantages. What a method decides is computed anew, in plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import history, make, stub_sampling, weights
from messages import raises
from methods.ps_grpo_loops import COLUMN, check_ps_grpo
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
    hardest,
    rewards_of,
)
from test_generation import Spy, run
from transformers import TrainerCallback

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.lab.viewer.folder import TraceFolder

pytestmark = pytest.mark.host

DATA = build_dataset(200, seed=1)
STAGES = {"sizes": [1.0, 6], "batches": [3], "rollouts": [8, 16], "max_tokens": [14, 6]}


def right(completion_ids: Any, level: Any, **kwargs: Any) -> list[float]:
    """1 in about one of `level` completions: always on the first level, seldom on the fifth."""
    return [float((sum(c) + len(c)) % k == 0) for c, k in zip(completion_ids, level, strict=True)]


def sampled(tmp_path: Any, names: list[str], **options: Any) -> tuple[Any, Any, list[Any]]:
    """The trainer, the spy and what was decided in each batch."""
    t, spy = run(tmp_path, names, reward=options.pop("reward", right), **options)
    return t, spy, [batch.driver.decision for batch in spy.batches_of_driver]


def with_sets(rows: int, size: int) -> tuple[Any, list[str]]:
    """A dataset whose rows belong to sets of so many, scattered over it; and the set of each row."""
    sets = [f"set {i % (rows // size)}" for i in range(rows)]
    return build_dataset(rows, seed=1).add_column(COLUMN, sets), sets


# ---- before the model is loaded


@pytest.mark.parametrize(
    ("names", "params", "message"),
    [
        (["dars", "v0"], {}, "`dars`.*`v0`"),
        (["xrpo", "dars"], {}, "`xrpo_allocate`.*`xrpo`.*`-xrpo_allocate`"),
        (["brorl", "dars"], {"brorl": {"ramp": [[0, 16]]}}, "`brorl`.*`dars`"),
        (["dars"], {"dars": {"n_first": 9}}, "`n_first`.*9.*8"),
        (["drive", "gdro_rollout"], {"drive": STAGES}, "`drive`.*`gdro_rollout`"),
        (["drive"], {"drive": {**STAGES, "sizes": [6, 8]}}, "a set is part of the one before"),
        (["drive"], {"drive": {**STAGES, "max_tokens": [14, 99]}}, "14"),
        (["linear_ts"], {"linear_ts": {"column": "domain"}}, "`domain`"),
        (["difficulty_slices"], {"difficulty_slices": {"column": "wins"}}, "`wins`"),
        (["difficulty_slices"], {"difficulty_slices": {"column": "task"}}, "`task`"),
        (["difficulty_slices"], {"difficulty_slices": {"heads": 201}}, "`heads`.*201.*200"),
        (["difficulty_slices", "vade"], {}, "`difficulty_slices`.*`vade`"),
        (["mode_switching"], {}, "`rl-plugins mode-pairs`"),
    ],
)
def test_refused(tmp_path: Any, names: list[str], params: dict[str, Any], message: str) -> None:
    with raises(ConfigError, match=message):
        make(tmp_path, names, method_params=params)


@pytest.mark.parametrize(
    "name",
    [
        *("linear_ts", "vade", "gdro_prompt", "gdro_rollout", "drive", "best_perm", "xrpo_seeds", "difficulty_slices"),
        *("dots", "mssr_baseline", "mssr_prompts", "ps_grpo", "v0_5"),
    ],
)
def test_what_belongs_to_dataset_rows_is_refused_for_a_stream(tmp_path: Any, name: str) -> None:
    params = {
        "linear_ts": {"column": "task"},
        "best_perm": {"templates": ["{prompt}"]},
        "dots": {"embeddings": "no such file"},
    }.get(name, {})
    with raises(ConfigError, match=f"`{name}` needs a stable dataset row .*: the dataset is a stream"):
        make(tmp_path, [name], method_params={name: params}, dataset=DATA.to_iterable_dataset())


# ---- what was generated and trained


def test_dars_gives_hard_prompts_a_second_helping(tmp_path: Any) -> None:
    t, _, decisions = sampled(tmp_path, ["dars"], max_steps=3, method_params={"dars": {"n_first": 4, "n_max": 12}})
    helped = 0
    for number, d in enumerate(decisions):
        asked, given = check_dars(d, 4, 12)
        helped += given
        torch.testing.assert_close(d.row_advantages[d.trained], centered(d))
        assert history(t, "dars/asked")[number] == asked
        assert history(t, "rl_plugins/rows_generated")[number] == 32 + given
    assert helped > 20 and t.args.scale_rewards == "none"


def test_dynamic_sampling_fills_batches_with_groups_that_have_signal(tmp_path: Any) -> None:
    t, _, decisions = sampled(tmp_path, ["dynamic_sampling"], max_steps=2, trace=True)
    trace = TraceFolder(tmp_path)
    for number, d in enumerate(decisions):
        reasons = trace.why_chosen(number)
        refills = {group for group in reasons if any(why.startswith("dynamic_sampling") for why in reasons[group])}
        assert refills and refills == {*d.rollouts.group.tolist()} - set(range(8)), "all groups of later rounds"
        untold = [
            r["row"]
            for r in trace.rollouts(number)
            if r["trained"] == any("dynamic_sampling" in n["method"] for n in r["notes"])
        ]
        assert not untold
        assert history(t, "dynamic_sampling/rollouts_per_row")[number] == pytest.approx(check_dynamic_sampling(d))
        torch.testing.assert_close(d.row_advantages[d.trained], centered(d, deviation(1e-4)))
    assert history(t, "dynamic_sampling/filled") == [1.0, 1.0]
    assert history(t, "rl_plugins/rows_trained") == [64, 64]


def test_brorl_has_fewer_prompts_with_more_rollouts_and_a_rate_for_its_rows(tmp_path: Any) -> None:
    params = {"ramp": [[1, 16]], "base_rows": 16}
    t, _, (first, second) = sampled(tmp_path, ["brorl"], max_steps=2, method_params={"brorl": params})
    assert first.rollouts.groups.size.tolist() == [8] * 8 and second.rollouts.groups.size.tolist() == [16] * 4
    for number, d in enumerate((first, second)):
        check_brorl(d)
        rows = int(d.trained.sum())
        assert history(t, "brorl/lr_scale")[number] == pytest.approx(math.sqrt(rows / 16))
    assert not bool(first.trained.all()), "groups of one reward leave"
    assert history(t, "learning_rate") == [t.args.learning_rate] * 2, "the schedule does not see it"
    one, plain = (
        sampled(tmp_path, ["brorl"], max_steps=1, max_grad_norm=0.0, method_params={"brorl": p})
        for p in ({"base_rows": 16}, {})
    )
    begin = weights(run(tmp_path, [], max_steps=1, learning_rate=0.0)[0])
    factor = math.sqrt(int(one[2][0].trained.sum()) / 16)
    moved = [weights(x[0]) - begin for x in (one, plain)]
    assert (moved[0] - factor * moved[1]).norm() / moved[0].norm() < 1e-3 and factor > 1.2


def test_linear_ts_takes_a_batch_from_one_domain_and_learns_which(tmp_path: Any) -> None:
    t, _, decisions = sampled(tmp_path, ["linear_ts"], max_steps=4, method_params={"linear_ts": {"column": "task"}})
    arms = sorted(set(DATA["task"]))
    precision, mean = [0.1] * len(arms), [0.0] * len(arms)
    for d in decisions:
        prompts = sorted(set(d.rollouts.prompt_index.tolist()))
        (arm,) = {DATA[i]["task"] for i in prompts}
        rewards = rewards_of(d)
        informative = sum(min(xs) < max(xs) for xs in rewards.values()) / len(rewards)
        k = arms.index(arm)
        mean[k] = (precision[k] * mean[k] + informative / 0.5) / (precision[k] + 2)
        precision[k] += 2
    state = t.methods.methods[0].state
    assert state["precision"].flatten().tolist() == pytest.approx(precision)
    assert state["mean"].flatten().tolist() == pytest.approx(mean) and max(mean) > 0.3
    assert history(t, "linear_ts/largest_share") == [1.0] * 4


def logprobs(t: Any, out: Any) -> torch.Tensor:
    """(rows,) mean log-prob of the tokens of each trained row, by the present weights."""
    ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
    mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
    with torch.no_grad():
        lp = t._get_per_token_logps_and_entropies(t.model.eval(), ids, mask, out["completion_ids"].size(1))[0]
    return (lp * out["completion_mask"]).double().sum(1) / out["completion_mask"].sum(1)


def test_xrpo_hands_out_phases_seeds_what_failed_and_lifts_what_is_rare(tmp_path: Any) -> None:
    t, spy, decisions = sampled(
        tmp_path, ["xrpo"], max_steps=3, learning_rate=0.0, method_params={"xrpo_allocate": {"exploration": 0.1}}
    )
    solved, found = set[str](), 0
    for number, (d, out) in enumerate(zip(decisions, spy.batches, strict=True)):
        r, later = d.rollouts, check_xrpo_phases(d, 0.1)
        assert history(t, "xrpo_allocate/most")[number] == int(r.groups.size.max())
        # seeds: examples of earlier batches, for prompts without a success so far, in later rounds
        words = t.processing_class.batch_decode([p[m > 0] for p, m in zip(*both(out, "prompt"), strict=True)])
        may = {(g, k) for g, k, failed_so_far in later if failed_so_far}
        place = list(zip(r.group.tolist(), r.rollout.tolist(), strict=True))
        seeded = [p for p, text in zip(place, words, strict=True) if "similar problems" in text]
        assert set(seeded) <= may and len(seeded) == history(t, "xrpo_seeds/seeded")[number]
        assert not seeded or number > 0, "answers of earlier batches"
        found += len(seeded)
        for (g, k), text in zip(place, words, strict=True):
            if (g, k) in seeded:
                own = DATA[int(r.prompt_index[place.index((g, k))])]["prompt"][0]["content"]
                assert own in text.rpartition("way.")[2] and any(s in text.partition("way.")[0] for s in solved)
        solved |= {DATA[i]["prompt"][0]["content"] for i in r.prompt_index[r.reward > 0.5].tolist()}
        # novelty: after the host's advantages, on what is right and rarer than its group
        mean, std = (r.groups.rows(f(r.reward)) for f in (r.groups.mean, r.groups.std))
        base = (r.reward - mean) / (std + 1e-4)
        rare = logprobs(t, out)
        eta = torch.exp(rare - r.groups.rows(r.groups.mean(rare)))
        bonus = torch.minimum((2.5 * (1 - eta)).clamp(min=0), 0.5 * base)
        expected = base + torch.where(base > 0, bonus, 0.0)
        torch.testing.assert_close(d.row_advantages, expected, rtol=1e-4, atol=1e-4)
        assert float((d.row_advantages - base).max()) > 0.01
        torch.testing.assert_close(out["advantages"].double(), expected, rtol=1e-4, atol=1e-4)
    assert found > 0


def test_best_perm_tries_hints_in_the_order_of_the_oracle(tmp_path: Any) -> None:
    data = DATA.map(lambda row: {"hints": ["sort", row["answer"]]})
    params = {"hints_column": "hints", "hint_template": "{prompt} {hint}", "n_first": 4, "n_hint": 2, "max_hints": 2}
    params["values"] = [1.0, 1.0]
    options = {"dataset": data, "method_params": {"best_perm": params}}
    t, spy, decisions = sampled(tmp_path, ["best_perm"], max_steps=5, **options)
    books = Cascade()
    for d, out in zip(decisions, spy.batches, strict=True):
        words = t.processing_class.batch_decode([p[m > 0] for p, m in zip(*both(out, "prompt"), strict=True)])
        found = zip(d.rollouts.prompt_index.tolist(), books.check(d), words, strict=False)  # fillers are the last ones
        for i, k, text in found:
            problem = data[i]["prompt"][0]["content"]
            asked = problem if k is None else f"{problem} {data[i]['hints'][k]}"
            assert text.strip().removeprefix("<user>").startswith(asked)
    state = t.methods.methods[0].state
    assert (state["accepted"], state["rejected"]) == (books.accepted, books.rejected)
    assert state["cascades"] == books.cascades > 0 and len(books.orders) > 1
    assert sum(books.accepted) > 0 and sum(books.rejected) > 0


TWO_BINS = {"edges": [0.55], "hysteresis": 0.0}


def test_gdro_prompt_weighs_bins_by_what_was_known_before(tmp_path: Any) -> None:
    options = {"dataset": DATA.select(range(16)), "method_params": {"gdro_prompt": TWO_BINS}}
    _, spy, decisions = sampled(tmp_path, ["gdro_prompt"], max_steps=6, **options)
    books = Weighing()
    for d, out in zip(decisions, spy.batches, strict=True):
        books.check(d, centered(d, deviation(1e-4)))
        assert torch.allclose(out["advantages"].double(), d.row_advantages, atol=1e-5)
    assert books.spread[:2] == [0.0, 0.0] and max(books.spread) > 0.1, "no history before the second visit"


def test_gdro_rollout_moves_rollouts_between_bins(tmp_path: Any) -> None:
    params = {**TWO_BINS, "arm_sign": "paper", "baseline": "none"}
    options = {"dataset": DATA.select(range(16)), "method_params": {"gdro_rollout": params}}
    t, _, decisions = sampled(tmp_path, ["gdro_rollout"], max_steps=6, **options)
    books = Arms()
    for d in decisions:
        books.check(d)
        torch.testing.assert_close(d.row_advantages, centered(d, deviation(1e-4)))
    assert len(books.sizes) > 2 and max(history(t, "gdro_rollout/most")) > 8
    assert history(t, "gdro_rollout/shadow_price")[-1] == pytest.approx(books.price)


class Killed(Exception):
    """In the middle of a phase."""


class Kill(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise Killed


def test_drive_keeps_the_hardest_and_goes_on_inside_a_phase(tmp_path: Any) -> None:
    """Batches 0 to 2 are the host's; then six prompts, in groups of 16 rollouts of at most 6 tokens. A run that ends in
    batch 5 goes on from the checkpoint of batch 4 as if it had not."""
    options = {"dataset": DATA.select(range(16)), "method_params": {"drive": STAGES}, "max_steps": 7}
    t, _, whole = sampled(tmp_path, ["drive"], **options)
    kept = hardest(whole[:3], 6)
    assert [d.rollouts.groups.size.tolist() for d in whole] == [[8] * 8] * 3 + [[16] * 4] * 4
    assert {i for d in whole[:3] for i in d.rollouts.prompt_index.tolist()} == set(range(16))
    later = [i for d in whole[3:] for i in d.rollouts.prompt_index.tolist()[::16]]
    assert set(later) == set(kept) == set(later[:6]), "all of them before one comes again"
    assert all(int(d.rollouts.length.max()) <= 6 for d in whole[3:]) and int(whole[0].rollouts.length.max()) > 6
    assert history(t, "drive/phase") == [0.0] * 3 + [1.0] * 4
    saved = {**options, "save_strategy": "steps", "save_steps": 4, "output_dir": str(tmp_path / "killed")}
    with pytest.raises(Killed):
        sampled(tmp_path, ["drive"], callbacks=[Kill()], **saved)
    again = make(tmp_path, ["drive"], reward=right, **saved)
    spy = Spy(again)
    try:
        with stub_sampling():
            again.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-4"))
    finally:
        spy.undo()
    resumed = [batch.driver.decision for batch in spy.batches_of_driver]
    for one, other in zip(whole[4:], resumed, strict=True):
        assert torch.equal(one.rollouts.prompt_index, other.rollouts.prompt_index)
        assert torch.equal(one.row_advantages, other.row_advantages)
    assert torch.equal(weights(t), weights(again))


def both(out: Any, name: str) -> tuple[Any, Any]:
    return out[f"{name}_ids"], out[f"{name}_mask"]


def test_ps_grpo_keeps_sets_whole_and_compares_wordings(tmp_path: Any) -> None:
    """An epoch of five batches of two sets of four, then the next one."""
    data, sets = with_sets(40, 4)
    params = {"ps_grpo": {"kappa": 3, "s": 8, "gamma": 0.5}}  # the whole sample
    t, _, decisions = sampled(tmp_path, ["ps_grpo"], dataset=data, max_steps=6, method_params=params)
    seen = [check_ps_grpo(d, sets, gamma=0.5) for d in decisions]
    epoch = [name for names in seen[:5] for name in names]
    assert sorted(epoch) == sorted(set(sets)) and len(seen[5]) == 2, "every set once"
    assert epoch != list(dict.fromkeys(sets))
    for number, d in enumerate(decisions):
        assert bool(d.trained.all()) and d.rollouts.groups.size.tolist() == [8] * 8
        torch.testing.assert_close(d.row_advantages, centered(d, deviation(1e-4)))
        own = (d.rollouts.rewards * d.rollouts.reward_weights).sum(1)
        assert history(t, "ps_grpo/accuracy")[number] == pytest.approx(float(own.mean()))
        similar = float((d.rollouts.reward - 0.5 * own).mean())
        assert history(t, "ps_grpo/consistency")[number] == pytest.approx(similar) and 0 < similar < 1


def test_ps_grpo_leaves_places_empty_where_no_set_fits(tmp_path: Any) -> None:
    data, sets = with_sets(30, 3)
    t, _, decisions = sampled(tmp_path, ["ps_grpo"], dataset=data, max_steps=2, method_params={"ps_grpo": {"s": 8}})
    assert all(len(check_ps_grpo(d, sets)) == 2 for d in decisions)
    assert history(t, "rl_plugins/rows_trained") == [48, 48] and history(t, "ps_grpo/empty_places") == [2, 2]


@pytest.mark.parametrize(
    ("data", "params", "message"),
    [
        (DATA, {}, "no column `paraphrase_set_id`"),
        (with_sets(40, 10)[0], {}, "`ps_grpo`.*10.*8"),
        (with_sets(40, 4)[0], {"answer_column": "gold"}, "`gold`"),
        (with_sets(40, 4)[0].to_iterable_dataset(), {}, "`ps_grpo`"),
    ],
)
def test_ps_grpo_is_refused_before_the_run(tmp_path: Any, data: Any, params: dict[str, Any], message: str) -> None:
    with raises(ConfigError, match=message):
        make(tmp_path, ["ps_grpo"], method_params={"ps_grpo": params}, dataset=data)
