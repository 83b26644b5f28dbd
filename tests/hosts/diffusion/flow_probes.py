"""Methods that exist to look at the diffusion adapter: each does one thing. Found by name in these tests."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from typing import Any

import torch

from rl_plugins.core.denoising import Denoise
from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Score
from rl_plugins.core.rollouts import Completion, PlanRow, Shape, Update
from rl_plugins.runtime import registry

SEEN: list[Any] = []
"""What probes note of their calls; tests clear it."""


class Probe(Method):
    fidelity = "paper"


class Looks(Probe):
    """Only looks, at everything."""

    name = "looks"
    needs = frozenset({"tokens", "old_logprobs", "rollout_logprobs", "ref_logprobs", "token_versions", "column:level"})

    def observe(self, rollouts, tokens, stats):
        SEEN.append((rollouts, tokens, dict(stats)))
        self.state = {"rewards": [*self.state.get("rewards", []), rollouts.reward.nanmean().item()]}
        self.log("looked", 1.0)


class Same(Probe):
    """The host's own surrogate, as a method; the learning rate and a column pass through."""

    name = "same"
    needs = frozenset({"current_logprobs", "old_logprobs", "ref_logprobs"})

    def before_update(self, rows):
        SEEN.append(rows)
        return Update(1.0, {"weight": rows.length * 0.0 + 1.0})

    def policy_loss(self, terms):
        SEEN.append(terms)
        assert terms.columns["weight"].shape == (len(terms.mask), 1)
        return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, 0.2, 0.2) * terms.columns["weight"]


class Rests(Probe):
    """No learning rate in the first optimizer step of every batch."""

    name = "rests"

    def before_update(self, rows):
        return Update(float(rows.steps_since_published > 0))


class Pulls(Probe):
    """Adds a term to the loss."""

    name = "pulls"

    def regularize(self, terms):
        return 100.0 * terms.logprobs


class Longer(Probe):
    """Two rounds: a prompt whose first samples have a low reward gets two more."""

    name = "longer"
    rounds = True
    decides_rollouts = True

    def plan(self, plan):
        if plan.round == 0:
            return plan.replace(rows=tuple(r.replace(n=r.n - 2, payload=f"p{r.prompt_index}") for r in plan.rows))
        if plan.round == 1:
            low = min(plan.so_far, key=lambda g: float(g.rewards.mean()))
            SEEN.append([g.rewards.tolist() for g in plan.so_far])
            return plan.replace(rows=(PlanRow(low.row.prompt_index, low.row.group, 2),))
        return None


class Prefixes(Probe):
    """Plans what only texts have."""

    name = "prefixes"
    asks = {"prefix": (1, 2)}

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(**self.asks) for r in plan.rows))


class Splits(Probe):
    """Makes two rows of a rollout."""

    name = "splits"
    rows_per_rollout = 2

    def rewards(self, rollouts):
        return None


class Gives(Probe):
    name = "gives"
    brings = {"off_policy"}

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(given=(Completion((1,)),)) for r in plan.rows))


class Edits(Probe):
    """Every prompt becomes the class 3."""

    name = "edits"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(edit={"prompt": 3}, payload="edited") for r in plan.rows))


class Reads(Probe):
    name = "reads"
    needs = frozenset({"text"})

    def rewards(self, rollouts):
        return None


class Waits(Probe):
    name = "waits"

    def admit(self, queue):
        raise AssertionError


class Whole(Probe):
    name = "whole"
    needs = {"whole_groups"}

    def before_update(self, rows):
        return None


class OfText(Probe):
    """A program of language models."""

    name = "of_text"

    def rollout(self, prompt):
        yield


class Forks(Probe):
    """Pairs of samples that share their first half; a shared transition is trained once."""

    name = "forks"
    hosts = ("diffusion",)
    needs = frozenset({"column:nodes", "tokens"})
    brings = {"column:nodes"}

    def rollout(self, prompt):
        half = prompt.steps // 2
        begun = yield [Denoise(prompt.start(s), steps=half) for s in prompt.seeds(prompt.n // 2)]
        pairs = yield [Denoise(x, n=2, shared_noise=4.0) for (x,) in begun]
        self.log("pairs", len(pairs), "sum")
        numbers = {id(t): 0 for pair in pairs for leaf in pair for t in leaf.transitions}
        numbers = {key: number for number, key in enumerate(numbers)}
        return [leaf.noted(nodes=[numbers[id(t)] for t in leaf.transitions]) for pair in pairs for leaf in pair]

    def shape(self, rollouts, tokens):
        seen, keep = set(), []
        for row, step in zip(tokens.row.tolist(), tokens.position.tolist(), strict=True):
            node = (int(rollouts.group[row]), rollouts.meta["nodes"][row][step])
            keep.append(node not in seen)
            seen.add(node)
        return Shape(keep_tokens=torch.tensor(keep, dtype=torch.bool))


class Explores(Probe):
    """Tries seeds with the cheap copy and makes the best of them again with the policy."""

    name = "explores"
    hosts = ("diffusion",)

    def rollout(self, prompt):
        tried = yield [Denoise(prompt.start(s, 2), stochastic=False, model="cheap") for s in prompt.seeds(2 * prompt.n)]
        scores = yield [Score(x) for (x,) in tried]
        order = sorted(range(len(tried)), key=lambda i: -scores[i].reward)[: prompt.n]
        made = yield [Denoise(prompt.start(tried[i][0].seed)) for i in order]
        first = yield [Score(x) for (x,) in made[:2]]
        return [*(x.scored(s) for (x,), s in zip(made, first, strict=False)), *(x for (x,) in made[2:])]


def register() -> None:
    """Lets the registry find the probes, as if a package had brought them."""
    module = sys.modules[__name__]
    found = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Probe) and c is not Probe]
    known: Any = [EntryPoint(c.name, f"{__name__}:{c.__name__}", registry.ENTRY_POINT_GROUP) for c in found]
    installed = registry._entry_points
    registry._entry_points = lambda: [*installed(), *known]
