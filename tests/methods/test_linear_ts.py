"""Linear Thompson sampling over domains: the posterior, the weights, the shares, and all of it through the driver."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PromptPool, Rollouts
from rl_plugins.kit.columns import categories
from rl_plugins.methods.brorl import BroRL
from rl_plugins.methods.linear_ts import LinearTS, contest_weights, posterior, shares, thompson_draws
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("linear_ts")
NAN = math.nan


class Table:
    """A dataset with a column of domains."""

    column_names = ["prompt", "domain"]

    def __init__(self, domains: Any) -> None:
        self.domains = list(domains)

    def __len__(self) -> int:
        return len(self.domains)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.domains if key == "domain" else [str(i) for i in range(len(self))]
        return {"prompt": str(key), "domain": self.domains[key]}


DOMAINS = ["code", "logic", "math"]


@pytest.mark.parametrize(
    "values", [["b", "a", None, "b"], [3, 1, None, 3], [1.5, NAN, 2.0, 1.5], [True, False] * 2, [["a"]]]
)
def test_a_column_is_read_as_arrow_has_it_and_value_by_value_alike(values: list[Any]) -> None:
    data = datasets.Dataset.from_dict({"domain": values})
    for of in (data, data.select(range(len(values))[::-1]), list(data)):
        names, number = categories(of, "domain", len(values))
        assert [names[i] for i in number] == [str(row["domain"]) for row in of] and len(set(names)) == len(names)


def ts_stack(domains: Any = None, seed: int = 0, batches: int = 100, **params: Any) -> tuple[MethodStack, LinearTS]:
    """30 prompts of three domains in turn, if nothing else is said."""
    domains = [DOMAINS[i % 3] for i in range(30)] if domains is None else domains
    method = LinearTS(build_params(LinearTS.Params, {"column": "domain", **params}, "linear_ts"))
    run = make_run(dataset=Table(domains), dataset_size=len(domains), total_batches=batches)
    return start_stack(method, seed=seed, run=run), method


def choose(stack: MethodStack, n: int, taken: tuple[int, ...] = (), size: int = 30) -> list[int]:
    return list(stack.one("select_prompts", PromptPool(size, (), taken, None, stack.batch), n))


def observe(stack: MethodStack, rollouts: Rollouts, stats: Any = None) -> dict[str, float]:
    stack.stats = stats or {}
    one_step(stack, rollouts)
    return combine([stack.metrics.take()])


# ---- the posterior


@GOLDEN.kind("truth")
def check_posterior(case: Case) -> None:
    """Ours is the posterior; theirs, which changes P in place before it multiplies with it, is far from it."""
    x, r, truth = (torch.tensor(case.inputs[name], dtype=torch.float64) for name in ("x", "r", "truth"))
    assert x.shape == (len(r), len(truth)), "a reward for each context, and an entry of theta for each number of it"
    s2, variance, wanted = case.params["noise_var"], case.params["prior_var"], case.expected
    precision, mean = torch.eye(len(truth), dtype=torch.float64) / variance, torch.zeros_like(truth)
    theirs = mean.clone()
    for row, reward in zip(x, r.tolist(), strict=True):
        precision, mean = posterior(precision, mean, row, reward, s2)
        theirs = torch.linalg.solve(precision, precision @ theirs + reward * row / s2)
    for name in ("precision", "code_precision"):
        assert precision.numpy() == pytest.approx(np.array(wanted[name]), rel=1e-10, abs=1e-10), name
    assert mean.tolist() == pytest.approx(wanted["posterior_mean"], rel=1e-9, abs=1e-10)
    assert theirs.tolist() == pytest.approx(wanted["code_mean"], rel=1e-9, abs=1e-9)
    off = max(abs(a - b) for a, b in zip(wanted["code_mean"], wanted["posterior_mean"], strict=True))
    assert off > 1e3 * float((mean - torch.tensor(wanted["posterior_mean"])).abs().max())


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def batch_posterior(xs: Any, rs: Any, s2: float, variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Bayesian linear regression on all observations at once, by loops in float64."""
    d = len(xs[0])
    precision = [[(i == j) / variance + sum(x[i] * x[j] for x in xs) / s2 for j in range(d)] for i in range(d)]
    total = [sum(r * x[i] for x, r in zip(xs, rs, strict=True)) / s2 for i in range(d)]
    return np.array(precision), np.linalg.inv(np.array(precision)) @ np.array(total)


@settings(max_examples=40, deadline=None)
@given(
    data=st.lists(
        st.tuples(st.lists(st.floats(-2, 2), min_size=2, max_size=2), st.floats(-1, 1)), min_size=1, max_size=8
    ),
    s2=st.sampled_from([0.5, 0.1, 2.0]),
    variance=st.sampled_from([10.0, 0.5]),
)
def test_posterior_equals_the_regression_in_any_order(data, s2, variance):
    xs, rs = [x for x, _ in data], [r for _, r in data]
    for order in (data, data[::-1]):
        p, m = torch.eye(2, dtype=torch.float64) / variance, torch.zeros(2, dtype=torch.float64)
        for x, r in order:
            p, m = posterior(p, m, torch.tensor(x, dtype=torch.float64), r, s2)
            assert torch.equal(p, p.T) and bool((torch.linalg.eigvalsh(p) > 0).all())
        wanted_p, wanted_m = batch_posterior(xs, rs, s2, variance)
        assert p.numpy() == pytest.approx(wanted_p, abs=1e-9)
        assert m.numpy() == pytest.approx(wanted_m, abs=1e-8)


def test_published_update_diverges_and_this_one_does_not():
    """The numbers of the specification: 40 updates, truth (0.5, -0.2, 0.1), rewards with a deviation of 0.05."""
    rng, truth, s2 = np.random.RandomState(0), np.array([0.5, -0.2, 0.1]), 0.5
    p, m = torch.eye(3, dtype=torch.float64) / 10, torch.zeros(3, dtype=torch.float64)
    published, wrong = np.eye(3) / 10, np.zeros(3)
    for _ in range(40):
        x = rng.uniform(0, 1, 3)
        r = float(x @ truth + 0.05 * rng.normal())
        p, m = posterior(p, m, torch.from_numpy(x), r, s2)
        published += np.outer(x, x) / s2  # in place, before it is used below
        wrong = np.linalg.solve(published, published @ wrong + r * x / s2)
    assert m.tolist() == pytest.approx([0.52, -0.24, 0.13], abs=0.005)
    assert wrong.tolist() == pytest.approx([1.96, -1.56, 0.62], abs=0.005)


def test_one_constant_is_a_gaussian_bandit():
    p, m = torch.tensor([[0.1]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for r in (1.0, 0.0, 0.5):
        p, m = posterior(p, m, torch.ones(1, dtype=torch.float64), r, 0.5)
    assert float(p) == pytest.approx(0.1 + 3 / 0.5)
    assert float(m) == pytest.approx((1.5 / 0.5) / (0.1 + 3 / 0.5))


def test_draws_have_the_posteriors_mean_and_covariance():
    precision = torch.tensor([[[4.0, 1.0], [1.0, 2.0]], [[9.0, 0.0], [0.0, 0.25]]], dtype=torch.float64)
    mean = torch.tensor([[1.0, -2.0], [0.0, 3.0]], dtype=torch.float64)
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(40000, 2, 2)))
    theta = thompson_draws(precision, mean, noise)
    for a in range(2):
        assert theta[:, a].mean(0).tolist() == pytest.approx(mean[a].tolist(), abs=0.05)
        covariance = np.cov(theta[:, a].numpy().T)
        assert covariance == pytest.approx(torch.linalg.inv(precision[a]).numpy(), abs=0.06)


def test_the_state_follows_the_loop_over_batches():
    """Rewards of each arm in each batch, booked under the context of that batch; an arm without prompts keeps its."""
    stack, method = ts_stack(
        batches=10, context=("constant", "progress", "vcpo/grad"), noise_variance=0.3, prior_variance=2.0
    )
    rng, seen = np.random.default_rng(0), {a: ([], []) for a in range(3)}
    logged = 0.0
    for batch in range(6):
        prompts = rng.choice(30, 5, replace=False)
        rewards = rng.integers(0, 2, (5, 4)).astype(float)
        x = [1.0, batch / 10, logged]
        for arm in range(3):
            own = [row for prompt, row in zip(prompts, rewards, strict=True) if prompt % 3 == arm]
            if own:
                seen[arm][0].append(x)
                seen[arm][1].append(sum(row.max() > row.min() for row in own) / len(own))
        logged = rng.random()
        index = np.repeat(prompts, 4).tolist()
        observe(stack, make_rollouts(rewards.ravel(), prompt_index=index, batch=batch), {"vcpo/grad": logged})
    for arm in range(3):
        wanted_p, wanted_m = batch_posterior(*seen[arm], 0.3, 2.0)
        assert method.state["precision"][arm].numpy() == pytest.approx(wanted_p, abs=1e-9)
        assert method.state["mean"][arm].numpy() == pytest.approx(wanted_m, abs=1e-8)


def test_an_arm_without_prompts_keeps_its_prior():
    stack, method = ts_stack()
    logged = observe(stack, make_rollouts([1.0, 0.0, 0.0, 0.0], prompt_index=[1] * 4))
    assert method.state["mean"].flatten().tolist() == pytest.approx([0.0, 2 / 2.1, 0.0])
    assert method.state["precision"].flatten().tolist() == pytest.approx([0.1, 2.1, 0.1])
    assert method.state["last"] == [[], [1.0], []]
    assert logged["linear_ts/share/logic"] == 1.0 and logged["linear_ts/share/math"] == 0.0
    assert logged["linear_ts/reward/logic"] == 1.0 and "linear_ts/reward/math" not in logged
    assert logged["linear_ts/reward"] == 1.0 and logged["linear_ts/largest_share"] == 1.0


# ---- rewards of arms


def test_informative_share_of_groups():
    stack, method = ts_stack(rule="contest")
    rewards = [1.0, 1.0, 0.5, 0.5, NAN, 1.0, 0.0, 1.0, NAN, NAN, 0.0, 1.0]
    group = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    prompt = [0, 0, 3, 3, 6, 6, 9, 9, 1, 1, -1, -1]
    logged = observe(stack, make_rollouts(rewards, group, prompt_index=prompt))
    assert method.state["last"] == [
        [0.25],
        [],
        [],
    ]  # the group of one scored rollout teaches nothing, a foreign one none
    assert logged["linear_ts/share/code"] == pytest.approx(4 / 5)


def test_gain_of_mean_reward_counts_a_rollout_once():
    stack, method = ts_stack(rule="contest", reward="gain")
    observe(stack, make_rollouts([1.0, 0.0, 0.0, 0.0], prompt_index=[0, 0, 0, 0]))
    assert method.state["last"] == [[], [], []] and float(method.state["level"][0]) == 0.25
    several = make_rollouts(
        [1.0, 1.0, 1.0, 0.0, NAN],
        [0] * 5,
        prompt_index=[0] * 5,
        rollout=torch.tensor([0, 0, 0, 1, 2]),
        index=torch.tensor([0, 1, 2, 0, 0]),
    )
    observe(stack, several)
    assert method.state["last"] == [[0.25], [], []]
    observe(stack, make_rollouts([1.0], [0], prompt_index=[1]))
    observe(stack, make_rollouts([0.0], [0], prompt_index=[0]))
    assert method.state["last"] == [[0.25, -0.5], [], []]
    assert method.state["level"].tolist()[:2] == [0.0, 1.0] and math.isnan(method.state["level"][2])


def test_a_group_of_several_prompts_and_rows_that_left():
    stack, method = ts_stack(rule="contest")
    rollouts = make_rollouts([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], prompt_index=[0, 0, 1, 1])
    observe(stack, rollouts.replace(kept=torch.tensor([False, False, True, True])))
    assert method.state["last"] == [[1.0], [0.0], []]


# ---- the context


def test_context_of_values_that_nobody_logs_is_0_and_warned_of(caplog: pytest.LogCaptureFixture):
    stack, method = ts_stack(context=("constant", "vcpo/ess", "vcpo/rate"))
    rollouts = make_rollouts([1.0, 0.0], [0, 0], prompt_index=[0, 0])
    observe(stack, rollouts)  # nothing was updated yet
    assert not caplog.records
    later = rollouts.replace(batch=1)
    observe(stack, later)
    assert (
        "no method logs `vcpo/ess`, `vcpo/rate` in optimizer steps, so the context has 0 there. Logged are: none."
        in (caplog.text)
    )
    observe(stack, later, {"vcpo/rate": NAN, "other/x": 1.0})
    assert (
        "no method logs `vcpo/ess` in optimizer steps, so the context has 0 there. Logged are: other/x, vcpo/rate."
        in (caplog.text)
    )
    assert method._x(0).tolist() == [1.0, 0.0, 0.0]
    observe(stack, later, {"vcpo/rate": 3.0, "vcpo/ess": 2.0})
    observe(stack, later, {"vcpo/rate": math.inf, "vcpo/ess": 1.0})
    assert method._x(0).tolist() == [1.0, 1.0, 3.0]


def test_context_of_the_last_batch():
    stack, method = ts_stack(context=("reward", "informative", "length", "truncated"))
    assert method._x(0).tolist() == [0.0] * 4
    rewards, truncated = [1.0, 0.0, NAN, 0.8, 0.8, 0.8], torch.tensor([True, False, False, False, False, False])
    rollouts = make_rollouts(rewards, [0, 0, 0, 1, 1, 1], lengths=[1, 2, 3, 4, 5, 6], truncated=truncated)
    observe(stack, rollouts.replace(rollout=torch.tensor([0, 1, 2, 0, 1, 1]), index=torch.tensor([0, 0, 0, 0, 0, 1])))
    wanted = [(1.0 + 0.0 + 0.8 + 0.8) / 4, 0.5, 3.5 / 12, 1 / 6]
    assert method._x(0).tolist() == pytest.approx(wanted)
    observe(stack, make_rollouts([1.0], [0], prompt_index=[-1], lengths=[6]))
    assert method._x(0).tolist() == pytest.approx([1.0, 0.5, 0.5, 0.0])  # no group of the dataset, so as before


def test_progress_ends_at_1():
    _, method = ts_stack(context=("progress",), batches=4)
    assert [float(method._x(b)) for b in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]


# ---- the choice


def set_means(method: LinearTS, means: list[float], precision: float) -> None:
    method.state["mean"] = torch.tensor(means, dtype=torch.float64)[:, None]
    method.state["precision"] = torch.full((3, 1, 1), precision, dtype=torch.float64)


def test_one_draw_takes_one_arm_and_many_draws_a_mix():
    stack, method = ts_stack()
    set_means(method, [0.0, 1.0, 0.0], 1e8)
    assert {i % 3 for i in choose(stack, 8)} == {1}
    stack, method = ts_stack(draws=4000)
    set_means(method, [0.0, 0.0, -9.0], 1.0)
    count = np.bincount(np.array(choose(stack, 10)) % 3, minlength=3)
    assert count.tolist() == [5, 5, 0]


def test_draws_are_those_of_the_posterior_under_the_context():
    stack, method = ts_stack(context=("constant", "progress"), batches=10, draws=3, seed=4)
    stack.batch = 5
    rng = np.random.default_rng(1)
    method.state["mean"] = torch.from_numpy(rng.normal(size=(3, 2)))
    noise = stack.rng("linear_ts", "theta").normal(size=(3, 3, 2))
    theta = method.state["mean"].numpy() + noise * math.sqrt(10)
    best = (theta @ [1.0, 0.5]).argmax(1)
    assert method._weights(5).tolist() == [float(np.mean(best == a)) for a in range(3)]
    count = np.bincount(np.array(choose(stack, 9)) % 3, minlength=3)
    assert count.tolist() == [3 * int(np.sum(best == a)) for a in range(3)]


def test_an_arm_gives_all_it_has_and_the_others_the_rest():
    stack, method = ts_stack(["a"] * 2 + ["b"] * 20 + ["c"] * 8)
    set_means(method, [1.0, 0.0, 0.0], 1e8)
    chosen = choose(stack, 12)
    assert len(set(chosen)) == 12 and {0, 1} <= set(chosen)
    assert sorted(choose(stack, 30)) == list(range(30))
    assert not {0, 5} & set(choose(stack, 28, taken=(0, 5)))


def test_prompts_of_an_arm_come_once_before_one_comes_again():
    stack, method = ts_stack()
    set_means(method, [1.0, 0.0, 0.0], 1e8)
    epochs = []
    for _ in range(2):
        epoch = []
        for _ in range(5):
            epoch += choose(stack, 2)
            stack.batch += 1
        assert sorted(epoch) == list(range(0, 30, 3))
        epochs.append(epoch)
    assert epochs[0] != epochs[1]
    # across the end of the order no prompt comes twice in a batch
    choose(stack, 7)
    stack.batch += 1
    assert len(set(choose(stack, 9))) == 9


def test_prompts_of_arms_are_mixed():
    stack, _ = ts_stack(rule="contest")
    arms = [i % 3 for i in choose(stack, 30)]
    assert arms != sorted(arms) and sorted(arms) == [0] * 10 + [1] * 10 + [2] * 10


def test_same_seed_same_choice():
    a, b, c = (ts_stack(seed=s)[0] for s in (1, 1, 2))
    first = [choose(a, 6) for _ in range(3)]
    assert first == [choose(b, 6) for _ in range(3)]
    assert first != [choose(c, 6) for _ in range(3)]


# ---- contest


def test_contest_weights_by_hand():
    last = [[0.6, 0.8], [0.1, 0.1], [0.4, 0.4], []]
    mean = (0.6 + 0.8 + 0.1 + 0.1 + 0.4 + 0.4) / 6
    score = [(0.7 - mean) / 0.1, (0.1 - mean) / 0.01, 0.0, 0.0]
    assert score[1] < 0 < score[0]
    found = contest_weights(last, 0.01, 0.2)
    assert found.tolist() == pytest.approx([0.8 + 0.05, 0.05, 0.05, 0.05])
    found = contest_weights([[0.6, 0.8], [0.5], [0.0]], 0.01, 0.0)
    mean = (0.6 + 0.8 + 0.5) / 4
    score = [(0.7 - mean) / 0.1, (0.5 - mean) / 0.01]
    assert found.tolist() == pytest.approx([score[0] / sum(score), score[1] / sum(score), 0.0])


@pytest.mark.parametrize("last", [[[], [], []], [[0.5], [0.5], [0.5]], [[0.5], [0.5], []]])
def test_contest_without_a_positive_score_is_uniform(last):
    assert contest_weights(last, 0.01, 0.1).tolist() == pytest.approx([1 / 3] * 3)


def test_contest_keeps_a_window():
    stack, method = ts_stack(rule="contest", window=2)
    for rewards in ([1.0, 0.0], [0.0, 0.0], [0.0, 0.0]):
        observe(stack, make_rollouts(rewards, [0, 0], prompt_index=[0, 0]))
    assert method.state["last"][0] == [0.0, 0.0]


def test_the_floor_of_exploration_reaches_every_arm_in_time():
    """A share below half a prompt is not lost by rounding: it is owed."""
    stack, method = ts_stack(rule="contest", exploration=0.1)
    method.state["last"] = [[1.0], [0.0], [0.0]]
    count = np.zeros(3)
    for _ in range(60):
        count += np.bincount(np.array(choose(stack, 4)) % 3, minlength=3)
        stack.batch += 1
    wanted = 240 * contest_weights(method.state["last"], 0.01, 0.1)
    assert np.abs(count - wanted).max() <= 1.0 + 1e-9 and count[1] >= 7


# ---- shares


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shares_sum_to_n_within_what_arms_have(data):
    k = data.draw(st.integers(1, 6))
    weights = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 1e-9]), min_size=k, max_size=k)))
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(k, 1 / k)
    free = np.array(data.draw(st.lists(st.integers(0, 12), min_size=k, max_size=k)))
    owed = np.array(data.draw(st.lists(st.floats(-1, 1), min_size=k, max_size=k)))
    n = data.draw(st.integers(0, int(free.sum())))
    count, rest = shares(weights, n, free, owed)
    assert count.sum() == n and (count >= 0).all() and (count <= free).all()
    assert (np.abs(rest) <= 1).all()
    plain, rest = shares(weights, n, np.full(k, 1000), np.zeros(k))
    assert np.abs(plain - weights * n).max() < 1  # largest remainder is never a whole one off
    assert rest == pytest.approx(weights * n - plain)


def test_shares_by_hand():
    many, none = np.full(3, 100), np.zeros(3)
    assert shares(np.array([0.5, 0.3, 0.2]), 7, many, none)[0].tolist() == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert shares(np.array([1 / 3] * 3), 4, many, none)[0].tolist() == [2, 1, 1]
    count, owed = shares(np.array([0.5, 0.3, 0.2]), 7, many, np.array([-0.5, 0.1, 0.4]))
    assert count.tolist() == [3, 2, 2] and owed.tolist() == pytest.approx([0.0, 0.2, -0.2])
    assert shares(np.array([1.0, 0, 0]), 6, np.array([2, 3, 9]), none)[0].tolist() == [2, 2, 2]


# ---- in a run


def train(stack: MethodStack, rate: dict[str, float], batches: int, prompts: int = 6, group: int = 4) -> list[int]:
    """Generation batches on domains with these success rates; how many prompts of each came."""
    count = dict.fromkeys(DOMAINS, 0)
    for _ in range(batches):
        plan = first_plan(stack, list(range(prompts)), group, prompts * group, 30, Table(DOMAINS * 10))
        index = [r.prompt_index for r in plan.rows for _ in range(r.n)]
        rng = np.random.default_rng([3, stack.batch])
        outcome = [float(rng.random() < rate[DOMAINS[i % 3]]) for i in index]
        one_step(stack, make_rollouts(outcome, prompt_index=index, batch=stack.batch))
        for row in plan.rows:
            count[DOMAINS[row.prompt_index % 3]] += 1
    return list(count.values())


@pytest.mark.parametrize("params", [{}, {"draws": 32}, {"rule": "contest"}])
def test_the_domain_that_teaches_comes_more_often(params):
    stack, _ = ts_stack(**params)
    code, logic, math_ = train(stack, {"code": 0.0, "logic": 0.5, "math": 1.0}, 40)
    assert code + logic + math_ == 240
    assert logic > 4 * max(code, math_)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path):
    rate = {"code": 0.1, "logic": 0.5, "math": 0.8}
    whole, method = ts_stack(draws=5, context=("constant", "progress"))
    train(whole, rate, 3)
    save_state(tmp_path, whole.state_dict("x"))
    resumed, other = ts_stack(draws=5, context=("constant", "progress"))
    resumed.load_state_dict(load_state(tmp_path) or {}, "x")
    assert train(whole, rate, 4) == train(resumed, rate, 4)
    assert torch.equal(method.state["mean"], other.state["mean"])
    assert choose(whole, 6) == choose(resumed, 6)


def test_beside_a_method_that_decides_the_rollouts():
    """Its prompts are planned with the other's number of rollouts: the first ones that fit."""
    method = LinearTS(LinearTS.Params(column="domain", draws=50))
    run = make_run(dataset=Table(DOMAINS * 10), dataset_size=30)
    stack = start_stack(method, BroRL(BroRL.Params(ramp=((0, 8),))), run=run)
    plan = first_plan(stack, list(range(6)), 4, 24, 30, Table(DOMAINS * 10))
    alone = start_stack(LinearTS(method.params), run=run)
    chosen = [row.prompt_index for row in first_plan(alone, list(range(6)), 4, 24, 30, Table(DOMAINS * 10)).rows]
    assert [(row.prompt_index, row.n) for row in plan.rows] == [(i, 8) for i in chosen[:3]]


def test_batches_chosen_ahead_do_not_repeat_prompts_of_an_arm():
    """Asynchronous modes choose several batches before one is observed, and book a batch when it is trained."""
    stack, method = ts_stack(draws=50)
    ahead = []
    for _ in range(3):
        stack.draw += 1
        ahead.append(choose(stack, 6))
    assert len({i for batch in ahead for i in batch}) == 18
    index = np.repeat(ahead[0], 2).tolist()
    late = make_rollouts([1.0, 0.0] * 6, group_size=2, prompt_index=index, current_version=2)
    assert set(late.staleness.tolist()) == {2}
    observe(stack, late)
    assert float(method.state["mean"].abs().sum()) > 0


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        (["a"] * 8, "the column `domain` has 1 different values .* it must have 2 to 1000"),
        ([str(i) for i in range(1001)], "has 1001 different values"),
    ],
)
def test_columns_that_name_no_domains(domains, message):
    with pytest.raises(MethodError, match=message):
        ts_stack(domains)


def test_values_of_other_types_are_named_by_their_text():
    stack, method = ts_stack([1, 2, None, 1])
    assert method._names == ["1", "2", "None"]
    assert sorted(choose(stack, 4, size=4)) == [0, 1, 2, 3]


def test_nested_fields_count_as_columns():
    rows = [{"prompt": str(i), "extra_info": {"domain": DOMAINS[i % 3]}} for i in range(30)]
    method = LinearTS(LinearTS.Params(column="domain"))
    start_stack(method, run=make_run(dataset=rows, dataset_size=30))
    assert method._names == DOMAINS and method._arm.tolist()[:4] == [0, 1, 2, 0]


def test_missing_columns_are_refused():
    capabilities = HostCapabilities("trl", "0", ("select_prompts", "observe"), {}, (), {}, ("prompt", "topic"), {})
    with pytest.raises(ConfigError, match=r"the dataset has no column `domain` \(it has: prompt, topic\). Add it."):
        preflight(build_stack(["linear_ts"], {"linear_ts": {"column": "domain"}}), capabilities)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "parameter `column` is missing"),
        ({"column": "a", "context": []}, "`context` is .* needs at least one name, and none twice"),
        ({"column": "a", "context": ["progress", "progress"]}, "none twice"),
        (
            {"column": "a", "context": ["progres"]},
            "`context` has 'progres'; allowed: constant, .*Did you mean `progress`",
        ),
        ({"column": "a", "rule": "contest", "draws": 4}, "`draws` has no effect"),
        ({"column": "a", "window": 4}, "`window` has no effect"),
    ],
)
def test_parameters_that_cannot_be(params, message):
    with pytest.raises(ConfigError, match=message):
        build_params(LinearTS.Params, params, "linear_ts")
