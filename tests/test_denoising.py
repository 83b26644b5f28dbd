"""Rollout programs of a diffusion policy without a host: steps, log-densities, noise, requests, faults."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl_plugins.core.denoising import Denoise, Sample, Transition, noise
from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Call, Generate, Score, Trajectory, together
from rl_plugins.diffusion.flows import ode_step, sde_mean, sde_std, shifted_sigmas, transition_kl, transition_logprob
from rl_plugins.runtime.immutability import checking
from rl_plugins.runtime.samples import RunningSamples, run_samples
from rl_plugins.testing.denoiser import FlowEngine, GaussianFlow, make_sample_prompt, run_sample_program

CASES = json.loads((Path(__file__).parent / "golden" / "branch_grpo.json").read_text())["cases"]


def program(body):
    """A method whose rollout is `body(prompt)`."""

    class Made(Method):
        name = "made"

        def rollout(self, prompt):
            return (yield from body(prompt))

    return Made()


def plain(prompt, **how):
    made = yield [Denoise(prompt.start(seed), **how) for seed in prompt.seeds(prompt.n)]
    return [samples[0] for samples in made]


# ---- steps and log-densities


@pytest.mark.parametrize("case", [c for c in CASES if c["name"].startswith("sde_step")], ids=lambda c: c["name"])
def test_the_authors_vectors_of_a_step(case):
    given, params, expected = case["inputs"], case["params"], case["expected"]
    assert set(given) == {"velocity", "x_t", "x_next", "shape", "sigmas"} and set(params) == {"index", "eta"}
    x, v, end = (torch.tensor(given[k]).double().reshape(given["shape"])[None] for k in ("x_t", "velocity", "x_next"))
    sigma, following = (torch.tensor([given["sigmas"][params["index"] + k]]).double() for k in (0, 1))
    mean, std = sde_mean(x, v, sigma, following, params["eta"]), sde_std(sigma, following, params["eta"])
    found = {
        "log_prob": transition_logprob(end, mean, std),
        "pred_x0": ode_step(x, v, sigma, torch.zeros(1)).flatten(),
    }
    assert set(expected) == set(found)
    for name, value in expected.items():
        assert found[name].tolist() == pytest.approx(value if isinstance(value, list) else [value], abs=2e-4)


def loop_logprob(x, v, end, sigma, following, eta):
    """Element by element, in Python's float64."""
    total = 0.0
    d = following - sigma
    std = max(eta * math.sqrt(-d), 1e-8)
    for a, b, c in zip(x, v, end, strict=True):
        score = -(a - (1 - sigma) * (a - sigma * b)) / sigma**2
        mean = a + d * b - 0.5 * eta**2 * score * d
        total += -((c - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))
    return total / len(x)


numbers = st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=6)


@given(numbers, numbers, numbers, st.integers(0, 19), st.floats(0.05, 1.0), st.floats(1, 6))
def test_the_log_density_is_that_of_a_float64_loop(x, v, moved, step, eta, shift):
    sigmas = shifted_sigmas(20, shift)
    sigma, following = sigmas[step], sigmas[step + 1]
    a, b = torch.tensor([x], dtype=torch.float64), torch.tensor([v], dtype=torch.float64)
    s, f = torch.tensor([sigma], dtype=torch.float64), torch.tensor([following], dtype=torch.float64)
    mean, std = sde_mean(a, b, s, f, eta), sde_std(s, f, eta)
    end = mean + std * torch.tensor([moved], dtype=torch.float64)
    found = float(transition_logprob(end, mean, std))
    assert found == pytest.approx(loop_logprob(x, v, end[0].tolist(), sigma, following, eta), rel=1e-9, abs=1e-9)
    normal = torch.distributions.Normal(mean, std[:, None])
    assert found == pytest.approx(float(normal.log_prob(end).mean()), rel=1e-9, abs=1e-9)
    other = mean + 0.1
    kl = torch.distributions.kl_divergence(normal, torch.distributions.Normal(other, std[:, None])).mean()
    assert float(transition_kl(mean, other, std)) == pytest.approx(float(kl), rel=1e-9)


def test_the_gradient_of_the_log_density_is_that_of_the_normal_distribution():
    torch.manual_seed(0)
    x, v = torch.randn(3, 1, 2, 2).double(), torch.randn(3, 1, 2, 2).double().requires_grad_()
    s, f = torch.tensor([1.0, 0.7, 0.2], dtype=torch.float64), torch.tensor([0.9, 0.5, 0.0], dtype=torch.float64)
    end = torch.randn(3, 1, 2, 2).double()
    mean, std = sde_mean(x, v, s, f, 0.3), sde_std(s, f, 0.3)
    (gradient,) = torch.autograd.grad(transition_logprob(end, mean, std).sum(), v)
    slope = (f - s) * (1 + 0.5 * 0.3**2 * (1 - s) / s)  # of the mean by the velocity
    wanted = (end - mean) / std.reshape(-1, 1, 1, 1) ** 2 * slope.reshape(-1, 1, 1, 1) / 4
    assert torch.allclose(gradient, wanted.detach())


def test_sigmas_are_those_of_the_paper():
    sigmas = shifted_sigmas(20, 3.0)
    assert len(sigmas) == 21 and sigmas[0] == 1 and sigmas[-1] == 0
    assert sigmas[1] == pytest.approx(0.982759, abs=1e-6) and sigmas[7] == pytest.approx(0.847826, abs=1e-6)


# ---- what the loop makes


def test_transitions_hold_what_their_log_densities_need():
    engine, flow = FlowEngine(GaussianFlow(0.5, 0.3)), GaussianFlow(0.5, 0.3)
    samples = run_sample_program(program(plain), make_sample_prompt(n=3, condition=0.25), engine)
    assert len(samples) == 3 and all(s.finished and len(s.trained) == 20 for s in samples)
    sigmas = shifted_sigmas(20)
    for sample in samples:
        assert torch.equal(sample.transitions[0].start, noise((1, 2, 2), str(sample.seed), "start"))
        assert torch.equal(sample.latent, sample.transitions[-1].end)
        for t, following in zip(sample.transitions, sample.transitions[1:], strict=False):
            assert following.start is t.end
        for t in sample.transitions:
            v = flow(t.start[None], torch.tensor([sigmas[t.step]]), [0.25]).flatten().tolist()
            args = (t.start.flatten().tolist(), v, t.end.flatten().tolist(), sigmas[t.step], sigmas[t.step + 1], 0.3)
            assert t.logprob == pytest.approx(loop_logprob(*args), abs=2e-3)  # float32 in a step of 1e-3


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.5, 0.4)])
def test_samples_have_the_distribution_of_the_flow(mean, std):
    """Stochastic and deterministic samples of an exact velocity are those of the data."""
    prompt = make_sample_prompt(n=40, steps=60, shape=(4, 4, 4))
    for stochastic in (True, False):
        samples = run_sample_program(
            program(lambda p, how=stochastic: plain(p, stochastic=how)), prompt, FlowEngine(GaussianFlow(mean, std))
        )
        values = torch.stack([s.latent for s in samples]).flatten().numpy()
        assert stats.kstest(values, stats.norm(mean, std).cdf).pvalue > 1e-3
        assert {t.stochastic for s in samples for t in s.transitions} == {stochastic}
        if not stochastic:
            assert {t.logprob for s in samples for t in s.transitions} == {0.0} and not samples[0].trained


def siblings(prompt, s):
    begun = yield [Denoise(prompt.start(seed), steps=3) for seed in prompt.seeds(prompt.n // 2)]
    pairs = yield [Denoise(one, steps=1, n=2, shared_noise=s) for (one,) in begun]
    return pairs


@pytest.mark.parametrize("s", [None, 1.0, 4.0])
def test_noise_of_siblings(s):
    """Each noise is standard normal, and two siblings correlate with 1 / (1 + s^2)."""
    prompt, seen = make_sample_prompt(n=4000), []

    def body(prompt):
        seen.extend((yield from siblings(prompt, s)))
        return []

    run_sample_program(program(body), prompt, FlowEngine())
    sigmas = shifted_sigmas(20)
    std = 0.3 * math.sqrt(sigmas[3] - sigmas[4])
    xi = torch.stack([torch.stack([x.latent for x in pair]) for pair in seen]).double()  # (pairs, 2, ..)
    sigma, following = torch.tensor([sigmas[3]]).double(), torch.tensor([sigmas[4]]).double()
    start = torch.stack([pair[0].transitions[-1].start for pair in seen]).double()
    v = GaussianFlow()(start, sigma.expand(len(start)), [None] * len(start))
    xi = (xi - sde_mean(start, v, sigma, following, 0.3)[:, None]) / std
    first, second = xi[:, 0].flatten().numpy(), xi[:, 1].flatten().numpy()
    for one in (first, second):
        assert stats.kstest(one, stats.norm.cdf).pvalue > 1e-3
    wanted = 0.0 if s is None else 1 / (1 + s**2)
    assert stats.pearsonr(first, second).statistic == pytest.approx(wanted, abs=4 / math.sqrt(len(first)))


def test_shared_transitions_are_the_same_object_and_take_one_pass():
    engine = FlowEngine()

    def tree(prompt):
        (root,) = yield Denoise(prompt.start(7), steps=2)
        children = yield Denoise(root, steps=3, n=3, shared_noise=4.0)
        leaves = yield [Denoise(c, n=2) for c in children]
        return [leaf for pair in leaves for leaf in pair]

    leaves = run_sample_program(program(tree), make_sample_prompt(n=6), engine)
    assert len({id(t) for x in leaves for t in x.transitions}) == 2 + 3 * 3 + 6 * 15
    assert leaves[0].transitions[1] is leaves[5].transitions[1]
    assert (
        leaves[0].transitions[4] is leaves[1].transitions[4]
        and leaves[0].transitions[4] is not leaves[2].transitions[4]
    )
    assert len({x.latent.sum().item() for x in leaves}) == 6
    # a split step is one pass for all of its children
    assert engine.passes == {"policy": 2 + (1 + 2 * 3) + (3 + 14 * 6), "cheap": 0}


@settings(max_examples=15)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_noise_does_not_depend_on_how_steps_are_split_into_requests(parts, others):
    prompt = make_sample_prompt(n=1, steps=20)

    def whole(prompt):
        return (yield Denoise(prompt.start(5)))

    def split(prompt):
        sample = prompt.start(5)
        yield [Denoise(prompt.start(90 + i), steps=2) for i in range(others)]
        for steps in parts:
            (sample,), *_ = yield [Denoise(sample, steps=steps), *[Denoise(prompt.start(i)) for i in range(others)]]
        return [sample] if sample.finished else (yield Denoise(sample))

    (one,), (other,) = (run_sample_program(program(body), prompt, FlowEngine()) for body in (whole, split))
    assert torch.allclose(one.latent, other.latent, atol=1e-5)
    assert [t.logprob for t in one.transitions] == pytest.approx([t.logprob for t in other.transitions], abs=1e-2)


def test_seeds():
    """Different ones, the same each time; the same start from the same seed; a request's seed gives other noise."""
    prompt = make_sample_prompt()
    seeds = prompt.seeds(1000)
    assert len(set(seeds)) == 1000 and seeds == prompt.seeds(1000) and seeds[:9] == prompt.seeds(9)
    assert prompt.seeds(9, "other") != seeds[:9]
    assert torch.equal(prompt.start(3).latent, make_sample_prompt(seed="else", batch=4).start(3).latent)

    def again(prompt):
        made = yield [Denoise(prompt.start(3), seed=s) for s in (0, 0, 1)]
        return [x for (x,) in made]

    a, b, c = run_sample_program(program(again), prompt, FlowEngine())
    assert torch.equal(a.latent, b.latent) and not torch.equal(a.latent, c.latent)


def test_seeds_that_collide_are_drawn_again(monkeypatch):
    drawn = iter([4, 4, 4, 9, 4, 1])

    class Few:
        def integers(self, n):
            return next(drawn)

    prompt = make_sample_prompt()
    monkeypatch.setattr(type(prompt), "rng", lambda self, purpose: Few())
    assert prompt.seeds(3) == [4, 9, 1]


def test_a_cheap_copy_with_few_steps_and_the_same_seeds_again():
    """What sol_rl does: explore seeds, score, and make the best again with the policy."""
    engine = FlowEngine(GaussianFlow(1.0), lambda x, columns: float(x.mean()), cheap=GaussianFlow(0.9))

    def explore(prompt):
        tried = yield [Denoise(prompt.start(s, 6), stochastic=False, model="cheap") for s in prompt.seeds(8)]
        scores = yield [Score(x) for (x,) in tried]
        best = max(range(8), key=lambda i: scores[i].reward)
        (sample,) = yield Denoise(prompt.start(tried[best][0].seed), stochastic=False)
        return [sample.scored((yield Score(sample))).noted(tried=[s.reward for s in scores])]

    (sample,) = run_sample_program(program(explore), make_sample_prompt(has_cheap=True), engine)
    assert engine.passes == {"cheap": 8 * 6, "policy": 20} and len(engine.scores) == 9
    assert sample.rewards["reward"] == pytest.approx(float(sample.latent.mean()))
    assert max(sample.meta["tried"]) < sample.rewards["reward"]  # a mean of 0.9 against 1.0, at the same seed


def test_programs_run_together_and_mixed_windows():
    engine = FlowEngine()

    def one(prompt, seed):
        value = yield Call(lambda: seed + 1)
        window = tuple(2 <= i < 6 for i in range(20))
        (sample,) = yield Denoise(prompt.start(value.value), stochastic=window)
        return sample

    def both(prompt):
        return (yield from together([one(prompt, seed) for seed in (1, 2, 3)]))

    found = run_sample_program(program(both), [make_sample_prompt(), make_sample_prompt(seed="b")], engine)
    assert [[x.seed for x in samples] for samples in found] == [[2, 3, 4]] * 2
    assert engine.calls == 20  # requests of all programs are one call of the model
    for sample in found[0]:
        assert [t.step for t in sample.trained] == [2, 3, 4, 5]
        assert [t.logprob == 0 for t in sample.transitions] == [not 2 <= i < 6 for i in range(20)]


def test_scaled_noise_keeps_the_density_of_the_plain_one():
    """As in the authors' code, whose split step samples with another deviation than its log-density has."""

    def scaled(prompt):
        made = yield Denoise(prompt.start(1), n=400, steps=1, noise_scale=4.0)
        found.extend(made)
        return []

    found: list[Sample] = []
    run_sample_program(program(scaled), make_sample_prompt(), FlowEngine())
    std = 0.3 * math.sqrt(1 - shifted_sigmas(20)[1])
    z = torch.stack([x.latent for x in found])
    assert float(z.std(0).mean()) == pytest.approx(4 * std, rel=0.1)
    logprobs = torch.tensor([x.transitions[0].logprob for x in found])
    assert float(logprobs.mean()) == pytest.approx(-0.5 * 16 - math.log(std) - 0.5 * math.log(2 * math.pi), rel=0.1)


# ---- what is refused


def asking(make):
    def body(prompt):
        yield make(prompt)
        return []

    return body


def returning(make):
    def body(prompt):
        made = yield Denoise(prompt.start(1))
        return make(prompt, made[0])

    return body


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: Generate(Trajectory((1,))), "it yielded Generate. Yield Denoise, Score or Call"),
        (lambda p: Denoise(Trajectory((1,))), "Denoise of Trajectory"),
        (lambda p: Score(p.start(1)), "0 of 20 steps; finish it"),
        (lambda p: Denoise(p.start(1), n=0), "Denoise(n=0); it must be a whole number of 1 to 100000"),
        (lambda p: Denoise(p.start(1), steps=21), "Denoise(steps=21); it must be a whole number of 1 to 20"),
        (lambda p: Denoise(p.start(1), steps=0), "Denoise(steps=0)"),
        (lambda p: Denoise(p.start(1), seed=0.5), "Denoise(seed=0.5)"),
        (lambda p: Denoise(p.start(1), stochastic=(True,)), "of 20 steps; it must be True, False, or a tuple"),
        (lambda p: Denoise(p.start(1), n=2, stochastic=False), "all children would be the same"),
        (lambda p: Denoise(p.start(1), shared_noise=-1.0), "Denoise(shared_noise=-1.0); it must be a finite number"),
        (lambda p: Denoise(p.start(1), noise_scale=math.inf), "Denoise(noise_scale=inf)"),
        (lambda p: Denoise(p.start(1), model="small"), "Denoise(model='small'); allowed: 'policy', 'cheap'"),
        (lambda p: Denoise(p.start(1), model="cheap"), "the run has no cheap copy of the policy. Give the trainer one"),
        (lambda p: Denoise(make_sample_prompt(shape=(3, 1, 1)).start(1)), "a latent of shape (3, 1, 1); those of this"),
        (lambda p: Call("no function"), "Call of 'no function'"),
    ],
)
def test_refused_requests(make, why):
    with pytest.raises(MethodError) as e:
        run_sample_program(program(asking(make)), make_sample_prompt(), FlowEngine())
    assert why in str(e.value) and "Method `made` failed in `rollout`" in str(e.value)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p, x: x, "the program returned Sample instead of a list of samples"),
        (lambda p, x: [x.latent], "a list with Tensor instead of a Sample"),
        (lambda p, x: [x] * 5, "the program returned 5 samples for a prompt that asks for 4"),
        (lambda p, x: [p.start(1)], "a sample has 0 of 20 steps; rows have all 20 steps"),
        (lambda p, x: [p.start(1, 1).add(x.transitions[0])], "a sample has 1 of 1 steps; rows have all 20 steps"),
        (lambda p, x: [x.noted(f=lambda: 0)], "`meta` of a sample cannot travel to another process"),
        (lambda p, x: [Sample(**{**vars(x), "rewards": {"other": 1.0}})], "a sample has rewards of"),
        (lambda p, x: [Sample(**{**vars(x), "rewards": {"reward": math.inf}})], "a sample has an infinite reward"),
        (
            lambda p, x: [Sample(**{**vars(x), "transitions": (*x.transitions[:-1], _like(x, model="cheap"))})],
            "a sample has steps of the cheap copy, which are not trained",
        ),
        (
            lambda p, x: [Sample(**{**vars(x), "transitions": (*x.transitions[:-1], _like(x, logprob=math.nan))})],
            "a log-density that is NaN or infinite",
        ),
    ],
)
def test_refused_samples(make, why):
    with pytest.raises(MethodError) as e:
        run_sample_program(program(returning(make)), make_sample_prompt(reward_names=("reward",)), FlowEngine())
    assert why in str(e.value)


def _like(sample, **changes):
    return Transition(**{**vars(sample.transitions[-1]), **changes})


def test_an_engine_that_dies_closes_the_programs():
    closed = []

    def body(prompt):
        try:
            yield Denoise(prompt.start(1), steps=1)
            yield Denoise(prompt.start(1), steps=1)
        finally:
            closed.append(prompt.seed)
        return []

    programs = [RunningSamples(program(body), make_sample_prompt(seed=s)) for s in ("a", "b")]
    with pytest.raises(RuntimeError, match="the engine died"):
        run_samples(programs, FlowEngine(fail_after=1))
    assert closed == ["a", "b"]


def test_a_program_has_no_state_and_changes_nothing():
    class Reads(Method):
        name = "reads"

        def rollout(self, prompt):
            self.state["n"] = 1
            yield

    with pytest.raises(MethodError, match=r"reads self\.state in the generation place"):
        run_sample_program(Reads(), make_sample_prompt(), FlowEngine())

    def changing(prompt):
        prompt.columns["a"].append(1)
        yield Denoise(prompt.start(1))
        return []

    with checking(), pytest.raises(MethodError, match="it changed what it was given"):
        run_sample_program(program(changing), make_sample_prompt(columns={"a": []}), FlowEngine())
