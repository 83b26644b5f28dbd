"""BRPO (arXiv 2506.00103): pairwise verdicts against a reference of the group, the filter, and a judge that fails."""

from __future__ import annotations

import itertools
import math
import re
from json import dumps
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import NEVER, SOON, Stuck

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.kit.http import Reply, Web
from rl_plugins.kit.services import fill
from rl_plugins.lab.demo import judges
from rl_plugins.methods.brpo import SCORES, TEMPLATE, Brpo
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("brpo")
NAN = math.nan


def brpo_stack(judge: Any, seed: int = 0, **params: Any) -> MethodStack:
    options = {"judge": judge, "judge_retries": 0, "judge_timeout": NEVER, **params}
    return start_stack(Brpo(build_params(Brpo.Params, options, "brpo")), seed=seed, run=make_run(group_size=8))


def texts(values: Any, group: Any = None, group_size: int = 4, rewards: Any = None, **changes: Any) -> Rollouts:
    """Rollouts whose completion is their quality, written out; prompts are messages."""
    values = list(values)
    made = make_rollouts([0.0] * len(values) if rewards is None else rewards, group, group_size, **changes)
    prompts = [[{"role": "user", "content": f"p{g}"}] for g in made.group.tolist()]
    return made.replace(text=[str(v) for v in values], meta={"prompt": prompts})


def by_quality(prompt: str, a: str, b: str) -> tuple[float, float]:
    """A judge without fault."""
    return float(a), float(b)


def first_wins(prompt: str, a: str, b: str) -> str:
    return "A"


def step(stack: MethodStack, rollouts: Rollouts) -> tuple[Decision, dict[str, float]]:
    stack.metrics.take()
    decision = one_step(stack, rollouts)
    return decision, combine([stack.metrics.take()])


def reward_of(stack: MethodStack, rollouts: Rollouts) -> list[float]:
    return stack.call("rewards", stack.methods[0], rollouts).tolist()


# ---- golden


@GOLDEN.kind("verdicts")
def check_verdicts(case: Case) -> None:
    p, expected = case.params, case.expected
    size = p["group_size"]
    references = case.inputs["reference_index_per_group"]
    wins = {(v["group"], v["candidate"]): v["wins_per_condition"] for v in case.inputs["verdicts"]}
    advantages, kept, skew = [], [], []
    read = set()
    for g, reference in enumerate(references):
        asked: dict[tuple[str, str], int] = {}

        def judge(prompt: str, a: str, b: str, g: int = g, ref: int = reference, asked: Any = asked) -> str:
            vote = asked.setdefault((a, b), 0)
            asked[a, b] += 1
            candidate = int(b if int(a) == ref else a)
            first = int(a) == candidate
            place = 2 * vote + (not first)
            read.add((g, candidate, place))
            won = wins[g, candidate][place]
            return "AB"[first != won]

        names = {"voting_rounds_each_with_both_orders": "votes", "filter_threshold": "filter_tau"}
        own = dict(judge=judge, judge_retries=0, judge_timeout=5.0, judge_concurrency=1, reference=reference)
        stack = start_stack(Brpo(case.build(Brpo, names, **own)), run=make_run(group_size=size))
        decision, logged = step(stack, texts(range(size), group_size=size))
        row_advantages = torch.where(decision.rollouts.kept, decision.row_advantages, 0.0)
        advantages += row_advantages.tolist()
        kept.append(int(decision.stays.all()))
        assert bool(decision.stays.all()) == bool(decision.stays.any())
        skew.append(logged["brpo/skew"])
    assert len(references) == case.inputs["num_groups"]
    assert read == {(*who, i) for who, verdicts in wins.items() for i in range(len(verdicts))}
    assert advantages == pytest.approx(expected["advantages"], abs=1e-12)
    assert kept == [int(k) for k in expected["kept"]]
    if "skew" in expected:
        assert skew == pytest.approx(expected["skew"], abs=1e-7)  # the file holds float32


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the rule


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 14))
    group = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    quality = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, NAN]), min_size=rows, max_size=rows))
    if all(math.isnan(r) for r in rewards):
        rewards[0] = 0.0
    bias, margin = data.draw(st.sampled_from([0.0, 0.5, 1.5])), data.draw(st.sampled_from([0.0, 1.0]))
    tie_value, tau = data.draw(st.sampled_from([-1, 0])), data.draw(st.sampled_from([0.0, 0.4, 0.6, 1.0]))
    reference, votes = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 2))

    def judge(prompt: str, a: str, b: str) -> tuple[float, float]:
        return float(a.split("#")[0]) + bias, float(b.split("#")[0])

    wanted, kept = [NAN] * rows, [False] * rows
    for g in set(group):
        members = [i for i in range(rows) if group[i] == g and not math.isnan(rewards[i])]
        if not members:
            continue
        ref = members[min(reference, len(members) - 1)]
        for i in members:
            won = [
                quality[i] + bias - quality[ref] > margin,
                quality[i] - (quality[ref] + bias) > margin,
            ] * votes
            wanted[i] = 0.0 if i == ref else 1.0 if all(won) else float(tie_value) if any(won) else -1.0
        stays = abs(sum(wanted[i] for i in members)) / len(members) <= tau
        for i in range(rows):
            kept[i] |= group[i] == g and stays

    stack = brpo_stack(judge, tie_value=tie_value, filter_tau=tau, reference=reference, votes=votes, min_margin=margin)
    rollouts = texts([f"{q}#{i}" for i, q in enumerate(quality)], group, rewards=rewards)
    decision, _ = step(stack, rollouts)
    assert decision.rollouts.reward.tolist() == pytest.approx(wanted, nan_ok=True)
    assert decision.rollouts.kept.tolist() == kept
    expected = [0.0 if math.isnan(w) or not k else w for w, k in zip(wanted, kept, strict=True)]
    assert decision.row_advantages.tolist() == pytest.approx(expected)


def test_a_strict_order_gives_its_signs_and_zero_over_all_references() -> None:
    quality = [3.0, 1.0, 4.0, 1.5, 9.0]
    total = 0.0
    for ref in range(5):
        reward = reward_of(brpo_stack(by_quality, reference=ref), texts(quality, group_size=5))
        assert reward == [float(np.sign(q - quality[ref])) for q in quality]
        total += sum(reward)
    assert total == 0.0


def test_position_bias_cannot_leak() -> None:
    stack = brpo_stack(first_wins)
    decision, logged = step(stack, texts(range(12)))
    assert not decision.stays.any()
    assert logged["brpo/dropped"] == 1.0 and logged["brpo/agree"] == 0.0 and logged["brpo/win"] == 0.0
    assert logged["brpo/skew"] == 0.75
    decision, logged = step(brpo_stack(first_wins, tie_value=0), texts(range(12)))
    assert decision.stays.all() and not decision.row_advantages.any()


def test_two_rollouts_are_trained_even_with_a_biased_judge() -> None:
    decision, logged = step(brpo_stack(first_wins, reference=0), texts(range(2), group_size=2))
    assert decision.stays.all() and decision.row_advantages.tolist() == [0.0, -1.0]
    assert logged["brpo/skew"] == 0.5


def test_the_boundary_of_the_filter_is_kept() -> None:
    rollouts = texts([0, 1, 2, 3, -1], group_size=5)  # against the first: +1 +1 +1 -1, skew 2/5
    for tau, stays in ((0.4, True), (0.39, False), (1.0, True), (0.0, False)):
        decision, logged = step(brpo_stack(by_quality, filter_tau=tau, reference=0), rollouts)
        assert bool(decision.stays.all()) is stays and logged["brpo/skew"] == pytest.approx(0.4)
    balanced = texts([0, 1, 2, -3, -1], group_size=5)
    decision, _ = step(brpo_stack(by_quality, filter_tau=0.0, reference=0), balanced)
    assert decision.row_advantages.tolist() == [0.0, 1.0, 1.0, -1.0, -1.0]


def test_identical_completions_lose_without_a_question() -> None:
    asked = []

    def judge(prompt: str, a: str, b: str) -> str:
        asked.append((a, b))
        return "A"

    decision, logged = step(brpo_stack(judge), texts(["same"] * 4 + ["x", "y"], [0] * 4 + [1] * 2))
    assert decision.rollouts.reward[:4].sort().values.tolist() == [-1.0, -1.0, -1.0, 0.0]
    assert decision.stays.tolist() == [False] * 4 + [True] * 2
    assert sorted(asked) == [("x", "y"), ("y", "x")] and logged["brpo/judged"] == 2


def test_equal_scores_are_a_loss_and_a_margin_can_be_asked_for() -> None:
    close = texts([5.0, 5.5, 7.0, 5.0001], group_size=4)
    same = lambda prompt, a, b: (1.0, 1.0)
    assert reward_of(brpo_stack(same, reference=0), close) == [0.0, -1.0, -1.0, -1.0]
    assert reward_of(brpo_stack(by_quality, reference=0), close) == [0.0, 1.0, 1.0, 1.0]
    assert reward_of(brpo_stack(by_quality, reference=0, min_margin=1.0), close) == [0.0, -1.0, 1.0, -1.0]


def test_a_group_of_one_and_a_batch_of_them() -> None:
    decision, logged = step(brpo_stack(by_quality), texts([1, 2, 3], [0, 1, 2]))
    assert decision.row_advantages.tolist() == [0.0] * 3 and decision.stays.all()
    assert logged["brpo/judged"] == 0 and logged["brpo/skew"] == 0.0 and "brpo/win" not in logged


# ---- the reference


def test_reference_is_uniform_seeded_and_new_every_step() -> None:
    rollouts = texts(range(400), group_size=4)
    place = lambda stack: (torch.tensor(reward_of(stack, rollouts)).view(-1, 4) == 0).int().argmax(1)
    one = place(brpo_stack(by_quality, tie_value=0))
    assert torch.equal(one, place(brpo_stack(by_quality, tie_value=0)))
    assert not torch.equal(one, place(brpo_stack(by_quality, seed=1)))
    stack = brpo_stack(by_quality)
    stack.batch = 1
    assert not torch.equal(one, place(stack))
    counts = torch.bincount(one, minlength=4)
    assert counts.min() >= 10 and counts.sum() == 100


def test_reference_does_not_depend_on_order_or_on_other_groups() -> None:
    group = [0, 1, 1, 0, 2, 1, 0, 2, 2, 1]
    rollouts = texts(np.random.default_rng(0).random(10), group)
    one = reward_of(brpo_stack(by_quality), rollouts)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    moved = rollouts.replace(
        group=rollouts.group[order],
        rollout=rollouts.rollout[order],
        text=[rollouts.text[i] for i in order],
        meta={"prompt": [rollouts.meta["prompt"][i] for i in order]},
    )
    assert reward_of(brpo_stack(by_quality), moved) == [one[i] for i in order]
    alone = rollouts.subset(rollouts.group == 1)
    assert reward_of(brpo_stack(by_quality), alone) == [r for r, g in zip(one, group, strict=True) if g == 1]


# ---- the judge


def test_judge_sees_prompt_and_both_orders_once_per_vote() -> None:
    asked = []

    def judge(prompt: str, a: str, b: str) -> tuple[float, float]:
        asked.append((prompt, a, b))
        return float(a), float(b)

    step(brpo_stack(judge, votes=2, reference=1), texts([1, 2, 3], [7, 7, 7]))
    pairs = [("p7", "1", "2"), ("p7", "2", "1"), ("p7", "3", "2"), ("p7", "2", "3")]
    assert sorted(asked) == sorted(pairs * 2)


def test_batch_judge_and_coroutine_agree_with_the_plain_one() -> None:
    sizes = []

    async def batch(pairs: list[tuple[str, str, str]]) -> list[tuple[float, float]]:
        sizes.append(len(pairs))
        return [by_quality(*pair) for pair in pairs]

    rollouts = texts(np.random.default_rng(3).random(16))
    wanted = reward_of(brpo_stack(by_quality), rollouts)
    assert reward_of(brpo_stack(batch, judge_batch_size=10), rollouts) == wanted
    assert sorted(sizes) == [4, 10, 10]
    assert set(wanted) == {-1.0, 0.0, 1.0}


def test_one_inconsistent_vote_of_several_loses() -> None:
    counts: dict[tuple[str, str], int] = {}

    def wavering(prompt: str, a: str, b: str) -> str:
        counts[a, b] = counts.get((a, b), 0) + 1
        better = "A" if float(a) > float(b) else "B"
        return better if counts[a, b] < 3 or {a, b} != {"1", "2"} else "BA"["AB".index(better)]

    rollouts = texts([1, 2, 3], [0, 0, 0])
    assert reward_of(brpo_stack(wavering, votes=2, reference=0, judge_concurrency=1), rollouts) == [0, 1, 1]
    counts.clear()
    assert reward_of(brpo_stack(wavering, votes=3, reference=0, judge_concurrency=1), rollouts) == [0, -1, 1]
    counts.clear()
    stack = brpo_stack(wavering, votes=3, reference=0, judge_concurrency=1, tie_value=0)
    assert reward_of(stack, rollouts) == [0, 0, 1]


def test_failed_questions_are_losses_and_are_counted() -> None:
    def judge(prompt: str, a: str, b: str) -> Any:
        if {a, b} == {"1", "9"}:
            raise RuntimeError("judge broke")
        if {a, b} == {"1", "8"}:
            return "neither"
        return float(a), float(b)

    decision, logged = step(brpo_stack(judge, reference=0, filter_tau=1.0), texts([1, 9, 8, 7, 0, 2], [0] * 6))
    assert decision.row_advantages.tolist() == [0.0, -1.0, -1.0, 1.0, -1.0, 1.0]
    assert logged["brpo/judge_failed"] == pytest.approx(4 / 10)


def test_a_slow_question_costs_its_time_out_and_no_more(stuck: Stuck) -> None:
    def judge(prompt: str, a: str, b: str) -> Any:
        if {a, b} == {"1", "9"}:
            stuck()
        return float(a), float(b)

    reward = reward_of(brpo_stack(judge, reference=0, judge_timeout=SOON), texts([1, 9, 8, 0], [0] * 4))
    assert reward == [0.0, -1.0, 1.0, -1.0] and stuck.waiting == stuck.calls > 0


def test_a_group_without_verdict_leaves_even_without_the_filter() -> None:
    judge = lambda prompt, a, b: None if prompt == "p1" else (float(a), float(b))
    decision, logged = step(brpo_stack(judge, filter_tau=1.0, reference=0), texts(range(8)))
    assert decision.stays.tolist() == [True] * 4 + [False] * 4
    assert decision.rollouts.reward[:4].tolist() == [0, 1, 1, 1] and decision.rollouts.reward[4:].isnan().all()
    assert logged["brpo/dropped"] == 0.5 and logged["brpo/judge_failed"] == 0.0


def test_a_judge_that_answers_nothing_ends_the_run() -> None:
    def broken(prompt: str, a: str, b: str) -> float:
        raise ConnectionError("refused")

    with pytest.raises(MethodError, match="no verdict on any of the 6 questions.*ConnectionError: refused"):
        step(brpo_stack(broken), texts(range(4)))
    with pytest.raises(MethodError, match="It answered None each time"):
        step(brpo_stack(lambda prompt, a, b: None), texts(range(4)))


@pytest.mark.parametrize("verdict", ["a", "C", 1.0, (1.0,), (1.0, 2.0, 3.0), (1.0, "2"), (NAN, 1.0), True])
def test_nonsense_is_no_verdict(verdict: Any) -> None:
    with pytest.raises(MethodError, match="gave no verdict on any"):
        step(brpo_stack(lambda prompt, a, b: verdict), texts(range(4)))


def test_a_judge_may_answer_with_arrays() -> None:
    for kind in (np.array, torch.tensor, list):
        judge = lambda prompt, a, b, kind=kind: kind([float(a), float(b)])
        assert reward_of(brpo_stack(judge, reference=0), texts([2, 1, 3, 2.5])) == [0.0, -1.0, 1.0, 1.0]


def test_demo_judge() -> None:
    assert judges.digits("a:5391", "=1359", "?1359") == (10.0, 9.0)
    assert judges.digits("a:5391", "=1350", "nothing") == (9 * 0.75 + 1, 0.0)
    rollouts = texts(["=1359", "?1359", "=9531", ""], [0] * 4)
    rollouts = rollouts.replace(meta={"prompt": [[{"role": "user", "content": "a:5391"}]] * 4})
    stack = brpo_stack("rl_plugins.lab.demo.judges:digits", reference=1)
    assert reward_of(stack, rollouts) == [1.0, 0.0, -1.0, -1.0]


def test_an_endpoint_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def post(self: Web, path: str, json: Any) -> Reply:
        content = json["messages"][0]["content"]
        seen.append(content)
        a, b = (float(content.split(f"[Answer {x}]\n")[1].split("\n")[0]) for x in "AB")
        opened, closed = re.findall(r"</?verdict-\w+>", content)
        reply = {"choices": [{"message": {"content": f"A is fine.\n{opened}Scores: A={a}, B = {b}{closed}"}}]}
        return Reply(200, dumps(reply))

    monkeypatch.setattr(Web, "post", post)
    stack = brpo_stack(None, judge_url="http://judge/v1", judge_model="m", reference=0)
    assert reward_of(stack, texts([5, 7, 3, 6])) == [0.0, 1.0, -1.0, 1.0]
    assert len(seen) == 6 and seen[0].startswith(TEMPLATE[:60])
    assert any(s.startswith(fill(TEMPLATE, {"prompt": "p0", "a": "7", "b": "5"})) for s in seen)
    assert "{" not in seen[0] and "Scores: A=<number>" in seen[0] and "(" in SCORES


# ---- rows


def test_rollouts_of_several_rows_are_judged_by_their_last_and_count_once() -> None:
    rollout = torch.tensor([0, 0, 0, 1, 2, 2])
    index = torch.tensor([2, 0, 1, 0, 0, 1])  # the first row listed is the last turn
    rollouts = texts([5, 99, 98, 4, -7, 6], [0] * 6, rollout=rollout, index=index)
    decision, logged = step(brpo_stack(by_quality, reference=1), rollouts)
    assert decision.rollouts.reward.tolist() == [1, 1, 1, 0, 1, 1]
    assert logged["brpo/skew"] == pytest.approx(2 / 3) and not decision.stays.any()
    decision, logged = step(brpo_stack(by_quality, reference=0), rollouts)
    assert decision.rollouts.reward.tolist() == [0, 0, 0, -1, 1, 1] and logged["brpo/skew"] == 0.0


def test_withdrawn_rows_are_neither_judged_nor_counted() -> None:
    asked = []

    def judge(prompt: str, a: str, b: str) -> tuple[float, float]:
        asked.append({a, b})
        return float(a), float(b)

    rollouts = texts([1, 2, 3, 0], rewards=[0.0, NAN, 0.0, 0.0])
    decision, logged = step(brpo_stack(judge, reference=0), rollouts)
    assert decision.rollouts.reward.tolist() == pytest.approx([0.0, NAN, 1.0, -1.0], nan_ok=True)
    assert not any("2" in pair for pair in asked) and logged["brpo/skew"] == 0.0


def test_logs() -> None:
    judge = lambda prompt, a, b: "A" if {a, b} == {"1", "3"} else (float(a), float(b))
    _, logged = step(brpo_stack(judge, reference=0), texts([1, 3, 2, 0]))
    assert logged["brpo/win"] == pytest.approx(1 / 3)
    assert logged["brpo/agree"] == pytest.approx(2 / 3)
    assert logged["brpo/judged"] == 6 and logged["brpo/dropped"] == 0.0
    assert logged["brpo/skew"] == pytest.approx(1 / 4)


# ---- parameters


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"judge": by_quality, "judge_url": "http://h/v1"}, "are both given"),
        ({}, "neither `judge` nor `judge_url` is given. Give `judge`"),
        ({"judge": by_quality, "judge_key_env": "KEY"}, "`judge_key_env` has no effect"),
        ({"judge_url": "http://h/v1"}, "without `judge_model`"),
        ({"judge": by_quality, "judge_model": "m"}, "`judge_model` has no effect"),
        ({"judge_url": "http://h/v1", "judge_model": "m", "judge_batch_size": 2}, "`judge_batch_size` has no effect"),
        ({"judge_url": "http://h/v1", "judge_model": "m", "judge_template": "{a} {b}"}, "lacks {prompt}"),
        ({"judge_url": "http://h/v1", "judge_model": "m", "votes": 2}, "every vote would be the same"),
        ({"judge": by_quality, "votes": 0}, "`votes` is 0"),
        ({"judge": by_quality, "filter_tau": 1.1}, "`filter_tau` is 1.1"),
        ({"judge": by_quality, "tie_value": 1}, "`tie_value` is 1"),
        ({"judge": "no.such:judge"}, "cannot be loaded"),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_params(Brpo.Params, params, "brpo")
    assert text in str(caught.value)


def test_an_endpoint_that_cannot_be_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="must be one such as"):
        brpo_stack(None, judge_url="localhost", judge_model="m")


def test_another_prompt_column() -> None:
    params = build_params(Brpo.Params, {"judge": by_quality, "prompt_column": "question"}, "brpo")
    assert Brpo(params).needs == {"text", "several_rollouts", "column:question"}


def test_all_ways_to_order_four_qualities() -> None:
    for quality in itertools.permutations(range(4)):
        reward = reward_of(brpo_stack(by_quality, reference=2), texts(quality))
        assert reward == [float(np.sign(q - quality[2])) for q in quality]
