"""Rewards where verl's agent loops ask for them: None is NaN, and an exception ends the run or leaves the row without
a reward. verl alone keeps a row with None without its column, and goes on without a prompt whose reward raised. What
the driver wants to know of a row is noted here, too, so that it need not read columns of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_plugins.core.errors import shortened
from rl_plugins.runtime.reward_errors import MASK
from rl_plugins.runtime.step_rewards import Steps, steps_of, total
from rl_plugins.verl import costs
from rl_plugins.verl.processes import wrap
from rl_plugins.verl.prompts import NUMBERS, STEPS, numbers_of

if TYPE_CHECKING:
    from rl_plugins.verl.host import Output


def install(worker: Any, on_error: str, stepwise: Sequence[str] = ()) -> None:
    """Runs in an agent-loop worker.

    Args:
        on_error: see `rl_plugins.runtime.reward_errors`.
        stepwise: rewards that may be lists, one number per step; verl gets the sums.
    """

    def make(host: Any) -> Any:
        async def compute_score(outputs: list[Output], *args: Any, **kwargs: Any) -> None:
            last = outputs[-1]
            try:
                await host(outputs, *args, **kwargs)
            except Exception as e:
                if on_error != MASK:
                    told = f"The reward function raised {type(e).__name__}: {shortened(e, 2000)}"
                    way = f"Mend it, or set +rl_plugins.on_reward_error={MASK}, with which such a row has no reward."
                    worker.rl_plugins_errors = [*getattr(worker, "rl_plugins_errors", ()), f"{told}\n{way}"]
                    raise
                last.extra_fields["reward_extra_info"] = {}
            steps = sums(last, stepwise) if stepwise else None
            if last.reward_score is None and worker.reward_loop_worker_handles is not None:
                last.reward_score = math.nan
            if not costs.in_training() and last.reward_score is not None and math.isnan(last.reward_score):
                last.reward_score = 0.0  # verl's means of validation know no rows without a reward
            for output in outputs:  # verl gives all of them the score of the last one
                score = output.reward_score if last.reward_score is None else last.reward_score
                output.extra_fields[NUMBERS] = numbers_of(output, score)
                if steps:
                    output.extra_fields[STEPS] = steps

        return compute_score

    wrap(worker, "_compute_score", make)


def sums(output: Output, stepwise: Sequence[str]) -> list[Steps]:
    """Puts sums in the place of lists, and returns the lists, one for each of these rewards."""
    score, info = output.reward_score, output.extra_fields.get("reward_extra_info") or {}
    output.reward_score = total(score)
    of_verl = (*stepwise, "score", "acc")  # the last two repeat the score
    output.extra_fields["reward_extra_info"] = {k: total(v) if k in of_verl else v for k, v in info.items()}
    return [steps_of({"score": score, **info}.get(name)) for name in stepwise]
