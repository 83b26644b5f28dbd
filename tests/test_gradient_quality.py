"""Progress, direction, noise and break-even batches against closed forms, exact enumeration and plain loops."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.kit.masked import MaskedOptions
from rl_plugins.lab.quality import measure, page, session, summary
from rl_plugins.lab.quality.drive import Driver, QualityVariant, by_agent
from rl_plugins.lab.quality.variants import variants_of
from rl_plugins.lab.quality.worlds.chain import Chain
from rl_plugins.lab.quality.worlds.masked import masked
from rl_plugins.lab.quality.worlds.processes import agents, sequences, team
from rl_plugins.lab.quality.worlds.tables import better_of, first_flaw, table
from rl_plugins.tools.gradient_quality import AnswerTable, break_even, progress_at, quality, read_pool, write_pool
from rl_plugins.tools.gradient_quality.sketch import CountSketch, score_sketches

ROOT = Path(__file__).parents[1]


def tiny(prompts=3, answers=3, dims=4, seed=0):
    rng = np.random.default_rng(seed)
    prob = rng.dirichlet(np.ones(answers), prompts)
    score = rng.normal(size=(prompts, answers, dims))
    score -= np.einsum("pk,pkd->pd", prob, score)[:, None]
    right = np.arange(answers) == 0
    right = np.broadcast_to(right, prob.shape)
    return AnswerTable("tiny", prob, right[..., None].astype(float), right, score)


def estimates(driver, batches):
    made = [driver.batch() for _ in range(batches)]
    return np.stack([m.gradient for m in made]), np.array([m.generated for m in made], float)


# ---- the figures


@given(st.floats(0.05, 3), st.floats(0, 3), st.floats(0, math.pi), st.integers(0, 99))
def test_figures_of_gaussian_estimates_are_those_of_the_closed_form(size, spread, angle, seed):
    dims, n = 6, 400
    mean = np.zeros(dims)
    mean[:2] = size * math.cos(angle), size * math.sin(angle)
    made = mean + spread / math.sqrt(dims) * np.random.default_rng(seed).normal(size=(n, dims))
    found = quality(made, np.full(n, 64.0), {"x": 5 * np.eye(dims)[0]}, 64)
    progress, direction = found.progress["x"], found.direction["x"]
    assert -1 <= progress.value <= 1 and -1 <= direction.value <= 1
    want = math.cos(angle) * abs(math.cos(angle)) * size**2 / (size**2 + spread**2)
    assert progress.value == pytest.approx(want, abs=5 * progress.error + 0.02)
    if spread < size:
        assert direction.value == pytest.approx(math.cos(angle), abs=5 * direction.error + 0.1)
        assert found.noise.value == pytest.approx((spread / size) ** 2, abs=5 * found.noise.error + 0.01)


def test_estimates_that_cost_twice_the_rollouts_are_brought_to_the_same_number():
    made = np.random.default_rng(0).normal(size=(500, 3)) + np.array([1.0, 0, 0])
    target = {"x": np.array([1.0, 0, 0])}
    equal, twice = (quality(made, np.full(500, cost), target, 64) for cost in (64.0, 128.0))
    assert twice.noise.value == pytest.approx(2 * equal.noise.value)
    assert twice.direction["x"].value == pytest.approx(equal.direction["x"].value)
    assert twice.progress["x"].value == pytest.approx(1 / (1 + 6), abs=0.03)


def test_the_error_is_the_spread_over_repetitions():
    rng, target = np.random.default_rng(0), {"x": np.array([1.0, 0, 0])}
    found = [
        quality(rng.normal(size=(100, 3)) + np.array([0.7, 0.7, 0]), np.ones(100), target, 1).progress["x"]
        for _ in range(200)
    ]
    spread = np.std([f.value for f in found])
    assert np.mean([f.error for f in found]) == pytest.approx(spread, rel=0.25)


@given(st.floats(-1, 1), st.floats(0.01, 100), st.floats(-1, 1), st.floats(0.01, 100))
def test_break_even_is_where_the_curves_cross(d, noise, e, other):
    low, high = break_even(d, noise, e, other, 64)
    for at in (1, 10, 100, 1_000, 10_000, 100_000):
        ahead = progress_at(d, noise, 64, at) - progress_at(e, other, 64, at)
        if abs(ahead) > 1e-9 and not any(abs(at - edge) < 1e-6 * at for edge in (low, high)):
            assert (ahead > 0) == (low < at < high)


# ---- real classes in a world whose expectations are enumerated


def test_noise_and_direction_equal_those_over_all_batches_of_a_tiny_world():
    """One prompt a batch, two rollouts: 3 x 9 batches with known probabilities, against a plain loop in float64."""
    world = tiny()
    driver = Driver(world, QualityVariant("none", group=2, scale="none"), 2, 0)
    chances, made, mean, square = [], [], np.zeros(4), 0.0
    for p, *pair in itertools.product(range(3), repeat=3):
        world.draw = lambda *_, p=p, pair=pair: world.answers(np.array([p, p]), np.array(pair))
        made.append(driver.batch().gradient)
        chances.append(world.prob[p, pair[0]] * world.prob[p, pair[1]] / 3)
        reward = world.rewards[p, pair, 0]
        want = sum((reward[i] - reward.mean()) * world.score[p, a] / 2 for i, a in enumerate(pair))
        np.testing.assert_allclose(made[-1], want, atol=1e-15)
        mean, square = mean + chances[-1] * want, square + chances[-1] * want @ want
    # Without the deviation GRPO is (1 - 1/G) times the exact gradient.
    np.testing.assert_allclose(mean, world.targets["reward"] / 2)
    drawn = np.random.default_rng(0).choice(27, 20_000, p=chances)
    found = quality(np.stack(made)[drawn], np.full(len(drawn), 2.0), world.targets, 2)
    assert found.noise.value == pytest.approx((square - mean @ mean) / (mean @ mean), abs=4 * found.noise.error)
    for name, target in world.targets.items():
        cosine = mean @ target / np.linalg.norm(mean) / np.linalg.norm(target)
        assert found.direction[name].value == pytest.approx(cosine, abs=4 * found.direction[name].error + 1e-3)
        best = np.sign(cosine) * (mean @ target) ** 2 / (target @ target) / square
        assert found.progress[name].value == pytest.approx(best, abs=4 * found.progress[name].error)


def test_a_batch_is_the_sum_of_advantages_times_scores():
    world = tiny(prompts=6)
    driver = Driver(world, QualityVariant("grpo", group=4), 24, 3)
    seen = []
    draw = world.draw
    world.draw = lambda *args: seen.append(draw(*args)) or seen[-1]
    made = driver.batch()
    answers, total = seen[0], np.zeros(4)
    for group in range(6):
        rows = range(4 * group, 4 * group + 4)
        reward = [answers.rewards[i, 0] for i in rows]
        mean = sum(reward) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in reward) / 3)
        for i, r in zip(rows, reward, strict=True):
            total += (r - mean) / (std + 1e-4) / 24 * world.scores[answers.piece[i, 0]]
    np.testing.assert_allclose(made.gradient, total, rtol=1e-12)
    assert made.signal >= 8 and made.generated == made.tokens == 24


@pytest.mark.parametrize("make", [sequences, agents])
def test_exact_gradients_of_a_process_are_differences_of_its_value(make):
    world = make(0, prompts=8, dims=5)
    step = 1e-4
    for way in np.eye(5):
        value = [Chain(**{**vars_of(world), "thetas": world.thetas + s * way}).pass_rate for s in (step, -step)]
        slope = (value[0] - value[1]) / (2 * step)
        assert world.targets["pass@1"] @ way == pytest.approx(slope.mean(), abs=1e-6)
        miss = [(1 - v) ** 8 for v in value]
        assert world.targets["pass@8"] @ way == pytest.approx((miss[1] - miss[0]).mean() / (2 * step), abs=1e-5)


def vars_of(world):
    return {name: getattr(world, name) for name in Chain.__dataclass_fields__}


@pytest.mark.parametrize("make", [sequences, agents])
def test_rollouts_of_a_process_have_its_pass_rate_and_its_probabilities(make):
    world = make(1, prompts=3, dims=5)
    prompt = np.repeat(np.arange(3), 4000)
    made = world.draw(prompt, prompt, np.random.default_rng(0))
    rate = made.rewards[:, 0].reshape(3, -1).mean(1)
    np.testing.assert_allclose(rate, world.pass_rate, atol=0.03)
    np.testing.assert_array_equal(made.length, made.mask.sum(1))
    np.testing.assert_array_equal(made.logprobs, made.sampled)
    # The mean score is 0, and rewards times scores have the exact gradient as their mean.
    row = (world.scores[made.piece] * made.mask[..., None]).sum(1)
    assert np.abs(row.mean(0)).max() < 0.05
    found = (made.rewards * row).mean(0)
    assert np.abs(found - world.targets["reward"]).max() < 0.05


def test_old_rollouts_weighted_by_exact_ratios_have_the_exact_gradient_as_their_mean():
    world = sequences(0, updates=3, prompts=16, dims=6)
    prompt = np.repeat(np.arange(16), 3000)
    made = world.draw(prompt, prompt, np.random.default_rng(0))
    ratio = np.exp(((made.logprobs - made.sampled) * made.mask).sum(1))
    assert ratio.mean() == pytest.approx(1, abs=0.02) and ratio.std() > 0.05
    row = (world.scores[made.piece] * made.mask[..., None]).sum(1)
    found = (made.rewards * ratio[:, None] * row).mean(0)
    assert np.abs(found - world.targets["reward"]).max() < 0.03
    assert (made.age == 3).all()


def test_a_program_makes_rollouts_of_the_worlds_own_distribution():
    world = sequences(2, prompts=3, dims=5)
    driver = Driver(world, QualityVariant("branch", {"branch_text_rollout": {"places": [0, 1, 2]}}), 24, 0)
    rows, made, notes = driver.player.play([PlanRow(i % 3, i, 8) for i in range(240)])
    assert [r.group for r in rows] == np.repeat(np.arange(240), 8).tolist()
    prompt = np.array([r.prompt_index for r in rows])
    rate = [made.rewards[prompt == p].mean() for p in range(3)]
    np.testing.assert_allclose(rate, world.pass_rate, atol=0.09)  # eight rollouts share their beginnings
    row = (world.scores[made.piece] * made.mask[..., None]).sum(1)
    found = (made.rewards * row).mean(0)
    assert np.abs(found - world.targets["reward"]).max() < 0.1
    assert len(notes["branches"]) == len(rows) and not made.forced.any()


def test_forced_tokens_are_told_and_have_no_sampling_probability():
    world = sequences(2, prompts=6, dims=5)
    (variant,) = (v for v in variants_of("sequences", world, 32) if v.label == "adhint")
    driver = Driver(world, variant, 32, 0)
    _, made, _ = driver.player.play([PlanRow(i, i, 8) for i in range(6)])
    assert made.forced.any() and (np.isnan(made.sampled) == made.forced).all()
    assert not (made.forced & ~made.mask).any()
    for i in made.forced.any(1).nonzero()[0]:  # the hint is the beginning of the reference
        hint = made.forced[i].sum()
        text, reference = world.texts(np.array([0]), take(made, [i]))[0], world.columns["reference"][i // 8]
        assert made.forced[i, :hint].all() and text[:hint] == reference[:hint]


def test_rows_of_agents_share_the_tokens_of_a_rollout():
    world = team(0, prompts=6, dims=5)
    prompt = np.arange(6).repeat(8)
    whole = world.draw(prompt, prompt, np.random.default_rng(0))
    planned, made, notes = by_agent([PlanRow(p, p, 8) for p in prompt.tolist()], whole)
    of = (made.index == 0).cumsum() - 1  # the rollout of each row
    assert [r.prompt_index for r in planned] == prompt[of].tolist()
    total = np.zeros(whole.mask.shape, int)
    np.add.at(total, of, made.mask)
    np.testing.assert_array_equal(total, whole.mask)  # each token is in exactly one row
    state = whole.piece // 3 % 5
    for row in range(len(of)):
        places = state[of[row]][made.mask[row]]
        at = made.mask[row].nonzero()[0]
        if notes["agent"][row] == "main":
            assert made.index[row] == 0 and set(places) <= {0, 2, 4}
            assert made.rewards[row, 0] == whole.rewards[of[row], 0]
        else:
            assert set(places) <= {1, 3} and (np.diff(at) == 1).all() and made.rewards[row, 0] == 1
    assert (made.length == made.mask.sum(1)).all() and (made.index > 0).any()


def take(answers, rows):
    return dataclasses.replace(answers, piece=answers.piece[rows], length=answers.length[rows])


def test_rows_of_a_pool_are_weighted_by_tokens_and_refuse_methods_that_read_tokens(tmp_path):
    rng = np.random.default_rng(0)
    score, rewards = rng.normal(size=(4, 6, 5)), rng.integers(2, size=(4, 6, 1)).astype(float)
    length = rng.integers(1, 9, size=(4, 6))
    write_pool(tmp_path / "pool.npz", score, rewards, rewards[..., 0] > 0, length)
    world = read_pool(tmp_path / "pool.npz")
    np.testing.assert_allclose(world.score.sum(1), 0, atol=1e-5)
    driver, seen = Driver(world, QualityVariant("none", group=4, scale="none"), 8, 0), []
    draw = world.draw
    world.draw = lambda *args: seen.append(draw(*args)) or seen[-1]
    made = driver.batch()
    (answers,) = seen
    reward = answers.rewards[:, 0].reshape(2, 4)
    advantage = (reward - reward.mean(1, keepdims=True)).ravel()
    want = (advantage / answers.length.sum()) @ world.scores[answers.piece[:, 0]]
    np.testing.assert_allclose(made.gradient, want, rtol=1e-6)
    assert made.tokens == answers.length.sum()
    with raises(ConfigError, "reads tokens"):
        Driver(world, QualityVariant("d3s", {"d3s": {}}, group=4), 8, 0)


@pytest.mark.parametrize("how", [{}, {"unmasking": "ascending"}, {"end_confidence_start": 0.01}])
def test_exact_values_of_masked_answers_are_those_of_real_decoding(how):
    world = dataclasses.replace(masked(0, prompts=4, dims=3), options=MaskedOptions(**how))
    prompt = np.repeat(np.arange(4), 4000)
    made = world.draw(prompt, prompt, np.random.default_rng(0))
    rate = made.rewards[:, 0].reshape(4, -1).mean(1)
    np.testing.assert_allclose(rate, world.pass_rate, atol=0.03)
    step = 1e-6
    for way in np.eye(3):
        ends = [dataclasses.replace(world, offset=world.offset + s * world.features @ way) for s in (step, -step)]
        slope = (ends[0].pass_rate - ends[1].pass_rate) / (2 * step)
        assert world.targets["pass@1"] @ way == pytest.approx(slope.mean(), abs=1e-6)


def test_masked_log_probs_are_taken_in_one_state_or_in_those_of_decoding():
    world = masked(1, prompts=16, dims=6)
    for how, first in (({}, 4), ({"logprobs_from": "trajectory", "step_weight": "equal"}, 2)):
        of = dataclasses.replace(world, options=MaskedOptions(**how))
        made = of.draw(np.arange(16).repeat(40), np.arange(16), np.random.default_rng(0))
        hidden = made.piece // 12 % 256 == 255  # the state of masks alone
        assert (hidden.sum(1) == first).all()  # all places, or the two of the first step


def test_a_parquet_pool_has_the_rollouts_that_have_scores(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": p, "completion_ids": [1] * (1 + r), "brief": float(r), "correct": float(p), "solved": float(r == 1)}
        for p in range(2)
        for r in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts-4.parquet")
    pq.write_table(pa.Table.from_pylist([{"task": "sums"}, {"task": "products"}]), tmp_path / "prompts.parquet")
    with raises(ConfigError, "is missing"):
        read_pool(tmp_path / "rollouts-4.parquet")
    np.save(tmp_path / "scores-4.npy", rng.normal(size=(2, 2, 5)).astype(np.float16))
    world = read_pool(tmp_path / "rollouts-4.parquet")
    assert world.reward_names == ("brief", "correct") and world.columns["domain"] == ["sums", "products"]
    np.testing.assert_array_equal(world.rewards, [[[0, 0], [1, 0]], [[0, 1], [1, 1]]])
    np.testing.assert_array_equal(world.length, [[1, 2], [1, 2]])
    np.testing.assert_array_equal(world.right, [[False, True]] * 2)


class Bigram(torch.nn.Module):
    """Logits of the next token by the last one, for sketches of its score functions."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids, **of_transformers):
        return types.SimpleNamespace(logits=self.table[ids])


def test_score_sketches_are_sketches_of_the_gradients_of_log_probs():
    model = Bigram()
    prompts, completions = [[0, 1], [0, 1], [2], [0, 1]], [[3, 4], [2], [1, 1, 1], [3, 4]]
    found = score_sketches(model, prompts, completions, 16, seed=3)
    torch.testing.assert_close(score_sketches(model, prompts, completions, 16, seed=3, batch=4), found)  # one by one
    sketch = CountSketch(28, 16, seed=3)
    prob = model.table.detach().softmax(-1)
    for row, prompt, completion in zip(found, prompts, completions, strict=True):
        gradient = torch.zeros(5, 5)
        for before, token in itertools.pairwise([prompt[-1], *completion]):
            gradient[before] += torch.eye(5)[token] - prob[before]
        torch.testing.assert_close(row, sketch(torch.cat([gradient.reshape(-1), torch.zeros(3)])))
    assert model.table.grad is None and not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[3])


def test_sketches_keep_inner_products_within_their_stated_error():
    stream = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 400, generator=stream)
    b = b + 0.5 * a
    exact = float(a @ b)
    found = torch.stack([CountSketch(400, 64, seed=i)(a) @ CountSketch(400, 64, seed=i)(b) for i in range(400)])
    error = float(found.std())
    assert float(found.mean()) == pytest.approx(exact, abs=4 * error / 20)
    assert error < math.sqrt(2 / 64) * float(a.norm() * b.norm())


# ---- what papers say, where it is arithmetic


def test_an_exact_baseline_has_less_noise_than_a_group_of_the_same_rollouts():
    world = table("binary", 0, prompts=256)
    exact = dict(prior="column", prior_column="prior", cost=math.inf)
    found = {}
    for name, variant in {
        "grpo": QualityVariant("grpo", group=4, scale="none"),
        "v0_5": QualityVariant("v0_5", {"v0_5": exact}, group=4, scale="none"),
    }.items():
        found[name] = quality(*estimates(Driver(world, variant, 64, 0), 40), world.targets, 64)
    assert found["v0_5"].progress["pass@1"].value > 1.1 * found["grpo"].progress["pass@1"].value


def test_the_clip_acts_on_old_rollouts_only():
    fresh, old = (sequences(0, updates=n, prompts=64, dims=8) for n in (0, 6))
    for world, equal in ((fresh, True), (old, False)):
        clipped, free = (
            estimates(Driver(world, variant, 64, 0), 2)[0]
            for variant in (QualityVariant("grpo"), QualityVariant("no ratio", old="trained"))
        )
        assert np.allclose(clipped, free) == equal


def test_targets_of_judged_answers_come_apart():
    """A step along the judge's score is not one along what is right, and that not one along what is sound."""
    targets = table("judged", 0, prompts=256).targets
    cosine = {
        (a, b): targets[a] @ targets[b] / np.linalg.norm(targets[a]) / np.linalg.norm(targets[b])
        for a, b in itertools.combinations(("reward", "pass@1", "sound"), 2)
    }
    assert 0 < cosine["reward", "sound"] < cosine["reward", "pass@1"] < 0.95
    assert better_of("question 1", "answer 1", "answer 9 marked") == (1.0, 0.5)
    assert better_of("question 4", "answer 1", "answer 9 marked") == (1.0, 2.0)
    assert [first_flaw(f"question {i}", "", "answer 1 flawed") for i in (1, 10)] == [0, -1]


def test_the_noise_left_in_a_mean_of_batches_is_no_signal() -> None:
    """|mean|^2 of 40 batches has a 40th of the noise in it: without the correction this noise of 10 would be told as 8,
    and the direction of an estimate without bias as .89."""
    rng, dims = np.random.default_rng(0), 50
    g = np.eye(dims)[0]
    batches = g + rng.normal(size=(200, 40, dims)) * math.sqrt(10 / dims)
    found = [quality(of, np.full(40, 64.0), {"g": g}, 64) for of in batches]
    assert float(np.median([q.noise.value for q in found])) == pytest.approx(10, rel=0.05)
    assert float(np.median([q.direction["g"].value for q in found])) == pytest.approx(1, abs=0.03)


def test_publishing_keeps_the_records_that_are_there(tmp_path, monkeypatch):
    """An empty folder of results, or one of another world, replaces nothing."""
    (tmp_path / "rl_plugins/lab/quality").mkdir(parents=True)
    (tmp_path / "rl_plugins" / summary.SUMMARY).parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(page, "draw", lambda told, folder: None)
    known = measure.read(ROOT / session.RAW)
    seeds = [{key: record for key, record in known.items() if record["seed"] == seed} for seed in (0, 1)]
    for records in (*seeds, {}):
        session.publish(records, tmp_path)
    assert measure.read(tmp_path / session.RAW) == seeds[0] | seeds[1] and all(seeds)
