"""`check_method`: the contract every method keeps, tested without a host.

    from rl_plugins.testing import check_method
    print(check_method(MyMethod, some_parameter=3))

What is checked follows from the hooks the class claims. Rollouts are made by hand (regular, ragged, interleaved,
unscorable, with turns, ..), and a small host plans, "generates" and decides several batches. A method gets only what
its `needs` name, so a signal it forgot is found here and not in a training run.

Checks are in documents, decisions, plans, programs, denoising, queues, batches and updates; `results` is asked on every
call of a hook. They work with `kit` (instances, data, problems), `scenarios` (odd rollouts), `host` (several batches)
and `update_step` (one update).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.runtime.immutability import checking
from rl_plugins.testing.contract.batches import check_determinism, check_observe_twice, check_resumption
from rl_plugins.testing.contract.decisions import (
    check_every_kind,
    check_layouts,
    check_ordinary,
    check_row_order,
    check_unscorable,
)
from rl_plugins.testing.contract.denoising import check_denoising
from rl_plugins.testing.contract.documents import check_declaration, check_parameters, check_prose
from rl_plugins.testing.contract.kit import Kit
from rl_plugins.testing.contract.plans import check_plans, check_prompts
from rl_plugins.testing.contract.programs import check_books, check_odd_engines, check_programs
from rl_plugins.testing.contract.queues import check_admission
from rl_plugins.testing.contract.updates import check_before_update, check_losses

# In this order; their docstrings are the lines of the report. One that returns False had nothing to check.
CHECKS: tuple[Callable[[Kit], bool | None], ...] = (
    check_declaration,
    check_prose,
    check_parameters,
    check_ordinary,
    check_every_kind,
    check_unscorable,
    check_row_order,
    check_layouts,
    check_plans,
    check_prompts,
    check_programs,
    check_books,
    check_odd_engines,
    check_denoising,
    check_admission,
    check_determinism,
    check_resumption,
    check_observe_twice,
    check_before_update,
    check_losses,
)

# What needs a real engine.
NOT_CHECKED = {
    "rollout": "your model's tokenizer and chat template, calls that hang, several processes: try a short run",
    "admit": "when a real engine stops: try a short run",
}


@dataclass(frozen=True)
class Report:
    """What was checked of a method that keeps the contract.

    Attributes:
        name: of the method.
        hooks: it claims.
        checks: what was checked, one line each.
        not_checked: what of a hook this test does not reach.
        warnings: what readers of its card miss; a failure for methods of this package.
    """

    name: str
    hooks: tuple[str, ...]
    checks: tuple[str, ...]
    not_checked: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name} keeps the contract. Hooks: {', '.join(self.hooks) or 'none'}."]
        lines += [f"  ok           {check}" for check in self.checks]
        lines += [f"  not checked  {hook}" for hook in self.not_checked]
        lines += [f"  warning      {warning}" for warning in self.warnings]
        return "\n".join(lines)


def check_method(
    cls: type[Method],
    /,
    *,
    prepare: Callable[[Rollouts], Rollouts] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    **params: Any,
) -> Report:
    """Tests a method class against the contract, in about a second and without a host.

    Args:
        cls: the class; it need not be registered.
        prepare: adds to rollouts what cannot be guessed from `needs`, e.g. the values of a dataset column:
            `lambda rollouts: rollouts.replace(meta={"answer": ["4"] * len(rollouts)})`.
        rows: rows of a dataset, where an environment or a program reads columns that cannot be guessed.
        params: parameters to test with; needed where one has no default (a judge, say).

    Returns:
        What was checked.

    Raises:
        AssertionError: a list of everything that breaks the contract.
    """
    kit = Kit(cls, params, prepare, rows)
    checked = []
    for check in CHECKS:
        with kit.at(""), checking():
            if kit.usable and check(kit) is not False:
                checked.append(check)
    if kit.problems:
        listed = "\n".join(f"  - {what}{_places(where)}" for what, where in kit.problems.items())
        raise AssertionError(f"`{cls.name or cls.__name__}` breaks the contract of a method:\n{listed}")
    hooks = cls.claims()
    lines = [" ".join((check.__doc__ or "").split()) for check in checked]
    not_checked = tuple(f"`{hook}`: {why}" for hook, why in NOT_CHECKED.items() if hook in hooks)
    return Report(cls.name, hooks, tuple(lines), not_checked, tuple(kit.warnings))


def _places(where: Sequence[str]) -> str:
    shown = ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
    return f" [{shown}]" if where else ""
