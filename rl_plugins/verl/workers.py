"""verl's agent-loop workers with rollout programs: `actor_rollout_ref.rollout.agent.agent_loop_manager_class`.

Set by the adapter where a method makes the rollouts. Prompts without a program go through verl's own code unchanged.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rl_plugins.core.errors import MethodError
from rl_plugins.runtime.stack import MethodStack, Watcher
from rl_plugins.verl.compat import check_verl
from rl_plugins.verl.config import end_tokens, read_settings
from rl_plugins.verl.host import Output
from rl_plugins.verl.prompts import COLUMN, PROGRAM_AGENT
from rl_plugins.verl.session import SESSION, Session, row_kwargs

if TYPE_CHECKING:
    from rl_plugins.verl.host import AgentLoopWorker
else:
    AgentLoopWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # the class behind verl's Ray actor


class ProgramWorker(AgentLoopWorker):
    """verl's worker, in which a prompt may be served by a rollout program.

    Attributes:
        rl_plugins_errors: what ended programs of this worker; the driver asks for it (see processes.py).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_verl()  # of this node
        settings = read_settings(self.config)
        assert settings is not None  # the option that names this worker is set where there are methods
        self._settings, self._methods = settings, settings.stack()
        self._eos = end_tokens(self.model_config)
        self.rl_plugins_errors: list[str] = []

    def methods_of(self, prompt: Mapping[str, Any]) -> MethodStack:
        """The methods that act on a prompt."""
        return self._methods

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        session = self._session(prompt, bool(trajectory["validate"]))
        if session is not None:
            given = len(prompt[COLUMN]["given"]) if COLUMN in prompt else 0
            sessions = given + (session.n > 0)  # completions of the plan have their own; the program is one
            prompt |= {"agent_name": PROGRAM_AGENT, "__rollout_n__": sessions, SESSION: session}
        await super()._run_prompt(prompt, sampling_params, trajectory, trace)

    def _session(self, prompt: Mapping[str, Any], validate: bool) -> Session | None:
        """For the program of a prompt; None where verl makes its rollouts."""
        stack = self.methods_of(prompt)
        makers = stack.claims["rollout"]
        if not makers or (validate and "rollout" not in makers[0].in_eval):
            return None
        rollout = self.config.actor_rollout_ref.rollout
        n = int(prompt.get("__rollout_n__", rollout.val_kwargs.n if validate else rollout.n))
        given = len(prompt[COLUMN]["given"]) if COLUMN in prompt else 0
        traced = not validate and bool(stack.watchers)
        rewards = dict(self._settings.rewards)
        return Session(self, _of_its_own(stack), n - given, not validate, rewards, self._eos, traced)

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, *args, **kwargs)
        except Exception as e:
            if SESSION in kwargs:  # verl writes it to a log and goes on without the prompt
                self.rl_plugins_errors.append(_told(e, kwargs[SESSION].stack))
            raise

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        session = kwargs.pop(SESSION, None)
        if session is None or not isinstance(output, list):
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        await asyncio.gather(*(self._write(*one, validate, kwargs) for one in sessions(output, kwargs, validate)))

    async def _write(self, number: int, rows: list[Output], validate: bool, kwargs: Mapping[str, Any]) -> None:
        row = row_kwargs(kwargs, rows[-1]) | {"session_id": number}
        await super()._agent_loop_postprocess(rows, validate, **row)


def _of_its_own(stack: MethodStack) -> MethodStack:
    """The same methods for one program, so that what it logs is told from what others log meanwhile."""
    own = MethodStack(
        [type(m)(m.params) for m in stack.methods if not isinstance(m, Watcher)], stack.seed, stack.bundle_of
    )
    own._warned = stack._warned
    return own


def sessions(
    rollouts: Sequence[Sequence[Output]], kwargs: Mapping[str, Any], validate: bool
) -> list[tuple[int, list[Output]]]:
    """Rows of a program as sessions of verl: (number, its rows).

    verl gives all rows of a session the reward of its last one. In training every row is a session, so that each has
    its own; in validation, where verl looks at the last row of a session, every rollout is one.
    """
    first = int(kwargs["session_id"])
    if not validate:
        rows = [row for rollout in rollouts for row in rollout]
        return [(first + i, [row]) for i, row in enumerate(rows)]
    for row in (row for rollout in rollouts for row in rollout):
        if row.reward_score is not None and math.isnan(row.reward_score):
            row.reward_score = 0.0  # as the driver writes it in training
    return [(first + k, list(rollout)) for k, rollout in enumerate(rollouts) if rollout]


def _told(error: Exception, stack: MethodStack) -> str:
    if isinstance(error, MethodError):  # of a program: it names the method and has its traceback
        return str(error)
    name = stack.claims["rollout"][0].name
    return (
        f"The rollout program of `{name}` could not be served: {type(error).__name__}: {error}\n"
        f"{''.join(traceback.format_exception(error))}Remove `{name}` from `methods` to go on without it."
    )


class ProgramManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager with these workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(ProgramWorker)
