"""`AffinityRouter`: which server generates the next turn of a trajectory, by the hardware that suits it.

    router = AffinityRouter(
        [Pool("h800", 64, prefill_rate=40_000, decode_rate=2_000), Pool("h20", 64, 8_000, 3_000)],
        {"0": "h800", "1": "h20"},              # server -> pool
        {"swe": ["h800"], "math": ["h20", "h800"]},  # task tag -> allowed pools, best first
    )
    server = router.choose("trajectory 7", tag="swe", tokens=900, now=0.0)   # None: every allowed pool is full
    router.release(server, "trajectory 7", now=1.5)

The rule, in this order:

1. A trajectory stays with its server while that server exists, its pool is allowed and has a free place.
2. Where the tag has a list of pools, the first pool of the list with a free place is taken.
3. Else, each pool c costs (p / prefill_rate_c + d / decode_rate_c) (1 + requests under way / capacity). p and d are
   running means of the tokens that were read and written in a turn of this tag. The cheapest pool is taken.
4. In the pool, the server with the fewest requests is taken; ties go to the first server.

The class is pure: no clock, no thread, no random number. Equal calls give equal choices. One pool without a list is
plain least-loaded balancing with sticky trajectories.

Reconstruction: the paper names the idea only. The cost of rule 3 is ours.
Source: arXiv 2512.22560, hardware affinity.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_plugins.core.errors import ConfigError


@dataclass(frozen=True)
class Pool:
    """Servers of one kind of hardware.

    Args:
        name: of the pool, for example of its hardware.
        capacity: requests under way on one server at a time.
        prefill_rate: tokens per second that a server reads.
        decode_rate: tokens per second that one request writes.

    Raises:
        ConfigError: a number is not positive.
    """

    name: str
    capacity: int = 256
    prefill_rate: float = 10_000.0
    decode_rate: float = 50.0

    def __post_init__(self) -> None:
        for field in ("capacity", "prefill_rate", "decode_rate"):
            value = getattr(self, field)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"`{field}` of pool {self.name} is {value!r}. It must be a number above 0.")


@dataclass
class _Measured:
    """Running means of one tag: tokens read and written in a turn."""

    read: float = 0.0
    written: float = 0.0
    known: bool = False


@dataclass(frozen=True)
class _Open:
    """A request under way."""

    tag: str
    read: int
    most: int
    since: float


class AffinityRouter:
    """Chooses a server for each request of a trajectory.

    Args:
        pools: all of them.
        servers: server -> name of its pool, in the order in which ties are broken.
        tags: task tag -> names of the pools it may use, best first. A tag without a list may use all pools.
        decay: weight of the past in the running means.
        remembered: trajectories whose server is kept.

    Attributes:
        under_way: server -> its requests.
        routed: pool -> requests that it got so far.
        moved: requests that left the server of their trajectory, because it was lost or full.

    Raises:
        ConfigError: a name that is no pool, or a number out of range.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        servers: Mapping[str, str],
        tags: Mapping[str, Sequence[str]] | None = None,
        decay: float = 0.9,
        remembered: int = 10_000,
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        if not pools or len(self.pools) < len(pools):
            raise ConfigError(f"The pools are {[p.name for p in pools]}. Give at least one, each with its own name.")
        if not 0 <= decay < 1:
            raise ConfigError(f"`decay` is {decay}. It must be in [0, 1).")
        if remembered < 1:
            raise ConfigError(f"`remembered` is {remembered}. It must be at least 1.")
        self.tags = {tag: tuple(names) for tag, names in (tags or {}).items()}
        for tag, names in self.tags.items():
            if not names:
                raise ConfigError(f"The tag {tag} allows no pool. Name at least one of {', '.join(self.pools)}.")
            self._must_be_pools(names, f"The tag {tag}")
        self.decay, self.remembered = decay, remembered
        self.under_way: dict[str, int] = {}
        self.routed = dict.fromkeys(self.pools, 0)
        self.moved = 0
        self._pool_of: dict[str, str] = {}
        self._members: dict[str, dict[str, None]] = {name: {} for name in self.pools}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._open: dict[tuple[str, str], list[_Open]] = {}
        self._context: OrderedDict[str, int] = OrderedDict()
        self._measured: dict[str, _Measured] = {}
        self.add(servers)

    def add(self, servers: Mapping[str, str]) -> None:
        """Adds servers, or moves them to another pool.

        Raises:
            ConfigError: a name that is no pool.
        """
        for server, pool in servers.items():
            self._must_be_pools([pool], f"The server {server}")
            self.remove([server])
            self._pool_of[server] = pool
            self._members[pool][server] = None
            self.under_way[server] = 0

    def remove(self, servers: Sequence[str]) -> None:
        """Removes servers; those that are not known are skipped. Their trajectories are routed again."""
        for server in servers:
            pool = self._pool_of.pop(server, None)
            if pool is not None:
                del self._members[pool][server], self.under_way[server]
                for key in [key for key in self._open if key[0] == server]:
                    del self._open[key]

    def forget(self) -> int:
        """Forgets which server each trajectory used, and returns how many there were."""
        n = len(self._sticky)
        self._sticky.clear()
        self._context.clear()
        return n

    def allowed(self, tag: str) -> tuple[str, ...]:
        """Pools that a tag may use."""
        return self.tags.get(tag, tuple(self.pools))

    def choose(self, trajectory: str, tag: str = "", tokens: int = 0, most: int = 0, now: float = 0.0) -> str | None:
        """The server of the next request. None: every server that is allowed is full or lost.

        Args:
            tokens: of the context. Of a trajectory that stays, only those that were added since are read.
            most: tokens that may be written; 0: no limit.
            now: seconds of any clock.
        """
        allowed = self.allowed(tag)
        server = self._sticky.get(trajectory)
        stays = server is not None and self._usable(server, allowed)
        moved = server is not None and not stays
        if server is None or not stays:
            pool = self._pool(tag, allowed)
            if pool is None:
                return None
            server = min(self._members[pool], key=self.under_way.__getitem__)
        self.moved += moved
        self.under_way[server] += 1
        self.routed[self._pool_of[server]] += 1
        self._keep(self._sticky, trajectory, server)
        read = max(tokens - (self._context.get(trajectory, 0) if stays else 0), 0)
        self._keep(self._context, trajectory, tokens)
        self._open.setdefault((server, trajectory), []).append(_Open(tag, read, most, now))
        return server

    def assign(self, trajectory: str, tag: str = "", tokens: int = 0, most: int = 0, now: float = 0.0) -> str | None:
        """As `choose`, but where every allowed pool is full, the allowed server with the least load for its capacity
        queues the request. None: every allowed server is lost."""
        server = self.choose(trajectory, tag, tokens, most, now)
        if server is not None:
            return server
        there = [s for pool in self.allowed(tag) for s in self._members[pool]]
        if not there:
            return None
        server = self._sticky.get(trajectory, "")
        if server not in there:
            server = min(there, key=lambda s: self.under_way[s] / self.pools[self._pool_of[s]].capacity)
        self.under_way[server] += 1
        self.routed[self._pool_of[server]] += 1
        self._keep(self._sticky, trajectory, server)
        self._keep(self._context, trajectory, tokens)
        self._open.setdefault((server, trajectory), []).append(_Open(tag, tokens, most, now))
        return server

    def release(
        self, server: str, trajectory: str | None = None, written: int | None = None, now: float = math.nan
    ) -> None:
        """A request has ended.

        Args:
            written: its tokens. None: they are estimated by the time that it took on its pool.
        """
        begun = None if trajectory is None else self._open.get((server, trajectory))
        if trajectory is not None and not begun:
            return  # of a server that was lost since
        if self.under_way.get(server, 0) > 0:
            self.under_way[server] -= 1
        if trajectory is None or not begun:
            return
        request = begun.pop(0)
        if not begun:
            del self._open[server, trajectory]
        tokens = float(0 if written is None else written)
        if written is None:
            if math.isnan(now):
                return
            pool = self.pools[self._pool_of[server]]
            tokens = max(now - request.since - request.read / pool.prefill_rate, 0.0) * pool.decode_rate
        if request.most:
            tokens = min(tokens, request.most)
        seen = self._measured.setdefault(request.tag, _Measured())
        keep = self.decay if seen.known else 0.0
        seen.read = keep * seen.read + (1 - keep) * request.read
        seen.written = keep * seen.written + (1 - keep) * tokens
        seen.known = True

    def cost(self, pool: str, tag: str) -> float:
        """Seconds of a turn of this tag on a pool, as it was measured, times its load."""
        seen, spec, members = self._measured.get(tag), self.pools[pool], self._members[pool]
        seconds = 1.0 if seen is None else seen.read / spec.prefill_rate + seen.written / spec.decode_rate
        return seconds * (1 + sum(self.under_way[s] for s in members) / (spec.capacity * len(members)))

    def _pool(self, tag: str, allowed: Sequence[str]) -> str | None:
        free = [name for name in allowed if self._has_place(name)]
        if not free:
            return None
        return free[0] if tag in self.tags else min(free, key=lambda name: self.cost(name, tag))

    def _has_place(self, pool: str) -> bool:
        return any(self.under_way[s] < self.pools[pool].capacity for s in self._members[pool])

    def _usable(self, server: str, allowed: Sequence[str]) -> bool:
        pool = self._pool_of.get(server)
        return pool in allowed and self.under_way[server] < self.pools[pool].capacity  # type: ignore[index]

    def _keep(self, memory: OrderedDict[str, str] | OrderedDict[str, int], trajectory: str, value: str | int) -> None:
        memory[trajectory] = value  # type: ignore[assignment]
        memory.move_to_end(trajectory)
        while len(memory) > self.remembered:
            memory.popitem(last=False)

    def _must_be_pools(self, names: Sequence[str], who: str) -> None:
        unknown = [name for name in names if name not in self.pools]
        if unknown:
            raise ConfigError(f"{who} names the pool {unknown[0]!r}. The pools are {', '.join(self.pools)}.")
