"""What a run costs, counted where verl's agent loops ask the rollout servers: in every agent-loop worker.

Every attempt of a request is counted, with the tokens it gave, whether the row it belongs to is kept, thrown away by a
program, or given up. Validation is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rl_plugins.core.requests import Trajectory
from rl_plugins.runtime.costs import Costs, Meter, Spell, total
from rl_plugins.runtime.programs import Running
from rl_plugins.verl.processes import ask, wrap

if TYPE_CHECKING:
    from rl_plugins.verl.host import LLMClient
else:
    from verl.workers.rollout.llm_server import LLMServerClient as LLMClient


class LoopUnderWay:
    """An agent loop and what it asks for.

    Attributes:
        program: it runs a rollout program; else it makes one row, whose further requests are its turns.
        begun: it has asked for something.
    """

    def __init__(self) -> None:
        self.program = self.begun = False


def in_training() -> bool:
    """Whether the agent loop that is running makes rows of training; in validation it does not."""
    return _loop.get() is not None


METER = Meter()
"""Of this process."""
_loop: ContextVar[LoopUnderWay | None] = ContextVar("rl_plugins_loop", default=None)  # of training; None in validation
ABORTED = ("aborted", "abort")  # stop reasons of verl's servers


class CountedClient(LLMClient):
    """Stands below verl's resuming client, so it sees every attempt."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        loop = _loop.get()
        if loop is None:
            return await super().generate(*args, **kwargs)
        if not loop.program and not loop.begun:
            METER.costs.rows_made += 1
        loop.begun = True
        with METER.busy():
            output = await super().generate(*args, **kwargs)
        if output.token_ids or output.stop_reason not in ABORTED:  # else it came back before a server took it up
            METER.costs.engine_calls += 1
            METER.costs.tokens_read += len(kwargs["prompt_ids"])
            METER.costs.tokens_decoded += len(output.token_ids)
        return output


def counted(client: Any) -> Any:
    """The same client, which counts from now on."""
    kind = type(client)
    if kind is LLMClient:
        client.__class__ = CountedClient
    elif not issubclass(kind, CountedClient):
        client.__class__ = type(kind.__name__, (kind, CountedClient), {"__module__": __name__})
    return client


@contextlib.contextmanager
def program(running: Running) -> Iterator[Running]:
    """The agent loop runs a program, which knows how many rows it made; they are counted when it ends."""
    loop = _loop.get()
    if loop is not None:
        loop.program = True
    try:
        yield running
    finally:
        if loop is not None:
            METER.costs.rows_made += running.rows_made


def program_scored(trajectory: Trajectory) -> None:
    """A program asked for rewards."""
    if _loop.get() is not None:
        METER.costs.tokens_read += len(trajectory.prompt) + len(trajectory)


def install(worker: Any) -> None:
    """Runs in an agent-loop worker: what its loops ask for in training is counted."""
    if isinstance(worker.llm_client, CountedClient):
        return
    worker.llm_client = counted(worker.llm_client)

    def looped(host: Any) -> Any:
        async def run_agent_loop(sampling_params: Any, trajectory: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            token = _loop.set(None if trajectory["validate"] else LoopUnderWay())
            try:
                return await host(sampling_params, trajectory, *args, **kwargs)
            finally:
                _loop.reset(token)

        return run_agent_loop

    def processed(after: Any) -> Any:
        async def postprocess(output: Any, *args: Any, **kwargs: Any) -> Any:
            loop = _loop.get()
            if loop is not None and loop.begun and not loop.program and isinstance(output, list):
                METER.costs.rows_made += len(output) - 1  # a loop of verl that makes several rows
            return await after(output, *args, **kwargs)

        return postprocess

    wrap(worker, "_run_agent_loop", looped)
    wrap(worker, "_agent_loop_postprocess", processed)


def take(worker: Any) -> tuple[Costs, list[Spell]]:
    """Runs in an agent-loop worker: what was counted there since the last time."""
    return METER.take()


class Meters:
    """The meters of all agent-loop workers, for the driver."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)
        ask(self.workers, install)

    def take(self) -> Costs:
        """What was counted since the last time."""
        return total(ask(self.workers, take))
