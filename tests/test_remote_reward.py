"""Rewards from a real HTTP server: answers, retries with the same id, failures that are NaN and never 0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.tools.disaggregated.reward import remote_reward, remote_score


class Rewards:
    """Answers the length of a completion; `fails` says what the k-th try of a completion gets instead."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.tries: dict[str, int] = {}
        self.fails: Any = lambda completion, k: None
        self.leave = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                k = outer.tries[body["id"]] = outer.tries.get(body["id"], -1) + 1
                outer.seen.append(body)
                outer.keys.append(self.headers["Idempotency-Key"])
                status, answer = outer.fails(body["completion"], k) or (200, {"reward": len(body["completion"])})
                if status == 0:
                    outer.leave.wait(10)
                data = json.dumps(answer).encode()
                with contextlib.suppress(OSError):  # the caller gave up
                    self.send_response(status or 200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.params = {"url": f"http://127.0.0.1:{self.http.server_address[1]}/", "timeout": 5.0, "backoff": 0.0}
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.leave.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Rewards]:
    made = Rewards()
    yield made
    made.close()


def rewards(texts: list[Any], params: dict[str, Any], **columns: Any) -> list[float]:
    return asyncio.run(remote_reward(["q"] * len(texts), texts, params=params, **columns))


def test_each_completion_gets_its_own_reward_in_order(server: Rewards) -> None:
    logged: dict[str, float] = {}
    found = rewards(
        ["abc", [{"role": "assistant", "content": "ab"}], ""],
        {**server.params, "columns": "answer"},
        answer=["x", "y", "z"],
        trainer_state=object(),
        log_metric=logged.__setitem__,
    )
    assert found == [3.0, 2.0, 0.0] and logged == {"remote_reward/failed": 0.0}
    sent = {s["completion"]: s for s in server.seen}
    assert sent["ab"]["columns"] == {"answer": "y"} and sent["ab"]["prompt"] == "q"
    assert len(set(server.keys)) == 3 and server.keys == [s["id"] for s in server.seen]


def test_a_retry_has_the_id_of_the_first_try(server: Rewards) -> None:
    server.fails = lambda completion, k: [(503, "busy"), (200, "no number")][k] if k < 2 else None
    assert rewards(["abcd"], server.params) == [4.0]
    assert len(server.seen) == 3 and len(set(server.keys)) == 1


@pytest.mark.parametrize("bad", [(503, "busy"), (200, {"score": 1}), (200, None), (200, "nan"), (400, "bad request")])
def test_a_failure_is_nan_and_the_others_keep_theirs(server: Rewards, bad: Any) -> None:
    server.fails = lambda completion, k: bad if completion == "bad" else None
    logged: dict[str, float] = {}
    found = rewards(["ok", "bad", "fine"], server.params, log_metric=logged.__setitem__)
    assert found[0] == 2.0 and math.isnan(found[1]) and found[2] == 4.0
    assert logged == {"remote_reward/failed": pytest.approx(1 / 3)}
    assert sum(s["completion"] == "bad" for s in server.seen) == (1 if bad[0] == 400 else 4)


def test_a_request_that_hangs_costs_its_time_out(server: Rewards) -> None:
    server.fails = lambda completion, k: (0, 1.0) if completion == "slow" else None
    start = time.monotonic()
    found = rewards(["slow", "fast"], {**server.params, "timeout": 0.3, "retries": 1})
    assert math.isnan(found[0]) and found[1] == 4.0 and time.monotonic() - start < 5


def test_a_dead_service_masks_or_stops(server: Rewards) -> None:
    dead = {"url": "http://127.0.0.1:9/", "timeout": 2.0, "retries": 1, "backoff": 0.0}
    assert all(map(math.isnan, rewards(["a", "b"], dead)))
    with pytest.raises(MethodError, match="gave no reward in 2 tries.*on_failure: mask"):
        rewards(["a"], {**dead, "on_failure": "stop"})


def test_verls_form(server: Rewards) -> None:
    params = {**server.params, "columns": "ground_truth, level"}

    def score(text: str) -> dict[str, Any]:
        info = {"question": "1+1?", "level": 3}
        return asyncio.run(remote_score("math", text, "2", info, params=params, reward_router_address=None))

    assert score("two") == {"score": 3.0, "reward_failed": False}
    assert server.seen[0]["prompt"] == "1+1?" and server.seen[0]["columns"] == {"ground_truth": "2", "level": 3}
    server.fails = lambda completion, k: (404, "")
    found = score("four")
    assert math.isnan(found["score"]) and found["reward_failed"] is True


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"url": "rewards:8000"}, "such as http://"),
        ({"timeout": 0}, "timeout"),
        ({"columns": "answer"}, "`columns` of remote_reward names answer. The dataset has: level"),
    ],
)
def test_wrong_parameters_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        rewards(["a"], {"url": "http://127.0.0.1:9/", **change}, level=[1])
