"""Every loss and regularizer with every branch of its parameters, on the inputs of the contract test, on any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from cases import case_of
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle
from rl_plugins.core.rollouts import Terms
from rl_plugins.runtime import registry
from rl_plugins.testing.contract.effects import Trial, alternatives, settings_for
from rl_plugins.testing.contract.update_step import UpdateStep

HOOKS = ("policy_loss", "regularize")


@dataclasses.dataclass(frozen=True)
class Loss:
    """A hook in the loss of a method with these parameters."""

    name: str
    hook: str
    params: Any

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self.params).items() if v != self.params.__dataclass_fields__[k].default}
        return f"{self.name}-{self.hook}-" + ",".join(f"{k}={v}" for k, v in changed.items() if not callable(v))

    def step(self) -> UpdateStep:
        return UpdateStep(Trial(registry.load(self.name), self.params, case_of(self.name).tried.world))


@cache
def losses() -> list[Loss]:
    """Parameters that choose (words, yes or no, none) choose branches of the code: each value of each of them."""
    found: dict[str, Loss] = {}
    for name in registry.all_names():
        cls: Any = registry.load(name)
        if registry.origins_of(name)[0].distribution or isinstance(cls, Bundle):
            continue
        for hook in set(HOOKS) & set(cls.claims()):
            for params in _variants(cls.Params, case_of(name).tried):
                found.setdefault(str(loss := Loss(name, hook, params)), loss)
    return list(found.values())


def _variants(cls: Any, tried: Any) -> Iterator[Any]:
    for setting in tried.settings:
        yield cls(**{**tried.params, **setting})
    for name, hint in get_type_hints(cls).items():
        if name not in cls.__dataclass_fields__:
            continue
        parts = {get_origin(part) or part for part in get_args(hint) or (hint,)}
        if get_origin(hint) is Literal or parts & {bool, Literal, type(None)}:
            words = [v for v in (*tried.values.get(name, ()), *alternatives(cls, name)) if not isinstance(v, float)]
            for setting in settings_for(cls, name, tried.params, tried.values):
                for value in [*words, *alternatives(cls, name)[:1]]:
                    try:
                        yield cls(**{**setting, name: value})
                    except ConfigError:
                        continue


def placed(terms: Terms, place: Callable[[Tensor], Tensor]) -> Terms:
    """The same micro-batch with all tensors elsewhere, or of another type; log-probs and entropies have a gradient."""
    fields = {f.name: getattr(terms, f.name) for f in dataclasses.fields(terms)}
    moved = {name: place(x.detach()) for name, x in fields.items() if isinstance(x, Tensor)}
    for name in {"logprobs", "entropies"} & set(moved):
        moved[name].requires_grad_()
    return terms.replace(**moved, columns={name: place(x) for name, x in terms.columns.items()})


def gradients(value: Tensor, terms: Terms) -> list[Tensor]:
    """Of the sum over trained tokens, for log-probs and entropies."""
    leaves = [x for x in (terms.logprobs, terms.entropies) if x is not None]
    total = torch.where(terms.mask > 0, value, 0.0).sum()
    if not total.requires_grad:
        return []
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
