"""Parameters of `training_free_grpo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import ConfigError, MethodParams, param
from rl_plugins.core.params import GIVEN
from rl_plugins.kit.services import ChatEndpoint
from rl_plugins.methods.training_free_grpo import texts

_LEARN, _URL = {"learn": True}, {"learn": True, "llm_url": GIVEN}
_GRADED, _PAPER = {"learn": True, "ground_truth": True}, {"learn": True, "variant": "paper"}
Function = Callable[..., Any] | None


@dataclass(frozen=True)
class TrainingFreeParams(MethodParams):
    llm: Function = param(None, "function llm(text) -> reply, `async` or not; none: an endpoint", only_if=_LEARN)
    llm_url: str | None = param(None, "OpenAI-compatible endpoint instead: http://host:8000/v1", only_if=_LEARN)
    llm_model: str | None = param(None, "name of the model at the endpoint", only_if=_URL)
    llm_key_env: str | None = param(None, "environment variable with its key; none: no key", only_if=_URL)
    llm_temperature: float = param(0.7, "temperature of the endpoint", ge=0, only_if=_URL)
    llm_max_tokens: int = param(4096, "most tokens of the endpoint's reply", ge=1, only_if=_URL)
    llm_timeout: float = param(300.0, "time limit of one try, in seconds", gt=0, only_if=_LEARN)
    llm_retries: int = param(2, "further tries of a call that failed or gave no usable answer", ge=0, only_if=_LEARN)
    llm_concurrency: int = param(16, "number of calls at the same time", ge=1, only_if=_LEARN)
    variant: Literal["practice", "paper"] = param(
        "practice", "update rule of the published code, or of the paper's code"
    )
    library: str | None = param(None, "JSON file of the experiences, read at the start, written after each batch")
    learn: bool = param(True, "permission to change the library; false: it is only used")
    per_group: int = param(1, "most experiences (practice) or operations (paper) of a group", ge=1, only_if=_LEARN)
    max_words: int = param(32, "most words of an experience; a longer one is cut (ours)", ge=1, only_if=_LEARN)
    ground_truth: bool = param(
        True, "comparison of groups with some success only; false: all, with answers hidden", only_if=_LEARN
    )
    answer_column: str | None = param(
        None, "dataset column with the reference answer; none: the answer is hidden", only_if=_GRADED
    )
    reward_low: float = param(0.0, "reward of a failure (ours)", only_if=_GRADED)
    reward_high: float = param(1.0, "reward of a success (ours)", only_if=_GRADED)
    objective: str = param(
        "It solves the task it is given.", "purpose of the agent, for the language model", only_if=_LEARN
    )
    learning_objective: str = param(
        "How to solve such tasks more often.", "purpose of the learning, for the language model", only_if=_LEARN
    )
    prompt_template: str = param(texts.PROMPT, "prompt of a rollout, with {experiences} and {problem}")
    prompt_column: str = param("prompt", "dataset column with the prompt")
    merge_without_text: Literal["skip", "delete"] = param(
        "skip", "merge without text: no change, or deletion as in the paper's code", only_if=_PAPER
    )

    def check(self) -> None:
        if not self.learn and self.library is None:
            raise ConfigError(
                "`learn` is false and there is no `library`, so nothing is left to do. Set "
                "`library` to a file, or set `learn` to true."
            )
        if self.learn and self.llm is None and self.llm_url is None:
            raise ConfigError(
                "neither `llm` nor `llm_url` is given. Give the parameter `llm`, a function "
                "llm(text) as module:attribute (to try a run: rl_plugins.lab.demo.advisor:canned), "
                "or `llm_url` and `llm_model` of an endpoint, which may serve the policy "
                "itself."
            )
        if self.llm is not None and self.llm_url is not None:
            raise ConfigError(f"`llm` and `llm_url` ({self.llm_url}) are both given. Remove one of them.")
        if self.llm_url is not None and not self.llm_model:
            raise ConfigError("`llm_url` is given without `llm_model`. Add the name of the model at the endpoint.")
        missing = [f for f in ("{problem}", "{experiences}") if f not in self.prompt_template]
        if missing:
            raise ConfigError(f"`prompt_template` lacks {' and '.join(missing)}; the policy must see both.")
        if self.reward_low >= self.reward_high:
            raise ConfigError(
                f"`reward_low` is {self.reward_low:g} and `reward_high` {self.reward_high:g}; the first must be "
                f"lower. They are the rewards of a failure and of a success."
            )

    @property
    def language_model(self) -> Any:
        """What is asked; None if nothing is learned."""
        if not self.learn or self.llm is not None:
            return self.llm
        assert self.llm_url and self.llm_model  # `check`
        return ChatEndpoint(
            self.llm_url,
            self.llm_model,
            api_key_env=self.llm_key_env or "",
            temperature=self.llm_temperature,
            max_tokens=self.llm_max_tokens,
            timeout=self.llm_timeout,
        )
