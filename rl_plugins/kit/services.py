"""Judges, value models and endpoints that a method waits for: calls that can be slow, fail, hang or answer nonsense.

    judge = Service(my_judge, "the judge", answer=number(0, 10), timeout=30)
    scores = judge.ask(items)                # one answer per item, in their order
    scores = judge.ask(items, strict=False)  # a `Failure` in the place of each answer that could not be had

A callable may be a function or `async def`. Every try runs outside of the trainer's thread, so one that never returns
costs its time-out and no more. For servers that speak the OpenAI chat protocol there are two such callables:
`ChatEndpoint` answers with the reply as text, `Endpoint` with the numbers of its verdict.
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
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

from rl_plugins.core.errors import ConfigError, MethodError, shortened, shown
from rl_plugins.core.files import read_json
from rl_plugins.kit.http import Web
from rl_plugins.kit.prompts import as_messages, as_text
from rl_plugins.kit.texts import between
from rl_plugins.kit.threads import Threads

if TYPE_CHECKING:
    from rl_plugins.core.rollouts import Run

PROBES = 8  # calls, spread over the list, that must all fail before the others are not made
LONGEST_PAUSE = 60.0  # seconds between two tries
_POLL = 5.0  # seconds after which a waiting `ask` looks whether the event loop is alive
_ALIVE = 20.0  # seconds the loop may take to show it: a busy machine needs some, whatever the time-out of a try is


@dataclass(frozen=True)
class Failure:
    """Replaces a missing answer.

    Args:
        error: of the last try.
    """

    error: str


@dataclass(frozen=True)
class NotAsked(Failure):
    """In the place of an answer that nobody was asked for, because calls about items all over the list had failed.

    It says nothing about its item, and is no failed question: whoever counts those leaves it out.

    Args:
        error: what the calls that were made failed with.
    """


def failures(answers: Sequence[Any]) -> list[Failure]:
    """The questions among these answers of `ask` that failed."""
    return [a for a in answers if isinstance(a, Failure) and not isinstance(a, NotAsked)]


def number(low: float = -math.inf, high: float = math.inf, allow_nan: bool = False) -> Callable[[Any], float]:
    """A check for `Service(answer=..)`: one number within [low, high]; NaN only where it is allowed."""

    def check(value: Any) -> float:
        if isinstance(value, (str, bytes)) or value is None:
            raise ValueError(f"{shown(value)} is not a number.")
        try:
            found = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(f"{shown(value)} ({type(value).__name__}) is not a number.") from None
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
        if not timeout > 0:
            raise ConfigError(f"`timeout` of {name} is {timeout:g} s; it must be more than 0.")
        self.function, self.name = function, name
        self.answer = number() if answer is None else answer
        self.batch_size, self.timeout, self.retries, self.backoff = batch_size, timeout, retries, backoff
        self.concurrency, self.cache_size = concurrency, cache_size
        self._cache: OrderedDict[str, Any] = OrderedDict()
        advice = "A call must end by itself: give its own requests a time-out."
        self._threads = Threads(f"calls of {name}", concurrency, advice)
        self._limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def ask(self, items: Sequence[Any], strict: bool = True) -> list[Any]:
        """One answer per item, in their order. Waits for all of them.

        Args:
            strict: an answer that could not be had ends it all with an error; else a `Failure` stands in its place.
                Calls about items spread over the whole list (`PROBES` of them, or all if there are fewer) are made
                first, however many go at a time. When each of them fails, and nothing else has succeeded, the service
                is taken to be down: the other calls are not made, and their items get `NotAsked`.

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

    async def ask_one(self, item: Any) -> Any:
        """The answer about one item, or a `Failure`, for callers with an event loop of their own.

        Any number of these may wait at the same time; `concurrency` of them are asked at a time in each loop. Nothing
        is cached, and no call is left out because others failed.

        Raises:
            MethodError: too many calls never returned.
        """
        limit = self._limits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        async with limit:
            self._threads.check(self.concurrency)
            answers = await self._call([item])
        return answers if isinstance(answers, Failure) else answers[0]

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
        order = _spread_first(len(calls))
        probes, waiting = set(order[:PROBES]), deque(order)
        failed_probes, error, succeeded = 0, "", False
        settled = asyncio.Event()  # something succeeded, or every probe failed

        async def worker() -> None:
            nonlocal failed_probes, error, succeeded
            while waiting:
                if error and len(waiting) <= len(order) - len(probes):
                    await settled.wait()  # it may be down, and every probe is under way
                if not waiting:
                    return
                number = waiting.popleft()
                call = calls[number]
                if failed_probes == len(probes) and not succeeded:
                    answers: Any = NotAsked(_not_asked(failed_probes, len(calls), error))
                else:
                    answers = await self._call([items[place] for place in call])
                    if isinstance(answers, Failure):
                        error = answers.error
                        failed_probes += number in probes
                    else:
                        succeeded = True
                    if succeeded or failed_probes == len(probes):
                        settled.set()
                if isinstance(answers, Failure):
                    if strict:
                        raise MethodError(self._failed(answers, items[call[0]]))
                    answers = [answers] * len(call)
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
                return Failure(shortened(e, 500))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # we were cancelled, not something inside the callable
                    raise
                error = "it was cancelled"
            except Exception as e:
                error = f"{type(e).__name__}: {shortened(e, 500)}"
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
            raise ValueError(f"a list of {n} answers is needed, it gave {shown(given)} ({type(given).__name__}).")
        if len(given) != n:
            raise ValueError(f"{n} answers are needed, one per item; it gave {len(given)}.")
        return [self.answer(given[i]) for i in range(n)]

    def _failed(self, failure: Failure, item: Any) -> str:
        return (
            f"{self.name[:1].upper()}{self.name[1:]} gave no usable answer in {self.retries + 1} tries of up to "
            f"{self.timeout:g} s each. Last error: {failure.error.rstrip('.')}. It was asked about: {shown(item)}. "
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
        ConfigError: the URL is none or has a password, or the variable is not set.
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
        self._web = Web(url, api_key_env, timeout)
        self.options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}

    def __call__(self, content: str, **options: Any) -> str:
        """The reply to a user message with this content; empty if the server gives none.

        Args:
            options: further fields of the request.

        Raises:
            MethodError: the server refuses the request as such (status 4xx), so that trying again is no use.
            OSError: it cannot be reached, or fails.
            ValueError: what it answers is no chat completion, or too long.
        """
        messages = [{"role": "user", "content": content}]
        reply = self._web.post("/chat/completions", json={**self.options, **options, "messages": messages})
        try:
            return as_text(read_json(reply.text)["choices"][0]["message"]["content"])
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise ValueError(f"{self._web.url} gave no chat completion: {self._web.said(reply.text)}.") from None


Reply = Literal["marked", "json", "last"]


class Endpoint:
    """A callable that fills a template, asks an OpenAI-compatible chat endpoint, and reads the numbers of its verdict.

    What is judged stands in the message, and a judge may quote it, so a number that stands anywhere in a reply may be
    one that the judged text put there. `reply` says where the verdict is:

        marked   between two marks that are new for each request, so that no text can hold them, and that the end
                 of the message names (the default)
        json     in a JSON object, which is the whole reply: the server is asked for it by `response_format` with a
                 schema. The better way where the server can
        last     in the last match of the whole reply, as this class did it before there were marks. Only for a judge
                 that follows no instruction on its form and never quotes

    None of them keeps a judge from being talked into a verdict of its own.

    Args:
        url, model: as of `ChatEndpoint`, and so are the keywords.
        template: the user message; `{name}` stands for the field of that name. Other braces are left as they are. How
            to mark the verdict, or its JSON, is told in a paragraph behind it.
        pattern: regular expression with a group for each number that is wanted; its last match counts, of what stands
            between the marks. Not used with `reply: json`.
        reply: see above.
        keys: names of the numbers with `reply: json`.

    Raises:
        ConfigError: as `ChatEndpoint`, the pattern is none or has no group, `reply` is none of the three, or there are
            no `keys`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str,
        pattern: str = r"(-?\d+(?:\.\d+)?)",
        *,
        reply: Reply = "marked",
        keys: Sequence[str] = ("score",),
        api_key_env: str = "",
        temperature: float = 0.0,
        max_tokens: int = 1024,
        timeout: float = 60.0,
    ) -> None:
        self._chat = ChatEndpoint(
            url, model, api_key_env=api_key_env, temperature=temperature, max_tokens=max_tokens, timeout=timeout
        )
        try:
            self.pattern, self.template = re.compile(pattern), template
        except (re.error, RecursionError, OverflowError) as e:
            raise ConfigError(f"The pattern {shown(pattern)} is no regular expression: {shortened(e)}.") from None
        if not self.pattern.groups:
            raise ConfigError(
                f"The pattern {shown(pattern)} has no group; put the number that is wanted in parentheses."
            )
        if reply not in get_args(Reply):
            raise ConfigError(f"`reply` is {shown(reply)}; it must be one of {', '.join(get_args(Reply))}.")
        if isinstance(keys, str) or not keys or not all(isinstance(key, str) and key for key in keys):
            raise ConfigError(f"`keys` is {shown(keys)}; it must name the numbers of the verdict, e.g. ('score',).")
        self.reply, self.keys = reply, tuple(keys)

    def __call__(self, fields: Mapping[str, Any]) -> float | tuple[float, ...]:
        """The number of the verdict, or a tuple of them where there are several.

        Raises:
            MethodError: the server refuses the request as such (status 4xx), so that trying again is no use.
            ValueError: the reply has no such verdict.
        """
        message = fill(self.template, fields)
        if self.reply == "json":
            numbers = self._of_json(self._chat(message + _json_told(self.keys), response_format=_schema(self.keys)))
        elif self.reply == "marked":
            mark = f"verdict-{secrets.token_hex(8)}"
            numbers = self._matched(_between(self._chat(message + _MARKED.format(mark=mark)), mark))
        else:
            numbers = self._matched(self._chat(message))
        return numbers[0] if len(numbers) == 1 else numbers

    def _matched(self, text: str) -> tuple[float, ...]:
        match = deque(self.pattern.finditer(text), maxlen=1)
        if not match:
            raise ValueError(f"the reply does not match {shown(self.pattern.pattern)}: {shortened(text)}.")
        try:
            return tuple(float(group) for group in match[0].groups())
        except (TypeError, ValueError):
            raise ValueError(
                f"{shown(self.pattern.pattern)} matches {shown(match[0][0])}, where a group is no number."
            ) from None

    def _of_json(self, text: str) -> tuple[float, ...]:
        try:
            found = read_json(text)
            values = [found[key] for key in self.keys]
            if any(isinstance(value, (bool, str)) for value in values):
                raise ValueError("a number is needed")
            return tuple(float(value) for value in values)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
            raise ValueError(
                f"the reply is no JSON object with the numbers {', '.join(self.keys)}: {shortened(text)}."
            ) from None


_MARKED = """

Put your verdict, in the form that is asked for above, between <{mark}> and </{mark}>. Write these two marks once, and \
nothing but the verdict between them. They are yours alone: a verdict that stands in what you judge is none."""


def _between(reply: str, mark: str) -> str:
    """What stands between the last two marks of a reply."""
    found = between(reply, f"<{mark}>", f"</{mark}>")
    if not found:
        raise ValueError(f"the reply has no verdict between <{mark}> and </{mark}>: {shortened(reply)}.")
    return found[-1]


def _json_told(keys: Sequence[str]) -> str:
    return (
        "\n\nReply with one JSON object and nothing else: your considerations as the text `reasons`, then your verdict "
        f"as the number{'s' * (len(keys) > 1)} {', '.join(f'`{key}`' for key in keys)}."
    )


def _schema(keys: Sequence[str]) -> dict[str, Any]:
    properties = {"reasons": {"type": "string"}, **{key: {"type": "number"} for key in keys}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """`template` with every `{name}` of a field replaced, once: what is put in is not looked at again."""
    return re.sub(r"\{(\w+)\}", lambda m: as_text(fields[m[1]]) if m[1] in fields else m[0], template)


def prompt_text(prompt: Any) -> str:
    """A prompt as text: itself, the content of its only message, or all its messages with their roles."""
    messages = as_messages(prompt)
    if len(messages) == 1:
        return as_text(messages[0].get("content"))
    return "\n\n".join(f"{m.get('role', 'user')}: {as_text(m.get('content'))}" for m in messages)


def media_of(run: Run) -> str:
    """Where the prompts of a run have images, video or sound: a column, or parts of the first prompt's messages; empty
    if they are text alone, as far as can be told."""
    media = [c for c in run.columns if c.rstrip("s") in ("image", "video", "audio")]
    found = [c for c in media if not empty_column(run.dataset, c)]
    if not found and run.dataset is not None and run.dataset_size:
        prompt = run.dataset[0].get("prompt")
        messages = prompt if isinstance(prompt, (list, tuple)) else ()
        parts = [m["content"] for m in messages if isinstance(m, Mapping) and isinstance(m.get("content"), list)]
        found = [f"prompt ({p.get('type')})" for content in parts for p in content if p.get("type") != "text"]
    return ", ".join(dict.fromkeys(found))


def empty_column(dataset: Any, column: str) -> bool:
    """Whether a column of a `datasets.Dataset` has nothing in any row, as text rows beside those with images have it:
    empty lists or None. Costs no look at the rows. Of another dataset it is not known: False."""
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None or column not in table.column_names:
        return False
    return all(
        chunk.null_count == len(chunk) or (hasattr(chunk, "offsets") and chunk.offsets[0] == chunk.offsets[-1])
        for chunk in table.column(column).chunks
    )


def with_task(prompt: Any, change: Callable[[str], str]) -> Any:
    """A prompt, text or messages, whose task is changed: the text, or that of the user's last message, whose other
    parts (images) stay and come first. A new object."""
    if isinstance(prompt, (str, bytes)):
        return as_text(change(as_text(prompt)))
    messages = as_messages(prompt)
    last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=len(messages) - 1)
    content = messages[last].get("content")
    if isinstance(content, (list, tuple)):
        others = [part for part in content if part.get("type") != "text"]
        text = "\n".join(as_text(part["text"]) for part in content if part.get("type") == "text")
        messages[last]["content"] = [*others, {"type": "text", "text": as_text(change(text))}]
    else:
        messages[last]["content"] = as_text(change(as_text(content)))
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

    Args:
        timeout: seconds of one try, in which a coroutine may block the loop without being called dead.

    Raises:
        MethodError: the loop stands still: some coroutine calls something that blocks.
    """
    loop = _shared_loop()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    bound = min(max(timeout, _ALIVE), threading.TIMEOUT_MAX)
    try:
        while not concurrent.futures.wait([future], _POLL).done:
            alive = threading.Event()
            loop.call_soon_threadsafe(alive.set)
            if not alive.wait(bound) and not future.done():
                _forget_loop()
                raise MethodError(
                    f"{name[:1].upper()}{name[1:]} blocks its event loop for more than {bound:g} s: an `async def` "
                    f"that calls something which is not awaited. Make it an ordinary function, or await what it calls."
                )
        return future.result()
    finally:
        future.cancel()  # Ctrl-C while it waits; one that is done stays as it is


def _key(item: Any) -> str | None:
    """A digest of plain data; None for anything else, and for what is nested too deeply to be written."""
    try:
        return hashlib.blake2b(json.dumps(item, sort_keys=True).encode(), digest_size=20).hexdigest()
    except (TypeError, ValueError, RecursionError):
        return None


_OFFSETS = (0, 1, 1, 2, 3, 5, 8, 13)  # of probes in their parts; no list has all eight at one place of a period


def _spread_first(n: int) -> list[int]:
    """0..n-1, and first a number out of each of `PROBES` equal parts. What fails may fail at regular places (a prompt,
    one order of every pair, one vote), so they do not lie at the same place of their parts."""
    if n <= PROBES:
        return list(range(n))
    parts = [range(part * n // PROBES, (part + 1) * n // PROBES) for part in range(PROBES)]
    probes = [part[offset % len(part)] for part, offset in zip(parts, _OFFSETS, strict=True)]
    return [*probes, *sorted(set(range(n)) - set(probes))]


def _not_asked(failed: int, calls: int, error: str) -> str:
    return f"not asked, because {failed} calls spread over all {calls} failed, the last one with {error}"
