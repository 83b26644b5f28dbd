"""RollArt's affinity router as verl's own router plug-in (`actor_rollout_ref.rollout.router_config_path`).

The option names a YAML file:

    router_class: rl_plugins.verl.router.AffinityLoadBalancer
    pools:
      - {name: h800, servers: ["10.0.1.*"], capacity: 64, prefill_rate: 40000, decode_rate: 40}
      - {name: h20, servers: ["10.0.2.*"], capacity: 64, prefill_rate: 8000, decode_rate: 60}
    tags: {swe: [h800], math: [h20, h800]}   # task tag -> allowed pools, best first
    tag_pattern: "^(.*?)[|]"                 # its first group is the tag in a request id

`servers` are patterns of verl's server addresses. `replicas: [0, 1]` names servers by the order in which verl adds them
instead. With several pools the router reads the length of each prompt to measure the tags that have no list.

verl starts all replicas with one rollout config. Replicas on hardware of different kinds are a matter of your Ray
cluster. The rule and its parameters: `rl_plugins.tools.disaggregated.router`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.tools.disaggregated.router import AffinityRouter, Pool

KEYS = ("router_class", "pools", "tags", "tag_pattern", "decay", "remembered")
POOL_KEYS = ("name", "servers", "replicas", "capacity", "prefill_rate", "decode_rate")


class AffinityLoadBalancer:
    """verl's protocol `RequestLoadBalancer` on an `AffinityRouter`. verl makes a Ray actor of it.

    Args:
        servers: address -> handle of its actor.
        config: the YAML file.
        clock: seconds, to measure how long requests take.

    Raises:
        ConfigError: an option that is unknown or out of range, or a server that belongs to no pool.
    """

    def __init__(
        self, servers: Mapping[str, Any], config: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        _known(config, KEYS, "The router config")
        pools = config.get("pools") or []
        for i, pool in enumerate(pools):
            _known(pool, POOL_KEYS, f"Pool {i} of the router config")
            if not pool.get("name") or ("servers" in pool) == ("replicas" in pool):
                raise ConfigError(
                    f"Pool {i} of the router config is {shown(dict(pool))}. Give it a `name` and either `servers` "
                    f"(patterns of addresses) or `replicas` (numbers of servers in verl's order)."
                )
        self._places = [(p["name"], tuple(p.get("servers", ())), tuple(p.get("replicas", ()))) for p in pools]
        self._clock, self._handles, self._numbers = clock, dict(servers), dict[str, int]()
        self._pattern = re.compile(config.get("tag_pattern") or r"^(.*?)\|")
        numbers = ("capacity", "prefill_rate", "decode_rate")
        specs = [Pool(p["name"], **{k: p[k] for k in numbers if k in p}) for p in pools]
        options = {k: config[k] for k in ("decay", "remembered") if k in config}
        self.router = AffinityRouter(specs, {}, config.get("tags"), **options)
        self.router.add(self._pools_of(servers))

    def acquire_server(
        self, request_id: str, prompt_ids: Any = (), sampling_params: Mapping[str, Any] | None = None
    ) -> tuple[str, Any]:
        """The server of a request and its handle.

        Raises:
            RuntimeError: no server that the request may use is there. verl knows this text and may wait for one.
        """
        sampling = sampling_params or {}
        most = int(sampling.get("max_tokens") or sampling.get("max_new_tokens") or 0)
        tag = self._tag(request_id)
        server = self.router.assign(request_id, tag, len(prompt_ids), most, self._clock())
        if server is None:
            raise RuntimeError(
                f"No available servers in load balancer: request {request_id} may use the pools "
                f"{', '.join(self.router.allowed(tag))}, and none of them has a server."
            )
        return server, self._handles[server]

    def require_acquire_fields(self) -> list[str]:
        """Prompts are needed only where there is something to choose between."""
        return ["prompt_ids", "sampling_params"] if len(self._places) > 1 else []

    def require_release_fields(self) -> list[str]:
        """The request, whose time is measured."""
        return ["request_id"]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """A request has ended."""
        self.router.release(server_id, request_id, now=self._clock())

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Further servers.

        Raises:
            ConfigError: a server that belongs to no pool.
        """
        pools = self._pools_of(servers)
        self._handles.update(servers)
        self.router.add(pools)

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        """Servers that are gone; their trajectories go elsewhere."""
        self.router.remove(server_ids)
        for server in server_ids:
            self._handles.pop(server, None)

    def get_all_servers(self) -> list[str]:
        """Addresses of all servers."""
        return list(self.router.under_way)

    def get_total_inflight(self) -> int:
        """Requests under way."""
        return sum(self.router.under_way.values())

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Lets every trajectory choose again."""
        return {"cleared_entries": self.router.forget(), "server_loads": dict(self.router.under_way)}

    def get_status(self) -> dict[str, Any]:
        """Loads, and what each pool got so far."""
        return {
            "servers": dict(self.router.under_way),
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self.router.under_way),
            "registered_handles": list(self._handles),
            "routed": dict(self.router.routed),
            "moved": self.router.moved,
        }

    def _tag(self, request_id: str) -> str:
        found = self._pattern.search(request_id)
        return (found.group(1) if found.re.groups else found.group()) if found else ""

    def _pools_of(self, servers: Mapping[str, Any]) -> dict[str, str]:
        found = {}
        for server in servers:
            number = self._numbers.setdefault(server, len(self._numbers))
            for name, patterns, replicas in self._places:
                if number in replicas or any(fnmatchcase(server, p) for p in patterns):
                    found[server] = name
                    break
            else:
                raise ConfigError(
                    f"Server {server}, number {number} of verl's, belongs to no pool of the router config. Add a "
                    f'pattern that it matches to `servers` of a pool ("*" matches all), or its number to `replicas`.'
                )
        return found


def _known(given: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    unknown = [key for key in given if key not in allowed]
    if unknown:
        raise ConfigError(f"{what} has the option {unknown[0]!r}. It may have: {', '.join(allowed)}.")
