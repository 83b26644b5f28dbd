"""Turn control: the plain loop, reminders, extensions, calibration, and every way an episode can end."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import NEVER, SOON, Stuck

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Trajectory, together
from rl_plugins.core.rollouts import PlanRow, Rollouts
from rl_plugins.kit.agents import Observation, play
from rl_plugins.lab.demo.environments import Grid
from rl_plugins.methods.turn_control import CUT, TurnControl, turns_at
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import evaluation_plan
from rl_plugins.testing import make_plan, make_rollouts, make_tokens, one_step, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program


class Room:
    """`f` finishes, any other action is answered with the number of actions so far."""

    closed = 0

    def reset(self, columns: Any) -> Observation:
        self.actions: list[str] = []
        return Observation("go", state="start")

    def act(self, action: str) -> Observation:
        self.actions.append(action)
        n = len(self.actions)
        return Observation(f"n{n}", float(n), done=action == "f", valid=action in ("a", "f"), state=n)

    def score(self) -> float:
        return float("f" in self.actions)

    def close(self) -> None:
        type(self).closed += 1


class Plain(Method):
    """The plain loop of `agents`, to compare with."""

    name = "plain"

    def rollout(self, prompt: Any) -> Any:
        return (yield from together([play(prompt, Room, 6) for _ in range(prompt.n)]))


def control(environment: Any = Room, **params: Any) -> TurnControl:
    return TurnControl(build_params(TurnControl.Params, {"environment": environment, **params}, "turn_control"))


def policy(finish: float = 0.0, after: str = "", **options: Any) -> TableEngine:
    """Writes `a`, or `f` with a probability; `f` for sure once the text contains `after`."""

    def model(text: str) -> dict[str, float]:
        if text[-1] in "af":
            return {EOS: 1.0}
        if after and after in text:
            return {"f": 1.0}
        return {"a": 1 - finish, "f": finish}

    return TableEngine(model, **options)


def rollouts_of(method: Method, engine: TableEngine, text: str = "task", **options: Any) -> list[Trajectory]:
    return [rows[0] for rows in run_program(method, make_prompt(engine.chat, text, **options), engine)]


def text_of(engine: TableEngine, t: Trajectory) -> str:
    return engine.chat.decode(t.context)


def left_in(engine: TableEngine, t: Trajectory) -> list[int]:
    return [int(part.split()[-1]) for part in text_of(engine, t).split(" turns left")[:-1]]


def check_books(engine: TableEngine, t: Trajectory) -> None:
    """Sampled tokens have the log-prob of exactly this context; all others have none."""
    for i, (token, kind, logprob) in enumerate(zip(t.tokens, t.kinds, t.logprobs, strict=True)):
        if kind == Kind.SAMPLED:
            true = engine.probabilities(t.prompt + t.tokens[:i])[token]
            assert logprob == pytest.approx(math.log(true), abs=1e-9)
        else:
            assert math.isnan(logprob)
    inside = {i for turn in t.turns for i in range(turn.start, turn.stop)}
    assert inside == {i for i, kind in enumerate(t.kinds) if kind == Kind.SAMPLED}


# ---- the loop


def test_unlimited_is_the_plain_loop() -> None:
    mine = rollouts_of(control(strategy="unlimited", hard_cap=6), engine := policy(0.3, seed=5), n=12, max_tokens=200)
    plain = rollouts_of(Plain(), policy(0.3, seed=5), n=12, max_tokens=200)
    assert [(t.context, t.kinds, t.turns, t.finish) for t in mine] == [
        (t.context, t.kinds, t.turns, t.finish) for t in plain
    ]
    assert len({len(t) for t in mine}) > 2 and not any("REMINDER" in text_of(engine, t) for t in mine)
    for t in mine:
        check_books(engine, t)
        assert t.meta["stop_reason"] == ("done" if t.meta["done"] else "limit")
        assert t.meta["limit_final"] == 6 and t.meta["extended"] is False
        assert t.meta["score"] == float(t.meta["done"])


def test_fixed_reminds_before_every_turn() -> None:
    (t,) = rollouts_of(control(limit=3), engine := policy(), n=1, max_tokens=500)
    assert left_in(engine, t) == [3, 2, 1]
    assert "3 turns left to complete the task.>" in engine.chat.decode(t.prompt)  # the first is in the prompt
    assert engine.chat.decode(t.prompt).startswith("<task\ngo\nENVIRONMENT REMINDER")
    assert t.meta["stop_reason"] == "limit" and t.meta["turns"] == 3 and t.finish == "eos"
    trained = engine.chat.decode([x for x, k in zip(t.tokens, t.kinds, strict=True) if k == Kind.SAMPLED], special=True)
    assert trained == f"a{EOS}" * 3
    assert "turns left" in engine.chat.decode([x for x, k in zip(t.tokens, t.kinds, strict=True) if k == Kind.OBSERVED])
    check_books(engine, t)
    assert [(turn.anchor, turn.reward, turn.valid) for turn in t.turns] == [
        ("start", 1.0, True),
        (1, 2.0, True),
        (2, 3.0, True),
    ]


@pytest.mark.parametrize(("remind_from", "left"), [(None, [4, 3, 2, 1]), (2, [2, 1]), (0, [])])
def test_when_it_reminds(remind_from: int | None, left: list[int]) -> None:
    (t,) = rollouts_of(control(limit=4, remind_from=remind_from), engine := policy(), n=1, max_tokens=800)
    assert left_in(engine, t) == left
    assert t.meta["turns"] == 4


def test_done_at_the_limit_is_done() -> None:
    (t,) = rollouts_of(control(limit=3), policy(after="n2"), n=1, max_tokens=500)
    assert (t.meta["turns"], t.meta["stop_reason"], t.meta["done"]) == (3, "done", True)
    (t,) = rollouts_of(control(limit=2), policy(after="n2"), n=1, max_tokens=500)
    assert (t.meta["turns"], t.meta["stop_reason"], t.meta["done"]) == (2, "limit", False)


def test_dynamic_extends_once_those_that_are_not_done() -> None:
    method = control(strategy="dynamic", limit=2, extension=3)
    (t,) = rollouts_of(method, engine := policy(), n=1, max_tokens=900)
    assert left_in(engine, t) == [2, 1, 3, 2, 1]
    assert (
        "additional 3 turns to continue and complete the task.\nENVIRONMENT REMINDER: You have 3 turns left"
        in text_of(engine, t)
    )
    assert (t.meta["turns"], t.meta["limit_final"], t.meta["extended"]) == (5, 5, True)
    assert t.meta["stop_reason"] == "extended_limit"
    check_books(engine, t)
    (t,) = rollouts_of(method, policy(after="n1"), n=1, max_tokens=900)
    assert (t.meta["turns"], t.meta["extended"], t.meta["stop_reason"]) == (2, False, "done")
    (t,) = rollouts_of(method, policy(after="n3"), n=1, max_tokens=900)
    assert (t.meta["turns"], t.meta["extended"], t.meta["stop_reason"]) == (4, True, "done")


def test_extensions_are_counted_and_default_to_half_the_limit() -> None:
    (t,) = rollouts_of(control(strategy="dynamic", limit=3, max_extensions=2), policy(), n=1, max_tokens=2000)
    assert (t.meta["turns"], t.meta["limit_final"]) == (7, 7)  # 3 + 2 + 2
    (t,) = rollouts_of(control(strategy="dynamic", limit=3, max_extensions=0), policy(), n=1, max_tokens=2000)
    assert (t.meta["turns"], t.meta["stop_reason"]) == (3, "limit")


def test_dynamic_without_extension_is_fixed() -> None:
    dynamic = control(strategy="dynamic", limit=3, extension=0)
    a, b = (rollouts_of(m, policy(0.2, seed=3), n=8, max_tokens=500) for m in (dynamic, control(limit=3)))
    assert [(t.context, t.meta["stop_reason"]) for t in a] == [(t.context, t.meta["stop_reason"]) for t in b]


def raises(environment: Any) -> bool:
    raise ValueError("no idea")


@pytest.mark.parametrize(
    ("rule", "turns"), [(lambda e: len(e.actions) == 2, 4), (lambda e: False, 2), (raises, 2), (lambda e: "yes", 4)]
)
def test_who_gets_more_is_the_users_to_say(rule: Any, turns: int) -> None:
    method = control(strategy="dynamic", limit=2, extension=2, should_extend=rule)
    (t,) = rollouts_of(method, policy(), n=1, max_tokens=900)
    assert t.meta["turns"] == turns and t.meta["extended"] == (turns == 4)


def test_it_stops_where_nothing_more_fits() -> None:
    (t,) = rollouts_of(control(limit=9), engine := policy(), n=1, max_tokens=150)
    assert (t.meta["stop_reason"], t.finish, t.meta["done"]) == ("length", "length", False)
    assert 0 < t.meta["turns"] < 9 and t.kinds[-1] == Kind.SAMPLED  # no observation that nobody answers
    check_books(engine, t)
    (t,) = rollouts_of(control(limit=9), policy(), n=1, max_tokens=20, max_context=30)  # the prompt alone is longer
    assert (len(t), t.meta["turns"], t.meta["stop_reason"], t.turns) == (0, 0, "length", ())


def test_a_turn_has_a_limit_of_its_own() -> None:
    engine = TableEngine(lambda text: {"a": 1.0})
    (t,) = rollouts_of(control(limit=2, turn_tokens=5), engine, n=1, max_tokens=500)
    assert [turn.stop - turn.start for turn in t.turns] == [5, 5] and [turn.valid for turn in t.turns] == [False] * 2


def test_an_interrupted_turn_goes_on() -> None:
    def model(text: str) -> dict[str, float]:
        begun = text[text.rindex(">") + 1 :]
        return {"abcd"[len(begun)] if len(begun) < 4 else EOS: 1.0}

    whole, parts = (
        rollouts_of(control(limit=2, turn_tokens=4), TableEngine(model, abort_after=k), n=1, max_tokens=500)
        for k in (None, 1)
    )
    assert whole[0].tokens == parts[0].tokens and whole[0].turns == parts[0].turns
    (t,) = rollouts_of(control(limit=2), TableEngine(model, abort_after=0), n=1, max_tokens=500)
    assert (len(t), t.meta["stop_reason"], t.meta["turns"]) == (0, "aborted", 0)


class Raises(Room):
    def act(self, action: str) -> Observation:
        raise OSError("out of order")


class Hangs(Room):
    hang: Any

    def act(self, action: str) -> Observation:
        type(self).hang()
        return super().act(action)


@pytest.mark.parametrize(("environment", "error"), [(Raises, "OSError: out of order"), (Hangs, "TimeoutError")])
def test_a_broken_environment_ends_the_episode(
    environment: Any, error: str, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hangs, "hang", stuck, raising=False)
    timeout = SOON if environment is Hangs else NEVER
    (t,) = rollouts_of(control(environment, limit=3, timeout=timeout), engine := policy(), n=1, max_tokens=500)
    assert stuck.waiting == (environment is Hangs)
    assert t.meta["stop_reason"] == "error" and t.meta["error"].startswith(error)
    assert [turn.valid for turn in t.turns] == [False] and math.isnan(t.meta["score"]) and not t.meta["done"]
    check_books(engine, t)


def test_a_rollout_without_an_environment_is_a_row_without_a_reward() -> None:
    made: list[Room] = []

    class Sometimes(Room):
        def reset(self, columns: Any) -> Observation:
            made.append(self)
            if len(made) == 2:
                raise OSError("no port")
            return super().reset(columns)

    Sometimes.closed = 0
    rows = rollouts_of(control(Sometimes, limit=1), policy(), n=4, max_tokens=500, reward_names=("r", "s"))
    assert Sometimes.closed == 4  # every one is closed, and the one that failed
    (row,) = (t for t in rows if t.meta["error"])
    assert row.tokens == () == row.turns and set(row.rewards or {}) == {"r", "s"}
    assert all(math.isnan(r) for r in (row.meta["score"], *(row.rewards or {}).values()))
    assert (row.meta["stop_reason"], row.meta["turns"], row.meta["done"]) == ("error", 0, False)
    assert sum(t.rewards is None and t.meta["turns"] == 1 for t in rows) == 3


def test_a_prompt_alone_and_among_others_is_the_same() -> None:
    method, options = control(strategy="dynamic", limit=2), dict(n=3, max_tokens=900)
    alone = [rollouts_of(method, policy(0.2, seed=1), text, **options) for text in ("x", "y", "z")]
    engine = policy(0.2, seed=1)
    together_ = run_program(method, [make_prompt(engine.chat, t, **options) for t in ("x", "y", "z")], engine)
    assert [[rows[0].context for rows in prompt] for prompt in together_] == [[t.context for t in p] for p in alone]


def test_the_demo_environment() -> None:
    row = next(r for r in Grid.rows(20, levels=[1]) if Grid.optimal_steps(r) == 4)
    moves = Grid.expert(row)

    def model(text: str) -> dict[str, float]:
        turn = text.count(EOS)
        return {EOS: 1.0} if text[-1] in "udlr" else {moves[turn]: 1.0}

    for limit, score in ((4, 1.0), (3, 0.0)):
        engine = TableEngine(model)
        (t,) = rollouts_of(
            control(Grid, limit=limit), engine, row["prompt"][0]["content"], n=1, max_tokens=900, columns=row
        )
        assert (t.meta["turns"], t.meta["score"], t.meta["done"]) == (limit, score, bool(score))
        assert [turn.reward for turn in t.turns][-1] == score


# ---- calibration


@settings(max_examples=60, deadline=None)
@given(
    episodes=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30),
    q=st.integers(0, 100),
)
def test_percentile_equals_the_loop(episodes: list[tuple[int, bool]], q: int) -> None:
    turns, cut = [t for t, _ in episodes], [c for _, c in episodes]
    known = sorted(t for t, c in episodes if not c)
    place = Fraction((len(episodes) - 1) * q, 100)
    low, high = int(place), min(math.ceil(place), len(episodes) - 1)
    if high >= len(known):
        expected = max(turns) + 1
    else:
        expected = math.ceil(known[low] * (1 - (place - low)) + known[high] * (place - low))
    assert turns_at(q, turns, cut) == expected


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_percentiles_without_cut_episodes_are_numpys(turns: list[int]) -> None:
    found = [turns_at(q, turns, [False] * len(turns)) for q in (25, 50, 75)]
    assert found == [math.ceil(np.percentile(turns, q) - 1e-9) for q in (25, 50, 75)]
    assert found == sorted(found)
    assert turns_at(75, [7], [False]) == 7
    assert turns_at(75, [7], [True]) == 8


def episodes(turns: Any, reasons: Any = "done", extended: Any = False, **changes: Any) -> Rollouts:
    n = len(turns)
    meta = {
        "turns": list(turns),
        "stop_reason": [reasons] * n if isinstance(reasons, str) else list(reasons),
        "extended": [extended] * n if isinstance(extended, bool) else list(extended),
    }
    return make_rollouts(torch.arange(n) % 2 * 1.0, meta=meta, **changes)


def seen(stack: Any, rollouts: Rollouts) -> dict[str, float]:
    stack.call("observe", stack.methods[-1], rollouts, make_tokens(rollouts), {})
    return combine([stack.metrics.take()])


def payload_of(stack: Any) -> Any:
    given = make_plan(2, 4)
    planned = stack.call("plan", stack.methods[-1], given)
    return None if planned is None else planned.rows[1].payload["turn_control"]


def test_the_limit_comes_from_the_first_episodes_and_stays() -> None:
    stack = start_stack(control(calibration_episodes=8, hard_cap=30))
    assert payload_of(stack) is None
    logged = seen(stack, episodes([2, 4, 6, 8]))
    assert payload_of(stack) is None and logged["turn_control/limit"] == 30
    logged = seen(stack, episodes([10, 12, 14, 30], ["done", "done", "done", "limit"]))
    # of 2 4 6 8 10 12 14 and one that was cut off: place 5.25 of 0..7, between 12 and 14
    assert payload_of(stack) == {"limit": 13, "extension": 0, "last": 13}
    assert logged["turn_control/limit"] == logged["turn_control/last_limit"] == 13
    assert logged["turn_control/limited"] == 0.25 and logged["turn_control/turns"] == 16.5
    seen(stack, episodes([1] * 16))
    assert payload_of(stack) == {"limit": 13, "extension": 0, "last": 13}


def test_dynamic_limits_are_two_percentiles() -> None:
    stack = start_stack(control(strategy="dynamic", calibration_episodes=5))
    logged = seen(stack, episodes([2, 4, 6, 8, 10]))
    assert payload_of(stack) == {"limit": 6, "extension": 2, "last": 8}
    assert (logged["turn_control/limit"], logged["turn_control/last_limit"]) == (6, 8)
    stack = start_stack(control(strategy="dynamic", calibration_episodes=5, extension=7, min_turns=9))
    seen(stack, episodes([2, 4, 6, 8, 10]))
    assert payload_of(stack) == {"limit": 9, "extension": 7, "last": 16}


def test_extensions_never_go_beyond_the_last_percentile() -> None:
    for most, (extension, turns) in ((1, (5, [6, 11])), (2, (3, [6, 9, 11])), (4, (2, [6, 8, 10, 11])), (0, (0, [6]))):
        stack = start_stack(control(strategy="dynamic", calibration_episodes=5, max_extensions=most))
        logged = seen(stack, episodes([2, 4, 6, 11, 12]))
        limits = payload_of(stack)
        assert limits == {"limit": 6, "extension": extension, "last": turns[-1]}
        assert logged["turn_control/last_limit"] == turns[-1]
        (t,) = rollouts_of(stack.methods[0], engine := policy(), n=1, max_tokens=5000, payload={"turn_control": limits})
        assert (t.meta["turns"], t.meta["limit_final"]) == (turns[-1], turns[-1])
        left = left_in(engine, t)  # the first that is said after each extension is what it adds
        told = [left[at] for at in [0, *turns[:-1]]]
        assert told == [turns[0], *[b - a for a, b in pairwise(turns)]]
        assert ("additional 1 turns " in text_of(engine, t)) == (most == 4)  # what is granted, not what was planned


def test_no_limit_exceeds_the_cap() -> None:
    stack = start_stack(control(strategy="dynamic", calibration_episodes=5, extension=7, max_extensions=3, hard_cap=11))
    seen(stack, episodes([2, 4, 6, 8, 10]))
    assert payload_of(stack) == {"limit": 6, "extension": 7, "last": 11}
    method = control(strategy="dynamic", limit=4, extension=3, max_extensions=9, hard_cap=8)
    (t,) = rollouts_of(method, engine := policy(), n=1, max_tokens=5000)
    assert t.meta["turns"] == 8 and all(f"additional {n} turns" in text_of(engine, t) for n in (3, 1))
    (t,) = rollouts_of(control(strategy="dynamic", limit=4, hard_cap=5), policy(), n=1, max_tokens=5000)
    assert t.meta["turns"] == 5  # half of the limit would be 6 in all


def test_an_evaluation_has_the_calibrated_limit() -> None:
    stack = start_stack(control(calibration_episodes=4))
    rows = [PlanRow(-1, i, 2, edit={"prompt": "q"}) for i in range(3)]
    assert [r.payload for r in evaluation_plan(stack, rows)] == [None] * 3
    seen(stack, episodes([3, 3, 3, 9]))
    planned = evaluation_plan(stack, rows)
    assert [r.payload["turn_control"]["limit"] for r in planned] == [5] * 3 and [r.n for r in planned] == [2] * 3
    (t, _) = rollouts_of(
        stack.methods[0], engine := policy(), n=2, max_tokens=900, payload=planned[0].payload, training=False
    )
    assert left_in(engine, t) == [5, 4, 3, 2, 1] and t.meta["limit_final"] == 5


def test_rolling_limits_follow_the_window() -> None:
    params = dict(calibration="rolling", calibration_episodes=4, window=4, update_every=2, limit=5)
    stack = start_stack(control(**params))
    assert payload_of(stack) is None  # the configured limit, which the rollouts know themselves
    seen(stack, episodes([8] * 4))
    assert payload_of(stack)["limit"] == 8
    seen(stack, episodes([3] * 4))
    assert payload_of(stack)["limit"] == 3  # batch 2
    seen(stack, episodes([9] * 4))
    assert payload_of(stack)["limit"] == 3  # batch 3: not yet
    seen(stack, episodes([9] * 4))
    assert payload_of(stack)["limit"] == 9


def test_limits_do_not_ratchet_down() -> None:
    """Limits learned from episodes that limits cut off stay where the unrestricted ones put them."""
    rng = np.random.default_rng(0)
    stack = start_stack(control(calibration="rolling", calibration_episodes=64, window=64, update_every=1))
    true = math.ceil(np.percentile(rng.geometric(0.1, 20_000).clip(max=50), 75))
    limit, limits = 50, []
    for _ in range(150):
        wanted = rng.geometric(0.1, 32)
        cut = wanted > limit
        seen(stack, episodes(np.minimum(wanted, limit).tolist(), np.where(cut, "limit", "done").tolist()))
        given = payload_of(stack)
        limit = given["limit"] if given else limit
        limits.append(limit)
    assert true == 13 and abs(np.mean(limits[-100:]) - true) < 2  # with cut episodes counted as they are: 8 to 9
    assert min(limits) < true < max(limits[-20:])  # a limit that fell too low rises again


def test_broken_and_foreign_episodes_do_not_count() -> None:
    stack = start_stack(control(calibration_episodes=4))
    logged = seen(stack, episodes([5, 5, 40, 40], ["done", "done", "error", "error"]))
    assert payload_of(stack) is None and logged["turn_control/failed"] == 0.5 and logged["turn_control/turns_75"] == 5
    rows_of_others = episodes([None] * 4, [None] * 4, [None] * 4)
    assert "turn_control/turns" not in seen(stack, rows_of_others)
    sub_agents = episodes([5, 9, 5, 9], index=torch.tensor([0, 1, 0, 1]))
    assert seen(stack, sub_agents)["turn_control/turns"] == 5
    assert payload_of(stack)["limit"] == 5


def test_the_payload_sets_the_limits_beside_others() -> None:
    stack = start_stack(control(strategy="dynamic", calibration_episodes=2))
    seen(stack, episodes([2, 2, 3, 3]))
    given = make_plan(1, 4)
    given = given.replace(rows=tuple(r.replace(payload={"other": 1}) for r in given.rows))
    payload = stack.call("plan", stack.methods[0], given).rows[0].payload
    assert payload == {"other": 1, "turn_control": {"limit": 3, "extension": 0, "last": 3}}
    method = stack.methods[0]
    (t,) = rollouts_of(method, engine := policy(), n=1, max_tokens=900, payload=payload)
    assert left_in(engine, t) == [3, 2, 1] and t.meta["stop_reason"] == "limit"
    payload["turn_control"] |= {"extension": 1, "last": 4}
    (t,) = rollouts_of(method, policy(), n=1, max_tokens=900, payload=payload)
    assert t.meta["turns"] == 4
    (t,) = rollouts_of(method, engine := policy(), n=1, max_tokens=5000)  # no payload: unrestricted, and not told
    assert t.meta["turns"] == 50 and left_in(engine, t) == []
    (t,) = rollouts_of(control(limit=2, calibration="freeze"), engine := policy(), n=1, max_tokens=900, training=False)
    assert left_in(engine, t) == [2, 1]  # evaluation: as configured


def test_rows_that_were_cut_off_are_graded_or_masked() -> None:
    reasons = ["done", "limit", "length", "error", "done", "extended_limit", "done", "done"]
    for unfinished in ("grade", "mask"):
        stack = start_stack(control(strategy="unlimited", unfinished=unfinished))
        decision = one_step(stack, episodes(range(1, 9), reasons, [r == "extended_limit" for r in reasons]))
        left = [unfinished == "mask" and r in CUT for r in reasons]
        assert decision.trained.tolist() == [not x for x in left]
        logged = combine([stack.metrics.take()])
        assert logged["turn_control/done"] == 0.5 and logged["turn_control/extended"] == 0.125
        assert logged["turn_control/limited"] == 0.25 and logged["turn_control/length"] == 0.125


def test_a_resumed_run_plans_alike() -> None:
    first = start_stack(control(calibration_episodes=4, strategy="dynamic"))
    seen(first, episodes([3, 5, 7, 9]))
    second = start_stack(control(calibration_episodes=4, strategy="dynamic"))
    second.load_state_dict(first.state_dict("data"), "data")
    assert payload_of(second) == payload_of(first) == {"limit": 6, "extension": 2, "last": 8}
    assert start_stack(control(strategy="unlimited")).methods[0].state == {}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"environment": None}, "rl_plugins.lab.demo.environments:Grid"),
        ({"strategy": "unlimited", "limit": 3}, "`limit` has no effect"),
        ({"extension": 3}, "`extension` has no effect"),
        ({"calibration": "off"}, "`calibration` is off and `limit` is not given"),
        ({"strategy": "dynamic", "percentile": 80}, "above `last_percentile` = 75"),
        ({"calibration_episodes": 600}, "only the last `window` = 512"),
        ({"min_turns": 60}, "above `hard_cap` = 50"),
        ({"limit": 2, "reminder": "{rest} left"}, "cannot be filled in"),
        ({"strategy": "dynamic", "extension_text": "{} more"}, "cannot be filled in"),
        ({"limit": 0}, "`limit` is 0"),
        ({"limit": 51}, "`limit` is 51 turns, above `hard_cap` = 50"),
        ({"strategy": "dynamic", "limit": 40, "extension": 11}, "`limit` and `extension` are 51 turns"),
        ({"percentile": 101}, "`percentile` is 101"),
        ({"timeout": 0}, "`timeout` is 0"),
        ({"strategy": "endless"}, "'unlimited', 'fixed', 'dynamic'"),
    ],
)
def test_parameters_that_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        control(**params)
