"""SAPO (arXiv 2509.08721): which groups of others are trained, against plain loops and the authors' code; what an
exchange may hold, and what it may do to a run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm import (
    GROUPS,
    LONGEST,
    SIZE,
    Letters,
    Memory,
    Node,
    Rows,
    accuracy,
    built,
    external,
    is_external,
    package,
    send,
    trained_groups,
)

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.methods.decoupled_ppo import DecoupledPpo
from rl_plugins.methods.swarm_sapo import (
    Files,
    Http,
    Package,
    Schema,
    SwarmSapo,
    mailbox,
    open_exchange,
    read_packages,
)
from rl_plugins.methods.swarm_sapo.choice import by_total_reward, chosen
from rl_plugins.methods.swarm_sapo.mailbox import Mailbox
from rl_plugins.methods.swarm_sapo.packages import PackageLimits, file_name, is_whole, sender_of, written_files
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("swarm_sapo")
NAN = math.nan


# ---- the authors' code


@GOLDEN.kind("swarm")
def check_selection(case: Case) -> None:
    """Through the whole method: the agents are nodes, and the accuracy is the reward here."""
    exchange, me = Memory(), case.inputs["local_agents"]
    assert len(me) == 1
    sizes = set()
    for agent, of_agent in case.inputs["swarm"].items():
        for number, (question, payloads) in enumerate(of_agent.items()):
            for payload in payloads:
                completions = list(payload["completions"])
                sizes.add(len(completions))
                send(exchange, agent, package(question, payload["answer"], completions), batch=number)
    (size,) = sizes  # G
    most = case.params["num_external_groups"]
    node = Node(exchange, me[0], size=size, external_groups=most, spare_groups=100, select_by="total_reward")
    plan = node.plan()
    rollouts = node.generate(plan)
    decision = node.decide(rollouts)
    place = {row.group: row.payload["swarm_sapo"][1] for row in external(plan)}
    listed = [(agent, q) for agent in case.inputs["swarm"] if agent != me[0] for q in case.inputs["swarm"][agent]]
    assert sorted(place.values()) == list(range(len(listed))), "all are candidates"
    totals = {g: float(rollouts.reward[rollouts.group == g].sum()) for g in place}
    trained = sorted((g for g in trained_groups(decision) if g in place), key=lambda g: (totals[g], place[g]))
    assert [list(listed[place[g]]) for g in trained] == [list(pair) for pair in case.expected["selected"]]


@GOLDEN.kind("rewards")
def check_advantages(case: Case) -> None:
    case.params.must_be("std", "unbiased")
    rewards = [list(row) for row in case.inputs["rewards"]]
    flat = [r for row in rewards for r in row]
    group = [i for i, row in enumerate(rewards) for _ in row]
    found = grpo_advantages(make_rollouts(flat, group), eps=case.params["eps"])
    wanted = [a for row in case.expected["advantages"] for a in row]
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the rules against plain loops


def transplanted(totals: list[float], most: int) -> list[int]:
    """The released function, line by line, with its guard for 0."""
    f = None
    for i, total in enumerate(totals):
        if total != 0 and f is None:
            f = i
    if f is None or most == 0:
        return []
    order = list(range(len(totals)))
    for i in range(1, len(order)):  # a stable insertion sort
        j = i
        while j and totals[order[j - 1]] > totals[order[j]]:
            order[j - 1], order[j] = order[j], order[j - 1]
            j -= 1
    return order[f:][-most:]


rewards = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, 0.5, -1.0, NAN]), min_size=0, max_size=4), min_size=0, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(rewards, st.integers(0, 5))
def test_the_rules_equal_plain_loops(groups: list[list[float]], most: int) -> None:
    uniform, sample = [], []
    for i, group in enumerate(groups):
        if not group or any(r != r for r in group):
            continue
        if len(sample) < most:
            sample.append(i)
        if any(r != group[0] for r in group) and len(uniform) < most:
            uniform.append(i)
    assert chosen(groups, most, "uniform") == uniform
    assert chosen(groups, most, "sample") == sample
    scored = [i for i, group in enumerate(groups) if group and not any(r != r for r in group)]
    totals = [sum(groups[i]) for i in scored]
    assert chosen(groups, most, "total_reward") == [scored[k] for k in transplanted(totals, most)]


def test_the_index_fault_of_the_released_selection_is_kept() -> None:
    """A group without any success slips in because the first one listed has some; and a good one is cut."""
    assert by_total_reward([1.0, 0.0, 0.0], 3) == [1, 2, 0]
    assert by_total_reward([0.0, 0.0, 3.0, -1.0], 3) == [1, 2] != [0, 1, 2]


# ---- the plan and the decision


counts = st.integers(0, 9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    most=st.integers(1, 5),
    spare=st.none() | st.integers(0, 4),
    arrive=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    rule=st.sampled_from(["uniform", "sample", "total_reward"]),
    age=st.none() | st.integers(0, 2),
)
def test_batches_are_those_of_a_plain_list(
    seed: int, most: int, spare: int | None, arrive: list[int], rule: str, age: int | None
) -> None:
    rng = random.Random(seed)
    exchange = Memory()

    def reward(text: str, columns: Any) -> float:
        return NAN if text == "nan" else accuracy(text, columns)

    node = Node(
        exchange,
        reward=reward,
        seed=seed,
        external_groups=most,
        spare_groups=spare,
        select_by=rule,
        max_age=age,
    )
    inbox: dict[tuple[str, str], int] = {}  # (sender, question) -> batch of arrival
    for batch, count in enumerate(arrive):
        for number in range(count):
            answer = str(rng.randrange(3))
            texts = [rng.choice(["0", "1", "2"] + ["nan"] * (rng.random() < 0.05)) for _ in range(SIZE)]
            sender, question = f"n{rng.randrange(3)}", f"q{rng.randrange(12)}"
            send(exchange, sender, package(question, answer, texts), batch=100 * batch + number)
            inbox[sender, package(question, answer).id] = batch
        plan, decision, logged = node.batch()
        foreign, own = external(plan), [row for row in plan if row.prompt_index >= 0]
        waiting = {k: t for k, t in inbox.items() if age is None or batch - t <= age}
        wanted = min(most, GROUPS - 1) + (most if spare is None else spare)
        taken = min(len(waiting), wanted)
        trainable = min(most, GROUPS - 1, taken)
        assert len(foreign) == taken
        assert len(own) == GROUPS - trainable, "own prompts fill what is missing"
        assert [(r.n, r.spare) for r in foreign] == [(SIZE, 0)] * trainable + [(0, SIZE)] * (taken - trainable)
        assert len({row.group for row in plan}) == len(plan), "every package is a group of its own"
        gone = {(e["sender"], e["id"]) for e in node.state["inbox"]}
        inbox = {k: t for k, t in waiting.items() if k in gone}
        assert len(inbox) == len(waiting) - taken == len(gone), "a package is drawn once"
        for row in foreign:
            assert row.prompt_index == -1 and set(row.edit or {}) == {"prompt", "answer"}
            assert len(row.given) == SIZE and all(c.logprobs is None and c.rewards is None for c in row.given)
            assert all(c.tokens[-1] == 1 for c in row.given)
        # the decision, by loops over groups
        rollouts = decision.rollouts
        scored = [rollouts.reward[rollouts.group == row.group].tolist() for row in foreign]
        keeps = {foreign[i].group for i in chosen(scored, trainable, rule)}  # type: ignore[arg-type]
        kept = set(trained_groups(decision))
        assert kept == {row.group for row in own} | keeps
        assert int(decision.trained.sum()) == SIZE * (len(own) + len(keeps)) <= SIZE * GROUPS
        for row in foreign if rule == "uniform" else ():
            values = rollouts.reward[rollouts.group == row.group].tolist()
            if row.group in keeps:
                assert len(set(values)) > 1 and not any(map(math.isnan, values))
        if foreign:
            constant = sum(len({repr(v) for v in group}) == 1 and group[0] == group[0] for group in scored)
            known = [v for group in scored for v in group if v == v]
            assert logged["swarm_sapo/candidates"] == taken
            assert logged["swarm_sapo/constant"] == pytest.approx(constant / taken)
            assert logged["swarm_sapo/external_reward"] == pytest.approx(sum(known) / len(known))
        assert logged["swarm_sapo/external"] == pytest.approx(len(keeps) / (len(own) + len(keeps)))
        assert logged["swarm_sapo/inbox"] == len(inbox)


def test_a_draw_is_uniform() -> None:
    drawn = np.zeros(6)
    for seed in range(300):
        exchange = Memory()
        send(exchange, "a", *(package(f"q{i}") for i in range(6)))
        node = Node(exchange, seed=seed, external_groups=2, spare_groups=0)
        for row in external(node.plan()):
            drawn[int(str((row.edit or {})["prompt"])[1])] += 1
    assert drawn.sum() == 600 and abs(drawn - 100).max() < 4.5 * math.sqrt(100 * 2 / 3)


def test_rows_are_known_by_their_payload() -> None:
    """verl numbers groups again, and its batches of an asynchronous mode have rows of several plans."""
    exchange = Memory()
    send(exchange, "a", package("q1", "7"), package("q2", "7", ["8"] * 4), package("q3", "7"))
    node = Node(exchange, external_groups=1, spare_groups=1)
    first, second = node.plan(), node.plan()  # two plans before one decision
    plan = [r.replace(group=100 - i) for i, r in enumerate([*first, *second])]
    keep = node.method.select(node.generate(plan)).reshape(-1, SIZE)
    assert keep.any(1).tolist() == keep.all(1).tolist()
    stays = {row.edit["prompt"]: kept for row, kept in zip(plan, keep.all(1).tolist(), strict=True) if row.edit}
    for one in (first, second):  # of each plan the first candidate with unequal rewards
        asked = [row.edit["prompt"] for row in one if row.edit]
        good = [name for name in asked if name != "q2"]
        assert [name for name in asked if stays[name]] == good[:1]
    assert len(stays) == 3
    assert all(kept for row, kept in zip(plan, keep.all(1).tolist(), strict=True) if row.prompt_index >= 0)


def test_without_external_groups_nothing_changes() -> None:
    exchange = Memory()
    send(exchange, "a", package())
    with_method, plain = Node(exchange, external_groups=0), Node(Memory())
    plain.stack = start_stack(seed=0, run=make_run(group_size=SIZE))
    for _ in range(3):
        plan, other = with_method.plan(), plain.plan()
        assert plan == other
        one, two = with_method.decide(with_method.generate(plan)), plain.decide(plain.generate(other))
        assert torch.equal(one.trained, two.trained) and torch.equal(one.row_advantages, two.row_advantages)
    assert not with_method.method.brings and with_method.method.needs == {
        "text",
        "prompt_index",
        "column:prompt",
    }
    assert with_method.state["inbox"] == [] and len(with_method.state["own"]) == 3, "it only publishes"


def test_external_weight_scales_their_advantages() -> None:
    exchanges = [Memory(), Memory()]
    for exchange in exchanges:
        send(exchange, "a", package("q1", "7"), package("q2", "7", ["7", "8", "8", "8"]))
    one, half = Node(exchanges[0]), Node(exchanges[1], external_weight=0.25)
    (_, a, _), (_, b, _) = one.batch(), half.batch()
    foreign = is_external(a)
    assert int(foreign.sum()) == 2 * SIZE and bool((a.row_advantages[foreign] != 0).any())
    assert torch.allclose(b.row_advantages, torch.where(foreign, 0.25, 1.0) * a.row_advantages, rtol=0, atol=1e-15)


def test_a_short_candidate_list_with_equal_rewards_shrinks_the_batch() -> None:
    exchange = Memory()
    send(exchange, "a", package("q1", "7", ["7"] * 4), package("q2", "7", ["8"] * 4))
    _, decision, logged = Node(exchange).batch()
    assert int(decision.trained.sum()) == SIZE * (GROUPS - 2) and logged["swarm_sapo/external"] == 0
    assert logged["swarm_sapo/constant"] == 1


def test_plans_of_other_methods_stay() -> None:
    """Rows that are given or foreign already are not displaced, and a batch keeps one own group."""

    class Recovery(Method):
        name = "recovery"

        def plan(self, plan: Any) -> Any:
            last = plan.rows[-1].replace(prompt_index=-1, edit={"prompt": "x", "answer": "1"})
            return plan.replace(rows=(*plan.rows[:-1], last))

    exchange = Memory()
    send(exchange, "a", *(package(f"q{i}") for i in range(9)))
    node = Node(exchange, external_groups=5, spare_groups=0)
    node.stack = start_stack(Recovery(), node.method, run=node_run(node))
    plan = node.plan()
    ours = [row for row in plan if row.payload]
    assert (
        len(ours) == 4
        and [row.prompt_index for row in plan[:2]] == [0, -1]
        and plan[1].edit
        == {
            "prompt": "x",
            "answer": "1",
        }
    )


def node_run(node: Node) -> Any:
    return make_run(
        dataset=node.data,
        dataset_size=len(node.data),
        columns=tuple(node.data.column_names),
        group_size=SIZE,
        max_completion_length=LONGEST,
        chat=Letters(),
    )


def test_asynchronous_modes_have_exactly_j_candidates() -> None:
    exchange = Memory()
    send(exchange, "a", *(package(f"q{i}") for i in range(9)))
    plan = Node(exchange, run={"buffered": True}).plan()
    assert [row.n for row in plan] == [SIZE] * GROUPS and len(external(plan)) == 2 and not any(r.spare for r in plan)
    with pytest.raises(ConfigError, match="`spare_groups` is 3, and this mode takes batches out of a buffer"):
        Node(exchange, run={"buffered": True}, spare_groups=3)


# ---- what is published


def test_own_groups_are_published_as_text() -> None:
    exchange = Memory()
    data = Rows(
        [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": i, "level": np.int64(3)} for i in range(9)]
    )
    node = Node(exchange, data=data, answer=lambda c, rng: "ja", reward=lambda t, c: float(len(t)))
    plan = node.plan()
    rollouts = node.generate(plan)
    texts = ["ja", "j\ufffd", "j\ufffd", *rollouts.text[3:]]  # the second one was cut inside a character
    node.decide(rollouts.replace(truncated=torch.arange(len(rollouts)) == 1, text=texts))
    (name,) = exchange.files
    assert sender_of(name) == "me" and is_whole(name, exchange.files[name])
    lines = [json.loads(line) for line in exchange.files[name].splitlines()]
    assert [line["prompt"][0]["content"] for line in lines] == [f"{i}?" for i in range(GROUPS)]
    assert lines[0]["columns"] == {"answer": 0, "level": 3}
    assert lines[0]["completions"] == ["ja", "j", "j\ufffd", "ja"]
    assert lines[0]["finished"] == [True, False, True, True] and set(lines[0]) == {
        "id",
        "prompt",
        "columns",
        "completions",
        "finished",
    }, "and no reward"


def test_a_group_of_others_is_not_published_again() -> None:
    exchange = Memory()
    (sent,) = send(exchange, "a", package("q1"), package("q2"))
    node = Node(exchange)
    plan, _, logged = node.batch()
    (own,) = set(exchange.files) - {sent}
    prompts = [json.loads(line)["prompt"] for line in exchange.files[own].splitlines()]
    assert len(external(plan)) == 2 and prompts == [f"{i}+{i}" for i in range(GROUPS - 2)]
    assert logged["swarm_sapo/published"] == GROUPS - 2


def test_how_much_is_published() -> None:
    exchange = Memory()
    node = Node(exchange, publish_groups=2, keep_files=3)
    for _ in range(5):
        node.batch()
    assert [len(data.splitlines()) for data in exchange.files.values()] == [2, 2, 2]
    assert [name.split(".")[1] for name in exchange.files] == [f"{b:08d}" for b in (2, 3, 4)], "older files are removed"
    silent = Memory()
    assert Node(silent, publish_groups=0).batch()[2].get("swarm_sapo/published") is None and not silent.files


def test_rollouts_of_turns_or_several_rows_are_not_published() -> None:
    exchange = Memory()
    node = Node(exchange)
    rollouts = node.generate(node.plan())
    node.decide(rollouts.replace(index=(torch.arange(len(rollouts)) == 1).long()))
    (data,) = exchange.files.values()
    assert len(data.splitlines()) == GROUPS - 1


def test_a_long_batch_is_several_files() -> None:
    packages = [package(f"q{i}", completions=["x" * 300] * 4) for i in range(5)] + [
        package("long", "7", ["y" * 3000] * 4)
    ]
    files = written_files("n", 3, packages, 4000)
    assert [len(data.splitlines()) for data in files.values()] == [2, 2, 1] and max(map(len, files.values())) <= 4000
    assert all(is_whole(name, data) and name.startswith("n.00000003.") for name, data in files.items())


# ---- what arrives


def schema(*rows: dict[str, Any]) -> Schema:
    rows = rows or ({"prompt": "1+1", "answer": "2"},)
    return Schema(rows, "prompt", [name for name in rows[0] if name != "prompt"])


LIMITS = PackageLimits(characters=100, completions=4)


def read(line: Any, limits: PackageLimits = LIMITS, by: Schema | None = None) -> tuple[list[Package], dict[str, int]]:
    text = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    found, refused = read_packages(text, by or schema(), limits)
    return found, dict(refused)


def fields(p: Package | None = None, **changes: Any) -> dict[str, Any]:
    return {**json.loads((p or package()).line()), **changes}


def test_a_package_arrives_as_it_was_sent() -> None:
    for p in (
        package(),
        package("größer? 😀", completions=["a\nb", "", " x", "7"], finished=[True, False, True, False]),
    ):
        found, refused = read(p.line())
        assert found == [p] and not refused and found[0].id == p.id
    assert read(package().line() + "\n\n" + package("q").line())[0] == [package(), package("q")]
    extra = fields(rewards=[1, 1, 1, 1], advantage=3)
    assert read(extra)[0] == [package()], "rewards of others are not even read"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\xff\xfe{}", "no JSON"),
        ("{" * 100_000, "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("9" * 10_000, "no JSON"),
        ("[]", "a field is missing"),
        ("null", "a field is missing"),
        ({k: v for k, v in fields().items() if k != "columns"}, "a field is missing"),
        (fields(completions="7777"), "a field is missing"),
        (fields(id=7), "a field is missing"),
        (fields(completions=["7"] * 3), "another number of completions"),
        (fields(completions=["7"] * 5), "another number of completions"),
        (fields(finished=[True]), "another number of completions"),
        (fields(completions=["7", "8", None, "9"]), "a completion is no text"),
        (fields(finished=[1, 1, 1, 1]), "a completion is no text"),
        (fields(completions=["7", "x" * 101, "7", "7"]), "a completion is too long"),
        (fields(completions=["7", "\ud800", "7", "7"]), "no plain text"),
        (fields(prompt="\udfff"), "no plain text"),
        (fields(columns={"answer": math.inf}), "no plain text"),
        (fields(package("q" * 200)), "the question is too long"),
        (fields(prompt="another question"), "the id is not that of the question"),
        (fields(columns={"answer": "8"}), "the id is not that of the question"),
        (fields(package(level=3)), "other columns"),
        (fields(Package("q", {}, ("7",) * 4, (True,) * 4)), "other columns"),
        (fields(package(answer=7)), "another kind of value in a column"),  # type: ignore[arg-type]
        (fields(package(answer=["7"])), "another kind of value in a column"),  # type: ignore[arg-type]
        (fields(package(answer=None)), "another kind of value in a column"),  # type: ignore[arg-type]
        (fields(package([{"role": "user", "content": "q"}])), "another kind of prompt"),  # type: ignore[arg-type]
        (fields(package(None)), "another kind of prompt"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(line: Any, reason: str) -> None:
    assert read(line) == ([], {reason: 1})


def test_columns_have_the_kinds_of_the_own_dataset() -> None:
    rows = [
        {"prompt": "q", "n": 1, "tags": ["a"], "info": {"x": 1.5, "y": None}, "ok": True, "maybe": None},
        {"prompt": "q", "n": 2.5, "tags": [], "info": {"x": 2, "y": "t"}, "ok": False, "maybe": "text"},
    ]
    by = schema(*rows)
    good = {"n": 3, "tags": ["b", "c"], "info": {"x": 7, "y": "u"}, "ok": False, "maybe": "m"}
    bad: list[dict[str, Any]] = [
        {"n": 2**63},
        {"n": True},
        {"tags": ["a", 1]},
        {"tags": "a"},
        {"info": {"x": 1}},
        {"info": {"x": 1, "y": 2}},
        {"info": {"x": 1, "y": None, "z": 1}},
        {"ok": 1},
        {"maybe": 3},
    ]

    def made(columns: dict[str, Any]) -> str:
        return Package("q", columns, ("7",) * 4, (True,) * 4).line()

    assert len(read(made(good), by=by)[0]) == 1
    for change in bad:
        assert read(made({**good, **change}), by=by)[1] == {"another kind of value in a column": 1}, change


def test_messages_have_known_roles() -> None:
    by = schema({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": "1"})

    def made(*messages: dict[str, Any]) -> dict[str, int]:
        return read(Package(list(messages), {"answer": "1"}, ("7",) * 4, (True,) * 4).line(), by=by)[1]

    assert not made({"role": "user", "content": "x"})
    assert made({"role": "assistant", "content": "x"}) == {"another role in the prompt": 1}
    assert made() == {"another role in the prompt": 1}
    assert made({"role": "user", "content": 3}) == {"another kind of prompt": 1}
    assert made({"role": "user", "content": "x", "tool_calls": "y"}) == {"another kind of prompt": 1}


def test_tokens_must_give_the_same_text() -> None:
    exchange = Memory()
    bad = {
        "special": package("q1", completions=["7", "7|8", "9", "9"]),
        "unknown": package("q2", completions=["ä", "7", "7", "8"]),
        "long": package("q3", completions=["7" * LONGEST, "7", "7", "8"]),
        "nothing": package("q4", completions=["", "7", "7", "8"], finished=[False] * 4),
    }
    good = {
        "cut": package("q5", "7", ["7" * LONGEST, "7", "7", "8"], finished=[False, True, True, True]),
        "empty": package("q6", "7", ["", "7", "7", "8"]),
        "spaces": package("q7", "7", [" 7 ", "7", "7", "8"]),
    }
    send(exchange, "a", *bad.values(), *good.values())
    node = Node(exchange, groups=8, external_groups=7)
    plan = node.plan()
    found = {str(row.edit["prompt"]): row.given for row in external(plan) if row.edit}
    assert set(found) == {p.prompt for p in good.values()}
    assert found["q5"][0].tokens == (ord("7"),) * LONGEST, "it was cut off, so it has no end"
    assert found["q5"][1].tokens == (ord("7"), 1) and found["q6"][0].tokens == (1,)
    assert node.state["inbox"] == [], "what does not fit leaves"


def test_prompts_that_the_template_cannot_write_are_refused() -> None:
    data = Rows([{"prompt": [{"role": "user", "content": f"{i}"}], "answer": "7"} for i in range(12)])

    class Strict(Letters):
        def prompt(self, messages: Any) -> tuple[int, ...]:
            if len(messages) > 1:
                raise ValueError("roles must alternate")
            return super().prompt(messages)

    def asked(*contents: str) -> Package:
        return Package([{"role": "user", "content": c} for c in contents], {"answer": "7"}, ("7", "8") * 2, (True,) * 4)

    exchange = Memory()
    send(exchange, "a", asked("a", "b"), asked("x|y"), asked("c" * 30), asked("fine"))
    node = Node(exchange, data=data, run={"chat": Strict()}, max_prompt_tokens=20, spare_groups=4)
    assert [row.edit["prompt"][0]["content"] for row in external(node.plan()) if row.edit] == ["fine"]


def test_accept_may_refuse_and_may_fail() -> None:
    def accept(fields: Any) -> bool:
        assert set(fields) == {"prompt", "columns", "completions"}
        return float(fields["columns"]["answer"]) > 5  # raises where it is no number

    exchange = Memory()
    send(exchange, "a", package("q1", "7"), package("q2", "3"), package("q3", "seven"))
    node = Node(exchange, accept=accept)
    plan, _, logged = node.batch()
    assert [row.edit["prompt"] for row in external(plan) if row.edit] == ["q1"]
    assert logged["swarm_sapo/arrived"] == 1 and logged["swarm_sapo/rejected"] == 2


def test_a_newer_package_replaces_the_older_one() -> None:
    exchange = Memory()
    send(exchange, "a", package("q", "7", ["1", "2", "3", "4"]), package("r"), batch=0)
    send(exchange, "a", package("q", "7", ["7", "8", "9", "5"]), batch=1)
    send(exchange, "b", package("q", "7", ["6", "6", "6", "7"]), batch=0)
    for files in (exchange.files, dict(reversed(exchange.files.items()))):  # however they are listed
        node = Node(Memory(files), external_groups=5, spare_groups=0)
        found = sorted(
            (row.edit or {})["prompt"] + Letters().decode(row.given[0].tokens) for row in external(node.plan())
        )
        assert found == ["q6", "q7", "r7"]


def waiting(node: Node) -> list[tuple[str, str]]:
    """Question and first completion of each package that waits, after another look at the exchange."""
    node.method._receive(node.stack.batch)
    lines = [json.loads(entry["line"]) for entry in node.state["inbox"]]
    return [(line["prompt"], line["completions"][0]) for line in lines]


def test_files_beyond_the_quota_are_never_read() -> None:
    """Of the files that one look finds, the newest `sender_quota` are read. The next look must not take the older ones
    for new: they answer the same question, or fill the quota."""

    class Watched(Memory):
        def names(self) -> list[str]:
            return super().names()[::-1]

        def get(self, name: str, most: int) -> bytes:
            asked.append(name.split(".")[1])
            return super().get(name, most)

    asked: list[str] = []
    exchange = Watched()
    for batch in range(5):
        send(exchange, "flood", package("q", "7", [str(batch)] * 4), package(f"old{batch}"), batch=batch)
    node = Node(exchange, sender_quota=2)
    for _ in range(3):
        assert waiting(node) == [("q", "4"), ("old4", "7")]
    assert asked == ["00000003", "00000004"]
    send(exchange, "flood", package("q", "7", ["9"] * 4), batch=5)
    assert ("q", "9") in waiting(node), "a newer one still replaces it"


def test_a_file_that_is_whole_late_replaces_nothing_newer() -> None:
    exchange, old = Memory(), package("q", "7", ["1"] * 4).line().encode()
    name = file_name("a", 0, old)
    exchange.files[name] = old[:20]
    send(exchange, "a", package("q", "7", ["2"] * 4), batch=1)
    node = Node(exchange)
    assert waiting(node) == [("q", "2")]
    exchange.files[name] = old
    assert waiting(node) == [("q", "2")] and name in node.state["seen"]


def test_a_quota_prefers_what_was_sent_last() -> None:
    """A question that is answered again has the age of its new answers, not the place of the old ones."""
    exchange = Memory()
    send(exchange, "a", package("q", "7", ["1"] * 4), package("r"), package("s"), batch=0)
    send(exchange, "a", package("q", "7", ["2"] * 4), batch=1)
    assert waiting(Node(exchange, sender_quota=2)) == [("q", "2"), ("s", "7")]


def test_of_packages_of_one_batch_the_last_one_stays() -> None:
    """Of one file the last line, of two files the one whose name is the last: the same on every run."""
    exchange, texts = Memory(), ["1", "2", "3"]
    (name,) = send(exchange, "a", *(package("q", "7", [t] * 4) for t in texts))
    assert waiting(Node(exchange)) == [("q", "3")]
    more = {n: t for t in texts for n in send(Memory(), "a", package("q", "7", [t] * 4))}
    for order in (sorted(more), sorted(more)[::-1]):
        files = Memory()
        for n in order:
            send(files, "a", package("q", "7", [more[n]] * 4))
        assert waiting(Node(files)) == [("q", more[max(more)])]


def test_of_all_senders_the_latest_arrivals_stay() -> None:
    exchange = Memory()
    send(exchange, "z", package("early"))
    node = Node(exchange, inbox_groups=2)
    assert waiting(node) == [("early", "7")]
    send(exchange, "a", package("late1"))
    send(exchange, "b", package("late2"))
    node.method._receive(node.stack.batch + 1)
    assert [json.loads(e["line"])["prompt"] for e in node.state["inbox"]] == ["late1", "late2"]


def test_limits_are_inclusive() -> None:
    """What is exactly as long as allowed is written, read and taken."""
    (data,) = written_files("a", 0, [package("q", completions=["x" * 300] * 4)], 4000).values()
    size = len(data)
    two = [package(q, completions=["x" * 300] * 4) for q in "qr"]
    assert len(written_files("a", 0, two[:1], size)) == 1 and not written_files("a", 0, two[:1], size - 1)
    assert len(written_files("a", 0, two, 2 * size)) == 1 and len(written_files("a", 0, two, 2 * size - 1)) == 2
    exchange = Memory({file_name("a", 0, data): data})
    found = Mailbox(exchange, "me", 5.0, size, 9).look(0, ())
    assert list(found.files.values()) == [data] and not found.refused
    assert len(read(package(completions=["x" * 100] * 4).line())[0]) == 1


def test_a_question_has_one_id_however_its_columns_are_ordered() -> None:
    one = Package("q", {"a": 1, "b": {"c": 2, "d": 3}}, (), ())
    assert one.id == Package("q", {"b": {"d": 3, "c": 2}, "a": 1}, (), ()).id != Package("q", {"a": 1}, (), ()).id


def test_a_slow_exchange_is_read_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look begins no file near its time-out, so it is no failure, and the next one goes on."""

    class Slow(Memory):
        def get(self, name: str, most: int) -> bytes:
            clock[0] += 3
            return super().get(name, most)

    clock, exchange = [0.0], Slow()
    monkeypatch.setattr(mailbox, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    names = [n for i in range(6) for n in send(exchange, f"n{i}", package(f"q{i}"))]
    mail = Mailbox(exchange, "me", 10.0, 10_000, 9)
    first = mail.look(0, ())
    assert list(first.files) == names[:3] and list(mail.look(1, first.files).files) == names[3:]


def test_rests_after_failures() -> None:
    exchange = Broken("raises")
    mail, batch, rests = Mailbox(exchange, "me", 5.0, 1000, 9), 0, []
    for _ in range(8):
        assert mail.look(batch, ()).error
        begin = batch
        while mail.resting(batch):
            batch += 1
        rests.append(batch - begin)
    assert rests == [2, 4, 8, 16, 32, 64, 64, 64]
    exchange.how = ""
    assert mail.look(batch, ()).error == ""
    exchange.how = "raises"
    assert mail.look(batch, ()).error and mail.resting(batch + 1) and not mail.resting(batch + 2), "counted anew"


def test_a_file_that_was_gone_is_tried_anew() -> None:
    data = package("q").line().encode()
    name, exchange = file_name("a", 0, data), Memory()
    mail = Mailbox(exchange, "me", 5.0, 1000, 9)
    for _ in range(2):
        exchange.files[name] = data[:20]
        assert [mail.look(0, ()).refused for _ in range(2)] == [[], []]
        exchange.files.clear()
        mail.look(0, ())


def test_quotas_keep_the_newest() -> None:
    exchange = Memory()
    for batch in range(4):
        send(exchange, "flood", *(package(f"f{batch}{i}") for i in range(5)), batch=batch)
    send(exchange, "calm", package("c"))
    node = Node(exchange, external_groups=1, spare_groups=0, sender_quota=3, inbox_groups=100)
    node.plan()
    kept = [json.loads(e["line"])["prompt"] for e in node.state["inbox"]]
    assert len(kept) == 3 and {k for k in kept if k[0] == "f"} <= {"f32", "f33", "f34"}
    few = Node(exchange, external_groups=1, spare_groups=0, sender_quota=9, inbox_groups=2)
    few.plan()
    assert len(few.state["inbox"]) == 1


def test_what_is_not_of_the_exchange_is_not_read() -> None:
    exchange = Memory()
    asked: list[str] = []

    class Watched(Memory):
        def get(self, name: str, most: int) -> bytes:
            asked.append(name)
            return super().get(name, most)

    exchange = Watched()
    good = package().line().encode()
    for name in (
        "../x.00000000.0123456789abcdef.jsonl",
        ".a.part",
        "readme.txt",
        "a.1.0.jsonl",
        "a" * 300,
        "/etc/passwd",
    ):
        exchange.files[name] = good
    (mine,) = send(exchange, "me", package("mine"))
    (theirs,) = send(exchange, "you", package("yours"))
    plan = Node(exchange).plan()
    assert asked == [theirs] and [row.edit["prompt"] for row in external(plan) if row.edit] == ["yours"] and mine


def test_a_half_written_file_is_read_when_it_is_whole() -> None:
    exchange = Memory()
    data = package("q").line().encode()
    name = file_name("a", 0, data)
    node = Node(exchange)
    exchange.files[name] = data[:20]
    assert not external(node.plan()) and node.state["seen"] == []
    exchange.files[name] = data
    assert len(external(node.plan())) == 1 and node.state["seen"] == [name]
    never = Node(Memory({name: data[:20]}))
    logged = [never.batch()[2] for _ in range(4)]
    assert [x["swarm_sapo/rejected"] for x in logged] == [0, 0, 1, 0], "after three looks it is given up"


def test_a_file_that_is_too_long_is_not_read_whole() -> None:
    data = (package("q").line() + "\n" + " " * 5000).encode()
    exchange = Memory({file_name("a", 0, data): data})
    plan, _, logged = Node(exchange, max_file_bytes=2000).batch()
    assert not external(plan) and logged["swarm_sapo/rejected"] == 1
    assert len(external(Node(exchange).plan())) == 1


# ---- 10,000 random files

WORDS = ["7", "x", "ä", "\ud800", "|", "^", " ", "\n", "", "\x00", "a" * 50, "😀"]


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can hold."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(["role", "content", "answer", "x"]): junk(rng, depth + 1) for _ in range(rng.randrange(3))}
    values = [None, True, rng.randrange(-9, 9), 1e300 * rng.choice([1, 1e9]), 10**30, "".join(rng.choices(WORDS, k=3))]
    return values[kind]


def random_file(rng: random.Random) -> bytes:
    """Good packages, packages with a field that is anything, with the id of that or the old one, damaged bytes, and
    bytes that are nothing at all."""
    lines = []
    for _ in range(rng.randrange(1, 4)):
        p = package(f"q{rng.randrange(50)}", str(rng.randrange(9)), [str(rng.randrange(9)) for _ in range(SIZE)])
        made = fields(p)
        if rng.random() < 0.6:
            made[rng.choice([*made, "rewards"])] = junk(rng)
        if rng.random() < 0.3 and isinstance(made["completions"], list) and made["completions"]:
            made["completions"][rng.randrange(len(made["completions"]))] = junk(rng)
        if rng.random() < 0.5:  # a liar who knows the hash
            with contextlib.suppress(ValueError, TypeError):
                made["id"] = Package(made["prompt"], made["columns"], (), ()).id
        line = json.dumps(made)
        if rng.random() < 0.3:
            at = rng.randrange(len(line))
            line = (
                line[:at]
                + rng.choice(["", "\x00", "{", '"', "\\u", "9" * 5000, "[" * 2000])
                + line[at + rng.randrange(3) :]
            )
        lines.append(line.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.1:
        lines.append(rng.randbytes(rng.randrange(200)))
    return b"\n".join(lines)


def test_ten_thousand_random_files_change_no_rule() -> None:
    """From the exchange to the plan: whatever others write, batches are whole and what is trained is a package that
    this run could have read itself."""
    rng = random.Random(0)
    exchange = Memory()
    for i in range(10_000):
        data = random_file(rng)
        name = file_name(f"n{i % 250}", i // 250, data)
        if rng.random() < 0.05:
            data = data[: rng.randrange(len(data) + 1)]
        exchange.files[name if rng.random() < 0.98 else name[1:]] = data
    node = Node(exchange, external_groups=5, spare_groups=20, inbox_groups=20_000, sender_quota=200, timeout=600.0)
    arrived = rejected = candidates = 0
    for _ in range(5):
        plan, decision, logged = node.batch()
        assert sum(row.n for row in plan) == SIZE * GROUPS and int(decision.trained.sum()) <= SIZE * GROUPS
        for row in external(plan):
            columns = row.edit or {}
            assert set(columns) == {"prompt", "answer"} and all(isinstance(v, str) for v in columns.values())
            assert len(row.given) == SIZE and all(0 < len(c.tokens) <= LONGEST for c in row.given)
            assert all(0 < t < 128 for c in row.given for t in c.tokens)
            candidates += 1
        arrived += logged["swarm_sapo/arrived"]
        rejected += logged["swarm_sapo/rejected"]
    assert arrived > 3000 and rejected > 3000 and candidates == 5 * 25
    json.dumps(node.state["inbox"]).encode()  # and the state can be saved


# ---- an exchange that does not do what it should


class Broken(Memory):
    """Raises, or hangs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.release = how, 0, threading.Event()

    def names(self) -> list[str]:
        return self._fail(super().names)

    def put(self, name: str, data: bytes) -> None:
        self._fail(lambda: Memory.put(self, name, data))

    def _fail(self, call: Any) -> Any:
        self.calls += 1
        if self.how == "raises":
            raise OSError("the disk is gone")
        if self.how == "hangs":
            self.release.wait(60)
        return call()


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_dead_exchange_leaves_the_own_data(how: str, caplog: pytest.LogCaptureFixture) -> None:
    exchange = Broken(how)
    node = Node(exchange, timeout=0.2)
    began, failed = time.monotonic(), []
    for _ in range(20):
        plan, decision, logged = node.batch()
        assert not external(plan) and int(decision.trained.sum()) == SIZE * GROUPS
        failed.append(logged.get("swarm_sapo/failed", 0))
    exchange.release.set()
    took = time.monotonic() - began
    assert [i for i, f in enumerate(failed) if f] == [0, 2, 6, 14], "it is tried less and less often"
    assert exchange.calls == 4, "after a look that failed the same batch writes nothing"
    assert took < 4 * 0.2 + 2
    told = [r.message for r in caplog.records if "own data" in r.message]
    assert len(told) == 1 and "the exchange cannot be read" in told[0]
    exchange.how = ""
    send(exchange, "a", package("q"))
    for _ in range(20):
        if external(node.batch()[0]):
            break
    else:
        raise AssertionError("it is not read again")
    assert node.batch()[2]["swarm_sapo/failed"] == 0


def test_what_was_read_before_a_file_hangs_counts() -> None:
    release = threading.Event()

    class Slow(Memory):
        def get(self, name: str, most: int) -> bytes:
            if name.startswith("z"):
                release.wait(60)
            return super().get(name, most)

    exchange = Slow()
    send(exchange, "a", package("q"))
    send(exchange, "z", package("r"))
    plan, _, logged = Node(exchange, timeout=0.3).batch()
    release.set()
    assert [row.edit["prompt"] for row in external(plan) if row.edit] == ["q"] and logged["swarm_sapo/failed"] == 1


def test_a_folder_that_cannot_be_written() -> None:
    exchange = Files("/proc/none/swarm")
    plan, _, logged = Node(exchange).batch()
    assert not external(plan) and logged["swarm_sapo/failed"] == 1 and "swarm_sapo/published" not in logged


# ---- places


class Handler(BaseHTTPRequestHandler):
    """A server as `Http` describes it; a key is asked for where the server has one."""

    def do_GET(self) -> None:
        files, name = self.server.files, self.path.strip("/")  # type: ignore[attr-defined]
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":  # type: ignore[attr-defined]
            return self.reply(401)
        if not name:
            listed = [{"name": n, "type": "file"} for n in files] if len(files) % 2 else list(files)
            return self.reply(200, json.dumps(listed).encode())
        return self.reply(200, files[name]) if name in files else self.reply(404)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.files[self.path.strip("/")] = data  # type: ignore[attr-defined]
        self.reply(201)

    def do_DELETE(self) -> None:
        gone = self.server.files.pop(self.path.strip("/"), None)  # type: ignore[attr-defined]
        self.reply(404 if gone is None else 204)

    def reply(self, status: int, data: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.files, made.key = {}, ""  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(params=["folder", "fsspec", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "http":
        port = request.getfixturevalue("server").server_address[1]
        return f"http://127.0.0.1:{port}"
    return str(tmp_path / "swarm") if request.param == "folder" else f"memory://{tmp_path.name}/swarm"


def test_two_nodes_share_over_every_place(place: str) -> None:
    """What one node answers is what the other trains on, as it was sent."""
    kind = Http if place[0] == "h" else Files
    assert type(open_exchange(place)) is kind
    one = Node(None, "one", exchange=place, answer=lambda c, rng: rng.choice([c["answer"], "0"]))
    two = Node(None, "two", exchange=place, answer=lambda c, rng: "wrong", seed=3)
    assert not external(one.batch()[0]), "an empty exchange, or none at all yet"
    plan, decision, logged = two.batch()
    foreign = external(plan)
    sent = {line["prompt"]: line for data in stored(place).values() for line in map(json.loads, data.splitlines())}
    assert len(foreign) == 4 and logged["swarm_sapo/arrived"] == GROUPS
    for row in foreign:
        line = sent[(row.edit or {})["prompt"]]
        assert [Letters().decode(c.tokens) for c in row.given] == line["completions"]
        assert {**line["columns"], "prompt": line["prompt"]} == row.edit
    assert bool(decision.trained[is_external(decision)].any()), "it learns what it never answers itself"
    assert float(decision.rollouts.reward[~is_external(decision)].max()) == 0


def stored(place: str) -> dict[str, bytes]:
    exchange = open_exchange(place)
    return {name: exchange.get(name, 10**9) for name in exchange.names() if sender_of(name) == "one"}


def test_files_of_a_place(place: str) -> None:
    exchange = open_exchange(place)
    assert exchange.names() == []
    exchange.put("a.jsonl", b"12345")
    exchange.put("a.jsonl", b"1234567")
    exchange.put("b.jsonl", b"")
    assert sorted(exchange.names()) == ["a.jsonl", "b.jsonl"], "nothing unfinished is left"
    assert exchange.get("a.jsonl", 3) == b"123" and exchange.get("a.jsonl", 99) == b"1234567"
    exchange.remove("a.jsonl")
    exchange.remove("a.jsonl")
    with pytest.raises(FileNotFoundError):
        exchange.get("a.jsonl", 9)
    assert exchange.names() == ["b.jsonl"]


def test_a_file_of_a_folder_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen, rename = Files(tmp_path), [], os.rename

    def renamed(a: Any, b: Any) -> None:
        seen.append([n for n in folder.names() if sender_of(n)])
        rename(a, b)

    monkeypatch.setattr("os.rename", renamed)
    (name,) = send(folder, "a", package())
    assert seen == [[]] and folder.names() == [name]
    monkeypatch.setattr("shutil.move", lambda a, b: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        folder.put("b", b"1")
    assert folder.names() == [name], "what was begun is removed"
    os.mkfifo(tmp_path / "c.00000000.0123456789abcdef.jsonl")
    with pytest.raises(FileNotFoundError):
        folder.get("c.00000000.0123456789abcdef.jsonl", 9)


def test_an_endpoint_with_a_key(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret"
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("SWARM_KEY", "secret\n")
    assert open_exchange(url, "SWARM_KEY").names() == []
    with pytest.raises(Exception, match="401"):
        open_exchange(url).names()
    with pytest.raises(ConfigError, match="NO_KEY, which should hold the key, is not set"):
        open_exchange(url, "NO_KEY")


def test_lists_that_are_none_are_errors(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    answers = {"{}": "a JSON list of names", '[1, null, {}, {"name": 3}, "x"]': None, "x" * 100: "Expecting value"}
    for body, error in answers.items():
        monkeypatch.setattr(Handler, "do_GET", lambda self, body=body: self.reply(200, body.encode()))
        if error:
            with pytest.raises(ValueError, match=error):
                Http(url).names()
        else:
            assert Http(url).names() == ["x"]
    monkeypatch.setattr("rl_plugins.methods.swarm_sapo.exchange.MOST_NAMES", 50)
    with pytest.raises(ValueError, match="longer than 50 bytes"):
        Http(url).names()


# ---- a resumed run


def test_a_resumed_run_goes_on_with_its_inbox(tmp_path: Path) -> None:
    def fresh() -> Memory:
        exchange = Memory()
        send(exchange, "a", *(package(f"q{i}") for i in range(7)))
        return exchange

    late = package("late")
    whole, killed = Node(fresh()), Node(fresh())
    plans = [whole.batch()[0] for _ in range(2)]
    send_all = (whole.method._mail, killed.method._mail)
    for mail in send_all:
        assert mail is not None
    send(whole.method._mail.exchange, "b", late)  # type: ignore[union-attr]
    plans += [whole.batch()[0] for _ in range(2)]
    for _ in range(2):
        killed.batch()
    save_state(tmp_path, killed.stack.state_dict("data"))
    exchange = killed.method._mail.exchange  # type: ignore[union-attr]
    killed.batch()  # is lost
    before = dict(exchange.files)
    send(exchange, "b", late)
    resumed = Node(exchange)
    resumed.stack.load_state_dict(load_state(tmp_path) or {}, "data")
    again = [resumed.batch()[0] for _ in range(2)]
    assert again == plans[2:] and any(external(plan) for plan in again)
    assert set(before) <= set(exchange.files)
    names = [n for n in exchange.files if sender_of(n) == "me"]
    assert len(names) == len(set(names)) and resumed.state == whole.state | {"own": resumed.state["own"]}


# ---- what does not fit


def capabilities(**changes: Any) -> HostCapabilities:
    values: dict[str, Any] = dict(
        name="trl",
        version="0",
        hooks=[*SwarmSapo.claims(), *DecoupledPpo.claims()],
        missing_hooks={},
        eval_hooks=(),
        missing_signals={},
        columns=None,
        options={},
    )
    return HostCapabilities(**{**values, **changes})


def test_corrections_that_need_a_sampling_probability_are_refused() -> None:
    method, known = built(Memory()), capabilities(options={"vllm_importance_sampling_correction": False})
    with pytest.raises(ConfigError, match="`swarm_sapo` puts tokens into rollouts that were not sampled"):
        preflight(MethodStack([method, DecoupledPpo()]), known)
    with pytest.raises(ConfigError, match="rollout_is=token asks for that. Turn it off"):
        preflight(MethodStack([method]), capabilities(importance_weights={"rollout_is": "token"}))
    preflight(MethodStack([built(external_groups=0, shared=Memory()), DecoupledPpo()]), known)
    with pytest.raises(ConfigError, match="needs two or more rollouts per prompt"):
        preflight(MethodStack([method]), capabilities(run=make_run(group_size=1)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"exchange": ""}, "needs `exchange`. Give the place where nodes exchange packages"),
        ({"node": ""}, "needs `node`"),
        ({"node": "a.b"}, "must be 1 to 64 letters, digits"),
        ({"node": "../x"}, "must be 1 to 64 letters, digits"),
        ({"external_groups": 0, "select_by": "sample"}, "`select_by` has no effect"),
        ({"exchange": "packages", "key_env": "KEY"}, "`key_env` has no effect"),
        ({"external_weight": -1}, "it must be >= 0"),
    ],
)
def test_parameters_that_cannot_be_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**params)


def test_data_that_cannot_be_exchanged_are_refused() -> None:
    with pytest.raises(ConfigError, match="The prompts have images, and an exchange carries text alone"):
        built().check(make_run(columns=("prompt", "images")))
    with pytest.raises(ConfigError, match="`made` cannot be exchanged as JSON"):
        Node(Memory(), data=Rows([{"prompt": "q", "made": object()}]))
    with pytest.raises(ConfigError, match="fsspec cannot open the exchange 'nosuch://x'"):
        built(exchange="nosuch://x").check(make_run())


def test_refills_and_dry_runs_take_no_package() -> None:
    exchange = Memory()
    send(exchange, "a", package())
    assert not external(Node(exchange, run={"chat": None}).plan())
    node = Node(exchange)
    plan = node.plan()
    later = tuple(row.replace(group=row.group + 9, prompt_index=i) for i, row in enumerate(plan))
    from rl_plugins.core.rollouts import Plan

    assert node.method.plan(Plan(later, SIZE, 24)) is None


def test_it_says_when_nothing_arrives() -> None:
    (idle,) = SwarmSapo.idle
    _, _, logged = Node(Memory()).batch()
    assert all(logged[f"swarm_sapo/{name}"] == value for name, value in idle.signs.items())


def test_the_gradient_is_on_policy() -> None:
    """Old log-probs are those of the own policy, so the ratio is 1 and nothing is clipped in the first update."""
    exchange = Memory()
    send(exchange, "a", package("q1", "7"), package("q2", "7"))
    node = Node(exchange)
    rollouts: Rollouts = node.generate(node.plan())
    decision = one_step(node.stack, rollouts, budget=SIZE * GROUPS)
    foreign = is_external(decision) & decision.trained
    assert int(foreign.sum()) == 2 * SIZE and decision.old_logprobs is None
    r = decision.rollouts
    for group in set(r.group[foreign].tolist()):
        own = r.reward[r.group == group]
        wanted = (own - own.mean()) / (own.std() + 1e-4)
        assert torch.allclose(decision.row_advantages[r.group == group], wanted, rtol=0, atol=1e-12)
