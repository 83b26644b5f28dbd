"""The guard per message, by policy and number of confirmed claims, and a contract per packet: CPU time, arms in turns.

A message has six claims: one that is confirmed, one that contradicts a confirmed one, a calculation, and three that are
new in every message. "Verifier": a callable that cannot tell, asked about each new claim through a thread. The guard's
time includes the log and the lineage. Ratios are taken in the same repetition: of the guard to the policy speed with 10
confirmed claims, of a contract to reading the packet with `json.loads`.

    python benchmarks/messages.py --out benchmarks/messages.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rl_plugins.tools.messages import Contracts, LineageGuard

CONFIRMED = (10, 100, 1000)
MESSAGES, PACKETS = 50, 2000
GUARDS: dict[str, dict[str, Any]] = {
    "speed": {"policy": "speed"},
    "balanced, not a hub": {"policy": "balanced", "hubs": ["other"]},
    "strict, arithmetic": {"policy": "strict"},
    "strict, verifier": {"policy": "strict", "verifier": lambda _: None},
}
SUMMARY = {"text": "The store is closed on Monday. " * 8, "confidence": 0.5}
PACKETS_OF: dict[str, Any] = {
    "valid": json.dumps(SUMMARY),
    "repaired": json.dumps(SUMMARY | {"confidence": 1.5, "more": 1}),
    "rejected": json.dumps({"confidence": 0.5}),
}


def message(i: int) -> str:
    new = " ".join(f"Remark {i} of kind {kind} stands alone." for kind in "abc")
    return f"Item 3 weighs 16 kg. Item 5 weighs 99 kg. We have 3 * 4 = 12. {new}"


def guard_ms(confirmed: int, **options: Any) -> float:
    given = [f"Item {k} weighs {3 * k + 7} kg." for k in range(confirmed)]
    guard = LineageGuard(given=given, retries=0, **options)

    async def send() -> float:
        await guard.check("a", "b", message(-1))  # what is made at the first call
        begin = time.process_time()
        for i in range(MESSAGES):
            await guard.check("a", "b", message(i))
        return 1000 * (time.process_time() - begin) / MESSAGES

    return asyncio.run(send())


def fresh_ms(confirmed: int) -> float:
    """A guard for the next rollout, and its confirmed claims."""
    facts = [f"Item {k} weighs {3 * k + 7} kg." for k in range(confirmed)]
    guard = LineageGuard("speed")
    begin = time.process_time()
    for _ in range(10):
        guard.fresh().confirm(facts)
    return 1000 * (time.process_time() - begin) / 10


def packet_us(packet: str, check: Callable[[str], Any]) -> float:
    begin = time.process_time()
    for _ in range(PACKETS):
        check(packet)
    return 1e6 * (time.process_time() - begin) / PACKETS


def told(times: dict[str, list[float]], base: str) -> dict[str, Any]:
    return {
        name: {
            "median": round(median(of[1:]), 3),
            "least": round(min(of[1:]), 3),
            "ratio": round(median(x / y for x, y in zip(of[1:], times[base][1:], strict=True)), 2),
        }
        for name, of in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repetitions", type=int, default=9)
    args = parser.parse_args()
    guards: dict[str, list[float]] = {}
    packets: dict[str, list[float]] = {}
    for _ in range(args.repetitions + 1):  # the first one is not counted
        for n in CONFIRMED:
            for name, options in GUARDS.items():
                guards.setdefault(f"{name}, {n} confirmed", []).append(guard_ms(n, **options))
            guards.setdefault(f"fresh guard, {n} confirmed", []).append(fresh_ms(n))
        packets.setdefault("json.loads", []).append(packet_us(PACKETS_OF["valid"], json.loads))
        for name, packet in PACKETS_OF.items():
            contracts = Contracts()
            took = packet_us(packet, lambda p, c=contracts: c.check("reflex", "summary", p))
            assert contracts.counts == {name: PACKETS}
            packets.setdefault(name, []).append(took)
    results = {
        "claims_per_message": 6,
        "guard_ms_per_message": told(guards, "speed, 10 confirmed"),
        "contract_us_per_packet": told(packets, "json.loads"),
    }
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
