"""Which runs a question needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rl_plugins.cards.claims import PaperClaim
from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench.runs import Waiting
from rl_plugins.lab.bench.tasks import TASKS, task_of
from rl_plugins.lab.bench.variants import BenchVariant


def with_setting(setting: str) -> list[str]:
    """All tasks with another value of a setting; none for "".

    Raises:
        ConfigError: there is no such setting.
    """
    found = [name for name, task in TASKS.items() if setting and task.setting == setting]
    if setting and not found:
        raise ConfigError(
            f"There is no setting {setting!r}. Settings: {', '.join(dict.fromkeys(c.setting for c in TASKS.values()))}."
        )
    return found


def wanted(
    variants: Iterable[str], tasks: Sequence[str], asked: Sequence[PaperClaim], seeds: Iterable[int]
) -> list[Waiting]:
    """Task by task, the baseline first, so that what was done is whole whenever it ends. `neutral` comes last.

    Args:
        tasks: none: those of the claims, and `neutral`.

    Raises:
        ConfigError: an unknown task, or a variant that it cannot train.
    """
    pairs: dict[str, dict[str, None]] = {}
    for task in tasks:
        task_of(task)
        pairs.setdefault(task, {"grpo": None}).update(dict.fromkeys(variants))
    for claim in asked:
        pairs.setdefault(claim.task, {"grpo": None}).update({claim.than: None, claim.label: None})
        if claim.control:
            variant, task = claim.control_place
            pairs.setdefault(task, {})[variant] = None
    neutral = {} if tasks else {"neutral": {"grpo": None, **dict.fromkeys(_plain(variants, asked))}}
    order = list(TASKS)
    found = [*sorted(pairs.items(), key=lambda pair: order.index(pair[0])), *neutral.items()]
    seeds = list(seeds)
    for name, of in found:
        for variant in of:
            BenchVariant.of(variant).check(task_of(name))
    return list(dict.fromkeys(Waiting(task, variant, seed) for task, of in found for seed in seeds for variant in of))


def _plain(variants: Iterable[str], asked: Sequence[PaperClaim]) -> list[str]:
    """Variants for `neutral`: as in the claims of a method, if they are no agents and the host's options stay."""
    found = []
    for variant in variants:
        of = [c for c in asked if c.method == variant]
        labels = {c.label for c in of if not TASKS[c.task].environment and "@" not in c.label}
        found += sorted(labels) if of else [variant]
    return found
