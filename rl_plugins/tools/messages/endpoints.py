"""Splitter, entailment and verifier of the guard behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rl_plugins.kit.services import ChatEndpoint, Endpoint, fill

SPLIT = (
    "Write every claim of the message below on a line of its own. Copy its words; add nothing and explain nothing.\n\n"
    "Message: {message}"
)
ENTAIL = (
    "Known to be true:\n{known}\n\nClaim: {claim}\n\n"
    "Answer 1 if the claim follows from what is known, -1 if it contradicts it, 0 if it does neither."
)
VERIFY = (
    "Is this claim true?\n\nClaim: {claim}\n\nKnown to be true:\n{known}\n\n"
    "Answer 1 if it is true, -1 if it is false, 0 if you cannot tell."
)
_VERDICT = r"(?<![\d.])(-?[01])(?![\d.]*\d)"
_MARK = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")


def endpoint_splitter(url: str, model: str, template: str = SPLIT, **options: Any) -> Callable[[str], list[str]]:
    """A splitter that takes every line of the reply as a claim, without list marks.

    A reply without a line raises ValueError, so the guard then takes the message as one claim.

    Args:
        url, model, options: of `rl_plugins.kit.services.ChatEndpoint`.
        template: user message with {message}.
    """
    chat = ChatEndpoint(url, model, **options)

    def split(message: str) -> list[str]:
        lines = [_MARK.sub("", line).strip() for line in chat(fill(template, {"message": message})).splitlines()]
        claims = [line for line in lines if re.search(r"\w", line)]
        if not claims:
            raise ValueError("the reply has no claim")
        return claims

    return split


def endpoint_entailment(
    url: str, model: str, template: str = ENTAIL, **options: Any
) -> Callable[[Mapping[str, Any]], Any]:
    """An entailment that asks about each claim, and answers yellow without a question while nothing is confirmed.

    Args:
        url, model, options: of `rl_plugins.kit.services.Endpoint`.
        template: user message with {claim} and {known}; the reply must hold 1, 0 or -1.
    """
    judge = Endpoint(url, model, template, _VERDICT, **options)
    return lambda fields: judge(fields) if fields["premises"] else "yellow"


def endpoint_verifier(url: str, model: str, template: str = VERIFY, **options: Any) -> Endpoint:
    """A verifier that asks about each claim.

    Args:
        url, model, options: of `rl_plugins.kit.services.Endpoint`.
        template: user message with {claim}, {known}, {sender}, {message}; the reply must hold 1, 0 or -1.
    """
    return Endpoint(url, model, template, _VERDICT, **options)
