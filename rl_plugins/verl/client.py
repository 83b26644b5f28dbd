"""verl's client of the rollout servers, which also says which published weights made each token.

verl resumes a request that was interrupted by new weights and tells the versions of its first and last attempt. The
class `_Attempts` stands between verl's resuming client and its base, so it sees every attempt.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.verl.prompts import VERSIONS

if TYPE_CHECKING:
    from rl_plugins.verl.host import LLMClient, ResumingClient
else:
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient as ResumingClient
    from verl.workers.rollout.llm_server import LLMServerClient as LLMClient

_attempts: ContextVar[list[list[int]]] = ContextVar("attempts")  # [version, tokens] of each, of the request under way
_requests: ContextVar[list[list[list[int]]]] = ContextVar("requests")  # those of every request of an agent loop so far


class _Attempts(LLMClient):
    """Notes tokens and version of every attempt."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().generate(*args, **kwargs)
        if output.token_ids:
            _attempts.get().append([output.extra_fields["global_steps"], len(output.token_ids)])
        return output


class VersionsClient(ResumingClient, _Attempts):
    """Puts the attempts of every request of an agent loop into `extra_fields`, which verl's loops hand on.

    An agent loop is one task, so a context variable belongs to it alone. All of its answers share one list: verl's loop
    with several turns keeps the fields of its first answer.
    """

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        attempts: list[list[int]] = []
        outside = _attempts.set(attempts)
        try:
            output = await super().generate(*args, **kwargs)
        finally:
            _attempts.reset(outside)
        requests = _requests.get(None)
        if requests is None:
            _requests.set(requests := [])
        requests.append(attempts)
        output.extra_fields[VERSIONS] = requests
        return output


def with_versions(client: Any) -> Any:
    """The client of an asynchronous mode, which tells versions of tokens from now on.

    Raises:
        ConfigError: it is not verl's own.
    """
    if type(client) is not ResumingClient:
        raise ConfigError(
            f"A method needs the versions of tokens, which verl's own client of the rollout servers can tell; this "
            f"trainer has {type(client).__name__}. Remove the method, or derive the trainer from one that keeps "
            f"verl's client."
        )
    client.__class__ = VersionsClient
    return client
