"""Rewards from a service over HTTP, in the forms in which TRL and verl call reward functions.

    remote_reward   TRL: all completions of a batch, columns of the dataset as lists
    remote_score    verl: one completion, a dict with `score`

Each completion is a POST of its own, so the service may run on as many machines as it likes and works while the host
still generates. The request is `{"id", "prompt", "completion", "columns"}`. The answer is a number, or an object with
a number as `reward`.

The id is a digest of the rest of the request, and it is also sent as `Idempotency-Key`. A retry has the id of the first
try, so the service may answer it from its memory. Its reward must depend on the request alone.

A completion that the service gave no reward for has none: NaN, and never 0. Both adapters take such a row out of the
update and of all statistics, and end the run after some batches without any reward (`max_unrewarded_batches`). verl
without methods trains on NaN: use `on_failure: stop` there.

Source: arXiv 2512.22560, stateless rewards as a service. Time-out, retries and failures are ours: it names none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import MethodParams, build_params, param
from rl_plugins.kit.http import Web
from rl_plugins.kit.services import Failure, Service, number, prompt_text


@dataclass(frozen=True)
class RemoteParams(MethodParams):
    """Parameters of the service and its requests."""

    url: str = param("", "address of the service, for example http://rewards:8000/score; required")
    columns: str = param("", "names of the dataset columns to send, separated by commas; empty: none")
    timeout: float = param(60.0, "seconds of one try", gt=0)
    retries: int = param(3, "further tries after one that failed", ge=0)
    backoff: float = param(1.0, "seconds before the first retry, doubled for each further one", ge=0)
    concurrency: int = param(64, "requests at a time", ge=1)
    on_failure: Literal["mask", "stop"] = param("mask", "reaction to a missing reward: row without reward, or error")
    api_key_env: str = param("", "environment variable with the key that is sent; empty: none")


async def remote_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    params: Mapping[str, Any],
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """The reward of each completion in TRL's form, NaN where there is none.

    Use `functools.partial(remote_reward, params={"url": ...})` as reward function, and give it a `__name__`.

    Args:
        prompts, completions: texts or lists of messages.
        params: fields of `RemoteParams`.
        log_metric: TRL's, for `remote_reward/failed`, the share of completions without a reward.
        columns: of the dataset; those named in `params` are sent.

    Raises:
        ConfigError: a parameter is out of range, or a column does not exist.
        MethodError: a reward is missing and `on_failure` is stop.
    """
    client = _client(json.dumps(dict(params), sort_keys=True))
    rows = [
        client.request(prompt_text(prompt), _text(completion), {name: values[i] for name, values in picked.items()})
        for picked in [client.picked(columns)]
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    found = await asyncio.gather(*(client.reward(row) for row in rows))
    if log_metric is not None and found:
        log_metric("remote_reward/failed", sum(map(math.isnan, found)) / len(found))
    return list(found)


async def remote_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    params: Mapping[str, Any],
    **options: Any,
) -> dict[str, Any]:
    """The reward of one completion in verl's form: `score`, NaN without one, and `reward_failed`.

    Args:
        data_source, ground_truth: columns of these names.
        solution_str: completion.
        extra_info: further columns; `question` is sent as the prompt.
        params: fields of `RemoteParams`, in verl's config `reward.custom_reward_function.reward_kwargs.params`.
        options: of verl, not used.

    Raises:
        ConfigError, MethodError: as `remote_reward`.
    """
    client = _client(json.dumps(dict(params), sort_keys=True))
    info = dict(extra_info or {})
    columns = client.picked({**info, "data_source": data_source, "ground_truth": ground_truth})
    reward = await client.reward(client.request(str(info.get("question", "")), solution_str, columns))
    return {"score": reward, "reward_failed": math.isnan(reward)}


class _Client:
    """One service per set of parameters, so that all rows share its limit of requests."""

    def __init__(self, params: RemoteParams) -> None:
        self.params = params
        self.names = [name.strip() for name in params.columns.split(",") if name.strip()]
        self._web = Web(params.url, params.api_key_env, params.timeout, params.concurrency)
        self._service = Service(
            self._post,
            "the reward service",
            answer=number(),
            timeout=params.timeout,
            retries=params.retries,
            backoff=params.backoff,
            concurrency=params.concurrency,
            cache_size=0,
        )

    def picked(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns to send."""
        missing = [name for name in self.names if name not in columns]
        if missing:
            raise ConfigError(
                f"`columns` of remote_reward names {missing[0]}. The dataset has: {', '.join(sorted(columns))}."
            )
        return {name: columns[name] for name in self.names}

    def request(self, prompt: str, completion: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        """What is sent about a completion."""
        row = {"prompt": prompt, "completion": completion, "columns": dict(columns)}
        digest = hashlib.blake2b(json.dumps(row, sort_keys=True, default=str).encode(), digest_size=16)
        return {"id": digest.hexdigest(), **row}

    async def reward(self, request: dict[str, Any]) -> float:
        """NaN where there is none."""
        answer = await self._service.ask_one(request)
        if not isinstance(answer, Failure):
            return float(answer)
        if self.params.on_failure == "stop":
            said = answer.error.partition("\n")[0].rstrip(".")
            raise MethodError(
                f"The reward service at {self.params.url} gave no reward in {self.params.retries + 1} tries: {said}. "
                f"Start it again and resume, or set `on_failure: mask`."
            )
        return math.nan

    def _post(self, request: dict[str, Any]) -> Any:
        content = json.dumps(request, default=str)
        headers = {"Content-Type": "application/json", "Idempotency-Key": request["id"]}
        answer = json.loads(self._web.post(content=content, headers=headers).text)
        return answer.get("reward") if isinstance(answer, dict) else answer


@lru_cache(maxsize=8)
def _client(params: str) -> _Client:
    found = build_params(RemoteParams, json.loads(params), "remote_reward")
    assert isinstance(found, RemoteParams)
    return _Client(found)


def _text(completion: Any) -> str:
    """A completion as text; of messages the last one."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
