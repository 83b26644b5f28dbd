"""Reward functions of papers, in the forms in which TRL and verl call them.

    fapo, fapo_judge                  TRL: all completions of a batch, columns of the dataset as lists
    fapo_score, fapo_judge_score      verl: one completion, a dict with `score`

FAPO (arXiv 2510.22543) as a reward function asks its judge while the host still generates, where the host overlaps the
two; the method `fapo` does the same to any reward function after a batch is complete. `fapo_judge` is the reward with
which the authors train the judge itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rl_plugins.core.params import build_params
from rl_plugins.kit.services import Failure, Service, prompt_text
from rl_plugins.methods.echo.answers import boxed_answer, canonical
from rl_plugins.methods.fapo.judge import NO_ERROR, TAIL, FlawParams, boxed_index, is_flaw

RIGHT, WRONG, HALF = 1.0, -1.0, 1.0


async def fapo(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any],
    split: Sequence[str] | None = None,
    *,
    params: Mapping[str, Any],
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """FAPO's reward in TRL's form: +1 for a right answer, -1 for a wrong one, `penalty` less for a flawed right one.

    An answer is right if the last \\boxed{} of the last 300 characters of a completion is the reference answer. The
    columns are `answer`, and `split` if the dataset has it: rows of the split "test" are not judged.

    Args:
        prompts, completions: texts or lists of messages.
        answer: reference answers.
        split: names of splits.
        params: of the judge and the penalty, as of the method `fapo`: {"judge_url": ..., "judge_model": ...}.
        log_metric: TRL's, for `fapo/acc`, `fapo/flawed` and `fapo/judge_failed`.
        columns: ignored.

    Raises:
        ConfigError: `params` name no judge, or one is out of range.
    """
    splits = ["train"] * len(prompts) if split is None else split
    rows = zip(prompts, completions, answer, splits, strict=True)
    found = await asyncio.gather(*(_scored(prompt_text(p), _text(c), str(a), s, params) for p, c, a, s in rows))
    if log_metric is not None and found:
        for name in ("acc", "flawed", "judge_failed"):
            log_metric(f"fapo/{name}", sum(map(float, (row[_NAMES[name]] for row in found))) / len(found))
    return [row["score"] for row in found]


_NAMES = {"acc": "acc", "flawed": "is_flawed_positive", "judge_failed": "judge_failed"}


async def fapo_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> dict[str, Any]:
    """FAPO's reward in verl's form. See `fapo`.

    Args:
        data_source: not used.
        solution_str: completion.
        ground_truth: reference answer.
        extra_info: of the dataset row: `question`, and `split`: rows of the split "test" are not judged.
        params: of the judge and the penalty; in verl's config `reward.custom_reward_function.reward_kwargs.params`.
        reward_router_address: where verl serves its reward model; the endpoint if `params` name no judge.
        reward_model_tokenizer: not used; the endpoint applies its own chat template.

    Returns:
        `score`; `acc`, whether the answer is right, whatever the judge says; `pred`, the answer, empty without one;
        `is_flawed_positive`; `judge_failed`, whether the judge gave no answer.

    Raises:
        ConfigError: `params` name no judge, or one is out of range.
    """
    info, params = extra_info or {}, dict(params or {})
    if reward_router_address and not params.get("judge") and not params.get("judge_url"):
        params = {"judge_url": f"http://{reward_router_address}/v1", "judge_model": "judge", **params}
    return await _scored(str(info.get("question", "")), solution_str, ground_truth, info.get("split"), params)


async def _scored(
    question: str, completion: str, answer: str, split: str | None, params: Mapping[str, Any]
) -> dict[str, Any]:
    p, judge = _judge_of(**params)
    pred = boxed_answer(completion[-TAIL:])
    acc = pred is not None and pred == canonical(str(answer))
    verdict = await judge.ask_one((question, str(answer), completion)) if acc and split != "test" else NO_ERROR
    flawed = is_flaw(verdict)
    return {
        "score": (RIGHT if acc else WRONG) - HALF * p.penalty * flawed,
        "acc": acc,
        "pred": pred or "",
        "is_flawed_positive": flawed,
        "judge_failed": verdict is None or isinstance(verdict, Failure),
    }


@lru_cache(maxsize=8)
def _judge_of(**params: Any) -> tuple[FlawParams, Service]:
    """One service per set of parameters, so that all rows share its limit of calls."""
    found = build_params(FlawParams, params, "fapo")
    assert isinstance(found, FlawParams)
    return found, found.service(cache_size=0)


def fapo_judge(
    completions: Sequence[Any], error_index: Sequence[int], total_steps: Sequence[int], **columns: Any
) -> list[float]:
    """The reward of a judge in training, in TRL's form: how near its index of the first wrong step is.

    With n steps, the labelled index t* and the judge's t, which is readable if it is -1 or in [0, n):

        not readable   -1
        t* = -1        +1 if t = -1, otherwise -1
        t* >= 0        -1 if t = -1, otherwise 1 - |t - t*| / n

    Args:
        completions: replies of the judge, texts or lists of messages.
        error_index: t*, column of the dataset; -1: no wrong step.
        total_steps: n, column of the dataset.
        columns: ignored.
    """
    rows = zip(completions, error_index, total_steps, strict=True)
    return [_localized(_text(c), int(t), int(n))["score"] for c, t, n in rows]


def fapo_judge_score(
    data_source: str, solution_str: str, ground_truth: int | str, extra_info: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """The reward of a judge in training, in verl's form. See `fapo_judge`.

    Args:
        data_source: not used.
        solution_str: reply of the judge.
        ground_truth: t*.
        extra_info: of the dataset row, with `total_steps`.
        options: not used.

    Returns:
        `score`; `acc`, whether the judge is right that there is a wrong step or none; `pred`, t, or None if it is not
        readable.
    """
    return _localized(solution_str, int(ground_truth), int(extra_info["total_steps"]))


def _localized(reply: str, label: int, steps: int) -> dict[str, Any]:
    pred = boxed_index(reply)
    if pred is not None and pred != NO_ERROR and not 0 <= pred < steps:
        pred = None
    acc = pred is not None and (pred == NO_ERROR) == (label == NO_ERROR)
    distance = abs(pred - label) / steps if acc and pred is not None and label != NO_ERROR else 0.0
    return {"score": RIGHT - distance if acc else WRONG, "acc": acc, "pred": pred}


def _text(completion: Any) -> str:
    """A completion as text; of messages the last one."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
