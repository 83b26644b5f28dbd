"""A fake engine for rollout programs: a language model whose probabilities are known, and no host.

    engine = TableEngine({"a": {"b": 0.9, "c": 0.1}, "b": {"<eos>": 1.0}, "c": {"<eos>": 1.0}})
    rows = run_program(MyMethod(), make_prompt(engine.chat, "a", n=4), engine)

The model is a function of the context: a table of the next token by the last one, or any callable. Tokens are single
characters (and "<eos>"), so texts and tokens are easy to compare by eye.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_plugins.core.method import Method
from rl_plugins.core.requests import Generate, Generated, Prompt, Scored, Trajectory
from rl_plugins.kit.prompts import as_text
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.programs import Running, run
from rl_plugins.runtime.stack import MethodStack

EOS = "<eos>"
Distribution = Mapping[str, float]
Model = Callable[[str], Distribution]
"""The text so far -> probability of every possible next token."""


class CharChat:
    """`Chat` with one token per character: token id = code point, and 0 ends a completion. A user's message is written
    `<TEXT>` and the policy answers behind it."""

    eos = (0,)
    vocabulary = 0x110000

    def encode(self, text: str) -> tuple[int, ...]:
        tokens: list[int] = []
        for i, part in enumerate(text.split(EOS)):
            tokens += [0] * (i > 0) + [ord(c) for c in part]
        return tuple(tokens)

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        return "".join(chr(t) if t else EOS * special for t in tokens)

    def piece(self, token: int) -> str:
        return self.decode((token,), special=True)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        said = [as_text(m["content"]) for m in messages]
        parts = [f"{s}{EOS}" if m["role"] == "assistant" else f"<{s}>" for s, m in zip(said, messages, strict=True)]
        return self.encode("".join(parts))

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self.prompt(messages)


class TableEngine:
    """Serves programs from a model with known probabilities; deterministic given the seed and the requests.

    Args:
        model: next-token table by last token, or a function of the whole text (prompt included).
        reward: text of the completion (special tokens removed), columns -> a number, a mapping by function, or None.
        seed: of the sampling.
        temperature: of the run.
        version: optimizer step reported with every token.
        fail_after: generation requests after which the engine raises, as one that died; None: never.
        abort_after: tokens of one request after which generation is interrupted; None: never.

    Attributes:
        requests: every `Generate` served. decoded: tokens made. scores: trajectories scored. batches: engine calls.
    """

    def __init__(
        self,
        model: Mapping[str, Distribution] | Model,
        reward: Callable[..., Any] | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        version: int = 0,
        fail_after: int | None = None,
        abort_after: int | None = None,
    ) -> None:
        self._table = model if isinstance(model, Mapping) else None
        self._model = model if callable(model) else None
        self._reward, self._seed, self.temperature, self.version = reward, seed, temperature, version
        self.fail_after, self.abort_after = fail_after, abort_after
        self.chat = CharChat()
        self.requests: list[Generate] = []
        self.scores: list[Trajectory] = []
        self.decoded = self.batches = 0
        self._served: dict[tuple[int, ...], int] = {}  # context -> samples drawn from it, so that each is another one

    def probabilities(self, context: Sequence[int]) -> dict[int, float]:
        """Token -> probability at temperature 1."""
        text = self.chat.decode(context, special=True)
        if self._model is not None:
            given = self._model(text)
        else:
            last = EOS if text.endswith(EOS) else text[-1:]
            given = (self._table or {}).get(last, {EOS: 1.0})
        total = sum(given.values())
        return {self.chat.encode(t)[0]: p / total for t, p in given.items() if p > 0}

    def logprob(self, context: Sequence[int], token: int, temperature: float = 1.0) -> float:
        """Of a token behind a context, at a temperature above 0; -inf where the model never makes it."""
        p = self.probabilities(context)
        if token not in p:
            return -math.inf
        return math.log(p[token]) / temperature - math.log(sum(q ** (1 / temperature) for q in p.values()))

    def anybody(self, wants: bool) -> bool:
        """`wants`: there is one process."""
        return wants

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        """The continuations of each request."""
        self.batches += 1
        out = []
        for _, request in requests:
            if self.fail_after is not None and len(self.requests) >= self.fail_after:
                raise RuntimeError("the engine died")
            self.requests.append(request)
            out.append([self._one(request) for _ in range(request.n)])
        return out

    def score(self, requests: Sequence[tuple[Prompt, Trajectory]]) -> list[Scored]:
        """The reward of each trajectory."""
        out = []
        for prompt, trajectory in requests:
            self.scores.append(trajectory)
            text = self.chat.decode(trajectory.tokens)
            given = None if self._reward is None else self._reward(text, prompt.columns)
            rewards = dict(given) if isinstance(given, Mapping) else {"reward": given}
            values = {k: math.nan if v is None else float(v) for k, v in rewards.items()}
            known = [v for v in values.values() if not math.isnan(v)]
            out.append(Scored(values, sum(known) if known else math.nan))
        return out

    def _one(self, request: Generate) -> Generated:
        context = list(request.trajectory.context)
        key = tuple(context)
        number = self._served[key] = self._served.get(key, -1) + 1
        digest = hashlib.sha256(repr((self._seed, number, key)).encode()).digest()
        rng = np.random.default_rng(list(digest))
        temperature = self.temperature if request.temperature is None else request.temperature
        tokens: list[int] = []
        logprobs: list[float] = []
        top: list[tuple[tuple[int, float], ...]] = []
        finish: Any = "length"
        while len(tokens) < (request.max_tokens or 1):
            if self.abort_after is not None and len(tokens) >= self.abort_after:
                finish = "abort"
                break
            p = self.probabilities(context)
            order = sorted(p, key=lambda t: (-p[t], t))
            if temperature == 0:
                token, logprob = order[0], math.log(p[order[0]])
            else:
                weights = np.array([p[t] for t in order]) ** (1 / temperature)
                weights /= weights.sum()
                place = int(np.searchsorted(np.cumsum(weights), rng.random(), side="right"))
                place = min(place, len(order) - 1)
                token, logprob = order[place], math.log(weights[place])
            tokens.append(token)
            logprobs.append(logprob)
            top.append(tuple((t, math.log(p[t])) for t in order[: request.top]))
            context.append(token)
            self.decoded += 1
            if token in self.chat.eos:
                finish = "eos"
                break
            text = self.chat.decode(tokens)
            if any(text.endswith(s) for s in request.stop):
                finish = "stop"
                break
        shown = tuple(top) if request.top else ()
        return Generated(tuple(tokens), tuple(logprobs), finish, self.version, shown, temperature != 0)


def make_prompt(chat: Any, text: str, n: int = 4, max_tokens: int = 64, **changes: Any) -> Prompt:
    """A prompt of a user's message; further fields of `Prompt` as keywords (`columns`, `payload`, ..)."""
    messages = [{"role": "user", "content": text}]
    values: dict[str, Any] = {"columns": {"prompt": messages}, "max_context": 100_000, "seed": "0|test|0"} | changes
    return Prompt(tokens=chat.prompt(messages), messages=messages, n=n, max_tokens=max_tokens, chat=chat, **values)


def run_program(
    method: Method, prompt: Prompt | Sequence[Prompt], engine: Any, logged: dict[str, float] | None = None
) -> Any:
    """Rows of every rollout of a prompt (or, of several prompts, a list of those), as an adapter would get them.

    Args:
        logged: filled with what the program logged.
    """
    prompts = [prompt] if isinstance(prompt, Prompt) else list(prompt)
    stack = MethodStack([method])
    programs = [Running(method, p) for p in prompts]
    run(programs, engine)
    if logged is not None:
        logged.update(combine([stack.metrics.take()]))
    return programs[0].rows if isinstance(prompt, Prompt) else [p.rows for p in programs]
