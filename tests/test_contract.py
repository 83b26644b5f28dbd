"""The contract, for every built-in method, and for methods that break it on purpose: each must be caught by name."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import case_of

from rl_plugins.core.denoising import Denoise
from rl_plugins.core.groups import Groups
from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.method import HOOKS, Bundle, Method
from rl_plugins.core.params import MethodParams, build_params, param
from rl_plugins.core.requests import Generate, Score, Trajectory, together
from rl_plugins.core.rollouts import Admission, Shape, Update
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import CardFile, Paper, card_file
from rl_plugins.testing import check_method
from rl_plugins.testing.contract import documents
from rl_plugins.testing.contract.documents import section_problems

BUILT_IN = [name for name in registry.all_names() if not any(o.distribution for o in registry.origins_of(name))]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    found = registry.load(name)
    if isinstance(found, Bundle):
        for part, params in found.parts.items():
            build_params(registry.load(part).Params, {**case_of(part).params, **params}, part)
        assert card_file(found).about
        return
    case = case_of(name)
    report = check_method(found, prepare=case.prepare, rows=case.rows or (), **case.params)
    assert report.hooks == found.claims()
    assert len(report.checks) >= 7
    if "policy_loss" in report.hooks or "regularize" in report.hooks:
        assert any(check.startswith("losses") for check in report.checks)


def test_there_are_built_in_methods():
    assert BUILT_IN


# ---- a method that claims every hook and keeps the contract


@dataclass(frozen=True)
class ToyParams(MethodParams):
    scale: float = param(1.0, "of the advantages", gt=0, le=10)
    spare: int = param(1, "rollouts that leave again", ge=0)
    limits: tuple[float, ...] = param((0.2, 0.2), "clip range", ge=0, lt=1)


def start(self, run):
    self.state = {"seen": torch.zeros(run.dataset_size, dtype=torch.float64), "batches": 0, "last": [0.5]}


def select_prompts(self, pool, n):
    free = np.array([i for i in range(pool.size) if i not in pool.taken])
    seen = self.state["seen"].numpy()[free] + 0.1 * self.rng("prompts").random(len(free))
    return free[np.argsort(seen, kind="stable")[:n]].tolist()


def plan(self, plan):
    return plan.replace(rows=tuple(r.replace(spare=r.spare + self.params.spare, payload="toy") for r in plan.rows))


def rewards(self, rollouts):
    return rollouts.reward - 0.01 * rollouts.length


async def async_rewards(self, rollouts):
    return rollouts.reward - 0.01 * rollouts.length


def select(self, rollouts):
    """The last rollout of every group of three or more leaves."""
    groups = rollouts.groups
    return (rollouts.rollout < groups.rows(groups.max(rollouts.rollout))) | (groups.rows(groups.size) < 3)


def teacher_prompts(self, rollouts):
    return [f"of reward {r}" if r > 0 else None for r in rollouts.reward.tolist()]


def advantages(self, rollouts):
    groups = rollouts.groups
    return self.params.scale * (rollouts.reward - groups.rows(groups.mean(rollouts.reward)))


def shape(self, rollouts, tokens):
    return Shape(
        advantages=tokens.advantages * (1 + tokens.entropies),
        keep_tokens=tokens.position < 3,
        row_columns={"size": rollouts.groups.rows(rollouts.groups.size)},
        token_columns={"late": (tokens.position > 0).float()},
    )


def observe(self, rollouts, tokens, stats):
    known = rollouts.prompt_index >= 0
    seen = self.state["seen"].clone()
    seen.index_add_(0, rollouts.prompt_index[known], torch.ones(int(known.sum()), dtype=torch.float64))
    self.state["seen"] = seen
    self.state["batches"] += 1
    self.state["last"] = rollouts.reward.tolist()[:3]


def admit(self, queue):
    go = tuple(range(min(len(queue.carried), queue.groups)))
    return Admission(2 * queue.groups - len(go), resume=go)


def plain(self, prompt):
    made = yield Generate(prompt.start(), n=prompt.n)
    return [prompt.start().add(g) for g in made]


def before_update(self, rows):
    drift = (rows.logprobs - rows.old_logprobs) / rows.length.clamp(min=1)
    return Update(lr_scale=1 / (1 + float(drift.abs().mean())), columns={"drift": drift})


def policy_loss(self, terms):
    low, high = self.params.limits
    loss = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, low, high) * terms.columns["size"]
    self.log("late", (terms.columns["late"] * terms.mask).sum(), "sum")
    return loss * torch.exp(terms.columns["drift"])


def regularize(self, terms):
    return -0.01 * terms.entropies


DOC = """A method that does a little of everything, to test the test.

    A = scale (r - mean)

Rewards and advantages are (rows,) float64; errors are those of its parameters.
Logs: `late`.
Source: arXiv 2402.03300.
"""

GOOD: dict[str, Any] = {
    "__doc__": DOC,
    "__module__": "rl_plugins.methods.toy",  # prose is a must in the package
    "name": "toy",
    "fidelity": "paper",
    "card": CardFile(
        "toy",
        Paper("2402.03300", "A paper for tests", "Nobody", 2024),
        use_when="You test the test.",
        avoid_when="You train.",
    ),
    "needs": frozenset(
        {"tokens", "entropies", "old_logprobs", "teacher_logprobs", "current_logprobs", "current_entropies"}
        | {"prompt_index"}
    ),
    "Params": ToyParams,
}
ALL_HOOKS = {
    "start": start,
    "select_prompts": select_prompts,
    "plan": plan,
    "admit": admit,
    "rollout": plain,
    "rewards": rewards,
    "select": select,
    "teacher_prompts": teacher_prompts,
    "advantages": advantages,
    "shape": shape,
    "observe": observe,
    "before_update": before_update,
    "policy_loss": policy_loss,
    "regularize": regularize,
}


@pytest.fixture(autouse=True)
def cards(monkeypatch):
    """The card of a toy is its attribute `card`, in the place of a file."""
    monkeypatch.setattr(documents, "card_file", lambda cls: getattr(cls, "card", None) or card_file(cls))


def toy(**members) -> type[Method]:
    """A class with these hooks and attributes, otherwise without a fault."""
    return type("Toy", (Method,), {**GOOD, **members})


def problems(cls, **options) -> str:
    """What check_method says, without the places."""
    with pytest.raises(AssertionError) as caught:
        check_method(cls, **options)
    text = str(caught.value)
    assert text.startswith("`toy` breaks the contract")
    return text


def test_a_good_method_with_every_hook_passes():
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    report = check_method(toy(**ALL_HOOKS), scale=2.0)
    assert report.hooks == tuple(HOOKS)
    assert len(report.checks) == 18
    assert [told.split(":")[0] for told in report.not_checked] == ["`rollout`", "`admit`"]
    assert report.warnings == ()
    assert "toy keeps the contract" in str(report)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert (generators[1] == np.random.get_state()[1]).all() and generators[2] == random.getstate()


def test_asynchronous_rewards_pass():
    check_method(toy(rewards=async_rewards))


def test_what_needs_a_real_engine_is_named():
    report = check_method(toy(rollout=plain, advantages=advantages))
    (told,) = report.not_checked
    assert told.startswith("`rollout`: your model's tokenizer and chat template")
    assert "not checked  `rollout`" in str(report)
    assert sum("engine" in check for check in report.checks) == 3, report.checks
    assert not any("engine" in check for check in check_method(toy(advantages=advantages)).checks)


def test_what_a_program_notes_reaches_the_other_hooks():
    """A column that only the program makes is read by `rewards`, of exactly the rows that were made."""
    seen = []

    def noted(self, prompt):
        (made,) = yield Generate(prompt.start())
        return [prompt.start().add(made).noted(places=[len(made.tokens)])] * prompt.n

    def rewards(self, rollouts):
        made = all(isinstance(places, list) for places in rollouts.meta["places"])
        if made:
            assert [places[0] for places in rollouts.meta["places"]] == rollouts.length.tolist()
            seen.append(len(rollouts))
        return rollouts.reward

    check_method(toy(rollout=noted, rewards=rewards, needs=frozenset({"column:places"})))
    assert seen == [16]


def test_decisions_see_what_a_program_of_a_diffusion_policy_notes_of_its_samples():
    seen = []

    def noted(self, prompt):
        return [x.noted(places=[t.step for t in x.trained]) for x in (yield from flows(self, prompt))]

    def shape(self, rollouts, tokens):
        if len(rollouts) and all(isinstance(places, list) for places in rollouts.meta["places"]):
            assert [t for places in rollouts.meta["places"] for t in places] == tokens.position.tolist()
            assert tokens.old_logprobs.unique().numel() == len(tokens)
            seen.append(len(tokens))

    needs = frozenset({"column:places", "tokens", "old_logprobs"})
    report = check_method(toy(rollout=noted, shape=shape, needs=needs, hosts=("diffusion",)))
    assert seen == [16 * 20] and any("programs of diffusion policies" in check for check in report.checks)


def test_prose_is_advice_for_a_method_of_your_own():
    members = {k: v for k, v in GOOD.items() if k != "fidelity"}
    own = {**members, "__doc__": None, "__module__": "mine", "card": CardFile("toy"), "advantages": advantages}
    report = check_method(type("Toy", (Method,), own))
    assert report.warnings == (
        "the docstring has 0 lines; it must open with the update rule and name symbols, shapes, errors and the source.",
        "`use_when` and `avoid_when` of its card are empty; one sentence helps users choose.",
    )
    assert str(report).count("  warning      ") == 2 and "prose: source" not in str(report)
    card = replace(GOOD["card"], paper=Paper("0000", "T", "A", 2026))
    of_a_paper = check_method(toy(advantages=advantages, __module__="mine", card=card))
    assert "an arXiv id such as 2402.03300" in of_a_paper.warnings[0]
    assert "an arXiv id such as 2402.03300" in problems(toy(advantages=advantages, card=card))
    inside = type("Toy", (Method,), {**own, "__module__": "rl_plugins.methods.toy"})
    assert "an arXiv id such as 2402.03300" in problems(inside)


# ---- methods that break it


def ragged_shape(self, rollouts):
    return advantages(self, rollouts)[:-1]


def nan_leak(self, rollouts):
    index = rollouts.groups.index
    mean = torch.stack([rollouts.reward[index == g].mean() for g in range(rollouts.groups.count)])
    return rollouts.reward - mean[index]


def nan_lengths(self, rollouts):
    groups, length = rollouts.groups, rollouts.length.double()
    centered = rollouts.reward - groups.rows(groups.mean(rollouts.reward))
    return torch.where(length > groups.rows(groups.mean(length)), 0.5 * centered, centered)


def nan_counts(self, rollouts):
    filled = rollouts.reward.nan_to_num(nan=0.0)
    return filled - rollouts.groups.rows(rollouts.groups.mean(filled))


def no_epsilon(self, rollouts):
    return advantages(self, rollouts) / rollouts.groups.rows(rollouts.groups.std(rollouts.reward))


def best_of_none(self, rollouts):
    return advantages(self, rollouts) / (1 + rollouts.reward.nan_to_num(nan=0.0).abs().max())


def equal_groups(self, rollouts):
    return (rollouts.reward.view(-1, 4) - rollouts.reward.view(-1, 4).mean(1, keepdim=True)).flatten()


def float32(self, rollouts):
    return advantages(self, rollouts).float()


def torch_generator(self, rollouts):
    return advantages(self, rollouts) + 0 * torch.rand(len(rollouts), dtype=torch.float64)


def numpy_generator(self, rollouts):
    np.random.random()
    return advantages(self, rollouts)


def random_module(self, rollouts):
    random.random()
    return advantages(self, rollouts)


def mutates(self, rollouts):
    rollouts.reward.sub_(rollouts.groups.rows(rollouts.groups.mean(rollouts.reward)))
    return rollouts.reward


def mutates_list(self, rollouts):
    rollouts.text[0] = "changed"
    return advantages(self, rollouts)


def by_order(self, rollouts):
    return advantages(self, rollouts) * torch.linspace(1, 2, len(rollouts), dtype=torch.float64)


def first_leaves(self, rollouts):
    """Which rows leave depends on the order of all rows, and so does how many of each group."""
    return torch.arange(len(rollouts)) >= len(rollouts) // 4


def undeclared(self, rollouts, tokens):
    return Shape(advantages=tokens.advantages * tokens.old_logprobs)


def unseeded(self, rollouts):
    return advantages(self, rollouts) * np.random.default_rng().random()


def one(self, prompt):
    (made,) = yield Generate(prompt.start())
    return prompt.start().add(made)


def grafted(self, prompt):
    """The second half of one rollout behind the first half of another, with its log-probs."""
    rows = yield from together([one(self, prompt) for _ in range(prompt.n)])
    halves = itertools.pairwise(rows)
    mixed = [replace(a, **{n: [*getattr(a, n)[:3], *getattr(b, n)[3:]] for n in COLUMNS}) for a, b in halves]
    return [*mixed, rows[-1]]


COLUMNS = ("tokens", "kinds", "logprobs", "versions")


def by_hand(self, prompt):
    row = yield from one(self, prompt)
    return [replace(row, versions=[0] * len(row))]


def hinted(self, prompt):
    (made,) = yield Generate(prompt.start().force((97,)), max_tokens=4)
    return [prompt.start().force((97,)).add(made)]


def scored_too_early(self, prompt):
    (made,) = yield Generate(prompt.start(), max_tokens=2)
    begun = prompt.start().add(made)
    scored = yield Score(begun)
    (rest,) = yield Generate(begun)
    return [begun.add(rest).scored(scored)] * prompt.n


def alone(self, prompt):
    rows = yield from plain(self, prompt)
    return [replace(row, group=i) for i, row in enumerate(rows)]


def top_of_two(self, prompt):
    made = yield Generate(prompt.start(), n=prompt.n, top=2)
    return [prompt.start().add(g) for g in made]


def without_prefix(self, prompt):
    made = yield Generate(Trajectory(prompt.tokens), n=prompt.n)
    return [Trajectory(prompt.tokens).add(g) for g in made]


def last_token(self, prompt):
    rows = yield from plain(self, prompt)
    return [row for row in rows if row.tokens[-1] is not None]


def own_chance(self, prompt):
    limit = int(np.random.default_rng().integers(2, 20))
    made = yield Generate(prompt.start(), n=prompt.n, max_tokens=limit)
    return [prompt.start().add(g) for g in made]


def global_chance(self, prompt):
    random.random()
    return (yield from plain(self, prompt))


def nothing(self, prompt):
    yield Generate(prompt.start(), n=prompt.n)
    return []


def draws_at_the_start(self, run):
    start(self, run)
    self.state["first"] = np.random.random()


def one_more(self, prompt):
    rows = yield from plain(self, prompt)
    return [*rows, rows[0]]


def texts(self, prompt):
    rows = yield from plain(self, prompt)
    return [prompt.chat.decode(row.tokens) for row in rows]


def flows(self, prompt):
    made = yield [Denoise(prompt.start(seed)) for seed in prompt.seeds(prompt.n)]
    return [x for (x,) in made]


def flows_by_chance(self, prompt):
    (made,) = yield Denoise(prompt.start(random.SystemRandom().randrange(2**31 - 1)))
    return [made]


def flows_with_torch(self, prompt):
    torch.rand(1)
    return (yield from flows(self, prompt))


def flows_half_way(self, prompt):
    return (yield Denoise(prompt.start(1), steps=1))


def a_text(self, prompt):
    yield "continue"


def remembers(self, prompt):
    self.state["prompts"] = 1
    return (yield from plain(self, prompt))


def wants_a_reward(self, prompt):
    row = yield from one(self, prompt)
    scored = yield Score(row)
    return [row.scored(scored)] * int(scored.reward + 1)


def misread(self, rollouts):
    return rollouts.reward + torch.tensor([m["x"] if isinstance(m, list) else 0.0 for m in rollouts.meta["told"]])


def told(self, prompt):
    rows = yield from plain(self, prompt)
    return [row.noted(told=[1, 2]) for row in rows]


def never_goes_on(self, queue):
    return Admission(2 * queue.groups)


def by_chance(self, queue):
    go = tuple(i for i in range(len(queue.carried)) if np.random.default_rng().random() < 0.5)
    return Admission(2 * queue.groups, resume=go)


def too_few(self, queue):
    return Admission(queue.groups - 1)


def mean_loss(self, terms):
    loss = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages)
    return (loss * terms.mask).sum() / terms.mask.sum() * torch.ones_like(loss)


def scalar_loss(self, terms):
    return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages).mean()


def centered_loss(self, terms):
    loss = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages)
    return loss - terms.advantages.mean()


def sequence_ratio_leaks(self, terms):
    log_ratio = (terms.logprobs - terms.old_logprobs).sum(1, keepdim=True)
    return -torch.exp(log_ratio.clamp(-5, 5)) * terms.advantages


def padding_leaks(self, terms):
    loss = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages)
    return loss / terms.mask.shape[1]


def nan_when_empty(self, terms):
    tokens = terms.mask.sum(1, keepdim=True)
    mean = (terms.logprobs * terms.mask).sum(1, keepdim=True) / tokens
    return -(mean * terms.advantages).expand_as(terms.logprobs) * (tokens / tokens)


def overflowing(self, terms):
    return -torch.exp(1000 * (terms.logprobs - terms.old_logprobs).abs()) * terms.advantages


def detached(self, terms):
    return -terms.logprobs.detach() * terms.advantages


def neighbours(self, terms):
    """A term that reaches over rows."""
    return -(terms.logprobs + terms.logprobs.flip(0)) * terms.advantages


def object_in_state(self, rollouts, tokens, stats):
    self.state["prompts"] = set(rollouts.prompt_index.tolist())


def number_keys(self, rollouts, tokens, stats):
    self.state["prompts"] = {int(i): 1.0 for i in rollouts.prompt_index}


def hidden_state(self, rollouts):
    self.count = getattr(self, "count", 0) + 1
    return advantages(self, rollouts) * self.count


def state_in_loss(self, terms):
    return -terms.logprobs * terms.advantages * self.state.get("scale", 1.0)


def state_before_update(self, rows):
    self.state["calls"] = 1


def grows(self, plan):
    self.state["extra"] = self.state.get("extra", 0) + 1
    return plan.replace(rows=tuple(r.replace(spare=self.state["extra"]) for r in plan.rows))


def too_many(self, plan):
    return plan.replace(rows=tuple(r.replace(n=r.n + 1) for r in plan.rows))


def other_prompts(self, plan):
    return plan.replace(rows=tuple(r.replace(prompt_index=r.prompt_index + 1) for r in plan.rows))


def negative(self, plan):
    return plan.replace(rows=tuple(r.replace(spare=-1) for r in plan.rows))


def same_prompt(self, pool, n):
    return [0] * n


def ignores_taken(self, pool, n):
    return list(range(n))


def weighs_by_position(self, rows):
    return Update(lr_scale=float((torch.arange(len(rows.length)) * rows.length).sum() + 1))


def negative_rate(self, rows):
    return Update(lr_scale=-1.0)


def needs_two_batches(self, rollouts, tokens, stats):
    self.state["seen"] = [*self.state.get("seen", []), rollouts.batch]
    if len(self.state["seen"]) > len(set(self.state["seen"])):
        raise ValueError("seen before")


BROKEN = [
    # what breaks, the fault's name in the message
    (dict(advantages=ragged_shape), "one number per row"),
    (dict(advantages=nan_leak), "gives NaN to rows that have a reward"),
    (dict(advantages=nan_counts), "change when unscorable rows"),
    (dict(advantages=nan_lengths), "change when unscorable rows"),
    (dict(advantages=no_epsilon), "groups of equal rewards"),
    (dict(advantages=best_of_none), "[every row left]"),
    (dict(advantages=equal_groups), "is invalid for input of size"),
    (dict(advantages=float32), "torch.float32"),
    (dict(advantages=torch_generator), "global random generator of torch"),
    (dict(advantages=numpy_generator), "global random generator of numpy"),
    (dict(advantages=random_module), "global random generator of random"),
    (dict(advantages=mutates), "`advantages` changes its input (`reward`)"),
    (dict(advantages=mutates_list, needs={"text"}), "`advantages` changes its input (`text"),
    (dict(advantages=by_order), "depend on the order of the rows (`advantages`)"),
    (dict(select=first_leaves), "how many rows of each group and reward stay depends on the order"),
    (dict(select=lambda self, r: torch.ones(len(r))), "bool tensor"),
    (dict(shape=undeclared, needs=set()), "`toy` reads `tokens`, and does not ask for them"),
    (dict(advantages=unseeded), "two runs with the same seed and data differ"),
    (dict(policy_loss=mean_loss), "`policy_loss` depends on the split into micro-batches"),
    (dict(policy_loss=scalar_loss), "it must be (rows, time), one value per token"),
    (dict(policy_loss=centered_loss), "`policy_loss` depends on the split into micro-batches"),
    (dict(policy_loss=sequence_ratio_leaks), "`policy_loss` depends on values at masked tokens"),
    (dict(policy_loss=sequence_ratio_leaks), "`policy_loss` has a gradient at masked tokens"),
    (dict(policy_loss=padding_leaks), "`policy_loss` depends on the width of the padding"),
    (dict(policy_loss=nan_when_empty), "`policy_loss` or its gradient is not finite"),
    (dict(policy_loss=overflowing), "`policy_loss` or its gradient is not finite"),
    (dict(policy_loss=detached), "`policy_loss` has no gradient"),
    (dict(policy_loss=neighbours), "`policy_loss` depends on the order of the rows"),
    (dict(regularize=lambda self, terms: 0.1 * terms.mask), "`regularize` has no gradient"),
    (dict(__init__=lambda self, params=None: sys.exit(0)), "cannot be built: SystemExit"),
    (dict(__init__=lambda self, params=None: None), "`Toy.__init__` must call `super().__init__(params)`"),
    (dict(rollout=nothing), "returns no rollout for any prompt"),
    (dict(start=draws_at_the_start), "uses the global random generator of numpy in `start`"),
    (dict(regularize=mean_loss), "`regularize` depends on the split into micro-batches"),
    (dict(observe=object_in_state), "is a set; it must be"),
    (dict(observe=number_keys), "keys must be text"),
    (dict(advantages=hidden_state), "a resumed run decides otherwise"),
    (dict(policy_loss=state_in_loss), "reads self.state in the update place"),
    (dict(before_update=state_before_update), "reads self.state in the update place"),
    (dict(plan=grows), "`plan` accumulates"),
    (dict(plan=too_many), "`plan` trains 20 rows of a budget of 16"),
    (dict(plan=other_prompts), "which were not chosen"),
    (dict(plan=negative), "negative number of rollouts"),
    (dict(select_prompts=same_prompt), "must return n different prompts"),
    (dict(select_prompts=ignores_taken), "must return n different prompts"),
    (dict(rollout=grafted), "was sampled behind"),
    (dict(rollout=grafted), "Tokens sampled in another context lose theirs"),
    (dict(rollout=by_hand), "has the version 0, and weights 7 made it"),
    (dict(rollout=hinted), 'say so: `brings = {"forced_tokens"}`'),
    (dict(rollout=scored_too_early), "Score the finished row"),
    (dict(rollout=alone), "every row has a `group` of its own ([0, 1, 2]), so nothing is compared"),
    (dict(rollout=top_of_two), 'add "engine:logprobs=2" to `needs`'),
    (dict(rollout=without_prefix), "lacks the prefix of the plan; begin with `prompt.start()`. [a forced prefix]"),
    (dict(rollout=last_token), "IndexError"),
    (dict(rollout=own_chance), "the same engine give other rows"),
    (
        dict(rollout=global_chance),
        "failed in `rollout`: it uses the global random generator of random; use `prompt.rng(purpose)`",
    ),
    (dict(rollout=one_more), "the program returned 5 rollouts for a prompt that asks for 4"),
    (dict(rollout=texts), "the program returned a list with str instead of a trajectory"),
    (dict(rollout=a_text), "it yielded str. Yield Generate, Score or Call"),
    (dict(rollout=flows_by_chance, hosts=("diffusion",)), "the same prompts give other samples; seeds come from"),
    (
        dict(rollout=flows_with_torch, hosts=("diffusion",)),
        "failed in `rollout`: it uses the global random generator of torch",
    ),
    (dict(rollout=flows_half_way, hosts=("diffusion",)), "a sample has 1 of 20 steps"),
    (dict(rollout=plain, hosts=("diffusion",)), "SamplePrompt.start() missing"),
    (dict(rollout=flows), "'Prompt' object has no attribute 'seeds'"),
    (dict(rollout=lambda self, prompt: None), "it returned NoneType instead of a generator"),
    (dict(rollout=remembers), "reads self.state in the generation place"),
    (dict(rollout=wants_a_reward), "cannot convert float NaN to integer"),
    (dict(rollout=told, rewards=misread, needs={"column:told"}), "list indices must be integers"),
    (dict(admit=never_goes_on), "more and more groups wait"),
    (dict(admit=by_chance), "`admit` decides differently when it is asked the same again"),
    (dict(admit=too_few), "it starts 3 groups, and the batch trains 4"),
    (dict(before_update=weighs_by_position), "`before_update` depends on the order of the rows (`lr_scale`)"),
    (dict(before_update=negative_rate), "a finite lr_scale >= 0"),
    (dict(observe=needs_two_batches), "seen before"),
    (dict(advantages=advantages, __doc__=None), "the docstring has 0 lines"),
    (dict(advantages=advantages, __doc__=DOC.replace("2402.03300", "a paper")), "does not name its source"),
    (dict(advantages=advantages, __doc__=DOC.replace("Logs", "Logged")), "section `Logged:`; the name is `Logs:` now"),
    (dict(advantages=advantages, __doc__=DOC + "Errors: none."), "section `Errors:`; the name is `Raises:` now"),
    (dict(advantages=advantages, __doc__=DOC + "\nBooks: none."), "section `Books:`, which is not among"),
    (dict(advantages=advantages, __doc__=DOC + "\nState: none."), "sections are Logs, Source, State; the order is"),
    (dict(advantages=advantages, __doc__=DOC + "\nLogs: none."), "sections are Logs, Source, Logs; the order"),
    (dict(advantages=advantages, fidelity="reconstruction"), "what was not published"),
    (dict(advantages=advantages, fidelity="guess"), "`fidelity`"),
    (dict(advantages=advantages, card=replace(GOOD["card"], use_when="")), "`use_when` of its card is empty"),
    (dict(advantages=advantages, card=replace(GOOD["card"], avoid_when="")), "`avoid_when` of its card is empty"),
    (dict(advantages=advantages, needs={"logits"}), "`needs` has 'logits'"),
    (dict(advantages=advantages, in_eval=("sample",)), "in_eval` is ('sample',); it must be names of hooks"),
    (dict(advantages=lambda self: 0), "must take (self, rollouts)"),
    (dict(advantage=advantages), "Did you mean `advantages`?"),
]


@pytest.mark.parametrize(("members", "message"), BROKEN, ids=[f"{i}-{b[1][:40]}" for i, b in enumerate(BROKEN)])
def test_a_broken_method_is_caught_by_name(members, message):
    assert message in problems(toy(**members))


def test_sections_of_a_docstring():
    text = "One sentence.\n\nUpdate rule:\n\n    A = r\n\n"
    good = ["Reconstruction", "Symbols", "Special cases", "State", "Logs", "Raises", "Source"]
    written = [f"{name}: of this." for name in good]
    assert section_problems(text + "\n\n".join(written)) == section_problems(text + "\n".join(written)) == []
    assert section_problems(text + "Where TRL: has more\nthan words, nothing is a heading.") == []
    for i in range(len(good) - 1):
        swapped = [*written[:i], written[i + 1], written[i], *written[i + 2 :]]
        (problem,) = section_problems(text + "\n\n".join(swapped))
        assert "the order is Reconstruction, Symbols, Special cases, State, Logs, Raises, Source" in problem
    (problem,) = section_problems(text + "Logged, over tokens: x.\n\nLogged (training): y.")
    assert "the name is `Logs:`" in problem


def test_a_fault_is_listed_once_with_the_places_it_was_seen():
    text = problems(toy(advantages=float32, regularize=neighbours))
    assert text.count("torch.float32") == 1
    assert re.search(r"float32; .* \[regular groups, graded rewards, .* and \d+ more\]", text)
    assert text.count("`regularize` depends on the split into micro-batches") == 1


def test_what_does_not_run_at_all_is_said_once():
    assert problems(toy(advantages=ragged_shape, observe=object_in_state)).count("\n  - ") == 1


# ---- turns of agents


def by_turn(self, rollouts):
    steps, groups = rollouts.turns, Groups(rollouts.group[rollouts.turns.row])
    reward = steps.reward.nan_to_num(nan=0.0) + rollouts.reward[steps.row]
    return (reward - groups.rows(groups.mean(reward))) * (steps.turn + 1)


def per_turn(function=by_turn, **members):
    return toy(advantages=function, **{"needs": {"turns"}, "advantages_per": "turn", **members})


def test_a_method_of_turns_passes_in_both_layouts():
    report = check_method(per_turn())
    assert "a row per turn and a row per rollout give the same advantages" in report.checks
    report = check_method(toy(advantages=advantages))
    assert not any("a row per turn" in check for check in report.checks)


BROKEN_TURNS = [
    (dict(function=lambda self, r: by_turn(self, r).cumsum(0)), "depend on the order of the rows (`advantages`)"),
    (dict(needs=set()), '`advantages_per` is "turn", so `needs` must have "turns"'),
    (dict(needs=set()), "makes one advantage per turn, and this batch does not say what its turns are"),
    (dict(advantages_per="token"), "advantages_per` is 'token'; it must be"),
    (dict(advantages_per="row"), "one number per row (16) is needed, as the class says"),
    (dict(function=advantages), "one number per turn (36) is needed, as the class says"),
    (
        dict(function=lambda self, r: by_turn(self, r) / r.groups.rows(r.groups.n(r.reward))[r.turns.row]),
        "differ with one row per rollout and with one row per turn",
    ),
    (
        dict(advantages_per="row", function=lambda self, r: advantages(self, r)),
        "differ with one row per rollout and with one row per turn",  # by rows, long rollouts weigh more
    ),
    (
        # the turn before is looked up where it lies and not where its number says
        dict(function=lambda self, r: by_turn(self, r) + (r.turns.row == r.turns.row.roll(1)).double()),
        "depend on the order of the rows (`advantages`)",
    ),
]


@pytest.mark.parametrize(("members", "message"), BROKEN_TURNS, ids=range(len(BROKEN_TURNS)))
def test_a_broken_method_of_turns_is_caught(members, message):
    assert message in problems(per_turn(**members))


# ---- parameters


def test_parameters_are_checked():
    @dataclass(frozen=True)
    class Lax(MethodParams):
        scale: float = param(1.0, "a scale", gt=0, le=10)
        silent: int = param(2, "")

        def __post_init__(self):
            pass

    text = problems(toy(advantages=advantages, Params=Lax))
    assert "`scale` accepts 0," in text
    assert "`scale` accepts 10.00001" in text
    assert "`silent` has no help" in text


def test_a_parameter_without_default_is_asked_for():
    @dataclass(frozen=True)
    class Judged(MethodParams):
        judge: Callable[..., Any] = param(None, "scores rollouts")

    def judged(self, rollouts):
        return torch.as_tensor(self.params.judge(rollouts), dtype=torch.float64)

    cls = toy(rewards=judged, Params=Judged)
    assert "check_method(Toy, parameter=..)" in problems(cls)
    check_method(cls, judge=lambda rollouts: rollouts.reward * 2)


def test_prepare_adds_what_cannot_be_guessed():
    def by_column(self, rollouts):
        return advantages(self, rollouts) * torch.tensor([m["weight"] for m in rollouts.meta["info"]]).double()

    cls = toy(advantages=by_column, needs={"column:info"})
    assert "failed in `advantages`: TypeError" in problems(cls)
    check_method(cls, prepare=lambda r: r.replace(meta={"info": [{"weight": 2.0}] * len(r)}))
