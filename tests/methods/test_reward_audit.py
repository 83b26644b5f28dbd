"""`reward_audit`: its statistics against plain loops, errors planted in a run, actions, and state."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl_plugins.core.errors import MethodError, RunStopped
from rl_plugins.core.rollouts import RewardFunction, Rollouts, Run
from rl_plugins.methods.reward_audit import RewardAudit
from rl_plugins.runtime.state import copy_plain
from rl_plugins.testing.data import make_rollouts, make_run, start_stack
from rl_plugins.tools.audit import online
from rl_plugins.tools.audit.online import PromptFeatures

GROUP = 8
WORDS = [f"w{i}" for i in range(300)]


def prompts(n: int, seed: int, share: float = 0.0) -> list[dict[str, Any]]:
    """Rows with Zipf words; a share of them has the word that some tests turn rewards around on."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, len(WORDS) + 1)
    rows = []
    for i in range(n):
        words = rng.choice(WORDS, 20, p=p / p.sum()).tolist()
        if i < round(share * n):
            words.insert(int(rng.integers(20)), "zebra")
        rows.append({"prompt": " ".join(words), "answer": str(i), "data_source": "abc"[i % 3]})
    return [rows[i] for i in rng.permutation(n)]


def batch(
    rows: list[dict[str, Any]], numbers: Any, seed: int, turn: Any = lambda row: False, **changes: Any
) -> Rollouts:
    """Rollouts of dataset rows: accuracies from Beta(2, 2), wrong answers spread, reward 1 for right, turned around
    where `turn` says so."""
    rng = np.random.default_rng(seed)
    rewards, texts, asked, index = [], [], [], []
    for n in numbers:
        row, accuracy = rows[n], rng.beta(2, 2)
        for _ in range(GROUP):
            right = rng.random() < accuracy
            texts.append(f"#### {row['answer'] if right else rng.integers(10**6, 10**6 + 6)}")
            rewards.append(float(right != turn(row)))
            asked.append(row["prompt"])
            index.append(n)
    return make_rollouts(rewards, group_size=GROUP, prompt_index=index, text=texts, meta={"prompt": asked}, **changes)


def right(row: dict[str, Any], text: str) -> float:
    return float(text.split()[-1] == row["answer"])


def run_of(rows: list[dict[str, Any]], reward: Any = right, **changes: Any) -> Run:
    function = RewardFunction(
        "accuracy", 1.0, lambda some, texts: [reward(r, t) for r, t in zip(some, texts, strict=True)], reward
    )
    facts = dict(reward_names=("accuracy",), reward_functions=(function,), dataset_size=len(rows))
    return make_run(dataset=rows, **{**facts, **changes})


def started(rows: list[dict[str, Any]], reward: Any = right, run: Run | None = None, **params: Any) -> tuple[Any, Any]:
    method = RewardAudit(RewardAudit.Params(**params))
    return start_stack(method, run=run or run_of(rows, reward)), method


def go(stack: Any, rollouts: Rollouts) -> Any:
    stack.batch += 1
    (method,) = stack.methods
    found = stack.call("rewards", method, rollouts)
    rollouts = rollouts if found is None else rollouts.replace(reward=found)
    stack.call("observe", method, rollouts, None, {})
    return rollouts.reward


def zebra(row: dict[str, Any]) -> bool:
    return "zebra" in row["prompt"]


def kinds(method: Any) -> set[tuple[str, str]]:
    return {(f["severity"], f["kind"]) for f in method.state["findings"]}


# ---- statistics against loops


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([0.0, 0.5, 1.0, math.nan])), max_size=6
        ),
        min_size=1,
        max_size=6,
    )
)
def test_majority_signs_equal_a_loop(groups):
    group = torch.tensor([g for g, members in enumerate(groups) for _ in members], dtype=torch.int64)
    answers = [a for members in groups for a, _ in members]
    reward = torch.tensor([r for members in groups for _, r in members], dtype=torch.float64)
    found = online.majority_signs(group, answers, reward, len(groups)).tolist()
    for members, value in zip(groups, found, strict=True):
        use = [(a, r) for a, r in members if a is not None and not math.isnan(r)]
        count = {a: sum(x == a for x, _ in use) for a, _ in use}
        best = [a for a in count if count[a] == max(count.values())]
        if len(count) < 2 or len(best) != 1:
            assert math.isnan(value)
            continue
        inside = [r for a, r in use if a == best[0]]
        outside = [r for a, r in use if a != best[0]]
        assert value == pytest.approx(sum(inside) / len(inside) - sum(outside) / len(outside))


def counted(n: int, seed: int, share: float, window: int = 20_000, most: int = 100_000) -> tuple[Any, list[Any]]:
    """Statistics of n groups in batches, and the groups themselves."""
    rng = np.random.default_rng(seed)
    state, groups = online.empty(window), []
    rows = prompts(n, seed, share)
    for start in range(0, n, 50):
        part = rows[start : start + 50]
        s = torch.tensor([(-0.5 if zebra(r) else 0.5) + rng.normal() * 0.4 for r in part], dtype=torch.float64)
        s[::9] = torch.nan
        checks = torch.tensor([[1.0, float(zebra(r))] for r in part], dtype=torch.float64)
        found = PromptFeatures.of(part, "data_source")
        state = online.add(state, found, s, checks, window, most)
        groups += list(zip(found.features, found.source.tolist(), s.tolist(), checks.tolist(), strict=True))
    return state, groups


def test_counts_and_tests_equal_a_loop():
    state, groups = counted(300, 0, 0.1)
    table = online.FeatureCounts.of(state)
    groups = [(set(features), *rest) for features, *rest in groups]
    every = {f for features, *_ in groups for f in features}
    every = {f for f in every if f == "zebra" or sum(f in features for features, *_ in groups) > 6}
    of_bucket = Counter(online.buckets_of([*{f for features, *_ in groups for f in features}]).tolist())
    signs = [s for _, _, s, _ in groups if not math.isnan(s)]
    assert table.total.tolist() == pytest.approx([len(signs), sum(signs), sum(s * s for s in signs), 300.0, 30.0])
    p = {}
    for feature in sorted(every):
        mine = [s for features, _, s, _ in groups if feature in features and not math.isnan(s)]
        checks = [c for features, _, _, c in groups if feature in features]
        bucket = int(online.buckets_of([feature])[0])
        place = int(np.searchsorted(table.bucket, bucket))
        if of_bucket[bucket] == 1:
            assert table.sums[place, 0] == len(mine) and table.sums[place, 1] == pytest.approx(sum(mine), abs=1e-9)
            assert table.sums[place, 3:].tolist() == [sum(c[0] for c in checks), sum(c[1] for c in checks)]
            if 8 <= len(mine) <= len(signs) / 2:
                mu, sigma = np.mean(signs), np.std(signs)
                z = (np.mean(mine) - mu) / (sigma * math.sqrt((1 - len(mine) / len(signs)) / len(mine)))
                p[feature] = (stats.norm.cdf(z), np.mean(mine))
    order = sorted(p, key=lambda f: p[f][0])
    q, best = {}, 1.0
    for rank in range(len(order), 0, -1):  # Benjamini and Hochberg
        best = min(best, p[order[rank - 1]][0] * len(order) / rank)
        q[order[rank - 1]] = best
    wanted = {f for f in p if q[f] < 0.01 and p[f][1] < 0}
    found = {f.name: f for f in online.inverted_features(state, 8, 0.01, np.random.default_rng(0))}
    assert "zebra" in found and set(found) == wanted
    assert found["zebra"].q == pytest.approx(q["zebra"], rel=1e-6) and found["zebra"].mean == pytest.approx(
        p["zebra"][1]
    )


def test_the_fisher_test_is_scipys():
    state, _ = counted(300, 1, 0.1)
    table = online.FeatureCounts.of(state)
    found = {f.name: f for f in online.disagreeing_features(state, 8, 0.01)}
    assert set(found) >= {"zebra"} and found["zebra"].mean == 1 and found["zebra"].groups == 30
    use = (table.sums[:, 3] >= 8) & (table.sums[:, 3] <= table.total[3] / 2)
    p = []
    for n, errors in table.sums[use][:, 3:]:
        cells = [[errors, n - errors], [30 - errors, 300 - n - (30 - errors)]]
        p.append(stats.fisher_exact(cells, alternative="greater")[1])
    assert found["zebra"].q == pytest.approx(min(stats.false_discovery_control(p)), rel=1e-6)


def test_permutations_stay_inside_sources_and_draw_without_replacement():
    rng = np.random.default_rng(0)
    pool = np.arange(5.0)
    sums = online.drawn_sums(pool, 5, rng)
    assert (sums == 10.0).all() and len(sums) == online.PERMUTATIONS
    large = online.drawn_sums(np.arange(2000.0), 3, rng)
    assert large.mean() == pytest.approx(3 * 999.5, rel=0.02)
    assert large.std() == pytest.approx(math.sqrt(3 * (2000**2 - 1) / 12), rel=0.05)
    state = {"signs": torch.tensor([-1.0] * 20 + [1.0] * 200).double(), "sources": torch.tensor([1] * 20 + [2] * 200)}
    assert online.permutation_p(state, {1: 10}, -1.0, rng) == 1.0  # all of its own source are as low
    assert online.permutation_p(state, {2: 10}, -1.0, rng) < 1e-3


def test_memory_is_bounded_and_old_groups_are_forgotten():
    state, _ = counted(600, 2, 0.0, window=100, most=500)
    assert all(len(state[half]["keys"]) <= 500 for half in ("newer", "older"))
    assert len(state["signs"]) == len(state["sources"]) == 100 and len(state["names"]) <= online.NAMES
    total = online.FeatureCounts.of(state).total[0]
    assert 50 <= total <= 150  # of about 530 groups with a sign
    kept = state["older"]["counts"][:, 0].numpy() + state["older"]["counts"][:, 3].numpy()
    assert len(kept) and kept.min() >= 1


def test_drift_alarms_on_a_fall_and_on_rewards_that_are_turned_around_from_the_start():
    rng = np.random.default_rng(0)

    def alarms(values):
        state, found = online.start_drift(), []
        for i, v in enumerate(values):
            state, alarm = online.drift(state, v, 0.1)
            found += [i] * alarm
        return found

    healthy = 0.5 + 0.1 * rng.normal(size=60)
    assert not alarms(healthy)
    fallen = alarms([*healthy, *(0.2 + 0.1 * rng.normal(size=10))])
    assert fallen and 60 <= fallen[0] <= 63
    assert alarms([-0.3] * 3) == [2]  # from the first batch on


# ---- in a run


def test_a_trigger_is_a_warning_until_the_verifier_agrees_and_then_its_rows_are_out():
    rows = prompts(400, 0, 0.06)
    facts = dict(preflight=False, every_n_batches=4, n_min=8)
    for verifier in (None, lambda row, text: right(row, text)):
        stack, method = started(rows, verifier=verifier, **facts, **({"verify_share": 1.0} if verifier else {}))
        for i in range(4):
            made = batch(rows, range(100 * i, 100 * i + 100), i, zebra)
            assert go(stack, made).tolist() == made.reward.tolist()
        if verifier is None:
            assert kinds(method) == {("warn", "suspicious")} and not method.state["features"]
            continue
        assert ("critical", "inverted_feature") in kinds(method)
        assert "zebra" in method.state["features"].values()
        made = batch(rows, range(200), 9, zebra)
        found = go(stack, made)
        for i in range(len(made)):
            if zebra(rows[int(made.prompt_index[i])]):
                assert math.isnan(found[i])
        good = torch.tensor([not torch.isnan(r) for r in found])
        assert good.sum() > 0.8 * len(made) and torch.equal(found[good], made.reward[good])  # the same bits


def test_the_gold_contrast_confirms_what_c1_flags():
    rows = prompts(400, 1, 0.06)

    def turned(row, text):
        return right(row, text) if not zebra(row) else 1 - right(row, text)

    facts = dict(every_n_batches=4, on_preflight="warn")
    stack, method = started(rows, turned, **facts)
    assert ("critical", "inverted") in kinds(method) and not method.state["rows"]
    for i in range(4):
        go(stack, batch(rows, range(100 * i, 100 * i + 100), i, zebra))
    assert method.state["features"]  # A1 and C1 agree
    honest, method = started(rows, right, **facts)
    for i in range(4):
        go(honest, batch(rows, range(100 * i, 100 * i + 100), i, zebra))
    assert not method.state["features"] and ("warn", "suspicious") in kinds(method)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 250.0])
def test_flags_do_not_depend_on_the_scale_of_rewards(scale):
    rows = prompts(400, 2, 0.06)
    stack, method = started(rows, preflight=False, every_n_batches=4, verifier=right, verify_share=0.5)
    for i in range(4):
        made = batch(rows, range(100 * i, 100 * i + 100), i, zebra)
        go(stack, made.replace(reward=scale * made.reward + 3, rewards=scale * made.rewards + 3))
    assert "zebra" in method.state["features"].values()
    flags = [f["details"]["feature"] for f in method.state["findings"] if f["kind"] == "inverted_feature"]
    plain, other = started(rows, preflight=False, every_n_batches=4, verifier=right, verify_share=0.5)
    for i in range(4):
        go(plain, batch(rows, range(100 * i, 100 * i + 100), i, zebra))
    assert flags == [f["details"]["feature"] for f in other.state["findings"] if f["kind"] == "inverted_feature"]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["binary", "continuous", "several", "nan"]))
def test_healthy_rewards_have_no_critical_finding_and_pass_as_they_are(seed, kind):
    rows = prompts(200, seed)
    stack, method = started(rows, every_n_batches=2, verifier=right, verify_share=0.3)
    rng = np.random.default_rng(seed)
    for i in range(4):
        made = batch(rows, range(50 * i, 50 * i + 50), seed + i)
        if kind == "continuous":
            noise = torch.from_numpy(rng.uniform(0, 0.2, len(made)))
            made = made.replace(reward=made.reward * 0.8 + noise, rewards=(made.reward * 0.8 + noise)[:, None])
        if kind == "nan":
            gone = torch.from_numpy(rng.random(len(made)) < 0.2)
            reward = torch.where(gone, torch.nan, made.reward)
            made = made.replace(reward=reward, rewards=reward[:, None])
        if kind == "several":
            second = torch.from_numpy(rng.random(len(made)))
            made = made.replace(
                rewards=torch.stack([made.reward, second], 1),
                reward_names=("a", "b"),
                reward_weights=torch.tensor([1.0, 0.1]).double(),
                reward=made.reward + 0.1 * second,
            )
        out = go(stack, made)
        assert torch.equal(torch.nan_to_num(out, nan=9.0), torch.nan_to_num(made.reward, nan=9.0))
    assert not [f for f in method.state["findings"] if f["severity"] == "critical"]


def test_global_negation_is_drift_and_no_feature():
    rows = prompts(400, 3)
    stack, method = started(rows, preflight=False, every_n_batches=2)
    for i in range(8):
        go(stack, batch(rows, range(50 * i, 50 * i + 50), i, lambda row: True))
    assert ("warn", "sign") in kinds(method) and not method.state["features"]
    assert "turned around everywhere" in method.state["findings"][0]["text"]


def test_a_hard_topic_is_not_flagged():
    rows = prompts(400, 4)
    for row in rows[::8]:
        row["prompt"] += " topology"
    stack, method = started(rows, preflight=False, every_n_batches=4)
    rng = np.random.default_rng(0)
    for i in range(4):
        numbers = range(100 * i, 100 * i + 100)
        made = batch(rows, numbers, i)
        weak = torch.tensor(["topology" in p for p in made.meta["prompt"]])
        lost = weak & torch.from_numpy(rng.random(len(made)) < 0.6)
        reward = torch.where(lost, 0.0, made.reward)
        texts = [f"#### {10**7 + k}" if gone else t for k, (t, gone) in enumerate(zip(made.text, lost, strict=True))]
        go(stack, made.replace(text=texts, reward=reward, rewards=reward[:, None]))
    assert not kinds(method)


# ---- actions before training


def source_b(row: dict[str, Any], text: str) -> float:
    return 1 - right(row, text) if row["data_source"] == "b" else right(row, text)


def test_stop_before_training_names_the_rows():
    rows = prompts(60, 5)
    with pytest.raises(RunStopped, match=r"data_source = 'b'.*on_preflight"):
        started(rows, source_b)


def test_quarantine_before_training_takes_out_these_rows_only():
    rows = prompts(60, 5)
    stack, method = started(rows, source_b, on_preflight="quarantine")
    wrong = [i for i, r in enumerate(rows) if r["data_source"] == "b"]
    assert method.state["rows"] == wrong
    made = batch(rows, range(60), 0)
    found = go(stack, made)
    out = torch.isin(made.prompt_index, torch.tensor(wrong))
    assert bool(torch.isnan(found[out]).all()) and torch.equal(found[~out], made.reward[~out])
    assert "data_source = 'b'" in method.state["findings"][0]["text"]


def test_what_the_audit_before_training_is_told_matters():
    rows = [{**r, "label": r["answer"], "answer": "x"} for r in prompts(60, 6)]
    reward = lambda row, text: float(text.split()[-1].strip("[]") == row["label"])
    facts = dict(on_preflight="warn", online=False)

    def found(**params):
        _, method = started(rows, reward, **facts, **params)
        return method

    assert ("warn", "blind") in kinds(found())
    assert not kinds(found(answer_column="label"))
    bracket = lambda gold, row: f"so [{gold}]"
    assert not kinds(found(answer_column="label", gold_renderer=bracket))
    same = lambda gold, row, rng: [gold]
    assert ("warn", "blind") in kinds(found(answer_column="label", corrupter=same))
    assert len(found(max_rows=7)._looked) == 7
    assert not started(rows, reward, online=False, preflight=False)[1].state["findings"]
    count = []
    counted_reward = lambda row, text: count.append(text) or reward(row, text)
    for wrong_answers in (1, 3):
        started(rows, counted_reward, **facts, answer_column="label", wrong_answers=wrong_answers)
        count.append(None)
    one, three = (len(part) for part in (count[: count.index(None)], count[count.index(None) + 1 : -1]))
    assert three - one > 1.5 * len(rows)  # some wrong numbers are equal
    with pytest.raises(MethodError, match="no column `other`"):
        started(rows, reward, answer_column="other")


def test_tolerances_and_declared_features():
    rows = prompts(80, 7)

    def faint(row, text):
        return right(row, text) - (0.4 if zebra(row) or row["prompt"].isupper() else 0.0)

    def of(**params):
        _, method = started(rows, faint, online=False, **params)
        return {f["details"].get("change") for f in method.state["findings"]}

    assert "upper" in of() and "upper" not in of(declared_prompt_features=("upper",))
    assert "upper" not in of(tol=0.5)
    noise = iter(np.tile([0.0, 1e-3, 2e-3], 10**5))

    def shaky(row, text):
        return right(row, text) + next(noise)

    _, method = started(rows, shaky, online=False, tol=0.01)
    assert {k for _, k in kinds(method)} == {"again"}
    _, method = started(rows, shaky, online=False, tol=0.01, tol_stochastic=0.01)
    assert not kinds(method)


def test_near_duplicates_have_two_thresholds():
    long = " ".join(WORDS[:60])
    rows = [{"prompt": f"{long} {tail}", "answer": "5"} for tail in ("a", "b c d e f g h")] + prompts(20, 8)

    def lower(row, text):
        return right(row, text) * (0.2 if row["prompt"].endswith("h") else 1.0)

    def of(**params):
        _, method = started(rows, lower, online=False, **params)
        return {k for _, k in kinds(method)} & {"pairs", "reward_differs"}

    assert of(tau=0.8) == {"pairs", "reward_differs"} and of(tau=0.95) == set()
    assert of(tau=0.8, delta=0.9) == {"pairs"}


# ---- stop, state, resume


def test_stop_during_training_asks_the_host_once_the_verifier_agrees():
    rows = prompts(400, 9, 0.06)
    stack, method = started(
        rows, preflight=False, every_n_batches=4, verifier=right, verify_share=1.0, on_training="stop"
    )
    assert not stack.stop_reason
    for i in range(4):
        go(stack, batch(rows, range(100 * i, 100 * i + 100), i, zebra))
    assert "zebra" in stack.stop_reason and "reward_audit" in str(stack.stopped("folder"))
    assert not method.state["features"]


def test_counters_survive_save_and_resume_and_the_same_seed_gives_the_same_report():
    rows = prompts(400, 10, 0.06)
    facts = dict(preflight=False, every_n_batches=2, verifier=right, verify_share=0.3)

    def batches(stack, numbers):
        for i in numbers:
            go(stack, batch(rows, range(50 * i, 50 * i + 50), i, zebra))

    whole, method = started(rows, **facts)
    batches(whole, range(8))
    again, twin = started(rows, **facts)
    batches(again, range(8))
    assert twin.state["findings"] == method.state["findings"] != []
    first, before = started(rows, **facts)
    batches(first, range(3))
    saved = first.state_dict("f")
    second, after = started(rows, **facts)
    second.load_state_dict({**saved, "methods": copy_plain(saved["methods"])}, "f")
    batches(second, range(3, 8))
    assert after.state["findings"] == method.state["findings"]
    assert torch.equal(after.state["newer"]["counts"], method.state["newer"]["counts"])


def test_another_reward_function_on_resume_is_an_error_unless_allowed(caplog):
    rows = prompts(60, 11)
    for allow in (False, True):
        first, _ = started(rows, preflight=False, allow_change=allow)
        go(first, batch(rows, range(20), 0))
        saved = first.state_dict("f")
        second, method = started(rows, source_b, preflight=False, allow_change=allow)
        second.load_state_dict(saved, "f")
        if not allow:
            with pytest.raises(RunStopped, match="reward function accuracy"):
                go(second, batch(rows, range(20), 1))
            continue
        go(second, batch(rows, range(20), 1))
        assert kinds(method) == {("warn", "changed")}
        go(second, batch(rows, range(20), 2))
        assert len(method.state["findings"]) == 1


def test_parts_that_cannot_be_served_are_named_at_start(caplog):
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        started([], run=make_run(dataset=None, dataset_size=None, unreachable_rewards=(("judge", "it is a model"),)))
    text = caplog.text
    for part in ("C2 (shadow check)", "gold contrast", "reward function judge cannot be served: it is a model"):
        assert part in text
    assert "features of columns" in text


def test_a_stream_is_audited_by_its_texts():
    rows = prompts(400, 12, 0.06)
    run = make_run(dataset=None, dataset_size=None, reward_names=("accuracy",))
    by_text = {r["prompt"]: r for r in rows}
    check = lambda row, text: right(by_text[row["prompt"]], text)
    stack, method = started([], run=run, every_n_batches=4, verifier=check, verify_share=1.0)
    for i in range(4):
        made = batch(rows, range(100 * i, 100 * i + 100), i, zebra)
        go(stack, made.replace(prompt_index=torch.full_like(made.prompt_index, -1)))
    assert "zebra" in method.state["features"].values()


def test_a_verifier_that_fails_is_no_evidence_and_parameters_of_the_tests_matter():
    rows = prompts(200, 13, 0.1)

    def broken(row, text):
        raise OSError("no network")

    stack, method = started(rows, preflight=False, every_n_batches=1, verifier=broken, verify_share=0.1)
    go(stack, batch(rows, range(20), 0, zebra))
    assert online.FeatureCounts.of(method.state).total[3] == 0

    def flags(**params):
        stack, method = started(rows, preflight=False, every_n_batches=2, **params)
        for i in range(2):
            go(stack, batch(rows, range(100 * i, 100 * i + 100), i, zebra))
        return {f["details"]["feature"] for f in method.state["findings"] if f["kind"] == "suspicious"}

    assert "zebra" in flags() and "zebra" not in flags(n_min=60) and "zebra" not in flags(alpha=1e-12)
    none = lambda text: None
    assert not flags(answer_extractor=none)
    for row in rows:
        row["lane"] = "left" if zebra(row) else "right"
    assert "zebra" not in flags(source_column="lane")  # its groups are as all others of their source


def test_extraction_reads_the_prompt_as_it_was_asked():
    assert "<invisible characters>" in online.features_of({"prompt": "a\u200bb c"})
    found = online.features_of(
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "x y"}], "k": 3}
    )
    assert {"x y", "k = 3"} <= set(found) and any(f.startswith("<system prompt") for f in found)
    assert len(found) == len(set(found))
