"""Fission-GRPO (arXiv 2601.15625): the pool, what is served, messages that give nothing away, and the reward."""

from __future__ import annotations

import json
import math
import time
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow, Rollouts
from rl_plugins.methods.fission_grpo import FissionGrpo, ToolCall, as_calls, correctness, leaks, read_calls, simulate
from rl_plugins.methods.fission_grpo.calls import GENERIC, UNREADABLE
from rl_plugins.methods.fission_grpo_reward import FissionReward
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_turns, one_step, start_stack

GOLD = [{"name": "book", "arguments": {"city": "Paris", "nights": 2}}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "properties": {
                    "city": {"type": "string"},
                    "nights": {"type": "integer"},
                    "room": {"type": "string", "enum": ["single", "double"]},
                },
                "required": ["city"],
            },
        },
    },
    {"name": "cancel", "parameters": {}},
]


class Data:
    """A dataset of messages with the right calls."""

    column_names = ["prompt", "gold", "tools"]

    def __init__(self, size: int = 16, text: bool = False) -> None:
        self.size, self.text = size, text

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Any]:
        prompt = f"question {i}" if self.text else [{"role": "user", "content": f"question {i}"}]
        return {"prompt": prompt, "gold": GOLD, "tools": TOOLS, "raw_prompt": "rendered"}


def fission(**params: Any) -> FissionGrpo:
    return FissionGrpo(build_params(FissionGrpo.Params, params, "fission_grpo"))


def stack_of(data: Data | None = None, **params: Any) -> tuple[MethodStack, FissionGrpo]:
    method = fission(**params)
    return start_stack(method, run=make_run(dataset=data or Data(), dataset_size=16, group_size=4)), method


def rollouts_of(
    rewards: Any, prompts: Any, texts: Any = None, step: int = 0, data: Data | None = None, **changes: Any
) -> Rollouts:
    """Groups of 4; `prompts` has the dataset row of each group."""
    data, n = data or Data(), len(rewards)
    index = [prompts[i // 4] for i in range(n)]
    rows = [data[i] if i >= 0 else {"prompt": "?", "gold": GOLD, "tools": TOOLS} for i in index]
    meta = {k: [r[k] for r in rows] for k in ("prompt", "gold", "tools")} | changes.pop("meta", {})
    texts = [f"answer {i}" for i in range(n)] if texts is None else texts
    return make_rollouts(rewards, prompt_index=index, text=texts, meta=meta, batch=step, **changes)


def feed(stack: MethodStack, rollouts: Rollouts) -> dict[str, float]:
    stack.call("observe", stack.methods[0], rollouts, None, {})
    return combine([stack.metrics.take()])


def plan_at(stack: MethodStack, step: int, prompts: int = 4, **changes: Any) -> Any:
    return stack.call("plan", stack.methods[0], make_plan(prompts, 4, batch=step, **changes))


def sources(plan: Any) -> list[int]:
    return [row.payload["fission_grpo"]["source"] for row in plan.rows if row.prompt_index < 0]


# ---- the pool


def test_an_error_becomes_a_prompt_with_a_group_of_its_own() -> None:
    stack, method = stack_of()
    logged = feed(stack, rollouts_of([1.0, 0, 1, 1, 1, 1, 1, 1], [3, 5]))
    assert logged["fission_grpo/pushed"] == logged["fission_grpo/pool"] == 1 and logged["fission_grpo/errors"] == 1 / 8
    plan = plan_at(stack, 1)
    assert [r.n for r in plan.rows] == [4] * 4 and [r.prompt_index for r in plan.rows].count(-1) == 1
    row = plan.rows[-1]
    assert row.group not in {r.group for r in plan.rows[:-1]} and plan.trained == 16
    assert row.edit is not None and "raw_prompt" not in row.edit and row.edit["gold"] == GOLD
    assert row.edit["prompt"] == [
        {"role": "user", "content": "question 3"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "tool", "content": UNREADABLE},
    ]
    assert row.payload == {"fission_grpo": {"source": 3, "depth": 1}}
    assert method.state["pool"] == [] and plan_at(stack, 2) is None


def test_without_errors_nothing_changes() -> None:
    stack, _ = stack_of()
    rollouts = rollouts_of([1.0] * 8, [0, 1])
    assert feed(stack, rollouts)["fission_grpo/pushed"] == 0
    assert plan_at(stack, 1) is None
    mixed = rollouts_of([1.0, 0, 1, 1, 0, 0, 1, 0], [0, 1])
    decision = one_step(stack, mixed)
    assert torch.equal(decision.row_advantages, grpo_advantages(mixed))


def test_the_newest_are_served_first_and_the_rest_stays() -> None:
    stack, method = stack_of(share=0.5)
    for step, prompt in enumerate((7, 8, 9)):
        feed(stack, rollouts_of([1.0, 1, 1, 0], [prompt], texts=[f"{step}"] * 4, step=step))
    plan = plan_at(stack, 3)
    assert sources(plan) == [9, 8] and [r.prompt_index < 0 for r in plan.rows] == [False, False, True, True]
    assert [e["source"] for e in method.state["pool"]] == [7]


@settings(max_examples=40, deadline=None)
@given(
    entries=st.integers(0, 12),
    share=st.floats(0.01, 1),
    size=st.sampled_from([None, 2, 3, 8]),
    prompts=st.integers(1, 8),
    free=st.integers(0, 9),
)
def test_the_batch_never_overflows(entries: int, share: float, size: int | None, prompts: int, free: int) -> None:
    stack, method = stack_of(share=share, group_size=size)
    method.state["pool"] = [
        {"prompt": str(i), "error": str(i), "source": i, "batch": 0, "depth": 1} for i in range(entries)
    ]
    before = make_plan(prompts, 4, budget=4 * prompts + free, batch=1)
    plan = stack.call("plan", method, before) or before
    assert plan.trained <= before.budget
    recovery = [r for r in plan.rows if r.prompt_index < 0]
    each = size or 4
    assert all(r.n == each for r in recovery) and len(recovery) * each <= share * before.budget + 1e-6
    assert sources(plan) == list(range(entries))[::-1][: len(recovery)]
    ordinary = [r for r in plan.rows if r.prompt_index >= 0]
    assert ordinary == [r for r in before.rows if r in ordinary]  # unchanged, in order
    assert ordinary or share == 1
    assert len({r.group for r in plan.rows}) == len(plan.rows)
    dropped = prompts - len(ordinary)
    if dropped:  # no more than was needed
        assert before.budget - plan.trained < 4
    assert len(method.state["pool"]) == entries - len(recovery)


def test_prompts_are_left_out_at_random() -> None:
    gone = set()
    for step in range(40):
        stack, method = stack_of()
        stack.batch = step
        method.state["pool"] = [{"prompt": "x", "source": 1, "batch": step, "depth": 1}]
        (missing,) = {0, 1, 2, 3} - {r.prompt_index for r in plan_at(stack, step).rows}
        gone.add(missing)
    assert gone == {0, 1, 2, 3}


def test_the_papers_alternation() -> None:
    stack, method = stack_of(share=1.0, every=2, trigger=4)
    method.state["pool"] = [{"prompt": str(i), "source": i, "batch": 2, "depth": 1} for i in range(6)]
    assert plan_at(stack, 3) is None
    assert [r.prompt_index for r in plan_at(stack, 4).rows] == [-1] * 4
    assert plan_at(stack, 6) is None  # two are left, four trigger
    assert len(method.state["pool"]) == 2


def test_age_and_capacity() -> None:
    stack, method = stack_of(max_age=2, capacity=3, max_per_prompt=9)
    feed(stack, rollouts_of([0.0] * 4, [1], step=0))
    assert len(method.state["pool"]) == 3 and method.state["pool"][0]["prompt"][1]["content"] == "answer 1"
    assert plan_at(stack, 3) is None and method.state["pool"] == []
    feed(stack, rollouts_of([0.0] * 4, [1], step=0))
    assert plan_at(stack, 2) is not None


def test_per_prompt_limit_and_duplicates() -> None:
    stack, method = stack_of(max_per_prompt=2)
    assert feed(stack, rollouts_of([0.0] * 8, [1, 2]))["fission_grpo/pushed"] == 4
    assert feed(stack, rollouts_of([0.0] * 8, [1, 2]))["fission_grpo/pushed"] == 4  # the other two answers of each
    assert feed(stack, rollouts_of([0.0] * 8, [1, 2]))["fission_grpo/pushed"] == 0  # the same answers again
    one, _ = stack_of()
    assert feed(one, rollouts_of([0.0] * 8, [1, 1]))["fission_grpo/pushed"] == 1


def test_a_repeated_or_overlong_error_does_not_hide_others() -> None:
    texts = ["same", "same", "other", "third"]
    stack, method = stack_of(max_per_prompt=2)
    assert feed(stack, rollouts_of([0.0] * 4, [1], texts=texts))["fission_grpo/pushed"] == 2
    assert [e["prompt"][1]["content"] for e in method.state["pool"]] == ["same", "other"]
    assert feed(stack, rollouts_of([0.0] * 4, [1], texts=texts))["fission_grpo/pushed"] == 1  # two wait already
    assert method.state["pool"][-1]["prompt"][1]["content"] == "third"
    thoughts = [f"{thought} {call('book', city=c)}" for thought, c in (("a", "x"), ("b", "x"), ("c", "y"))]
    stack, method = stack_of(max_per_prompt=3)
    assert feed(stack, rollouts_of([0.0] * 3 + [1.0], [1], texts=[*thoughts, "z"]))["fission_grpo/pushed"] == 2
    stack, method = stack_of(max_characters=150)
    logged = feed(stack, rollouts_of([0.0] * 4, [1], texts=["x" * 160, "short", "y", "z"]))
    assert logged["fission_grpo/dropped"] == logged["fission_grpo/pushed"] == 1
    assert method.state["pool"][0]["prompt"][1]["content"] == "short"


def test_a_withdrawn_rollout_is_no_error() -> None:
    method = fission(correctness="right")
    stack = start_stack(method, run=make_run(dataset=Data(), reward_names=("style", "right")))
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    rollouts = rollouts_of(rewards, [4], reward_names=("style", "right"))
    withdrawn = rollouts.replace(reward=torch.tensor([math.nan, 0.0, 1.0, 1.0]).double())
    feed(stack, withdrawn)
    assert [e["prompt"][1]["content"] for e in method.state["pool"]] == ["answer 1"]


def test_nan_is_no_error_and_foreign_prompts_of_others_are_left() -> None:
    stack, method = stack_of(error_threshold=1.0)
    logged = feed(stack, rollouts_of([math.nan, 1.0, 0.99, math.nan] + [0.0] * 4, [2, -1]))
    assert [e["source"] for e in method.state["pool"]] == [2] and logged["fission_grpo/errors"] == 5 / 8


def test_one_reward_function_may_say_what_is_an_error() -> None:
    run = make_run(dataset=Data(), reward_names=("style", "right"))
    method = fission(correctness="right")
    stack = start_stack(method, run=run)
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, math.nan], [0.0, 1.0]])
    feed(stack, rollouts_of(rewards, [4], reward_names=("style", "right")))
    assert [e["prompt"][1]["content"] for e in method.state["pool"]] == ["answer 0"]
    with pytest.raises(Exception, match="correctness"):
        start_stack(fission(correctness="other"), run=run)


def test_failed_recoveries_stop_at_max_depth() -> None:
    def recovery(depth: int, step: int) -> Rollouts:
        payload = [{"fission_grpo": {"source": 3, "depth": depth}, "other": 1}] * 4
        return rollouts_of([0.0, 1.0, 1.0, 0.0], [-1], payload=payload, step=step)

    stack, method = stack_of()
    logged = feed(stack, recovery(1, 1))
    assert (
        method.state["pool"] == [] and logged["fission_grpo/recovered"] == 0.5 and logged["fission_grpo/reward"] == 0.5
    )
    deep, method = stack_of(max_depth=2)
    feed(deep, recovery(1, 1))
    assert [(e["source"], e["depth"]) for e in method.state["pool"]] == [(3, 2)]
    feed(deep, recovery(2, 2))
    assert len(method.state["pool"]) == 1


def test_answers_of_several_turns_are_left_out() -> None:
    stack, method = stack_of()
    feed(stack, rollouts_of([0.0] * 4, [1], turns=make_turns([["a", "b"], ["a", "b"], ["a"], ["a", "b"]])))
    assert [e["prompt"][1]["content"] for e in method.state["pool"]] == ["answer 2"]
    two, method = stack_of()
    feed(two, rollouts_of([0.0] * 4, [1], rollout=torch.tensor([0, 0, 1, 1]), index=torch.tensor([0, 1, 0, 1])))
    assert method.state["pool"] == []


def test_long_contexts_are_dropped_and_counted() -> None:
    stack, method = stack_of(max_characters=200)
    logged = feed(stack, rollouts_of([0.0] * 4 + [0.0] * 4, [1, 2], texts=["x" * 100] * 4 + ["y"] * 4))
    assert logged["fission_grpo/dropped"] == 1 and [e["source"] for e in method.state["pool"]] == [2]


def test_plain_text_prompts_stay_text() -> None:
    stack, _ = stack_of(Data(text=True))
    feed(stack, rollouts_of([0.0] * 4, [6], data=Data(text=True)))
    (row,) = [r for r in plan_at(stack, 1).rows if r.prompt_index < 0]
    assert row.edit["prompt"] == f"question 6\nanswer 0\n{UNREADABLE}\n"


def test_the_pool_survives_a_checkpoint(tmp_path: Any) -> None:
    stack, method = stack_of()
    feed(stack, rollouts_of([0.0] * 8, [1, 2]))
    save_state(tmp_path, stack.state_dict("d"))
    other, again = stack_of()
    other.load_state_dict(load_state(tmp_path) or {}, "d")
    assert again.state == method.state and plan_at(other, 1) == plan_at(stack, 1)


def test_groups_do_not_mix_through_the_driver() -> None:
    """The whole way: errors of one batch are a group of the next, and its base groups have the advantages they had."""
    stack, method = stack_of()
    one_step(stack, rollouts_of([0.0, 1, 1, 1] * 4, [0, 1, 2, 3]))
    plan = first_plan(stack, [4, 5, 6, 7], 4, 16, 16, Data())
    prompts = [r.prompt_index for r in plan.rows]
    assert set(prompts[:3]) < {4, 5, 6, 7} and prompts[3] == -1 and plan.trained == 16
    base = [1.0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0]
    group = [r.group for r in plan.rows for _ in range(4)]
    payload = [r.payload for r in plan.rows for _ in range(4)]
    rollouts = rollouts_of([*base, 0.0, 1.0, 1.0, 1.0], prompts, step=1, group=group, payload=payload)
    decision = one_step(stack, rollouts)
    alone = make_rollouts(base)
    assert torch.allclose(decision.row_advantages[:12], grpo_advantages(alone))
    assert torch.allclose(decision.row_advantages[12:], grpo_advantages(make_rollouts([0.0, 1, 1, 1])))
    failed = one_step(stack_of()[0], rollouts_of(base + [0.0] * 4, prompts, group=group, payload=payload))
    assert failed.row_advantages[12:].tolist() == [0.0] * 4
    assert [e["source"] for e in method.state["pool"]] == [0, 1, 2, *prompts[:3]]  # 3 was served and failed: depth is 1


# ---- messages


def message_of(answer: str, reward: float = 0.0, meta: Any = None, **params: Any) -> tuple[str, dict[str, float]]:
    stack, method = stack_of(**params)
    logged = feed(stack, rollouts_of([reward] * 4, [1], texts=[answer] * 4, meta=meta or {}))
    return method.state["pool"][0]["prompt"][-1]["content"], logged


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("no call", UNREADABLE),
        (call("fly", to="Paris"), "Error: function 'fly' not found, available: book, cancel."),
        (call("book", nights=2), "Error: missing required argument 'city' of 'book'."),
        (call("book", city="Rome", pets=1), "Error: 'book' has no argument 'pets'."),
        (call("book", city="Rome", nights="two"), "Error: argument 'nights' of 'book' must be of type integer."),
        (call("book", city="Rome", nights=True), "Error: argument 'nights' of 'book' must be of type integer."),
        (call("book", city="Rome", room="x"), "Error: argument 'room' of 'book' must be one of single, double."),
        (call("cancel"), "Error: function 'cancel' cannot do what was asked for."),
        (call("book", city="Rome", nights=2), "Error: invalid value of argument 'city' of 'book'."),
        (call("book", city="Paris"), "Error: missing argument 'nights' of 'book'."),
        (call("book", city="Paris", nights=2, room="single"), "Error: argument 'room' of 'book' is not needed."),
        (call("book", city="Paris", nights=2), GENERIC),
        (call("book", city="Paris", nights=2) * 2, "Error: a call is not needed for this request."),
    ],
)
def test_rules(answer: str, says: str) -> None:
    assert message_of(answer, gold_column="gold", tools_column="tools")[0] == says


def test_rules_without_gold_or_tools() -> None:
    assert simulate(as_calls(GOLD), None, None) == GENERIC
    two = as_calls([*GOLD, {"name": "cancel", "arguments": {}}])
    assert (
        simulate(as_calls(GOLD), two, json.dumps(TOOLS))
        == "Error: the request is not complete; a further call is needed."
    )
    assert simulate([ToolCall("x", {})], None, "no json") == GENERIC


def test_leak_filter() -> None:
    gold = as_calls(
        [{"name": "f", "arguments": {"a": "Paris", "n": 12, "deep": [{"k": 1234}], "flag": True, "z": None}}]
    )
    assert gold is not None
    assert leaks("try PARIS", gold, "question") and not leaks("try Paris", gold, "I said paris")
    assert leaks("use 1234", gold, "") and not leaks("use 12, True, None", gold, "") and not leaks("no", gold, "")


def test_a_message_that_tells_the_answer_is_replaced() -> None:
    said, logged = message_of("x", message=lambda about: "the city is Paris", gold_column="gold")
    assert said == GENERIC and logged["fission_grpo/leaks"] == 1
    said, logged = message_of("to Paris?", message=lambda about: "Paris is spelled wrong", gold_column="gold")
    assert said == "Paris is spelled wrong" and logged["fission_grpo/leaks"] == 0


@settings(max_examples=30, deadline=None)
@given(city=st.text("abcde", min_size=3, max_size=6), answer=st.sampled_from(["", call("book", city="qq"), call("x")]))
def test_no_message_holds_a_value_of_the_answer(city: str, answer: str) -> None:
    gold = [{"name": "book", "arguments": {"city": city}}]
    enum = [{"name": "book", "parameters": {"properties": {"city": {"enum": [city]}}}}]
    for tools in (None, enum):
        meta = {"gold": [gold] * 4, "tools": [tools] * 4}
        said, _ = message_of(answer, meta=meta, gold_column="gold", tools_column="tools")
        assert city not in said or tools is not None  # the prompt shows the tools


def test_what_the_simulator_gets_and_what_if_it_fails(caplog: Any) -> None:
    seen: list[Any] = []

    def simulator(about: Any) -> str:
        seen.append(about)
        return "it broke"

    assert message_of("bad", message=simulator, gold_column="gold", tools_column="tools")[0] == "it broke"
    prompt = [{"role": "user", "content": "question 1"}]
    assert seen == [{"answer": "bad", "prompt": prompt, "gold": GOLD, "tools": TOOLS}]
    for broken in (lambda about: 1 / 0, lambda about: "", lambda about: 3, lambda about: time.sleep(9)):
        method = fission(message=broken, message_timeout=0.05)
        stack = start_stack(method, run=make_run(dataset=Data()))
        assert method._service is not None
        method._service.backoff = 0.0
        logged = feed(stack, rollouts_of([0.0] * 4, [1]))
        assert method.state["pool"][0]["prompt"][-1]["content"] == GENERIC and logged["fission_grpo/failed"] == 1


def test_the_environments_own_text_counts() -> None:
    meta = {"error": ["", "Timeout in line 3", None, ""]}
    stack, method = stack_of(error_column="error", message=lambda about: "never asked")
    feed(stack, rollouts_of([1.0, 1.0, 1.0, 1.0], [1], meta=meta))
    (entry,) = method.state["pool"]
    assert [m["content"] for m in entry["prompt"][1:]] == ["answer 1", "Timeout in line 3"]
    stack, method = stack_of(error_column="error")
    feed(stack, rollouts_of([math.nan] * 4, [1], meta=meta))
    assert method.state["pool"] == []


# ---- calls


def test_reading_calls() -> None:
    book = ToolCall("book", {"city": "Rome"})
    text = json.dumps({"name": "book", "arguments": {"city": "Rome"}})
    assert read_calls(f"I think <tool_call>\n{text}\n</tool_call>") == [book] == read_calls(text)
    assert read_calls(f"<tool_call>{text}</tool_call><tool_call>{text}</tool_call>") == [book, book]
    assert as_calls({"function": {"name": "book", "arguments": '{"city": "Rome"}'}}) == [book]
    for bad in ("", "hello", "[]", "<tool_call>{</tool_call>", '{"name": 3}', '{"name": "f", "arguments": 3}', "3"):
        assert read_calls(bad) is None
    assert as_calls(None) is None and as_calls([3]) is None and as_calls('{"name": "f", "arguments": "{"}') is None


def test_correctness() -> None:
    gold = as_calls(GOLD)
    assert gold is not None
    assert correctness(None, gold) == 0.0 and correctness([], gold) == 0.0 and correctness([], []) == 1.0
    assert correctness(gold, gold) == 1.0
    assert correctness([ToolCall("fly", {"city": "Paris", "nights": 2})], gold) == 0.0
    assert correctness([ToolCall("book", {"city": "Paris", "nights": 3})], gold) == pytest.approx(0.5 + 0.5 * 0.5)
    assert correctness([ToolCall("book", {"city": "Paris"})], gold) == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert correctness([*gold, *gold], gold) == pytest.approx(0.5 * 2 / 3 + 0.5)  # the matched call is right
    made = [ToolCall("f", {"a": 1, "b": 2, "c": 3}), ToolCall("f", {"b": 2, "c": 3})]
    wanted = [ToolCall("f", {"a": 1, "b": 2, "c": 3}), ToolCall("f", {"a": 1, "x": 9})]
    assert correctness(made, wanted) == pytest.approx(0.5 + 0.5 * (0.4 + 0.8) / 2)  # best fit first: (1 + 0) / 2
    a, b = ToolCall("f", {"x": 1}), ToolCall("f", {"x": 2})
    assert correctness([b, a], [a, b]) == 1.0  # paired by what fits
    assert correctness([ToolCall("f", {})], [ToolCall("f", {})]) == 1.0
    assert correctness([ToolCall("f", {"x": True})], [ToolCall("f", {"x": 1})]) == 0.5


def f1_of(a: Any, b: Any) -> float:
    both = len([k for k in a if k in b and a[k] == b[k]])
    return 1.0 if not a and not b else 2 * both / (len(a) + len(b))


@settings(max_examples=60, deadline=None)
@given(
    sides=st.tuples(
        *[
            st.lists(
                st.tuples(st.sampled_from("fg"), st.dictionaries(st.sampled_from("abc"), st.integers(0, 1))), max_size=4
            )
        ]
        * 2
    )
)
def test_correctness_equals_all_assignments(sides: Any) -> None:
    made, gold = sides
    best = []
    for matched in permutations([*range(len(gold)), *[None] * len(made)], len(made)):
        pairs = [(c[1], gold[j][1]) for c, j in zip(made, matched, strict=True) if j is not None and gold[j][0] == c[0]]
        best.append((len(pairs), sum(f1_of(a, b) for a, b in pairs)))
    count, fit = max(best)
    expected = 0.5 * 2 * count / max(1, len(made) + len(gold)) + (0.5 * fit / count if count else 0.0)
    if not made and not gold:
        expected = 1.0
    calls = [[ToolCall(*c) for c in side] for side in sides]
    assert correctness(*calls) == pytest.approx(expected)


# ---- the reward


def reward_of(rewards: Any, step: int, **params: Any) -> Any:
    method = FissionReward(build_params(FissionReward.Params, params, "fission_grpo_reward"))
    names = ("format", "correctness", "length")
    stack = start_stack(method, run=make_run(reward_names=names, total_batches=10))
    return stack.call("rewards", method, make_rollouts(rewards, reward_names=names, batch=step))


def test_reward_equals_the_formula_and_is_bounded() -> None:
    rewards = torch.tensor([[1.0, 0.5, 0.25], [1, 1, 1], [0, 0, 0], [1, math.nan, 1]]).double()
    for step, weight in ((0, 0.5), (5, 1.0), (10, 1.5), (99, 1.5)):
        found = reward_of(rewards, step, length="length")
        assert found[:3].tolist() == pytest.approx([((2 - weight) + weight * 0.5 + 0.25) / 3, 1.0, 0.0])
        assert math.isnan(found[3])
    assert reward_of(rewards, 0)[:3].tolist() == pytest.approx([(1.5 + 0.25 + 1) / 3, 1.0, 1 / 3])


def test_parameters_out_of_range() -> None:
    for bad in ({"share": 0.0}, {"share": 1.5}, {"group_size": 1}, {"trigger": 0}, {"role": "system"}, {"every": 0}):
        with pytest.raises(ConfigError):
            fission(**bad)
    with pytest.raises(ConfigError, match="different"):
        build_params(FissionReward.Params, {"format": "a", "correctness": "a"}, "fission_grpo_reward")
    with pytest.raises(Exception, match="no reward function"):
        reward_of(torch.zeros(4, 3), 0, format="nothing")
    assert fission().needs == {"text", "prompt_index", "column:prompt"}
    assert "column:gold" in fission(gold_column="gold").needs


def test_rows_of_a_plan_by_others_are_left_as_they_are() -> None:
    stack, method = stack_of()
    feed(stack, rollouts_of([0.0] * 4, [1]))
    rows = (PlanRow(3, 7, 4, spare=2, payload=("x", 1)), PlanRow(5, 9, 8), PlanRow(6, 9, 4))
    plan = stack.call("plan", method, make_plan(4, 4, batch=1).replace(rows=rows))
    assert [r.prompt_index for r in plan.rows] in ([3, -1], [5, 6, -1])  # a group goes as a whole
    assert set(plan.rows[:-1]) < set(rows) and plan.rows[-1].group == 10
