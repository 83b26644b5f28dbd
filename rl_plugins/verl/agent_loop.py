"""The agent loop of planned rows: completions given by a plan, forced prefixes, and token limits.

Rows the plan says nothing special about go through verl's own agent loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, _agent_loop_registry, register

from rl_plugins.core.errors import ConfigError
from rl_plugins.verl.compat import initial_tokens
from rl_plugins.verl.host import Output
from rl_plugins.verl.prompts import COLUMN, FORCED, PLANNED_AGENT, TURNS, UNKNOWN, VERSIONS, Given, Note, ranges, runs

if TYPE_CHECKING:
    from rl_plugins.verl.host import AgentLoop as SingleTurnAgentLoop
else:
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class PlannedAgentLoop(SingleTurnAgentLoop):
    """`single_turn_agent` for a row whose plan gives completions, a prefix or a token limit."""

    _prefix: Sequence[int] = ()  # of the completion this object serves

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        plan: Note = kwargs[COLUMN]
        number = int(kwargs["session_id"])
        want_logprobs = bool(sampling_params.get("logprobs"))
        if number < len(plan["given"]):
            given = plan["given"][number]
            output = await self._without_engine(kwargs, given, want_logprobs)
            forced = output.response_mask if given["logprobs"] is None else []
        else:
            output = await self._generated(sampling_params, kwargs, plan)
            forced = [1] * len(plan["prefix"])
            if forced:
                output.extra_fields[VERSIONS] = [[[-1, len(forced)], *_attempts(output)]]
        if want_logprobs and output.response_logprobs is None:
            output.response_logprobs = [0.0] * len(output.response_ids)  # a place holder: see `UNKNOWN`
        output.extra_fields |= {FORCED: ranges(forced), UNKNOWN: ranges(forced)}
        return output

    async def _without_engine(self, kwargs: dict[str, Any], given: Given, want_logprobs: bool) -> Output:
        """A completion of the plan: a sample, if its log-probs are given. With rewards it is not scored again."""
        prompt_ids = list(given.get("prompt") or await initial_tokens(self, list(kwargs["raw_prompt"])))
        tokens, logprobs, reward = list(given["tokens"]), given["logprobs"], given.get("reward")
        observed = given.get("observed") or [False] * len(tokens)
        versions = given.get("versions") or [published(kwargs)] * len(tokens)
        made = [v for v, read in zip(versions, observed, strict=True) if not read]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=tokens,
            response_mask=[int(not read) for read in observed],
            response_logprobs=list(logprobs) if logprobs is not None and want_logprobs else None,
            reward_score=reward,
            multi_modal_data={},
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "global_steps": max(made),
                "min_global_steps": min(made),
                "max_global_steps": max(made),
                VERSIONS: [runs(made)],
                **({TURNS: turns} if (turns := given.get("turns")) else {}),
                **({} if reward is None else {"reward_extra_info": dict(given.get("rewards") or {})}),
            },
        )

    async def _generated(self, sampling_params: dict[str, Any], kwargs: dict[str, Any], plan: Note) -> Output:
        """verl's own run. For the engine the prefix stands behind the prompt; afterwards it is part of the response."""
        prefix = list(plan["prefix"])
        limit = min(plan["max_tokens"] or self.response_length, self.response_length)
        self._prefix = prefix
        output: Output = await super().run({**sampling_params, "max_tokens": limit - len(prefix)}, **kwargs)
        output.prompt_ids = output.prompt_ids[: len(output.prompt_ids) - len(prefix)]
        output.response_ids = [*prefix, *output.response_ids][:limit]
        output.response_mask = [*([1] * len(prefix)), *output.response_mask][:limit]
        if output.response_logprobs is not None:
            output.response_logprobs = [*([0.0] * len(prefix)), *output.response_logprobs][:limit]
        return output

    async def ct_build_initial_tokens(self, *args: Any, **kwargs: Any) -> list[int]:
        return [*await super().ct_build_initial_tokens(*args, **kwargs), *self._prefix]

    async def apply_chat_template(self, *args: Any, **kwargs: Any) -> list[int]:
        """The same in verl 0.9.0."""
        return [*await super().apply_chat_template(*args, **kwargs), *self._prefix]


def published(kwargs: Mapping[str, Any]) -> int:
    """The newest published weights when verl submitted a prompt: it publishes at the end of every global step."""
    return int(kwargs["global_steps"]) - 1


def _attempts(output: Output) -> list[list[int]]:
    """[version, tokens] of every attempt of the one request that made an output."""
    fields = output.extra_fields
    if VERSIONS in fields:
        return list(fields[VERSIONS][-1])
    return [[int(fields["max_global_steps"]), len(output.response_ids)]]


def register_loop(name: str, loop: type) -> None:
    """Registers an agent loop with verl.

    Raises:
        ConfigError: somebody else has the name (verl itself would replace it without a word).
    """
    taken = _agent_loop_registry.get(name)
    if taken is not None and taken.get("_target_") != f"{loop.__module__}.{loop.__qualname__}":
        raise ConfigError(f"The agent loop `{name}` is registered in verl by {taken}; remove that.")
    register(name)(loop)


register_loop(PLANNED_AGENT, PlannedAgentLoop)
