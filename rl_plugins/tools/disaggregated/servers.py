"""The servers of the simulator: requests that they read and write, pauses for new weights, and use of their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_plugins.tools.disaggregated.router import AffinityRouter, Pool


class TurnRequest(Protocol):
    """What the servers read and note of a trajectory between two turns."""

    name: str
    tag: str
    context: int  # tokens
    cached: int  # of them on its server
    server: str
    paused: float  # seconds of pauses of its server when it got the request
    version: int  # of the weights that wrote its first token; -1 before


class Levels:
    """Numbers that change with time, and their sums over time."""

    def __init__(self) -> None:
        self._level: dict[str, tuple[float, float, int]] = {}  # area until a time, that time, level since then

    def add(self, name: str, more: int, now: float) -> None:
        """Raises a level, or lowers it."""
        area, since, level = self._level.get(name, (0.0, 0.0, 0))
        self._level[name] = area + level * (now - since), now, level + more

    def area(self, name: str, now: float) -> float:
        """The sum over time until now."""
        area, since, level = self._level.get(name, (0.0, 0.0, 0))
        return area + level * (now - since)


@dataclass(slots=True)
class _Server:
    pool: Pool
    free: float = 0.0  # time until which it reads
    until: float = 0.0  # end of its last pause
    paused: float = 0.0  # seconds of all pauses
    read: float = 0.0  # seconds of reading that were given to it


class Servers:
    """All servers behind a router.

    A server reads one request after the other, in the order in which they came. It writes all of its requests at once,
    each at the rate of its pool.
    """

    def __init__(self, router: AffinityRouter, pools: Sequence[Pool], servers: Mapping[str, str]) -> None:
        self.router, self.version = router, 0
        by_name = {pool.name: pool for pool in pools}
        self._servers = {name: _Server(by_name[pool]) for name, pool in servers.items()}
        self._levels = Levels()

    def ask(self, request: TurnRequest, written: int, now: float) -> float | None:
        """Gives a request to the server that the router chooses. Returns the time at which so many tokens are written.
        None: all servers are full."""
        chosen = self.router.choose(request.name, request.tag, request.context, now=now)
        if chosen is None:
            return None
        server = self._servers[chosen]
        new = request.context - (request.cached if chosen == request.server else 0)
        reading = new / server.pool.prefill_rate
        server.free = max(now, server.until, server.free) + reading
        server.read += reading
        request.server, request.paused = chosen, server.paused
        if request.version < 0:
            request.version = self.version
        self._levels.add(f"places {server.pool.name}", 1, now)
        if self.router.under_way[chosen] == 1:
            self._levels.add(f"busy {server.pool.name}", 1, now)
        return server.free + written / server.pool.decode_rate

    def delayed(self, request: TurnRequest) -> float:
        """Seconds for which its server stopped since it was asked, or since the last call."""
        server = self._servers[request.server]
        extra, request.paused = server.paused - request.paused, server.paused
        return extra

    def release(self, request: TurnRequest, written: int, now: float) -> None:
        """A request has ended."""
        pool = self._servers[request.server].pool.name
        self.router.release(request.server, request.name, written, now)
        request.context += written
        request.cached = request.context
        self._levels.add(f"places {pool}", -1, now)
        if self.router.under_way[request.server] == 0:
            self._levels.add(f"busy {pool}", -1, now)

    def pause(self, seconds: float, version: int, now: float) -> None:
        """All servers stop. Afterwards they go on, and new requests get weights of this version."""
        self.version = version
        for server in self._servers.values():
            extra = now + seconds - max(now, server.until)
            if extra > 0:
                server.paused += extra
                server.free += extra if server.free > now else 0.0
                server.until = now + seconds

    def used(self, now: float) -> dict[str, float]:
        """Of each pool with a server the seconds of use so far: servers with a request, places, servers that read."""
        found: dict[str, float] = {}
        for pool in {server.pool.name: server.pool for server in self._servers.values()}.values():
            mine = [server for server in self._servers.values() if server.pool is pool]
            found[f"busy {pool.name}"] = self._levels.area(f"busy {pool.name}", now) / len(mine)
            places = len(mine) * pool.capacity
            found[f"places {pool.name}"] = self._levels.area(f"places {pool.name}", now) / places
            left = (max(server.free - max(now, server.until), 0.0) for server in mine)
            found[f"reading {pool.name}"] = (sum(server.read for server in mine) - sum(left)) / len(mine)
        return found
