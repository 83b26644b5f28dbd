"""What a run costs, counted where verl's agent loops ask the rollout servers: in every agent-loop worker.

Every attempt of a request is counted, with the tokens it gave, whether the row it belongs to is kept, thrown away by a
program, or given up. Validation is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rl_plugins.requests import Generate, Generated, Trajectory
from rl_plugins.runtime.costs import Costs, Meter, RowCount, Spell, total
from rl_plugins.verl.processes import ask

if TYPE_CHECKING:
    from rl_plugins.verl.host import LLMClient
else:
    from verl.workers.rollout.llm_server import LLMServerClient as LLMClient


class LoopUnderWay:
    """An agent loop and what it asks for.

    Attributes:
        rows: of a rollout program; None where the loop makes one row, whose further requests are its turns.
        begun: it has asked for something.
    """

    def __init__(self) -> None:
        self.rows: RowCount | None = None
        self.begun = False


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
        if loop.rows is None and not loop.begun:
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
    if not isinstance(client, CountedClient):
        kind = type(client)
        below = (CountedClient,) if kind is LLMClient else (kind, CountedClient)
        client.__class__ = below[0] if len(below) == 1 else type(kind.__name__, below, {"__module__": __name__})
    return client


def program_begins() -> None:
    """The agent loop that runs here makes rows by a program."""
    loop = _loop.get()
    if loop is not None:
        loop.rows = RowCount()


def program_sampled(request: Generate, made: Sequence[Generated]) -> None:
    """A program got what it asked for."""
    loop = _loop.get()
    if loop is not None and loop.rows is not None:
        METER.costs.rows_made += loop.rows.count(request.trajectory, made)


def program_scored(trajectory: Trajectory) -> None:
    """A program asked for rewards."""
    if _loop.get() is not None:
        METER.costs.tokens_read += len(trajectory.prompt) + len(trajectory)


def install(worker: Any) -> None:
    """Runs in an agent-loop worker: what its loops ask for in training is counted."""
    worker.llm_client = counted(worker.llm_client)
    host, after = worker._run_agent_loop, worker._agent_loop_postprocess

    async def run_agent_loop(sampling_params: Any, trajectory: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        token = _loop.set(None if trajectory["validate"] else LoopUnderWay())
        try:
            return await host(sampling_params, trajectory, *args, **kwargs)
        finally:
            _loop.reset(token)

    async def postprocess(output: Any, *args: Any, **kwargs: Any) -> Any:
        loop = _loop.get()
        if loop is not None and loop.begun and loop.rows is None and isinstance(output, list):
            METER.costs.rows_made += len(output) - 1  # a loop of verl that makes several rows
        return await after(output, *args, **kwargs)

    worker._run_agent_loop, worker._agent_loop_postprocess = run_agent_loop, postprocess


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
