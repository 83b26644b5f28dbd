"""The rollouts of UI-S1 and M-GRPO: rows, books and faults on the fake engine, and what their methods make of them."""

from __future__ import annotations

import asyncio
import math
import re
import time

import pytest
import torch

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind
from rl_plugins.methods.m_grpo import MGrpo
from rl_plugins.methods.m_grpo_rollout.method import MGrpoRollout
from rl_plugins.methods.ui_s1 import UiS1
from rl_plugins.methods.ui_s1_rollout import UiS1Rollout
from rl_plugins.runtime.turn_table import FlatTurns, turn_table
from rl_plugins.testing import make_rollouts, one_step, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program
from rl_plugins.tools.messages import Lineage, read_logs, replay
from rl_plugins.tools.messages.contracts import SUMMARY, Contract
from rl_plugins.tools.messages.guard import WITHHELD, LineageGuard


def scripted(answers, otherwise=EOS):
    """A model that answers a context that ends in a key with the value, character by character."""

    def model(text):
        for end, answer in answers.items():
            for k in range(len(answer) + 1):
                if text.endswith(end + answer[:k]):
                    return {answer[k] if k < len(answer) else EOS: 1.0}
        return {otherwise: 1.0}

    return TableEngine(model)


# ---- UI-S1

EXPERT = [["s0", "a"], ["s1", "b"], {"observation": "s2", "response": "c"}]


def ui(engine, n=1, params=None, training=True, expert=EXPERT):
    method = UiS1Rollout(UiS1Rollout.Params(**(params or {})))
    prompt = make_prompt(engine.chat, "task", n=n, columns={"expert": expert}, training=training)
    logged: dict[str, float] = {}
    return run_program(method, prompt, engine, logged), logged


def texts(engine, rows):
    return [(engine.chat.decode(r.prompt, True), engine.chat.decode(r.tokens)) for r in rows]


def test_right_actions_walk_the_recording():
    engine = scripted({"<s0>": "a", "<s1>": "b", "<s2>": "c"})
    (rows,), logged = ui(engine)
    assert texts(engine, rows) == [
        ("<task><s0>", "a"),
        ("<task><s0>a<eos><s1>", "b"),
        ("<task><s0>a<eos><s1>b<eos><s2>", "c"),
    ]
    assert [(t.anchor, t.reward, t.valid) for r in rows for t in r.turns] == [
        ("s0", 1, True),
        ("s1", 1, True),
        ("s2", 1, True),
    ]
    assert all(set(r.kinds) == {Kind.SAMPLED} for r in rows) and rows[0].meta["progress"] == 1.0
    assert logged["ui_s1_rollout/steps"] == 3 and logged["ui_s1_rollout/patches"] == 0


def test_a_wrong_action_is_patched_in_the_history_and_trained_as_it_is():
    engine = scripted({"<s0>": "x", "<s1>": "b", "<s2>": "y"})
    (rows,), logged = ui(engine)
    assert texts(engine, rows) == [
        ("<task><s0>", "x"),
        ("<task><s0>a<eos><s1>", "b"),
        ("<task><s0>a<eos><s1>b<eos><s2>", "y"),
    ]
    assert [t.valid for r in rows for t in r.turns] == [False, True, False]
    assert logged["ui_s1_rollout/patches"] == 1 and rows[0].meta["progress"] == 0


@pytest.mark.parametrize(("patches", "training", "steps"), [(0, True, 1), (1, True, 2), (2, True, 3), (2, False, 1)])
def test_patches_run_out(patches, training, steps):
    engine = scripted({"<s0>": "x", "<s1>": "x", "<s2>": "x"})
    (rows,), _ = ui(engine, params={"max_patches": patches}, training=training)
    assert len(rows) == steps


def test_a_matcher_that_fails_or_hangs_ends_the_rollout_without_a_reward():
    def hang(*_):
        time.sleep(0.3)

    engine = scripted({"<s0>": "a"})
    for match in (lambda *_: 1 / 0, lambda *_: "nonsense", hang):
        (rows,), logged = ui(engine, params={"match": match, "timeout": 0.05})
        assert len(rows) == 1 and math.isnan(rows[0].turns[0].reward) and logged["ui_s1_rollout/match_failed"] == 1


def test_own_matcher_and_writer():
    engine = scripted({"<3 s1>": "b", "<1 s0>": "a", "<5 s2>": "c"})

    def write(messages, history, observation):
        return [*messages, {"role": "user", "content": f"{2 * len(history) + 1} {observation}"}]

    def match(response, expert, columns):
        return response == expert, 0.9 if columns["expert"] else 0

    (rows,), _ = ui(engine, params={"write": write, "match": match})
    assert [engine.chat.decode(r.prompt) for r in rows] == ["<task><1 s0>", "<task><3 s1>", "<task><5 s2>"]
    assert [t.reward for r in rows for t in r.turns] == [0.9] * 3


@pytest.mark.parametrize(
    ("expert", "why"),
    [
        ([], "no recorded turns in the column `expert`"),
        ([["a", "b"]] * 17, "has 17 recorded"),
        ([["a"]], "needs an obs"),
    ],
)
def test_wrong_recordings(expert, why):
    with pytest.raises(MethodError, match=why):
        ui(scripted({}), expert=expert)


def test_a_response_of_no_token_is_a_wrong_action():
    engine = TableEngine({">": {"a": 1.0}}, abort_after=0)
    (rows,), _ = ui(engine)
    assert [len(r) for r in rows] == [0, 0] and not rows[0].turns


def test_rows_reach_the_advantages_of_ui_s1():
    """A good rollout and one that fails at its second step: the first step is told apart by what follows it."""
    engine = TableEngine(lambda text: {"a": 0.5, "b": 0.5} if text.endswith(">") else {EOS: 1.0}, seed=5)
    (rollouts), _ = ui(engine, n=6, expert=[["s0", "a"], ["s1", "b"]], params={"max_patches": 0})
    flat = [(k, i, row) for k, rows in enumerate(rollouts) for i, row in enumerate(rows)]
    made = make_rollouts([1.0] * len(flat)).replace(
        group=torch.zeros(len(flat), dtype=torch.int64),
        rollout=torch.tensor([k for k, _, _ in flat]),
        index=torch.tensor([i for _, i, _ in flat]),
    )
    made = made.replace(turns=turn_table(made, FlatTurns.of([row.turns for _, _, row in flat])))
    method = UiS1(UiS1.Params(filter_by="none"))
    start_stack(method)
    advantages = method.advantages(made)
    assert made.turns.turn.tolist() == [i for _, i, _ in flat]
    right = [
        a
        for a, v, t in zip(advantages.tolist(), made.turns.valid.tolist(), made.turns.turn.tolist(), strict=True)
        if v and t == 0
    ]
    wrong = [
        a
        for a, v, t in zip(advantages.tolist(), made.turns.valid.tolist(), made.turns.turn.tolist(), strict=True)
        if not v and t == 0
    ]
    assert right and wrong and min(right) > max(wrong)


# ---- M-GRPO


def team(engine, n=1, max_tokens=200, **params):
    logged: dict[str, float] = {}
    method = MGrpoRollout(MGrpoRollout.Params(**params))
    return run_program(method, make_prompt(engine.chat, "q", n=n, max_tokens=max_tokens), engine, logged), logged


CALL = "<tool_call>x</tool_call><tool_call>y</tool_call>"


def test_calls_become_rows_of_their_own():
    engine = scripted(
        {"<q>": CALL, "<x>": "ok <result>7</result>", "<y>": "8", "<tool_response>8</tool_response>>": "15"}
    )
    (rows,), logged = team(engine)
    first, second, main = rows
    assert engine.chat.decode(main.tokens) == (
        f"{CALL}<<tool_response>7</tool_response>\n<tool_response>8</tool_response>>15"
    )
    assert [r.meta["agent"] for r in rows] == ["sub", "sub", "main"]
    assert engine.chat.decode(first.prompt) == "<x>" and engine.chat.decode(second.tokens) == "8"
    trained = engine.chat.decode([t for t, m in zip(main.tokens, main.trained, strict=True) if m])
    assert trained == f"{CALL}15", "what the sub-agents said is not trained in the main agent's row"
    assert [(t.start, engine.chat.decode(main.tokens[t.start : t.stop])) for t in main.turns] == [
        (0, CALL),
        (main.turns[1].start, "15"),
    ]
    assert logged == {
        "m_grpo_rollout/calls": 2,
        "m_grpo_rollout/turns": 2,
        "m_grpo_rollout/agent_turns": 4,
        "m_grpo_rollout/agent_tokens": sum(m for r in rows for m in r.trained),
        "m_grpo_rollout/messages": 4,
        "m_grpo_rollout/parse_failed": 0,
        "m_grpo_rollout/message_density": 1.0,  # two tasks and two results in two turns of each
        "m_grpo_rollout/redundancy": 0.0,  # 7, 8, 15
    }


def test_limits_of_calls_turns_and_room():
    engine = scripted({"<q>": CALL, "</tool_response>>": CALL, "<x>": "1", "<y>": "2"})
    (rows,), _ = team(engine, max_calls=3)
    assert len(rows) == 4
    (rows,), _ = team(engine, max_turns=2, max_calls=100)
    assert len(rows) == 3, "after its last turn nobody reads a result, so nobody is called"
    (rows,), _ = team(engine, max_calls=100, max_tokens=60)
    assert len(rows[-1]) <= 60 and rows[-1].finish == "eos"


def test_no_call_and_a_parser_that_fails():
    engine = scripted({"<q>": "42"})
    (rows,), _ = team(engine)
    assert len(rows) == 1 and engine.chat.decode(rows[0].tokens) == "42"
    (rows,), logged = team(scripted({"<q>": CALL}), parse=lambda text: 1 / 0)
    assert len(rows) == 1 and logged["m_grpo_rollout/parse_failed"] == 1


def test_an_expert_judges_each_call_by_its_task_and_result():
    """A judgment that failed or is no number is none."""
    judgments = {("x", "7"): 0.75, ("y", "8"): "good"}
    script = {"<q>": CALL, "<x>": "ok <result>7</result>", "<y>": "8"}
    (rows,), logged = team(scripted(script), expert=lambda *asked: judgments[asked])
    assert [r.meta["expert"] for r in rows] == [0.75, None, None]
    assert logged["m_grpo_rollout/expert_failed"] == 0.5
    (rows,), logged = team(scripted({"<q>": "42"}), expert=lambda *asked: 1 / 0)
    assert rows[0].meta["expert"] is None and "m_grpo_rollout/expert_failed" not in logged
    assert "column:expert" in MGrpoRollout(MGrpoRollout.Params(expert=len)).brings - MGrpoRollout().brings


ONE_CALL = "<tool_call>x</tool_call>"
REJECTED = "These claims of your message were rejected. Write it again without them:\n- "


def told(engine, rows):
    """What the main agent read of its sub-agents."""
    text = engine.chat.decode(rows[-1].tokens)
    return re.findall(r"<tool_response>(.*?)</tool_response>", text, re.DOTALL)


def test_the_guard_changes_what_the_main_agent_reads_and_nothing_else():
    script = {"<q>": ONE_CALL, "<x>": "1 + 1 = 2. 1 + 1 = 3. Fine."}
    plain, _ = team(scripted(script))
    expected = {
        "off": "1 + 1 = 2. 1 + 1 = 3. Fine.",
        "speed": "[unverified] 1 + 1 = 2. [unverified] 1 + 1 = 3. [unverified] Fine.",
        "strict": "1 + 1 = 2. [unverified] Fine.",
    }
    for policy, read in expected.items():
        engine = scripted(script)
        (rows,), logged = team(engine, guard=policy, **({} if policy == "off" else {"guard_retries": 0}))
        assert told(engine, rows) == [read]
        assert rows[0].tokens == plain[0][0].tokens and rows[0].logprobs == plain[0][0].logprobs
        assert logged.get("m_grpo_rollout/rejected") == {"off": None, "speed": 0, "strict": 1}[policy]
        assert logged.get("m_grpo_rollout/unverified") == {"off": None, "speed": 3, "strict": 1}[policy]


@pytest.mark.parametrize(("retries", "corrected"), [(1, True), (2, True), (2, False)])
def test_a_rejected_claim_goes_back_to_its_sub_agent(retries, corrected):
    bad, again = "1 + 1 = 3", f"<{REJECTED}1 + 1 = 3 (against it: the calculation is wrong)>"
    engine = scripted({"<q>": ONE_CALL, "<x>": bad, again: "1 + 1 = 2" if corrected else bad})
    (rows,), logged = team(engine, guard="strict", guard_retries=retries, max_tokens=400)
    sub, main = rows
    back = 1 if corrected else retries
    assert len(sub.turns) == 1 + back and logged["m_grpo_rollout/sent_back"] == back
    assert told(engine, rows) == ["1 + 1 = 2" if corrected else "[withheld: no claim of this message was released]"]
    trained = engine.chat.decode([t for t, m in zip(sub.tokens, sub.trained, strict=True) if m])
    assert trained == bad + ("1 + 1 = 2" if corrected else bad * back), "its own words are trained, the feedback is not"
    assert logged["m_grpo_rollout/message_density"] == (2 + 2 * back) / (len(main.turns) + 1 + back)


def test_a_sub_agent_without_room_is_not_asked_again():
    engine = scripted({"<q>": ONE_CALL, "<x>": "1 + 1 = 3. Fine."})
    (rows,), logged = team(engine, guard="strict", guard_retries=3, max_tokens=100)
    assert told(engine, rows) == ["[unverified] Fine."] and len(rows[0].turns) == 1
    assert logged["m_grpo_rollout/sent_back"] == 1


def test_facts_of_a_column_are_known():
    engine = scripted({"<q>": ONE_CALL, "<x>": "It is 3 m. It is 4 m. Fine."})
    method = MGrpoRollout(MGrpoRollout.Params(guard="speed", guard_facts="facts", guard_retries=0))
    assert "column:facts" in method.needs
    prompt = make_prompt(engine.chat, "q", n=2, max_tokens=200, columns={"facts": ["It is 3 m."]})
    for rows in run_program(method, prompt, engine, {}):
        assert told(engine, rows) == ["It is 3 m. [unverified] Fine."]


@pytest.mark.parametrize("name", ["guard_verifier", "guard_splitter", "guard_entailment"])
@pytest.mark.parametrize("bad", [lambda _: 1 / 0, lambda _: time.sleep(0.6), lambda _: "nonsense"])
def test_a_part_of_the_guard_that_raises_hangs_or_answers_nonsense_tags_the_result(name, bad):
    engine = scripted({"<q>": ONE_CALL, "<x>": "It is so."})
    (rows,), logged = team(engine, guard="strict", timeout=0.4, **{name: bad})
    assert told(engine, rows) == ["[unverified] It is so."]
    assert logged["m_grpo_rollout/guard_failed"] == 0 and logged["m_grpo_rollout/calls_failed"] == 1
    assert logged["m_grpo_rollout/verified"] == (name == "guard_verifier")


def test_splitter_and_entailment_of_ones_own():
    engine = scripted({"<q>": ONE_CALL, "<x>": "a|b|c"})
    (rows,), logged = team(
        engine,
        guard="speed",
        guard_retries=0,
        guard_splitter=lambda message: message.split("|"),
        guard_entailment=lambda fields: {"a": "green", "b": "red", "c": None}[fields["claim"]],
    )
    assert told(engine, rows) == ["a||[unverified] c"] and logged["m_grpo_rollout/calls_failed"] == 0


def test_the_log_of_the_guard_tells_who_said_what_and_is_replayed(tmp_path):
    facts = ["It is 3 m."]
    engine = scripted({"<q>": CALL, "<x>": "It is 4 m. Fine.", "<y>": "Fine."})
    method = MGrpoRollout(
        MGrpoRollout.Params(guard="speed", guard_facts="facts", guard_retries=0, guard_log=str(tmp_path / "log"))
    )
    prompt = make_prompt(engine.chat, "q", n=2, max_tokens=200, columns={"facts": facts})
    logged = {}
    run_program(method, prompt, engine, logged)
    entries = list(read_logs(tmp_path / "log"))
    assert logged["m_grpo_rollout/log_failed"] == 0 and sorted(e["rollout"] for e in entries) == [0, 1]
    assert all(e["batch"] == 0 and e["training"] and e["prompt"] == "<q>" for e in entries)
    lineage = Lineage.from_log(entries[0]["records"])
    assert [(c.author, c.text, c.status, c.round, c.parents, c.released) for c in lineage.claims] == [
        ("given", "It is 3 m.", "confirmed", 0, (), True),
        ("sub 1", "It is 4 m.", "rejected", 1, (0,), False),
        ("sub 1", "Fine.", "unverified", 1, (), True),
        ("sub 2", "Fine.", "unverified", 1, (2,), True),
    ]
    strict = LineageGuard("strict", verifier=lambda f: f["claim"] != "Fine.", retries=0)
    again = asyncio.run(replay(entries[0]["records"], strict))
    assert [r["released"] for r in again if r["receiver"]] == [WITHHELD, WITHHELD]

    (tmp_path / "file").write_text("")
    method = MGrpoRollout(MGrpoRollout.Params(guard="speed", guard_log=str(tmp_path / "file")))
    run_program(method, make_prompt(engine.chat, "q", max_tokens=200), engine, logged)
    assert logged["m_grpo_rollout/log_failed"] == 1  # training goes on


def test_parameters_of_the_guard_without_a_guard_are_refused():
    for name, value in (("guard_retries", 2), ("guard_log", "x"), ("guard_splitter", "json:loads")):
        with pytest.raises(ConfigError, match=f"`{name}` has no effect"):
            build_params(MGrpoRollout.Params, {name: value}, "m_grpo_rollout")
    with pytest.raises(ConfigError, match="`guard_verifier` has no effect"):
        build_params(MGrpoRollout.Params, {"guard": "speed", "guard_verifier": "json:loads"}, "m_grpo_rollout")
    with pytest.raises(ConfigError, match="`invalid_penalty` has no effect"):
        build_params(MGrpoRollout.Params, {"invalid_penalty": 0.5}, "m_grpo_rollout")
    with pytest.raises(ConfigError, match="'balanced'.*off.*speed.*strict"):
        build_params(MGrpoRollout.Params, {"guard": "balanced"}, "m_grpo_rollout")


async def raises(*_, **__):
    raise RuntimeError("down")


async def hangs(*_, **__):
    await asyncio.sleep(60)


@pytest.mark.parametrize("broken", [raises, hangs])
def test_a_guard_that_fails_as_a_whole_tags_the_result(monkeypatch, broken):
    monkeypatch.setattr(LineageGuard, "check", broken)
    engine = scripted({"<q>": CALL, "<x>": "1 + 1 = 2. More.", "<y>": "Fine."})
    (rows,), logged = team(engine, guard="strict", timeout=0.2)
    assert told(engine, rows) == ["[unverified] 1 + 1 = 2. More.", "[unverified] Fine."]
    assert logged["m_grpo_rollout/guard_failed"] == 1


def short():
    return Contract("result", SUMMARY.schema, size=40)


def test_a_contract_decides_what_the_main_agent_reads():
    valid, wrong = '{"text": "7"}', '{"confidence": 2}'
    for said, read, invalid in [(valid, valid, 0.0), ("7 m", '{"text": "7 m"}', 0.0), (wrong, None, 1.0)]:
        engine = scripted({"<q>": ONE_CALL, "<x>": f"<result>{said}</result>"})
        (rows,), logged = team(engine, contract=short, max_tokens=300)
        assert told(engine, rows) == [read] or (read is None and "packet has no field text" in told(engine, rows)[0])
        assert [row.meta["invalid"] for row in rows] == [invalid] * 2 and logged["m_grpo_rollout/invalid"] == invalid
        assert engine.chat.decode(rows[0].tokens) == f"<result>{said}</result>"


def test_the_share_of_invalid_results_costs_reward():
    made = make_rollouts([1.0, 1.0, 0.5, 1.0]).replace(meta={"invalid": [1.0, 0.0, 0.5, 0.0]})
    method = MGrpoRollout(MGrpoRollout.Params(contract=short, invalid_penalty=0.4))
    assert method.rewards(made).tolist() == pytest.approx([0.6, 1.0, 0.3, 1.0])
    assert MGrpoRollout(MGrpoRollout.Params(contract=short)).rewards(made) is None
    with pytest.raises(ConfigError, match="It must return a rl_plugins.tools.messages.Contract"):
        MGrpoRollout(MGrpoRollout.Params(contract=dict))


def test_rows_reach_the_groups_of_m_grpo():
    engine = TableEngine(
        lambda text: (
            {"<tool_call>x</tool_call>"[0]: 0.5, "4": 0.5}
            if text.endswith("<q>")
            else {"<tool_call>x</tool_call>"[len(text) - 3]: 1.0}
            if text.startswith("<q><") and len(text) - 3 < 24 and "_response" not in text
            else {EOS: 1.0}
        ),
        seed=1,
    )
    rollouts, logged = team(engine, n=8)
    flat = [(k, i, row) for k, rows in enumerate(rollouts) for i, row in enumerate(rows)]
    assert 0 < logged["m_grpo_rollout/calls"] < 1
    made = make_rollouts([float(k % 2) for k, _, _ in flat]).replace(
        group=torch.zeros(len(flat), dtype=torch.int64),
        rollout=torch.tensor([k for k, _, _ in flat]),
        index=torch.tensor([i for _, i, _ in flat]),
        meta={"agent": [row.meta["agent"] for _, _, row in flat]},
    )
    decision = one_step(start_stack(MGrpo(MGrpo.Params(sub_per_rollout=1))), made)
    assert decision.trained.any()
