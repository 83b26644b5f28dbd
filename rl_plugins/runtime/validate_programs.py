"""What a rollout program asks for and returns, checked: so that an engine and a host can serve it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any, get_args

import numpy as np

from rl_plugins.core.errors import shown
from rl_plugins.core.requests import Call, Finish, Generate, Kind, Prompt, Request, Score, Trajectory, Turn

LARGEST_LOGPROB = 1e-3  # engines round
LIMITS = {"n": (1, 100_000), "max_tokens": (1, 10**9), "top": (0, 10**6)}  # of a `Generate`


def request_problem(request: Request, vocabulary: int | None) -> str:
    """What cannot be served about a request; empty if nothing is.

    Args:
        vocabulary: number of token ids of the policy, None if that is not known.
    """
    if isinstance(request, Call):
        return call_problem(request)
    if not isinstance(request.trajectory, Trajectory):
        return f"{type(request).__name__} of {shown(request.trajectory)} instead of a Trajectory"
    problem = _context_problem(request.trajectory, vocabulary)
    if problem or isinstance(request, Score):
        return problem
    return _generate_problem(request)


def call_problem(call: Call) -> str:
    """What cannot be served about a call; empty if nothing is."""
    if not callable(call.function):
        return f"Call of {shown(call.function)}, which is no function"
    if not isinstance(call.args, tuple | list):
        return f"Call(args={shown(call.args)}); the arguments are a tuple"
    if not isinstance(call.timeout, Real) or not 0 < call.timeout < math.inf:
        return f"Call(timeout={shown(call.timeout)}); it must be a number of seconds above 0"
    if not isinstance(call.name, str):
        return f"Call(name={shown(call.name)}); the name is a text"
    return ""


def _generate_problem(request: Generate) -> str:
    for name, (least, most) in LIMITS.items():
        value = getattr(request, name)
        if name == "max_tokens" and value is None:
            continue
        if not isinstance(value, (int, np.integer)) or not least <= value <= most:
            return f"Generate({name}={shown(value)}); it must be a whole number of {least} to {most}"
    stops = request.stop
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) and s for s in stops):
        return f"Generate(stop={shown(stops)}); it must be a tuple of texts, none of them empty"
    temperature = request.temperature
    if temperature is not None and not (isinstance(temperature, Real) and 0 <= temperature < math.inf):
        return f"Generate(temperature={shown(temperature)}); it must be a finite number of at least 0, or None"
    return ""


def row_problem(row: Trajectory, prompt: Prompt, vocabulary: int | None) -> str:
    """What cannot be trained about a row whose columns are of one length; empty if nothing is."""
    problem = _context_problem(row, vocabulary)
    if problem:
        return problem
    if not _within(row.kinds, min(Kind), max(Kind) + 1):
        return f"a trajectory has the kinds {shown(sorted(set(row.kinds)))}; they are those of `Kind`"
    if not _within(row.versions, -1, None):
        return "a trajectory has versions below -1"
    logprobs = np.asarray(row.logprobs)
    if bool((np.isinf(logprobs) | (logprobs > LARGEST_LOGPROB)).any()):
        return "a trajectory has log-probs that are infinite, or above 0"
    if row.finish not in get_args(Finish):
        return f"a trajectory has finish={shown(row.finish)}; allowed: {', '.join(map(repr, get_args(Finish)))}"
    if not all(isinstance(t, Turn) for t in row.turns):
        return f"a trajectory has the turns {shown(row.turns)}; they are a tuple of Turn"
    return told_problem(row, prompt.reward_names, "a trajectory")


def told_problem(row: Any, reward_names: Sequence[str], what: str) -> str:
    """What a program says of a row in addition to its tokens: rewards, `meta` and `group`.

    Args:
        reward_names: of the run.
        what: how messages name the row.
    """
    if row.rewards is not None:
        if not isinstance(row.rewards, Mapping) or not all(isinstance(r, Real) for r in row.rewards.values()):
            return f"{what} has rewards={shown(row.rewards)}; they are what `Score` gave, a number per function"
        if any(math.isinf(r) for r in row.rewards.values()):
            return f"{what} has an infinite reward: {shown(dict(row.rewards))}"
        if reward_names and not set(row.rewards) <= set(reward_names):
            return f"{what} has rewards of {shown(list(row.rewards))}; the run has {shown(reward_names)}"
    if not isinstance(row.meta, Mapping) or not all(isinstance(k, str) for k in row.meta):
        return f"{what} has meta={shown(row.meta)}; it maps names to plain data"
    if not isinstance(row.group, Hashable):
        return f"{what} has group={shown(row.group)}; a label must be hashable"
    for name, value in (("meta", row.meta), ("group", row.group)):
        if value:
            try:
                pickle.dumps(value)
            except Exception as e:
                return f"`{name}` of {what} cannot travel to another process ({type(e).__name__})"
    return ""


def _context_problem(trajectory: Trajectory, vocabulary: int | None) -> str:
    for what in ("prompt", "tokens"):
        ids = getattr(trajectory, what)
        if not _within(ids, 0, vocabulary):
            known = "" if vocabulary is None else f" of 0..{vocabulary - 1}"
            return f"a trajectory has {what}={shown(ids, 100)}; they are token ids{known}"
    return ""


def _within(values: Any, low: int, end: int | None) -> bool:
    """Whether all of a trajectory's column are at least `low` and below `end`. Each is looked at once, however often a
    growing trajectory is asked with."""
    if not len(values):
        return True
    smallest, largest = values.bounds()
    return bool(smallest >= low and (end is None or largest < end))
