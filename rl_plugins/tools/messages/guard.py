"""The lineage guard of From Spark to Fire (2603.04474): claims are checked before a receiver reads a message."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from rl_plugins.core.errors import ConfigError, MethodError, shown
from rl_plugins.kit.services import Failure, Service
from rl_plugins.tools.messages.lineage import TAG, Claim, Lineage, Status, key
from rl_plugins.tools.messages.rules import Verdict, check_arithmetic, compare_claims, read_verdict, split_claims

Policy = Literal["speed", "balanced", "strict"]
AT_A_TIME = 8  # claims of a message whose verifier is asked at a time
_SPACE = re.compile(r"\s*")
WITHHELD = "[withheld: no claim of this message was released]"


@dataclass(frozen=True)
class GuardDecision:
    """What becomes of a message.

    Attributes:
        released: what the receiver reads; None: the sender should write it again.
        feedback: to the sender: the rejected claims, and what speaks against each; empty if none was rejected.
        record: of this check, plain data that can be written as JSON. `Lineage.from_log` and `replay` read it.
    """

    released: str | None
    feedback: str
    record: dict[str, Any]


class LineageGuard:
    """Checks the claims of messages between agents. The topology of the agents stays as it is.

    1. `splitter` splits a message into claims.
    2. `entailment` compares each with the confirmed claims: green (follows), red (contradicts) or yellow (unknown).
    3. `policy` says which yellow claims `verifier` is asked about, each once:
       speed: none. balanced: those of senders in `hubs`. strict: all.
       Its green confirms the claim, so that later claims are compared with it; its red rejects the claim.
    4. A message with a red claim goes back to its sender with the evidence, at most K = `retries` times. After that,
       red claims are dropped. Yellow ones are released with a tag before them and are never confirmed.

    A message without red and yellow claims is released unchanged, and an edited one keeps its other text. What the
    sender wrote, its tokens and its loss are not touched: only what the receiver reads changes.

    What fails leaves a claim yellow: a callable that raises, hangs longer than `timeout` or answers nonsense. After
    `most_failures` failures in a row the verifier is not asked again. A message whose splitter fails is one claim.

    A guard is for one rollout; `fresh()` gives one for the next rollout. Messages wait for each other. Use it in one
    event loop at a time.

    Args:
        policy: see above.
        splitter: function(message) -> list of texts; default: sentences and JSON fields.
        entailment: function({"claim", "premises", "known"}) -> verdict, or (verdict, places of the premises it rests
            on); default: `compare_claims`. `known` is the premises as text. `read_verdict` lists the verdicts.
        verifier: function({"claim", "sender", "message", "known"}) -> verdict, or (verdict, evidence as text); default:
            `check_arithmetic`. Each of the three is an ordinary function, a coroutine function, or an endpoint
            (`messages.endpoints`).
        hubs: names of the senders that `balanced` verifies. `find_hubs` reads them from the graph.
        retries: K.
        timeout: seconds of one call of a callable of yours.
        most_failures: see above.
        given: texts that are confirmed from the start, for example the task.

    Attributes:
        lineage: every claim so far.
        log: the record of every check.
        counts: messages, claims, green, yellow, red, verified (calls of the verifier), failed (calls without a usable
            answer), sent_back, broken (messages released without their red claims), edited.

    Raises:
        ConfigError: a parameter out of range, or `balanced` without hubs.

    Source: arXiv 2603.04474. Rules and defaults are ours. The paper's attack is not built.
    """

    def __init__(
        self,
        policy: Policy = "balanced",
        *,
        splitter: Callable[..., Any] | None = None,
        entailment: Callable[..., Any] | None = None,
        verifier: Callable[..., Any] | None = None,
        hubs: Collection[str] = (),
        retries: int = 1,
        timeout: float = 30.0,
        most_failures: int = 3,
        given: Sequence[str] = (),
    ) -> None:
        if policy not in get_args(Policy):
            raise ConfigError(f"`policy` is {shown(policy)}. It must be one of {', '.join(get_args(Policy))}.")
        if isinstance(hubs, str) or (policy == "balanced" and not hubs):
            raise ConfigError(
                f"`hubs` is {shown(hubs)}. It must be a list of the senders that `policy: balanced` verifies; name "
                f"them, or set `policy` to speed (verifies none) or strict (verifies all)."
            )
        for name, number, least in (("retries", retries, 0), ("most_failures", most_failures, 1)):
            if number < least:
                raise ConfigError(f"`{name}` is {number}. It must be at least {least}.")
        self.policy, self.hubs, self.retries = policy, frozenset(hubs), retries
        self.timeout, self.most_failures, self.given = timeout, most_failures, tuple(given)
        self._splitter = _service(splitter, "the splitter", _texts, timeout)
        self._entailment = _service(entailment, "the entailment", _with_places, timeout)
        self._verifier = _service(verifier, "the verifier", _with_evidence, timeout)
        self._start()

    def _start(self) -> None:
        self.lineage, self.counts = Lineage(), Counter[str]()
        self.log: list[dict[str, Any]] = []
        self._verdicts: dict[str, tuple[Verdict, str]] = {}
        self._failures_in_row = 0
        self._turn = asyncio.Lock()
        self.confirm(self.given)

    def fresh(self) -> LineageGuard:
        """A guard with the same settings and callables, and an empty lineage."""
        other = object.__new__(LineageGuard)
        other.__dict__.update(self.__dict__)
        other._start()
        return other

    def confirm(self, texts: Sequence[str], author: str = "given") -> None:
        """Adds claims that are known to be true. `log` has them too."""
        claims = [self.lineage.add(text, author, "confirmed") for text in texts]
        if claims:
            self.log.append(_record(author, "", 0, 0, "", None, [_entry(c, "green", "given", "") for c in claims]))

    async def check(
        self, sender: str, receiver: str, message: str, *, attempt: int = 0, round: int = 0
    ) -> GuardDecision:
        """What becomes of a message that the sender wrote at this attempt (0: its first).

        From attempt K on it is released, without its red claims.
        """
        async with self._turn:
            return await self._checked(sender, receiver, message, attempt, round)

    async def _checked(self, sender: str, receiver: str, message: str, attempt: int, round: int) -> GuardDecision:
        claims = await self._split(message)
        texts = {key(c): c for c in claims}
        confirmed = self.lineage.confirmed()
        premises = [c.text for c in confirmed]
        found = await asyncio.gather(*(self._judge(k, text, confirmed, premises) for k, text in texts.items()))
        judged = dict(zip(texts, found, strict=True))
        if self.policy == "strict" or (self.policy == "balanced" and sender in self.hubs):
            yellow = [k for k, (verdict, *_) in judged.items() if verdict == "yellow"]
            unknown = [k for k in yellow if k not in self._verdicts]
            for i in range(0, len(unknown), AT_A_TIME):
                some = unknown[i : i + AT_A_TIME]
                await asyncio.gather(*(self._verify(k, texts[k], sender, message) for k in some))
            for k in yellow:
                verdict, evidence = self._verdicts[k]
                judged[k] = (verdict, "verifier", evidence, judged[k][3])
        reds = [c for c in claims if judged[key(c)][0] == "red"]
        again = bool(reds) and attempt < self.retries
        entries = []
        for c in claims:
            verdict, source, evidence, parents = judged[key(c)]
            status = _status(verdict, source)
            released = not again and verdict != "red"
            node = self.lineage.add(c, sender, status, round, parents=parents, released=released)
            entries.append(_entry(node, verdict, source, evidence))
        verdicts = [entry["verdict"] for entry in entries]
        released_text = None if again else _edited(message, claims, verdicts)
        self.counts.update({"messages": 1, "claims": len(claims), **Counter(verdicts)})
        self.counts.update({"sent_back": again, "broken": bool(reds) and not again})
        self.counts["edited"] += released_text not in (None, message)
        record = _record(sender, receiver, round, attempt, message, released_text, entries)
        self.log.append(record)
        return GuardDecision(released_text, _feedback(entries), record)

    async def process(
        self,
        sender: str,
        receiver: str,
        message: str,
        revise: Callable[[str], Any] | None = None,
        *,
        round: int = 0,
    ) -> tuple[str, list[dict[str, Any]]]:
        """What the receiver reads, and the records of the checks.

        Args:
            revise: function(feedback) -> the sender's next message, a coroutine function or not. Without it, or when
                it fails, red claims are dropped at once.
        """
        again = _service(revise, "the sender", _text, self.timeout)
        records = []
        for attempt in range(self.retries + 1):
            last = attempt == self.retries or again is None
            decision = await self.check(
                sender, receiver, message, attempt=self.retries if last else attempt, round=round
            )
            records.append(decision.record)
            if decision.released is None and again is not None:
                revised = await _asked(again, decision.feedback)
                if not isinstance(revised, Failure):
                    message = revised
                    continue
                self.counts["failed"] += 1
                decision = await self.check(sender, receiver, message, attempt=self.retries, round=round)
                records.append(decision.record)
            assert decision.released is not None
            return decision.released, records
        raise AssertionError("the last attempt releases")

    async def _split(self, message: str) -> list[str]:
        if self._splitter is None:
            return split_claims(message)
        found = await _asked(self._splitter, message)
        if isinstance(found, Failure):
            self.counts["failed"] += 1
            return [message] if message.strip() else []
        return list(found)

    async def _judge(
        self, same: str, text: str, confirmed: list[Claim], premises: list[str]
    ) -> tuple[Verdict, str, str, tuple[int, ...]]:
        """Verdict, where it is from, evidence, parents."""
        known = self.lineage.confirmed_as(text)
        if known is not None:
            return "green", "lineage", "", (known.id,)
        if same in self._verdicts:
            verdict, evidence = self._verdicts[same]
            return verdict, "lineage", evidence, ()
        places: tuple[int, ...]
        if self._entailment is None:
            verdict, places = compare_claims(text, premises)
        else:
            answer = await _asked(self._entailment, {"claim": text, "premises": premises, "known": "\n".join(premises)})
            if isinstance(answer, Failure):
                self.counts["failed"] += 1
                return "yellow", "failed", answer.error, ()
            verdict, places = answer
            places = tuple(i for i in places if 0 <= i < len(premises))
        evidence = "; ".join(premises[i] for i in places) if verdict == "red" else ""
        return verdict, "entailment", evidence, tuple(confirmed[i].id for i in places)

    async def _verify(self, same: str, text: str, sender: str, message: str) -> None:
        if self._verifier is None:
            verdict = check_arithmetic(text)
            self._verdicts[same] = (verdict, "the calculation is wrong" if verdict == "red" else "")
            return
        if self._failures_in_row >= self.most_failures:
            self._verdicts[same] = ("yellow", "the verifier failed too often and was not asked")
            return
        known = "\n".join(c.text for c in self.lineage.confirmed())
        self.counts["verified"] += 1
        answer = await _asked(self._verifier, {"claim": text, "sender": sender, "message": message, "known": known})
        if isinstance(answer, Failure):
            self.counts["failed"] += 1
            self._failures_in_row += 1
            answer = ("yellow", answer.error)
        else:
            self._failures_in_row = 0
        self._verdicts[same] = answer


def find_hubs(reads: Any, names: Sequence[str]) -> list[str]:
    """Agents that at least two others read, and more than the mean over all agents. A chain and a full graph have none.

    Args:
        reads: (agents, agents), a_ij = 1 if i reads j.
        names: of the agents.
    """
    readers = np.asarray(reads, np.float64).sum(0)
    if len(readers) != len(names):
        raise ConfigError(f"`names` has {len(names)} entries for {len(readers)} agents. Name each agent once.")
    return [name for name, n in zip(names, readers, strict=True) if n > max(1.0, readers.mean())]


async def replay(records: Iterable[Mapping[str, Any]], guard: LineageGuard) -> list[dict[str, Any]]:
    """Sends the logged messages through another guard, for example one with another policy, and returns its records.

    What a sender would have written after another feedback is not known, so messages that were sent back are
    replayed as they were logged. Claims of `LineageGuard.confirm` are confirmed again.
    """
    before = len(guard.log)
    for r in records:
        if not r["receiver"]:
            guard.confirm([c["text"] for c in r["claims"]], r["sender"])
        else:
            await guard.check(r["sender"], r["receiver"], r["message"], attempt=r["attempt"], round=r["round"])
    return guard.log[before:]


# ---- small parts


def _service(
    function: Callable[..., Any] | None, name: str, answer: Callable[[Any], Any], timeout: float
) -> Service | None:
    if function is None:
        return None
    return Service(function, name, answer=answer, timeout=timeout, retries=0, cache_size=0)


async def _asked(service: Service, item: Any) -> Any:
    try:
        return await service.ask_one(item)
    except MethodError as e:  # too many calls that never returned
        return Failure(str(e))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text.")
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{shown(value)} is no list of texts.")
    return [v for v in value if key(v)]


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)


def _with_places(value: Any) -> tuple[Verdict, tuple[int, ...]]:
    verdict, places = _pair(value)
    if places is not None and not (isinstance(places, Sequence) and all(isinstance(i, int) for i in places)):
        raise ValueError(f"{shown(places)} is no list of places.")
    return read_verdict(verdict), tuple(places or ())


def _with_evidence(value: Any) -> tuple[Verdict, str]:
    verdict, evidence = _pair(value)
    return read_verdict(verdict), "" if evidence is None else str(evidence)


def _status(verdict: Verdict, source: str) -> Status:
    if verdict == "green":
        return "confirmed" if source in ("verifier", "lineage") else "entailed"
    return "rejected" if verdict == "red" else "unverified"


def _entry(claim: Claim, verdict: Verdict, source: str, evidence: str) -> dict[str, Any]:
    return {
        "id": claim.id,
        "text": claim.text,
        "verdict": verdict,
        "source": source,
        "evidence": evidence,
        "status": claim.status,
        "parents": list(claim.parents),
        "released": claim.released,
    }


def _record(
    sender: str,
    receiver: str,
    round: int,
    attempt: int,
    message: str,
    released: str | None,
    claims: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "sender": sender,
        "receiver": receiver,
        "round": round,
        "attempt": attempt,
        "message": message,
        "released": released,
        "claims": claims,
    }


def _feedback(entries: list[dict[str, Any]]) -> str:
    red = [e for e in entries if e["verdict"] == "red"]
    if not red:
        return ""
    lines = [f"- {e['text']}" + (f" (against it: {e['evidence']})" if e["evidence"] else "") for e in red]
    return "\n".join(["These claims of your message were rejected. Write it again without them:", *lines])


def _edited(message: str, claims: list[str], verdicts: list[str]) -> str:
    """The message without its red claims and with a tag before each yellow one.

    Claims that are parts of the message in its order are edited in place; of others the released ones are listed.
    """
    if all(v == "green" for v in verdicts):
        return message
    if all(v == "red" for v in verdicts):
        return WITHHELD
    pieces: list[str] = []
    at, in_place = 0, True
    for claim, verdict in zip(claims, verdicts, strict=True):
        found = message.find(claim, at)
        if found < 0:
            in_place = False
            break
        pieces += [message[at:found], _shown(claim, verdict)]
        at = found + len(claim)
        if verdict == "red":
            at = _SPACE.match(message, at).end()  # type: ignore[union-attr]
    if not in_place:
        pieces = ["\n".join(text for c, v in zip(claims, verdicts, strict=True) if (text := _shown(c, v)))]
    return "".join([*pieces, message[at:] if in_place else ""]).strip()


def _shown(claim: str, verdict: str) -> str:
    if verdict == "red":
        return ""
    return f"{TAG} {claim}" if verdict == "yellow" and not claim.startswith(TAG) else claim
