"""Batches that change nothing: a warning, once in a run, after several of them in a row.

Nothing of it is state: a resumed run counts again from 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from rl_plugins.core.groups import Groups
from rl_plugins.core.method import Idle, Method
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.stack import MethodStack

BATCHES = 5
"""Batches in a row before a warning."""


def look_for_idle(stack: MethodStack, decision: Decision, logged: Mapping[str, float]) -> None:
    """Warns if this is the last of several batches in which rewards taught nothing, or a method did nothing.

    Args:
        decision: on the batch.
        logged: what the methods logged of it, over all ranks, as `<method>/<name>`. A method that did not log all signs
            of its `Idle` tells nothing of this batch.
    """
    advantages = decision.row_advantages if decision.advantages is None else decision.advantages
    if stack.trains and _count(stack, "rewards", not bool((advantages != 0).any())):
        stack.warn_once(_nothing_learned(stack, decision))
    for m in stack.methods:
        for number, idle in enumerate(m.idle):
            found = {name: logged.get(f"{m.name}/{name}") for name in idle.signs}
            known = None not in found.values()
            if known and _count(stack, f"{m.name}/{number}", found == dict(idle.signs)):
                stack.warn_once(_did_nothing(m, idle))


def _count(stack: MethodStack, what: str, idle: bool) -> bool:
    """Whether this batch makes it enough."""
    stack.idle_batches[what] = stack.idle_batches.get(what, 0) + 1 if idle else 0
    return stack.idle_batches[what] == BATCHES


def _nothing_learned(stack: MethodStack, decision: Decision) -> str:
    reward, groups = decision.rollouts.reward, Groups(decision.rollouts.group)
    if bool((groups.max(reward) > groups.min(reward)).any()):
        names = ", ".join(f"`{n}`" for n in stack.names)
        why = (
            f"Rewards differ within groups, so look at what the methods ({names}) take out or set to 0 (metric "
            f"rl_plugins/rows_trained, and their own)."
        )
    else:
        why = (
            "All rewards of a group are equal (metric frac_reward_zero_std). Look at completions and their rewards: "
            "are the prompts too easy or too hard, or do the reward functions not tell completions apart? A higher "
            "temperature or larger groups make rewards differ more often."
        )
    return f"In the last {BATCHES} batches no token had an advantage other than 0, so rewards taught nothing. {why}"


def _did_nothing(method: Method, idle: Idle) -> str:
    signs = " and ".join(f"{method.name}/{name} is {value:g}" for name, value in idle.signs.items())
    return f"{method.name}: it did nothing in the last {BATCHES} batches ({signs}): {idle.advice}"
