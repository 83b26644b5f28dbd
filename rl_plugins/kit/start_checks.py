"""What arithmetic rules out before a run starts: parameters of a method against completion length, group and batch.

A method calls these in `check`. A part that would never act is refused, because a run would look healthy without it.
"""

from __future__ import annotations

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import Run


def refuse_beyond_completion(run: Run, option: str, tokens: int | None, why: str, most: int | None = None) -> None:
    """Refuses a number of tokens that no completion reaches.

    Args:
        most: the largest that is allowed; None: the completion length.
    """
    most = run.max_completion_length if most is None else most
    if tokens is not None and tokens > most:
        raise ConfigError(
            f"`{option}` is {tokens}, and a completion has at most {run.max_completion_length} tokens, so {why}. Set "
            f"it to at most {most}, or make completions longer."
        )


def refuse_whole_group(run: Run, option: str, rollouts: int | None, why: str, least: int = 1) -> None:
    """Refuses a number of rollouts that leaves no room in a group.

    Args:
        least: the smallest value of the parameter.
    """
    most = run.group_size - 1
    if rollouts is not None and rollouts > most:
        remedy = f"Set it to at most {most}, or raise the group size" if most >= least else "Raise the group size"
        raise ConfigError(
            f"`{option}` is {rollouts}, and the run has {run.group_size} rollouts per prompt, so {why}. {remedy}."
        )


def refuse_fixed_size(run: Run, low: tuple[str, int], high: tuple[str, int]) -> None:
    """Refuses limits of a prompt's rollouts that leave nothing to move, where the total stays the same.

    Args:
        low, high: option and value.
    """
    (least, a), (largest, b) = low, high
    if not a < run.group_size < b:
        raise ConfigError(
            f"the group size is {run.group_size}, with `{least}` = {a} and `{largest}` = {b} rollouts per prompt. It "
            f"must lie between them: the total is fixed, so a prompt gets more only where another gets fewer. Change "
            f"these, or the group size."
        )


def refuse_one_prompt(run: Run, why: str) -> None:
    """Refuses batches of one prompt."""
    if run.batch_prompts == 1:
        raise ConfigError(
            f"a batch has {run.batch_rows} rows, which is one prompt with {run.group_size} rollouts, so {why}. Make "
            f"the batch larger, or the group smaller."
        )


def refuse_no_group(run: Run, given: str, share: float, use: str, size: int | None = None) -> None:
    """Refuses a share of a batch's rows, above 0, that is less than one group.

    Args:
        given: option and value.
        use: what becomes of these rows.
        size: rollouts of such a group; None: as many as the run has of a prompt.
    """
    size = size or run.group_size
    if run.batch_rows is None or run.buffered or share == 0:
        return
    rows = int(share * run.batch_rows + 1e-6)
    if rows < size:
        raise ConfigError(
            f"{given}, so {rows} of the {run.batch_rows} rows of a batch are {use}: less than one group of {size}, "
            f"which makes none. Change it, or make the batch larger."
        )
