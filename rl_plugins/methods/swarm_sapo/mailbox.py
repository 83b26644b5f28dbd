"""The traffic of a node with its exchange: at most a time-out long, and rare where the exchange does not answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_plugins import MethodError
from rl_plugins.kit.services import Failure, Service
from rl_plugins.methods.swarm_sapo.exchange import Exchange
from rl_plugins.methods.swarm_sapo.packages import is_whole, sender_of

LONGEST_REST = 64  # batches without a try, after several failures
TRIES = 3  # readings of a file that is not whole


@dataclass
class Arrived:
    """What a look at the exchange found.

    Attributes:
        listed: names of files of others; None if it was not told.
        files: name -> bytes of those that were read, in the order of their names.
        refused: names of files that are not read again: too long, or never whole.
        passed: names of files that are never read, because their sender has enough newer ones.
        error: why the look ended early; empty if it did not.
    """

    listed: list[str] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    error: str = ""


class Mailbox:
    """Reads and writes an exchange in a thread of its own.

    After k failures in a row, the next 2^k - 1 batches make no try (64 at most).

    Args:
        exchange: where.
        node: the own name; files of it are not read.
        timeout: seconds that one look, or one delivery, may take.
        most: bytes of a file.
        per_sender: files of one sender that are read in one look, the newest ones. The older ones are never read.
    """

    def __init__(self, exchange: Exchange, node: str, timeout: float, most: int, per_sender: int) -> None:
        self.exchange, self.node, self.most, self.per_sender = exchange, node, most, per_sender
        self.seconds = 0.8 * timeout  # after which a look begins no further file
        self._calls = Service(
            lambda call: call(),
            "the exchange",
            answer=lambda value: value,
            timeout=timeout,
            retries=0,
            concurrency=1,
            cache_size=0,
        )
        self._failed, self._rest_until = 0, 0
        self._tries: dict[str, int] = {}

    def resting(self, batch: int) -> bool:
        """Whether this batch makes no try, because earlier ones failed."""
        return batch < self._rest_until

    def look(self, batch: int, seen: Collection[str]) -> Arrived:
        """The files of others that are new, as many as the time allows.

        Args:
            seen: names that are not read again.
        """
        found = Arrived()
        found.error = self._done(batch, lambda: self._look(found, set(seen)))
        files = found.files.copy()  # a look that takes too long still writes into its own
        return Arrived(found.listed, dict(sorted(files.items())), list(found.refused), list(found.passed), found.error)

    def deliver(self, batch: int, files: dict[str, bytes], old: Sequence[str]) -> str:
        """Writes files and removes old ones. Returns the error, or an empty text."""

        def call() -> None:
            for name, data in files.items():
                self.exchange.put(name, data)
            for name in old:
                self.exchange.remove(name)

        return self._done(batch, call)

    def _look(self, found: Arrived, seen: set[str]) -> None:
        """Fills `found` as it goes, so that what was read counts even if the rest takes too long."""
        end = time.monotonic() + self.seconds
        names = sorted(n for n in self.exchange.names() if sender_of(n) not in (None, self.node))
        found.listed = names
        self._tries = {n: k for n, k in self._tries.items() if n in names}
        of_sender: dict[str | None, list[str]] = {}
        for name in names:
            if name not in seen:
                of_sender.setdefault(sender_of(name), []).append(name)
        found.passed += (n for group in of_sender.values() for n in group[: -self.per_sender])
        for name in (n for group in of_sender.values() for n in group[-self.per_sender :]):
            if time.monotonic() > end:
                return
            try:
                data = self.exchange.get(name, self.most + 1)
            except FileNotFoundError:  # its sender removed it
                continue
            if len(data) <= self.most and is_whole(name, data):
                found.files[name] = data
                continue
            self._tries[name] = self._tries.get(name, 0) + 1
            if len(data) > self.most or self._tries[name] >= TRIES:
                found.refused.append(name)

    def _done(self, batch: int, call: Callable[[], Any]) -> str:
        try:
            answer = self._calls.ask([call], strict=False)[0]
        except MethodError as e:  # too many calls never returned
            answer = Failure(str(e))
        if not isinstance(answer, Failure):
            self._failed = 0
            return ""
        self._failed += 1
        self._rest_until = batch + min(2**self._failed, LONGEST_REST)
        return answer.error


def within(entries: Iterable[dict[str, Any]], per_sender: int, most: int) -> list[dict[str, Any]]:
    """What each sender sent last, and of that what arrived last, in their order."""
    left: Counter[str] = Counter()
    listed = list(entries)
    newest = list[int]()
    for i in sorted(range(len(listed)), key=lambda i: listed[i]["sent"])[::-1]:
        left[listed[i]["sender"]] += 1
        if left[listed[i]["sender"]] <= per_sender:
            newest.append(i)
    stays = set(sorted(newest, key=lambda i: (listed[i]["arrived"], i))[-most:])
    return [entry for i, entry in enumerate(listed) if i in stays]
