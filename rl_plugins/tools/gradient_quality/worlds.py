"""Where rollouts come from: `ExactWorld`, whose expectations are sums, its form `AnswerTable`, and stored pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_plugins.core.errors import ConfigError

Array = NDArray[Any]
PASS_K = 8


@dataclass(frozen=True)
class Answers:
    """Rollouts that a world gave.

    Attributes:
        piece: (rows, time) row of `ExactWorld.scores` that holds the gradient of each token's log-prob.
        mask: (rows, time) bool, False after the end.
        length: (rows,) tokens; where a piece is a whole row, more than the mask has.
        rewards: (rows, functions) float64.
        logprobs: (rows, time) of the policy that is trained; None where pieces are whole rows.
        sampled: (rows, time) of the policy that sampled.
        age: (rows,) versions between the two.
        state: (rows, time) what was observed before each turn; None without turns.
        turn_reward: (rows, time).
        forced: (rows, time) bool, tokens that were put in the policy's place; None: none was.
        helper: (rows, time) bool, tokens of a sub-agent; None: there is none.
        index: (rows,) number of the row inside its rollout; None: every rollout is a row.
        weight: (rows, time) of tokens in the loss; None: each counts alike.
    """

    piece: Array
    mask: Array
    length: Array
    rewards: Array
    logprobs: Array | None = None
    sampled: Array | None = None
    age: Array | None = None
    state: Array | None = None
    turn_reward: Array | None = None
    forced: Array | None = None
    helper: Array | None = None
    index: Array | None = None
    weight: Array | None = None


class ExactWorld(ABC):
    """A policy, prompts and rewards whose exact gradients are known.

    Attributes:
        name: of the world.
        scores: (pieces, dims) gradients of log-probs at the policy that is trained.
        targets: name -> (dims,) exact gradient of what a run may want.
        pass_rate: (prompts,) probability of a right answer.
        reward_names, reward_weights: of the reward functions.
        max_length: tokens of the longest answer.
        columns: of the dataset, (prompts,) each.
        entropies, sum_squared_probs: (pieces,) of the distribution that a token is of; None where a piece is a row.
        entropy_scores: (pieces, dims) gradients of the entropies; None where they are not known.
        old: policy of the old log-probs, unless a method asks for another: the one that is trained, or that sampled.
        is_tree: answers are texts of letters whose probabilities are known one by one, so programs can be served.
    """

    name: str
    scores: Array
    pass_rate: Array
    reward_names: Sequence[str]
    reward_weights: Sequence[float]
    max_length: int
    columns: Mapping[str, Sequence[Any]]
    entropies: Array | None
    sum_squared_probs: Array | None
    old: str
    is_tree: bool = False
    entropy_scores: Array | None = None

    @property
    @abstractmethod
    def targets(self) -> Mapping[str, Array]: ...

    @abstractmethod
    def draw(self, prompt: Array, group: Array, rng: np.random.Generator) -> Answers:
        """One rollout for each entry of `prompt`."""

    @abstractmethod
    def texts(self, prompt: Array, answers: Answers) -> list[str]:
        """What the rollouts say: equal texts are equal answers."""


def targets_of(
    pass_rate: Array, of_pass: Array, others: Mapping[str, Array], k: int = PASS_K
) -> dict[str, NDArray[np.float64]]:
    """Exact gradients of pass@1, pass@k and the hardest quarter of the prompts, each a mean over prompts.

    Args:
        pass_rate: (prompts,). of_pass: (prompts, dims) its gradient.
        others: further targets, in front.
    """
    hard = pass_rate <= np.quantile(pass_rate, 0.25)
    return {
        **others,
        "pass@1": of_pass.mean(0),
        f"pass@{k}": (k * (1 - pass_rate)[:, None] ** (k - 1) * of_pass).mean(0),
        "hardest quarter": of_pass[hard].mean(0),
    }


@dataclass
class AnswerTable(ExactWorld):
    """Prompts with a list of possible answers each: a `ExactWorld`.

    Args:
        prob: (prompts, answers).
        rewards: (prompts, answers, functions), what is trained.
        right: (prompts, answers) bool, what counts.
        score: (prompts, answers, dims), with mean 0 under `prob`.
        length: (prompts, answers) tokens; None: 1, and methods may read tokens.
        wanted: name of a further target -> (prompts, answers) its value.
        said: (prompts, answers) what an answer says after its number.
    """

    name: str
    prob: Array
    rewards: Array
    right: Array
    score: Array
    length: Array | None = None
    reward_names: Sequence[str] = ("reward",)
    reward_weights: Sequence[float] = (1.0,)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    wanted: Mapping[str, Array] = field(default_factory=dict)
    said: Array | None = None
    old: str = "trained"

    def __post_init__(self) -> None:
        self.pass_rate = (self.prob * self.right).sum(1)
        self.scores = self.score.reshape(-1, self.score.shape[2])
        self.max_length = 1 if self.length is None else int(self.length.max())
        entropy = -(self.prob * np.log(np.clip(self.prob, 1e-300, None))).sum(1)
        whole = self.length is not None
        each = self.prob.shape[1]
        self.entropies = None if whole else np.repeat(entropy, each)
        self.sum_squared_probs = None if whole else np.repeat((self.prob**2).sum(1), each)
        self._cumulative = self.prob.cumsum(1)

    @cached_property
    def targets(self) -> Mapping[str, Array]:  # type: ignore[override]  # made once
        """The mean reward, each of several rewards, and those of `targets_of`."""

        def gradient(value: Array) -> Array:
            return np.einsum("pk,pkd->d", self.prob * value, self.score) / len(self.prob)

        weights = np.asarray(self.reward_weights)
        others = {"reward": gradient(self.rewards @ weights)} | {n: gradient(v) for n, v in self.wanted.items()}
        if len(weights) > 1:
            others |= {name: gradient(self.rewards[..., i]) for i, name in enumerate(self.reward_names)}
        of_pass = np.einsum("pk,pkd->pd", self.prob * self.right, self.score)
        return targets_of(self.pass_rate, of_pass, others)

    def draw(self, prompt: Array, group: Array, rng: np.random.Generator) -> Answers:
        last = self.prob.shape[1] - 1
        answer = (rng.random((len(prompt), 1)) > self._cumulative[prompt]).sum(1).clip(max=last)
        return self.answers(prompt, answer)

    def answers(self, prompt: Array, answer: Array) -> Answers:
        """The rollouts with these numbers of answers."""
        piece = (prompt * self.prob.shape[1] + answer)[:, None]
        one = np.ones(len(prompt), np.int64)
        length = one if self.length is None else self.length[prompt, answer]
        logprobs = np.log(self.prob[prompt, answer])[:, None] if self.length is None else None
        return Answers(piece, np.ones_like(piece, bool), length, self.rewards[prompt, answer], logprobs, logprobs)

    def texts(self, prompt: Array, answers: Answers) -> list[str]:
        piece = answers.piece[:, 0]
        texts = [f"answer {a}" for a in (piece % self.prob.shape[1]).tolist()]
        return texts if self.said is None else [a + b for a, b in zip(texts, self.said.ravel()[piece], strict=True)]


def write_pool(path: Path, score: Array, rewards: Array, right: Array, length: Array, **more: Any) -> None:
    """Stores rollouts of a frozen policy with sketched score functions.

    Args:
        score: (prompts, rollouts, dims) gradient of each rollout's log-prob, sketched; kept as float16.
        rewards: (prompts, rollouts, functions). right: (prompts, rollouts) bool. length: (prompts, rollouts) tokens.
        more: `reward_names` of the functions, and `domain` of each prompt.
    """
    np.savez_compressed(path, score=score.astype(np.float16), rewards=rewards, right=right, length=length, **more)


def read_pool(path: Path) -> AnswerTable:
    """A stored pool as a world in which the K answers of a prompt are its K rollouts, each as likely.

    The mean of the score functions is taken off: it is 0 over all answers of the policy, and of K it is noise.

    Args:
        path: .npz of `write_pool` (`rewards` may be `reward` (prompts, rollouts), `right` and `length` may be missing),
            or `rollouts-STEP.parquet` beside `prompts.parquet` and `scores-STEP.npy`, as in benchmarks/real_pool.
    """
    data = _parquet_pool(path) if path.suffix == ".parquet" else _npz(path)
    rewards = data["rewards"] if "rewards" in data else data["reward"][..., None]
    rewards = rewards.astype(np.float64)
    score = data["score"].astype(np.float64)
    score -= score.mean(1, keepdims=True)
    functions = rewards.shape[2]
    names = list(data["reward_names"]) if "reward_names" in data else [f"reward_{i}" for i in range(functions)]
    return AnswerTable(
        path.stem,
        np.full(rewards.shape[:2], 1 / rewards.shape[1]),
        rewards,
        data["right"].astype(bool) if "right" in data else rewards[..., 0] > 0.5,
        score,
        data["length"].astype(np.int64) if "length" in data else np.ones(rewards.shape[:2], np.int64),
        tuple(names),
        (1.0,) * functions,
        {"prior": rewards.sum(-1).mean(1).tolist()} | ({"domain": list(data["domain"])} if "domain" in data else {}),
    )


def _npz(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _parquet_pool(path: Path) -> dict[str, Any]:
    """Of each prompt the first rollouts, as many as have scores. `solved` is what counts, the other rewards are what is
    trained."""
    import pyarrow.parquet as pq
    import pyarrow.types as kinds

    table, prompts = pq.read_table(path), pq.read_table(path.with_name("prompts.parquet"))
    scores = path.with_name(path.stem.replace("rollouts", "scores") + ".npy")
    if not scores.exists():
        raise ConfigError(
            f"{scores} is missing. For real_pool, `python benchmarks/quality_real_pool.py STEP` makes it."
        )
    score = np.load(scores)
    names = [f.name for f in table.schema if kinds.is_floating(f.type) and f.name != "solved"]

    def first(values: Any) -> Array:
        return np.asarray(values).reshape(len(prompts), -1)[:, : score.shape[1]]

    return {
        "score": score,
        "rewards": np.stack([first(table[n]) for n in names], axis=-1),
        "reward_names": names,
        "right": first(table["solved"]) > 0.5,
        "length": first([len(c) for c in table["completion_ids"]]),
        "domain": prompts["task"].to_pylist(),
    }
