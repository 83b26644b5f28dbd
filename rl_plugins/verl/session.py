"""Rollout programs in verl: one agent loop serves all rollouts of a prompt.

verl spawns one session of the loop `rl_plugins_program` for a prompt. It runs the program on verl's rollout servers and
returns its rows, each as verl's own `AgentLoopOutput`; workers.py writes them to TransferQueue.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from rl_plugins.core.errors import MethodError
from rl_plugins.core.requests import Chat, Finish, Generate, Generated, Kind, Prompt, Scored, Trajectory
from rl_plugins.runtime.programs import SIDE, Running, drive
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.verl import costs
from rl_plugins.verl.agent_loop import PlannedAgentLoop, published, register_loop
from rl_plugins.verl.capabilities import TOP_LOGPROBS
from rl_plugins.verl.compat import initial_tokens
from rl_plugins.verl.config import chat_of
from rl_plugins.verl.host import Output, Scorer, ServerClient
from rl_plugins.verl.prompts import (
    COLUMN,
    FORCED,
    MADE,
    PROGRAM_AGENT,
    SCORE,
    TURNS,
    UNKNOWN,
    VERSIONS,
    Note,
    flat_columns,
    ranges,
    runs,
    weighted,
)

SESSION = "rl_plugins_session"  # keyword of the agent loop
OF_VERL = ("uid", "session_id", "global_steps", "dummy_tensor", COLUMN, SESSION)  # keywords that are no columns


@dataclass(frozen=True)
class Session:
    """The session of verl's agent loop that runs the program of one prompt: what its worker lends to it.

    Args:
        worker: verl's agent-loop worker, which knows the way to the reward function.
        stack: the methods, of this program alone.
        n: rollouts the program makes.
        training: False in validation.
        rewards: of the run, see `Settings`.
        eos: tokens that end a completion.
        traced: the run has a trace.
    """

    worker: Scorer
    stack: MethodStack
    n: int
    training: bool
    rewards: Mapping[str, float]
    eos: tuple[int, ...]
    traced: bool = False


class VerlRewards(dict[str, float]):
    """Rewards by name, and what verl's reward function answered: a row with them is not scored again."""

    def __init__(self, rewards: Mapping[str, float], score: float, info: Mapping[str, Any]) -> None:
        super().__init__(rewards)
        self.score, self.info = score, dict(info)


class ProgramAgentLoop(PlannedAgentLoop):
    """Runs the program of one prompt; completions a plan gives come first, in sessions of their own."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Rows of every rollout: lists of `AgentLoopOutput`.

        Raises:
            MethodError: from the program.
        """
        note = kwargs.get(COLUMN)
        if note is not None and int(kwargs["session_id"]) < len(note["given"]):
            return await super().run(sampling_params, **kwargs)
        session: Session = kwargs[SESSION]
        method = session.stack.claims["rollout"][0]
        prompt = await self._prompt(session, kwargs, note)
        engine = VerlEngine(
            self.server_manager, self.rollout_config, session, kwargs, sampling_params, self._request_id(kwargs)
        )
        started = time.monotonic()
        with costs.program(Running(method, prompt)) as program:
            rollouts = await drive(program, engine)
        metrics = AgentLoopMetrics(generate_sequences=time.monotonic() - started)
        logprobs, first = bool(sampling_params.get("logprobs")), int(kwargs["session_id"])
        outputs = [
            [engine.output(row, logprobs, metrics, {"rollout": first + k, "index": i}) for i, row in enumerate(rollout)]
            for k, rollout in enumerate(rollouts)
        ]
        rows = [output for rollout in outputs for output in rollout]
        if rows:  # what the program logged travels with its first row
            rows[0].extra_fields[MADE]["metrics"] = session.stack.metrics.take()
        return outputs

    def _request_id(self, kwargs: Mapping[str, Any]) -> str:
        """One for all requests of a prompt: they go to the same server, whose cache has the prompt. A router gets one
        for each rollout (see `VerlEngine`), behind the tag of its task."""
        tag = f"{kwargs.get('data_source', '')}|" if self.rollout_config.get("router_config_path") else ""
        return f"{tag}{kwargs['uid']}_{kwargs['session_id']}"

    async def _prompt(self, session: Session, kwargs: dict[str, Any], note: Note | None) -> Prompt:
        messages = list(kwargs["raw_prompt"])
        rollout = self.rollout_config
        told: Mapping[str, Any] = note or {}
        tokens = await initial_tokens(self, messages)
        method = session.stack.claims["rollout"][0]
        number = int(told.get("planned_at", kwargs["global_steps"]))
        group, draw = told.get("group"), told.get("draw", 1)
        place = group if session.training else f"eval|{json.dumps(messages, default=str)}"
        return Prompt(
            tokens=tuple(tokens),
            messages=messages,
            columns=flat_columns({k: v for k, v in kwargs.items() if k not in OF_VERL}),
            n=session.n,
            max_tokens=min(told.get("max_tokens") or self.response_length, self.response_length),
            max_context=int(rollout.max_model_len or rollout.prompt_length + rollout.response_length),
            chat=chat_of(self.tokenizer, session.eos, self.apply_chat_template_kwargs),
            prefix=tuple(told.get("prefix") or ()),
            payload=told.get("payload"),
            batch=number,
            training=session.training,
            reward_names=tuple(session.rewards) or ("score",),
            max_turns=told.get("max_turns"),
            redundant=told.get("redundant", 0),
            # asynchronous modes plan several times in one batch, and these plans number their groups alike
            seed=f"{session.stack.seed}|{method.name}|{place}{f'|{draw}' if draw > 1 else ''}",
            traced=session.traced,
        )


class VerlEngine:
    """`programs.AsyncEngine` on verl's rollout servers and reward function, for the program of one prompt.

    Args:
        server: verl's client of the servers.
        rollout: `actor_rollout_ref.rollout`.
        session: of the prompt.
        kwargs: what verl gives to an agent loop.
        sampling: of the run, or of its validation.
        request_id: of every request; requests with the same id go to the same server. With a router of its own
            (`router_config_path`) the number of the rollout is added, because it routes rollouts.
    """

    def __init__(
        self,
        server: ServerClient,
        rollout: Any,
        session: Session,
        kwargs: Mapping[str, Any],
        sampling: Mapping[str, Any],
        request_id: str,
    ) -> None:
        self._server, self._rollout, self._session = server, rollout, session
        self._kwargs, self._sampling, self._request_id = dict(kwargs), dict(sampling), request_id
        self._newest = published(kwargs)
        self._routed = bool(rollout.get("router_config_path"))
        self._requests = 0

    # ---- generation

    async def generate(self, prompt: Prompt, request: Generate) -> list[Generated]:
        params = self._params(request)
        return list(await asyncio.gather(*(self._one(prompt.chat, request, params) for _ in range(request.n))))

    def _params(self, request: Generate) -> dict[str, Any]:
        """verl's sampling parameters for a request."""
        name = self._rollout.name
        params = {**self._sampling, "max_tokens": request.max_tokens, "logprobs": True}
        if request.temperature is not None:
            params["temperature"] = request.temperature
        if params["temperature"] == 0:
            params |= {"top_p": 1.0, "top_k": -1}
        if request.stop:
            if name not in STOP:
                raise MethodError(
                    f"A rollout program asks for stop texts, which are served with rollout.name={' or '.join(STOP)}; "
                    f"this run has rollout.name={name}. Use one of those, or remove the method."
                )
            params |= {"stop": list(request.stop), **STOP[name]}
        if request.top:
            if name not in TOP_LOGPROBS:
                raise MethodError(
                    f"A rollout program asks for the {request.top} most likely tokens of every place, and verl reports "
                    f"only the sampled one's log-prob with rollout.name={name}. Remove the method, or its option that "
                    f"needs them."
                )
            params["top_logprobs"] = request.top
        return params

    async def _one(self, chat: Chat, request: Generate, params: Mapping[str, Any]) -> Generated:
        self._requests += 1
        unique = f"_{self._requests}" if self._rollout.get("full_determinism", False) else ""  # verl passes it on then
        of_rollout = f"_{SIDE.get()}" if self._routed else ""
        out = await self._server.generate(
            request_id=self._request_id + of_rollout + unique,
            prompt_ids=request.trajectory.context_array.tolist(),
            sampling_params=dict(params),
        )
        limit = request.max_tokens or 1
        tokens = tuple(int(t) for t in out.token_ids)[:limit]
        logprobs = tuple(float(p) for p in out.log_probs or ())[:limit]
        if len(logprobs) != len(tokens):
            raise MethodError(
                f"The rollout engine {self._rollout.name} gave {len(tokens)} tokens and {len(logprobs)} log-probs; "
                f"rollout programs need one for each."
            )
        fields = out.extra_fields
        attempts = fields[VERSIONS][-1] if VERSIONS in fields else []  # of this request
        return Generated(
            tokens,
            logprobs,
            _finish(chat, request, tokens, out.stop_reason),
            self._version(fields.get("max_global_steps")),
            tuple(tuple((int(t), float(p)) for t, p in place) for place in fields.get("top_logprobs", ())[:limit]),
            sampled=params["temperature"] != 0,
            versions=tuple(v for v, n in attempts for _ in range(n))[:limit],
        )

    def _version(self, reported: Any) -> int:
        return self._newest if reported is None else int(reported)

    # ---- rewards

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Scored:
        worker = self._session.worker
        if worker.reward_loop_worker_handles is None:
            raise MethodError(
                "A rollout program asks for rewards, and this run computes them after generation, with a reward model "
                "on the devices of the trainer. Give the reward model devices of its own "
                "(reward.reward_model.enable_resource_pool=True), or remove the method."
            )
        costs.program_scored(trajectory)
        output = self.output(trajectory, False, AgentLoopMetrics(), {"rollout": 0, "index": 0})
        output.reward_score = None
        await worker._compute_score([output], kwargs=row_kwargs(self._kwargs, output))
        score, info = float(output.reward_score), output.extra_fields["reward_extra_info"]
        weights = self._session.rewards
        if not weights:
            return Scored(VerlRewards({"score": score}, score, info), score)
        rewards = {name: math.nan if info.get(name) is None else float(info[name]) for name in weights}
        return Scored(VerlRewards(rewards, score, info), weighted(rewards, weights))

    # ---- rows

    def output(
        self, row: Trajectory, logprobs: bool, metrics: AgentLoopMetrics, number: dict[str, int]
    ) -> AgentLoopOutput:
        """A row as verl's agent loops give it. One without a token is one end token that is not trained.

        Args:
            logprobs: whether the run keeps those of the sampled distribution; tokens without one get a place holder.
            number: of the rollout of its prompt, and of the row in it.
        """
        filled = row if len(row) else row.observe(self._session.eos[:1])
        kinds, known = np.asarray(row.kinds), np.asarray(filled.logprobs)
        unknown = (kinds != int(Kind.OBSERVED)) & np.isnan(np.asarray(row.logprobs))
        made = np.asarray(row.versions, dtype=np.int64)
        versions = made[made >= 0].tolist() or [self._newest]
        output = AgentLoopOutput(
            prompt_ids=list(row.prompt),
            response_ids=list(filled.tokens),
            response_mask=list(filled.trained),
            response_logprobs=np.where(np.isnan(known), 0.0, known).tolist() if logprobs else None,
            multi_modal_data={},
            num_turns=2 * max(1, len(row.turns)),
            metrics=metrics.model_copy(),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "global_steps": max(versions),
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
                FORCED: ranges(kinds == int(Kind.FORCED)),
                UNKNOWN: ranges(unknown),
                VERSIONS: [runs(made[kinds != int(Kind.OBSERVED)])],
                TURNS: [asdict(turn) for turn in row.turns],
                MADE: {
                    **number,
                    "group": None if row.group is None else repr(row.group),
                    "finish": row.finish,
                    "meta": row.columns,
                },
            },
        )
        if isinstance(row.rewards, VerlRewards):
            output.reward_score = row.rewards.score
            output.extra_fields["reward_extra_info"] = dict(row.rewards.info)
        elif row.rewards is not None:
            output.reward_score = weighted(row.rewards, self._session.rewards or SCORE)
            output.extra_fields["reward_extra_info"] = dict(row.rewards)
        return output


# rollout.name -> what its sampling parameters need in addition to `stop` for the text to stay in the tokens
STOP: Mapping[str, Mapping[str, Any]] = {
    "hf_cpu": {"include_stop_str_in_output": True},
    "vllm": {"include_stop_str_in_output": True},
}


def _finish(chat: Chat, request: Generate, tokens: Sequence[int], reason: str | None) -> Finish:
    if reason in ("aborted", "abort"):
        return "abort"
    if tokens and tokens[-1] in chat.eos:
        return "eos"
    if request.stop and tokens:
        window = max(len(s.encode()) for s in request.stop) + 1  # tokens a stop text may take: each has a byte or more
        text = chat.decode(tokens[-window:])
        if any(s in text for s in request.stop):
            return "stop"
    return "length"


def row_kwargs(kwargs: Mapping[str, Any], output: Output) -> dict[str, Any]:
    """verl's keywords for one row: what its program noted stands in `extra_info`, where reward functions find it."""
    row = {k: v for k, v in kwargs.items() if k != SESSION}
    meta, info = output.extra_fields[MADE]["meta"], row.get("extra_info")
    if meta and isinstance(info, Mapping):
        row["extra_info"] = {**info, **meta}
    return row


register_loop(PROGRAM_AGENT, ProgramAgentLoop)
