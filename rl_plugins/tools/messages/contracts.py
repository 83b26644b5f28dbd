"""Contracts for messages between agents of several layers, after CTHA (2601.10738): schemas, authority, an arbiter."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_plugins.core.errors import ConfigError, MethodError, shown
from rl_plugins.core.files import read_json
from rl_plugins.tools.messages.schemas import KINDS, check_schema, mended, schema_errors

LAYERS = ("reflex", "tactical", "strategic", "institutional")  # fast to slow
NO_OP = "none"

Direction = Literal["up", "down", "broadcast"]


@dataclass(frozen=True)
class Contract:
    """What a packet of one kind may hold.

    Args:
        name: of the kind, "summary" for instance.
        schema: a JSON Schema of these keywords: type, enum, minimum, maximum, maxLength, maxItems, items, properties,
            required, additionalProperties (a boolean), description.
        size: most characters of the packet as JSON.
        direction: up (to a slower layer), down (to a faster one) or broadcast (to all).

    Raises:
        ConfigError: another keyword or type, or a size below 2.
    """

    name: str
    schema: Mapping[str, Any]
    size: int = 2000
    direction: Direction = "broadcast"

    def __post_init__(self) -> None:
        check_schema(self.schema, self.name)
        if self.size < 2:
            raise ConfigError(f"`size` of the contract {self.name} is {self.size}. It must be at least 2 characters.")
        if self.direction not in ("up", "down", "broadcast"):
            raise ConfigError(f"`direction` is {shown(self.direction)}. It must be up, down or broadcast.")

    def errors(self, packet: Any) -> list[str]:
        """What is wrong with a packet, in the order of the schema; empty: nothing."""
        try:
            found = list(schema_errors(packet, self.schema, "packet"))
            length = 0 if found else len(_json(packet))
        except RecursionError:
            return ["packet is nested too deeply to be checked"]
        if length > self.size:
            found.append(f"packet has {length} characters; {self.size} are allowed")
        return found


SUMMARY = Contract(
    "summary",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 1500},
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["text"],
        "additionalProperties": False,
    },
    direction="up",
)
PLAN = Contract(
    "plan",
    {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"type": "string", "maxLength": 500}, "maxItems": 20},
            "goal": {"type": "string", "maxLength": 500},
        },
        "required": ["steps"],
        "additionalProperties": False,
    },
    size=4000,
    direction="down",
)
POLICY = Contract(
    "policy",
    {
        "type": "object",
        "properties": {"rules": {"type": "array", "items": {"type": "string", "maxLength": 500}, "maxItems": 20}},
        "required": ["rules"],
        "additionalProperties": False,
    },
    size=4000,
)


def text_result() -> Contract:
    """A result that is a text of at most 2000 characters; longer ones are cut."""
    return Contract("result", {"type": "string", "maxLength": 1998})


@dataclass(frozen=True)
class Checked:
    """What became of a packet.

    Attributes:
        outcome: valid, repaired or rejected.
        packet: to deliver; None if rejected.
        errors: of the packet as it was given.
    """

    outcome: Literal["valid", "repaired", "rejected"]
    packet: Any
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """An action that an agent of some layer proposes.

    Args:
        agent: who.
        layer: one of the registry's.
        action: a name.
        urgency, confidence: in [0, 1].
    """

    agent: str
    layer: str
    action: str
    urgency: float = 0.0
    confidence: float = 1.0


@dataclass
class Contracts:
    """Contracts per layer, authority per layer, and an arbiter between layers.

    A packet is validated; if it is wrong it is repaired once; if it is wrong still it is rejected. Valid packets are
    delivered unchanged. An action outside of its layer's authority becomes the no-op.

    Args:
        of_layer: layer -> the contracts of the packets that it may send; layers from fast to slow.
        allowed: layer -> its actions; a layer that is not named may take any.
        repair: function(packet, errors) -> packet; default: `repaired`. One that raises repairs nothing.
        no_op: the action that does nothing; every layer may take it.
        weights: of urgency, authority and confidence in a proposal's priority.

    Attributes:
        counts: valid, repaired, rejected (packets), allowed, dropped (actions).

    Raises:
        ConfigError: a layer that is not one, or weights that are no numbers of 0 or more.

    Source: arXiv 2601.10738 for packets, authority and arbitration; schemas, sizes, repair and weights are ours.
    """

    of_layer: Mapping[str, Sequence[Contract]] = field(
        default_factory=lambda: {
            "reflex": (SUMMARY,),
            "tactical": (SUMMARY, PLAN),
            "strategic": (SUMMARY, PLAN),
            "institutional": (PLAN, POLICY),
        }
    )
    allowed: Mapping[str, Collection[str]] = field(default_factory=dict)
    repair: Callable[[Any, list[str]], Any] | None = None
    no_op: str = NO_OP
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.allowed) - set(self.of_layer))
        if unknown:
            raise ConfigError(f"`allowed` names the layer {unknown[0]}. The layers are {', '.join(self.of_layer)}.")
        if len(self.weights) != 3 or not all(math.isfinite(w) and w >= 0 for w in self.weights):
            raise ConfigError(f"`weights` is {shown(self.weights)}. It must be three finite numbers of 0 or more.")

    def check(self, layer: str, kind: str, packet: Any) -> Checked:
        """Validates a packet, repairs it once, or rejects it.

        Args:
            layer: of the sender.
            kind: name of the contract. One that the layer has no contract for is rejected.
            packet: plain data, or JSON as text.

        Raises:
            MethodError: no such layer.
        """
        checked = self._check(self._contracts(layer).get(kind), kind, packet)
        self.counts[checked.outcome] += 1
        return checked

    def _check(self, contract: Contract | None, kind: str, packet: Any) -> Checked:
        if contract is None:
            return Checked("rejected", None, (f"this layer has no authority to send a {kind}",))
        given = _read(packet, contract.schema.get("type"))
        errors = contract.errors(given)
        if not errors:
            return Checked("valid", packet)
        try:
            mended = (self.repair or (lambda p, _: repaired(p, contract)))(given, list(errors))
            if not contract.errors(mended):
                return Checked("repaired", mended, tuple(errors))
        except Exception as e:
            errors = [*errors, f"its repair failed: {type(e).__name__}: {e}"[:500]]
        return Checked("rejected", None, tuple(errors))

    @property
    def invalid_share(self) -> float:
        """Rejected packets / all packets; 0 before the first. A reward may lose this times a weight."""
        total = sum(self.counts[k] for k in ("valid", "repaired", "rejected"))
        return self.counts["rejected"] / total if total else 0.0

    def project(self, layer: str, action: str) -> str:
        """The action, or the no-op if the layer may not take it. Idempotent.

        Raises:
            MethodError: no such layer.
        """
        self._contracts(layer)
        may = self.allowed.get(layer)
        good = action == self.no_op or may is None or action in may
        self.counts["allowed" if good else "dropped"] += 1
        return action if good else self.no_op

    def priority(self, proposal: Proposal) -> float:
        """Weighted sum of urgency, authority and confidence.

        Authority is 0 for the fastest layer and 1 for the slowest, so by default the slow layer wins.

        Raises:
            MethodError: no such layer, or a number outside of [0, 1].
        """
        layers = list(self.of_layer)
        self._contracts(proposal.layer)
        for name in ("urgency", "confidence"):
            value = getattr(proposal, name)
            if not 0 <= value <= 1:
                raise MethodError(f"`{name}` of {proposal.agent}'s proposal is {shown(value)}. It must be in [0, 1].")
        authority = layers.index(proposal.layer) / max(len(layers) - 1, 1)
        urgency, rank, confidence = self.weights
        return urgency * proposal.urgency + rank * authority + confidence * proposal.confidence

    def arbitrate(self, proposals: Sequence[Proposal]) -> str:
        """Exactly one final action: the one of highest priority after projection; the no-op without proposals.

        A no-op gives way to any action. Ties go to the slower layer, then to the smaller name of the action and agent,
        so the order of the proposals does not matter.
        """
        legal = [(p, self.project(p.layer, p.action)) for p in proposals]
        layers = list(self.of_layer)
        ranked = sorted(
            (action == self.no_op, -self.priority(p), -layers.index(p.layer), action, p.agent) for p, action in legal
        )
        return ranked[0][3] if ranked else self.no_op

    def _contracts(self, layer: str) -> dict[str, Contract]:
        if layer not in self.of_layer:
            raise MethodError(f"The layer is {shown(layer)}. The layers are {', '.join(self.of_layer)}.")
        return {c.name: c for c in self.of_layer[layer]}


def repaired(packet: Any, contract: Contract) -> Any:
    """The packet brought within its contract where that needs no guess.

    A text that is no JSON becomes the field it can only belong to (a required string). Fields that are not allowed are
    dropped, numbers are set to the nearest bound, numbers in text are read, long texts and lists are cut, a single text
    becomes a list of one. A missing required field or another wrong type stays wrong.
    """
    schema = contract.schema
    if isinstance(packet, str) and schema.get("type") == "object":
        needed = schema.get("required", ())
        if len(needed) == 1 and schema.get("properties", {}).get(needed[0], {}).get("type") == "string":
            packet = {needed[0]: packet}
    return mended(packet, schema)


def _read(packet: Any, kind: str | None) -> Any:
    """A text that is JSON of the wanted type, read; anything else as it is."""
    if not isinstance(packet, str) or kind == "string":
        return packet
    try:
        found = read_json(packet)
    except ValueError:
        return packet
    return found if kind is None or isinstance(found, KINDS[kind]) else packet


def _json(packet: Any) -> str:
    try:
        return json.dumps(packet, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(packet)
