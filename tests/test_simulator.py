"""The simulator of disaggregated rollouts: times computed by hand, no rollout lost, and what must not get slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.tools.disaggregated.router import AffinityRouter
from rl_plugins.tools.disaggregated.servers import Servers
from rl_plugins.tools.disaggregated.simulator import (
    Pool,
    Reward,
    Setup,
    SimulatedRun,
    Task,
    Weights,
    _log_normal,
    _Rollout,
    _World,
    simulate,
    summary,
)

# Each of two rollouts reads for 1 s, one after the other, writes for 2 s and acts for 3 s: they end after 6 and 7 s.
SLOW = Pool("slow", 2, prefill_rate=100, decode_rate=10)
BY_HAND = Setup(
    [SLOW],
    {"s": "slow"},
    [Task("t", 1, read=100, written=20, seconds=3.0)],
    group_size=2,
    groups=1,
    staleness=0,
    train_seconds=5.0,
    weights=Weights(1.5, 0.5),
)


def times(setup: Setup, steps: int = 3) -> list[float]:
    return [step.time for step in simulate(setup, steps).steps]


def test_by_hand_the_trainer_waits_for_its_own_rollouts() -> None:
    run = simulate(BY_HAND, 3)
    assert [step.time for step in run.steps] == pytest.approx([14, 28, 42])
    assert {step.waited for step in run.steps} == {7.0}
    assert run.rollouts == {**dict.fromkeys(("failed", "dropped", "late", "waiting"), 0), "begun": 8, "trained": 6} | {
        "under_way": 2  # the next step has begun
    }
    found = summary(run, skip=1)
    wanted = {"step_time": 14, "throughput": 2 / 14, "waited": 7 / 14, "lag": 0, "oldest": 0, "lag_0": 1, "age": 0}
    wanted |= {"busy slow": 4 / 14, "places slow": 7 / 28, "reading slow": 2 / 14}
    wanted |= {"environments": 13 / 28, "acting": 6 / 28, "expired": 0, "failed": 0, "late": 0}
    assert found == pytest.approx(wanted)


def test_by_hand_a_full_server_lets_the_second_rollout_wait() -> None:
    setup = replace(BY_HAND, pools=[replace(SLOW, capacity=1)])  # 0 to 6 and 3 to 9
    assert times(setup) == pytest.approx([16, 32, 48])
    assert summary(simulate(setup, 3))["places slow"] == pytest.approx(6 / 16)


def test_by_hand_rollouts_beside_the_training() -> None:
    run = simulate(replace(BY_HAND, staleness=1, train_seconds=4.0, weights=Weights()), 3)
    # groups end after 7, 13 and 19 s: the first environment is free again after 6 s
    assert [step.time for step in run.steps] == pytest.approx([11, 17, 23])
    assert [step.ages for step in run.steps] == [(0,), (1,), (1,)]
    # the third group begins at 12 s, and the first weights are there at 11 s
    assert [step.lags for step in run.steps] == [(0, 0), (1, 1), (1, 1)]
    assert summary(run)["age"] == pytest.approx(2 / 3) and summary(run)["lag_1"] == pytest.approx(2 / 3)


def test_by_hand_weights_that_arrive_beside_the_training() -> None:
    setup = replace(BY_HAND, staleness=1, train_seconds=4.0)
    # blocking: all servers stop from 11 to 13 s, while both rollouts act
    assert times(replace(setup, weights=Weights(1.5, 0.5)), 2) == pytest.approx([13, 19])
    # asynchronous: weights arrive at 12.5 s and servers stop until 13 s, where the rollout of 12 s still reads
    run = simulate(replace(setup, weights=Weights(1.5, 0.5, blocking=False)), 3)
    assert [step.time for step in run.steps] == pytest.approx([11, 17, 23.5])
    assert [step.lags for step in run.steps] == [(0, 0), (1, 1), (2, 1)]  # 12 s is before the weights


@pytest.mark.parametrize(
    ("reward", "batch"),
    [
        (Reward(2.0), 9.0),
        (Reward(2.0, workers=1), 10.0),  # 6 to 8 and 8 to 10
        (Reward(2.0, workers=2), 9.0),
        (Reward(2.0, overlapped=False), 9.0),
    ],
)
def test_by_hand_rewards(reward: Reward, batch: float) -> None:
    run = simulate(replace(BY_HAND, reward=reward), 2)
    assert [step.time for step in run.steps] == pytest.approx([batch + 7, 2 * batch + 14])
    if reward.workers:
        assert summary(run)["rewards"] == pytest.approx(4 / reward.workers / (batch + 7))


def test_rewards_that_are_computed_at_the_end_of_a_step_count_for_their_part() -> None:
    setup = replace(BY_HAND, staleness=1, train_seconds=0.0, weights=Weights(), reward=Reward(4.0, workers=1))
    run = simulate(setup, 1)  # 6 to 10 and 10 to 14; two more are in the line at 14 s
    assert run.steps[0].time == 14 and summary(run)["rewards"] == pytest.approx(8 / 14)


def test_by_hand_a_rollout_takes_the_place_of_one_that_failed(monkeypatch: Any) -> None:
    draw = _World._draw

    def first_fails(self: _World, environment: int, q: int, episode: int) -> Any:
        rollout = draw(self, environment, q, episode)
        rollout.faults = [0.0 if rollout.name.endswith("/0") else 1.0]
        return rollout

    monkeypatch.setattr(_World, "_draw", first_fails)
    run = simulate(replace(BY_HAND, group_size=1, fails=0.5, restart=4.0), 1)
    assert run.steps[0].waited == pytest.approx(6 + 4 + 6) and summary(run)["failed"] == 1.0


def test_an_environment_that_waits_for_its_reward_begins_later() -> None:
    setup = replace(BY_HAND, staleness=1, train_seconds=0.0, weights=Weights(), reward=Reward(10.0))
    # a rollout of 6 s and its reward: the second group ends after 23 s, or after 2 (6 + 10) + 1 s
    assert times(setup, 2) == pytest.approx([17, 23])
    assert times(replace(setup, reward=Reward(10.0, overlapped=False)), 2) == pytest.approx([17, 33])


def test_the_spare_rollout_is_late() -> None:
    run = simulate(replace(BY_HAND, redundancy=1, pools=[replace(SLOW, capacity=3)]), 3)
    assert [step.time for step in run.steps] == pytest.approx([14, 28, 42])  # it ends 8 s after the others began
    assert run.rollouts["late"] == 3 and run.rollouts["trained"] == 6 and summary(run)["late"] == 0.5


def request(name: str) -> Any:
    return _Rollout(name, "", 0, 0, [], [], [], 0.0, 0, context=100)


def test_servers_pause_and_read_again_what_another_server_read() -> None:
    pools = [replace(SLOW, capacity=1)]
    servers = Servers(AffinityRouter(pools, {"a": "slow", "b": "slow"}), pools, {"a": "slow", "b": "slow"})
    one, two, three = request("1"), request("2"), request("3")
    assert servers.ask(one, 20, 0.0) == 3.0 and servers.ask(two, 20, 0.0) == 3.0
    assert servers.ask(three, 20, 0.0) is None
    servers.pause(4.0, 1, now=0.5)  # until 4.5, in the middle of the reading
    assert servers.used(2.0)["reading slow"] == pytest.approx(0.5)
    servers.pause(1.0, 2, now=1.0)  # within the first
    assert servers.delayed(one) == 4.0 and servers.delayed(one) == 0.0
    servers.release(one, 20, 7.0)
    assert (one.context, one.cached) == (120, 120)
    one.context += 50
    assert servers.ask(one, 10, 8.0) == pytest.approx(8 + 0.5 + 1)  # it stays and reads 50
    servers.release(one, 10, 9.5)
    assert servers.ask(three, 20, 9.5) == 12.5 and three.version == 2 and one.version == 0
    servers.release(two, 20, 10.0)
    assert servers.ask(one, 10, 10.0) == pytest.approx(10 + 1.8 + 1) and one.server == "b"

    servers.release(three, 20, 12.5)
    servers.pause(4.0, 3, now=20.0)
    assert servers.ask(three, 20, 21.0) == pytest.approx(24 + 2)  # it has read all


def test_older_groups_are_trained_first() -> None:
    world = _World(replace(BY_HAND, group_size=1, groups=2, staleness=1), 0)
    for queue in world.queues:
        queue.advance(0)
        queue.advance(1)
        for _ in range(3):
            queue.put(queue.ask() or 0, "rollout")
    assert [world.queues[0].get() is not None for _ in range(2)] == [True, True]
    world._collect()
    assert [group.create_step for group in world.batch] == [0, 0] and world.full.triggered


def test_the_mean_of_a_time_does_not_depend_on_its_spread() -> None:
    for spread in (0.0, 0.5, 1.0):
        assert _log_normal(np.random.default_rng(0), 3.0, spread, 100_000).mean() == pytest.approx(3.0, rel=0.02)


# ---- closed forms of the first batch, with draws of their own for each rollout

FREE = Pool("free", 1000, prefill_rate=1e9, decode_rate=1e9)
DRAWN = Setup(
    [FREE],
    {"s": "free"},
    [Task("t", 5, read=0, written=0, seconds=10.0, spread=1.0)],
    group_size=3,
    groups=4,
    staleness=0,
    train_seconds=1.0,
)


def draws(setup: Setup, seed: int) -> list[list[list[float]]]:
    """Seconds of the turns of each rollout of each group in the first step."""
    world = _World(setup, seed)
    n = setup.group_size + setup.redundancy
    return [[world._draw(0, q, 0).seconds for _ in range(n)] for q in range(setup.groups)]


@given(seed=st.integers(0, 10**6), spare=st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_first_batch_of_independent_lockstep_and_redundant_rollouts(seed: int, spare: int) -> None:
    setup = replace(DRAWN, redundancy=spare)
    groups = draws(setup, seed)
    ends = [sorted(sum(turns) for turns in group) for group in groups]
    alone = simulate(setup, 1, seed).steps[0]
    assert alone.waited == pytest.approx(max(group[setup.group_size - 1] for group in ends))
    together = simulate(replace(setup, lockstep=True), 1, seed).steps[0]
    turns = [max(group[i][t] for group in groups for i in range(len(group))) for t in range(5)]
    assert together.waited == pytest.approx(sum(turns)) and together.waited >= alone.waited - 1e-9
    assert draws(DRAWN, seed) == [group[:3] for group in groups]  # more environments draw nothing anew
    assert simulate(DRAWN, 1, seed).steps[0].waited >= alone.waited - 1e-9


def test_in_lockstep_new_rollouts_wait_for_all_others() -> None:
    tasks = [Task("short", 1, 0, 0, 10.0), Task("long", 3, 0, 0, 10.0)]
    setup = replace(DRAWN, tasks=tasks, group_size=1, groups=2, staleness=1)
    seed = next(s for s in range(99) if [len(turns) for (turns,) in draws(setup, s)] == [1, 3])
    alone, together = (simulate(replace(setup, lockstep=lock), 1, seed) for lock in (False, True))
    # alone, the short queue makes both groups of the batch; together, its second one begins when the long one has ended
    assert alone.steps[0].waited == pytest.approx(20) and together.steps[0].waited == pytest.approx(30)
    assert together.rollouts["begun"] == 4


def test_late_rollouts_can_be_closed_after_their_turn() -> None:
    setup = replace(DRAWN, redundancy=2, train_seconds=100.0)
    run, closed = (simulate(replace(setup, close_spare=close), 4) for close in (False, True))
    assert closed.rollouts["late"] == run.rollouts["late"] == 4 * 4 * 2
    assert summary(closed)["environments"] < 0.95 * summary(run)["environments"]
    ahead = simulate(replace(DRAWN, redundancy=2, staleness=2, train_seconds=1000.0), 2)
    assert ahead.rollouts["waiting"] == 2 * 4 * 3, "two groups of three in each queue; their spare rollouts are late"
    check_books(ahead)


# ---- any setup

DRAWN_TASKS = [Task("a", 3, 50, 20, 1.0, 1.0, 0.5), Task("b", 1, 500, 5, 5.0, 1.5, share=0.5)]
ANY = st.fixed_dictionaries(
    {
        "group_size": st.integers(1, 3),
        "redundancy": st.integers(0, 2),
        "groups": st.integers(1, 3),
        "groups_per_step": st.integers(1, 2),
        "staleness": st.integers(0, 2),
        "lockstep": st.booleans(),
        "close_spare": st.booleans(),
        "fails": st.sampled_from([0.0, 0.1]),
        "hangs": st.sampled_from([0.0, 0.05]),
        "timeout": st.just(20.0),
        "restart": st.sampled_from([0.0, 2.0]),
        "train_seconds": st.sampled_from([0.0, 6.0]),
        "reward": st.builds(
            Reward,
            st.sampled_from([0.0, 2.0]),
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([None, 1, 2]),
            st.booleans(),
        ),
        "weights": st.builds(Weights, st.sampled_from([0.0, 5.0]), st.sampled_from([0.0, 1.0]), st.booleans()),
        "tasks": st.just(DRAWN_TASKS),
        "tags": st.sampled_from([None, {"a": ["slow", "fast"]}, {"a": ["slow"], "b": ["fast"]}]),
    }
)
POOLS = [replace(SLOW, capacity=3), Pool("fast", 2, 1000, 50)]


def setup_of(options: Any) -> Setup:
    return Setup(POOLS, {"0": "slow", "1": "fast", "2": "slow"}, **options)


def check_books(run: SimulatedRun) -> None:
    known = dict(run.rollouts)
    assert known.pop("begun") == sum(known.values()) and min(known.values()) >= 0


@given(ANY, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_rollout_is_trained_dropped_late_failed_or_alive(options: Any, seed: int) -> None:
    setup = setup_of(options)
    run = simulate(setup, 6, seed)
    assert run == simulate(setup, 6, seed)
    check_books(run)
    groups = setup.groups * setup.groups_per_step
    assert run.rollouts["trained"] == 6 * groups * setup.group_size
    for before, step in zip((None, *run.steps), run.steps, strict=False):
        assert len(step.ages) == groups and len(step.lags) == groups * setup.group_size
        assert min(step.ages) >= 0 and max(step.ages) <= setup.staleness and min(step.lags) >= 0
        if setup.weights.blocking:
            assert max(step.lags) <= setup.staleness
        assert step.time >= (before.time if before else 0.0) + setup.train_seconds
    if run.steps[-1].time:
        for name, share in summary(run).items():
            if name.split()[0] in ("busy", "places", "reading", "environments", "acting", "rewards", "waited"):
                assert -1e-9 <= share <= 1 + 1e-9, name


ALL_OF_IT = Setup(
    POOLS,
    {"0": "slow", "1": "fast", "2": "slow"},
    DRAWN_TASKS,
    group_size=3,
    redundancy=1,
    groups=3,
    fails=0.1,
    hangs=0.05,
    timeout=20.0,
    restart=2.5,
    train_seconds=6.0,
    reward=Reward(2.0, 1.0, 1, overlapped=False),
    weights=Weights(5.0, 1.0, blocking=False),
)


@pytest.mark.parametrize(
    ("change", "ends", "rollouts", "moved"),
    [
        ({}, [25.122779, 55.707816, 70.645902, 88.016648], [78, 36, 19, 0, 10, 2, 11], 2),
        (
            {"lockstep": True, "weights": Weights(5.0, 1.0)},
            [86.182585, 145.304014, 237.908837, 301.844617],
            [77, 36, 21, 3, 8, 2, 7],
            9,
        ),
        (
            {"close_spare": True, "staleness": 0, "reward": Reward(2.0, 1.0), "tags": {"a": ["slow"], "b": ["fast"]}},
            [25.93998, 49.225567, 79.544761, 107.467729],
            [70, 36, 14, 0, 8, 0, 12],
            17,
        ),
    ],
)
def test_the_same_numbers_as_before_simpy(change: Any, ends: Any, rollouts: Any, moved: int) -> None:
    """Numbers of the engine of ours that `simpy` replaced, where no two events of a run have the same time."""
    run = simulate(replace(ALL_OF_IT, **change), 4)
    assert [step.time for step in run.steps] == pytest.approx(ends, abs=1e-6)
    assert list(run.rollouts.values()) == rollouts and run.moved == moved


@given(ANY, st.integers(0, 1000), st.sampled_from(["faster pools", "faster rewards", "more workers"]))
@settings(max_examples=20, deadline=None)
def test_better_machines_never_delay_the_first_batch(options: Any, seed: int, better: str) -> None:
    """With a place for everyone, so that no request overtakes another by being early."""
    options |= {"fails": 0.0, "hangs": 0.0, "close_spare": False, "tags": None, "redundancy": 0, "staleness": 0}
    options |= {"groups_per_step": 1, "tasks": [Task("a", 1, 50, 20, 1.0, 1.0), Task("b", 1, 500, 5, 5.0, 1.5)]}
    setup = Setup([Pool("all", 100, 100, 10)], {"0": "all"}, **options)
    reward = setup.reward
    improved = {
        "faster pools": replace(setup, pools=[Pool("all", 100, 200, 20)]),
        "faster rewards": replace(setup, reward=replace(reward, seconds=reward.seconds / 2)),
        "more workers": replace(setup, reward=replace(reward, workers=reward.workers and 2 * reward.workers)),
    }[better]
    assert simulate(improved, 1, seed).steps[0].waited <= simulate(setup, 1, seed).steps[0].waited + 1e-9


@given(st.floats(0, 20), st.floats(0, 5), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_more_staleness_and_weights_that_do_not_block_are_never_slower_at_constant_times(
    training: float, transfer: float, turns: int
) -> None:
    task = Task("t", turns, read=100, written=20, seconds=3.0)
    setup = replace(BY_HAND, tasks=[task], train_seconds=training, weights=Weights(transfer))
    ends = [times(replace(setup, staleness=a), 8)[-1] for a in (0, 1, 2)]
    assert ends[0] >= ends[1] - 1e-6 and ends[1] >= ends[2] - 1e-6
    beside = replace(setup, staleness=1, weights=replace(setup.weights, blocking=False))
    assert times(beside, 8)[-1] <= ends[1] + 1e-6


def test_affinity_sends_each_task_to_its_pool() -> None:
    pools = [Pool("reads", 4, 10_000, 10), Pool("writes", 4, 100, 100)]
    tasks = [Task("long prompts", 3, 10_000, 10, 1.0), Task("long answers", 1, 100, 2_000, 1.0)]
    setup = Setup(pools, {"0": "reads", "1": "writes"}, tasks, groups=4, group_size=2, train_seconds=1.0)
    blind = replace(setup, believed=[replace(pool, prefill_rate=1.0, decode_rate=1.0) for pool in pools])
    listed = replace(setup, tags={"long prompts": ["reads"], "long answers": ["writes"]})
    found = {name: summary(simulate(s, 12), 2)["step_time"] for name, s in [("blind", blind), ("listed", listed)]}
    assert found["listed"] < 0.5 * found["blind"]
    assert summary(simulate(setup, 12), 2)["step_time"] < 0.7 * found["blind"]  # measured


# ---- faults


def test_environments_that_all_hang_end_the_run() -> None:
    with pytest.raises(
        MethodError, match="Step 0 waits for 4 of its 4 groups.*12 of 12 environments have hung.*timeou"
    ):
        simulate(replace(DRAWN, hangs=1.0), 1)
    with pytest.raises(MethodError, match="12 of 12 environments have hung"):
        simulate(replace(DRAWN, hangs=1.0, lockstep=True), 1)


def test_one_hanging_environment_blocks_its_own_group_unless_one_is_spare(monkeypatch: Any) -> None:
    draw = _World._draw

    def one_hangs(self: _World, environment: int, q: int, episode: int) -> Any:
        rollout = draw(self, environment, q, episode)
        rollout.faults = [0.0 if environment == 0 else 1.0] * 5
        return rollout

    monkeypatch.setattr(_World, "_draw", one_hangs)
    setup = replace(DRAWN, hangs=0.5)
    with pytest.raises(
        MethodError, match="Step 0 waits for 1 of its 4 groups.*1 of 12 env.*raise `redundancy` above 0"
    ):
        simulate(setup, 5)
    assert simulate(replace(setup, redundancy=1), 5).rollouts["under_way"] >= 1
    run = simulate(replace(setup, timeout=30.0), 5)
    assert run.rollouts["failed"] >= 5 and run.rollouts["trained"] == 60


def test_many_failures_are_none_too_many_between_successes() -> None:
    world = _World(BY_HAND, 0)
    world.failed_in_row = 1_000
    world.run(1)
    assert world.failed_in_row == 0


@pytest.mark.parametrize("fault", [{"fails": 1.0}, {"hangs": 1.0, "timeout": 5.0}])
def test_rollouts_that_all_fail_end_the_run(fault: Any) -> None:
    with pytest.raises(MethodError, match="The last 2201 rollouts failed.*Lower them, or give tasks fewer turns"):
        simulate(replace(DRAWN, **fault), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 0}, "`groups` of Setup is 0. It must be at least 1 and finite"),
        ({"fails": 0.6, "hangs": 0.6}, "`fails` and `hangs` are 0.6 and 0.6. Together they must be at most 1"),
        ({"timeout": -1.0}, "`timeout` of Setup is -1.0"),
        ({"train_seconds": float("nan")}, "`train_seconds` of Setup is nan"),
        ({"tasks": []}, "No task has a share above 0"),
        ({"tasks": [Task("t", 0)]}, "`turns` of Task is 0"),
        ({"tasks": [Task("t", seconds=-1.0)]}, "`seconds` of Task is -1.0"),
        ({"reward": Reward(-1.0)}, "`seconds` of Reward is -1.0"),
        ({"reward": Reward(workers=0)}, "`workers` of Reward is 0"),
        ({"weights": Weights(load=-1.0)}, "`load` of Weights is -1.0"),
        ({"staleness": -1}, "`staleness` is -1"),
        ({"servers": {"s": "other"}}, "The server s names the pool 'other'"),
        ({"believed": [SLOW, Pool("b")], "tags": {"t": ["b"]}}, "The tag t names the pool 'b'"),
        (
            {"pools": [SLOW, Pool("b")], "tags": {"t": ["b"]}},
            "The task t may use the pools b, and none of them has a ser",
        ),
    ],
)
def test_wrong_setups_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(BY_HAND, **change)
