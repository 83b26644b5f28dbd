"""The worlds of `Chain`: sequences of tokens, agents, and chains with rollouts of older policies.

sequences   all texts of up to 6 letters "a" and "b", "." ends: lengths differ, two letters decide, the others do not
updates=n   sequences; the policy made n optimizer steps since it sampled the batch, whose old log-probs are kept
agents      graphs of 5 places, the way out of the last one pays 1, 8 turns, one action in ten slips: states repeat
team        the graphs of agents; in the second and fourth place a sub-agent acts, with rows of its own
delay=n     graphs of 6 places with up to 24 tokens; a run of 128 steps was made, whose last policy is trained on
            groups that are 0 to n versions old, each number as likely
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_plugins.lab.quality.worlds.chain import Chain, drifted, skilled, with_lag

Array = NDArray[Any]
NATS, NATS_IN_BATCH = 1e-5, 1e-4  # KL of one optimizer step, per token: of a run, and of steps on one batch
LONGEST = 128  # steps of the run before `delay`
STEP_ROLLOUTS = 128  # of the run that makes older versions
DEPTH = 6


def sequences(seed: int, updates: int = 0, prompts: int = 512, dims: int = 64) -> Chain:
    """Binary trees with an end: state s is a prefix, and its letters lead to 2s + 1 and 2s + 2."""
    rng = np.random.default_rng([seed, 2])
    states = 2**DEPTH - 1
    to = np.arange(states)[:, None] * 2 + np.array([1, 2, states])
    to[to >= states] = -1
    offset = rng.normal(size=(prompts, states, 3)) * 0.7 - np.array([0.0, 0.0, 1.0])
    gain = _right_texts(to, offset, rng.beta(0.5, 0.7, prompts).clip(0.01, 0.99), rng)
    shape = (prompts, states, 3, 2)
    to, gain = np.broadcast_to(to[None, ..., None], shape), np.broadcast_to(gain[..., None], shape).astype(float)
    features = skilled(offset, to, gain, DEPTH, 0.0, rng, dims)
    reference = {"reference": references(offset, gain)}
    world = Chain("sequences", offset, features, np.zeros((1, dims)), to, gain, DEPTH, is_tree=True, columns=reference)
    if not updates:
        return world
    path = drifted(world, updates, NATS_IN_BATCH, STEP_ROLLOUTS, seed)
    return with_lag(world, path, updates, name=f"updates={updates}", old="sampled", oldest=True, is_tree=False)


def _right_texts(to: Array, offset: Array, want: Array, rng: np.random.Generator) -> Array:
    """(prompts, states, actions) bool, ends of right texts. The more a text agrees with the prompt's letters in two
    places, the sooner it is right; right ones have about the probability `want`."""
    prompts, states, actions = offset.shape
    spelled = np.full((states, actions, DEPTH), -1)
    reach = np.ones((prompts, states))
    prob = np.exp(offset) / np.exp(offset).sum(-1, keepdims=True)
    for s in range(states):
        parent, letter = (s - 1) // 2, (s - 1) % 2
        depth = int(np.log2(s + 1))
        if s:
            reach[:, s] = reach[:, parent] * prob[:, parent, letter]
            spelled[s] = spelled[parent, letter]
        spelled[s, :2, depth] = [0, 1]
    fit = rng.random((prompts, states, actions)) * 0.9
    for _ in range(2):
        place = rng.integers(DEPTH - 2, size=prompts)
        wanted = rng.integers(2, size=(prompts, 1, 1))
        fit += np.moveaxis(spelled[:, :, place], 2, 0) == wanted
    fit[:, to >= 0] = -1  # no end
    order = np.argsort(-fit.reshape(prompts, -1), axis=1)
    mass = np.take_along_axis((reach[..., None] * prob).reshape(prompts, -1), order, 1).cumsum(1)
    count = np.clip((mass < want[:, None]).sum(1), 1, int((to < 0).sum()))
    return np.asarray((np.argsort(order, axis=1) < count[:, None]).reshape(fit.shape))


def references(offset: Array, gain: Array) -> list[str]:
    """The likeliest right text of each prompt, without its end."""
    prob = np.exp(offset) / np.exp(offset).sum(-1, keepdims=True)
    reach = np.ones(offset.shape[:2])
    for s in range(1, offset.shape[1]):
        reach[:, s] = reach[:, (s - 1) // 2] * prob[:, (s - 1) // 2, (s - 1) % 2]
    best = (reach[..., None] * prob * gain[..., 0]).reshape(len(offset), -1).argmax(1)
    found = []
    for s, letter in zip((best // 3).tolist(), (best % 3).tolist(), strict=True):
        text = "ab"[letter] if letter < 2 else ""
        while s:
            text, s = "ab"[(s - 1) % 2] + text, (s - 1) // 2
        found.append(text)
    return found


def agents(seed: int, prompts: int = 512, dims: int = 64) -> Chain:
    """An environment with 8 turns."""
    return _graph("agents", seed, 5, 8, 0.1, prompts, dims, turns=True)


def team(seed: int, prompts: int = 512, dims: int = 64) -> Chain:
    """The same graphs; in two of the places a sub-agent acts, and each stay there is a call."""
    return _graph("team", seed, 5, 8, 0.1, prompts, dims, helpers=(1, 3))


def delayed(seed: int, lag: int, prompts: int = 512) -> Chain:
    """Longer chains at the end of a run of 128 steps, with rollouts of its last `lag` versions."""
    world, path = _run_before(seed, prompts)
    return with_lag(world, path, lag, name=f"delay={lag}")


@lru_cache(maxsize=1)
def _run_before(seed: int, prompts: int = 512, dims: int = 64) -> tuple[Chain, Array]:
    """The chains before a run, and the parameters of its versions."""
    world = _graph("", seed, 6, 24, 0.0, prompts, dims, old="sampled")
    return world, drifted(world, LONGEST, NATS, STEP_ROLLOUTS, seed)


def _graph(name: str, seed: int, places: int, horizon: int, slip: float, prompts: int, dims: int, **more: Any) -> Chain:
    """In each place one of three actions leads on; the others lead to this or an earlier place, and a slip stays."""
    rng = np.random.default_rng([seed, 3])
    shape = (prompts, places, 3)
    here = np.broadcast_to(np.arange(places)[:, None], shape)
    on = np.arange(3) == rng.integers(3, size=(prompts, places, 1))
    to = np.stack([np.where(on, here + 1, (rng.random(shape) * (here + 1)).astype(np.int64)), here], axis=-1)
    gain = (to == places).astype(float)
    to[to == places] = -1
    bias = rng.normal(0.8, 1.3, size=(prompts, 1, 1))  # pass rates of all sizes
    offset = rng.normal(size=shape) * 0.5 + bias * on
    features = skilled(offset, to, gain, horizon, slip, rng, dims)
    return Chain(name, offset, features, np.zeros((1, dims)), to, gain, horizon, slip=slip, **more)
