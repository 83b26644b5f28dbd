"""PS-GRPO (arXiv 2510.04392): similarities and rewards against plain loops, its properties, and sets in batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.ps_grpo_loops import COLUMN, by_loops, exact_by_loops

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow, Rollouts
from rl_plugins.methods.ps_grpo import PsGrpo
from rl_plugins.methods.ps_grpo.sets import weights
from rl_plugins.methods.ps_grpo.texts import KINDS, Texts, Vocabulary
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack
from rl_plugins.testing.contract.dataset import StoredDataset

NAN = math.nan


def dataset(values: Sequence[Any]) -> StoredDataset:
    return StoredDataset({"prompt": [f"question {i}" for i in range(len(values))], COLUMN: list(values)})


def ps_grpo(values: Sequence[Any] = (0, 0, 0, 1, 1, 1), seed: int = 0, rows: int | None = None, **params: Any) -> Any:
    """A started stack on a dataset with these sets."""
    method = PsGrpo(build_params(PsGrpo.Params, params, "ps_grpo"))
    run = make_run(dataset=dataset(values), dataset_size=len(values), batch_rows=rows, columns=("prompt", COLUMN))
    return start_stack(method, seed=seed, run=run)


def rewarded(stack: MethodStack, rollouts: Rollouts) -> list[float]:
    return stack.call("rewards", stack.methods[0], rollouts).tolist()  # type: ignore[no-any-return]


def of(texts: Sequence[str], wording: Sequence[int], sets: Sequence[Any], rewards: Any = None, **more: Any) -> Rollouts:
    """Rollouts with these texts; a wording is a prompt."""
    number = Counter[int]()
    place = [(number.update([w]), number[w] - 1)[1] for w in wording]
    meta = {COLUMN: list(sets), **more.pop("meta", {})}
    rewards = [0.0] * len(texts) if rewards is None else rewards
    return make_rollouts(
        rewards,
        list(wording),
        prompt_index=list(wording),
        text=list(texts),
        rollout=torch.tensor(place),
        meta=meta,
        **more,
    )


# ---- similarities, against loops


def matrix(kind: str, texts: Sequence[str]) -> Any:
    number = Vocabulary()
    return Texts([number(t) for t in texts]).similarity(kind)


WORDS = st.lists(st.sampled_from(["a", "b", "A", "c", "d.", ",", "Ä", ""]), max_size=9).map(" ".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(WORDS, min_size=1, max_size=6))
def test_similarities_are_those_of_loops(kind: str, texts: list[str]) -> None:
    found = matrix(kind, texts)
    wanted = [[by_loops(kind, a, b) for b in texts] for a in texts]
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    assert found.min() >= 0 and found.max() <= 1 + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_and_many_features(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a word of bits has, carries over several words, and products in several blocks."""
    monkeypatch.setattr("rl_plugins.methods.ps_grpo.texts._BLOCK", 600)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["a", "b", "c"], n)) for n in (1, 63, 64, 65, 128, 129, 200)]
    texts += ["a " * 130, "b " * 64 + "a " * 64, "a " * 64 + "b " * 64, "", "c"]
    wanted = [[by_loops(kind, a, b) for b in texts] for a in texts]
    np.testing.assert_allclose(matrix(kind, texts), wanted, rtol=1e-12)


def test_bleu_by_hand() -> None:
    """Direction, smoothing, brevity penalty: the short hypothesis is punished, the long one loses precision."""
    one, two = "the cat", "the cat sat"
    found = matrix("bleu2", [one, two])
    assert found[0, 1] == pytest.approx(math.exp(1 - 3 / 2) * math.sqrt(1 * (1 + 1) / (1 + 1)))
    assert found[1, 0] == pytest.approx(math.sqrt(2 / 3 * (1 + 1) / (2 + 1)))
    assert matrix("bleu1", ["a a a", "a b"])[0, 1] == pytest.approx(1 / 3)  # clipped


# ---- rewards, against loops


@st.composite
def batches(draw: Any, least: int = 1) -> Any:
    """(texts, wording, sets): ragged sets and wordings, in any order."""
    rows = []
    wording = 0
    for number in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(least, 3))):
            rows += [(wording, f"set {number}")] * draw(st.integers(1, 3))
            wording += 1
    rows = draw(st.permutations(rows))
    texts = draw(st.lists(WORDS, min_size=len(rows), max_size=len(rows)))
    return texts, [w for w, _ in rows], [s for _, s in rows]


@settings(max_examples=40, deadline=None)
@given(batch=batches(), kind=st.sampled_from(KINDS), data=st.data())
def test_the_exact_reward_is_that_of_a_loop(batch: Any, kind: str, data: st.DataObject) -> None:
    texts, wording, sets = batch
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=len(texts), max_size=len(texts)))
    sets = [None if data.draw(st.integers(0, 9)) == 0 else s for s in sets]
    wanted = exact_by_loops(kind, texts, wording, sets, rewards)
    if all(math.isnan(x) for x in wanted):
        wanted = [NAN if math.isnan(x) else 0.0 for x in rewards]
    stack = ps_grpo(compare="exact", similarity=kind, gamma=0)
    found = rewarded(stack, of(texts, wording, sets, rewards))
    assert found == pytest.approx(wanted, nan_ok=True, abs=1e-12)
    assert all(math.isnan(x) or 0 <= x <= 1 for x in found)


def test_a_package_that_is_missing_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_plugins.methods.ps_grpo.params.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="rapidfuzz"):
        ps_grpo(similarity="rougeL")
    assert ps_grpo(similarity="bleu2")


@pytest.mark.parametrize("compare", ["exact", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_outputs_have_the_reward_one(kind: str, compare: str) -> None:
    stack = ps_grpo(compare=compare, similarity=kind, gamma=0)
    found = rewarded(stack, of(["It is Paris."] * 12, [0, 1, 2, 3] * 3, [0, 0, 0, 1] * 3))
    assert found == pytest.approx([1, 1, 1, NAN] * 3, nan_ok=True)


@settings(max_examples=40, deadline=None)
@given(batch=batches(least=2), compare=st.sampled_from(["exact", "sampled"]), data=st.data())
def test_the_own_wording_never_counts(batch: Any, compare: str, data: st.DataObject) -> None:
    texts, wording, sets = batch
    row = data.draw(st.integers(0, len(texts) - 1))
    siblings = [i for i, w in enumerate(wording) if w == wording[row] and i != row]
    other = ["other words" if i in siblings else t for i, t in enumerate(texts)]
    stack = ps_grpo(compare=compare, gamma=0)
    a, b = (rewarded(stack, of(t, wording, sets))[row] for t in (texts, other))
    assert a == pytest.approx(b, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(batch=batches(least=2), compare=st.sampled_from(["exact", "sampled"]), data=st.data())
def test_the_order_of_rows_does_not_matter(batch: Any, compare: str, data: st.DataObject) -> None:
    rollouts = of(*batch)
    order = data.draw(st.permutations(range(len(rollouts))))
    stack = ps_grpo(gamma=0, **({"compare": "exact"} if compare == "exact" else {"kappa": 1}))
    found = rewarded(stack, rollouts)
    pick = torch.tensor(order)
    moved = of([batch[0][i] for i in order], [batch[1][i] for i in order], [batch[2][i] for i in order])
    moved = moved.replace(rollout=rollouts.rollout[pick])
    assert rewarded(stack, moved) == pytest.approx([found[i] for i in order], nan_ok=True, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(batch=batches(least=2), data=st.data())
def test_renamed_wordings_and_rollouts_have_the_same_exact_reward(batch: Any, data: st.DataObject) -> None:
    texts, wording, sets = batch
    names = data.draw(st.permutations(range(max(wording) + 1)))
    stack = ps_grpo(compare="exact", gamma=0)
    renamed = rewarded(stack, of(texts, [names[w] for w in wording], sets))
    assert renamed == pytest.approx(rewarded(stack, of(texts, wording, sets)), nan_ok=True, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(batch=batches(), kind=st.sampled_from(KINDS))
def test_the_whole_sample_is_the_exact_reward(batch: Any, kind: str) -> None:
    rollouts = of(*batch)
    whole = ps_grpo(similarity=kind, kappa=9, s=9, gamma=0)
    exact = ps_grpo(similarity=kind, compare="exact", gamma=0)
    assert rewarded(whole, rollouts) == pytest.approx(rewarded(exact, rollouts), nan_ok=True, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    kappa=st.integers(1, 5),
    s=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_a_sample_has_kappa_wordings_and_s_rollouts_of_each(sizes: list[int], kappa: int, s: int, seed: int) -> None:
    wording = np.repeat(np.arange(len(sizes)) * 3, sizes)
    found = weights(wording, kappa, s, np.random.default_rng(seed))
    for i, own in enumerate(wording):
        chosen = Counter(wording[np.flatnonzero(found[i])].tolist())
        assert own not in chosen and len(chosen) == min(kappa, len(sizes) - 1)
        for w, n in chosen.items():
            assert n == min(s, sizes[w // 3])
            assert found[i][wording == w].sum() == pytest.approx(1 / len(chosen))


def test_the_sampled_reward_has_the_mean_of_the_exact_one() -> None:
    """Also with unequal numbers of rollouts: the mean over 4,000 samples, within four standard errors, and every other
    rollout is drawn as often as its share says."""
    wording = np.array([0, 0, 1, 1, 1, 2, 3, 3, 3, 3])
    similarity = np.random.default_rng(1).random((10, 10))
    exact = (weights(wording) * similarity).sum(1)
    rng = np.random.default_rng(2)
    drawn = np.stack([weights(wording, 2, 2, rng) for _ in range(4000)])
    sampled = (drawn * similarity).sum(2)
    error = sampled.std(0, ddof=1) / math.sqrt(len(drawn))
    assert error.min() > 0 and (np.abs(sampled.mean(0) - exact) < 4 * error).all()
    np.testing.assert_allclose(drawn.mean(0), weights(wording), atol=0.02)


def test_every_rollout_has_a_sample_of_its_own_and_every_batch_another() -> None:
    texts = [f"{a} {b}" for a in "abcd" for b in "wxyz"]
    rollouts = of(texts, np.repeat(range(4), 4).tolist(), [0] * 16)
    draws = []
    for batch in range(2):
        stack = ps_grpo(
            kappa=1, gamma=0, similarity=lambda a, b: draws.append(set(zip(a, b, strict=True))) or [1.0] * len(a)
        )
        stack.batch = batch
        rewarded(stack, rollouts)
    assert draws[0] != draws[1] and len({b for _, b in draws[0]}) > 4


# ---- accuracy, weights, rows


def test_accuracy_is_the_f1_to_the_best_answer() -> None:
    texts = ["Paris", "it is paris", "Rome", "", "nothing", "42"]
    answers = ["paris", ["London", "paris"], "paris", "paris", None, 42]
    stack = ps_grpo(compare="exact", similarity="em", answer_column="answer", alpha=2, gamma=0.5)
    rollouts = of(texts, [0, 1, 2, 3, 4, 5], [0] * 6, [7.0] * 6, meta={"answer": answers})
    assert "column:answer" in stack.needs
    f1 = [1, 0.5, 0, 0, 0, 1]
    assert rewarded(stack, rollouts) == pytest.approx([0.5 * x for x in f1])
    logged = combine([stack.metrics.take()])
    assert logged["ps_grpo/accuracy"] == pytest.approx(sum(f1) / 6) and logged["ps_grpo/consistency"] == 0


def test_without_answers_the_runs_reward_is_the_accuracy() -> None:
    stack = ps_grpo(compare="exact", gamma=0.5)
    found = rewarded(stack, of(["a", "a", "b", "b"], [0, 1, 2, 3], [0, 0, 1, 1], [1, 0, 3, NAN]))
    assert found == pytest.approx([1.5, 1, NAN, NAN], nan_ok=True)  # the last but one is alone: its partner has none
    assert rewarded(ps_grpo(compare="exact", gamma=0), of(["a", "a"], [0, 1], [0, 0], [5, 9])) == pytest.approx([1, 1])


def test_a_rollout_of_several_rows_counts_once_with_its_last_text() -> None:
    rollouts = make_rollouts(
        [0.0] * 5,
        [0, 0, 0, 1, 1],
        prompt_index=[0, 0, 0, 1, 1],
        rollout=torch.tensor([0, 0, 1, 0, 1]),
        index=torch.tensor([1, 0, 0, 0, 0]),
        text=["a", "z", "b", "a", "b"],
        meta={COLUMN: [0] * 5},
    )
    assert rewarded(ps_grpo(compare="exact", similarity="em", gamma=0), rollouts) == pytest.approx([0.5] * 5)
    first = rewarded(
        ps_grpo(compare="exact", similarity="em", gamma=0), rollouts.replace(text=["z", "a", "b", "a", "b"])
    )
    assert first == pytest.approx([0, 0, 0.5, 0, 0.5])


def test_several_groups_of_a_prompt_are_one_wording() -> None:
    rollouts = make_rollouts([0.0] * 3, [0, 1, 2], prompt_index=[4, 4, 5], text=["a", "a", "b"], meta={COLUMN: [0] * 3})
    assert rewarded(ps_grpo(compare="exact", gamma=0), rollouts) == pytest.approx([0, 0, 0])
    foreign = rollouts.replace(prompt_index=torch.tensor([-1, -1, 5]))  # prompts of no dataset are told by their groups
    assert rewarded(ps_grpo(compare="exact", gamma=0), foreign) == pytest.approx([0.5, 0.5, 0])


def test_a_function_gets_every_different_pair_once() -> None:
    asked: list[Any] = []

    def similarity(hypotheses: list[str], references: list[str]) -> Any:
        asked.extend(zip(hypotheses, references, strict=True))
        return np.array([len(a) / 10 + len(b) / 100 for a, b in asked])

    stack = ps_grpo(compare="exact", similarity=similarity, gamma=0)
    found = rewarded(stack, of(["x", "x", "yy", "", "zzz", "zzz"], [0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 1, 1]))
    assert sorted(asked) == [("x", "yy"), ("yy", "x"), ("zzz", "zzz")]
    assert found == pytest.approx([0.06, 0.06, 0.21, 0, 0.33, 0.33])


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda a, b: [0.5] * (len(a) + 1), "given 2 pairs of texts and returned 3 numbers"),
        (lambda a, b: [1.5] * len(a), r"1\.5 is not a finite number in \[0, 1\]"),
        (lambda a, b: [NAN] * len(a), "not a finite number"),
        (lambda a, b: None, "returned None"),
        (lambda a, b: ["much"] * len(a), "is not a number"),
    ],
)
def test_a_function_that_returns_nonsense_is_named(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(MethodError, match=text):
        rewarded(ps_grpo(similarity=function), of(["a", "b"], [0, 1], [0, 0]))


def test_what_is_logged() -> None:
    stack = ps_grpo(compare="exact", similarity="em", gamma=1)
    rollouts = of(["a", "a", "A", "b", "c", "a"], [0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 1, 2], [1, 0, 1, 0, 1, 0])
    rewarded(stack, rollouts)
    logged = combine([stack.metrics.take()])
    assert logged["ps_grpo/consistency"] == pytest.approx((0.5 + 0.5 + 1 + 0) / 4)
    assert logged["ps_grpo/accuracy"] == 0.5 and logged["ps_grpo/alone"] == pytest.approx(1 / 3)
    assert logged["ps_grpo/distinct_answers"] == pytest.approx(2 / 3) and logged["ps_grpo/collapsed"] == 0
    rewarded(stack, of(["yes", "yes", "Yes", "no", "yes"], [0, 0, 1, 1, 2], [0, 0, 0, 0, 1]))
    logged = combine([stack.metrics.take()])
    assert logged["ps_grpo/distinct_answers"] == 0.5 and logged["ps_grpo/collapsed"] == 1


def test_a_batch_without_comparisons_trains_nothing(caplog: Any) -> None:
    assert rewarded(ps_grpo(), of(["a", "b", "c"], [0, 1, 2], [0, 1, None], [1, 2, NAN]))[:2] == [0, 0]
    assert "no rollout of a batch has another wording" in caplog.text


# ---- batches


def planned(stack: MethodStack, prompts: int, values: Sequence[Any], group_size: int = 4) -> list[PlanRow]:
    """The plan of the next batch; it is decided on, with texts that do not matter."""
    size = len(values)
    proposal = [(stack.batch * prompts + i) % size for i in range(prompts)]
    rows = first_plan(stack, proposal, group_size, prompts * group_size, size, dataset(values)).rows
    wording = [row.prompt_index for row in rows for _ in range(row.n)]
    one_step(stack, of(["a"] * len(wording), wording, [values[i] for i in wording], batch=stack.batch))
    return list(rows)


def groups_of(rows: Sequence[PlanRow], values: Sequence[Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for row in rows:
        found.setdefault(values[row.prompt_index], []).append(row.prompt_index)
    return found


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sets_stay_whole_and_come_once_an_epoch(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=9).filter(lambda x: max(x) > 1))
    values = data.draw(st.permutations([f"s{i}" for i, n in enumerate(sizes) for _ in range(n)]))
    prompts = data.draw(st.integers(max(sizes), len(values)))
    stack = ps_grpo(values, rows=4 * prompts)
    seen = Counter[str]()
    for _ in range(8):
        rows = planned(stack, prompts, values)
        found = groups_of(rows, values)
        for name, members in found.items():
            assert sorted(members) == [i for i, v in enumerate(values) if v == name], "a set was torn apart"
        assert max(sizes) > prompts - len(rows) or len(rows) == len(values)
        seen.update(list(found))
        times = [seen[f"s{i}"] for i in range(len(sizes))]
        assert max(times) - min(times) <= 1, "a set came again before another came"


def test_sets_that_divide_the_batch_fill_it_in_a_new_order_every_epoch() -> None:
    values = [i % 8 for i in range(24)]
    stack = ps_grpo(values, rows=4 * 6)
    orders = []
    for _ in range(3):
        order: list[int] = []
        for _ in range(4):
            rows = planned(stack, 6, values)
            assert len(rows) == 6 and combine([stack.metrics.take()])["ps_grpo/empty_places"] == 0
            order += groups_of(rows, values)
        assert sorted(order) == list(range(8))
        orders.append(order)
    assert orders[0] != orders[1] != orders[2] and orders[0] != list(range(8))
    again = ps_grpo(values, seed=1, rows=4 * 6)
    assert list(groups_of(planned(again, 6, values), values)) != orders[0][:2], "the order is that of the seed"


def test_places_that_no_set_fits_into_stay_empty() -> None:
    values = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    stack = ps_grpo(values, rows=20)
    assert [len(planned(stack, 5, values)) for _ in range(3)] == [3, 3, 3]
    assert combine([stack.metrics.take()])["ps_grpo/empty_places"] > 0


def test_a_later_set_fills_the_rest_and_the_one_before_comes_next() -> None:
    values = [0] * 3 + [1] * 3 + [2] * 1 + [3] * 1
    stack = ps_grpo(values, rows=16)
    stack.methods[0].state["order"] = torch.tensor([0, 1, 2, 3])
    assert [list(groups_of(planned(stack, 4, values), values)) for _ in range(2)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_resume_in_the_middle_of_an_epoch(at: int, tmp_path: Path) -> None:
    values = [i // 2 for i in range(20)]
    stack = ps_grpo(values, rows=24)
    for _ in range(at):
        planned(stack, 6, values)
    save_state(tmp_path, stack.state_dict("d"))
    other = ps_grpo(values, rows=24)
    other.load_state_dict(load_state(tmp_path) or {}, "d")
    for _ in range(6):
        assert planned(stack, 6, values) == planned(other, 6, values)


def test_what_does_not_fit_the_run() -> None:
    message = "the largest set has 3 wordings, and a batch has 2 prompts"
    with pytest.raises(ConfigError, match=message):
        ps_grpo(rows=8)
    stack = ps_grpo()  # the run does not say how large a batch is
    with pytest.raises(MethodError, match=message):
        first_plan(stack, [0, 1], 4, 8, 6, dataset([0, 0, 0, 1, 1, 1]))
    with pytest.raises(
        ConfigError, match="no two rows of the dataset have the same value in the column `paraphrase_set"
    ):
        ps_grpo([0, 1, 2])
    with pytest.raises(ConfigError, match="row 1 of the dataset has no value in the column"):
        ps_grpo([0, None, 0])
    with pytest.raises(ConfigError, match="they are not on this machine"):
        PsGrpo().start(make_run(dataset=None))
    with pytest.raises(ConfigError, match="no column `paraphrase_set_id`"):
        PsGrpo().start(make_run(dataset=StoredDataset({"prompt": ["a", "b"]}), dataset_size=2))
    with pytest.raises(ConfigError, match="`alpha` and `gamma` are both 0"):
        PsGrpo.Params(alpha=0, gamma=0)
    with pytest.raises(ConfigError, match="`answer_column` has no effect"):
        PsGrpo.Params(gamma=0, answer_column="answer")
    with pytest.raises(ConfigError, match="`kappa` has no effect"):
        PsGrpo.Params(compare="exact", kappa=2)


def test_sets_of_one_wording_are_told(caplog: Any) -> None:
    ps_grpo([0, 0, 1])
    assert "1 of the 2 sets have one wording" in caplog.text


@pytest.mark.parametrize("value", [["a"], {"a": 1}])
def test_values_that_name_no_set_are_refused(value: Any) -> None:
    with pytest.raises(MethodError, match="must be a text or a number that names the set"):
        rewarded(ps_grpo(), of(["a", "b"], [0, 1], [value, 0]))


@pytest.mark.parametrize("value", [{"a": 1}, True, [["a"]]])
def test_answers_that_are_no_texts_are_refused(value: Any) -> None:
    with pytest.raises(MethodError, match="must be a text, a number, a list of these, or None"):
        rewarded(ps_grpo(answer_column="answer"), of(["a", "b"], [0, 1], [0, 0], meta={"answer": [value, "b"]}))
