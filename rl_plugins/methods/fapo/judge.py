"""The judge of FAPO (arXiv 2510.22543): its parameters, its question and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_plugins import param
from rl_plugins.core.params import GIVEN
from rl_plugins.kit.judges import JudgeParams, make_judge
from rl_plugins.kit.services import ChatEndpoint, Failure, Service, fill
from rl_plugins.methods.echo.answers import last_box

TEMPLATE = """Check the reasoning of a solution whose final answer is right. Its steps are counted from 0.

[Problem]
{prompt}

[Reference answer]
{answer}

[Solution]
{completion}

Go through the steps in their order. A step is wrong if it contains a false statement, a calculation error, or a
conclusion that does not follow. Name the index of the first wrong step, or -1 if there is none. End with this number in
\\boxed{}."""
NO_ERROR = -1
TAIL = 300  # characters at the end of a text in which the authors look for its box


@dataclass(frozen=True)
class FlawParams(JudgeParams):
    """Parameters of the judge of flaws and of what a flaw costs."""

    asked: ClassVar[tuple[str, ...]] = ("prompt", "answer", "completion")
    example_judge: ClassVar[str] = "rl_plugins.lab.demo.judges:sloppy"

    judge: Callable[..., Any] | None = param(
        None,
        "function judge(prompt, answer, completion) that returns the index of the first wrong step, -1 for none, or a "
        "text that ends with it in \\boxed{}; may be `async def`; none: an endpoint judges",
    )
    judge_timeout: float = param(600.0, "time limit of one try, in seconds", gt=0)
    judge_concurrency: int = param(64, "number of questions asked at the same time", ge=1)
    judge_max_tokens: int = param(16384, "most tokens of the endpoint's reply", ge=1, only_if={"judge_url": GIVEN})
    judge_template: str = param(
        TEMPLATE,
        "message to the endpoint, with {prompt}, {answer} and {completion}; a judge that was trained for this needs "
        "the message of its training",
        only_if={"judge_url": GIVEN},
    )
    penalty: float = param(
        1.0,
        "lambda, what a flaw costs, in units of half the distance between the rewards of right and wrong; 0: nothing, "
        "flaws are only counted; 2: as much as a wrong answer",
        ge=0,
    )

    @property
    def endpoint(self) -> Callable[[Mapping[str, str]], str] | None:
        """What judges if it is no function."""
        if self.judge is not None:
            return None
        chat = ChatEndpoint(str(self.judge_url), str(self.judge_model), **self.endpoint_options)
        return lambda fields: chat(fill(self.judge_template, fields))

    def service(self, cache_size: int = 10_000) -> Service:
        """Asks the judge. An answer is the index of the first wrong step, or None for a reply that holds none."""
        return make_judge(self, self.endpoint, first_error, cache_size)


def is_flaw(verdict: int | Failure | None) -> bool:
    """Whether the judge was heard and named a wrong step."""
    return verdict is not None and not isinstance(verdict, Failure) and verdict != NO_ERROR


def first_error(reply: Any) -> int | None:
    """What a judge answered, as the index of the first wrong step; None for a text without a readable one.

    Raises:
        ValueError: neither a whole number nor a text.
    """
    if isinstance(reply, str):
        return boxed_index(reply)
    if reply is None:
        return None
    if isinstance(reply, (bool, bytes)) or not hasattr(reply, "__index__"):
        raise ValueError(
            f"{reply!r} is no verdict; it must be the index of the first wrong step, -1 for none, or a text that ends "
            f"with it in \\boxed{{}}."
        )
    return int(reply)


def boxed_index(reply: str) -> int | None:
    """The whole number in the last \\boxed{} of the last 300 characters of a reply; None if there is none."""
    content = last_box(reply[-TAIL:])
    try:
        return None if content is None else int(content.strip())
    except ValueError:  # no number, or one of thousands of digits
        return None
