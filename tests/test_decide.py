"""What becomes of a generated batch. Every return value is checked."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from one_method import UNREADABLE, Exits, method, refused

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.rollouts import Shape, TurnTable
from rl_plugins.runtime import validate
from rl_plugins.runtime.decide import check_full, decide, decide_advantages, select_rows
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.validate_programs import LARGEST_LOGPROB
from rl_plugins.testing import make_rollouts, make_tokens, one_step, start_stack
from rl_plugins.testing.data import make_step_rewards, make_token_ids

NAN, INF = math.nan, math.inf
PER_ROW = {"group", "prompt_index", "rollout", "index", "rewards", "reward", "length", "truncated", "kept", "version"}
PER_ROW |= {"newest_version"}

# ---- decisions


def run(methods, rollouts, tokens=None, host=None, budget=None, estimator=grpo_advantages, stack=None):
    stack = MethodStack(list(methods)) if stack is None else stack
    tokens = make_tokens(rollouts) if tokens is None else tokens
    return decide(stack, rollouts, tokens, host, estimator, len(rollouts) if budget is None else budget)


def test_hooks_run_in_the_order_of_a_step_and_methods_in_the_order_of_the_flag():
    calls = []

    def recorder(name, **answers):
        def record(hook):
            def function(*args):
                calls.append(f"{hook} {name}")
                return answers.get(hook)

            return function

        return method(name, **{h: record(h) for h in ("rewards", "select", "shape", "observe")})

    keep = torch.ones(4, dtype=torch.bool)
    stack = MethodStack([recorder("b", select=keep), recorder("a", rewards=[1.0, 0, 0, 0])])
    stack.methods.append(method("c", advantages=lambda r: calls.append("advantages c") or r.reward))
    stack = MethodStack(stack.methods)
    stack.batch = 8
    decision = run([], make_rollouts([0.0, 1, 0, 1]), stack=stack)
    assert calls == [
        "rewards b",
        "rewards a",
        "select b",
        "select a",
        "advantages c",
        "shape b",
        "shape a",
        "observe b",
        "observe a",
    ]
    assert stack.batch == 9 and decision.estimator == "c" and tuple(decision.rewarded_by) == ("a",)


@pytest.mark.parametrize(
    "gives", [(), ("factor",), ("advantages",), ("factor", "advantages"), ("advantages", "factor")]
)
@pytest.mark.parametrize("host", [False, True])
def test_advantages_by_rows_are_those_of_their_tokens(gives, host):
    """What a row has is told without a look at its tokens where no hook told them apart."""
    draw = torch.Generator().manual_seed(len(gives) + 2 * host)
    rewards, lengths = torch.rand(6, generator=draw).double(), [3, 0, 5, 1, 4, 2]
    rollouts = make_rollouts(rewards, group=[0, 0, 0, 1, 1, 1], lengths=lengths)
    keep, stays = torch.rand(15, generator=draw) > 0.3, torch.tensor([True, True, False, True, True, True])
    given = torch.rand(6, generator=draw).double() if host else None
    found = {"factor": torch.rand(6, generator=draw).double(), "advantages": torch.rand(15, generator=draw).double()}
    own = given if host else grpo_advantages(rollouts)
    row = make_tokens(rollouts).row
    wanted = own[row]
    for what in gives:
        wanted = wanted * found["factor"][row] if what == "factor" else found["advantages"]
    names = {"factor": "row_factor", "advantages": "advantages"}
    stack = [
        method(f"m{i}", shape=lambda r, t, w=w: Shape(**{names[w]: found[w]}), needs={"tokens"})
        for i, w in enumerate(gives)
    ]
    stack.append(method("last", shape=lambda r, t: Shape(keep_rows=stays, keep_tokens=keep), needs={"tokens"}))
    d = run(stack, rollouts, host=given)
    live = keep & stays[row]
    assert torch.equal(d.keep_tokens, live) and torch.equal(d.advantages, torch.where(live, wanted, 0.0))
    of = [wanted[live & (row == i)] for i in range(6)]
    assert d.trained.tolist() == [len(x) > 0 for x in of]
    mean = [float(x.mean()) if len(x) else 0.0 for x in of]
    assert d.row_advantages.tolist() == pytest.approx(mean, rel=1e-15, abs=0)
    assert d.uniform == all(len(set(x.tolist())) < 2 for x in of) == ("advantages" not in gives)


def test_only_what_select_kept_is_in_the_statistics():
    rewards = [9.0, 1.0, 0.0, 5.0, 3.0, 3.0]
    group = [0, 0, 0, 1, 1, 1]
    keep = torch.tensor([False, True, True, True, False, True])
    seen = {}

    def advantages(r):
        seen["advantages"] = r.reward.tolist(), r.group.tolist(), r.kept.tolist(), r.rollout.tolist(), r.text
        return r.reward - r.groups.rows(r.groups.mean(r.reward))

    def shape(r, t):
        seen["shape"] = r.reward.tolist(), t.row.tolist(), t.advantages.tolist()

    m = method(select=lambda r: keep, advantages=advantages, shape=shape)
    rollouts = make_rollouts(rewards, group, lengths=[2, 1, 2, 1, 3, 1], text=list("abcdef"))
    decision = run([m], rollouts)
    assert seen["advantages"] == ([1.0, 0.0, 5.0, 3.0], [0, 0, 1, 1], [True] * 4, [1, 2, 0, 2], ["b", "c", "d", "f"])
    assert seen["shape"] == ([1.0, 0.0, 5.0, 3.0], [0, 1, 1, 2, 3], [0.5, -0.5, -0.5, 1.0, -1.0])
    assert decision.row_advantages.tolist() == [0.0, 0.5, -0.5, 1.0, 0.0, -1.0]
    assert decision.advantages.tolist() == [0, 0, 0.5, -0.5, -0.5, 1.0, 0, 0, 0, -1.0]
    assert decision.trained.tolist() == keep.tolist() == decision.rollouts.kept.tolist()
    assert decision.keep_tokens.tolist() == [False, False, True, True, True, True, False, False, False, True]
    assert decision.rollouts.reward.tolist() == rewards


def test_several_selects_are_combined_and_a_later_one_sees_what_left():
    seen = []
    first = method("first", select=lambda r: torch.tensor([True, True, False, True]))
    second = method("second", select=lambda r: seen.append(r.kept.tolist()) or r.reward > 0)
    third = method("third", select=lambda r: None)
    decision = run([first, second, third], make_rollouts([1.0, 0.0, 1.0, 1.0]))
    assert seen == [[True, True, False, True]] and decision.trained.tolist() == [True, False, False, True]


HOST = torch.tensor([0.5, -0.5, 0.25, -0.25], dtype=torch.float32)


def test_the_hosts_advantages_are_used_as_they_are_when_nothing_changed():
    methods = [
        method("a", select=lambda r: torch.ones(4, dtype=torch.bool)),
        method("b", rewards=lambda r: None),
        method("c", shape=lambda r, t: None, observe=lambda r, t, s: None),
    ]
    decision = run(methods, make_rollouts([1.0, 0, 1, 0]), host=HOST)
    assert decision.estimator == "host" and decision.row_advantages.tolist() == HOST.tolist()
    assert decision.uniform and decision.rewarded_by == {} and decision.old_logprobs is None


@pytest.mark.parametrize(
    "m",
    [
        method(rewards=lambda r: r.reward),
        method(select=lambda r: torch.tensor([True, True, True, False])),
        None,  # the plan was not the host's own, so it has none
    ],
)
def test_otherwise_our_estimator_takes_their_place(m):
    given = []

    def estimator(rollouts):
        given.append(rollouts.reward.tolist())
        return grpo_advantages(rollouts, "none")

    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0])
    decision = run([m] if m else [], rollouts, host=HOST if m else None, estimator=estimator)
    kept = decision.trained
    expected = grpo_advantages(rollouts.subset(kept), "none")
    assert decision.estimator == "rl_plugins" and decision.row_advantages[kept].tolist() == expected.tolist()
    assert given == [rollouts.reward[kept].tolist()]


def test_rows_without_a_reward_get_advantage_0_whoever_makes_it():
    rollouts = make_rollouts([1.0, NAN, 0.0, 5.0])
    claimed = run([method(advantages=lambda r: torch.tensor([1.0, NAN, 2.0, 4.0]))], rollouts)
    assert claimed.row_advantages.tolist() == [1.0, 0.0, 2.0, 4.0]
    claimed = run([method(advantages=lambda r: torch.tensor([1.0, 9.0, 2.0, 4.0]))], rollouts)
    assert claimed.row_advantages.tolist() == [1.0, 0.0, 2.0, 4.0]
    refused(
        lambda: run([method("odd", advantages=lambda r: torch.tensor([1.0, 2.0, NAN, 4.0]))], rollouts),
        "Method `odd` returned something illegal from `advantages`: an advantage is NaN, and its row has a reward",
    )
    host = run([], rollouts, host=torch.tensor([1.0, 7.0, NAN, 2.0]))
    assert host.row_advantages.tolist() == [1.0, 0.0, 0.0, 2.0] and host.estimator == "host"
    assert bool(host.advantages.isfinite().all())
    ours = run([], rollouts, estimator=lambda r: torch.tensor([1.0, 7.0, NAN, 2.0]).double())
    assert ours.row_advantages.tolist() == [1.0, 0.0, 0.0, 2.0]
    assert ours.trained.tolist() == [True] * 4  # still trained, as far as the host trains it
    withdrawn = run([method(rewards=lambda r: [1.0, 0.0, NAN, 5.0])], make_rollouts([1.0, 0, 3, 5]))
    assert withdrawn.row_advantages[2] == 0.0 and math.isnan(withdrawn.rollouts.reward[2])


def test_an_infinite_reward_is_refused_with_the_function_that_gave_it():
    rewards = [[1.0, 0.0], [0.0, -INF]]
    text = refused(
        lambda: run([], make_rollouts(rewards)), "A reward is infinite (reward_1)", "must be finite numbers within"
    )
    assert "reward_0" not in text
    refused(
        lambda: run([method("hot", rewards=lambda r: [1.0, INF])], make_rollouts([1.0, 0.0])),
        "Method `hot` returned something illegal from `rewards`: a reward is infinite",
    )
    assert run([method(rewards=lambda r: [1.0, 0.0])], make_rollouts([1.0, INF])).trained.all()  # it was replaced


def test_not_one_reward_in_the_batch_is_refused():
    strict = MethodStack([], max_unrewarded_batches=0)
    what = "Not one of the 3 completions has a reward"
    text = refused(lambda: run([], make_rollouts([[NAN, NAN]] * 3), stack=strict), what)
    assert "reward_0, reward_1" in text and "max_unrewarded_batches" in text and "batches before" not in text
    refused(
        lambda: run([method("all", rewards=lambda r: [NAN] * 2)], make_rollouts([1.0, NAN])),
        "Method `all` returned something illegal from `rewards`: every reward is NaN, though 1 of 2 rows had one",
    )


def test_batches_without_a_reward_are_skipped_up_to_a_limit(caplog):
    """No hook behind `rewards` sees them, no row is trained, and they are counted; a rewarded batch begins the count of
    those in a row anew, and a resumed run goes on with it."""
    seen = []
    hooks = {h: lambda *args, h=h: seen.append(h) for h in ("rewards", "select", "shape", "observe")}
    m = method("m", **hooks, advantages=lambda r: seen.append("advantages") or r.reward)
    stack = start_stack(m)
    nothing, some = make_rollouts([NAN] * 4), make_rollouts([1.0, NAN, 0.0, NAN])

    def logged():
        return {name: value for name, (_, value, _) in stack.metrics.take().items()}

    for count, (rollouts, in_a_row) in enumerate([(nothing, 1), (nothing, 2), (some, 0), (nothing, 1), (nothing, 2)]):
        seen.clear()
        d = run([], rollouts, host=HOST, stack=stack)
        assert seen == (["rewards", "select", "advantages", "shape", "observe"] if rollouts is some else ["rewards"])
        assert stack.unrewarded_in_a_row == in_a_row and stack.batch == count + 1 and stack.draw == 0
        assert bool(d.trained.any()) == bool(d.stays.any()) == bool(d.keep_tokens.any()) == (rollouts is some)
        assert logged()["rl_plugins/unrewarded_batches"] == [1, 2, 2, 3, 4][count] and d.rewarded_by == {}
    assert caplog.text.count("Not one of the 4 completions has a reward: every reward function (reward_0)") == 4
    assert "It is number 2 in a row, and at most 3 are skipped" in caplog.text and "Every row" not in caplog.text
    resumed = start_stack(m)
    resumed.load_state_dict(stack.state_dict("f"), "f")
    assert (resumed.unrewarded, resumed.unrewarded_in_a_row) == (4, 2)
    run([], nothing, stack=resumed)
    said = ("Not one of the 4 completions has a reward", "in the 3 batches before (max_unrewarded_batches=3)")
    refused(lambda: run([], nothing, stack=resumed), *said)


def test_a_method_may_make_the_only_rewards():
    """A judge, say, where the reward functions say nothing."""
    d = run([method("judge", rewards=lambda r: [1.0, 0.0])], make_rollouts([NAN, NAN]))
    assert d.trained.all() and d.row_advantages[0] > 0


def test_the_one_who_made_a_reward_infinite_is_named():
    """A hook that hands on what it was given is not to blame for a reward function."""
    passing = method("passes", rewards=lambda r: r.reward)
    refused(lambda: run([passing], make_rollouts([[1.0, 0.0], [0.0, INF]])), "A reward is infinite (reward_1)")


@pytest.mark.parametrize("value", [1.1e16, -1e39, INF])
def test_numbers_whose_squares_overflow_are_refused_with_who_made_them(value):
    """In float32, in which hosts compute."""
    hot = {"advantages": lambda r: torch.tensor([1.0, value]).double(), "rewards": lambda r: [1.0, value]}
    for hook, function in hot.items():
        made = f"Method `hot` returned something illegal from `{hook}`: a"
        refused(lambda h=hook, f=function: run([method("hot", **{h: f})], make_rollouts([1.0, 0])), made, "1e+16")
    by_function = make_rollouts([[1.0, 0.0], [1.0, value]])
    refused(lambda: run([], by_function), "A reward is infinite (reward_1), or beyond 1e+16")
    passing = method("passes", rewards=lambda r: r.reward)
    refused(lambda: run([passing], by_function), "A reward is infinite (reward_1), or beyond 1e+16")


def test_mc_grpo_says_when_its_advantages_overflow():
    """A group of equal rewards but one has a median deviation of 0, and its rewards are divided by 0.001."""
    mc_grpo = build_stack(["mc_grpo"])
    rewards = [0.0, 0.0, 1e15, 0.0]
    refused(lambda: run([], make_rollouts(rewards), stack=mc_grpo), "`mc_grpo`", "`advantages`", "an advantage is inf")
    refused(lambda: run([], make_rollouts([0.0, 1e38, 0.0]), stack=mc_grpo), "A reward is infinite (reward_0), or bey")


# ---- the data itself


def test_the_weighted_reward_is_of_the_functions_that_scored_a_row():
    rewards, weights = [[1.0, 2.0, NAN], [NAN, NAN, NAN], [NAN, -1.0, 0.0], [0.0, NAN, 4.0]], [1.0, 0.5, 2.0]
    expected = [
        math.fsum(r * w for r, w in zip(row, weights, strict=True) if not math.isnan(r))
        if not all(map(math.isnan, row))
        else NAN
        for row in rewards
    ]
    assert make_rollouts(rewards, weights=weights).reward.tolist() == pytest.approx(expected, nan_ok=True)


def test_a_subset_of_rows_takes_every_field_along():
    n, listed = 4, {"text", "raw_text", "messages", "payload"}
    rollouts = make_rollouts([0.0] * n).replace(turns=agent_batch([1, 2, 0, 1])[0].turns)
    numbers = {f.name: torch.arange(n) for f in dataclasses.fields(rollouts) if f.name in PER_ROW}
    rollouts = rollouts.replace(token_ids=make_token_ids(rollouts), step_rewards=make_step_rewards(rollouts))
    full = rollouts.replace(**numbers, **{name: list("abcd") for name in listed}, meta={"answer": list("abcd")})
    keep = torch.tensor([False, True, False, True])
    part = full.subset(keep)
    assert all(getattr(part, name).tolist() == [1, 3] for name in PER_ROW)
    assert all(getattr(part, name) == ["b", "d"] for name in listed) and part.meta == {"answer": ["b", "d"]}
    assert part.turns.anchor == ["3.0", "1.1", "1.0"] and part.turns.row.tolist() == [1, 0, 0]
    assert part.turns.turn.tolist() == [0, 1, 0] and part.turns.reward.tolist() == [30.0, 11.0, 10.0]
    assert len(part.turns.valid) == 3 and len(part) == 2 and part.groups.size.tolist() == [1, 1]
    ids = (part.token_ids.prompt, part.token_ids.completion, part.token_ids.observed, part.step_rewards)
    whole_ids = (full.token_ids.prompt, full.token_ids.completion, full.token_ids.observed, full.step_rewards)
    for taken, given in zip(ids, whole_ids, strict=True):
        assert [x.tolist() for x in taken] == [given[1].tolist(), given[3].tolist()]
    whole = {"reward_names", "reward_weights", "meta", "turns", "batch"}
    whole |= {"current_version", "steps_since_published", "token_ids", "step_rewards"}
    assert {f.name for f in dataclasses.fields(rollouts)} == PER_ROW | listed | whole  # a new field joins one of them
    assert full.subset(torch.ones(n, dtype=torch.bool)) is full


# ---- turns of agents


def agent_batch(turns, rewards=None, kept=None):
    """Rows with these numbers of turns; every turn has two tokens. Steps are listed backwards, so that their numbers
    are not those of the rows."""
    rows = [(row, turn) for row, n in enumerate(turns) for turn in range(n)][::-1]
    rollouts = make_rollouts(rewards or [float(i) for i in range(len(turns))], [0] * len(turns))
    rollouts = rollouts.replace(
        length=torch.tensor([2 * n for n in turns]),
        turns=TurnTable(
            row=torch.tensor([r for r, _ in rows]),
            turn=torch.tensor([t for _, t in rows]),
            anchor=[f"{r}.{t}" for r, t in rows],
            reward=torch.tensor([10.0 * r + t for r, t in rows]).double(),
            valid=torch.ones(len(rows), dtype=torch.bool),
        ),
    )
    tokens = make_tokens(rollouts)
    place = {pair: i for i, pair in enumerate(rows)}
    step = [place[r, p // 2] for r, p in zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)]
    return rollouts, tokens.replace(turn=torch.tensor(step))


def of_turns(function, **hooks):
    return method("turns", advantages=function, advantages_per="turn", **hooks)


def test_advantages_of_turns_reach_the_tokens_of_their_turn():
    rollouts, tokens = agent_batch([2, 1, 3])
    decision = run([of_turns(lambda r: r.turns.reward)], rollouts, tokens)
    expected = [0.0, 0, 1, 1, 10, 10, 20, 20, 21, 21, 22, 22]
    assert decision.advantages.tolist() == expected and not decision.uniform
    assert decision.row_advantages.tolist() == [0.5, 10.0, 21.0]


def test_one_number_per_row_reaches_all_its_turns():
    rollouts, tokens = agent_batch([2, 1, 3])
    decision = run([method(advantages=lambda r: r.reward + 5)], rollouts, tokens)
    assert decision.advantages.tolist() == [5.0] * 4 + [6.0] * 2 + [7.0] * 6 and decision.uniform


def test_with_as_many_turns_as_rows_the_class_says_what_is_meant_and_not_the_shape():
    rollouts, tokens = agent_batch([2, 0, 1], [1.0, 2.0, 3.0])  # turns (2, 0), (0, 1), (0, 0)
    three = torch.tensor([5.0, 6.0, 7.0])
    assert run([method(advantages=lambda r: three)], rollouts, tokens).advantages.tolist() == [5.0] * 4 + [7.0] * 2
    decision = run([of_turns(lambda r: three)], rollouts, tokens)
    assert decision.advantages.tolist() == [7.0, 7.0, 6.0, 6.0, 5.0, 5.0]


def test_turns_of_a_row_without_reward_have_no_advantage():
    rollouts, tokens = agent_batch([2, 1], [1.0, NAN])
    for nothing in (NAN, 4.0):  # whatever is returned for them
        unscored = torch.isnan(rollouts.reward)[rollouts.turns.row]
        given = torch.where(unscored, nothing, torch.tensor([4.0, 5.0, 3.0]).double())
        decision = run([of_turns(lambda r, given=given: given)], rollouts, tokens)
        expected = torch.where(unscored, 0.0, given)[tokens.turn]
        assert decision.advantages.tolist() == expected.tolist() and set(expected.tolist()) == {0.0, 3.0, 5.0}
    odd = torch.where(unscored, 0.0, NAN)
    refused(lambda: run([of_turns(lambda r: odd)], rollouts, tokens), "an advantage is NaN, and its row has a reward")


@pytest.mark.parametrize("bad", [INF, -INF, 1e17])
def test_the_reward_of_a_turn_is_checked_as_that_of_a_row(bad):
    rollouts, tokens = agent_batch([2, 1, 3])
    reward = rollouts.turns.reward.clone()
    reward[2] = NAN  # a turn without a reward
    known = rollouts.replace(turns=dataclasses.replace(rollouts.turns, reward=reward))
    run([], known, tokens)
    reward = reward.clone()
    reward[0] = bad  # turn 2 of row 2
    hot = rollouts.replace(turns=dataclasses.replace(rollouts.turns, reward=reward))
    refused(lambda: run([], hot, tokens), "The reward of 1 of 6 turns is infinite", "turn 2 of row 2")


def test_turns_stay_with_their_tokens_when_rows_leave():
    rollouts, tokens = agent_batch([2, 1, 3, 1], [1.0, 2.0, 3.0, 4.0])
    seen = {}

    def shape(r, t):
        seen["anchors"] = [r.turns.anchor[i] for i in t.turn.tolist()]
        seen["rows"] = r.turns.row[t.turn].tolist() == t.row.tolist()

    def observe(r, t, stats):
        seen["all anchors"] = [r.turns.anchor[i] for i in t.turn.tolist()]
        seen["all rows"] = r.turns.row[t.turn].tolist() == t.row.tolist()

    keep = torch.tensor([True, False, True, False])
    m = of_turns(lambda r: r.turns.reward, select=lambda r: keep, shape=shape, observe=observe)
    decision = run([m], rollouts, tokens)
    anchors = ["0.0", "0.0", "0.1", "0.1", "2.0", "2.0", "2.1", "2.1", "2.2", "2.2"]
    assert seen == {"anchors": anchors, "rows": True, "all anchors": anchors, "all rows": True}
    assert decision.advantages.tolist() == [0.0, 0, 1, 1, 0, 0, 20, 20, 21, 21, 22, 22, 0, 0]
    seen.clear()
    without = method(select=lambda r: keep, shape=lambda r, t: seen.update(turn=t.turn))
    run([without], rollouts, tokens.replace(turn=None))
    assert seen == {"turn": None}


def test_the_hosts_and_our_estimator_are_per_row_even_with_as_many_turns_as_rows():
    rollouts, tokens = agent_batch([2, 0, 1])
    for decision in (
        run([], rollouts, tokens, host=torch.tensor([1.0, 2.0, 3.0])),
        run([], rollouts, tokens, estimator=lambda r: torch.tensor([1.0, 2.0, 3.0]).double()),
    ):
        assert decision.advantages.tolist() == [1.0] * 4 + [3.0] * 2


def test_a_number_per_turn_needs_turns_and_tokens_that_know_theirs():
    rollouts, tokens = agent_batch([2, 1, 3])
    m = of_turns(lambda r: r.turns.reward)
    why = "`turns` makes one advantage per turn, and this batch does not say what its turns are"
    refused(lambda: run([m], rollouts, tokens.replace(turn=None)), why, "(tokens.turn is None)", '"turns" in `needs`')
    refused(lambda: run([m], rollouts.replace(turns=None), tokens), why, "(rollouts.turns is None)")


@pytest.mark.parametrize(
    ("per", "given", "why"),
    [
        ("turn", 3, 'one number per turn (6) is needed, as the class says with advantages_per = "turn"; it gave (3,)'),
        ("row", 6, 'one number per row (3) is needed, as the class says with advantages_per = "row"; it gave (6,)'),
    ],
)
def test_a_number_per_row_is_not_taken_for_one_per_turn(per, given, why):
    rollouts, tokens = agent_batch([2, 1, 3])
    m = method("odd", advantages=lambda r: torch.ones(given), advantages_per=per)
    refused(lambda: run([m], rollouts, tokens), "Method `odd` returned something illegal from `advantages`: ", why)


# ---- decisions by rows


def test_a_stack_that_reads_no_token_decides_per_row_whoever_makes_the_advantages():
    """Row 0 leaves in `select`, row 3 in `shape`, and row 2 has no token."""
    rollouts = make_rollouts([4.0, 1.0, 2.0, 3.0], lengths=[2, 1, 0, 3])
    hooks = {
        "rewards": lambda r: r.reward * 2,
        "select": lambda r: r.reward < 8,
        "shape": lambda r, t: Shape(keep_rows=r.reward < 6, row_factor=-r.reward, row_columns={"weight": r.reward}),
        "needs": set(),
    }
    host = torch.tensor([7.0, 6.0, 5.0, 4.0])
    own = {"advantages": lambda r: r.reward - 1}
    for who, given, made, of_row_1 in (("m", host, own, 1), ("host", host, {}, 6), ("host", "unread", {}, 3)):
        stack = MethodStack([method(**hooks, **made)])
        d = decide_advantages(stack, select_rows(stack, rollouts), None, given, lambda r: r.reward + 1, 2)
        assert (d.estimator, d.row_advantages.tolist()) == (who, [0.0, -2.0 * of_row_1, 0.0, 0.0])
        assert d.stays.tolist() == [False, True, True, False] and d.trained.tolist() == [False, True, False, False]
        assert (d.keep_tokens, d.advantages, d.old_logprobs, d.token_columns, d.uniform) == (None, None, None, {}, True)
        assert d.row_columns["weight"].tolist() == [0.0, 2.0, 4.0, 6.0] and list(d.rewarded_by) == ["m"]
        assert d.rollouts.kept.tolist() == [False, True, True, True]
    plain = decide(MethodStack([]), rollouts, None, None, lambda r: r.reward + 1, 4)
    assert plain.estimator == "rl_plugins" and plain.row_advantages.tolist() == [5.0, 2.0, 0.0, 4.0]
    huge = method("huge", shape=lambda r, t: Shape(row_factor=r.reward * 1e16), needs=set())
    why = "Method `huge` returned something illegal from `shape`: `row_factor` times advantage has values"
    refused(lambda: decide(MethodStack([huge]), TWO, None, None, lambda r: r.reward * 2, 2), why)


def test_a_host_may_give_the_tokens_of_those_rows_only_that_select_left():
    rollouts = make_rollouts([4.0, 1.0, 2.0], lengths=[2, 1, 2])
    stack = MethodStack([method(select=lambda r: r.reward < 4, observe=lambda r, t, s: seen.append(t.row.tolist()))])
    tokens, seen = make_tokens(rollouts), []
    part = tokens.subset(tokens.row > 0)
    host = torch.tensor([1.0, 2.0, 2.0])
    d = decide_advantages(stack, select_rows(stack, rollouts), part, host, grpo_advantages, 2)
    assert seen == [[1, 2, 2]] and d.advantages.tolist() == host.tolist() and d.keep_tokens.tolist() == [True] * 3
    assert d.row_advantages.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("hook", ["shape", "observe"])
@pytest.mark.parametrize("read", [lambda t: t.advantages, len])
def test_tokens_nobody_asked_for_are_refused_by_name(hook, read):
    m = method("m", **{hook: lambda r, t, *stats: read(t)}, needs=set())
    for tokens in (make_tokens(TWO), None):
        call = lambda tokens=tokens: decide(MethodStack([m]), TWO, tokens, None, grpo_advantages, 2)
        refused(call, "Method `m` failed in", f"`{hook}`", "`m` reads `tokens`", 'Add "tokens" to its `needs`')


def test_what_stands_for_tokens_can_be_copied():
    seen = []
    run([method(observe=lambda r, t, s: seen.append(copy.copy(t)), needs=set())], TWO)
    refused(lambda: seen[0].row, "`m` reads `tokens`")
    assert seen[0].hidden.row.tolist() == [0, 1, 1]  # for the trace


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "keep_tokens", "token_columns"])
def test_values_per_token_take_tokens(name):
    value = {"x": torch.ones(3)} if name == "token_columns" else torch.ones(3, dtype=torch.bool)
    m = method("m", shape=lambda r, t: Shape(**{name: value}), needs=set())
    for tokens in (make_tokens(TWO), None):
        call = lambda tokens=tokens: decide(MethodStack([m]), TWO, tokens, None, grpo_advantages, 2)
        refused(call, "Method `m` returned something illegal from `shape`", 'Add "tokens" to its `needs`')


# ---- shaping


def test_what_shape_changes_comes_back_in_the_order_of_all_rows_and_tokens():
    rollouts = make_rollouts([4.0, 1.0, 2.0, 3.0], [0] * 4, lengths=[1, 2, 1, 2])

    def shape(r, t):
        return Shape(
            advantages=t.advantages * 2 + t.position,
            row_factor=[2.0, 9.0, -1.0],
            keep_rows=torch.tensor([True, False, True]),
            keep_tokens=t.position == 0,
            old_logprobs=-t.row - 0.5,
            row_columns={"weight": r.reward, "flag": r.reward > 1},
            token_columns={"place": t.position},
        )

    m = method(
        select=lambda r: torch.tensor([True, True, False, True])[: len(r)],
        advantages=lambda r: torch.tensor([1.0, 2.0, 3.0]),
        shape=shape,
    )
    d = run([m], rollouts)
    assert d.advantages.tolist() == [4.0, 0, 0, 0, -6.0, 0]
    assert d.trained.tolist() == [True, False, False, True]
    assert d.keep_tokens.tolist() == [True, False, False, False, True, False]
    assert d.row_advantages.tolist() == [4.0, 0.0, 0.0, -6.0] and d.uniform
    assert d.old_logprobs.tolist() == [-0.5, -1.5, -1.5, 0.0, -2.5, -2.5] and d.old_logprobs.dtype == torch.float32
    assert d.row_columns["weight"].tolist() == [4.0, 1.0, 0.0, 3.0] and d.row_columns["flag"].dtype == torch.bool
    assert d.token_columns["place"].tolist() == [0, 0, 1, 0, 0, 1] and d.token_columns["place"].dtype == torch.int64


def test_a_later_shape_sees_what_the_earlier_one_made():
    seen = []

    def first(r, t):
        return Shape(advantages=t.advantages + 1, keep_tokens=t.position > 0, old_logprobs=torch.zeros(len(t)))

    def second(r, t):
        seen.append((t.advantages.tolist(), t.keep.tolist(), t.old_logprobs.tolist()))
        return Shape(keep_rows=torch.tensor([True, False]), row_columns={"x": torch.ones(2)})

    rollouts = make_rollouts([1.0, 2.0], [0, 0], lengths=[2, 2])
    methods = [method("a", shape=first), method("b", shape=second), method("c", advantages=lambda r: r.reward)]
    d = run(methods, rollouts)
    assert seen == [([2.0, 2.0, 3.0, 3.0], [False, True, False, True], [0.0] * 4)]
    assert d.keep_tokens.tolist() == [False, True, False, False] and d.trained.tolist() == [True, False]
    assert d.old_logprobs.tolist() == [0.0] * 4


def test_old_logprobs_of_tokens_that_stay_are_no_densities():
    """At most 0, but for what engines round; a diffusion policy has no vocabulary, and densities of any size."""

    def old(values, kept, vocabulary=8):
        given = torch.tensor(values)
        stack = MethodStack([method("m", shape=lambda r, t: Shape(old_logprobs=given, keep_tokens=t.row == kept))])
        stack.vocabulary = vocabulary
        return run([], TWO, stack=stack).old_logprobs.tolist()

    for kept, vocabulary in ((0, 8), (1, None)):
        assert old([-1.0, 0.5, 0.25], kept, vocabulary) == [-1.0, 0.5, 0.25]
    why = "Method `m` returned something illegal from `shape`: `old_logprobs` has 0.5, "
    refused(lambda: old([-1.0, 0.5, 0.25], 1), why)
    rounded = float(torch.tensor(LARGEST_LOGPROB))
    assert old([-1.0, rounded, -1.0], 1)[1] == rounded


def test_old_logprobs_are_only_there_if_a_method_gave_some():
    m = method(shape=lambda r, t: Shape(advantages=t.advantages))
    assert run([m], make_rollouts([1.0, 0.0])).old_logprobs is None


def test_a_column_exists_once():
    def columns(**shape):
        return lambda r, t: Shape(
            **{k: {n: torch.ones(len(r if k == "row_columns" else t)) for n in v} for k, v in shape.items()}
        )

    a = method("a", shape=columns(row_columns=["x"], token_columns=["y"]))
    assert set(run([a], make_rollouts([1.0, 0.0])).row_columns) == {"x"}
    for other in ({"row_columns": ["x"]}, {"row_columns": ["y"]}, {"token_columns": ["x"]}, {"token_columns": ["y"]}):
        b = method("b", shape=columns(**other))
        name = next(iter(other.values()))[0]
        refused(lambda b=b: run([a, b], make_rollouts([1.0, 0.0])), "`b`", "`shape`", f"`{name}` exists already")
    both = method("c", shape=columns(row_columns=["z"], token_columns=["z"]))
    refused(lambda: run([both], make_rollouts([1.0, 0.0])), "`c`", "the column `z` exists already")


@pytest.mark.parametrize("scale", [1.0, 1e3 / 3, 1e-9])
def test_one_advantage_per_row_is_uniform_whatever_its_size_and_the_row_has_exactly_it(scale):
    lengths = [4001, 1, 700]
    rollouts = make_rollouts([0.1, 0.2, 0.3], [0, 0, 0], lengths=lengths)
    d = run([method(advantages=lambda r: r.reward * scale)], rollouts)
    assert d.uniform and d.row_advantages.tolist() == (rollouts.reward * scale).tolist()


def test_the_smallest_difference_inside_a_row_is_not_uniform_but_one_between_rows_is():
    def nudge(r, t):
        return Shape(advantages=t.advantages + torch.where((t.row == 1) & (t.position == 1), 1e-14, 0.0))

    rollouts = make_rollouts([1e-12, 2e-12], [0, 0], lengths=[2, 2])
    raw = method("raw", advantages=lambda r: r.reward)
    assert run([raw], rollouts).uniform
    assert not run([raw, method(shape=nudge)], rollouts).uniform
    leaves = method("leaves", shape=lambda r, t: Shape(keep_tokens=t.position == 0))
    assert run([raw, method(shape=nudge), leaves], rollouts).uniform  # tokens that left do not count


# ---- observation


def test_observe_sees_all_rows_and_tokens_that_point_into_them():
    seen = []
    rollouts = make_rollouts([5.0, 1.0, 2.0, 3.0], [0] * 4, lengths=[2, 1, 2, 1])
    tokens = make_tokens(rollouts)
    stack = MethodStack(
        [
            method(
                select=lambda r: torch.tensor([False, True, False, True]),
                shape=lambda r, t: Shape(keep_rows=torch.tensor([True, False]), advantages=t.advantages + 1),
                observe=lambda *args: seen.append(args),
            )
        ]
    )
    stack.stats = {"m/x": 2.0}
    d = run([], rollouts, tokens, stack=stack, estimator=lambda r: r.reward)
    ((all_rows, all_tokens, stats),) = seen
    assert len(all_rows) == 4 and all_rows.kept.tolist() == [False, True, False, True]
    assert all_rows.reward.tolist() == rollouts.reward.tolist()
    assert all_tokens.row.tolist() == [1, 3] and all_tokens.keep.tolist() == [True, False]
    assert all_tokens.old_logprobs.tolist() == tokens.old_logprobs[[2, 5]].tolist()
    assert all_tokens.advantages.tolist() == [2.0, 4.0]  # as the update gets them
    assert stats == {"m/x": 2.0} and stats is not stack.stats
    assert d.trained.tolist() == [False, True, False, False]


# ---- degenerate batches


def test_no_row_left_is_a_decision_too():
    calls = []
    m = method(
        select=lambda r: torch.zeros(4, dtype=torch.bool),
        shape=lambda r, t: calls.append((len(r), len(t))) or Shape(row_columns={"x": r.reward}),
        observe=lambda r, t, s: calls.append((len(r), len(t))),
    )
    d = run([m], make_rollouts([1.0, 0.0, 1.0, 0.0]), host=HOST)
    assert calls == [(0, 0), (4, 0)] and not d.trained.any() and not d.keep_tokens.any()
    assert d.advantages.tolist() == [0.0] * 10 and d.row_advantages.tolist() == [0.0] * 4 and d.uniform
    assert d.row_columns["x"].tolist() == [0.0] * 4 and d.estimator == "rl_plugins"
    empty = run([], make_rollouts([]))
    assert len(empty.trained) == len(empty.advantages) == 0
    program = method("program", rollout=lambda prompt: None)
    assert run([program], make_rollouts([1.0, 0.0])).trained.all()
    why = "Method `program` returned something illegal from `rollout`: no rollout for any prompt of the batch."
    refused(lambda: run([program], make_rollouts([])), why)


def test_groups_of_one_have_advantage_0():
    assert run([], make_rollouts([1.0, 0.3, 7.0], [0, 1, 2])).row_advantages.tolist() == [0.0] * 3


def test_rows_without_tokens_are_not_trained_but_count_in_the_statistics():
    rollouts = make_rollouts([1.0, 0.0, 5.0], [0, 0, 0], lengths=[2, 0, 1])
    d = run([], rollouts, estimator=lambda r: r.reward - r.groups.rows(r.groups.mean(r.reward)))
    assert d.advantages.tolist() == [-1.0, -1.0, 3.0] and d.trained.tolist() == [True, False, True]
    assert d.row_advantages.tolist() == [-1.0, 0.0, 3.0]
    nothing = run([], make_rollouts([1.0, 0.0], lengths=[0, 0]))
    assert nothing.trained.tolist() == [False, False] and len(nothing.advantages) == 0 and nothing.uniform


def test_more_rows_than_the_batch_holds_is_an_error_with_the_sizes_of_the_groups():
    rollouts = make_rollouts([1.0, 0, 1, 0, 1], [10**12, 10**12, -4, -4, -4])
    text = refused(lambda: run([], rollouts, budget=4), "5 rows would be trained, the batch takes 4.")
    assert "Rows that stayed: group -4: 3, group 1000000000000: 2. The method that asked for spare rollouts" in text
    leaves = method(shape=lambda r, t: Shape(keep_rows=torch.tensor([True, True, True, True, False])))
    assert int(run([leaves], rollouts, budget=4).trained.sum()) == 4
    refused(lambda: run([leaves], rollouts, budget=3), "4 rows would be trained", "group -4: 2, ")
    many = make_rollouts([1.0] * 40, list(range(40)))
    assert refused(lambda: run([], many, budget=1)).count("group ") == 32


def test_methods_are_held_to_their_word_that_the_batch_stays_full():
    def left(rewards, **flags):
        stack = MethodStack([method("m", select=lambda r: r.reward > 0, **flags)] if flags else [])
        check_full(stack, run([], make_rollouts(rewards), stack=stack), 4)

    word = {"keeps_batch_size": True}
    left([1.0] * 4, **word)
    left([1.0] * 5, **word)
    left([NAN] * 4, **word)  # the batch is skipped
    left([1.0, 0.0, 0.0, 1.0], keeps_batch_size=False)
    left([1.0, 1.0])  # nobody took any
    refused(lambda: left([1.0, 0.0, 1.0, 1.0], **word), "1 of 4 rows are missing", "`m` states `keeps_batch_size`")
    refused(lambda: left([1.0, 0.0, NAN, 1.0], **word), "2 of 4 rows are missing")


def test_nothing_that_was_given_is_changed():
    rollouts = make_rollouts([1.0, 0.0, 2.0, 5.0])
    tokens = make_tokens(rollouts)
    fields_of = {
        key: {n: v for n, v in vars(o).items() if isinstance(v, torch.Tensor)}
        for key, o in (("r", rollouts), ("t", tokens))
    }
    copies = {(o, n): v.clone() for o in "rt" for n, v in fields_of[o].items()}
    m = method(
        rewards=lambda r: r.reward + 1,
        select=lambda r: r.reward > 1,
        shape=lambda r, t: Shape(advantages=t.advantages * 0 + 1, keep_tokens=t.position == 0),
    )
    run([m], rollouts, tokens)
    for (o, n), before in copies.items():
        assert torch.equal(fields_of[o][n], before), n


def test_what_a_hook_returns_keeps_no_graph():
    weight = torch.tensor(2.0, requires_grad=True)
    m = method(
        rewards=lambda r: r.reward * weight,
        advantages=lambda r: r.reward * weight,
        shape=lambda r, t: Shape(token_columns={"x": t.advantages * weight}),
    )
    d = run([m], make_rollouts([1.0, 0.0]))
    tensors = [d.advantages, d.row_advantages, d.token_columns["x"], d.rollouts.reward]
    assert not any(t.requires_grad for t in tensors)


# ---- illegal return values

TWO = make_rollouts([1.0, 0.0], lengths=[1, 2])
ILLEGAL = {
    "rewards": [
        ([1.0], "one number per row (2) is needed; it gave (1,)"),
        (torch.ones(2, 1), "it gave (2, 1)"),
        (3.0, "it gave ()"),
        ([1.0, -INF], "a reward is infinite"),
        ([1.0, None], "must be a tensor"),
        ("good", "must be a tensor (or numbers that make one), it gave str"),
        (object(), "it gave object"),
        (Exits(), UNREADABLE),
    ],
    "select": [
        (Exits(), UNREADABLE),
        (torch.ones(2), "must be a bool tensor, it gave torch.float32"),
        ([1, 0], "must be a bool tensor, it gave torch.int64"),
        (torch.ones(3, dtype=torch.bool), "one number per row (2) is needed; it gave (3,)"),
        (True, "it gave ()"),
        ({"keep": 1}, "it gave dict"),
    ],
    "advantages": [
        (Exits(), UNREADABLE),
        (
            torch.ones(3),
            'one number per row (2) is needed, as the class says with advantages_per = "row"; it gave (3,)',
        ),
        (torch.ones(2, 1), "it gave (2, 1)"),
        (1.0, "it gave ()"),
        ([INF, 0.0], "an advantage is infinite"),
        (None, "it gave NoneType"),
        (["a", "b"], "it gave list"),
    ],
    "shape": [
        (torch.ones(2), "Tensor instead of a Shape"),
        (Shape(keep_rows=Exits()), UNREADABLE),
        (Shape(row_columns=[1.0, 2.0]), "`row_columns` is list"),
        ({"advantages": torch.ones(3)}, "dict instead of a Shape"),
        (Shape(advantages=torch.ones(2)), "`advantages` needs one entry per token (3), it has (2,)"),
        (Shape(advantages=torch.tensor([1.0, NAN, 0.0])), "`advantages` has values that are not finite"),
        (Shape(advantages=[1.0, "b", 0.0]), "`advantages` must be a tensor"),
        (Shape(row_factor=torch.ones(3)), "`row_factor` needs one entry per row (2), it has (3,)"),
        (Shape(row_factor=[1.0, NAN]), "`row_factor` has values that are not finite"),
        (Shape(advantages=[1e9, 0, 0], row_factor=[1e9, 1.0]), "`row_factor` times advantage has values"),
        (Shape(old_logprobs=torch.tensor([-1.0, -INF, 0.0])), "`old_logprobs` has values that are not finite"),
        (Shape(old_logprobs=torch.ones(2)), "`old_logprobs` needs one entry per token (3)"),
        (Shape(keep_rows=torch.ones(3, dtype=torch.bool)), "`keep_rows` needs one entry per row (2), it has (3,)"),
        (Shape(keep_rows=torch.tensor([0.3, 0.0])), "`keep_rows` must be a bool tensor, it gave torch.float32"),
        (Shape(keep_tokens=torch.ones(2, dtype=torch.bool)), "`keep_tokens` needs one entry per token (3)"),
        (Shape(keep_tokens=[1, 0, 1]), "`keep_tokens` must be a bool tensor, it gave torch.int64"),
        (Shape(row_columns={"x": torch.ones(3)}), "`x` needs one entry per row (2), it has (3,)"),
        (Shape(row_columns={"x": torch.tensor([NAN, 1.0])}), "`x` has values that are not finite"),
        (Shape(token_columns={"y": torch.ones(2)}), "`y` needs one entry per token (3), it has (2,)"),
        (Shape(token_columns={"y": torch.ones(3, 2)}), "`y` needs one entry per token (3), it has (3, 2)"),
        (Shape(token_columns={"y": None}), "`y` must be a tensor (or numbers that make one), it gave NoneType"),
    ],
}


@pytest.mark.parametrize(("hook", "answer", "why"), [(h, *case) for h, cases in ILLEGAL.items() for case in cases])
def test_an_illegal_answer_is_refused_with_the_method_and_the_hook(hook, answer, why):
    fine = method("fine", observe=lambda r, t, s: None)
    m = method("odd", **{hook: lambda *args: answer})
    stack = MethodStack([fine, m])
    text = refused(lambda: run([], TWO, stack=stack), why)
    assert text.startswith(f"Method `odd` returned something illegal from `{hook}`: ")
    assert text.endswith("Remove `odd` from `methods` to go on without it.") and stack.batch == 0


def test_plain_lists_and_numpy_are_legal_answers():
    m = method(
        rewards=lambda r: np.array([1, 2]),
        select=lambda r: [True, True],
        advantages=lambda r: [1, -1],
        shape=lambda r, t: Shape(keep_tokens=[True, False, True], row_factor=[1, 3], row_columns={"x": [1, 2]}),
    )
    d = run([m], TWO)
    assert d.rollouts.reward.tolist() == [1.0, 2.0] and d.rollouts.reward.dtype == torch.float64
    assert d.advantages.tolist() == [1.0, 0.0, -3.0] and d.row_columns["x"].tolist() == [1, 2]


def test_row_order_changes_no_decision():
    rewards = [1.0, 0.0, 3.0, NAN, 2.0, 2.0, 0.5]
    group, lengths = [0, 1, 0, 1, 1, 2, 0], [1, 2, 3, 1, 2, 1, 4]

    def shape(r, t):
        return Shape(
            advantages=t.advantages * 2,
            keep_rows=~r.groups.top_k(r.reward, 1),
            row_columns={"w": r.groups.rank(r.length)},
        )

    m = method(select=lambda r: r.groups.rows(r.groups.size) > 1, shape=shape)
    plain = run([m], make_rollouts(rewards, group, lengths=lengths))
    order = [4, 2, 6, 0, 5, 1, 3]
    mixed = run(
        [m], make_rollouts(*([x[i] for i in order] for x in (rewards, group)), lengths=[lengths[i] for i in order])
    )
    assert mixed.row_advantages.tolist() == pytest.approx(plain.row_advantages[order].tolist(), abs=1e-12)
    assert mixed.trained.tolist() == plain.trained[order].tolist() and 0 < int(plain.trained.sum()) < 6
    assert mixed.row_columns["w"].tolist() == plain.row_columns["w"][order].tolist()


def test_rows_without_tokens_stay_unless_a_method_takes_them_out():
    """Lengths 2, 0, 2, 0: empty rows are the host's; `keep_rows` takes the last one out, `keep_tokens` the first."""
    rollouts = make_rollouts([1.0, 0.0, 0.5, 0.25], lengths=[2, 0, 2, 0])
    tokens = make_tokens(rollouts)
    plain = one_step(start_stack(), rollouts, tokens)
    assert plain.stays.tolist() == [True] * 4 and plain.trained.tolist() == [True, False, True, False]

    shaped = Shape(keep_rows=torch.tensor([True, True, True, False]), keep_tokens=tokens.row != 0)
    d = one_step(start_stack(method(shape=lambda r, t: shaped)), rollouts, tokens)
    assert d.stays.tolist() == [False, True, True, False] and d.trained.tolist() == [False, False, True, False]
    assert d.keep_tokens.tolist() == [False, False, True, True]


# ---- what mutants showed was not asked


@pytest.mark.parametrize("hook", ["rewards", "select", "advantages"])
def test_the_error_of_an_answer_that_is_no_tensor_says_what_must_be_one(hook):
    m = method("odd", **{hook: lambda *args: "good"})
    refused(lambda: run([m], TWO), f"from `{hook}`: the answer must be a tensor (or numbers")


def test_the_decision_says_what_each_method_made_of_the_rewards():
    first = method("first", rewards=lambda r: r.reward + 1)
    second = method("second", rewards=lambda r: None)
    third = method("third", rewards=lambda r: r.reward * 2)
    made = run([first, second, third], TWO).rewarded_by
    assert {name: reward.tolist() for name, reward in made.items()} == {"first": [2.0, 1.0], "third": [4.0, 2.0]}
    assert list(made) == ["first", "third"]


def test_a_decision_ends_the_batch_and_the_count_of_its_plans():
    stack = MethodStack([method()])
    stack.batch, stack.draw = 4, 3
    run([], TWO, stack=stack)
    assert (stack.batch, stack.draw) == (5, 0)


def test_texts_of_illegal_rewards_and_masks():
    infinite = method("odd", rewards=lambda r: [INF, 0.0])
    refused(
        lambda: run([infinite], TWO), "a reward is infinite, or beyond 1e+16; NaN is what a row without a reward gets."
    )
    numbers = method("odd", select=lambda r: [1, 0])
    refused(lambda: run([numbers], TWO), "from `select`: the mask must be a bool tensor, it gave torch.int64.")


def test_numbers_a_hook_gives_are_read_on_the_cpu_whatever_the_default_device_is():
    m = method()
    with torch.device("meta"):  # as on a machine whose default device is a GPU
        assert torch.as_tensor([1.0]).device.type == "meta"
        assert validate.numbers(m, "rewards", "", [1.0, 2.0], 2, "row").tolist() == [1.0, 2.0]
