"""Calls of judges and value models: what hangs, raises, is slow or answers nonsense never stops the trainer."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from waiting import HANG, NEVER, SOON, Stuck

from rl_plugins import services
from rl_plugins.errors import ConfigError, MethodError
from rl_plugins.runtime import threads
from rl_plugins.services import ChatEndpoint, Endpoint, Failure, Service, fill, number, prompt_text, with_task


def service(function: Any, **options: Any) -> Service:
    return Service(function, "the judge", **{"timeout": NEVER, "backoff": 0.0, **options})


class Counted:
    """A judge that doubles, counts its calls, and fails as often as told."""

    def __init__(self, failures: int = 0, error: Exception | None = None, answer: Any = None) -> None:
        self.calls: list[Any] = []
        self.failures, self.error, self.answer = failures, error, answer

    def __call__(self, item: Any) -> Any:
        self.calls.append(item)
        if len(self.calls) <= self.failures:
            if self.error:
                raise self.error
            return self.answer
        return 2.0 * item


# ---- order, batches, async, cache


def test_order_is_kept_whatever_finishes_first() -> None:
    finished, answered = [], [threading.Event() for _ in range(6)]
    answered[5].set()

    def late_first(item: int) -> float:
        assert answered[item + 1].wait(NEVER)
        finished.append(item)
        answered[item].set()
        return item

    assert service(late_first, concurrency=5).ask(range(5)) == [0, 1, 2, 3, 4]
    assert finished == [4, 3, 2, 1, 0]


async def async_double(item: float) -> float:
    await asyncio.sleep(0.001)
    return 2 * item


class AsyncCallable:
    async def __call__(self, items: list[float]) -> list[float]:
        await asyncio.sleep(0.001)
        return [2 * i for i in items]


@pytest.mark.parametrize(
    ("function", "batch_size"),
    [
        (lambda item: 2 * item, None),
        (async_double, None),
        (lambda item: async_double(item), None),
        (lambda items: [2 * i for i in items], 3),
        (AsyncCallable(), 3),
        (lambda items: torch.tensor(items) * 2.0, 4),
        (lambda items: np.array(items) * 2, 100),
    ],
)
def test_functions_coroutines_and_batches(function: Any, batch_size: int | None) -> None:
    answers = service(function, batch_size=batch_size).ask([float(i) for i in range(10)])
    assert answers == [2.0 * i for i in range(10)]
    assert all(type(a) is float for a in answers)


def test_works_inside_of_a_running_event_loop() -> None:
    async def hook() -> list[float]:
        return service(async_double).ask([1.0, 2.0])

    assert asyncio.run(hook()) == [2.0, 4.0]


def test_a_client_of_one_loop_serves_several_calls() -> None:
    loops = []

    async def judge(item: int) -> int:
        loops.append(asyncio.get_running_loop())
        return item

    service(judge).ask([1])
    service(judge).ask([2])
    assert len(set(map(id, loops))) == 1


def test_batches_are_cut() -> None:
    sizes = []

    def judge(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    assert service(judge, batch_size=4, concurrency=1).ask(range(10)) == list(range(10))
    assert sizes == [4, 4, 2]


def test_equal_items_are_asked_once_and_remembered() -> None:
    judge = Counted()
    s = service(judge)
    assert s.ask([1, 2, 1, 1]) == [2, 4, 2, 2]
    assert sorted(judge.calls) == [1, 2]
    assert s.ask([2, 3]) == [4, 6]
    assert sorted(judge.calls) == [1, 2, 3]


def test_items_are_cached_by_content() -> None:
    calls = []

    def judge(item: Any) -> int:
        calls.append(item)
        return len(calls)

    s = service(judge, concurrency=1)
    assert s.ask([{"a": [1, 2], "b": "x"}, {"b": "x", "a": [1, 2]}, ("p", 1), ("p", 2), "1", 1]) == [1, 1, 2, 3, 4, 5]
    thing = object()  # no content to go by
    assert s.ask([thing, thing]) == [6, 7]


def test_cache_is_bounded_and_can_be_off() -> None:
    judge = Counted()
    s = service(judge, cache_size=2, concurrency=1)
    s.ask([1, 2, 3])
    s.ask([3, 2, 1])
    assert judge.calls == [1, 2, 3, 1]
    judge = Counted()
    assert service(judge, cache_size=0).ask([1, 1]) == [2, 2]
    assert judge.calls == [1, 1]


def test_no_more_calls_at_a_time_than_allowed() -> None:
    running, most, lock, three = 0, 0, threading.Lock(), threading.Barrier(3, timeout=NEVER)

    def judge(item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait()
        time.sleep(0.01)  # a fourth one would come now
        with lock:
            running -= 1
        return item

    service(judge, concurrency=3).ask(range(12))
    assert most == 3


def test_nothing_asked_nothing_called() -> None:
    assert service(Counted(failures=99, error=ValueError())).ask([]) == []


# ---- failures


def test_a_retry_mends_an_error_and_bad_answers() -> None:
    for judge in (Counted(2, ValueError("busy")), Counted(2, answer="good"), Counted(2, answer=math.nan)):
        assert service(judge, retries=2).ask([3]) == [6]
        assert judge.calls == [3, 3, 3]


def test_pauses_between_tries_double(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, sleep = [], asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    service(judge := Counted(4, ValueError("busy")), retries=4, backoff=10.0).ask([1])
    assert pauses == [10.0, 20.0, 40.0, services.LONGEST_PAUSE] and len(judge.calls) == 5


def test_raising_for_good_says_what_and_about_what() -> None:
    with pytest.raises(MethodError) as caught:
        service(Counted(99, KeyError("score")), retries=1, timeout=30).ask([7])
    text = str(caught.value)
    assert "The judge gave no usable answer in 2 tries of up to 30 s each" in text
    assert "KeyError: 'score'" in text and "It was asked about: 7." in text


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3), KeyboardInterrupt(), TimeoutError("slow server")])
def test_odd_exceptions_are_failures_like_others(error: BaseException) -> None:
    def judge(item: int) -> int:
        raise error

    with pytest.raises(MethodError, match=type(error).__name__):
        service(judge, retries=0).ask([1])


def test_a_coroutine_that_is_cancelled_inside_is_a_failure() -> None:
    async def judge(item: int) -> int:
        raise asyncio.CancelledError

    with pytest.raises(MethodError, match="it was cancelled"):
        service(judge, retries=0).ask([1])


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("7", "'7' is not a number"),
        (None, "None is not a number"),
        ([1.0], "is not a number"),
        (math.nan, "nan is not a finite number in [0, 10]"),
        (math.inf, "inf is not a finite number"),
        (11, "11 is not a finite number in [0, 10]"),
        (-0.1, "-0.1 is not"),
    ],
)
def test_garbage_for_one_item(answer: Any, text: str) -> None:
    with pytest.raises(MethodError) as caught:
        service(lambda item: answer, answer=number(0, 10), retries=0).ask([1])
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([1.0], "2 answers are needed, one per item; it gave 1"),
        ([1.0, 2.0, 3.0], "it gave 3"),
        (1.0, "a list of 2 answers is needed, it gave 1.0 (float)"),
        ("ab", "a list of 2 answers is needed"),
        (None, "a list of 2 answers is needed"),
        ([1.0, "x"], "'x' is not a number"),
    ],
)
def test_garbage_for_a_batch(answer: Any, text: str) -> None:
    with pytest.raises(MethodError) as caught:
        service(lambda items: answer, batch_size=2, retries=0).ask([1, 2])
    assert text in str(caught.value)


def test_nan_where_it_is_allowed() -> None:
    assert math.isnan(service(lambda item: math.nan, answer=number(0, 1, allow_nan=True)).ask([1])[0])
    with pytest.raises(ValueError):
        number(0, 1, allow_nan=True)(2)


@pytest.mark.parametrize("how", ["blocks its thread", "waits", "refuses to be cancelled"])
def test_a_hanging_call_costs_its_time_out(how: str, stuck: Stuck) -> None:
    """And no more: the error comes while every call still hangs."""
    ended, let_go = threading.Semaphore(0), threading.Event()

    async def waits(item: int) -> None:
        stuck.calls += 1
        try:
            await asyncio.Event().wait()
        finally:
            ended.release()

    async def refuses(item: int) -> None:
        stuck.calls += 1
        while not let_go.is_set() and time.monotonic() < start + HANG:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        ended.release()

    function = {"blocks its thread": stuck, "waits": waits, "refuses to be cancelled": refuses}[how]
    start = time.monotonic()
    with pytest.raises(MethodError, match="no answer within 0.5 s"):
        service(function, timeout=0.5, retries=1).ask([1])
    assert time.monotonic() - start >= 1.0 and stuck.calls == 2
    if how == "waits":
        assert ended.acquire(timeout=NEVER) and ended.acquire(timeout=NEVER), "it is cancelled"
    elif how == "blocks its thread":
        assert stuck.waiting == 2
    else:
        assert not ended.acquire(blocking=False)
        let_go.set()
        assert ended.acquire(timeout=NEVER) and ended.acquire(timeout=NEVER)


def test_a_coroutine_that_blocks_its_loop_is_found_out_and_the_next_call_works(stuck: Stuck) -> None:
    async def blocking(item: int) -> None:
        stuck()

    with pytest.raises(MethodError, match="blocks its event loop for more than 0.5 s"):
        service(blocking, timeout=0.5).ask([1])
    assert stuck.waiting == 1, "nobody waited for its end"
    assert service(async_double).ask([1.0]) == [2.0]


def test_one_hanging_item_does_not_hold_up_the_others(stuck: Stuck) -> None:
    def judge(item: int) -> int | None:
        return stuck() if item == 1 else item

    answers = service(judge, timeout=SOON, retries=0, concurrency=2).ask([0, 1, 2, 3], strict=False)
    assert answers[0] == 0 and answers[2:] == [2, 3] and stuck.waiting == 1
    assert answers[1] == Failure(f"TimeoutError: no answer within {SOON:g} s")


def test_failures_are_not_remembered() -> None:
    judge = Counted(1, ValueError("busy"))
    s = service(judge, retries=0)
    assert s.ask([4], strict=False) == [Failure("ValueError: busy")]
    assert s.ask([4], strict=False) == [8]


def test_a_failed_batch_fails_its_items_only() -> None:
    def judge(items: list[int]) -> list[int]:
        if 2 in items:
            raise ValueError("no twos")
        return items

    answers = service(judge, batch_size=2, retries=0).ask(range(6), strict=False)
    assert [isinstance(a, Failure) for a in answers] == [False, False, True, True, False, False]


def test_a_judge_that_is_down_is_not_asked_everything() -> None:
    judge = Counted(10**6, ValueError("down"))
    answers = service(judge, retries=0, concurrency=4).ask(range(500), strict=False)
    assert all(isinstance(a, Failure) for a in answers)
    assert len(judge.calls) <= 8
    assert answers[-1].error.startswith("not asked: the first")


def test_one_success_keeps_it_going() -> None:
    def judge(item: int) -> int:
        if item:
            raise ValueError("only zero")
        return 1

    answers = service(judge, retries=0, concurrency=1).ask(range(20), strict=False)
    assert answers[0] == 1 and {a.error for a in answers[1:]} == {"ValueError: only zero"}


def test_errors_of_configuration_are_not_tried_again() -> None:
    for error in (MethodError("no such model"), ConfigError("no key")):
        judge = Counted(99, error)
        with pytest.raises(MethodError, match=str(error)):
            service(judge, retries=5).ask([1])
        assert judge.calls == [1]


def test_calls_that_never_end_are_limited(monkeypatch: pytest.MonkeyPatch, stuck: Stuck) -> None:
    monkeypatch.setattr(threads, "MAX_HANGING", 3)
    s = service(stuck, timeout=0.05, retries=0, concurrency=3)
    assert len(s.ask([1, 2, 3], strict=False)) == 3
    with pytest.raises(MethodError, match="3 calls of the judge never returned"):
        s.ask([4], strict=False)


def test_a_process_ends_although_a_call_hangs() -> None:
    code = (
        "import time\nfrom rl_plugins.services import Service\n"
        "s = Service(lambda item: time.sleep(3600), 'the judge', timeout=0.1, retries=0)\n"
        "print(s.ask([1], strict=False))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=NEVER)
    assert "no answer within 0.1 s" in done.stdout and done.returncode == 0


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"retries": -1}, {"concurrency": 0}, {"batch_size": 0}, {"cache_size": -1}]
)
def test_numbers_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(options))}` of the judge is"):
        service(Counted(), **options)


# ---- endpoints


class Server:
    """A chat endpoint: `replies` are what it answers one after the other, (status, text); the last one stays. A text
    that is a function is called first, so that it can hang."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = [(200, "Score: 7")]
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((self.path, dict(self.headers), body))
                status, text = outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                if callable(text):
                    text = text()
                content = {"choices": [{"message": {"content": text}}]} if isinstance(text, str | None) else text
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the caller gave up
                    self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_endpoint_sends_the_template_and_reads_the_last_number(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.replies = [(200, "Between 1 and 10 I say -3.5")]
    endpoint = Endpoint(f"{server.url}/", "judge-1", 'Rate "{text}" as {"json": 1}.', api_key_env="JUDGE_KEY")
    assert service(endpoint).ask([{"text": "a {text} b"}]) == [-3.5]
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": 'Rate "a {text} b" as {"json": 1}.'}]
    assert body["model"] == "judge-1" and body["temperature"] == 0.0


def test_endpoint_with_two_scores_and_no_key(server: Server) -> None:
    server.replies = [(200, "A: 1, B: 2\nfinally A: 6, B: 7.5")]
    endpoint = Endpoint(server.url, "m", "{a} {b}", r"A: (\d+\.?\d*), B: (\d+\.?\d*)")
    assert endpoint({"a": 1, "b": 2}) == (6.0, 7.5)
    assert "Authorization" not in server.seen[0][1]


@pytest.mark.parametrize(
    "bad", [(503, "busy"), (429, "slow down"), (200, "no idea"), (200, None), (200, {"error": "x"}), (200, [])]
)
def test_endpoint_is_tried_again(server: Server, bad: tuple[int, Any]) -> None:
    server.replies = [bad, (200, "4")]
    assert service(Endpoint(server.url, "m", "{a}"), retries=1).ask([{"a": 1}]) == [4.0]
    assert len(server.seen) == 2


def test_endpoint_that_refuses_is_not_tried_again(server: Server) -> None:
    server.replies = [(401, {"error": "wrong key"})]
    with pytest.raises(MethodError, match="refuses the request with status 401: .*wrong key"):
        service(Endpoint(server.url, "m", "{a}"), retries=3).ask([{"a": 1}])
    assert len(server.seen) == 1


def test_endpoint_that_is_slow_or_not_there(server: Server, stuck: Stuck) -> None:
    server.replies = [(200, stuck)]
    slow = Endpoint(server.url, "m", "{a}", timeout=SOON)
    with pytest.raises(MethodError, match="ReadTimeout"):
        service(slow, retries=0).ask([{"a": 1}])
    assert stuck.waiting == 1
    with pytest.raises(MethodError, match="ConnectError"):
        service(Endpoint("http://127.0.0.1:9/v1", "m", "{a}"), retries=0).ask([{"a": 1}])


def test_chat_endpoint_answers_with_the_reply(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.replies = [(200, "one {a}\ntwo"), (200, None), (200, {"error": "x"})]
    endpoint = ChatEndpoint(server.url, "m", api_key_env="JUDGE_KEY", temperature=0.7, max_tokens=5)
    assert endpoint("say {a}") == "one {a}\ntwo"
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "say {a}"}]  # nothing is filled in
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.7, 5)
    assert endpoint("again") == ""
    with pytest.raises(ValueError, match="gave no chat completion"):
        endpoint("and again")
    with pytest.raises(ConfigError, match="it must be a URL"):
        ChatEndpoint("localhost:8000", "m")


def test_endpoint_is_refused_before_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="it must be a URL"):
        Endpoint("localhost:8000", "m", "{a}")
    with pytest.raises(ConfigError, match="has no group"):
        Endpoint("http://h/v1", "m", "{a}", r"\d+")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY, which should hold the key, is not set"):
        Endpoint("http://h/v1", "m", "{a}", api_key_env="NO_SUCH_KEY")
    real = builtins.__import__

    def without_httpx(name: str, *args: Any) -> Any:
        if name == "httpx":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_httpx)
    with pytest.raises(ConfigError, match="pip install httpx"):
        Endpoint("http://h/v1", "m", "{a}")


def test_fill_and_prompt_text() -> None:
    assert fill("{a}{b}{c}", {"a": "{b}", "b": 2}) == "{b}2{c}"
    assert prompt_text("hello") == "hello"
    assert prompt_text([{"role": "user", "content": "a:53"}]) == "a:53"
    assert prompt_text([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == "system: s\n\nuser: u"


def test_with_task() -> None:
    assert with_task("hello", str.upper) == "HELLO"
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "begun"},
    ]
    changed = with_task(messages, lambda text: f"<{text}>")
    assert changed[1]["content"] == [{"type": "image"}, {"type": "text", "text": "<a\nb>"}]
    assert (changed[0], changed[2]) == (messages[0], messages[2])
    assert messages[1]["content"][0] == {"type": "text", "text": "a"}
    assert with_task([{"role": "system", "content": "s"}], str.upper) == [{"role": "system", "content": "S"}]
