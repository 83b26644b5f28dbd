"""The affinity router of a real run, which writes down where it sent every request and how long that took."""

from __future__ import annotations

import time

from verl_probes import note

from rl_plugins.verl.router import AffinityLoadBalancer


class NotedBalancer(AffinityLoadBalancer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.begun = {}

    def acquire_server(self, request_id, prompt_ids=(), sampling_params=None):
        server, handle = super().acquire_server(request_id, prompt_ids, sampling_params)
        self.begun.setdefault((request_id, server), []).append(time.time())
        load, moved = dict(self.router.under_way), self.router.moved
        note("routed", request=request_id, server=server, tokens=len(prompt_ids), load=load, moved=moved)
        return server, handle

    def release_server(self, server_id, request_id=None):
        super().release_server(server_id, request_id)
        took = time.time() - self.begun[request_id, server_id].pop()
        note("released", request=request_id, server=server_id, took=took)
