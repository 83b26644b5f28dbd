"""Several methods as one: who claims what, in which order and place hooks run, what errors say, what is saved."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import logging
import random
import re
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from messages import raises

from rl_plugins import __version__
from rl_plugins.core.errors import ConfigError, MethodError, StateError
from rl_plugins.core.method import HOOKS, Bundle, Method
from rl_plugins.core.params import MethodParams, build_params, param
from rl_plugins.core.rollouts import Shape
from rl_plugins.methods.april import April
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.resume import needs_state, resume, save_run
from rl_plugins.runtime.stack import MethodStack, Watcher, build_stack, check_max_unrewarded_batches
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.runtime.trace import trace_of
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_terms, make_tokens, one_step, start_stack
from rl_plugins.testing.generation import Simulation

HOOK_ARGUMENTS = {h: 2 if h in ("select_prompts", "shape") else 3 if h == "observe" else 1 for h in HOOKS}


def method(name: str, **members: Any) -> Method:
    """An instance of a new class; members are hooks and class attributes."""
    return type(name.title(), (Method,), {"name": name, **members})()


def hook(function=lambda *args: None):
    return lambda self, *args: function(*args)


# ---- claims


def test_claims_are_read_off_the_class_in_step_order():
    class Base(Method):
        def shape(self, rollouts, tokens):
            return None

        def plan(self, plan):
            return None

    class Child(Base):
        def rewards(self, rollouts):
            return None

    assert Child.claims() == ("plan", "rewards", "shape") and Base.claims() == ("plan", "shape")
    assert Method.claims() == ()
    a, b = method("a", plan=hook(), observe=hook()), method("b", plan=hook(), advantages=hook())
    stack = MethodStack([b, a])
    assert stack.claims["plan"] == [b, a] and stack.claims["advantages"] == [b] and stack.claims["observe"] == [a]
    assert set(stack.claims) == set(HOOKS) and stack.claims["shape"] == []
    assert stack.names == ["b", "a"] and bool(stack) and not MethodStack([])
    assert stack.claimed("shape", "observe") and not stack.claimed("shape", "select")


@pytest.mark.parametrize("name", HOOKS)
def test_two_claims_of_an_exclusive_hook_are_refused_by_name(name):
    both = [method("first", **{name: hook()}), method("second", **{name: hook()})]
    if HOOKS[name].kind != "exclusive":
        assert MethodStack(both).claims[name] == both
        return
    with raises(ConfigError) as e:
        MethodStack(both)
    assert str(e.value) == (
        f"The methods `first` and `second` both decide `{name}`, and only one can. "
        "Remove `first` or `second` from `methods`."
    )
    assert MethodStack(both[:1]).claims[name] == both[:1]
    with raises(ConfigError) as e:
        MethodStack(both, bundle_of={"first": "one", "second": "two"})
    assert str(e.value).endswith(
        "`first` is part of `one`: write `-first`. `second` is part of `two`: write `-second`."
    )


def test_a_method_without_a_hook_says_so_when_it_is_called():
    for name, n in HOOK_ARGUMENTS.items():
        with raises(MethodError, match=f"`plain`.*`{name}`"):
            getattr(method("plain"), name)(*[None] * n)


def test_needs_are_the_union():
    stack = MethodStack([method("a", needs={"text", "entropies"}), method("b", needs=frozenset({"text", "column:x"}))])
    assert stack.needs == {"text", "entropies", "column:x"}
    assert MethodStack([method("a")]).needs == set() == MethodStack([]).needs
    in_loss = MethodStack([method("a", policy_loss=hook(), needs={"x"}), method("b", regularize=hook(), needs={"y"})])
    assert in_loss.in_loss("x") and in_loss.in_loss("y") and not in_loss.in_loss("z") and not stack.in_loss("text")


def test_losses_that_aggregate_differently_are_refused():
    host, total = method("host", regularize=hook()), method("total", policy_loss=hook(), aggregation="sum")
    with raises(ConfigError, match=r"^`total` \(sum\) and `host` \(host\)"):
        MethodStack([host, total])
    assert MethodStack([total]).aggregation == "sum" and MethodStack([host]).aggregation == "host"
    without_loss = method("other", plan=hook(), aggregation="sum")
    assert MethodStack([host, without_loss]).aggregation == "host" == MethodStack([]).aggregation


def test_build_stack_builds_named_methods_with_their_parameters():
    stack = build_stack("mc_grpo, vade", {"mc_grpo": {"mad_eps": "1e-2"}}, seed=5)
    assert stack.names == ["mc_grpo", "vade"] and stack.seed == 5
    assert stack.methods[0].params.mad_eps == 0.01
    with raises(ConfigError, match=r"`mc_grpo`.*`mad_eps`.*-1.0.*> 0"):
        build_stack(["mc_grpo"], {"mc_grpo": {"mad_eps": -1}})
    with raises(ConfigError) as e:
        build_stack(["mc_grpo", "v0"], {"mc_grpo": {"mad_eps": -1}, "v0": {"no_such": 1}})
    assert [("`mc_grpo`" in line, "`v0`" in line) for line in str(e.value).split("\n")] == [
        (True, False),
        (False, True),
    ]
    many = ["vade", "linear_ts", "nosuch", "mc_grpo", "gdpo"]
    wrong = {"vade": {"nope": 1, "success_threshold": 0.3}, "other": {}}
    with raises(ConfigError) as e:
        build_stack(many, wrong)
    words = ("`nosuch`", "`other`", "`nope`", "`column`", "`vade` and `linear_ts`", "`mc_grpo` and `gdpo`")
    assert [[w for w in words if w in line] for line in str(e.value).split("\n")] == [[w] for w in words]
    stack = build_stack(many, wrong, refuse=False)
    assert "\n".join(stack.problems) == str(e.value) and stack.names == ["vade", "mc_grpo", "gdpo"]
    assert stack.methods[0].params.success_threshold == 0.3, "what is not wrong is kept"
    assert build_stack(["nosuch"], refuse=False), "it is no empty stack, which would run the host alone"
    assert build_stack(["vad", "dot"], {"vade": {}}, refuse=False).problems == [
        problem for name in ("vad", "dot") for problem in build_stack([name], refuse=False).problems
    ], "parameters of the name that was meant"
    assert build_stack(["vade"], max_unrewarded_batches=7).max_unrewarded_batches == 7
    assert not build_stack([]) and not build_stack(None)


# ---- order


def test_chains_run_in_the_order_of_the_flag_each_on_what_the_one_before_made():
    def adder(name, x, factor):
        return method(
            name,
            plan=hook(lambda plan: plan.replace(rows=tuple(r.replace(spare=r.spare * factor + x) for r in plan.rows))),
            rewards=hook(lambda rollouts: rollouts.reward * factor + x),
            shape=hook(lambda rollouts, tokens: Shape(advantages=tokens.advantages * factor + x)),
            needs=frozenset({"tokens"}),
        )

    a, b = adder("a", 1, 2), adder("b", 5, 3)
    for order, expected in (([a, b], (0 * 2 + 1) * 3 + 5), ([b, a], (0 * 3 + 5) * 2 + 1)):
        decision = one_step(MethodStack(order), make_rollouts([0.0, 0.0]))
        assert decision.rollouts.reward.tolist() == [expected] * 2
        assert decision.advantages.tolist() == [expected] * 3
        assert tuple(decision.rewarded_by) == tuple(m.name for m in order)


def test_start_runs_once_for_every_method_and_may_fill_the_state():
    started = []

    def start(self, run):
        started.append(self.name)
        self.state = {"group_size": run.group_size}

    stack = start_stack(method("a", start=start), method("b", start=start), run=make_run(group_size=7))
    assert started == ["a", "b"] and stack.methods[1].state == {"group_size": 7}


# ---- places


@pytest.mark.parametrize("name", HOOKS)
def test_state_exists_on_the_driver_only_and_again_after_the_hook(name):
    def use(self, *args):
        self.state["seen"] = self.state.get("seen", 0) + 1

    m = method("counter", **{name: use})
    stack = MethodStack([m])
    for _ in range(2):
        if HOOKS[name].place == "driver":
            stack.call(name, m, *[None] * HOOK_ARGUMENTS[name])
        else:
            place = HOOKS[name].place
            with raises(MethodError, match=f"`counter`.*self.state.*{place}"):
                stack.call(name, m, *[None] * HOOK_ARGUMENTS[name])
    assert m.state == ({"seen": 2} if HOOKS[name].place == "driver" else {})


def test_the_state_is_not_hidden_from_other_methods_while_one_is_in_the_update():
    other = method("other")
    m = method("m", regularize=lambda self, terms: other.state.update(seen=1) or terms.logprobs)
    MethodStack([m, other]).call("regularize", m, make_terms())
    assert other.state == {"seen": 1}


# ---- who is told


class Listener(Watcher):
    """Keeps what it is told; it looks at batch 0 only."""

    name = "listener"
    needs = frozenset({"text"})

    def __init__(self):
        super().__init__()
        self.others, self.told = [], []

    def looks(self, batch):
        return batch == 0

    def watches(self, methods):
        self.others = [m.name for m in methods]

    def saw(self, hook, method, args, result, notes):
        self.told.append((hook, method, args, result, [note.text for note in notes]))


def test_a_watcher_is_told_of_every_driver_hook_with_the_notes_of_that_hook_alone():
    def noting(text, answer):
        return lambda self, *args: self.note(None, text) or answer

    m = method("m", start=noting("s", None), plan=noting("p", 5), rewards=noting("r", 6), regularize=noting("l", 7))
    listener = Listener()
    stack = MethodStack([m, listener])
    assert listener.others == ["m", "listener"] and stack.names == ["m"] and m.traced
    stack.start("a run")
    assert stack.call("plan", m, "a plan") == 5 and stack.call("rewards", m, "rows") == 6
    assert stack.call("regularize", m, "terms") == 7  # in the loss, so nobody is told
    assert stack.call("rewards", m, "more") == 6
    assert listener.told == [
        ("plan", "m", ("a plan",), 5, ["s", "p"]),
        ("rewards", "m", ("rows",), 6, ["r"]),
        ("rewards", "m", ("more",), 6, ["r"]),
    ]
    assert (stack.needs_now, stack.needs) == ({"text"}, {"text"}) and stack.state_dict("f")["methods"].keys() == {"m"}
    stack.batch = 1
    assert (stack.needs_now, stack.needs) == (set(), {"text"})
    alone = method("alone", plan=noting("p", 5))
    assert MethodStack([alone]).call("plan", alone, "a plan") == 5 and not alone.traced
    assert Watcher().looks(3) is True


# ---- errors


def test_what_a_watched_hook_may_not_do_is_refused_by_name(monkeypatch):
    """Ten entries are changed, of which eight are named."""
    given = {f"k{i}": torch.zeros(1) for i in range(10)}
    m = method(
        "m",
        rewards=lambda self, given: [x.add_(1) for x in given.values()],
        select=lambda self, given: torch.rand(1),
        plan=lambda self, given: self.state.update(kept=[len]),
        observe=lambda self, given: self.state.pop("kept"),
    )
    stack = MethodStack([m])
    stack.call("plan", m, given)  # nobody watches
    stack.call("observe", m, given)
    monkeypatch.setenv("RL_PLUGINS_DEBUG", "1")
    stack.call("observe", method("fine", observe=hook()), given)
    with raises(MethodError) as e:
        stack.call("rewards", m, given)
    names = ", ".join(f"`dict['k{i}']`" for i in range(8))
    assert f"`m` changed what it was given in `rewards`: {names}. " in str(e.value)
    with raises(MethodError, match="`m`.*generator of torch in `select`"):
        stack.call("select", m, given)
    with raises(MethodError, match=r"`m` keeps in `plan`.*self\.state\.kept\.0"):
        stack.call("plan", m, given)


@pytest.mark.parametrize("name", ["start", "observe"])
def test_a_hook_that_returns_nothing_and_has_a_yield_was_not_run(name):
    def with_yield(self, *args):
        yield args

    async def in_a_loop(self, *args):
        yield args

    for function in (with_yield, in_a_loop):
        m = method("m", **{name: function, "rollout": function})
        stack = MethodStack([m])
        with raises(MethodError, match=f"`m` failed in `{name}`: TypeError: it has a `yield`"):
            stack.call(name, m, None)
        assert stack.call("rollout", m, None) is not None


def test_all_that_methods_find_wrong_with_a_run_is_told_a_line_each():
    def exits(self, run):
        raise SystemExit(3)

    def refuses(self, run):
        raise ConfigError(f"{run} is too short.")

    MethodStack([method("fine")]).check("the run")
    with raises(ConfigError) as e:
        MethodStack([method("a", check=refuses), method("fine"), method("b", check=exits)]).check("the run")
    first, second = str(e.value).split("\n")
    assert first == "`a`: the run is too short." and second.startswith("`b` failed in `check`: SystemExit: 3.")


def test_statistics_a_hook_writes_into_reach_nobody():
    m = method("m", rewards=hook(lambda r: r.groups.size.zero_()))
    rollouts = make_rollouts([1.0, 0.0])
    assert rollouts.groups.size.tolist() == [2]
    MethodStack([m]).call("rewards", m, rollouts)
    assert rollouts.groups.size.tolist() == [2]


def test_an_error_names_method_hook_message_place_and_way_out():
    def observe(self, rollouts, tokens, stats):
        raise KeyError("the answer column")

    stack = MethodStack([method("broken", observe=observe)])
    with raises(MethodError) as e:
        one_step(stack, make_rollouts([1.0, 0.0]))
    text = str(e.value)
    assert text.startswith("Method `broken` failed in `observe`: KeyError: 'the answer column'\n")
    assert text.endswith("Remove `broken` from `methods` to go on without it.")
    assert "test_stack.py" in text and 'raise KeyError("the answer column")' in text  # where it happened
    assert "stack.py" not in text.replace("test_stack.py", "")  # not our own frame
    assert isinstance(e.value.__cause__, KeyError)


def test_errors_in_start_and_in_the_update_are_named_too():
    def fail(*args):
        raise ValueError("no")

    with raises(MethodError, match="`m`.*`start`.*ValueError"):
        start_stack(method("m", start=fail))
    stack = MethodStack([method("m", policy_loss=fail)])
    with raises(MethodError, match="`m`.*`policy_loss`.*ValueError"):
        stack.one("policy_loss", make_terms())
    assert stack.methods[0].state == {}  # back on the driver after the error


def test_an_interrupt_is_not_an_error_of_the_method():
    def interrupted(*args):
        raise KeyboardInterrupt

    stack = MethodStack([method("m", rewards=interrupted)])
    with pytest.raises(KeyboardInterrupt):
        one_step(stack, make_rollouts([1.0]))


# ---- asynchronous hooks


def test_a_coroutine_runs_to_its_end_in_its_place():
    async def rewards(self, rollouts):
        before = self.state.setdefault("calls", 0)
        scores = await asyncio.gather(*[self.judge(r) for r in rollouts.reward.tolist()])
        self.state["calls"] = before + 1
        return scores

    async def judge(self, reward):
        await asyncio.sleep(0.001)
        return reward + 1

    m = method("judged", rewards=rewards, judge=judge)
    decision = one_step(MethodStack([m]), make_rollouts([1.0, 2.0]))
    assert decision.rollouts.reward.tolist() == [2.0, 3.0] and m.state == {"calls": 1}

    async def in_update(self, terms):
        return self.state

    m = method("m", regularize=in_update)
    with raises(MethodError, match=r"`m`.*`regularize`"):
        MethodStack([m]).call("regularize", m, make_terms())


def test_a_coroutine_runs_inside_of_a_running_event_loop_too():
    async def rewards(self, rollouts):
        await asyncio.sleep(0.001)
        self.state["calls"] = 1
        return rollouts.reward + 1

    m = method("m", rewards=rewards)

    async def notebook():
        return one_step(MethodStack([m]), make_rollouts([1.0]))

    assert asyncio.run(notebook()).rollouts.reward.tolist() == [2.0] and m.state == {"calls": 1}


def test_an_error_in_a_coroutine_is_named():
    async def rewards(self, rollouts):
        await asyncio.sleep(0)
        raise TimeoutError("the judge does not answer")

    with raises(MethodError, match="`m`.*`rewards`.*TimeoutError"):
        one_step(MethodStack([method("m", rewards=rewards)]), make_rollouts([1.0]))


# ---- randomness


def draw(seed=0, name="m", purpose="p", step=0):
    m = method(name)
    stack = MethodStack([m], seed)
    stack.batch = step
    return m.rng(purpose).random(4).tolist()


def test_random_numbers_depend_on_seed_method_step_and_purpose_and_on_nothing_else():
    assert draw() == draw()
    changed = [draw(), draw(seed=1), draw(name="m2"), draw(purpose="q"), draw(step=1), draw(seed=10, step=0)]
    assert len({tuple(x) for x in changed}) == len(changed)
    assert draw(seed=1, step=11) != draw(seed=11, step=1)
    m = method("m")
    stack = MethodStack([m])
    assert m.rng("p").random() == m.rng("p").random()  # a fresh one every time
    a, b = method("a"), method("m")
    MethodStack([a, b])
    a.rng("p").random(100)
    assert b.rng("p").random(4).tolist() == draw()  # another method beside it changes nothing
    stack.batch += 1
    assert m.rng("p").random(4).tolist() == draw(step=1)


def test_a_run_that_is_resumed_with_a_later_version_draws_what_it_would_have_drawn():
    drawn = draw(seed=42, name="vade", purpose="prompts", step=3)[:2]
    assert drawn == pytest.approx([0.21950639219760015, 0.2692441574053209], rel=1e-14)


def test_global_generators_are_never_touched():
    def use(self, *args):
        self.rng("p").permutation(1000)

    members = dict.fromkeys(("plan", "rewards", "shape", "observe"), use)
    m = method("m", start=use, **members)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    stack = start_stack(m)
    stack.call("plan", m, make_plan())
    one_step(stack, make_rollouts([1.0, 0.0]))
    stack.state_dict("f")
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[2])
    assert np.array_equal(np.random.get_state()[1], before[1][1]) and np.random.get_state()[2:] == before[1][2:]


def test_outside_of_a_run_there_is_no_randomness():
    with raises(MethodError, match="`m`"):
        method("m").rng("p")


# ---- warnings and metrics


def test_a_warning_is_given_once_per_method_and_message(caplog):
    a, b = method("a"), method("b")
    MethodStack([a, b])
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        for _ in range(3):
            a.warn("odd")
            b.warn("odd")
        a.warn("even")
    assert caplog.messages == ["a: odd", "b: odd", "a: even"]
    caplog.clear()
    method("alone").warn("odd")
    assert caplog.messages == ["alone: odd"]


def test_logged_values_carry_the_name_of_the_method():
    a, b = method("a"), method("b")
    stack = MethodStack([a, b])
    a.log("x", 1.0)
    a.log("x", 4.0, weight=2)
    b.log("x", torch.tensor(5.0), "max")
    assert combine([stack.metrics.take()]) == {"a/x": 3.0, "b/x": 5.0}
    method("alone").log("x", 1.0)  # no run, no metric


def test_an_unusable_value_is_an_error_of_the_hook_that_logs_it():
    m = method("m", observe=lambda self, *args: self.log("x", torch.ones(2)))
    with raises(MethodError, match=r"`m`.*`observe`.*`m/x`.*2"):
        one_step(MethodStack([m]), make_rollouts([1.0]))


# ---- state


class Counter(Method):
    """Counts rows per step, in nested state with a tensor."""

    name = "counter"

    @dataclass(frozen=True)
    class Params(MethodParams):
        decay: float = param(0.5, "decay")
        edges: tuple[float, ...] = param((0.0, 1.0), "edges")

    def start(self, run):
        self.state = {"rows": 0, "mean": torch.zeros(2, dtype=torch.float64), "past": []}

    def observe(self, rollouts, tokens, stats):
        self.state["rows"] += len(rollouts)
        self.state["mean"] = self.params.decay * self.state["mean"] + rollouts.reward[:2]
        self.state["past"].append({"step": rollouts.batch})


class Stateless(Method):
    name = "stateless"

    @dataclass(frozen=True)
    class Params(MethodParams):
        scale: float = param(1.0, "scale")

    def rewards(self, rollouts):
        return rollouts.reward * self.params.scale


def counting(cls=Counter, steps=0, **params):
    stack = start_stack(cls(build_params(cls.Params, params, cls.name)), Stateless(), seed=3)
    for i in range(steps):
        one_step(stack, make_rollouts([float(i), 1.0, 2.0]))
    return stack


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def test_state_survives_the_disk_and_the_run_goes_on_as_if_nothing_had_happened(tmp_path):
    whole = counting(steps=5)
    first = counting(steps=2)
    first.extra_prompts, first.stats = 7, {"counter/x": 0.25}
    save_state(tmp_path, first.state_dict("data"))
    resumed = counting()
    resumed.load_state_dict(load_state(tmp_path), "data")
    assert plain(resumed.state_dict("data")) == plain(first.state_dict("data"))
    assert (resumed.batch, resumed.extra_prompts, resumed.stats) == (2, 7, {"counter/x": 0.25})
    for i in range(2, 5):
        one_step(resumed, make_rollouts([float(i), 1.0, 2.0]))
    assert plain(resumed.methods[0].state) == plain(whole.methods[0].state) and resumed.batch == whole.batch == 5
    assert resumed.methods[0].rng("p").random() == whole.methods[0].rng("p").random()


def test_what_was_saved_and_what_was_loaded_is_a_copy():
    stack = counting(steps=1)
    saved = stack.state_dict("data")
    kept = copy.deepcopy(saved)
    one_step(stack, make_rollouts([9.0, 9.0]))
    stack.methods[0].state["mean"].zero_()
    stack.stats["x"] = 1.0
    assert plain(saved) == plain(kept)
    other = counting()
    other.load_state_dict(saved, "data")
    one_step(other, make_rollouts([9.0, 9.0]))
    other.methods[0].state["mean"].zero_()
    other.stats["x"] = 1.0
    assert plain(saved) == plain(kept)


def test_what_the_state_dict_holds():
    saved = counting(steps=1).state_dict("data")
    counts = {"seed", "batch", "extra_prompts", "draw", "unrewarded", "unrewarded_in_a_row"}
    assert set(saved) == counts | {"carried", "stats", "fingerprint", "methods"}
    assert saved["batch"] == 1 and saved["fingerprint"] == "data"
    assert saved["methods"]["counter"]["params"] == {"decay": 0.5, "edges": [0.0, 1.0]}
    assert saved["methods"]["counter"]["version"] == 1 and saved["methods"]["stateless"]["state"] == {}
    bad = method("bad", start=lambda self, run: self.state.update(f=len))
    with raises(StateError, match=r"methods\.bad\.state\.f"):
        start_stack(bad).state_dict("data")


class NewVersion(Counter):
    state_version = 2


class Other(Counter):
    name = "other"


def without(*keys):
    return lambda saved: [saved.pop(k) for k in keys]


REFUSALS = {
    "of another version": (
        lambda: counting(NewVersion, 1),
        None,
        r"state of `counter` has version 1, this code reads 2\..*`counter` from `methods`",
    ),
    "of other parameters": (
        lambda: counting(decay=0.25, edges="0,2", steps=1),
        None,
        r"`counter` was made with other parameters \(decay: 0.5 -> 0.25, edges: \[0.0, 1.0\] -> \[0.0, 2.0\]\)",
    ),
    "with a parameter more": (
        lambda: counting(steps=1),
        lambda saved: saved["methods"]["counter"]["params"].update(old=3),
        r"other parameters \(old: 3 -> None\)",
    ),
    "of another dataset": (
        lambda: counting(steps=1),
        lambda saved: saved.update(fingerprint="5 rows"),
        r"`counter` belongs to another dataset \(fingerprint 5 rows, now data\)",
    ),
    "without the step": (
        lambda: counting(steps=1),
        lambda saved: (saved.pop("batch"), saved.update(written_by="0.0.7")),
        rf"lacks `batch`.*rl-plugins 0\.0\.7.*rl-plugins {__version__}.*version that wrote it",
    ),
    "foreign": (lambda: counting(steps=1), without("stats", "methods"), r"lacks `methods`, `stats`"),
    "with text as a number": (
        lambda: counting(steps=1),
        lambda saved: saved.update(batch="3"),
        r"not as this version of rl-plugins writes it: `batch` is '3' \(str\)",
    ),
    "with a number below 0": (lambda: counting(), lambda saved: saved.update(draw=-1), "`draw` is '-1' .int."),
    "with a truth as a number": (lambda: counting(), lambda saved: saved.update(extra_prompts=True), "`extra_prompts`"),
    "with no list of groups": (lambda: counting(), lambda saved: saved.update(carried={}), "`carried` is '{}' .dict."),
    "with a group that is none": (lambda: counting(), lambda saved: saved.update(carried=[[]]), "`carried.0` is '..'"),
    "with text as a statistic": (lambda: counting(), lambda saved: saved.update(stats={"a": "b"}), "`stats.a` is 'b'"),
    "with a number as fingerprint": (lambda: counting(), lambda saved: saved.update(fingerprint=3), "`fingerprint` is"),
    "with a list of methods": (lambda: counting(), lambda saved: saved.update(methods=[]), "`methods` is"),
    "with a method that is none": (
        lambda: counting(),
        lambda saved: saved["methods"].update(stateless=None),
        "`methods.stateless` is 'None'",
    ),
    "without a version": (
        lambda: counting(),
        lambda saved: saved["methods"]["counter"].pop("version"),
        r"`methods.counter` is \"{'params': {.{48}\" .dict.",
    ),
    "with text as version": (
        lambda: counting(),
        lambda saved: saved["methods"]["stateless"].update(version="1"),
        "`methods.stateless.version` is '1'",
    ),
    "with a list as parameters": (
        lambda: counting(),
        lambda saved: saved["methods"]["counter"].update(params=[]),
        "`methods.counter.params` is '..'",
    ),
    "with a list as state": (
        lambda: counting(),
        lambda saved: saved["methods"]["counter"].update(state=[1]),
        "`methods.counter.state` is '.1.'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_taken_over(case):
    make, change, message = REFUSALS[case]
    saved, stack = counting(steps=3).state_dict("data"), make()
    saved |= {"extra_prompts": 9, "stats": {"x": 1.0}}
    if change:
        change(saved)
    before = plain(stack.state_dict("now"))
    with raises(StateError, match=message):
        stack.load_state_dict(saved, "data")
    assert plain(stack.state_dict("now")) == before


def test_prompts_that_the_run_drew_itself_belong_to_the_dataset():
    drew = start_stack(Stateless())
    drew.extra_prompts = 5
    saved = drew.state_dict("data")
    own = [method("planner", **{h: hook()}) for h in ("plan", "select_prompts", "admit")]
    for planner in (*own, method("wide", rows_per_rollout=2)):
        stack = start_stack(planner)
        with raises(StateError, match=r"5.*data.*x"):
            stack.load_state_dict(saved, "x")
        assert stack.extra_prompts == 0
        stack.load_state_dict(saved, "data")
        assert stack.extra_prompts == 5
    start_stack(Stateless()).load_state_dict(saved, "x")  # draws none
    start_stack(method("planner", plan=hook())).load_state_dict({**saved, "extra_prompts": 0}, "x")  # drew none


def test_what_has_no_state_may_change_over_a_resume():
    saved = counting(steps=2).state_dict("data")
    for stack in (
        start_stack(Counter()),  # a method without state left
        start_stack(Counter(), Stateless(Stateless.Params(scale=3.0))),  # or has other parameters
        start_stack(Counter(), Stateless(), method("new", plan=hook())),  # or is new
    ):
        stack.load_state_dict(saved, "data")
        assert stack.methods[0].state["rows"] == 6 and stack.batch == 2
    no_state = start_stack(Stateless())
    one_step(no_state, make_rollouts([1.0]))
    fresh = start_stack(Stateless())
    fresh.load_state_dict(no_state.state_dict("data"), "another dataset")
    assert fresh.batch == 1


def test_a_method_that_first_fills_its_state_later_gets_it_back():
    class Late(Counter):
        name = "counter"
        needs = frozenset({"tokens"})

        def start(self, run):
            pass

        def observe(self, rollouts, tokens, stats):
            self.state["seen"] = len(tokens)

    saved = counting(Late, 1).state_dict("data")
    fresh = counting(Late)
    assert fresh.methods[0].state == {}
    fresh.load_state_dict(saved, "data")
    assert fresh.methods[0].state == {"seen": len(make_tokens(make_rollouts([0.0, 1.0, 2.0])))}
    for now, before in ((counting(Late, decay=0.25), saved), (counting(decay=0.25), counting(Late).state_dict("data"))):
        with raises(StateError, match="`counter`.*decay: 0.5 -> 0.25"):  # whichever of the two has state
            now.load_state_dict(before, "data")


# ---- resume: everything or nothing


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (["gdpo"], "Loaded: nothing. Dropped: {} waiting groups of `april`. Starting fresh: nothing."),
        ([], "Loaded: nothing. Dropped: {} waiting groups of `april`. Starting fresh: nothing."),
        (["april"], "Loaded: {} waiting groups of `april`. Dropped: nothing. Starting fresh: nothing."),
        (["gdpo", "april"], "Loaded: {} waiting groups of `april`. Dropped: nothing. Starting fresh: nothing."),
        (["april", "gdpo", "vade"], "Loaded: {} waiting groups of `april`. Dropped: nothing. Starting fresh: vade."),
        (["april", "gdpo"], "Loaded: {} waiting groups of `april`. Dropped: nothing. Starting fresh: nothing."),
    ],
)
@pytest.mark.parametrize("trace", [True, False], ids=["traced", "plain"])
def test_a_resume_says_in_one_line_what_is_loaded_and_what_is_dropped(now, told, trace, tmp_path, caplog, capsys):
    """A warning where the methods are others. The trace is none of them."""
    first = with_waiting_groups()
    save_run(tmp_path, first.state_dict("data"), 8)
    second = start_stack(*build_stack(now).methods, *trace_of(trace, "trace", str(tmp_path)))
    caplog.clear(), capsys.readouterr()
    with caplog.at_level("WARNING", "rl_plugins"):
        resumed(second, tmp_path)
    lines = [r.message for r in caplog.records]
    waiting, same = len(first.carried), now == ["april", "gdpo"]
    assert waiting and bool(lines) != same
    (line,) = lines or capsys.readouterr().out.splitlines()
    assert str(tmp_path) in line and f"step 8, rl-plugins {__version__}" in line
    assert f"[april, gdpo]; this run has methods: [{', '.join(now)}]. {told.format(waiting)}" in line
    assert second.batch == 4 and len(second.carried) == (waiting if "april" in now else 0)


def test_the_state_of_a_removed_method_is_dropped_and_a_new_one_begins_anew(tmp_path, caplog):
    save_run(tmp_path, counting(steps=3).state_dict("data"), 8)
    stack = start_stack(Other())
    before = plain(stack.methods[0].state)
    with caplog.at_level("WARNING", "rl_plugins"):
        resumed(stack, tmp_path)
    assert plain(stack.methods[0].state) == before and stack.batch == 3
    (line,) = [r.message for r in caplog.records]
    names = ", ".join(counting().methods[0].state)
    assert line.endswith(f"[other]. Loaded: nothing. Dropped: state of `counter` ({names}). Starting fresh: other.")


def resumed(stack, folder, fingerprint="data", step=8, batch=4):
    return resume(stack, folder, fingerprint=fingerprint, step=step, batch=batch)


def with_waiting_groups():
    """april and gdpo after four batches, with groups that wait."""
    run = Simulation(
        April(April.Params()),
        lambda prompt, drawn: [2 + prompt % 5, 9, 5 * (prompt % 7) + 3],
        groups=2,
        group_size=3,
        max_tokens=40,
        dataset_size=50,
    )
    for _ in range(4):
        run.batch()
    stack = start_stack(*build_stack(["april", "gdpo"]).methods)
    stack.load_state_dict(run.stack.state_dict("data"), "data")
    assert stack.carried and stack.extra_prompts
    return stack


def test_a_run_is_saved_and_resumed_with_everything_it_needs(tmp_path):
    first = with_waiting_groups()
    save_run(tmp_path, first.state_dict("data"), 8, inside=True)
    second = start_stack(*build_stack(["april", "gdpo"]).methods)
    record = resumed(second, tmp_path)
    assert record["inside"] is True and record["step"] == 8
    assert plain(second.state_dict("data")) == plain(first.state_dict("data")) and second.batch == 4


@pytest.mark.parametrize(
    "name",
    [
        *("best_perm", "difficulty_slices", "drive", "gdro_prompt", "gdro_rollout", "linear_ts"),
        *("mssr_baseline", "mssr_prompts", "ps_grpo", "vade", "xrpo_seeds"),
    ],
)
@pytest.mark.parametrize("rows", [15, 17])
def test_what_belongs_to_dataset_rows_is_not_resumed_with_another_dataset(name, rows, tmp_path):
    """Fingerprints of datasets of other lengths differ, so no method compares lengths again."""
    params = {"linear_ts": {"column": "kind"}, "best_perm": {"templates": ["{prompt}"]}}.get(name, {})

    def started(size):
        data = [{"prompt": f"p{i}", "kind": i % 2, "paraphrase_set_id": i // 2} for i in range(size)]
        run = make_run(dataset=data, dataset_size=size)
        return start_stack(*build_stack([name], {name: params}).methods, run=run), fingerprint(data)

    (stack, of_run), (other, now) = started(16), started(rows)
    save_run(tmp_path, stack.state_dict(of_run), 8)
    before = repr(plain(other.state_dict(now)))  # NaN is equal to NaN
    with pytest.raises(
        StateError, match=rf"`{name}` belongs to another dataset \(fingerprint 16 rows, .*, now {rows} rows, "
    ):
        resumed(other, tmp_path, fingerprint=now)
    assert repr(plain(other.state_dict(now))) == before
    assert resumed(started(16)[0], tmp_path, fingerprint=of_run)


NEED_THEIRS = {
    "keeps state": [lambda: Counter(), lambda: method("lazy", observe=hook())],
    "lets groups wait": [lambda: build_stack(["april"]).methods[0]],
    "decides which prompts come next": [
        lambda: method("chooses", select_prompts=hook()),
        lambda: method("plans", plan=hook()),
    ],
    "draws its own prompts": [lambda: method("wide", rows_per_rollout=2)],
}


@pytest.mark.parametrize(("why", "make"), [(why, make) for why, makes in NEED_THEIRS.items() for make in makes])
@pytest.mark.parametrize("folder", ["empty", "missing", "half"])
def test_without_its_state_such_a_run_is_not_resumed(why, make, folder, tmp_path):
    checkpoint = tmp_path / "checkpoint-8"
    if folder != "missing":
        checkpoint.mkdir()
    if folder == "half":
        (checkpoint / "rl_plugins.writing").mkdir()
    m = make()
    stack = start_stack(Stateless(), m)
    before = plain(stack.state_dict("now"))
    with raises(StateError) as e:
        resumed(stack, checkpoint)
    text = str(e.value)
    assert f"holds no state of methods, and {m.name} cannot resume without theirs (`{m.name}` {why})" in text
    assert "start a new run with that checkpoint as the model" in text
    assert ("rl_plugins.writing, which is not whole" in text) == (folder == "half")
    assert plain(stack.state_dict("now")) == before


def test_april_does_not_begin_anew_where_its_groups_were_lost(tmp_path):
    """The run that had groups waiting is not another run when the folder is gone."""
    save_run(tmp_path, with_waiting_groups().state_dict("data"), 8)
    shutil.rmtree(tmp_path / "rl_plugins")
    with raises(StateError, match="april"):
        resumed(start_stack(*build_stack(["april", "gdpo"]).methods), tmp_path)


@pytest.mark.parametrize("name", sorted(registry.all_names()))
def test_what_a_method_of_a_paper_needs_is_seen_before_it_has_any(name):
    """Those whose hooks write into `self.state` are all among those that need theirs."""
    found = registry.load(name)
    classes = [registry.load(part) for part in found.parts] if isinstance(found, Bundle) else [found]
    for cls in classes:
        writes = any("self.state" in inspect.getsource(c) for c in cls.__mro__ if c not in (Method, object))
        params = build_params(cls.Params, card_file(cls).example_params, name)
        assert not writes or needs_state(MethodStack([cls(params)])), name


def test_a_checkpoint_made_without_methods_is_resumed_by_those_that_need_nothing(tmp_path):
    stack = start_stack(Stateless(), *build_stack(["gdpo", "minpro"]).methods, *trace_of(True, "trace", str(tmp_path)))
    assert resumed(stack, tmp_path, batch=4) is None and needs_state(stack) == {}
    assert (stack.batch, stack.extra_prompts, stack.draw, stack.carried) == (4, 0, 0, [])


@pytest.mark.parametrize("saved_at", [4, 3, None, "8", 8.0, True])
def test_a_state_of_another_step_is_refused(saved_at, tmp_path):
    content = counting(steps=2).state_dict("data")
    if saved_at in (3, 4):
        save_run(tmp_path, content, saved_at)
    else:
        save_state(tmp_path, {**content, **({} if saved_at is None else {"step": saved_at})})
    stack = counting()
    before = plain(stack.state_dict("now"))
    with raises(StateError, match=rf"{saved_at!r}.*8"):
        resumed(stack, tmp_path)
    assert plain(stack.state_dict("now")) == before
    save_run(tmp_path, content, 8)
    assert resumed(stack, tmp_path)["step"] == 8 and stack.batch == 2


def test_the_step_is_the_one_of_the_save(tmp_path):
    """The state of the last boundary may be older than the checkpoint it is written into."""
    content = {**counting(steps=2).state_dict("data"), "step": 6}
    save_run(tmp_path, content, 8)
    assert resumed(counting(), tmp_path)["step"] == 8


BAD_GROUPS = {
    "its fields are others": lambda g: g.pop("drawn"),
    "the fields of `row` are others": lambda g: g["row"].update(given=[]),
    "`rollouts` or `drawn` has another type": lambda g: g.update(drawn=1.0),
    "`row.n` is '3'": lambda g: g["row"].update(n="3"),
    "`row.group` is True": lambda g: g["row"].update(group=True),
    "`row.edit` is .1.": lambda g: g["row"].update(edit=[1]),
    "`row.prefix` is not of token ids": lambda g: g["row"].update(prefix=[0.5]),
    "the fields of a rollout are others": lambda g: g["rollouts"][0].pop("finish"),
    "`tokens` of a rollout has another type": lambda g: g["rollouts"][0].update(tokens=[1, 2]),
    "`logprobs` of a rollout has another type": lambda g: g["rollouts"][0].update(
        logprobs=g["rollouts"][0]["logprobs"].float()
    ),
    "not one kind, log-prob and version per token": lambda g: g["rollouts"][0].update(
        kinds=g["rollouts"][0]["kinds"][1:]
    ),
}


@pytest.mark.parametrize("problem", BAD_GROUPS)
def test_a_waiting_group_that_is_not_one_is_refused(problem, tmp_path):
    content = with_waiting_groups().state_dict("data")
    BAD_GROUPS[problem](next(g for g in content["carried"] if g["rollouts"]))
    save_run(tmp_path, content, 8)
    stack = start_stack(*build_stack(["april", "gdpo"]).methods)
    with raises(StateError, match=f"{problem}"):
        resumed(stack, tmp_path)
    assert stack.batch == 0 and stack.carried == []


def test_plans_before_one_decision_draw_other_numbers():
    """Asynchronous hosts plan several times; a resumed run goes on with the next plan's numbers."""
    stack = counting(steps=0)
    draws = []
    for _ in range(3):
        stack.draw += 1
        draws.append(float(stack.rng("counter", "prompts").random()))
    assert len(set(draws)) == 3
    resumed = counting(steps=0)
    resumed.load_state_dict(stack.state_dict("data"), "data")
    assert resumed.draw == 3 and float(resumed.rng("counter", "prompts").random()) == draws[-1]
    first = counting(steps=0)
    first.draw = 1
    assert float(first.rng("counter", "prompts").random()) == float(
        counting(steps=0).rng("counter", "prompts").random()
    )


# ---- what mutants showed was not asked


def test_a_new_stack_has_drawn_nothing_and_lets_nothing_wait():
    stack = MethodStack([])
    assert (stack.batch, stack.draw, stack.extra_prompts) == (0, 0, 0)
    assert (stack.carried, stack.stats, stack.bundle_of) == ([], {}, {})
    assert (stack.unrewarded, stack.unrewarded_in_a_row, stack.max_unrewarded_batches) == (0, 0, 3)
    assert (stack.vocabulary, stack.idle_batches, stack.lr_scales, stack.stop_reason) == (None, {}, {}, "")
    assert stack.notes is None and MethodStack([Listener()]).notes == []


def test_the_exclusive_claimant_gets_every_argument():
    m = method("m", select_prompts=lambda self, pool, n: [pool, n])
    assert MethodStack([m]).one("select_prompts", "the pool", 3) == ["the pool", 3]


def test_a_method_without_state_does_not_hide_the_state_of_those_behind_it():
    saved = counting(steps=1).state_dict("data")
    behind = start_stack(Stateless(), Counter(build_params(Counter.Params, {"decay": 0.25}, "counter")), seed=3)
    with raises(StateError, match="`counter`"):
        behind.load_state_dict(saved, "data")


def test_groups_that_wait_are_resumed_by_a_method_that_admits_from_the_same_dataset_and_dropped_without_one():
    stack = MethodStack([method("m", admit=hook())])
    stack.carried = [{"row": {"prompt_index": 3}, "rollouts": [{"tokens": torch.tensor([1, 2])}]}]
    saved = stack.state_dict("data")
    assert plain(saved["carried"]) == plain(stack.carried)
    stack.carried = []
    other = MethodStack([method("m", admit=hook())])
    other.load_state_dict(saved, "data")
    assert other.carried[0]["rollouts"][0]["tokens"].tolist() == [1, 2]
    none = MethodStack([method("other", plan=hook())])
    none.load_state_dict(saved, "another")
    assert none.carried == []
    with raises(StateError, match="data.*the other"):
        MethodStack([method("m", admit=hook())]).load_state_dict(saved, "the other")


def test_a_built_stack_knows_of_which_bundle_a_method_is():
    assert build_stack(["echo"]).bundle_of == dict.fromkeys(
        ("echo_labels", "echo_tree", "echo_shaping", "echo_clip"), "echo"
    )
    assert build_stack(["vade"]).bundle_of == {}


def test_a_stack_is_built_with_the_seed_0_unless_told():
    assert build_stack(["vade"]).seed == MethodStack([]).seed == 0


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None])
def test_the_limit_of_batches_without_a_reward_is_a_whole_number(value):
    with raises(ConfigError, match="max_unrewarded_batches.*0"):
        check_max_unrewarded_batches(value, "max_unrewarded_batches")
    assert check_max_unrewarded_batches(0, "max_unrewarded_batches") == 0


def test_two_methods_that_decide_how_many_rollouts_prompts_get_are_refused():
    """The later one would win without a word; spare rollouts compose with either."""
    message = "`v0` and `v0_5` both decide how many rollouts prompts get, and only one can. Remove `v0` or `v0_5` from"
    with raises(ConfigError, match=message):
        build_stack(["v0", "v0_5"])
    with raises(ConfigError, match="`mssr_baseline`.*`v0`"):
        build_stack(["mssr_baseline", "v0"])
    assert build_stack(["v0", "mc_grpo"]).names == ["v0", "mc_grpo"]


def test_a_part_of_a_bundle_that_decides_it_too_is_refused_with_the_way_out():
    params = {"dots": {"embeddings": "embeddings.npy"}}
    message = "Remove `dots` or `v0` from `methods`. `dots` is part of `dots_rr`: write `-dots`."
    with raises(ConfigError, match=re.escape(message)):
        build_stack(["dots_rr", "v0"], params)
    assert build_stack(["dots_rr", "v0", "-dots"]).names == ["rollout_replay", "decoupled_ppo", "v0"]
    with raises(ConfigError, match="`advantages`.*`brpo`.*`methods`"):
        build_stack(["gdpo", "brpo"], {"brpo": {"judge": len}})


@pytest.mark.parametrize("other", ["april", "areal_admission"])
def test_whole_batches_are_refused_beside_groups_that_wait(other):
    together = type(
        "Together", (Method,), {"name": "together", "needs": {"whole_batches"}, "rewards": lambda self, r: None}
    )
    (waiting,) = build_stack([other]).methods
    for methods in ([together(), waiting], [waiting, together()]):
        with raises(ConfigError, match=f"`together`.*`{other}`"):
            MethodStack(methods)
    assert MethodStack([together()]).names == ["together"]


def test_every_two_built_in_methods_that_decide_it_are_refused():
    deciding = []
    for name in registry.all_names():
        cls = registry.load(name)
        if isinstance(cls, type):
            deciding.append(cls(build_params(cls.Params, card_file(cls).example_params, name)))
    deciding = [m for m in deciding if m.decides_rollouts]
    assert {"v0", "v0_5", "dots", "mssr_baseline"} <= {m.name for m in deciding}
    for one, other in itertools.combinations(deciding, 2):
        with raises(ConfigError, match=f"`{one.name}`.*`{other.name}`"):
            MethodStack([one, other])
