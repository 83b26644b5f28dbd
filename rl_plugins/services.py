"""Judges, value models and endpoints that a method waits for: calls that can be slow, fail, hang or answer nonsense.

    judge = Service(my_judge, "the judge", answer=number(0, 10), timeout=30)
    scores = judge.ask(items)                # one answer per item, in their order
    scores = judge.ask(items, strict=False)  # a `Failure` in the place of each answer that could not be had

A callable may be a function or `async def`. Every try runs outside of the trainer's thread, so one that never returns
costs its time-out and no more. For servers that speak the OpenAI chat protocol there are two such callables:
`ChatEndpoint` answers with the reply as text, `Endpoint` with the numbers in it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import inspect
import json
import math
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError, MethodError
from rl_plugins.runtime.threads import Threads

LONGEST_PAUSE = 60.0  # seconds between two tries
_POLL = 5.0  # seconds after which a waiting `ask` looks whether the event loop is alive


@dataclass(frozen=True)
class Failure:
    """In the place of an answer that could not be had.

    Args:
        error: of the last try.
    """

    error: str


def number(low: float = -math.inf, high: float = math.inf, allow_nan: bool = False) -> Callable[[Any], float]:
    """A check for `Service(answer=..)`: one number within [low, high]; NaN only where it is allowed."""

    def check(value: Any) -> float:
        if isinstance(value, (str, bytes)) or value is None:
            raise ValueError(f"{value!r} is not a number.")
        try:
            found = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{_short(value)} ({type(value).__name__}) is not a number.") from None
        if math.isnan(found) and allow_nan:
            return found
        if not low <= found <= high or math.isinf(found):
            raise ValueError(f"{found:g} is not a finite number in [{low:g}, {high:g}].")
        return found

    return check


class Service:
    """A user's callable with time-outs, retries, a cache and a limit of calls at a time.

    Args:
        function: takes one item and returns its answer, or, with `batch_size`, a list of items and returns as many
            answers. `async def` or not. A MethodError or ConfigError it raises is final and not tried again.
        name: how messages call it: "the judge".
        answer: check of one answer; returns the value to use, raises ValueError for a bad one.
        batch_size: items of one call at most; None: one item a call, given as it is and not in a list.
        timeout: seconds of one try.
        retries: further tries after one that raised, timed out or gave a bad answer.
        backoff: seconds before the first retry; doubled for each further one, 60 at most.
        concurrency: calls at a time.
        cache_size: answers that are kept, by the content of the item (plain data; other items are never cached);
            0: none. Equal items of one `ask` are then asked once.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        answer: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        timeout: float = 60.0,
        retries: int = 2,
        backoff: float = 1.0,
        concurrency: int = 8,
        cache_size: int = 10_000,
    ) -> None:
        least = {"retries": (retries, 0), "backoff": (backoff, 0), "concurrency": (concurrency, 1)}
        least |= {"cache_size": (cache_size, 0), "batch_size": (1 if batch_size is None else batch_size, 1)}
        for what, (given, bound) in least.items():
            if given < bound:
                raise ConfigError(f"`{what}` of {name} is {given}; it must be at least {bound}.")
        if timeout <= 0:
            raise ConfigError(f"`timeout` of {name} is {timeout:g} s; it must be more than 0.")
        self.function, self.name = function, name
        self.answer = number() if answer is None else answer
        self.batch_size, self.timeout, self.retries, self.backoff = batch_size, timeout, retries, backoff
        self.concurrency, self.cache_size = concurrency, cache_size
        self._cache: OrderedDict[str, Any] = OrderedDict()
        advice = "A call must end by itself: give its own requests a time-out."
        self._threads = Threads(f"calls of {name}", concurrency, advice)

    def ask(self, items: Sequence[Any], strict: bool = True) -> list[Any]:
        """One answer per item, in their order. Waits for all of them.

        Args:
            strict: an answer that could not be had ends it all with an error; else a `Failure` stands in its place.
                When none of the first calls (as many as go at a time) succeeds, the others are not made.

        Raises:
            MethodError: no usable answer after all tries (strict), a coroutine that blocks its event loop, or too many
                calls that never returned.
        """
        keys = [_key(item) if self.cache_size else None for item in items]
        known = {key: self._cache[key] for key in keys if key is not None and key in self._cache}
        wanted: dict[Any, Any] = {}  # key, or number of an item without one -> item
        for i, (key, item) in enumerate(zip(keys, items, strict=True)):
            if key not in known:
                wanted.setdefault(i if key is None else key, item)
        found = known | self._ask_all(wanted, strict)
        answers = [found[i if key is None else key] for i, key in enumerate(keys)]
        for key, value in zip(keys, answers, strict=True):
            if key is not None and not isinstance(value, Failure):
                self._cache[key] = value
                self._cache.move_to_end(key)
        while len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)
        return answers

    def _ask_all(self, wanted: Mapping[Any, Any], strict: bool) -> dict[Any, Any]:
        if not wanted:
            return {}
        self._threads.check()
        size = self.batch_size or 1
        places = list(wanted)
        calls = [places[i : i + size] for i in range(0, len(places), size)]
        return _wait(self._run_calls(calls, wanted, strict), self.timeout, self.name)

    async def _run_calls(self, calls: list[list[Any]], items: Mapping[Any, Any], strict: bool) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        waiting, failed, succeeded = deque(calls), 0, 0

        async def worker() -> None:
            nonlocal failed, succeeded
            while waiting:
                call = waiting.popleft()
                if failed >= self.concurrency and not succeeded:
                    answers: Any = Failure(f"not asked: the first {failed} calls all failed")
                else:
                    answers = await self._call([items[place] for place in call])
                if isinstance(answers, Failure):
                    failed += 1
                    if strict:
                        raise MethodError(self._failed(answers, items[call[0]]))
                    answers = [answers] * len(call)
                else:
                    succeeded += 1
                found.update(zip(call, answers, strict=True))

        tasks = [asyncio.create_task(worker()) for _ in range(min(self.concurrency, len(calls)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return found

    async def _call(self, items: list[Any]) -> list[Any] | Failure:
        """The checked answers of one call, tried as often as allowed."""
        error = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(self.backoff * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                return self._checked(await self._try(items), len(items))
            except (MethodError, ConfigError) as e:
                return Failure(str(e))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # we were cancelled, not something inside the callable
                    raise
                error = "it was cancelled"
            except Exception as e:
                error = f"{type(e).__name__}: {e}"
        return Failure(error)

    async def _try(self, items: list[Any]) -> Any:
        """What the callable answers, within its time."""

        async def answer() -> Any:
            argument = items[0] if self.batch_size is None else items
            result = await asyncio.wrap_future(self._threads.start(lambda: self.function(argument), self.name))
            return await result if inspect.isawaitable(result) else result

        task = asyncio.create_task(answer())
        try:
            # unlike wait_for, this does not wait for the task to take note of its cancellation
            done, _ = await asyncio.wait({task}, timeout=self.timeout)
            if not done:
                raise TimeoutError(f"no answer within {self.timeout:g} s")
            return task.result()
        finally:
            task.cancel()

    def _checked(self, given: Any, n: int) -> list[Any]:
        if self.batch_size is None:
            return [self.answer(given)]
        if isinstance(given, (str, bytes)) or not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
            raise ValueError(f"a list of {n} answers is needed, it gave {_short(given)} ({type(given).__name__}).")
        if len(given) != n:
            raise ValueError(f"{n} answers are needed, one per item; it gave {len(given)}.")
        return [self.answer(given[i]) for i in range(n)]

    def _failed(self, failure: Failure, item: Any) -> str:
        return (
            f"{self.name[:1].upper()}{self.name[1:]} gave no usable answer in {self.retries + 1} tries of up to "
            f"{self.timeout:g} s each. Last error: {failure.error.rstrip('.')}. It was asked about: {_short(item)}. "
            f"Check that it works on this item by itself; if it is only slow, raise its time-out."
        )


class ChatEndpoint:
    """A callable that sends a text to an OpenAI-compatible chat endpoint and returns the reply as text.

    Args:
        url: up to the version, "http://localhost:8000/v1".
        model: the name under which the server offers it.
        api_key_env: environment variable that holds the key; empty: none is sent.
        temperature, max_tokens: of the request.
        timeout: seconds of one request, so that it ends by itself.

    Raises:
        ConfigError: httpx is not installed, the URL is none, or the variable is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str = "",
        temperature: float = 0.0,
        max_tokens: int = 1024,
        timeout: float = 60.0,
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise ConfigError("An endpoint is called with httpx, which is not installed: pip install httpx.") from None
        if not re.match("https?://.", url):
            raise ConfigError(f"The endpoint is {url!r}; it must be a URL such as http://localhost:8000/v1.")
        headers = {}
        if api_key_env:
            if not os.environ.get(api_key_env):
                raise ConfigError(f"The environment variable {api_key_env}, which should hold the key, is not set.")
            headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._client = httpx.Client(headers=headers, timeout=timeout)  # may be used from several threads

    def __call__(self, content: str) -> str:
        """The reply to a user message with this content; empty if the server gives none.

        Raises:
            MethodError: the server refuses the request as such (status 4xx), so that trying again is no use.
            ValueError: what it answers is no chat completion.
        """
        reply = self._client.post(self.url, json={**self.options, "messages": [{"role": "user", "content": content}]})
        if 400 <= reply.status_code < 500 and reply.status_code not in (408, 409, 425, 429):
            raise MethodError(f"{self.url} refuses the request with status {reply.status_code}: {_short(reply.text)}.")
        reply.raise_for_status()
        try:
            return str(reply.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f"{self.url} gave no chat completion: {_short(reply.text)}.") from None


class Endpoint:
    """A callable that fills a template, asks an OpenAI-compatible chat endpoint, and reads the scores of its reply.

    Args:
        url, model: as of `ChatEndpoint`, and so are the keywords.
        template: the user message; `{name}` stands for the field of that name. Other braces are left as they are.
        pattern: regular expression with a group for each number that is wanted; its last match in the reply counts.

    Raises:
        ConfigError: as `ChatEndpoint`, or the pattern has no group.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str,
        pattern: str = r"(-?\d+(?:\.\d+)?)",
        *,
        api_key_env: str = "",
        temperature: float = 0.0,
        max_tokens: int = 1024,
        timeout: float = 60.0,
    ) -> None:
        self._chat = ChatEndpoint(
            url, model, api_key_env=api_key_env, temperature=temperature, max_tokens=max_tokens, timeout=timeout
        )
        self.pattern, self.template = re.compile(pattern), template
        if not self.pattern.groups:
            raise ConfigError(f"The pattern {pattern!r} has no group; put the number that is wanted in parentheses.")

    def __call__(self, fields: Mapping[str, Any]) -> float | tuple[float, ...]:
        """The number of the reply, or a tuple of them where the pattern has several groups.

        Raises:
            MethodError: the server refuses the request as such (status 4xx), so that trying again is no use.
            ValueError: the reply has no such number.
        """
        text = self._chat(fill(self.template, fields))
        match = deque(self.pattern.finditer(text), maxlen=1)
        if not match:
            raise ValueError(f"the reply does not match {self.pattern.pattern!r}: {_short(text)}.")
        numbers = tuple(float(group) for group in match[0].groups())
        return numbers[0] if len(numbers) == 1 else numbers


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """`template` with every `{name}` of a field replaced, once: what is put in is not looked at again."""
    return re.sub(r"\{(\w+)\}", lambda m: str(fields[m[1]]) if m[1] in fields else m[0], template)


def prompt_text(prompt: Any) -> str:
    """A prompt as text: itself, the content of its only message, or all its messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    messages = [m if isinstance(m, Mapping) else {"content": m} for m in prompt]
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n\n".join(f"{m.get('role', 'user')}: {m.get('content', '')}" for m in messages)


def with_task(prompt: Any, change: Callable[[str], str]) -> Any:
    """A prompt, text or messages, whose task is changed: the text, or that of the user's last message, whose other
    parts (images) stay and come first. A new object."""
    if isinstance(prompt, str):
        return change(prompt)
    messages = [dict(message) for message in prompt]
    last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=len(messages) - 1)
    content = messages[last].get("content") or ""
    if isinstance(content, str):
        messages[last]["content"] = change(content)
    else:
        others = [part for part in content if part.get("type") != "text"]
        text = "\n".join(part["text"] for part in content if part.get("type") == "text")
        messages[last]["content"] = [*others, {"type": "text", "text": change(text)}]
    return messages


# ---- the event loop all services share, in a thread of its own

_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def _shared_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole process: clients that a coroutine keeps belong to the loop they were first used in."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="rl_plugins services", daemon=True).start()
        return _loop


def _forget_loop() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)  # its thread does not exist there


def _wait(work: Coroutine[Any, Any, Any], timeout: float, name: str) -> Any:
    """The result of a coroutine in the shared loop.

    Raises:
        MethodError: the loop stands still: some coroutine calls something that blocks.
    """
    loop = _shared_loop()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        while not concurrent.futures.wait([future], min(timeout, _POLL)).done:
            alive = threading.Event()
            loop.call_soon_threadsafe(alive.set)
            if not alive.wait(timeout) and not future.done():
                _forget_loop()
                raise MethodError(
                    f"{name[:1].upper()}{name[1:]} blocks its event loop for more than {timeout:g} s: an `async def` "
                    f"that calls something which is not awaited. Make it an ordinary function, or await what it calls."
                )
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _key(item: Any) -> str | None:
    """A digest of plain data; None for anything else."""
    try:
        return hashlib.blake2b(json.dumps(item, sort_keys=True).encode(), digest_size=20).hexdigest()
    except (TypeError, ValueError):
        return None


def _short(value: Any, length: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else f"{text[:length]}..."
