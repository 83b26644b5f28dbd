"""APRIL (arXiv 2509.18521): the authors' schedules, conservation, and what stale tokens do to the update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Carried, Queue, Tokens
from rl_plugins.methods.april import CORRECTION, SEPARATE_WARMUP, STRATEGY, THRESHOLD, WARMUP, April
from rl_plugins.runtime.carry_over import Group, admit, finished
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack
from rl_plugins.testing.generation import SimulatedBatch, Simulation, summary

GOLDEN = Golden("april")


def april(**params: Any) -> April:
    return April(build_params(April.Params, params, "april"))


def lengths_of(seed: int, sigma: float = 1.0, size: int = 3, mean: float = 3.0) -> Any:
    """Log-normal lengths that differ between attempts at the same prompt."""
    return lambda prompt, drawn: (
        1 + np.random.default_rng([seed, prompt, drawn]).lognormal(mean, sigma, size).astype(int)
    )


def simulate(batches: int = 6, params: dict[str, Any] | None = None, **changes: Any) -> list[SimulatedBatch]:
    size = changes.get("group_size", 3)
    values: dict[str, Any] = dict(lengths=lengths_of(0, size=size), groups=4, group_size=3, max_tokens=60) | changes
    run = Simulation(april(**(params or {})), values.pop("lengths"), **values)
    return [run.batch() for _ in range(batches)]


# ---- the authors' schedules


REWARD = "1.0 if (7*len(response)+sample_index)%3==0 else 0.0, sample_index counts members in draw order"
SPEED = "1 token per tick per request, unlimited concurrency"


class Chosen(Simulation):
    """Of groups that complete in the same tick those come first that the authors' code chose in that batch."""

    chosen: Sequence[Sequence[int]]

    def _decode(self, groups: Sequence[Group]) -> tuple[list[Group], list[int], float, int]:
        after, order, time, decoded = super()._decode(groups)
        chosen = self.chosen[self.stack.batch]

        def place(i: int) -> tuple[int, bool]:
            had = [len(t) for t in groups[i].rollouts] or [0] * groups[i].size
            ticks = max(len(t) - n for t, n in zip(after[i].rollouts, had, strict=True))
            return ticks, groups[i].row.prompt_index not in chosen

        return after, sorted(order, key=place), time, decoded


def of_case(case: Case, lose_surplus: bool) -> list[SimulatedBatch]:
    p = case.params
    table = case.inputs["full_lengths_[prompt][member]"]
    given: dict[str, Any] = {"over_sampling": p["over_sampling_batch_size_Nprime"] / p["rollout_batch_size_N"]}
    if not p["partial_rollout"]:
        given |= {"max_staleness": 0, "stale": "drop"}
    run = (Simulation if case["tie_free"] else Chosen)(
        April(case.build(April, **given)),
        lambda prompt, drawn: table[prompt],
        groups=p["rollout_batch_size_N"],
        group_size=p["group_size"],
        max_tokens=p["max_response_len"],
        lose_surplus=lose_surplus,
    )
    run.chosen = [[g["prompt"] for g in step["batch_groups"]] for step in case.expected["steps"]]
    return [run.batch() for _ in range(p["steps"])]


@GOLDEN.kind("full_lengths_[prompt][member]")
def check_schedule(case: Case) -> None:
    """The authors lose groups that complete together. Where none do (`tie_free`), not to lose them is the same."""
    case.params.must_be("drop_zero_std_groups", False)
    case.params.must_be("reward_rule", REWARD)
    case.params.must_be("decode_speed", SPEED)
    for lose_surplus in (True, False) if case["tie_free"] else (True,):
        check_batches(case, of_case(case, lose_surplus))


def check_batches(case: Case, batches: list[SimulatedBatch]) -> None:
    p = case.params
    drawn = trained = 0
    before: SimulatedBatch | None = None
    status = {"eos": "completed", "length": "truncated", "abort": "aborted"}
    for step, (got, wanted) in enumerate(zip(batches, case.expected["steps"], strict=True)):
        assert step == wanted["step"]
        assert (got.time, got.decoded) == (wanted["virtual_ticks"], wanted["tokens_generated"])
        groups = sorted(got.trained, key=lambda g: g.row.prompt_index)
        size, drawn, trained = p["group_size"], drawn + got.fresh, trained + len(groups)
        assert [g.row.prompt_index for g in groups] == [g["prompt"] for g in wanted["batch_groups"]]
        for g, w in zip(groups, wanted["batch_groups"], strict=True):
            lengths = [len(t) for t in g.rollouts]
            assert lengths == w["response_lengths"]
            assert [status[t.finish] for t in g.rollouts] == w["status"]
            reward = [float((7 * n + g.row.prompt_index * size + k) % 3 == 0) for k, n in enumerate(lengths)]
            assert reward == w["rewards"]
            assert [g.drawn if g.drawn < step else None] * size == w["start_step"]
        waiting = got.waiting if p["partial_rollout"] else ()
        buffer = [
            {
                "prompt": g.row.prompt_index,
                "response_lengths": [len(t) for t in g.rollouts],
                "status": [status[t.finish] for t in g.rollouts],
            }
            for g in sorted(waiting, key=lambda g: g.row.prompt_index)
        ]
        assert buffer == wanted["buffer_after"]
        assert drawn == wanted["prompts_drawn_so_far"]
        assert sum(len(t) > 0 for g in waiting for t in g.rollouts) == wanted["partial_samples"]
        assert drawn - trained - len(waiting) == wanted["groups_lost"]
        goes_on = before.waiting if before and p["partial_rollout"] else ()
        last_segment = sum(t.versions.count(t.versions[-1]) for g in goes_on for t in g.rollouts if not finished(t))
        assert last_segment == wanted["official_total_off_policy_tokens"]
        before = got


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def tied(chosen: Sequence[int], lengths: Sequence[int], tie_free: bool) -> Case:
    """A case of one batch with 4 groups of one rollout, of which 2 are trained and the others are lost."""
    params = dict(GOLDEN.cases[0].values["params"])
    params |= {"rollout_batch_size_N": 2, "over_sampling_batch_size_Nprime": 4, "group_size": 1, "steps": 1}
    step = {
        "step": 0,
        "virtual_ticks": max(lengths),
        "tokens_generated": sum(lengths),
        "batch_groups": [
            {
                "prompt": i,
                "response_lengths": [lengths[i]],
                "status": ["completed"],
                "rewards": [float((7 * lengths[i] + i) % 3 == 0)],
                "start_step": [None],
            }
            for i in chosen
        ],
        "buffer_after": [],
        "prompts_drawn_so_far": 4,
        "partial_samples": 0,
        "official_total_off_policy_tokens": 0,
        "groups_lost": 2,
    }
    inputs = {"full_lengths_[prompt][member]": [[n] for n in lengths]}
    values = {"name": "tied", "inputs": inputs, "params": params | {"partial_rollout": True}, "tie_free": tie_free}
    return Case("april.json", values | {"expected": {"steps": [step]}})


def test_a_case_with_ties_says_which_groups_are_trained() -> None:
    GOLDEN.check(tied([0, 1], [5, 5, 5, 5], tie_free=False))
    GOLDEN.check(tied([1, 3], [5, 5, 5, 5], tie_free=False))
    GOLDEN.check(tied([0, 3], [3, 5, 5, 5], tie_free=False))
    with pytest.raises(AssertionError):
        GOLDEN.check(tied([1, 3], [3, 5, 5, 5], tie_free=False))  # the first group was complete before
    with pytest.raises(AssertionError):
        GOLDEN.check(tied([1, 3], [5, 5, 5, 5], tie_free=True))


def test_groups_that_complete_together_wait_and_the_authors_lose_them() -> None:
    cut = dict(lengths=lambda prompt, drawn: [99] * 3, max_tokens=20)
    right, official = simulate(5, **cut), simulate(5, **cut, lose_surplus=True)
    assert [len(b.waiting) for b in right] == [4] * 5 and sum(b.dropped for b in right) == 0
    assert [b.dropped for b in official] == [4] * 5 and all(not b.waiting for b in official)
    assert [b.fresh for b in right] == [8, 4, 4, 4, 4] and [b.fresh for b in official] == [8] * 5
    assert [b.time for b in right] == [20, 0, 20, 0, 20]  # those that wait complete are a batch by themselves
    assert official[0].given_up == 4 * 3 * 20 and summary(official)["wasted"] == 0.5


# ---- properties


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_group_is_trained_once_waits_or_was_dropped(data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    limit, dataset = data.draw(st.integers(1, 40)), data.draw(st.none() | st.just(9 * groups))
    params: dict[str, Any] = {"over_sampling": data.draw(st.sampled_from([1.0, 1.15, 1.5, 2.0, 3.0]))}
    staleness = data.draw(st.none() | st.integers(0, 3))
    if staleness is not None:
        params |= {"max_staleness": staleness, "stale": data.draw(st.sampled_from(["restart", "drop"]))}
    longest = data.draw(st.sampled_from([1, 5, 80]))  # short ones end together all the time
    table = data.draw(st.lists(st.lists(st.integers(1, longest), min_size=size, max_size=size), min_size=1, max_size=9))
    run = Simulation(
        april(**params),
        lambda prompt, drawn: table[(prompt + drawn) % len(table)],
        groups=groups,
        group_size=size,
        max_tokens=limit,
        slots=data.draw(st.none() | st.integers(1, 12)),
        dataset_size=dataset,
    )
    total = max(groups, math.floor(params["over_sampling"] * groups + 1e-6))
    fresh: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    made = given_up = done = 0
    waiting: tuple[Any, ...] = ()
    for step in range(6):
        before = {g.row.prompt_index: g for g in waiting}
        got = run.batch()
        assert got.fresh + got.resumed + got.restarted == total
        assert len(got.trained) == groups and len(got.waiting) == total - groups
        now = [g.row.prompt_index for g in (*got.trained, *got.waiting)]
        assert len(set(now)) == len(now) == total  # no prompt twice, no group in two places
        dropped = len(set(before) - set(now))
        assert dropped == got.dropped
        for g in (*got.trained, *got.waiting):
            natural = table[(g.row.prompt_index + g.drawn) % len(table)]
            assert len(g.rollouts) == size and len({g.row.prompt_index}) == 1
            old = before.get(g.row.prompt_index)
            goes_on = old is not None and g.drawn == old.drawn < step
            for k, t in enumerate(g.rollouts):
                assert len(t.tokens) == len(t.logprobs) == len(t.versions) == len(t.kinds) <= limit
                if goes_on:
                    was = old.rollouts[k]
                    assert (t.tokens, t.logprobs, t.versions) == tuple(
                        a[: len(was)] + b[len(was) :]
                        for a, b in zip(
                            (was.tokens, was.logprobs, was.versions), (t.tokens, t.logprobs, t.versions), strict=True
                        )
                    )
                    assert t == was if finished(was) else set(t.versions[len(was) :]) <= {step}
                else:
                    assert g.drawn == step and set(t.versions) <= {step}
                assert t.tokens == tuple((v << 32) + i for i, v in enumerate(t.versions))
                if finished(t):
                    assert len(t) == min(natural[k], limit)
                    assert t.finish == ("eos" if natural[k] <= limit else "length")
            fresh[g.row.prompt_index] += g.drawn == step and g.row.prompt_index not in before
        for g in got.trained:
            assert g.complete
            trained[g.row.prompt_index] += 1
            if staleness is not None:
                assert all(step - v <= staleness for t in g.rollouts for v in t.versions)
        if staleness is None:
            assert got.dropped == got.restarted == got.given_up == 0
        done += tokens_of(got.trained)
        made, given_up, waiting = made + got.decoded, given_up + got.given_up, got.waiting
        for p in before:
            fresh[p] -= p not in now  # dropped
    for g in waiting:
        trained[g.row.prompt_index] += 1
    assert trained == +fresh
    assert made == done + given_up + tokens_of(waiting)


def tokens_of(groups: Any) -> int:
    return sum(len(t) for g in groups for t in g.rollouts)


def test_without_over_sampling_batches_are_the_hosts_own() -> None:
    host, mine = MethodStack([]), MethodStack([april(over_sampling=1)])
    order = np.random.default_rng(3).permutation(40).tolist()
    for step in range(10):
        proposal = order[4 * step : 4 * step + 4]
        wanted = first_plan(host, proposal, 3, 12, 40).rows
        got = admit(mine, proposal, 4, 3, 40, None)
        assert tuple(g.row for g in got) == wanted and not any(g.rollouts for g in got)
        assert mine.carried == [] and mine.extra_prompts == host.extra_prompts == 0
        assert (mine.draw, mine.batch) == (host.draw, host.batch)
        for stack in (host, mine):
            stack.batch, stack.draw = stack.batch + 1, 0
    for b in (batches := simulate(5, {"over_sampling": 1})):
        assert not b.waiting and b.resumed == b.read == 0
        assert b.time == max(len(t) for g in b.trained for t in g.rollouts)
    assert summary(batches)["stale"] == 0


def test_lengths_that_are_alike_carry_nothing_and_take_no_longer() -> None:
    alike = dict(lengths=lambda prompt, drawn: [7, 7, 7])
    plain, over = summary(simulate(9, {"over_sampling": 1}, **alike)), summary(simulate(9, **alike))
    assert over["oldest"] <= 1 and over["wasted"] == 0
    assert over["time"] <= plain["time"] and plain["time"] == 7


def test_long_tails_are_faster_and_nothing_is_wasted() -> None:
    tail = dict(groups=16, group_size=4, max_tokens=400, lengths=lengths_of(1, 1.2, 4, 3.0))
    plain, over = (summary(simulate(30, {"over_sampling": n}, **tail), 8) for n in (1, 2))
    assert over["throughput"] > 2 * plain["throughput"]
    assert over["length"] == pytest.approx(plain["length"], rel=0.15)  # no bias towards short rollouts
    assert over["wasted"] == 0 and over["stale"] > 0.3 and over["waiting"] == 1
    ages = [over[k] for k in over if k.startswith("age_")]
    assert sum(ages) == pytest.approx(1) and 1 - ages[0] == pytest.approx(over["stale"])
    discard = summary(simulate(30, {"max_staleness": 0, "stale": "drop"}, **tail), 8)
    assert discard["length"] < 0.8 * plain["length"] and discard["wasted"] > 0.3 and discard["stale"] == 0


def test_groups_of_one_and_rollouts_that_all_reach_the_limit() -> None:
    one = simulate(8, group_size=1, lengths=lengths_of(5, 1.5, 1))
    assert all(len(g.rollouts) == 1 for b in one for g in b.trained)
    assert any(g.drawn < n for n, b in enumerate(one) for g in b.trained)
    cut = simulate(6, lengths=lambda prompt, drawn: [500, 500, 500], max_tokens=10)
    assert {(t.finish, len(t)) for b in cut for g in b.trained for t in g.rollouts} == {("length", 10)}


def test_slots_and_the_time_of_a_tick_count() -> None:
    alike = dict(lengths=lambda prompt, drawn: [6, 6, 6], batches=1)
    assert simulate(params={"over_sampling": 1}, slots=6, **alike)[0].time == 12  # two waves of 6 of 12 rollouts
    assert simulate(params={"over_sampling": 1}, token_time=lambda n: 1 + n, **alike)[0].time == 6 * 13
    free, paid = (simulate(5, prefill=p) for p in (0.0, 0.5))
    assert [b.time + 0.5 * b.read for b in free] == [b.time for b in paid] and sum(b.read for b in paid) > 0


@pytest.mark.parametrize("params", [{}, {"max_staleness": 1}, {"max_staleness": 1, "stale": "drop"}], ids=str)
def test_a_checkpoint_goes_on_with_the_same_batches(params: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = dict(groups=4, group_size=3, max_tokens=60, dataset_size=50)
    whole, first, rest = (Simulation(april(**params), lengths_of(2), **options) for _ in range(3))
    wanted = [whole.batch() for _ in range(8)]
    assert [first.batch() for _ in range(4)] == wanted[:4]
    save_state(tmp_path, first.stack.state_dict("data"))
    saved = load_state(tmp_path)
    assert saved is not None
    rest.stack.load_state_dict(saved, "data")
    assert [rest.batch() for _ in range(4)] == wanted[4:]
    assert any(b.resumed for b in wanted[4:])


# ---- admit


def waiting(*drawn: int, tokens: int = 3) -> tuple[Carried, ...]:
    return tuple(Carried(i, 2, d, (tokens, 0), (False,) * 2, (d if tokens else -1, -1)) for i, d in enumerate(drawn))


@pytest.mark.parametrize(
    ("params", "carried", "wanted"),
    [
        ({}, (), (8, (), (), ())),
        ({}, waiting(1, 2, 2), (5, (0, 1, 2), (), ())),
        ({}, waiting(*[1] * 9), (0, tuple(range(8)), (), ())),  # those beyond go on waiting
        ({"over_sampling": 1.2}, (), (4, (), (), ())),
        ({"over_sampling": 1.25}, waiting(4), (4, (0,), (), ())),
        ({"max_staleness": 3}, waiting(1, 2, 3), (5, (1, 2), (0,), ())),
        ({"max_staleness": 3, "stale": "drop"}, waiting(1, 2, 3), (6, (1, 2), (), (0,))),
        ({"max_staleness": 0, "stale": "drop"}, waiting(1, 4), (8, (), (), (0, 1))),
        ({"max_staleness": 0}, waiting(1, 4, tokens=0), (6, (0, 1), (), ())),  # without a token nothing is old
        ({"max_staleness": 3, "stale": "drop"}, waiting(*[1] * 9, 5), (7, (9,), (), tuple(range(9)))),
    ],
)
def test_who_goes_on(params: dict[str, Any], carried: tuple[Carried, ...], wanted: Any) -> None:
    stack = start_stack(april(**params))
    got = stack.one("admit", Queue(carried, 4, 2, 5))
    assert (got.fresh, got.resume, got.restart, got.drop) == wanted
    logged = combine([stack.metrics.take()])
    names = ("fresh", "resumed", "restarted", "dropped", "waiting")
    assert [logged[f"april/{n}"] for n in names] == [wanted[0], *map(len, wanted[1:]), len(carried)]


def test_whole_numbers_of_groups_are_not_lost_to_rounding() -> None:
    assert april(over_sampling=1.16).admit(Queue((), 25, 2, 0)).fresh == 29 > 1.16 * 25
    assert math.floor(april(over_sampling=1.15).host_options["verl"][WARMUP] * 20) == 3


# ---- what stale tokens do


def batch_of(seed: int = 0, **changes: Any) -> tuple[Any, Tokens]:
    """Four groups of two; versions 3..5, old tokens first, two rows whole of one version."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, 8).tolist()
    rollouts = make_rollouts(rng.normal(size=8), group_size=2, lengths=lengths)
    version = torch.cat([torch.from_numpy(np.sort(rng.integers(3, 6, n))) for n in lengths])
    version[-1] = 5
    tokens = make_tokens(rollouts, seed, version=version, **changes)
    oldest = torch.full((8,), 9).scatter_reduce(0, tokens.row, version, "amin")
    return rollouts.replace(version=oldest, current_version=5), tokens


def decided(params: dict[str, Any], seed: int = 0, **changes: Any) -> tuple[Any, Any, Tokens, dict[str, float]]:
    rollouts, tokens = batch_of(seed, **changes)
    stack = start_stack(april(**params))
    decision = one_step(stack, rollouts, tokens)
    return decision, rollouts, tokens, combine([stack.metrics.take()])


def test_none_changes_nothing_and_tells_how_stale_the_batch_is() -> None:
    decision, rollouts, tokens, logged = decided({})
    plain = one_step(MethodStack([]), rollouts, tokens)
    assert torch.equal(decision.advantages, plain.advantages) and bool(decision.keep_tokens.all()) and decision.uniform
    assert tokens.version is not None
    ages = [5 - int(v) for v in tokens.version]
    old = [a for a in ages if a]
    assert logged["april/stale_tokens"] == pytest.approx(len(old) / len(ages)) and 0 < len(old) < len(ages)
    assert logged["april/token_age"] == pytest.approx(sum(old) / len(old))
    assert logged["april/staleness"] == max(ages) and logged["april/stale_rows"] == float(
        (rollouts.version < 5).double().mean()
    )


def test_mask_takes_older_tokens_out() -> None:
    decision, rollouts, tokens, logged = decided({"correction": "mask"})
    plain = one_step(MethodStack([]), rollouts, tokens)
    assert tokens.version is not None
    new = tokens.version == 5
    assert torch.equal(decision.keep_tokens, new)
    assert torch.equal(decision.advantages, torch.where(new, plain.advantages, 0.0))  # old ones count in their group
    has_new = [bool(new[tokens.row == r].any()) for r in range(8)]
    assert decision.trained.tolist() == decision.stays.tolist() == has_new and not all(has_new)
    assert logged["april/masked"] == pytest.approx(1 - float(new.double().mean()))


def test_a_batch_that_waited_complete_is_stale_and_not_masked_away() -> None:
    """So is one of an asynchronous mode in which every row is a fixed number of published weights old."""
    rollouts = make_rollouts([1.0, 0.0, 0.0, 1.0], group_size=2, lengths=[3] * 4, current_version=4)
    rollouts = rollouts.replace(version=torch.tensor([1, 2, 2, 2]))
    stack = start_stack(april(correction="mask"))
    decision = one_step(stack, rollouts, make_tokens(rollouts))
    logged = combine([stack.metrics.take()])
    assert decision.keep_tokens.tolist() == [False] * 3 + [True] * 9
    assert decision.trained.tolist() == [False] + [True] * 3
    assert logged["april/staleness"] == 3 and logged["april/stale_rows"] == logged["april/stale_tokens"] == 1
    assert logged["april/masked"] == 0.25


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cap=st.floats(1, 5),
    scale=st.sampled_from([0.0, 0.1, 2.0, 800.0]),
    unknown=st.booleans(),
)
def test_token_tis_equals_the_loop(seed: int, cap: float, scale: float, unknown: bool) -> None:
    rollouts, tokens = batch_of(seed)
    rng = np.random.default_rng(seed)
    n = len(tokens)
    assert tokens.old_logprobs is not None and tokens.version is not None
    sampled = tokens.old_logprobs + torch.from_numpy(scale * rng.normal(size=n)).float()
    forced = torch.from_numpy(rng.random(n) < 0.1)
    if unknown:
        sampled[rng.random(n) < 0.3] = math.nan
    tokens = tokens.replace(rollout_logprobs=sampled, forced=forced)
    plain = one_step(MethodStack([]), rollouts, tokens).advantages.tolist()
    stack = start_stack(april(correction="token_tis", tis_cap=cap))
    decision, logged = one_step(stack, rollouts, tokens), combine([stack.metrics.take()])
    weights = []
    for old, new, put_in in zip(sampled.tolist(), tokens.old_logprobs.tolist(), forced.tolist(), strict=True):
        log_ratio = new - old
        weights.append(
            1.0 if put_in or math.isnan(log_ratio) else cap if log_ratio > math.log(cap) else math.exp(log_ratio)
        )
    wanted = [a * w for a, w in zip(plain, weights, strict=True)]
    assert decision.advantages.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert bool(decision.keep_tokens.all())
    assert logged["april/weight"] == pytest.approx(sum(weights) / n)
    assert logged["april/capped"] == pytest.approx(sum(w >= cap * (1 - 1e-9) for w in weights) / n)
    stale = [w for w, v in zip(weights, tokens.version.tolist(), strict=True) if v < 5]
    if stale:
        assert logged["april/weight_stale"] == pytest.approx(sum(stale) / len(stale))


def test_token_tis_is_one_where_the_policy_has_not_changed() -> None:
    rollouts, tokens = batch_of()
    tokens = tokens.replace(rollout_logprobs=tokens.old_logprobs)
    decision = one_step(start_stack(april(correction="token_tis")), rollouts, tokens)
    assert torch.equal(decision.advantages, one_step(MethodStack([]), rollouts, tokens).advantages)


def test_unscorable_rows_and_rows_without_tokens_do_no_harm() -> None:
    rollouts = make_rollouts([1.0, math.nan, 0.0, 1.0], group_size=2, lengths=[2, 2, 0, 3])
    for correction in ("none", "mask", "token_tis"):
        tokens = make_tokens(rollouts, version=torch.tensor([1, 2, 2, 2, 1, 1, 2]))
        decision = one_step(start_stack(april(correction=correction)), rollouts, tokens)
        assert bool(torch.isfinite(decision.advantages).all()) and decision.advantages[2:4].tolist() == [0, 0]
    empty = make_rollouts([1.0, 0.0], group_size=2, lengths=[0, 0])
    one_step(
        start_stack(april(correction="mask")), empty, make_tokens(empty, version=torch.zeros(0, dtype=torch.int64))
    )


# ---- parameters and hosts


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"over_sampling": 0.9}, "`over_sampling` is 0.9; it must be >= 1"),
        ({"over_sampling": 65}, "<= 64"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"tis_cap": 0.5}, "`tis_cap` is 0.5"),
        ({"correction": "sequence"}, "allowed: 'none', 'mask', 'token_tis'"),
        ({"stale": "wait"}, "allowed: 'restart', 'drop'"),
        ({"stale": "drop"}, "`stale` has no effect: it is 'drop'"),
    ],
)
def test_parameters_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        april(**params)


def test_signals_are_asked_for_only_where_they_are_used() -> None:
    always = {"prompt_index", "tokens"}
    assert april().needs == always
    assert april(correction="mask").needs == always | {"token_versions"}
    assert april(correction="token_tis").needs == always | {"old_logprobs", "rollout_logprobs"}


def test_a_host_that_knows_versions_of_rows_only() -> None:
    rollouts, tokens = batch_of()
    stack = start_stack(april(correction="token_tis"))
    one_step(stack, rollouts, tokens.replace(version=None))
    logged = combine([stack.metrics.take()])
    assert logged["april/staleness"] == int(rollouts.staleness.max()) > 0
    assert "april/weight" in logged and not {"april/stale_tokens", "april/weight_stale"} & set(logged)


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, {WARMUP: 1.0, SEPARATE_WARMUP: 1.0, THRESHOLD: None}),
        ({"over_sampling": 1}, {WARMUP: 0.0, SEPARATE_WARMUP: 0.0, THRESHOLD: None}),
        (
            {"over_sampling": 2.5, "correction": "token_tis"},
            {WARMUP: 1.5, SEPARATE_WARMUP: 1.5, THRESHOLD: None, CORRECTION: None},
        ),
        ({"max_staleness": 2, "stale": "drop"}, {WARMUP: 1.0, SEPARATE_WARMUP: 1.0, THRESHOLD: 3, STRATEGY: "drop"}),
    ],
    ids=str,
)
def test_options_of_verl(params: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert april(**params).host_options == {"verl": wanted}
    defaults = {WARMUP: 1, SEPARATE_WARMUP: 1, THRESHOLD: 8, STRATEGY: "drop", CORRECTION: None}
    capabilities = dict(
        name="verl",
        version="0",
        hooks=["admit", "shape"],
        missing_hooks={},
        eval_hooks=(),
        missing_signals={},
        columns=None,
        defaults=defaults,
    )
    set_ = preflight(build_stack(["april"], {"april": params}), HostCapabilities(options=defaults, **capabilities))
    assert set_ == {k: v for k, v in wanted.items() if v != defaults[k]}
    with pytest.raises(ConfigError, match="num_warmup_batches"):
        preflight(
            build_stack(["april"], {"april": params}), HostCapabilities(options={**defaults, WARMUP: 7}, **capabilities)
        )


def test_verl_cannot_restart() -> None:
    old = April(April.Params(max_staleness=2))
    start_stack(old, run=make_run(host="trl"))
    with pytest.raises(ConfigError, match="cannot restart them. Set `stale: drop`"):
        start_stack(old, run=make_run(host="verl"))
    start_stack(april(max_staleness=2, stale="drop"), run=make_run(host="verl"))
