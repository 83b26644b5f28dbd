"""A judge that a method asks about completions: a function of the user, or a model at an endpoint.

`JudgeParams` are the parameters that name one, and `make_judge` builds the service that asks it:

    class Params(JudgeParams):
        asked: ClassVar[tuple[str, ...]] = ("prompt", "completion")
        judge_template: str = param(TEMPLATE, "message to the endpoint, with {prompt} and {completion}")

    judge = make_judge(params, endpoint, answer=number(0, 10))
    scores = judge.ask([(prompt, completion), ...], strict=False)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import GIVEN, MethodParams, param
from rl_plugins.kit.services import Service


@dataclass(frozen=True)
class JudgeParams(MethodParams):
    """Parameters of methods with a judge.

    Class attributes a subclass sets:
        asked: names of the texts that the judge gets, in the order of the function's arguments; the template must
            have all of them.
        example_judge: "module:attribute" of a function that serves, for messages.
    """

    asked: ClassVar[tuple[str, ...]] = ()
    example_judge: ClassVar[str] = ""

    judge: Callable[..., Any] | None = param(
        None, "function of the texts that returns a verdict; may be `async def`; none: an endpoint judges"
    )
    judge_batch_size: int | None = param(
        None,
        "largest list of tuples of texts that the judge takes in one call, which returns a list of verdicts; none: one "
        "tuple per call, as separate arguments",
        ge=1,
        only_if={"judge": GIVEN},
    )
    judge_url: str | None = param(None, "OpenAI-compatible endpoint instead of `judge`: http://host:8000/v1")
    judge_model: str | None = param(None, "name of the model at the endpoint", only_if={"judge_url": GIVEN})
    judge_key_env: str | None = param(
        None, "environment variable with the endpoint's key; none: no key is sent", only_if={"judge_url": GIVEN}
    )
    judge_timeout: float = param(120.0, "time limit of one try, in seconds", gt=0)
    judge_retries: int = param(2, "number of further tries of a failed question", ge=0)
    judge_concurrency: int = param(16, "number of questions asked at the same time", ge=1)
    judge_temperature: float = param(0.0, "temperature of the endpoint", ge=0, only_if={"judge_url": GIVEN})
    judge_max_tokens: int = param(2048, "most tokens of the endpoint's reply", ge=1, only_if={"judge_url": GIVEN})
    judge_template: str = param("", "message to the endpoint", only_if={"judge_url": GIVEN})

    def check(self) -> None:
        if self.judge is None and self.judge_url is None:
            raise ConfigError(
                f"neither `judge` nor `judge_url` is given. Give `judge`, a function "
                f"judge({', '.join(self.asked)}) as module:attribute (the demo's: {self.example_judge}), or "
                f"`judge_url` and `judge_model` of an endpoint."
            )
        if self.judge is not None and self.judge_url is not None:
            raise ConfigError(f"`judge` and `judge_url` ({self.judge_url}) are both given. Remove one of them.")
        if self.judge_url is None:
            return
        if not self.judge_model:
            raise ConfigError("`judge_url` is given without `judge_model`. Add the name of the model at the endpoint.")
        missing = [field for field in (f"{{{name}}}" for name in self.asked) if field not in self.judge_template]
        if missing:
            raise ConfigError(
                f"`judge_template` lacks {', '.join(missing)}; the judge must see all of "
                f"{', '.join(f'{{{name}}}' for name in self.asked)}."
            )

    @property
    def endpoint_options(self) -> dict[str, Any]:
        """Keywords of `ChatEndpoint` and `Endpoint`."""
        return {
            "api_key_env": self.judge_key_env or "",
            "temperature": self.judge_temperature,
            "max_tokens": self.judge_max_tokens,
            "timeout": self.judge_timeout,
        }


def make_judge(
    params: JudgeParams,
    endpoint: Callable[[Mapping[str, str]], Any] | None,
    answer: Callable[[Any], Any],
    cache_size: int = 10_000,
) -> Service:
    """The service that asks the judge of these parameters.

    An item is a tuple of the texts named by `asked`. What follows them only tells the item from equal ones: the judge
    does not see it.

    Args:
        endpoint: takes the texts by name; used where `params.judge` is not given.
        answer, cache_size: as of `Service`.
    """
    n = len(params.asked)

    def ask(item: Any) -> Any:
        if params.judge is None:
            assert endpoint is not None  # the parameters ask for one or the other
            return endpoint(dict(zip(params.asked, item[:n], strict=True)))
        return params.judge(*item[:n]) if params.judge_batch_size is None else params.judge([i[:n] for i in item])

    return Service(
        ask,
        "the judge",
        answer=answer,
        batch_size=params.judge_batch_size,
        timeout=params.judge_timeout,
        retries=params.judge_retries,
        concurrency=params.judge_concurrency,
        cache_size=cache_size,
    )
