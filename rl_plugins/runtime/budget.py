"""How large the batches of a run will be: prompts, rollouts and rounds, as the methods say before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral

from rl_plugins.core.errors import ConfigError, MethodError, shown
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import MAX_ROUNDS, Budget, Run
from rl_plugins.runtime import validate
from rl_plugins.runtime.stack import MethodStack

_PAIRS = ("prompts", "per_prompt", "generated", "trained")


def budgets(stack: MethodStack, run: Run, rows: int) -> list[Budget]:
    """One entry per stage: what the host makes of a batch, changed by one method after the other.

    Args:
        rows: the batch trains.

    Raises:
        ConfigError: parameters that no batch of the run can serve.
        MethodError: a method fails, or says what no batch can be.
    """
    k = stack.rows_per_rollout
    prompts = max(1, rows // k // run.group_size)
    rollouts = prompts * run.group_size
    made = (rollouts, rollouts * k)
    found = [Budget((prompts, prompts), (run.group_size, run.group_size), made, made)]
    for m in stack.methods:
        found = [changed for given in found for changed in _asked(stack, m, given, run)]
    return found


def _asked(stack: MethodStack, m: Method, given: Budget, run: Run) -> Iterator[Budget]:
    try:
        told = stack.call("budget", m, given, run)
    except MethodError as e:
        if isinstance(e.__cause__, ConfigError):  # a mistake in the config is no failure of the method
            raise ConfigError(f"`{m.name}`: {e.__cause__}") from e
        raise
    stages = list(told) if isinstance(told, Sequence) and told else [told]
    for stage in stages:
        problem = _problem(stage)
        if problem:
            raise validate.invalid_return(m, "budget", f"{problem}: {shown(stage)}.")
        before = () if stage.stage == given.stage else (given.stage, stage.stage)
        yield stage.replace(stage="; ".join(filter(None, before)) or stage.stage)


def _problem(budget: object) -> str | None:
    """What is illegal about an answer."""
    if not isinstance(budget, Budget):
        return f"{type(budget).__name__} instead of a Budget, or of one per stage"
    for name in _PAIRS:
        pair = getattr(budget, name)
        whole = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, Integral) for x in pair)
        if not whole or not 0 <= pair[0] <= pair[1]:
            return f"`{name}` must be two whole numbers, the least and the most"
    if not isinstance(budget.rounds, Integral) or not 1 <= budget.rounds <= MAX_ROUNDS:
        return f"`rounds` must be a whole number from 1 to {MAX_ROUNDS}"
    return None if isinstance(budget.stage, str) else "`stage` must be a text"


def print_budget(stack: MethodStack, run: Run, rows: int) -> list[str]:
    """Prints one line per stage for runs with methods that choose prompts or plan rollouts; nothing for others.

    Args:
        rows: the batch trains.

    Returns:
        What would fail.
    """
    if not stack.claimed("select_prompts", "plan", "admit"):
        return []
    try:
        found = budgets(stack, run, rows)
    except (ConfigError, MethodError) as e:
        return [str(e)]
    print("\nBudget of a batch")
    for b in found:
        print(f"  {b.stage or 'all batches'}: {described(b)}")
    return []


def described(b: Budget) -> str:
    """ "8 prompts with 4 rollouts each; 40 rows generated in 1 round, 32 trained"."""
    rounds = "1 round" if b.rounds == 1 else f"up to {b.rounds} rounds"
    return (
        f"{spread(b.prompts)} prompts with {spread(b.per_prompt)} rollouts each; {spread(b.generated)} rows generated "
        f"in {rounds}, {spread(b.trained)} trained"
    )


def spread(pair: tuple[int, int]) -> str:
    """ "8", or "4 to 12"."""
    low, high = pair
    return f"{low}" if low == high else f"{low} to {high}"
