"""Trees of samples (`branch_rollout`) on the fake engine: shapes, noise, windows, the bundle, the authors' numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden, floats
from methods.branch_loops import advantages_by_loops, node_of
from scipy import stats

from rl_plugins.core.denoising import Sample
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import HOOKS
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts, Tokens
from rl_plugins.diffusion.flows import sde_mean, sde_std, shifted_sigmas, transition_logprob
from rl_plugins.methods.branch_advantages import BranchAdvantages
from rl_plugins.methods.branch_grpo import BRANCH_GRPO
from rl_plugins.methods.branch_grpo.trees import Trees
from rl_plugins.methods.branch_pruning import BranchPruning
from rl_plugins.methods.branch_rollout import BranchRollout, noisy_steps, split_steps
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack
from rl_plugins.testing.denoiser import FlowEngine, GaussianFlow, make_sample_prompt, run_sample_program

GOLDEN = Golden("branch_grpo")


def branching(**params: Any) -> BranchRollout:
    return BranchRollout(build_params(BranchRollout.Params, params, "branch_rollout"))


def sampled(
    n: int = 16, prompts: int = 1, engine: FlowEngine | None = None, prompt: Any = None, **params: Any
) -> tuple[list[list[Sample]], FlowEngine, dict[str, float]]:
    engine, logged = (
        engine or FlowEngine(GaussianFlow(0.5, 0.6), lambda x, columns: float(x.mean())),
        dict[str, float](),
    )
    asked = [make_sample_prompt(n=n, seed=f"{i}", **(prompt or {})) for i in range(prompts)]
    return run_sample_program(branching(**params), asked, engine, logged), engine, logged


def rows(samples: Sequence[Sequence[Sample]], rewards: Any = None) -> tuple[Rollouts, Tokens]:
    """As a host hands them to methods: a row per sample, a token per stochastic transition."""
    every = [(g, x) for g, group in enumerate(samples) for x in group]
    rollouts = make_rollouts(
        [float(x.latent.mean()) for _, x in every] if rewards is None else rewards,
        [g for g, _ in every],
        lengths=[len(x.trained) for _, x in every],
        meta={"branches": [x.meta["branches"] for _, x in every]},
    )
    position = torch.tensor([t.step for _, x in every for t in x.trained])
    logprobs = torch.tensor([t.logprob for _, x in every for t in x.trained])
    return rollouts, make_tokens(rollouts).replace(position=position, old_logprobs=logprobs.float())


# ---- trees


def test_the_tree_of_the_paper() -> None:
    """219 nodes, 16 leaves, 203 passes instead of 320; rows share transitions exactly where they share nodes."""
    (samples,), engine, logged = sampled()
    assert len(samples) == 16 and engine.passes["policy"] == 203 and engine.calls == 20
    assert logged == {
        "branch_rollout/leaves": 16,
        "branch_rollout/passes": pytest.approx(203 / 16),
        "branch_rollout/saved": pytest.approx(1 - 203 / 320),
        "branch_rollout/trained": 1,
    }
    ways = [x.meta["branches"]["nodes"] for x in samples]
    assert all(x.meta["branches"]["stops"] == list(range(21)) for x in samples)
    assert len({n for way in ways for n in way}) == 219
    levels = [len({way[d] for way in ways}) for d in range(21)]
    assert levels == [1] + [2] * 3 + [4] * 3 + [8] * 3 + [16] * 11
    for (a, one), (b, two) in itertools.combinations(zip(samples, ways, strict=True), 2):
        shared = [s is t for s, t in zip(a.transitions, b.transitions, strict=True)]
        assert shared == [x == y for x, y in zip(one[1:], two[1:], strict=True)]


@pytest.mark.parametrize(
    ("n", "params", "wanted"),
    [
        (6, {"splits": (0, 1, 2)}, [1, 2, 4, 6]),
        (9, {"splits": (0, 2), "children": 3}, [1, 3, 3, 9]),
        (5, {"splits": (1,)}, [1, 1, 5, 5]),  # a plan asks for more: the last split is wider
        (1, {}, [1, 1, 1, 1]),
        (4, {"splits": None, "rounds": 2}, [1, 2, 2, 2]),
        (8, {"splits": (2, 0, 2, 99)}, [1, 2, 2, 4]),  # the last one is at step 5
    ],
)
def test_any_number_of_samples(n: int, params: dict[str, Any], wanted: list[int]) -> None:
    (samples,), engine, logged = sampled(n, prompt={"steps": 6}, **params)
    ways = [x.meta["branches"]["nodes"] for x in samples]
    assert [len({way[d] for way in ways}) for d in range(4)] == wanted and len(samples) == n
    assert len({n for way in ways for n in way[1:]}) == len({id(t) for x in samples for t in x.transitions})
    assert engine.passes["policy"] == pytest.approx(n * logged["branch_rollout/passes"])


def test_evaluation_samples_independently() -> None:
    (samples,), engine, logged = sampled(4, prompt={"training": False})
    assert engine.passes["policy"] == 80 and not logged and len({x.seed for x in samples}) == 4


# ---- noise


def noises(samples: Sequence[Sample], step: int, eta: float = 0.3) -> torch.Tensor:
    """(samples, elements) what a step added, in units of its deviation."""
    sigmas, flow = shifted_sigmas(samples[0].total), GaussianFlow(0.5, 0.6)
    start, end = (torch.stack([getattr(x.transitions[step], name) for x in samples]) for name in ("start", "end"))
    level = torch.full((len(samples),), sigmas[step])
    following = torch.full_like(level, sigmas[step + 1])
    mean = sde_mean(start, flow(start, level, [None] * len(samples)), level, following, eta)
    return ((end - mean) / sde_std(level, following, eta).reshape(-1, 1, 1, 1)).flatten(1)


@pytest.mark.parametrize("s", [0.5, 4.0])
def test_noises_of_siblings_correlate_as_the_paper_says(s: float) -> None:
    """1 / (1 + s^2) at a split, within three standard errors of 6,400 pairs; each is standard normal."""
    samples, _, _ = sampled(2, prompts=100, prompt={"steps": 4, "shape": (1, 8, 8)}, splits=(1,), s=s)
    one, two = (noises([group[i] for group in samples], 1).flatten().numpy() for i in range(2))
    expected = 1 / (1 + s * s)
    assert abs(float(np.corrcoef(one, two)[0, 1]) - expected) < 3 * (1 - expected**2) / math.sqrt(len(one))
    for xi in (one, two):
        assert stats.kstest(xi, "norm").pvalue > 0.01
    later = [noises([group[i] for group in samples], 2).flatten().numpy() for i in range(2)]
    assert abs(float(np.corrcoef(*later)[0, 1])) < 3 / math.sqrt(len(one))  # after the split their noise is their own


def test_a_leaf_is_distributed_like_the_end_of_an_ordinary_chain() -> None:
    """Kolmogorov-Smirnov: every leaf of 40 trees, 256 independent elements each, against as many ordinary chains. The
    code's noise, four times as large, is told apart."""
    fields: dict[str, Any] = {"steps": 6, "shape": (1, 16, 16)}
    engine = FlowEngine(GaussianFlow(0.5, 0.6))
    asked = [make_sample_prompt(n=1, seed=f"chain {i}", training=False, **fields) for i in range(40)]
    ordinary = torch.stack([x.latent for (x,) in run_sample_program(branching(), asked, engine)]).flatten().numpy()
    for code_compat in (False, True):
        trees = sampled(4, prompts=40, prompt=fields, engine=engine, splits=(0, 3), code_compat=code_compat)[0]
        ends = [torch.stack([group[leaf].latent for group in trees]).flatten().numpy() for leaf in range(4)]
        p = [stats.ks_2samp(end, ordinary).pvalue for end in ends]
        assert max(p) < 1e-9 if code_compat else min(p) > 0.01


def test_the_codes_noise_is_independent_and_scaled() -> None:
    samples, _, _ = sampled(2, prompts=100, prompt={"steps": 4, "shape": (1, 8, 8)}, splits=(1,), code_compat=True)
    one, two = (noises([group[i] for group in samples], 1).flatten().numpy() for i in range(2))
    assert abs(float(np.corrcoef(one, two)[0, 1])) < 3 / math.sqrt(len(one))
    assert float(one.std()) == pytest.approx(4, rel=0.03)


# ---- windows


@pytest.mark.parametrize(
    ("window", "stride", "wanted"),
    [
        (None, 30, range(20)),
        (4, 30, [0, 1, 2, 3, 6, 9]),  # the authors' script: one window, and the splits
        (2, 5, [0, 1, 3, 5, 6, 9, 10, 11, 15, 16]),
        (1, 2, [*range(0, 20, 2), 3, 9]),
    ],
)
def test_windows(window: int | None, stride: int, wanted: Any) -> None:
    assert [t for t, noisy in enumerate(noisy_steps(20, (0, 3, 6, 9), window, stride)) if noisy] == sorted(wanted)


def test_steps_outside_of_the_window_are_deterministic_and_not_trained() -> None:
    (samples,), engine, logged = sampled(window=2, stride=5)
    steps = [0, 1, 3, 5, 6, 9, 10, 11, 15, 16]
    assert all([t.step for t in x.trained] == steps for x in samples) and logged["branch_rollout/trained"] == 0.5
    assert engine.passes["policy"] == 203
    rollouts, tokens = rows([samples])
    stack = start_stack(BranchAdvantages(), BranchPruning(), run=make_run(group_size=16))
    decision = one_step(stack, rollouts, tokens)
    whole = advantages_by_loops(rollouts, tokens)
    kept = Counter(tokens.position[decision.keep_tokens].tolist())
    assert kept == {0: 2, 1: 2, 3: 4, 5: 4, 6: 8, 9: 16, 10: 8, 11: 8, 15: 8, 16: 8}  # half of the tails
    for i in decision.keep_tokens.nonzero()[:, 0].tolist():
        node = node_of(rollouts, int(tokens.row[i]), int(tokens.position[i]))
        assert node is not None and float(decision.advantages[i]) == pytest.approx(whole[node], abs=1e-9)


# ---- the bundle


def test_the_bundle_trains_138_transitions_of_a_tree() -> None:
    """With the paper's settings: 218 transitions, without five depths 138; and nothing changes what stays."""
    samples, _, _ = sampled(prompts=3)
    rollouts, tokens = rows(samples)
    parts = {"branch_advantages": BranchAdvantages, "branch_pruning": BranchPruning}
    assert list(BRANCH_GRPO.parts) == ["branch_rollout", *parts]
    methods = [cls(build_params(cls.Params, BRANCH_GRPO.parts[name], name)) for name, cls in parts.items()]  # type: ignore[attr-defined]
    stack = start_stack(*methods, run=make_run(group_size=16))
    decision = one_step(stack, rollouts, tokens)
    logged = combine([stack.metrics.take()])
    assert int(decision.keep_tokens.sum()) == 3 * 138 and logged["branch_pruning/nodes"] == 218
    whole = one_step(start_stack(BranchAdvantages()), rollouts, tokens)
    kept = decision.keep_tokens
    torch.testing.assert_close(decision.advantages[kept], whole.advantages[kept])
    assert set((tokens.position[whole.keep_tokens & ~kept] + 1).tolist()) == set(range(15, 20))


@pytest.mark.parametrize(
    ("params", "capabilities", "said"),
    [
        ({"splits": ()}, {}, "`splits` is empty. Give the steps"),
        ({"window": 4, "stride": 4}, {}, "`window` is 4 and `stride` 4, so every step would have noise"),
        ({"splits": (0, 0)}, {"host": "diffusion"}, "1 splits into 2 children make 2 samples, and the run has 4"),
        ({"splits": None, "rounds": 1}, {"host": "diffusion"}, "Give more `splits` or `children`"),
        ({}, {"host": "trl"}, "trl trains language models. Take `branch_text_rollout` with `branch_advantages`"),
        ({}, {"host": "verl"}, "verl trains language models. Take `branch_text_rollout`"),
    ],
)
def test_refusals(params: dict[str, Any], capabilities: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        branching(**params).check(make_run(**capabilities))


@pytest.mark.parametrize("host", ["trl", "verl"])
def test_on_language_models_the_bundle_names_its_text_form(host: str) -> None:
    capabilities = {key: dict[str, Any]() for key in ("missing_hooks", "missing_signals", "options", "defaults")}
    hooks = tuple(HOOKS)
    told = HostCapabilities(
        host, "0", hooks, eval_hooks=(), columns=None, run=make_run(host=host, group_size=16), **capabilities
    )
    with pytest.raises(ConfigError, match="Take `branch_text_rollout` with `branch_advantages` and `branch_pruning`"):
        preflight(build_stack("branch_grpo"), told)
    preflight(
        build_stack("branch_text_rollout,branch_advantages", '{"branch_text_rollout": {"places": [0, 1, 2, 3]}}'), told
    )


# ---- numbers of the authors' code


@GOLDEN.kind("node_ids")
def check_nodes(case: Case) -> None:
    """Values and advantages of all nodes, through the column that rows carry."""
    names, parent = (
        list(case.inputs["node_ids"]),
        dict(zip(case.inputs["node_ids"], case.inputs["parent"], strict=True)),
    )
    log_prob = dict(zip(names, floats(case.inputs["edge_log_prob"]), strict=True))
    ways = []
    for leaf in case.inputs["leaf_ids"]:
        way = [leaf]
        while parent[way[0]] is not None:
            way.insert(0, parent[way[0]])
        ways.append(way)
    steps, splits = case.params["steps"], list(case.params["split_points"])
    assert {len(way) for way in ways} == {steps + 1}
    for name in ("eps", "std_floor"):
        case.params[name]  # placeholders
    noted = [{"nodes": [names.index(n) for n in way], "stops": list(range(steps + 1))} for way in ways]
    rollouts = make_rollouts(
        floats(list(case.inputs["leaf_rewards"])),
        [0] * len(ways),
        lengths=[steps] * len(ways),
        meta={"branches": noted},
    )
    old = torch.tensor([log_prob[n] for way in ways for n in way[1:]], dtype=torch.float32)
    tokens = make_tokens(rollouts).replace(old_logprobs=old)
    trees = Trees.of(rollouts, tokens)
    assert trees is not None and trees.count == len(names)
    assert sorted(set(trees.depth[trees.children > 1].tolist())) == sorted(set(splits))
    fusion = "levels" if case.params["prob_weighted"] else "uniform"
    method = BranchAdvantages(build_params(BranchAdvantages.Params, {"fusion": fusion}, "branch_advantages"))
    place = {n: int(trees.node[i]) for i, n in enumerate(n for way in ways for n in way)}
    value = method._values(trees, rollouts.reward, tokens)
    order = torch.tensor([place[n] for n in names])
    expected = floats(list(case.expected["node_reward"]))
    torch.testing.assert_close(value[order], torch.tensor(expected).double(), atol=2e-6, rtol=0)
    decision = one_step(start_stack(method), rollouts, tokens)
    advantage = dict.fromkeys(names, 0.0)  # a root has no transition, and the advantage 0
    for i, n in enumerate(n for way in ways for n in way[1:]):
        if decision.keep_tokens[i]:
            advantage[n] = float(decision.advantages[i])
    wanted = floats(list(case.expected["node_advantage"]))
    assert [advantage[n] for n in names] == pytest.approx(wanted, abs=2e-4 if fusion == "levels" else 2e-5)


@GOLDEN.kind(params=("total_steps",))
def check_split_points(case: Case) -> None:
    given = case.params["tree_split_points"]
    splits = None if given is None else tuple(int(x) for x in given.split(","))
    found = split_steps(case.params["total_steps"], splits, case.params["tree_split_rounds"])
    assert found == list(case.expected["points"])


@GOLDEN.kind("velocity")
def check_sde_step(case: Case) -> None:
    """The density that samples carry is that of the authors' step."""
    velocity, x, end = (
        torch.tensor(floats(list(case.inputs[name])), dtype=torch.float64).reshape(list(case.inputs["shape"]))
        for name in ("velocity", "x_t", "x_next")
    )
    sigmas, i, eta = floats(list(case.inputs["sigmas"])), case.params["index"], case.params["eta"]
    level, following = (torch.tensor([s], dtype=torch.float64) for s in (sigmas[i], sigmas[i + 1]))
    mean, std = sde_mean(x, velocity, level, following, eta), sde_std(level, following, eta)
    assert float(transition_logprob(end, mean, std)) == pytest.approx(case.expected["log_prob"], abs=1e-4)
    denoised = (x - level * velocity).flatten().tolist()
    assert denoised == pytest.approx(floats(list(case.expected["pred_x0"])), abs=2e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()
