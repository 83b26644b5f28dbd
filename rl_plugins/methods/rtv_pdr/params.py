"""Parameters of `rtv_pdr`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import ConfigError, MethodParams, param
from rl_plugins.core.params import GIVEN, above
from rl_plugins.kit.agents.environment import check_environment

_WAVES, _AGENT = {"waves": above(1)}, {"environment": GIVEN}
_CALLED = (_AGENT, {"summarizer": GIVEN}, {"judge": GIVEN})
_OWN_JUDGE, _OWN_SUMMARY = {"judge": None}, {"summarizer": None}
Function = Callable[..., Any] | None


@dataclass(frozen=True)
class RtvPdrParams(MethodParams):
    attempts: int = param(16, "N, number of rollouts of a wave", ge=1)
    waves: int = param(2, "T, number of waves; 1: only a tournament", ge=1)
    keep: int = param(4, "K, number of summaries that the next wave reads", ge=1, only_if=_WAVES)
    group_size: int = param(2, "G, number of candidates of one comparison", ge=2)
    votes: int = param(8, "V, number of votes per comparison", ge=1)
    final_pool: Literal["last", "all"] = param(
        "last", "waves whose rollouts are candidates for the answer", only_if=_WAVES
    )
    training: Literal["plain", "refined", "hard"] = param("plain", "kind of training rollouts")
    hard_below: float = param(
        0.0, "largest reward of a prompt's rollouts at which it gets another wave", only_if={"training": "hard"}
    )
    environment: Function = param(None, "class or function that makes an agent's environment; none: single answers")
    max_turns: int = param(16, "most turns of an agent", ge=1, only_if=_AGENT)
    turn_tokens: int | None = param(
        None, "most tokens of one turn; none: the room left in the completion", ge=1, only_if=_AGENT
    )
    summarizer: Function = param(None, "function summarizer(problem, attempt) -> text; none: the policy")
    judge: Function = param(None, "function judge(problem, summaries) -> number from 1; none: the policy")
    call_timeout: float = param(
        120.0, "time limit of a call of environment, summarizer or judge, in seconds", gt=0, only_if=_CALLED
    )
    summary_shape: Literal["headings", "swe_bench", "terminal_bench"] = param(
        "headings", "form of the policy's summaries: ours, or that of an example in the paper", only_if=_OWN_SUMMARY
    )
    summary_chars: int = param(4000, "most characters of a summary", ge=1)
    summary_tokens: int = param(1024, "most tokens of a summary by the policy", ge=1, only_if=_OWN_SUMMARY)
    judge_tokens: int = param(1024, "most tokens of a vote by the policy", ge=1, only_if=_OWN_JUDGE)
    judge_temperature: float = param(
        1.0, "temperature of the policy as judge; votes must differ", gt=0, only_if=_OWN_JUDGE
    )
    shuffle: bool = param(True, "random assignment of the candidates to groups (ours)")
    permute: bool = param(True, "random order of the candidates for each vote (ours)")
    ties: Literal["random", "first"] = param("random", "choice of the winner in a tie (random is ours)")
    unparsable: Literal["discard", "first"] = param("discard", "treatment of an unreadable vote (ours)")

    def check(self) -> None:
        check_environment(self.environment)
        if self.training != "plain" and self.waves < 2:
            raise ConfigError(
                f"`training` is {self.training}, which needs a wave that reads summaries, and `waves` is "
                f"{self.waves}. Set waves: 2, or training: plain."
            )
