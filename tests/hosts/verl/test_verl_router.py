"""The affinity router as verl's plug-in: loaded by verl's own code from the YAML, asked by verl's own client."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from messages import raises

verl_router = pytest.importorskip("verl.workers.rollout.router", reason="verl 0.9.0 has no routers of one's own")
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rl_plugins.core.errors import ConfigError
from rl_plugins.verl.router import AffinityLoadBalancer

CONFIG = """
router_class: rl_plugins.verl.router.AffinityLoadBalancer
pools:
  - {name: compute, replicas: [0], capacity: 2, prefill_rate: 10000, decode_rate: 20}
  - {name: bandwidth, servers: ["10.0.2.*"], capacity: 2, prefill_rate: 1000, decode_rate: 60}
tags: {swe: [compute], math: [bandwidth, compute]}
"""
SERVERS = ("10.0.1.1:80", "10.0.2.1:80")


class Remote:
    """An actor in this process: `remote` runs the method at once."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)

        async def result(value: Any) -> Any:
            return await value if inspect.isawaitable(value) else value

        return SimpleNamespace(remote=lambda *a, **k: asyncio.ensure_future(result(method(*a, **k))))


class Server:
    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def generate(self, request_id: str, prompt_ids: list[int], **options: Any) -> TokenOutput:
        self.asked.append(prompt_ids)
        await asyncio.sleep(0.01)
        return TokenOutput(token_ids=[1, 2], extra_fields={"global_steps": 0})


@pytest.fixture
def balancer(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[AffinityLoadBalancer, dict[str, Server]]:
    """Made by verl's own factory out of the file."""
    file = tmp_path / "router.yaml"
    file.write_text(CONFIG)
    servers = {name: Server() for name in SERVERS}
    local = SimpleNamespace(
        remote=lambda cls: SimpleNamespace(remote=cls), actor=SimpleNamespace(ActorClass=type("ActorClass", (), {}))
    )
    monkeypatch.setattr(verl_router, "ray", local)
    handles = {name: Remote(server) for name, server in servers.items()}
    made = verl_router.get_router_handle(handles, str(file))
    assert isinstance(made, AffinityLoadBalancer)
    return made, servers


def test_verls_client_reaches_the_pool_of_the_tag(balancer: Any) -> None:
    made, servers = balancer
    rollout = SimpleNamespace(name="vllm", full_determinism=False)

    async def play() -> None:
        client = LLMServerClient(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), Remote(made))
        jobs = [("swe|a_0", [7] * 9), ("math|b_0", [8]), ("swe|c_0", [7] * 5), ("math|d_0", [8, 8])]
        calls = [client.generate(i, prompt_ids=p, sampling_params={"max_tokens": 4}) for i, p in jobs]
        outputs = asyncio.gather(*calls)
        await asyncio.sleep(0.005)
        assert made.get_total_inflight() == 4 and made.get_status()["servers"] == dict.fromkeys(SERVERS, 2)
        assert [o.token_ids for o in await outputs] == [[1, 2]] * 4
        await asyncio.sleep(0)  # releases are not awaited
        await client.generate("swe|a_0", prompt_ids=[7] * 11, sampling_params={"max_tokens": 4})
        await asyncio.sleep(0)

    asyncio.run(play())
    assert [len(p) for p in servers[SERVERS[0]].asked] == [9, 5, 11]
    assert [len(p) for p in servers[SERVERS[1]].asked] == [1, 2]
    status = made.get_status()
    assert status["routed"] == {"compute": 3, "bandwidth": 2} and status["total_inflight"] == 0
    assert made.router._measured["swe"].read == pytest.approx(0.81 * 9 + 0.09 * 5 + 0.1 * 2), "the third turn reads 2"
    assert 0 < made.router._measured["math"].written <= 4


def test_it_has_every_method_of_verls_protocol() -> None:
    protocol = verl_router.RequestLoadBalancer
    wanted = [name for name in vars(protocol) if not name.startswith("_")]
    assert len(wanted) == 10
    for name in wanted:
        theirs = inspect.signature(getattr(protocol, name)).parameters
        ours = inspect.signature(getattr(AffinityLoadBalancer, name)).parameters
        assert [p for p in theirs if p != "extra"] == list(ours)[: len([p for p in theirs if p != "extra"])]


def test_servers_come_and_go(balancer: Any) -> None:
    made, _ = balancer
    made.remove_servers([SERVERS[0]])
    with pytest.raises(RuntimeError, match="No available servers in load balancer: request swe.* pools compute"):
        made.acquire_server("swe|a_0")
    assert made.acquire_server("math|a_0")[0] == SERVERS[1] == made.acquire_server("other")[0]
    made.add_servers({SERVERS[0]: "handle"})
    assert made.acquire_server("swe|a_0") == (SERVERS[0], "handle"), "it keeps its number and pool"
    assert made.get_all_servers() == [SERVERS[1], SERVERS[0]]
    assert made.clear_sticky_cache() == {"cleared_entries": 3, "server_loads": {SERVERS[1]: 2, SERVERS[0]: 1}}


def test_one_pool_reads_no_prompt() -> None:
    made = AffinityLoadBalancer({"a": 1, "b": 2}, {"pools": [{"name": "all", "servers": ["*"]}]})
    assert made.require_acquire_fields() == []
    assert [made.acquire_server(str(i))[0] for i in range(4)] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"pools": [{"name": "a", "servers": ["x"]}]}, "1.*0"),
        ({"pools": [{"name": "a"}]}, "either `servers`"),
        ({"pools": [{"name": "a", "servers": ["*"], "rate": 1}]}, "'rate'"),
        ({"pool": []}, "option 'pool'"),
        ({}, "Give at least one"),
    ],
)
def test_wrong_files_are_refused(config: dict[str, Any], why: str) -> None:
    with raises(ConfigError, match=why):
        AffinityLoadBalancer({"s:1": None}, config)
