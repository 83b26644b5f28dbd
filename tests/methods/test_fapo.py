"""FAPO (arXiv 2510.22543): what a flaw costs, who is judged, a judge that fails, and the paper's reward functions."""

from __future__ import annotations

import asyncio
import math
import threading
from json import dumps
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import NEVER, SOON, Stuck

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.kit.http import Reply, Web
from rl_plugins.kit.services import fill
from rl_plugins.lab.demo import judges
from rl_plugins.methods.fapo import rewards as functions
from rl_plugins.methods.fapo.judge import TEMPLATE, boxed_index
from rl_plugins.methods.fapo.method import Fapo
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, one_step, start_stack

GOLDEN = Golden("fapo")
NAN = math.nan
FIELDS = ("score", "acc", "is_flawed_positive")


class Judge:
    """Answers with what `verdict` says about a completion, and notes the questions."""

    def __init__(self, verdict: Any) -> None:
        self.verdict, self.asked, self._lock = verdict, [], threading.Lock()

    def __call__(self, prompt: str, answer: str, completion: str) -> Any:
        with self._lock:
            self.asked.append((prompt, answer, completion))
        return self.verdict(completion)


def of_table(table: dict[str, Any]) -> Judge:
    """An exception in the table is raised."""

    def verdict(completion: str) -> Any:
        found = table[completion]
        if isinstance(found, Exception):
            raise found
        return found

    return Judge(verdict)


def fapo_stack(judge: Any, **params: Any) -> MethodStack:
    options = {"judge": judge, "judge_retries": 0, "judge_timeout": NEVER, **params}
    return start_stack(Fapo(build_params(Fapo.Params, options, "fapo")))


def texts(rewards: Any, completions: Any = None, group: Any = None, **changes: Any) -> Rollouts:
    """Rollouts "0", "1", .. of prompts "p<group>" with the answer "a<group>"."""
    made = make_rollouts(rewards, group, **changes)
    groups = made.group.tolist()
    prompts = [[{"role": "user", "content": f"p{g}"}] for g in groups]
    found = [str(i) for i in range(len(made))] if completions is None else completions
    return made.replace(text=found, meta={"prompt": prompts, "answer": [f"a{g}" for g in groups]})


def rewarded(stack: MethodStack, rollouts: Rollouts) -> tuple[list[float], dict[str, float]]:
    stack.metrics.take()
    found = stack.call("rewards", stack.methods[0], rollouts).tolist()
    return found, {name.removeprefix("fapo/"): value for name, value in combine([stack.metrics.take()]).items()}


def warned(stack: MethodStack) -> str:
    return "\n".join(stack._warned)


def decided(stack: MethodStack, rollouts: Rollouts) -> Decision:
    return one_step(stack, rollouts)


# ---- golden


@GOLDEN.kind("solution")
def check_policy_reward(case: Case) -> None:
    given, expected, asked = case.inputs, case.expected, []
    response = given["judge_response"]

    def judge(prompt: str, answer: str, completion: str) -> str:
        asked.append((prompt, answer, completion))
        if response is None:
            raise ConnectionError("no answer")
        return response

    params = {"judge": judge, "judge_retries": 0, "penalty": case.params["penalty"]}
    info = {"question": "q", "split": given["split"]}
    found = asyncio.run(functions.fapo_score("", given["solution"], given["ground_truth"], info, params=params))
    assert {name: found[name] for name in FIELDS} == {name: expected[name] for name in FIELDS}
    row = (given["solution"], given["ground_truth"], given["split"])
    listed = asyncio.run(functions.fapo(["q"], [row[0]], [row[1]], [row[2]], params=params))
    assert listed == [expected["score"]]
    train = given["split"] != "test"
    assert asked == (2 * [("q", given["ground_truth"], given["solution"])] if train else [])
    if not train:
        assert "rewards" not in Fapo.in_eval
        return
    # the method, on the reward of the rule
    stack = fapo_stack(judge, reward_low=-1.0, success_threshold=0.0, penalty=case.params["penalty"])
    rule = 1.0 if expected["acc"] else -1.0
    reward, logged = rewarded(stack, texts([rule], [given["solution"]]))
    assert reward == [expected["score"]]
    assert logged["right"] == float(expected["acc"]) and logged.get("flawed", 0.0) == expected["is_flawed_positive"]


@GOLDEN.kind("gt_error_index")
def check_judge_reward(case: Case) -> None:
    reply, label, steps = (case.inputs[name] for name in ("response", "gt_error_index", "total_steps"))
    found = functions.fapo_judge_score("", reply, label, {"total_steps": steps})
    assert found["score"] == pytest.approx(case.expected["score"], abs=1e-12)
    assert (found["acc"], found["pred"]) == (case.expected["acc"], case.expected["pred"])
    listed = functions.fapo_judge(prompts=[""], completions=[reply], error_index=[label], total_steps=[steps])
    assert listed == [found["score"]]


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the rule


def verdicts() -> st.SearchStrategy[Any]:
    return st.sampled_from([-1, 0, 3, None, "so \\boxed{-1}", "\\boxed{ 2 }", "\\boxed{two}", "", 1.5, OSError("down")])


def says_flaw(verdict: Any) -> bool:
    """Written again, without the code under test."""
    if verdict in (0, 3) and not isinstance(verdict, float):
        return True
    return verdict == "\\boxed{ 2 }"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12))
    group = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    rewards = data.draw(st.lists(st.sampled_from([-1.0, -1.0, 0.9, 1.0, 1.0, NAN]), min_size=rows, max_size=rows))
    said = data.draw(st.lists(verdicts(), min_size=rows, max_size=rows))
    penalty, threshold = data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])), data.draw(st.sampled_from([0.0, 0.95]))
    low, high = data.draw(st.sampled_from([(-1.0, 1.0), (0.0, 1.0)]))

    wanted, right, answered, flawed = [], 0, 0, 0
    for reward, verdict in zip(rewards, said, strict=True):
        if reward >= threshold:
            right += 1
            answered += says_flaw(verdict) or verdict in (-1, "so \\boxed{-1}")
            flawed += says_flaw(verdict)
            reward -= penalty * (high - low) / 2 * says_flaw(verdict)
        wanted.append(reward)

    judge = of_table({str(i): verdict for i, verdict in enumerate(said)})
    options = {"success_threshold": threshold, "reward_low": low, "reward_high": high, "judge_concurrency": 1}
    reward, logged = rewarded(fapo_stack(judge, penalty=penalty, **options), texts(rewards, group=group))
    assert reward == pytest.approx(wanted, abs=1e-12, nan_ok=True)
    # every right row once, in any order; a judge that is down is not asked to the end
    expected = sorted(str(i) for i, r in enumerate(rewards) if r >= threshold)
    asked = sorted(completion for *_, completion in judge.asked)
    assert asked == expected or (set(asked) < set(expected) and len(asked) >= 8 and not answered)
    assert logged["judged"] == len(asked)
    assert logged.get("flawed", 0.0) == pytest.approx(flawed / answered if answered else 0.0)
    if asked:
        assert logged["judge_failed"] == pytest.approx(1 - answered / len(asked))
    scored = [r for r in rewards if not math.isnan(r)]
    assert logged.get("right", 0.0) == pytest.approx(right / len(scored) if scored else 0.0)


@settings(max_examples=40, deadline=None)
@given(
    shares=st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 6)),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]),
    rewards=st.sampled_from([(-1.0, 1.0), (0.0, 1.0), (0.0, 10.0)]),
)
def test_the_sign_rule(shares: tuple[int, int, int], penalty: float, rewards: tuple[float, float]) -> None:
    """The centred reward of a flawed rollout is h ((2 - lambda) beta - lambda alpha), so at lambda = 1 its advantage
    changes its sign where flawless and wrong rollouts are equally many."""
    low, high = rewards
    flawless, wrong, flawed = shares
    n = sum(shares)
    rollouts = texts([high] * flawless + [low] * wrong + [high] * flawed, group=[0] * n)
    judge = Judge(lambda completion: 0 if int(completion) >= flawless + wrong else -1)
    options = {"reward_low": low, "reward_high": high, "success_threshold": (low + high) / 2}
    decision = decided(fapo_stack(judge, penalty=penalty, **options), rollouts)
    reward, advantages = decision.rollouts.reward, decision.row_advantages
    expected = (high - low) / 2 * ((2 - penalty) * wrong - penalty * flawless) / n
    assert (reward - reward.mean())[-flawed:].tolist() == pytest.approx([expected] * flawed, abs=1e-12)
    assert (advantages[-flawed:] * expected >= 0).all() and (expected == 0) == (abs(float(advantages[-1])) < 1e-9)
    assert bool(torch.isfinite(advantages).all())
    if penalty == 1 and flawless != wrong:
        assert (float(advantages[-1]) > 0) == (wrong > flawless)


@pytest.mark.parametrize("judge", [Judge(lambda c: 0), Judge(lambda c: "\\boxed{3}")])
def test_a_penalty_of_zero_changes_nothing_bit_for_bit(judge: Judge) -> None:
    rewards = [0.1 + 0.2, 1.0, -0.0, 0.7, NAN, 1 / 3, 0.5, 2.0]
    plain = decided(start_stack(), texts(rewards))
    same = decided(fapo_stack(judge, penalty=0.0), texts(rewards))
    for a, b in ((plain.rollouts.reward, same.rollouts.reward), (plain.row_advantages, same.row_advantages)):
        assert torch.equal(a.view(torch.int64), b.view(torch.int64))
    assert len(judge.asked) == 4, "it still counts flaws"


def test_a_judge_without_objections_changes_nothing() -> None:
    rewards = [1.0, 0.0, 1.0, NAN]
    reward, logged = rewarded(fapo_stack(Judge(lambda c: -1)), texts(rewards))
    assert reward == pytest.approx(rewards, nan_ok=True)
    assert logged == {"right": 2 / 3, "judged": 2, "flawed": 0.0, "judge_failed": 0.0}


def test_the_penalty_is_in_units_of_half_the_distance() -> None:
    judge = Judge(lambda c: 0)
    assert rewarded(fapo_stack(judge), texts([1.0, 0.0]))[0] == [0.5, 0.0]
    options = {"reward_low": -1.0, "success_threshold": 0.0}
    assert rewarded(fapo_stack(judge, **options), texts([1.0, -1.0]))[0] == [0.0, -1.0]
    assert rewarded(fapo_stack(judge, penalty=2.0, **options), texts([1.0, -1.0]))[0] == [-1.0, -1.0]
    assert "reward_low" not in warned(fapo_stack(judge))


def test_rewards_that_do_not_fit_the_distance_are_told() -> None:
    stack = fapo_stack(Judge(lambda c: -1))
    rewarded(stack, texts([1.1, -0.1, 1.0, 0.0]))
    assert not warned(stack)
    rewarded(stack, texts([1.0, -1.0, 1.0, -1.0]))
    assert "rewards lie between -1 and 1, but `reward_low` is 0 and `reward_high` 1" in warned(stack)


# ---- the judge


def test_it_sees_prompt_answer_and_the_whole_completion_of_right_rows() -> None:
    judge = Judge(lambda c: -1)
    long = "x" * 5000 + " \\boxed{5}"
    rewarded(fapo_stack(judge), texts([1.0, 0.0, 0.0, 1.0], [long, "b", "c", "d"], group=[3, 3, 4, 4]))
    assert sorted(judge.asked) == [("p3", "a3", long), ("p4", "a4", "d")]
    judge = Judge(lambda c: -1)
    rewarded(fapo_stack(judge, answer_column=None), texts([1.0]))
    assert judge.asked == [("p0", "", "0")]


def test_batch_judge_and_coroutine_agree_with_the_plain_one() -> None:
    sizes = []

    async def batch(items: list[tuple[str, str, str]]) -> list[int]:
        sizes.append(len(items))
        return [int(completion) % 3 - 1 for *_, completion in items]

    rollouts = texts([float(i % 5 != 0) for i in range(40)])
    plain, _ = rewarded(fapo_stack(Judge(lambda c: int(c) % 3 - 1)), rollouts)
    assert rewarded(fapo_stack(batch, judge_batch_size=10), rollouts)[0] == plain
    assert sorted(sizes) == [2, 10, 10, 10] and set(plain) == {0.0, 0.5, 1.0}


def test_failures_are_unflawed_and_counted() -> None:
    judge = of_table({"0": 2, "1": OSError("broke"), "2": "\\boxed{two}", "3": -1, "4": True})
    stack = fapo_stack(judge)
    reward, logged = rewarded(stack, texts([1.0] * 5, group=[0] * 5))
    assert reward == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert logged == {"right": 1.0, "judged": 5, "flawed": 0.5, "judge_failed": 3 / 5}
    assert "failed on some right rollouts" in warned(stack) and "hold no whole number" in warned(stack)


def test_unreadable_replies_are_not_asked_again() -> None:
    judge = Judge(lambda c: "no idea")
    stack = fapo_stack(judge, judge_retries=3)
    rewarded(stack, texts([1.0] * 12))
    assert len(judge.asked) == 12


def test_a_batch_without_any_answer_is_a_warning() -> None:
    judge = Judge(lambda c: 1 / 0)
    stack = fapo_stack(judge, judge_concurrency=1)
    reward, logged = rewarded(stack, texts([1.0] * 40))
    assert reward == [1.0] * 40 and len(judge.asked) == 8, "the others were not asked"
    assert logged == {"right": 1.0, "judged": 8, "judge_failed": 1.0}
    assert "gave no answer about any right rollout of a batch, so none lost anything" in warned(stack)
    assert "ZeroDivisionError" in warned(stack)
    stack = fapo_stack(judge)
    assert rewarded(stack, texts([0.0] * 4)) == ([0.0] * 4, {"right": 0.0, "judged": 0})
    assert not warned(stack), "nobody was asked"


def test_a_slow_question_costs_its_time_out_and_no_more(stuck: Stuck) -> None:
    judge = Judge(lambda completion: stuck() if completion == "1" else 0)
    reward, logged = rewarded(fapo_stack(judge, judge_timeout=SOON), texts([1.0] * 4))
    assert reward == [0.5, 1.0, 0.5, 0.5] and logged["judge_failed"] == 0.25
    assert stuck.waiting == stuck.calls == 1


@pytest.mark.parametrize(
    ("reply", "index"),
    [
        ("\\boxed{-1}", -1),
        ("\\boxed{0}", 0),
        ("first \\boxed{3}, then \\boxed{ 12\n}.", 12),
        ("\\boxed{\\text{2}}", None),
        ("\\boxed{{4}}", None),
        ("\\boxed{1} and \\boxed{2", None),
        ("\\boxed{1}" + " " * 300, None),
        ("\\boxed{1}" + " " * 291, 1),
        ("\\boxed{1.0}", None),
        ("\\boxed{two}", None),
        ("\\boxed{}", None),
        ("\\boxed{__import__('os').getpid()}", None),
        ("\\boxed{" + "9" * 200 + "}", int("9" * 200)),
        ("-1", None),
        ("", None),
    ],
)
def test_what_is_read_of_a_reply(reply: str, index: int | None) -> None:
    assert boxed_index(reply) == index


def test_an_endpoint_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def post(self: Web, path: str, json: Any) -> Reply:
        content = json["messages"][0]["content"]
        seen.append((self.url + path, json["max_tokens"], content))
        step = content.split("[Solution]\n")[1].split("\n")[0]
        reply = {"choices": [{"message": {"content": f"Step {step} looks odd. \\boxed{{{int(step) - 1}}}"}}]}
        return Reply(200, dumps(reply))

    monkeypatch.setattr(Web, "post", post)
    stack = fapo_stack(None, judge_url="http://judge/v1", judge_model="m")
    assert rewarded(stack, texts([1.0, 1.0, 0.0, 1.0]))[0] == [1.0, 0.5, 0.0, 0.5]
    wanted = fill(TEMPLATE, {"prompt": "p0", "answer": "a0", "completion": "3"})
    assert len(seen) == 3 and ("http://judge/v1/chat/completions", 16384, wanted) in seen
    template = "{answer} of {prompt}: [Solution]\n{completion}\n{other}"
    rewarded(fapo_stack(None, judge_url="http://judge/v1", judge_model="m", judge_template=template), texts([1.0]))
    assert seen[-1][2] == "a0 of p0: [Solution]\n0\n{other}"
    # the reward function asks the same way; verl's router is an endpoint
    seen.clear()
    info = {"question": "p0", "split": "train"}
    completion = "3\nso \\boxed{a0}"
    found = asyncio.run(functions.fapo_score("", completion, "a0", info, reward_router_address="host:1"))
    assert seen == [("http://host:1/v1/chat/completions", 16384, wanted.replace("3\n", f"{completion}\n", 1))]
    assert found["score"] == 0.0 and found["is_flawed_positive"]


# ---- rows


def test_rollouts_of_several_rows_are_judged_once_and_lose_in_all_of_them() -> None:
    rollout = torch.tensor([0, 0, 1, 1, 2])
    index = torch.tensor([1, 0, 0, 1, 0])  # the first row listed is the last turn
    judge = Judge(lambda completion: 1 if completion == "one\n\ntwo" else -1)
    rollouts = texts([1.0, 1.0, 1.0, 0.0, 1.0], ["two", "one", "x", "y", "z"], [0] * 5, rollout=rollout, index=index)
    reward, logged = rewarded(fapo_stack(judge), rollouts)
    assert reward == [0.5, 0.5, 1.0, 0.0, 1.0]
    assert sorted(c for *_, c in judge.asked) == ["one\n\ntwo", "x\n\ny", "z"], "right by the mean of the rows, 0.5"
    assert logged == {"right": 1.0, "judged": 3, "flawed": 1 / 3, "judge_failed": 0.0}
    judge.asked.clear()
    rewarded(fapo_stack(judge, success_threshold=0.6), rollouts)
    assert sorted(c for *_, c in judge.asked) == ["one\n\ntwo", "z"]


def test_rows_without_a_reward_keep_none() -> None:
    rollout, index = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    rollouts = texts([NAN, 1.0, NAN], group=[0] * 3, rollout=rollout, index=index)
    judge = Judge(lambda c: 0)
    reward, _ = rewarded(fapo_stack(judge), rollouts)
    assert reward == pytest.approx([NAN, 0.5, NAN], nan_ok=True) and len(judge.asked) == 1


def test_groups_of_equal_rewards_and_of_one_have_no_advantage() -> None:
    all_flawed = fapo_stack(Judge(lambda c: 0))
    assert decided(all_flawed, texts([1.0] * 4)).row_advantages.tolist() == [0.0] * 4
    assert decided(all_flawed, texts([1.0, 0.0], group=[0, 1])).row_advantages.tolist() == [0.0, 0.0]


def test_it_follows_other_rewards_hooks() -> None:
    class Halved(Method):
        name = "halved"

        def rewards(self, rollouts: Rollouts) -> torch.Tensor:
            return rollouts.reward / 2

    params = {"judge": Judge(lambda c: 0), "reward_high": 0.5, "success_threshold": 0.25}
    stack = start_stack(Halved(), Fapo(build_params(Fapo.Params, params, "fapo")))
    assert decided(stack, texts([1.0, 0.0])).rollouts.reward.tolist() == [0.25, 0.0]


# ---- parameters


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "neither `judge` nor `judge_url` is given. Give `judge`, a function judge(prompt, answer, completion)"),
        ({"judge": len, "judge_url": "http://h/v1"}, "are both given"),
        ({"judge": len, "judge_max_tokens": 5}, "`judge_max_tokens` has no effect"),
        ({"judge_url": "http://h/v1"}, "without `judge_model`"),
        (
            {"judge_url": "http://h/v1", "judge_model": "m", "judge_template": "{prompt}"},
            "lacks {answer}, {completion}",
        ),
        ({"judge": len, "penalty": -1}, "`penalty` is -1"),
        ({"judge": len, "reward_low": 1.0}, "`reward_low` is 1 and `reward_high` 1; the first must be lower"),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_params(Fapo.Params, params, "fapo")
    assert text in str(caught.value)


def test_columns() -> None:
    columns = lambda **params: Fapo(build_params(Fapo.Params, {"judge": len, **params}, "fapo")).needs
    assert columns() == {"text", "column:prompt", "column:answer"}
    assert columns(prompt_column="q", answer_column=None) == {"text", "column:q"}


def test_demo_judge() -> None:
    assert judges.sloppy("a:31", "13", "?13") == 0
    assert judges.sloppy("a:31", "13", "=13") == -1


# ---- the reward functions


def test_the_reward_function_judges_right_training_rows_and_keeps_their_order() -> None:
    order = []

    async def judge(question: str, answer: str, solution: str) -> int:
        await asyncio.sleep(0.002 * (5 - int(solution[0])))  # the last question is answered first
        order.append(solution[0])
        return 0 if solution[0] == "1" else -1

    logged: dict[str, float] = {}
    completions = [f"{i} so \\boxed{{{5 if i != 2 else 6}}}" for i in range(5)]
    rewards = asyncio.run(
        functions.fapo(
            prompts=[[{"role": "user", "content": "q"}]] * 5,
            completions=[[{"role": "assistant", "content": c}] for c in completions],
            answer=[5, "5.0", "5", "5", "5"],
            split=["train"] * 4 + ["test"],
            params={"judge": judge, "judge_concurrency": 8},
            log_metric=logged.__setitem__,
            completion_ids=None,
        )
    )
    assert rewards == [1.0, 0.0, -1.0, 1.0, 1.0] and sorted(order) == ["0", "1", "3"] and order[0] == "3"
    assert logged == {"fapo/acc": 4 / 5, "fapo/flawed": 1 / 5, "fapo/judge_failed": 0.0}


def test_the_reward_function_fails_open_and_counts() -> None:
    found = asyncio.run(
        functions.fapo_score("", "\\boxed{5}", "5", {"question": "q"}, params={"judge": max, "judge_retries": 0})
    )
    assert found["score"] == 0.0 or found["judge_failed"]  # max("q", "5", text) is a text
    assert found == {"score": 1.0, "acc": True, "pred": "5", "is_flawed_positive": False, "judge_failed": True}


def test_calls_of_the_reward_function_share_a_limit() -> None:
    most, now = 0, 0

    async def judge(question: str, answer: str, solution: str) -> int:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return -1

    async def many() -> list[Any]:
        params = {"judge": judge, "judge_concurrency": 3}
        score = lambda i: functions.fapo_score("", f"{i} \\boxed{{5}}", "5", {"question": "q"}, params=params)
        return await asyncio.gather(*(score(i) for i in range(12)))

    for _ in range(2):  # in two event loops
        assert [row["score"] for row in asyncio.run(many())] == [1.0] * 12
    assert most == 3


def test_only_the_end_of_a_solution_holds_its_answer() -> None:
    params = {"judge": lambda question, answer, solution: -1}
    score = lambda text: asyncio.run(functions.fapo_score("", text, "5", params=params))
    assert score("\\boxed{5}" + "x" * 291)["acc"] and not score("\\boxed{5}" + "x" * 300)["acc"]
    assert score("no box")["pred"] == "" and score("no box")["score"] == -1.0


def test_the_reward_function_needs_a_judge() -> None:
    with pytest.raises(ConfigError, match="neither `judge` nor `judge_url`"):
        asyncio.run(functions.fapo_score("", "wrong", "5"))
    with pytest.raises(ConfigError, match="`fapo` has no parameter `success_threshold`"):
        asyncio.run(functions.fapo_score("", "wrong", "5", params={"judge": len, "success_threshold": 1}))


@settings(max_examples=40, deadline=None)
@given(steps=st.integers(1, 20), label=st.integers(-1, 19), pred=st.integers(-3, 25) | st.none())
def test_the_judge_is_paid_for_the_place(steps: int, label: int, pred: int | None) -> None:
    label = min(label, steps - 1)
    reply = "none" if pred is None else f"\\boxed{{{pred}}}"
    found = functions.fapo_judge_score("", reply, str(label), {"total_steps": steps})
    readable = pred is not None and -1 <= pred < steps
    if not readable or (pred == -1) != (label == -1):
        assert found["score"] == -1.0 and not found["acc"]
    else:
        assert found["score"] == pytest.approx(1 - abs(pred - label) / steps) and found["score"] > 0 and found["acc"]
    assert found["pred"] == (pred if readable else None)
