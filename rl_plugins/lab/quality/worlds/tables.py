"""Log-linear tables: a prompt has some answers, right ones share what a skill teaches, and pass rates are U-shaped.

binary     a right answer has the reward 1
graded     parts of an answer count, and a judge likes a mark that has nothing to do with being right
outliers   the right answer matters, and one answer of twelve has an extreme reward of either sign
skills     binary; what hard prompts need is not what easy ones teach
judged     a judge gives 0.6 for a right answer and 0.4 for a mark; half of the right ones have a flaw
rewards    three reward functions: right (0 or 1), format (0 or 1, mostly given), brevity (0 to 10, mostly noise)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_plugins.tools.gradient_quality import AnswerTable

KINDS = ("binary", "graded", "outliers", "skills", "judged", "rewards")
RIGHT = 4  # of the answers
MARK, FLAW = " marked", " flawed"
EDGES = (0.05, 0.15, 0.35, 0.65, 0.9)  # of pass rates, between the domains of `skills`


def table(kind: str, seed: int, prompts: int = 512, answers: int = 16, dims: int = 96) -> AnswerTable:
    """One of `KINDS`. The logit of an answer is an offset plus its features times the parameters, which are 0."""
    rng = np.random.default_rng([seed, 1])
    right = np.broadcast_to(np.arange(answers) < RIGHT, (prompts, answers))
    want = rng.beta(0.5, 0.7, prompts).clip(0.002, 0.995)
    domain = np.searchsorted(EDGES, want) if kind == "skills" else rng.integers(len(EDGES) + 1, size=prompts)
    features = _features(right, domain, 0.0 if kind == "skills" else 0.2, dims, rng)
    prob = with_pass_rate(rng.normal(size=(prompts, answers)), right, want)
    wanted, said = {}, None
    names, rewards = ("reward",), _reward(kind, right, rng)[..., None]
    if kind == "rewards":
        names = ("right", "format", "brevity")  # type: ignore[assignment]
        mark, length = rng.random(right.shape) < 0.8, rng.gamma(2.0, 1.0, right.shape).clip(max=10)
        features += 0.15 * rng.normal(size=dims) * mark[..., None] - 0.05 * rng.normal(size=dims) * length[..., None]
        rewards = np.stack([right.astype(float), mark.astype(float), 10 - length], axis=-1)
    if kind == "judged":
        mark, flawed = rng.random(right.shape) < 0.3, np.broadcast_to(np.arange(answers) % 2 > 0, right.shape)
        features += 0.2 * rng.normal(size=dims) * mark[..., None] + 0.2 * rng.normal(size=dims) * flawed[..., None]
        rewards = (0.6 * right + 0.4 * mark)[..., None]
        wanted = {"sound": right & ~flawed}
        said = np.char.add(np.where(mark, MARK, ""), np.where(flawed, FLAW, ""))
    features /= np.sqrt(dims)
    score = features - np.einsum("pk,pkd->pd", prob, features)[:, None]
    noisy = (want + 0.2 * rng.choice([-1, 1], prompts)).clip(0, 1)
    columns: dict[str, Any] = {
        "domain": [f"domain {d}" for d in domain],
        "prior": (prob * (rewards.sum(-1))).sum(1).tolist(),
        "prior_off": noisy.tolist(),
        "seems": (np.log(want / (1 - want)) + rng.normal(size=prompts)).tolist(),
    }
    return AnswerTable(
        kind,
        prob,
        rewards,
        right,
        score.astype(np.float32),
        reward_names=names,
        reward_weights=(1.0,) * len(names),
        columns=columns,
        wanted=wanted,
        said=said,
    )


def better_of(prompt: str, a: str, b: str) -> tuple[float, float]:
    """A judge of pairs, which likes the mark more than a right answer in one prompt of four."""
    fooled = int(prompt.removeprefix("question ")) % 4 == 0

    def score(text: str) -> float:
        return (answer_of(text) == "right") + (MARK in text) * (2.0 if fooled else 0.5)

    return score(a), score(b)


def first_flaw(prompt: str, answer: str, completion: str) -> int:
    """A judge of steps: 0 where it finds a flaw, else -1. It is wrong in one prompt of ten."""
    wrong = int(prompt.removeprefix("question ")) % 10 == 0
    return 0 if (FLAW in completion) != wrong else -1


def embeddings(dataset: Any) -> NDArray[np.float64]:
    """(prompts, 2) directions on a half circle, by how hard a prompt seems: alike where prompts are alike."""
    angle = np.pi / (1 + np.exp(-np.asarray(dataset["seems"])))
    return 8 * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def answer_of(text: str) -> str:
    """What is voted on: right texts say the same, as different ways to one result; each wrong one says another."""
    return "right" if int(text.split()[1]) < RIGHT else text


def with_pass_rate(logit: NDArray[Any], right: NDArray[np.bool_], want: NDArray[Any]) -> NDArray[np.float64]:
    """(prompts, answers) probabilities of a softmax in which right answers are shifted until they have `want`."""
    weight = np.exp(logit)
    now = (weight * right).sum(1) / weight.sum(1)
    weight = np.where(right, weight * (want / (1 - want) * (1 - now) / now)[:, None], weight)
    return np.asarray(weight / weight.sum(1, keepdims=True))


def _features(
    right: NDArray[np.bool_], domain: NDArray[Any], common: float, dims: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Each answer's own part; right ones have a direction of their domain and, times `common`, one that all share."""
    skills = rng.normal(size=(len(EDGES) + 1, dims))
    shared = 0.2 * skills[domain] + common * skills.mean(0)
    return np.asarray(rng.normal(size=(*right.shape, dims)) + right[..., None] * shared[:, None])


def _reward(kind: str, right: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.float64]:
    if kind == "graded":
        part = np.where(right, 1.0, rng.choice([0, 0.25, 0.5, 0.75], size=right.shape))
        return np.asarray(0.4 * right + 0.4 * part + 0.2 * (rng.random(right.shape) < 0.1))
    if kind == "outliers":
        return np.asarray(right + rng.choice([0.0, 4.0, -4.0], p=[0.92, 0.04, 0.04], size=right.shape))
    return right.astype(float)
