"""The audit before training: every part against plain loops, planted errors that it must find, rewards it must pass."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.rollouts import RewardFunction, Run
from rl_plugins.testing.data import make_run
from rl_plugins.tools.audit import AuditReport, Options, duplicates, lint, preflight
from rl_plugins.tools.audit.answers import WrongAnswers, canonical, extract_answer, kind_of, wrong_numbers
from rl_plugins.tools.audit.preflight import columns_taken
from rl_plugins.tools.audit.provenance import changed, hash_of_function, provenance
from rl_plugins.tools.audit.rows import normal, oddities, with_cell, with_prompt, words_of
from rl_plugins.tools.audit.scoring import RewardCaller

WORDS = [f"word{c}" for c in "abcdefghijklmnop"]


def rows_of(n: int, kind: str = "number", seed: int = 0) -> list[dict[str, Any]]:
    """DatasetRows with a prompt of some words, an answer and a source."""
    rng = random.Random(seed)
    answers = {
        "number": lambda: str(rng.randint(-99, 999)),
        "choice": lambda: rng.choice("ABCD"),
        "text": lambda: " ".join(rng.choices(["red", "blue", "green", "big", "small", "round"], k=3)),
    }[kind]
    return [
        {
            "prompt": [{"role": "user", "content": f"{' '.join(rng.choices(WORDS, k=12))} {rng.randint(1, 10**6)}"}],
            "answer": answers(),
            "source": rng.choice(["book", "web", "exam"]),
        }
        for _ in range(n)
    ]


Reward = Callable[[dict[str, Any], str], "float | None"]


def run_of(rows: Sequence[dict[str, Any]], *functions: Reward, weights: Sequence[float] = ()) -> Run:
    """A run whose reward functions take a row and a text."""

    def one(f: Reward) -> RewardFunction:
        name = getattr(f, "__name__", "reward")
        return RewardFunction(name, 1.0, lambda some, texts: [f(r, t) for r, t in zip(some, texts, strict=True)], f)

    made = [one(f) for f in functions]
    if weights:
        made = [RewardFunction(f.name, w, f.call, f.source) for f, w in zip(made, weights, strict=True)]
    return make_run(
        dataset=rows,
        dataset_size=len(rows),
        reward_names=tuple(f.name for f in made),
        reward_functions=tuple(made),
    )


def report_of(
    rows: Sequence[dict[str, Any]], *functions: Reward, weights: Sequence[float] = (), **o: Any
) -> AuditReport:
    return preflight(run_of(rows, *functions, weights=weights), Options(**o)).report


def kinds(report: AuditReport, severity: str | None = None) -> set[str]:
    return {f.kind for f in report.findings if severity in (None, f.severity)}


def right(row: dict[str, Any], text: str) -> float:
    return float(extract_answer(text) == canonical(row["answer"]))


def text_of(row: dict[str, Any]) -> str:
    return row["prompt"][0]["content"]


# ---- gold contrast


def test_differences_equal_a_plain_loop():
    rows = rows_of(40)

    def close(row, text):
        found = extract_answer(text)
        return None if row["source"] == "exam" else -abs(float(found) - float(row["answer"])) / 1000

    found = preflight(run_of(rows, right, close, weights=(1.0, 0.5)), Options())
    c = found.contrast
    for i, row in enumerate(rows):

        def total(text, row=row):
            parts = [(right(row, text), 1.0), (close(row, text), 0.5)]
            return sum(v * w for v, w in parts if v is not None)

        wrong = [total(w) for w in c.wrong[i]]
        assert len(wrong) == 2 and canonical(c.golds[i]) == canonical(row["answer"])
        assert c.total[i] == pytest.approx(total(c.rendered[i]) - sum(wrong) / 2, abs=1e-12)
        assert np.isnan(c.difference[i, 1]) == (row["source"] == "exam")
        assert c.difference[i, 0] == 1.0
    assert not found.report.critical


def test_a_planted_bug_is_found_on_every_row_with_what_they_have_in_common():
    rows = rows_of(300)
    report = report_of(rows, lambda row, text: right(row, text) * (-1 if row["source"] == "web" else 1))
    (finding,) = report.critical
    assert finding.kind == "inverted"
    assert list(finding.rows) == [i for i, r in enumerate(rows) if r["source"] == "web"]
    assert "source = 'web'" in finding.text


def test_a_planted_branch_is_found_with_its_word():
    rows = rows_of(300)
    for i in (5, 50, 150, 250):
        rows[i]["prompt"][0]["content"] += " zebra"
    report = report_of(rows, lambda row, text: right(row, text) * (-1 if "zebra" in text_of(row) else 1))
    by_kind = {f.kind: f for f in report.critical}
    assert by_kind["inverted"].rows == (5, 50, 150, 250) and "'zebra'" in by_kind["inverted"].text
    assert "zebra" in by_kind["flipped"].details["words"]


def test_a_branch_that_no_row_reaches_is_found_only_by_a_change_of_the_prompt():
    report = report_of(rows_of(100), lambda row, text: right(row, text) * (-1 if "\u200b" in text_of(row) else 1))
    assert kinds(report, "critical") == {"flipped"}
    assert report.critical[0].details["change"] == "invisible"


def limited(row: dict[str, Any], text: str) -> float:
    """Right, and not longer than the prompt allows."""
    limit = re.search(r"at most (\d+) characters", text_of(row))
    return right(row, text) * float(limit is None or len(text) <= int(limit.group(1)))


def test_a_length_limit_in_the_prompt_is_not_critical():
    rows = rows_of(300)
    for i, row in enumerate(rows):
        row["prompt"][0]["content"] += f" Use at most {(2, 40)[i % 2]} characters."
    report = report_of(rows, limited)
    assert not report.critical
    assert "depends" in kinds(report, "warn")  # ways to write the prompt change what the limit says
    quiet = report_of(rows, limited, declared_prompt_features=("upper", "words", "spaces", "confusable"))
    assert not [f for f in quiet.findings if f.details.get("change") in ("upper", "words", "spaces", "confusable")]


def test_global_negation_inverts_every_row_and_a_constant_is_blind():
    rows = rows_of(60)
    report = report_of(rows, lambda row, text: -right(row, text))
    assert report.critical[0].rows == tuple(range(60))
    report = report_of(rows, lambda row, text: 1.0)
    assert not report.critical and "blind" in kinds(report, "warn")
    blind = report_of(rows, lambda row, text: right(row, text) if row["source"] != "web" else 0.0)
    (finding,) = [f for f in blind.findings if f.kind == "blind"]
    assert list(finding.rows) == [i for i, r in enumerate(rows) if r["source"] == "web"] and not blind.critical


def test_an_inverted_function_that_others_hide():
    rows = rows_of(200)

    def hidden(row, text):
        return right(row, text) * (-1 if row["source"] == "web" and text_of(row).endswith("7") else 1)

    report = report_of(rows, right, hidden, weights=(2.0, 1.0))
    (finding,) = report.critical
    assert finding.kind == "inverted_function" and "`hidden`" in finding.text
    assert list(finding.rows) == [i for i, r in enumerate(rows) if r["source"] == "web" and text_of(r).endswith("7")]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_findings_do_not_depend_on_the_scale(scale):
    rows = rows_of(120)
    report = report_of(rows, lambda row, text: scale * right(row, text) * (-1 if row["source"] == "web" else 1) + 7)
    assert report.critical[0].rows == tuple(i for i, r in enumerate(rows) if r["source"] == "web")


HEALTHY: dict[str, Reward] = {
    "binary": right,
    "continuous": lambda row, text: 0.9 * right(row, text) + 0.1 / (1 + len(text)),
    "penalty": lambda row, text: right(row, text) - 1.0,
    "unscored": lambda row, text: None if row["source"] == "web" else right(row, text),
}


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(HEALTHY)),
    st.sampled_from(["number", "choice", "text"]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_healthy_rewards_have_no_critical_finding(which, kind, brief, seed):
    rows = rows_of(40, kind, seed)

    def short(row, text):
        return 1.0 / (1 + len(text))

    functions = [HEALTHY[which], short] if brief else [HEALTHY[which]]
    report = report_of(rows, *functions, seed=seed)
    assert not report.critical, [f.shown for f in report.critical]
    again = report_of(rows, *functions, seed=seed)
    assert [f.plain() for f in again.findings] == [f.plain() for f in report.findings]  # same seed, same report


def test_exceptions_are_told_and_the_row_is_unscored():
    def fails(row, text):
        if row["source"] == "web":
            raise KeyError("label")
        return right(row, text)

    rows = rows_of(50)
    report = report_of(rows, fails)
    assert any(f.kind == "raised" and "KeyError" in f.text for f in report.findings) and not report.critical
    (unscored,) = [f for f in report.findings if f.kind == "unscored"]
    assert list(unscored.rows) == [i for i, r in enumerate(rows) if r["source"] == "web"]


@pytest.mark.parametrize(
    "answer",
    [lambda r, t: [][0], lambda r, t: None, lambda r, t: math.nan, lambda r, t: sys.exit(0), lambda r, t: os._exit(0)],
)
def test_a_reward_that_is_never_given_is_critical(answer):
    report = report_of(rows_of(40), answer)
    assert [f.kind for f in report.critical] == ["no_reward"] and report.looked
    assert not any(f.kind == "not_read" for f in report.findings)
    beside = report_of(rows_of(40), right, answer)
    (found,) = [f for f in beside.findings if f.kind == "no_reward"]
    assert found.severity == ("critical" if found.details["raised"] else "warn")


def test_a_process_that_a_reward_function_forks_ends_by_os_exit():
    forked = []

    def forks(row, text):
        if len(forked) > 20:  # each copies what pytest has in memory
            return right(row, text)
        forked.append(text)
        child = os.fork()
        if not child:
            os._exit(7)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7) * right(row, text)

    report = report_of(rows_of(5), forks)
    assert not report.critical and not any(f.kind == "raised" for f in report.findings)


def test_an_answer_of_thousands_of_digits_gets_wrong_answers():
    gold = "9" * 4400
    wrong = WrongAnswers([gold], 3)(gold, {}, np.random.default_rng(0))
    assert len(wrong) == 3 and "1" + "0" * 4400 in wrong and gold not in wrong


def test_the_columns_that_a_function_takes():
    columns = ("prompt", "answer", "entry")
    functions = [lambda completions, entry, answer, **k: 0, lambda completions, **k: 0, lambda prompts: 0, dict]
    told = [columns_taken(f, columns) for f in functions]
    assert told == ["entry answer", "all, as **k", "none", "not known"]


def test_a_sample_of_the_rows_is_told():
    found = preflight(run_of(rows_of(100), right), Options(max_rows=30))
    assert found.report.facts["rows looked at"] == 30 and len(set(found.contrast.rows.tolist())) == 30


def test_what_cannot_be_served_is_named():
    rows = rows_of(20)
    run = replace(run_of(rows), unreachable_rewards=(("judge", "it is a reward model"),))
    report = preflight(run, Options()).report
    assert report.not_served["reward function judge"] == "it is a reward model"
    assert "gold contrast" in report.not_served
    stream = preflight(replace(run_of(rows, right), dataset=None, dataset_size=None), Options()).report
    assert {"gold contrast", "near-duplicates"} <= set(stream.not_served)
    unlabelled = [{"prompt": r["prompt"]} for r in rows]
    assert "answer_column" in preflight(run_of(unlabelled, right), Options()).report.not_served["gold contrast"]


# ---- answers


def test_answers_are_read_and_spoiled():
    assert extract_answer("so \\boxed{1,234}") == "1234" and extract_answer("x\n#### 5.50\n") == "5.5"
    assert extract_answer("The answer is B.") == "b" and extract_answer("<answer> red hat </answer>") == "red hat"
    assert extract_answer("a 3 then 12") == "12" and extract_answer("") is None and extract_answer("w " * 99) is None
    assert kind_of(["1", "-2.5", "3,000"]) == "number" and kind_of(list("ABCA")) == "choice"
    assert kind_of(["a red hat", "some other thing"] * 3) == "text"
    for gold in ("9", "-12", "0", "1,000", "3.25", "007"):
        for seed in range(20):
            assert any(canonical(w) != canonical(gold) for w in wrong_numbers(gold, np.random.default_rng(seed)))


def test_duplicates_and_unicode_tricks_are_the_same_prompt():
    a = "Add  the\u200b number ５ to \ufeffTWO"
    assert normal(a) == normal("add the number 5 to two")
    assert (duplicates.shingles(a) == duplicates.shingles("ADD the number 5 to two")).all()
    assert oddities("plain text") == [] and "invisible characters" in oddities(a)
    assert "a word of several scripts" in oddities("p\u0430y")  # Cyrillic a


def test_rows_change_where_the_prompt_stands():
    row = {"prompt": [{"role": "user", "content": "a"}], "extra_info": {"question": "a", "answer": "1"}}
    assert with_prompt(row, str.upper)["prompt"][0]["content"] == "A"
    assert with_prompt(row, str.upper)["extra_info"]["question"] == "A"
    assert with_cell(row, "answer", "2")["extra_info"]["answer"] == "2" and row["extra_info"]["answer"] == "1"
    assert with_prompt({"prompt": "a"}, str.upper) == {"prompt": "A"}


# ---- determinism


def test_unstable_rewards_are_told_by_kind():
    rows = rows_of(60)
    count = itertools.count()

    def batch(function):
        return RewardFunction("f", 1.0, function, right)

    def run(function):
        return replace(run_of(rows, right), reward_functions=(batch(function),), reward_names=("f",))

    def plain(some, texts):
        return [right(r, t) for r, t in zip(some, texts, strict=True)]

    again = preflight(run(lambda s, t: [v + 1e-3 * (next(count) % 7) for v in plain(s, t)]), Options()).report
    assert "again" in kinds(again, "warn")
    placed = preflight(run(lambda s, t: [v + 0.1 * i for i, v in enumerate(plain(s, t))]), Options()).report
    assert "order" in kinds(placed, "warn") and "again" not in kinds(placed)
    leaking = preflight(run(lambda s, t: [v + 0.01 * len(s) for v in plain(s, t)]), Options()).report
    assert "alone" in kinds(leaking, "warn") and "order" not in kinds(leaking)
    noisy = random.Random(0)
    judge = run(lambda s, t: [v + noisy.uniform(-0.01, 0.01) for v in plain(s, t)])
    assert not kinds(preflight(judge, Options(tol_stochastic=0.05, tol=0.05)).report, "warn")
    assert kinds(preflight(run(plain), Options()).report) == set()


# ---- source


def turned(prompts, completions, **columns):
    out = []
    for p, c in zip(prompts, completions, strict=True):
        value = float(len(c))
        if "magic" in p:
            value = 1 - value
        out.append(value)
    return out


def clean(prompts, completions, **columns):
    lengths = [len(p) for p in prompts]
    return [-1.0 if not c else float(n) for c, n in zip(completions, lengths, strict=True)]


def helped(completions, question, **columns):
    return [_inner(q) for q in question]


def _inner(question):
    import os

    return -1.0 if os.environ.get("X") and "x" in question else 1.0


def test_lint_sees_negations_under_conditions_on_the_prompt():
    (finding,) = lint.findings("turned", turned)
    assert finding.kind == "negation" and finding.severity == "info" and "a constant minus the value" in finding.text
    assert not list(lint.findings("clean", clean))  # it looks at the completion
    assert {f.kind for f in lint.findings("helped", functools.partial(helped))} == {"negation", "outside"}
    assert not list(lint.findings("len", len))


# ---- near-duplicates


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=0, max_size=14), min_size=2, max_size=24))
def test_near_duplicates_equal_all_pairs(texts):
    texts = [" ".join(t) for t in texts]

    def sets(text):
        words = words_of(normal(text))
        k = 1 if len(words) < 8 else 5
        return {tuple(words[i : i + k]) for i in range(len(words) - k + 1)}

    def index(a, b):
        return len(a & b) / len(a | b) if a | b else 0.0

    made = [sets(t) for t in texts]
    every = {(i, j) for i, j in itertools.combinations(range(len(texts)), 2) if made[i] and made[j]}
    wanted = {p for p in every if index(made[p[0]], made[p[1]]) >= 0.85}
    found = set(duplicates.near_duplicates(texts, 0.85, np.random.default_rng(0)))
    equal = {p for p in wanted if made[p[0]] == made[p[1]]}
    assert equal <= found <= wanted  # LSH misses few, and never equal ones
    for i, j in every:
        a, b = duplicates.shingles(texts[i]), duplicates.shingles(texts[j])
        assert duplicates.jaccard(a, b) == pytest.approx(index(made[i], made[j]))


def test_minhash_estimates_the_jaccard_index():
    rng = np.random.default_rng(0)
    a = np.unique(rng.integers(0, 1 << 62, 400, dtype=np.uint64))
    sets = [a, np.unique(np.concatenate([a[:360], rng.integers(0, 1 << 62, 40, dtype=np.uint64)]))]
    signature = duplicates.signatures(sets, rng)
    assert signature.shape == (2, 128)
    assert (signature[0] == signature[1]).mean() == pytest.approx(duplicates.jaccard(*sets), abs=0.12)
    parts = [duplicates.signatures([s], np.random.default_rng(1))[0] for s in sets]
    assert (duplicates.signatures(sets, np.random.default_rng(1)) == np.stack(parts)).all()


def test_nearly_all_pairs_above_the_threshold_are_found():
    rng = random.Random(0)
    texts = []
    for _ in range(200):
        words = [f"w{rng.randrange(10**6)}" for _ in range(80)]
        texts += [" ".join(words), " ".join([*words, "appended"])]
    found = duplicates.near_duplicates(texts, 0.85, np.random.default_rng(0))
    assert len(found) >= 199 and all(j == i + 1 and i % 2 == 0 for i, j in found)


def twins(trigger: str, count: int = 3) -> list[dict[str, Any]]:
    """DatasetRows of which some come twice, the second time with further words."""
    rows = rows_of(60)
    for row in rows:
        row["prompt"][0]["content"] += " " + " ".join(WORDS * 3)
    for i in range(count):
        text = f"{rows[i]['prompt'][0]['content']} {trigger}"
        rows.append({**rows[i], "prompt": [{"role": "user", "content": text}]})
    return rows


def test_opposite_rewards_of_twins_are_critical_and_name_what_differs():
    report = report_of(twins("zebra"), lambda row, text: right(row, text) * (-1 if "zebra" in text_of(row) else 1))
    (finding,) = [f for f in report.critical if f.kind == "opposite_reward"]
    assert finding.details["candidate_triggers"] == ["zebra"] and set(finding.rows) == {0, 1, 2, 60, 61, 62}
    assert not report_of(twins("zebra"), right).critical


def test_twins_with_other_labels_are_told():
    rows = twins("please")
    rows[60]["answer"] = "123456"
    report = report_of(rows, right)
    (finding,) = [f for f in report.findings if f.kind == "label_conflict"]
    assert set(finding.rows) == {0, 60} and not report.critical
    rows = twins("Answer for 7 apples")
    rows[60]["answer"] = "123456"
    assert "label_conflict" not in kinds(report_of(rows, right))  # other numbers, another question


def test_a_legitimate_limit_between_twins_is_no_opposite_reward():
    rows = twins("at most 1 characters")
    report = report_of(rows, limited)
    assert not report.critical and "reward_differs" in kinds(report, "warn")


# ---- provenance


def test_hashes_follow_the_code_its_closure_and_the_config(tmp_path: Path):
    def made(factor):
        def reward(row, text):
            return factor

        return reward

    assert hash_of_function(made(1)) == hash_of_function(made(1)) != hash_of_function(made(2))
    assert hash_of_function(functools.partial(made(1), 3)) != hash_of_function(functools.partial(made(1), 4))
    rows = rows_of(5)
    a = provenance(replace(run_of(rows, right), fingerprint="5 rows, a"))
    b = provenance(replace(run_of(rows, right, weights=(2.0,)), fingerprint="5 rows, b"))
    assert changed(a, a) == [] and changed(a, b) == ["dataset", "reward config"]


# ---- the run's reward functions


def test_functions_of_a_trl_config_sync_async_and_out_of_reach():
    from rl_plugins.trl.generation.rewards import with_functions

    async def slow(prompts, completions, answer, **columns):
        return [1.0 if c[0]["content"] == a else None for c, a in zip(completions, answer, strict=True)]

    def ids(completion_ids, **columns):
        return [0.0] * len(completion_ids)

    def fast(prompts, completions, answer, log_metric, trainer_state, **columns):
        log_metric("a", 1.0)
        return [float(trainer_state.global_step == 0)] * len(prompts)

    model = torch.nn.Linear(1, 1)
    run = make_run(reward_names=("slow", "ids", "fast", "model"))
    run = with_functions(run, [slow, ids, fast, model], [1.0, 2.0, 3.0, 4.0])
    assert [(f.name, f.weight) for f in run.reward_functions] == [("slow", 1.0), ("fast", 3.0)]
    assert [n for n, _ in run.unreachable_rewards] == ["ids", "model"]
    rows = rows_of(2)
    assert run.reward_functions[0].call(rows, [rows[0]["answer"], "no"]) == [1.0, None]
    assert run.reward_functions[1].call(rows, ["", ""]) == [1.0, 1.0]
    scorer = RewardCaller(run.reward_functions)
    assert scorer.total(scorer.score(rows, [rows[0]["answer"], "no"])).tolist() == [4.0, 3.0]
    plain = [{"prompt": "1+1=", "answer": "2"}]

    def texts(prompts, completions, **columns):
        return [float(len(completions[0]) + (prompts == ["1+1="]))]

    (function,) = with_functions(make_run(reward_names=("texts",)), [texts], None).reward_functions
    assert function.call(plain, ["22"]) == [3.0]  # plain texts stay texts


def test_functions_of_a_trainer_run_in_its_own_loop():
    import asyncio
    import threading
    from types import SimpleNamespace

    from rl_plugins.trl.generation.rewards import with_reward_functions

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    seen = []

    async def reward(completion_ids, prompts, **columns):
        seen.append(asyncio.get_running_loop())
        return [float(len(i)) for i in completion_ids]

    chat = SimpleNamespace(encode=lambda text: tuple(text.encode()), eos=(0,))
    trainer = SimpleNamespace(
        async_loop=loop, reward_weights=torch.ones(1), reward_func_names=["reward"], reward_funcs=[reward], state=None
    )
    (function,) = with_reward_functions(make_run(), trainer, chat).reward_functions
    assert function.call([{"prompt": "a"}], ["xyz"]) == [4.0] and seen == [loop]  # with the end token
    loop.call_soon_threadsafe(loop.stop)
    elsewhere = with_reward_functions(make_run(), SimpleNamespace(), chat)
    assert not elsewhere.reward_functions and len(elsewhere.unreachable_rewards) == 2
