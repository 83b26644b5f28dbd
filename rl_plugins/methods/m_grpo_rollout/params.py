"""Parameters of `m_grpo_rollout`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import MethodParams, param
from rl_plugins.core.params import GIVEN

_GUARDS = ("speed", "strict")


@dataclass(frozen=True)
class MGrpoRolloutParams(MethodParams):
    main_agent: str = param("main", "name of the main agent in the column `agent`")
    sub_agent: str = param("sub", "name of the sub-agents in the column `agent`")
    parse: Callable[..., Any] | None = param(
        None,
        "function parse(text) that returns the list of tasks a turn delegates, for "
        "example rl_plugins.methods.m_grpo_rollout.method:delegated (the default: texts in "
        "<tool_call> tags)",
    )
    expert: Callable[..., Any] | None = param(
        None,
        "function expert(task, result) that returns a number from 0 to 1 for the column `expert`, which "
        "`expert_column` of m_grpo reads",
    )
    contract: Callable[..., Any] | None = param(
        None,
        "function contract() that returns the rl_plugins.tools.messages.Contract of a sub-agent's result, for example "
        "rl_plugins.tools.messages.contracts:text_result",
    )
    invalid_penalty: float = param(
        0.0, "loss of reward per share of results that the contract rejects", ge=0, only_if={"contract": GIVEN}
    )
    guard: Literal["off", "speed", "strict"] = param(
        "off",
        "policy of the guard of claims: unknown claims are tagged (speed) or verified (strict). `balanced` "
        "verifies hubs, and the hub here is the main agent, which reads the results",
    )
    guard_facts: str = param(
        "", "name of the column with a list of texts that are known to be true", only_if={"guard": _GUARDS}
    )
    guard_verifier: Callable[..., Any] | None = param(
        None,
        "function guard_verifier(fields) that returns green, yellow or red for fields['claim'], for example "
        "rl_plugins.tools.messages.rules:verify_arithmetic (the default)",
        only_if={"guard": "strict"},
    )
    guard_splitter: Callable[..., Any] | None = param(
        None,
        "function guard_splitter(message) that returns the list of claims, for example "
        "rl_plugins.tools.messages.rules:split_claims (the default: sentences and JSON fields)",
        only_if={"guard": _GUARDS},
    )
    guard_entailment: Callable[..., Any] | None = param(
        None,
        "function guard_entailment(fields) that returns green, yellow or red for fields['claim'] against "
        "fields['premises'], for example rl_plugins.tools.messages.rules:entail_by_words (the default)",
        only_if={"guard": _GUARDS},
    )
    guard_log: str = param(
        "",
        "folder to which every rollout's records are appended, for rl_plugins.tools.messages.read_logs and replay",
        only_if={"guard": _GUARDS},
    )
    guard_retries: int = param(1, "K, most times a result goes back to its sub-agent", ge=0, only_if={"guard": _GUARDS})
    sub_prompt: str = param("{task}", "user message of the sub-agent; {task} is its task")
    reply: str = param("<tool_response>{result}</tool_response>", "message to the main agent with one {result}")
    max_calls: int = param(8, "most calls of sub-agents in a rollout, each a row", ge=1)
    max_turns: int = param(8, "most turns of the main agent", ge=1)
    sub_tokens: int | None = param(None, "most tokens of a sub-agent's answer; none: the completion length", ge=1)
    timeout: float = param(
        30.0, "time limit of `parse`, of `expert`, and of the guard for each result, in seconds", gt=0
    )
