"""The affinity router alone: never a pool that is full or not allowed, sticky, deterministic, one pool is balancing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.disaggregated.router import AffinityRouter, Pool

FAST_READER = Pool("compute", 2, prefill_rate=10_000, decode_rate=20)
FAST_WRITER = Pool("bandwidth", 2, prefill_rate=1_000, decode_rate=60)
SERVERS = {"c0": "compute", "c1": "compute", "b0": "bandwidth"}


def router(**options: Any) -> AffinityRouter:
    return AffinityRouter([FAST_READER, FAST_WRITER], SERVERS, **options)


def test_the_first_pool_of_a_list_that_has_a_place_is_taken() -> None:
    r = router(tags={"swe": ["compute"], "math": ["bandwidth", "compute"]})
    assert [r.choose(f"m{i}", "math") for i in range(6)] == ["b0", "b0", "c0", "c1", "c0", "c1"]
    assert r.choose("m6", "math") is None and r.choose("s0", "swe") is None
    r.release("c1", "m3")
    assert r.choose("s0", "swe") == "c1"
    assert r.routed == {"compute": 5, "bandwidth": 2}


def test_measured_shares_send_readers_and_writers_to_their_pools() -> None:
    r = router()
    for tag, read, written in [("reads", 20_000, 20), ("writes", 50, 900)]:
        server = r.choose(tag, tag, read)
        assert server is not None
        r.release(server, tag, written)
    # 20000/10000 + 20/20 = 3 s against 20000/1000 + 20/60 = 20.3 s; 45 s against 15 s
    assert r.cost("compute", "reads") == pytest.approx(3.0) and r.cost("bandwidth", "reads") == pytest.approx(
        20 + 1 / 3
    )
    assert r.cost("compute", "writes") == pytest.approx(45.005)
    assert r.choose("x", "reads", 20_000) == "c0" and r.choose("y", "writes", 50) == "b0"


def test_what_a_request_wrote_is_estimated_by_its_time() -> None:
    r = router(decay=0.5)
    for time, written in [(3.0, 40.0), (1e6, 100.0)]:  # 20 tokens a second after a second of reading; the limit
        server = r.choose("t", "tag", 10_000, most=100, now=0.0)
        assert server is not None
        r.forget()
        r.release(server, "t", now=time)
        seen = r._measured["tag"]
        assert seen.read == 10_000
        assert seen.written == pytest.approx(written if written == 40 else 70)
        r.remove(["b0"])


def test_a_trajectory_stays_and_reads_only_what_is_new() -> None:
    r = router(tags={"": ["compute", "bandwidth"]})
    assert r.choose("t", tokens=1_000) == "c0"
    r.release("c0", "t", written=10)
    assert r.choose("u") == "c0" and r.choose("v") == "c1"
    assert r.choose("t", tokens=1_400) == "c0"
    assert r._open["c0", "t"][0].read == 400
    r.release("c0", "t", written=10)
    r.remove(["c0"])
    assert r.choose("t", tokens=1_500) == "c1" and r._open["c1", "t"][0].read == 1_500 and r.moved == 1
    r.release("c0", "u")  # of the server that was lost: nothing is counted
    r.add({"c0": "compute"})
    r.release("c1", "v")
    assert r.choose("t", tokens=1_600) == "c1" and r.choose("w") == "c0", "the returned server is empty"
    assert r.forget() == 4 and r.choose("u") == "c0"


def test_where_all_is_full_the_least_loaded_server_queues() -> None:
    r = router(tags={"swe": ["compute"]})
    assert [r.assign(f"s{i}", "swe") for i in range(6)] == ["c0", "c1", "c0", "c1", "c0", "c1"]
    assert r.assign("s1", "swe") == "c1", "sticky also where it queues"
    r.remove(["c0", "c1"])
    assert r.assign("s9", "swe") is None and r.assign("x") == "b0"


CALLS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "end", "lose", "return"]), st.integers(0, 7), st.integers(0, 2)),
    max_size=60,
)
TAGS = {"0": ["compute"], "1": ["bandwidth", "compute"]}


@given(CALLS)
@settings(deadline=None, max_examples=60)
def test_never_full_nor_forbidden_and_sticky_and_deterministic(calls: list[tuple[str, int, int]]) -> None:
    first, second = router(tags=TAGS), router(tags=TAGS)
    chosen = [_play(r, calls) for r in (first, second)]
    assert chosen[0] == chosen[1]


def _play(r: AffinityRouter, calls: list[tuple[str, int, int]]) -> list[str | None]:
    chosen: list[str | None] = []
    last: dict[str, str] = {}
    under_way: list[tuple[str, str, int]] = []
    epoch = dict.fromkeys(SERVERS, 0)  # how often it was lost
    capacity = {server: r.pools[pool].capacity for server, pool in SERVERS.items()}
    for i, (call, trajectory, tag) in enumerate(calls):
        name, before = f"{trajectory}/{tag}", dict(r.under_way)
        if call == "ask":
            server = r.choose(name, str(tag), 100 * i, now=float(i))
            chosen.append(server)
            usable = [s for s, n in before.items() if n < capacity[s] and SERVERS[s] in r.allowed(str(tag))]
            if server is None:
                assert not usable and r.under_way == before
                continue
            assert server in usable
            if last.get(name) in usable:
                assert server == last[name]
            last[name] = server
            under_way.append((server, name, epoch[server]))
        elif call == "end" and under_way:
            server, name, _ = under_way.pop(trajectory % len(under_way))
            r.release(server, name, now=float(i))
        elif call == "lose":
            lost = list(SERVERS)[tag]
            r.remove([lost])
            epoch[lost] += 1
        elif call == "return":
            back = list(SERVERS)[tag]
            if back not in r.under_way:
                r.add({back: SERVERS[back]})
        assert r.under_way.keys() <= SERVERS.keys()
        running = [name for server, name, when in under_way if when == epoch[server]]
        if len({name for _, name, _ in under_way}) == len(under_way):
            assert sum(r.under_way.values()) == len(running)
    return chosen


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=50))
@settings(deadline=None)
def test_one_pool_is_sticky_least_loaded_balancing(calls: list[tuple[bool, int]]) -> None:
    """The rule of verl's own balancer, ties to the first."""
    r = AffinityRouter([Pool("all", 10**6)], dict.fromkeys("abc", "all"))
    load, sticky, under_way = dict.fromkeys("abc", 0), {}, []
    for ask, trajectory in calls:
        if ask:
            wanted = sticky.setdefault(trajectory, min(load, key=lambda s: load[s]))
            assert r.choose(str(trajectory), tokens=5) == wanted
            load[wanted] += 1
            under_way.append((wanted, trajectory))
        elif under_way:
            server, t = under_way.pop(0)
            r.release(server, str(t), now=1.0)
            load[server] -= 1


def test_memory_is_bounded() -> None:
    r = router(remembered=10)
    for i in range(100):
        server = r.choose(str(i))
        assert server is not None
        r.release(server, str(i), now=1.0)
    assert len(r._sticky) == len(r._context) == 10 and not r._open


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="The tag swe names the pool 'gpu'. The pools are compute, bandwidth."):
        router(tags={"swe": ["gpu"]})
    with pytest.raises(ConfigError, match="`capacity` of pool x is 0"):
        Pool("x", 0)
    with pytest.raises(ConfigError, match="Give at least one"):
        AffinityRouter([], {})
    with pytest.raises(ConfigError, match="The server s names the pool 'y'"):
        AffinityRouter([FAST_READER], {"s": "y"})
