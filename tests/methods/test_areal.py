"""AReaL (arXiv 2505.24298): capacities of the authors' code, what the rule bounds and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Carried, Queue
from rl_plugins.methods.areal_admission import STRATEGY, THRESHOLD, WARMUP, ArealAdmission, capacity
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_run, start_stack

with pytest.MonkeyPatch.context() as patch:  # the simulation is in the evidence script
    patch.syspath_prepend(Path(__file__).parents[2] / "examples" / "evidence")
    from areal import SimulatedStep, measured, simulate
GOLDEN = Golden("areal", "events")  # the losses are those of `decoupled_ppo`


def admission(**params: Any) -> ArealAdmission:
    return ArealAdmission(build_params(ArealAdmission.Params, params, "areal_admission"))


def recovered(version: int, batch: int) -> tuple[int, int]:
    """`accepted` and `running` of a run that resumes at a version. With both 0 it would begin version * batch groups
    more than it may."""
    return version * batch, 0


@GOLDEN.kind("events")
def check_capacity(case: Case) -> None:
    p = case.params
    method = admission(max_staleness=p["max_staleness"], max_concurrent=p["max_concurrent_rollouts"])
    batch = p["consumer_batch_size"]
    version = accepted = running = 0
    found = []
    for event in case.inputs["events"]:
        if event == "submit":
            running += 1
        elif event == "accept":
            running, accepted = running - 1, accepted + 1
        elif event == "reject":
            running -= 1
        elif event == "version":
            version += 1
        else:
            assert event[0] == "recover"
            version = event[1]
            accepted, running = recovered(version, batch)
        rule = method.params
        found.append(capacity(version, accepted, running, batch, rule.max_staleness, rule.max_concurrent))
    assert found == case.expected["capacity_after_each_event"]


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def test_a_run_that_resumes_begins_no_burst() -> None:
    for version in (0, 1, 7):
        for eta in (0, 2):
            accepted, running = recovered(version, 4)
            assert (accepted, running) == (4 * version, 0)
            assert capacity(version, accepted, running, 4, eta) == (eta + 1) * 4
    assert capacity(7, 0, 0, 4, 2) == 40  # with counts of 0 it would begin 28 more


@settings(max_examples=40, deadline=None)
@given(
    version=st.integers(0, 50),
    accepted=st.integers(0, 400),
    running=st.integers(0, 200),
    batch=st.integers(1, 64),
    eta=st.integers(0, 9),
    most=st.none() | st.integers(1, 99),
)
def test_capacity(version: int, accepted: int, running: int, batch: int, eta: int, most: int | None) -> None:
    here = capacity(version, accepted, running, batch, eta, most)
    rule = (eta + version + 1) * batch - accepted - running
    assert here == (rule if most is None else min(most - running, rule))
    assert capacity(version, accepted, running + 1, batch, eta, most) == here - 1  # one begun
    assert capacity(version + 1, accepted, running, batch, eta, most) >= here
    if most is None and running:
        assert capacity(version, accepted + 1, running - 1, batch, eta) == here  # one accepted
        assert capacity(version, accepted, running - 1, batch, eta) == here + 1  # one rejected
    # the paper's form: all submitted N_r, floor((N_r - 1) / B) <= v + eta
    begun = accepted + running
    assert (capacity(version, accepted, running, batch, eta) > 0) == (begun // batch <= version + eta)


# ---- the simulation


def lognormal(seed: int, sigma: float = 1.0) -> Callable[[int], float]:
    return lambda group: float(np.random.default_rng([seed, group]).lognormal(2, sigma))


def run(eta: int, bound: Any = "none", steps: int = 60, seed: int = 0, **changes: Any) -> list[SimulatedStep]:
    values: dict[str, Any] = dict(duration=lognormal(seed), batch=16, train_time=10.0) | changes
    rule = partial(capacity, batch=values["batch"], max_staleness=eta)
    return simulate(rule, values.pop("duration"), steps=steps, bound=bound, max_staleness=eta, **values)


def test_at_0_it_is_synchronous() -> None:
    """The loop: B groups begin, the slowest is waited for, they are trained, and then the next begin."""
    time, steps = 0.0, run(0)
    for number, step in enumerate(steps):
        slowest = max(lognormal(0)(g) for g in range(16 * number, 16 * number + 16))
        time += slowest + 10.0
        assert step.time == pytest.approx(time) and step.waited == pytest.approx(slowest)
        assert step.staleness == (0,) * 16 and not step.dropped


def test_throughput_grows_with_eta_until_the_trainer_never_waits() -> None:
    found = [measured(run(eta), skip=10) for eta in range(9)]
    rates = [f["throughput"] for f in found]
    assert rates == sorted(rates)
    assert rates[8] > 2 * rates[0] and rates[8] <= 16 / 10.0 + 1e-9
    assert found[8]["idle"] < 0.02 < 0.4 < found[0]["idle"]
    ages = [f["staleness"] for f in found]
    assert ages == sorted(ages) and ages[0] == 0
    assert all(age <= eta + 1e-9 for eta, age in enumerate(ages))  # on average: each step consumes what it admits


@settings(max_examples=40, deadline=None)
@given(eta=st.integers(0, 5), batch=st.integers(1, 8), seed=st.integers(0, 10**6), train=st.floats(0, 30))
def test_never_more_than_the_rule_allows(eta: int, batch: int, seed: int, train: float) -> None:
    begun: list[tuple[int, int]] = []

    def rule(version: int, accepted: int, running: int) -> int:
        room = capacity(version, accepted, running, batch, eta)
        if room > 0:
            begun.append((version, accepted + running + 1))
        return room

    steps = simulate(rule, lognormal(seed), batch=batch, train_time=train, steps=12)
    assert all((number - 1) // batch <= version + eta for version, number in begun)
    assert len(begun) == (eta + 12 + 1) * batch  # (eta + v + 1) B at the end
    assert sum(len(s.staleness) for s in steps) == 12 * batch


def stragglers(group: int) -> float:
    """One group in fifty takes as long as twenty steps."""
    return 200.0 if np.random.default_rng([5, group]).random() < 0.02 else 8.0


def test_the_rule_bounds_the_count_and_not_the_age() -> None:
    none, drop, wait = (run(2, bound, 200, duration=stragglers) for bound in ("none", "drop", "wait"))
    assert max(max(s.staleness) for s in none) >= 15 > 2
    assert max(max(s.staleness) for s in drop) <= 2 and max(max(s.staleness) for s in wait) <= 2
    rate = {name: measured(steps, 20) for name, steps in (("none", none), ("drop", drop), ("wait", wait))}
    assert rate["drop"]["wasted"] > 0.01 and rate["none"]["wasted"] == rate["wait"]["wasted"] == 0
    assert rate["wait"]["throughput"] < 0.5 * rate["none"]["throughput"]
    assert rate["drop"]["throughput"] > 0.9 * rate["none"]["throughput"]


def test_a_limit_on_groups_at_once_costs_throughput() -> None:
    few = simulate(
        partial(capacity, batch=16, max_staleness=4, max_concurrent=4), lognormal(0), batch=16, train_time=10, steps=40
    )
    assert measured(few, 5)["throughput"] < 0.7 * measured(run(4), 5)["throughput"]


def test_a_rule_that_begins_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 groups are complete, 4 are needed, and none may begin"):
        simulate(lambda version, accepted, running: 0, lognormal(0), batch=4, train_time=1, steps=1)


# ---- as a hook, and on hosts


def queue(carried: int, batch: int, drawn: int = 0, complete: int = 0) -> Queue:
    group = Carried(prompt_index=0, size=2, drawn=drawn, tokens=(3, 3), finished=(True, False), versions=(0, 0))
    ready = replace(group, finished=(True, True))
    return Queue((group,) * (carried - complete) + (ready,) * complete, 4, 2, batch)


@pytest.mark.parametrize(
    ("params", "given", "wanted"),
    [
        ({"max_staleness": 0}, queue(0, 0), (4, 0, 0)),
        ({"max_staleness": 2}, queue(0, 0), (12, 0, 0)),
        ({"max_staleness": 2}, queue(8, 1), (4, 8, 0)),
        ({"max_staleness": 2, "max_concurrent": 6}, queue(0, 0), (6, 0, 0)),
        ({"max_staleness": 2, "max_concurrent": 1}, queue(0, 0), (4, 0, 0)),  # a batch must be begun
        ({"max_staleness": 2, "max_concurrent": 6}, queue(5, 1), (1, 5, 0)),
        ({"max_staleness": 2, "max_concurrent": 6}, queue(5, 1, complete=3), (4, 5, 0)),  # 2 are in the making
        ({"max_staleness": 2}, queue(8, 1, complete=8), (4, 8, 0)),
        ({"max_staleness": 2, "max_concurrent": 6, "bound": "drop"}, queue(5, 3, complete=3), (6, 0, 5)),
        ({"max_staleness": 2, "bound": "drop"}, queue(8, 2), (4, 8, 0)),
        ({"max_staleness": 2, "bound": "drop"}, queue(8, 3), (12, 0, 8)),
        ({"max_staleness": 2}, queue(8, 9), (4, 8, 0)),
    ],
)
def test_as_many_begin_as_the_capacity_says(params: dict[str, Any], given: Queue, wanted: tuple[int, ...]) -> None:
    stack = start_stack(admission(**params), run=make_run(host="other"))
    answer = stack.one("admit", given)
    assert (answer.fresh, len(answer.resume), len(answer.drop)) == wanted


def test_trl_is_refused_with_what_to_name_instead() -> None:
    with pytest.raises(
        ConfigError, match="TRL's GRPOTrainer does not generate while it trains.*`april`.*decoupled_ppo"
    ):
        start_stack(admission(), run=make_run(host="trl"))


def test_a_limit_on_groups_at_once_is_refused_in_verl() -> None:
    start_stack(admission(), run=make_run(host="verl"))
    with pytest.raises(ConfigError, match="`max_concurrent` is 8, and verl limits"):
        start_stack(admission(max_concurrent=8), run=make_run(host="verl"))


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, {THRESHOLD: None}),
        ({"max_staleness": 0}, {THRESHOLD: None}),
        ({"max_staleness": 2, "bound": "drop"}, {THRESHOLD: 3, STRATEGY: "drop"}),
        ({"bound": "wait"}, {THRESHOLD: 5, STRATEGY: "wait"}),
    ],
    ids=str,
)
def test_options_of_verl(params: dict[str, Any], wanted: dict[str, Any]) -> None:
    eta = params.get("max_staleness", 4)
    assert admission(**params).host_options == {"verl": dict.fromkeys(WARMUP, eta) | wanted}
    defaults = {WARMUP[0]: 1, WARMUP[1]: 1, THRESHOLD: 8, STRATEGY: "drop"}
    capabilities: dict[str, Any] = dict(
        name="verl",
        version="0",
        hooks=["admit"],
        missing_hooks={},
        eval_hooks=(),
        missing_signals={},
        columns=None,
        defaults=defaults,
    )
    stack = build_stack(["areal_admission"], {"areal_admission": params})
    found = preflight(stack, HostCapabilities(options=defaults, **capabilities))
    assert found == {k: v for k, v in admission(**params).host_options["verl"].items() if v != defaults[k]}
    with pytest.raises(ConfigError, match="separate_async.num_warmup_batches=7"):
        preflight(stack, HostCapabilities(options={**defaults, WARMUP[1]: 7}, **capabilities))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_staleness": -1}, "`max_staleness` is -1; it must be >= 0"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"bound": "restart"}, "allowed: 'none', 'drop', 'wait'"),
    ],
)
def test_parameters_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        admission(**params)


def test_the_bundle() -> None:
    stack = build_stack(["areal"], {"areal_admission": {"max_staleness": 8}})
    assert stack.names == ["areal_admission", "decoupled_ppo"]
    assert stack.methods[1].params.action == "mask" and stack.methods[1].params.upper == 5.0
    assert stack.methods[0].host_options["verl"][WARMUP[1]] == 8
