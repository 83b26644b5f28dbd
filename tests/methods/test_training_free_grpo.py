"""Training-Free GRPO (arXiv 2510.08191): which groups are compared, how the library changes, and a model that fails."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting, method
from waiting import NEVER, SOON, Stuck

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow, Rollouts
from rl_plugins.lab.demo.advisor import ADVICE
from rl_plugins.methods.training_free_grpo import TrainingFreeGrpo, library, read_library, texts, write_library
from rl_plugins.methods.training_free_grpo.advisor import Advisor
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_plan, make_rollouts, make_run, one_step, start_stack
from rl_plugins.testing.contract.dataset import StoredDataset
from rl_plugins.testing.data import take_rows

GOLDEN = Golden("training_free_grpo")
NAN = math.nan
DATASET = StoredDataset({"prompt": [f"task {i}" for i in range(16)], "answer": [f"answer {i}" for i in range(16)]})
ROLES = {  # how a role begins; the tests' language models tell their roles by it
    "summary": texts.SUMMARY[:60],
    "critique": texts.CRITIQUE[:60],
    "group": texts.GROUP[:60],
    "revision": texts.REVISION[:60],
    "paper critique": texts.PAPER_CRITIQUE[:60],
    "paper revision": texts.PAPER_REVISION[:60],
}


def fenced(operations: Any) -> str:
    return f"I think\n```json\n{json.dumps(operations)}\n```\nthat is it"


class Llm:
    """A scripted language model: for each role a reply, or a function of the question. Keeps the questions."""

    def __init__(self, **replies: Any) -> None:
        self.replies = {
            "summary": lambda q: f"summary of <{section(q, 'Attempt')}>",
            "critique": "<Experiences>\nUnits: check them.\n</Experiences>",
            "group": fenced([{"operation": "ADD", "id": None, "content": "Units: check them."}]),
            "revision": fenced([{"operation": "ADD", "id": None, "content": "Units: check them."}]),
            "paper critique": fenced([{"option": "add", "experience": "Units: check them."}]),
            "paper revision": fenced([]),
            **{role.replace("_", " "): reply for role, reply in replies.items()},
        }
        self.asked: dict[str, list[str]] = {role: [] for role in ROLES}
        self._lock = threading.Lock()

    def __call__(self, question: str) -> Any:
        (role,) = [r for r, start in ROLES.items() if question.startswith(start)]
        with self._lock:
            self.asked[role].append(question)
        reply = self.replies[role]
        return reply(question) if callable(reply) else reply

    def count(self) -> dict[str, int]:
        return {role: len(asked) for role, asked in self.asked.items() if asked}


def section(question: str, name: str) -> str:
    """What a question has under [name]."""
    return re.search(rf"\[{name}\]\n(.*?)(?=\n\n\[|\n\n[A-Z]|$)", question, re.DOTALL)[1]


def stack_of(llm: Any, dataset: Any = DATASET, group_size: int = 4, **params: Any) -> MethodStack:
    options = {"llm": llm, "llm_retries": 0, "llm_timeout": NEVER, **params}
    options = acting(TrainingFreeGrpo.Params, options)
    method = TrainingFreeGrpo(build_params(TrainingFreeGrpo.Params, options, "training_free_grpo"))
    return start_stack(method, run=make_run(dataset=dataset, group_size=group_size))


def rollouts_of(rewards: Sequence[float], group: Any = None, group_size: int = 4, **changes: Any) -> Rollouts:
    made = make_rollouts(list(rewards), group, group_size, **changes)
    text = [f"attempt {r} at {g}" for g, r in zip(made.group.tolist(), made.rollout.tolist(), strict=True)]
    meta = {"prompt": [f"EDITED {g}" for g in made.group.tolist()], "answer": [f"answer {g}" for g in made.group]}
    return made.replace(text=text, meta={**meta, **made.meta})


def step(stack: MethodStack, rollouts: Rollouts) -> dict[str, float]:
    stack.metrics.take()
    one_step(stack, rollouts)
    return {k.removeprefix("training_free_grpo/"): v for k, v in combine([stack.metrics.take()]).items()}


def held(stack: MethodStack) -> dict[str, str]:
    method: Any = stack.methods[0]
    return method.experiences


# ---- golden


def advisor_of(replies: list[str], **params: Any) -> tuple[Advisor, list[str]]:
    asked: list[str] = []

    def llm(question: str) -> str:
        asked.append(question)
        return replies[len(asked) - 1]

    options = {"llm": llm, "llm_timeout": NEVER, **params}
    built = build_params(TrainingFreeGrpo.Params, options, "x")
    advisor = Advisor(built, llm, lambda *a, **k: None, lambda message: None)
    advisor._operations.backoff = 0.0
    return advisor, asked


def renumber(experiences: Mapping[str, str]) -> dict[str, str]:
    """The same texts in the same order under the ids G0, G1 and so on."""
    return {f"G{i}": text for i, text in enumerate(experiences.values())}


@GOLDEN.kind("operations")
def check_updates(case: Case) -> None:
    given = {name: plain(case.inputs[name]) for name in ("experiences", "operations", "llm_replies")}
    expected, variant = case.expected, case["variant"]
    params = {"variant": variant, "llm_retries": case.params["max_retries"] - 1}
    if variant == "paper":
        params["merge_without_text"] = "delete"
    params |= case.options(TrainingFreeGrpo)
    advisor, asked = advisor_of(given["llm_replies"], **params)
    texts_after = advisor.revise(given["experiences"], given["operations"])
    assert [f"G{i}" for i in range(len(texts_after))] == list(expected["final"])
    assert texts_after == list(expected["final"].values())
    assert len(asked) == expected["n_llm_calls"]
    # before the new numbers
    plan = plan_of(given["llm_replies"][len(asked) - 1])
    if variant == "practice":
        found = library.revise(given["experiences"], plan)
    else:
        candidates, _ = library.candidates(given["experiences"], given["operations"])
        found = library.merge(candidates, plan, params["merge_without_text"])
    if "formatted_exp_and_ops" in expected:
        shown = library.by_experience(given["experiences"], given["operations"])
        assert shown == expected["formatted_exp_and_ops"] and shown in asked[0]
    assert list(found.items()) == list(expected["before_renumber"].items())
    assert list(renumber(found).items()) == list(expected["final"].items())


def plan_of(reply: str) -> list[dict[str, Any]]:
    """The plan of the last reply that was asked for; none if that one was unusable too."""
    try:
        return library.parse_operations(reply)
    except ValueError:
        return []


@GOLDEN.kind("rewards_by_question")
def check_groups(case: Case) -> None:
    questions = plain(case.inputs["rewards_by_question"])
    llm = Llm()
    rewards = [r for rs in questions.values() for r in rs]
    group = [g for g, rs in enumerate(questions.values()) for _ in rs]
    params = {"variant": case["variant"], "ground_truth": case.params["given_ground_truth"]}
    step(stack_of(llm, **params | case.options(TrainingFreeGrpo)), rollouts_of(rewards, group))
    role = "critique" if case["variant"] == "practice" else "paper critique"
    kept = {int(section(q, "Task").split()[1]) for q in llm.asked[role]}
    assert [name for g, name in enumerate(questions) if g in kept] == case.expected["kept_questions"]


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- replies


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('[{"a": 1}]', [{"a": 1}]),
        ('x ```json\n[{"a": 1}]\n``` y ```json [{"a": 2}] ``` z', [{"a": 2}]),
        ('[{"a": 1}, 3, null, "x", [1]]', [{"a": 1}]),
        ("```json\n[]", []),
    ],
)
def test_operations_of_a_reply(reply: str, expected: Any) -> None:
    assert library.parse_operations(reply) == expected


@pytest.mark.parametrize("reply", ["", "none", "```json\n{}\n```", '{"operation": "ADD"}', "```json\n[1,\n```", "3"])
def test_what_is_no_list_is_a_failed_try(reply: str) -> None:
    with pytest.raises(ValueError):
        library.parse_operations(reply)


def test_experiences_of_a_reply() -> None:
    assert library.parse_experiences("a <EXPERIENCES>\n1\n2 </experiences> b") == "1\n2"
    assert library.parse_experiences("a <Experiences> never closed") == ""


# ---- changes, against a loop


OPERATIONS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "operation": st.sampled_from(["ADD", "UPDATE", "DELETE", "NONE", None, 3, "add"]),
            "id": st.sampled_from([None, "G0", "G1", "G2", "G9", "2", "3", 1, ["G0"]]),
            "content": st.sampled_from(["", "  ", None, "x", "y", 5]),
        },
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 3), plan=OPERATIONS)
def test_revise_equals_the_loop(n: int, plan: list[dict[str, Any]]) -> None:
    experiences = {f"G{i}": f"text {i}" for i in range(n)}
    expected, counter = dict(experiences), n
    for o in plan:
        content, operation = o.get("content", ""), o.get("operation", "ADD")
        if not isinstance(content, str) or not content.strip():
            continue
        key = o.get("id") if isinstance(o.get("id"), str) else None
        if operation == "ADD" or (operation == "UPDATE" and key not in expected):
            expected[str(counter)] = content
            counter += 1
        elif operation == "UPDATE":
            expected[key] = content
        elif operation == "DELETE" and key in expected:
            del expected[key]
    found = library.revise(experiences, plan)
    assert list(found.items()) == list(expected.items())
    assert experiences == {f"G{i}": f"text {i}" for i in range(n)}  # not changed
    new = renumber(found)
    assert list(new) == [f"G{i}" for i in range(len(new))] and list(new.values()) == list(found.values())


def test_a_merge_is_whole_or_not_at_all() -> None:
    three = {"G0": "a", "G1": "b", "C0": "c"}
    broken = [{"option": "merge", "merged_from": ["G0", "G1"]}]
    assert library.merge(three, broken) == three
    assert library.merge(three, broken, "delete") == {"C0": "c"}
    good = [{"option": "merge", "experience": "ab", "merged_from": ["G0", "G1", "Q", 3]}]
    assert list(library.merge(three, good).items()) == [("C0", "c"), ("C1", "ab")]
    for nonsense in ({"option": "merge", "experience": "x", "merged_from": "G0"}, {"option": "modify"}, {}):
        assert library.merge(three, [nonsense]) == three
    assert library.merge(three, [{"option": "modify", "experience": "n", "modified_from": "Z"}])["Z"] == "n"


def test_two_operations_on_one_experience_and_one_on_none() -> None:
    shown = library.by_experience({"G0": "a", "G1": "b"}, [{"id": "G0"}, {"id": "G0", "content": "ü"}, {"id": "G7"}])
    first, second, others = shown.split("\n\n")
    assert first.count('"id": "G0"') == 2 and "ü" in first
    assert second.endswith("Related Operations:\nNone")
    assert others.startswith("Operations without specific Experience ID:") and "G7" in others


# ---- one step


def test_a_step_of_practice() -> None:
    llm = Llm()
    stack = stack_of(llm, answer_column="answer")
    logged = step(stack, rollouts_of([1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5]))
    assert llm.count() == {"summary": 8, "critique": 2, "group": 1, "revision": 1}
    assert held(stack) == {"G0": "Units: check them."}
    assert logged["mixed"] == 0.5 and logged["operations"] == 2 and logged["experiences"] == 1
    assert logged["calls"] == 13 and logged["failed"] == 0 and logged["revised"] == 1
    summaries = sorted(llm.asked["summary"])
    assert [section(q, "Attempt") for q in summaries[:4]] == [f"attempt {r} at 0" for r in range(4)]
    assert [section(q, "Reward") for q in summaries] == ["1", "0", "0", "1", "0.5", "0.5", "0.5", "0.5"]
    assert section(summaries[0], "Task") == "task 0"  # the dataset's, without the experiences
    assert section(summaries[0], "Reference answer") == "answer 0"
    critique = sorted(llm.asked["critique"])[0]
    assert "Attempt 1 (reward 1):\nsummary of <attempt 0 at 0>" in critique
    assert "Attempt 2 (reward 0):\nsummary of <attempt 1 at 0>" in critique
    assert section(llm.asked["group"][0], "New findings") == "Units: check them."
    assert section(llm.asked["group"][0], "Experiences so far") == "None"


def test_the_oldest_experiences_leave_a_full_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_plugins.methods.training_free_grpo.method.MOST_EXPERIENCES", 2)
    replies = iter([fenced([{"operation": "ADD", "id": None, "content": f"Rule {i}: keep."}]) for i in range(4)])
    stack = stack_of(Llm(revision=lambda question: next(replies)))
    for _ in range(4):
        step(stack, rollouts_of([1, 0, 0, 1]))
    assert held(stack) == {"G0": "Rule 2: keep.", "G1": "Rule 3: keep."}


def test_a_step_of_paper() -> None:
    adds = [{"option": "add", "experience": "One"}, {"option": "add", "experience": "Two"}]
    llm = Llm(paper_critique=fenced(adds))
    stack = stack_of(llm, variant="paper")
    logged = step(stack, rollouts_of([1, 0, 0, 1, 0.5, 0, 0, 0]))
    assert llm.count() == {"summary": 8, "paper critique": 2, "paper revision": 1}
    assert held(stack) == {"G0": "One", "G1": "One"}  # cut to one operation each; no merge in the plan
    assert logged["operations"] == 2
    assert (
        "Attempt 1 (correct)" in llm.asked["paper critique"][0]
        and "Attempt 2 (wrong)" in llm.asked["paper critique"][0]
    )
    # the library is shown, modified and merged
    change = [{"option": "modify", "experience": "Better", "modified_from": "G1"}]
    merge = [{"option": "merge", "experience": "Both", "merged_from": ["G0", "G1"]}]
    llm.replies |= {"paper critique": fenced(change), "paper revision": fenced(merge)}
    step(stack, rollouts_of([1, 0, 0, 0]))
    assert section(llm.asked["paper critique"][-1], "Experiences so far") == "[G0]. One\n[G1]. One"
    assert "Better" in section(llm.asked["paper revision"][-1], "Proposed modifications")
    assert held(stack) == {"G0": "Both"}
    assert list(stack.methods[0].state) == ["experiences"]


def test_in_the_paper_additions_survive_without_a_plan() -> None:
    stack = stack_of(Llm(paper_revision="no json"), variant="paper")
    logged = step(stack, rollouts_of([1, 0, 0, 0]))
    assert held(stack) == {"G0": "Units: check them."} and logged["revised"] == 0


@pytest.mark.parametrize("variant", ["practice", "paper"])
def test_uniform_groups_ask_nobody(variant: str) -> None:
    llm = Llm()
    stack = stack_of(llm, variant=variant)
    logged = step(stack, rollouts_of([1, 1, 1, 1, 0, 0, 0, 0]))
    assert llm.count() == {} and held(stack) == {} and logged["mixed"] == 0 and logged["operations"] == 0
    assert "calls" not in logged and "revised" not in logged


def test_without_ground_truth_all_groups_are_compared_and_nothing_is_told() -> None:
    llm = Llm()
    step(stack_of(llm, ground_truth=False), rollouts_of([1, 1, 1, 1, 0, 0, 0, 0]))
    assert llm.count() == {"summary": 8, "critique": 2, "group": 1, "revision": 1}
    question = llm.asked["summary"][0]
    assert section(question, "Reward") == section(question, "Reference answer") == "[REDACTED]"
    assert "reward 1" not in llm.asked["critique"][0] and "reward 0" not in llm.asked["critique"][0]


def test_a_group_of_one() -> None:
    for reward, calls in ((1.0, 0), (0.5, 1), (NAN, 0)):
        llm = Llm()
        step(stack_of(llm), rollouts_of([reward, 1, 1], group=[0, 1, 1]))
        assert len(llm.asked["summary"]) == calls
    llm = Llm()  # the paper's code filters only where groups can be mixed
    step(stack_of(llm, variant="paper", group_size=1), rollouts_of([1.0, 0.0], group=[0, 1]))
    assert len(llm.asked["paper critique"]) == 2


def test_unscorable_rows_and_rows_that_left_do_not_exist() -> None:
    llm = Llm()
    step(stack_of(llm), rollouts_of([1, NAN, 0, NAN, 1, NAN, NAN, 1]))
    assert sorted(section(q, "Attempt") for q in llm.asked["summary"]) == ["attempt 0 at 0", "attempt 2 at 0"]
    llm = Llm()
    kept = torch.tensor([True, False, True, False])
    stack = start_stack(
        method("other", select=lambda rollouts: kept), *stack_of(llm).methods, run=make_run(dataset=DATASET)
    )
    one_step(stack, rollouts_of([1, 0, 0, 0]))
    assert sorted(section(q, "Attempt") for q in llm.asked["summary"]) == ["attempt 0 at 0", "attempt 2 at 0"]


def test_a_rollout_of_several_rows_counts_once() -> None:
    llm = Llm()
    made = rollouts_of([1, 1, 0, 0]).replace(rollout=torch.tensor([0, 0, 1, 1]), index=torch.tensor([1, 0, 0, 1]))
    step(stack_of(llm), made)
    attempts = [section(q, "Attempt") for q in llm.asked["summary"]]
    assert sorted(attempts) == ["attempt 1 at 0\nattempt 0 at 0", "attempt 2 at 0\nattempt 3 at 0"]


def test_rewards_on_another_scale() -> None:
    llm = Llm()
    stack = stack_of(llm, reward_low=-1.0)
    assert step(stack, rollouts_of([-1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1]))["mixed"] == pytest.approx(1 / 3)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), variant=st.sampled_from(["practice", "paper"]))
def test_the_order_of_rows_does_not_matter(seed: int, variant: str) -> None:
    def named(question: str) -> str:
        content = f"about {section(question, 'Task')}"
        return f"<Experiences>{content}</Experiences>"

    def grouped(question: str) -> str:
        return fenced([{"operation": "ADD", "content": section(question, "New findings")}])

    def all_of(question: str) -> str:
        return fenced([{"content": c} for c in re.findall(r'"content": "(.*?)"', question.split("```json")[0])])

    def paper(question: str) -> str:
        return fenced([{"option": "add", "experience": f"about {section(question, 'Task')}"}])

    made = rollouts_of([1, 0, NAN, 0, 1, 1, 0, 1, 0, 0, 1, 0], group=[2, 0, 1, 2, 0, 1, 1, 2, 0, 1, 2, 0])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    found = []
    for rows in (made, take_rows(made, order)):
        stack = stack_of(Llm(critique=named, group=grouped, revision=all_of, paper_critique=paper), variant=variant)
        step(stack, rows)
        found.append(held(stack))
    assert found[0] == found[1] == {"G0": "about task 0", "G1": "about task 1", "G2": "about task 2"}


# ---- the prompt


def test_prompts_have_the_experiences() -> None:
    stack = stack_of(Llm())
    plan = stack.call("plan", stack.methods[0], make_plan(3))
    shown = [row.edit["prompt"] for row in plan.rows]
    assert all(s.endswith(f"Task:\ntask {i}") and "Experiences:\nNone\n" in s for i, s in enumerate(shown))
    assert [row.replace(edit=None) for row in plan.rows] == list(make_plan(3).rows)
    stack.methods[0].state = {"experiences": ["A: {problem}", "B"]}
    plan = stack.call("plan", stack.methods[0], make_plan(1))
    assert "[G0]. A: {problem}\n[G1]. B\n" in plan.rows[0].edit["prompt"]
    assert plan.rows[0].edit["prompt"].count("task 0") == 1


def test_the_papers_prompt_is_plain_while_there_is_nothing_to_say() -> None:
    stack = stack_of(Llm(), variant="paper")
    assert stack.call("plan", stack.methods[0], make_plan(3)) is None
    stack.methods[0].state = {"experiences": ["A"]}
    assert "[G0]. A" in stack.call("plan", stack.methods[0], make_plan(3)).rows[2].edit["prompt"]


def test_conversations_and_images() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]},
    ]
    text_only = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "<think>"}]
    stack = stack_of(
        Llm(), dataset=StoredDataset({"prompt": [messages, text_only]}), prompt_template="{experiences}|{problem}"
    )
    one, two = (row.edit["prompt"] for row in stack.call("plan", stack.methods[0], make_plan(2)).rows)
    assert one[:3] == messages[:3]
    assert one[3]["content"] == [{"type": "image"}, {"type": "text", "text": "None|what is it"}]
    assert two == [{"role": "user", "content": "None|u"}, text_only[1]]
    assert messages[3]["content"][1]["text"] == "what is it"  # the dataset is as it was


def test_a_prompt_another_method_changed_and_rows_of_no_dataset() -> None:
    stack = stack_of(Llm(), prompt_template="{experiences}|{problem}")
    rows = (
        PlanRow(0, 0, 4, edit={"prompt": "hinted", "x": 1}, payload={"other": 2}),
        PlanRow(-1, 1, 4, edit={"prompt": "foreign", "answer": 3}),
    )
    planned = stack.call("plan", stack.methods[0], make_plan(1).replace(rows=rows)).rows
    assert planned[0] == rows[0].replace(edit={"prompt": "None|hinted", "x": 1})
    assert planned[1] == rows[1].replace(edit={"prompt": "None|foreign", "answer": 3})
    stream = stack_of(Llm(), dataset=None)
    with pytest.raises(MethodError, match="the dataset is a stream"):
        stream.call("plan", stream.methods[0], make_plan(1))
    other = stack_of(Llm(), prompt_column="question")
    with pytest.raises(MethodError, match="has no column `question`"):
        other.call("plan", other.methods[0], make_plan(1))


def test_the_question_of_a_stream_is_the_one_of_the_rows() -> None:
    llm = Llm()
    step(stack_of(llm, dataset=None), rollouts_of([1, 0, 0, 0]))
    assert section(llm.asked["summary"][0], "Task") == "EDITED 0"


# ---- the file


def test_the_library_is_a_file_that_is_begun_with(tmp_path: Path) -> None:
    path = tmp_path / "run" / "library.json"
    revision = fenced([{"content": "Größe: prüfen."}])
    stack = stack_of(Llm(revision=revision), library=str(path))
    step(stack, rollouts_of([1, 1, 1, 1]))
    assert read_library(path) == {}
    step(stack, rollouts_of([1, 0, 0, 0], batch=1))
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content == {
        "format": 1,
        "method": "training_free_grpo",
        "variant": "practice",
        "step": 2,
        "experiences": {"G0": "Größe: prüfen."},
    }
    assert "Größe" in path.read_text(encoding="utf-8")  # readable as it is
    assert list(path.parent.iterdir()) == [path]
    # a later run goes on, one that does not learn leaves it
    assert held(stack_of(Llm(), library=str(path))) == {"G0": "Größe: prüfen."}
    fixed = stack_of(None, library=str(path), learn=False)
    before = path.read_bytes()
    step(fixed, rollouts_of([1, 0, 0, 0]))
    assert held(fixed) == {"G0": "Größe: prüfen."} and path.read_bytes() == before
    assert "Größe" in fixed.call("plan", fixed.methods[0], make_plan(1)).rows[0].edit["prompt"]


def test_a_crash_while_writing_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "library.json"
    write_library(path, {"G0": "a"}, 1, "practice")

    def crash(*args: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as m:
        m.setattr(os, "replace", crash)
        with pytest.raises(OSError):
            write_library(path, {"G0": "b"}, 2, "practice")
    assert read_library(path) == {"G0": "a"}
    write_library(path, {"G0": "b"}, 2, "practice")
    assert read_library(path) == {"G0": "b"} and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 9, "experiences": {}}', '{"format": 1, "experiences": {"G0": 3}}']
)
def test_an_unreadable_library_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "library.json"
    path.write_text(content)
    with pytest.raises(MethodError, match="cannot be read"):
        stack_of(Llm(), library=str(path))
    assert path.read_text() == content


def test_a_library_written_by_hand_is_renumbered(tmp_path: Path) -> None:
    path = tmp_path / "library.json"
    path.write_text('{"format": 1, "experiences": {"mine": "a", "G0": "b"}}')
    assert read_library(path) == {"G0": "a", "G1": "b"}


def test_what_is_resumed_is_the_checkpoint(tmp_path: Path) -> None:
    params = {"library": str(tmp_path / "library.json")}
    stack = stack_of(Llm(), **params)
    step(stack, rollouts_of([1, 0, 0, 0]))
    saved = json.loads(json.dumps(stack.state_dict("data")))
    llm = Llm()
    stack.methods[0].params.llm.replies["revision"] = fenced([{"content": "Later: lost."}])
    step(stack, rollouts_of([1, 0, 0, 0], batch=1))
    assert len(read_library(params["library"])) == 2
    resumed = stack_of(stack.methods[0].params.llm, **params)
    resumed.load_state_dict(saved, "data")
    assert held(resumed) == {"G0": "Units: check them."}
    assert llm.count() == {}


# ---- a language model that fails


def test_without_a_plan_nothing_changes() -> None:
    llm = Llm(revision="garbage")
    stack = stack_of(llm, llm_retries=2)
    stack.methods[0]._advisor._operations.backoff = 0.0
    stack.methods[0].state = {"experiences": ["Old: stays."]}
    logged = step(stack, rollouts_of([1, 0, 0, 0]))
    assert held(stack) == {"G0": "Old: stays."}
    assert len(llm.asked["revision"]) == 3 and logged["revised"] == 0
    assert logged["failed"] == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("replies", "counts"),
    [
        ({"critique": "no tag"}, {"summary": 8, "critique": 2}),
        ({"critique": ""}, {"summary": 8, "critique": 2}),
        ({"group": "no json"}, {"summary": 8, "critique": 2, "group": 1}),  # equal questions are asked once
        ({"group": fenced({})}, {"summary": 8, "critique": 2, "group": 1}),
        ({"group": fenced([])}, {"summary": 8, "critique": 2, "group": 1}),
        ({"group": None}, {"summary": 8, "critique": 2, "group": 1}),
    ],
)
def test_garbage_leaves_the_library(replies: dict[str, Any], counts: dict[str, int]) -> None:
    llm = Llm(**replies)
    stack = stack_of(llm)
    stack.methods[0].state = {"experiences": ["Old: stays."]}
    step(stack, rollouts_of([1, 0, 0, 0, 1, 1, 0, 0]))
    assert held(stack) == {"G0": "Old: stays."}
    assert llm.count() == counts


def failing(texts_: Sequence[str], how: Callable[[], Any]) -> Callable[[str], Any]:
    """Summaries of these attempts fail."""
    return lambda q: how() if section(q, "Attempt") in texts_ else "fine"


def raises() -> Any:
    raise RuntimeError("busy")


@pytest.mark.parametrize("how", [raises, lambda: "", lambda: 3, None], ids=range(4))
def test_a_summary_that_cannot_be_had_leaves_its_rollout_out(how: Callable[[], Any] | None, stuck: Stuck) -> None:
    """None stands for one that hangs."""
    llm = Llm(summary=failing(["attempt 0 at 0", "attempt 1 at 1"], how or stuck))
    stack = stack_of(llm, llm_timeout=NEVER if how else SOON)
    logged = step(stack, rollouts_of([1, 0, 0, 0, 1, 0, 0, 0]))
    # the only success of the first group is gone: it is uniform now
    assert [section(q, "Task") for q in llm.asked["critique"]] == ["task 1"]
    assert llm.asked["critique"][0].count("reward 0") == 2
    assert logged["failed"] == pytest.approx(2 / 11) and stuck.waiting == (0 if how else 2)


def test_nothing_summarized_is_an_error() -> None:
    stack = stack_of(Llm(summary=lambda q: raises()))
    with pytest.raises(MethodError, match="summarized none of the 4 rollouts.*busy"):
        step(stack, rollouts_of([1, 0, 0, 0]))
    assert held(stack) == {}


def test_an_asynchronous_language_model() -> None:
    llm = Llm()

    async def ask(question: str) -> str:
        return llm(question)

    stack = stack_of(ask)
    step(stack, rollouts_of([1, 0, 0, 0]))
    assert held(stack) == {"G0": "Units: check them."}


# ---- it makes no step, and parameters


def test_it_trains_nothing_and_acts_in_evaluation() -> None:
    assert TrainingFreeGrpo.aggregation == "none" and TrainingFreeGrpo.in_eval == ("plan",)
    assert TrainingFreeGrpo.claims() == ("plan", "observe")


def test_deterministic() -> None:
    def run() -> Any:
        stack = stack_of(Llm())
        return [step(stack, rollouts_of([1, 0, 0, 0, 1, 1, 1, 0], batch=s)) for s in range(3)], held(stack)

    assert run() == run()


@pytest.mark.parametrize("variant", ["practice", "paper"])
def test_the_canned_advisor_of_the_demo(variant: str) -> None:
    stack = stack_of(**card_file(TrainingFreeGrpo).example_params, variant=variant)
    for number in range(3):
        logged = step(stack, rollouts_of([1, 0, 0, 0], batch=number))
        assert logged["failed"] == 0 and logged["operations"] == 1
        assert held(stack) == {"G0": ADVICE}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "neither `llm` nor `llm_url`"),
        ({"llm_url": "http://h/v1"}, "without `llm_model`"),
        ({"llm": str, "llm_url": "http://h/v1", "llm_model": "m"}, "are both given"),
        ({"llm": str, "llm_temperature": 0.1}, "`llm_temperature` has no effect"),
        ({"llm": str, "merge_without_text": "delete"}, "`merge_without_text` has no effect"),
        ({"learn": False}, "there is no `library`"),
        ({"llm": str, "learn": False}, "`llm` has no effect"),
        ({"llm": str, "prompt_template": "{problem}"}, "lacks {experiences}"),
        ({"llm": str, "reward_low": 1.0}, "must be lower"),
        ({"llm": str, "ground_truth": False, "answer_column": "a"}, "`answer_column` has no effect"),
        ({"llm": str, "per_group": 0}, "must be >= 1"),
        ({"llm": "no_such_module:f"}, "cannot be loaded"),
    ],
)
def test_parameters_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_params(TrainingFreeGrpo.Params, params, "training_free_grpo")


def test_a_library_that_is_only_used_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no library"):
        stack_of(None, learn=False, library=str(tmp_path / "nothing.json"))


def test_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        stack_of(None, llm_url="http://127.0.0.1:9/v1", llm_model="m", llm_key_env="NO_SUCH_KEY")
    stack = stack_of(None, llm_url="http://127.0.0.1:9/v1", llm_model="m")
    with pytest.raises(MethodError, match="ConnectError"):
        step(stack, rollouts_of([1, 0, 0, 0]))
