"""Finite Markov decision processes with one policy for many prompts: exact gradients by dynamic programming.

A prompt is a process with S states, numbered from 0, and A actions in each. State 0 is the first. An action leads
to one of two states, with the chances `1 - slip` and `slip`. The policy is log-linear: logits = offset + features .
theta. A token is an action, so trees are language models over two letters, and small graphs are environments of agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_plugins.lab.quality.drive import Driver, QualityVariant
from rl_plugins.tools.gradient_quality import Answers, ExactWorld, targets_of

Array = NDArray[Any]


@dataclass
class Chain(ExactWorld):
    """A `ExactWorld` of processes.

    Args:
        offset: (prompts, states, actions). features: (prompts, states, actions, dims).
        thetas: (versions, dims), the newest last: the policy that is trained.
        to: (prompts, states, actions, 2) next states, -1 where the rollout ends.
        gain: (prompts, states, actions, 2) reward of the transition: 1 for a success, which ends the rollout.
        horizon: most actions of a rollout.
        lag: rollouts of a group are 0 to so many versions old, each number as likely.
        oldest: they are all `lag` versions old.
        slip: chance of the second of two next states.
        turns: every action is a turn of an agent, and its state what was observed before.
        letters: of the actions, for texts.
        old: policy of the old log-probs, "trained" or "sampled".
        helpers: states in which a sub-agent acts.
        is_tree: a state is a text of letters "a" and "b", and the third action ends it.
    """

    name: str
    offset: Array
    features: Array
    thetas: Array
    to: Array
    gain: Array
    horizon: int
    lag: int = 0
    oldest: bool = False
    slip: float = 0.0
    turns: bool = False
    letters: str = "ab."
    old: str = "trained"
    helpers: tuple[int, ...] = ()
    is_tree: bool = False
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    reward_names: Sequence[str] = ("reward",)
    reward_weights: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        self.max_length = self.horizon
        logprobs = np.stack([self.logprobs_at(theta) for theta in self.thetas[-self.lag - 1 :]])
        self._logprobs = logprobs.reshape(len(logprobs), -1)  # (versions, pieces), the newest last
        prob = np.exp(logprobs[-1])
        self._prob = prob
        self._cumulative = np.exp(logprobs).cumsum(-1)
        dims = self.features.shape[-1]
        mean = np.einsum("psa,psad->psd", prob, self.features)
        self.scores = (self.features - mean[:, :, None]).reshape(-1, dims).astype(np.float32)
        actions = prob.shape[-1]
        self.entropies = np.repeat(-(prob * logprobs[-1]).sum(-1).ravel(), actions)
        self.sum_squared_probs = np.repeat((prob**2).sum(-1).ravel(), actions)
        self._weights, self.pass_rate = self._occupancy_times_advantage(np.ones(self.horizon))
        self.columns = {**self.columns, "prior": self.pass_rate.tolist()}

    @cached_property
    def entropy_scores(self) -> Array:  # type: ignore[override]  # made where it is asked for
        logprobs = np.log(np.clip(self._prob, 1e-300, None))
        scores = self.scores.reshape(*self._prob.shape, -1)
        of_state = -np.einsum("psa,psad->psd", self._prob * logprobs, scores)
        return np.repeat(of_state.reshape(-1, scores.shape[-1]), self._prob.shape[-1], axis=0)

    def logprobs_at(self, theta: Array) -> Array:
        """(prompts, states, actions) under these parameters."""
        logits = self.offset + self.features @ theta
        peak = logits.max(-1, keepdims=True)
        return np.asarray(logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True)))

    @cached_property
    def targets(self) -> Mapping[str, Array]:  # type: ignore[override]  # made once
        """The mean reward, those of `targets_of`, and "short and right": a success at action t counts 1 - t/horizon."""
        short, _ = self._occupancy_times_advantage(1 - np.arange(self.horizon) / self.horizon)
        of_pass = self._gradient(self._weights)
        others = {"reward": of_pass.mean(0), "short and right": self._gradient(short).mean(0)}
        return targets_of(self.pass_rate, of_pass, others)

    def _gradient(self, weights: Array) -> NDArray[np.float64]:
        """(prompts, dims) of weights per piece."""
        prompts = len(self.offset)
        scores = self.scores.reshape(prompts, -1, self.scores.shape[1])
        return np.asarray((weights.reshape(prompts, 1, -1) @ scores)[:, 0], dtype=np.float64)

    def _occupancy_times_advantage(self, factor: Array) -> tuple[Array, Array]:
        """(prompts, states, actions): sum over t of d_t(s) pi(a|s) Q_t(s, a), and (prompts,) values of the first state.

        Args:
            factor: (horizon,) of a reward by its time.
        """
        chance = np.array([1 - self.slip, self.slip])
        prompts, states, _ = self._prob.shape
        each = np.arange(prompts)[:, None, None, None]
        ends = self.to < 0
        value, of_action = np.zeros((prompts, states)), list[Array]()
        for t in reversed(range(self.horizon)):
            later = np.where(ends, 0.0, value[each, self.to])
            of_action.append(((self.gain * factor[t] + later) * chance).sum(-1))
            value = (self._prob * of_action[-1]).sum(-1)
        occupied, total = np.zeros((prompts, states)), np.zeros_like(self._prob)
        occupied[:, 0] = 1
        target = np.where(ends, states, self.to) + each * (states + 1)
        for q in reversed(of_action):
            there = occupied[..., None] * self._prob
            total += there * q
            flow = np.bincount(target.ravel(), (there[..., None] * chance).ravel(), minlength=prompts * (states + 1))
            occupied = flow.reshape(prompts, states + 1)[:, :states]
        return total, value[:, 0]

    def draw(self, prompt: Array, group: Array, rng: np.random.Generator) -> Answers:
        rows, states, actions = len(prompt), *self.offset.shape[1:]
        age = np.full(rows, self.lag)
        if self.lag and not self.oldest:
            _, first = np.unique(group, return_inverse=True)
            age = rng.integers(self.lag + 1, size=first.max() + 1)[first]
        version = len(self._logprobs) - 1 - age
        state, alive = np.zeros(rows, np.int64), np.ones(rows, bool)
        shape = (rows, self.horizon)
        piece, seen, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
        reward = np.zeros(shape)
        for t in range(self.horizon):
            dice = rng.random((rows, 2))
            action = (dice[:, :1] > self._cumulative[version, prompt, state]).sum(1).clip(max=actions - 1)
            slipped = (dice[:, 1] < self.slip).astype(np.int64)
            mask[:, t], seen[:, t] = alive, state
            piece[:, t] = (prompt * states + state) * actions + action
            reward[:, t] = self.gain[prompt, state, action, slipped] * alive
            after = self.to[prompt, state, action, slipped]
            alive &= after >= 0
            state = np.where(alive, after, 0)
            if not alive.any():
                break
        return Answers(
            piece=piece,
            mask=mask,
            length=mask.sum(1),
            rewards=reward.sum(1)[:, None],
            logprobs=self._logprobs[-1][piece],
            sampled=self._logprobs[version[:, None], piece],
            age=age,
            state=seen if self.turns else None,
            turn_reward=reward if self.turns else None,
            helper=np.isin(seen, self.helpers) & mask if self.helpers else None,
        )

    def texts(self, prompt: Array, answers: Answers) -> list[str]:
        action = answers.piece % self.offset.shape[2]
        letters = np.array(list(self.letters))[action]
        rows = zip(letters.tolist(), answers.length.tolist(), strict=True)
        return ["".join(row[:n]) for row, n in rows]


def skilled(
    offset: Array, to: Array, gain: Array, horizon: int, slip: float, rng: np.random.Generator, dims: int
) -> Array:
    """(prompts, states, actions, dims) features: noise, and a skill of the prompt's domain that good actions share."""
    prompts, states, actions = offset.shape
    flat = Chain("", offset, np.zeros((*offset.shape, 1)), np.zeros((1, 1)), to, gain, horizon, slip=slip)
    # The advantage of an action, from its own share of the gradient: pi (Q - V), summed over the times.
    share = flat._weights - flat._prob * flat._weights.sum(-1, keepdims=True)
    good = share / (np.abs(share).max((1, 2), keepdims=True) + 1e-12)
    skills = rng.normal(size=(6, dims))
    shared = 0.25 * skills[rng.integers(6, size=prompts)] + 0.25 * skills.mean(0)
    noise = rng.normal(size=(prompts, states, actions, dims))
    return np.asarray((noise + good[..., None] * shared[:, None, None]) / np.sqrt(dims), dtype=np.float32)


def drifted(world: Chain, versions: int, nats: float, rollouts: int, seed: int) -> Array:
    """(versions + 1, dims) parameters of a run of plain GRPO from `world`: each step moves the policy by about `nats`
    per token (KL), on rollouts of the policy before it."""
    theta, path = world.thetas[-1], [world.thetas[-1]]
    at = world
    for v in range(versions):
        step = Driver(at, QualityVariant("grpo"), rollouts, seed + v).batch().gradient
        moved = at.scores @ step  # change of log-probs per unit of learning rate
        fisher = float((at._prob.ravel() * moved**2).sum() / (at._prob.shape[0] * at._prob.shape[1]))
        theta = theta + step * np.sqrt(2 * nats / max(fisher, 1e-12))
        path.append(theta)
        at = Chain(**{**_fields(world), "thetas": theta[None]})
    return np.stack(path)


def with_lag(world: Chain, path: Array, lag: int, **changes: Any) -> Chain:
    """The world at the end of a path of parameters, with rollouts of up to `lag` versions before."""
    return Chain(**{**_fields(world), "thetas": path, "lag": lag, **changes})


def _fields(world: Chain) -> dict[str, Any]:
    return {name: getattr(world, name) for name in Chain.__dataclass_fields__}
