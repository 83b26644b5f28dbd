"""AEPO (arXiv 2510.14545): branching of agents' chains, the clip, the advantages, and all through the driver."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting
from torch import Tensor
from waiting import NEVER, SOON, Stuck, until

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.losses import aggregate, ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Kind, Trajectory
from rl_plugins.core.rollouts import Rollouts, Terms, Tokens
from rl_plugins.kit.agents import Observation
from rl_plugins.methods.aepo import AEPO
from rl_plugins.methods.aepo_advantages import AepoAdvantages
from rl_plugins.methods.aepo_clip import AepoClip
from rl_plugins.methods.aepo_rollout import AepoRollout, branch_chance, initial_rollouts, turn_entropy
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_terms, make_tokens, one_step, start_stack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

GOLDEN = Golden("aepo")
NAN = math.nan


def built(cls: Any, **params: Any) -> Any:
    return cls(build_params(cls.Params, acting(cls.Params, params), cls.name))


# ---- golden numbers of the authors' code


@GOLDEN.kind("log_prob")
def check_loss(case: Case) -> None:
    p, wanted = case.params, case.expected
    names = ("log_prob", "old_log_prob", "entropy", "response_mask", "advantages")
    x = {name: torch.tensor(case.inputs[name], dtype=torch.float64) for name in names}
    mask = x["response_mask"] > 0
    rollouts = make_rollouts([0.0] * len(mask), lengths=mask.sum(1).tolist())
    tokens = make_tokens(rollouts, entropies=x["entropy"][mask], advantages=x["advantages"])
    shaped = AepoAdvantages(case.build(AepoAdvantages, {"alpha": "weight"})).shape(rollouts, tokens).advantages
    given_advantages = shaped if p["entropy_balanced_advantage"] else tokens.advantages
    advantages = torch.zeros_like(x["log_prob"]).masked_scatter(mask, given_advantages)
    terms = Terms(
        mask=mask,
        logprobs=x["log_prob"].requires_grad_(),
        advantages=advantages,
        old_logprobs=x["old_log_prob"],
        num_tokens=mask.sum(),
        num_rows=(mask.sum(1) > 0).sum(),
        max_length=mask.shape[1],
    )
    clip = case.build(AepoClip, {"clip_ratio_c": "dual_clip"})
    stack = start_stack(AepoClip(clip))
    per_token = stack.one("policy_loss", terms)
    if not p["entropy_balanced_clipping"]:  # then it is the host's
        per_token = ppo_clip(
            terms.logprobs, terms.old_logprobs, advantages, clip.clip_low, clip.clip_high, clip.dual_clip
        )
    loss = aggregate(
        per_token, mask, p["agg"], num_tokens=terms.num_tokens, num_rows=terms.num_rows, max_length=terms.max_length
    )
    assert float(loss) == pytest.approx(wanted["loss"], abs=1e-8)
    gradient = torch.autograd.grad(loss, terms.logprobs)[0]
    torch.testing.assert_close(gradient, torch.tensor(wanted["grad_log_prob"]).double(), rtol=0, atol=2e-8)
    logged, n = combine([stack.metrics.take()]), float(mask.sum())
    for key in ("clipfrac", "clipfrac_lower"):
        assert logged[f"aepo_clip/{key}"] * n / (n + 1e-8) == pytest.approx(wanted[key], abs=1e-9)


@GOLDEN.kind("budget", "branch")
def check_budget_and_branching(case: Case) -> None:
    names = {"branch_threshold": "branch_probability", "penalty_per_consecutive": "penalty"}
    params = case.build(AepoRollout, names, environment=Talk)
    if "budget" in case.inputs:
        beta = case.params["sigmoid_beta"]
        found = [initial_rollouts(b["k"], b["H_root"], b["H_tool_avg"], beta) for b in case.inputs["budget"]]
        assert found == case.expected["initial_rollouts"]
    if "branch" in case.inputs:
        branches = case.inputs["branch"]
        chance = [branch_chance(b["u"], b["H_now"] - b["H_init"], b["consecutive"], params) for b in branches]
        assert chance == pytest.approx(case.expected["p"])
        assert [c >= params.branch_probability for c in chance] == case.expected["branch"]


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the clip


def loop_clip(lp: float, old: float, a: float, low: float, high: float, c: float) -> tuple[float, float]:
    """Loss of a token and its derivative by lp."""
    r = math.exp(lp - old)
    if r < 1 - low:
        clipped, slope = -a * (1 - low), 0.0
    elif r > 1 + high:
        clipped, slope = -a * (1 + high), -a * (1 + high)
    else:
        clipped, slope = -a * r, -a * r
    loss, slope = (-a * r, -a * r) if -a * r >= clipped else (clipped, slope)
    return (-a * c, 0.0) if a < 0 and loss > -a * c else (loss, slope)


def test_loss_and_gradient_equal_the_loop() -> None:
    """Advantages and ratios on a grid around every corner."""
    ratios = [0.05, 0.5, 0.79, 0.81, 1.0, 1.19, 1.27, 1.29, 2.9, 3.1, 40.0]
    advantages = [-2.0, -0.3, 0.0, 0.3, 2.0]
    old = torch.full((len(advantages), len(ratios)), -1.0, dtype=torch.float64)
    lp = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    a = torch.tensor(advantages, dtype=torch.float64)[:, None].expand(old.shape)
    terms = make_terms(rows=5, time=11, mask=torch.ones(5, 11)).replace(logprobs=lp, old_logprobs=old, advantages=a)
    for high in (0.2, 0.28):
        method = built(AepoClip, clip_high=high)
        loss = method.policy_loss(terms)
        slope = torch.autograd.grad(loss.sum(), lp)[0]
        for i in range(5):
            for j in range(11):
                wanted = loop_clip(float(lp[i, j]), -1.0, advantages[i], 0.2, high, 3.0)
                assert (float(loss[i, j]), float(slope[i, j])) == pytest.approx(wanted), (advantages[i], ratios[j])
        ppo = ppo_clip(lp, old, a, 0.2, high, 3.0)
        torch.testing.assert_close(loss, ppo)
        different = (slope - torch.autograd.grad(ppo.sum(), lp)[0]).abs() > 1e-12
        assert torch.equal(different, (a > 0) & (lp - old > math.log(1 + high)))


def test_the_gradient_beyond_the_range_does_not_grow() -> None:
    old = torch.full((1, 3), -3.0)
    lp = (old + torch.tensor([0.5, 1.0, 2.5])).requires_grad_()
    terms = make_terms(rows=1, time=3, mask=torch.ones(1, 3)).replace(
        logprobs=lp, old_logprobs=old, advantages=torch.ones(1, 3)
    )
    slope = torch.autograd.grad(AepoClip().policy_loss(terms).sum(), lp)[0]
    assert slope[0].tolist() == pytest.approx([-1.2] * 3)


def test_on_policy_it_is_ppo() -> None:
    terms = make_terms(rows=5, time=8, seed=4)
    terms = terms.replace(old_logprobs=terms.logprobs.detach())
    ours = AepoClip().policy_loss(terms)
    on = terms.mask > 0
    ppo = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, 0.2, 0.2, 3.0)
    assert torch.equal(ours[on], ppo[on])
    gradients = [torch.autograd.grad(x[on].sum(), terms.logprobs, retain_graph=True)[0] for x in (ours, ppo)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_masked_tokens_change_nothing(poison: float) -> None:
    terms = make_terms(rows=5, time=7)
    outside = terms.mask == 0
    bad = {k: getattr(terms, k).detach().masked_fill(outside, poison) for k in ("old_logprobs", "advantages")}
    lp = terms.logprobs.detach().masked_fill(outside, poison).requires_grad_()
    loss = AepoClip().policy_loss(terms.replace(**bad, logprobs=lp))
    assert bool((loss[outside] == 0).all())
    assert torch.equal(loss[~outside], AepoClip().policy_loss(terms)[~outside])
    assert bool((torch.autograd.grad(loss.sum(), lp)[0][outside] == 0).all())


def test_logs_of_the_clip_combine_over_micro_batches() -> None:
    terms = make_terms(rows=6, time=9, seed=2)
    terms = terms.replace(old_logprobs=terms.old_logprobs - 1.5 * (terms.logprobs.detach() > -0.8))
    whole, parts = start_stack(AepoClip()), start_stack(AepoClip())
    whole.one("policy_loss", terms)
    for i in range(6):
        names = ("mask", "logprobs", "advantages", "old_logprobs")
        parts.one("policy_loss", terms.replace(**{k: getattr(terms, k)[i : i + 1] for k in names}))
    one = combine([whole.metrics.take()])
    assert one == pytest.approx(combine([parts.metrics.take()]))
    on, a = terms.mask > 0, terms.advantages
    ratio = torch.exp(terms.logprobs.detach() - terms.old_logprobs)
    wanted = {
        "aepo_clip/clipfrac": -a * ratio.clamp(0.8, 1.2) > -a * ratio,
        "aepo_clip/clipfrac_lower": (a < 0) & (ratio > 3),
        "aepo_clip/preserved": (a > 0) & (ratio > 1.2),
    }
    assert one == pytest.approx({k: float(v[on].double().mean()) for k, v in wanted.items()})
    assert all(0 < v < 1 for v in one.values())


# ---- the advantages


def loop_advantages(rollouts: Rollouts, tokens: Tokens, weight: float, z_max: float | None) -> list[float]:
    live = [
        bool(k) and not math.isnan(float(rollouts.reward[r]))
        for k, r in zip(tokens.keep.tolist(), tokens.row.tolist(), strict=True)
    ]
    entropy = tokens.entropies.double().tolist()
    known = [h for h, ok in zip(entropy, live, strict=True) if ok]
    mean = sum(known) / max(1, len(known))
    std = math.sqrt(sum((h - mean) ** 2 for h in known) / (len(known) - 1)) if len(known) > 1 else 0.0
    out = []
    for a, h, ok in zip(tokens.advantages.tolist(), entropy, live, strict=True):
        z = (h - mean) / std if ok and std > 1e-6 * max(1, abs(mean)) else 0.0
        z = max(-z_max, min(z_max, z)) if z_max is not None else z
        out.append(a * (1 + weight * z))
    return out


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_advantages_equal_the_loop(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, NAN]), min_size=n, max_size=n))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    rollouts = make_rollouts(rewards, data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), lengths=lengths)
    seed = data.draw(st.integers(0, 99))
    rng = torch.Generator().manual_seed(seed)
    tokens = make_tokens(rollouts, seed, torch.randn(n, generator=rng, dtype=torch.float64))
    tokens = tokens.replace(keep=torch.rand(len(tokens), generator=rng) > 0.3)
    if data.draw(st.booleans()):
        tokens = tokens.replace(entropies=torch.full_like(tokens.entropies, 0.3))
    weight, z_max = data.draw(st.sampled_from([0.2, 0.0, 2.0])), data.draw(st.sampled_from([None, 0.5]))
    shaped = built(AepoAdvantages, weight=weight, z_max=z_max).shape(rollouts, tokens)
    found = tokens.advantages if shaped is None else shaped.advantages
    assert found.tolist() == pytest.approx(loop_advantages(rollouts, tokens, weight, z_max), abs=1e-9)


def shaped(rollouts: Rollouts, tokens: Tokens, **params: Any) -> Tensor:
    return built(AepoAdvantages, **params).shape(rollouts, tokens).advantages


def test_with_equal_advantages_nothing_is_added_on_the_whole() -> None:
    rollouts = make_rollouts([1.0] * 4, lengths=[3, 5, 2, 7])
    tokens = make_tokens(rollouts, advantages=torch.ones(4))
    after = shaped(rollouts, tokens)
    assert float(after.sum()) == pytest.approx(17)
    z = (tokens.entropies.double() - tokens.entropies.double().mean()) / tokens.entropies.double().std()
    torch.testing.assert_close(after, 1 + 0.2 * z)
    assert bool((after < 0).any()) is bool((z < -5).any()) is False


def test_an_advantage_changes_its_sign_below_minus_five() -> None:
    rollouts = make_rollouts([1.0], lengths=[100])
    entropies = torch.tensor([0.0] + [1.0] * 99)
    tokens = make_tokens(rollouts, advantages=torch.ones(1), entropies=entropies)
    assert float(shaped(rollouts, tokens)[0]) == pytest.approx(1 - 0.2 * 9.9)
    assert float(shaped(rollouts, tokens, z_max=3.0)[0]) == pytest.approx(0.4)
    stack = start_stack(AepoAdvantages())
    stack.call("shape", stack.methods[0], rollouts, tokens)
    logged = combine([stack.metrics.take()])
    assert logged["aepo_advantages/sign_changed"] == pytest.approx(0.01)
    assert logged["aepo_advantages/z_min"] == pytest.approx(-9.9)
    assert logged["aepo_advantages/z_max"] == pytest.approx(0.1)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 50.0])
def test_constant_entropy_changes_nothing(n: int, value: float) -> None:
    rollouts = make_rollouts([1.0], lengths=[n])
    noise = 1e-8 * value * torch.arange(n) / n
    for entropies in (torch.full((n,), value), torch.full((n,), value, dtype=torch.float64) + noise):
        tokens = make_tokens(rollouts, advantages=torch.tensor([0.7]), entropies=entropies)
        assert torch.equal(shaped(rollouts, tokens), tokens.advantages)


def test_unscorable_rows_and_those_that_left_are_out_of_it() -> None:
    rollouts = make_rollouts([1.0, NAN, 0.0, 0.5], lengths=[3, 3, 3, 3])
    tokens = make_tokens(rollouts, advantages=torch.tensor([1.0, 0.0, -1.0, 0.5]))
    tokens = tokens.replace(keep=tokens.row != 3)
    other = tokens.entropies.clone()
    other[(tokens.row == 1) | (tokens.row == 3)] = 99.0
    assert torch.equal(shaped(rollouts, tokens), shaped(rollouts, tokens.replace(entropies=other)))
    none = make_rollouts([NAN] * 4)
    assert AepoAdvantages().shape(none, make_tokens(none)) is None


def test_neutral_weight_leaves_grpo_and_zero_groups_stay_zero() -> None:
    rollouts = make_rollouts([1.0, 0, 0, 1, 1, 1, 1, 1])
    plain = one_step(start_stack(), rollouts)
    assert torch.equal(one_step(start_stack(built(AepoAdvantages, weight=0)), rollouts).advantages, plain.advantages)
    ours = one_step(start_stack(AepoAdvantages()), rollouts)
    group = rollouts.group[make_tokens(rollouts).row]
    assert bool((ours.advantages[group == 1] == 0).all())
    assert not torch.equal(ours.advantages[group == 0], plain.advantages[group == 0]) and not ours.uniform


# ---- environments


class Talk:
    """Says what was said so far; over after `length` turns, or when told so by "!"."""

    alive: Counter[str] = Counter()  # by name: opened and not closed
    length = 4
    fails: str = ""
    hang: Any = None

    def __init__(self) -> None:
        self.said: list[str] = []
        self.open = False
        type(self).alive["made"] += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Talk:
        if self.fails == "copy":
            raise TypeError("not this one")
        twin = type(self)()
        twin.said = list(self.said)
        type(self).alive["copied"] += 1
        return twin

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        if self.fails == "reset":
            raise ValueError("closed today")
        return Observation("")

    def act(self, action: str) -> Observation:
        if self.fails == "act" and len(self.said) == 1:
            raise ValueError("broken")
        if self.fails == "hang" and len(self.said) == 1:
            type(self).hang()
        self.said.append(action)
        done = len(self.said) >= self.length or "!" in action
        return Observation("".join(self.said), reward=0.5, done=done)

    def score(self) -> float:
        return float(len(self.said))

    def close(self) -> None:
        type(self).alive["closed"] += 1


def talk(**attributes: Any) -> type[Talk]:
    return type("Talk", (Talk,), {"alive": Counter(), **attributes})


FLAT = dict.fromkeys("abcdefgh", 0.125)
SHARP = {"a": 0.93, **dict.fromkeys("bcdefgh", 0.01)}


def model(*entropies: Mapping[str, float]) -> Any:
    """One letter and the end in every turn; the letter's distribution by turn, the last one for all later turns."""

    def next_token(text: str) -> Mapping[str, float]:
        said = text.rsplit(">", 1)[-1]
        turn = text.count("<") - 1
        return {EOS: 1.0} if said else entropies[min(turn, len(entropies) - 1)]

    return next_token


def rollout_params(**params: Any) -> Any:
    values = {"environment": Talk, **params}
    return build_params(AepoRollout.Params, acting(AepoRollout.Params, values), "aepo_rollout")


def played(
    k: int = 6, *, engine: TableEngine | None = None, text: str = "go", vocabulary: int = 8, **params: Any
) -> tuple[list[Trajectory], TableEngine, dict[str, float]]:
    changes = params.pop("prompt", {})
    engine = engine or TableEngine(model(FLAT))
    engine.chat.vocabulary = vocabulary
    logged: dict[str, float] = {}
    method = AepoRollout(rollout_params(**{"environment": talk(), **params}))
    prompt = make_prompt(engine.chat, text, n=k, **{"max_tokens": 200, "seed": text, **changes})
    return [row for rollout in run_program(method, prompt, engine, logged) for row in rollout], engine, logged


def assert_books(engine: TableEngine, rows: Sequence[Trajectory]) -> None:
    """Sampled tokens have the model's log-prob of their context, nothing is forced, and what the environment said is
    what it says to these actions: a copy knows what its parent did."""
    for row in rows:
        assert Kind.FORCED not in row.kinds
        for i, (token, kind, logprob) in enumerate(zip(row.tokens, row.kinds, row.logprobs, strict=True)):
            if kind == Kind.SAMPLED:
                true = math.log(engine.probabilities(row.prompt + row.tokens[:i])[token])
                assert logprob == pytest.approx(true)
            else:
                assert math.isnan(logprob)
        text, so_far = "", ""
        for turn in row.turns:
            action = engine.chat.decode(row.tokens[turn.start : turn.stop])
            assert row.tokens[turn.stop - 1] == 0 and set(row.kinds[turn.start : turn.stop]) == {Kind.SAMPLED}
            text, so_far = text + action, so_far + action
            text += f"<{so_far}>"
        read = engine.chat.decode(row.tokens)
        assert text.startswith(read) and text[len(read) :] in ("", f"<{so_far}>")


# ---- the rollout


def test_entropies_are_in_units_of_the_tokenizers_vocabulary() -> None:
    entropies = [played(vocabulary=n)[2]["aepo_rollout/turn_entropy"] for n in (8, 64)]
    assert entropies[0] == pytest.approx(2 * entropies[1]) != 0


def simulate(k: int, m: int, turns: int, params: Any, prompt: Any) -> tuple[list[int | None], int, int]:
    """Where chains branched if all entropies are equal, and how many copies and restarts there were. A loop."""
    rng = prompt.rng("branch")
    chains: list[tuple[int, int | None]] = [(0, None)] * m
    done, made, streak, copies, restarts = [], m, 0, 0, 0
    while chains:
        chains = [(t + 1, b) for t, b in chains]
        done += [b for t, b in chains if t == turns]
        chains = [c for c in chains if c[0] < turns]
        new: list[tuple[int, int | None]] = []
        for t, _ in chains:
            for _ in range(min(params.beam_size - 1, k - made - len(new))):
                if rng.random() * max(0, 1 - params.penalty * streak) >= 0.5:
                    new.append((t, t))
        copies += len(new)
        if not chains and made < k:
            new, restarts = [(0, None)], restarts + 1
        made, streak, chains = made + len(new), streak + 1 if new else 0, chains + new
    return done, copies, restarts


@pytest.mark.parametrize("k", [1, 2, 5, 12])
@pytest.mark.parametrize("given", [{}, {"initial_rollouts": 1}, {"beam_size": 4}, {"beam_size": 1}, {"penalty": 0.5}])
def test_chains_equal_the_loop(k: int, given: dict[str, Any]) -> None:
    environment = talk()
    for number in range(4):
        rows, engine, logged = played(k, environment=environment, text=f"go{number}", **given)
        assert len(rows) == k
        assert_books(engine, rows)
        p = rollout_params(**given)
        m = min(k, p.initial_rollouts or (k + 1) // 2)
        prompt = make_prompt(engine.chat, f"go{number}", n=k, seed=f"go{number}")
        branched, copies, restarts = simulate(k, m, 4, p, prompt)
        assert [r.meta["aepo_branch"] for r in rows] == branched
        assert (logged["aepo_rollout/initial"], logged["aepo_rollout/branches"]) == (m, copies)
        assert logged["aepo_rollout/restarts"] == restarts and m + copies + restarts == k
        assert all(r.meta["turns"] == 4 and r.meta["score"] == 4 and r.meta["done"] for r in rows)
        assert all(len(r.turns) == 4 for r in rows)
    if given.get("beam_size") == 1:
        assert environment.alive["copied"] == 0
    assert environment.alive["closed"] == environment.alive["made"] > 0


def test_a_copy_shares_exactly_what_its_parent_had() -> None:
    found = 0
    for seed in range(6):
        rows, engine, _ = played(8, engine=TableEngine(model(FLAT), seed=seed))
        for row in rows:
            at = row.meta["aepo_branch"]
            if at is None:
                continue
            # up to the observation after turn `at`, some other chain has the same tokens, kinds and log-probs
            length = row.turns[at].start
            twins = [
                r
                for r in rows
                if r is not row
                and r.tokens[:length] == row.tokens[:length]
                and r.kinds[:length] == row.kinds[:length]
                and np.array_equal(r.logprobs[:length], row.logprobs[:length], equal_nan=True)
                and r.turns[:at] == row.turns[:at]
            ]
            found += bool(twins)
            assert twins
    assert found > 5


def test_entropy_of_a_turn() -> None:
    top = [[(0, math.log(0.5)), (1, math.log(0.25))], [(3, 0.0)]]
    assert turn_entropy(top, 8) == pytest.approx((0.5 * math.log(2) + 0.25 * math.log(4)) / math.log(8))
    assert turn_entropy([], 8) == 0
    _, _, logged = played(2, engine=TableEngine(model(FLAT)))
    assert logged["aepo_rollout/turn_entropy"] == pytest.approx(1.0)  # ln 8 / ln 8 and nothing for the end
    _, engine, logged = played(2, top_logprobs=4)
    assert logged["aepo_rollout/turn_entropy"] == pytest.approx(0.5)
    assert {r.top for r in engine.requests} == {4}


def test_only_the_first_tokens_of_a_turn_count() -> None:
    def long(text: str) -> Mapping[str, float]:
        said = text.rsplit(">", 1)[-1]
        return {EOS: 1.0} if len(said) >= 10 else FLAT

    for count, wanted in ((1, 1.0), (4, 4.0), (20, 10.0)):
        _, _, logged = played(2, engine=TableEngine(long), entropy_tokens=count)
        assert logged["aepo_rollout/turn_entropy"] == pytest.approx(wanted)


def branches(entropies: Sequence[Mapping[str, float]], prompts: int = 30, **params: Any) -> Counter[int]:
    """Turn after which chains were copied, over prompts; with 2 chains a prompt and always one copy at most."""
    found: Counter[int] = Counter()
    for i in range(prompts):
        environment = talk(length=3)
        rows, _, _ = played(
            2,
            engine=TableEngine(model(*entropies)),
            text=f"go{i}",
            initial_rollouts=1,
            environment=environment,
            **params,
        )
        found[next((r.meta["aepo_branch"] or 0) for r in reversed(rows))] += 1
    return found


def test_chains_branch_where_entropy_has_risen() -> None:
    """The change enters with its sign: 20 x +-0.8 decides whatever u is."""
    assert branches([SHARP, FLAT, FLAT], entropy_weight=20)[2] >= 12  # first turn: as without entropy
    second = branches([SHARP, FLAT, FLAT], entropy_weight=20, branch_probability=1.0)
    assert second == {2: 30}
    fallen = branches([FLAT, SHARP, SHARP], entropy_weight=20)
    assert fallen[2] == 0 and fallen[1] > 5
    even = branches([FLAT], entropy_weight=0.2)
    assert 8 <= even[1] <= 22  # u alone: one half


def test_a_copy_measures_from_its_own_first_turn() -> None:
    """Entropy rises once, behind turn 1. The parent has risen ever since, a copy has not."""
    environment = talk(length=4)
    rows, _, _ = played(
        5,
        engine=TableEngine(model(SHARP, FLAT)),
        environment=environment,
        initial_rollouts=1,
        entropy_weight=20,
        branch_probability=1.0,
    )
    # its copy of turn 2 does not branch after turn 3; then one starts anew and branches in its turn 2
    assert Counter(r.meta["aepo_branch"] for r in rows) == {None: 2, 2: 2, 3: 1}


def test_chances_properties() -> None:
    p = rollout_params()
    for u in (0.0, 0.3, 0.7, 0.999):
        for streak in range(30):
            by_entropy = [branch_chance(u, d, streak, p) for d in (-3, -1, 0, 1, 3)]
            assert by_entropy == sorted(by_entropy) and 0 <= by_entropy[0] <= by_entropy[-1] <= 1
            assert branch_chance(u, 0.5, streak + 1, p) <= branch_chance(u, 0.5, streak, p)
        assert branch_chance(u, 50.0, 20, p) == 0
    assert branch_chance(0.5, 1.0, 0, rollout_params(entropy_weight=0)) == 0.5


def test_the_probe_decides_how_many_start() -> None:
    for k in (1, 8, 12):
        gaps = np.linspace(-8, 8, 33)
        found = [initial_rollouts(k, 8 + g, 8.0, 0.5) for g in gaps]
        assert found == sorted(found) and found[0] >= 1 and found[-1] == k
    for entropies in ((FLAT, SHARP), (SHARP, FLAT)):
        environment = talk()
        rows, engine, logged = played(
            8,
            engine=TableEngine(model(*entropies)),
            environment=environment,
            probe=True,
            probe_weight=5,
            probe_tokens=7,
        )
        h = [turn_entropy([[(0, math.log(p)) for p in d.values()]], 8) for d in entropies]
        tool = (h[0] + 3 * h[1]) / 4
        assert logged["aepo_rollout/initial"] == initial_rollouts(8, h[0], tool, 5) != 5
        assert len(rows) == 8  # the probe is thrown away
        assert sum(r.max_tokens == 7 for r in engine.requests) == 1 and engine.requests[0].max_tokens == 7
        assert environment.alive["closed"] == environment.alive["made"]


def test_evaluation_plays_plain_rollouts() -> None:
    environment = talk()
    rows, engine, logged = played(5, environment=environment, probe=True, prompt={"training": False})
    assert [r.meta["aepo_branch"] for r in rows] == [None] * 5 and environment.alive["copied"] == 0
    assert len(engine.requests) == 5 * 4 and logged == {}
    assert AepoRollout.in_eval == ("rollout",)


def test_environments_that_break_hang_or_cannot_be_copied(stuck: Stuck) -> None:
    for fails in ("act", "hang"):
        environment = talk(fails=fails, length=3, hang=stuck)
        rows, engine, _ = played(4, environment=environment, timeout=SOON if fails == "hang" else NEVER)
        assert len(rows) == 4 and stuck.waiting == stuck.calls == 4 * (fails == "hang")
        assert_books(engine, rows)
        for row in rows:
            assert row.meta["turns"] == 2 and row.meta["error"] and not row.meta["done"]
            assert math.isnan(row.meta["score"]) and row.turns[-1].valid is False
        assert environment.alive["closed"] == environment.alive["made"]
    environment = talk(fails="copy")
    rows, engine, logged = played(6, environment=environment)
    assert len(rows) == 6 and logged["aepo_rollout/branches"] == 0 and logged["aepo_rollout/restarts"] == 3
    assert environment.alive["closed"] == environment.alive["made"] == 6
    environment = talk(fails="reset")
    rows, engine, logged = played(5, environment=environment)
    assert len(rows) == environment.alive["made"] == environment.alive["closed"] == 5 and not engine.requests
    for row in rows:
        assert len(row) == 0 and "cannot be reset: ValueError: closed today" in row.meta["error"]
        assert math.isnan(row.meta["score"]) and row.rewards is not None
    rows, engine, _ = played(5, environment=talk(fails="reset"), probe=True)
    assert len(rows) == 5 and not engine.requests  # nothing is probed


def test_an_environment_that_ends_early_ends_its_chain() -> None:
    shout = {"!": 0.5, "a": 0.5}
    rows, engine, _ = played(9, engine=TableEngine(model(shout)), environment=talk(length=9), max_turns=3)
    assert len(rows) == 9
    assert_books(engine, rows)
    for row in rows:
        text = engine.chat.decode(row.tokens)
        assert row.meta["done"] == ("!" in text.rsplit(">", 1)[-1])
        assert row.meta["done"] or row.meta["turns"] == 3
    assert len({r.meta["turns"] for r in rows}) > 1


@pytest.mark.parametrize("abort", [None, 0, 1])
@pytest.mark.parametrize("room", [{}, {"max_tokens": 1}, {"max_tokens": 6}, {"max_context": 9}, {"max_context": 3}])
def test_little_room_and_interruptions(abort: int | None, room: dict[str, int]) -> None:
    engine = TableEngine(model(FLAT), abort_after=abort)
    environment = talk()
    rows, _, _ = played(5, engine=engine, environment=environment, prompt=room)
    assert len(rows) == 5
    limit = min(room.get("max_tokens", 200), room.get("max_context", 999) - 4)
    for row in rows:
        assert len(row) <= max(0, limit)
        sampled = [p for p, kind in zip(row.logprobs, row.kinds, strict=True) if kind == Kind.SAMPLED]
        assert not any(map(math.isnan, sampled))
        if abort == 0 or limit <= 0:
            assert not sampled and row.turns == ()
        elif row.kinds:
            assert row.kinds[-1] == Kind.SAMPLED  # no observation without room for an answer
    assert environment.alive["closed"] == environment.alive["made"]


def test_a_dying_engine_closes_every_environment() -> None:
    environment = talk()
    with pytest.raises(RuntimeError, match="the engine died"):
        played(5, engine=TableEngine(model(FLAT), fail_after=7), environment=environment)
    assert environment.alive["closed"] == environment.alive["made"] >= 3


def test_a_program_does_not_depend_on_its_neighbors() -> None:
    method = AepoRollout(rollout_params(environment=talk()))

    def alone(text: str) -> Any:
        engine = TableEngine(model(FLAT), seed=5)
        return run_program(method, make_prompt(engine.chat, text, n=6, seed=text), engine)

    engine = TableEngine(model(FLAT), seed=5)
    prompts = [make_prompt(engine.chat, text, n=6, seed=text) for text in ("one", "two", "three")]
    together = run_program(method, prompts, engine)
    for rows, text in zip(together, ("one", "two", "three"), strict=True):
        for mine, other in zip(rows, alone(text), strict=True):
            assert mine[0].tokens == other[0].tokens and mine[0].meta == other[0].meta
    assert [r[0].tokens for r in alone("one")] == [r[0].tokens for r in alone("one")]


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    played(6)
    until(lambda: threading.active_count() <= before, "the end of the threads")


def test_with_the_demos_calculator() -> None:
    """A real environment with a sandbox: copies share it."""
    from rl_plugins.lab.demo.environments.calculator import Calculator

    row = Calculator.rows(1, levels=[2])[0]

    def policy(text: str) -> Mapping[str, float]:
        said = text.rsplit(">", 1)[-1]
        return {EOS: 1.0} if len(said) == 5 else {"[1+2]"[len(said)]: 1.0} if len(said) else {"[": 0.9, "=": 0.1}

    engine = TableEngine(policy)
    prompt = make_prompt(engine.chat, row["prompt"][0]["content"], n=4, max_tokens=120, columns=row)
    environment = card_file(AepoRollout).example_params["environment"]
    method = AepoRollout(rollout_params(environment=environment, initial_rollouts=1))
    logged: dict[str, float] = {}
    rows = [r for rollout in run_program(method, prompt, engine, logged) for r in rollout]
    assert len(rows) == 4 and not any(r.meta["error"] for r in rows)
    assert logged["aepo_rollout/branches"] > 0
    assert any("<3>" in engine.chat.decode(r.tokens) for r in rows)


# ---- all of it


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("aepo_rollout", {}),
        ("aepo_rollout", {"environment": "no.such:thing"}),
        ("aepo_rollout", {"environment": Talk, "probe": True, "initial_rollouts": 3}),
        ("aepo_rollout", {"environment": Talk, "beam_size": 0}),
        ("aepo_rollout", {"environment": Talk, "branch_probability": 1.5}),
        ("aepo_clip", {"clip_low": 1.0}),
        ("aepo_clip", {"dual_clip": 1.0}),
        ("aepo_advantages", {"weight": -1}),
    ],
)
def test_parameters_out_of_range(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"Method `{name}`"):
        build_stack(name, {name: params})


def test_the_bundle_needs_an_environment() -> None:
    with pytest.raises(ConfigError, match="`environment` is not given"):
        build_stack("aepo")
    stack = build_stack("aepo", {"aepo_rollout": {"environment": Talk, "top_logprobs": 5}})
    assert stack.names == list(AEPO.parts)
    assert stack.needs == {"tokens", "entropies", "several_updates", "engine:logprobs=5", "chat_template"} | {
        "several_rollouts"
    }
    assert not any("forced_tokens" in m.brings for m in stack.methods)
    assert build_stack(["aepo", "-aepo_rollout"]).names == ["aepo_clip", "aepo_advantages"]
