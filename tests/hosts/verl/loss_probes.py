"""Methods that exist to stress verl's loss and optimizer step. Found by name in the processes of engine.py."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import torch

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.method import Method
from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.rollouts import Update
from rl_plugins.runtime import registry

SEEN: list[Any] = []


def take() -> list[Any]:
    """What probes have seen since the last call."""
    seen = list(SEEN)
    SEEN.clear()
    return seen


class LossProbe(Method):
    fidelity = "paper"


class Vanilla(LossProbe):
    """verl's vanilla surrogate, made by us."""

    name = "vanilla"

    @dataclass(frozen=True)
    class Params(MethodParams):
        low: float = param(0.2, "clip range below")
        high: float = param(0.2, "clip range above")
        dual: float = param(3.0, "bound of the ratio where the advantage is negative")
        outside: str = param("", "what stands at tokens that are not trained, instead of their loss")

    def policy_loss(self, terms):
        p = self.params
        loss = ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, p.low, p.high, p.dual)
        return torch.where(terms.mask > 0, loss, float(p.outside)) if p.outside else loss


class Leash(LossProbe):
    """A term on the log-probs, with gradient."""

    name = "leash"

    def regularize(self, terms):
        return 0.3 * (terms.logprobs - terms.old_logprobs) ** 2


class Aged(LossProbe):
    """Keeps what it is told of versions, before the step and in the loss."""

    name = "aged"
    needs = frozenset({"token_versions"})

    def before_update(self, rows):
        SEEN.append(("rows", rows.version.tolist(), rows.newest_version.tolist(), *_age(rows)))

    def policy_loss(self, terms):
        live = [v[m > 0].tolist() for v, m in zip(terms.versions, terms.mask, strict=True)]
        SEEN.append(("terms", live, str(terms.versions.dtype), *_age(terms)))
        return -terms.advantages * terms.logprobs


def _age(told):
    return told.current_version, told.steps_since_published


class Weighted(LossProbe):
    """An objective with weights of its own, summed; keeps what it sees."""

    name = "weighted"
    aggregation = "sum"
    needs = frozenset({"rollout_logprobs", "ref_logprobs"})

    def policy_loss(self, terms):
        SEEN.append(
            {
                "num_tokens": float(terms.num_tokens),
                "num_rows": float(terms.num_rows),
                "max_length": terms.max_length,
                "shapes": {name: tuple(c.shape) for name, c in terms.columns.items()},
                "rows": [
                    {
                        name: value[i][terms.mask[i] > 0].detach()
                        for name, value in {
                            "advantages": terms.advantages,
                            "old": terms.old_logprobs,
                            "rollout": terms.rollout_logprobs,
                            "ref": terms.ref_logprobs,
                            "scale": terms.columns["scale"],
                        }.items()
                    }
                    for i in range(len(terms.mask))
                ],
            }
        )
        weight = terms.columns["number"] * terms.columns["scale"] / terms.num_rows
        return -weight * terms.logprobs


class Ledger(LossProbe):
    """Keeps the row sums of every optimizer step, and gives each row its number back, times 2 plus 1."""

    name = "ledger"
    needs = frozenset({"old_logprobs", "rollout_logprobs", "current_logprobs"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        lr_scale: float = param(1.0, "factor on the learning rate")

    def before_update(self, rows):
        SEEN.append(rows)
        self.log("rows", len(rows.length), reduce="sum")
        return Update(lr_scale=self.params.lr_scale, columns={"echo": 2 * rows.columns["number"] + 1})

    def regularize(self, terms):
        live = terms.mask.sum(1) > 0
        echo, number = terms.columns["echo"][live], terms.columns["number"][live]
        assert torch.equal(echo, 2 * number + 1), (echo, number)
        assert not terms.columns["echo"][~live].any()
        self.log("echoes", live.sum(), reduce="sum")
        return terms.columns["echo"] * terms.logprobs


class Shares(LossProbe):
    """A weight per row from `before_update`, in a surrogate that the host aggregates."""

    name = "shares"

    def before_update(self, rows):
        return Update(columns={"share": (1 + rows.columns["number"]) / len(rows.length)})

    def policy_loss(self, terms):
        SEEN.append(tuple(terms.columns["share"].shape))
        return -terms.columns["share"] * terms.logprobs


class Minimax(LossProbe):
    """Logs in every way, under names that verl would reduce by their words."""

    name = "minimax"

    def regularize(self, terms):
        live = terms.mask > 0
        tokens = live.sum()
        value = terms.advantages.detach()
        self.log("tokens_max", tokens, reduce="sum")
        self.log("mean_min", torch.where(live, value, 0.0).sum() / tokens, weight=tokens)
        self.log("low", torch.where(live, value, torch.inf).min(), reduce="min", weight=tokens)
        self.log("high_min", torch.where(live, value, -torch.inf).max(), reduce="max", weight=tokens)
        return 0.0 * terms.logprobs


class Broken(LossProbe):
    """Goes wrong in one hook, in one way."""

    name = "broken"

    @dataclass(frozen=True)
    class Params(MethodParams):
        hook: str = param("regularize", "before_update or regularize")
        how: str = param("raise", "raise, shape, none or column")

    def before_update(self, rows):
        if self.params.hook == "before_update":
            if self.params.how == "raise":
                raise ValueError("before the step it went wrong")
            return Update(columns={"a": torch.ones(len(rows.length) + 1)})
        return None

    def regularize(self, terms):
        if self.params.hook == "regularize":
            if self.params.how == "raise":
                raise ValueError("in the loss it went wrong")
            return None if self.params.how == "none" else torch.ones(3, 99)
        return 0.0 * terms.logprobs


class BrokenSurrogate(LossProbe):
    """A surrogate per row where one per token is needed."""

    name = "broken_surrogate"

    def policy_loss(self, terms):
        return terms.logprobs.sum(1)[:-1]


def register() -> None:
    """Lets the registry find the probes, as if a package had brought them."""
    found = [c for c in globals().values() if isinstance(c, type) and issubclass(c, LossProbe) and c is not LossProbe]
    known: Any = [EntryPoint(c.name, f"loss_probes:{c.__name__}", registry.ENTRY_POINT_GROUP) for c in found]
    installed = registry._entry_points
    registry._entry_points = lambda: [*installed(), *known]
