"""DOTS (arXiv 2506.05316): the authors' numbers, the draw, and cycles of references and chosen prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.commands.train_adapter import read_rates
from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow, PromptPool
from rl_plugins.methods.dots import Dots, load_adapter, save_adapter, save_embeddings, train_adapter
from rl_plugins.methods.dots.files import load_embeddings
from rl_plugins.methods.dots.predictor import (
    CHUNK,
    Adapter,
    Predictor,
    attention,
    calibrated,
    draw,
    fitted,
    selection_logits,
    spread,
)
from rl_plugins.methods.rollout_replay import RolloutReplay
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.report import plan_lines
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack
from rl_plugins.testing.data import make_token_ids

GOLDEN = Golden("dots_rr", "predicted_pass_rate", "query", "pred_on_ref")  # the loss is that of `decoupled_ppo`
D, SIZE, GROUPS = 40, 3, 4


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(plain(values), dtype=torch.float64)


@GOLDEN.kind("predicted_pass_rate")
def check_probabilities(case: Case) -> None:
    logits = selection_logits(tensor(case.inputs["predicted_pass_rate"]), case.params["alpha"], case.params["tau"])
    assert torch.softmax(logits, 0).tolist() == pytest.approx(plain(case.expected["probs"]), rel=1e-3, abs=1e-6)


@GOLDEN.kind("query")
def check_prediction(case: Case) -> None:
    case.params.must_be("adapter", "identity (projection + layernorm omitted)")
    case.params.must_be("scaling", "group_logit_temp")
    x, wanted = case.inputs, case.expected
    rates, told = tensor(x["ref_pass_rate"]), tensor(x["mlp_out"])
    weights = attention(tensor(x["query"]), tensor(x["ref"]), case.params["tau"])
    torch.testing.assert_close(weights, tensor(wanted["attention_weights"]), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights @ rates, tensor(wanted["base"]), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(calibrated(weights @ rates, told), tensor(wanted["calibrated"]), rtol=1e-5, atol=1e-6)
    assert spread(rates).tolist() == pytest.approx([wanted["ref_mean"], wanted["ref_std_unbiased"]], abs=1e-6)


@GOLDEN.kind("pred_on_ref")
def check_fit(case: Case) -> None:
    case.expected.must_be("note", "no clipping to [0,1] in the reference")
    slope, intercept = fitted(tensor(case.inputs["pred_on_ref"]), tensor(case.inputs["label_on_ref"]))
    assert (slope, intercept) == pytest.approx((case.expected["slope"], case.expected["intercept"]), abs=1e-6)
    out = slope * tensor(case.inputs["pred"]) + intercept
    torch.testing.assert_close(out, tensor(case.expected["out"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the prediction and the draw


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.2, 5), adapted=st.booleans())
def test_the_prediction_equals_the_loop(seed: int, temperature: float, adapted: bool) -> None:
    rng = np.random.default_rng(seed)
    e = rng.normal(size=(20, 5)).astype(np.float32)
    torch.manual_seed(seed)
    adapter = Adapter(5, 6) if adapted else None
    if adapter is not None:
        adapter.eval()
        with torch.no_grad():
            adapter.calibration[2].weight.normal_()  # type: ignore[operator, union-attr]
    refs = rng.permutation(20)[:6]
    rates = rng.integers(0, 5, 6) / 4
    found = Predictor(e, adapter, temperature).predict(torch.from_numpy(refs), torch.from_numpy(rates))
    x = torch.from_numpy(e)
    with torch.no_grad():
        z = (x if adapter is None else adapter.query(x)).double().tolist()
        r = (x if adapter is None else adapter.reference(x)).double().tolist()
        told = [0.0, 0.0]
        if adapter is not None:
            mean, std = float(np.mean(rates)), float(np.std(rates, ddof=1))
            told = adapter.calibration(torch.tensor([[mean, std]])).double()[0].tolist()
    base = []
    for zi in z:
        scores = [sum(a * b for a, b in zip(zi, r[k], strict=True)) / math.sqrt(len(zi)) / temperature for k in refs]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        base.append(sum(w * d for w, d in zip(weights, rates, strict=True)) / sum(weights))
    if adapter is not None:
        softplus = min(max(math.log1p(math.exp(told[0])), 0.01), 10)
        clipped = [min(max(b, 1e-4), 1 - 1e-4) for b in base]
        base = [1 / (1 + math.exp(-(math.log(b / (1 - b)) / softplus + math.tanh(told[1])))) for b in clipped]
    if len(set(rates)) > 1:
        slope, intercept = np.polyfit([base[k] for k in refs], rates, 1)
        assert found.tolist() == pytest.approx([slope * b + intercept for b in base], abs=2e-3)
    else:
        assert found.tolist() == pytest.approx([rates[0]] * 20, abs=1e-6)


def test_chunks_of_the_dataset_change_nothing(monkeypatch: Any) -> None:
    rng = np.random.default_rng(0)
    e = rng.normal(size=(50, 4)).astype(np.float16)
    refs, rates = torch.arange(0, 50, 5), torch.from_numpy(rng.random(10))
    adapter = Adapter(4, 8)
    whole = [Predictor(e, a).predict(refs, rates) for a in (None, adapter)]
    assert len(e) < CHUNK
    monkeypatch.setattr("rl_plugins.methods.dots.predictor.CHUNK", 7)
    parts = [Predictor(e, a).predict(refs, rates) for a in (None, adapter)]
    for one, two in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)  # float32 projections


def test_an_adapter_that_was_not_trained_calibrates_nothing() -> None:
    base = torch.tensor([0.1, 0.5, 0.8])
    torch.testing.assert_close(calibrated(base, Adapter(4, 8).calibration(torch.tensor([[0.3, 0.2]]))[0]), base)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), target=st.floats(0, 1))
def test_a_draw_without_temperature_takes_the_nearest(seed: int, n: int, target: float) -> None:
    predicted = torch.from_numpy(np.random.default_rng(seed).permutation(30) / 29)
    chosen = draw(selection_logits(predicted, target, 1e-9), n, np.random.default_rng(seed)).tolist()
    assert len(set(chosen)) == n
    distance = sorted(abs(p - target) for p in predicted.tolist())
    assert sorted(abs(float(predicted[i]) - target) for i in chosen) == pytest.approx(distance[:n])


def test_draws_have_the_probabilities_of_drawing_one_after_the_other() -> None:
    predicted = torch.tensor([0.5, 0.6, 0.9, 0.1])
    logits = selection_logits(predicted, 0.5, 0.2)
    p = torch.softmax(logits, 0).tolist()
    pairs = dict.fromkeys([(i, j) for i in range(4) for j in range(4) if i != j], 0)
    rng, n = np.random.default_rng(0), 20_000
    for _ in range(n):
        i, j = draw(logits, 2, rng).tolist()
        pairs[i, j] += 1
    for (i, j), count in pairs.items():
        wanted = p[i] * p[j] / (1 - p[i])
        assert abs(count / n - wanted) < 4.5 * math.sqrt(wanted * (1 - wanted) / n)


def test_where_probabilities_underflow_the_draw_is_still_by_distance() -> None:
    """At tau = 1e-3 all but three probabilities are exactly 0 in float64."""
    predicted = torch.tensor([0.5, 0.501, 0.502, *np.linspace(1.4, 3.4, 20)], dtype=torch.float64)
    logits = selection_logits(predicted, 0.5, 1e-3)
    assert int((torch.softmax(logits, 0) > 0).sum()) == 3
    chosen = draw(logits, 8, np.random.default_rng(0)).tolist()
    assert sorted(chosen) == list(range(8))


@pytest.mark.parametrize("predicted", [torch.full((8,), 0.3), torch.rand(8, generator=torch.manual_seed(0))])
def test_a_large_temperature_or_equal_predictions_are_uniform(predicted: torch.Tensor) -> None:
    rng, n = np.random.default_rng(1), 8000
    counts = np.zeros(8)
    for _ in range(n):
        counts[draw(selection_logits(predicted, 0.5, 1e9), 2, rng)] += 1
    assert np.abs(counts / n - 0.25).max() < 4.5 * math.sqrt(0.25 * 0.75 / n)


# ---- cycles


def latent(size: int = D) -> np.ndarray:
    """Embeddings that tell the pass rate: prompts of a skill lie together."""
    skill = np.arange(size) % 4
    return np.eye(4, dtype=np.float32)[skill] * 12


RATES = (0.0, 0.5, 0.9, 1.0)  # of the skills


def dots(**params: Any) -> Dots:
    values = {"embeddings": lambda data: latent(), "references": 8} | params
    return Dots(build_params(Dots.Params, values, "dots"))


class Host:
    """Plans, rounds and decisions of batches; rewards are right with the pass rate of the prompt's skill."""

    def __init__(self, *methods: Method, size: int = D, scale: float = 1.0) -> None:
        run = make_run(dataset_size=size, group_size=SIZE, reward_names=("reward_0",))
        self.stack, self.size, self.scale = start_stack(*methods, run=run), size, scale

    def batch(self) -> tuple[list[PlanRow], Any, dict[str, float]]:
        stack = self.stack
        rng = np.random.default_rng([3, stack.batch])
        proposal = rng.permutation(self.size)[:GROUPS].tolist()
        plan = first_plan(stack, proposal, SIZE, GROUPS * SIZE, self.size)
        books = Rounds(stack, plan.rows, SIZE, GROUPS * SIZE, self.size)
        while any(m.rounds for m in stack.methods):
            group, reward = self.rewards(books.rows)
            if not books.more(group, reward):
                break
        rows = books.rows
        group, reward = self.rewards(rows)
        each = [p for p in rows for _ in range(p.n + p.spare)]
        rollouts = make_rollouts(
            reward,
            group.tolist(),
            prompt_index=[p.prompt_index for p in each],
            payload=[p.payload for p in each],
            current_version=stack.batch,
            version=torch.tensor([0 if p.given else stack.batch for p in each]),
            batch=stack.batch,
        )
        rollouts = rollouts.replace(token_ids=make_token_ids(rollouts))
        decision = one_step(stack, rollouts, make_tokens(rollouts), budget=GROUPS * SIZE)
        return rows, decision, combine([stack.metrics.take()])

    def rewards(self, rows: list[PlanRow]) -> tuple[torch.Tensor, torch.Tensor]:
        group, reward = [], []
        for p in rows:
            rng = np.random.default_rng([self.stack.batch, p.group, p.prompt_index])
            for i in range(p.n + p.spare):
                group.append(p.group)
                right = float(rng.random() < RATES[p.prompt_index % 4])
                given = p.given[i].rewards if i < len(p.given) else None
                reward.append(given["reward_0"] if given else self.scale * right)
        return torch.tensor(group), torch.tensor(reward, dtype=torch.float64)


def trained(rows: list[PlanRow]) -> list[int]:
    return [p.prompt_index for p in rows if p.n > 0]


def references(rows: list[PlanRow]) -> list[PlanRow]:
    return [p for p in rows if p.n == 0]


def test_references_are_made_first_and_leave_and_the_batch_is_chosen_by_them() -> None:
    host = Host(dots())
    for batch in range(6):
        rows, decision, logged = host.batch()
        kept = decision.rollouts.kept
        assert int(kept.sum()) == int(decision.trained.sum()) == GROUPS * SIZE
        if batch % 2 == 0:
            known = references(rows)
            assert len({p.prompt_index for p in known}) == 8 and all(p.spare == SIZE for p in known)
            assert logged["dots/reference_rollouts"] == 8 * SIZE
            seen = {p.prompt_index % 4 for p in known}
            if 1 in seen:  # the skill of pass rate 0.5 was seen, so its prompts come
                near = [i % 4 == 1 for i in trained(rows)]
                assert sum(near) >= 3
        else:
            assert not references(rows) and logged["dots/reference_rollouts"] == 0
        assert len(set(trained(rows))) == GROUPS
    assert combine([host.stack.metrics.take()]) == {}


def test_a_prompt_comes_once_per_cycle_and_the_chosen_are_dealt_at_random() -> None:
    host = Host(dots(temperature=1e9, cycle=3))
    for _ in range(3):
        seen: list[int] = []
        for _ in range(3):
            seen += trained(host.batch()[0])
        assert len(set(seen)) == 3 * GROUPS


def test_previous_references_are_made_beside_the_last_batch_and_used_in_the_next_cycle() -> None:
    method = dots(reference="previous", temperature=1e-3)
    assert not method.rounds
    host = Host(method)
    first = host.batch()
    assert not references(first[0]) and "predicted" not in host.stack.methods[0].state
    rng = np.random.default_rng([3, 0])
    assert trained(first[0]) == rng.permutation(D)[:GROUPS].tolist()  # the host's own
    second = host.batch()
    assert len(references(second[0])) == 8 and second[2]["dots/reference_rollouts"] == 8 * SIZE
    predicted = host.stack.methods[0].state["predicted"]
    rows, decision, logged = host.batch()
    order = (predicted - 0.5).abs()
    worst = max(float(order[i]) for i in trained(rows))
    assert worst <= float(torch.sort(order).values[4 * GROUPS])  # near the target
    assert int(decision.rollouts.kept.sum()) == GROUPS * SIZE and not references(rows)


@pytest.mark.parametrize("replay_first", [True, False])
@pytest.mark.parametrize("reference", ["now", "previous"])
def test_beside_replay_only_the_fresh_share_is_chosen(replay_first: bool, reference: str) -> None:
    replay = RolloutReplay(RolloutReplay.Params(fresh_share=0.5))
    methods: list[Method] = [replay, dots(reference=reference)]
    host = Host(*(methods if replay_first else methods[::-1]))
    for batch in range(6):
        rows, decision, logged = host.batch()
        given = [p for p in rows if p.given]
        assert int(decision.rollouts.kept.sum()) == GROUPS * SIZE
        fresh = [p for p in rows if p.n and not p.given]
        assert len(fresh) + len(given) == GROUPS and (len(given) == 2) == (logged["rollout_replay/replayed"] == 0.5)
        assert len({p.group for p in rows}) == len(rows)
        if batch < 2:
            assert not given
    assert len(given) == 2


def test_a_cycle_draws_as_many_prompts_as_it_trains_fresh() -> None:
    """M = mu B sigma, not mu B: with half of the batch replayed the nearer half is drawn."""
    replay = RolloutReplay(RolloutReplay.Params(fresh_share=0.5))
    method = dots()
    host = Host(replay, method)
    for _ in range(4):
        host.batch()
    rows, _, _ = host.batch()  # first of a cycle
    assert sum(bool(p.given) for p in rows) == 2
    fresh = [p.prompt_index for p in rows if p.n and not p.given]
    assert len(fresh) == 2 and len(method.state["left"]) == 2  # mu * 2 drawn, 2 trained


def test_a_replayed_prompt_stays_among_those_the_cycle_deals() -> None:
    method = dots(cycle=3)
    stack = start_stack(method, run=make_run(dataset_size=D, group_size=SIZE, reward_names=("reward_0",)))
    method.state |= {"place": 1, "left": [5, 6, 7]}
    rollouts = make_rollouts(
        [1.0, 0.0] * 2, [0, 0, 1, 1], prompt_index=[5, 5, 6, 6], payload=[None, None, *[{"rollout_replay": (0, 0)}] * 2]
    )
    one_step(stack, rollouts, make_tokens(rollouts), budget=4)
    assert method.state["had"] == [5] and method.state["left"] == [6, 7]


def test_a_resumed_run_trains_the_same_prompts(tmp_path: Path) -> None:
    for reference in ("now", "previous"):
        whole = Host(dots(reference=reference, cycle=3))
        plans = [whole.batch()[0] for _ in range(8)]
        first, second = (Host(dots(reference=reference, cycle=3)) for _ in range(2))
        for _ in range(4):
            first.batch()
        save_state(tmp_path, first.stack.state_dict("data"))
        second.stack.load_state_dict(load_state(tmp_path) or {}, "data")
        assert [second.batch()[0] for _ in range(4)] == plans[4:]


def test_a_batch_that_asks_again_goes_on_with_the_draw() -> None:
    method = dots(reference="previous")
    host = Host(method)
    for _ in range(2):
        host.batch()
    first = host.stack.one("select_prompts", PromptPool(D, (), (), None, 2), GROUPS)
    more = host.stack.one("select_prompts", PromptPool(D, (), tuple(first), None, 2), 9)
    assert len(set(first) | set(more)) == GROUPS + 9


def test_where_the_cycle_has_dealt_its_prompts_others_come_before_those_it_had() -> None:
    """However well those it had are predicted: they come again only when nothing else is left."""
    method = dots(reference="previous", temperature=1e-3)
    host = Host(method)
    host.batch()
    had = list(range(0, D, 4))
    method.state |= {"predicted": torch.where(torch.arange(D) % 4 == 0, 0.5, 1.0).double(), "left": [], "had": had}
    method.state["place"] = 1
    others = D - len(had)
    chosen = host.stack.one("select_prompts", PromptPool(D, (), (), None, 1), others + 3)
    assert not set(chosen[:others]) & set(had) and set(chosen[others:]) <= set(had)


def test_references_without_rewards_are_left_out() -> None:
    class Some(Host):
        def rewards(self, rows: list[PlanRow]) -> tuple[torch.Tensor, torch.Tensor]:
            group, reward = super().rewards(rows)
            return group, torch.where(group % 2 == 0, math.nan, reward)

    method = dots(reference="previous", cycle=1)
    host = Some(method)
    _, _, logged = host.batch()
    assert "dots/reference_rate" in logged and torch.isfinite(method.state["predicted"]).all()


def test_what_is_logged() -> None:
    host = Host(dots(cycle=1))
    for _ in range(3):
        rows, decision, logged = host.batch()
    kept = decision.rollouts.subset(decision.rollouts.kept)
    mixed = [len(set(kept.reward[kept.group == g].tolist())) > 1 for g in kept.group.unique()]
    assert logged["dots/useful"] == pytest.approx(sum(mixed) / len(mixed))
    predicted = host.stack.methods[0].state["predicted"]
    assert logged["dots/predicted"] == pytest.approx(float(predicted[trained(rows)].mean()))
    known = [p.prompt_index for p in references(rows)]
    assert 0 <= logged["dots/reference_rate"] <= 1 and len(known) == 8


# ---- errors


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"embeddings": ""}, "`embeddings` is missing"),
        ({"references": 1}, "`references` is 1; it must be >= 2"),
        ({"references": 41}, "`references` is 41, and the dataset has 40 prompts"),
        ({"embeddings": "nowhere.npy"}, "there is no such file.*module:attribute"),
        ({"embeddings": lambda data: latent(39)}, r"shape \(39, 4\).*\(40, H\)"),
        ({"embeddings": lambda data: [[1, 2]] * 40}, "int64; floating-point numbers"),
        ({"embeddings": lambda data: 1 / 0}, "`embeddings` failed: ZeroDivisionError"),
        ({"adapter": "nowhere.safetensors"}, "adapter nowhere.safetensors cannot be read.*train-adapter"),
        ({"temperature": 0}, "`temperature` is 0"),
        ({"target": 1.5}, "`target` is 1.5"),
    ],
)
def test_what_does_not_fit_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, MethodError), match=message):
        Host(dots(**params))


def test_pass_rates_outside_of_0_and_1_are_refused() -> None:
    for reference in ("now", "previous"):
        host = Host(dots(reference=reference, cycle=1), scale=3.0)
        with pytest.raises(MethodError, match=r"is (3|2|1\.\d+); pass rates must be in \[0, 1\]"):
            for _ in range(3):
                host.batch()


def test_a_cycle_of_more_prompts_than_the_dataset_has_is_refused() -> None:
    with pytest.raises(MethodError, match="a cycle of 11 batches takes 44 prompts, and the dataset has 40"):
        Host(dots(cycle=11)).batch()


def test_embeddings_that_are_no_numbers_are_refused() -> None:
    broken = latent()
    broken[5] = math.nan
    with pytest.raises(MethodError, match="predicted pass rates are NaN"):
        Host(dots(embeddings=lambda data: broken)).batch()


# ---- files


@pytest.mark.parametrize("ending", ["npy", "safetensors"])
def test_files_of_embeddings(tmp_path: Path, ending: str, caplog: Any) -> None:
    path = tmp_path / f"e.{ending}"
    save_embeddings(path, latent(), "40 rows, abc")
    values, noted = load_embeddings(path)
    assert noted == "40 rows, abc" and np.array_equal(np.asarray(values), latent())
    run = make_run(dataset_size=D, fingerprint="40 rows, abc")
    start_stack(dots(embeddings=str(path)), run=run)
    assert not caplog.text
    with pytest.raises(MethodError, match=r"belong to another dataset \(fingerprint 40 rows, abc, this run's is other"):
        start_stack(dots(embeddings=str(path)), run=make_run(dataset_size=D, fingerprint="other"))
    host = Host(dots(embeddings=str(path)))
    assert host.batch()[0] == Host(dots()).batch()[0]


def test_embeddings_without_a_fingerprint_are_warned_of(tmp_path: Path, caplog: Any) -> None:
    np.save(tmp_path / "e.npy", latent())
    start_stack(dots(embeddings=str(tmp_path / "e.npy")), run=make_run(dataset_size=D, fingerprint="x"))
    assert "have no fingerprint" in caplog.text


def test_pickles_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(MethodError, match="cannot be read: ValueError"):
        start_stack(dots(embeddings=str(tmp_path / "e.npy")), run=make_run(dataset_size=D))
    with pytest.raises(ConfigError, match=r"must end in \.safetensors or \.npy"):
        save_embeddings(tmp_path / "e.pt", latent(), "")


def test_an_adapter_comes_back_as_it_was_and_must_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    adapter, path = Adapter(4, 8), tmp_path / "a.safetensors"
    save_adapter(path, adapter)
    back = load_adapter(path, 4)
    assert all(torch.equal(a, b) for a, b in zip(adapter.parameters(), back.parameters(), strict=True))
    with pytest.raises(ConfigError, match="for embeddings of 4 numbers, and those given have 5"):
        load_adapter(path, 5)
    with pytest.raises(ConfigError, match="cannot be read"):
        save_embeddings(tmp_path / "e.safetensors", latent(), "")
        load_adapter(tmp_path / "e.safetensors", 4)


# ---- the command


def questions(seed: int, size: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of which one direction of twelve, the shortest, tells the skill that a question asks for."""
    rng = np.random.default_rng(seed)
    e = rng.normal(size=(size, 12)).astype(np.float32)
    skill = 2 * e[:, 0]
    e[:, 1:] *= 3
    return e, skill


def correlation(adapter: Adapter | None, e: np.ndarray, rates: np.ndarray) -> float:
    refs = torch.arange(0, 60)
    predicted = Predictor(e, adapter).predict(refs, torch.from_numpy(rates[:60]))
    return float(np.corrcoef(predicted[60:].numpy(), rates[60:])[0, 1])


def test_the_command_trains_an_adapter_that_predicts_better(tmp_path: Path) -> None:
    e, skill = questions(0)
    save_embeddings(tmp_path / "e.safetensors", e, "")
    lines = ["row,pass_rate,model"]
    for model in range(4):
        rates = 1 / (1 + np.exp(-(skill + model - 1.5)))
        lines += [f"{i},{rate:.3f},m{model}" for i, rate in enumerate(rates)]
    (tmp_path / "rates.csv").write_text("\n".join(lines))
    args = [str(tmp_path / name) for name in ("e.safetensors", "rates.csv", "a.safetensors")]
    options = ["--epochs", "20", "--hidden", "32", "--references", "64"]
    result = CliRunner().invoke(app, ["train-adapter", *args, *options])
    assert result.exit_code == 0, result.output
    assert "2400 pass rates of 4 models, embeddings of 12 numbers, 20 epochs" in result.output
    other, its_skill = questions(1)
    rates = 1 / (1 + np.exp(-(its_skill + 0.3)))
    trained_one = load_adapter(tmp_path / "a.safetensors", 12)
    found, plain_one = correlation(trained_one, other, rates), correlation(None, other, rates)
    assert found > 0.55 and plain_one < 0.3
    again = CliRunner().invoke(app, ["train-adapter", *args, *options])
    assert again.exit_code == 2 and "exists already" in again.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"row": 600, "pass_rate": 0.5}, "line 5 has row 600 of 600"),
        ({"row": 9, "pass_rate": 1.5}, r"pass_rate 1.5, which must be in \[0, 1\]"),
        ({"row": 0, "pass_rate": 0.5}, "row 0 again"),
        ({"row": 9}, "KeyError: 'pass_rate'"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    save_embeddings(tmp_path / "e.npy", questions(0)[0], "")
    rows = [{"row": i, "pass_rate": 0.5} for i in range(4)] + [line]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    args = [str(tmp_path / name) for name in ("e.npy", "r.jsonl", "a.safetensors")]
    result = CliRunner().invoke(app, ["train-adapter", *args])
    assert result.exit_code == 2
    with pytest.raises(ConfigError, match=message):
        read_rates(tmp_path / "r.jsonl", 600)


def test_training_is_the_same_with_the_same_seed() -> None:
    e, skill = questions(0, 40)
    tables = {"m": (torch.arange(40), torch.from_numpy(1 / (1 + np.exp(-skill))))}
    one, two, three = (train_adapter(e, tables, epochs=2, hidden=8, seed=s)[1] for s in (0, 0, 1))
    assert one == two != three


def test_the_bundle() -> None:
    stack = build_stack(["dots_rr"], {"dots": {"embeddings": lambda data: latent(), "references": 8}})
    assert stack.names == ["rollout_replay", "dots", "decoupled_ppo"] and stack.methods[2].params.action == "none"
    assert any("off_policy" in m.brings for m in stack.methods) and stack.methods[2].corrects_sampling


def test_doctor_prints_what_the_references_cost() -> None:
    host = Host(dots())
    plan = first_plan(host.stack, list(range(GROUPS)), SIZE, GROUPS * SIZE, D)
    lines = dict(plan_lines(host.stack, plan, GROUPS * SIZE, "4"))
    assert lines["rollouts"] == "3 (at least 0 trained) per prompt in the first round"
    assert lines["rows generated"] == f"{8 * SIZE} in the first round"
    most = min(8, GROUPS) * SIZE
    assert lines["rows trained"] == f"0 to {most} of {GROUPS * SIZE} in the first round; later rounds may fill it"
