"""verl's reward function, called on the driver: by methods in `start` and by `rl-plugins audit`."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, shortened, shown
from rl_plugins.core.rollouts import RewardFunction, Run
from rl_plugins.kit.threads import finished
from rl_plugins.runtime.step_rewards import total
from rl_plugins.verl.capabilities import Reader

MANAGERS = ("naive", "dapo", "limited", "gdpo")  # verl's own, which call the function once per row
FUNCTION = "reward.custom_reward_function"


def with_reward_functions(run: Run, read: Reader, weights: Mapping[str, float]) -> Run:
    """The run with its reward function, or with one for every key of its answer that has a weight.

    Raises:
        ConfigError: the file of the function cannot be loaded.
    """
    why = _unreachable(read)
    if why:
        return replace(run, unreachable_rewards=tuple((name, why) for name in run.reward_names))
    function = _load(read)
    options = dict(read(f"{FUNCTION}.reward_kwargs") or {}) if function is not None else {}
    if function is None:
        from verl.utils.reward_score import default_compute_score

        function = default_compute_score
    named = weights or {"score": 1.0}
    last = _Last(_caller(function, options, str(read("data.reward_fn_key", "data_source"))))
    functions = [RewardFunction(name, w, _part(last, name, bool(weights)), function) for name, w in named.items()]
    return replace(run, reward_functions=tuple(functions))


def _unreachable(read: Reader) -> str:
    if read("reward.reward_model.enable", False):
        return "the run has a reward model, which runs in processes of its own"
    manager, source = read("reward.reward_manager.name", "naive"), read("reward.reward_manager.source", "register")
    if source != "register" or manager not in MANAGERS:
        return f"the reward manager {manager} scores in processes of its own, and only it knows how"
    if not read(f"{FUNCTION}.path") and read("reward.sandbox_fusion.url"):
        return "verl's own reward function runs code in a sandbox"
    return ""


def _load(read: Reader) -> Any:
    """The function in the user's file; None: verl's own is used."""
    path, name = read(f"{FUNCTION}.path"), read(f"{FUNCTION}.name", "compute_score")
    if not path:
        return None
    try:
        if str(path).startswith("pkg://"):
            return getattr(importlib.import_module(str(path).removeprefix("pkg://")), name)
        file = Path(str(path).removeprefix("file://")).expanduser()
        spec = importlib.util.spec_from_file_location(f"rl_plugins_reward_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where inspect looks for its source
        spec.loader.exec_module(module)
        return getattr(module, name)
    except Exception as e:
        raise ConfigError(
            f"{FUNCTION}.path={shown(str(path))} with name={name} cannot be loaded: {type(e).__name__}: "
            f"{shortened(e)}. Give the path of a Python file and the name of a function in it."
        ) from e


Answers = Callable[[Sequence[Mapping[str, Any]], Sequence[str]], list[Any]]


def _caller(function: Any, options: Mapping[str, Any], source_key: str) -> Answers:
    """Calls the function on every row as verl's reward managers do."""

    def arguments(row: Mapping[str, Any], text: str) -> dict[str, Any]:
        truth = row["reward_model"]["ground_truth"] if "reward_model" in row else row.get("ground_truth")
        extra = {**(row.get("extra_info") or {}), "num_turns": 2, "rollout_reward_scores": {}}
        given = {"data_source": row.get(source_key), "solution_str": text, "ground_truth": truth, "extra_info": extra}
        return {**given, **options}

    async def together(calls: Sequence[dict[str, Any]]) -> list[Any]:
        return list(await asyncio.gather(*(function(**c) for c in calls)))

    def call(rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[Any]:
        calls = [arguments(row, text) for row, text in zip(rows, completions, strict=True)]
        if inspect.iscoroutinefunction(function):
            return list(finished(together(calls)))
        return [function(**c) for c in calls]

    return call


class _Last:
    """Remembers the last answers, because the parts of one answer are asked for one after the other."""

    def __init__(self, call: Answers) -> None:
        self.call, self.parts = call, set[str]()
        self.asked: tuple[Any, Any] | None = None
        self.answers: list[Any] = []

    def __call__(self, part: str, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[Any]:
        same = self.asked is not None and self.asked[0] is rows and self.asked[1] is completions
        if not same or part in self.parts:  # the same part once more asks the function once more
            self.asked, self.answers, self.parts = (rows, completions), self.call(rows, completions), set()
        self.parts.add(part)
        return self.answers


def _part(last: _Last, name: str, component: bool) -> Callable[..., list[float | None]]:
    """One key of the answers; without weights the score itself."""

    def call(rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float | None]:
        found: list[float | None] = []
        for answer in last(name, rows, completions):
            if isinstance(answer, Mapping):
                if name not in answer:
                    raise ValueError(f"the reward function's answer has no key `{name}` (it has: {', '.join(answer)})")
                value = answer[name]
            elif component:
                raise ValueError(f"the reward function answers with {type(answer).__name__}, so there is no `{name}`")
            else:
                value = answer
            value = total(value)
            found.append(None if value is None or math.isnan(value) else float(value))
        return found

    return call
